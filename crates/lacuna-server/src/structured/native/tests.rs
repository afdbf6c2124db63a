//! Each family's calls: told by its template, held to its grammar, and read.

use std::sync::Arc;

use llguidance::{Matcher, ParserFactory};
use proptest::prelude::*;
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use super::Native;

mod published;

use crate::http::ignored::Ignored;
use crate::structured::calls::{CallReader, Piece};
use crate::structured::grammar::Rule;
use crate::structured::tools::{ToolSyntax, Tools};

const END: u32 = 256;

/// Every byte, an end of texts, and control tokens.
fn vocabulary(marks: &[&'static str]) -> TokEnv {
    let special = |text: &str| [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat();
    let bytes = (0..=255u8).map(|byte| match byte {
        TokTrie::SPECIAL_TOKEN_MARKER => Vec::new(),
        byte => vec![byte],
    });
    let control = ["<end>"].iter().chain(marks).map(|text| special(text));
    let words: Vec<Vec<u8>> = bytes.chain(control).collect();
    let info = TokRxInfo::new(words.len() as u32, END);
    Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)))
}

/// The tokens of `text`, where `marks` are control tokens.
fn tokens(text: &str, marks: &[&'static str]) -> Vec<u32> {
    let (mut tokens, mut rest) = (Vec::new(), text);
    while let Some(byte) = rest.bytes().next() {
        let found = marks.iter().position(|mark| rest.starts_with(mark));
        let (token, length) = match found {
            Some(mark) => (END + 1 + mark as u32, marks[mark].len()),
            None => (u32::from(byte), 1),
        };
        tokens.push(token);
        rest = rest.get(length..).expect("texts here are ASCII");
    }
    tokens
}

fn tools() -> Vec<Value> {
    let weather = json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "hourly": {"type": "boolean"},
    }, "required": ["city", "unit"]});
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    vec![
        tool("weather", weather),
        tool("now", json!({"type": "object", "properties": {}})),
    ]
}

fn offered(choice: &str, once: bool) -> Tools {
    let choice = serde_json::from_value(json!(choice)).expect("a choice");
    let tools = Tools::new(tools(), Some(choice)).expect("valid");
    tools.called_once(once)
}

struct Held {
    matcher: Matcher,
    marks: Vec<&'static str>,
}

/// What holds replies of `native`, where its marks are control tokens or not.
fn held(native: Native, choice: &str, once: bool, control: bool) -> Held {
    let marks = if control { native.marks() } else { Vec::new() };
    held_by(ToolSyntax::Native(native), &offered(choice, once), marks)
}

/// What holds replies to calls of `tools`, where no mark is a control token.
fn held_in(syntax: ToolSyntax, tools: Vec<Value>, choice: &str) -> Held {
    let choice = serde_json::from_value(json!(choice)).expect("a choice");
    let tools = Tools::new(tools, Some(choice)).expect("valid");
    held_by(syntax, &tools, Vec::new())
}

fn held_by(syntax: ToolSyntax, tools: &Tools, marks: Vec<&'static str>) -> Held {
    let vocabulary = vocabulary(&marks);
    let mut ignored = Ignored::new(true);
    let rule = Rule::new(None, tools, syntax, &mut ignored);
    let rule = rule.expect("valid").expect("tools are offered");
    let factory = ParserFactory::new_simple(&vocabulary).expect("a vocabulary");
    let parser = factory.create_parser(rule.grammar(vocabulary.tok_trie()));
    Held {
        matcher: Matcher::new(Ok(parser.expect("a grammar"))),
        marks,
    }
}

impl Held {
    /// How many tokens of `text` may come, and whether the reply may end then.
    fn takes(&mut self, text: &str) -> (bool, bool) {
        let tokens = tokens(text, &self.marks);
        let taken = self
            .matcher
            .try_consume_tokens(&tokens)
            .expect("within bounds");
        let whole = taken == tokens.len();
        (
            whole,
            whole && self.matcher.is_accepting().expect("within bounds"),
        )
    }
}

