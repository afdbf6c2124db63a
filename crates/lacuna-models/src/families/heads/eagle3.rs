//! EAGLE-3: heads that guess tokens for a model, made apart from it and in files of their own, as `speculators`, SpecForge and
//! the makers of EAGLE write them and as llama.cpp converts them.
//!
//! Their tensors stand among the model's under names of our own, `eagle3.` and GGUF's name of the part, whatever the files
//! call them. So a head of either kind of files goes with a model of either.

use std::num::NonZeroUsize;

use lacuna_files::huggingface::Config;
use lacuna_files::{Metadata, ModelFiles, Tensors};
use lacuna_kernels::RopeStyle;

use super::Facts;
use super::decoder::decoder;
use super::facts::{Key, PerLayer};
use crate::error::{ConfigError, LoadError};
use crate::program::TensorName;
use crate::spec::{
    Eagle3, HeadKind, HeadResidual, HeadSpec, LayerSpec, ModelSpec, QkNorm, TapNorm,
};

/// `general.architecture` in GGUF.
const ARCHITECTURE: &str = "eagle3";

/// What names of a head's tensors begin with beside a model's.
pub(crate) const PREFIX: &str = "eagle3.";

/// The tokens that its outputs are of.
const TOKENS: &str = "eagle3.d2t";

/// Fields of `config.json` that only such heads have.
const FIELDS: [&str; 2] = ["draft_vocab_size", "speculators_model_type"];

/// What folders call parts, and GGUF's names. In GGUF, parts of its layer are of a layer of number 0.
const PARTS: [(&str, &str); 19] = [
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
    ("fc", "fc"),
];

/// Whether files are a head's.
pub(crate) fn is_head(metadata: &Metadata) -> bool {
    match metadata {
        Metadata::Gguf(metadata) => {
            metadata.get("general.architecture").ok().flatten() == Some(ARCHITECTURE)
        }
        Metadata::HuggingFace(folder) => says_head(folder.config()),
    }
}

fn says_head(config: &Config) -> bool {
    FIELDS.iter().any(|field| config.map().contains_key(*field))
}

/// What a head's tensor is called beside the model's; `None` for those that nothing is computed with.
fn name_beside(name: &str) -> Option<String> {
    // The tokens of the model that it can guess, which the others say as well; and frequencies, as the description has them.
    if name == "t2d" || name.ends_with("rotary_emb.inv_freq") {
        return None;
    }
    let inside = name.strip_prefix("model.").unwrap_or(name);
    let layers = ["midlayer.", "layers.0.", "blk.0."];
    let mut in_layer = layers.iter().filter_map(|layer| inside.strip_prefix(layer));
    let part = in_layer.next().unwrap_or(inside);
    let mut known = PARTS.iter().filter_map(|(theirs, ours)| {
        let suffix = part.strip_prefix(theirs)?;
        matches!(suffix, ".weight" | ".bias").then(|| format!("{ours}{suffix}"))
    });
    let part = known.next().unwrap_or_else(|| part.to_owned());
    Some(format!("{PREFIX}{part}"))
}

/// What a tensor of the head is called.
pub(crate) fn full(name: TensorName, suffix: &str) -> String {
    format!("{PREFIX}{}.{suffix}", name.part)
}

/// Whether a tensor of the head is read with every token of the model, as what makes features of it.
pub(crate) fn is_read_always(name: &str) -> bool {
    let part = name.strip_prefix(PREFIX).unwrap_or_default();
    ["fc.", "fc_norm.", "input_norm."]
        .iter()
        .any(|it| part.starts_with(it))
}

/// The files of a model with those of a head beside them.
pub(crate) fn beside(files: ModelFiles, head: &ModelFiles) -> Result<ModelFiles, LoadError> {
    let joined = files.with_head(head, &name_beside);
    joined.map_err(|name| LoadError::HeadTwice { name })
}

