//! The scale, or the scale and the offset, with which rounding costs least.
//!
//! What it costs is the sum of squared errors, each times the weight's importance. For codes that are
//! given the best scale is a quotient of two sums; which codes are best is found by trying scales around
//! the one that takes the largest weight to the last level, and by rounding again with what was found.

/// What sums are kept apart for, so that a processor adds them side by side.
const LANES: usize = 8;

/// Where weights can be, before they are multiplied by a scale.
pub(super) trait Levels: Copy {
    /// The level nearest to each number.
    fn nearest(self, values: [f32; LANES]) -> [f32; LANES];

    /// The lowest and the highest level.
    fn ends(self) -> [f32; 2];

    /// How far apart the levels are to which the largest weight is taken by trial.
    fn step(self) -> f32;
}

/// The integers from `low` to `high`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    low: f32,
    high: f32,
}

impl Linear {
    /// The signed integers of so many bits.
    pub(super) fn bits(bits: u32) -> Self {
        let low = (1_u32 << (bits - 1)) as f32;
        Self {
            low: -low,
            high: low - 1.0,
        }
    }
}

impl Levels for Linear {
    fn nearest(self, values: [f32; LANES]) -> [f32; LANES] {
        values.map(|value| integer(clamped(value, self.low, self.high)))
    }

    fn ends(self) -> [f32; 2] {
        [self.low, self.high]
    }

    fn step(self) -> f32 {
        0.25
    }
}

/// The sixteen levels of IQ4_NL and IQ4_XS.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nonlinear;

/// `kvalues_iq4nl` of `ggml-common.h`.
const LEVELS: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0,
    89.0, 113.0,
];

impl Nonlinear {
    /// What a level is stored as.
    pub(super) fn code(level: f32) -> u8 {
        LEVELS.partition_point(|other| *other < level) as u8
    }
}

impl Levels for Nonlinear {
    fn nearest(self, values: [f32; LANES]) -> [f32; LANES] {
        let mut levels = [LEVELS[0]; LANES];
        for pair in LEVELS.windows(2) {
            let (between, step) = ((pair[0] + pair[1]) / 2.0, pair[1] - pair[0]);
            for i in 0..LANES {
                levels[i] += if values[i] > between { step } else { 0.0 };
            }
        }
        levels
    }

    fn ends(self) -> [f32; 2] {
        [LEVELS[0], LEVELS[15]]
    }

    fn step(self) -> f32 {
        3.5
    }
}

/// Rounds to an integer, halves to the even one; for numbers of less than 2^22. Adding this number
/// leaves no bits for fractions.
fn integer(value: f32) -> f32 {
    const WHOLE: f32 = 12_582_912.0;
    (value + WHOLE) - WHOLE
}

/// Compares one way only, which is one instruction for each end.
fn clamped(value: f32, low: f32, high: f32) -> f32 {
    let value = if value > low { value } else { low };
    if value < high { value } else { high }
}

/// The value farthest from 0; of two, the first.
pub(super) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest: f32, value| {
        if value.abs() > largest.abs() {
            *value
        } else {
            largest
        }
    })
}

/// How much errors matter in blocks of `size`: those of large weights more, and none of them little. It is
/// what llama.cpp takes for Q4_K; in perplexity it beat squares, and no importance at all, for types with
/// and without offsets.
pub(super) fn importance<const N: usize>(values: &[f32; N], size: usize) -> [f32; N] {
    let mut weights = values.map(f32::abs);
    for weights in weights.chunks_exact_mut(size) {
        let squares: f32 = weights.iter().map(|value| value * value).sum();
        let typical = (squares / size as f32).sqrt();
        weights.iter_mut().for_each(|weight| *weight += typical);
    }
    weights
}

/// What a scale does to a block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fit {
    /// The best scale for the codes.
    pub(super) scale: f32,
    /// How much less the error is than if all weights were 0.
    pub(super) gain: f32,
}

