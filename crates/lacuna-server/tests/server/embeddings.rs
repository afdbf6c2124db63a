//! `POST /v1/embeddings` and `POST /v1/rerank`, on tiny encoders whose vocabulary is letters: a letter a token.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use lacuna_files::ModelFiles;
use lacuna_models::Model;
use lacuna_pages::ByteLength;
use lacuna_server::{ApiKeys, EmbeddingServer, ServerConfig, StartError};
use serde_json::{Value, json};

use crate::support::{self, Response, config, connect_to, read, request};

const DIMENSIONS: usize = 24;
const MOST_TOKENS: usize = 24;

fn encoder() -> Arc<Model> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
    let files = ModelFiles::open(&root.join("encoders/bert/mean.gguf")).expect("committed");
    Arc::new(Model::load(files).expect("a model"))
}

/// The folder of a model, with other files beside the model's own.
fn folder_with(name: &str, files: &[(&str, Value)]) -> tempfile::TempDir {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/encoders");
    let copy = tempfile::tempdir().expect("a scratch folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        let from = root.join(name).join("hf").join(file);
        std::fs::copy(from, copy.path().join(file)).expect("room to copy");
    }
    for (file, value) in files {
        std::fs::write(copy.path().join(file), value.to_string()).expect("room for it");
    }
    copy
}

fn start_folder(folder: &tempfile::TempDir) -> EmbeddingServer {
    let files = ModelFiles::open(folder.path()).expect("a folder");
    let model = Arc::new(Model::load(files).expect("a model"));
    EmbeddingServer::start(model, config()).expect("the server starts")
}

fn start_with(change: impl FnOnce(&mut ServerConfig)) -> EmbeddingServer {
    let mut config = ServerConfig {
        model_name: "tiny".to_owned(),
        ..config()
    };
    change(&mut config);
    EmbeddingServer::start(encoder(), config).expect("the server starts")
}

fn send(address: SocketAddr, request: &[u8]) -> Response {
    let mut stream = connect_to(address);
    stream.write_all(request).expect("sent");
    read(&mut stream)
}

fn post(address: SocketAddr, body: &Value) -> Response {
    let body = body.to_string();
    send(
        address,
        &request("POST", "/v1/embeddings", &[], body.as_bytes()),
    )
}

fn get(address: SocketAddr, path: &str) -> Response {
    send(address, &request("GET", path, &[], b""))
}

/// The embeddings of a successful reply, in the order of the texts.
fn embeddings(address: SocketAddr, body: &Value) -> (Vec<Value>, Value) {
    let response = post(address, body);
    assert_eq!(response.status, 200, "{body}: {response:?}");
    let reply = response.json();
    assert_eq!(
        (&reply["object"], &reply["model"]),
        (&json!("list"), &json!("tiny"))
    );
    let data = reply["data"].as_array().expect("a list");
    for (index, one) in data.iter().enumerate() {
        assert_eq!(
            (&one["object"], &one["index"]),
            (&json!("embedding"), &json!(index))
        );
    }
    let found = data.iter().map(|one| one["embedding"].clone()).collect();
    (found, reply["usage"].clone())
}

fn numbers(embedding: &Value) -> Vec<f32> {
    let elements = embedding.as_array().expect("a list").iter();
    elements
        .map(|element| element.as_f64().expect("a number") as f32)
        .collect()
}

