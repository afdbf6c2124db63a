//! Any bytes are a model of some family or a typed error: GGUF metadata, or a `config.json`. What is
//! described can be planned, and its plan holds.
#![no_main]

use lacuna_files::huggingface::Config;
use lacuna_files::{Mapping, ModelFiles};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::program::Program;
use lacuna_models::{BatchLimits, Description, describe};
use libfuzzer_sys::fuzz_target;

const LIMITS: BatchLimits = BatchLimits {
    tokens: 3,
    logit_rows: 1,
    context_tokens: 64,
};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(files) = ModelFiles::from_gguf(Mapping::from(bytes.to_vec())) {
        if let Ok(description) = describe(&files) {
            plan(&description);
        }
    } else if let Ok(config) = Config::parse(bytes) {
        match Description::from_config(&config) {
            Ok(description) => plan(&description),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
});

fn plan(description: &Description) {
    // A program has a dozen operations for each layer: thousands of layers would only be slow.
    if description.spec.layers.len() > 64 {
        return;
    }
    let program = Program::new(&description.spec);
    if let Ok(plan) = ArenaPlan::new(&program, LIMITS) {
        assert_eq!(plan.verify(&program), Ok(()));
    }
}
