//! Sizes as people write them: `2GiB`, `512 MiB`, `1.5GB`, or plain bytes.

use lacuna_pages::ByteLength;

/// Units, and how many bytes each is.
const UNITS: [(&str, f64); 13] = [
    ("", 1.0),
    ("b", 1.0),
    ("k", 1024.0),
    ("kib", 1024.0),
    ("kb", 1e3),
    ("m", 1_048_576.0),
    ("mib", 1_048_576.0),
    ("mb", 1e6),
    ("g", 1_073_741_824.0),
    ("gib", 1_073_741_824.0),
    ("gb", 1e9),
    ("tib", 1_099_511_627_776.0),
    ("tb", 1e12),
];

/// The bytes that `text` says.
pub(crate) fn parse(text: &str) -> Result<ByteLength, String> {
    let text = text.trim();
    let digits = text.find(|character: char| !character.is_ascii_digit() && character != '.');
    let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
    let unit = unit.trim().to_ascii_lowercase();
    let factor = UNITS.iter().find(|(name, _)| *name == unit);
    let bytes = number
        .parse::<f64>()
        .ok()
        .zip(factor)
        .map(|(number, (_, factor))| number * factor);
    match bytes {
        // Exact up to 2^53, and no memory is larger.
        Some(bytes) if bytes >= 1.0 && bytes < 9e15 => Ok(ByteLength::new(bytes as u64)),
        _ => Err("expected a size such as 2GiB, 512MiB or 1000000".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("2GiB", 2 << 30),
            ("512 MiB", 512 << 20),
            ("1.5g", 3 << 29),
            ("1.5GB", 1_500_000_000),
            ("4096", 4096),
        ] {
            assert_eq!(parse(text), Ok(ByteLength::new(bytes)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "GiB",
            "-1",
            "0",
            "2 parsecs",
            "1e99",
            "1.2.3",
            "99999999TiB",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
