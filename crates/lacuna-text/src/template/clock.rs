//! Dates for `strftime_now`, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

/// The variable that carries the time of a rendering, in seconds since 1970.
pub(super) const VARIABLE: &str = "__lacuna_now";

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// Whole seconds since 1970; times before count as 1970.
pub(super) fn seconds(time: SystemTime) -> i64 {
    let elapsed = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(elapsed.as_secs()).unwrap_or(i64::MAX)
}

/// A date and a time of day.
struct Moment {
    year: i64,
    month: usize,
    day: i64,
    day_of_year: i64,
    weekday: usize,
    second_of_day: i64,
}

impl Moment {
    /// From seconds since 1970, by Howard Hinnant's `civil_from_days`, whose year begins in March.
    fn new(seconds: i64) -> Moment {
        // Far enough for any date, and far from overflow.
        let seconds = seconds.clamp(0, 253_402_300_799);
        let days = seconds / 86_400;
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let of_era = shifted % 146_097;
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * of_year + 2) / 153;
        let month = (month_from_march + 2) % 12;
        let year = year_of_era + era * 400 + i64::from(month < 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let before_march = if leap { 60 } else { 59 };
        let day_of_year = if month < 2 {
            of_year - 306
        } else {
            of_year + before_march
        };
        Moment {
            year,
            month: month as usize,
            day: of_year - (153 * month_from_march + 2) / 5 + 1,
            day_of_year: day_of_year + 1,
            weekday: (days % 7) as usize,
            second_of_day: seconds % 86_400,
        }
    }

    /// What one directive of `strftime` stands for.
    fn directive(&self, directive: char) -> Option<String> {
        let (hour, minute) = (self.second_of_day / 3600, self.second_of_day / 60 % 60);
        let second = self.second_of_day % 60;
        let hour_of_twelve = (hour + 11) % 12 + 1;
        let (month, weekday) = (MONTHS[self.month], DAYS[self.weekday]);
        Some(match directive {
            'Y' => format!("{:04}", self.year),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month + 1),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'u' => ((self.weekday + 3) % 7 + 1).to_string(),
            'w' => ((self.weekday + 4) % 7).to_string(),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour_of_twelve:02}"),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'f' => "000000".to_owned(),
            'F' => format!("{:04}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' | 'X' => format!("{hour:02}:{minute:02}:{second:02}"),
            'R' => format!("{hour:02}:{minute:02}"),
            'D' | 'x' => format!(
                "{:02}/{:02}/{:02}",
                self.month + 1,
                self.day,
                self.year % 100
            ),
            // Python's `now()` carries no zone and writes nothing for it.
            'Z' | 'z' => String::new(),
            '%' => "%".to_owned(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            _ => return None,
        })
    }
}

/// The time as `strftime` of Python writes it.
pub(super) fn format(seconds: i64, format: &str) -> Result<String, Error> {
    let moment = Moment::new(seconds);
    let mut text = String::with_capacity(format.len() * 2);
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        // `%-d` is the directive without padding.
        let mut directive = rest.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = rest.next();
        }
        let written = directive.and_then(|directive| moment.directive(directive));
        let written = written.ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidOperation,
                "strftime_now: unknown directive in the format",
            )
        })?;
        text.push_str(if unpadded {
            without_padding(&written)
        } else {
            &written
        });
    }
    Ok(text)
}

fn without_padding(number: &str) -> &str {
    let trimmed = number.trim_start_matches(['0', ' ']);
    if trimmed.is_empty() {
        &number[number.len().saturating_sub(1)..]
    } else {
        trimmed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_other_calendars() {
        let all = "%Y-%m-%d %H:%M:%S %j %a %u %w";
        let cases = [
            (0, "1970-01-01 00:00:00 001 Thu 4 4"),
            (951_782_400, "2000-02-29 00:00:00 060 Tue 2 2"),
            (978_220_800, "2000-12-31 00:00:00 366 Sun 7 0"),
            (1_077_926_399, "2004-02-27 23:59:59 058 Fri 5 5"),
            (1_721_997_005, "2024-07-26 12:30:05 208 Fri 5 5"),
            (4_107_542_400, "2100-03-01 00:00:00 060 Mon 1 1"),
            (253_402_300_799, "9999-12-31 23:59:59 365 Fri 5 5"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(format(seconds, all).unwrap(), expected);
        }
        assert_eq!(
            format(1_721_997_005, "%-d %B %y, %I:%M %p%%").unwrap(),
            "26 July 24, 12:30 PM%"
        );
        assert_eq!(format(0, "%-H %-d %e").unwrap(), "0 1  1");
    }

    #[test]
    fn unknown_directives_are_errors() {
        for bad in ["%Q", "%", "%-", "%é"] {
            assert!(format(0, bad).is_err(), "{bad}");
        }
    }
}
