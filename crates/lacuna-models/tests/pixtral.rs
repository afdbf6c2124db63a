//! Models that see images row by row, with tokens between: rows of images, prompts, and logits after text and images, against
//! the reference implementation, from both kinds of files; and what is refused.

mod runner;

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::ops::Range;

use lacuna_files::{Mapping, ModelFiles};
use lacuna_kernels::{Cpu, CpuConfig, ElementType};
use lacuna_kv::{KvPolicy, Sequence};
use lacuna_models::spec::{Grid, ImageSize, Patches};
use lacuna_models::{
    FiniteCheck, ImageEncoder, ImageTokens, LogitRows, Model, Scratch, Segment, Shown, with_images,
};
use lacuna_text::tokenizer::Special;
use runner::{Runner, TOKENS, floats, folder, relative_error};
use serde::Deserialize;

/// Twice what float32 makes of these models; the bar is a relative 1e-4.
const BOUND: f32 = 2e-5;

/// With a row for each patch, and for a square of them.
const MODELS: [&str; 2] = ["pixtral", "mistral3"];
/// Files of a decoder, and of an encoder.
const FORMS: [[&str; 2]; 2] = [["hf", "hf"], ["model.gguf", "mmproj.gguf"]];

#[derive(Deserialize)]
struct Expected {
    vocab: usize,
    width: usize,
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
    Row { image: usize, row: usize },
}

fn expected(model: &str) -> Expected {
    let text = fs::read(folder().join(format!("vision/{model}/expected.json")));
    serde_json::from_slice(&text.expect("a committed fixture")).expect("valid JSON")
}

/// The rows of each image, from an encoder's own files.
fn rows_of_images(model: &str, file: &str, threads: usize) -> Vec<Vec<f32>> {
    let expected = expected(model);
    let files = ModelFiles::open(&folder().join(format!("vision/{model}/{file}")));
    let encoder = ImageEncoder::load(files.expect("the fixture opens"));
    let encoder = encoder.expect("the fixture loads").expect("it sees");
    let cpu = Cpu::new(CpuConfig {
        threads: NonZeroUsize::new(threads).expect("at least one"),
        ..CpuConfig::default()
    });
    let cpu = cpu.expect("this machine's own level");
    let shape = *encoder.shape();
    let plan = encoder.arena(shape.most()).expect("small");
    let scratch = Scratch::new(encoder.program(), plan).expect("some megabytes");
    let mut scratch = scratch.checking(FiniteCheck::EachLayer);
    let pixels = fs::read(folder().join(format!("vision/{model}/images.u8")));
    let pixels = pixels.expect("a committed fixture");
    let mut rest = &pixels[..];
    let images = expected.images.iter().map(|image| {
        let (pixels, tail) = rest.split_at(image.size[0] * image.size[1] * 3);
        rest = tail;
        assert_eq!(shape.fit(image.size), Ok(image.size), "{model}");
        let grid = shape.grid(image.size);
        assert_eq!(shape.tokens(grid), image.tokens(), "{model}");
        let rows = encoder.encode(&cpu, (pixels, grid), &mut scratch);
        rows.expect("pixels of its size").to_vec()
    });
    images.collect()
}

#[test]
fn rows_of_images_are_those_of_the_reference_from_both_kinds_of_files() {
    for model in MODELS {
        let reference = floats(&format!("vision/{model}/features.f32"));
        for [_, file] in FORMS {
            let found = rows_of_images(model, file, 1);
            let all = found.concat();
            let error = relative_error(&all, &reference);
            println!("{model}, {file}: relative error {error:.2e}");
            assert!(error <= BOUND, "{model}, {file}: {error:e}");
            // And the same bits by any number of threads.
            assert!(found == rows_of_images(model, file, 3), "{model}, {file}");
        }
    }
}

/// A prompt's tokens, and which of them stand for which row of which image.
struct Prompt {
    tokens: Vec<u32>,
    rows: Vec<(Range<usize>, [usize; 2])>,
}

impl Prompt {
    fn of(case: &Case, pictures: &[Picture]) -> Self {
        let (mut tokens, mut rows) = (Vec::new(), Vec::new());
        for part in &case.parts {
            match *part {
                Part::Token(token) => tokens.push(token),
                Part::Row { image, row } => {
                    let start = tokens.len();
                    // What they are must not matter.
                    tokens.extend(stand_ins(pictures[image]));
                    rows.push((start..tokens.len(), [image, row]));
                }
            }
        }
        Self { tokens, rows }
    }

    /// What it shows, of the rows of each image.
    fn shown(&self, rows: &[Vec<f32>], width: usize) -> Vec<Shown> {
        let shown = self.rows.iter().map(|(positions, [image, row])| {
            let elements = positions.len() * width;
            Shown {
                positions: positions.clone(),
                grid: Grid::row(positions.len()),
                rows: rows[*image][row * elements..][..elements].into(),
            }
        });
        shown.collect()
    }

