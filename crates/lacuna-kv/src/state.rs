//! The state of one sequence: what layers keep that is not a row for each token but some numbers that
//! every token changes. It does not depend on the way rows are held.
//!
//! All layers' states lie in one buffer, one after the other, each from a 64-byte boundary on. Where some layers are the
//! host's and others a device's, each has a buffer of theirs, in memory of its own.
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
//! A step that may have to go back to its first tokens, because it computes guesses, computes the next state beside the
//! last and keeps what its tokens change states by, their inputs. When all of it is accepted the two change places. Else
//! the states are computed once more from the last ones, by the inputs of the accepted tokens alone; and when none is
//! accepted, the last ones are still there.
//!
//! ```text
//!                        lend              accept all: they change places
//! settled ----> beside ---------> computed ------------------------------> settled
//!    ^            ^                  |   |                                    ^
//!    |            +----- rewind -----+   |  accept none, or begin again       |
//!    |                                   +------------------------------------+
//! ```
//!
//! Copies share its pages, sealed, and so do resume points, which keep them. The next step of each makes them
//! its own again, which copies them for all but the last: one state's bytes, whatever the number of
//! tokens.

use std::ops::Range;
use std::sync::Arc;

use lacuna_kernels::State as StateView;
use lacuna_pages::device::{Address, Aliasing, Location};
use lacuna_pages::{
    Buffer, ByteLength, Error as PagesError, PagePin, PageRange, Pages, Pool, Request, Share,
    Source, VirtualPage,
};

use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Geometry, Layer};
use crate::store::{Usage, zeroed_buffer};

/// Tokens whose inputs there is room for at least: those of a step with as many guesses as are made unless said otherwise.
const LEAST_INPUTS: usize = 8;

const THERE: &str = "states that are prepared have memory";

/// The states of all layers of one sequence that have memory of one kind.
#[derive(Debug)]
pub(crate) struct State {
    pool: Pool,
    location: Location,
    /// The bytes of each layer's state in the buffer.
    places: Arc<[Range<usize>]>,
    bytes: usize,
    /// None before the first token: all states are zero then.
    buffer: Option<Buffer>,
    /// Whether pages may be shared, so that they are not written before [`State::prepare`].
    sealed: bool,
    /// A second place for all states, once a step was to be able to go back.
    beside: Option<Buffer>,
    /// What the tokens of such a step change states by.
    inputs: Option<Inputs>,
    /// Elements of each layer's inputs in those of a token.
    input_places: Arc<[Range<usize>]>,
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
    /// A step is to compute the next one beside it.
    Beside,
    /// It has.
    Computed,
    /// The same step is to compute it once more, of its first tokens.
    Rewound,
    /// A step has ended that did not come to what is accepted.
    Spent,
}

/// Inputs of states: those of a layer's tokens one after the other, layer after layer.
#[derive(Debug)]
struct Inputs {
    buffer: Buffer,
    /// Tokens that there is room for.
    tokens: usize,
}

impl State {
    /// The states of an empty sequence, one of each kind of memory that layers which keep some have. Takes no memory.
    pub(crate) fn of(pool: &Pool, geometry: &Geometry) -> Vec<Self> {
        let kinds = Location::ALL.into_iter();
        kinds
            .filter_map(|location| Self::new(pool, geometry, location))
            .collect()
    }

