//! BERT as an encoder of texts (MiniLM, BGE, E5, GTE) or of pairs of them: learned positions, norms of the
//! residual stream itself, attention to the whole text, pooled rows.

use super::decoder::{decoder, without_gates};
use super::encoder::{activation, expect_encoder, give_biases, pooled, see_both_sides};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Dense, LearnedInput, LearnedPositions, ModelSpec, Norms, OutputSpec,
};

pub(crate) const FAMILY: Family = Family {
    name: "bert",
    classes: &["BertModel", "BertForSequenceClassification"],
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
            ("cls", "pooler.dense"),
            ("cls.output", "classifier"),
        ],
        inside: Some("bert"),
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
    bert(facts, 0)
}

/// With a table of positions of which a text's first token has the row of this number.
pub(super) fn bert(facts: &Facts<'_>, first_position: usize) -> Result<ModelSpec, ConfigError> {
    facts.expect(
        Key::huggingface("position_embedding_type"),
        "absolute".to_owned(),
        "absolute is",
    )?;
    expect_encoder(facts)?;
    let mut spec = decoder(facts)?;
    spec.ropes.clear();
    let token_types = match facts.rows_of("token_types.weight") {
        Some(rows) => rows,
        None => facts
            .get(Key::huggingface("type_vocab_size"))?
            .unwrap_or(USUAL_TOKEN_TYPES),
    };
    let rows = spec.context_tokens;
    spec.learned_input = Some(LearnedInput {
        positions: Some(LearnedPositions {
            rows,
            first: first_position,
        }),
        token_types: Some(token_types),
    });
    spec.context_tokens = rows.saturating_sub(first_position);
    let activation = activation(&spec, facts);
    give_biases(&mut spec);
    see_both_sides(&mut spec);
    for layer in &mut spec.layers {
        layer.norms = Norms::AfterSum;
        layer.attention_mut().rope = None;
    }
    without_gates(&mut spec, activation, true);
    let classifier = Dense {
        activation: Some(Activation::Tanh),
        ..Dense::plain(spec.hidden)
    };
    spec.output = OutputSpec::Pooled(pooled(facts, Some(classifier))?);
    Ok(spec)
}

/// A sentence, and one that may follow it.
const USUAL_TOKEN_TYPES: usize = 2;
