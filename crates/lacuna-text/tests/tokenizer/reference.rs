//! Ids against other implementations: `tokenizers` and `sentencepiece` for Python, and llama.cpp's
//! rules. `reference/README.md` says how the cases were made.

use crate::metadata::{Metadata, reference, reference_text};
use lacuna_text::tokenizer::{
    AddSpecial, Decode, EncodeLimits, HuggingFaceFiles, ParseSpecial, Special, SpecialText,
    TextStart, Tokenizer, TokenizerError, Vocabulary,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Cases {
    pre: Option<String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    plain: Vec<u32>,
    special: Option<Vec<u32>>,
}

fn cases(name: &str) -> Cases {
    serde_json::from_str(&reference_text(&format!("tokenizers/{name}/cases.json"))).unwrap()
}

fn strings() -> Vec<String> {
    serde_json::from_str(&reference_text("tokenizers/strings.json")).unwrap()
}

fn special(parse: ParseSpecial) -> Special {
    Special {
        add: AddSpecial::No,
        parse,
    }
}

/// Compares every string of the reference and decodes what was encoded.
fn check(name: &str, tokenizer: &Tokenizer) {
    let cases = cases(name);
    let strings = strings();
    assert_eq!(strings.len(), cases.cases.len());
    let show = Decode {
        special: SpecialText::Show,
        start: TextStart::Beginning,
    };
    for (text, case) in strings.iter().zip(&cases.cases) {
        let plain = tokenizer.encode(text, special(ParseSpecial::No)).unwrap();
        assert_eq!(plain, case.plain, "{name}: plain {text:?}");
        let parsed = tokenizer.encode(text, special(ParseSpecial::Yes)).unwrap();
        assert_eq!(
            &parsed,
            case.special.as_ref().unwrap_or(&case.plain),
            "{name}: special {text:?}"
        );
        assert_eq!(&tokenizer.decode(&plain, show).unwrap(), text, "{name}");
    }
}

fn byte_level(name: &str, file: &str) -> Tokenizer {
    let metadata = Metadata::read(file);
    let mut vocabulary = metadata.vocabulary();
    let pre = cases(name).pre;
    vocabulary.pre = pre.as_deref();
    Tokenizer::from_gguf(&vocabulary).unwrap()
}

#[test]
fn every_pre_tokenizer_of_the_reference_agrees_from_gguf() {
    let mut checked = 0;
    for entry in std::fs::read_dir(reference("tokenizers")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let is_folder = reference("tokenizers").join(&name).is_dir();
        if is_folder && cases(&name).pre.is_some() {
            check(&name, &byte_level(&name, "tokenizers/gpt-2/vocab.gguf"));
            checked += 1;
        }
    }
    assert!(
        checked >= 10,
        "only {checked} pre-tokenizers in the reference"
    );
}

#[test]
fn gguf_files_agree_as_they_are() {
    for name in [
        "gpt-2",
        "qwen2",
        "llama-bpe",
        "default",
        "llama-spm",
        "gemma4",
    ] {
        let metadata = Metadata::read(&format!("tokenizers/{name}/vocab.gguf"));
        check(name, &Tokenizer::from_gguf(&metadata.vocabulary()).unwrap());
    }
}

/// Files of Sarvam and of a large Granite embedding model say GPT-2's kind and another rule for words, which was unknown.
#[test]
fn plain_characters_are_merged_where_only_the_rule_says_so() {
    let metadata = Metadata::read("tokenizers/gemma4/vocab.gguf");
    for pre in ["gemma4", "sarvam-moe", "granite-embed-multi-311m"] {
        let mut vocabulary = metadata.vocabulary();
        (vocabulary.model, vocabulary.pre) = ("gpt2", Some(pre));
        check("gemma4", &Tokenizer::from_gguf(&vocabulary).unwrap());
        vocabulary.add_bos = None;
        let tokenizer = Tokenizer::from_gguf(&vocabulary).unwrap();
        let plain = tokenizer.encode("Hello", Special::NONE).unwrap();
        let prompt = tokenizer.encode("Hello", Special::PROMPT).unwrap();
        assert_eq!(
            prompt, plain,
            "{pre}: nothing in front unless the file says so"
        );
    }
}

#[test]
fn tokenizer_json_agrees() {
    for name in ["gpt-2", "qwen2", "llama-bpe", "llama-spm", "gemma4"] {
        let text = reference_text(&format!("tokenizers/{name}/tokenizer.json"));
        let files = HuggingFaceFiles {
            tokenizer: &text,
            ..HuggingFaceFiles::default()
        };
        check(name, &Tokenizer::from_hugging_face(&files).unwrap());
    }
}

#[test]
fn vocabularies_of_folders_are_the_same_in_gguf() {
    for name in ["gpt-2", "qwen2", "llama-bpe", "llama-spm"] {
        let folder = reference(&format!("tokenizers/{name}"));
        let made = Vocabulary::from_folder(&folder, "llama", 0).unwrap();
        let metadata = Metadata::read(&format!("tokenizers/{name}/vocab.gguf"));
        let expected = metadata.vocabulary();
        let found = made.as_gguf();
        assert_eq!(found.model, expected.model, "{name}");
        assert_eq!(found.pre, expected.pre, "{name}");
        assert_eq!(found.tokens, expected.tokens, "{name}");
        assert_eq!(found.token_types, expected.token_types, "{name}");
        assert_eq!(found.merges, expected.merges, "{name}");
        check(name, &Tokenizer::from_gguf(&found).unwrap());
    }
}

#[test]
fn a_vocabulary_has_a_token_for_every_row_of_embeddings() {
    let folder = reference("tokenizers/qwen2");
    let own = Vocabulary::from_folder(&folder, "llama", 0).unwrap();
    let rows = own.tokens.len() + 3;
    let padded = Vocabulary::from_folder(&folder, "llama", rows).unwrap();
    assert_eq!(padded.tokens.len(), rows);
    assert_eq!(padded.tokens[rows - 1], format!("[PAD{}]", rows - 1));
    assert_eq!(&padded.tokens[..rows - 3], own.tokens);
}

#[test]
fn of_several_chat_templates_gguf_has_the_one_that_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write(
        "tokenizer.json",
        &reference_text("tokenizers/qwen2/tokenizer.json"),
    );
    let config = r#"{"chat_template": [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]}"#;
    write("tokenizer_config.json", config);
    let made = Vocabulary::from_folder(folder.path(), "llama", 0).unwrap();
    assert_eq!(made.chat_template.as_deref(), Some("b"));
}

