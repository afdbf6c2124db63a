//! Three memories behind one shader: pages by the device's own page table, pages that kernels look up, and no pages. What is
//! computed over them is the same to the bit.

use lacuna_gpu::{Vulkan, VulkanConfig};
use lacuna_kernels::ElementType;
use lacuna_kv::{KvElements, KvPolicy};
use lacuna_models::LogitRows;
use lacuna_pages::ByteLength;
use lacuna_pages::device::{Aliasing, Commitment};
use lacuna_pages::vulkan::PageTable;

use crate::support::{OnDevice, some_tokens};

/// How pages are found, and the policy of the cache.
const MEMORIES: [(PageTable, &str); 4] = [
    (PageTable::Device, "dense"),
    (PageTable::Lookup, "sparse"),
    (PageTable::Lookup, "dense"),
    (PageTable::Unused, "sparse"),
];

fn open(path: &str, elements: KvElements, (page_table, policy): (PageTable, &str)) -> OnDevice {
    let config = VulkanConfig {
        page_table,
        ..VulkanConfig::default()
    };
    let device = Vulkan::open_with(config).expect("a device");
    assert_eq!(device.device().page_table(), page_table);
    let policy: KvPolicy = policy.parse().expect("a policy");
    OnDevice::on(&device, path, elements, policy).expect("the device runs it")
}

/// All that a model gives for some tokens: in one pass, in chunks, from sequences that share what they begin with, cut, and
/// side by side.
fn everything(mut model: OnDevice) -> Vec<Vec<f32>> {
    let tokens = some_tokens(100, model.vocabulary().min(16));
    let rest = &tokens[80..];
    let whole = model.logits(&tokens);
    let mut chunks = model.sequence();
    let chunked: Vec<f32> = tokens
        .chunks(33)
        .flat_map(|chunk| model.extend(&mut chunks, chunk))
        .collect();
    assert!(chunked == whole, "in chunks");
    let one_by_one = tokens[..20].iter();
    let mut single = model.sequence();
    let one_by_one: Vec<f32> = one_by_one
        .flat_map(|token| model.extend(&mut single, &[*token]))
        .collect();
    assert!(whole.starts_with(&one_by_one), "token by token");

    let mut first = model.sequence();
    model.extend(&mut first, &tokens[..80]);
    // Shared where pages can be, and copied where not.
    let mut fork = first.fork().expect("there is memory");
    let mut other = model.sequence();
    model.extend(&mut other, &tokens[..9]);
    let mut all = [
        (&mut other, rest),
        (&mut fork, rest),
        (&mut first, &rest[..3]),
    ];
    let together = model.pass(&mut all, LogitRows::All);
    let width = model.vocabulary();
    let forked = &together[rest.len() * width..2 * rest.len() * width];
    assert!(whole.ends_with(forked), "forked");
    fork.accept(rest.len());
    first.accept(3);
    // What one writes behind what they share, the other does not see.
    let after = model.extend(&mut first, &rest[3..]);
    assert!(whole.ends_with(&after), "the one forked from");
    let mut found = vec![whole, together, model.extend(&mut fork, &[3, 1, 2])];
    // A window has let go of the first rows, and states do not go back.
    if let Ok(mut shared) = first.share_prefix(70) {
        found.push(model.extend(&mut shared, rest));
        first.truncate(40).expect("pages go back");
        found.push(model.extend(&mut first, rest));
    }
    found
}

fn are_equal(path: &str, elements: KvElements) {
    let sparse = everything(open(path, elements, (PageTable::Device, "sparse")));
    for memory in MEMORIES {
        let found = everything(open(path, elements, memory));
        // A window lets go of no rows that are memory from the start, so more of them can be shared.
        let same = found
            .iter()
            .zip(&sparse)
            .all(|(found, sparse)| found == sparse);
        assert!(same && found.len() >= sparse.len(), "{path}: {memory:?}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn rows_of_floats_are_the_same_in_every_memory() {
    for (path, element) in [
        ("demo", ElementType::F16),
        ("families/mistral-window/hf", ElementType::F16),
        ("families/deepseek-v3/hf", ElementType::F32),
        ("families/gemma3n/hf", ElementType::Bf16),
    ] {
        are_equal(path, KvElements::both(element));
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn states_are_the_same_in_every_memory() {
    for path in ["families/qwen3-next/hf", "families/mamba2/hf"] {
        are_equal(path, KvElements::both(ElementType::F16));
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn rows_of_blocks_are_the_same_in_every_memory() {
    are_equal("demo", KvElements::both(ElementType::Q8_0));
}

/// Pages that are looked up are shared, come with tokens, and are in any of several heaps.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn pages_that_are_looked_up_are_shared_and_come_with_tokens() {
    let elements = KvElements::both(ElementType::F16);
    let mut model = open("demo", elements, (PageTable::Lookup, "sparse"));
    let capabilities = model.cache.pool().capabilities().clone();
    assert_eq!(capabilities.aliasing, Aliasing::Shared);
    assert_eq!(capabilities.commitment, Commitment::PerHeap);
    assert_eq!(model.cache.ledger().committed, ByteLength::ZERO);
    let tokens = some_tokens(300, model.vocabulary());
    let mut first = model.sequence();
    model.extend(&mut first, &tokens);
    let mapped = model.cache.ledger().mapped;
    let fork = first.fork().expect("pages are shared");
    assert!(fork.report().shared_bytes > 0, "not copied");
    assert!(model.cache.ledger().shared > ByteLength::ZERO);
    assert!(mapped < model.cache.ledger().mapped);
    drop((first, fork));
    assert_eq!(model.cache.ledger().mapped, ByteLength::ZERO);
}

/// The first layers on the processor, over its own pages, and the others over pages that are looked up.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_split_is_the_same_in_every_memory() {
    let split = |page_table| {
        let config = VulkanConfig {
            page_table,
            ..VulkanConfig::default()
        };
        let device = Vulkan::open_with(config).expect("a device");
        let elements = KvElements::both(ElementType::F16);
        let model = OnDevice::behind(&device, ("demo", 2), elements, KvPolicy::default());
        everything(model.expect("the device runs its part"))
    };
    assert!(split(PageTable::Lookup) == split(PageTable::Device));
}

/// Where kernels are shown less of the table than a sequence has.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn short_windows_of_the_table_equal_long_ones() {
    let tokens = some_tokens(280, 250);
    let logits = |window, policy: &str| {
        let config = VulkanConfig {
            window,
            page_table: PageTable::Lookup,
            ..VulkanConfig::default()
        };
        let policy = policy.parse().expect("a policy");
        let model = OnDevice::with("demo", ElementType::F16, policy, config);
        model.expect("the device runs the demo").logits(&tokens)
    };
    let long = logits(None, "sparse");
    assert!(logits(Some(ByteLength::kibibytes(160)), "sparse") == long);
    assert!(logits(None, "sparse:interleaved=1") == long);
}
