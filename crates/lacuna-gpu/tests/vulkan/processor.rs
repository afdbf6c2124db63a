//! The device computes what the processor does.

use lacuna_kernels::ElementType;

use crate::support::{OnDevice, OnProcessor, expected, relative_l2, some_tokens};

/// What the order of sums may make of logits, relative.
const BOUND: f64 = 1e-3;

fn compare(path: &str, element: ElementType, tokens: &[u32]) {
    let found = OnDevice::open(path, element).logits(tokens);
    let wanted = OnProcessor::open(path, element).logits(tokens);
    let apart = relative_l2(&found, &wanted);
    println!("{path}, {element}: {apart:.2e}");
    assert!(apart <= BOUND, "{path}, {element}: {apart:e}");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn logits_of_dense_families_are_those_of_the_processor() {
    for model in ["qwen3", "qwen3-untied", "qwen2", "llama2", "llama3", "mistral"] {
        let tokens = expected(model).tokens;
        for file in ["model.gguf", "hf"] {
            compare(&format!("{model}/{file}"), ElementType::F32, &tokens);
        }
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn logits_with_every_weight_type_are_those_of_the_processor() {
    for name in ["Q8_0", "Q4_0", "Q4_1", "Q4_K_M"] {
        let path = format!("qwen3-types/{name}.gguf");
        compare(&path, ElementType::F32, &some_tokens(40, 16));
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn logits_with_every_element_type_of_rows_are_those_of_the_processor() {
    for element in [ElementType::F16, ElementType::Bf16] {
        compare("qwen3/hf", element, &expected("qwen3").tokens);
        compare("mistral/model.gguf", element, &expected("mistral").tokens);
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn windows_and_soft_caps_are_those_of_the_processor() {
    for model in ["families/mistral-window", "families/gemma2"] {
        let path = format!("{model}/hf");
        compare(&path, ElementType::F16, &expected(model).tokens);
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn the_demo_writes_what_it_writes_on_the_processor() {
    let mut device = OnDevice::open("demo", ElementType::F16);
    let mut processor = OnProcessor::open("demo", ElementType::F16);
    let prompt = some_tokens(20, device.vocabulary());
    let found = device.greedy(&prompt, 64);
    assert_eq!(found, processor.greedy(&prompt, 64));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn long_texts_of_the_demo_are_those_of_the_processor() {
    let tokens = some_tokens(600, 300);
    compare("demo", ElementType::F16, &tokens);
}
