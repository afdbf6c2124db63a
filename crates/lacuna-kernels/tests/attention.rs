//! Attention against a naive f64 implementation, and what it must not depend on.

mod support;

use half::f16;
use lacuna_kernels::{AttentionShape, Cpu, ElementType, Run, View};
use support::{Random, cpu, levels};

const ELEMENTS: [ElementType; 2] = [ElementType::F32, ElementType::F16];

fn shape(query_heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    let scale = (head_dim as f32).powf(-0.5);
    AttentionShape {
        query_heads,
        kv_heads,
        head_dim,
        scale,
    }
}

/// Random K or V rows as bytes and as the values they stand for.
fn cache(element: ElementType, rows: usize, width: usize, seed: u64) -> (Vec<u8>, Vec<f64>) {
    let values = Random::new(seed).units(rows * width);
    match element {
        ElementType::F16 => {
            let halves: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
            let bytes = halves.iter().flat_map(|x| x.to_le_bytes()).collect();
            (bytes, halves.iter().map(|x| x.to_f64()).collect())
        }
        _ => {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            (bytes, values.iter().map(|x| f64::from(*x)).collect())
        }
    }
}

/// Softmax of scaled scores times values, one query head at a time.
fn naive(q: &[f32], k: &[f64], v: &[f64], first: usize, shape: &AttentionShape) -> Vec<f64> {
    let (dim, width) = (shape.head_dim, shape.kv_heads * shape.head_dim);
    let mut out = Vec::new();
    for (index, q) in q.chunks(dim).enumerate() {
        let (token, head) = (index / shape.query_heads, index % shape.query_heads);
        let column = head * shape.kv_heads / shape.query_heads * dim;
        let rows = 0..=first + token;
        let scores: Vec<f64> = rows
            .clone()
            .map(|row| {
                let k = &k[row * width + column..][..dim];
                let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * k).sum();
                dot * f64::from(shape.scale)
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for d in 0..dim {
            let value: f64 = rows
                .clone()
                .zip(&weights)
                .map(|(row, w)| w * v[row * width + column + d])
                .sum();
            out.push(value / sum);
        }
    }
    out
}

fn attend(
    cpu: &Cpu,
    q: &[f32],
    k: &View<'_>,
    v: &View<'_>,
    first: usize,
    shape: &AttentionShape,
) -> Vec<f32> {
    let tokens = q.len() / (shape.query_heads * shape.head_dim);
    let mut out = vec![f32::NAN; q.len()];
    let mut scratch = vec![0.0; Cpu::attention_scratch_len(tokens, first + tokens, shape)];
    cpu.attention(&mut out, q, k, v, first, shape, &mut scratch);
    out
}

fn assert_close(out: &[f32], expected: &[f64], case: &str) {
    for (out, expected) in out.iter().zip(expected) {
        assert!(
            (f64::from(*out) - expected).abs() < 3e-6,
            "{case}: {out} for {expected}"
        );
    }
}

#[test]
fn every_grouping_head_dimension_and_element_matches_f64() {
    for head_dim in [16, 20, 32, 64, 80, 128] {
        for group in [1, 2, 3, 4, 8] {
            let shape = shape(2 * group, 2, head_dim);
            for element in ELEMENTS {
                for (tokens, first) in [(1, 0), (1, 300), (3, 17), (40, 250)] {
                    let rows = first + tokens;
                    let width = 2 * head_dim;
                    let (k_bytes, k) = cache(element, rows, width, 1);
                    let (v_bytes, v) = cache(element, rows, width, 2);
                    let q = Random::new(3).units(tokens * 2 * group * head_dim);
                    let expected = naive(&q, &k, &v, first, &shape);
                    for level in levels() {
                        let k = View::flat(element, width, &k_bytes);
                        let v = View::flat(element, width, &v_bytes);
                        let out = attend(&cpu(level, 2), &q, &k, &v, first, &shape);
                        let case = format!("{level:?} {shape:?} {element:?} {tokens} at {first}");
                        assert_close(&out, &expected, &case);
                    }
                }
            }
        }
    }
}

#[test]
fn a_query_does_not_depend_on_its_batch_or_on_threads() {
    for (query_heads, kv_heads, head_dim) in [(4, 2, 64), (8, 1, 20), (5, 5, 128)] {
        let shape = shape(query_heads, kv_heads, head_dim);
        let (rows, width) = (600, kv_heads * head_dim);
        for element in ELEMENTS {
            let (k, _) = cache(element, rows, width, 4);
            let (v, _) = cache(element, rows, width, 5);
            let (k, v) = (
                View::flat(element, width, &k),
                View::flat(element, width, &v),
            );
            let q = Random::new(6).units(rows * query_heads * head_dim);
            let per_token = query_heads * head_dim;
            for level in levels() {
                let single = cpu(level, 1);
                let whole = attend(&single, &q, &k, &v, 0, &shape);
                for threads in [1, 2, 3] {
                    let cpu = cpu(level, threads);
                    for (first, tokens) in
                        [(0, 1), (255, 2), (256, 1), (511, 7), (300, 70), (599, 1)]
                    {
                        let part = first * per_token..(first + tokens) * per_token;
                        let out = attend(&cpu, &q[part.clone()], &k, &v, first, &shape);
                        let case = format!("{level:?} {element:?} {shape:?} {tokens} at {first}");
                        assert_eq!(out, whole[part], "{case}");
                    }
                }
            }
        }
    }
}

#[test]
fn less_scratch_gives_the_same_result() {
    let shape = shape(4, 2, 32);
    let (k, _) = cache(ElementType::F16, 700, 64, 1);
    let (v, _) = cache(ElementType::F16, 700, 64, 2);
    let (k, v) = (
        View::flat(ElementType::F16, 64, &k),
        View::flat(ElementType::F16, 64, &v),
    );
    let q = Random::new(3).units(128);
    for level in levels() {
        let cpu = cpu(level, 2);
        let mut out = vec![0.0; 128];
        cpu.attention(&mut out, &q, &k, &v, 699, &shape, &mut []);
        assert_eq!(out, attend(&cpu, &q, &k, &v, 699, &shape));
    }
}

/// Pieces of `len` bytes, last one first.
fn reversed_pieces(bytes: &[u8], len: usize) -> Vec<Vec<u8>> {
    bytes.chunks(len).rev().map(<[u8]>::to_vec).collect()
}

/// Runs over pieces that [`reversed_pieces`] made.
fn runs(pieces: &[Vec<u8>], row_bytes: usize) -> Vec<Run<'_>> {
    let mut start_row = 0;
    let mut runs = Vec::new();
    for bytes in pieces.iter().rev() {
        let rows = bytes.len() / row_bytes;
        runs.push(Run {
            start_row,
            rows,
            bytes,
        });
        start_row += rows;
    }
    runs
}

