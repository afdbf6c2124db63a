//! Replies that must conform.

use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETION, assert_nothing_held, post, posted, question, start, start_with,
};

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    })
}

fn check_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("JSON: {text}"));
    let fields: Vec<&String> = value.as_object().expect("an object").keys().collect();
    assert_eq!(fields, ["name", "age", "tags"]);
    assert!(
        value["name"]
            .as_str()
            .is_some_and(|name| name.chars().count() <= 12)
    );
    assert!(
        value["age"].as_u64().is_some_and(|age| age <= 150),
        "{value}"
    );
    let tags = value["tags"].as_array().expect("a list");
    assert!(tags.len() <= 3 && tags.iter().all(|tag| tag == "red" || tag == "green"));
}

#[test]
fn a_reply_conforms_to_its_schema_whole_streamed_and_in_every_choice() {
    let server = start();
    let format = json!({"type": "json_schema", "json_schema": {"name": "p", "schema": person(), "strict": true}});
    let fields = json!({"response_format": format, "max_tokens": 200, "temperature": 1.0, "n": 3, "seed": 3});
    let reply = posted(&server, CHAT, &question(fields.clone()));
    for choice in reply["choices"].as_array().expect("choices") {
        check_person(choice["message"]["content"].as_str().expect("text"));
        assert_eq!(choice["finish_reason"], "stop");
    }
    let mut streamed = question(fields);
    streamed["stream"] = json!(true);
    let mut texts = vec![String::new(); 3];
    for event in post(&server, CHAT, &streamed).events() {
        let choice = &event["choices"][0];
        let index = choice["index"].as_u64().expect("an index") as usize;
        texts[index] += choice["delta"]["content"].as_str().unwrap_or("");
    }
    for (text, choice) in texts
        .iter()
        .zip(reply["choices"].as_array().expect("choices"))
    {
        assert_eq!(choice["message"]["content"], *text);
    }
    assert_nothing_held(&server);
}

#[test]
fn any_object_is_an_object() {
    let server = start();
    let body = json!({
        "prompt": "An object:", "max_tokens": 300, "temperature": 0,
        "response_format": {"type": "json_object"},
    });
    let choice = &posted(&server, COMPLETION, &body)["choices"][0];
    let text = choice["text"].as_str().expect("text");
    assert!(text.starts_with('{'), "{text}");
    if choice["finish_reason"] == "stop" {
        serde_json::from_str::<serde_json::Map<String, Value>>(text).expect("an object");
    }
}

fn tools() -> Value {
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}});
    let city = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": false,
    });
    json!([tool("weather", city.clone()), tool("time", city)])
}

fn check_call(call: &Value, name: Option<&str>) {
    assert_eq!(call["type"], "function");
    assert!(
        call["id"]
            .as_str()
            .is_some_and(|id| id.starts_with("call-"))
    );
    let called = call["function"]["name"].as_str().expect("a name");
    assert!(
        name.map_or(called == "weather" || called == "time", |name| name
            == called)
    );
    let arguments = call["function"]["arguments"].as_str().expect("JSON text");
    let arguments: Value = serde_json::from_str(arguments).expect("JSON");
    assert!(
        arguments["city"] == "Paris" || arguments["city"] == "Rome",
        "{arguments}"
    );
}

#[test]
fn a_required_call_is_made_and_its_arguments_conform() {
    let server = start();
    for (choice, name) in [
        (json!("required"), None),
        (
            json!({"type": "function", "function": {"name": "time"}}),
            Some("time"),
        ),
    ] {
        let fields = json!({"tools": tools(), "tool_choice": choice, "max_tokens": 100});
        let reply = posted(&server, CHAT, &question(fields.clone()));
        let whole = &reply["choices"][0];
        assert_eq!(whole["finish_reason"], "tool_calls", "{reply}");
        assert_eq!(whole["message"]["content"], Value::Null);
        let calls = whole["message"]["tool_calls"].as_array().expect("calls");
        assert_eq!(calls.len(), 1);
        check_call(&calls[0], name);

        let mut streamed = question(fields);
        streamed["stream"] = json!(true);
        let events = post(&server, CHAT, &streamed).events();
        let deltas: Vec<&Value> = events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"].get("tool_calls"))
            .collect();
        assert_eq!(deltas.len(), 1);
        assert_eq!(deltas[0][0]["index"], 0);
        assert_eq!(deltas[0][0]["function"], calls[0]["function"]);
        let last = events.last().expect("events");
        assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
    }
    assert_nothing_held(&server);
}

#[test]
fn tools_that_are_not_called_leave_the_reply_as_it_is() {
    let server = start();
    let plain = posted(&server, CHAT, &question(json!({})));
    for choice in ["auto", "none"] {
        let fields = json!({"tools": tools(), "tool_choice": choice});
        let reply = posted(&server, CHAT, &question(fields));
        assert_eq!(reply["choices"], plain["choices"]);
    }
}

#[test]
fn results_of_calls_are_part_of_the_conversation() {
    let server = start();
    let messages = json!([
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Paris\"}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": "And tomorrow?"},
    ]);
    let reply = posted(
        &server,
        CHAT,
        &question(json!({"messages": messages, "tools": tools()})),
    );
    assert_eq!(reply["choices"][0]["message"]["role"], "assistant");
}

#[test]
fn schema_keywords_that_cannot_be_followed_are_named_or_in_strict_mode_refused() {
    let schema = json!({
        "type": "object",
        "properties": {
            "x": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": true},
            "y": {"type": "string", "maxLength": 4, "format": "postcode"},
        },
        "required": ["x", "y"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "p", "schema": schema}});
    let at = "response_format.json_schema.schema.properties";
    let server = start();
    for stream in [false, true] {
        let fields = json!({"response_format": format, "max_tokens": 100, "stream": stream});
        let response = post(&server, CHAT, &question(fields));
        assert_eq!(response.status, 200, "{response:?}");
        assert_eq!(
            response.header("x-lacuna-ignored"),
            Some(format!("{at}.x.uniqueItems,{at}.y.format").as_str())
        );
    }
    let plain = post(&server, CHAT, &question(json!({})));
    assert_eq!(plain.header("x-lacuna-ignored"), None);

    let strict = start_with(|config| config.strict_fields = true);
    let fields = json!({"response_format": format, "max_tokens": 100});
    let refused = post(&strict, CHAT, &question(fields));
    assert_eq!(refused.status, 400, "{refused:?}");
    assert_eq!(
        refused.json()["error"]["param"],
        format!("{at}.x.uniqueItems")
    );
}