    /// Logits after each token, computed in passes that end where `ends` says.
    fn logits(&self, runner: &mut Runner, images: &[Shown], ends: &[usize]) -> Vec<f32> {
        let mut sequence = runner.sequence();
        let mut start = 0;
        let ends = ends.iter().copied().chain([self.tokens.len()]);
        ends.flat_map(|end| {
            let logits = self.pass(runner, &mut sequence, images, start..end);
            start = end;
            logits
        })
        .collect()
    }

    fn pass(
        &self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        images: &[Shown],
        part: Range<usize>,
    ) -> Vec<f32> {
        let tokens = &self.tokens[part];
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens,
            sequence,
            logits: LogitRows::All,
            images,
        };
        let (model, scratch) = (&runner.model, &mut runner.scratch);
        let logits = model.forward(&runner.cpu, &mut [segment], scratch);
        let logits = logits.expect("valid tokens").to_vec();
        sequence.accept(tokens.len());
        logits
    }
}

/// Numbers in the places of a row's tokens.
fn stand_ins(picture: Picture) -> impl Iterator<Item = u32> {
    (0..picture.tokens().columns as u32).map(|index| u32::MAX - index)
}

/// A model with its eyes.
fn seeing(model: &str, [text, eyes]: [&str; 2], threads: usize) -> Runner {
    let path = |file: &str| folder().join(format!("vision/{model}/{file}"));
    let files = ModelFiles::open(&path(text)).expect("the fixture opens");
    let loaded = Model::load(files).expect("the fixture loads");
    let projector = (text != eyes).then(|| path(eyes));
    let loaded = with_images(loaded, projector.as_deref()).expect("it is the model's own");
    assert!(loaded.images().is_some());
    let policy = KvPolicy::default();
    Runner::of(loaded, policy, ElementType::F32, threads, TOKENS)
}

#[test]
fn logits_after_text_and_images_are_those_of_the_reference() {
    for model in MODELS {
        let expected = expected(model);
        let reference = floats(&format!("vision/{model}/logits.f32"));
        for form in FORMS {
            let rows = rows_of_images(model, form[1], 1);
            let mut runner = seeing(model, form, 1);
            let mut rest = &reference[..];
            for case in &expected.cases {
                let prompt = Prompt::of(case, &expected.images);
                let (wanted, tail) = rest.split_at(prompt.tokens.len() * expected.vocab);
                rest = tail;
                let shown = prompt.shown(&rows, expected.width);
                let found = prompt.logits(&mut runner, &shown, &[]);
                let error = relative_error(&found, wanted);
                println!("{model}, {form:?}: relative error {error:.2e}");
                assert!(error <= BOUND, "{model}, {form:?}: {error:e}");
            }
            assert!(rest.is_empty());
        }
    }
}

#[test]
fn passes_may_end_anywhere_and_sequences_are_computed_together_as_alone() {
    for model in MODELS {
        let expected = expected(model);
        let rows = rows_of_images(model, "hf", 1);
        let prompts = [0, 1].map(|case| Prompt::of(&expected.cases[case], &expected.images));
        let shown = prompts
            .each_ref()
            .map(|prompt| prompt.shown(&rows, expected.width));
        let mut runner = seeing(model, FORMS[0], 1);
        let alone = [0, 1].map(|at| prompts[at].logits(&mut runner, &shown[at], &[]));
        let mut threads = seeing(model, FORMS[0], 3);
        assert!(prompts[1].logits(&mut threads, &shown[1], &[]) == alone[1]);
        for end in 1..prompts[0].tokens.len() {
            let found = prompts[0].logits(&mut runner, &shown[0], &[end]);
            assert!(found == alone[0], "{model}, a pass that ends at {end}");
        }
        let mut sequences = [runner.sequence(), runner.sequence()];
        let mut segments: Vec<Segment<'_>> = Vec::new();
        for ((prompt, images), sequence) in prompts.iter().zip(&shown).zip(&mut sequences) {
            sequence.prepare(prompt.tokens.len()).expect("room");
            segments.push(Segment {
                tokens: &prompt.tokens,
                sequence,
                logits: LogitRows::All,
                images,
            });
        }
        let (model_of, scratch) = (&runner.model, &mut runner.scratch);
        let found = model_of.forward(&runner.cpu, &mut segments, scratch);
        assert!(found.expect("valid tokens") == alone.concat(), "{model}");
    }
}

