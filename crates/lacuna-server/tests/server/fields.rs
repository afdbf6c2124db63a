//! What requests say beyond their model and their messages: each field has its effect, or none and
//! the response says so.

use std::path::Path;

use lacuna_server::Server;
use lacuna_text::tokenizer::{Decode, Special};
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETION, assert_nothing_held, get, model, post, posted, question, start, start_with,
};

const IGNORED: &str = "x-lacuna-ignored";

/// A greedy completion, with `more` fields.
fn completion(more: Value) -> Value {
    let mut body = json!({"prompt": "# Ownership\n\n", "temperature": 0, "max_tokens": 12});
    let (Value::Object(fields), Value::Object(more)) = (&mut body, more) else {
        panic!("objects");
    };
    fields.extend(more);
    body
}

fn text(reply: &Value) -> &str {
    reply["choices"][0]["text"].as_str().expect("a text")
}

/// The greedy continuation of [`completion`], as tokens.
fn greedy_tokens(server: &Server, tokens: usize) -> Vec<u32> {
    let reply = posted(
        server,
        COMPLETION,
        &completion(json!({"max_tokens": tokens})),
    );
    let whole = format!("# Ownership\n\n{}", text(&reply));
    let tokenizer = model()
        .tokenizer()
        .encode(&whole, Special::PROMPT)
        .expect("tokens");
    tokenizer[tokenizer.len() - tokens..].to_vec()
}

#[test]
fn what_routers_send_is_answered_and_nothing_of_it_is_ignored() {
    let server = start();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/routers");
    let mut requests = 0;
    for file in ["vllm-router-0.1.17.json", "sglang-router-0.3.2.json"] {
        let recorded = std::fs::read(folder.join(file)).expect("committed");
        let recorded: Vec<Value> = serde_json::from_slice(&recorded).expect("JSON");
        for one in recorded {
            let body = one["body"].clone();
            let path = one["path"].as_str().expect("a path");
            let response = post(&server, path, &body);
            assert_eq!(response.status, 200, "{file}: {body}: {response:?}");
            assert_eq!(response.header(IGNORED), None, "{file}: {body}");
            requests += 1;
        }
    }
    assert_eq!(requests, 16);
    assert_nothing_held(&server);
}

#[test]
fn what_clients_send_is_answered_and_nothing_of_it_is_ignored() {
    let server = start();
    for body in [
        // openai-python: what its users set, and what is sent to OpenAI's own service.
        question(
            json!({"model": "demo", "n": 1, "user": "u", "store": false, "seed": 1,
            "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": true,
            "stream_options": null, "logit_bias": {}, "modalities": ["text"]}),
        ),
        // A conversation that is sent back as it was received, with marks for a prompt cache.
        question(json!({"messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief.",
                "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "id": "msg-1", "name": "ann", "content": "Hi"},
            {"role": "assistant", "content": "Hello.", "refusal": null, "annotations": [],
                "audio": null, "function_call": null, "tool_calls": null, "reasoning": null,
                "reasoning_content": null},
            {"role": "user", "content": []}]})),
        // vLLM's own fields at their defaults.
        question(
            json!({"best_of": 1, "use_beam_search": false, "min_tokens": 0,
            "stop_token_ids": [], "length_penalty": 1.0, "ignore_eos": false,
            "include_stop_str_in_output": false, "spaces_between_special_tokens": true,
            "truncate_prompt_tokens": null, "prompt_logprobs": null, "echo": false,
            "add_generation_prompt": true, "continue_final_message": false, "documents": null,
            "chat_template": null, "guided_json": null, "structured_outputs": null,
            "priority": 0, "request_id": "r", "kv_transfer_params": null, "logprobs": false,
            "top_logprobs": 0, "return_token_ids": null, "vllm_xargs": null}),
        ),
    ] {
        let response = post(&server, CHAT, &body);
        assert_eq!(response.status, 200, "{body}: {response:?}");
        assert_eq!(response.header(IGNORED), None, "{body}");
    }
}

