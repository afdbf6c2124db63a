//! How sixteen rows of each quantized storage type become 32-column blocks of bytes and scales.
//!
//! Rows are lanes: word `g` of a block holds, for each of 16 rows, weights `4 * g .. 4 * g + 4`.
//! Offsets that are the same for all weights are folded into the bytes, so a weight is
//! `scale * signed_byte`, plus a minimum per block where the type has one.

use super::panel::{Extra, PackedBlock};
use crate::dtype::DType;
use crate::simd::Simd;
use crate::tile::Tile;

/// A quantized storage type.
pub(super) trait Format {
    /// Which type it is.
    const DTYPE: DType;
    /// What a block has besides one scale.
    const EXTRA: Extra;
    /// What several 32-column blocks of a file block have in common.
    type Header<S: Simd>: Copy;

    /// Reads the header of file block `index`.
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Self::Header<S>;

    /// Reads the `part`-th 32 columns of file block `index`.
    fn block<S: Simd>(
        s: S,
        tile: &Tile<'_>,
        index: usize,
        part: usize,
        header: &Self::Header<S>,
    ) -> PackedBlock<S>;
}

/// Both halves of 16 bytes per row: the low nibbles are words 0 to 3, the high ones 4 to 7.
#[inline(always)]
fn nibbles<S: Simd>(s: S, bytes: [S::U; 4]) -> [S::U; 8] {
    let mask = s.u_splat(0x0F0F_0F0F);
    std::array::from_fn(|g| {
        if g < 4 {
            s.u_and(bytes[g], mask)
        } else {
            s.u_and(s.u_shr(bytes[g - 4], 4), mask)
        }
    })
}

/// Thirty-two bytes at `at` of each row.
#[inline(always)]
fn columns32<S: Simd>(s: S, tile: &Tile<'_>, at: usize) -> [S::U; 8] {
    let (low, high) = (s.columns(tile, at), s.columns(tile, at + 16));
    std::array::from_fn(|g| if g < 4 { low[g] } else { high[g - 4] })
}

/// Sets bit 4 of each byte from 32 bits per row, bit `i` for column `i`.
#[inline(always)]
fn or_fifth_bits<S: Simd>(s: S, words: [S::U; 8], bits: S::U) -> [S::U; 8] {
    let spread = s.u_splat(0x0020_4081);
    let ones = s.u_splat(0x0101_0101);
    std::array::from_fn(|g| {
        // Four bits times the constant puts bit i at bit 8 * i (and others elsewhere).
        let four = s.u_and(s.u_shr(bits, 4 * g as u32), s.u_splat(15));
        s.u_or(words[g], s.u_shl(s.u_and(s.u_mul(four, spread), ones), 4))
    })
}

/// The same offset for all bytes.
#[inline(always)]
fn weights<S: Simd>(s: S, words: [S::U; 8], offset: i8) -> [S::U; 8] {
    std::array::from_fn(|g| s.weights(words[g], offset))
}

/// Scale and minimum from `d: f16` and `m: f16`, which lie side by side.
#[inline(always)]
fn scale_and_min<S: Simd>(s: S, both: S::U) -> (S::F, S::F) {
    (s.f16_low(both), s.f16_low(s.u_shr(both, 16)))
}

