//! Every endpoint, used as it is meant to be.

use lacuna_engine::{Engine, EngineConfig, Generation, Limits, Sampling};
use lacuna_server::{Normalization, Server};
use lacuna_text::template::Message;
use serde_json::{Value, json};

use crate::streams::begun;
use crate::support::{
    CHAT, COMPLETION, assert_nothing_held, get, model, post, posted, question, start, start_with,
    until,
};

#[test]
fn a_chat_says_what_the_engine_says() {
    let server = start();
    let reply = posted(&server, CHAT, &question(json!({})));
    let mut engine = Engine::new(model(), &EngineConfig::default()).expect("an engine");
    let mut session = engine.session(Sampling::greedy()).expect("a session");
    let prompt = model()
        .prompt(&[Message::new("user", "What is ownership?")])
        .expect("a prompt");
    session.extend(&prompt);
    let limits = Limits {
        max_tokens: Some(24),
        ..Limits::default()
    };
    let mut generation = Generation::new(&mut engine, &mut session, limits).expect("starts");
    let mut text = String::new();
    while let Some(piece) = generation.next_piece().expect("a piece") {
        text += &piece;
    }
    assert_eq!(reply["object"], "chat.completion");
    assert_eq!(reply["model"], "demo");
    let choice = &reply["choices"][0];
    assert_eq!(
        choice["message"],
        json!({"role": "assistant", "content": text, "refusal": null})
    );
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(reply["usage"]["prompt_tokens"], prompt.len());
    assert_eq!(reply["usage"]["completion_tokens"], 24);
    assert_eq!(reply["usage"]["total_tokens"], prompt.len() + 24);
    assert_nothing_held(&server);
}

#[test]
fn the_second_of_two_equal_prompts_reuses_the_first() {
    let server = start();
    let long = "Ownership is a set of rules. ".repeat(20);
    let ask = || {
        posted(
            &server,
            COMPLETION,
            &json!({"prompt": long, "temperature": 0}),
        )
    };
    let (first, second) = (ask(), ask());
    let cached = "/usage/prompt_tokens_details/cached_tokens";
    assert_eq!(first.pointer(cached), Some(&json!(0)));
    let reused = second
        .pointer(cached)
        .and_then(Value::as_u64)
        .expect("a number");
    let prompt = second["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert!(
        reused * 2 > prompt && reused < prompt,
        "{reused} of {prompt}"
    );
    assert_eq!(first["choices"], second["choices"]);
    // Where reuse ended and why, beside each other.
    let miss = "/usage/prompt_tokens_details/cache_miss";
    assert_eq!(first.pointer(miss), Some(&json!("unseen")));
    let other = long.replacen(
        "rules. Ownership is a set of rules. O",
        "rules. But it is not. O",
        1,
    );
    let half = "Ownership is a set of rules. ".repeat(10);
    let other = format!("{half}{other}");
    let third = posted(&server, COMPLETION, &json!({"prompt": other}));
    assert_eq!(third.pointer(miss), Some(&json!("diverged")));
    let tokens = |text: &str| {
        let tokens = posted(&server, "/tokenize", &json!({"prompt": text}))["tokens"].take();
        serde_json::from_value::<Vec<u32>>(tokens).expect("numbers")
    };
    let (kept, asked) = (tokens(&long), tokens(&other));
    let same = kept.iter().zip(&asked).take_while(|(a, b)| a == b).count();
    let told = json!({"tokens": asked[same..same + 8]});
    let text = posted(&server, "/detokenize", &told)["prompt"].take();
    let difference = "/usage/prompt_tokens_details/cache_difference";
    assert_eq!(
        third.pointer(difference),
        Some(&json!({"at": same, "text": text}))
    );
    assert_eq!(
        second.pointer(difference),
        None,
        "the prompt is there to its end"
    );
    assert!(third.pointer(cached).and_then(Value::as_u64) > Some(0));
    assert_nothing_held(&server);
}