#[test]
fn unknown_fields_are_ignored_and_named_wherever_they_are() {
    let server = start();
    let body = question(
        json!({"colour": "red", "stream_options": {"what": 1}, "stream": true,
        "response_format": {"type": "text", "x": 1},
        "messages": [{"role": "user", "mood": 1, "content": [
            {"type": "text", "text": "What is ownership?", "y": {"z": 0}}]}]}),
    );
    let plain = post(&server, CHAT, &question(json!({"stream": true})));
    let response = post(&server, CHAT, &body);
    assert_eq!(response.status, 200, "{response:?}");
    let named = response.header(IGNORED).expect("something is ignored");
    let mut named: Vec<&str> = named.split(',').collect();
    named.sort_unstable();
    let expected = [
        "colour",
        "messages[0].content[0].y",
        "messages[0].mood",
        "response_format.x",
        "stream_options.what",
    ];
    assert_eq!(named, expected);
    let pieces = |response: &crate::support::Response| -> Vec<Value> {
        let events = response.events().into_iter();
        events
            .map(|event| event["choices"][0]["delta"].clone())
            .collect()
    };
    assert_eq!(pieces(&response), pieces(&plain), "and changes nothing");
    let whole = post(&server, COMPLETION, &completion(json!({"a,b": 1})));
    assert_eq!(whole.header(IGNORED), Some("a%2Cb"));
    let tokens = post(&server, "/tokenize", &json!({"prompt": "x", "colour": 1}));
    assert_eq!(tokens.header(IGNORED), Some("colour"));
    assert_eq!(
        post(&server, COMPLETION, &completion(json!({}))).header(IGNORED),
        None
    );
}

#[test]
fn a_strict_server_refuses_what_it_would_ignore() {
    let server = start_with(|config| config.strict_fields = true);
    for (body, param) in [
        (question(json!({"colour": "red"})), "colour"),
        (
            question(json!({"messages": [{"role": "user", "content": "x", "mood": 1}]})),
            "messages[0].mood",
        ),
    ] {
        let response = post(&server, CHAT, &body);
        assert_eq!(response.status, 400, "{response:?}");
        assert_eq!(response.json()["error"]["param"], param);
    }
    posted(
        &server,
        CHAT,
        &question(json!({"no_stop_trim": false, "user": "u"})),
    );
}

#[test]
fn a_token_that_ends_a_reply_is_told_and_shown_only_if_that_is_asked_for() {
    let server = start();
    let tokens = greedy_tokens(&server, 12);
    let stop = tokens[6];
    let first = tokens
        .iter()
        .position(|&token| token == stop)
        .expect("it is there");
    let expected = |end: usize| {
        let stream = model()
            .tokenizer()
            .decode(&tokens[..end], Decode::CONTINUATION);
        stream.expect("text")
    };
    let ended = |more: Value| {
        let mut body = completion(json!({"stop_token_ids": [stop]}));
        body.as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("one").clone());
        let reply = posted(&server, COMPLETION, &body);
        let choice = &reply["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{reply}");
        assert_eq!(choice["stop_reason"], stop, "{reply}");
        choice["text"].as_str().expect("text").to_owned()
    };
    assert_eq!(ended(json!({})), expected(first));
    assert_eq!(
        ended(json!({"include_stop_str_in_output": true})),
        expected(first + 1)
    );
}

#[test]
fn a_stop_string_is_told_and_shown_only_if_that_is_asked_for() {
    let server = start();
    let whole = posted(&server, COMPLETION, &completion(json!({})));
    assert_eq!(whole["choices"][0]["stop_reason"], Value::Null);
    let whole = text(&whole).to_owned();
    let stop: String = whole.chars().skip(8).take(3).collect();
    let at = whole.find(&stop).expect("it is there");
    for (show, end) in [(false, at), (true, at + stop.len())] {
        let more = json!({"stop": ["nowhere", stop], "include_stop_str_in_output": show});
        let reply = posted(&server, COMPLETION, &completion(more.clone()));
        assert_eq!(text(&reply), &whole[..end]);
        assert_eq!(reply["choices"][0]["stop_reason"], stop.as_str());
        let mut streamed = completion(more);
        streamed["stream"] = true.into();
        let events = post(&server, COMPLETION, &streamed).events();
        let pieces = events
            .iter()
            .filter_map(|event| event["choices"][0]["text"].as_str());
        assert_eq!(pieces.collect::<String>(), &whole[..end]);
        let last = events.last().expect("events");
        assert_eq!(last["choices"][0]["stop_reason"], stop.as_str(), "{last}");
    }
}

