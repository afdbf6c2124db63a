//! Sessions that are stepped one by one, and the memory of weights.

use std::time::Duration;

use lacuna_kernels::ElementType;
use lacuna_kv::{KvElements, Layer};
use lacuna_models::Loading;
use lacuna_models::plan::{WeightMode, WeightPlan, WeightSource};

use super::*;
use crate::arbiter::SPARE_PATIENCE;
use crate::scheduler::tests::demo_model;
use crate::system::FakeSystem;
use crate::{Generation, Limits, Speculation};

/// An engine whose budget holds all weights and `least` times the KV pages of a token.
fn reading(least: u64) -> (Engine, FakeSystem) {
    let mut config = EngineConfig {
        context_tokens: Some(1024),
        batch_tokens: 64,
        request_memory: Some(ByteLength::mebibytes(2)),
        ..EngineConfig::default()
    };
    let mapped = Engine::new(demo_model(), &config).expect("this machine runs it");
    let files = demo_model().files().clone();
    let description = lacuna_models::describe(&files).expect("a model");
    let weights = WeightPlan::of(files.tensors(), &description);
    let all = Residency::plan(&weights, WeightSource::Direct, None).memory_bytes();
    let others = mapped.budget.parts.besides_kv();
    let kv = least * mapped.plan.least().kv_bytes;
    config.budget = Some(ByteLength::new(others + all + kv));
    let loading = Loading {
        residency: config.check(&files, &description).expect("it fits"),
        device: None,
        progress: &mut (),
    };
    let model = Arc::new(Model::load_as(files, loading).expect("it loads"));
    let mut engine = Engine::new(model, &config).expect("this machine runs it");
    let system = FakeSystem::new();
    engine.system = Box::new(system.clone());
    assert_eq!(engine.plan.residency.streamed_bytes, 0);
    (engine, system)
}

/// The tokens that follow five others, with `each` before every step.
fn generate(engine: &mut Engine, count: usize, mut each: impl FnMut(&Engine)) -> Vec<u32> {
    let mut session = engine.session(Sampling::greedy()).expect("a session");
    session.extend(&[7, 8, 9, 10, 11]);
    let mut tokens = Vec::new();
    while tokens.len() < count {
        each(engine);
        tokens.extend(engine.step(&mut session).expect("room for the step"));
    }
    tokens
}

/// What weights and KV pages have is the same in all, and what the model has is what the books say.
fn check(engine: &Engine, whole: u64) {
    let budget = &engine.budget;
    assert_eq!(budget.parts.bytes(), whole);
    assert_eq!(budget.budget_bytes, Some(whole));
    let held = engine.model.placed_bytes();
    assert_eq!(held, budget.parts.read_weight_bytes);
    assert!(engine.kv_limit <= budget.parts.kv_bytes);
    assert!(engine.cache.ledger().committed.get() <= engine.kv_limit);
}

/// They were left out, and all weights were used.
#[test]
fn neurons_without_the_files_that_they_are_read_from_are_refused() {
    let config = EngineConfig {
        context_tokens: Some(64),
        neurons: Some("no folder".into()),
        ..EngineConfig::default()
    };
    let refused = Engine::new(demo_model(), &config).err();
    assert!(
        matches!(refused, Some(EngineError::NoNeurons)),
        "{refused:?}"
    );
}

#[test]
fn weights_get_back_what_a_conversation_that_has_ended_took_from_them() {
    let mut mapped = Engine::new(demo_model(), &EngineConfig::default()).expect("it runs");
    let expected = generate(&mut mapped, 300, |_| {});
    let (mut engine, system) = reading(8);
    let whole = engine.budget.parts.bytes();
    for _ in 0..2 {
        let mut most = 0;
        let tokens = generate(&mut engine, 300, |engine| {
            system.pass(TEND_INTERVAL);
            check(engine, whole);
            let streamed = engine.plan.residency.streamed_bytes;
            assert!(streamed >= most, "what is needed is not given back");
            most = streamed;
        });
        assert_eq!(tokens, expected);
        assert!(most > 0, "weights gave way");
        // The next one is short: at first nobody knows that.
        let (mut steps, mut streamed) = (0, Vec::new());
        let tokens = generate(&mut engine, 20, |engine| {
            streamed.push(engine.plan.residency.streamed_bytes);
            let pause = [Duration::ZERO, TEND_INTERVAL, SPARE_PATIENCE];
            system.pass(pause[steps.min(2)]);
            steps += 1;
            check(engine, whole);
        });
        assert_eq!(tokens, expected[..20]);
        assert_eq!(streamed[..3], [most; 3], "not at once");
        assert_eq!(streamed[4..], [0; 16], "all are back");
    }
}

