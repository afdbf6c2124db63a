//! Which physical page comes next: free structures of all heaps, and extents.
//!
//! A growing buffer owns the *tail* of an extent: a run of heap offsets right after its last page,
//! set aside so that its next page is adjacent and the kernel merges both into one mapping. Where
//! memory is committed by the page, offsets cost nothing, and extents double as a buffer grows: the
//! number of mappings grows with the logarithm of the buffer. Tails are hints: when pages run
//! short they are dissolved and anyone may have them.

use super::heap::{Heap, Purpose, Run, Which};
use crate::device::{Commitment, HeapId, Location};
use crate::units::PhysicalPage;

/// The number under which the books know a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferId(pub(crate) u32);

/// A page taken for a plan that may still fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) buffer: BufferId,
    pub(crate) page: PhysicalPage,
    pub(crate) memory: Memory,
}

/// Whether a claimed page holds memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// It does, with whatever was last written there.
    Recycled,
    /// It is to be committed, and reads as zeros then.
    Fresh,
}

/// What a plan may still take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Pages that may be committed under the limit.
    pub(crate) fresh: u64,
    /// Pages the plan still wants, so that an extent is opened for all of them at once.
    pub(crate) remaining: u64,
    /// What to make of heaps without a run of the wanted length.
    pub(crate) search: Search,
    /// How near the mappings are to their limit.
    pub(crate) pressure: Pressure,
}

/// How near the mappings are to their limit: the nearer, the longer the runs that pages come in,
/// and the sooner fresh memory next to a buffer's last page is preferred to scattered memory that
/// is already there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pressure {
    /// Under an eighth of the limit.
    Low,
    /// Under half of it.
    Moderate,
    /// Beyond.
    High,
}

impl Pressure {
    pub(crate) fn new(regions: u64, limit: Option<u64>) -> Self {
        match limit {
            Some(limit) if regions > limit / 2 => Self::High,
            Some(limit) if regions > limit / 8 => Self::Moderate,
            _ => Self::Low,
        }
    }

    /// The shortest run of idle pages worth a mapping of its own.
    fn least_run(self) -> u32 {
        match self {
            Self::Low => 1,
            Self::Moderate => 8,
            Self::High => 64,
        }
    }
}

/// What to make of heaps without a run of the wanted length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// Ask for another heap instead.
    Fitting,
    /// Take the longest run there is.
    Anything,
}

/// No page can be had: another heap is needed, if the limit allows one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortage;

/// Offsets `[next, end)` of a heap, set aside for one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tail {
    heap: HeapId,
    next: u32,
    end: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Growth {
    tail: Option<Tail>,
    /// Of which kind its pages are.
    location: Location,
    /// How long the next extent is to be, in pages.
    wanted: u32,
}

/// The extents a device calls for, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExtentLengths {
    first: u32,
    longest: u32,
}

impl ExtentLengths {
    /// Offsets cost nothing where memory is committed by the page; where it is committed by the
    /// heap, a long tail is memory that only one buffer can use.
    fn new(commitment: Commitment, heap_pages: u32) -> Self {
        let (first, longest) = match commitment {
            Commitment::PerPage => (16, 256),
            Commitment::PerHeap | Commitment::WithReservation => (4, 16),
        };
        Self {
            first: heap_pages.min(first),
            longest: heap_pages.min(longest),
        }
    }
}

/// All heaps and tails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Allocator {
    heaps: Vec<Option<Heap>>,
    growth: Vec<Growth>,
    lengths: ExtentLengths,
    /// Pages that hold memory, by their [`Location`].
    committed: [u64; 2],
    /// Pages that hold memory and that nobody owns, tails included, by their [`Location`].
    idle: [u64; 2],
    /// The part of `committed` that is files'.
    file: u64,
    /// Heaps of files none of whose pages are owned any more.
    spent_files: Vec<HeapId>,
}

impl Allocator {
    pub(crate) fn new(commitment: Commitment, heap_pages: u32) -> Self {
        Self {
            heaps: Vec::new(),
            growth: Vec::new(),
            lengths: ExtentLengths::new(commitment, heap_pages),
            committed: [0; 2],
            idle: [0; 2],
            file: 0,
            spent_files: Vec::new(),
        }
    }

    pub(crate) fn committed(&self) -> u64 {
        self.committed.iter().sum()
    }