/// Implements [`Format`] for a type with 32 columns per block.
macro_rules! simple_format {
    ($name:ident, $extra:ident, |$s:ident, $tile:ident, $at:ident| $body:expr) => {
        pub(super) struct $name;

        impl Format for $name {
            const DTYPE: DType = DType::$name;
            const EXTRA: Extra = Extra::$extra;
            type Header<S: Simd> = ();

            #[inline(always)]
            fn header<S: Simd>(_: S, _: &Tile<'_>, _: usize) {}

            #[inline(always)]
            fn block<S: Simd>(
                $s: S,
                $tile: &Tile<'_>,
                index: usize,
                _: usize,
                (): &(),
            ) -> PackedBlock<S> {
                let $at = index * DType::$name.block_bytes();
                $body
            }
        }
    };
}

simple_format!(Q8_0, Nothing, |s, tile, at| {
    let scale = s.f16_low(s.gather(tile, at));
    PackedBlock {
        words: weights(s, columns32(s, tile, at + 2), 0),
        scale,
        extra: scale,
    }
});

simple_format!(Q4_0, Nothing, |s, tile, at| {
    let scale = s.f16_low(s.gather(tile, at));
    let words = nibbles(s, s.columns(tile, at + 2));
    PackedBlock {
        words: weights(s, words, -8),
        scale,
        extra: scale,
    }
});

simple_format!(Q4_1, Minimum, |s, tile, at| {
    let (scale, extra) = scale_and_min(s, s.gather(tile, at));
    let words = nibbles(s, s.columns(tile, at + 4));
    PackedBlock {
        words: weights(s, words, 0),
        scale,
        extra,
    }
});

simple_format!(Q5_0, Nothing, |s, tile, at| {
    let scale = s.f16_low(s.gather(tile, at));
    let words = or_fifth_bits(
        s,
        nibbles(s, s.columns(tile, at + 6)),
        s.gather(tile, at + 2),
    );
    PackedBlock {
        words: weights(s, words, -16),
        scale,
        extra: scale,
    }
});

simple_format!(Q5_1, Minimum, |s, tile, at| {
    let (scale, extra) = scale_and_min(s, s.gather(tile, at));
    let words = or_fifth_bits(
        s,
        nibbles(s, s.columns(tile, at + 8)),
        s.gather(tile, at + 4),
    );
    PackedBlock {
        words: weights(s, words, 0),
        scale,
        extra,
    }
});

/// What the eight sub-blocks of a `Q4K` or `Q5K` block share.
pub(super) struct KHeader<S: Simd> {
    d: S::F,
    /// Negated, because the minimum is subtracted.
    minus_dmin: S::F,
    /// Twelve bytes of 6-bit scales and minima.
    packed: [S::U; 3],
}

impl<S: Simd> Clone for KHeader<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd> Copy for KHeader<S> {}

impl<S: Simd> KHeader<S> {
    #[inline(always)]
    fn read(s: S, tile: &Tile<'_>, at: usize) -> Self {
        let (d, dmin) = scale_and_min(s, s.gather(tile, at));
        Self {
            d,
            minus_dmin: s.mul(dmin, s.splat(-1.0)),
            packed: std::array::from_fn(|i| s.gather(tile, at + 4 + 4 * i)),
        }
    }

    /// Scale and (negative) minimum of a sub-block.
    #[inline(always)]
    fn sub_block(&self, s: S, part: usize) -> (S::F, S::F) {
        let shift = 8 * (part % 4) as u32;
        let byte = |word: usize| s.u_shr(self.packed[word], shift);
        let (scale, min) = if part < 4 {
            (
                s.u_and(byte(0), s.u_splat(63)),
                s.u_and(byte(1), s.u_splat(63)),
            )
        } else {
            // The upper two bits are those the first four sub-blocks leave unused.
            let upper = |word: usize| s.u_and(s.u_shr(byte(word), 2), s.u_splat(0x30));
            let low = s.u_and(byte(2), s.u_splat(15));
            let high = s.u_and(s.u_shr(byte(2), 4), s.u_splat(15));
            (s.u_or(low, upper(0)), s.u_or(high, upper(1)))
        };
        (
            s.mul(self.d, s.i_to_f32(scale)),
            s.mul(self.minus_dmin, s.i_to_f32(min)),
        )
    }
}

/// The nibbles of a sub-block, from 32 bytes that two sub-blocks share.
#[inline(always)]
fn k_nibbles<S: Simd>(s: S, tile: &Tile<'_>, at: usize, part: usize) -> [S::U; 8] {
    let shared = columns32(s, tile, at + 32 * (part / 2));
    let shift = 4 * (part % 2) as u32;
    std::array::from_fn(|g| s.u_and(s.u_shr(shared[g], shift), s.u_splat(0x0F0F_0F0F)))
}

pub(super) struct Q4K;

impl Format for Q4K {
    const DTYPE: DType = DType::Q4K;
    const EXTRA: Extra = Extra::Minimum;
    type Header<S: Simd> = KHeader<S>;

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> KHeader<S> {
        KHeader::read(s, tile, index * DType::Q4K.block_bytes())
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: &Tile<'_>,
        index: usize,
        part: usize,
        header: &KHeader<S>,
    ) -> PackedBlock<S> {
        let at = index * DType::Q4K.block_bytes();
        let (scale, extra) = header.sub_block(s, part);
        let words = k_nibbles(s, tile, at + 16, part);
        PackedBlock {
            words: weights(s, words, 0),
            scale,
            extra,
        }
    }
}

pub(super) struct Q5K;

impl Format for Q5K {
    const DTYPE: DType = DType::Q5K;
    const EXTRA: Extra = Extra::Minimum;
    type Header<S: Simd> = KHeader<S>;

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> KHeader<S> {
        KHeader::read(s, tile, index * DType::Q5K.block_bytes())
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: &Tile<'_>,
        index: usize,
        part: usize,
        header: &KHeader<S>,
    ) -> PackedBlock<S> {
        let at = index * DType::Q5K.block_bytes();
        let (scale, extra) = header.sub_block(s, part);
        let low = k_nibbles(s, tile, at + 48, part);
        let high = columns32(s, tile, at + 16);
        let words = std::array::from_fn(|g| {
            let bit = s.u_and(s.u_shr(high[g], part as u32), s.u_splat(0x0101_0101));
            s.u_or(low[g], s.u_shl(bit, 4))
        });
        PackedBlock {
            words: weights(s, words, 0),
            scale,
            extra,
        }
    }
}

pub(super) struct Q6K;

/// What the sub-blocks of a `Q6K` block share.
pub(super) struct Q6KHeader<S: Simd> {
    d: S::F,
    /// Sixteen signed bytes.
    scales: [S::U; 4],
}

impl<S: Simd> Clone for Q6KHeader<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd> Copy for Q6KHeader<S> {}

impl<S: Simd> Q6KHeader<S> {
    /// The scale of 16 columns.
    #[inline(always)]
    fn scale(&self, s: S, sub_block: usize) -> S::F {
        let top = s.u_shl(self.scales[sub_block / 4], 24 - 8 * (sub_block % 4) as u32);
        s.mul(self.d, s.i_to_f32(s.i_shr(top, 24)))
    }
}

impl Format for Q6K {
    const DTYPE: DType = DType::Q6K;
    const EXTRA: Extra = Extra::SecondScale;
    type Header<S: Simd> = Q6KHeader<S>;

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Q6KHeader<S> {
        let at = index * DType::Q6K.block_bytes();
        Q6KHeader {
            // The scale is the last two bytes of the block.
            d: s.f16_low(s.u_shr(s.gather(tile, at + 206), 16)),
            scales: std::array::from_fn(|i| s.gather(tile, at + 192 + 4 * i)),
        }
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: &Tile<'_>,
        index: usize,
        part: usize,
        header: &Q6KHeader<S>,
    ) -> PackedBlock<S> {
        let at = index * DType::Q6K.block_bytes();
        let (half, quarter) = (part / 4, part % 4);
        let low = columns32(s, tile, at + 64 * half + 32 * (quarter % 2));
        let high = columns32(s, tile, at + 128 + 32 * half);
        let (low_shift, high_shift) = (4 * (quarter / 2) as u32, 2 * quarter as u32);
        let words = std::array::from_fn(|g| {
            let low = s.u_and(s.u_shr(low[g], low_shift), s.u_splat(0x0F0F_0F0F));
            let high = s.u_and(s.u_shr(high[g], high_shift), s.u_splat(0x0303_0303));
            s.u_or(low, s.u_shl(high, 4))
        });
        PackedBlock {
            words: weights(s, words, -32),
            scale: header.scale(s, 2 * part),
            extra: header.scale(s, 2 * part + 1),
        }
    }
}
