//! The geometry of a real model: Qwen3-4B, 36 layers, 32,768 tokens, 32 tokens to a page. Pages are
//! 4 KiB here instead of 64 KiB, with rows of 128 bytes instead of 2,048: the same pages, mappings
//! and batches in a sixteenth of the memory.

use lacuna_pages::{ByteLength, PageSize, PoolConfig, Request};

use crate::children::succeeds_in_child;
use crate::kernel::kernel_mappings;
use crate::support::host;

const BUFFERS: usize = 72;
const TOKENS: usize = 32_768;
const ROW: usize = 128;
const TOKENS_PER_PAGE: usize = 32;
const TEN_PERCENT_OF_MAPPINGS: u64 = 6_553;

#[test]
fn a_long_context_stays_under_a_tenth_of_the_mappings_and_one_batch_a_step() {
    let test = "geometry::a_long_context_stays_under_a_tenth_of_the_mappings_and_one_batch_a_step";
    succeeds_in_child(test, || {
        let pool = host(PoolConfig {
            page_size: PageSize::KIB_4,
            heap_bytes: ByteLength::mebibytes(4),
            ..PoolConfig::default()
        });
        let length = ByteLength::new((TOKENS * ROW) as u64);
        let mut buffers: Vec<_> = (0..BUFFERS)
            .map(|_| pool.reserve(length, "").unwrap())
            .collect();
        for token in 0..TOKENS {
            let before = pool.ledger().counts;
            let rows = token * ROW..(token + 1) * ROW;
            let mut requests: Vec<_> = buffers
                .iter_mut()
                .map(|buffer| Request::new(buffer, rows.clone()))
                .collect();
            pool.ensure_mapped(&mut requests).unwrap();
            let counts = pool.ledger().counts;
            let crossed = token.is_multiple_of(TOKENS_PER_PAGE);
            assert_eq!(counts.batches - before.batches, u64::from(crossed));
            let mapped = if crossed { BUFFERS as u64 } else { 0 };
            assert_eq!(counts.pages_mapped - before.pages_mapped, mapped);
        }
        let (books, kernel) = (pool.ledger().regions, kernel_mappings());
        assert!(books < TEN_PERCENT_OF_MAPPINGS, "{books} regions");
        assert!(
            kernel < TEN_PERCENT_OF_MAPPINGS,
            "{kernel} mappings of the process"
        );
        assert_eq!(
            pool.ledger().committed.get(),
            (BUFFERS * TOKENS * ROW) as u64
        );
        println!("{books} regions by the books, {kernel} mappings of the process");
    });
}
