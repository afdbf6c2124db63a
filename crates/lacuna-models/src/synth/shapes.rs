//! The shapes of published models, as data, and the tensors that follow from them.

use std::f64::consts::PI;

use super::Error;
use super::types::{LayerTypes, Types};
use crate::files::DType;

/// How a model's layers are built, which decides its tensors and metadata keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama 3: no biases, no query and key norms.
    Llama,
    /// Qwen 2.5: query, key and value biases.
    Qwen2,
    /// Qwen 3: query and key norms.
    Qwen3,
}

impl Architecture {
    /// GGUF's name, which is also the prefix of its metadata keys.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// A published model's dimensions, from its `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Shape {
    /// The name it is asked for by.
    pub name: &'static str,
    /// How its layers are built.
    pub architecture: Architecture,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the feed-forward block.
    pub feed_forward: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_size: usize,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
    /// The longest context.
    pub context: usize,
    /// Rotary base.
    pub rope_theta: f32,
    /// Divisor of low rotation frequencies in the manner of Llama 3.1, over a context of 8,192.
    pub rope_factor: Option<f64>,
    /// Added to the mean square in normalization.
    pub norm_epsilon: f32,
}

const QWEN3: Shape = Shape {
    name: "",
    architecture: Architecture::Qwen3,
    layers: 28,
    hidden: 1024,
    feed_forward: 3072,
    heads: 16,
    kv_heads: 8,
    head_size: 128,
    vocabulary: 151_936,
    tied: true,
    context: 40_960,
    rope_theta: 1e6,
    rope_factor: None,
    norm_epsilon: 1e-6,
};

const LLAMA3: Shape = Shape {
    name: "",
    architecture: Architecture::Llama,
    layers: 32,
    hidden: 4096,
    feed_forward: 14_336,
    heads: 32,
    kv_heads: 8,
    head_size: 128,
    vocabulary: 128_256,
    tied: false,
    context: 8192,
    rope_theta: 5e5,
    rope_factor: None,
    norm_epsilon: 1e-5,
};

/// Every shape there is, smallest first within a family.
pub const SHAPES: &[Shape] = &[
    Shape {
        name: "qwen3-0.6b",
        ..QWEN3
    },
    Shape {
        name: "qwen3-1.7b",
        hidden: 2048,
        feed_forward: 6144,
        ..QWEN3
    },
    Shape {
        name: "qwen3-4b",
        layers: 36,
        hidden: 2560,
        feed_forward: 9728,
        heads: 32,
        ..QWEN3
    },
    Shape {
        name: "qwen3-8b",
        layers: 36,
        hidden: 4096,
        feed_forward: 12_288,
        heads: 32,
        tied: false,
        ..QWEN3
    },
    Shape {
        name: "qwen2.5-0.5b",
        architecture: Architecture::Qwen2,
        layers: 24,
        hidden: 896,
        feed_forward: 4864,
        heads: 14,
        kv_heads: 2,
        head_size: 64,
        context: 32_768,
        ..QWEN3
    },
    Shape {
        name: "llama-3.2-1b",
        layers: 16,
        hidden: 2048,
        feed_forward: 8192,
        head_size: 64,
        tied: true,
        context: 131_072,
        rope_factor: Some(32.0),
        ..LLAMA3
    },
    Shape {
        name: "llama-3.2-3b",
        layers: 28,
        hidden: 3072,
        feed_forward: 8192,
        heads: 24,
        tied: true,
        context: 131_072,
        rope_factor: Some(32.0),
        ..LLAMA3
    },
    Shape {
        name: "llama-3-8b",
        ..LLAMA3
    },
    Shape {
        name: "llama-3-70b",
        layers: 80,
        hidden: 8192,
        feed_forward: 28_672,
        heads: 64,
        ..LLAMA3
    },
    Shape {
        name: "llama-3-405b",
        layers: 126,
        hidden: 16_384,
        feed_forward: 53_248,
        heads: 128,
        context: 131_072,
        rope_factor: Some(8.0),
        ..LLAMA3
    },
];

/// The names of all shapes, for messages.
pub(super) fn names() -> String {
    SHAPES
        .iter()
        .map(|shape| shape.name)
        .collect::<Vec<_>>()
        .join(", ")
}

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorPlan {
    pub(super) name: String,
    pub(super) dtype: DType,
    /// Outermost first.
    pub(super) shape: Vec<usize>,
    pub(super) contents: Contents,
}

/// What a tensor holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Contents {
    /// Random values of mean 0 and this standard deviation.
    Random { deviation: f32 },
    /// These values, of which there are few.
    Given(Vec<f32>),
}

