//! Systems on which a file that cannot be read any more is not noticed.

use std::io;

/// Watches over nothing.
#[derive(Debug)]
pub(super) struct Guard;

impl Guard {
    pub(super) fn new(_bytes: &[u8]) -> Option<Self> {
        Some(Self)
    }

    pub(super) fn is_lost(&self) -> bool {
        false
    }
}

pub(super) fn install() -> io::Result<()> {
    Ok(())
}
