//! Heads that guess tokens, against a reference that has them written out over `transformers`' layers; and that a model
//! computes the same with its head and without.

mod runner;

use std::path::Path;

use lacuna_files::ModelFiles;
use lacuna_kernels::ElementType;
use lacuna_kv::{KvCache, KvElements, KvPolicy, Sequence};
use lacuna_models::plan::{ArenaPlan, WeightPlan};
use lacuna_models::{
    BatchLimits, Description, ForwardError, Loading, LogitRows, Model, Scratch, Segment, describe,
};
use runner::{Runner, folder, relative_error};
use serde::Deserialize;

/// Float32 arithmetic against float64.
const BOUND: f32 = 1e-4;

/// Every fixture, as a file of each kind.
const FILES: [&str; 2] = ["heads/qwen3.5/hf", "heads/qwen3.5/model.gguf"];

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    guesses: Vec<u32>,
}

fn described(path: &Path) -> (ModelFiles, Description) {
    let files = ModelFiles::open(path).expect("the fixture opens");
    let description = describe(&files).expect("a model");
    (files, description)
}

fn with_head(path: &str) -> Model {
    let (files, description) = described(&folder().join(path));
    assert!(description.has_head(), "{path}");
    let loading = &mut ();
    Model::load_described(files, description.with_head(), Loading::mapped(loading))
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A model with what its passes and its head's need.
struct Guessing {
    runner: Runner,
    scratch: Scratch,
    cache: KvCache,
}

impl Guessing {
    fn of(path: &str) -> Self {
        let model = with_head(path);
        let runner = Runner::of(model, KvPolicy::default(), ElementType::F32, 2, 64);
        let head = runner.model.spec().of_head().expect("a head");
        let program = runner.model.program().head().expect("a head");
        let limits = BatchLimits {
            tokens: 64,
            logit_rows: 64,
            context_tokens: 64,
        };
        let plan = ArenaPlan::new(program, limits).expect("small");
        let geometry = head.kv_geometry(KvElements::both(ElementType::F32));
        Self {
            scratch: Scratch::new(program, plan).expect("a few kilobytes"),
            cache: KvCache::new(geometry.expect("whole blocks"), KvPolicy::default())
                .expect("the system has pages"),
            runner,
        }
    }

    /// The features of tokens.
    fn features(&mut self, tokens: &[u32]) -> Vec<f32> {
        let mut sequence = self.runner.sequence();
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens,
            sequence: &mut sequence,
            logits: LogitRows::None,
            images: &[],
        };
        let Runner {
            model,
            cpu,
            scratch,
            ..
        } = &mut self.runner;
        let outputs = model.forward_with_features(cpu, &mut [segment], scratch);
        let outputs = outputs.expect("valid tokens");
        assert!(outputs.logits.is_empty(), "none were asked for");
        outputs.features.to_vec()
    }

    /// The head's logits after each of `tokens`, and their features.
    fn guess(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        features: &[f32],
    ) -> (Vec<f32>, Vec<f32>) {
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens,
            sequence,
            logits: LogitRows::All,
            images: &[],
        };
        let (model, cpu) = (&self.runner.model, &self.runner.cpu);
        let outputs = model.guess(cpu, &mut [segment], features, &mut self.scratch);
        let outputs = outputs.expect("as many features as tokens");
        let found = (outputs.logits.to_vec(), outputs.features.to_vec());
        sequence.accept(tokens.len());
        found
    }
}

fn likeliest(row: &[f32]) -> u32 {
    let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
    u32::try_from(best.expect("a vocabulary")).expect("a token id")
}

