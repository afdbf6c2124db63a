//! `lacuna serve` and `lacuna bench serve` as a user meets them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

fn lacuna(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(args)
        .output()
        .expect("the program starts")
}

/// A server and the address in the line it prints.
fn serve(args: &[&str]) -> (Child, String, Value) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["serve", "demo", "--port", "0", "--json", "--threads", "1"])
        .args(args)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("a line");
    let ready: Value = serde_json::from_str(&line).expect("one JSON object");
    let url = ready["url"].as_str().expect("a URL");
    let address = url.strip_prefix("http://").expect("HTTP").to_owned();
    (child, address, ready)
}

fn get(address: &str, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let request =
        format!("GET {path} HTTP/1.1\r\nhost: {address}\r\n{headers}connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("a reply");
    reply
}

#[cfg(unix)]
#[test]
fn it_says_where_it_is_and_ends_when_asked_to() {
    let (mut child, address, ready) = serve(&["--budget", "64MiB", "--name", "small"]);
    assert_eq!(ready["model"], "small");
    assert_eq!(ready["budget_bytes"], 64 << 20);
    assert!(
        ready["kv_bytes"].as_u64() < Some(64 << 20),
        "activations take some of it"
    );
    assert!(get(&address, "/v1/models", "").contains("\"small\""));
    let asked = Command::new("kill").arg(child.id().to_string()).status();
    assert!(asked.expect("kill runs").success());
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn keys_come_from_a_file_and_are_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "\nsecret\n").expect("written");
    let (mut child, address, _) = serve(&["--api-key-file", &file.to_string_lossy()]);
    assert!(get(&address, "/v1/models", "").starts_with("HTTP/1.1 401"));
    let reply = get(&address, "/v1/models", "authorization: Bearer secret\r\n");
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    child.kill().expect("it runs");
    child.wait().expect("it ends");
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    for (args, word) in [
        (&["serve", "demo", "--host", "0.0.0.0"][..], "API key"),
        (&["serve", "demo", "--api-key", ""], "empty"),
        (&["serve", "demo", "--budget", "much"], "2GiB"),
        (&["serve", "demo", "--max-running", "0"], "--max-running"),
        (&["bench", "serve"], "--url"),
        (
            &["bench", "serve", "--model", "demo", "--rate=-1"],
            "--rate",
        ),
    ] {
        let output = lacuna(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(
            error.contains(word),
            "{args:?} should say `{word}`: {error}"
        );
    }
}

#[test]
fn the_bench_serves_every_session_and_its_figures_fit_together() {
    let output = lacuna(&[
        "bench",
        "serve",
        "--model",
        "demo",
        "--sessions",
        "8",
        "--shared-prefix",
        "200",
        "--rate",
        "0",
        "--prompt-tokens",
        "20",
        "--reply-tokens",
        "12",
        "--threads",
        "1",
        "--json",
    ]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(
        (&report["finished"], &report["failed"]),
        (&8.into(), &0.into()),
        "{report}"
    );
    let number = |path: &str| {
        report
            .pointer(path)
            .and_then(Value::as_f64)
            .expect("a number")
    };
    assert!(number("/prompt_tokens") > 8.0 * 200.0);
    assert!((8.0 * 6.0..=8.0 * 18.0).contains(&number("/generated_tokens")));
    assert!(number("/first_token/median_us") <= number("/first_token/p99_us"));
    assert!(number("/inter_token/median_us") > 0.0);
    assert!(number("/peak_committed_bytes") > 0.0);
    assert!((0.3..1.0).contains(&number("/hit_rate")), "{report}");
}
