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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::simd::portable::Portable;

    /// Rows that queries see, one after another: neither end goes back, as of tokens in order, whatever their windows.
    fn any_ranges() -> impl Strategy<Value = Vec<Range<usize>>> {
        let step = (0usize..40, 0usize..40);
        let first = (0usize..PARTITION / 2, 0usize..PARTITION / 2);
        (first, prop::collection::vec(step, 0..2 * LANES)).prop_map(|(first, steps)| {
            let mut range = first.0..first.0 + first.1;
            let mut ranges = vec![range.clone()];
            for (start, end) in steps {
                let end = (range.end + end).min(PARTITION);
                range = (range.start + start).min(end)..end;
                ranges.push(range.clone());
            }
            ranges.truncate(2 * LANES);
            ranges
        })
    }

    proptest! {
        #[test]
        fn a_lane_is_kept_in_the_rows_that_its_query_sees(ranges in any_ranges()) {
            let s = Portable;
            let seen = Seen::new(ranges.len(), |query| ranges[query].clone());
            let rows = ranges.iter().flat_map(Clone::clone);
            let Some(seen) = seen else {
                prop_assert_eq!(rows.count(), 0);
                return Ok(());
            };
            for row in seen.any.clone() {
                let see = |query: usize| ranges[query.min(ranges.len() - 1)].contains(&row);
                let by_all = seen.all.contains(&row);
                prop_assert!(!by_all || (0..ranges.len()).all(see), "{row}");
                prop_assert_eq!(by_all, !seen.some().any(|other| other == row));
                for vector in 0..2 {
                    let mut lanes = [0.0; LANES];
                    s.store(seen.keep(s, s.splat(1.0), row, vector, s.splat(-7.0)), &mut lanes);
                    for (lane, kept) in lanes.into_iter().enumerate() {
                        let expected = if see(vector * LANES + lane) { 1.0 } else { -7.0 };
                        prop_assert_eq!(kept, expected, "row {}, {} of {}", row, lane, vector);
                    }
                }
            }
            for row in rows {
                prop_assert!(seen.any.contains(&row));
            }
        }
    }
}