    /// The part of them that is memory of one kind.
    pub(crate) fn committed_at(&self, location: Location) -> u64 {
        self.committed[location.index()]
    }

    pub(crate) fn idle(&self) -> u64 {
        self.idle.iter().sum()
    }

    /// The part of them that is memory of one kind.
    pub(crate) fn idle_at(&self, location: Location) -> u64 {
        self.idle[location.index()]
    }

    /// Of which kind the pages of a buffer are.
    pub(crate) fn location(&self, buffer: BufferId) -> Location {
        self.growth[buffer.0 as usize].location
    }

    fn idle_in(&mut self, heap: HeapId) -> &mut u64 {
        let location = self.heap(heap).location();
        &mut self.idle[location.index()]
    }

    pub(crate) fn add_heap(&mut self, id: HeapId, heap: Heap) {
        let index = id.0 as usize;
        if index >= self.heaps.len() {
            self.heaps.resize(index + 1, None);
        }
        debug_assert!(
            self.heaps[index].is_none(),
            "M1: heap {} exists twice",
            id.0
        );
        let kind = heap.location().index();
        self.committed[kind] += u64::from(heap.committed_count());
        self.idle[kind] += u64::from(heap.idle_count());
        self.heaps[index] = Some(heap);
    }

    /// Enters a heap that is part of a file; all of its pages are about to be owned.
    pub(crate) fn add_file(&mut self, id: HeapId, pages: u32) {
        let mut heap = Heap::committed(pages, Purpose::File);
        (0..pages).for_each(|page| heap.take(page));
        self.file += u64::from(pages);
        self.add_heap(id, heap);
    }

    /// Pages that are files'.
    pub(crate) fn file(&self) -> u64 {
        self.file
    }

    /// Heaps that are parts of files.
    pub(crate) fn files(&self) -> usize {
        let files = self
            .heaps()
            .filter(|(_, heap)| heap.purpose() == Purpose::File);
        files.count()
    }

    /// Heaps of files that can be given back, each once.
    pub(crate) fn take_spent_files(&mut self) -> Vec<HeapId> {
        std::mem::take(&mut self.spent_files)
    }

    /// A heap of a file that could not be given back now.
    pub(crate) fn keep_spent_file(&mut self, id: HeapId) {
        self.spent_files.push(id);
    }

    /// Heaps that are no files.
    pub(crate) fn memory_heaps(&self) -> impl Iterator<Item = (HeapId, &Heap)> {
        self.heaps()
            .filter(|(_, heap)| heap.purpose() != Purpose::File)
    }

    /// The same of memory of one kind.
    pub(crate) fn memory_heaps_at(
        &self,
        location: Location,
    ) -> impl Iterator<Item = (HeapId, &Heap)> {
        self.memory_heaps()
            .filter(move |(_, heap)| heap.location() == location)
    }

    /// Forgets a heap that the device has given back.
    pub(crate) fn remove_heap(&mut self, id: HeapId) {
        let heap = self.heaps[id.0 as usize]
            .take()
            .expect("M1: a heap is given back once");
        debug_assert!(
            heap.is_empty(),
            "M4: heap {} is given back while in use",
            id.0
        );
        let kind = heap.location().index();
        self.committed[kind] -= u64::from(heap.committed_count());
        self.idle[kind] -= u64::from(heap.idle_count());
    }

    pub(crate) fn heaps(&self) -> impl Iterator<Item = (HeapId, &Heap)> {
        let numbered = self.heaps.iter().enumerate();
        numbered.filter_map(|(id, heap)| Some((HeapId(id as u32), heap.as_ref()?)))
    }

    pub(crate) fn heap(&self, id: HeapId) -> &Heap {
        self.heaps[id.0 as usize]
            .as_ref()
            .expect("M4: a page's heap exists")
    }

    pub(crate) fn heap_mut(&mut self, id: HeapId) -> &mut Heap {
        self.heaps[id.0 as usize]
            .as_mut()
            .expect("M4: a page's heap exists")
    }

    /// Starts a buffer's growth afresh.
    pub(crate) fn open_buffer(&mut self, buffer: BufferId, location: Location) {
        let index = buffer.0 as usize;
        if index >= self.growth.len() {
            self.growth.resize(index + 1, Growth::default());
        }
        self.growth[index] = Growth {
            tail: None,
            location,
            wanted: self.lengths.first,
        };
    }