#[test]
fn prompts_that_differ_only_in_what_is_normalized_are_computed_once() {
    let turn = |date: &str, names: [&str; 2]| {
        let tools = names.map(|name| json!({"type": "function", "function": {"name": name}}));
        let system = format!(
            "Be brief.\nCurrent date: {date}\n{}",
            "You help. ".repeat(20)
        );
        let messages = [
            json!({"role": "system", "content": system}),
            json!({"role": "user", "content": "What is ownership?"}),
        ];
        question(json!({"messages": messages, "tools": tools, "tool_choice": "none"}))
    };
    let turns = [
        turn("2026-11-24", ["read", "write"]),
        turn("1999-01-01", ["write", "read"]),
    ];
    let second = |server: &Server| {
        let [_, second] = turns.each_ref().map(|turn| posted(server, CHAT, turn));
        let usage = &second["usage"];
        let [prompt, cached] = ["/prompt_tokens", "/prompt_tokens_details/cached_tokens"]
            .map(|figure| usage.pointer(figure).and_then(Value::as_u64));
        let difference = usage.pointer("/prompt_tokens_details/cache_difference");
        (prompt.expect("a number"), cached, difference.cloned())
    };
    let (prompt, cached, difference) = second(&start_with(|config| {
        let normalization = Normalization::new(&["^Current date:"], true);
        config.normalization = normalization.expect("a pattern");
    }));
    assert_eq!((cached, difference), (Some(prompt - 1), None));
    // Without that they part at what is written anew.
    let (prompt, cached, difference) = second(&start());
    assert!(cached < Some(prompt / 2), "{cached:?} of {prompt}");
    assert!(difference.is_some());
}

#[test]
fn several_choices_differ_and_a_seed_repeats_them() {
    let server = start();
    let ask = |seed: i64| {
        let more = json!({"n": 3, "seed": seed, "temperature": 1.5});
        let reply = posted(&server, CHAT, &question(more));
        let choices = reply["choices"].as_array().expect("choices").clone();
        let texts: Vec<String> = choices
            .iter()
            .enumerate()
            .map(|(index, choice)| {
                assert_eq!(choice["index"], index);
                choice["message"]["content"].to_string()
            })
            .collect();
        texts
    };
    let first = ask(-7);
    assert_eq!(first.len(), 3);
    assert!(first[0] != first[1] && first[1] != first[2], "{first:?}");
    assert_eq!(first, ask(-7));
    assert_ne!(first, ask(8));
}

#[test]
fn a_stop_string_ends_the_reply_and_is_not_in_it() {
    let server = start();
    let whole = posted(&server, CHAT, &question(json!({})));
    let text = whole["choices"][0]["message"]["content"]
        .as_str()
        .expect("text");
    let stop = text.split(' ').nth(4).expect("several words");
    let cut = posted(&server, CHAT, &question(json!({"stop": stop})));
    let choice = &cut["choices"][0];
    let before = &text[..text.find(stop).expect("in it")];
    assert_eq!(choice["message"]["content"], before);
    assert_eq!(choice["finish_reason"], "stop");
}

#[test]
fn logprobs_name_the_tokens_of_the_text() {
    let server = start();
    let more = json!({"logprobs": true, "top_logprobs": 3});
    let reply = posted(&server, CHAT, &question(more));
    let choice = &reply["choices"][0];
    let entries = choice["logprobs"]["content"].as_array().expect("a list");
    assert_eq!(entries.len(), 24);
    let mut bytes: Vec<u8> = Vec::new();
    for entry in entries {
        let top = entry["top_logprobs"].as_array().expect("a list");
        assert_eq!(top.len(), 3);
        assert_eq!(
            top[0]["token"], entry["token"],
            "greedy takes the likeliest"
        );
        let sum: f64 = top
            .iter()
            .map(|top| top["logprob"].as_f64().expect("a number").exp())
            .sum();
        assert!(sum <= 1.0 + 1e-5, "{sum}");
        let of_token = entry["bytes"].as_array().expect("bytes");
        bytes.extend(
            of_token
                .iter()
                .map(|byte| byte.as_u64().expect("a byte") as u8),
        );
    }
    let text = choice["message"]["content"].as_str().expect("text");
    assert_eq!(String::from_utf8(bytes).as_deref(), Ok(text));

    let body = json!({"prompt": "# Ownership", "logprobs": 2, "max_tokens": 6, "temperature": 0});
    let lists = &posted(&server, COMPLETION, &body)["choices"][0]["logprobs"];
    assert_eq!(lists["token_logprobs"].as_array().map(Vec::len), Some(6));
    assert_eq!(
        lists["top_logprobs"][0]
            .as_object()
            .map(serde_json::Map::len),
        Some(2)
    );
    assert_eq!(lists["text_offset"][0], 0);
}

