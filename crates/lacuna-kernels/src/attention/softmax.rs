//! The online softmax: states of query heads, and how blocks and other states are added to them.
//!
//! A state is a header, with the maximum in lane 0 and the sum of weights in lane 1, and the weighted
//! sum of values. [`update`] and [`narrow`] add the same numbers in the same order; the first reads
//! a block that was converted to f32 for many queries, the second converts it in registers.

use std::marker::PhantomData;

use super::ROWS;
use super::block::BlockRows;
use crate::float::{Element, F16, F32};
use crate::simd::{Kernel, LANES, Simd, each, exp};
use crate::view::ElementType;

/// Sixteen elements, aligned so that loads do not straddle cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Chunk(pub(super) [f32; LANES]);

impl Chunk {
    pub(super) const ZERO: Self = Self([0.0; LANES]);
}

/// Empties states: maximum at minus infinity, everything else zero.
#[inline(always)]
pub(super) fn clear(states: &mut [Chunk], per_query: usize) {
    states.fill(Chunk::ZERO);
    for state in states.chunks_exact_mut(per_query) {
        state[0].0[0] = f32::NEG_INFINITY;
    }
}

/// Adds `visible` rows of a block to a query's state.
#[inline(always)]
pub(super) fn update<S: Simd>(
    s: S,
    q: &[Chunk],
    k: &[[Chunk; ROWS]],
    v: &[[Chunk; ROWS]],
    visible: usize,
    state: &mut [Chunk],
) {
    let scores = scores(s, q, k);
    let (header, values) = state.split_at_mut(1);
    let (p, decay) = soften(s, scores, visible, &mut header[0]);
    if visible == ROWS {
        add_values(s, &p, v, decay, values);
    } else {
        add_first_values(s, &p.0[..visible], v, decay, values);
    }
}

/// Turns scores to weights relative to the new maximum, and updates maximum and sum of weights.
/// Returns the weights and what older values are to be multiplied with.
#[inline(always)]
fn soften<S: Simd>(s: S, scores: S::F, visible: usize, header: &mut Chunk) -> (Chunk, S::F) {
    let old = header.0[0];
    let seen = s.keep_first(scores, visible, s.splat(f32::NEG_INFINITY));
    let block = s.max_lane(seen);
    let new = if block > old { block } else { old };
    let decay = exp(s, s.splat(old - new));
    let p = exp(s, s.sub(scores, s.splat(new)));
    let p = s.keep_first(p, visible, s.splat(0.0));
    let sum = s.fma(s.splat(header.0[1]), decay, s.splat(s.sum(p)));
    let mut lanes = Chunk::ZERO;
    s.store(sum, &mut lanes.0);
    header.0[0] = new;
    header.0[1] = lanes.0[0];
    s.store(p, &mut lanes.0);
    (lanes, decay)
}

/// Dot products of a query with the rows of a block.
#[inline(always)]
fn scores<S: Simd>(s: S, q: &[Chunk], k: &[[Chunk; ROWS]]) -> S::F {
    let mut sums = [s.splat(0.0); ROWS];
    for (q, k) in q.iter().zip(k) {
        let q = s.load(&q.0);
        for j in 0..ROWS {
            sums[j] = s.fma(q, s.load(&k[j].0), sums[j]);
        }
    }
    s.sum_each(sums)
}

/// `values = values * decay + sum over all rows of p * v`.
#[inline(always)]
fn add_values<S: Simd>(s: S, p: &Chunk, v: &[[Chunk; ROWS]], decay: S::F, values: &mut [Chunk]) {
    // Four chunks at once, because each is a chain of dependent additions.
    let (quads, rest) = values.as_chunks_mut::<4>();
    let (v_quads, v_rest) = v.as_chunks::<4>();
    for (v, values) in v_quads.iter().zip(quads) {
        add_to_chunks(s, p, v, decay, values);
    }
    for (v, values) in v_rest.iter().zip(rest) {
        add_to_chunks(
            s,
            p,
            std::array::from_ref(v),
            decay,
            std::array::from_mut(values),
        );
    }
}

#[inline(always)]
fn add_to_chunks<S: Simd, const N: usize>(
    s: S,
    p: &Chunk,
    v: &[[Chunk; ROWS]; N],
    decay: S::F,
    values: &mut [Chunk; N],
) {
    let mut sums: [_; N] = each!(decay, |c| s.mul(s.load(&values[c].0), decay));
    for j in 0..ROWS {
        let p = s.splat(p.0[j]);
        for c in 0..N {
            sums[c] = s.fma(p, s.load(&v[c][j].0), sums[c]);
        }
    }
    for c in 0..N {
        s.store(sums[c], &mut values[c].0);
    }
}

