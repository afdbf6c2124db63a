//! A vocabulary as large as the largest in common use, with a merge behind every token.
//!
//! `cargo test --release -p lacuna-models --test tokenizer load -- --nocapture` prints the times.

use std::time::{Duration, Instant};

use crate::vocabulary::character;
use lacuna_text::tokenizer::{Decode, GgufVocabulary, HuggingFaceFiles, Special, Tokenizer};

const TOKENS: usize = 151_936;
const CONTROL: usize = 293;

/// Tokens and merges: all bytes, then every word of letters in the order of its length, each merged
/// from its front and its last letter, and the words of three letters with a space in front.
fn vocabulary() -> (Vec<String>, Vec<String>) {
    let mut tokens: Vec<String> = (0..=255).map(|byte| character(byte).to_string()).collect();
    let mut merges = Vec::new();
    let mut fronts: Vec<String> = ('a'..='z').map(String::from).collect();
    while tokens.len() < TOKENS - CONTROL {
        let pairs = fronts
            .iter()
            .flat_map(|front| ('a'..='z').map(move |last| (front.clone(), last.to_string())));
        let mut pairs: Vec<(String, String)> = pairs.collect();
        if fronts[0].len() == 3 {
            pairs.splice(
                0..0,
                fronts.iter().map(|word| ("Ġ".to_owned(), word.clone())),
            );
        }
        pairs.truncate(TOKENS - CONTROL - tokens.len());
        merges.extend(pairs.iter().map(|(left, right)| format!("{left} {right}")));
        fronts = pairs
            .iter()
            .map(|(left, right)| format!("{left}{right}"))
            .collect();
        tokens.extend_from_slice(&fronts);
    }
    tokens.extend((0..CONTROL).map(|index| format!("<|special_{index}|>")));
    (tokens, merges)
}

fn resident_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(text.split(' ').nth(1)?.parse::<usize>().ok()? * 4096)
}

/// What this thread has run for, which on a busy machine is less than what has passed.
fn processor_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split(' ')
        .next()?
        .parse()
        .ok()
        .map(Duration::from_nanos)
}

/// Runs a step and prints what it took.
fn measured<T>(what: &str, step: impl FnOnce() -> T) -> T {
    let before = resident_bytes();
    let (start, processor) = (Instant::now(), processor_time());
    let result = step();
    let taken = start.elapsed();
    let processor = processor_time()
        .zip(processor)
        .map(|(now, then)| now.saturating_sub(then));
    let processor = processor.unwrap_or(taken);
    let grown = resident_bytes()
        .zip(before)
        .map(|(now, before)| now.saturating_sub(before));
    let grown = grown.unwrap_or_default() >> 20;
    println!("{what}: {processor:?} of processor, {taken:?} in all, {grown} MB more resident");
    result
}

fn json(tokens: &[String], merges: &[String]) -> String {
    let words = tokens.len() - CONTROL;
    let vocab: serde_json::Map<String, serde_json::Value> = tokens[..words]
        .iter()
        .enumerate()
        .map(|(id, text)| (text.clone(), id.into()))
        .collect();
    let added: Vec<serde_json::Value> = (words..tokens.len())
        .map(|id| serde_json::json!({"id": id, "content": tokens[id], "special": true}))
        .collect();
    let pairs: Vec<Vec<&str>> = merges
        .iter()
        .map(|merge| merge.split(' ').collect())
        .collect();
    let pre = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    serde_json::json!({
        "added_tokens": added,
        "pre_tokenizer": pre,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": pairs},
    })
    .to_string()
}

#[test]
fn a_vocabulary_of_151936_tokens_loads_from_either_form() {
    let (tokens, merges) = vocabulary();
    let kinds = (0..TOKENS)
        .map(|id| if id < TOKENS - CONTROL { 1 } else { 3 })
        .collect();
    let gguf = GgufVocabulary {
        model: "gpt2",
        pre: Some("gpt-2"),
        tokens: tokens.iter().map(String::as_str).collect(),
        merges: Some(merges.iter().map(String::as_str).collect()),
        token_types: Some(kinds),
        ..GgufVocabulary::default()
    };
    let from_gguf = measured("GGUF vocabulary", || Tokenizer::from_gguf(&gguf)).unwrap();
    let file = json(&tokens, &merges);
    let files = HuggingFaceFiles {
        tokenizer: &file,
        ..HuggingFaceFiles::default()
    };
    let label = format!("tokenizer.json of {} MB", file.len() >> 20);
    let from_json = measured(&label, || Tokenizer::from_hugging_face(&files)).unwrap();
    assert_eq!(from_gguf.vocab_size() as usize, TOKENS);
    assert_eq!(from_json.vocab_size() as usize, TOKENS);

    let text: String = (0..20_000)
        .map(|id| tokens[300 + id * 7].replace('Ġ', " ") + " ")
        .collect();
    let label = format!("encoding {} kB", text.len() >> 10);
    let ids = measured(&label, || from_gguf.encode(&text, Special::NONE)).unwrap();
    assert_eq!(from_json.encode(&text, Special::NONE).unwrap(), ids);
    let label = format!("decoding {} tokens", ids.len());
    let decoded = measured(&label, || from_gguf.decode(&ids, Decode::TEXT)).unwrap();
    assert_eq!(decoded, text);
    for unit in [" ", "\n"] {
        let text = unit.repeat(2 << 20);
        let label = format!("encoding 2 MB of {unit:?}");
        let ids = measured(&label, || from_gguf.encode(&text, Special::NONE));
        // A pattern may give up on so long a word, but never split it wrongly or without an end.
        if let Ok(ids) = ids {
            assert_eq!(from_gguf.decode(&ids, Decode::TEXT).unwrap(), text);
        }
    }
}
