//! Dot products of queries and the keys of one block.
//!
//! In f32 a dot product is sixteen partial sums, lane `l` over the elements `l, l + 16, ..`, added
//! in the order of [`Simd::sum`]. There are two ways to get there: [`Rows`] takes a chunk of
//! elements per vector and adds up the lanes, best for few queries; [`Tiles`] takes a lane's
//! elements one by one with sixteen keys per vector, which saves that for the price of a packed
//! copy of the keys.

use super::BLOCK_ROWS;
use super::rows::Ahead;
use super::softmax::Chunk;
use crate::simd::{Kernel, LANES, Registers, Simd, each};

/// Vectors of keys per block.
pub(super) const HALVES: usize = BLOCK_ROWS / LANES;

/// Queries of a packed tile.
pub(super) const TILE: usize = 8;

/// Sums of some queries and the keys of one vector each, from rows.
pub(super) struct Rows<'a, 'b> {
    /// `[BLOCK_ROWS, chunks]`.
    pub(super) keys: &'a [Chunk],
    /// `[queries, chunks]`.
    pub(super) queries: &'a [Chunk],
    pub(super) chunks: usize,
    /// `[queries, HALVES]`.
    pub(super) scores: &'a mut [Chunk],
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for Rows<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let count = self.queries.len() / self.chunks;
        let mut first = 0;
        while first < count {
            let many = S::REGISTERS == Registers::Many;
            first += match count - first {
                4.. if many => self.queries::<S, 4>(s, first),
                3 if many => self.queries::<S, 3>(s, first),
                2.. => self.queries::<S, 2>(s, first),
                _ => self.queries::<S, 1>(s, first),
            };
        }
    }
}

impl Rows<'_, '_> {
    /// `T` queries; returns `T`.
    #[inline(always)]
    fn queries<S: Simd, const T: usize>(&mut self, s: S, first: usize) -> usize {
        for half in 0..HALVES {
            let mut sums = [[s.splat(0.0); LANES]; T];
            match S::REGISTERS {
                Registers::Many => self.dots::<S, T, 4>(s, first, half, &mut sums),
                Registers::Few => self.dots::<S, T, 2>(s, first, half, &mut sums),
            }
            for t in 0..T {
                let out = &mut self.scores[(first + t) * HALVES + half];
                s.store(s.sum_each(sums[t]), &mut out.0);
            }
        }
        T
    }

    /// Lane-wise sums of products, `J` keys at a time.
    #[inline(always)]
    fn dots<S: Simd, const T: usize, const J: usize>(
        &mut self,
        s: S,
        first: usize,
        half: usize,
        sums: &mut [[S::F; LANES]; T],
    ) {
        let (zero, chunks, none) = (s.splat(0.0), self.chunks, [].as_slice());
        let q: [&[Chunk]; T] = each!(none, |t| &self.queries[(first + t) * chunks..][..chunks]);
        let keys = &self.keys[half * LANES * chunks..][..LANES * chunks];
        for group in 0..LANES / J {
            let keys: [&[Chunk]; J] = each!(none, |j| &keys[(group * J + j) * chunks..][..chunks]);
            let mut dots = [[zero; J]; T];
            for chunk in 0..chunks {
                self.ahead.fetch::<S, 2>(s);
                let k: [_; J] = each!(zero, |j| s.load(&keys[j][chunk].0));
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

/// Transposes the keys of a block: `[LANES, chunks, HALVES]`, sixteen keys to a chunk.
pub(super) struct PackKeys<'a> {
    /// `[BLOCK_ROWS, chunks]`.
    pub(super) keys: &'a [Chunk],
    pub(super) chunks: usize,
    pub(super) out: &'a mut [Chunk],
}

impl Kernel for PackKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for half in 0..HALVES {
            let keys = &self.keys[half * LANES * self.chunks..][..LANES * self.chunks];
            for chunk in 0..self.chunks {
                let rows = each!(s.splat(0.0), |j| s.load(&keys[j * self.chunks + chunk].0));
                let lanes = s.transpose(rows);
                for lane in 0..LANES {
                    let place = (lane * self.chunks + chunk) * HALVES + half;
                    s.store(lanes[lane], &mut self.out[place].0);
                }
            }
        }
    }
}

/// Packs queries, `[queries, chunks]`, by tile: `[tiles, LANES, chunks]` of [`TILE`] elements.
pub(super) fn pack_queries(queries: &[Chunk], chunks: usize, out: &mut [[f32; TILE]]) {
    let tiles = queries.chunks(TILE * chunks);
    for (queries, out) in tiles.zip(out.chunks_exact_mut(LANES * chunks)) {
        for (t, query) in queries.chunks_exact(chunks).enumerate() {
            for (c, chunk) in query.iter().enumerate() {
                for (lane, x) in chunk.0.iter().enumerate() {
                    out[lane * chunks + c][t] = *x;
                }
            }
        }
    }
}

/// The lanes in the order in which [`Simd::sum`] adds them as a tree.
const ORDER: [usize; LANES] = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15];

