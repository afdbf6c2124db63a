//! One heap's books: which pages can be had, which are committed, and who owns the others.

use crate::device::{Fence, Location};

/// A fixed set of page numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bitmap {
    words: Vec<u64>,
    bits: u32,
}

impl Bitmap {
    fn new(bits: u32, fill: Fill) -> Self {
        let words = match fill {
            Fill::Clear => 0,
            Fill::Set => u64::MAX,
        };
        let mut map = Self {
            words: vec![words; bits.div_ceil(64) as usize],
            bits,
        };
        if let (Some(last), used @ 1..) = (map.words.last_mut(), bits % 64) {
            *last &= (1 << used) - 1;
        }
        map
    }

    pub(crate) fn get(&self, bit: u32) -> bool {
        self.words[(bit / 64) as usize] >> (bit % 64) & 1 == 1
    }

    fn set(&mut self, bit: u32) {
        self.words[(bit / 64) as usize] |= 1 << (bit % 64);
    }

    fn clear(&mut self, bit: u32) {
        self.words[(bit / 64) as usize] &= !(1 << (bit % 64));
    }
}

#[derive(Clone, Copy)]
enum Fill {
    Clear,
    Set,
}

/// A run of page numbers in one heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: u32,
    pub(crate) length: u32,
}

/// Who owns one physical page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owners {
    /// Slots that map it.
    pub(crate) mappings: u32,
    /// Pins that keep it.
    pub(crate) pins: u32,
    /// The sum of the mapping buffers' numbers, wrapping: when one mapping is left, its buffer.
    pub(crate) sum: u64,
    /// Mappings that could not be undone: the page stays owned until the pool goes.
    pub(crate) lost: u32,
    /// When the readers of mappings it no longer has are done.
    pub(crate) readers: Fence,
}

impl Owners {
    /// Whether nobody owns the page.
    pub(crate) fn none(&self) -> bool {
        self.mappings == 0 && self.pins == 0 && self.lost == 0
    }
}

/// What a heap's pages are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Any buffer.
    Pool,
    /// The one reservation that the heap is, on devices that commit with it.
    Reservation,
    /// Part of a file: sealed pages, which nobody gets anew once they are free.
    File,
}

/// One heap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heap {
    pages: u32,
    purpose: Purpose,
    location: Location,
    /// Neither owned nor reserved for the growth of one buffer.
    available: Bitmap,
    committed: Bitmap,
    available_count: u32,
    committed_count: u32,
    /// Available and committed.
    idle_count: u32,
    owners: Vec<Owners>,
}

impl Heap {
    /// A heap that costs nothing yet.
    pub(crate) fn uncommitted(pages: u32) -> Self {
        Self {
            pages,
            purpose: Purpose::Pool,
            location: Location::Own,
            available: Bitmap::new(pages, Fill::Set),
            committed: Bitmap::new(pages, Fill::Clear),
            available_count: pages,
            committed_count: 0,
            idle_count: 0,
            owners: vec![Owners::default(); pages as usize],
        }
    }

    /// A heap whose memory came with it.
    pub(crate) fn committed(pages: u32, purpose: Purpose) -> Self {
        Self {
            purpose,
            committed: Bitmap::new(pages, Fill::Set),
            committed_count: pages,
            idle_count: pages,
            ..Self::uncommitted(pages)
        }
    }

    /// The same of memory of another kind than the device's own.
    pub(crate) fn at(self, location: Location) -> Self {
        Self { location, ..self }
    }

    pub(crate) fn purpose(&self) -> Purpose {
        self.purpose
    }

    pub(crate) fn location(&self) -> Location {
        self.location
    }

    pub(crate) fn page_count(&self) -> u32 {
        self.pages
    }

    pub(crate) fn available_count(&self) -> u32 {
        self.available_count
    }

    pub(crate) fn committed_count(&self) -> u32 {
        self.committed_count
    }

    pub(crate) fn idle_count(&self) -> u32 {
        self.idle_count
    }

