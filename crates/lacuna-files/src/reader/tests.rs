use std::io::Write;

use proptest::prelude::*;

use super::faults::{Fault, FaultyDevice};
use super::*;
use crate::Mapping;

/// A file of bytes that say where they are.
struct Subject {
    bytes: Vec<u8>,
    mapping: Mapping,
    file: tempfile::NamedTempFile,
}

impl Subject {
    fn new(length: usize) -> Self {
        let bytes: Vec<u8> = (0..length).map(|at| (at * 7 + at / 251) as u8).collect();
        // Beside the sources, not in /tmp: that may be a file system in memory.
        let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all(&bytes).unwrap();
        let mapping = Mapping::open(file.path()).unwrap();
        Self {
            bytes,
            mapping,
            file,
        }
    }

    fn open(&self, caching: Caching) -> ReadFile {
        let opened = ReadFile::open(&self.mapping, caching).unwrap();
        opened.expect("it is a file")
    }
}

type Make = fn() -> io::Result<Box<dyn ReadDevice>>;

/// Every device that works here.
fn devices() -> Vec<Make> {
    let mut devices: Vec<Make> = vec![|| Ok(Box::new(ReadThreads::new()?))];
    #[cfg(target_os = "linux")]
    if ReadQueue::new().is_ok() {
        devices.push(|| Ok(Box::new(ReadQueue::new()?)));
    } else {
        eprintln!("not tested: io_uring, which this process may not use");
    }
    devices
}

/// Reads all of `ranges`, some of which are queued and begin with those after them.
fn read_all(
    mut reader: FileReader,
    file: &ReadFile,
    ranges: &[Range<u64>],
) -> Vec<Result<Loaded, ReadError>> {
    for (number, range) in (0..).zip(ranges) {
        let extent = Extent {
            file: file.clone(),
            range: range.clone(),
        };
        let buffer = Buffer::new(extent.buffer_bytes()).unwrap();
        match number % 3 {
            0 => reader.begin(number, extent, buffer),
            _ => reader.queue(number, extent, buffer),
        }
    }
    let mut results: Vec<_> = ranges.iter().map(|_| None).collect();
    while let Some(done) = reader.wait() {
        let place = &mut results[done.number as usize];
        assert!(place.is_none(), "each once");
        *place = Some(done.result);
    }
    results.into_iter().map(|it| it.expect("all")).collect()
}

const LENGTH: usize = 3 * CALL_BYTES + 5000;

fn some_ranges() -> Vec<Range<u64>> {
    let length = LENGTH as u64;
    let mib = CALL_BYTES as u64;
    vec![
        0..length,
        1..2,
        4095..4097,
        mib - 1..2 * mib + 1,
        length - 1..length,
        5..5,
        12_345..2_345_678,
    ]
}

#[test]
fn every_device_reads_what_the_file_has_by_every_method() {
    let subject = Subject::new(LENGTH);
    for caching in [Caching::Avoided, Caching::Allowed] {
        let file = subject.open(caching);
        for make in devices() {
            let reader = FileReader::with(make().unwrap());
            let found = read_all(reader, &file, &some_ranges());
            for (range, found) in some_ranges().into_iter().zip(found) {
                let expected = &subject.bytes[range.start as usize..range.end as usize];
                assert!(*found.unwrap() == *expected, "{caching:?} {range:?}");
            }
        }
    }
}

#[test]
fn short_late_reordered_and_interrupted_reads_bring_the_same() {
    let subject = Subject::new(LENGTH);
    let file = subject.open(Caching::Avoided);
    for make in devices() {
        for fault in [
            Fault::Shorten,
            Fault::Delay,
            Fault::Reorder,
            Fault::Interrupt,
        ] {
            for every in [2, 3, 7] {
                let device = FaultyDevice::new(make().unwrap(), every, fault);
                let reader = FileReader::with(Box::new(device));
                let found = read_all(reader, &file, &some_ranges());
                for (range, found) in some_ranges().into_iter().zip(found) {
                    let expected = &subject.bytes[range.start as usize..range.end as usize];
                    assert!(*found.unwrap() == *expected, "{fault:?} {every} {range:?}");
                }
            }
        }
    }
}

#[test]
fn a_broken_disk_is_an_error_of_the_extents_it_is_in_and_of_no_other() {
    let subject = Subject::new(LENGTH);
    let file = subject.open(Caching::Avoided);
    for make in devices() {
        // Extents of one call each: the third and the sixth fail.
        let ranges: Vec<Range<u64>> = (0..7).map(|at| at * 9000..at * 9000 + 5000).collect();
        let device = FaultyDevice::new(make().unwrap(), 3, Fault::Fail);
        let found = read_all(FileReader::with(Box::new(device)), &file, &ranges);
        for (at, found) in found.iter().enumerate() {
            match found {
                Ok(_) => assert!(![2, 5].contains(&at)),
                Err(error) => {
                    assert!([2, 5].contains(&at), "{error}");
                    assert_eq!(error.offset, ranges[at].start);
                    assert_eq!(error.bytes, 5000);
                    assert_eq!(error.path, subject.file.path());
                    assert!(error.to_string().contains("the disk is broken"), "{error}");
                }
            }
        }
    }
}

