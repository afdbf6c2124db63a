//! Values as AMX multiplies them: pairs of rows, rounded to bf16.
//!
//! A row that a query does not see has no weight, which leaves sums as they are if its values are numbers. Elements that
//! are not, and those that may be none when they are rounded, are left out, and added for the queries that see them.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use super::PARTITION;
use super::ahead::Ahead;
use super::elements::{Pair, with_element};
use super::rows::{Head, stored};
use crate::simd::amx::ROWS;
use crate::simd::{Bf16Products, Chunk, Kernel, LANES, Simd, each};

/// Rows of values that are multiplied at once.
pub(super) const BLOCK_ROWS: usize = 2 * ROWS;

/// Such blocks of a partition.
pub(super) const BLOCKS: usize = PARTITION / BLOCK_ROWS;

/// Writes pairs of rows, and looks for outliers.
pub(super) struct Pairs<S: Simd> {
    simd: S,
    proof: Bf16Products,
    /// Zeros, unless there was an outlier; two, because each addition waits for the one before.
    checks: [S::F; 2],
}

impl<S: Simd> Pairs<S> {
    #[inline(always)]
    pub(super) fn new(simd: S, proof: Bf16Products) -> Self {
        Self {
            simd,
            proof,
            checks: [simd.splat(0.0); 2],
        }
    }

    /// Writes one head of two rows, of which those that are not needed are empty and count as zeros, with zeros behind
    /// the last element. `before` is told which row and pair of elements comes next.
    #[inline(always)]
    pub(super) fn write<E: Pair>(
        &mut self,
        heads: &[&[u8]; 2],
        out: &mut [[f32; LANES]],
        before: impl Fn(usize, usize),
    ) {
        let s = self.simd;
        let (rows, out_pairs) = (heads.map(|head| E::split(head).0), out.len() / 2);
        if out.len().is_multiple_of(2) && rows.iter().all(|row| row.len() == out_pairs) {
            let rows = rows[0].iter().zip(rows[1]);
            for (pair, (rows, out)) in rows.zip(out.as_chunks_mut().0).enumerate() {
                before(0, pair);
                before(1, pair);
                self.pair([E::load(s, rows.0), E::load(s, rows.1)], out);
            }
            return;
        }
        for (pair, out) in out.chunks_mut(2).enumerate() {
            let rows = [0, 1].map(|at| {
                before(at, pair);
                match heads[at].is_empty() {
                    true => [s.splat(0.0); 2],
                    false => E::load(s, &stored::<E>(heads[at], pair)),
                }
            });
            let mut whole = [[0.0; LANES]; 2];
            self.pair(rows, &mut whole);
            out.copy_from_slice(&whole[..out.len()]);
        }
    }

    /// Writes thirty-two elements of both rows.
    #[inline(always)]
    fn pair(&mut self, rows: [[S::F; 2]; 2], out: &mut [[f32; LANES]; 2]) {
        let s = self.simd;
        for half in 0..2 {
            let pairs = s.round_rows(self.proof, [rows[0][half], rows[1][half]]);
            // What is not finite is not a number when it is multiplied by nothing.
            let check = &mut self.checks[half];
            *check = s.multiply_pairs(self.proof, pairs, s.splat(0.0), *check);
            s.store(pairs, &mut out[half]);
        }
    }

    /// Whether there was an outlier in what was written.
    #[inline(always)]
    pub(super) fn have_outliers(self) -> bool {
        let [first, second] = self.checks;
        self.simd.sum(self.simd.add(first, second)) != 0.0
    }
}

/// Copies rows that are keys and, but for their last elements, values, as they are multiplied in both: once read, what
/// [`CopyKeys`](super::rows::CopyKeys) and [`CopyTiles`](super::columns::CopyTiles) make of them. Says whether there are
/// outliers among values, which are left in.
pub(super) struct CopyBoth<'a, 'b> {
    pub(super) proof: Bf16Products,
    pub(super) keys: &'a Head<'a>,
    /// Vectors of a key, all of which are whole, ...
    pub(super) steps: usize,
    /// ... and two for each that is of a value too.
    pub(super) chunks: usize,
    /// `[PARTITION, steps]`.
    pub(super) key_rows: &'a mut [[f32; LANES]],
    /// `[PARTITION / 2, chunks]`.
    pub(super) value_pairs: &'a mut [[f32; LANES]],
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for CopyBoth<'_, '_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        with_element!(self.keys.view.layout().element, |E| self.copy::<S, E>(s))
    }
}

