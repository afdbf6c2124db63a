//! One sequence's rows and states, whatever way they are held.
//!
//! A step is `prepare(n)`, then per layer `write` and `view`, or `state`, then `accept(m)` with `m <= n`.
//! `prepare` finds memory for everything the step will touch and does nothing when it is already
//! there; rows that were prepared and not accepted are overwritten by the next step. After that
//! `release_passed` gives back what windows have left behind; `prepare` does it too.
//!
//! States are changed in place, so a step that changed them and is not accepted whole leaves none; but for one that
//! `prepare_to_rewind` has prepared, which changes none and can go back to its first tokens with `rewind`.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use lacuna_kernels::{RunMut, State as StateView, View};
use lacuna_pages::device::Location;
use lacuna_pages::{Buffer, PagePin, PageRange, Pool};

use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Geometry, Keep, Layer, LayerCache, Side};
use crate::prefix::{Grain, Pins};
use crate::report::KvReport;
use crate::state::{State, all_pages};
use crate::store::{DeviceRows, DeviceState, Store, Usage, Useful};

/// KV cache of one sequence.
///
/// ```text
/// 0       first            len            len + prepared      capacity
/// | released | held: accepted | prepared       |                  |
/// ```
///
/// `first` is of each layer: where all rows are kept, what [`Sequence::release_before`] was told last,
/// and where there is a window of `n` rows, at least `len - (n - 1)`.
#[derive(Debug)]
pub struct Sequence {
    store: Box<dyn Store>,
    /// Of each kind of memory that has some, those of its layers; none where no layer keeps one.
    states: Vec<State>,
    pub(crate) pool: Pool,
    geometry: Geometry,
    /// Whether any layer has one.
    windows: bool,
    /// Where another sequence could go on, if windows are to keep what that takes.
    resumable: Option<Arc<Grain>>,
    capacity: usize,
    first: usize,
    accepted: usize,
    prepared: usize,
}

/// Consecutive pages of one of a sequence's buffers, those of states being the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageRun {
    pub(crate) buffer: usize,
    pub(crate) pages: PageRange,
}

/// The pages of consecutive rows, in all buffers.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) first_row: usize,
    pub(crate) runs: Vec<PageRun>,
}

/// `runs` in pieces of `most` pages each, or less at the end.
pub(crate) fn cut(runs: &[PageRun], most: u64) -> Vec<Vec<PageRun>> {
    let (mut pieces, mut left) = (Vec::new(), 0);
    for run in runs {
        let (mut start, end) = (run.pages.start.index(), run.pages.end.index());
        while start < end {
            if left == 0 {
                pieces.push(Vec::new());
                left = most;
            }
            let next = end.min(start + left);
            let pages = PageRange::of(start..next);
            if let Some(piece) = pieces.last_mut() {
                piece.push(PageRun { pages, ..*run });
            }
            left -= next - start;
            start = next;
        }
    }
    pieces
}

impl Sequence {
    pub(crate) fn new(
        store: Box<dyn Store>,
        pool: Pool,
        geometry: Geometry,
        capacity: usize,
    ) -> Self {
        Self {
            store,
            states: State::of(&pool, &geometry),
            pool,
            windows: geometry.has_windows(),
            resumable: None,
            geometry,
            capacity,
            first: 0,
            accepted: 0,
            prepared: 0,
        }
    }

    /// Tokens so far: the position of the next one.
    #[must_use]
    pub fn len(&self) -> usize {
        self.accepted
    }

