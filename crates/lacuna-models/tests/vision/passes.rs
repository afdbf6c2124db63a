//! Logits do not depend on where passes end, on what is computed together, and on threads; and what passes multiply.

use std::num::NonZeroUsize;
use std::ops::Range;

use lacuna_kv::KvPolicy;
use lacuna_models::spec::Grid;
use lacuna_models::{LogitRows, Segment, Shown};

use crate::runner::Runner;
use crate::support::{Eyes, FORMS, MODELS, Prompt, expected, rows_of_images, seeing, seeing_with};

const HF: [&str; 2] = FORMS[0];

/// Models whose images are seen as a whole, in all layers and in those with a window.
const WHOLE: [&str; 2] = ["gemma3", "gemma4-dense"];

/// Prompts of images that are seen as text is.
#[test]
fn passes_may_end_within_images_whose_tokens_see_only_what_is_before() {
    for model in MODELS {
        let mut runner = seeing(model, HF);
        if WHOLE.contains(&model) {
            assert!(runner.model.spec().keeps_images_whole());
            continue;
        }
        let rows = rows_of_images(model, "hf", 1);
        let prompt = Prompt::of(&expected(model), 1);
        let whole = prompt.logits(&mut runner, &rows, &[]);
        for end in 1..prompt.tokens.len() {
            let found = prompt.logits(&mut runner, &rows, &[end]);
            assert!(found == whole, "{model}, a pass that ends at {end}");
        }
        let every: Vec<usize> = (1..prompt.tokens.len()).collect();
        let found = prompt.logits(&mut runner, &rows, &every);
        assert!(found == whole, "{model}, a token a pass");
        let mut threads = seeing_with(model, HF, KvPolicy::default(), 3);
        let found = prompt.logits(&mut threads, &rows, &[]);
        assert!(found == whole, "{model}, three threads");
    }
}

/// Logits after the tokens of both prompts behind `starts`, computed together; what is before these is computed apart, and
/// the rows of its images are gone.
fn together(
    runner: &mut Runner,
    prompts: &[Prompt; 2],
    rows: &[Vec<f32>],
    starts: [usize; 2],
) -> Vec<f32> {
    let mut sequences = [runner.sequence(), runner.sequence()];
    let mut images = prompts.each_ref().map(|prompt| prompt.shown(rows));
    for (index, start) in starts.into_iter().enumerate() {
        if start > 0 {
            prompts[index].pass(runner, &mut sequences[index], rows, 0..start);
        }
        let shown = images[index].iter_mut();
        for image in shown.filter(|image| image.positions.end <= start) {
            image.rows = Vec::new().into();
        }
    }
    let mut segments: Vec<Segment<'_>> = Vec::new();
    for (index, sequence) in sequences.iter_mut().enumerate() {
        let tokens = &prompts[index].tokens[starts[index]..];
        sequence.prepare(tokens.len()).expect("room");
        segments.push(Segment {
            tokens,
            sequence,
            logits: LogitRows::All,
            images: &images[index],
        });
    }
    let (model, scratch) = (&runner.model, &mut runner.scratch);
    let logits = model.forward(&runner.cpu, &mut segments, scratch);
    logits.expect("valid tokens").to_vec()
}

#[test]
fn a_sequence_with_images_is_computed_in_a_batch_as_alone() {
    for model in MODELS {
        let expected = expected(model);
        let rows = rows_of_images(model, "hf", 1);
        let prompts = [0, 1].map(|case| Prompt::of(&expected, case));
        let mut runner = seeing(model, HF);
        let alone = prompts
            .each_ref()
            .map(|prompt| prompt.logits(&mut runner, &rows, &[]));
        let first_images = prompts
            .each_ref()
            .map(|prompt| prompt.runs[0].positions.end);
        for starts in [[0, 0], first_images] {
            let found = together(&mut runner, &prompts, &rows, starts);
            let wanted = [0, 1].map(|index| &alone[index][starts[index] * expected.vocab..]);
            assert!(found == wanted.concat(), "{model}, from {starts:?}");
        }
    }
}

