//! Conversion of f32 to the elements of cached rows.

use crate::activations::{BLOCK, quantize_block};
use crate::element::ElementType;
use crate::simd::{Kernel, LANES, Simd, padded};

/// Converts f32 to cache elements, whole blocks of them.
pub(crate) struct Store<'a> {
    pub(crate) element: ElementType,
    pub(crate) out: &'a mut [u8],
    pub(crate) x: &'a [f32],
}

impl Kernel for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.element {
            ElementType::F32 => {
                for (out, x) in self.out.as_chunks_mut::<4>().0.iter_mut().zip(self.x) {
                    *out = x.to_le_bytes();
                }
            }
            ElementType::F16 => self.halves(|x, out| s.store_f16(s.load(x), out)),
            ElementType::Bf16 => self.halves(bf16_chunk),
            ElementType::Q8_0 => self.blocks(q8_0_block::<S>(s)),
            ElementType::Q4_0 => self.blocks(q4_0_block::<S>(s)),
        }
    }
}

impl Store<'_> {
    /// Converts sixteen elements of two bytes at a time.
    #[inline(always)]
    fn halves(self, convert: impl Fn(&[f32; LANES], &mut [u8; 2 * LANES])) {
        let (outs, out_tail) = self.out.as_chunks_mut();
        let (xs, tail) = self.x.as_chunks::<LANES>();
        for (out, x) in outs.iter_mut().zip(xs) {
            convert(x, out);
        }
        let mut bytes = [0; 2 * LANES];
        convert(&padded(tail), &mut bytes);
        out_tail.copy_from_slice(&bytes[..out_tail.len()]);
    }

    #[inline(always)]
    fn blocks<const BYTES: usize>(self, convert: impl Fn(&[f32; BLOCK], &mut [u8; BYTES])) {
        let outs = self.out.as_chunks_mut().0;
        for (out, x) in outs.iter_mut().zip(self.x.as_chunks().0) {
            convert(x, out);
        }
    }
}

/// Rounds to nearest even; what is not a number stays so.
#[inline(always)]
fn bf16_chunk(x: &[f32; LANES], out: &mut [u8; 2 * LANES]) {
    for (out, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(x) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        let half = if x.is_nan() { quiet } else { rounded };
        *out = (half as u16).to_le_bytes();
    }
}

/// A scale as binary16.
#[inline(always)]
fn scale_bytes<S: Simd>(s: S, scale: f32) -> [u8; 2] {
    let mut bytes = [0; 2 * LANES];
    s.store_f16(s.splat(scale), &mut bytes);
    [bytes[0], bytes[1]]
}

#[inline(always)]
fn q8_0_block<S: Simd>(s: S) -> impl Fn(&[f32; BLOCK], &mut [u8; 34]) {
    move |x, out| {
        let block = quantize_block(s, x);
        out[..2].copy_from_slice(&scale_bytes(s, block.scale));
        for (out, word) in out[2..].as_chunks_mut::<4>().0.iter_mut().zip(block.q) {
            *out = word.to_le_bytes();
        }
    }
}

/// The element with the largest magnitude becomes -8 exactly, so that the scale has its sign.
#[inline(always)]
fn q4_0_block<S: Simd>(s: S) -> impl Fn(&[f32; BLOCK], &mut [u8; 18]) {
    move |x, out| {
        // Compared as integers, so that a NaN is the largest.
        let magnitude = |x: f32| x.to_bits() & 0x7FFF_FFFF;
        let larger = |a: f32, b: &f32| if magnitude(*b) > magnitude(a) { *b } else { a };
        let extreme = x.iter().fold(0.0, larger);
        let scale = extreme / -8.0;
        let inverse = if scale.abs() < f32::MIN_POSITIVE {
            0.0
        } else {
            1.0 / scale
        };
        // The cast saturates, and makes 0 of what is not a number.
        let nibble = |x: f32| ((x * inverse + 8.5) as u8).min(15);
        out[..2].copy_from_slice(&scale_bytes(s, scale));
        let (low, high) = x.split_at(BLOCK / 2);
        for ((out, low), high) in out[2..].iter_mut().zip(low).zip(high) {
            *out = nibble(*low) | nibble(*high) << 4;
        }
    }
}
