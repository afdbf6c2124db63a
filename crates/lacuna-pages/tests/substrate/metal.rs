//! The same on a Metal device. Ignored until asked for, since few machines have one; README.md has the command.

use std::sync::LazyLock;

use lacuna_pages::device::{Device, Patience};
use lacuna_pages::metal::{Rows, checksum};
use lacuna_pages::{ByteLength, MetalDevice, Pool};
use proptest::prelude::*;

use crate::support::{self, PAGE, PAGE_SIZE, contents, pages, range, small, write_page};
use crate::{model, storm};

/// Whether a process was started to run the tests of every device on a Metal device.
const UNDER_TEST: &str = "LACUNA_PAGES_TEST_METAL";

/// Whether this process was.
pub(crate) fn is_under_test() -> bool {
    std::env::var_os(UNDER_TEST).is_some()
}

/// The one device of this process, once more: its pools must leave each other alone.
pub(crate) fn open() -> MetalDevice {
    static DEVICE: LazyLock<MetalDevice> = LazyLock::new(|| {
        let device = MetalDevice::open().expect("a device with Metal 4");
        assert!(device.capabilities().page_sizes.contains(&PAGE_SIZE));
        device
    });
    DEVICE.share()
}

#[test]
#[ignore = "needs a device with Metal 4"]
fn what_every_device_must_do_is_done() {
    support::passes("conformance::", UNDER_TEST, "1");
}

#[test]
#[ignore = "needs a device with Metal 4"]
fn every_call_fails_once_and_nothing_has_changed() {
    support::passes("faults::", UNDER_TEST, "1");
}

#[test]
#[ignore = "needs a device with Metal 4"]
fn calls_that_make_no_sense_are_refused() {
    support::passes("misuse::", UNDER_TEST, "1");
}

#[test]
#[ignore = "needs a device with Metal 4"]
fn after_a_storm_memory_returns_just_so() {
    storm::storm(&Pool::new(open(), storm::config()).unwrap());
}

#[test]
#[ignore = "needs a device with Metal 4"]
fn kernels_see_one_flat_range_over_scattered_pages() {
    let device = open();
    let queue = device.queue();
    let pool = Pool::new(device, small()).unwrap();
    let [mut buffer, mut other] = [(); 2].map(|()| pool.reserve(pages(40), "").unwrap());
    // Page by page in turns, so that the pages of neither are adjacent in memory.
    for page in 0..40 {
        for buffer in [&mut buffer, &mut other] {
            buffer.ensure_mapped(page * PAGE..page * PAGE + 1).unwrap();
        }
    }
    for page in 0..40 {
        write_page(&mut other, page, page);
    }
    let before = contents(&other, 0..40 * PAGE);
    let (row, stride, count) = (1_536, 2_000, 1_000);
    let data: Vec<u8> = (0..row * count).map(|byte| (byte % 251) as u8).collect();
    let mut expected = vec![7; 40 * PAGE];
    buffer.write(0, &expected).unwrap();
    let rows = Rows {
        address: buffer.address(60),
        row: ByteLength::new(row as u64),
        stride: ByteLength::new(stride as u64),
    };
    let fence = queue.write_rows(rows, &data).unwrap();
    for (index, bytes) in data.chunks(row).enumerate() {
        let start = 60 + index * stride;
        expected[start..start + row].copy_from_slice(bytes);
    }
    queue.wait(fence, Patience::Block).unwrap();
    assert!(contents(&buffer, 0..40 * PAGE) == expected);
    let sum = queue.checksum(buffer.address(0), pages(40)).unwrap();
    assert_eq!(sum, checksum(&expected));
    assert!(contents(&other, 0..40 * PAGE) == before, "the pages beside");
    // What is not mapped, or sealed, is not touched.
    buffer.seal(range(0, 1)).unwrap();
    assert!(queue.write_rows(rows, &data).is_err());
    buffer.unmap(range(3, 4)).unwrap();
    assert!(queue.checksum(buffer.address(0), pages(40)).is_err());
}

#[test]
#[ignore = "needs a device with Metal 4"]
fn bytes_that_are_no_whole_words_are_copied_alone() {
    let pool = Pool::new(open(), small()).unwrap();
    let mut buffer = pool.reserve(pages(2), "").unwrap();
    buffer.ensure_mapped(0..2 * PAGE).unwrap();
    let mut expected = vec![1; 2 * PAGE];
    buffer.write(0, &expected).unwrap();
    for (start, length) in [(1, 1), (3, 2), (PAGE - 3, 6), (2 * PAGE - 1, 1), (9, 4_096)] {
        let bytes: Vec<u8> = (0..length).map(|byte| 2 + (byte % 200) as u8).collect();
        buffer.write(start as u64, &bytes).unwrap();
        expected[start..start + length].copy_from_slice(&bytes);
        assert_eq!(contents(&buffer, start..start + length), bytes);
    }
    assert!(contents(&buffer, 0..2 * PAGE) == expected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.div_ceil(100)))]

    #[test]
    #[ignore = "needs a device with Metal 4"]
    fn the_pool_agrees_with_the_oracle(
        steps in proptest::collection::vec(model::step(), 10_000),
    ) {
        model::run(Pool::new(open(), model::config()).unwrap(), &steps);
    }
}
