//! Operations on rows of activations.

use crate::simd::{Kernel, LANES, Simd, exp, padded};

/// How [`Cpu::rope`](crate::Cpu::rope) pairs the elements of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Element `i` with `i + rotated / 2`: Hugging Face checkpoints, and GPT-NeoX order in GGUF.
    HalfSplit,
    /// Element `2 i` with `2 i + 1`: GGUF files of the Llama family, whose rows are permuted so.
    Interleaved,
}

/// Root mean square normalisation of rows, each times `weight`.
pub(crate) struct RmsNorm<'a> {
    /// Rows to read, or nothing to work in place.
    pub(crate) x: Option<&'a [f32]>,
    pub(crate) out: &'a mut [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        for (index, out) in self.out.chunks_exact_mut(width).enumerate() {
            if let Some(x) = self.x {
                out.copy_from_slice(&x[index * width..][..width]);
            }
            let mean = sum_of_squares(s, out) / width as f32;
            let scale = 1.0 / (mean + self.eps).sqrt();
            for (out, weight) in out.iter_mut().zip(self.weight) {
                *out = *out * scale * weight;
            }
        }
    }
}

#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let last = s.load(&padded(tail));
    let mut sum = s.mul(last, last);
    for chunk in chunks {
        let x = s.load(chunk);
        sum = s.fma(x, x, sum);
    }
    s.sum(sum)
}

/// Rotates the heads of some tokens.
pub(crate) struct Rope<'a> {
    /// `[tokens, heads, head_dim]`.
    pub(crate) x: &'a mut [f32],
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) style: RopeStyle,
    /// `[tokens, rotated]`: cosines, then sines.
    pub(crate) table: &'a [f32],
    pub(crate) rotated: usize,
}

impl Kernel for Rope<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let tokens = self.x.chunks_exact_mut(self.heads * self.head_dim);
        for (token, angles) in tokens.zip(self.table.chunks_exact(self.rotated)) {
            let (cos, sin) = angles.split_at(self.rotated / 2);
            for head in token.chunks_exact_mut(self.head_dim) {
                let head = &mut head[..self.rotated];
                match self.style {
                    RopeStyle::HalfSplit => rotate_halves(head, cos, sin),
                    RopeStyle::Interleaved => rotate_pairs(head, cos, sin),
                }
            }
        }
    }
}

#[inline(always)]
fn rotate_halves(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[inline(always)]
fn rotate_pairs(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (([a, b], cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// Cosines and sines of some positions: `[positions, rotated]`.
pub(crate) fn rope_table(
    out: &mut [f32],
    positions: &[u32],
    inverse_frequencies: &[f32],
    attention_scale: f32,
) {
    let pairs = inverse_frequencies.len();
    for (row, position) in out.chunks_exact_mut(2 * pairs).zip(positions) {
        let (cos, sin) = row.split_at_mut(pairs);
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(inverse_frequencies) {
            // The angle is rounded to f32 as the reference implementations do; the functions of it
            // are exact.
            let angle = f64::from(*position as f32 * frequency);
            *cos = angle.cos() as f32 * attention_scale;
            *sin = angle.sin() as f32 * attention_scale;
        }
    }
}

/// `gate = gate / (1 + e^-gate) * up`.
pub(crate) struct SiluMul<'a> {
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (gates, gate_tail) = self.gate.as_chunks_mut::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        for (gate, up) in gates.iter_mut().zip(ups) {
            s.store(silu_mul(s, s.load(gate), s.load(up)), gate);
        }
        let mut lanes = [0.0; LANES];
        s.store(
            silu_mul(s, s.load(&padded(gate_tail)), s.load(&padded(up_tail))),
            &mut lanes,
        );
        gate_tail.copy_from_slice(&lanes[..gate_tail.len()]);
    }
}

#[inline(always)]
fn silu_mul<S: Simd>(s: S, gate: S::F, up: S::F) -> S::F {
    // Limited, so that the exponential stays finite: the result is below 1e-36 there. NaN passes.
    let gate = s.max(s.splat(-88.0), gate);
    let minus = s.mul(gate, s.splat(-1.0));
    s.mul(s.div(gate, s.add(s.splat(1.0), exp(s, minus))), up)
}

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
