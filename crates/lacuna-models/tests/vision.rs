//! Models that see: rows of images, and logits after text and images, against the reference implementation, from both
//! kinds of files; and what is refused.

mod runner;

use std::fs;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;

use lacuna_files::ModelFiles;
use lacuna_kernels::{Cpu, CpuConfig, ElementType};
use lacuna_kv::{KvPolicy, Sequence};
use lacuna_models::spec::Grid;
use lacuna_models::{
    ConfigError, FiniteCheck, ForwardError, ImageEncoder, LogitRows, Model, Scratch, Segment, Shown,
};
use runner::{Runner, floats, folder, relative_error};
use serde::Deserialize;

/// Twice what float32 makes of these models; the bar is a relative 1e-4.
const BOUND: f32 = 2e-5;

#[derive(Deserialize)]
struct Expected {
    vocab: usize,
    width: usize,
    images: usize,
    image_tokens: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    parts: Vec<Part>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(untagged)]
enum Part {
    Token(u32),
    Image { image: usize },
}

fn expected(model: &str) -> Expected {
    let text = fs::read(folder().join("vision").join(model).join("expected.json"));
    serde_json::from_slice(&text.expect("a committed fixture")).expect("valid JSON")
}

/// An encoder with everything a pass needs.
struct Eyes {
    encoder: ImageEncoder,
    cpu: Cpu,
    scratch: Scratch,
}

impl Eyes {
    fn open(path: &Path, threads: usize) -> Self {
        let files = ModelFiles::open(path).expect("the fixture opens");
        let encoder = ImageEncoder::load(files).expect("the fixture loads");
        let encoder = encoder.expect("it sees");
        let threads = NonZeroUsize::new(threads).expect("at least one");
        let config = CpuConfig {
            threads,
            ..CpuConfig::default()
        };
        let plan = encoder.arena(encoder.shape().most()).expect("small");
        let scratch = Scratch::new(encoder.program(), plan).expect("a few kilobytes");
        let scratch = scratch.checking(FiniteCheck::EachLayer);
        Self {
            cpu: Cpu::new(config).expect("this machine's own level"),
            scratch,
            encoder,
        }
    }

    /// The patches of images of the only size.
    fn grid(&self) -> Grid {
        let shape = self.encoder.shape();
        shape.grid(shape.fit([1, 1]).expect("any is taken"))
    }

    fn encode(&mut self, pixels: &[u8], grid: Grid) -> Result<Vec<f32>, ForwardError> {
        let rows = (self.encoder).encode(&self.cpu, (pixels, grid), &mut self.scratch)?;
        Ok(rows.to_vec())
    }
}

fn pixels(model: &str) -> Vec<u8> {
    fs::read(folder().join(format!("vision/{model}/images.u8"))).expect("a committed fixture")
}

/// The rows of all images, from an encoder's own files.
fn rows_of_images(model: &str, file: &str, threads: usize) -> Vec<f32> {
    let expected = expected(model);
    let mut eyes = Eyes::open(&folder().join(format!("vision/{model}/{file}")), threads);
    let grid = eyes.grid();
    assert_eq!(
        eyes.encoder.shape().tokens(grid).count(),
        expected.image_tokens
    );
    let pixels = pixels(model);
    let images = pixels.chunks_exact(pixels.len() / expected.images);
    images
        .flat_map(|image| eyes.encode(image, grid).expect("pixels of its size"))
        .collect()
}

#[test]
fn rows_of_images_are_those_of_the_reference_from_both_kinds_of_files() {
    let reference = floats("vision/gemma3/features.f32");
    for file in ["hf", "mmproj.gguf"] {
        let found = rows_of_images("gemma3", file, 1);
        let error = relative_error(&found, &reference);
        println!("{file}: relative error {error:.2e}");
        assert!(error <= BOUND, "{file}: {error:e}");
        // And the same bits by any number of threads.
        assert_eq!(found, rows_of_images("gemma3", file, 3), "{file}");
    }
}

/// A prompt's tokens, and which of them stand for which image.
struct Prompt {
    tokens: Vec<u32>,
    images: Vec<(Range<usize>, usize)>,
}

impl Prompt {
    fn of(case: &Case, image_tokens: usize) -> Self {
        let (mut tokens, mut images) = (Vec::new(), Vec::new());
        for part in &case.parts {
            match *part {
                Part::Token(token) => tokens.push(token),
                Part::Image { image } => {
                    let start = tokens.len();
                    // What they are must not matter.
                    tokens.extend((0..image_tokens as u32).map(|index| u32::MAX - index));
                    images.push((start..tokens.len(), image));
                }
            }
        }
        Self { tokens, images }
    }

