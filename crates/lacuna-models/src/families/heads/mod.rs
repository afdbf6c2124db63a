//! Heads that guess tokens for a model and are in files of their own.
//!
//! Their tensors stand among the model's under names of our own, `head/` and GGUF's name of the part, whatever their files call
//! them: parts of the layer after the first have its number before that. So a head of either kind of files goes with a model
//! of either.

mod eagle3;
mod gemma4_assistant;

use lacuna_files::{Metadata, ModelFiles, Tensors};

use super::Facts;
use crate::error::{ConfigError, LoadError};
use crate::program::TensorName;
use crate::spec::{HeadSpec, ModelSpec};

/// What names of a head's tensors begin with beside a model's. No model's own do: some have a `head.` for scores.
pub(crate) const PREFIX: &str = "head/";

/// One kind of heads.
struct Kind {
    /// `general.architecture` in GGUF.
    architecture: &'static str,
    /// Whether a folder is of one.
    is_folder: fn(&lacuna_files::huggingface::Config) -> bool,
    /// What folders call parts, without layer and suffix, and GGUF's names.
    parts: &'static [(&'static str, &'static str)],
    /// Tensors that nothing is computed with: what their names begin with, without a layer's.
    unused: &'static [&'static str],
    spec: fn(&Facts<'_>, &Beside<'_>) -> Result<HeadSpec, ConfigError>,
}

/// What a head stands beside.
struct Beside<'a> {
    /// The model's tensors and the head's.
    tensors: &'a Tensors,
    model: &'a ModelSpec,
}

impl Beside<'_> {
    /// Whether the head has weights for a part of its first layer, or outside of layers.
    fn has(&self, part: &str) -> bool {
        self.tensors.contains(&format!("{PREFIX}{part}.weight"))
    }

    /// Refuses a head that reads rows of other widths than the model's.
    fn check_width(&self, width: Option<usize>) -> Result<(), ConfigError> {
        let hidden = self.model.hidden;
        match width.filter(|width| *width != hidden) {
            Some(width) => Err(ConfigError::HeadOfAnother { width, hidden }),
            None => Ok(()),
        }
    }
}

const KINDS: [&Kind; 2] = [&eagle3::KIND, &gemma4_assistant::KIND];

impl Kind {
    fn of(metadata: &Metadata) -> Option<&'static Self> {
        let is_of = |kind: &Self| match metadata {
            Metadata::Gguf(metadata) => {
                metadata.get("general.architecture").ok().flatten() == Some(kind.architecture)
            }
            Metadata::HuggingFace(folder) => (kind.is_folder)(folder.config()),
        };
        KINDS.into_iter().find(|kind| is_of(kind))
    }

    /// What a tensor is called beside the model's; `None` for those that nothing is computed with.
    fn name_beside(&self, name: &str) -> Option<String> {
        let inside = name.strip_prefix("model.").unwrap_or(name);
        let layered = inside.strip_prefix("midlayer.").map(|part| (0, part));
        let numbered = ["layers.", "blk."].iter().find_map(|layers| {
            let (number, part) = inside.strip_prefix(layers)?.split_once('.')?;
            Some((number.parse().ok()?, part))
        });
        let (layer, part): (usize, &str) = layered.or(numbered).unwrap_or((0, inside));
        if self.unused.iter().any(|unused| part.starts_with(unused)) {
            return None;
        }
        let mut known =
            self.parts
                .iter()
                .filter_map(|(theirs, ours)| match part.strip_prefix(theirs)? {
                    "" => Some(format!("{ours}.weight")),
                    suffix @ (".weight" | ".bias") => Some(format!("{ours}{suffix}")),
                    _ => None,
                });
        let part = known.next().unwrap_or_else(|| part.to_owned());
        Some(match layer {
            0 => format!("{PREFIX}{part}"),
            layer => format!("{PREFIX}{layer}.{part}"),
        })
    }
}

/// Whether files are a head's.
pub(crate) fn is_head(metadata: &Metadata) -> bool {
    Kind::of(metadata).is_some()
}

/// What a tensor of the head is called, whose layers are counted from `first` on.
pub(crate) fn full(name: TensorName, first: usize, suffix: &str) -> String {
    match name.layer.map_or(0, |layer| layer - first) {
        0 => format!("{PREFIX}{}.{suffix}", name.part),
        layer => format!("{PREFIX}{layer}.{}.{suffix}", name.part),
    }
}

