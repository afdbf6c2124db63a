//! Elementwise operations, adversarial inputs of products, and setting up a `Cpu`.

mod support;

use half::f16;
use lacuna_kernels::{
    Activation, Activations, AttentionShape, Cpu, CpuConfig, CpuError, DType, ElementType,
    HeadOrder, HeadRows, Level, MatmulPrecision, Matrix, PrecisionMode, RopeStyle, RowLayout, Run,
    RunMut, Smoothing, View,
};
use support::{Random, Storage, cpu, cpus, levels, random_matrix, scales};

fn assert_close(out: &[f32], expected: impl Iterator<Item = f64>, tolerance: f64, case: &str) {
    for (index, (out, expected)) in out.iter().zip(expected).enumerate() {
        let error = (f64::from(*out) - expected).abs();
        assert!(
            error <= tolerance * expected.abs().max(1.0),
            "{case}, {index}: {out}, not {expected}"
        );
    }
}

#[test]
fn norms_match_f64_for_any_width() {
    for level in levels() {
        let cpu = cpu(level, 2);
        for (rows, width) in [(1, 1), (3, 20), (5, 128), (70, 1024)] {
            let x = Random::new(1).units(rows * width);
            let weight = Random::new(2).units(width);
            let mut out = vec![0.0; x.len()];
            cpu.rms_norm(&mut out, &x, &weight, 1e-6, width);
            let expected = x.chunks(width).flat_map(|row| {
                let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
                let scale = (squares / width as f64 + 1e-6).sqrt().recip();
                row.iter()
                    .zip(&weight)
                    .map(move |(x, w)| f64::from(*x) * scale * f64::from(*w))
            });
            assert_close(&out, expected, 1e-6, "rms norm");
            let mut in_place = x.clone();
            cpu.rms_norm_in_place(&mut in_place, &weight, 1e-6, width);
            assert_eq!(in_place, out);
        }
    }
}

#[test]
fn rotation_pairs_elements_as_the_style_says() {
    let (tokens, heads, dim, rotated) = (3, 2, 20, 16);
    let frequencies: Vec<f32> = (0..rotated / 2).map(|i| 0.5_f32.powi(i as i32)).collect();
    let positions = [7, 1000, 31_000];
    let x = Random::new(4).units(tokens * heads * dim);
    for level in levels() {
        let cpu = cpu(level, 2);
        let mut table = vec![0.0; tokens * rotated];
        cpu.rope_table(&mut table, &positions, &frequencies, 1.5);
        let styles = [
            RopeStyle::HalfSplit,
            RopeStyle::Interleaved,
            RopeStyle::HalvesSplit,
        ];
        for style in styles {
            let mut out = x.clone();
            cpu.rope(&mut out, heads, dim, style, &table);
            let expected = (0..x.len()).map(|index| {
                let (token, start, i) = (index / (heads * dim), index / dim * dim, index % dim);
                let half = rotated / 2;
                let (pair, first, second) = match style {
                    _ if i >= rotated => return f64::from(x[index]),
                    RopeStyle::HalfSplit => (i % half, i % half, i % half + half),
                    RopeStyle::Interleaved => (i / 2, i / 2 * 2, i / 2 * 2 + 1),
                    RopeStyle::HalvesSplit => {
                        let (quarter, first) = (half / 2, i / half * half + i % (half / 2));
                        (i / half * quarter + i % quarter, first, first + quarter)
                    }
                };
                let angle = f64::from(positions[token] as f32 * frequencies[pair]);
                let (sin, cos) = (1.5 * angle.sin(), 1.5 * angle.cos());
                let (a, b) = (f64::from(x[start + first]), f64::from(x[start + second]));
                if i == first {
                    a * cos - b * sin
                } else {
                    b * cos + a * sin
                }
            });
            assert_close(&out, expected, 1e-6, "rope");
        }
    }
}

#[test]
fn elements_are_held_between_bounds_and_columns_standardized() {
    for level in levels() {
        let cpu = cpu(level, 3);
        let mut x: Vec<f32> = (0..40_000).map(|at| (at % 11) as f32 - 5.0).collect();
        x[7] = f32::NAN;
        let before = x.clone();
        cpu.clamp(&mut x, [-2.5, 3.0]);
        for (held, value) in x.iter().zip(&before) {
            let wanted = value.clamp(-2.5, 3.0);
            assert!(*held == wanted || (held.is_nan() && value.is_nan()));
        }
        cpu.clamp(&mut x[8..], [f32::NEG_INFINITY, f32::INFINITY]);
        cpu.clamp(&mut x[8..20], [4.0, 1.0]);
        assert!(x[8..20].iter().all(|value| *value == 1.0));
        let mut rows: Vec<f32> = (0..30_000).map(|at| at as f32).collect();
        cpu.standardize(&mut rows, &[1.0, 2.0, 3.0], &[2.0, 0.5, -1.0]);
        assert_eq!(rows[..6], [-2.0, -0.5, 1.0, 4.0, 1.0, -2.0]);
        assert_eq!(rows[29_997..], [59_992.0, 14_998.0, -29_996.0]);
    }
}

