//! What tokenizers do, on vocabularies small enough to follow by hand.

use crate::vocabulary::{byte_level, character, sentencepiece};
use lacuna_text::tokenizer::{
    AddSpecial, Decode, GgufVocabulary, HuggingFaceFiles, ParseSpecial, Special, TextStream,
    TokenKind, Tokenizer, TokenizerError, VocabularyError, known_pre_tokenizers,
};
use proptest::prelude::*;

fn ids_as_text(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text, Special::NONE).unwrap();
    ids.into_iter()
        .map(|id| tokenizer.token_text(id).unwrap())
        .collect()
}

fn json(file: &str) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_hugging_face(&HuggingFaceFiles {
        tokenizer: file,
        ..HuggingFaceFiles::default()
    })
}

/// A `tokenizer.json` over the letters `a` to `d` with the given further members.
fn file_with(members: &str) -> String {
    format!(
        r#"{{"decoder":{{"type":"ByteLevel"}},"added_tokens":[
            {{"id":9,"content":"</s>","special":true}}, {{"id":7,"content":"<tool>","special":false}}],
            "model":{{"type":"BPE","vocab":{{"a":0,"b":1,"c":2,"d":3,"ab":4}},"merges":["a b"]}}{members}}}"#
    )
}

#[test]
fn special_tokens_are_found_only_on_request() {
    let words = byte_level(&["hi", "<", "|", "im", "_end", ">"]);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    let end = tokenizer.id("<|im_end|>").unwrap();
    let found = tokenizer.encode("a<|im_end|>b", Special::RENDERED).unwrap();
    assert_eq!(found.iter().filter(|id| **id == end).count(), 1);
    let plain = tokenizer.encode("a<|im_end|>b", Special::NONE).unwrap();
    assert!(!plain.contains(&end));
    assert_eq!(
        tokenizer.decode(&plain, Decode::TEXT).unwrap(),
        "a<|im_end|>b"
    );
    assert_eq!(tokenizer.decode(&found, Decode::TEXT).unwrap(), "ab");
    assert_eq!(
        tokenizer.decode(&found, Decode::MARKUP).unwrap(),
        "a<|im_end|>b"
    );
}

#[test]
fn a_word_spelled_like_a_control_token_stays_text_where_words_are_looked_up_whole() {
    let mut words = byte_level(&[]);
    let evil = words.add("evil", 3);
    let mut gguf = words.gguf();
    gguf.pre = Some("llama-bpe");
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    assert!(
        !tokenizer
            .encode("evil", Special::NONE)
            .unwrap()
            .contains(&evil)
    );
    assert_eq!(tokenizer.encode("evil", Special::RENDERED).unwrap(), [evil]);
}

#[test]
fn user_defined_tokens_are_always_found_and_always_shown() {
    let mut words = byte_level(&[]);
    let tool = words.add("<tool>", 4);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    assert!(
        tokenizer
            .encode("x<tool>", Special::NONE)
            .unwrap()
            .contains(&tool)
    );
    assert_eq!(tokenizer.decode(&[tool], Decode::TEXT).unwrap(), "<tool>");
}

#[test]
fn beginnings_and_ends_are_added_as_the_file_says() {
    let words = byte_level(&[]);
    let end = words.id("<|im_end|>");
    let encode = |gguf: &GgufVocabulary| {
        Tokenizer::from_gguf(gguf)
            .unwrap()
            .encode("", Special::PROMPT)
            .unwrap()
    };
    let base = GgufVocabulary {
        bos: Some(end),
        eos: Some(end),
        ..words.gguf()
    };
    assert!(
        encode(&base).is_empty(),
        "byte-level vocabularies add nothing unless told to"
    );
    let told = GgufVocabulary {
        add_bos: Some(true),
        add_eos: Some(true),
        ..base.clone()
    };
    assert_eq!(encode(&told), [end, end]);
    let llama = GgufVocabulary {
        pre: Some("llama-bpe"),
        ..base.clone()
    };
    assert_eq!(encode(&llama), [end]);
    assert!(
        encode(&GgufVocabulary {
            add_bos: Some(false),
            ..llama
        })
        .is_empty()
    );
    let unnamed = GgufVocabulary {
        bos: None,
        add_bos: Some(true),
        ..base
    };
    let error = Tokenizer::from_gguf(&unnamed).unwrap_err();
    assert!(error.to_string().contains("add_bos_token"), "{error}");
}