impl CopyBoth<'_, '_> {
    #[inline(always)]
    fn copy<S: Simd, E: Pair>(self, s: S) -> bool {
        let Self { steps, chunks, .. } = self;
        let heads = self.keys.bytes::<PARTITION>();
        let zero = s.splat(0.0);
        let mut checks = [zero; 2];
        for place in places(self.keys) {
            let heads = [heads[2 * place], heads[2 * place + 1]];
            let rows = heads.map(|head| E::split(head).0.get(..steps));
            let keys = &mut self.key_rows[2 * place * steps..2 * (place + 1) * steps];
            let (first, second) = keys.split_at_mut(steps);
            let values = &mut self.value_pairs[place * chunks..(place + 1) * chunks];
            let mut values = values.as_chunks_mut::<2>().0.iter_mut();
            for step in 0..steps {
                self.ahead.fetch::<S, 2>(s);
                // Rows that are not needed count as zeros.
                let pairs: [_; 2] = each!(zero, |at| match rows[at] {
                    Some(row) => s.round_pairs(self.proof, E::load(s, &row[step])),
                    None => zero,
                });
                s.store(pairs[0], &mut first[step]);
                s.store(pairs[1], &mut second[step]);
                let Some(values) = values.next() else {
                    continue;
                };
                let both = s.rows_of_pairs(self.proof, pairs);
                for half in 0..2 {
                    s.store(both[half], &mut values[half]);
                    // The upper bf16 of a lane is an f32 that ends in the lower one. What is not finite is not a number when
                    // it is multiplied by nothing.
                    let lower = s.bits_to_f32(s.u_shl(s.to_bits(pairs[half]), 16));
                    checks[half] = s.fma(pairs[half], zero, checks[half]);
                    checks[half] = s.fma(lower, zero, checks[half]);
                }
            }
        }
        s.sum(s.add(checks[0], checks[1])) != 0.0
    }
}

/// The places of pairs of rows in all blocks of which some row is needed.
pub(super) fn places(head: &Head<'_>) -> Range<usize> {
    let [start, end] = [head.rows.start, head.rows.end].map(|row| row - head.start);
    start / BLOCK_ROWS * ROWS..end.div_ceil(BLOCK_ROWS) * ROWS
}

/// Whether an element is none that weights can be nothing for: it is not finite, or is not when it is rounded.
fn is_outlier(x: f32) -> bool {
    !bf16::from_f32(x).is_finite()
}

/// Writes the same with zeros for outliers; it is compiled apart because it is rarely needed.
pub(super) struct WithoutOutliers<'a, E> {
    pub(super) proof: Bf16Products,
    /// Two for each place.
    pub(super) heads: &'a [&'a [u8]],
    pub(super) chunks: usize,
    /// `[places, chunks]`.
    pub(super) out: &'a mut [[f32; LANES]],
    pub(super) element: PhantomData<E>,
}

impl<E: Pair> Kernel for WithoutOutliers<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let places = self.heads.as_chunks::<2>().0.iter();
        for (heads, out) in places.zip(self.out.chunks_exact_mut(self.chunks)) {
            for (pair, out) in out.chunks_mut(2).enumerate() {
                let rows = heads.map(|head| match head.is_empty() {
                    true => [[0.0; LANES]; 2],
                    false => elements::<S, E>(s, head, pair),
                });
                for (chunk, out) in out.iter_mut().enumerate() {
                    let rows = rows.map(|row| {
                        s.load(&row[chunk].map(|x| if is_outlier(x) { 0.0 } else { x }))
                    });
                    s.store(s.round_rows(self.proof, rows), out);
                }
            }
        }
    }
}

/// The elements of a pair.
#[inline(always)]
fn elements<S: Simd, E: Pair>(s: S, head: &[u8], pair: usize) -> [[f32; LANES]; 2] {
    let mut elements = [[0.0; LANES]; 2];
    let halves = E::load(s, &stored::<E>(head, pair));
    for half in 0..2 {
        s.store(halves[half], &mut elements[half]);
    }
    elements
}

/// Adds outliers for queries that see them; it is compiled apart because it is rarely needed.
pub(super) struct AddOutliers<'a, V, W> {
    /// The rows that any query sees.
    pub(super) head: &'a Head<'a>,
    /// Those that a query sees, by place ...
    pub(super) visible: V,
    /// ... and the weight of one.
    pub(super) weight: W,
    pub(super) states: &'a mut [Chunk],
    pub(super) per_query: usize,
}

impl<V, W> Kernel for AddOutliers<'_, V, W>
where
    V: Fn(usize) -> Range<usize>,
    W: Fn(usize, usize) -> f32,
{
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let layout = self.head.view.layout();
        with_element!(layout.element, |E| {
            for (row, head) in self.head.bytes::<PARTITION>().into_iter().enumerate() {
                for pair in 0..head.len().min(1) * layout.head_dim.div_ceil(2 * LANES) {
                    let elements = elements::<S, E>(s, head, pair);
                    for (place, x) in elements.as_flattened().iter().enumerate() {
                        if !is_outlier(*x) {
                            continue;
                        }
                        let element = pair * 2 * LANES + place;
                        let states = self.states.chunks_exact_mut(self.per_query);
                        for (query, state) in states.enumerate() {
                            if (self.visible)(query).contains(&row) {
                                let sum = &mut state[1 + element / LANES].0[element % LANES];
                                *sum += (self.weight)(query, row) * x;
                            }
                        }
                    }
                }
            }
        });
    }
}
