//! Too much, too slow, too many: refused, without harm to the others.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use lacuna_pages::ByteLength;
use serde_json::json;

use crate::support::{
    CHAT, COMPLETION, assert_nothing_held, connect, get, post, posted, question, raw, read,
    request, start_with, until,
};

#[test]
fn a_body_over_the_limit_is_refused_whether_announced_or_not() {
    let server = start_with(|config| config.limits.body_bytes = 10_000);
    let body = vec![b' '; 10_001];
    let announced = raw(&server, &request("POST", CHAT, &[], &body));
    assert_eq!(announced.status, 413);
    assert_eq!(announced.json()["error"]["code"], "body_too_large");
    let mut chunked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
        transfer-encoding: chunked\r\n\r\n2711\r\n"
        .to_vec();
    chunked.extend_from_slice(&body);
    chunked.extend_from_slice(b"\r\n0\r\n\r\n");
    assert_eq!(raw(&server, &chunked).status, 413);
    posted(&server, CHAT, &question(json!({})));
}

#[test]
fn a_request_waits_for_memory_that_others_hold_and_is_told_when_it_waited_in_vain() {
    let server = start_with(|config| config.limits.memory_wait = Duration::from_millis(300));
    let engine = server.engine();
    let memory = engine.request_memory();
    let all = usize::try_from(memory.limit().get()).expect("it fits");
    let others = memory.try_take(all).expect("nobody else is there");
    let response = post(&server, CHAT, &question(json!({})));
    assert_eq!(response.status, 503, "{response:?}");
    assert!(response.header("retry-after").is_some());
    assert_eq!(
        response.json()["error"]["code"],
        "request_memory_full",
        "{response:?}"
    );
    drop(others);
    posted(&server, CHAT, &question(json!({})));
}

#[test]
fn a_body_that_the_memory_can_never_hold_is_refused_with_the_limit() {
    let server = start_with(|config| {
        config.service.engine.request_memory = Some(ByteLength::new(1 << 20));
    });
    // A quarter is for connections; half of the rest is for bodies that arrive, the other for those that
    // have.
    let body = vec![b' '; (1 << 19) + 1];
    let response = raw(&server, &request("POST", CHAT, &[], &body));
    assert_eq!(response.status, 413, "{response:?}");
    assert!(response.body.contains("393216"), "{response:?}");
    // Small as text, but not once it is parsed.
    let nested = format!("{{\"messages\": [{}1]}}", "[],".repeat(50_000));
    let response = raw(&server, &request("POST", CHAT, &[], nested.as_bytes()));
    assert_eq!(response.status, 413, "{response:?}");
    assert_eq!(response.json()["error"]["code"], "request_too_large");
    assert!(response.body.contains("768 KiB"), "{response:?}");
    posted(&server, CHAT, &question(json!({})));
    until("everything is given back", || {
        server.engine().status().request_memory.held.get() == 0
    });
}

/// Each of them fits, and the second or a later one found what it needs held by those before it: clients were told that others
/// hold it and to try again, for as long as they tried.
#[test]
fn prompts_that_do_not_fit_the_memory_together_are_refused_for_good() {
    let server = start_with(|config| {
        config.service.engine.request_memory = Some(ByteLength::new(4 << 20));
    });
    let scored = |prompts: usize| {
        let prompts = vec!["What is ownership? ".repeat(40); prompts];
        json!({"prompt": prompts, "max_tokens": 0, "echo": true, "logprobs": 3})
    };
    let refused = post(&server, COMPLETION, &scored(60));
    assert_eq!(refused.status, 413, "{refused:?}");
    assert_eq!(refused.json()["error"]["code"], "request_too_large");
    assert_eq!(refused.header("retry-after"), None);
    assert_nothing_held(&server);
    posted(&server, COMPLETION, &scored(2));
    // What somebody else holds is another matter.
    let engine = server.engine();
    let memory = engine.request_memory();
    // A reply arrives before what its request held is given back.
    until("the last request's memory is given back", || {
        memory.status().held.get() == 0
    });
    let most = usize::try_from(memory.limit().get()).expect("it fits");
    let others = memory.try_take(most - (256 << 10)).expect("free");
    let refused = post(&server, COMPLETION, &scored(2));
    assert_eq!(refused.status, 503, "{refused:?}");
    drop(others);
    posted(&server, COMPLETION, &scored(2));
}

#[test]
fn a_client_that_sends_too_much_hears_of_it_when_it_is_done() {
    let server = start_with(|config| config.limits.body_bytes = 10_000);
    // Far more than the system holds between the two: whoever closed at once with all of that unread
    // took the reply away from a client that reads it last.
    let body = vec![b' '; 32 << 20];
    let mut stream = connect(&server);
    stream
        .write_all(&request("POST", CHAT, &[], &body))
        .expect("all of it can be sent");
    let refused = read(&mut stream);
    assert_eq!(refused.status, 413, "{refused:?}");
    assert_eq!(refused.json()["error"]["code"], "body_too_large");
}

