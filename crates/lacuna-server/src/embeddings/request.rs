//! The body of `POST /v1/embeddings`.

use lacuna_engine::{Excess, TextEncoder};
use lacuna_models::Model;
use lacuna_text::tokenizer::EncodeLimits;
use serde::Deserialize;
use serde_json::Value;

use super::refused;
use crate::http::error::ApiError;

/// Texts of one request at most, as OpenAI has it.
pub(super) const MOST_TEXTS: usize = 2048;

#[derive(Debug, Deserialize)]
pub(super) struct Request {
    input: Input,
    #[serde(default)]
    pub(super) model: Option<String>,
    #[serde(default)]
    dimensions: Option<usize>,
    #[serde(default)]
    encoding_format: Option<Encoding>,
    /// The prompt that goes in front of each text, by the name that the model's folder gives it.
    #[serde(default)]
    prompt_name: Option<String>,
    /// Whether longer texts are cut instead of refused.
    #[serde(default)]
    truncate: Option<bool>,
    /// Who asks, for services that count by that. What is read as anything at all would be named as ignored.
    #[serde(default, rename = "user")]
    _user: Value,
}

/// `input`, as it is sent.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of token ids, or a list of these"
)]
enum Input {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

/// How an embedding is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Encoding {
    /// A list of numbers.
    Float,
    /// Its elements, as little-endian `f32` one after another, in base64.
    Base64,
}

impl Encoding {
    /// Bytes that an embedding takes at most, with what is around it.
    pub(super) const fn most_bytes(self, dimensions: usize) -> usize {
        /// Index and names of fields, and a share of what begins and ends the reply.
        const AROUND: usize = 512;
        let elements = match self {
            // The shortest decimals that are read as the same f32 have nine digits at most, with a sign, a
            // point, zeros before the first digit or an exponent, and a comma.
            Self::Float => 20 * dimensions,
            Self::Base64 => 6 * dimensions,
        };
        AROUND + elements
    }
}

impl Request {
    /// For some texts, of the one model.
    pub(super) fn of(texts: Vec<String>, dimensions: Option<usize>, truncate: bool) -> Self {
        Self {
            input: Input::Texts(texts),
            model: None,
            dimensions,
            encoding_format: Some(Encoding::Float),
            prompt_name: None,
            truncate: Some(truncate),
            _user: Value::Null,
        }
    }

    /// Whether there are no texts.
    pub(super) fn is_empty(&self) -> bool {
        matches!(&self.input, Input::Texts(texts) if texts.is_empty())
    }

    pub(super) fn encoding(&self) -> Encoding {
        self.encoding_format.unwrap_or(Encoding::Float)
    }

    /// The elements of an embedding that are asked for, of `most`.
    pub(super) fn dimensions(&self, most: usize) -> Result<usize, ApiError> {
        match self.dimensions {
            None => Ok(most),
            Some(asked) if (1..=most).contains(&asked) => Ok(asked),
            Some(asked) => Err(ApiError::field(
                "dimensions",
                format!("`dimensions` is {asked}, expected 1 to {most}"),
            )),
        }
    }

    /// The tokens of each text, with those that the vocabulary puts around one; lists of tokens are taken
    /// as they are.
    pub(super) fn texts(
        self,
        model: &Model,
        encoder: &TextEncoder,
        limits: &EncodeLimits,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let prompt = model.prompts().get(self.prompt_name.as_deref());
        let prompt = prompt.map_err(|error| ApiError::field("prompt_name", error.to_string()))?;
        let most = encoder.max_tokens();
        let excess = match self.truncate {
            Some(true) => Excess::Cut,
            Some(false) | None => Excess::Refuse,
        };
        let count = match &self.input {
            Input::Text(_) => 1,
            // An empty list is one of no texts, not a text of no tokens.
            Input::Tokens(tokens) => tokens.len().min(1),
            Input::Texts(texts) => texts.len(),
            Input::Lists(lists) => lists.len(),
        };
        if count == 0 || count > MOST_TEXTS {
            return Err(ApiError::field(
                "input",
                format!("{count} texts, expected 1 to {MOST_TEXTS}"),
            ));
        }
        let of_text = |(index, text): (usize, String)| {
            if text.is_empty() {
                return Err(wrong(index, "is empty"));
            }
            let text = match prompt {
                "" => text,
                prompt => format!("{prompt}{text}"),
            };
            let tokens = encoder.text(&text, excess, limits);
            tokens.map_err(|error| refused(error).of(&place(index)))
        };
        let given = |(index, mut tokens): (usize, Vec<u32>)| match tokens.len() {
            0 => Err(wrong(index, "is empty")),
            length if length > most && excess == Excess::Cut => {
                tokens.truncate(most);
                Ok(tokens)
            }
            length if length > most => {
                let problem =
                    format!("has {length} tokens, more than the {most} that the model takes");
                Err(wrong(index, &problem))
            }
            _ => Ok(tokens),
        };
        match self.input {
            Input::Text(text) => Ok(vec![of_text((0, text))?]),
            Input::Tokens(tokens) => Ok(vec![given((0, tokens))?]),
            Input::Texts(texts) => texts.into_iter().enumerate().map(of_text).collect(),
            Input::Lists(lists) => lists.into_iter().enumerate().map(given).collect(),
        }
    }
}

fn place(index: usize) -> String {
    place_in("input", index)
}

pub(super) fn place_in(field: &str, index: usize) -> String {
    format!("{field}[{index}]")
}

fn wrong(index: usize, problem: &str) -> ApiError {
    let place = place(index);
    let message = format!("`{place}` {problem}");
    ApiError::field(place, message)
}
