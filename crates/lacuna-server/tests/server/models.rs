//! Several models under one budget: found by name, loaded when they are asked for, unloaded when they are not.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use lacuna_pages::ByteLength;
use lacuna_server::{
    ApiKeys, ModelEntry, ModelPath, ModelServer, ModelsConfig, ServerConfig, StartError,
};
use serde_json::{Value, json};

use crate::support::{CHAT, COMPLETION, Response, config, connect_to, question, read, request};

fn reference(file: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
    root.join(file)
}

fn entry(name: &str, source: ModelPath) -> ModelEntry {
    ModelEntry {
        name: name.to_owned(),
        aliases: Vec::new(),
        source,
        required: true,
    }
}

/// Two models that write, one of which has another name too, and one that makes embeddings.
fn three() -> Vec<ModelEntry> {
    let embed = ModelPath::Path(reference("encoders/bert/mean.gguf"));
    let mut one = entry("one", ModelPath::Demo);
    one.aliases.push("gpt-4o".to_owned());
    vec![one, entry("two", ModelPath::Demo), entry("embed", embed)]
}

fn start_as(models: Vec<ModelEntry>, change: impl FnOnce(&mut ServerConfig)) -> ModelServer {
    let mut config = config();
    config.service.engine.context_tokens = Some(512);
    change(&mut config);
    let models = ModelsConfig {
        models,
        keep_alive: None,
    };
    ModelServer::start(models, config).expect("the server starts")
}

fn start() -> ModelServer {
    start_as(three(), |_| {})
}

fn sent(address: SocketAddr, request: &[u8]) -> Response {
    let mut stream = connect_to(address);
    stream.write_all(request).expect("sent");
    read(&mut stream)
}

fn get(address: SocketAddr, path: &str) -> Value {
    let response = sent(address, &request("GET", path, &[], b""));
    assert_eq!(response.status, 200, "{path}: {response:?}");
    response.json()
}

fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    let body = body.to_string();
    sent(address, &request("POST", path, &[], body.as_bytes()))
}

fn posted(address: SocketAddr, path: &str, body: &Value) -> Value {
    let response = post(address, path, body);
    assert_eq!(response.status, 200, "{path}: {body}: {response:?}");
    response.json()
}

fn ask(address: SocketAddr, model: &str) -> Value {
    posted(address, CHAT, &question(json!({"model": model})))
}

fn embed(address: SocketAddr, model: &str) -> Value {
    posted(
        address,
        "/v1/embeddings",
        &json!({"model": model, "input": "abc"}),
    )
}

/// What `/memory` has of a model.
fn told(address: SocketAddr, name: &str) -> Value {
    let memory = get(address, "/memory");
    let models = memory["models"].as_array().expect("a list");
    let found = models.iter().find(|model| model["name"] == name);
    found.expect("one of them").clone()
}

fn states(address: SocketAddr) -> Vec<String> {
    let models = get(address, "/v1/models");
    let models = models["data"].as_array().expect("a list");
    let state = |model: &Value| {
        model["status"]["value"]
            .as_str()
            .expect("a word")
            .to_owned()
    };
    models.iter().map(state).collect()
}

/// Until all of them are as they should be; that takes as long as it takes.
fn wait_for(address: SocketAddr, expected: [&str; 3]) {
    while states(address) != expected {
        thread::sleep(Duration::from_millis(5));
    }
}

/// A name that is none came back whole, in memory that nothing counted: three megabytes for each connection whose client did
/// not read.
#[test]
fn a_name_as_long_as_a_body_is_not_told_back() {
    let server = start();
    for path in [CHAT, "/models/load", "/v1/embeddings", "/api/chat"] {
        let body = json!({"model": "é".repeat(500_000)});
        let refused = post(server.address(), path, &body);
        assert_eq!(refused.status, 404, "{path}");
        let length = refused.body.len();
        assert!(length < 8 << 10, "{path}: {length} bytes");
        assert!(refused.body.contains("there is no model `éé"), "{path}");
        assert!(
            refused.body.contains("éé` here; this server has `one`"),
            "{path}"
        );
    }
}