#[test]
fn every_form_of_input_has_the_same_embeddings() {
    let server = start_with(|_| {});
    let (texts, usage) = embeddings(
        server.address(),
        &json!({"input": ["abcd", "x", "abcd"], "model": "tiny"}),
    );
    assert_eq!(texts[0], texts[2]);
    assert_ne!(texts[0], texts[1]);
    assert_eq!(numbers(&texts[0]).len(), DIMENSIONS);
    let length: f32 = numbers(&texts[0]).iter().map(|it| it * it).sum();
    assert!((length - 1.0).abs() < 1e-5);
    // `abcd` is one token of the vocabulary; two go around each text.
    assert_eq!(usage, json!({"prompt_tokens": 9, "total_tokens": 9}));
    let (alone, _) = embeddings(
        server.address(),
        &json!({"input": "abcd", "user": "someone"}),
    );
    assert_eq!(alone, texts[..1]);
    let tokenizer = server.model().tokenizer();
    let id = |name: &str| tokenizer.id(name).expect("a token");
    let tokens = [id("[CLS]"), id("abcd"), id("[SEP]")];
    let (given, usage) = embeddings(server.address(), &json!({"input": tokens}));
    assert_eq!(given, alone);
    assert_eq!(usage["prompt_tokens"], 3);
    let (lists, _) = embeddings(server.address(), &json!({"input": [tokens, tokens]}));
    assert_eq!(lists, [alone[0].clone(), alone[0].clone()]);
}

/// It was named as ignored, and so refused by a server that ignores nothing, though it says nothing to either.
#[test]
fn who_asks_is_no_field_that_is_ignored() {
    let server = start_with(|config| config.strict_fields = true);
    embeddings(server.address(), &json!({"input": "ab", "user": "someone"}));
    let server = start_with(|_| {});
    let response = post(server.address(), &json!({"input": "ab", "user": "someone"}));
    assert_eq!(response.header("x-lacuna-ignored"), None);
    let server = start_folder(&folder_with("bert-scores", &[]));
    let body = json!({"query": "a", "documents": ["b"], "user": "someone", "mood": 1});
    let response = rerank(server.address(), &body);
    assert_eq!(response.header("x-lacuna-ignored"), Some("mood"));
}

/// Ollama's own program asks at `/` before anything else, and went no further when there was nothing.
#[test]
fn whoever_asks_at_the_root_hears_that_the_server_is_there() {
    let keys = ApiKeys::new(["first-key"]).expect("a key");
    let server = start_with(|config| config.keys = keys);
    for method in ["HEAD", "GET"] {
        let response = send(server.address(), &request(method, "/", &[], b""));
        assert_eq!(response.status, 200, "{response:?}");
        assert_eq!(response.body.is_empty(), method == "HEAD");
        assert!(!response.body.contains("tiny"), "no key was sent");
    }
}

