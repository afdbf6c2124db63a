//! What has been asked of neurons, counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// What has been asked of neurons since a model was loaded. A block's neuron counts once for a pass, however many of the
/// pass's tokens need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct NeuronReads {
    /// Neurons that there are, for each pass.
    pub all: u64,
    /// Those of them that passes needed: whose activations were not zero.
    pub needed: u64,
    /// Those of these that had a slot.
    pub found: u64,
    /// Bytes of the file that were read for the others, and for what was foretold.
    pub read_bytes: u64,
    /// Neurons that predictors named, with a slot or without.
    pub predicted: u64,
    /// Those of them that were needed.
    pub predicted_right: u64,
    /// Neurons that were needed of blocks of which some were foretold: a long prompt's are not.
    pub predicted_needed: u64,
    /// Neurons that were read ahead of time: those without a slot that were most likely to be needed.
    pub ahead: u64,
    /// Those of them that were needed.
    pub ahead_needed: u64,
    /// Of the bytes that were read, those that were foretold and not needed.
    pub wasted_bytes: u64,
}

impl NeuronReads {
    /// The part of neurons that passes needed; `None` before the first pass.
    #[must_use]
    pub fn active_share(&self) -> Option<f64> {
        share(self.needed, self.all)
    }

    /// The part of needed neurons that had a slot; `None` before the first is needed.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        share(self.found, self.needed)
    }

    /// The part of needed neurons that predictors had named; `None` where nothing was foretold.
    #[must_use]
    pub fn recall(&self) -> Option<f64> {
        share(self.predicted_right, self.predicted_needed)
    }

    /// The part of named neurons that were needed; `None` where nothing was foretold.
    #[must_use]
    pub fn precision(&self) -> Option<f64> {
        share(self.predicted_right, self.predicted)
    }

    /// The part of what was read ahead of time that was needed; `None` where nothing was.
    #[must_use]
    pub fn ahead_share(&self) -> Option<f64> {
        share(self.ahead_needed, self.ahead)
    }

    /// What came after `before`.
    #[must_use]
    pub fn since(&self, before: Self) -> Self {
        Self {
            all: self.all - before.all,
            needed: self.needed - before.needed,
            found: self.found - before.found,
            read_bytes: self.read_bytes - before.read_bytes,
            predicted: self.predicted - before.predicted,
            predicted_right: self.predicted_right - before.predicted_right,
            predicted_needed: self.predicted_needed - before.predicted_needed,
            ahead: self.ahead - before.ahead,
            ahead_needed: self.ahead_needed - before.ahead_needed,
            wasted_bytes: self.wasted_bytes - before.wasted_bytes,
        }
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// The same while passes go on.
#[derive(Debug, Default)]
pub(in crate::weights) struct Counters {
    pub(super) all: Counter,
    pub(super) needed: Counter,
    pub(super) found: Counter,
    pub(super) read_bytes: Counter,
    pub(super) predicted: Counter,
    pub(super) predicted_right: Counter,
    pub(super) predicted_needed: Counter,
    pub(super) ahead: Counter,
    pub(super) ahead_needed: Counter,
    pub(super) wasted_bytes: Counter,
}

/// One that only grows.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub(in crate::weights) fn now(&self) -> NeuronReads {
        NeuronReads {
            all: self.all.now(),
            needed: self.needed.now(),
            found: self.found.now(),
            read_bytes: self.read_bytes.now(),
            predicted: self.predicted.now(),
            predicted_right: self.predicted_right.now(),
            predicted_needed: self.predicted_needed.now(),
            ahead: self.ahead.now(),
            ahead_needed: self.ahead_needed.now(),
            wasted_bytes: self.wasted_bytes.now(),
        }
    }
}
