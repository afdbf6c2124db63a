//! Rotary position embedding: which elements turn together, how fast, and how that is stretched for
//! contexts longer than a model was trained on.

use std::f64::consts::TAU;
use std::fmt;

use lacuna_kernels::RopeStyle;

/// One way of turning the heads of queries and keys by position.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Which elements of a head rotate together.
    pub style: RopeStyle,
    /// Elements of a head that rotate, from its first on; the others pass as they are.
    pub dimensions: usize,
    /// Base of the geometric frequency series.
    pub theta: f64,
    /// How frequencies are stretched for contexts longer than trained.
    pub scaling: RopeScaling,
    /// Whether a GGUF file's `rope_freqs.weight` divides these frequencies.
    pub file_factors: bool,
    /// By which number of a position pairs turn.
    pub axes: RopeAxes,
}

/// By which number of a position pairs turn, where it has several. Those of a text's tokens are all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeAxes {
    /// All by its first.
    One,
    /// The first so many pairs by its time, the next by its row, and the rest by its column (Qwen 2 and 2.5 VL).
    Sections([usize; 3]),
    /// By its time, its row and its column in turn, as long as these have so many; the rest by its time (Qwen 3 VL).
    Interleaved([usize; 3]),
    /// The first half of the pairs by a patch's row, the other by its column, at the same frequencies.
    Patch,
    /// The same, but of the frequencies of all pairs rows have the first, the third and so on, and columns the others
    /// (Pixtral).
    PatchInTurn,
    /// The first half of the pairs by a patch's column, the other by its row, at the same frequencies (Gemma 4).
    PatchByColumn,
}

impl RopeAxes {
    /// Numbers of a position.
    #[must_use]
    pub const fn count(self) -> usize {
        match self {
            Self::One => 1,
            Self::Patch | Self::PatchInTurn | Self::PatchByColumn => 2,
            Self::Sections(_) | Self::Interleaved(_) => 3,
        }
    }

    /// The number that each of `pairs` pairs turns by.
    #[must_use]
    pub fn of_pairs(self, pairs: usize) -> Vec<u8> {
        let of_pair = |pair: usize| match self {
            Self::One => 0,
            Self::Sections([time, ..]) if pair < time => 0,
            Self::Sections([time, rows, _]) => u8::from(pair >= time + rows) + 1,
            Self::Interleaved([_, rows, _]) if pair % 3 == 1 && pair < 3 * rows => 1,
            Self::Interleaved([.., columns]) if pair % 3 == 2 && pair < 3 * columns => 2,
            Self::Interleaved(_) => 0,
            Self::Patch | Self::PatchInTurn => u8::from(pair >= pairs / 2),
            Self::PatchByColumn => u8::from(pair < pairs / 2),
        };
        (0..pairs).map(of_pair).collect()
    }
}

/// How rotation frequencies are changed. All of it is as `modeling_rope_utils.py` of Hugging Face
/// transformers computes it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Low frequencies divided by a factor, high ones kept, those between blended (Llama 3.1).
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths over `original_context / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths under `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context the model was first trained on.
        original_context: usize,
    },
    /// Blended by the turns a pair makes within the original context, with longer vectors (YaRN).
    Yarn(Yarn),
    /// Each pair divided by a factor of its own: one table for contexts up to the original one,
    /// another beyond it (Phi 3 and 4).
    LongRope(LongRope),
    /// Only this part of the pairs turns, at the frequencies they have among all (Gemma 4).
    Proportional {
        /// Of all elements of a head.
        fraction: f64,
    },
}

/// The numbers of YaRN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// The context the model was first trained on.
    pub original_context: usize,
    /// Pairs that turn more often within it keep their frequency.
    pub beta_fast: f64,
    /// Pairs that turn less often within it are divided.
    pub beta_slow: f64,
    /// Whether the pairs between are bounded by whole numbers.
    pub truncate: bool,
    /// What rotated vectors are multiplied by.
    pub attention_factor: f64,
}