#[test]
fn base64_is_the_same_numbers_and_dimensions_cut_them() {
    use base64::Engine as _;
    let server = start_with(|_| {});
    let (float, _) = embeddings(server.address(), &json!({"input": "ab"}));
    let (coded, _) = embeddings(
        server.address(),
        &json!({"input": "ab", "encoding_format": "base64"}),
    );
    let coded = coded[0].as_str().expect("text");
    let bytes = base64::prelude::BASE64_STANDARD
        .decode(coded)
        .expect("base64");
    let (words, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    let decoded: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
    assert_eq!(decoded, numbers(&float[0]));
    let (cut, _) = embeddings(server.address(), &json!({"input": "ab", "dimensions": 5}));
    let cut = numbers(&cut[0]);
    let length: f32 = decoded[..5].iter().map(|it| it * it).sum::<f32>().sqrt();
    assert_eq!(cut.len(), 5);
    for (whole, cut) in decoded.iter().zip(&cut) {
        assert!((whole / length - cut).abs() < 1e-6);
    }
}

#[test]
fn what_cannot_be_embedded_is_refused_by_its_place() {
    let server = start_with(|_| {});
    let long = "a ".repeat(MOST_TOKENS);
    let many = vec!["a"; 2049];
    for (body, status, param) in [
        (json!({}), 400, json!("input")),
        (json!({"input": ""}), 400, json!("input[0]")),
        (json!({"input": []}), 400, json!("input")),
        (json!({"input": [[]]}), 400, json!("input[0]")),
        (json!({"input": ["a", ""]}), 400, json!("input[1]")),
        (json!({"input": ["a", long]}), 400, json!("input[1]")),
        (
            json!({"input": vec![5; MOST_TOKENS + 1]}),
            400,
            json!("input[0]"),
        ),
        (json!({"input": [64]}), 400, json!("input")),
        (json!({"input": [-1]}), 400, json!("input")),
        (json!({"input": 7}), 400, json!("input")),
        (json!({"input": many}), 400, json!("input")),
        (
            json!({"input": "a", "dimensions": 0}),
            400,
            json!("dimensions"),
        ),
        (
            json!({"input": "a", "dimensions": 25}),
            400,
            json!("dimensions"),
        ),
        (
            json!({"input": "a", "encoding_format": "int8"}),
            400,
            json!("encoding_format"),
        ),
        (json!({"input": "a", "model": "other"}), 404, json!("model")),
    ] {
        let response = post(server.address(), &body);
        assert_eq!(response.status, status, "{body}: {response:?}");
        assert_eq!(
            response.json()["error"]["param"],
            param,
            "{body}: {response:?}"
        );
    }
    let ignored = post(server.address(), &json!({"input": "a", "colour": 1}));
    assert_eq!(ignored.header("x-lacuna-ignored"), Some("colour"));
    let strict = start_with(|config| config.strict_fields = true);
    assert_eq!(
        post(strict.address(), &json!({"input": "a", "colour": 1})).status,
        400
    );
}

#[test]
fn a_request_that_comes_to_more_than_the_account_is_refused_and_leaves_nothing_held() {
    let server = start_with(|config| {
        config.service.engine.request_memory = Some(ByteLength::mebibytes(1));
    });
    // Their reply has more than a megabyte.
    let large = json!({"input": vec!["a"; 2000]});
    for _ in 0..8 {
        let response = post(server.address(), &large);
        assert_eq!(response.status, 413, "{response:?}");
        embeddings(server.address(), &json!({"input": "a"}));
    }
}

#[test]
fn requests_at_once_have_what_each_has_alone() {
    let server = start_with(|_| {});
    let bodies: Vec<Value> = (1..9)
        .map(|count| json!({"input": vec!["abcd ab x"; 12 * count]}))
        .collect();
    let alone = embeddings(server.address(), &json!({"input": "abcd ab x"})).0;
    std::thread::scope(|scope| {
        for body in &bodies {
            let (address, alone) = (server.address(), &alone);
            scope.spawn(move || {
                let (found, _) = embeddings(address, body);
                assert!(found.iter().all(|one| *one == alone[0]));
            });
        }
    });
}

#[test]
fn it_says_what_it_is_and_keeps_others_out() {
    let server = start_with(|_| {});
    let models = get(server.address(), "/v1/models").json();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["max_model_len"], MOST_TOKENS);
    assert_eq!(get(server.address(), "/v1/models/tiny").status, 200);
    assert_eq!(get(server.address(), "/v1/models/other").status, 404);
    for path in ["/health", "/ready"] {
        assert_eq!(get(server.address(), path).status, 200, "{path}");
    }
    let body = json!({"messages": []}).to_string();
    let chat = send(
        server.address(),
        &request("POST", support::CHAT, &[], body.as_bytes()),
    );
    assert_eq!(
        (chat.status, &chat.json()["error"]["code"]),
        (404, &json!("not_supported"))
    );
    assert_eq!(get(server.address(), "/v1/embeddings").status, 405);
    let keyed = start_with(|config| {
        config.keys = ApiKeys::new(Some("a-secret-key")).expect("a key");
    });
    assert_eq!(post(keyed.address(), &json!({"input": "a"})).status, 401);
    assert_eq!(get(keyed.address(), "/ready").status, 200);
    keyed.shutdown();
}

#[test]
fn a_budget_that_does_not_hold_the_model_is_refused() {
    let mut config = config();
    config.service.engine.budget = Some(ByteLength::mebibytes(1));
    let refused = EmbeddingServer::start(encoder(), config).expect_err("too small");
    assert!(matches!(refused, StartError::Engine(_)), "{refused}");
    assert!(refused.to_string().contains("budget"), "{refused}");
}