#[test]
fn passes_may_end_anywhere_but_within_an_image_and_rows_do_not_depend_on_them() {
    for model in WHOLE {
        let rows = rows_of_images(model, "hf", 1);
        let prompt = Prompt::of(&expected(model), 1);
        let mut runner = seeing(model, HF);
        let whole = prompt.logits(&mut runner, &rows, &[]);
        let boundaries = (1..prompt.tokens.len()).filter(|end| {
            let mut images = prompt.runs.iter().map(|run| &run.positions);
            images.all(|tokens| *end <= tokens.start || *end >= tokens.end)
        });
        for end in boundaries {
            let found = prompt.logits(&mut runner, &rows, &[end]);
            assert!(found == whole, "{model}, a pass that ends at {end}");
        }
        let block_tokens = NonZeroUsize::new(4).expect("not zero");
        let paged = KvPolicy::Paged { block_tokens };
        for (policy, threads) in [(paged, 1), (KvPolicy::default(), 3)] {
            let mut other = seeing_with(model, HF, policy, threads);
            let found = prompt.logits(&mut other, &rows, &[3]);
            assert!(found == whole, "{model}, {policy:?}, {threads} threads");
        }
    }
}

#[test]
fn an_image_that_was_computed_may_be_gone_on_with_from_the_middle_of_its_tokens() {
    for model in WHOLE {
        let expected = expected(model);
        let rows = rows_of_images(model, "hf", 1);
        let prompt = Prompt::of(&expected, 0);
        let mut runner = seeing(model, HF);
        let whole = prompt.logits(&mut runner, &rows, &[]);
        let Range { start, end } = prompt.runs[0].positions;
        let inside = start + 2;
        let mut sequence = runner.sequence();
        prompt.pass(&mut runner, &mut sequence, &rows, 0..end);
        // As a cache does that holds whole groups of tokens.
        sequence.truncate(inside).expect("rows that are held");
        let rest = prompt.tokens.len();
        let found = prompt.pass(&mut runner, &mut sequence, &rows, inside..rest);
        assert_eq!(found, whole[inside * expected.vocab..], "{model}");
    }
}

#[test]
fn another_picture_changes_what_comes_after_it_and_nothing_before() {
    let expected = expected("gemma3");
    let rows = rows_of_images("gemma3", "hf", 1);
    let mut prompt = Prompt::of(&expected, 0);
    let mut runner = seeing("gemma3", HF);
    let one = prompt.logits(&mut runner, &rows, &[]);
    prompt.runs[0].image = 1;
    let other = prompt.logits(&mut runner, &rows, &[]);
    let start = prompt.runs[0].positions.start * expected.vocab;
    assert_eq!(one[..start], other[..start]);
    let last = |logits: &[f32]| logits[logits.len() - expected.vocab..].to_vec();
    assert_ne!(last(&one), last(&other));
}

#[test]
fn passes_are_cut_before_images_and_never_within() {
    let image = |positions: Range<usize>| Shown {
        grid: Grid::row(positions.len()),
        positions,
        rows: Vec::new().into(),
    };
    let images = [image(3..7), image(7..9)];
    let uncut = |start, count| Shown::uncut(&images, start, count);
    assert_eq!([uncut(0, 2), uncut(0, 3), uncut(0, 5)], [2, 3, 3]);
    assert_eq!([uncut(0, 7), uncut(0, 8), uncut(0, 20)], [7, 7, 20]);
    assert_eq!([uncut(3, 3), uncut(3, 4), uncut(5, 1)], [0, 4, 0]);
    let rest = |start| Shown::rest_of_image(&images, start);
    assert_eq!([rest(2), rest(3), rest(5)], [None, Some(4), Some(2)]);
    assert_eq!([rest(7), rest(9)], [Some(2), None]);
}

/// What a pass multiplies in attention, worked out by hand: squares of windows in layers that have these.
#[test]
fn products_of_attention_in_windows_are_those_of_windows() {
    let encoder = Eyes::open("qwen2.5-vl", "hf", 1).encoder;
    let (rows, columns) = (6, 10);
    // Windows of four patches each way: two rows of them, of four and two patches, in three columns of four, four and two.
    let in_windows: u64 = [16, 16, 8, 8, 8, 4].iter().map(|it| it * it).sum();
    let everywhere = 60 * 60;
    // Two heads of eight elements, of keys and of values; two layers of each kind.
    let attention = 2 * (8 + 8) * (2 * in_windows + 2 * everywhere);
    let products = encoder.products(Grid { rows, columns });
    assert_eq!(products.attention, attention);
}
