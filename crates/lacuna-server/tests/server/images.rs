//! Images in the forms that clients of three interfaces send them in.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lacuna_files::ModelFiles;
use lacuna_models::{Model, with_images};
use lacuna_server::{ImageHost, Server, ServerConfig};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

use crate::support::{assert_nothing_held, config, get, post, posted, start};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const OLLAMA: &str = "/api/chat";
const RESPONSES: &str = "/v1/responses";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/vision/gemma3")
}

fn start_seeing() -> Server {
    start_seeing_with(|_| {})
}

fn start_seeing_with(change: impl FnOnce(&mut ServerConfig)) -> Server {
    start_model(&folder(), change)
}

fn start_model(folder: &Path, change: impl FnOnce(&mut ServerConfig)) -> Server {
    let files = ModelFiles::open(&folder.join("hf")).expect("committed");
    let model = Model::load(files).and_then(|model| with_images(model, None));
    let mut config = config();
    change(&mut config);
    Server::start(Arc::new(model.expect("a model that sees")), config).expect("it starts")
}

fn file(index: usize) -> Vec<u8> {
    fs::read(folder().join(format!("image-{index}.png"))).expect("committed")
}

fn encoded(index: usize) -> String {
    STANDARD.encode(file(index))
}

/// A conversation as OpenAI's clients send it, of images and a text.
fn chat(urls: &[String]) -> Value {
    let image =
        |url: &String| json!({"type": "image_url", "image_url": {"url": url, "detail": "auto"}});
    let mut parts: Vec<Value> = urls.iter().map(image).collect();
    parts.push(json!({"type": "text", "text": "A B C"}));
    json!({"model": "demo", "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": parts}]})
}

fn data_url(index: usize) -> String {
    format!("data:image/png;base64,{}", encoded(index))
}

fn messages(source: &Value) -> Value {
    json!({"model": "demo", "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": [
        {"type": "image", "source": source}, {"type": "text", "text": "A B C"}]}]})
}

fn ollama(images: &[String]) -> Value {
    json!({"model": "demo", "stream": false, "options": {"temperature": 0, "num_predict": 8},
        "messages": [{"role": "user", "content": "A B C", "images": images}]})
}

/// An input as clients of OpenAI's responses send it, of images and a text.
fn responses(urls: &[String], more: Value) -> Value {
    let image = |url: &String| json!({"type": "input_image", "image_url": url, "detail": "auto"});
    let mut parts: Vec<Value> = urls.iter().map(image).collect();
    parts.push(json!({"type": "input_text", "text": "A B C"}));
    let mut body = json!({"model": "demo", "temperature": 0, "max_output_tokens": 8,
        "input": [{"role": "user", "content": parts}]});
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}

fn said_in_response(reply: &Value) -> &Value {
    let items = reply["output"].as_array().expect("items");
    let message = items.iter().find(|item| item["type"] == "message");
    &message.expect("a message")["content"][0]["text"]
}

#[test]
fn all_interfaces_say_the_same_of_an_image() {
    let server = start_seeing();
    let openai = posted(&server, CHAT, &chat(&[data_url(0)]));
    let said = openai["choices"][0]["message"]["content"].clone();
    assert_ne!(said, "");
    let source = json!({"type": "base64", "media_type": "image/png", "data": encoded(0)});
    let anthropic = posted(&server, MESSAGES, &messages(&source));
    assert_eq!(anthropic["content"][0]["text"], said);
    let reply = posted(&server, RESPONSES, &responses(&[data_url(0)], json!({})));
    assert_eq!(*said_in_response(&reply), said);
    assert_eq!(
        reply["usage"]["input_tokens"],
        openai["usage"]["prompt_tokens"]
    );
    let reply = posted(&server, OLLAMA, &ollama(&[encoded(0)]));
    assert_eq!(reply["message"]["content"], said);
    assert_eq!(reply["prompt_eval_count"], openai["usage"]["prompt_tokens"]);
    // An image takes its four tokens and two marks.
    let without = posted(&server, CHAT, &chat(&[]));
    let prompt = |reply: &Value| reply["usage"]["prompt_tokens"].as_u64().expect("a number");
    let two = posted(&server, CHAT, &chat(&[data_url(0), data_url(1)]));
    assert_eq!(
        prompt(&two) - prompt(&openai),
        prompt(&openai) - prompt(&without)
    );
    let count = posted(&server, "/v1/messages/count_tokens", &messages(&source));
    assert_eq!(count["input_tokens"].as_u64(), Some(prompt(&openai)));
}

