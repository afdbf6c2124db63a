//! Rendered conversations against Jinja2 in the environment of `transformers`.

use std::time::{Duration, UNIX_EPOCH};

use lacuna_text::template::{Chat, ChatTemplate, GenerationPrompt, Message, TemplateError};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Reference {
    now: String,
    templates: Map<String, Value>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    variables: Map<String, Value>,
    rendered: Option<String>,
    error: Option<String>,
}

/// Renders with the variables of a case, each where the crate takes it.
fn render(source: &str, mut variables: Map<String, Value>) -> Result<String, TemplateError> {
    let messages: Vec<Message> =
        serde_json::from_value(variables.remove("messages").unwrap_or_default()).unwrap();
    let text = |value: Option<Value>| value.map(|value| value.as_str().unwrap().to_owned());
    let bos = text(variables.remove("bos_token"));
    let eos = text(variables.remove("eos_token"));
    let tools: Option<Vec<Value>> = variables
        .remove("tools")
        .and_then(|tools| serde_json::from_value(tools).unwrap());
    let add = variables.remove("add_generation_prompt") == Some(Value::Bool(true));
    let chat = Chat {
        messages: &messages,
        generation_prompt: if add {
            GenerationPrompt::Add
        } else {
            GenerationPrompt::Omit
        },
        bos_token: bos.as_deref(),
        eos_token: eos.as_deref(),
        tools: tools.as_deref(),
        variables,
        now: Some(UNIX_EPOCH + Duration::from_secs(1_721_997_005)),
    };
    ChatTemplate::compile(source)?.render(&chat)
}

#[test]
fn every_case_of_the_reference_agrees() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../reference/templates/templates.json"
    );
    let reference: Reference =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(
        reference.now, "2024-07-26T12:30:05",
        "the time the cases below are rendered at"
    );
    for case in reference.cases {
        let source = reference.templates[&case.name].as_str().unwrap();
        let result = render(source, case.variables.clone());
        match (result, case.rendered, case.error) {
            (Ok(text), Some(expected), _) => assert_eq!(text, expected, "{}", case.name),
            (Err(TemplateError::Raised { message }), _, Some(expected)) => {
                assert_eq!(message, expected, "{}", case.name);
            }
            (result, expected, error) => panic!(
                "{}: {result:?}\nexpected {expected:?} or {error:?}\nfor {:?}",
                case.name, case.variables
            ),
        }
    }
}
