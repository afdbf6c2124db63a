//! The first layers on the processor, the others on the device: the same promises as of either alone.

use lacuna_gpu::{Vulkan, VulkanConfig};
use lacuna_kernels::ElementType;
use lacuna_kv::{KvElements, KvPolicy};
use lacuna_models::{ComputeDevice, ExecutorError, LogitRows};
use lacuna_pages::vulkan::PageTable;

use crate::support::{OnDevice, config, open_device, some_tokens};

fn behind(device: &Vulkan, host_layers: usize) -> Result<OnDevice, ExecutorError> {
    let elements = KvElements::both(ElementType::F16);
    OnDevice::behind(device, ("demo", host_layers), elements, KvPolicy::default())
}

fn split() -> OnDevice {
    let device = open_device();
    behind(&device, 2).expect("the device runs its part")
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn chunks_batches_and_shared_rows_equal_one_pass() {
    let mut model = split();
    let tokens = some_tokens(261, model.vocabulary());
    let whole = model.logits(&tokens);
    let row = model.vocabulary();
    for (count, chunk) in [(70, 1), (261, 64), (261, 130)] {
        let mut sequence = model.sequence();
        let pieces = tokens[..count].chunks(chunk);
        let pieces = pieces.flat_map(|chunk| model.extend(&mut sequence, chunk));
        let pieces: Vec<f32> = pieces.collect();
        assert!(pieces == whole[..pieces.len()], "chunks of {chunk}");
    }

    let others = [11u32, 12, 13, 14];
    let mut fresh = |count: usize| {
        let mut sequence = model.sequence();
        model.extend(&mut sequence, &tokens[..count]);
        model.extend(&mut sequence, &others)
    };
    let (after_all, after_some) = (fresh(261), fresh(100));
    let mut first = model.sequence();
    model.extend(&mut first, &tokens);
    let mut forked = first.fork().expect("pages are shared");
    let mut shared = first.share_prefix(100).expect("pages are shared");
    assert!(first.report().shared_bytes > 0, "not copied");
    let mut both = [(&mut forked, &others[..]), (&mut shared, &others[..])];
    let together = model.pass(&mut both, LogitRows::All);
    let (of_forked, of_shared) = together.split_at(4 * row);
    assert!(of_forked == after_all, "forked");
    assert!(of_shared == after_some, "shared");
    drop((forked, shared));
    assert!(model.extend(&mut first, &others) == after_all);
    first.truncate(100).expect("pages go back");
    assert!(model.extend(&mut first, &others) == after_some, "truncated");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn each_layer_has_weights_and_rows_in_one_place() {
    let device = open_device();
    let queue = device.device().queue();
    let taken = || queue.memory_use().allocated.get();
    let mut weights = Vec::new();
    for host_layers in 0..4 {
        let before = taken();
        let mut model = behind(&device, host_layers).expect("the device runs its part");
        let memory = model.executor.memory();
        let foretold = device.memory_for(&model.model, model.cache.geometry(), &model.plan());
        let foretold = foretold.expect("the device runs its part");
        assert_eq!(foretold, memory, "{host_layers} layers on the processor");
        assert_eq!(
            taken() - before,
            memory.weight_bytes + memory.activation_bytes
        );
        weights.push(memory.weight_bytes);

        let tokens = some_tokens(300, 250);
        let mut sequence = model.sequence();
        model.extend(&mut sequence, &tokens);
        let ledger = model.cache.ledger();
        let geometry = model.cache.geometry();
        let of_device = geometry.without_host_layers().bytes_per_token();
        let of_host = geometry.bytes_per_token() - of_device;
        let rows = |each: usize| (tokens.len() * each) as u64;
        assert!(ledger.host_beside.get() >= rows(of_host));
        assert_eq!(ledger.host_beside.get() > 0, host_layers > 0);
        let heaps = taken() - before - memory.weight_bytes - memory.activation_bytes;
        assert!(heaps >= rows(of_device), "{heaps}");
    }
    // The demo's layers are alike.
    let layer = weights[0] - weights[1];
    assert!(layer > 0);
    assert_eq!(weights[1] - weights[2], layer);
    assert_eq!(weights[2] - weights[3], layer);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn what_cannot_be_split_is_refused_by_name() {
    let device = open_device();
    let elements = KvElements::both(ElementType::F16);
    let open = |path, host_layers| {
        OnDevice::behind(&device, (path, host_layers), elements, KvPolicy::default())
    };
    let told =
        open("families/gemma4/model.gguf", 5).expect_err("its last layers read those of others");
    assert!(
        told.to_string()
            .contains("layer 5 reads the rows of layer 3"),
        "{told}"
    );
    let told = open("demo", 4).expect_err("there is nothing left");
    assert!(matches!(told, ExecutorError::Split { layer: 4 }), "{told}");

    let without = VulkanConfig {
        page_table: PageTable::Unused,
        ..config()
    };
    let without = Vulkan::open_with(without).expect("a device");
    let told = behind(&without, 2).expect_err("its memory is there from the start");
    assert!(matches!(told, ExecutorError::Setting { .. }), "{told}");
}
