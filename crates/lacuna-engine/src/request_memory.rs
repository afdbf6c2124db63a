//! The account of what requests hold outside the KV cache.
//!
//! A request takes memory long before it has a page: its body is received and parsed, templates are
//! rendered, text is tokenized, and ids wait for their turn. Clients decide how much of that there is,
//! so it is taken from one account with a limit *before* it is used, and given back by dropping a
//! [`HeldMemory`]. Whoever finds the account full waits or is refused; the account itself never
//! exceeds its limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use lacuna_pages::ByteLength;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes that requests may hold together. Clones are the same account.
#[derive(Debug, Clone)]
pub struct RequestMemory(Arc<Account>);

#[derive(Debug)]
struct Account {
    limit: AtomicU32,
    /// One permit per byte. Those who wait are served in the order they came.
    free: Arc<Semaphore>,
    /// The most that was ever held at once.
    highest: AtomicU64,
}

/// Bytes taken from a [`RequestMemory`]; dropping it gives them back.
#[derive(Debug)]
pub struct HeldMemory {
    account: RequestMemory,
    permit: OwnedSemaphorePermit,
}

/// The account as figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestMemoryStatus {
    /// What may be held.
    pub limit: ByteLength,
    /// What is held.
    pub held: ByteLength,
    /// The most that was held at once.
    pub highest: ByteLength,
}

/// Why memory was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryRefusal {
    /// It would not fit even if nothing else were held.
    #[error("the request takes {needed} of memory, but requests may hold {limit} together")]
    TooLarge {
        /// Bytes asked for.
        needed: ByteLength,
        /// Bytes there can be.
        limit: ByteLength,
    },
    /// Others hold too much at the moment.
    #[error(
        "the request takes {needed} of memory, and other requests hold the most of the {limit} \
         they may hold together; try again in a moment"
    )]
    Full {
        /// Bytes asked for.
        needed: ByteLength,
        /// Bytes there can be.
        limit: ByteLength,
    },
}

impl RequestMemory {
    /// The most an account can have: permits are counted in 32 bits.
    const MOST: u64 = if Semaphore::MAX_PERMITS < u32::MAX as usize {
        Semaphore::MAX_PERMITS as u64
    } else {
        u32::MAX as u64
    };

    /// An account of `limit` bytes, or of 4 GiB if that is less.
    #[must_use]
    pub fn new(limit: ByteLength) -> Self {
        // `MOST` fits.
        let limit = u32::try_from(limit.get().min(Self::MOST)).unwrap_or(u32::MAX);
        Self(Arc::new(Account {
            limit: AtomicU32::new(limit),
            free: Arc::new(Semaphore::new(limit as usize)),
            highest: AtomicU64::new(0),
        }))
    }

    /// What may be held.
    #[must_use]
    pub fn limit(&self) -> ByteLength {
        ByteLength::new(u64::from(self.0.limit.load(Ordering::Relaxed)))
    }

    /// An account of its own for `bytes` of this one, or what is free of them: this one has as much less
    /// from here on, and neither waits for what the other holds.
    #[must_use]
    pub fn split_off(&self, bytes: u64) -> Self {
        let wanted = usize::try_from(bytes).unwrap_or(usize::MAX);
        let moved = self.0.free.forget_permits(wanted);
        // No more than there are permits, which are counted in 32 bits.
        let limit = u32::try_from(moved).unwrap_or(u32::MAX);
        self.0.limit.fetch_sub(limit, Ordering::Relaxed);
        Self::new(ByteLength::new(limit.into()))
    }

    /// The account as figures.
    #[must_use]
    pub fn status(&self) -> RequestMemoryStatus {
        RequestMemoryStatus {
            limit: self.limit(),
            held: ByteLength::new(self.held()),
            highest: ByteLength::new(self.0.highest.load(Ordering::Relaxed)),
        }
    }

    /// Takes `bytes` if they are free now.
    ///
    /// # Errors
    /// [`MemoryRefusal`]; nothing is held then.
    pub fn try_take(&self, bytes: usize) -> Result<HeldMemory, MemoryRefusal> {
        let permits = self.permits(bytes)?;
        let permit = Arc::clone(&self.0.free).try_acquire_many_owned(permits);
        permit
            .map(|permit| self.hold(permit))
            .map_err(|_| self.full(bytes))
    }

    /// Takes `bytes`, waiting until they are free. Dropping the future stops waiting.
    ///
    /// Whoever waits here while holding memory of this account may wait for itself.
    ///
    /// # Errors
    /// [`MemoryRefusal::TooLarge`].
    pub async fn take(&self, bytes: usize) -> Result<HeldMemory, MemoryRefusal> {
        let permits = self.permits(bytes)?;
        let permit = Arc::clone(&self.0.free).acquire_many_owned(permits).await;
        // The semaphore is never closed.
        permit
            .map(|permit| self.hold(permit))
            .map_err(|_| self.full(bytes))
    }

    /// What to tell those who would have to wait for `bytes`.
    #[must_use]
    pub fn full(&self, bytes: usize) -> MemoryRefusal {
        MemoryRefusal::Full {
            needed: ByteLength::new(bytes as u64),
            limit: self.limit(),
        }
    }

    fn permits(&self, bytes: usize) -> Result<u32, MemoryRefusal> {
        let permits = u32::try_from(bytes).ok();
        let permits = permits.filter(|&permits| u64::from(permits) <= self.limit().get());
        permits.ok_or(MemoryRefusal::TooLarge {
            needed: ByteLength::new(bytes as u64),
            limit: self.limit(),
        })
    }

