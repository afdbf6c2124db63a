//! A device with memory of the host beside its own: one pool has both, under one limit, and a change of buffers of both
//! kinds is one change, which happens or does not.
//!
//! Which kind a reservation is filled with is said when it is made ([`Location`]). A batch goes to whose memory it is,
//! operation by operation in its order: neighbours of one kind in one call.
//!
//! # Safety
//!
//! The promises of [`Device`] are those of the two devices inside, which each see their own numbers alone:
//!
//! * **D1**, **D2** A view of a reservation is that of the device whose memory it is.
//! * **D3** An operation that names both kinds is refused, so memory of one never appears in the other.
//! * **D4** A batch stops with the first run of operations that does not end well, and counts what came before it.
#![expect(unsafe_code, reason = "the device trait is unsafe to implement")]

use crate::device::{
    Address, Aliasing, BatchError, Capabilities, Commitment, Device, DeviceError, Fence,
    FenceState, HeapId, Hole, HostView, Location, Operation, Patience, Place, SpaceId,
};
use crate::host::HostDevice;
use crate::units::ByteLength;

/// Reservations of the host's memory have this bit in their numbers, so that those of the device's own keep what the
/// device calls them.
const HOST_SPACE: u32 = 1 << 31;

/// A device and, beside its own memory, the host's: see the module's documentation.
#[derive(Debug)]
pub struct SplitDevice<D> {
    own: D,
    host: HostDevice,
    capabilities: Capabilities,
}

impl<D: Device> SplitDevice<D> {
    /// `own` with memory of the host beside its own. It has the pages that both have, and is otherwise what `own` is.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where the host has no pages that come and go, or none as large as those of `own`, and
    /// where those of `own` do not.
    pub fn new(own: D) -> Result<Self, DeviceError> {
        let host = HostDevice::new()?;
        let (mine, its) = (own.capabilities(), host.capabilities());
        let unavailable = |what: &str| DeviceError::Unavailable {
            device: mine.name,
            reason: format!("memory of the host beside its own needs {what}"),
        };
        if mine.commitment == Commitment::WithReservation {
            return Err(unavailable("pages that come and go on both"));
        }
        let mut page_sizes = mine.page_sizes.clone();
        page_sizes.retain(|size| its.page_sizes.contains(size));
        if page_sizes.is_empty() {
            return Err(unavailable("pages of one size on both"));
        }
        let limits = [mine.mapping_limit, its.mapping_limit];
        let capabilities = Capabilities {
            page_sizes,
            aliasing: match (mine.aliasing, its.aliasing) {
                (Aliasing::Shared, Aliasing::Shared) => Aliasing::Shared,
                _ => Aliasing::Unsupported,
            },
            hole: Hole::Undefined,
            mapping_limit: limits.into_iter().flatten().min(),
            ..mine.clone()
        };
        Ok(Self {
            own,
            host,
            capabilities,
        })
    }

    fn device_of(&mut self, location: Location) -> &mut dyn Device {
        match location {
            Location::Own => &mut self.own,
            Location::Host => &mut self.host,
        }
    }
}

/// Whose a reservation is, and what it is called there.
fn space(space: SpaceId) -> (Location, SpaceId) {
    match space.0 & HOST_SPACE {
        0 => (Location::Own, space),
        _ => (Location::Host, SpaceId(space.0 & !HOST_SPACE)),
    }
}

/// The number here of a reservation of one of the two.
fn space_here(location: Location, space: SpaceId) -> SpaceId {
    match location {
        Location::Own => space,
        Location::Host => SpaceId(space.0 | HOST_SPACE),
    }
}

/// Heaps of both are numbered in turns: numbers stay small.
fn heap(heap: HeapId) -> (Location, HeapId) {
    let location = match heap.0 % 2 {
        0 => Location::Own,
        _ => Location::Host,
    };
    (location, HeapId(heap.0 / 2))
}

/// The number here of a heap of one of the two.
fn heap_here(location: Location, heap: HeapId) -> HeapId {
    HeapId(2 * heap.0 + location.index() as u32)
}

