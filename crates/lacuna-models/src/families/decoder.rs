//! The decoder that most families vary: norms before attention and feed-forward, all layers alike.

use super::facts::{Facts, Key};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Attention, Biases, FeedForward, LayerSpec, Mask, ModelSpec, Norm, NormKind, Norms,
    OutputMatrix, OutputSpec,
};

/// What a file says where a family does not know better.
pub(crate) fn decoder(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let hidden = facts.required(Key::new("embedding_length", "hidden_size"))?;
    let count: usize = facts.required(Key::new("block_count", "num_hidden_layers"))?;
    let count = count.min(LAYERS_READ);
    let query_heads = facts.required(Key::new("attention.head_count", "num_attention_heads"))?;
    let kv_heads = facts.per_layer(
        Key::new("attention.head_count_kv", "num_key_value_heads"),
        count,
    )?;
    let inner = facts.per_layer(Key::new("feed_forward_length", "intermediate_size"), count)?;
    let head_dim = match facts.get(Key::new("attention.key_length", "head_dim"))? {
        Some(size) => size,
        None => usize::checked_div(hidden, query_heads).unwrap_or(0),
    };
    facts.expect(
        Key::gguf("attention.value_length"),
        head_dim,
        "value heads as wide as key heads are",
    )?;
    let attention = Attention {
        query_heads,
        kv_heads: query_heads,
        head_dim,
        mask: Mask::Causal,
        rope: Some(0),
        qk_norm: None,
        scale: 1.0 / (head_dim as f32).sqrt(),
        biases: Biases::default(),
    };
    let layer = LayerSpec {
        attention,
        feed_forward: FeedForward {
            inner: 0,
            activation: activation(facts)?,
        },
        norms: Norms::Before,
        residual_scale: None,
    };
    let mut layers = vec![layer; count];
    for (index, layer) in layers.iter_mut().enumerate() {
        if let Some(kv_heads) = &kv_heads {
            layer.attention.kv_heads = kv_heads[index];
        }
        layer.feed_forward.inner = match &inner {
            Some(inner) => inner[index],
            None => facts.required(Key::new("feed_forward_length", "intermediate_size"))?,
        };
    }
    Ok(ModelSpec {
        family: facts.family(),
        hidden,
        vocabulary: facts.vocabulary()?,
        context_tokens: facts.required(Key::new("context_length", "max_position_embeddings"))?,
        norm: Norm {
            kind: NormKind::Rms,
            epsilon: facts
                .required(Key::new("attention.layer_norm_rms_epsilon", "rms_norm_eps"))?,
        },
        embedding_scale: None,
        ropes: vec![facts.rope(head_dim)?],
        layers,
        output: OutputSpec {
            matrix: output_matrix(facts)?,
            scale: None,
        },
    })
}

/// One more than any model may have, so that a file cannot ask for memory by its number of layers.
const LAYERS_READ: usize = 4097;

fn activation(facts: &Facts<'_>) -> Result<Activation, ConfigError> {
    match facts
        .get::<String>(Key::huggingface("hidden_act"))?
        .as_deref()
    {
        None | Some("silu") => Ok(Activation::Silu),
        Some(other) => Err(ConfigError::Unsupported {
            feature: format!("hidden_act `{other}`"),
            supported: "silu is",
        }),
    }
}

/// GGUF's convention is that a file without an output matrix uses the embedding table.
fn output_matrix(facts: &Facts<'_>) -> Result<OutputMatrix, ConfigError> {
    let tied = match facts.has_tensor("output.weight") {
        Some(own) => !own,
        None => facts
            .get(Key::huggingface("tie_word_embeddings"))?
            .unwrap_or(false),
    };
    Ok(match tied {
        true => OutputMatrix::Tied,
        false => OutputMatrix::Untied,
    })
}

/// Makes every layer see only the last tokens of its window, if the file has one.
pub(crate) fn all_windowed(spec: &mut ModelSpec, window: Option<usize>) {
    let Some(window) = window.and_then(std::num::NonZeroUsize::new) else {
        return;
    };
    for layer in &mut spec.layers {
        layer.attention.mask = Mask::Window(window);
    }
}
