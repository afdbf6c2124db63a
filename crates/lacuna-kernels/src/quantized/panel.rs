//! Packed blocks of sixteen rows and the one step every product of quantized values is made of.

use crate::activations::ActivationBlock;
use crate::simd::{Simd, each};

/// What a block has besides one scale per row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Extra {
    /// Nothing.
    Nothing,
    /// A value that is added to every weight.
    Minimum,
    /// A scale of the second half of the columns; the first is of the first half only.
    SecondScale,
}

/// Thirty-two columns of sixteen rows, in registers.
#[derive(Clone, Copy)]
pub(super) struct PackedBlock<S: Simd> {
    /// Word `g` of lane `r`: weights `4 * g ..` of row `r`, as [`Simd::weights`] makes them.
    pub(super) words: [S::U; 8],
    pub(super) scale: S::F,
    /// See [`Extra`]; unused where there is none.
    pub(super) extra: S::F,
}

/// The same in memory.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct StoredBlock {
    words: [[u32; 16]; 8],
    scale: [f32; 16],
    extra: [f32; 16],
}

impl StoredBlock {
    pub(crate) const EMPTY: Self = Self {
        words: [[0; 16]; 8],
        scale: [0.0; 16],
        extra: [0.0; 16],
    };

    #[inline(always)]
    pub(super) fn store<S: Simd>(&mut self, s: S, block: &PackedBlock<S>) {
        for g in 0..8 {
            s.u_store(block.words[g], &mut self.words[g]);
        }
        s.store(block.scale, &mut self.scale);
        s.store(block.extra, &mut self.extra);
    }
}

/// Where a step reads its weights from.
pub(super) trait Source<S: Simd> {
    fn word(&self, s: S, g: usize) -> S::U;
    fn scale(&self, s: S) -> S::F;
    fn extra(&self, s: S) -> S::F;
}

impl<S: Simd> Source<S> for PackedBlock<S> {
    #[inline(always)]
    fn word(&self, _: S, g: usize) -> S::U {
        self.words[g]
    }

    #[inline(always)]
    fn scale(&self, _: S) -> S::F {
        self.scale
    }

    #[inline(always)]
    fn extra(&self, _: S) -> S::F {
        self.extra
    }
}

impl<S: Simd> Source<S> for &StoredBlock {
    #[inline(always)]
    fn word(&self, s: S, g: usize) -> S::U {
        s.u_load(&self.words[g])
    }

    #[inline(always)]
    fn scale(&self, s: S) -> S::F {
        s.load(&self.scale)
    }

    #[inline(always)]
    fn extra(&self, s: S) -> S::F {
        s.load(&self.extra)
    }
}

/// Sums of `R` tiles of sixteen rows and `T` tokens.
pub(super) type Sums<S, const R: usize, const T: usize> = [[<S as Simd>::F; T]; R];

/// Adds the products of one block of columns. What is added to one sum, and in which order, does
/// not depend on `R`, `T` or the source.
#[inline(always)]
pub(super) fn step<S: Simd, B: Source<S>, const R: usize, const T: usize>(
    s: S,
    extra: Extra,
    weights: &[B; R],
    x: &ActivationBlock<T>,
    sums: &mut Sums<S, R, T>,
) {
    if extra == Extra::SecondScale {
        for half in 0..2 {
            let start = each!(0, |t| x.start_halves[t][half]);
            let dots = dots(s, weights, x, start, 4 * half);
            for r in 0..R {
                let scale = if half == 0 {
                    weights[r].scale(s)
                } else {
                    weights[r].extra(s)
                };
                for t in 0..T {
                    sums[r][t] = s.dot_end(dots[r][t], scale, s.splat(x.scale[t]), sums[r][t]);
                }
            }
        }
        return;
    }
    let low = dots(s, weights, x, x.start, 0);
    let dots = continue_dots(s, weights, x, low, 4);
    for r in 0..R {
        let scale = weights[r].scale(s);
        for t in 0..T {
            sums[r][t] = s.dot_end(dots[r][t], scale, s.splat(x.scale[t]), sums[r][t]);
        }
        if extra == Extra::Minimum {
            let minimum = weights[r].extra(s);
            for t in 0..T {
                sums[r][t] = s.fused(minimum, s.splat(x.scaled_sum[t]), sums[r][t]);
            }
        }
    }
}

/// Integer products of the four words from `first` on.
#[inline(always)]
fn dots<S: Simd, B: Source<S>, const R: usize, const T: usize>(
    s: S,
    weights: &[B; R],
    x: &ActivationBlock<T>,
    start: [i32; T],
    first: usize,
) -> [[S::U; T]; R] {
    let start: [_; T] = each!(s.dot_start(0), |t| s.dot_start(start[t]));
    continue_dots(s, weights, x, [start; R], first)
}

#[inline(always)]
fn continue_dots<S: Simd, B: Source<S>, const R: usize, const T: usize>(
    s: S,
    weights: &[B; R],
    x: &ActivationBlock<T>,
    mut sums: [[S::U; T]; R],
    first: usize,
) -> [[S::U; T]; R] {
    for g in first..first + 4 {
        for r in 0..R {
            let word = weights[r].word(s, g);
            for t in 0..T {
                sums[r][t] = s.dot4(sums[r][t], word, x.q[t][g]);
            }
        }
    }
    sums
}
