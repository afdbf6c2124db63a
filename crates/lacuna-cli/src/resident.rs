//! What the kernel says this process keeps in memory, to set beside our own accounts.

use std::fs;

use serde::{Deserialize, Serialize};

/// Proportional set size: pages mapped by several processes, or several times, count once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resident {
    /// Everything.
    pub pss_bytes: u64,
    /// Memory no file stands behind: activations, vocabulary, heap, stacks.
    pub anonymous_bytes: u64,
    /// Clean pages of files: weights and the program.
    pub file_bytes: u64,
    /// Shared memory: KV pages of the sparse policy.
    pub shared_memory_bytes: u64,
}

impl Resident {
    /// Reads the kernel's account; `None` where there is no such thing.
    pub fn now() -> Option<Self> {
        parse(&fs::read_to_string("/proc/self/smaps_rollup").ok()?)
    }
}

/// Bytes that the kernel has behind this process's KV pages, by their files' blocks; `None` where it
/// does not tell.
#[cfg(unix)]
pub fn kv_blocks() -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    let is_heap = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("lacuna-heap"))
    };
    let descriptors = fs::read_dir("/proc/self/fd").ok()?.flatten();
    let heaps = descriptors.map(|entry| entry.path()).filter(is_heap);
    // One that is closed meanwhile holds nothing.
    let blocks = heaps.filter_map(|path| Some(fs::metadata(path).ok()?.blocks()));
    Some(blocks.sum::<u64>() * 512)
}

#[cfg(not(unix))]
pub fn kv_blocks() -> Option<u64> {
    None
}

fn parse(rollup: &str) -> Option<Resident> {
    let field = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    };
    Some(Resident {
        pss_bytes: field("Pss:")?,
        anonymous_bytes: field("Pss_Anon:")?,
        file_bytes: field("Pss_File:")?,
        shared_memory_bytes: field("Pss_Shmem:")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rollup_is_read_by_name() {
        let text = "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss:      99 kB\nPss:      10 kB\n\
                    Pss_Dirty: 1 kB\nPss_Anon:  4 kB\nPss_File:  5 kB\nPss_Shmem: 1 kB\n";
        let expected = Resident {
            pss_bytes: 10 << 10,
            anonymous_bytes: 4 << 10,
            file_bytes: 5 << 10,
            shared_memory_bytes: 1 << 10,
        };
        assert_eq!(parse(text), Some(expected));
        assert_eq!(parse("Pss: lots"), None);
    }
}