#[test]
fn prompts_go_in_front_by_name_and_long_texts_are_cut_if_asked() {
    let prompts = json!({"prompts": {"query": "abcd ", "document": ""}});
    let folder = folder_with("bert", &[("config_sentence_transformers.json", prompts)]);
    let server = start_folder(&folder);
    let data = |body: Value| {
        let response = post(server.address(), &body);
        assert_eq!(response.status, 200, "{response:?}");
        response.json()["data"].clone()
    };
    let written = data(json!({"input": ["abcd x", "x"]}));
    assert_eq!(
        data(json!({"input": "x", "prompt_name": "query"}))[0]["embedding"],
        written[0]["embedding"]
    );
    assert_eq!(
        data(json!({"input": "x", "prompt_name": "document"}))[0]["embedding"],
        written[1]["embedding"]
    );
    let refused = post(
        server.address(),
        &json!({"input": "x", "prompt_name": "passage"}),
    );
    assert_eq!(refused.status, 400);
    let error = &refused.json()["error"];
    assert_eq!(error["param"], "prompt_name");
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|it| it.contains("document, query")),
        "{error}"
    );
    let long = "a ".repeat(MOST_TOKENS);
    let short = "a ".repeat(MOST_TOKENS - 2);
    let cut = data(json!({"input": [long, short], "truncate": true}));
    assert_eq!(cut[0]["embedding"], cut[1]["embedding"]);
    assert_eq!(
        post(server.address(), &json!({"input": long, "truncate": false})).status,
        400
    );
    let tokens =
        data(json!({"input": [vec![5; MOST_TOKENS + 1], vec![5; MOST_TOKENS]], "truncate": true}));
    assert_eq!(tokens[0]["embedding"], tokens[1]["embedding"]);
}

/// A reply in Ollama's interface.
fn ask(address: SocketAddr, path: &str, body: &Value) -> Response {
    let body = body.to_string();
    send(address, &request("POST", path, &[], body.as_bytes()))
}

#[test]
fn ollamas_interface_has_the_same_embeddings() {
    let server = start_with(|_| ());
    let address = server.address();
    let texts = ["abc", "hello", "abc"];
    let (expected, usage) = embeddings(address, &json!({"input": texts}));
    let expected: Vec<_> = expected.iter().map(numbers).collect();

    let response = ask(
        address,
        "/api/embed",
        &json!({"model": "tiny", "input": texts}),
    );
    let reply = response.json();
    assert_eq!(response.status, 200, "{reply}");
    let found = reply["embeddings"].as_array().expect("a list").iter();
    assert_eq!(found.map(numbers).collect::<Vec<_>>(), expected);
    assert_eq!(reply["model"], "tiny");
    assert_eq!(reply["prompt_eval_count"], usage["prompt_tokens"]);
    assert!(
        reply["total_duration"]
            .as_u64()
            .is_some_and(|total| total > 0)
    );

    // One text, by the name with its tag, and fewer elements.
    let body =
        json!({"model": "tiny:latest", "input": "hello", "dimensions": 4, "keep_alive": "5m"});
    let reply = ask(address, "/api/embed", &body).json();
    let cut = numbers(&reply["embeddings"][0]);
    assert_eq!((cut.len(), &reply["model"]), (4, &json!("tiny:latest")));
    let length: f32 = cut.iter().map(|element| element * element).sum();
    assert!((length - 1.0).abs() < 1e-5, "{length}");

    // As it was asked before.
    let reply = ask(
        address,
        "/api/embeddings",
        &json!({"model": "tiny", "prompt": "hello"}),
    )
    .json();
    assert_eq!(numbers(&reply["embedding"]), expected[1]);

    // Without texts, to have the model loaded, which it is.
    for body in [
        json!({"model": "tiny"}),
        json!({"model": "tiny", "input": ""}),
        json!({"model": "tiny", "input": []}),
    ] {
        let response = ask(address, "/api/embed", &body);
        assert_eq!(
            (response.status, &response.json()["embeddings"]),
            (200, &json!([])),
            "{body}"
        );
    }
    let reply = ask(
        address,
        "/api/embeddings",
        &json!({"model": "tiny", "prompt": ""}),
    )
    .json();
    assert_eq!(reply, json!({"embedding": []}));
}

