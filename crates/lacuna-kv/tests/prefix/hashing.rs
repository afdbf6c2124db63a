//! Hashes as bad as a test wants them.

use std::hash::{BuildHasher, Hasher};

/// Makes hashes of the lowest `bits` bits; none at all makes everything collide.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Narrow {
    pub(crate) bits: u32,
}

/// FNV-1a, cut off.
#[derive(Debug)]
pub(crate) struct NarrowHasher {
    state: u64,
    mask: u64,
}

impl BuildHasher for Narrow {
    type Hasher = NarrowHasher;

    fn build_hasher(&self) -> NarrowHasher {
        NarrowHasher {
            state: 0xcbf2_9ce4_8422_2325,
            mask: (1 << self.bits) - 1,
        }
    }
}

impl Hasher for NarrowHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.state = (self.state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        // The upper half holds the better mixed bits.
        (self.state >> 32) & self.mask
    }
}
