//! The demo model.

use lacuna_files::{Mapping, ModelFiles};

/// The demo model: 2 million parameters trained on the documentation of Rust, built into the
/// program. Its pages are file-backed like those of any other model file.
///
/// # Panics
/// Never: the file is part of the program and is parsed by its tests.
#[must_use]
pub fn demo() -> ModelFiles {
    static FILE: &[u8] = include_bytes!("../demo.gguf");
    ModelFiles::from_gguf(Mapping::from_static(FILE))
        .expect("the model built into the program is whole")
}