#[test]
fn ollamas_interface_cuts_long_texts_unless_told_not_to() {
    let server = start_with(|_| ());
    let address = server.address();
    let long = "a".repeat(2 * MOST_TOKENS);
    let (expected, _) = embeddings(address, &json!({"input": long, "truncate": true}));
    let reply = ask(
        address,
        "/api/embed",
        &json!({"model": "tiny", "input": long}),
    )
    .json();
    assert_eq!(numbers(&reply["embeddings"][0]), numbers(&expected[0]));
    assert_eq!(reply["prompt_eval_count"], MOST_TOKENS);

    let body = json!({"model": "tiny", "input": ["a", long], "truncate": false});
    let response = ask(address, "/api/embed", &body);
    let reply = response.json();
    let message = reply["error"].as_str().expect("Ollama's form of errors");
    assert!(
        response.status == 400 && message.contains("input[1]"),
        "{reply}"
    );

    for (body, part) in [
        (json!({"input": "a"}), "model"),
        (json!({"model": "other", "input": "a"}), "other"),
        (json!({"model": "tiny", "input": [1, 2]}), "input"),
        (
            json!({"model": "tiny", "input": "a", "dimensions": 0}),
            "dimensions",
        ),
        (
            json!({"model": "tiny", "input": "a", "keep_alive": "soon"}),
            "keep_alive",
        ),
    ] {
        let response = ask(address, "/api/embed", &body);
        let reply = response.json();
        let message = reply["error"].as_str().expect("Ollama's form of errors");
        assert!(
            (400..=404).contains(&response.status) && message.contains(part),
            "{body}: {reply}"
        );
    }
}

#[test]
fn ollamas_clients_are_told_what_the_model_is_for() {
    let server = start_with(|_| ());
    let address = server.address();
    for path in ["/api/tags", "/api/ps"] {
        let reply = get(address, path).json();
        assert_eq!(reply["models"][0]["name"], "tiny", "{path}: {reply}");
        assert_eq!(reply["models"][0]["details"]["family"], "bert");
    }
    let reply = ask(address, "/api/show", &json!({"model": "tiny:latest"})).json();
    assert_eq!(reply["capabilities"], json!(["embedding"]));
    assert_eq!(reply["model_info"]["bert.context_length"], MOST_TOKENS);
    assert_eq!(
        ask(address, "/api/show", &json!({"model": "other"})).status,
        404
    );
}

fn rerank(address: SocketAddr, body: &Value) -> Response {
    let body = body.to_string();
    send(
        address,
        &request("POST", "/v1/rerank", &[], body.as_bytes()),
    )
}

