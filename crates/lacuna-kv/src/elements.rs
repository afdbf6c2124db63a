//! How K and V are stored, by name.

use std::fmt;
use std::str::FromStr;

use lacuna_kernels::{ElementType, UnknownElementType};

/// Element types of keys and of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvElements {
    /// Storage of one element of K.
    pub key: ElementType,
    /// Storage of one element of V.
    pub value: ElementType,
}

impl KvElements {
    /// The same type for both.
    #[must_use]
    pub const fn both(element: ElementType) -> Self {
        Self {
            key: element,
            value: element,
        }
    }
}

/// A pair of element types that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownElements {
    /// One of them is no element type.
    #[error(transparent)]
    Type(#[from] UnknownElementType),
    /// Something else than one type, or one for each of K and V.
    #[error("`{0}` names no KV element types; use one for both, such as f16, or k=TYPE,v=TYPE")]
    Form(String),
}

impl FromStr for KvElements {
    type Err = UnknownElements;

    /// `f16`, or `k=f32,v=f16` in either order.
    fn from_str(text: &str) -> Result<Self, UnknownElements> {
        let Some((first, second)) = text.split_once(',') else {
            return Ok(Self::both(text.parse()?));
        };
        let sides = (first.split_once('='), second.split_once('='));
        let (key, value) = match sides {
            (Some(("k", key)), Some(("v", value))) | (Some(("v", value)), Some(("k", key))) => {
                (key, value)
            }
            _ => return Err(UnknownElements::Form(text.to_owned())),
        };
        Ok(Self {
            key: key.parse()?,
            value: value.parse()?,
        })
    }
}

impl fmt::Display for KvElements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key == self.value {
            f.write_str(self.key.name())
        } else {
            write!(f, "k={},v={}", self.key.name(), self.value.name())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in ["f16", "f32", "k=f32,v=f16", "k=f16,v=f32"] {
            let elements: KvElements = name.parse().unwrap();
            assert_eq!(elements.to_string(), name);
        }
        assert_eq!("v=f32,k=f16".parse(), "k=f16,v=f32".parse::<KvElements>());
    }

    #[test]
    fn anything_else_is_refused_with_what_would_do() {
        for name in [
            "f16,f16",
            "k=f16",
            "k=f16,k=f16",
            "k=f16,v=f16,v=f16",
            ",",
            "",
        ] {
            assert!(name.parse::<KvElements>().is_err(), "{name}");
        }
        let error = "f16,f32".parse::<KvElements>().unwrap_err();
        assert!(error.to_string().contains("k=TYPE,v=TYPE"), "{error}");
        let error = "k=f16,v=q9".parse::<KvElements>().unwrap_err();
        assert!(error.to_string().contains("q9"), "{error}");
    }
}
