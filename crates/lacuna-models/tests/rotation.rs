//! Rows of element types that have one scale for a block of elements: they are stored transformed, and what is computed
//! with them is as if they were not.

mod runner;

use std::num::NonZeroUsize;

use lacuna_kernels::ElementType;
use lacuna_kv::{
    Geometry, Keep, KeySmoothing, KvElements, KvPolicy, Layer, LayerCache, RowSpec, Sequence, Side,
    SmoothedKeys, ValueRows,
};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::{BatchLimits, LogitRows, Model, Scratch, Segment, demo};
use runner::{Runner, TOKENS};

const BLOCKS: [ElementType; 3] = [ElementType::Q8_0, ElementType::Q4_0, ElementType::Iq4Nl];

fn runner(element: ElementType, threads: usize) -> Runner {
    let model = Model::load(demo()).expect("the demo model loads");
    Runner::of(model, KvPolicy::default(), element, threads, TOKENS)
}

/// The same whose keys are stored smoothed, by what passes of `chunk` tokens show of them.
fn smoothed(threads: usize, chunk: usize) -> Runner {
    let mut runner = runner(ElementType::Q4_0, threads);
    let limits = BatchLimits {
        tokens: chunk,
        logit_rows: 1,
        ..runner.scratch.limits()
    };
    let (model, cpu) = (&runner.model, &runner.cpu);
    let plan = ArenaPlan::new(model.program(), limits).expect("small");
    let mut scratch = Scratch::new(model.program(), plan).expect("a few kilobytes");
    let cache = runner.cache.clone();
    let smoothed = model.smooth_keys(cpu, cache, limits.context_tokens, &mut scratch);
    runner.cache = smoothed.expect("valid tokens");
    runner
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|index| 300 + index * 37 % 200).collect()
}

/// The heads of a row of the first layer, one after the other.
fn row(sequence: &Sequence, side: Side, row: usize) -> Vec<u8> {
    let view = sequence.view(Layer(0), side);
    let heads = 0..view.layout().heads;
    heads
        .flat_map(|head| view.head(row, head).to_vec())
        .collect()
}

#[test]
fn what_is_stored_of_a_head_is_its_hadamard_transform() {
    let tokens = tokens(40);
    let mut plain = runner(ElementType::F32, 1);
    let mut exact = plain.sequence();
    plain.extend(&mut exact, &tokens);
    let spec = exact
        .geometry()
        .rows(Layer(0))
        .expect("a layer with rows")
        .1;
    for element in BLOCKS {
        let mut runner = runner(element, 1);
        let mut sequence = runner.sequence();
        runner.extend(&mut sequence, &tokens);
        for (side, head_dim) in [(Side::Key, spec.key_dim), (Side::Value, spec.value_dim)] {
            let block = NonZeroUsize::new(1 << head_dim.trailing_zeros());
            assert_eq!(sequence.geometry().rotation(Layer(0), side), block);
            assert_eq!(exact.geometry().rotation(Layer(0), side), None);
            for token in 0..tokens.len() {
                // No attention comes before the rows of the first layer: they are the same but for how they are stored.
                let bytes = row(&exact, side, token);
                let bytes = bytes.as_chunks().0.iter();
                let mut x: Vec<f32> = bytes.map(|x| f32::from_le_bytes(*x)).collect();
                runner.cpu.hadamard(&mut x, 1 << head_dim.trailing_zeros());
                let mut expected = vec![0; element.bytes(x.len())];
                runner.cpu.store_rows(element, &mut expected, &x);
                assert!(
                    row(&sequence, side, token) == expected,
                    "{element} {side:?} {token}"
                );
            }
        }
    }
}

#[test]
fn blocks_are_those_of_the_side_that_is_stored_and_of_the_layer_that_is_read() {
    let rows = |key_dim, value_dim, values, keep| {
        LayerCache::Rows(RowSpec {
            kv_heads: 2,
            key_dim,
            value_dim,
            values,
            keep,
        })
    };
    let window = Keep::Window(NonZeroUsize::new(512).expect("some"));
    let layers = vec![
        rows(192, 128, ValueRows::Apart, window),
        rows(576, 512, ValueRows::InKeys, Keep::All),
        LayerCache::Of(Layer(0)),
        LayerCache::None,
    ];
    let elements = KvElements {
        key: ElementType::Q8_0,
        value: ElementType::F16,
    };
    let geometry = Geometry::new(layers, elements).expect("whole blocks");
    for (layer, expected) in [
        (0, [64, 0]),
        // Values that are part of keys are transformed back as the part they are, whatever they are to be stored in.
        (1, [64, 64]),
        (2, [64, 0]),
        (3, [0, 0]),
    ] {
        let found = Side::BOTH.map(|side| geometry.rotation(Layer(layer), side));
        assert_eq!(found, expected.map(NonZeroUsize::new), "layer {layer}");
    }
}

#[test]
fn the_first_elements_of_a_latent_row_are_transformed_back_alone() {
    let cpu = runner(ElementType::F32, 1).cpu;
    // Whole numbers, and a block whose root is a power of two: every step is exact.
    let row: Vec<f32> = (0..576_u16).map(|i| f32::from(i * 37 % 101)).collect();
    let mut stored = row.clone();
    cpu.hadamard(&mut stored, 64);
    assert!(stored[..512] != row[..512]);
    let values = &mut stored[..512];
    cpu.hadamard(values, 64);
    assert!(*values == row[..512]);
}

