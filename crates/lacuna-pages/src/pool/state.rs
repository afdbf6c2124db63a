//! The pool's inside: the device, the books and the three steps of every call. *Plan* chooses
//! pages and works out operations, *do* hands them to the device in one batch, *record* changes the
//! books and tables. Only *do* can fail after anything has been touched, and it is undone then.

use std::collections::BTreeMap;

use super::allocator::{Allocator, Budget, BufferId, Claim, Memory, Pressure, Search};
use super::books::Books;
use super::config::{PoolConfig, Recycle};
use super::heap::{Heap, Purpose};
use super::plan::{Contents, Edit, Moves, Plan, place};
use crate::buffer::Buffer;
use crate::device::{
    BatchError, Commitment, Device, DeviceError, Fence, FilePart, HeapId, Location, Operation,
    Ordering, Patience, SpaceId,
};
use crate::ledger::Ledger;
use crate::table::Slot;
use crate::units::{PageCount, PhysicalPage};
use crate::{Error, VirtualPage};

/// Everything behind the pool's lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) device: Box<dyn Device>,
    pub(crate) books: Books,
    pub(crate) config: PoolConfig,
    /// Reservations that the device refused to release, with the pages still mapped there.
    orphans: BTreeMap<SpaceId, Orphan>,
}

/// A buffer that was dropped and whose reservation still stands.
#[derive(Debug)]
struct Orphan {
    buffer: BufferId,
    pages: Vec<PhysicalPage>,
    readers: Fence,
}

impl State {
    /// A heap of a file takes a descriptor, of which a process has 1,024 by default; a server needs most of them for
    /// connections.
    const MOST_FILES: usize = 256;
    /// As many as a heap of memory may have.
    const MOST_FILE_PAGES: u64 = 1 << 24;

    pub(crate) fn new(device: Box<dyn Device>, config: PoolConfig) -> Self {
        let commitment = device.capabilities().commitment;
        let allocator = Allocator::new(commitment, config.heap_pages());
        let books = Books::new(allocator, config.page_size);
        Self {
            device,
            books,
            config,
            orphans: BTreeMap::new(),
        }
    }

    pub(super) fn commitment(&self) -> Commitment {
        self.device.capabilities().commitment
    }

    /// When pages detached at `fence` may be used again (M6): at once where whatever comes later
    /// also happens later.
    fn reusable(&self, fence: Fence) -> Fence {
        match self.device.capabilities().ordering {
            Ordering::Immediate | Ordering::Queue => fence,
            Ordering::InOrder => Fence::DONE,
        }
    }

    pub(super) fn moves(&self) -> Moves {
        match self.commitment() {
            Commitment::WithReservation => Moves::Fixed,
            Commitment::PerPage | Commitment::PerHeap => Moves::Mapped,
        }
    }

    /// Pages that may be committed under the limit.
    fn headroom(&self) -> u64 {
        let committed = self.books.allocator.committed();
        match self.config.limit {
            Some(limit) => (limit.get() / self.config.page_size.bytes()).saturating_sub(committed),
            None => u64::MAX - committed,
        }
    }

    /// Pages of heaps that the device can still make beside those of this pool.
    fn heap_room(&self, location: Location) -> u64 {
        let per_heap = self.device.commitment_at(location) == Commitment::PerHeap;
        match (location, self.device.capabilities().heap_limit) {
            (Location::Own, Some(limit)) if per_heap => {
                let heaps = self.books.allocator.memory_heaps_at(location).count() as u64;
                limit.saturating_sub(heaps) * u64::from(self.config.heap_pages())
            }
            _ => u64::MAX,
        }
    }

    /// Pages of one kind that nobody owns or that may be committed under the limit, by whole heaps where memory
    /// comes by the heap. What lies idle of the other kind is given back for them.
    fn obtainable(&self, location: Location) -> u64 {
        let idle = self.books.allocator.idle_at(location);
        let others = self.books.allocator.idle() - idle;
        let headroom = self.headroom().saturating_add(others);
        let fresh = match self.device.commitment_at(location) {
            Commitment::PerHeap => headroom - headroom % u64::from(self.config.heap_pages()),
            Commitment::PerPage | Commitment::WithReservation => headroom,
        };
        fresh.min(self.heap_room(location)).saturating_add(idle)
    }

