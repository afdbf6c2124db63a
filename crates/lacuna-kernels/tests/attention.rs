//! Attention against a naive f64 implementation, and what it must not depend on.

mod support;

use std::num::NonZeroUsize;
use std::ops::Range;

use lacuna_kernels::{
    AttentionShape, Cached, Cpu, DType, ElementType, Level, Mask, MatmulPrecision, RowLayout, Run,
    Sequences, SharedRows, View,
};
use support::{Random, cpu, cpus, dequantize};

fn shape(query_heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    let scale = (head_dim as f32).powf(-0.5);
    AttentionShape::causal(query_heads, kv_heads, head_dim, scale)
}

fn masked(shape: AttentionShape, mask: Mask) -> AttentionShape {
    AttentionShape { mask, ..shape }
}

fn window(rows: usize) -> Mask {
    Mask::Window(NonZeroUsize::new(rows).expect("not zero"))
}

fn chunk(rows: usize) -> Mask {
    Mask::Chunk(NonZeroUsize::new(rows).expect("not zero"))
}

fn windowed(shape: AttentionShape, rows: usize) -> AttentionShape {
    masked(shape, window(rows))
}

/// Whether a query sees a row.
fn sees(mask: Mask, query: usize, row: usize) -> bool {
    match mask {
        Mask::Causal => row <= query,
        Mask::Window(rows) => row <= query && query < row + rows.get(),
        Mask::Chunk(rows) => row <= query && row / rows == query / rows,
        Mask::Full => true,
        Mask::Around(rows) => query.abs_diff(row) <= rows,
    }
}

/// The weight type with the same layout.
fn dtype(element: ElementType) -> DType {
    element
        .name()
        .parse()
        .expect("every element type is a weight type")
}

/// Rows of K or V, token-major from row 0 on, as bytes and as the values they stand for.
#[derive(Clone)]
struct Side {
    element: ElementType,
    heads: usize,
    head_dim: usize,
    bytes: Vec<u8>,
    values: Vec<f64>,
}

impl Side {
    fn of(element: ElementType, heads: usize, head_dim: usize, x: &[f32]) -> Self {
        let mut bytes = vec![0; element.bytes(x.len())];
        cpu(Level::Portable, 1).store_rows(element, &mut bytes, x);
        let values = dequantize(dtype(element), &bytes);
        Self {
            element,
            heads,
            head_dim,
            bytes,
            values,
        }
    }

    fn random(element: ElementType, shape: &AttentionShape, rows: usize, seed: u64) -> Self {
        let (heads, head_dim) = (shape.kv_heads, shape.head_dim);
        let x = Random::new(seed).units(rows * heads * head_dim);
        Self::of(element, heads, head_dim, &x)
    }

    fn random_values(element: ElementType, shape: &AttentionShape, rows: usize, seed: u64) -> Self {
        let head_dim = shape.value_dim;
        Self::random(element, &AttentionShape { head_dim, ..*shape }, rows, seed)
    }

    fn rows(&self) -> usize {
        self.values.len() / (self.heads * self.head_dim)
    }

    /// The bytes of the rows from one on.
    fn held_from(&self, row: usize) -> Vec<u8> {
        self.bytes[row * self.element.bytes(self.heads * self.head_dim)..].to_vec()
    }

    /// Has the first rows of another.
    fn begin_like(&mut self, other: &Self, rows: usize) {
        let elements = rows * self.heads * self.head_dim;
        let bytes = self.element.bytes(elements);
        self.bytes[..bytes].copy_from_slice(&other.bytes[..bytes]);
        self.values[..elements].copy_from_slice(&other.values[..elements]);
    }

    /// A view of such bytes.
    fn view_from<'a>(&self, row: usize, bytes: &'a [u8]) -> View<'a> {
        View::flat_from(self.element, self.heads, self.head_dim, row, bytes)
    }

    fn view(&self) -> View<'_> {
        View::flat(self.element, self.heads, self.head_dim, &self.bytes)
    }

    fn head(&self, row: usize, head: usize) -> &[f64] {
        &self.values[(row * self.heads + head) * self.head_dim..][..self.head_dim]
    }
}

/// What a result should be, and how far it may be from that with products in f32 and in bf16.
struct Expected {
    value: f64,
    bounds: [f64; 2],
}

