//! What requests take of the heap is what the account says they hold, or less.
//!
//! Every body here was chosen to take much more than its text: the account has to know before.
#![expect(
    unsafe_code,
    reason = "a global allocator that counts is unsafe to implement"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lacuna_files::ModelFiles;
use lacuna_models::Model;
use lacuna_pages::ByteLength;
use lacuna_server::{Server, ServerConfig};
use serde_json::{Map, Value, json};

/// Bytes allocated now, and the most there were since it was last set.
static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, counting bytes.
struct Counting;

// SAFETY: every call is passed to the system's allocator as it came. `realloc` is the default one: a
// new block, a copy, and the old one freed, so that both count at once.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What connections and threads take besides, whatever a request holds.
const BESIDES: usize = 512 << 10;

fn model() -> Arc<Model> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let files = ModelFiles::open(&root.join("lacuna-demo-q8_0.gguf")).expect("committed");
    Arc::new(Model::load(files).expect("the demo model"))
}

fn start(model: &Arc<Model>) -> Server {
    let mut config = ServerConfig {
        address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        model_name: "demo".to_owned(),
        ..ServerConfig::default()
    };
    config.service.engine.threads = Some(NonZeroUsize::MIN);
    config.service.engine.request_memory = Some(ByteLength::new(1 << 30));
    Server::start(Arc::clone(model), config).expect("the server starts")
}

fn post(server: &Server, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(server.address()).expect("the server listens");
    let length = body.len();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("a reply");
    reply
}

fn user(content: &str) -> String {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).to_string()
}

/// An object of many fields, each one of many words or a number.
fn wide_schema(fields: usize) -> Value {
    let words: Vec<String> = (0..20).map(|word| format!("word number {word}")).collect();
    let field = |name| {
        let value = json!({"anyOf": [{"enum": words}, {"type": "number", "minimum": 17}]});
        (format!("field_{name}"), value)
    };
    let properties: Map<String, Value> = (0..fields).map(field).collect();
    json!({"type": "object", "properties": properties})
}

fn deep_schema(levels: usize) -> Value {
    (0..levels).fold(json!({"type": "string", "pattern": "^[a-z]{1,40}$"}), |inner, _| {
        json!({"type": "array", "items": {"type": "object", "properties": {"a": inner}}})
    })
}

fn with_schema(schema: &Value, choices: usize) -> String {
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    json!({
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": format, "n": choices, "max_tokens": 40,
    })
    .to_string()
}

fn with_tools(tools: usize) -> String {
    let tool = |number| {
        let function = json!({"name": format!("tool_{number}"), "parameters": wide_schema(3)});
        json!({"type": "function", "function": function})
    };
    let tools: Vec<Value> = (0..tools).map(tool).collect();
    json!({
        "messages": [{"role": "user", "content": "hello"}],
        "tools": tools, "tool_choice": "required", "max_tokens": 40,
    })
    .to_string()
}

/// Requests whose replies are much longer than they are.
fn long_replies() -> Vec<(&'static str, String)> {
    const CHAT: &str = "/v1/chat/completions";
    const TEXT: &str = "/v1/completions";
    let words = "The quick brown fox jumps over the lazy dog. ".repeat(40);
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "What is ownership?"}],
            "ignore_eos": true, "max_tokens": 200});
        body.as_object_mut()
            .expect("an object")
            .extend(more.as_object().cloned().expect("one"));
        (CHAT, body.to_string())
    };
    let text = |more: Value| {
        let mut body = json!({"prompt": words, "ignore_eos": true, "max_tokens": 30});
        body.as_object_mut()
            .expect("an object")
            .extend(more.as_object().cloned().expect("one"));
        (TEXT, body.to_string())
    };
    let question = json!([{"role": "user", "content": "What is ownership?"}]);
    let spoken = |path, mut body: Value| {
        body["model"] = json!("demo");
        (path, body.to_string())
    };
    vec![
        chat(json!({"logprobs": true, "top_logprobs": 20})),
        chat(json!({"logprobs": true, "top_logprobs": 20, "n": 8, "temperature": 1.5})),
        chat(json!({"logprobs": true, "top_logprobs": 20, "n": 8, "stream": true})),
        chat(json!({"n": 16, "max_tokens": 500})),
        chat(json!({"prompt_logprobs": 20, "max_tokens": 1})),
        text(json!({"prompt_logprobs": 20})),
        text(json!({"logprobs": 20, "n": 4, "max_tokens": 200})),
        text(json!({"logprobs": 20, "echo": true, "n": 8})),
        text(json!({"logprobs": 20, "echo": true, "prompt_logprobs": 20, "n": 4})),
        text(json!({"logprobs": 20, "echo": true, "n": 8, "stream": true})),
        text(json!({"prompt": [words, words, words, words], "logprobs": 20, "echo": true, "n": 4})),
        spoken(
            "/v1/messages",
            json!({"messages": question, "max_tokens": 900}),
        ),
        spoken(
            "/v1/messages",
            json!({"messages": question, "max_tokens": 900, "stream": true}),
        ),
        spoken(
            "/v1/responses",
            json!({"input": question, "store": false, "max_output_tokens": 900}),
        ),
        spoken(
            "/v1/responses",
            json!({"input": question, "store": false, "stream": true}),
        ),
        spoken(
            "/v1/responses",
            json!({"input": question, "instructions": words, "store": false, "stream": true}),
        ),
        spoken("/api/chat", json!({"messages": question})),
    ]
}

