//! Sequences whose pages were moved to a swap file and back hold what those do that never were.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lacuna_kv::swap::{Phase, Swap, SwapConfig, SwapDevice, SwapError, SwapSizes, Swapped};
use lacuna_kv::{Geometry, KvCache, Sequence};
use lacuna_pages::{ByteLength, Pool};
use proptest::prelude::*;

use crate::support::{
    GEOMETRY, PAGE, SPLIT, STATES, WINDOWED, append, assert_states, assert_tags, cpu, pool,
    pool_of, store,
};

const LAYOUTS: [&str; 3] = ["sparse", "sparse:head-major", "sparse:interleaved=2"];

/// A disk that does as it is told. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disk(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    bytes: HashMap<u64, Vec<u8>>,
    /// How often it was given room back.
    discards: usize,
    refuses: bool,
    flips: bool,
}

impl Disk {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().expect("no panic")
    }
}

impl SwapDevice for Disk {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut held = self.held();
        if held.refuses {
            return Err(io::ErrorKind::StorageFull.into());
        }
        held.bytes.insert(offset, bytes.to_vec());
        Ok(())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let held = self.held();
        if held.refuses {
            return Err(io::Error::other("the disk is gone"));
        }
        bytes.copy_from_slice(&held.bytes[&offset]);
        bytes[bytes.len() / 2] ^= u8::from(held.flips);
        Ok(())
    }

    fn discard_from(&self, offset: u64) {
        let mut held = self.held();
        held.discards += 1;
        held.bytes.retain(|&at, _| at < offset);
    }
}

struct Bench {
    pool: Pool,
    cache: KvCache,
    disk: Disk,
    swap: Swap,
}

impl Bench {
    /// A file of `pages` pages, in pieces of three.
    fn new(policy: &str, geometry: &Geometry, pages: u64) -> Self {
        let policy = policy.parse().expect("a policy");
        let pool = pool_of(geometry, policy, None);
        let cache = KvCache::over(pool.clone(), geometry.clone(), policy).expect("a cache");
        let disk = Disk::default();
        let page = PAGE as u64;
        let sizes = SwapSizes {
            limit: ByteLength::new(pages * page),
            piece: ByteLength::new(3 * page),
            block: ByteLength::new(20 * page),
        };
        let swap = Swap::over(Box::new(disk.clone()), sizes, &cache).expect("it can be swapped");
        Self {
            pool,
            cache,
            disk,
            swap,
        }
    }

    fn sequence(&self, tokens: usize) -> Sequence {
        let mut sequence = self.cache.sequence(1200).expect("address space");
        append(&cpu(), &mut sequence, &(0..tokens).collect::<Vec<_>>());
        sequence
    }

    fn leave(&self, sequence: Sequence) -> Swapped {
        let group = self.cache.grain().group_tokens().get();
        let left = self.swap.leave(sequence, 0, group);
        left.expect("it can be moved, and there is room")
    }

    fn settle(&self) {
        while self.swap.advance() {}
    }

    /// Bytes of pages that anybody has.
    fn owned(&self) -> u64 {
        let ledger = self.pool.ledger();
        ledger.committed.saturating_sub(ledger.idle).get()
    }

    fn back(&self, away: &Swapped) -> Sequence {
        away.begin_return(&[], 0);
        self.settle();
        away.take().expect("it is back")
    }
}

/// Computes one token more, which reads states and writes rows and pages that came back.
fn go_on(sequence: &mut Sequence, tags: &mut Vec<usize>, tag: usize) {
    sequence.prepare(1).expect("room");
    tags.push(tag);
    store(&cpu(), sequence, &[tag]);
    assert_states(sequence, tags);
    sequence.accept(1);
    sequence.release_passed().expect("pages go back");
    assert_tags(sequence, tags);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_came_back_is_what_left(
        (layout, kind) in (0usize..3, 0usize..4),
        turns in prop::collection::vec((1usize..150, 0usize..40, any::<bool>(), any::<bool>()), 1..5),
    ) {
        let geometry: &Geometry = [&GEOMETRY, &WINDOWED, &STATES, &SPLIT][kind];
        let bench = Bench::new(LAYOUTS[layout], geometry, 2000);
        let mut sequence = bench.sequence(1);
        let mut tags = vec![0];
        for (tokens, pieces, retreats, forks) in turns {
            let more: Vec<usize> = (0..tokens).map(|at| tags.len() * 3 + at).collect();
            append(&cpu(), &mut sequence, &more);
            tags.extend(more);
            // Pages that another sequence has too are left to it.
            let other = forks.then(|| sequence.fork().expect("memory"));
            let bytes = bench.owned();
            let away = bench.leave(sequence);
            bench.settle();
            prop_assert_eq!(away.progress().phase, Phase::Out);
            if other.is_none() {
                prop_assert!(bench.owned() == 0, "all of {} are free", bytes);
            }
            if retreats {
                away.begin_return(&[], 0);
                for _ in 0..pieces {
                    bench.swap.advance();
                }
                let done = away.progress().phase == Phase::Back;
                prop_assert_eq!(away.retreat(), !done);
                if !done {
                    prop_assert!(other.is_some() || bench.owned() == 0);
                    sequence = bench.back(&away);
                } else {
                    sequence = away.take().expect("it is back");
                }
            } else {
                sequence = bench.back(&away);
            }
            drop(away);
            prop_assert_eq!(bench.swap.status().held.get(), 0);
            assert_tags(&sequence, &tags);
            if let Some(mut other) = other {
                let mut tags = tags.clone();
                go_on(&mut other, &mut tags, 77_000);
            }
            let tag = 50_000 + tags.len();
            go_on(&mut sequence, &mut tags, tag);
        }
    }
}