/// The numbers of longrope.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// The context the model was first trained on.
    pub original_context: usize,
    /// What rotated vectors are multiplied by.
    pub attention_factor: f64,
    /// Divisors; `None`: the file has them as tensors.
    pub factors: Option<LongRopeFactors>,
}

/// Divisors of rotation frequencies, one for each pair.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRopeFactors {
    /// For contexts up to the original one.
    pub short: Vec<f32>,
    /// For longer ones.
    pub long: Vec<f32>,
}

impl Yarn {
    /// `beta_fast` where a file does not say.
    pub const BETA_FAST: f64 = 32.0;
    /// `beta_slow` where a file does not say.
    pub const BETA_SLOW: f64 = 1.0;

    /// What vectors are multiplied by where a file does not say.
    #[must_use]
    pub fn usual_attention_factor(factor: f64) -> f64 {
        Self::magnitude(factor, 1.0)
    }

    /// `0.1 * scale * ln(factor) + 1`, which is 1 where nothing is stretched.
    #[must_use]
    pub fn magnitude(factor: f64, scale: f64) -> f64 {
        if factor <= 1.0 {
            return 1.0;
        }
        0.1 * scale * factor.ln() + 1.0
    }

    /// How much of a pair's frequency is divided, 0 to 1.
    fn divided(&self, pair: usize, dimensions: usize, theta: f64) -> f64 {
        // The pair that turns `turns` times within the original context.
        let pair_of = |turns: f64| {
            let context = self.original_context as f64;
            dimensions as f64 * (context / (turns * TAU)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        low = low.max(0.0);
        high = high.min(dimensions as f64 - 1.0);
        if low == high {
            // As the reference does, so that nothing is divided by zero.
            high += 0.001;
        }
        ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0)
    }
}

impl LongRope {
    /// What vectors are multiplied by where a file does not say.
    #[must_use]
    pub fn usual_attention_factor(original_context: usize, context: usize) -> f64 {
        if context <= original_context || original_context < 2 {
            return 1.0;
        }
        let (context, original) = (context as f64, original_context as f64);
        (1.0 + (context / original).ln() / original.ln()).sqrt()
    }
}

impl Rope {
    /// Rotations per token of each element pair, in radians: `dimensions / 2` values. What a file
    /// divides them by besides is not in them, nor are the tables of [`RopeScaling::LongRope`].
    #[must_use]
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let half = (self.dimensions / 4).max(1);
        // The place of a pair in a series, and the elements that it is for.
        let place = |pair: usize| match self.axes {
            // Each half of a patch's pairs begins anew.
            RopeAxes::Patch | RopeAxes::PatchByColumn => (pair % half, self.dimensions / 2),
            RopeAxes::PatchInTurn => (2 * (pair % half) + pair / half, self.dimensions),
            RopeAxes::One | RopeAxes::Sections(_) | RopeAxes::Interleaved(_) => {
                (pair, self.dimensions)
            }
        };
        let frequency = |pair: usize| {
            let (place, elements) = place(pair);
            self.theta.powf(-2.0 * place as f64 / elements as f64)
        };
        (0..self.dimensions / 2)
            .map(|pair| self.scaled(pair, frequency(pair)) as f32)
            .collect()
    }

    /// What rotated vectors are multiplied by.
    #[must_use]
    pub fn attention_factor(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor as f32,
            RopeScaling::LongRope(long) => long.attention_factor as f32,
            _ => 1.0,
        }
    }

    fn scaled(&self, pair: usize, frequency: f64) -> f64 {
        match self.scaling {
            RopeScaling::None | RopeScaling::LongRope(_) => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let turns = original_context as f64 * frequency / TAU;
                let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let keep = keep.clamp(0.0, 1.0);
                (1.0 - keep) * frequency / factor + keep * frequency
            }
            RopeScaling::Yarn(yarn) => {
                let divided = yarn.divided(pair, self.dimensions, self.theta);
                divided * frequency / yarn.factor + (1.0 - divided) * frequency
            }
            RopeScaling::Proportional { fraction } => {
                let turning = (fraction * self.dimensions as f64 / 2.0) as usize;
                if pair < turning { frequency } else { 0.0 }
            }
        }
    }
}

