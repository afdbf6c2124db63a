//! Who is let in.

use std::net::{Ipv4Addr, SocketAddr};

use lacuna_server::{AccessLog, ApiKeys, Server, StartError};
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETION, config, get, model, post, question, raw, request, start, start_with, until,
};

fn status(server: &Server, path: &str, headers: &[(&str, &str)]) -> u16 {
    raw(server, &request("GET", path, headers, b"")).status
}

#[test]
fn with_keys_only_those_who_have_one_come_in() {
    let keys = ApiKeys::new(["first-key", "second-key"]).expect("keys");
    let server = start_with(|config| config.keys = keys);
    for path in ["/v1/models", "/metrics", "/memory", "/nowhere"] {
        let refused = get(&server, path);
        assert_eq!(refused.status, 401, "{path}");
        assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
        for wrong in [
            "Bearer wrong",
            "Bearer ",
            "Basic first-key",
            "first-key",
            "Bearer first-ke",
        ] {
            assert_eq!(
                status(&server, path, &[("authorization", wrong)]),
                401,
                "{wrong}"
            );
        }
    }
    let body = question(json!({"max_tokens": 1})).to_string();
    let asked = |headers: &[(&str, &str)]| {
        raw(&server, &request("POST", CHAT, headers, body.as_bytes())).status
    };
    assert_eq!(asked(&[]), 401);
    // The budget is everybody's.
    for (key, expected) in [("second-key", 403), ("first-key", 200)] {
        let key = format!("Bearer {key}");
        let body = json!({"budget_bytes": 1_u64 << 30}).to_string();
        let set = request(
            "POST",
            "/memory",
            &[("authorization", &key)],
            body.as_bytes(),
        );
        assert_eq!(raw(&server, &set).status, expected);
    }
    assert_eq!(asked(&[("authorization", "Bearer first-key")]), 200);
    assert_eq!(asked(&[("authorization", "bearer second-key")]), 200);
    for open in ["/health", "/ready", "/"] {
        assert_eq!(get(&server, open).status, 200, "{open}");
    }
}

#[test]
fn an_address_others_reach_needs_a_key() {
    let open = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let mut without = config();
    without.address = open;
    let refused = Server::start(model(), without).expect_err("open to all");
    assert!(matches!(refused, StartError::OpenToAll { .. }), "{refused}");
    let server = start_with(|config| {
        config.address = open;
        config.keys = ApiKeys::new(["first-key"]).expect("a key");
    });
    let port = server.address().port().to_string();
    assert_ne!(port, "0");
    // Where others decide who gets there, whoever does is served, and by any name.
    let server = start_with(|config| {
        config.address = open;
        config.keys = ApiKeys::open_to_all();
    });
    let gateway = [("host", "models.example")];
    assert_eq!(status(&server, "/v1/models", &gateway), 200);
    let page = [
        ("host", "models.example"),
        ("origin", "http://evil.example"),
    ];
    assert_eq!(status(&server, "/v1/models", &page), 403);
}

#[test]
fn pages_of_other_sites_are_kept_out() {
    let server = start();
    assert_eq!(
        status(&server, "/health", &[("host", "localhost:8080")]),
        200
    );
    assert_eq!(
        status(&server, "/health", &[("host", "127.0.0.1:8080")]),
        200
    );
    assert_eq!(status(&server, "/health", &[("host", "evil.example")]), 403);
    let own = [("host", "localhost:1"), ("origin", "http://localhost:1")];
    assert_eq!(status(&server, "/health", &own), 200);
    for origin in ["http://evil.example", "null", "http://localhost:2"] {
        let headers = [("host", "localhost:1"), ("origin", origin)];
        let refused = raw(&server, &request("GET", "/health", &headers, b""));
        assert_eq!(refused.status, 403, "{origin}");
        assert!(refused.header("access-control-allow-origin").is_none());
    }
}

#[test]
fn an_address_in_use_is_said_to_be() {
    let server = start();
    let mut second = config();
    second.address = server.address();
    let refused = Server::start(model(), second).expect_err("in use");
    assert!(matches!(refused, StartError::Listen { .. }), "{refused}");
    assert!(refused.to_string().contains(&server.address().to_string()));
}

