//! Dot products of queries and the keys of one block.
//!
//! In f32 a dot product is sixteen partial sums, lane `l` over the elements `l, l + 16, ..`, added
//! in the order of [`Simd::sum`]. There are two ways to get there: [`Rows`] takes a chunk of
//! elements per vector and adds up the lanes, best for few queries; [`Tiles`] takes a lane's
//! elements one by one with sixteen keys per vector, which saves that for the price of a packed
//! copy of the keys.

use std::marker::PhantomData;
use std::ops::Range;

use super::ahead::Ahead;
use super::elements::{Pair, with_element};
use super::rows::{BlockRows, stored};
use super::softmax::Chunk;
use super::stored::{HeadTile, StoredRows};
use super::{BLOCK_ROWS, PARTITION, PARTITION_CHUNKS};
use crate::simd::{Kernel, LANES, Registers, Simd, each};

/// Vectors of keys per block.
pub(super) const HALVES: usize = BLOCK_ROWS / LANES;

/// Queries of a packed tile at most.
pub(super) const TILE: usize = 8;

/// Queries of a packed tile: what registers hold the sums of.
pub(super) const fn tile_len(registers: Registers) -> usize {
    match registers {
        Registers::Few => FEW_TILE,
        Registers::Many => TILE,
    }
}

/// With a vector of keys in two registers, sixteen registers hold the sums of six queries, the keys
/// and one element of a query.
const FEW_TILE: usize = 6;

/// Sums of few queries and the keys of a partition, from rows as they are stored: with little to
/// compute, a copy would be what the time goes to.
///
/// Goes through memory in order: sixteen rows at a time, all heads of them.
pub(super) struct Rows<'a, E> {
    pub(super) rows: StoredRows<'a>,
    /// Room for rows that do not lie in one run.
    pub(super) copy: &'a mut [u8],
    /// `[queries, pairs]`.
    pub(super) queries: &'a [[Chunk; 2]],
    /// `[queries, PARTITION_CHUNKS]`.
    pub(super) scores: &'a mut [Chunk],
    pub(super) element: PhantomData<E>,
}

/// Rows that share each load of a query.
const GROUP: usize = 4;

/// Those of them where registers are few: a sum per query and row stays in a register.
const FEW_ROWS: usize = 2;

impl<E: Pair> Kernel for Rows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let many = S::REGISTERS == Registers::Many;
        match self.rows.queries_per_part {
            n if n.is_multiple_of(4) && many => self.all::<S, 4, GROUP>(s),
            n if n.is_multiple_of(2) && many => self.all::<S, 2, GROUP>(s),
            n if n.is_multiple_of(2) => self.all::<S, 2, FEW_ROWS>(s),
            _ => self.all::<S, 1, GROUP>(s),
        }
    }
}

impl<E: Pair> Rows<'_, E> {
    /// All queries, `T` of a head together with `R` rows.
    #[inline(always)]
    fn all<S: Simd, const T: usize, const R: usize>(self, s: S) {
        let per_head = self.rows.queries_per_part;
        let pairs = self.queries.len() / (self.rows.parts.len() * per_head);
        // Rows whose sums are one vector per query and row.
        let together = LANES / T;
        for rows in self.rows.sixteens() {
            let chunk = rows.start % PARTITION / LANES;
            for head in 0..self.rows.parts.len() {
                let keys = rows.head(head, self.copy);
                for first in (head * per_head..(head + 1) * per_head).step_by(T) {
                    let queries = &self.queries[first * pairs..][..T * pairs];
                    let out = &mut self.scores[first * PARTITION_CHUNKS + chunk..];
                    for row in (0..LANES).step_by(together) {
                        let mut sums = [s.splat(0.0); LANES];
                        for place in (0..together).step_by(R) {
                            let dots = dots::<S, E, T, R>(s, &keys, row + place, queries);
                            for t in 0..T {
                                for j in 0..R {
                                    sums[t * together + place + j] = dots[t][j];
                                }
                            }
                        }
                        let mut scores = [0.0; LANES];
                        s.store(s.sum_each(sums), &mut scores);
                        let scores = scores.chunks_exact(together);
                        for (scores, out) in scores.zip(out.iter_mut().step_by(PARTITION_CHUNKS)) {
                            out.0[row..row + together].copy_from_slice(scores);
                        }
                    }
                }
            }
        }
    }
}

