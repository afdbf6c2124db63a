//! The interface of Anthropic: what its clients send and what they are told.

use lacuna_server::{ApiKeys, Server};
use serde_json::{Value, json};

use crate::support::{
    assert_nothing_held, get, post, posted, raw, request, start, start_spoken, start_with, until,
};

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

/// A greedy question, with `more` fields.
fn question(more: Value) -> Value {
    let mut body = json!({
        "model": "demo",
        "messages": [{"role": "user", "content": "What is ownership?"}],
        "temperature": 0,
        "max_tokens": 24,
    });
    let (Value::Object(fields), Value::Object(more)) = (&mut body, more) else {
        panic!("objects");
    };
    fields.extend(more);
    body
}

/// A model that thinks "Simple sum." and says "It is 4.".
fn sum(more: Value) -> Value {
    let mut body = question(more);
    body["model"] = json!("demo");
    body["max_tokens"] = json!(2000);
    body
}

fn tools() -> Value {
    json!([{"name": "weather", "description": "Weather.", "cache_control": {"type": "ephemeral"}, "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}])
}

/// The message that a stream's events make, as the official client puts it together; blocks come one
/// after another, each begun and ended.
fn assembled(events: &[Value]) -> Value {
    let mut events = events.iter();
    let first = events.next().expect("an event");
    assert_eq!(first["type"], "message_start");
    let mut message = first["message"].clone();
    let mut open = None;
    let mut json = String::new();
    let mut stopped = false;
    for event in events {
        let index = event["index"].as_u64();
        match event["type"].as_str().expect("a type") {
            "ping" => {}
            "content_block_start" => {
                let blocks = message["content"].as_array_mut().expect("a list");
                assert_eq!((open, index), (None, Some(blocks.len() as u64)));
                blocks.push(event["content_block"].clone());
                open = index;
            }
            "content_block_delta" => {
                assert_eq!(open, index);
                let block = &mut message["content"][index.expect("an index") as usize];
                let delta = &event["delta"];
                for field in ["text", "thinking", "signature"] {
                    if let Some(more) = delta[field].as_str() {
                        let so_far = block[field].as_str().expect("it was begun");
                        block[field] = json!(format!("{so_far}{more}"));
                    }
                }
                json += delta["partial_json"].as_str().unwrap_or_default();
            }
            "content_block_stop" => {
                assert_eq!(open.take(), index);
                let block = &mut message["content"][index.expect("an index") as usize];
                if block["type"] == "tool_use" {
                    let input = serde_json::from_str(&json);
                    block["input"] = input.expect("the input is whole");
                    json.clear();
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => stopped = true,
            other => panic!("{other}"),
        }
    }
    assert!(stopped);
    message
}

/// A whole message, of which the streamed one has been seen to be the same.
fn message(server: &Server, mut body: Value) -> Value {
    let whole = posted(server, MESSAGES, &body);
    body["stream"] = json!(true);
    let response = post(server, MESSAGES, &body);
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    let streamed = assembled(&response.named_events());
    let calls = |message: &Value| message["content"].clone();
    assert_eq!(without_ids(calls(&streamed)), without_ids(calls(&whole)));
    for field in ["role", "type", "model", "stop_reason", "stop_sequence"] {
        assert_eq!(streamed[field], whole[field], "{field}");
    }
    for tokens in ["output_tokens", "cache_creation_input_tokens"] {
        assert_eq!(streamed["usage"][tokens], whole["usage"][tokens]);
    }
    assert_eq!(prompt_tokens(&streamed), prompt_tokens(&whole));
    whole
}

fn without_ids(mut blocks: Value) -> Value {
    for block in blocks.as_array_mut().expect("a list") {
        block.as_object_mut().expect("an object").remove("id");
    }
    blocks
}

fn prompt_tokens(message: &Value) -> u64 {
    let usage = &message["usage"];
    let tokens = |field: &str| usage[field].as_u64().expect("a number");
    tokens("input_tokens") + tokens("cache_read_input_tokens")
}

fn counted(server: &Server, mut body: Value) -> u64 {
    body.as_object_mut()
        .expect("an object")
        .remove("max_tokens");
    let counted = posted(server, COUNT, &body);
    counted["input_tokens"].as_u64().expect("a number")
}

#[test]
fn a_message_is_the_same_streamed_and_whole_and_as_the_chat_of_openai() {
    let server = start();
    let whole = message(&server, question(json!({})));
    assert_eq!(whole["type"], "message");
    assert_eq!(whole["stop_reason"], "max_tokens");
    assert_eq!(whole["usage"]["output_tokens"], 24);
    let chat = posted(&server, "/v1/chat/completions", &question(json!({})));
    let text = &chat["choices"][0]["message"]["content"];
    assert_eq!(
        whole["content"],
        json!([{"type": "text", "text": text.clone()}])
    );
    assert_eq!(prompt_tokens(&whole), chat["usage"]["prompt_tokens"]);
    let words: Vec<&str> = text.as_str().expect("text").split(' ').collect();
    let stop = words[2];
    let stopped = message(&server, question(json!({"stop_sequences": [stop]})));
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], stop);
    assert_nothing_held(&server);
}

#[test]
fn the_prompt_is_counted_as_it_is_computed() {
    let server = start();
    let long = "word ".repeat(300);
    for more in [
        json!({}),
        json!({"system": "Be brief."}),
        json!({"system": [{"type": "text", "text": "Be brief."}], "tools": tools()}),
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]}),
    ] {
        let body = question(more);
        let reply = posted(&server, MESSAGES, &body);
        assert_eq!(counted(&server, body), prompt_tokens(&reply));
    }
    // One that no context holds is counted, too.
    let endless = json!({"messages": [{"role": "user", "content": "word ".repeat(9000)}]});
    assert!(counted(&server, question(endless.clone())) > 9000);
    assert_eq!(
        post(&server, MESSAGES, &question(endless)).status,
        400,
        "but not computed"
    );
}