#[test]
fn gated_activation_matches_f64_even_where_it_saturates() {
    let mut gate = Random::new(5).units(40_003);
    gate.iter_mut().for_each(|x| *x *= 20.0);
    gate[..8].copy_from_slice(&[0.0, -0.0, 90.0, -90.0, 1e30, -1e30, f32::MAX, f32::MIN]);
    let up = Random::new(6).units(gate.len());
    for level in levels() {
        let mut out = gate.clone();
        cpu(level, 2).activate_mul(Activation::Silu, &mut out, &up);
        let expected = gate.iter().zip(&up).map(|(gate, up)| {
            let gate = f64::from(*gate);
            gate / (1.0 + (-gate).exp()) * f64::from(*up)
        });
        assert_close(&out, expected, 2e-6, "silu");
        let mut special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        cpu(level, 1).activate_mul(Activation::Silu, &mut special, &[1.0; 3]);
        assert!(special[0].is_nan() && special[1] == f32::INFINITY);
    }
}

#[test]
fn a_frequency_of_zero_leaves_its_pair_as_it_is() {
    // Gemma 4 rotates a quarter of the pairs of whole heads, and so pairs elements half a head apart.
    let (tokens, heads, dim) = (3, 2, 32);
    let frequencies: Vec<f32> = (0..dim / 2)
        .map(|i| if i < 4 { 0.5_f32.powi(i as i32) } else { 0.0 })
        .collect();
    let x = Random::new(4).units(tokens * heads * dim);
    for level in levels() {
        let cpu = cpu(level, 2);
        let mut table = vec![0.0; tokens * dim];
        cpu.rope_table(&mut table, &[0, 77, 1_000_000], &frequencies, 1.0);
        let halves = RopeStyle::HalvesSplit;
        for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved, halves] {
            let mut out = x.clone();
            cpu.rope(&mut out, heads, dim, style, &table);
            for (index, (out, x)) in out.iter().zip(&x).enumerate() {
                let pair = match style {
                    RopeStyle::HalfSplit => index % (dim / 2),
                    RopeStyle::Interleaved => index % dim / 2,
                    RopeStyle::HalvesSplit => {
                        index % dim / (dim / 2) * (dim / 4) + index % (dim / 4)
                    }
                };
                let turned = index >= heads * dim && pair < 4;
                assert_eq!(out != x, turned, "{level:?} {style:?}, element {index}");
            }
        }
    }
}

#[test]
fn pairs_turn_by_the_number_of_a_position_that_is_theirs() {
    let frequencies = [1.0, 0.1, 0.01, 0.001];
    let of_pair = [0, 1, 2, 0];
    let positions: Vec<u32> = (0..70).flat_map(|at| [at, at / 7, 90 - at]).collect();
    for level in levels() {
        let cpu = cpu(level, 3);
        let mut found = vec![f32::NAN; 70 * 8];
        cpu.rope_table_of_axes(&mut found, (&positions, 3), &of_pair, &frequencies, 1.5);
        for axis in 0..3 {
            let one: Vec<u32> = positions.iter().skip(axis).step_by(3).copied().collect();
            let mut wanted = vec![f32::NAN; 70 * 8];
            cpu.rope_table(&mut wanted, &one, &frequencies, 1.5);
            for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                // Bit by bit where it is the number that turns the pair.
                let is_of_pair = usize::from(of_pair[index % 4]) == axis;
                assert!(!is_of_pair || found == wanted, "{level:?}, {axis}, {index}");
            }
        }
    }
}

const ACTIVATIONS: [Activation; 9] = [
    Activation::Silu,
    Activation::GeluTanh,
    Activation::GeluErf,
    Activation::QuickGelu,
    Activation::Relu,
    Activation::ReluSquared,
    Activation::Sigmoid,
    Activation::Tanh,
    Activation::Softplus,
];

/// The share of a normal distribution above `a >= 0`: by its series, or far out by its continued
/// fraction.
fn normal_above(a: f64) -> f64 {
    let density = (-a * a / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if a < 2.0 {
        let (mut term, mut sum) = (a, a);
        for n in 1..60 {
            term *= a * a / f64::from(2 * n + 1);
            sum += term;
        }
        return 0.5 - density * sum;
    }
    let rest = (1..300).rev().fold(a, |rest, n| a + f64::from(n) / rest);
    density / rest
}

fn activated(activation: Activation, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::Silu => x * sigmoid(x),
        Activation::GeluTanh => {
            let slope = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
            x * sigmoid(slope * (x + 0.044_715 * x.powi(3)))
        }
        Activation::GeluErf if x < 0.0 => x * normal_above(-x),
        Activation::GeluErf => x - x * normal_above(x),
        Activation::QuickGelu => x * sigmoid(1.702 * x),
        Activation::Relu => x.max(0.0),
        Activation::ReluSquared => x.max(0.0).powi(2),
        Activation::Sigmoid => sigmoid(x),
        Activation::Tanh => x.tanh(),
        Activation::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
        other => unreachable!("{other:?} has no definition here"),
    }
}

/// From the smallest to the largest magnitudes, and all that matters between.
fn magnitudes() -> Vec<f32> {
    let mut random = Random::new(5);
    let mut x: Vec<f32> = (0..60_000)
        .map(|_| random.unit() * (40.0 * random.unit()).exp2())
        .collect();
    x.extend((0..40_003).map(|_| 15.0 * random.unit()));
    x.extend([0.0, -0.0, 90.0, -90.0, 1e18, -1e30, f32::MAX, f32::MIN]);
    x
}

#[test]
fn activations_match_f64_within_a_millionth_of_the_value() {
    let x = magnitudes();
    for level in levels() {
        for activation in ACTIVATIONS {
            let mut out = x.clone();
            cpu(level, 2).activate(activation, &mut out);
            for (x, out) in x.iter().zip(&out) {
                let expected = activated(activation, f64::from(*x));
                // Below the smallest normal number f32 has no relative accuracy left.
                let within = 1e-6 * expected.abs() + 1e-35;
                let overflows = expected > f64::from(f32::MAX) && *out == f32::INFINITY;
                assert!(
                    overflows || (f64::from(*out) - expected).abs() <= within,
                    "{level:?} {activation:?} of {x} is {out}, not {expected}"
                );
            }
        }
    }
}

