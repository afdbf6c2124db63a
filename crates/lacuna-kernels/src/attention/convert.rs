//! Cached elements as f32.

use super::softmax::Chunk;
use crate::element::ElementType;
use crate::simd::{LANES, Simd, padded};

/// Writes one head of a row as f32, chunk by chunk, zeros behind it.
#[inline(always)]
pub(super) fn convert<S: Simd>(s: S, element: ElementType, bytes: &[u8], out: &mut [Chunk]) {
    match element {
        ElementType::F32 => chunks(s, bytes, out, |x| s.load_f32_bytes(x)),
        ElementType::F16 => chunks(s, bytes, out, |x| s.load_f16(x)),
        ElementType::Bf16 => chunks(s, bytes, out, |x| s.load_bf16(x)),
        ElementType::Q8_0 => q8_0(s, bytes, out),
        ElementType::Q4_0 => q4_0(s, bytes, out),
    }
}

/// Sixteen elements of `BYTES` bytes at a time.
#[inline(always)]
fn chunks<S: Simd, const BYTES: usize>(
    s: S,
    bytes: &[u8],
    out: &mut [Chunk],
    load: impl Fn(&[u8; BYTES]) -> S::F,
) {
    let (whole, tail) = bytes.as_chunks();
    for (chunk, out) in whole.iter().zip(out.iter_mut()) {
        s.store(load(chunk), &mut out.0);
    }
    if !tail.is_empty() {
        s.store(load(&padded(tail)), &mut out[whole.len()].0);
    }
}

#[inline(always)]
fn q8_0<S: Simd>(s: S, bytes: &[u8], out: &mut [Chunk]) {
    let blocks = bytes.as_chunks::<34>().0.iter();
    for (block, out) in blocks.zip(out.as_chunks_mut::<2>().0) {
        let scale = s.splat_f16([block[0], block[1]]);
        let q = block[2..].as_chunks::<LANES>().0;
        for (q, out) in q.iter().zip(out) {
            s.store(s.mul(scale, s.load_i8(q)), &mut out.0);
        }
    }
}

#[inline(always)]
fn q4_0<S: Simd>(s: S, bytes: &[u8], out: &mut [Chunk]) {
    let blocks = bytes.as_chunks::<18>().0.iter();
    for (block, out) in blocks.zip(out.as_chunks_mut::<2>().0) {
        let scale = s.splat_f16([block[0], block[1]]);
        let q = &block[2..].as_chunks::<LANES>().0[0];
        let [low, high] = s.load_nibbles(q);
        s.store(s.mul(scale, low), &mut out[0].0);
        s.store(s.mul(scale, high), &mut out[1].0);
    }
}
