//! Replies that must conform.

use std::collections::HashSet;

use lacuna_pages::ByteLength;
use lacuna_server::Server;
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETION, Response, assert_nothing_held, post, posted, question, start, start_spoken,
    start_with, until,
};

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    })
}

fn check_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("JSON: {text}"));
    let fields: Vec<&String> = value.as_object().expect("an object").keys().collect();
    assert_eq!(fields, ["name", "age", "tags"]);
    assert!(
        value["name"]
            .as_str()
            .is_some_and(|name| name.chars().count() <= 12)
    );
    assert!(
        value["age"].as_u64().is_some_and(|age| age <= 150),
        "{value}"
    );
    let tags = value["tags"].as_array().expect("a list");
    assert!(tags.len() <= 3 && tags.iter().all(|tag| tag == "red" || tag == "green"));
}

#[test]
fn a_reply_conforms_to_its_schema_whole_streamed_and_in_every_choice() {
    let server = start();
    let format = json!({"type": "json_schema", "json_schema": {"name": "p", "schema": person(), "strict": true}});
    let fields = json!({"response_format": format, "max_tokens": 200, "temperature": 1.0, "n": 3, "seed": 3});
    let reply = posted(&server, CHAT, &question(fields.clone()));
    for choice in reply["choices"].as_array().expect("choices") {
        check_person(choice["message"]["content"].as_str().expect("text"));
        assert_eq!(choice["finish_reason"], "stop");
    }
    let mut streamed = question(fields);
    streamed["stream"] = json!(true);
    let mut texts = vec![String::new(); 3];
    for event in post(&server, CHAT, &streamed).events() {
        let choice = &event["choices"][0];
        let index = choice["index"].as_u64().expect("an index") as usize;
        texts[index] += choice["delta"]["content"].as_str().unwrap_or("");
    }
    for (text, choice) in texts
        .iter()
        .zip(reply["choices"].as_array().expect("choices"))
    {
        assert_eq!(choice["message"]["content"], *text);
    }
    assert_nothing_held(&server);
}

#[test]
fn any_object_is_an_object() {
    let server = start();
    let body = json!({
        "prompt": "An object:", "max_tokens": 300, "temperature": 0,
        "response_format": {"type": "json_object"},
    });
    let choice = &posted(&server, COMPLETION, &body)["choices"][0];
    let text = choice["text"].as_str().expect("text");
    assert!(text.starts_with('{'), "{text}");
    if choice["finish_reason"] == "stop" {
        serde_json::from_str::<serde_json::Map<String, Value>>(text).expect("an object");
    }
}

fn tools() -> Value {
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}});
    let city = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": false,
    });
    json!([tool("weather", city.clone()), tool("time", city)])
}

fn check_call(call: &Value, name: Option<&str>) {
    assert_eq!(call["type"], "function");
    assert!(call["id"].as_str().is_some_and(|id| id.len() == 9));
    let called = call["function"]["name"].as_str().expect("a name");
    assert!(
        name.map_or(called == "weather" || called == "time", |name| name
            == called)
    );
    let arguments = call["function"]["arguments"].as_str().expect("JSON text");
    let arguments: Value = serde_json::from_str(arguments).expect("JSON");
    assert!(
        arguments["city"] == "Paris" || arguments["city"] == "Rome",
        "{arguments}"
    );
}

#[test]
fn a_required_call_is_made_and_its_arguments_conform() {
    let server = start();
    for (choice, name) in [
        (json!("required"), None),
        (
            json!({"type": "function", "function": {"name": "time"}}),
            Some("time"),
        ),
    ] {
        let fields = json!({"tools": tools(), "tool_choice": choice, "max_tokens": 100});
        let reply = posted(&server, CHAT, &question(fields.clone()));
        let whole = &reply["choices"][0];
        assert_eq!(whole["finish_reason"], "tool_calls", "{reply}");
        assert_eq!(whole["message"]["content"], Value::Null);
        let calls = whole["message"]["tool_calls"].as_array().expect("calls");
        assert_eq!(calls.len(), 1);
        check_call(&calls[0], name);

        let mut streamed = question(fields);
        streamed["stream"] = json!(true);
        let events = post(&server, CHAT, &streamed).events();
        let deltas: Vec<&Value> = events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"].get("tool_calls"))
            .collect();
        assert_eq!(deltas.len(), 1);
        assert_eq!(deltas[0][0]["index"], 0);
        assert_eq!(deltas[0][0]["function"], calls[0]["function"]);
        let last = events.last().expect("events");
        assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
    }
    assert_nothing_held(&server);
}