/// Of each family: what is in its template, two calls as it writes them, a call of no tool, and one with an argument
/// that is none.
const FAMILIES: [(&str, &str, &str, &str); 11] = [
    (
        "{{ '[TOOL_CALLS] [' + call }}",
        "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\", \"unit\": \"C\"}}, {\"name\": \"now\", \"arguments\": {}}]",
        "[TOOL_CALLS] [{\"name\": \"other\"",
        "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": 1",
    ),
    (
        "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
        "[TOOL_CALLS]weather[ARGS]{\"city\": \"Bonn\", \"unit\": \"C\"}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}",
        "[TOOL_CALLS]other",
        "[TOOL_CALLS]weather[ARGS]{\"town\"",
    ),
    (
        "{{ '<|tool_call|>' + calls }}",
        "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\", \"unit\": \"C\"}}, {\"name\": \"now\", \"arguments\": {}}]",
        "<|tool_call|>[{\"name\": \"other\"",
        "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"town\"",
    ),
    (
        "{{ '<|tool_list_start|>' + tools }}",
        "<|tool_call_start|>[weather(city=\"Bonn\", unit='C'), now()]<|tool_call_end|>",
        "<|tool_call_start|>[other(",
        "<|tool_call_start|>[weather(city=1",
    ),
    (
        "{{ '<|tool_call>call:' + name }}",
        "<|tool_call>call:weather{city:<|\"|>Bonn<|\"|>,unit:<|\"|>C<|\"|>}<tool_call|><|tool_call>call:now{}<tool_call|>",
        "<|tool_call>call:other",
        "<|tool_call>call:weather{city:1",
    ),
    (
        "{{ '<start_function_call>call:' + name }}",
        "<start_function_call>call:weather{city:<escape>Bonn<escape>,unit:<escape>C<escape>}<end_function_call><start_function_call>call:now{}<end_function_call>",
        "<start_function_call>call:other",
        "<start_function_call>call:weather{city:<escape>Bonn<escape>,unit:<escape>K",
    ),
    (
        "{{ '<tool_call>\\n<function=' + name }}",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call>\n<function=other",
        "<tool_call>\n<function=weather>\n<parameter=town>",
    ),
    (
        "{{ '<tool_call>' + name + '<arg_key>' }}",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "<tool_call>other",
        "<tool_call>weather<arg_key>town",
    ),
    (
        "{{ '<TOOLCALL>[' + calls }}",
        "<TOOLCALL>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\", \"unit\": \"C\"}}, {\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>",
        "<TOOLCALL>[{\"name\": \"other\"",
        "<TOOLCALL>[{\"name\": \"weather\", \"arguments\": {\"town\"",
    ),
    (
        "{{ '<tool_calls>[' + calls }}",
        "<tool_calls>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\", \"unit\": \"C\"}}, {\"name\": \"now\", \"arguments\": {}}]</tool_calls>",
        "<tool_calls>[{\"name\": \"other\"",
        "<tool_calls>[{\"name\": \"weather\", \"arguments\": {\"town\"",
    ),
    (
        "{{ '<|START_ACTION|>' + calls }}",
        "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"city\": \"Bonn\", \"unit\": \"C\"}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"now\", \"parameters\": {}}\n]<|END_ACTION|>",
        "<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"other\"",
        "<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"town\"",
    ),
];

fn families() -> impl Iterator<Item = (Native, &'static str, &'static str, &'static str)> {
    FAMILIES.into_iter().map(|(template, calls, other, wrong)| {
        let native = Native::of(template, |_| false).expect("a template of the family");
        (native, calls, other, wrong)
    })
}

#[test]
fn a_template_tells_how_calls_are_marked() {
    for (native, calls, ..) in families() {
        assert!(calls.starts_with(native.open), "{native:?}");
    }
    // No template of LFM 2.5 has the marks.
    let is_control = |mark: &str| mark == Native::LFM2.open;
    let tools = "{{ 'List of tools: ' + tools }}";
    assert_eq!(Native::of(tools, is_control), Some(Native::LFM2));
    for other in [
        tools,
        "{{ '<tool_call>\\n' + call | tojson }}",
        "{{ '{\"name\": ' }}",
        "",
    ] {
        assert_eq!(Native::of(other, |_| false), None, "{other}");
    }
}

#[test]
fn calls_of_the_tools_may_come_and_no_others() {
    for (native, calls, other, wrong) in families() {
        for control in [false, true] {
            for (choice, before) in [("required", ""), ("auto", native.open)] {
                let take = |text: &str| {
                    let text = text.strip_prefix(before).expect("it begins with the mark");
                    held(native, choice, false, control).takes(text)
                };
                let case = format!("{native:?} {choice} {control}");
                assert_eq!(take(calls), (true, true), "{case}");
                assert_eq!(take(other), (false, false), "{case} {other}");
                assert_eq!(take(wrong), (false, false), "{case} {wrong}");
            }
        }
    }
}

#[test]
fn of_calls_that_may_be_made_once_the_second_may_not_come() {
    for (native, calls, ..) in families() {
        let mut held = held(native, "required", true, true);
        assert_eq!(held.takes(calls), (false, false), "{native:?}");
    }
}

