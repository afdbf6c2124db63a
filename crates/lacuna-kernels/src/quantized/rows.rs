//! One token: rows are streamed as they lie in memory, sixteen blocks of 32 columns at a time. (AVX2
//! has its own way, `eight`: sixteen blocks and their transposed terms do not fit its registers.)
//!
//! A task's rows are cut into a few streams that advance together, which reads memory faster than
//! one. Lanes are blocks here and rows in a panel; the terms of sixteen rows are transposed and
//! added block after block, so the sums are the same as a panel's, bit for bit.

use std::marker::PhantomData;
use std::ops::Range;

use super::formats::Format;
use super::panel::Extra;
use crate::activations::{ActivationRow, BLOCK};
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Simd, each, padded};

/// Groups of sixteen blocks whose terms are kept: 4096 columns.
const GROUPS: usize = 8;

/// Parts of a task's rows that advance together.
const STREAMS: usize = 4;

/// How far ahead of its use a row is prefetched.
const PREFETCH_BYTES: usize = 2048;

/// Bytes of the largest group: sixteen blocks of Q8_0.
const LARGEST_GROUP: usize = 16 * 34;

/// The activations of sixteen blocks, as the rows of a type are multiplied with them.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group {
    /// In the format's [`Order`].
    pub(super) q: [[u32; LANES]; 8],
    /// What the dot products lack, per block or per half of it.
    pub(super) correction: [[u32; LANES]; 2],
}

/// Where the columns of a group lie in [`Group::q`], so that lane `b` of the sums is block `b`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Vector `v` holds blocks `b = v % 4 + 8 * (v / 4)` and `b + 4`.
    Halves,
    /// Vectors `2 * v` and `2 * v + 1` hold the first and the second halves of blocks `v`, `v + 4`,
    /// `v + 8` and `v + 12`.
    Quarters,
}

impl Order {
    /// Block and half block that are quarter `quarter` of a vector.
    const fn source(self, vector: usize, quarter: usize) -> (usize, usize) {
        match self {
            Order::Halves => (
                vector % 4 + 8 * (vector / 4) + 4 * (quarter / 2),
                quarter % 2,
            ),
            Order::Quarters => (vector / 2 + 4 * quarter, vector % 2),
        }
    }
}

/// What a group adds to the sum of a row, a term per block.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Terms([f32; LANES]);

/// Terms of all rows of a step: first terms and, where a format has them, second ones.
type AllTerms = [[Terms; STREAMS * LANES * GROUPS]; 2];

/// What a worker needs for [`Rows`].
pub(crate) struct Scratch {
    x: [Group; GROUPS],
    terms: AllTerms,
    /// A group whose last blocks do not exist.
    tail: [u8; LARGEST_GROUP],
}

impl Scratch {
    pub(crate) const EMPTY: Self = Self {
        x: [Group {
            q: [[0; LANES]; 8],
            correction: [[0; LANES]; 2],
        }; GROUPS],
        terms: [[Terms([0.0; LANES]); STREAMS * LANES * GROUPS]; 2],
        tail: [0; LARGEST_GROUP],
    };
}

/// The rows from `first` on, as many as `out` holds, times one token.
pub(super) struct Rows<'a, D> {
    pub(super) weights: &'a Matrix<'a>,
    pub(super) x: ActivationRow<'a>,
    pub(super) first: usize,
    pub(super) out: &'a mut [f32],
    pub(super) scratch: &'a mut Scratch,
    pub(super) format: PhantomData<D>,
}

impl<D: Format> Kernel for Rows<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let blocks = self.x.q.len();
        for start in (0..blocks).step_by(GROUPS * LANES) {
            self.columns(s, start..blocks.min(start + GROUPS * LANES));
        }
    }
}

