//! Which rows the queries of a tile see.

use std::ops::Range;

use super::super::PARTITION;
use super::super::softmax::keep;
use crate::simd::{LANES, Simd};

/// Which of the rows of a partition the queries of a tile see. Those of later queries do not begin or end before
/// those of earlier ones.
pub(in super::super) struct Seen {
    /// Rows that any of them sees.
    pub(super) any: Range<usize>,
    /// Of those, the ones that all of them see.
    pub(super) all: Range<usize>,
    /// For other rows, the lanes of each vector that see it; none of rows that nobody sees.
    lanes: [[Lanes; 2]; PARTITION],
}

/// Some lanes.
#[derive(Clone, Copy, Default)]
struct Lanes {
    start: u8,
    end: u8,
}

impl Seen {
    /// `None` if no query sees any row. Lanes behind the last query are as the last one's.
    pub(in super::super) fn new(
        queries: usize,
        visible: impl Fn(usize) -> Range<usize>,
    ) -> Option<Self> {
        let (earliest, latest) = (visible(0), visible(queries - 1));
        let any = earliest.start..latest.end;
        if any.is_empty() {
            return None;
        }
        let all = latest.start..earliest.end.max(latest.start);
        let mut seen = Self {
            any: any.clone(),
            all: all.clone(),
            lanes: [[Lanes::default(); 2]; PARTITION],
        };
        if any == all {
            return Some(seen);
        }
        let mut ranges: [[Range<usize>; LANES]; 2] = Default::default();
        for (query, range) in ranges.as_flattened_mut().iter_mut().enumerate() {
            *range = visible(query.min(queries - 1));
        }
        for (vector, ranges) in ranges.iter().enumerate() {
            // Those of later queries neither begin nor end before, so lanes only come and go as rows go on.
            let mut lanes = Lanes::default();
            for row in seen.some() {
                let range = |lane: u8| ranges.get(usize::from(lane));
                while range(lanes.start).is_some_and(|range| range.end <= row) {
                    lanes.start += 1;
                }
                while range(lanes.end).is_some_and(|range| range.start <= row) {
                    lanes.end += 1;
                }
                seen.lanes[row][vector] = lanes;
            }
        }
        Some(seen)
    }

    /// Rows that some queries see and others do not.
    pub(super) fn some(&self) -> impl Iterator<Item = usize> + use<> {
        (self.any.start..self.all.start).chain(self.all.end..self.any.end)
    }

    /// The lanes of `x` that see a row, in others `fill`.
    #[inline(always)]
    pub(super) fn keep<S: Simd>(
        &self,
        s: S,
        x: S::F,
        row: usize,
        vector: usize,
        fill: S::F,
    ) -> S::F {
        if self.all.contains(&row) {
            return x;
        }
        let Lanes { start, end } = self.lanes[row][vector];
        keep(s, x, usize::from(start)..usize::from(end), fill)
    }
}
