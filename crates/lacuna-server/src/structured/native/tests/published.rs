//! Calls as chat templates write them that others have published: whatever a template writes of earlier calls, which is what
//! its model learnt, is read as those calls, and is what the grammar holds replies to.

use std::fs;
use std::path::PathBuf;

use lacuna_text::template::{Chat, ChatTemplate, GenerationPrompt, Message};
use serde_json::{Value, json};

use super::{held_in, read_with};
use crate::structured::tools::{ToolSyntax, Tools};

/// Templates whose calls are not compared, and why.
const OTHERS: [(&str, &str); 34] = [
    ("Apertus-8B-Instruct", MARKS),
    ("ByteDance-Seed-OSS", MARKS),
    ("CohereForAI-c4ai-command-r-plus-tool_use", MARKS),
    ("GigaChat3-10B-A1.8B", MARKS),
    ("GigaChat3.1-10B-A1.8B", MARKS),
    ("HuggingFaceTB-SmolLM3-3B", NO_CALLS),
    ("Kimi-K2-Instruct", NOT_RENDERED),
    ("Kimi-K2-Thinking", NOT_RENDERED),
    ("Kimi-K3", MARKS),
    ("LFM2-8B-A1B", NO_CALLS),
    ("LFM2.5-Instruct", NO_CALLS),
    ("MiniMax-M1", MARKS),
    ("MiniMax-M2", MARKS),
    ("MiniMax-M3", MARKS),
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", NO_CALLS),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", MARKS),
    ("deepseek-ai-DeepSeek-V3.1", MARKS),
    ("deepseek-ai-DeepSeek-V3.2", MARKS),
    ("deepseek-ai-DeepSeek-V4", MARKS),
    ("deepseek-ai-DeepSeek-V4-Flash-0731", MARKS),
    ("fireworks-ai-llama-3-firefunction-v2", NOT_RENDERED),
    ("google-gemma-2-2b-it", NO_CALLS),
    ("ibm-granite-granite-3.3-2B-Instruct", NO_CALLS),
    ("llama-cpp-deepseek-r1", MARKS),
    ("llama-cpp-rwkv-world", NO_CALLS),
    ("meetkai-functionary-medium-v3.1", MARKS),
    ("meetkai-functionary-medium-v3.2", NOT_RENDERED),
    ("microsoft-Phi-3.5-mini-instruct", NO_CALLS),
    ("moonshotai-Kimi-K2", MARKS),
    ("muse-glimmer", MARKS),
    (
        "openai-gpt-oss-120b",
        "Harmony has tests of its own, of whole transcripts",
    ),
    ("openbmb-MiniCPM5-1B", MARKS),
    ("tencent-Hy3", MARKS),
    ("upstage-Solar-Open-100B", MARKS),
];
/// Models of these families are told of tools, and what they write is text.
const MARKS: &str = "marks that are not known here";
const NO_CALLS: &str = "writes no earlier calls";
const NOT_RENDERED: &str =
    "changes lists in place, or refuses these messages, which other renderers accept in part";

/// What ends texts.
const END: &str = "</s>";

fn templates() -> Vec<(String, String)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/models/templates");
    let entries = fs::read_dir(folder).expect("fetched by .ci/fetch-models templates");
    let paths = entries.flatten().map(|entry| entry.path());
    let paths = paths.filter(|path| path.extension().is_some_and(|suffix| suffix == "jinja"));
    let mut found: Vec<(String, String)> = paths
        .map(|path| {
            let name = path.file_stem().expect("a name").to_string_lossy();
            (name.into_owned(), fs::read_to_string(&path).expect("text"))
        })
        .collect();
    found.sort();
    found
}

fn tools() -> Vec<Value> {
    let tool = |name: &str, parameters: Value| {
        json!({"type": "function", "function": {
            "name": name, "description": "A tool.", "parameters": parameters,
        }})
    };
    let weather = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "A city."},
            "days": {"type": "integer", "description": "How many."},
            "hourly": {"type": "boolean", "description": "By the hour."},
            "places": {"type": "array", "items": {"type": "string"}, "description": "Within it."},
            "unit": {"type": "string", "enum": ["C", "F"], "description": "Of degrees."},
        },
        "required": ["city", "unit"],
    });
    let none = json!({"type": "object", "properties": {}, "required": []});
    vec![tool("weather", weather), tool("now", none)]
}