/// Softmax of scores times values, one query head at a time, over the rows that the mask shows it.
fn naive(
    q: &[f32],
    k: &Side,
    v: &Side,
    first: usize,
    shape: &AttentionShape,
    sinks: Option<&[f32]>,
) -> Vec<Expected> {
    let mut out = Vec::new();
    for (index, q) in q.chunks(shape.head_dim).enumerate() {
        let (token, query_head) = (index / shape.query_heads, index % shape.query_heads);
        let head = query_head * shape.kv_heads / shape.query_heads;
        let seen = |row: &usize| sees(shape.mask, first + token, *row);
        let rows: Vec<usize> = (0..k.rows()).filter(seen).collect();
        let scale = f64::from(shape.scale);
        let products = |row| q.iter().map(|q| f64::from(*q)).zip(k.head(row, head));
        let capped = |score: f64| match shape.soft_cap.map(f64::from) {
            Some(cap) => cap * (score / cap).tanh(),
            None => score,
        };
        let score = |row: &usize| products(*row).map(|(q, k)| q * k).sum::<f64>() * scale;
        let scores: Vec<f64> = rows.iter().map(score).map(capped).collect();
        let sink = sinks.map(|sinks| f64::from(sinks[query_head]));
        let largest = scores
            .iter()
            .copied()
            .chain(sink)
            .fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 =
            weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
        let absolute = rows
            .iter()
            .map(|row| products(*row).map(|(q, k)| (q * k).abs()).sum::<f64>() * scale)
            .fold(0.0, f64::max);
        // Rounding of f32, and of queries to 8 bits: half a unit of each block's largest / 127. A cap
        // makes errors smaller, and adds those of its own.
        let score_error = match k.element {
            ElementType::Q8_0 | ElementType::Q4_0 | ElementType::Iq4Nl => {
                let most = |row: &usize| {
                    q.chunks(32)
                        .zip(k.head(*row, head).chunks(32))
                        .map(|(q, k)| {
                            let unit =
                                f64::from(q.iter().fold(0.0_f32, |a, q| a.max(q.abs()))) / 127.0;
                            0.5 * unit * k.iter().map(|k| k.abs()).sum::<f64>()
                        })
                        .sum::<f64>()
                        * scale
                };
                rows.iter().map(most).fold(0.0, f64::max) + 4e-7 * absolute
            }
            _ => 4e-7 * absolute,
        } + shape
            .soft_cap
            .map_or(0.0, |cap| 5e-7 * absolute.min(f64::from(cap)));
        for d in 0..shape.value_dim {
            let values = || rows.iter().map(|row| v.head(*row, head)[d]);
            let value: f64 = values().zip(&weights).map(|(v, w)| v * w).sum();
            let largest = values().fold(0.0, |a: f64, v| a.max(v.abs()));
            let bound = |score_error: f64, of_values: f64| {
                largest * ((2.0 * score_error).exp_m1() + of_values)
            };
            let precise = bound(score_error, 1e-6);
            let rounded = match k.element {
                // Keys in integers, and the values with them, are computed the same way.
                ElementType::Q8_0 | ElementType::Q4_0 | ElementType::Iq4Nl => precise,
                // Both factors are rounded to eight binary digits.
                _ => bound(score_error + 0.004 * absolute, 0.004),
            };
            out.push(Expected {
                value: value / sum,
                bounds: [precise, rounded],
            });
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
    attend_with(cpu, q, k, v, first, shape, None)
}

fn attend_with(
    cpu: &Cpu,
    q: &[f32],
    k: &View<'_>,
    v: &View<'_>,
    first: usize,
    shape: &AttentionShape,
    sinks: Option<&[f32]>,
) -> Vec<f32> {
    let tokens = q.len() / (shape.query_heads * shape.head_dim);
    let mut out = vec![f32::NAN; tokens * shape.query_heads * shape.value_dim];
    let mut scratch = vec![0.0; Cpu::attention_scratch_len(tokens, k.rows().end, shape)];
    let cached = Cached {
        k: *k,
        v: *v,
        first_position: first,
        ahead: false,
    };
    cpu.attention_each(&mut out, q, &(tokens, cached), shape, sinks, &mut scratch);
    out
}

fn assert_close(cpu: &Cpu, out: &[f32], expected: &[Expected], case: &str) {
    let level = (cpu.level(), cpu.precision());
    assert_eq!(out.len(), expected.len());
    for (out, Expected { value, bounds }) in out.iter().zip(expected) {
        let bound = bounds[usize::from(cpu.precision() == MatmulPrecision::Bf16)];
        assert!(
            (f64::from(*out) - value).abs() <= bound,
            "{level:?} {case}: {out} is not within {bound} of {value}"
        );
    }
}

/// Checks one case on every level.
fn check(elements: [ElementType; 2], shape: &AttentionShape, tokens: usize, first: usize) {
    check_with(elements, shape, None, tokens, first, first + tokens);
}

/// The same with sinks, where so many rows are held.
fn check_with(
    elements: [ElementType; 2],
    shape: &AttentionShape,
    sinks: Option<&[f32]>,
    tokens: usize,
    first: usize,
    rows: usize,
) {
    let k = Side::random(elements[0], shape, rows, 1);
    let v = Side::random_values(elements[1], shape, rows, 2);
    let q = Random::new(3).units(tokens * shape.query_heads * shape.head_dim);
    let expected = naive(&q, &k, &v, first, shape, sinks);
    for cpu in cpus(2) {
        let out = attend_with(&cpu, &q, &k.view(), &v.view(), first, shape, sinks);
        let case = format!("{shape:?} {elements:?} {tokens} at {first}");
        assert_close(&cpu, &out, &expected, &case);
    }
}

#[test]
fn every_pair_of_element_types_matches_f64() {
    for k in ElementType::ALL {
        for v in ElementType::ALL {
            for (tokens, first) in [(1, 300), (3, 17), (40, 250)] {
                check([k, v], &shape(4, 2, 64), tokens, first);
            }
        }
    }
}

#[test]
fn every_grouping_and_head_dimension_matches_f64() {
    for head_dim in [
        16, 20, 32, 72, 80, 96, 112, 120, 128, 192, 256, 320, 512, 576,
    ] {
        let groups: &[usize] = if head_dim <= 128 {
            &[1, 2, 3, 4, 7, 8]
        } else {
            &[1, 3, 8]
        };
        for &group in groups {
            for element in [
                ElementType::F16,
                ElementType::Q8_0,
                ElementType::Q4_0,
                ElementType::Iq4Nl,
            ] {
                if element.check_head_dim(head_dim).is_ok() {
                    for (tokens, first) in [(1, 0), (1, 257), (9, 250)] {
                        check([element; 2], &shape(2 * group, 2, head_dim), tokens, first);
                    }
                }
            }
        }
    }
}

#[test]
fn many_heads_of_one_query_match_f64() {
    // Each KV head takes a whole tile of packed queries.
    check([ElementType::F16; 2], &shape(96, 96, 80), 1, 40);
    check([ElementType::F32; 2], &shape(192, 64, 128), 1, 20);
}

#[test]
fn latent_rows_match_f64() {
    for element in ElementType::ALL {
        for query_heads in [1, 16, 20] {
            let shape = AttentionShape {
                value_dim: 512,
                ..shape(query_heads, 1, 576)
            };
            for (tokens, first) in [(1, 300), (5, 253)] {
                check([element; 2], &shape, tokens, first);
            }
        }
    }
}

/// Twenty heads that read the same long row, as GLM 4.7 Flash has them: those of three tokens are few enough to
/// read rows as they are stored, but their elements once were more than a worker had room for.
#[test]
fn few_queries_of_long_heads_fit_in_a_task() {
    let shape = AttentionShape {
        value_dim: 512,
        ..shape(20, 1, 576)
    };
    for element in [ElementType::F16, ElementType::Q8_0, ElementType::Iq4Nl] {
        check([element; 2], &shape, 24, 0);
    }
}

#[test]
fn more_queries_of_a_head_than_a_task_holds_match_f64() {
    for (query_heads, kv_heads, element) in [
        (128, 1, ElementType::Q8_0),
        (64, 1, ElementType::F16),
        // A number of heads that can be shared out evenly in parts of 31 only.
        (124, 2, ElementType::F32),
    ] {
        let shape = shape(query_heads, kv_heads, 576);
        for (tokens, first) in [(1, 257), (2, 40)] {
            check([element; 2], &shape, tokens, first);
        }
    }
}

#[test]
fn heads_that_share_a_row_give_the_same_in_any_parts() {
    for (query_heads, tokens) in [(16, 1), (20, 2), (64, 1)] {
        let shape = AttentionShape {
            value_dim: 64,
            ..shape(query_heads, 1, 96)
        };
        let k = Side::random(ElementType::F16, &shape, 600, 1);
        let v = Side::random_values(ElementType::F16, &shape, 600, 2);
        let q = Random::new(3).units(tokens * query_heads * 96);
        for first in [40, 599 - tokens] {
            let of = |threads| {
                let cpu = cpu(Level::Portable, threads);
                attend(&cpu, &q, &k.view(), &v.view(), first, &shape)
            };
            let alone = of(1);
            for threads in [2, 5] {
                assert!(
                    of(threads) == alone,
                    "{query_heads} heads, {threads} threads"
                );
            }
        }
    }
}

#[test]
fn values_that_begin_keys_are_as_good_as_values_of_their_own() {
    let shape = AttentionShape {
        value_dim: 64,
        ..shape(6, 2, 96)
    };
    let rows = 300;
    let x = Random::new(1).units(rows * 2 * 96);
    // In an element of a value: it is infinite when it is rounded, or already as it is stored.
    let mut large = x.clone();
    large[297 * 2 * 96 + 5] = f32::MAX;
    for (element, x) in ElementType::ALL
        .iter()
        .flat_map(|e| [(*e, &x), (*e, &large)])
    {
        let k = Side::of(element, 2, 96, x);
        let (head, part) = (element.bytes(96), element.bytes(64));
        let own: Vec<u8> = k
            .bytes
            .chunks(head)
            .flat_map(|head| &head[..part])
            .copied()
            .collect();
        let own = View::flat(element, 2, 64, &own);
        let layout = RowLayout {
            head_dim: 64,
            ..RowLayout::token_major(element, 2, 96)
        };
        // The same rows in one run and in several, of which the second one's values lie elsewhere.
        let (cut, elsewhere) = (100, k.bytes.clone());
        let run = |rows: Range<usize>| Run {
            start_row: rows.start,
            rows: rows.len(),
            bytes: &k.bytes[rows.start * 2 * head..],
        };
        let rest = [Run {
            bytes: &elsewhere[cut * 2 * head..],
            ..run(cut..rows)
        }];
        let whole = View::from_runs(layout, run(0..rows), &[]);
        let apart = View::from_runs(layout, run(0..cut), &rest);
        for tokens in [1, 4, 20] {
            let q = Random::new(3).units(tokens * 6 * 96);
            for cpu in cpus(1).chain(cpus(2)) {
                let level = (cpu.level(), cpu.precision());
                let first = rows - tokens;
                let bits = |out: Vec<f32>| out.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                let expected = attend(&cpu, &q, &k.view(), &own, first, &shape);
                // Whoever does not see the row knows nothing of it.
                let seen = expected.len() - 6 * 64 * tokens.min(3);
                assert!(expected[..seen].iter().all(|x| x.is_finite()), "{level:?}");
                let expected = bits(expected);
                for begins in [&whole, &apart] {
                    let begins = begins.as_ref().expect("rows that are there");
                    let found = bits(attend(&cpu, &q, &k.view(), begins, first, &shape));
                    assert!(found == expected, "{level:?} {element:?} {tokens}");
                }
            }
        }
    }
}

#[test]
fn masks_match_f64_and_touch_no_row_that_they_hide() {
    let masks = [
        (window(1), 3, 40),
        (window(20), 1, 300),
        (window(16), 70, 250),
        (window(256), 30, 511),
        (chunk(1), 3, 40),
        (chunk(20), 1, 300),
        (chunk(64), 70, 250),
        (chunk(256), 30, 500),
        (chunk(300), 1, 599),
        (chunk(300), 1, 600),
    ];
    for element in ElementType::ALL {
        for (mask, tokens, first) in masks {
            let shape = masked(shape(6, 2, 32), mask);
            check([element; 2], &shape, tokens, first);
            // Rows that the first query does not see are not there.
            let rows = first + tokens;
            let k = Side::random(element, &shape, rows, 1);
            let v = Side::random(element, &shape, rows, 2);
            let q = Random::new(3).units(tokens * 6 * 32);
            let start = mask.first_row(first);
            let (k_held, v_held) = (k.held_from(start), v.held_from(start));
            let (k_view, v_view) = (k.view_from(start, &k_held), v.view_from(start, &v_held));
            for cpu in cpus(1).chain(cpus(2)) {
                let level = (cpu.level(), cpu.precision());
                let all = attend(&cpu, &q, &k.view(), &v.view(), first, &shape);
                let out = attend(&cpu, &q, &k_view, &v_view, first, &shape);
                assert_eq!(out, all, "{level:?} {element:?} {mask:?}");
            }
        }
    }
}

#[test]
fn queries_that_look_ahead_match_f64() {
    for element in ElementType::ALL {
        for (tokens, first, rows) in [(40, 0, 40), (1, 0, 300), (300, 0, 300), (30, 250, 600)] {
            for mask in [
                Mask::Full,
                Mask::Around(0),
                Mask::Around(5),
                Mask::Around(64),
                Mask::Around(1000),
            ] {
                let shape = masked(shape(6, 3, 32), mask);
                check_with([element; 2], &shape, None, tokens, first, rows);
            }
        }
    }
}

#[test]
fn values_may_be_wider_or_narrower_than_keys() {
    for (head_dim, value_dim) in [
        (96, 64),
        (192, 128),
        (64, 128),
        (64, 72),
        (72, 64),
        (32, 512),
    ] {
        for elements in PAIRS {
            if elements[0].check_head_dim(head_dim).is_err()
                || elements[1].check_head_dim(value_dim).is_err()
            {
                continue;
            }
            for shape in [shape(4, 2, head_dim), windowed(shape(9, 3, head_dim), 100)] {
                let shape = AttentionShape { value_dim, ..shape };
                for (tokens, first) in [(1, 600), (40, 250)] {
                    check(elements, &shape, tokens, first);
                }
            }
        }
    }
}

/// Shapes whose scores reach their caps, and sinks from what takes nothing to what takes all.
fn capped_shapes() -> [AttentionShape; 3] {
    let scaled = |shape: AttentionShape| AttentionShape {
        scale: 1.0,
        ..shape
    };
    [
        AttentionShape {
            soft_cap: Some(3.0),
            ..scaled(shape(8, 2, 64))
        },
        AttentionShape {
            soft_cap: Some(3.0),
            ..masked(scaled(shape(6, 6, 32)), chunk(100))
        },
        AttentionShape {
            soft_cap: Some(50.0),
            ..windowed(scaled(shape(8, 1, 72)), 300)
        },
    ]
}

const SINKS: [f32; 8] = [0.0, 3.0, -2.0, 20.0, -100.0, 1.0, f32::NEG_INFINITY, 5.0];

#[test]
fn soft_caps_and_sinks_match_f64() {
    for shape in capped_shapes() {
        let uncapped = AttentionShape {
            soft_cap: None,
            ..shape
        };
        for elements in PAIRS {
            if elements[0].check_head_dim(shape.head_dim).is_err() {
                continue;
            }
            let sinks = &SINKS[..shape.query_heads];
            for (tokens, first) in [(1, 0), (1, 600), (40, 250)] {
                let rows = first + tokens;
                check_with(elements, &shape, None, tokens, first, rows);
                check_with(elements, &shape, Some(sinks), tokens, first, rows);
                check_with(elements, &uncapped, Some(sinks), tokens, first, rows);
            }
        }
    }
}

#[test]
fn a_sink_that_takes_nothing_changes_nothing() {
    let shape = shape(4, 2, 64);
    for [k, v] in PAIRS {
        let k = Side::random(k, &shape, 600, 1);
        let v = Side::random(v, &shape, 600, 2);
        for (tokens, first) in [(1, 599), (40, 560)] {
            let q = Random::new(3).units(tokens * 256);
            for cpu in cpus(2) {
                let level = (cpu.level(), cpu.precision());
                let (k, v) = (k.view(), v.view());
                let none = attend(&cpu, &q, &k, &v, first, &shape);
                let sinks = Some(&[f32::NEG_INFINITY, -1e30, -200.0, f32::NEG_INFINITY][..]);
                let out = attend_with(&cpu, &q, &k, &v, first, &shape, sinks);
                assert_eq!(out, none, "{level:?}");
            }
        }
    }
}

#[test]
fn a_window_that_holds_all_rows_changes_nothing() {
    let shape = shape(4, 2, 32);
    let k = Side::random(ElementType::F16, &shape, 600, 1);
    let v = Side::random(ElementType::F16, &shape, 600, 2);
    for (tokens, first) in [(1, 599), (40, 560)] {
        let q = Random::new(3).units(tokens * 128);
        for cpu in cpus(2) {
            let full = attend(&cpu, &q, &k.view(), &v.view(), first, &shape);
            let shape = windowed(shape, 600);
            let out = attend(&cpu, &q, &k.view(), &v.view(), first, &shape);
            assert_eq!(out, full);
        }
    }
}

/// Types of K and V that take all the ways there are through the kernels.
const PAIRS: [[ElementType; 2]; 5] = [
    [ElementType::F32, ElementType::Bf16],
    [ElementType::F16, ElementType::F16],
    [ElementType::Q8_0, ElementType::Q4_0],
    [ElementType::Q4_0, ElementType::Q8_0],
    [ElementType::Iq4Nl, ElementType::Iq4Nl],
];

#[test]
fn a_query_does_not_depend_on_its_batch_or_on_threads() {
    let shapes = [
        shape(4, 2, 160),
        shape(8, 1, 20),
        shape(8, 2, 96),
        shape(7, 1, 64),
        windowed(shape(5, 5, 96), 300),
        windowed(shape(6, 2, 32), 20),
        masked(shape(6, 2, 32), chunk(70)),
        masked(shape(4, 2, 64), Mask::Full),
        masked(shape(4, 2, 64), Mask::Around(90)),
        AttentionShape {
            value_dim: 96,
            ..windowed(shape(4, 2, 64), 300)
        },
    ];
    for shape in shapes.into_iter().chain(capped_shapes()) {
        let sinks = shape.soft_cap.map(|_| &SINKS[..shape.query_heads]);
        let rows = 600;
        for [k, v] in PAIRS {
            if k.check_head_dim(shape.head_dim).is_err() {
                continue;
            }
            let k = Side::random(k, &shape, rows, 4);
            let v = Side::random_values(v, &shape, rows, 5);
            let per_token = shape.query_heads * shape.head_dim;
            let out_per_token = shape.query_heads * shape.value_dim;
            let q = Random::new(6).units(rows * per_token);
            for (index, single) in cpus(1).enumerate() {
                let level = (single.level(), single.precision());
                let whole = attend_with(&single, &q, &k.view(), &v.view(), 0, &shape, sinks);
                for threads in [1, 2, 3] {
                    let cpu = cpus(threads).nth(index).expect("as many of each");
                    for (first, tokens) in [
                        (0, 1),
                        (255, 2),
                        (256, 1),
                        (511, 7),
                        (300, 70),
                        (587, 1),
                        (599, 1),
                    ] {
                        let q = &q[first * per_token..(first + tokens) * per_token];
                        let part = first * out_per_token..(first + tokens) * out_per_token;
                        let (k, v) = (k.view(), v.view());
                        let out = attend_with(&cpu, q, &k, &v, first, &shape, sinks);
                        let case = format!("{level:?} {shape:?} {tokens} at {first}");
                        assert_eq!(out, whole[part], "{case}");
                    }
                }
            }
        }
    }
}

/// Sequences of one cache: where the queries of each begin in it, and how many they are.
struct Together<'a> {
    k: &'a Side,
    v: &'a Side,
    at: &'a [(usize, usize)],
}

impl Sequences for Together<'_> {
    fn count(&self) -> usize {
        self.at.len()
    }

    fn tokens(&self, index: usize) -> usize {
        self.at[index].1
    }

    fn cached(&self, index: usize) -> Cached<'_> {
        Cached {
            k: self.k.view(),
            v: self.v.view(),
            first_position: self.at[index].0,
            ahead: false,
        }
    }
}