/// Levels of that tree.
const LEVELS: usize = 4;

/// Sums of subtrees that wait for their sibling, by level.
pub(super) type Waiting = [[[Chunk; HALVES]; TILE]; LEVELS];

/// Sums of one tile of queries and the keys of a block, from packed copies.
pub(super) struct Tiles<'a> {
    /// See [`PackKeys`].
    pub(super) keys: &'a [Chunk],
    /// One tile of [`pack_queries`].
    pub(super) queries: &'a [[f32; TILE]],
    /// `[queries, HALVES]`, at most [`TILE`] queries.
    pub(super) scores: &'a mut [Chunk],
    pub(super) waiting: &'a mut Waiting,
}

impl Kernel for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        match S::REGISTERS {
            Registers::Many => self.part::<S, TILE, HALVES>(s, 0, 0),
            Registers::Few => {
                for half in 0..HALVES {
                    self.part::<S, 4, 1>(s, 0, half);
                    self.part::<S, 4, 1>(s, 4, half);
                }
            }
        }
    }
}

impl Tiles<'_> {
    /// Queries `first .. first + T` and `N` vectors of keys.
    #[inline(always)]
    fn part<S: Simd, const T: usize, const N: usize>(&mut self, s: S, first: usize, half: usize) {
        if self.scores.len() <= first * HALVES {
            return;
        }
        let chunks = self.queries.len() / LANES;
        for (index, lane) in ORDER.into_iter().enumerate() {
            let keys = &self.keys[lane * chunks * HALVES..][..chunks * HALVES];
            let queries = &self.queries[lane * chunks..][..chunks];
            let mut sums = [[s.splat(0.0); N]; T];
            for (keys, q) in keys.as_chunks::<HALVES>().0.iter().zip(queries) {
                let k: [_; N] = each!(s.splat(0.0), |n| s.load(&keys[half + n].0));
                for t in 0..T {
                    let q = s.splat(q[first + t]);
                    for n in 0..N {
                        sums[t][n] = s.fma(q, k[n], sums[t][n]);
                    }
                }
            }
            let level = index.trailing_ones() as usize;
            for sibling in &self.waiting[..level] {
                for t in 0..T {
                    for n in 0..N {
                        sums[t][n] = s.add(s.load(&sibling[t][n].0), sums[t][n]);
                    }
                }
            }
            if let Some(waiting) = self.waiting.get_mut(level) {
                for t in 0..T {
                    for n in 0..N {
                        s.store(sums[t][n], &mut waiting[t][n].0);
                    }
                }
            } else {
                let scores = self.scores.as_chunks_mut::<HALVES>().0;
                for (scores, sums) in scores[first..].iter_mut().zip(&sums) {
                    for n in 0..N {
                        s.store(sums[n], &mut scores[half + n].0);
                    }
                }
            }
        }
    }
}