#[test]
fn tools_are_in_the_prompt_even_of_a_template_that_ignores_them_unless_none_may_be_called() {
    let server = start();
    let reply = |fields: Value| posted(&server, CHAT, &question(fields));
    let plain = reply(json!({}));
    let none = reply(json!({"tools": tools(), "tool_choice": "none"}));
    assert_eq!(none["choices"], plain["choices"]);
    assert_eq!(
        none["usage"]["prompt_tokens"],
        plain["usage"]["prompt_tokens"]
    );
    let prompt = |reply: &Value| reply["usage"]["prompt_tokens"].as_u64().expect("a number");
    let one = reply(json!({"tools": [tools()[0]], "tool_choice": "auto"}));
    let two = reply(json!({"tools": tools(), "tool_choice": "auto"}));
    assert!(prompt(&plain) < prompt(&one) && prompt(&one) < prompt(&two));
}

/// Tools of two documents whose definitions have the same names, one of them recursive.
fn nested_tools() -> Value {
    let tool = |name: &str, colour: &str| {
        json!({"type": "function", "function": {"name": name, "parameters": {
            "$defs": {
                "Colour": {"enum": [colour], "type": "string"},
                "Node": {
                    "type": "object",
                    "properties": {
                        "colour": {"$ref": "#/$defs/Colour"},
                        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]},
                    },
                    "required": ["colour", "next"],
                    "additionalProperties": false,
                },
            },
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/Node"}, "again": {"$ref": "#/properties/first"}},
            "required": ["first", "again"],
        }}})
    };
    json!([tool("paint", "red"), tool("erase", "green")])
}