    /// Whether every page is available: the heap can be given back.
    pub(crate) fn is_empty(&self) -> bool {
        self.available_count == self.pages
    }

    pub(crate) fn is_committed(&self, page: u32) -> bool {
        self.committed.get(page)
    }

    pub(crate) fn is_available(&self, page: u32) -> bool {
        self.available.get(page)
    }

    pub(crate) fn owners(&self, page: u32) -> &Owners {
        &self.owners[page as usize]
    }

    pub(crate) fn owners_mut(&mut self, page: u32) -> &mut Owners {
        &mut self.owners[page as usize]
    }

    /// Takes an available page out of the free structure.
    pub(crate) fn take(&mut self, page: u32) {
        debug_assert!(self.available.get(page), "M1: page {page} is taken twice");
        self.available.clear(page);
        self.available_count -= 1;
        self.idle_count -= u32::from(self.committed.get(page));
    }

    /// Puts a page that nobody owns back.
    pub(crate) fn put(&mut self, page: u32) {
        debug_assert!(!self.available.get(page), "M1: page {page} is freed twice");
        debug_assert!(
            self.owners[page as usize].none(),
            "M1: page {page} is freed while owned"
        );
        self.available.set(page);
        self.available_count += 1;
        self.idle_count += u32::from(self.committed.get(page));
    }

    /// Notes that a page taken out holds memory now.
    pub(crate) fn note_committed(&mut self, page: u32) {
        debug_assert!(
            !self.available.get(page) && !self.committed.get(page),
            "M5: commit twice"
        );
        self.committed.set(page);
        self.committed_count += 1;
    }

    /// Notes that an available page's memory was given back.
    pub(crate) fn note_decommitted(&mut self, page: u32) {
        debug_assert!(
            self.available.get(page) && self.committed.get(page),
            "M4: page in use"
        );
        self.committed.clear(page);
        self.committed_count -= 1;
        self.idle_count -= 1;
    }

    /// The first run of at least `wanted` pages among `which`, cut to `wanted`; or else the longest.
    pub(crate) fn find(&self, which: Which, wanted: u32) -> Option<Run> {
        let mut longest: Option<Run> = None;
        let mut from = 0;
        while let Some(run) = self.run_from(which, from) {
            if run.length >= wanted {
                return Some(Run {
                    length: wanted,
                    ..run
                });
            }
            if longest.is_none_or(|longest| run.length > longest.length) {
                longest = Some(run);
            }
            from = run.start + run.length;
        }
        longest
    }

    /// The run of `which` that begins exactly at `start`, at most `wanted` long.
    pub(crate) fn run_at(&self, which: Which, start: u32, wanted: u32) -> Option<Run> {
        if start >= self.pages {
            return None;
        }
        let run = self.run_from(which, start)?;
        (run.start == start).then_some(Run {
            start,
            length: run.length.min(wanted),
        })
    }

    /// The first run of `which` at or after `from`.
    pub(crate) fn run_from(&self, which: Which, from: u32) -> Option<Run> {
        let start = self.first(which, from, Fill::Set)?;
        let end = self.first(which, start, Fill::Clear).unwrap_or(self.pages);
        Some(Run {
            start,
            length: end - start,
        })
    }

    /// The first page at or after `from` that is in `which` (or is not, for [`Fill::Clear`]).
    fn first(&self, which: Which, from: u32, fill: Fill) -> Option<u32> {
        let mut index = (from / 64) as usize;
        let mut mask = u64::MAX << (from % 64);
        while index < self.available.words.len() {
            let word = match (which, fill) {
                (Which::Available, Fill::Set) => self.available.words[index],
                (Which::Available, Fill::Clear) => !self.available.words[index],
                (Which::Idle, Fill::Set) => self.idle_word(index),
                (Which::Idle, Fill::Clear) => !self.idle_word(index),
            };
            if word & mask != 0 {
                let bit = index as u32 * 64 + (word & mask).trailing_zeros();
                return (bit < self.pages).then_some(bit);
            }
            mask = u64::MAX;
            index += 1;
        }
        None
    }

