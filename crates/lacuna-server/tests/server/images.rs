//! Images in the forms that clients of three interfaces send them in.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lacuna_files::ModelFiles;
use lacuna_models::{Model, with_images};
use lacuna_server::Server;
use serde_json::{Value, json};

use crate::support::{assert_nothing_held, config, post, posted, start};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const OLLAMA: &str = "/api/chat";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/vision/gemma3")
}

fn start_seeing() -> Server {
    let files = ModelFiles::open(&folder().join("hf")).expect("committed");
    let model = Model::load(files).and_then(|model| with_images(model, None));
    Server::start(Arc::new(model.expect("a model that sees")), config()).expect("it starts")
}

fn encoded(index: usize) -> String {
    STANDARD.encode(fs::read(folder().join(format!("image-{index}.png"))).expect("committed"))
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

#[test]
fn all_interfaces_say_the_same_of_an_image() {
    let server = start_seeing();
    let openai = posted(&server, CHAT, &chat(&[data_url(0)]));
    let said = openai["choices"][0]["message"]["content"].clone();
    assert_ne!(said, "");
    let source = json!({"type": "base64", "media_type": "image/png", "data": encoded(0)});
    let anthropic = posted(&server, MESSAGES, &messages(&source));
    assert_eq!(anthropic["content"][0]["text"], said);
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
    assert_nothing_held(&server);
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

#[test]
fn what_is_no_image_is_refused_by_name() {
    let server = start_seeing();
    let openai = |url: &str| (CHAT, chat(&[url.to_owned()]));
    let url = json!({"type": "url", "url": "https://example.com/cat.png"});
    let broken = json!({"type": "base64", "media_type": "image/png", "data": "?"});
    for ((path, body), says) in [
        (
            openai("https://example.com/cat.png"),
            "fetches no addresses",
        ),
        (openai("file:///etc/hostname"), "fetches no addresses"),
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
    assert_nothing_held(&server);
}
