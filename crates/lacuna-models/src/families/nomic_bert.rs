//! Nomic's BERT (nomic-embed-text v1 and v1.5): rotated queries and keys instead of learned positions, gated
//! feed-forward blocks, and no biases but those of norms.

use super::decoder::decoder;
use super::encoder::{expect_encoder, pooled, see_both_sides};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, LearnedInput, ModelSpec, NormKind, Norms, OutputSpec};

pub(crate) const FAMILY: Family = Family {
    name: "nomic-bert",
    classes: &["NomicBertModel"],
    spec,
    naming: Naming {
        parts: &[
            ("token_embd", "embeddings.word_embeddings"),
            ("token_types", "embeddings.token_type_embeddings"),
            ("token_embd_norm", "emb_ln"),
            ("attn_qkv", "attn.Wqkv"),
            ("attn_output", "attn.out_proj"),
            ("attn_output_norm", "norm1"),
            ("ffn_gate", "mlp.fc12"),
            ("ffn_up", "mlp.fc11"),
            ("ffn_down", "mlp.fc2"),
            ("layer_output_norm", "norm2"),
        ],
        layers: "encoder.layers",
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    expect_encoder(facts)?;
    let supported = "folders without experts are, and GGUF files of nomic-embed-text v2";
    facts.expect(Key::huggingface("moe_every_n_layers"), 0, supported)?;
    for (option, value) in [
        ("causal", false),
        ("prenorm", false),
        ("use_rms_norm", false),
        ("parallel_block", false),
        ("rotary_emb_interleaved", false),
        ("qkv_proj_bias", false),
        ("mlp_fc1_bias", false),
        ("mlp_fc2_bias", false),
    ] {
        let supported = "settings of nomic-embed-text are";
        facts.expect(Key::huggingface(option), value, supported)?;
    }
    let function = "swiglu".to_owned();
    facts.expect(Key::huggingface("activation_function"), function, "swiglu is")?;
    facts.expect(Key::huggingface("rotary_emb_fraction"), 1.0f32, "1 is")?;
    let mut spec = rotated(facts)?;
    for block in spec.layers.iter_mut().filter_map(|layer| layer.feed_forward.gated_mut()) {
        block.activation = Activation::Silu;
    }
    Ok(spec)
}

/// An encoder whose queries and keys turn, with norms of sums.
pub(super) fn rotated(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    spec.norm.kind = NormKind::BiasedLayer;
    let token_types = match facts.is_gguf() {
        true => facts.rows_of("token_types.weight"),
        false => facts.get(Key::huggingface("type_vocab_size"))?,
    };
    spec.learned_input = Some(LearnedInput {
        positions: None,
        token_types: token_types.filter(|rows| *rows > 0),
    });
    see_both_sides(&mut spec);
    for layer in &mut spec.layers {
        layer.norms = Norms::AfterSum;
    }
    spec.output = OutputSpec::Pooled(pooled(facts, None)?);
    Ok(spec)
}
