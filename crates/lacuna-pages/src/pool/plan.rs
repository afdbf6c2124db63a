//! Plans: what a call changes, slot by slot, and the device operations that bring it about. Pure.
//!
//! Every operation of the pool is a list of [`Edit`]s: growing turns holes into pages, sharing
//! turns holes into sealed pages, unmapping turns pages into holes, copy on write turns one page
//! into another. From the edits follow the device's operations (neighbours merged), their undoing
//! (the edits reversed) and the record in the books (each edit once), so the three cannot disagree.

use super::allocator::{Claim, Memory};
use crate::device::{Address, HeapId, Operation, Place, SpaceId};
use crate::table::{Slot, Table};
use crate::units::{ByteLength, PageSize, VirtualPage};

/// One slot's change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edit {
    /// Which of the call's buffers.
    pub(crate) target: usize,
    pub(crate) space: SpaceId,
    pub(crate) page: VirtualPage,
    pub(crate) from: Slot,
    pub(crate) to: Slot,
    pub(crate) contents: Contents,
}

impl Edit {
    fn reversed(self) -> Self {
        Self {
            from: self.to,
            to: self.from,
            ..self
        }
    }
}

/// What the new page of an edit is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// Whatever it holds.
    AsIs,
    /// Zeros.
    Zeroed,
    /// What the old page holds.
    Copied,
}

/// What takes a finished operation back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Undo {
    /// Nothing needs to, or giving back what it committed.
    Nothing,
    /// Reversing edits, from the first index to before the second.
    Edits(usize, usize),
}

/// Edits, claims and the device operations that follow from them.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) edits: Vec<Edit>,
    pub(crate) claims: Vec<Claim>,
    /// Heaps made because the claims needed them.
    pub(crate) heaps: Vec<HeapId>,
    operations: Vec<Operation>,
    undo: Vec<Undo>,
}

/// Whether the device moves pages at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moves {
    /// It maps and unmaps.
    Mapped,
    /// Every page has its one place for good.
    Fixed,
}

impl Plan {
    pub(crate) fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// The map operations among them.
    pub(crate) fn map_calls(&self) -> u64 {
        let maps = self
            .operations
            .iter()
            .filter(|op| matches!(op, Operation::Map { .. }));
        maps.count() as u64
    }