#[test]
fn pages_come_free_from_the_end_while_the_rest_is_still_there() {
    let bench = Bench::new("sparse", &GEOMETRY, 2000);
    let away = bench.leave(bench.sequence(1000));
    let (mut kept, mut owned) = (1000, bench.owned());
    let mut steps = 0;
    while let Phase::Leaving { kept_tokens } = away.progress().phase {
        assert!(kept_tokens <= kept && bench.owned() <= owned);
        steps += usize::from(kept_tokens < kept);
        (kept, owned) = (kept_tokens, bench.owned());
        assert!(bench.swap.advance());
    }
    assert!(steps > 3, "{steps} blocks came free on the way");
    assert_eq!((away.progress().phase, bench.owned()), (Phase::Out, 0));
    assert_eq!(away.bytes_to_return(0), bench.swap.status().written_bytes);
}

#[test]
fn a_file_that_is_full_takes_nothing_and_the_sequence_is_as_it_was() {
    let bench = Bench::new("sparse", &STATES, 30);
    let sequence = bench.sequence(600);
    let group = bench.cache.grain().group_tokens().get();
    let Err(Some(sequence)) = bench.swap.leave(sequence, 0, group) else {
        panic!("there is no room");
    };
    let mut sequence = *sequence;
    assert_eq!(bench.swap.status().held.get(), 0);
    go_on(&mut sequence, &mut (0..600).collect(), 9000);
}

/// What cannot be moved: no tokens, rows that were released, and states that are not those after the tokens.
#[test]
fn what_cannot_be_moved_out_stays_as_it_was() {
    let bench = Bench::new("sparse", &STATES, 2000);
    let group = bench.cache.grain().group_tokens().get();
    let refused = |sequence: Sequence| {
        let Err(Some(sequence)) = bench.swap.leave(sequence, 0, group) else {
            panic!("it cannot be moved");
        };
        assert_eq!(bench.swap.status().held.get(), 0);
        assert!(!bench.swap.advance(), "nothing is to be moved");
        *sequence
    };
    let mut tags = Vec::new();
    let empty = bench.cache.sequence(1200).expect("address space");
    go_on(&mut refused(empty), &mut tags, 1);

    let mut spent = bench.sequence(300);
    spent.prepare(2).expect("room");
    store(&cpu(), &mut spent, &[300, 301]);
    spent.accept(1);
    assert!(refused(spent).is_spent());

    let mut tags: Vec<usize> = (0..300).collect();
    let mut in_step = bench.sequence(300);
    in_step.prepare(1).expect("room");
    store(&cpu(), &mut in_step, &[300]);
    let mut in_step = refused(in_step);
    tags.push(300);
    assert_states(&mut in_step, &tags);
    in_step.accept(1);
    go_on(&mut in_step, &mut tags, 301);

    let rows = Bench::new("sparse", &GEOMETRY, 2000);
    let mut released = rows.sequence(300);
    released.release_before(100).expect("pages go back");
    let committed = released.report().committed_bytes;
    let Err(Some(released)) = rows.swap.leave(released, 0, group) else {
        panic!("it cannot be moved");
    };
    assert_eq!(released.report().committed_bytes, committed);
}

/// States that a fork had too are its own when they are back.
#[test]
fn what_is_back_takes_no_memory_for_states_again() {
    let bench = Bench::new("sparse", &STATES, 2000);
    let mut sequence = bench.sequence(300);
    let other = sequence.fork().expect("memory");
    assert!(sequence.state_bytes_to_take() > 0);
    let away = bench.leave(sequence);
    bench.settle();
    let mut sequence = bench.back(&away);
    assert_eq!(sequence.state_bytes_to_take(), 0);
    let copied = sequence.report().copied_bytes;
    go_on(&mut sequence, &mut (0..300).collect(), 9000);
    assert_eq!(sequence.report().copied_bytes, copied);
    drop(other);
}

