//! Sequences that start from kept pages hold the rows they would have computed.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use lacuna_kernels::{Cpu, CpuConfig, ElementType, RunMut};
use lacuna_kv::prefix::{Namespace, Path, PrefixCache};
use lacuna_kv::{
    Geometry, Keep, KvCache, KvElements, Layer, LayerCache, RowSpec, Sequence, Side, ValueRows,
};
use lacuna_pages::{HostDevice, SplitDevice};

/// Rows of 512 and 256 bytes: an 8 KiB page holds 16 rows of K and 32 of V.
pub(crate) fn even() -> Geometry {
    let elements = KvElements {
        key: ElementType::F32,
        value: ElementType::F16,
    };
    Geometry::uniform(2, 2, 64, elements)
}
/// Rows of 96 bytes, which straddle pages: 42 and two thirds a page.
fn straddling() -> Geometry {
    Geometry::uniform(3, 2, 12, KvElements::both(ElementType::F32))
}

/// Rows of 144 bytes whose values are the first 128 of them.
fn latent() -> Geometry {
    let rows = RowSpec {
        kv_heads: 1,
        key_dim: 36,
        value_dim: 32,
        values: ValueRows::InKeys,
        keep: Keep::All,
    };
    let elements = KvElements::both(ElementType::F32);
    Geometry::new(vec![LayerCache::Rows(rows); 3], elements).expect("a model")
}

/// Rows of 1,280 bytes, three and a bit a page.
fn wide() -> Geometry {
    Geometry::uniform(2, 5, 64, KvElements::both(ElementType::F32))
}

pub(crate) const CAPACITY: usize = 1200;

pub(crate) struct Bench {
    cpu: Cpu,
    pub(crate) geometry: Geometry,
    pub(crate) kv: KvCache,
    pub(crate) cache: PrefixCache,
}

/// A sequence, its tokens, and the groups it uses.
pub(crate) struct Held {
    pub(crate) sequence: Sequence,
    pub(crate) path: Path,
    pub(crate) tokens: Vec<u32>,
}

impl Bench {
    fn new(geometry: Geometry) -> Self {
        Self::with(geometry, "sparse")
    }

    pub(crate) fn with(geometry: Geometry, policy: &str) -> Self {
        let cpu = CpuConfig {
            threads: NonZeroUsize::MIN,
            ..CpuConfig::default()
        };
        let policy = policy.parse().expect("a policy");
        let kv = match geometry.host_layers() {
            0 => KvCache::new(geometry.clone(), policy),
            _ => {
                let own = HostDevice::new().expect("the system has pages");
                let device = SplitDevice::new(own).expect("pages of one size");
                KvCache::on_device(device, geometry.clone(), policy)
            }
        };
        let kv = kv.expect("the system has pages");
        Self {
            cpu: Cpu::new(cpu).expect("this machine's own level"),
            geometry,
            cache: PrefixCache::new(kv.clone()),
            kv,
        }
    }

    pub(crate) fn start(&mut self, tokens: &[u32]) -> Held {
        self.start_in(Namespace::COMMON, tokens)
    }

    pub(crate) fn start_in(&mut self, namespace: Namespace, tokens: &[u32]) -> Held {
        let start = self.cache.start(namespace, tokens, CAPACITY);
        let start = start.expect("memory");
        Held {
            sequence: start.sequence,
            path: start.path,
            tokens: tokens.to_vec(),
        }
    }

    /// Computes what is missing, `chunk` tokens at a time, and enters it.
    pub(crate) fn compute(&mut self, held: &mut Held, chunk: usize) {
        let (cpu, geometry) = (&self.cpu, self.geometry.clone());
        while held.sequence.len() < held.tokens.len() {
            let start = held.sequence.len();
            let stop = self.cache.next_stop(&held.path, start);
            let end = held.tokens.len().min(start + chunk);
            let end = stop.map_or(end, |stop| end.min(stop));
            held.sequence.prepare(end - start).expect("memory");
            for (Layer(layer), spec) in geometry.own_rows() {
                let rows = Side::BOTH.map(|side| {
                    let tokens = held.tokens[start..end].iter().enumerate();
                    let rows =
                        tokens.flat_map(|(at, &token)| row(&spec, start + at, token, layer, side));
                    rows.collect::<Vec<f32>>()
                });
                let write =
                    |side: Side, run: RunMut<'_>| cpu.store_run(run, &side.of(rows.each_ref())[..]);
                held.sequence.write(Layer(layer), write);
            }
            advance(&mut held.sequence, &held.tokens[..end]);
            held.sequence.accept(end - start);
            let (path, sequence) = (&mut held.path, &mut held.sequence);
            let grown = self
                .cache
                .grow(path, sequence, &held.tokens, Instant::now());
            grown.expect("pages can be sealed");
            self.cache.write(path, &held.tokens, false);
            let released = held.sequence.release_passed();
            released.expect("pages go back");
        }
    }

