//! The byte budget as the system sees it: what the process of `lacuna serve` holds by the kernel's
//! account, under more clients than fit; and that `plan`, `run` and `serve` mean the same by it.
#![cfg(target_os = "linux")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// A server, killed when it goes out of scope.
struct Server {
    child: Child,
    address: String,
    ready: Value,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .arg("serve")
            .args(args)
            .args(["--port", "0", "--json", "--threads", "2"])
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
        Self {
            child,
            address,
            ready,
        }
    }

    fn number(&self, name: &str) -> u64 {
        number(&self.ready, name)
    }

    /// Sends a request for a completion.
    fn ask(&self, body: &Value) -> std::io::Result<TcpStream> {
        self.post("/v1/completions", body)
    }

    fn post(&self, path: &str, body: &Value) -> std::io::Result<TcpStream> {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.address)?;
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        Ok(stream)
    }

    /// The status of the reply, when all of it has come.
    fn status(&self, body: &Value) -> Option<u16> {
        let mut reply = Vec::new();
        self.ask(body).ok()?.read_to_end(&mut reply).ok()?;
        let text = String::from_utf8_lossy(&reply);
        text.split(' ').nth(1)?.parse().ok()
    }

    fn memory(&self) -> Value {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let request = format!(
            "GET /memory HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n",
            self.address
        );
        stream.write_all(request.as_bytes()).expect("sent");
        let mut reply = String::new();
        stream.read_to_string(&mut reply).expect("a reply");
        let (_, body) = reply.split_once("\r\n\r\n").expect("a body");
        serde_json::from_str(body).expect("JSON")
    }

    /// The most the process held until `done`.
    fn watch(&self, done: &AtomicBool) -> Held {
        let mut most = Held::default();
        while !done.load(Ordering::Acquire) {
            most = most.max(Held::of(self.child.id()));
            thread::sleep(Duration::from_millis(2));
        }
        most
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// What a process holds.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    /// Anonymous memory and mapped shared memory, as `/proc/PID/status` has it.
    resident: u64,
    /// Anonymous memory and all that is behind the process's memory files, mapped at the moment or not.
    committed: u64,
    samples: u64,
}

impl Held {
    fn of(process: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kibibytes =
                line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
            kibibytes.unwrap_or(0) * 1024
        };
        let (anonymous, shared) = (field("RssAnon:"), field("RssShmem:"));
        Self {
            resident: anonymous + shared,
            committed: anonymous + heap_blocks(process),
            samples: 1,
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            resident: self.resident.max(other.resident),
            committed: self.committed.max(other.committed),
            samples: self.samples + other.samples,
        }
    }

    #[track_caller]
    fn assert_within(&self, budget: u64, ready: &Value) {
        assert!(self.samples > 20, "{self:?}");
        assert!(
            self.resident <= budget && self.committed <= budget,
            "{self:?} of a budget of {budget}: {ready}"
        );
    }
}

/// Bytes behind the memory files of a process, by their blocks.
fn heap_blocks(process: u32) -> u64 {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{process}/fd")) else {
        return 0;
    };
    let heaps = descriptors
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("lacuna-heap"))
        });
    let blocks = heaps.filter_map(|path| fs::metadata(path).ok());
    blocks.map(|file| file.blocks() * 512).sum()
}

#[track_caller]
fn number(value: &Value, name: &str) -> u64 {
    let found = value[name].as_u64();
    found.unwrap_or_else(|| panic!("{name} is a number in {value}"))
}

/// A prompt of so many words, which no other `seed` begins with.
fn words(seed: usize, count: usize) -> String {
    const WORDS: [&str; 12] = [
        "memory", "page", "owner", "borrow", "move", "value", "type", "trait", "loop", "match",
        "error", "stack",
    ];
    let word =
        |index: usize| WORDS[(seed * 31 + index * (seed % 7 + 1) + index / 12) % WORDS.len()];
    let words: Vec<&str> = (0..count).map(word).collect();
    format!("{seed} {}", words.join(" "))
}

