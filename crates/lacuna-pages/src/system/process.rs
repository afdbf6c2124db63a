//! What the kernel has behind this process.

use std::fs;

use super::kibibytes;
use crate::units::ByteLength;

/// Memory of this process that is there, at one moment, by what stands behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Memory that no file stands behind: heap, stacks, and the pages of a dense device.
    pub anonymous: ByteLength,
    /// Mappings of shared memory, such as pages of the host device. A page that is mapped twice
    /// counts twice, one that is not mapped at the moment not at all; [`crate::Ledger::committed`]
    /// counts each once.
    pub shared_memory: ByteLength,
    /// Pages of files, which the system may take back: weights and the program.
    pub file: ByteLength,
}

impl ProcessMemory {
    /// As of now; `None` where the system does not tell.
    #[must_use]
    pub fn read() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/self/status").ok()?)
    }

    pub(super) fn parse(status: &str) -> Option<Self> {
        let field = |name| kibibytes(status, name).map(ByteLength::new);
        Some(Self {
            anonymous: field("RssAnon:")?,
            shared_memory: field("RssShmem:")?,
            file: field("RssFile:")?,
        })
    }
}
