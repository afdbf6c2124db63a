#![expect(
    unsafe_code,
    reason = "the trait is unsafe to implement: slices are made on its word"
)]

//! What a device must do: reserve address space, hold heaps of memory, and attach one to the
//! other in batches. Eight methods, two for files and three for memory of two kinds; everything else a device differs
//! in is data ([`Capabilities`]).
//!
//! The pool plans, the device performs: it keeps no books, merges nothing and decides nothing.
//!
//! # Safety
//!
//! Safe code gets `&[u8]` and `&mut [u8]` on the word of a [`Device`], so its implementer promises:
//!
//! * **D1** The pointer of [`HostView::Pointer`] stays the base of the whole reservation until
//!   [`Device::release`] succeeds, and no one else uses that range.
//! * **D2** When [`Device::apply`] returns success, the host reads and writes the mapped memory at
//!   `base + offset`, for a mapping with [`Access::ReadWrite`], and reads it, for
//!   [`Access::Read`], without a fault; this holds for host-visible devices of either ordering.
//! * **D3** Two pages show the same memory only if they were mapped to the same place of the same
//!   heap, and nothing but a mapping, [`Operation::Zero`] or [`Operation::Copy`] touches it. A heap
//!   that is part of a file is only ever mapped for reading; what other processes do to the file
//!   changes which plain numbers are read, as with any mapped file.
//! * **D4** After an error of [`Device::apply`] exactly the first `applied` operations have taken
//!   effect, and the others not even in part, but for the contents of memory they were to write.

use std::fmt;
use std::fs::File;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crate::units::{ByteLength, PageSize};

/// Names a heap of a device; a device hands out small numbers and reuses those of destroyed heaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HeapId(pub u32);

/// Names a reservation of a device; a device hands out small numbers and reuses released ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId(pub u32);

impl HeapId {
    /// The name of what a device keeps in this place.
    pub(crate) fn of(place: usize) -> Self {
        Self(number(place))
    }

    /// The place.
    pub(crate) fn place(self) -> usize {
        self.0 as usize
    }
}

impl SpaceId {
    /// The name of what a device keeps in this place.
    pub(crate) fn of(place: usize) -> Self {
        Self(number(place))
    }

    /// The place.
    pub(crate) fn place(self) -> usize {
        self.0 as usize
    }
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("fewer than 2^32 reservations and heaps exist")
}

/// Whose memory a reservation is filled with. Most devices have one kind, their own; a
/// [`SplitDevice`](crate::SplitDevice) has two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Location {
    /// The device's own.
    #[default]
    Own,
    /// The host's, beside a device that the host does not see into.
    Host,
}

impl Location {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Own, Self::Host];

    /// Its place in [`Location::ALL`].
    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// A place in reserved address space, in bytes from its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The reservation.
    pub space: SpaceId,
    /// Bytes from its base.
    pub offset: u64,
}

/// A place in a heap, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The heap.
    pub heap: HeapId,
    /// Bytes from its start.
    pub offset: u64,
}

/// What a mapping allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads; a write faults where the device can make it.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// One step of a batch. Offsets and lengths are multiples of the pool's page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Obtain physical memory for part of a heap; it reads as zeros. Only where
    /// [`Commitment::PerPage`].
    Commit {
        /// Where in the heap.
        place: Place,
        /// Bytes.
        length: ByteLength,
    },
    /// Give that memory back; its contents are lost. Only where [`Commitment::PerPage`].
    Decommit {
        /// Where in the heap.
        place: Place,
        /// Bytes.
        length: ByteLength,
    },
    /// Attach committed memory, in place of whatever was attached there.
    Map {
        /// Where it appears.
        address: Address,
        /// What appears.
        place: Place,
        /// Bytes.
        length: ByteLength,
        /// What may be done with it.
        access: Access,
    },
    /// Detach whatever is attached, leaving a hole.
    Unmap {
        /// Where.
        address: Address,
        /// Bytes.
        length: ByteLength,
    },
    /// Change what a mapping allows.
    Protect {
        /// Where.
        address: Address,
        /// Bytes.
        length: ByteLength,
        /// What may be done from now on.
        access: Access,
    },
    /// Copy mapped memory to another part of a heap.
    Copy {
        /// Mapped memory to read.
        from: Address,
        /// Committed memory to write.
        to: Place,
        /// Bytes.
        length: ByteLength,
    },
    /// Fill mapped, writable memory with zeros.
    Zero {
        /// Where.
        address: Address,
        /// Bytes.
        length: ByteLength,
    },
}

/// Whether one physical page can appear at two addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aliasing {
    /// It can: pages are shared.
    Shared,
    /// It cannot: sharing is [`crate::Error::Unsupported`] and callers copy.
    Unsupported,
}

/// What happens when a hole is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hole {
    /// The access faults.
    Fault,
    /// Reads give zeros.
    Zero,
    /// Anything.
    Undefined,
}

