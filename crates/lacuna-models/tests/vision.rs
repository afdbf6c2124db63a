//! Models that see: rows of images, and logits after text and images, against the reference implementation, from both
//! kinds of files; and what is refused.

mod runner;

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;

use lacuna_files::{Mapping, ModelFiles};
use lacuna_kernels::{Cpu, CpuConfig, ElementType};
use lacuna_kv::{KvPolicy, Sequence};
use lacuna_models::spec::{Grid, ImageSize, Patches};
use lacuna_models::{
    ConfigError, FiniteCheck, ForwardError, ImageEncoder, LogitRows, Model, Scratch, Segment, Shown,
};
use runner::{Runner, floats, folder, relative_error};
use serde::Deserialize;

/// Twice what float32 makes of these models; the bar is a relative 1e-4.
const BOUND: f32 = 2e-5;

/// All of them: with images of one size, and with those of any.
const MODELS: [&str; 6] = [
    "gemma3",
    "qwen3-vl",
    "qwen3-vl-moe",
    "qwen3.5",
    "qwen2.5-vl",
    "qwen2-vl",
];

#[derive(Deserialize)]
struct Expected {
    vocab: usize,
    width: usize,
    /// Further parts of a row.
    #[serde(default)]
    deepstack: usize,
    images: Vec<Picture>,
    cases: Vec<Case>,
}

#[derive(Deserialize, Clone, Copy)]
struct Picture {
    /// Pixels of width and of height.
    size: [usize; 2],
    /// Rows and columns of tokens.
    grid: [usize; 2],
}

impl Picture {
    fn tokens(self) -> Grid {
        let [rows, columns] = self.grid;
        Grid { rows, columns }
    }
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
        let scratch = Scratch::new(encoder.program(), plan).expect("some megabytes");
        let scratch = scratch.checking(FiniteCheck::EachLayer);
        Self {
            cpu: Cpu::new(config).expect("this machine's own level"),
            scratch,
            encoder,
        }
    }

    fn encode(&mut self, pixels: &[u8], grid: Grid) -> Result<Vec<f32>, ForwardError> {
        let rows = (self.encoder).encode(&self.cpu, (pixels, grid), &mut self.scratch)?;
        Ok(rows.to_vec())
    }
}

/// The pixels of each image.
fn pixels(model: &str, expected: &Expected) -> Vec<Vec<u8>> {
    let all = fs::read(folder().join(format!("vision/{model}/images.u8")));
    let all = all.expect("a committed fixture");
    let mut rest = &all[..];
    let images = expected.images.iter().map(|image| {
        let (pixels, tail) = rest.split_at(image.size[0] * image.size[1] * 3);
        rest = tail;
        pixels.to_vec()
    });
    images.collect()
}

/// The rows of each image, from an encoder's own files.
fn rows_of_images(model: &str, file: &str, threads: usize) -> Vec<Vec<f32>> {
    let expected = expected(model);
    let mut eyes = Eyes::open(&folder().join(format!("vision/{model}/{file}")), threads);
    let images = expected.images.iter().zip(pixels(model, &expected));
    images
        .map(|(image, pixels)| {
            let shape = *eyes.encoder.shape();
            assert_eq!(shape.fit(image.size), Ok(image.size), "{model}");
            let grid = shape.grid(image.size);
            assert_eq!(shape.tokens(grid), image.tokens(), "{model}");
            eyes.encode(&pixels, grid).expect("pixels of its size")
        })
        .collect()
}

#[test]
fn rows_of_images_are_those_of_the_reference_from_both_kinds_of_files() {
    for model in MODELS {
        let reference = floats(&format!("vision/{model}/features.f32"));
        for file in ["hf", "mmproj.gguf"] {
            let found = rows_of_images(model, file, 1);
            let mut rest = &reference[..];
            for (index, found) in found.iter().enumerate() {
                let (wanted, tail) = rest.split_at(found.len());
                rest = tail;
                let error = relative_error(found, wanted);
                println!("{model}, {file}, image {index}: relative error {error:.2e}");
                assert!(error <= BOUND, "{model}, {file}, image {index}: {error:e}");
            }
            assert!(rest.is_empty(), "{model}, {file}");
            // And the same bits by any number of threads.
            assert_eq!(found, rows_of_images(model, file, 3), "{model}, {file}");
        }
    }
}

