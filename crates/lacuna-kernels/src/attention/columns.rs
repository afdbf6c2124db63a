//! Many queries of one head, a query to each lane.
//!
//! All of a step is done for one tile of queries before the next one: scores for the rows of a partition, weights,
//! values. What a tile writes in between stays in the first-level cache. Rows are copies in f32, read element by
//! element: an element is what all queries of a tile share, so that heads of any size fill vectors, and neither the
//! largest score nor a sum goes across lanes.
//!
//! Sums are those of the other ways, in their order: a dot product is sixteen partial sums, `l` over the elements
//! `l, l + 16, ..`, added as [`Simd::sum`] adds lanes; so is the sum of weights; values are added row by row.

use std::ops::Range;

use super::PARTITION;
use super::ahead::Ahead;
use super::softmax::Chunk;
use crate::elementwise::activation::{Function, SoftCap};
use crate::simd::{Kernel, LANES, Registers, Simd, each, exp, padded};

/// Rows whose scores are computed together. With a vector of queries in two registers, sixteen registers hold the
/// sums of six rows, the queries and one element of a row. Thirty-two registers hold those of two vectors, each of
/// one, and those that wait for their sibling.
const ROWS: usize = 6;

/// Vectors of queries of a tile, where there are as many.
const fn tile_vectors(registers: Registers) -> usize {
    match registers {
        Registers::Few => 1,
        Registers::Many => 2,
    }
}

/// Most queries of a tile.
pub(super) const MOST_QUERIES: usize = tile_vectors(Registers::Many) * LANES;

/// Queries of a tile.
pub(super) const fn tile_queries(registers: Registers) -> usize {
    tile_vectors(registers) * LANES
}

/// Chunks that `queries` of `chunks` each take when they are packed.
pub(super) fn packed_len(queries: usize, chunks: usize) -> usize {
    queries.div_ceil(LANES) * LANES * chunks
}

/// The lanes in the order in which [`Simd::sum`] adds them as a tree.
const ORDER: [usize; LANES] = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15];

/// Packs queries by tiles, scaled: `[LANES, chunks, vectors]`, elements in [`ORDER`]. The last tile has as many vectors
/// as it needs.
pub(super) struct PackColumns<'a, Q> {
    /// The elements of a query.
    pub(super) query: Q,
    pub(super) count: usize,
    pub(super) scale: f32,
    pub(super) chunks: usize,
    /// [`packed_len`].
    pub(super) out: &'a mut [Chunk],
}

impl<'q, Q: Fn(usize) -> &'q [f32]> Kernel for PackColumns<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (chunks, scale) = (self.chunks, s.splat(self.scale));
        let tile = tile_queries(S::REGISTERS);
        let tiles = self.out.chunks_mut(tile * chunks);
        for (first, out) in (0..self.count).step_by(tile).zip(tiles) {
            let vectors = out.len() / (LANES * chunks);
            for v in 0..vectors {
                let first = first + v * LANES;
                // Queries that do not exist are the last one again.
                let queries: [_; LANES] = each!([].as_slice(), |q| {
                    (self.query)((first + q).min(self.count - 1))
                });
                for chunk in 0..chunks {
                    let rows = each!(scale, |q| {
                        let elements = &queries[q][chunk * LANES..];
                        // Whole chunks without a copy of unknown length.
                        let elements = match elements.first_chunk() {
                            Some(whole) => s.load(whole),
                            None => s.load(&padded(elements)),
                        };
                        s.mul(elements, scale)
                    });
                    let lanes = s.transpose(rows);
                    for index in 0..LANES {
                        let place = (index * chunks + chunk) * vectors + v;
                        s.store(lanes[ORDER[index]], &mut out[place].0);
                    }
                }
            }
        }
    }
}

/// Rows of one head of a partition in f32, each in whole chunks with zeros behind the last element.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// `[PARTITION, chunks]`; what is not needed may be anything.
    pub(super) elements: &'a [[f32; LANES]],
    pub(super) chunks: usize,
}