#[test]
fn a_bias_makes_a_token_impossible_and_the_probabilities_stay_the_models() {
    let server = start();
    let first = greedy_tokens(&server, 1)[0];
    let plain = posted(
        &server,
        COMPLETION,
        &completion(json!({"max_tokens": 1, "logprobs": 2})),
    );
    let bias = json!({"max_tokens": 1, "logprobs": 2, "logit_bias": {first.to_string(): -100}});
    let biased = posted(&server, COMPLETION, &completion(bias));
    assert_ne!(text(&plain), text(&biased));
    let top = |reply: &Value| reply["choices"][0]["logprobs"]["top_logprobs"][0].clone();
    assert_eq!(top(&plain), top(&biased));
}

#[test]
fn several_prompts_are_answered_as_each_of_them_alone() {
    let server = start();
    let prompts = ["# Ownership\n\n", "fn main() {", "Memory is"];
    let more = json!({"prompt": prompts, "n": 2, "logprobs": 1, "seed": 7, "temperature": 0.8});
    let reply = posted(&server, COMPLETION, &completion(more.clone()));
    let choices = reply["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 6);
    let (mut asked, mut generated) = (0, 0);
    for (place, prompt) in prompts.iter().enumerate() {
        let mut alone = completion(more.clone());
        alone["prompt"] = json!(prompt);
        let alone = posted(&server, COMPLETION, &alone);
        for choice in 0..2 {
            let mut expected = alone["choices"][choice].clone();
            expected["index"] = (place * 2 + choice).into();
            assert_eq!(choices[place * 2 + choice], expected);
        }
        asked += alone["usage"]["prompt_tokens"].as_u64().expect("a number");
        generated += alone["usage"]["completion_tokens"]
            .as_u64()
            .expect("a number");
    }
    assert_eq!(reply["usage"]["prompt_tokens"], asked);
    assert_eq!(reply["usage"]["completion_tokens"], generated);
    assert_eq!(reply["usage"]["total_tokens"], asked + generated);

    let mut streamed = completion(more);
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let events = post(&server, COMPLETION, &streamed).events();
    let mut texts = vec![String::new(); 6];
    for choice in events.iter().filter_map(|event| event["choices"].get(0)) {
        let index = choice["index"].as_u64().expect("an index") as usize;
        texts[index] += choice["text"].as_str().expect("text");
    }
    for (choice, text) in choices.iter().zip(texts) {
        assert_eq!(choice["text"], text);
    }
    let usage = &events.last().expect("events")["usage"];
    assert_eq!(usage["completion_tokens"], generated);
    assert_nothing_held(&server);
}

#[test]
fn more_prompts_than_ever_run_and_wait_at_once_are_refused_with_how_many_may_be() {
    let server = start_with(|config| {
        config.service.max_running = 1;
        config.service.max_waiting = 2;
    });
    let several = |count: usize| {
        let body = json!({"prompt": vec!["Memory is"; count], "max_tokens": 2, "ignore_eos": true});
        post(&server, COMPLETION, &body)
    };
    // Nobody else is there, so coming back later would be of no use.
    let refused = several(4);
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (400, None),
        "{refused:?}"
    );
    let error = refused.json()["error"].clone();
    assert_eq!(
        (&error["param"], &error["message"]),
        (&json!("prompt"), &json!("4 prompts, expected 1 to 3"))
    );
    assert_eq!(several(3).status, 200);
    assert_nothing_held(&server);
    posted(&server, COMPLETION, &completion(json!({})));
}