#[test]
fn thoughts_are_blocks_of_their_own_where_they_are_asked_for() {
    let server = start_spoken("thinking.gguf");
    let on = json!({"type": "enabled", "budget_tokens": 1024});
    let whole = message(&server, sum(json!({"thinking": on})));
    let thought = json!({"type": "thinking", "thinking": "Simple sum.", "signature": "unsigned"});
    let said = json!({"type": "text", "text": "It is 4."});
    assert_eq!(whole["content"], json!([thought, said]));
    assert_eq!(whole["stop_reason"], "end_turn");
    let adaptive = json!({"thinking": {"type": "adaptive"}});
    let adaptive = message(&server, sum(adaptive));
    assert_eq!(adaptive["content"], whole["content"]);
    let omitted = json!({"thinking": {"type": "adaptive", "display": "omitted"}});
    let omitted = message(&server, sum(omitted));
    assert_eq!(omitted["content"], json!([said]));
    for off in [json!({}), json!({"thinking": {"type": "disabled"}})] {
        let off = message(&server, sum(off));
        assert_eq!(
            off["content"],
            json!([{"type": "text", "text": "\n\nIt is 4."}])
        );
    }
    // What was thought goes back with what was said.
    let turns = json!([
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": "And now?"},
    ]);
    posted(&server, MESSAGES, &sum(json!({"messages": turns})));
    let budget = json!({"thinking": {"type": "enabled", "budget_tokens": 1500}});
    let budget = post(&server, MESSAGES, &sum(budget));
    assert_eq!(budget.header("x-lacuna-ignored"), None);
    assert_eq!(
        budget.json()["content"],
        whole["content"],
        "it did not need them"
    );
}

#[test]
fn a_tool_is_used_and_its_result_told() {
    for name in ["", "harmony.gguf"] {
        let server = match name {
            "" => start(),
            spoken => start_spoken(spoken),
        };
        for choice in [
            json!({"type": "any"}),
            json!({"type": "tool", "name": "weather", "disable_parallel_tool_use": true}),
        ] {
            let more = json!({"tools": tools(), "tool_choice": choice, "max_tokens": 200});
            let whole = message(&server, question(more));
            assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
            let blocks = whole["content"].as_array().expect("a list");
            let used = blocks.last().expect("a block");
            assert_eq!(
                (&used["type"], &used["name"]),
                (&json!("tool_use"), &json!("weather"))
            );
            assert!(used["input"]["city"].is_string(), "{used}");
            let turns = json!([
                {"role": "user", "content": "What is the weather?"},
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": used["id"], "is_error": false,
                     "content": [{"type": "text", "text": "Rain."}]},
                    {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                ]},
            ]);
            let more =
                json!({"messages": turns, "tools": tools(), "tool_choice": {"type": "none"}});
            message(&server, question(more));
        }
        assert_nothing_held(&server);
    }
}

