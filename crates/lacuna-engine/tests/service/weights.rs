//! Weights that are part of the budget: they give way to KV pages as those grow, and no answer changes.

use std::sync::Arc;

use lacuna_engine::{Engine, EngineConfig, Sampling, Service};
use lacuna_files::ModelFiles;
use lacuna_models::plan::{Residency, WeightMode, WeightSource};
use lacuna_models::{Loading, Model};
use lacuna_pages::ByteLength;

use crate::support::{alone, config, contents, demo_path, greedy, model, prompt, together};

/// The demo model with weights where `config` has them.
fn loaded(config: &EngineConfig) -> Arc<Model> {
    let files = ModelFiles::open(&demo_path()).expect("the demo model is committed");
    let description = lacuna_models::describe(&files).expect("a model");
    let loading = Loading {
        residency: config.check(&files, &description).expect("it fits"),
        device: None,
        progress: &mut (),
    };
    Arc::new(Model::load_as(files, loading).expect("it loads"))
}

/// `config` with a budget that holds all weights, and KV pages of a few tokens.
fn holding_all_weights(config: EngineConfig) -> EngineConfig {
    let config = EngineConfig {
        request_memory: Some(ByteLength::mebibytes(2)),
        ..config
    };
    let mapped = Engine::new(model(), &config).expect("it runs");
    let files = ModelFiles::open(&demo_path()).expect("the demo model is committed");
    let description = lacuna_models::describe(&files).expect("a model");
    let weights = lacuna_models::plan::WeightPlan::of(files.tensors(), &description);
    let all = Residency::plan(&weights, WeightSource::Direct, None);
    let others = mapped.budget().parts.besides_kv();
    let least = mapped.plan().least().kv_bytes;
    EngineConfig {
        budget: Some(ByteLength::new(others + all.memory_bytes() + 8 * least)),
        weights: WeightMode::Auto,
        ..config
    }
}

/// The tokens that follow five others.
fn generate(engine: &mut Engine, count: usize) -> Vec<u32> {
    let mut session = engine.session(Sampling::greedy()).expect("a session");
    session.extend(&prompt(7, 5));
    let mut tokens = Vec::new();
    while tokens.len() < count {
        tokens.extend(engine.step(&mut session).expect("room for the step"));
    }
    tokens
}

#[test]
fn a_conversation_that_grows_takes_the_memory_of_weights_and_goes_on_as_ever() {
    let config = EngineConfig {
        context_tokens: Some(1024),
        batch_tokens: 64,
        ..EngineConfig::default()
    };
    let expected = generate(&mut Engine::new(model(), &config).expect("it runs"), 300);
    let config = holding_all_weights(config);
    let mut engine = Engine::new(loaded(&config), &config).expect("it runs");
    let budget = |engine: &Engine| engine.budget().parts.bytes();
    let (all, whole) = (engine.plan().residency.clone(), budget(&engine));
    assert_eq!(all.streamed_bytes, 0, "all weights fit to begin with");
    assert_eq!(Some(whole), config.budget.map(ByteLength::get));
    assert_eq!(generate(&mut engine, 300), expected);
    let left = &engine.plan().residency;
    assert!(left.streamed_bytes > 0 && left.memory_bytes() < all.memory_bytes());
    assert_eq!(engine.model().placed_bytes(), left.memory_bytes());
    assert_eq!(
        budget(&engine),
        whole,
        "what weights gave up is for KV pages"
    );
    // The next one finds fewer weights in memory.
    assert_eq!(generate(&mut engine, 40), expected[..40]);
}

#[test]
fn requests_that_run_together_take_the_memory_of_weights_before_any_is_preempted() {
    let mut config = config();
    config.prefix_cache.enabled = false;
    config.max_running = 4;
    config.max_batched_tokens = 32;
    config.engine = holding_all_weights(config.engine_config());
    let service = Service::start(loaded(&config.engine_config()), config).expect("a service");
    let before = service.handle().status();
    let request = |seed| greedy(prompt(seed, 20 + 9 * seed as usize), 60);
    let found = together(&service, (0..4).map(request).collect());
    for (found, seed) in found.iter().zip(0..) {
        assert_eq!(contents(found), contents(&alone(request(seed))));
    }
    let after = service.handle().status();
    let weights = |status: &lacuna_engine::Status| status.budget.plan.parts.read_weight_bytes;
    assert!(weights(&after) < weights(&before), "weights gave way");
    assert_eq!(after.counters.preemptions, 0, "and no request did");
}

#[test]
fn another_budget_is_kept_to_from_then_on_and_too_little_is_refused_with_the_least() {
    let mut config = config();
    config.max_running = 4;
    config.max_batched_tokens = 32;
    config.engine = holding_all_weights(config.engine_config());
    let whole = config.engine.budget.expect("it has one").get();
    let service = Service::start(loaded(&config.engine_config()), config).expect("a service");
    let handle = service.handle();
    let refused = handle
        .set_budget(ByteLength::new(1))
        .expect_err("nothing fits");
    let least = refused.needed.bytes();
    assert!(handle.set_budget(ByteLength::new(least - 1)).is_err());
    assert_eq!(handle.status().budget.plan.budget_bytes, Some(whole));
    let request = |seed| greedy(prompt(seed, 12), 20);
    let room = 128 << 10;
    for budget in [least + room, whole + room, least + room] {
        let set = handle.set_budget(ByteLength::new(budget));
        set.expect("it is enough");
        let found = together(&service, (0..4).map(request).collect());
        for (found, seed) in found.iter().zip(0..) {
            assert_eq!(contents(found), contents(&alone(request(seed))));
        }
        let status = handle.status();
        let plan = status.budget.plan;
        assert_eq!(plan.budget_bytes, Some(budget));
        assert_eq!(plan.parts.bytes(), budget);
        assert!(status.ledger.committed.get() <= plan.parts.kv_bytes);
        assert!(budget > whole || status.budget.weights.streamed > ByteLength::ZERO);
    }
}