#[test]
fn an_echo_begins_with_the_prompt_and_its_probabilities() {
    let server = start();
    let plain = posted(&server, COMPLETION, &completion(json!({"logprobs": 2})));
    let prompt = "# Ownership\n\n";
    let tokens = model()
        .tokenizer()
        .encode(prompt, Special::PROMPT)
        .expect("tokens");
    for given in [json!(prompt), json!([tokens.clone()])] {
        let more = json!({"prompt": given, "echo": true, "logprobs": 2});
        let echoed = posted(&server, COMPLETION, &completion(more.clone()));
        assert!(text(&echoed).ends_with(text(&plain)));
        assert!(text(&echoed).contains(prompt), "{echoed}");
        let lists = &echoed["choices"][0]["logprobs"];
        let list = |name: &str| lists[name].as_array().expect("a list").clone();
        assert_eq!(list("tokens").len(), tokens.len() + 12);
        assert_eq!(list("token_logprobs")[0], Value::Null);
        assert_eq!(list("top_logprobs")[0], Value::Null);
        assert!(list("token_logprobs")[1..].iter().all(Value::is_number));
        let own = plain["choices"][0]["logprobs"]["token_logprobs"]
            .as_array()
            .expect("a list");
        assert_eq!(&list("token_logprobs")[tokens.len()..], &own[..]);
        let mut streamed = completion(more);
        streamed["stream"] = true.into();
        let events = post(&server, COMPLETION, &streamed).events();
        let choices = events.iter().map(|event| &event["choices"][0]);
        let whole: String = choices
            .clone()
            .filter_map(|choice| choice["text"].as_str())
            .collect();
        assert_eq!(whole, text(&echoed));
        let scores = choices.filter_map(|choice| choice["logprobs"]["token_logprobs"].as_array());
        assert_eq!(
            scores.flatten().cloned().collect::<Vec<_>>(),
            list("token_logprobs")
        );
    }
    let no_scores = posted(&server, COMPLETION, &completion(json!({"echo": true})));
    assert_eq!(no_scores["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn a_prompt_is_scored_without_a_single_new_token() {
    let server = start();
    let body = completion(json!({"echo": true, "logprobs": 1, "max_tokens": 0}));
    let scored = posted(&server, COMPLETION, &body);
    assert_eq!(text(&scored), "# Ownership\n\n");
    assert_eq!(scored["usage"]["completion_tokens"], 0);
    assert_eq!(scored["choices"][0]["finish_reason"], "length");
    let more = posted(
        &server,
        COMPLETION,
        &completion(json!({"echo": true, "logprobs": 1})),
    );
    let scores = |reply: &Value| {
        let scores = reply["choices"][0]["logprobs"]["token_logprobs"].as_array();
        scores.expect("scores").clone()
    };
    let alone = scores(&scored);
    assert_eq!(alone[..], scores(&more)[..alone.len()]);
}

#[test]
fn prompt_logprobs_have_every_token_by_its_id() {
    let server = start();
    let more =
        json!({"prompt_logprobs": 2, "max_tokens": 1, "prompt": ["# Ownership\n\n", "Memory"]});
    let reply = posted(&server, COMPLETION, &completion(more));
    for (choice, prompt) in ["# Ownership\n\n", "Memory"].into_iter().enumerate() {
        let tokens = model()
            .tokenizer()
            .encode(prompt, Special::PROMPT)
            .expect("tokens");
        let scores = reply["choices"][choice]["prompt_logprobs"]
            .as_array()
            .expect("a list");
        assert_eq!(scores.len(), tokens.len());
        assert_eq!(scores[0], Value::Null);
        for (token, score) in tokens.iter().zip(scores).skip(1) {
            let own = &score[token.to_string()];
            let rank = own["rank"].as_u64().expect("a rank");
            assert!(
                own["logprob"]
                    .as_f64()
                    .is_some_and(|logprob| logprob <= 0.0),
                "{score}"
            );
            let listed = score.as_object().expect("an object");
            assert_eq!(listed.len(), if rank <= 2 { 2 } else { 3 }, "{score}");
            let text = model()
                .tokenizer()
                .token_bytes(*token)
                .expect("bytes")
                .to_vec();
            assert_eq!(
                own["decoded_token"],
                String::from_utf8_lossy(&text).into_owned()
            );
        }
    }
    let chat = posted(&server, CHAT, &question(json!({"prompt_logprobs": 0})));
    let scores = chat["prompt_logprobs"].as_array().expect("a list").len();
    assert_eq!(chat["usage"]["prompt_tokens"], scores);
}

#[test]
fn scored_tokens_are_called_by_their_ids_if_that_is_asked_for() {
    let server = start();
    let more = |ids: bool| {
        json!({"logprobs": 1, "top_logprobs": null, "max_tokens": 4, "prompt": "Memory",
            "return_tokens_as_token_ids": ids})
    };
    let scores = |ids: bool| {
        let reply = posted(&server, COMPLETION, &completion(more(ids)));
        reply["choices"][0]["logprobs"].clone()
    };
    let (named, texts) = (scores(true), scores(false));
    let text = |name: &str| {
        let id = name.strip_prefix("token_id:").expect("an id");
        let (model, id) = (model(), id.parse().expect("a number"));
        let bytes = model.tokenizer().token_bytes(id);
        String::from_utf8_lossy(bytes.expect("bytes")).into_owned()
    };
    let names = named["tokens"].as_array().expect("a list");
    assert_eq!(names.len(), 4);
    for (index, name) in names.iter().enumerate() {
        let name = name.as_str().expect("a text");
        assert_eq!(texts["tokens"][index], text(name));
        assert!(named["top_logprobs"][index][name].is_number(), "{named}");
    }
    assert_eq!(named["text_offset"], texts["text_offset"]);
    let chat = json!({"logprobs": true, "max_tokens": 2, "return_tokens_as_token_ids": true});
    let chat = posted(&server, CHAT, &question(chat));
    let first = &chat["choices"][0]["logprobs"]["content"][0];
    let name = first["token"].as_str().expect("a text");
    assert_eq!(first["bytes"], json!(text(name).as_bytes()));
}

#[test]
fn special_tokens_are_part_of_the_text_if_that_is_asked_for() {
    let server = start();
    let end = model()
        .tokenizer()
        .end_of_generation()
        .next()
        .expect("an end");
    let name = model().tokenizer().token_text(end).expect("a name");
    let body = |more: Value| {
        let mut body = completion(json!({"max_tokens": 3, "ignore_eos": true,
            "logit_bias": {end.to_string(): 100}}));
        body.as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("one").clone());
        posted(&server, COMPLETION, &body)
    };
    let hidden = body(json!({}));
    assert_eq!(
        (text(&hidden), &hidden["usage"]["completion_tokens"]),
        ("", &json!(3))
    );
    assert_eq!(hidden["choices"][0]["finish_reason"], "length");
    assert_eq!(
        text(&body(json!({"skip_special_tokens": false}))),
        name.repeat(3)
    );
    let ended = body(json!({"ignore_eos": false}));
    assert_eq!(ended["choices"][0]["finish_reason"], "stop");
    assert_eq!(ended["usage"]["completion_tokens"], 0);
    let least = body(json!({"ignore_eos": false, "min_tokens": 2}));
    assert_eq!(least["usage"]["completion_tokens"], 2, "{least}");
}

#[test]
fn every_chunk_has_figures_if_that_is_asked_for() {
    let server = start();
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = question(json!({"stream": true, "stream_options": options}));
    let response = post(&server, CHAT, &body);
    assert_eq!(response.header(IGNORED), None);
    let events = response.events();
    let counts = events
        .iter()
        .map(|event| event["usage"]["completion_tokens"].as_u64());
    let counts: Vec<u64> = counts.map(|count| count.expect("figures")).collect();
    assert!(counts.is_sorted(), "{counts:?}");
    assert_eq!((counts[0], counts[counts.len() - 1]), (0, 24));
}

#[test]
fn routers_are_told_what_they_ask_of_a_worker() {
    let server = start();
    assert_eq!(
        get(&server, "/version").json()["version"],
        env!("CARGO_PKG_VERSION")
    );
    let models = get(&server, "/v1/models").json();
    let context = &models["data"][0]["max_model_len"];
    for path in ["/server_info", "/get_server_info"] {
        let info = get(&server, path).json();
        assert_eq!(info["served_model_name"], "demo");
        assert_eq!(&info["context_length"], context);
        assert_eq!(info["max_running_requests"], 32);
        let most = 32 * context.as_u64().expect("a number");
        let total = info["max_total_tokens"].as_u64().expect("a number");
        assert!((1..=most).contains(&total), "{info}");
    }
    for path in ["/model_info", "/get_model_info"] {
        let info = get(&server, path).json();
        assert_eq!(
            (&info["is_generation"], &info["max_context_length"]),
            (&json!(true), context)
        );
    }
    let metrics = get(&server, "/metrics").body;
    let blocks = metrics
        .lines()
        .find(|line| line.starts_with("vllm:cache_config_info{"));
    let blocks = blocks.expect("the cache's blocks");
    assert!(
        blocks.contains("block_size=\"16\"") && blocks.contains("num_gpu_blocks=\""),
        "{blocks}"
    );
    assert!(blocks.ends_with("} 1"), "{blocks}");
    let adapters = "vllm:lora_requests_info{max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"} ";
    assert!(metrics.contains(adapters), "{metrics}");
}

#[test]
fn what_other_servers_do_is_refused_with_what_is_missing() {
    let server = start();
    for (path, word) in [("/v1/embeddings", "embeddings"), ("/v1/rerank", "rank")] {
        let response = post(&server, path, &json!({"input": "x"}));
        assert_eq!(response.status, 404, "{response:?}");
        let error = &response.json()["error"];
        assert_eq!(error["code"], "not_supported");
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|text| text.contains(word)),
            "{error}"
        );
    }
    assert_eq!(
        post(&server, "/v1/wherever", &json!({})).json()["error"]["code"],
        "not_found"
    );
}