#[test]
fn four_times_the_clients_that_fit_stay_within_the_budget_by_the_kernels_account() {
    for budget in [20, 32] {
        let option = format!("{budget}MiB");
        let server = Server::start(&["demo", "--budget", &option, "--max-queue", "512"]);
        let pages = server.memory();
        let (group, tokens) = (
            number(&pages["pages"], "group_bytes"),
            number(&pages["pages"], "group_tokens"),
        );
        // Some 100 tokens of prompt and 60 of reply each.
        let fit = server.number("kv_bytes") / (160_u64.div_ceil(tokens) * group);
        let clients = (4 * fit as usize).clamp(16, 96);
        let done = AtomicBool::new(false);
        let most = thread::scope(|scope| {
            let watch = scope.spawn(|| server.watch(&done));
            let client = |client: usize| {
                let server = &server;
                scope.spawn(move || {
                    let body = json!({"prompt": words(client, 50), "max_tokens": 60});
                    server.status(&body)
                })
            };
            let clients: Vec<_> = (0..clients).map(client).collect();
            let statuses: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
            // Before anything is said of them: the watch would not end.
            done.store(true, Ordering::Release);
            for status in statuses {
                let status = status.expect("a client that ends");
                assert!(matches!(status, Some(200 | 429 | 503)), "{status:?}");
            }
            watch.join().expect("figures")
        });
        most.assert_within(budget * MIB, &server.ready);
        let after = server.memory();
        assert_eq!(number(&after["budget"], "beyond_plan_bytes"), 0, "{after}");
        assert!(number(&after["counters"], "finished") > 0, "{after}");
    }
}

/// A model of 151,936 tokens, and next to nothing else.
fn large_vocabulary(folder: &tempfile::TempDir) -> String {
    let file = folder.path().join("model.gguf");
    let path = file.to_str().expect("UTF-8");
    let synth = [
        "synth",
        "qwen3-0.6b",
        "--layers",
        "1",
        "--dtype",
        "q4_0",
        "-o",
    ];
    let made = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(synth)
        .arg(path)
        .output();
    assert!(made.expect("the program starts").status.success());
    path.to_owned()
}

/// One reply and a small batch, so that little else is there that is not taken.
const SMALL: [&str; 6] = [
    "--ctx",
    "256",
    "--max-running",
    "1",
    "--max-batched-tokens",
    "16",
];

fn plain() -> Value {
    json!({"prompt": "Hello", "max_tokens": 3})
}

fn held_to_json() -> Value {
    json!({"prompt": "Hello", "max_tokens": 3, "response_format": {"type": "json_object"}})
}

#[test]
fn a_large_vocabulary_and_its_tables_for_grammars_take_no_more_than_their_rule_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = large_vocabulary(&folder);
    let server = Server::start(&[&[&*path, "--budget", "256MiB"], &SMALL[..]].concat());
    let before = server.memory()["budget"].clone();
    assert_eq!(number(&before, "constraint_bytes"), 0, "there are none yet");
    for body in [plain(), held_to_json()] {
        assert_eq!(server.status(&body), Some(200));
    }
    let held = Held::of(server.child.id());
    let budget = &server.memory()["budget"];
    assert_eq!(
        number(budget, "beyond_plan_bytes"),
        0,
        "{held:?} of {budget}"
    );
    let tables = number(budget, "constraint_bytes");
    assert_eq!(
        number(&before, "kv_bytes") - number(budget, "kv_bytes"),
        tables,
        "KV pages have as much less"
    );
    let vocabulary = server.number("vocabulary_bytes") + tables;
    // What requests may hold is far from taken, so what hides there is looked for beside it.
    let others = [
        "program",
        "thread",
        "sampling",
        "copied_weight",
        "read_weight",
        "activation",
    ];
    let others = others.map(|part| server.number(&format!("{part}_bytes")));
    let planned = vocabulary + others.iter().sum::<u64>();
    assert!(held.committed <= planned + MIB, "{held:?} of {budget}");
    assert!(
        2 * held.resident > vocabulary,
        "the rule is not far off: {held:?} of {budget}"
    );
}

