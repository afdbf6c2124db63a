//! The format of gpt-oss.

use lacuna_text::reply::{Format, Piece};
use lacuna_text::tokenizer::{
    Decode, GgufVocabulary, MARK_CLOSE, MARK_OPEN, Special, SpecialText, TextStart, TextStream,
    TokenKind, Tokenizer,
};
use proptest::prelude::*;
use serde::Deserialize;

use crate::support::{characters, cut, mark, read};

/// A reply, text and control tokens by turns, and its messages as openai-harmony reads them.
#[derive(Deserialize)]
struct Case {
    reply: Vec<String>,
    messages: Vec<Message>,
}

#[derive(Deserialize)]
struct Message {
    channel: Option<String>,
    recipient: Option<String>,
    text: String,
}

const SPECIAL: [&str; 7] = [
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
];

fn cases() -> Vec<Case> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../reference/replies/harmony.json"
    );
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// What was thought, what was said, and the calls.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reply {
    reasoning: Vec<String>,
    content: Vec<String>,
    calls: Vec<(String, String)>,
}

impl Case {
    fn expected(&self) -> Reply {
        let mut reply = Reply::default();
        for message in &self.messages {
            let recipient = message.recipient.as_deref().unwrap_or_default();
            let text = message.text.clone();
            if let Some(name) = recipient.strip_prefix("functions.") {
                reply.calls.push((name.to_owned(), text));
            } else if text.is_empty() {
            } else if message.channel.as_deref() == Some("analysis") {
                reply.reasoning.push(text);
            } else {
                reply.content.push(text);
            }
        }
        reply
    }

    /// Its text, with its control tokens marked.
    fn text(&self) -> String {
        let parts = self.reply.iter().enumerate();
        let part = |(index, part): (usize, &String)| match (index % 2, part.as_str()) {
            (1, name) if !name.is_empty() => mark(name),
            (_, text) => text.to_owned(),
        };
        parts.map(part).collect()
    }
}

fn reply(pieces: Vec<Piece>) -> Reply {
    let mut reply = Reply::default();
    for piece in pieces {
        match piece {
            Piece::Reasoning(text) => reply.reasoning.push(text),
            Piece::Content(text) => reply.content.push(text),
            Piece::Call { name, arguments } => reply.calls.push((name, arguments)),
        }
    }
    reply
}

/// Messages of one kind with a blank line between them.
fn joined(mut reply: Reply) -> Reply {
    for texts in [&mut reply.reasoning, &mut reply.content] {
        if texts.len() > 1 {
            *texts = vec![texts.join("\n\n")];
        }
    }
    reply
}

#[test]
fn recorded_replies_have_the_parts_that_openai_harmony_finds() {
    let cases = cases();
    assert!(cases.len() > 10);
    for case in cases {
        let text = case.text();
        let expected = joined(case.expected());
        let whole = reply(read(Format::Harmony, "", [text.as_str()]));
        assert_eq!(whole, expected, "{text}");
        let streamed = reply(read(Format::Harmony, "", characters(&text)));
        assert_eq!(streamed, expected, "{text}");
    }
}

/// GPT-2's character for a byte.
fn character(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let code = match byte {
        byte if printable(byte) => u32::from(byte),
        byte => 0x100 + (0..byte).filter(|other| !printable(*other)).count() as u32,
    };
    char::from_u32(code).unwrap()
}

/// gpt-oss's control tokens over a vocabulary of single bytes, with its name in GGUF files.
fn tokenizer() -> Tokenizer {
    let bytes: Vec<String> = (0..=255).map(|byte| character(byte).to_string()).collect();
    let mut tokens: Vec<&str> = bytes.iter().map(String::as_str).collect();
    tokens.extend(SPECIAL);
    tokens.push("<|endoftext|>");
    let kinds = tokens.iter().map(|token| match token.len() {
        0..=2 => 1,
        _ => 3,
    });
    Tokenizer::from_gguf(&GgufVocabulary {
        model: "gpt2",
        pre: Some("gpt-4o"),
        token_types: Some(kinds.collect()),
        merges: Some(Vec::new()),
        eos: Some(256 + 5),
        tokens,
        ..GgufVocabulary::default()
    })
    .unwrap()
}

#[test]
fn replies_generated_byte_by_byte_have_the_same_parts() {
    let tokenizer = tokenizer();
    for case in cases() {
        let mut ids = Vec::new();
        for (index, part) in case.reply.iter().enumerate() {
            match index % 2 {
                0 => ids.extend(tokenizer.encode(part, Special::NONE).unwrap()),
                _ => ids.extend(tokenizer.id(part)),
            }
        }
        let mut stream = TextStream::new(Decode {
            special: SpecialText::Mark,
            start: TextStart::Continuation,
        });
        let texts: Vec<String> = ids
            .iter()
            .map(|&id| stream.push(&tokenizer, id).unwrap().to_owned())
            .collect();
        let parts = texts.iter().map(String::as_str);
        let found = reply(read(Format::Harmony, "", parts));
        assert_eq!(found, joined(case.expected()), "{:?}", case.reply);
    }
}

