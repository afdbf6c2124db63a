//! States of layers: what every token changes, in the place of the last.

use lacuna_kernels::ElementType;
use lacuna_kv::{Geometry, KvCache, KvElements, KvError, KvPolicy, Layer, LayerCache, Sequence};
use lacuna_pages::faults::{Completion, Failing, FaultyDevice};
use lacuna_pages::{ByteLength, HostDevice, PageSize, Pool, PoolConfig};

use crate::support::{
    PAGE, POLICIES, STATES, advance, append, assert_rows, assert_states, assert_tags, cpu, extend,
    pool, store,
};

fn cache(policy: &str, geometry: &Geometry) -> KvCache {
    let policy = policy.parse().expect("a policy");
    KvCache::over(pool(policy, None), geometry.clone(), policy).expect("a cache")
}

/// Layers that keep states alone, of two pages and a bit.
fn alone() -> Geometry {
    let elements = KvElements::both(ElementType::F16);
    let layers = Geometry::new(vec![LayerCache::None; 3], elements).expect("layers");
    layers.with_states(vec![1000, 0, 1100]).expect("states")
}

/// Computes one more token and checks the states on the way.
#[track_caller]
fn step(sequence: &mut Sequence, tags: &mut Vec<usize>, tag: usize) {
    sequence.prepare(1).expect("room");
    tags.push(tag);
    store(&cpu(), sequence, &[tag]);
    assert_states(sequence, tags);
    sequence.accept(1);
}

#[test]
fn states_are_zero_at_first_and_after_starting_again() {
    for name in POLICIES {
        let cache = cache(name, &STATES);
        for _ in 0..2 {
            // Pages of the sequence before hold what it left there.
            let mut sequence = cache.sequence(400).expect("address space");
            sequence.prepare(3).expect("room");
            assert_states(&mut sequence, &[]);
            store(&cpu(), &mut sequence, &[7, 8, 9]);
            sequence.accept(3);
            sequence.truncate(0).expect("memory goes back");
            assert_eq!(sequence.report().state_bytes, 0, "{name}");
            sequence.prepare(1).expect("room");
            assert_states(&mut sequence, &[]);
        }
    }
}

#[test]
fn forks_share_a_state_until_each_goes_on() {
    let whole = STATES.state_bytes().next_multiple_of(PAGE);
    for name in POLICIES {
        let cache = cache(name, &STATES);
        let mut donor = cache.sequence(400).expect("address space");
        extend(&cpu(), &mut donor, 60);
        let mut tags: Vec<usize> = (0..60).collect();
        let before = donor.report();
        let mut fork = donor.fork().expect("memory");
        let shares = name.starts_with("sparse");
        let shared = fork.report().shared_bytes;
        assert!(!shares || shared >= whole, "{name}: {shared} shared");
        let mut other = tags.clone();
        step(&mut fork, &mut other, 1000);
        step(&mut donor, &mut tags, 2000);
        step(&mut fork, &mut other, 1001);
        assert_tags(&fork, &other);
        assert_tags(&donor, &tags);
        // The first to go on copies, the last has the pages to itself.
        let copied = fork.report().copied_bytes;
        assert!(copied >= STATES.state_bytes(), "{name}: {copied} copied");
        if shares {
            let copied = donor.report().copied_bytes - before.copied_bytes;
            assert!(copied < whole, "{name}: {copied} copied by the last");
        }
        drop(donor);
        step(&mut fork, &mut other, 1002);
        assert_eq!(fork.report().shared_bytes, 0, "{name}");
    }
}

#[test]
fn a_state_is_copied_once_by_the_first_to_go_on() {
    let geometry = alone();
    let whole = geometry.state_bytes().next_multiple_of(PAGE);
    for name in POLICIES {
        let cache = cache(name, &geometry);
        let shares = name.starts_with("sparse");
        let mut donor = cache.sequence(400).expect("address space");
        assert_eq!(donor.state_bytes_to_take(), geometry.state_bytes());
        extend(&cpu(), &mut donor, 9);
        assert_eq!(donor.state_bytes_to_take(), 0);
        let report = donor.report();
        assert_eq!((report.copied_bytes, report.zeroed_bytes), (0, whole));
        let mut fork = donor.fork().expect("memory");
        let report = fork.report();
        assert_eq!(report.peak_committed_bytes, whole, "{name}");
        let copied = if shares { 0 } else { geometry.state_bytes() };
        assert_eq!(report.copied_bytes, copied, "{name}");
        assert_eq!(report.zeroed_bytes, if shares { 0 } else { whole });
        let to_take = if shares { geometry.state_bytes() } else { 0 };
        assert_eq!(donor.state_bytes_to_take(), to_take, "{name}");
        assert_eq!(fork.state_bytes_to_take(), to_take, "{name}");
        let mut tags: Vec<usize> = (0..9).collect();
        step(&mut fork, &mut tags, 1000);
        step(&mut fork, &mut tags, 1001);
        let copied = if shares {
            whole
        } else {
            geometry.state_bytes()
        };
        assert_eq!(fork.report().copied_bytes, copied, "{name}");
        assert_eq!(fork.state_bytes_to_take(), 0);
        // A second fork of the fork takes none of its figures over.
        let second = fork.fork().expect("memory").report();
        let copied = if shares { 0 } else { geometry.state_bytes() };
        assert_eq!(second.copied_bytes, copied, "{name}");
        step(&mut fork, &mut tags, 1002);
    }
}

