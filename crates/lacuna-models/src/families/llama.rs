//! Llama 2 and 3, and what is built like them: Mistral 7B and Nemo, Ministral 8B, InternLM 3, SmolLM 2, Yi, and Mixtral, whose
//! GGUF files say that they are Llama with experts, and the decoders of Idefics 3, SmolVLM and Pixtral.

use lacuna_kernels::RopeStyle;

use super::decoder::{ALL, decoder, windows};
use super::experts::{self, give_experts};
use super::facts::Key;
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens, idefics3, pixtral};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "llama",
    classes: &[
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MinistralForCausalLM",
        "InternLM3ForCausalLM",
        "MixtralForCausalLM",
        "Idefics3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        pixtral::LLAVA,
    ],
    spec,
    naming: Naming {
        parts: &[
            ("ffn_gate_inp", "block_sparse_moe.gate"),
            ("ffn_gate_exps", "block_sparse_moe.experts.*.w1"),
            ("ffn_up_exps", "block_sparse_moe.experts.*.w3"),
            ("ffn_down_exps", "block_sparse_moe.experts.*.w2"),
        ],
        ..Naming::USUAL
    },
    shapes: SHAPES,
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    // Folders of SmolVLM and Pixtral leave out what `transformers` takes for a Llama and a Mistral.
    let leaves_out = |class: &str| idefics3::CLASSES.contains(&class) || class == pixtral::LLAVA;
    let defaults: &[(&str, f64)] = match facts.class().is_some_and(leaves_out) {
        true => &[("num_attention_heads", 32.0)],
        false => &[],
    };
    let facts = &facts.with_defaults(defaults);
    let mut spec = decoder(facts)?;
    // The converter permutes the rows of queries and keys.
    spec.ropes[0].style = facts.style(RopeStyle::Interleaved);
    windows(&mut spec, facts, ALL)?;
    let sees = facts.class().map(|class| idefics3::CLASSES.contains(&class));
    if sees == Some(true) {
        spec.images = Some(idefics3::IMAGES);
    }
    if facts.class() == Some(pixtral::LLAVA) {
        // It is around decoders of several families.
        let kind: Option<String> = facts.get(Key::huggingface("model_type"))?;
        let known = ["mistral", "llama", "llava"];
        if let Some(kind) = kind.filter(|kind| !known.contains(&kind.as_str())) {
            return Err(ConfigError::Unsupported {
                feature: format!("LLaVA with a text model of the type {kind}"),
                supported: "mistral and llama are",
            });
        }
    }
    pixtral::give_images(&mut spec, facts)?;
    let count: Option<usize> = facts.get(experts::COUNT)?;
    if count.is_some_and(|count| count > 0) {
        let experts = experts::experts(facts, &mut spec)?;
        give_experts(&mut spec, experts, |_| true);
    }
    Ok(spec)
}

/// What files of Llama say besides, by the size of their heads.
const MORE_64: [(&str, Given); 2] = more(64);
const MORE_128: [(&str, Given); 2] = more(128);

const fn more(head_size: usize) -> [(&'static str, Given); 2] {
    [
        ("rope.dimension_count", Given::Size(head_size)),
        ("vocab_size", Given::Size(128_256)),
    ]
}

const LLAMA3: Shape = Shape {
    name: "",
    family: "llama",
    layers: 32,
    hidden: 4096,
    feed_forward: 14_336,
    heads: 32,
    kv_heads: 8,
    head_size: 128,
    vocabulary: 128_256,
    special_tokens: Some(SpecialTokens::Llama3),
    tied: false,
    context: 8192,
    rope_theta: 5e5,
    rope_factor: None,
    norm_epsilon: 1e-5,
    more: &MORE_128,
};

/// Published models, smallest first.
const SHAPES: &[Shape] = &[
    Shape {
        name: "llama-3.2-1b",
        layers: 16,
        hidden: 2048,
        feed_forward: 8192,
        head_size: 64,
        tied: true,
        context: 131_072,
        rope_factor: Some(32.0),
        more: &MORE_64,
        ..LLAMA3
    },
    Shape {
        name: "llama-3.2-3b",
        layers: 28,
        hidden: 3072,
        feed_forward: 8192,
        heads: 24,
        tied: true,
        context: 131_072,
        rope_factor: Some(32.0),
        ..LLAMA3
    },
    Shape {
        name: "llama-3-8b",
        ..LLAMA3
    },
    Shape {
        name: "llama-3-70b",
        layers: 80,
        hidden: 8192,
        feed_forward: 28_672,
        heads: 64,
        ..LLAMA3
    },
    Shape {
        name: "llama-3-405b",
        layers: 126,
        hidden: 16_384,
        feed_forward: 53_248,
        heads: 128,
        context: 131_072,
        rope_factor: Some(8.0),
        ..LLAMA3
    },
];
