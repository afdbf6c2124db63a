//! What the replies' times come to.

use std::time::Instant;

use serde::Serialize;

use super::client::Reply;
use crate::samples::{Samples, Timing};

/// The time in which every reply has begun and none has ended.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Steady {
    pub(super) replies: usize,
    pub(super) seconds: f64,
    pub(super) tokens_per_second: f64,
    pub(super) inter_token: Timing,
    pub(super) p99_over_median: f64,
}

/// How long a second request waited for its first token while the first one's reply flowed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Donor {
    pub(super) first_ms: f64,
    pub(super) second_ms: f64,
    pub(super) second_over_first: f64,
    /// Whether the first one's reply was still flowing then.
    pub(super) first_was_running: bool,
}

impl Steady {
    /// Nothing when no such time was.
    pub(super) fn of(replies: &[Reply]) -> Option<Self> {
        let begun = replies.iter().map(|reply| reply.pieces.first()).max()??;
        let ended = replies.iter().map(|reply| reply.pieces.last()).min()??;
        let within = |at: &Instant| at >= begun && at <= ended;
        let mut gaps = Samples::default();
        let steady = |(from, to): &(Instant, Instant)| within(from) && within(to);
        for (from, to) in replies.iter().flat_map(Reply::gaps).filter(steady) {
            gaps.push(to - from);
        }
        let inter_token = gaps.timing()?;
        let seconds = ended.checked_duration_since(*begun)?.as_secs_f64();
        let pieces = replies.iter().flat_map(|reply| &reply.pieces);
        let generated = pieces.filter(|&at| at > begun && at <= ended).count();
        Some(Self {
            replies: replies.len(),
            seconds,
            tokens_per_second: generated as f64 / seconds,
            inter_token,
            p99_over_median: inter_token.p99_us / inter_token.median_us,
        })
    }
}

impl Donor {
    pub(super) fn of(first: &Reply, second: &Reply) -> Option<Self> {
        let milliseconds = |reply: &Reply| Some(reply.first_token()?.as_secs_f64() * 1e3);
        let (first_ms, second_ms) = (milliseconds(first)?, milliseconds(second)?);
        Some(Self {
            first_ms,
            second_ms,
            second_over_first: second_ms / first_ms,
            first_was_running: first.pieces.last() > second.pieces.first(),
        })
    }
}

/// Times to the first token, and between tokens.
pub(super) fn samples(replies: &[Reply]) -> (Option<Timing>, Option<Timing>) {
    let (mut first, mut gaps) = (Samples::default(), Samples::default());
    for reply in replies {
        reply
            .first_token()
            .iter()
            .for_each(|&time| first.push(time));
        reply.gaps().for_each(|(from, to)| gaps.push(to - from));
    }
    (first.timing(), gaps.timing())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn reply(start: Instant, asked: u64, pieces: &[u64]) -> Reply {
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut reply = Reply::new(at(asked));
        reply.pieces = pieces.iter().map(|&ms| at(ms)).collect();
        reply
    }

    #[test]
    fn a_batch_is_steady_from_the_last_first_token_to_the_first_end() {
        let start = Instant::now();
        let replies = [
            reply(start, 0, &[10, 100, 110, 120, 130]),
            reply(start, 5, &[100, 110, 121, 131, 141, 151]),
        ];
        let steady = Steady::of(&replies).expect("both ran at once");
        assert_eq!(steady.inter_token.samples, 3 + 2);
        assert_eq!(steady.inter_token.median_us, 10_000.0);
        assert_eq!(steady.inter_token.p99_us, 11_000.0);
        assert!((steady.tokens_per_second - 5.0 / 0.03).abs() < 1e-9);
        let apart = [reply(start, 0, &[10, 20]), reply(start, 5, &[30, 40])];
        assert_eq!(Steady::of(&apart), None);
    }

    #[test]
    fn the_second_on_a_donor_is_set_beside_the_first() {
        let start = Instant::now();
        let first = reply(start, 0, &[200, 210, 220, 230]);
        let donor = Donor::of(&first, &reply(start, 205, &[215])).expect("both replied");
        assert_eq!((donor.first_ms, donor.second_ms), (200.0, 10.0));
        assert!(donor.first_was_running);
        let late = Donor::of(&first, &reply(start, 300, &[310])).expect("both replied");
        assert!(!late.first_was_running);
    }
}
