//! Requests that are unusual, or wrong, below what they ask for.

use std::io::{Read, Write};

use serde_json::json;

use crate::support::{
    CHAT, Response, connect, get, question, raw, read, request, start, start_with,
};

/// The reply to a head as it is, without a body.
fn answer(server: &lacuna_server::Server, head: &str) -> Response {
    raw(server, head.as_bytes())
}

#[test]
fn a_request_names_exactly_one_host() {
    let server = start();
    for (head, status) in [
        ("GET /health HTTP/1.1\r\nconnection: close\r\n\r\n", 400),
        (
            "GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
            400,
        ),
        (
            "GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
            400,
        ),
        (
            "GET /health HTTP/1.1\r\nhost: a@localhost\r\nconnection: close\r\n\r\n",
            400,
        ),
        (
            "GET /health HTTP/1.1\r\nhost: local host\r\nconnection: close\r\n\r\n",
            400,
        ),
        (
            "GET /health HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n",
            400,
        ),
        ("GET /health HTTP/1.0\r\n\r\n", 200),
        ("GET /health HTTP/1.0\r\nhost: evil.example\r\n\r\n", 403),
    ] {
        let head = head.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n");
        let reply = answer(&server, &head);
        assert_eq!(reply.status, status, "{head:?}: {reply:?}");
        if status == 400 {
            assert_eq!(reply.json()["error"]["code"], "invalid_host", "{head:?}");
        }
    }
}

#[test]
fn a_target_that_is_a_whole_url_says_the_host_itself() {
    let server = start();
    for (target, status) in [
        ("http://localhost:8080/health", 200),
        ("http://127.0.0.1/health", 200),
        ("http://evil.example/health", 403),
    ] {
        let head = format!("GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        assert_eq!(answer(&server, &head).status, status, "{target}");
    }
}

#[test]
fn what_is_not_http_is_refused_in_json_too() {
    let server = start();
    let long = "x".repeat(70_000);
    let many = "x: y\r\n".repeat(101);
    for (head, status, code) in [
        ("GET /health\r\n\r\n".to_owned(), 400, "invalid_http"),
        (
            "GET /hea lth HTTP/1.1\r\n\r\n".to_owned(),
            400,
            "invalid_http",
        ),
        (
            "GET /health HTTP/1.1\r\nhost localhost\r\n\r\n".to_owned(),
            400,
            "invalid_http",
        ),
        (
            format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1x\r\n\r\n"),
            400,
            "invalid_http",
        ),
        (
            format!(
                "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"
            ),
            400,
            "invalid_http",
        ),
        (
            format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n"),
            400,
            "invalid_http",
        ),
        (
            format!("GET /health HTTP/1.1\r\nhost: localhost\r\nx: {long}\r\n\r\n"),
            431,
            "head_too_large",
        ),
        (
            format!("GET /{long} HTTP/1.1\r\nhost: localhost\r\n\r\n"),
            431,
            "head_too_large",
        ),
        (
            format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{many}\r\n"),
            431,
            "head_too_large",
        ),
    ] {
        let reply = answer(&server, &head);
        let shown = &head[..head.len().min(80)];
        assert_eq!(reply.status, status, "{shown:?}: {reply:?}");
        assert_eq!(reply.json()["error"]["code"], code, "{shown:?}");
        assert_eq!(reply.header("content-type"), Some("application/json"));
    }
    assert_eq!(get(&server, "/health").status, 200);
}

#[test]
fn a_reply_is_whole_before_the_next_request_is_found_to_be_nonsense() {
    let server = start();
    let first = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut stream = connect(&server);
    stream
        .write_all(format!("{first}nonsense\r\n\r\n").as_bytes())
        .expect("sent");
    let mut replies = String::new();
    stream.read_to_string(&mut replies).expect("replies");
    assert!(replies.starts_with("HTTP/1.1 200 OK"), "{replies}");
    assert!(replies.contains("\"demo\""), "{replies}");
    assert!(replies.contains("HTTP/1.1 400 Bad Request"), "{replies}");
}

#[test]
fn a_body_of_two_lengths_hides_no_second_request() {
    let server = start();
    for lengths in [
        "content-length: 4\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 4\r\n",
    ] {
        let hidden = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{lengths}\r\n0\r\n\r\n");
        let mut stream = connect(&server);
        stream
            .write_all(format!("{head}{hidden}").as_bytes())
            .expect("sent");
        let mut replies = String::new();
        // The system may reset a connection that is closed with a request unread.
        stream.read_to_string(&mut replies).ok();
        assert_eq!(
            replies.matches("HTTP/1.1 ").count(),
            1,
            "{lengths}: {replies}"
        );
        assert!(replies.starts_with("HTTP/1.1 400"), "{lengths}: {replies}");
    }
}

#[test]
fn every_method_has_an_answer() {
    let server = start();
    let asked = |method: &str, path: &str| raw(&server, &request(method, path, &[], b""));
    for path in ["/health", "/v1/models", "/", "/metrics"] {
        let reply = asked("HEAD", path);
        assert_eq!((reply.status, reply.body.as_str()), (200, ""), "{path}");
    }
    let missing = asked("HEAD", "/nowhere");
    assert_eq!((missing.status, missing.body.as_str()), (404, ""));
    let options = asked("OPTIONS", CHAT);
    assert_eq!(
        (options.status, options.header("allow")),
        (405, Some("POST"))
    );
    assert_eq!(options.json()["error"]["code"], "method_not_allowed");
    for (method, path, status) in [
        ("OPTIONS", "*", 404),
        ("TRACE", "/health", 405),
        ("CONNECT", "localhost:80", 404),
        ("BREW", "/health", 405),
    ] {
        assert_eq!(asked(method, path).status, status, "{method} {path}");
    }
}

#[test]
fn a_client_that_waits_to_be_told_is_told_to_send_its_body_or_why_not() {
    let server = start_with(|config| {
        config.keys = lacuna_server::ApiKeys::new(["first-key"]).expect("a key");
    });
    let body = question(json!({"max_tokens": 2})).to_string();
    let head = |key: &str| {
        let length = body.len();
        format!(
            "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             authorization: Bearer {key}\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
        )
    };
    let mut stream = connect(&server);
    stream
        .write_all(head("first-key").as_bytes())
        .expect("sent");
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).expect("it is told");
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).expect("sent");
    assert_eq!(read(&mut stream).status, 200);
    let mut stream = connect(&server);
    stream
        .write_all(head("other-key").as_bytes())
        .expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("a reply");
    assert!(reply.starts_with("HTTP/1.1 401"), "{reply}");
}

#[test]
fn another_version_of_http_is_not_answered_in_this_one() {
    let server = start();
    let mut stream = connect(&server);
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .expect("sent");
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).ok();
    assert!(reply.is_empty(), "{}", String::from_utf8_lossy(&reply));
    assert_eq!(get(&server, "/health").status, 200);
}
