//! The interpreter's end, while threads compute.
//!
//! Up to Python 3.13, a thread that comes back to an interpreter that is ending is ended on the spot, by unwinding its
//! stack, which aborts the process where that has frames of Rust on it. So none comes back: once the last of the
//! program's exit functions runs, threads that have been computing stay where they are, as they do from Python 3.14 on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyCFunction;

/// Whether the interpreter is about to end.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Threads on their way back to the interpreter, and those of ours that run its code.
static COMING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this thread ends the interpreter: that one goes on.
    static ENDS_IT: AtomicBool = const { AtomicBool::new(false) };
}

/// Looks at threads that are still coming this often, and for so many times: they only have to take the interpreter,
/// unless a callback of the program waits for something.
const LOOK: Duration = Duration::from_millis(1);
const MOST_LOOKS: usize = 1000;

/// A thread of which the interpreter's end knows.
pub(crate) struct Coming(());

impl Coming {
    /// Does not return when the interpreter is ending, unless to the thread that ends it.
    pub(crate) fn back() -> Self {
        COMING.fetch_add(1, Ordering::SeqCst);
        let coming = Self(());
        let ends_it = ENDS_IT.with(|it| it.load(Ordering::Relaxed));
        if ENDING.load(Ordering::SeqCst) && !ends_it {
            drop(coming);
            loop {
                thread::park();
            }
        }
        coming
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        COMING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What `work` makes, done while others have the interpreter.
pub(crate) fn detach<T: Send>(py: Python<'_>, work: impl Send + FnOnce() -> T) -> T {
    let (made, coming) = py.detach(|| {
        let made = work();
        (made, Coming::back())
    });
    drop(coming);
    made
}

/// Has [`end`] called when the program ends: after all exit functions that are registered later.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let end = PyCFunction::new_closure(py, None, None, |arguments, _| end(arguments.py()))?;
    py.import("atexit")?.call_method1("register", (end,))?;
    Ok(())
}

/// Holds threads off, and waits for those that are on their way.
fn end(py: Python<'_>) {
    ENDS_IT.with(|it| it.store(true, Ordering::Relaxed));
    ENDING.store(true, Ordering::SeqCst);
    // They want the interpreter, which this thread has.
    py.detach(|| {
        for _ in 0..MOST_LOOKS {
            if COMING.load(Ordering::SeqCst) == 0 {
                break;
            }
            thread::sleep(LOOK);
        }
    });
}