#[test]
fn images_stand_in_prompts_row_by_row() {
    for model in MODELS {
        let expected = expected(model);
        for form in FORMS {
            let model = seeing(model, form, 1).model;
            let shape = *model.images().expect("it sees").shape();
            let first = expected.images[0];
            let (runs, grid) = shape.runs(first.tokens());
            assert_eq!((runs, grid.rows), (first.grid[0], 1));
            assert_eq!(grid.columns, first.grid[1]);
            // What a template writes has one mark for an image, the reference's prompt its rows and what is between.
            let prompt = Prompt::of(&expected.cases[0], &expected.images);
            let start = prompt.rows[0].0.start;
            let end = prompt.rows.last().expect("a row").0.end + 1;
            let mark = model.tokenizer().encode("[IMG]", Special::RENDERED);
            let mark = mark.expect("short");
            let mut tokens = [&prompt.tokens[..start], &mark, &prompt.tokens[end..]].concat();
            let image = ImageTokens {
                tiles: Grid::NONE,
                pictures: vec![stand_ins(first).collect(); runs],
            };
            let places = model.place_images(&mut tokens, &[image]).expect("places");
            assert_eq!(tokens, prompt.tokens);
            let wanted = prompt.rows.iter().map(|(range, _)| range.clone());
            assert_eq!(places, wanted.collect::<Vec<_>>());
        }
    }
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
struct LongestEdge {
    longest_edge: usize,
    sizes: BTreeMap<String, [usize; 2]>,
}

#[test]
fn images_are_brought_to_the_sizes_that_the_reference_brings_them_to() {
    let read = |name: &str| fs::read(folder().join("images").join(name)).expect("committed");
    let files: Files = serde_json::from_slice(&read("expected.json")).expect("valid JSON");
    let all: Vec<LongestEdge> =
        serde_json::from_slice(&read("longest-edge.json")).expect("valid JSON");
    let model = seeing("mistral3", FORMS[0], 1).model;
    let own = model.images().expect("it sees").shape().patches;
    for expected in all {
        let patches = Patches {
            size: ImageSize::Own {
                square: 2,
                least_pixels: 1,
                most_pixels: 40 * 40,
                longest_edge: Some(expected.longest_edge),
            },
            ..own
        };
        for (name, wanted) in expected.sizes {
            assert_eq!(patches.fit(files.files[&name].size), Ok(wanted), "{name}");
        }
    }
}

#[test]
fn numbers_of_encoders_that_are_out_of_range_are_typed_errors() {
    let path = folder().join("vision/mistral3/mmproj.gguf");
    let whole = fs::read(path).expect("committed");
    for key in [
        "clip.vision.patch_size",
        "clip.vision.image_size",
        "clip.vision.embedding_length",
        "clip.vision.block_count",
        "clip.vision.attention.head_count",
        "clip.vision.projection_dim",
        "clip.vision.spatial_merge_size",
    ] {
        let at = whole.windows(key.len()).position(|it| it == key.as_bytes());
        // Behind the name, the type of the number.
        let at = at.expect("the key") + key.len() + 4;
        for number in [0, 1, 3, 5000, i32::MAX as u32, u32::MAX] {
            let mut file = whole.clone();
            file[at..at + 4].copy_from_slice(&number.to_le_bytes());
            let files = ModelFiles::from_gguf(Mapping::from(file)).expect("a GGUF file");
            match ImageEncoder::load(files) {
                // Some are of other encoders that could be: of other sizes and heads.
                Ok(_) => assert!(
                    number > 0 && (key.contains("image_size") || key.contains("head_count")),
                    "{key}: {number}"
                ),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    }
}

#[test]
fn folders_with_other_encoders_and_rows_of_other_layers_are_refused() {
    let hf = folder().join("vision/pixtral/hf");
    let text = fs::read_to_string(hf.join("config.json")).expect("a committed fixture");
    for (from, to, reason) in [
        (
            "\"model_type\": \"pixtral\"",
            "\"model_type\": \"clip_vision_model\"",
            "clip_vision_model",
        ),
        (
            "\"vision_feature_layer\": -1",
            "\"vision_feature_layer\": -2",
            "layer -2",
        ),
        ("\"vision_feature_layer\": -1,", "", "layer -2"),
        ("\"full\"", "\"default\"", "default"),
        (
            "\"projector_hidden_act\": \"gelu\"",
            "\"projector_hidden_act\": \"relu\"",
            "relu",
        ),
    ] {
        assert!(text.contains(from), "{from}");
        let scratch = tempfile::tempdir().expect("a folder");
        for name in ["model.safetensors", "preprocessor_config.json"] {
            fs::copy(hf.join(name), scratch.path().join(name)).expect("room");
        }
        fs::write(scratch.path().join("config.json"), text.replace(from, to)).expect("room");
        let files = ModelFiles::open(scratch.path()).expect("it opens");
        let refused = ImageEncoder::load(files)
            .expect_err("of another kind")
            .to_string();
        assert!(refused.contains(reason), "{refused}");
    }
}
