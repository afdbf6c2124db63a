//! What a device computes when it is opened: products of whole numbers, whose sums no order of adding changes, with few
//! tokens and with many.

use lacuna_kernels::DType;
use lacuna_models::ExecutorError;
use lacuna_pages::vulkan::{Bound, VulkanQueue};
use lacuna_pages::{ByteLength, DeviceError, VulkanDevice};

use crate::arranged;
use crate::device::VulkanConfig;
use crate::kernels::{
    Constants, Kernels, NONE, PRODUCT_ROWS, PRODUCT_TOKENS, Product, Quantize, THREADS, TILE,
    Wanted,
};

/// More rows and tokens than a workgroup has, and more columns than its threads take at once.
const ROWS: usize = 67;
const COLUMNS: usize = 33 * 32;
const TOKENS: usize = 9;

/// Whole numbers up to 127, the first of each block of 32 that largest one, so that one unit of a byte is worth 1.
fn input(index: usize) -> i32 {
    match index % 32 {
        0 => 127,
        _ => (index * 37 % 255) as i32 - 127,
    }
}

fn weight(index: usize) -> i32 {
    (index * 29 % 31) as i32 - 15
}

/// The sum that the device has to find.
fn wanted(token: usize, row: usize) -> f32 {
    let products = (0..COLUMNS).map(|column| {
        let x = input(token * COLUMNS + column);
        x * weight(row * COLUMNS + column)
    });
    products.sum::<i32>() as f32
}

/// A row of weights as a file has them.
fn encoded(dtype: DType, row: usize) -> Vec<u8> {
    let all: Vec<i32> = (row * COLUMNS..(row + 1) * COLUMNS).map(weight).collect();
    match dtype {
        DType::Q8_0 => all
            .chunks(32)
            .flat_map(|block| {
                // The float of 16 bits that is 1.
                let scale = 0x3c00u16.to_le_bytes();
                let bytes = block.iter().map(|&weight| weight as i8 as u8);
                scale.into_iter().chain(bytes)
            })
            .collect(),
        _ => all
            .iter()
            .flat_map(|&weight| (weight as f32).to_le_bytes())
            .collect(),
    }
}

/// Compares what `device` computes with what it has to.
///
/// # Errors
/// [`ExecutorError::Faulty`], and what the device refuses.
pub(crate) fn run(device: &VulkanDevice, config: VulkanConfig) -> Result<(), ExecutorError> {
    for (dtype, what) in [
        (DType::F32, "a product of floats"),
        (DType::Q8_0, "a product of quantized numbers"),
    ] {
        for is_many in [false, true] {
            let found = product(&device.queue(), config, dtype, is_many)?;
            for (index, &found) in found.iter().enumerate() {
                let wanted = wanted(index / ROWS, index % ROWS);
                if found != wanted {
                    return Err(ExecutorError::Faulty {
                        device: device.driver_name().to_owned(),
                        what,
                        found,
                        wanted,
                    });
                }
            }
        }
    }
    Ok(())
}

fn product(
    queue: &VulkanQueue,
    config: VulkanConfig,
    dtype: DType,
    is_many: bool,
) -> Result<Vec<f32>, DeviceError> {
    let elements = TOKENS * COLUMNS;
    let (blocks, outputs) = (elements / 32, TOKENS * ROWS);
    // The input, what it is quantized to, and the output, one behind the other.
    let bytes_at = elements;
    let scales_at = bytes_at + 8 * blocks;
    let sums_at = scales_at + blocks;
    let output_at = (sums_at + blocks).next_multiple_of(64);
    let arena_words = (output_at + outputs).next_multiple_of(4);
    let word = |at: usize| at as u32;
    let x: Vec<f32> = (0..elements).map(|index| input(index) as f32).collect();
    let mut bytes = Vec::new();
    for row in 0..ROWS {
        arranged::arrange(dtype, COLUMNS, &encoded(dtype, row), None, &mut bytes);
    }

    let mut compute = queue.compute(4 * elements, 4 * outputs)?;
    let wanted = Wanted {
        types: vec![dtype],
        ..Wanted::default()
    };
    let kernels = Kernels::new(&compute, &wanted, config.uses_integer_dot(&compute))?;
    let arena = queue.memory(ByteLength::new(4 * arena_words as u64))?;
    let weights = queue.memory(ByteLength::new(bytes.len() as u64))?;
    weights.write(0, &bytes)?;
    let quantize = Quantize {
        source: 0,
        up: NONE,
        function: NONE,
        bytes: word(bytes_at),
        scales: word(scales_at),
        sums: word(sums_at),
        fours: word(8 * blocks),
        alpha: 0.0,
        limit: 0.0,
    };
    let quantized = dtype.is_quantized();
    let product = Product {
        input: if quantized { word(bytes_at) } else { 0 },
        scales: word(scales_at),
        sums: word(sums_at),
        output: word(output_at),
        stride: word(ROWS),
        first_row: 0,
        count: word(ROWS),
        row_size: word(bytes.len() / ROWS / 16),
        skip: 0,
        columns: word(COLUMNS),
        units: word(COLUMNS / arranged::unit(dtype)),
        tokens: word(TOKENS),
        has_bias: 0,
        tiles: NONE,
        order: NONE,
        used: 1,
        first_expert: 0,
        experts: 1,
        expert_size: 0,
    };
    let part = |start: usize, words: usize| Bound::Memory {
        memory: &arena,
        offset: 4 * start as u64,
        length: 4 * words as u64,
    };
    let all = part(0, arena_words);
    let matrix = crate::pass::whole(&weights);
    let products = kernels.products(dtype);
    let (kernel, side) = match is_many {
        true => (&products.many, [TILE, TILE]),
        false => (&products.few, [PRODUCT_ROWS, PRODUCT_TOKENS]),
    };
    let groups = [
        word(ROWS).div_ceil(side[0]),
        word(TOKENS).div_ceil(side[1]),
        1,
    ];
    let mut recording = compute.begin(bytemuck::cast_slice(&x), 0)?;
    recording.take_input(0, part(0, elements))?;
    recording.barrier()?;
    if quantized {
        let windows = [all, Bound::Unused, Bound::Unused, Bound::Unused];
        let groups = [quantize.fours.div_ceil(THREADS), 1, 1];
        recording.dispatch(&kernels.quantize, windows, quantize.words(), groups)?;
        recording.barrier()?;
    }
    recording.dispatch(kernel, [all, matrix, matrix, all], product.words(), groups)?;
    recording.barrier()?;
    recording.leave_output(part(output_at, outputs), 0)?;
    recording.submit()?;
    let mut found = vec![0.0; outputs];
    compute.output(bytemuck::cast_slice_mut(&mut found))?;
    Ok(found)
}