/// Values, which may be in units.
#[derive(Clone, Copy)]
pub(super) struct Values<'a> {
    pub(super) rows: Rows<'a>,
    /// Elements of a row.
    pub(super) dim: usize,
    /// What a unit is worth, `[pairs, PARTITION]`; empty where it is 1.
    pub(super) units: &'a [[f32; PARTITION]],
}

/// Which of the rows of a partition the queries of a tile see. Those of later queries do not begin or end before
/// those of earlier ones.
pub(super) struct Seen {
    /// Rows that any of them sees.
    any: Range<usize>,
    /// Of those, the ones that all of them see.
    all: Range<usize>,
    /// For other rows, the lanes of each vector that see it.
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
    pub(super) fn new(queries: usize, visible: impl Fn(usize) -> Range<usize>) -> Option<Self> {
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
        for row in seen.some() {
            for (lanes, ranges) in seen.lanes[row].iter_mut().zip(&ranges) {
                let count = |is: &dyn Fn(&Range<usize>) -> bool| {
                    ranges.iter().take_while(|range| is(range)).count() as u8
                };
                *lanes = Lanes {
                    start: count(&|range| range.end <= row),
                    end: count(&|range| range.start <= row),
                };
            }
        }
        Some(seen)
    }

    /// Rows that some queries see and others do not.
    fn some(&self) -> impl Iterator<Item = usize> + use<> {
        (self.any.start..self.all.start).chain(self.all.end..self.any.end)
    }

    /// The lanes of `x` that see one of those, in others `fill`.
    #[inline(always)]
    fn keep<S: Simd>(&self, s: S, x: S::F, row: usize, vector: usize, fill: S::F) -> S::F {
        let Lanes { start, end } = self.lanes[row][vector];
        let x = s.keep_first(x, usize::from(end), fill);
        s.keep_first(fill, usize::from(start), x)
    }
}

/// One tile of queries and the rows of a partition: writes the states of the queries.
pub(super) struct Tile<'a, 'b> {
    /// One tile of [`PackColumns`].
    pub(super) queries: &'a [Chunk],
    pub(super) keys: Rows<'a>,
    /// Lanes of the last chunk of a key that are elements; nothing is computed for the others.
    pub(super) tail: usize,
    pub(super) values: Values<'a>,
    pub(super) seen: &'a Seen,
    pub(super) cap: Option<SoftCap>,
    /// Room for scores, `[PARTITION, vectors]` ...
    pub(super) scores: &'a mut [Chunk],
    /// ... and for sums of values, `[elements of whole chunks, vectors]`.
    pub(super) sums: &'a mut [Chunk],
    /// `[queries, 1 + chunks]`, of queries that exist.
    pub(super) states: &'a mut [Chunk],
    /// What comes next: keys, values.
    pub(super) ahead: &'a mut [Ahead<'b>; 2],
}

impl Kernel for Tile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        match self.queries.len() / (LANES * self.keys.chunks) {
            1 => self.vectors::<S, 1>(s),
            _ => self.vectors::<S, 2>(s),
        }
    }
}

impl Tile<'_, '_> {
    #[inline(always)]
    fn vectors<S: Simd, const V: usize>(&mut self, s: S) {
        self.scores::<S, V>(s);
        self.soften::<S, V>(s);
        match (self.values.units.is_empty(), S::REGISTERS, V) {
            (true, Registers::Many, _) => self.values::<S, V, 8, false>(s),
            (true, Registers::Few, _) => self.values::<S, V, 6, false>(s),
            (false, Registers::Many, _) => self.values::<S, V, 8, true>(s),
            // Elements of one unit, of which there are 32.
            (false, Registers::Few, _) => self.values::<S, V, 4, true>(s),
        }
        self.states::<S, V>(s);
    }

