//! Rotary position embeddings.

use crate::simd::{Kernel, Simd};

/// How [`Cpu::rope`](crate::Cpu::rope) pairs the elements of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Element `i` with `i + rotated / 2`: Hugging Face checkpoints, and GPT-NeoX order in GGUF.
    HalfSplit,
    /// Element `2 i` with `2 i + 1`: GGUF files of the Llama family, whose rows are permuted so.
    Interleaved,
    /// The same as `HalfSplit`, but in each half of the rotated elements by itself: those of the first have the first half of
    /// the pairs. Encoders of images have it that turn one half by columns and the other by rows.
    HalvesSplit,
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
                    RopeStyle::HalvesSplit => {
                        let (first, second) = head.split_at_mut(cos.len());
                        let ([cos, cos_2], [sin, sin_2]) = (halves(cos), halves(sin));
                        rotate_halves(first, cos, sin);
                        rotate_halves(second, cos_2, sin_2);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn halves(values: &[f32]) -> [&[f32]; 2] {
    let (first, second) = values.split_at(values.len() / 2);
    [first, second]
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

/// The same of positions of so many numbers each, of which each pair turns by the one that `of_pair` says.
pub(crate) fn rope_table_of_axes(
    out: &mut [f32],
    (positions, axes): (&[u32], usize),
    of_pair: &[u8],
    inverse_frequencies: &[f32],
    attention_scale: f32,
) {
    let pairs = inverse_frequencies.len();
    let rows = out.chunks_exact_mut(2 * pairs);
    for (row, position) in rows.zip(positions.chunks_exact(axes)) {
        let (cos, sin) = row.split_at_mut(pairs);
        let turns = inverse_frequencies.iter().zip(of_pair);
        for ((cos, sin), (frequency, axis)) in cos.iter_mut().zip(sin).zip(turns) {
            // As above.
            let angle = f64::from(position[usize::from(*axis)] as f32 * frequency);
            *cos = angle.cos() as f32 * attention_scale;
            *sin = angle.sin() as f32 * attention_scale;
        }
    }
}
