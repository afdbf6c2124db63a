//! Asking for pages that are there allocates nothing, takes no lock and asks the device nothing.
#![expect(
    unsafe_code,
    reason = "a global allocator that counts is unsafe to implement"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use lacuna_pages::{ByteLength, DenseDevice, Error, Pool, PoolConfig, Request};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes allocated less bytes freed.
    static HELD: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator, counting calls of each thread.
struct Counting;

// SAFETY: every call is passed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        HELD.with(|bytes| bytes.set(bytes.get() + layout.size() as i64));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.with(|bytes| bytes.set(bytes.get() - layout.size() as i64));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn steady_steps(pool: &Pool) -> Result<(), Error> {
    let mut first = pool.reserve(ByteLength::mebibytes(1), "first")?;
    let mut second = pool.reserve(ByteLength::mebibytes(1), "second")?;
    first.ensure_mapped(0..100_000)?;
    second.ensure_mapped(0..100_000)?;
    let batches = pool.ledger().counts.batches;
    let before = ALLOCATIONS.with(Cell::get);
    for token in 0..48 {
        let rows = token * 2_048..(token + 1) * 2_048;
        let requests = &mut [
            Request::new(&mut first, rows.clone()),
            Request::new(&mut second, rows.clone()),
        ];
        pool.ensure_mapped(requests)?;
        first.bytes_mut(rows.clone())?.fill(1);
        assert_eq!(second.bytes(rows)?.len(), 2_048);
        assert_eq!(pool.ledger().counts.batches, batches);
    }
    assert_eq!(ALLOCATIONS.with(Cell::get), before);
    Ok(())
}

#[test]
fn a_step_within_pages_that_came_with_the_buffer_allocates_nothing() -> Result<(), Error> {
    steady_steps(&Pool::new(DenseDevice::new(), PoolConfig::default())?)
}

#[cfg(target_os = "linux")]
#[test]
fn a_step_within_mapped_pages_allocates_nothing() -> Result<(), Error> {
    let device = lacuna_pages::HostDevice::new()?;
    steady_steps(&Pool::new(device, PoolConfig::default())?)
}

#[test]
fn a_dense_buffer_is_its_bytes_and_they_go_with_it() -> Result<(), Error> {
    let pool = Pool::new(DenseDevice::new(), PoolConfig::default())?;
    let length = ByteLength::mebibytes(4);
    let before = HELD.with(Cell::get);
    let held = || ByteLength::new((HELD.with(Cell::get) - before).unsigned_abs());
    let buffer = pool.reserve(length, "lent")?;
    assert!(held() >= length);
    drop(buffer);
    assert!(
        held() < ByteLength::mebibytes(1),
        "its bytes are free again"
    );
    Ok(())
}
