//! A server on a port of its own, and a client that can also misbehave.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lacuna_files::ModelFiles;
use lacuna_models::Model;
use lacuna_pages::Ledger;
use lacuna_server::{Server, ServerConfig};
use serde_json::{Value, json};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let files = ModelFiles::open(&root.join("lacuna-demo-q8_0.gguf")).expect("committed");
        Arc::new(Model::load(files).expect("the demo model"))
    };
    Arc::clone(MODEL.get_or_init(load))
}

pub(crate) fn config() -> ServerConfig {
    let mut config = ServerConfig {
        address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        model_name: "demo".to_owned(),
        ..ServerConfig::default()
    };
    config.service.engine.threads = Some(NonZeroUsize::MIN);
    config.service.max_batched_tokens = 64;
    config
}

pub(crate) fn start() -> Server {
    start_with(|_| {})
}

/// A server of a model that says one thing, which `reference/making/spoken.py` tells.
pub(crate) fn start_spoken(name: &str) -> Server {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/replies");
    let files = ModelFiles::open(&root.join(name)).expect("committed");
    let model = Arc::new(Model::load(files).expect("a model"));
    Server::start(model, config()).expect("the server starts")
}

pub(crate) fn start_with(change: impl FnOnce(&mut ServerConfig)) -> Server {
    let mut config = config();
    change(&mut config);
    Server::start(model(), config).expect("the server starts")
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("JSON: {self:?}"))
    }

    /// A header's value, by its name in small letters.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let named = |line: &'_ str| line.to_ascii_lowercase().starts_with(&format!("{name}:"));
        let line = self.head.lines().find(|line| named(line))?;
        Some(line.split_once(':')?.1.trim())
    }

    /// The JSON of every event, without the last, which must be `[DONE]`.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut data: Vec<&str> = self
            .body
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{self:?}");
        let parse = |data| serde_json::from_str(data).expect("JSON in an event");
        data.into_iter().map(parse).collect()
    }
}

impl Response {
    /// The JSON of every event, each of which has its type as its name.
    pub(crate) fn named_events(&self) -> Vec<Value> {
        let blocks = self.body.split("\n\n").filter(|block| !block.is_empty());
        let read = |block: &str| {
            let (name, data) = block.split_once('\n')?;
            let data: Value = serde_json::from_str(data.strip_prefix("data: ")?).ok()?;
            (data["type"] == name.strip_prefix("event: ")?).then_some(data)
        };
        let named = |block| read(block).unwrap_or_else(|| panic!("a named event: {block}"));
        blocks.map(named).collect()
    }
}

pub(crate) fn connect(server: &Server) -> TcpStream {
    connect_to(server.address())
}

pub(crate) fn connect_to(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Sends bytes as they are and reads until the server closes.
pub(crate) fn raw(server: &Server, request: &[u8]) -> Response {
    let mut stream = connect(server);
    // The server may refuse before it has read everything.
    stream.write_all(request).ok();
    read(&mut stream)
}

pub(crate) fn read(stream: &mut impl Read) -> Response {
    let mut bytes = Vec::new();
    let ended = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).expect("text");
    // Interim responses may come before the one.
    let mut rest = text.as_str();
    while let Some(after) = rest.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n") {
        rest = after;
    }
    let (head, body) = rest
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("a response: {text:?}, {ended:?}"));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    let chunked = head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked");
    Response {
        status: status.expect("a status"),
        body: if chunked {
            unchunk(body)
        } else {
            body.to_owned()
        },
        head: head.to_owned(),
    }
}

fn unchunk(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).expect("a chunk's length");
        whole += &rest[..length];
        body = rest[length..].strip_prefix("\r\n").unwrap_or("");
    }
    whole
}

pub(crate) fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "host") {
        head += "host: localhost\r\n";
    }
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += &format!("content-length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

pub(crate) fn get(server: &Server, path: &str) -> Response {
    raw(server, &request("GET", path, &[], b""))
}

pub(crate) fn post(server: &Server, path: &str, body: &Value) -> Response {
    raw(
        server,
        &request("POST", path, &[], body.to_string().as_bytes()),
    )
}

/// A successful reply's JSON.
pub(crate) fn posted(server: &Server, path: &str, body: &Value) -> Value {
    let response = post(server, path, body);
    assert_eq!(response.status, 200, "{body}: {response:?}");
    response.json()
}

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETION: &str = "/v1/completions";

/// A greedy chat of one question, with `more` fields.
pub(crate) fn question(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "What is ownership?"}],
        "temperature": 0,
        "max_tokens": 24,
    });
    let (Value::Object(fields), Value::Object(more)) = (&mut body, more) else {
        panic!("objects");
    };
    fields.extend(more);
    body
}

/// Waits until every request has ended, and returns the accounts.
pub(crate) fn at_rest(server: &Server) -> Ledger {
    let engine = server.engine();
    until("everything is at rest", || {
        let status = engine.status();
        let counters = status.counters;
        let ended = counters.finished + counters.cancelled + counters.failed;
        counters.requests == ended && status.sessions.is_empty()
    });
    engine.status().ledger
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(
            start.elapsed() < PATIENCE,
            "it never came about that {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asserts that no session holds a page, whatever the prefix cache keeps.
pub(crate) fn assert_nothing_held(server: &Server) {
    let ledger = at_rest(server);
    assert_eq!(
        (ledger.mapped.get(), ledger.lost.get()),
        (0, 0),
        "{ledger:?}"
    );
}
