//! Signals, such as that of Ctrl-C, while a thread is detached from the interpreter: Python calls what the program has for
//! them, which raises, only where somebody looks.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::ending::{Coming, detach};
use crate::problem::Problem;

/// How long a thread works or sleeps before it looks for signals.
pub(crate) const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(100);

/// Looks for signals between the parts of some work, and not more often than is of use.
pub(crate) struct Lookout(Instant);

impl Lookout {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }

    /// Looks, if it is time to; from a thread that is detached.
    ///
    /// # Errors
    /// What a signal raised: the work is to end.
    pub(crate) fn look(&mut self) -> PyResult<()> {
        if self.0.elapsed() < LOOK_FOR_SIGNALS {
            return Ok(());
        }
        let coming = Coming::back();
        let looked = Python::attach(|py| py.check_signals());
        drop(coming);
        self.0 = Instant::now();
        looked
    }
}

/// What `work` makes, which cannot be interrupted, on a thread of its own. An interrupt ends the waiting: what is made
/// after that is dropped.
pub(crate) fn beside<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> PyResult<T> {
    let (done, mut made) = sync_channel(1);
    let thread = thread::Builder::new().name("lacuna-python".to_owned());
    let started = thread.spawn(move || {
        // Nobody takes it after an interrupt.
        done.send(work()).ok();
    });
    started.map_err(|error| Problem::new("cannot_start", error))?;
    loop {
        // Lent whole: two threads may not wait at one receiver.
        let receiver = &mut made;
        match detach(py, move || receiver.recv_timeout(LOOK_FOR_SIGNALS)) {
            Ok(made) => return Ok(made?),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                let message =
                    "a thread ended before its work was done; this is a mistake in the package";
                return Err(Problem::new("internal_error", message).into());
            }
        }
    }
}
