//! How short of memory the system is.

use std::fs;

use lacuna_pages::{ByteLength, available_memory};

use crate::budget::Reading;

/// The system's word on it. Costs a few file reads.
pub(crate) fn read() -> Reading {
    let stalled = fs::read_to_string("/proc/pressure/memory");
    Reading {
        available: available_memory().map(ByteLength::get),
        stalled_percent: stalled
            .ok()
            .and_then(|text| full_percent(&text))
            .unwrap_or(0.0),
    }
}

/// The share of the last ten seconds in which every task waited for memory.
fn full_percent(text: &str) -> Option<f32> {
    let line = text.lines().find_map(|line| line.strip_prefix("full "))?;
    let average = line
        .split(' ')
        .find_map(|field| field.strip_prefix("avg10="))?;
    average.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stalled_share_is_that_of_all_tasks_over_ten_seconds() {
        let text = "some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=3.25 avg60=0.00 avg300=0.00 total=2\n";
        assert_eq!(full_percent(text), Some(3.25));
        assert_eq!(full_percent("some avg10=1.00"), None);
        assert_eq!(full_percent("full avg10=lots"), None);
    }
}
