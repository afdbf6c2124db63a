//! Products of float matrices (F32, F16, BF16) and f32 activations.
//!
//! Columns are taken in blocks of 512. In a block a dot product is eight partial sums, sum `l` over
//! the columns `l`, `l + 8`, .. in order, added up in the fixed order of [`Simd::sum_halves`]; the
//! blocks' sums are added one after the other. All paths sum in this order, so a result depends on
//! its row and its token alone, bit for bit.
//!
//! Eight lanes of a vector belong to one row and eight to another. Up to three tokens stream rows from the
//! file layout ([`stream`]), a few read each block of rows from memory once ([`few`]), and many are
//! multiplied with rows that are converted once ([`panels`]): where registers are few, transposed, so that each lane is a row
//! of its own ([`columns`]).
//!
//! Where that is asked for and the CPU has [`Bf16Products`], weights and activations are rounded to bf16
//! first ([`Rounded`]), and all of this is the same of pairs of columns instead of columns.

mod columns;
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
use crate::simd::{Bf16Products, Kernel, LANES, Registers, Simd, padded};

/// Columns whose products are summed before they join the sum of the row.
const BLOCK: usize = 512;

/// Columns of a row that a vector holds, or pairs of them.
const HALF: usize = 8;

/// Chunks between prefetches: whole cache lines, one of two-byte elements.
const CHUNKS: usize = 4;

/// How far ahead of its use a row is prefetched.
const PREFETCH_BYTES: usize = 2048;

/// The most tokens that all levels multiply with rows as they lie in memory, and of which a task has all.
pub(crate) const FEW_TOKENS: usize = 16;

/// One block of the output `[tokens, rows]`; up to [`FEW_TOKENS`] tokens are all in it.
pub(crate) struct Product<'a, 'b> {
    pub(crate) weights: &'a Matrix<'a>,
    pub(crate) x: &'a Activations<'a>,
    pub(crate) out: Block<'b, f32>,
    /// Whether weights and activations are rounded to bf16.
    pub(crate) rounded: Option<Bf16Products>,
    pub(crate) buffers: &'a mut Buffers,
}

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.weights.dtype() {
            DType::F32 => self.element(s, F32),
            DType::F16 => self.element(s, F16),
            DType::Bf16 => self.element(s, Bf16),
            dtype => unreachable!("{dtype} is not a float type"),
        }
    }
}

impl Product<'_, '_> {
    fn element<S: Simd, E: Pairs>(self, s: S, element: E) {
        // A constant, so that levels which never have such products do not compile them.
        if const { matches!(S::REGISTERS, Registers::Many) }
            && let Some(proof) = self.rounded
        {
            return self.multiply(s, Rounded { element, proof });
        }
        self.multiply(s, element);
    }

    fn multiply<S: Simd, E: Element>(mut self, s: S, element: E) {
        if self.x.cols() == 0 {
            for token in self.out.rows() {
                self.out.row(token).fill(0.0);
            }
        } else if self.x.tokens() <= stream::MOST_TOKENS {
            stream::multiply(s, element, self);
        } else if self.x.tokens() <= few::most_tokens::<S>()
            // Of more than `FEW_TOKENS` a block may have some only.
            && self.out.rows() == (0..self.x.tokens())
        {
            few::multiply(s, element, self);
        } else {
            panels::multiply(s, element, self);
        }
    }

    /// Where columns lie in the bytes of a row.
    fn bytes(&self, cols: &Range<usize>) -> Range<usize> {
        let element = self.weights.row_bytes() / self.weights.cols();
        cols.start * element..cols.end * element
    }
}

/// A worker's part of rows, and its tokens where they are rounded.
pub(crate) struct Buffers {
    part: Box<[f32]>,
    tokens: Box<[f32]>,
}

impl Buffers {
    /// Buffers, for products of rounded activations too.
    pub(crate) fn new(rounded: bool) -> Self {
        // With room to begin at a cache line.
        let zeros = |len: usize| vec![0.0; LANES + len].into_boxed_slice();
        Self {
            part: zeros(panels::PART_LEN),
            tokens: if rounded {
                zeros(panels::TOKENS_LEN)
            } else {
                Box::default()
            },
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.part) + size_of_val(&*self.tokens)
    }

