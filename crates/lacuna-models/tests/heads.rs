//! Heads that guess tokens, against a reference that has them written out over `transformers`' layers; and that a model
//! computes the same with its head and without.

mod runner;

use std::path::Path;

use lacuna_files::ModelFiles;
use lacuna_kernels::ElementType;
use lacuna_kv::{KvCache, KvElements, KvPolicy, Sequence};
use lacuna_models::plan::{ArenaPlan, WeightPlan};
use lacuna_models::quantize::{Plan, Recipe};
use lacuna_models::{
    BatchLimits, Description, ForwardError, Loading, LogitRows, Model, Scratch, Segment, describe,
    is_head, with_head,
};
use runner::{Runner, folder, relative_error};
use serde::Deserialize;

/// Float32 arithmetic against float64.
const BOUND: f32 = 1e-4;

/// A model's files, and those of its head where that has its own.
#[derive(Debug, Clone, Copy)]
struct Fixture {
    /// Where what is expected of the head is.
    folder: &'static str,
    model: &'static str,
    head: Option<&'static str>,
}

/// Every fixture, as files of each kind.
const FIXTURES: [Fixture; 12] = [
    mtp("heads/qwen3.5", "heads/qwen3.5/hf"),
    mtp("heads/qwen3.5", "heads/qwen3.5/model.gguf"),
    mtp("heads/ling", "heads/ling/hf"),
    mtp("heads/ling", "heads/ling/model.gguf"),
    eagle("", "hf", "heads/eagle3/head"),
    eagle("", "hf", "heads/eagle3/head.gguf"),
    eagle("", "model.gguf", "heads/eagle3/head"),
    eagle("", "model.gguf", "heads/eagle3/head.gguf"),
    eagle("/normed", "hf", "heads/eagle3/normed/head.gguf"),
    eagle("/normed", "model.gguf", "heads/eagle3/normed/head"),
    eagle("/speculators", "hf", "heads/eagle3/speculators/head"),
    eagle(
        "/speculators",
        "model.gguf",
        "heads/eagle3/speculators/head",
    ),
];

const fn mtp(folder: &'static str, model: &'static str) -> Fixture {
    Fixture {
        folder,
        model,
        head: None,
    }
}

const fn eagle(kind: &'static str, model: &'static str, head: &'static str) -> Fixture {
    Fixture {
        folder: match kind.as_bytes() {
            b"/normed" => "heads/eagle3/normed",
            b"/speculators" => "heads/eagle3/speculators",
            _ => "heads/eagle3",
        },
        model: match model.as_bytes() {
            b"hf" => "heads/eagle3/hf",
            _ => "heads/eagle3/model.gguf",
        },
        head: Some(head),
    }
}

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    guesses: Vec<u32>,
}

fn open(path: &str) -> ModelFiles {
    ModelFiles::open(&folder().join(path)).expect("the fixture opens")
}

fn described(files: ModelFiles) -> (ModelFiles, Description) {
    let description = describe(&files).expect("a model");
    (files, description)
}

impl Fixture {
    /// Its files: the model's, with the head's beside them.
    fn files(self) -> ModelFiles {
        let files = open(self.model);
        match self.head {
            None => files,
            Some(head) => with_head(files, &open(head)).expect("one tensor of a name"),
        }
    }

    fn with_head(self) -> Model {
        let (files, description) = described(self.files());
        assert!(description.has_head(), "{self:?}");
        let loading = &mut ();
        Model::load_described(files, description.with_head(), Loading::mapped(loading))
            .unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }
}

/// A model with what its passes and its head's need.
struct Guessing {
    runner: Runner,
    scratch: Scratch,
    cache: KvCache,
}