/// As `base64` on a command line and mail have it; only a line feed at the very end was taken.
#[test]
fn base64_in_lines_is_the_same_image() {
    let server = start_seeing();
    let whole = posted(&server, OLLAMA, &ollama(&[encoded(0)]));
    let encoded = encoded(0);
    for (length, end) in [(76, "\n"), (64, "\r\n"), (7, "\n")] {
        let lines = encoded.as_bytes().chunks(length);
        let lines = lines.map(|line| std::str::from_utf8(line).expect("letters").to_owned() + end);
        let reply = posted(&server, OLLAMA, &ollama(&[lines.collect()]));
        assert_eq!(reply["message"], whole["message"], "{length}");
        assert_eq!(reply["prompt_eval_count"], whole["prompt_eval_count"]);
    }
    assert_nothing_held(&server);
}

#[test]
fn a_response_that_is_gone_on_with_still_shows_its_images() {
    let server = start_seeing();
    let first = posted(&server, RESPONSES, &responses(&[data_url(0)], json!({})));
    let held = server.engine().status().request_memory.held.get();
    assert!(held > file(0).len() as u64, "the image is kept: {held}");
    let by_name = json!({"previous_response_id": first["id"], "store": false});
    let on = posted(&server, RESPONSES, &responses(&[data_url(1)], by_name));
    let mut whole = responses(&[data_url(0)], json!({"store": false}));
    let turns = whole["input"].as_array_mut().expect("items");
    turns.extend(first["output"].as_array().expect("items").iter().cloned());
    let second = responses(&[data_url(1)], json!({}));
    turns.push(second["input"][0].clone());
    let sent = posted(&server, RESPONSES, &whole);
    assert_eq!(said_in_response(&on), said_in_response(&sent));
    assert_eq!(on["usage"]["input_tokens"], sent["usage"]["input_tokens"]);
    let refused = post(
        &server,
        RESPONSES,
        &responses(&["file-1".to_owned()], json!({})),
    );
    assert_eq!(
        refused.json()["error"]["param"],
        "input[0].content[0].image_url"
    );
}

#[test]
fn clients_are_told_whether_the_model_sees() {
    let input = |server: &Server| {
        let card = get(server, "/v1/models").json()["data"][0].clone();
        let shown = posted(server, "/api/show", &json!({"model": "demo"}));
        let capabilities = shown["capabilities"].as_array().expect("a list");
        let sees = capabilities.contains(&json!("vision"));
        (card["architecture"]["input_modalities"].clone(), sees)
    };
    assert_eq!(input(&start_seeing()), (json!(["text", "image"]), true));
    assert_eq!(input(&start()), (json!(["text"]), false));
}

/// A host of images on a port of its own. It answers `/image-0.png`, `/moved` and `/away` (redirects to that, on its own
/// host and by the name of another), `/huge` and `/endless` (a body without end, announced and not), `/none`, and
/// `/slow`, which never ends. It counts those who came.
struct Elsewhere {
    port: u16,
    asked: Arc<AtomicUsize>,
}

