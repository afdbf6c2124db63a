//! Thoughts, answers and calls of models that write them in formats of their own.

use lacuna_server::Server;
use serde_json::{Value, json};

use crate::support::{CHAT, COMPLETION, assert_nothing_held, post, posted, question, start_spoken};

const HARMONY: &str = "harmony.gguf";
const THINKING: &str = "thinking.gguf";

/// What both models think and say; with tools, the first calls one instead.
const THOUGHT: &str = "Simple sum.";
const ANSWER: &str = "It is 4.";

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])
}

/// A schema that one text conforms to.
fn format() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "one", "schema": {
        "type": "object", "properties": {"a": {"const": "b"}}, "required": ["a"], "additionalProperties": false}}})
}

/// A reply's only choice, of which the streamed one has been seen to be the same.
fn choice(server: &Server, fields: Value) -> Value {
    let mut body = question(fields);
    body["max_tokens"] = json!(60);
    let reply = posted(server, CHAT, &body);
    let whole = reply["choices"][0].clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let events = post(server, CHAT, &body).events();
    let delta = |field: &str| -> String {
        let deltas = events
            .iter()
            .map(|event| &event["choices"][0]["delta"][field]);
        deltas.filter_map(Value::as_str).collect()
    };
    let text = |field: &str| whole["message"][field].as_str().unwrap_or_default();
    assert_eq!(delta("reasoning_content"), text("reasoning_content"));
    assert_eq!(delta("content"), text("content"));
    let calls: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .map(|call| &call["function"])
        .collect();
    let expected = whole["message"]["tool_calls"].as_array();
    let expected = expected.map_or(&[][..], Vec::as_slice).iter();
    assert_eq!(
        calls,
        expected.map(|call| &call["function"]).collect::<Vec<_>>()
    );
    let [.., last, figures] = events.as_slice() else {
        panic!("events");
    };
    assert_eq!(last["choices"][0]["finish_reason"], whole["finish_reason"]);
    for tokens in [
        "completion_tokens",
        "prompt_tokens",
        "completion_tokens_details",
    ] {
        assert_eq!(figures["usage"][tokens], reply["usage"][tokens]);
    }
    whole
}

fn assert_said(choice: &Value, thought: Option<&str>, said: &str) {
    let message = &choice["message"];
    assert_eq!(message["content"], said, "{choice}");
    assert_eq!(message["reasoning_content"].as_str(), thought, "{choice}");
    assert_eq!(message.get("tool_calls"), None, "{choice}");
}

#[test]
fn thoughts_are_told_from_answers() {
    for (name, tokens) in [(HARMONY, 14), (THINKING, 7)] {
        let server = start_spoken(name);
        let whole = choice(&server, json!({}));
        assert_said(&whole, Some(THOUGHT), ANSWER);
        assert_eq!(whole["finish_reason"], "stop");
        let usage = posted(&server, CHAT, &question(json!({})))["usage"].clone();
        assert_eq!(usage["completion_tokens"], tokens, "{name}");
        let details = &usage["completion_tokens_details"];
        assert_eq!(details["reasoning_tokens"], 3, "{name}");
        let silent = choice(&server, json!({"include_reasoning": false}));
        assert_said(&silent, None, ANSWER);
        assert_nothing_held(&server);
    }
}

#[test]
fn a_reply_that_is_cut_short_has_what_there_is_of_it() {
    let server = start_spoken(HARMONY);
    for (tokens, thought, said) in [
        (1, None, ""),
        (2, None, ""),
        (4, Some("Simple"), ""),
        (8, Some(THOUGHT), ""),
        (11, Some(THOUGHT), ""),
        (13, Some(THOUGHT), "It is"),
    ] {
        let body = question(json!({"max_tokens": tokens}));
        let reply = posted(&server, CHAT, &body);
        assert_said(&reply["choices"][0], thought, said);
        assert_eq!(reply["choices"][0]["finish_reason"], "length");
    }
}