#[test]
fn sequences_together_are_what_each_is_alone() {
    let mixed = [
        vec![(0, 1); 3],
        vec![(40, 1), (590, 1), (0, 1), (255, 1), (256, 1)],
        // One that takes longer than all others, prompts, and a sequence of nothing.
        [vec![(599, 1), (3, 70), (9, 0)], vec![(7, 1); 40]].concat(),
        (0..30)
            .map(|i| (17 * i, 1 + usize::from(i == 20)))
            .collect(),
        // Short ones of several queries, which tasks cut in two where rows end, beside others.
        (0..50).map(|i| (5 * i % 60, i % 9)).collect(),
        [vec![(2, 90), (400, 1)], vec![(11, 20); 12]].concat(),
        vec![],
    ];
    let shapes = [
        shape(4, 2, 64),
        windowed(shape(6, 2, 32), 20),
        masked(shape(6, 2, 32), chunk(50)),
        masked(shape(6, 6, 32), Mask::Full),
        AttentionShape {
            value_dim: 32,
            soft_cap: Some(1.0),
            ..windowed(shape(4, 2, 64), 300)
        },
    ];
    for shape in shapes {
        let sinks = shape.soft_cap.map(|_| &SINKS[..shape.query_heads]);
        let k = Side::random(ElementType::Q8_0, &shape, 600, 4);
        let v = Side::random_values(ElementType::F16, &shape, 600, 5);
        let width = shape.query_heads * shape.head_dim;
        let out_width = shape.query_heads * shape.value_dim;
        for at in &mixed {
            let tokens: usize = at.iter().map(|of| of.1).sum();
            let q = Random::new(6).units(tokens * width);
            let together = Together { k: &k, v: &v, at };
            for cpu in cpus(1).chain(cpus(2)).chain(cpus(3)) {
                let (level, threads) = ((cpu.level(), cpu.precision()), cpu.threads());
                let mut out = vec![f32::NAN; tokens * out_width];
                let mut scratch = vec![0.0; Cpu::attention_scratch_len(1, 600, &shape)];
                cpu.attention_each(&mut out, &q, &together, &shape, sinks, &mut scratch);
                let mut rest = (&*q, &*out);
                for (first, tokens) in at {
                    let (q, later_q) = rest.0.split_at(tokens * width);
                    let (out, later) = rest.1.split_at(tokens * out_width);
                    let (k, v) = (k.view(), v.view());
                    let alone = attend_with(&cpu, q, &k, &v, *first, &shape, sinks);
                    assert_eq!(out, alone, "{level:?}, {threads} threads, {at:?}");
                    rest = (later_q, later);
                }
            }
        }
    }
}

