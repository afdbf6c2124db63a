//! What clients send never takes the server past its budget, and is given back.
//!
//! Bodies of 3.9 MB that were refused took a server with a budget of 64 MiB to 409 MiB one at a time
//! and to 1,338 MiB together, and 1,011 MiB stayed.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const BUDGET: u64 = 64 << 20;
/// What may stay after everything was given back: pools of threads and connections, tables that the
/// first request of a kind builds.
const STAYS: u64 = 8 << 20;

struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(args: &[&str]) -> Server {
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
        Server { child, address }
    }

    /// Anonymous and shared memory, as the kernel counts it.
    fn memory(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("it runs");
        let rows = status.lines().filter_map(|line| line.split_once(':'));
        let rows = rows.filter(|(name, _)| matches!(*name, "RssAnon" | "RssShmem"));
        let kib = rows.map(|(_, value)| value.trim().trim_end_matches(" kB"));
        kib.map(|kib| kib.parse::<u64>().expect("a number") << 10)
            .sum()
    }

    fn get(&self, path: &str) -> String {
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        self.send(request.as_bytes(), b"").1
    }

    /// The status and the body of the reply.
    fn post(&self, path: &str, body: &[u8]) -> (u16, String) {
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n"
        );
        self.send(head.as_bytes(), body)
    }

    fn send(&self, head: &[u8], body: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.write_all(head).expect("sent");
        stream.write_all(body).expect("read to its end");
        let mut reply = String::new();
        stream.read_to_string(&mut reply).expect("a reply");
        let (head, body) = reply.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).expect("a status");
        (status.parse().expect("a number"), body.to_owned())
    }

    /// Sends a body as often as told, at once, and returns the statuses and the most memory there was
    /// meanwhile.
    fn storm(&self, path: &str, body: &[u8], clients: usize) -> (Vec<u16>, u64) {
        let (over, most) = (AtomicBool::new(false), AtomicU64::new(0));
        let statuses = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    most.fetch_max(self.memory(), Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let clients: Vec<_> = (0..clients)
                .map(|_| scope.spawn(|| self.post(path, body).0))
                .collect();
            let statuses = clients.into_iter().map(|client| client.join());
            let statuses = statuses.map(|status| status.expect("a status")).collect();
            over.store(true, Ordering::Relaxed);
            statuses
        });
        (statuses, most.into_inner())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn completion(prompt: &str) -> Vec<u8> {
    json!({"prompt": prompt, "max_tokens": 1})
        .to_string()
        .into_bytes()
}

fn chat(content: &str) -> Vec<u8> {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        .to_string()
        .into_bytes()
}

fn bodies(longest_text: usize) -> Vec<(&'static str, Vec<u8>)> {
    const CHAT: &str = "/v1/chat/completions";
    const TEXT: &str = "/v1/completions";
    const LARGE: usize = 3_900_000;
    let words = |bytes: usize| "The quick brown fox jumps. ".repeat(bytes / 27);
    let just_below = longest_text - 100;
    let list = |item: &str, bytes: usize| format!("[{}0]", item.repeat(bytes / item.len()));
    vec![
        (TEXT, completion(&words(LARGE))),
        (TEXT, completion(&"a".repeat(LARGE))),
        (CHAT, chat(&words(LARGE))),
        (
            TEXT,
            format!("{{\"prompt\": {}}}", list("[],", LARGE)).into_bytes(),
        ),
        (
            CHAT,
            format!("{{\"messages\": {}}}", list("{\"\":0},", LARGE)).into_bytes(),
        ),
        (
            CHAT,
            format!("{{\"metadata\": {}}}", list("\"\",", LARGE / 20)).into_bytes(),
        ),
        (TEXT, completion(&words(just_below))),
        (TEXT, completion(&"a".repeat(just_below))),
        (TEXT, completion(&"\u{1F600}".repeat(just_below / 4))),
        (CHAT, chat(&words(just_below))),
        (CHAT, chat(&" ".repeat(just_below))),
        (
            "/tokenize",
            json!({"prompt": words(LARGE)}).to_string().into_bytes(),
        ),
    ]
}

#[test]
fn bodies_stay_within_the_budget_however_many_come_and_are_given_back() {
    let server = Server::start(&["--budget", "64MiB"]);
    // What the first request of a kind builds.
    assert_eq!(server.post("/v1/chat/completions", &chat("Hello")).0, 200);
    let (status, refusal) = server.post("/v1/completions", &completion(&"a ".repeat(1_000_000)));
    assert_eq!(status, 400, "{refusal}");
    let longest = refusal
        .split("more than the ")
        .nth(1)
        .expect("the most there can be");
    let longest = longest
        .split(' ')
        .next()
        .and_then(|bytes| bytes.parse().ok());
    let start = server.memory();
    println!("{} MiB at the start", start >> 20);
    for (path, body) in bodies(longest.expect("a number")) {
        for clients in [1, 8, 24] {
            let (statuses, most) = server.storm(path, &body, clients);
            let what = format!(
                "{clients} x {path} {:.24}... of {} bytes: {} MiB, {statuses:?}",
                String::from_utf8_lossy(&body),
                body.len(),
                most >> 20,
            );
            println!("{what}");
            assert!(most <= BUDGET, "{what}");
            let known = |status: &u16| matches!(status, 200 | 400 | 413 | 429 | 503);
            assert!(statuses.iter().all(known), "{what}");
        }
    }
    let began = Instant::now();
    while server.memory() > start + STAYS {
        let (now, most) = (server.memory() >> 20, (start + STAYS) >> 20);
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{now} MiB stay, not {most}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let map: Value = serde_json::from_str(&server.get("/memory")).expect("JSON");
    assert_eq!(map["request_memory"]["held_bytes"], 0);
    assert_eq!(server.post("/v1/chat/completions", &chat("Hello")).0, 200);
    println!("{} MiB at the end", server.memory() >> 20);
}

/// A hundred megabytes were read and tokenized for twenty seconds before they were compared with the
/// context.
#[test]
fn a_prompt_on_standard_input_that_cannot_fit_is_refused_before_it_is_read() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["run", "demo", "--threads", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = child.stdin.take().expect("piped");
    let chunk = [b'a'; 1 << 16];
    let mut sent = 0u64;
    while sent < 100 << 20 && stdin.write_all(&chunk).is_ok() {
        sent += chunk.len() as u64;
    }
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("can hold"), "{error}");
    assert!(sent < 4 << 20, "{sent} bytes were read");
}