#[test]
fn stop_strings_are_not_looked_for_in_markup() {
    let server = start_spoken(HARMONY);
    for stop in ["<", "|", "channel", "sum.<|end|>", "\u{FDD0}"] {
        assert_said(
            &choice(&server, json!({"stop": stop})),
            Some(THOUGHT),
            ANSWER,
        );
    }
    let stopped = choice(&server, json!({"stop": " 4"}));
    assert_said(&stopped, Some(THOUGHT), "It is");
}

#[test]
fn the_markup_comes_as_it_is_if_special_tokens_are_asked_for() {
    let server = start_spoken(HARMONY);
    let whole = choice(&server, json!({"skip_special_tokens": false}));
    let markup = "<|channel|>analysis<|message|>Simple sum.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.";
    assert_said(&whole, None, markup);
    let completion = json!({"prompt": "t", "max_tokens": 14, "temperature": 0});
    let reply = posted(&server, COMPLETION, &completion);
    let text = "analysisSimple sum.assistantfinalIt is 4.";
    assert_eq!(
        reply["choices"][0]["text"], text,
        "completions are left alone"
    );
}

#[test]
fn a_message_to_a_function_is_a_call() {
    let server = start_spoken(HARMONY);
    for tool_choice in [
        json!("auto"),
        json!("required"),
        json!({"type": "function", "function": {"name": "weather"}}),
    ] {
        let fields = json!({"tools": tools(), "tool_choice": tool_choice});
        let whole = choice(&server, fields);
        assert_eq!(whole["finish_reason"], "tool_calls", "{whole}");
        let message = &whole["message"];
        assert_eq!(message["content"], Value::Null);
        assert_eq!(message["reasoning_content"], THOUGHT);
        let calls = message["tool_calls"].as_array().expect("calls");
        assert_eq!(calls.len(), 1);
        let expected = json!({"name": "weather", "arguments": "{\"city\": \"Rome\"}"});
        assert_eq!(calls[0]["function"], expected);
    }
    // The tools are in the prompt, but none may be called.
    let fields = json!({"tools": tools(), "tool_choice": "none"});
    assert_said(&choice(&server, fields), Some(THOUGHT), ANSWER);
    assert_nothing_held(&server);
}

#[test]
fn arguments_conform_even_where_the_model_would_write_others() {
    let server = start_spoken(HARMONY);
    let mut tools = tools();
    let city = json!({"enum": ["Paris", "Vienna"]});
    tools[0]["function"]["parameters"]["properties"]["city"] = city;
    for tool_choice in ["auto", "required"] {
        let fields = json!({"tools": tools, "tool_choice": tool_choice});
        let whole = choice(&server, fields);
        let call = &whole["message"]["tool_calls"][0]["function"];
        let arguments = call["arguments"].as_str().expect("text");
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        let city = arguments["city"].as_str();
        assert!(city == Some("Paris") || city == Some("Vienna"), "{whole}");
        assert_eq!(whole["message"]["reasoning_content"], THOUGHT);
    }
}

#[test]
fn an_answer_conforms_after_a_free_thought() {
    for (name, fields) in [
        (HARMONY, json!({})),
        (
            THINKING,
            json!({"chat_template_kwargs": {"begin_thought": true}}),
        ),
    ] {
        let server = start_spoken(name);
        let mut fields = fields;
        fields["response_format"] = format();
        let whole = choice(&server, fields);
        assert_said(&whole, Some(THOUGHT), "{\"a\": \"b\"}");
        assert_eq!(whole["finish_reason"], "stop");
    }
}

#[test]
fn a_thought_may_begin_in_the_prompt_or_be_left_out_by_it() {
    let server = start_spoken(THINKING);
    let begun = json!({"chat_template_kwargs": {"begin_thought": true}});
    assert_said(&choice(&server, begun), Some(THOUGHT), ANSWER);
    let none = json!({"reasoning_effort": "none"});
    assert_said(&choice(&server, none), None, "\n\nIt is 4.");
    // What the request says about the template itself counts.
    let both =
        json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}});
    assert_said(&choice(&server, both), Some(THOUGHT), ANSWER);
}