/// Whose an operation is, and what it is there; `None` for one that names both.
fn operation(operation: Operation) -> Option<(Location, Operation)> {
    let at = |address: Address| {
        let (location, space) = space(address.space);
        (location, Address { space, ..address })
    };
    let of = |place: Place| {
        let (location, heap) = heap(place.heap);
        (location, Place { heap, ..place })
    };
    let (location, other, operation) = match operation {
        Operation::Commit { place, length } => {
            let (location, place) = of(place);
            (location, location, Operation::Commit { place, length })
        }
        Operation::Decommit { place, length } => {
            let (location, place) = of(place);
            (location, location, Operation::Decommit { place, length })
        }
        Operation::Map {
            address,
            place,
            length,
            access,
        } => {
            let ((location, address), (other, place)) = (at(address), of(place));
            let map = Operation::Map {
                address,
                place,
                length,
                access,
            };
            (location, other, map)
        }
        Operation::Unmap { address, length } => {
            let (location, address) = at(address);
            (location, location, Operation::Unmap { address, length })
        }
        Operation::Protect {
            address,
            length,
            access,
        } => {
            let (location, address) = at(address);
            let protect = Operation::Protect {
                address,
                length,
                access,
            };
            (location, location, protect)
        }
        Operation::Copy { from, to, length } => {
            let ((location, from), (other, to)) = (at(from), of(to));
            (location, other, Operation::Copy { from, to, length })
        }
        Operation::Zero { address, length } => {
            let (location, address) = at(address);
            (location, location, Operation::Zero { address, length })
        }
    };
    (location == other).then_some((location, operation))
}

// SAFETY: D1 to D4 as the module documentation has them.
unsafe impl<D: Device> Device for SplitDevice<D> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        self.reserve_at(Location::Own, length)
    }

    fn reserve_at(
        &mut self,
        location: Location,
        length: ByteLength,
    ) -> Result<SpaceId, DeviceError> {
        let space = self.device_of(location).reserve(length)?;
        Ok(space_here(location, space))
    }

    fn release(&mut self, id: SpaceId, after: Fence) -> Result<Fence, DeviceError> {
        let (location, id) = space(id);
        // Nothing on the device's queue reads the host's memory.
        let after = if location == Location::Own {
            after
        } else {
            Fence::DONE
        };
        self.device_of(location).release(id, after)
    }

    fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError> {
        self.create_heap_at(Location::Own, length)
    }

    fn create_heap_at(
        &mut self,
        location: Location,
        length: ByteLength,
    ) -> Result<HeapId, DeviceError> {
        let heap = self.device_of(location).create_heap(length)?;
        Ok(heap_here(location, heap))
    }

    fn commitment_at(&self, location: Location) -> Commitment {
        match location {
            Location::Own => self.capabilities.commitment,
            Location::Host => self.host.capabilities().commitment,
        }
    }

    fn destroy_heap(&mut self, id: HeapId) -> Result<(), DeviceError> {
        let (location, id) = heap(id);
        self.device_of(location).destroy_heap(id)
    }

    fn apply(&mut self, batch: &[Operation], after: Fence) -> Result<Fence, BatchError> {
        let (mut applied, mut reached) = (0, Fence::DONE);
        let mut run: Vec<Operation> = Vec::with_capacity(batch.len());
        while let Some(&first) = batch.get(applied) {
            let Some((location, _)) = operation(first) else {
                return Err(BatchError {
                    applied,
                    cause: DeviceError::Invalid {
                        device: self.capabilities.name,
                        what: "attach memory of one kind to a reservation of another",
                    },
                });
            };
            run.clear();
            let same = batch[applied..].iter().map_while(|&next| operation(next));
            let same = same.take_while(|(other, _)| *other == location);
            run.extend(same.map(|(_, operation)| operation));
            let after = if location == Location::Own {
                after
            } else {
                Fence::DONE
            };
            let done = self.device_of(location).apply(&run, after);
            let fence = done.map_err(|error| BatchError {
                applied: applied + error.applied,
                ..error
            })?;
            // What the host does is done with the call.
            reached = reached.max(fence);
            applied += run.len();
        }
        Ok(reached)
    }

    fn wait(&mut self, fence: Fence, patience: Patience) -> Result<FenceState, DeviceError> {
        self.own.wait(fence, patience)
    }

    fn host_view(&self, id: SpaceId) -> Option<HostView> {
        match space(id) {
            (Location::Own, id) => self.own.host_view(id),
            (Location::Host, id) => self.host.host_view(id),
        }
    }

    fn is_lost(&self) -> bool {
        self.own.is_lost()
    }
}