impl Shape {
    /// The shape of this name.
    ///
    /// # Errors
    /// [`Error::UnknownShape`], which lists those there are.
    pub fn find(name: &str) -> Result<&'static Self, Error> {
        let found = SHAPES
            .iter()
            .find(|shape| shape.name.eq_ignore_ascii_case(name));
        found.ok_or_else(|| Error::UnknownShape {
            name: name.to_owned(),
        })
    }

    /// All tensors of a model with this many layers, in the order of the file.
    pub(super) fn tensors(&self, layers: usize, types: Types) -> Vec<TensorPlan> {
        let mut tensors = Vec::new();
        if let Some(factor) = self.rope_factor {
            tensors.push(vector(
                "rope_freqs.weight".into(),
                self.rope_factors(factor),
            ));
        }
        tensors.push(matrix(
            "token_embd.weight".into(),
            types.embedding(self.tied),
            self.vocabulary,
            self.hidden,
        ));
        for layer in 0..layers {
            let types = types.layer(layer, layers);
            self.layer(&format!("blk.{layer}"), types, &mut tensors);
        }
        tensors.push(ones("output_norm.weight".into(), self.hidden));
        if !self.tied {
            tensors.push(matrix(
                "output.weight".into(),
                types.output(),
                self.vocabulary,
                self.hidden,
            ));
        }
        tensors
    }

    fn layer(&self, prefix: &str, types: LayerTypes, tensors: &mut Vec<TensorPlan>) {
        let name = |part: &str| format!("{prefix}.{part}");
        let (query, key) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        tensors.push(ones(name("attn_norm.weight"), self.hidden));
        let parts = [
            ("attn_q", types.most, query),
            ("attn_k", types.most, key),
            ("attn_v", types.fine, key),
        ];
        for (part, dtype, rows) in parts {
            tensors.push(matrix(
                name(&format!("{part}.weight")),
                dtype,
                rows,
                self.hidden,
            ));
            if self.architecture == Architecture::Qwen2 {
                tensors.push(bias(name(&format!("{part}.bias")), rows));
            }
        }
        if self.architecture == Architecture::Qwen3 {
            tensors.push(ones(name("attn_q_norm.weight"), self.head_size));
            tensors.push(ones(name("attn_k_norm.weight"), self.head_size));
        }
        tensors.push(matrix(
            name("attn_output.weight"),
            types.most,
            self.hidden,
            query,
        ));
        tensors.push(ones(name("ffn_norm.weight"), self.hidden));
        tensors.push(matrix(
            name("ffn_gate.weight"),
            types.most,
            self.feed_forward,
            self.hidden,
        ));
        tensors.push(matrix(
            name("ffn_up.weight"),
            types.most,
            self.feed_forward,
            self.hidden,
        ));
        tensors.push(matrix(
            name("ffn_down.weight"),
            types.fine,
            self.hidden,
            self.feed_forward,
        ));
    }

    /// What rotation frequencies are divided by, as llama.cpp's converter computes it for Llama 3.1
    /// and later: 1 for short wavelengths, `factor` for long ones, blended between.
    fn rope_factors(&self, factor: f64) -> Vec<f32> {
        const ORIGINAL_CONTEXT: f64 = 8192.0;
        const LOW: f64 = 1.0;
        const HIGH: f64 = 4.0;
        let one = |pair: usize| {
            let exponent = 2.0 * pair as f64 / self.head_size as f64;
            let wavelength = 2.0 * PI * f64::from(self.rope_theta).powf(exponent);
            if wavelength < ORIGINAL_CONTEXT / HIGH {
                return 1.0;
            }
            if wavelength > ORIGINAL_CONTEXT / LOW {
                return factor;
            }
            let smooth = (ORIGINAL_CONTEXT / wavelength - LOW) / (HIGH - LOW);
            1.0 / ((1.0 - smooth) / factor + smooth)
        };
        (0..self.head_size / 2)
            .map(|pair| one(pair) as f32)
            .collect()
    }
}

/// A matrix that turns unit variance into unit variance.
fn matrix(name: String, dtype: DType, rows: usize, columns: usize) -> TensorPlan {
    let deviation = 1.0 / (columns as f32).sqrt();
    TensorPlan {
        name,
        dtype,
        shape: vec![rows, columns],
        contents: Contents::Random { deviation },
    }
}

fn ones(name: String, len: usize) -> TensorPlan {
    vector(name, vec![1.0; len])
}

fn bias(name: String, len: usize) -> TensorPlan {
    let contents = Contents::Random { deviation: 0.02 };
    TensorPlan {
        name,
        dtype: DType::F32,
        shape: vec![len],
        contents,
    }
}

fn vector(name: String, values: Vec<f32>) -> TensorPlan {
    TensorPlan {
        name,
        dtype: DType::F32,
        shape: vec![values.len()],
        contents: Contents::Given(values),
    }
}
