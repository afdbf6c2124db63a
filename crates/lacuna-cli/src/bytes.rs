//! Numbers of bytes as they are typed: `2GiB`, `1.5 GB`, `4096`.

use std::str::FromStr;

/// A number of bytes given on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteCount(pub u64);

/// Text that is no number of bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no number of bytes; write it as 2GiB, 512MiB, 1.5GB or 4096")]
pub struct NotBytes(String);

/// Units and what they are worth.
const UNITS: [(&str, u64); 10] = [
    ("", 1),
    ("b", 1),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
];

impl FromStr for ByteCount {
    type Err = NotBytes;

    fn from_str(text: &str) -> Result<Self, NotBytes> {
        parse(text)
            .map(Self)
            .ok_or_else(|| NotBytes(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = text.split_at(split.unwrap_or(text.len()));
    let unit = unit.trim_start().to_ascii_lowercase();
    let (_, worth) = UNITS.into_iter().find(|(name, _)| *name == unit)?;
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(worth);
    }
    let bytes = number.parse::<f64>().ok()? * worth as f64;
    (bytes < u64::MAX as f64).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_binary_or_decimal_as_they_say() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("17B", 17),
            ("2GiB", 2 << 30),
            ("2 gib", 2 << 30),
            ("1.5KiB", 1536),
            ("1.5GB", 1_500_000_000),
            ("16383TiB", 16_383 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteCount(bytes)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_an_example() {
        for text in [
            "",
            "GiB",
            "-1",
            "2G",
            "2 potatoes",
            "1.2.3",
            "99999999999TiB",
            "1e9",
        ] {
            let error = text.parse::<ByteCount>().unwrap_err();
            assert!(error.to_string().contains("2GiB"), "{text}");
        }
    }
}