#[test]
fn soft_caps_match_f64_and_hold() {
    let x = magnitudes();
    for level in levels() {
        for cap in [1.0, 30.0, 50.0] {
            let mut out = x.clone();
            cpu(level, 2).soft_cap(&mut out, cap);
            for (x, out) in x.iter().zip(&out) {
                let wide = f64::from(cap);
                let expected = wide * (f64::from(*x) / wide).tanh();
                assert!(out.abs() <= cap, "{level:?}: {x} is {out}");
                let within = 1e-6 * expected.abs() + 1e-35;
                assert!(
                    (f64::from(*out) - expected).abs() <= within,
                    "{level:?}: {x} is {out}, not {expected}"
                );
            }
            let mut special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
            cpu(level, 1).soft_cap(&mut special, cap);
            assert!(special[0].is_nan() && special[1..] == [cap, -cap]);
        }
    }
}

#[test]
fn activations_pass_on_what_is_not_a_number_and_saturate_at_infinities() {
    for level in levels() {
        for activation in ACTIVATIONS {
            let mut x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
            cpu(level, 1).activate(activation, &mut x);
            let (high, low) = match activation {
                Activation::Sigmoid => (1.0, 0.0),
                Activation::Tanh => (1.0, -1.0),
                _ => (f32::INFINITY, 0.0),
            };
            assert!(x[0].is_nan(), "{level:?} {activation:?}");
            assert_eq!(x[1], high, "{level:?} {activation:?}");
            assert!((x[2] - low).abs() < 1e-35, "{level:?} {activation:?} {x:?}");
        }
    }
}

#[test]
fn an_activation_depends_on_its_element_alone() {
    let x: Vec<f32> = magnitudes().into_iter().rev().take(997).collect();
    let up = Random::new(6).units(x.len());
    for level in levels() {
        let (one, three) = (cpu(level, 1), cpu(level, 3));
        for activation in ACTIVATIONS {
            let mut whole = x.clone();
            three.activate(activation, &mut whole);
            let mut gated = x.clone();
            three.activate_mul(activation, &mut gated, &up);
            for i in 0..x.len() {
                let (mut alone, mut gate) = ([x[i]], [x[i]]);
                one.activate(activation, &mut alone);
                assert_eq!(alone[0].to_bits(), whole[i].to_bits(), "{activation:?}");
                one.activate_mul(activation, &mut gate, &up[i..=i]);
                assert_eq!(gate[0].to_bits(), gated[i].to_bits(), "{activation:?}");
                assert_eq!(gated[i], whole[i] * up[i], "{level:?} {activation:?}");
            }
        }
    }
}

/// The mean and the population's variance.
fn moments(row: &[f32]) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
    let squares = row.iter().map(|x| (f64::from(*x) - mean).powi(2));
    (mean, squares.sum::<f64>() / n)
}

#[test]
fn layer_norms_match_f64_for_any_width() {
    for level in levels() {
        let cpu = cpu(level, 2);
        for (rows, width) in [(1, 1), (3, 20), (5, 128), (70, 1024)] {
            // Far from zero, where a difference of mean squares would have no digits left.
            let mut x = Random::new(1).units(rows * width);
            x.iter_mut().for_each(|x| *x += 30.0);
            let (weight, bias) = (Random::new(2).units(width), Random::new(3).units(width));
            for bias in [None, Some(&*bias)] {
                let mut out = vec![0.0; x.len()];
                cpu.layer_norm(&mut out, &x, &weight, bias, 1e-5, width);
                let expected = x.chunks(width).flat_map(|row| {
                    let (mean, variance) = moments(row);
                    let weight = &weight;
                    (0..width).map(move |i| {
                        let normed = (f64::from(row[i]) - mean) / (variance + 1e-5).sqrt();
                        let bias = bias.map_or(0.0, |bias| f64::from(bias[i]));
                        normed * f64::from(weight[i]) + bias
                    })
                });
                assert_close(&out, expected, 2e-5, "layer norm");
                let mut in_place = x.clone();
                cpu.layer_norm_in_place(&mut in_place, &weight, bias, 1e-5, width);
                assert_eq!(in_place, out);
            }
        }
    }
}

#[test]
fn a_norm_without_weights_is_one_with_weights_of_one() {
    for level in levels() {
        let cpu = cpu(level, 2);
        for (rows, width) in [(1, 1), (3, 20), (70, 1024)] {
            let x = Random::new(1).units(rows * width);
            let mut expected = vec![0.0; x.len()];
            cpu.rms_norm(&mut expected, &x, &vec![1.0; width], 1e-6, width);
            let mut out = vec![0.0; x.len()];
            cpu.rms_norm_unweighted(&mut out, &x, 1e-6, width);
            assert_eq!(out, expected);
            let mut in_place = x;
            cpu.rms_norm_unweighted_in_place(&mut in_place, 1e-6, width);
            assert_eq!(in_place, expected);
        }
    }
}