/// A message of Anthropic's form with so many blocks.
fn blocks(block: &str, count: usize) -> String {
    let blocks = block.repeat(count);
    format!(
        "{{\"max_tokens\": 1, \"messages\": [{{\"role\": \"user\", \"content\": [{}]}}]}}",
        blocks.trim_end_matches(',')
    )
}

/// A request for a response, of which nothing is kept.
fn response(input: &str) -> String {
    json!({"input": input, "store": false, "max_output_tokens": 1}).to_string()
}

fn bodies() -> Vec<(&'static str, String)> {
    const MESSAGES: &str = "/v1/messages";
    const COUNT: &str = "/v1/messages/count_tokens";
    const RESPONSES: &str = "/v1/responses";
    const OLLAMA: &str = "/api/chat";
    const CHAT: &str = "/v1/chat/completions";
    const TEXT: &str = "/v1/completions";
    let list = |item: &str, count| format!("[{}0]", item.repeat(count));
    let words = "The quick brown fox jumps over the lazy dog. ".repeat(2_000);
    vec![
        (CHAT, format!("{{\"messages\": {}}}", list("[],", 60_000))),
        (CHAT, format!("{{\"messages\": {}}}", list("{},", 60_000))),
        (
            CHAT,
            format!("{{\"tools\": {}}}", list("{\"\":0},", 30_000)),
        ),
        (CHAT, format!("{{\"metadata\": {}}}", list("\"\",", 60_000))),
        (
            CHAT,
            format!("{{\"metadata\": {}{}}}", "[".repeat(100), "]".repeat(100)),
        ),
        (
            CHAT,
            format!("{{\"messages\": [{{\"role\": {}}}]}}", list("1,", 100_000)),
        ),
        (TEXT, format!("{{\"prompt\": {}}}", list("1,", 100_000))),
        (TEXT, format!("{{\"prompt\": {}}}", list("[1],", 60_000))),
        (TEXT, format!("{{\"prompt\": {}}}", list("\"a\",", 60_000))),
        (TEXT, json!({"prompt": words, "max_tokens": 1}).to_string()),
        (TEXT, json!({"prompt": "a".repeat(90_000)}).to_string()),
        (TEXT, json!({"prompt": "\n".repeat(90_000)}).to_string()),
        (CHAT, user(&words)),
        (CHAT, user(&"a".repeat(90_000))),
        (CHAT, user(&"<|im_start|>".repeat(7_000))),
        (CHAT, user(&"\u{1F600}".repeat(20_000))),
        ("/tokenize", json!({"prompt": words}).to_string()),
        (
            "/tokenize",
            json!({"prompt": "a".repeat(90_000)}).to_string(),
        ),
        (
            "/tokenize",
            json!({"prompt": "\u{1F600}".repeat(20_000)}).to_string(),
        ),
        ("/tokenize", user(&words).replace(",\"max_tokens\":1", "")),
        (CHAT, with_schema(&wide_schema(200), 1)),
        (CHAT, with_schema(&wide_schema(200), 8)),
        (CHAT, with_schema(&deep_schema(40), 1)),
        (CHAT, with_tools(100)),
        (
            "/detokenize",
            format!("{{\"tokens\": {}}}", list("1,", 100_000)),
        ),
        (MESSAGES, user(&words)),
        (MESSAGES, user(&"<|im_start|>".repeat(7_000))),
        (
            MESSAGES,
            blocks("{\"type\":\"text\",\"text\":\"\"},", 20_000),
        ),
        (
            MESSAGES,
            blocks("{\"type\":\"tool_result\",\"tool_use_id\":\"\"},", 10_000),
        ),
        (
            MESSAGES,
            format!(
                "{{\"messages\": [], \"tools\": {}}}",
                list("{\"name\":\"\"},", 30_000)
            ),
        ),
        (RESPONSES, response(&words)),
        (
            RESPONSES,
            format!(
                "{{\"input\": {}}}",
                list("{\"type\":\"reasoning\"},", 20_000)
            ),
        ),
        (
            RESPONSES,
            format!(
                "{{\"input\": [], \"tools\": {}}}",
                list("{\"\":0},", 30_000)
            ),
        ),
        (
            OLLAMA,
            user(&words).replacen('{', "{\"model\": \"demo\", ", 1),
        ),
        (
            OLLAMA,
            format!(
                "{{\"model\": \"demo\", \"messages\": {}}}",
                list("{\"role\":\"user\"},", 20_000)
            ),
        ),
        (COUNT, user(&words)),
        (COUNT, user(&"a".repeat(90_000))),
    ]
}

