//! Conversion of f32 to the elements of cached rows.

use crate::activations::{BLOCK, SMALLEST, quantize_block};
use crate::element::ElementType;
use crate::quantized::codebooks::LEVELS;
use crate::simd::{Kernel, LANES, Simd, at_most, each, padded};

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
            ElementType::Iq4Nl => self.blocks(iq4_nl_block::<S>(s)),
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

/// What a block's largest element becomes in the scales that are tried, in the order of what each adds for normally
/// distributed elements: all eight leave 0.92 of the squared error of -8 alone, more of them hardly less.
const Q4_0_EXTREMES: [f32; 8] = [-8.25, -7.75, -8.75, -7.25, -8.0, -7.0, -8.5, -9.0];

/// Of a few scales the one whose rounded elements come closest to `x` by least squares.
///
/// With the codes `q` of a scale, the best multiple of them is `p / n` with `p = x . q` and `n = q . q`, and leaves
/// `x . x - p^2 / n`: the largest `p^2 / n` is best. Elements are rounded once more to the scale that is stored.
#[inline(always)]
fn q4_0_block<S: Simd>(s: S) -> impl Fn(&[f32; BLOCK], &mut [u8; 18]) {
    move |x, out| {
        let x: [_; 2] = each!(s.splat(0.0), |i| s.load(&x.as_chunks().0[i]));
        let (bytes, inverse) = stored_scale(s, q4_0_scale(s, x));
        out[..2].copy_from_slice(&bytes);
        let [mut low, mut high] = [[0.0; LANES]; 2];
        s.store(q4_0_codes(s, x[0], inverse), &mut low);
        s.store(q4_0_codes(s, x[1], inverse), &mut high);
        for ((out, low), high) in out[2..].iter_mut().zip(low).zip(high) {
            // The casts make 0 of what is not a number.
            *out = (low + 8.0) as u8 | ((high + 8.0) as u8) << 4;
        }
    }
}

/// A scale as it is stored and its inverse, which is 0 where it has none. What is not finite is no number: a multiple of
/// infinity may be a score that hides a row.
#[inline(always)]
fn stored_scale<S: Simd>(s: S, scale: f32) -> ([u8; 2], f32) {
    let bytes = scale_bytes(s, scale);
    let mut stored = [0.0; LANES];
    s.store(s.splat_f16(u16::from_le_bytes(bytes)), &mut stored);
    match stored[0] {
        0.0 => (bytes, 0.0),
        stored if !stored.is_finite() => (scale_bytes(s, f32::NAN), 0.0),
        stored => (bytes, 1.0 / stored),
    }
}

/// The element of the largest magnitude, 0 where that is next to nothing; infinite if an element is not finite.
#[inline(always)]
fn extreme<S: Simd>(s: S, x: [S::F; 2]) -> f32 {
    let largest = s.largest(x);
    if !largest.is_finite() {
        f32::INFINITY
    } else if largest < SMALLEST {
        0.0
    } else if s.max_lane(s.max(x[0], x[1])) == largest {
        largest
    } else {
        -largest
    }
}

/// See [`q4_0_block`]; infinite if an element is not finite.
#[inline(always)]
fn q4_0_scale<S: Simd>(s: S, x: [S::F; 2]) -> f32 {
    let extreme = extreme(s, x);
    if extreme == 0.0 || !extreme.is_finite() {
        return extreme;
    }
    let largest = extreme.abs();
    // Squares of what is divided by the largest element neither overflow nor vanish.
    let unit = s.splat(1.0 / largest);
    let x: [_; 2] = each!(x[0], |i| s.mul(x[i], unit));
    let mut sums = [s.splat(0.0); 2 * Q4_0_EXTREMES.len()];
    for (n, code) in Q4_0_EXTREMES.iter().enumerate() {
        let inverse = code * extreme.signum();
        let codes: [_; 2] = each!(x[0], |i| q4_0_codes(s, x[i], inverse));
        // Not fused, so that all levels choose the same.
        let of = |with: [S::F; 2]| s.add(s.mul(with[0], codes[0]), s.mul(with[1], codes[1]));
        sums[n] = of(x);
        sums[Q4_0_EXTREMES.len() + n] = of(codes);
    }
    let mut lanes = [0.0; LANES];
    s.store(s.sum_each(sums), &mut lanes);
    let (products, squares) = lanes.split_at(Q4_0_EXTREMES.len());
    let (mut best, mut scale) = (0.0, 0.0);
    for (product, square) in products.iter().zip(squares) {
        let explained = product * product / square;
        if explained > best {
            best = explained;
            scale = product / square;
        }
    }
    scale * largest
}

/// `x * inverse` as whole numbers from -8 to 7.
#[inline(always)]
fn q4_0_codes<S: Simd>(s: S, x: S::F, inverse: f32) -> S::F {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to a whole number
    let round = s.splat(ROUND);
    let whole = s.sub(s.add(s.mul(x, s.splat(inverse)), round), round);
    at_most(s, s.max(whole, s.splat(-8.0)), 7.0)
}

