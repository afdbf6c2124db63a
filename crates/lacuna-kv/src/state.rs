//! The state of one sequence: what layers keep that is not a row for each token but some numbers that
//! every token changes. It does not depend on the way rows are held.
//!
//! All layers' states lie in one buffer, one after the other, each from a 64-byte boundary on:
//!
//! ```text
//! | layer 0 | layer 1 | (layer 3 keeps rows alone) | layer 4 | ... | rest of the last page |
//! ```
//!
//! A step computes the next state in the place of the last. There is one only while the step has not
//! begun, or has been accepted whole:
//!
//! ```text
//!            lend                   accept all
//! settled ----------> lent --------------------------> settled
//!    ^                 |  accept fewer, or begin again
//!    |                 v
//!    +----- clear --- spent
//! ```
//!
//! Copies share its pages, sealed, and so do checkpoints, which keep them. The next step of each makes them
//! its own again, which copies them for all but the last: one state's bytes, whatever the number of
//! tokens.

use std::ops::Range;
use std::sync::Arc;

use lacuna_pages::device::Aliasing;
use lacuna_pages::{
    Buffer, ByteLength, Error as PagesError, PagePin, PageRange, Pages, Pool, Request, Share,
    Source, VirtualPage,
};

use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Geometry, Layer};
use crate::store::{Usage, zeroed_buffer};

/// The states of all layers of one sequence.
#[derive(Debug)]
pub(crate) struct State {
    pool: Pool,
    /// The bytes of each layer's state in the buffer.
    places: Arc<[Range<usize>]>,
    bytes: usize,
    /// None before the first token: all states are zero then.
    buffer: Option<Buffer>,
    /// Whether pages may be shared, so that they are not written before [`State::prepare`].
    sealed: bool,
    phase: Phase,
    lost: bool,
    copied_bytes: usize,
    zeroed_bytes: usize,
    peak_committed_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It is what it is after the accepted tokens.
    Settled,
    /// A step computes the next one in its place.
    Lent,
    /// A step has ended that did not come to what is accepted.
    Spent,
}

impl State {
    /// The states of an empty sequence; `None` where no layer keeps one. Takes no memory.
    pub(crate) fn new(pool: &Pool, geometry: &Geometry) -> Option<Self> {
        geometry.has_states().then(|| Self {
            pool: pool.clone(),
            places: geometry.state_places(),
            bytes: geometry.state_bytes(),
            buffer: None,
            sealed: false,
            phase: Phase::Settled,
            lost: false,
            copied_bytes: 0,
            zeroed_bytes: 0,
            peak_committed_bytes: 0,
        })
    }

