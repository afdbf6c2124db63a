//! Small specs for tests.

use lacuna_kernels::RopeStyle;

use super::{
    Activation, Attention, Biases, ExpertBlock, Experts, FeedForward, Gate, Gated, Gating,
    GroupScore, Groups, Latent, LayerSpec, LogitsSpec, Mask, ModelSpec, Norm, NormKind, Norms,
    OutputMatrix, OutputSpec, QkNorm, ResidualScale, Rope, RopeAxes, RopeScaling, Router, Routing,
    Scores, SharedExpert, Values,
};

/// A decoder of three layers, all alike.
pub(crate) fn small() -> ModelSpec {
    let layer = LayerSpec {
        attention: Some(Attention {
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
            gate: Gate::None,
            latent: None,
        }),
        recurrence: None,
        feed_forward: FeedForward::Gated(Gated {
            inner: 160,
            activation: Activation::Silu,
            gate_scale: None,
            gate_cutoff: None,
        }),
        norms: Norms::Before,
        laurel: None,
        residual_scale: ResidualScale::default(),
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
        patches: None,
        images: None,
        learned_input: None,
        per_layer_inputs: None,
        altup: None,
        ropes: vec![Rope {
            style: RopeStyle::HalfSplit,
            dimensions: 32,
            theta: 1e4,
            scaling: RopeScaling::None,
            file_factors: false,
            axes: RopeAxes::One,
        }],
        layers: vec![layer; 3],
        layers_ahead: 0,
        head: None,
        output: OutputSpec::Logits(LogitsSpec {
            matrix: OutputMatrix::Tied,
            scale: None,
            soft_cap: None,
        }),
    }
}

impl LayerSpec {
    /// Its dense feed-forward block.
    pub(crate) fn gated(&mut self) -> &mut Gated {
        self.feed_forward.gated_mut().expect("a dense layer")
    }
}

/// A mixture of eight experts in four groups of two, of which a token has three of two groups.
pub(crate) const EXPERTS: Experts = Experts {
    routing: Routing {
        experts: 8,
        used: 3,
        scores: Scores::Sigmoid,
        groups: Some(Groups {
            count: 4,
            used: 2,
            score: GroupScore::SumOfTwo,
        }),
        normalized: true,
        scale: 1.0,
    },
    router: Router {
        bias: false,
        selection_bias: true,
        expert_scales: false,
        own_input: false,
    },
    inner: 32,
    block: ExpertBlock::Gated(Gating::Product(Activation::Silu)),
    latent: None,
    biases: false,
    shared: Some(SharedExpert {
        inner: 32,
        gated: true,
    }),
    dense: None,
};

/// The same with latent rows of 24 elements and 8 that positions turn.
pub(crate) fn latent() -> ModelSpec {
    let mut spec = small().each_layer(|layer| {
        let attention = layer.attention_mut();
        attention.kv_heads = 1;
        attention.qk_norm = None;
        attention.latent = Some(Latent {
            rank: 24,
            key_dim: 16,
            value_dim: 20,
            query_rank: None,
        });
    });
    spec.ropes[0].dimensions = 8;
    spec
}

impl ModelSpec {
    /// The same with every layer changed.
    pub(crate) fn each_layer(mut self, change: impl Fn(&mut LayerSpec)) -> Self {
        self.layers.iter_mut().for_each(change);
        self
    }
}
