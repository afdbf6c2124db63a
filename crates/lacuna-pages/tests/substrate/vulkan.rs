//! The same on a graphics device, or on a driver in software. Ignored until asked for, since not every
//! machine has one: `just test-vulkan`.

use std::sync::LazyLock;

use lacuna_pages::device::Device;
use lacuna_pages::{Pool, VulkanDevice};
use proptest::prelude::*;

use crate::support::PAGE_SIZE;
use crate::{model, storm};

const UNDER_TEST: &str = "LACUNA_PAGES_TEST_VULKAN";

/// Whether this process was started to run the tests of every device on a graphics device.
pub(crate) fn is_under_test() -> bool {
    std::env::var_os(UNDER_TEST).is_some()
}

/// The one device of this process, once more: opening a card takes tenths of a second, and hundreds of pools are
/// tested. So they also prove that pools of one device leave each other alone.
pub(crate) fn open() -> VulkanDevice {
    static DEVICE: LazyLock<VulkanDevice> = LazyLock::new(|| {
        let device = VulkanDevice::open().expect("a driver with sparse buffers");
        assert!(device.capabilities().page_sizes.contains(&PAGE_SIZE));
        device
    });
    DEVICE.share()
}

/// Runs the tests of this program whose names contain `filter` in a process that has no other device.
fn passes(filter: &str) {
    let program = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(program);
    let output = command.arg(filter).env(UNDER_TEST, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("running 0 tests"), "{filter}: {text}");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn what_every_device_must_do_is_done() {
    passes("conformance::");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn every_call_fails_once_and_nothing_has_changed() {
    passes("faults::");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn calls_that_make_no_sense_are_refused() {
    passes("misuse::");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn after_a_storm_memory_returns_just_so() {
    storm::storm(&Pool::new(open(), storm::config()).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.div_ceil(100)))]

    #[test]
    #[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
    fn the_pool_agrees_with_the_oracle(
        steps in proptest::collection::vec(model::step(), 10_000),
    ) {
        model::run(Pool::new(open(), model::config()).unwrap(), &steps);
    }
}