/// How far some logits are from others, relative to how far these are from their mean.
fn distance(found: &[f32], exact: &[f32]) -> f32 {
    let mean = exact.iter().sum::<f32>() / exact.len() as f32;
    let squares = |of: &mut dyn Iterator<Item = f32>| of.map(|x| x * x).sum::<f32>();
    let error = squares(&mut found.iter().zip(exact).map(|(a, b)| a - b));
    (error / squares(&mut exact.iter().map(|x| x - mean))).sqrt()
}

#[test]
fn queries_and_what_is_attended_to_are_transformed_as_well() {
    let tokens = tokens(100);
    let exact = runner(ElementType::F32, 1).logits(&tokens);
    for (element, most) in [
        (ElementType::Q8_0, 0.02),
        (ElementType::Q4_0, 0.2),
        (ElementType::Iq4Nl, 0.2),
    ] {
        let found = runner(element, 1).logits(&tokens);
        let distance = distance(&found, &exact);
        assert!(distance > 0.0 && distance < most, "{element}: {distance}");
    }
}

#[test]
fn chunks_threads_and_batches_do_not_change_a_bit() {
    let tokens = tokens(60);
    let runners = BLOCKS.map(|element| (runner(element, 2), runner(element, 1)));
    let runners = runners
        .into_iter()
        .chain([(smoothed(2, 64), smoothed(1, 64))]);
    for (mut threaded, mut runner) in runners {
        let element = runner.cache.geometry().element(Side::Key);
        let whole = threaded.logits(&tokens);
        assert!(runner.logits(&tokens) == whole, "{element}, threads");
        for chunk in [1, 7] {
            let mut sequence = runner.sequence();
            let chunks = tokens.chunks(chunk);
            let pieces: Vec<f32> = chunks
                .flat_map(|chunk| runner.extend(&mut sequence, chunk))
                .collect();
            assert!(pieces == whole, "{element} in chunks of {chunk}");
        }
        let vocabulary = runner.model.spec().vocabulary;
        let last = &whole[whole.len() - vocabulary..];
        let mut sequences = [(); 3].map(|()| runner.sequence());
        for sequence in &mut sequences[..2] {
            runner.extend(sequence, &tokens[..59]);
        }
        let news = [&tokens[59..], &tokens[59..], &tokens[..]];
        let mut segments: Vec<Segment<'_>> = sequences
            .iter_mut()
            .zip(news)
            .map(|(sequence, tokens)| {
                sequence.prepare(tokens.len()).expect("room");
                Segment {
                    images: &[],
                    tokens,
                    sequence,
                    logits: LogitRows::Last,
                }
            })
            .collect();
        let together = runner
            .model
            .forward(&runner.cpu, &mut segments, &mut runner.scratch)
            .expect("valid tokens");
        assert!(
            together.chunks(vocabulary).all(|logits| logits == last),
            "{element}, batch"
        );
    }
}

#[test]
fn what_keys_are_like_does_not_depend_on_chunks_or_threads() {
    let of = |runner: Runner| runner.cache.geometry().clone();
    let whole = of(smoothed(1, 64));
    assert!(whole.key_smoothing(Layer(0)).is_some());
    for (threads, chunk) in [(2, 64), (1, 7), (2, 1)] {
        assert!(of(smoothed(threads, chunk)) == whole, "{chunk}");
    }
}

#[test]
fn smoothed_keys_are_rounded_less_and_scores_are_those_of_before() {
    let tokens = tokens(100);
    let exact = runner(ElementType::F32, 1).logits(&tokens);
    let plain = distance(&runner(ElementType::Q4_0, 1).logits(&tokens), &exact);
    let found = distance(&smoothed(1, 64).logits(&tokens), &exact);
    assert!(found < 0.9 * plain, "{found} and {plain} without");
    // Keys that are far from anything seen, in enough bits: whatever is done to them is undone with queries.
    let mut odd = runner(ElementType::Q8_0, 1);
    let of_layer = |layer: usize| {
        let (source, rows) = odd.cache.geometry().rows(Layer(layer))?;
        let elements = (source == Layer(layer)).then(|| rows.row_elements(Side::Key))?;
        let factors = (0..elements).map(|i| [0.5, 1.0, 2.0, 3.0][i * 7 % 4]);
        Some(SmoothedKeys::new(vec![0.25; elements], factors.collect()))
    };
    let layers = 0..odd.model.spec().layers.len();
    let smoothing = KeySmoothing::new(layers.map(of_layer).collect());
    odd.cache = odd.cache.clone().with_key_smoothing(smoothing);
    let found = distance(&odd.logits(&tokens), &exact);
    assert!(found < 0.03, "{found}");
}

#[test]
fn sequences_of_both_kinds_are_computed_in_one_pass() {
    let tokens = tokens(60);
    let mut runner = smoothed(1, 64);
    let with = runner.logits(&tokens);
    let mut smoothed = runner.sequence();
    runner.cache = self::runner(ElementType::Q4_0, 1).cache;
    let without = runner.logits(&tokens);
    assert!(with != without);
    let mut plain = runner.sequence();
    let mut segments = [&mut smoothed, &mut plain].map(|sequence| {
        sequence.prepare(tokens.len()).expect("room");
        Segment {
            images: &[],
            tokens: &tokens,
            sequence,
            logits: LogitRows::All,
        }
    });
    let together = runner
        .model
        .forward(&runner.cpu, &mut segments, &mut runner.scratch)
        .expect("valid tokens");
    assert!(*together == [with, without].concat());
}