/// The prompt of a chat.
fn prompt_tokens(server: &Server, fields: Value) -> u64 {
    let reply = posted(server, CHAT, &question(fields));
    reply["usage"]["prompt_tokens"].as_u64().expect("a number")
}

#[test]
fn the_effort_reaches_the_template() {
    let server = start_spoken(HARMONY);
    // The vocabulary has a token for each letter.
    let medium = prompt_tokens(&server, json!({}));
    for (effort, letters) in [
        ("none", 3),
        ("minimal", 3),
        ("low", 3),
        ("medium", 6),
        ("high", 4),
        ("xhigh", 4),
        ("max", 4),
    ] {
        let tokens = prompt_tokens(&server, json!({"reasoning_effort": effort}));
        assert_eq!(tokens + 6, medium + letters, "{effort}");
    }
    let kwargs =
        json!({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "extreme"}});
    assert_eq!(prompt_tokens(&server, kwargs), medium + 1);
}

#[test]
fn thoughts_go_back_where_the_template_writes_them() {
    let server = start_spoken(HARMONY);
    let tokens = |messages: Value| prompt_tokens(&server, json!({"messages": messages}));
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "weather", "arguments": "{}"}});
    let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "sunny"});
    let ask = json!({"role": "user", "content": "Weather?"});
    let called = json!({"role": "assistant", "content": null, "tool_calls": [call("1")]});
    let without = tokens(json!([ask, called, result("1")]));
    let header = "assistantanalysis".len() as u64 + 4;
    for field in ["reasoning_content", "reasoning"] {
        let mut thought = called.clone();
        thought[field] = json!("Hm.");
        assert_eq!(
            tokens(json!([ask, thought, result("1")])),
            without + header + 3
        );
        // With a text beside the call, which the template would refuse.
        thought["content"] = json!("So.");
        assert_eq!(
            tokens(json!([ask, thought, result("1")])),
            without + header + 3 + 2 + 3
        );
        // After an answer nobody thinks of it any more.
        let answer = json!({"role": "assistant", "content": "Sunny."});
        let later = |called: &Value| tokens(json!([ask, called, result("1"), answer, ask]));
        assert_eq!(later(&thought), later(&called));
    }
}

#[test]
fn several_system_messages_are_one_for_a_template_that_has_one_place() {
    let server = start_spoken(HARMONY);
    let tokens = |messages: Value| {
        let reply = posted(&server, "/tokenize", &json!({"messages": messages}));
        reply["tokens"].clone()
    };
    let user = json!({"role": "user", "content": "Hi"});
    let apart = tokens(json!([
        {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}, user]));
    let together = tokens(json!([{"role": "system", "content": "Be brief.\n\nBe kind."}, user]));
    assert_eq!(apart, together);
}

#[test]
fn several_calls_of_one_message_go_back_one_after_another() {
    let server = start_spoken(HARMONY);
    let call = |id: &str, city: &str| {
        json!({"id": id, "type": "function", "function": {
        "name": "weather", "arguments": json!({"city": city}).to_string()}})
    };
    let result =
        |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    let ask = json!({"role": "user", "content": "Weather?"});
    let called = |calls: Value| json!({"role": "assistant", "content": "", "tool_calls": calls});
    let tokens = |messages: Value| {
        let reply = posted(&server, "/tokenize", &json!({"messages": messages}));
        reply["tokens"].clone()
    };
    let together = tokens(json!([
        ask,
        called(json!([call("1", "Rome"), call("2", "Paris")])),
        result("2", "wet"),
        result("1", "dry"),
    ]));
    let apart = tokens(json!([
        ask,
        called(json!([call("1", "Rome")])),
        result("1", "dry"),
        called(json!([call("2", "Paris")])),
        result("2", "wet"),
    ]));
    assert_eq!(together, apart);
}
