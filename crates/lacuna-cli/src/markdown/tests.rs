use proptest::prelude::*;

use super::*;

/// What is shown, with marks of our own for the looks: `[b:bold]`.
fn shown(parts: &[Styled]) -> String {
    let letter = |is: bool, letter: &str| if is { letter.to_owned() } else { String::new() };
    let each = parts.iter().map(|Styled { text, style }| {
        let looks = [
            letter(style.bold, "b"),
            letter(style.italic, "i"),
            letter(style.code, "c"),
            letter(style.dim, "d"),
        ]
        .concat();
        match looks.is_empty() {
            true => text.clone(),
            false => format!("[{looks}:{text}]"),
        }
    });
    each.collect()
}

fn whole(text: &str) -> Vec<Styled> {
    pieces(std::iter::once(text))
}

/// What is shown of pieces, neighbours of one look put together.
fn pieces<'a>(pieces: impl Iterator<Item = &'a str>) -> Vec<Styled> {
    let mut markdown = Markdown::default();
    let mut all = Shown::default();
    for piece in pieces {
        for part in markdown.push(piece) {
            all.add(&part.text, part.style);
        }
    }
    for part in markdown.finish() {
        all.add(&part.text, part.style);
    }
    all.0
}

#[test]
fn marks_become_looks() {
    for (text, expected) in [
        ("plain, as it is", "plain, as it is"),
        ("a **bold** word", "a [b:bold] word"),
        ("an *italic* and _another_", "an [i:italic] and [i:another]"),
        ("***both***", "[bi:both]"),
        (
            "**bold and *both* and bold**",
            "[b:bold and ][bi:both][b: and bold]",
        ),
        ("call `f(a * b)` twice", "call [c:f(a * b)] twice"),
        ("``a ` b``", "[c:a ` b]"),
        ("# A heading\ntext", "[b:A heading]\ntext"),
        ("### Deep with `code`\n", "[b:Deep with ][bc:code]\n"),
        ("- one\n- two\n  * three", "• one\n• two\n  • three"),
        ("> said **so**\n>> twice", "[d:│] said [b:so]\n[d:││] twice"),
        ("---\n", "[d:────────────────────────]\n"),
        ("* * *", "• * *"),
        (
            "```rust\nlet a = *b; // **no**\n```\nout",
            "[d:```rust]\n[c:let a = *b; // **no**]\n[d:```]\nout",
        ),
        ("~~~\n```\n~~~\n", "[d:~~~]\n[c:```]\n[d:~~~]\n"),
        ("1. first\n2. second", "1. first\n2. second"),
        ("```never closed\ncode", "[d:```never closed]\n[c:code]"),
    ] {
        assert_eq!(shown(&whole(text)), expected, "{text}");
    }
}

#[test]
fn what_marks_nothing_is_shown_as_it_is() {
    for text in [
        "2 * 3 * 4",
        "snake_case_name and __init__.py of it",
        "*.rs",
        "an * asterisk and a ` tick",
        "#hashtag",
        "-5 degrees, +3, ~4",
        "####### seven",
        "a_b",
        "**",
        "`",
        "*",
        "",
        "\n\n  \n",
        "five ***** stars",
    ] {
        // `__init__` alone is bold by the rules of Markdown.
        let expected = text.replace("__init__", "[b:init]");
        assert_eq!(shown(&whole(text)), expected);
    }
    assert_eq!(
        shown(&whole(r"\*not italic\*, \_ and \x")),
        r"*not italic*, _ and \x"
    );
}

#[test]
fn text_is_shown_as_it_comes_and_a_mark_waits_for_its_other_half() {
    let mut markdown = Markdown::default();
    assert_eq!(shown(&markdown.push("It is ")), "It is ");
    assert_eq!(shown(&markdown.push("**very")), "");
    assert_eq!(shown(&markdown.push(" good** and")), "[b:very good] and");
    assert_eq!(
        shown(&markdown.push("\n```\nlet a")),
        "\n[d:```]\n[c:let a]"
    );
    assert_eq!(shown(&markdown.push(" = 1;\n``")), "[c: = 1;]\n");
    assert_eq!(shown(&markdown.push("`\nEnd *")), "[d:```]\nEnd ");
    assert_eq!(shown(&markdown.finish()), "*");
}

#[test]
fn a_mark_that_nothing_closes_does_not_hold_a_long_line_back() {
    let mut markdown = Markdown::default();
    assert_eq!(shown(&markdown.push("*")), "");
    let rest = "a".repeat(FARTHEST_CLOSE + 1);
    assert_eq!(shown(&markdown.push(&rest)), format!("*{rest}"));
}

#[test]
fn looks_are_what_terminals_understand() {
    let both = Style {
        bold: true,
        code: true,
        ..Style::default()
    };
    assert_eq!(both.codes(), "\u{1b}[1;36m");
    assert_eq!(Style::default().codes(), "");
}

/// Texts full of marks.
fn marked() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("*"),
        Just("**"),
        Just("_"),
        Just("`"),
        Just("```"),
        Just("\n"),
        Just("# "),
        Just("- "),
        Just("> "),
        Just("\\"),
        Just(" "),
        Just("a"),
        Just("é"),
        Just("word "),
        Just("~~~"),
        Just("---"),
        Just("1. "),
    ];
    proptest::collection::vec(part, 0..60).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn however_a_text_is_cut_the_same_is_shown(text in marked(), cuts in proptest::collection::vec(any::<u8>(), 1..9)) {
        let mut parts = Vec::new();
        let (mut rest, mut cuts) = (text.as_str(), cuts.iter().cycle());
        while !rest.is_empty() {
            let wanted = 1 + usize::from(*cuts.next().expect("endless")) % 7;
            let end = rest.char_indices().nth(wanted).map_or(rest.len(), |(end, _)| end);
            let (part, after) = rest.split_at(end);
            parts.push(part);
            rest = after;
        }
        prop_assert_eq!(pieces(parts.into_iter()), whole(&text));
    }

    #[test]
    fn only_marks_are_left_out(text in marked()) {
        let letters = |text: &str| text.chars().filter(|c| c.is_alphanumeric() || *c == '\n').collect::<String>();
        let parts = whole(&text);
        let all: String = parts.iter().map(|part| part.text.as_str()).collect();
        prop_assert_eq!(letters(&all), letters(&text));
    }
}
