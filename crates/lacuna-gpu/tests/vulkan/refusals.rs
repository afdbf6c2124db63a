//! What the device cannot do is refused by name, before anything is brought to it.

use lacuna_gpu::VulkanConfig;
use lacuna_kernels::{DType, ElementType};
use lacuna_kv::{KvElements, KvPolicy};
use lacuna_models::ExecutorError;
use lacuna_pages::ByteLength;

use crate::support::{OnDevice, config, open_device};

fn refusal(path: &str, elements: KvElements, policy: &str) -> ExecutorError {
    let device = open_device();
    let queue = device.device().queue();
    let before = queue.memory_use();
    let policy: KvPolicy = policy.parse().expect("a policy");
    let refused = OnDevice::on(&device, path, elements, policy);
    let error = refused.expect_err("the device cannot do this yet");
    assert_eq!(queue.memory_use(), before, "nothing was taken");
    error
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn weight_types_that_it_cannot_multiply_with_are_named() {
    let error = refusal(
        "qwen3-types/dynamic-Q2_K.gguf",
        KvElements::default(),
        "sparse",
    );
    let ExecutorError::WeightType { dtype, tensor, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*dtype, DType::Iq3S);
    assert!(tensor.starts_with("blk.0."), "{tensor}");
    let text = error.to_string();
    assert!(
        text.contains("q8_0") && text.contains("on the processor"),
        "{text}"
    );
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn kv_memory_that_it_cannot_compute_over_is_refused() {
    let f16 = KvElements::default();
    for (policy, elements) in [
        ("grow:mlx", f16),
        ("paged", f16),
        ("sparse:head-major", f16),
        ("sparse", KvElements::both(ElementType::Q4_0)),
        ("sparse", KvElements::both(ElementType::Iq4Nl)),
    ] {
        let error = refusal("demo", elements, policy);
        assert!(
            matches!(error, ExecutorError::Kv { .. }),
            "{policy}: {error}"
        );
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn rows_longer_than_what_kernels_are_shown_are_refused() {
    let config = VulkanConfig {
        window: Some(ByteLength::kibibytes(4)),
        ..config()
    };
    let refused = OnDevice::with("demo", ElementType::F16, KvPolicy::default(), config);
    let error = refused.expect_err("a partition of rows is longer");
    assert!(matches!(error, ExecutorError::Window { .. }), "{error}");
}