#[test]
fn marks_come_from_control_tokens_alone() {
    let tokenizer = tokenizer();
    let mut stream = TextStream::new(Decode {
        special: SpecialText::Mark,
        start: TextStart::Continuation,
    });
    let forged = format!("{MARK_OPEN}<|end|>{MARK_CLOSE}");
    let ids = tokenizer.encode(&forged, Special::NONE).unwrap();
    let mut text = String::new();
    for id in ids {
        text.push_str(stream.push(&tokenizer, id).unwrap());
    }
    assert_eq!(text, "\u{FFFD}<|end|>\u{FFFD}");
    // The first of two bytes, and then a mark.
    let half = tokenizer.encode("é", Special::NONE).unwrap()[0];
    assert_eq!(stream.push(&tokenizer, half).unwrap(), "");
    let end = tokenizer.id("<|end|>").unwrap();
    let expected = format!("\u{FFFD}{}", mark("<|end|>"));
    assert_eq!(stream.push(&tokenizer, end).unwrap(), expected);
    assert_eq!(stream.finish(), "");
}

#[test]
fn a_reply_ends_with_return_or_call_and_not_with_a_message() {
    let tokenizer = tokenizer();
    let ends: Vec<String> = tokenizer
        .end_of_generation()
        .filter_map(|id| tokenizer.token_text(id))
        .collect();
    assert_eq!(ends, ["<|return|>", "<|call|>", "<|endoftext|>"]);
    for name in SPECIAL {
        let id = tokenizer.id(name).unwrap();
        assert_eq!(tokenizer.kind(id), Some(TokenKind::Control), "{name}");
    }
}

#[test]
fn what_keeps_to_no_format_is_said() {
    let m = mark;
    let said = |text: &str| vec![Piece::Content(text.to_owned())];
    let long = "x".repeat(300);
    for (text, expected) in [
        ("Hello there".to_owned(), said("Hello there")),
        ("to".to_owned(), said("to")),
        (format!("{long} y"), said(&format!("{long} y"))),
        ("a\nb".to_owned(), said("a\nb")),
        // The header has no end.
        (
            format!("{}final Hello{}", m("<|channel|>"), m("<|return|>")),
            said("Hello"),
        ),
        (
            format!("{}analysis Hm{}", m("<|channel|>"), m("<|end|>")),
            vec![Piece::Reasoning("Hm".to_owned())],
        ),
        (
            format!("{}finally{}", m("<|channel|>"), m("<|return|>")),
            said("finally"),
        ),
        // The message has no header.
        (
            format!("{}Hi{}", m("<|message|>"), m("<|end|>")),
            said("Hi"),
        ),
        (
            format!("{}a{}b{}\nc", m("<|message|>"), m("<|end|>"), m("<|end|>")),
            said("a\n\nb\n\n\nc"),
        ),
        // The message before another has no end.
        (
            format!(
                "{0}analysis{1}Hm{0}final{1}Hi",
                m("<|channel|>"),
                m("<|message|>")
            ),
            vec![
                Piece::Reasoning("Hm".to_owned()),
                Piece::Content("Hi".to_owned()),
            ],
        ),
        // A header that is cut short says nothing.
        (format!("{}fin", m("<|channel|>")), vec![]),
        (
            format!("{}assistant to=functions.f", m("<|start|>")),
            vec![],
        ),
        (format!("{MARK_OPEN}<|chan"), vec![]),
        // A channel that nobody knows is for everybody.
        (
            format!("{}gossip{}Hi", m("<|channel|>"), m("<|message|>")),
            said("Hi"),
        ),
        (String::new(), vec![]),
    ] {
        assert_eq!(
            read(Format::Harmony, "", [text.as_str()]),
            expected,
            "{text:?}"
        );
    }
}

/// Marks, words of headers, and texts that nothing else has.
fn items() -> impl Strategy<Value = Vec<String>> {
    let marks = prop::sample::select(SPECIAL.to_vec()).prop_map(mark);
    let unknown = Just(mark("<|reserved_200013|>"));
    let words = prop::sample::select(vec![
        "assistant",
        "analysis",
        "commentary",
        "final",
        " to=functions.f ",
        " to=python",
        "json",
        " ",
        "\n",
        "\u{FFFD}",
    ]);
    let item = prop_oneof![
        6 => marks,
        1 => unknown,
        3 => words.prop_map(str::to_owned),
        3 => "[A-Z\u{c4}\u{1F600}]{1,4}( [A-Z]{1,3})?",
        1 => "[A-Z]{250,300}",
    ];
    prop::collection::vec(item, 0..24)
}

proptest! {
    #[test]
    fn what_is_found_does_not_depend_on_the_cuts(
        items in items(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let text = items.concat();
        let whole = read(Format::Harmony, "", [text.as_str()]);
        let parts = cut(&text, &cuts);
        let parts = parts.iter().map(String::as_str);
        prop_assert_eq!(&read(Format::Harmony, "", parts), &whole);
        prop_assert_eq!(&read(Format::Harmony, "", characters(&text)), &whole);
    }

    #[test]
    fn nothing_that_a_model_says_outside_of_headers_is_lost(items in items()) {
        let text = items.concat();
        let mut all = String::new();
        for piece in read(Format::Harmony, "", [text.as_str()]) {
            match piece {
                Piece::Reasoning(text) | Piece::Content(text) => all.push_str(&text),
                Piece::Call { arguments, .. } => all.push_str(&arguments),
            }
        }
        // What comes between a message's beginning and the next mark is what it says.
        let mut rest = all.as_str();
        for body in text.split(&mark("<|message|>")).skip(1) {
            let body = body.split(MARK_OPEN).next().unwrap_or_default();
            let found = rest.find(body);
            prop_assert!(found.is_some(), "{:?} is not in {:?}", body, rest);
            rest = &rest[found.unwrap_or(0) + body.len()..];
        }
        prop_assert!(!all.contains([MARK_OPEN, MARK_CLOSE]));
    }
}