/// The text and the calls of a reply, given in pieces of one character.
fn read(native: Native, reply: &str) -> (String, Vec<(String, Value)>) {
    let pieces = reply.split_inclusive(|_| true);
    let (text, calls) = read_in(ToolSyntax::Native(native), pieces);
    let value = |arguments: String| serde_json::from_str(&arguments).expect("JSON");
    let calls = calls.into_iter();
    (
        text,
        calls
            .map(|(name, arguments)| (name, value(arguments)))
            .collect(),
    )
}

#[test]
fn calls_are_read_as_they_may_come() {
    for (native, calls, other, _) in families() {
        let (text, found) = read(native, &format!("Let me see.{calls}"));
        assert_eq!(text, "Let me see.", "{native:?}");
        let expected = [
            ("weather".to_owned(), json!({"city": "Bonn", "unit": "C"})),
            ("now".to_owned(), json!({})),
        ];
        assert_eq!(found, expected, "{native:?}");
        // What only looks like a call stays as it was written.
        let (text, found) = read(native, other);
        assert_eq!((text.as_str(), found.len()), (other, 0), "{native:?}");
    }
}

#[test]
fn arguments_have_the_types_that_they_are_written_in() {
    let expected = json!({"city": "5", "days": 2, "unit": "F", "hourly": true});
    for (template, call) in [
        (
            "<|tool_list_start|>",
            "<|tool_call_start|>[weather(city='5', days=2, unit=\"F\", hourly=True)]<|tool_call_end|>",
        ),
        (
            "<|tool_call>",
            "<|tool_call>call:weather{city:<|\"|>5<|\"|>,days:2,unit:<|\"|>F<|\"|>,hourly:true}<tool_call|>",
        ),
        (
            "<tool_call><arg_key>",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>5</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>\
             <arg_key>unit</arg_key><arg_value>F</arg_value><arg_key>hourly</arg_key><arg_value>true</arg_value></tool_call>",
        ),
        (
            // As Qwen 3.5's template writes what is true.
            "<tool_call><function=",
            "<tool_call>\n<function=weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n2\n</parameter>\n\
             <parameter=unit>\nF\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "<tool_call><function=",
            "<tool_call>\n<function=weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n2\n</parameter>\n\
             <parameter=unit>\nF\n</parameter>\n<parameter=hourly>\ntrue\n</parameter>\n</function>\n</tool_call>",
        ),
    ] {
        let native = Native::of(template, |_| false).expect("a family's");
        assert_eq!(
            held(native, "required", false, true).takes(call),
            (true, true),
            "{call}"
        );
        assert_eq!(
            read(native, call).1,
            [("weather".to_owned(), expected.clone())],
            "{call}"
        );
    }
}

#[test]
fn what_is_not_required_may_be_left_out_and_the_rest_not() {
    let native = Native::of("<|tool_list_start|>", |_| false).expect("LFM2's");
    for (call, may) in [
        (
            "[weather(city=\"B\", days=1, unit=\"C\")]<|tool_call_end|>",
            true,
        ),
        (
            "[weather(city=\"B\", unit=\"C\", hourly=False)]<|tool_call_end|>",
            true,
        ),
        ("[weather(unit=\"C\")]<|tool_call_end|>", false),
        ("[weather(city=\"B\")]<|tool_call_end|>", false),
        ("[now()]<|tool_call_end|>", true),
    ] {
        let taken = held(native, "auto", false, true).takes(call);
        assert_eq!(taken, (may, may), "{call}");
    }
}

#[test]
fn arguments_that_say_more_than_names_are_json_between_the_marks() {
    let native = Native::of("<|tool_list_start|>", |_| false).expect("LFM2's");
    let parameters = json!({"anyOf": [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false},
        {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"], "additionalProperties": false},
    ]});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let tools = Tools::new(vec![tool], None).expect("valid");
    let rule = Rule::new(
        None,
        &tools,
        ToolSyntax::Native(native),
        &mut Ignored::new(true),
    );
    let rule = rule.expect("valid").expect("tools are offered");
    let marks = native.marks();
    let vocabulary = vocabulary(&marks);
    let factory = ParserFactory::new_simple(&vocabulary).expect("a vocabulary");
    let parser = factory.create_parser(rule.grammar(vocabulary.tok_trie()));
    let mut matcher = Matcher::new(Ok(parser.expect("a grammar")));
    let call = "[{\"name\": \"f\", \"arguments\": {\"b\": 1}}]<|tool_call_end|>";
    let call_tokens = tokens(call, &marks);
    let taken = matcher.try_consume_tokens(&call_tokens);
    assert_eq!(taken.expect("within bounds"), call_tokens.len());
    let mut reader = CallReader::new(ToolSyntax::Native(native), &tools, "r");
    let pieces = reader.push(&format!("{}{call}", native.open));
    assert!(matches!(pieces.as_slice(), [Piece::Call(_)]), "{pieces:?}");
}

