//! Pages of files: shared without a copy, counted like others, and copied before anyone writes.

use std::fs::{File, OpenOptions};
use std::io::Write;

use lacuna_pages::device::FilePart;
use lacuna_pages::{
    Buffer, ByteLength, DenseDevice, DeviceError, Error, PagePin, Pool, PoolConfig, Share, Source,
    VirtualPage, guard,
};

use crate::support::{Failing, Guise, PAGE, contents, host, pages, probed, range, small};

/// What is before the pages in a file.
const START: u64 = 4096;

/// A file of `count` pages, each full of its number, from `START` on.
fn file(count: u8) -> (tempfile::NamedTempFile, File) {
    guard::install().unwrap();
    let mut named = tempfile::NamedTempFile::new().unwrap();
    named.write_all(&vec![0xff; START as usize]).unwrap();
    for page in 0..count {
        named.write_all(&vec![page; PAGE]).unwrap();
    }
    let file = File::open(named.path()).unwrap();
    (named, file)
}

fn part(file: File, count: u64) -> FilePart {
    FilePart {
        file,
        offset: START,
        length: pages(count),
    }
}

fn mapped(pool: &Pool, pins: &[PagePin]) -> Buffer {
    let mut buffer = pool.reserve(pages(16), "").unwrap();
    let share = Share {
        source: Source::Pins(pins),
        target: &mut buffer,
        at: VirtualPage::new(0),
    };
    pool.share(&mut [share]).unwrap();
    buffer
}

fn numbers(buffer: &Buffer, count: usize) -> Vec<u8> {
    let bytes = contents(buffer, 0..count * PAGE);
    bytes.chunks(PAGE).map(|page| page[PAGE - 1]).collect()
}

#[test]
fn pages_of_a_file_are_shared_and_counted_until_nobody_has_them() {
    for guise in [Guise::Plain, Guise::Queue] {
        let (pool, handle) = probed(small(), guise);
        let (named, open) = file(6);
        let pins = pool.open_file(part(open, 6)).unwrap();
        drop(named);
        let ledger = pool.ledger();
        assert_eq!((ledger.committed, ledger.file), (pages(6), pages(6)));
        assert_eq!((ledger.pinned_only, ledger.idle), (pages(6), pages(0)));
        let buffers = [mapped(&pool, &pins), mapped(&pool, &pins[1..4])];
        assert_eq!(numbers(&buffers[0], 6), [0, 1, 2, 3, 4, 5]);
        assert_eq!(
            numbers(&buffers[1], 3),
            [1, 2, 3],
            "the file has no name any more"
        );
        pool.verify(&buffers).unwrap();
        drop(pins);
        let [first, second] = buffers;
        drop(first);
        handle.signal_everything();
        pool.trim();
        assert_eq!(pool.ledger().file, pages(3));
        pool.verify([&second]).unwrap();
        drop(second);
        handle.signal_everything();
        pool.trim();
        let ledger = pool.ledger();
        assert_eq!((ledger.committed, ledger.heaps), (pages(0), 0));
    }
}

#[test]
fn a_page_of_a_file_is_copied_before_it_is_written_although_nobody_else_has_it() {
    let pool = host(small());
    let (named, open) = file(3);
    let pins = pool.open_file(part(open, 3)).unwrap();
    let mut buffer = mapped(&pool, &pins);
    drop(pins);
    assert!(matches!(buffer.bytes_mut(0..1), Err(Error::Sealed { .. })));
    let report = buffer.make_unique(range(1, 2)).unwrap();
    assert_eq!(report.pages_copied.get(), 1);
    buffer.bytes_mut(PAGE..2 * PAGE).unwrap().fill(9);
    assert_eq!(numbers(&buffer, 3), [0, 9, 2]);
    let ledger = pool.ledger();
    assert_eq!((ledger.committed, ledger.file), (pages(3), pages(2)));
    pool.verify([&buffer]).unwrap();
    let bytes = std::fs::read(named.path()).unwrap();
    assert_eq!(bytes[START as usize + 2 * PAGE - 1], 1);
}