#[test]
fn outliers_of_a_row_stay_and_all_else_is_zero() {
    for level in levels() {
        for (rows, width) in [(1, 3), (3, 20), (40, 2048)] {
            let x = Random::new(1).units(rows * width);
            let mut out = x.clone();
            cpu(level, 2).gaussian_top_k(&mut out, 1.644_853_6, width);
            let expected = x.chunks(width).flat_map(|row| {
                let (mean, variance) = moments(row);
                let cutoff = mean + 1.644_853_6 * variance.sqrt();
                row.iter().map(move |x| (f64::from(*x) - cutoff).max(0.0))
            });
            assert_close(&out, expected, 1e-6, "gaussian top k");
            assert!(out.contains(&0.0));
        }
    }
}

#[test]
fn magnitudes_are_matched_row_by_row() {
    for level in levels() {
        let cpu = cpu(level, 2);
        for (rows, width) in [(1, 3), (3, 20), (40, 1024)] {
            let (mut x, like) = (
                Random::new(1).units(rows * width),
                Random::new(2).units(rows * width),
            );
            x[..width].fill(0.0);
            let mut out = x.clone();
            cpu.match_magnitude(&mut out, &like, 1e-5, width);
            let rows = x.chunks(width).zip(like.chunks(width));
            let expected = rows.flat_map(|(x, like)| {
                let square =
                    |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                let factor = (square(like) / square(x).max(1e-5)).sqrt();
                x.iter().map(move |x| f64::from(*x) * factor)
            });
            assert_close(&out, expected, 1e-6, "matched magnitude");
        }
    }
}

#[test]
fn scaled_values_are_exact() {
    for level in levels() {
        let cpu = cpu(level, 3);
        for (rows, width) in [(1, 1), (5, 3), (3, 16), (7, 9000)] {
            let (x, y) = (
                Random::new(7).units(rows * width),
                Random::new(8).units(rows * width),
            );
            let factors = Random::new(9).units(2 * rows.max(width));
            let check =
                |name: &str, change: &dyn Fn(&mut [f32]), expected: &dyn Fn(usize) -> f32| {
                    let mut out = x.clone();
                    change(&mut out);
                    for (i, out) in out.into_iter().enumerate() {
                        assert_eq!(out, expected(i), "{level:?}: {name}, element {i}");
                    }
                };
            check("scale", &|x| cpu.scale(x, 0.3), &|i| x[i] * 0.3);
            check("add_scaled", &|x| cpu.add_scaled(x, &y, 0.3), &|i| {
                x[i] + y[i] * 0.3
            });
            check("multiply", &|x| cpu.multiply(x, &y), &|i| x[i] * y[i]);
            let per_row = &factors[..rows];
            check("scale_rows", &|x| cpu.scale_rows(x, per_row, width), &|i| {
                x[i] * factors[i / width]
            });
            let per_column = &factors[..width];
            check(
                "scale_columns",
                &|x| cpu.scale_columns(x, per_column),
                &|i| x[i] * factors[i % width],
            );
            let apart = &factors[..2 * rows - 1];
            check(
                "add_scaled_rows",
                &|x| cpu.add_scaled_rows(x, &y, apart, 2, width),
                &|i| x[i] + y[i] * factors[i / width * 2],
            );
        }
    }
}

#[test]
fn decays_match_f64_and_reach_0_and_1() {
    for level in levels() {
        for (rows, width) in [(1, 1), (5, 16), (70, 37)] {
            let steps: Vec<f32> = magnitudes().iter().map(|x| x.abs()).collect();
            let steps = &steps[..rows * width];
            let rates: Vec<f32> = Random::new(3)
                .units(width)
                .iter()
                .map(|x| -x.abs())
                .collect();
            let mut out = vec![0.0; steps.len()];
            cpu(level, 2).decay(&mut out, steps, &rates);
            let expected = steps.iter().enumerate();
            let expected = expected.map(|(i, x)| f64::from(x * rates[i % width]).exp());
            assert_close(&out, expected, 1e-6, "decay");
        }
        let mut out = [0.0; 3];
        cpu(level, 1).decay(&mut out, &[0.0, 1e30, f32::NAN], &[-1.0; 3]);
        assert_eq!(out[..2], [1.0, 0.0]);
        assert!(out[2].is_nan());
    }
}

#[test]
fn sums_biases_and_stored_rows_are_exact() {
    for level in levels() {
        let cpu = cpu(level, 3);
        for len in [1, 15, 16, 48, 50_000] {
            let (x, y) = (Random::new(7).units(len), Random::new(8).units(len));
            let mut out = x.clone();
            cpu.add(&mut out, &y);
            assert!(
                out.iter()
                    .zip(&x)
                    .zip(&y)
                    .all(|((out, x), y)| *out == x + y)
            );
            let mut bytes = vec![0; 2 * len];
            cpu.store_rows(ElementType::F16, &mut bytes, &x);
            let expected: Vec<u8> = x
                .iter()
                .flat_map(|x| f16::from_f32(*x).to_le_bytes())
                .collect();
            assert_eq!(bytes, expected);
            let mut bytes = vec![0; 4 * len];
            cpu.store_rows(ElementType::F32, &mut bytes, &x);
            let expected: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(bytes, expected);
        }
        let mut out = vec![1.0; 3 * 20_000];
        let bias = Random::new(9).units(20_000);
        cpu.add_bias(&mut out, &bias);
        assert!(
            out.chunks(20_000)
                .all(|row| row.iter().zip(&bias).all(|(x, b)| *x == 1.0 + b))
        );
    }
}

