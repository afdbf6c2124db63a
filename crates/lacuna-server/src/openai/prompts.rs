//! The prompts of a completion, and what its reply says of them.

use lacuna_text::tokenizer::{Decode, ParseSpecial, Special};
use serde::Deserialize;

use crate::app::App;
use crate::http::error::ApiError;

/// Prompts of one request at most. Each takes a place in the queue, of which there are a few hundred.
const MOST_PROMPTS: usize = 128;

/// `prompt`, as it is sent.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of token ids, or a list of these"
)]
pub(crate) enum Prompts {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

/// One prompt: its tokens, and its text where that was sent.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    text: Option<String>,
}

impl Prompts {
    /// Each of them, at least one, and as many as there are `places` for them.
    pub(crate) fn read(self, app: &App, places: usize) -> Result<Vec<Prompt>, ApiError> {
        let count = match &self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::Lists(lists) => lists.len(),
        };
        let most = MOST_PROMPTS.min(places);
        if count == 0 || count > most {
            return Err(ApiError::field(
                "prompt",
                format!("{count} prompts, expected 1 to {most}"),
            ));
        }
        let encoded = |text: String| -> Result<Prompt, ApiError> {
            // As with every other server, a prompt may spell out the model's special tokens.
            let special = Special {
                parse: ParseSpecial::Yes,
                ..Special::PROMPT
            };
            let tokenizer = app.model().tokenizer();
            let tokens = tokenizer.encode_within(&text, special, &app.encode_limits())?;
            let text = Some(text);
            Ok(Prompt { tokens, text })
        };
        let given = |tokens| Prompt { tokens, text: None };
        match self {
            Self::Text(text) => Ok(vec![encoded(text)?]),
            Self::Tokens(tokens) => Ok(vec![given(tokens)]),
            Self::Texts(texts) => texts.into_iter().map(encoded).collect(),
            Self::Lists(lists) => Ok(lists.into_iter().map(given).collect()),
        }
    }
}

impl Prompt {
    /// Its text, to begin a reply with.
    pub(crate) fn text(&self, app: &App) -> Result<String, ApiError> {
        match &self.text {
            Some(text) => Ok(text.clone()),
            None => {
                let text = app.model().tokenizer().decode(&self.tokens, Decode::MARKUP);
                text.map_err(|error| ApiError::field("prompt", error.to_string()))
            }
        }
    }
}
