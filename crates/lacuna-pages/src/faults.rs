//! A device that refuses calls, ends batches halfway and is late, as it is told: for tests of what
//! stands on a pool.
//!
//! # Safety
//!
//! The wrapper keeps the promises of [`Device`] as the device inside does. A batch is passed on one
//! operation at a time and stops at the first failure, told or real, so [`BatchError::applied`] is
//! exact; a fence that is late is one whose effect is there already.
#![expect(unsafe_code, reason = "a device is unsafe to implement")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::{
    BatchCost, BatchError, Capabilities, Commitment, Device, DeviceError, Fence, FenceState,
    FilePart, HeapId, HostView, Location, Operation, Ordering, Patience, SpaceId,
};
use crate::units::ByteLength;

/// Which calls fail. Each operation of a batch is a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Failing {
    /// None.
    #[default]
    Nothing,
    /// Only the n-th from now, from zero.
    Once(u64),
    /// The n-th from now and every later one.
    From(u64),
}

/// When what a device does is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Completion {
    /// With the call.
    #[default]
    Immediate,
    /// When [`Faults::complete`] says so, or somebody waits for it, as on a device with a queue.
    Late,
}

#[derive(Debug, Default)]
struct Orders {
    failing: Failing,
    calls: u64,
    lost: bool,
    submitted: u64,
    completed: u64,
}

/// Tells a [`FaultyDevice`] what to do. Clones tell the same device.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Mutex<Orders>>);

impl Faults {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which calls fail from now on.
    pub fn fail(&self, failing: Failing) {
        let mut orders = self.orders();
        orders.failing = failing;
        orders.calls = 0;
    }

    /// The device is gone from now on: every call fails with [`DeviceError::Lost`].
    pub fn lose(&self) {
        self.orders().lost = true;
    }

    /// Whatever was late is done.
    pub fn complete(&self) {
        let mut orders = self.orders();
        orders.completed = orders.submitted;
    }

    fn check(&self) -> Result<(), DeviceError> {
        let mut orders = self.orders();
        if orders.lost {
            return Err(DeviceError::Lost);
        }
        let call = orders.calls;
        orders.calls += 1;
        let fails = match orders.failing {
            Failing::Nothing => false,
            Failing::Once(at) => call == at,
            Failing::From(at) => call >= at,
        };
        match fails {
            true => Err(DeviceError::System {
                call: "injected",
                code: 5,
            }),
            false => Ok(()),
        }
    }
}

/// A device that does what another does, with faults.
#[derive(Debug)]
pub struct FaultyDevice<D> {
    inner: D,
    completion: Completion,
    capabilities: Capabilities,
    faults: Faults,
}

impl<D: Device> FaultyDevice<D> {
    /// Wraps `inner`. Without orders it does what `inner` does, `completion` apart.
    pub fn new(inner: D, completion: Completion) -> (Self, Faults) {
        let mut capabilities = inner.capabilities().clone();
        if completion == Completion::Late {
            capabilities.ordering = Ordering::Queue;
        }
        let faults = Faults::default();
        let device = Self {
            inner,
            completion,
            capabilities,
            faults: faults.clone(),
        };
        (device, faults)
    }

    /// The same, whose batches cost what `cost` says.
    #[must_use]
    pub fn with_batch_cost(mut self, cost: BatchCost) -> Self {
        self.capabilities.batch_cost = cost;
        self
    }

    fn fence(&self) -> Fence {
        match self.completion {
            Completion::Immediate => Fence::DONE,
            Completion::Late => {
                let mut orders = self.faults.orders();
                orders.submitted += 1;
                Fence(orders.submitted)
            }
        }
    }
}

// SAFETY: see the module's documentation.
unsafe impl<D: Device> Device for FaultyDevice<D> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        self.faults.check()?;
        self.inner.reserve(length)
    }

    fn reserve_at(
        &mut self,
        location: Location,
        length: ByteLength,
    ) -> Result<SpaceId, DeviceError> {
        self.faults.check()?;
        self.inner.reserve_at(location, length)
    }

    fn create_heap_at(
        &mut self,
        location: Location,
        length: ByteLength,
    ) -> Result<HeapId, DeviceError> {
        self.faults.check()?;
        self.inner.create_heap_at(location, length)
    }

    fn commitment_at(&self, location: Location) -> Commitment {
        self.inner.commitment_at(location)
    }

    fn release(&mut self, space: SpaceId, _after: Fence) -> Result<Fence, DeviceError> {
        self.faults.check()?;
        self.inner.release(space, Fence::DONE)?;
        Ok(self.fence())
    }

    fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError> {
        self.faults.check()?;
        self.inner.create_heap(length)
    }

    fn open_heap(&mut self, part: FilePart) -> Result<HeapId, DeviceError> {
        self.faults.check()?;
        self.inner.open_heap(part)
    }

    fn has_lost_files(&self) -> bool {
        self.inner.has_lost_files()
    }

    fn destroy_heap(&mut self, heap: HeapId) -> Result<(), DeviceError> {
        self.faults.check()?;
        self.inner.destroy_heap(heap)
    }

    fn apply(&mut self, batch: &[Operation], _after: Fence) -> Result<Fence, BatchError> {
        for (applied, operation) in batch.iter().enumerate() {
            let done = self.faults.check();
            done.map_err(|cause| BatchError { applied, cause })?;
            let done = self.inner.apply(&[*operation], Fence::DONE);
            done.map_err(|error| BatchError {
                applied: applied + error.applied,
                ..error
            })?;
        }
        Ok(self.fence())
    }

    fn wait(&mut self, fence: Fence, patience: Patience) -> Result<FenceState, DeviceError> {
        if self.completion == Completion::Late && patience == Patience::Block {
            self.faults.complete();
        }
        match fence.0 <= self.faults.orders().completed {
            true => Ok(FenceState::Signalled),
            false => Ok(FenceState::Pending),
        }
    }

    fn host_view(&self, space: SpaceId) -> Option<HostView> {
        self.inner.host_view(space)
    }

    fn is_lost(&self) -> bool {
        self.faults.orders().lost || self.inner.is_lost()
    }
}