/// Sums over a block that is rounded with a scale: of weighted products of values and levels, and of
/// squares of levels.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub(super) product: f32,
    pub(super) square: f32,
}

impl Sums {
    pub(super) fn of(values: &[f32], weights: &[f32], inverse: f32, levels: impl Levels) -> Self {
        let (mut products, mut squares) = ([0.0; LANES], [0.0; LANES]);
        let weights = weights.as_chunks::<LANES>().0;
        for (values, weights) in values.as_chunks::<LANES>().0.iter().zip(weights) {
            let levels = levels.nearest(values.map(|value| value * inverse));
            for i in 0..LANES {
                let weighted = weights[i] * levels[i];
                products[i] += weighted * values[i];
                squares[i] += weighted * levels[i];
            }
        }
        Self {
            product: products.iter().sum(),
            square: squares.iter().sum(),
        }
    }

    fn fit(self) -> Fit {
        match self.square > 0.0 {
            true => Fit {
                scale: self.product / self.square,
                gain: self.product * self.product / self.square,
            },
            false => Fit::default(),
        }
    }

    /// How much less the error is with this scale than if all weights were 0.
    pub(super) fn gain(self, scale: f32) -> f32 {
        scale * (2.0 * self.product - scale * self.square)
    }
}

/// Trials to each side of each end.
const TRIALS: i32 = 4;
/// How often what was found is rounded with again, at most; most blocks stay as they are after one.
const REFINEMENTS: usize = 3;

/// The best scale found for a block.
pub(super) fn scale(values: &[f32], weights: &[f32], levels: impl Levels) -> f32 {
    let largest = largest(values);
    if largest == 0.0 {
        return 0.0;
    }
    let fit = |inverse| Sums::of(values, weights, inverse, levels).fit();
    let mut best = Fit::default();
    for end in levels.ends() {
        for trial in -TRIALS..=TRIALS {
            let found = fit((end + trial as f32 * levels.step()) / largest);
            if found.gain > best.gain {
                best = found;
            }
        }
    }
    for _ in 0..REFINEMENTS {
        let found = fit(1.0 / best.scale);
        if found.gain <= best.gain {
            break;
        }
        best = found;
    }
    best.scale
}

/// The level of each value.
pub(super) fn nearest<const N: usize>(
    values: &[f32; N],
    inverse: f32,
    levels: impl Levels,
) -> [f32; N] {
    let mut found = [0.0; N];
    let parts = found.as_chunks_mut::<LANES>().0.iter_mut();
    for (found, values) in parts.zip(values.as_chunks::<LANES>().0) {
        *found = levels.nearest(values.map(|value| value * inverse));
    }
    found
}

/// What offsets there can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offset {
    Any,
    /// Blocks store how far below 0 they begin.
    NotPositive,
}

/// A value is `scale * code + offset`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AffineFit {
    pub(super) scale: f32,
    pub(super) offset: f32,
}

impl AffineFit {
    /// The codes, from 0 to `top`, of each value.
    pub(super) fn codes<const N: usize>(self, values: &[f32; N], top: f32) -> [f32; N] {
        let inverse = super::inverse(self.scale);
        values.map(|value| integer(clamped((value - self.offset) * inverse, 0.0, top)))
    }
}

/// Values that get a scale and an offset.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values<'a> {
    values: &'a [f32],
    weights: &'a [f32],
    /// The weights' sum, and that of the weighted values.
    sums: [f32; 2],
}

impl<'a> Values<'a> {
    pub(super) fn new(values: &'a [f32], weights: &'a [f32]) -> Self {
        let weighted = values
            .iter()
            .zip(weights)
            .map(|(value, weight)| value * weight);
        Self {
            values,
            weights,
            sums: [weights.iter().sum(), weighted.sum()],
        }
    }

