//! Llama 4 without experts, which is what MobileLLM R1 and Pro are: attention within chunks, norms of
//! queries and keys without weights, and layers that do not encode positions, whose queries grow with
//! them instead.

use std::num::NonZeroUsize;

use lacuna_kernels::RopeStyle;

use super::decoder::{decoder, tied_unless_said};
use super::experts;
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{FeedForward, Mask, ModelSpec, QkNorm, QueryTemperature};

pub(crate) const FAMILY: Family = Family {
    name: "llama4",
    classes: &["Llama4ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("ffn_gate", "feed_forward.gate_proj"),
            ("ffn_up", "feed_forward.up_proj"),
            ("ffn_down", "feed_forward.down_proj"),
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

/// What GGUF files mean that do not say it: they have no keys for it.
const USUAL_CHUNK: NonZeroUsize = NonZeroUsize::new(8192).expect("not zero");
const USUAL_INTERVAL: usize = 4;
const USUAL_TEMPERATURE: QueryTemperature = QueryTemperature {
    beta: 0.1,
    original_context: 8192,
    first: 1,
};

/// What layers have of positions.
struct Positions {
    /// For each layer, whether it turns queries and keys.
    turned: Vec<bool>,
    /// For each layer, whether it sees its own chunk only.
    chunked: Vec<bool>,
    chunk: NonZeroUsize,
    /// Of layers that do not turn.
    temperature: Option<QueryTemperature>,
    /// Whether layers that turn norm before.
    normed: bool,
}

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let count: Option<usize> = facts.get(experts::COUNT)?;
    let mut spec = decoder(facts)?;
    let sparse: Option<Vec<usize>> = facts.get(Key::huggingface("moe_layers"))?;
    if count.unwrap_or(0) > 0 && sparse.is_none_or(|layers| !layers.is_empty()) {
        return Err(ConfigError::Unsupported {
            feature: "experts of Llama 4, whose inputs are weighed".to_owned(),
            supported: "Llama 4 without experts is",
        });
    }
    tied_unless_said(&mut spec, facts)?;
    // Files of both kinds have neighbours that turn together.
    spec.ropes[0].style = RopeStyle::Interleaved;
    // Files say the width of experts where others say that of all.
    let width: Option<usize> = facts.get(Key::huggingface("intermediate_size_mlp"))?;
    let positions = match facts.is_gguf() {
        true => gguf_positions(facts, spec.layers.len())?,
        false => positions(facts, spec.layers.len())?,
    };
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let attention = layer.attention_mut();
        let turned = positions.turned[index];
        attention.rope = turned.then_some(0);
        // A rotation does not change what a norm divides by, so it may come before or after.
        attention.qk_norm = (turned && positions.normed).then_some(QkNorm::Unweighted);
        attention.temperature = positions.temperature.filter(|_| !turned);
        if positions.chunked[index] {
            attention.mask = Mask::Chunk(positions.chunk);
        }
        if let (Some(inner), FeedForward::Gated(block)) = (width, &mut layer.feed_forward) {
            block.inner = inner;
        }
    }
    Ok(spec)
}

fn every_but_the_last_of(interval: usize, layers: usize) -> Vec<bool> {
    let turned = |layer: usize| interval == 0 || !(layer + 1).is_multiple_of(interval);
    (0..layers).map(turned).collect()
}

fn gguf_positions(facts: &Facts<'_>, layers: usize) -> Result<Positions, ConfigError> {
    // A window of 0 says that no layer has chunks, and that all turn.
    let window: Option<usize> = facts.get(Key::gguf("attention.sliding_window"))?;
    let (turned, chunked) = match window {
        Some(0) => (vec![true; layers], vec![false; layers]),
        _ => {
            let most = every_but_the_last_of(USUAL_INTERVAL, layers);
            (most.clone(), most)
        }
    };
    Ok(Positions {
        turned,
        chunked,
        chunk: USUAL_CHUNK,
        temperature: Some(USUAL_TEMPERATURE),
        normed: true,
    })
}

fn positions(facts: &Facts<'_>, layers: usize) -> Result<Positions, ConfigError> {
    // The list has 1 where a layer turns its heads; an empty one says nothing.
    let listed = Key::huggingface("no_rope_layers");
    let some: Option<Vec<usize>> = facts.get(listed)?;
    let turned = match some {
        Some(listed) if listed.is_empty() => None,
        _ => facts.per_layer(listed, layers)?,
    };
    let interval: Option<usize> = facts.get(Key::huggingface("no_rope_layer_interval"))?;
    let turned = match turned {
        Some(turned) => turned.iter().map(|turned| *turned != 0).collect(),
        None => every_but_the_last_of(interval.unwrap_or(USUAL_INTERVAL), layers),
    };
    let chunk: Option<usize> = facts.get(Key::huggingface("attention_chunk_size"))?;
    let chunk = chunk.and_then(NonZeroUsize::new);
    let types: Option<Vec<String>> = facts.get(Key::huggingface("layer_types"))?;
    let chunked = match types {
        None => turned.clone(),
        Some(types) if types.len() != layers => {
            return Err(ConfigError::LayerList {
                field: "layer_types",
                found: types.len(),
                layers,
            });
        }
        Some(types) => types.iter().map(|kind| chunked(kind)).collect::<Result<_, _>>()?,
    };
    let grows: Option<bool> = facts.get(Key::huggingface("attn_temperature_tuning"))?;
    let beta: Option<f32> = facts.get(Key::huggingface("attn_scale"))?;
    let original_context: Option<usize> = facts.get(Key::huggingface("floor_scale"))?;
    let temperature = QueryTemperature {
        beta: beta.unwrap_or(USUAL_TEMPERATURE.beta),
        original_context: original_context.unwrap_or(USUAL_TEMPERATURE.original_context),
        ..USUAL_TEMPERATURE
    };
    let normed: Option<bool> = facts.get(Key::huggingface("use_qk_norm"))?;
    Ok(Positions {
        turned,
        chunked: match chunk {
            Some(_) => chunked,
            None => vec![false; layers],
        },
        chunk: chunk.unwrap_or(USUAL_CHUNK),
        temperature: grows.unwrap_or(true).then_some(temperature),
        normed: normed.unwrap_or(true),
    })
}

fn chunked(kind: &str) -> Result<bool, ConfigError> {
    match kind {
        "chunked_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(ConfigError::Unsupported {
            feature: format!("layer type `{other}`"),
            supported: "full_attention and chunked_attention are",
        }),
    }
}
