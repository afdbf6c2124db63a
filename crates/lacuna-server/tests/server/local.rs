//! The interfaces within the process, without a socket: what they answer, and what they leave.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use lacuna_server::{ApiKeys, Local, LocalReply, ReplyPart};
use serde_json::{Value, json};

use crate::support;

fn local() -> Local {
    Local::start(support::model(), support::config()).expect("a service")
}

/// Status and body.
fn whole(mut reply: LocalReply) -> (u16, String) {
    let (mut found, mut body) = (0, Vec::new());
    while let Some(part) = reply.blocking_recv() {
        match part {
            ReplyPart::Head { status, headers } => {
                assert!(headers.iter().any(|(name, _)| name == "content-type"));
                found = status;
            }
            ReplyPart::Body(bytes) => body.extend(bytes),
        }
    }
    (found, String::from_utf8(body).expect("text"))
}

fn post(local: &Local, path: &str, body: &Value) -> LocalReply {
    local
        .call("POST", path, body.to_string().into_bytes())
        .expect("a path")
}

fn chat() -> Value {
    json!({"messages": [{"role": "user", "content": "What is ownership?"}], "max_tokens": 12, "temperature": 0})
}

#[test]
fn a_conversation_is_what_a_listener_over_the_same_engine_says() {
    let local = local();
    let (status, mine) = whole(post(&local, "/v1/chat/completions", &chat()));
    assert_eq!(status, 200, "{mine}");
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
    let listener = local.listen(address, ApiKeys::default()).expect("a port");
    let mut stream = support::connect_to(listener.address());
    let asked = chat().to_string().into_bytes();
    let request = support::request("POST", "/v1/chat/completions", &[], &asked);
    stream.write_all(&request).expect("sent");
    let served = support::read(&mut stream).body;
    let choices =
        |text: &str| serde_json::from_str::<Value>(text).expect("JSON")["choices"].clone();
    assert_eq!(choices(&mine), choices(&served));
    listener.shutdown(Duration::from_secs(5));
    assert_eq!(
        whole(post(&local, "/v1/chat/completions", &chat())).0,
        200,
        "the engine is there"
    );
}

#[test]
fn a_reply_that_is_dropped_leaves_no_pages() {
    let mut config = support::config();
    config.service.prefix_cache.enabled = false;
    let local = Local::start(support::model(), config).expect("a service");
    let mut body = chat();
    (body["stream"], body["max_tokens"], body["ignore_eos"]) =
        (true.into(), 900.into(), true.into());
    let mut reply = post(&local, "/v1/chat/completions", &body);
    assert!(matches!(
        reply.blocking_recv(),
        Some(ReplyPart::Head { status: 200, .. })
    ));
    assert!(local.engine().ledger().committed.get() > 0);
    drop(reply);
    loop {
        let (ledger, status) = (local.engine().ledger(), local.engine().status());
        if ledger.committed == ledger.idle && status.running == 0 {
            assert_eq!(status.counters.cancelled, 1);
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_is_wrong_is_said_as_the_server_says_it() {
    let local = local();
    let (status, body) = whole(post(
        &local,
        "/v1/chat/completions",
        &json!({"messages": 5}),
    ));
    assert_eq!(status, 400);
    assert!(body.contains("messages"), "{body}");
    assert_eq!(whole(post(&local, "/nowhere", &json!({}))).0, 404);
    for (method, path) in [("PO ST", "/memory"), ("POST", "not a path"), ("POST", "")] {
        let refused = local.call(method, path, Vec::new());
        assert_eq!(refused.expect_err("none").status, 400, "{method} {path}");
    }
    let fields = |value: Value| value.as_object().expect("an object").clone();
    let refused = local.requests(fields(json!({"prompt": "x", "top_p": 7})));
    let refused = refused.map(|requests| {
        local
            .submit(requests.into_iter().next().expect("one"))
            .map(drop)
    });
    let problem = refused
        .expect("it is the engine that knows")
        .expect_err("out of range");
    assert_eq!(
        (problem.code, problem.param.as_deref()),
        ("invalid_value", Some("top_p"))
    );
    let refused = local.requests(fields(json!({"prompt": ["x"], "n": 0})));
    assert_eq!(refused.err().expect("none").param.as_deref(), Some("n"));
}
