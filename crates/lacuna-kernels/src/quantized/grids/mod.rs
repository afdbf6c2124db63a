//! IQ2 and IQ3 types: eight, or four, neighbouring weights are a point of a table, and have signs.
//!
//! Of a row's block of 32 columns this module gives magnitudes, signs and scales, one row at a time.
//! Magnitudes are bytes of at most 62.

#[cfg(target_arch = "x86_64")]
pub(super) mod planes;
mod tables;

use crate::dtype::DType;
use crate::simd::each;

/// What the elements of a point of IQ2 and of IQ3_XXS and IQ3_S stand for.
pub(super) const IQ2: [u8; 4] = [8, 25, 43, 0];
const IQ3_XXS: [u8; 16] = [4, 12, 20, 28, 36, 44, 52, 62, 0, 0, 0, 0, 0, 0, 0, 0];
const IQ3_S: [u8; 16] = [1, 3, 5, 7, 9, 11, 13, 15, 0, 0, 0, 0, 0, 0, 0, 0];

static IQ2_XXS_POINTS: [u64; 256] = eights(&tables::IQ2_XXS);
static IQ2_XS_POINTS: [u64; 512] = eights(&tables::IQ2_XS);
static IQ2_S_POINTS: [u64; 1024] = eights(&tables::IQ2_S);
static IQ3_XXS_POINTS: [u32; 256] = fours(&tables::IQ3_XXS, &IQ3_XXS);
static IQ3_S_POINTS: [u32; 512] = fours(&tables::IQ3_S, &IQ3_S);

/// Points of eight elements, a byte each.
const fn eights<const N: usize>(codes: &[u16; N]) -> [u64; N] {
    let mut points = [0; N];
    let mut i = 0;
    while i < N {
        let mut element = 0;
        while element < 8 {
            let code = codes[i] >> (2 * element) & 3;
            points[i] |= (IQ2[code as usize] as u64) << (8 * element);
            element += 1;
        }
        i += 1;
    }
    points
}

/// Points of four elements, a byte each.
const fn fours<const N: usize>(codes: &[u16; N], levels: &[u8; 16]) -> [u32; N] {
    let mut points = [0; N];
    let mut i = 0;
    while i < N {
        let mut element = 0;
        while element < 4 {
            let code = codes[i] >> (4 * element) & 15;
            points[i] |= (levels[code as usize] as u32) << (8 * element);
            element += 1;
        }
        i += 1;
    }
    points
}

/// The same points as second ones of two, in the upper half of a number.
#[cfg(target_arch = "x86_64")]
const fn seconds<const N: usize>(points: &[u32; N]) -> [u64; N] {
    let mut seconds = [0; N];
    let mut i = 0;
    while i < N {
        seconds[i] = (points[i] as u64) << 32;
        i += 1;
    }
    seconds
}

#[cfg(target_arch = "x86_64")]
static IQ3_XXS_SECONDS: [u64; 256] = seconds(&IQ3_XXS_POINTS);
#[cfg(target_arch = "x86_64")]
static IQ3_S_SECONDS: [u64; 512] = seconds(&IQ3_S_POINTS);

/// What is added to signed weights where bytes have no sign.
pub(crate) const OFFSET: u8 = 64;

/// A storage type whose weights are points of a table.
pub(crate) trait Grid {
    /// Which type it is.
    const DTYPE: DType;
    /// What the scale of a block is multiplied with, besides the odd number of [`Grid::scales`].
    const UNIT: f32;

    /// Magnitudes of the `part`-th 32 columns of a file block.
    fn magnitudes(block: &[u8], part: usize) -> [u64; 4];
    /// Which of them are negative.
    fn signs(block: &[u8], part: usize) -> u32;
    /// Odd numbers: the scales of both halves.
    fn scales(block: &[u8], part: usize) -> [u8; 2];
}

pub(crate) struct Iq2Xxs;
pub(crate) struct Iq2Xs;
pub(crate) struct Iq2S;
pub(crate) struct Iq3Xxs;
pub(crate) struct Iq3S;

/// `N` bytes at `at`.
#[inline(always)]
pub(super) fn bytes<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("inside the block")
}

#[inline(always)]
pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes(block, at))
}