#[test]
fn a_prefix_is_shared_where_the_state_is_and_nowhere_else() {
    for name in POLICIES {
        let cache = cache(name, &STATES);
        let mut donor = cache.sequence(400).expect("address space");
        extend(&cpu(), &mut donor, 60);
        assert_eq!(donor.fewest_tokens(), 60);
        for tokens in [1, 59] {
            let refused = donor.share_prefix(tokens).map(drop);
            assert!(
                matches!(refused, Err(KvError::StatePassed { held: 60, requested }) if requested == tokens)
            );
            let refused = donor.truncate(tokens);
            assert!(
                matches!(refused, Err(KvError::StatePassed { held: 60, requested }) if requested == tokens)
            );
        }
        // A step that has not changed anything yet.
        donor.prepare(5).expect("room");
        let mut shared = donor.share_prefix(60).expect("memory");
        let mut tags: Vec<usize> = (0..60).collect();
        let new: Vec<usize> = (500..505).collect();
        store(&cpu(), &mut donor, &new);
        let in_step = donor.fork().map(drop);
        assert!(matches!(in_step, Err(KvError::StateSpent)), "{name}");
        donor.accept(5);
        step(&mut shared, &mut tags.clone(), 700);
        tags.extend(new);
        step(&mut donor, &mut tags, 505);
        assert_tags(&donor, &tags);
    }
}

#[test]
fn a_step_that_is_not_accepted_whole_leaves_no_state() {
    let cpu = cpu();
    for name in POLICIES {
        let cache = cache(name, &STATES);
        for end in 0..3 {
            let mut sequence = cache.sequence(400).expect("address space");
            extend(&cpu, &mut sequence, 60);
            let mut fork = sequence.fork().expect("memory");
            sequence.prepare(5).expect("room");
            advance(&mut sequence, &[1, 2, 3, 4, 5]);
            match end {
                0 => sequence.accept(4),
                1 => sequence.accept(0),
                // The forward pass failed, and the next step begins.
                _ => assert!(matches!(sequence.prepare(5), Err(KvError::StateSpent))),
            }
            assert!(sequence.is_spent());
            for refused in [
                sequence.prepare(1),
                sequence.fork().map(drop),
                sequence.share_prefix(sequence.len()).map(drop),
            ] {
                assert!(matches!(refused, Err(KvError::StateSpent)), "{name}");
            }
            sequence.prepare(0).expect("nothing to compute");
            sequence.truncate(0).expect("memory goes back");
            assert!(!sequence.is_spent());
            extend(&cpu, &mut sequence, 80);
            assert_rows(&sequence);
            step(&mut fork, &mut (0..60).collect(), 90);
        }
    }
}

/// Prepares a step that may go back, and computes the tokens named `tags`.
fn guess(sequence: &mut Sequence, tags: &[usize]) {
    sequence.prepare_to_rewind(tags.len()).expect("room");
    store(&cpu(), sequence, tags);
}

/// Takes the step under way back to its first `rows` tokens by what it has kept of them.
fn rewind(sequence: &mut Sequence, rows: usize) {
    assert!(sequence.rewind(rows), "there are states");
    let inputs = sequence.state_inputs(Layer(4)).expect("they are kept");
    assert_eq!(inputs.len(), 4 * rows);
    let tags: Vec<usize> = inputs.chunks(4).map(|input| input[0] as usize).collect();
    store(&cpu(), sequence, &tags);
}

#[test]
fn a_step_of_guesses_goes_back_to_those_that_were_right() {
    for name in POLICIES {
        let cache = cache(name, &STATES);
        let mut sequence = cache.sequence(400).expect("address space");
        let mut tags = Vec::new();
        // The first step, too, and steps of more tokens than those before.
        for (round, (count, right)) in [(5, 2), (5, 5), (3, 1), (11, 7), (2, 0), (40, 39)]
            .into_iter()
            .enumerate()
        {
            let fork = (round % 2 == 1).then(|| sequence.fork().expect("memory"));
            let before = tags.clone();
            let new: Vec<usize> = (0..count).map(|at| 100 * round + at).collect();
            guess(&mut sequence, &new);
            assert!(sequence.is_to_be_rewound());
            assert_states(&mut sequence, &[&tags[..], &new].concat());
            if 0 < right && right < count {
                rewind(&mut sequence, right);
            }
            sequence.accept(right);
            tags.extend(&new[..right]);
            assert!(!sequence.is_spent() && !sequence.is_to_be_rewound());
            assert_tags(&sequence, &tags);
            if let Some(mut fork) = fork {
                step(&mut fork, &mut before.clone(), 77);
            }
            step(&mut sequence, &mut tags, 5000 + round);
        }
        let mut fork = sequence.fork().expect("memory");
        step(&mut fork, &mut tags.clone(), 1);
        step(&mut sequence, &mut tags, 2);
    }
}