/// The limit of the program's control group falls while it writes, and rises again.
#[test]
fn a_system_that_runs_short_gets_weights_and_no_token_changes() {
    let mut mapped = Engine::new(demo_model(), &EngineConfig::default()).expect("it runs");
    let expected = generate(&mut mapped, 120, |_| {});
    let (mut engine, system) = reading(400);
    let whole = engine.budget.parts.bytes();
    let all = engine.weights_to_spare;
    let (mut steps, mut least) = (0, u64::MAX);
    let tokens = generate(&mut engine, 120, |engine| {
        check(engine, whole);
        let held = engine.plan.residency.memory_bytes();
        match steps {
            20 => system.set_memory(FakeSystem::RESERVE - all / 2, 0.0),
            // What weights gave is there.
            22 => system.set_memory(FakeSystem::RESERVE, 0.0),
            60 => system.set_memory(0, 0.0),
            62 => system.set_memory(FakeSystem::RESERVE, 0.0),
            90 => system.set_memory(1 << 40, 0.0),
            _ => {}
        }
        let time = [TEND_INTERVAL, SPARE_PATIENCE][usize::from(steps >= 90)];
        system.pass(time);
        match steps {
            0..=20 => assert_eq!(engine.weights_to_spare, all),
            23 => least = held,
            24..=60 => assert_eq!(held, least, "no more than the system lacked"),
            63..=90 => assert_eq!(engine.weights_to_spare, 0, "all that can be done without"),
            100.. => assert_eq!(engine.weights_to_spare, all, "all are back"),
            _ => {}
        }
        steps += 1;
    });
    assert!(least < u64::MAX && engine.has_all_weights);
    assert_eq!(tokens, expected);
}

#[test]
fn a_processor_may_choose_a_precision_only_where_it_computes_all_of_a_model() {
    use lacuna_kernels::{MatmulPrecision, PrecisionMode};

    let of = |matmul_precision, neurons: Option<&str>| {
        let config = EngineConfig {
            matmul_precision,
            neurons: neurons.map(Into::into),
            ..EngineConfig::default()
        };
        config
            .cpu()
            .expect("as many threads as there are")
            .precision
    };
    let f32 = PrecisionMode::from(MatmulPrecision::F32);
    assert_eq!(EngineConfig::default().matmul_precision, f32);
    assert_eq!(of(PrecisionMode::Auto, None), PrecisionMode::Auto);
    assert_eq!(of(PrecisionMode::Auto, Some("neurons")), f32);
    let told = MatmulPrecision::Bf16.into();
    assert_eq!(of(told, Some("neurons")), told, "which is refused");
}

/// Rows of logits for guesses lie where a batch's activations do, and are fewer where that is too little.
#[test]
fn guesses_that_nobody_asked_for_take_no_memory_for_activations() {
    let with = |batch_tokens, speculation| {
        let config = EngineConfig {
            batch_tokens,
            speculation,
            ..EngineConfig::default()
        };
        let engine = Engine::new(demo_model(), &config).expect("this machine runs it");
        let arena = &engine.plan.arena;
        (arena.bytes(), engine.scratch.limits().logit_rows)
    };
    let seven = "ngram:7".parse().expect("a way to guess");
    let mut rows = Vec::new();
    for batch_tokens in [1, 4, 16, 64, 512] {
        let (least, _) = with(batch_tokens, Speculation::Off);
        let (bytes, free) = with(batch_tokens, Speculation::NGRAM);
        assert_eq!(bytes, least, "batches of {batch_tokens}");
        assert_eq!(with(batch_tokens, Speculation::Auto), (bytes, free));
        let (asked_bytes, asked) = with(batch_tokens, seven);
        assert_eq!(asked, batch_tokens.min(8));
        assert_eq!(
            asked_bytes > least,
            asked > free,
            "no fewer than there is room for"
        );
        rows.push(free);
    }
    assert!(
        rows.is_sorted() && rows[0] == 1 && rows.contains(&16),
        "{rows:?}"
    );
}