/// The same for the first rows only.
#[inline(always)]
fn add_first_values<S: Simd>(
    s: S,
    p: &[f32],
    v: &[[Chunk; ROWS]],
    decay: S::F,
    values: &mut [Chunk],
) {
    for (v, values) in v.iter().zip(values) {
        let mut sum = s.mul(s.load(&values.0), decay);
        for (p, v) in p.iter().zip(v) {
            sum = s.fma(s.splat(*p), s.load(&v.0), sum);
        }
        s.store(sum, &mut values.0);
    }
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

/// Divides by the sum of weights.
#[inline(always)]
pub(super) fn finish<S: Simd>(s: S, total: &[Chunk], out: &mut [f32]) {
    let sum = s.splat(total[0].0[1]);
    for (total, out) in total[1..].iter().zip(out.chunks_mut(LANES)) {
        let mut lanes = [0.0; LANES];
        s.store(s.div(s.load(&total.0), sum), &mut lanes);
        out.copy_from_slice(&lanes[..out.len()]);
    }
}

/// Adds a block, all rows visible, to the states of a few query heads of one KV head.
#[inline(always)]
pub(super) fn narrow<S: Simd>(
    s: S,
    q: &[Chunk],
    k: &BlockRows<'_>,
    v: &BlockRows<'_>,
    states: &mut [Chunk],
) {
    match (k.element, v.element) {
        (ElementType::F32, ElementType::F32) => {
            s.vectorize(Narrow::<F32, F32> {
                q,
                k,
                v,
                states,
                elements: PhantomData,
            });
        }
        (ElementType::F16, ElementType::F16) => {
            s.vectorize(Narrow::<F16, F16> {
                q,
                k,
                v,
                states,
                elements: PhantomData,
            });
        }
        (ElementType::F32, ElementType::F16) => {
            s.vectorize(Narrow::<F32, F16> {
                q,
                k,
                v,
                states,
                elements: PhantomData,
            });
        }
        (ElementType::F16, ElementType::F32) => {
            s.vectorize(Narrow::<F16, F32> {
                q,
                k,
                v,
                states,
                elements: PhantomData,
            });
        }
    }
}

/// See [`narrow`].
struct Narrow<'a, 'b, K, V> {
    q: &'a [Chunk],
    k: &'a BlockRows<'b>,
    v: &'a BlockRows<'b>,
    states: &'a mut [Chunk],
    elements: PhantomData<(K, V)>,
}

impl<K: Element, V: Element> Kernel for Narrow<'_, '_, K, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.states.len() - self.q.len() {
            1 => self.group::<S, 1>(s),
            2 => self.group::<S, 2>(s),
            3 => self.group::<S, 3>(s),
            4 => self.group::<S, 4>(s),
            group => unreachable!("a narrow group of {group} heads"),
        }
    }
}

impl<K: Element, V: Element> Narrow<'_, '_, K, V> {
    #[inline(always)]
    fn group<S: Simd, const G: usize>(mut self, s: S) {
        let chunks = self.q.len() / G;
        let scores = self.scores::<S, G>(s, chunks);
        let mut weights = [Chunk::ZERO; G];
        let mut decays = [s.splat(0.0); G];
        for g in 0..G {
            let header = &mut self.states[g * (1 + chunks)];
            (weights[g], decays[g]) = soften(s, scores[g], self.v.count, header);
        }
        for chunk in 0..chunks {
            self.add_values(s, chunk, 1 + chunks, &weights, &decays);
        }
    }

    #[inline(always)]
    fn scores<S: Simd, const G: usize>(&self, s: S, chunks: usize) -> [S::F; G] {
        let zero = s.splat(0.0);
        let mut sums = [[zero; ROWS]; G];
        for j in 0..ROWS {
            let (whole, tail) = K::split(self.k.rows[j]);
            let mut sum = [zero; G];
            for chunk in 0..chunks {
                let k = match whole.get(chunk) {
                    Some(k) => K::load(s, k),
                    None => K::load(s, &K::pad(tail)),
                };
                for g in 0..G {
                    sum[g] = s.fma(s.load(&self.q[g * chunks + chunk].0), k, sum[g]);
                }
            }
            for g in 0..G {
                sums[g][j] = sum[g];
            }
        }
        each!(zero, |g| s.sum_each(sums[g]))
    }

    /// One chunk of the weighted sums of values.
    #[inline(always)]
    fn add_values<S: Simd, const G: usize>(
        &mut self,
        s: S,
        chunk: usize,
        per_query: usize,
        weights: &[Chunk; G],
        decays: &[S::F; G],
    ) {
        let mut sums = *decays;
        for g in 0..G {
            sums[g] = s.mul(s.load(&self.states[g * per_query + 1 + chunk].0), decays[g]);
        }
        for (j, row) in self.v.rows[..self.v.count].iter().enumerate() {
            let (whole, tail) = V::split(row);
            let v = match whole.get(chunk) {
                Some(v) => V::load(s, v),
                None => V::load(s, &V::pad(tail)),
            };
            for g in 0..G {
                sums[g] = s.fma(s.splat(weights[g].0[j]), v, sums[g]);
            }
        }
        for g in 0..G {
            s.store(sums[g], &mut self.states[g * per_query + 1 + chunk].0);
        }
    }
}