/// Sequences of one query each, with rows of their own behind those that some have in common.
struct Apart<'a> {
    sides: &'a [[Side; 2]],
    positions: &'a [usize],
    shared: &'a [SharedRows],
}

impl Sequences for Apart<'_> {
    fn count(&self) -> usize {
        self.positions.len()
    }

    fn tokens(&self, _: usize) -> usize {
        1
    }

    fn cached(&self, index: usize) -> Cached<'_> {
        let [k, v] = &self.sides[index];
        Cached {
            k: k.view(),
            v: v.view(),
            first_position: self.positions[index],
            ahead: false,
        }
    }

    fn shared(&self) -> &[SharedRows] {
        self.shared
    }
}

#[test]
fn rows_that_sequences_have_in_common_are_gone_through_once_with_the_same_result() {
    let positions = [520, 700, 1023, 512, 300, 40, 799, 1000, 600, 1100];
    let of = |rows, sequences: &[usize]| SharedRows {
        sequences: sequences.to_vec(),
        rows,
    };
    let groups = [
        vec![of(512, &[0, 1, 2, 3, 6, 7, 8, 9])],
        // What is left of a partition is each one's own.
        vec![of(300, &[2, 4]), of(599, &[1, 6, 7, 8])],
        // Less than a partition, and nobody to share with.
        vec![of(40, &[5, 9]), of(768, &[7])],
        vec![of(256, &[0, 4]), of(512, &[1, 3]), of(600, &[2, 6, 9])],
    ];
    let shapes = [
        shape(4, 2, 64),
        shape(7, 1, 64),
        shape(8, 2, 96),
        windowed(shape(4, 2, 64), 300),
        AttentionShape {
            value_dim: 32,
            soft_cap: Some(1.0),
            ..shape(4, 2, 64)
        },
    ];
    for (shape, [key, value]) in shapes.into_iter().flat_map(|s| PAIRS.map(|pair| (s, pair))) {
        let sinks = shape.soft_cap.map(|_| &SINKS[..shape.query_heads]);
        let sides: Vec<[Side; 2]> = (0..positions.len() as u64)
            .map(|index| {
                let k = Side::random(key, &shape, 1101, 10 + index);
                [k, Side::random_values(value, &shape, 1101, 40 + index)]
            })
            .collect();
        let width = shape.query_heads * shape.head_dim;
        let q = Random::new(6).units(positions.len() * width);
        for shared in &groups {
            // In the first rows the members of a group are the first of them, as if they had its memory. Behind them, and
            // in those who are not members, a wrong row is another number.
            let unlike = &sides;
            let mut sides = sides.clone();
            for group in shared {
                let first = sides[group.sequences[0]].clone();
                for member in &group.sequences {
                    for (side, first) in sides[*member].iter_mut().zip(&first) {
                        side.begin_like(first, group.rows);
                    }
                }
            }
            let [apart, together] = [&[][..], shared].map(|shared| Apart {
                sides: &sides,
                positions: &positions,
                shared,
            });
            for cpu in cpus(1).chain(cpus(2)).chain(cpus(3)) {
                let (level, threads) = ((cpu.level(), cpu.precision()), cpu.threads());
                let attend = |sequences: &Apart<'_>, scratch: usize| {
                    let mut out =
                        vec![f32::NAN; positions.len() * shape.query_heads * shape.value_dim];
                    let mut scratch = vec![f32::NAN; scratch];
                    cpu.attention_each(&mut out, &q, sequences, &shape, sinks, &mut scratch);
                    out
                };
                let whole = Cpu::attention_scratch_len(8, 1101, &shape);
                let expected = attend(&apart, whole);
                // Rows of whole partitions are read where the first member has them, and nowhere else.
                let whole_partitions = shared.iter().all(|group| group.rows % 256 == 0);
                if shape.mask == Mask::Causal && whole_partitions {
                    let elsewhere = Apart {
                        sides: unlike,
                        ..together
                    };
                    let case = format!("{level:?}, {threads} threads, {shape:?}, {shared:?}");
                    assert_eq!(attend(&elsewhere, 4 * whole), expected, "{case}");
                }
                // With room for all, for some of them, and for none.
                for scratch in [4 * whole, whole, 12 * width, 0] {
                    let case =
                        format!("{level:?}, {threads} threads, {shape:?}, {shared:?}, {scratch}");
                    assert_eq!(attend(&together, scratch), expected, "{case}");
                }
            }
        }
    }
}

