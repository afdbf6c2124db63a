//! Log-probabilities, in the two forms that OpenAI has.

use lacuna_engine::TokenLogprobs;
use lacuna_models::Model;
use serde_json::{Map, Value, json};

/// JSON has no infinity; this is what OpenAI sends for a token that cannot come.
const IMPOSSIBLE: f32 = -9999.0;

/// A token with its log-probabilities, which the first one of a prompt has none of.
#[derive(Debug, Clone)]
pub(crate) struct Scored {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// The form of chats: an object per token.
pub(crate) fn for_chat(model: &Model, scored: &[Scored]) -> Value {
    let scored = scored.iter();
    let scored = scored.filter_map(|scored| Some((scored.token, scored.logprobs.as_ref()?)));
    let content: Vec<Value> = scored
        .map(|(token, logprobs)| {
            let mut entry = chat_entry(model, token, logprobs.chosen);
            let top = logprobs.top.iter();
            entry["top_logprobs"] = top
                .map(|&(token, logprob)| chat_entry(model, token, logprob))
                .collect();
            entry
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// The form of completions: lists side by side. Every token is listed among the likeliest ones of
/// its place, be it one of them or not. `offset` is the character of the reply at which the
/// first token's text begins; the next one is returned with it.
pub(crate) fn for_text(model: &Model, scored: &[Scored], offset: usize) -> (Value, usize) {
    let mut at = offset;
    let (mut tokens, mut offsets) = (Vec::new(), Vec::new());
    let (mut chosen, mut tops) = (Vec::new(), Vec::new());
    for Scored { token, logprobs } in scored {
        let name = text(model, *token);
        offsets.push(at);
        at += name.chars().count();
        tokens.push(name);
        chosen.push(logprobs.as_ref().map(|logprobs| finite(logprobs.chosen)));
        tops.push(logprobs.as_ref().map(|logprobs| {
            let own = (*token, logprobs.chosen);
            let listed = logprobs.top.iter().copied().chain([own]);
            listed
                .map(|(token, logprob)| (text(model, token), finite(logprob).into()))
                .collect::<Map<String, Value>>()
        }));
    }
    let lists = json!({
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": tops,
        "text_offset": offsets,
    });
    (lists, at)
}

/// The form that vLLM has for prompts: for each token, what it and the likeliest ones in its place
/// are, by their ids. `top` is the number of those that are listed.
pub(crate) fn for_prompt(model: &Model, scored: &[Scored], top: usize) -> Value {
    let entry = |token: u32, logprob: f32, rank: usize| {
        let entry = json!({
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": text(model, token),
        });
        (token.to_string(), entry)
    };
    let tokens = scored.iter().map(|scored| {
        let Some(logprobs) = &scored.logprobs else {
            return Value::Null;
        };
        let likeliest = logprobs.top.iter().take(top).zip(1..);
        let mut listed: Map<String, Value> = likeliest
            .map(|(&(token, logprob), rank)| entry(token, logprob, rank))
            .collect();
        listed.extend([entry(scored.token, logprobs.chosen, logprobs.rank)]);
        Value::Object(listed)
    });
    tokens.collect()
}

fn chat_entry(model: &Model, token: u32, logprob: f32) -> Value {
    json!({
        "token": text(model, token),
        "logprob": finite(logprob),
        "bytes": bytes(model, token),
    })
}

fn finite(logprob: f32) -> f32 {
    logprob.max(IMPOSSIBLE)
}

fn bytes(model: &Model, token: u32) -> &[u8] {
    model.tokenizer().token_bytes(token).unwrap_or_default()
}

/// A token's text, with U+FFFD where it is a part of a character.
fn text(model: &Model, token: u32) -> String {
    String::from_utf8_lossy(bytes(model, token)).into_owned()
}
