//! Encoding word by word comes to what encoding a text as a whole comes to, and keeps within limits.

use crate::vocabulary::{byte_level, character, sentencepiece};
use lacuna_text::tokenizer::{
    EncodeLimits, GgufVocabulary, HuggingFaceFiles, Special, Tokenizer, TokenizerError,
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A `tokenizer.json` over the bytes and some merges, with the given members.
fn file(members: Value) -> String {
    let mut vocab: Vec<String> = (0..=255u8)
        .map(|byte| character(byte).to_string())
        .collect();
    let mut merges = Vec::new();
    for (left, right) in [
        ("a", "b"),
        ("ab", "ab"),
        ("Ġ", "a"),
        ("Ġ", "Ġ"),
        ("ĠĠ", "ĠĠ"),
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("1", "2"),
        ("Ã", "©"),
        ("â", "ĸ"),
        ("âĸ", "ģ"),
    ] {
        vocab.push(format!("{left}{right}"));
        merges.push(format!("{left} {right}"));
    }
    let vocab: serde_json::Map<String, Value> = vocab
        .into_iter()
        .zip(0..)
        .map(|(text, id)| (text, json!(id)))
        .collect();
    let mut file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        // The library numbers them on from the vocabulary, whatever the file says.
        "added_tokens": [
            token(268, "<s>", json!({"special": true})),
            token(269, "<left>", json!({"special": true, "lstrip": true})),
            token(270, "<right>", json!({"special": true, "rstrip": true})),
            token(271, "word", json!({"single_word": true})),
            token(272, "the É", json!({"normalized": true})),
            token(273, "<s>ab", json!({})),
        ],
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": merges,
        },
    });
    for (key, value) in members.as_object().into_iter().flatten() {
        match key.as_str() {
            "ignore_merges" => file["model"][key] = value.clone(),
            _ => file[key] = value.clone(),
        }
    }
    file.to_string()
}

fn token(id: u32, content: &str, more: Value) -> Value {
    let mut token = json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": false,
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        token[key] = value.clone();
    }
    token
}

fn byte_level_step(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex})
}

fn split(pattern: Value, behavior: &str, invert: bool) -> Value {
    json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert})
}