impl Elsewhere {
    fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::SeqCst);
                thread::spawn(move || answer(stream, port));
            }
        });
        Self { port, asked }
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    fn host(&self) -> ImageHost {
        let host = format!("127.0.0.1:{}", self.port);
        host.parse().expect("a host")
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn answer(stream: TcpStream, port: u16) {
    let mut line = String::new();
    let mut reader = BufReader::new(&stream);
    reader.read_line(&mut line).ok();
    let mut rest = String::new();
    while reader.read_line(&mut rest).is_ok_and(|read| read > 2) {
        rest.clear();
    }
    let path = line.split(' ').nth(1).unwrap_or_default();
    let redirect =
        |to: String| format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n");
    let mut out = &stream;
    match path {
        "/image-0.png" => {
            let image = file(0);
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", image.len());
            out.write_all(&[head.as_bytes(), &image].concat()).ok();
        }
        "/moved" => {
            out.write_all(redirect("/image-0.png".to_owned()).as_bytes())
                .ok();
        }
        "/away" => {
            let to = format!("http://localhost:{port}/image-0.png");
            out.write_all(redirect(to).as_bytes()).ok();
        }
        "/around" => {
            out.write_all(redirect("/around".to_owned()).as_bytes())
                .ok();
        }
        "/huge" => {
            out.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 30000000\r\n\r\n")
                .ok();
        }
        "/endless" => {
            let part = vec![b'x'; 1 << 16];
            let begun = out.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n");
            while begun.is_ok() && out.write_all(&part).is_ok() {}
        }
        "/slow" => {
            out.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx")
                .ok();
            // Until the client gives up.
            reader.read_line(&mut rest).ok();
        }
        _ => {
            out.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                .ok();
        }
    }
}

#[test]
fn an_image_that_is_elsewhere_is_fetched_from_a_host_that_was_named() {
    let elsewhere = Elsewhere::start();
    let refused = post(
        &start_seeing(),
        CHAT,
        &chat(&[elsewhere.url("/image-0.png")]),
    );
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("fetches no addresses"), "{refused:?}");
    assert_eq!(elsewhere.asked(), 0, "nobody comes by default");

    let server = start_seeing_with(|config| config.image_hosts = vec![elsewhere.host()]);
    let itself = posted(&server, CHAT, &chat(&[data_url(0)]));
    let said = &itself["choices"][0]["message"]["content"];
    for (path, requests) in [("/image-0.png", 1), ("/moved", 2)] {
        let before = elsewhere.asked();
        let url = elsewhere.url(path);
        let fetched = posted(&server, CHAT, &chat(std::slice::from_ref(&url)));
        assert_eq!(fetched["choices"][0]["message"]["content"], *said, "{path}");
        assert_eq!(elsewhere.asked() - before, requests, "{path}");
        let source = json!({"type": "url", "url": url});
        let anthropic = posted(&server, MESSAGES, &messages(&source));
        assert_eq!(anthropic["content"][0]["text"], *said, "{path}");
    }
    // What only counts tokens goes nowhere, and has a place for it all the same.
    let before = elsewhere.asked();
    let source = json!({"type": "url", "url": elsewhere.url("/image-0.png")});
    let count = posted(&server, "/v1/messages/count_tokens", &messages(&source));
    assert_eq!(count["input_tokens"], itself["usage"]["prompt_tokens"]);
    assert_eq!(elsewhere.asked(), before);
    assert_nothing_held(&server);
    // A response that is gone on with has the image that was fetched for it.
    let url = elsewhere.url("/image-0.png");
    let first = posted(&server, RESPONSES, &responses(&[url], json!({})));
    assert_eq!(*said_in_response(&first), *said);
    let before = elsewhere.asked();
    let by_name = json!({"previous_response_id": first["id"], "store": false});
    posted(&server, RESPONSES, &responses(&[], by_name));
    assert_eq!(elsewhere.asked(), before);
}

#[test]
fn an_image_that_is_elsewhere_has_limits() {
    let elsewhere = Elsewhere::start();
    let server = start_seeing_with(|config| {
        config.image_hosts = vec![elsewhere.host(), "localhost".parse().expect("a host")];
        config.image_hosts.push(
            format!("localhost:{}", elsewhere.port)
                .parse()
                .expect("a host"),
        );
        config.limits.receive = Duration::from_secs(2);
    });
    let by_name = format!("http://localhost:{}/image-0.png", elsewhere.port);
    for (url, says) in [
        (
            "https://example.com/cat.png".to_owned(),
            "have that host allowed",
        ),
        (
            "http://127.0.0.1:1/cat.png".to_owned(),
            "have that host allowed",
        ),
        // Named, but of this machine: its address has to be.
        (by_name, "leads to this machine"),
        (elsewhere.url("/away"), "leads to this machine"),
        (elsewhere.url("/around"), "redirects more than"),
        (elsewhere.url("/none"), "answers 404"),
        (elsewhere.url("/huge"), "an image may have"),
        (elsewhere.url("/endless"), "an image may have"),
        (elsewhere.url("/slow"), "too long to arrive"),
        ("http://a@b/".to_owned(), "no address"),
    ] {
        let refused = post(&server, CHAT, &chat(std::slice::from_ref(&url)));
        assert_eq!(refused.status, 400, "{url}: {refused:?}");
        assert!(refused.body.contains(says), "{url}: {refused:?}");
        let param = refused.json()["error"]["param"].clone();
        assert_eq!(param, "messages[0].content[0].image_url.url", "{url}");
        assert_nothing_held(&server);
    }
}

