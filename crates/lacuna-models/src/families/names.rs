//! How tensors are called in files, whatever a program calls them.

use crate::layers::{INPUT_BOUNDS, OUTPUT_BOUNDS};
use crate::program::TensorName;

/// How a file spells tensor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// `blk.0.attn_q.weight`
    Gguf,
    /// `model.layers.0.self_attn.q_proj.weight`
    HuggingFace,
}

/// What is particular to a family about its Hugging Face files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Naming {
    /// Parts that are called otherwise than [`USUAL`] says: GGUF's name, and theirs without block and
    /// suffix. One of a suffix other than `weight`, as `part.suffix`, with that of theirs.
    pub(crate) parts: &'static [(&'static str, &'static str)],
    /// Parts that GGUF files of the family call otherwise than those of most: the usual name, and theirs.
    pub(crate) gguf: &'static [(&'static str, &'static str)],
    /// Matrices that GGUF files of the family have in one, whose name in [`FUSED`] this is. Such as are apart are read too.
    pub(crate) gguf_fused: &'static [&'static str],
    /// What all names but those of a projection begin with in GGUF files: those of an encoder of images.
    pub(crate) gguf_inside: Option<&'static str>,
    /// GGUF's names of parts that have no suffix there.
    pub(crate) bare: &'static [&'static str],
    /// Parts whose weights have none in GGUF files, either.
    pub(crate) gguf_bare: &'static [&'static str],
    /// What all names but a classifier's begin with in files that hold the model inside another.
    pub(crate) inside: Option<&'static str>,
    /// Parts of which a number is elsewhere in their names: GGUF's name, and theirs, with `*` for it.
    pub(crate) numbered: &'static [(&'static str, [&'static str; 2])],
    /// What names of a layer's tensors begin with, before its number.
    pub(crate) layers: &'static str,
    /// What names begin with of the head that guesses tokens, where it is not numbered on behind the layers.
    pub(crate) head: Option<&'static str>,
    /// Tensors of theirs that nothing is computed with.
    pub(crate) unused: &'static [&'static str],
    /// Added to the weights of norms, which some families store as distances from one. GGUF files have
    /// it added already.
    pub(crate) norm_offset: f32,
}

impl Naming {
    /// As most families have it.
    pub(crate) const USUAL: Self = Self {
        parts: &[],
        gguf: &[],
        gguf_fused: &[],
        gguf_inside: None,
        bare: &[],
        gguf_bare: &[],
        inside: None,
        numbered: &[],
        layers: "model.layers",
        head: None,
        unused: &[],
        norm_offset: 0.0,
    };

