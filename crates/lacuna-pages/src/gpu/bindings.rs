//! What is bound where in one reservation: the page table, the device's or the one that kernels look pages up in, as far as
//! it was queued.
//!
//! A GPU gives no error for touching a hole; it reads garbage, loses writes or kills the process.
//! So every command is checked against this table first. Pure; a change costs a tree search.

use std::collections::BTreeMap;

use crate::device::{Access, Address, HeapId, Operation, Place};

/// A run of addresses bound to adjacent places of one heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    length: u64,
    place: Place,
    access: Access,
}

impl Run {
    /// What is left of the run after its first `skip` bytes, cut to `length`.
    fn part(self, skip: u64, length: u64) -> Self {
        let place = Place {
            heap: self.place.heap,
            offset: self.place.offset + skip,
        };
        Self {
            length,
            place,
            ..self
        }
    }

    /// Whether `next`, which starts where this one ends, continues it.
    fn continues_into(&self, next: &Self) -> bool {
        self.access == next.access
            && self.place.heap == next.place.heap
            && self.place.offset + self.length == next.place.offset
    }
}

/// Where an operation changes bindings, if it does.
pub(crate) fn changed(operation: Operation) -> Option<Address> {
    match operation {
        Operation::Map { address, .. }
        | Operation::Unmap { address, .. }
        | Operation::Protect { address, .. } => Some(address),
        Operation::Commit { .. }
        | Operation::Decommit { .. }
        | Operation::Copy { .. }
        | Operation::Zero { .. } => None,
    }
}

/// Why a range cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// Part of it is a hole.
    Hole,
    /// Part of it may not be written.
    Sealed,
}

/// The bindings of one reservation; no two runs overlap or continue each other.
#[derive(Debug, Default)]
pub(crate) struct Bindings {
    runs: BTreeMap<u64, Run>,
}

impl Bindings {
    /// Enters an operation on this reservation; what does not change bindings is none of theirs.
    pub(crate) fn enter(&mut self, operation: Operation) {
        match operation {
            Operation::Map {
                address,
                place,
                length,
                access,
            } => self.map(address.offset, length.get(), place, access),
            Operation::Unmap { address, length } => self.unmap(address.offset, length.get()),
            Operation::Protect {
                address,
                length,
                access,
            } => self.protect(address.offset, length.get(), access),
            Operation::Commit { .. }
            | Operation::Decommit { .. }
            | Operation::Copy { .. }
            | Operation::Zero { .. } => {}
        }
    }

    pub(crate) fn map(&mut self, start: u64, length: u64, place: Place, access: Access) {
        self.unmap(start, length);
        let run = Run {
            length,
            place,
            access,
        };
        self.runs.insert(start, run);
        self.join(start + length);
        self.join(start);
    }

    pub(crate) fn unmap(&mut self, start: u64, length: u64) {
        self.split(start);
        self.split(start + length);
        while let Some((&at, _)) = self.runs.range(start..start + length).next() {
            self.runs.remove(&at);
        }
    }

    pub(crate) fn protect(&mut self, start: u64, length: u64, access: Access) {
        self.split(start);
        self.split(start + length);
        for (_, run) in self.runs.range_mut(start..start + length) {
            run.access = access;
        }
        let mut starts: Vec<u64> = self
            .runs
            .range(start..=start + length)
            .map(|(&at, _)| at)
            .collect();
        while let Some(at) = starts.pop() {
            self.join(at);
        }
    }

    /// Whether all of a range is bound, and may be used for `wanted`.
    pub(crate) fn check(&self, start: u64, length: u64, wanted: Access) -> Result<(), Denied> {
        let mut covered = start;
        let before = self.runs.range(..=start).next_back();
        let after = self.runs.range(start + 1..start + length);
        for (&at, run) in before.into_iter().chain(after) {
            if at > covered || at + run.length <= covered {
                return Err(Denied::Hole);
            }
            if wanted == Access::ReadWrite && run.access == Access::Read {
                return Err(Denied::Sealed);
            }
            covered = at + run.length;
        }
        match covered >= start + length {
            true => Ok(()),
            false => Err(Denied::Hole),
        }
    }

    /// Where the bytes of a range that is bound throughout are: places in their order, and how much is at each.
    #[cfg(any(feature = "vulkan", test))]
    pub(crate) fn places(&self, start: u64, length: u64) -> impl Iterator<Item = (Place, u64)> {
        let end = start + length;
        let before = self.runs.range(..=start).next_back();
        let after = self.runs.range(start + 1..end);
        before.into_iter().chain(after).map(move |(&at, run)| {
            let skip = start.saturating_sub(at);
            let part = run.part(skip, run.length.min(end - at) - skip);
            (part.place, part.length)
        })
    }