/// When a batch takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Before `apply` returns.
    Immediate,
    /// On the device's queue: when the fence that `apply` returned is signalled.
    Queue,
    /// As [`Ordering::Queue`], on one queue that does everything in the order of submission and
    /// through which alone memory is reached: what is submitted after a page was detached also
    /// happens after, so the page may be attached elsewhere at once.
    InOrder,
}

/// What physical memory is obtained by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commitment {
    /// By the page: a heap is a range of offsets and costs nothing itself.
    PerPage,
    /// By the heap: creating one commits all of it.
    PerHeap,
    /// By the reservation: `reserve` commits all of it, and it is never mapped or unmapped.
    WithReservation,
}

/// What a batch of a few operations costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchCost {
    /// As much as its operations: a few at a time are as good as all at once, and none waits for many.
    Operations,
    /// Mostly the call, however little is in it, as on a device behind a driver: better few large ones.
    Call,
}

/// What a device can do, as data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// A short name for messages, such as `host`.
    pub name: &'static str,
    /// The page sizes to choose from, smallest first.
    pub page_sizes: Vec<PageSize>,
    /// Whether pages can be shared.
    pub aliasing: Aliasing,
    /// What a hole reads as.
    pub hole: Hole,
    /// When a batch takes effect.
    pub ordering: Ordering,
    /// What commits memory.
    pub commitment: Commitment,
    /// What a batch costs.
    pub batch_cost: BatchCost,
    /// The most separate mappings (runs contiguous in address space and in a heap, and holes
    /// between them) the device may hold, where there is such a limit.
    pub mapping_limit: Option<u64>,
    /// The most heaps of its own memory that the device may hold at once, where there is such a limit.
    pub heap_limit: Option<u64>,
}

/// A point on a device's timeline. A later point implies every earlier one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(pub u64);

impl Fence {
    /// The beginning of time: always signalled.
    pub const DONE: Self = Self(0);
}

/// Bytes of a file.
#[derive(Debug)]
pub struct FilePart {
    /// The file, open for reading.
    pub file: File,
    /// The first byte.
    pub offset: u64,
    /// Bytes from there on.
    pub length: ByteLength,
}

/// How the host reaches the memory of a reservation.
#[derive(Clone, Debug)]
pub enum HostView {
    /// It sees it at this address.
    Pointer(NonNull<u8>),
    /// It does not; bytes are copied on request.
    Copies(Arc<dyn HostCopies>),
}

/// Copies between the host and device memory that it cannot see.
pub trait HostCopies: fmt::Debug + Send + Sync {
    /// Copies mapped memory to `bytes`, after everything submitted before.
    ///
    /// # Errors
    /// When part of the range is not mapped, or the device fails.
    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies `bytes` to mapped, writable memory, before everything submitted after. The point
    /// returned is when it is done.
    ///
    /// # Errors
    /// When part of the range is not mapped or not writable, or the device fails.
    fn write(&self, to: Address, bytes: &[u8]) -> Result<Fence, DeviceError>;
}

/// What a kernel took in a pass, in so many workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelTime {
    /// Its name.
    pub kernel: &'static str,
    /// Workgroups of each dispatch, each way.
    pub groups: [u32; 3],
    /// How often it was dispatched.
    pub dispatches: usize,
    /// From the end of what was dispatched before to the end of it, all dispatches together.
    pub time: Duration,
}

/// Whether a fence has been reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceState {
    /// Not yet.
    Pending,
    /// It has.
    Signalled,
}

/// How long to wait for a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Not at all: look and return.
    Poll,
    /// Until it is signalled.
    Block,
}

/// Why a device could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device does not exist here, or lacks what is needed.
    #[error("{device} is not available: {reason}; use the dense device instead")]
    Unavailable {
        /// The device's name.
        device: &'static str,
        /// What is missing.
        reason: String,
    },
    /// The system has no physical memory left.
    #[error(
        "no physical memory left for {length} ({call} failed with code {code}); lower the byte limit or free memory"
    )]
    OutOfMemory {
        /// The system call.
        call: &'static str,
        /// Its error number.
        code: i32,
        /// Bytes asked for.
        length: ByteLength,
    },
    /// The system has no address space left, or no mapping.
    #[error(
        "no address space or no mapping left for {length} ({call} failed with code {code}); raise `ulimit -v` or `vm.max_map_count`, or reserve less"
    )]
    OutOfAddressSpace {
        /// The system call.
        call: &'static str,
        /// Its error number.
        code: i32,
        /// Bytes asked for.
        length: ByteLength,
    },
    /// The system has no file descriptor left for another heap.
    #[error(
        "no file descriptor left for another heap (os error {code}); raise `ulimit -n` or use larger heaps"
    )]
    OutOfDescriptors {
        /// The error number.
        code: i32,
    },
    /// The system refused a call for another reason.
    #[error("{call} failed with os error {code}")]
    System {
        /// The system call.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
    /// The device's driver refused a call.
    #[error("the {device} driver refused {call} with code {code}; update it or use another device")]
    Driver {
        /// The device's name.
        device: &'static str,
        /// The call.
        call: &'static str,
        /// What the driver returned.
        code: i32,
    },
    /// Memory of a file cannot be read any more.
    #[error(
        "a file whose pages are mapped has become shorter or unreadable; its contents are to be had anew"
    )]
    LostFile,
    /// More than the device allows.
    #[error(
        "the device allows {limit} of {what}, of which {in_use} are taken, and {requested} were asked for; ask for less or give some back"
    )]
    Limit {
        /// What is limited.
        what: &'static str,
        /// Bytes asked for.
        requested: ByteLength,
        /// Bytes allowed.
        limit: ByteLength,
        /// Bytes of that in use already.
        in_use: ByteLength,
    },
    /// The device was asked for something outside its contract, such as a heap it does not have.
    #[error("the {device} device cannot do this: {what}")]
    Invalid {
        /// The device's name.
        device: &'static str,
        /// What is wrong.
        what: &'static str,
    },
    /// The device is gone and nothing on it can be reached any more.
    #[error("the device was lost; open it again and restore from stored pages")]
    Lost,
}

