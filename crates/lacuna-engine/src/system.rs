//! What a scheduler asks the system for. A simulation answers in its place.

use std::sync::Arc;
use std::time::Instant;

use lacuna_kv::KvCache;
use lacuna_models::Model;

use crate::budget::{Process, Reading};

/// The time and the memory there is.
pub(crate) trait System: Send {
    /// The time now.
    fn now(&self) -> Instant;

    /// How short of memory the system is, when others hold `lent_bytes` of what is planned for KV pages and weights.
    fn memory(&self, lent_bytes: u64) -> Reading;
}

/// The system this process runs on.
#[derive(Debug)]
pub(crate) struct Host {
    /// What the process has planned to take.
    pub(crate) process: Process,
    /// The part of it that is KV pages.
    pub(crate) cache: KvCache,
    /// The part of it that is weights.
    pub(crate) model: Arc<Model>,
}

impl System for Host {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn memory(&self, lent_bytes: u64) -> Reading {
        let apart = self.cache.anonymous_bytes() + self.model.placed_bytes();
        Reading::now(&self.process, apart + lent_bytes)
    }
}

/// A system whose time and memory a test sets. Clones are the same system.
#[cfg(test)]
#[derive(Clone)]
pub(crate) struct FakeSystem(std::sync::Arc<std::sync::Mutex<(Instant, Reading)>>);

#[cfg(test)]
impl FakeSystem {
    /// What it would rather keep.
    pub(crate) const RESERVE: u64 = 64 << 20;

    /// One with plenty of memory.
    pub(crate) fn new() -> Self {
        let plenty = Reading {
            available: Some(1 << 40),
            reserve: Self::RESERVE,
            ..Reading::default()
        };
        Self(std::sync::Arc::new(std::sync::Mutex::new((
            Instant::now(),
            plenty,
        ))))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, (Instant, Reading)> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Lets time pass.
    pub(crate) fn pass(&self, time: std::time::Duration) {
        self.state().0 += time;
    }

    /// Changes what the process has beyond its plan.
    pub(crate) fn set_beyond_plan(&self, bytes: u64) {
        self.state().1.beyond_plan = bytes;
    }

    /// Changes what it says about its memory.
    pub(crate) fn set_memory(&self, available: u64, stalled_percent: f32) {
        let mut state = self.state();
        (state.1.available, state.1.stalled_percent) = (Some(available), stalled_percent);
    }
}

#[cfg(test)]
impl System for FakeSystem {
    fn now(&self) -> Instant {
        self.state().0
    }

    fn memory(&self, _lent_bytes: u64) -> Reading {
        self.state().1
    }
}
