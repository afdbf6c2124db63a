//! A thousand buffers of random lengths, created, forked and dropped.

use lacuna_pages::device::Commitment;
use lacuna_pages::{Buffer, ByteLength, Pool, PoolConfig, VirtualPage};

use crate::support::{Guise, PAGE, assert_page, host, pages, probed, range, small, write_page};

/// The splitmix64 generator: the storm is the same every time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (word ^ (word >> 31)) % bound
    }
}

#[test]
fn after_a_storm_memory_returns_to_the_low_watermark_and_to_nothing_on_trim() {
    for pool in [host(config()), probed(config(), Guise::PerHeap).0] {
        storm(&pool);
    }
}

pub(crate) fn config() -> PoolConfig {
    PoolConfig {
        high_watermark: pages(64),
        low_watermark: pages(24),
        ..small()
    }
}

/// A thousand buffers, twenty of them at a time.
pub(crate) fn storm(pool: &Pool) {
    let by_the_heap = pool.capabilities().commitment == Commitment::PerHeap;
    let mut random = Random(1);
    let mut live: Vec<(Buffer, u64, u64)> = Vec::new();
    for created in 0..1_000 {
        let length = 1 + random.below(40);
        let fork = (random.below(2) == 0 && !live.is_empty())
            .then(|| random.below(live.len() as u64) as usize);
        let mut buffer = pool.reserve(pages(100), "").unwrap();
        let (count, tag) = match fork {
            Some(parent) => {
                let (parent, count, tag) = &mut live[parent];
                parent.seal(range(0, *count)).unwrap();
                buffer
                    .share_from(parent, range(0, *count), VirtualPage::new(0))
                    .unwrap();
                (*count, *tag)
            }
            None => {
                buffer.ensure_mapped(0..length as usize * PAGE).unwrap();
                let tag = created * 1_000;
                (0..length).for_each(|page| write_page(&mut buffer, page, tag + page));
                (length, tag)
            }
        };
        live.push((buffer, count, tag));
        while live.len() > 20 {
            let index = random.below(live.len() as u64) as usize;
            let (buffer, count, tag) = live.swap_remove(index);
            let page = random.below(count);
            assert_page(&buffer, page, tag + page);
        }
        if created % 50 == 0 {
            pool.verify(live.iter().map(|(buffer, ..)| buffer)).unwrap();
            assert!(by_the_heap || pool.ledger().idle <= pages(64));
        }
    }
    for (buffer, count, tag) in &live {
        (0..*count).for_each(|page| assert_page(buffer, page, tag + page));
    }
    live.clear();
    // Where memory goes by the heap, the fewest heaps that hold as much: of 16 pages each.
    let low = if by_the_heap { 32 } else { 24 };
    assert_eq!(pool.ledger().committed, pages(low));
    pool.trim();
    assert_eq!(pool.ledger().committed, ByteLength::ZERO);
    assert_eq!(pool.ledger().heaps, 0);
}
