//! Conversations that a cache folder keeps by name: gone on with by the next server, told, and removed.

use std::io::Write;
use std::path::Path;

use lacuna_kv::folder::FolderConfig;
use lacuna_pages::ByteLength;
use lacuna_server::{ApiKeys, Server};
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETION, at_rest, connect, get, post, posted, raw, read, request, start, start_with,
    until,
};

fn kept_in(folder: &Path, keys: &ApiKeys) -> Server {
    start_with(|config| {
        config.keys = keys.clone();
        config.service.prefix_cache.folder = Some(FolderConfig {
            path: folder.to_owned(),
            limit: ByteLength::mebibytes(256),
            remote: None,
            key: None,
        });
    })
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// What is there once all that was asked has been written.
fn listed(server: &Server) -> Vec<Value> {
    at_rest(server);
    let reply = get(server, "/v1/sessions");
    assert_eq!(reply.status, 200, "{reply:?}");
    let list = reply.json();
    assert_eq!(list["object"], "list");
    list["data"].as_array().expect("a list").clone()
}

/// Goes on with a conversation, and returns how many tokens were there.
fn turn(server: &Server, messages: &mut Vec<Value>, question: &str, session: Option<&str>) -> u64 {
    messages.push(json!({"role": "user", "content": question}));
    let mut body = json!({"messages": messages, "temperature": 0, "max_tokens": 24});
    if let Some(name) = session {
        body["session"] = name.into();
    }
    let reply = posted(server, CHAT, &body);
    messages.push(reply["choices"][0]["message"].clone());
    let cached = reply.pointer("/usage/prompt_tokens_details/cached_tokens");
    cached.and_then(Value::as_u64).expect("a number")
}

fn questions() -> [String; 3] {
    let long = "Ownership is a set of rules. ".repeat(20);
    [
        long,
        "What is borrowing?".to_owned(),
        "And a slice?".to_owned(),
    ]
}

#[test]
fn a_conversation_goes_on_after_a_restart_as_if_its_server_had_never_stopped() {
    let (folder, questions) = (folder(), questions());
    let (mut expected, mut messages) = (Vec::new(), Vec::new());
    let always = start();
    let cached = |question: &String| turn(&always, &mut expected, question, None);
    let never_stopped: Vec<u64> = questions.iter().map(cached).collect();
    let mut tokens = Vec::new();
    for (question, cached) in questions.iter().zip(never_stopped) {
        let server = kept_in(folder.path(), &ApiKeys::default());
        let found = turn(&server, &mut messages, question, Some("notes"));
        assert!(
            found + 64 >= cached,
            "{found} tokens, where {cached} were in memory"
        );
        until("it is written", || listed(&server).len() == 1);
        let before = tokens.last().copied().unwrap_or(0);
        until("all of it", || {
            listed(&server)[0]["tokens"].as_u64() > Some(before)
        });
        let session = &listed(&server)[0];
        assert_eq!(
            (&session["id"], &session["object"]),
            (&json!("notes"), &json!("session"))
        );
        assert!(session["bytes"].as_u64() > Some(0), "{session}");
        tokens.push(session["tokens"].as_u64().expect("a number"));
        server.shutdown();
    }
    assert_eq!(messages, expected);
    let server = kept_in(folder.path(), &ApiKeys::default());
    assert_eq!(
        get(&server, "/v1/sessions/notes").json(),
        listed(&server)[0]
    );
    let delete = |name: &str| {
        raw(
            &server,
            &request("DELETE", &format!("/v1/sessions/{name}"), &[], b""),
        )
    };
    let gone = delete("notes");
    assert_eq!((gone.status, &gone.json()["deleted"]), (200, &json!(true)));
    assert_eq!(listed(&server), [] as [Value; 0]);
    for absent in [delete("notes"), get(&server, "/v1/sessions/notes")] {
        assert_eq!(
            (absent.status, &absent.json()["error"]["code"]),
            (404, &json!("session_not_found"))
        );
    }
    server.shutdown();
    // Nothing of it is left for the next.
    let server = kept_in(folder.path(), &ApiKeys::default());
    let question = questions[0].as_str();
    assert_eq!(turn(&server, &mut Vec::new(), question, None), 0);
}

#[test]
fn a_session_is_refused_where_it_cannot_be_kept_or_is_none() {
    let folder = folder();
    let (without, with) = (start(), kept_in(folder.path(), &ApiKeys::default()));
    let text = |session: &Value| json!({"prompt": "a", "max_tokens": 1, "session": session});
    let chat = |session: &Value| {
        let messages = json!([{"role": "user", "content": "a"}]);
        json!({"messages": messages, "max_tokens": 1, "session": session})
    };
    let refused = |server: &Server, path: &str, body: &Value, says: &str| {
        let reply = post(server, path, body);
        let error = reply.json()["error"].clone();
        assert_eq!(
            (reply.status, &error["param"]),
            (400, &json!("session")),
            "{body}"
        );
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(says), "{message}");
    };
    for (path, body) in [(CHAT, chat(&json!("a"))), (COMPLETION, text(&json!("a")))] {
        refused(&without, path, &body, "cache folder");
    }
    assert_eq!(get(&without, "/v1/sessions").status, 404);
    for name in ["", "../a", "a/b", ".a", &"x".repeat(65)] {
        for (path, body) in [(CHAT, chat(&json!(name))), (COMPLETION, text(&json!(name)))] {
            refused(&with, path, &body, "letters");
        }
    }
    let mut two = text(&json!("a"));
    two["prompt"] = json!(["a", "b"]);
    refused(&with, COMPLETION, &two, "alone");
    posted(&with, COMPLETION, &text(&Value::Null));
    assert_eq!(get(&with, "/v1/sessions/..%2Fa").status, 400);
    assert_eq!(
        listed(&with),
        [] as [Value; 0],
        "nothing that was refused is kept"
    );
}

