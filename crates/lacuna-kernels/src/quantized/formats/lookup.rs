//! Types whose nibbles name one of sixteen levels.

use super::{Format, file_block, nibbles, shares_nothing};
use crate::dtype::DType;
use crate::quantized::codebooks::{FLOATS, FLOATS_OFFSET, LEVELS, as_bytes};
use crate::quantized::packing::{Bytes, Narrow, Wide};
use crate::quantized::panel::{PackedBlock, Plain};
use crate::simd::{Simd, each};
use crate::tile::Tile;

/// The levels that the nibbles of sixteen bytes per row name.
#[inline(always)]
fn levels<S: Simd>(s: S, table: &[u8; 16], bytes: [S::U; 4]) -> [S::U; 8] {
    let indices = nibbles(s, bytes);
    each!(s.u_splat(0), |g| s.lookup(table, indices[g]))
}

simple_format!(Iq4Nl, Plain, Wide, Bytes, 0, |s, tile| {
    let scale = s.f16_column(tile, 0);
    PackedBlock {
        words: levels(s, &const { as_bytes(LEVELS, 0) }, s.columns(tile, 2)),
        scale,
        extra: scale,
        second_minimum: scale,
    }
});

simple_format!(
    Mxfp4,
    Plain,
    Narrow<5, 12>,
    Narrow<5, 12>,
    FLOATS_OFFSET,
    |s, tile| {
        let table = const { as_bytes(FLOATS, FLOATS_OFFSET) };
        let scale = power(s, s.u_and(s.gather(tile, 0), s.u_splat(0xFF)));
        PackedBlock {
            words: levels(s, &table, s.columns(tile, 1)),
            scale,
            extra: scale,
            second_minimum: scale,
        }
    }
);

/// [`power`](crate::quantized::codebooks::power) of each lane.
#[inline(always)]
fn power<S: Simd>(s: S, exponent: S::U) -> S::F {
    let factor = |e| s.bits_to_f32(s.u_shl(s.u_add(e, s.u_splat(63)), 23));
    let rest = s.u_shr(s.u_add(exponent, s.u_splat(1)), 1);
    s.mul(factor(s.u_shr(exponent, 1)), factor(rest))
}

pub(in crate::quantized) struct Iq4Xs;

/// What the sub-blocks of an `Iq4Xs` block share.
#[derive(Clone, Copy)]
pub(in crate::quantized) struct Iq4XsHeader<S: Simd> {
    d: S::F,
    /// The lower four bits of eight scales.
    low: S::U,
    /// The upper two.
    high: S::U,
}

impl Format for Iq4Xs {
    const DTYPE: DType = DType::Iq4Xs;
    type Extra = Plain;
    type Pairs = Wide;
    type FewPairs = Bytes;
    const OFFSET: u8 = 0;
    type Header<S: Simd> = Iq4XsHeader<S>;
    shares_nothing!();

    #[inline(always)]
    fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> Iq4XsHeader<S> {
        let tile = &file_block::<Self>(tile, index);
        let both = s.gather(tile, 0);
        Iq4XsHeader {
            d: s.f16_low(both),
            low: s.gather(tile, 4),
            high: s.u_shr(both, 16),
        }
    }

    #[inline(always)]
    fn block<S: Simd>(
        s: S,
        tile: &Tile<'_>,
        index: usize,
        part: usize,
        header: &Iq4XsHeader<S>,
        (): &(),
    ) -> PackedBlock<S> {
        let tile = &file_block::<Self>(tile, index);
        let low = s.u_and(s.u_shr(header.low, 4 * part as u32), s.u_splat(15));
        let high = s.u_and(s.u_shr(header.high, 2 * part as u32), s.u_splat(3));
        let six = s.u_or(low, s.u_shl(high, 4));
        let signed = s.u_add(six, s.u_splat((-32_i32).cast_unsigned()));
        let scale = s.mul(header.d, s.i_to_f32(signed));
        let table = const { as_bytes(LEVELS, 0) };
        PackedBlock {
            words: levels(s, &table, s.columns(tile, 8 + 16 * part)),
            scale,
            extra: scale,
            second_minimum: scale,
        }
    }
}