impl fmt::Display for Rope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "theta {}", self.theta)?;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => write!(f, ", linear scaling by {factor}"),
            RopeScaling::Llama3 {
                factor,
                original_context,
                ..
            } => write!(
                f,
                ", llama3 scaling by {factor} beyond {original_context} tokens"
            ),
            RopeScaling::Yarn(Yarn {
                factor,
                original_context,
                ..
            }) => write!(f, ", YaRN by {factor} beyond {original_context} tokens"),
            RopeScaling::LongRope(long) => {
                write!(f, ", longrope beyond {} tokens", long.original_context)
            }
            RopeScaling::Proportional { fraction } => {
                write!(f, ", {} % of all pairs", 100.0 * fraction)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope {
            style: RopeStyle::HalfSplit,
            dimensions: 64,
            theta: 1e4,
            scaling,
            file_factors: false,
            axes: RopeAxes::One,
        }
    }

    #[test]
    fn llama3_scaling_keeps_short_and_divides_long_wavelengths() {
        let rope = rope(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        });
        let scale = |frequency| rope.scaled(0, frequency);
        assert_eq!(scale(1.0), 1.0);
        let slow = TAU / 10_000.0;
        assert!((scale(slow) - slow / 8.0).abs() < 1e-12);
        let middle = TAU * 2.5 / 8192.0;
        assert!((scale(middle) / middle - (0.5 / 8.0 + 0.5)).abs() < 1e-12);
    }

    #[test]
    fn yarn_keeps_fast_pairs_divides_slow_ones_and_lengthens_vectors() {
        let plain = rope(RopeScaling::None).inverse_frequencies();
        let yarn = rope(RopeScaling::Yarn(Yarn {
            factor: 4.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: Yarn::usual_attention_factor(4.0),
        }));
        let scaled = yarn.inverse_frequencies();
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[31], plain[31] / 4.0);
        let between = scaled.iter().zip(&plain).map(|(a, b)| a / b);
        assert!(
            between.clone().is_sorted_by(|a, b| a >= b),
            "{:?}",
            between.collect::<Vec<_>>()
        );
        assert!((yarn.attention_factor() - 1.138_629).abs() < 1e-6);
    }

    #[test]
    fn pairs_turn_by_time_row_and_column() {
        let of = |axes: RopeAxes, pairs| axes.of_pairs(pairs);
        assert_eq!(of(RopeAxes::One, 2), [0, 0]);
        let sections = of(RopeAxes::Sections([2, 1, 1]), 4);
        assert_eq!(sections, [0, 0, 1, 2]);
        let interleaved = of(RopeAxes::Interleaved([4, 2, 2]), 8);
        assert_eq!(interleaved, [0, 1, 2, 0, 1, 2, 0, 0]);
        assert_eq!(of(RopeAxes::Patch, 4), [0, 0, 1, 1]);
        assert_eq!(of(RopeAxes::PatchByColumn, 4), [1, 1, 0, 0]);
    }

    #[test]
    fn halves_of_a_patchs_pairs_have_the_same_frequencies_or_take_turns() {
        let patch = Rope {
            dimensions: 8,
            axes: RopeAxes::Patch,
            ..rope(RopeScaling::None)
        };
        let found = patch.inverse_frequencies();
        assert_eq!(found, [1.0, 0.01, 1.0, 0.01]);
        let in_turn = Rope {
            axes: RopeAxes::PatchInTurn,
            ..patch
        };
        let found = in_turn.inverse_frequencies();
        assert_eq!(found, [1.0, 0.01, 0.1, 0.001]);
    }

    #[test]
    fn proportional_rotation_leaves_the_slow_pairs_where_they_are() {
        let plain = rope(RopeScaling::None).inverse_frequencies();
        let part = rope(RopeScaling::Proportional { fraction: 0.25 }).inverse_frequencies();
        assert_eq!(part[..8], plain[..8]);
        assert!(part[8..].iter().all(|&frequency| frequency == 0.0));
    }
}