    /// Logits after each token, computed in passes that end where `ends` says.
    fn logits(&self, runner: &mut Runner, rows: &[f32], ends: &[usize]) -> Vec<f32> {
        let mut sequence = runner.sequence();
        let mut start = 0;
        let ends = ends.iter().copied().chain([self.tokens.len()]);
        ends.flat_map(|end| {
            let logits = self.pass(runner, &mut sequence, rows, start..end);
            start = end;
            logits
        })
        .collect()
    }

    fn pass(
        &self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        rows: &[f32],
        part: Range<usize>,
    ) -> Vec<f32> {
        let width = runner.model.spec().hidden;
        let shown = self.images.iter().map(|(positions, image)| {
            let elements = positions.len() * width;
            Shown {
                positions: positions.clone(),
                grid: Grid::row(positions.len()),
                rows: rows[image * elements..(image + 1) * elements].into(),
            }
        });
        let images: Vec<Shown> = shown.collect();
        let tokens = &self.tokens[part];
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens,
            sequence,
            logits: LogitRows::All,
            images: &images,
        };
        let (model, scratch) = (&runner.model, &mut runner.scratch);
        let logits = model.forward(&runner.cpu, &mut [segment], scratch);
        let logits = logits.expect("valid tokens").to_vec();
        sequence.accept(tokens.len());
        logits
    }
}

#[test]
fn logits_after_text_and_images_are_those_of_the_reference() {
    let expected = expected("gemma3");
    let reference = floats("vision/gemma3/logits.f32");
    for (text, eyes) in [("hf", "hf"), ("model.gguf", "mmproj.gguf")] {
        let rows = rows_of_images("gemma3", eyes, 1);
        let mut runner = Runner::open(&format!("vision/gemma3/{text}"));
        assert_eq!(runner.model.spec().hidden, expected.width);
        let mut rest = &reference[..];
        for case in &expected.cases {
            let prompt = Prompt::of(case, expected.image_tokens);
            let (wanted, tail) = rest.split_at(prompt.tokens.len() * expected.vocab);
            rest = tail;
            let found = prompt.logits(&mut runner, &rows, &[]);
            let error = relative_error(&found, wanted);
            let images = prompt.images.len();
            println!("{text}, {images} images: relative error {error:.2e}");
            assert!(error <= BOUND, "{text}, {images} images: {error:e}");
        }
        assert!(rest.is_empty());
    }
}

#[test]
fn passes_may_end_anywhere_but_within_an_image_and_rows_do_not_depend_on_them() {
    let expected = expected("gemma3");
    let rows = rows_of_images("gemma3", "hf", 1);
    let prompt = Prompt::of(&expected.cases[1], expected.image_tokens);
    let mut runner = Runner::open("vision/gemma3/hf");
    let whole = prompt.logits(&mut runner, &rows, &[]);
    let boundaries = (1..prompt.tokens.len()).filter(|end| {
        let mut images = prompt.images.iter();
        images.all(|(tokens, _)| *end <= tokens.start || *end >= tokens.end)
    });
    for end in boundaries {
        let found = prompt.logits(&mut runner, &rows, &[end]);
        assert!(found == whole, "a pass that ends at {end}");
    }
    let path = "vision/gemma3/hf";
    let block_tokens = NonZeroUsize::new(4).expect("not zero");
    let paged = KvPolicy::Paged { block_tokens };
    for (policy, threads) in [(paged, 1), (KvPolicy::default(), 3)] {
        let mut other = Runner::with(path, policy, ElementType::F32, threads);
        let found = prompt.logits(&mut other, &rows, &[3]);
        assert!(found == whole, "{policy:?}, {threads} threads");
    }
}

#[test]
fn an_image_that_was_computed_may_be_gone_on_with_from_the_middle_of_its_tokens() {
    let expected = expected("gemma3");
    let rows = rows_of_images("gemma3", "hf", 1);
    let prompt = Prompt::of(&expected.cases[0], expected.image_tokens);
    let mut runner = Runner::open("vision/gemma3/hf");
    let whole = prompt.logits(&mut runner, &rows, &[]);
    let inside = prompt.images[0].0.start + 2;
    let mut sequence = runner.sequence();
    let end = prompt.images[0].0.end;
    prompt.pass(&mut runner, &mut sequence, &rows, 0..end);
    // As a cache does that holds whole groups of tokens.
    sequence.truncate(inside).expect("rows that are held");
    let rest = prompt.tokens.len();
    let found = prompt.pass(&mut runner, &mut sequence, &rows, inside..rest);
    assert_eq!(found, whole[inside * expected.vocab..]);
}