    /// Puts memory that may be written behind all states; zeros, if there was none. Allocates nothing
    /// when it is there already.
    pub(crate) fn prepare(&mut self) -> Result<(), KvError> {
        if self.phase == Phase::Spent {
            return Err(KvError::StateSpent);
        }
        if self.lost {
            return Err(KvError::RowsLost);
        }
        match &mut self.buffer {
            None => {
                let buffer = zeroed_buffer(&self.pool, self.bytes, "states".to_owned())?;
                self.zeroed_bytes += to_usize(buffer.reserved());
                self.buffer = Some(buffer);
                self.note_peak();
            }
            Some(buffer) if self.sealed => {
                let all = 0..to_usize(buffer.reserved());
                let report = self.pool.ensure_writable(&mut [Request::new(buffer, all)]);
                let report = self.note_lost(report)?;
                let page = to_usize(self.pool.page_size().length());
                self.copied_bytes += page * report.pages_copied.get() as usize;
                self.sealed = false;
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Lends the state of `layer` to a step, which leaves there what it is after all its tokens; nothing
    /// where the layer keeps none.
    pub(crate) fn lend(&mut self, layer: Layer) -> &mut [f32] {
        self.phase = Phase::Lent;
        let place = self.places.get(layer.0).cloned().unwrap_or_default();
        let buffer = self.buffer.as_mut().filter(|_| !place.is_empty());
        let bytes = buffer.map(|buffer| buffer.bytes_mut(place));
        let bytes = bytes.map(|bytes| bytes.expect("states that are prepared have memory"));
        bytes.map_or(&mut [], bytemuck::cast_slice_mut)
    }

    /// A step is over, and `whole` if all of its tokens were accepted.
    pub(crate) fn settle(&mut self, whole: bool) {
        if self.phase == Phase::Lent {
            self.phase = match whole {
                true => Phase::Settled,
                false => Phase::Spent,
            };
        }
    }

    /// Makes all states zero and gives their memory back.
    pub(crate) fn clear(&mut self) {
        self.buffer = None;
        (self.sealed, self.lost, self.phase) = (false, false, Phase::Settled);
    }

    /// The same states for a second sequence: shared where memory can be, else copied. In the middle of
    /// a step they are copied, since that is about to write them.
    pub(crate) fn duplicate(&mut self, in_step: bool) -> Result<Self, KvError> {
        if self.phase != Phase::Settled {
            return Err(KvError::StateSpent);
        }
        if self.lost {
            return Err(KvError::RowsLost);
        }
        let mut copy = Self {
            pool: self.pool.clone(),
            places: Arc::clone(&self.places),
            buffer: None,
            copied_bytes: 0,
            zeroed_bytes: 0,
            peak_committed_bytes: 0,
            ..*self
        };
        if self.buffer.is_some() {
            match in_step || self.pool.capabilities().aliasing == Aliasing::Unsupported {
                true => self.copy_to(&mut copy)?,
                false => self.share_with(&mut copy)?,
            }
            copy.note_peak();
        }
        Ok(copy)
    }

    fn copy_to(&self, copy: &mut Self) -> Result<(), KvError> {
        let Some(from) = &self.buffer else {
            return Ok(());
        };
        let mut buffer = zeroed_buffer(&self.pool, self.bytes, "states".to_owned())?;
        buffer
            .bytes_mut(0..self.bytes)?
            .copy_from_slice(from.bytes(0..self.bytes)?);
        copy.zeroed_bytes += to_usize(buffer.reserved());
        copy.copied_bytes += self.bytes;
        (copy.buffer, copy.sealed) = (Some(buffer), false);
        Ok(())
    }

    fn share_with(&mut self, copy: &mut Self) -> Result<(), KvError> {
        self.seal()?;
        let Some(from) = &self.buffer else {
            return Ok(());
        };
        let mut buffer = self.reserve()?;
        let share = Share {
            source: Source::Buffer(from, all_pages(from)),
            target: &mut buffer,
            at: VirtualPage::new(0),
        };
        self.pool.share(&mut [share])?;
        (copy.buffer, copy.sealed) = (Some(buffer), true);
        Ok(())
    }

    /// Keeps the pages of the states as they are now beyond the life of the sequence; `None` where memory
    /// cannot be kept, and where there is no state to keep.
    pub(crate) fn pin(&mut self) -> Result<Option<Vec<PagePin>>, KvError> {
        let shares = self.pool.capabilities().aliasing == Aliasing::Shared;
        if !shares || self.phase != Phase::Settled || self.lost {
            return Ok(None);
        }
        self.seal()?;
        let pin = |buffer: &Buffer| buffer.pin(all_pages(buffer));
        Ok(self.buffer.as_ref().map(pin).transpose()?)
    }

    /// Takes pages that the states of another sequence have pinned as those of this empty one.
    pub(crate) fn adopt(&mut self, pins: &[PagePin]) -> Result<(), KvError> {
        let mut buffer = self.reserve()?;
        let share = Share {
            source: Source::Pins(pins),
            target: &mut buffer,
            at: VirtualPage::new(0),
        };
        self.pool.share(&mut [share])?;
        (self.buffer, self.sealed) = (Some(buffer), true);
        self.note_peak();
        Ok(())
    }

    /// Whether the next step needs memory for all states: because there is none yet, or others may
    /// have the same.
    pub(crate) fn is_to_be_copied(&self) -> bool {
        self.sealed || self.buffer.is_none()
    }

    /// Address space for all states.
    fn reserve(&self) -> Result<Buffer, KvError> {
        let length = ByteLength::new(self.bytes as u64);
        Ok(self.pool.reserve(length, "states")?)
    }

    /// Makes all pages immutable until the next step.
    fn seal(&mut self) -> Result<(), KvError> {
        if let Some(buffer) = self.buffer.as_mut().filter(|_| !self.sealed) {
            let pages = all_pages(buffer);
            let sealed = self.pool.seal(&mut [Pages::new(buffer, pages)]);
            self.note_lost(sealed)?;
            self.sealed = true;
        }
        Ok(())
    }

    /// Takes note of a change that failed and could not be undone: its pages are holes now.
    fn note_lost<T>(&mut self, result: Result<T, PagesError>) -> Result<T, KvError> {
        self.lost |= matches!(result, Err(PagesError::Undo { .. }));
        Ok(result?)
    }

    fn note_peak(&mut self) {
        let committed = self.buffer.as_ref().map_or(0, |buffer| {
            let ledger = buffer.ledger();
            to_usize(ledger.mapped)
        });
        self.peak_committed_bytes = self.peak_committed_bytes.max(committed);
    }

    /// Whether a step has ended that did not come to what is accepted.
    pub(crate) fn is_spent(&self) -> bool {
        self.phase == Phase::Spent
    }

    /// Whether memory of it is gone although nobody gave it back.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Whether it is that after the accepted tokens, and all there.
    pub(crate) fn is_settled(&self) -> bool {
        self.phase == Phase::Settled && !self.lost
    }

    /// Its buffer, for moving its pages out and in.
    pub(crate) fn buffer_mut(&mut self) -> Option<&mut Buffer> {
        self.buffer.as_mut()
    }

    /// Its pages were moved out and are there again: others of its own, that may be written.
    pub(crate) fn come_back(&mut self) {
        self.sealed = false;
    }

    /// Its buffer, once there is one.
    pub(crate) fn buffer(&self) -> Option<&Buffer> {
        self.buffer.as_ref()
    }

    /// Bytes of all states, once there is memory behind them.
    pub(crate) fn held_bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, |_| self.bytes)
    }

    /// Where the bytes are.
    pub(crate) fn usage(&self) -> Usage {
        let mut usage = Usage {
            peak_committed_bytes: self.peak_committed_bytes,
            copied_bytes: self.copied_bytes,
            zeroed_bytes: self.zeroed_bytes,
            ..Usage::default()
        };
        if let Some(buffer) = &self.buffer {
            let ledger = buffer.ledger();
            usage.reserved_bytes = to_usize(ledger.reserved);
            usage.committed_bytes = to_usize(ledger.mapped);
            usage.shared_bytes = to_usize(ledger.shared);
        }
        usage
    }
}

/// All pages of a buffer.
pub(crate) fn all_pages(buffer: &Buffer) -> PageRange {
    PageRange::of(0..buffer.pages().get())
}
