//! A few rows and tokens in registers: the sums of a block of columns.
//!
//! Rows go in pairs, eight lanes each: of `P` pairs, vector `p` holds rows `p` and `p + P`.

use super::{Element, HALF};
use crate::simd::{LANES, Registers, Simd, each};

/// Vectors of partial sums in a tile at most, pairs of rows times tokens: beside those of weights and of a
/// token, what 32 registers hold.
const MOST_PARTIAL: usize = 24;

/// And where a vector is two of sixteen registers.
pub(super) const FEW_PARTIAL: usize = 6;

/// Vectors that one [`Simd::sum_halves`] adds up.
const TOGETHER: usize = 8;

/// Vectors of a tile's sums.
const SUMS: usize = MOST_PARTIAL / TOGETHER;

/// Partial sums of `T` tokens.
pub(super) type Partial<S, const P: usize, const T: usize> = [[<S as Simd>::F; T]; P];

/// Sums of a tile: lanes of the vectors in turn are pairs of rows, token after token.
pub(super) type Sums<S> = [<S as Simd>::F; SUMS];

/// Sums of a token: of the first rows of the `P` pairs, and of the second ones.
pub(super) type RowSums<const P: usize> = [[f32; P]; 2];

/// Tokens of the widest tile of `pairs` pairs of rows.
pub(super) const fn widest<S: Simd>(pairs: usize) -> usize {
    match S::REGISTERS {
        Registers::Few => FEW_PARTIAL / pairs,
        Registers::Many => MOST_PARTIAL / pairs,
    }
}

/// Adds the products of a chunk of columns.
#[inline(always)]
pub(super) fn step<S: Simd, E: Element, const P: usize, const T: usize>(
    s: S,
    element: E,
    weights: [S::F; P],
    x: [&E::Columns; T],
    partial: &mut Partial<S, P, T>,
) {
    for t in 0..T {
        let x = element.load_twice(s, x[t]);
        for p in 0..P {
            partial[p][t] = element.multiply_add(s, weights[p], x, partial[p][t]);
        }
    }
}

/// The same of a token that [`Element::prepare`] was done with.
#[inline(always)]
pub(super) fn prepared_step<S: Simd, E: Element, const P: usize, const T: usize>(
    s: S,
    element: E,
    weights: [S::F; P],
    x: [&[f32; HALF]; T],
    partial: &mut Partial<S, P, T>,
) {
    for t in 0..T {
        let x = s.load_twice(x[t]);
        for p in 0..P {
            partial[p][t] = element.multiply_add(s, weights[p], x, partial[p][t]);
        }
    }
}

/// Adds up the partial sums of a block.
#[inline(always)]
pub(super) fn sums<S: Simd, const P: usize, const T: usize>(
    s: S,
    partial: &Partial<S, P, T>,
) -> Sums<S> {
    let zero = s.splat(0.0);
    each!(zero, |group| {
        if group * TOGETHER < P * T {
            s.sum_halves(each!(zero, |j| {
                let index = group * TOGETHER + j;
                if index < P * T {
                    partial[index % P][index / P]
                } else {
                    zero
                }
            }))
        } else {
            zero
        }
    })
}

/// The sums of each token's rows.
#[inline(always)]
pub(super) fn rows<S: Simd, const P: usize, const T: usize>(
    s: S,
    sums: &Sums<S>,
) -> [RowSums<P>; T] {
    let mut lanes = [[0.0; LANES]; SUMS];
    for (sums, lanes) in sums.iter().zip(&mut lanes).take((P * T).div_ceil(TOGETHER)) {
        s.store(*sums, lanes);
    }
    let mut rows = [[[0.0; P]; 2]; T];
    for t in 0..T {
        // The rows of a token are `P` neighbours in each half, in one vector: `TOGETHER` is a multiple
        // of `P`.
        let (vector, lane) = (t * P / TOGETHER, t * P % TOGETHER);
        for half in 0..2 {
            let lanes = &lanes[vector][lane + half * TOGETHER..][..P];
            rows[t][half].copy_from_slice(lanes);
        }
    }
    rows
}