/// Whether a tensor of the head is read with every token of the model, as what makes features of it.
pub(crate) fn is_read_always(name: &str) -> bool {
    let part = name.strip_prefix(PREFIX).unwrap_or_default();
    let parts = ["fc.", "fc_norm.", "input_norm."];
    parts.iter().any(|it| part.starts_with(it))
}

/// The files of a model with those of a head beside them.
pub(crate) fn beside(files: ModelFiles, head: &ModelFiles) -> Result<ModelFiles, LoadError> {
    let Some(kind) = Kind::of(head.metadata()) else {
        return Err(LoadError::NoHead);
    };
    let joined = files.with_head(head, &|name| kind.name_beside(name));
    joined.map_err(|name| LoadError::HeadTwice { name })
}

/// The head that stands beside a model of `spec`.
pub(crate) fn describe(
    metadata: &Metadata,
    tensors: &Tensors,
    model: &ModelSpec,
) -> Result<HeadSpec, LoadError> {
    let Some(kind) = Kind::of(metadata) else {
        return Err(LoadError::NoHead);
    };
    let beside = Beside { tensors, model };
    let described = match metadata {
        Metadata::Gguf(metadata) => {
            let rows = |name: &str| tensors.rows(&kind.name_beside(name)?);
            let facts = Facts::gguf(metadata, kind.architecture, model.vocabulary, &rows);
            (kind.spec)(&facts, &beside)
        }
        Metadata::HuggingFace(folder) => {
            let facts = Facts::huggingface(folder.config(), kind.architecture);
            (kind.spec)(&facts, &beside)
        }
    };
    Ok(described?)
}

pub(crate) use eagle3::tokens;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_one_name_whoever_wrote_the_files() {
        let eagle = [
            ("midlayer.self_attn.q_proj.weight", "head/attn_q.weight"),
            ("layers.0.self_attn.q_proj.bias", "head/attn_q.bias"),
            (
                "model.layers.0.mlp.down_proj.weight",
                "head/ffn_down.weight",
            ),
            ("blk.0.attn_norm_2.weight", "head/attn_norm_2.weight"),
            ("midlayer.hidden_norm.weight", "head/attn_norm_2.weight"),
            ("norm.weight", "head/output_norm.weight"),
            ("output_norm.weight", "head/output_norm.weight"),
            ("lm_head.weight", "head/output.weight"),
            ("model.embed_tokens.weight", "head/token_embd.weight"),
            ("enc.output_norm.weight", "head/input_norm.weight"),
            ("input_norm.weight", "head/input_norm.weight"),
            ("fc_norm.2.weight", "head/fc_norm.2.weight"),
            ("fc.weight", "head/fc.weight"),
            ("d2t", "head/d2t"),
            ("rope_freqs.weight", "head/rope_freqs.weight"),
        ];
        let assistant = [
            (
                "model.layers.0.self_attn.q_proj.weight",
                "head/attn_q.weight",
            ),
            (
                "model.layers.3.layer_scalar",
                "head/3.layer_output_scale.weight",
            ),
            (
                "blk.3.layer_output_scale.weight",
                "head/3.layer_output_scale.weight",
            ),
            (
                "model.layers.1.post_attention_layernorm.weight",
                "head/1.post_attention_norm.weight",
            ),
            ("pre_projection.weight", "head/pre_projection.weight"),
            (
                "nextn.post_projection.weight",
                "head/post_projection.weight",
            ),
            ("model.norm.weight", "head/output_norm.weight"),
        ];
        let of = |kind: &Kind, names: &[(&str, &str)]| {
            for (theirs, ours) in names {
                assert_eq!(kind.name_beside(theirs).as_deref(), Some(*ours), "{theirs}");
            }
        };
        of(&eagle3::KIND, &eagle);
        of(&gemma4_assistant::KIND, &assistant);
        for unused in ["t2d", "midlayer.self_attn.rotary_emb.inv_freq"] {
            assert_eq!(eagle3::KIND.name_beside(unused), None);
        }
        for unused in [
            "masked_embedding.token_ordering",
            "masked_embd_centroids.weight",
        ] {
            assert_eq!(gemma4_assistant::KIND.name_beside(unused), None);
        }
    }

    #[test]
    fn tensors_are_asked_for_by_those_names() {
        let of = |layer, part| {
            full(
                TensorName {
                    layer: Some(layer),
                    part,
                },
                30,
                "weight",
            )
        };
        assert_eq!(of(30, "attn_q"), "head/attn_q.weight");
        assert_eq!(of(33, "attn_q"), "head/3.attn_q.weight");
    }
}
