//! How numbers are multiplied: in f32, or rounded to bf16, two at a time.

use crate::simd::{Bf16Products, Simd};

/// What a lane multiplies and adds at once.
pub(super) trait Arithmetic: Copy + Send + Sync + 'static {
    /// How many numbers.
    const AT_ONCE: usize;

    /// Vectors that thirty-two neighbours take.
    const VECTORS: usize = 2 / Self::AT_ONCE;

    /// Thirty-two neighbours in as many vectors; what is behind those is nothing.
    fn neighbours<S: Simd>(self, s: S, x: [S::F; 2]) -> [S::F; 2];

    /// Sixteen numbers of each of so many rows, those of one lane beside one another.
    fn rows<S: Simd>(self, s: S, x: [S::F; 2]) -> S::F;

    /// Adds products to sums.
    fn multiply<S: Simd>(self, s: S, a: S::F, b: S::F, sum: S::F) -> S::F;
}

/// In f32.
#[derive(Clone, Copy)]
pub(super) struct InF32;

impl Arithmetic for InF32 {
    const AT_ONCE: usize = 1;

    #[inline(always)]
    fn neighbours<S: Simd>(self, _: S, x: [S::F; 2]) -> [S::F; 2] {
        x
    }

    #[inline(always)]
    fn rows<S: Simd>(self, _: S, x: [S::F; 2]) -> S::F {
        x[0]
    }

    #[inline(always)]
    fn multiply<S: Simd>(self, s: S, a: S::F, b: S::F, sum: S::F) -> S::F {
        s.fma(a, b, sum)
    }
}

/// Pairs rounded to bf16, which are added in f32.
#[derive(Clone, Copy)]
pub(super) struct InBf16(pub(super) Bf16Products);

impl Arithmetic for InBf16 {
    const AT_ONCE: usize = 2;

    #[inline(always)]
    fn neighbours<S: Simd>(self, s: S, x: [S::F; 2]) -> [S::F; 2] {
        [s.round_pairs(self.0, x); 2]
    }

    #[inline(always)]
    fn rows<S: Simd>(self, s: S, x: [S::F; 2]) -> S::F {
        s.round_rows(self.0, x)
    }

    #[inline(always)]
    fn multiply<S: Simd>(self, s: S, a: S::F, b: S::F, sum: S::F) -> S::F {
        s.multiply_pairs(self.0, a, b, sum)
    }
}
