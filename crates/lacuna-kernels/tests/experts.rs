//! Mixtures of experts: routing against plain arithmetic in f64, and products against those of single
//! rows, which they must equal bit for bit.

mod support;

use lacuna_kernels::{
    Activations, Cpu, DType, Expert, ExpertInput, GroupScore, Groups, Level, Matrix, Routes,
    Routing, Scores,
};
use support::{Random, Storage, cpu, cpus, levels, random_matrix};

const PLAIN: Routing = Routing {
    experts: 12,
    used: 3,
    scores: Scores::Softmax,
    groups: None,
    normalized: true,
    scale: 1.0,
};

/// What `cpu` makes of logits: words of routes, and weights.
fn route(
    cpu: &Cpu,
    routing: &Routing,
    logits: &[f32],
    vectors: [Option<&[f32]>; 2],
) -> (Vec<u32>, Vec<f32>) {
    let tokens = logits.len() / routing.experts;
    // What is there before does not matter.
    let mut words = vec![u32::MAX; Routes::words(tokens, routing).expect("few")];
    let mut weights = vec![f32::NAN; tokens * routing.used];
    let mut logits = logits.to_vec();
    cpu.route(&mut words, &mut weights, &mut logits, routing, vectors);
    (words, weights)
}

/// The same in f64, by sorting: the experts of a token, and their weights.
fn expected(routing: &Routing, logits: &[f32], vectors: [Option<&[f32]>; 2]) -> Vec<(u32, f64)> {
    let softmax = |logits: &[f64]| -> Vec<f64> {
        let powers: Vec<f64> = logits.iter().map(|x| x.exp()).collect();
        let sum: f64 = powers.iter().sum();
        powers.into_iter().map(|power| power / sum).collect()
    };
    let logits: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
    let scores: Vec<f64> = match routing.scores {
        Scores::Softmax => softmax(&logits),
        Scores::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        Scores::SoftmaxOfChosen => logits.clone(),
    };
    let [bias, scales] = vectors;
    let mut keys: Vec<f64> = (0..routing.experts)
        .map(|expert| scores[expert] + bias.map_or(0.0, |bias| f64::from(bias[expert])))
        .collect();
    if let Some(groups) = routing.groups {
        let size = routing.experts / groups.count;
        let score = |group: usize| {
            let mut members = keys[group * size..(group + 1) * size].to_vec();
            members.sort_by(|a, b| b.total_cmp(a));
            match groups.score {
                GroupScore::Largest => members[0],
                GroupScore::SumOfTwo => members[0] + members[1],
            }
        };
        let mut order: Vec<usize> = (0..groups.count).collect();
        order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
        for group in &order[groups.used..] {
            keys[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
        }
    }
    let mut order: Vec<usize> = (0..routing.experts).collect();
    order.sort_by(|&a, &b| keys[b].total_cmp(&keys[a]));
    order.truncate(routing.used);
    let mut weights: Vec<f64> = order.iter().map(|&expert| scores[expert]).collect();
    if routing.scores == Scores::SoftmaxOfChosen {
        weights = softmax(&weights);
    }
    let divisor = match routing.normalized {
        true => weights.iter().sum(),
        false => 1.0,
    };
    let weighed = order.iter().zip(weights).map(|(&expert, weight)| {
        let scale = scales.map_or(1.0, |scales| f64::from(scales[expert]));
        let weight = weight / divisor * f64::from(routing.scale) * scale;
        (expert as u32, weight)
    });
    weighed.collect()
}

#[test]
fn what_goes_to_all_is_what_is_chosen_in_order_when_all_are() {
    let routing = Routing::all(5);
    for tokens in [1, 7, 300] {
        let cpu = cpu(Level::Portable, 2);
        let falling: Vec<f32> = (0..5).rev().map(|logit| logit as f32).collect();
        let (chosen, _) = route(&cpu, &routing, &falling.repeat(tokens), [None; 2]);
        let mut words = vec![u32::MAX; chosen.len()];
        cpu.route_to_all(&mut words, tokens, &routing);
        assert_eq!(words, chosen, "{tokens} tokens");
    }
}

#[test]
fn routing_matches_f64_in_every_variant() {
    let (tokens, experts) = (9, PLAIN.experts);
    let mut random = Random::new(1);
    let logits: Vec<f32> = random
        .units(tokens * experts)
        .iter()
        .map(|x| 4.0 * x)
        .collect();
    let (bias, scales) = (random.units(experts), random.units(experts));
    let group = |score| Groups {
        count: 4,
        used: 2,
        score,
    };
    let all_groups = [
        None,
        Some(group(GroupScore::Largest)),
        Some(group(GroupScore::SumOfTwo)),
    ];
    for level in levels() {
        let cpu = cpu(level, 2);
        for scores in [Scores::Softmax, Scores::Sigmoid, Scores::SoftmaxOfChosen] {
            for (groups, normalized) in all_groups.into_iter().zip([true, false, true]) {
                for vectors in [[None, None], [Some(&*bias), None], [None, Some(&*scales)]] {
                    let routing = Routing {
                        scores,
                        groups,
                        normalized,
                        scale: 2.5,
                        ..PLAIN
                    };
                    let (words, weights) = route(&cpu, &routing, &logits, vectors);
                    let routes = Routes::new(&words, tokens, &routing);
                    for (token, logits) in logits.chunks(experts).enumerate() {
                        let expected = expected(&routing, logits, vectors);
                        let weights = &weights[token * routing.used..][..routing.used];
                        let found = routes.experts(token).iter().zip(weights);
                        for ((expert, weight), (of, exact)) in found.zip(expected) {
                            assert_eq!(*expert, of, "{routing:?} {level:?}, token {token}");
                            let error = (f64::from(*weight) - exact).abs();
                            assert!(error < 2e-6, "{routing:?} {level:?}: {weight} for {exact}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn logits_that_are_no_numbers_make_weights_that_are_not_finite_and_no_panic() {
    let cpu = cpu(Level::best(), 1);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let logits = vec![bad; PLAIN.experts];
        let (words, weights) = route(&cpu, &PLAIN, &logits, [None; 2]);
        let routes = Routes::new(&words, 1, &PLAIN);
        assert_eq!(routes.experts(0), [0, 1, 2]);
        assert!(weights.iter().all(|weight| !weight.is_finite()), "{bad}");
    }
}

/// Matrices of random experts in one type.
struct Layer {
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: Vec<Vec<u8>>,
    biases: Vec<Vec<f32>>,
}

impl Layer {
    fn new(dtype: DType, rows: usize, cols: usize, seed: u64) -> Self {
        let experts = 0..PLAIN.experts as u64;
        Self {
            dtype,
            rows,
            cols,
            bytes: experts
                .clone()
                .map(|expert| random_matrix(dtype, rows, cols, 1.0, seed + expert))
                .collect(),
            biases: experts
                .map(|expert| Random::new(seed + expert).units(rows))
                .collect(),
        }
    }

    fn expert(&self, number: usize) -> Expert<'_> {
        let matrix = Matrix::new(self.dtype, self.rows, self.cols, &self.bytes[number]);
        Expert {
            matrix: matrix.expect("a valid shape"),
            bias: number.is_multiple_of(2).then_some(&self.biases[number]),
        }
    }
}

/// One expert's product with one row, by itself.
fn alone(cpu: &Cpu, expert: &Expert<'_>, x: &[f32]) -> Vec<f32> {
    let needed = Activations::storage_bytes(1, x.len()).unwrap_or(0);
    let mut storage = Storage::new(needed);
    let mut out = vec![f32::NAN; expert.matrix.rows()];
    let x = cpu.activations(x, 1, x.len(), storage.bytes());
    cpu.matmul(&mut out, &x, &expert.matrix);
    if let Some(bias) = expert.bias {
        cpu.add_bias(&mut out, bias);
    }
    out
}

/// A whole block: each token's experts, their products twice in a row, and the weighed sum.
fn block(cpu: &Cpu, layers: [&Layer; 3], x: &[f32], logits: &[f32]) -> Vec<f32> {
    let [gate, up, down] = layers;
    let tokens = logits.len() / PLAIN.experts;
    let choices = tokens * PLAIN.used;
    let (words, weights) = route(cpu, &PLAIN, logits, [None; 2]);
    let routes = Routes::new(&words, tokens, &PLAIN);
    let stored = |cols| Routes::storage_bytes(tokens, PLAIN.used, cols).unwrap_or(0);
    let (mut first, mut second) = (
        Storage::new(stored(gate.cols)),
        Storage::new(stored(down.cols)),
    );
    let (mut gates, mut ups) = (
        vec![f32::NAN; choices * gate.rows],
        vec![0.0; choices * up.rows],
    );
    let input = cpu.expert_activations(x, gate.cols, ExpertInput::Tokens, routes, first.bytes());
    let of = |which: usize, number: usize| [gate, up][which].expert(number);
    // As if some experts had come to memory after others.
    let (even, odd): (Vec<u32>, Vec<u32>) =
        (0..routes.bands() as u32).partition(|band| band.is_multiple_of(2));
    for bands in [odd, even] {
        let outs = [&mut gates[..], &mut ups[..]];
        cpu.expert_matmul_each(outs, gate.rows, &input, Some(&bands), of);
    }
    cpu.activate_mul(lacuna_kernels::Activation::Silu, &mut gates, &ups);
    let from = ExpertInput::Choices;
    let input = cpu.expert_activations(&gates, down.cols, from, routes, second.bytes());
    let mut made = vec![f32::NAN; choices * down.rows];
    cpu.expert_matmul_each([&mut made], down.rows, &input, None, |_, number| {
        down.expert(number)
    });
    let mut out = vec![f32::NAN; tokens * down.rows];
    cpu.combine_experts(&mut out, &made, &weights, &routes, down.rows);
    out
}

/// The same one token and one expert at a time.
fn block_alone(cpu: &Cpu, layers: [&Layer; 3], x: &[f32], logits: &[f32]) -> Vec<f32> {
    let [gate, up, down] = layers;
    let tokens = logits.len() / PLAIN.experts;
    let (words, weights) = route(cpu, &PLAIN, logits, [None; 2]);
    let routes = Routes::new(&words, tokens, &PLAIN);
    let mut all = Vec::new();
    for (token, x) in x.chunks(gate.cols).enumerate() {
        let mut out = vec![0.0; down.rows];
        let weights = &weights[token * PLAIN.used..];
        for (&expert, weight) in routes.experts(token).iter().zip(weights) {
            let expert = expert as usize;
            let mut gates = alone(cpu, &gate.expert(expert), x);
            let ups = alone(cpu, &up.expert(expert), x);
            cpu.activate_mul(lacuna_kernels::Activation::Silu, &mut gates, &ups);
            let made = alone(cpu, &down.expert(expert), &gates);
            cpu.add_scaled(&mut out, &made, *weight);
        }
        all.extend(out);
    }
    all
}

#[test]
fn a_batch_has_what_each_token_has_of_each_expert_alone() {
    for (dtype, inner, hidden) in [
        (DType::F32, 20, 36),
        (DType::F16, 96, 64),
        (DType::Q8_0, 96, 64),
        (DType::Q4K, 256, 256),
        (DType::Q6K, 256, 512),
    ] {
        let [gate, up] = [1, 100].map(|seed| Layer::new(dtype, inner, hidden, seed));
        let down = Layer::new(dtype, hidden, inner, 200);
        let layers = [&gate, &up, &down];
        for (one, several) in cpus(1).zip(cpus(3)) {
            let (level, precision) = (one.level(), one.precision());
            for tokens in [1, 2, 3, 7, 16, 40, 150] {
                let mut random = Random::new(tokens as u64);
                let x = random.units(tokens * hidden);
                // Uneven: expert 0 is chosen by most, and some by none.
                let mut logits = random.units(tokens * PLAIN.experts);
                for row in logits.chunks_mut(PLAIN.experts) {
                    row[0] += 1.5;
                    row[5] -= 3.0;
                }
                let alone = block_alone(&one, layers, &x, &logits);
                assert!(alone.iter().all(|x| x.is_finite()));
                for cpu in [&one, &several] {
                    let together = block(cpu, layers, &x, &logits);
                    assert!(
                        together == alone,
                        "{dtype} {level:?} {precision:?}, {tokens}, {}",
                        cpu.threads()
                    );
                }
            }
        }
    }
}

#[test]
fn experts_of_different_types_go_together() {
    let (inner, hidden) = (256, 256);
    let cpu = cpu(Level::best(), 2);
    let layers = [DType::Q8_0, DType::Q4K, DType::F32];
    let [gate, up, down] = layers.map(|dtype| Layer::new(dtype, inner, hidden, 7));
    let mut random = Random::new(3);
    let x = random.units(11 * hidden);
    let logits = random.units(11 * PLAIN.experts);
    let layers = [&gate, &up, &down];
    assert!(block(&cpu, layers, &x, &logits) == block_alone(&cpu, layers, &x, &logits));
}

#[test]
fn clamped_gates_match_f64() {
    let (alpha, limit) = (1.702, 7.0);
    let mut random = Random::new(5);
    let mut values = || -> Vec<f32> { random.units(37).iter().map(|x| 12.0 * x).collect() };
    let (gate, up) = (values(), values());
    for level in levels() {
        let mut found = gate.clone();
        cpu(level, 2).clamped_swiglu(&mut found, &up, alpha, limit);
        for ((found, gate), up) in found.iter().zip(&gate).zip(&up) {
            let (gate, up) = (
                f64::from(gate.min(limit)),
                f64::from(up.clamp(-limit, limit)),
            );
            let exact = gate / (1.0 + (-f64::from(alpha) * gate).exp()) * (up + 1.0);
            let error = (f64::from(*found) - exact).abs();
            assert!(error < 2e-6 * exact.abs().max(1.0), "{found} for {exact}");
        }
    }
    let mut bad = [f32::NAN, 1.0];
    cpu(Level::best(), 1).clamped_swiglu(&mut bad, &[1.0, f32::NAN], alpha, limit);
    assert!(bad.iter().all(|x| x.is_nan()), "{bad:?}");
}