#[test]
fn a_sentencepiece_vocabulary_adds_its_beginning_by_default() {
    let words = sentencepiece(&[("▁", -1.0)]);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    assert_eq!(tokenizer.encode("", Special::PROMPT).unwrap(), [1]);
    assert!(tokenizer.encode("", Special::NONE).unwrap().is_empty());
}

#[test]
fn sentencepiece_merges_the_best_score_first_and_the_leftmost_among_equals() {
    let words = sentencepiece(&[
        ("▁", -9.0),
        ("a", -9.0),
        ("b", -9.0),
        ("ab", -3.0),
        ("bab", -1.0),
        ("aa", -2.0),
        ("▁▁", -4.0),
        ("▁▁▁", -5.0),
    ]);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    assert_eq!(ids_as_text(&tokenizer, "aab"), ["▁", "aa", "b"]);
    assert_eq!(ids_as_text(&tokenizer, "abab"), ["▁", "ab", "ab"]);
    assert_eq!(ids_as_text(&tokenizer, "aaa"), ["▁", "aa", "a"]);
    // Three and four spaces with the prefix: pairs from the left, and a third space where it fits.
    assert_eq!(ids_as_text(&tokenizer, "   "), ["▁▁", "▁▁"]);
    assert_eq!(ids_as_text(&tokenizer, "    "), ["▁▁", "▁▁▁"]);
}

#[test]
fn sentencepiece_falls_back_to_bytes_and_never_takes_their_spelling_for_them() {
    let words = sentencepiece(&[
        ("▁", -1.0),
        ("<", -1.0),
        ("0", -1.0),
        ("x", -1.0),
        ("4", -1.0),
        ("1", -1.0),
        (">", -1.0),
    ]);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    assert_eq!(ids_as_text(&tokenizer, "é"), ["▁", "<0xC3>", "<0xA9>"]);
    assert_eq!(
        ids_as_text(&tokenizer, "<0x41>"),
        ["▁", "<", "0", "x", "4", "1", ">"]
    );
}

#[test]
fn sentencepiece_without_bytes_gives_one_unknown_token_for_a_run() {
    let mut words = sentencepiece(&[("▁", -1.0), ("a", -1.0)]);
    words
        .kinds
        .iter_mut()
        .filter(|kind| **kind == 6)
        .for_each(|kind| *kind = 5);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    assert_eq!(
        ids_as_text(&tokenizer, "éèaé"),
        ["▁", "<unk>", "a", "<unk>"]
    );
}

#[test]
fn unused_pieces_are_merged_through_but_not_put_out() {
    let mut words = sentencepiece(&[
        ("▁", -9.0),
        ("a", -9.0),
        ("b", -9.0),
        ("c", -9.0),
        ("abc", -1.0),
    ]);
    words.add_scored("ab", 5, -2.0);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    assert_eq!(
        ids_as_text(&tokenizer, "abc ab"),
        ["▁", "abc", "▁", "a", "b"]
    );
}

#[test]
fn user_defined_pieces_never_merge_and_the_longest_counts() {
    let mut words = sentencepiece(&[("▁", -9.0), ("a", -9.0), ("b", -9.0), ("ba", -1.0)]);
    words.add_scored("ab", 4, 0.0);
    words.add_scored("abab", 4, 0.0);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    assert_eq!(ids_as_text(&tokenizer, "abababa"), ["▁", "abab", "ab", "a"]);
}

#[test]
fn the_leading_space_goes_at_the_beginning_and_stays_in_a_continuation() {
    let words = sentencepiece(&[("▁", -9.0), ("a", -9.0), ("▁a", -1.0)]);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    let ids = tokenizer.encode("a a", Special::PROMPT).unwrap();
    assert_eq!(tokenizer.decode(&ids, Decode::TEXT).unwrap(), "a a");
    assert_eq!(tokenizer.decode(&ids, Decode::MARKUP).unwrap(), "<s> a a");
    assert_eq!(
        tokenizer.decode(&ids, Decode::CONTINUATION).unwrap(),
        " a a"
    );
    let spaced = tokenizer.encode("  a", Special::NONE).unwrap();
    assert_eq!(tokenizer.decode(&spaced, Decode::TEXT).unwrap(), "  a");
}