#[test]
fn prompts_are_rendered_as_they_would_be_computed_and_wait_for_nobody() {
    let server = start_with(|config| {
        config.service.max_running = 1;
        config.service.max_waiting = 0;
    });
    let chat =
        question(json!({"max_tokens": 1, "stream_options": null, "chat_template_kwargs": {}}));
    let usage = posted(&server, CHAT, &chat)["usage"]["prompt_tokens"].clone();
    assert_nothing_held(&server);
    let running = begun(&server, 900);
    until("its place is known to be taken", || {
        server.engine().status().running == 1
    });
    assert_eq!(post(&server, CHAT, &chat).status, 429, "the server is full");
    // Whatever else a request says that is routed by its prompt.
    let rendered = posted(&server, &format!("{CHAT}/render"), &chat);
    let expected = model().prompt(&[Message::new("user", "What is ownership?")]);
    assert_eq!(rendered, json!({"token_ids": expected.expect("a prompt")}));
    let ids = rendered["token_ids"].as_array().expect("a list");
    assert_eq!(json!(ids.len()), usage);
    let render = format!("{COMPLETION}/render");
    let prompts = json!({"prompt": ["Ownership", "is"], "max_tokens": 5, "stream": true});
    let rendered = posted(&server, &render, &prompts);
    let tokens =
        |text: &str| posted(&server, "/tokenize", &json!({"prompt": text}))["tokens"].clone();
    let expected = json!([{"token_ids": tokens("Ownership")}, {"token_ids": tokens("is")}]);
    assert_eq!(rendered, expected);
    let rendered = posted(&server, &render, &json!({"prompt": [5, 6, 7]}));
    assert_eq!(rendered, json!([{"token_ids": [5, 6, 7]}]));
    for (path, body, field) in [
        (&render, json!({}), "prompt"),
        (&render, json!({"prompt": []}), "prompt"),
        (&render, json!({"prompt": {"text": 1}}), "prompt"),
        (&render, json!({"prompt": "word ".repeat(5000)}), "prompt"),
        (
            &format!("{CHAT}/render"),
            json!({"messages": "Hi"}),
            "messages",
        ),
        (
            &format!("{CHAT}/render"),
            json!({"prompt": "Hi"}),
            "messages",
        ),
    ] {
        let refused = post(&server, path, &body);
        assert_eq!(refused.status, 400, "{body}: {refused:?}");
        let error = refused.json()["error"].to_string();
        assert!(error.contains(field), "{body}: {error}");
    }
    let other = post(&server, &render, &json!({"prompt": "Hi", "model": "other"}));
    assert_eq!(other.status, 404);
    drop(running);
}

#[test]
fn tokens_come_from_text_and_become_it_again() {
    let server = start();
    let encoded = posted(
        &server,
        "/tokenize",
        &json!({"prompt": "Ownership, über alles ü"}),
    );
    assert_eq!(
        encoded["count"],
        encoded["tokens"].as_array().expect("a list").len()
    );
    assert_eq!(encoded["max_model_len"], 1024);
    let decoded = posted(
        &server,
        "/detokenize",
        &json!({"tokens": encoded["tokens"]}),
    );
    assert_eq!(decoded["prompt"], "Ownership, über alles ü");

    let messages = json!({"messages": [{"role": "user", "content": "What is ownership?"}]});
    let chat = posted(&server, "/tokenize", &messages);
    let expected = model().prompt(&[Message::new("user", "What is ownership?")]);
    assert_eq!(chat["tokens"], json!(expected.expect("a prompt")));
    let body = json!({"prompt": chat["tokens"], "temperature": 0, "max_tokens": 24});
    let completion = posted(&server, COMPLETION, &body);
    let answer = posted(&server, CHAT, &question(json!({})));
    assert_eq!(
        completion["choices"][0]["text"],
        answer["choices"][0]["message"]["content"]
    );
}