#[test]
fn tools_that_a_service_would_run_are_left_out_and_named() {
    let server = start();
    let mut offered = tools();
    let search = json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 5});
    offered.as_array_mut().expect("a list").insert(0, search);
    let body = question(json!({"tools": offered, "max_tokens": 4}));
    let response = post(&server, MESSAGES, &body);
    assert_eq!(response.status, 200, "{response:?}");
    let ignored = response.header("x-lacuna-ignored").expect("a header");
    assert!(
        ignored.split(',').any(|path| path == "tools[0]"),
        "{ignored}"
    );
    let with = counted(&server, question(json!({"tools": tools()})));
    assert_eq!(counted(&server, body), with, "the model is not told of it");
}

#[test]
fn a_reply_of_a_schema_is_one() {
    let server = start();
    let schema = json!({"type": "object", "properties": {"a": {"const": "b"}},
        "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": schema});
    for more in [
        json!({"output_config": {"format": format}}),
        json!({"output_format": format}),
    ] {
        let whole = message(&server, question(more));
        assert_eq!(whole["content"][0]["text"], "{\"a\": \"b\"}");
        assert_eq!(whole["stop_reason"], "end_turn");
    }
}

#[test]
fn what_is_told_to_the_service_alone_does_not_reach_the_prompt() {
    let server = start();
    let system = |paid: &str| {
        json!({"system": [
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=1; cch={paid};")},
            {"type": "text", "text": "You help. ".repeat(40)},
        ]})
    };
    let first = posted(&server, MESSAGES, &question(system("a1b2c")));
    let second = posted(&server, MESSAGES, &question(system("d3e4f")));
    assert_eq!(first["usage"]["cache_read_input_tokens"], 0);
    let read = second["usage"]["cache_read_input_tokens"].as_u64();
    assert!(
        read.expect("a number") * 10 >= prompt_tokens(&second) * 9,
        "{second}"
    );
}

#[test]
fn what_is_to_be_cached_is_pinned() {
    let server = start();
    let pinned = || server.engine().status().cache.pinned_groups;
    let long = "word ".repeat(200);
    let turn = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    let plain = json!({"type": "text", "text": long});
    posted(&server, MESSAGES, &question(turn(plain.clone())));
    assert_eq!(pinned(), 0);
    let mut kept = plain;
    kept["cache_control"] = json!({"type": "ephemeral"});
    posted(&server, MESSAGES, &question(turn(kept)));
    until("the prompt is pinned", || pinned() > 0);
}

#[test]
fn errors_have_the_form_of_the_interface() {
    let server = start();
    let image = json!({"type": "image", "source": {"type": "url", "url": "https://x"}});
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let ended = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    for (more, status, kind, says) in [
        (
            json!({"max_tokens": null}),
            400,
            "invalid_request_error",
            "`max_tokens`",
        ),
        (
            json!({"max_tokens": 0}),
            400,
            "invalid_request_error",
            "`max_tokens`",
        ),
        (
            json!({"messages": []}),
            400,
            "invalid_request_error",
            "`messages`",
        ),
        (ended, 400, "invalid_request_error", "`messages`"),
        (
            user(json!([image])),
            400,
            "invalid_request_error",
            "reads text alone",
        ),
        (
            user(json!([{"type": "text"}])),
            400,
            "invalid_request_error",
            "messages[0].content[0].text",
        ),
        (
            user(json!([{"type": "tool_use", "id": "1", "name": "x", "input": {}}])),
            400,
            "invalid_request_error",
            "messages[0].content[0]",
        ),
        (
            user(json!([{"type": "hologram"}])),
            400,
            "invalid_request_error",
            "hologram",
        ),
        (json!({"model": "other"}), 404, "not_found_error", "other"),
        (
            json!({"temperature": 3}),
            400,
            "invalid_request_error",
            "temperature",
        ),
        (
            json!({"tools": [{"name": "f"}]}),
            400,
            "invalid_request_error",
            "tools[0].input_schema",
        ),
        (
            json!({"tools": [{"name": "f f", "input_schema": {}}]}),
            400,
            "invalid_request_error",
            "{\"name\", \"input_schema\"}",
        ),
        (
            json!({"tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": false}, "required": ["a"]}}], "tool_choice": {"type": "any"}}),
            400,
            "invalid_request_error",
            "tools[0].input_schema",
        ),
        (
            json!({"tool_choice": {"type": "tool"}}),
            400,
            "invalid_request_error",
            "tool_choice.name",
        ),
        (
            json!({"thinking": {"type": "enabled"}}),
            400,
            "invalid_request_error",
            "thinking.budget_tokens",
        ),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
            400,
            "invalid_request_error",
            "thinking.budget_tokens",
        ),
        (
            json!({"stop_sequences": vec!["x"; 99]}),
            400,
            "invalid_request_error",
            "stop",
        ),
    ] {
        let response = post(&server, MESSAGES, &question(more.clone()));
        let body = response.json();
        assert_eq!(response.status, status, "{more}: {body}");
        assert_eq!(
            (&body["type"], &body["error"]["type"]),
            (&json!("error"), &json!(kind)),
            "{more}"
        );
        let message = body["error"]["message"].as_str().expect("a text");
        assert!(message.contains(says), "{more}: {message}");
    }
    // Paths that are clients' of OpenAI too, and those that nothing is at.
    let version = [("anthropic-version", "2023-06-01")];
    for (path, headers, is_ours) in [
        ("/v1/models/zzz", &version[..], true),
        ("/v1/models/zzz", &[], false),
        ("/v1/messages/batches", &version, true),
    ] {
        let response = raw(&server, &request("GET", path, headers, b""));
        let body = response.json();
        assert_eq!(response.status, 404, "{path}: {body}");
        assert_eq!(body["type"] == "error", is_ours, "{path}: {body}");
        assert_eq!(
            body["error"]["type"] == "not_found_error",
            is_ours,
            "{path}: {body}"
        );
    }
    for (method, path, status) in [("GET", MESSAGES, 405), ("POST", MESSAGES, 400)] {
        let response = raw(&server, &request(method, path, &[], b"not JSON"));
        assert_eq!(
            (response.status, &response.json()["type"]),
            (status, &json!("error"))
        );
    }
    let version = [("anthropic-version", "1999-01-01")];
    let body = question(json!({})).to_string();
    let response = raw(
        &server,
        &request("POST", MESSAGES, &version, body.as_bytes()),
    );
    assert_eq!(response.status, 400, "{response:?}");
    for version in ["2023-06-01", "2026-10-21"] {
        let version = [("anthropic-version", version)];
        let response = raw(
            &server,
            &request("POST", MESSAGES, &version, body.as_bytes()),
        );
        assert_eq!(response.status, 200, "{response:?}");
    }
    // Nobody else's errors have changed.
    assert_eq!(
        get(&server, "/nowhere").json()["error"]["code"],
        "not_found"
    );
    assert_nothing_held(&server);
}

