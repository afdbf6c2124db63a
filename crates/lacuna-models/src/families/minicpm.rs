//! MiniCPM 1, 2 and 4, dense: multipliers on embeddings, residuals and logits.

use lacuna_kernels::RopeStyle;

use super::decoder::{decoder, tied_unless_said};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, ResidualScale};

pub(crate) const FAMILY: Family = Family {
    name: "minicpm",
    classes: &["MiniCPMForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let experts: Option<usize> = facts.get(Key::new("expert_count", "num_experts"))?;
    if let Some(experts) = experts.filter(|experts| *experts > 0) {
        return Err(ConfigError::Unsupported {
            feature: format!("MiniCPM with {experts} experts"),
            supported: "dense MiniCPM is",
        });
    }
    let mut spec = decoder(facts)?;
    // The converter permutes the rows of queries and keys.
    spec.ropes[0].style = facts.style(RopeStyle::Interleaved);
    tied_unless_said(&mut spec, facts)?;
    let Multipliers {
        embedding,
        residual,
        logits_divisor,
    } = Multipliers::read(facts, &spec)?;
    spec.embedding_scale = Some(embedding);
    if let Some(logits) = spec.logits_mut() {
        logits.scale = Some(1.0 / logits_divisor);
    }
    for layer in &mut spec.layers {
        layer.residual_scale = ResidualScale::all(Some(residual));
    }
    Ok(spec)
}

struct Multipliers {
    embedding: f32,
    residual: f32,
    /// What the last rows are divided by before they are multiplied with the output matrix.
    logits_divisor: f32,
}

impl Multipliers {
    /// GGUF files have what it comes to; the first of them have none, and are of models that had these.
    fn read(facts: &Facts<'_>, spec: &ModelSpec) -> Result<Self, ConfigError> {
        let width = spec.hidden as f32;
        let residual = |depth: f32| depth / (spec.layers.len() as f32).sqrt();
        if facts.is_gguf() {
            let said = |name| facts.get::<f32>(Key::gguf(name));
            return Ok(Self {
                embedding: said("embedding_scale")?.unwrap_or(12.0),
                residual: said("residual_scale")?.unwrap_or_else(|| residual(1.4)),
                logits_divisor: said("logit_scale")?.unwrap_or(width / 256.0),
            });
        }
        let base: usize = facts.required(Key::huggingface("dim_model_base"))?;
        Ok(Self {
            embedding: facts.required(Key::huggingface("scale_emb"))?,
            residual: residual(facts.required(Key::huggingface("scale_depth"))?),
            logits_divisor: width / base as f32,
        })
    }
}
