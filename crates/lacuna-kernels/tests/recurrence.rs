//! Convolutions and scans against their definitions in f64, and that bits do not depend on how tokens are
//! cut, batched or shared between threads, nor on the instruction set.

mod support;

use lacuna_kernels::{Activation, Convolution, Cpu, KeyHeads, Level, Rule, Scan, ScanShape, State};
use support::{Random, cpu, levels};

fn close(out: &[f32], expected: &[f64], case: &str) {
    assert_eq!(out.len(), expected.len(), "{case}");
    let largest = expected.iter().fold(1.0, |most, x| f64::max(most, x.abs()));
    for (index, (out, expected)) in out.iter().zip(expected).enumerate() {
        let error = (f64::from(*out) - expected).abs();
        assert!(
            error <= 2e-6 * largest,
            "{case}, {index}: {out}, not {expected}"
        );
    }
}

/// What is computed of one sequence's tokens, cut in pieces of `chunk`, by `step(values, first token, state)`.
fn cut(
    x: &[f32],
    [width, chunk]: [usize; 2],
    state_len: usize,
    mut step: impl FnMut(&mut [f32], usize, &mut [f32]),
) -> (Vec<f32>, Vec<f32>) {
    let (mut out, mut state) = (x.to_vec(), vec![0.0; state_len]);
    for (index, values) in out.chunks_mut(width * chunk).enumerate() {
        step(values, index * chunk, &mut state);
    }
    (out, state)
}

struct Channels {
    x: Vec<f32>,
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
    channels: usize,
    taps: usize,
}

impl Channels {
    const TOKENS: usize = 19;

    fn new(channels: usize, taps: usize, bias: bool) -> Self {
        Self {
            x: Random::new(1).units(Self::TOKENS * channels),
            weights: Random::new(2).units(channels * taps),
            bias: bias.then(|| Random::new(3).units(channels)),
            channels,
            taps,
        }
    }

    fn run(
        &self,
        cpu: &Cpu,
        values: &mut [f32],
        activation: Option<Activation>,
        states: &mut [(usize, &mut [f32])],
    ) {
        let convolution = Convolution {
            weights: &self.weights,
            bias: self.bias.as_deref(),
            taps: self.taps,
            activation,
        };
        let states = states
            .iter_mut()
            .map(|(tokens, state)| (*tokens, &mut **state));
        cpu.convolve(values, &convolution, states);
    }

    fn state_len(&self) -> usize {
        Convolution::state_len(self.channels, self.taps)
    }

    fn in_chunks(&self, cpu: &Cpu, activation: Option<Activation>, chunk: usize) -> Vec<f32> {
        let width = self.channels;
        let (out, _) = cut(
            &self.x,
            [width, chunk],
            self.state_len(),
            |values, _, state| {
                let tokens = values.len() / width;
                self.run(cpu, values, activation, &mut [(tokens, state)]);
            },
        );
        out
    }

    fn expected(&self) -> Vec<f64> {
        let of_channel = |token: usize, channel: usize| {
            let mut sum = self
                .bias
                .as_ref()
                .map_or(0.0, |bias| f64::from(bias[channel]));
            for tap in 0..self.taps {
                let Some(from) = (token + tap + 1).checked_sub(self.taps) else {
                    continue;
                };
                let weight = f64::from(self.weights[tap * self.channels + channel]);
                sum += weight * f64::from(self.x[from * self.channels + channel]);
            }
            sum
        };
        let tokens = 0..Self::TOKENS;
        let all = tokens.flat_map(|token| (0..self.channels).map(move |c| (token, c)));
        all.map(|(token, channel)| of_channel(token, channel))
            .collect()
    }
}

fn convolutions() -> Vec<Channels> {
    let mut all = Vec::new();
    for channels in [5, 32, 513] {
        for taps in 2..=Convolution::MAX_TAPS {
            all.push(Channels::new(channels, taps, taps != 3));
        }
    }
    all
}

#[test]
fn convolutions_match_f64_however_tokens_are_cut() {
    for level in levels() {
        let cpu = cpu(level, 3);
        for case in convolutions() {
            let whole = case.in_chunks(&cpu, None, Channels::TOKENS);
            close(&whole, &case.expected(), "convolution");
            for chunk in [1, 2, 7] {
                assert!(
                    case.in_chunks(&cpu, None, chunk) == whole,
                    "{level:?} {chunk}"
                );
            }
            let mut activated = whole;
            cpu.activate(Activation::Silu, &mut activated);
            assert!(case.in_chunks(&cpu, Some(Activation::Silu), 5) == activated);
        }
    }
}

#[derive(Clone)]
struct Heads {
    shape: ScanShape,
    values: Vec<f32>,
    keys: Vec<f32>,
    queries: Vec<f32>,
    decay: Vec<f32>,
    strength: Vec<f32>,
    skip: Option<Vec<f32>>,
}