/// Eight signs for each seven bits in a byte: the number of negative ones is even.
#[inline(always)]
fn even(sevens: u32) -> u32 {
    // The lowest bit of each byte becomes the sum of all its bits; what comes from the next byte stays
    // above it.
    let sum = sevens ^ (sevens >> 4);
    let sum = sum ^ (sum >> 2);
    let sum = (sum ^ (sum >> 1)) & 0x0101_0101;
    sevens | (sum << 7)
}

/// Four times seven bits, each in a byte.
#[inline(always)]
fn sevens(bits: u32) -> u32 {
    (bits & 0x7F) | (bits & 0x3F80) << 1 | (bits & 0x1F_C000) << 2 | (bits & 0xFE0_0000) << 3
}

/// Both nibbles of a byte, doubled and one more.
#[inline(always)]
fn odd_nibbles(byte: u8) -> [u8; 2] {
    [2 * (byte & 15) + 1, 2 * (byte >> 4) + 1]
}

/// Two points of four elements for each eight columns.
#[inline(always)]
fn join(points: [u32; 8]) -> [u64; 4] {
    each!(0, |i| u64::from(points[2 * i])
        | u64::from(points[2 * i + 1]) << 32)
}

/// Implements looking up for types: what points are, and where.
macro_rules! points {
    ($($name:ident: $point:ty, $points:ident;)+) => {$(
        impl $name {
            pub(super) const POINTS: usize = $points.len();

            /// The point of an index, of which bits beyond the table mean nothing.
            #[inline(always)]
            pub(super) fn point(index: u16) -> &'static $point {
                &$points[usize::from(index) % Self::POINTS]
            }
        }
    )+};
}

points! {
    Iq2Xxs: u64, IQ2_XXS_POINTS;
    Iq2Xs: u64, IQ2_XS_POINTS;
    Iq2S: u64, IQ2_S_POINTS;
    Iq3Xxs: u32, IQ3_XXS_POINTS;
    Iq3S: u32, IQ3_S_POINTS;
}

/// Implements looking up two points at once: where the second ones are.
#[cfg(target_arch = "x86_64")]
macro_rules! two_points {
    ($($name:ident: $seconds:ident;)+) => {$(
        impl $name {
            /// Two points, with one instruction more than one takes.
            #[inline(always)]
            pub(super) fn two([first, second]: [u16; 2]) -> u64 {
                u64::from(*Self::point(first)) | $seconds[usize::from(second) % Self::POINTS]
            }
        }
    )+};
}

#[cfg(target_arch = "x86_64")]
two_points! {
    Iq3Xxs: IQ3_XXS_SECONDS;
    Iq3S: IQ3_S_SECONDS;
}

impl Grid for Iq2Xxs {
    const DTYPE: DType = DType::Iq2Xxs;
    const UNIT: f32 = 0.125;

    #[inline(always)]
    fn magnitudes(block: &[u8], part: usize) -> [u64; 4] {
        let indices: &[u8; 4] = bytes(block, 2 + 8 * part);
        each!(0, |i| *Self::point(indices[i].into()))
    }

    #[inline(always)]
    fn signs(block: &[u8], part: usize) -> u32 {
        even(sevens(u32_at(block, 6 + 8 * part)))
    }

    #[inline(always)]
    fn scales(block: &[u8], part: usize) -> [u8; 2] {
        [2 * (block[9 + 8 * part] >> 4) + 1; 2]
    }
}

impl Grid for Iq2Xs {
    const DTYPE: DType = DType::Iq2Xs;
    const UNIT: f32 = 0.125;

    #[inline(always)]
    fn magnitudes(block: &[u8], part: usize) -> [u64; 4] {
        let words: &[u8; 8] = bytes(block, 2 + 8 * part);
        each!(0, |i| {
            let word = u16::from_le_bytes([words[2 * i], words[2 * i + 1]]);
            *Self::point(word)
        })
    }

    #[inline(always)]
    fn signs(block: &[u8], part: usize) -> u32 {
        // The upper seven bits of each word.
        let words: &[u8; 8] = bytes(block, 2 + 8 * part);
        let upper: [u8; 4] = each!(0, |i| words[2 * i + 1] >> 1);
        even(u32::from_le_bytes(upper))
    }

