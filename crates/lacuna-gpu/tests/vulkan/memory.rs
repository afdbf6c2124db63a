//! Whose the device's memory is.

use lacuna_kv::{KvElements, KvPolicy};
use lacuna_models::ComputeDevice;
use lacuna_pages::ByteLength;

use crate::support::{OnDevice, open_device, some_tokens};

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn device_memory_is_counted_and_given_back() {
    let device = open_device();
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
    let device = open_device();
    let queue = device.device().queue();
    let before = queue.memory_use();
    let model = OnDevice::on(&device, "demo", KvElements::default(), KvPolicy::default());
    drop(model.expect("the device runs the demo"));
    assert_eq!(queue.memory_use(), before);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_device_that_is_opened_again_computes_the_same() {
    let first = open_device();
    let again = ComputeDevice::reopened(&first).expect("it is there");
    let policy = KvPolicy::default();
    let on = |device: &dyn ComputeDevice| {
        let model = OnDevice::on(device, "demo", KvElements::default(), policy);
        model.expect("the device runs the demo")
    };
    let tokens = some_tokens(40, 250);
    let wanted = on(&first).logits(&tokens);
    drop(first);
    assert!(on(&*again).logits(&tokens) == wanted);
}

/// Parts of a pass, each of which is a submission: the device begins while the others are recorded.
const PARTS: u64 = 3;

/// Every submission, of binds or of work, is one point of the device's timeline.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_step_is_three_submissions_and_one_call_of_binds_where_pages_come() {
    let device = open_device();
    let mark = device.device().queue().memory(ByteLength::new(4));
    let mark = mark.expect("four bytes");
    // Each call is a submission of its own.
    let now = || mark.write(0, &[0; 4]).expect("the device is there").0;
    let model = OnDevice::on(&device, "demo", KvElements::default(), KvPolicy::default());
    let mut model = model.expect("the device runs the demo");
    let mut sequence = model.sequence();
    model.extend(&mut sequence, &some_tokens(40, 250));
    let (mut quiet, mut growing) = (0, 0);
    let mut last = None;
    for token in 0..100 {
        let (pages, before) = (sequence.report().committed_bytes, now());
        model.extend(&mut sequence, &[token]);
        let submitted = now() - before - 1;
        match sequence.report().committed_bytes == pages {
            true => {
                assert_eq!(submitted, PARTS, "token {token}: the pass");
                quiet += 1;
            }
            false => {
                assert_eq!(submitted, 1 + PARTS, "token {token}: binds, and the pass");
                growing += 1;
                // Pages come for eight tokens at least.
                let since = last.replace(token).map_or(8, |last| token - last);
                assert!(since >= 8, "token {token}: {since} after the last");
            }
        }
    }
    assert!(
        quiet > 0 && growing > 0,
        "{quiet} quiet steps, {growing} growing ones"
    );
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn passes_are_timed_kernel_by_kernel_where_that_is_asked_for() {
    let mut model = OnDevice::open("demo", lacuna_kernels::ElementType::F16);
    let whole = model.logits(&some_tokens(5, 250));
    let times = model.executor.kernel_times();
    assert!(times.expect("the device is there").is_empty(), "not timed");
    model.executor.time_kernels(true).expect("it has a clock");
    assert!(model.logits(&some_tokens(5, 250)) == whole);
    let times = model.executor.kernel_times().expect("the device is there");
    let layers = model.model.spec().layers.len();
    let attended = times.iter().find(|time| time.kernel.ends_with("attend"));
    assert_eq!(
        attended.map(|time| time.dispatches),
        Some(layers),
        "{times:?}"
    );
    assert!(times.iter().all(|time| time.dispatches > 0));
    assert!(times.is_sorted_by(|a, b| a.time >= b.time), "{times:?}");
    model
        .executor
        .time_kernels(false)
        .expect("the device is there");
    assert!(model.executor.kernel_times().expect("as before").is_empty());
}
