//! Times of repeated calls, and their middle and tail.

use std::time::{Duration, Instant};

use serde::Serialize;

/// What repeated calls cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Timing {
    pub(super) median_us: f64,
    pub(super) p99_us: f64,
    pub(super) samples: usize,
}

/// What repeated calls cost, to the last one in a thousand.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Tail {
    pub(super) median_us: f64,
    pub(super) p99_us: f64,
    pub(super) p999_us: f64,
    pub(super) max_us: f64,
    pub(super) samples: usize,
}

/// Times in microseconds.
#[derive(Debug, Default)]
pub(super) struct Samples(Vec<f64>);

impl Samples {
    pub(super) fn push(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1e6);
    }

    /// Times one call that does the same thing `parts` times over: the sample is one part of it. A
    /// call that fails is no sample.
    pub(super) fn time<T, E>(
        &mut self,
        parts: u32,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let start = Instant::now();
        let value = call()?;
        self.push(start.elapsed() / parts);
        Ok(value)
    }

    /// Nothing when nothing was timed.
    pub(super) fn timing(mut self) -> Option<Timing> {
        self.0.sort_by(f64::total_cmp);
        Some(Timing {
            median_us: quantile(&self.0, 0.5)?,
            p99_us: quantile(&self.0, 0.99)?,
            samples: self.0.len(),
        })
    }

    /// The same with the far end of the tail.
    pub(super) fn tail(mut self) -> Option<Tail> {
        self.0.sort_by(f64::total_cmp);
        Some(Tail {
            median_us: quantile(&self.0, 0.5)?,
            p99_us: quantile(&self.0, 0.99)?,
            p999_us: quantile(&self.0, 0.999)?,
            max_us: quantile(&self.0, 1.0)?,
            samples: self.0.len(),
        })
    }
}

/// The middle of `values`; nothing of none.
pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    quantile(&values, 0.5)
}

/// The smallest of the `sorted` values that at least the `part` of them do not exceed.
fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let rank = (sorted.len() as f64 * part).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_and_the_tail_are_samples() {
        let samples = Samples((1..=200).rev().map(f64::from).collect());
        let timing = samples.timing().expect("not empty");
        assert_eq!((timing.median_us, timing.p99_us), (100.0, 198.0));
        let samples = Samples((1..=2_000).rev().map(f64::from).collect());
        let tail = samples.tail().expect("not empty");
        assert_eq!(
            (tail.median_us, tail.p99_us, tail.p999_us, tail.max_us),
            (1_000.0, 1_980.0, 1_998.0, 2_000.0)
        );
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
    }

    #[test]
    fn a_call_that_fails_is_no_sample() {
        let mut samples = Samples::default();
        assert_eq!(samples.time(1, || Err::<(), _>("refused")), Err("refused"));
        assert_eq!(samples.timing(), None);
    }

    #[test]
    fn nothing_timed_is_no_timing() {
        assert_eq!(Samples::default().timing(), None);
        assert_eq!(median(Vec::new()), None);
    }
}