/// What a block's largest element becomes in the scales that are tried for IQ4_NL, in the order of what each adds for
/// normally distributed elements: all six leave 0.91 of the squared error of -127 alone.
const IQ4_NL_EXTREMES: [i16; 6] = [-130, 115, -121, -136, -109, 121];

/// The middles between [`LEVELS`], rounded down: what is larger is nearer to the upper level.
const MIDDLES: [i8; LEVELS.len() - 1] = middles(1, 1);

/// The same of bytes that are multiplied by each of [`IQ4_NL_EXTREMES`]' magnitudes and divided by 127.
const SCALED_MIDDLES: [[i8; LEVELS.len() - 1]; IQ4_NL_EXTREMES.len()] = {
    let mut all = [[0; _]; IQ4_NL_EXTREMES.len()];
    let mut n = 0;
    while n < all.len() {
        all[n] = middles(127, IQ4_NL_EXTREMES[n].unsigned_abs() as i32);
        n += 1;
    }
    all
};

/// From each of [`LEVELS`] to the next.
const STEPS: [i8; LEVELS.len() - 1] = {
    let mut steps = [0; _];
    let mut n = 0;
    while n < LEVELS.len() - 1 {
        steps[n] = LEVELS[n + 1] - LEVELS[n];
        n += 1;
    }
    steps
};

const fn middles(times: i32, over: i32) -> [i8; LEVELS.len() - 1] {
    let mut middles = [0; _];
    let mut n = 0;
    while n < LEVELS.len() - 1 {
        let twice = LEVELS[n] as i32 + LEVELS[n + 1] as i32;
        let middle = (twice * times).div_euclid(2 * over);
        assert!(middle < 127, "a level that no byte reaches");
        // All bytes are above -128, as they are above what is less.
        middles[n] = if middle < -128 { -128 } else { middle as i8 };
        n += 1;
    }
    middles
}

/// Like [`q4_0_block`], of bytes: their products are summed exactly, and comparisons of bytes are what finding one of
/// sixteen levels takes.
#[inline(always)]
fn iq4_nl_block<S: Simd>(s: S) -> impl Fn(&[f32; BLOCK], &mut [u8; 18]) {
    move |x, out| {
        let x: [_; 2] = each!(s.splat(0.0), |i| s.load(&x.as_chunks().0[i]));
        let (bytes, inverse) = stored_scale(s, iq4_nl_scale(s, x));
        out[..2].copy_from_slice(&bytes);
        // What is no number becomes -127: no byte may be made of it.
        let x = each!(x[0], |i| {
            let x = s.mul(x[i], s.splat(inverse));
            at_most(s, s.max(x, s.splat(-127.0)), 127.0)
        });
        let x = to_signed_bytes(s, x);
        let codes = climb(&x, &MIDDLES, 0, &[1; _]);
        let (low, high) = codes.split_at(BLOCK / 2);
        for ((out, low), high) in out[2..].iter_mut().zip(low).zip(high) {
            *out = low.cast_unsigned() | high.cast_unsigned() << 4;
        }
    }
}

/// See [`iq4_nl_block`]; infinite if an element is not finite.
#[inline(always)]
fn iq4_nl_scale<S: Simd>(s: S, x: [S::F; 2]) -> f32 {
    let extreme = extreme(s, x);
    if extreme == 0.0 || !extreme.is_finite() {
        return extreme;
    }
    let inverse = s.splat(127.0 / extreme);
    let x = to_signed_bytes(s, each!(x[0], |i| s.mul(x[i], inverse)));
    let negated: [i8; BLOCK] = each!(0, |i| -x[i]);
    let (mut product, mut square) = (0.0, 1.0);
    for (extreme, middles) in IQ4_NL_EXTREMES.into_iter().zip(&SCALED_MIDDLES) {
        let x = if extreme < 0 { &negated } else { &x };
        let levels = climb(x, middles, LEVELS[0], &STEPS);
        let (mut with_x, mut with_levels) = (0, 0);
        for i in 0..BLOCK {
            let level = i16::from(levels[i]);
            with_x += i32::from(level * i16::from(x[i]));
            with_levels += i32::from(level * level);
        }
        let (with_x, with_levels) = (with_x as f32, with_levels as f32);
        // Whether `p^2 / n` is larger, without dividing.
        if with_x * with_x * square > product * product * with_levels {
            product = with_x * f32::from(extreme.signum());
            square = with_levels;
        }
    }
    product / square * (extreme / 127.0)
}

/// Of each byte: `first` and the steps over all middles that it is above.
#[inline(always)]
fn climb<const N: usize>(
    x: &[i8; BLOCK],
    middles: &[i8; N],
    first: i8,
    steps: &[i8; N],
) -> [i8; BLOCK] {
    // Element by element, so that the compiler keeps as many as a register has in one.
    each!(0, |i| {
        let mut climbed = first;
        for n in 0..N {
            climbed += if x[i] > middles[n] { steps[n] } else { 0 };
        }
        climbed
    })
}

/// See [`Simd::to_bytes`].
#[inline(always)]
fn to_signed_bytes<S: Simd>(s: S, x: [S::F; 2]) -> [i8; BLOCK] {
    let (words, _) = s.to_bytes(x);
    each!(0, |i| words[i / 4].to_le_bytes()[i % 4].cast_signed())
}
