//! Gemma 3n: several residual streams, of which layers compute one; a learned residual beside attention;
//! an input of its own for each layer; gates that are sparse in the first layers; keys and values that
//! the last layers share.

use super::decoder::{decoder, windows};
use super::facts::{Key, PerLayer};
use super::gemma2::gemma;
use super::gemma4::{per_layer_inputs, share};
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{AltUp, Laurel, Mask, ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "gemma3n",
    classes: &["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"],
    spec,
    naming: Naming {
        parts: &[
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("per_layer_token_embd", "model.embed_tokens_per_layer"),
            ("per_layer_model_proj", "model.per_layer_model_projection"),
            ("per_layer_proj_norm", "model.per_layer_projection_norm"),
            ("inp_gate", "per_layer_input_gate"),
            ("proj", "per_layer_projection"),
            ("post_norm", "post_per_layer_input_norm"),
            ("altup_proj.0", "model.altup_projections.0"),
            ("altup_proj.1", "model.altup_projections.1"),
            ("altup_proj.2", "model.altup_projections.2"),
            ("altup_unembd_proj.0", "model.altup_unembed_projections.0"),
            ("altup_unembd_proj.1", "model.altup_unembed_projections.1"),
            ("altup_unembd_proj.2", "model.altup_unembed_projections.2"),
            ("altup_router_norm", "altup.router_norm"),
            ("altup_router", "altup.modality_router"),
            ("altup_predict_coef", "altup.prediction_coefs"),
            ("altup_correct_coef", "altup.correction_coefs"),
            ("altup_correct_scale", "altup.correct_output_scale"),
            ("laurel_l", "laurel.linear_left"),
            ("laurel_r", "laurel.linear_right"),
            ("laurel_post_norm", "laurel.post_laurel_norm"),
        ],
        bare: &["altup_correct_scale"],
        ..Naming::USUAL
    },
    shapes: SHAPES,
};

/// Of no published model: narrow inputs of layers and all gates sparse, of which 5 of 100 stay, to see what that is worth. A
/// neuron in f16 is two pages.
const SHAPES: &[Shape] = &[Shape {
    name: "gemma3n-sparse-1b",
    family: "gemma3n",
    layers: 18,
    hidden: 2048,
    feed_forward: 8192,
    heads: 8,
    kv_heads: 2,
    head_size: 256,
    vocabulary: 32_768,
    special_tokens: Some(SpecialTokens::ChatMl),
    tied: true,
    context: 32_768,
    rope_theta: 1e6,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &[
        ("embedding_length_per_layer_input", Given::Size(64)),
        ("activation_sparsity_scale", Given::Number(1.644_853_6)),
        ("altup.active_idx", Given::Size(0)),
        ("altup.num_inputs", Given::Size(4)),
        ("attention.shared_kv_layers", Given::Size(0)),
        ("attention.sliding_window", Given::Size(512)),
        ("rope.freq_base_swa", Given::Number(10_000.0)),
        ("laurel_rank", Given::Size(64)),
    ],
}];

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 5)?;
    gemma(&mut spec, facts)?;
    let head_dim = spec.ropes[0].dimensions;
    spec.ropes = facts.ropes(head_dim, head_dim)?.into();
    let laurel = Laurel {
        rank: laurel_rank(facts)?,
    };
    let cutoffs = gate_cutoffs(facts, spec.layers.len())?;
    for (layer, cutoff) in spec.layers.iter_mut().zip(cutoffs) {
        let attention = layer.attention_mut();
        attention.rope = Some(usize::from(attention.mask != Mask::Causal));
        attention.qk_norm = Some(QkNorm::PerHead);
        attention.value_norm = true;
        attention.scale = 1.0;
        layer.laurel = Some(laurel);
        if let Some(block) = layer.feed_forward.gated_mut() {
            block.gate_cutoff = cutoff;
        }
    }
    // Without it nothing says whether the last layers' own keys and values are to be used.
    let shared = Key::new("attention.shared_kv_layers", "num_kv_shared_layers");
    facts.required::<usize>(shared)?;
    share(&mut spec, facts)?;
    per_layer_inputs(&mut spec, facts)?;
    spec.altup = Some(altup(facts)?);
    Ok(spec)
}