    pub(crate) fn run(&mut self, tokens: &[u32]) -> Held {
        let mut held = self.start(tokens);
        self.compute(&mut held, 7);
        held
    }

    /// As a session ends: what it has becomes a place to go on from.
    pub(crate) fn leave(&mut self, mut held: Held) {
        let (path, sequence) = (&mut held.path, &mut held.sequence);
        let finished = self.cache.finish(path, sequence, Instant::now());
        finished.expect("pages can be sealed");
        self.cache.write(path, &held.tokens, true);
        drop(held.sequence);
        self.cache.leave(held.path, Instant::now());
    }

    pub(crate) fn owned(&self) -> u64 {
        let ledger = self.kv.ledger();
        ledger.committed.get() - ledger.idle.get()
    }

    pub(crate) fn assert_rows(&self, held: &Held) {
        let mut fresh = self.kv.sequence(CAPACITY).expect("address space");
        fresh.prepare(held.tokens.len()).expect("memory");
        for (Layer(layer), spec) in self.geometry.own_rows() {
            let rows = Side::BOTH.map(|side| {
                let tokens = held.tokens.iter().enumerate();
                let rows = tokens.flat_map(|(at, &token)| row(&spec, at, token, layer, side));
                rows.collect::<Vec<f32>>()
            });
            fresh.write(Layer(layer), |side, run| {
                self.cpu.store_run(run, &side.of(rows.each_ref())[..]);
            });
        }
        fresh.accept(held.tokens.len());
        for (Layer(layer), spec) in self.geometry.own_rows() {
            for side in Side::BOTH {
                let bytes = |sequence: &Sequence| {
                    let view = sequence.view(Layer(layer), side);
                    let heads = view
                        .rows()
                        .flat_map(|row| (0..spec.kv_heads).map(move |head| (row, head)));
                    heads
                        .flat_map(|(row, head)| view.head(row, head).to_vec())
                        .collect::<Vec<u8>>()
                };
                assert_eq!(bytes(&held.sequence), bytes(&fresh), "layer {layer} {side}");
            }
        }
    }
}

/// Computes the states after `tokens` from those before the prepared ones, which must be right: whatever was
/// reused is what would have been computed.
fn advance(sequence: &mut Sequence, tokens: &[u32]) {
    let start = sequence.len();
    for layer in 0..sequence.geometry().layers().len() {
        let state = sequence.state(Layer(layer)).after;
        let before = state_after(&tokens[..start], layer);
        for (element, value) in state.iter().enumerate() {
            let before = if start == 0 {
                0.0
            } else {
                before + element as f32
            };
            assert_eq!(*value, before, "layer {layer} after {start} tokens");
        }
        let first = state_after(tokens, layer);
        for (element, value) in state.iter_mut().enumerate() {
            *value = first + element as f32;
        }
    }
}

/// What the first element of a layer's state is after `tokens`; the others are the numbers after it.
fn state_after(tokens: &[u32], layer: usize) -> f32 {
    let next = |state: usize, &token: &u32| (state * 31 + token as usize + 1) % 65_521;
    tokens.iter().fold(layer, next) as f32
}

/// Groups of 32 tokens, of some that are no multiple of 16, and of few.
pub(crate) fn geometries() -> [Geometry; 4] {
    [even(), straddling(), latent(), wide()]
}

/// Every way to hold rows in pages that can be shared.
pub(crate) fn benches() -> impl Iterator<Item = Bench> {
    let layouts = ["sparse", "sparse:head-major", "sparse:interleaved=2"];
    layouts.into_iter().flat_map(|policy| {
        [even(), straddling(), latent()].map(|geometry| Bench::with(geometry, policy))
    })
}

