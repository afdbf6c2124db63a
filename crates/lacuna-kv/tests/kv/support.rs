//! Sequences whose rows name their token, layer, side and element.

use std::num::NonZeroUsize;
use std::sync::LazyLock;

use lacuna_kernels::{Cpu, CpuConfig, ElementType, State};
use lacuna_kv::{
    Geometry, Keep, KvCache, KvElements, KvPolicy, Layer, LayerCache, RowSpec, Sequence, Side,
    ValueRows,
};
use lacuna_pages::{ByteLength, DenseDevice, HostDevice, PageSize, Pool, PoolConfig, SplitDevice};

/// Rows of 96 bytes: a 4 KiB page holds 42 and two thirds.
pub(crate) static GEOMETRY: LazyLock<Geometry> = LazyLock::new(|| {
    let elements = KvElements::both(ElementType::F32);
    Geometry::uniform(LAYERS, KV_HEADS, HEAD_DIM, elements)
});
pub(crate) const LAYERS: usize = 3;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 12;
pub(crate) const ROW_BYTES: usize = 4 * KV_HEADS * HEAD_DIM;
pub(crate) const PAGE: usize = 4096;

/// A layer with rows of its own.
pub(crate) fn rows(kv_heads: usize, key_dim: usize, value_dim: usize, keep: Keep) -> LayerCache {
    LayerCache::Rows(RowSpec {
        kv_heads,
        key_dim,
        value_dim,
        values: ValueRows::Apart,
        keep,
    })
}

/// Rows whose values are the first elements of their keys.
fn latent(kv_heads: usize, key_dim: usize, value_dim: usize, keep: Keep) -> LayerCache {
    LayerCache::Rows(RowSpec {
        kv_heads,
        key_dim,
        value_dim,
        values: ValueRows::InKeys,
        keep,
    })
}

pub(crate) fn window(rows: usize) -> Keep {
    Keep::Window(NonZeroUsize::new(rows).expect("not zero"))
}

/// Layers of every kind: full and windowed rows, straddling pages and not, some side by side, wide
/// and narrow windows, one of a single row, values that are part of keys, another layer's rows, and
/// none.
pub(crate) static WINDOWED: LazyLock<Geometry> = LazyLock::new(|| {
    let layers = vec![
        rows(2, 12, 12, window(50)),
        rows(2, 12, 12, window(50)),
        rows(1, 40, 24, Keep::All),
        LayerCache::None,
        rows(1, 16, 64, window(130)),
        LayerCache::Of(Layer(1)),
        rows(2, 12, 12, window(1)),
        LayerCache::Of(Layer(2)),
        latent(1, 40, 32, Keep::All),
        latent(2, 20, 12, window(50)),
    ];
    Geometry::new(layers, KvElements::both(ElementType::F32)).expect("a model")
});

/// The same, and states: beside rows, in place of them, some smaller than a page and some larger.
pub(crate) static STATES: LazyLock<Geometry> = LazyLock::new(|| {
    let mut states = vec![0; WINDOWED.layers().len()];
    (states[1], states[3], states[4]) = (5, 3000, 16);
    let states = WINDOWED.clone().with_states(states).expect("a model");
    // As many as the number of the layer.
    let inputs =
        (0..states.layers().len()).map(|layer| match states.state_elements(Layer(layer)) {
            0 => 0,
            _ => layer,
        });
    let inputs = inputs.collect();
    states.with_state_inputs(inputs).expect("a model")
});

/// Layers of every kind with memory of the host's and of a device's, and states of both.
pub(crate) static SPLIT: LazyLock<Geometry> = LazyLock::new(|| {
    let mut states = vec![0; WINDOWED.layers().len()];
    (states[1], states[3], states[9]) = (5, 3000, 1100);
    let states = WINDOWED.clone().with_states(states).expect("a model");
    let inputs = vec![0, 1, 0, 3, 0, 0, 0, 0, 0, 9];
    let states = states.with_state_inputs(inputs).expect("a model");
    // No layer from there on reads the rows of one before.
    states.with_host_layers(8).expect("a model")
});

