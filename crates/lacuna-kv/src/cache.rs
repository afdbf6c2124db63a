//! Where sequences come from: one pool of pages for all of them, and how it holds memory.

use std::str::FromStr;

use lacuna_pages::{
    ByteLength, DenseDevice, Device, Error as PagesError, HostDevice, Ledger, Pool, PoolConfig,
    available_memory,
};

use crate::error::KvError;
use crate::geometry::Geometry;
use crate::sequence::Sequence;

/// How a KV cache holds memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvPolicy {
    /// Pages are attached to reserved address space as tokens arrive. Growing costs a few
    /// microseconds per page and copies nothing.
    #[default]
    Sparse,
    /// The whole context is committed when a sequence is made. Growing costs nothing.
    Dense,
}

/// A policy name that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown KV policy `{0}`; use sparse or dense")]
pub struct UnknownPolicy(pub String);

impl FromStr for KvPolicy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        match name {
            "sparse" => Ok(Self::Sparse),
            "dense" => Ok(Self::Dense),
            other => Err(UnknownPolicy(other.to_owned())),
        }
    }
}

impl std::fmt::Display for KvPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Sparse => "sparse",
            Self::Dense => "dense",
        })
    }
}

/// The memory behind all sequences of one model.
#[derive(Debug, Clone)]
pub struct KvCache {
    pool: Pool,
    geometry: Geometry,
}

impl KvCache {
    /// Opens the device for `policy` and chooses a page size for `geometry`. What the system has
    /// available now is the limit of all its sequences together, so that running out is an error
    /// and not the end of the process.
    ///
    /// # Errors
    /// [`KvError::EmptyGeometry`], or [`KvError::Pages`] when the system lacks what the policy needs.
    pub fn new(geometry: Geometry, policy: KvPolicy) -> Result<Self, KvError> {
        let pool = match policy {
            KvPolicy::Sparse => open(HostDevice::new().map_err(PagesError::from)?, geometry)?,
            KvPolicy::Dense => open(DenseDevice::new(), geometry)?,
        };
        Self::over(pool, geometry)
    }

    /// A cache whose pages come from `pool`, whatever its device, page size and limit.
    ///
    /// # Errors
    /// [`KvError::EmptyGeometry`].
    pub fn over(pool: Pool, geometry: Geometry) -> Result<Self, KvError> {
        if geometry.buffers() == 0 || geometry.row_bytes() == 0 {
            return Err(KvError::EmptyGeometry {
                layers: geometry.layers,
                row_bytes: geometry.row_bytes(),
            });
        }
        Ok(Self { pool, geometry })
    }

    /// A new, empty sequence of up to `capacity` tokens. Under [`KvPolicy::Sparse`] it holds address
    /// space only.
    ///
    /// # Errors
    /// [`KvError::ContextTooLarge`], or [`KvError::Pages`] when the range cannot be reserved.
    pub fn sequence(&self, capacity: usize) -> Result<Sequence, KvError> {
        Sequence::new(&self.pool, self.geometry, capacity)
    }

    /// Shape of every sequence.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        to_usize(self.pool.page_size().length())
    }

    /// The pool's byte accounts.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        self.pool.ledger()
    }
}

/// A pool on `device`, with the page size that suits `geometry`.
fn open(device: impl Device + 'static, geometry: Geometry) -> Result<Pool, KvError> {
    let offered = &device.capabilities().page_sizes;
    let page_size = geometry.page_size(offered).ok_or(KvError::NoPageSize)?;
    let limit = available_memory().map(|available| available.max(page_size.length()));
    let config = PoolConfig {
        page_size,
        limit,
        ..PoolConfig::default()
    };
    Ok(Pool::new(device, config)?)
}

/// A length that fits this process's address space, as every length of a mapped buffer does.
pub(crate) fn to_usize(length: ByteLength) -> usize {
    usize::try_from(length.get()).expect("a length within the address space fits usize")
}