/// No text with special tokens was tried, so those that files make others of went unnoticed.
#[test]
fn special_tokens_that_gguf_would_read_otherwise_are_no_vocabulary_of_it() {
    let folder = tempfile::tempdir().unwrap();
    for (name, behaviour, fits) in [
        ("qwen2", "single_word", false),
        // What takes the white space beside it is the same token.
        ("qwen2", "rstrip", true),
        ("llama-spm", "rstrip", true),
    ] {
        let text = reference_text(&format!("tokenizers/{name}/tokenizer.json"));
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        for token in json["added_tokens"].as_array_mut().unwrap() {
            let plain = ["<unk>", "<s>", "<|endoftext|>"].map(|it| token["content"] == *it);
            token[behaviour] = (!plain.contains(&true)).into();
        }
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        let made = Vocabulary::from_folder(folder.path(), "llama", 0);
        match made {
            Ok(_) => assert!(fits, "{name} with {behaviour}"),
            Err(error) => {
                let message = error.to_string();
                assert!(
                    !fits && message.contains("special tokens"),
                    "{name}: {message}"
                );
            }
        }
    }
}

#[test]
fn what_gguf_has_no_form_for_is_an_error_that_names_the_part() {
    let folder = tempfile::tempdir().unwrap();
    let text = reference_text("tokenizers/qwen2/tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["pre_tokenizer"] = serde_json::json!({"type": "Whitespace"});
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let error = Vocabulary::from_folder(folder.path(), "llama", 0).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("rule of cutting texts into words"),
        "{message}"
    );
    let error = Vocabulary::from_folder(&reference("tokenizers/word-piece"), "llama", 0);
    let message = error.unwrap_err().to_string();
    assert!(message.contains("algorithm"), "{message}");
}

#[test]
fn word_pieces_of_long_texts_take_no_more_memory_than_those_of_short_ones() {
    let metadata = Metadata::read("tokenizers/word-piece/vocab.gguf");
    let tokenizer = Tokenizer::from_gguf(&metadata.vocabulary()).unwrap();
    let (strings, cases) = (strings(), cases("word-piece").cases);
    let limits = EncodeLimits {
        workspace_bytes: 4 << 20,
        ..EncodeLimits::default()
    };
    let times = 200_000 / strings.iter().map(String::len).sum::<usize>() + 1;
    let (mut long, mut expected) = (String::new(), Vec::new());
    for (text, case) in strings.iter().zip(&cases).cycle().take(times * cases.len()) {
        long.push_str(text);
        long.push('\n');
        expected.extend_from_slice(&case.plain);
    }
    let ids = tokenizer.encode_within(&long, Special::NONE, &limits);
    assert!(ids.unwrap() == expected, "cut at white space");
    let error = tokenizer.encode_within(&"a".repeat(20_000), Special::NONE, &limits);
    assert!(matches!(error, Err(TokenizerError::Unbroken { .. })));
}

