//! The body of `POST /v1/embeddings`.

use lacuna_text::tokenizer::{EncodeLimits, Special, Tokenizer};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::http::error::ApiError;

/// Texts of one request at most, as OpenAI has it.
const MOST_TEXTS: usize = 2048;

#[derive(Debug, Deserialize)]
pub(super) struct Request {
    input: Input,
    #[serde(default)]
    pub(super) model: Option<String>,
    #[serde(default)]
    dimensions: Option<usize>,
    #[serde(default)]
    encoding_format: Option<Encoding>,
    /// Who asks, for services that count by that.
    #[serde(default, rename = "user")]
    _user: IgnoredAny,
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
        tokenizer: &Tokenizer,
        limits: &EncodeLimits,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
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
            let tokens = tokenizer.encode_within(&text, Special::PROMPT, limits);
            tokens.map_err(|error| ApiError::from(error).of(&place(index)))
        };
        let given = |(index, tokens): (usize, Vec<u32>)| match tokens.len() {
            0 => Err(wrong(index, "is empty")),
            length if length > limits.tokens => {
                let most = limits.tokens;
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
    format!("input[{index}]")
}

fn wrong(index: usize, problem: &str) -> ApiError {
    let place = place(index);
    let message = format!("`{place}` {problem}");
    ApiError::field(place, message)
}