/// Files that reach every way through the encoder.
fn files() -> Vec<String> {
    let sequence = |steps: Vec<Value>| json!({"type": "Sequence", "pretokenizers": steps});
    let words = json!({"Regex": r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"});
    let spaces = json!({"Regex": r"\s+"});
    let mut all = vec![
        json!({"pre_tokenizer": byte_level_step(true)}),
        json!({"pre_tokenizer": byte_level_step(false)}),
        json!({"pre_tokenizer": byte_level_step(true), "ignore_merges": true}),
        json!({"pre_tokenizer": byte_level_step(true), "normalizer": {"type": "NFC"}}),
        json!({"pre_tokenizer": byte_level_step(true), "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        ]}}),
        json!({"pre_tokenizer": byte_level_step(true), "normalizer": {"type": "Strip", "strip_left": true, "strip_right": true}}),
        json!({"pre_tokenizer": sequence(vec![
            json!({"type": "Digits", "individual_digits": true}), byte_level_step(true),
        ])}),
        json!({"pre_tokenizer": sequence(vec![
            json!({"type": "Digits", "individual_digits": false}), byte_level_step(true),
        ])}),
        // With rules that know where in the text they are.
        json!({"pre_tokenizer": sequence(vec![
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}),
            byte_level_step(false),
        ])}),
        json!({"pre_tokenizer": sequence(vec![
            json!({"type": "Punctuation", "behavior": "Isolated"}), byte_level_step(true),
        ]), "normalizer": {"type": "NFD"}}),
        json!({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true}}),
    ];
    for behavior in [
        "Isolated",
        "Removed",
        "Contiguous",
        "MergedWithPrevious",
        "MergedWithNext",
    ] {
        for (pattern, invert) in [
            (&words, false),
            (&spaces, false),
            (&words, true),
            (&spaces, true),
        ] {
            let steps = vec![
                split(pattern.clone(), behavior, invert),
                byte_level_step(false),
            ];
            all.push(json!({"pre_tokenizer": sequence(steps)}));
        }
    }
    all.into_iter().map(file).collect()
}

fn ours(file: &str) -> Tokenizer {
    Tokenizer::from_hugging_face(&HuggingFaceFiles {
        tokenizer: file,
        ..HuggingFaceFiles::default()
    })
    .unwrap()
}

fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[ab]{1,40}",
        "[a-e ]{0,20}",
        Just("the word, the É <s>ab words".to_owned()),
        Just(" <left> <right>  ".to_owned()),
        Just("\n <left><s>".to_owned()),
        Just("e\u{301}\u{327} É".to_owned()),
        Just("121 12".to_owned()),
        "\\PC{0,12}",
        "[\\s]{1,6}",
        // Longer than what is merged at once.
        Just("ab1ba".repeat(1_100)),
        Just("abc ".repeat(1_100)),
        Just("abab-é".repeat(900)),
    ];
    prop::collection::vec(part, 0..10).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn byte_pair_encoding_word_by_word_is_what_the_library_has_for_the_whole(text in text()) {
        for file in files() {
            let library: tokenizers::Tokenizer = file.parse().unwrap();
            let expected = library.encode_fast(text.as_str(), false).unwrap();
            let found = ours(&file).encode(&text, Special::RENDERED).unwrap();
            prop_assert_eq!(&found[..], expected.get_ids(), "{:.300}", &file);
        }
    }

    #[test]
    fn limits_never_change_what_is_encoded(text in text(), tokens in 0usize..4_000) {
        let words = byte_level(&["ab", "abab", "the", "\u{120}the"]);
        let pieces = sentencepiece(&[("\u{2581}", -9.0), ("a", -9.0), ("b", -9.0), ("ab", -1.0), ("\u{2581}ab", -0.5)]);
        for tokenizer in [Tokenizer::from_gguf(&words.gguf()).unwrap(), Tokenizer::from_gguf(&pieces.gguf()).unwrap()] {
            let whole = tokenizer.encode(&text, Special::PROMPT).unwrap();
            let limits = EncodeLimits { tokens, workspace_bytes: 64 << 20 };
            match tokenizer.encode_within(&text, Special::PROMPT, &limits) {
                Ok(ids) => prop_assert_eq!(ids, whole),
                Err(TokenizerError::TooLong { .. } | TokenizerError::TooManyTokens { .. }) => {
                    prop_assert!(whole.len() > tokens, "{} tokens fit {}", whole.len(), tokens);
                }
                Err(error) => prop_assert!(false, "{}", error),
            }
        }
    }
}

/// A text of as many tokens as may be, each the longest there is, is the longest that is let through.
#[test]
fn a_text_that_cannot_fit_is_refused_by_its_length() {
    let words = byte_level(&["ab", "abab"]);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    // The longest token is <|im_end|>.
    assert_eq!(tokenizer.most_text_bytes(100), Some(1000));
    let limits = EncodeLimits {
        tokens: 100,
        ..EncodeLimits::default()
    };
    let longest = "<|im_end|>".repeat(100);
    let ids = tokenizer
        .encode_within(&longest, Special::RENDERED, &limits)
        .unwrap();
    assert_eq!(ids.len(), 100);
    let error = tokenizer.encode_within(&(longest + "a"), Special::RENDERED, &limits);
    assert!(matches!(
        error,
        Err(TokenizerError::TooLong {
            bytes: 1001,
            limit: 1000,
            tokens: 100
        })
    ));
    let error = tokenizer.encode_within(&"abab".repeat(101), Special::RENDERED, &limits);
    assert!(matches!(
        error,
        Err(TokenizerError::TooManyTokens { limit: 100 })
    ));
}