    /// Whether no token has been accepted yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.accepted == 0
    }

    /// What each layer keeps.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The first row that a view of `layer` has; above zero once a window has passed rows or they were
    /// released.
    ///
    /// # Panics
    /// When the layer reads no rows.
    #[must_use]
    pub fn first_held(&self, layer: Layer) -> usize {
        let rows = self.geometry.rows(layer);
        let (_, rows) = rows.expect("a layer that keeps rows, or reads another's");
        self.seen().first_row(rows.keep)
    }

    /// The fewest tokens, other than none, that [`Sequence::truncate`] and [`Sequence::share_prefix`]
    /// can go back to: rows that those after them see have been given back. Where layers keep a state,
    /// which is that after all tokens, as many as there are.
    #[must_use]
    pub fn fewest_tokens(&self) -> usize {
        if !self.states.is_empty() {
            return self.accepted;
        }
        self.first.max(self.store.fewest_tokens(self.first))
    }

    /// The rows that the next tokens may read.
    fn seen(&self) -> Useful {
        Useful {
            first: self.first,
            next: self.accepted,
        }
    }

    /// The rows that the next tokens may read, or those of another sequence that goes on from here.
    fn useful(&self) -> Useful {
        let resumable = self.resumable.as_ref();
        Useful {
            next: resumable.map_or(self.accepted, |grain| grain.resume_position(self.accepted)),
            ..self.seen()
        }
    }

    /// Tokens the sequence was made for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Rows ready for the step under way.
    #[must_use]
    pub fn prepared(&self) -> usize {
        self.prepared
    }

    /// Makes room for `rows` more rows in every layer, in one batch, and for states, in another. Allocates nothing when memory is
    /// there already. What windows have passed is given back first, as by
    /// [`Sequence::release_passed`].
    ///
    /// # Errors
    /// [`KvError::ContextFull`]; [`KvError::Pages`] or [`KvError::NotNow`] when memory cannot be had;
    /// [`KvError::RowsLost`] once [`Sequence::has_lost_rows`], [`KvError::StateSpent`] once
    /// [`Sequence::is_spent`]. Every row and state is as it was then, and so is the memory, unless a policy that copies to grow was
    /// half-way through its layers, or there was some for rows and none for states.
    pub fn prepare(&mut self, rows: usize) -> Result<(), KvError> {
        self.prepare_step(rows, State::prepare)
    }

    /// [`Sequence::prepare`] for a step whose last tokens may turn out not to be what follows: it leaves states as they are,
    /// so that [`Sequence::rewind`] can go back to its first ones. Takes a second place for all states and room for
    /// [`Geometry::state_input_elements`] of each token, as far as they are not there yet, and nothing where no layer keeps a state.
    ///
    /// # Errors
    /// As [`Sequence::prepare`].
    ///
    /// # Panics
    /// When there are states and nobody knows what changes them, or for more than [`Geometry::MOST_REWOUND_TOKENS`] rows of
    /// these.
    pub fn prepare_to_rewind(&mut self, rows: usize) -> Result<(), KvError> {
        let fits = self.states.is_empty() || rows <= Geometry::MOST_REWOUND_TOKENS;
        assert!(
            self.geometry.can_rewind() && fits,
            "a step of {rows} tokens that can go back"
        );
        self.prepare_step(rows, |state| state.prepare_beside(rows))
    }

    fn prepare_step(
        &mut self,
        rows: usize,
        prepare: impl Fn(&mut State) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        if rows > self.capacity - self.accepted {
            return Err(KvError::ContextFull {
                capacity: self.capacity,
                held: self.accepted,
                requested: rows,
            });
        }
        self.end_step();
        if self.is_spent() && rows > 0 {
            return Err(KvError::StateSpent);
        }
        // What stays because the device refuses costs memory and no more.
        self.release_passed().ok();
        let prepared = self.store.prepare(self.accepted..self.accepted + rows);
        if self.has_lost_rows() {
            return Err(KvError::RowsLost);
        }
        prepared?;
        if rows > 0 {
            let prepared = self.states.iter_mut().try_for_each(prepare);
            if self.has_lost_rows() {
                return Err(KvError::RowsLost);
            }
            if prepared.is_err() {
                self.end_step();
            }
            prepared?;
        }
        self.prepared = rows;
        Ok(())
    }

    /// Lends the state of one layer to whoever computes the prepared tokens: what it is after the accepted
    /// ones, all zeros before the first, to be left as what it is after the prepared ones. A layer that
    /// keeps none has an empty one.
    ///
    /// From now on the state is that of the prepared tokens: all of them are accepted, or the sequence
    /// [is spent](Sequence::is_spent). After [`Sequence::prepare_to_rewind`] what it was is there too, and stays.
    ///
    /// # Panics
    /// When no tokens are prepared.
    pub fn state(&mut self, layer: Layer) -> StateView<'_> {
        assert!(self.prepared > 0, "a state is lent to a step");
        match self.state_of(layer) {
            Some(state) => state.lend(layer),
            None => StateView::from(<&mut [f32]>::default()),
        }
    }

    /// Those among which the state of `layer` is, if it keeps one.
    fn state_of(&mut self, layer: Layer) -> Option<&mut State> {
        let location = self.geometry.location(layer);
        self.states.iter_mut().find(|state| state.is_at(location))
    }

    /// Lends the place for what the prepared tokens change the state of one layer by, `[prepared,
    /// state_input_elements]`; `None` unless [`Sequence::prepare_to_rewind`] has prepared them. Whoever computes them writes it,
    /// and after [`Sequence::rewind`] reads it.
    pub fn state_inputs(&mut self, layer: Layer) -> Option<&mut [f32]> {
        let tokens = self.prepared;
        let state = self.state_of(layer).filter(|_| tokens > 0)?;
        state.inputs(layer, tokens)
    }

    /// Makes the first `rows` of the prepared tokens all of the step, for which states are then computed once more, from what
    /// they were before it and [`Sequence::state_inputs`]. Returns whether there is anything to compute: not where no layer
    /// keeps a state.
    ///
    /// # Panics
    /// For no rows or more than are prepared, and where states were not prepared for it.
    pub fn rewind(&mut self, rows: usize) -> bool {
        assert!(
            (1..=self.prepared).contains(&rows),
            "{rows} of {} prepared rows",
            self.prepared
        );
        let rewound = self.states.iter_mut().all(State::rewind);
        assert!(rewound, "a step that can go back");
        self.prepared = rows;
        !self.states.is_empty()
    }

    /// Bytes that [`Sequence::prepare_to_rewind`] takes for `rows` rows beside theirs.
    #[must_use]
    pub fn rewind_bytes_to_take(&self, rows: usize) -> usize {
        let states = self.states.iter();
        states.map(|state| state.beside_bytes_to_take(rows)).sum()
    }

    /// Whether [`Sequence::rewind`] has to come before fewer than the prepared tokens are accepted.
    #[must_use]
    pub fn is_to_be_rewound(&self) -> bool {
        self.states.iter().any(State::is_beside)
    }

    /// Gives back what it takes for states to be able to go back, but in a step that may. Returns the bytes.
    pub fn release_rewind_memory(&mut self) -> u64 {
        self.states.iter_mut().map(State::release_beside).sum()
    }

    /// Bytes that [`Sequence::release_rewind_memory`] would give back.
    #[must_use]
    pub fn rewind_memory(&self) -> u64 {
        self.states.iter().map(State::beside_bytes).sum()
    }

    /// Lends the states of all layers that are not [the host's](Geometry::host_layers) to work that is submitted to the
    /// device of the pool, which finds them by [`Sequence::device_state`]: the same as [`Sequence::state`] of each.
    ///
    /// # Panics
    /// When there are such states, and no tokens are prepared.
    pub fn lend_device_states(&mut self) {
        let mut states = self.states.iter_mut();
        if let Some(state) = states.find(|state| state.is_at(Location::Own)) {
            assert!(self.prepared > 0, "a state is lent to a step");
            state.lend_all();
        }
    }

    /// Where the device of the pool has the state of a layer: `None` where it keeps none, and before anything was
    /// prepared.
    #[must_use]
    pub fn device_state(&self, layer: Layer) -> Option<DeviceState> {
        let mut states = self.states.iter();
        let state = states.find(|state| state.is_at(Location::Own))?;
        let (address, bytes) = state.on_device(layer)?;
        Some(DeviceState {
            address,
            bytes,
            is_fresh: self.accepted == 0,
        })
    }

    /// Whether a step has changed the states of layers and was not accepted whole. Nothing more can be
    /// computed then before [`Sequence::truncate`] to 0.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        self.states.iter().any(State::is_spent)
    }

    /// Bytes that the next step takes for states: all of them before the first token and while others may
    /// have the same, and otherwise none.
    #[must_use]
    pub fn state_bytes_to_take(&self) -> usize {
        let states = self.states.iter().filter(|state| state.is_to_be_copied());
        states.map(State::bytes).sum()
    }

    /// A step is over, none of whose tokens count, if one is under way.
    fn end_step(&mut self) {
        for state in &mut self.states {
            state.settle(0, self.prepared.max(1));
        }
    }

    /// Lends the prepared rows of one layer, run by run, to whoever computes what they are to hold: keys,
    /// then values, unless those are part of keys. The runs of a side follow one another; the first prepared row is row 0.
    ///
    /// # Panics
    /// When the layer has no rows of its own.
    pub fn write(&mut self, layer: Layer, mut write: impl FnMut(Side, RunMut<'_>)) {
        let Some(LayerCache::Rows(own)) = self.geometry.layers().get(layer.0) else {
            panic!("layer {} has no rows of its own", layer.0);
        };
        let rows = self.accepted..self.accepted + self.prepared;
        if rows.is_empty() {
            return;
        }
        for &side in own.stored_sides() {
            let mut write = |run: RunMut<'_>| write(side, run);
            self.store.write(layer, side, rows.clone(), &mut write);
        }
    }

    /// All rows that one side of one layer reads, its own or another's, as far as they are held,
    /// accepted and prepared, as the kernels read them. They have the names of their positions, and
    /// begin at [`Sequence::first_held`]: rows that were released are out of reach.
    ///
    /// # Panics
    /// When the layer reads none.
    #[must_use]
    pub fn view(&self, layer: Layer, side: Side) -> View<'_> {
        let rows = self.first_held(layer)..self.accepted + self.prepared;
        self.store.view(layer, side, rows)
    }

    /// Where the device of the pool has the rows that one side of a layer reads, its own or another's: work that is
    /// submitted to that device reads those from [`Sequence::first_held`] to the last that is prepared, and writes those
    /// that are prepared. `None` where rows do not lie at equal distances.
    ///
    /// # Panics
    /// When the layer reads none.
    #[must_use]
    pub fn device_rows(&self, layer: Layer, side: Side) -> Option<DeviceRows> {
        self.store.device_rows(layer, side)
    }

    /// How many of a layer's first rows this sequence and `other` have in the same memory, which neither writes to any
    /// more: the rows of tokens with which both begin. 0 where the policy shares no memory, or a window has passed them.
    ///
    /// # Panics
    /// When the layer reads none.
    #[must_use]
    pub fn rows_in_common(&self, other: &Self, layer: Layer) -> usize {
        let held = self.accepted.min(other.accepted);
        let rows = |side: Side| {
            let (mine, tiles) = self.store.flat_rows(layer, side)?;
            let (others, _) = other.store.flat_rows(layer, side)?;
            let pages = mine.pages_in_common(others);
            let bytes = mine.pool().page_size().bytes_of(pages);
            Some(tiles.tokens_within(to_usize(bytes)).min(held))
        };
        let sides = Side::BOTH.map(|side| rows(side).unwrap_or(0));
        sides[0].min(sides[1])
    }

    /// Records that the first `rows` prepared rows are valid. Where states were lent and `rows` are not all
    /// of them, the sequence [is spent](Sequence::is_spent).
    ///
    /// # Panics
    /// When more rows are accepted than were prepared.
    pub fn accept(&mut self, rows: usize) {
        assert!(
            rows <= self.prepared,
            "{rows} rows accepted of {} prepared",
            self.prepared
        );
        for state in &mut self.states {
            state.settle(rows, self.prepared);
        }
        self.accepted += rows;
        self.prepared = 0;
    }

    /// Gives back the pages that hold only rows which every later query's window has passed: a layer
    /// with a window of `n` rows keeps the `n - 1` before the next position. One batch when there are
    /// any such pages, and nothing otherwise. Where the policy cannot, rows stay.
    ///
    /// # Errors
    /// [`KvError::Pages`] when the device refuses. The pages stay then until the next call.
    pub fn release_passed(&mut self) -> Result<(), KvError> {
        match self.windows {
            true => self.store.release(self.useful()),
            false => Ok(()),
        }
    }

    /// Forgets every token from `len` on and gives back the memory that held only those. What other
    /// sequences share stays theirs.
    ///
    /// # Errors
    /// [`KvError::Released`] or [`KvError::StatePassed`] below [`Sequence::fewest_tokens`], unless `len` is
    /// 0; [`KvError::Pages`] when the device refuses. The sequence is unchanged then.
    pub fn truncate(&mut self, len: usize) -> Result<(), KvError> {
        if len >= self.accepted {
            // A first step that was not accepted leaves no token and may have changed states.
            if len == 0 {
                self.clear_states();
            }
            return Ok(());
        }
        match len {
            0 => {
                self.store.clear()?;
                self.clear_states();
            }
            _ => self.store.truncate(self.check_held(len)?)?,
        }
        self.first = self.first.min(len);
        self.accepted = len;
        self.prepared = 0;
        Ok(())
    }

    /// Makes states zero, as they are before the first token. A step that has them is over.
    fn clear_states(&mut self) {
        for state in &mut self.states {
            state.clear();
            self.prepared = 0;
        }
    }

    /// Gives up every row before `position`, as a window does that has passed it, and gives back the
    /// memory that held only those. The positions of the tokens stay what they are.
    ///
    /// # Errors
    /// [`KvError::NotHeld`] when `position` is past the accepted tokens, [`KvError::Pages`] when the
    /// device refuses. The sequence is unchanged then.
    pub fn release_before(&mut self, position: usize) -> Result<(), KvError> {
        if position > self.accepted {
            return Err(KvError::NotHeld {
                requested: position,
                held: self.accepted,
            });
        }
        if position > self.first {
            let useful = Useful {
                first: position,
                ..self.useful()
            };
            self.store.release(useful)?;
            self.first = position;
        }
        Ok(())
    }

    /// A second sequence with the same tokens, independent of this one from here on. Pages are shared
    /// where the policy and the device can, and at most the partly filled last ones are copied;
    /// otherwise all rows are, and [`KvReport::copied_bytes`] says so. Rows that are prepared stay
    /// with this sequence.
    ///
    /// # Errors
    /// [`KvError::Pages`] or [`KvError::NotNow`] when memory or address space cannot be had,
    /// [`KvError::StateSpent`] in the middle of a step that has changed states, and once it
    /// [is spent](Sequence::is_spent). This sequence is unchanged then.
    pub fn fork(&mut self) -> Result<Self, KvError> {
        self.duplicate(self.accepted)
    }

    /// A new sequence that begins with this one's first `tokens` tokens, shared as [`Sequence::fork`]
    /// does it. This one may be in the middle of a step.
    ///
    /// # Errors
    /// [`KvError::NotHeld`] for more tokens than are accepted, [`KvError::Released`] or
    /// [`KvError::StatePassed`] below [`Sequence::fewest_tokens`], and as [`Sequence::fork`]. This sequence
    /// is unchanged then.
    pub fn share_prefix(&mut self, tokens: usize) -> Result<Self, KvError> {
        if tokens > self.accepted {
            return Err(KvError::NotHeld {
                requested: tokens,
                held: self.accepted,
            });
        }
        self.duplicate(self.check_held(tokens)?)
    }

    fn duplicate(&mut self, tokens: usize) -> Result<Self, KvError> {
        let in_step = self.prepared > 0;
        let states = self.states.iter_mut();
        let states = states.map(|state| state.duplicate(in_step));
        let states = states.collect::<Result<_, KvError>>()?;
        Ok(Self {
            store: self.store.duplicate(self.first..tokens)?,
            states,
            pool: self.pool.clone(),
            geometry: self.geometry.clone(),
            windows: self.windows,
            resumable: self.resumable.clone(),
            capacity: self.capacity,
            first: self.first,
            accepted: tokens,
            prepared: 0,
        })
    }

    /// Keeps the pages of `rows`, which are accepted, in the layers that keep all rows; `None` where
    /// the policy cannot.
    pub(crate) fn pin_group(&mut self, rows: Range<usize>) -> Result<Option<Pins>, KvError> {
        debug_assert!(rows.end <= self.accepted, "only accepted rows are kept");
        self.store.pin(&|keep| match keep {
            Keep::All => rows.clone(),
            Keep::Window(_) => 0..0,
        })
    }

    /// Keeps the pages of windows that a sequence takes which goes on at `next`, as far as accepted rows
    /// fill them before `end`; `None` where the policy cannot, or a window has passed them.
    pub(crate) fn pin_windows(&mut self, next: usize, end: usize) -> Result<Option<Pins>, KvError> {
        debug_assert!(end <= self.accepted, "only accepted rows are kept");
        self.store.pin(&|keep| match keep {
            Keep::All => 0..0,
            Keep::Window(_) => keep.first_seen(next)..end,
        })
    }

    /// Keeps the pages of states as they are after the accepted tokens; `None` where that cannot be, or
    /// no layer keeps one.
    pub(crate) fn pin_states(&mut self) -> Result<Option<Vec<PagePin>>, KvError> {
        debug_assert!(self.prepared == 0, "between steps");
        let mut all = Vec::new();
        for state in &mut self.states {
            let Some(pins) = state.pin()? else {
                return Ok(None);
            };
            all.extend(pins);
        }
        Ok(Some(all).filter(|all| !all.is_empty()))
    }

    /// Ends a step that has left states as they were.
    fn end_beside(&mut self) {
        if self.is_to_be_rewound() {
            self.end_step();
            self.prepared = 0;
        }
    }

    /// Takes kept pages as the first `tokens` tokens of this empty sequence: those of groups and, where
    /// layers have windows or keep states, those of a resume point.
    pub(crate) fn adopt(
        &mut self,
        groups: &[&Pins],
        point: Option<&Pins>,
        tokens: usize,
    ) -> Result<(), KvError> {
        debug_assert!(
            self.is_empty() && self.prepared == 0,
            "adopted before anything else"
        );
        self.store.adopt(groups, point, tokens)?;
        let mut pins = point.map_or(&[][..], Pins::states);
        for state in self.states.iter_mut().filter(|_| point.is_some()) {
            let (of_it, others) = pins.split_at(state.pages());
            state.adopt(of_it)?;
            pins = others;
        }
        self.accepted = tokens;
        Ok(())
    }

    /// Prepares to have its pages moved out, but for those that hold nothing but the rows before `from` which all
    /// later tokens see: these it lets go of, others have them. `None` where it cannot be moved: another policy holds
    /// its memory, rows were released or lost, or states are not those after the accepted tokens.
    ///
    /// Returns the pages, blocks of about `block_rows` rows one after the other, the last with those of windows and
    /// states too. Until all of them are back it is not used otherwise.
    pub(crate) fn leave(
        &mut self,
        from: usize,
        block_rows: usize,
    ) -> Result<Option<Vec<Block>>, KvError> {
        self.end_beside();
        let settled = self.states.iter().all(State::is_settled);
        if self.store.mapped_pages().is_none() || !settled || self.first > 0 || self.is_empty() {
            return Ok(None);
        }
        self.prepared = 0;
        self.release_rewind_memory();
        self.store.truncate(self.accepted)?;
        let mapped = self.store.mapped_pages().unwrap_or_default();
        let mut starts = self.store.first_pages(from);
        for (index, (pages, &start)) in mapped.iter().zip(&starts).enumerate() {
            let others = PageRange::of(pages.start.index()..start);
            if let Some(buffer) = self.store.buffer_mut(index).filter(|_| !others.is_empty()) {
                buffer.unmap(others)?;
            }
        }
        let mut blocks = Vec::new();
        let mut first_row = from;
        loop {
            let next = first_row + block_rows;
            let last = next >= self.accepted;
            let ends: Vec<u64> = match last {
                true => mapped.iter().map(|pages| pages.end.index()).collect(),
                false => self.store.first_pages(next),
            };
            let runs = starts.iter().zip(&ends).enumerate();
            let runs = runs.map(|(buffer, (&start, &end))| PageRun {
                buffer,
                pages: PageRange::of(start..end),
            });
            blocks.push(Block {
                first_row,
                runs: runs.filter(|run| !run.pages.is_empty()).collect(),
            });
            if last {
                break;
            }
            (starts, first_row) = (ends, next);
        }
        let states = self.states.iter().filter_map(State::buffer).enumerate();
        if let Some(last) = blocks.last_mut() {
            last.runs.extend(states.map(|(index, buffer)| PageRun {
                buffer: mapped.len() + index,
                pages: all_pages(buffer),
            }));
        }
        Ok(Some(blocks))
    }

    /// The pages that going on takes, all of them; `None` where they cannot be had one by one, or states are not those
    /// after the accepted tokens. A step that was prepared is over.
    pub(crate) fn image(&mut self) -> Result<Option<Vec<PageRun>>, KvError> {
        self.end_beside();
        let settled = self.states.iter().all(State::is_settled);
        if self.is_empty() || !settled || self.first > 0 {
            return Ok(self
                .store
                .needed_pages(0)
                .filter(|_| self.is_empty())
                .map(|_| Vec::new()));
        }
        self.prepared = 0;
        let pages = self.store.needed_pages(self.accepted);
        Ok(pages.map(|pages| self.runs(&pages)))
    }

    /// Puts memory behind the pages that an image of `tokens` tokens has, into this empty sequence.
    pub(crate) fn begin_image(&mut self, tokens: usize) -> Result<Option<Vec<PageRun>>, KvError> {
        let Some(pages) = self.store.needed_pages(tokens) else {
            return Ok(None);
        };
        self.store.make_needed(tokens)?;
        self.states.iter_mut().try_for_each(State::prepare)?;
        Ok(Some(self.runs(&pages)))
    }

    /// The pages are filled: those are the tokens there are.
    pub(crate) fn end_image(&mut self, tokens: usize) {
        self.accepted = tokens;
    }

    /// `pages` of the buffers of rows, and all of states.
    fn runs(&self, pages: &[PageRange]) -> Vec<PageRun> {
        let states = self.states.iter().filter_map(State::buffer).map(all_pages);
        let pages = pages.iter().copied().chain(states).enumerate();
        let runs = pages.map(|(buffer, pages)| PageRun { buffer, pages });
        runs.filter(|run| !run.pages.is_empty()).collect()
    }

    /// Copies `bytes` to the pages of `run`.
    pub(crate) fn fill_pages(&mut self, run: PageRun, bytes: &[u8]) -> Result<(), KvError> {
        let start = run.pages.start.index() * self.pool.page_size().bytes();
        match self.buffer_mut(run.buffer) {
            Some(buffer) => Ok(buffer.write(start, bytes)?),
            None => Ok(()),
        }
    }

    fn buffer(&self, index: usize) -> Option<&Buffer> {
        let rows = self.store.buffer_rows().len();
        match index.checked_sub(rows) {
            None => self.store.buffers().get(index).copied(),
            Some(index) => self.states.get(index).and_then(State::buffer),
        }
    }

    fn buffer_mut(&mut self, index: usize) -> Option<&mut Buffer> {
        let rows = self.store.buffer_rows().len();
        match index.checked_sub(rows) {
            None => self.store.buffer_mut(index),
            Some(index) => self.states.get_mut(index).and_then(State::buffer_mut),
        }
    }

    /// Bytes of one of its pages.
    pub(crate) fn page_bytes(&self) -> usize {
        self.pool.page_size().bytes() as usize
    }

    /// Whether pages may be zeros because a file that is mapped cannot be read any more.
    pub(crate) fn has_lost_files(&self) -> bool {
        self.pool.has_lost_files()
    }

    /// Copies the pages of `run` to `bytes`.
    pub(crate) fn copy_pages(&self, run: PageRun, bytes: &mut [u8]) -> Result<(), KvError> {
        let start = run.pages.start.index() * self.pool.page_size().bytes();
        match self.buffer(run.buffer) {
            Some(buffer) => Ok(buffer.read(start, bytes)?),
            None => Ok(()),
        }
    }

    /// [`Self::copy_pages`], with zeros where no accepted token has a row: there may be what another sequence had.
    pub(crate) fn copy_rows(&self, run: PageRun, bytes: &mut [u8]) -> Result<(), KvError> {
        self.copy_pages(run, bytes)?;
        let start = run.pages.start.index() as usize * self.page_bytes();
        let held = self.store.buffer_rows().get(run.buffer);
        let without = held.map(|held| held.bytes_without_rows(self.accepted));
        for range in without.into_iter().flatten() {
            let [from, to] = [range.start, range.end].map(|at| at.saturating_sub(start));
            let to = to.min(bytes.len());
            bytes[from.min(to)..to].fill(0);
        }
        Ok(())
    }

    /// Gives back the pages of `run`, whose bytes are elsewhere now.
    pub(crate) fn move_out(&mut self, run: PageRun) -> Result<(), KvError> {
        match self.buffer_mut(run.buffer) {
            Some(buffer) => Ok(buffer.swap_out_stored(run.pages)?),
            None => Ok(()),
        }
    }

    /// Puts memory that holds `bytes` behind the pages of `run` again.
    pub(crate) fn move_in(&mut self, run: PageRun, bytes: &[u8]) -> Result<(), KvError> {
        let page_bytes = self.page_bytes();
        let Some(buffer) = self.buffer_mut(run.buffer) else {
            return Ok(());
        };
        let first = run.pages.start.index();
        let moved = buffer.swap_in(run.pages, |page, memory| {
            let at = (page.index() - first) as usize * page_bytes;
            memory.copy_from_slice(&bytes[at..][..page_bytes]);
            Ok::<(), Infallible>(())
        });
        // Whatever the reason, not all of its pages are there.
        moved.map_err(|_| KvError::RowsLost)
    }

    /// Takes the pages of `groups` as those of the rows before `row`. Of those that were moved out, from the row
    /// `moved` on, the ones that come back later are those of the rest.
    pub(crate) fn come_back(
        &mut self,
        groups: &[&Pins],
        moved: usize,
        row: usize,
    ) -> Result<(), KvError> {
        self.store.come_back(groups, moved, row)?;
        self.states.iter_mut().for_each(State::come_back);
        Ok(())
    }

    /// Lets go of the pages that it [came back](Sequence::come_back) with.
    pub(crate) fn leave_again(&mut self, moved: usize, row: usize) -> Result<(), KvError> {
        let [starts, moved, ends] = [0, moved, row].map(|row| self.store.first_pages(row));
        let places = starts.into_iter().zip(moved).zip(ends);
        for (index, ((start, moved), end)) in places.enumerate() {
            let Some(buffer) = self.store.buffer_mut(index) else {
                continue;
            };
            if start < moved {
                buffer.unmap(PageRange::of(start..moved))?;
            }
            if moved < end {
                buffer.swap_out_stored(PageRange::of(moved..end))?;
            }
        }
        Ok(())
    }

    /// Of each buffer, the place of the first page that is not of the groups before `row`.
    pub(crate) fn first_pages(&self, row: usize) -> Vec<u64> {
        self.store.first_pages(row)
    }

    /// From now on windows keep what a sequence takes that goes on at the last end of a group.
    pub(crate) fn keep_resumable(&mut self, grain: Arc<Grain>) {
        self.resumable = grain.has_windows().then_some(grain);
    }

    /// `len`, unless a sequence of that many tokens would need rows that were released or a state that is
    /// no more.
    fn check_held(&self, len: usize) -> Result<usize, KvError> {
        if !self.states.is_empty() && len != self.accepted {
            return Err(KvError::StatePassed {
                held: self.accepted,
                requested: len,
            });
        }
        let first = self.fewest_tokens();
        match len < first {
            true => Err(KvError::Released {
                first,
                requested: len,
            }),
            false => Ok(len),
        }
    }

    /// Whether rows are gone because the device failed in the middle of a change and then to undo it.
    /// Nothing can be read or computed any more; what other sequences share is still theirs.
    #[must_use]
    pub fn has_lost_rows(&self) -> bool {
        self.store.has_lost_rows() || self.states.iter().any(State::is_lost)
    }

    /// The buffers that are this sequence's alone, for [`Pool::verify`]: of rows none where they lie in
    /// blocks that sequences have in common.
    #[must_use]
    pub fn buffers(&self) -> Vec<&Buffer> {
        let mut buffers = self.store.buffers();
        buffers.extend(self.states.iter().flat_map(State::buffers));
        buffers
    }

    /// Where this sequence's bytes are.
    #[must_use]
    pub fn report(&self) -> KvReport {
        let states = self.states.iter().map(State::usage);
        let usage = states.fold(self.store.usage(), Usage::plus);
        let state_bytes = self.states.iter().map(State::held_bytes).sum();
        let bytes_per_token = self.geometry.bytes_per_token();
        let seen = self.seen();
        let held: usize = self.geometry.row_bytes_where(|keep| {
            let first = seen.first_row(keep);
            self.accepted.saturating_sub(first)
        });
        KvReport {
            bytes_per_token,
            reserved_bytes: usage.reserved_bytes,
            committed_bytes: usage.committed_bytes,
            shared_bytes: usage.shared_bytes,
            unique_bytes: usage.committed_bytes - usage.shared_bytes,
            state_bytes,
            slack_bytes: usage.committed_bytes.saturating_sub(held + state_bytes),
            peak_committed_bytes: usage.peak_committed_bytes,
            copied_bytes: usage.copied_bytes,
            zeroed_bytes: usage.zeroed_bytes,
            resizes: usage.resizes,
            map_calls: self.pool.ledger().counts.batches,
            dense_bytes: self.capacity * bytes_per_token + self.geometry.state_bytes(),
        }
    }
}