    /// Takes the page that suits `buffer` best, in this order: the one set aside for it, if it holds
    /// memory; memory that lies idle, if it is not too scattered; the one set aside, to be
    /// committed; the first of a new extent. Idle memory comes before fresh memory so that a buffer
    /// that gives back as much as it takes keeps what is committed flat.
    pub(crate) fn claim(&mut self, buffer: BufferId, budget: &Budget) -> Result<Claim, Shortage> {
        if let Some(claim) = self.claim_from_tail(buffer, Memory::Recycled) {
            return Ok(claim);
        }
        if let Some(extent) = self.find_idle(buffer, budget) {
            return Ok(self.claim_from_new(buffer, extent, Memory::Recycled));
        }
        if budget.fresh > 0 {
            if let Some(claim) = self.claim_from_tail(buffer, Memory::Fresh) {
                return Ok(claim);
            }
            if let Some(extent) = self.find_available(buffer, budget) {
                let memory = self.memory(extent.0, extent.1.start);
                return Ok(self.claim_from_new(buffer, extent, memory));
            }
        }
        Err(Shortage)
    }

    /// Takes one given page, which a device that commits with the reservation has for this slot.
    pub(crate) fn claim_exactly(&mut self, buffer: BufferId, page: PhysicalPage) -> Claim {
        let heap = self.heap_mut(page.heap);
        debug_assert!(
            heap.is_committed(page.index),
            "M5: {page} is committed with its buffer"
        );
        heap.take(page.index);
        *self.idle_in(page.heap) -= 1;
        Claim {
            buffer,
            page,
            memory: Memory::Recycled,
        }
    }

    /// Gives a claimed page back as it was, the last claim first.
    pub(crate) fn unclaim(&mut self, claim: Claim) {
        *self.idle_in(claim.page.heap) += u64::from(claim.memory == Memory::Recycled);
        self.put(claim.page, Some(claim.buffer));
    }

    /// Notes that a claimed page holds memory now.
    pub(crate) fn note_committed(&mut self, claim: Claim) {
        if claim.memory == Memory::Fresh {
            self.heap_mut(claim.page.heap)
                .note_committed(claim.page.index);
            let kind = self.heap(claim.page.heap).location().index();
            self.committed[kind] += 1;
        }
    }

    /// Takes a page back that has lost its last owner; `buffer` if that was one.
    pub(crate) fn release(&mut self, page: PhysicalPage, buffer: Option<BufferId>) {
        *self.idle_in(page.heap) += 1;
        if self.heap(page.heap).purpose() != Purpose::File {
            return self.put(page, buffer);
        }
        self.put(page, None);
        let run = Run {
            start: page.index,
            length: 1,
        };
        self.note_decommitted(page.heap, run);
        self.file -= 1;
        if self.heap(page.heap).is_empty() {
            self.spent_files.push(page.heap);
        }
    }

    /// Notes that a run of idle pages was given back to the system.
    pub(crate) fn note_decommitted(&mut self, heap: HeapId, run: Run) {
        for page in run.start..run.start + run.length {
            self.heap_mut(heap).note_decommitted(page);
        }
        let kind = self.heap(heap).location().index();
        self.committed[kind] -= u64::from(run.length);
        self.idle[kind] -= u64::from(run.length);
    }

    /// Lets go of what was set aside for `buffer`.
    pub(crate) fn dissolve_tail(&mut self, buffer: BufferId) {
        if let Some(tail) = self.growth[buffer.0 as usize].tail.take() {
            for page in tail.next..tail.end {
                self.heap_mut(tail.heap).put(page);
            }
        }
    }

    pub(crate) fn dissolve_all_tails(&mut self) {
        for buffer in 0..self.growth.len() {
            self.dissolve_tail(BufferId(buffer as u32));
        }
    }

    /// Lets go of everything set aside in one heap.
    pub(crate) fn dissolve_tails_in(&mut self, heap: HeapId) {
        for buffer in 0..self.growth.len() {
            if self.growth[buffer]
                .tail
                .is_some_and(|tail| tail.heap == heap)
            {
                self.dissolve_tail(BufferId(buffer as u32));
            }
        }
    }