#[test]
fn references_are_relative_to_each_tools_own_parameters() {
    let server = start();
    for (name, colour) in [("paint", "red"), ("erase", "green")] {
        let choice = json!({"type": "function", "function": {"name": name}});
        let fields = json!({"tools": nested_tools(), "tool_choice": choice, "max_tokens": 200});
        let reply = posted(&server, CHAT, &question(fields));
        let call = &reply["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(call["name"], name, "{reply}");
        let arguments = call["arguments"].as_str().expect("text");
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        assert_eq!(arguments["first"]["colour"], colour);
        assert_eq!(arguments["again"]["colour"], colour);
        assert_eq!(arguments.as_object().expect("an object").len(), 2);
    }
    for choice in ["required", "auto"] {
        let fields = json!({"tools": nested_tools(), "tool_choice": choice, "max_tokens": 100});
        posted(&server, CHAT, &question(fields));
    }
}

/// Calls of all choices had the names of the first one's.
#[test]
fn calls_of_several_choices_have_names_of_their_own() {
    let server = start();
    let tools = json!([{"type": "function", "function": {"name": "now"}}]);
    let fields = json!({"tools": tools, "tool_choice": "required", "max_tokens": 60, "n": 3});
    let reply = posted(&server, CHAT, &question(fields));
    let choices = reply["choices"].as_array().expect("choices").iter();
    let ids = choices.map(|choice| choice["message"]["tool_calls"][0]["id"].as_str());
    let ids: HashSet<&str> = ids.map(|id| id.expect("a name")).collect();
    assert_eq!(ids.len(), 3, "{reply}");
}

#[test]
fn a_tool_without_parameters_gets_none() {
    let server = start();
    for function in [
        json!({"name": "now"}),
        json!({"name": "now", "parameters": null}),
        json!({"name": "now", "parameters": {}}),
        json!({"name": "now", "parameters": {"type": "object", "properties": {}}}),
    ] {
        let tools = json!([{"type": "function", "function": function}]);
        let fields = json!({"tools": tools, "tool_choice": "required", "max_tokens": 60});
        let reply = posted(&server, CHAT, &question(fields));
        let call = &reply["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(call["arguments"], "{}", "{function}: {reply}");
    }
}

#[test]
fn objects_within_arguments_hold_what_their_schemas_name_and_nothing_else() {
    let server = start();
    let empty = json!({"type": "object", "properties": {}});
    let parameters = json!({
        "type": "object",
        "properties": {
            "where": empty,
            "list": {"type": "array", "items": empty, "minItems": 2, "maxItems": 2},
            "again": {"$ref": "#/$defs/Empty"},
        },
        "required": ["where", "list", "again"],
        "$defs": {"Empty": empty},
    });
    let tools = json!([{"type": "function", "function": {"name": "go", "parameters": parameters}}]);
    let fields = json!({"tools": tools, "tool_choice": "required", "max_tokens": 200});
    let reply = posted(&server, CHAT, &question(fields));
    let call = &reply["choices"][0]["message"]["tool_calls"][0]["function"];
    let arguments = call["arguments"].as_str().expect("JSON text");
    let arguments: Value = serde_json::from_str(arguments).expect("JSON");
    let expected = json!({"where": {}, "list": [{}, {}], "again": {}});
    assert_eq!(arguments, expected, "{reply}");
}

/// What a client is told must not be the words of a library.
fn assert_own_words(error: &Value) {
    let message = error["message"].as_str().expect("a message");
    for word in [
        "invalid type",
        "f32",
        "u64",
        "usize",
        "struct ",
        "enum ",
        "Unimplemented",
        "Unsatisfiable",
        "unsatisfiable",
        "anyhow",
        "grammar",
        "lark",
        "lexer",
        "regex",
        "chat_template:",
        "minijinja",
        "invalid operation",
        "line 1 column",
        "expected value",
    ] {
        assert!(!message.contains(word), "{word}: {message}");
    }
}

#[test]
fn schemas_that_nothing_conforms_to_are_refused_where_they_stand() {
    let server = start();
    let string = json!({"type": "string"});
    for (schema, place) in [
        (json!({"not": {}}), ".not"),
        (json!({"enum": []}), ""),
        (json!({"type": "integer", "enum": ["a"]}), ""),
        (json!({"type": "integer", "minimum": 3, "maximum": 2}), ""),
        (
            json!({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}),
            "",
        ),
        (
            json!({"type": "number", "multipleOf": 10, "minimum": 1, "maximum": 9}),
            "",
        ),
        (
            json!({"type": "string", "minLength": 3, "maxLength": 2}),
            "",
        ),
        (json!({"type": "array", "minItems": 2, "maxItems": 1}), ""),
        (
            json!({"type": "array", "items": false, "minItems": 1}),
            ".items",
        ),
        (json!({"allOf": [string, {"type": "integer"}]}), ""),
        (json!({"anyOf": []}), ".anyOf"),
        (
            json!({"type": "object", "properties": {"x": false}, "required": ["x"]}),
            ".properties.x",
        ),
        (
            json!({"type": "object", "additionalProperties": false, "required": ["x"]}),
            ".additionalProperties",
        ),
        (
            json!({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}),
            "",
        ),
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "",
        ),
        (
            json!({"type": "string", "allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}),
            "",
        ),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "p", "schema": schema}});
        let fields = json!({"response_format": format, "max_tokens": 50});
        let response = post(&server, CHAT, &question(fields));
        assert_eq!(response.status, 400, "{schema}: {response:?}");
        let error = &response.json()["error"];
        let path = format!("response_format.json_schema.schema{place}");
        let param = error["param"].as_str().expect("a field");
        assert!(param.starts_with(&path), "{schema}: {error}");
        assert_own_words(error);

        let tools = json!([{"type": "function", "function": {"name": "f", "parameters":
            {"type": "object", "properties": {"y": schema}, "required": ["y"]}}}]);
        let fields = json!({"tools": tools, "tool_choice": "required", "max_tokens": 50});
        if schema.get("$ref").is_none() && !schema.to_string().contains("\"#\"") {
            let response = post(&server, CHAT, &question(fields));
            assert_eq!(response.status, 400, "{schema}: {response:?}");
            assert_own_words(&response.json()["error"]);
        }
    }
    assert_nothing_held(&server);
}

