//! What tests of whole models have in common: the committed fixtures, and a model with everything a
//! forward pass needs.
#![allow(
    dead_code,
    clippy::expect_used,
    reason = "each test program uses some of it"
)]

pub(crate) mod encoder;

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use lacuna_files::ModelFiles;
use lacuna_kernels::{Cpu, CpuConfig, ElementType};
use lacuna_kv::{KvCache, KvElements, KvPolicy, Sequence};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::{BatchLimits, ForwardError, LogitRows, Model, Scratch, Segment};
use serde::Deserialize;

pub(crate) const TOKENS: usize = 192;

#[derive(Deserialize)]
pub(crate) struct Expected {
    pub(crate) vocab: usize,
    pub(crate) tokens: Vec<u32>,
    pub(crate) rows: Vec<usize>,
    #[serde(default)]
    pub(crate) greedy: Option<Greedy>,
    /// Tokens of the context to run it with, where that decides what is computed.
    #[serde(default)]
    pub(crate) context: Option<usize>,
}

#[derive(Deserialize)]
pub(crate) struct Greedy {
    pub(crate) prompt: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
}

impl Expected {
    /// Of a row of logits for each token, those that are known.
    pub(crate) fn rows_of(&self, found: &[f32]) -> Vec<f32> {
        let rows = self.rows.iter();
        let rows = rows.flat_map(|&row| &found[row * self.vocab..(row + 1) * self.vocab]);
        rows.copied().collect()
    }
}

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference")
}

/// The names of all fixtures of families.
pub(crate) fn families() -> Vec<String> {
    let entries = fs::read_dir(folder().join("families")).expect("committed fixtures");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("readable").file_name())
        .map(|name| name.into_string().expect("UTF-8"))
        .collect();
    names.sort();
    assert!(names.len() >= 20, "{names:?}");
    names
}

pub(crate) fn expected(model: &str) -> Expected {
    let text = fs::read(folder().join(model).join("expected.json")).expect("a committed fixture");
    serde_json::from_slice(&text).expect("valid JSON")
}

pub(crate) fn floats(path: &str) -> Vec<f32> {
    let bytes = fs::read(folder().join(path)).expect("a committed fixture");
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&word| f32::from_le_bytes(word))
        .collect()
}

/// A model with everything a forward pass needs.
pub(crate) struct Runner {
    pub(crate) model: Model,
    pub(crate) cpu: Cpu,
    pub(crate) scratch: Scratch,
    pub(crate) cache: KvCache,
}

impl Runner {
    pub(crate) fn open(path: &str) -> Self {
        Self::with(path, KvPolicy::default(), ElementType::F32, 1)
    }

    pub(crate) fn with(path: &str, policy: KvPolicy, element: ElementType, threads: usize) -> Self {
        let files = ModelFiles::open(&folder().join(path)).expect("the fixture opens");
        let model = Model::load(files).expect("the fixture loads");
        Self::of(model, policy, element, threads, TOKENS)
    }

    /// `model`, with contexts of `context_tokens`.
    pub(crate) fn of(
        model: Model,
        policy: KvPolicy,
        element: ElementType,
        threads: usize,
        context_tokens: usize,
    ) -> Self {
        let threads = NonZeroUsize::new(threads).expect("at least one");
        let cpu = Cpu::new(CpuConfig {
            threads,
            ..CpuConfig::default()
        })
        .expect("this machine's own level");
        let limits = BatchLimits {
            tokens: TOKENS,
            logit_rows: TOKENS,
            context_tokens,
        };
        let geometry = model
            .spec()
            .kv_geometry(KvElements::both(element))
            .expect("whole blocks");
        let plan = ArenaPlan::new(model.program(), limits).expect("small");
        let scratch = Scratch::new(model.program(), plan).expect("a few kilobytes");
        let cache = KvCache::new(geometry, policy).expect("the system has pages");
        Self {
            model,
            cpu,
            scratch,
            cache,
        }
    }

    pub(crate) fn sequence(&self) -> Sequence {
        self.cache
            .sequence(self.scratch.limits().context_tokens)
            .expect("address space")
    }

    /// The rows of logits that a pass over `tokens` gives.
    pub(crate) fn pass(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        logits: LogitRows,
    ) -> Result<Vec<f32>, ForwardError> {
        sequence
            .prepare(tokens.len())
            .expect("room for the fixture");
        let segment = Segment {
            tokens,
            sequence,
            logits,
            images: &[],
        };
        let (model, scratch) = (&self.model, &mut self.scratch);
        let logits = model.forward(&self.cpu, &mut [segment], scratch)?.to_vec();
        sequence.accept(tokens.len());
        Ok(logits)
    }

    /// Logits after each of `tokens`, computed in one pass.
    pub(crate) fn extend(&mut self, sequence: &mut Sequence, tokens: &[u32]) -> Vec<f32> {
        let logits = self.pass(sequence, tokens, LogitRows::All);
        logits.expect("valid tokens")
    }

    /// The `count` tokens that follow `prompt` when the likeliest is always taken.
    pub(crate) fn greedy(&mut self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut sequence = self.sequence();
        let mut logits = self.extend(&mut sequence, prompt);
        let vocabulary = self.model.spec().vocabulary;
        let mut tokens = Vec::new();
        for _ in 0..count {
            let row = &logits[logits.len() - vocabulary..];
            let best = (0..vocabulary)
                .max_by(|&a, &b| row[a].total_cmp(&row[b]))
                .expect("a vocabulary");
            tokens.push(u32::try_from(best).expect("a token id"));
            logits = self.extend(&mut sequence, &tokens[tokens.len() - 1..]);
        }
        tokens
    }

    pub(crate) fn logits(&mut self, tokens: &[u32]) -> Vec<f32> {
        let mut sequence = self.sequence();
        self.extend(&mut sequence, tokens)
    }
}

/// Largest difference over the largest expected magnitude.
pub(crate) fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected
        .iter()
        .fold(0f32, |max, value| max.max(value.abs()));
    let worst = found
        .iter()
        .zip(expected)
        .fold(0f32, |max, (a, b)| max.max((a - b).abs()));
    worst / scale
}

pub(crate) fn check_rows(
    found: &[f32],
    expected: &Expected,
    reference: &[f32],
    bound: f32,
    what: &str,
) {
    let rows = expected.rows_of(found);
    let error = relative_error(&rows, reference);
    println!("{what}: relative error {error:.2e}");
    assert!(
        error <= bound,
        "{what}: relative error {error:e} exceeds {bound:e}"
    );
}