#[test]
fn a_step_of_guesses_that_ends_without_a_token_leaves_the_state_before_it() {
    let cache = cache("sparse", &STATES);
    for end in 0..4 {
        let mut sequence = cache.sequence(400).expect("address space");
        extend(&cpu(), &mut sequence, 20);
        let mut tags: Vec<usize> = (0..20).collect();
        guess(&mut sequence, &[7, 8, 9]);
        match end {
            0 => sequence.accept(0),
            1 => sequence.prepare(2).expect("room"),
            2 => guess(&mut sequence, &[5, 6]),
            _ => assert!(sequence.rewind(2)),
        }
        sequence.accept(0);
        step(&mut sequence, &mut tags, 10);
        assert_tags(&sequence, &tags);
    }
}

#[test]
fn a_state_that_was_not_taken_back_is_none() {
    for rewound in [false, true] {
        let cache = cache("sparse", &STATES);
        let mut sequence = cache.sequence(400).expect("address space");
        extend(&cpu(), &mut sequence, 20);
        guess(&mut sequence, &[7, 8, 9]);
        if rewound {
            // And nothing computes it once more.
            assert!(sequence.rewind(2));
        }
        sequence.accept(2);
        assert!(sequence.is_spent());
        sequence.truncate(0).expect("memory goes back");
        step(&mut sequence, &mut Vec::new(), 1);
    }
}

#[test]
fn what_states_go_back_with_is_taken_once_and_given_back() {
    let pages = |bytes: usize| bytes.next_multiple_of(PAGE);
    let cache = cache("sparse", &STATES);
    let mut sequence = cache.sequence(400).expect("address space");
    extend(&cpu(), &mut sequence, 20);
    let before = sequence.report().committed_bytes;
    // Inputs of eight elements a token, of eight tokens at least.
    let bytes = pages(STATES.state_bytes()) + pages(4 * 8 * 8);
    assert_eq!(STATES.rewind_bytes(8), STATES.state_bytes() + 4 * 8 * 8);
    assert_eq!(sequence.rewind_bytes_to_take(3), bytes);
    guess(&mut sequence, &[1, 2, 3]);
    assert_eq!(sequence.rewind_memory(), 0, "it is in use");
    assert_eq!(sequence.release_rewind_memory(), 0);
    sequence.accept(3);
    assert_eq!(sequence.rewind_bytes_to_take(8), 0);
    assert_eq!(sequence.rewind_bytes_to_take(9), pages(4 * 8 * 16));
    assert_eq!(sequence.report().committed_bytes, before + bytes);
    assert_eq!(
        sequence.buffers().len(),
        cache.sequence(1).expect("one").buffers().len() + 3
    );
    let mut fork = sequence.fork().expect("memory");
    assert_eq!(
        (fork.rewind_memory(), sequence.rewind_memory()),
        (0, bytes as u64)
    );
    assert_eq!(sequence.release_rewind_memory(), bytes as u64);
    assert_eq!(sequence.report().committed_bytes, before);
    // What a fork has as well is no second place for the next step.
    guess(&mut sequence, &[4, 5]);
    sequence.accept(2);
    assert_eq!(
        sequence.rewind_bytes_to_take(1),
        pages(STATES.state_bytes())
    );
    let mut tags: Vec<usize> = (0..20).chain([1, 2, 3]).collect();
    step(&mut fork, &mut tags.clone(), 9);
    tags.extend([4, 5]);
    step(&mut sequence, &mut tags, 9);
}

#[test]
fn without_memory_to_go_back_with_a_state_goes_on_as_ever() {
    let geometry = STATES.clone();
    let policy = KvPolicy::default();
    let pool = pool(policy, None);
    let cache = KvCache::over(pool.clone(), geometry, policy).expect("a cache");
    let mut sequence = cache.sequence(400).expect("address space");
    extend(&cpu(), &mut sequence, 20);
    let mut tags: Vec<usize> = (0..20).collect();
    let held = pool.ledger().committed.get();
    for pages in 0..4 {
        pool.set_limit(Some(ByteLength::new(held + pages * PAGE as u64)))
            .expect("a limit");
        let refused = sequence.prepare_to_rewind(4);
        assert!(matches!(refused, Err(KvError::Pages(_))), "{pages} pages");
        step(&mut sequence, &mut tags, 30);
        sequence.release_rewind_memory();
    }
}