    pub(crate) fn ledger(&self) -> Ledger {
        self.books
            .ledger(self.config.limit, self.device.capabilities().mapping_limit)
    }

    fn pressure(&self) -> Pressure {
        Pressure::new(
            self.books.regions(),
            self.device.capabilities().mapping_limit,
        )
    }

    // Buffers.

    /// Takes address space for a buffer of `pages`; on devices that commit with it, memory too.
    pub(crate) fn reserve(
        &mut self,
        location: Location,
        pages: PageCount,
    ) -> Result<(BufferId, SpaceId), Error> {
        self.settle();
        if self.commitment() == Commitment::WithReservation {
            self.check_room_for_dense(pages)?;
        }
        self.check_regions(1)?;
        let length = self.config.page_size.bytes_of(pages);
        let space = self.device.reserve_at(location, length)?;
        let buffer = self.books.open(pages, location);
        if self.commitment() == Commitment::WithReservation {
            let heap = Heap::committed(pages.get() as u32, Purpose::Reservation);
            self.books.allocator.add_heap(HeapId(space.0), heap);
        }
        Ok((buffer, space))
    }

    fn check_room_for_dense(&self, pages: PageCount) -> Result<(), Error> {
        if u32::try_from(pages.get()).is_err() {
            return Err(Error::TableMemory { pages });
        }
        let free = self.headroom();
        match pages.get() <= free {
            true => Ok(()),
            false => Err(self.out_of_pages(pages.get(), free)),
        }
    }

    fn check_regions(&self, added: u64) -> Result<(), Error> {
        let in_use = self.books.regions();
        match self.device.capabilities().mapping_limit {
            Some(limit) if in_use.saturating_add(added) > limit => Err(Error::OutOfMappings {
                needed: added,
                in_use,
                limit,
            }),
            _ => Ok(()),
        }
    }

    fn out_of_pages(&self, requested: u64, free: u64) -> Error {
        Error::OutOfPages {
            requested: PageCount::new(requested),
            free: PageCount::new(free),
            limit: self.config.limit,
        }
    }

    /// Ends a buffer whose slots map `pages` and whose readers are done at `readers`. Cannot fail:
    /// what the device refuses is tried again later, and the pages stay owned until then.
    pub(crate) fn release(
        &mut self,
        buffer: BufferId,
        space: SpaceId,
        pages: Vec<PhysicalPage>,
        readers: Fence,
    ) {
        self.orphans.insert(
            space,
            Orphan {
                buffer,
                pages,
                readers,
            },
        );
        self.release_orphans();
        self.settle();
    }

    /// Dropped buffers whose reservations still stand, and the pages mapped there.
    pub(crate) fn orphans(&self) -> impl Iterator<Item = (BufferId, &[PhysicalPage])> {
        self.orphans
            .values()
            .map(|orphan| (orphan.buffer, orphan.pages.as_slice()))
    }

    pub(super) fn release_orphans(&mut self) {
        for (space, orphan) in std::mem::take(&mut self.orphans) {
            let Ok(fence) = self.device.release(space, orphan.readers) else {
                self.orphans.insert(space, orphan);
                continue;
            };
            let fence = self.reusable(fence);
            for page in orphan.pages {
                self.books
                    .record(orphan.buffer, Slot::Sealed(page), Slot::Hole, fence);
            }
            self.books.close(orphan.buffer);
            if self.moves() == Moves::Fixed {
                self.books.allocator.remove_heap(HeapId(space.0));
            }
        }
    }

    // Plan.

    /// Claims a page for each of `wanted`, or none.
    pub(crate) fn plan_fresh(&mut self, plan: &mut Plan, wanted: &[Wanted]) -> Result<(), Error> {
        self.collect(Patience::Poll);
        let result = self.claim_all(plan, wanted);
        if result.is_err() {
            self.abandon(plan);
        }
        result
    }

    fn claim_all(&mut self, plan: &mut Plan, wanted: &[Wanted]) -> Result<(), Error> {
        let requested = wanted.len() as u64;
        if self.moves() == Moves::Mapped {
            self.check_room(wanted)?;
        }
        let pressure = self.pressure();
        if pressure == Pressure::High && self.moves() == Moves::Mapped {
            self.trade_idle_for_headroom(requested);
        }
        let mut budget = Budget {
            fresh: self.headroom(),
            remaining: requested,
            search: Search::Fitting,
            pressure,
        };
        for want in wanted {
            let claim = self.claim(plan, want, &mut budget)?;
            budget.remaining -= 1;
            budget.fresh -= u64::from(claim.memory == Memory::Fresh);
            plan.claims.push(claim);
            plan.edits.push(want.edit(claim, self.config.recycle));
        }
        Ok(())
    }

