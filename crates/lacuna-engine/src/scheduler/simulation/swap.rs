//! A disk for swapped pages that does what disks do.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lacuna_kv::KvCache;
use lacuna_kv::swap::{Swap, SwapDevice, SwapSizes};
use lacuna_pages::ByteLength;

/// What happens to the next write or read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::scheduler) enum Trouble {
    Refuses,
    /// A write ends halfway, and says nothing; a read comes to an end too early.
    Halves,
    /// One bit of what is written or read is another one.
    Flips,
}

/// Clones are the same disk.
#[derive(Debug, Clone, Default)]
pub(in crate::scheduler) struct Disk(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    pieces: HashMap<u64, Vec<u8>>,
    trouble: Option<Trouble>,
}

impl Disk {
    /// Makes the next write or read one that is troubled, or none.
    pub(in crate::scheduler) fn trouble(&self, trouble: Option<Trouble>) {
        self.held().trouble = trouble;
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().expect("no panic")
    }
}

impl SwapDevice for Disk {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut held = self.held();
        let trouble = held.trouble.take();
        let kept = held.pieces.entry(offset).or_default();
        kept.resize(kept.len().max(bytes.len()), 0);
        match trouble {
            None => kept[..bytes.len()].copy_from_slice(bytes),
            Some(Trouble::Refuses) => return Err(io::ErrorKind::StorageFull.into()),
            Some(Trouble::Halves) => {
                let half = bytes.len() / 2;
                kept[..half].copy_from_slice(&bytes[..half]);
                // What was there before might be the same.
                kept[half] = !bytes[half];
            }
            Some(Trouble::Flips) => {
                kept[..bytes.len()].copy_from_slice(bytes);
                kept[bytes.len() / 3] ^= 4;
            }
        }
        Ok(())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut held = self.held();
        let trouble = held.trouble.take();
        let kept = held.pieces.get(&offset).expect("it was written");
        bytes.copy_from_slice(&kept[..bytes.len()]);
        match trouble {
            None => {}
            Some(Trouble::Refuses) => return Err(io::Error::other("the disk is gone")),
            Some(Trouble::Halves) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(Trouble::Flips) => bytes[bytes.len() / 3] ^= 4,
        }
        Ok(())
    }

    fn discard_from(&self, offset: u64) {
        self.held().pieces.retain(|&at, _| at < offset);
    }
}

/// A swap file of so many pages of `cache` on `disk`, of small pieces, that is always worth its time.
pub(in crate::scheduler) fn over(disk: Disk, pages: u32, cache: &KvCache) -> Swap {
    let page = cache.page_bytes() as u64;
    let sizes = SwapSizes {
        limit: ByteLength::new(u64::from(pages) * page),
        piece: ByteLength::new(2 * page),
        block: ByteLength::new(8 * page),
    };
    of(disk, sizes, cache)
}

/// One of such sizes.
pub(in crate::scheduler) fn of(disk: Disk, sizes: SwapSizes, cache: &KvCache) -> Swap {
    let swap = Swap::over(Box::new(disk), sizes, cache).expect("a sparse cache");
    swap.assume_rates(1e12, Duration::from_secs(1));
    swap
}