#[test]
fn of_two_requests_for_one_session_at_once_both_are_answered_and_one_is_kept() {
    let folder = folder();
    let server = kept_in(folder.path(), &ApiKeys::default());
    let body = |text: &str| {
        let prompt = text.repeat(20);
        json!({"prompt": prompt, "temperature": 0, "max_tokens": 16, "session": "one"})
    };
    let texts = [
        "Ownership is a set of rules. ",
        "A slice borrows what it shows. ",
    ];
    let mut streams = texts.map(|text| {
        let mut stream = connect(&server);
        let asked = request("POST", COMPLETION, &[], body(text).to_string().as_bytes());
        stream.write_all(&asked).expect("sent");
        stream
    });
    for stream in &mut streams {
        assert_eq!(read(stream).status, 200);
    }
    until("one is kept", || listed(&server).len() == 1);
    // It is the same again, alone.
    posted(&server, COMPLETION, &body(texts[0]));
    until("it has tokens", || {
        listed(&server)[0]["tokens"].as_u64() > Some(64)
    });
    assert_eq!(listed(&server).len(), 1);
}

#[test]
fn clients_name_their_sessions_apart() {
    let folder = folder();
    let keys = ApiKeys::new(["first-key", "second-key"]).expect("keys");
    let server = kept_in(folder.path(), &keys);
    let asked = |key: &str, method: &str, path: &str, body: &Value| {
        let headers = [("authorization", &*format!("Bearer {key}"))];
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        raw(&server, &request(method, path, &headers, body.as_bytes()))
    };
    let count = |key: &str| {
        let reply = asked(key, "GET", "/v1/sessions", &Value::Null).json();
        reply["data"].as_array().expect("a list").len()
    };
    let body = json!({"prompt": "a b c ".repeat(40), "max_tokens": 1, "session": "notes"});
    assert_eq!(asked("first-key", "POST", COMPLETION, &body).status, 200);
    until("it is kept", || count("first-key") == 1);
    assert_eq!(count("second-key"), 0);
    let path = "/v1/sessions/notes";
    assert_eq!(
        asked("second-key", "DELETE", path, &Value::Null).status,
        404
    );
    assert_eq!(
        asked("no-key", "GET", "/v1/sessions", &Value::Null).status,
        401
    );
    assert_eq!(asked("first-key", "DELETE", path, &Value::Null).status, 200);
    assert_eq!(count("first-key"), 0);
}

#[test]
fn every_interface_keeps_a_conversation_by_name() {
    let folder = folder();
    let server = kept_in(folder.path(), &ApiKeys::default());
    let text = &questions()[0];
    let messages = json!([{"role": "user", "content": text}]);
    for (path, body, name) in [
        (
            "/v1/responses",
            json!({"input": text, "max_output_tokens": 4, "session": "responses"}),
            "responses",
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 4, "session": "messages"}),
            "messages",
        ),
        (
            "/api/chat",
            json!({"model": "demo", "messages": messages, "stream": false,
                "options": {"num_predict": 4, "session": "ollama"}}),
            "ollama",
        ),
    ] {
        let reply = post(&server, path, &body);
        assert_eq!(reply.status, 200, "{path}: {reply:?}");
        assert_eq!(reply.header("x-lacuna-ignored"), None, "{path}");
        until("it is kept", || {
            let sessions = listed(&server);
            let mut tokens = sessions
                .iter()
                .filter(|session| session["id"] == name)
                .map(|session| session["tokens"].as_u64());
            tokens.next().flatten() > Some(100)
        });
        let refused = post(&start(), path, &body);
        assert_eq!(refused.status, 400, "{path}: {refused:?}");
    }
}
