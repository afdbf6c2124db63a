//! The metadata of a synthetic model: what a converter would have written for the real one.

use super::vocabulary::Vocabulary;
use super::{Given, Model, Shape};
use lacuna_files::gguf::Writer;

pub(super) fn describe(header: &mut Writer, model: &Model) {
    let shape = model.shape;
    let name = format!("{} with random weights", shape.name);
    header
        .set("general.architecture", architecture(shape))
        .set("general.type", "model")
        .set("general.name", name.as_str())
        .set("general.file_type", model.types.file_type())
        .set("general.quantization_version", 2u32);
    describe_shape(header, shape, model.layers);
    if let Some(special) = shape.special_tokens {
        Vocabulary::of(special, shape.vocabulary).describe(header);
    }
}

/// What is before the keys of a family, and of an encoder's part that sees.
fn architecture(shape: &Shape) -> &'static str {
    let (first, _) = shape.family.split_once('.').unwrap_or((shape.family, ""));
    first
}

/// Only what a model's config is read from.
pub(super) fn describe_config(header: &mut Writer, model: &Model) {
    header.set("general.architecture", architecture(model.shape));
    describe_shape(header, model.shape, model.layers);
}

fn describe_shape(header: &mut Writer, shape: &Shape, layers: usize) {
    let family = shape.family;
    if shape.special_tokens.is_none() {
        header
            .set("clip.has_vision_encoder", true)
            .set("clip.use_gelu", true);
    }
    let sizes = [
        ("block_count", layers),
        ("context_length", shape.context),
        ("embedding_length", shape.hidden),
        ("feed_forward_length", shape.feed_forward),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head_size),
        ("attention.value_length", shape.head_size),
    ];
    let more = |key: &str| shape.more.iter().any(|(other, _)| *other == key);
    for (key, size) in sizes.into_iter().filter(|(key, _)| !more(key)) {
        set_size(header, &format!("{family}.{key}"), size);
    }
    for (key, value) in shape.more {
        let key = format!("{family}.{key}");
        match *value {
            Given::Size(size) => set_size(header, &key, size),
            Given::Number(number) => {
                header.set(&key, number);
            }
            Given::Text(text) => {
                header.set(&key, text);
            }
            Given::Sizes(sizes) => {
                header.set(&key, sizes);
            }
            Given::Numbers(numbers) => {
                header.set(&key, numbers);
            }
            Given::Flag(flag) => {
                header.set(&key, flag);
            }
            Given::PerLayer(values) => {
                let values = values.iter().cycle().take(layers);
                let values: Vec<u32> = values.map(|value| in_file(*value)).collect();
                header.set(&key, &values[..]);
            }
        }
    }
    header
        .set(&format!("{family}.rope.freq_base"), shape.rope_theta)
        .set(
            &format!("{family}.attention.layer_norm_rms_epsilon"),
            shape.norm_epsilon,
        );
}

fn set_size(header: &mut Writer, key: &str, size: usize) {
    header.set(key, in_file(size));
}

/// Sizes come from the table of shapes, whose numbers all fit.
fn in_file(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}
