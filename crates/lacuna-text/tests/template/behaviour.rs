use std::time::{Duration, UNIX_EPOCH};

use lacuna_text::template::{
    Chat, ChatTemplate, GenerationPrompt, Message, TemplateError, TemplateOrigin,
};
use lacuna_text::tokenizer::{GgufVocabulary, Special, Tokenizer};
use serde_json::json;

/// Renders a template for one question.
fn render(source: &str) -> Result<String, TemplateError> {
    let messages = [
        Message::new("user", "Hello"),
        Message::new("assistant", "Hi"),
    ];
    let chat = Chat {
        messages: &messages,
        bos_token: Some("<s>"),
        now: Some(UNIX_EPOCH + Duration::from_secs(1_721_997_005)),
        variables:
            json!({"data": {"b": [1, 2.5, null, true], "a": "é<\"\n\u{1}"}, "nothing": null})
                .as_object()
                .cloned()
                .unwrap(),
        ..Chat::default()
    };
    ChatTemplate::compile(source)?.render(&chat)
}

/// What Python does with texts and numbers, and the library did not or did otherwise: such templates failed, and small
/// numbers were written without an exponent. Expected texts are Jinja2's, too.
#[test]
fn texts_have_what_pythons_have() {
    let cases = [
        (
            "{{ '%s-%02d|%5s|%-5s|%.2f|%5.1f%%' % ('a', 7, 'é', 'é', 2.25, 50) }}",
            "a-07|    é|é    |2.25| 50.0%",
        ),
        (
            "{{ '%s' % 'a' ~ 'b' }} {{ '%s' % none }} {{ '%s' % [1, 'a'] }} {{ '%r' % 'a' }} {{ '%s' % ((1, 2),) }} {{ '%s' % missing }}|",
            "ab None [1, 'a'] 'a' (1, 2) |",
        ),
        (
            "{{ '%(a)s is %(b)d' % {'a': 'x', 'b': 3} }} {{ '%*d' % (5, 3) }} {{ '%d' % 3.7 }} {{ '%c%c' % ('x', 65) }} {{ '%x' % 255 }} {{ '%.3s' % 'abcdef' }}",
            "x is 3     3 3 xA ff abc",
        ),
        (
            "{{ '%s' % 1e-07 }} {{ '%%' % () }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7.5 % 2 }} {{ 'abc' % [] }}",
            "1e-07 % 1 2 1.5 abc",
        ),
        (
            "{{ 'a/b/c'.rsplit('/', 1) }} {{ 'a/b/c'.rsplit('/') }} {{ ' a  b c '.rsplit() }} {{ ' a  b c '.rsplit(none, 1) }} {{ 'a/b/c'.rsplit(sep='/', maxsplit=1)[-1] }}",
            "['a/b', 'c'] ['a', 'b', 'c'] ['a', 'b', 'c'] [' a  b', 'c'] c",
        ),
        (
            "{{ 'a/b/c'.split('/', maxsplit=1) }} {{ 'a b'.split(maxsplit=0) }} {{ 'a/b/c'.split(sep='/') }}",
            "['a', 'b/c'] ['a b'] ['a', 'b', 'c']",
        ),
        (
            "{{ 'a/b/c'.partition('/') }} {{ 'a/b/c'.rpartition('/') }} {{ 'abc'.partition('/') }} {{ 'abc'.rpartition('/') }}",
            "('a', '/', 'b/c') ('a/b', '/', 'c') ('abc', '', '') ('', '', 'abc')",
        ),
        (
            "{{ 'a/b'.removeprefix('a/') }} {{ 'a/b'.removeprefix('b') }} {{ 'a/b'.removesuffix('/b') }} {{ 'a/b'.removesuffix('') }}",
            "b a/b a a/b",
        ),
        (
            "{{ 1e-07 | string }} {{ 1e-07 }} {{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {% set x = 0.00001 %}{{ x ~ '' }} {{ [1e-07, {'a': 1e22}, ('b', 1e-05)] }} {{ [1e-07, 'a'] | join(',') }} {{ -1e-09 }}",
            "1e-07 1e-07 1e+16 1000000000000000.0 0.0001 1e-05 [1e-07, {'a': 1e+22}, ('b', 1e-05)] 1e-07,a -1e-09",
        ),
        (
            "{{ 'Hello'.index('l') }} {{ 'Hello'.rindex('l') }} {{ 'Hello'.find('l', 3) }} {{ 'Hello'.find('l', -2) }} {{ 'Hello'.count('l', 3) }} {{ 'Hello'.find('H', 1, 9) }} {{ ['a', 'b'].index('b') }}",
            "2 3 3 3 1 -1 1",
        ),
        (
            "{{ 'Hello'.startswith('l', 2) }} {{ 'Hello'.endswith('l', 0, 4) }} {{ 'Hello'.startswith('', 9) }}",
            "True True False",
        ),
        (
            "{{ 'ab'.center(5, '*') }}|{{ 'ab'.ljust(4) }}|{{ 'é'.rjust(3, '-') }}|{{ '-7'.zfill(4) }}|{{ 'abc'.center(6) }}|",
            "**ab*|ab  |--é|-007| abc  |",
        ),
        (
            "{{ \"it's me\".title() }} {{ 'hELLO'.swapcase() }} {{ 'a\\r\\nb\\x0bc\\u2028d\\re'.splitlines() }} {{ 'a\\r\\nb\\n'.splitlines(true) }}",
            "It'S Me Hello ['a', 'b', 'c', 'd', 'e'] ['a\\r\\n', 'b\\n']",
        ),
        (
            "{{ 'aaa' | replace('a', 'b', 2) }} {{ 'x' | float }} {{ 'x' | int }} {{ '' | int(5) }} {{ '' | default('d', boolean=true) }} {{ missing | default(default_value='d') }} {{ none | default('d') }}",
            "bba 0.0 0 5 d d None",
        ),
        ("{{ 'ab' * -1 }}{{ -1 * 'ab' }}{{ [1] * -1 }}", "[]"),
        (
            "{% set comma = joiner(', ') %}{% for x in [1, 2, 3] %}{{ comma() }}{{ x }}{% endfor %}",
            "1, 2, 3",
        ),
    ];
    for (source, expected) in cases {
        let text = render(source).unwrap_or_else(|error| panic!("{source}: {error}"));
        assert_eq!(text, expected, "{source}");
    }
}

