//! OLMo 2 and 3: norms after attention and feed-forward only, and over all of queries and of keys;
//! OLMo 3 has windows and stretches the rotation of its full layers.

use super::decoder::{decoder, windows};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Mask, ModelSpec, Norms, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "olmo2",
    classes: &["Olmo2ForCausalLM", "Olmo3ForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 4)?;
    if spec.layers.iter().any(|layer| layer.mask() != Some(Mask::Causal)) {
        let head_dim = spec.ropes[0].dimensions;
        let [full, mut windowed] = facts.ropes(head_dim, head_dim)?;
        // What GGUF files say nothing of is the same in all layers; in Gemma's it is not.
        let theta: Option<f64> = facts.get(Key::gguf("rope.freq_base_swa"))?;
        if facts.is_gguf() && theta.is_none() {
            windowed.theta = full.theta;
        }
        spec.ropes = vec![full, windowed];
    }
    for layer in &mut spec.layers {
        let full = layer.mask() == Some(Mask::Causal);
        layer.attention_mut().rope = Some(usize::from(!full));
        layer.attention_mut().qk_norm = Some(QkNorm::Whole);
        layer.norms = Norms::After;
    }
    Ok(spec)
}