    /// How many regions the plan adds. None if it only detaches: that must not be refused for want
    /// of mappings, and the device's share leaves room for it.
    pub(crate) fn regions_added<'a>(&self, table: impl Fn(usize) -> &'a Table) -> u64 {
        if self.edits.iter().all(|edit| edit.to.page().is_none()) {
            return 0;
        }
        let (mut before, mut after) = (0, 0);
        for (index, edit) in self.edits.iter().enumerate() {
            let table = table(edit.target);
            let page = edit.page.index();
            let beside = |edit: Option<&Edit>, target, page| {
                edit.filter(|edit| edit.target == target && edit.page.index() == page)
                    .copied()
            };
            if page > 0 {
                let old = table.get(VirtualPage::new(page - 1));
                let edited = index.checked_sub(1).and_then(|index| self.edits.get(index));
                let new = beside(edited, edit.target, page - 1).map_or(old, |edit| edit.to);
                before += u64::from(!old.continues_into(edit.from));
                after += u64::from(!new.continues_into(edit.to));
            }
            let next_is_edited = beside(self.edits.get(index + 1), edit.target, page + 1).is_some();
            if page + 1 < table.pages().get() && !next_is_edited {
                let next = table.get(VirtualPage::new(page + 1));
                before += u64::from(!edit.from.continues_into(next));
                after += u64::from(!edit.to.continues_into(next));
            }
        }
        u64::saturating_sub(after, before)
    }

    /// Works the operations out: commit, copy, attach and detach, zero, in this order.
    pub(crate) fn compile(&mut self, page_size: PageSize, moves: Moves) {
        if moves == Moves::Mapped {
            self.compile_commits(page_size);
            self.compile_copies(page_size);
            let edits = std::mem::take(&mut self.edits);
            for (operation, start, end) in merged(&edits, page_size) {
                self.push(operation, Undo::Edits(start, end));
            }
            self.edits = edits;
        }
        self.compile_zeros(page_size);
    }

    fn push(&mut self, operation: Operation, undo: Undo) {
        self.operations.push(operation);
        self.undo.push(undo);
    }

    fn compile_commits(&mut self, page_size: PageSize) {
        let length = page_size.length();
        for claim in self
            .claims
            .iter()
            .filter(|claim| claim.memory == Memory::Fresh)
        {
            let place = place(claim.page.heap, claim.page.index, page_size);
            let last = self.operations.last_mut();
            if let Some(Operation::Commit {
                place: start,
                length: total,
            }) = last
                && start.heap == place.heap
                && start.offset + total.get() == place.offset
            {
                *total = longer(*total, length);
                continue;
            }
            self.operations.push(Operation::Commit { place, length });
            self.undo.push(Undo::Nothing);
        }
    }

    fn compile_copies(&mut self, page_size: PageSize) {
        for edit in self
            .edits
            .iter()
            .filter(|edit| edit.contents == Contents::Copied)
        {
            let Some(page) = edit.to.page() else { continue };
            let from = address(edit, page_size);
            let to = place(page.heap, page.index, page_size);
            self.operations.push(Operation::Copy {
                from,
                to,
                length: page_size.length(),
            });
            self.undo.push(Undo::Nothing);
        }
    }

    fn compile_zeros(&mut self, page_size: PageSize) {
        let length = page_size.length();
        for edit in self
            .edits
            .iter()
            .filter(|edit| edit.contents == Contents::Zeroed)
        {
            let address = address(edit, page_size);
            let last = self.operations.last_mut();
            if let Some(Operation::Zero {
                address: start,
                length: total,
            }) = last
                && follows(*start, *total, address)
            {
                *total = longer(*total, length);
                continue;
            }
            self.operations.push(Operation::Zero { address, length });
            self.undo.push(Undo::Nothing);
        }
    }

    /// The operations that put back what the first `applied` attached or detached, the last of
    /// them first.
    pub(crate) fn undo_edits(&self, applied: usize, page_size: PageSize) -> Vec<Operation> {
        let mut back = Vec::new();
        for undo in self.undo[..applied].iter().rev() {
            if let Undo::Edits(start, end) = *undo {
                let edits: Vec<Edit> = self.edits[start..end]
                    .iter()
                    .map(|edit| edit.reversed())
                    .collect();
                back.extend(merged(&edits, page_size).map(|(operation, ..)| operation));
            }
        }
        back
    }

    /// The operations that give back what the first `applied` committed.
    pub(crate) fn undo_commits(&self, applied: usize) -> Vec<Operation> {
        let finished = self.operations[..applied].iter();
        let commits = finished.filter_map(|operation| match *operation {
            Operation::Commit { place, length } => Some(Operation::Decommit { place, length }),
            _ => None,
        });
        commits.collect()
    }
}

/// The operations that bring `edits` about, each with the edits it covers.
fn merged(edits: &[Edit], page_size: PageSize) -> impl Iterator<Item = (Operation, usize, usize)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        while next < edits.len() {
            let start = next;
            next += 1;
            let Some(mut operation) = operation(&edits[start], page_size) else {
                continue;
            };
            while let Some(edit) = edits.get(next)
                && let Some(extended) = extend(operation, edit, page_size)
            {
                operation = extended;
                next += 1;
            }
            return Some((operation, start, next));
        }
        None
    })
}

/// What one edit asks of the device, if anything.
fn operation(edit: &Edit, page_size: PageSize) -> Option<Operation> {
    let address = address(edit, page_size);
    let length = page_size.length();
    match (edit.from.mapping(), edit.to.mapping()) {
        (Some((old, before)), Some((new, access))) if old == new => {
            (before != access).then_some(Operation::Protect {
                address,
                length,
                access,
            })
        }
        (_, Some((page, access))) => {
            let place = place(page.heap, page.index, page_size);
            Some(Operation::Map {
                address,
                place,
                length,
                access,
            })
        }
        (Some(_), None) => Some(Operation::Unmap { address, length }),
        (None, None) => None,
    }
}

