#![expect(
    unsafe_code,
    reason = "Vulkan functions are replaced by ones that fail"
)]

//! The driver fails: each call of a session in turn, with a lost device and with no memory left.

use std::cell::Cell;

use ash::vk;

use super::*;
use crate::device::{Access, Address, HostCopies, Place};
use crate::{Error, PageRange, Pool, PoolConfig, VirtualPage};

const PAGE: u64 = 65_536;

thread_local! {
    /// The functions that are replaced.
    static REAL: Cell<Option<Real>> = const { Cell::new(None) };
    /// How many more calls succeed, and what the one after them returns.
    static FAILING: Cell<Option<(u32, vk::Result)>> = const { Cell::new(None) };
    /// Calls since.
    static CALLS: Cell<u32> = const { Cell::new(0) };
    /// Bindings of descriptor sets that were written, and kernels that were bound.
    static WRITTEN: Cell<u32> = const { Cell::new(0) };
    static BOUND: Cell<u32> = const { Cell::new(0) };
    /// The cache of kernels that was made last, the bytes it began with, and that which a kernel was compiled with.
    static CACHE: Cell<(vk::PipelineCache, usize)> = const { Cell::new((vk::PipelineCache::null(), 0)) };
    static COMPILED_WITH: Cell<vk::PipelineCache> = const { Cell::new(vk::PipelineCache::null()) };
}

#[derive(Clone, Copy)]
struct Real {
    bind: vk::PFN_vkQueueBindSparse,
    submit: vk::PFN_vkQueueSubmit,
    create_buffer: vk::PFN_vkCreateBuffer,
    allocate: vk::PFN_vkAllocateMemory,
    update_sets: vk::PFN_vkUpdateDescriptorSets,
    bind_pipeline: vk::PFN_vkCmdBindPipeline,
    create_cache: vk::PFN_vkCreatePipelineCache,
    compile: vk::PFN_vkCreateComputePipelines,
}

/// What the next call is to return instead of being made. A lost device stays lost.
fn failure() -> Option<vk::Result> {
    CALLS.set(CALLS.get() + 1);
    let (left, result) = FAILING.get()?;
    match left {
        0 => {
            if result != vk::Result::ERROR_DEVICE_LOST {
                FAILING.set(None);
            }
            Some(result)
        }
        _ => {
            FAILING.set(Some((left - 1, result)));
            None
        }
    }
}

fn real() -> Real {
    REAL.get().expect("the device was opened by this thread")
}

unsafe extern "system" fn bind(
    queue: vk::Queue,
    count: u32,
    infos: *const vk::BindSparseInfo<'_>,
    fence: vk::Fence,
) -> vk::Result {
    // SAFETY: the caller's arguments, passed on.
    failure().unwrap_or_else(|| unsafe { (real().bind)(queue, count, infos, fence) })
}

unsafe extern "system" fn submit(
    queue: vk::Queue,
    count: u32,
    infos: *const vk::SubmitInfo<'_>,
    fence: vk::Fence,
) -> vk::Result {
    // SAFETY: the caller's arguments, passed on.
    failure().unwrap_or_else(|| unsafe { (real().submit)(queue, count, infos, fence) })
}

unsafe extern "system" fn create_buffer(
    device: vk::Device,
    info: *const vk::BufferCreateInfo<'_>,
    allocator: *const vk::AllocationCallbacks<'_>,
    buffer: *mut vk::Buffer,
) -> vk::Result {
    // SAFETY: the caller's arguments, passed on.
    failure().unwrap_or_else(|| unsafe { (real().create_buffer)(device, info, allocator, buffer) })
}

unsafe extern "system" fn allocate(
    device: vk::Device,
    info: *const vk::MemoryAllocateInfo<'_>,
    allocator: *const vk::AllocationCallbacks<'_>,
    memory: *mut vk::DeviceMemory,
) -> vk::Result {
    // SAFETY: the caller's arguments, passed on.
    failure().unwrap_or_else(|| unsafe { (real().allocate)(device, info, allocator, memory) })
}

unsafe extern "system" fn update_sets(
    device: vk::Device,
    count: u32,
    writes: *const vk::WriteDescriptorSet<'_>,
    copy_count: u32,
    copies: *const vk::CopyDescriptorSet<'_>,
) {
    WRITTEN.set(WRITTEN.get() + count);
    // SAFETY: the caller's arguments, passed on.
    unsafe { (real().update_sets)(device, count, writes, copy_count, copies) }
}

