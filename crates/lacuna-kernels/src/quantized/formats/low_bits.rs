//! Types of two and three bits, and of three levels.

use super::{Format, columns32, file_block, scale_and_min, shares_nothing};
use crate::dtype::DType;
use crate::quantized::packing::Narrow;
use crate::quantized::panel::{PackedBlock, Plain, WithSecondScale, WithTwoMinima};
use crate::simd::{Simd, each};
use crate::tile::Tile;

/// Two bits of each byte, of 32 that four blocks of columns share.
#[inline(always)]
fn pairs<S: Simd>(s: S, shared: &[S::U; 8], part: usize) -> [S::U; 8] {
    let shift = 2 * (part % 4) as u32;
    each!(s.u_splat(0), |g| s
        .u_and(s.u_shr(shared[g], shift), s.u_splat(0x0303_0303)))
}

pub(in crate::quantized) struct Q2K;

/// What the sub-blocks of a `Q2K` block share.
#[derive(Clone, Copy)]
pub(in crate::quantized) struct Q2KHeader<S: Simd> {
    d: S::F,
    /// Negated, because the minimum is subtracted.
    minus_dmin: S::F,
    /// Sixteen bytes: a scale in the low nibble, a minimum in the high one.
    scales: [S::U; 4],
}

impl<S: Simd> Q2KHeader<S> {
    /// Scale and minimum of 16 columns.
    #[inline(always)]
    fn sub_block(&self, s: S, index: usize) -> [S::U; 2] {
        let byte = s.u_shr(self.scales[index / 4], 8 * (index % 4) as u32);
        let fifteen = s.u_splat(15);
        [s.u_and(byte, fifteen), s.u_and(s.u_shr(byte, 4), fifteen)]
    }
}

/// A scale of four bits times a weight of two is a byte, so that one scale is left for all columns.
impl Format for Q2K {
    const DTYPE: DType = DType::Q2K;
    type Extra = WithTwoMinima;
    type Pairs = Narrow<6, 0>;
    type FewPairs = Narrow<6, 0>;
    const OFFSET: u8 = 0;
    type Header<S: Simd> = Q2KHeader<S>;
    const SHARING: usize = 4;
    type Shared<S: Simd> = [S::U; 8];

    #[inline(always)]
    fn shared<S: Simd>(s: S, tile: &Tile<'_>, index: usize, half: usize) -> [S::U; 8] {
        columns32(s, &file_block::<Self>(tile, index), 16 + 32 * half)
    }

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Q2KHeader<S> {
        let tile = &file_block::<Self>(tile, index);
        let (d, dmin) = scale_and_min(s, s.gather(tile, 80));
        Q2KHeader {
            d,
            minus_dmin: s.mul(dmin, s.splat(-1.0)),
            scales: s.columns(tile, 0),
        }
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        _: &Tile<'_>,
        _: usize,
        part: usize,
        header: &Q2KHeader<S>,
        shared: &[S::U; 8],
    ) -> PackedBlock<S> {
        let weights = pairs(s, shared, part);
        let halves: [_; 2] = each!([weights[0]; 2], |half| header.sub_block(s, 2 * part + half));
        let minima: [_; 2] = each!(header.d, |half| s
            .mul(header.minus_dmin, s.i_to_f32(halves[half][1])));
        PackedBlock {
            // `3 * 15` at most: no product reaches the next byte.
            words: each!(s.u_splat(0), |g| s.u_mul(weights[g], halves[g / 4][0])),
            scale: header.d,
            extra: minima[0],
            second_minimum: minima[1],
        }
    }
}

pub(in crate::quantized) struct Q3K;

/// What the sub-blocks of a `Q3K` block share.
#[derive(Clone, Copy)]
pub(in crate::quantized) struct Q3KHeader<S: Simd> {
    d: S::F,
    /// Sixteen scales of 6 bits: nibbles in eight bytes, then two bits each.
    packed: [S::U; 3],
    /// The third bits of all columns.
    third: [S::U; 8],
}

impl<S: Simd> Q3KHeader<S> {
    /// The scale of 16 columns.
    #[inline(always)]
    fn scale(&self, s: S, index: usize) -> S::F {
        let shift = 8 * (index % 4) as u32;
        let low = s.u_shr(self.packed[index % 8 / 4], shift + 4 * (index / 8) as u32);
        let high = s.u_shr(self.packed[2], shift + 2 * (index / 4) as u32);
        let high = s.u_shl(s.u_and(high, s.u_splat(3)), 4);
        let six = s.u_or(s.u_and(low, s.u_splat(15)), high);
        let signed = s.u_add(six, s.u_splat((-32_i32).cast_unsigned()));
        s.mul(self.d, s.i_to_f32(signed))
    }
}

impl Format for Q3K {
    const DTYPE: DType = DType::Q3K;
    type Extra = WithSecondScale;
    // Three bits, of which a half has no more words to sum in 16 bits than there are of five.
    type Pairs = Narrow<5, 4>;
    type FewPairs = Narrow<5, 4>;
    const OFFSET: u8 = 4;
    type Header<S: Simd> = Q3KHeader<S>;
    const SHARING: usize = 4;
    type Shared<S: Simd> = [S::U; 8];