    /// Whether anything of `heap` is bound here.
    pub(crate) fn names(&self, heap: HeapId) -> bool {
        self.runs.values().any(|run| run.place.heap == heap)
    }

    /// Makes a run that reaches across `at` two.
    fn split(&mut self, at: u64) {
        let Some((&start, run)) = self.runs.range_mut(..at).next_back() else {
            return;
        };
        let (skip, length) = (at - start, run.length);
        if skip < length {
            let rest = run.part(skip, length - skip);
            run.length = skip;
            self.runs.insert(at, rest);
        }
    }

    /// Makes the run that ends at `at` and the one that starts there one, if they are.
    fn join(&mut self, at: u64) {
        let Some(&next) = self.runs.get(&at) else {
            return;
        };
        if let Some((&start, run)) = self.runs.range_mut(..at).next_back()
            && start + run.length == at
            && run.continues_into(&next)
        {
            run.length += next.length;
            self.runs.remove(&at);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: usize = 32;

    fn place(page: u64) -> Place {
        Place {
            heap: HeapId((page / 40) as u32),
            offset: page * 10,
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Map(u64, u64, u64, Access),
        Unmap(u64, u64),
        Protect(u64, u64, Access),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let access = || prop_oneof![Just(Access::Read), Just(Access::ReadWrite)];
        let range = || (0u64..24, 1u64..8);
        let step = prop_oneof![
            (range(), 0u64..80, access()).prop_map(|((a, n), p, w)| Step::Map(a, n, p, w)),
            range().prop_map(|(a, n)| Step::Unmap(a, n)),
            (range(), access()).prop_map(|((a, n), w)| Step::Protect(a, n, w)),
        ];
        proptest::collection::vec(step, 1..60)
    }

    proptest! {
        #[test]
        fn agrees_with_a_table_of_single_pages(steps in steps()) {
            let mut bindings = Bindings::default();
            let mut table = [None; PAGES];
            for step in steps {
                match step {
                    Step::Map(at, pages, from, access) => {
                        bindings.map(at * 10, pages * 10, place(from), access);
                        for page in 0..pages {
                            let offset = place(from).offset + page * 10;
                            let place = Place { offset, ..place(from) };
                            table[(at + page) as usize] = Some((place, access));
                        }
                    }
                    Step::Unmap(at, pages) => {
                        bindings.unmap(at * 10, pages * 10);
                        table[at as usize..(at + pages) as usize].fill(None);
                    }
                    Step::Protect(at, pages, access) => {
                        bindings.protect(at * 10, pages * 10, access);
                        for slot in &mut table[at as usize..(at + pages) as usize] {
                            *slot = slot.map(|(place, _)| (place, access));
                        }
                    }
                }
                check_agreement(&bindings, &table)?;
            }
        }
    }

    fn check_agreement(
        bindings: &Bindings,
        table: &[Option<(Place, Access)>; PAGES],
    ) -> Result<(), TestCaseError> {
        let mut runs = 0;
        for page in 0..PAGES {
            let before = page.checked_sub(1).and_then(|before| table[before]);
            let joined = match (before, table[page]) {
                (Some((before, left)), Some((place, right))) => {
                    let next = before.offset + 10 == place.offset;
                    left == right && before.heap == place.heap && next
                }
                _ => false,
            };
            runs += usize::from(table[page].is_some() && !joined);
            for length in 1..=(PAGES - page).min(5) {
                let slots = &table[page..page + length];
                let hole = slots.iter().any(Option::is_none);
                let sealed = slots.iter().flatten().any(|slot| slot.1 == Access::Read);
                let (at, bytes) = (page as u64 * 10, length as u64 * 10);
                prop_assert_eq!(bindings.check(at, bytes, Access::Read).is_err(), hole);
                let write = bindings.check(at, bytes, Access::ReadWrite).is_err();
                prop_assert_eq!(write, hole || sealed);
                if hole {
                    continue;
                }
                let places = bindings.places(at, bytes).flat_map(|(place, length)| {
                    (0..length / 10).map(move |page| Place {
                        offset: place.offset + page * 10,
                        ..place
                    })
                });
                let wanted = slots.iter().flatten().map(|slot| slot.0);
                prop_assert!(places.eq(wanted));
            }
        }
        prop_assert_eq!(bindings.runs.len(), runs);
        for heap in [HeapId(0), HeapId(1)] {
            let named = table.iter().flatten().any(|(place, _)| place.heap == heap);
            prop_assert_eq!(bindings.names(heap), named);
        }
        Ok(())
    }
}