unsafe extern "system" fn bind_pipeline(
    commands: vk::CommandBuffer,
    point: vk::PipelineBindPoint,
    pipeline: vk::Pipeline,
) {
    BOUND.set(BOUND.get() + 1);
    // SAFETY: the caller's arguments, passed on.
    unsafe { (real().bind_pipeline)(commands, point, pipeline) }
}

unsafe extern "system" fn create_cache(
    device: vk::Device,
    info: *const vk::PipelineCacheCreateInfo<'_>,
    allocator: *const vk::AllocationCallbacks<'_>,
    cache: *mut vk::PipelineCache,
) -> vk::Result {
    // SAFETY: the caller's arguments, passed on, and what the call has written.
    unsafe {
        let result = (real().create_cache)(device, info, allocator, cache);
        CACHE.set((*cache, (*info).initial_data_size));
        result
    }
}

unsafe extern "system" fn compile(
    device: vk::Device,
    cache: vk::PipelineCache,
    count: u32,
    infos: *const vk::ComputePipelineCreateInfo<'_>,
    allocator: *const vk::AllocationCallbacks<'_>,
    pipelines: *mut vk::Pipeline,
) -> vk::Result {
    COMPILED_WITH.set(cache);
    // SAFETY: the caller's arguments, passed on.
    unsafe { (real().compile)(device, cache, count, infos, allocator, pipelines) }
}

fn wrap(device: ash::Device) -> ash::Device {
    let mut functions = device.fp_v1_0().clone();
    REAL.set(Some(Real {
        bind: functions.queue_bind_sparse,
        submit: functions.queue_submit,
        create_buffer: functions.create_buffer,
        allocate: functions.allocate_memory,
        update_sets: functions.update_descriptor_sets,
        bind_pipeline: functions.cmd_bind_pipeline,
        create_cache: functions.create_pipeline_cache,
        compile: functions.create_compute_pipelines,
    }));
    functions.queue_bind_sparse = bind;
    functions.queue_submit = submit;
    functions.create_buffer = create_buffer;
    functions.allocate_memory = allocate;
    functions.update_descriptor_sets = update_sets;
    functions.cmd_bind_pipeline = bind_pipeline;
    functions.create_pipeline_cache = create_cache;
    functions.create_compute_pipelines = compile;
    ash::Device::from_parts_1_3(
        device.handle(),
        functions,
        device.fp_v1_1().clone(),
        device.fp_v1_2().clone(),
        device.fp_v1_3().clone(),
    )
}

/// A device whose calls can be made to fail.
fn open() -> VulkanDevice {
    open_with(PageTable::Device)
}

fn open_with(pages: PageTable) -> VulkanDevice {
    let device = Driver::open_with((None, pages), wrap).and_then(VulkanDevice::with_driver);
    let device = device.expect("a driver");
    assert_eq!(device.page_table(), pages, "a driver with all features");
    device
}

/// The ways in which pages come and go.
const WITH_PAGES: [PageTable; 2] = [PageTable::Device, PageTable::Lookup];

fn fail_after(calls: u32, result: vk::Result) {
    CALLS.set(0);
    FAILING.set(Some((calls, result)));
}

