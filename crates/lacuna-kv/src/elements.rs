//! The storage of K and V, each its own.

use std::fmt;
use std::str::FromStr;

use lacuna_kernels::{ElementType, UnknownElementType};

/// How the elements of keys and of values are stored.
///
/// Written `q8_0` for both, or `k=q8_0,v=q4_0`; a side that is not named is f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvElements {
    /// Keys.
    pub key: ElementType,
    /// Values, where they are not part of keys.
    pub value: ElementType,
}

impl KvElements {
    /// The same storage for both.
    #[must_use]
    pub const fn both(element: ElementType) -> Self {
        Self {
            key: element,
            value: element,
        }
    }
}

impl Default for KvElements {
    fn default() -> Self {
        Self::both(ElementType::F16)
    }
}

/// A text that names no storage of K and V.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvElementsError {
    /// A name that is no element type.
    #[error(transparent)]
    Element(#[from] UnknownElementType),
    /// A side named twice.
    #[error("`{0}` is given twice; write k=TYPE,v=TYPE")]
    Twice(char),
}

impl FromStr for KvElements {
    type Err = KvElementsError;

    fn from_str(text: &str) -> Result<Self, KvElementsError> {
        if !text.contains('=') {
            return Ok(Self::both(text.parse()?));
        }
        let (mut key, mut value) = (None, None);
        for part in text.split(',') {
            let (side, name, slot) = match part.split_once('=') {
                Some(("k", name)) => ('k', name, &mut key),
                Some(("v", name)) => ('v', name, &mut value),
                _ => return Err(UnknownElementType(part.to_owned()).into()),
            };
            if slot.replace(name.parse()?).is_some() {
                return Err(KvElementsError::Twice(side));
            }
        }
        Ok(Self {
            key: key.unwrap_or(ElementType::F16),
            value: value.unwrap_or(ElementType::F16),
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
    fn both_sides_or_each_its_own() {
        let q8_0 = KvElements::both(ElementType::Q8_0);
        let mixed = KvElements {
            value: ElementType::Q4_0,
            ..q8_0
        };
        for (text, expected) in [
            ("q8_0", q8_0),
            ("k=q8_0,v=q4_0", mixed),
            ("v=q4_0,k=q8_0", mixed),
            (
                "k=f32",
                KvElements {
                    key: ElementType::F32,
                    ..KvElements::default()
                },
            ),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
            assert_eq!(expected.to_string().parse(), Ok(expected));
        }
    }

    #[test]
    fn what_is_no_type_is_named() {
        for text in ["q9", "k=q9", "x=f16", "k=f16,", "k=", ""] {
            let error = text.parse::<KvElements>().expect_err(text);
            assert!(matches!(error, KvElementsError::Element(_)), "{text}");
        }
        let twice = "k=f16,k=f32".parse::<KvElements>();
        assert_eq!(twice, Err(KvElementsError::Twice('k')));
    }
}
