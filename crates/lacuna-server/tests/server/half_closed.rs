//! Clients that have finished sending, and clients that are gone.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use lacuna_server::Server;
use serde_json::{Value, json};

use crate::streams::begun;
use crate::support::{
    CHAT, assert_nothing_held, connect, posted, question, read, request, start, start_with, until,
};

/// A connection over which `bytes` have been sent, and nothing more will be.
fn finished_sending(server: &Server, bytes: &[u8]) -> TcpStream {
    let mut stream = connect(server);
    stream.write_all(bytes).expect("sent");
    stream.shutdown(Shutdown::Write).expect("half closed");
    stream
}

fn asking(body: &Value) -> Vec<u8> {
    request("POST", CHAT, &[], body.to_string().as_bytes())
}

fn asking_as_http_1_0(body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    format!("POST {CHAT} HTTP/1.0\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

#[test]
fn a_client_that_has_finished_sending_gets_its_reply() {
    let server = start();
    // As `nc -N` does; the connection used to be closed without a word.
    let body = question(json!({"max_tokens": 60}));
    let expected = posted(&server, CHAT, &body);
    let whole = read(&mut finished_sending(&server, &asking(&body)));
    assert_eq!(whole.status, 200, "{whole:?}");
    assert_eq!(whole.json()["choices"], expected["choices"]);
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let reply = read(&mut finished_sending(&server, &asking(&streamed)));
    let text: String = reply
        .events()
        .iter()
        .filter_map(|event| {
            event
                .pointer("/choices/0/delta/content")?
                .as_str()
                .map(str::to_owned)
        })
        .collect();
    assert_eq!(expected["choices"][0]["message"]["content"], text);
    let health = read(&mut finished_sending(
        &server,
        &request("GET", "/health", &[], b""),
    ));
    assert_eq!(health.status, 200);
    assert_nothing_held(&server);
    assert_eq!(server.engine().status().counters.cancelled, 0);
}

#[test]
fn a_client_that_finishes_sending_within_its_stream_gets_all_of_it_and_a_comment() {
    let server = start();
    let mut stream = begun(&server, 200);
    stream
        .get_ref()
        .shutdown(Shutdown::Write)
        .expect("half closed");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("to the end");
    assert!(rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(rest.matches("\r\n3\r\n:\n\n\r\n").count(), 1, "{rest}");
    assert!(rest.ends_with("0\r\n\r\n"), "{rest}");
}

#[test]
fn a_client_of_http_1_0_that_has_finished_sending_gets_its_reply_and_nothing_else() {
    let server = start();
    for (stream, end) in [(false, "}"), (true, "data: [DONE]\n\n")] {
        let body = question(json!({"max_tokens": 60, "stream": stream}));
        let mut reply = String::new();
        finished_sending(&server, &asking_as_http_1_0(&body))
            .read_to_string(&mut reply)
            .expect("a reply");
        assert!(reply.starts_with("HTTP/1.0 200 OK\r\n"), "{reply}");
        let (_, body) = reply.split_once("\r\n\r\n").expect("a body");
        assert!(
            body.starts_with(if stream { "data: {" } else { "{" }),
            "{reply}"
        );
        assert!(
            body.ends_with(end) && body.contains("chat.completion"),
            "{reply}"
        );
    }
}

#[test]
fn all_requests_sent_before_the_end_are_answered() {
    let server = start();
    let body = question(json!({"max_tokens": 30}));
    let last = String::from_utf8(asking(&body)).expect("text");
    let first = last.replace("connection: close\r\n", "");
    let all = format!("{first}{first}{last}");
    let mut replies = String::new();
    finished_sending(&server, all.as_bytes())
        .read_to_string(&mut replies)
        .expect("replies");
    assert_eq!(replies.matches("HTTP/1.1 200 OK").count(), 3, "{replies}");
}

#[test]
fn a_body_whose_end_never_comes_is_not_waited_for() {
    let server = start();
    let whole = asking(&question(json!({})));
    let reply = read(&mut finished_sending(&server, &whole[..whole.len() - 5]));
    assert_eq!(reply.status, 400, "{reply:?}");
    assert_eq!(reply.json()["error"]["code"], "incomplete_body");
}

#[test]
fn a_client_that_closes_while_its_reply_is_computed_is_cancelled() {
    let server = start_with(|config| config.service.prefix_cache.enabled = false);
    let engine = server.engine();
    // Eight, because one that is drawn at random may end after a few tokens; streamed, but gone
    // before the first token, and whole.
    let prompt = "Ownership is a set of rules. ".repeat(60);
    let chat = json!({"max_tokens": 900, "temperature": 1.0, "n": 8});
    let mut streamed = question(chat.clone());
    streamed["messages"][0]["content"] = prompt.into();
    streamed["stream"] = json!(true);
    let whole = question(chat);
    // The last used to be found out by the system's probes, a minute later.
    let all = [
        asking(&streamed),
        asking(&whole),
        asking_as_http_1_0(&whole),
    ];
    for (cancelled, request) in all.iter().enumerate() {
        let stream = finished_sending(&server, request);
        until("it runs", || !engine.status().sessions.is_empty());
        // Finishing to send has not ended it; closing does.
        assert_eq!(engine.status().counters.cancelled, cancelled as u64);
        drop(stream);
        assert_nothing_held(&server);
        assert_eq!(engine.status().counters.cancelled, cancelled as u64 + 1);
    }
}
