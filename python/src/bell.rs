//! How the engine's threads tell Python that something is there, without waiting for it.
//!
//! A bell is rung by whoever has something; who waits for it either sleeps until then, detached from the interpreter,
//! or leaves a callable. That is called by a thread of its own, since calling it means to wait for the interpreter,
//! and a thread that steps the engine must not.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::Duration;

use pyo3::prelude::*;

use crate::ending::Coming;
use crate::interrupts::LOOK_FOR_SIGNALS;

/// Callables that are to be called, and the thread that does. It ends when all senders are gone.
#[derive(Clone)]
pub(crate) struct Callbacks(Sender<Py<PyAny>>);

impl Callbacks {
    pub(crate) fn start() -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        std::thread::Builder::new()
            .name("lacuna-python".to_owned())
            .spawn(move || call_all(&receiver))?;
        Ok(Self(sender))
    }
}

/// Calls what comes, as much of it at once as is there: taking the interpreter is what costs.
fn call_all(callbacks: &Receiver<Py<PyAny>>) {
    while let Ok(first) = callbacks.recv() {
        let _coming = Coming::back();
        // None when the interpreter is about to end, and nobody waits any more.
        let called = Python::try_attach(|py| {
            for callback in std::iter::once(first).chain(callbacks.try_iter()) {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, Some(callback.bind(py)));
                }
            }
        });
        if called.is_none() {
            return;
        }
    }
}

#[derive(Default)]
struct State {
    rung: bool,
    callback: Option<Py<PyAny>>,
}

/// Rung when there may be something to read.
pub(crate) struct Bell {
    state: Mutex<State>,
    rings: Condvar,
    callbacks: Callbacks,
}

impl Bell {
    pub(crate) fn new(callbacks: &Callbacks) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            rings: Condvar::new(),
            callbacks: callbacks.clone(),
        })
    }

    /// What rings it.
    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        Arc::clone(self).into()
    }

    /// Calls `callback` when it rings next, instead of one that was left before.
    pub(crate) fn call_back(&self, callback: Option<Py<PyAny>>) {
        let before = std::mem::replace(&mut self.lock().callback, callback);
        // Dropped when the lock is free: that may run any code.
        drop(before);
    }

    /// Sleeps until it has rung since the last time, or it is time to look for signals, or `most` has passed.
    pub(crate) fn wait(&self, most: Option<Duration>) {
        let silent = |state: &mut State| !state.rung;
        let most = most.map_or(LOOK_FOR_SIGNALS, |most| most.min(LOOK_FOR_SIGNALS));
        let waited = self.rings.wait_timeout_while(self.lock(), most, silent);
        waited.unwrap_or_else(PoisonError::into_inner).0.rung = false;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        let mut state = self.lock();
        state.rung = true;
        let callback = state.callback.take();
        drop(state);
        self.rings.notify_all();
        if let Some(callback) = callback {
            // Without its thread the interpreter is ending.
            self.callbacks.0.send(callback).ok();
        }
    }
}