#[cfg(test)]
#[cfg(any(target_os = "linux", target_os = "android"))]
mod tests {
    use super::*;
    use crate::device::{Access, Address, Place};
    use crate::{HostDevice, PageSize, Pool, PoolConfig};

    const LENGTH: ByteLength = ByteLength::kibibytes(64);

    fn device(completion: Completion) -> (FaultyDevice<HostDevice>, Faults) {
        FaultyDevice::new(HostDevice::new().expect("a host with pages"), completion)
    }

    #[test]
    fn the_calls_that_were_told_to_fail_do_and_no_others() {
        let (mut device, faults) = device(Completion::Immediate);
        let mut succeed = |failing| {
            faults.fail(failing);
            [(); 4].map(|()| device.reserve(LENGTH).is_ok())
        };
        assert_eq!(succeed(Failing::Nothing), [true; 4]);
        assert_eq!(succeed(Failing::Once(2)), [true, true, false, true]);
        assert_eq!(succeed(Failing::From(1)), [true, false, false, false]);
    }

    #[test]
    fn what_is_late_is_done_when_it_is_told_to_be_or_waited_for() {
        let (mut device, faults) = device(Completion::Late);
        let spaces = [(); 3].map(|()| device.reserve(LENGTH).expect("address space"));
        let fences = spaces.map(|space| device.release(space, Fence::DONE).expect("its own"));
        let mut states = |patience| fences.map(|fence| device.wait(fence, patience));
        let (pending, signalled) = (Ok(FenceState::Pending), Ok(FenceState::Signalled));
        for _ in 0..2 {
            assert_eq!(states(Patience::Poll), [(); 3].map(|()| pending.clone()));
        }
        assert_eq!(states(Patience::Block), [(); 3].map(|()| signalled.clone()));
        let empty = device.apply(&[], Fence::DONE).expect("nothing to do");
        assert!(empty > fences[2], "a later one");
        assert_eq!(device.wait(empty, Patience::Poll), pending);
        faults.complete();
        assert_eq!(device.wait(empty, Patience::Poll), signalled);
    }

    #[test]
    fn what_becomes_of_files_is_what_the_device_inside_says() {
        crate::guard::install().expect("a handler");
        let (mut device, _) = device(Completion::Immediate);
        let named = tempfile::NamedTempFile::new().expect("a file");
        let file = named.as_file();
        file.set_len(LENGTH.get()).expect("room");
        let part = FilePart {
            file: file.try_clone().expect("a descriptor"),
            offset: 0,
            length: LENGTH,
        };
        device.open_heap(part).expect("a file that is there");
        assert!(!device.has_lost_files());
        file.set_len(0).expect("it can be cut");
        assert!(device.has_lost_files());
    }

    #[test]
    fn a_batch_stops_at_what_is_told_to_fail_or_fails_by_itself() {
        let (mut device, faults) = device(Completion::Immediate);
        let heap = device.create_heap(LENGTH).expect("a descriptor");
        let space = device.reserve(LENGTH).expect("address space");
        let map = |offset| Operation::Map {
            address: Address { space, offset },
            place: Place { heap, offset },
            length: ByteLength::kibibytes(32),
            access: Access::ReadWrite,
        };
        assert!(device.host_view(space).is_some());
        let batch = [0, 32 << 10, 64 << 10].map(map);
        let applied = |device: &mut FaultyDevice<_>| {
            let stopped = device.apply(&batch, Fence::DONE);
            stopped.expect_err("the last is outside the heap").applied
        };
        assert_eq!(applied(&mut device), 2);
        faults.fail(Failing::Once(1));
        assert_eq!(applied(&mut device), 1);
        device.destroy_heap(heap).expect("there is one");
        device.destroy_heap(heap).expect_err("it is gone");
    }

    #[test]
    fn what_a_dropped_buffer_could_not_give_back_is_given_back_by_a_trim_when_the_device_is_late() {
        // The trim waited for what was late and only then ended the buffer that the device had refused
        // to end before, so that the pages of that one were late again and stayed committed.
        let host = HostDevice::new().expect("a host with pages");
        let (device, faults) = FaultyDevice::new(host, Completion::Late);
        let config = PoolConfig {
            page_size: PageSize::KIB_4,
            heap_bytes: ByteLength::kibibytes(64),
            ..PoolConfig::default()
        };
        let pool = Pool::new(device, config).expect("valid settings");
        let mut buffer = pool
            .reserve(ByteLength::kibibytes(32), "dropped")
            .expect("room");
        buffer.ensure_mapped(0..12 << 10).expect("memory");
        faults.fail(Failing::From(0));
        drop(buffer);
        assert_eq!(pool.ledger().mapped, ByteLength::kibibytes(12));
        faults.fail(Failing::Nothing);
        pool.trim();
        assert_eq!(pool.ledger().committed, ByteLength::ZERO);
    }
}
