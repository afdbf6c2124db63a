//! The online softmax: states of query heads, and how blocks and other states are added to them.
//!
//! A state is a header, with the maximum in lane 0 and the sum of weights in lane 1, and the weighted
//! sum of values. A block is added in three steps: [`Scores`], [`soften`], [`Values`]. They read it as
//! stored, or from a copy in f32; what is added to a state, and in which order, is the same.

use std::marker::PhantomData;
use std::ops::Range;

use super::ROWS;
use super::block::Ahead;
use crate::float::Element;
use crate::simd::{Kernel, LANES, Registers, Simd, each, exp};

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

/// What the rows of a block count for one query.
#[derive(Clone, Copy)]
pub(super) struct Weights {
    /// Scores, then the weights relative to the maximum so far.
    rows: Chunk,
    /// What older values are to be multiplied with, in every lane.
    decay: Chunk,
}

impl Weights {
    pub(super) const ZERO: Self = Self {
        rows: Chunk::ZERO,
        decay: Chunk::ZERO,
    };
}

/// Turns scores to weights relative to the new maximum, and updates maximum and sum of weights.
#[inline(always)]
pub(super) fn soften<S: Simd>(
    s: S,
    visible: &Range<usize>,
    weights: &mut Weights,
    header: &mut Chunk,
) {
    let old = header.0[0];
    let scores = s.load(&weights.rows.0);
    let seen = keep(s, scores, visible, s.splat(f32::NEG_INFINITY));
    let block = s.max_lane(seen);
    let new = if block > old { block } else { old };
    let decay = exp(s, s.splat(old - new));
    let p = exp(s, s.sub(scores, s.splat(new)));
    let p = keep(s, p, visible, s.splat(0.0));
    let sum = s.fma(s.splat(header.0[1]), decay, s.splat(s.sum(p)));
    s.store(sum, &mut header.0);
    header.0[1] = header.0[0];
    header.0[0] = new;
    s.store(p, &mut weights.rows.0);
    s.store(decay, &mut weights.decay.0);
}

/// The lanes `kept` of `x`, in others `fill`.
#[inline(always)]
fn keep<S: Simd>(s: S, x: S::F, kept: &Range<usize>, fill: S::F) -> S::F {
    s.keep_first(fill, kept.start, s.keep_first(x, kept.end, fill))
}

/// How the rows of a block are read.
pub(super) trait Source {
    /// Sixteen elements.
    type Chunk: Copy;

    fn load<S: Simd>(s: S, chunk: &Self::Chunk) -> S::F;
}

/// As they are stored.
pub(super) struct Stored<E>(PhantomData<E>);

/// From a copy in f32.
pub(super) struct Converted;

impl<E: Element> Source for Stored<E> {
    type Chunk = E::Chunk;

    #[inline(always)]
    fn load<S: Simd>(s: S, chunk: &E::Chunk) -> S::F {
        E::load(s, chunk)
    }
}

impl Source for Converted {
    type Chunk = Chunk;

    #[inline(always)]
    fn load<S: Simd>(s: S, chunk: &Chunk) -> S::F {
        s.load(&chunk.0)
    }
}

/// Calls a method with the number of queries to handle together, until all are done.
macro_rules! in_tiles {
    ($s:ident, $S:ty, $self:ident . $method:ident, $count:expr) => {{
        let mut first = 0;
        while first < $count {
            first += match $count - first {
                4.. if matches!(<$S>::REGISTERS, Registers::Many) => {
                    $self.$method::<$S, 4>($s, first)
                }
                3 if matches!(<$S>::REGISTERS, Registers::Many) => {
                    $self.$method::<$S, 3>($s, first)
                }
                2.. => $self.$method::<$S, 2>($s, first),
                _ => $self.$method::<$S, 1>($s, first),
            };
        }
    }};
}

/// Dot products of some queries with the rows of a block.
pub(super) struct Scores<'a, K: Source> {
    pub(super) rows: [&'a [K::Chunk]; ROWS],
    pub(super) q: &'a [Chunk],
    pub(super) weights: &'a mut [Weights],
    pub(super) ahead: Ahead<'a>,
}

impl<K: Source> Kernel for Scores<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        in_tiles!(s, S, self.tile, self.weights.len());
        self.ahead.fetch_all(s);
    }
}

