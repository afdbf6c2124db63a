//! The decoder that most families vary: norms before attention and feed-forward, all layers alike.

use std::num::NonZeroUsize;

use super::experts;
use super::facts::{Facts, Key, PerLayer};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Attention, FeedForward, Gated, LayerSpec, LogitsSpec, Mask, ModelSpec, Norm,
    NormKind, OutputMatrix, OutputSpec, Plain,
};

/// Inner width of feed-forward blocks.
const FEED_FORWARD: Key = Key::new(
    "feed_forward_length",
    "block_ff_dim|intermediate_size|n_inner",
);

/// What a file says where a family does not know better.
pub(crate) fn decoder(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder_of_any_heads(facts)?;
    if let Some(layer) = spec.layers.first_mut() {
        facts.expect(
            Key::gguf("attention.value_length"),
            layer.attention_mut().head_dim,
            "value heads as wide as key heads are",
        )?;
    }
    Ok(spec)
}

/// The same where heads are the family's affair.
pub(crate) fn decoder_of_any_heads(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let hidden = facts.required(Key::new("embedding_length", "hidden_size|n_embd"))?;
    let count = facts.layers()?.min(LAYERS_READ);
    let heads = Key::new(
        "attention.head_count",
        "num_attention_heads_per_layer|num_attention_heads|n_head",
    );
    let query_heads: PerLayer<usize> = facts.required(heads)?;
    let query_heads = query_heads.of(count, "attention.head_count")?;
    let kv_heads = facts.per_layer(
        Key::new("attention.head_count_kv", "num_key_value_heads"),
        count,
    )?;
    let inner = facts.per_layer(FEED_FORWARD, count)?;
    let head_dim = match facts.get(Key::new(
        "attention.key_length",
        "head_dim|attention_head_dim",
    ))? {
        Some(size) => size,
        None => {
            let heads = query_heads.first().copied().unwrap_or(0);
            usize::checked_div(hidden, heads).unwrap_or(0)
        }
    };
    let activation = activation(facts)?;
    let layer = LayerSpec::usual(
        Attention::usual(0, head_dim),
        FeedForward::Gated(Gated::usual(0, activation)),
    );
    let [full, _] = facts.ropes(head_dim, head_dim)?;
    let mut layers = vec![layer; count];
    for (index, layer) in layers.iter_mut().enumerate() {
        let attention = layer.attention_mut();
        attention.query_heads = query_heads[index];
        attention.kv_heads = kv_heads.as_ref().unwrap_or(&query_heads)[index];
        let inner = match &inner {
            Some(inner) => inner[index],
            // Files of models all of whose layers have experts may say no other width than theirs.
            None => match facts.get(experts::INNER)? {
                Some(inner) => inner,
                None => facts.required(FEED_FORWARD)?,
            },
        };
        layer.feed_forward = FeedForward::Gated(Gated::usual(inner, activation));
    }
    Ok(ModelSpec {
        hidden,
        vocabulary: facts.vocabulary()?,
        context_tokens: facts.required(Key::new(
            "context_length",
            "max_position_embeddings|n_positions",
        ))?,
        norm: Norm {
            kind: NormKind::Rms,
            epsilon: epsilon(facts)?,
        },
        ropes: vec![full],
        layers,
        ..ModelSpec::usual(facts.family(), logits(facts)?)
    })
}

/// Logits by the output matrix, as they are.
pub(crate) fn logits(facts: &Facts<'_>) -> Result<OutputSpec, ConfigError> {
    Ok(OutputSpec::Logits(LogitsSpec {
        matrix: output_matrix(facts)?,
        scale: None,
        soft_cap: None,
    }))
}

/// One more than any model may have, so that a file cannot ask for memory by its number of layers.
pub(crate) const LAYERS_READ: usize = 4097;

/// Of whichever norm the family has.
pub(crate) fn epsilon(facts: &Facts<'_>) -> Result<f32, ConfigError> {
    let other = Key::new(
        "attention.layer_norm_epsilon",
        "layer_norm_eps|layer_norm_epsilon|norm_epsilon|norm_eps",
    );
    match facts.get(other)? {
        Some(epsilon) => Ok(epsilon),
        None => facts.required(Key::new("attention.layer_norm_rms_epsilon", "rms_norm_eps")),
    }
}

