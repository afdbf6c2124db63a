//! A few tokens: sixteen rows at a time, of as many streams or neighbours, are unpacked in registers and
//! multiplied with a tile of tokens, and kept for the tiles after it.

use std::marker::PhantomData;
use std::ops::Range;

use super::formats::Format;
use super::packing::{Bytes, Lines, Packing};
use super::panel::{HasExtra, Stored, Sums, step};
use super::panels::{BUFFER_BLOCKS, Buffer};
use super::streams::{
    FEW_TOKENS, Place, Write, ahead_bytes, prefetch_beginnings, prefetch_next_rows,
    prefetch_same_rows, rows_of_streams,
};
use super::{load, parts, store};
use crate::activations::{ActivationBlock, Activations, BLOCK, streamed};
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Simd, SingleToken};
use crate::tile::Tile;

/// The weights of a block, kept.
type Words = <Bytes as Packing>::Words;

/// Writes the products of the rows of `out` with at most [`streamed`] tokens.
pub(super) fn multiply<S: Simd, D: Format>(
    s: S,
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
    buffer: &mut Buffer,
) {
    let rows = out.cols();
    let row_bytes = weights.row_bytes();
    let each = match x.tokens() <= most_tokens::<D>(row_bytes) {
        true => rows_of_streams::<LANES>(rows.len(), row_bytes),
        false => 0,
    };
    let first = &weights.bytes()[rows.start * row_bytes..];
    prefetch_beginnings::<LANES>(first.as_ptr(), each * row_bytes, ahead_bytes(), |line| {
        s.prefetch_line(line)
    });
    for row in 0..each {
        let bytes = &weights.bytes()[(rows.start + row) * row_bytes..];
        let tile = Tile::strided(bytes, each * row_bytes, row_bytes);
        sixteen::<S, D>(s, &tile, &Place::Streams(row), x, out, buffer);
        if (row + 1).is_multiple_of(LANES) || row + 1 == each {
            s.vectorize(Write {
                kept: &buffer.sums,
                tokens: x.tokens(),
                rows: row / LANES * LANES..row + 1,
                each,
                out,
            });
        }
    }
    let mut start = LANES * each;
    while start < rows.len() {
        let tile = Tile::new(weights, rows.start + start);
        let place = Place::Neighbours(start, tile.lanes());
        sixteen::<S, D>(s, &tile, &place, x, out, buffer);
        start += tile.lanes().len();
    }
}

/// The fewest bytes of rows that a few tokens read as streams. Of shorter ones sixteen neighbours are in few pages, and keeping
/// and writing sums takes longer than reading them so.
const LEAST_BYTES: usize = 512;

/// The most tokens that read rows as streams. With more, what is computed takes longer than what is read, and rows that are
/// read ahead to the first-level cache take the place of what is computed with.
fn most_tokens<D: Format>(row_bytes: usize) -> usize {
    if row_bytes < LEAST_BYTES {
        return 1;
    }
    // Half the bytes of 32 columns.
    let tokens = D::DTYPE.block_bytes() * BLOCK / D::DTYPE.block_len() / 2;
    tokens.min(FEW_TOKENS)
}

/// Sixteen rows.
fn sixteen<S: Simd, D: Format>(
    s: S,
    tile: &Tile<'_>,
    place: &Place,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
    buffer: &mut Buffer,
) {
    let blocks = x.cols() / BLOCK;
    for column in (0..blocks).step_by(BUFFER_BLOCKS) {
        let columns = column..blocks.min(column + BUFFER_BLOCKS);
        for (token, room) in x.padded_tiles() {
            let call = Call {
                tile,
                x,
                columns: columns.clone(),
                tokens: token..x.tokens().min(token + room),
                place,
                out,
                buffer,
            };
            match room {
                1 => call.run::<S, D, 1>(s),
                2 => call.run::<S, D, 2>(s),
                4 => call.run::<S, D, 4>(s),
                8 => call.run::<S, D, 8>(s),
                count => unreachable!("a tile of {count} tokens"),
            }
        }
    }
}

/// Sixteen rows, some blocks of columns and a tile of tokens.
struct Call<'a, 'b> {
    tile: &'a Tile<'a>,
    x: &'a Activations<'a>,
    columns: Range<usize>,
    /// Those of the tile that exist.
    tokens: Range<usize>,
    /// Where the rows are in the block of the output.
    place: &'a Place,
    out: &'a mut Block<'b, f32>,
    buffer: &'a mut Buffer,
}

