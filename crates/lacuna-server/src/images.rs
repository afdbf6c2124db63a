//! Images in requests: their files out of what interfaces wrap them in, and the addresses of those that are elsewhere
//! (`addresses`), which are fetched only from hosts that the server was told of.

#[cfg(feature = "image-addresses")]
pub(crate) mod addresses;

use axum::body::Bytes;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lacuna_engine::ImageError;
use serde_json::{Value, json};

use crate::http::error::ApiError;

/// An image of a request.
#[derive(Debug, Clone)]
pub(crate) enum Image {
    /// Its file.
    File(Bytes),
    /// Where its file is, and the field that says so.
    Address {
        #[cfg_attr(
            not(feature = "image-addresses"),
            expect(dead_code, reason = "it is refused wherever it leads")
        )]
        address: String,
        field: String,
    },
}

/// What has images that may have to be fetched before it can be gone on with.
pub(crate) trait HasImages {
    /// The field that has them.
    const FIELD: &'static str = "messages";

    fn images(&mut self) -> &mut [Image];
}

impl Image {
    pub(crate) fn is_elsewhere(&self) -> bool {
        matches!(self, Self::Address { .. })
    }

    /// The file, which has been fetched if it was elsewhere.
    ///
    /// # Errors
    /// [`ApiError`] for one that has not.
    pub(crate) fn file(&self) -> Result<&Bytes, ApiError> {
        match self {
            Self::File(file) => Ok(file),
            Self::Address { field, .. } => Err(not_fetched(field)),
        }
    }
}

/// Refuses an address where none is followed.
pub(crate) fn not_fetched(field: &str) -> ApiError {
    let message = format!(
        "`{field}` is not a data URL: this server fetches no addresses and reads no files; send the image itself, as \
         data:image/png;base64,..."
    );
    ApiError::field(field, message)
}

/// The image of a `data:` address, or of one that may be followed.
pub(crate) fn of_address(address: &str, field: &str) -> Result<Image, ApiError> {
    let begins = |scheme: &str| {
        let start = address.get(..scheme.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    if begins("http://") || begins("https://") {
        return Ok(Image::Address {
            address: address.to_owned(),
            field: field.to_owned(),
        });
    }
    let Some(data) = address.strip_prefix("data:") else {
        return Err(not_fetched(field));
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
pub(crate) fn of_base64(encoded: &str, field: &str) -> Result<Image, ApiError> {
    // Programs that write it break it into lines, of 76 characters mostly.
    let decoded = match encoded.contains(|letter: char| letter.is_ascii_whitespace()) {
        false => STANDARD.decode(encoded),
        true => {
            let letters = encoded.bytes().filter(|byte| !byte.is_ascii_whitespace());
            STANDARD.decode(letters.collect::<Vec<u8>>())
        }
    };
    let decoded = decoded.map_err(|error| {
        let message = format!("`{field}` is not base64: {error}");
        ApiError::field(field, message)
    })?;
    Ok(Image::File(decoded.into()))
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
            ImageError::File(_)
            | ImageError::Shape(_)
            | ImageError::One { .. }
            | ImageError::TooMany { .. } => Self::field("messages", error.to_string()),
            ImageError::TooManyTokens { .. } => {
                Self::field("messages", error.to_string()).with_code("context_length_exceeded")
            }
            error => Self::internal(error.to_string()),
        }
    }
}
