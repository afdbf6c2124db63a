//! What `store` makes of every kind of float: the bits that the processor's conversion has.

use half::{bf16, f16};
use lacuna_pages::vulkan::Bound;
use lacuna_pages::{ByteLength, VulkanDevice};

use super::*;

/// Zeros, the smallest and largest of each kind, halves between two, infinities, and numbers of every magnitude.
fn floats() -> Vec<f32> {
    let mut floats = vec![0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY];
    for exponent in 0..=254u32 {
        for fraction in [
            0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x1_8000, 0x7f_efff,
            0x7f_f000, 0x7f_ffff,
        ] {
            let bits = exponent << 23 | fraction;
            floats.extend([f32::from_bits(bits), f32::from_bits(bits | 1 << 31)]);
        }
    }
    floats.resize(floats.len().next_multiple_of(2), 1.0);
    floats
}

/// The halves that the device stores of `floats` as elements of the kind `element`.
fn stored(floats: &[f32], element: u32) -> Vec<u16> {
    let device = VulkanDevice::open().expect("a device");
    let queue = device.queue();
    let words = floats.len() / 2;
    let mut compute = queue
        .compute(4 * floats.len() + 4, 4 * words)
        .expect("a few kilobytes");
    let kernels =
        Kernels::new(&compute, &Wanted::default(), false).expect("the device compiles them");
    let memory = |words: usize| queue.memory(ByteLength::new(4 * words as u64));
    let (arena, rows) = (memory(floats.len() + 1), memory(words));
    let (arena, rows) = (
        arena.expect("a few kilobytes"),
        rows.expect("a few kilobytes"),
    );
    let part = |memory, words: usize| Bound::Memory {
        memory,
        offset: 0,
        length: 4 * words as u64,
    };
    // Behind them, the position of the only row.
    let given = [floats, &[f32::from_bits(0)]].concat();
    let constants = Store {
        source: 0,
        position: floats.len() as u32,
        first_row: 0,
        to: 0,
        stride: words as u32,
        width: floats.len() as u32,
        words: words as u32,
        element,
        count: words as u32,
    };
    let mut recording = compute
        .begin(bytemuck::cast_slice(&given), 0)
        .expect("as much as was asked for");
    let (from, to) = (part(&arena, given.len()), part(&rows, words));
    recording.take_input(0, from).expect("as long");
    recording.barrier().expect("the device is there");
    let groups = [(words as u32).div_ceil(THREADS), 1, 1];
    recording
        .dispatch(
            &kernels.store,
            [from, to, Bound::Unused, Bound::Unused],
            constants.words(),
            groups,
        )
        .expect("it is all there");
    recording.barrier().expect("the device is there");
    recording.leave_output(to, 0).expect("as long");
    recording.submit().expect("the device is there");
    let mut halves = vec![0u16; floats.len()];
    compute
        .output(bytemuck::cast_slice_mut(&mut halves))
        .expect("the device is there");
    halves
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn halves_are_those_of_the_processor() {
    let floats = floats();
    for (float, half) in floats.iter().zip(stored(&floats, 1)) {
        let wanted = f16::from_f32(*float).to_bits();
        assert_eq!(half, wanted, "{float:e}: {half:#x}, not {wanted:#x}");
    }
    for (float, half) in floats.iter().zip(stored(&floats, 2)) {
        let wanted = bf16::from_f32(*float).to_bits();
        assert_eq!(half, wanted, "{float:e}: {half:#x}, not {wanted:#x}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn what_is_no_number_stays_none() {
    let floats = [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), 1.0];
    let halves = stored(&floats, 1);
    assert!(
        halves[..3]
            .iter()
            .all(|half| f16::from_bits(*half).is_nan())
    );
    let halves = stored(&floats, 2);
    assert!(
        halves[..3]
            .iter()
            .all(|half| bf16::from_bits(*half).is_nan())
    );
}