    fn idle_word(&self, index: usize) -> u64 {
        self.available.words[index] & self.committed.words[index]
    }

    /// Recounts from the bitmaps; for the invariant checks.
    pub(crate) fn counts_agree(&self) -> bool {
        let pages = || 0..self.pages;
        let available = pages().filter(|&page| self.available.get(page)).count();
        let committed = pages().filter(|&page| self.committed.get(page)).count();
        let idle = pages().filter(|&page| self.available.get(page) && self.committed.get(page));
        available == self.available_count as usize
            && committed == self.committed_count as usize
            && idle.count() == self.idle_count as usize
    }
}

/// Which pages a search is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// Any available page.
    Available,
    /// Those that hold memory already.
    Idle,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_heap_of_any_size_starts_as_one_run() {
        for pages in [1, 63, 64, 65, 128, 1_000] {
            let heap = Heap::uncommitted(pages);
            assert_eq!(
                heap.find(Which::Available, u32::MAX),
                Some(Run {
                    start: 0,
                    length: pages
                })
            );
            assert_eq!(heap.find(Which::Idle, 1), None);
            assert!(heap.is_empty() && heap.counts_agree());
            for purpose in [Purpose::Pool, Purpose::Reservation] {
                let heap = Heap::committed(pages, purpose);
                assert_eq!((heap.purpose(), heap.idle_count()), (purpose, pages));
                assert!(heap.is_empty() && heap.counts_agree());
            }
        }
    }

    #[test]
    fn a_count_that_is_off_is_noticed() {
        let spoils: [fn(&mut Heap); 3] = [
            |heap| heap.available_count -= 1,
            |heap| heap.committed_count += 1,
            |heap| heap.idle_count += 1,
        ];
        for spoil in spoils {
            let mut heap = Heap::uncommitted(65);
            spoil(&mut heap);
            assert!(!heap.counts_agree());
        }
    }

    /// The runs of pages that `is` says yes to, by looking at each.
    fn runs(pages: u32, is: impl Fn(u32) -> bool) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for start in (0..pages).filter(|&page| is(page)) {
            match runs.last_mut() {
                Some(run) if run.start + run.length == start => run.length += 1,
                _ => runs.push(Run { start, length: 1 }),
            }
        }
        runs
    }

    proptest! {
        /// Of each page: taken, available, or idle.
        #[test]
        fn searches_agree_with_a_scan(
            states in proptest::collection::vec(0..3u8, 1..200),
            from in 0u32..300,
            wanted in 1u32..20,
        ) {
            let pages = states.len() as u32;
            let mut heap = Heap::uncommitted(pages);
            for (page, &state) in (0..pages).zip(&states) {
                if state != 1 {
                    heap.take(page);
                }
                if state == 2 {
                    heap.note_committed(page);
                    heap.put(page);
                }
            }
            prop_assert!(heap.counts_agree());
            prop_assert_eq!(heap.is_empty(), states.iter().all(|&state| state > 0));
            for (which, least) in [(Which::Available, 1), (Which::Idle, 2)] {
                let all = runs(pages, |page| states[page as usize] >= least);
                let rest = runs(pages, |page| page >= from && states[page as usize] >= least);
                let next = rest.first().copied();
                prop_assert_eq!(heap.run_from(which, from), next);
                let cut = |run: Run| Run { length: run.length.min(wanted), ..run };
                let here = next.filter(|run| run.start == from).map(cut);
                prop_assert_eq!(heap.run_at(which, from, wanted), here);
                let long = all.iter().find(|run| run.length >= wanted).copied().map(cut);
                let longer = |a: Run, b: Run| if b.length > a.length { b } else { a };
                prop_assert_eq!(heap.find(which, wanted), long.or(all.into_iter().reduce(longer)));
            }
        }
    }
}