    /// Whether memory of each kind can be had for all of `wanted` under the limit: what lies idle of the other kind is given
    /// back for it.
    fn check_room(&self, wanted: &[Wanted]) -> Result<(), Error> {
        let allocator = &self.books.allocator;
        let (mut missing, mut spare, mut fits) = (0u64, 0, true);
        for location in Location::ALL {
            let here = wanted
                .iter()
                .filter(|want| allocator.location(want.buffer) == location);
            let (here, idle) = (here.count() as u64, allocator.idle_at(location));
            let fresh = here.saturating_sub(idle);
            fits &= fresh <= self.heap_room(location);
            missing += match self.device.commitment_at(location) {
                Commitment::PerHeap => fresh.next_multiple_of(u64::from(self.config.heap_pages())),
                Commitment::PerPage | Commitment::WithReservation => fresh,
            };
            spare += idle.saturating_sub(here);
        }
        let location = wanted
            .first()
            .map(|want| allocator.location(want.buffer))
            .unwrap_or_default();
        match fits && missing <= self.headroom().saturating_add(spare) {
            true => Ok(()),
            false => Err(self.out_of_pages(wanted.len() as u64, self.obtainable(location))),
        }
    }

    fn claim(
        &mut self,
        plan: &mut Plan,
        want: &Wanted,
        budget: &mut Budget,
    ) -> Result<Claim, Error> {
        if self.moves() == Moves::Fixed {
            let page = PhysicalPage {
                heap: HeapId(want.space.0),
                index: want.page.index() as u32,
            };
            return Ok(self.books.allocator.claim_exactly(want.buffer, page));
        }
        let location = self.books.allocator.location(want.buffer);
        loop {
            if let Ok(claim) = self.books.allocator.claim(want.buffer, budget) {
                return Ok(claim);
            }
            plan.heaps.extend(self.add_heap(location, budget)?);
        }
    }

    /// Gives idle memory back so that `requested` pages can be committed next to their neighbours
    /// instead of taken from wherever memory lies idle.
    fn trade_idle_for_headroom(&mut self, requested: u64) {
        let missing = requested.saturating_sub(self.headroom());
        self.shrink_to(self.books.allocator.idle().saturating_sub(missing));
    }

    /// Makes another heap. When there can be none, the search takes whatever there is, and tails are
    /// dissolved so that it finds all of it.
    fn add_heap(
        &mut self,
        location: Location,
        budget: &mut Budget,
    ) -> Result<Option<HeapId>, Error> {
        let pages = self.config.heap_pages();
        let per_heap = self.device.commitment_at(location) == Commitment::PerHeap;
        let needed = if per_heap { u64::from(pages) } else { 1 };
        let offsets = |state: &Self| {
            let mut heaps = state.books.allocator.memory_heaps_at(location);
            heaps.any(|(_, heap)| heap.available_count() > 0)
        };
        if budget.fresh < needed {
            let given = self.give_back_beside(location, needed - budget.fresh);
            budget.fresh += given;
            if given > 0 && !per_heap && offsets(self) {
                return Ok(None);
            }
        }
        let room = budget.fresh >= needed && self.heap_room(location) >= needed;
        let made = room.then(|| self.device.create_heap_at(location, self.config.heap_bytes));
        let error = match made {
            Some(Ok(id)) => {
                let heap = match per_heap {
                    true => Heap::committed(pages, Purpose::Pool),
                    false => Heap::uncommitted(pages),
                };
                self.books.allocator.add_heap(id, heap.at(location));
                // It is committed by now.
                budget.fresh -= if per_heap { needed } else { 0 };
                return Ok(Some(id));
            }
            Some(Err(error)) => Error::from(error),
            None => self.out_of_pages(budget.remaining, self.obtainable(location)),
        };
        budget.search = Search::Anything;
        self.books.allocator.dissolve_all_tails();
        let idle = self.books.allocator.idle_at(location) > 0;
        match idle || (budget.fresh > 0 && offsets(self)) {
            true => Ok(None),
            false => Err(error),
        }
    }