#[test]
fn models_are_told_in_the_form_of_who_asks() {
    let server = start();
    let version = [("anthropic-version", "2026-10-21")];
    let asked = |path: &str, headers: &[(&str, &str)]| {
        raw(&server, &request("GET", path, headers, b"")).json()
    };
    let list = asked("/v1/models", &version);
    assert_eq!(
        (&list["has_more"], &list["last_id"]),
        (&json!(false), &json!("demo"))
    );
    assert_eq!(list["data"][0], asked("/v1/models/demo", &version));
    assert_eq!(list["data"][0]["type"], "model");
    assert_eq!(asked("/v1/models", &[])["object"], "list");
    assert_eq!(asked("/v1/models/demo", &[])["object"], "model");
}

#[test]
fn a_service_without_memory_is_overloaded() {
    let server = start_with(|config| {
        config.limits.memory_wait = std::time::Duration::from_millis(100);
    });
    let engine = server.engine();
    let memory = engine.request_memory();
    let all = usize::try_from(memory.limit().get()).expect("it fits");
    let others = memory.try_take(all).expect("nobody else is there");
    let response = post(&server, MESSAGES, &question(json!({})));
    assert_eq!(response.status, 529, "{response:?}");
    assert!(response.header("retry-after").is_some());
    assert_eq!(response.json()["error"]["type"], "overloaded_error");
    drop(others);
    posted(&server, MESSAGES, &question(json!({})));
}

#[test]
fn either_header_has_the_key() {
    let keys = ApiKeys::new(["first-key"]).expect("keys");
    let server = start_with(|config| config.keys = keys);
    let body = question(json!({"max_tokens": 1})).to_string();
    let asked = |headers: &[(&str, &str)]| {
        raw(
            &server,
            &request("POST", MESSAGES, headers, body.as_bytes()),
        )
    };
    assert_eq!(asked(&[("x-api-key", "first-key")]).status, 200);
    assert_eq!(asked(&[("authorization", "Bearer first-key")]).status, 200);
    let both = [
        ("authorization", "Bearer other"),
        ("x-api-key", "first-key"),
    ];
    assert_eq!(asked(&both).status, 200);
    for wrong in [&[][..], &[("x-api-key", "other")], &[("x-api-key", "")]] {
        let refused = asked(wrong);
        assert_eq!(refused.status, 401);
        assert_eq!(refused.json()["error"]["type"], "authentication_error");
    }
}