#[test]
fn the_model_is_listed_and_the_server_is_well() {
    let server = start();
    let list = get(&server, "/v1/models").json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "demo");
    assert_eq!(get(&server, "/v1/models/demo").json()["id"], "demo");
    assert_eq!(get(&server, "/v1/models/other/name").status, 404);
    assert_eq!(get(&server, "/health").json()["status"], "ok");
}

fn completion_tokens(reply: &Value) -> u64 {
    let tokens = reply["usage"]["completion_tokens"].as_u64();
    tokens.expect("the usage counts tokens")
}

#[test]
fn metrics_count_what_happened_under_the_names_routers_read() {
    let server = start();
    let generated: f64 = (0..2)
        .map(|_| posted(&server, CHAT, &question(json!({}))))
        .map(|reply| completion_tokens(&reply) as f64)
        .sum();
    assert_nothing_held(&server);
    let response = get(&server, "/metrics");
    assert!(
        response
            .header("content-type")
            .is_some_and(|kind| kind.contains("openmetrics-text"))
    );
    let value = |name: &str| -> f64 {
        let line = response
            .body
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name} ")));
        let line = line.unwrap_or_else(|| panic!("{name} in {}", response.body));
        line.parse().expect("a number")
    };
    assert_eq!(value("vllm:generation_tokens_total"), generated);
    assert_eq!(value("vllm:request_success_total"), 2.0);
    assert_eq!(value("vllm:num_requests_running"), 0.0);
    assert_eq!(value("vllm:num_requests_waiting"), 0.0);
    assert_eq!(value("vllm:time_to_first_token_seconds_count"), 2.0);
    assert_eq!(
        value("vllm:time_to_first_token_seconds_bucket{le=\"+Inf\"}"),
        2.0
    );
    assert_eq!(
        value("vllm:inter_token_latency_seconds_count"),
        generated - 2.0
    );
    assert!(value("vllm:e2e_request_latency_seconds_sum") > 0.0);
    assert!(value("vllm:prefix_cache_queries_total") > 0.0);
    assert!(value("vllm:kv_cache_usage_perc") <= 1.0);
    assert_eq!(
        value("lacuna_kv_committed_bytes"),
        server.engine().status().ledger.committed.get() as f64
    );
    assert!(response.body.ends_with("# EOF\n"));
}

#[test]
fn the_memory_map_is_the_ledger() {
    let server = start();
    let generated = completion_tokens(&posted(&server, CHAT, &question(json!({}))));
    assert_nothing_held(&server);
    let map = get(&server, "/memory").json();
    let ledger = server.engine().status().ledger;
    assert_eq!(map["ledger"]["committed_bytes"], ledger.committed.get());
    assert_eq!(map["ledger"]["mapped_bytes"], 0);
    assert_eq!(map["sessions"], json!([]));
    assert_eq!(map["counters"]["generated_tokens"], generated);
    assert!(map["pages"]["group_tokens"].as_u64() > Some(0));
    let memory = server.engine().status().request_memory;
    assert_eq!(map["request_memory"]["limit_bytes"], memory.limit.get());
    assert_eq!(map["request_memory"]["held_bytes"], 0);
    assert!(map["request_memory"]["highest_bytes"].as_u64() > Some(0));
}

