//! How sixteen rows of each quantized storage type become 32-column blocks of bytes and scales.
//!
//! Rows are lanes: word `g` of a block holds, for each of 16 rows, weights `4 * g .. 4 * g + 4`.
//! A weight is `scale * (byte - OFFSET)`, plus a minimum per block where the type has one.
//!
//! For one token, sixteen blocks of one row are read instead, see [`super::rows`]: lanes are blocks,
//! bytes stay unsigned, and what that adds is corrected with the sums of the activations. (AVX2 reads
//! eight rows side by side: `super::eight`.)

use super::packing::{Bytes, Narrow, Packing, Wide};
use super::panel::{Extra, PackedBlock};
use super::rows::{Group, Order};
use crate::dtype::DType;
use crate::simd::{LANES, Simd, each};
use crate::tile::Tile;

/// A quantized storage type.
pub(super) trait Format {
    /// Which type it is.
    const DTYPE: DType;
    /// What a block has besides one scale.
    const EXTRA: Extra;
    /// How panels are packed where bytes are multiplied through 16 bits.
    type Pairs: Packing;
    /// The same for a few tokens.
    type FewPairs: Packing;
    /// What the bytes of a block are larger by than its weights.
    const OFFSET: u8;
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

    /// How activations lie beside the bytes of a row.
    const ORDER: Order;

    /// What has to be added to a byte as [`Format::group`] multiplies it.
    fn offset<S: Simd>() -> i32;

    /// The terms of sixteen blocks of a row, which are all of `bytes`: dot products times scales,
    /// then minima or the second halves' terms.
    fn group<S: Simd>(s: S, bytes: &[u8], x: &Group) -> [S::F; 2];
}

/// Bytes at a place that is known to exist.
#[inline(always)]
fn array<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..].first_chunk().expect("a group is whole blocks")
}

#[inline(always)]
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*array(bytes, at))
}

#[inline(always)]
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*array(bytes, at))
}

/// The binary16 at `at` of each of sixteen blocks.
#[inline(always)]
fn f16_of_blocks<S: Simd>(s: S, bytes: &[u8], block: usize, at: usize) -> S::F {
    s.f16_each(each!(0, |b| u16_at(bytes, b * block + at)))
}

/// Corrected dot products times their scales.
#[inline(always)]
fn scaled<S: Simd>(s: S, dots: S::U, x: &Group, part: usize, scale: S::F) -> S::F {
    let dots = s.u_add(dots, s.u_load(&x.correction[part]));
    s.mul(s.i_to_f32(dots), scale)
}

/// Sums of eight vectors in [`Order::Halves`], to the lane of their block.
#[inline(always)]
fn sum_octets<S: Simd>(s: S, x: [S::U; 8]) -> S::U {
    let low = s.sum_quads(each!(x[0], |i| x[i]));
    let high = s.sum_quads(each!(x[0], |i| x[4 + i]));
    let [a, b] = s.split_quarters(low, high);
    s.u_add(a, b)
}