    fn part(&self, part: &'static str) -> &'static str {
        let all = self.parts.iter().chain(&USUAL);
        let mut found = all.filter(|(gguf, _)| *gguf == part);
        found.next().map_or(part, |(_, name)| name)
    }

    /// The name of one expert's matrix. Older GGUF files have a tensor for each too.
    pub(crate) fn of_expert(&self, spelling: Spelling, name: TensorName, expert: usize) -> String {
        let full = self.full(spelling, name, "weight");
        match spelling {
            Spelling::Gguf => full.replace("_exps.", &format!(".{expert}.")),
            Spelling::HuggingFace => full.replace('*', &expert.to_string()),
        }
    }

    /// The names that a tensor of all experts' matrices or biases may have.
    pub(crate) fn of_stack(
        &self,
        spelling: Spelling,
        name: TensorName,
        suffix: &str,
    ) -> Vec<String> {
        let full = self.full(spelling, name, suffix);
        if spelling == Spelling::Gguf {
            return vec![full];
        }
        // Parameters that are no module's weight or bias have no suffix of their own.
        let full = full.replace(".*", "");
        let bare = full.trim_end_matches(".weight").replace(".bias", "_bias");
        vec![full, bare]
    }

    /// The name of a tensor of this suffix, `weight` or `bias`.
    pub(crate) fn full(&self, spelling: Spelling, name: TensorName, suffix: &str) -> String {
        let dotted = match suffix {
            "" => String::new(),
            suffix => format!(".{suffix}"),
        };
        let mut numbered = self.numbered.iter().filter(|(part, _)| *part == name.part);
        if let (Some((_, [gguf, theirs])), Some(number)) = (numbered.next(), name.layer) {
            let pattern = match spelling {
                Spelling::Gguf => gguf,
                Spelling::HuggingFace => theirs,
            };
            return format!("{}{dotted}", pattern.replace('*', &number.to_string()));
        }
        if spelling == Spelling::Gguf {
            // What has no suffix of its own in either kind of files may have any.
            let any = suffix == "weight" || self.bare.contains(&name.part);
            let is_bare = any && self.gguf_bare.contains(&name.part);
            let dotted = if is_bare { "" } else { &dotted };
            let mut otherwise = self.gguf.iter().filter(|(usual, _)| *usual == name.part);
            let part = otherwise.next().map_or(name.part, |(_, part)| part);
            let inside = match self.gguf_inside {
                Some(inside) if !part.starts_with("mm.") => inside,
                _ => "",
            };
            return format!("{inside}{}{dotted}", TensorName { part, ..name });
        }
        let part = self.part(name.part);
        // Bounds are not the matrix's, but of the module that has it.
        let of_module = [INPUT_BOUNDS, OUTPUT_BOUNDS].concat().contains(&suffix);
        let part = match part.strip_suffix(".linear") {
            Some(module) if of_module => module,
            _ => part,
        };
        // Parameters that are no module's weight or bias may be called quite otherwise.
        let of_suffix = self.parts.iter().find(|(gguf, _)| {
            let rest = gguf.strip_prefix(name.part);
            rest.and_then(|rest| rest.strip_prefix('.')) == Some(suffix)
        });
        let block = match name.layer {
            None => String::new(),
            Some(layer) => format!("{}.{layer}.", self.layers),
        };
        if let Some((_, parameter)) = of_suffix {
            return format!("{block}{parameter}");
        }
        match self.bare.contains(&name.part) {
            true => format!("{block}{part}"),
            false => format!("{block}{part}{dotted}"),
        }
    }
}

/// GGUF and Hugging Face names of the same tensor, without block and suffix, as most families have
/// them.
const USUAL: [(&str, &str); 33] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("cls.output", "score"),
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    // Where there is such a norm, the one before is called otherwise or there is none.
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_gate_up", "mlp.gate_up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    // Of each expert, which is a number; files that have one tensor for all leave it out.
    ("ffn_gate_exps", "mlp.experts.*.gate_proj"),
    ("ffn_up_exps", "mlp.experts.*.up_proj"),
    ("ffn_gate_up_exps", "mlp.experts.*.gate_up_proj"),
    ("ffn_down_exps", "mlp.experts.*.down_proj"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_gate_up_shexp", "mlp.shared_experts.gate_up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("nextn.eh_proj", "eh_proj"),
    ("nextn.enorm", "enorm"),
    ("nextn.hnorm", "hnorm"),
    ("nextn.shared_head_norm", "shared_head.norm"),
];

/// Matrices that a file may have in one, their rows one after another: its name, and theirs.
pub(crate) const FUSED: [(&str, &[&str]); 5] = [
    ("attn_qkv", &["attn_q", "attn_k", "attn_v"]),
    // GGUF files have it under the name of its second half.
    ("ffn_gate_up", &["ffn_gate", "ffn_up"]),
    ("ffn_gate_up_shexp", &["ffn_gate_shexp", "ffn_up_shexp"]),
    // GGUF files stack them.
    (
        "altup_proj",
        &["altup_proj.0", "altup_proj.1", "altup_proj.2"],
    ),
    (
        "altup_unembd_proj",
        &[
            "altup_unembd_proj.0",
            "altup_unembd_proj.1",
            "altup_unembd_proj.2",
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn name(layer: Option<usize>, part: &'static str) -> TensorName {
        TensorName { layer, part }
    }

    #[test]
    fn names_follow_the_checkpoint() {
        let full =
            |spelling, layer, part, suffix| Naming::USUAL.full(spelling, name(layer, part), suffix);
        assert_eq!(
            full(Spelling::Gguf, Some(3), "attn_q", "bias"),
            "blk.3.attn_q.bias"
        );
        assert_eq!(
            full(Spelling::HuggingFace, Some(3), "ffn_down", "weight"),
            "model.layers.3.mlp.down_proj.weight"
        );
        assert_eq!(
            full(Spelling::HuggingFace, None, "output", "weight"),
            "lm_head.weight"
        );
    }

    #[test]
    fn a_family_may_call_a_part_otherwise() {
        let naming = Naming {
            parts: &[("ffn_norm", "pre_feedforward_layernorm")],
            ..Naming::USUAL
        };
        assert_eq!(
            naming.full(Spelling::HuggingFace, name(Some(0), "ffn_norm"), "weight"),
            "model.layers.0.pre_feedforward_layernorm.weight"
        );
    }
}
