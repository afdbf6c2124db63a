//! The demo model and its sparse sibling against what their training scripts recorded from independent implementations:
//! token ids, greedy continuations and held-out perplexity (`reference.json` and `reference-sparse.json` of `models/demo`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use lacuna::{Decode, Engine, EngineConfig, Model, ModelFiles, Sampling, Special, Tokenizer};
use serde::Deserialize;

#[derive(Deserialize)]
struct Reference {
    tokenization: Vec<Tokenization>,
    greedy: Vec<Greedy>,
    perplexity: Perplexity,
}

#[derive(Deserialize)]
struct Tokenization {
    text: String,
    tokens: Vec<u32>,
}

#[derive(Deserialize)]
struct Greedy {
    prompt: String,
    prompt_tokens: Vec<u32>,
    first_logits: Vec<(usize, f32)>,
    tokens: Vec<u32>,
    text: String,
}

#[derive(Deserialize)]
struct Perplexity {
    window: usize,
    scored_tokens: u64,
    q8_0: f64,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

/// A model, and what is known of it.
struct Subject {
    files: ModelFiles,
    /// What commands call it.
    argument: PathBuf,
    reference: Reference,
}

impl Subject {
    fn new(files: ModelFiles, argument: PathBuf, reference: &str) -> Self {
        let text = fs::read(folder().join(reference)).expect("committed with the model");
        Self {
            files,
            argument,
            reference: serde_json::from_slice(&text).expect("valid JSON"),
        }
    }

    /// That in the program.
    fn demo() -> Self {
        Self::new(lacuna::demo(), "demo".into(), "reference.json")
    }

    /// Its sibling, most of whose activations are zero.
    fn sparse() -> Self {
        let path = folder().join("lacuna-demo-sparse-q8_0.gguf");
        let files = ModelFiles::open(&path).expect("committed");
        Self::new(files, path, "reference-sparse.json")
    }

    fn both() -> [Self; 2] {
        [Self::demo(), Self::sparse()]
    }

    fn engine(&self) -> Engine {
        let model = Model::load(self.files.clone()).expect("a model");
        Engine::new(model.into(), &EngineConfig::default()).expect("this machine runs it")
    }
}

#[test]
fn the_model_in_the_program_is_the_file_in_the_repository() {
    let file = ModelFiles::open(&folder().join("lacuna-demo-q8_0.gguf")).expect("committed");
    let built_in = lacuna::demo();
    assert_eq!(file.tensors().len(), built_in.tensors().len());
    assert_eq!(
        file.tensors().total_bytes(),
        built_in.tensors().total_bytes()
    );
}

#[test]
fn token_ids_are_those_of_the_tokenizers_library() {
    for subject in Subject::both() {
        let tokenizer = Tokenizer::from_files(&subject.files).expect("its vocabulary");
        for case in subject.reference.tokenization {
            let found = tokenizer
                .encode(&case.text, Special::RENDERED)
                .expect("any text");
            assert_eq!(found, case.tokens, "{:?}", case.text);
        }
    }
}

/// Activations are rounded to 8 bits here and not in the reference, so a close call may fall the
/// other way; then the two texts part, and nothing after that can be compared.
fn follows_the_reference(subject: Subject) {
    let mut engine = subject.engine();
    let (mut agreed, mut compared) = (0, 0);
    for case in subject.reference.greedy {
        let prompt = engine
            .model()
            .tokenizer()
            .encode(&case.prompt, Special::RENDERED)
            .expect("text");
        assert_eq!(prompt, case.prompt_tokens, "{:?}", case.prompt);
        let mut session = engine.session(Sampling::greedy()).expect("address space");
        session.extend(&prompt);
        let mut found = Vec::new();
        while found.len() < case.tokens.len() {
            found.extend(engine.step(&mut session).expect("room"));
        }
        assert_eq!(found[0], case.tokens[0], "{:?}", case.prompt);
        agreed += found
            .iter()
            .zip(&case.tokens)
            .take_while(|(a, b)| a == b)
            .count();
        compared += case.tokens.len();
        let text = engine
            .model()
            .tokenizer()
            .decode(&case.tokens, Decode::CONTINUATION)
            .expect("ids");
        assert_eq!(text.trim_end(), case.text.trim_end());
    }
    println!("{agreed} of {compared} tokens before the texts part");
    assert!(
        agreed * 4 >= compared,
        "only {agreed} of {compared} tokens agree"
    );
}

#[test]
fn greedy_text_follows_the_reference() {
    Subject::both().into_iter().for_each(follows_the_reference);
}

#[test]
fn first_logits_are_close_to_the_reference() {
    for subject in Subject::both() {
        let mut engine = subject.engine();
        for case in subject.reference.greedy {
            let last = case.prompt_tokens.len() - 1;
            let mut row = Vec::new();
            engine
                .score(&case.prompt_tokens, |position, logits| {
                    if position == last {
                        row = logits.to_vec();
                    }
                })
                .expect("valid tokens");
            for (token, expected) in case.first_logits {
                let error = (row[token] - expected).abs();
                assert!(
                    error < 0.25,
                    "token {token} of {:?}: {} for {expected}",
                    case.prompt,
                    row[token]
                );
            }
        }
    }
}

/// The command's report on a text, in windows of `window` tokens.
fn perplexity(model: &Path, text: &Path, window: usize, kv_type: &str) -> serde_json::Value {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .arg("perplexity")
        .args([model, text])
        .args(["--ctx", &window.to_string(), "--kv-type", kv_type, "--json"])
        // On every processor alike.
        .args(["--matmul-precision", "f32"])
        .output()
        .expect("the program starts");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

#[test]
fn held_out_perplexity_is_the_one_recorded() {
    let text = folder().join("heldout.txt");
    for subject in Subject::both() {
        let expected = subject.reference.perplexity;
        let found = perplexity(&subject.argument, &text, expected.window, "f16");
        assert_eq!(found["tokens"].as_u64(), Some(expected.scored_tokens));
        let perplexity = found["perplexity"].as_f64().expect("a number");
        let error = (perplexity / expected.q8_0 - 1.0).abs();
        assert!(error < 0.005, "{perplexity} for {}", expected.q8_0);
    }
}

#[test]
fn cached_rows_in_fewer_bits_predict_almost_as_well() {
    let text = fs::read_to_string(folder().join("heldout.txt")).expect("committed");
    let part = tempfile::NamedTempFile::new().expect("a file");
    let cut = text.floor_char_boundary(12_000);
    fs::write(part.path(), &text[..cut]).expect("written");
    let of = |kv_type| {
        let report = perplexity(Path::new("demo"), part.path(), 1_024, kv_type);
        report["perplexity"].as_f64().expect("a number")
    };
    let f16 = of("f16");
    for (kv_type, most) in [
        ("f32", 0.005),
        ("bf16", 0.005),
        ("q8_0", 0.001),
        ("q4_0", 0.02),
        ("iq4_nl", 0.02),
    ] {
        let error = (of(kv_type) / f16 - 1.0).abs();
        assert!(error < most, "{kv_type}: {error}");
    }
}