#[test]
fn what_has_moved_is_counted() {
    let bench = Bench::new("sparse", &STATES, 2000);
    let mut bytes = 0;
    for turn in 1..=2 {
        let sequence = bench.sequence(300);
        let buffers = sequence.buffers().len();
        let away = bench.leave(sequence);
        let mut pieces = 0;
        loop {
            assert_eq!(away.progress().moved, pieces);
            assert_eq!(bench.swap.status().left, turn - 1);
            if !bench.swap.advance() || away.progress().phase == Phase::Out {
                break;
            }
            pieces += 1;
        }
        assert!(pieces > 3);
        assert_eq!(away.progress().moved, pieces + 1);
        {
            let look = away.look();
            let sequence = look.sequence().expect("it is out, and not lost");
            assert_eq!(sequence.buffers().len(), buffers);
        }
        let all = away.bytes_to_return(0);
        assert_eq!(bench.owned(), 0);
        let status = bench.swap.status();
        assert_eq!((status.left, status.returned), (turn, turn - 1));
        assert_eq!(
            (status.written_bytes, status.read_bytes),
            (bytes + all, bytes)
        );
        let sequence = bench.back(&away);
        assert_eq!(away.progress().moved, 2 * (pieces + 1));
        assert!(away.look().sequence().is_none(), "it was taken");
        assert_eq!(sequence.report().committed_bytes as u64, all);
        bytes += all;
        let status = bench.swap.status();
        assert_eq!((status.left, status.returned), (turn, turn));
        assert_eq!((status.written_bytes, status.read_bytes), (bytes, bytes));
    }
}

/// Blocks and pieces of every size: of what is taken for a sequence, something is left at most.
#[test]
fn the_room_that_is_taken_is_enough_however_blocks_end() {
    for layout in LAYOUTS {
        let bench = Bench::new(layout, &GEOMETRY, 2000);
        for tokens in (1..700).step_by(31) {
            let away = bench.leave(bench.sequence(tokens));
            bench.settle();
            assert_tags(&bench.back(&away), &(0..tokens).collect::<Vec<_>>());
        }
    }
}

/// A file that is just as large as one sequence takes.
#[test]
fn the_room_of_what_is_back_is_there_for_the_next() {
    let roomy = Bench::new("sparse", &STATES, 2000);
    let group = roomy.cache.grain().group_tokens().get();
    let room = roomy.swap.room_for(&roomy.sequence(300), group);
    for (pages, fits) in [(room / PAGE as u64, true), (room / PAGE as u64 - 1, false)] {
        let bench = Bench::new("sparse", &STATES, pages);
        for _ in 0..3 {
            match bench.swap.leave(bench.sequence(300), 0, group) {
                Ok(away) => {
                    assert!(fits);
                    assert!(bench.swap.status().held.get() <= room);
                    bench.settle();
                    go_on(&mut bench.back(&away), &mut (0..300).collect(), 9000);
                }
                Err(sequence) => {
                    assert!(!fits && sequence.is_some());
                }
            }
        }
    }
}

#[test]
fn the_disk_is_given_room_back_when_there_is_some_and_only_then() {
    // A page of keys and one of values are one piece.
    let geometry = Geometry::uniform(1, 2, 12, GEOMETRY.elements());
    let bench = Bench::new("sparse", &geometry, 2000);
    let away = bench.leave(bench.sequence(1));
    bench.settle();
    let (written, discards) = {
        let held = bench.disk.held();
        (held.bytes.len(), held.discards)
    };
    assert_eq!((written, discards), (1, 0));
    assert!(!bench.swap.advance());
    assert_eq!(bench.disk.held().discards, 0, "all of it is in use");
    drop(away);
    assert!(!bench.swap.advance());
    assert!(bench.disk.held().bytes.is_empty());
    assert_eq!(bench.disk.held().discards, 1);
    assert!(!bench.swap.advance());
    assert_eq!(bench.disk.held().discards, 1, "once");
}

#[test]
fn rates_are_what_they_are_said_to_be_where_there_is_no_thread() {
    let bench = Bench::new("sparse", &GEOMETRY, 30);
    let rates = |bench: &Bench| {
        let status = bench.swap.status();
        [status.write_rate, status.read_rate].map(|rate| rate.per_second())
    };
    assert_eq!(rates(&bench), [None, None]);
    bench.swap.assume_rates(1000.0, Duration::from_secs(2));
    assert_eq!(rates(&bench), [Some(500.0), Some(500.0)]);
}

