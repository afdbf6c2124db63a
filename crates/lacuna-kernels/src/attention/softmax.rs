//! Softmax of scores, and the states of query heads.
//!
//! A state is a header, with the maximum in lane 0 and the sum of weights in lane 1, and the sum of
//! values times weights, relative to the maximum.

use std::ops::Range;

use super::PARTITION_CHUNKS;
use crate::elementwise::activation::{Function, SoftCap};
use crate::simd::{Chunk, Kernel, LANES, Simd, exp};

/// Empties states: maximum at minus infinity, everything else zero.
#[inline(always)]
pub(super) fn clear(states: &mut [Chunk], per_query: usize) {
    states.fill(Chunk::ZERO);
    for state in states.chunks_exact_mut(per_query) {
        state[0].0[0] = f32::NEG_INFINITY;
    }
}

/// Caps the scores of one query and partition.
pub(super) struct Cap<'a> {
    pub(super) scores: &'a mut [Chunk; PARTITION_CHUNKS],
    /// The rows of the partition that the query sees.
    pub(super) visible: Range<usize>,
    pub(super) cap: SoftCap,
}

impl Kernel for Cap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for vector in self.visible.start / LANES..self.visible.end.div_ceil(LANES) {
            let scores = &mut self.scores[vector].0;
            s.store(self.cap.of(s, s.load(scores)), scores);
        }
    }
}

/// Turns the scores of one query and partition to weights, relative to the largest; the header is
/// the result.
pub(super) struct Soften<'a> {
    pub(super) scores: &'a mut [Chunk; PARTITION_CHUNKS],
    /// The rows of the partition that the query sees; not empty.
    pub(super) visible: Range<usize>,
}

impl Kernel for Soften<'_> {
    type Output = Chunk;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Chunk {
        let (none, zero) = (s.splat(f32::NEG_INFINITY), s.splat(0.0));
        let vectors = self.visible.start / LANES..self.visible.end.div_ceil(LANES);
        let mut most = none;
        for vector in vectors.clone() {
            let scores = s.load(&self.scores[vector].0);
            most = s.max(self.keep(s, scores, vector, none), most);
        }
        let most = s.max_lane(most);
        let mut sum = zero;
        for vector in vectors {
            let scores = s.load(&self.scores[vector].0);
            let weights = exp(s, s.sub(scores, s.splat(most)));
            let weights = self.keep(s, weights, vector, zero);
            sum = s.add(sum, weights);
            s.store(weights, &mut self.scores[vector].0);
        }
        let mut header = Chunk::ZERO;
        header.0[..2].copy_from_slice(&[most, s.sum(sum)]);
        header
    }
}

impl Soften<'_> {
    /// The lanes of a vector of rows that the query sees, in others `fill`.
    #[inline(always)]
    fn keep<S: Simd>(&self, s: S, x: S::F, vector: usize, fill: S::F) -> S::F {
        let first = vector * LANES;
        if self.visible.start <= first && first + LANES <= self.visible.end {
            return x;
        }
        let lane = |row: usize| row.saturating_sub(first).min(LANES);
        keep(s, x, lane(self.visible.start)..lane(self.visible.end), fill)
    }
}

/// Some lanes of a vector, in others `fill`.
#[inline(always)]
pub(super) fn keep<S: Simd>(s: S, x: S::F, lanes: Range<usize>, fill: S::F) -> S::F {
    let x = s.keep_first(x, lanes.end, fill);
    s.keep_first(fill, lanes.start, x)
}

/// Merges the state of later rows into that of earlier ones.
#[inline(always)]
pub(super) fn merge<S: Simd>(s: S, total: &mut [Chunk], part: &[Chunk]) {
    let (old, added) = (total[0].0[0], part[0].0[0]);
    let new = if added > old { added } else { old };
    let (keep, take) = (exp(s, s.splat(old - new)), exp(s, s.splat(added - new)));
    // Lane 1 of the header, the sum of weights, merges like the values.
    for (total, part) in total.iter_mut().zip(part) {
        let sum = s.fma(s.load(&part.0), take, s.mul(s.load(&total.0), keep));
        s.store(sum, &mut total.0);
    }
    total[0].0[0] = new;
}

/// Merges a row that has a score and no values into the state of all rows.
#[inline(always)]
pub(super) fn add_sink<S: Simd>(s: S, total: &mut [Chunk], score: f32) {
    let old = total[0].0[0];
    let new = if score > old { score } else { old };
    let (keep, take) = (exp(s, s.splat(old - new)), exp(s, s.splat(score - new)));
    for total in &mut *total {
        s.store(s.mul(s.load(&total.0), keep), &mut total.0);
    }
    let mut weight = [0.0; LANES];
    s.store(take, &mut weight);
    let header = &mut total[0].0;
    (header[0], header[1]) = (new, header[1] + weight[0]);
}

/// Divides by the sum of weights.
#[inline(always)]
pub(super) fn finish<S: Simd>(s: S, total: &[Chunk], out: &mut [f32]) {
    let sum = s.splat(total[0].0[1]);
    for (total, out) in total[1..].iter().zip(out.chunks_mut(LANES)) {
        let value = s.div(s.load(&total.0), sum);
        match out.as_mut_array() {
            Some(whole) => s.store(value, whole),
            None => {
                let mut lanes = [0.0; LANES];
                s.store(value, &mut lanes);
                out.copy_from_slice(&lanes[..out.len()]);
            }
        }
    }
}
