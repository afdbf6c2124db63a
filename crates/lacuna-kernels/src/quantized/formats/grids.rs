//! Types whose weights are points of a table: points are looked up row by row, and what is beside them is read as
//! lanes.

use super::{Format, columns32, file_block};
use crate::dtype::DType;
use crate::quantized::grids::{Grid, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, OFFSET};
use crate::quantized::packing::Narrow;
use crate::quantized::panel::{PackedBlock, Plain, WithSecondScale};
use crate::simd::{LANES, Simd, each};
use crate::tile::Tile;

const _: () = assert!(OFFSET == 64, "what bytes with signs are larger by");

/// Blocks of columns of a file block.
const PARTS: usize = 8;

/// Words of which lanes are rows, for each block of columns.
type Words<S> = [<S as Simd>::U; PARTS];

/// Implements [`Format`] for a type: the bytes of a file block, what it has besides one scale, and how its signs and
/// scales are read.
macro_rules! grid_format {
    ($name:ident, $bytes:literal, $extra:ty, |$s:ident, $tile:ident| $signs_and_scales:expr) => {
        impl Format for $name {
            const DTYPE: DType = <$name as Grid>::DTYPE;
            type Extra = $extra;
            type Pairs = Narrow<7, 64>;
            type FewPairs = Narrow<7, 64>;
            const OFFSET: u8 = OFFSET;
            type Header<S: Simd> = GridHeader<S>;
            const SHARING: usize = PARTS;
            type Shared<S: Simd> = Magnitudes;

            #[inline(always)]
            fn header<S: Simd>($s: S, tile: &Tile<'_>, index: usize) -> GridHeader<S> {
                let $tile = &file_block::<Self>(tile, index);
                let [signs, scales] = $signs_and_scales;
                GridHeader {
                    d: $s.mul($s.f16_column($tile, 0), $s.splat(Self::UNIT)),
                    signs,
                    scales,
                }
            }

            #[inline(always)]
            fn shared<S: Simd>(s: S, tile: &Tile<'_>, index: usize, _: usize) -> Magnitudes {
                let tile = &file_block::<Self>(tile, index);
                let mut magnitudes = Magnitudes([[0; 256]; LANES]);
                #[cfg(target_arch = "x86_64")]
                let permuted = s.avx512().is_some_and(|avx512| {
                    crate::quantized::eight::magnitudes_of_rows::<Self, $bytes>(
                        avx512,
                        tile,
                        &mut magnitudes.0,
                    )
                });
                #[cfg(not(target_arch = "x86_64"))]
                let (permuted, _) = (false, s);
                if !permuted {
                    magnitudes.look_up::<Self>(tile);
                }
                magnitudes
            }

            #[inline(always)]
            fn block<S: Simd>(
                s: S,
                _: &Tile<'_>,
                _: usize,
                part: usize,
                header: &GridHeader<S>,
                magnitudes: &Magnitudes,
            ) -> PackedBlock<S> {
                header.block(s, part, magnitudes)
            }

            #[inline(always)]
            fn scales<S: Simd>(
                s: S,
                _: &Tile<'_>,
                _: usize,
                part: usize,
                header: &GridHeader<S>,
            ) -> [S::F; 3] {
                header.scales(s, part)
            }
        }
    };
}

grid_format!(Iq2Xxs, 66, Plain, |s, tile| {
    let words: [_; 4] = each!([s.u_splat(0); 4], |two| s.columns(tile, 2 + 16 * two));
    // Every other word holds indices.
    signs_beside_scales(
        s,
        each!(s.u_splat(0), |part| words[part / 2][1 + part % 2 * 2]),
    )
});

grid_format!(Iq2Xs, 74, WithSecondScale, |s, tile| {
    let words: [_; 4] = each!([s.u_splat(0); 4], |two| s.columns(tile, 2 + 16 * two));
    let [.., first, second] = s.columns(tile, 58);
    // The upper seven bits of halves of words.
    let seven = s.u_splat(0x7F);
    let upper = |word: S::U| {
        s.u_or(
            s.u_and(s.u_shr(word, 9), seven),
            s.u_shl(s.u_shr(word, 25), 8),
        )
    };
    [
        each!(seven, |part| {
            let (words, at) = (&words[part / 2], part % 2 * 2);
            even(
                s,
                s.u_or(upper(words[at]), s.u_shl(upper(words[at + 1]), 16)),
            )
        }),
        bytes_apart(s, [first, second]),
    ]
});

grid_format!(Iq2S, 82, WithSecondScale, |s, tile| {
    let [.., first, second] = s.columns(tile, 66);
    [columns32(s, tile, 34), bytes_apart(s, [first, second])]
});

grid_format!(Iq3Xxs, 98, Plain, |s, tile| signs_beside_scales(
    s,
    columns32(s, tile, 66)
));

grid_format!(Iq3S, 110, Plain, |s, tile| {
    let [.., scales] = s.columns(tile, 94);
    let scales = each!(scales, |part| s.u_shr(scales, 4 * part as u32));
    [columns32(s, tile, 74), scales]
});

