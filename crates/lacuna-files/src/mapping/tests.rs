//! Files that shrink while they are mapped.

use std::fs::{self, OpenOptions};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Error, Mapping, guard_mappings};

/// Set for a copy of this program that is to be ended by a signal.
const DOOMED: &str = "LACUNA_TEST_DOOMED";
/// Larger than a page of any processor that this runs on.
const BYTES: usize = 1 << 20;

fn file(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, vec![7; BYTES]).unwrap();
    path
}

fn shorten(path: &Path, bytes: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(bytes).unwrap();
}

#[test]
fn a_file_that_shrinks_reads_as_zeros_and_is_known_to_be_lost() {
    guard_mappings().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (short, whole) = (file(folder.path(), "short"), file(folder.path(), "whole"));
    let lost = Mapping::open(&short).unwrap();
    let kept = Mapping::open(&whole).unwrap();
    assert_eq!(lost[BYTES - 1], 7);
    shorten(&short, 10);
    assert_eq!(lost[BYTES - 1], 0);
    let error = lost.clone().check().unwrap_err();
    assert_eq!(error.path, short);
    assert!(
        lost.iter().all(|&byte| byte == 0),
        "one state, not a mixture"
    );
    assert!(kept.check().is_ok());
    assert!(kept.iter().all(|&byte| byte == 7));
    drop(lost);
    let again = Mapping::open(&whole).unwrap();
    assert!(again.check().is_ok(), "a slot begins anew");
}

#[test]
fn a_file_that_loses_a_part_of_its_last_page_is_lost_although_no_read_of_it_faults() {
    // The system fills that page with zeros and raises nothing: a model file whose first page was
    // cut short while it loaded seemed to have no layers, and was called damaged.
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "short");
    let mapping = Mapping::open(&path).unwrap();
    shorten(&path, BYTES as u64 - 1);
    assert_eq!(mapping[BYTES - 1], 0);
    assert_eq!(mapping.check().unwrap_err().path, path);
}

#[test]
fn many_threads_that_read_a_file_as_it_shrinks_all_come_back() {
    guard_mappings().unwrap();
    let folder = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let path = file(folder.path(), "shared");
        let mapping = Mapping::open(&path).unwrap();
        let read = |mapping: &Mapping| mapping.iter().filter(|&&byte| byte == 7).count();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| while read(&mapping) > 0 {});
            }
            shorten(&path, round);
        });
        assert!(mapping.check().is_err());
    }
}

#[test]
fn what_an_opening_file_seems_to_say_counts_for_nothing_once_it_is_lost() {
    guard_mappings().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "model.gguf");
    let mapping = Mapping::open(&path).unwrap();
    let result: Result<u8, Error> = mapping.read(|mapping| {
        shorten(&path, 1);
        Ok(mapping[BYTES - 1])
    });
    assert!(matches!(result, Err(Error::Lost(_))));
}

/// Runs `test` of this program alone, in a process that it is to bring down.
fn doomed(test: &str) -> std::process::ExitStatus {
    let name = format!("mapping::shrinking::{test}");
    let program = std::env::current_exe().unwrap();
    Command::new(program)
        .args(["--exact", &name])
        .env(DOOMED, "1")
        .output()
        .unwrap()
        .status
}

#[test]
fn a_fault_in_memory_that_is_not_a_mapping_of_ours_still_ends_the_process() {
    if std::env::var_os(DOOMED).is_none() {
        let test = "a_fault_in_memory_that_is_not_a_mapping_of_ours_still_ends_the_process";
        assert_eq!(doomed(test).signal(), Some(libc::SIGBUS));
        return;
    }
    guard_mappings().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "theirs");
    let _ours = Mapping::open(&path).unwrap();
    let theirs = fs::File::open(&path).unwrap();
    // SAFETY: nobody writes to the file; that it shrinks is what is tested.
    let theirs = unsafe { memmap2::Mmap::map(&theirs) }.unwrap();
    shorten(&path, 0);
    std::hint::black_box(theirs[BYTES - 1]);
}

#[test]
fn a_handler_that_was_there_before_gets_what_is_not_ours() {
    if std::env::var_os(DOOMED).is_none() {
        let test = "a_handler_that_was_there_before_gets_what_is_not_ours";
        assert_eq!(doomed(test).code(), Some(42));
        return;
    }
    extern "C" fn leave(_: libc::c_int) {
        // SAFETY: async-signal-safe, and does not return.
        unsafe { libc::_exit(42) }
    }
    // SAFETY: the handler takes a signal's number, and calls nothing that is not async-signal-safe.
    unsafe { libc::signal(libc::SIGBUS, leave as *const () as libc::sighandler_t) };
    guard_mappings().unwrap();
    // SAFETY: the handler above ends the process.
    unsafe { libc::raise(libc::SIGBUS) };
}
