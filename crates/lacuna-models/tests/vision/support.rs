//! The committed fixtures of models that see: their encoders, and prompts with images.

use std::fs;
use std::num::NonZeroUsize;
use std::ops::Range;

use lacuna_files::ModelFiles;
use lacuna_kernels::{Cpu, CpuConfig, ElementType};
use lacuna_kv::{KvPolicy, Sequence};
use lacuna_models::spec::{Grid, ImageSize};
use lacuna_models::{
    FiniteCheck, ForwardError, ImageEncoder, LogitRows, Model, Scratch, Segment, Shown, with_images,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::runner::{Runner, TOKENS, folder};

/// Twice what float32 makes of these models; the bar is a relative 1e-4.
pub(crate) const BOUND: f32 = 2e-5;
/// All of them: with images of one size, with those of any, in tiles, and row by row.
pub(crate) const MODELS: [&str; 11] = [
    "gemma3",
    "gemma4",
    "gemma4-dense",
    "qwen3-vl",
    "qwen3-vl-moe",
    "qwen3.5",
    "qwen2.5-vl",
    "qwen2-vl",
    "idefics3",
    "pixtral",
    "mistral3",
];
/// Files of a decoder, and of its encoder.
pub(crate) const FORMS: [[&str; 2]; 2] = [["hf", "hf"], ["model.gguf", "mmproj.gguf"]];

#[derive(Deserialize)]
pub(crate) struct Expected {
    pub(crate) vocab: usize,
    pub(crate) width: usize,
    /// Further parts of a row.
    #[serde(default)]
    deepstack: usize,
    pub(crate) images: Vec<Image>,
    pub(crate) cases: Vec<Case>,
}

impl Expected {
    /// Elements of a row of an image.
    pub(crate) fn row_width(&self) -> usize {
        self.width * (1 + self.deepstack)
    }
}

#[derive(Deserialize, Clone, Copy)]
pub(crate) struct Image {
    /// Pixels of width and of height, of each picture.
    pub(crate) size: [usize; 2],
    /// Rows and columns of tokens, of each picture.
    grid: [usize; 2],
    /// Rows and columns of tiles, where it is cut: these are pictures, and the whole behind them.
    #[serde(default)]
    tiles: [usize; 2],
}

impl Image {
    /// Tokens of each picture.
    pub(crate) fn tokens(self) -> Grid {
        let [rows, columns] = self.grid;
        Grid { rows, columns }
    }

    pub(crate) fn tiles(self) -> Grid {
        let [rows, columns] = self.tiles;
        Grid { rows, columns }
    }

    pub(crate) fn pictures(self) -> usize {
        self.tiles().count() + 1
    }

    /// Bytes of each picture.
    pub(crate) fn bytes(self) -> usize {
        self.size[0] * self.size[1] * 3
    }
}

#[derive(Deserialize)]
pub(crate) struct Case {
    /// What a template writes, and which images are shown in it, where that is said.
    #[serde(default)]
    pub(crate) text: String,
    #[serde(default)]
    pub(crate) shown: Vec<usize>,
    parts: Vec<Part>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(untagged)]
enum Part {
    Token(u32),
    Row { image: usize, row: usize },
    Tile { image: usize, tile: usize },
    Image { image: usize },
}

pub(crate) fn read(path: &str) -> Vec<u8> {
    fs::read(folder().join(path)).expect("a committed fixture")
}

pub(crate) fn json<T: DeserializeOwned>(path: &str) -> T {
    serde_json::from_slice(&read(path)).expect("valid JSON")
}

pub(crate) fn expected(model: &str) -> Expected {
    json(&format!("vision/{model}/expected.json"))
}

/// An encoder with everything a pass needs.
pub(crate) struct Eyes {
    pub(crate) encoder: ImageEncoder,
    cpu: Cpu,
    scratch: Scratch,
}

impl Eyes {
    pub(crate) fn open(model: &str, file: &str, threads: usize) -> Self {
        let files = ModelFiles::open(&folder().join(format!("vision/{model}/{file}")));
        let encoder = ImageEncoder::load(files.expect("the fixture opens"));
        Self::of(
            encoder.expect("the fixture loads").expect("it sees"),
            threads,
        )
    }

    pub(crate) fn of(encoder: ImageEncoder, threads: usize) -> Self {
        let config = CpuConfig {
            threads: NonZeroUsize::new(threads).expect("at least one"),
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

    pub(crate) fn encode(&mut self, pixels: &[u8], grid: Grid) -> Result<Vec<f32>, ForwardError> {
        let rows = (self.encoder).encode(&self.cpu, (pixels, grid), &mut self.scratch)?;
        Ok(rows.to_vec())
    }
}

/// The rows of each image, those of its pictures one after another, from an encoder's own files.
pub(crate) fn rows_of_images(model: &str, file: &str, threads: usize) -> Vec<Vec<f32>> {
    let mut eyes = Eyes::open(model, file, threads);
    let shape = *eyes.encoder.shape();
    let pixels = read(&format!("vision/{model}/images.u8"));
    let mut rest = &pixels[..];
    let images = expected(model).images.into_iter().map(|image| {
        let grid = shape.grid(image.size);
        match shape.patches.size {
            // They are smaller than any that is made as large as may be, and are taken all the same.
            ImageSize::Filled { .. } => assert!(shape.patches.takes(grid), "{model}"),
            _ => assert_eq!(shape.fit(image.size), Ok(image.size), "{model}"),
        }
        assert_eq!(shape.tokens(grid), image.tokens(), "{model}");
        let (pictures, tail) = rest.split_at(image.pictures() * image.bytes());
        rest = tail;
        let pictures = pictures.chunks_exact(image.bytes());
        let rows = pictures.flat_map(|pixels| eyes.encode(pixels, grid).expect("of its size"));
        rows.collect()
    });
    let images = images.collect();
    assert!(rest.is_empty(), "{model}");
    images
}

/// A model of `form` with its eyes.
pub(crate) fn seeing(model: &str, form: [&str; 2]) -> Runner {
    seeing_with(model, form, KvPolicy::default(), 1)
}

pub(crate) fn seeing_with(
    model: &str,
    [text, eyes]: [&str; 2],
    policy: KvPolicy,
    threads: usize,
) -> Runner {
    let path = |file: &str| folder().join(format!("vision/{model}/{file}"));
    let files = ModelFiles::open(&path(text)).expect("the fixture opens");
    let loaded = Model::load(files).expect("the fixture loads");
    let projector = (text != eyes).then(|| path(eyes));
    let loaded = with_images(loaded, projector.as_deref()).expect("it is the model's own");
    assert!(loaded.images().is_some());
    Runner::of(loaded, policy, ElementType::F32, threads, TOKENS)
}

/// Numbers in the places of an image's tokens: what they are must not matter.
pub(crate) fn stand_ins(count: usize) -> impl Iterator<Item = u32> {
    (0..count as u32).map(|index| u32::MAX - index)
}

/// A prompt's tokens, and which of them stand for what.
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) runs: Vec<Run>,
    row_width: usize,
}

/// Tokens that stand for an image, or for a part of it.
pub(crate) struct Run {
    pub(crate) positions: Range<usize>,
    grid: Grid,
    pub(crate) image: usize,
    /// Which of the image's rows is its first.
    first: usize,
}

impl Prompt {
    pub(crate) fn of(expected: &Expected, case: usize) -> Self {
        let (mut tokens, mut runs) = (Vec::new(), Vec::new());
        let grid = |image: usize| expected.images[image].tokens();
        for part in &expected.cases[case].parts {
            let (image, grid, first) = match *part {
                Part::Token(token) => {
                    tokens.push(token);
                    continue;
                }
                Part::Image { image } => (image, grid(image), 0),
                Part::Tile { image, tile } => (image, grid(image), tile * grid(image).count()),
                Part::Row { image, row } => {
                    let columns = grid(image).columns;
                    (image, Grid::row(columns), row * columns)
                }
            };
            let start = tokens.len();
            tokens.extend(stand_ins(grid.count()));
            runs.push(Run {
                positions: start..tokens.len(),
                grid,
                image,
                first,
            });
        }
        Self {
            tokens,
            runs,
            row_width: expected.row_width(),
        }
    }

    /// What it shows, of the rows of each image.
    pub(crate) fn shown(&self, rows: &[Vec<f32>]) -> Vec<Shown> {
        let shown = self.runs.iter().map(|run| {
            let elements = run.grid.count() * self.row_width;
            Shown {
                positions: run.positions.clone(),
                grid: run.grid,
                rows: rows[run.image][run.first * self.row_width..][..elements].into(),
            }
        });
        shown.collect()
    }

    /// Logits after each token, computed in passes that end where `ends` says.
    pub(crate) fn logits(
        &self,
        runner: &mut Runner,
        rows: &[Vec<f32>],
        ends: &[usize],
    ) -> Vec<f32> {
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

    pub(crate) fn pass(
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
