//! What kernels make of rows of logits, for tests.

use lacuna_pages::vulkan::{Bound, ComputeKernel, WINDOWS};
use lacuna_pages::{ByteLength, VulkanDevice};

use super::{Constants, Kernels, Wanted};

/// The words that dispatches of a kernel, one after the other, leave of `logits`: with `room` words behind these, so many from
/// a word of them on.
pub(crate) fn left_of<C: Constants, D: Iterator<Item = (C, [u32; 3])>>(
    logits: &[f32],
    (room, (first, count)): (u64, (usize, usize)),
    dispatches: impl FnOnce(&Kernels) -> (&ComputeKernel, D),
) -> Vec<u32> {
    let queue = VulkanDevice::open().expect("a device").queue();
    let compute = queue.compute(4 * logits.len(), 4 * count);
    let mut compute = compute.expect("a few megabytes");
    let kernels = Kernels::new(&compute, &Wanted::default(), false).expect("it compiles them");
    let bytes = ByteLength::new(4 * (logits.len() as u64 + room));
    let arena = queue.memory(bytes).expect("so much");
    let part = |start: usize, elements: usize| Bound::Memory {
        memory: &arena,
        offset: 4 * start as u64,
        length: 4 * elements as u64,
    };
    let recording = compute.begin(bytemuck::cast_slice(logits), 0);
    let mut recording = recording.expect("as much as was asked for");
    let given = recording.take_input(0, part(0, logits.len()));
    given.expect("as long");
    let mut windows = [Bound::Unused; WINDOWS];
    windows[0] = crate::pass::whole(&arena);
    let (kernel, dispatches) = dispatches(&kernels);
    for (constants, groups) in dispatches {
        recording.barrier().expect("the device is there");
        let made = recording.dispatch(kernel, windows, constants.words(), groups);
        made.expect("it is all there");
    }
    recording.barrier().expect("the device is there");
    let left = recording.leave_output(part(logits.len() + first, count), 0);
    left.expect("as long");
    recording.submit().expect("the device is there");
    let mut words = vec![0; count];
    let output = compute.output(bytemuck::cast_slice_mut(&mut words));
    output.expect("the device is there");
    words
}