    /// Enters part of a file as a heap, all of whose pages are pinned once.
    pub(crate) fn open_heap(&mut self, part: FilePart) -> Result<Vec<PhysicalPage>, Error> {
        let pages = part.length.get() / self.config.page_size.bytes();
        if pages == 0 || pages > Self::MOST_FILE_PAGES {
            return Err(Error::Length {
                length: part.length,
            });
        }
        if self.books.allocator.files() >= Self::MOST_FILES {
            let device = self.device.capabilities().name;
            let what = "map one more file";
            return Err(Error::Unsupported { device, what });
        }
        self.collect(Patience::Poll);
        let free = self.obtainable(Location::Own);
        if pages <= free {
            self.trade_idle_for_headroom(pages);
        }
        if pages > self.headroom() {
            return Err(self.out_of_pages(pages, free));
        }
        let heap = self.device.open_heap(part)?;
        let indices = 0..pages as u32;
        self.books.allocator.add_file(heap, pages as u32);
        let pages = indices.map(|index| PhysicalPage { heap, index });
        let pages: Vec<PhysicalPage> = pages.collect();
        pages.iter().for_each(|&page| self.books.pin(page));
        Ok(pages)
    }

    // Do and record.

    /// Brings a plan about: one batch, then the books. On an error everything is as before.
    pub(crate) fn execute(
        &mut self,
        plan: &mut Plan,
        targets: &mut [&mut Buffer],
        after: Fence,
    ) -> Result<Fence, Error> {
        match self.perform(plan, targets, after) {
            Ok(fence) => {
                self.record(plan, targets, fence);
                Ok(fence)
            }
            Err(error) => {
                self.abandon(plan);
                Err(error)
            }
        }
    }

    fn perform(
        &mut self,
        plan: &mut Plan,
        targets: &mut [&mut Buffer],
        after: Fence,
    ) -> Result<Fence, Error> {
        for edit in &plan.edits {
            let table = &mut targets[edit.target].table;
            table
                .make_room(edit.page)
                .map_err(|pages| Error::TableMemory { pages })?;
        }
        plan.compile(self.config.page_size, self.moves());
        let added = plan.regions_added(|target| &targets[target].table);
        self.check_regions(added)?;
        if plan.operations().is_empty() {
            return Ok(after);
        }
        match self.device.apply(plan.operations(), after) {
            Ok(fence) => Ok(fence),
            Err(BatchError { applied, cause }) => {
                Err(self.take_back(plan, targets, applied, cause))
            }
        }
    }

    /// Undoes the first `applied` operations. If the mappings cannot be put back, every page
    /// involved is set aside; memory that cannot be given back is idle memory from now on.
    fn take_back(
        &mut self,
        plan: &mut Plan,
        targets: &mut [&mut Buffer],
        applied: usize,
        cause: DeviceError,
    ) -> Error {
        let edits = plan.undo_edits(applied, self.config.page_size);
        if let Err(error) = self.apply_if_any(&edits) {
            return self.set_aside(plan, targets, cause, error.cause);
        }
        let commits = plan.undo_commits(applied);
        if let Err(error) = self.apply_if_any(&commits) {
            self.keep_committed(plan, &commits[error.applied..]);
        }
        Error::Device(cause)
    }

    fn apply_if_any(&mut self, batch: &[Operation]) -> Result<(), BatchError> {
        match batch {
            [] => Ok(()),
            _ => self.device.apply(batch, Fence::DONE).map(drop),
        }
    }

    /// Enters the claims within `decommits`, which the device refused, as memory the pool holds.
    fn keep_committed(&mut self, plan: &mut Plan, decommits: &[Operation]) {
        let page_size = self.config.page_size;
        let kept = |claim: &Claim| {
            let start = place(claim.page.heap, claim.page.index, page_size);
            decommits.iter().any(|operation| match operation {
                Operation::Decommit { place, length } => {
                    let within = start.offset.checked_sub(place.offset);
                    place.heap == start.heap && within.is_some_and(|within| within < length.get())
                }
                _ => false,
            })
        };
        for claim in &mut plan.claims {
            if claim.memory == Memory::Fresh && kept(claim) {
                self.books.allocator.note_committed(*claim);
                claim.memory = Memory::Recycled;
            }
        }
    }

