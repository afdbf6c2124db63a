//! Products of float matrices (F32, F16, BF16) and f32 activations.
//!
//! A dot product is sixteen partial sums, lane `l` over the columns `l, l + 16, ..`, added up in
//! the fixed order of [`Simd::sum`]. So a result depends on its row and token alone. Weights are
//! converted in registers; a register tile of rows and tokens shares the loads.

use crate::activations::Activations;
use crate::dtype::DType;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Registers, Simd, padded};

/// One block of columns of the output `[tokens, rows]`; the block covers all tokens.
pub(crate) struct Product<'a, 'b> {
    pub(crate) weights: &'a Matrix<'a>,
    pub(crate) x: &'a Activations<'a>,
    pub(crate) out: Block<'b, f32>,
}

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.weights.dtype() {
            DType::F32 => self.all::<S, F32>(s),
            DType::F16 => self.all::<S, F16>(s),
            DType::Bf16 => self.all::<S, Bf16>(s),
            dtype => unreachable!("{dtype} is not a float type"),
        }
    }
}

/// A float storage type.
trait Element: 'static {
    /// The bytes of sixteen weights.
    type Chunk: Copy;

    /// Whole chunks and the bytes after them.
    fn split(row: &[u8]) -> (&[Self::Chunk], &[u8]);
    /// The chunk that starts with `tail` and goes on with zeros.
    fn pad(tail: &[u8]) -> Self::Chunk;
    fn load<S: Simd>(s: S, chunk: &Self::Chunk) -> S::F;
}

macro_rules! element {
    ($name:ident, $bytes:literal, $load:ident) => {
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
            fn load<S: Simd>(s: S, chunk: &Self::Chunk) -> S::F {
                s.$load(chunk)
            }
        }
    };
}

element!(F32, 64, load_f32_bytes);
element!(F16, 32, load_f16);
element!(Bf16, 32, load_bf16);

impl Product<'_, '_> {
    fn all<S: Simd, E: Element>(mut self, s: S) {
        let (rows, tokens) = match S::REGISTERS {
            Registers::Many => (4, 6),
            Registers::Few => (2, 2),
        };
        let mut token = 0;
        while token < self.x.tokens() {
            let left = (self.x.tokens() - token).min(tokens);
            token += match left {
                6.. if tokens >= 6 => self.rows::<S, E, 6>(s, token, rows),
                3.. if tokens >= 6 => self.rows::<S, E, 3>(s, token, rows),
                2.. => self.rows::<S, E, 2>(s, token, rows),
                _ => self.rows::<S, E, 1>(s, token, rows),
            };
        }
    }

    /// All rows of the block times `T` tokens; returns `T`.
    fn rows<S: Simd, E: Element, const T: usize>(
        &mut self,
        s: S,
        token: usize,
        together: usize,
    ) -> usize {
        let rows = self.out.cols();
        let mut row = rows.start;
        while row < rows.end {
            row += match rows.end - row {
                4.. if together >= 4 => self.tile::<S, E, 4, T>(s, row, token),
                2.. => self.tile::<S, E, 2, T>(s, row, token),
                _ => self.tile::<S, E, 1, T>(s, row, token),
            };
        }
        T
    }

    /// `R` rows times `T` tokens; returns `R`.
    fn tile<S: Simd, E: Element, const R: usize, const T: usize>(
        &mut self,
        s: S,
        row: usize,
        token: usize,
    ) -> usize {
        let weights: [&[u8]; R] = std::array::from_fn(|r| self.weights.row(row + r));
        let x: [&[f32]; T] = std::array::from_fn(|t| self.x.row(token + t));
        let dots = s.vectorize(Dots::<E, R, T> {
            weights,
            x,
            element: std::marker::PhantomData,
        });
        let start = row - self.out.cols().start;
        for (t, dots) in dots.iter().enumerate() {
            self.out.row(token + t)[start..start + R].copy_from_slice(dots);
        }
        R
    }
}

/// The dot products of `R` rows and `T` tokens, by token.
struct Dots<'a, E, const R: usize, const T: usize> {
    weights: [&'a [u8]; R],
    x: [&'a [f32]; T],
    element: std::marker::PhantomData<E>,
}

impl<E: Element, const R: usize, const T: usize> Kernel for Dots<'_, E, R, T> {
    type Output = [[f32; R]; T];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [[f32; R]; T] {
        let mut sums = [[s.splat(0.0); T]; R];
        let chunks = self.x[0].len() / LANES;
        let x = self.x.map(|x| {
            (
                &x.as_chunks::<LANES>().0[..chunks],
                x.as_chunks::<LANES>().1,
            )
        });
        let weights = self.weights.map(|row| {
            let (whole, tail) = E::split(row);
            (&whole[..chunks], tail)
        });
        for chunk in 0..chunks {
            let x = x.map(|(whole, _)| s.load(&whole[chunk]));
            let weights = weights.map(|(whole, _)| E::load(s, &whole[chunk]));
            add(s, &weights, &x, &mut sums);
        }
        if !x[0].1.is_empty() {
            let x = x.map(|(_, tail)| s.load(&padded(tail)));
            let weights = weights.map(|(_, tail)| E::load(s, &E::pad(tail)));
            add(s, &weights, &x, &mut sums);
        }
        std::array::from_fn(|t| std::array::from_fn(|r| s.sum(sums[r][t])))
    }
}

#[inline(always)]
fn add<S: Simd, const R: usize, const T: usize>(
    s: S,
    weights: &[S::F; R],
    x: &[S::F; T],
    sums: &mut [[S::F; T]; R],
) {
    for r in 0..R {
        for t in 0..T {
            sums[r][t] = s.fma(weights[r], x[t], sums[r][t]);
        }
    }
}
