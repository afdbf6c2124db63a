//! Types whose weights are points of a table: rows are read one by one.

use super::{Format, file_block, row_by_row, shares_nothing};
use crate::dtype::DType;
use crate::quantized::grids::{Grid, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, OFFSET, weights};
use crate::quantized::packing::Narrow;
use crate::quantized::panel::{PackedBlock, Plain, WithSecondScale};
use crate::simd::{LANES, Simd, each};
use crate::tile::Tile;

/// Implements [`Format`] for a type.
macro_rules! grid_format {
    ($($name:ident: $extra:ty,)+) => {$(
        impl Format for $name {
            const DTYPE: DType = <$name as Grid>::DTYPE;
            type Extra = $extra;
            type Pairs = Narrow<7, 64>;
            type FewPairs = Narrow<7, 64>;
            const OFFSET: u8 = OFFSET;
            type Header<S: Simd> = S::F;
            shares_nothing!();

            #[inline(always)]
            fn header<S: Simd>(s: S, tile: &Tile<'_>, index: usize) -> S::F {
                let d = s.f16_column(&file_block::<Self>(tile, index), 0);
                s.mul(d, s.splat(Self::UNIT))
            }

            #[inline(always)]
            fn block<S: Simd>(
                s: S,
                tile: &Tile<'_>,
                index: usize,
                part: usize,
                d: &S::F,
                (): &(),
            ) -> PackedBlock<S> {
                block::<S, Self>(s, &file_block::<Self>(tile, index), part, *d)
            }
        }
    )+};
}

grid_format! {
    Iq3S: Plain,
    Iq3Xxs: Plain,
    Iq2S: WithSecondScale,
    Iq2Xs: WithSecondScale,
    Iq2Xxs: Plain,
}

#[inline(always)]
fn block<S: Simd, G: Grid>(s: S, tile: &Tile<'_>, part: usize, d: S::F) -> PackedBlock<S> {
    let words = row_by_row(tile, part, weights::<G>);
    let scales = scales(tile, part, G::scales);
    let scale = |half: usize| s.mul(d, s.i_to_f32(s.u_load(&scales[half])));
    PackedBlock {
        words: each!(s.u_splat(0), |g| s.u_load(&words[g])),
        scale: scale(0),
        extra: scale(1),
        second_minimum: d,
    }
}

/// The scales of both halves of a block of columns of each row, as lanes; see [`row_by_row`].
#[inline(never)]
fn scales(tile: &Tile<'_>, part: usize, read: fn(&[u8], usize) -> [u8; 2]) -> [[u32; LANES]; 2] {
    let mut lanes = [[0; LANES]; 2];
    for row in 0..LANES {
        let [first, second] = read(tile.row(row), part);
        lanes[0][row] = first.into();
        lanes[1][row] = second.into();
    }
    lanes
}