#[test]
fn word_pieces_agree_from_either_file_and_are_put_between_their_tokens() {
    let metadata = Metadata::read("tokenizers/word-piece/vocab.gguf");
    let text = reference_text("tokenizers/word-piece/tokenizer.json");
    let files = HuggingFaceFiles {
        tokenizer: &text,
        ..HuggingFaceFiles::default()
    };
    let from_gguf = Tokenizer::from_gguf(&metadata.vocabulary()).unwrap();
    let from_json = Tokenizer::from_hugging_face(&files).unwrap();
    let cases = cases("word-piece").cases;
    assert_eq!(strings().len(), cases.len());
    for tokenizer in [&from_gguf, &from_json] {
        let id = |name: &str| tokenizer.id(name).unwrap();
        for (text, case) in strings().iter().zip(&cases) {
            let plain = tokenizer.encode(text, Special::NONE).unwrap();
            assert_eq!(plain, case.plain, "{text:?}");
            let around = tokenizer.encode(text, Special::PROMPT).unwrap();
            let expected = [&[id("[CLS]")], &plain[..], &[id("[SEP]")]].concat();
            assert_eq!(around, expected, "{text:?}");
        }
        if std::ptr::eq(tokenizer, &from_gguf) {
            let joined = tokenizer.encode_pair("river", "deep", &EncodeLimits::default());
            let [river, deep] =
                ["river", "deep"].map(|it| tokenizer.encode(it, Special::NONE).unwrap());
            let (cls, sep) = ([id("[CLS]")], [id("[SEP]")]);
            let expected = [&cls[..], &river, &sep, &deep, &sep].concat();
            assert_eq!(joined.unwrap(), (expected, 2 + river.len()));
        }
        let named = "[CLS] hello [MASK]";
        let plain = tokenizer.encode(named, Special::NONE).unwrap();
        let special = [id("[CLS]"), id("[MASK]")];
        assert!(!plain.iter().any(|id| special.contains(id)), "{plain:?}");
        let parsed = tokenizer.encode(named, Special::RENDERED).unwrap();
        assert_eq!(
            (parsed.first(), parsed.last()),
            (Some(&special[0]), Some(&special[1]))
        );
        let river = tokenizer.encode("The RIVER rüns.", Special::NONE).unwrap();
        assert_eq!(
            tokenizer.decode(&river, Decode::TEXT).unwrap(),
            "the river runs ."
        );
    }
    for id in 0..from_gguf.vocab_size() {
        assert_eq!(from_gguf.token_text(id), from_json.token_text(id), "{id}");
    }
}

#[derive(Deserialize)]
struct UnigramCases {
    /// Ids of two texts given as one.
    pair: Vec<u32>,
    cases: Vec<UnigramCase>,
}

#[derive(Deserialize)]
struct UnigramCase {
    text: String,
    plain: Vec<u32>,
}

#[test]
fn unigrams_agree_from_either_file_and_join_two_texts() {
    let metadata = Metadata::read("tokenizers/unigram/vocab.gguf");
    let text = reference_text("tokenizers/unigram/tokenizer.json");
    let files = HuggingFaceFiles {
        tokenizer: &text,
        ..HuggingFaceFiles::default()
    };
    let from_gguf = Tokenizer::from_gguf(&metadata.vocabulary()).unwrap();
    let from_json = Tokenizer::from_hugging_face(&files).unwrap();
    let cases = reference_text("tokenizers/unigram/cases.json");
    let cases: UnigramCases = serde_json::from_str(&cases).unwrap();
    for tokenizer in [&from_gguf, &from_json] {
        for UnigramCase { text, plain } in &cases.cases {
            let found = tokenizer.encode(text, Special::NONE).unwrap();
            assert_eq!(found, *plain, "{text:?}");
            let around = tokenizer.encode(text, Special::PROMPT).unwrap();
            assert_eq!(around, [&[0], &plain[..], &[2]].concat(), "{text:?}");
        }
        let limits = EncodeLimits::default();
        let (pair, second) = tokenizer.encode_pair("one, two", "three", &limits).unwrap();
        assert_eq!(pair, cases.pair);
        let three = tokenizer.encode("three", Special::NONE).unwrap();
        assert_eq!(pair[second..pair.len() - 1], three);
        let named = tokenizer.encode("<s> one <mask>", Special::NONE).unwrap();
        let special = ["<s>", "<mask>"].map(|name| tokenizer.id(name).unwrap());
        assert!(!named.iter().any(|id| special.contains(id)), "{named:?}");
        let parsed = tokenizer
            .encode("<s> one <mask>", Special::RENDERED)
            .unwrap();
        assert_eq!(parsed.first(), Some(&0));
        let decoded = tokenizer.encode("The river runs.", Special::NONE).unwrap();
        assert_eq!(
            tokenizer.decode(&decoded, Decode::TEXT).unwrap(),
            "The river runs."
        );
    }
    for id in 0..from_gguf.vocab_size() {
        assert_eq!(from_gguf.token_text(id), from_json.token_text(id), "{id}");
    }
}