#[test]
fn scattered_runs_equal_a_flat_range() {
    let shape = shape(4, 2, 40);
    let (width, rows) = (80, 333);
    for element in ELEMENTS {
        let row_bytes = element.bytes(width);
        let (k, _) = cache(element, rows, width, 8);
        let (v, _) = cache(element, rows, width, 9);
        let q = Random::new(10).units(5 * 160);
        for rows_per_run in [1, 7, 16, 100] {
            let k_pieces = reversed_pieces(&k, rows_per_run * row_bytes);
            let v_pieces = reversed_pieces(&v, rows_per_run * row_bytes);
            let (k_runs, v_runs) = (runs(&k_pieces, row_bytes), runs(&v_pieces, row_bytes));
            let view = |runs| View::from_runs(element, width, row_bytes, runs, &[]);
            assert_eq!(view(k_runs[0]).map(|view| view.len()), Ok(rows_per_run));
            let k_view = View::from_runs(element, width, row_bytes, k_runs[0], &k_runs[1..]);
            let v_view = View::from_runs(element, width, row_bytes, v_runs[0], &v_runs[1..]);
            let (k_view, v_view) = (k_view.expect("no gaps"), v_view.expect("no gaps"));
            let (k_flat, v_flat) = (
                View::flat(element, width, &k),
                View::flat(element, width, &v),
            );
            for level in levels() {
                let cpu = cpu(level, 2);
                for tokens in [1, 5] {
                    let (first, q) = (rows - tokens, &q[..tokens * 160]);
                    let flat = attend(&cpu, q, &k_flat, &v_flat, first, &shape);
                    let out = attend(&cpu, q, &k_view, &v_view, first, &shape);
                    assert_eq!(out, flat, "{level:?} {element:?} runs of {rows_per_run}");
                }
            }
        }
    }
}

