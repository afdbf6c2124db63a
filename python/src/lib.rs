//! The native half of the Python package: objects over the library, and nothing that Python could do itself.
//!
//! What all of it keeps to:
//!
//! * Whatever waits or computes does so detached from the interpreter, and looks for signals meanwhile ([`interrupts`]).
//! * No thread comes back to an interpreter that is ending ([`ending`]).
//! * The engine's threads never wait for the interpreter: what they have to tell it, a thread of its own passes on
//!   ([`bell`]).
//! * Objects are of the process that made them. After a fork the child's copies refuse to work, and are never dropped
//!   ([`process`]): their threads are not there.

mod bell;
mod embedder;
mod ending;
mod engine;
mod interrupts;
mod output;
mod problem;
mod process;
mod reader;
mod session;
mod settings;

use pyo3::prelude::*;

/// The module `lacuna._native`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::embedder::{Embedder, Reranker};
    #[pymodule_export]
    use crate::engine::{Engine, Listener};
    #[pymodule_export]
    use crate::reader::{Reply, Stream};
    #[pymodule_export]
    use crate::session::{Continuation, Session};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::ending::register(module)?;
        // Its functions are looked up now: an interrupt in the middle of that, at the first array, would be a panic.
        module.py().import("numpy")?;
        numpy::PyArray1::<f32>::from_vec(module.py(), Vec::new());
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