/// A batch that stopped part of the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchError {
    /// How many operations, from the first, have taken effect.
    pub applied: usize,
    /// Why the next one did not.
    pub cause: DeviceError,
}

/// Memory whose pages can be moved about under fixed addresses.
///
/// # Safety
///
/// The implementer keeps D1 to D4 of the [module documentation](self).
pub unsafe trait Device: fmt::Debug + Send {
    /// What it can do; the same at every call.
    fn capabilities(&self) -> &Capabilities;

    /// Takes `length` bytes of address space, all holes (or, with
    /// [`Commitment::WithReservation`], all memory, which reads as zeros).
    ///
    /// # Errors
    /// When the system has no room.
    fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError>;

    /// [`Device::reserve`] for memory of one kind, which alone may be mapped there.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] where there is no memory of that kind.
    fn reserve_at(
        &mut self,
        location: Location,
        length: ByteLength,
    ) -> Result<SpaceId, DeviceError> {
        match location {
            Location::Own => self.reserve(length),
            Location::Host => Err(no_host_memory(self.capabilities())),
        }
    }

    /// Gives a reservation back, with everything still mapped in it, once `after` is signalled.
    ///
    /// # Errors
    /// When the system refuses; the reservation then stays as it was.
    fn release(&mut self, space: SpaceId, after: Fence) -> Result<Fence, DeviceError>;

    /// Makes a heap of `length` bytes.
    ///
    /// # Errors
    /// When the system has no room.
    fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError>;

    /// [`Device::create_heap`] of memory of one kind.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] where there is no memory of that kind.
    fn create_heap_at(
        &mut self,
        location: Location,
        length: ByteLength,
    ) -> Result<HeapId, DeviceError> {
        match location {
            Location::Own => self.create_heap(length),
            Location::Host => Err(no_host_memory(self.capabilities())),
        }
    }

    /// What commits memory of one kind; of its own [`Capabilities::commitment`].
    fn commitment_at(&self, location: Location) -> Commitment {
        let _ = location;
        self.capabilities().commitment
    }

    /// Makes part of a file a heap, which is committed and is only mapped for reading.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] where it cannot be mapped as it is.
    fn open_heap(&mut self, part: FilePart) -> Result<HeapId, DeviceError> {
        let _ = part;
        Err(DeviceError::Invalid {
            device: self.capabilities().name,
            what: "map a file",
        })
    }

    /// Whether one of those files has become shorter, or a page of one could not be read where it was mapped and
    /// reads as zeros by now.
    fn has_lost_files(&self) -> bool {
        false
    }

    /// Gives a heap and its memory back; none of it is mapped.
    ///
    /// # Errors
    /// When the heap is not the device's.
    fn destroy_heap(&mut self, heap: HeapId) -> Result<(), DeviceError>;

    /// Performs `batch` in order, once `after` is signalled, and returns the point at which it is
    /// done. No two operations of a batch name the same address.
    ///
    /// # Errors
    /// The first operation that failed ends the batch; [`BatchError::applied`] says how far it got.
    fn apply(&mut self, batch: &[Operation], after: Fence) -> Result<Fence, BatchError>;

    /// Looks at a fence, or waits for it.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] when it will never be signalled.
    fn wait(&mut self, fence: Fence, patience: Patience) -> Result<FenceState, DeviceError>;

    /// How the host reaches the memory of a reservation, if there is such a reservation.
    fn host_view(&self, space: SpaceId) -> Option<HostView>;

    /// Whether it is gone: every call ends with [`DeviceError::Lost`]. Memory of the host never is.
    fn is_lost(&self) -> bool {
        false
    }
}

fn no_host_memory(capabilities: &Capabilities) -> DeviceError {
    DeviceError::Invalid {
        device: capabilities.name,
        what: "hold memory of the host beside its own",
    }
}