#[test]
fn tables_for_grammars_come_when_they_are_needed_and_go_when_conversations_need_their_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = large_vocabulary(&folder);
    let start = |budget: &str| {
        let mapped = [&*path, "--budget", budget, "--weights", "mmap"];
        let one = [
            "--ctx",
            "2048",
            "--max-running",
            "1",
            "--max-batched-tokens",
        ];
        Server::start(&[&mapped[..], &one, &["16"]].concat())
    };
    let tables = |server: &Server| number(&server.memory()["budget"], "constraint_bytes");
    let roomy = start("256MiB");
    let apart = ["request_bytes", "kv_bytes", "mapped_weight_bytes"];
    let parts = PARTS.into_iter().filter(|part| !apart.contains(part));
    let others: u64 = parts.map(|part| roomy.number(part)).sum();
    drop(roomy);
    // Room for requests and pages of a few MiB, and not for tables of 43.
    let server = start(&format!("{}", (others + 12 * MIB) * 8 / 7));
    assert_eq!(server.status(&plain()), Some(200));
    let mut refused = String::new();
    let mut reply = server.ask(&held_to_json()).expect("it listens");
    reply.read_to_string(&mut refused).expect("a reply");
    assert!(refused.starts_with("HTTP/1.1 400"), "{refused}");
    assert!(refused.contains("budget_exceeded"), "{refused}");
    assert_eq!((server.status(&plain()), tables(&server)), (Some(200), 0));
    drop(server);
    // With the least that the refusal names they fit, beside one group of rows.
    let (_, least) = refused.split_once("budget of ").expect("the least");
    let (least, _) = least.split_once(" MiB").expect("in MiB");
    let least: f64 = least.parse().expect("a number");
    let bytes = (least * MIB as f64).ceil() as u64;
    let server = start(&bytes.to_string());
    let done = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        let watch = scope.spawn(|| server.watch(&done));
        let mut seen = Vec::new();
        for body in [
            held_to_json(),
            json!({"prompt": words(1, 900), "max_tokens": 3}),
            held_to_json(),
        ] {
            seen.push((server.status(&body), tables(&server) > 0));
        }
        done.store(true, Ordering::Release);
        let ok = Some(200);
        assert_eq!(seen, [(ok, true), (ok, false), (ok, true)]);
        watch.join().expect("figures")
    });
    most.assert_within(bytes, &server.ready);
}

/// Names of the parts of a budget.
const PARTS: [&str; 13] = [
    "program_bytes",
    "vocabulary_bytes",
    "constraint_bytes",
    "thread_bytes",
    "sampling_bytes",
    "copied_weight_bytes",
    "converted_weight_bytes",
    "read_weight_bytes",
    "draft_bytes",
    "activation_bytes",
    "request_bytes",
    "kv_bytes",
    "mapped_weight_bytes",
];

fn parts(value: &Value) -> Vec<u64> {
    PARTS.map(|name| number(value, name)).to_vec()
}

/// What a command prints, whatever its verdict.
fn printed(args: &str) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(args.split(' '))
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    let printed = serde_json::from_slice(&output.stdout);
    printed.unwrap_or_else(|_| panic!("{args}: {error}"))
}

#[test]
fn plan_run_and_serve_divide_one_budget_in_the_same_way() {
    for budget in ["24MiB", "100MiB"] {
        let plan = |options: &str| {
            let plan = format!("plan demo --budget {budget} --threads 2 --json {options}");
            parts(&printed(plan.trim())["budget"]["parts"])
        };
        let run = format!("run demo -p Hi -n 2 --budget {budget} --threads 2 --json");
        assert_eq!(plan(""), parts(&printed(&run)["memory"]["budget"]));
        let server = Server::start(&["demo", "--budget", budget]);
        assert_eq!(plan("--sequences 32 --batch 256"), parts(&server.ready));
        assert_eq!(parts(&server.ready), parts(&server.memory()["budget"]));
        // Mapped weights, the last part, are the system's to evict and no part of the sum.
        let sum: u64 = parts(&server.ready)[..PARTS.len() - 1].iter().sum();
        assert_eq!(
            sum,
            server.number("budget_bytes"),
            "the parts are the budget"
        );
    }
}

