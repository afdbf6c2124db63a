//! Operations on rows of activations.

pub(crate) mod activation;
pub(crate) mod hadamard;
pub(crate) mod heads;
pub(crate) mod norm;
pub(crate) mod rope;

use crate::grid::Block;
use crate::simd::{Kernel, LANES, Simd, exp, padded};
use activation::{Apply, Function};

/// `x += y`, with `y` repeated for every row of `y.len()` elements.
pub(crate) struct Add<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for row in self.x.chunks_exact_mut(self.y.len().max(1)) {
            for (x, y) in row.iter_mut().zip(self.y) {
                *x += y;
            }
        }
    }
}

/// Adds a bias to each row of a block, which has as many columns.
pub(crate) struct AddToRows<'a, 'b> {
    pub(crate) out: Block<'b, f32>,
    pub(crate) bias: &'a [f32],
}

impl Kernel for AddToRows<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, _: S) {
        for row in self.out.rows() {
            for (x, y) in self.out.row(row).iter_mut().zip(self.bias) {
                *x += y;
            }
        }
    }
}

/// `x = f(x)`, or `f(x + bias)`, for each row of a block, which has as many columns as a bias.
pub(crate) struct ApplyToRows<'a, 'b, F> {
    pub(crate) function: F,
    pub(crate) out: Block<'b, f32>,
    pub(crate) bias: Option<&'a [f32]>,
}

impl<F: Function> Kernel for ApplyToRows<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for row in self.out.rows() {
            let (function, x) = (self.function, self.out.row(row));
            let Some(bias) = self.bias else {
                Apply { function, x }.run(s);
                continue;
            };
            let (chunks, tail) = x.as_chunks_mut::<LANES>();
            let (biases, bias_tail) = bias.as_chunks::<LANES>();
            for (x, bias) in chunks.iter_mut().zip(biases) {
                s.store(function.of(s, s.add(s.load(x), s.load(bias))), x);
            }
            if !tail.is_empty() {
                let sum = s.add(s.load(&padded(tail)), s.load(&padded(bias_tail)));
                let mut lanes = [0.0; LANES];
                s.store(function.of(s, sum), &mut lanes);
                tail.copy_from_slice(&lanes[..tail.len()]);
            }
        }
    }
}

/// `x *= y`, with `y` repeated for every row of `y.len()` elements.
pub(crate) struct Mul<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) y: &'a [f32],
}

impl Kernel for Mul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for row in self.x.chunks_exact_mut(self.y.len().max(1)) {
            for (x, y) in row.iter_mut().zip(self.y) {
                *x *= y;
            }
        }
    }
}

/// `out = e^(x * rate)` with a rate for each column, none above 0.
pub(crate) struct Decay<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) rates: &'a [f32],
    pub(crate) out: &'a mut [f32],
}

impl Kernel for Decay<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.rates.len().max(1);
        for (x, out) in self
            .x
            .chunks_exact(width)
            .zip(self.out.chunks_exact_mut(width))
        {
            let columns = x.chunks(LANES).zip(self.rates.chunks(LANES));
            for ((x, rate), out) in columns.zip(out.chunks_mut(LANES)) {
                let power = s.mul(s.load(&padded(x)), s.load(&padded(rate)));
                let mut lanes = [0.0; LANES];
                s.store(exp(s, power), &mut lanes);
                out.copy_from_slice(&lanes[..out.len()]);
            }
        }
    }
}

/// `x *= factor`.
pub(crate) struct Scale<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) factor: f32,
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        self.x.iter_mut().for_each(|x| *x *= self.factor);
    }
}

/// Holds elements between bounds.
pub(crate) struct Clamp<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) bounds: [f32; 2],
}

impl Kernel for Clamp<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let [least, most] = self.bounds;
        for x in self.x {
            // Comparisons with what is no number are false: it stays, to be found by whoever looks for it.
            let above = if *x < least { least } else { *x };
            *x = if above > most { most } else { above };
        }
    }
}

/// `x = (x - shift) * factor`, row by row.
pub(crate) struct Standardize<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) shifts: &'a [f32],
    pub(crate) factors: &'a [f32],
}

impl Kernel for Standardize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for row in self.x.chunks_exact_mut(self.shifts.len()) {
            for ((x, shift), factor) in row.iter_mut().zip(self.shifts).zip(self.factors) {
                *x = (*x - shift) * factor;
            }
        }
    }
}

/// Multiplies each row of `width` elements by its factor.
pub(crate) struct ScaleRows<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) factors: &'a [f32],
    pub(crate) width: usize,
}

impl Kernel for ScaleRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (row, factor) in self.x.chunks_exact_mut(self.width).zip(self.factors) {
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// `x += y * factor`, each row of `width` elements with its own factor; the factors are `stride`
/// apart.
pub(crate) struct AddScaled<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) y: &'a [f32],
    pub(crate) factors: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) width: usize,
}

impl Kernel for AddScaled<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let rows = self.x.chunks_exact_mut(self.width);
        let factors = self.factors.iter().step_by(self.stride);
        for ((row, y), factor) in rows.zip(self.y.chunks_exact(self.width)).zip(factors) {
            for (x, y) in row.iter_mut().zip(y) {
                // Rounded twice at all levels, as a product that is stored first would be.
                *x += y * factor;
            }
        }
    }
}

/// Looks for the first element that is not finite.
pub(crate) struct FirstNotFinite<'a> {
    pub(crate) x: &'a [f32],
}

impl Kernel for FirstNotFinite<'_> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Option<usize> {
        // Whole pieces without an early exit, so that the comparisons are vectorised.
        const PIECE: usize = 256;
        for (index, piece) in self.x.chunks(PIECE).enumerate() {
            let largest = piece
                .iter()
                .fold(0, |largest, x| u32::max(largest, x.to_bits() & 0x7FFF_FFFF));
            if largest >= f32::INFINITY.to_bits() {
                let within = piece.iter().position(|x| !x.is_finite());
                return within.map(|within| index * PIECE + within);
            }
        }
        None
    }
}