#[test]
fn a_request_is_answered_by_the_model_that_it_names() {
    let server = start();
    assert_eq!(states(server.address()), ["unloaded"; 3]);
    let one = ask(server.address(), "one");
    assert_eq!(one["model"], "one");
    assert_eq!(states(server.address()), ["loaded", "unloaded", "unloaded"]);
    assert_eq!(ask(server.address(), "gpt-4o")["choices"], one["choices"]);
    assert_eq!(ask(server.address(), "two")["model"], "two");
    assert_eq!(
        embed(server.address(), "embed")["data"][0]["embedding"]
            .as_array()
            .map(Vec::len),
        Some(24)
    );
    assert_eq!(states(server.address()), ["loaded"; 3]);
    // Each interface has its own way to a model.
    for (path, body) in [
        (COMPLETION, json!({"prompt": "Hello", "max_tokens": 2})),
        ("/v1/messages", question(json!({}))),
        (
            "/v1/messages/count_tokens",
            json!({"messages": [{"role": "user", "content": "Hi"}]}),
        ),
        (
            "/v1/responses",
            json!({"input": "Hello", "max_output_tokens": 2}),
        ),
        (
            "/api/chat",
            json!({"messages": [{"role": "user", "content": "Hi"}], "stream": false, "options": {"num_predict": 2}}),
        ),
        (
            "/api/generate",
            json!({"prompt": "Hi", "stream": false, "options": {"num_predict": 2}}),
        ),
        ("/tokenize", json!({"prompt": "Hello"})),
    ] {
        let mut body = body;
        body["model"] = "two".into();
        posted(server.address(), path, &body);
    }
    let tagged = json!({"model": "embed:latest", "input": "abc"});
    assert_eq!(
        posted(server.address(), "/api/embed", &tagged)["model"],
        "embed:latest"
    );
    let loads = [
        told(server.address(), "one"),
        told(server.address(), "two"),
        told(server.address(), "embed"),
    ];
    assert!(loads.iter().all(|model| model["loads"] == 1), "{loads:?}");
}

#[test]
fn a_model_that_is_none_is_refused_with_the_names_there_are() {
    let server = start();
    for name in [
        "three",
        "",
        "../one",
        "/etc/passwd",
        "one/../two",
        "one.gguf",
        "one:latest",
    ] {
        let response = post(server.address(), CHAT, &question(json!({"model": name})));
        let error = response.json();
        assert_eq!(response.status, 404, "{name}: {error}");
        assert_eq!(error["error"]["code"], "model_not_found");
        let message = error["error"]["message"].as_str().expect("a text");
        assert!(message.contains("`one`, `two`, `embed`"), "{message}");
    }
    let missing = post(server.address(), CHAT, &question(json!({})));
    assert_eq!(
        (missing.status, missing.json()["error"]["param"].clone()),
        (400, "model".into())
    );
    for (path, body, status) in [
        (CHAT, question(json!({"model": 3})), 400),
        (CHAT, question(json!({"model": "embed"})), 404),
        ("/v1/embeddings", json!({"model": "one", "input": "a"}), 404),
        ("/models/load", json!({"model": "three"}), 404),
        ("/models/unload", json!({"model": "two"}), 400),
        ("/v1/embeddings", json!([1]), 400),
    ] {
        let response = post(server.address(), path, &body);
        assert_eq!(response.status, status, "{path}: {body}: {response:?}");
        assert!(response.json()["error"]["code"].is_string(), "{response:?}");
    }
    // Of a name that comes twice the last is meant, as everywhere else.
    let twice = br#"{"model":"three","prompt":"a","max_tokens":1,"model":"two"}"#;
    let response = sent(server.address(), &request("POST", COMPLETION, &[], twice));
    assert_eq!(response.status, 200, "{response:?}");
    let broken = sent(
        server.address(),
        &request("POST", CHAT, &[], b"{\"model\":\"one\""),
    );
    assert_eq!(
        (broken.status, broken.json()["error"]["code"].clone()),
        (400, "invalid_json".into())
    );
}