/// A reply, or the beginning of one, that is to conform to a schema.
fn of_schema(server: &Server, schema: &Value) -> Response {
    let format = json!({"type": "json_schema", "json_schema": {"name": "p", "schema": schema}});
    let fields = json!({"response_format": format, "max_tokens": 20});
    post(server, CHAT, &question(fields))
}

/// A schema that refers to itself from a place where something is required was looked through without end, and the
/// stack of the thread overflowed: the whole process was gone.
#[test]
fn schemas_that_refer_to_themselves_are_followed() {
    let server = start();
    let list = json!({"$ref": "#/$defs/N", "$defs": {"N": {"type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}, "required": ["next"]}}});
    let sum = json!({"$ref": "#/$defs/e", "$defs": {
        "number": {"type": "object", "properties": {"of": {"const": 1}}, "required": ["of"]},
        "add": {"type": "object", "properties": {"l": {"$ref": "#/$defs/e"}, "r": {"$ref": "#/$defs/e"}},
            "required": ["l", "r"]},
        "e": {"anyOf": [{"$ref": "#/$defs/add"}, {"$ref": "#/$defs/number"}]},
    }});
    let beside = json!({"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "required": ["next"],
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N", "type": "object"}, {"type": "null"}]}}}}});
    let root = json!({"oneOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "integer"}]});
    // What stands beside a reference is made one with what it refers to, without end here.
    for (schema, status) in [(list, 200), (sum, 200), (root, 200), (beside, 400)] {
        let response = of_schema(&server, &schema);
        assert_eq!(response.status, status, "{schema}: {response:?}");
    }
    assert_nothing_held(&server);
}

/// Each reference was followed wherever it stood: twice from each of forty schemas, a million million in all.
#[test]
fn schemas_that_are_referred_to_often_are_looked_at_once() {
    let server = start();
    for (beside, status) in [(json!({}), 200), (json!({"type": "object"}), 400)] {
        let mut definitions = json!({"d40": {"type": "object"}});
        for i in 0..40 {
            let mut next = beside.clone();
            next["$ref"] = json!(format!("#/$defs/d{}", i + 1));
            definitions[format!("d{i}")] = json!({"type": "object", "properties": {"a": next, "b": next},
                "required": ["a", "b"], "additionalProperties": false});
        }
        let schema = json!({"$ref": "#/$defs/d0", "$defs": definitions});
        let response = of_schema(&server, &schema);
        assert_eq!(response.status, status, "{response:?}");
    }
    assert_nothing_held(&server);
}

/// Two families of schemas that hold together are made one at each place, twice as many at each step down.
#[test]
fn schemas_that_multiply_where_they_hold_together_are_refused() {
    let server = start();
    let mut definitions = json!({"a40": {"type": "object"}, "b40": {"type": "object"}});
    for (family, i) in ["a", "b"]
        .iter()
        .flat_map(|family| (0..40).map(move |i| (family, i)))
    {
        let next = json!({"$ref": format!("#/$defs/{family}{}", i + 1)});
        definitions[format!("{family}{i}")] =
            json!({"type": "object", "properties": {"l": next, "r": next}});
    }
    let both =
        json!({"allOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}], "$defs": definitions});
    let option = |from: u32| json!({"type": "object", "properties": {"x": {"enum": [from]}}});
    let choice = |from: u32| json!({"anyOf": (from..from + 60).map(option).collect::<Vec<_>>()});
    let choices = json!({"allOf": [choice(0), choice(30), choice(60), choice(90)]});
    for schema in [both, choices] {
        let response = of_schema(&server, &schema);
        assert_eq!(response.status, 400, "{response:?}");
        let error = &response.json()["error"];
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|text| text.contains("too large")),
            "{error}"
        );
    }
    assert_nothing_held(&server);
}

/// Numbers of a grammar have fractions, and whole ones beyond 2^53 became others: ids of 19 digits that nobody listed.
#[test]
fn whole_numbers_that_a_grammar_would_change_are_not_held_to_it() {
    let server = start();
    let with = |schema: &Value| of_schema(&server, schema);
    let (least, most) = (i64::MIN, i64::MAX);
    let of_words = json!({"type": "integer", "minimum": least, "maximum": most});
    let at = "response_format.json_schema.schema";
    for (schema, ignored) in [
        (of_words, format!("{at}.minimum,{at}.maximum")),
        (
            json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}),
            format!("{at}.maximum"),
        ),
        (
            json!({"type": "number", "minimum": -1e300}),
            format!("{at}.minimum"),
        ),
        (
            json!({"enum": [1_234_567_890_123_456_789_i64, 1]}),
            format!("{at}.enum"),
        ),
        (
            json!({"const": 9_007_199_254_740_993_i64}),
            format!("{at}.const"),
        ),
    ] {
        let response = with(&schema);
        assert_eq!(response.status, 200, "{schema}: {response:?}");
        assert_eq!(response.header("x-lacuna-ignored"), Some(ignored.as_str()));
        let reply = &response.json()["choices"][0]["message"]["content"];
        let reply = reply.as_str().expect("a text");
        assert!(
            reply.starts_with(|c: char| c == '-' || c.is_ascii_digit()),
            "{schema}: {reply}"
        );
    }
    let exact = with(&json!({"const": 1_152_921_504_606_846_976_i64}));
    let exact = &exact.json()["choices"][0]["message"]["content"];
    assert_eq!(
        exact, "1152921504606846976",
        "a power of two is written as it is"
    );
    for schema in [
        json!({"type": "integer", "minimum": 1_000_000_000_000_000_000_i64}),
        json!({"type": "number", "maximum": -1e300}),
        json!({"type": "integer", "minimum": 9_007_199_254_740_993_i64}),
    ] {
        let refused = with(&schema);
        assert_eq!(refused.status, 400, "{schema}: {refused:?}");
        let error = &refused.json()["error"];
        assert!(
            error["param"]
                .as_str()
                .is_some_and(|param| param.starts_with(at)),
            "{error}"
        );
        assert_own_words(error);
    }
}

#[test]
fn schemas_that_cannot_be_followed_are_refused_in_plain_words() {
    let server = start();
    for (schema, place) in [
        (
            json!({"properties": {"x": {"$ref": "other.json"}}}),
            ".properties.x.$ref",
        ),
        (
            json!({"properties": {"x": {"$ref": "#/$defs/missing"}}}),
            ".properties.x.$ref",
        ),
        (json!({"if": {"type": "string"}, "then": false}), ".if"),
        (json!({"type": "text"}), ".type"),
        (json!({"required": "x"}), ".required"),
        (json!({"minLength": -1}), ".minLength"),
        (json!({"items": 3}), ".items"),
        (json!({"multipleOf": 1e-300}), ".multipleOf"),
        (json!({"type": "string", "pattern": "(?=a)b"}), ""),
        (json!({"type": "string", "pattern": "("}), ""),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "p", "schema": schema}});
        let fields = json!({"response_format": format, "max_tokens": 50});
        let response = post(&server, CHAT, &question(fields));
        assert_eq!(response.status, 400, "{schema}: {response:?}");
        let error = &response.json()["error"];
        let path = format!("response_format.json_schema.schema{place}");
        assert_eq!(error["param"], path, "{schema}");
        assert_own_words(error);
    }
    let not_object = json!([{"type": "function",
        "function": {"name": "f", "parameters": {"type": "string"}}}]);
    let fields = json!({"tools": not_object, "tool_choice": "required"});
    let error = &post(&server, CHAT, &question(fields)).json()["error"];
    assert_eq!(error["param"], "tools[0].function.parameters");
}

#[test]
fn alternatives_that_exclude_each_other_are_followed_and_others_named() {
    let server = start();
    let pet = |kind: &str| {
        json!({"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"],
               "additionalProperties": false})
    };
    let apart = json!({
        "$defs": {"Cat": pet("cat"), "Dog": pet("dog")},
        "type": "object",
        "properties": {"pet": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}},
        "required": ["pet"], "additionalProperties": false,
    });
    let both =
        json!({"oneOf": [{"type": "integer", "maximum": 9}, {"type": "integer", "minimum": 5}]});
    for (schema, named) in [
        (apart, None),
        (both, Some("response_format.json_schema.schema.oneOf")),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "p", "schema": schema}});
        let fields = json!({"response_format": format, "max_tokens": 60});
        let response = post(&server, CHAT, &question(fields));
        assert_eq!(response.status, 200, "{response:?}");
        assert_eq!(response.header("x-lacuna-ignored"), named);
    }
}