#[test]
fn a_stream_holds_back_unfinished_characters_only() {
    let words = sentencepiece(&[("a", -1.0)]);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    let byte = |byte: u8| words.id(&format!("<0x{byte:02X}>"));
    let mut stream = TextStream::new(Decode::TEXT);
    let mut push = |id: u32| stream.push(&tokenizer, id).unwrap().to_owned();
    let [first, second, third] = [0xE6, 0x97, 0xA5].map(byte);
    assert_eq!([push(first), push(second), push(third)], ["", "", "日"]);
    // An unfinished character before other text, and bytes that begin nothing.
    assert_eq!(
        [push(first), push(words.id("a")), push(third), push(first)],
        ["", "\u{FFFD}a", "\u{FFFD}", ""]
    );
    assert_eq!(stream.finish(), "\u{FFFD}");
    assert_eq!(stream.finish(), "");
}

#[test]
fn an_id_out_of_range_is_an_error_and_leaves_the_stream_as_it_was() {
    let words = byte_level(&[]);
    let mut tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    let size = tokenizer.vocab_size();
    let error = tokenizer.decode(&[size], Decode::TEXT).unwrap_err();
    assert!(matches!(error, TokenizerError::IdOutOfRange { id, .. } if id == size));
    let mut stream = TextStream::new(Decode::TEXT);
    let [first, second] = [words.id("Ã"), words.id("©")];
    assert_eq!(stream.push(&tokenizer, first).unwrap(), "");
    assert!(stream.push(&tokenizer, u32::MAX).is_err());
    assert_eq!(stream.push(&tokenizer, second).unwrap(), "é");
    tokenizer.pad_to(size + 10);
    assert_eq!(tokenizer.decode(&[size + 9], Decode::TEXT).unwrap(), "");
    assert!(tokenizer.token_text(size + 9).is_none());
}

#[test]
fn generations_end_at_stated_tokens_and_at_special_ones_with_a_well_known_name() {
    let mut words = byte_level(&["</s>"]);
    let end = words.id("<|im_end|>");
    let stated = words.add("<stop>", 3);
    let tokenizer = Tokenizer::from_gguf(&GgufVocabulary {
        eot: Some(stated),
        ..words.gguf()
    })
    .unwrap();
    assert_eq!(
        tokenizer.end_of_generation().collect::<Vec<_>>(),
        [end, stated]
    );
    assert!(
        !tokenizer.is_end_of_generation(words.id("</s>")),
        "it is ordinary text here"
    );
}

#[test]
fn a_separator_of_messages_does_not_end_a_generation() {
    let mut words = byte_level(&[]);
    let end = words.add("<|end|>", 3);
    assert!(
        Tokenizer::from_gguf(&words.gguf())
            .unwrap()
            .is_end_of_generation(end)
    );
    let others = [words.add("<|return|>", 3), words.add("<|call|>", 3)];
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    assert!(!tokenizer.is_end_of_generation(end));
    assert!(others.iter().all(|id| tokenizer.is_end_of_generation(*id)));
}

#[test]
fn unsupported_algorithms_and_pre_tokenizers_are_named() {
    let words = byte_level(&[]);
    for model in ["plamo2", "rwkv", "no_vocab"] {
        let error = Tokenizer::from_gguf(&GgufVocabulary {
            model,
            ..words.gguf()
        })
        .unwrap_err();
        assert!(error.to_string().contains(model), "{error}");
    }
    let unknown = GgufVocabulary {
        pre: Some("mystery"),
        ..words.gguf()
    };
    let error = Tokenizer::from_gguf(&unknown).unwrap_err();
    assert!(
        matches!(&error, TokenizerError::UnknownPreTokenizer { name, .. } if name == "mystery")
    );
    for pre in known_pre_tokenizers() {
        Tokenizer::from_gguf(&GgufVocabulary {
            pre: Some(pre),
            ..words.gguf()
        })
        .unwrap();
    }
}

