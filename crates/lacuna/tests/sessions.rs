//! Conversations under a name, each turn in a process of its own: they say what one says that never stops.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lacuna::{
    AddSpecial, EncodeLimits, Engine, EngineConfig, Generation, Limits, Message, Model, ModelFiles,
    ParseSpecial, Sampling, Session, Special, SpecialText,
};
use serde_json::Value;

/// Tokens of a turn.
const REPLY: usize = 40;

const SAID: [&str; 3] = [
    "The sea was calm when the three boats left the harbour, and nobody had seen the letter yet.",
    "Who had written the letter?",
    "And what did the captain say when she read it?",
];
/// For vocabularies of letters.
const SPELLED: [&str; 3] = ["theseawascalm", "whowrotetheletter", "whatdidshesay"];

/// How turns become tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turns {
    /// By the model's template.
    Messages,
    /// One after the other, as they are.
    Text,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What each turn says in one process, and how many tokens it has.
fn without_stopping(model: &Path, turns: Turns, said: &[&str]) -> Vec<Vec<u32>> {
    let files = ModelFiles::open(model).expect("it is there");
    let model = Model::load(files).expect("a model");
    let mut engine = Engine::new(model.into(), &EngineConfig::default()).expect("an engine");
    let mut session = engine.session(Sampling::greedy()).expect("address space");
    let mut history = Vec::new();
    let each = said.iter().map(|text| {
        let tokens = match turns {
            Turns::Messages => {
                history.push(Message::new("user", *text));
                let limits = limits(&engine);
                let prompt = engine.model().conversation(&history, None, &limits);
                let prompt = prompt.expect("a template");
                assert!(prompt.reader.is_none(), "it thinks and calls nothing");
                prompt.tokens
            }
            Turns::Text => goes_on(&engine, &session, text),
        };
        session.rewrite(&tokens).expect("memory");
        let limits = Limits {
            max_tokens: Some(REPLY),
            special: SpecialText::Skip,
            ..Limits::default()
        };
        let mut generation = Generation::new(&mut engine, &mut session, limits).expect("a prompt");
        let mut answer = String::new();
        while let Some(piece) = generation.next_piece().expect("a step") {
            answer += &piece;
        }
        let tokens = generation.tokens().to_vec();
        history.push(Message::new("assistant", answer));
        tokens
    });
    each.collect()
}

fn limits(engine: &Engine) -> EncodeLimits {
    EncodeLimits {
        tokens: engine.context_tokens(),
        workspace_bytes: 1 << 20,
    }
}

fn goes_on(engine: &Engine, session: &Session, text: &str) -> Vec<u32> {
    let special = Special {
        add: match session.tokens().is_empty() {
            true => AddSpecial::Yes,
            false => AddSpecial::No,
        },
        parse: ParseSpecial::Yes,
    };
    let tokenizer = engine.model().tokenizer();
    let more = tokenizer.encode_within(text, special, &limits(engine));
    [session.tokens(), &more.expect("text")].concat()
}

/// What `lacuna run MODEL --session` reports of a turn.
fn run(model: &Path, folder: &Path, turns: Turns, text: &str) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    command.arg("run").arg(model);
    command
        .args(["--session", "talk", "--sessions"])
        .arg(folder);
    command.args([
        "-p",
        text,
        "-n",
        &REPLY.to_string(),
        "--temp",
        "0",
        // As the library computes.
        "--matmul-precision",
        "f32",
        "--json",
    ]);
    if turns == Turns::Text {
        command.arg("--raw");
    }
    let output = command.stdin(Stdio::null()).output();
    let output = output.expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert!(!error.contains("computed again"), "{error}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// `again` says how many tokens of what was there a turn may compute again.
fn goes_on_as_if_it_had_not_stopped(model: &Path, turns: Turns, said: &[&str], again: u64) {
    let expected = without_stopping(model, turns, said);
    let folder = tempfile::tempdir().expect("a folder");
    let mut before = 0;
    for (turn, (text, expected)) in said.iter().zip(&expected).enumerate() {
        let report = run(model, folder.path(), turns, text);
        let found = report["tokens"].as_array().expect("tokens").iter();
        let found: Vec<u64> = found.filter_map(Value::as_u64).collect();
        let expected: Vec<u64> = expected.iter().map(|&token| token.into()).collect();
        assert_eq!(found, expected, "turn {turn}");
        let number = |name: &str| report[name].as_u64().expect("a number");
        let reused = number("reused_tokens");
        assert!(
            reused + again >= before,
            "turn {turn}: {reused} of {before}"
        );
        before = number("prompt_tokens") + number("generated_tokens");
    }
}

#[test]
fn small_models_with_states_and_windows_go_on_in_another_process() {
    for family in ["qwen3.5", "gemma3", "falcon-h1"] {
        let model = root().join("reference/families").join(family);
        goes_on_as_if_it_had_not_stopped(&model.join("model.gguf"), Turns::Text, &SPELLED, 1);
    }
}

/// The template ends what was said last with a token that the model was not asked for.
#[test]
#[ignore = "needs SmolLM2: run .ci/fetch-models"]
fn smollm2_goes_on_in_another_process() {
    let model = root().join("target/models/smollm2-135m-instruct-q4_1.gguf");
    goes_on_as_if_it_had_not_stopped(&model, Turns::Messages, &SAID, 2);
}

#[test]
#[ignore = "needs Gemma 3: run .ci/fetch-models"]
fn gemma_3_goes_on_in_another_process() {
    let model = root().join("target/models/gemma-3-270m-q4_k_m.gguf");
    goes_on_as_if_it_had_not_stopped(&model, Turns::Text, &SAID, 1);
}