/// 262,144 pieces, of which runs of spaces and of line breaks are never split, and no space in front.
#[test]
#[ignore = "needs Gemma 3: run .ci/fetch-models"]
fn the_vocabulary_of_gemma_3_agrees_with_sentencepiece() {
    let model = "../target/models/gemma-3-270m-q4_k_m.gguf";
    let metadata = Metadata::read(model);
    let vocabulary = metadata.vocabulary();
    let start = std::time::Instant::now();
    let tokenizer = Tokenizer::from_gguf(&vocabulary).unwrap();
    println!("built in {:?}", start.elapsed());
    assert_eq!(tokenizer.vocab_size(), 262_144);
    check("gemma3", &tokenizer);
    let prompt = tokenizer.encode("Hello", Special::PROMPT).unwrap();
    let plain = tokenizer.encode("Hello", Special::NONE).unwrap();
    assert_eq!(prompt.split_first(), Some((&2, &plain[..])));
}

#[test]
fn a_token_that_gemma_4_shows_is_found_in_any_text() {
    let metadata = Metadata::read("tokenizers/gemma4/vocab.gguf");
    let tokenizer = Tokenizer::from_gguf(&metadata.vocabulary()).unwrap();
    let channel = tokenizer.id("<|channel>").unwrap();
    let turn = tokenizer.id("<|turn>").unwrap();
    let ids = tokenizer
        .encode("<|channel><|turn>", special(ParseSpecial::No))
        .unwrap();
    assert!(
        ids[0] == channel && !ids.contains(&turn),
        "{ids:?}: a control token is found on request alone"
    );
    assert_eq!(
        tokenizer.decode(&ids, Decode::TEXT).unwrap(),
        "<|channel><|turn>"
    );
    assert!(tokenizer.is_end_of_generation(tokenizer.id("<turn|>").unwrap()));
}

/// Under byte fallback each character may become several tokens, so that a long line used to be
/// merged whole, or refused where memory for that is short.
#[test]
fn a_long_line_is_merged_in_parts_where_characters_fall_back_to_bytes() {
    let metadata = Metadata::read("tokenizers/gemma4/vocab.gguf");
    let text = reference_text("tokenizers/gemma4/tokenizer.json");
    let files = HuggingFaceFiles {
        tokenizer: &text,
        ..HuggingFaceFiles::default()
    };
    let line = "The river runs \u{1F600}slowly past \u{4F60}\u{597D} the mill; ".repeat(2_000);
    let limits = EncodeLimits {
        workspace_bytes: 4 << 20,
        ..EncodeLimits::default()
    };
    for tokenizer in [
        Tokenizer::from_gguf(&metadata.vocabulary()).unwrap(),
        Tokenizer::from_hugging_face(&files).unwrap(),
    ] {
        let whole = tokenizer.encode(&line, Special::NONE).unwrap();
        let bounded = tokenizer
            .encode_within(&line, Special::NONE, &limits)
            .unwrap();
        assert_eq!(whole, bounded);
        assert_eq!(tokenizer.decode(&whole, Decode::TEXT).unwrap(), line);
    }
}

#[test]
fn a_folder_and_its_gguf_file_agree_about_everything() {
    for model in ["qwen3", "llama2", "llama3"] {
        let folder = Tokenizer::from_folder(&reference(model).join("hf")).unwrap();
        let metadata = Metadata::read(&format!("{model}/model.gguf"));
        let file = Tokenizer::from_gguf(&metadata.vocabulary()).unwrap();
        assert_eq!(folder.vocab_size(), file.vocab_size(), "{model}");
        assert_eq!(folder.eos(), file.eos(), "{model}");
        for text in strings() {
            let ids = folder.encode(&text, Special::PROMPT).unwrap();
            assert_eq!(
                ids,
                file.encode(&text, Special::PROMPT).unwrap(),
                "{model}: {text:?}"
            );
        }
        for id in 0..folder.vocab_size() {
            let texts = (folder.token_text(id), file.token_text(id));
            assert_eq!(texts.0, texts.1, "{model}: {id}");
            assert_eq!(folder.id(&texts.0.unwrap()), Some(id), "{model}: {id}");
        }
    }
}
