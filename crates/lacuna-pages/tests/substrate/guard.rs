//! What becomes of reads of mapped files that cannot be read any more. Each story has a process of its own: a
//! handler is the process's, and some of them end it.
#![expect(
    unsafe_code,
    reason = "reads that fault and handlers of signals are made on purpose"
)]

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lacuna_pages::guard::{self, Guard};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::children::{in_child, succeeds_in_child};

const PAGES: usize = 4;

/// Four pages of a file, of which one stays when it is cut.
struct Mapped {
    file: File,
    start: *mut u8,
    page: usize,
}

impl Mapped {
    fn new() -> Self {
        let page = rustix::param::page_size();
        let file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut &file, &vec![7; PAGES * page]).unwrap();
        let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a mapping of its own, which stays until the process ends.
        let start = unsafe { mmap(std::ptr::null_mut(), PAGES * page, read, shared, &file, 0) };
        let start = start.unwrap().cast();
        Self { file, start, page }
    }

    /// Its first page stays.
    fn cut(&self) {
        self.file.set_len(self.page as u64).unwrap();
    }

    fn address(&self, place: usize) -> usize {
        self.start.addr() + place
    }

    fn read(&self, place: usize) -> u8 {
        assert!(place < PAGES * self.page);
        // SAFETY: within the mapping; whether it can be read is what the tests are about.
        unsafe { self.start.add(place).read_volatile() }
    }

    fn guarded(&self) -> Guard {
        // SAFETY: one mapping, read alone, until the process ends.
        unsafe { Guard::of_mapping(self.start, PAGES * self.page) }.unwrap()
    }

    fn guarded_by_page(&self) -> Guard {
        // SAFETY: as above.
        unsafe { Guard::of_pages(self.start, PAGES * self.page) }.unwrap()
    }
}

/// Installs what the library would meet in a program that has a handler already.
fn handle(handler: usize, flags: c_int) {
    // SAFETY: a structure of integers for which zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    (action.sa_sigaction, action.sa_flags) = (handler, flags);
    // SAFETY: a handler of the kind that its flags promise.
    assert_eq!(0, unsafe {
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut())
    });
}

/// Sends the process the signal, as another process would, and waits until some thread of it has been interrupted.
fn send() {
    // SAFETY: takes two numbers.
    assert_eq!(0, unsafe { libc::kill(libc::getpid(), libc::SIGBUS) });
    std::thread::sleep(Duration::from_millis(200));
}

#[track_caller]
fn ends_by_bus_error(test: &str, body: impl FnOnce()) {
    if let Some(output) = in_child(&format!("guard::{test}"), body) {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("about to"), "{text}");
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{text}");
    }
}

#[track_caller]
fn ends_with(test: &str, code: i32, body: impl FnOnce()) {
    if let Some(output) = in_child(&format!("guard::{test}"), body) {
        assert_eq!(output.status.code(), Some(code), "{output:?}");
    }
}

#[test]
fn a_mapping_is_zeros_as_a_whole_and_lost_and_the_interrupted_code_keeps_its_errno() {
    let name =
        "guard::a_mapping_is_zeros_as_a_whole_and_lost_and_the_interrupted_code_keeps_its_errno";
    succeeds_in_child(name, || {
        guard::install().unwrap();
        assert!(guard::is_installed());
        let (cut, whole) = (Mapped::new(), Mapped::new());
        let (lost, kept) = (cut.guarded(), whole.guarded());
        assert!(!lost.is_lost());
        cut.cut();
        // SAFETY: this thread's own; a mapping that fails in between leaves its own word there.
        let errno = unsafe { &mut *libc::__errno_location() };
        *errno = 77;
        let read = cut.read(2 * cut.page + 123);
        assert_eq!((*errno, read), (77, 0));
        assert!(lost.is_lost() && !kept.is_lost());
        let firsts = |mapped: &Mapped| [0, 1, 2, 3].map(|page| mapped.read(page * mapped.page));
        assert_eq!((firsts(&cut), firsts(&whole)), ([0; 4], [7; 4]));
    });
}