#[test]
fn nothing_is_said_of_a_texts_length_where_white_space_may_vanish() {
    for (members, most) in [
        (json!({"added_tokens": []}), Some(120)),
        (
            json!({"added_tokens": [], "normalizer": {"type": "NFC"}}),
            Some(480),
        ),
        (
            json!({"added_tokens": [], "normalizer": {"type": "Strip", "strip_left": true, "strip_right": true}}),
            None,
        ),
        (
            json!({"added_tokens": [token(300, "<s>", json!({"rstrip": true}))]}),
            None,
        ),
        (
            json!({"added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}),
            None,
        ),
        (
            json!({"added_tokens": [], "pre_tokenizer": split(json!({"String": " "}), "Removed", false)}),
            None,
        ),
    ] {
        let tokenizer = ours(&file(members.clone()));
        assert_eq!(
            tokenizer.most_text_bytes(10),
            most.map(|most| most / 3),
            "{members}"
        );
    }
}

#[test]
fn what_has_no_break_takes_no_more_memory_than_may_be() {
    let words = byte_level(&["ab", "abab"]);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    let limits = EncodeLimits {
        workspace_bytes: 1 << 20,
        ..EncodeLimits::default()
    };
    // One word, which merges as a whole.
    let error = tokenizer.encode_within(&"ab".repeat(4_000), Special::NONE, &limits);
    assert!(
        matches!(error, Err(TokenizerError::Unbroken { bytes: 8_000, .. })),
        "{error:?}"
    );
    // One word too, but no token has `bc` in it.
    let ids = tokenizer
        .encode_within(&"abc".repeat(4_000), Special::NONE, &limits)
        .unwrap();
    assert_eq!(
        ids,
        tokenizer
            .encode(&"abc".repeat(4_000), Special::NONE)
            .unwrap()
    );
    // Words of which each is looked up whole merge as wholes.
    let gguf = GgufVocabulary {
        pre: Some("llama-bpe"),
        ..words.gguf()
    };
    let whole = Tokenizer::from_gguf(&gguf).unwrap();
    let error = whole.encode_within(&"abc".repeat(4_000), Special::NONE, &limits);
    assert!(
        matches!(error, Err(TokenizerError::Unbroken { .. })),
        "{error:?}"
    );
}

/// Thirty steps that each double a text took 22 GB for one of a few bytes.
#[test]
fn a_file_whose_steps_double_a_text_is_stopped_at_the_step_that_goes_too_far() {
    let double = |step: &Value| vec![step.clone(); 30];
    let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let with_regex = json!({"type": "Replace", "pattern": {"Regex": "a"}, "content": "aa"});
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let normalizers = |steps| json!({"type": "Sequence", "normalizers": steps});
    let pre_tokenizers = |steps| json!({"type": "Sequence", "pretokenizers": steps});
    for (members, named) in [
        (
            json!({"normalizer": normalizers(double(&replace))}),
            "Replace",
        ),
        (
            json!({"normalizer": normalizers(double(&with_regex))}),
            "Replace",
        ),
        (
            json!({"normalizer": normalizers(double(&replace)), "pre_tokenizer": metaspace}),
            "Replace",
        ),
        (
            json!({"normalizer": {"type": "Prepend", "prepend": "a".repeat(100_000)}}),
            "Prepend",
        ),
        (
            json!({"pre_tokenizer": pre_tokenizers(double(&byte_level_step(false)))}),
            "ByteLevel",
        ),
        (
            json!({"pre_tokenizer": pre_tokenizers([vec![metaspace], double(&byte_level_step(false))].concat())}),
            "ByteLevel",
        ),
    ] {
        let mut members = members;
        members["added_tokens"] = json!([]);
        let tokenizer = ours(&file(members));
        let error = tokenizer.encode("é aaa", Special::NONE).unwrap_err();
        assert!(matches!(error, TokenizerError::Growth { .. }), "{error}");
        assert!(error.to_string().contains(named), "{error}");
    }
    // The tokens of the file are normalized when it is read.
    let file = file(json!({"normalizer": normalizers(double(&replace))}))
        .replace("the É", &"a".repeat(1_000));
    let files = HuggingFaceFiles {
        tokenizer: &file,
        ..HuggingFaceFiles::default()
    };
    let error = Tokenizer::from_hugging_face(&files).unwrap_err();
    assert!(matches!(error, TokenizerError::Growth { .. }), "{error}");
}

/// To open a pipe is to wait for whoever writes to it.
#[cfg(unix)]
#[test]
fn a_pipe_or_a_device_in_place_of_a_small_file_is_refused_and_not_waited_for() {
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "config.json",
        "chat_template.jinja",
        "chat_template.json",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = file(json!({}));
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
        let path = folder.path().join(name);
        std::fs::remove_file(&path).ok();
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let error = Tokenizer::from_folder(folder.path()).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let error = Tokenizer::from_folder(folder.path()).unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }
}
