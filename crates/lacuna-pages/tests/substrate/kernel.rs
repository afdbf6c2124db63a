//! The ledger against the kernel: blocks of the memfds, proportional set size, mappings. Each in a
//! process of its own, so that nothing else is counted.

use std::fs;
use std::os::unix::fs::MetadataExt;

use lacuna_pages::{
    ByteLength, HostConfig, HostDevice, HugePages, PageSize, Pool, PoolConfig, VirtualPage,
};

use crate::children::succeeds_in_child;
use crate::support::{host, range};

/// What the heaps of this process hold, by their files' blocks.
fn heap_blocks() -> ByteLength {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let heap = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("lacuna-heap"))
    };
    let paths = descriptors.map(|entry| entry.path()).filter(heap);
    ByteLength::new(
        paths
            .map(|path| fs::metadata(path).unwrap().blocks() * 512)
            .sum(),
    )
}

fn proportional_set_size() -> u64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup
        .lines()
        .find(|line| line.starts_with("Pss:"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1024
}

/// Shared memory that is in this process's page tables.
fn resident_shared_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssShmem:"));
    let kibibytes = line.unwrap().trim().strip_suffix("kB").unwrap();
    kibibytes.trim().parse::<u64>().unwrap() << 10
}

pub(crate) fn kernel_mappings() -> u64 {
    fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count() as u64
}

#[track_caller]
fn assert_blocks(pool: &Pool) {
    assert_eq!(heap_blocks(), pool.ledger().committed);
}

fn fill(buffer: &mut lacuna_pages::Buffer, pages: u64) {
    let length = pages as usize * PageSize::KIB_64.bytes() as usize;
    buffer.ensure_mapped(0..length).unwrap();
    for (page, bytes) in buffer
        .bytes_mut(0..length)
        .unwrap()
        .chunks_mut(65_536)
        .enumerate()
    {
        bytes.fill(page as u8);
    }
}

#[test]
fn two_buffers_share_a_thousand_pages_and_the_kernel_sees_one_copy() {
    let test = "kernel::two_buffers_share_a_thousand_pages_and_the_kernel_sees_one_copy";
    succeeds_in_child(test, || {
        let pool = host(PoolConfig::default());
        let length = ByteLength::mebibytes(128);
        let [mut first, mut second] = [(); 2].map(|()| pool.reserve(length, "").unwrap());
        let start = proportional_set_size();
        fill(&mut first, 1_000);
        let one = ByteLength::kibibytes(64 * 1_000);
        assert_eq!(pool.ledger().committed, one);
        assert_blocks(&pool);
        first.seal(range(0, 1_000)).unwrap();
        second
            .share_from(&first, range(0, 1_000), VirtualPage::new(0))
            .unwrap();
        let ledger = pool.ledger();
        assert_eq!((ledger.committed, ledger.shared), (one, one));
        assert_eq!(ledger.mapped.get(), 2 * one.get());
        assert_blocks(&pool);
        assert_eq!(
            first.bytes(0..65_536_000).unwrap(),
            second.bytes(0..65_536_000).unwrap()
        );
        let grown = proportional_set_size() - start;
        let books = one.get();
        assert!(
            grown.abs_diff(books) < books / 50,
            "PSS grew by {grown}, ledger {books}"
        );

        assert_eq!(
            second
                .make_unique(range(500, 501))
                .unwrap()
                .pages_mapped
                .get(),
            1
        );
        second.bytes_mut(500 << 16..501 << 16).unwrap().fill(0xEE);
        assert_eq!(pool.ledger().committed.get(), one.get() + 65_536);
        assert_blocks(&pool);
        assert_eq!(first.bytes(500 << 16..501 << 16).unwrap()[9], 244);

        drop(first);
        for page in (0..1_000usize).filter(|&page| page != 500) {
            assert!(
                second
                    .bytes(page << 16..(page + 1) << 16)
                    .unwrap()
                    .iter()
                    .all(|&byte| byte == page as u8)
            );
        }
        assert_eq!(second.ledger().unique, one);
        drop(second);
        pool.trim();
        assert_eq!(pool.ledger().committed, ByteLength::ZERO);
        assert_eq!(heap_blocks(), ByteLength::ZERO);
    });
}

