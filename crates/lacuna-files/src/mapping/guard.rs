//! What becomes of a mapping whose file cannot be read any more.
//!
//! A page of a file that has become shorter, or whose disk fails, has nothing to show. The kernel
//! tells the thread that touches it by `SIGBUS`, and by default that ends the process without a
//! word. After [`install`], a handler puts zeros in the place of the whole mapping and takes a note,
//! and the thread goes on. What it computes from there is of no use, so whoever asked for it looks at
//! [`Guard::is_lost`] before it uses the result.
//!
//! Going on with zeros is the only way that needs nothing of the code that was interrupted: a signal
//! handler can neither return an error for it nor unwind through kernels and the thread pool. All of
//! the mapping is replaced at once, so that each file costs one fault for each thread at most. The
//! zeros are read-only private memory, which the kernel backs with one page that all processes share.
//!
//! # Safety
//!
//! This module opens `unsafe` for signal handling and for that replacement.
//!
//! 1. *Only our mappings.* Memory is replaced only within a range that a living [`Guard`] has
//!    registered, and only after a fault within it. A guard lives no longer than its mapping, is made
//!    after it, and is registered for exactly its pages.
//! 2. *Torn reads.* The table is read by a handler while other threads change it. Each slot is a
//!    sequence lock: a reader that meets a change under way passes the slot over. It cannot be the one
//!    it looks for, because the fault is a read of a mapping that is alive from before the read
//!    until after it.
//! 3. *Async-signal-safety.* The handler takes no lock, allocates nothing, cannot panic, and keeps
//!    `errno`. Besides atomics it calls `mmap`, which is nothing but a system call on the systems
//!    that this is compiled for, and `sigaction` and `raise`, which POSIX allows.
//! 4. *Readers.* The range stays mapped and readable, so slices of it stay valid. Their bytes
//!    change, as they may whenever another process writes to the file: see the module above.
//! 5. *Other handlers.* What is not ours goes on to the handler that was there before, with the
//!    arguments that its flags promise, or ends the process as it would have.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use libc::{c_int, c_void, siginfo_t};

/// Mappings that can be guarded at once. The largest published models come in fewer than 200 files;
/// a slot takes 32 bytes.
const SLOTS: usize = 1024;

static TABLE: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];
/// Held by whoever changes the table; the handler never takes it.
static CHANGES: Mutex<()> = Mutex::new(());
/// What was in place before our handler. Set before the handler is.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// One mapping, as the handler sees it.
#[derive(Debug)]
struct Slot {
    /// Odd while the other fields are being changed.
    version: AtomicUsize,
    start: AtomicUsize,
    /// Zero for a free slot.
    bytes: AtomicUsize,
    lost: AtomicBool,
}

/// A registered mapping; dropped before its memory is unmapped.
#[derive(Debug)]
pub(super) struct Guard(&'static Slot);

impl Guard {
    /// Registers the mapping of a file at `bytes`; `None` when the table is full. Until the handler
    /// is installed this does nothing.
    pub(super) fn new(bytes: &[u8]) -> Option<Self> {
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        let free = |slot: &&Slot| slot.bytes.load(Ordering::Relaxed) == 0;
        let slot = TABLE.iter().find(free)?;
        slot.set(bytes.as_ptr().addr(), bytes.len());
        Some(Self(slot))
    }

    /// Whether a page of the mapping could not be read, so that all of it is zeros by now.
    pub(super) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.set(0, 0);
    }
}

impl Slot {
    const fn new() -> Self {
        Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }

    /// Changes the slot; `CHANGES` is held.
    fn set(&self, start: usize, bytes: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.lost.store(false, Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }

    /// Start and length, unless they are being changed.
    fn get(&self) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::Acquire);
        let range = (
            self.start.load(Ordering::Relaxed),
            self.bytes.load(Ordering::Relaxed),
        );
        fence(Ordering::Acquire);
        let unchanged = self.version.load(Ordering::Relaxed) == version;
        (unchanged && version.is_multiple_of(2)).then_some(range)
    }

    /// Replaces the mapping by zeros if `address` is in it. Returns whether it is readable now.
    fn replace(&self, address: usize) -> bool {
        let Some((start, bytes)) = self.get() else {
            return false;
        };
        if address.wrapping_sub(start) >= bytes {
            return false;
        }
        // The note comes first: a thread that reads zeros finds it set. Whoever comes second may
        // leave the work to the first, and faults again until it is done.
        if self.lost.swap(true, Ordering::AcqRel) {
            return true;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let start = std::ptr::without_provenance_mut(start);
        // SAFETY: (1) the range is a registered mapping's, found by a fault in it, and (2) was read
        // whole; (3) `mmap` is a system call; (4) it stays readable.
        let zeros = unsafe { libc::mmap(start, bytes, libc::PROT_READ, flags, -1, 0) };
        zeros != libc::MAP_FAILED
    }
}

