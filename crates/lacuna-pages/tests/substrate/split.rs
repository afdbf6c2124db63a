//! Memory of the host beside a device's own: one pool, one limit, one change.

use lacuna_pages::device::Location;
use lacuna_pages::{
    Buffer, ByteLength, Error, HostDevice, PageCount, Pool, PoolConfig, Request, SplitDevice,
};

use crate::support::{Failing, Guise, Handle, PAGE, Probe, assert_page, pages, small, write_page};

/// Pages in a heap, as `small` has it.
const HEAP: u64 = 16;

/// A split whose own memory comes by the heap, as a card's does, and what is asked of that.
fn split(limit: u64) -> (Pool, Handle) {
    let (own, handle) = Probe::new(HostDevice::new().unwrap(), Guise::PerHeap);
    let config = PoolConfig {
        limit: Some(pages(limit)),
        ..small()
    };
    let pool = Pool::new(SplitDevice::new(own).unwrap(), config).unwrap();
    (pool, handle)
}

fn both(pool: &Pool) -> [Buffer; 2] {
    Location::ALL.map(|location| pool.reserve_at(location, pages(40), "").unwrap())
}

fn fill(buffers: &mut [Buffer; 2], count: u64) -> Result<(), Error> {
    let pool_of = buffers[0].pool().clone();
    let all = 0..count as usize * PAGE;
    let requests = buffers.each_mut().map(|it| Request::new(it, all.clone()));
    pool_of.ensure_mapped(&mut { requests }).map(drop)
}

#[test]
fn each_buffer_has_pages_of_its_kind_in_one_change() {
    let (pool, own) = split(64);
    let mut buffers = both(&pool);
    fill(&mut buffers, 5).unwrap();
    assert_eq!(
        own.log().committed(),
        pages(HEAP),
        "the others are the host's"
    );
    let ledger = pool.ledger();
    assert_eq!(ledger.committed, pages(HEAP + 5));
    assert_eq!(ledger.host_beside, pages(5));
    for (tag, buffer) in (0u64..).zip(&mut buffers) {
        (0..5).for_each(|page| write_page(buffer, page, 100 * tag + page));
    }
    for (tag, buffer) in (0u64..).zip(&buffers) {
        (0..5).for_each(|page| assert_page(buffer, page, 100 * tag + page));
    }
    pool.verify(&buffers).unwrap();
}

#[test]
fn a_change_that_one_kind_refuses_is_none() {
    let mut refusals = 0;
    for call in 0..4 {
        let (pool, own) = split(64);
        let mut buffers = both(&pool);
        own.fail(Failing::Once(call));
        let refused = fill(&mut buffers, 5).is_err();
        own.fail(Failing::Nothing);
        refusals += u32::from(refused);
        if refused {
            for buffer in &buffers {
                assert_eq!(buffer.ledger().mapped, ByteLength::ZERO, "call {call}");
            }
        }
        pool.verify(&buffers).unwrap();
        fill(&mut buffers, 5).unwrap();
        pool.verify(&buffers).unwrap();
    }
    assert_eq!(refusals, 2, "its heap and its mapping");
}

#[test]
fn what_lies_idle_of_one_kind_makes_room_for_the_other() {
    let (pool, _own) = split(2 * HEAP);
    let [mut own, mut host] = both(&pool);
    own.ensure_mapped(0..2 * HEAP as usize * PAGE).unwrap();
    let refused = host.ensure_mapped(0..PAGE).unwrap_err();
    assert_eq!(
        refused,
        Error::OutOfPages {
            requested: PageCount::new(1),
            free: PageCount::ZERO,
            limit: Some(pages(2 * HEAP)),
        }
    );
    // A heap that is empty goes back, and the pages of the host's take its place one by one.
    own.truncate(pages(HEAP)).unwrap();
    host.ensure_mapped(0..3 * PAGE).unwrap();
    assert_eq!(pool.ledger().host_beside, pages(3));
    assert_eq!(pool.ledger().committed, pages(HEAP + 3));
    // And theirs a heap's.
    drop(host);
    own.ensure_mapped(0..2 * HEAP as usize * PAGE).unwrap();
    assert_eq!(pool.ledger().host_beside, ByteLength::ZERO);
    pool.verify([&own]).unwrap();
}

#[test]
fn a_device_of_one_kind_refuses_the_other() {
    let pool = Pool::new(HostDevice::new().unwrap(), small()).unwrap();
    let told = pool.reserve_at(Location::Host, pages(1), "").unwrap_err();
    assert!(told.to_string().contains("beside its own"), "{told}");
}