#[test]
fn columns_are_those_of_their_rows() {
    let (tokens, width) = (70, 900);
    let x = Random::new(1).units(tokens * width);
    for threads in [1, 3] {
        let cpu = cpu(Level::Portable, threads);
        for columns in [0..width, 0..1, 256..512, 899..900] {
            let len = columns.len();
            let mut out = vec![0.0; tokens * len];
            let to = HeadRows::by_token(len, 0);
            let from = HeadRows::by_token(width, columns.start);
            cpu.copy_columns((&mut out, to), (&x, from), 1, len);
            let rows = x.chunks(width);
            let expected: Vec<_> = rows
                .flat_map(|row| &row[columns.clone()])
                .copied()
                .collect();
            assert_eq!(out, expected, "{columns:?}");
        }
    }
}

#[test]
fn columns_of_heads_go_where_those_of_their_token_and_head_are() {
    let (tokens, heads, columns) = (37, 5, 24);
    let x = Random::new(1).units(tokens * heads * 40);
    let orders = [HeadOrder::ByToken, HeadOrder::ByHead];
    for (order, other) in orders.iter().flat_map(|a| orders.map(|b| (*a, b))) {
        let from = HeadRows {
            order,
            width: 40,
            start: 16,
        };
        let to = HeadRows {
            order: other,
            width: 32,
            start: 3,
        };
        let row = |rows: HeadRows, token: usize, head: usize| match rows.order {
            HeadOrder::ByToken => (token * heads + head) * rows.width,
            HeadOrder::ByHead => (head * tokens + token) * rows.width,
        };
        let mut expected = vec![7.0; tokens * heads * to.width];
        for token in 0..tokens {
            for head in 0..heads {
                let (at, x_at) = (row(to, token, head) + 3, row(from, token, head) + 16);
                expected[at..at + columns].copy_from_slice(&x[x_at..x_at + columns]);
            }
        }
        for threads in [1, 3] {
            let mut out = vec![7.0; tokens * heads * to.width];
            let cpu = cpu(Level::Portable, threads);
            cpu.copy_columns((&mut out, to), (&x, from), heads, columns);
            assert!(out == expected, "{order:?} to {other:?}");
        }
    }
}

#[test]
fn the_first_value_that_is_not_finite_is_found() {
    for level in levels() {
        let cpu = cpu(level, 1);
        for len in [0, 1, 255, 256, 1000] {
            let mut x = Random::new(3).units(len);
            assert_eq!(cpu.first_not_finite(&x), None);
            for at in [len / 2, len.saturating_sub(1)] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    x.iter_mut().skip(at).for_each(|x| *x = bad);
                    assert_eq!(cpu.first_not_finite(&x), (at < len).then_some(at));
                    x = Random::new(3).units(len);
                }
            }
        }
    }
}

#[test]
fn embedding_copies_rows() {
    for dtype in DType::ALL {
        let (rows, cols) = (5, 512);
        let bytes = random_matrix(dtype, rows, cols, 1.0, 1);
        let table = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
        let mut out = vec![0.0; 3 * cols];
        cpu(Level::Portable, 2).embed(&mut out, &table, &[4, 0, 4]);
        for (token, out) in [4, 0, 4].into_iter().zip(out.chunks(cols)) {
            let mut row = vec![0.0; cols];
            table.dequantize_row(token, &mut row);
            assert_eq!(out, row);
        }
    }
}

/// One product of a `[16, 256]` matrix of the type with one row of activations.
fn product(level: Level, dtype: DType, weights: &[u8], x: &[f32]) -> Vec<f32> {
    let w = Matrix::new(dtype, 16, 256, weights).expect("a valid shape");
    let mut storage = Storage::new(Activations::storage_bytes(1, 256).expect("whole blocks"));
    let mut out = vec![0.0; 16];
    let cpu = cpu(level, 1);
    cpu.matmul(&mut out, &cpu.activations(x, 1, 256, storage.bytes()), &w);
    out
}

#[test]
fn values_that_are_not_finite_come_out_as_such() {
    for dtype in DType::ALL {
        let weights = random_matrix(dtype, 16, 256, 1.0, 3);
        for level in levels() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = Random::new(4).units(256);
                x[77] = bad;
                let out = product(level, dtype, &weights, &x);
                assert!(
                    out.iter().all(|x| !x.is_finite()),
                    "{dtype} {level:?} {bad}"
                );
            }
        }
    }
}

#[test]
fn zeros_denormals_and_outliers_are_handled() {
    for dtype in DType::ALL {
        let weights = random_matrix(dtype, 16, 256, 1.0, 3);
        for level in levels() {
            assert!(
                product(level, dtype, &weights, &[0.0; 256])
                    .iter()
                    .all(|x| *x == 0.0)
            );
            let tiny = product(level, dtype, &weights, &[f32::MIN_POSITIVE / 8.0; 256]);
            assert!(
                tiny.iter().all(|x| x.abs() < 1e-30),
                "{dtype} {level:?} {tiny:?}"
            );
            let mut x = vec![1e-3; 256];
            x[5] = 1e30;
            assert!(
                product(level, dtype, &weights, &x)
                    .iter()
                    .all(|x| x.is_finite())
            );
            x[5] = f32::MAX;
            product(level, dtype, &weights, &x);
        }
    }
}

#[test]
fn extreme_bytes_and_scales_agree_on_all_levels() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_quantized()) {
        for byte in [0x00, 0x7F, 0x80, 0xFF] {
            let mut weights = vec![byte; 16 * dtype.row_bytes(256).expect("whole blocks")];
            for block in weights.chunks_exact_mut(dtype.block_bytes()) {
                let extremes = [f16::MAX, f16::MIN_POSITIVE_SUBNORMAL];
                for (at, value) in scales(dtype).iter().zip(extremes) {
                    block[*at..at + 2].copy_from_slice(&value.to_le_bytes());
                }
                if dtype == DType::Mxfp4 {
                    block[0] = if byte % 2 == 0 { byte / 128 } else { 240 };
                }
            }
            for sign in [1.0, -1.0] {
                let expected = product(Level::Portable, dtype, &weights, &[sign; 256]);
                assert!(expected.iter().all(|x| x.is_finite()));
                for level in levels() {
                    let out = product(level, dtype, &weights, &[sign; 256]);
                    assert_eq!(out, expected, "{dtype} {level:?} {byte:#x}");
                }
            }
        }
    }
}

