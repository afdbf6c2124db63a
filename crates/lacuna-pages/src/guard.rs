//! What becomes of mapped memory whose file cannot be read any more.
//!
//! A page of a file that has become shorter, or whose disk fails, has nothing to show. The kernel
//! tells the thread that touches it by `SIGBUS`, and by default that ends the process without a
//! word. After [`install`], a handler puts zeros in its place and takes a note, and the thread goes
//! on. What it computes from there is of no use, so whoever asked for it looks at [`Guard::is_lost`]
//! before it uses the result.
//!
//! Going on with zeros is the only way that needs nothing of the code that was interrupted: a signal
//! handler can neither return an error for it nor unwind through kernels and the thread pool. All of
//! the mapping of one file is replaced at once, so that each file costs one fault for each thread at
//! most; where memory beside it is not a file's, page by page. The zeros are read-only private
//! memory, which the kernel backs with one page that all processes share.
//!
//! # Safety
//!
//! This module opens `unsafe` for signal handling and for that replacement.
//!
//! 1. *Only our mappings.* Memory is replaced only within a range that a living [`Guard`] has
//!    registered, and only after a fault within it. Whoever makes a guard promises that it lives no
//!    longer than the mapping, and that nothing else is mapped in the range while a read of it faults.
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

#![expect(
    unsafe_code,
    reason = "a signal handler replaces memory that cannot be read"
)]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use libc::{c_int, c_void, siginfo_t};

/// Ranges that can be guarded at once. The largest published models come in fewer than 200 files, and a sequence
/// that has pages of files has a range for each of its buffers: 128 for 64 layers. A slot takes 40 bytes, and
/// memory only once it is used.
const SLOTS: usize = 16 << 10;

static TABLE: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];
/// Held by whoever changes the table; the handler never takes it.
static CHANGES: Mutex<()> = Mutex::new(());
/// What was in place before our handler. Set before the handler is.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
/// Whether our handler is in place.
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// One mapping, as the handler sees it.
#[derive(Debug)]
struct Slot {
    /// Odd while the other fields are being changed.
    version: AtomicUsize,
    start: AtomicUsize,
    /// Zero for a free slot.
    bytes: AtomicUsize,
    /// What is replaced of it at once; zero for all of it.
    piece: AtomicUsize,
    lost: AtomicBool,
}

/// A registered range; dropped before its memory is unmapped.
#[derive(Debug)]
pub struct Guard(&'static Slot);

impl Guard {
    /// Watches over one mapping of a file, all of which is zeros once a page of it cannot be read; `None` when too
    /// many ranges are watched over. Until the handler is installed this does nothing.
    ///
    /// # Safety
    /// The `bytes` bytes at `start` are one mapping, which is read and not written, and stays until the guard is
    /// dropped.
    pub unsafe fn of_mapping(start: *const u8, bytes: usize) -> Option<Self> {
        Self::new(start.addr(), bytes, 0)
    }

    /// Watches over memory that pages of files are mapped to, each of which is zeros once it cannot be read. As
    /// [`Guard::of_mapping`] otherwise.
    ///
    /// # Safety
    /// The `bytes` bytes at `start` stay reserved until the guard is dropped, and while one of them is read, nobody
    /// maps anything where it is. Whatever can fault there by `SIGBUS` is read and not written.
    pub unsafe fn of_pages(start: *const u8, bytes: usize) -> Option<Self> {
        Self::new(start.addr(), bytes, rustix::param::page_size())
    }

    fn new(start: usize, bytes: usize, piece: usize) -> Option<Self> {
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        let free = |slot: &&Slot| slot.bytes.load(Ordering::Relaxed) == 0;
        let slot = TABLE.iter().find(free)?;
        slot.set(start, bytes, piece);
        Some(Self(slot))
    }

    /// Whether a page could not be read, so that it is zeros by now.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.set(0, 0, 0);
    }
}

impl Slot {
    const fn new() -> Self {
        Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            piece: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }

    /// Changes the slot; `CHANGES` is held.
    fn set(&self, start: usize, bytes: usize, piece: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.piece.store(piece, Ordering::Relaxed);
        self.lost.store(false, Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }

    /// Start, length and piece, unless they are being changed.
    fn get(&self) -> Option<[usize; 3]> {
        let version = self.version.load(Ordering::Acquire);
        let range = [&self.start, &self.bytes, &self.piece];
        let range = range.map(|field| field.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let unchanged = self.version.load(Ordering::Relaxed) == version;
        (unchanged && version.is_multiple_of(2)).then_some(range)
    }

    /// Replaces what cannot be read by zeros if `address` is in the range. Returns whether it is readable now.
    fn replace(&self, address: usize) -> bool {
        let Some([start, bytes, piece]) = self.get() else {
            return false;
        };
        let within = address.wrapping_sub(start);
        if within >= bytes {
            return false;
        }
        // The note comes first: a thread that reads zeros finds it set.
        let noted = self.lost.swap(true, Ordering::AcqRel);
        match piece {
            // Whoever comes second may leave the work to the first, and faults again until it is done.
            0 if noted => true,
            0 => put_zeros(start, bytes),
            // Two threads may do it for one page, to the same effect.
            piece => put_zeros(address - within % piece, piece),
        }
    }
}

/// Replaces the memory of a registered range, or of a page of it.
fn put_zeros(start: usize, bytes: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let start = std::ptr::without_provenance_mut(start);
    // SAFETY: (1) it is within a registered range, found by a fault in it, and (2) was read whole; (3) `mmap` is a
    // system call; (4) it stays readable.
    let zeros = unsafe { libc::mmap(start, bytes, libc::PROT_READ, flags, -1, 0) };
    zeros != libc::MAP_FAILED
}

/// Installs the handler of `SIGBUS`, once for the process. What has nothing to do with a [`Guard`] goes on to the
/// handler that was there before. A library does not do this unasked: programs do when they start.
///
/// # Errors
/// When the system refuses the handler.
pub fn install() -> io::Result<()> {
    let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    if is_installed() {
        return Ok(());
    }
    let previous = action(None)?;
    PREVIOUS.get_or_init(|| previous);
    let mut ours = default_action();
    ours.sa_sigaction = on_bus_error as *const () as usize;
    // On the alternate stack, where a thread has one: the fault may be at the end of its own.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    action(Some(&ours))?;
    INSTALLED.store(true, Ordering::Release);
    Ok(())
}

/// Whether the handler is in place.
#[must_use]
pub fn is_installed() -> bool {
    INSTALLED.load(Ordering::Acquire)
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