impl<'a> Call<'a, '_> {
    fn run<S: Simd, D: Format, const T: usize>(self, s: S) {
        // A constant, so that kernels which a level does not have are not compiled.
        if const { T > streamed::<S>() } {
            unreachable!("{T} tokens, of at most {}", streamed::<S>());
        }
        if self.tokens.start > 0 {
            return s.vectorize(Kept::<D::Extra, T>(self, PhantomData));
        }
        // Another constant: most levels have a way of their own for a single token.
        if const { T == 1 && !matches!(S::SINGLE_TOKEN, SingleToken::Sixteen) } {
            unreachable!("the first tile of several tokens has room for one");
        }
        s.vectorize(Unpacked::<D, T>(self, PhantomData));
    }

    /// The activations of the tile, which has room for `T` tokens.
    #[inline(always)]
    fn activations<const T: usize>(&self) -> &'a [ActivationBlock<T>] {
        &self.x.tile(self.tokens.start)[self.columns.clone()]
    }

    /// The sums of the columns before.
    #[inline(always)]
    fn load<S: Simd, const T: usize>(&mut self, s: S) -> Sums<S, 1, T> {
        let mut sums = [s.splat(0.0); T];
        if self.columns.start > 0 {
            for (t, sums) in sums.iter_mut().enumerate().take(self.tokens.len()) {
                let token = self.tokens.start + t;
                *sums = match self.place {
                    Place::Streams(row) => s.load(&self.buffer.sums[token][row % LANES].0),
                    Place::Neighbours(start, lanes) => {
                        load(s, &self.out.row(token)[*start..], lanes)
                    }
                };
            }
        }
        [sums]
    }

    #[inline(always)]
    fn store<S: Simd, const T: usize>(self, s: S, sums: &Sums<S, 1, T>) {
        for (t, sums) in sums[0].iter().enumerate().take(self.tokens.len()) {
            let token = self.tokens.start + t;
            match self.place {
                Place::Streams(row) => s.store(*sums, &mut self.buffer.sums[token][row % LANES].0),
                Place::Neighbours(start, lanes) => {
                    store(s, *sums, &mut self.out.row(token)[*start..], lanes);
                }
            }
        }
    }
}

/// A [`Call`] from the file layout.
struct Unpacked<'a, 'b, D, const T: usize>(Call<'a, 'b>, PhantomData<D>);

impl<D: Format, const T: usize> Kernel for Unpacked<'_, '_, D, T> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut call = self.0;
        let (tile, first) = (call.tile, call.columns.start / parts::<D>());
        let keeps = call.x.tokens() > call.tokens.end;
        let neighbours = matches!(call.place, Place::Neighbours(..));
        let ahead = ahead_bytes();
        let mut sums = call.load::<S, T>(s);
        let x = call.activations::<T>().chunks_exact(parts::<D>());
        let words = Words::blocks_mut(&mut call.buffer.words).chunks_exact_mut(parts::<D>());
        let scales = call.buffer.scales.chunks_exact_mut(parts::<D>());
        for (index, ((x, words), scales)) in (first..).zip(x.zip(words).zip(scales)) {
            let header = D::header(s, tile, index);
            for group in 0..parts::<D>() / D::SHARING {
                let shared = D::shared(s, tile, index, group);
                for part in group * D::SHARING..(group + 1) * D::SHARING {
                    if neighbours {
                        prefetch_next_rows::<S, D>(s, tile, index, part);
                    } else {
                        prefetch_same_rows::<S, D>(s, tile, index, part, ahead);
                    }
                    let mut block = D::block(s, tile, index, part, &header, &shared);
                    for g in 0..8 {
                        block.words[g] = s.weights(block.words[g], D::OFFSET.wrapping_neg() as i8);
                    }
                    if keeps {
                        for g in 0..8 {
                            s.u_store(block.words[g], &mut words[part][g].0);
                        }
                        scales[part].store(s, D::Extra::EXTRA, &block);
                    }
                    step(s, D::Extra::EXTRA, &block, &x[part], &mut sums);
                }
            }
        }
        call.store(s, &sums);
    }
}

/// A [`Call`] with what the first tile has kept.
struct Kept<'a, 'b, E, const T: usize>(Call<'a, 'b>, PhantomData<E>);

impl<E: HasExtra, const T: usize> Kernel for Kept<'_, '_, E, T> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut call = self.0;
        let mut sums = call.load::<S, T>(s);
        let words = Words::blocks(&call.buffer.words);
        let blocks = words.iter().zip(&call.buffer.scales);
        for (x, (words, scales)) in call.activations::<T>().iter().zip(blocks) {
            let weights = Stored::<Bytes, 1> {
                words: [words],
                scales: [scales],
            };
            step(s, E::EXTRA, &weights, x, &mut sums);
        }
        call.store(s, &sums);
    }
}
