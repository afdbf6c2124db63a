//! One to three tokens: rows are streamed as they lie in memory and converted in registers.
//!
//! A task's rows are cut into four streams that advance together, which reads memory faster than
//! one.

use super::tile::{Partial, RowSums, rows, step, sums};
use super::{CHUNKS, Element, PREFETCH_BYTES, Piece, Product, blocks, prefetch_chunks};
use crate::simd::{Kernel, Simd, each};

/// Rows that advance together, and the vectors that hold them.
const ROWS: usize = 2 * PAIRS;
const PAIRS: usize = 2;

/// The most tokens whose products stay in registers.
pub(super) const MOST_TOKENS: usize = 3;

/// Writes the products of the rows of the output with up to [`MOST_TOKENS`] tokens.
pub(super) fn multiply<S: Simd, E: Element>(s: S, element: E, product: Product<'_, '_>) {
    match product.x.tokens() {
        0 => {}
        1 => s.vectorize(Streams::<E, 1>(product, element)),
        2 => s.vectorize(Streams::<E, 2>(product, element)),
        3 => s.vectorize(Streams::<E, 3>(product, element)),
        tokens => unreachable!("{tokens} tokens do not fit registers"),
    }
}

/// The product with `T` tokens.
struct Streams<'a, 'b, E, const T: usize>(Product<'a, 'b>, E);

impl<E: Element, const T: usize> Kernel for Streams<'_, '_, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Product {
            weights,
            x,
            mut out,
            ..
        } = self.0;
        let element = self.1;
        let (first, count) = (out.cols().start, out.cols().len());
        let x: [&[f32]; T] = each!(&[][..], |t| x.row(t));
        let per_stream = count.div_ceil(ROWS);
        for index in 0..per_stream {
            // A stream that has ended repeats the last row.
            let indices: [usize; ROWS] = each!(0, |r| (r * per_stream + index).min(count - 1));
            let rows: [&[u8]; ROWS] = each!(&[][..], |r| weights.row(first + indices[r]));
            let dots = dots::<S, E, T>(s, element, rows, &x);
            for t in 0..T {
                let out = out.row(t);
                for r in 0..ROWS {
                    out[indices[r]] = dots[t].as_flattened()[r];
                }
            }
        }
    }
}

/// Four rows times `T` tokens, by token.
#[inline(always)]
fn dots<S: Simd, E: Element, const T: usize>(
    s: S,
    element: E,
    weights: [&[u8]; ROWS],
    x: &[&[f32]; T],
) -> [RowSums<PAIRS>; T] {
    let bytes_each = size_of::<E::Chunk>() / E::COLUMNS;
    let mut total = [s.splat(0.0); _];
    for cols in blocks(x[0].len()) {
        let bytes = bytes_each * cols.start..bytes_each * cols.end;
        let weights = each!(&[][..], |r| &weights[r][bytes.clone()]);
        let x = each!(&[][..], |t| &x[t][cols.clone()]);
        let block = sums(s, &partial::<S, E, T>(s, element, weights, x));
        for group in 0..total.len() {
            total[group] = match cols.start {
                0 => block[group],
                _ => s.add(total[group], block[group]),
            };
        }
    }
    rows::<S, PAIRS, T>(s, &total)
}

/// The partial sums of a block.
#[inline(always)]
fn partial<S: Simd, E: Element, const T: usize>(
    s: S,
    element: E,
    weights: [&[u8]; ROWS],
    x: [&[f32]; T],
) -> Partial<S, PAIRS, T> {
    let chunks = x[0].len() / E::COLUMNS;
    let w: [&[E::Chunk]; ROWS] = each!(&[][..], |r| &E::Chunk::split(weights[r]).0[..chunks]);
    let columns: [&[E::Columns]; T] = each!(&[][..], |t| &E::Columns::split(x[t]).0[..chunks]);
    let mut partial = [[s.splat(0.0); T]; PAIRS];
    for first in (0..chunks).step_by(CHUNKS) {
        for r in 0..ROWS {
            let address = w[r].as_ptr().cast::<u8>();
            prefetch_chunks::<S, E>(s, address.wrapping_add(PREFETCH_BYTES), first);
        }
        for chunk in first..chunks.min(first + CHUNKS) {
            let w = each!(s.splat(0.0), |p| {
                element.load(s, [&w[p][chunk], &w[p + PAIRS][chunk]])
            });
            let x = each!(&columns[0][chunk], |t| &columns[t][chunk]);
            step(s, element, w, x, &mut partial);
        }
    }
    if !x[0].len().is_multiple_of(E::COLUMNS) {
        let w: [E::Chunk; ROWS] = weights.map(|weights| E::Chunk::pad(E::Chunk::split(weights).1));
        let x: [E::Columns; T] = x.map(|x| E::Columns::pad(E::Columns::split(x).1));
        let w = each!(s.splat(0.0), |p| element.load(s, [&w[p], &w[p + PAIRS]]));
        step(s, element, w, x.each_ref(), &mut partial);
    }
    partial
}