/// It was told to go on, sent all of it, and heard then that it was too much.
#[test]
fn a_client_that_waits_to_be_told_to_go_on_hears_at_once_that_it_need_not() {
    let server = start_with(|config| config.limits.body_bytes = 10_000);
    let heard = |length: usize, more: &str| {
        let mut stream = connect(&server);
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n{more}content-length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).expect("sent");
        let mut first = [0; 12];
        stream.read_exact(&mut first).expect("a status");
        String::from_utf8(first.to_vec()).expect("text")
    };
    assert_eq!(heard(10_001, ""), "HTTP/1.1 413");
    assert_eq!(heard(500, "content-encoding: br\r\n"), "HTTP/1.1 415");
    assert_eq!(heard(500, ""), "HTTP/1.1 100");
    assert_nothing_held(&server);
}

/// What was sent so was said to be no JSON, at line 1 and column 1.
#[test]
fn a_compressed_body_is_called_so() {
    let server = start_with(|_| {});
    let body = question(json!({})).to_string();
    let sent = |coding| {
        let headers = [("content-encoding", coding)];
        raw(&server, &request("POST", CHAT, &headers, body.as_bytes()))
    };
    for coding in ["gzip", "deflate, gzip", "zstd"] {
        let refused = sent(coding);
        assert_eq!(refused.status, 415, "{refused:?}");
        assert_eq!(refused.json()["error"]["code"], "compressed_body");
        assert!(refused.body.contains(coding), "{refused:?}");
    }
    assert_eq!(sent("Identity").status, 200);
}

#[test]
fn a_body_that_does_not_come_is_not_waited_for() {
    let server = start_with(|config| {
        config.limits.receive = Duration::from_millis(300);
        // There is room for it at once, so how long others wait for some has nothing to do with it.
        config.limits.memory_wait = Duration::from_secs(3600);
    });
    let whole = request("POST", CHAT, &[], &[b' '; 1000]);
    let response = raw(&server, &whole[..whole.len() - 500]);
    assert_eq!(response.status, 408);
    assert_eq!(response.json()["error"]["code"], "timeout");
}

#[test]
fn a_head_that_does_not_come_is_not_waited_for() {
    let server = start_with(|config| config.limits.receive = Duration::from_millis(300));
    let mut stream = connect(&server);
    stream.write_all(b"POST /v1/chat/compl").expect("sent");
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).ok();
    assert!(!rest.starts_with(b"HTTP/1.1 200"), "{rest:?}");
    assert_eq!(get(&server, "/health").status, 200);
}

#[test]
fn a_connection_nobody_reads_from_gives_its_place_up() {
    let server = start_with(|config| {
        config.limits.connections = 1;
        config.limits.send = Duration::from_millis(300);
    });
    let mut unread = connect(&server);
    unread
        .set_write_timeout(Some(Duration::from_secs(2)))
        .expect("a timeout");
    // More replies than the system holds between the two. The server stops reading when they stop
    // being read, so that not all requests may be sent.
    let kept = "GET /page/style.css HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(20_000);
    unread.write_all(kept.as_bytes()).ok();
    until("another is served", || {
        let mut stream = connect(&server);
        stream
            .write_all(&request("GET", "/v1/models", &[], b""))
            .ok();
        let mut reply = [0; 12];
        stream.read_exact(&mut reply).is_ok() && &reply == b"HTTP/1.1 200"
    });
}

#[test]
fn nonsense_instead_of_http_ends_the_connection_only() {
    let server = start_with(|_| {});
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"GET\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
    ] {
        let mut stream = connect(&server);
        stream.write_all(bytes).expect("sent");
        stream.shutdown(std::net::Shutdown::Write).ok();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).ok();
        assert!(!rest.starts_with(b"HTTP/1.1 200"), "{rest:?}");
    }
    assert_eq!(get(&server, "/health").status, 200);
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let server = start_with(|config| {
        config.service.max_running = 1;
        config.service.max_waiting = 1;
    });
    // With this seed a reply is long; others end after a few tokens.
    let fields = json!({"max_tokens": 600, "stream": true, "temperature": 1.0, "seed": 5});
    let body = question(fields).to_string();
    let bytes = request("POST", CHAT, &[], body.as_bytes());
    let streams: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut stream = connect(&server);
            stream.write_all(&bytes).expect("sent");
            stream
        })
        .collect();
    let engine = server.engine();
    until("some are refused", || engine.status().counters.refused >= 5);
    let mut full = post(&server, CHAT, &question(json!({})));
    assert_eq!(full.status, 429, "{full:?}");
    assert!(
        full.header("retry-after")
            .and_then(|value| value.parse::<u64>().ok())
            >= Some(1)
    );
    assert_eq!(full.json()["error"]["type"], "rate_limit_error");
    drop(streams);
    until("there is room again", || {
        full = post(&server, CHAT, &question(json!({})));
        full.status == 200
    });
    assert_nothing_held(&server);
}

