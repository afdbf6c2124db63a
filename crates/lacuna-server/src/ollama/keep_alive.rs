//! How long a model is to stay when it is not used, as Ollama's clients say it.

use std::time::Duration;

use serde::Deserialize;

use crate::http::error::ApiError;
use crate::http::ignored::Ignored;

/// A number of seconds, or a text such as `5m`.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a number of seconds, or a text such as 5m"
)]
pub(crate) enum KeepAlive {
    Seconds(f64),
    Text(String),
}

/// One model that there is alone stays, so every time it is to be kept at least is kept to. That it be unloaded is
/// asked in vain, and named. Returns whether the model is unloaded after the request because that asks for it.
pub(crate) fn check_keep_alive(
    asked: Option<&KeepAlive>,
    unloads: bool,
    ignored: &mut Ignored,
) -> Result<bool, ApiError> {
    let kept = asked.map(KeepAlive::time).transpose()?;
    match kept {
        Some(Some(Duration::ZERO)) if unloads => Ok(true),
        Some(Some(Duration::ZERO)) => ignored.note("keep_alive").map(|()| false),
        _ => Ok(false),
    }
}

impl KeepAlive {
    /// How long the model is to stay when it is not used; `None` for ever.
    pub(crate) fn time(&self) -> Result<Option<Duration>, ApiError> {
        let seconds = match self {
            Self::Seconds(seconds) => Some(*seconds),
            Self::Text(text) => span_seconds(text),
        };
        match seconds {
            Some(seconds) if seconds < 0.0 => Ok(None),
            // What is too long to be told is for ever.
            Some(seconds) if seconds >= 0.0 => Ok(Duration::try_from_secs_f64(seconds).ok()),
            _ => Err(ApiError::field(
                "keep_alive",
                "`keep_alive` must be a number of seconds, or a text such as 5m",
            )),
        }
    }
}

/// Seconds of a text such as 5m, 1h30m or -1, in the units that Go has: a number without one is of seconds.
pub(crate) fn span_seconds(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 8] = [
        ("ns", 1e-9),
        ("us", 1e-6),
        ("µs", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3600.0),
        ("", 1.0),
    ];
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut sum = 0.0;
    loop {
        let digits = rest.find(|it: char| !it.is_ascii_digit() && it != '.');
        let (number, after) = rest.split_at(digits.unwrap_or(rest.len()));
        let unit = after.find(|it: char| it.is_ascii_digit() || it == '.');
        let (unit, after) = after.split_at(unit.unwrap_or(after.len()));
        let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit)?;
        sum += number.parse::<f64>().ok()? * scale;
        if after.is_empty() {
            return Some(sign * sum);
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::span_seconds;

    #[test]
    fn spans_of_time_are_read_as_go_writes_them() {
        for (text, seconds) in [
            ("5m", Some(300.0)),
            ("1h30m", Some(5400.0)),
            ("1.5s", Some(1.5)),
            ("250ms", Some(0.25)),
            ("-1", Some(-1.0)),
            ("0", Some(0.0)),
            ("300", Some(300.0)),
            ("-1h5m", Some(-3900.0)),
            ("soon", None),
            ("5 m", None),
            ("m", None),
            ("", None),
            ("-", None),
            ("1.2.3s", None),
        ] {
            assert_eq!(span_seconds(text), seconds, "{text}");
        }
    }
}