#[test]
fn a_file_gets_the_room_of_pages_that_lie_idle() {
    for guise in [Guise::Plain, Guise::Queue] {
        let config = PoolConfig {
            limit: Some(pages(10)),
            ..small()
        };
        let (pool, handle) = probed(config, guise);
        let mut kept = pool.reserve(pages(2), "").unwrap();
        kept.ensure_mapped(0..2 * PAGE).unwrap();
        let mut gone = pool.reserve(pages(8), "").unwrap();
        gone.ensure_mapped(0..8 * PAGE).unwrap();
        drop(gone);
        handle.signal_everything();
        let (_named, open) = file(6);
        let pins = pool.open_file(part(open, 6)).unwrap();
        let ledger = pool.ledger();
        assert_eq!((ledger.file, ledger.committed), (pages(6), pages(10)));
        let buffer = mapped(&pool, &pins);
        assert_eq!(numbers(&buffer, 6), [0, 1, 2, 3, 4, 5]);
        pool.verify([&kept, &buffer]).unwrap();
    }
}

#[test]
fn nobody_gets_a_page_of_a_file_anew() {
    let pool = host(small());
    let (_named, open) = file(8);
    let pins = pool.open_file(part(open, 8)).unwrap();
    let kept = mapped(&pool, &pins[..1]);
    drop(pins);
    // The rest of the file is free, and its heap is there.
    let mut buffer = pool.reserve(pages(40), "").unwrap();
    buffer.ensure_mapped(0..40 * PAGE).unwrap();
    buffer.bytes_mut(0..40 * PAGE).unwrap().fill(7);
    assert_eq!(numbers(&kept, 1), [0]);
    pool.verify([&buffer, &kept]).unwrap();
    drop(kept);
    // The number of its heap is given again.
    let (_named, open) = file(8);
    let pins = pool.open_file(part(open, 8)).unwrap();
    let kept = mapped(&pool, &pins[..1]);
    drop(pins);
    buffer.truncate(pages(1)).unwrap();
    pool.trim();
    buffer.ensure_mapped(0..40 * PAGE).unwrap();
    buffer.bytes_mut(0..40 * PAGE).unwrap().fill(8);
    assert_eq!(numbers(&kept, 1), [0]);
    pool.verify([&buffer, &kept]).unwrap();
}

#[test]
fn the_limit_holds_for_pages_of_files() {
    let config = PoolConfig {
        limit: Some(pages(10)),
        ..small()
    };
    let pool = host(config);
    let mut buffer = pool.reserve(pages(16), "").unwrap();
    buffer.ensure_mapped(0..10 * PAGE).unwrap();
    buffer.truncate(pages(4)).unwrap();
    assert_eq!(pool.ledger().idle, pages(6));
    let (named, open) = file(7);
    let refused = pool.open_file(part(open, 7)).unwrap_err();
    assert!(matches!(refused, Error::OutOfPages { .. }), "{refused}");
    let again = File::open(named.path()).unwrap();
    let pins = pool.open_file(part(again, 6)).unwrap();
    let ledger = pool.ledger();
    assert_eq!((ledger.committed, ledger.idle), (pages(10), pages(0)));
    let refused = buffer.ensure_mapped(0..5 * PAGE).unwrap_err();
    assert!(matches!(refused, Error::OutOfPages { .. }), "{refused}");
    drop(pins);
    buffer.ensure_mapped(0..5 * PAGE).unwrap();
    pool.verify([&buffer]).unwrap();
}

#[test]
fn a_file_of_more_pages_than_a_heap_may_have_is_refused() {
    let pool = host(small());
    let sparse = tempfile::tempfile().unwrap();
    let length = pages((1 << 24) + 1);
    sparse.set_len(length.get()).unwrap();
    let whole = FilePart {
        file: sparse,
        offset: 0,
        length,
    };
    let refused = pool.open_file(whole).unwrap_err();
    assert!(matches!(refused, Error::Length { .. }), "{refused}");
    assert_eq!(pool.ledger().committed, pages(0));
}

