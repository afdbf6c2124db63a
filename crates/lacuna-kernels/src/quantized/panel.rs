//! Packed blocks of sixteen rows and the one step every product of quantized values is made of.

use std::ops::Range;

use super::packing::{Dots, Packing, Vectors};
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
    /// A value that is added to the weights of the first half of the columns, and another one of the
    /// second half.
    TwoMinima,
}

/// [`Extra`] as a type, so that one kernel serves all storage types that share it.
pub(super) trait HasExtra {
    const EXTRA: Extra;
}

pub(super) struct Plain;
pub(super) struct WithMinimum;
pub(super) struct WithSecondScale;
pub(super) struct WithTwoMinima;

impl HasExtra for Plain {
    const EXTRA: Extra = Extra::Nothing;
}

impl HasExtra for WithMinimum {
    const EXTRA: Extra = Extra::Minimum;
}

impl HasExtra for WithSecondScale {
    const EXTRA: Extra = Extra::SecondScale;
}

impl HasExtra for WithTwoMinima {
    const EXTRA: Extra = Extra::TwoMinima;
}

/// Thirty-two columns of sixteen rows, in registers.
#[derive(Clone, Copy)]
pub(super) struct PackedBlock<S: Simd> {
    /// Word `g` of lane `r`: weights `4 * g ..` of row `r`, a byte each, too large by
    /// [`Format::OFFSET`](super::formats::Format::OFFSET).
    pub(super) words: [S::U; 8],
    pub(super) scale: S::F,
    /// See [`Extra`]; unused where there is none.
    pub(super) extra: S::F,
    /// That of [`Extra::TwoMinima`]; unused elsewhere.
    pub(super) second_minimum: S::F,
}

/// Scales of the same in memory; see [`Packing`] for the weights.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Scales {
    pub(super) scale: [f32; 16],
    pub(super) extra: [f32; 16],
    pub(super) second_minimum: [f32; 16],
}

impl Scales {
    pub(crate) const ZERO: Self = Self {
        scale: [0.0; 16],
        extra: [0.0; 16],
        second_minimum: [0.0; 16],
    };

    #[inline(always)]
    pub(super) fn store<S: Simd>(&mut self, s: S, extra: Extra, block: &PackedBlock<S>) {
        s.store(block.scale, &mut self.scale);
        s.store(block.extra, &mut self.extra);
        if extra == Extra::TwoMinima {
            s.store(block.second_minimum, &mut self.second_minimum);
        }
    }
}

/// What a step multiplies tokens with: the same columns of `R` tiles of sixteen rows.
pub(super) trait Source<S: Simd, const R: usize> {
    /// Integer products of the words in `range`, of eight.
    fn dots<const T: usize>(
        &self,
        s: S,
        x: &ActivationBlock<T>,
        start: &[i32; T],
        range: Range<usize>,
    ) -> Dots<S, R, T>;
    fn scale(&self, s: S, r: usize) -> S::F;
    fn extra(&self, s: S, r: usize) -> S::F;
    fn second_minimum(&self, s: S, r: usize) -> S::F;
}

/// Weights in registers are bytes as [`Simd::weights`] makes them.
impl<S: Simd> Source<S, 1> for PackedBlock<S> {
    #[inline(always)]
    fn dots<const T: usize>(
        &self,
        s: S,
        x: &ActivationBlock<T>,
        start: &[i32; T],
        range: Range<usize>,
    ) -> Dots<S, 1, T> {
        let mut sums = [each!(s.u_splat(0), |t| s
            .dot_start(s.u_splat(start[t].cast_unsigned())))];
        for g in range {
            for t in 0..T {
                sums[0][t] = s.dot4(sums[0][t], self.words[g], s.u_splat(x.q[t][g]));
            }
        }
        sums
    }

    #[inline(always)]
    fn scale(&self, _: S, _: usize) -> S::F {
        self.scale
    }

    #[inline(always)]
    fn extra(&self, _: S, _: usize) -> S::F {
        self.extra
    }