impl Guessing {
    fn of(fixture: Fixture) -> Self {
        let model = fixture.with_head();
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
        read(&mut self.runner, &mut sequence, tokens)
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

/// Has the model read further `tokens` of a sequence; returns their features.
fn read(runner: &mut Runner, sequence: &mut Sequence, tokens: &[u32]) -> Vec<f32> {
    sequence.prepare(tokens.len()).expect("room");
    let segment = Segment {
        tokens,
        sequence,
        logits: LogitRows::None,
        images: &[],
    };
    let Runner {
        model,
        cpu,
        scratch,
        ..
    } = runner;
    let outputs = model.forward_with_features(cpu, &mut [segment], scratch);
    let outputs = outputs.expect("valid tokens");
    assert!(outputs.logits.is_empty(), "none were asked for");
    let features = outputs.features.to_vec();
    sequence.accept(tokens.len());
    features
}

/// What is expected of the head in a folder: tokens and guesses, and logits.
fn expected(folder_of_head: &str) -> (Expected, Vec<f32>) {
    let text = std::fs::read(folder().join(folder_of_head).join("expected.json"));
    let expected = serde_json::from_slice(&text.expect("a committed fixture"));
    let reference = runner::floats(&format!("{folder_of_head}/logits.f32"));
    (expected.expect("valid JSON"), reference)
}

fn likeliest(row: &[f32]) -> u32 {
    let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
    u32::try_from(best.expect("a vocabulary")).expect("a token id")
}

#[test]
fn heads_match_the_reference_from_files_of_both_kinds_and_guess_from_their_own_features() {
    for fixture in FIXTURES {
        let (expected, reference) = expected(fixture.folder);
        let mut guessing = Guessing::of(fixture);
        let tokens = &expected.tokens;
        let given = guessing.features(tokens);
        let hidden = guessing.runner.model.spec().hidden;
        let given = &given[..given.len() - hidden];
        let mut sequence = guessing.cache.sequence(64).expect("address space");
        let (logits, mut features) = guessing.guess(&mut sequence, &tokens[1..], given);
        let error = relative_error(&logits, &reference);
        println!("{fixture:?}: relative error {error:.2e}");
        assert!(error <= BOUND, "{fixture:?}: {error:e}");

        let outputs = guessing.runner.model.spec().head_outputs();
        let likeliest = |model: &Model, logits: &[f32]| model.head_token(likeliest(logits));
        let last = &logits[logits.len() - outputs..];
        let mut guesses = vec![likeliest(&guessing.runner.model, last)];
        while guesses.len() < expected.guesses.len() {
            let last = features[features.len() - hidden..].to_vec();
            let token = [*guesses.last().expect("one")];
            let (logits, own) = guessing.guess(&mut sequence, &token, &last);
            features = own;
            guesses.push(likeliest(&guessing.runner.model, &logits));
        }
        assert_eq!(guesses, expected.guesses, "{fixture:?}");

        // One after another, from features of passes of one token each, too.
        let mut again = guessing.cache.sequence(64).expect("address space");
        let mut pieces = Vec::new();
        for (token, features) in tokens[1..].iter().zip(given.chunks_exact(hidden)) {
            pieces.extend(guessing.guess(&mut again, &[*token], features).0);
        }
        assert!(pieces == logits, "{fixture:?}: piece by piece");
    }
}

#[test]
fn a_model_computes_the_same_with_its_head_and_without() {
    for fixture in FIXTURES {
        let (files, description) = described(fixture.files());
        let tensors = |description: &Description| {
            let plan = WeightPlan::of_files(&files, description);
            let left_out = plan.tensors.iter().filter(|tensor| tensor.is_left_out);
            left_out.count()
        };
        let of_head = match fixture.head {
            None => {
                let number = description.spec.layers.len();
                let blocks = [
                    "mtp.".to_owned(),
                    format!("model.layers.{number}."),
                    format!("blk.{number}."),
                ];
                let ahead = |name: &str| blocks.iter().any(|block| name.starts_with(block));
                let tensors = files.tensors().iter();
                tensors.filter(|tensor| ahead(tensor.name)).count()
            }
            Some(_) => files.tensors().len() - open(fixture.model).tensors().len(),
        };
        assert_eq!(tensors(&description), of_head, "{fixture:?}");
        assert_eq!(tensors(&description.clone().with_head()), 0, "{fixture:?}");
        let plain = Model::load(files).expect("the head is not needed");
        assert!(plain.program().head().is_none() && plain.program().features().is_none());
        let active = plain.active_weight_bytes();
        let head = fixture.with_head();
        // What is kept in folders by the model's content is found again.
        let content = |files: &ModelFiles| files.content(None).expect("readable");
        assert_eq!(content(head.files()), content(&open(fixture.model)));
        // What an EAGLE-3 head reads is made of every token.
        let fused = head.files().tensors().iter();
        let fused =
            fused.filter(|it| it.name.starts_with("head/fc") || it.name.contains("input_norm"));
        let fused: usize = fused.map(|it| it.bytes).sum();
        assert_eq!(
            head.active_weight_bytes(),
            active + fused as u64,
            "{fixture:?}"
        );
        let tokens: Vec<u32> = (0..40).map(|token| token * 7 % 64).collect();
        let of = |model| Runner::of(model, KvPolicy::default(), ElementType::F32, 1, 64);
        let [plain, head] = [plain, head].map(|model| of(model).logits(&tokens));
        assert!(plain == head, "{fixture:?}");
    }
}

/// A folder with a copy of a head's, whose `config.json` is changed.
fn changed(head: &str, change: impl FnOnce(String) -> String) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a scratch folder");
    let from = folder().join(head);
    let weights = "model.safetensors";
    std::fs::copy(from.join(weights), copy.path().join(weights)).expect("room to copy");
    let config = std::fs::read_to_string(from.join("config.json")).expect("a committed fixture");
    std::fs::write(copy.path().join("config.json"), change(config)).expect("room for it");
    copy
}

#[test]
fn heads_that_are_not_for_a_model_are_refused() {
    let refused = |model: &str, head: &Path| {
        let head = ModelFiles::open(head).expect("the fixture opens");
        assert!(is_head(&head), "{model}");
        let files = with_head(open(model), &head).expect("one tensor of a name");
        let described = describe(&files);
        let loaded = described.and_then(|description| {
            Model::load_described(files, description.with_head(), Loading::mapped(&mut ()))
        });
        loaded.map(|_| ()).expect_err("refused").to_string()
    };
    let head = folder().join("heads/eagle3/head");
    let error = describe(&ModelFiles::open(&head).expect("files"));
    let error = error.map(|_| ()).expect_err("no model").to_string();
    assert!(error.contains("draft model"), "{error}");
    let error = refused("qwen3/hf", &head);
    assert!(error.contains("rows of 16"), "{error}");

    let model = "heads/eagle3/hf";
    let (layers, taps) = ("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2");
    let two = changed("heads/eagle3/head", |config| config.replace(layers, taps));
    let error = refused(model, two.path());
    assert!(error.contains("2 layers"), "{error}");
    let far = "\"eagle_aux_hidden_state_layer_ids\": [1, 2, 9], \"draft_vocab_size\"";
    let far = changed("heads/eagle3/head", |config| {
        config.replace("\"draft_vocab_size\"", far)
    });
    let error = refused(model, far.path());
    assert!(error.contains("layer that a head reads is 9"), "{error}");
    // Each output is so much further on than what the file says in GGUF files.
    let weights = std::fs::read(head.join("model.safetensors")).expect("a committed fixture");
    let header = 8 + usize::from_le_bytes(weights[..8].try_into().expect("eight bytes"));
    let text = std::str::from_utf8(&weights[8..header]).expect("JSON");
    let table: serde_json::Value = serde_json::from_str(text).expect("JSON");
    let offsets = &table["d2t"]["data_offsets"];
    let start = header + offsets[0].as_u64().expect("a number") as usize;
    for wrong in [64i64, -1, i64::MAX] {
        let copy = changed("heads/eagle3/head", |config| config);
        let mut weights = weights.clone();
        weights[start..start + 8].copy_from_slice(&wrong.to_le_bytes());
        std::fs::write(copy.path().join("model.safetensors"), weights).expect("room for it");
        let error = refused(model, copy.path());
        assert!(error.contains(&format!("guesses token {wrong}")), "{error}");
    }
}

#[test]
fn a_head_that_is_quantized_guesses_the_same_tokens_and_a_folder_is_refused() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("head.gguf");
    for head in ["heads/eagle3/head.gguf", "heads/gemma4-assistant/head.gguf"] {
        let head = open(head);
        let plan = Plan::new(&head, Recipe::F32).expect("matrices, vectors and perhaps a list");
        let threads = std::num::NonZeroUsize::MIN;
        plan.write_file(&path, threads, &mut ()).expect("room");
        let written = std::fs::metadata(&path).expect("a file").len();
        assert_eq!(written, plan.file_len());
        let again = ModelFiles::open(&path).expect("a GGUF file");
        assert!(is_head(&again));
        let list = |files: &ModelFiles| files.tensors().integers("d2t").expect("whole numbers");
        assert_eq!(list(&again), list(&head));
        for tensor in head.tensors().iter() {
            let mut others = again.tensors().iter();
            let other = others.find(|other| other.name == tensor.name);
            assert_eq!(other, Some(tensor));
        }
    }
    let folder = Plan::new(&open("heads/eagle3/head"), Recipe::F32);
    let refused = folder.map(|_| ()).expect_err("a folder").to_string();
    assert!(refused.contains("heads"), "{refused}");
}