#[test]
fn heads_match_the_reference_from_files_of_both_kinds_and_guess_from_their_own_features() {
    for path in FILES {
        let fixture = Path::new(path).parent().expect("a fixture").to_owned();
        let text = std::fs::read(folder().join(&fixture).join("expected.json"));
        let expected: Expected =
            serde_json::from_slice(&text.expect("a committed fixture")).expect("valid JSON");
        let reference = runner::floats(&format!("{}/logits.f32", fixture.display()));
        let mut guessing = Guessing::of(path);
        let tokens = &expected.tokens;
        let given = guessing.features(tokens);
        let hidden = guessing.runner.model.spec().hidden;
        let given = &given[..given.len() - hidden];
        let mut sequence = guessing.cache.sequence(64).expect("address space");
        let (logits, mut features) = guessing.guess(&mut sequence, &tokens[1..], given);
        let error = relative_error(&logits, &reference);
        println!("{path}: relative error {error:.2e}");
        assert!(error <= BOUND, "{path}: {error:e}");

        let vocabulary = guessing.runner.model.spec().vocabulary;
        let mut guesses = vec![likeliest(&logits[logits.len() - vocabulary..])];
        while guesses.len() < expected.guesses.len() {
            let last = features[features.len() - hidden..].to_vec();
            let token = [*guesses.last().expect("one")];
            let (logits, own) = guessing.guess(&mut sequence, &token, &last);
            features = own;
            guesses.push(likeliest(&logits));
        }
        assert_eq!(guesses, expected.guesses, "{path}");

        // One after another, from features of passes of one token each, too.
        let mut again = guessing.cache.sequence(64).expect("address space");
        let mut pieces = Vec::new();
        for (token, features) in tokens[1..].iter().zip(given.chunks_exact(hidden)) {
            pieces.extend(guessing.guess(&mut again, &[*token], features).0);
        }
        assert!(pieces == logits, "{path}: piece by piece");
    }
}

#[test]
fn a_model_computes_the_same_with_its_head_and_without() {
    for path in FILES {
        let (files, description) = described(&folder().join(path));
        let tensors = |description: &Description| {
            let plan = WeightPlan::of_files(&files, description);
            let left_out = plan.tensors.iter().filter(|tensor| tensor.is_left_out);
            left_out.count()
        };
        assert_eq!(tensors(&description), 15, "{path}");
        assert_eq!(tensors(&description.clone().with_head()), 0, "{path}");
        let plain = Model::load(files).expect("the head is not needed");
        assert!(plain.program().head().is_none() && plain.program().features().is_none());
        let active = plain.active_weight_bytes();
        let head = with_head(path);
        assert_eq!(head.active_weight_bytes(), active, "{path}");
        let tokens: Vec<u32> = (0..40).map(|token| token * 7 % 64).collect();
        let of = |model| Runner::of(model, KvPolicy::default(), ElementType::F32, 1, 64);
        let [plain, head] = [plain, head].map(|model| of(model).logits(&tokens));
        assert!(plain == head, "{path}");
    }
}

#[test]
fn what_a_head_cannot_compute_is_refused() {
    let mut guessing = Guessing::of(FILES[0]);
    let mut sequence = guessing.cache.sequence(64).expect("address space");
    sequence.prepare(2).expect("room");
    let mut refused = |model: &Model, features: &[f32]| {
        let segment = Segment {
            tokens: &[5, 6],
            sequence: &mut sequence,
            logits: LogitRows::Last,
            images: &[],
        };
        let cpu = &guessing.runner.cpu;
        let outputs = model.guess(cpu, &mut [segment], features, &mut guessing.scratch);
        outputs.map(|_| ()).expect_err("refused")
    };
    let wrong = ForwardError::FeatureCount {
        elements: 16,
        tokens: 2,
    };
    assert_eq!(refused(&guessing.runner.model, &[0.0; 16]), wrong);
    let plain = Model::load(ModelFiles::open(&folder().join(FILES[0])).expect("files"));
    let plain = plain.expect("a model");
    assert_eq!(refused(&plain, &[0.0; 32]), ForwardError::NoHead);
    // Of a folder whose description has a head and whose tensors have none, there is none.
    let other = folder().join("families/qwen3.5/hf");
    let copy = tempfile::tempdir().expect("a scratch folder");
    for file in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(other.join(file), copy.path().join(file)).expect("room to copy");
    }
    let config = std::fs::read_to_string(other.join("config.json")).expect("a committed fixture");
    let config = config.replacen('{', "{\"mtp_num_hidden_layers\": 1,", 1);
    std::fs::write(copy.path().join("config.json"), config).expect("room for it");
    let (files, description) = described(copy.path());
    assert!(!description.has_head());
    Model::load(files).expect("it writes all the same");
}
