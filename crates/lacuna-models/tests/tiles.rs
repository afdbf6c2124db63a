//! Models that see images in tiles: rows of pictures, prompts, and logits after text and images, against the reference
//! implementation, from both kinds of files; and what is refused.

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
    FiniteCheck, ForwardError, ImageEncoder, ImageTokens, LogitRows, Model, PromptError, Scratch,
    Segment, Shown, with_images,
};
use lacuna_text::tokenizer::Special;
use runner::{Runner, TOKENS, floats, folder, relative_error};
use serde::Deserialize;
use serde_json::{Value, json};

/// Twice what float32 makes of these models; the bar is a relative 1e-4.
const BOUND: f32 = 2e-5;

#[derive(Deserialize)]
struct Expected {
    vocab: usize,
    width: usize,
    /// Pictures, of which each is a pass of the encoder.
    images: usize,
    image_tokens: usize,
    /// How images are cut, where they are.
    #[serde(default)]
    tiles: Vec<Tiled>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Tiled {
    rows: usize,
    columns: usize,
    /// The first of its pictures.
    first: usize,
}

#[derive(Deserialize)]
struct Case {
    /// What a template writes, and which images are shown in it, where that is said.
    #[serde(default)]
    text: String,
    #[serde(default)]
    shown: Vec<usize>,
    parts: Vec<Part>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(untagged)]
enum Part {
    Token(u32),
    Image { image: usize },
}

/// The tiny model.
const MODELS: [&str; 1] = ["idefics3"];

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
    for model in MODELS {
        let reference = floats(&format!("vision/{model}/features.f32"));
        for file in ["hf", "mmproj.gguf"] {
            let found = rows_of_images(model, file, 1);
            let error = relative_error(&found, &reference);
            println!("{model}/{file}: relative error {error:.2e}");
            assert!(error <= BOUND, "{model}/{file}: {error:e}");
            // And the same bits by any number of threads.
            assert_eq!(found, rows_of_images(model, file, 3), "{model}/{file}");
        }
    }
}

#[test]
fn older_files_have_feed_forward_matrices_under_each_others_names() {
    let rows = rows_of_images("idefics3", "mmproj.gguf", 1);
    assert_eq!(rows, rows_of_images("idefics3", "older/mmproj.gguf", 1));
}

/// The text model in `text` with the encoder in `eyes`.
fn seeing(model: &str, text: &str, eyes: &str) -> Runner {
    let path = |file: &str| folder().join("vision").join(model).join(file);
    let files = ModelFiles::open(&path(text)).expect("the fixture opens");
    let loaded = Model::load(files).expect("the fixture loads");
    let projector = path(eyes);
    let projector = (text != eyes).then_some(projector.as_path());
    let loaded = with_images(loaded, projector).expect("it is the model's own");
    assert!(loaded.images().is_some());
    Runner::of(loaded, KvPolicy::default(), ElementType::F32, 1, TOKENS)
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
    for model in MODELS {
        let expected = expected(model);
        let reference = floats(&format!("vision/{model}/logits.f32"));
        for (text, eyes) in [("hf", "hf"), ("model.gguf", "mmproj.gguf")] {
            let rows = rows_of_images(model, eyes, 1);
            let mut runner = seeing(model, text, eyes);
            assert_eq!(runner.model.spec().hidden, expected.width);
            let mut rest = &reference[..];
            for case in &expected.cases {
                let prompt = Prompt::of(case, expected.image_tokens);
                let (wanted, tail) = rest.split_at(prompt.tokens.len() * expected.vocab);
                rest = tail;
                let found = prompt.logits(&mut runner, &rows, &[]);
                let error = relative_error(&found, wanted);
                let images = prompt.images.len();
                println!("{model}/{text}, {images} pictures: relative error {error:.2e}");
                assert!(
                    error <= BOUND,
                    "{model}/{text}, {images} pictures: {error:e}"
                );
            }
            assert!(rest.is_empty());
        }
    }
}

#[test]
fn passes_may_end_anywhere_where_tokens_of_images_are_as_those_of_texts() {
    let expected = expected("idefics3");
    let rows = rows_of_images("idefics3", "hf", 1);
    let prompt = Prompt::of(&expected.cases[1], expected.image_tokens);
    let mut runner = seeing("idefics3", "hf", "hf");
    let whole = prompt.logits(&mut runner, &rows, &[]);
    for end in 1..prompt.tokens.len() {
        let found = prompt.logits(&mut runner, &rows, &[end]);
        assert!(found == whole, "a pass that ends at {end}");
    }
    let ends: Vec<usize> = (1..prompt.tokens.len()).collect();
    assert!(prompt.logits(&mut runner, &rows, &ends) == whole);
}