/// A prompt's tokens, and which of them stand for which image.
struct Prompt {
    tokens: Vec<u32>,
    images: Vec<(Range<usize>, Grid, usize)>,
}

impl Prompt {
    fn of(case: &Case, pictures: &[Picture]) -> Self {
        let (mut tokens, mut images) = (Vec::new(), Vec::new());
        for part in &case.parts {
            match *part {
                Part::Token(token) => tokens.push(token),
                Part::Image { image } => {
                    let start = tokens.len();
                    let grid = pictures[image].tokens();
                    // What they are must not matter.
                    tokens.extend((0..grid.count() as u32).map(|index| u32::MAX - index));
                    images.push((start..tokens.len(), grid, image));
                }
            }
        }
        Self { tokens, images }
    }

    /// What it shows, of the rows of each image.
    fn shown(&self, rows: &[Vec<f32>]) -> Vec<Shown> {
        let shown = self.images.iter().map(|(positions, grid, image)| Shown {
            positions: positions.clone(),
            grid: *grid,
            rows: rows[*image].as_slice().into(),
        });
        shown.collect()
    }

    /// Logits after each token, computed in passes that end where `ends` says.
    fn logits(&self, runner: &mut Runner, rows: &[Vec<f32>], ends: &[usize]) -> Vec<f32> {
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
        rows: &[Vec<f32>],
        part: Range<usize>,
    ) -> Vec<f32> {
        let images = self.shown(rows);
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
    for model in MODELS {
        let expected = expected(model);
        let reference = floats(&format!("vision/{model}/logits.f32"));
        for (text, eyes) in [("hf", "hf"), ("model.gguf", "mmproj.gguf")] {
            let rows = rows_of_images(model, eyes, 1);
            let mut runner = Runner::open(&format!("vision/{model}/{text}"));
            let spec = runner.model.spec();
            assert_eq!(spec.hidden, expected.width);
            let row = expected.width * (1 + expected.deepstack);
            assert_eq!(spec.image_row_width(), Some(row), "{model}, {text}");
            let mut rest = &reference[..];
            for case in &expected.cases {
                let prompt = Prompt::of(case, &expected.images);
                let (wanted, tail) = rest.split_at(prompt.tokens.len() * expected.vocab);
                rest = tail;
                let found = prompt.logits(&mut runner, &rows, &[]);
                let error = relative_error(&found, wanted);
                let images = prompt.images.len();
                println!("{model}, {text}, {images} images: relative error {error:.2e}");
                assert!(
                    error <= BOUND,
                    "{model}, {text}, {images} images: {error:e}"
                );
            }
            assert!(rest.is_empty());
        }
    }
}

/// Prompts of images that are seen as text is.
#[test]
fn passes_may_end_within_images_whose_tokens_see_only_what_is_before() {
    for model in MODELS.into_iter().filter(|model| *model != "gemma3") {
        let expected = expected(model);
        let rows = rows_of_images(model, "hf", 1);
        let prompt = Prompt::of(&expected.cases[1], &expected.images);
        let mut runner = Runner::open(&format!("vision/{model}/hf"));
        let whole = prompt.logits(&mut runner, &rows, &[]);
        for end in 1..prompt.tokens.len() {
            let found = prompt.logits(&mut runner, &rows, &[end]);
            assert!(found == whole, "{model}, a pass that ends at {end}");
        }
        let every: Vec<usize> = (1..prompt.tokens.len()).collect();
        let found = prompt.logits(&mut runner, &rows, &every);
        assert!(found == whole, "{model}, a token a pass");
    }
}

/// Whatever is in a batch with it, and though its images are computed and their rows are gone.
#[test]
fn a_sequence_with_images_is_computed_in_a_batch_as_alone() {
    for model in MODELS {
        let expected = expected(model);
        let rows = rows_of_images(model, "hf", 1);
        let prompts = [0, 1].map(|case| Prompt::of(&expected.cases[case], &expected.images));
        let mut runner = Runner::open(&format!("vision/{model}/hf"));
        let alone = prompts
            .each_ref()
            .map(|prompt| prompt.logits(&mut runner, &rows, &[]));
        let mut sequences = [runner.sequence(), runner.sequence()];
        // The first tokens of each, up to its first image's end, and then the rest of both together.
        let starts = prompts.each_ref().map(|prompt| prompt.images[0].0.end);
        for ((prompt, sequence), start) in prompts.iter().zip(&mut sequences).zip(starts) {
            prompt.pass(&mut runner, sequence, &rows, 0..start);
        }
        let gone: Vec<Vec<Shown>> = prompts
            .iter()
            .zip(starts)
            .map(|(prompt, start)| {
                let mut shown = prompt.shown(&rows);
                for image in shown
                    .iter_mut()
                    .filter(|image| image.positions.end <= start)
                {
                    image.rows = Vec::new().into();
                }
                shown
            })
            .collect();
        let mut segments: Vec<Segment<'_>> = Vec::new();
        for (((prompt, sequence), start), images) in
            prompts.iter().zip(&mut sequences).zip(starts).zip(&gone)
        {
            let tokens = &prompt.tokens[start..];
            sequence.prepare(tokens.len()).expect("room");
            segments.push(Segment {
                tokens,
                sequence,
                logits: LogitRows::All,
                images,
            });
        }
        let (model_of, scratch) = (&runner.model, &mut runner.scratch);
        let found = model_of
            .forward(&runner.cpu, &mut segments, scratch)
            .expect("valid tokens");
        let wanted = [0, 1]
            .map(|index| &alone[index][starts[index] * expected.vocab..])
            .concat();
        assert!(found == wanted, "{model}");
    }
}

#[test]
fn passes_may_end_anywhere_but_within_an_image_and_rows_do_not_depend_on_them() {
    let expected = expected("gemma3");
    let rows = rows_of_images("gemma3", "hf", 1);
    let prompt = Prompt::of(&expected.cases[1], &expected.images);
    let mut runner = Runner::open("vision/gemma3/hf");
    let whole = prompt.logits(&mut runner, &rows, &[]);
    let boundaries = (1..prompt.tokens.len()).filter(|end| {
        let mut images = prompt.images.iter();
        images.all(|(tokens, ..)| *end <= tokens.start || *end >= tokens.end)
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
    let prompt = Prompt::of(&expected.cases[0], &expected.images);
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
    let mut prompt = Prompt::of(&expected.cases[0], &expected.images);
    let mut runner = Runner::open("vision/gemma3/hf");
    let one = prompt.logits(&mut runner, &rows, &[]);
    prompt.images[0].2 = 1;
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
        (12, Grid::square(4)),
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

#[derive(Deserialize)]
struct Files {
    files: BTreeMap<String, File>,
}

#[derive(Deserialize)]
struct File {
    size: [usize; 2],
}

#[derive(Deserialize)]
struct OwnSize {
    least_pixels: usize,
    most_pixels: usize,
    sizes: BTreeMap<String, [usize; 2]>,
}

#[test]
fn images_are_brought_to_the_sizes_that_the_reference_brings_them_to() {
    let read = |name: &str| fs::read(folder().join("images").join(name)).expect("committed");
    let files: Files = serde_json::from_slice(&read("expected.json")).expect("valid JSON");
    let all: Vec<OwnSize> = serde_json::from_slice(&read("own-size.json")).expect("valid JSON");
    let eyes = Eyes::open(&folder().join("vision/qwen3-vl/hf"), 1);
    for expected in all {
        let patches = Patches {
            pixels: 7,
            size: ImageSize::Own {
                square: 2,
                least_pixels: expected.least_pixels,
                most_pixels: expected.most_pixels,
                longest_edge: None,
            },
            ..eyes.encoder.shape().patches
        };
        for (name, wanted) in expected.sizes {
            assert_eq!(patches.fit(files.files[&name].size), Ok(wanted), "{name}");
        }
    }
}

/// The projector's file with another number behind a key.
fn with_number(model: &str, key: &str, number: u32) -> Vec<u8> {
    let path = folder().join(format!("vision/{model}/mmproj.gguf"));
    let mut file = fs::read(path).expect("committed");
    let at = file.windows(key.len()).position(|it| it == key.as_bytes());
    // Behind the name, the type of the number.
    let at = at.expect("the key") + key.len() + 4;
    file[at..at + 4].copy_from_slice(&number.to_le_bytes());
    file
}

#[test]
fn numbers_of_encoders_that_are_out_of_range_are_typed_errors() {
    for (model, key) in [
        ("qwen3-vl", "clip.vision.patch_size"),
        ("qwen3-vl", "clip.vision.image_size"),
        ("qwen3-vl", "clip.vision.embedding_length"),
        ("qwen3-vl", "clip.vision.block_count"),
        ("qwen3-vl", "clip.vision.attention.head_count"),
        ("qwen3-vl", "clip.vision.projection_dim"),
        ("qwen3-vl", "clip.vision.spatial_merge_size"),
        ("qwen2.5-vl", "clip.vision.n_wa_pattern"),
        ("qwen2.5-vl", "clip.vision.window_size"),
        ("qwen2-vl", "clip.vision.embedding_length"),
    ] {
        for number in [0, 1, 3, 5000, i32::MAX as u32, u32::MAX] {
            let bytes = with_number(model, key, number);
            let files = ModelFiles::from_gguf(Mapping::from(bytes)).expect("a GGUF file");
            // Some are of other encoders that could be: of other windows and heads.
            match ImageEncoder::load(files) {
                Ok(_) => assert!(
                    number > 0
                        && ["wa_", "window", "head_count"]
                            .iter()
                            .any(|it| key.contains(it)),
                    "{model}, {key}: {number}"
                ),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    }
}

#[test]
fn pixels_beyond_bounds_are_held_to_what_is_planned_for() {
    for (key, number) in [
        ("clip.vision.image_max_pixels", u32::MAX),
        ("clip.vision.image_max_pixels", 0),
        ("clip.vision.image_min_pixels", u32::MAX),
    ] {
        let bytes = with_number("qwen3-vl", key, number);
        let files = ModelFiles::from_gguf(Mapping::from(bytes)).expect("a GGUF file");
        let Ok(Some(encoder)) = ImageEncoder::load(files) else {
            continue;
        };
        let shape = *encoder.shape();
        assert!(
            shape.most_tokens() <= 1280,
            "{key}: {}",
            shape.most_tokens()
        );
        for size in [[4000, 3000], [8, 8], [1, 200]] {
            let grid = shape.grid(shape.fit(size).expect("of a shape that is taken"));
            assert!(grid.count() <= shape.most().tokens, "{key}: {grid:?}");
        }
    }
}

/// What a pass multiplies in attention, worked out by hand: squares of windows in layers that have these.
#[test]
fn products_of_attention_in_windows_are_those_of_windows() {
    let encoder = Eyes::open(&folder().join("vision/qwen2.5-vl/hf"), 1).encoder;
    let (rows, columns) = (6, 10);
    // Windows of four patches each way: two rows of them, of four and two patches, in three columns of four, four and two.
    let in_windows: u64 = [16, 16, 8, 8, 8, 4].iter().map(|it| it * it).sum();
    let everywhere = 60 * 60;
    // Two heads of eight elements, of keys and of values; two layers of each kind.
    let attention = 2 * (8 + 8) * (2 * in_windows + 2 * everywhere);
    let products = encoder.products(Grid { rows, columns });
    assert_eq!(products.attention, attention);
}