/// `operation` grown by `edit`, if they are one in both address space and heap.
fn extend(before: Operation, edit: &Edit, page_size: PageSize) -> Option<Operation> {
    let after = operation(edit, page_size)?;
    match (before, after) {
        (
            Operation::Map {
                address,
                place,
                length,
                access,
            },
            Operation::Map {
                address: next,
                place: next_place,
                length: more,
                access: next_access,
            },
        ) if follows(address, length, next)
            && place.heap == next_place.heap
            && place.offset + length.get() == next_place.offset
            && access == next_access =>
        {
            Some(Operation::Map {
                address,
                place,
                length: longer(length, more),
                access,
            })
        }
        (
            Operation::Unmap { address, length },
            Operation::Unmap {
                address: next,
                length: more,
            },
        ) if follows(address, length, next) => Some(Operation::Unmap {
            address,
            length: longer(length, more),
        }),
        (
            Operation::Protect {
                address,
                length,
                access,
            },
            Operation::Protect {
                address: next,
                length: more,
                access: next_access,
            },
        ) if follows(address, length, next) && access == next_access => Some(Operation::Protect {
            address,
            length: longer(length, more),
            access,
        }),
        _ => None,
    }
}

fn follows(address: Address, length: ByteLength, next: Address) -> bool {
    address.space == next.space && address.offset + length.get() == next.offset
}

/// The sum of two lengths that lie side by side in one reservation.
fn longer(length: ByteLength, more: ByteLength) -> ByteLength {
    ByteLength::new(length.get() + more.get())
}

fn address(edit: &Edit, page_size: PageSize) -> Address {
    Address {
        space: edit.space,
        offset: page_size.offset_of(edit.page),
    }
}

