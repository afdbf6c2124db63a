//! Fields that have no effect here: what other services, engines and routers know.
//!
//! Some say nothing to a server with one model and one queue, whatever their value. Others are known
//! to change replies elsewhere: these are accepted at the value that asks for no change, as routers
//! send it, and refused by name at any other.

use serde_json::{Map, Value};

use crate::http::error::ApiError;
use crate::http::ignored::Ignored;

/// Fields that tell a service who asks, or how to keep and find the request: without effect.
const INFORMATIVE: [&str; 10] = [
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "rid",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
];

/// Fields that ask for nothing if they are false, empty, or `none`.
const EMPTY: [&str; 40] = [
    "allowed_token_ids",
    "audio",
    "bad_words",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "chat_template",
    "continue_final_message",
    "custom_logit_processor",
    "custom_params",
    "data_parallel_rank",
    "documents",
    "early_stopping",
    "function_call",
    "functions",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "kv_transfer_params",
    "logits_processors",
    "lora_path",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "modalities",
    "no_stop_trim",
    "prediction",
    "prompt_embeds",
    "return_cached_tokens_details",
    "return_hidden_states",
    "return_meta_info",
    "return_routed_experts",
    "return_token_ids",
    "sampling_seed",
    "session_params",
    "stop_regex",
    "structural_tag",
    "suffix",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
    "web_search_options",
];

/// Fields that ask for nothing if they are 1.
const ONE: [&str; 2] = ["length_penalty", "typical_p"];

/// Fields that ask for nothing if they are true.
const TRUE: [&str; 5] = [
    "add_generation_prompt",
    "detokenize",
    "separate_reasoning",
    "spaces_between_special_tokens",
    "stream_reasoning",
];

/// Takes the fields without effect out of a request.
///
/// # Errors
/// One that would have an effect elsewhere is named.
pub(crate) fn take_without_effect(object: &mut Map<String, Value>) -> Result<(), ApiError> {
    for field in INFORMATIVE {
        object.remove(field);
    }
    for field in EMPTY {
        refuse_unless(object, field, is_empty)?;
    }
    for field in ONE {
        refuse_unless(object, field, |value| {
            value.is_null() || value.as_f64() == Some(1.0)
        })?;
    }
    for field in TRUE {
        refuse_unless(object, field, |value| {
            matches!(value, Value::Null | Value::Bool(true))
        })?;
    }
    Ok(())
}

fn refuse_unless(
    object: &mut Map<String, Value>,
    field: &str,
    neutral: impl FnOnce(&Value) -> bool,
) -> Result<(), ApiError> {
    match object.remove(field) {
        Some(value) if !neutral(&value) => Err(ApiError::field(
            field,
            format!("`{field}` is not supported by this server; leave it out"),
        )),
        _ => Ok(()),
    }
}

/// Takes out of the definitions of tools what no one defines, so that no template shows it to the
/// model, and marks for caches that are told what to keep.
///
/// # Errors
/// In strict mode, for the first field that is ignored.
pub(crate) fn take_unknown_of_tools(
    tools: &mut [Value],
    ignored: &mut Ignored,
) -> Result<(), ApiError> {
    for (index, tool) in tools.iter_mut().enumerate() {
        let path = format!("tools[{index}]");
        take_unknown(tool, &["type", "function"], &path, ignored)?;
        let known = ["name", "description", "parameters", "strict"];
        if let Some(function) = tool.get_mut("function") {
            take_unknown(function, &known, &format!("{path}.function"), ignored)?;
        }
    }
    Ok(())
}

fn take_unknown(
    value: &mut Value,
    known: &[&str],
    path: &str,
    ignored: &mut Ignored,
) -> Result<(), ApiError> {
    let Value::Object(fields) = value else {
        return Ok(());
    };
    fields.remove("cache_control");
    let is_unknown = |field: &&String| !known.contains(&field.as_str());
    let unknown: Vec<String> = fields.keys().filter(is_unknown).cloned().collect();
    for field in unknown {
        fields.remove(&field);
        ignored.note(&format!("{path}.{field}"))?;
    }
    Ok(())
}

/// Whether a value says what leaving the field out says.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) | Value::Number(_) => false,
        Value::String(text) => text.is_empty() || text == "none",
        Value::Array(items) => items.iter().all(|item| item == "text"),
        Value::Object(fields) => fields.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn left(value: Value) -> Result<Map<String, Value>, ApiError> {
        let Value::Object(mut object) = value else {
            panic!("an object");
        };
        take_without_effect(&mut object).map(|()| object)
    }

    #[test]
    fn a_field_that_would_change_the_reply_is_refused_unless_it_asks_for_nothing() {
        for nothing in [
            json!({"suffix": null}),
            json!({"use_beam_search": false, "length_penalty": 1.0}),
            json!({"vllm_xargs": {}, "bad_words": []}),
            json!({"modalities": ["text"], "function_call": "none"}),
            json!({"add_generation_prompt": true, "detokenize": null}),
            json!({"user": "x", "rid": 5}),
        ] {
            let left = left(nothing.clone());
            assert_eq!(left, Ok(Map::new()), "{nothing}");
        }
        for something in [
            json!({"suffix": "x"}),
            json!({"use_beam_search": true}),
            json!({"length_penalty": 0.5}),
            json!({"truncate_prompt_tokens": 1}),
            json!({"structural_tag": {"type": "structural_tag"}}),
            json!({"modalities": ["audio"]}),
            json!({"kv_transfer_params": {"do_remote_decode": true}}),
            json!({"add_generation_prompt": false}),
            json!({"detokenize": false}),
        ] {
            let error = left(something.clone()).expect_err("not supported").body();
            let field = something
                .as_object()
                .and_then(|fields| fields.keys().next());
            assert_eq!(error["error"]["param"].as_str(), field.map(String::as_str));
        }
    }

    #[test]
    fn definitions_of_tools_keep_what_is_known_of_them() {
        let tool = json!({"type": "function", "function": {
            "name": "f", "description": "d", "strict": true, "parameters": {"x": {"y": 1}}}});
        let mut tools = vec![tool.clone(), tool.clone(), json!("none")];
        tools[1]["cache_control"] = json!({"type": "ephemeral"});
        tools[1]["colour"] = json!("red");
        tools[1]["function"]["mood"] = json!(1);
        let mut ignored = Ignored::new(false);
        take_unknown_of_tools(&mut tools, &mut ignored).expect("not strict");
        assert_eq!(tools, [tool.clone(), tool, json!("none")]);
        assert_eq!(ignored.paths(), "tools[1].colour,tools[1].function.mood");
    }

    /// It used to be taken without a word from when nothing thought apart.
    #[test]
    fn thoughts_told_as_content_are_asked_for_in_vain() {
        for field in ["separate_reasoning", "stream_reasoning"] {
            let taken = |value: bool| {
                let mut object = Map::from_iter([(field.to_owned(), json!(value))]);
                take_without_effect(&mut object).map(|()| object.is_empty())
            };
            assert!(taken(true).expect("what is done anyway"));
            assert!(taken(false).is_err(), "{field}");
        }
    }

    #[test]
    fn no_field_is_listed_twice() {
        let all = INFORMATIVE.iter().chain(&EMPTY).chain(&ONE).chain(&TRUE);
        let mut all: Vec<_> = all.collect();
        let listed = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), listed);
    }
}