#[test]
fn more_images_than_a_prompt_may_have_are_not_fetched() {
    let elsewhere = Elsewhere::start();
    let server = start_seeing_with(|config| config.image_hosts = vec![elsewhere.host()]);
    let urls = vec![elsewhere.url("/image-0.png"); 65];
    let refused = post(&server, CHAT, &chat(&urls));
    assert_eq!(refused.status, 400);
    assert!(
        refused.body.contains("65 images are given; at most 64"),
        "{refused:?}"
    );
    assert_eq!(elsewhere.asked(), 0);
    assert_nothing_held(&server);
}

#[test]
fn redirects_stay_with_hosts_that_were_named() {
    let elsewhere = Elsewhere::start();
    let server = start_seeing_with(|config| config.image_hosts = vec![elsewhere.host()]);
    let refused = post(&server, CHAT, &chat(&[elsewhere.url("/away")]));
    assert_eq!(refused.status, 400);
    assert!(
        refused.body.contains("it redirects to where"),
        "{refused:?}"
    );
    assert_eq!(elsewhere.asked(), 1, "the other host is not asked");
}

#[test]
fn the_same_picture_is_found_computed_and_another_is_not() {
    let server = start_seeing();
    let cached = |index: usize| {
        let mut asked = chat(&[data_url(0), data_url(index)]);
        let text = "A B C D E F G H ".repeat(8);
        asked["messages"][0]["content"][2]["text"] = text.into();
        let reply = posted(&server, CHAT, &asked);
        let cached = reply.pointer("/usage/prompt_tokens_details/cached_tokens");
        cached.and_then(Value::as_u64).unwrap_or(0)
    };
    assert_eq!(cached(1), 0);
    let (same, other) = (cached(1), cached(2));
    assert!(same > 32, "{same}");
    assert!(other < same && other < 32, "{other}");
}

/// Images of their own shapes: 16, 10 tokens and one.
#[test]
fn images_of_all_shapes_are_answered_and_counted_as_they_are_computed() {
    let folder = folder().join("../qwen3-vl");
    let server = start_model(&folder, |_| {});
    let url = |index: usize| {
        let file = fs::read(folder.join(format!("image-{index}.png"))).expect("committed");
        format!("data:image/png;base64,{}", STANDARD.encode(file))
    };
    let used = |images: &[usize]| {
        let urls: Vec<String> = images.iter().map(|index| url(*index)).collect();
        let asked = chat(&urls);
        let counted = posted(
            &server,
            "/tokenize",
            &json!({"messages": asked["messages"]}),
        );
        let reply = posted(&server, CHAT, &asked);
        let used = reply
            .pointer("/usage/prompt_tokens")
            .and_then(Value::as_u64);
        assert_eq!(counted["count"].as_u64(), used, "{images:?}: {reply}");
        assert_eq!(
            posted(&server, CHAT, &asked)["choices"],
            reply["choices"],
            "{images:?} again"
        );
        used.expect("a number")
    };
    let none = used(&[]);
    for (images, tokens) in [(&[0][..], 16), (&[1], 10), (&[2], 1), (&[2, 0, 1], 27)] {
        let marks = 2 * images.len() as u64;
        assert_eq!(used(images), none + tokens + marks, "{images:?}");
    }
    assert_nothing_held(&server);
}