/// The head that stands beside a model of `spec`.
pub(crate) fn describe(
    metadata: &Metadata,
    tensors: &Tensors,
    model: &ModelSpec,
) -> Result<HeadSpec, ConfigError> {
    match metadata {
        Metadata::Gguf(metadata) => {
            let rows = |name: &str| tensors.rows(&name_beside(name)?);
            let facts = Facts::gguf(metadata, ARCHITECTURE, model.vocabulary, &rows);
            of_facts(&facts, tensors, model)
        }
        Metadata::HuggingFace(folder) => {
            let facts = Facts::huggingface(folder.config(), ARCHITECTURE);
            of_facts(&facts, tensors, model)
        }
    }
}

fn of_facts(
    facts: &Facts<'_>,
    tensors: &Tensors,
    model: &ModelSpec,
) -> Result<HeadSpec, ConfigError> {
    let spec = decoder(facts)?;
    let target: Option<usize> = facts.get(Key::new("target_hidden_size", "target_hidden_size"))?;
    let width = target.filter(|width| *width != model.hidden);
    let width = width.or((spec.hidden != model.hidden).then_some(spec.hidden));
    if let Some(width) = width {
        return Err(ConfigError::HeadOfAnother {
            width,
            hidden: model.hidden,
        });
    }
    let [layer] =
        <[LayerSpec; 1]>::try_from(spec.layers).map_err(|layers| ConfigError::Unsupported {
            feature: format!("an EAGLE-3 head of {} layers", layers.len()),
            supported: "heads of one layer are",
        })?;
    let mut layer = layer;
    let mut ropes = spec.ropes;
    // The converter permutes the rows of queries and keys, as Llama's.
    ropes[0].style = facts.style(RopeStyle::Interleaved);
    let has = |part: &str| tensors.contains(&format!("{PREFIX}{part}.weight"));
    if has("attn_q_norm") {
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
    }
    let flag = |key| facts.get::<bool>(key).map(Option::unwrap_or_default);
    let eagle = Eagle3 {
        taps: taps(facts, model.layers.len())?,
        tap_norm: match (has("input_norm"), has("fc_norm.0")) {
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
        own_embedding: has("token_embd"),
        own_outputs: tensors
            .rows("eagle3.output.weight")
            .and_then(NonZeroUsize::new),
    };
    Ok(HeadSpec {
        layer,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_one_name_whoever_wrote_the_files() {
        let names = [
            ("midlayer.self_attn.q_proj.weight", "eagle3.attn_q.weight"),
            ("layers.0.self_attn.q_proj.bias", "eagle3.attn_q.bias"),
            (
                "model.layers.0.mlp.down_proj.weight",
                "eagle3.ffn_down.weight",
            ),
            ("blk.0.attn_norm_2.weight", "eagle3.attn_norm_2.weight"),
            ("midlayer.hidden_norm.weight", "eagle3.attn_norm_2.weight"),
            ("norm.weight", "eagle3.output_norm.weight"),
            ("output_norm.weight", "eagle3.output_norm.weight"),
            ("lm_head.weight", "eagle3.output.weight"),
            ("model.embed_tokens.weight", "eagle3.token_embd.weight"),
            ("enc.output_norm.weight", "eagle3.input_norm.weight"),
            ("input_norm.weight", "eagle3.input_norm.weight"),
            ("fc_norm.2.weight", "eagle3.fc_norm.2.weight"),
            ("fc.weight", "eagle3.fc.weight"),
            ("d2t", TOKENS),
            ("rope_freqs.weight", "eagle3.rope_freqs.weight"),
        ];
        for (theirs, ours) in names {
            assert_eq!(name_beside(theirs).as_deref(), Some(ours), "{theirs}");
        }
        for unused in ["t2d", "midlayer.self_attn.rotary_emb.inv_freq"] {
            assert_eq!(name_beside(unused), None);
        }
    }
}