#[test]
fn what_the_disk_refuses_or_changes_is_lost_and_never_read() {
    for (when_out, flips) in [(false, false), (true, false), (true, true)] {
        let bench = Bench::new("sparse", &STATES, 2000);
        let away = bench.leave(bench.sequence(300));
        if when_out {
            bench.settle();
        }
        {
            let mut held = bench.disk.held();
            (held.refuses, held.flips) = (!flips, flips);
        }
        if when_out {
            away.begin_return(&[], 0);
        }
        bench.settle();
        assert_eq!(away.progress().phase, Phase::Failed);
        assert!(away.take().is_none());
        assert_eq!(bench.owned(), 0, "its pages are free");
        let status = bench.swap.status();
        assert_eq!(status.held.get(), 0, "and its room");
        let failures = (status.failed_writes, status.failed_reads);
        assert_eq!(failures, if when_out { (0, 1) } else { (1, 0) });
        assert!(status.failure.is_some());
    }
}

#[test]
fn dropping_one_frees_its_pages_and_its_room_wherever_it_is() {
    let bench = Bench::new("sparse", &WINDOWED, 2000);
    for pieces in [0, 1, 5, 1000] {
        let away = bench.leave(bench.sequence(300));
        for _ in 0..pieces {
            bench.swap.advance();
        }
        assert!(bench.swap.status().held.get() > 0);
        drop(away);
        bench.settle();
        assert_eq!((bench.owned(), bench.swap.status().held.get()), (0, 0));
    }
    assert!(
        bench.disk.held().bytes.is_empty(),
        "the disk has its room back"
    );
    let mut again = bench.sequence(300);
    go_on(&mut again, &mut (0..300).collect(), 9000);
}

#[test]
fn one_without_memory_to_come_back_to_is_lost() {
    let bench = Bench::new("sparse", &GEOMETRY, 2000);
    let away = bench.leave(bench.sequence(300));
    bench.settle();
    bench.pool.trim();
    bench
        .pool
        .set_limit(Some(ByteLength::new(5 * PAGE as u64)))
        .expect("a limit");
    away.begin_return(&[], 0);
    bench.settle();
    assert_eq!(away.progress().phase, Phase::Failed);
    let status = bench.swap.status();
    assert_eq!(
        (status.short_of_memory, status.held.get(), bench.owned()),
        (1, 0, 0)
    );
}

#[test]
fn other_policies_cannot_be_swapped() {
    for policy in ["dense", "paged", "grow:mlx"] {
        let policy: lacuna_kv::KvPolicy = policy.parse().expect("a policy");
        let cache = KvCache::over(pool(policy, None), GEOMETRY.clone(), policy).expect("a cache");
        let config = SwapConfig {
            folder: env!("CARGO_TARGET_TMPDIR").into(),
            limit: ByteLength::mebibytes(1),
        };
        let refused = Swap::open(&config, &cache);
        assert!(matches!(refused, Err(SwapError::Policy { .. })), "{policy}");
    }
}

#[test]
fn a_file_on_a_disk_moves_on_its_own_and_has_no_name() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let policy = lacuna_kv::KvPolicy::default();
    let cache = KvCache::over(pool(policy, None), STATES.clone(), policy).expect("a cache");
    let config = SwapConfig {
        folder: folder.path().to_path_buf(),
        limit: ByteLength::mebibytes(64),
    };
    let swap = match Swap::open(&config, &cache) {
        Ok(swap) => swap,
        // A build folder in memory has no room for a swap file, which is as it should be.
        Err(SwapError::File {
            source: lacuna_kv::swap::SwapFileError::InMemory,
            ..
        }) => return,
        Err(error) => panic!("{error}"),
    };
    let rates = swap.status();
    assert!(rates.write_rate.per_second().is_some() && rates.read_rate.per_second().is_some());
    let mut sequence = cache.sequence(1200).expect("address space");
    let mut tags: Vec<usize> = (0..700).collect();
    append(&cpu(), &mut sequence, &tags);
    let group = cache.grain().group_tokens().get();
    let away = swap.leave(sequence, 0, group).expect("room");
    wait(&away, Phase::Out);
    assert_eq!(folder.path().read_dir().expect("it is there").count(), 0);
    away.begin_return(&[], 0);
    wait(&away, Phase::Back);
    let mut sequence = away.take().expect("it is back");
    go_on(&mut sequence, &mut tags, 9000);
}

/// Waits for a thread, for as long as a very busy machine may take.
fn wait(away: &Swapped, phase: Phase) {
    let until = Instant::now() + Duration::from_secs(60);
    while away.progress().phase != phase {
        assert!(Instant::now() < until, "{:?}", away.progress());
        std::thread::sleep(Duration::from_millis(1));
    }
}