#[test]
fn the_budget_is_lowered_and_raised_while_the_server_runs() {
    let server = start_with(|config| {
        config.service.engine.budget = Some(lacuna_pages::ByteLength::mebibytes(64));
    });
    let expected = posted(&server, CHAT, &question(json!({})))["choices"].clone();
    let before = get(&server, "/memory").json()["budget"]["budget_bytes"].clone();
    let refused = post(&server, "/memory", &json!({"budget_bytes": 1 << 20}));
    assert_eq!(refused.status, 400);
    let error = refused.json()["error"].clone();
    assert_eq!(error["param"], "budget_bytes");
    let message = error["message"].as_str().expect("a message");
    assert!(
        message.contains("too small") && message.contains("KV pages"),
        "{message}"
    );
    for body in [
        json!({}),
        json!({"budget_bytes": -1}),
        json!({"budget_bytes": "24MiB"}),
    ] {
        assert_eq!(post(&server, "/memory", &body).status, 400, "{body}");
    }
    assert_eq!(
        get(&server, "/memory").json()["budget"]["budget_bytes"],
        before
    );
    assert_eq!(before, 64 << 20);
    for budget in [48 << 20, 96 << 20] {
        let set = posted(&server, "/memory", &json!({"budget_bytes": budget}));
        assert_eq!(set["budget_bytes"], budget);
        let answer = posted(&server, CHAT, &question(json!({})));
        assert_eq!(answer["choices"], expected);
        // The figures may be a tenth of a second old.
        until("the budget is shown", || {
            get(&server, "/memory").json()["budget"]["budget_bytes"] == budget
        });
        let map = get(&server, "/memory").json();
        let committed = map["ledger"]["committed_bytes"].as_u64();
        assert!(committed <= map["budget"]["kv_bytes"].as_u64(), "{map}");
        let metrics = get(&server, "/metrics").body;
        assert!(metrics.contains("lacuna_budget_bytes"), "{metrics}");
    }
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let server = start();
    let page = get(&server, "/");
    assert_eq!(page.status, 200);
    let policy = page.header("content-security-policy").expect("a policy");
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
    let quoted = |text: &str| -> Vec<String> {
        let parts = text.split('"').skip(1).step_by(2);
        parts.map(str::to_owned).collect()
    };
    let mut wanted = quoted(&page.body);
    wanted.retain(|path| path.starts_with('/') || path.contains("//"));
    let mut seen = Vec::new();
    while let Some(path) = wanted.pop() {
        if seen.contains(&path) {
            continue;
        }
        assert!(path.starts_with("/page/"), "{path}");
        let file = get(&server, &path);
        assert_eq!(file.status, 200, "{path}");
        // What a module imports, and nothing else in it, is loaded.
        let imports = file.body.lines().filter(|line| line.contains(" from \""));
        for import in imports.flat_map(quoted) {
            wanted.push(import.replacen("./", "/page/", 1));
        }
        let loaded = [
            "url(http",
            "url(\"http",
            "fetch(\"http",
            "import(\"http",
            "src=\"http",
        ];
        for foreign in loaded {
            assert!(!file.body.contains(foreign), "{path}: {foreign}");
        }
        seen.push(path);
    }
    let markdown = "/page/vendor/marked.js".to_owned();
    assert!(seen.len() > 10 && seen.contains(&markdown), "{seen:?}");
}

#[test]
fn a_path_or_a_method_that_is_not_there_is_an_error_like_any() {
    let server = start();
    let nowhere = get(&server, "/v2/nothing");
    assert_eq!(nowhere.status, 404);
    assert_eq!(nowhere.json()["error"]["code"], "not_found");
    let method = get(&server, CHAT);
    assert_eq!(method.status, 405);
    assert_eq!(method.json()["error"]["code"], "method_not_allowed");
    assert_eq!(post(&server, "/health", &json!({})).status, 405);
}

#[test]
fn the_dashboard_asks_for_metrics_that_there_are() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../deploy/grafana/lacuna.json"
    );
    let text = std::fs::read_to_string(path).expect("a part of the repository");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let server = start();
    let metrics = get(&server, "/metrics").body;
    let panels = dashboard["panels"].as_array().expect("a list");
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().expect("a list"));
    let mut asked = 0;
    for target in targets {
        let expression = target["expr"].as_str().expect("a text");
        let of_a_name =
            |character: char| character.is_ascii_alphanumeric() || "_:".contains(character);
        let names = expression.split(|character| !of_a_name(character));
        for name in names.filter(|name| name.starts_with("vllm:") || name.starts_with("lacuna_")) {
            let sample = |line: &str| line.split(['{', ' ']).next() == Some(name);
            assert!(metrics.lines().any(sample), "{name} of `{expression}`");
            asked += 1;
        }
    }
    assert!(asked > panels.len());
}
