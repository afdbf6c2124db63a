//! Blocks of blocks: 256 weights of which each 16 or 32 have a small integer as their scale, times a scale
//! of all.
//!
//! Scales of sub-blocks are searched for alone, then the scale of all, then small integers near theirs
//! and the scale of all in turn, as long as the error falls.

use std::array;

use half::f16;

use super::search::{self, AffineFit, AffineSums, Levels, Offset, Sums, Values, largest};
use super::{Unfit, Unit, inverse};

/// Values of a block, and how much their errors matter.
struct Block {
    unit: Unit,
    values: [f32; 256],
    weights: [f32; 256],
}

/// How often integers and the scale of all are fitted to each other, at most.
const ROUNDS: usize = 3;

/// `S` sub-blocks that have a scale.
pub(super) struct Symmetric<const S: usize> {
    pub(super) scale: f16,
    pub(super) scales: [i32; S],
    pub(super) levels: [f32; 256],
}

impl<const S: usize> Symmetric<S> {
    /// `range` has the least and the largest integer that a sub-block's scale can be.
    pub(super) fn of(
        values: &[f32; 256],
        levels: impl Levels,
        range: [i32; 2],
    ) -> Result<Self, Unfit> {
        let block = Block::of::<S>(values);
        let alone: [f32; S] = array::from_fn(|sub| {
            let (values, weights) = block.part(sub, S);
            search::scale(values, weights, levels)
        });
        let largest = largest(&alone);
        let mut best = ([0; S], f16::ZERO);
        let mut gain = f32::NEG_INFINITY;
        for end in range {
            let mut scale = largest / end as f32;
            for _ in 0..ROUNDS {
                let stored = block.unit.stored(scale)?;
                let all = block.unit.of_stored(stored);
                let found = block.integers(alone, all, levels, range);
                if found.gain <= gain {
                    break;
                }
                (best, gain) = ((found.scales, stored), found.gain);
                scale = found.scale;
            }
        }
        let (scales, scale) = best;
        let all = block.unit.of_stored(scale);
        let mut found = [0.0; 256];
        let parts = found.chunks_exact_mut(256 / S).zip(scales);
        for (sub, (found, scale)) in parts.enumerate() {
            let (values, _) = block.part(sub, S);
            let inverse = inverse(all * scale as f32);
            for (found, values) in found.as_chunks_mut().0.iter_mut().zip(values.as_chunks().0) {
                *found = levels.nearest(values.map(|value: f32| value * inverse));
            }
        }
        Ok(Self {
            scale,
            scales,
            levels: found,
        })
    }
}

/// Integers of sub-blocks, how much they gain, and the scale of all that is best for them.
struct Integers<const S: usize> {
    scales: [i32; S],
    gain: f32,
    scale: f32,
}

/// The same of sub-blocks with minimums.
struct AffineIntegers<const S: usize> {
    scales: [i32; S],
    minimums: [i32; S],
    gain: f32,
    scale: f32,
    minimum: f32,
}

impl Block {
    /// Of `S` sub-blocks.
    fn of<const S: usize>(values: &[f32; 256]) -> Self {
        let unit = Unit::of(values);
        let values = unit.scaled(values);
        Self {
            unit,
            weights: search::importance(&values, 256 / S),
            values,
        }
    }

    /// The values of one of `subs` sub-blocks, and their weights.
    fn part(&self, sub: usize, subs: usize) -> (&[f32], &[f32]) {
        let size = 256 / subs;
        let range = sub * size..(sub + 1) * size;
        (&self.values[range.clone()], &self.weights[range])
    }

    /// The best integers near those that come nearest to the scales that sub-blocks would have `alone`,
    /// if the scale of all is `all`.
    fn integers<const S: usize>(
        &self,
        alone: [f32; S],
        all: f32,
        levels: impl Levels,
        [low, high]: [i32; 2],
    ) -> Integers<S> {
        let mut found = Integers {
            scales: [0; S],
            gain: 0.0,
            scale: all,
        };
        let (mut product, mut square) = (0.0, 0.0);
        for (sub, alone) in alone.into_iter().enumerate() {
            let (values, weights) = self.part(sub, S);
            let nearest = near(alone * inverse(all));
            let mut best = (0, 0.0, Sums::default());
            for integer in nearest - 1..=nearest + 1 {
                let integer = integer.clamp(low, high);
                let scale = all * integer as f32;
                let sums = Sums::of(values, weights, inverse(scale), levels);
                let gain = sums.gain(scale);
                if gain > best.1 {
                    best = (integer, gain, sums);
                }
            }
            let (integer, gain, sums) = best;
            found.scales[sub] = integer;
            found.gain += gain;
            product += integer as f32 * sums.product;
            square += (integer * integer) as f32 * sums.square;
        }
        if square > 0.0 {
            found.scale = product / square;
        }
        found
    }

