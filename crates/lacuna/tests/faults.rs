//! What a system can do to the program: take its model file away, fill its disk, close its pipes,
//! give it text that steers a terminal. Each used to end it by a signal, by a panic, or as if
//! nothing had happened. `.ci/test-system-faults` goes on from here with system calls that fail and
//! limits on memory and on files.
#![cfg(unix)]

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn lacuna(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    command.args(args).stdin(Stdio::null());
    command
}

fn demo_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models/demo")
        .join(name)
}

/// A copy of the demo model that may be damaged, as an argument.
fn demo_copy(folder: &Path) -> String {
    let copy = folder.join("copy.gguf");
    fs::copy(demo_file("lacuna-demo-q8_0.gguf"), &copy).expect("copied");
    copy.to_str().expect("text").to_owned()
}

fn shorten(path: &str) {
    let file = OpenOptions::new().write(true).open(path).expect("there");
    file.set_len(100).expect("shortened");
}

/// Fails unless the program ended by itself with `code`, and did not panic.
#[track_caller]
fn ended(output: &Output, code: i32) -> String {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        output.status.code(),
        Some(code),
        "{:?}: {error}",
        output.status
    );
    assert!(!error.contains("panicked"), "{error}");
    error
}

#[cfg(target_os = "linux")]
#[test]
fn a_model_file_that_shrinks_ends_a_run_with_an_error_that_names_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = demo_copy(folder.path());
    let mut child = lacuna(&["run", &model, "--raw", "-n", "8"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // It waits for its input with the model open.
    let maps = format!("/proc/{}/maps", child.id());
    while !fs::read_to_string(&maps).is_ok_and(|maps| maps.contains(&model)) {
        assert!(child.try_wait().expect("it can be asked").is_none());
        std::thread::yield_now();
    }
    shorten(&model);
    let mut input = child.stdin.take().expect("piped");
    // It may have noticed while it was loading.
    input.write_all(b"What is").ok();
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let error = ended(&output, 1);
    assert!(error.contains("copy.gguf"), "{error}");
    assert!(error.contains("shorter"), "{error}");
    assert!(output.stdout.is_empty(), "nothing of what zeros led to");
}

/// Status line and body.
fn get(address: &str, path: &str) -> String {
    exchange(address, &format!("GET {path} HTTP/1.1\r\n"), "")
}

fn complete(address: &str) -> String {
    let body = r#"{"prompt": "What is", "max_tokens": 4}"#;
    exchange(address, "POST /v1/completions HTTP/1.1\r\n", body)
}

fn exchange(address: &str, head: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let length = body.len();
    let rest = format!("host: {address}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    let request = format!("{head}{rest}{body}");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("a reply");
    reply
}

#[test]
fn a_server_whose_model_file_shrinks_refuses_requests_by_its_name_and_lives_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = demo_copy(folder.path());
    let mut child = lacuna(&["serve", &model, "--port", "0", "--json", "--threads", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
    stdout.read_line(&mut line).expect("a line");
    let ready: Value = serde_json::from_str(&line).expect("one JSON object");
    let url = ready["url"].as_str().expect("a URL");
    let address = url.strip_prefix("http://").expect("HTTP");

    assert!(complete(address).starts_with("HTTP/1.1 200"));
    assert!(get(address, "/health").starts_with("HTTP/1.1 200"));
    shorten(&model);
    // The first finds out, the second is refused before it runs.
    for _ in 0..2 {
        let reply = complete(address);
        assert!(reply.starts_with("HTTP/1.1 503"), "{reply}");
        assert!(reply.contains("model_file_lost"), "{reply}");
        assert!(reply.contains("`copy.gguf`"), "{reply}");
        let folder = folder.path().to_str().expect("text");
        assert!(
            !reply.contains(folder),
            "where it lies is nobody's business"
        );
    }
    let health = get(address, "/health");
    assert!(health.starts_with("HTTP/1.1 503"), "{health}");
    assert!(health.contains("`copy.gguf`"), "{health}");
    for path in ["/v1/models", "/metrics", "/memory"] {
        assert!(get(address, path).starts_with("HTTP/1.1 200"), "{path}");
    }

    let mut errors = BufReader::new(child.stderr.take().expect("piped"));
    let mut said = String::new();
    errors.read_line(&mut said).expect("a line");
    assert!(said.contains(&model), "whoever runs it is told too: {said}");
    let asked = Command::new("kill").arg(child.id().to_string()).status();
    assert!(asked.expect("kill runs").success());
    assert!(child.wait().expect("it ends").success());
}

/// Every command that prints results, with what makes it quick.
fn commands() -> Vec<Vec<&'static str>> {
    let text = demo_file("heldout.txt").to_str().expect("text").to_owned();
    let text: &'static str = Box::leak(text.into_boxed_str());
    vec![
        vec!["inspect", "demo"],
        vec!["inspect", "demo", "--json"],
        vec!["plan", "demo"],
        vec!["tokenize", "demo", "-p", "x"],
        vec!["tokenize", "demo", "-p", "300 301", "--decode"],
        vec!["logits", "demo", "--tokens", "300,301"],
        vec!["logits", "demo", "--tokens", "300,301", "--json"],
        vec!["perplexity", "demo", text, "--ctx", "1024"],
        vec!["run", "demo", "--raw", "-p", "What", "-n", "2"],
        vec!["run", "demo", "--raw", "-p", "What", "-n", "2", "--json"],
        vec!["--help"],
        vec!["run", "--help"],
        vec!["--version"],
    ]
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_of_every_command_that_prints() {
    for args in commands() {
        let full = OpenOptions::new().write(true).open("/dev/full");
        let output = lacuna(&args).stdout(full.expect("there")).output();
        let error = ended(&output.expect("it runs"), 1);
        assert!(error.contains("standard output"), "{args:?}: {error}");
    }
}

#[test]
fn a_reader_that_has_gone_ends_every_command_quietly() {
    for args in commands() {
        let mut child = lacuna(&args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("it ends");
        let error = ended(&output, 0);
        assert!(error.is_empty(), "{args:?}: {error}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn messages_that_cannot_be_shown_change_nothing() {
    let full = || {
        File::options()
            .write(true)
            .open("/dev/full")
            .expect("there")
    };
    let run = ["run", "demo", "--raw", "-p", "What", "-n", "2"];
    let output = lacuna(&run).stderr(full()).output().expect("it runs");
    ended(&output, 0);
    assert!(!output.stdout.is_empty());
    let output = lacuna(&["inspect", "/none"]).stderr(full()).output();
    ended(&output.expect("it runs"), 1);
    let output = lacuna(&["inspect"]).stderr(full()).output();
    ended(&output.expect("it runs"), 2);
}

#[cfg(target_os = "linux")]
#[test]
fn files_that_cannot_be_written_whole_are_errors() {
    let output = lacuna(&["synth", "qwen3-0.6b", "--layers", "1", "-o", "/dev/full"]).output();
    let error = ended(&output.expect("it runs"), 1);
    assert!(error.contains("disk is full"), "{error}");
    let output = lacuna(&["plan", "demo", "--map", "/dev/full"]).output();
    let error = ended(&output.expect("it runs"), 1);
    assert!(error.contains("/dev/full"), "{error}");
    assert!(
        Path::new("/dev/full")
            .metadata()
            .is_ok_and(|there| !there.is_file())
    );
}

#[test]
fn what_a_file_says_cannot_steer_the_terminal() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("steering.gguf");
    let mut header = lacuna::files::gguf::Writer::new();
    header.set("general.architecture", "\u{1b}[2J\u{9b}31mllama\r");
    fs::write(&path, header.to_bytes()).expect("written");
    let output = lacuna(&["inspect", path.to_str().expect("text")]).output();
    let output = output.expect("it runs");
    let error = ended(&output, 1);
    let steers = |c: char| c.is_control() && c != '\n';
    assert!(!error.contains(steers), "{error:?}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains(steers));
}