impl<D: Format> Rows<'_, D> {
    /// Adds the products of some blocks of columns.
    #[inline(always)]
    fn columns<S: Simd>(&mut self, s: S, blocks: Range<usize>) {
        arrange::<S, D>(s, &self.x, blocks.clone(), &mut self.scratch.x);
        let tiles = self.out.len().div_ceil(LANES);
        let per_stream = tiles.div_ceil(STREAMS);
        for step in 0..per_stream {
            for row in 0..LANES {
                for stream in 0..STREAMS {
                    let index = (stream * per_stream + step) * LANES + row;
                    if index < self.out.len() {
                        self.row(s, index, stream * LANES + row, &blocks);
                    }
                }
            }
            for stream in 0..STREAMS {
                let tile = stream * per_stream + step;
                if tile < tiles {
                    self.sum(s, tile, stream, &blocks);
                }
            }
        }
    }

    /// Computes the terms of a row and keeps them in `slot`.
    #[inline(always)]
    fn row<S: Simd>(&mut self, s: S, index: usize, slot: usize, blocks: &Range<usize>) {
        let group_bytes = LANES * BLOCK / D::DTYPE.block_len() * D::DTYPE.block_bytes();
        let offset = |block: usize| block * BLOCK / D::DTYPE.block_len() * D::DTYPE.block_bytes();
        let row = self.weights.row(self.first + index);
        let row = &row[offset(blocks.start)..offset(blocks.end)];
        let Scratch { x, terms, tail } = &mut *self.scratch;
        let first = slot * blocks.len().div_ceil(LANES);
        let groups = row.chunks_exact(group_bytes);
        let rest = groups.remainder();
        let whole = groups.len();
        for (index, group) in groups.enumerate() {
            for line in (0..group_bytes).step_by(64) {
                s.prefetch_line(group.as_ptr().wrapping_add(PREFETCH_BYTES + line));
            }
            store::<S, D>(s, terms, first + index, D::group(s, group, &x[index]));
        }
        if !rest.is_empty() {
            let padded = &mut tail[..group_bytes];
            padded[..rest.len()].copy_from_slice(rest);
            padded[rest.len()..].fill(0);
            store::<S, D>(s, terms, first + whole, D::group(s, padded, &x[whole]));
        }
    }

    /// Adds the terms of sixteen rows, block after block.
    #[inline(always)]
    fn sum<S: Simd>(&mut self, s: S, tile: usize, stream: usize, blocks: &Range<usize>) {
        let end = self.out.len().min((tile + 1) * LANES);
        let out = &mut self.out[tile * LANES..end];
        let mut lanes = [0.0; LANES];
        if blocks.start > 0 {
            lanes[..out.len()].copy_from_slice(out);
        }
        let mut sum = s.load(&lanes);
        let scale = &self.x.scale[blocks.clone()];
        let second = match D::EXTRA {
            Extra::Minimum => &self.x.scaled_sum[blocks.clone()],
            Extra::Nothing | Extra::SecondScale => scale,
        };
        let stride = blocks.len().div_ceil(LANES);
        let rows = stream * LANES * stride..(stream + 1) * LANES * stride;
        let [first_terms, second_terms] = &self.scratch.terms;
        for group in 0..stride {
            let firsts = load(s, &first_terms[rows.clone()], stride, group);
            let seconds = match D::EXTRA {
                Extra::Nothing => firsts,
                Extra::Minimum | Extra::SecondScale => {
                    load(s, &second_terms[rows.clone()], stride, group)
                }
            };
            let (scale, second) = (&scale[group * LANES..], &second[group * LANES..]);
            match (scale.first_chunk::<LANES>(), second.first_chunk::<LANES>()) {
                (Some(scale), Some(second)) => {
                    for block in 0..LANES {
                        sum = s.fused(firsts[block], s.splat(scale[block]), sum);
                        if D::EXTRA != Extra::Nothing {
                            sum = s.fused(seconds[block], s.splat(second[block]), sum);
                        }
                    }
                }
                _ => {
                    for (block, (scale, second)) in scale.iter().zip(second).enumerate() {
                        sum = s.fused(firsts[block], s.splat(*scale), sum);
                        if D::EXTRA != Extra::Nothing {
                            sum = s.fused(seconds[block], s.splat(*second), sum);
                        }
                    }
                }
            }
        }
        s.store(sum, &mut lanes);
        out.copy_from_slice(&lanes[..out.len()]);
    }
}

#[inline(always)]
fn store<S: Simd, D: Format>(s: S, all: &mut AllTerms, index: usize, terms: [S::F; 2]) {
    s.store(terms[0], &mut all[0][index].0);
    if D::EXTRA != Extra::Nothing {
        s.store(terms[1], &mut all[1][index].0);
    }
}

/// A group's terms of sixteen rows, by block.
#[inline(always)]
fn load<S: Simd>(s: S, rows: &[Terms], stride: usize, group: usize) -> [S::F; LANES] {
    s.transpose(each!(s.splat(0.0), |r| s.load(&rows[r * stride + group].0)))
}

/// Brings activations into the order of the format; blocks that do not exist become zeros.
#[inline(always)]
fn arrange<S: Simd, D: Format>(
    _: S,
    x: &ActivationRow<'_>,
    blocks: Range<usize>,
    groups: &mut [Group; GROUPS],
) {
    let offset = D::offset::<S>();
    for (first, group) in blocks.clone().step_by(LANES).zip(groups) {
        let count = (blocks.end - first).min(LANES);
        let mut q = [[[0; 4]; 2]; LANES];
        for (q, words) in q.iter_mut().zip(&x.q[first..][..count]) {
            q.as_flattened_mut().copy_from_slice(words);
        }
        for vector in 0..8 {
            for quarter in 0..4 {
                let (block, half) = D::ORDER.source(vector, quarter);
                group.q[vector][4 * quarter..4 * quarter + 4].copy_from_slice(&q[block][half]);
            }
        }
        let halves = [0, 1].map(|half| padded::<i32, LANES>(&x.half_sums[half][first..][..count]));
        for block in 0..LANES {
            let [a, b] = match D::EXTRA {
                Extra::SecondScale => [halves[0][block], halves[1][block]],
                Extra::Nothing | Extra::Minimum => [halves[0][block] + halves[1][block], 0],
            };
            group.correction[0][block] = (offset * a) as u32;
            group.correction[1][block] = (offset * b) as u32;
        }
    }
}