/// Dot products of sixteen blocks of 32 nibbles at `at`, with a fifth bit where there are some.
#[inline(always)]
fn nibble_dots<S: Simd>(
    s: S,
    bytes: &[u8],
    x: &Group,
    block: usize,
    fifth_bits: Option<usize>,
    at: usize,
) -> S::U {
    let mask = s.u_splat(0x0F0F_0F0F);
    s.sum_quads(each!(mask, |v| {
        let blocks: [usize; 4] = each!(0, |quarter| (v + 4 * quarter) * block);
        let both = s.u_quarters(each!(array(bytes, 0), |q| array(bytes, blocks[q] + at)));
        let mut halves = [s.u_and(both, mask), s.u_and(s.u_shr(both, 4), mask)];
        if let Some(at) = fifth_bits {
            let mut bits = [0; 2];
            for q in 0..4 {
                let word = u64::from(u32_at(bytes, blocks[q] + at));
                bits[0] |= (word & 0xFFFF) << (16 * q);
                bits[1] |= (word >> 16) << (16 * q);
            }
            halves = each!(mask, |half| s.add_where(halves[half], bits[half], 16));
        }
        let first = s.dot_unsigned(s.u_splat(0), halves[0], s.u_load(&x.q[2 * v]));
        s.dot_unsigned(first, halves[1], s.u_load(&x.q[2 * v + 1]))
    }))
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

/// Implements [`Format`] for a type with 32 columns per block.
macro_rules! simple_format {
    ($name:ident, $extra:ident, $pairs:ty, $few:ty, $less:literal, |$s:ident, $tile:ident, $at:ident| $body:expr, $order:ident,
     $offset:expr, |$t:ident, $bytes:ident, $x:ident| $group:expr) => {
        pub(super) struct $name;

        impl Format for $name {
            const DTYPE: DType = DType::$name;
            const EXTRA: Extra = Extra::$extra;
            type Pairs = $pairs;
            type FewPairs = $few;
            const OFFSET: u8 = $less;
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

            const ORDER: Order = Order::$order;

            #[inline(always)]
            fn offset<S: Simd>() -> i32 {
                $offset
            }

            #[inline(always)]
            fn group<S: Simd>($t: S, $bytes: &[u8], $x: &Group) -> [S::F; 2] {
                assert_eq!($bytes.len(), LANES * DType::$name.block_bytes());
                $group
            }
        }
    };
}

simple_format!(
    Q8_0,
    Nothing,
    Wide,
    Bytes,
    0,
    |s, tile, at| {
        let scale = s.f16_column(tile, at);
        PackedBlock {
            words: columns32(s, tile, at + 2),
            scale,
            extra: scale,
        }
    },
    Halves,
    -S::SIGNED_BIAS,
    |s, bytes, x| {
        let dots = sum_octets(
            s,
            each!(s.u_splat(0), |v| {
                let block = v % 4 + 8 * (v / 4);
                let low = array(bytes, 34 * block + 2);
                let weights = s.u_halves([low, array(bytes, 34 * (block + 4) + 2)]);
                s.dot_signed(s.u_splat(0), weights, s.u_load(&x.q[v]))
            }),
        );
        let scale = f16_of_blocks(s, bytes, 34, 0);
        [scaled(s, dots, x, 0, scale), scale]
    }
);

simple_format!(
    Q4_0,
    Nothing,
    Narrow<4, 8>,
    Narrow<4, 8>,
    8,
    |s, tile, at| {
        let scale = s.f16_column(tile, at);
        let words = nibbles(s, s.columns(tile, at + 2));
        PackedBlock {
            words,
            scale,
            extra: scale,
        }
    },
    Quarters,
    -8,
    |s, bytes, x| {
        let dots = nibble_dots(s, bytes, x, 18, None, 2);
        let scale = f16_of_blocks(s, bytes, 18, 0);
        [scaled(s, dots, x, 0, scale), scale]
    }
);

simple_format!(
    Q4_1,
    Minimum,
    Narrow<4, 0>,
    Narrow<4, 0>,
    0,
    |s, tile, at| {
        let (scale, extra) = scale_and_min(s, s.gather(tile, at));
        let words = nibbles(s, s.columns(tile, at + 4));
        PackedBlock {
            words,
            scale,
            extra,
        }
    },
    Quarters,
    0,
    |s, bytes, x| {
        let dots = nibble_dots(s, bytes, x, 20, None, 4);
        let scale = f16_of_blocks(s, bytes, 20, 0);
        [scaled(s, dots, x, 0, scale), f16_of_blocks(s, bytes, 20, 2)]
    }
);

simple_format!(
    Q5_0,
    Nothing,
    Narrow<5, 16>,
    Narrow<5, 16>,
    16,
    |s, tile, at| {
        let scale = s.f16_column(tile, at);
        let words = or_fifth_bits(
            s,
            nibbles(s, s.columns(tile, at + 6)),
            s.gather(tile, at + 2),
        );
        PackedBlock {
            words,
            scale,
            extra: scale,
        }
    },
    Quarters,
    -16,
    |s, bytes, x| {
        let dots = nibble_dots(s, bytes, x, 22, Some(2), 6);
        let scale = f16_of_blocks(s, bytes, 22, 0);
        [scaled(s, dots, x, 0, scale), scale]
    }
);

simple_format!(
    Q5_1,
    Minimum,
    Narrow<5, 0>,
    Narrow<5, 0>,
    0,
    |s, tile, at| {
        let (scale, extra) = scale_and_min(s, s.gather(tile, at));
        let words = or_fifth_bits(
            s,
            nibbles(s, s.columns(tile, at + 8)),
            s.gather(tile, at + 4),
        );
        PackedBlock {
            words,
            scale,
            extra,
        }
    },
    Quarters,
    0,
    |s, bytes, x| {
        let dots = nibble_dots(s, bytes, x, 24, Some(4), 8);
        let scale = f16_of_blocks(s, bytes, 24, 0);
        [scaled(s, dots, x, 0, scale), f16_of_blocks(s, bytes, 24, 2)]
    }
);

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
        let [both, first, second, third] = s.columns(tile, at);
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
fn k_nibbles<S: Simd>(s: S, tile: &Tile<'_>, at: usize, part: usize) -> [S::U; 8] {
    let shared = columns32(s, tile, at + 32 * (part / 2));
    let shift = 4 * (part % 2) as u32;
    each!(s.u_splat(0), |g| s
        .u_and(s.u_shr(shared[g], shift), s.u_splat(0x0F0F_0F0F)))
}

/// The 6-bit scales and minima of a `Q4K` or `Q5K` block, a byte each.
#[inline(always)]
fn k_scales(block: &[u8]) -> [u64; 2] {
    let (first, second, third) = (u32_at(block, 4), u32_at(block, 8), u32_at(block, 12));
    let (low, six, upper) = (0x0F0F_0F0F, 0x3F3F_3F3F, 0x3030_3030);
    let scales = (third & low) | ((first >> 2) & upper);
    let minima = ((third >> 4) & low) | ((second >> 2) & upper);
    [
        u64::from(first & six) | u64::from(scales) << 32,
        u64::from(second & six) | u64::from(minima) << 32,
    ]
}

/// The terms of two `Q4K` or `Q5K` blocks of a row; `weights(k, v)` are those of sub-blocks `v` and
/// `v + 4` of block `k`.
#[inline(always)]
fn k_group<S: Simd>(s: S, blocks: [&[u8]; 2], x: &Group, weights: [S::U; 8]) -> [S::F; 2] {
    let dots = sum_octets(
        s,
        each!(s.u_splat(0), |v| s.dot_unsigned(
            s.u_splat(0),
            weights[v],
            s.u_load(&x.q[v])
        )),
    );
    let (first, second) = (k_scales(blocks[0]), k_scales(blocks[1]));
    let [d, dmin] = s.f16_pairs([u32_at(blocks[0], 0), u32_at(blocks[1], 0)]);
    let scale = s.mul(d, s.i_to_f32(s.widen_bytes([first[0], second[0]])));
    let min = s.i_to_f32(s.widen_bytes([first[1], second[1]]));
    let minus_dmin = s.mul(dmin, s.splat(-1.0));
    [s.mul(s.i_to_f32(dots), scale), s.mul(minus_dmin, min)]
}

/// The nibbles of sub-blocks `v % 4` and `v % 4 + 4` of block `v / 4`, which are at `at`.
#[inline(always)]
fn k_row_nibbles<S: Simd>(s: S, blocks: [&[u8]; 2], at: usize) -> [S::U; 8] {
    let mask = s.u_splat(0x0F0F_0F0F);
    each!(mask, |v| {
        let (block, at) = (blocks[v / 4], at + 32 * (v % 4 / 2));
        let both = s.u_halves([array(block, at), array(block, at + 64)]);
        s.u_and(s.u_shr(both, 4 * (v % 2) as u32), mask)
    })
}

pub(super) struct Q4K;

impl Format for Q4K {
    const DTYPE: DType = DType::Q4K;
    const EXTRA: Extra = Extra::Minimum;
    type Pairs = Narrow<4, 0>;
    type FewPairs = Narrow<4, 0>;
    const OFFSET: u8 = 0;
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
            words,
            scale,
            extra,
        }
    }

    const ORDER: Order = Order::Halves;

    #[inline(always)]
    fn offset<S: Simd>() -> i32 {
        0
    }

    #[inline(always)]
    fn group<S: Simd>(s: S, bytes: &[u8], x: &Group) -> [S::F; 2] {
        assert_eq!(bytes.len(), 2 * DType::Q4K.block_bytes());
        let (first, second) = bytes.split_at(DType::Q4K.block_bytes());
        let blocks = [first, second];
        k_group(s, blocks, x, k_row_nibbles(s, blocks, 16))
    }
}