#[test]
fn of_pages_only_those_that_cannot_be_read_are_zeros() {
    succeeds_in_child(
        "guard::of_pages_only_those_that_cannot_be_read_are_zeros",
        || {
            guard::install().unwrap();
            let cut = Mapped::new();
            let lost = cut.guarded_by_page();
            cut.cut();
            assert_eq!(cut.read(2 * cut.page + 123), 0);
            assert!(lost.is_lost());
            // It grows again, and only what was replaced stays zeros.
            cut.file.set_len((PAGES * cut.page) as u64).unwrap();
            rustix::io::pwrite(&cut.file, &vec![9; 3 * cut.page], cut.page as u64).unwrap();
            let firsts = [0, 1, 2, 3].map(|page| cut.read(page * cut.page));
            assert_eq!(firsts, [7, 9, 0, 9]);
        },
    );
}

#[test]
fn what_is_not_guarded_ends_the_process_as_before() {
    ends_by_bus_error("what_is_not_guarded_ends_the_process_as_before", || {
        guard::install().unwrap();
        let (cut, other) = (Mapped::new(), Mapped::new());
        let _other = other.guarded();
        cut.cut();
        println!("about to fault");
        cut.read(cut.page);
    });
}

#[test]
fn what_is_not_guarded_any_more_ends_the_process_as_before() {
    let name = "what_is_not_guarded_any_more_ends_the_process_as_before";
    ends_by_bus_error(name, || {
        guard::install().unwrap();
        let cut = Mapped::new();
        drop(cut.guarded());
        cut.cut();
        println!("about to fault");
        cut.read(cut.page);
    });
}

#[test]
fn a_signal_that_is_sent_ends_the_process_as_before() {
    ends_by_bus_error("a_signal_that_is_sent_ends_the_process_as_before", || {
        // Not the standard library's handler, which lets one pass.
        handle(libc::SIG_DFL, 0);
        guard::install().unwrap();
        println!("about to be sent one");
        send();
    });
}

/// A signal that is sent has the sender's number where a fault has its address.
#[test]
fn a_signal_that_is_sent_is_nobodys_fault() {
    let name = "guard::a_signal_that_is_sent_is_nobodys_fault";
    succeeds_in_child(name, || {
        handle(libc::SIG_IGN, 0);
        guard::install().unwrap();
        let cut = Mapped::new();
        let lost = cut.guarded();
        // SAFETY: nothing is mapped there that anybody reads: processes have numbers below 2^22.
        let everything = unsafe { Guard::of_pages(std::ptr::null(), 1 << 22) };
        send();
        assert!(!everything.unwrap().is_lost());
        // It was ignored, and the handler is in place still.
        cut.cut();
        assert_eq!(cut.read(cut.page), 0);
        assert!(lost.is_lost());
    });
}

#[test]
fn a_fault_cannot_be_ignored() {
    ends_by_bus_error("a_fault_cannot_be_ignored", || {
        handle(libc::SIG_IGN, 0);
        guard::install().unwrap();
        let cut = Mapped::new();
        cut.cut();
        println!("about to fault");
        cut.read(cut.page);
    });
}

/// Where the fault is expected.
static EXPECTED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn with_information(
    signal: c_int,
    information: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: the kernel's structure, of a fault.
    let address = unsafe { (*information).si_addr() }.addr();
    let right =
        signal == libc::SIGBUS && address == EXPECTED.load(Ordering::Relaxed) && !context.is_null();
    // SAFETY: ends the process.
    unsafe { libc::_exit(if right { 42 } else { 1 }) };
}

extern "C" fn with_the_number(signal: c_int) {
    // SAFETY: ends the process.
    unsafe { libc::_exit(if signal == libc::SIGBUS { 43 } else { 1 }) };
}

#[test]
fn a_handler_that_wants_to_know_more_is_told() {
    ends_with("a_handler_that_wants_to_know_more_is_told", 42, || {
        handle(with_information as *const () as usize, libc::SA_SIGINFO);
        guard::install().unwrap();
        let cut = Mapped::new();
        cut.cut();
        EXPECTED.store(cut.address(cut.page + 5), Ordering::Relaxed);
        cut.read(cut.page + 5);
    });
}

#[test]
fn a_handler_that_wants_the_number_alone_gets_it() {
    ends_with("a_handler_that_wants_the_number_alone_gets_it", 43, || {
        handle(with_the_number as *const () as usize, 0);
        guard::install().unwrap();
        let cut = Mapped::new();
        cut.cut();
        cut.read(cut.page);
    });
}

#[test]
fn installing_twice_leaves_the_handler_that_was_there_before_both() {
    let name = "installing_twice_leaves_the_handler_that_was_there_before_both";
    ends_with(name, 43, || {
        handle(with_the_number as *const () as usize, 0);
        guard::install().unwrap();
        guard::install().unwrap();
        send();
    });
}