/// One test at a time: they count the same bytes.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn connections_and_the_heads_they_send_take_no_more_than_their_part_of_the_account() {
    // 1,024 heads of 64 KiB used to be 64 MiB that no budget knew of.
    let _alone = ALONE.lock();
    let server = start(&model());
    post(&server, "/v1/completions", "{}");
    let limit = server.engine().request_memory().limit().get();
    assert!(limit < 1 << 30, "a part of it is for connections");
    // Beside what the program has for 32 of them.
    let their_part = usize::try_from((1 << 30) - limit).expect("it fits") + (1 << 20);
    let before = NOW.load(Ordering::Relaxed);
    let open = |_| TcpStream::connect(server.address()).expect("it listens");
    let mut streams: Vec<TcpStream> = (0..1000).map(open).collect();
    let head = format!(
        "GET / HTTP/1.1\r\nhost: localhost\r\nx: {}",
        "x".repeat(30 << 10)
    );
    for part in ["", &head[..4000], &head[4000..]] {
        for stream in &mut streams {
            // It may have been refused for want of memory already.
            stream.write_all(part.as_bytes()).ok();
        }
        for _ in 0..100 {
            std::thread::sleep(Duration::from_millis(5));
            let taken = NOW.load(Ordering::Relaxed).saturating_sub(before);
            let most = their_part + BESIDES;
            assert!(
                taken <= most,
                "{} bytes each: {taken} of {most}",
                part.len()
            );
        }
    }
    let taken = NOW.load(Ordering::Relaxed).saturating_sub(before);
    println!("1,000 connections with long heads: {taken} of {their_part} bytes");
}

#[test]
fn the_account_holds_what_a_request_takes_before_it_takes_it() {
    let _alone = ALONE.lock();
    let model = model();
    for (path, body) in bodies().into_iter().chain(long_replies()) {
        let server = start(&model);
        // What is made once, when it is first needed.
        post(
            &server,
            "/v1/chat/completions",
            &with_schema(&json!({"type": "object"}), 1),
        );
        let before = NOW.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        let reply = post(&server, path, &body);
        let taken = MOST.load(Ordering::Relaxed) - before;
        let account = server.engine().status().request_memory;
        let held = usize::try_from(account.highest.get()).expect("it fits");
        let what = format!(
            "{path} {body:.30}... of {} bytes took {:.1} and held {:.1} for each: {}",
            body.len(),
            taken as f64 / body.len() as f64,
            held as f64 / body.len() as f64,
            reply.lines().next().unwrap_or_default(),
        );
        println!("{what}");
        // The reply is read here, too.
        let besides = BESIDES + 2 * reply.len();
        assert!(taken <= held + besides, "{what}");
        while server.engine().status().request_memory.held.get() > 0 {
            std::thread::yield_now();
        }
    }
}