    /// Those in memory of one kind; `None` where no layer keeps one there.
    fn new(pool: &Pool, geometry: &Geometry, location: Location) -> Option<Self> {
        let places = geometry.state_places(location);
        let bytes = places.last().map_or(0, |place| place.end);
        (bytes > 0).then(|| Self {
            pool: pool.clone(),
            location,
            places,
            bytes,
            buffer: None,
            sealed: false,
            beside: None,
            inputs: None,
            input_places: geometry.state_input_places(location),
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
        self.check()?;
        match &mut self.buffer {
            None => {
                self.buffer = Some(self.first_buffer()?);
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

    /// Puts memory behind a second place for all states and behind the inputs of `tokens` tokens, so that the step that
    /// comes leaves the states there are as they are. Allocates nothing when it is there already.
    pub(crate) fn prepare_beside(&mut self, tokens: usize) -> Result<(), KvError> {
        self.check()?;
        if self.buffer.is_none() {
            self.buffer = Some(self.zeroed(self.bytes)?);
        }
        if self.beside.is_none() {
            self.beside = Some(self.zeroed(self.bytes)?);
        }
        if !self.has_inputs(tokens) {
            self.inputs = None;
            let (tokens, bytes) = self.inputs_of(tokens);
            let buffer = self.zeroed(bytes)?;
            self.inputs = Some(Inputs { buffer, tokens });
        }
        self.note_peak();
        self.phase = Phase::Beside;
        Ok(())
    }

    /// Memory for all states of an empty sequence. It is zeros where the host sees it; where it does not, whoever
    /// computes there takes the states before the first token for zeros, whatever they hold.
    fn first_buffer(&mut self) -> Result<Buffer, KvError> {
        let mut buffer = self.reserve()?;
        if buffer.host_sees() {
            drop(buffer);
            return self.zeroed(self.bytes);
        }
        let all = 0..to_usize(buffer.reserved());
        buffer.ensure_mapped(all)?;
        Ok(buffer)
    }

    /// Lends them all to work that is submitted to the pool's device.
    pub(crate) fn lend_all(&mut self) {
        self.phase = Phase::Lent;
    }

    /// Whether they have memory of that kind.
    pub(crate) fn is_at(&self, location: Location) -> bool {
        self.location == location
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Pages of all of them.
    pub(crate) fn pages(&self) -> usize {
        let page = to_usize(self.pool.page_size().length());
        self.bytes.div_ceil(page)
    }

    /// Where the device has the state of `layer`, and its bytes; nothing where the layer keeps none, or there is no memory
    /// yet.
    pub(crate) fn on_device(&self, layer: Layer) -> Option<(Address, usize)> {
        let place = self.places.get(layer.0).filter(|place| !place.is_empty())?;
        let buffer = self.buffer.as_ref()?;
        Some((buffer.address(place.start as u64), place.len()))
    }

    fn has_inputs(&self, tokens: usize) -> bool {
        self.inputs.as_ref().is_some_and(|it| it.tokens >= tokens)
    }

    /// For how many tokens there is to be room when there is to be for `tokens`, because the next step may have some more,
    /// and the bytes of their inputs.
    fn inputs_of(&self, tokens: usize) -> (usize, usize) {
        let tokens = tokens.next_power_of_two().max(LEAST_INPUTS);
        let elements = self.input_places.last().map_or(0, |place| place.end);
        (tokens, (tokens * elements * size_of::<f32>()).max(1))
    }

    /// Bytes that [`State::prepare_beside`] takes.
    pub(crate) fn beside_bytes_to_take(&self, tokens: usize) -> usize {
        let page = to_usize(self.pool.page_size().length());
        let states = [&self.buffer, &self.beside].map(|buffer| match buffer {
            Some(_) => 0,
            None => self.bytes.next_multiple_of(page),
        });
        let inputs = match self.has_inputs(tokens) {
            true => 0,
            false => self.inputs_of(tokens).1.next_multiple_of(page),
        };
        states.iter().sum::<usize>() + inputs
    }

    /// Refuses to go on from a state that is none.
    fn check(&self) -> Result<(), KvError> {
        match self.phase {
            Phase::Spent => Err(KvError::StateSpent),
            _ if self.lost => Err(KvError::RowsLost),
            _ => Ok(()),
        }
    }

    /// Memory for `bytes` bytes.
    fn zeroed(&mut self, bytes: usize) -> Result<Buffer, KvError> {
        let buffer = zeroed_buffer(&self.pool, (self.location, bytes), "states".to_owned())?;
        self.zeroed_bytes += to_usize(buffer.reserved());
        Ok(buffer)
    }

    /// Lends the state of `layer` to a step, which leaves there what it is after all its tokens; nothing
    /// where the layer keeps none.
    pub(crate) fn lend(&mut self, layer: Layer) -> StateView<'_> {
        let place = self.places.get(layer.0).cloned().unwrap_or_default();
        let (before, after) = match self.phase {
            Phase::Beside | Phase::Computed | Phase::Rewound => {
                self.phase = Phase::Computed;
                (self.buffer.as_ref(), &mut self.beside)
            }
            Phase::Settled | Phase::Lent | Phase::Spent => {
                self.phase = Phase::Lent;
                (None, &mut self.buffer)
            }
        };
        if place.is_empty() {
            return StateView::from(<&mut [f32]>::default());
        }
        let before = before.map(|buffer| buffer.bytes(place.clone()).expect(THERE));
        let after = after.as_mut().map(|it| it.bytes_mut(place).expect(THERE));
        StateView {
            before: before.map(bytemuck::cast_slice),
            after: after.map_or(&mut [], bytemuck::cast_slice_mut),
        }
    }

    /// The inputs of so many tokens of `layer`, if the step under way keeps them.
    pub(crate) fn inputs(&mut self, layer: Layer, tokens: usize) -> Option<&mut [f32]> {
        if !self.is_beside() {
            return None;
        }
        let place = self.input_places.get(layer.0)?;
        let Inputs {
            buffer,
            tokens: room,
        } = self.inputs.as_mut()?;
        let start = place.start * *room;
        let elements = start..start + place.len() * tokens.min(*room);
        let bytes = elements.start * size_of::<f32>()..elements.end * size_of::<f32>();
        let bytes = buffer.bytes_mut(bytes);
        bytes.ok().map(bytemuck::cast_slice_mut)
    }

    /// The step under way has its first tokens alone, for which states are to be computed once more. Returns whether it
    /// can: it is one that leaves the states before it as they are.
    pub(crate) fn rewind(&mut self) -> bool {
        let can = self.is_beside();
        if can {
            self.phase = Phase::Rewound;
        }
        can
    }

    /// Whether the step under way leaves the states before it as they are.
    pub(crate) fn is_beside(&self) -> bool {
        matches!(self.phase, Phase::Beside | Phase::Computed | Phase::Rewound)
    }

    /// A step of `prepared` tokens is over, of which the first `accepted` count.
    pub(crate) fn settle(&mut self, accepted: usize, prepared: usize) {
        let whole = accepted == prepared;
        self.phase = match self.phase {
            Phase::Lent if !whole => Phase::Spent,
            Phase::Beside | Phase::Computed | Phase::Rewound if accepted == 0 => Phase::Settled,
            Phase::Computed if whole => {
                let before = std::mem::replace(&mut self.buffer, self.beside.take());
                // What others have as well is no place for the next step to write to.
                self.beside = before.filter(|_| !self.sealed);
                self.sealed = false;
                Phase::Settled
            }
            // Nobody has computed them for the tokens that count.
            Phase::Beside | Phase::Computed | Phase::Rewound => Phase::Spent,
            Phase::Settled | Phase::Lent => Phase::Settled,
            Phase::Spent => Phase::Spent,
        };
    }

    /// Makes all states zero and gives their memory back.
    pub(crate) fn clear(&mut self) {
        (self.buffer, self.beside, self.inputs) = (None, None, None);
        (self.sealed, self.lost, self.phase) = (false, false, Phase::Settled);
    }

    /// Gives back what it takes for steps to be able to go back, unless one is under way. Returns the bytes.
    pub(crate) fn release_beside(&mut self) -> u64 {
        if self.is_beside() {
            return 0;
        }
        let inputs = self.inputs.take().map(|inputs| inputs.buffer);
        let buffers = self.beside.take().into_iter().chain(inputs);
        buffers.map(|buffer| buffer.ledger().mapped.get()).sum()
    }

    /// Bytes that [`State::release_beside`] would give back.
    pub(crate) fn beside_bytes(&self) -> u64 {
        match self.is_beside() {
            true => 0,
            false => self.others().map(|it| it.ledger().mapped.get()).sum(),
        }
    }

    /// The buffers beside that of the states.
    fn others(&self) -> impl Iterator<Item = &Buffer> {
        let inputs = self.inputs.as_ref().map(|inputs| &inputs.buffer);
        self.beside.iter().chain(inputs)
    }

    /// The same states for a second sequence: shared where memory can be, else copied. In the middle of
    /// a step they are copied, since that is about to write them.
    pub(crate) fn duplicate(&mut self, in_step: bool) -> Result<Self, KvError> {
        if !matches!(self.phase, Phase::Settled | Phase::Beside) {
            return Err(KvError::StateSpent);
        }
        self.check()?;
        let mut copy = Self {
            pool: self.pool.clone(),
            places: Arc::clone(&self.places),
            buffer: None,
            beside: None,
            inputs: None,
            input_places: Arc::clone(&self.input_places),
            phase: Phase::Settled,
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
        let mut buffer = copy.first_buffer()?;
        match buffer.host_sees() {
            true => buffer
                .bytes_mut(0..self.bytes)?
                .copy_from_slice(from.bytes(0..self.bytes)?),
            false => {
                let mut bytes = vec![0; self.bytes];
                from.read(0, &mut bytes)?;
                buffer.write(0, &bytes)?;
            }
        }
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
        Ok(self.pool.reserve_at(self.location, length, "states")?)
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
        let buffers = self.buffer.iter().chain(self.others());
        let committed = buffers.map(|buffer| to_usize(buffer.ledger().mapped)).sum();
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

    /// All its buffers.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.buffer.iter().chain(self.others())
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
        for buffer in self.buffers() {
            let ledger = buffer.ledger();
            usage.reserved_bytes += to_usize(ledger.reserved);
            usage.committed_bytes += to_usize(ledger.mapped);
            usage.shared_bytes += to_usize(ledger.shared);
        }
        usage
    }
}

/// All pages of a buffer.
pub(crate) fn all_pages(buffer: &Buffer) -> PageRange {
    PageRange::of(0..buffer.pages().get())
}