#[test]
fn images_are_cut_and_stand_in_prompts_as_the_reference_has_them() {
    let expected = expected("idefics3");
    for (text, eyes) in [("hf", "hf"), ("model.gguf", "mmproj.gguf")] {
        let model = seeing("idefics3", text, eyes).model;
        let shape = *model.images().expect("it sees").shape();
        for (index, tiled) in expected.tiles.iter().enumerate() {
            let path = folder().join(format!("vision/idefics3/image-{index}.png"));
            let file = fs::read(path).expect("a committed fixture");
            let side = |at: usize| u32::from_be_bytes(file[at..at + 4].try_into().expect("four"));
            let sizes = shape.tiled([side(16) as usize, side(20) as usize]);
            let Grid { rows, columns } = sizes.expect("it is cut").tiles;
            assert_eq!((rows, columns), (tiled.rows, tiled.columns), "{index}");
        }
        for case in &expected.cases {
            let wanted = Prompt::of(case, expected.image_tokens);
            let images = case.shown.iter().map(|image| {
                let Tiled {
                    rows,
                    columns,
                    first,
                } = expected.tiles[*image];
                let pictures = first..first + rows * columns + 1;
                let stand_in = (0..expected.image_tokens as u32).map(|index| u32::MAX - index);
                ImageTokens {
                    tiles: Grid { rows, columns },
                    pictures: pictures.map(|_| stand_in.clone().collect()).collect(),
                }
            });
            let images: Vec<ImageTokens> = images.collect();
            let tokens = model.tokenizer().encode(&case.text, Special::RENDERED);
            let mut tokens = tokens.expect("short");
            let one_less = &images[1..];
            let refused = model.place_images(&mut tokens.clone(), one_less);
            assert!(matches!(refused, Err(PromptError::ImageCount { .. })));
            let places = model.place_images(&mut tokens, &images).expect("places");
            assert_eq!(tokens, wanted.tokens, "{text}: {}", case.text);
            let all = wanted.images.iter().map(|(range, _)| range.clone());
            assert_eq!(places, all.collect::<Vec<_>>(), "{text}: {}", case.text);
        }
    }
}

/// What is said of a folder whose file has `changed` at the place that `path` names, or its rows.
fn changed(name: &str, path: &[&str], value: Value) -> Result<Vec<f32>, String> {
    let scratch = tempfile::tempdir().expect("a folder");
    let hf = folder().join("vision/idefics3/hf");
    for entry in fs::read_dir(&hf).expect("a committed fixture") {
        let entry = entry.expect("readable");
        fs::copy(entry.path(), scratch.path().join(entry.file_name())).expect("room");
    }
    let file = scratch.path().join(name);
    let text = fs::read(&file).expect("it is there");
    let mut whole: Value = serde_json::from_slice(&text).expect("valid JSON");
    let place = path
        .iter()
        .fold(&mut whole, |place, name| &mut place[*name]);
    *place = value;
    fs::write(&file, whole.to_string()).expect("room");
    let files = ModelFiles::open(scratch.path()).map_err(|error| error.to_string())?;
    let loaded = ImageEncoder::load(files).map_err(|error| error.to_string())?;
    let Some(encoder) = loaded else {
        return Err("no encoder".to_owned());
    };
    drop(encoder);
    let mut eyes = Eyes::open(scratch.path(), 1);
    let grid = eyes.grid();
    let pixels = pixels("idefics3");
    let first = &pixels[..16 * 16 * 3];
    eyes.encode(first, grid).map_err(|error| error.to_string())
}

#[test]
fn smolvlm_is_idefics_3_by_another_name() {
    let class = json!(["SmolVLMForConditionalGeneration"]);
    let rows = changed("config.json", &["architectures"], class).expect("it loads");
    let all = rows_of_images("idefics3", "hf", 1);
    assert_eq!(rows, all[..rows.len()]);
}

#[test]
fn numbers_that_no_encoder_of_tiles_has_are_refused() {
    let [config, pixels] = ["config.json", "preprocessor_config.json"];
    for (file, path, value, says) in [
        (config, &["vision_config", "image_size"][..], json!(0), ""),
        (
            config,
            &["vision_config", "patch_size"],
            json!(0),
            "pixels of a patch",
        ),
        (
            config,
            &["vision_config", "patch_size"],
            json!(-1),
            "patch_size",
        ),
        (
            config,
            &["vision_config", "patch_size"],
            json!(3),
            "squares of 2",
        ),
        (
            config,
            &["vision_config", "num_attention_heads"],
            json!(5),
            "heads",
        ),
        (
            config,
            &["vision_config", "num_hidden_layers"],
            json!(9_000_000),
            "layers",
        ),
        (
            config,
            &["vision_config", "hidden_size"],
            json!(3 << 28),
            "hidden",
        ),
        (
            config,
            &["vision_config", "model_type"],
            json!("clip"),
            "clip",
        ),
        (
            config,
            &["vision_config", "hidden_act"],
            json!("relu"),
            "relu",
        ),
        (config, &["scale_factor"], json!(0), "merged patches"),
        (config, &["scale_factor"], json!(3), "squares of 3"),
        (
            config,
            &["scale_factor"],
            json!(1_000_000),
            "merged patches",
        ),
        (pixels, &["size", "longest_edge"], json!(0), "longer side"),
        (pixels, &["size", "longest_edge"], json!(-7), "longest_edge"),
        (
            pixels,
            &["size", "longest_edge"],
            json!(1 << 30),
            "longer side",
        ),
        (
            pixels,
            &["size", "longest_edge"],
            json!(4000),
            "tiles of a side",
        ),
        (
            pixels,
            &["max_image_size", "longest_edge"],
            json!(32),
            "tiles of 32",
        ),
        (pixels, &["resample"], json!(0), "filter 0"),
        (pixels, &["image_std"], json!([0.5, 0.0, 0.5]), "deviation"),
    ] {
        let refused = changed(file, path, value.clone()).expect_err(says);
        assert!(refused.contains(says), "{path:?} {value}: {refused}");
    }
}