#[test]
fn what_python_refuses_of_texts_is_an_error() {
    for source in [
        "{{ '%s %s' % ('a',) }}",
        "{{ 'a' % 3 }}",
        "{{ '%d' % 'a' }}",
        "{{ '%(a)s' % {'b': 1} }}",
        "{{ '%(a' % {'a': 1} }}",
        "{{ '%' % 1 }}",
        "{{ '%*d' % ('a', 1) }}",
        "{{ 'a'.split('') }}",
        "{{ 'a'.rsplit('') }}",
        "{{ 'a'.partition('') }}",
        "{{ 'a'.index('b') }}",
        "{{ 'a'.split(separator='b') }}",
        "{{ 'a'.ljust(3, 'bc') }}",
    ] {
        assert!(render(source).is_err(), "{source}");
    }
}

/// Expected texts were made with Jinja2 3.1.6 in the environment of `transformers`.
#[test]
fn templates_render_as_jinja2_renders_them() {
    let cases = [
        ("{{ bos_token }}{{ eos_token }}|", "<s>|"),
        (
            "{{ data | tojson }}",
            r#"{"b": [1, 2.5, null, true], "a": "é<\"\n\u0001"}"#,
        ),
        (
            "{{ data | tojson(sort_keys=true, ensure_ascii=true) }}",
            r#"{"a": "\u00e9<\"\n\u0001", "b": [1, 2.5, null, true]}"#,
        ),
        (
            "{{ data.b | tojson(indent=2) }}",
            "[\n  1,\n  2.5,\n  null,\n  true\n]",
        ),
        (
            "{{ data.b | tojson(indent=none, separators=(',', ':')) }}",
            "[1,2.5,null,true]",
        ),
        ("{{ [] | tojson(indent=2) }}{{ {} | tojson }}", "[]{}"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        (
            "{{ documents is defined }}{{ documents is none }}{{ tools is none }}",
            "TrueTrueTrue",
        ),
        (
            "{% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}",
            "au",
        ),
        (
            "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
            "Hello",
        ),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
            "Hi",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        (
            "{{ 'a,b'.split(',')[-1].upper() + ' x '.strip() + 'xay'.strip('xy') }}",
            "Bxa",
        ),
        (
            "{{ 'abc'.startswith('ab') and 'abc'.endswith('bc') }}",
            "True",
        ),
        (
            "{{ nothing }} {{ true }} {{ missing }} {{ missing is defined }}",
            "None True  False",
        ),
        (
            "{% for k, v in data.items() %}{{ k }}{% endfor %}{{ data.get('x', 'y') }}",
            "bay",
        ),
        ("{% for k, v in data | items %}{{ k }}{% endfor %}", "ba"),
        (
            "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('-') }}",
            "Hello",
        ),
        (
            "{% macro m(x, y='d') %}[{{ x }}{{ y }}]{% endmacro %}{{ m('c') ~ m(1, y=2) }}",
            "[cd][12]",
        ),
        (
            "{% if 'Hi' in messages[1].content and 'z' not in 'abc' %}y{% endif %}",
            "y",
        ),
        (
            "{{ ['a'] + ['b'] }} {{ 'ab' * 2 }} {{ [1] * 2 }} {{ 7 // 2 }} {{ 2 ** 3 }}",
            "['a', 'b'] abab [1, 1] 3 8",
        ),
        ("{{ 'x' ~ 1 ~ none ~ [1, 'a'] }}", "x1None[1, 'a']"),
        ("{{ 'abcdef'[1:-1] }}{{ 'abcdef'[::-2] }}", "bcdefdb"),
        (
            "{{ 1 < 2 }} {{ 'a' < 'b' }} {{ 1 == 1.0 }} {{ [1] == [1] }} {{ 1 != 2 }}",
            "True True True True True",
        ),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | length }}", "2"),
        ("  {% if true %}\n  a\n  {% endif %}\nb\n", "  a\nb"),
        ("{%- generation %}x{% endgeneration -%} y", "xy"),
        (
            "{% call(x) m() %}{{ x }}{% endcall %}{% macro m() %}{{ caller(1) }}{% endmacro %}",
            "",
        ),
        (
            "{{ '%s-%d' | format('a', 3) }} {{ '{}+{}'.format(1, 'b') }}",
            "a-3 1+b",
        ),
        (
            "{{ 'a\nb' | indent(2) }} {{ 'aXbX' | replace('X', '-') }}",
            "a\n  b a-b-",
        ),
        (
            "{{ [3, 1, 2] | sort | join(',') }} {{ [1, 2] | sum }} {{ range(3) | list }}",
            "1,2,3 3 [0, 1, 2]",
        ),
        (
            "{{ data is mapping }} {{ data.b is iterable }} {{ 'a' is string }} {{ 2 is in [1, 2] }}",
            "True True True True",
        ),
        (
            "{{ nothing is iterable }} {{ missing is iterable }} {{ 'a' is iterable }} {{ 1 is iterable }}",
            "False True True False",
        ),
        (
            "{{ 'a' is sequence }} {{ data is sequence }} {{ [1] is sequence }} {{ 1 is sequence }} {{ nothing is sequence }}",
            "True True True False False",
        ),
        (
            "{{ missing | length }}{{ missing | count }}{{ missing | first }}{{ missing | last }}{{ 'ab' | length }}{{ data | count }}",
            "0022",
        ),
        (
            "{% for k, v in missing | items %}{{ k }}{% endfor %}{{ [1, 2] | first }}{{ [1, 2] | last }}",
            "12",
        ),
    ];
    for (source, expected) in cases {
        match render(source) {
            Ok(text) => assert_eq!(text, expected, "{source}"),
            // A macro that is called before it is defined is an error in both.
            Err(error) => assert!(expected.is_empty(), "{source}: {error}"),
        }
    }
}

