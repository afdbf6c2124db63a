//! A recorded session of a programming agent: instructions, tools, and what was said, called and answered in turn.
//!
//! What people and the model say is in `fixtures/session.json`. Files, logs and lists of matches, which are most of what an
//! agent reads, are made from it: as long as the session is to be, and the same every time.

use lacuna_cli::output::Usage;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Bytes of a token in such a session, about: numbers and punctuation have more of them than sentences.
const BYTES_PER_TOKEN: usize = 3;
/// The part of the last prompt that instructions, tools and notes of the project take.
const HEAD_PART: f64 = 0.45;

#[derive(Debug, Deserialize)]
struct Recorded {
    instructions: Vec<String>,
    tools: Vec<Tool>,
    task: String,
    turns: Vec<Turn>,
}

#[derive(Debug, Deserialize)]
struct Tool {
    name: String,
    description: String,
    /// All of them texts: what each is for.
    parameters: Map<String, Value>,
}

/// What the model says, and what comes back.
#[derive(Debug, Deserialize)]
struct Turn {
    says: String,
    #[serde(flatten)]
    then: Then,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Then {
    Calls {
        calls: String,
        arguments: Map<String, Value>,
        result: Kind,
    },
    Asked {
        user: String,
    },
}

/// What a tool answers with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Source,
    Matches,
    Log,
}

/// How tools, calls and their results are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// As the interface has them: what a model reads of them is up to its template.
    Native,
    /// As texts of the messages, so that every server computes the same.
    Text,
}

/// A session of which each turn sends what came before and something more.
#[derive(Debug)]
pub(super) struct Trace {
    tools: Option<Vec<Value>>,
    /// The messages of the last turn.
    messages: Vec<Value>,
    /// How many of them each turn sends.
    ends: Vec<usize>,
}

impl Trace {
    /// A session whose last prompt has about so many `tokens`.
    ///
    /// # Errors
    /// [`Usage`] when that is less than what was said comes to.
    pub(super) fn new(tokens: usize, form: Form) -> Result<Self, Usage> {
        let recorded: Recorded = serde_json::from_str(include_str!("fixtures/session.json"))
            .expect("the fixture is a part of the program");
        let tools: Vec<Value> = recorded.tools.iter().map(Tool::json).collect();
        let said = said_bytes(&recorded, &tools);
        let bytes = tokens.saturating_mul(BYTES_PER_TOKEN);
        let results = recorded.turns.iter().filter(|turn| turn.is_call()).count();
        if bytes < said {
            let least = said.div_ceil(BYTES_PER_TOKEN);
            return Err(Usage(format!(
                "--tokens {tokens}: what is said in the session comes to {least} tokens"
            )));
        }
        let notes = ((bytes as f64 * HEAD_PART) as usize).saturating_sub(said);
        let result = (bytes - said - notes) / results;
        let mut system = recorded.instructions.join("\n\n");
        system += "\n\nNotes on the project, as they are kept in its checkout:\n\n";
        system += &made(Kind::Log, 0, notes);
        if form == Form::Text {
            let written: Vec<String> = tools.iter().map(Value::to_string).collect();
            system += &format!("\n\nTools, one a line:\n\n{}", written.join("\n"));
        }
        let mut messages = vec![
            json!({"role": "system", "content": system}),
            json!({"role": "user", "content": recorded.task}),
        ];
        let mut ends = vec![messages.len()];
        for (number, turn) in recorded.turns.into_iter().enumerate() {
            messages.extend(turn.messages(number, form, result));
            ends.push(messages.len());
        }
        Ok(Self {
            tools: (form == Form::Native).then_some(tools),
            messages,
            ends,
        })
    }

    /// How often the agent asks.
    pub(super) fn turns(&self) -> usize {
        self.ends.len()
    }

    /// What is asked in turn number `turn`, from zero.
    pub(super) fn request(&self, turn: usize) -> Value {
        let mut request = json!({"messages": self.messages[..self.ends[turn]]});
        if let Some(tools) = &self.tools {
            request["tools"] = json!(tools);
        }
        request
    }
}

/// Bytes of what is recorded, as it is sent.
fn said_bytes(recorded: &Recorded, tools: &[Value]) -> usize {
    let instructions: usize = recorded.instructions.iter().map(String::len).sum();
    let tools: usize = tools.iter().map(|tool| tool.to_string().len()).sum();
    let turns: usize = recorded.turns.iter().map(|turn| turn.says.len()).sum();
    instructions + tools + turns + recorded.task.len()
}

impl Tool {
    fn json(&self) -> Value {
        let parameters = self.parameters.iter();
        let properties: Map<String, Value> = parameters
            .map(|(name, about)| {
                (
                    name.clone(),
                    json!({"type": "string", "description": about}),
                )
            })
            .collect();
        json!({"type": "function", "function": {
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": Vec::from_iter(self.parameters.keys().next()),
            },
        }})
    }
}

impl Turn {
    fn is_call(&self) -> bool {
        matches!(self.then, Then::Calls { .. })
    }

