//! Random operations on several sequences, against lists of token names.

use lacuna_kernels::Cpu;
use lacuna_kv::{Geometry, Keep, KvCache, KvError, Sequence};
use lacuna_pages::{ByteLength, Ledger, Pool};
use proptest::prelude::*;

use crate::support::{
    GEOMETRY, POLICIES, SPLIT, STATES, WINDOWED, assert_states, assert_tags, cpu, pool_of, store,
};

/// Past the first step of the policies that copy to grow.
const CAPACITY: usize = 700;
const SEQUENCES: usize = 4;

/// Positions are permille of what the sequence holds when the operation is its turn.
#[derive(Debug, Clone)]
enum Operation {
    Step { rows: usize, accepted: usize },
    Truncate { len: usize },
    Release { position: usize },
    Fork,
    SharePrefixInStep { tokens: usize, rows: usize },
    Drop,
}

fn operation() -> impl Strategy<Value = (usize, Operation)> {
    let rows = prop_oneof![Just(1), Just(17), 1..300usize];
    let kind = prop_oneof![
        6 => (rows.clone(), 0..=1000usize)
            .prop_map(|(rows, accepted)| Operation::Step { rows, accepted }),
        2 => (0..=1000usize).prop_map(|len| Operation::Truncate { len }),
        1 => (0..=1000usize).prop_map(|position| Operation::Release { position }),
        2 => Just(Operation::Fork),
        2 => (0..=1000usize, rows)
            .prop_map(|(tokens, rows)| Operation::SharePrefixInStep { tokens, rows }),
        1 => Just(Operation::Drop),
    ];
    (0..SEQUENCES, kind)
}

/// A sequence and what it should hold.
struct Pair {
    real: Sequence,
    tags: Vec<usize>,
    first: usize,
}

struct World {
    cpu: Cpu,
    cache: KvCache,
    pairs: Vec<Option<Pair>>,
    next_tag: usize,
}

impl World {
    fn new(pool: Pool, geometry: &Geometry, policy: &str) -> Self {
        let policy = policy.parse().expect("a policy");
        let cache = KvCache::over(pool, geometry.clone(), policy).expect("a cache");
        Self {
            cpu: cpu(),
            cache,
            pairs: (0..SEQUENCES).map(|_| None).collect(),
            next_tag: 0,
        }
    }

    /// Takes new names, so that a row of an earlier try is never mistaken for one of this.
    fn tags(&mut self, rows: usize) -> Vec<usize> {
        self.next_tag += rows;
        (self.next_tag - rows..self.next_tag).collect()
    }

    fn apply(&mut self, index: usize, operation: &Operation) {
        let Some(mut pair) = self.take(index) else {
            return;
        };
        let len = pair.tags.len();
        match *operation {
            Operation::Step { rows, accepted } => {
                let (prepared, tags) = self.begin(&mut pair, rows);
                self.end(&mut pair, prepared * accepted / 1000, &tags);
            }
            Operation::Truncate { len: part } => truncate(&mut pair, len * part / 1000),
            Operation::Release { position } => {
                let position = len * position / 1000;
                if done(pair.real.release_before(position)) {
                    pair.first = pair.first.max(position);
                }
            }
            Operation::Fork => {
                let fork = pair.real.fork();
                self.put(index + 1, fork, &pair, len);
            }
            Operation::SharePrefixInStep { tokens, rows } => {
                let (prepared, tags) = self.begin(&mut pair, rows);
                let tokens = pair.tags.len() * tokens / 1000;
                let shared = pair.real.share_prefix(tokens);
                self.put(index + 1, shared, &pair, tokens);
                self.end(&mut pair, prepared, &tags);
            }
            Operation::Drop => return,
        }
        self.pairs[index] = Some(pair);
    }

    fn take(&mut self, index: usize) -> Option<Pair> {
        if let Some(pair) = self.pairs[index].take() {
            return Some(pair);
        }
        let real = self.cache.sequence(CAPACITY);
        real.map_err(expected).ok().map(|real| Pair {
            real,
            tags: Vec::new(),
            first: 0,
        })
    }

    /// Prepares rows, or none when there is no memory for them.
    fn begin(&mut self, pair: &mut Pair, rows: usize) -> (usize, Vec<usize>) {
        if pair.real.is_spent() {
            let refused = pair.real.prepare(1);
            assert!(matches!(refused, Err(KvError::StateSpent)));
            truncate(pair, 0);
        }
        let rows = rows.min(CAPACITY - pair.tags.len());
        let prepared = if done(pair.real.prepare(rows)) {
            rows
        } else {
            0
        };
        (prepared, self.tags(prepared))
    }

    fn end(&mut self, pair: &mut Pair, accepted: usize, tags: &[usize]) {
        if tags.is_empty() {
            return;
        }
        store(&self.cpu, &mut pair.real, tags);
        let all = [&pair.tags, tags].concat();
        assert_states(&mut pair.real, &all);
        pair.real.accept(accepted);
        let states = pair.real.geometry().has_states();
        assert_eq!(pair.real.is_spent(), states && accepted < tags.len());
        // Of those that do not, the next step gives back what windows have passed.
        if !accepted.is_multiple_of(3) {
            pair.real.release_passed().expect("pages go back");
        }
        pair.tags.extend(&tags[..accepted]);
    }

    fn put(&mut self, index: usize, real: Result<Sequence, KvError>, of: &Pair, tokens: usize) {
        match real {
            Ok(real) => {
                let tags = of.tags[..tokens].to_vec();
                let first = of.first;
                self.pairs[index % SEQUENCES] = Some(Pair { real, tags, first });
            }
            Err(KvError::Released { first, requested }) => {
                assert_eq!((first, requested), (of.real.fewest_tokens(), tokens));
                check_refusal(of, tokens);
            }
            Err(KvError::StatePassed { held, requested }) => {
                assert_eq!((held, requested), (of.tags.len(), tokens));
                assert!(of.real.geometry().has_states() && requested < held);
            }
            Err(KvError::StateSpent) => assert!(of.real.is_spent()),
            Err(error) => expected(error),
        }
    }

