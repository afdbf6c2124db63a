//! Points in time as texts, as clients of Ollama and Anthropic read them (RFC 3339).

use std::time::{SystemTime, UNIX_EPOCH};

/// The last there is: a model that is never unloaded is so then.
pub(crate) const NEVER: &str = "9999-12-31T23:59:59Z";

/// The last second that a date is written for.
pub(crate) const LAST: u64 = 253_402_300_799;

/// Now, to the microsecond.
pub(crate) fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_default();
    text(since.as_secs(), since.subsec_micros())
}

/// So many seconds and microseconds after the beginning of 1970.
pub(crate) fn text(seconds: u64, microseconds: u32) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{microseconds:06}Z")
}

/// The date so many days after the first of January 1970. Years are counted from March on, so that the
/// day that not every year has is a year's last, and in eras of 400 years, which all have as many days
/// (Howard Hinnant, chrono-compatible low-level date algorithms).
fn date(days: u64) -> (u64, u64, u64) {
    const ERA_DAYS: u64 = 146_097;
    // From the first of March of the year 0.
    let days = days + 719_468;
    let (era, day) = (days / ERA_DAYS, days % ERA_DAYS);
    let year = (day - day / 1460 + day / 36_524 - day / (ERA_DAYS - 1)) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = match month {
        0..10 => (month + 3, 0),
        _ => (month - 9, 1),
    };
    (400 * era + year + next, month, day)
}

#[cfg(test)]
mod tests {
    use super::text;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (951_868_800, "2000-03-01T00:00:00.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000000Z"),
        ] {
            assert_eq!(text(seconds, 0), expected);
        }
        assert!(text(0, 25).ends_with(".000025Z"));
    }
}
