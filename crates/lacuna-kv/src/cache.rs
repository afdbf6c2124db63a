//! Where sequences come from: one pool of pages for all of them, and how it holds memory.

use std::sync::Arc;

use lacuna_pages::device::Commitment;
use lacuna_pages::{
    ByteLength, DenseDevice, Device, Error as PagesError, HostDevice, Ledger, PageSize, Pool,
    PoolConfig, SystemMemory,
};

use crate::error::KvError;
use crate::geometry::Geometry;
use crate::growth::GrowthSchedule;
use crate::layout::Arrangement;
use crate::policy::KvPolicy;
use crate::prefix::Grain;
use crate::sequence::Sequence;
use crate::smoothing::KeySmoothing;
use crate::store::{Blocks, Commit, FlatStore, GrowStore, PagedStore, Store};

/// The memory behind all sequences of one model.
#[derive(Debug, Clone)]
pub struct KvCache {
    pool: Pool,
    arrangement: Arrangement,
    policy: KvPolicy,
    stores: Stores,
}

/// What makes the stores of a policy.
#[derive(Debug, Clone)]
enum Stores {
    Flat(Commit),
    Grow(GrowthSchedule),
    Paged(Arc<Blocks>),
}

impl KvCache {
    /// Opens the device for `policy` and chooses a page size for `geometry`. What the system can
    /// spare now is the limit of all its sequences together, so that running out is an error
    /// and not the end of the process.
    ///
    /// # Errors
    /// As [`Geometry::validate`], or [`KvError::Pages`] when the system lacks what the policy needs.
    pub fn new(geometry: Geometry, policy: KvPolicy) -> Result<Self, KvError> {
        geometry.validate()?;
        let arrangement = Arrangement::new(&geometry, policy.layout());
        let pool = match policy {
            KvPolicy::Sparse(_) => {
                let device = HostDevice::new().map_err(PagesError::from)?;
                open(device, &arrangement)?
            }
            KvPolicy::Dense(_) | KvPolicy::Grow(_) | KvPolicy::Paged { .. } => {
                open(DenseDevice::new(), &arrangement)?
            }
        };
        Self::over(pool, geometry, policy)
    }