/// What a request under `key` gets, and how much of its prompt was found.
fn asked_as(server: &Server, key: &str, path: &str, body: &Value) -> (Value, u64) {
    let headers = [("authorization", &*format!("Bearer {key}"))];
    let reply = raw(
        server,
        &request("POST", path, &headers, body.to_string().as_bytes()),
    );
    assert_eq!(reply.status, 200, "{reply:?}");
    let reply = reply.json();
    let cached = reply.pointer("/usage/prompt_tokens_details/cached_tokens");
    let cached = cached.and_then(Value::as_u64).expect("a number");
    (reply["choices"].clone(), cached)
}

/// The two interfaces, with the same long prompt, and what `more` says.
fn long_prompts(more: &Value) -> [(&'static str, Value); 2] {
    let long = "Ownership is a set of rules. ".repeat(20);
    let mut chat = question(json!({}));
    chat["messages"][0]["content"] = long.as_str().into();
    let mut text = json!({"prompt": long, "temperature": 0, "max_tokens": 8});
    for body in [&mut chat, &mut text] {
        let fields = more.as_object().expect("fields").clone();
        body.as_object_mut().expect("fields").extend(fields);
    }
    [(CHAT, chat), (COMPLETION, text)]
}

#[test]
fn a_key_is_not_told_what_another_has_asked() {
    let keys = ApiKeys::new(["first-key", "second-key"]).expect("keys");
    let server = start_with(|config| config.keys = keys);
    for (path, body) in long_prompts(&json!({})) {
        let (first, none) = asked_as(&server, "first-key", path, &body);
        assert_eq!(none, 0, "{path}");
        // This was nearly the whole prompt.
        let (second, none) = asked_as(&server, "second-key", path, &body);
        assert_eq!((second, none), (first.clone(), 0), "{path}");
        for key in ["first-key", "second-key"] {
            let (again, own) = asked_as(&server, key, path, &body);
            assert_eq!(again, first, "{path}");
            assert!(own > 50, "{path} {key}: {own} tokens of its own");
        }
    }
}

#[test]
fn keys_share_prompts_where_the_server_is_told_so() {
    let keys = ApiKeys::new(["first-key", "second-key"]).expect("keys");
    let server = start_with(|config| {
        config.keys = keys;
        config.share_prefixes = true;
    });
    let [(path, body), _] = long_prompts(&json!({}));
    let (first, none) = asked_as(&server, "first-key", path, &body);
    let (second, shared) = asked_as(&server, "second-key", path, &body);
    assert_eq!((second, none), (first, 0));
    assert!(shared > 50, "{shared} tokens");
    let [(path, salted), _] = long_prompts(&json!({"cache_salt": "a"}));
    let cached = |key| asked_as(&server, key, path, &salted).1;
    assert_eq!(cached("first-key"), 0, "a salt separates all the same");
    assert!(cached("second-key") > 50, "and is shared");
}

#[test]
fn a_salt_separates_prompts_of_one_client() {
    let server = start();
    for path in [0, 1] {
        let cached = |more: Value| {
            let (path, body) = &long_prompts(&more)[path];
            asked_as(&server, "", path, body).1
        };
        assert_eq!(cached(json!({})), 0);
        assert_eq!(cached(json!({"cache_salt": "a"})), 0);
        assert_eq!(cached(json!({"cache_salt": "b"})), 0);
        assert!(cached(json!({"cache_salt": "a"})) > 50);
        assert!(cached(json!({"cache_salt": null})) > 50);
    }
    let [(path, body), _] = long_prompts(&json!({"cache_salt": ""}));
    let refused = post(&server, path, &body);
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["param"], "cache_salt");
}