#[test]
fn uniform_attention_over_many_rows_of_ones_is_one() {
    let shape = shape(2, 1, 64);
    let rows = 32_768;
    for element in ELEMENTS {
        let ones = match element {
            ElementType::F16 => f16::ONE.to_le_bytes().repeat(64 * rows),
            _ => 1.0_f32.to_le_bytes().repeat(64 * rows),
        };
        let zeros = vec![0; ones.len()];
        let (k, v) = (
            View::flat(element, 64, &zeros),
            View::flat(element, 64, &ones),
        );
        for level in levels() {
            for tokens in [1, 3] {
                let q = Random::new(1).units(tokens * 128);
                let out = attend(&cpu(level, 2), &q, &k, &v, rows - tokens, &shape);
                assert!(
                    out.iter().all(|x| (x - 1.0).abs() < 1e-3),
                    "{level:?} {element:?}"
                );
            }
        }
    }
}

#[test]
fn rows_behind_a_query_are_never_read_into_it() {
    let shape = shape(4, 2, 32);
    let (mut k, _) = cache(ElementType::F32, 40, 64, 1);
    let (mut v, _) = cache(ElementType::F32, 40, 64, 2);
    let q = Random::new(3).units(20 * 128);
    for level in levels() {
        let cpu = cpu(level, 2);
        let clean = attend(
            &cpu,
            &q[..10 * 128],
            &View::flat(ElementType::F32, 64, &k),
            &View::flat(ElementType::F32, 64, &v),
            0,
            &shape,
        );
        for side in [&mut k, &mut v] {
            side[10 * 256..]
                .chunks_exact_mut(4)
                .for_each(|x| x.copy_from_slice(&f32::NAN.to_le_bytes()));
        }
        let (k, v) = (
            View::flat(ElementType::F32, 64, &k),
            View::flat(ElementType::F32, 64, &v),
        );
        let out = attend(&cpu, &q, &k, &v, 0, &shape);
        assert_eq!(out[..10 * 128], clean);
        assert!(out[10 * 128..].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn extreme_scores_are_finite_and_infinite_ones_do_not_hang() {
    let shape = AttentionShape {
        scale: 1.0,
        ..shape(2, 1, 16)
    };
    let row = |x: f32| x.to_le_bytes().repeat(16);
    let k: Vec<u8> = [1e15, -1e15, 0.0, 1e15].into_iter().flat_map(row).collect();
    let v: Vec<u8> = [1.0, 2.0, 3.0, 5.0].into_iter().flat_map(row).collect();
    let (k, v) = (
        View::flat(ElementType::F32, 16, &k),
        View::flat(ElementType::F32, 16, &v),
    );
    for level in levels() {
        let cpu = cpu(level, 2);
        let out = attend(&cpu, &[1e4; 32], &k, &v, 3, &shape);
        assert!(
            out.iter().all(|x| (x - 3.0).abs() < 1e-5),
            "the two largest share: {out:?}"
        );
        for extreme in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let out = attend(&cpu, &[extreme; 32], &k, &v, 3, &shape);
            assert!(out.iter().all(|x| !x.is_finite()));
        }
    }
}
