//! The assistants of Gemma 4: a few small layers that have no keys and values of their own, but read those of the model's last
//! layers, one with a window and one without.
//!
//! They guess one token after the other from where the text ends: guesses get no rows. Logits are of all tokens; tables that pick
//! a few thousand of these first, which the smallest assistants have, are not used.

use lacuna_files::huggingface::Config;

use super::super::facts::Key;
use super::super::{Facts, gemma4};
use super::{Beside, Kind};
use crate::error::ConfigError;
use crate::spec::{Assistant, HeadKind, HeadSpec, Mask, ModelSpec};

pub(super) const KIND: Kind = Kind {
    architecture: "gemma4-assistant",
    is_folder: |config: &Config| config.class() == "Gemma4AssistantForCausalLM",
    parts: &[
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("layer_scalar", "layer_output_scale"),
        ("norm", "output_norm"),
        ("embed_tokens", "token_embd"),
        ("nextn.pre_projection", "pre_projection"),
        ("nextn.post_projection", "post_projection"),
    ],
    unused: &["masked_embedding.", "masked_embd_", "lm_head."],
    spec,
};

fn spec(facts: &Facts<'_>, beside: &Beside<'_>) -> Result<HeadSpec, ConfigError> {
    let model = beside.model;
    beside.check_width(facts.get(Key::new("embedding_length_out", "backbone_hidden_size"))?)?;
    let own = gemma4::layers_alike(facts)?;
    let mut layers = own.layers;
    for layer in &mut layers {
        let attention = layer.attention_mut();
        let source = rows_of(model, attention.mask);
        attention.shares = Some(source);
        // Files say how many heads the model's layers of a kind have, or how many it has in most.
        if let Some(theirs) = &model.layers[source].attention {
            attention.kv_heads = theirs.kv_heads;
        }
    }
    Ok(HeadSpec {
        layers,
        kind: HeadKind::Assistant(Assistant {
            hidden: own.hidden,
            norm: own.norm,
            ropes: own.ropes,
        }),
    })
}

/// The layer of `model` whose rows its last layer with this mask reads, its own or an earlier one's; the first where there is
/// none, which the check of rows refuses.
fn rows_of(model: &ModelSpec, mask: Mask) -> usize {
    let mut layers = model.layers.iter().enumerate().rev();
    let last = layers.find_map(|(index, layer)| {
        let attention = layer.attention.as_ref().filter(|it| it.mask == mask)?;
        Some(attention.shares.unwrap_or(index))
    });
    last.unwrap_or(0)
}
