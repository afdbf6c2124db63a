//! ModernBERT (modernbert-embed, gte-modernbert, Granite embeddings): norms before both parts of a layer,
//! gates, rotations, and two layers in three that see some tokens to either side.

use super::decoder::{decoder, give_windows};
use super::encoder::{activation, expect_encoder, pooled, see_both_sides};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Dense, LearnedInput, Mask, ModelSpec, NormKind, Norms, OutputSpec, Pooled,
    PooledResult, Pooling,
};

pub(crate) const FAMILY: Family = Family {
    name: "modern-bert",
    classes: &["ModernBertModel", "ModernBertForSequenceClassification"],
    spec,
    naming: Naming {
        parts: &[
            ("token_embd", "embeddings.tok_embeddings"),
            ("token_embd_norm", "embeddings.norm"),
            ("attn_norm", "attn_norm"),
            ("attn_qkv", "attn.Wqkv"),
            ("attn_output", "attn.Wo"),
            ("ffn_norm", "mlp_norm"),
            ("ffn_gate_up", "mlp.Wi"),
            ("ffn_down", "mlp.Wo"),
            ("output_norm", "final_norm"),
            ("cls", "head.dense"),
            ("cls.norm", "head.norm"),
            ("cls.output", "classifier"),
        ],
        inside: Some("model"),
        layers: "layers",
        ..Naming::USUAL
    },
    shapes: &[],
};

/// One layer in so many sees the whole text, the first of them.
const PERIOD: usize = 3;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    expect_encoder(facts)?;
    for option in ["norm_bias", "attention_bias", "mlp_bias"] {
        facts.expect(Key::huggingface(option), false, "models without biases are")?;
    }
    let mut spec = decoder(facts)?;
    spec.norm.kind = NormKind::Layer;
    spec.learned_input = Some(LearnedInput {
        positions: None,
        token_types: None,
    });
    let head_dim = spec.ropes[0].dimensions;
    spec.ropes = facts.ropes(head_dim, head_dim)?.into();
    let activation = activation(&spec, facts);
    let windowed = facts.windowed_after_first(spec.layers.len(), PERIOD)?;
    give_windows(&mut spec, facts, &windowed)?;
    see_both_sides(&mut spec);
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let full = layer.mask() == Some(Mask::Full);
        layer.attention_mut().rope = Some(usize::from(!full));
        if index == 0 {
            layer.norms = Norms::BeforeFeedForward;
        }
        if let Some(block) = layer.feed_forward.gated_mut() {
            block.activation = activation;
        }
    }
    let classifier = Dense {
        width: spec.hidden,
        activation: Some(Activation::GeluErf),
        norm: true,
    };
    let mut pooled = Pooled {
        final_norm: true,
        ..pooled(facts, Some(classifier))?
    };
    let rows: Option<String> = facts.get(Key::huggingface("classifier_pooling"))?;
    if let (PooledResult::Score(_), Some("mean")) = (pooled.result, rows.as_deref()) {
        pooled.pooling = Pooling::Mean;
    }
    spec.output = OutputSpec::Pooled(pooled);
    Ok(spec)
}
