//! GLM 4.5 and later with experts, and Solar Open: sigmoids, a bias for choosing only, groups, a block that all
//! tokens have, dense first layers.

use super::decoder::decoder;
use super::experts::{give_experts, groups, sigmoid_experts};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{GroupScore, HeadKind, HeadSpec, ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "glm4moe",
    // GGUF files of both are of this family.
    classes: &["Glm4MoeForCausalLM", "SolarOpenForCausalLM"],
    spec,
    naming: Naming {
        parts: &[("exp_probs_b", "mlp.gate.e_score_correction_bias")],
        gguf: &[("ffn_norm", "post_attention_norm")],
        bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    let normed: Option<bool> = facts.get(Key::huggingface("use_qk_norm"))?;
    let normed = match facts.has_tensor("blk.0.attn_q_norm.weight") {
        Some(has) => has,
        None => normed.unwrap_or(false),
    };
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = normed.then_some(QkNorm::PerHead);
    }
    let mut experts = sigmoid_experts(facts, &mut spec)?;
    experts.routing.groups = groups(facts, GroupScore::SumOfTwo)?;
    let dense = Key::new("leading_dense_block_count", "first_k_dense_replace");
    let dense: Option<usize> = facts.get(dense)?;
    give_experts(&mut spec, experts, |layer| layer >= dense.unwrap_or(0));
    give_head(&mut spec);
    Ok(spec)
}

/// Leaves out blocks that foretell more than one token, which come after the others; only GGUF counts them
/// along.
pub(super) fn leave_out_layers_ahead(
    spec: &mut ModelSpec,
    facts: &Facts<'_>,
) -> Result<(), ConfigError> {
    let key = Key::new("nextn_predict_layers", "num_nextn_predict_layers");
    let ahead = match facts.get(key)? {
        Some(ahead) => ahead,
        None => facts.get(Key::huggingface("mtp_num_hidden_layers"))?.unwrap_or(0),
    };
    if facts.is_gguf() {
        let layers = spec.layers.len().saturating_sub(ahead);
        spec.layers.truncate(layers);
    }
    spec.layers_ahead = ahead;
    Ok(())
}

/// Has the first block ahead, if files say that there is one, guess tokens: it is built as the last layer with
/// attention is.
pub(super) fn give_head(spec: &mut ModelSpec) {
    if spec.layers_ahead > 0 {
        let mut layers = spec.layers.iter().rev();
        let layer = layers.find(|layer| layer.attention.is_some()).cloned();
        spec.head = layer.map(|layer| HeadSpec {
            layers: vec![layer],
            kind: HeadKind::Mtp,
        });
    }
}