/// Installs the handler, once for the process.
pub(super) fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    let previous = action(None)?;
    PREVIOUS.get_or_init(|| previous);
    let mut ours = default_action();
    ours.sa_sigaction = on_bus_error as *const () as usize;
    // On the alternate stack, where a thread has one: the fault may be at the end of its own.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    action(Some(&ours))?;
    *installed = true;
    Ok(())
}

/// Sets what happens on `SIGBUS`, if anything is given, and returns what happened before.
fn action(new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let mut old = default_action();
    let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: both point to whole structures, or to nothing; (3) and (5) hold for what is set.
    match unsafe { libc::sigaction(libc::SIGBUS, new, &raw mut old) } {
        0 => Ok(old),
        _ => Err(io::Error::last_os_error()),
    }
}

fn default_action() -> libc::sigaction {
    // SAFETY: a structure of integers, and of a pointer that may be null, for which zeros are valid:
    // the default action, no flags, no signals blocked.
    unsafe { std::mem::zeroed() }
}

extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid structure to a handler installed with `SA_SIGINFO`, and
    // `si_addr` is set for every `SIGBUS` that is a fault.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // A positive code is a fault; others are signals that a process sent. Misalignment is none of
    // ours: zeros would not help, and the fault would come again for ever.
    let is_read = code > 0 && code != libc::BUS_ADRALN;
    let error = errno();
    let readable = is_read && TABLE.iter().any(|slot| slot.replace(address));
    if !readable {
        pass_on(signal, info, context, code > 0);
    }
    set_errno(error);
}

/// Lets what was there before see to the signal.
fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void, is_fault: bool) {
    let previous = PREVIOUS.get();
    let handler = previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    if handler == libc::SIG_IGN && !is_fault {
        return;
    }
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // A fault comes again on return, and ends the process then. A signal that was sent does not.
        action(Some(&default_action())).ok();
        if !is_fault {
            // SAFETY: (3), (5); the signal is blocked until the handler returns.
            unsafe { libc::raise(signal) };
        }
        return;
    }
    let wants_info = previous.is_some_and(|previous| previous.sa_flags & libc::SA_SIGINFO != 0);
    if wants_info {
        // SAFETY: (5) installed with `SA_SIGINFO`, so it takes these arguments.
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: (5) installed without, so it takes the signal alone.
        let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}

/// Where this thread's `errno` is.
fn errno_place() -> *mut c_int {
    // SAFETY: these take nothing and return a pointer that is valid for the thread's life.
    #[cfg(target_os = "linux")]
    return unsafe { libc::__errno_location() };
    // SAFETY: as above.
    #[cfg(target_os = "android")]
    return unsafe { libc::__errno() };
    // SAFETY: as above.
    #[cfg(target_os = "macos")]
    return unsafe { libc::__error() };
}

fn errno() -> c_int {
    // SAFETY: valid for this thread's life, and no other thread's.
    unsafe { *errno_place() }
}

fn set_errno(error: c_int) {
    // SAFETY: as for `errno`.
    unsafe { *errno_place() = error };
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::os::unix::process::ExitStatusExt;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::super::{Error, Mapping, guard_mappings};
    use super::*;

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
        let name = format!("mapping::guard::tests::{test}");
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
        extern "C" fn leave(_: c_int) {
            // SAFETY: async-signal-safe, and does not return.
            unsafe { libc::_exit(42) }
        }
        let mut theirs = default_action();
        theirs.sa_sigaction = leave as *const () as usize;
        action(Some(&theirs)).unwrap();
        guard_mappings().unwrap();
        // SAFETY: the handler above ends the process.
        unsafe { libc::raise(libc::SIGBUS) };
    }
}