impl Heads {
    const TOKENS: usize = 23;

    fn new(shape: ScanShape, skip: bool) -> Self {
        let (tokens, heads) = (Self::TOKENS, shape.value_heads);
        let keys = tokens * shape.key_heads * shape.key_dim;
        let part = 1.0 / (shape.key_dim as f32).sqrt();
        let scaled = |seed| {
            Random::new(seed)
                .units(keys)
                .iter()
                .map(|x| x * part)
                .collect()
        };
        let gates = |seed| {
            let units = Random::new(seed).units(tokens * heads);
            units.into_iter().map(|x| 0.5 + 0.5 * x).collect()
        };
        Self {
            shape,
            values: Random::new(11).units(tokens * heads * shape.value_dim),
            keys: scaled(12),
            queries: scaled(13),
            decay: gates(14),
            strength: gates(15),
            skip: skip.then(|| Random::new(16).units(heads)),
        }
    }

    fn width(&self) -> usize {
        self.shape.value_heads * self.shape.value_dim
    }

    fn run(&self, cpu: &Cpu, values: &mut [f32], first: usize, states: &mut [(usize, &mut [f32])]) {
        let tokens = values.len() / self.width();
        let of = |rows: &[f32]| {
            let width = rows.len() / Self::TOKENS;
            rows[first * width..(first + tokens) * width].to_vec()
        };
        let [queries, keys] = [&self.queries, &self.keys].map(|rows| of(rows));
        let [decay, strength] = [&self.decay, &self.strength].map(|rows| of(rows));
        let scan = Scan {
            shape: self.shape,
            queries: &queries,
            keys: &keys,
            decay: &decay,
            strength: &strength,
            skip: self.skip.as_deref(),
        };
        let states = states
            .iter_mut()
            .map(|(tokens, state)| (*tokens, &mut **state));
        cpu.scan(values, &scan, states);
    }

    fn in_chunks(&self, cpu: &Cpu, chunk: usize) -> (Vec<f32>, Vec<f32>) {
        let width = self.width();
        let len = self.shape.state_len();
        cut(&self.values, [width, chunk], len, |values, first, state| {
            let tokens = values.len() / width;
            self.run(cpu, values, first, &mut [(tokens, state)]);
        })
    }

    fn expected(&self) -> Vec<f64> {
        let shape = self.shape;
        let (heads, dim, keys) = (shape.value_heads, shape.value_dim, shape.key_dim);
        let mut states = vec![vec![0.0; keys * dim]; heads];
        let mut out = Vec::new();
        for token in 0..Self::TOKENS {
            for (head, state) in states.iter_mut().enumerate() {
                let key_head = match shape.order {
                    KeyHeads::Grouped => head * shape.key_heads / heads,
                    KeyHeads::Tiled => head % shape.key_heads,
                };
                let at = (token * shape.key_heads + key_head) * keys;
                let key = |i: usize| f64::from(self.keys[at + i]);
                let query = |i: usize| f64::from(self.queries[at + i]);
                let gate = token * heads + head;
                let (decay, strength) = (self.decay[gate], self.strength[gate]);
                state.iter_mut().for_each(|x| *x *= f64::from(decay));
                for column in 0..dim {
                    let value = f64::from(self.values[gate * dim + column]);
                    let led_to: f64 = match shape.rule {
                        Rule::Delta => (0..keys).map(|i| state[i * dim + column] * key(i)).sum(),
                        Rule::Additive => 0.0,
                    };
                    let added = f64::from(strength) * (value - led_to);
                    (0..keys).for_each(|i| state[i * dim + column] += key(i) * added);
                    let read: f64 = (0..keys).map(|i| state[i * dim + column] * query(i)).sum();
                    let skip = self.skip.as_ref().map_or(0.0, |skip| f64::from(skip[head]));
                    out.push(read * f64::from(shape.scale) + skip * value);
                }
            }
        }
        out
    }
}

fn scans() -> Vec<Heads> {
    let shape = ScanShape {
        key_heads: 2,
        value_heads: 4,
        key_dim: 16,
        value_dim: 32,
        order: KeyHeads::Grouped,
        rule: Rule::Delta,
        scale: 0.25,
    };
    let tiled = ScanShape {
        order: KeyHeads::Tiled,
        key_dim: 7,
        value_dim: 10,
        ..shape
    };
    let additive = ScanShape {
        rule: Rule::Additive,
        value_heads: 6,
        key_dim: 18,
        value_dim: 64,
        scale: 1.0,
        ..shape
    };
    vec![
        Heads::new(shape, false),
        Heads::new(tiled, false),
        Heads::new(additive, true),
    ]
}

