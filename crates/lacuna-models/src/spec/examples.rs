//! Small specs for tests.

use lacuna_kernels::RopeStyle;

use super::{
    Activation, Attention, Biases, FeedForward, Gated, LayerSpec, Mask, ModelSpec, Norm, NormKind,
    Norms, OutputMatrix, OutputSpec, QkNorm, Rope, RopeScaling, Values,
};

/// A decoder of three layers, all alike.
pub(crate) fn small() -> ModelSpec {
    let layer = LayerSpec {
        attention: Attention {
            query_heads: 6,
            kv_heads: 2,
            head_dim: 32,
            mask: Mask::Causal,
            rope: Some(0),
            qk_norm: Some(QkNorm::PerHead),
            value_norm: false,
            values: Values::Projected,
            scale: 0.25,
            soft_cap: None,
            temperature: None,
            shares: None,
            biases: Biases::default(),
            sinks: false,
        },
        feed_forward: FeedForward::Gated(Gated {
            inner: 160,
            activation: Activation::Silu,
            gate_cutoff: None,
        }),
        norms: Norms::Before,
        laurel: None,
        residual_scale: None,
        output_scale: false,
    };
    ModelSpec {
        family: "qwen3",
        hidden: 96,
        vocabulary: 500,
        context_tokens: 256,
        norm: Norm {
            kind: NormKind::Rms,
            epsilon: 1e-6,
        },
        embedding_scale: None,
        per_layer_inputs: None,
        altup: None,
        ropes: vec![Rope {
            style: RopeStyle::HalfSplit,
            dimensions: 32,
            theta: 1e4,
            scaling: RopeScaling::None,
            file_factors: false,
        }],
        layers: vec![layer; 3],
        layers_ahead: 0,
        output: OutputSpec {
            matrix: OutputMatrix::Tied,
            scale: None,
            soft_cap: None,
        },
    }
}

impl LayerSpec {
    /// Its dense feed-forward block.
    pub(crate) fn gated(&mut self) -> &mut Gated {
        self.feed_forward.gated_mut().expect("a dense layer")
    }
}

impl ModelSpec {
    /// The same with every layer changed.
    pub(crate) fn each_layer(mut self, change: impl Fn(&mut LayerSpec)) -> Self {
        self.layers.iter_mut().for_each(change);
        self
    }
}