/// A row that no other token, position, layer or side has.
fn row(spec: &RowSpec, at: usize, token: u32, layer: usize, side: Side) -> Vec<f32> {
    let half = f32::from(u8::from(side == Side::Value));
    let first = (at % 64) as f32 + token as f32 * 0.5 + layer as f32 * 64.0;
    (0..spec.row_elements(side))
        .map(|element| first + half * 256.0 + element as f32 * 0.25)
        .collect()
}

pub(crate) fn tokens(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|index| (index * 7 + seed * 13) % 50)
        .collect()
}

/// `shared` tokens that all have in common, then `own` that depend on `seed`.
pub(crate) fn prompt(shared: usize, own: usize, seed: u32) -> Vec<u32> {
    let mut prompt = tokens(0, shared);
    prompt.extend((0..own as u32).map(|index| 60 + seed * 31 + index));
    prompt
}

#[test]
fn a_running_sequences_pages_start_another() {
    for mut bench in benches() {
        let donor = bench.run(&prompt(150, 9, 0));
        let mut second = bench.start(&prompt(150, 40, 1));
        let grain = bench.cache.grain();
        let found = grain.whole_tokens(150 / grain.group_tokens());
        assert_eq!(second.sequence.len(), found);
        let whole = found / grain.group_tokens();
        assert_eq!(
            second.path.groups().len(),
            whole,
            "those it has all rows of"
        );
        bench.compute(&mut second, 5);
        bench.assert_rows(&second);
        bench.assert_rows(&donor);
    }
}

#[test]
fn what_one_namespace_holds_starts_nothing_in_another() {
    for mut bench in benches() {
        let prompt = prompt(150, 9, 0);
        let donor = bench.run(&prompt);
        let other = Namespace::new(7);
        let mut second = bench.start_in(other, &prompt);
        assert_eq!(second.sequence.len(), 0, "not even part of a group");
        bench.compute(&mut second, 50);
        bench.assert_rows(&second);
        // Its groups are its namespace's own, and so are those of what forks off it.
        let forked = bench.cache.fork(&second.path, 150);
        assert_eq!(forked.namespace(), other);
        bench.cache.leave(forked, Instant::now());
        let third = bench.start_in(other, &prompt);
        assert!(third.sequence.len() > 100);
        assert!(second.path.groups().starts_with(third.path.groups()));
        let shared = |group| donor.path.groups().contains(group);
        assert!(!third.path.groups().iter().any(shared));
        for held in [donor, second, third] {
            bench.leave(held);
        }
    }
}

#[test]
fn a_partly_matching_group_is_used_as_far_as_it_goes_and_left_as_it_was() {
    for mut bench in benches() {
        let group = bench.cache.grain().group_tokens().get();
        let donor = bench.run(&tokens(0, 3 * group));
        let mut second = bench.start(&prompt(group + group / 2, 20, 1));
        assert_eq!(second.sequence.len(), group + group / 2);
        assert_eq!(second.path.groups().len(), 1);
        bench.compute(&mut second, 50);
        bench.assert_rows(&second);
        bench.assert_rows(&donor);
    }
}

/// A group has two pages of K. Whatever was written to the second, when the first had been copied and
/// more tokens came in later steps, found it sealed.
#[test]
fn a_group_of_several_pages_can_be_left_in_its_first_a_few_tokens_at_a_time() {
    for mut bench in benches() {
        let group = bench.cache.grain().group_tokens().get();
        let donor = bench.run(&tokens(0, 3 * group));
        for chunk in [1, 3] {
            let mut second = bench.start(&prompt(group + group / 4, group, chunk as u32));
            assert_eq!(second.sequence.len(), group + group / 4);
            bench.compute(&mut second, chunk);
            bench.assert_rows(&second);
        }
        bench.assert_rows(&donor);
    }
}

#[test]
fn a_prompt_known_to_its_end_keeps_its_last_token_to_compute() {
    for mut bench in benches() {
        let whole = tokens(3, 4 * bench.cache.grain().group_tokens().get());
        let donor = bench.run(&whole);
        let most = bench.cache.grain().whole_tokens(4).min(whole.len() - 1);
        let mut again = bench.start(&whole);
        assert_eq!(again.sequence.len(), most);
        bench.compute(&mut again, 1);
        bench.assert_rows(&again);
        bench.assert_rows(&donor);
    }
}

