//! What ends a process or needs one of its own: stray accesses.
#![expect(
    unsafe_code,
    reason = "stray accesses are made through raw pointers on purpose"
)]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use lacuna_pages::VirtualPage;

use crate::support::{PAGE, filled, host, pages, range, small};

const CHILD: &str = "LACUNA_PAGES_TEST_CHILD";

/// Runs `body` in a process of its own: the test starts itself again, alone. Returns how the child
/// ended, or nothing in the child.
pub(crate) fn in_child(test: &str, body: impl FnOnce()) -> Option<Output> {
    if std::env::var_os(CHILD).is_some() {
        body();
        return None;
    }
    let program = std::env::current_exe().unwrap();
    let arguments = [
        test,
        "--exact",
        "--nocapture",
        "--test-threads=1",
        "--include-ignored",
    ];
    Some(
        Command::new(program)
            .args(arguments)
            .env(CHILD, "1")
            .output()
            .unwrap(),
    )
}

/// As [`in_child`], for a body that must succeed.
#[track_caller]
pub(crate) fn succeeds_in_child(test: &str, body: impl FnOnce()) {
    if let Some(output) = in_child(test, body) {
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}{errors}"
        );
    }
}

/// The signal of a stray access, `SIGSEGV`.
#[cfg(target_os = "linux")]
const STRAY: i32 = 11;
/// On macOS `SIGBUS`: the other is for addresses at which nothing is mapped, not even a hole.
#[cfg(target_os = "macos")]
const STRAY: i32 = 10;

#[track_caller]
fn faults_in_child(test: &str, body: impl FnOnce()) {
    if let Some(output) = in_child(test, body) {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("about to fault"), "{text}");
        assert_eq!(output.status.signal(), Some(STRAY), "{text}");
    }
}

#[test]
fn a_stray_write_to_a_sealed_page_faults() {
    faults_in_child("children::a_stray_write_to_a_sealed_page_faults", || {
        let pool = host(small());
        let mut buffer = filled(&pool, 3, 0);
        buffer.seal(range(1, 2)).unwrap();
        let pointer = buffer.bytes(PAGE..PAGE + 1).unwrap().as_ptr().cast_mut();
        println!("about to fault");
        // SAFETY: none: the write is the fault under test, and the process is expected to end.
        unsafe { pointer.write_volatile(1) };
    });
}

#[test]
fn a_stray_write_to_the_second_mapping_of_a_page_faults() {
    faults_in_child(
        "children::a_stray_write_to_the_second_mapping_of_a_page_faults",
        || {
            let pool = host(small());
            let mut buffer = filled(&pool, 3, 0);
            buffer.seal(range(0, 3)).unwrap();
            let mut other = pool.reserve(pages(3), "").unwrap();
            other
                .share_from(&buffer, range(0, 3), VirtualPage::new(0))
                .unwrap();
            let pointer = other.bytes(PAGE..PAGE + 1).unwrap().as_ptr().cast_mut();
            println!("about to fault");
            // SAFETY: none: the write is the fault under test, and the process is expected to end.
            unsafe { pointer.write_volatile(1) };
        },
    );
}

#[test]
fn a_stray_read_of_a_hole_faults() {
    faults_in_child("children::a_stray_read_of_a_hole_faults", || {
        let pool = host(small());
        let mut buffer = filled(&pool, 3, 0);
        let pointer = buffer.bytes(PAGE..PAGE + 1).unwrap().as_ptr();
        buffer.unmap(range(1, 2)).unwrap();
        println!("about to fault");
        // SAFETY: none: the read is the fault under test, and the process is expected to end.
        let byte = unsafe { pointer.read_volatile() };
        println!("read {byte}");
    });
}