    #[inline(always)]
    fn scores<S: Simd, const V: usize>(&mut self, s: S) {
        let any = self.seen.any.clone();
        let chunks = self.keys.chunks;
        let scores = self.scores.as_chunks_mut::<V>().0;
        for start in any.clone().step_by(ROWS) {
            self.ahead[0].fetch::<S, 8>(s);
            // The last ones may be computed twice, or be rows that nobody needs.
            let start = start.min(PARTITION - ROWS);
            let rows = &self.keys.elements[start * chunks..(start + ROWS) * chunks];
            let products = Products::<V> {
                queries: self.queries.as_chunks().0,
                rows: each!([].as_slice(), |r| &rows[r * chunks..(r + 1) * chunks]),
                tail: self.tail,
            };
            let sums = products.sums(s);
            let out: &mut [[Chunk; V]; ROWS] = scores[start..]
                .first_chunk_mut()
                .expect("rows of a partition");
            for r in 0..ROWS {
                for v in 0..V {
                    s.store(sums[r][v], &mut out[r][v].0);
                }
            }
        }
    }

    /// Turns scores to weights, relative to the largest of each query, and writes the headers of states.
    #[inline(always)]
    fn soften<S: Simd, const V: usize>(&mut self, s: S) {
        let seen = self.seen;
        let scores = self.scores.as_chunks_mut::<V>().0;
        let (none, zero) = (s.splat(f32::NEG_INFINITY), s.splat(0.0));
        if let Some(cap) = self.cap {
            for scores in scores[seen.any.clone()].as_flattened_mut() {
                s.store(cap.of(s, s.load(&scores.0)), &mut scores.0);
            }
        }
        // What a query does not see has no part in the largest score, and a weight of exactly zero: `exp` of what is
        // that small is.
        for row in seen.some() {
            for v in 0..V {
                let score = &mut scores[row][v].0;
                s.store(seen.keep(s, s.load(score), row, v, none), score);
            }
        }
        let mut most = [none; V];
        for scores in &scores[seen.any.clone()] {
            for v in 0..V {
                most[v] = s.max(s.load(&scores[v].0), most[v]);
            }
        }
        // Sixteen sums, as if rows were lanes.
        let mut sums = [[zero; V]; LANES];
        for index in 0..LANES {
            let first = seen.any.start + (ORDER[index] + LANES - seen.any.start % LANES) % LANES;
            for row in (first..seen.any.end).step_by(LANES) {
                for v in 0..V {
                    let scores = &mut scores[row][v].0;
                    let weight = exp(s, s.sub(s.load(scores), most[v]));
                    sums[index][v] = s.add(sums[index][v], weight);
                    s.store(weight, scores);
                }
            }
        }
        let mut len = LANES;
        while len > 1 {
            len /= 2;
            for index in 0..len {
                sums[index] = each!(zero, |v| s.add(sums[2 * index][v], sums[2 * index + 1][v]));
            }
        }
        let mut header = [[[0.0; LANES]; V]; 2];
        for v in 0..V {
            s.store(most[v], &mut header[0][v]);
            s.store(sums[0][v], &mut header[1][v]);
        }
        let [most, sum] = [header[0].as_flattened(), header[1].as_flattened()];
        let states = self.states.chunks_exact_mut(1 + self.values.rows.chunks);
        for ((state, most), sum) in states.zip(most).zip(sum) {
            state[0] = Chunk::ZERO;
            state[0].0[..2].copy_from_slice(&[*most, *sum]);
        }
    }

    /// Adds up values, `D` elements of all rows at a time.
    #[inline(always)]
    fn values<S: Simd, const V: usize, const D: usize, const HAVE_UNITS: bool>(&mut self, s: S) {
        let dim = self.values.dim;
        let sums = self.sums.as_chunks_mut::<V>().0;
        for start in (0..dim).step_by(D) {
            self.ahead[1].fetch::<S, 8>(s);
            // The last ones may be computed twice, or be zeros behind a short row.
            let start = start.min(dim.saturating_sub(D));
            let columns = Columns::<V, D, HAVE_UNITS> {
                values: &self.values,
                weights: self.scores.as_chunks().0,
                seen: self.seen,
                start,
            };
            let sums = sums[start..].first_chunk_mut();
            columns.add_up(s, sums.expect("sums of whole chunks"));
        }
        let rest = dim.max(D)..self.values.rows.chunks * LANES;
        sums[rest].fill([Chunk::ZERO; V]);
    }

