//! Panels that tiles of bytes multiply, with AMX: sixteen rows of weights and sixteen tokens at a time.
//!
//! What a tile register sums has to leave it every 32 columns to be scaled in f32. While AMX is at work, a core multiplies
//! half as many floats as else; so a sum starts from [`Simd::START`], and scaling it takes two operations on floats.
//! Reading tiles, multiplying them, writing sums and scaling them overlap if they are of different columns: a sum is
//! written a few blocks after it was begun, and scaled as many later, from the first row of many to the last.

use std::marker::PhantomData;
use std::ops::Range;

use super::formats::Format;
use super::packing::{Lines, Packing, Signed};
use super::panel::{Extra, HasExtra, Scales, add_minima};
use super::panels::{Ahead, BUFFER_BLOCKS, Panels};
use super::{load, store};
use crate::activations::{ActivationBlock, BLOCK, TILE};
use crate::grid::Block;
use crate::simd::amx::{BYTE_SUMS, ByteTiles};
use crate::simd::{Chunk, Kernel, LANES, Line, Simd, each};
use crate::tile::{Rows, Tile};

/// Most tiles of rows that are packed before tokens are multiplied with them: each time, tokens are read again.
const TILES: usize = 12;

/// Sums of a token for each row.
type Products = [Line; TILE];

/// Sums that have left their registers, and those that were there before.
type Groups = [[Products; BYTE_SUMS]; 2];

const _: () = assert!(TILE == LANES);

impl<D: Format> Panels<'_, '_, D> {
    /// Multiplies all tokens.
    pub(super) fn tiles<S: Simd>(&mut self, s: S) {
        // Constants, so that each type of weights compiles one of them.
        if const { matches!(<D::Extra as HasExtra>::EXTRA, Extra::SecondScale) } {
            self.tiles_of::<S, 2>(s);
        } else {
            self.tiles_of::<S, 1>(s);
        }
    }

    /// A block has so many sums: of all its columns, or of each half.
    fn tiles_of<S: Simd, const PARTS: usize>(&mut self, s: S) {
        let amx = s
            .amx()
            .expect("tokens are cut for tiles where there is AMX");
        let registers = ByteTiles::<PARTS>::new(amx);
        let mut products = [[[Line::ZERO; TILE]; BYTE_SUMS]; 2];
        let (rows, tokens) = (self.out.cols(), self.x.tokens());
        let blocks = self.weights.cols() / BLOCK;
        // Of a tile, a whole number of groups of sums.
        let panel = blocks.clamp(1, Signed::PANEL_BLOCKS);
        let stride = panel.next_multiple_of(BYTE_SUMS);
        let most = TILES.min(BUFFER_BLOCKS / stride);
        let (mut first, mut end) = (0, 0);
        while first < rows.len() {
            let mut tiles = [const { Rows::NONE }; TILES];
            let tiles = Rows::cut(self.weights, &rows, &mut end, &mut tiles[..most]);
            for start in (0..blocks).step_by(panel) {
                let columns = start..blocks.min(start + panel);
                for (index, tile) in tiles.iter().enumerate() {
                    let tile = Tile::new(self.weights, rows.start + tile.start);
                    self.pack::<S, Signed>(s, index * stride, &tile, &columns);
                }
                let packed = rows.start + first..rows.start + end;
                let mut ahead = self.ahead(&packed, columns.end, panel);
                let groups = tiles.len() * (columns.len() * PARTS).div_ceil(BYTE_SUMS);
                // With the last tokens, so that no others have taken its place in the second-level cache.
                let (all, last) = (tokens.div_ceil(TILE), tokens.div_ceil(4 * TILE));
                for (index, token) in (0..tokens).step_by(TILE).enumerate() {
                    if index == all - last {
                        ahead.spread(last * groups);
                    }
                    s.vectorize(Rectangle::<D::Extra, PARTS> {
                        registers: &registers,
                        products: &mut products,
                        stride,
                        words: Lines::blocks(&self.buffer.words),
                        scales: &self.buffer.scales,
                        x: &self.x.tile(token)[columns.clone()],
                        tokens: token..tokens.min(token + TILE),
                        tiles,
                        continues: start > 0,
                        ahead: &mut ahead,
                        out: self.out,
                        extra: PhantomData,
                    });
                }
            }
            first = end;
        }
    }
}

/// Adds the products of some packed tiles of rows and a tile of tokens.
struct Rectangle<'a, 'b, E, const PARTS: usize> {
    registers: &'a ByteTiles<PARTS>,
    products: &'a mut Groups,
    /// Of each tile of rows the blocks of columns, `stride` apart.
    stride: usize,
    words: &'a [[Line; 8]],
    scales: &'a [Scales],
    x: &'a [ActivationBlock<TILE>],
    /// Those of the tile that exist.
    tokens: Range<usize>,
    tiles: &'a [Rows],
    /// Whether the output holds the sums of the columns before.
    continues: bool,
    ahead: &'a mut Ahead,
    out: &'a mut Block<'b, f32>,
    extra: PhantomData<E>,
}

