//! Plans: what a call changes, slot by slot, and the device operations that bring it about. Pure.
//!
//! Every operation of the pool is a list of [`Edit`]s: growing turns holes into pages, sharing
//! turns holes into sealed pages, unmapping turns pages into holes, copy on write turns one page
//! into another. From the edits follow the device's operations (neighbours merged), their undoing
//! (the edits reversed) and the record in the books (each edit once), so the three cannot disagree.

use super::allocator::{Claim, Memory};
use crate::device::{Address, HeapId, Operation, Place, SpaceId};
use crate::table::Slot;
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
            contents: Contents::AsIs,
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
    /// Nothing needs to.
    Nothing,
    /// Giving the memory back.
    Decommit,
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

    /// The most regions the plan can add: an operation splits a region in three at most.
    pub(crate) fn regions_added(&self) -> u64 {
        let changes = self
            .undo
            .iter()
            .filter(|undo| matches!(undo, Undo::Edits(..)));
        2 * changes.count() as u64
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
            self.undo.push(Undo::Decommit);
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

    /// The operations that take the first `applied` back, the last of them first.
    pub(crate) fn undo(&self, applied: usize, page_size: PageSize) -> Vec<Operation> {
        let mut back = Vec::new();
        for (operation, undo) in self.operations[..applied].iter().zip(&self.undo).rev() {
            match (*operation, *undo) {
                (Operation::Commit { place, length }, Undo::Decommit) => {
                    back.push(Operation::Decommit { place, length });
                }
                (_, Undo::Edits(start, end)) => {
                    let edits: Vec<Edit> = self.edits[start..end]
                        .iter()
                        .map(|edit| edit.reversed())
                        .collect();
                    back.extend(merged(&edits, page_size).map(|(operation, ..)| operation));
                }
                _ => {}
            }
        }
        back
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
