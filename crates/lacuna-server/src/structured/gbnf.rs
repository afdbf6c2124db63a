//! Grammars as llama.cpp's clients write them (GBNF), brought to what `llguidance` follows.
//!
//! A grammar whose rules do not refer to themselves is a regular expression. Any other becomes rules
//! whose terminals are single characters: longer ones would be taken as far as they go, before anybody knows
//! whether what follows them fits, and a grammar says nothing of that.

use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;

/// Rules of a grammar at most, and groups within groups: both are followed by functions that call themselves.
const MOST_RULES: usize = 512;
const DEEPEST: usize = 24;
/// How often something may be repeated at most, where a number says so.
const MOST_REPEATS: u32 = 2_000;
/// Groups within groups of a regular expression at most, a rule counted as one: fewer than its reader allows.
const DEEPEST_REGEX: usize = 200;
/// Bytes of a regular expression at most that stands for a grammar; rules are written out where they are used.
const MOST_REGEX_BYTES: usize = 16 << 10;

/// Neither repeated nor left out.
const ONCE: (u32, Option<u32>) = (1, Some(1));

/// A grammar for `llguidance`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Converted {
    Regex(String),
    Lark(String),
}

/// Why a grammar is none, and in which of its lines.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub(super) struct NotAGrammar {
    line: usize,
    why: String,
}

/// Several sequences, of which one comes.
type Alternatives = Vec<Vec<Item>>;

#[derive(Debug, Clone)]
struct Item {
    what: What,
    /// How often: from, and to at most.
    times: (u32, Option<u32>),
}

#[derive(Debug, Clone)]
enum What {
    /// One character, as a regular expression has it.
    Character(String),
    Rule(usize),
    Group(Alternatives),
}

/// The rules of a grammar, of which the first is the one named `root`.
struct Rules(Vec<Alternatives>);

/// Whether a grammar is written in GBNF: in Lark, rules have a colon.
pub(super) fn is_gbnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        let name = line.trim_start().split("::=").next().unwrap_or_default();
        line.contains("::=")
            && !name.trim_end().is_empty()
            && name.trim_end().chars().all(is_of_name)
    })
}

/// What `grammar` says.
///
/// # Errors
/// [`NotAGrammar`].
pub(super) fn convert(grammar: &str) -> Result<Converted, NotAGrammar> {
    let rules = Parser::rules(grammar)?;
    let mut regex = String::new();
    Ok(match rules.regex(0, &mut Vec::new(), &mut regex) {
        Some(()) => Converted::Regex(regex),
        None => Converted::Lark(rules.lark()),
    })
}

/// A text as a regular expression.
pub(super) fn literal(text: &str) -> String {
    text.chars().map(escaped).collect()
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '-' | '_')
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    names: HashMap<&'a str, usize>,
    rules: Vec<Option<Alternatives>>,
    /// Where each rule was named first.
    named: Vec<usize>,
}

impl<'a> Parser<'a> {
    fn rules(text: &'a str) -> Result<Rules, NotAGrammar> {
        let mut parser = Self {
            text,
            at: 0,
            names: HashMap::from([("root", 0)]),
            rules: vec![None],
            named: vec![0],
        };
        parser.space(true);
        while parser.at < text.len() {
            parser.rule()?;
        }
        let names: HashMap<usize, &str> = parser
            .names
            .iter()
            .map(|(name, rule)| (*rule, *name))
            .collect();
        let rules = std::mem::take(&mut parser.rules);
        let rules = rules.into_iter().enumerate().map(|(rule, found)| {
            found.ok_or_else(|| {
                parser.at = parser.named[rule];
                parser.error(format!("there is no rule `{}`", names[&rule]))
            })
        });
        Ok(Rules(rules.collect::<Result<_, _>>()?))
    }

