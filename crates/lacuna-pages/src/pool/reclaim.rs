//! Giving memory back: retired pages, watermarks, the limit, trimming.
//!
//! None of it can fail as far as the caller is concerned: what the device refuses stays on the
//! books as idle and is tried again at the next call.

use super::heap::{Purpose, Run, Which};
use super::plan::place;
use super::state::State;
use crate::device::{Commitment, Fence, FenceState, HeapId, Location, Operation, Patience};
use crate::units::PageCount;

impl State {
    /// Frees what retired pages can be freed, and gives idle memory back as limit and watermarks
    /// ask. Failures are tried again at the next call.
    pub(crate) fn settle(&mut self) {
        self.collect(Patience::Poll);
        self.give_back_spent_files();
        let idle = self.books.allocator.idle();
        let page = self.config.page_size.bytes();
        let high = self.config.high_watermark.get() / page;
        let low = self.config.low_watermark.get() / page;
        let keep = if idle > high || self.books.nothing_owned() {
            idle.min(low)
        } else {
            idle
        };
        let keep = keep.min(idle.saturating_sub(self.owed()));
        if keep < idle {
            self.shrink_to(keep);
        }
    }

    /// Pages committed beyond the limit.
    fn owed(&self) -> u64 {
        let committed = self.books.allocator.committed();
        let page = self.config.page_size.bytes();
        let limit = self.config.limit;
        limit.map_or(0, |limit| committed.saturating_sub(limit.get() / page))
    }

    pub(super) fn collect(&mut self, patience: Patience) {
        if self.books.has_retiring() {
            let device = &mut self.device;
            self.books
                .collect(|fence| matches!(device.wait(fence, patience), Ok(FenceState::Signalled)));
        }
    }

    /// Gives all idle memory back.
    pub(crate) fn trim(&mut self) {
        // Orphans first: on a device that finishes later, their pages have to be waited for too.
        self.release_orphans();
        self.collect(Patience::Block);
        self.give_back_spent_files();
        self.shrink_to(0);
        self.books.allocator.dissolve_all_tails();
        self.give_back_empty_heaps();
    }

    /// Lets go of files none of whose pages are owned any more.
    fn give_back_spent_files(&mut self) {
        for id in self.books.allocator.take_spent_files() {
            match self.device.destroy_heap(id) {
                Ok(()) => self.books.allocator.remove_heap(id),
                Err(_) => self.books.allocator.keep_spent_file(id),
            }
        }
    }

    /// Gives idle memory back until `keep` pages of it are left: first that of the heaps with the
    /// fewest owners, so that heaps become empty. Where memory goes by the heap, more than `keep`
    /// stays rather than less, unless the limit is exceeded.
    pub(super) fn shrink_to(&mut self, keep: u64) {
        self.shrink_available(keep);
        if self.books.allocator.idle() > keep {
            self.books.allocator.dissolve_all_tails();
            self.shrink_available(keep);
        }
    }

    fn shrink_available(&mut self, keep: u64) {
        let mut heaps: Vec<(u32, HeapId)> = (self.books.allocator.heaps())
            .filter(|(_, heap)| heap.purpose() == Purpose::Pool && heap.idle_count() > 0)
            .map(|(id, heap)| (heap.committed_count() - heap.idle_count(), id))
            .collect();
        heaps.sort_unstable();
        for (_, id) in heaps {
            let excess = self.books.allocator.idle().saturating_sub(keep);
            let heap = self.books.allocator.heap(id);
            if excess == 0 {
                return;
            }
            let per_page = self.device.commitment_at(heap.location()) == Commitment::PerPage;
            let fits = u64::from(heap.idle_count()) <= excess;
            if heap.is_empty() && (fits || (!per_page && self.owed() > 0)) {
                self.give_back_heap(id);
            } else if per_page {
                self.decommit(id, excess);
            }
        }
    }

    /// Gives idle memory of the other kind than `location` back, for `pages` pages of that to be committed instead, in whole
    /// heaps where it goes by these. Returns the pages given back.
    pub(super) fn give_back_beside(&mut self, location: Location, pages: u64) -> u64 {
        let allocator = &self.books.allocator;
        if allocator.idle() == allocator.idle_at(location) {
            return 0;
        }
        let before = allocator.committed();
        self.books.allocator.dissolve_all_tails();
        let mut heaps: Vec<(u32, HeapId)> = (self.books.allocator.heaps())
            .filter(|(_, heap)| heap.purpose() == Purpose::Pool && heap.location() != location)
            .map(|(id, heap)| (heap.committed_count() - heap.idle_count(), id))
            .collect();
        heaps.sort_unstable();
        for (_, id) in heaps {
            let given = before - self.books.allocator.committed();
            if given >= pages {
                break;
            }
            let heap = self.books.allocator.heap(id);
            if self.device.commitment_at(heap.location()) == Commitment::PerPage {
                self.decommit(id, pages - given);
            } else if heap.is_empty() {
                self.give_back_heap(id);
            }
        }
        before - self.books.allocator.committed()
    }

    /// Gives up to `excess` idle pages of a heap back, the last first.
    fn decommit(&mut self, id: HeapId, mut excess: u64) {
        let heap = self.books.allocator.heap(id);
        let mut runs = Vec::new();
        let mut from = 0;
        while let Some(run) = heap.run_from(Which::Idle, from) {
            runs.push(run);
            from = run.start + run.length;
        }
        let page_size = self.config.page_size;
        let mut batch = Vec::new();
        for run in runs.iter_mut().rev() {
            let length = u64::from(run.length).min(excess) as u32;
            *run = Run {
                start: run.start + run.length - length,
                length,
            };
            excess -= u64::from(length);
            if length > 0 {
                let length = page_size.bytes_of(PageCount::new(length.into()));
                batch.push(Operation::Decommit {
                    place: place(id, run.start, page_size),
                    length,
                });
            }
        }
        let applied = match self.device.apply(&batch, Fence::DONE) {
            Ok(_) => batch.len(),
            Err(error) => error.applied,
        };
        for run in runs.iter().rev().take(applied) {
            self.books.allocator.note_decommitted(id, *run);
            self.books.counts.pages_decommitted += u64::from(run.length);
        }
    }

    fn give_back_empty_heaps(&mut self) {
        let empty: Vec<HeapId> = (self.books.allocator.heaps())
            .filter(|(_, heap)| heap.purpose() == Purpose::Pool)
            .filter(|(_, heap)| heap.is_empty())
            .map(|(id, _)| id)
            .collect();
        for id in empty {
            self.give_back_heap(id);
        }
    }

    fn give_back_heap(&mut self, id: HeapId) {
        if self.device.destroy_heap(id).is_ok() {
            let committed = self.books.allocator.heap(id).committed_count();
            self.books.counts.pages_decommitted += u64::from(committed);
            self.books.allocator.remove_heap(id);
        }
    }
}