impl<K: Source> Scores<'_, K> {
    /// `T` queries; returns `T`.
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&mut self, s: S, first: usize) -> usize {
        let chunks = self.q.len() / self.weights.len();
        let none: &[Chunk] = &[];
        let q: [_; T] = each!(none, |t| &self.q[(first + t) * chunks..][..chunks]);
        let mut sums = [[s.splat(0.0); ROWS]; T];
        match S::REGISTERS {
            Registers::Many => self.dots::<S, T, 4>(s, &q, &mut sums),
            Registers::Few => self.dots::<S, T, 2>(s, &q, &mut sums),
        }
        for t in 0..T {
            s.store(s.sum_each(sums[t]), &mut self.weights[first + t].rows.0);
        }
        T
    }

    /// Lane-wise sums of products, `J` rows at a time.
    #[inline(always)]
    fn dots<S: Simd, const T: usize, const J: usize>(
        &mut self,
        s: S,
        q: &[&[Chunk]; T],
        sums: &mut [[S::F; ROWS]; T],
    ) {
        let zero = s.splat(0.0);
        let chunks = q[0].len();
        let none: &[K::Chunk] = &[];
        let q: [_; T] = each!(q[0], |t| &q[t][..chunks]);
        for (group, rows) in self.rows.as_chunks::<J>().0.iter().enumerate() {
            let rows: [_; J] = each!(none, |j| &rows[j][..chunks]);
            let mut dots = [[zero; J]; T];
            for chunk in 0..chunks {
                self.ahead.fetch::<S, 2>(s);
                let k: [_; J] = each!(zero, |j| K::load(s, &rows[j][chunk]));
                for t in 0..T {
                    let q = s.load(&q[t][chunk].0);
                    for j in 0..J {
                        dots[t][j] = s.fma(q, k[j], dots[t][j]);
                    }
                }
            }
            for t in 0..T {
                for j in 0..J {
                    sums[t][group * J + j] = dots[t][j];
                }
            }
        }
    }
}

/// `values = values * decay + sum over the visible rows of weight * v`, for some queries.
pub(super) struct Values<'a, V: Source> {
    pub(super) rows: [&'a [V::Chunk]; ROWS],
    pub(super) visible: Range<usize>,
    pub(super) weights: &'a [Weights],
    pub(super) states: &'a mut [Chunk],
    pub(super) ahead: Ahead<'a>,
}

impl<V: Source> Kernel for Values<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        in_tiles!(s, S, self.tile, self.weights.len());
        self.ahead.fetch_all(s);
    }
}

impl<V: Source> Values<'_, V> {
    /// `T` queries; returns `T`.
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&mut self, s: S, first: usize) -> usize {
        let chunks = self.states.len() / self.weights.len() - 1;
        // Several chunks at once, because each is a chain of dependent additions.
        let mut chunk = 0;
        while chunk < chunks {
            chunk += match chunks - chunk {
                4.. if S::REGISTERS == Registers::Many => {
                    self.chunks::<S, T, 4>(s, first, chunk, chunks)
                }
                2.. => self.chunks::<S, T, 2>(s, first, chunk, chunks),
                _ => self.chunks::<S, T, 1>(s, first, chunk, chunks),
            };
        }
        T
    }

    /// `N` chunks of `T` queries; returns `N`.
    #[inline(always)]
    fn chunks<S: Simd, const T: usize, const N: usize>(
        &mut self,
        s: S,
        first: usize,
        chunk: usize,
        chunks: usize,
    ) -> usize {
        let zero = s.splat(0.0);
        let weights = &self.weights[first..first + T];
        let p: [_; T] = each!(&weights[0].rows.0, |t| &weights[t].rows.0);
        let mut sums = [[zero; N]; T];
        for t in 0..T {
            let decay = s.load(&weights[t].decay.0);
            let values = &self.states[(first + t) * (1 + chunks) + 1 + chunk..][..N];
            for c in 0..N {
                sums[t][c] = s.mul(s.load(&values[c].0), decay);
            }
        }
        for j in self.visible.start..self.visible.end.min(ROWS) {
            self.ahead.fetch::<S, 2>(s);
            let row = &self.rows[j][chunk..][..N];
            let v: [_; N] = each!(zero, |c| V::load(s, &row[c]));
            for t in 0..T {
                let p = s.splat(p[t][j]);
                for c in 0..N {
                    sums[t][c] = s.fma(p, v[c], sums[t][c]);
                }
            }
        }
        for t in 0..T {
            let values = &mut self.states[(first + t) * (1 + chunks) + 1 + chunk..][..N];
            for c in 0..N {
                s.store(sums[t][c], &mut values[c].0);
            }
        }
        N
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