#[test]
fn results_of_calls_are_part_of_the_conversation() {
    let server = start();
    let messages = json!([
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Paris\"}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": "And tomorrow?"},
    ]);
    let with = |messages: &Value| {
        let fields = json!({"messages": messages, "tools": tools(), "tool_choice": "none"});
        let reply = posted(&server, CHAT, &question(fields));
        assert_eq!(reply["choices"][0]["message"]["role"], "assistant");
        reply["usage"]["prompt_tokens"].as_u64().expect("a number")
    };
    let all = with(&messages);
    let mut other = messages.clone();
    other[2]["content"] = json!("sunny, and later on it will rain");
    assert!(with(&other) > all, "the result is in the prompt");
    let mut other = messages;
    other[1]["tool_calls"][0]["function"]["arguments"] = json!("{\"city\": \"Paris and Rome\"}");
    assert!(with(&other) > all, "the call is in the prompt");
}

#[test]
fn schema_keywords_that_cannot_be_followed_are_named_or_in_strict_mode_refused() {
    let schema = json!({
        "type": "object",
        "properties": {
            "x": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": true},
            "y": {"type": "string", "maxLength": 4, "format": "postcode"},
        },
        "required": ["x", "y"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "p", "schema": schema}});
    let at = "response_format.json_schema.schema.properties";
    let server = start();
    for stream in [false, true] {
        let fields = json!({"response_format": format, "max_tokens": 100, "stream": stream});
        let response = post(&server, CHAT, &question(fields));
        assert_eq!(response.status, 200, "{response:?}");
        assert_eq!(
            response.header("x-lacuna-ignored"),
            Some(format!("{at}.x.uniqueItems,{at}.y.format").as_str())
        );
    }
    let plain = post(&server, CHAT, &question(json!({})));
    assert_eq!(plain.header("x-lacuna-ignored"), None);

    let strict = start_with(|config| config.strict_fields = true);
    let fields = json!({"response_format": format, "max_tokens": 100});
    let refused = post(&strict, CHAT, &question(fields));
    assert_eq!(refused.status, 400, "{refused:?}");
    assert_eq!(
        refused.json()["error"]["param"],
        format!("{at}.x.uniqueItems")
    );
}