/// Lane-wise sums of products of `T` queries of one head and `R` rows from `first` on.
#[inline(always)]
fn dots<S: Simd, E: Pair, const T: usize, const R: usize>(
    s: S,
    keys: &HeadTile<'_>,
    first: usize,
    queries: &[[Chunk; 2]],
) -> [[S::F; R]; T] {
    let (pairs, bytes) = (queries.len() / T, size_of::<E::Stored>());
    let q: [_; T] = each!([].as_slice(), |t| &queries[t * pairs..][..pairs]);
    let rows: [&[E::Stored]; R] = each!([].as_slice(), |j| {
        &E::split(keys.tile.row(first + j)).0[..pairs]
    });
    let zero = s.splat(0.0);
    let mut dots = [[zero; R]; T];
    for pair in 0..pairs {
        for j in 0..R {
            keys.prefetch(s, first + j, pair * bytes, bytes);
        }
        let k: [_; R] = each!([zero; 2], |j| E::load(s, &rows[j][pair]));
        for half in 0..2 {
            for t in 0..T {
                let q = s.load(&q[t][pair][half].0);
                for j in 0..R {
                    dots[t][j] = s.fma(q, k[j][half], dots[t][j]);
                }
            }
        }
    }
    dots
}

/// Converts and transposes the keys of a block: `[LANES, chunks, HALVES]`, sixteen keys to a chunk,
/// lanes in [`ORDER`].
pub(super) struct PackKeys<'a, 'b> {
    pub(super) block: &'a BlockRows<'a>,
    pub(super) chunks: usize,
    pub(super) out: &'a mut [Chunk],
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for PackKeys<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_element!(self.block.view.layout().element, |E| self.pack::<S, E>(s));
    }
}

impl PackKeys<'_, '_> {
    #[inline(always)]
    fn pack<S: Simd, E: Pair>(mut self, s: S) {
        for half in 0..HALVES {
            let Some(heads) = self.block.heads(half) else {
                continue;
            };
            let whole: [_; LANES] = each!([].as_slice(), |j| E::split(heads[j]).0);
            for pair in 0..self.chunks.div_ceil(2) {
                // As many lines as are read here, so that the next block is there in time even if there
                // are few queries to multiply with this one.
                for _ in 0..4 {
                    self.ahead.fetch::<S, 4>(s);
                }
                // One chunk after the other, because both of sixteen keys would not fit registers.
                for chunk in 0..2.min(self.chunks - 2 * pair) {
                    let rows = match whole.iter().all(|row| pair < row.len()) {
                        true => each!(s.splat(0.0), |j| E::load(s, &whole[j][pair])[chunk]),
                        false => each!(s.splat(0.0), |j| {
                            E::load(s, &stored::<E>(heads[j], pair))[chunk]
                        }),
                    };
                    self.transpose(s, rows, 2 * pair + chunk, half);
                }
            }
        }
    }

    #[inline(always)]
    fn transpose<S: Simd>(&mut self, s: S, rows: [S::F; LANES], chunk: usize, half: usize) {
        let lanes = s.transpose(rows);
        for index in 0..LANES {
            let place = (index * self.chunks + chunk) * HALVES + half;
            s.store(lanes[ORDER[index]], &mut self.out[place].0);
        }
    }
}

/// Packs queries by tiles of [`tile_len`]: `[tiles, LANES, chunks, tile]`, lanes in [`ORDER`].
pub(super) struct PackQueries<'a> {
    /// `[queries, chunks]`.
    pub(super) queries: &'a [Chunk],
    pub(super) chunks: usize,
    pub(super) out: &'a mut [f32],
}

impl Kernel for PackQueries<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match S::REGISTERS {
            Registers::Many => self.tiles::<S, TILE>(s),
            Registers::Few => self.tiles::<S, FEW_TILE>(s),
        }
    }
}