    /// Writes the sums of values to states.
    #[inline(always)]
    fn states<S: Simd, const V: usize>(&mut self, s: S) {
        let chunks = self.values.rows.chunks;
        let sums = self.sums.as_chunks::<V>().0;
        let queries = self.states.chunks_mut(LANES * (1 + chunks));
        for (v, states) in queries.enumerate() {
            for (chunk, sums) in sums.as_chunks::<LANES>().0[..chunks].iter().enumerate() {
                let queries = s.transpose(each!(s.splat(0.0), |d| s.load(&sums[d][v].0)));
                for (query, state) in states.chunks_exact_mut(1 + chunks).enumerate() {
                    s.store(queries[query], &mut state[1 + chunk].0);
                }
            }
        }
    }
}

/// Dot products of `V` vectors of queries and some rows of keys.
#[derive(Clone, Copy)]
struct Products<'a, const V: usize> {
    /// `[LANES, chunks]`, elements in [`ORDER`].
    queries: &'a [[Chunk; V]],
    /// `chunks` each.
    rows: [&'a [[f32; LANES]]; ROWS],
    tail: usize,
}

/// Sums of `V` vectors of queries.
type Of<S, const V: usize> = [[<S as Simd>::F; V]; ROWS];

impl<const V: usize> Products<'_, V> {
    #[inline(always)]
    fn sums<S: Simd>(self, s: S) -> Of<S, V> {
        match S::REGISTERS {
            Registers::Few => self.tree::<S, { LANES.ilog2() as usize }>(s, Self::element),
            Registers::Many => self.tree::<S, { (LANES / 4).ilog2() as usize }>(s, Self::four),
        }
    }

    /// Adds up `2^L` leaves of a tree. Those that wait for their sibling are in memory, on purpose: a tree that is written
    /// out leaves it to the compiler which are in registers, and the ones it chooses are moved more often.
    #[inline(always)]
    fn tree<S: Simd, const L: usize>(
        self,
        s: S,
        leaf: impl Fn(Self, S, usize) -> Of<S, V>,
    ) -> Of<S, V> {
        let mut waiting = [[[Chunk::ZERO; V]; ROWS]; L];
        for index in 0..1_usize << L {
            let mut sums = leaf(self, s, index * (LANES >> L));
            let level = index.trailing_ones() as usize;
            for waiting in &waiting[..level] {
                sums = add::<S, V>(s, &load(s, waiting), &sums);
            }
            match waiting.get_mut(level) {
                Some(waiting) => store(s, &sums, waiting),
                None => return sums,
            }
        }
        unreachable!("the last leaf is added to all that wait")
    }

    #[inline(always)]
    fn four<S: Simd>(self, s: S, first: usize) -> Of<S, V> {
        let (low, high) = (self.two(s, first), self.two(s, first + 2));
        add::<S, V>(s, &low, &high)
    }

    #[inline(always)]
    fn two<S: Simd>(self, s: S, first: usize) -> Of<S, V> {
        let (low, high) = (self.element(s, first), self.element(s, first + 1));
        add::<S, V>(s, &low, &high)
    }

    /// The sums of one element over all chunks that have it.
    #[inline(always)]
    fn element<S: Simd>(self, s: S, index: usize) -> Of<S, V> {
        let all = self.rows[0].len();
        let chunks = all - usize::from(ORDER[index] >= self.tail);
        let queries = &self.queries[index * all..][..chunks];
        let rows: [_; ROWS] = each!([].as_slice(), |r| &self.rows[r][..chunks]);
        let mut sums = [[s.splat(0.0); V]; ROWS];
        for chunk in 0..chunks {
            let queries: [_; V] = each!(s.splat(0.0), |v| s.load(&queries[chunk][v].0));
            for r in 0..ROWS {
                let element = s.splat(rows[r][chunk][ORDER[index]]);
                for v in 0..V {
                    sums[r][v] = s.fma(element, queries[v], sums[r][v]);
                }
            }
        }
        sums
    }
}