#[test]
fn another_picture_changes_what_comes_after_it_and_nothing_before() {
    let expected = expected("gemma3");
    let rows = rows_of_images("gemma3", "hf", 1);
    let mut prompt = Prompt::of(&expected.cases[0], expected.image_tokens);
    let mut runner = Runner::open("vision/gemma3/hf");
    let one = prompt.logits(&mut runner, &rows, &[]);
    prompt.images[0].1 = 1;
    let other = prompt.logits(&mut runner, &rows, &[]);
    let start = prompt.images[0].0.start * expected.vocab;
    assert_eq!(one[..start], other[..start]);
    let last = |logits: &[f32]| logits[logits.len() - expected.vocab..].to_vec();
    assert_ne!(last(&one), last(&other));
}

fn forward(runner: &mut Runner, tokens: &[u32], images: &[Shown]) -> Result<(), ForwardError> {
    let mut sequence = runner.sequence();
    sequence.prepare(tokens.len()).expect("room");
    let segment = Segment {
        tokens,
        sequence: &mut sequence,
        logits: LogitRows::Last,
        images,
    };
    let (model, scratch) = (&runner.model, &mut runner.scratch);
    model
        .forward(&runner.cpu, &mut [segment], scratch)
        .map(drop)
}

#[test]
fn what_is_no_image_is_refused() {
    let mut eyes = Eyes::open(&folder().join("vision/gemma3/hf"), 1);
    for (bytes, grid) in [
        (12, eyes.grid()),
        (
            16 * 32 * 3,
            Grid {
                rows: 4,
                columns: 8,
            },
        ),
        (0, Grid::square(0)),
        (
            0,
            Grid {
                rows: usize::MAX,
                columns: 2,
            },
        ),
    ] {
        let refused = eyes.encode(&vec![0; bytes], grid);
        assert!(matches!(
            refused,
            Err(ForwardError::ImageSize { bytes: found, .. }) if found == bytes
        ));
    }
    let mut runner = Runner::open("vision/gemma3/hf");
    let shown = |positions: Range<usize>, elements: usize| Shown {
        grid: Grid::row(positions.len()),
        positions,
        rows: vec![0.5; elements].into(),
    };
    let tokens = [9, u32::MAX, u32::MAX, 9];
    forward(&mut runner, &tokens, &[shown(1..3, 32), shown(7..9, 32)]).expect("it fits");
    for images in [
        vec![shown(1..3, 31)],
        vec![shown(2..2, 0)],
        vec![shown(2..5, 48)],
        vec![shown(1..3, 32), shown(2..4, 32)],
    ] {
        let refused = forward(&mut runner, &tokens, &images);
        assert!(matches!(refused, Err(ForwardError::MisplacedImage { .. })));
    }
    // Tokens beside them are tokens.
    let refused = forward(&mut runner, &tokens, &[shown(1..2, 16)]);
    assert!(matches!(refused, Err(ForwardError::TokenOutOfRange { .. })));
    let mut blind = Runner::open("qwen3/hf");
    let refused = forward(&mut blind, &tokens, &[shown(1..3, 64)]);
    assert!(matches!(refused, Err(ForwardError::NoImages)));
}

#[test]
fn a_projector_of_another_model_is_told_from_the_right_one() {
    let eyes = Eyes::open(&folder().join("vision/gemma3/mmproj.gguf"), 1);
    let model = |path: &str| {
        let files = ModelFiles::open(&folder().join(path)).expect("the fixture opens");
        Model::load(files).expect("the fixture loads")
    };
    let check = |path: &str| eyes.encoder.check_decoder(model(path).spec());
    check("vision/gemma3/model.gguf").expect("its own");
    let wrong = check("families/gemma3/hf");
    assert!(matches!(
        wrong,
        Err(ConfigError::Projector {
            width: 16,
            hidden: 8
        })
    ));
    let blind = check("qwen3/hf").expect_err("it does not see").to_string();
    assert!(blind.contains("qwen3"), "{blind}");
    // A model of language alone has no eyes, and is no projector.
    for path in ["vision/gemma3/model.gguf", "qwen3/hf", "families/gemma3/hf"] {
        let files = ModelFiles::open(&folder().join(path)).expect("the fixture opens");
        let none = ImageEncoder::load(files).expect("it loads");
        assert!(none.is_none(), "{path}");
    }
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