    #[inline(always)]
    fn shared<S: Simd>(s: S, tile: &Tile<'_>, index: usize, half: usize) -> [S::U; 8] {
        columns32(s, &file_block::<Self>(tile, index), 32 + 32 * half)
    }

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Q3KHeader<S> {
        let tile = &file_block::<Self>(tile, index);
        let [_, packed @ ..] = s.columns(tile, 92);
        Q3KHeader {
            d: s.f16_column(tile, 108),
            packed,
            third: columns32(s, tile, 0),
        }
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        _: &Tile<'_>,
        _: usize,
        part: usize,
        header: &Q3KHeader<S>,
        shared: &[S::U; 8],
    ) -> PackedBlock<S> {
        let low = pairs(s, shared, part);
        let words = each!(s.u_splat(0), |g| {
            let bit = s.u_and(
                s.u_shr(header.third[g], part as u32),
                s.u_splat(0x0101_0101),
            );
            s.u_or(low[g], s.u_shl(bit, 2))
        });
        let scale = header.scale(s, 2 * part);
        PackedBlock {
            words,
            scale,
            extra: header.scale(s, 2 * part + 1),
            second_minimum: scale,
        }
    }
}

pub(in crate::quantized) struct Tq2_0;

impl Format for Tq2_0 {
    const DTYPE: DType = DType::Tq2_0;
    type Extra = Plain;
    type Pairs = Narrow<4, 1>;
    type FewPairs = Narrow<4, 1>;
    const OFFSET: u8 = 1;
    type Header<S: Simd> = S::F;
    const SHARING: usize = 4;
    type Shared<S: Simd> = [S::U; 8];

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> S::F {
        s.f16_column(&file_block::<Self>(tile, index), 64)
    }

    #[inline(always)]
    fn shared<S: Simd>(s: S, tile: &Tile<'_>, index: usize, half: usize) -> [S::U; 8] {
        columns32(s, &file_block::<Self>(tile, index), 32 * half)
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        _: &Tile<'_>,
        _: usize,
        part: usize,
        scale: &S::F,
        shared: &[S::U; 8],
    ) -> PackedBlock<S> {
        PackedBlock {
            words: pairs(s, shared, part),
            scale: *scale,
            extra: *scale,
            second_minimum: *scale,
        }
    }
}

pub(in crate::quantized) struct Tq1_0;

/// What the sub-blocks of a `Tq1_0` block share.
#[derive(Clone, Copy)]
pub(in crate::quantized) struct Tq1_0Header<S: Simd> {
    d: S::F,
    /// Bytes of five digits: 32, of whose digits each is a sub-block, and sixteen, of whose digits each is half
    /// a sub-block. Then four bytes of four digits.
    bytes: [S::U; 13],
}

/// Where the digits of words of a sub-block are: in which words of the header from which on, and which of theirs.
const DIGITS: [[(usize, usize); 8]; 8] = {
    let mut digits = [[(0, 0); 8]; 8];
    let mut i = 0;
    while i < 64 {
        let (part, g) = (i / 8, i % 8);
        digits[part][g] = match part {
            0..5 => (g, part),
            5..7 => (8 + g % 4, 2 * (part - 5) + g / 4),
            _ if g < 4 => (8 + g, 4),
            _ => (12, g - 4),
        };
        i += 1;
    }
    digits
};

/// A digit of base 3 of each byte: see [`ternary_digits`](crate::quantized::codebooks::ternary_digits).
#[inline(always)]
fn ternary_digit<S: Simd>(s: S, bytes: S::U, digit: usize) -> S::U {
    const POWERS: [u32; 5] = [1, 3, 9, 27, 81];
    let (power, lower) = (s.u_splat(POWERS[digit]), s.u_splat(0x00FF_00FF));
    // Of even bytes and of odd ones.
    let digits: [_; 2] = each!(bytes, |odd| {
        let fractions = s.u_and(s.u_shr(bytes, 8 * odd as u32), lower);
        let rest = s.u_and(s.u_mul(fractions, power), lower);
        // Three times the rest, whose upper byte is the digit.
        s.u_and(s.u_shr(s.u_add(s.u_shl(rest, 1), rest), 8), lower)
    });
    s.u_or(digits[0], s.u_shl(digits[1], 8))
}

impl Format for Tq1_0 {
    const DTYPE: DType = DType::Tq1_0;
    type Extra = Plain;
    type Pairs = Narrow<4, 1>;
    type FewPairs = Narrow<4, 1>;
    const OFFSET: u8 = 1;
    type Header<S: Simd> = Tq1_0Header<S>;
    shares_nothing!();

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Tq1_0Header<S> {
        let tile = &file_block::<Self>(tile, index);
        let (first, second) = (columns32(s, tile, 0), s.columns(tile, 32));
        let last = s.gather(tile, 48);
        Tq1_0Header {
            d: s.f16_column(tile, 52),
            bytes: each!(last, |i| match i {
                0..8 => first[i],
                8..12 => second[i - 8],
                _ => last,
            }),
        }
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        _: &Tile<'_>,
        _: usize,
        part: usize,
        header: &Tq1_0Header<S>,
        (): &(),
    ) -> PackedBlock<S> {
        PackedBlock {
            words: each!(s.u_splat(0), |g| {
                let (word, digit) = DIGITS[part][g];
                ternary_digit(s, header.bytes[word], digit)
            }),
            scale: header.d,
            extra: header.d,
            second_minimum: header.d,
        }
    }
}