#[test]
fn documents_are_sorted_by_how_well_they_answer() {
    let folder = folder_with("bert-scores", &[]);
    let server = start_folder(&folder);
    let documents: Vec<String> = ["a", "x y z", "abcd", "q.", "zzz", "a"]
        .map(str::to_owned)
        .into();
    let body = |more: Value| {
        let mut body = json!({"query": "ab!", "documents": documents});
        body.as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("one").clone());
        body
    };
    let response = rerank(server.address(), &body(json!({})));
    assert_eq!(response.status, 200, "{response:?}");
    let reply = response.json();
    let results = reply["results"].as_array().expect("a list").clone();
    assert_eq!(results.len(), documents.len());
    let score = |result: &Value| result["relevance_score"].as_f64().expect("a number");
    assert!(
        results.is_sorted_by(|a, b| score(a) >= score(b)),
        "{results:?}"
    );
    assert!(
        results
            .iter()
            .all(|it| (0.0..=1.0).contains(&score(it)) && it.get("document").is_none())
    );
    let of = |index: usize| {
        results
            .iter()
            .find(|it| it["index"] == index)
            .expect("there")
            .clone()
    };
    assert_eq!(score(&of(0)), score(&of(5)), "the same text");
    assert_ne!(score(&of(0)), score(&of(1)));
    // Alone, a document has the score that it has among others.
    let alone = rerank(
        server.address(),
        &json!({"query": "ab!", "documents": [{"text": "x y z"}]}),
    );
    assert_eq!(score(&alone.json()["results"][0]), score(&of(1)));
    let best = rerank(
        server.address(),
        &body(json!({"top_n": 2, "return_documents": true})),
    );
    let best = best.json()["results"].as_array().expect("a list").clone();
    assert_eq!(best.len(), 2);
    for (best, all) in best.iter().zip(&results) {
        let index = all["index"].as_u64().expect("a number") as usize;
        assert_eq!(best["index"], all["index"]);
        assert_eq!(best["document"]["text"], documents[index].as_str());
    }
    // Query and document have a token each, and three go around and between them.
    assert_eq!(
        reply["usage"]["total_tokens"],
        reply["usage"]["prompt_tokens"]
    );
    assert_eq!(alone.json()["usage"]["total_tokens"], 2 + 3 + 3);
    for path in ["/v2/rerank", "/rerank"] {
        let text = body(json!({})).to_string();
        let other = send(
            server.address(),
            &request("POST", path, &[], text.as_bytes()),
        );
        assert_eq!(other.json()["results"], reply["results"], "{path}");
    }
}

#[test]
fn what_cannot_be_scored_is_refused_by_its_place() {
    let folder = folder_with("bert-scores", &[]);
    let server = start_folder(&folder);
    let long = "a ".repeat(MOST_TOKENS);
    for (body, param) in [
        (json!({"query": "a"}), json!("documents")),
        (json!({"documents": ["a"]}), json!("query")),
        (json!({"query": "", "documents": ["a"]}), json!("query")),
        (json!({"query": "a", "documents": []}), json!("documents")),
        (
            json!({"query": "a", "documents": vec!["a"; 2049]}),
            json!("documents"),
        ),
        (
            json!({"query": "a", "documents": ["a", ""]}),
            json!("documents[1]"),
        ),
        (
            json!({"query": "a", "documents": ["a", long]}),
            json!("documents[1]"),
        ),
        (
            json!({"query": long, "documents": ["a"], "truncate": true}),
            json!("query"),
        ),
        (
            json!({"query": "a", "documents": [7]}),
            json!("documents[0]"),
        ),
        (
            json!({"query": "a", "documents": ["a"], "top_n": 0}),
            json!("top_n"),
        ),
    ] {
        let response = rerank(server.address(), &body);
        assert_eq!(response.status, 400, "{body}: {response:?}");
        assert_eq!(
            response.json()["error"]["param"],
            param,
            "{body}: {response:?}"
        );
    }
    let cut = rerank(
        server.address(),
        &json!({"query": "a", "documents": [long], "truncate": true}),
    );
    assert_eq!(cut.status, 200);
    assert_eq!(cut.json()["usage"]["total_tokens"], MOST_TOKENS);
}

#[test]
fn each_kind_of_model_says_what_it_is_not_for() {
    let folder = folder_with("bert-scores", &[]);
    let (scores, embeds) = (start_folder(&folder), start_with(|_| {}));
    for (server, path, named) in [
        (&scores, "/v1/embeddings", "/v1/rerank"),
        (&scores, support::CHAT, "/v1/rerank"),
        (&embeds, "/v1/rerank", "/v1/embeddings"),
        (&embeds, support::CHAT, "/v1/embeddings"),
    ] {
        let body = json!({"input": "a", "query": "a", "documents": ["a"]}).to_string();
        let response = send(
            server.address(),
            &request("POST", path, &[], body.as_bytes()),
        );
        let error = &response.json()["error"];
        assert_eq!(
            (response.status, &error["code"]),
            (404, &json!("not_supported")),
            "{path}"
        );
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|it| it.contains(named)),
            "{error}"
        );
    }
}
