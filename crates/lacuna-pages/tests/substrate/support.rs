//! Devices under test and the wrapper that fails, counts, records and delays.
#![expect(
    unsafe_code,
    reason = "a device is unsafe to implement, and the wrapper is one"
)]

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lacuna_pages::device::{
    Aliasing, BatchError, Commitment, Fence, FenceState, FilePart, HeapId, HostView, Operation,
    Ordering, Patience, Place, SpaceId,
};
use lacuna_pages::{
    Buffer, ByteLength, Capabilities, DenseDevice, Device, DeviceError, HostDevice, PageRange,
    PageSize, Pool, PoolConfig, SplitDevice,
};

/// What a probe is to change about its device, beyond recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Guise {
    /// Nothing.
    #[default]
    Plain,
    /// Heaps commit all their memory when they are made, as on a graphics device.
    PerHeap,
    /// Batches are done when the test says so.
    Queue,
    /// Pages cannot be shared.
    NoAliasing,
    /// It holds no more than [`FEW_MAPPINGS`] separate mappings.
    FewMappings,
    /// The device inside is a graphics device, not the host's.
    #[cfg(feature = "vulkan")]
    Vulkan,
    /// The same, of another kind.
    #[cfg(all(feature = "metal", target_os = "macos"))]
    Metal,
}

/// The mappings of [`Guise::FewMappings`].
pub(crate) const FEW_MAPPINGS: u64 = 64;

/// Which calls fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Failing {
    #[default]
    Nothing,
    /// Only the n-th from now, from zero.
    Once(u64),
    /// The n-th and every later one.
    From(u64),
}

#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) failing: Failing,
    /// Calls that could have failed since `failing` was set; each operation of a batch is one.
    pub(crate) calls: u64,
    pub(crate) batches: Vec<(Vec<Operation>, Fence)>,
    /// What each reservation that was released waited for.
    pub(crate) releases: Vec<Fence>,
    pub(crate) heaps: u64,
    pub(crate) spaces: u64,
    /// Fences up to this one are signalled.
    pub(crate) signalled: u64,
    last_fence: u64,
    /// The pages that hold memory, by what the device was asked for and did.
    held: BTreeSet<(HeapId, u64)>,
}

impl Log {
    /// Memory that the device has given and not taken back, whatever the books say.
    pub(crate) fn committed(&self) -> ByteLength {
        pages(self.held.len() as u64)
    }

    /// Notes an operation that was done.
    fn note(&mut self, operation: &Operation) {
        let page = |place: Place, length: ByteLength| {
            let first = place.offset / PAGE as u64;
            let count = length.get() / PAGE as u64;
            (first..first + count).map(move |page| (place.heap, page))
        };
        match *operation {
            Operation::Commit { place, length } => self.held.extend(page(place, length)),
            Operation::Decommit { place, length } => {
                for page in page(place, length) {
                    assert!(self.held.remove(&page), "{page:?} is given back twice");
                }
            }
            _ => {}
        }
    }

    fn fails(&mut self) -> bool {
        let call = self.calls;
        self.calls += 1;
        match self.failing {
            Failing::Nothing => false,
            Failing::Once(at) => call == at,
            Failing::From(at) => call >= at,
        }
    }

    fn next_fence(&mut self) -> Fence {
        self.last_fence += 1;
        Fence(self.last_fence)
    }
}

/// The test's end of a [`Probe`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Handle(Arc<Mutex<Log>>);

impl Handle {
    pub(crate) fn log(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fail(&self, failing: Failing) {
        let mut log = self.log();
        log.failing = failing;
        log.calls = 0;
    }

    pub(crate) fn signal_everything(&self) {
        let mut log = self.log();
        log.signalled = log.last_fence;
    }
}

/// A device that does what another does, and tells.
#[derive(Debug)]
pub(crate) struct Probe<D> {
    inner: D,
    guise: Guise,
    capabilities: Capabilities,
    handle: Handle,
}

impl<D: Device> Probe<D> {
    pub(crate) fn new(inner: D, guise: Guise) -> (Self, Handle) {
        let handle = Handle::default();
        let mut capabilities = inner.capabilities().clone();
        match guise {
            Guise::Plain => {}
            #[cfg(feature = "vulkan")]
            Guise::Vulkan => {}
            #[cfg(all(feature = "metal", target_os = "macos"))]
            Guise::Metal => {}
            Guise::PerHeap => capabilities.commitment = Commitment::PerHeap,
            Guise::Queue => capabilities.ordering = Ordering::Queue,
            Guise::NoAliasing => capabilities.aliasing = Aliasing::Unsupported,
            Guise::FewMappings => capabilities.mapping_limit = Some(FEW_MAPPINGS),
        }
        (
            Self {
                inner,
                guise,
                capabilities,
                handle: handle.clone(),
            },
            handle,
        )
    }