/// An engine with keys of `key` and contexts of so many tokens.
fn with_keys_of(key: ElementType, context_tokens: usize, budget: Option<u64>) -> Engine {
    let config = EngineConfig {
        context_tokens: Some(context_tokens),
        kv_elements: KvElements {
            key,
            value: ElementType::F32,
        },
        budget: budget.map(ByteLength::new),
        weights: WeightMode::Fixed(WeightSource::Mmap),
        batch_tokens: 48,
        request_memory: Some(ByteLength::mebibytes(2)),
        ..EngineConfig::default()
    };
    Engine::new(demo_model(), &config).expect("this machine runs it")
}

#[test]
fn keys_of_few_bits_are_smoothed_and_memory_is_as_if_nothing_had_been_computed() {
    let mut engine = with_keys_of(ElementType::Q4_0, 1024, None);
    for layer in 0..engine.model().spec().layers.len() {
        let geometry = engine.kv_cache().geometry();
        assert!(geometry.key_smoothing(Layer(layer)).is_some(), "{layer}");
    }
    let ledger = engine.kv_cache().ledger();
    assert_eq!(ledger.committed, ledger.idle);
    assert!(!engine.holds_activations());
    let tokens = generate(&mut engine, 40, |_| {});
    let again = &mut with_keys_of(ElementType::Q4_0, 1024, None);
    assert_eq!(
        again.kv_cache().geometry(),
        engine.kv_cache().geometry(),
        "whoever starts later finds the same"
    );
    assert_eq!(generate(again, 40, |_| {}), tokens);
}

#[test]
fn keys_are_stored_as_they_are_where_that_is_fine_or_there_is_no_room_to_find_out() {
    let least = {
        let engine = with_keys_of(ElementType::Q4_0, 1024, None);
        engine.budget.parts.besides_kv() + engine.plan.least().kv_bytes
    };
    for (key, context_tokens, budget) in [
        (ElementType::F16, 1024, None),
        (ElementType::Q8_0, 1024, None),
        (ElementType::Q4_0, 31, None),
        (ElementType::Q4_0, 1024, Some(least)),
    ] {
        let mut engine = with_keys_of(key, context_tokens, budget);
        let geometry = engine.kv_cache().geometry();
        assert!(geometry.key_smoothing(Layer(0)).is_none(), "{key}");
        assert_eq!(generate(&mut engine, 8, |_| {}).len(), 8);
    }
}

/// Its rows may be of another model, whose kernels would read past them.
#[test]
fn a_session_of_another_engine_is_refused() {
    let config = EngineConfig::default();
    let engine = || Engine::new(demo_model(), &config).expect("this machine runs it");
    let (mut maker, mut other) = (engine(), engine());
    let mut session = maker.session(Sampling::greedy()).expect("a session");
    session.extend(&[7, 8, 9]);
    assert!(matches!(
        other.step(&mut session),
        Err(EngineError::OtherEngine)
    ));
    let begun = Generation::new(&mut other, &mut session, Limits::default());
    assert!(matches!(begun, Err(EngineError::OtherEngine)));
    drop(begun);
    let folder = tempfile::tempdir().expect("a folder");
    let saved = other.save_session(&mut session, "", &folder.path().join("a.session"));
    assert!(matches!(saved, Err(EngineError::OtherEngine)));
    assert_eq!(session.tokens(), [7, 8, 9]);
    maker
        .step(&mut session)
        .expect("its own goes on")
        .expect("a token");
}

#[test]
fn a_step_without_tokens_is_refused_in_words_about_the_prompt() {
    let config = EngineConfig::default();
    let mut engine = Engine::new(demo_model(), &config).expect("this machine runs it");
    let mut session = engine.session(Sampling::greedy()).expect("a session");
    let step = engine.step(&mut session);
    assert!(matches!(step, Err(EngineError::EmptyPrompt)), "{step:?}");
}

#[test]
fn more_memory_for_requests_than_can_be_is_refused() {
    let config = EngineConfig {
        request_memory: Some(ByteLength::new(u64::MAX)),
        ..EngineConfig::default()
    };
    let refused = Engine::new(demo_model(), &config).err();
    assert!(matches!(refused, Some(EngineError::MemoryShort { .. })));
}
