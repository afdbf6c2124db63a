//! OpenAI's responses: whole and streamed, and conversations that are gone on with.

use lacuna_pages::ByteLength;
use lacuna_server::{ApiKeys, Server};
use serde_json::{Value, json};

use crate::support::{
    CHAT, assert_nothing_held, post, posted, raw, request, start, start_spoken, start_with,
};

const RESPONSES: &str = "/v1/responses";

/// A greedy question, with `more` fields, of which nothing is kept.
fn question(more: Value) -> Value {
    let mut body = json!({
        "model": "demo",
        "input": "What is ownership?",
        "temperature": 0,
        "max_output_tokens": 24,
        "store": false,
    });
    let (Value::Object(fields), Value::Object(more)) = (&mut body, more) else {
        panic!("objects");
    };
    fields.extend(more);
    body
}

fn tool() -> Value {
    json!({"type": "function", "name": "weather", "description": "Weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}})
}

/// The response that ends a stream, of which its events have been seen to be the parts.
fn assembled(events: &[Value]) -> Value {
    let mut items: Vec<Value> = Vec::new();
    let mut text = String::new();
    let mut name_of_call = None;
    let mut ended = None;
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
        assert!(ended.is_none(), "nothing follows the end");
        let name = event["type"].as_str().expect("a type");
        let part = |field: &str| event[field].as_str().expect("text").to_owned();
        match name.strip_prefix("response.").expect("about a response") {
            "created" | "in_progress" => {
                assert!(number < 2);
                assert_eq!(event["response"]["status"], "in_progress");
            }
            "output_item.added" => {
                assert_eq!(event["output_index"], items.len());
                text.clear();
            }
            "content_part.added" => assert_eq!(event["part"]["text"], ""),
            "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta" => {
                text += &part("delta");
            }
            "output_text.done" | "reasoning_text.done" => assert_eq!(part("text"), text),
            "function_call_arguments.done" => {
                assert_eq!(part("arguments"), text);
                name_of_call = Some(part("name"));
            }
            "content_part.done" => assert_eq!(event["part"]["text"], text.as_str()),
            "output_item.done" => {
                let called = event["item"]["name"].as_str().map(str::to_owned);
                assert_eq!(name_of_call.take(), called);
                items.push(event["item"].clone());
            }
            "completed" | "incomplete" => ended = Some(event["response"].clone()),
            other => panic!("{other}"),
        }
    }
    let ended = ended.expect("an end");
    assert_eq!(ended["output"], json!(items));
    ended
}

/// A whole response, of which the streamed one has been seen to be the same.
fn response(server: &Server, mut body: Value) -> Value {
    let whole = posted(server, RESPONSES, &body);
    body["stream"] = json!(true);
    let reply = post(server, RESPONSES, &body);
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    let streamed = assembled(&reply.named_events());
    assert_eq!(
        without_ids(&streamed["output"]),
        without_ids(&whole["output"])
    );
    for field in [
        "status",
        "incomplete_details",
        "tools",
        "instructions",
        "text",
        "store",
    ] {
        assert_eq!(streamed[field], whole[field], "{field}");
    }
    for tokens in ["input_tokens", "output_tokens", "total_tokens"] {
        assert_eq!(streamed["usage"][tokens], whole["usage"][tokens]);
    }
    whole
}

fn without_ids(items: &Value) -> Value {
    let mut items = items.clone();
    for item in items.as_array_mut().expect("a list") {
        let item = item.as_object_mut().expect("an object");
        item.remove("id");
        item.remove("call_id");
    }
    items
}

fn said(response: &Value) -> &str {
    let items = response["output"].as_array().expect("a list");
    let message = items.iter().find(|item| item["type"] == "message");
    let message = message.unwrap_or_else(|| panic!("a message: {response}"));
    message["content"][0]["text"].as_str().expect("text")
}

#[test]
fn a_response_is_the_same_streamed_and_whole_and_as_a_chat() {
    let server = start();
    let whole = response(&server, question(json!({"metadata": {"a": "b"}})));
    assert_eq!(
        (&whole["object"], &whole["status"]),
        (&json!("response"), &json!("incomplete"))
    );
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(whole["metadata"], json!({"a": "b"}));
    assert_eq!(whole["usage"]["output_tokens"], 24);
    let chat = json!({"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is ownership?"}], "temperature": 0, "max_tokens": 24});
    let chat = posted(&server, CHAT, &chat);
    let text = chat["choices"][0]["message"]["content"].as_str();
    for more in [
        json!({"instructions": "Be brief."}),
        json!({"input": [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user",
             "content": [{"type": "input_text", "text": "What is ownership?"}]}]}),
    ] {
        let whole = response(&server, question(more));
        assert_eq!(Some(said(&whole)), text);
        assert_eq!(
            whole["usage"]["input_tokens"],
            chat["usage"]["prompt_tokens"]
        );
    }
    assert_nothing_held(&server);
}