    #[inline(always)]
    fn second_minimum(&self, _: S, _: usize) -> S::F {
        self.second_minimum
    }
}

/// Packed blocks in memory.
pub(super) struct Stored<'a, P: Packing, const R: usize> {
    pub(super) words: [&'a P::Words; R],
    pub(super) scales: [&'a Scales; R],
}

impl<S: Simd, P: Vectors, const R: usize> Source<S, R> for Stored<'_, P, R> {
    #[inline(always)]
    fn dots<const T: usize>(
        &self,
        s: S,
        x: &ActivationBlock<T>,
        start: &[i32; T],
        range: Range<usize>,
    ) -> Dots<S, R, T> {
        P::dots(s, &self.words, x, start, range)
    }

    #[inline(always)]
    fn scale(&self, s: S, r: usize) -> S::F {
        s.load(&self.scales[r].scale)
    }

    #[inline(always)]
    fn extra(&self, s: S, r: usize) -> S::F {
        s.load(&self.scales[r].extra)
    }

    #[inline(always)]
    fn second_minimum(&self, s: S, r: usize) -> S::F {
        s.load(&self.scales[r].second_minimum)
    }
}

/// Sums of `R` tiles of sixteen rows and `T` tokens.
pub(super) type Sums<S, const R: usize, const T: usize> = [[<S as Simd>::F; T]; R];

/// Adds the products of one block of columns. What is added to one sum, and in which order, does
/// not depend on `R`, `T` or the source.
#[inline(always)]
pub(super) fn step<S: Simd, const R: usize, const T: usize>(
    s: S,
    extra: Extra,
    weights: &impl Source<S, R>,
    x: &ActivationBlock<T>,
    sums: &mut Sums<S, R, T>,
) {
    if extra == Extra::SecondScale {
        let start = each!(0, |t| x.start_halves[t][0]);
        let dots = weights.dots(s, x, &start, 0..4);
        let scale = each!(s.splat(0.0), |r| weights.scale(s, r));
        add_scaled(s, &dots, &scale, x, sums);
        let start = each!(0, |t| x.start_halves[t][1]);
        let dots = weights.dots(s, x, &start, 4..8);
        let scale = each!(s.splat(0.0), |r| weights.extra(s, r));
        return add_scaled(s, &dots, &scale, x, sums);
    }
    let dots = weights.dots(s, x, &x.start, 0..8);
    let scale = each!(s.splat(0.0), |r| weights.scale(s, r));
    add_scaled(s, &dots, &scale, x, sums);
    for r in 0..R {
        let minima = [weights.extra(s, r), weights.second_minimum(s, r)];
        for t in 0..T {
            sums[r][t] = add_minima(s, extra, minima, x, t, sums[r][t]);
        }
    }
}

/// Adds what minima of a block add to the sum of a token, where it has some.
#[inline(always)]
pub(super) fn add_minima<S: Simd, const T: usize>(
    s: S,
    extra: Extra,
    minima: [S::F; 2],
    x: &ActivationBlock<T>,
    t: usize,
    sum: S::F,
) -> S::F {
    match extra {
        Extra::Nothing | Extra::SecondScale => sum,
        Extra::Minimum => s.fused(minima[0], s.splat(x.scaled_sum[t]), sum),
        Extra::TwoMinima => {
            let mut sum = sum;
            for half in 0..2 {
                // What the start has besides `START` is -128 times the sum.
                let of_half = (S::START - x.start_halves[t][half]) >> 7;
                let unit = s.splat(x.scale[t] * of_half as f32);
                sum = s.fused(minima[half], unit, sum);
            }
            sum
        }
    }
}

#[inline(always)]
fn add_scaled<S: Simd, const R: usize, const T: usize>(
    s: S,
    dots: &Dots<S, R, T>,
    scale: &[S::F; R],
    x: &ActivationBlock<T>,
    sums: &mut Sums<S, R, T>,
) {
    for r in 0..R {
        for t in 0..T {
            sums[r][t] = s.dot_end(dots[r][t], scale[r], s.splat(x.scale[t]), sums[r][t]);
        }
    }
}
