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
    serve_saying(args, Stdio::inherit())
}

/// The same, with what it says on standard error going to `said`.
fn serve_saying(args: &[&str], said: Stdio) -> (Child, String, Value) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["serve", "demo", "--port", "0", "--json", "--threads", "1"])
        .args(args)
        .stdout(Stdio::piped())
        .stderr(said)
        .spawn()
        .expect("the program starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("a line");
    let ready: Value = serde_json::from_str(&line).expect("one JSON object");
    let url = ready["url"].as_str().expect("a URL");
    let (_, address) = url.split_once("://").expect("a URL");
    let address = address.to_owned();
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

fn post(address: &str, path: &str, body: &Value) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let body = body.to_string();
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\nconnection: close\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("a reply");
    reply
}

#[cfg(unix)]
#[test]
fn sessions_that_requests_named_are_listed_and_removed_by_the_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("text");
    let sessions = |action: &[&str]| {
        let all = [&["sessions"], action, &["--kv-cache", path]].concat();
        lacuna(&all)
    };
    let listed = || -> Value {
        let output = sessions(&["list", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let (mut child, address, _) = serve(&["--kv-cache", path]);
    for name in ["notes", "letters"] {
        // Long enough that some of it is kept.
        let body = serde_json::json!({
            "session": name, "prompt": format!("{name}: {}", "ownership and borrowing ".repeat(20)),
            "max_tokens": 1,
        });
        let reply = post(&address, "/v1/completions", &body);
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    }
    let ended = Command::new("kill").arg(child.id().to_string()).status();
    assert!(ended.expect("kill runs").success());
    assert!(
        child.wait().expect("it ends").success(),
        "and has written all"
    );
    let mut names: Vec<Value> = listed().as_array().expect("a list").clone();
    names.sort_by_key(|row| row["name"].to_string());
    assert_eq!(
        (&names[0]["name"], &names[1]["name"]),
        (&"letters".into(), &"notes".into())
    );
    for row in &names {
        assert!(
            row["tokens"].as_u64() > Some(16) && row["bytes"].as_u64() > Some(0),
            "{row}"
        );
    }
    assert!(sessions(&["remove", "letters"]).status.success());
    let left = listed();
    assert_eq!(
        (left.as_array().map(Vec::len), &left[0]["name"]),
        (Some(1), &"notes".into())
    );
    let again = sessions(&["remove", "letters"]);
    let error = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(
        error.contains("there is no session `letters`; `lacuna sessions list --kv-cache"),
        "{error}"
    );
    let people = sessions(&["list"]);
    let line = String::from_utf8_lossy(&people.stdout).into_owned();
    assert!(
        line.starts_with("notes: ") && line.contains("computed by"),
        "{line}"
    );
}

/// Writes a new certificate for `localhost` and its key, and returns how clients know it.
fn renew_certificate(folder: &std::path::Path) -> rustls::pki_types::CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]);
    let made = made.expect("a certificate");
    std::fs::write(folder.join("certificate.pem"), made.cert.pem()).expect("written");
    let key = made.signing_key.serialize_pem();
    std::fs::write(folder.join("key.pem"), key).expect("written");
    made.cert.der().clone()
}

/// What `/health` answers to a client that believes nothing but `certificate`.
fn health_over_tls(
    address: &str,
    certificate: &rustls::pki_types::CertificateDer<'static>,
) -> std::io::Result<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate.clone()).expect("a certificate");
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "localhost".try_into().expect("a name");
    let client = rustls::ClientConnection::new(std::sync::Arc::new(config), name);
    let stream = TcpStream::connect(address).expect("it listens");
    let mut stream = rustls::StreamOwned::new(client.expect("a client"), stream);
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    Ok(reply)
}

#[cfg(unix)]
#[test]
fn at_sighup_a_renewed_certificate_is_shown_and_a_log_that_was_moved_begins_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let first = renew_certificate(folder.path());
    let (mut child, address, ready) = serve_saying(
        &[
            "--tls-certificate",
            &path("certificate.pem"),
            "--tls-key",
            &path("key.pem"),
            "--access-log",
            &path("log"),
        ],
        Stdio::piped(),
    );
    assert_eq!(ready["url"], format!("https://{address}"));
    let reply = health_over_tls(&address, &first).expect("over TLS");
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    let second = renew_certificate(folder.path());
    std::fs::rename(path("log"), path("log.1")).expect("renamed");
    let id = child.id().to_string();
    let asked = Command::new("kill").args(["-HUP", &id]).status();
    assert!(asked.expect("kill runs").success());
    let mut said = BufReader::new(child.stderr.take().expect("piped")).lines();
    let read_again = said.find(|line| !matches!(line, Ok(line) if !line.contains("again")));
    assert!(read_again.is_some(), "it says that it read the certificate");
    health_over_tls(&address, &first).expect_err("the old one is shown no more");
    // The log is opened right after; a request just then may still be told of in the old one.
    let lines = |name: &str| {
        let text = std::fs::read_to_string(path(name)).unwrap_or_default();
        text.lines().count()
    };
    let mut asked = 0;
    while lines("log") == 0 {
        health_over_tls(&address, &second).expect("the new one is shown");
        asked += 1;
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(
        Command::new("kill")
            .arg(id)
            .status()
            .expect("kill runs")
            .success()
    );
    assert!(child.wait().expect("it ends").success());
    let (before, after) = (lines("log.1"), lines("log"));
    assert!(before >= 1 && after >= 1, "{before} and {after}");
    assert_eq!(before + after, 1 + asked, "each request is told of once");
}