#[test]
fn reads_that_never_bring_anything_end() {
    let subject = Subject::new(LENGTH);
    let file = subject.open(Caching::Avoided);
    for fault in [Fault::Interrupt, Fault::Shorten, Fault::End] {
        let device = FaultyDevice::new(Box::new(ReadThreads::new().unwrap()), 1, fault);
        let whole = 0..LENGTH as u64;
        let found = read_all(FileReader::with(Box::new(device)), &file, &[whole]);
        assert!(found[0].is_err(), "{fault:?}");
    }
}

#[test]
fn a_file_that_became_shorter_says_so_with_the_place() {
    let subject = Subject::new(LENGTH);
    for caching in [Caching::Avoided, Caching::Allowed] {
        let file = subject.open(caching);
        subject.file.as_file().set_len(10_000).unwrap();
        for make in devices() {
            let reader = FileReader::with(make().unwrap());
            let found = read_all(reader, &file, &[0..9000, 9000..20_000, 500_000..500_001]);
            assert!(found[0].is_ok());
            for (found, offset) in found[1..].iter().zip([8192..=12_288, 500_000..=500_000]) {
                let error = found.as_ref().unwrap_err();
                assert_eq!(error.why, ReadFailure::Shorter);
                assert!(offset.contains(&error.offset), "{error}");
            }
        }
        let whole = std::fs::OpenOptions::new()
            .write(true)
            .open(subject.file.path());
        whole.unwrap().set_len(LENGTH as u64).unwrap();
    }
}

#[test]
fn what_is_abandoned_is_never_finished_and_the_reader_goes_on() {
    let subject = Subject::new(LENGTH);
    let file = subject.open(Caching::Avoided);
    for make in devices() {
        let mut reader = FileReader::with(make().unwrap());
        let ring = Ring::new(4 * CALL_BYTES).unwrap();
        for round in 0..4 {
            let extent = Extent {
                file: file.clone(),
                range: 0..LENGTH as u64,
            };
            let buffer = ring.take(extent.buffer_bytes()).expect("all of it is back");
            reader.begin(round, extent, buffer);
            if round < 3 {
                reader.abandon();
            }
        }
        let done = reader.wait().expect("the last");
        assert_eq!(done.number, 3);
        assert!(*done.result.unwrap() == *subject.bytes);
        assert!(reader.wait().is_none());
    }
}

#[test]
fn memory_that_stands_in_for_a_file_is_not_read() {
    let memory = Mapping::from(vec![1, 2, 3]);
    assert!(ReadFile::open(&memory, Caching::Avoided).unwrap().is_none());
}

#[test]
fn another_file_under_the_same_path_is_refused() {
    let subject = Subject::new(5000);
    let other = Subject::new(5000);
    std::fs::rename(other.file.path(), subject.file.path()).unwrap();
    let refused = ReadFile::open(&subject.mapping, Caching::Avoided).unwrap_err();
    assert!(refused.to_string().contains("another file"), "{refused}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_ranges_with_any_faults_are_what_the_file_has(
        ranges in proptest::collection::vec((0..LENGTH as u64, 0..200_000u64), 1..12),
        every in 1u64..6,
        which in 0usize..4,
    ) {
        let subject = Subject::new(LENGTH);
        let file = subject.open(Caching::Avoided);
        let ranges: Vec<Range<u64>> = ranges
            .into_iter()
            .map(|(start, length)| start..(start + length).min(LENGTH as u64))
            .collect();
        let faults = [Fault::Shorten, Fault::Delay, Fault::Reorder, Fault::Fail];
        for make in devices() {
            let device = FaultyDevice::new(make().unwrap(), every, faults[which]);
            let found = read_all(FileReader::with(Box::new(device)), &file, &ranges);
            for (range, found) in ranges.iter().zip(found) {
                if let Ok(found) = found {
                    let expected = &subject.bytes[range.start as usize..range.end as usize];
                    prop_assert!(*found == *expected);
                } else {
                    prop_assert!(matches!(faults[which], Fault::Fail) || every == 1);
                }
            }
        }
    }
}

/// More than a device takes at once: neurons come like this.
#[test]
fn hundreds_of_small_extents_that_are_queued_are_read_each_once() {
    let subject = Subject::new(700 * 4096 + 5);
    let file = subject.open(Caching::Avoided);
    let ranges = (0..699u64).map(|page| {
        let start = page * 389 % 700 * 4096 + page % 3;
        start..start + 1 + page * 7 % 4096
    });
    let ranges: Vec<Range<u64>> = ranges.collect();
    for make in devices() {
        for (every, fault) in [
            (1 << 40, Fault::Fail),
            (5, Fault::Delay),
            (7, Fault::Reorder),
        ] {
            let device = FaultyDevice::new(make().unwrap(), every, fault);
            let read = read_all(FileReader::with(Box::new(device)), &file, &ranges);
            for (range, found) in ranges.iter().zip(read) {
                let expected = &subject.bytes[range.start as usize..range.end as usize];
                assert_eq!(&found.unwrap()[..], expected);
            }
        }
    }
}
