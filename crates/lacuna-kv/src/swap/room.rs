//! How much a swap file and what is put aside beside it may hold together.

use std::sync::Mutex;

use super::locked;

/// Bytes of disk that several take from: preempted requests for their pages, and conversations that nobody goes on
/// with for the moment.
#[derive(Debug)]
pub struct SwapRoom {
    limit: u64,
    taken: Mutex<u64>,
}

impl SwapRoom {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            limit,
            taken: Mutex::new(0),
        }
    }

    /// Bytes there are in all.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes `bytes`, if there are as many.
    pub(crate) fn try_take(&self, bytes: u64) -> bool {
        let mut taken = locked(&self.taken);
        let fits = self.limit - *taken >= bytes;
        if fits {
            *taken += bytes;
        }
        fits
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        let mut taken = locked(&self.taken);
        debug_assert!(bytes <= *taken, "given back once");
        *taken = taken.saturating_sub(bytes);
    }
}