#[test]
fn less_scratch_gives_the_same_result() {
    let shape = shape(4, 2, 32);
    let k = Side::random(ElementType::F16, &shape, 700, 1);
    let v = Side::random(ElementType::F16, &shape, 700, 2);
    let q = Random::new(3).units(4 * 128);
    for cpu in cpus(2) {
        let mut out = vec![0.0; 4 * 128];
        cpu.attention(&mut out, &q, &k.view(), &v.view(), 696, &shape, &mut []);
        assert_eq!(out, attend(&cpu, &q, &k.view(), &v.view(), 696, &shape));
    }
}

/// The bytes of rows, arranged by a layout; what is between them is 255, which is not a number.
fn arranged(side: &Side, layout: &RowLayout) -> Vec<u8> {
    let rows = side.rows();
    let flat = side.view();
    let size = rows * layout.row_stride.max(layout.heads * layout.head_bytes())
        + layout.heads * layout.head_stride;
    let mut bytes = vec![255; size];
    for row in 0..rows {
        for head in 0..side.heads {
            let start = row * layout.row_stride + head * layout.head_stride;
            bytes[start..start + layout.head_bytes()].copy_from_slice(flat.head(row, head));
        }
    }
    bytes
}

#[test]
fn every_layout_equals_a_flat_range() {
    let shape = shape(6, 3, 32);
    let rows = 333;
    for element in ElementType::ALL {
        let k = Side::random(element, &shape, rows, 8);
        let v = Side::random(element, &shape, rows, 9);
        let q = Random::new(10).units(30 * 192);
        let packed = RowLayout::token_major(element, 3, 32);
        let layouts = [
            RowLayout::head_major(element, 3, 32, rows + 3),
            RowLayout {
                row_stride: 4 * packed.row_stride,
                ..packed
            },
            RowLayout {
                row_stride: 5 * packed.row_stride,
                head_stride: 2 * packed.head_stride,
                ..packed
            },
        ];
        for layout in layouts {
            let (k_bytes, v_bytes) = (arranged(&k, &layout), arranged(&v, &layout));
            let view = |bytes| {
                let run = Run {
                    start_row: 0,
                    rows,
                    bytes,
                };
                View::from_runs(layout, run, &[]).expect("enough bytes")
            };
            for cpu in cpus(2) {
                let level = (cpu.level(), cpu.precision());
                for tokens in [1, 30] {
                    let (first, q) = (rows - tokens, &q[..tokens * 192]);
                    let flat = attend(&cpu, q, &k.view(), &v.view(), first, &shape);
                    let out = attend(&cpu, q, &view(&k_bytes), &view(&v_bytes), first, &shape);
                    assert_eq!(out, flat, "{level:?} {layout:?}");
                }
            }
        }
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
    let shape = shape(4, 2, 64);
    let rows = 333;
    for [k_element, v_element] in PAIRS {
        let k = Side::random(k_element, &shape, rows, 8);
        let v = Side::random(v_element, &shape, rows, 9);
        let q = Random::new(10).units(25 * 256);
        for rows_per_run in [1, 7, 16, 100] {
            let pieces = |side: &Side| {
                let row_bytes = side.element.bytes(128);
                (
                    reversed_pieces(&side.bytes, rows_per_run * row_bytes),
                    row_bytes,
                )
            };
            let ((k_pieces, k_bytes), (v_pieces, v_bytes)) = (pieces(&k), pieces(&v));
            let (k_runs, v_runs) = (runs(&k_pieces, k_bytes), runs(&v_pieces, v_bytes));
            let view = |element, runs: &[Run<'_>]| {
                let layout = RowLayout::token_major(element, 2, 64);
                View::from_runs(layout, runs[0], &runs[1..]).map(|view| view.rows())
            };
            assert_eq!(view(k_element, &k_runs), Ok(0..rows));
            let layout = |element| RowLayout::token_major(element, 2, 64);
            let k_view = View::from_runs(layout(k_element), k_runs[0], &k_runs[1..]);
            let v_view = View::from_runs(layout(v_element), v_runs[0], &v_runs[1..]);
            let (k_view, v_view) = (k_view.expect("no gaps"), v_view.expect("no gaps"));
            for cpu in cpus(2) {
                let level = (cpu.level(), cpu.precision());
                for tokens in [1, 25] {
                    let (first, q) = (rows - tokens, &q[..tokens * 256]);
                    let flat = attend(&cpu, q, &k.view(), &v.view(), first, &shape);
                    let out = attend(&cpu, q, &k_view, &v_view, first, &shape);
                    assert_eq!(out, flat, "{level:?} {k_element} runs of {rows_per_run}");
                }
            }
        }
    }
}

#[test]
fn uniform_attention_over_many_rows_of_ones_is_one() {
    let shape = shape(2, 1, 64);
    let rows = 32_768;
    for element in ElementType::ALL {
        let ones = Side::of(element, 1, 64, &[1.0; 64]).bytes.repeat(rows);
        let zeros = Side::of(element, 1, 64, &[0.0; 64]).bytes.repeat(rows);
        let (k, v) = (
            View::flat(element, 1, 64, &zeros),
            View::flat(element, 1, 64, &ones),
        );
        for cpu in cpus(2) {
            for tokens in [1, 2, 8, 33] {
                let q = Random::new(1).units(tokens * 128);
                let out = attend(&cpu, &q, &k, &v, rows - tokens, &shape);
                let level = (cpu.level(), cpu.precision());
                assert!(
                    out.iter().all(|x| (x - 1.0).abs() < 1e-3),
                    "{level:?} {element:?} {tokens}: {}",
                    out[0]
                );
            }
        }
    }
}

#[test]
fn rows_behind_a_query_are_never_read_into_it() {
    let shape = shape(4, 2, 32);
    for element in [
        ElementType::F32,
        ElementType::Q8_0,
        ElementType::Q4_0,
        ElementType::Iq4Nl,
    ] {
        let clean = [1, 2].map(|seed| Side::random(element, &shape, 40, seed));
        let q = Random::new(3).units(20 * 128);
        // Rows are multiplied two at a time where that is faster.
        for first in [10, 11] {
            // All ones are not a number, as f32 and as the scale of a block.
            let dirty = clean.clone().map(|mut side| {
                side.bytes[first * element.bytes(64)..].fill(255);
                side
            });
            for cpu in cpus(2) {
                let attend = |tokens: usize, [k, v]: &[Side; 2]| {
                    attend(&cpu, &q[..tokens * 128], &k.view(), &v.view(), 0, &shape)
                };
                let out = attend(20, &dirty);
                assert_eq!(out[..first * 128], attend(first, &clean));
                assert!(out[first * 128..].iter().all(|x| x.is_nan()));
                // Each for itself.
                for token in [first - 1, first] {
                    let [k, v] = &dirty;
                    let q = &q[token * 128..(token + 1) * 128];
                    let alone = attend_with(&cpu, q, &k.view(), &v.view(), token, &shape, None);
                    let together = &out[token * 128..(token + 1) * 128];
                    assert!(
                        alone
                            .iter()
                            .zip(together)
                            .all(|(a, b)| a == b || a.is_nan() && b.is_nan())
                    );
                }
            }
        }
    }
}

#[test]
fn extreme_scores_are_finite_and_infinite_ones_do_not_hang() {
    let shape = AttentionShape {
        scale: 1.0,
        ..shape(2, 1, 32)
    };
    for element in [ElementType::F32, ElementType::Bf16] {
        let rows = |x: [f32; 4]| -> Vec<f32> { x.iter().flat_map(|x| [*x; 32]).collect() };
        let k = Side::of(element, 1, 32, &rows([1e15, -1e15, 0.0, 1e15]));
        let v = Side::of(element, 1, 32, &rows([1.0, 2.0, 3.0, 5.0]));
        for cpu in cpus(2) {
            let out = attend(&cpu, &[1e4; 64], &k.view(), &v.view(), 3, &shape);
            assert!(
                out.iter().all(|x| (x - 3.0).abs() < 1e-5),
                "the two largest share: {out:?}"
            );
        }
    }
    for element in ElementType::ALL {
        let k = Side::random(element, &shape, 300, 1);
        let v = Side::random(element, &shape, 300, 2);
        for cpu in cpus(2) {
            let level = (cpu.level(), cpu.precision());
            for extreme in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                for tokens in [1, 20] {
                    let q = vec![extreme; tokens * 64];
                    let out = attend(&cpu, &q, &k.view(), &v.view(), 300 - tokens, &shape);
                    assert!(out.iter().all(|x| !x.is_finite()), "{level:?} {element}");
                }
            }
        }
    }
}

