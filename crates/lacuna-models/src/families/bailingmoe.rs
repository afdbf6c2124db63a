//! The first Ling and Ring (Bailing): one matrix for queries, keys and values, experts by a softmax, and a block
//! that all tokens have.

use lacuna_kernels::RopeStyle;

use super::decoder::decoder;
use super::experts::{experts, give_experts, normalized, scale, shared};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "bailingmoe",
    classes: &["BailingMoeForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("token_embd", "model.word_embeddings"),
            ("attn_qkv", "attention.query_key_value"),
            ("attn_output", "attention.dense"),
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    spec.ropes[0].style = facts.style(RopeStyle::Interleaved);
    // Converters divide the rows of such a matrix by their length; nothing here does.
    let supported = "output matrices that are used as they are in the files are; convert the folder to GGUF";
    facts.expect(Key::huggingface("norm_head"), false, supported)?;
    let mut experts = experts(facts, &mut spec)?;
    experts.routing.normalized = normalized(facts, true)?;
    experts.routing.scale = scale(facts)?;
    experts.shared = shared(facts, experts.inner, false)?;
    let dense = Key::new("leading_dense_block_count", "first_k_dense_replace");
    let dense: Option<usize> = facts.get(dense)?;
    give_experts(&mut spec, experts, |layer| layer >= dense.unwrap_or(0));
    Ok(spec)
}
