//! What a decoder model is, in numbers: the one description every file format is read into.
//!
//! A [`Config`] is made by [`crate::architecture`] from GGUF metadata or a Hugging Face
//! `config.json` and checked once in [`Config::validate`]; everything after that trusts it.

use std::f64::consts::TAU;
use std::fmt;

use lacuna_kernels::{AttentionShape, RopeStyle};
use lacuna_kv::{Geometry, KvElements};

use crate::error::ConfigError;
pub use crate::files::huggingface::RopeScaling;

/// Shape and constants of one decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Architecture name as GGUF spells it, e.g. `qwen3`.
    pub architecture: &'static str,
    /// Decoder blocks.
    pub layers: usize,
    /// Width of the residual stream, in elements.
    pub hidden: usize,
    /// Query heads per layer.
    pub query_heads: usize,
    /// Key/value heads per layer; divides `query_heads`.
    pub kv_heads: usize,
    /// Elements per head; independent of `hidden / query_heads`.
    pub head_dim: usize,
    /// Inner width of the gated feed-forward block, in elements.
    pub feed_forward: usize,
    /// Rows of the embedding table and of the logits.
    pub vocabulary: usize,
    /// Tokens the model was made for.
    pub context_tokens: usize,
    /// Epsilon of every RMS norm.
    pub norm_epsilon: f32,
    /// Rotary position embedding.
    pub rope: Rope,
}

/// Rotary position embedding: pairing of elements, base and scaling.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Which elements of a head rotate together.
    pub style: RopeStyle,
    /// Base of the geometric frequency series.
    pub theta: f64,
    /// How frequencies are stretched for contexts longer than trained.
    pub scaling: RopeScaling,
}

impl Config {
    /// Bounds that hold for any model this program can run. They keep arithmetic on sizes far from
    /// overflow, whatever a file says.
    const LIMITS: [(&'static str, usize); 7] = [
        ("layers", 4096),
        ("hidden", 1 << 20),
        ("query_heads", 4096),
        ("kv_heads", 4096),
        ("head_dim", AttentionShape::MAX_HEAD_DIM),
        ("feed_forward", 1 << 22),
        ("vocabulary", 1 << 24),
    ];

    /// Query heads per key/value head that attention takes.
    const MAX_GROUP: usize = 64;

    /// Checks every number against its range and against the others.
    ///
    /// # Errors
    /// The first [`ConfigError`] found, naming the field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let values = [
            self.layers,
            self.hidden,
            self.query_heads,
            self.kv_heads,
            self.head_dim,
            self.feed_forward,
            self.vocabulary,
        ];
        for ((field, limit), value) in Self::LIMITS.into_iter().zip(values) {
            if value == 0 || value > limit {
                return Err(ConfigError::OutOfRange {
                    field,
                    value,
                    limit,
                });
            }
        }
        if self.context_tokens == 0 {
            return Err(ConfigError::OutOfRange {
                field: "context_tokens",
                value: 0,
                limit: usize::MAX,
            });
        }
        let group = self.query_heads / self.kv_heads;
        if !self.query_heads.is_multiple_of(self.kv_heads) || group > Self::MAX_GROUP {
            return Err(ConfigError::HeadGrouping {
                query_heads: self.query_heads,
                kv_heads: self.kv_heads,
            });
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(ConfigError::OddHeadDim {
                head_dim: self.head_dim,
            });
        }
        self.validate_constants()
    }

    fn validate_constants(&self) -> Result<(), ConfigError> {
        let mut constants = vec![
            ("norm_epsilon", f64::from(self.norm_epsilon)),
            ("rope theta", self.rope.theta),
        ];
        match self.rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => constants.push(("rope factor", factor)),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                constants.extend([
                    ("rope factor", factor),
                    ("rope low_freq_factor", low_freq_factor),
                    ("rope high_freq_factor", high_freq_factor),
                    ("rope frequency band", high_freq_factor - low_freq_factor),
                    ("rope original context", original_context as f64),
                ]);
            }
        }
        match constants
            .into_iter()
            .find(|(_, value)| !(value.is_finite() && *value > 0.0))
        {
            None => Ok(()),
            Some((field, value)) => Err(ConfigError::NotPositive { field, value }),
        }
    }

    /// Elements of one K (or V) row: `kv_heads x head_dim`.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Shape of a KV cache of this model.
    #[must_use]
    pub fn kv_geometry(&self, elements: KvElements) -> Geometry {
        Geometry::uniform(self.layers, self.kv_heads, self.head_dim, elements)
    }

    /// Elements of one token's queries: `query_heads x head_dim`.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }
}

impl Rope {
    /// Rotations per token of each element pair, in radians: `head_dim / 2` values.
    #[must_use]
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let frequency = |pair: usize| self.theta.powf(-2.0 * pair as f64 / head_dim as f64);
        (0..head_dim / 2)
            .map(|pair| scale(&self.scaling, frequency(pair)) as f32)
            .collect()
    }
}

impl fmt::Display for Rope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "theta {}", self.theta)?;
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => write!(f, ", linear scaling by {factor}"),
            RopeScaling::Llama3 {
                factor,
                original_context,
                ..
            } => {
                write!(
                    f,
                    ", llama3 scaling by {factor} beyond {original_context} tokens"
                )
            }
        }
    }
}

fn scale(scaling: &RopeScaling, frequency: f64) -> f64 {
    match *scaling {
        RopeScaling::None => frequency,
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            architecture: "qwen3",
            layers: 2,
            hidden: 64,
            query_heads: 4,
            kv_heads: 2,
            head_dim: 32,
            feed_forward: 96,
            vocabulary: 100,
            context_tokens: 128,
            norm_epsilon: 1e-6,
            rope: Rope {
                style: RopeStyle::HalfSplit,
                theta: 1e4,
                scaling: RopeScaling::None,
            },
        }
    }

    #[test]
    fn zero_and_absurd_sizes_are_named() {
        let zero = Config {
            layers: 0,
            ..config()
        };
        assert!(zero.validate().unwrap_err().to_string().contains("layers"));
        let huge = Config {
            vocabulary: usize::MAX,
            ..config()
        };
        assert!(
            huge.validate()
                .unwrap_err()
                .to_string()
                .contains("vocabulary")
        );
    }

    #[test]
    fn heads_that_do_not_group_are_refused() {
        let odd = Config {
            query_heads: 5,
            ..config()
        };
        assert!(matches!(
            odd.validate(),
            Err(ConfigError::HeadGrouping { .. })
        ));
        let odd = Config {
            head_dim: 33,
            ..config()
        };
        assert!(matches!(
            odd.validate(),
            Err(ConfigError::OddHeadDim { head_dim: 33 })
        ));
    }

    #[test]
    fn constants_must_be_positive_and_finite() {
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let broken = Config {
                norm_epsilon: bad,
                ..config()
            };
            assert!(matches!(
                broken.validate(),
                Err(ConfigError::NotPositive { .. })
            ));
        }
        let rope = Rope {
            scaling: RopeScaling::Linear { factor: 0.0 },
            ..config().rope
        };
        assert!(Config { rope, ..config() }.validate().is_err());
    }

    #[test]
    fn llama3_scaling_keeps_short_and_divides_long_wavelengths() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        assert_eq!(scale(&scaling, 1.0), 1.0);
        let slow = TAU / 10_000.0;
        assert!((scale(&scaling, slow) - slow / 8.0).abs() < 1e-12);
        let middle = TAU * 2.5 / 8192.0;
        assert!((scale(&scaling, middle) / middle - (0.5 / 8.0 + 0.5)).abs() < 1e-12);
    }
}
