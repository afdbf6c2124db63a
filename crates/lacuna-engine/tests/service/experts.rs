//! Experts that are part of the budget: their slots give way to KV pages as those grow, and no answer changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lacuna_engine::{Engine, EngineConfig, Sampling};
use lacuna_files::ModelFiles;
use lacuna_models::plan::{Residency, WeightMode};
use lacuna_models::{Loading, Model};
use lacuna_pages::ByteLength;

fn mixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/families/qwen3-moe/model.gguf")
}

fn loaded(residency: Residency) -> Arc<Model> {
    let files = ModelFiles::open(&mixture()).expect("a committed fixture");
    let loading = Loading {
        residency,
        device: None,
        progress: &mut (),
    };
    Arc::new(Model::load_as(files, loading).expect("it loads"))
}

/// Enough that rows are more than the sixteenth of the budget that they have from the start.
const TOKENS: usize = 3_000;

/// The tokens that follow five others.
fn generate(engine: &mut Engine, count: usize) -> Vec<u32> {
    let mut session = engine.session(Sampling::greedy()).expect("a session");
    session.extend(&[3, 40, 14, 51, 25]);
    let mut tokens = Vec::new();
    while tokens.len() < count {
        tokens.extend(engine.step(&mut session).expect("room for the step"));
    }
    tokens
}

#[test]
fn a_conversation_that_grows_takes_slots_of_experts_and_goes_on_as_ever() {
    let config = EngineConfig {
        context_tokens: Some(4096),
        batch_tokens: 32,
        request_memory: Some(ByteLength::mebibytes(2)),
        ..EngineConfig::default()
    };
    let mapped = loaded(Residency::mapped());
    let mut engine = Engine::new(Arc::clone(&mapped), &config).expect("it runs");
    let expected = generate(&mut engine, TOKENS);
    assert_eq!(engine.experts(), None, "they are in the mapped file");
    let files = ModelFiles::open(&mixture()).expect("a committed fixture");
    let description = lacuna_models::describe(&files).expect("a model");
    // The least at which nearly all experts have a slot, whatever else takes memory: rows then take it from them.
    const STEP: u64 = 16 << 10;
    let least = engine.budget().parts.besides_kv() / STEP;
    let budgets = (least..).map(|steps| EngineConfig {
        budget: Some(ByteLength::new(steps * STEP)),
        weights: WeightMode::Auto,
        ..config.clone()
    });
    let of_budgets = budgets.filter_map(|config| {
        let residency = config.check(&files, &description).ok()?;
        let experts = residency.experts?;
        (experts.slots + 1 >= experts.experts).then_some((config, residency))
    });
    let (config, residency) = of_budgets
        .take(1)
        .next()
        .expect("all of them fit at some time");
    let mut engine = Engine::new(loaded(residency), &config).expect("it runs");
    let (before, whole) = (engine.experts(), engine.budget().parts.bytes());
    let before = before.expect("they are read").slots;
    assert!(before.slots > before.experts / 2, "{before:?}");
    assert_eq!(generate(&mut engine, TOKENS), expected);
    let after = engine.experts().expect("they are read");
    assert!(after.slots.slots < before.slots, "{after:?}");
    assert!(
        after.counts.hits > 0 && after.counts.misses > 0,
        "{after:?}"
    );
    assert_eq!(engine.plan().residency.streamed_bytes, 0, "matrices stay");
    assert_eq!(engine.budget().parts.bytes(), whole);
    let residency = &engine.plan().residency;
    assert_eq!(engine.model().placed_bytes(), residency.memory_bytes());
}