#[test]
fn values_that_are_not_closed_or_too_deep_are_none() {
    let native = Native::of("<|tool_list_start|>", |_| false).expect("LFM2's");
    for body in [
        "[weather(city=\"B".to_owned(),
        "[weather(city=)]".to_owned(),
        "[weather(city=\"B\" unit=1)]".to_owned(),
        format!("[weather(city={})]", "[".repeat(100_000)),
        "[weather(city=nonsense)]".to_owned(),
        "[]".to_owned(),
    ] {
        let reply = format!("<|tool_call_start|>{body}<|tool_call_end|>");
        let (text, calls) = read_at_once(native, &reply);
        assert_eq!((text, calls), (reply, 0));
    }
}

fn read_at_once(native: Native, reply: &str) -> (String, usize) {
    let (text, calls) = read_in(ToolSyntax::Native(native), [reply]);
    (text, calls.len())
}

/// What is told of a reply that comes in these pieces. Ids of calls follow from their number.
fn read_in<'a>(
    syntax: ToolSyntax,
    reply: impl IntoIterator<Item = &'a str>,
) -> (String, Vec<(String, String)>) {
    read_with(&offered("auto", false), syntax, reply)
}

/// The same of a reply to an offer of `tools`.
fn read_with<'a>(
    tools: &Tools,
    syntax: ToolSyntax,
    reply: impl IntoIterator<Item = &'a str>,
) -> (String, Vec<(String, String)>) {
    let mut reader = CallReader::new(syntax, tools, "r");
    let reply = reply.into_iter();
    let mut pieces: Vec<Piece> = reply.flat_map(|piece| reader.push(piece)).collect();
    pieces.extend(reader.finish(""));
    let (mut text, mut calls) = (String::new(), Vec::new());
    for piece in pieces {
        match piece {
            Piece::Text(more) => text += &more,
            Piece::Call(call) => {
                calls.push((call.name().to_owned(), call.arguments().to_owned()));
            }
        }
    }
    (text, calls)
}

/// Every way to write calls that there is.
fn syntaxes() -> Vec<ToolSyntax> {
    let natives = families().map(|(native, ..)| native);
    let others = [
        ToolSyntax::Tagged,
        ToolSyntax::Bare,
        ToolSyntax::BareParameters,
        ToolSyntax::Harmony,
    ];
    natives.map(ToolSyntax::Native).chain(others).collect()
}

/// Parts of replies: marks, whole calls, calls with a byte too many or too few, brackets, and other characters.
fn part() -> impl Strategy<Value = String> {
    let marks = families().flat_map(|(native, ..)| native.marks());
    let marks: Vec<String> = marks.map(str::to_owned).collect();
    let calls = families().flat_map(|(_, calls, other, wrong)| [calls, other, wrong]);
    let calls: Vec<String> = calls.map(str::to_owned).collect();
    let cut = (
        prop::sample::select(calls.clone()),
        any::<prop::sample::Index>(),
    );
    prop_oneof![
        prop::sample::select(marks),
        prop::sample::select(calls),
        cut.prop_map(|(call, at)| {
            let mut call = call;
            call.remove(at.index(call.len()));
            call
        }),
        "[ \\[\\]{}()<>|/:=,\"'\\\\a-c0-2\u{e9}\u{1f600}]{0,6}",
        Just("{\"name\": \"now\", \"arguments\": {}}".to_owned()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// However a reply is cut, the same is told of it; and where no call is, it is what was written.
    #[test]
    fn whatever_is_written_is_read_the_same_however_it_comes(
        parts in prop::collection::vec(part(), 0..6),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let reply = parts.concat();
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(reply.len() + 1)).collect();
        ends.retain(|&end| reply.is_char_boundary(end));
        ends.extend([0, reply.len()]);
        ends.sort_unstable();
        let pieces = || ends.windows(2).map(|ends| &reply[ends[0]..ends[1]]);
        for syntax in syntaxes() {
            let whole = read_in(syntax, [reply.as_str()]);
            prop_assert_eq!(&read_in(syntax, pieces()), &whole, "{:?}", syntax);
            let (text, calls) = whole;
            match calls.is_empty() {
                true => prop_assert_eq!(&text, &reply, "{:?}", syntax),
                false => prop_assert!(text.len() < reply.len(), "{:?}", syntax),
            }
            for (_, arguments) in calls {
                let read: Result<Value, _> = serde_json::from_str(&arguments);
                prop_assert!(read.is_ok_and(|arguments| arguments.is_object()), "{}", arguments);
            }
        }
    }
}