#[test]
fn weights_that_are_not_finite_do_not_hang() {
    for dtype in DType::ALL {
        let weights = vec![0xFF; 16 * dtype.row_bytes(256).expect("whole blocks")];
        for level in levels() {
            let out = product(level, dtype, &weights, &Random::new(1).units(256));
            assert!(out.iter().all(|x| !x.is_finite()), "{dtype} {level:?}");
        }
    }
}

#[test]
fn limits_are_rates_on_every_level() {
    let bytes = vec![1; 4 << 20];
    for cpu in cpus(2) {
        let bf16 = cpu.measure_bf16_products();
        assert_eq!(bf16.is_some(), cpu.precision() == MatmulPrecision::Bf16);
        let rates = [
            cpu.measure_read(&bytes),
            cpu.measure_int8_dot(),
            cpu.measure_f32_fma(),
        ];
        for rate in rates.into_iter().chain(bf16) {
            assert!(rate.is_finite() && rate > 0.0, "{:?} {rate}", cpu.level());
        }
        assert_eq!(cpu.measure_read(&[]), 0.0);
        assert!(cpu.measure_barrier() < 1.0);
    }
}

#[test]
fn levels_have_names_and_unavailable_ones_are_refused() {
    for level in Level::ALL {
        assert_eq!(level.name().parse::<Level>().ok(), Some(level));
        let result = Cpu::new(CpuConfig {
            level: Some(level),
            ..CpuConfig::default()
        });
        match result {
            Ok(cpu) => assert_eq!(cpu.level(), level),
            Err(error) => {
                assert!(matches!(error, CpuError::Unavailable(refused) if refused == level));
                assert!(error.to_string().contains(Level::best().name()), "{error}");
            }
        }
    }
    assert!(matches!(
        "sse9".parse::<Level>(),
        Err(CpuError::UnknownLevel(_))
    ));
}

#[test]
fn a_processor_that_may_choose_computes_as_one_that_is_told() {
    let x = Random::new(5).units(40 * 64);
    for level in levels() {
        let with = |precision: PrecisionMode| CpuConfig {
            precision,
            ..cpu(level, 1).config()
        };
        let chosen = Cpu::new(with(PrecisionMode::Auto)).expect("one it has");
        let precision = chosen.precision();
        // Only `vdpbf16ps` may be faster without one token being slower.
        assert!(precision == MatmulPrecision::F32 || level == Level::Avx512Vnni);
        let told = Cpu::new(with(precision.into())).expect("the one it has chosen");
        assert_eq!(chosen.config(), with(PrecisionMode::Auto));
        assert_eq!(
            chosen.config().bytes_per_thread(),
            told.config().bytes_per_thread()
        );
        let weights = random_matrix(DType::Bf16, 20, 64, 1.0, 6);
        let products = [&chosen, &told].map(|cpu| {
            let matrix = Matrix::new(DType::Bf16, 20, 64, &weights).expect("it fits");
            let mut out = vec![0.0; 40 * 20];
            cpu.matmul(&mut out, &cpu.activations(&x, 40, 64, &mut []), &matrix);
            out
        });
        assert_eq!(products[0], products[1], "{level:?}");

        let rows = Random::new(7).units(32 * 2 * 64);
        let rows: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        // Two heads of 64 and their sixteen query heads, and one of all of them.
        for (kv_heads, in_tiles) in [(2, false), (1, true)] {
            let shape = AttentionShape::causal(16, kv_heads, 64, 0.125);
            let precision = chosen.attention_precision(&shape);
            let expected = match in_tiles && level == Level::Amx {
                true => MatmulPrecision::Bf16,
                false => chosen.precision(),
            };
            assert_eq!(precision, expected, "{level:?}");
            let told = Cpu::new(with(precision.into())).expect("the one it has chosen");
            let k = View::flat(ElementType::F32, kv_heads, 64, &rows);
            let results = [&chosen, &told].map(|cpu| {
                let mut out = vec![0.0; 2 * 16 * 64];
                let mut scratch = vec![0.0; Cpu::attention_scratch_len(2, 32, &shape)];
                cpu.attention(
                    &mut out,
                    &x[..2 * 16 * 64],
                    &k,
                    &k,
                    30,
                    &shape,
                    &mut scratch,
                );
                out
            });
            assert_eq!(results[0], results[1], "{level:?}");
        }
    }
    assert_eq!(PrecisionMode::Auto.or_f32(), PrecisionMode::default());
}

#[test]
#[should_panic(expected = "columns of activations and matrix")]
fn shapes_that_do_not_fit_are_bugs() {
    let cpu = cpu(Level::Portable, 1);
    let bytes = [0; 8];
    let w = Matrix::new(DType::F32, 1, 2, &bytes).expect("a valid shape");
    cpu.matmul(&mut [0.0], &cpu.activations(&[1.0; 3], 1, 3, &mut []), &w);
}