    /// Puts a page where it came from: back onto the tail it directly precedes, so that a buffer
    /// that shrinks and grows again stays adjacent, or to everyone.
    fn put(&mut self, page: PhysicalPage, buffer: Option<BufferId>) {
        let tail = buffer.and_then(|buffer| self.growth[buffer.0 as usize].tail.as_mut());
        match tail {
            Some(tail) if tail.heap == page.heap && tail.next == page.index + 1 => tail.next -= 1,
            _ => self.heap_mut(page.heap).put(page.index),
        }
    }

    fn memory(&self, heap: HeapId, page: u32) -> Memory {
        if self.heap(heap).is_committed(page) {
            Memory::Recycled
        } else {
            Memory::Fresh
        }
    }

    /// Takes the next page of the tail, if there is one and it is what is wanted.
    fn claim_from_tail(&mut self, buffer: BufferId, wanted: Memory) -> Option<Claim> {
        let tail = self.growth[buffer.0 as usize].tail.as_mut()?;
        let (heap, index) = (tail.heap, tail.next);
        if index == tail.end || self.memory(heap, index) != wanted {
            return None;
        }
        self.growth[buffer.0 as usize].tail.as_mut()?.next += 1;
        *self.idle_in(heap) -= u64::from(wanted == Memory::Recycled);
        Some(Claim {
            buffer,
            page: PhysicalPage { heap, index },
            memory: wanted,
        })
    }

    fn claim_from_new(&mut self, buffer: BufferId, extent: (HeapId, Run), memory: Memory) -> Claim {
        self.open_extent(buffer, extent);
        let claim = self.claim_from_tail(buffer, memory);
        claim.expect("M1: an extent that was found starts with a page that can be taken")
    }

    fn open_extent(&mut self, buffer: BufferId, (heap, run): (HeapId, Run)) {
        self.dissolve_tail(buffer);
        for page in run.start..run.start + run.length {
            self.heap_mut(heap).take(page);
        }
        let longest = self.lengths.longest;
        let growth = &mut self.growth[buffer.0 as usize];
        growth.tail = Some(Tail {
            heap,
            next: run.start,
            end: run.start + run.length,
        });
        growth.wanted = growth.wanted.saturating_mul(2).min(longest);
    }

    /// How long the next extent of `buffer` is to be.
    fn wanted(&self, buffer: BufferId, budget: &Budget) -> u32 {
        let remaining = u32::try_from(budget.remaining).unwrap_or(u32::MAX);
        let growth = &self.growth[buffer.0 as usize];
        match budget.pressure {
            Pressure::High => self.lengths.longest,
            _ => growth
                .wanted
                .max(remaining.min(self.lengths.longest))
                .max(1),
        }
    }

    /// Idle memory for `buffer`: right after its last page, or a run long enough to be worth it.
    /// When nothing may be committed any run is.
    fn find_idle(&self, buffer: BufferId, budget: &Budget) -> Option<(HeapId, Run)> {
        let wanted = self.wanted(buffer, budget);
        let least = if budget.fresh == 0 {
            1
        } else {
            budget.pressure.least_run().min(wanted)
        };
        self.run_after(buffer, Which::Idle, wanted)
            .or_else(|| self.search(self.location(buffer), Which::Idle, wanted, least))
    }

    /// Offsets for `buffer`: right after its last page, or the first run long enough.
    fn find_available(&self, buffer: BufferId, budget: &Budget) -> Option<(HeapId, Run)> {
        let wanted = self.wanted(buffer, budget);
        let least = if budget.search == Search::Fitting {
            wanted
        } else {
            1
        };
        self.run_after(buffer, Which::Available, wanted)
            .or_else(|| self.search(self.location(buffer), Which::Available, wanted, least))
    }

    fn run_after(&self, buffer: BufferId, which: Which, wanted: u32) -> Option<(HeapId, Run)> {
        let tail = self.growth[buffer.0 as usize]
            .tail
            .filter(|tail| tail.next == tail.end)?;
        // The heap may be gone, and its number a file's: an empty tail keeps nothing of it.
        let heap = self.heaps.get(tail.heap.0 as usize)?.as_ref()?;
        if heap.purpose() == Purpose::File || heap.location() != self.location(buffer) {
            return None;
        }
        Some((tail.heap, heap.run_at(which, tail.end, wanted)?))
    }