#[test]
fn a_conversation_goes_on_by_the_name_of_its_last_reply() {
    let server = start();
    let first = posted(&server, RESPONSES, &question(json!({"store": true})));
    assert_eq!(first["store"], true);
    let after = |previous: &Value| {
        question(json!({"previous_response_id": previous["id"], "store": null, "input": "Why?"}))
    };
    let second = posted(&server, RESPONSES, &after(&first));
    let spelled_out = json!({"input": [
        {"role": "user", "content": "What is ownership?"},
        first["output"][0],
        {"role": "user", "content": "Why?"}]});
    let spelled_out = posted(&server, RESPONSES, &question(spelled_out));
    assert_eq!(said(&second), said(&spelled_out));
    let tokens = |response: &Value| response["usage"]["input_tokens"].clone();
    assert_eq!(tokens(&second), tokens(&spelled_out));
    // A streamed reply is kept as well, and what was not to be kept is not.
    let mut body = after(&second);
    body["stream"] = json!(true);
    let third = assembled(&post(&server, RESPONSES, &body).named_events());
    assert!(tokens(&third).as_u64() > tokens(&second).as_u64());
    assert!(tokens(&posted(&server, RESPONSES, &after(&third))).as_u64() > tokens(&third).as_u64());
    for unknown in [spelled_out["id"].clone(), json!("resp-0")] {
        let refused = post(&server, RESPONSES, &after(&json!({"id": unknown})));
        assert_eq!(refused.status, 400, "{refused:?}");
        let error = &refused.json()["error"];
        assert_eq!(error["code"], "previous_response_not_found");
        assert_eq!(error["param"], "previous_response_id");
    }
}

