//! How sixteen rows of each quantized storage type become 32-column blocks of bytes and scales.
//!
//! Rows are lanes: word `g` of a block holds, for each of 16 rows, weights `4 * g .. 4 * g + 4`.
//! A weight is `scale * (byte - OFFSET)`, plus a minimum per block where the type has one.
//!
//! For one token, AVX2 and AVX-512 read eight rows instead: `super::eight`.

/// Implements [`Format`] for a type with 32 columns per block.
macro_rules! simple_format {
    ($name:ident, $extra:ty, $pairs:ty, $few:ty, $less:expr, |$s:ident, $tile:ident| $body:expr) => {
        pub(in crate::quantized) struct $name;

        impl Format for $name {
            const DTYPE: DType = DType::$name;
            type Extra = $extra;
            type Pairs = $pairs;
            type FewPairs = $few;
            const OFFSET: u8 = $less;
            type Header<S: Simd> = ();

            #[inline(always)]
            fn header<S: Simd>(_: S, _: &Tile<'_>, _: usize) {}

            shares_nothing!();

            #[inline(always)]
            fn block<S: Simd>(
                $s: S,
                $tile: &Tile<'_>,
                index: usize,
                _: usize,
                (): &(),
                (): &(),
            ) -> PackedBlock<S> {
                let $tile = &file_block::<Self>($tile, index);
                $body
            }
        }
    };
}

/// An expression with the [`Format`] of a storage type, which is quantized, as the type `$format`.
macro_rules! with_format {
    ($dtype:expr, |$format:ident| $body:expr) => {
        with_format!($dtype, |$format| $body,
            Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4K Q5K Q6K Iq4Nl Iq4Xs Mxfp4 Q2K Q3K Tq1_0 Tq2_0
            Iq3S Iq3Xxs Iq2S Iq2Xs Iq2Xxs)
    };
    ($dtype:expr, |$format:ident| $body:expr, $($name:ident)+) => {
        match $dtype {
            $(DType::$name => {
                type $format = crate::quantized::formats::$name;
                $body
            })+
            DType::F32 | DType::F16 | DType::Bf16 => unreachable!("not a quantized matrix"),
        }
    };
}
pub(super) use with_format;

mod grids;
mod lookup;
mod low_bits;

pub(super) use super::grids::{Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
pub(super) use lookup::{Iq4Nl, Iq4Xs, Mxfp4};
pub(super) use low_bits::{Q2K, Q3K, Tq1_0, Tq2_0};

use super::packing::{Bytes, Narrow, Vectors, Wide};
use super::panel::{HasExtra, PackedBlock, Plain, WithMinimum, WithSecondScale};
use crate::dtype::DType;
use crate::simd::{Simd, each};
use crate::tile::Tile;

/// A quantized storage type.
pub(super) trait Format {
    /// Which type it is.
    const DTYPE: DType;
    /// What a block has besides one scale.
    type Extra: HasExtra;
    /// How panels are packed where bytes are multiplied through 16 bits.
    type Pairs: Vectors;
    /// The same for a few tokens.
    type FewPairs: Vectors;
    /// What the bytes of a block are larger by than its weights.
    const OFFSET: u8;
    /// What all 32-column blocks of a file block have in common.
    type Header<S: Simd>: Copy;
    /// How many 32-column blocks, one after the other, share bytes.
    const SHARING: usize = 1;
    /// Those bytes, which are brought to lanes once.
    type Shared<S: Simd>: Copy;

    /// Reads the header of file block `index`.
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Self::Header<S>;

    /// Reads what the `group`-th [`Format::SHARING`] blocks of columns of file block `index` share.
    fn shared<S: Simd>(s: S, tile: &Tile<'_>, index: usize, group: usize) -> Self::Shared<S>;

    /// Reads the `part`-th 32 columns of file block `index`.
    fn block<S: Simd>(
        s: S,
        tile: &Tile<'_>,
        index: usize,
        part: usize,
        header: &Self::Header<S>,
        shared: &Self::Shared<S>,
    ) -> PackedBlock<S>;

    /// What such a block has besides its words: [`PackedBlock::scale`], [`PackedBlock::extra`] and
    /// [`PackedBlock::second_minimum`]. Types whose words the compiler would not leave out have a way of their own.
    #[cfg_attr(
        not(target_arch = "aarch64"),
        expect(
            dead_code,
            reason = "for rows that ARM multiplies as they lie in memory"
        )
    )]
    #[inline(always)]
    fn scales<S: Simd>(
        s: S,
        tile: &Tile<'_>,
        index: usize,
        part: usize,
        header: &Self::Header<S>,
    ) -> [S::F; 3] {
        let shared = Self::shared(s, tile, index, part / Self::SHARING);
        let block = Self::block(s, tile, index, part, header, &shared);
        [block.scale, block.extra, block.second_minimum]
    }
}

/// Items of a [`Format`] whose 32-column blocks share no bytes.
macro_rules! shares_nothing {
    () => {
        type Shared<S: Simd> = ();

        #[inline(always)]
        fn shared<S: Simd>(_: S, _: &Tile<'_>, _: usize, _: usize) {}
    };
}
use shares_nothing;

/// File block `index` of each row.
#[inline(always)]
pub(super) fn file_block<'a, D: Format>(tile: &Tile<'a>, index: usize) -> Tile<'a> {
    let bytes = D::DTYPE.block_bytes();
    tile.part(index * bytes, bytes)
}

