//! A decode step allocates nothing, whatever the policy, except when it grows.
#![expect(
    unsafe_code,
    reason = "a global allocator that counts is unsafe to implement"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::num::NonZeroUsize;

use lacuna_kernels::{AttentionShape, Cpu, CpuConfig, ElementType, Mask};
use lacuna_kv::{
    Geometry, Keep, KvCache, KvElements, Layer, LayerCache, RowSpec, Sequence, Side, ValueRows,
};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting calls of each thread.
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

const LAYERS: usize = 2;
const WINDOW: NonZeroUsize = NonZeroUsize::new(100).expect("not zero");
const SHAPE: AttentionShape = AttentionShape {
    mask: Mask::Window(WINDOW),
    ..AttentionShape::causal(4, 2, 32, 0.2)
};

/// One token: prepare, store and attend in every layer, accept.
fn step(cpu: &Cpu, sequence: &mut Sequence) {
    const QUERY: usize = SHAPE.query_heads * SHAPE.head_dim;
    let (row, query) = ([0.5; 64], [0.25; QUERY]);
    let mut out = [0.0; QUERY];
    sequence.prepare(1).expect("room");
    for layer in (0..LAYERS).map(Layer) {
        sequence.write(layer, |_, run| cpu.store_run(run, &row));
        let keys = sequence.view(layer, Side::Key);
        let values = sequence.view(layer, Side::Value);
        let position = sequence.len();
        cpu.attention(&mut out, &query, &keys, &values, position, &SHAPE, &mut []);
    }
    for layer in 0..sequence.geometry().layers().len() {
        sequence.state(Layer(layer)).after.fill(1.0);
    }
    sequence.accept(1);
    sequence.release_passed().expect("pages go back");
}

/// A layer that keeps all rows, and one that keeps what its window has not passed.
fn windowed() -> Geometry {
    let keeps = [Keep::All, Keep::Window(WINDOW)];
    let layer = |keep| {
        LayerCache::Rows(RowSpec {
            kv_heads: SHAPE.kv_heads,
            key_dim: SHAPE.head_dim,
            value_dim: SHAPE.head_dim,
            values: ValueRows::Apart,
            keep,
        })
    };
    let layers = keeps.map(layer).to_vec();
    let geometry = Geometry::new(layers, KvElements::both(ElementType::F16)).expect("a model");
    geometry.with_states(vec![0, 3000]).expect("a model")
}

#[test]
fn a_step_that_maps_no_page_and_gives_none_back_allocates_nothing() {
    let cpu = cpu();
    for policy in ["sparse", "sparse:head-major", "dense", "paged"] {
        let policy = policy.parse().expect("a policy");
        let cache = KvCache::new(windowed(), policy).expect("the system has pages");
        let mut sequence = cache.sequence(2000).expect("address space");
        let mut changing = 0;
        for _ in 0..1000 {
            let batches = cache.ledger().counts.batches;
            let committed = sequence.report().committed_bytes;
            let before = ALLOCATIONS.with(Cell::get);
            step(&cpu, &mut sequence);
            let allocations = ALLOCATIONS.with(Cell::get) - before;
            let same = sequence.report().committed_bytes == committed;
            match same && cache.ledger().counts.batches == batches {
                true => assert_eq!(allocations, 0, "{policy} at {}", sequence.len()),
                false => changing += 1,
            }
        }
        // Four pages are mapped every 32 tokens, and two given back, together.
        assert!(changing <= 5 * 1000 / 32 + 1, "{policy}: {changing} steps");
    }
}

fn cpu() -> Cpu {
    Cpu::new(CpuConfig {
        threads: NonZeroUsize::MIN,
        ..CpuConfig::default()
    })
    .expect("this machine's own level")
}

#[test]
fn a_step_that_does_not_grow_allocates_nothing() {
    let cpu = cpu();
    for policy in [
        "sparse",
        "sparse:head-major",
        "sparse:interleaved=2",
        "dense",
        "dense:head-major",
        "grow:mlx",
        "grow:double-linear",
        "paged",
    ] {
        let policy = policy.parse().expect("a policy");
        let f16 = KvElements::both(ElementType::F16);
        let geometry = Geometry::uniform(LAYERS, SHAPE.kv_heads, SHAPE.head_dim, f16);
        let cache = KvCache::new(geometry, policy).expect("the system has pages");
        let mut sequence = cache.sequence(2000).expect("address space");
        let mut growing = 0;
        for _ in 0..1000 {
            let committed = sequence.report().committed_bytes;
            let before = ALLOCATIONS.with(Cell::get);
            step(&cpu, &mut sequence);
            let allocations = ALLOCATIONS.with(Cell::get) - before;
            match sequence.report().committed_bytes == committed {
                true => assert_eq!(allocations, 0, "{policy} at {}", sequence.len()),
                false => growing += 1,
            }
        }
        // 32 tokens fill a page of each of four buffers, and no page is mapped twice.
        assert!(
            growing <= 4 * 1000 / 32 + 1,
            "{policy} grew in {growing} steps"
        );
    }
}
