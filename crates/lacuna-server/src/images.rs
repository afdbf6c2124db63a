//! Images in requests: their files out of what interfaces wrap them in. None is fetched from anywhere.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lacuna_engine::ImageError;
use serde_json::{Value, json};

use crate::http::error::ApiError;

/// The file in a `data:` address; anything else is an address that is not followed.
pub(crate) fn of_address(address: &str, field: &str) -> Result<Vec<u8>, ApiError> {
    let Some(data) = address.strip_prefix("data:") else {
        let message = format!(
            "`{field}` is not a data URL: this server fetches no addresses and reads no files; send the image itself, as \
             data:image/png;base64,..."
        );
        return Err(ApiError::field(field, message));
    };
    match data.split_once(";base64,") {
        Some((_, encoded)) => of_base64(encoded, field),
        None => {
            let message = format!(
                "`{field}` is a data URL without base64; send it as data:image/png;base64,..."
            );
            Err(ApiError::field(field, message))
        }
    }
}

/// The file that `encoded` is.
pub(crate) fn of_base64(encoded: &str, field: &str) -> Result<Vec<u8>, ApiError> {
    let decoded = STANDARD.decode(encoded.trim_end());
    decoded.map_err(|error| {
        let message = format!("`{field}` is not base64: {error}");
        ApiError::field(field, message)
    })
}

/// An image's place, as chat templates have it.
pub(crate) fn place() -> Value {
    json!({"type": "image"})
}

/// A text beside images, as chat templates have it.
pub(crate) fn text(text: String) -> Value {
    json!({"type": "text", "text": text})
}

/// The content of a message: one text of several where there is no image, since most templates know no parts.
pub(crate) fn content(parts: Vec<Value>) -> Value {
    if parts.iter().any(|part| part["type"] == "image") {
        return parts.into();
    }
    let texts = parts.iter().filter_map(|part| part["text"].as_str());
    texts.collect::<Vec<_>>().join("\n").into()
}

impl From<ImageError> for ApiError {
    fn from(error: ImageError) -> Self {
        match error {
            ImageError::Prompt(error) => error.into(),
            ImageError::Memory(refused) => refused.into(),
            ImageError::NoEyes => Self::field(
                "messages",
                "the model of this server reads text alone; leave the images out",
            ),
            ImageError::File(_) | ImageError::TooMany { .. } => {
                Self::field("messages", error.to_string())
            }
            error => Self::internal(error.to_string()),
        }
    }
}