#[test]
fn inconsistent_vocabularies_are_errors() {
    let words = byte_level(&["ab"]);
    let ok = words.gguf();
    let size = ok.tokens.len() as u32;
    let bad: [(&str, GgufVocabulary); 9] = [
        (
            "empty",
            GgufVocabulary {
                tokens: vec![],
                token_types: None,
                ..ok.clone()
            },
        ),
        (
            "token_types",
            GgufVocabulary {
                token_types: Some(vec![1]),
                ..ok.clone()
            },
        ),
        (
            "scores",
            GgufVocabulary {
                scores: Some(vec![0.0]),
                ..ok.clone()
            },
        ),
        (
            "bos_token_id",
            GgufVocabulary {
                bos: Some(size),
                ..ok.clone()
            },
        ),
        (
            "eom_token_id",
            GgufVocabulary {
                eom: Some(u32::MAX),
                ..ok.clone()
            },
        ),
        (
            "list of merges",
            GgufVocabulary {
                merges: None,
                ..ok.clone()
            },
        ),
        (
            "\"zz\"",
            GgufVocabulary {
                merges: Some(vec!["a zz"]),
                ..ok.clone()
            },
        ),
        (
            "\"ba\"",
            GgufVocabulary {
                merges: Some(vec!["b a"]),
                ..ok.clone()
            },
        ),
        (
            "separated by a space",
            GgufVocabulary {
                merges: Some(vec!["ab"]),
                ..ok
            },
        ),
    ];
    for (part, vocabulary) in bad {
        let error = Tokenizer::from_gguf(&vocabulary).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
    let words = sentencepiece(&[("a", f32::NAN)]);
    let error = Tokenizer::from_gguf(&words.gguf()).unwrap_err();
    assert!(matches!(
        error,
        TokenizerError::Vocabulary(VocabularyError::Score { .. })
    ));
}

#[test]
fn odd_vocabularies_are_tolerated_as_documented() {
    let mut words = byte_level(&["ab"]);
    let again = words.add("ab", 1);
    let empty = words.add("", 1);
    let foreign = words.add("日本 語", 1);
    let unknown_kind = words.add("[PAD1]", 99);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    assert_eq!(
        tokenizer.encode("ab", Special::NONE).unwrap(),
        [words.id("ab")]
    );
    let text = |id: u32| tokenizer.decode(&[id], Decode::TEXT).unwrap();
    assert_eq!(
        [text(again), text(empty), text(foreign), text(unknown_kind)],
        ["ab", "", "日本 語", ""]
    );
    assert_eq!(tokenizer.kind(unknown_kind), Some(TokenKind::Unused));
}

#[test]
fn text_without_a_token_is_an_error_and_not_lost() {
    let vocabulary = GgufVocabulary {
        model: "gpt2",
        tokens: vec!["a", "b"],
        merges: Some(vec![]),
        ..GgufVocabulary::default()
    };
    let tokenizer = Tokenizer::from_gguf(&vocabulary).unwrap();
    assert_eq!(tokenizer.encode("ab", Special::NONE).unwrap(), [0, 1]);
    for text in ["c", "abc", "acb", "cab"] {
        let error = tokenizer.encode(text, Special::NONE).unwrap_err();
        assert!(
            matches!(error, TokenizerError::Unencodable { .. }),
            "{text}: {error}"
        );
    }
    // It is named as whoever wrote it knows it, not by the letter that stands for its byte.
    for text in ["\u{16}", "ß"] {
        let error = tokenizer.encode(text, Special::NONE).unwrap_err();
        assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
    }
}

/// As `1,234,567` is written.
#[test]
fn digits_are_cut_in_threes_from_the_right_where_a_rule_says_so() {
    let words = byte_level(&["12", "123", "34", "345", "45", "456", "67", "678"]);
    let tokenizer = Tokenizer::from_gguf(&GgufVocabulary {
        pre: Some("afmoe"),
        ..words.gguf()
    })
    .unwrap();
    for (text, expected) in [
        ("12", vec!["12"]),
        ("123", vec!["123"]),
        ("12345", vec!["12", "345"]),
        ("123456", vec!["123", "456"]),
        ("12345678", vec!["12", "345", "678"]),
        ("a12345b123", vec!["a", "12", "345", "b", "123"]),
    ] {
        assert_eq!(ids_as_text(&tokenizer, text), expected, "{text}");
    }
}

#[test]
fn numbers_are_threes_from_the_right_and_all_else_is_one_word_in_superbpe() {
    let words = byte_level(&["12", "123", "34", "345", "45", "456", "aĠ", "aĠb"]);
    let tokenizer = Tokenizer::from_gguf(&GgufVocabulary {
        pre: Some("superbpe"),
        ..words.gguf()
    })
    .unwrap();
    for (text, expected) in [
        ("123", vec!["123"]),
        ("12345", vec!["12", "345"]),
        ("a b123456", vec!["aĠb", "123", "456"]),
    ] {
        assert_eq!(ids_as_text(&tokenizer, text), expected, "{text}");
    }
    // A sign for a number that is no digit ends the threes in front of it.
    let half = tokenizer.encode("½", Special::NONE).unwrap();
    let expected = [&[words.id("12")], &half[..], &[words.id("345")]].concat();
    assert_eq!(tokenizer.encode("12½345", Special::NONE).unwrap(), expected);
}

/// The pattern looks to the end of a number from each digit: a long one took minutes, and is found otherwise.
#[test]
fn numbers_that_no_letter_follows_are_threes_from_the_right_in_tiny_aya() {
    let words = byte_level(&["12", "123", "34", "345", "45", "456", "6a"]);
    let tokenizer = Tokenizer::from_gguf(&GgufVocabulary {
        pre: Some("tiny_aya"),
        ..words.gguf()
    })
    .unwrap();
    for (text, expected) in [
        ("12345", vec!["12", "345"]),
        ("123456", vec!["123", "456"]),
        ("12345-12", vec!["12", "345", "-", "12"]),
        // Threes from the left.
        ("12345a", vec!["123", "45", "a"]),
        ("12345_", vec!["123", "45", "_"]),
    ] {
        assert_eq!(ids_as_text(&tokenizer, text), expected, "{text}");
    }
}

#[test]
fn chinese_characters_are_words_apart_in_kimi() {
    let han = |text: &str| text.bytes().map(character).collect::<String>();
    let (two, mixed) = (han("中文"), han("文") + "a");
    let mut words = byte_level(&["ab"]);
    let ids = [words.add(&two, 1), words.add(&mixed, 1)];
    let tokenizer = Tokenizer::from_gguf(&GgufVocabulary {
        pre: Some("kimi-k2"),
        ..words.gguf()
    })
    .unwrap();
    let found = tokenizer.encode("中文ab", Special::NONE).unwrap();
    // Whole words are looked for first, as no merges build these.
    assert_eq!(found, [ids[0], words.id("ab")]);
}

#[test]
fn glm_looks_for_whole_words_first() {
    let mut words = byte_level(&[]);
    let whole = words.add("Ġhello", 1);
    for pre in ["glm4", "glm5"] {
        let gguf = GgufVocabulary {
            pre: Some(pre),
            bos: Some(whole),
            ..words.gguf()
        };
        let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
        let ids = tokenizer.encode(" hello", Special::PROMPT).unwrap();
        assert_eq!(ids, [whole], "{pre}");
    }
}

/// What stands for a word that is left out stands for the space in front of it, too, by the `tokenizer.json` of these.
#[test]
fn a_mask_takes_the_space_in_front_of_it() {
    let mut words = byte_level(&[]);
    let masks = ["<mask>", "[MASK]"].map(|name| words.add(name, 3));
    let spaces = |architecture, pre, mask: &str| {
        let tokenizer = Tokenizer::from_gguf(&GgufVocabulary {
            architecture: Some(architecture),
            pre: Some(pre),
            ..words.gguf()
        })
        .unwrap();
        let ids = tokenizer
            .encode(&format!("a  {mask} b"), Special::RENDERED)
            .unwrap();
        let at = ids.iter().position(|id| masks.contains(id)).unwrap();
        assert_eq!(
            tokenizer.decode(&ids[at + 1..], Decode::TEXT).unwrap(),
            " b"
        );
        at - 1
    };
    for (architecture, pre) in [
        ("jina-bert-v2", "jina-v2-de"),
        ("jina-bert-v2", "jina-v2-es"),
        ("jina-bert-v2", "jina-v2-code"),
        ("nomic-bert-moe", "default"),
    ] {
        assert_eq!(
            spaces(architecture, pre, "<mask>"),
            0,
            "{architecture} {pre}"
        );
        assert_eq!(
            spaces(architecture, pre, "[MASK]"),
            2,
            "{architecture} {pre}"
        );
    }
    assert_eq!(spaces("modern-bert", "gpt-2", "[MASK]"), 0);
    assert_eq!(spaces("modern-bert", "gpt-2", "<mask>"), 2);
    assert_eq!(spaces("llama", "gpt-2", "<mask>"), 2);
}

/// GGUF has no key for it, and folders say it of each token: one model had other tokens in each of the two.
#[test]
fn special_tokens_of_phi_3_take_the_white_space_behind_them() {
    let mut words = sentencepiece(&[("▁", -1.0), ("a", -1.0), ("▁a", -0.5)]);
    for name in ["<|user|>", "<|endoftext|>"] {
        words.add(name, 3);
    }
    let encode = |architecture, text: &str| {
        let tokenizer = Tokenizer::from_gguf(&GgufVocabulary {
            architecture: Some(architecture),
            ..words.gguf()
        })
        .unwrap();
        let ids = tokenizer.encode(text, Special::RENDERED).unwrap();
        tokenizer.decode(&ids, Decode::MARKUP).unwrap()
    };
    // Without what stands behind it, text begins as any other does.
    let text = "<|user|>\n\n a<|endoftext|>\na";
    assert_eq!(encode("phi3", text), "<|user|> a<|endoftext|> \na");
    assert_eq!(encode("llama", text), "<|user|> \n\n a<|endoftext|> \na");
}

#[test]
fn long_texts_without_a_break_are_encoded() {
    let words = byte_level(&["aa", "aaaa"]);
    for pre in [
        "gpt-2",
        "qwen2",
        "llama-bpe",
        "default",
        "deepseek-v3",
        "gpt-4o",
        "afmoe",
        "superbpe",
        "tiny_aya",
        "kimi-k2",
        "spark2_5",
    ] {
        let tokenizer = Tokenizer::from_gguf(&GgufVocabulary {
            pre: Some(pre),
            ..words.gguf()
        })
        .unwrap();
        for unit in ["a", " ", "\n", "é", "1", "!", "' "] {
            let text = unit.repeat(100_000 / unit.len());
            let ids = tokenizer.encode(&text, Special::NONE).unwrap();
            assert_eq!(
                tokenizer.decode(&ids, Decode::TEXT).unwrap(),
                text,
                "{pre} {unit:?}"
            );
        }
    }
}

#[test]
fn one_tokenizer_serves_all_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Tokenizer>();
    shared::<lacuna_text::template::ChatTemplate>();
    let words = byte_level(&["ab", "abc"]);
    let tokenizer = Tokenizer::from_gguf(&words.gguf()).unwrap();
    let expected = tokenizer.encode("abcab", Special::NONE).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    assert_eq!(tokenizer.encode("abcab", Special::NONE).unwrap(), expected);
                }
            });
        }
    });
}

