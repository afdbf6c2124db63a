//! Sequences whose rows name their token, layer, side and element.

use std::num::NonZeroUsize;
use std::sync::LazyLock;

use lacuna_kernels::{Cpu, CpuConfig, ElementType};
use lacuna_kv::{Geometry, KvCache, KvElements, KvPolicy, Layer, Sequence, Side};
use lacuna_pages::{ByteLength, DenseDevice, HostDevice, PageSize, Pool, PoolConfig};

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
        level: None,
    })
    .expect("this machine's own level")
}

pub(crate) fn cache(policy: &str) -> KvCache {
    let policy = policy.parse().expect("a policy");
    KvCache::new(GEOMETRY.clone(), policy).expect("the system has pages")
}

/// A pool of 4 KiB pages on the device that `policy` wants, of at most `limit` bytes.
pub(crate) fn pool(policy: KvPolicy, limit: Option<usize>) -> Pool {
    let config = PoolConfig {
        page_size: PageSize::new(PAGE as u64).expect("a page size"),
        limit: limit.map(|limit| ByteLength::new(limit as u64)),
        ..PoolConfig::default()
    };
    let pool = match policy {
        KvPolicy::Sparse(_) => Pool::new(HostDevice::new().expect("a host device"), config),
        _ => Pool::new(DenseDevice::new(), config),
    };
    pool.expect("a pool")
}

/// What element `element` of a row of the token named `tag` holds.
fn value(tag: usize, layer: usize, side: Side, element: usize) -> f32 {
    let side = if side == Side::Key { 0.0 } else { 0.5 };
    (tag * 1000 + layer * 100 + element) as f32 + side
}

fn row(tag: usize, layer: usize, side: Side) -> Vec<f32> {
    (0..KV_HEADS * HEAD_DIM)
        .map(|element| value(tag, layer, side, element))
        .collect()
}

/// Writes the rows of tokens named `tags` to the prepared places of every layer.
pub(crate) fn store(cpu: &Cpu, sequence: &mut Sequence, tags: &[usize]) {
    for layer in 0..LAYERS {
        let rows = |side| {
            tags.iter()
                .flat_map(|&tag| row(tag, layer, side))
                .collect::<Vec<_>>()
        };
        sequence.store(cpu, Layer(layer), &rows(Side::Key), &rows(Side::Value));
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
}

/// Checks that every token holds the rows of its position.
#[track_caller]
pub(crate) fn assert_rows(sequence: &Sequence) {
    let tags: Vec<usize> = (0..sequence.len()).collect();
    assert_tags(sequence, &tags);
}

/// Checks that the tokens are those named `tags`, of which released ones are not looked at.
#[track_caller]
pub(crate) fn assert_tags(sequence: &Sequence, tags: &[usize]) {
    assert_eq!(sequence.len(), tags.len());
    let held = sequence.first_held()..sequence.len();
    for layer in 0..LAYERS {
        for side in Side::BOTH {
            let view = sequence.view(Layer(layer), side);
            let prepared = sequence.prepared();
            assert_eq!(view.rows(), held.start..held.end + prepared);
            for position in held.clone() {
                let heads = 0..KV_HEADS;
                let words = heads.flat_map(|head| view.head(position, head).as_chunks::<4>().0);
                let found: Vec<f32> = words.map(|&word| f32::from_le_bytes(word)).collect();
                assert_eq!(
                    found,
                    row(tags[position], layer, side),
                    "position {position}, layer {layer}, {side}"
                );
            }
        }
    }
}