fn address(space: SpaceId, page: u64) -> Address {
    Address {
        space,
        offset: page * PAGE,
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_device_lost_in_the_middle_of_a_batch_is_a_value() {
    for pages in WITH_PAGES {
        a_device_lost_in_the_middle_of_a_batch_is_a_value_with(pages);
    }
}

fn a_device_lost_in_the_middle_of_a_batch_is_a_value_with(pages: PageTable) {
    let mut device = open_with(pages);
    let queue = device.queue();
    let heap = device.create_heap(ByteLength::new(4 * PAGE)).unwrap();
    let space = device.reserve(ByteLength::new(4 * PAGE)).unwrap();
    let (place, length) = (Place { heap, offset: 0 }, ByteLength::new(PAGE));
    let map = |page| Operation::Map {
        address: address(space, page),
        place: Place {
            heap,
            offset: page * PAGE,
        },
        length,
        access: Access::ReadWrite,
    };
    device.apply(&[map(0)], Fence::DONE).unwrap();
    let copy = Operation::Copy {
        from: address(space, 0),
        to: Place {
            offset: PAGE,
            ..place
        },
        length,
    };
    // The copy is submitted, the binds are not.
    fail_after(1, vk::Result::ERROR_DEVICE_LOST);
    let error = device
        .apply(&[copy, map(1), map(2)], Fence::DONE)
        .unwrap_err();
    assert_eq!((error.applied, error.cause), (1, DeviceError::Lost));

    let lost = Some(DeviceError::Lost);
    assert_eq!(
        device
            .apply(&[map(1)], Fence::DONE)
            .err()
            .map(|error| error.cause),
        lost
    );
    assert_eq!(device.reserve(length).err(), lost);
    assert_eq!(device.create_heap(length).err(), lost);
    assert_eq!(device.release(space, Fence::DONE).err(), lost);
    assert_eq!(device.destroy_heap(heap).err(), lost);
    assert_eq!(queue.write(address(space, 0), &[0; 4]).err(), lost);
    assert_eq!(queue.read(address(space, 0), &mut [0; 4]).err(), lost);
    assert_eq!(queue.checksum(address(space, 0), length).err(), lost);
    FAILING.set(None);
}

/// A pool, its first calls done: two buffers, one sealed page shared, one page swapped out.
fn session(pool: &Pool) -> Result<(), Error> {
    let mut first = pool.reserve(ByteLength::new(20 * PAGE), "first")?;
    first.ensure_mapped(0..3 * PAGE as usize)?;
    first.write(0, &[1; 1000])?;
    first.seal(PageRange::of(0..2))?;
    let mut second = pool.reserve(ByteLength::new(20 * PAGE), "second")?;
    second.share_from(&first, PageRange::of(0..2), VirtualPage::new(4))?;
    second.make_unique(PageRange::of(4..5))?;
    second.write(4 * PAGE, &[2; 1000])?;
    first.unmap(PageRange::of(1..2))?;
    let mut bytes = [0; 1000];
    first.read(0, &mut bytes)?;
    assert_eq!(bytes, [1; 1000]);
    second.read(4 * PAGE, &mut bytes)?;
    assert_eq!(bytes, [2; 1000]);
    Ok(())
}

fn pool_on(device: VulkanDevice) -> Pool {
    let config = PoolConfig {
        heap_bytes: ByteLength::new(4 * PAGE),
        ..PoolConfig::default()
    };
    Pool::new(device, config).unwrap()
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn every_call_that_finds_no_memory_leaves_a_pool_that_works() {
    for pages in WITH_PAGES {
        every_call_that_finds_no_memory_leaves_a_pool_that_works_with(pages);
    }
}

fn every_call_that_finds_no_memory_leaves_a_pool_that_works_with(pages: PageTable) {
    for calls in 0.. {
        let device = open_with(pages);
        let pool = pool_on(device);
        fail_after(calls, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
        let result = session(&pool);
        let reached = CALLS.get() > calls;
        FAILING.set(None);
        match result {
            Err(error) => {
                let out_of_memory = matches!(error, Error::Device(DeviceError::OutOfMemory { .. }));
                assert!(reached && out_of_memory, "call {calls}: {error}");
            }
            // A heap that could not be made was done without.
            Ok(()) if reached => {}
            Ok(()) => return assert!(calls > 10, "the session made {calls} calls only"),
        }
        pool.verify([]).unwrap();
        session(&pool).unwrap();
        pool.trim();
        assert_eq!(pool.ledger().committed, ByteLength::ZERO, "call {calls}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_device_lost_at_any_call_ends_the_session_with_an_error() {
    for pages in WITH_PAGES {
        a_device_lost_at_any_call_ends_the_session_with_an_error_with(pages);
    }
}

fn a_device_lost_at_any_call_ends_the_session_with_an_error_with(pages: PageTable) {
    for calls in 0.. {
        let device = open_with(pages);
        let pool = pool_on(device);
        fail_after(calls, vk::Result::ERROR_DEVICE_LOST);
        let result = session(&pool);
        let reached = CALLS.get() > calls;
        match result {
            Ok(()) => {
                FAILING.set(None);
                return assert!(!reached, "call {calls}: the loss was not noticed");
            }
            Err(Error::Device(cause) | Error::Undo { cause, .. }) => {
                assert_eq!(cause, DeviceError::Lost, "call {calls}");
            }
            Err(error) => panic!("call {calls}: {error}"),
        }
        // Dropping everything that is left neither hangs nor fails.
        drop(pool);
        FAILING.set(None);
    }
}

/// A pass that sums what it is given, on an area of 1,024 bytes: the input at 0, the sum at 512.
fn sum_pass(
    compute: &mut Compute,
    kernel: &ComputeKernel,
    memory: &DeviceMemory,
    input: &[u8],
) -> Result<u32, DeviceError> {
    let part = |offset, length| Bound::Memory {
        memory,
        offset,
        length,
    };
    let length = input.len() as u64;
    let constants = [0, input.len() as u32 / 4, 0];
    let mut recording = compute.begin(input, 0)?;
    recording.take_input(0, part(0, length))?;
    recording.barrier()?;
    let windows = [part(0, length), part(512, 64), Bound::Unused, Bound::Unused];
    recording.dispatch(kernel, windows, &constants, [1, 1, 1])?;
    recording.barrier()?;
    recording.leave_output(part(512, 4), 0)?;
    recording.submit()?;
    let mut found = [0; 4];
    compute.output(&mut found)?;
    Ok(u32::from_le_bytes(found))
}

fn checksum_kernel(compute: &Compute) -> ComputeKernel {
    // SAFETY: K1 of `kernels` is C1: two storage buffers and twelve bytes of constants.
    unsafe { compute.kernel(kernels::CHECKSUM, c"checksum") }.unwrap()
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_pass_is_one_submission_and_takes_nothing_after_the_first() {
    let queue = open().queue();
    let mut compute = queue.compute(256, 64).unwrap();
    let kernel = checksum_kernel(&compute);
    let memory = queue.memory(ByteLength::new(1024)).unwrap();
    for pass in 0..4 {
        CALLS.set(0);
        let input = [pass + 1; 256];
        let found = sum_pass(&mut compute, &kernel, &memory, &input).unwrap();
        assert_eq!(found, checksum(&input), "pass {pass}");
        assert_eq!(CALLS.get(), 1, "submitted, and no buffer, memory or bind");
    }
    let counters = compute.counters();
    assert_eq!((counters.passes, counters.submissions), (4, 4));
    assert_eq!(counters.recorded_dispatches, 1, "by the first");
    let used = queue.memory_use();
    assert!(used.allocated >= memory.length(), "{used:?}");
    drop(memory);
    assert_eq!(queue.memory_use().allocated, ByteLength::ZERO);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_device_lost_with_the_nth_pass_is_an_error_and_one_opened_again_computes() {
    let input = [9; 256];
    for passes in 0..3 {
        let device = open();
        let queue = device.queue();
        let mut compute = queue.compute(256, 64).unwrap();
        let kernel = checksum_kernel(&compute);
        let memory = queue.memory(ByteLength::new(1024)).unwrap();
        fail_after(passes, vk::Result::ERROR_DEVICE_LOST);
        let mut pass = || sum_pass(&mut compute, &kernel, &memory, &input);
        for _ in 0..passes {
            assert_eq!(pass(), Ok(checksum(&input)));
        }
        assert!(!device.is_lost());
        assert_eq!(pass(), Err(DeviceError::Lost));
        FAILING.set(None);
        assert!(device.is_lost());
        assert_eq!(pass(), Err(DeviceError::Lost), "it stays lost");
        let (again, before) = (open(), queue);
        drop((compute, kernel, memory, device, before));
        let queue = again.queue();
        let mut compute = queue.compute(256, 64).unwrap();
        let kernel = checksum_kernel(&compute);
        let memory = queue.memory(ByteLength::new(1024)).unwrap();
        let found = sum_pass(&mut compute, &kernel, &memory, &input);
        assert_eq!(found, Ok(checksum(&input)));
    }
}

/// What `act` has written of descriptor sets.
fn written<T>(act: impl FnOnce() -> T) -> (u32, T) {
    WRITTEN.set(0);
    let done = act();
    (WRITTEN.get(), done)
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_set_is_written_when_it_is_to_show_something_else() {
    let queue = open().queue();
    let mut compute = queue.compute(256, 64).unwrap();
    let kernel = checksum_kernel(&compute);
    let input = [3; 256];
    // Each piece is likely to have the handle of the one before it, which is gone.
    for piece in 0..4 {
        let memory = queue.memory(ByteLength::new(1024)).unwrap();
        for (expected, input) in [(2, &input[..]), (0, &input[..]), (1, &input[..128])] {
            let (count, found) = written(|| sum_pass(&mut compute, &kernel, &memory, input));
            assert_eq!(found.unwrap(), checksum(input), "piece {piece}");
            assert_eq!(count, expected, "piece {piece}, {} bytes", input.len());
        }
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn what_is_bound_is_not_bound_again() {
    let queue = open().queue();
    let mut compute = queue.compute(256, 64).unwrap();
    let [first, second] = [(); 2].map(|()| checksum_kernel(&compute));
    let memory = queue.memory(ByteLength::new(1024)).unwrap();
    let part = |offset, length| Bound::Memory {
        memory: &memory,
        offset,
        length,
    };
    let input = [5; 256];
    let mut recording = compute.begin(&input, 0).unwrap();
    recording.take_input(0, part(0, 256)).unwrap();
    BOUND.set(0);
    let (count, ()) = written(|| {
        for (kernel, length) in [(&first, 256), (&first, 256), (&second, 256), (&second, 128)] {
            recording.barrier().unwrap();
            let windows = [part(0, length), part(512, 64), Bound::Unused, Bound::Unused];
            let constants = [0, length as u32 / 4, 0];
            recording
                .dispatch(kernel, windows, &constants, [1, 1, 1])
                .unwrap();
        }
    });
    // Two sets of two bindings each; the same kernel, compiled twice, is two.
    assert_eq!((count, BOUND.get()), (4, 2));
    recording.barrier().unwrap();
    recording.leave_output(part(512, 4), 0).unwrap();
    recording.submit().unwrap();
    let mut found = [0; 4];
    compute.output(&mut found).unwrap();
    assert_eq!(u32::from_le_bytes(found), checksum(&input[..128]));
}

/// A pass of some parts, each of which sums so many of the first words of what it is given. Returns what was recorded, and
/// how many submissions it was.
fn sums_pass(
    compute: &mut Compute,
    kernel: &ComputeKernel,
    memory: &DeviceMemory,
    class: u64,
    sums: &[u32],
) -> (u64, u64) {
    let part = |offset, length| Bound::Memory {
        memory,
        offset,
        length,
    };
    let input: Vec<u8> = (0..256).map(|at| (at * 7 + sums.len()) as u8).collect();
    let before = compute.counters();
    BOUND.set(0);
    let mut recording = compute.begin(&input, class).unwrap();
    recording.take_input(0, part(0, 256)).unwrap();
    recording.barrier().unwrap();
    for (number, &words) in sums.iter().enumerate() {
        let to = part(512 + 256 * number as u64, 64);
        let windows = [part(0, 256), to, Bound::Unused, Bound::Unused];
        recording
            .dispatch(kernel, windows, &[0, words, 0], [1, 1, 1])
            .unwrap();
        recording.barrier().unwrap();
        if number + 1 < sums.len() {
            recording.submit_part().unwrap();
        }
    }
    for number in 0..sums.len() as u64 {
        let from = part(512 + 256 * number, 4);
        recording.leave_output(from, 4 * number).unwrap();
    }
    recording.submit().unwrap();
    let mut found = vec![[0; 4]; sums.len()];
    compute.output(found.as_flattened_mut()).unwrap();
    for (found, &words) in found.into_iter().zip(sums) {
        let wanted = checksum(&input[..4 * words as usize]);
        assert_eq!(u32::from_le_bytes(found), wanted, "{words} of {sums:?}");
    }
    let counters = compute.counters();
    let recorded = counters.recorded_dispatches - before.recorded_dispatches;
    assert_eq!(BOUND.get() > 0, recorded > 0);
    (recorded, counters.submissions - before.submissions)
}

/// Passes of one class and of several, whole or in parts, that are as the one before up to some call: each does what it was
/// asked for, and what is recorded is the parts that differ.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_pass_is_recorded_where_it_is_not_as_the_one_before() {
    let queue = open().queue();
    let mut compute = queue.compute(256, 128).unwrap();
    let mut kernel = checksum_kernel(&compute);
    let mut memory = queue.memory(ByteLength::new(2048)).unwrap();
    for (class, sums, expected) in [
        (1, &[9, 8, 7][..], (3, 3)),
        (1, &[9, 8, 7], (0, 1)),
        // What is as before waits for what is not.
        (1, &[9, 6, 7], (1, 2)),
        (1, &[9, 6, 5], (1, 1)),
        // It ends sooner.
        (1, &[9, 6], (1, 1)),
        (1, &[9, 6], (0, 1)),
        (2, &[9, 6], (2, 2)),
        (1, &[9, 6], (0, 1)),
        (3, &[9], (1, 1)),
        (4, &[9], (1, 1)),
        // More classes than are kept: that which was not used for longest goes.
        (5, &[4], (1, 1)),
        (1, &[9, 6], (0, 1)),
        (2, &[9, 6], (2, 2)),
    ] {
        let found = sums_pass(&mut compute, &kernel, &memory, class, sums);
        assert_eq!(found, expected, "{sums:?} of {class}");
    }
    // Others take the place of a kernel and of memory, and are likely to have their handles.
    drop(kernel);
    kernel = checksum_kernel(&compute);
    for recorded in [2, 0] {
        let found = sums_pass(&mut compute, &kernel, &memory, 1, &[9, 6]);
        assert_eq!(found.0, recorded);
    }
    drop(memory);
    memory = queue.memory(ByteLength::new(2048)).unwrap();
    for recorded in [2, 0] {
        let found = sums_pass(&mut compute, &kernel, &memory, 1, &[9, 6]);
        assert_eq!(found.0, recorded);
    }
    // A pass that is given up in the middle of a part.
    let mut recording = compute.begin(&[0; 256], 1).unwrap();
    let part = Bound::Memory {
        memory: &memory,
        offset: 0,
        length: 128,
    };
    recording.take_input(0, part).unwrap();
    drop(recording);
    let found = sums_pass(&mut compute, &kernel, &memory, 1, &[9, 6]);
    assert_eq!(found.0, 1, "its part");
    assert_eq!(sums_pass(&mut compute, &kernel, &memory, 1, &[9, 6]).0, 0);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn kernels_are_compiled_with_the_cache_that_they_are_kept_in() {
    let input = [7; 256];
    let mut kept = Vec::new();
    for _ in 0..2 {
        let queue = open().queue();
        let mut compute = queue.compute(256, 64).unwrap();
        checksum_kernel(&compute);
        assert_eq!(
            COMPILED_WITH.get(),
            vk::PipelineCache::null(),
            "none is asked for"
        );
        // SAFETY: P1: none the first time, and then what the same device gave.
        let cache = unsafe { queue.kernel_cache(&kept) }.unwrap();
        compute.keep_kernels_in(cache).unwrap();
        let kernel = checksum_kernel(&compute);
        assert_eq!(CACHE.get(), (COMPILED_WITH.get(), kept.len()));
        let memory = queue.memory(ByteLength::new(1024)).unwrap();
        let found = sum_pass(&mut compute, &kernel, &memory, &input);
        assert_eq!(found, Ok(checksum(&input)));
        kept = compute.kernel_cache().unwrap().bytes().unwrap();
        assert!(!kept.is_empty());
        // SAFETY: P1.
        let foreign = unsafe { open().queue().kernel_cache(&[]) }.unwrap();
        let refused = compute.keep_kernels_in(foreign).err();
        assert!(matches!(refused, Some(DeviceError::Invalid { .. })));
    }
}

/// The clock of a pass that never ran was waited for without end.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_pass_that_was_dropped_took_no_time() {
    let queue = open().queue();
    let mut compute = queue.compute(256, 64).unwrap();
    compute.time_kernels(true).unwrap();
    let kernel = checksum_kernel(&compute).named("checksum");
    let memory = queue.memory(ByteLength::new(1024)).unwrap();
    let part = |offset, length| Bound::Memory {
        memory: &memory,
        offset,
        length,
    };
    let windows = [part(0, 256), part(512, 64), Bound::Unused, Bound::Unused];
    let mut dropped = compute.begin(&[0; 256], 0).unwrap();
    dropped
        .dispatch(&kernel, windows, &[0, 64, 0], [1, 1, 1])
        .unwrap();
    drop(dropped);
    assert!(compute.kernel_times().unwrap().is_empty());
    sum_pass(&mut compute, &kernel, &memory, &[1; 256]).unwrap();
    let times = compute.kernel_times().unwrap();
    assert_eq!(times.len(), 1, "{times:?}");
    assert_eq!((times[0].kernel, times[0].dispatches), ("checksum", 1));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_kernel_is_not_shown_what_is_not_there() {
    let mut device = open();
    let queue = device.queue();
    let mut compute = queue.compute(256, 64).unwrap();
    let kernel = checksum_kernel(&compute);
    let memory = queue.memory(ByteLength::new(1024)).unwrap();
    let length = memory.length().get();
    let part = |offset, length| Bound::Memory {
        memory: &memory,
        offset,
        length,
    };
    let space = device.reserve(ByteLength::new(4 * PAGE)).unwrap();
    let hole = Bound::Mapped {
        address: address(space, 1),
        length: 64,
        access: Access::Read,
    };
    let mut refused = vec![part(0, length + 4), part(4, 0), part(2, 4), hole];
    if compute.alignment() > 4 {
        refused.push(part(4, 8));
    }
    for bound in refused {
        let mut recording = compute.begin(&[0; 256], 0).unwrap();
        let windows = [bound, part(512, 64), Bound::Unused, Bound::Unused];
        let refused = recording.dispatch(&kernel, windows, &[0, 1, 0], [1, 1, 1]);
        assert!(
            matches!(refused, Err(DeviceError::Invalid { .. })),
            "{bound:?}: {refused:?}"
        );
    }
    let mut recording = compute.begin(&[0; 256], 0).unwrap();
    let windows = [part(0, 64), part(512, 64), Bound::Unused, Bound::Unused];
    let mut dispatch =
        |constants: &[u32], groups| recording.dispatch(&kernel, windows, constants, groups);
    assert!(dispatch(&[0; 33], [1, 1, 1]).is_err(), "too many constants");
    assert!(
        dispatch(&[0; 3], [70_000, 1, 1]).is_err(),
        "too many groups"
    );
    assert!(
        dispatch(&[0; 3], [1, 0, 1]).is_ok(),
        "no groups are no work"
    );
    assert!(
        recording.copy(part(0, 64), part(32, 64)).is_err(),
        "overlap"
    );
    drop(recording);
    // Of a reservation what is touched has to be there, and all of it reserved.
    let heap = device.create_heap(ByteLength::new(PAGE)).unwrap();
    let map = Operation::Map {
        address: address(space, 0),
        place: Place { heap, offset: 0 },
        length: ByteLength::new(PAGE),
        access: Access::ReadWrite,
    };
    device.apply(&[map], Fence::DONE).unwrap();
    let reserved = |offset, length, untouched, touched| Bound::Reserved {
        address: address(space, offset),
        length,
        untouched,
        touched,
        access: Access::Read,
    };
    for (bound, is_shown) in [
        (reserved(0, 4 * PAGE, 0, PAGE), true),
        (reserved(0, 4 * PAGE, PAGE - 4, 4), true),
        (reserved(0, 4 * PAGE, PAGE - 4, 8), false),
        (reserved(0, 4 * PAGE, PAGE, 4), false),
        (reserved(0, 4 * PAGE + 4, 0, 4), false),
        (reserved(0, 8, 4, 8), false),
        (reserved(0, 8, u64::MAX, 8), false),
    ] {
        let mut recording = compute.begin(&[0; 256], 0).unwrap();
        let windows = [bound, part(512, 64), Bound::Unused, Bound::Unused];
        let shown = recording.dispatch(&kernel, windows, &[0, 1, 0], [1, 1, 1]);
        assert_eq!(shown.is_ok(), is_shown, "{bound:?}");
        assert!(recording.copy(bound, part(0, 64)).is_err());
    }
    // What was refused or dropped leaves no trace.
    let input = [7; 256];
    let found = sum_pass(&mut compute, &kernel, &memory, &input).unwrap();
    assert_eq!(found, checksum(&input));
    assert!(
        compute.begin(&[0; 5000], 0).is_err(),
        "more than was asked for"
    );
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn memory_that_cannot_be_had_is_an_error_and_not_counted() {
    let queue = open().queue();
    for calls in 0..2 {
        fail_after(calls, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
        let refused = queue.memory(ByteLength::new(1024));
        FAILING.set(None);
        assert!(
            matches!(refused, Err(DeviceError::OutOfMemory { .. })),
            "{refused:?}"
        );
        assert_eq!(queue.memory_use().allocated, ByteLength::ZERO);
    }
    let beyond = queue.memory_use().total.get() + 1;
    let refused = queue.memory(ByteLength::new(beyond));
    assert!(refused.is_err(), "{refused:?}");
}
