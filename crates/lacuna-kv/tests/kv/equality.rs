//! Every policy against `dense`: the same bytes, and bit for bit the same attention over them.

use std::num::NonZeroUsize;

use lacuna_kernels::{AttentionShape, Cpu, ElementType, Mask};
use lacuna_kv::{Geometry, KvCache, KvElements, Layer, Sequence, Side};

use crate::support::{POLICIES, cpu};

const LAYERS: usize = 3;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const QUERY_HEADS: usize = 6;
const CAPACITY: usize = 400;
/// Tokens of the sequences that are compared: past a page, a block and a step of every policy.
const TOKENS: usize = 300;

const ELEMENTS: [(ElementType, ElementType); 6] = [
    (ElementType::F16, ElementType::F16),
    (ElementType::F32, ElementType::F32),
    (ElementType::Q8_0, ElementType::Q8_0),
    (ElementType::Q8_0, ElementType::Q4_0),
    (ElementType::Iq4Nl, ElementType::Iq4Nl),
    (ElementType::Bf16, ElementType::F16),
];

/// Numbers between -1 and 1 that follow from `seed`.
fn random(seed: usize, count: usize) -> Vec<f32> {
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A cache and a processor for it.
struct Setup {
    cpu: Cpu,
    cache: KvCache,
}

impl Setup {
    fn new(policy: &str, (key, value): (ElementType, ElementType)) -> Self {
        let elements = KvElements { key, value };
        let geometry = Geometry::uniform(LAYERS, KV_HEADS, HEAD_DIM, elements);
        let policy = policy.parse().expect("a policy");
        Self {
            cpu: cpu(),
            cache: KvCache::new(geometry, policy).expect("the system has pages"),
        }
    }

    /// A sequence of `TOKENS` tokens that arrived in uneven chunks.
    fn sequence(&self) -> Sequence {
        let mut sequence = self.cache.sequence(CAPACITY).expect("address space");
        self.extend(&mut sequence, TOKENS, 0);
        sequence
    }

    /// Appends tokens up to `len`; what they hold follows from position and `variant`.
    fn extend(&self, sequence: &mut Sequence, len: usize, variant: usize) {
        for chunk in [1, 40, 1, 1, 17, 128, 400] {
            let rows = chunk.min(len - sequence.len());
            let positions = sequence.len()..sequence.len() + rows;
            sequence.prepare(rows).expect("room");
            for layer in 0..LAYERS {
                let rows = |side: usize| -> Vec<f32> {
                    let seed = |position| ((variant * 1000 + position) * 8 + layer) * 2 + side;
                    let row = |position| random(seed(position), KV_HEADS * HEAD_DIM);
                    positions.clone().flat_map(row).collect()
                };
                let rows = [rows(0), rows(1)];
                sequence.write(Layer(layer), |side, run| {
                    self.cpu.store_run(run, &side.of(rows.each_ref())[..]);
                });
            }
            sequence.accept(rows);
        }
        assert_eq!(sequence.len(), len);
    }

    /// What the last `tokens` tokens see, in every layer.
    fn attend(&self, sequence: &Sequence, tokens: usize, window: Option<usize>) -> Vec<f32> {
        let shape = AttentionShape {
            mask: match window.and_then(NonZeroUsize::new) {
                Some(rows) => Mask::Window(rows),
                None => Mask::Causal,
            },
            ..AttentionShape::causal(QUERY_HEADS, KV_HEADS, HEAD_DIM, 0.2)
        };
        let queries = random(77, tokens * QUERY_HEADS * HEAD_DIM);
        let mut scratch = vec![0.0; Cpu::attention_scratch_len(tokens, CAPACITY, &shape)];
        let mut all = Vec::new();
        for layer in (0..LAYERS).map(Layer) {
            let mut out = vec![f32::NAN; queries.len()];
            self.cpu.attention(
                &mut out,
                &queries,
                &sequence.view(layer, Side::Key),
                &sequence.view(layer, Side::Value),
                sequence.len() - tokens,
                &shape,
                &mut scratch,
            );
            assert!(out.iter().all(|x| x.is_finite()));
            all.extend(out);
        }
        all
    }

    /// Checks that two sequences of this policy and another hold the same and are read as the same.
    #[track_caller]
    fn assert_same(&self, found: &Sequence, expected: &Sequence, case: &str) {
        assert_eq!(bytes(found), bytes(expected), "{case}: bytes");
        for tokens in [1, 2, 33] {
            let found = self.attend(found, tokens, None);
            let expected = self.attend(expected, tokens, None);
            assert!(found == expected, "{case}: attention of {tokens} tokens");
        }
    }
}

/// All rows, token after token.
fn bytes(sequence: &Sequence) -> Vec<u8> {
    let mut bytes = Vec::new();
    for layer in (0..LAYERS).map(Layer) {
        for side in Side::BOTH {
            let view = sequence.view(layer, side);
            for row in view.rows() {
                let heads = (0..KV_HEADS).flat_map(|head| view.head(row, head));
                bytes.extend(heads);
            }
        }
    }
    bytes
}

/// Calls `check` for every policy, with rows of equal and of different sizes.
fn everywhere(check: impl Fn(&Setup, &str)) {
    for elements in [ELEMENTS[0], ELEMENTS[3]] {
        for policy in POLICIES {
            check(
                &Setup::new(policy, elements),
                &format!("{policy} {elements:?}"),
            );
        }
    }
}

#[test]
fn every_policy_and_layout_reads_as_dense_does() {
    for elements in ELEMENTS {
        let dense = Setup::new("dense", elements).sequence();
        for policy in POLICIES {
            let setup = Setup::new(policy, elements);
            setup.assert_same(&setup.sequence(), &dense, &format!("{policy} {elements:?}"));
        }
    }
}

#[test]
fn a_fork_is_a_fresh_sequence() {
    everywhere(|setup, case| {
        let mut donor = setup.sequence();
        let mut fork = donor.fork().expect("memory");
        setup.assert_same(&fork, &setup.sequence(), case);
        setup.extend(&mut fork, CAPACITY, 1);
        let mut fresh = setup.sequence();
        setup.extend(&mut fresh, CAPACITY, 1);
        setup.assert_same(&fork, &fresh, case);
        setup.assert_same(&donor, &setup.sequence(), case);
    });
}

#[test]
fn a_shared_prefix_is_a_computed_one() {
    everywhere(|setup, case| {
        for tokens in [33, 64, 100, 299] {
            let mut shared = setup.sequence().share_prefix(tokens).expect("memory");
            let mut computed = setup.cache.sequence(CAPACITY).expect("address space");
            setup.extend(&mut computed, tokens, 0);
            setup.assert_same(&shared, &computed, case);
            setup.extend(&mut shared, TOKENS, 2);
            setup.extend(&mut computed, TOKENS, 2);
            setup.assert_same(&shared, &computed, case);
        }
    });
}

#[test]
fn what_was_truncated_was_never_written() {
    everywhere(|setup, case| {
        let mut donor = setup.sequence();
        let fork = donor.fork().expect("memory");
        for len in [250, 64, 33, 0] {
            donor.truncate(len).expect("memory goes back");
            setup.extend(&mut donor, TOKENS, 3);
            let mut fresh = setup.cache.sequence(CAPACITY).expect("address space");
            setup.extend(&mut fresh, len, 0);
            setup.extend(&mut fresh, TOKENS, 3);
            setup.assert_same(&donor, &fresh, case);
            donor.truncate(len).expect("memory goes back");
            setup.extend(&mut donor, TOKENS, 0);
        }
        setup.assert_same(&fork, &setup.sequence(), case);
    });
}

#[test]
fn a_window_that_gave_its_pages_back_is_a_masked_one() {
    everywhere(|setup, case| {
        let whole = setup.sequence();
        for window in [1, 20, 200] {
            for tokens in [1, 5] {
                let mut released = setup.sequence();
                let first = TOKENS - tokens + 1 - window;
                released.release_before(first).expect("memory goes back");
                let found = setup.attend(&released, tokens, Some(window));
                let expected = setup.attend(&whole, tokens, Some(window));
                assert!(
                    found == expected,
                    "{case}: {tokens} tokens, window {window}"
                );
            }
        }
    });
}
