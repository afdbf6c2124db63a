//! The interface of Ollama over the one model there is.

use lacuna_server::Server;
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETION, assert_nothing_held, get, post, posted, start, start_spoken,
};

const OLLAMA_CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

/// A greedy question, with `more` fields.
fn question(more: Value) -> Value {
    let mut body = json!({
        "model": "demo",
        "messages": [{"role": "user", "content": "What is ownership?"}],
        "options": {"temperature": 0, "num_predict": 24},
    });
    let (Value::Object(fields), Value::Object(more)) = (&mut body, more) else {
        panic!("objects");
    };
    fields.extend(more);
    body
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])
}

/// A whole reply, of which the lines of the streamed one have been seen to be the parts.
fn reply(server: &Server, path: &str, mut body: Value) -> Value {
    let reply = post(server, path, &body);
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    let lines = reply
        .body
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let lines: Vec<Value> = lines.collect();
    body["stream"] = json!(false);
    let whole = posted(server, path, &body);
    let (last, parts) = lines.split_last().expect("a line");
    assert!(parts.iter().all(|line| line["done"] == false));
    assert_eq!(
        (&last["done"], &whole["done"]),
        (&json!(true), &json!(true))
    );
    let text = |line: &Value, field: &str| {
        let text = line["message"].get(field).or(line.get(field));
        text.and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    for field in ["content", "response", "thinking"] {
        let joined: String = parts.iter().map(|line| text(line, field)).collect();
        assert_eq!(joined, text(&whole, field), "{field}");
    }
    for field in ["model", "done_reason", "prompt_eval_count", "eval_count"] {
        assert_eq!(last[field], whole[field], "{field}");
    }
    for field in [
        "total_duration",
        "load_duration",
        "prompt_eval_duration",
        "eval_duration",
    ] {
        assert!(last[field].is_u64() && whole[field].is_u64(), "{field}");
    }
    for line in [last, &whole] {
        let nanoseconds = |field: &str| line[field].as_u64().expect("a number");
        assert!(
            nanoseconds("prompt_eval_duration") + nanoseconds("eval_duration")
                <= nanoseconds("total_duration"),
            "{line}"
        );
    }
    whole
}

#[test]
fn a_chat_is_the_same_streamed_and_whole_and_as_openais() {
    let server = start();
    let whole = reply(&server, OLLAMA_CHAT, question(json!({})));
    let chat = json!({"messages": [{"role": "user", "content": "What is ownership?"}],
        "temperature": 0, "max_tokens": 24});
    let chat = posted(&server, CHAT, &chat);
    assert_eq!(
        whole["message"]["content"],
        chat["choices"][0]["message"]["content"]
    );
    assert_eq!(whole["prompt_eval_count"], chat["usage"]["prompt_tokens"]);
    assert_eq!(
        (&whole["eval_count"], &whole["done_reason"]),
        (&json!(24), &json!("length"))
    );
    let content = whole["message"]["content"].as_str().expect("text");
    let stop = content.split(' ').nth(2).expect("a third word");
    // No limit, in both of the ways in which Ollama has it.
    for num_predict in [-1, 0] {
        let options =
            json!({"temperature": 0, "num_predict": num_predict, "stop": [stop], "num_ctx": 512});
        let stopped = reply(
            &server,
            OLLAMA_CHAT,
            question(json!({"options": options, "model": "demo:latest"})),
        );
        assert_eq!(stopped["done_reason"], "stop");
        let before = stopped["message"]["content"].as_str().expect("text");
        assert!(content.starts_with(before) && !before.contains(stop));
    }
    assert_nothing_held(&server);
}

#[test]
fn the_time_of_a_prompt_is_told_at_the_end_of_a_stream_too() {
    let server = start();
    let options = json!({"temperature": 0, "num_predict": 1});
    let asked = json!({"model": "demo", "prompt": "What is ownership? ".repeat(20), "raw": true, "options": options});
    let reply = post(&server, GENERATE, &asked);
    let last = reply.body.lines().last().expect("a line");
    let last: Value = serde_json::from_str(last).expect("JSON");
    // No processor computes so many tokens in so little time. It was taken from when events were read once, and those
    // of a short prompt are read together.
    let nanoseconds = last["prompt_eval_duration"].as_u64();
    assert!(nanoseconds > Some(20_000), "{last}");
    // One token is the first and the last, and no time to divide by would be no number.
    assert_eq!(last["eval_duration"], 1, "{last}");
}

#[test]
fn a_prompt_is_a_question_or_raw_text() {
    let server = start();
    let options = json!({"temperature": 0, "num_predict": 16});
    let asked = json!({"model": "demo", "prompt": "What is ownership?", "system": "Be brief.", "options": options});
    let whole = reply(&server, GENERATE, asked);
    let turns = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is ownership?"}]);
    let chat = reply(
        &server,
        OLLAMA_CHAT,
        question(json!({"messages": turns, "options": options})),
    );
    assert_eq!(whole["response"], chat["message"]["content"]);
    let raw =
        json!({"model": "demo", "prompt": "# Ownership\n\n", "raw": true, "options": options});
    let raw = reply(&server, GENERATE, raw);
    let completion = json!({"prompt": "# Ownership\n\n", "temperature": 0, "max_tokens": 16});
    let completion = posted(&server, COMPLETION, &completion);
    assert_eq!(raw["response"], completion["choices"][0]["text"]);
    // Without a prompt it is asked that the model be loaded.
    for body in [
        json!({"model": "demo"}),
        json!({"model": "demo", "keep_alive": "5m", "prompt": ""}),
    ] {
        let loaded = posted(&server, GENERATE, &body);
        assert_eq!(
            (&loaded["done"], &loaded["done_reason"]),
            (&json!(true), &json!("load"))
        );
    }
    let loaded = posted(
        &server,
        OLLAMA_CHAT,
        &json!({"model": "demo", "messages": []}),
    );
    assert_eq!(
        (&loaded["message"]["content"], &loaded["done_reason"]),
        (&json!(""), &json!("load"))
    );
}

#[test]
fn thoughts_come_apart_and_can_be_turned_off() {
    let server = start_spoken("thinking.gguf");
    for think in [json!(true), json!("high"), Value::Null] {
        let whole = reply(&server, OLLAMA_CHAT, question(json!({"think": think})));
        assert_eq!(whole["message"]["thinking"], "Simple sum.");
        assert_eq!(whole["message"]["content"], "It is 4.");
    }
    let off = reply(&server, OLLAMA_CHAT, question(json!({"think": false})));
    assert_eq!(off["message"].get("thinking"), None);
    let shown = posted(&server, "/api/show", &json!({"model": "demo"}));
    assert_eq!(
        shown["capabilities"],
        json!(["completion", "tools", "thinking"])
    );
}

#[test]
fn a_tool_is_called_and_its_result_told() {
    let server = start_spoken("harmony.gguf");
    let options = json!({"temperature": 0, "num_predict": 60});
    let whole = posted(
        &server,
        OLLAMA_CHAT,
        &question(json!({"tools": tools(), "options": options, "stream": false})),
    );
    let calls = whole["message"]["tool_calls"].as_array().expect("calls");
    assert_eq!(calls.len(), 1);
    let expected = json!({"name": "weather", "arguments": {"city": "Rome"}});
    assert_eq!(calls[0]["function"], expected);
    let streamed = post(
        &server,
        OLLAMA_CHAT,
        &question(json!({"tools": tools(), "options": options})),
    );
    let lines = streamed
        .body
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let called: Vec<Value> = lines
        .filter_map(|line| line["message"].get("tool_calls").cloned())
        .collect();
    assert_eq!(called.len(), 1);
    assert_eq!(called[0][0]["function"], expected);
    let turns = json!([
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": expected}]},
        {"role": "tool", "tool_name": "weather", "content": "Rain."},
    ]);
    let more = json!({"messages": turns, "tools": tools(), "stream": false});
    let told = posted(&server, OLLAMA_CHAT, &question(more));
    assert!(told["prompt_eval_count"].as_u64() > whole["prompt_eval_count"].as_u64());
}

#[test]
fn a_reply_of_a_format_is_one() {
    let server = start();
    let schema = json!({"type": "object", "properties": {"a": {"const": "b"}},
        "required": ["a"], "additionalProperties": false});
    let whole = reply(&server, OLLAMA_CHAT, question(json!({"format": schema})));
    assert_eq!(whole["message"]["content"], "{\"a\": \"b\"}");
    let options = json!({"temperature": 0, "num_predict": 200, "seed": 3});
    let json = posted(
        &server,
        GENERATE,
        &json!({"model": "demo", "prompt": "x", "format": "json", "options": options, "stream": false}),
    );
    assert!(
        json["response"]
            .as_str()
            .is_some_and(|text| text.starts_with('{')),
        "{json}"
    );
}

#[test]
fn what_is_told_of_the_model_is_so() {
    let server = start();
    assert!(get(&server, "/api/version").json()["version"].is_string());
    let mut digests = Vec::new();
    for path in ["/api/tags", "/api/ps"] {
        let models = get(&server, path).json()["models"].clone();
        let [model] = models.as_array().expect("a list").as_slice() else {
            panic!("one model: {models}");
        };
        assert_eq!(
            (&model["name"], &model["model"]),
            (&json!("demo"), &json!("demo"))
        );
        assert_eq!(model["details"]["format"], "gguf");
        assert!(model["size"].as_u64() > Some(1 << 20));
        digests.push(model["digest"].as_str().expect("a digest").to_owned());
    }
    // The command-line client of Ollama shows twelve digits of it without looking whether there are any.
    let is_digit = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    assert!(
        digests[0].len() == 64 && digests[0].bytes().all(is_digit) && digests[0] == digests[1],
        "{digests:?}"
    );
    let shown = posted(&server, "/api/show", &json!({"name": "demo:latest"}));
    let family = shown["model_info"]["general.architecture"]
        .as_str()
        .expect("text");
    assert_eq!(
        shown["model_info"][format!("{family}.context_length")],
        server.engine().context_tokens()
    );
    assert!(
        shown["template"]
            .as_str()
            .is_some_and(|template| template.contains("messages"))
    );
}

#[test]
fn errors_are_a_text() {
    let server = start();
    let image = json!([{"role": "user", "content": "x", "images": ["eA=="]}]);
    for (path, body, status, says) in [
        (
            OLLAMA_CHAT,
            question(json!({"model": "other"})),
            404,
            "other",
        ),
        (OLLAMA_CHAT, question(json!({"model": null})), 400, "model"),
        (
            OLLAMA_CHAT,
            question(json!({"messages": image})),
            400,
            "text alone",
        ),
        (
            OLLAMA_CHAT,
            question(json!({"options": {"num_ctx": 1_000_000}})),
            400,
            "options.num_ctx",
        ),
        (
            OLLAMA_CHAT,
            question(json!({"options": {"temperature": 3}})),
            400,
            "`options.temperature`",
        ),
        (
            OLLAMA_CHAT,
            question(json!({"format": "xml"})),
            400,
            "format",
        ),
        (
            OLLAMA_CHAT,
            question(json!({"keep_alive": "soon"})),
            400,
            "keep_alive",
        ),
        (
            OLLAMA_CHAT,
            question(json!({"think": "deeply"})),
            400,
            "think",
        ),
        (
            GENERATE,
            json!({"model": "demo", "prompt": "a", "suffix": "b"}),
            400,
            "suffix",
        ),
        (
            GENERATE,
            json!({"model": "demo", "prompt": "a", "context": [1]}),
            400,
            "context",
        ),
        ("/api/show", json!({"model": "other"}), 404, "other"),
        ("/api/pull", json!({"model": "demo"}), 404, "models"),
        (
            "/api/embed",
            json!({"model": "demo", "input": "x"}),
            404,
            "embeddings",
        ),
        ("/api/wherever", json!({}), 404, "/api/wherever"),
    ] {
        let reply = post(&server, path, &body);
        let error = reply.json()["error"].clone();
        assert_eq!(reply.status, status, "{path} {body}: {error}");
        assert!(
            error.as_str().is_some_and(|error| error.contains(says)),
            "{path} {body}: {error}"
        );
    }
    assert_eq!(get(&server, OLLAMA_CHAT).status, 405);
    // That the model be unloaded is asked in vain, and named.
    let unload = post(
        &server,
        GENERATE,
        &json!({"model": "demo", "keep_alive": 0}),
    );
    assert_eq!(
        (unload.status, unload.header("x-lacuna-ignored")),
        (200, Some("keep_alive"))
    );
    assert_nothing_held(&server);
}
