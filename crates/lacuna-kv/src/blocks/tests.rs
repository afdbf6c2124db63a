use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const SIXTEEN: NonZeroUsize = NonZeroUsize::new(16).unwrap();

fn demand(tokens: usize) -> Demand {
    Demand {
        tokens,
        lookahead_tokens: 0,
        held_blocks: 0,
        copied_blocks: 0,
        reserved_blocks: 0,
        admission: Admission::Running,
    }
}

fn granted(pool: &mut BlockPool, blocks: usize) -> Vec<BlockId> {
    match pool.allocate(&demand(blocks * 16)) {
        Allocation::Granted(blocks) => blocks,
        Allocation::NotNow { .. } => panic!("{blocks} of {} blocks", pool.free()),
    }
}

#[test]
fn a_demand_is_met_in_whole_blocks_beyond_those_held() {
    let mut pool = BlockPool::new(SIXTEEN, 100);
    assert_eq!(pool.block_tokens(), SIXTEEN);
    let mut count = |demand| match pool.allocate(&demand) {
        Allocation::Granted(blocks) => blocks.len(),
        Allocation::NotNow { .. } => usize::MAX,
    };
    assert_eq!(count(demand(0)), 0);
    assert_eq!(count(demand(1)), 1);
    assert_eq!(count(demand(17)), 2);
    assert_eq!(
        count(Demand {
            held_blocks: 2,
            ..demand(32)
        }),
        0
    );
    assert_eq!(
        count(Demand {
            held_blocks: 2,
            ..demand(33)
        }),
        1
    );
    assert_eq!(
        count(Demand {
            held_blocks: 2,
            copied_blocks: 1,
            ..demand(33)
        }),
        2
    );
    assert_eq!(
        count(Demand {
            lookahead_tokens: 5,
            ..demand(12)
        }),
        2
    );
    assert_eq!(count(demand(usize::MAX)), usize::MAX);
}

#[test]
fn not_now_changes_nothing_and_says_how_far_it_was() {
    let mut pool = BlockPool::new(SIXTEEN, 10);
    granted(&mut pool, 6);
    let answer = pool.allocate(&demand(5 * 16));
    assert_eq!(
        answer,
        Allocation::NotNow {
            needed: 5,
            available: 4
        }
    );
    assert_eq!(pool.free(), 4);
    let reserved = Demand {
        reserved_blocks: 2,
        ..demand(3 * 16)
    };
    assert_eq!(
        pool.allocate(&reserved),
        Allocation::NotNow {
            needed: 3,
            available: 2
        }
    );
    granted(&mut pool, 4);
    assert_eq!(pool.free(), 0);
}

#[test]
fn new_sequences_leave_the_watermark_to_those_that_run() {
    let mut pool = BlockPool::new(SIXTEEN, 200);
    let new = |blocks: usize| Demand {
        admission: Admission::New,
        ..demand(blocks * 16)
    };
    let refused = pool.allocate(&new(199));
    assert_eq!(
        refused,
        Allocation::NotNow {
            needed: 199,
            available: 198
        }
    );
    assert!(matches!(pool.allocate(&new(198)), Allocation::Granted(_)));
    assert!(matches!(pool.allocate(&new(1)), Allocation::NotNow { .. }));
    granted(&mut pool, 2);
}

#[test]
fn a_lowered_limit_holds_for_what_is_taken_later() {
    let mut pool = BlockPool::new(SIXTEEN, 8);
    let blocks = granted(&mut pool, 6);
    pool.set_limit(5);
    assert_eq!(pool.free(), 0);
    for &block in &blocks[..3] {
        pool.release(block, Reuse::First);
    }
    assert_eq!(pool.free(), 2);
    granted(&mut pool, 2);
    assert!(matches!(
        pool.allocate(&demand(1)),
        Allocation::NotNow { .. }
    ));
}

#[test]
fn blocks_of_no_use_go_first_and_those_worth_keeping_last() {
    let mut pool = BlockPool::new(SIXTEEN, 4);
    let blocks = granted(&mut pool, 4);
    pool.release(blocks[0], Reuse::Last);
    pool.release(blocks[1], Reuse::Last);
    pool.release(blocks[2], Reuse::First);
    assert!(pool.revive(blocks[0]), "taken from the middle");
    assert!(!pool.revive(blocks[0]), "owned now");
    assert_eq!(granted(&mut pool, 2), [blocks[2], blocks[1]]);
    assert_eq!(pool.free(), 0);
}

#[test]
fn a_shared_block_is_free_when_its_last_owner_lets_go() {
    let mut pool = BlockPool::new(SIXTEEN, 1);
    let block = granted(&mut pool, 1)[0];
    pool.share(block);
    assert!(!pool.release(block, Reuse::First));
    assert_eq!((pool.owners(block), pool.free()), (1, 0));
    assert!(pool.release(block, Reuse::First));
    assert_eq!(pool.free(), 1);
}

/// What to do with the block at an index, modulo how many there are.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Allocate(usize),
    Share(usize),
    Release(usize, Reuse),
    Revive(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    let reuse = prop_oneof![Just(Reuse::First), Just(Reuse::Last)];
    prop_oneof![
        (0..4usize).prop_map(Operation::Allocate),
        (0..99usize).prop_map(Operation::Share),
        (0..99usize, reuse).prop_map(|(index, reuse)| Operation::Release(index, reuse)),
        (0..99usize).prop_map(Operation::Revive),
    ]
}

proptest! {
    #[test]
    fn the_pool_agrees_with_a_queue(operations in prop::collection::vec(operation(), 0..200)) {
        const LIMIT: usize = 12;
        let mut pool = BlockPool::new(SIXTEEN, LIMIT);
        let mut free: VecDeque<BlockId> = VecDeque::new();
        let mut owned: Vec<BlockId> = Vec::new();
        let mut used = 0;
        for operation in operations {
            match operation {
                Operation::Allocate(count) => match pool.allocate(&demand(16 * count)) {
                    Allocation::Granted(blocks) => {
                        prop_assert_eq!(blocks.len(), count);
                        for block in blocks {
                            match free.pop_front() {
                                Some(expected) => prop_assert_eq!(block, expected),
                                None => {
                                    prop_assert_eq!(block.index(), used);
                                    used += 1;
                                }
                            }
                            owned.push(block);
                        }
                    }
                    Allocation::NotNow { needed, available } => {
                        prop_assert_eq!(needed, count);
                        prop_assert_eq!(available, free.len() + LIMIT - used);
                        prop_assert!(needed > available);
                    }
                },
                Operation::Share(index) if !owned.is_empty() => {
                    let block = owned[index % owned.len()];
                    pool.share(block);
                    owned.push(block);
                }
                Operation::Release(index, reuse) if !owned.is_empty() => {
                    let block = owned.swap_remove(index % owned.len());
                    let last = !owned.contains(&block);
                    prop_assert_eq!(pool.release(block, reuse), last);
                    match reuse {
                        _ if !last => {}
                        Reuse::First => free.push_front(block),
                        Reuse::Last => free.push_back(block),
                    }
                }
                Operation::Revive(index) if used > 0 => {
                    let block = BlockId((index % used) as u32);
                    let place = free.iter().position(|&free| free == block);
                    prop_assert_eq!(pool.revive(block), place.is_some());
                    owned.extend(place.and_then(|place| free.remove(place)));
                }
                _ => {}
            }
            prop_assert_eq!(pool.free(), free.len() + LIMIT - used);
            for &block in &owned {
                let owners = owned.iter().filter(|&&other| other == block).count();
                prop_assert_eq!(pool.owners(block) as usize, owners);
            }
        }
    }
}