/// Whether a reply is what was asked for.
type Holds<'a> = &'a dyn Fn(&str) -> bool;

/// A reply that is held to a form in each of the ways that other servers' clients say it, and the texts that it may be.
#[test]
fn expressions_lists_and_grammars_are_followed_in_the_words_of_other_servers() {
    let server = start();
    let gbnf = "root ::= pair (\", \" pair)*\npair ::= [a-c] \"=\" ([0-9] | \"(\" pair \")\"){1,2}";
    let lark = "start: \"<\" WORD \">\"\nWORD: /[a-z]{3}/";
    let is_pair = |text: &str| {
        text.len() >= 3 && text.as_bytes()[1] == b'=' && text.starts_with(['a', 'b', 'c'])
    };
    let is_date = |text: &str| {
        text.len() == 10
            && text.bytes().enumerate().all(|(at, byte)| match at {
                4 | 7 => byte == b'-',
                _ => byte.is_ascii_digit(),
            })
    };
    let is_choice = |text: &str| ["yes", "yes/no", "no.*"].contains(&text);
    let is_word = |text: &str| text.len() == 5 && text.starts_with('<') && text.ends_with('>');
    let is_json =
        |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|value| value["n"].is_u64());
    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
        "additionalProperties": false});
    let date = r"^\d{4}-\d{2}-\d{2}$";
    let choice = json!(["yes", "yes/no", "no.*"]);
    let cases: [(Value, Holds<'_>); 15] = [
        (json!({"guided_regex": date}), &is_date),
        (json!({"regex": date}), &is_date),
        (json!({"structured_outputs": {"regex": date}}), &is_date),
        (
            json!({"response_format": {"type": "regex", "pattern": date}}),
            &is_date,
        ),
        (json!({"guided_choice": choice}), &is_choice),
        (
            json!({"structured_outputs": {"choice": choice}}),
            &is_choice,
        ),
        (json!({"grammar": gbnf}), &is_pair),
        (json!({"guided_grammar": gbnf}), &is_pair),
        (json!({"ebnf": gbnf}), &is_pair),
        (json!({"structured_outputs": {"grammar": lark}}), &is_word),
        (
            json!({"response_format": {"type": "grammar", "grammar": lark}}),
            &is_word,
        ),
        (json!({"guided_json": schema}), &is_json),
        (json!({"json_schema": schema.to_string()}), &is_json),
        (json!({"structured_outputs": {"json": schema}}), &is_json),
        (
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            &is_json,
        ),
    ];
    for (said, conforms) in cases {
        let mut fields = json!({"max_tokens": 60, "temperature": 1.0, "seed": 7});
        for (field, value) in said.as_object().expect("fields") {
            fields[field] = value.clone();
        }
        let choice = &posted(&server, CHAT, &question(fields.clone()))["choices"][0];
        let text = choice["message"]["content"].as_str().expect("text");
        // A list of pairs may go on for ever.
        assert!(
            conforms(text) || choice["finish_reason"] == "length" && is_pair(text),
            "{said}: {text:?}"
        );
        fields["prompt"] = json!("A:");
        let choice = &posted(&server, COMPLETION, &fields)["choices"][0];
        let text = choice["text"].as_str().expect("text");
        assert!(
            conforms(text) || choice["finish_reason"] == "length" && is_pair(text),
            "{said}: {text:?}"
        );
    }
    assert_nothing_held(&server);
}