    /// The sums when they are rounded with a scale and an offset.
    pub(super) fn sums(self, fit: AffineFit, top: f32) -> AffineSums {
        let inverse = super::inverse(fit.scale);
        let mut sums = [[0.0; LANES]; 3];
        let weights = self.weights.as_chunks::<LANES>().0;
        for (values, weights) in self.values.as_chunks::<LANES>().0.iter().zip(weights) {
            for i in 0..LANES {
                let code = integer(clamped((values[i] - fit.offset) * inverse, 0.0, top));
                let weighted = weights[i] * code;
                sums[0][i] += weighted;
                sums[1][i] += weighted * values[i];
                sums[2][i] += weighted * code;
            }
        }
        let ([weight, value], [code, product, square]) =
            (self.sums, sums.map(|lanes| lanes.iter().sum()));
        AffineSums {
            weight,
            value,
            code,
            product,
            square,
        }
    }
}

/// Weighted sums over a block: of 1, values, codes, products of values and codes, and squares of codes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AffineSums {
    pub(super) weight: f32,
    pub(super) value: f32,
    pub(super) code: f32,
    pub(super) product: f32,
    pub(super) square: f32,
}

impl AffineSums {
    /// The best scale and offset for these codes, and the gain.
    fn best(&self, allowed: Offset) -> (AffineFit, f32) {
        let determinant = self.weight * self.square - self.code * self.code;
        let mut fit = AffineFit {
            scale: (self.weight * self.product - self.value * self.code) / determinant,
            offset: (self.square * self.value - self.code * self.product) / determinant,
        };
        // All codes are equal.
        if determinant <= 0.0 {
            fit = AffineFit {
                scale: 0.0,
                offset: self.value / self.weight,
            };
        }
        if allowed == Offset::NotPositive && fit.offset > 0.0 {
            fit = AffineFit {
                scale: match self.square > 0.0 {
                    true => self.product / self.square,
                    false => 0.0,
                },
                offset: 0.0,
            };
        }
        (fit, self.gain(fit))
    }

    /// How much less the error is with this scale and offset than if all weights were 0.
    pub(super) fn gain(&self, AffineFit { scale, offset }: AffineFit) -> f32 {
        let of_products = 2.0 * (scale * self.product + offset * self.value);
        let of_squares = scale * scale * self.square + offset * offset * self.weight;
        of_products - of_squares - 2.0 * scale * offset * self.code
    }
}

/// The best scale and offset found for a block whose codes go from 0 to `top`.
pub(super) fn affine(values: &[f32], weights: &[f32], top: f32, allowed: Offset) -> AffineFit {
    let (mut low, mut high) = (values[0], values[0]);
    for &value in values {
        low = low.min(value);
        high = high.max(value);
    }
    if allowed == Offset::NotPositive {
        low = low.min(0.0);
    }
    let mut best = AffineFit {
        scale: 0.0,
        offset: low,
    };
    if high <= low {
        return best;
    }
    let mut gain = f32::NEG_INFINITY;
    let block = Values::new(values, weights);
    let attempt = |from: AffineFit| block.sums(from, top).best(allowed);
    for trial in 0..=AFFINE_TRIALS {
        let steps = top - AFFINE_REACH + trial as f32 * AFFINE_STEP;
        let (found, its_gain) = attempt(AffineFit {
            scale: (high - low) / steps,
            offset: low,
        });
        if its_gain > gain {
            (best, gain) = (found, its_gain);
        }
    }
    for _ in 0..REFINEMENTS {
        let (found, its_gain) = attempt(best);
        if its_gain <= gain {
            break;
        }
        (best, gain) = (found, its_gain);
    }
    best
}

/// The range of a block is taken to be from this many steps fewer than there are codes, in trials of a
/// tenth of a step, to as many more.
const AFFINE_REACH: f32 = 1.0;
const AFFINE_STEP: f32 = 0.25;
const AFFINE_TRIALS: i32 = 8;