#[test]
fn what_cannot_be_mapped_as_it_is_is_refused_and_nothing_changes() {
    let pool = host(small());
    let (named, _) = file(4);
    let open = || File::open(named.path()).unwrap();
    for (offset, length) in [(START + 512, pages(1)), (START, ByteLength::new(100))] {
        let part = FilePart {
            file: open(),
            offset,
            length,
        };
        pool.open_file(part).unwrap_err();
    }
    let dense = Pool::new(DenseDevice::new(), small()).unwrap();
    let refused = dense.open_file(part(open(), 1)).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    let (failing, handle) = probed(small(), Guise::Plain);
    handle.fail(Failing::From(0));
    failing.open_file(part(open(), 1)).unwrap_err();
    handle.fail(Failing::Nothing);
    // What the device does not take back stays its own until it does.
    let pins = failing.open_file(part(open(), 4)).unwrap();
    handle.fail(Failing::From(0));
    drop(pins);
    assert_eq!(failing.ledger().heaps, 1);
    handle.fail(Failing::Nothing);
    failing.trim();
    for pool in [pool, dense, failing] {
        let ledger = pool.ledger();
        assert_eq!((ledger.committed, ledger.heaps), (pages(0), 0));
        pool.verify([]).unwrap();
    }
}

#[test]
fn only_so_many_files_are_open_at_once() {
    let pool = host(small());
    let (named, _) = file(1);
    let open = || pool.open_file(part(File::open(named.path()).unwrap(), 1));
    let mut pins: Vec<_> = (0..256).map(|_| open().unwrap()).collect();
    assert!(matches!(open(), Err(Error::Unsupported { .. })));
    pins.pop();
    open().unwrap();
}

#[test]
fn a_file_that_shrinks_reads_as_zeros_and_is_known_to_be_lost() {
    for left in [1, 3 * PAGE as u64, 4 * PAGE as u64 - 1] {
        let pool = host(small());
        let (named, open) = file(4);
        let pins = pool.open_file(part(open, 4)).unwrap();
        let buffer = mapped(&pool, &pins);
        let mut own = pool.reserve(pages(2), "").unwrap();
        own.ensure_mapped(0..PAGE).unwrap();
        own.bytes_mut(0..PAGE).unwrap().fill(7);
        assert!(!pool.has_lost_files());
        let shorter = OpenOptions::new().write(true).open(named.path());
        shorter.unwrap().set_len(START + left).unwrap();
        assert_eq!(numbers(&buffer, 4)[3], 0);
        assert!(pool.has_lost_files(), "{left}");
        assert_eq!(numbers(&own, 1), [7], "what is beside it stays");
        pool.verify([&buffer, &own]).unwrap();
        // Whoever maps it now is told, if a page is gone as a whole.
        let mut late = pool.reserve(pages(4), "").unwrap();
        let share = Share {
            source: Source::Pins(&pins),
            target: &mut late,
            at: VirtualPage::new(0),
        };
        let shared = pool.share(&mut [share]);
        if left < 4 * PAGE as u64 - 4096 {
            let lost = Error::Device(DeviceError::LostFile);
            assert_eq!(shared.unwrap_err(), lost);
        }
        drop((late, buffer, pins));
        assert!(!pool.has_lost_files(), "it is let go of");
        pool.verify([&own]).unwrap();
    }
}

#[test]
fn threads_that_read_a_file_as_it_shrinks_all_come_back() {
    let pool = host(small());
    for _ in 0..20 {
        let (named, open) = file(8);
        let pins = pool.open_file(part(open, 8)).unwrap();
        let buffer = mapped(&pool, &pins);
        let read = || {
            let bytes = buffer.bytes(0..8 * PAGE).unwrap();
            bytes.iter().filter(|&&byte| byte == 7).count()
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| while read() > 0 {});
            }
            let shorter = OpenOptions::new().write(true).open(named.path());
            shorter.unwrap().set_len(START).unwrap();
        });
        assert!(pool.has_lost_files());
    }
}