    fn check(&self) {
        for pair in self.pairs.iter().flatten() {
            assert_tags(&pair.real, &pair.tags);
            let report = pair.real.report();
            let held = self.check_held(pair);
            assert!(report.committed_bytes >= held);
            assert_eq!(report.slack_bytes, report.committed_bytes - held);
            let states = pair.real.geometry().state_bytes();
            assert!([0, states].contains(&report.state_bytes));
            assert!(pair.tags.is_empty() || report.state_bytes == states);
            assert_eq!(
                report.unique_bytes + report.shared_bytes,
                report.committed_bytes
            );
            assert!(report.peak_committed_bytes >= report.committed_bytes);
        }
    }

    /// Where each layer's rows begin, and the bytes of those that are of use.
    fn check_held(&self, pair: &Pair) -> usize {
        let (geometry, len) = (pair.real.geometry(), pair.tags.len());
        let states = pair.real.report().state_bytes;
        let bytes = geometry.own_rows().map(|(layer, rows)| {
            let first = pair.first.max(rows.keep.first_seen(len));
            assert_eq!(pair.real.first_held(layer), first);
            let sides = rows.stored_sides().iter();
            let sides = sides.map(|side| geometry.row_bytes(&rows, *side));
            (len - first) * sides.sum::<usize>()
        });
        bytes.sum::<usize>() + states
    }
}

/// Rows are refused only if some layer's window has passed those that the next token would see.
fn check_refusal(pair: &Pair, tokens: usize) {
    let geometry = pair.real.geometry();
    let passed = |keep: Keep| keep.first_seen(tokens) < keep.first_seen(pair.tags.len());
    let mut layers = geometry.own_rows();
    assert!(tokens < pair.first || layers.any(|(_, rows)| passed(rows.keep)));
    assert!(pair.first <= pair.real.fewest_tokens());
    assert!(pair.real.fewest_tokens() <= pair.tags.len());
}

fn truncate(pair: &mut Pair, len: usize) {
    match pair.real.truncate(len) {
        Ok(()) => {
            pair.tags.truncate(len);
            pair.first = pair.first.min(len);
        }
        Err(KvError::Released { first, .. }) => {
            assert!(first == pair.real.fewest_tokens() && len < first);
            check_refusal(pair, len);
        }
        Err(KvError::StatePassed { held, requested }) => {
            assert!(pair.real.geometry().has_states() && 0 < len && len < held);
            assert_eq!((held, requested), (pair.real.fewest_tokens(), len));
        }
        Err(error) => expected(error),
    }
}

/// Whether it was done, or refused for want of memory.
fn done(result: Result<(), KvError>) -> bool {
    result.map_err(expected).is_ok()
}

fn expected(error: KvError) {
    use lacuna_pages::Error::OutOfPages;
    let refused = matches!(
        error,
        KvError::Pages(OutOfPages { .. }) | KvError::NotNow { .. }
    );
    assert!(refused, "{error}");
}

fn nothing_in_use(ledger: &Ledger) -> bool {
    [ledger.reserved, ledger.mapped, ledger.unique, ledger.shared] == [ByteLength::ZERO; 4]
}

fn play(
    geometry: &Geometry,
    policy: &str,
    operations: &[(usize, Operation)],
    limit: Option<usize>,
) -> Result<(), TestCaseError> {
    let pool = pool_of(geometry, policy.parse().expect("a policy"), limit);
    let mut world = World::new(pool.clone(), geometry, policy);
    for (index, operation) in operations {
        world.apply(*index, operation);
        world.check();
    }
    drop(world);
    prop_assert!(
        nothing_in_use(&pool.ledger()),
        "{policy}: {:?}",
        pool.ledger()
    );
    Ok(())
}

proptest! {
    // A sixth of the usual: each is run under every policy.
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.div_ceil(6)))]
    #[test]
    fn every_policy_keeps_the_rows_of_every_sequence(
        operations in prop::collection::vec(operation(), 1..40),
        limit in prop_oneof![Just(None), (300..6000usize).prop_map(|kib| Some(kib << 10))],
    ) {
        for policy in POLICIES {
            play(&GEOMETRY, policy, &operations, limit)?;
        }
    }

    #[test]
    fn every_policy_keeps_the_rows_that_every_layer_still_sees(
        operations in prop::collection::vec(operation(), 1..40),
        limit in prop_oneof![Just(None), (300..6000usize).prop_map(|kib| Some(kib << 10))],
    ) {
        for policy in POLICIES {
            play(&WINDOWED, policy, &operations, limit)?;
        }
    }

    #[test]
    fn every_policy_keeps_the_states_of_every_sequence(
        operations in prop::collection::vec(operation(), 1..40),
        limit in prop_oneof![Just(None), (300..6000usize).prop_map(|kib| Some(kib << 10))],
    ) {
        for policy in POLICIES {
            play(&STATES, policy, &operations, limit)?;
        }
    }

    #[test]
    fn memory_of_two_kinds_keeps_the_rows_and_states_of_every_sequence(
        operations in prop::collection::vec(operation(), 1..40),
        limit in prop_oneof![Just(None), (300..6000usize).prop_map(|kib| Some(kib << 10))],
    ) {
        for policy in ["sparse", "sparse:head-major", "sparse:interleaved=2"] {
            play(&SPLIT, policy, &operations, limit)?;
        }
    }
}