    fn check(&self) -> Result<(), DeviceError> {
        match self.handle.log().fails() {
            true => Err(DeviceError::System {
                call: "injected",
                code: 5,
            }),
            false => Ok(()),
        }
    }

    fn fence(&self) -> Fence {
        match self.guise {
            Guise::Queue => self.handle.log().next_fence(),
            _ => Fence::DONE,
        }
    }
}

// SAFETY: every method passes the inner device's results on. A batch is passed on one operation at
// a time and stops at the first failure, injected or real, so D4 holds; the other promises are the
// inner device's own.
unsafe impl<D: Device> Device for Probe<D> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        self.check()?;
        let space = self.inner.reserve(length)?;
        self.handle.log().spaces += 1;
        Ok(space)
    }

    fn release(&mut self, space: SpaceId, after: Fence) -> Result<Fence, DeviceError> {
        self.check()?;
        self.inner.release(space, after)?;
        let mut log = self.handle.log();
        log.spaces -= 1;
        log.releases.push(after);
        drop(log);
        Ok(self.fence())
    }

    fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError> {
        self.check()?;
        let heap = self.inner.create_heap(length)?;
        if self.guise == Guise::PerHeap {
            let place = Place { heap, offset: 0 };
            let commit = [Operation::Commit { place, length }];
            self.inner
                .apply(&commit, Fence::DONE)
                .map_err(|error| error.cause)?;
        }
        let mut log = self.handle.log();
        if self.capabilities.commitment == Commitment::PerHeap {
            let place = Place { heap, offset: 0 };
            log.note(&Operation::Commit { place, length });
        }
        log.heaps += 1;
        drop(log);
        Ok(heap)
    }

    fn open_heap(&mut self, part: FilePart) -> Result<HeapId, DeviceError> {
        self.check()?;
        let heap = self.inner.open_heap(part)?;
        self.handle.log().heaps += 1;
        Ok(heap)
    }

    fn has_lost_files(&self) -> bool {
        self.inner.has_lost_files()
    }

    fn destroy_heap(&mut self, heap: HeapId) -> Result<(), DeviceError> {
        self.check()?;
        self.inner.destroy_heap(heap)?;
        let mut log = self.handle.log();
        log.heaps -= 1;
        log.held.retain(|&(other, _)| other != heap);
        Ok(())
    }

    fn apply(&mut self, batch: &[Operation], after: Fence) -> Result<Fence, BatchError> {
        for (applied, operation) in batch.iter().enumerate() {
            self.check()
                .map_err(|cause| BatchError { applied, cause })?;
            self.inner
                .apply(&[*operation], after)
                .map_err(|error| BatchError {
                    applied: applied + error.applied,
                    ..error
                })?;
            self.handle.log().note(operation);
        }
        self.handle.log().batches.push((batch.to_vec(), after));
        Ok(self.fence())
    }

    fn wait(&mut self, fence: Fence, patience: Patience) -> Result<FenceState, DeviceError> {
        if self.guise != Guise::Queue {
            return self.inner.wait(fence, patience);
        }
        if patience == Patience::Block {
            self.handle.signal_everything();
        }
        let done = fence.0 <= self.handle.log().signalled;
        Ok(if done {
            FenceState::Signalled
        } else {
            FenceState::Pending
        })
    }

    fn host_view(&self, space: SpaceId) -> Option<HostView> {
        self.inner.host_view(space)
    }
}

/// Small pages and heaps, so that a test crosses their boundaries often.
pub(crate) fn small() -> PoolConfig {
    PoolConfig {
        page_size: PAGE_SIZE,
        heap_bytes: PAGE_SIZE.bytes_of(lacuna_pages::PageCount::new(16)),
        high_watermark: pages(32),
        low_watermark: pages(8),
        ..PoolConfig::default()
    }
}

/// The smallest pages that all devices have: graphics cards have none of less than 64 KiB.
pub(crate) const PAGE_SIZE: PageSize = PageSize::KIB_64;
pub(crate) const PAGE: usize = PAGE_SIZE.bytes() as usize;

pub(crate) fn pages(count: u64) -> ByteLength {
    PAGE_SIZE.bytes_of(lacuna_pages::PageCount::new(count))
}

pub(crate) fn host(config: PoolConfig) -> Pool {
    Pool::new(HostDevice::new().unwrap(), config).unwrap()
}