    /// The same over pages of `device`, whatever the policy: the page size is chosen for `geometry` among those that
    /// the device has. Where some layers are the host's, it is a [`SplitDevice`](lacuna_pages::SplitDevice). Its sequences
    /// take as much of its memory as [`KvCache::set_limit`] allows.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn on_device(
        device: impl Device + 'static,
        geometry: Geometry,
        policy: KvPolicy,
    ) -> Result<Self, KvError> {
        geometry.validate()?;
        let arrangement = Arrangement::new(&geometry, policy.layout());
        Self::over(open(device, &arrangement)?, geometry, policy)
    }

    /// A cache whose pages come from `pool`, whatever its device, page size and limit.
    ///
    /// # Errors
    /// As [`Geometry::validate`], [`KvError::ContextTooLarge`] for blocks larger than the address space, and
    /// [`KvError::SplitPolicy`] where rows are to be in two places that the policy holds in one.
    pub fn over(pool: Pool, geometry: Geometry, policy: KvPolicy) -> Result<Self, KvError> {
        geometry.validate()?;
        if geometry.host_layers() > 0 && !matches!(policy, KvPolicy::Sparse(_)) {
            return Err(KvError::SplitPolicy { policy });
        }
        let stores = match policy {
            // Without rows all ways to hold them are one.
            _ if !geometry.has_rows() => Stores::Flat(Commit::OnDemand),
            KvPolicy::Sparse(_) => Stores::Flat(Commit::OnDemand),
            KvPolicy::Dense(_) => Stores::Flat(Commit::AtStart),
            KvPolicy::Grow(schedule) => Stores::Grow(schedule),
            KvPolicy::Paged { block_tokens } => {
                let blocks = Blocks::new(pool.clone(), &geometry, block_tokens)?;
                Stores::Paged(Arc::new(blocks))
            }
        };
        Ok(Self {
            pool,
            arrangement: Arrangement::new(&geometry, policy.layout()),
            policy,
            stores,
        })
    }

    /// The same memory for sequences whose keys are stored smoothed, as far as `smoothing` says. Those that are there stay
    /// as they are.
    ///
    /// # Panics
    /// As [`Geometry::with_key_smoothing`].
    #[must_use]
    pub fn with_key_smoothing(self, smoothing: KeySmoothing) -> Self {
        let geometry = self.geometry().clone().with_key_smoothing(smoothing);
        Self {
            arrangement: Arrangement::new(&geometry, self.policy.layout()),
            ..self
        }
    }

    /// A new, empty sequence of up to `capacity` tokens. Under [`KvPolicy::Sparse`] it holds address
    /// space only.
    ///
    /// # Errors
    /// [`KvError::ContextTooLarge`], or [`KvError::Pages`] when the range cannot be reserved.
    pub fn sequence(&self, capacity: usize) -> Result<Sequence, KvError> {
        let (pool, arrangement) = (&self.pool, &self.arrangement);
        let store: Box<dyn Store> = match &self.stores {
            Stores::Flat(commit) => Box::new(FlatStore::new(pool, arrangement, *commit, capacity)?),
            Stores::Grow(schedule) => {
                Box::new(GrowStore::new(pool, arrangement, *schedule, capacity)?)
            }
            Stores::Paged(blocks) => Box::new(PagedStore::new(Arc::clone(blocks), capacity)?),
        };
        let geometry = arrangement.geometry().clone();
        Ok(Sequence::new(store, pool.clone(), geometry, capacity))
    }

    /// Shape of every sequence.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.arrangement.geometry()
    }

    /// How memory is held.
    #[must_use]
    pub fn policy(&self) -> KvPolicy {
        self.policy
    }

    pub(crate) fn arrangement(&self) -> &Arrangement {
        &self.arrangement
    }

    /// Where its memory comes from.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Whether `sequence` is one of its own.
    #[must_use]
    pub fn owns(&self, sequence: &Sequence) -> bool {
        self.pool.is_same(&sequence.pool)
    }

    /// How many tokens and pages are shared and kept together.
    #[must_use]
    pub fn grain(&self) -> Grain {
        Grain::new(&self.arrangement, self.pool.page_size())
    }

    /// The unit memory comes in.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.pool.page_size()
    }

    /// Bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        to_usize(self.pool.page_size().length())
    }

    /// Changes the byte limit of all sequences together; see [`Pool::set_limit`].
    ///
    /// # Errors
    /// [`KvError::Pages`] for a limit below one page.
    pub fn set_limit(&self, limit: ByteLength) -> Result<(), KvError> {
        self.pool.set_limit(Some(limit))?;
        if let Stores::Paged(blocks) = &self.stores {
            blocks.set_limit(limit);
        }
        Ok(())
    }

    /// The most memory behind one sequence made for `capacity` tokens on its way to `tokens`; nothing for
    /// what no sequence can have.
    #[must_use]
    pub fn sequence_peak_bytes(&self, capacity: usize, tokens: usize) -> u64 {
        let page_size = self.pool.page_size();
        let footprint = self
            .policy
            .footprint(self.geometry(), page_size, capacity, tokens);
        footprint.map_or(0, |footprint| footprint.peak_committed_bytes as u64)
    }

    /// The part of what is committed that the kernel counts as anonymous memory: nothing where pages
    /// are shared memory, so that sequences can share them, and else all of it.
    #[must_use]
    pub fn anonymous_bytes(&self) -> u64 {
        match self.pool.capabilities().commitment {
            Commitment::WithReservation => self.ledger().committed.get(),
            Commitment::PerPage | Commitment::PerHeap => 0,
        }
    }

    /// The pool's byte accounts.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        self.pool.ledger()
    }
}

/// A pool on `device`, with the page size that suits `arrangement`.
fn open(device: impl Device + 'static, arrangement: &Arrangement) -> Result<Pool, KvError> {
    let page_size = arrangement.page_size(&device.capabilities().page_sizes);
    let page_size = page_size.ok_or(KvError::NoPageSize)?;
    let spare = SystemMemory::read().spare();
    let limit = spare.map(|spare| spare.max(page_size.length()));
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
