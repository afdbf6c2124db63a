//! Tokenizer files, vocabularies and chat templates made of arbitrary bytes: whatever loads must
//! encode and decode without panicking, and the parts of a decode must be the whole.

#![no_main]

use lacuna_text::template::{Chat, ChatTemplate, Message};
use lacuna_text::tokenizer::{
    Decode, GgufVocabulary, HuggingFaceFiles, Special, TextStream, Tokenizer,
};
use libfuzzer_sys::fuzz_target;

const TEXTS: [&str; 4] =
    ["", "Hello  world\n\n 12345 don't", "<s>日本語é\u{301}</s> <|im_end|>", " \t\u{2581}aaaaaaaa\u{0}"];

fuzz_target!(|data: &[u8]| {
    let Some((mode, rest)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    match mode % 4 {
        0 => json(&text),
        1 => gguf(&text, *mode),
        2 => template(&text),
        _ => settings(&text),
    }
});

fn json(text: &str) {
    let files = HuggingFaceFiles { tokenizer: text, ..HuggingFaceFiles::default() };
    if let Ok(tokenizer) = Tokenizer::from_hugging_face(&files) {
        exercise(&tokenizer);
    }
}

/// Lines of tab-separated fields: text, kind, score, and a merge.
fn gguf(text: &str, mode: u8) {
    let column = |index: usize| text.lines().map(move |line| line.split('\t').nth(index));
    let number = |field: Option<&str>| field.and_then(|field| field.parse::<i64>().ok());
    let special = |index: usize| number(text.lines().next().and_then(|line| line.split('\t').nth(index)));
    let id = |index: usize| special(index).map(|id| id as u32);
    let flag = |bit: u8| (mode & bit != 0).then_some(mode & 64 == 0);
    let vocabulary = GgufVocabulary {
        model: match (mode & 4 == 0, special(7)) {
            (true, _) => "gpt2",
            (false, None) => "llama",
            (false, Some(_)) => "t5",
        },
        character_map: special(7).map(|_| text.as_bytes().to_vec()),
        pre: text.lines().last(),
        tokens: column(0).flatten().collect(),
        token_types: (mode & 8 != 0).then(|| column(1).map(|kind| number(kind).unwrap_or(1) as i32).collect()),
        scores: Some(column(2).map(|score| number(score).unwrap_or(0) as f32).collect()),
        merges: Some(column(3).flatten().collect()),
        bos: id(4),
        eos: id(5),
        unknown: id(6),
        add_bos: flag(16),
        add_eos: flag(32),
        add_space_prefix: flag(128),
        ..GgufVocabulary::default()
    };
    for pre in [vocabulary.pre, None] {
        if let Ok(tokenizer) = Tokenizer::from_gguf(&GgufVocabulary { pre, ..vocabulary.clone() }) {
            exercise(&tokenizer);
        }
    }
}

fn template(source: &str) {
    let messages = [Message::new("system", "Be brief."), Message::new("user", "Hi <b>\"é\"</b>")];
    let chat = Chat { messages: &messages, bos_token: Some("<s>"), ..Chat::default() };
    if let Ok(template) = ChatTemplate::compile(source) {
        let _ = template.render(&chat);
    }
}

/// The smaller files beside a small valid `tokenizer.json`.
fn settings(text: &str) {
    let tokenizer = r#"{"added_tokens":[{"id":3,"content":"</s>","special":true}],
        "decoder":{"type":"ByteLevel"},"pre_tokenizer":{"type":"ByteLevel"},
        "model":{"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}"#;
    let text = Some(text);
    let files = HuggingFaceFiles {
        tokenizer,
        tokenizer_config: text,
        special_tokens_map: text,
        generation_config: text,
        config: text,
        chat_template_jinja: None,
        chat_template_json: text,
    };
    if let Ok(tokenizer) = Tokenizer::from_hugging_face(&files) {
        exercise(&tokenizer);
    }
}

fn exercise(tokenizer: &Tokenizer) {
    let _ = tokenizer.describe();
    for text in TEXTS {
        for special in [Special::NONE, Special::PROMPT, Special::RENDERED] {
            let Ok(ids) = tokenizer.encode(text, special) else { continue };
            decode(tokenizer, &ids);
        }
    }
    let all: Vec<u32> = (0..tokenizer.vocab_size().min(4096)).rev().collect();
    decode(tokenizer, &all);
    for id in all {
        let _ = tokenizer.token_text(id);
    }
}

fn decode(tokenizer: &Tokenizer, ids: &[u32]) {
    for options in [Decode::TEXT, Decode::MARKUP, Decode::CONTINUATION] {
        let whole = tokenizer.decode(ids, options).expect("encoding gives ids of the vocabulary");
        let mut stream = TextStream::new(options);
        let mut parts = String::new();
        for &id in ids {
            parts.push_str(stream.push(tokenizer, id).expect("as above"));
        }
        parts.push_str(stream.finish());
        assert_eq!(parts, whole);
    }
}