#[test]
fn models_are_loaded_and_unloaded_by_request() {
    let server = start();
    let named = |name: &str| json!({"model": name});
    let done = json!({"success": true});
    assert_eq!(
        posted(server.address(), "/models/load", &named("gpt-4o")),
        done
    );
    assert_eq!(states(server.address()), ["loaded", "unloaded", "unloaded"]);
    embed(server.address(), "embed");
    assert_eq!(
        posted(server.address(), "/models/unload", &named("one")),
        done
    );
    wait_for(server.address(), ["unloaded", "unloaded", "loaded"]);
    assert_eq!(
        posted(server.address(), "/models/unload", &named("embed")),
        done
    );
    wait_for(server.address(), ["unloaded"; 3]);
    ask(server.address(), "one");
    let one = told(server.address(), "one");
    assert_eq!(
        (&one["loads"], &one["unloads"]),
        (&json!(2), &json!(1)),
        "{one}"
    );
    let metrics = sent(server.address(), &request("GET", "/metrics", &[], b"")).body;
    for line in [
        "lacuna_model_loads_total{model_name=\"one\"} 2",
        "lacuna_model_unloads_total{model_name=\"one\"} 1",
        "lacuna_model_unloads_total{model_name=\"embed\"} 1",
        "lacuna_model_loaded{model_name=\"two\"} 0.0",
        "vllm:request_success_total{model_name=\"one\"}",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}

#[test]
fn ollamas_clients_see_what_there_is_and_what_is_loaded_and_say_for_how_long() {
    let server = start();
    let names = |path: &str| {
        let list = get(server.address(), path);
        let models = list["models"].as_array().expect("a list").clone();
        let name = |model: Value| model["name"].as_str().expect("a name").to_owned();
        models.into_iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(names("/api/tags"), ["one", "two", "embed"]);
    assert!(names("/api/ps").is_empty());
    let shown = posted(
        server.address(),
        "/api/show",
        &json!({"model": "two:latest"}),
    );
    assert_eq!(shown["capabilities"][0], "completion");
    assert!(
        names("/api/ps").is_empty(),
        "nothing is loaded to be described"
    );
    let load = |keep: Value| json!({"model": "one", "keep_alive": keep});
    assert_eq!(
        posted(server.address(), "/api/generate", &load(json!("10m")))["done_reason"],
        "load"
    );
    assert_eq!(names("/api/ps"), ["one"]);
    let digest =
        |path: &str, at: usize| get(server.address(), path)["models"][at]["digest"].clone();
    let (one, embed) = (digest("/api/tags", 0), digest("/api/tags", 2));
    assert!(
        one.as_str().is_some_and(|digits| digits.len() == 64) && one != embed,
        "{one} {embed}"
    );
    assert_eq!(digest("/api/ps", 0), one, "whether it is loaded or not");
    let expires = get(server.address(), "/api/ps")["models"][0]["expires_at"].clone();
    assert!(
        expires.as_str().is_some_and(|at| at.starts_with("20")),
        "{expires}"
    );
    posted(server.address(), "/api/generate", &load(json!(-1)));
    let expires = get(server.address(), "/api/ps")["models"][0]["expires_at"].clone();
    assert!(
        expires.as_str().is_some_and(|at| at.starts_with("9999")),
        "{expires}"
    );
    let response = post(server.address(), "/api/generate", &load(json!(0)));
    assert_eq!(response.header("x-lacuna-ignored"), None);
    assert_eq!(response.json()["done_reason"], "unload");
    wait_for(server.address(), ["unloaded"; 3]);
    let chat = json!({"model": "one", "messages": [], "keep_alive": "0"});
    assert_eq!(
        posted(server.address(), "/api/chat", &chat)["done_reason"],
        "unload"
    );
    wait_for(server.address(), ["unloaded"; 3]);
    assert_eq!(
        post(server.address(), "/api/generate", &load(json!("soon"))).status,
        400
    );
}

#[test]
fn a_model_that_cannot_be_loaded_leaves_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("broken.gguf");
    std::fs::write(&file, b"GGUF, or so it says").expect("written");
    let mut models = three();
    let broken = entry("broken", ModelPath::Path(file.clone()));
    let refused = ModelServer::start(
        ModelsConfig {
            models: vec![broken.clone()],
            ..ModelsConfig::default()
        },
        config(),
    );
    assert!(matches!(refused, Err(StartError::Model { name, .. }) if name == "broken"));
    models.push(ModelEntry {
        required: false,
        ..broken
    });
    // A file that is whole when the server starts, and is not when it is asked for.
    let late = folder.path().join("late.gguf");
    std::fs::copy(reference("llama3/model.gguf"), &late).expect("room for it");
    models.push(entry("late", ModelPath::Path(late.clone())));
    let server = start_as(models, |_| {});
    assert_eq!(server.unusable()[0].0, "broken");
    std::fs::write(&late, b"GGUF").expect("written");
    for name in ["broken", "late"] {
        let response = post(server.address(), CHAT, &question(json!({"model": name})));
        let error = response.json()["error"].clone();
        assert_eq!(
            (response.status, &error["code"]),
            (500, &json!("model_load_failed"))
        );
        let message = error["message"].as_str().expect("a text");
        let folder = folder.path().to_string_lossy();
        assert!(
            message.contains(".gguf") && !message.contains(&*folder),
            "{message}"
        );
    }
    ask(server.address(), "one");
    let failed = told(server.address(), "late");
    assert!(
        failed["error"].is_string() && failed["loads"] == 0,
        "{failed}"
    );
    // It is tried again.
    std::fs::copy(reference("llama3/model.gguf"), &late).expect("room for it");
    posted(
        server.address(),
        COMPLETION,
        &json!({"model": "late", "prompt": [1, 2], "max_tokens": 1}),
    );
    assert_eq!(told(server.address(), "late")["error"], Value::Null);
}

/// Bytes that all models have, of those that they may have.
fn taken(memory: &Value) -> (u64, u64) {
    let number = |value: &Value| value.as_u64().expect("a number");
    let models = memory["models"].as_array().expect("a list");
    let shares = models.iter().map(|model| number(&model["share_bytes"]));
    (shares.sum(), number(&memory["room_bytes"]))
}

/// The budget that holds one model of three and half another with all that they work well with.
fn one_and_a_half() -> u64 {
    let server = start_as(three(), |config| {
        config.service.engine.budget = Some(ByteLength::mebibytes(512));
    });
    let memory = get(server.address(), "/memory");
    let working = |name: &str| {
        told(server.address(), name)["working_bytes"]
            .as_u64()
            .expect("a number")
    };
    let base = memory["base_bytes"].as_u64().expect("a number");
    base + working("one") + working("two") / 2
}

#[test]
fn models_that_do_not_fit_together_take_turns_and_answer_as_if_alone() {
    let budget = one_and_a_half();
    let server = start_as(three(), |config| {
        config.service.engine.budget = Some(ByteLength::new(budget));
    });
    let (one, vector) = (
        ask(server.address(), "one"),
        embed(server.address(), "embed"),
    );
    thread::scope(|scope| {
        for client in 0..6 {
            let (address, one, vector) = (server.address(), &one, &vector);
            scope.spawn(move || {
                for turn in 0..4 {
                    match (client + turn) % 3 {
                        0 => assert_eq!(ask(address, "one")["choices"], one["choices"]),
                        1 => assert_eq!(ask(address, "two")["choices"], one["choices"]),
                        _ => assert_eq!(embed(address, "embed")["data"], vector["data"]),
                    }
                    let memory = get(address, "/memory");
                    let (taken, room) = taken(&memory);
                    assert!(taken <= room, "{memory}");
                }
            });
        }
    });
}

#[test]
fn a_budget_that_is_lowered_unloads_what_nobody_uses_and_one_that_holds_no_model_is_refused() {
    let server = start_as(three(), |config| {
        config.service.engine.budget = Some(ByteLength::mebibytes(512));
    });
    for name in ["one", "two"] {
        ask(server.address(), name);
    }
    embed(server.address(), "embed");
    let memory = get(server.address(), "/memory");
    let number = |value: &Value| value.as_u64().expect("a number");
    let base = number(&memory["base_bytes"]);
    let least = number(&told(server.address(), "one")["least_bytes"]);
    let body = json!({"budget_bytes": base + least});
    let small = json!({"budget_bytes": 1 << 20});
    let refused = post(server.address(), "/memory", &small);
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (400, &json!("budget_bytes"))
    );
    posted(server.address(), "/memory", &body);
    // What was used longest ago goes first, until the rest fits.
    wait_for(server.address(), ["unloaded", "unloaded", "loaded"]);
    let memory = get(server.address(), "/memory");
    assert_eq!(memory["budget_bytes"], body["budget_bytes"]);
    embed(server.address(), "embed");
}

