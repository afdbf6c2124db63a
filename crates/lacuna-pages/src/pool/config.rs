//! How a pool is set up.

use crate::Error;
use crate::device::Capabilities;
use crate::units::{ByteLength, PageSize};

/// What a page that is used again holds at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recycle {
    /// Whatever its last owner left there. Costs nothing.
    #[default]
    AsIs,
    /// Zeros, so that nothing passes from one user to the next. Costs about 3 us per 64 KiB page
    /// that is used again; memory fresh from the system is zero anyway.
    Zeroed,
}

/// A pool's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// The one page size of the pool, from the device's list. Default 64 KiB. Larger pages cost
    /// fewer mappings and more slack.
    pub page_size: PageSize,
    /// The size of a heap, a multiple of the page size. Default 64 MiB. Where memory is committed
    /// by the page a heap costs one file descriptor and nothing else.
    pub heap_bytes: ByteLength,
    /// The most memory the pool may hold, idle pages included; it is never exceeded. Default none.
    pub limit: Option<ByteLength>,
    /// Once more than this much memory lies idle, it is given back down to the low watermark.
    /// Default 256 MiB.
    pub high_watermark: ByteLength,
    /// How much idle memory is kept then, and when nothing is in use at all, so that the next user
    /// need not wait for the system. Default 64 MiB.
    pub low_watermark: ByteLength,
    /// What a page that is used again holds at first. Default: what was left there.
    pub recycle: Recycle,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            page_size: PageSize::KIB_64,
            heap_bytes: ByteLength::mebibytes(64),
            limit: None,
            high_watermark: ByteLength::mebibytes(256),
            low_watermark: ByteLength::mebibytes(64),
            recycle: Recycle::AsIs,
        }
    }
}

impl PoolConfig {
    /// Pages in a heap.
    pub(crate) fn heap_pages(&self) -> u32 {
        u32::try_from(self.heap_bytes.get() / self.page_size.bytes())
            .expect("validated: a heap has fewer than 2^32 pages")
    }

    pub(crate) fn validate(&self, device: &Capabilities) -> Result<(), Error> {
        if !device.page_sizes.contains(&self.page_size) {
            let (device, page_size) = (device.name, self.page_size);
            return Err(Error::UnsupportedPageSize { device, page_size });
        }
        let page = self.page_size.bytes();
        let heap = self.heap_bytes.get();
        if heap == 0 || !heap.is_multiple_of(page) {
            return Err(Error::Config {
                what: "make heap_bytes a multiple of the page size",
            });
        }
        if heap / page > 1 << 24 {
            return Err(Error::Config {
                what: "make heap_bytes at most 16,777,216 pages",
            });
        }
        if self.low_watermark > self.high_watermark {
            return Err(Error::Config {
                what: "make low_watermark at most high_watermark",
            });
        }
        validate_limit(self.limit, self.page_size)
    }
}

pub(crate) fn validate_limit(limit: Option<ByteLength>, page_size: PageSize) -> Result<(), Error> {
    match limit {
        Some(limit) if limit < page_size.length() => Err(Error::Config {
            what: "make the byte limit at least one page",
        }),
        _ => Ok(()),
    }
}