#[test]
fn a_value_that_is_infinite_when_it_is_rounded_is_none_of_queries_that_do_not_see_it() {
    let shape = shape(4, 2, 32);
    let (rows, hidden) = (300, 290);
    let x = Random::new(1).units(rows * 64);
    let k = Side::of(ElementType::F32, 2, 32, &x);
    let clean = Side::of(ElementType::F32, 2, 32, &x);
    // The largest number is finite, and larger than any of 16 bits. In one element of a head.
    let mut x = x;
    x[hidden * 64 + 5] = f32::MAX;
    let large = Side::of(ElementType::F32, 2, 32, &x);
    for cpu in cpus(2) {
        let level = (cpu.level(), cpu.precision());
        // As many as are multiplied as stored, and more.
        for tokens in [8, 20] {
            let first = rows - tokens;
            let q = Random::new(3).units(tokens * 128);
            let with = attend(&cpu, &q, &k.view(), &large.view(), first, &shape);
            let without = attend(&cpu, &q, &k.view(), &clean.view(), first, &shape);
            for token in 0..tokens {
                let of = |out: &[f32]| out[token * 128..(token + 1) * 128].to_vec();
                let query = &q[token * 128..(token + 1) * 128];
                let (large, position) = (large.view(), first + token);
                let alone = attend(&cpu, query, &k.view(), &large, position, &shape);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(
                    bits(&of(&with)),
                    bits(&alone),
                    "{level:?} {token} of {tokens}"
                );
                let sees = position >= hidden;
                assert_eq!(
                    of(&with) == of(&without),
                    !sees,
                    "{level:?} {token} of {tokens}"
                );
            }
        }
    }
}

