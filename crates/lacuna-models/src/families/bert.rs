//! BERT as an encoder of texts (MiniLM, BGE, E5, GTE): learned positions, norms of the residual stream
//! itself, attention to the whole text, pooled rows.

use super::decoder::decoder;
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Biases, FeedForward, LearnedInput, Mask, ModelSpec, NormKind, Norms, OutputSpec,
    Plain, Pooled, Pooling,
};

pub(crate) const FAMILY: Family = Family {
    name: "bert",
    classes: &["BertModel"],
    spec,
    naming: Naming {
        parts: &[
            ("token_embd", "embeddings.word_embeddings"),
            ("position_embd", "embeddings.position_embeddings"),
            ("token_types", "embeddings.token_type_embeddings"),
            ("token_embd_norm", "embeddings.LayerNorm"),
            ("attn_q", "attention.self.query"),
            ("attn_k", "attention.self.key"),
            ("attn_v", "attention.self.value"),
            ("attn_output", "attention.output.dense"),
            ("attn_output_norm", "attention.output.LayerNorm"),
            ("ffn_up", "intermediate.dense"),
            ("ffn_down", "output.dense"),
            ("layer_output_norm", "output.LayerNorm"),
        ],
        layers: "encoder.layer",
        // The pooler was trained to tell whether one sentence follows another; embeddings are made without.
        unused: &[
            "embeddings.position_ids",
            "pooler.dense.weight",
            "pooler.dense.bias",
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    facts.expect(
        Key::huggingface("position_embedding_type"),
        "absolute".to_owned(),
        "absolute is",
    )?;
    facts.expect(Key::huggingface("is_decoder"), false, "encoders are")?;
    facts.expect(Key::gguf("attention.causal"), false, "encoders are")?;
    let mut spec = decoder(facts)?;
    spec.norm.kind = NormKind::BiasedLayer;
    spec.ropes.clear();
    let token_types = match facts.rows_of("token_types.weight") {
        Some(rows) => rows,
        None => facts
            .get(Key::huggingface("type_vocab_size"))?
            .unwrap_or(USUAL_TOKEN_TYPES),
    };
    spec.learned_input = Some(LearnedInput {
        positions: spec.context_tokens,
        token_types,
    });
    let activation = match facts.is_gguf() {
        // No key says it. The reference has the exact function, and llama.cpp the approximation by tanh.
        true => Activation::GeluErf,
        false => block_activation(&spec),
    };
    for layer in &mut spec.layers {
        layer.norms = Norms::AfterSum;
        layer.attention_mut().rope = None;
        layer.attention_mut().mask = Mask::Full;
        layer.attention_mut().biases = Biases {
            projections: true,
            output: true,
        };
        if let Some(block) = layer.feed_forward.gated_mut() {
            layer.feed_forward = FeedForward::Plain(Plain {
                inner: block.inner,
                activation,
            });
        }
    }
    spec.output = OutputSpec::Pooled(Pooled {
        pooling: pooling(facts)?,
        normalized: true,
    });
    Ok(spec)
}

/// A sentence, and one that may follow it.
const USUAL_TOKEN_TYPES: usize = 2;

/// The activation that the file names, which is the same in all layers.
fn block_activation(spec: &ModelSpec) -> Activation {
    let first = spec.layers.first().map(|layer| layer.feed_forward);
    match first {
        Some(FeedForward::Gated(block)) => block.activation,
        _ => Activation::GeluErf,
    }
}

/// Numbers of `llama_pooling_type` in llama.cpp; 0 is none at all. Folders say it elsewhere, or not, and
/// then sentence-transformers takes the mean.
fn pooling(facts: &Facts<'_>) -> Result<Pooling, ConfigError> {
    match facts.get::<usize>(Key::gguf("pooling_type"))? {
        None | Some(1) => Ok(Pooling::Mean),
        Some(2) => Ok(Pooling::First),
        Some(3) => Ok(Pooling::Last),
        Some(other) => Err(ConfigError::Unsupported {
            feature: format!("pooling_type {other}"),
            supported: "1 (mean), 2 (first token) and 3 (last token) are",
        }),
    }
}