/// Blocks that are multiplied together, each in a register or two.
#[derive(Clone, Copy)]
struct Group<'a> {
    x: [&'a ActivationBlock<TILE>; BYTE_SUMS],
    words: [&'a [Line; 8]; BYTE_SUMS],
}

impl<E: HasExtra, const PARTS: usize> Kernel for Rectangle<'_, '_, E, PARTS> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self {
            registers,
            products: [to, from],
            stride,
            words,
            scales,
            x,
            tokens,
            tiles,
            continues,
            ahead,
            out,
            ..
        } = self;
        let (mut to, mut from) = (to, from);
        let together = BYTE_SUMS / PARTS;
        // A tile has whole groups: what is beyond its columns is multiplied and not scaled.
        let blocks = x.len().next_multiple_of(together);
        let (mut tile_begun, mut begun) = (0, 0);
        let mut next = || {
            if tile_begun == tiles.len() {
                return None;
            }
            let first = tile_begun * stride + begun;
            let group = Group {
                x: each!(&x[0], |i| &x[(begun + i / PARTS).min(x.len() - 1)]),
                words: each!(&words[0], |i| &words[first + i / PARTS]),
            };
            begun += together;
            if begun == blocks {
                (tile_begun, begun) = (tile_begun + 1, 0);
            }
            Some(group)
        };
        /// Writes a sum, and begins another one in its register.
        macro_rules! multiply {
            ($sum:literal, $group:expr) => {
                registers.store::<$sum>(&mut to[$sum]);
                if let Some(group) = $group {
                    let (x, words) = (&group.x[$sum].q, group.words[$sum]);
                    registers.multiply::<$sum>(x, words, $sum % PARTS);
                }
            };
        }
        for _ in 0..2 {
            let group = next();
            multiply!(0, group);
            multiply!(1, group);
            multiply!(2, group);
            multiply!(3, group);
            std::mem::swap(&mut to, &mut from);
        }
        for (index, tile) in tiles.iter().enumerate() {
            let scales = &scales[index * stride..][..x.len()];
            for token in tokens.clone() {
                s.prefetch_line(out.address(token, tile.start));
            }
            // Beside registers, because there may be fewer tokens.
            let mut lines = [Chunk::ZERO; TILE];
            if continues {
                for (token, line) in tokens.clone().zip(&mut lines) {
                    let before = load(s, &out.row(token)[tile.start..], &tile.lanes);
                    s.store(before, &mut line.0);
                }
            }
            let mut sums: [S::F; TILE] = each!(s.splat(0.0), |t| s.load(&lines[t].0));
            for first in (0..blocks).step_by(together) {
                let group = next();
                ahead.fetch(s);
                macro_rules! step {
                    ($sum:literal) => {
                        multiply!($sum, group);
                        let block = first + $sum / PARTS;
                        if $sum % PARTS == PARTS - 1 && block < x.len() {
                            let products = [&from[$sum + 1 - PARTS], &from[$sum]];
                            let (x, scales) = (&x[block], &scales[block]);
                            sums = scale::<S, E, PARTS>(s, products, x, scales, sums);
                        }
                    };
                }
                step!(0);
                step!(1);
                step!(2);
                step!(3);
                std::mem::swap(&mut to, &mut from);
            }
            for t in 0..TILE {
                s.store(sums[t], &mut lines[t].0);
            }
            for (token, line) in tokens.clone().zip(&lines) {
                let out = &mut out.row(token)[tile.start..];
                store(s, s.load(&line.0), out, &tile.lanes);
            }
        }
    }
}

/// Scales the sums of a block, of all its columns or of each half, and adds them to those of the columns before.
#[inline(always)]
fn scale<S: Simd, E: HasExtra, const PARTS: usize>(
    s: S,
    [first, last]: [&Products; 2],
    x: &ActivationBlock<TILE>,
    scales: &Scales,
    mut sums: [S::F; TILE],
) -> [S::F; TILE] {
    let (scale, extra) = (s.load(&scales.scale), s.load(&scales.extra));
    let minima = [extra, s.load(&scales.second_minimum)];
    let start = s.u_splat(S::START.cast_unsigned());
    for t in 0..TILE {
        let unit = s.splat(x.scale[t]);
        let product = s.u_add(s.u_load(&first[t].0), start);
        sums[t] = s.dot_end(product, scale, unit, sums[t]);
        if PARTS == 2 {
            let product = s.u_add(s.u_load(&last[t].0), start);
            sums[t] = s.dot_end(product, extra, unit, sums[t]);
        }
        sums[t] = add_minima(s, E::EXTRA, minima, x, t, sums[t]);
    }
    sums
}
