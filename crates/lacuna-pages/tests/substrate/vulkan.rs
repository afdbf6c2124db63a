//! The same on a graphics device, or on a driver in software. Ignored until asked for, since not every
//! machine has one: `just test-vulkan`.

use std::sync::LazyLock;

use lacuna_pages::device::Device;
use lacuna_pages::vulkan::PageTable;
use lacuna_pages::{Pool, VulkanDevice};
use proptest::prelude::*;

use crate::support::PAGE_SIZE;
use crate::{model, storm, support};

/// How the pages of a graphics device are found in a process that was started to run the tests of every device.
const UNDER_TEST: &str = "LACUNA_PAGES_TEST_VULKAN";

const PAGE_TABLES: [(&str, PageTable); 3] = [
    ("device", PageTable::Device),
    ("lookup", PageTable::Lookup),
    ("unused", PageTable::Unused),
];

/// Whether this process was started to run the tests of every device on a graphics device.
pub(crate) fn is_under_test() -> bool {
    std::env::var_os(UNDER_TEST).is_some()
}

/// How they are found in this process; by the device's own page table, if it was not started so.
fn page_table() -> PageTable {
    let wanted = std::env::var(UNDER_TEST).unwrap_or_default();
    let found = PAGE_TABLES.iter().find(|(name, _)| *name == wanted);
    found.map_or(PageTable::Device, |(_, pages)| *pages)
}

/// The one device of this process, once more: opening a card takes tenths of a second, and hundreds of pools are
/// tested. So they also prove that pools of one device leave each other alone.
pub(crate) fn open() -> VulkanDevice {
    static DEVICE: LazyLock<VulkanDevice> = LazyLock::new(|| open_with(page_table()));
    DEVICE.share()
}

/// Another one, whose pages kernels look up.
fn open_lookup() -> VulkanDevice {
    static DEVICE: LazyLock<VulkanDevice> = LazyLock::new(|| open_with(PageTable::Lookup));
    DEVICE.share()
}

fn open_with(pages: PageTable) -> VulkanDevice {
    let device = VulkanDevice::open_with(pages).expect("a driver");
    assert_eq!(device.page_table(), pages, "a driver with all features");
    assert!(device.capabilities().page_sizes.contains(&PAGE_SIZE));
    device
}

/// Runs the tests of this program whose names contain `filter` in processes that have no other device, with each of the page
/// tables.
fn passes(filter: &str, page_tables: &[(&str, PageTable)]) {
    for (pages, _) in page_tables {
        support::passes(filter, UNDER_TEST, pages);
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn what_every_device_must_do_is_done() {
    passes("conformance::", &PAGE_TABLES);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn every_call_fails_once_and_nothing_has_changed() {
    // They share pages.
    passes("faults::", &PAGE_TABLES[..2]);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn calls_that_make_no_sense_are_refused() {
    passes("misuse::", &PAGE_TABLES);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn after_a_storm_memory_returns_just_so() {
    for device in [open(), open_lookup()] {
        storm::storm(&Pool::new(device, storm::config()).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.div_ceil(100)))]

    #[test]
    #[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
    fn the_pool_agrees_with_the_oracle(
        steps in proptest::collection::vec(model::step(), 10_000),
    ) {
        for device in [open(), open_lookup()] {
            model::run(Pool::new(device, model::config()).unwrap(), &steps);
        }
    }
}