#[test]
fn what_is_no_image_is_refused_by_name() {
    let server = start_seeing();
    let openai = |url: &str| (CHAT, chat(&[url.to_owned()]));
    let url = json!({"type": "url", "url": "https://example.com/cat.png"});
    let named = json!({"type": "file", "file_id": "file-1"});
    let broken = json!({"type": "base64", "media_type": "image/png", "data": "?"});
    for ((path, body), says) in [
        (
            openai("https://example.com/cat.png"),
            "fetches no addresses",
        ),
        (openai("file:///etc/hostname"), "fetches no addresses"),
        ((MESSAGES, messages(&named)), "has no files"),
        (openai("data:image/png,abc"), "base64"),
        (
            openai("data:image/png;base64,!"),
            "messages[0].content[0].image_url.url",
        ),
        (
            openai("data:image/png;base64,AAAA"),
            "no PNG, JPEG, WebP or GIF",
        ),
        (openai(&data_url(0)[..22 + 280]), "damaged"),
        (
            (
                CHAT,
                chat(&[data_url(0), data_url(0)[..22 + 280].to_owned()]),
            ),
            "image 2 of 2",
        ),
        ((CHAT, chat(&vec![data_url(0); 65])), "at most 64"),
        ((MESSAGES, messages(&url)), "fetches no addresses"),
        (
            (MESSAGES, messages(&broken)),
            "messages[0].content[0].source.data",
        ),
        ((OLLAMA, ollama(&["#".to_owned()])), "messages[0].images[0]"),
    ] {
        let refused = post(&server, path, &body);
        assert_eq!(refused.status, 400, "{says}: {refused:?}");
        assert!(refused.body.contains(says), "{says}: {refused:?}");
    }
    assert_nothing_held(&server);
}

#[test]
fn marks_in_what_users_write_are_text() {
    let server = start_seeing();
    let mut asked = chat(&[]);
    asked["messages"][0]["content"] = "A <start_of_image><end_of_image> B".into();
    let reply = post(&server, CHAT, &asked);
    assert_eq!(reply.status, 200, "{reply:?}");
}

#[test]
fn a_model_without_eyes_says_so() {
    let server = start();
    let refused = post(&server, CHAT, &chat(&[data_url(0)]));
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("reads text alone"), "{refused:?}");
    let refused = post(
        &server,
        "/v1/responses",
        &responses(&[data_url(0)], json!({})),
    );
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (400, &json!("input"))
    );
    assert_nothing_held(&server);
}

/// A request for one token of each interface that takes images: with `file` where that has a file in base64, and
/// `address` where it has an address.
fn of_all_interfaces(file: &str, address: &str) -> [(&'static str, Value); 5] {
    let mut chat = chat(&[address.to_owned()]);
    let source = json!({"type": "base64", "media_type": "image/png", "data": file});
    let (mut messages, mut ollama) = (messages(&source), ollama(&[file.to_owned()]));
    chat["max_tokens"] = 1.into();
    messages["max_tokens"] = 1.into();
    ollama["options"]["num_predict"] = 1.into();
    let more = json!({"max_output_tokens": 1, "store": false});
    let generate = json!({"model": "demo", "stream": false, "prompt": "A", "images": [file],
        "options": {"num_predict": 1}});
    [
        (CHAT, chat),
        (RESPONSES, responses(&[address.to_owned()], more)),
        (MESSAGES, messages),
        (OLLAMA, ollama),
        ("/api/generate", generate),
    ]
}

#[test]
fn whatever_stands_for_an_image_is_answered_or_refused_by_name() {
    /// What replies may say of a request; nothing else is the client's fault.
    const SAID: [u16; 4] = [200, 400, 413, 429];
    let server = start_seeing();
    let whole = file(1);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(40));
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
    let damaged = (changes, any::<prop::sample::Index>()).prop_map(|(changes, end)| {
        let mut bytes = whole.clone();
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        bytes.truncate(1 + end.index(bytes.len()));
        let encoded = STANDARD.encode(bytes);
        (encoded.clone(), format!("data:image/png;base64,{encoded}"))
    });
    let text = prop_oneof![".{0,40}", "(data|https?|file):[/;,=a-z0-9]{0,30}"]
        .prop_map(|text: String| (text.clone(), text));
    let both = prop_oneof![damaged, text];
    let ran = runner.run(&both, |(file, address)| {
        for (path, body) in of_all_interfaces(&file, &address) {
            let reply = post(&server, path, &body);
            prop_assert!(SAID.contains(&reply.status), "{body}: {reply:?}");
        }
        Ok(())
    });
    ran.unwrap_or_else(|error| panic!("{error}"));
    assert_nothing_held(&server);
}
