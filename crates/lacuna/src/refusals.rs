#![expect(
    unsafe_code,
    reason = "signal dispositions and the global allocator are unsafe interfaces"
)]

//! What the system refuses ends in a message and an exit code, where it would end in a signal.
//!
//! * A model file that shrinks while it is used: see [`lacuna::files::guard_mappings`].
//! * A file that grows beyond `ulimit -f`, which the memory of KV pages is too: without `SIGXFSZ`,
//!   the call that would make it grow fails.
//! * Memory beyond `ulimit -v`. Sizes that a model or a request decides are asked for so that a
//!   refusal is an error value. What is left are the many small allocations of the language and of
//!   libraries, which cannot go on without: the program still ends there, but not by `SIGABRT`.
//!
//! # Safety
//!
//! 1. *Allocator.* Every call goes to the system's allocator with the arguments it came with, and its
//!    answer comes back unchanged; besides, a flag of the thread is set, which allocates nothing.
//! 2. *Handler.* It reads a flag of its thread that needs no set-up and has no destructor, and calls
//!    `write` and `_exit`, which are async-signal-safe. Otherwise it returns, and `abort` goes on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use libc::c_int;

#[global_allocator]
static ALLOCATOR: Noting = Noting;

thread_local! {
    /// Whether an allocation of this thread was refused. It stays so: between a refusal and the abort
    /// a backtrace may be printed, which allocates. One that was refused long before, and answered
    /// by an error, is the likeliest cause of what follows too.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// The system's allocator, and a note of what it refuses.
struct Noting;

impl Noting {
    fn note(pointer: *mut u8) -> *mut u8 {
        if pointer.is_null() {
            REFUSED.set(true);
        }
        pointer
    }
}

// SAFETY: (1) as the system's allocator.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: (1)
        Self::note(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: (1)
        Self::note(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: (1)
        Self::note(unsafe { System.realloc(pointer, layout, size) })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: (1)
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Sets all of it up, once, when the program starts.
pub(crate) fn prepare() {
    // Nothing here fails on a system that works; if it did, only what it is for would be missing.
    lacuna::files::guard_mappings().ok();
    // SAFETY: (2), and ignoring a signal runs no code.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        libc::signal(libc::SIGABRT, on_abort as *const () as libc::sighandler_t);
    }
}

extern "C" fn on_abort(_: c_int) {
    const MESSAGE: &[u8] = b"error: the system refuses more memory; raise its limit (ulimit -v), or use a smaller model, context or batch\n";
    if REFUSED.get() {
        // SAFETY: (2), the bytes are a constant.
        unsafe {
            libc::write(2, MESSAGE.as_ptr().cast(), MESSAGE.len());
            libc::_exit(1)
        }
    }
}