fn activation(facts: &Facts<'_>) -> Result<Activation, ConfigError> {
    let name: Option<String> = facts.get(Key::huggingface("hidden_activation|hidden_act"))?;
    match name.as_deref() {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some("gelu") => Ok(Activation::GeluErf),
        Some("relu") => Ok(Activation::Relu),
        Some("relu2") => Ok(Activation::ReluSquared),
        Some(other) => Err(ConfigError::Unsupported {
            feature: format!("hidden_act `{other}`"),
            supported: "silu, gelu, gelu_pytorch_tanh, relu and relu2 are",
        }),
    }
}

/// Makes feed-forward blocks of two products, with `activation` between them.
pub(crate) fn without_gates(spec: &mut ModelSpec, activation: Activation, biases: bool) {
    for layer in &mut spec.layers {
        if let Some(block) = layer.feed_forward.gated_mut() {
            layer.feed_forward = FeedForward::Plain(Plain {
                inner: block.inner,
                activation,
                biases,
            });
        }
    }
}

/// The embedding table is the output matrix unless the file says otherwise, in families that do not
/// need to say it.
pub(crate) fn tied_unless_said(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    let said: Option<bool> = facts.get(Key::huggingface("tie_word_embeddings"))?;
    let silent = facts.has_tensor("output.weight").is_none() && said.is_none();
    if let Some(logits) = spec.logits_mut().filter(|_| silent) {
        logits.matrix = OutputMatrix::Tied;
    }
    Ok(())
}

/// GGUF's convention is that a file without an output matrix uses the embedding table.
pub(crate) fn output_matrix(facts: &Facts<'_>) -> Result<OutputMatrix, ConfigError> {
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

/// For [`windows`]: every layer.
pub(crate) const ALL: usize = 0;

/// Makes layers see only the last tokens of the file's window, if it has one: those that it names, or
/// else every layer but the last of `period`.
pub(crate) fn windows(
    spec: &mut ModelSpec,
    facts: &Facts<'_>,
    period: usize,
) -> Result<(), ConfigError> {
    let windowed = facts.windowed(spec.layers.len(), period)?;
    give_windows(spec, facts, &windowed)
}

/// The same for the layers of which `windowed` says so.
pub(crate) fn give_windows(
    spec: &mut ModelSpec,
    facts: &Facts<'_>,
    windowed: &[bool],
) -> Result<(), ConfigError> {
    let window = facts.get(Key::new(
        "attention.sliding_window",
        "sliding_window|local_attention",
    ))?;
    let Some(window) = window.and_then(NonZeroUsize::new) else {
        return Ok(());
    };
    for (layer, windowed) in spec.layers.iter_mut().zip(windowed) {
        if *windowed {
            layer.attention_mut().mask = Mask::Window(window);
        }
    }
    Ok(())
}

/// Gives layers with windows, where there are some, a rotation of their own, which is not stretched.
pub(crate) fn turn_by_window(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    if spec
        .layers
        .iter()
        .all(|layer| layer.mask() == Some(Mask::Causal))
    {
        return Ok(());
    }
    let head_dim = spec.layers.first_mut();
    let head_dim = head_dim.map_or(0, |layer| layer.attention_mut().head_dim);
    let [full, mut windowed] = facts.ropes(head_dim, head_dim)?;
    // What GGUF files say nothing of is the same in all layers; in Gemma's it is not.
    let theta: Option<f64> = facts.get(Key::gguf("rope.freq_base_swa"))?;
    if facts.is_gguf() && theta.is_none() {
        windowed.theta = full.theta;
    }
    spec.ropes = vec![full, windowed];
    for layer in &mut spec.layers {
        let full = layer.mask() == Some(Mask::Causal);
        layer.attention_mut().rope = Some(usize::from(!full));
    }
    Ok(())
}