#[test]
fn a_budget_that_cannot_be_kept_is_refused_at_once_with_options_of_the_command() {
    for (args, advice) in [
        ("serve demo --port 0 --budget 8MiB", "--max-batched-tokens"),
        ("run demo -p Hi --budget 8MiB", "--ctx"),
        (
            "run demo -p Hi --budget 20MiB --kv dense --ctx 100000",
            "--kv sparse",
        ),
        (
            "serve demo --port 0 --budget 20MiB --kv dense --ctx 100000",
            "--kv sparse",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(args.split(' '))
            .output()
            .expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args}: {error}");
        assert!(output.stdout.is_empty(), "nothing was generated");
        for word in ["too small", "program", "KV pages", "raise --budget", advice] {
            assert!(error.contains(word), "{args} should say `{word}`: {error}");
        }
    }
}

const DEMO: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../models/demo/lacuna-demo-q8_0.gguf"
);

#[test]
fn the_least_budget_that_is_named_works_and_less_does_not() {
    let run = |budget: f64| {
        let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args([
                "run",
                DEMO,
                "--weights",
                "direct",
                "--raw",
                "-p",
                "Hello",
                "-n",
                "1",
            ])
            .args(["--ctx", "256", "--threads", "1"])
            .args(["--budget", &((budget * MIB as f64) as u64).to_string()])
            .output()
            .expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), error)
    };
    let (code, error) = run(4.0);
    assert_eq!(code, Some(1), "{error}");
    let (_, named) = error
        .split_once("the first token needs ")
        .expect("the least");
    let (named, _) = named.split_once(" MiB").expect("a size");
    let least: f64 = named.parse().expect("a number");
    // It is named to a tenth.
    let (code, error) = run(least - 0.2);
    assert_eq!(code, Some(1), "{error}");
    let (code, error) = run(least + 0.1);
    assert_eq!(code, Some(0), "{error}");
    assert!(error.contains("more are read for each pass"), "{error}");
}

#[test]
fn a_process_that_may_lock_no_memory_reads_weights_all_the_same() {
    let tokens = |shell: &str, weights: &str| {
        let command = format!(
            "{shell} exec {} run {DEMO} --weights {weights} --raw -p Hello -n 8 --temp 0 --json",
            env!("CARGO_BIN_EXE_lacuna")
        );
        let output = Command::new("sh").args(["-c", &command]).output();
        let output = output.expect("there is a shell");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        report["tokens"].clone()
    };
    assert_eq!(tokens("ulimit -l 0;", "direct"), tokens("", "mmap"));
}

#[test]
fn however_many_may_run_at_once_a_step_has_room_for_its_tokens_only() {
    // It used to take eleven gigabytes without a word: a row of logits for each.
    let server = Server::start(&["demo", "--budget", "64MiB", "--max-running", "1000000"]);
    assert!(
        server.number("activation_bytes") < 16 * MIB,
        "{}",
        server.ready
    );
    let body = json!({"prompt": "Hello", "max_tokens": 3});
    assert_eq!(server.status(&body), Some(200));
}

const SMOLLM2: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../target/models/smollm2-135m-instruct-q4_1.gguf"
);

