//! What cannot be done is refused by name, and leaves nothing behind.

use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETION, assert_nothing_held, post, posted, question, raw, request, start, start_with,
};

/// Posts `body` and checks what is said about it.
fn refused(server: &lacuna_server::Server, path: &str, body: &Value, param: Option<&str>) {
    let response = post(server, path, body);
    let shown: String = body.to_string().chars().take(200).collect();
    assert_eq!(response.status, 400, "{shown}: {response:?}");
    let error = &response.json()["error"];
    assert_eq!(error["type"], "invalid_request_error", "{shown}: {error}");
    assert_eq!(error["param"].as_str(), param, "{shown}: {error}");
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|text| text.len() > 10),
        "{error}"
    );
    assert!(error["code"].is_string(), "{error}");
}

#[test]
fn a_body_that_is_no_json_object_is_refused() {
    let server = start();
    let bodies: [&[u8]; 8] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{\"messages\": [}",
        b"{\"messages\": \"\xff\xfe\"}",
        b"{\"max_tokens\": 1e999}",
        &[b"[".repeat(100_000), b"]".repeat(100_000)].concat(),
    ];
    for body in bodies {
        let response = raw(&server, &request("POST", CHAT, &[], body));
        assert_eq!(response.status, 400, "{response:?}");
        assert_eq!(
            response.json()["error"]["code"],
            "invalid_json",
            "{response:?}"
        );
    }
    assert_nothing_held(&server);
}

#[test]
fn fields_that_are_wrong_are_named() {
    let server = start();
    for (more, param) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hello"}), "messages"),
        (
            json!({"messages": [{"role": "user"}]}),
            "messages[0].content",
        ),
        (
            json!({"messages": [{"role": "king", "content": "x"}]}),
            "messages[0].role",
        ),
        (json!({"n": 0}), "n"),
        (json!({"n": -1}), "n"),
        (json!({"n": 1000}), "n"),
        (json!({"max_tokens": -5}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"top_p": 7}), "top_p"),
        (json!({"top_p": 1e300}), "top_p"),
        (json!({"min_p": -1}), "min_p"),
        (json!({"frequency_penalty": 3}), "frequency_penalty"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"seed": "x"}), "seed"),
        (json!({"seed": 1_u64 << 63}), "seed"),
        (json!({"stop": 5}), "stop"),
        (json!({"stream": "yes"}), "stream"),
        (
            json!({"stream_options": {"include_usage": true}}),
            "stream_options",
        ),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
        ),
        (json!({"logit_bias": {"5": 101}}), "logit_bias.5"),
        (json!({"logit_bias": {"999999999": 1}}), "logit_bias"),
        (json!({"stop_token_ids": [999_999_999]}), "stop_token_ids"),
        (json!({"min_tokens": 25}), "min_tokens"),
        (json!({"echo": true}), "echo"),
        (json!({"structural_tag": {"type": "tag"}}), "structural_tag"),
        (
            json!({"response_format": {"type": "xml"}}),
            "response_format.type",
        ),
        (json!({"tools": [{"type": "function"}]}), "tools[0]"),
        (json!({"tool_choice": "required"}), "tool_choice"),
    ] {
        refused(&server, CHAT, &question(more), Some(param));
    }
    for (path, field) in [
        (CHAT, "messages"),
        (COMPLETION, "prompt"),
        ("/detokenize", "tokens"),
        ("/memory", "budget_bytes"),
    ] {
        refused(&server, path, &json!({}), Some(field));
    }
    assert_nothing_held(&server);
    posted(&server, CHAT, &question(json!({})));
}

/// What reads a reply was made for every choice before the engine was asked whether it takes so many: a hundred million of
/// them ended the server, for want of memory, and more were a panic. Of both only the latter leaves this test to tell of it.
#[test]
fn choices_beyond_all_memory_are_refused_as_any_that_are_too_many() {
    let server = start();
    for choices in [33_u64, 1 << 60, u64::MAX] {
        let more = json!({"n": choices, "best_of": choices});
        refused(&server, CHAT, &question(more.clone()), Some("n"));
        let mut completion = json!({"prompt": "a", "max_tokens": 1});
        completion["n"] = more["n"].clone();
        refused(&server, COMPLETION, &completion, Some("n"));
        completion["prompt"] = json!(["a", "b"]);
        completion["stream"] = json!(true);
        refused(&server, COMPLETION, &completion, Some("n"));
    }
    assert_nothing_held(&server);
}

#[test]
fn prompts_that_cannot_be_continued_are_refused() {
    let server = start();
    let long = "word ".repeat(3000);
    for (prompt, param) in [
        (json!(""), "prompt"),
        (json!([]), "prompt"),
        (json!(["a", ""]), "prompt"),
        (json!([[1, 2], []]), "prompt"),
        (json!(vec!["a"; 129]), "prompt"),
        (json!([["a"]]), "prompt"),
        (json!([999_999_999]), "prompt"),
        (json!([-1]), "prompt"),
        (json!({"text": "a"}), "prompt"),
        (json!(long), "prompt"),
    ] {
        refused(&server, COMPLETION, &json!({"prompt": prompt}), Some(param));
    }
    let chat = json!({"messages": [{"role": "user", "content": long}]});
    refused(&server, CHAT, &chat, Some("messages"));
    assert_nothing_held(&server);
}

#[test]
fn tokens_that_are_none_are_refused() {
    let server = start();
    refused(
        &server,
        "/detokenize",
        &json!({"tokens": [4_000_000_000_u32]}),
        Some("tokens"),
    );
    refused(
        &server,
        "/detokenize",
        &json!({"tokens": "x"}),
        Some("tokens"),
    );
    refused(&server, "/tokenize", &json!({}), Some("prompt"));
}

#[test]
fn a_model_that_is_not_there_is_not_found() {
    let server = start();
    let response = post(&server, CHAT, &question(json!({"model": "gpt-9"})));
    assert_eq!(response.status, 404);
    assert_eq!(response.json()["error"]["code"], "model_not_found");
}

#[test]
fn schemas_that_nothing_conforms_to_are_refused() {
    let server = start();
    for schema in [
        json!(5),
        json!({"type": "nonsense"}),
        json!({"type": "object", "properties": {"a": false}, "required": ["a"]}),
        json!({"type": "string", "pattern": "("}),
        json!({"$ref": "http://elsewhere.example/schema.json"}),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let response = post(&server, CHAT, &question(json!({"response_format": format})));
        assert_eq!(response.status, 400, "{schema}: {response:?}");
    }
    assert_nothing_held(&server);
}

#[test]
fn a_request_beyond_the_budget_is_refused_and_others_go_on() {
    let server = start_with(|config| {
        config.service.engine.budget = Some(lacuna_pages::ByteLength::mebibytes(20));
        config.service.max_running = 64;
    });
    let response = post(
        &server,
        CHAT,
        &question(json!({"n": 64, "max_tokens": 900})),
    );
    assert!(
        response.status == 400 || response.status == 503,
        "{response:?}"
    );
    posted(&server, CHAT, &question(json!({})));
    assert_nothing_held(&server);
}