#[test]
fn a_request_that_is_too_large_for_its_models_share_has_idle_models_give_way() {
    let server = start_as(three(), |config| {
        config.service.engine.budget = Some(ByteLength::mebibytes(512));
    });
    let address = server.address();
    let number = |value: &Value| value.as_u64().expect("a number");
    let working = number(&told(address, "one")["working_bytes"]);
    drop(server);
    let server = start_as(three(), |config| {
        let held = ByteLength::mebibytes(2);
        config.service.engine.request_memory = Some(held);
        // Both, and the program.
        let budget = held.get() + (6 << 20) + 2 * working + (1 << 20);
        config.service.engine.budget = Some(ByteLength::new(budget));
    });
    let address = server.address();
    ask(address, "two");
    let first = ask(address, "one");
    assert_eq!(states(address), ["loaded", "loaded", "unloaded"]);
    let share = |name: &str| number(&told(address, name)["share_bytes"]);
    assert_eq!([share("one"), share("two")], [working; 2]);
    // Replies side by side, each with rows of its own.
    let several = |choices: usize, tokens: usize| {
        let body = json!({
            "model": "one", "prompt": "Ownership", "n": choices, "max_tokens": tokens, "temperature": 0,
        });
        post(address, COMPLETION, &body)
    };
    let response = several(16, 90);
    assert_eq!(response.status, 200, "{response:?}");
    assert!(share("one") > working && share("two") < working);
    let refused = several(32, 500);
    let code = refused.json()["error"]["code"].clone();
    assert_eq!(
        (refused.status, code),
        (400, "budget_exceeded".into()),
        "{refused:?}"
    );
    assert_eq!(ask(address, "two")["choices"], first["choices"]);
}