#[test]
fn a_template_refuses_in_its_own_words() {
    let error =
        render("{{ raise_exception('Only two messages: ' ~ messages | length) }}").unwrap_err();
    assert!(
        matches!(&error, TemplateError::Raised { message } if message == "Only two messages: 2")
    );
    let error = render("{% macro m() %}{{ raise_exception('inside') }}{% endmacro %}{{ m() }}")
        .unwrap_err();
    assert!(
        matches!(&error, TemplateError::Raised { message } if message == "inside"),
        "{error}"
    );
}

#[test]
fn errors_name_the_line() {
    for source in [
        "a\n{% if %}",
        "a\n{{ missing.field.further }}",
        "a\n{{ 1 + 'x' }}",
        "a\n{{ x | no_filter }}",
    ] {
        let error = render(source).unwrap_err().to_string();
        assert!(error.contains(":2)"), "{error}");
    }
}

#[test]
fn further_variables_do_not_replace_the_conversation() {
    let messages = [Message::new("user", "Hello")];
    let variables = json!({"messages": [], "enable_thinking": false, "bos_token": "no"});
    let chat = Chat {
        messages: &messages,
        generation_prompt: GenerationPrompt::Omit,
        bos_token: Some("<s>"),
        variables: variables.as_object().cloned().unwrap(),
        ..Chat::default()
    };
    let source = "{{ bos_token }}{{ messages | length }}{{ enable_thinking }}{{ add_generation_prompt }}{{ tools }}";
    assert_eq!(
        ChatTemplate::compile(source)
            .unwrap()
            .render(&chat)
            .unwrap(),
        "<s>1FalseFalseNone"
    );
}

