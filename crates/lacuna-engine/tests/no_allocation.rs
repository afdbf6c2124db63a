//! A decode step allocates nothing, but where the KV cache grows.
//!
//! Allocations of the calling thread are counted: those of a worker that is only starting are none of
//! the step's. With a single thread, everything a step does is done by the caller.
#![expect(
    unsafe_code,
    reason = "a global allocator that counts is unsafe to implement"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use lacuna_engine::{Engine, EngineConfig, Penalties, Sampling, Session};
use lacuna_files::ModelFiles;
use lacuna_kv::{KvPolicy, KvReport};
use lacuna_models::Model;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting the calls of each thread.
struct Counting;

// SAFETY: every call is passed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const STEPS: usize = 200;
/// The demo model's rows in f16 are 256 bytes, and pages hold sixteen of them at least.
const TOKENS_PER_PAGE: usize = 16;

fn model() -> Arc<Model> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/lacuna-demo-q8_0.gguf");
    let files = ModelFiles::open(&path).expect("the demo model is committed");
    Arc::new(Model::load(files).expect("the demo model loads"))
}

/// Draws with every setting in use.
fn sampling() -> Sampling {
    Sampling {
        penalties: Penalties {
            repetition: 1.1,
            presence: 0.1,
            frequency: 0.1,
            window: 64,
        },
        ..Sampling::default()
    }
}

/// What changes in the books when the cache grows.
fn growth(report: &KvReport) -> (usize, u64) {
    (report.committed_bytes, report.map_calls)
}

/// Allocations of one step, and whether the cache grew in it.
fn step(engine: &mut Engine, session: &mut Session) -> (usize, bool) {
    let held = growth(&session.kv());
    let before = ALLOCATIONS.with(Cell::get);
    let token = engine.step(session).expect("room for the step");
    let allocations = ALLOCATIONS.with(Cell::get) - before;
    assert!(token.is_some(), "one pending token makes one more");
    (allocations, growth(&session.kv()) != held)
}

fn check(
    model: &Arc<Model>,
    kv_policy: KvPolicy,
    threads: Option<NonZeroUsize>,
    sampling: Sampling,
) {
    let config = EngineConfig {
        threads,
        kv_policy,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(Arc::clone(model), &config).expect("this machine runs it");
    let mut session = engine.session(sampling).expect("a session");
    session.extend(&[1, 2, 3, 4, 5]);
    engine.step(&mut session).expect("the prompt fits");
    let mut steady = 0;
    for index in 0..STEPS {
        let (allocations, grew) = step(&mut engine, &mut session);
        if !grew {
            assert_eq!(allocations, 0, "{kv_policy}: step {index}");
            steady += 1;
        }
    }
    // The pages of a boundary are mapped one buffer after another.
    let buffers = 2 * model.spec().layers.len();
    let growing = buffers * (STEPS / TOKENS_PER_PAGE + 1);
    assert!(
        steady >= STEPS - growing,
        "{kv_policy}: {steady} steps did not grow"
    );
}

#[test]
fn a_decode_step_allocates_nothing_unless_the_cache_grows() {
    let model = model();
    for policy in [
        "sparse",
        "sparse:head-major",
        "sparse:interleaved=2",
        "dense",
        "grow:mlx",
        "grow:double-linear",
        "paged",
    ] {
        let policy = policy.parse().expect("a policy");
        check(&model, policy, Some(NonZeroUsize::MIN), Sampling::greedy());
        check(&model, policy, Some(NonZeroUsize::MIN), sampling());
        check(&model, policy, None, sampling());
    }
}