/// A file with two keys in a folder that lasts as long as the test.
fn key_file() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys");
    std::fs::write(
        &file,
        "# the router's\n\nfirst-key\n# and the other\nsecond-key\n",
    )
    .expect("written");
    let path = file.to_string_lossy().into_owned();
    (folder, path)
}

#[test]
fn keys_come_from_a_file_are_asked_for_and_written_nowhere() {
    let (folder, file) = key_file();
    let log = folder.path().join("log");
    let said = std::fs::File::create(&log).expect("created");
    let (mut child, address, ready) = serve_saying(&["--api-key-file", &file], said.into());
    assert!(get(&address, "/v1/models", "").starts_with("HTTP/1.1 401"));
    for (key, status) in [
        ("first-key", "200"),
        ("second-key", "200"),
        ("wrong-key", "401"),
    ] {
        let header = format!("authorization: Bearer {key}\r\n");
        let reply = get(&address, "/v1/models", &header);
        assert!(reply.starts_with(&format!("HTTP/1.1 {status}")), "{reply}");
        assert!(!reply.contains(key), "{reply}");
        for path in ["/memory", "/metrics"] {
            let figures = get(&address, path, &header);
            assert!(!figures.contains("-key"), "{figures}");
        }
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let said = std::fs::read_to_string(log).expect("text") + &ready.to_string();
    assert!(!said.contains("-key"), "{said}");
}

#[test]
fn keys_share_computed_prompts_only_where_the_flag_says_so() {
    let (_folder, file) = key_file();
    let prompt = "Ownership is a set of rules. ".repeat(20);
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 1}).to_string();
    for (flags, shared) in [(&[][..], false), (&["--share-prefixes"], true)] {
        let args = [&["--api-key-file", &file], flags].concat();
        let (mut child, address, _) = serve(&args);
        let cached = ["first-key", "second-key"].map(|key| {
            let mut stream = TcpStream::connect(&address).expect("it listens");
            write!(
                stream,
                "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
                 authorization: Bearer {key}\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )
            .expect("sent");
            let mut reply = String::new();
            stream.read_to_string(&mut reply).expect("a reply");
            let (_, json) = reply.split_once("\r\n\r\n").expect("a body");
            let reply: Value = serde_json::from_str(json).expect("JSON");
            let cached = reply.pointer("/usage/prompt_tokens_details/cached_tokens");
            cached.and_then(Value::as_u64).expect("a number")
        });
        assert_eq!(cached[0], 0);
        assert_eq!(cached[1] > 0, shared, "{flags:?}: {cached:?}");
        child.kill().expect("it runs");
        child.wait().expect("it ends");
    }
}

#[test]
fn a_key_file_with_a_line_that_is_no_key_is_refused_by_its_number() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys");
    for (text, said) in [
        ("first-key\nsecond key\n", "line 2"),
        ("# all\nshort\n", "line 2"),
        ("# none yet\n", "no key"),
    ] {
        std::fs::write(&file, text).expect("written");
        let output = lacuna(&["serve", "demo", "--api-key-file", &file.to_string_lossy()]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(said), "{error}");
        assert!(
            !error.contains("second") && !error.contains("short"),
            "{error}"
        );
    }
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    for (args, word) in [
        (&["serve", "demo", "--host", "0.0.0.0"][..], "API key"),
        (&["serve", "demo", "--api-key", ""], "empty"),
        (
            &["serve", "demo", "--open-to-all", "--api-key", "first-key"],
            "cannot be used with",
        ),
        (
            &["serve", "demo", "--tls-certificate", "c.pem"],
            "--tls-key",
        ),
        (&["serve", "demo", "--kv-events", "here"], "tcp://*:5557"),
        (
            &["serve", "demo", "--kv-events-replay", "tcp://*:0"],
            "--kv-events <ADDRESS>",
        ),
        (
            &["serve", "demo", "--no-prefix-cache", "--kv-events", "*:0"],
            "cannot be used with",
        ),
        (
            &["serve", "demo", "b=demo", "--kv-events", "tcp://*:0"],
            "--kv-events is for a server of one model",
        ),
        (&["serve", "demo", "--budget", "much"], "2GiB"),
        (&["serve", "demo", "--max-running", "0"], "--max-running"),
        (
            &["serve", "demo", "--request-timeout", "0"],
            "--request-timeout",
        ),
        (&["serve", "demo", "--name", ""], "--name"),
        (&["bench", "serve"], "--url"),
        (
            &["bench", "serve", "--model", "demo", "--rate=-1"],
            "--rate",
        ),
        (&["bench", "soak", "--model", "demo"], "--budget"),
        (
            &["bench", "soak", "--model", "demo", "--hang-up", "2"],
            "--hang-up",
        ),
        (
            &["bench", "serve", "--model", "demo", "--spread", "2"],
            "--spread",
        ),
        (
            &["bench", "serve", "--model", "demo", "--temp", "3"],
            "--temp",
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

/// What `lacuna bench` with `args` on the demo model reports.
fn bench(args: &str) -> Value {
    let common = ["--model", "demo", "--threads", "1", "--json"];
    let args: Vec<&str> = ["bench"]
        .into_iter()
        .chain(args.split(' '))
        .chain(common)
        .collect();
    let output = lacuna(&args);
    let error = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout);
    assert!(output.status.success(), "{error} {report:?}");
    report.expect("one JSON object")
}

#[track_caller]
fn number(report: &Value, path: &str) -> f64 {
    let found = report.pointer(path).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("{path} is a number in {report}"))
}

