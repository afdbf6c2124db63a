//! Log-probabilities, in the two forms that OpenAI has.

use lacuna_engine::TokenLogprobs;
use lacuna_models::Model;
use serde_json::{Map, Value, json};

/// JSON has no infinity; this is what OpenAI sends for a token that cannot come.
const IMPOSSIBLE: f32 = -9999.0;

/// A generated token with its log-probabilities.
#[derive(Debug, Clone)]
pub(crate) struct Scored {
    pub(crate) token: u32,
    pub(crate) logprobs: TokenLogprobs,
}

/// The form of chats: an object per token.
pub(crate) fn for_chat(model: &Model, scored: &[Scored]) -> Value {
    let content: Vec<Value> = scored
        .iter()
        .map(|scored| {
            let mut entry = chat_entry(model, scored.token, scored.logprobs.chosen);
            let top = scored.logprobs.top.iter();
            entry["top_logprobs"] = top
                .map(|&(token, logprob)| chat_entry(model, token, logprob))
                .collect();
            entry
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// The form of completions: lists side by side. `offset` is the character of the reply at which the
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
        chosen.push(finite(logprobs.chosen));
        let top = logprobs.top.iter();
        let top: Map<String, Value> = top
            .map(|&(token, logprob)| (text(model, token), finite(logprob).into()))
            .collect();
        tops.push(top);
    }
    let lists = json!({
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": tops,
        "text_offset": offsets,
    });
    (lists, at)
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