#[test]
fn pages_of_sites_that_are_let_in_may_ask_and_no_others() {
    let site = "https://chat.example";
    let keys = ApiKeys::new(["first-key"]).expect("a key");
    let server = start_with(|config| {
        config.keys = keys;
        config.cors_origins = vec![site.parse().expect("an origin")];
    });
    // A browser asks first, without the key.
    let before = [
        ("origin", site),
        ("access-control-request-method", "POST"),
        (
            "access-control-request-headers",
            "authorization,content-type",
        ),
    ];
    let asked = raw(&server, &request("OPTIONS", CHAT, &before, b""));
    assert_eq!(asked.status, 204);
    assert_eq!(asked.header("access-control-allow-origin"), Some(site));
    let headers = asked.header("access-control-allow-headers");
    assert_eq!(headers, Some("authorization,content-type"));
    assert_eq!(
        asked.header("access-control-allow-methods"),
        Some("GET, POST, DELETE")
    );
    let body = question(json!({"max_tokens": 1})).to_string();
    let ask = |origin: &str, key: &str| {
        let headers = [("origin", origin), ("authorization", key)];
        raw(&server, &request("POST", CHAT, &headers, body.as_bytes()))
    };
    let reply = ask(site, "Bearer first-key");
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("access-control-allow-origin"), Some(site));
    assert_eq!(reply.header("vary"), Some("origin"));
    // The page reads why it was refused.
    let refused = ask(site, "Bearer wrong");
    assert_eq!(refused.status, 401);
    assert_eq!(refused.header("access-control-allow-origin"), Some(site));
    for other in ["https://other.example", "http://chat.example", "null"] {
        let refused = ask(other, "Bearer first-key");
        assert_eq!(refused.status, 403, "{other}");
        assert_eq!(refused.header("access-control-allow-origin"), None);
        let before = [("origin", other), ("access-control-request-method", "POST")];
        let asked = raw(&server, &request("OPTIONS", CHAT, &before, b""));
        assert_eq!(asked.status, 403, "{other}");
    }
    let closed = start();
    let asked = raw(&closed, &request("OPTIONS", CHAT, &before, b""));
    assert_eq!((asked.status, asked.header("vary")), (403, None));
}

#[test]
fn requests_keep_their_names_and_are_in_the_access_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("access.jsonl");
    let log = AccessLog::to_file(&path).expect("a file");
    let server = start_with(|config| config.access_log = Some(log));
    let body = question(json!({"max_tokens": 4, "stream": true})).to_string();
    let named = [("x-request-id", "mine-1")];
    let whole = raw(
        &server,
        &request("POST", &format!("{CHAT}?a=b"), &named, body.as_bytes()),
    );
    assert_eq!(whole.status, 200);
    assert_eq!(whole.header("x-request-id"), Some("mine-1"));
    let nowhere = get(&server, "/nowhere");
    let given = nowhere.header("x-request-id").expect("a name").to_owned();
    assert!(given.starts_with("req-"), "{given}");
    // What is to be written is written when the server is gone.
    server.shutdown();
    until("both lines are there", || {
        let text = std::fs::read_to_string(&path).expect("the log");
        text.lines().count() == 2
    });
    let text = std::fs::read_to_string(&path).expect("the log");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let line = |id: &str| {
        let mut lines = lines.iter();
        lines.find(|line| line["id"] == id).expect("its line")
    };
    let streamed = line("mine-1");
    assert_eq!(streamed["method"], "POST");
    assert_eq!(
        streamed["path"], CHAT,
        "without what follows a question mark"
    );
    assert_eq!(
        (&streamed["status"], &streamed["whole"]),
        (&json!(200), &json!(true))
    );
    assert_eq!(streamed["bytes"], whole.body.len());
    assert!(streamed["head_seconds"].as_f64() <= streamed["seconds"].as_f64());
    assert_eq!(streamed["model"], "demo");
    assert_eq!(streamed["completion_tokens"], 4);
    assert!(streamed["prompt_tokens"].as_u64() > Some(4), "{streamed}");
    assert_eq!(streamed["cached_tokens"], 0);
    let refused = line(&given);
    assert!(refused.get("model").is_none(), "no model was asked");
    assert_eq!(
        (&refused["status"], &refused["bytes"]),
        (&json!(404), &json!(nowhere.body.len()))
    );
}
