//! What most models have in common, of which a family changes what is its own.

use super::{
    Activation, Attention, Biases, FeedForward, Gate, Gated, LayerSpec, Mask, ModelSpec, Norm,
    NormKind, Norms, OutputSpec, ResidualScale, Values,
};

impl ModelSpec {
    /// A model in which nothing is around the layers but norms by the root mean square. Its sizes, the norms' epsilon
    /// and its layers are for whoever makes it to say: as they are here, validation refuses them.
    pub(crate) const fn usual(family: &'static str, output: OutputSpec) -> Self {
        Self {
            family,
            hidden: 0,
            vocabulary: 0,
            context_tokens: 0,
            norm: Norm {
                kind: NormKind::Rms,
                epsilon: 0.0,
            },
            embedding_scale: None,
            patches: None,
            images: None,
            learned_input: None,
            per_layer_inputs: None,
            altup: None,
            bounded: false,
            ropes: Vec::new(),
            layers: Vec::new(),
            layers_ahead: 0,
            head: None,
            output,
        }
    }
}

impl LayerSpec {
    /// Attention and a feed-forward block, with a norm before each.
    pub(crate) fn usual(attention: Attention, feed_forward: FeedForward) -> Self {
        Self {
            attention: Some(attention),
            ..Self::without_attention(feed_forward)
        }
    }

    /// The same for a layer that has something else in the place of attention.
    pub(crate) fn without_attention(feed_forward: FeedForward) -> Self {
        Self {
            attention: None,
            recurrence: None,
            feed_forward,
            norms: Norms::Before,
            laurel: None,
            residual_scale: ResidualScale::default(),
            output_scale: false,
        }
    }
}

impl Attention {
    /// All heads have keys and values of their own, which the first of the model's rotations turns, and see what was before.
    pub(crate) fn usual(heads: usize, head_dim: usize) -> Self {
        Self {
            query_heads: heads,
            kv_heads: heads,
            head_dim,
            mask: Mask::Causal,
            rope: Some(0),
            qk_norm: None,
            value_norm: false,
            values: Values::Projected,
            scale: 1.0 / (head_dim as f32).sqrt(),
            soft_cap: None,
            temperature: None,
            shares: None,
            biases: Biases::default(),
            sinks: false,
            gate: Gate::None,
            latent: None,
        }
    }
}

impl Biases {
    /// All products must come with one.
    pub(crate) const ALL: Self = Self {
        projections: true,
        output: true,
    };
}

impl Gated {
    /// Gates as they are, none of them cut off.
    pub(crate) const fn usual(inner: usize, activation: Activation) -> Self {
        Self {
            inner,
            activation,
            gate_scale: None,
            gate_cutoff: None,
        }
    }

    /// Whether most gates are exactly zero, so that the neurons they belong to add nothing.
    pub(crate) const fn has_sparse_gates(&self) -> bool {
        let cut_off = self.gate_cutoff.is_some() && self.activation.keeps_zeros();
        cut_off || self.activation.leaves_zeros()
    }
}
