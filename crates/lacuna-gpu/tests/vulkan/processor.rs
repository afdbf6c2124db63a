//! The device computes what the processor does.

use lacuna_kernels::ElementType;
use lacuna_text::template::Message;

use crate::support::{BOUND, OnDevice, OnProcessor, bound, expected, relative_l2, some_tokens};

fn compare(path: &str, element: ElementType, tokens: &[u32]) {
    let mut device = OnDevice::open(path, element);
    let found = device.logits(tokens);
    let wanted = OnProcessor::open(path, element).logits(tokens);
    let apart = relative_l2(&found, &wanted);
    println!("{path}, {element}: {apart:.2e}");
    let bound = bound(&device.model);
    assert!(apart <= bound, "{path}, {element}: {apart:e}");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn logits_of_dense_families_are_those_of_the_processor() {
    for model in [
        "qwen3",
        "qwen3-untied",
        "qwen2",
        "llama2",
        "llama3",
        "mistral",
    ] {
        let tokens = expected(model).tokens;
        for file in ["model.gguf", "hf"] {
            compare(&format!("{model}/{file}"), ElementType::F32, &tokens);
        }
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn logits_with_every_weight_type_are_those_of_the_processor() {
    for name in [
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q4_K_M",
        "dynamic-tables",
    ] {
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
    for question in [
        "What is ownership?",
        "What is a trait?",
        "What does the borrow checker do?",
    ] {
        let mut device = OnDevice::open("demo", ElementType::F16);
        let mut processor = OnProcessor::open("demo", ElementType::F16);
        let message = Message::new("user", question);
        let prompt = device.model.prompt(&[message]).expect("a prompt");
        let found = device.greedy(&prompt, 64);
        assert_eq!(found, processor.greedy(&prompt, 64), "{question}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn texts_of_several_partitions_are_those_of_the_processor() {
    for (path, element) in [
        ("qwen2/model.gguf", ElementType::F32),
        ("mistral/model.gguf", ElementType::F16),
    ] {
        compare(path, element, &some_tokens(200, 272));
    }
}

/// Both round activations to bytes where weights are quantized. The order of a sum, which is each one's own, decides
/// about what lies just between two bytes, and one that is rounded the other way moves all logits after it by some
/// thousandths. Before the first of these they agree to the last bits.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn texts_of_the_demo_are_those_of_the_processor_but_for_rounded_activations() {
    let tokens = some_tokens(200, 300);
    let mut device = OnDevice::open("demo", ElementType::F16);
    let found = device.logits(&tokens);
    let wanted = OnProcessor::open("demo", ElementType::F16).logits(&tokens);
    let apart = relative_l2(&found, &wanted);
    assert!(apart <= 2e-2, "{apart:e}");
    let vocabulary = device.vocabulary();
    let apart = relative_l2(&found[..vocabulary], &wanted[..vocabulary]);
    assert!(apart <= BOUND, "{apart:e}");
}
