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

fn lacuna(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    command.args(arguments).stdin(Stdio::null());
    command.env_remove("LACUNA_SESSIONS");
    command
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// What the command prints when it succeeds.
#[track_caller]
fn done(arguments: &[&str]) -> String {
    let output = lacuna(arguments).output().expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).expect("text")
}

#[track_caller]
fn refused(arguments: &[&str], code: i32, expected: &str) {
    let output = lacuna(arguments).output().expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    assert!(error.contains(expected), "{arguments:?}: {error}");
}

/// Says something to the demo model in the session `name` of `folder`, with these arguments besides.
fn turn<'a>(folder: &'a Path, name: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let said = ["run", "demo", "-p", "Hi", "-n", "4", "--session", name];
    [&said[..], &["--sessions", text(folder)], more].concat()
}

/// Exporting used to put a file in the place of devices, to replace files without a word, and to remove a neighbour whose
/// name ends in `.part`.
#[cfg(unix)]
#[test]
fn an_export_replaces_nothing_that_it_was_not_told_to() {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};

    let folder = tempfile::tempdir().expect("a folder");
    let sessions = folder.path().join("sessions");
    done(&turn(&sessions, "notes", &[]));
    let kept = std::fs::read(sessions.join("notes.session")).expect("it was kept");
    let export = |to: &'static str| {
        let mut command = lacuna(&["sessions", "export", "notes", to, "--sessions"]);
        command.arg(&sessions).current_dir(folder.path());
        command
    };
    let succeeds = |command: &mut Command| {
        let output = command.output().expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
    };

    let neighbour = folder.path().join("notes.part");
    std::fs::write(&neighbour, "precious").expect("a file");
    let file = folder.path().join("notes.session");
    succeeds(&mut export("notes.session"));
    assert_eq!(std::fs::read(&file).expect("a file"), kept);
    assert_eq!(std::fs::read(&neighbour).expect("a file"), b"precious");
    assert_eq!(
        file.metadata().expect("a file").permissions().mode() & 0o777,
        0o600
    );

    std::fs::write(&file, "something else").expect("a file");
    let output = export("notes.session")
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("is there already; --overwrite replaces it"),
        "{error}"
    );
    assert_eq!(std::fs::read(&file).expect("a file"), b"something else");
    succeeds(export("notes.session").arg("--overwrite"));
    assert_eq!(std::fs::read(&file).expect("a file"), kept);

    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("it is there").success());
    let reader = {
        let pipe = pipe.clone();
        std::thread::spawn(move || std::fs::read(pipe).expect("what is written"))
    };
    succeeds(&mut export("pipe"));
    assert_eq!(reader.join().expect("it reads"), kept);
    assert!(pipe.metadata().expect("a pipe").file_type().is_fifo());
}

/// The turn used to be computed, and then lost.
#[test]
fn kv_memory_that_no_file_keeps_is_refused_before_a_turn() {
    let folder = tempfile::tempdir().expect("a folder");
    for policy in ["dense", "paged", "grow:mlx"] {
        let turn = turn(folder.path(), "talk", &["--kv", policy]);
        let expected = format!(
            "KV memory that is held as `{policy}` cannot be kept in a session; use --kv sparse"
        );
        refused(&turn, 2, &expected);
    }
    done(&turn(folder.path(), "talk", &["--kv", "sparse:head-major"]));
}

/// A chat used to drop the text of its session without a word, and the text that followed a chat was lost.
#[test]
fn text_and_chats_do_not_go_on_in_one_session() {
    let folder = tempfile::tempdir().expect("a folder");
    let (chat, raw) = (
        turn(folder.path(), "chat", &[]),
        turn(folder.path(), "text", &["--raw"]),
    );
    done(&chat);
    done(&raw);
    let before = std::fs::read(folder.path().join("text.session")).expect("it was kept");
    refused(
        &turn(folder.path(), "text", &[]),
        1,
        "the session `text` is text without a chat template; --raw goes on with it, or name another session",
    );
    refused(
        &turn(folder.path(), "chat", &["--raw"]),
        1,
        "the session `chat` is a chat, which goes on without --raw; leave it out, or name another session",
    );
    let after = std::fs::read(folder.path().join("text.session")).expect("it is kept");
    assert_eq!(before, after);
    done(&chat);
    done(&raw);
}

/// The turns of one of both used to be lost.
#[test]
fn a_session_is_one_process_s_at_a_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let (talk, lock) = (
        turn(folder.path(), "talk", &[]),
        folder.path().join("talk.lock"),
    );
    let other = std::fs::File::create(&lock).expect("a file");
    other.lock().expect("nobody else has it");
    let expected = "the session `talk` is in use by another process; end that one first";
    refused(&talk, 1, expected);
    done(&turn(folder.path(), "other", &[]));
    // As when a process was killed: the file stays, and the lock does not.
    drop(other);
    done(&talk);
    assert!(!lock.exists(), "whoever used it tidies up");

    let other = std::fs::File::create(&lock).expect("a file");
    other.lock().expect("nobody else has it");
    let sessions = text(folder.path());
    refused(
        &["sessions", "remove", "talk", "--sessions", sessions],
        1,
        expected,
    );
    drop(other);
    done(&["sessions", "remove", "talk", "--sessions", sessions]);
    let mut left = std::fs::read_dir(folder.path()).expect("a folder");
    let left = left
        .by_ref()
        .map(|entry| entry.expect("an entry").file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["other.session"]);
}

/// They used to make the folder that they look at.
#[test]
fn looking_for_sessions_makes_no_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let missing = folder.path().join("missing");
    let advice = "check what --sessions or LACUNA_SESSIONS says";
    for what in [&["list"][..], &["remove", "talk"]] {
        let command = [&["sessions"], what, &["--sessions", text(&missing)]].concat();
        refused(&command, 1, advice);
    }
    let usual = |arguments: &[&str]| {
        let output = lacuna(arguments).env("XDG_STATE_HOME", &missing).output();
        output.expect("the program starts")
    };
    let listed = usual(&["sessions", "list", "--json"]);
    assert!(listed.status.success());
    assert_eq!(String::from_utf8_lossy(&listed.stdout).trim(), "[]");
    let removed = usual(&["sessions", "remove", "talk"]);
    let error = String::from_utf8_lossy(&removed.stderr);
    assert!(error.contains("there is no session `talk`"), "{error}");
    assert!(!missing.exists());
}