/// Every way to hold memory.
pub(crate) const POLICIES: [&str; 11] = [
    "sparse",
    "sparse:head-major",
    "sparse:interleaved=2",
    "dense",
    "dense:head-major",
    "dense:interleaved=2",
    "grow:mlx",
    "grow:double-linear",
    "grow:double-linear:300",
    "paged",
    "paged:7",
];
/// Those that share memory between sequences.
pub(crate) const SHARING: [&str; 5] = [
    "sparse",
    "sparse:head-major",
    "sparse:interleaved=2",
    "paged",
    "paged:7",
];

pub(crate) fn cpu() -> Cpu {
    Cpu::new(CpuConfig {
        threads: NonZeroUsize::MIN,
        ..CpuConfig::default()
    })
    .expect("this machine's own level")
}

pub(crate) fn cache(policy: &str) -> KvCache {
    let policy = policy.parse().expect("a policy");
    KvCache::new(GEOMETRY.clone(), policy).expect("the system has pages")
}

fn config(limit: Option<usize>) -> PoolConfig {
    PoolConfig {
        page_size: PageSize::new(PAGE as u64).expect("a page size"),
        limit: limit.map(|limit| ByteLength::new(limit as u64)),
        ..PoolConfig::default()
    }
}

/// A pool of 4 KiB pages on the device that `policy` wants, of at most `limit` bytes.
pub(crate) fn pool(policy: KvPolicy, limit: Option<usize>) -> Pool {
    let config = config(limit);
    let pool = match policy {
        KvPolicy::Sparse(_) => Pool::new(HostDevice::new().expect("a host device"), config),
        _ => Pool::new(DenseDevice::new(), config),
    };
    pool.expect("a pool")
}

/// The same for rows of `geometry`, with memory of two kinds where these are to have it.
pub(crate) fn pool_of(geometry: &Geometry, policy: KvPolicy, limit: Option<usize>) -> Pool {
    if geometry.host_layers() == 0 {
        return pool(policy, limit);
    }
    let own = HostDevice::new().expect("a host device");
    let device = SplitDevice::new(own).expect("pages of one size");
    Pool::new(device, config(limit)).expect("a pool")
}

/// What element `element` of a row of the token named `tag` holds.
fn value(tag: usize, layer: usize, side: Side, element: usize) -> f32 {
    let side = if side == Side::Key { 0.0 } else { 0.5 };
    (tag * 1000 + layer * 100 + element) as f32 + side
}

fn row(tag: usize, layer: Layer, spec: &RowSpec, side: Side) -> Vec<f32> {
    let stored = match spec.values {
        ValueRows::Apart => side,
        ValueRows::InKeys => Side::Key,
    };
    let head = |head: usize| {
        let first = head * spec.head_dim(stored);
        (first..first + spec.head_dim(side))
            .map(move |element| value(tag, layer.0, stored, element))
    };
    (0..spec.kv_heads).flat_map(head).collect()
}

/// Writes the rows of tokens named `tags` to the prepared places of every layer.
pub(crate) fn store(cpu: &Cpu, sequence: &mut Sequence, tags: &[usize]) {
    for (layer, spec) in sequence.geometry().clone().own_rows() {
        let rows = |side| {
            tags.iter()
                .flat_map(|&tag| row(tag, layer, &spec, side))
                .collect::<Vec<_>>()
        };
        let rows = Side::BOTH.map(rows);
        sequence.write(layer, |side, run| {
            cpu.store_run(run, &side.of(rows.each_ref())[..]);
        });
    }
    advance(sequence, tags);
}