fn calls() -> Vec<(String, Value)> {
    let weather = json!({
        "city": "Bonn", "days": 3, "hourly": true, "places": ["a b", "c"], "unit": "C",
    });
    vec![
        ("weather".to_owned(), weather),
        ("now".to_owned(), json!({})),
    ]
}

/// A message that makes these calls.
fn calling(calls: &[(String, Value)]) -> Message {
    let calls = calls.iter().enumerate().map(|(number, (name, arguments))| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": format!("call0000{number}"), "type": "function", "function": function})
    });
    let mut message = Message::new("assistant", "");
    message
        .more
        .insert("tool_calls".to_owned(), calls.collect());
    message
}

fn render(
    template: &ChatTemplate,
    messages: &[Message],
    generation_prompt: GenerationPrompt,
) -> Option<String> {
    let tools = tools();
    let chat = Chat {
        messages,
        generation_prompt,
        bos_token: Some("<s>"),
        eos_token: Some(END),
        tools: Some(&tools),
        ..Chat::default()
    };
    template.render(&chat).ok()
}

/// What a template writes of a message that makes `calls`, from before its first mark, or from its beginning, to behind the
/// last.
fn made(template: &ChatTemplate, syntax: ToolSyntax, calls: &[(String, Value)]) -> Option<String> {
    let question = Message::new("user", "What is the weather?");
    let before = |prompt| render(template, std::slice::from_ref(&question), prompt);
    let whole = [question.clone(), calling(calls)];
    let whole = render(template, &whole, GenerationPrompt::Omit)?;
    let common = |before: &str| {
        let same = before.bytes().zip(whole.bytes());
        let length = same.take_while(|(one, other)| one == other).count();
        (0..=length)
            .rev()
            .find(|&length| whole.is_char_boundary(length))
    };
    let whole = match syntax.ends() {
        Some(_) => &whole[common(&before(GenerationPrompt::Omit)?)?..],
        // Where nothing marks them, all that follows the prompt is the call.
        None => whole.strip_prefix(&before(GenerationPrompt::Add)?)?,
    };
    let whole = whole.split_once(END).map_or(whole, |(reply, _)| reply);
    let (begin, close) = match syntax.ends() {
        Some((open, close)) => (whole.find(open)?, close),
        None => (0, "}"),
    };
    let end = match close {
        "" => whole.len(),
        close => whole.rfind(close)? + close.len(),
    };
    whole.get(begin..end).map(str::to_owned)
}

/// Whether replies that make `calls`, as the template writes them, are read as these and held to nothing else.
fn is_known(source: &str, calls: &[(String, Value)]) -> Result<(), String> {
    let template = ChatTemplate::compile(source).map_err(|error| error.to_string())?;
    let syntax = ToolSyntax::of_template(source, |_| false);
    let reply = made(&template, syntax, calls).ok_or_else(|| format!("{syntax:?} writes none"))?;
    let offered = Tools::new(tools(), None).expect("tools");
    let (_, found) = read_with(&offered, syntax, [reply.as_str()]);
    let found: Vec<(String, Value)> = found
        .into_iter()
        .map(|(name, arguments)| (name, serde_json::from_str(&arguments).expect("JSON")))
        .collect();
    if found != calls {
        return Err(format!("{syntax:?} reads {found:?} of {reply:?}"));
    }
    match held_in(syntax, tools(), "required").takes(&reply) {
        (true, true) => Ok(()),
        _ => Err(format!("{syntax:?} does not hold to {reply:?}")),
    }
}

#[test]
#[ignore = "needs published chat templates: run .ci/fetch-models templates"]
fn calls_of_published_templates_are_read_and_are_what_replies_are_held_to() {
    let mut unknown = Vec::new();
    for (name, source) in templates() {
        let calls = calls();
        // Some write one call at most.
        let known = is_known(&source, &calls).or_else(|_| is_known(&source, &calls[..1]));
        if let Err(why) = known {
            println!("{name}: {why}");
            unknown.push(name);
        }
    }
    let expected: Vec<&str> = OTHERS.iter().map(|(name, _)| *name).collect();
    assert_eq!(unknown, expected);
}
