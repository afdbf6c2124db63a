//! Functions of single elements: activations of feed-forward blocks, gates and soft caps.
//!
//! Each is within 1e-6 of the value itself, relative, as long as that is above 1e-35 in magnitude; what
//! is smaller may come out as anything between it and 0.

use crate::simd::{Kernel, LANES, Simd, at_most, exp, padded, tanh};

/// A function that [`Cpu::activate`](crate::Cpu::activate) applies to every element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// `x * sigmoid(x)`, also called swish: the Llama and Qwen families.
    Silu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`: the approximation of GELU that the Gemma
    /// families are trained with (Hugging Face `gelu_pytorch_tanh`, `gelu_new`).
    GeluTanh,
    /// `x / 2 * (1 + erf(x / sqrt(2)))`: GELU itself (Hugging Face `gelu`), which encoders use.
    GeluErf,
    /// `x * sigmoid(1.702 x)`: an older approximation of GELU (Hugging Face `quick_gelu`), which CLIP and Qwen 2 VL have.
    QuickGelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
    /// `1 / (1 + e^-x)`: output gates.
    Sigmoid,
    /// `tanh(x)`.
    Tanh,
    /// `ln(1 + e^x)`: time steps of recurrences.
    Softplus,
}

impl Activation {
    /// Whether all that is not positive becomes exactly zero.
    #[must_use]
    pub const fn leaves_zeros(self) -> bool {
        matches!(self, Self::Relu | Self::ReluSquared)
    }

    /// Whether zero stays exactly zero.
    #[must_use]
    pub const fn keeps_zeros(self) -> bool {
        match self {
            Self::Silu
            | Self::GeluTanh
            | Self::GeluErf
            | Self::QuickGelu
            | Self::Relu
            | Self::ReluSquared
            | Self::Tanh => true,
            Self::Sigmoid | Self::Softplus => false,
        }
    }
}

/// A function of one element, and what it needs besides.
pub(crate) trait Function: Copy {
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F;
}

/// Evaluates an expression with the [`Function`] of an [`Activation`].
macro_rules! with_function {
    ($activation:expr, |$function:ident| $body:expr) => {{
        use $crate::elementwise::activation as functions;
        match $activation {
            functions::Activation::Silu => {
                let $function = functions::Silu;
                $body
            }
            functions::Activation::GeluTanh => {
                let $function = functions::GeluTanh;
                $body
            }
            functions::Activation::GeluErf => {
                let $function = functions::GeluErf;
                $body
            }
            functions::Activation::QuickGelu => {
                let $function = functions::QuickGelu;
                $body
            }
            functions::Activation::Relu => {
                let $function = functions::Relu;
                $body
            }
            functions::Activation::ReluSquared => {
                let $function = functions::ReluSquared;
                $body
            }
            functions::Activation::Sigmoid => {
                let $function = functions::Sigmoid;
                $body
            }
            functions::Activation::Tanh => {
                let $function = functions::Tanh;
                $body
            }
            functions::Activation::Softplus => {
                let $function = functions::Softplus;
                $body
            }
        }
    }};
}
pub(crate) use with_function;

/// `a * b` as a sum of two: rounded to f32, and what that drops.
#[inline(always)]
fn product<S: Simd>(s: S, a: S::F, b: S::F) -> [S::F; 2] {
    let rounded = s.mul(a, b);
    [rounded, s.fused(a, b, s.mul(rounded, s.splat(-1.0)))]
}

#[derive(Clone, Copy)]
pub(crate) struct Silu;

impl Function for Silu {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        // Limited, so that the exponential stays finite: the result is below 1e-36 there. NaN passes.
        let x = s.max(s.splat(-88.0), x);
        let minus = s.mul(x, s.splat(-1.0));
        s.div(x, s.add(s.splat(1.0), exp(s, minus)))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct QuickGelu;

impl Function for QuickGelu {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        // Limited, so that the exponential stays finite: the result is below 1e-36 there. NaN passes.
        let x = s.max(s.splat(-51.0), x);
        let near = at_most(s, x, 51.0);
        // The exponent as a sum of two, because the exponential makes an error in it one that is up to 88 times as large.
        let [exponent, rest] = product(s, near, s.splat(-1.702));
        // What f32 drops of the factor.
        let rest = s.fused(near, s.splat(2.193_451e-8), rest);
        let power = exp(s, exponent);
        s.div(x, s.add(s.splat(1.0), s.fused(power, rest, power)))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct GeluTanh;

impl Function for GeluTanh {
    /// `(1 + tanh(u)) / 2` is `1 / (1 + e^-2u)`, which does not cancel where `u` is negative.
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        /// `2 * sqrt(2 / pi)`, and that times 0.044715: each as f32, and what f32 drops.
        const LINEAR: [f32; 2] = [1.595_769_2, -4.534_068e-8];
        const CUBIC: [f32; 2] = [7.135_481_4e-2, 2.398_832_4e-9];
        // Limited, so that the exponential stays finite: the result is below 1e-36 beyond. NaN passes.
        let x = s.max(s.splat(-10.0), x);
        let near = at_most(s, x, 10.0);
        // 2u as a sum of two, because the exponential makes an error in it, relative, one that is up to
        // 88 times as large.
        let minus = s.splat(-1.0);
        let [square, square_rest] = product(s, near, near);
        let [cubic, cubic_rest] = product(s, square, s.splat(CUBIC[0]));
        let cubic_rest = s.fused(square, s.splat(CUBIC[1]), cubic_rest);
        let cubic_rest = s.fused(square_rest, s.splat(CUBIC[0]), cubic_rest);
        let slope = s.add(cubic, s.splat(LINEAR[0]));
        // What the addition drops, whichever of the two is larger.
        let linear = s.sub(slope, cubic);
        let slope_rest = s.add(
            s.sub(cubic, s.sub(slope, linear)),
            s.sub(s.splat(LINEAR[0]), linear),
        );
        let slope_rest = s.add(s.add(slope_rest, cubic_rest), s.splat(LINEAR[1]));
        let [exponent, rest] = product(s, s.mul(near, minus), slope);
        let rest = s.fused(s.mul(near, minus), slope_rest, rest);
        let power = exp(s, exponent);
        s.div(x, s.add(s.splat(1.0), s.fused(power, rest, power)))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct GeluErf;

impl Function for GeluErf {
    /// `x` times the normal distribution's share below it: with `a = |x|` and the share above `a`,
    /// `q`, that is `max(x, 0) - a q`, which does not cancel. `q = e^(-a^2 / 2) * g(a)`, where `g` is
    /// smooth; of `(a + 4) * g(a)` this is the Chebyshev interpolation in `(a - 4) / (a + 4)` for `a`
    /// between 0 and 14.
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        const COEFFICIENTS: [f32; 9] = [
            2.012_617_3e-4,
            1.572_317_9e-3,
            -3.526_183_8e-3,
            -7.529_251e-3,
            6.040_669e-2,
            -1.865_226_8e-1,
            3.871_367e-1,
            -6.078_966e-1,
            7.552_851_4e-1,
        ];
        let minus = s.splat(-1.0);
        // From 14 on `q` is below what f32 holds. NaN passes.
        let a = at_most(s, s.max(x, s.mul(x, minus)), 14.0);
        let reciprocal = s.div(s.splat(1.0), s.add(a, s.splat(4.0)));
        let place = s.sub(s.splat(1.0), s.mul(s.splat(8.0), reciprocal));
        let mut sum = s.splat(-1.201_844e-4);
        for coefficient in COEFFICIENTS {
            sum = s.fma(sum, place, s.splat(coefficient));
        }
        // The square as a sum of two, because the exponential makes an error in it, relative, one that
        // is up to 88 times as large.
        let [square, rest] = product(s, a, a);
        let power = exp(s, s.mul(square, s.splat(-0.5)));
        let power = s.fused(power, s.mul(rest, s.splat(-0.5)), power);
        let above = s.mul(s.mul(sum, reciprocal), power);
        s.sub(s.max(x, s.splat(0.0)), s.mul(a, above))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Relu;

impl Function for Relu {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        // In this order NaN passes.
        s.max(s.splat(0.0), x)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct ReluSquared;

impl Function for ReluSquared {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        let x = Relu.of(s, x);
        s.mul(x, x)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Sigmoid;

impl Function for Sigmoid {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        let x = s.max(s.splat(-88.0), x);
        let minus = s.mul(x, s.splat(-1.0));
        s.div(s.splat(1.0), s.add(s.splat(1.0), exp(s, minus)))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Tanh;

impl Function for Tanh {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        tanh(s, x)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Softplus;

impl Function for Softplus {
    /// `max(x, 0) + ln(1 + u)` with `u = e^-|x|`, and `ln(1 + u) = 2 atanh(s)` with `s = u / (2 + u)`, which
    /// is at most a third: the series for `atanh` has as many terms as f32 shows.
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        const SERIES: [f32; 8] = [
            1.0 / 15.0,
            1.0 / 13.0,
            1.0 / 11.0,
            1.0 / 9.0,
            1.0 / 7.0,
            1.0 / 5.0,
            1.0 / 3.0,
            1.0,
        ];
        let minus = s.splat(-1.0);
        // NaN passes, here and where it is limited below.
        let away = s.mul(s.max(x, s.mul(x, minus)), minus);
        let power = exp(s, s.max(s.splat(-87.0), away));
        let small = s.div(power, s.add(power, s.splat(2.0)));
        let square = s.mul(small, small);
        let mut sum = s.splat(1.0 / 17.0);
        for term in SERIES {
            sum = s.fma(sum, square, s.splat(term));
        }
        let log = s.mul(s.add(small, small), sum);
        s.add(s.max(x, s.splat(0.0)), log)
    }
}

/// `x`, where a kernel takes a function and there is none.
#[derive(Clone, Copy)]
pub(crate) struct Identity;

impl Function for Identity {
    #[inline(always)]
    fn of<S: Simd>(self, _: S, x: S::F) -> S::F {
        x
    }
}

/// `cap * tanh(x / cap)`: about `x` while it is small, never beyond `cap`.
#[derive(Clone, Copy)]
pub(crate) struct SoftCap(pub(crate) f32);

impl Function for SoftCap {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::F) -> S::F {
        let cap = s.splat(self.0);
        s.mul(tanh(s, s.div(x, cap)), cap)
    }
}

/// `x = f(x)`.
pub(crate) struct Apply<'a, F> {
    pub(crate) function: F,
    pub(crate) x: &'a mut [f32],
}

impl<F: Function> Kernel for Apply<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (chunks, tail) = self.x.as_chunks_mut::<LANES>();
        for x in chunks {
            s.store(self.function.of(s, s.load(x)), x);
        }
        if tail.is_empty() {
            return;
        }
        let mut lanes = [0.0; LANES];
        s.store(self.function.of(s, s.load(&padded(tail))), &mut lanes);
        tail.copy_from_slice(&lanes[..tail.len()]);
    }
}

/// `gate = f(gate) * up`.
pub(crate) struct ApplyMul<'a, F> {
    pub(crate) function: F,
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a [f32],
}

impl<F: Function> Kernel for ApplyMul<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let f = self.function;
        let (gates, gate_tail) = self.gate.as_chunks_mut::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        for (gate, up) in gates.iter_mut().zip(ups) {
            s.store(s.mul(f.of(s, s.load(gate)), s.load(up)), gate);
        }
        let mut lanes = [0.0; LANES];
        let last = s.mul(
            f.of(s, s.load(&padded(gate_tail))),
            s.load(&padded(up_tail)),
        );
        s.store(last, &mut lanes);
        gate_tail.copy_from_slice(&lanes[..gate_tail.len()]);
    }
}

/// `gate = g * sigmoid(alpha * g) * (u + 1)` of a gate that is at most `limit` and an `up` between plus
/// and minus that.
pub(crate) struct ClampedSwiGlu<'a> {
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a [f32],
    pub(crate) alpha: f32,
    pub(crate) limit: f32,
}

impl Kernel for ClampedSwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { alpha, limit, .. } = self;
        let of = |gate: S::F, up: S::F| {
            let gate = at_most(s, gate, limit);
            // In this order NaN passes.
            let up = s.max(s.splat(-limit), at_most(s, up, limit));
            let open = s.mul(gate, Sigmoid.of(s, s.mul(gate, s.splat(alpha))));
            s.mul(open, s.add(up, s.splat(1.0)))
        };
        let (gates, gate_tail) = self.gate.as_chunks_mut::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        for (gate, up) in gates.iter_mut().zip(ups) {
            s.store(of(s.load(gate), s.load(up)), gate);
        }
        let mut lanes = [0.0; LANES];
        s.store(
            of(s.load(&padded(gate_tail)), s.load(&padded(up_tail))),
            &mut lanes,
        );
        gate_tail.copy_from_slice(&lanes[..gate_tail.len()]);
    }
}