/// Idle pages beside pages in use can only be punched out of their heap's file: here the kernel is
/// asked whether it has them back, since the heap itself stays.
#[test]
fn idle_pages_of_a_heap_in_use_go_back_to_the_kernel() {
    let test = "kernel::idle_pages_of_a_heap_in_use_go_back_to_the_kernel";
    succeeds_in_child(test, || {
        let pool = host(PoolConfig::default());
        let mut buffer = pool.reserve(ByteLength::mebibytes(8), "").unwrap();
        fill(&mut buffer, 100);
        let shared_memory = resident_shared_memory();
        for page in (1..100).step_by(2) {
            buffer.unmap(range(page, page + 1)).unwrap();
        }
        assert_eq!(heap_blocks(), ByteLength::kibibytes(64 * 100), "kept idle");
        pool.trim();
        assert_eq!(pool.ledger().committed, ByteLength::kibibytes(64 * 50));
        assert_blocks(&pool);
        assert_eq!(
            resident_shared_memory(),
            shared_memory - (64 << 10) * 50,
            "unmapped pages are resident nowhere"
        );
        for page in (0..100usize).step_by(2) {
            let bytes = buffer.bytes(page << 16..(page + 1) << 16).unwrap();
            assert!(bytes.iter().all(|&byte| byte == page as u8));
        }
        pool.verify([&buffer]).unwrap();
    });
}

/// A page that is mapped is there: the first access makes no fault that memory could be short for.
#[test]
fn mapped_pages_are_resident_before_they_are_touched() {
    let test = "kernel::mapped_pages_are_resident_before_they_are_touched";
    succeeds_in_child(test, || {
        let pool = host(PoolConfig::default());
        let length = ByteLength::mebibytes(8);
        let [mut first, mut second] = [(); 2].map(|()| pool.reserve(length, "").unwrap());
        let before = resident_shared_memory();
        first.ensure_mapped(0..100 << 16).unwrap();
        assert_eq!(resident_shared_memory() - before, 100 << 16);
        first.seal(range(0, 100)).unwrap();
        second
            .share_from(&first, range(0, 100), VirtualPage::new(0))
            .unwrap();
        assert_eq!(resident_shared_memory() - before, 200 << 16);
    });
}

#[test]
fn a_pool_that_is_dropped_leaves_no_mapping_and_no_file() {
    let test = "kernel::a_pool_that_is_dropped_leaves_no_mapping_and_no_file";
    succeeds_in_child(test, || {
        let lines = || {
            let maps = fs::read_to_string("/proc/self/maps").unwrap();
            let ours = maps.lines().filter(|line| line.contains("lacuna-heap"));
            ours.count()
        };
        let reserved = || {
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
            let kibibytes = line.unwrap().trim().strip_suffix("kB").unwrap();
            kibibytes.trim().parse::<u64>().unwrap() << 10
        };
        let before = reserved();
        for huge_pages in [HugePages::Never, HugePages::Collapse] {
            let config = HostConfig {
                huge_pages,
                ..HostConfig::DEFAULT
            };
            let device = HostDevice::with_config(config).unwrap();
            let pool = Pool::new(device, PoolConfig::default()).unwrap();
            let mut buffer = pool.reserve(ByteLength::gibibytes(64), "").unwrap();
            fill(&mut buffer, 3);
            assert!(lines() > 0 && reserved() - before >= 64 << 30);
            assert!(reserved() - before < 65 << 30, "what aligning took beyond");
            let large = reserved();
            let many = [(); 200].map(|()| pool.reserve(ByteLength::kibibytes(64), "").unwrap());
            assert!(reserved() - large < 64 << 20, "the same, before and behind");
            drop(many);
            drop((buffer, pool));
            assert_eq!((lines(), heap_blocks()), (0, ByteLength::ZERO));
            assert!(reserved() - before < 1 << 30);
        }
    });
}

#[test]
fn a_window_over_a_hundred_thousand_rows_keeps_memory_flat() {
    let test = "kernel::a_window_over_a_hundred_thousand_rows_keeps_memory_flat";
    succeeds_in_child(test, || {
        const ROW: usize = 2_048;
        const WINDOW: usize = 1_024;
        let pool = host(PoolConfig::default());
        let rows = 100_000;
        let mut buffer = pool
            .reserve(ByteLength::new((rows * ROW) as u64), "window")
            .unwrap();
        let (mut passed, mut most) = (0, 0);
        let mappings = kernel_mappings();
        for row in 0..rows {
            buffer.ensure_mapped(row * ROW..(row + 1) * ROW).unwrap();
            buffer
                .bytes_mut(row * ROW..(row + 1) * ROW)
                .unwrap()
                .fill(row as u8);
            let keep = PageSize::KIB_64.pages_within((0..row.saturating_sub(WINDOW) * ROW).into());
            if keep.end.index() > passed {
                buffer.unmap(range(passed, keep.end.index())).unwrap();
                passed = keep.end.index();
            }
            most = most.max(pool.ledger().committed.get());
            if row % 10_000 == 0 {
                assert_blocks(&pool);
                let first = row.saturating_sub(WINDOW) * ROW;
                assert_eq!(
                    buffer.bytes(first..(row + 1) * ROW).unwrap()[0],
                    (first / ROW) as u8
                );
            }
        }
        assert!(
            most <= (WINDOW * ROW + 2 * 65_536) as u64,
            "{most} bytes at most"
        );
        assert!(kernel_mappings() < mappings + 20);
        assert_eq!(
            pool.ledger().counts.pages_mapped,
            (rows * ROW).div_ceil(65_536) as u64
        );
        pool.verify([&buffer]).unwrap();
    });
}