#[test]
fn a_pattern_that_gives_up_is_an_error_and_not_a_wrong_split() {
    let file = file_with(
        r#","pre_tokenizer":{"type":"Split","pattern":{"Regex":"((a|b|ab)*)\\1c"},"behavior":"Isolated","invert":false}"#,
    );
    let tokenizer = json(&file).unwrap();
    let result = tokenizer.encode(&"ab".repeat(5_000), Special::NONE);
    assert!(matches!(result, Err(TokenizerError::PreTokenizer { .. })));
}

#[test]
fn ids_are_those_of_the_file() {
    let tokenizer = json(&file_with("")).unwrap();
    assert_eq!(tokenizer.vocab_size(), 10);
    assert_eq!(
        tokenizer.encode("ab</s><tool>", Special::RENDERED).unwrap(),
        [4, 9, 7]
    );
    assert_eq!(tokenizer.kind(9), Some(TokenKind::Control));
    assert_eq!(tokenizer.kind(7), Some(TokenKind::UserDefined));
    assert_eq!(tokenizer.token_text(8), None);
    assert_eq!(tokenizer.decode(&[8, 0, 5], Decode::TEXT).unwrap(), "a");
}

#[test]
fn the_smaller_files_say_what_ends_and_what_begins() {
    let file = file_with("");
    let files = HuggingFaceFiles {
        tokenizer: &file,
        tokenizer_config: Some(
            r#"{"bos_token":{"content":"<tool>"},"eos_token":"</s>","add_bos_token":true,
                "chat_template":[{"name":"tool_use","template":"T"},{"name":"default","template":"D"}]}"#,
        ),
        generation_config: Some(r#"{"eos_token_id":[9,3,4000]}"#),
        ..HuggingFaceFiles::default()
    };
    let tokenizer = Tokenizer::from_hugging_face(&files).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(7), Some(9)));
    assert_eq!(tokenizer.end_of_generation().collect::<Vec<_>>(), [3, 9]);
    assert_eq!(tokenizer.encode("a", Special::PROMPT).unwrap(), [7, 0]);
    assert_eq!(tokenizer.chat_template(), Some("D"));
    assert_eq!(tokenizer.named_chat_template("tool_use"), Some("T"));
    let files = HuggingFaceFiles {
        chat_template_jinja: Some("J"),
        ..files
    };
    assert_eq!(
        Tokenizer::from_hugging_face(&files)
            .unwrap()
            .chat_template(),
        Some("J")
    );
}

