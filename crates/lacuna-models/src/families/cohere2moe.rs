//! Cohere 2 with experts (North Mini Code): dense first layers, whose positions are encoded whether they have a
//! window or not, then experts that a block that all tokens have is averaged with.

use super::command_r::cohere;
use super::decoder::{decoder, give_windows};
use super::experts::{experts, gating, give_experts, normalized, shared, sparse_layers};
use super::facts::Key;
use super::glm4moe::leave_out_layers_ahead;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Mask, ModelSpec, NormKind, ResidualScale, Scores};

pub(crate) const FAMILY: Family = Family {
    name: "cohere2moe",
    classes: &["Cohere2MoeForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

/// Where neither kind of file says otherwise, every fourth layer is without a window: of GGUF files the first.
const USUAL_PERIOD: usize = 4;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    cohere(&mut spec, facts)?;
    // Where a file says both, its norms are by the root of the mean square.
    let rms = facts.get(Key::new("attention.layer_norm_rms_epsilon", "rms_norm_eps"))?;
    if let Some(epsilon) = rms {
        spec.norm.kind = NormKind::Rms;
        spec.norm.epsilon = epsilon;
    }
    let layers = spec.layers.len();
    let dense: Option<usize> =
        facts.get(Key::new("leading_dense_block_count", "first_k_dense_replace"))?;
    let dense = dense.unwrap_or(0);
    let prefix = Key::huggingface("prefix_dense_sliding_window_pattern");
    let prefix: usize = facts.get(prefix)?.unwrap_or(1);
    let windowed = match facts.layer_types()? {
        Some(windowed) => windowed,
        None if facts.is_gguf() => facts.windowed_after_first(layers, USUAL_PERIOD)?,
        None => {
            let period: Option<usize> = facts.get(Key::huggingface("sliding_window_pattern"))?;
            let is_full = |layer: usize, period: usize| (layer + 1).is_multiple_of(period.max(1));
            let windowed = (0..layers).map(|layer| match layer.checked_sub(dense) {
                None => !is_full(layer, prefix),
                Some(layer) => !is_full(layer, period.unwrap_or(USUAL_PERIOD)),
            });
            windowed.collect()
        }
    };
    give_windows(&mut spec, facts, &windowed)?;
    let sparse = sparse_layers(facts, layers)?;
    let sparse: Vec<bool> = match sparse {
        Some(sparse) => sparse,
        None => (0..layers).map(|layer| layer >= dense).collect(),
    };
    for (layer, sparse) in spec.layers.iter_mut().zip(&sparse) {
        // Those with experts and no window do not encode positions.
        let turns = layer.mask() != Some(Mask::Causal) || (!sparse && prefix == 1);
        layer.attention_mut().rope = turns.then_some(0);
    }
    let mut experts = experts(facts, &mut spec)?;
    // The width of experts is that of feed-forward blocks, and dense ones have another.
    experts.routing.normalized = normalized(facts, !facts.is_gguf())?;
    let scores: Option<String> = facts.get(Key::huggingface("expert_selection_fn"))?;
    let by_sigmoid = match facts.get::<usize>(gating::KEY)? {
        Some(function) => function == gating::SIGMOID,
        None => facts.is_gguf() || scores.as_deref() == Some("sigmoid"),
    };
    match by_sigmoid {
        true => experts.routing.scores = Scores::Sigmoid,
        // Over the chosen alone, which is to have those of all sum to 1.
        false => experts.routing.normalized = true,
    }
    experts.shared = shared(facts, experts.inner, false)?;
    let strategy = Key::huggingface("shared_expert_combination_strategy");
    let strategy: Option<String> = facts.get(strategy)?;
    let averaged = experts.shared.is_some() && strategy.as_deref() != Some("sum");
    let dense_inner: Option<usize> =
        facts.get(Key::huggingface("prefix_dense_intermediate_size"))?;
    for (layer, sparse) in spec.layers.iter_mut().zip(&sparse) {
        if let (Some(inner), Some(block)) = (dense_inner, layer.feed_forward.gated_mut()) {
            block.inner = inner;
        }
        if averaged && *sparse {
            layer.residual_scale = ResidualScale {
                feed_forward: Some(0.5),
                ..ResidualScale::default()
            };
        }
    }
    give_experts(&mut spec, experts, |layer| sparse[layer]);
    Ok(spec)
}