#[test]
fn forms_that_cannot_be_followed_are_refused_and_nothing_is_asked_by_empty_ones() {
    let server = start();
    let chain: String = (0..600)
        .map(|rule| format!("r{rule}: \"a\" r{}\n", rule + 1))
        .collect();
    for (said, field, why) in [
        (json!({"grammar": "root ::= \"a"}), "grammar", "line 1"),
        (
            json!({"grammar": "root ::= root"}),
            "grammar",
            "comes to an end",
        ),
        (json!({"ebnf": "start: WORD"}), "ebnf", "WORD"),
        (
            json!({"guided_grammar": format!("start: r0\n{chain}r600: \"b\"")}),
            "guided_grammar",
            "definitions",
        ),
        (
            json!({"guided_regex": "(a"}),
            "guided_regex",
            "regular expression",
        ),
        (
            json!({"guided_regex": "a(?=b)"}),
            "guided_regex",
            "regular expression",
        ),
        (
            json!({"guided_choice": ["a"], "regex": "b"}),
            "regex",
            "leave one out",
        ),
        (
            json!({"response_format": {"type": "json_object"}, "grammar": "root ::= \"a\""}),
            "grammar",
            "leave one out",
        ),
        (
            json!({"response_format": {"type": "grammar"}}),
            "response_format.grammar",
            "missing",
        ),
        (json!({"json_schema": "{"}), "json_schema", "JSON"),
        // There is no text to choose.
        (
            json!({"structured_outputs": {"choice": []}}),
            "structured_outputs.choice",
            "not empty",
        ),
        (
            json!({"structured_outputs": {"choice": [""]}}),
            "structured_outputs.choice",
            "not empty",
        ),
        (json!({"guided_choice": []}), "guided_choice", "not empty"),
        (
            json!({"guided_json": {"type": "string", "minLength": 2, "maxLength": 1}}),
            "guided_json",
            "nothing conforms",
        ),
    ] {
        let mut body = question(json!({"max_tokens": 4}));
        for (field, value) in said.as_object().expect("fields") {
            body[field] = value.clone();
        }
        let reply = post(&server, CHAT, &body);
        let error = reply.json();
        assert_eq!(reply.status, 400, "{field}: {error}");
        assert_eq!(error["error"]["param"], field, "{error}");
        let message = error["error"]["message"].as_str().expect("a message");
        assert!(message.contains(why), "{field}: {message}");
    }
    let nothing = json!({"max_tokens": 4, "guided_json": null, "guided_regex": "", "guided_choice": null, "grammar": "",
        "json_schema": false, "structured_outputs": {}, "response_format": {"type": "text"}, "ebnf": null});
    posted(&server, CHAT, &question(nothing));
    assert_nothing_held(&server);
}

