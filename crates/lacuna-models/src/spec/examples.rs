//! Small specs for tests.

use lacuna_kernels::RopeStyle;

use super::{
    Activation, Attention, ExpertBlock, Experts, FeedForward, Gated, Gating, GroupScore, Groups,
    Latent, LayerSpec, LogitsSpec, ModelSpec, Norm, NormKind, OutputMatrix, OutputSpec, QkNorm,
    Rope, RopeAxes, RopeScaling, Router, Routing, Scores, SharedExpert,
};

/// A decoder of three layers, all alike.
pub(crate) fn small() -> ModelSpec {
    let layer = LayerSpec::usual(
        Attention {
            kv_heads: 2,
            qk_norm: Some(QkNorm::PerHead),
            scale: 0.25,
            ..Attention::usual(6, 32)
        },
        FeedForward::Gated(Gated::usual(160, Activation::Silu)),
    );
    ModelSpec {
        hidden: 96,
        vocabulary: 500,
        context_tokens: 256,
        norm: Norm {
            kind: NormKind::Rms,
            epsilon: 1e-6,
        },
        ropes: vec![Rope {
            style: RopeStyle::HalfSplit,
            dimensions: 32,
            theta: 1e4,
            scaling: RopeScaling::None,
            file_factors: false,
            axes: RopeAxes::One,
        }],
        layers: vec![layer; 3],
        ..ModelSpec::usual(
            "qwen3",
            OutputSpec::Logits(LogitsSpec {
                matrix: OutputMatrix::Tied,
                scale: None,
                soft_cap: None,
            }),
        )
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