#[test]
fn regions_are_what_the_kernel_counts_at_most() {
    let test = "kernel::regions_are_what_the_kernel_counts_at_most";
    succeeds_in_child(test, || {
        let pool = host(crate::support::small());
        let before = kernel_mappings();
        let length = crate::support::pages(300);
        let mut buffers: Vec<_> = (0..12).map(|_| pool.reserve(length, "").unwrap()).collect();
        for step in 0..300usize {
            let index = step * 7 % 12;
            let page = step * 13 % 290;
            let bytes = page * crate::support::PAGE..(page + 1 + step % 5) * crate::support::PAGE;
            buffers[index].ensure_mapped(bytes).unwrap();
            if step % 3 == 0 {
                buffers[index]
                    .seal(range(page as u64, page as u64 + 1))
                    .unwrap();
            }
            if step % 7 == 0 {
                buffers[index]
                    .unmap(range(page as u64, page as u64 + 1))
                    .unwrap();
            }
        }
        let (books, kernel) = (pool.ledger().regions, kernel_mappings() - before);
        assert!(
            kernel <= books + 2,
            "the kernel has {kernel}, the books {books}"
        );
        assert!(
            kernel + 16 >= books,
            "the kernel has {kernel}, the books {books}"
        );
        assert_blocks(&pool);
        pool.verify(&buffers).unwrap();
    });
}

/// Bytes of shared memory this process maps by huge pages.
fn huge_mappings() -> u64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let field = rollup
        .lines()
        .find_map(|line| line.strip_prefix("ShmemPmdMapped:"))
        .unwrap();
    field
        .trim()
        .strip_suffix("kB")
        .unwrap()
        .trim()
        .parse::<u64>()
        .unwrap()
        * 1024
}

/// Maps four huge pages twice where they are asked for, then looks at `check` and at the contents.
fn with_huge_pages(test: &str, check: fn()) {
    succeeds_in_child(test, || {
        let device = HostDevice::with_config(HostConfig {
            huge_pages: HugePages::Collapse,
            ..HostConfig::DEFAULT
        });
        let config = PoolConfig {
            page_size: PageSize::MIB_2,
            ..PoolConfig::default()
        };
        let pool = Pool::new(device.unwrap(), config).unwrap();
        let length = 8 << 20;
        let reserved = ByteLength::new(length as u64);
        let [mut first, mut second] = [(); 2].map(|()| pool.reserve(reserved, "").unwrap());
        first.ensure_mapped(0..length).unwrap();
        for (index, byte) in first.bytes_mut(0..length).unwrap().iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        first.seal(range(0, 4)).unwrap();
        second
            .share_from(&first, range(0, 4), VirtualPage::new(0))
            .unwrap();
        check();
        assert_eq!(
            first.bytes(0..length).unwrap(),
            second.bytes(0..length).unwrap()
        );
        assert_eq!(second.bytes(0..length).unwrap()[252], 1);
        assert_blocks(&pool);
        drop((first, second));
        pool.trim();
        assert_eq!(heap_blocks(), ByteLength::ZERO);
    });
}

#[test]
fn asking_for_huge_pages_changes_no_contents_and_no_accounts() {
    with_huge_pages(
        "kernel::asking_for_huge_pages_changes_no_contents_and_no_accounts",
        || {},
    );
}

#[test]
#[ignore = "needs a kernel with huge pages to give: see MADV_COLLAPSE"]
fn long_mappings_move_into_huge_pages() {
    with_huge_pages("kernel::long_mappings_move_into_huge_pages", || {
        let huge = huge_mappings();
        assert!(huge >= 2 << 20, "{huge} bytes in huge pages");
    });
}