/// Of a thought, as many tokens come as may; then it ends, and what is said follows.
#[test]
fn thoughts_end_when_their_tokens_are_used_up() {
    for model in ["thinking.gguf", "harmony.gguf"] {
        let server = start_spoken(model);
        let ask = |fields: Value| {
            let mut fields = fields;
            fields["temperature"] = json!(0);
            fields["max_tokens"] = json!(60);
            posted(&server, CHAT, &question(fields))
        };
        let thought = |reply: &Value| {
            let message = &reply["choices"][0]["message"];
            message["reasoning_content"]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        let whole = ask(json!({}));
        let all = thought(&whole);
        for (budget, field) in [
            (0, "thinking_token_budget"),
            (1, "reasoning_budget_tokens"),
            (0, "thinking_budget_tokens"),
        ] {
            let cut = ask(json!({field: budget}));
            let of = thought(&cut);
            assert!(
                all.starts_with(&of) && of.len() < all.len(),
                "{model}: {of:?}"
            );
            assert_eq!(of.is_empty(), budget == 0, "{model}: {cut}");
            // What this gpt-oss says next depends on the last token alone.
            let said = cut["choices"][0]["message"]["content"].as_str();
            assert!(said.is_some_and(|said| said.ends_with("It is 4.")), "{cut}");
        }
        for unbounded in [
            json!({"reasoning": {"max_tokens": 100}}),
            json!({"thinking_token_budget": -1}),
        ] {
            let same = ask(unbounded);
            assert_eq!(
                same["choices"][0]["message"],
                whole["choices"][0]["message"]
            );
        }
        assert_nothing_held(&server);
    }
}

/// A schema for which there would be no room if nothing else were held is refused for good: who is told to come back
/// would do so for ever.
#[test]
fn a_schema_that_never_fits_what_requests_may_hold_is_too_large_and_not_told_to_come_back() {
    let server = start_with(|config| {
        config.service.engine.request_memory = Some(ByteLength::mebibytes(2));
    });
    let mut refused = 0;
    for words in (0..1200).step_by(100) {
        let words: Vec<String> = (0..=words).map(|word| format!("word{word}")).collect();
        let schema = json!({"type": "json_schema", "json_schema": {"schema": {"enum": words}}});
        let body = question(json!({"max_tokens": 1, "response_format": schema}));
        until("what the request before held is given back", || {
            server.engine().request_memory().status().held.get() == 0
        });
        let response = post(&server, CHAT, &body);
        if response.status == 200 {
            assert_eq!(refused, 0, "what is smaller was refused");
            continue;
        }
        let code = response.json()["error"]["code"].clone();
        assert_eq!(
            (response.status, code),
            (413, json!("request_too_large")),
            "{response:?}"
        );
        refused += 1;
    }
    assert!((1..12).contains(&refused), "{refused}");
    assert_nothing_held(&server);
}