#[test]
#[should_panic(expected = "need storage")]
fn quantized_matrices_need_quantized_activations() {
    let cpu = cpu(Level::Portable, 1);
    let bytes = [0; 34];
    let w = Matrix::new(DType::Q8_0, 1, 32, &bytes).expect("a valid shape");
    cpu.matmul(&mut [0.0], &cpu.activations(&[1.0; 32], 1, 32, &mut []), &w);
}

#[test]
fn stored_rows_are_within_half_a_unit() {
    // Units: of the value itself for bf16, of the block's largest value for the others.
    for (element, unit) in [
        (ElementType::Bf16, 1.0 / 128.0),
        (ElementType::Q8_0, 1.0 / 127.0),
        (ElementType::Q4_0, 1.0 / 8.0),
        (ElementType::Iq4Nl, 1.0 / 8.0),
    ] {
        let x = Random::new(1).units(20_000 * 32);
        let dtype: DType = element.name().parse().expect("a weight type as well");
        let mut stored = vec![0; element.bytes(x.len())];
        cpu(Level::Portable, 1).store_rows(element, &mut stored, &x);
        let values = support::dequantize(dtype, &stored);
        for (values, x) in values.chunks(32).zip(x.chunks(32)) {
            let largest = x.iter().fold(0.0, |a: f32, x| a.max(x.abs()));
            for (value, x) in values.iter().zip(x) {
                let largest = if element == ElementType::Bf16 {
                    x.abs()
                } else {
                    largest
                };
                // The scale of a block is rounded to 11 bits; there are codes from -8 to 7, of scales that may
                // be a ninth of the largest value, whose sign may be the other one of two. Levels are at most 24 apart,
                // and go to 113 where the largest value may be 136.
                let most = match element {
                    ElementType::Q4_0 => 1.8,
                    ElementType::Iq4Nl => 1.5,
                    _ => 0.56,
                };
                let bound = f64::from(largest) * unit * most;
                assert!(
                    (value - f64::from(*x)).abs() <= bound,
                    "{element} {value} {x}"
                );
            }
        }
        for level in levels() {
            for threads in [1, 3] {
                let mut bytes = vec![0; stored.len()];
                cpu(level, threads).store_rows(element, &mut bytes, &x);
                assert!(bytes == stored, "{level:?} {element}");
            }
        }
    }
}

#[test]
fn hadamard_transforms_match_f64_are_undone_by_themselves_and_are_the_same_at_every_level() {
    for block in [16, 32, 64, 128, 256, 512] {
        let x = Random::new(5).units(70 * 512);
        let mut transformed = x.clone();
        cpu(Level::Portable, 1).hadamard(&mut transformed, block);
        let expected = (0..x.len()).map(|index| {
            let (start, i) = (index / block * block, index % block);
            let signed = x[start..start + block].iter().enumerate();
            let signed = signed.map(|(j, x)| match (i & j).count_ones() % 2 {
                0 => f64::from(*x),
                _ => -f64::from(*x),
            });
            signed.sum::<f64>() / (block as f64).sqrt()
        });
        assert_close(&transformed, expected, 1e-6, "hadamard");
        for level in levels() {
            for threads in [1, 3] {
                let mut out = x.clone();
                cpu(level, threads).hadamard(&mut out, block);
                assert!(
                    out == transformed,
                    "{level:?}, {threads} threads, blocks of {block}"
                );
            }
        }
        let mut back = transformed;
        cpu(Level::Portable, 1).hadamard(&mut back, block);
        assert_close(&back, x.iter().map(|x| f64::from(*x)), 1e-6, "back");
    }
}

