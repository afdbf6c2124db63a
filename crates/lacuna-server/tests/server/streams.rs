//! Replies as they come.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use lacuna_server::Server;
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETION, assert_nothing_held, connect, post, posted, question, read, request, start,
    start_with, until,
};

fn texts(events: &[Value], choices: usize, path: &str) -> Vec<String> {
    let mut texts = vec![String::new(); choices];
    for event in events {
        for choice in event["choices"].as_array().expect("choices") {
            let index = choice["index"].as_u64().expect("an index") as usize;
            texts[index] += choice.pointer(path).and_then(Value::as_str).unwrap_or("");
        }
    }
    texts
}

#[test]
fn a_streamed_chat_is_the_whole_one_in_pieces() {
    let server = start();
    let fields = json!({"n": 2, "seed": 5, "temperature": 1.0, "logprobs": true});
    let whole = posted(&server, CHAT, &question(fields.clone()));
    let mut streamed = question(fields);
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let response = post(&server, CHAT, &streamed);
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    let mut events = response.events();
    let last = events.pop().expect("events");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(
        last["usage"]["completion_tokens"],
        whole["usage"]["completion_tokens"]
    );
    assert!(events.len() > 20, "{} events", events.len());
    let found = texts(&events, 2, "/delta/content");
    for (index, text) in found.iter().enumerate() {
        let choice = &whole["choices"][index];
        assert_eq!(choice["message"]["content"], *text);
        let reasons = events
            .iter()
            .flat_map(|event| event["choices"].as_array().expect("choices"));
        let reasons: Vec<&Value> = reasons
            .filter(|choice| choice["index"] == index && !choice["finish_reason"].is_null())
            .map(|choice| &choice["finish_reason"])
            .collect();
        assert_eq!(reasons, [&choice["finish_reason"]]);
    }
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    for event in &events {
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(event["id"], events[0]["id"]);
        assert!(event.get("usage").is_some_and(Value::is_null));
    }
    assert_nothing_held(&server);
}

#[test]
fn a_streamed_completion_is_the_whole_one_in_pieces() {
    let server = start();
    let body = json!({"prompt": "# Ownership\n\n", "temperature": 0, "max_tokens": 32});
    let whole = posted(&server, COMPLETION, &body);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = post(&server, COMPLETION, &streamed).events();
    assert_eq!(whole["choices"][0]["text"], texts(&events, 1, "/text")[0]);
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

/// A stream of which one event has been read. With its seed a reply is long; others end after a few
/// tokens.
pub(crate) fn begun(server: &Server, max_tokens: usize) -> BufReader<TcpStream> {
    let body = question(json!({
        "stream": true, "max_tokens": max_tokens, "ignore_eos": true, "seed": 5, "temperature": 1.0}));
    let mut stream = connect(server);
    let bytes = request("POST", CHAT, &[], body.to_string().as_bytes());
    stream.write_all(&bytes).expect("sent");
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(
            lines.read_line(&mut line).expect("a line") > 0,
            "an event comes"
        );
    }
    lines
}

#[test]
fn a_client_that_goes_away_gives_its_pages_back() {
    let server = start_with(|config| config.service.prefix_cache.enabled = false);
    let streams: Vec<_> = (0..6).map(|_| begun(&server, 900)).collect();
    let engine = server.engine();
    until("all of them run", || engine.status().sessions.len() == 6);
    assert!(engine.status().ledger.mapped.get() > 0);
    for stream in streams {
        stream.get_ref().shutdown(Shutdown::Both).ok();
    }
    assert_nothing_held(&server);
    let counters = server.engine().status().counters;
    assert!(
        counters.cancelled > 0 && counters.generated_tokens < 6 * 900,
        "{counters:?}"
    );
    posted(&server, CHAT, &question(json!({})));
}

#[test]
fn a_client_that_goes_away_cancels_all_of_its_prompts() {
    let server = start_with(|config| config.service.prefix_cache.enabled = false);
    let body = json!({"prompt": ["a", "b", "c", "d"], "max_tokens": 900, "ignore_eos": true});
    let mut stream = connect(&server);
    let body = body.to_string();
    stream
        .write_all(&request("POST", "/v1/completions", &[], body.as_bytes()))
        .expect("sent");
    let engine = server.engine();
    until("all of them run", || engine.status().sessions.len() == 4);
    drop(stream);
    assert_nothing_held(&server);
    assert_eq!(server.engine().status().counters.cancelled, 4);
}

#[test]
fn a_client_that_waits_for_a_whole_reply_can_go_away_too() {
    let server = start_with(|config| config.service.prefix_cache.enabled = false);
    // Eight, because one that is drawn at random may end after a few tokens.
    let body = question(json!({"max_tokens": 900, "temperature": 1.0, "n": 8})).to_string();
    let mut stream = connect(&server);
    stream
        .write_all(&request("POST", CHAT, &[], body.as_bytes()))
        .expect("sent");
    let engine = server.engine();
    until("it runs", || !engine.status().sessions.is_empty());
    drop(stream);
    assert_nothing_held(&server);
    assert_eq!(server.engine().status().counters.cancelled, 1);
}

#[test]
fn a_server_asked_to_end_finishes_its_streams() {
    let server = start();
    let mut stream = begun(&server, 200);
    let ending = std::thread::spawn(move || server.shutdown());
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut stream, &mut rest).expect("to the end");
    assert!(rest.contains("data: [DONE]"), "{rest}");
    ending.join().expect("it ends");
}

#[test]
fn a_server_without_grace_tells_its_streams_that_it_ends() {
    let server = start_with(|config| config.grace = Duration::ZERO);
    let mut stream = begun(&server, 900);
    let address = server.address();
    server.shutdown();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut stream, &mut rest).ok();
    assert!(rest.contains("shutting_down"), "{rest}");
    assert!(
        TcpStream::connect(address).is_err(),
        "nobody listens any more"
    );
}

#[test]
fn a_connection_carries_one_request_after_another() {
    let server = start();
    let body = question(json!({"max_tokens": 2})).to_string();
    let bytes = request("POST", CHAT, &[], body.as_bytes());
    let text = String::from_utf8(bytes).expect("text");
    let kept = text.replace("connection: close\r\n", "");
    let mut stream = connect(&server);
    stream
        .write_all(format!("{kept}{text}").as_bytes())
        .expect("sent");
    let both = read(&mut stream);
    assert_eq!(both.status, 200);
    assert!(both.body.contains("HTTP/1.1 200 OK"), "{both:?}");
}