#[inline(always)]
fn add<S: Simd, const V: usize>(s: S, a: &Of<S, V>, b: &Of<S, V>) -> Of<S, V> {
    let mut sums = *a;
    for r in 0..ROWS {
        for v in 0..V {
            sums[r][v] = s.add(a[r][v], b[r][v]);
        }
    }
    sums
}

/// `D` elements of values, from `start` on, for `V` vectors of queries.
#[derive(Clone, Copy)]
struct Columns<'a, const V: usize, const D: usize, const HAVE_UNITS: bool> {
    values: &'a Values<'a>,
    /// `[PARTITION]`.
    weights: &'a [[Chunk; V]],
    seen: &'a Seen,
    start: usize,
}

impl<const V: usize, const D: usize, const HAVE_UNITS: bool> Columns<'_, V, D, HAVE_UNITS> {
    #[inline(always)]
    fn add_up<S: Simd>(self, s: S, out: &mut [[Chunk; V]; D]) {
        let (any, all) = (&self.seen.any, &self.seen.all);
        *out = [[Chunk::ZERO; V]; D];
        self.singly(s, any.start..all.start, out);
        let mut sums = load(s, out);
        for row in all.clone() {
            sums = self.add(s, row, &sums);
        }
        store(s, &sums, out);
        self.singly(s, all.end..any.end, out);
    }

    #[inline(always)]
    fn singly<S: Simd>(self, s: S, rows: Range<usize>, out: &mut [[Chunk; V]; D]) {
        if !rows.is_empty() {
            s.vectorize(Singly {
                columns: self,
                rows,
                out,
            });
        }
    }

    /// Adds a row for all queries.
    #[inline(always)]
    fn add<S: Simd>(&self, s: S, row: usize, sums: &[[S::F; V]; D]) -> [[S::F; V]; D] {
        let Rows { elements, chunks } = self.values.rows;
        let values = elements[row * chunks..(row + 1) * chunks].as_flattened();
        let values: &[f32; D] = values[self.start..]
            .first_chunk()
            .expect("elements of a row");
        let mut weights: [_; V] = each!(s.splat(0.0), |v| s.load(&self.weights[row][v].0));
        if HAVE_UNITS {
            let unit = s.splat(self.values.units[self.start / (2 * LANES)][row]);
            weights = each!(unit, |v| s.mul(weights[v], unit));
        }
        let mut sums = *sums;
        for d in 0..D {
            let value = s.splat(values[d]);
            for v in 0..V {
                sums[d][v] = s.fma(weights[v], value, sums[d][v]);
            }
        }
        sums
    }
}

#[inline(always)]
fn load<S: Simd, const V: usize, const D: usize>(s: S, from: &[[Chunk; V]; D]) -> [[S::F; V]; D] {
    let mut sums = [[s.splat(0.0); V]; D];
    for d in 0..D {
        for v in 0..V {
            sums[d][v] = s.load(&from[d][v].0);
        }
    }
    sums
}

#[inline(always)]
fn store<S: Simd, const V: usize, const D: usize>(
    s: S,
    sums: &[[S::F; V]; D],
    out: &mut [[Chunk; V]; D],
) {
    for d in 0..D {
        for v in 0..V {
            s.store(sums[d][v], &mut out[d][v].0);
        }
    }
}

/// Adds rows for the queries that see them; it is compiled apart because it is rarely needed.
struct Singly<'a, 'b, const V: usize, const D: usize, const HAVE_UNITS: bool> {
    columns: Columns<'a, V, D, HAVE_UNITS>,
    rows: Range<usize>,
    out: &'b mut [[Chunk; V]; D],
}

impl<const V: usize, const D: usize, const HAVE_UNITS: bool> Kernel
    for Singly<'_, '_, V, D, HAVE_UNITS>
{
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = load(s, self.out);
        for row in self.rows {
            let added = self.columns.add(s, row, &sums);
            for d in 0..D {
                for v in 0..V {
                    let seen = self.columns.seen;
                    sums[d][v] = seen.keep(s, added[d][v], row, v, sums[d][v]);
                }
            }
        }
        store(s, &sums, self.out);
    }
}
