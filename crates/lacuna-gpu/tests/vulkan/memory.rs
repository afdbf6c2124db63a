//! Whose the device's memory is.

use lacuna_gpu::Vulkan;
use lacuna_kv::{KvElements, KvPolicy};

use crate::support::{OnDevice, some_tokens};

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn device_memory_is_counted_and_given_back() {
    let device = Vulkan::open().expect("a device");
    let queue = device.device().queue();
    let before = queue.memory_use().allocated.get();
    let elements = KvElements::default();
    let mut model = OnDevice::on(&device, "demo", elements, KvPolicy::default());
    let model = model.as_mut().expect("the device runs the demo");
    let memory = model.executor.memory();
    let of_matrices = model.model.weight_bytes();
    assert!(
        memory.weight_bytes >= of_matrices / 2,
        "{memory:?} of {of_matrices}"
    );
    assert!(memory.activation_bytes > 0 && memory.staging_bytes > 0);
    let taken = || queue.memory_use().allocated.get() - before;
    assert_eq!(taken(), memory.weight_bytes + memory.activation_bytes);

    // KV rows are counted by the pool, and their heaps by the device.
    let mut sequence = model.sequence();
    assert_eq!(model.cache.ledger().committed.get(), 0);
    let tokens = some_tokens(300, 250);
    model.extend(&mut sequence, &tokens);
    let committed = model.cache.ledger().committed.get();
    let rows = (tokens.len() * model.cache.geometry().bytes_per_token()) as u64;
    assert!(committed >= rows, "{committed} of {rows}");
    let heaps = taken() - memory.weight_bytes - memory.activation_bytes;
    assert!(heaps >= committed, "{heaps} of {committed}");

    // A pass as long as one before takes nothing more.
    let steady = taken();
    sequence.truncate(0).expect("pages go back");
    model.extend(&mut sequence, &tokens);
    assert_eq!(taken(), steady);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn weights_and_activations_go_with_the_executor() {
    let device = Vulkan::open().expect("a device");
    let queue = device.device().queue();
    let before = queue.memory_use();
    let model = OnDevice::on(&device, "demo", KvElements::default(), KvPolicy::default());
    drop(model.expect("the device runs the demo"));
    assert_eq!(queue.memory_use(), before);
}