#[test]
fn what_is_not_finite_in_the_cache_is_not_finite_in_the_result() {
    let shape = shape(4, 2, 32);
    for element in ElementType::ALL {
        for extreme in [f32::INFINITY, f32::NAN] {
            let mut x = Random::new(1).units(300 * 64);
            let clean = Side::of(element, 2, 32, &x);
            x[280 * 64..281 * 64].fill(extreme);
            let dirty = Side::of(element, 2, 32, &x);
            for cpu in cpus(2) {
                let level = (cpu.level(), cpu.precision());
                for (k, v) in [(&dirty, &clean), (&clean, &dirty)] {
                    for tokens in [1, 15] {
                        let q = Random::new(3).units(tokens * 128);
                        let out = attend(&cpu, &q, &k.view(), &v.view(), 300 - tokens, &shape);
                        let finite = out.iter().filter(|x| x.is_finite()).count();
                        assert_eq!(finite, 0, "{level:?} {element} {extreme} {tokens}");
                    }
                }
            }
        }
    }
}

#[test]
fn outliers_stay_within_the_bound() {
    let shape = shape(4, 2, 64);
    for element in ElementType::ALL {
        let mut x = Random::new(1).units(300 * 128);
        x.iter_mut().step_by(37).for_each(|x| *x *= 30.0);
        let (k, v) = (Side::of(element, 2, 64, &x), Side::of(element, 2, 64, &x));
        let mut q = Random::new(3).units(12 * 256);
        q.iter_mut().step_by(41).for_each(|q| *q *= 10.0);
        let expected = naive(&q, &k, &v, 288, &shape, None);
        for cpu in cpus(2) {
            let out = attend(&cpu, &q, &k.view(), &v.view(), 288, &shape);
            assert_close(&cpu, &out, &expected, element.name());
        }
    }
}