    /// What turn `number` adds to the conversation, with `bytes` of a tool's answer.
    fn messages(self, number: usize, form: Form, bytes: usize) -> [Value; 2] {
        let says = self.says;
        let (name, arguments, result) = match self.then {
            Then::Asked { user } => {
                return [
                    json!({"role": "assistant", "content": says}),
                    json!({"role": "user", "content": user}),
                ];
            }
            Then::Calls {
                calls,
                arguments,
                result,
            } => (calls, arguments, made(result, number as u64 + 1, bytes)),
        };
        let id = format!("call_{number}");
        match form {
            Form::Native => [
                json!({"role": "assistant", "content": says, "tool_calls": [{
                    "id": id,
                    "type": "function",
                    "function": {"name": name, "arguments": json!(arguments).to_string()},
                }]}),
                json!({"role": "tool", "tool_call_id": id, "content": result}),
            ],
            Form::Text => {
                let call = json!({"name": name, "arguments": arguments});
                [
                    json!({"role": "assistant", "content": format!("{says}\n<tool_call>\n{call}\n</tool_call>")}),
                    json!({"role": "user", "content": format!("<tool_response>\n{result}\n</tool_response>")}),
                ]
            }
        }
    }
}

/// A text of about so many `bytes`, of whole lines.
fn made(kind: Kind, seed: u64, bytes: usize) -> String {
    let mut words = Words(seed);
    let (mut text, mut number) = (String::with_capacity(bytes), 0);
    while text.len() < bytes {
        number += 1;
        text += &match kind {
            Kind::Source => words.source(number),
            Kind::Matches => words.matched(),
            Kind::Log => words.log(number),
        };
    }
    text
}

/// Words in an order that does not repeat, and is the same every time.
struct Words(u64);

impl Words {
    const NOUNS: [&str; 24] = [
        "request", "delay", "limit", "attempt", "client", "queue", "reply", "header", "socket",
        "budget", "session", "token", "worker", "record", "cursor", "batch", "window", "handle",
        "status", "folder", "segment", "counter", "deadline", "address",
    ];
    const VERBS: [&str; 16] = [
        "read", "write", "check", "take", "release", "find", "count", "open", "close", "merge",
        "split", "retry", "send", "parse", "store", "drop",
    ];

    /// The next of a sequence with a period of 2^64, its high bits being the better ones (Knuth's multiplier).
    fn next(&mut self) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as usize
    }

    fn noun(&mut self) -> &'static str {
        Self::NOUNS[self.next() % Self::NOUNS.len()]
    }

    fn verb(&mut self) -> &'static str {
        Self::VERBS[self.next() % Self::VERBS.len()]
    }

    fn number(&mut self) -> usize {
        self.next() % 1000
    }

    fn source(&mut self, number: usize) -> String {
        let (verb, noun, other) = (self.verb(), self.noun(), self.noun());
        let (most, step) = (self.number(), self.verb());
        format!(
            "{number:5}  /// Has to {verb} the {noun} before its {other} is known.\n\
             {number:5}  fn {verb}_{noun}(&mut self, {other}: usize) -> Result<(), Error> {{\n\
             {number:5}      let most = self.{noun}.len().min({most});\n\
             {number:5}      (0..most).try_for_each(|at| self.{step}_{other}(at, {other}))\n\
             {number:5}  }}\n"
        )
    }

    fn matched(&mut self) -> String {
        let (file, line) = (self.noun(), self.number());
        let (verb, noun, other) = (self.verb(), self.noun(), self.noun());
        format!("src/{file}.rs:{line}:    let {noun} = self.{verb}_{other}({noun})?;\n")
    }

    fn log(&mut self, number: usize) -> String {
        let (verb, noun, other) = (self.verb(), self.noun(), self.noun());
        let took = self.number();
        format!(
            "{number}. {noun}::{verb}_{other}: the {other} has to {verb} within {took} ms ... ok\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_ten_turns_twenty_tools_and_about_as_many_tokens_as_asked() {
        for tokens in [8_000, 25_000] {
            let trace = Trace::new(tokens, Form::Native).expect("long enough");
            assert_eq!(trace.turns(), 10);
            let last = trace.request(9);
            assert_eq!(last["tools"].as_array().map(Vec::len), Some(20));
            let length = last.to_string().len() as f64 / (tokens * BYTES_PER_TOKEN) as f64;
            assert!((0.95..1.2).contains(&length), "{length} at {tokens}");
        }
        Trace::new(100, Form::Native).expect_err("shorter than what is said");
    }

    #[test]
    fn each_turn_begins_with_the_last_one_and_is_the_same_every_time() {
        for form in [Form::Native, Form::Text] {
            let [trace, again] = [(); 2].map(|()| Trace::new(8_000, form).expect("long enough"));
            for turn in 1..trace.turns() {
                let [before, after] = [turn - 1, turn].map(|turn| trace.request(turn));
                let [before, after] =
                    [&before, &after].map(|it| it["messages"].as_array().expect("a list"));
                assert_eq!(after.len(), before.len() + 2);
                assert!(after.starts_with(before));
                assert_eq!(trace.request(turn), again.request(turn));
            }
        }
    }

    #[test]
    fn a_session_of_texts_says_nothing_that_a_template_could_leave_out() {
        let trace = Trace::new(8_000, Form::Text).expect("long enough");
        let request = trace.request(9);
        assert_eq!(request.get("tools"), None);
        for message in request["messages"].as_array().expect("a list") {
            assert_eq!(message.get("tool_calls"), None);
            assert_ne!(message["role"], "tool");
            assert!(message["content"].is_string());
        }
        let system = request["messages"][0]["content"].as_str().expect("a text");
        assert!(system.contains("\"name\":\"ask_person\""));
    }
}
