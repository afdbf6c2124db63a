//! Models with weights of every type, made for the tests: experts, states, and heads that are blocks of bytes.

use std::path::PathBuf;

use lacuna_gpu::VulkanConfig;
use lacuna_kernels::{DType, ElementType};
use lacuna_kv::{KvElements, KvPolicy};
use lacuna_models::synth::{self, Given, Shape};
use lacuna_pages::ByteLength;

use crate::support::{
    BOUND, OnDevice, OnProcessor, bound_of, config, open_device, relative_l2, some_tokens,
};

/// Weights that are multiplied with.
const TYPES: [DType; 14] = [
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::Iq4Nl,
    DType::Iq4Xs,
    DType::Mxfp4,
];

/// A published shape with experts, much smaller.
fn experts() -> &'static Shape {
    let mut shape = *Shape::find("qwen3-30b-a3b").expect("a published shape");
    (shape.layers, shape.hidden, shape.vocabulary) = (1, 256, 512);
    (shape.heads, shape.kv_heads, shape.head_size) = (4, 2, 64);
    shape.more = &[
        ("expert_count", Given::Size(6)),
        ("expert_used_count", Given::Size(2)),
        ("expert_feed_forward_length", Given::Size(256)),
    ];
    Box::leak(Box::new(shape))
}

/// A model of random weights in a file that goes with it.
struct Made {
    path: PathBuf,
}

impl Made {
    fn new(dtype: DType, test: &str) -> Self {
        let name = format!("lacuna-{test}-{dtype}-{}.gguf", std::process::id());
        let path = std::env::temp_dir().join(name);
        let model = synth::Model::new(experts(), dtype);
        let written = model.write_file(&path, &mut ());
        written.expect("room for a small file");
        Self { path }
    }

    fn path(&self) -> &str {
        self.path.to_str().expect("UTF-8")
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        std::fs::remove_file(&self.path).ok();
    }
}

fn with(made: &Made, config: VulkanConfig) -> OnDevice {
    let policy = KvPolicy::default();
    let model = OnDevice::with(made.path(), ElementType::F16, policy, config);
    model.expect("the device runs it")
}

/// Looks at how far the logits of tokens by themselves are from the processor's. Where weights are quantized, an
/// activation that lies just between two bytes may be rounded the other way, which moves all logits after it: those of
/// some tokens, and in a longer text those of all that see one of these.
fn check(dtype: DType, mut apart: Vec<f64>) {
    apart.sort_by(f64::total_cmp);
    let (half, most) = (apart[apart.len() / 2], apart[apart.len() - 1]);
    println!("{dtype}: {half:.2e}, at most {most:.2e}");
    let usual = bound_of(dtype.is_quantized());
    assert!(half <= usual, "{dtype}: {half:e}");
    let bound = if dtype.is_quantized() { 3e-2 } else { BOUND };
    assert!(most <= bound, "{dtype}: {most:e}");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn experts_of_every_weight_type_are_those_of_the_processor_and_the_same_however_they_are_cut() {
    for dtype in TYPES {
        let made = Made::new(dtype, "experts");
        let mut device = with(&made, config());
        let tokens = some_tokens(120, device.vocabulary());
        let found = device.logits(&tokens);
        let mut processor = OnProcessor::open(made.path(), ElementType::F16);
        let alone = tokens[..40]
            .iter()
            .map(|token| relative_l2(&device.logits(&[*token]), &processor.logits(&[*token])));
        check(dtype, alone.collect());
        for (chunk, count) in [(1, 20), (7, tokens.len())] {
            let mut sequence = device.sequence();
            let chunks = tokens[..count].chunks(chunk);
            let pieces = chunks.flat_map(|chunk| device.extend(&mut sequence, chunk));
            let pieces: Vec<f32> = pieces.collect();
            assert!(
                pieces == found[..pieces.len()],
                "{dtype} in chunks of {chunk}"
            );
        }
        if dtype.is_quantized() {
            let dotted = VulkanConfig {
                integer_dot: Some(true),
                ..config()
            };
            let dotted = with(&made, dotted).logits(&tokens);
            assert!(dotted == found, "{dtype}, by one instruction");
        }
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn experts_in_short_windows_equal_all_of_them_at_once() {
    for dtype in [DType::F32, DType::Q8_0] {
        let made = Made::new(dtype, "windows");
        let tokens = some_tokens(120, 500);
        let whole = with(&made, config()).logits(&tokens);
        // Some experts at once, and some rows of one.
        for kibibytes in [100, 300] {
            let short = VulkanConfig {
                window: Some(ByteLength::kibibytes(kibibytes)),
                ..config()
            };
            let parts = with(&made, short).logits(&tokens);
            assert!(parts == whole, "{dtype} in windows of {kibibytes} KiB");
        }
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn rows_of_q8_0_are_those_of_the_processor_and_the_same_however_they_are_cut() {
    let made = Made::new(DType::F32, "rows");
    let device = open_device();
    let (bytes, halves) = (ElementType::Q8_0, ElementType::F16);
    for (key, value) in [(bytes, bytes), (bytes, halves), (halves, bytes)] {
        let elements = KvElements { key, value };
        let policy = KvPolicy::default();
        let opened = OnDevice::on(&device, made.path(), elements, policy);
        let mut model = opened.expect("the device runs it");
        // Rows in two partitions.
        let tokens = some_tokens(300, model.vocabulary());
        let found = model.logits(&tokens);
        let mut processor = OnProcessor::with(made.path(), elements);
        let apart = relative_l2(&found, &processor.logits(&tokens));
        println!("{key}, {value}: {apart:.2e}");
        assert!(apart <= BOUND, "{key}, {value}: {apart:e}");
        for chunk in [1, 70] {
            let mut sequence = model.sequence();
            let chunks = tokens.chunks(chunk);
            let pieces = chunks.flat_map(|chunk| model.extend(&mut sequence, chunk));
            assert!(
                pieces.collect::<Vec<f32>>() == found,
                "in chunks of {chunk}"
            );
        }
    }
}