#[test]
fn a_request_that_takes_too_long_is_told_so() {
    // Shorter than any reply: one that is drawn at random may end after a few tokens.
    let server = start_with(|config| config.limits.request = Duration::from_millis(1));
    let response = post(&server, CHAT, &question(json!({"max_tokens": 900, "n": 8})));
    assert_eq!(response.status, 504, "{response:?}");
    assert_eq!(response.json()["error"]["code"], "timeout");
    assert_nothing_held(&server);
}

#[test]
fn ten_thousand_connections_leave_room_for_those_that_come_after() {
    let server = start_with(|config| {
        config.limits.connections = 64;
        config.limits.receive = Duration::from_secs(3);
    });
    let mut idle = Vec::new();
    for _ in 0..10_000 {
        match TcpStream::connect(server.address()) {
            Ok(stream) => idle.push(stream),
            Err(error) => {
                // The test's own limit of open files, as on systems where it is 1,024.
                eprintln!("stopped at {} connections: {error}", idle.len());
                break;
            }
        }
    }
    assert!(idle.len() > 500, "{}", idle.len());
    // One of the first that find all places taken: the last ones may find them free again.
    let mut next = idle.swap_remove(100);
    next.set_read_timeout(Some(Duration::from_secs(10)))
        .expect("a timeout");
    let refused = read(&mut next);
    assert_eq!(
        (refused.status, refused.json()["error"]["code"].as_str()),
        (503, Some("too_many_connections"))
    );
    // Idle ones lose their place after the time a head may take.
    until("a connection is served again", || {
        let Ok(mut stream) = TcpStream::connect(server.address()) else {
            idle.clear();
            return false;
        };
        stream
            .write_all(&request("GET", "/v1/models", &[], b""))
            .ok();
        let mut reply = [0; 12];
        stream.read_exact(&mut reply).is_ok() && &reply == b"HTTP/1.1 200"
    });
}

#[test]
fn long_heads_wait_for_the_memory_that_others_hold() {
    // A quarter is for connections, beside 1 MiB that the program has for them: fourteen take 448 KiB,
    // and eleven of their heads find 96 KiB each at once.
    let server = start_with(|config| {
        config.service.engine.request_memory = Some(ByteLength::new(2 << 20));
    });
    let mut streams: Vec<_> = (0..14).map(|_| connect(&server)).collect();
    let head = format!(
        "GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: {}",
        "x".repeat(10_000)
    );
    for part in [head.as_bytes(), b"\r\n\r\n"] {
        for stream in &mut streams {
            stream.write_all(part).expect("sent");
        }
    }
    for stream in &mut streams {
        assert_eq!(read(stream).status, 200);
    }
}

#[test]
fn connections_take_no_more_than_their_part_of_what_requests_may_hold() {
    let server = start_with(|config| {
        config.service.engine.request_memory = Some(ByteLength::new(2 << 20));
    });
    let idle: Vec<_> = (0..48).map(|_| connect(&server)).collect();
    let refused = get(&server, "/version");
    assert_eq!(refused.status, 503, "{refused:?}");
    assert_eq!(refused.json()["error"]["code"], "too_many_connections");
    assert_eq!(get(&server, "/health").status, 200);
    drop(idle);
    until("they are gone", || get(&server, "/version").status == 200);
    let all = server.engine().request_memory().clone();
    let held = all
        .try_take(3 << 19)
        .expect("what is left is for requests alone");
    assert_eq!(get(&server, "/version").status, 200);
    drop(held);
}

#[test]
fn a_whole_reply_that_outgrows_what_requests_may_hold_is_refused_and_streamed_it_is_not() {
    let server = start_with(|config| {
        config.service.engine.request_memory = Some(ByteLength::new(1 << 20));
    });
    // 300 tokens with 21 log-probabilities of some 80 bytes each.
    let fields =
        json!({"logprobs": true, "top_logprobs": 20, "max_tokens": 300, "ignore_eos": true});
    let whole = post(&server, CHAT, &question(fields.clone()));
    assert_eq!(whole.status, 413, "{whole:?}");
    assert_eq!(whole.json()["error"]["code"], "reply_too_large");
    let mut streamed = question(fields);
    streamed["stream"] = json!(true);
    let streamed = post(&server, CHAT, &streamed);
    assert!(streamed.events().len() > 300);
    assert_nothing_held(&server);
    until("all of it is given back", || {
        server.engine().status().request_memory.held.get() == 0
    });
}
