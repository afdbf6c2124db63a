//! Whose the device's memory is.

use lacuna_kv::{KvElements, KvPolicy, Sequence};
use lacuna_models::{ComputeDevice, LogitRows};
use lacuna_pages::ByteLength;
use lacuna_pages::vulkan::PageTable;

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

/// Parts of a pass that is recorded, each of which is a submission: the device begins while the others are recorded.
const PARTS: u64 = 3;

/// Every submission, of binds or of work, is one point of the device's timeline. A step is as the one before but where it sees a
/// partition of rows more, and where kernels look pages up in another heap.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_step_is_one_submission_of_what_was_recorded_and_one_call_of_binds_where_pages_come() {
    let device = open_device();
    let looks_up = device.device().page_table() == PageTable::Lookup;
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
        let counted = model.executor.counters();
        let another_partition = sequence.len().is_multiple_of(64);
        model.extend(&mut sequence, &[token]);
        let submitted = now() - before - 1;
        let counters = model.executor.counters();
        assert_eq!(counters.passes - counted.passes, 1);
        let of_pass = counters.submissions - counted.submissions;
        let recorded = counters.recorded_dispatches - counted.recorded_dispatches;
        let grown = sequence.report().committed_bytes != pages;
        let is_new = token == 0 || another_partition;
        match is_new || looks_up && grown {
            true => assert!((1..=PARTS).contains(&of_pass), "token {token}: {of_pass}"),
            false => assert_eq!((of_pass, recorded), (1, 0), "token {token}"),
        }
        if is_new {
            assert!(recorded > 0, "token {token}");
        }
        assert_eq!(submitted, of_pass + u64::from(grown), "token {token}");
        if grown {
            growing += 1;
            // Pages come for eight tokens at least.
            let since = last.replace(token).map_or(8, |last| token - last);
            assert!(since >= 8, "token {token}: {since} after the last");
        } else {
            quiet += 1;
        }
    }
    assert!(
        quiet > 0 && growing > 0,
        "{quiet} quiet steps, {growing} growing ones"
    );
}

/// Batches of two sizes in turn are recorded once each, and again for another sequence; what comes out is what comes of
/// each by itself.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn batches_of_each_size_are_recorded_once_and_again_for_another_sequence() {
    let mut model = OnDevice::open("demo", lacuna_kernels::ElementType::F16);
    let prompts = [3, 5, 9].map(|tokens| some_tokens(tokens, 250));
    let alone: Vec<Vec<f32>> = prompts
        .iter()
        .enumerate()
        .map(|(number, prompt)| {
            let mut sequence = model.sequence();
            model.extend(&mut sequence, prompt);
            let tokens = (0..8).map(|token| number as u32 + token);
            let rows = tokens.map(|token| model.extend(&mut sequence, &[token]));
            rows.collect::<Vec<_>>().concat()
        })
        .collect();
    let vocabulary = model.vocabulary();
    let row =
        |number: usize, token: u32| &alone[number][token as usize * vocabulary..][..vocabulary];
    let mut sequences = prompts.each_ref().map(|prompt| {
        let mut sequence = model.sequence();
        model.extend(&mut sequence, prompt);
        sequence
    });
    let mut recorded = Vec::new();
    let mut taken = [0; 3];
    for batch in [
        &[0][..],
        &[0, 1],
        &[0],
        &[0, 1],
        &[0],
        &[0, 1],
        &[0, 2],
        &[0, 2],
    ] {
        let before = model.executor.counters().recorded_dispatches;
        let tokens: Vec<u32> = batch.iter().map(|&of| of as u32 + taken[of]).collect();
        let mut those: Vec<_> = sequences.iter_mut().enumerate().collect();
        those.retain(|(number, _)| batch.contains(number));
        let mut all: Vec<(&mut Sequence, &[u32])> = those
            .into_iter()
            .zip(tokens.chunks(1))
            .map(|((_, sequence), token)| (sequence, token))
            .collect();
        let logits = model.pass(&mut all, LogitRows::All);
        for (sequence, _) in all {
            sequence.accept(1);
        }
        for (&of, found) in batch.iter().zip(logits.chunks_exact(vocabulary)) {
            assert!(found == row(of, taken[of]), "{batch:?}");
            taken[of] += 1;
        }
        let counters = model.executor.counters();
        recorded.push(counters.recorded_dispatches > before);
    }
    // The first may have the place in the table of pages of one that is gone.
    let wanted = [true, false, false, false, false, true, false];
    assert_eq!(recorded[1..], wanted);
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
