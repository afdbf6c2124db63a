//! Products of float matrices (F32, F16, BF16) and f32 activations.
//!
//! Columns are taken in blocks of 512. In a block a dot product is eight partial sums, sum `l` over
//! the columns `l`, `l + 8`, .. in order, added up in the fixed order of [`Simd::sum_halves`]; the
//! blocks' sums are added one after the other. All paths sum in this order, so a result depends on
//! its row and its token alone, bit for bit.
//!
//! Eight lanes of a vector belong to one row and eight to another; of many tokens, where registers are
//! many, each lane is a row. Up to three tokens stream rows from the file layout ([`stream`]), a few
//! read each block of rows from memory once ([`few`]), and many are multiplied with rows that are
//! converted once ([`panels`]).

mod few;
mod panels;
mod stream;
mod tile;
mod tokens;

pub(crate) use tokens::band_tokens;

use std::ops::Range;

use crate::activations::Activations;
use crate::dtype::DType;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Simd, padded};

/// Columns whose products are summed before they join the sum of the row.
const BLOCK: usize = 512;

/// Columns of a row that a vector holds.
const HALF: usize = 8;

/// Chunks between prefetches: whole cache lines, one of two-byte elements.
const CHUNKS: usize = 4;

/// How far ahead of its use a row is prefetched.
const PREFETCH_BYTES: usize = 2048;

/// The most tokens that are multiplied as they lie in memory.
pub(crate) const FEW_TOKENS: usize = 16;

/// One block of the output `[tokens, rows]`; up to [`FEW_TOKENS`] tokens are all in it.
pub(crate) struct Product<'a, 'b> {
    pub(crate) weights: &'a Matrix<'a>,
    pub(crate) x: &'a Activations<'a>,
    pub(crate) out: Block<'b, f32>,
    pub(crate) buffers: &'a mut Buffers,
}

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.weights.dtype() {
            DType::F32 => self.element::<S, F32>(s),
            DType::F16 => self.element::<S, F16>(s),
            DType::Bf16 => self.element::<S, Bf16>(s),
            dtype => unreachable!("{dtype} is not a float type"),
        }
    }
}

impl Product<'_, '_> {
    fn element<S: Simd, E: Element>(mut self, s: S) {
        if self.x.cols() == 0 {
            for token in self.out.rows() {
                self.out.row(token).fill(0.0);
            }
        } else if self.x.tokens() <= stream::MOST_TOKENS {
            stream::multiply::<S, E>(s, self);
        } else if self.x.tokens() <= FEW_TOKENS {
            few::multiply::<S, E>(s, self);
        } else {
            panels::multiply::<S, E>(s, self);
        }
    }

    /// Where columns lie in the bytes of a row.
    fn bytes(&self, cols: &Range<usize>) -> Range<usize> {
        let element = self.weights.row_bytes() / self.weights.cols();
        cols.start * element..cols.end * element
    }
}

/// A worker's part of rows.
pub(crate) struct Buffers(Box<[f32]>);

impl Buffers {
    pub(crate) fn new() -> Self {
        // With room to begin at a cache line.
        Self(vec![0.0; LANES + panels::PART_LEN].into_boxed_slice())
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// The part of rows.
    fn part(&mut self) -> &mut [f32] {
        let start = self.0.as_ptr().align_offset(64).min(LANES);
        &mut self.0[start..start + panels::PART_LEN]
    }
}

/// The blocks of columns of a row.
fn blocks(cols: usize) -> impl Iterator<Item = Range<usize>> {
    (0..cols)
        .step_by(BLOCK)
        .map(move |start| start..cols.min(start + BLOCK))
}

/// Prefetches [`CHUNKS`] chunks from the `chunk`-th after an address, which may be any.
#[inline(always)]
fn prefetch_chunks<S: Simd, E: Element>(s: S, address: *const u8, chunk: usize) {
    let start = chunk * size_of::<E::Chunk>();
    for line in (0..CHUNKS * size_of::<E::Chunk>()).step_by(64) {
        s.prefetch_far(address.wrapping_add(start + line));
    }
}

/// A float storage type, eight elements at a time.
trait Element: 'static {
    /// The bytes of eight elements.
    type Chunk: Copy;

    /// Whole chunks and the bytes after them.
    fn split(row: &[u8]) -> (&[Self::Chunk], &[u8]);
    /// The chunk that starts with `tail` and goes on with zeros.
    fn pad(tail: &[u8]) -> Self::Chunk;
    /// Eight elements of one row and eight of another as f32.
    fn load<S: Simd>(s: S, rows: [&Self::Chunk; 2]) -> S::F;
}

macro_rules! element {
    ($name:ident, $bytes:literal, |$s:ident, $rows:ident| $load:expr) => {
        struct $name;

        impl Element for $name {
            type Chunk = [u8; $bytes];

            #[inline(always)]
            fn split(row: &[u8]) -> (&[Self::Chunk], &[u8]) {
                row.as_chunks()
            }

            #[inline(always)]
            fn pad(tail: &[u8]) -> Self::Chunk {
                padded(tail)
            }

            #[inline(always)]
            fn load<S: Simd>($s: S, $rows: [&Self::Chunk; 2]) -> S::F {
                $load
            }
        }
    };
}

element!(F32, 32, |s, rows| s.bits_to_f32(s.u_halves(rows)));
element!(F16, 16, |s, rows| s.load_f16_halves(rows));
element!(Bf16, 16, |s, rows| s
    .bits_to_f32(s.u_shl(s.widen_words(rows), 16)));
