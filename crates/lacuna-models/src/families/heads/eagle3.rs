//! EAGLE-3: a layer that others have trained for a model, as `speculators`, SpecForge and the makers of EAGLE write it and as
//! llama.cpp converts it.

use std::num::NonZeroUsize;

use lacuna_files::huggingface::Config;
use lacuna_files::{Metadata, Tensors};
use lacuna_kernels::RopeStyle;

use super::super::Facts;
use super::super::decoder::decoder;
use super::super::facts::{Key, PerLayer};
use super::{Beside, Kind};
use crate::error::{ConfigError, LoadError};
use crate::spec::{Eagle3, HeadKind, HeadResidual, HeadSpec, ModelSpec, QkNorm, TapNorm};

pub(super) const KIND: Kind = Kind {
    architecture: "eagle3",
    is_folder: says_head,
    parts: &[
        ("input_layernorm", "attn_norm"),
        ("hidden_norm", "attn_norm_2"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.gate_up_proj", "ffn_gate_up"),
        ("mlp.down_proj", "ffn_down"),
        ("norm", "output_norm"),
        ("lm_head", "output"),
        ("embed_tokens", "token_embd"),
        // GGUF's name of the norm of all taps.
        ("enc.output_norm", "input_norm"),
    ],
    // The tokens of the model that it can guess, which the others say as well; and frequencies, as the description has them.
    unused: &["t2d", "self_attn.rotary_emb."],
    spec,
};

/// The tokens that its outputs are of.
const TOKENS: &str = "head/d2t";

/// Some folders name no class of their own. `speculators` says which of several kinds of heads it has written.
fn says_head(config: &Config) -> bool {
    match config.map().get("speculators_model_type") {
        Some(kind) => kind.as_str() == Some("eagle3"),
        None => config.map().contains_key("draft_vocab_size"),
    }
}

fn spec(facts: &Facts<'_>, beside: &Beside<'_>) -> Result<HeadSpec, ConfigError> {
    let spec = decoder(facts)?;
    beside.check_width(facts.get(Key::new("target_hidden_size", "target_hidden_size"))?)?;
    beside.check_width(Some(spec.hidden))?;
    let mut layers = spec.layers;
    let [layer] = layers.as_mut_slice() else {
        return Err(ConfigError::Unsupported {
            feature: format!("an EAGLE-3 head of {} layers", layers.len()),
            supported: "heads of one layer are",
        });
    };
    if beside.has("attn_q_norm") {
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
    }
    let mut ropes = spec.ropes;
    // The converter permutes the rows of queries and keys, as Llama's.
    ropes[0].style = facts.style(RopeStyle::Interleaved);
    let flag = |key| facts.get::<bool>(key).map(Option::unwrap_or_default);
    let outputs = beside.tensors.rows("head/output.weight");
    let eagle = Eagle3 {
        taps: taps(facts, beside.model.layers.len())?,
        tap_norm: match (beside.has("input_norm"), beside.has("fc_norm.0")) {
            (true, _) => TapNorm::Whole,
            (_, true) => TapNorm::Each,
            (false, false) => TapNorm::None,
        },
        norm: spec.norm,
        ropes,
        residual: match flag(Key::new("norm_before_residual", "norm_before_residual"))? {
            true => HeadResidual::Normed,
            false => HeadResidual::Features,
        },
        normed_features: flag(Key::new("norm_output", "norm_output"))?,
        own_embedding: beside.has("token_embd"),
        own_outputs: outputs.and_then(NonZeroUsize::new),
    };
    Ok(HeadSpec {
        layers,
        kind: HeadKind::Eagle3(eagle),
    })
}

/// The layers whose inputs it reads: a low, a middle and a high one of `layers` where files do not say.
fn taps(facts: &Facts<'_>, layers: usize) -> Result<Vec<usize>, ConfigError> {
    let keys = [
        Key::new("target_layers", "eagle_aux_hidden_state_layer_ids"),
        Key::new("extract_layers", "aux_hidden_state_layer_ids"),
    ];
    for key in keys {
        if let Some(PerLayer::Each(taps)) = facts.get(key)? {
            return Ok(taps);
        }
    }
    let inside: Option<PerLayer<usize>> =
        facts.of_field("eagle_config", "eagle_aux_hidden_state_layer_ids")?;
    match inside {
        Some(PerLayer::Each(taps)) => Ok(taps),
        _ => Ok(vec![2.min(layers), layers / 2, layers.saturating_sub(3)]),
    }
}

/// The tokens that the outputs of a model's head are of, which has as many as `spec` says; `None` where they are the model's
/// own.
pub(crate) fn tokens(
    metadata: &Metadata,
    tensors: &Tensors,
    spec: &ModelSpec,
) -> Result<Option<Vec<u32>>, LoadError> {
    let outputs = spec.head_outputs();
    let Some(found) = tensors.integers(TOKENS)? else {
        return match outputs == spec.vocabulary {
            true => Ok(None),
            false => Err(ConfigError::Needs {
                field: "a head that guesses some of the tokens",
                needs: "a list of them (d2t)",
            }
            .into()),
        };
    };
    if found.len() != outputs {
        return Err(ConfigError::LayerList {
            field: "d2t",
            found: found.len(),
            layers: outputs,
        }
        .into());
    }
    // Folders have the distance from an output's number to its token.
    let is_distance = matches!(metadata, Metadata::HuggingFace(_));
    let tokens = found.into_iter().zip(0i64..).map(|(found, number)| {
        let token = match is_distance {
            true => found.checked_add(number),
            false => Some(found),
        };
        let token = token.and_then(|token| u32::try_from(token).ok());
        let known = token.filter(|&token| (token as usize) < spec.vocabulary);
        known.ok_or(ConfigError::HeadToken {
            found,
            vocabulary: spec.vocabulary,
        })
    });
    Ok(Some(tokens.collect::<Result<_, _>>()?))
}
