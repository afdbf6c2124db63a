//! Which physical page comes next: free structures of all heaps, and extents.
//!
//! A growing buffer owns the *tail* of an extent: a run of heap offsets right after its last page,
//! set aside so that its next page is adjacent and the kernel merges both into one mapping. Where
//! memory is committed by the page, offsets cost nothing, and extents double as a buffer grows: the
//! number of mappings grows with the logarithm of the buffer. Tails are hints: when pages run
//! short they are dissolved and anyone may have them.

use super::heap::{Heap, Run, Which};
use crate::device::{Commitment, HeapId};
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
    /// How long new extents are to be.
    pub(crate) extents: Extents,
}

/// How long new extents are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extents {
    /// Twice as long as the buffer's last.
    Doubling,
    /// As long as they get: mappings are running short.
    Longest,
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
    /// Pages that hold memory.
    committed: u64,
    /// Pages that hold memory and that nobody owns, tails included.
    idle: u64,
}

impl Allocator {
    pub(crate) fn new(commitment: Commitment, heap_pages: u32) -> Self {
        Self {
            heaps: Vec::new(),
            growth: Vec::new(),
            lengths: ExtentLengths::new(commitment, heap_pages),
            committed: 0,
            idle: 0,
        }
    }

    pub(crate) fn committed(&self) -> u64 {
        self.committed
    }

    pub(crate) fn idle(&self) -> u64 {
        self.idle
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
        self.committed += u64::from(heap.committed_count());
        self.idle += u64::from(heap.idle_count());
        self.heaps[index] = Some(heap);
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
        self.committed -= u64::from(heap.committed_count());
        self.idle -= u64::from(heap.idle_count());
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
    pub(crate) fn open_buffer(&mut self, buffer: BufferId) {
        let index = buffer.0 as usize;
        if index >= self.growth.len() {
            self.growth.resize(index + 1, Growth::default());
        }
        self.growth[index] = Growth {
            tail: None,
            wanted: self.lengths.first,
        };
    }

    /// Takes the page that suits `buffer` best: the one after its last, or the first of a new
    /// extent.
    pub(crate) fn claim(&mut self, buffer: BufferId, budget: &Budget) -> Result<Claim, Shortage> {
        if let Some(claim) = self.claim_from_tail(buffer, budget) {
            return Ok(claim);
        }
        let run = self.find_extent(buffer, budget).or_else(|shortage| {
            self.dissolve_all_tails();
            self.find_extent(buffer, budget).map_err(|_| shortage)
        });
        self.open_extent(buffer, run?);
        Ok(self
            .claim_from_tail(buffer, budget)
            .expect("M1: a new extent starts with a page"))
    }

    /// Takes one given page, which a device that commits with the reservation has for this slot.
    pub(crate) fn claim_exactly(&mut self, buffer: BufferId, page: PhysicalPage) -> Claim {
        let heap = self.heap_mut(page.heap);
        debug_assert!(
            heap.is_committed(page.index),
            "M5: {page} is committed with its buffer"
        );
        heap.take(page.index);
        self.idle -= 1;
        Claim {
            buffer,
            page,
            memory: Memory::Recycled,
        }
    }

    /// Gives a claimed page back as it was, the last claim first.
    pub(crate) fn unclaim(&mut self, claim: Claim) {
        self.idle += u64::from(claim.memory == Memory::Recycled);
        self.put(claim.page, Some(claim.buffer));
    }

    /// Notes that a claimed page holds memory now.
    pub(crate) fn note_committed(&mut self, claim: Claim) {
        if claim.memory == Memory::Fresh {
            self.heap_mut(claim.page.heap)
                .note_committed(claim.page.index);
            self.committed += 1;
        }
    }

    /// Takes a page back that has lost its last owner; `buffer` if that was one.
    pub(crate) fn release(&mut self, page: PhysicalPage, buffer: Option<BufferId>) {
        self.idle += 1;
        self.put(page, buffer);
    }

    /// Notes that a run of idle pages was given back to the system.
    pub(crate) fn note_decommitted(&mut self, heap: HeapId, run: Run) {
        for page in run.start..run.start + run.length {
            self.heap_mut(heap).note_decommitted(page);
        }
        self.committed -= u64::from(run.length);
        self.idle -= u64::from(run.length);
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

    fn claim_from_tail(&mut self, buffer: BufferId, budget: &Budget) -> Option<Claim> {
        let tail = self.growth[buffer.0 as usize].tail?;
        if tail.next == tail.end {
            return None;
        }
        let memory = match self.heap(tail.heap).is_committed(tail.next) {
            true => Memory::Recycled,
            false if budget.fresh > 0 => Memory::Fresh,
            false => return None,
        };
        self.growth[buffer.0 as usize].tail = Some(Tail {
            next: tail.next + 1,
            ..tail
        });
        self.idle -= u64::from(memory == Memory::Recycled);
        Some(Claim {
            buffer,
            page: PhysicalPage {
                heap: tail.heap,
                index: tail.next,
            },
            memory,
        })
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

    /// Where the next extent of `buffer` is to be. In this order: right after the last one; pages
    /// that hold memory already, if they are not too scattered; the first run long enough; and,
    /// when nothing may be committed, any page that holds memory.
    fn find_extent(&self, buffer: BufferId, budget: &Budget) -> Result<(HeapId, Run), Shortage> {
        let growth = &self.growth[buffer.0 as usize];
        let remaining = u32::try_from(budget.remaining).unwrap_or(u32::MAX);
        let wanted = growth
            .wanted
            .max(remaining.min(self.lengths.longest))
            .max(1);
        let which = if budget.fresh > 0 {
            Which::Available
        } else {
            Which::Idle
        };
        self.run_after(growth.tail, which, wanted)
            .or_else(|| self.search(Which::Idle, wanted, wanted.div_ceil(4)))
            .or_else(|| match (which, budget.search) {
                (Which::Available, Search::Fitting) => self.search(which, wanted, wanted),
                _ => self.search(which, wanted, 1),
            })
            .ok_or(Shortage)
    }

    fn run_after(&self, tail: Option<Tail>, which: Which, wanted: u32) -> Option<(HeapId, Run)> {
        let tail = tail.filter(|tail| tail.next == tail.end)?;
        let run = self.heap(tail.heap).run_at(which, tail.end, wanted)?;
        Some((tail.heap, run))
    }

    /// The first run of `wanted` pages, or else the longest of at least `least`.
    fn search(&self, which: Which, wanted: u32, least: u32) -> Option<(HeapId, Run)> {
        let mut longest: Option<(HeapId, Run)> = None;
        for (id, heap) in self.heaps() {
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