pub(super) struct Q5K;

impl Format for Q5K {
    const DTYPE: DType = DType::Q5K;
    const EXTRA: Extra = Extra::Minimum;
    type Pairs = Narrow<5, 0>;
    type FewPairs = Narrow<5, 0>;
    const OFFSET: u8 = 0;
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
        let words = each!(s.u_splat(0), |g| {
            let bit = s.u_and(s.u_shr(high[g], part as u32), s.u_splat(0x0101_0101));
            s.u_or(low[g], s.u_shl(bit, 4))
        });
        PackedBlock {
            words,
            scale,
            extra,
        }
    }

    const ORDER: Order = Order::Halves;

    #[inline(always)]
    fn offset<S: Simd>() -> i32 {
        0
    }

    #[inline(always)]
    fn group<S: Simd>(s: S, bytes: &[u8], x: &Group) -> [S::F; 2] {
        assert_eq!(bytes.len(), 2 * DType::Q5K.block_bytes());
        let (first, second) = bytes.split_at(DType::Q5K.block_bytes());
        let blocks = [first, second];
        let low = k_row_nibbles(s, blocks, 48);
        let fifth = s.u_splat(0x1010_1010);
        let weights = each!(fifth, |v| {
            // Bit `v` of a byte for the first half, bit `v + 4` for the second.
            let high = array(blocks[v / 4], 16);
            let high = s.u_halves([high, high]);
            let low_half = s.u_shl(high, 4 - (v % 4) as u32);
            let high_half = s.u_shr(high, (v % 4) as u32);
            let bits = s.first_half(low_half, high_half);
            s.u_or(low[v], s.u_and(bits, fifth))
        });
        k_group(s, blocks, x, weights)
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
    type Pairs = Narrow<6, 32>;
    type FewPairs = Narrow<6, 32>;
    const OFFSET: u8 = 32;
    type Header<S: Simd> = Q6KHeader<S>;

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Q6KHeader<S> {
        let at = index * DType::Q6K.block_bytes();
        Q6KHeader {
            d: s.f16_column(tile, at + 208),
            scales: s.columns(tile, at + 192),
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
        let words = each!(s.u_splat(0), |g| {
            let low = s.u_and(s.u_shr(low[g], low_shift), s.u_splat(0x0F0F_0F0F));
            let high = s.u_and(s.u_shr(high[g], high_shift), s.u_splat(0x0303_0303));
            s.u_or(low, s.u_shl(high, 4))
        });
        PackedBlock {
            words,
            scale: header.scale(s, 2 * part),
            extra: header.scale(s, 2 * part + 1),
        }
    }

    const ORDER: Order = Order::Halves;

    #[inline(always)]
    fn offset<S: Simd>() -> i32 {
        -32
    }

    #[inline(always)]
    fn group<S: Simd>(s: S, bytes: &[u8], x: &Group) -> [S::F; 2] {
        assert_eq!(bytes.len(), 2 * DType::Q6K.block_bytes());
        let (first, second) = bytes.split_at(DType::Q6K.block_bytes());
        let blocks = [first, second];
        let dots: [_; 8] = each!(s.u_splat(0), |v| {
            let (block, v4) = (blocks[v / 4], v % 4);
            let at = 32 * (v4 % 2);
            let low = s.u_halves([array(block, at), array(block, at + 64)]);
            let high = s.u_halves([array(block, 128), array(block, 160)]);
            let low = s.u_and(s.u_shr(low, 4 * (v4 / 2) as u32), s.u_splat(0x0F0F_0F0F));
            let high = s.u_and(s.u_shr(high, 2 * v4 as u32), s.u_splat(0x0303_0303));
            let weights = s.u_or(low, s.u_shl(high, 4));
            s.dot_unsigned(s.u_splat(0), weights, s.u_load(&x.q[v]))
        });
        let low = s.sum_quads(each!(dots[0], |i| dots[i]));
        let high = s.sum_quads(each!(dots[0], |i| dots[4 + i]));
        let dots = s.split_quarters(low, high);
        let d: [u32; 2] = each!(0, |i| u32::from(u16_at(blocks[i], 208)));
        let [d, _] = s.f16_pairs(d);
        let scales = s.widen_words([array(blocks[0], 192), array(blocks[1], 192)]);
        each!(d, |half| {
            let top = s.u_shl(scales, 24 - 8 * half as u32);
            let scale = s.mul(d, s.i_to_f32(s.i_shr(top, 24)));
            scaled(s, dots[half], x, half, scale)
        })
    }
}
