//! Thoughts between tags.

use std::sync::Arc;

use lacuna_text::reply::{Format, Piece, Unmarked};
use proptest::prelude::*;

use crate::support::{characters, cut, mark, read};

const QWEN: &str = "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}";
const GEMMA: &str = "{{ '<|channel>thought\\n<channel|>' }}";
const MISTRAL: &str = "[THINK]{{ thought }}[/THINK]";

fn format(template: &str) -> Format {
    Format::of(template).unwrap()
}

fn parts(thought: &str, said: &str) -> Vec<Piece> {
    let thought = (!thought.is_empty()).then(|| Piece::Reasoning(thought.to_owned()));
    let said = (!said.is_empty()).then(|| Piece::Content(said.to_owned()));
    thought.into_iter().chain(said).collect()
}

#[test]
fn templates_tell_the_format() {
    assert_eq!(
        Format::of("<|start|><|channel|><|message|>"),
        Some(Format::Harmony)
    );
    assert_ne!(format(QWEN), format(GEMMA));
    assert_ne!(format(QWEN), format(MISTRAL));
    for plain in [
        "",
        "<|im_start|>",
        "<think>",
        "{{ content.split('</think>') }}",
    ] {
        assert_eq!(Format::of(plain), None, "{plain}");
    }
}

#[test]
fn a_thought_comes_first_or_not_at_all() {
    let closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
    let opened = "<|im_start|>assistant\n<think>\n";
    for (prompt, reply, expected) in [
        (
            "",
            "<think>\nHm.\n</think>\n\nYes.\n",
            parts("Hm.", "Yes.\n"),
        ),
        ("", "\n<think>a\n\nb</think>c", parts("a\n\nb", "c")),
        ("", "<think>\n\n</think>\n\nYes.", parts("", "Yes.")),
        (
            "",
            "No <think>\nHm.\n</think>",
            parts("", "No <think>\nHm.\n</think>"),
        ),
        (
            "",
            "<think>a</think>b<think>c</think>",
            parts("a", "b<think>c</think>"),
        ),
        ("", "<think>cut shor", parts("cut shor", "")),
        ("", "<think>cut </thi", parts("cut </thi", "")),
        ("", "<thin", parts("", "<thin")),
        ("", " \n", parts("", " \n")),
        (opened, "Hm.\n</think>\n\nYes.", parts("Hm.", "Yes.")),
        (opened, "Hm.", parts("Hm.", "")),
        (closed, "Yes.", parts("", "Yes.")),
        (closed, "Yes.</think>", parts("", "Yes.</think>")),
    ] {
        assert_eq!(read(format(QWEN), prompt, [reply]), expected, "{reply:?}");
        let streamed = read(format(QWEN), prompt, characters(reply));
        assert_eq!(streamed, expected, "{reply:?}");
    }
}

#[test]
fn tags_may_be_control_tokens() {
    let reply = format!(
        "{}thought\nHm.{}Yes.{}",
        mark("<|channel>"),
        mark("<channel|>"),
        mark("<eos>")
    );
    assert_eq!(
        read(format(GEMMA), "", [reply.as_str()]),
        parts("Hm.", "Yes.")
    );
    let reply = format!("{}Hm.{}Yes.", mark("[THINK]"), mark("[/THINK]"));
    assert_eq!(
        read(format(MISTRAL), "", [reply.as_str()]),
        parts("Hm.", "Yes.")
    );
    let reply = format!("{}Hm.{}Yes.", mark("<think>"), mark("</think>"));
    assert_eq!(
        read(format(QWEN), "", [reply.as_str()]),
        parts("Hm.", "Yes.")
    );
}

#[test]
fn the_state_between_pieces_says_what_comes_next() {
    let mut reader = format(QWEN).reader("");
    let mut states = Vec::new();
    for part in ["<thi", "nk>", "a", "</think", ">", "b"] {
        reader.push(part);
        states.push(reader.is_reasoning());
    }
    assert_eq!(states, [false, true, true, true, false, false]);
}

proptest! {
    #[test]
    fn what_is_found_does_not_depend_on_the_cuts(
        reply in "(<think>|</think>|<th|ink>|</|[a-c]|\n| |\u{e9}){0,20}",
        opened in any::<bool>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let prompt = if opened { "<think>\n" } else { "" };
        let whole = read(format(QWEN), prompt, [reply.as_str()]);
        let pieces = cut(&reply, &cuts);
        let pieces = pieces.iter().map(String::as_str);
        prop_assert_eq!(&read(format(QWEN), prompt, pieces), &whole);
        prop_assert_eq!(&read(format(QWEN), prompt, characters(&reply)), &whole);
        let texts = whole.iter().map(|piece| match piece {
            Piece::Reasoning(text) | Piece::Content(text) => text.as_str(),
            Piece::Call { .. } => "",
        });
        let shown: String = texts.collect::<String>().chars().filter(|c| "abc\u{e9}".contains(*c)).collect();
        // The tags have no other letters than these taken out of them.
        let given = reply.replace("<think>", "").replace("</think>", "");
        let given: String = given.chars().filter(|c| "abc\u{e9}".contains(*c)).collect();
        prop_assert_eq!(shown, given);
    }
}

#[test]
fn control_tokens_that_mark_calls_stay_in_what_is_said() {
    let kept: Arc<[&'static str]> = Arc::from(["[TOOL_CALLS]", "[ARGS]"]);
    let [thinks, thought, call, arguments, other] =
        ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[IMG]"].map(mark);
    let call = format!("{other}Let me see.{call}f{arguments}{{}}");
    let said = "Let me see.[TOOL_CALLS]f[ARGS]{}";
    let reply = format!("{thinks}Hm.{thought}{call}");
    let mut reader = format(MISTRAL).reader("").keeping(Arc::clone(&kept));
    let mut unmarked = Unmarked::keeping(kept);
    let (mut pieces, mut plain) = (Vec::new(), String::new());
    for piece in characters(&reply) {
        pieces.extend(reader.push(piece));
    }
    for piece in characters(&call) {
        plain += &unmarked.push(piece);
    }
    pieces.extend(reader.finish(""));
    let content = pieces.iter().filter_map(|piece| match piece {
        Piece::Content(text) => Some(text.as_str()),
        _ => None,
    });
    assert_eq!(content.collect::<String>(), said);
    assert_eq!(plain, said);
    // Without any to keep, all of them are markup.
    assert_eq!(
        Unmarked::keeping(Arc::default()).push(&call),
        "Let me see.f{}"
    );
}
