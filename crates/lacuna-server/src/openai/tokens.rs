//! `POST /tokenize` and `POST /detokenize`, in the form that vLLM has.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use lacuna_models::tokenizer::{AddSpecial, Decode, ParseSpecial, Special};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::http::body;
use crate::http::error::ApiError;
use crate::openai::messages::{self, ChatMessage};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tokenize {
    #[serde(default)]
    model: Option<String>,
    /// Text; or else `messages`.
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    messages: Option<Vec<ChatMessage>>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Detokenize {
    #[serde(default)]
    model: Option<String>,
    tokens: Vec<u32>,
}

pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    app.prepare(body, encode).await
}

pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    app.prepare(body, decode).await
}

fn encode(app: &App, object: Map<String, Value>) -> Result<Json<Value>, ApiError> {
    let asked: Tokenize = body::read(object)?;
    app.check_model(asked.model.as_deref())?;
    let tokens = match (asked.prompt, asked.messages) {
        (Some(text), None) => {
            let special = Special {
                add: match asked.add_special_tokens {
                    Some(false) => AddSpecial::No,
                    _ => AddSpecial::Yes,
                },
                parse: ParseSpecial::No,
            };
            app.model().tokenizer().encode(&text, special)?
        }
        (None, Some(messages)) => {
            app.conversation(&messages::for_template(messages)?, &[], Map::new())?
        }
        _ => {
            return Err(ApiError::field(
                "prompt",
                "give either `prompt` or `messages`",
            ));
        }
    };
    Ok(Json(json!({
        "count": tokens.len(),
        "max_model_len": app.engine.context_tokens(),
        "tokens": tokens,
    })))
}

fn decode(app: &App, object: Map<String, Value>) -> Result<Json<Value>, ApiError> {
    let asked: Detokenize = body::read(object)?;
    app.check_model(asked.model.as_deref())?;
    let text = app
        .model()
        .tokenizer()
        .decode(&asked.tokens, Decode::MARKUP);
    let text = text.map_err(|error| ApiError::field("tokens", error.to_string()))?;
    Ok(Json(json!({"prompt": text})))
}