    /// The part of rows, and the tokens.
    fn parts(&mut self) -> [&mut [[f32; HALF]]; 2] {
        [&mut self.part, &mut self.tokens].map(|all| {
            let start = all.as_ptr().align_offset(64).min(all.len());
            all[start..].as_chunks_mut().0
        })
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

/// Some neighbours of a row that are handled together.
trait Piece<T>: Copy + Sized {
    /// Whole pieces and what is after them.
    fn split(row: &[T]) -> (&[Self], &[T]);
    /// The piece that starts with `tail` and goes on with zeros.
    fn pad(tail: &[T]) -> Self;
}

impl<T: Copy + Default, const N: usize> Piece<T> for [T; N] {
    #[inline(always)]
    fn split(row: &[T]) -> (&[Self], &[T]) {
        row.as_chunks()
    }

    #[inline(always)]
    fn pad(tail: &[T]) -> Self {
        padded(tail)
    }
}

/// A float storage type, as many columns at a time as half a vector holds.
trait Element: Copy + 'static {
    /// Columns of a chunk.
    const COLUMNS: usize;
    /// Whether many tokens are converted once, by [`Element::prepare`].
    const PREPARED: bool;
    /// The bytes of a chunk of a row.
    type Chunk: Piece<u8>;
    /// A chunk of a token.
    type Columns: Piece<f32>;

    /// A chunk of one row and one of another.
    fn load<S: Simd>(self, s: S, rows: [&Self::Chunk; 2]) -> S::F;
    /// A chunk of a token, twice.
    fn load_twice<S: Simd>(self, s: S, columns: &Self::Columns) -> S::F;
    /// Writes what [`Simd::load_twice`] is to load instead of [`Element::load_twice`].
    #[inline(always)]
    fn prepare<S: Simd>(self, s: S, columns: &Self::Columns, out: &mut [f32; HALF]) {
        let mut twice = [0.0; LANES];
        s.store(self.load_twice(s, columns), &mut twice);
        out.copy_from_slice(&twice[..HALF]);
    }
    /// Adds products.
    fn multiply_add<S: Simd>(self, s: S, weights: S::F, x: S::F, sum: S::F) -> S::F;
}

/// A float storage type of which pairs of columns can be made.
trait Pairs: Element {
    /// The bytes of sixteen columns.
    type Wide: Piece<u8>;

    /// Pairs of one row and of another.
    fn load_pairs<S: Simd>(self, s: S, proof: Bf16Products, rows: [&Self::Wide; 2]) -> S::F;
}

/// Implements [`Element`] and [`Pairs`] for a type: the bytes of eight and of sixteen elements, and how they are
/// loaded.
macro_rules! element {
    (
        $name:ident, $bytes:literal, |$s:ident, $rows:ident| $load:expr,
        $wide:literal, |$proof:ident| $load_pairs:expr
    ) => {
        #[derive(Clone, Copy)]
        struct $name;

        impl Element for $name {
            const COLUMNS: usize = HALF;
            const PREPARED: bool = false;
            type Chunk = [u8; $bytes];
            type Columns = [f32; HALF];

            #[inline(always)]
            fn load<S: Simd>(self, $s: S, $rows: [&Self::Chunk; 2]) -> S::F {
                $load
            }

            #[inline(always)]
            fn load_twice<S: Simd>(self, s: S, columns: &Self::Columns) -> S::F {
                s.load_twice(columns)
            }

            #[inline(always)]
            fn multiply_add<S: Simd>(self, s: S, weights: S::F, x: S::F, sum: S::F) -> S::F {
                s.fma(weights, x, sum)
            }
        }

        impl Pairs for $name {
            type Wide = [u8; $wide];

            #[inline(always)]
            fn load_pairs<S: Simd>(
                self,
                $s: S,
                $proof: Bf16Products,
                $rows: [&Self::Wide; 2],
            ) -> S::F {
                $load_pairs
            }
        }
    };
}

element!(
    F32,
    32,
    |s, rows| s.bits_to_f32(s.u_halves(rows)),
    64,
    |proof| s.round_pairs(
        proof,
        [s.load_f32_bytes(rows[0]), s.load_f32_bytes(rows[1])]
    )
);
element!(F16, 16, |s, rows| s.load_f16_halves(rows), 32, |proof| s
    .round_pairs(proof, [s.load_f16(rows[0]), s.load_f16(rows[1])]));
element!(
    Bf16,
    16,
    |s, rows| s.bits_to_f32(s.u_shl(s.widen_words(rows), 16)),
    // They are pairs as they lie there.
    32,
    |_proof| s.bits_to_f32(s.u_halves(rows))
);

/// A type whose weights are rounded to bf16, and the activations with them. A pair is handled as the f32 that has its
/// bits.
#[derive(Clone, Copy)]
struct Rounded<E> {
    element: E,
    proof: Bf16Products,
}

impl<E: Pairs> Element for Rounded<E> {
    const COLUMNS: usize = 2 * HALF;
    const PREPARED: bool = true;
    type Chunk = E::Wide;
    type Columns = [f32; 2 * HALF];

    #[inline(always)]
    fn load<S: Simd>(self, s: S, rows: [&Self::Chunk; 2]) -> S::F {
        self.element.load_pairs(s, self.proof, rows)
    }

    #[inline(always)]
    fn load_twice<S: Simd>(self, s: S, columns: &Self::Columns) -> S::F {
        s.round_pairs(self.proof, [s.load(columns); 2])
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(self, s: S, weights: S::F, x: S::F, sum: S::F) -> S::F {
        s.multiply_pairs(self.proof, weights, x, sum)
    }
}