fn altup(facts: &Facts<'_>) -> Result<AltUp, ConfigError> {
    facts.expect(
        Key::new("altup.active_idx", "altup_active_idx"),
        0,
        "models whose layers compute the first residual stream are",
    )?;
    if facts.get(Key::huggingface("altup_correct_scale"))? == Some(false) {
        return Err(ConfigError::Unsupported {
            feature: "altup_correct_scale false".to_owned(),
            supported: "models that scale what their layers' own inputs are gated by are",
        });
    }
    Ok(AltUp {
        streams: facts.required(Key::new("altup.num_inputs", "altup_num_inputs"))?,
    })
}

/// Published GGUF files have no key for it, but the narrow matrices have as many rows.
fn laurel_rank(facts: &Facts<'_>) -> Result<usize, ConfigError> {
    if let Some(rank) = facts.get(Key::gguf("laurel_rank"))? {
        return Ok(rank);
    }
    let narrow = "blk.0.laurel_l.weight";
    match (facts.has_tensor(narrow), facts.rows_of(narrow)) {
        (None, _) => facts.required(Key::huggingface("laurel_rank")),
        (Some(_), Some(rank)) => Ok(rank),
        (Some(_), None) => Err(ConfigError::Needs {
            field: "a learned residual",
            needs: narrow,
        }),
    }
}

/// How many standard deviations above the mean the gates of each layer are cut off, in layers that are
/// sparse. A `config.json` has the part of gates that are to be nothing instead, were they normally
/// distributed.
fn gate_cutoffs(facts: &Facts<'_>, layers: usize) -> Result<Vec<Option<f32>>, ConfigError> {
    let name = "activation_sparsity_scale";
    let parts = "activation_sparsity_pattern";
    match facts.get::<PerLayer<f32>>(Key::gguf(name))? {
        Some(cutoffs) => {
            let cutoffs = cutoffs.of(layers, name)?.into_iter();
            let sparse = cutoffs.map(|cutoff| (cutoff != f32::NEG_INFINITY).then_some(cutoff));
            Ok(sparse.collect())
        }
        None => {
            let found: PerLayer<f32> = facts.required(Key::new(name, parts))?;
            let found = found.of(layers, parts)?.into_iter();
            let sparse = found.map(|part| (part > 0.0).then(|| quantile(f64::from(part)) as f32));
            Ok(sparse.collect())
        }
    }
}

/// The number that a normally distributed one, of mean 0 and deviation 1, is below with probability `p`;
/// not finite unless `p` is between 0 and 1.
fn quantile(p: f64) -> f64 {
    if !(0.0..1.0).contains(&p) || p == 0.0 {
        return f64::NAN;
    }
    if p < 0.5 {
        return -quantile(1.0 - p);
    }
    // The distribution bends downwards above 0, so Newton's steps from there approach from below and
    // never pass it.
    let mut x = 0.0_f64;
    for _ in 0..100 {
        let density = (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
        let step = (p - 0.5 - density * odd_series(x)) / density;
        x += step;
        if step.abs() < 1e-14 {
            break;
        }
    }
    x
}

/// `x + x^3 / 3 + x^5 / (3 * 5) + ...`, which times the density is the probability between 0 and `x`.
fn odd_series(x: f64) -> f64 {
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term > sum * f64::EPSILON / 2.0 {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_tables() {
        let table = [
            (0.5, 0.0),
            (0.8, 0.841_621_233_572_914_3),
            (0.95, 1.644_853_626_951_472_2),
            (0.999, 3.090_232_306_167_813_5),
            (0.3, -0.524_400_512_708_041),
        ];
        for (p, expected) in table {
            let found = quantile(p);
            assert!((found - expected).abs() < 1e-12, "{p}: {found}");
        }
        for p in [-0.1, 0.0, 1.0, 1.5, f64::NAN] {
            assert!(!quantile(p).is_finite(), "{p}");
        }
        assert!(quantile(1.0 - f64::EPSILON).is_finite());
    }
}