/// From outside: 24 clients of which half hang up, and 24 bodies that are too large to answer.
#[test]
#[ignore = "needs SmolLM2: run .ci/fetch-models"]
fn a_real_model_under_attack_stays_within_64_mebibytes() {
    let server = Server::start(&[SMOLLM2, "--budget", "64MiB", "--ctx", "2048"]);
    let done = AtomicBool::new(false);
    let huge = "the quick brown fox jumps over the lazy dog ".repeat(88_000);
    let most = thread::scope(|scope| {
        let watch = scope.spawn(|| server.watch(&done));
        let (server, huge) = (&server, &huge);
        let client = |client: usize| {
            scope.spawn(move || {
                let body = json!({"prompt": words(client, 40), "max_tokens": 24, "stream": true});
                let mut stream = server.ask(&body).expect("it listens");
                if client.is_multiple_of(2) {
                    // Hangs up when the reply has begun.
                    let mut some = [0; 400];
                    stream.read_exact(&mut some).ok();
                    return;
                }
                let mut reply = String::new();
                stream.read_to_string(&mut reply).expect("a whole reply");
                let begins = |status: &str| reply.starts_with(&format!("HTTP/1.1 {status}"));
                assert!(begins("200") || begins("429") || begins("503"), "{reply}");
            })
        };
        let clients: Vec<_> = (0..24).map(client).collect();
        let oversized = |_| {
            scope.spawn(move || {
                let status = server.status(&json!({"prompt": huge, "max_tokens": 1}));
                // The server may hang up before it has read all of it.
                assert!(
                    matches!(status, None | Some(400 | 413 | 429 | 503)),
                    "{status:?}"
                );
            })
        };
        let oversized: Vec<_> = (0..24).map(oversized).collect();
        for client in clients.into_iter().chain(oversized) {
            client.join().expect("a client that ends");
        }
        done.store(true, Ordering::Release);
        watch.join().expect("figures")
    });
    eprintln!("the most it held: {most:?}");
    most.assert_within(64 * MIB, &server.ready);
    assert_eq!(
        server.status(&json!({"prompt": "Hello", "max_tokens": 3})),
        Some(200)
    );
    let after = server.memory();
    assert_eq!(number(&after["budget"], "beyond_plan_bytes"), 0, "{after}");
}

/// Two models that write and one that makes embeddings: names, and the arguments that say where they are.
struct Three {
    args: [String; 3],
    context: &'static str,
}

impl Three {
    const NAMES: [&str; 3] = ["large", "small", "embed"];

    fn start(&self, budget: u64) -> Server {
        let budget = budget.to_string();
        let mut args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        args.extend(["--budget", &budget, "--ctx", self.context]);
        Server::start(&args)
    }

    /// The budget that holds one of them and half of another with the least that they run with.
    fn one_and_a_half(&self) -> u64 {
        let server = self.start(2048 * MIB);
        let memory = server.memory();
        let least = |name: &str| number(model(&memory, name), "least_bytes");
        // Of so much 64 MiB are for requests, and of little an eighth.
        let program = number(&memory, "base_bytes") - 64 * MIB;
        (program + least("large") + least("small") / 2) * 8 / 7
    }

    /// Asks all of them in turns, by several clients at once, and returns the most that the process held meanwhile and
    /// what it says in the end.
    fn alternate(&self, server: &Server, clients: usize, turns: usize) -> (Held, Value) {
        let done = AtomicBool::new(false);
        let most = thread::scope(|scope| {
            let watch = scope.spawn(|| server.watch(&done));
            let client = |client: usize| {
                scope.spawn(move || -> Vec<String> {
                    let turn = |turn: usize| {
                        let name = Self::NAMES[(client + turn) % 3];
                        let (path, body) = match name {
                            "embed" => ("/v1/embeddings", json!({"model": name, "input": "abc"})),
                            name => ("/v1/completions", json!({
                                "model": name, "prompt": words(client * 100 + turn, 40), "max_tokens": 12,
                            })),
                        };
                        let mut reply = String::new();
                        let mut stream = server.post(path, &body).expect("it listens");
                        stream.read_to_string(&mut reply).expect("a whole reply");
                        reply
                    };
                    (0..turns).map(turn).collect()
                })
            };
            let clients: Vec<_> = (0..clients).map(client).collect();
            let replies: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
            // Before anything is said of them: the watch would not end.
            done.store(true, Ordering::Release);
            for reply in replies
                .into_iter()
                .flat_map(|it| it.expect("a client that ends"))
            {
                assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
            }
            watch.join().expect("figures")
        });
        (most, server.memory())
    }
}