    fn hold(&self, permit: OwnedSemaphorePermit) -> HeldMemory {
        self.0.highest.fetch_max(self.held(), Ordering::Relaxed);
        HeldMemory {
            account: self.clone(),
            permit,
        }
    }

    fn held(&self) -> u64 {
        let free = self.0.free.available_permits() as u64;
        self.limit().get().saturating_sub(free)
    }
}

impl HeldMemory {
    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.permit.num_permits()
    }

    /// Holds `bytes` from here on: gives the rest back, or takes more if it is free now.
    ///
    /// # Errors
    /// [`MemoryRefusal`]; what was held is held still.
    pub fn resize(&mut self, bytes: usize) -> Result<(), MemoryRefusal> {
        match self.bytes().checked_sub(bytes) {
            Some(surplus) => drop(self.permit.split(surplus)),
            None => {
                // The whole is what must fit the account, not the difference.
                self.account.permits(bytes)?;
                let more = self.account.try_take(bytes - self.bytes());
                let more = more.map_err(|_| self.account.full(bytes))?;
                self.merge(more);
            }
        }
        Ok(())
    }

    /// Splits off `bytes`, or all of it if it is less.
    #[must_use]
    pub fn split(&mut self, bytes: usize) -> Self {
        let all = self.bytes();
        let part = self.permit.split(bytes.min(all));
        Self {
            account: self.account.clone(),
            permit: part.unwrap_or_else(|| unreachable!("no more than there is is split off")),
        }
    }

    /// Adds what `other` holds.
    ///
    /// # Panics
    /// When `other` is from another account.
    pub fn merge(&mut self, other: Self) {
        self.permit.merge(other.permit);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn account(limit: u64) -> RequestMemory {
        RequestMemory::new(ByteLength::new(limit))
    }

    #[test]
    fn what_can_never_fit_is_told_apart_from_what_does_not_fit_now() {
        let account = account(100);
        let held = account.try_take(60).expect("free");
        let needed = ByteLength::new(60);
        let limit = ByteLength::new(100);
        let refused = account.try_take(60).expect_err("40 are left");
        assert_eq!(refused, MemoryRefusal::Full { needed, limit });
        let needed = ByteLength::new(101);
        let refused = account.try_take(101).expect_err("too large");
        assert_eq!(refused, MemoryRefusal::TooLarge { needed, limit });
        drop(held);
        let status = account.status();
        assert_eq!((status.held.get(), status.highest.get()), (0, 60));
    }

    #[test]
    fn an_account_of_more_than_it_can_count_has_what_it_can_count() {
        let account = account(u64::MAX);
        assert_eq!(account.limit().get(), RequestMemory::MOST);
        assert!(account.try_take(1 << 20).is_ok());
    }

    #[test]
    fn an_account_that_was_split_off_is_one_of_its_own() {
        let account = account(100);
        let part = account.split_off(30);
        assert_eq!((account.limit().get(), part.limit().get()), (70, 30));
        let all = account.try_take(70).expect("all of it");
        assert!(account.try_take(1).is_err());
        let held = part.try_take(30).expect("nobody else's");
        assert_eq!(account.status().held.get(), 70);
        drop(held);
        assert_eq!(account.status().held.get(), 70);
        // What is held cannot be moved.
        assert_eq!(account.split_off(10).limit().get(), 0);
        drop(all);
        assert_eq!(account.status().held.get(), 0);
    }

    #[derive(Debug, Clone)]
    enum Operation {
        Take(usize),
        Resize(usize, usize),
        Split(usize, usize),
        Merge(usize),
        Drop(usize),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        let (index, bytes) = (0usize..8, 0usize..150);
        prop_oneof![
            bytes.clone().prop_map(Operation::Take),
            (index.clone(), bytes.clone()).prop_map(|(at, bytes)| Operation::Resize(at, bytes)),
            (index.clone(), bytes).prop_map(|(at, bytes)| Operation::Split(at, bytes)),
            index.clone().prop_map(Operation::Merge),
            index.prop_map(Operation::Drop),
        ]
    }

    fn apply(account: &RequestMemory, held: &mut Vec<(HeldMemory, usize)>, operation: &Operation) {
        let free = 100 - held.iter().map(|(_, bytes)| bytes).sum::<usize>();
        match *operation {
            Operation::Take(bytes) => match account.try_take(bytes) {
                Ok(memory) => held.push((memory, bytes)),
                Err(_) => assert!(bytes > free),
            },
            Operation::Resize(at, bytes) if at < held.len() => {
                let (memory, before) = &mut held[at];
                match memory.resize(bytes) {
                    Ok(()) => *before = bytes,
                    Err(_) => assert!(bytes > free + *before),
                }
            }
            Operation::Split(at, bytes) if at < held.len() => {
                let (memory, before) = &mut held[at];
                let part = memory.split(bytes);
                let bytes = bytes.min(*before);
                *before -= bytes;
                held.push((part, bytes));
            }
            Operation::Merge(at) if at + 1 < held.len() => {
                let (other, bytes) = held.remove(at + 1);
                held[at].0.merge(other);
                held[at].1 += bytes;
            }
            Operation::Drop(at) if at < held.len() => drop(held.remove(at)),
            _ => {}
        }
    }

    proptest! {
        #[test]
        fn the_account_is_the_sum_of_what_is_held(
            operations in prop::collection::vec(operation(), 1..60),
        ) {
            let account = account(100);
            let mut held = Vec::new();
            for operation in &operations {
                apply(&account, &mut held, operation);
                let sum: usize = held.iter().map(|(_, bytes)| bytes).sum();
                prop_assert_eq!(account.status().held.get(), sum as u64);
                for (memory, bytes) in &held {
                    prop_assert_eq!(memory.bytes(), *bytes);
                }
            }
        }
    }
}