/// Both halves of 16 bytes per row: the low nibbles are words 0 to 3, the high ones 4 to 7.
#[inline(always)]
fn nibbles<S: Simd>(s: S, bytes: [S::U; 4]) -> [S::U; 8] {
    let mask = s.u_splat(0x0F0F_0F0F);
    each!(s.u_splat(0), |g| {
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
    each!(s.u_splat(0), |g| if g < 4 { low[g] } else { high[g - 4] })
}

/// Sets bit 4 of each byte from 32 bits per row, bit `i` for column `i`.
#[inline(always)]
fn or_fifth_bits<S: Simd>(s: S, words: [S::U; 8], bits: S::U) -> [S::U; 8] {
    let spread = s.u_splat(0x0020_4081);
    let ones = s.u_splat(0x0101_0101);
    each!(s.u_splat(0), |g| {
        // Four bits times the constant puts bit i at bit 8 * i (and others elsewhere).
        let four = s.u_and(s.u_shr(bits, 4 * g as u32), s.u_splat(15));
        s.u_or(words[g], s.u_shl(s.u_and(s.u_mul(four, spread), ones), 4))
    })
}

/// Scale and minimum from `d: f16` and `m: f16`, which lie side by side.
#[inline(always)]
fn scale_and_min<S: Simd>(s: S, both: S::U) -> (S::F, S::F) {
    (s.f16_low(both), s.f16_low(s.u_shr(both, 16)))
}

simple_format!(Q8_0, Plain, Wide, Bytes, 0, |s, tile| {
    let scale = s.f16_column(tile, 0);
    PackedBlock {
        words: columns32(s, tile, 2),
        scale,
        extra: scale,
        second_minimum: scale,
    }
});

simple_format!(
    Q4_0,
    Plain,
    Narrow<4, 8>,
    Narrow<4, 8>,
    8,
    |s, tile| {
        let scale = s.f16_column(tile, 0);
        let words = nibbles(s, s.columns(tile, 2));
        PackedBlock {
            words,
            scale,
            extra: scale,
            second_minimum: scale,
        }
    }
);

simple_format!(
    Q4_1,
    WithMinimum,
    Narrow<4, 0>,
    Narrow<4, 0>,
    0,
    |s, tile| {
        let (scale, extra) = scale_and_min(s, s.gather(tile, 0));
        let words = nibbles(s, s.columns(tile, 4));
        PackedBlock {
            words,
            scale,
            extra,
            second_minimum: extra,
        }
    }
);

simple_format!(
    Q5_0,
    Plain,
    Narrow<5, 16>,
    Narrow<5, 16>,
    16,
    |s, tile| {
        let scale = s.f16_column(tile, 0);
        let words = or_fifth_bits(
            s,
            nibbles(s, s.columns(tile, 6)),
            s.gather(tile, 2),
        );
        PackedBlock {
            words,
            scale,
            extra: scale,
            second_minimum: scale,
        }
    }
);

simple_format!(
    Q5_1,
    WithMinimum,
    Narrow<5, 0>,
    Narrow<5, 0>,
    0,
    |s, tile| {
        let (scale, extra) = scale_and_min(s, s.gather(tile, 0));
        let words = or_fifth_bits(
            s,
            nibbles(s, s.columns(tile, 8)),
            s.gather(tile, 4),
        );
        PackedBlock {
            words,
            scale,
            extra,
            second_minimum: extra,
        }
    }
);

/// What the eight sub-blocks of a `Q4K` or `Q5K` block share.
#[derive(Clone, Copy)]
pub(super) struct KHeader<S: Simd> {
    d: S::F,
    /// Negated, because the minimum is subtracted.
    minus_dmin: S::F,
    /// Twelve bytes of 6-bit scales and minima.
    packed: [S::U; 3],
}

impl<S: Simd> KHeader<S> {
    #[inline(always)]
    fn read(s: S, tile: &Tile<'_>) -> Self {
        let [both, first, second, third] = s.columns(tile, 0);
        let (d, dmin) = scale_and_min(s, both);
        Self {
            d,
            minus_dmin: s.mul(dmin, s.splat(-1.0)),
            packed: [first, second, third],
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
fn k_nibbles<S: Simd>(s: S, shared: &[S::U; 8], part: usize) -> [S::U; 8] {
    let shift = 4 * (part % 2) as u32;
    each!(s.u_splat(0), |g| s
        .u_and(s.u_shr(shared[g], shift), s.u_splat(0x0F0F_0F0F)))
}

pub(super) struct Q4K;

impl Format for Q4K {
    const DTYPE: DType = DType::Q4K;
    type Extra = WithMinimum;
    type Pairs = Narrow<4, 0>;
    type FewPairs = Narrow<4, 0>;
    const OFFSET: u8 = 0;
    type Header<S: Simd> = KHeader<S>;
    const SHARING: usize = 2;
    type Shared<S: Simd> = [S::U; 8];

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> KHeader<S> {
        KHeader::read(s, &file_block::<Self>(tile, index))
    }

    #[inline(always)]
    fn shared<S: Simd>(s: S, tile: &Tile<'_>, index: usize, group: usize) -> [S::U; 8] {
        columns32(s, &file_block::<Self>(tile, index), 16 + 32 * group)
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        _: &Tile<'_>,
        _: usize,
        part: usize,
        header: &KHeader<S>,
        shared: &[S::U; 8],
    ) -> PackedBlock<S> {
        let (scale, extra) = header.sub_block(s, part);
        PackedBlock {
            words: k_nibbles(s, shared, part),
            scale,
            extra,
            second_minimum: extra,
        }
    }
}

pub(super) struct Q5K;

impl Format for Q5K {
    const DTYPE: DType = DType::Q5K;
    type Extra = WithMinimum;
    type Pairs = Narrow<5, 0>;
    type FewPairs = Narrow<5, 0>;
    const OFFSET: u8 = 0;
    /// The fifth bits of all sub-blocks beside it.
    type Header<S: Simd> = (KHeader<S>, [S::U; 8]);
    const SHARING: usize = 2;
    type Shared<S: Simd> = [S::U; 8];

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Self::Header<S> {
        let tile = &file_block::<Self>(tile, index);
        (KHeader::read(s, tile), columns32(s, tile, 16))
    }

    #[inline(always)]
    fn shared<S: Simd>(s: S, tile: &Tile<'_>, index: usize, group: usize) -> [S::U; 8] {
        columns32(s, &file_block::<Self>(tile, index), 48 + 32 * group)
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        _: &Tile<'_>,
        _: usize,
        part: usize,
        (header, high): &Self::Header<S>,
        shared: &[S::U; 8],
    ) -> PackedBlock<S> {
        let (scale, extra) = header.sub_block(s, part);
        let low = k_nibbles(s, shared, part);
        let words = each!(s.u_splat(0), |g| {
            let bit = s.u_and(s.u_shr(high[g], part as u32), s.u_splat(0x0101_0101));
            s.u_or(low[g], s.u_shl(bit, 4))
        });
        PackedBlock {
            words,
            scale,
            extra,
            second_minimum: extra,
        }
    }
}

pub(super) struct Q6K;

/// What the sub-blocks of a `Q6K` block share.
#[derive(Clone, Copy)]
pub(super) struct Q6KHeader<S: Simd> {
    d: S::F,
    /// Sixteen signed bytes.
    scales: [S::U; 4],
}

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
    type Extra = WithSecondScale;
    type Pairs = Narrow<6, 32>;
    type FewPairs = Narrow<6, 32>;
    const OFFSET: u8 = 32;
    type Header<S: Simd> = Q6KHeader<S>;
    const SHARING: usize = 4;
    /// Nibbles, and two bits each.
    type Shared<S: Simd> = [[S::U; 8]; 3];

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Q6KHeader<S> {
        let tile = &file_block::<Self>(tile, index);
        Q6KHeader {
            d: s.f16_column(tile, 208),
            scales: s.columns(tile, 192),
        }
    }

    #[inline(always)]
    fn shared<S: Simd>(s: S, tile: &Tile<'_>, index: usize, half: usize) -> Self::Shared<S> {
        let tile = &file_block::<Self>(tile, index);
        [
            columns32(s, tile, 64 * half),
            columns32(s, tile, 64 * half + 32),
            columns32(s, tile, 128 + 32 * half),
        ]
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        _: &Tile<'_>,
        _: usize,
        part: usize,
        header: &Q6KHeader<S>,
        shared: &Self::Shared<S>,
    ) -> PackedBlock<S> {
        let quarter = part % 4;
        let (low, high) = (&shared[quarter % 2], &shared[2]);
        let (low_shift, high_shift) = (4 * (quarter / 2) as u32, 2 * quarter as u32);
        let words = each!(s.u_splat(0), |g| {
            let low = s.u_and(s.u_shr(low[g], low_shift), s.u_splat(0x0F0F_0F0F));
            let high = s.u_and(s.u_shr(high[g], high_shift), s.u_splat(0x0303_0303));
            s.u_or(low, s.u_shl(high, 4))
        });
        PackedBlock {
            words,
            scale: header.scale(s, 2 * part),
            extra: header.scale(s, 2 * part + 1),
            second_minimum: header.d,
        }
    }
}