/// A pool behind a probe: on the host, or on a graphics device that is known to be there.
pub(crate) fn probed(config: PoolConfig, guise: Guise) -> (Pool, Handle) {
    fn pool<D: Device + 'static>(device: D, config: PoolConfig, guise: Guise) -> (Pool, Handle) {
        let (device, handle) = Probe::new(device, guise);
        (Pool::new(device, config).unwrap(), handle)
    }
    match guise {
        #[cfg(feature = "vulkan")]
        Guise::Vulkan => pool(crate::vulkan::open(), config, guise),
        #[cfg(all(feature = "metal", target_os = "macos"))]
        Guise::Metal => pool(crate::metal::open(), config, guise),
        _ => pool(HostDevice::new().unwrap(), config, guise),
    }
}

/// The graphics device that this process was started to run the tests of every device on.
fn under_test() -> Option<Guise> {
    #[cfg(feature = "vulkan")]
    if crate::vulkan::is_under_test() {
        return Some(Guise::Vulkan);
    }
    #[cfg(all(feature = "metal", target_os = "macos"))]
    if crate::metal::is_under_test() {
        return Some(Guise::Metal);
    }
    None
}

/// Whether a pool is on a graphics device.
pub(crate) fn is_graphics(pool: &Pool) -> bool {
    matches!(pool.capabilities().name, "vulkan" | "metal")
}

/// Runs the tests of this program whose names contain `filter` in a process of their own, which finds `value` under
/// `variable`.
#[cfg(any(feature = "vulkan", all(feature = "metal", target_os = "macos")))]
pub(crate) fn passes(filter: &str, variable: &str, value: &str) {
    let program = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(program);
    let output = command.arg(filter).env(variable, value).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{value}: {text}");
    assert!(!text.contains("running 0 tests"), "{filter}: {text}");
}

/// One pool on every kind of device, or only one on a graphics device in a process that was started
/// for it.
pub(crate) fn every_pool(config: PoolConfig) -> Vec<Pool> {
    if let Some(guise) = under_test() {
        return vec![probed(config, guise).0];
    }
    let guises = [
        Guise::Plain,
        Guise::PerHeap,
        Guise::Queue,
        Guise::NoAliasing,
    ];
    let mut pools: Vec<Pool> = guises.map(|guise| probed(config, guise).0).into();
    pools.push(host(config));
    pools.push(Pool::new(DenseDevice::new(), config).unwrap());
    // Of which these tests use one kind of memory.
    let split = SplitDevice::new(HostDevice::new().unwrap()).unwrap();
    pools.push(Pool::new(split, config).unwrap());
    pools
}

/// The guises under which every call is made to fail.
pub(crate) fn failing_guises() -> Vec<Guise> {
    match under_test() {
        Some(guise) => vec![guise],
        None => vec![Guise::Plain, Guise::PerHeap, Guise::Queue],
    }
}

/// Those of them on which pages can be shared.
pub(crate) fn sharing_pools(config: PoolConfig) -> Vec<Pool> {
    let mut pools = every_pool(config);
    pools.retain(|pool| pool.capabilities().aliasing == Aliasing::Shared);
    pools
}

/// Fills a page with a pattern that tells pages and places apart.
pub(crate) fn write_page(buffer: &mut Buffer, page: u64, tag: u64) {
    let start = page as usize * PAGE;
    let mut bytes = [0; PAGE];
    for (place, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(tag ^ (place as u64) << 40).to_le_bytes());
    }
    buffer.write(start as u64, &bytes).unwrap();
}

/// A copy of what a range holds.
#[track_caller]
pub(crate) fn contents(buffer: &Buffer, range: Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    buffer.read(range.start as u64, &mut bytes).unwrap();
    bytes
}

#[track_caller]
pub(crate) fn assert_page(buffer: &Buffer, page: u64, tag: u64) {
    let start = page as usize * PAGE;
    let bytes = contents(buffer, start..start + PAGE);
    for (place, word) in bytes.chunks_exact(8).enumerate() {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        assert_eq!(
            word,
            tag ^ (place as u64) << 40,
            "page {page}, word {place}"
        );
    }
}

pub(crate) fn range(start: u64, end: u64) -> PageRange {
    PageRange::of(start..end)
}

/// A buffer of `count` pages, mapped, each page filled with `tag + index`.
pub(crate) fn filled(pool: &Pool, count: u64, tag: u64) -> Buffer {
    let mut buffer = pool.reserve(pages(count), format!("filled {tag}")).unwrap();
    buffer.ensure_mapped(0..count as usize * PAGE).unwrap();
    for page in 0..count {
        write_page(&mut buffer, page, tag + page);
    }
    buffer
}