pub(crate) fn place(heap: HeapId, page: u32, page_size: PageSize) -> Place {
    Place {
        heap,
        offset: u64::from(page) * page_size.bytes(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::allocator::BufferId;
    use super::*;
    use crate::device::Access;
    use crate::units::{PageCount, PhysicalPage};

    const SIZE: PageSize = PageSize::KIB_4;

    fn physical(index: u32) -> PhysicalPage {
        PhysicalPage {
            heap: HeapId(0),
            index,
        }
    }

    fn edit(page: u64, from: Slot, to: Slot) -> Edit {
        let page = VirtualPage::new(page);
        Edit {
            target: 0,
            space: SpaceId(0),
            page,
            from,
            to,
            contents: Contents::AsIs,
        }
    }

    fn pages(count: u64) -> ByteLength {
        SIZE.bytes_of(PageCount::new(count))
    }

    fn at(page: u64) -> Address {
        Address {
            space: SpaceId(0),
            offset: page * SIZE.bytes(),
        }
    }

    fn compiled(edits: Vec<Edit>, fresh: &[u32]) -> Plan {
        let claim = |&index: &u32| Claim {
            buffer: BufferId(0),
            page: physical(index),
            memory: Memory::Fresh,
        };
        let claims = fresh.iter().map(claim).collect();
        let mut plan = Plan {
            edits,
            claims,
            ..Plan::default()
        };
        plan.compile(SIZE, Moves::Mapped);
        plan
    }

    #[test]
    fn pages_adjacent_in_both_spaces_are_committed_and_mapped_as_one() {
        let grown = |page, index| edit(page, Slot::Hole, Slot::Writable(physical(index)));
        let plan = compiled(vec![grown(0, 8), grown(1, 9), grown(2, 20)], &[8, 9, 20]);
        let map = |page, index, count| Operation::Map {
            address: at(page),
            place: place(HeapId(0), index, SIZE),
            length: pages(count),
            access: Access::ReadWrite,
        };
        assert_eq!(plan.operations()[2..], [map(0, 8, 2), map(2, 20, 1)]);
        assert_eq!(plan.operations().len(), 4);
        let decommit = |index, count| Operation::Decommit {
            place: place(HeapId(0), index, SIZE),
            length: pages(count),
        };
        assert_eq!(plan.undo_commits(4), [decommit(8, 2), decommit(20, 1)]);
        assert_eq!(plan.undo_commits(1), [decommit(8, 2)]);
    }

    #[test]
    fn undoing_restores_what_each_finished_operation_replaced() {
        let edits = vec![
            edit(0, Slot::Sealed(physical(1)), Slot::Hole),
            edit(1, Slot::Writable(physical(2)), Slot::Hole),
            edit(2, Slot::Writable(physical(5)), Slot::Sealed(physical(5))),
        ];
        let plan = compiled(edits, &[]);
        assert_eq!(plan.operations().len(), 2, "one unmap and one protect");
        let undo = plan.undo_edits(1, SIZE);
        let map = |page, index, access| Operation::Map {
            address: at(page),
            place: place(HeapId(0), index, SIZE),
            length: pages(1),
            access,
        };
        assert_eq!(
            undo,
            [map(0, 1, Access::Read), map(1, 2, Access::ReadWrite)]
        );
        let undo = plan.undo_edits(2, SIZE);
        let (address, length, access) = (at(2), pages(1), Access::ReadWrite);
        assert_eq!(
            undo[0],
            Operation::Protect {
                address,
                length,
                access
            }
        );
        assert!(plan.undo_edits(0, SIZE).is_empty());
    }

    #[test]
    fn the_regions_a_plan_adds_are_what_the_table_counts_afterwards() {
        let mut table = Table::new(PageCount::new(12));
        for page in 0..9u32 {
            let virtual_page = VirtualPage::new(page.into());
            table.make_room(virtual_page).unwrap();
            table.set(virtual_page, Slot::Writable(physical(page)));
        }
        let sealed = |page: u32| {
            let slot = physical(page);
            edit(page.into(), Slot::Writable(slot), Slot::Sealed(slot))
        };
        for edits in [
            vec![sealed(3), sealed(4), sealed(7)],
            vec![edit(10, Slot::Hole, Slot::Writable(physical(30)))],
            vec![edit(9, Slot::Hole, Slot::Writable(physical(9)))],
        ] {
            let before = table.regions();
            let plan = compiled(edits, &[]);
            let added = plan.regions_added(|_| &table);
            for edit in &plan.edits {
                table.make_room(edit.page).unwrap();
                table.set(edit.page, edit.to);
            }
            assert_eq!(table.regions().saturating_sub(before), added);
        }
    }

    /// Virtual pages of each of two buffers.
    const PAGES: u64 = 8;

    /// What a device maps where.
    type Mapped = BTreeMap<(SpaceId, u64), (PhysicalPage, Access)>;

    /// Does what a device does, page by page.
    fn perform(mapped: &mut Mapped, operation: &Operation) {
        let pages = |address: Address, length: ByteLength| {
            let first = address.offset / SIZE.bytes();
            (first..first + length.get() / SIZE.bytes()).map(move |page| (address.space, page))
        };
        match *operation {
            Operation::Map {
                address,
                place,
                length,
                access,
            } => {
                let first = (place.offset / SIZE.bytes()) as u32;
                for (at, index) in pages(address, length).zip(first..) {
                    let heap = place.heap;
                    mapped.insert(at, (PhysicalPage { heap, index }, access));
                }
            }
            Operation::Unmap { address, length } => {
                pages(address, length).for_each(|at| assert!(mapped.remove(&at).is_some()));
            }
            Operation::Protect {
                address,
                length,
                access,
            } => {
                for at in pages(address, length) {
                    mapped.get_mut(&at).expect("protected where mapped").1 = access;
                }
            }
            other => panic!("{other:?} commits, copies or zeroes"),
        }
    }

    /// A slot of a page that is often the neighbour of its neighbour's.
    fn slot(page: u64) -> impl Strategy<Value = Slot> {
        let place = (0..3u32, 0..3u32).prop_map(move |(heap, shift)| PhysicalPage {
            heap: HeapId(heap / 2),
            index: page as u32 + shift / 2,
        });
        prop_oneof![
            2 => Just(Slot::Hole),
            1 => Just(Slot::Swapped),
            3 => place.clone().prop_map(Slot::Writable),
            3 => place.prop_map(Slot::Sealed),
        ]
    }

    /// Of each page of both buffers what its slot is, and what it is to become.
    fn changes() -> impl Strategy<Value = Vec<(Slot, Option<Slot>)>> {
        let each = |page| (slot(page), proptest::option::weighted(0.7, slot(page)));
        let changes: Vec<_> = (0..2 * PAGES).map(|index| each(index % PAGES)).collect();
        changes
    }

    proptest! {
        #[test]
        fn operations_bring_edits_about_and_are_undone_from_anywhere(changes in changes()) {
            let mut tables = [(); 2].map(|()| Table::new(PageCount::new(PAGES)));
            let (mut before, mut after) = (Mapped::new(), Mapped::new());
            let mut edits = Vec::new();
            for (index, &(from, to)) in changes.iter().enumerate() {
                let (target, page) = (index / PAGES as usize, index as u64 % PAGES);
                let virtual_page = VirtualPage::new(page);
                tables[target].make_room(virtual_page).unwrap();
                tables[target].set(virtual_page, from);
                let space = SpaceId(target as u32);
                before.extend(from.mapping().map(|mapping| ((space, page), mapping)));
                after.extend(to.unwrap_or(from).mapping().map(|mapping| ((space, page), mapping)));
                edits.extend(to.map(|to| Edit { target, space, ..edit(page, from, to) }));
            }
            let only_detaches = edits.iter().all(|edit| edit.to.page().is_none());
            let plan = compiled(edits, &[]);
            let mut mapped = before.clone();
            for (done, operation) in plan.operations().iter().enumerate() {
                let mut undone = mapped.clone();
                plan.undo_edits(done, SIZE).iter().for_each(|back| perform(&mut undone, back));
                prop_assert_eq!(&undone, &before);
                perform(&mut mapped, operation);
            }
            prop_assert_eq!(mapped, after);

            let regions = |tables: &[Table]| tables.iter().map(Table::regions).sum::<u64>();
            let held = regions(&tables);
            let added = plan.regions_added(|target| &tables[target]);
            for edit in &plan.edits {
                tables[edit.target].set(edit.page, edit.to);
            }
            let more = regions(&tables).saturating_sub(held);
            prop_assert_eq!(added, if only_detaches { 0 } else { more });
        }
    }

    #[test]
    fn what_lies_side_by_side_in_one_space_and_heap_is_one_operation() {
        let sealed = |index| Slot::Sealed(physical(index));
        let writable = |index| Slot::Writable(physical(index));
        let operations = |edits: &[Edit]| compiled(edits.to_vec(), &[]).operations().len();
        let unmapped = [
            edit(0, writable(0), Slot::Hole),
            edit(1, sealed(7), Slot::Hole),
        ];
        assert_eq!(operations(&unmapped), 1);
        let apart = [unmapped[0], edit(2, sealed(7), Slot::Hole)];
        assert_eq!(operations(&apart), 2);
        let elsewhere = Edit {
            space: SpaceId(1),
            ..unmapped[1]
        };
        assert_eq!(operations(&[unmapped[0], elsewhere]), 2);
        let sealing = [
            edit(0, writable(4), sealed(4)),
            edit(1, writable(9), sealed(9)),
        ];
        assert_eq!(operations(&sealing), 1);
        let unsealing = edit(1, sealed(9), writable(9));
        assert_eq!(operations(&[sealing[0], unsealing]), 2);
        let shared = [
            edit(0, Slot::Hole, sealed(4)),
            edit(1, Slot::Hole, sealed(5)),
        ];
        assert_eq!(operations(&shared), 1);
        assert_eq!(
            operations(&[shared[0], edit(1, Slot::Hole, writable(5))]),
            2
        );
        assert_eq!(operations(&[shared[0], edit(1, Slot::Hole, sealed(6))]), 2);
        assert_eq!(operations(&[edit(0, sealed(4), sealed(4))]), 0, "as it was");
    }

    #[test]
    fn new_pages_side_by_side_are_zeroed_by_one_operation() {
        let zeroed = |page, index| Edit {
            contents: Contents::Zeroed,
            ..edit(page, Slot::Hole, Slot::Writable(physical(index)))
        };
        let plan = compiled(vec![zeroed(0, 8), zeroed(1, 3), zeroed(5, 4)], &[]);
        let zero = |page, count| Operation::Zero {
            address: at(page),
            length: pages(count),
        };
        assert_eq!(plan.operations()[3..], [zero(0, 2), zero(5, 1)]);
        assert_eq!(plan.map_calls(), 3);
        assert!(plan.undo_commits(5).is_empty());
    }
}