#[test]
fn sequences_with_a_common_beginning_hold_one_copy_of_it() {
    let mut bench = Bench::new(even());
    let grain = bench.cache.grain().clone();
    let shared = 8 * grain.group_tokens().get();
    let all: Vec<Held> = (0..8)
        .map(|seed| bench.run(&prompt(shared, 20, seed)))
        .collect();
    let own = grain.bytes(shared + 20) - grain.bytes(shared);
    assert_eq!(bench.owned(), grain.bytes(shared) + 8 * own);
    for held in all {
        bench.assert_rows(&held);
        bench.leave(held);
    }
    assert_eq!(
        bench.owned(),
        grain.bytes(shared),
        "partly filled groups go"
    );
    while bench.cache.evict(Instant::now()) {}
    assert_eq!(bench.owned(), 0);
}

#[test]
fn every_eviction_gives_one_groups_bytes_back() {
    let mut bench = Bench::new(even());
    let grain = bench.cache.grain().clone();
    let group = grain.group_tokens().get();
    let held = bench.run(&tokens(1, 5 * group));
    assert!(!bench.cache.evict(Instant::now()), "groups in use stay");
    bench.leave(held);
    for left in (0..5).rev() {
        assert!(bench.cache.evict(Instant::now()));
        assert_eq!(bench.owned(), grain.bytes(left * group));
        assert_eq!(
            bench
                .cache
                .find(Namespace::COMMON, &tokens(1, 5 * group))
                .0
                .groups
                .len(),
            left,
            "deepest first"
        );
    }
}

#[test]
fn starting_and_leaving_copy_nothing() {
    let mut bench = Bench::new(even());
    let group = bench.cache.grain().group_tokens().get();
    let donor = bench.run(&tokens(0, 4 * group));
    let before = bench.kv.ledger().counts;
    for seed in 0..10 {
        let held = bench.run(&prompt(4 * group, 3, seed));
        bench.leave(held);
    }
    let after = bench.kv.ledger().counts;
    assert_eq!(after.copies_on_write, before.copies_on_write);
    bench.assert_rows(&donor);
}

#[test]
fn a_policy_that_cannot_keep_pages_finds_nothing() {
    let geometries = [even(), crate::states::geometries()[0].clone()];
    let policies = ["dense", "grow:mlx", "paged"];
    let all = geometries
        .iter()
        .flat_map(|geometry| policies.map(|policy| (geometry, policy)));
    for (geometry, policy) in all {
        let mut bench = Bench::with(geometry.clone(), policy);
        let first = bench.run(&tokens(0, 100));
        let mut second = bench.start(&tokens(0, 100));
        assert_eq!(second.sequence.len(), 0);
        bench.compute(&mut second, 10);
        bench.assert_rows(&second);
        bench.leave(first);
        bench.leave(second);
        assert!(bench.cache.tree().is_empty(), "{policy}");
    }
}

/// A fork uses the groups it begins with, so they stay when the sequence it came from is gone.
#[test]
fn a_fork_keeps_the_whole_groups_it_begins_with() {
    let mut bench = Bench::new(even());
    let group = bench.cache.grain().group_tokens().get();
    let held = bench.run(&tokens(0, 3 * group + 5));
    let fork = bench.cache.fork(&held.path, 2 * group + 1);
    assert_eq!(fork.groups(), &held.path.groups()[..2]);
    let all = bench.cache.fork(&held.path, 100 * group);
    assert_eq!(all.groups(), held.path.groups());
    bench.leave(held);
    bench.cache.leave(all, Instant::now());
    assert!(bench.cache.evict(Instant::now()), "the third");
    assert!(!bench.cache.evict(Instant::now()), "two are in use");
    let found = bench
        .cache
        .find(Namespace::COMMON, &tokens(0, 3 * group))
        .0
        .groups;
    assert_eq!(found, fork.groups());
    bench.cache.leave(fork, Instant::now());
    while bench.cache.evict(Instant::now()) {}
    assert!(bench.cache.tree().is_empty());
}