    #[inline(always)]
    fn scales(block: &[u8], part: usize) -> [u8; 2] {
        odd_nibbles(block[66 + part])
    }
}

impl Grid for Iq2S {
    const DTYPE: DType = DType::Iq2S;
    const UNIT: f32 = 0.125;

    #[inline(always)]
    fn magnitudes(block: &[u8], part: usize) -> [u64; 4] {
        let low: &[u8; 4] = bytes(block, 2 + 4 * part);
        let high = u16::from(block[66 + part]);
        each!(0, |i| {
            *Self::point(u16::from(low[i]) | (high << (8 - 2 * i) & 0x300))
        })
    }

    #[inline(always)]
    fn signs(block: &[u8], part: usize) -> u32 {
        u32_at(block, 34 + 4 * part)
    }

    #[inline(always)]
    fn scales(block: &[u8], part: usize) -> [u8; 2] {
        odd_nibbles(block[74 + part])
    }
}

impl Grid for Iq3Xxs {
    const DTYPE: DType = DType::Iq3Xxs;
    const UNIT: f32 = 0.25;

    #[inline(always)]
    fn magnitudes(block: &[u8], part: usize) -> [u64; 4] {
        let indices: &[u8; 8] = bytes(block, 2 + 8 * part);
        join(each!(0, |i| *Self::point(indices[i].into())))
    }

    #[inline(always)]
    fn signs(block: &[u8], part: usize) -> u32 {
        even(sevens(u32_at(block, 66 + 4 * part)))
    }

    #[inline(always)]
    fn scales(block: &[u8], part: usize) -> [u8; 2] {
        [2 * (block[69 + 4 * part] >> 4) + 1; 2]
    }
}

impl Grid for Iq3S {
    const DTYPE: DType = DType::Iq3S;
    const UNIT: f32 = 1.0;

    #[inline(always)]
    fn magnitudes(block: &[u8], part: usize) -> [u64; 4] {
        let low: &[u8; 8] = bytes(block, 2 + 8 * part);
        let high = u16::from(block[66 + part]);
        join(each!(0, |i| {
            *Self::point(u16::from(low[i]) | (high << (8 - i) & 0x100))
        }))
    }

    #[inline(always)]
    fn signs(block: &[u8], part: usize) -> u32 {
        u32_at(block, 74 + 4 * part)
    }

    #[inline(always)]
    fn scales(block: &[u8], part: usize) -> [u8; 2] {
        let both = odd_nibbles(block[106 + part / 2]);
        [both[part % 2]; 2]
    }
}

/// All ones in byte `j` of entry `i` where bit `j` of `i` is set.
static MASKS: [u64; 256] = masks();

const fn masks() -> [u64; 256] {
    let mut masks = [0; 256];
    let mut i = 0;
    while i < masks.len() {
        let mut bit = 0;
        while bit < 8 {
            if i >> bit & 1 == 1 {
                masks[i] |= 0xFF << (8 * bit);
            }
            bit += 1;
        }
        i += 1;
    }
    masks
}

/// The weights of the `part`-th 32 columns of a file block, [`OFFSET`] larger, a byte each.
pub(super) fn weights<G: Grid>(block: &[u8], part: usize) -> [u64; 4] {
    const OFFSETS: u64 = u64::from_ne_bytes([OFFSET; 8]);
    let (magnitudes, signs) = (
        G::magnitudes(block, part),
        G::signs(block, part).to_le_bytes(),
    );
    each!(0, |i| {
        let negative = MASKS[usize::from(signs[i])];
        // No byte reaches the next one: magnitudes are less than the offset.
        OFFSETS + (magnitudes[i] & !negative) - (magnitudes[i] & negative)
    })
}

/// Writes the weights of a file block that has scale `d`.
pub(crate) fn decode<G: Grid>(block: &[u8], d: f32, out: &mut [f32]) {
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let scales = G::scales(block, part).map(|scale| d * f32::from(scale) * G::UNIT);
        let weights = weights::<G>(block, part);
        let weights = weights.iter().flat_map(|eight| eight.to_le_bytes());
        for (i, (out, weight)) in out.iter_mut().zip(weights).enumerate() {
            *out = scales[i / 16] * (f32::from(weight) - f32::from(OFFSET));
        }
    }
}