/// What `/memory` has of a model.
#[track_caller]
fn model<'a>(memory: &'a Value, name: &str) -> &'a Value {
    let models = memory["models"].as_array().expect("a list");
    let found = models.iter().find(|model| model["name"] == name);
    found.unwrap_or_else(|| panic!("{name} in {memory}"))
}

/// Has all models unloaded, and returns what the process holds when they are.
fn unload_all(server: &Server) -> Held {
    for name in Three::NAMES {
        let mut reply = String::new();
        let stream = server.post("/models/unload", &json!({"model": name}));
        let read = stream.and_then(|mut stream| stream.read_to_string(&mut reply));
        read.expect("a reply");
    }
    let unloaded = |memory: Value| {
        let mut models = Three::NAMES.into_iter();
        models.all(|name| model(&memory, name)["state"] == "unloaded")
    };
    while !unloaded(server.memory()) {
        thread::sleep(Duration::from_millis(10));
    }
    Held::of(server.child.id())
}

/// Loads and unloads of all models.
fn swaps(memory: &Value) -> [u64; 2] {
    ["loads", "unloads"].map(|name| {
        let counts = Three::NAMES.map(|model| number(self::model(memory, model), name));
        counts.iter().sum()
    })
}

#[test]
fn three_models_in_a_budget_that_fits_one_and_a_half_all_answer_within_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let large = folder.path().join("large.gguf");
    let large = large.to_str().expect("UTF-8");
    let made = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["quantize", "demo", large, "--type", "f32"])
        .output()
        .expect("the program starts");
    assert!(made.status.success(), "{made:?}");
    let embed = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../reference/encoders/bert/mean.gguf"
    );
    let three = Three {
        args: [
            large.to_owned(),
            "small=demo".to_owned(),
            format!("embed={embed}"),
        ],
        context: "512",
    };
    let budget = three.one_and_a_half();
    let server = three.start(budget);
    let (most, memory) = three.alternate(&server, 3, 8);
    most.assert_within(budget, &memory);
    let [loads, unloads] = swaps(&memory);
    assert!(loads > 3 && unloads > 0, "{memory}");
    let (empty, base) = (unload_all(&server), number(&memory, "base_bytes"));
    assert!(empty.committed <= base, "{empty:?} of {base}");
}

const GEMMA3: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../target/models/gemma-3-270m-q4_k_m.gguf"
);
const MINILM: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../target/models/all-minilm-l6-v2"
);

/// The same with models that people use, the large one of them with a vocabulary of 262,144 tokens.
#[test]
#[ignore = "needs SmolLM2, Gemma 3 and all-MiniLM-L6-v2: run .ci/fetch-models"]
fn three_real_models_in_a_budget_that_fits_one_and_a_half_all_answer_within_it() {
    let three = Three {
        args: [
            format!("large={GEMMA3}"),
            format!("small={SMOLLM2}"),
            format!("embed={MINILM}"),
        ],
        context: "2048",
    };
    let budget = three.one_and_a_half();
    let server = three.start(budget);
    let (most, memory) = three.alternate(&server, 3, 6);
    eprintln!(
        "the most it held of {budget}: {most:?}; loads and unloads: {:?}",
        swaps(&memory)
    );
    most.assert_within(budget, &memory);
    let [loads, unloads] = swaps(&memory);
    assert!(loads > 3 && unloads > 0, "{memory}");
    let (empty, base) = (unload_all(&server), number(&memory, "base_bytes"));
    assert!(empty.committed <= base, "{empty:?} of {base}");
}