impl PackQueries<'_> {
    #[inline(always)]
    fn tiles<S: Simd, const T: usize>(self, s: S) {
        let chunks = self.chunks;
        let tiles = self.queries.chunks(T * chunks);
        let out = self.out.as_chunks_mut::<T>().0;
        for (queries, out) in tiles.zip(out.chunks_exact_mut(chunks * LANES)) {
            let count = queries.len() / chunks;
            for chunk in 0..chunks {
                // Queries that do not exist are the last one again.
                let rows = each!(s.splat(0.0), |t| {
                    s.load(&queries[t.min(count - 1) * chunks + chunk].0)
                });
                let lanes = s.transpose(rows);
                for index in 0..LANES {
                    let mut all = [0.0; LANES];
                    s.store(lanes[ORDER[index]], &mut all);
                    let of_tile = all
                        .first_chunk()
                        .expect("a tile has at most sixteen queries");
                    out[index * chunks + chunk] = *of_tile;
                }
            }
        }
    }
}

/// The lanes in the order in which [`Simd::sum`] adds them as a tree.
const ORDER: [usize; LANES] = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15];

/// Sums of one tile of queries and the keys of a block, from packed copies.
pub(super) struct Tiles<'a> {
    /// See [`PackKeys`].
    pub(super) keys: &'a [Chunk],
    /// One tile of [`PackQueries`].
    pub(super) queries: &'a [f32],
    /// The chunks of the block in `[queries, PARTITION_CHUNKS]`, at most [`tile_len`] queries.
    pub(super) scores: &'a mut [Chunk],
    /// The vectors of keys that have one that is needed.
    pub(super) halves: Range<usize>,
}

impl Kernel for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for half in self.halves.clone() {
            match S::REGISTERS {
                Registers::Many => self.part::<S, TILE>(s, half),
                Registers::Few => self.part::<S, FEW_TILE>(s, half),
            }
        }
    }
}

impl Tiles<'_> {
    /// All `T` queries and one vector of keys.
    #[inline(always)]
    fn part<S: Simd, const T: usize>(&mut self, s: S, half: usize) {
        let queries = self.queries.as_chunks::<T>().0;
        let packed = Packed {
            keys: self.keys.as_chunks().0,
            queries,
            chunks: queries.len() / LANES,
            half,
        };
        let sums = packed.sums(s);
        // Constant indices keep the sums in registers; the last tile may not be full.
        for t in 0..T {
            if let Some(out) = self.scores.get_mut(t * PARTITION_CHUNKS + half) {
                s.store(sums[t], &mut out.0);
            }
        }
    }
}

/// What a tile's sums are of.
#[derive(Clone, Copy)]
struct Packed<'a, const T: usize> {
    keys: &'a [[Chunk; HALVES]],
    queries: &'a [[f32; T]],
    chunks: usize,
    /// Which vector of keys.
    half: usize,
}

/// The tree of sums is written out: those of a lane and of two subtrees that wait for their sibling
/// fit registers.
impl<const T: usize> Packed<'_, T> {
    #[inline(always)]
    fn sums<S: Simd>(self, s: S) -> [S::F; T] {
        let (low, high) = (self.eight(s, 0), self.eight(s, 8));
        add(s, &low, &high)
    }

    #[inline(always)]
    fn eight<S: Simd>(self, s: S, first: usize) -> [S::F; T] {
        let (low, high) = (self.four(s, first), self.four(s, first + 4));
        add(s, &low, &high)
    }

    #[inline(always)]
    fn four<S: Simd>(self, s: S, first: usize) -> [S::F; T] {
        let (low, high) = (self.two(s, first), self.two(s, first + 2));
        add(s, &low, &high)
    }

    #[inline(always)]
    fn two<S: Simd>(self, s: S, first: usize) -> [S::F; T] {
        let (low, high) = (self.lane(s, first), self.lane(s, first + 1));
        add(s, &low, &high)
    }

    /// The sums of one lane over all chunks.
    #[inline(always)]
    fn lane<S: Simd>(self, s: S, index: usize) -> [S::F; T] {
        let keys = &self.keys[index * self.chunks..][..self.chunks];
        let queries = &self.queries[index * self.chunks..][..self.chunks];
        let mut sums = [s.splat(0.0); T];
        for (keys, q) in keys.iter().zip(queries) {
            let k = s.load(&keys[self.half].0);
            for t in 0..T {
                sums[t] = s.fma(s.splat(q[t]), k, sums[t]);
            }
        }
        sums
    }
}

#[inline(always)]
fn add<S: Simd, const T: usize>(s: S, a: &[S::F; T], b: &[S::F; T]) -> [S::F; T] {
    each!(a[0], |t| s.add(a[t], b[t]))
}