#[test]
fn messages_keep_what_they_have_in_its_order() {
    let message: Message = serde_json::from_value(json!({
        "role": "assistant", "content": null,
        "tool_calls": [{"name": "f", "arguments": {"z": 1, "a": 2}}],
    }))
    .unwrap();
    let chat = Chat {
        messages: &[message],
        ..Chat::default()
    };
    let template = ChatTemplate::compile(
        "{{ messages[0].tool_calls[0].arguments | tojson }}{{ messages[0].content }}",
    );
    assert_eq!(
        template.unwrap().render(&chat).unwrap(),
        r#"{"z": 1, "a": 2}None"#
    );
}

#[test]
fn without_a_template_texts_follow_one_another() {
    let vocabulary = GgufVocabulary {
        model: "gpt2",
        tokens: vec!["a"],
        merges: Some(vec![]),
        ..GgufVocabulary::default()
    };
    let tokenizer = Tokenizer::from_gguf(&vocabulary).unwrap();
    let template = ChatTemplate::of(&tokenizer).unwrap();
    assert_eq!(template.origin(), TemplateOrigin::Concatenation);
    assert_eq!(template.special(), Special::PROMPT);
    let mut parts = Message::new("user", "");
    parts.content = json!([{"type": "text", "text": "two"}, {"type": "image"}]);
    let messages = [Message::new("system", "one"), parts];
    let chat = Chat {
        messages: &messages,
        ..Chat::default()
    };
    assert_eq!(template.render(&chat).unwrap(), "one\ntwo");

    let with_template = GgufVocabulary {
        chat_template: Some("x"),
        ..vocabulary
    };
    let template = ChatTemplate::of(&Tokenizer::from_gguf(&with_template).unwrap()).unwrap();
    assert_eq!(
        (template.origin(), template.special()),
        (TemplateOrigin::Given, Special::RENDERED)
    );
    assert_eq!(template.render(&chat).unwrap(), "x");
}

#[test]
fn long_conversations_are_within_the_limits() {
    let source = "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == 'user' and 'needle' not in m.content \
                  and m != messages[0] %}{% set ns.last = m.content | trim %}{% endif %}<{{ m.role }}>{{ m.content.split('x')[0] }}\
                  {% if messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length > 3 %}.{% endif %}{% endfor %}{{ ns.last | length }}";
    let template = ChatTemplate::compile(source).unwrap();
    let messages: Vec<Message> = (0..400)
        .map(|index| {
            Message::new(
                if index % 2 == 0 { "user" } else { "assistant" },
                "word ".repeat(500),
            )
        })
        .collect();
    let chat = Chat {
        messages: &messages,
        ..Chat::default()
    };
    assert!(template.render(&chat).unwrap().len() > 400 * 2500);
}

/// SmolVLM's goes through the parts of each message; of a plain text it wrote nothing, and the model answered an empty
/// question.
#[test]
fn a_template_that_takes_parts_alone_is_given_texts_in_parts() {
    let source = "{% for m in messages %}{{ m.role }}:{% for part in m.content %}\
                  {% if part.type == 'text' %} {{ part.text }}{% elif part.type == 'image' %}<image>{% endif %}\
                  {% endfor %};{% endfor %}";
    let template = ChatTemplate::compile(source).expect("it compiles");
    let image = json!([{"type": "image"}, {"type": "text", "text": "What is it?"}]);
    let messages = [
        Message::new("system", "Be brief."),
        Message {
            content: image,
            ..Message::new("user", "")
        },
        Message::new("assistant", "A cat."),
        Message::new("user", "Which?"),
    ];
    let chat = Chat {
        messages: &messages,
        ..Chat::default()
    };
    assert_eq!(
        template.render(&chat).expect("it renders"),
        "system: Be brief.;user:<image> What is it?;assistant: A cat.;user: Which?;"
    );
    // One that takes texts is given texts.
    let source = "{% for m in messages %}{{ m.content is string }}{% endfor %}";
    let template = ChatTemplate::compile(source).expect("it compiles");
    assert_eq!(
        template.render(&chat).expect("it renders"),
        "TrueFalseTrueTrue"
    );
}
