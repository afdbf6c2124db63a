//! What belongs to one process: after a fork the child has copies whose threads are not there.

use pyo3::prelude::*;

use crate::ending::detach;
use crate::problem::Problem;

/// A value of the process that made it. In a child that was forked it cannot be used, and is not dropped: its end would
/// wait for threads that are not there.
pub(crate) struct OfProcess<T> {
    process: u32,
    /// None only while it is dropped.
    value: Option<T>,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            process: std::process::id(),
            value: Some(value),
        }
    }

    /// The value, in the process that made it.
    pub(crate) fn get(&self) -> Result<&T, Problem> {
        let mine = self.process == std::process::id();
        self.value.as_ref().filter(|_| mine).ok_or_else(|| {
            Problem::new(
                "forked",
                "this object was made before the process was forked, and its threads are not in the child; \
                 make another there, or start children with `spawn`",
            )
        })
    }
}

impl<T: Send> OfProcess<T> {
    /// Drops the value while others have the interpreter, where that may take as long as a step.
    pub(crate) fn end(&mut self) {
        if let Some(value) = self.take() {
            // Without an interpreter it is dropped with the closure.
            Python::try_attach(|py| detach(py, || drop(value)));
        }
    }
}

impl<T> OfProcess<T> {
    /// What is to be dropped.
    fn take(&mut self) -> Option<T> {
        let value = self.value.take();
        if self.process == std::process::id() {
            return value;
        }
        std::mem::forget(value);
        None
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}