#[test]
fn scans_match_f64_however_tokens_are_cut_and_shared() {
    for level in levels() {
        for case in scans() {
            let whole = case.in_chunks(&cpu(level, 1), Heads::TOKENS);
            close(&whole.0, &case.expected(), "scan");
            for (threads, chunk) in [(1, 1), (3, 5), (8, 16), (3, Heads::TOKENS)] {
                let again = case.in_chunks(&cpu(level, threads), chunk);
                assert!(
                    again == whole,
                    "{level:?} {threads} threads, {chunk} tokens"
                );
            }
        }
    }
}

#[test]
fn a_state_that_is_kept_is_left_as_it_is_and_gone_on_from_beside_it() {
    let levels = levels();
    for cpu in levels.into_iter().map(|level| cpu(level, 3)) {
        for case in scans() {
            let len = case.shape.state_len();
            let before = Random::new(21).units(len);
            let (mut values, mut state) = (case.values.clone(), before.clone());
            case.run(&cpu, &mut values, 0, &mut [(Heads::TOKENS, &mut state)]);
            let (mut again, mut after) = (case.values.clone(), vec![f32::NAN; len]);
            let beside = State {
                before: Some(&before),
                after: &mut after,
            };
            let scan = Scan {
                shape: case.shape,
                queries: &case.queries,
                keys: &case.keys,
                decay: &case.decay,
                strength: &case.strength,
                skip: case.skip.as_deref(),
            };
            cpu.scan(&mut again, &scan, [(Heads::TOKENS, beside)].into_iter());
            assert!(again == values && after == state);
        }
    }
}

/// More sequences than an operation takes at once, of which some have no token.
#[test]
fn sequences_of_a_batch_are_what_each_is_alone() {
    let counts: Vec<usize> = (0..20).map(|i| [1, 2, 0, 1][i % 4]).collect();
    assert!(counts.iter().sum::<usize>() <= Heads::TOKENS);
    for level in levels() {
        let cpu = cpu(level, 3);
        for case in scans() {
            let (width, len) = (case.width(), case.shape.state_len());
            let mut alone = case.values.clone();
            let mut alone_states = vec![0.25; counts.len() * len];
            let mut first = 0;
            for (count, state) in counts.iter().zip(alone_states.chunks_mut(len)) {
                let values = &mut alone[first * width..(first + count) * width];
                case.run(&cpu, values, first, &mut [(*count, state)]);
                first += count;
            }
            let mut together = case.values.clone();
            let mut states = vec![0.25; counts.len() * len];
            let mut each: Vec<_> = counts.iter().copied().zip(states.chunks_mut(len)).collect();
            case.run(&cpu, &mut together[..first * width], 0, &mut each);
            assert!(together == alone && states == alone_states, "{level:?}");
        }
        for case in convolutions() {
            let (width, len) = (case.channels, case.state_len());
            let mut alone = case.x.clone();
            let mut alone_states = vec![0.25; counts.len() * len];
            let mut first = 0;
            let counts = counts.iter().take(14);
            for (count, state) in counts.clone().zip(alone_states.chunks_mut(len)) {
                let values = &mut alone[first * width..(first + count) * width];
                case.run(&cpu, values, None, &mut [(*count, state)]);
                first += count;
            }
            let mut together = case.x.clone();
            let mut states = vec![0.25; alone_states.len()];
            let mut each: Vec<_> = counts.copied().zip(states.chunks_mut(len)).collect();
            case.run(&cpu, &mut together[..first * width], None, &mut each);
            assert!(together == alone && states == alone_states, "{level:?}");
        }
    }
}

#[test]
fn levels_with_fused_multiply_and_add_agree_to_the_last_bit() {
    let fused = levels()
        .into_iter()
        .filter(|level| *level != Level::Portable);
    let cpus: Vec<Cpu> = fused.map(|level| cpu(level, 2)).collect();
    for pair in cpus.windows(2) {
        for case in scans() {
            let [a, b] = [&pair[0], &pair[1]].map(|cpu| case.in_chunks(cpu, 6));
            assert!(a == b);
        }
        for case in convolutions() {
            let silu = Some(Activation::Silu);
            let [a, b] = [&pair[0], &pair[1]].map(|cpu| case.in_chunks(cpu, silu, 6));
            assert!(a == b);
        }
    }
}

#[test]
fn what_is_no_number_stays_in_its_columns_and_shows() {
    for level in levels() {
        let cpu = cpu(level, 2);
        for case in scans() {
            let mut wrong = case.clone();
            wrong.values[0] = f32::NAN;
            let (out, _) = wrong.in_chunks(&cpu, 4);
            let (right, _) = case.in_chunks(&cpu, 4);
            for (at, (out, right)) in out.iter().zip(&right).enumerate() {
                match at % case.width() {
                    0 => assert!(out.is_nan(), "{level:?}"),
                    _ => assert_eq!(out, right, "{level:?}"),
                }
            }
        }
    }
}