#[test]
fn a_step_that_has_changed_nothing_costs_no_state() {
    let cache = cache("sparse", &STATES);
    let mut sequence = cache.sequence(400).expect("address space");
    extend(&cpu(), &mut sequence, 20);
    sequence.prepare(5).expect("room");
    sequence.accept(0);
    sequence.prepare(3).expect("room");
    sequence.prepare(2).expect("room");
    assert_states(&mut sequence, &(0..20).collect::<Vec<_>>());
}

#[test]
#[should_panic(expected = "a state is lent to a step")]
fn a_state_is_not_lent_before_a_step() {
    let cache = cache("sparse", &STATES);
    let mut sequence = cache.sequence(400).expect("address space");
    sequence.state(Layer(1));
}

/// What a sequence had before it was begun again is no figure of its forks.
#[test]
fn a_fork_of_a_sequence_that_was_begun_again_has_had_no_memory() {
    let cache = cache("sparse", &alone());
    let mut sequence = cache.sequence(400).expect("address space");
    extend(&cpu(), &mut sequence, 9);
    sequence.truncate(0).expect("memory goes back");
    assert!(sequence.report().peak_committed_bytes > 0);
    let mut fork = sequence.fork().expect("nothing to share");
    assert_eq!(fork.report().peak_committed_bytes, 0);
    step(&mut fork, &mut Vec::new(), 7);
}

#[test]
fn layers_without_rows_keep_states_alone() {
    let geometry = alone();
    let whole = geometry.state_bytes().next_multiple_of(PAGE);
    for name in POLICIES {
        let cache = cache(name, &geometry);
        let mut sequence = cache.sequence(1 << 30).expect("no row takes any room");
        assert_eq!(sequence.report().committed_bytes, 0, "{name}");
        let tags: Vec<usize> = (0..300).collect();
        append(&cpu(), &mut sequence, &tags);
        let report = sequence.report();
        assert_eq!(report.committed_bytes, whole, "{name}");
        assert_eq!(report.slack_bytes, whole - geometry.state_bytes());
        let policy: KvPolicy = name.parse().expect("a policy");
        let page_size = cache.page_size();
        let worked_out = policy.footprint(&geometry, page_size, 1 << 30, 300);
        assert_eq!(worked_out.expect("it fits").committed_bytes, whole);
        let mut fork = sequence.fork().expect("memory");
        drop(sequence);
        step(&mut fork, &mut tags.clone(), 300);
    }
    let own = KvCache::new(geometry, KvPolicy::default()).expect("the system has pages");
    assert_eq!(own.page_bytes(), PAGE, "a small state has small pages");
}

/// A copy of a shared state that fails halfway and cannot be undone.
#[test]
fn a_state_that_is_lost_is_never_read() {
    let (mut lost, mut kept) = (0, 0);
    for call in 0..40 {
        let host = HostDevice::new().expect("a host device");
        let (device, faults) = FaultyDevice::new(host, Completion::Immediate);
        let config = PoolConfig {
            page_size: PageSize::new(PAGE as u64).expect("a page size"),
            ..PoolConfig::default()
        };
        let pool = Pool::new(device, config).expect("a pool");
        // Every second page is free, so that a copy takes several calls.
        let mut pages: Vec<_> = (0..20)
            .map(|_| {
                let mut page = pool.reserve(ByteLength::new(1), "page").expect("a page");
                page.ensure_mapped(0..1).expect("memory");
                page
            })
            .collect();
        let mut index = 0;
        pages.retain(|_| {
            index += 1;
            index % 2 == 0
        });
        let cache = KvCache::over(pool, alone(), KvPolicy::default()).expect("a cache");
        let mut one = cache.sequence(400).expect("address space");
        append(&cpu(), &mut one, &[5; 20]);
        let mut other = one.fork().expect("pages");
        faults.fail(Failing::From(call));
        let prepared = one.prepare(1);
        faults.fail(Failing::Nothing);
        if one.has_lost_rows() {
            lost += 1;
            for prepared in [prepared, one.prepare(1)] {
                assert!(matches!(prepared, Err(KvError::RowsLost)), "call {call}");
            }
            one.truncate(0).expect("memory goes back");
            assert!(!one.has_lost_rows());
            step(&mut one, &mut Vec::new(), 1);
        } else {
            kept += u32::from(prepared.is_err());
            step(&mut one, &mut vec![5; 20], 1);
        }
        step(&mut other, &mut vec![5; 20], 2);
    }
    assert!(lost > 0 && kept > 0, "{lost} lost, {kept} kept");
}
