//! EXAONE 3 and 3.5: Llama under other names.

use super::decoder::decoder;
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "exaone",
    classes: &["ExaoneForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("token_embd", "transformer.wte"),
            ("output_norm", "transformer.ln_f"),
            ("attn_norm", "ln_1"),
            ("attn_q", "attn.attention.q_proj"),
            ("attn_k", "attn.attention.k_proj"),
            ("attn_v", "attn.attention.v_proj"),
            ("attn_output", "attn.attention.out_proj"),
            ("ffn_norm", "ln_2"),
            ("ffn_gate", "mlp.c_fc_0"),
            ("ffn_up", "mlp.c_fc_1"),
            ("ffn_down", "mlp.c_proj"),
        ],
        layers: "transformer.h",
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let function = Key::huggingface("activation_function");
    facts.expect(function, "silu".to_owned(), "silu is")?;
    decoder(facts)
}