/// What the first element of a layer's state is after the tokens named `tags`, when it was `before`: a small
/// whole number, which is exact. The others follow from it.
fn state_after(before: f32, tags: &[usize], layer: usize) -> f32 {
    let next = |state: usize, tag: &usize| (state * 31 + tag * 7 + layer + 1) % 65_521;
    tags.iter().fold(before as usize, next) as f32
}

/// Element `element` of a state whose first is `first`, and all zeros before the first token.
fn state_element(first: f32, element: usize) -> f32 {
    if first == 0.0 {
        0.0
    } else {
        first + element as f32
    }
}

/// Computes the states after the prepared tokens, which are named `tags`, from those before them.
pub(crate) fn advance(sequence: &mut Sequence, tags: &[usize]) {
    for layer in 0..sequence.geometry().layers().len() {
        let elements = sequence.geometry().state_elements(Layer(layer));
        if elements == 0 {
            continue;
        }
        if let Some(inputs) = sequence.state_inputs(Layer(layer)) {
            let inputs = inputs.chunks_exact_mut(layer).zip(tags);
            inputs.for_each(|(input, &tag)| input.fill(tag as f32));
        }
        let State {
            before,
            after: state,
        } = sequence.state(Layer(layer));
        assert_eq!(state.len(), elements);
        if let Some(before) = before {
            state.copy_from_slice(before);
        }
        assert!(state.as_ptr().addr().is_multiple_of(64), "for wide vectors");
        let first = state_after(state[0], tags, layer);
        for (element, value) in state.iter_mut().enumerate() {
            *value = state_element(first, element);
        }
    }
}

/// Checks in the middle of a step that states are those after the tokens named `tags`.
#[track_caller]
pub(crate) fn assert_states(sequence: &mut Sequence, tags: &[usize]) {
    for layer in 0..sequence.geometry().layers().len() {
        let first = state_after(0.0, tags, layer);
        for (element, &found) in sequence.state(Layer(layer)).after.iter().enumerate() {
            let expected = state_element(first, element);
            assert_eq!(found, expected, "layer {layer}, element {element}");
        }
    }
}

/// Prepares, writes and accepts `count` tokens that are named by their position.
pub(crate) fn extend(cpu: &Cpu, sequence: &mut Sequence, count: usize) {
    let tags: Vec<usize> = (sequence.len()..sequence.len() + count).collect();
    append(cpu, sequence, &tags);
}

/// Prepares, writes and accepts the tokens named `tags`.
pub(crate) fn append(cpu: &Cpu, sequence: &mut Sequence, tags: &[usize]) {
    sequence.prepare(tags.len()).expect("room");
    store(cpu, sequence, tags);
    sequence.accept(tags.len());
    sequence.release_passed().expect("pages go back");
}

/// Checks that every token holds the rows of its position.
#[track_caller]
pub(crate) fn assert_rows(sequence: &Sequence) {
    let tags: Vec<usize> = (0..sequence.len()).collect();
    assert_tags(sequence, &tags);
}

/// Checks that the tokens are those named `tags`, as far as the next one sees them in each layer.
#[track_caller]
pub(crate) fn assert_tags(sequence: &Sequence, tags: &[usize]) {
    assert_eq!(sequence.len(), tags.len());
    let geometry = sequence.geometry();
    for layer in (0..geometry.layers().len()).map(Layer) {
        let Some((source, spec)) = geometry.rows(layer) else {
            continue;
        };
        let held = sequence.first_held(layer)..sequence.len();
        for side in Side::BOTH {
            let view = sequence.view(layer, side);
            let prepared = sequence.prepared();
            assert_eq!(view.rows(), held.start..held.end + prepared);
            for position in held.clone() {
                let heads = 0..spec.kv_heads;
                let words = heads.flat_map(|head| view.head(position, head).as_chunks::<4>().0);
                let found: Vec<f32> = words.map(|&word| f32::from_le_bytes(word)).collect();
                assert_eq!(
                    found,
                    row(tags[position], source, &spec, side),
                    "position {position}, {layer:?}, {side}"
                );
            }
        }
    }
}