/// A streamed reply that has begun.
fn begin(address: SocketAddr, tokens: usize) -> std::net::TcpStream {
    let body = json!({
        "model": "one", "prompt": "Ownership", "max_tokens": tokens, "ignore_eos": true, "stream": true, "temperature": 0,
    });
    let mut stream = connect_to(address);
    let bytes = request("POST", COMPLETION, &[], body.to_string().as_bytes());
    stream.write_all(&bytes).expect("sent");
    stream
        .read_exact(&mut [0; 200])
        .expect("a reply that begins");
    stream
}

fn rest(mut stream: std::net::TcpStream) -> String {
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the rest of it");
    rest
}

#[test]
fn a_reply_under_way_may_end_before_its_model_is_unloaded_unless_that_takes_too_long() {
    for (grace, whole) in [(Duration::from_secs(60), true), (Duration::ZERO, false)] {
        let server = start_as(three(), |config| config.grace = grace);
        let reply = begin(server.address(), 120);
        posted(server.address(), "/models/unload", &json!({"model": "one"}));
        if whole {
            let state = told(server.address(), "one")["state"].clone();
            assert!(state == "unloading" || state == "unloaded", "{state}");
        }
        // Who comes now has it loaded again, after that.
        let later = ask(server.address(), "one");
        let rest = rest(reply);
        assert_eq!(rest.contains("[DONE]"), whole, "{rest}");
        assert_eq!(rest.contains("\"model_unloaded\""), !whole, "{rest}");
        assert_eq!(later["model"], "one");
        let one = told(server.address(), "one");
        assert_eq!(
            (&one["loads"], &one["unloads"]),
            (&json!(2), &json!(1)),
            "{one}"
        );
    }
}

#[test]
fn a_server_that_ends_lets_replies_finish_and_loads_nothing_more() {
    let server = start();
    let address = server.address();
    let reply = begin(server.address(), 60);
    let ended = thread::spawn(move || server.shutdown());
    let rest = rest(reply);
    assert!(rest.contains("[DONE]"), "{rest}");
    ended.join().expect("it ends");
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn of_several_keys_the_first_says_what_is_loaded() {
    let server = start_as(three(), |config| {
        config.keys = ApiKeys::new(["first-key", "second-key"]).expect("keys");
    });
    for (path, body) in [
        ("/models/load", json!({"model": "embed"})),
        ("/models/unload", json!({"model": "embed"})),
        ("/memory", json!({"budget_bytes": 1_u64 << 40})),
    ] {
        for (key, status) in [("second-key", 403), ("first-key", 200)] {
            let header = ("authorization", &*format!("Bearer {key}"));
            let bytes = request("POST", path, &[header], body.to_string().as_bytes());
            assert_eq!(
                sent(server.address(), &bytes).status,
                status,
                "{path} {key}"
            );
        }
    }
}

#[test]
fn what_a_model_takes_is_told_before_it_is_loaded() {
    let mut models = three();
    for (name, file) in [
        ("folder", "vision/gemma3/hf"),
        ("file", "vision/gemma3/model.gguf"),
    ] {
        models.push(entry(name, ModelPath::Path(reference(file))));
    }
    let server = start_as(models, |_| {});
    let told = get(server.address(), "/v1/models");
    let input = |name: &str| {
        let models = told["data"].as_array().expect("a list");
        let found = models.iter().find(|model| model["id"] == name);
        found.expect("one of them")["architecture"]["input_modalities"].clone()
    };
    assert_eq!(input("one"), json!(["text"]));
    assert_eq!(input("embed"), Value::Null);
    for name in ["folder", "file"] {
        assert_eq!(input(name), json!(["text", "image"]), "{name}");
        let shown = posted(server.address(), "/api/show", &json!({"model": name}));
        assert_eq!(shown["capabilities"][2], "vision", "{shown}");
    }
    assert!(
        states(server.address())
            .iter()
            .all(|state| state == "unloaded")
    );
}
