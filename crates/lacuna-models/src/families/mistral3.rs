//! Ministral 3, whose queries grow with their position, and Mistral Small 3.1 and later, whose do not: as Llama else.

use lacuna_kernels::RopeStyle;

use super::decoder::{ALL, decoder, windows};
use super::facts::Key;
use super::{Facts, Family, Naming, pixtral};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QueryTemperature, RopeScaling};

pub(crate) const FAMILY: Family = Family {
    name: "mistral3",
    classes: &["Ministral3ForCausalLM", pixtral::MISTRAL_3],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    spec.ropes[0].style = facts.style(RopeStyle::Interleaved);
    windows(&mut spec, facts, ALL)?;
    let beta = match facts.get(Key::gguf("attention.temperature_scale"))? {
        Some(beta) => Some(beta),
        None => facts.of_rope("llama_4_scaling_beta")?,
    };
    if let (Some(beta), RopeScaling::Yarn(yarn)) = (beta, &spec.ropes[0].scaling) {
        let temperature = QueryTemperature {
            beta,
            original_context: yarn.original_context,
            first: 0,
        };
        for layer in &mut spec.layers {
            layer.attention_mut().temperature = Some(temperature);
        }
    }
    pixtral::give_images(&mut spec, facts)?;
    Ok(spec)
}