#[test]
fn the_post_processor_counts_before_the_settings() {
    let template = r#","post_processor":{"type":"Sequence","processors":[{"type":"ByteLevel","add_prefix_space":true,
        "trim_offsets":false,"use_regex":true},{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x","type_id":0}},
        {"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"x":{"id":"x","ids":[9],"tokens":["</s>"]}}}]}"#;
    let file = file_with(template);
    let files = HuggingFaceFiles {
        tokenizer: &file,
        tokenizer_config: Some(r#"{"bos_token":"<tool>","add_bos_token":true}"#),
        ..HuggingFaceFiles::default()
    };
    let tokenizer = Tokenizer::from_hugging_face(&files).unwrap();
    let special = Special {
        add: AddSpecial::Yes,
        parse: ParseSpecial::No,
    };
    assert_eq!(tokenizer.encode("a", special).unwrap(), [9, 0]);
    let error = json(&file.replace("[9]", "[99]")).unwrap_err();
    assert!(error.to_string().contains("99"), "{error}");
}

#[test]
fn unsupported_parts_of_tokenizer_json_are_named() {
    let members = [
        (
            "normalizer",
            r#"{"type":"Nmt","precompiled_charsmap":"AAA="}"#,
            "Nmt",
        ),
        (
            "normalizer",
            r#"{"type":"Replace","pattern":{"String":""},"content":"x"}"#,
            "Replace",
        ),
        (
            "pre_tokenizer",
            r#"{"type":"FixedLength","length":0}"#,
            "FixedLength",
        ),
        ("post_processor", r#"{"type":"Mystery"}"#, "Mystery"),
        (
            "pre_tokenizer",
            r#"{"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated","invert":false}"#,
            "pre_tokenizer",
        ),
    ];
    for (part, value, named) in members {
        let error = json(&file_with(&format!(r#","{part}":{value}"#)))
            .unwrap_err()
            .to_string();
        assert!(error.contains(named), "{error}");
    }
    let file = file_with("");
    let changes = [
        (r#""ByteLevel""#, r#""WordPiece""#, "WordPiece"),
        (r#""BPE""#, r#""Unigram""#, "tokenizer.json"),
        (r#""BPE""#, r#""WordLevel""#, "WordLevel"),
        (r#"["a b"]"#, r#"["a x"]"#, "\"x\""),
        (r#"["a b"]"#, r#"["a d"]"#, "\"ad\""),
        (r#""merges""#, r#""dropout":0.1,"merges""#, "dropout"),
        (r#""a":0"#, r#""a":4000000000"#, "4000000000"),
        (r#""a":0"#, r#""a":-1"#, "tokenizer.json"),
    ];
    for (from, to, named) in changes {
        assert!(file.contains(from));
        let error = json(&file.replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn a_missing_folder_is_an_error_that_names_the_file() {
    let error = Tokenizer::from_folder(std::path::Path::new("no-such-folder")).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
}

#[test]
fn the_description_names_what_matters() {
    let words = byte_level(&["ab"]);
    let gguf = GgufVocabulary {
        eos: Some(words.id("<|im_end|>")),
        ..words.gguf()
    };
    let description = Tokenizer::from_gguf(&gguf).unwrap().describe();
    assert_eq!((description.algorithm, description.merges), ("BPE", 1));
    assert_eq!(description.pre_tokenizer.as_deref(), Some("gpt-2"));
    assert_eq!(description.eos.as_deref(), Some("<|im_end|>"));
    assert_eq!(description.end_of_generation, ["<|im_end|>"]);
}

fn tokenizers() -> &'static [Tokenizer] {
    static ALL: std::sync::OnceLock<Vec<Tokenizer>> = std::sync::OnceLock::new();
    ALL.get_or_init(|| {
        let words = byte_level(&["th", "the", "Ġt", "Ġthe", "é", "ĠĠ", "12", "日"]);
        let pieces = sentencepiece(&[
            ("▁", -5.0),
            ("t", -5.0),
            ("h", -5.0),
            ("th", -1.0),
            ("▁th", -2.0),
            ("▁▁", -3.0),
        ]);
        let mut all: Vec<Tokenizer> = [
            "gpt-2",
            "qwen2",
            "llama-bpe",
            "default",
            "gpt-4o",
            "deepseek-v3",
            "afmoe",
            "poro-chat",
        ]
        .into_iter()
        .map(|pre| {
            Tokenizer::from_gguf(&GgufVocabulary {
                pre: Some(pre),
                ..words.gguf()
            })
            .unwrap()
        })
        .collect();
        all.push(Tokenizer::from_gguf(&pieces.gguf()).unwrap());
        all
    })
}

proptest! {
    #[test]
    fn decoding_undoes_encoding(text in "\\PC{0,40}|[ \\n\\t'the12é日\u{2028}<|>]{0,60}") {
        // SentencePiece writes its visible space for a space, so a text with one reads as the other.
        prop_assume!(!text.contains('\u{2581}'));
        for tokenizer in tokenizers() {
            let ids = tokenizer.encode(&text, Special::NONE).unwrap();
            prop_assert_eq!(&tokenizer.decode(&ids, Decode::TEXT).unwrap(), &text);
        }
    }

    #[test]
    fn parts_of_a_decode_are_the_whole(seeds in prop::collection::vec(any::<u32>(), 0..60)) {
        for tokenizer in tokenizers() {
            let ids: Vec<u32> = seeds.iter().map(|seed| seed % tokenizer.vocab_size()).collect();
            for options in [Decode::TEXT, Decode::MARKUP, Decode::CONTINUATION] {
                let mut stream = TextStream::new(options);
                let mut parts = String::new();
                for id in &ids {
                    parts.push_str(stream.push(tokenizer, *id).unwrap());
                }
                parts.push_str(stream.finish());
                prop_assert_eq!(&parts, &tokenizer.decode(&ids, options).unwrap());
            }
        }
    }

    #[test]
    fn arbitrary_vocabularies_do_not_panic(
        tokens in prop::collection::vec("[abĠ▁<0x41>]{0,6}", 0..12),
        kinds in prop::collection::vec(0i32..8, 12),
        merges in prop::collection::vec("[ab ]{0,5}", 0..4),
        text in "[ab<0x41> ]{0,12}",
    ) {
        for model in ["gpt2", "llama"] {
            let vocabulary = GgufVocabulary {
                model,
                tokens: tokens.iter().map(String::as_str).collect(),
                token_types: Some(kinds[..tokens.len()].to_vec()),
                scores: Some(kinds[..tokens.len()].iter().map(|kind| -(*kind as f32)).collect()),
                merges: Some(merges.iter().map(String::as_str).collect()),
                ..GgufVocabulary::default()
            };
            let Ok(tokenizer) = Tokenizer::from_gguf(&vocabulary) else { continue };
            for special in [Special::NONE, Special::PROMPT, Special::RENDERED] {
                if let Ok(ids) = tokenizer.encode(&text, special) {
                    tokenizer.decode(&ids, Decode::MARKUP).unwrap();
                }
            }
        }
    }
}