#[test]
fn heads_are_smoothed_before_they_are_transformed() {
    const HEADS: usize = 3;
    for (head_dim, sharing) in [(64, 1), (64, 2), (96, 5)] {
        let width = HEADS * head_dim;
        let x = Random::new(11).units(70 * width * sharing);
        let centre = Random::new(12).units(width);
        let factors: Vec<f32> = Random::new(13).units(width);
        let factors: Vec<f32> = factors.iter().map(|x| x.exp()).collect();
        let block = 1 << head_dim.trailing_zeros();
        for centre in [None, Some(&*centre)] {
            let by = Smoothing {
                centre,
                factors: &factors,
                head_dim,
                sharing,
            };
            let smoothed = x.iter().enumerate().map(|(index, x)| {
                let head = index / head_dim % (HEADS * sharing) / sharing;
                let element = head * head_dim + index % head_dim;
                (x - centre.map_or(0.0, |centre| centre[element])) * factors[element]
            });
            let mut expected: Vec<f32> = smoothed.collect();
            cpu(Level::Portable, 1).hadamard(&mut expected, block);
            for level in levels() {
                for threads in [1, 3] {
                    let mut out = x.clone();
                    cpu(level, threads).hadamard_of_smoothed(&mut out, block, by);
                    assert!(
                        out == expected,
                        "{level:?}, {threads} threads, {sharing} heads of {head_dim}"
                    );
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "blocks of 64")]
fn smoothed_heads_are_whole_blocks() {
    let by = Smoothing {
        centre: None,
        factors: &[1.0; 96],
        head_dim: 96,
        sharing: 1,
    };
    cpu(Level::Portable, 1).hadamard_of_smoothed(&mut [0.0; 192], 64, by);
}

#[test]
#[should_panic(expected = "blocks of 24")]
fn hadamard_blocks_are_powers_of_two() {
    cpu(Level::Portable, 1).hadamard(&mut [0.0; 48], 24);
}

/// Sums of twelve even numbers are near enough to what is distributed normally.
#[test]
fn scales_of_four_bits_are_chosen_for_the_least_squared_error() {
    let uniform = Random::new(9).units(12 * 32 * 500);
    let x: Vec<f32> = uniform.chunks(12).map(|x| x.iter().sum()).collect();
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let of = |element: ElementType| {
        let mut stored = vec![0; element.bytes(x.len())];
        cpu(Level::Portable, 1).store_rows(element, &mut stored, &x);
        let dtype: DType = element.name().parse().expect("a weight type as well");
        let values = support::dequantize(dtype, &stored);
        let errors = values.iter().zip(&x);
        squares(&mut errors.map(|(value, x)| value - f64::from(*x)))
    };
    // The largest element exactly, as its block's first level.
    let plain = |levels: &[f64]| {
        squares(&mut x.chunks(32).flat_map(|x| {
            let largest = x
                .iter()
                .fold(0.0, |a: f32, b| if b.abs() > a.abs() { *b } else { a });
            let scale = f64::from(largest) / levels[0];
            let error = move |x: &f32| {
                let errors = levels.iter().map(|level| level * scale - f64::from(*x));
                errors.fold(f64::INFINITY, |a, b| if b.abs() < a.abs() { b } else { a })
            };
            x.iter().map(error).collect::<Vec<_>>()
        }))
    };
    let even: Vec<f64> = (-8..8).map(f64::from).collect();
    for (element, levels, most) in [
        (ElementType::Q4_0, &even, 0.94),
        (ElementType::Iq4Nl, &support::LEVELS.to_vec(), 0.92),
    ] {
        let (found, plain) = (of(element), plain(levels));
        assert!(found < most * plain, "{element}: {found} for {plain}");
    }
    let [even, uneven] = [ElementType::Q4_0, ElementType::Iq4Nl].map(of);
    assert!(uneven < 0.86 * even, "{uneven} for {even}");
}

#[test]
fn blocks_of_four_bits_keep_zeros_small_and_large_values_and_what_is_not_finite() {
    // Levels of iq4_nl leave out zero: what is none becomes a hundredth of the largest element.
    for (element, most) in [(ElementType::Q4_0, 0.0), (ElementType::Iq4Nl, 0.01)] {
        let of = |x: [f32; 32]| {
            let stored: Vec<Vec<u8>> = levels()
                .into_iter()
                .map(|level| {
                    let mut bytes = vec![0; 18];
                    cpu(level, 1).store_rows(element, &mut bytes, &x);
                    bytes
                })
                .collect();
            assert!(stored.iter().all(|bytes| *bytes == stored[0]), "{x:?}");
            support::dequantize(element.name().parse().expect("a type"), &stored[0])
        };
        assert!(of([0.0; 32]).iter().all(|value| *value == 0.0));
        for (value, within) in [(3e-5, 1e-6), (60_000.0, 60.0), (-60_000.0, 60.0)] {
            let mut x = [0.0; 32];
            x[17] = value;
            let values = of(x);
            let within = within + 0.2 * most * f64::from(value.abs());
            assert!(
                (values[17] - f64::from(value)).abs() <= within,
                "{values:?}"
            );
            let most = most * f64::from(value.abs());
            let rest = values.iter().enumerate();
            assert!(rest.filter(|(i, _)| *i != 17).all(|(_, x)| x.abs() <= most));
        }
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
            let mut x = [1.0; 32];
            x[3] = value;
            // Whatever is multiplied with them: an infinite score would hide a row, or all others.
            assert!(of(x).iter().all(|x| x.is_nan()), "{element}: {value}");
        }
    }
}

/// Rows in each layout a cache may have: whole, with gaps, and head by head, from a row within on.
#[test]
fn stored_runs_are_read_where_views_of_the_same_layout_look() {
    const ROWS: usize = 9;
    for element in [ElementType::F16, ElementType::Q8_0] {
        for (heads, head_dim) in [(1, 32), (3, 64)] {
            let whole = RowLayout::token_major(element, heads, head_dim);
            let apart = RowLayout {
                row_stride: whole.row_stride + 40,
                ..whole
            };
            let by_head = RowLayout::head_major(element, heads, head_dim, ROWS + 2);
            let width = heads * head_dim;
            let x = Random::new(3).units((ROWS + 1) * width);
            let cpu = cpu(Level::Portable, 2);
            for layout in [whole, apart, by_head] {
                let mut bytes = vec![0; heads * layout.head_stride + ROWS * layout.row_stride];
                let run = RunMut {
                    layout,
                    rows: 1..ROWS + 1,
                    bytes: &mut bytes,
                };
                cpu.store_run(run, &x);
                let run = Run {
                    start_row: 1,
                    rows: ROWS,
                    bytes: &bytes,
                };
                let view = View::from_runs(layout, run, &[]).expect("rows that fit");
                for row in view.rows() {
                    for head in 0..heads {
                        let x = &x[row * width + head * head_dim..][..head_dim];
                        let mut expected = vec![0; layout.head_bytes()];
                        cpu.store_rows(element, &mut expected, x);
                        assert!(view.head(row, head) == expected, "{layout:?} {row} {head}");
                    }
                }
            }
        }
    }
}

#[test]
fn stored_bf16_rounds_to_even_and_keeps_what_is_not_finite() {
    for level in levels() {
        let x = [
            1.003_906_3,
            1.011_718_8,
            f32::NAN,
            f32::INFINITY,
            f32::MAX,
            -0.0,
        ];
        let mut bytes = [0; 12];
        cpu(level, 1).store_rows(ElementType::Bf16, &mut bytes, &x);
        let expected = x.map(|x| half::bf16::from_f32(x).to_le_bytes());
        assert_eq!(bytes, *expected.as_flattened());
    }
}