#[cfg(target_os = "linux")]
#[test]
fn sessions_that_begin_alike_take_one_copy_by_the_ledger_and_the_kernel() {
    let report = bench(
        "serve --sessions 16 --max-running 16 --shared-prefix 256 --in-turn --rate 0 \
         --prompt-tokens 12 --reply-tokens 120 --spread 0.2",
    );
    let number = |path: &str| number(&report, path);
    assert_eq!(number("/finished"), 16.0);
    let (sessions, tokens) = (number("/kv/sessions"), number("/kv/tokens"));
    let shared = number("/kv/shared_tokens");
    assert!(sessions > 2.0 && shared >= 256.0, "{report}");
    // 2,048 bytes of rows a token; at most a page of 4 KiB beyond them in each of 8 buffers.
    let rows = 2048.0 * (tokens - (sessions - 1.0) * shared);
    assert_eq!(number("/kv/rows_bytes"), rows);
    let most = rows + sessions * 8.0 * 4096.0;
    assert!(
        (rows..=most).contains(&number("/kv/mapped_bytes")),
        "{report}"
    );
    assert!(number("/kv/most_excess_pages") <= 1.0, "{report}");
    assert_eq!(
        number("/kv/kernel/kernel_bytes"),
        number("/kv/kernel/ledger_bytes")
    );
    let held = number("/kv/mapped_bytes") + number("/kv/cached_bytes") + number("/kv/idle_bytes");
    assert_eq!(number("/kv/committed_bytes"), held);
    // What a session copies is the end of the prefix that is no whole group.
    assert!(number("/copied_pages") <= 16.0 * 8.0, "{report}");
    assert!(
        number("/donor/first_ms") > number("/donor/second_ms"),
        "{report}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn more_clients_than_fit_are_served_or_told_to_come_back_and_leave_nothing() {
    let report = bench(
        "soak --budget 24MiB --seconds 4 --ctx 512 --prompt-tokens 80 --reply-tokens 40 \
         --max-running 12 --max-queue 4 --clients 24 --hang-up 0.2",
    );
    let number = |path: &str| number(&report, path);
    assert_eq!(report["passed"], true, "{report}");
    assert_eq!(
        number("/requests/failed") + number("/requests/refused_bare"),
        0.0
    );
    for path in [
        "/requests/finished",
        "/requests/refused",
        "/requests/hung_up",
        "/leaving/clients",
    ] {
        assert!(number(path) > 0.0, "{path} in {report}");
    }
    assert!(
        number("/peaks/kernel_bytes") <= number("/kv_bytes"),
        "{report}"
    );
    assert_eq!(number("/left_bytes"), 0.0);
    assert_eq!(number("/cached_bytes"), number("/group_bytes"));
}

#[test]
fn the_bench_serves_every_session_and_its_figures_fit_together() {
    let report = bench(
        "serve --sessions 8 --shared-prefix 200 --rate 0 --prompt-tokens 20 --reply-tokens 12",
    );
    assert_eq!(
        (&report["finished"], &report["failed"]),
        (&8.into(), &0.into()),
        "{report}"
    );
    let number = |path: &str| number(&report, path);
    assert!(number("/prompt_tokens") > 8.0 * 200.0);
    assert!((8.0 * 6.0..=8.0 * 18.0).contains(&number("/generated_tokens")));
    assert!(number("/first_token/median_us") <= number("/first_token/p99_us"));
    assert!(number("/inter_token/median_us") > 0.0);
    assert!(number("/peak_committed_bytes") > 0.0);
    assert!((0.3..1.0).contains(&number("/hit_rate")), "{report}");
}