    /// The same for sub-blocks with minimums, which are how far below 0 they begin.
    fn affine_integers<const S: usize>(
        &self,
        alone: &[AffineFit; S],
        all: AffineFit,
        top: f32,
        limit: i32,
    ) -> AffineIntegers<S> {
        let mut found = AffineIntegers {
            scales: [0; S],
            minimums: [0; S],
            gain: 0.0,
            scale: all.scale,
            minimum: -all.offset,
        };
        // The sums of the equations that the best scale and minimum of all solve.
        let (mut squares, mut mixed, mut ones, mut products, mut of_minimums) =
            (0.0, 0.0, 0.0, 0.0, 0.0);
        for (sub, alone) in alone.iter().enumerate() {
            let (values, weights) = self.part(sub, S);
            let values = Values::new(values, weights);
            let scale = near(alone.scale * inverse(all.scale));
            let minimum = near(alone.offset * inverse(all.offset));
            let mut best = (0, 0, f32::NEG_INFINITY, AffineSums::default());
            for scale in scale - 1..=scale + 1 {
                for minimum in minimum - 1..=minimum + 1 {
                    let (scale, minimum) = (scale.clamp(0, limit), minimum.clamp(0, limit));
                    let fit = AffineFit {
                        scale: all.scale * scale as f32,
                        offset: all.offset * minimum as f32,
                    };
                    let sums = values.sums(fit, top);
                    let gain = sums.gain(fit);
                    if gain > best.2 {
                        best = (scale, minimum, gain, sums);
                    }
                }
            }
            let (scale, minimum, gain, sums) = best;
            found.scales[sub] = scale;
            found.minimums[sub] = minimum;
            found.gain += gain;
            let (scale, minimum) = (scale as f32, minimum as f32);
            squares += scale * scale * sums.square;
            mixed += scale * minimum * sums.code;
            ones += minimum * minimum * sums.weight;
            products += scale * sums.product;
            of_minimums += minimum * sums.value;
        }
        let determinant = squares * ones - mixed * mixed;
        if ones == 0.0 && squares > 0.0 {
            found.scale = products / squares;
        } else if determinant > 0.0 {
            found.scale = (products * ones - of_minimums * mixed) / determinant;
            found.minimum = (products * mixed - of_minimums * squares) / determinant;
        }
        found
    }
}

/// The integer nearest to a quotient, or one beyond all that scales can be.
fn near(quotient: f32) -> i32 {
    quotient.clamp(-1024.0, 1024.0).round() as i32
}

/// `S` sub-blocks that have a scale and a minimum.
pub(super) struct Affine<const S: usize> {
    pub(super) scale: f16,
    pub(super) minimum: f16,
    pub(super) scales: [u8; S],
    pub(super) minimums: [u8; S],
    pub(super) codes: [u8; 256],
}

impl<const S: usize> Affine<S> {
    /// Codes go from 0 to `top`, integers of sub-blocks from 0 to `limit`.
    pub(super) fn of(values: &[f32; 256], top: f32, limit: i32) -> Result<Self, Unfit> {
        let block = Block::of::<S>(values);
        let alone: [AffineFit; S] = array::from_fn(|sub| {
            let (values, weights) = block.part(sub, S);
            search::affine(values, weights, top, Offset::NotPositive)
        });
        let most = |part: fn(&AffineFit) -> f32| alone.iter().map(part).fold(0.0, f32::max);
        let mut scale = most(|fit| fit.scale) / limit as f32;
        let mut minimum = most(|fit| -fit.offset) / limit as f32;
        let mut best = ([0; S], [0; S], f16::ZERO, f16::ZERO);
        let mut gain = f32::NEG_INFINITY;
        for _ in 0..ROUNDS {
            let stored = (block.unit.stored(scale)?, block.unit.stored(minimum)?);
            let all = AffineFit {
                scale: block.unit.of_stored(stored.0),
                offset: -block.unit.of_stored(stored.1),
            };
            let found = block.affine_integers(&alone, all, top, limit);
            if found.gain <= gain {
                break;
            }
            gain = found.gain;
            best = (found.scales, found.minimums, stored.0, stored.1);
            (scale, minimum) = (found.scale.max(0.0), found.minimum.max(0.0));
        }
        let (scales, minimums, scale, minimum) = best;
        let all = [scale, minimum].map(|stored| block.unit.of_stored(stored));
        let mut codes = [0; 256];
        for (sub, codes) in codes.chunks_exact_mut(256 / S).enumerate() {
            let (values, _) = block.part(sub, S);
            let fit = AffineFit {
                scale: all[0] * scales[sub] as f32,
                offset: -all[1] * minimums[sub] as f32,
            };
            for (codes, values) in codes.as_chunks_mut().0.iter_mut().zip(values.as_chunks().0) {
                let values: &[f32; 16] = values;
                *codes = fit.codes(values, top).map(|code| code as u8);
            }
        }
        Ok(Self {
            scale,
            minimum,
            scales: scales.map(|integer| integer as u8),
            minimums: minimums.map(|integer| integer as u8),
            codes,
        })
    }
}