/// Assistants, and what is expected of them.
const ASSISTANTS: [&str; 2] = ["heads/gemma4-assistant", "heads/gemma4-assistant-dense"];

/// An assistant reads the model's rows of the tokens before, as many as there are, and keeps none.
#[test]
fn assistants_match_the_reference_over_the_rows_of_their_model() {
    for folder in ASSISTANTS {
        for model in ["hf", "model.gguf"] {
            for head in ["head", "head.gguf"] {
                let head = format!("{folder}/{head}");
                guesses_over_rows(folder, &format!("{folder}/{model}"), &head);
            }
        }
    }
}

fn guesses_over_rows(folder: &'static str, model: &str, head: &str) {
    let (expected, reference) = expected(folder);
    let files = with_head(open(model), &open(head)).expect("one tensor of a name");
    let (files, description) = described(files);
    let model = Model::load_described(files, description.with_head(), Loading::mapped(&mut ()));
    let model = model.expect("a model");
    let elements = KvElements::both(ElementType::F32);
    let kept = model.spec().head_kv_geometry(elements).expect("no rows");
    assert!(model.borrows_rows() && kept.is_none(), "{head}");
    let mut runner = Runner::of(model, KvPolicy::default(), ElementType::F32, 2, 64);
    let program = runner.model.program().head().expect("a head");
    let limits = BatchLimits {
        tokens: 4,
        logit_rows: 4,
        context_tokens: 64,
    };
    let plan = ArenaPlan::new(program, limits).expect("small");
    let mut scratch = Scratch::new(program, plan).expect("a few kilobytes");
    let mut guess = |runner: &Runner, sequence: &mut Sequence, token, features: &[f32]| {
        let segment = Segment {
            tokens: &[token],
            sequence,
            logits: LogitRows::All,
            images: &[],
        };
        let outputs = runner
            .model
            .guess(&runner.cpu, &mut [segment], features, &mut scratch);
        outputs.map(|it| (it.logits.to_vec(), it.features.to_vec()))
    };
    let mut sequence = runner.sequence();
    let (&last, before) = expected.tokens.split_last().expect("tokens");
    let (mut logits, mut features) = (Vec::new(), Vec::new());
    for &token in before {
        if !features.is_empty() {
            let made = guess(&runner, &mut sequence, token, &features);
            logits.extend(made.expect("a token behind rows").0);
        }
        features = read(&mut runner, &mut sequence, &[token]);
    }
    let (mut token, mut guesses) = (last, Vec::new());
    while guesses.len() < expected.guesses.len() {
        let made = guess(&runner, &mut sequence, token, &features);
        let (row, own) = made.expect("a token behind rows");
        (token, features) = (likeliest(&row), own);
        if guesses.is_empty() {
            logits.extend(row);
        }
        guesses.push(token);
    }
    let error = relative_error(&logits, &reference);
    println!("{head}: relative error {error:.2e}");
    assert!(error <= BOUND, "{head}: {error:e}");
    assert_eq!(guesses, expected.guesses, "{head}");
    sequence.prepare(1).expect("room");
    let refused = guess(&runner, &mut sequence, 5, &features).expect_err("one is prepared");
    let prepared = matches!(refused, ForwardError::BorrowedRows { prepared: 1, .. });
    assert!(prepared, "{refused}");
}

#[test]
fn what_a_head_cannot_compute_is_refused() {
    let mut guessing = Guessing::of(FIXTURES[0]);
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
    let plain = Model::load(open(FIXTURES[0].model));
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
    let (files, description) = described(ModelFiles::open(copy.path()).expect("files"));
    assert!(!description.has_head());
    Model::load(files).expect("it writes all the same");
}