#[test]
fn replies_that_are_kept_can_be_asked_for_and_deleted() {
    let server = start();
    let ask = |method: &str, id: &Value| {
        let path = format!("{RESPONSES}/{}", id.as_str().expect("a name"));
        raw(&server, &request(method, &path, &[], b""))
    };
    let whole = posted(&server, RESPONSES, &question(json!({"store": true})));
    let streamed = question(json!({"store": true, "stream": true}));
    let streamed = assembled(&post(&server, RESPONSES, &streamed).named_events());
    for reply in [&whole, &streamed] {
        let found = ask("GET", &reply["id"]);
        assert_eq!((found.status, &found.json()), (200, reply));
    }
    let found = ask("GET", &json!(format!("{}?stream=true", text(&whole["id"]))));
    assert_eq!(
        (found.status, &found.json()["error"]["param"]),
        (400, &json!("stream"))
    );
    let deleted = ask("DELETE", &whole["id"]).json();
    assert_eq!(
        deleted,
        json!({"id": whole["id"], "object": "response", "deleted": true})
    );
    for method in ["GET", "DELETE"] {
        let gone = ask(method, &whole["id"]);
        assert_eq!(
            (gone.status, &gone.json()["error"]["code"]),
            (404, &json!("response_not_found"))
        );
    }
    let after = question(json!({"previous_response_id": whole["id"]}));
    assert_eq!(post(&server, RESPONSES, &after).status, 400);
    assert_eq!(ask("GET", &streamed["id"]).status, 200);
    // What was not to be kept is not there.
    let unkept = posted(&server, RESPONSES, &question(json!({"store": false})));
    assert_eq!(ask("GET", &unkept["id"]).status, 404);
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

#[test]
fn nobody_goes_on_with_what_is_anothers() {
    let keys = ApiKeys::new(["first-key", "second-key"]).expect("keys");
    let server = start_with(|config| config.keys = keys);
    let asked = |key: &str, body: &Value| {
        let headers = [("authorization", key)];
        raw(
            &server,
            &request("POST", RESPONSES, &headers, body.to_string().as_bytes()),
        )
    };
    let first = asked("Bearer first-key", &question(json!({"store": true}))).json();
    let after = question(json!({"previous_response_id": first["id"]}));
    assert_eq!(asked("Bearer second-key", &after).status, 400);
    assert_eq!(asked("Bearer first-key", &after).status, 200);
    let path = format!("{RESPONSES}/{}", text(&first["id"]));
    for (method, key, status) in [
        ("GET", "second-key", 404),
        ("DELETE", "second-key", 404),
        ("GET", "first-key", 200),
        ("DELETE", "first-key", 200),
    ] {
        let key = format!("Bearer {key}");
        let asked = request(method, &path, &[("authorization", &key)], b"");
        assert_eq!(raw(&server, &asked).status, status, "{method} {key}");
    }
}

#[test]
fn what_is_kept_gives_way_to_whoever_needs_its_memory() {
    let server =
        start_with(|config| config.service.engine.request_memory = Some(ByteLength::new(8 << 20)));
    let engine = server.engine();
    let memory = engine.request_memory();
    let kept = || memory.status().held.get();
    let long = "word ".repeat(400);
    let mut most = 0;
    for _ in 0..40 {
        posted(
            &server,
            RESPONSES,
            &question(json!({"store": true, "input": long, "max_output_tokens": 1})),
        );
        crate::support::until("the request has ended", || {
            kept() <= memory.limit().get() / 8
        });
        most = most.max(kept());
    }
    assert!(most > 0, "something is kept");
    let free = usize::try_from(memory.limit().get() - kept()).expect("it fits");
    let others = memory.try_take(free).expect("it is free");
    // Nothing but what is kept could make room.
    let refused = post(
        &server,
        CHAT,
        &json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    );
    drop(others);
    assert!(kept() < most, "{refused:?}");
}

#[test]
fn thoughts_are_items_of_their_own() {
    let server = start_spoken("thinking.gguf");
    let whole = response(&server, question(json!({})));
    assert_eq!(whole["status"], "completed");
    let items = whole["output"].as_array().expect("a list");
    assert_eq!(items.len(), 2);
    assert_eq!(items[0]["type"], "reasoning");
    assert_eq!(
        items[0]["content"],
        json!([{"type": "reasoning_text", "text": "Simple sum."}])
    );
    assert_eq!(said(&whole), "It is 4.");
    assert_eq!(
        whole["usage"]["output_tokens_details"]["reasoning_tokens"],
        3
    );
    let none = response(&server, question(json!({"reasoning": {"effort": "none"}})));
    assert_eq!(none["output"].as_array().map(Vec::len), Some(1));
    assert_eq!(none["reasoning"]["effort"], "none");
    // Items of a reply go back as they came.
    let mut input = vec![json!({"role": "user", "content": "What?"})];
    input.extend(items.iter().cloned());
    input.push(json!({"role": "user", "content": "And now?"}));
    posted(&server, RESPONSES, &question(json!({"input": input})));
}

#[test]
fn a_function_is_called_and_its_output_told() {
    for name in ["", "harmony.gguf"] {
        let server = match name {
            "" => start(),
            spoken => start_spoken(spoken),
        };
        for choice in [
            json!("required"),
            json!({"type": "function", "name": "weather"}),
        ] {
            let more = json!({"tools": [tool()], "tool_choice": choice, "max_output_tokens": 200});
            let whole = response(&server, question(more));
            let items = whole["output"].as_array().expect("a list");
            let call = items.last().expect("an item");
            assert_eq!(
                (&call["type"], &call["name"]),
                (&json!("function_call"), &json!("weather"))
            );
            let arguments = call["arguments"].as_str().expect("text");
            let arguments: Value = serde_json::from_str(arguments).expect("JSON");
            assert!(arguments["city"].is_string());
            // It goes on with the call spelled out, and where the server remembers it.
            let more = json!({"tools": [tool()], "tool_choice": choice, "max_output_tokens": 200,
                "store": true, "input": "What is the weather?"});
            let kept = posted(&server, RESPONSES, &question(more));
            let items = kept["output"].as_array().expect("a list");
            let id = &items.last().expect("an item")["call_id"];
            let output = json!({"type": "function_call_output", "call_id": id, "output": "Rain."});
            let mut input = vec![json!({"role": "user", "content": "What is the weather?"})];
            input.extend(items.iter().cloned());
            input.push(output.clone());
            let more = json!({"input": input, "tools": [tool()]});
            let told = posted(&server, RESPONSES, &question(more));
            let tokens = |reply: &Value| reply["usage"]["input_tokens"].as_u64();
            assert!(tokens(&told) > tokens(&kept));
            let more =
                json!({"previous_response_id": kept["id"], "input": [output], "tools": [tool()]});
            let gone_on = posted(&server, RESPONSES, &question(more));
            assert_eq!(tokens(&gone_on), tokens(&told));
        }
    }
}

#[test]
fn what_the_service_would_run_is_left_out_and_named() {
    let server = start();
    let more = json!({
        "tools": [{"type": "web_search"}, tool(), {"type": "namespace", "name": "x", "tools": []}],
        "input": [{"type": "web_search_call", "id": "ws-1", "status": "completed"},
            {"role": "user", "content": "What is ownership?"}],
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x", "parallel_tool_calls": false,
    });
    let reply = post(&server, RESPONSES, &question(more));
    assert_eq!(reply.status, 200, "{reply:?}");
    let mut named: Vec<&str> = reply
        .header("x-lacuna-ignored")
        .expect("a header")
        .split(',')
        .collect();
    named.sort_unstable();
    assert_eq!(named, ["include", "input[0]", "tools[0]", "tools[2]"]);
}

#[test]
fn a_reply_of_a_schema_is_one() {
    let server = start();
    let schema = json!({"type": "object", "properties": {"a": {"const": "b"}},
        "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "one", "schema": schema, "strict": true});
    let whole = response(&server, question(json!({"text": {"format": format}})));
    assert_eq!(said(&whole), "{\"a\": \"b\"}");
    assert_eq!(
        (&whole["text"]["format"], &whole["status"]),
        (&format, &json!("completed"))
    );
}

#[test]
fn errors_name_fields_as_the_request_does() {
    let server = start();
    let image = json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]);
    for (more, status, param) in [
        (json!({"input": []}), 400, "input"),
        (json!({"input": 5}), 400, "input"),
        (
            json!({"input": image}),
            400,
            "input[0].content[0].image_url",
        ),
        (
            json!({"input": [{"type": "function_call", "name": "f"}]}),
            400,
            "input[0].arguments",
        ),
        (
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            400,
            "input[0]",
        ),
        (json!({"model": "other"}), 404, "model"),
        (json!({"max_output_tokens": 0}), 400, "max_output_tokens"),
        (json!({"temperature": 3}), 400, "temperature"),
        (json!({"background": true}), 400, "background"),
        (json!({"conversation": "x"}), 400, "conversation"),
        (json!({"tools": [5]}), 400, "tools[0]"),
        (
            json!({"tools": [{"type": "function", "name": "a b"}]}),
            400,
            "tools[0]",
        ),
        (json!({"tool_choice": {"type": "mcp"}}), 400, "tool_choice"),
        (
            json!({"tools": [{"type": "function", "name": "f", "parameters": {"type": "object",
            "properties": {"a": false}, "required": ["a"]}}], "tool_choice": "required"}),
            400,
            "tools[0].parameters.properties.a",
        ),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "x"}}}),
            400,
            "text.format.schema",
        ),
    ] {
        let reply = post(&server, RESPONSES, &question(more.clone()));
        let error = &reply.json()["error"];
        assert_eq!(reply.status, status, "{more}: {error}");
        assert_eq!(error["param"], param, "{more}: {error}");
        let message = error["message"].as_str().expect("text");
        assert!(
            !message.contains("response_format") && !message.contains("function\":"),
            "{message}"
        );
    }
    assert_nothing_held(&server);
}
