use std::time::{Duration, Instant};

use lacuna_text::template::{Chat, ChatTemplate, Message, TemplateError};

fn render(source: &str) -> Result<String, TemplateError> {
    let messages = [Message::new("user", "Hello")];
    let chat = Chat {
        messages: &messages,
        ..Chat::default()
    };
    ChatTemplate::compile(source)?.render(&chat)
}

/// Each would take minutes or gigabytes without the limits.
const BOMBS: &[&str] = &[
    // Instructions.
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}some text{% endfor %}{% endfor %}",
    "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}text{% endfor %}{% endfor %}{% endset %}",
    // Recursion.
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for x in [[[]]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    // Doubling.
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | list | length }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x is eq n.y }}",
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y == n.x }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] | join(n.x) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = '%s%s' | format(n.x, n.x) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = '{}{}'.format(n.x, n.x) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    "{% set n = namespace(x=[1e-07]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string }}",
    // Large at once.
    "{% set m = 1000000 %}{{ ('abc' * m * m) | length }}",
    "{% set m = 100000 %}{{ (range(99999) | list * m) | list | length }}",
    "{{ 'a' * 100000000 }}{{ 'b' * 100000000 }}{{ 'c' * 100000000 }}",
    "{{ [1] * (10 * 10 * 10 * 10 * 10 * 10 * 10 * 10) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{% set m = 999999999 %}{{ '%*d' | format(m, 1) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%999999999s' % 'a' }}",
    "{{ '%.999999999f' % 1.5 }}",
    "{% set m = 999999999 %}{{ '%*d' % (m, 1) }}",
    "{% set m = 999999999 %}{{ '%*d' % (-m, 1) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a'.center(999999999, '-') }}",
    "{{ 'a'.zfill(999999999) }}",
    "{{ 'a\n' | indent(999999999, true) }}",
    "{% set m = 999999999 %}{{ 'a\na' | indent(width=m) }}",
    "{{ [1] | batch(999999999, 'x') | list | length }}",
    "{{ [1] | slice(999999999, 'x') | list | length }}",
    // Slow on what is large but allowed.
    "{% set n = namespace(x='ab' * 9000) %}{% for i in range(99999) %}{% set y = n.x | upper %}{% endfor %}",
    "{% set n = namespace(x='ab' * 9000) %}{% for i in range(99999) %}{% set y = n.x[1:] %}{% endfor %}",
    "{% set n = namespace(x='ab' * 9000) %}{% for i in range(99999) %}{% set y = 'c' in n.x %}{% endfor %}",
    "{% set n = namespace(x='ab' * 9000) %}{% for i in range(99999) %}{% set y = n.x.strip('z') %}{% endfor %}",
    "{% set x = range(99999) | list %}{% for i in range(99999) %}{% set y = x | sort %}{% endfor %}",
    "{% set x = range(99999) | list %}{% for i in range(99999) %}{% set y = x[::-1] %}{% endfor %}",
    "{% set x = range(99999) | list %}{% for i in range(99999) %}{% set y = x | map('string') | list %}{% endfor %}",
];

#[test]
fn bombs_are_stopped_soon() {
    for source in BOMBS {
        let start = Instant::now();
        let result = render(source);
        let taken = start.elapsed();
        assert!(result.is_err(), "{source}");
        assert!(taken < Duration::from_secs(30), "{source}: {taken:?}");
        println!("{taken:?} {} {source}", result.unwrap_err());
    }
}

#[test]
fn limits_are_told_from_other_errors() {
    let work =
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}");
    assert!(
        matches!(work, Err(TemplateError::Limit { resource: "work" })),
        "{work:?}"
    );
    let depth = render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
    assert!(
        matches!(
            depth,
            Err(TemplateError::Limit {
                resource: "recursion"
            })
        ),
        "{depth:?}"
    );
    let large = render(&" ".repeat(2 << 20));
    assert!(matches!(large, Err(TemplateError::TooLarge { .. })));
}

#[test]
fn deeply_nested_sources_are_errors() {
    for (open, close) in [
        ("(", ")"),
        ("[", "]"),
        ("{'a':", "}"),
        ("-", ""),
        ("not ", ""),
    ] {
        let source = format!(
            "{{{{ {}1{} }}}}",
            open.repeat(100_000),
            close.repeat(100_000)
        );
        assert!(render(&source).is_err(), "{open}");
    }
    for chain in [
        "+1",
        "~1",
        "|e",
        ".a",
        "[0]",
        " if 1 else 1",
        " is eq 1",
        " and 1",
        "()",
        " == 1",
        "*1",
    ] {
        assert!(
            render(&format!("{{{{ 1{} }}}}", chain.repeat(100_000))).is_err(),
            "{chain}"
        );
        let _ = render(&format!("{{{{ 1{} }}}}", chain.repeat(390)));
    }
    for (open, close) in [("(", ")"), ("[", "]"), ("-", ""), ("not ", "")] {
        let _ = render(&format!(
            "{{{{ {}1{} }}}}",
            open.repeat(390),
            close.repeat(390)
        ));
    }
    let alternatives = format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(50_000));
    assert!(render(&alternatives).is_err());
    let blocks = format!(
        "{}{}",
        "{% if true %}".repeat(50_000),
        "{% endif %}".repeat(50_000)
    );
    assert!(render(&blocks).is_err());
}

#[test]
fn guards_cannot_be_replaced_from_within() {
    let names = ["__lacuna_add", "__lacuna_concatenate"];
    for name in names {
        let source = format!(
            "{{% macro {name}(a, b) %}}{{{{ a + b }}}}{{% endmacro %}}{{% set n = namespace(x='ab') %}}\
             {{% for i in range(60) %}}{{% set n.x = n.x ~ n.x %}}{{% endfor %}}"
        );
        assert!(render(&source).is_err());
    }
}

#[test]
fn marks_that_are_cut_short_are_errors() {
    for source in [
        "{%}generation",
        "{% generation",
        "{%-%}generation",
        "{% generation %}",
        "%}{%generation",
    ] {
        assert!(render(source).is_err(), "{source}");
    }
}
