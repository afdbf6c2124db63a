//! A few rows and tokens in registers: the sums of a block of columns.
//!
//! Rows go in pairs, eight lanes each: of `P` pairs, vector `p` holds rows `p` and `p + P`.

use super::HALF;
use crate::simd::{LANES, Simd, each};

/// The most rows of a tile.
pub(super) const MOST_ROWS: usize = 4;

/// The most tokens of a tile.
pub(super) const MOST_TOKENS: usize = 12;

/// Vectors that one [`Simd::sum_halves`] adds up.
const TOGETHER: usize = 8;

/// Vectors of a tile's sums.
const SUMS: usize = MOST_ROWS / 2 * MOST_TOKENS / TOGETHER;

/// Partial sums of `T` tokens.
pub(super) type Partial<S, const P: usize, const T: usize> = [[<S as Simd>::F; T]; P];

/// Sums of a tile: lanes of the vectors in turn are pairs of rows, token after token.
pub(super) type Sums<S> = [<S as Simd>::F; SUMS];

/// Adds the products of eight columns.
#[inline(always)]
pub(super) fn step<S: Simd, const P: usize, const T: usize>(
    s: S,
    weights: [S::F; P],
    x: [&[f32; HALF]; T],
    partial: &mut Partial<S, P, T>,
) {
    for t in 0..T {
        let x = s.load_twice(x[t]);
        for p in 0..P {
            partial[p][t] = s.fma(weights[p], x, partial[p][t]);
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

/// The sums of each token's rows; of fewer than four rows, the last elements mean nothing.
#[inline(always)]
pub(super) fn rows<S: Simd, const P: usize, const T: usize>(
    s: S,
    sums: &Sums<S>,
) -> [[f32; MOST_ROWS]; T] {
    let mut lanes = [[0.0; LANES]; SUMS];
    for (sums, lanes) in sums.iter().zip(&mut lanes).take((P * T).div_ceil(TOGETHER)) {
        s.store(*sums, lanes);
    }
    let mut rows = [[0.0; MOST_ROWS]; T];
    for t in 0..T {
        // The rows of a token are `P` neighbours in each half, in one vector: `TOGETHER` is a multiple
        // of `P`.
        let (vector, lane) = (t * P / TOGETHER, t * P % TOGETHER);
        for half in 0..2 {
            let lanes = &lanes[vector][lane + half * TOGETHER..][..P];
            rows[t][half * P..][..P].copy_from_slice(lanes);
        }
    }
    rows
}