    /// The first run of `wanted` pages of one kind, or else the longest of at least `least`.
    fn search(
        &self,
        location: Location,
        which: Which,
        wanted: u32,
        least: u32,
    ) -> Option<(HeapId, Run)> {
        let mut longest: Option<(HeapId, Run)> = None;
        for (id, heap) in self.memory_heaps_at(location) {
            let enough = match which {
                Which::Available => heap.available_count() >= least,
                Which::Idle => heap.idle_count() >= least,
            };
            let run = if enough {
                heap.find(which, wanted)
            } else {
                None
            };
            let Some(run) = run.filter(|run| run.length >= least) else {
                continue;
            };
            if run.length == wanted {
                return Some((id, run));
            }
            if longest.is_none_or(|(_, longest)| run.length > longest.length) {
                longest = Some((id, run));
            }
        }
        longest
    }

    /// The pages in tails, for the invariant checks.
    pub(crate) fn tail_pages(&self) -> impl Iterator<Item = PhysicalPage> {
        let tails = self.growth.iter().filter_map(|growth| growth.tail);
        tails.flat_map(|Tail { heap, next, end }| {
            (next..end).map(move |index| PhysicalPage { heap, index })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEAP_PAGES: u32 = 64;

    fn allocator(heaps: u32, buffers: u32) -> Allocator {
        let mut allocator = Allocator::new(Commitment::PerPage, HEAP_PAGES);
        for heap in 0..heaps {
            allocator.add_heap(HeapId(heap), Heap::uncommitted(HEAP_PAGES));
        }
        for buffer in 0..buffers {
            allocator.open_buffer(BufferId(buffer), Location::Own);
        }
        allocator
    }

    fn budget(fresh: u64) -> Budget {
        Budget {
            fresh,
            remaining: 1,
            search: Search::Fitting,
            pressure: Pressure::Low,
        }
    }

    /// Claims a page and has it committed and owned.
    fn take(allocator: &mut Allocator, buffer: u32, budget: &Budget) -> Option<PhysicalPage> {
        let claim = allocator.claim(BufferId(buffer), budget).ok()?;
        allocator.note_committed(claim);
        Some(claim.page)
    }

    #[test]
    fn buffers_that_grow_in_turns_stay_adjacent() {
        let mut allocator = allocator(8, 3);
        let mut last: [Option<PhysicalPage>; 3] = [None; 3];
        let mut jumps = 0;
        for _ in 0..60 {
            for buffer in 0..3 {
                let page = take(&mut allocator, buffer, &budget(1_000)).unwrap();
                let before = last[buffer as usize].replace(page);
                jumps += u32::from(before.is_none_or(|before| before.next() != Some(page)));
            }
        }
        assert!(jumps <= 9, "{jumps} extents for 180 pages");
    }

    #[test]
    fn what_lies_idle_is_used_before_fresh_memory() {
        let mut allocator = allocator(1, 2);
        let pages: Vec<_> = (0..8)
            .map(|_| take(&mut allocator, 0, &budget(1_000)).unwrap())
            .collect();
        for &page in &pages[2..5] {
            allocator.release(page, Some(BufferId(0)));
        }
        let again: Vec<_> = (0..3)
            .map(|_| take(&mut allocator, 0, &budget(1_000)).unwrap())
            .collect();
        assert_eq!(again, pages[2..5]);
        assert_eq!((allocator.committed(), allocator.idle()), (8, 0));
    }

    #[test]
    fn under_pressure_scattered_memory_is_left_alone() {
        let mut allocator = allocator(2, 1);
        let pages: Vec<_> = (0..8)
            .map(|_| take(&mut allocator, 0, &budget(1_000)).unwrap())
            .collect();
        allocator.release(pages[3], Some(BufferId(0)));
        let pressed = Budget {
            pressure: Pressure::High,
            ..budget(1_000)
        };
        assert_eq!(take(&mut allocator, 0, &pressed), pages[7].next());
        let broke = Budget {
            fresh: 0,
            ..pressed
        };
        assert_eq!(take(&mut allocator, 0, &broke), Some(pages[3]));
    }

    #[test]
    fn under_high_pressure_extents_are_as_long_as_they_get() {
        for (pressure, heap, index) in [(Pressure::Moderate, 0, 16), (Pressure::High, 1, 0)] {
            let mut allocator = allocator(2, 2);
            let pressed = Budget {
                pressure,
                ..budget(1_000)
            };
            take(&mut allocator, 0, &pressed).unwrap();
            // What is set aside for the first buffer is not for the second.
            let page = take(&mut allocator, 1, &budget(1_000));
            let heap = HeapId(heap);
            assert_eq!(page, Some(PhysicalPage { heap, index }));
        }
    }

    #[test]
    fn of_runs_that_are_all_too_short_the_longest_is_used() {
        for lengths in [[2, 5, 3], [5, 3, 2], [3, 2, 5]] {
            let mut allocator = Allocator::new(Commitment::PerPage, HEAP_PAGES);
            for (id, pages) in (0..).zip(lengths) {
                allocator.add_heap(HeapId(id), Heap::uncommitted(pages));
            }
            let found = allocator.search(Location::Own, Which::Available, 8, 1);
            let longest = lengths.iter().position(|&length| length == 5);
            assert_eq!(
                found.map(|(id, run)| (id.0 as usize, run.length)),
                longest.map(|id| (id, 5))
            );
        }
        let mut allocator = Allocator::new(Commitment::PerPage, HEAP_PAGES);
        (0..2).for_each(|id| allocator.add_heap(HeapId(id), Heap::uncommitted(5)));
        let found = allocator.search(Location::Own, Which::Available, 8, 1);
        assert_eq!(
            found.map(|(id, _)| id),
            Some(HeapId(0)),
            "the first of equals"
        );
    }

    #[test]
    fn a_buffer_that_shrinks_and_grows_again_gets_its_pages_back() {
        let mut allocator = allocator(1, 2);
        let pages: Vec<_> = (0..6)
            .map(|_| take(&mut allocator, 0, &budget(1_000)).unwrap())
            .collect();
        for &page in pages[3..].iter().rev() {
            allocator.release(page, Some(BufferId(0)));
        }
        let other = take(&mut allocator, 1, &budget(1_000)).unwrap();
        assert!(!pages.contains(&other), "they stay set aside");
        assert_eq!(take(&mut allocator, 0, &budget(1_000)), Some(pages[3]));
    }

    #[test]
    fn a_shortage_asks_for_a_heap_and_disturbs_no_one() {
        let mut allocator = allocator(1, 2);
        for _ in 0..50 {
            take(&mut allocator, 0, &budget(1_000)).unwrap();
        }
        let before = allocator.clone();
        assert_eq!(allocator.claim(BufferId(1), &budget(1_000)), Err(Shortage));
        assert_eq!(allocator, before);
    }

    fn cases() -> u32 {
        if cfg!(miri) { 4 } else { 256 }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

        /// A page is in exactly one place, counts are what a recount gives, and taking claims back
        /// leaves the accounts as they were.
        #[test]
        fn pages_are_never_in_two_places(steps in proptest::collection::vec((0u32..4, 0u8..6), 1..300)) {
            let mut allocator = allocator(3, 4);
            let mut owned: Vec<(u32, PhysicalPage)> = Vec::new();
            for (buffer, action) in steps {
                match action {
                    0 if !owned.is_empty() => {
                        let (owner, page) = owned.swap_remove(owned.len() / 2);
                        allocator.release(page, Some(BufferId(owner)));
                    }
                    1 => allocator.dissolve_tail(BufferId(buffer)),
                    2 => {
                        let before = (allocator.committed(), allocator.idle());
                        let claims: Vec<Claim> = (0..5)
                            .map_while(|_| allocator.claim(BufferId(buffer), &budget(5)).ok())
                            .collect();
                        claims.into_iter().rev().for_each(|claim| allocator.unclaim(claim));
                        prop_assert_eq!((allocator.committed(), allocator.idle()), before);
                    }
                    _ => {
                        if let Some(page) = take(&mut allocator, buffer, &budget(1)) {
                            prop_assert!(!owned.iter().any(|&(_, other)| other == page));
                            owned.push((buffer, page));
                        }
                    }
                }
                let tails = allocator.tail_pages().count();
                let available: u32 = allocator.heaps().map(|(_, heap)| heap.available_count()).sum();
                prop_assert_eq!(owned.len() + tails + available as usize, 3 * HEAP_PAGES as usize);
                prop_assert!(allocator.heaps().all(|(_, heap)| heap.counts_agree()));
                prop_assert_eq!(allocator.committed(), owned.len() as u64 + allocator.idle());
            }
        }
    }
}
