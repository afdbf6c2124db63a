//! `POST /tokenize` and `POST /detokenize`, in the form that vLLM has.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use lacuna_text::tokenizer::{AddSpecial, Decode, ParseSpecial, Special};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::app::{App, Prepared, Purpose};
use crate::http::body::{self, Arriving};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::openai::messages::{self, ChatMessage};

#[derive(Debug, Deserialize)]
struct Tokenize {
    #[serde(default)]
    model: Option<String>,
    /// Text; or else `messages`.
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    messages: Option<Vec<ChatMessage>>,
    /// Whether to put the tokens around a prompt that the model expects there; yes by default.
    #[serde(default)]
    add_special_tokens: Option<bool>,
    /// Whether special tokens are found in a prompt, as in those of completions; yes by default.
    #[serde(default)]
    parse_special: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Detokenize {
    #[serde(default)]
    model: Option<String>,
    tokens: Vec<u32>,
}

#[derive(Debug, Serialize)]
struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
}

/// The tokens of a prompt, as routers ask for them that follow what is in prefix caches.
#[derive(Debug, Serialize)]
pub(crate) struct Rendered {
    pub(crate) token_ids: Vec<u32>,
}

pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    body: Arriving,
) -> Result<Response, ApiError> {
    reply(app.prepare(body, Purpose::Tokens, encode).await?)
}

pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    body: Arriving,
) -> Result<Response, ApiError> {
    reply(app.prepare(body, Purpose::Text, decode).await?)
}

/// The reply, written while the memory for its parts is held.
pub(crate) fn reply(prepared: Prepared<(impl Serialize, Ignored)>) -> Result<Response, ApiError> {
    let (value, ignored) = &prepared.value;
    let mut response = Json(value).into_response();
    ignored.attach(&mut response);
    Ok(response)
}

fn encode(app: &App, object: Map<String, Value>) -> Result<(Tokenized, Ignored), ApiError> {
    let mut ignored = app.ignored();
    let asked: Tokenize = body::read(object, &mut ignored)?;
    app.check_model(asked.model.as_deref())?;
    let limits = app.any_tokens();
    let tokens = match (asked.prompt, asked.messages) {
        (Some(text), None) => {
            let special = Special {
                add: match asked.add_special_tokens {
                    Some(false) => AddSpecial::No,
                    _ => AddSpecial::Yes,
                },
                parse: match asked.parse_special {
                    Some(false) => ParseSpecial::No,
                    _ => ParseSpecial::Yes,
                },
            };
            app.model()
                .tokenizer()
                .encode_within(&text, special, &limits)?
        }
        (None, Some(messages)) => {
            let (messages, images) = messages::for_template(messages)?;
            app.check_images(&images)?;
            let prompt = app.conversation(&messages, &[], Map::new(), &limits)?;
            let mut tokens = prompt.tokens;
            app.make_places(&mut tokens, &images)?;
            tokens
        }
        _ => {
            return Err(ApiError::field(
                "prompt",
                "give either `prompt` or `messages`",
            ));
        }
    };
    let tokenized = Tokenized {
        count: tokens.len(),
        max_model_len: app.engine.context_tokens(),
        tokens,
    };
    Ok((tokenized, ignored))
}

fn decode(app: &App, object: Map<String, Value>) -> Result<(Value, Ignored), ApiError> {
    let mut ignored = app.ignored();
    let asked: Detokenize = body::read(object, &mut ignored)?;
    app.check_model(asked.model.as_deref())?;
    let text = app
        .model()
        .tokenizer()
        .decode(&asked.tokens, Decode::MARKUP);
    let text = text.map_err(|error| ApiError::field("tokens", error.to_string()))?;
    Ok((json!({"prompt": text}), ignored))
}