    fn error(&self, why: impl Into<String>) -> NotAGrammar {
        let before = &self.text[..self.at.min(self.text.len())];
        NotAGrammar {
            line: 1 + before.matches('\n').count(),
            why: why.into(),
        }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn takes(&mut self, text: &str) -> bool {
        let takes = self.rest().starts_with(text);
        if takes {
            self.at += text.len();
        }
        takes
    }

    /// Goes over spaces and comments, and ends of lines, too, where they mean nothing.
    fn space(&mut self, lines: bool) {
        while let Some(next) = self.peek() {
            match next {
                ' ' | '\t' => self.at += 1,
                '\r' | '\n' if lines => self.at += 1,
                '#' => {
                    let end = self.rest().find('\n').unwrap_or(self.rest().len());
                    self.at += end;
                }
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let end = rest.find(|next| !is_of_name(next)).unwrap_or(rest.len());
        self.at += end;
        Some(&rest[..end]).filter(|name| !name.is_empty())
    }

    fn number_of(&mut self, name: &'a str, at: usize) -> Result<usize, NotAGrammar> {
        let next = self.rules.len();
        let rule = *self.names.entry(name).or_insert(next);
        if rule == next {
            if next == MOST_RULES {
                return Err(self.error(format!("there are more than {MOST_RULES} rules")));
            }
            self.rules.push(None);
            self.named.push(at);
        }
        Ok(rule)
    }

    fn rule(&mut self) -> Result<(), NotAGrammar> {
        let start = self.at;
        let Some(name) = self.name() else {
            return Err(self.error("a rule begins with its name"));
        };
        self.space(false);
        if !self.takes("::=") {
            return Err(self.error(format!(
                "`::=` follows the name of a rule, as in `{name} ::= ...`"
            )));
        }
        let rule = self.number_of(name, start)?;
        self.space(true);
        let alternatives = self.alternatives(0)?;
        match self.peek() {
            None | Some('\r' | '\n') => self.space(true),
            Some(other) => {
                return Err(self.error(format!("`{}` is out of place", other.escape_debug())));
            }
        }
        if self.rules[rule].replace(alternatives).is_some() {
            self.at = start;
            return Err(self.error(format!("the rule `{name}` is there twice")));
        }
        Ok(())
    }

    fn alternatives(&mut self, depth: usize) -> Result<Alternatives, NotAGrammar> {
        if depth > DEEPEST {
            return Err(self.error(format!("groups are more than {DEEPEST} deep")));
        }
        let mut all = vec![self.sequence(depth)?];
        loop {
            let before = self.at;
            // The next alternative may stand in a line of its own.
            self.space(true);
            if !self.takes("|") {
                self.at = if depth == 0 { before } else { self.at };
                return Ok(all);
            }
            self.space(true);
            all.push(self.sequence(depth)?);
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<Vec<Item>, NotAGrammar> {
        let mut items: Vec<Item> = Vec::new();
        // What a repetition is about.
        let mut last: Option<Range<usize>> = None;
        while let Some(next) = self.peek() {
            let start = items.len();
            match next {
                '"' => self.literal(&mut items)?,
                '[' => items.push(once(What::Character(self.class()?))),
                '.' => {
                    self.at += 1;
                    items.push(once(What::Character("(?s:.)".to_owned())));
                }
                '(' => {
                    self.at += 1;
                    self.space(true);
                    let group = self.alternatives(depth + 1)?;
                    if !self.takes(")") {
                        return Err(self.error("a group is not closed"));
                    }
                    items.push(once(What::Group(group)));
                }
                '*' | '+' | '?' | '{' => {
                    let Some(repeated) = last.take() else {
                        return Err(self.error("there is nothing before to repeat"));
                    };
                    let start = repeated.start;
                    self.repetition(&mut items, repeated)?;
                    last = Some(start..items.len());
                    self.space(depth > 0);
                    continue;
                }
                '<' | '!' => {
                    return Err(
                        self.error("tokens by name or number are not supported; write their text")
                    );
                }
                next if is_of_name(next) => {
                    let at = self.at;
                    let name = self.name().unwrap_or_default();
                    let rule = self.number_of(name, at)?;
                    items.push(once(What::Rule(rule)));
                }
                _ => break,
            }
            last = Some(start..items.len());
            self.space(depth > 0);
        }
        Ok(items)
    }

    /// What follows the items of `last`: all characters of a text are repeated together.
    fn repetition(&mut self, items: &mut Vec<Item>, last: Range<usize>) -> Result<(), NotAGrammar> {
        let times = match self.next() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            _ => self.times()?,
        };
        let repeated = items.drain(last);
        if times.1 == Some(0) {
            return Ok(());
        }
        let what = match repeated.collect::<Vec<_>>() {
            one if one.len() == 1 && one[0].times == ONCE => one[0].what.clone(),
            all => What::Group(vec![all]),
        };
        items.push(Item { what, times });
        Ok(())
    }

    /// `m}`, `m,}`, `m,n}` or `,n}`.
    fn times(&mut self) -> Result<(u32, Option<u32>), NotAGrammar> {
        let Some(end) = self.rest().find('}') else {
            return Err(self.error("a `{` is not closed"));
        };
        let inside = &self.rest()[..end];
        let number = |text: &str| {
            text.trim()
                .parse()
                .ok()
                .filter(|number| *number <= MOST_REPEATS)
        };
        let times = match inside.split_once(',') {
            None => number(inside).map(|times| (times, Some(times))),
            Some((least, most)) => {
                let least = if least.trim().is_empty() {
                    Some(0)
                } else {
                    number(least)
                };
                let most = if most.trim().is_empty() {
                    Some(None)
                } else {
                    number(most).map(Some)
                };
                least.zip(most)
            }
        };
        match times {
            Some((least, most)) if most.is_none_or(|most| least <= most) => {
                self.at += end + 1;
                Ok((least, most))
            }
            _ => Err(self.error(format!(
                "`{{{inside}}}` is no number of repetitions: `{{2}}`, `{{2,}}` or `{{2,5}}`, {MOST_REPEATS} at most"
            ))),
        }
    }

    fn literal(&mut self, items: &mut Vec<Item>) -> Result<(), NotAGrammar> {
        self.at += 1;
        loop {
            match self.peek() {
                Some('"') => {
                    self.at += 1;
                    return Ok(());
                }
                None | Some('\n') => return Err(self.error("a text is not closed")),
                Some(_) => {
                    let character = self.character()?;
                    items.push(once(What::Character(escaped(character))));
                }
            }
        }
    }

    fn class(&mut self) -> Result<String, NotAGrammar> {
        self.at += 1;
        let negated = self.takes("^");
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                Some(']') => break,
                None | Some('\n') => return Err(self.error("a class of characters is not closed")),
                Some(_) => {
                    let first = self.character()?;
                    let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
                    let last = match is_range && self.takes("-") {
                        true => self.character()?,
                        false => first,
                    };
                    if last < first {
                        return Err(
                            self.error("the end of a range of characters comes before its start")
                        );
                    }
                    ranges.push((first, last));
                }
            }
        }
        self.at += 1;
        let mut class = String::from(if negated { "[^" } else { "[" });
        match (ranges.is_empty(), negated) {
            (true, true) => return Ok("(?s:.)".to_owned()),
            (true, false) => return Err(self.error("no character is in `[]`")),
            _ => {}
        }
        for (first, last) in ranges {
            class += &escaped(first);
            if first < last {
                class.push('-');
                class += &escaped(last);
            }
        }
        class.push(']');
        Ok(class)
    }

    /// A character of a text or a class, or what stands for one.
    fn character(&mut self) -> Result<char, NotAGrammar> {
        let character = self.next();
        if character != Some('\\') {
            return character.ok_or_else(|| self.error("the grammar ends too early"));
        }
        let digits =
            match self.next() {
                Some('t') => return Ok('\t'),
                Some('r') => return Ok('\r'),
                Some('n') => return Ok('\n'),
                Some(same @ ('\\' | '"' | '[' | ']' | '-' | '^')) => return Ok(same),
                Some('x') => 2,
                Some('u') => 4,
                Some('U') => 8,
                _ => return Err(self.error(
                    "an escape is one of \\t \\r \\n \\\\ \\\" \\[ \\] \\x41 \\u0041 \\U00000041",
                )),
            };
        let number = self.rest().get(..digits);
        let number = number.filter(|text| text.chars().all(|next| next.is_ascii_hexdigit()));
        let found = number.and_then(|number| u32::from_str_radix(number, 16).ok());
        let found = found.and_then(char::from_u32);
        let found = found.ok_or_else(|| self.error("an escape is no number of a character"))?;
        self.at += digits;
        Ok(found)
    }
}

fn once(what: What) -> Item {
    Item { what, times: ONCE }
}

/// A character as regular expressions have it, in classes and outside. `/` ends them in Lark.
fn escaped(character: char) -> String {
    match character {
        next if next.is_ascii_alphanumeric()
            || next == ' '
            || !next.is_ascii() && !next.is_control() =>
        {
            next.to_string()
        }
        next => format!("\\x{{{:X}}}", u32::from(next)),
    }
}

/// How often, as both notations have it.
fn write_times(times: (u32, Option<u32>), out: &mut String) {
    let written = match times {
        ONCE => Ok(()),
        (0, None) => write!(out, "*"),
        (1, None) => write!(out, "+"),
        (0, Some(1)) => write!(out, "?"),
        (least, None) => write!(out, "{{{least},}}"),
        (least, Some(most)) => write!(out, "{{{least},{most}}}"),
    };
    written.expect("a string takes everything");
}

impl Rules {
    /// Writes a rule as a regular expression, within those of `open`; `None` if it refers to itself or becomes
    /// too long.
    fn regex(&self, rule: usize, open: &mut Vec<usize>, out: &mut String) -> Option<()> {
        if open.contains(&rule) {
            return None;
        }
        open.push(rule);
        self.regex_of(&self.0[rule], open, out)?;
        open.pop();
        Some(())
    }

    fn regex_of(&self, all: &Alternatives, open: &mut Vec<usize>, out: &mut String) -> Option<()> {
        // A rule's own group is one of them, and there are no more groups in one than these.
        if open.len() * (DEEPEST + 1) > DEEPEST_REGEX {
            return None;
        }
        out.push_str("(?:");
        for (place, sequence) in all.iter().enumerate() {
            if place > 0 {
                out.push('|');
            }
            for item in sequence {
                match &item.what {
                    What::Character(character) => out.push_str(character),
                    What::Rule(rule) => self.regex(*rule, open, out)?,
                    What::Group(group) => self.regex_of(group, open, out)?,
                }
                write_times(item.times, out);
                if out.len() > MOST_REGEX_BYTES {
                    return None;
                }
            }
        }
        out.push(')');
        Some(())
    }

    /// All rules in Lark.
    fn lark(&self) -> String {
        let mut out = String::from("start: r0\n");
        for (rule, alternatives) in self.0.iter().enumerate() {
            write!(out, "r{rule}: ").expect("a string takes everything");
            Self::lark_of(alternatives, &mut out);
            out.push('\n');
        }
        out
    }

    fn lark_of(all: &Alternatives, out: &mut String) {
        for (place, sequence) in all.iter().enumerate() {
            if place > 0 {
                out.push_str(" | ");
            }
            if sequence.is_empty() {
                out.push_str("\"\"");
            }
            for (place, item) in sequence.iter().enumerate() {
                if place > 0 {
                    out.push(' ');
                }
                match &item.what {
                    What::Character(character) => {
                        write!(out, "/{character}/").expect("a string takes everything");
                    }
                    What::Rule(rule) => {
                        write!(out, "r{rule}").expect("a string takes everything");
                    }
                    What::Group(group) => {
                        out.push('(');
                        Self::lark_of(group, out);
                        out.push(')');
                    }
                }
                write_times(item.times, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use llguidance::api::TopLevelGrammar;
    use llguidance::{Matcher, ParserFactory};
    use proptest::prelude::*;
    use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

    use super::*;

    /// A vocabulary of bytes, so that every text is taken one of them at a time.
    fn bytes() -> TokEnv {
        let words: Vec<Vec<u8>> = (0..=255_u8)
            .map(|byte| vec![byte])
            .chain([b"<end>".to_vec()])
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(257, 256), &words);
        Arc::new(ApproximateTokEnv::new(trie))
    }

    struct Follower(Matcher);

    impl Follower {
        fn new(grammar: &str) -> Result<Self, String> {
            let converted = convert(grammar).map_err(|error| error.to_string())?;
            let top = match converted {
                Converted::Regex(regex) => TopLevelGrammar::from_regex(&regex),
                Converted::Lark(lark) => TopLevelGrammar::from_lark(lark),
            };
            let mut factory = ParserFactory::new_simple(&bytes()).expect("a vocabulary");
            factory.quiet();
            let parser = factory
                .create_parser(top)
                .map_err(|error| error.to_string())?;
            Ok(Self(Matcher::new(Ok(parser))))
        }

        fn takes(&self, text: &str) -> bool {
            let mut matcher = self.0.deep_clone();
            let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
            let taken = matcher.try_consume_tokens(&tokens);
            taken.is_ok_and(|taken| taken == tokens.len())
                && matcher.is_accepting().unwrap_or(false)
        }
    }

    #[test]
    fn what_llama_cpps_clients_write_is_followed() {
        let arithmetic = r#"
            # Sums of numbers
            root  ::= (expr "=" ws term "\n")+
            expr  ::= term ([-+*/] term)*
            term  ::= ident | num | "(" ws expr ")" ws
            ident ::= [a-z] [a-z0-9_]* ws
            num   ::= [0-9]+ ws
            ws    ::= [ \t\n]*
        "#;
        let json = r#"
            root   ::= object
            value  ::= object | array | string | number | ("true" | "false" | "null") ws
            object ::=
              "{" ws (
                        string ":" ws value
                ("," ws string ":" ws value)*
              )? "}" ws
            array  ::=
              "[" ws (
                        value
                ("," ws value)*
              )? "]" ws
            string ::=
              "\"" (
                [^"\\\x7F\x00-\x1F] |
                "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
              )* "\"" ws
            number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
            ws ::= | " " | "\n" [ \t]{0,20}
        "#;
        let list = "root ::= item+\n\n# Excludes various line break characters\nitem ::= \"- \" \
                    [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ \"\\n\"";
        for (grammar, good, bad) in [
            (
                arithmetic,
                &["(a+1)*2=3\n", "x= y\nz=1 \n"][..],
                &["a+=1\n", "1=2", ""][..],
            ),
            (
                json,
                &["{}", "{\"a\": [1, -2.5e3, \"\\u00e9/\u{e9}\"], \"b\":null}"],
                &["[]", "{\"a\":}", "{\"a\": \"\n\"}"],
            ),
            (
                list,
                &["- a\n", "- a b\n- \u{e9}\n"],
                &["- \n", "- a", "a\n"],
            ),
            (
                "root ::= \"yes\" | \"no\"\n | \"/\" .",
                &["yes", "no", "/\n", "/\u{1F600}"],
                &["y", "yesno", "/"],
            ),
            (
                "root ::= a{2} b{1,} c{0,0}\na ::= \"x\"\nb ::= \"y\"?\nc ::= \"z\"",
                &["xx", "xxyyy"],
                &["x", "xxz"],
            ),
            (
                "root ::= \"ab\"* [^^\\]-]",
                &["ababc"],
                &["abb-", "aba^", "]"],
            ),
        ] {
            let follower = Follower::new(grammar).expect("a grammar");
            for text in good {
                assert!(follower.takes(text), "{text:?} of {grammar}");
            }
            for text in bad {
                assert!(!follower.takes(text), "{text:?} of {grammar}");
            }
        }
    }

    #[test]
    fn what_is_no_grammar_is_told_with_its_line() {
        for (grammar, line, why) in [
            ("a ::= \"b\"", 1, "no rule `root`"),
            ("root ::= \"a\"\nb ::= c\n", 2, "no rule `c`"),
            ("root ::= \"a\"\nroot ::= \"b\"", 2, "twice"),
            ("root ::= \"a", 1, "not closed"),
            ("root ::= [a", 1, "not closed"),
            ("root ::= (\"a\"", 1, "not closed"),
            ("root ::= *", 1, "nothing before"),
            ("root ::= \"a\"{3,2}", 1, "repetitions"),
            ("root ::= \"a\"{3000}", 1, "repetitions"),
            ("root ::= [b-a]", 1, "before its start"),
            ("root ::= \"\\q\"", 1, "escape"),
            ("root ::= \"\\uD800\"", 1, "character"),
            ("root ::= <think>", 1, "tokens by name"),
            ("root = \"a\"", 1, "`::=`"),
            ("root ::= \"a\" )", 1, "out of place"),
            ("\n\nroot ::= []", 3, "no character"),
        ] {
            let error = convert(grammar).expect_err(grammar);
            assert_eq!(error.line, line, "{grammar}: {error}");
            assert!(error.to_string().contains(why), "{grammar}: {error}");
        }
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(200), ")".repeat(200));
        assert!(convert(&deep).expect_err("deep").why.contains("deep"));
    }

    /// On a thread with as little room as those have that prepare requests.
    #[test]
    fn the_largest_grammars_are_followed_or_refused_and_nothing_overflows() {
        let chain: String = (1..MOST_RULES)
            .map(|rule| format!("r{} ::= \"a\" r{rule} | r{rule} \"b\"\n", rule - 1))
            .collect();
        let recursive =
            format!("root ::= r0\n{chain}").replace(&format!("r{} ", MOST_RULES - 1), "root ");
        let doubling: String = (1..200)
            .map(|rule| format!("r{} ::= r{rule} r{rule}\n", rule - 1))
            .collect();
        let doubling = format!("root ::= r0\n{doubling}r199 ::= \"a\"");
        let many: String = (0..MOST_RULES)
            .map(|rule| format!("r{rule} ::= root\n"))
            .collect();
        for grammar in [
            recursive,
            doubling,
            format!("root ::= \"a\" | root\n{many}"),
        ] {
            // Whatever becomes of it.
            if let Ok(follower) = Follower::new(&grammar) {
                follower.takes("a");
            }
        }
    }

    #[test]
    fn grammars_are_told_from_each_other() {
        assert!(is_gbnf("# comment\nroot ::= \"a\""));
        assert!(is_gbnf("root::=a\na ::= \"::=\""));
        assert!(!is_gbnf("start: \"::=\" rest\nrest: /a+/"));
    }

    /// The texts of up to so many bytes that a rule stands for, by trying all of them.
    fn language(rules: &[Alternatives], most: usize) -> Vec<BTreeSet<String>> {
        fn joined(
            first: &BTreeSet<String>,
            second: &BTreeSet<String>,
            most: usize,
        ) -> BTreeSet<String> {
            let pairs = first
                .iter()
                .flat_map(|a| second.iter().map(move |b| format!("{a}{b}")));
            pairs.filter(|text| text.len() <= most).collect()
        }
        fn of(all: &Alternatives, known: &[BTreeSet<String>], most: usize) -> BTreeSet<String> {
            let empty = || BTreeSet::from([String::new()]);
            let mut found = BTreeSet::new();
            for sequence in all {
                let mut texts = empty();
                for item in sequence {
                    let one = match &item.what {
                        What::Character(class) => ["a", "b"]
                            .into_iter()
                            .filter(|next| class.contains(next))
                            .map(str::to_owned)
                            .collect(),
                        What::Rule(rule) => known[*rule].clone(),
                        What::Group(group) => of(group, known, most),
                    };
                    let (least, times) = item.times;
                    let mut repeated = empty();
                    let mut all = BTreeSet::new();
                    for time in 0..=times
                        .unwrap_or(most as u32 + least)
                        .min(most as u32 + least)
                    {
                        if time >= least {
                            all.extend(repeated.iter().cloned());
                        }
                        repeated = joined(&repeated, &one, most);
                    }
                    texts = joined(&texts, &all, most);
                }
                found.extend(texts);
            }
            found
        }
        let mut known = vec![BTreeSet::new(); rules.len()];
        loop {
            let next: Vec<_> = rules.iter().map(|rule| of(rule, &known, most)).collect();
            if next == known {
                return known;
            }
            known = next;
        }
    }

    /// Grammars over `a` and `b` as text.
    fn some_grammar() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            prop::sample::select(vec!["\"a\"", "\"b\"", "\"ab\"", "[ab]", "\"aa\"", "\"\""])
                .prop_map(str::to_owned),
            (0..3_usize).prop_map(|rule| if rule == 0 {
                "root".to_owned()
            } else {
                format!("r{rule}")
            }),
        ];
        let sequence = prop::collection::vec(
            (
                leaf,
                prop::sample::select(vec!["", "", "", "*", "+", "?", "{2}", "{0,2}"]),
            ),
            0..4,
        );
        let sequence = sequence.prop_map(|items| {
            let items = items.iter().map(|(item, times)| format!("{item}{times}"));
            // A rule of nothing at all would go on in the next line.
            let items: Vec<_> = std::iter::once("\"\"".to_owned()).chain(items).collect();
            items.join(" ")
        });
        let group = prop::collection::vec(sequence.clone(), 1..3)
            .prop_map(|all| format!("({})", all.join(" | ")));
        let sequence = prop_oneof![3 => sequence.clone(), 1 => (group, sequence).prop_map(|(group, rest)| format!("{group}* {rest}"))];
        let alternatives = prop::collection::vec(sequence, 1..4).prop_map(|all| all.join(" | "));
        prop::collection::vec(alternatives, 3).prop_map(|rules| {
            format!(
                "root ::= {}\nr1 ::= {}\nr2 ::= {}\n",
                rules[0], rules[1], rules[2]
            )
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn a_grammar_takes_the_texts_that_it_stands_for_and_no_other(grammar in some_grammar()) {
            let rules = Parser::rules(&grammar).expect("a grammar");
            let texts = &language(&rules.0, 4)[0];
            let follower = Follower::new(&grammar);
            // One that stands for nothing may be refused.
            let refused = follower.as_ref().err();
            prop_assert!(refused.is_none() || texts.is_empty(), "{:?} of\n{}", refused, grammar);
            if let Ok(follower) = follower {
                let mut all = vec![String::new()];
                for length in 0..4 {
                    let longer: Vec<String> = all.iter().filter(|text| text.len() == length)
                        .flat_map(|text| [format!("{text}a"), format!("{text}b")]).collect();
                    all.extend(longer);
                }
                for text in all {
                    prop_assert_eq!(follower.takes(&text), texts.contains(&text), "{:?} of\n{}", text, grammar);
                }
            }
        }
    }
}