/// Signs and scales of words that hold four times seven signs and then four bits of scale.
#[inline(always)]
fn signs_beside_scales<S: Simd>(s: S, words: Words<S>) -> [Words<S>; 2] {
    [
        each!(words[0], |part| {
            let bits =
                |mask: u32, shift: u32| s.u_shl(s.u_and(words[part], s.u_splat(mask)), shift);
            let low = s.u_or(bits(0x7F, 0), bits(0x3F80, 1));
            even(
                s,
                s.u_or(low, s.u_or(bits(0x1F_C000, 2), bits(0xFE0_0000, 3))),
            )
        }),
        each!(words[0], |part| s.u_shr(words[part], 28)),
    ]
}

/// Eight signs for each seven bits in a byte: the number of negative ones is even.
#[inline(always)]
fn even<S: Simd>(s: S, sevens: S::U) -> S::U {
    // The lowest bit of each byte becomes the sum of all its bits; what comes from the next byte stays above it.
    let sum = s.u_xor(sevens, s.u_shr(sevens, 4));
    let sum = s.u_xor(sum, s.u_shr(sum, 2));
    let sum = s.u_xor(sum, s.u_shr(sum, 1));
    s.u_or(sevens, s.u_shl(s.u_and(sum, s.u_splat(0x0101_0101)), 7))
}

/// A byte for each block of columns, of two words, in the lowest of a word each.
#[inline(always)]
fn bytes_apart<S: Simd>(s: S, words: [S::U; 2]) -> Words<S> {
    each!(words[0], |part| s
        .u_shr(words[part / 4], 8 * (part % 4) as u32))
}

/// Magnitudes of sixteen rows: of each columns 0 to 15 of each quarter, one after the other, then columns 16 to 31 of
/// each, and so on, which is the order in which AVX-512 has them.
///
/// Aligned, because Zen 4 makes a load wait until a store of 64 bytes that crosses a line has reached the cache: products took 3.6
/// times as long.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(in crate::quantized) struct Magnitudes([[u8; 256]; LANES]);

impl Magnitudes {
    /// Row by row. It is one function for all levels, because points are looked up in the same way by each, and does all
    /// columns before the first are brought to lanes: loads of several points at once would wait for stores of single ones.
    #[inline(never)]
    fn look_up<G: Grid>(&mut self, tile: &Tile<'_>) {
        for (row, out) in self.0.iter_mut().enumerate() {
            // Of a length that is known, so that nobody looks whether bytes are in it.
            let block = &tile.row(row)[..G::DTYPE.block_bytes()];
            let out = out.as_chunks_mut::<8>().0;
            for part in 0..PARTS {
                for (i, eight) in G::magnitudes(block, part).into_iter().enumerate() {
                    let (quarter, within) = (part / 2, 4 * (part % 2) + i);
                    out[within / 2 * 8 + 2 * quarter + within % 2] = eight.to_le_bytes();
                }
            }
        }
    }

    /// The `part`-th 32 columns.
    #[inline(always)]
    fn columns<S: Simd>(&self, s: S, part: usize) -> [S::U; 8] {
        let tile = Tile::strided(self.0.as_flattened(), 256, 256);
        let first = 2 * (part % 2) * 64 + part / 2 * 16;
        let (low, high) = (s.columns(&tile, first), s.columns(&tile, first + 64));
        each!(low[0], |g| if g < 4 { low[g] } else { high[g - 4] })
    }
}

/// What a file block of sixteen rows has besides magnitudes.
#[derive(Clone, Copy)]
pub(in crate::quantized) struct GridHeader<S: Simd> {
    d: S::F,
    /// Of four columns in four bits, from the lowest on.
    signs: Words<S>,
    /// The bits of scales in the lowest four, those of a second half above them, if it has its own.
    scales: Words<S>,
}

impl<S: Simd> GridHeader<S> {
    /// The `part`-th 32 columns.
    #[inline(always)]
    fn block(&self, s: S, part: usize, magnitudes: &Magnitudes) -> PackedBlock<S> {
        let (magnitudes, signs) = (magnitudes.columns(s, part), self.signs[part]);
        let [scale, extra, second_minimum] = self.scales(s, part);
        PackedBlock {
            words: s.with_signs(magnitudes, signs),
            scale,
            extra,
            second_minimum,
        }
    }

    /// See [`Format::scales`].
    #[inline(always)]
    fn scales(&self, s: S, part: usize) -> [S::F; 3] {
        let scales = self.scales[part];
        [
            odd(s, self.d, scales),
            odd(s, self.d, s.u_shr(scales, 4)),
            self.d,
        ]
    }
}

/// `d` times an odd number: twice the lowest four bits of each lane, and one.
#[inline(always)]
fn odd<S: Simd>(s: S, d: S::F, bits: S::U) -> S::F {
    let twice = s.u_shl(s.u_and(bits, s.u_splat(15)), 1);
    s.mul(d, s.i_to_f32(s.u_or(twice, s.u_splat(1))))
}