    fn set_aside(
        &mut self,
        plan: &mut Plan,
        targets: &mut [&mut Buffer],
        cause: DeviceError,
        undo: DeviceError,
    ) -> Error {
        let before = self.ledger().lost;
        for claim in plan.claims.drain(..) {
            self.books.lose_claim(claim);
        }
        for edit in std::mem::take(&mut plan.edits) {
            self.force(
                &[Edit {
                    to: Slot::Hole,
                    ..edit
                }],
                targets[edit.target],
            );
        }
        let lost = self.ledger().lost.saturating_sub(before);
        Error::Undo { cause, undo, lost }
    }

    /// Enters edits that the device did not bring about: the slots change all the same, and the
    /// pages they held are set aside, since they may still be mapped there.
    pub(crate) fn force(&mut self, edits: &[Edit], buffer: &mut Buffer) {
        for edit in edits {
            if let Some(page) = edit.from.page() {
                self.books.lose(page);
            }
            self.books
                .record(buffer.id, edit.from, edit.to, Fence::DONE);
            buffer.table.set(edit.page, edit.to);
        }
        self.books.set_regions(buffer.id, buffer.table.regions());
    }

    fn record(&mut self, plan: &mut Plan, targets: &mut [&mut Buffer], fence: Fence) {
        let fence = self.reusable(fence);
        for &claim in &plan.claims {
            self.books.allocator.note_committed(claim);
            self.books.counts.pages_committed += u64::from(claim.memory == Memory::Fresh);
        }
        for &id in &plan.heaps {
            let heap = self.books.allocator.heap(id);
            let pages = heap.page_count();
            let with_heap = self.device.commitment_at(heap.location()) == Commitment::PerHeap;
            self.books.counts.pages_committed += if with_heap { u64::from(pages) } else { 0 };
        }
        for edit in &plan.edits {
            let buffer = &mut *targets[edit.target];
            self.books.record(buffer.id, edit.from, edit.to, fence);
            buffer.table.set(edit.page, edit.to);
        }
        for buffer in targets.iter() {
            self.books.set_regions(buffer.id, buffer.table.regions());
        }
        self.check_edits(plan);
        self.books.counts.batches += u64::from(!plan.operations().is_empty());
        self.books.counts.map_calls += plan.map_calls();
        self.books.counts.copies_on_write += plan
            .edits
            .iter()
            .filter(|edit| edit.contents == Contents::Copied)
            .count() as u64;
    }

    /// M1 and M4 for the pages a plan touched, in debug builds.
    fn check_edits(&self, plan: &Plan) {
        if cfg!(debug_assertions) {
            for page in plan.edits.iter().filter_map(|edit| edit.to.page()) {
                let heap = self.books.allocator.heap(page.heap);
                assert!(
                    !heap.is_available(page.index),
                    "M1: {page} is mapped and free"
                );
                assert!(
                    heap.is_committed(page.index),
                    "M4: {page} is mapped without memory"
                );
            }
        }
    }

    /// Gives back what a plan that came to nothing had claimed, heaps made for it included.
    fn abandon(&mut self, plan: &mut Plan) {
        for claim in plan.claims.drain(..).rev() {
            self.books.allocator.unclaim(claim);
        }
        for id in plan.heaps.drain(..) {
            self.books.allocator.dissolve_tails_in(id);
            if self.books.allocator.heap(id).is_empty() && self.device.destroy_heap(id).is_ok() {
                self.books.allocator.remove_heap(id);
            }
        }
    }
}

/// A hole that wants a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) target: usize,
    pub(crate) buffer: BufferId,
    pub(crate) space: SpaceId,
    pub(crate) page: VirtualPage,
    pub(crate) from: Slot,
    pub(crate) contents: Contents,
}

impl Wanted {
    /// The edit that puts the claimed page there. A new page that nothing is copied to is zeroed
    /// if it holds old data and the pool was asked to.
    fn edit(&self, claim: Claim, recycle: Recycle) -> Edit {
        let contents = match (self.contents, claim.memory, recycle) {
            (Contents::Zeroed, Memory::Fresh, _) | (Contents::Zeroed, _, Recycle::AsIs) => {
                Contents::AsIs
            }
            (contents, ..) => contents,
        };
        Edit {
            target: self.target,
            space: self.space,
            page: self.page,
            from: self.from,
            to: Slot::Writable(claim.page),
            contents,
        }
    }
}
