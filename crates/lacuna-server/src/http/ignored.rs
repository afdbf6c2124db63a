//! What a request says that has no effect here, told to its client in a header of the response.

use std::fmt::Write;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

use crate::http::error::ApiError;

/// The header: paths of fields, separated by commas.
const HEADER: HeaderName = HeaderName::from_static("x-lacuna-ignored");
/// Bytes of the header's value at most. Proxies commonly refuse a head of more than 8 KiB, and the
/// other headers need room too.
const MOST_BYTES: usize = 2048;
/// Stands for the paths that have no room.
const MORE: &str = ",...";

/// The paths of fields that are ignored, in the order in which they were found.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ignored {
    /// The value of the header so far.
    paths: String,
    full: bool,
    strict: bool,
}

impl Ignored {
    /// With `strict`, nothing is ignored: what would be is an error.
    pub(crate) fn new(strict: bool) -> Self {
        Self {
            strict,
            ..Self::default()
        }
    }

    /// Notes that the field at `path`, such as `response_format.type`, has no effect.
    ///
    /// # Errors
    /// In strict mode, the one that names the field.
    pub(crate) fn note(&mut self, path: &str) -> Result<(), ApiError> {
        if self.strict {
            return Err(ApiError::field(
                path,
                format!("`{path}` has no effect on this server; leave it out"),
            ));
        }
        if self.full {
            return Ok(());
        }
        let encoded = encoded(path);
        if self.paths.split(',').any(|other| other == encoded) {
            return Ok(());
        }
        let separator = if self.paths.is_empty() { "" } else { "," };
        if self.paths.len() + separator.len() + encoded.len() + MORE.len() > MOST_BYTES {
            self.paths += MORE.trim_start_matches(if self.paths.is_empty() { "," } else { "" });
            self.full = true;
        } else {
            self.paths += separator;
            self.paths += &encoded;
        }
        Ok(())
    }

    /// What the header will say.
    #[cfg(test)]
    pub(crate) fn paths(&self) -> &str {
        &self.paths
    }

    /// Adds the header to a response, if there is anything to say.
    pub(crate) fn attach(&self, response: &mut Response) {
        let value = HeaderValue::from_str(&self.paths);
        if let (false, Ok(value)) = (self.paths.is_empty(), value) {
            response.headers_mut().insert(HEADER, value);
        }
    }
}

/// Paths hold names that clients chose: what a header's value cannot hold, or what would look like
/// two paths, is written as `%` and two digits.
fn encoded(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_graphic() && byte != b',' && byte != b'%' {
            text.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;

    use super::*;

    fn header(ignored: &Ignored) -> Option<String> {
        let mut response = ().into_response();
        ignored.attach(&mut response);
        let value = response.headers().get(HEADER)?;
        Some(value.to_str().expect("ASCII").to_owned())
    }

    #[test]
    fn a_field_is_named_once_and_nothing_is_said_of_nothing() {
        let mut ignored = Ignored::new(false);
        assert_eq!(header(&ignored), None);
        for path in ["a.b", "c", "a.b"] {
            ignored.note(path).expect("not strict");
        }
        assert_eq!(header(&ignored).as_deref(), Some("a.b,c"));
    }

    #[test]
    fn names_cannot_break_out_of_the_header() {
        let mut ignored = Ignored::new(false);
        ignored.note("x,\r\nset-cookie: a=é%").expect("not strict");
        let value = header(&ignored).expect("a header");
        assert_eq!(value, "x%2C%0D%0Aset-cookie:%20a=%C3%A9%25");
    }

    #[test]
    fn the_header_stays_short_whatever_is_ignored() {
        for path in ["x".repeat(100), "x".repeat(10_000)] {
            let mut ignored = Ignored::new(false);
            for index in 0..1000 {
                ignored.note(&format!("{path}{index}")).expect("not strict");
            }
            let value = header(&ignored).expect("a header");
            assert!(value.len() <= MOST_BYTES && value.ends_with("..."));
            assert!(!value.starts_with(','));
        }
    }

    #[test]
    fn strict_mode_refuses_by_name() {
        let error = Ignored::new(true).note("x.y").expect_err("strict");
        assert_eq!(error.body()["error"]["param"], "x.y");
    }
}