#[test]
fn the_pinned_beginning_of_a_prompt_leaves_after_everything_else() {
    let mut bench = Bench::new(even());
    let group = bench.cache.grain().group_tokens().get();
    let mut pinned = bench.run(&tokens(0, 3 * group));
    let other = bench.run(&tokens(1, 3 * group));
    let now = Instant::now();
    let hour = Duration::from_secs(3600);
    let until = now + hour;
    bench.cache.pin(&mut pinned.path, 2 * group, now, hour);
    assert_eq!(bench.cache.tree().pinned(now), 2);
    bench.leave(pinned);
    bench.leave(other);
    for _ in 0..4 {
        assert!(bench.cache.evict(Instant::now()));
    }
    assert!(
        bench
            .cache
            .find(Namespace::COMMON, &tokens(1, 3 * group))
            .0
            .groups
            .is_empty()
    );
    assert_eq!(
        bench
            .cache
            .find(Namespace::COMMON, &tokens(0, 3 * group))
            .0
            .groups
            .len(),
        2
    );
    assert!(
        !bench
            .cache
            .expire(Instant::now(), Duration::ZERO, |_| false),
        "pinned"
    );
    assert!(bench.cache.expire(until, Duration::ZERO, |_| false));
    assert!(bench.cache.evict(until) && !bench.cache.evict(until));
}

/// Copying a group to go on in the middle of it has to be worth it: an eighth of its tokens.
#[test]
fn a_tail_of_less_than_an_eighth_of_a_group_is_computed_again() {
    let mut bench = Bench::new(even());
    let group = bench.cache.grain().group_tokens().get();
    let donor = bench.run(&tokens(0, 2 * group));
    for (tail, held) in [(0, 0), (group / 8 - 1, 0), (group / 8, group / 8)] {
        let (found, tokens) = bench
            .cache
            .find(Namespace::COMMON, &prompt(group + tail, 20, 1));
        assert_eq!(tokens, group + held, "a tail of {tail}");
        assert_eq!(found.tail.map_or(0, |(_, tail)| tail.get()), held);
    }
    bench.leave(donor);
}

#[test]
fn a_sequence_that_starts_apart_neither_finds_nor_leaves_anything() {
    let mut bench = Bench::new(even());
    let group = bench.cache.grain().group_tokens().get();
    let start = bench.cache.start_apart(CAPACITY).expect("address space");
    let mut apart = Held {
        sequence: start.sequence,
        path: start.path,
        tokens: tokens(0, 3 * group),
    };
    bench.compute(&mut apart, 20);
    bench.assert_rows(&apart);
    assert!(apart.path.groups().is_empty() && bench.cache.tree().is_empty());
    bench.leave(apart);
}

/// Pages that were mapped for a sequence are its own to give up, whoever filled them.
#[test]
fn a_sequence_gives_up_the_pages_it_started_with() {
    for mut bench in benches() {
        let donor = bench.run(&tokens(0, 150));
        let mut second = bench.start(&prompt(150, 40, 1));
        assert!(!second.sequence.is_empty());
        let report = second.sequence.report();
        assert!(report.committed_bytes > 0);
        assert_eq!(report.peak_committed_bytes, report.committed_bytes);
        second.sequence.truncate(0).expect("pages go back");
        assert_eq!(second.sequence.report().committed_bytes, 0);
        bench.cache.leave(second.path, Instant::now());
        bench.assert_rows(&donor);
    }
}

/// A prompt came from files while a sequence that had been swapped out computed it: the cache went on holding the pages
/// that came, beside the sequence's own, and a request that would have fitted alone found no memory.
#[test]
fn what_a_sequence_computed_that_nobody_else_has_any_more_is_held_once() {
    let mut bench = Bench::new(even());
    let group = bench.cache.grain().group_tokens().get();
    let prompt = tokens(0, 4 * group);
    let [mut first, mut second] = [(); 2].map(|()| bench.start(&prompt));
    bench.compute(&mut first, 50);
    bench.leave(first);
    bench.compute(&mut second, 50);
    let alone = second.sequence.report().committed_bytes as u64;
    let ledger = bench.kv.ledger();
    assert_eq!(ledger.committed.saturating_sub(ledger.idle).get(), alone);
    assert_eq!(ledger.pinned_only.get(), 0, "the cache has the sequence's");
    bench.assert_rows(&second);
    bench.leave(second);
}
