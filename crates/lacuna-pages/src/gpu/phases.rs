//! A batch, split into what the queue takes at once. Pure.
//!
//! Binding and copying are different queue operations, so a batch becomes a sequence of phases in
//! its own order. A pool's batch is copies, then mappings, then zeroing: one bind call at most.

use std::ops::Range;

use crate::device::{Operation, Place, SpaceId};

/// What one queue operation can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Change the page table.
    Bind,
    /// Move bytes.
    Transfer,
}

/// Part of a batch that is done at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Phase {
    pub(crate) kind: Kind,
    pub(crate) operations: Range<usize>,
}

/// The phases of `batch`, in order. Changing what a mapping allows is a matter of the device's own
/// table, and goes with the mappings.
pub(crate) fn phases(batch: &[Operation]) -> Vec<Phase> {
    let mut phases: Vec<Phase> = Vec::new();
    for (index, operation) in batch.iter().enumerate() {
        let kind = match operation {
            Operation::Copy { .. } | Operation::Zero { .. } => Kind::Transfer,
            _ => Kind::Bind,
        };
        match phases.last_mut() {
            Some(phase) if phase.kind == kind => phase.operations.end += 1,
            _ => phases.push(Phase {
                kind,
                operations: index..index + 1,
            }),
        }
    }
    phases
}

/// One change of the page table: `place` appears at an address, or a hole does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bind {
    pub(crate) space: SpaceId,
    pub(crate) start: u64,
    pub(crate) length: u64,
    pub(crate) place: Option<Place>,
}

impl Bind {
    fn continues_into(&self, next: &Self) -> bool {
        let adjacent = self.space == next.space && self.start + self.length == next.start;
        let same_memory = match (self.place, next.place) {
            (None, None) => true,
            (Some(place), Some(next)) => {
                place.heap == next.heap && place.offset + self.length == next.offset
            }
            _ => false,
        };
        adjacent && same_memory
    }
}

/// Two changes of one batch name the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overlap;

/// Sorts `binds` by address and makes one of those that continue each other: a driver makes no
/// such effort, and every bind it gets is a system call.
pub(crate) fn coalesce(mut binds: Vec<Bind>) -> Result<Vec<Bind>, Overlap> {
    binds.sort_by_key(|bind| (bind.space, bind.start));
    let mut merged: Vec<Bind> = Vec::with_capacity(binds.len());
    for bind in binds {
        match merged.last_mut() {
            Some(last) if last.space == bind.space && last.start + last.length > bind.start => {
                return Err(Overlap);
            }
            Some(last) if last.continues_into(&bind) => last.length += bind.length,
            _ => merged.push(bind),
        }
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Access, Address, HeapId};
    use crate::units::ByteLength;

    const PAGE: u64 = 65_536;

    fn bind(space: u32, page: u64, place: Option<(u32, u64)>) -> Bind {
        Bind {
            space: SpaceId(space),
            start: page * PAGE,
            length: PAGE,
            place: place.map(|(heap, page)| Place {
                heap: HeapId(heap),
                offset: page * PAGE,
            }),
        }
    }

    #[test]
    fn neighbours_in_both_spaces_become_one_bind() {
        let binds = vec![
            bind(1, 2, Some((0, 7))),
            bind(0, 1, Some((0, 5))),
            bind(0, 0, Some((0, 4))),
            bind(0, 2, Some((1, 6))),
            bind(1, 3, None),
            bind(1, 4, None),
        ];
        let merged = coalesce(binds).unwrap();
        let shape: Vec<_> = merged
            .iter()
            .map(|bind| (bind.space.0, bind.length / PAGE))
            .collect();
        assert_eq!(shape, [(0, 2), (0, 1), (1, 1), (1, 2)]);
    }

    #[test]
    fn an_address_named_twice_is_refused() {
        assert_eq!(
            coalesce(vec![bind(0, 1, None), bind(0, 1, Some((0, 0)))]),
            Err(Overlap)
        );
        assert!(coalesce(vec![bind(0, 1, None), bind(1, 1, None)]).is_ok());
    }

    #[test]
    fn a_pools_batch_has_one_phase_of_binds() {
        let length = ByteLength::new(PAGE);
        let address = |page: u64| Address {
            space: SpaceId(0),
            offset: page * PAGE,
        };
        let place = Place {
            heap: HeapId(0),
            offset: 0,
        };
        let access = Access::ReadWrite;
        let batch = [
            Operation::Copy {
                from: address(0),
                to: place,
                length,
            },
            Operation::Map {
                address: address(0),
                place,
                length,
                access,
            },
            Operation::Protect {
                address: address(1),
                length,
                access,
            },
            Operation::Unmap {
                address: address(2),
                length,
            },
            Operation::Zero {
                address: address(0),
                length,
            },
        ];
        let expected = [
            (Kind::Transfer, 0..1),
            (Kind::Bind, 1..4),
            (Kind::Transfer, 4..5),
        ];
        let found = phases(&batch);
        assert_eq!(found.len(), expected.len());
        for (phase, (kind, operations)) in found.into_iter().zip(expected) {
            assert_eq!(phase, Phase { kind, operations });
        }
        assert!(phases(&[]).is_empty());
    }
}
