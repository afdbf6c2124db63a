//! Rendering within bounds.
//!
//! The library bounds instructions and recursion. That alone does not bound memory or time: thirty
//! instructions double a text thirty times. So every operation that copies or compares as much as
//! its operands hold is charged to an allowance before it runs: filters and methods by wrapping them,
//! operators by replacing their instructions with calls. The allowance grows with the conversation,
//! and no published template comes near it.

use std::sync::LazyLock;

use minijinja::machinery::{Instruction, Instructions, Token, eval, get_compiled_template};
use minijinja::machinery::{make_string_output, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Expression, Output, State, Value};
use minijinja::{filters, tests};

use super::{NAME, TemplateError, failed, marks, python};

/// Bytes that a rendering may copy or compare whatever the conversation.
const ALLOWANCE: usize = 32 << 20;
/// Further bytes for every byte of the conversation.
const ALLOWANCE_PER_BYTE: usize = 64;
/// Instructions one rendering may take; long conversations take some hundred a message.
const MAX_INSTRUCTIONS: usize = 2_000_000;
/// Bytes of template text that all instructions together may write.
const MAX_RAW_BYTES: usize = 512 << 20;
/// Bytes of constants that the library may compute when it compiles.
const MAX_CONSTANT_BYTES: usize = 16 << 20;
/// Operators in one tag, and alternatives in all.
const MAX_OPERATORS: usize = 400;
/// Deeper values are refused; nothing a template is given is nested as deep.
const MAX_NESTING: usize = 64;
/// What a number, or the place of an item, counts for.
const ITEM_BYTES: usize = 32;

/// What is left of the allowance.
struct Allowance(usize);

/// Renders the environment's template.
pub(super) fn render(
    environment: &Environment<'static>,
    variables: Value,
) -> Result<String, TemplateError> {
    let template = environment
        .get_template(NAME)
        .map_err(|error| failed(&error))?;
    let compiled = get_compiled_template(&template);
    let instructions = guarded(&compiled.instructions);
    let blocks = compiled
        .blocks
        .iter()
        .map(|(name, block)| (*name, guarded(block)))
        .collect();
    let mut text = String::new();
    let mut output = make_string_output(&mut text);
    eval(
        environment,
        &instructions,
        variables,
        &blocks,
        &mut output,
        AutoEscape::None,
    )
    .map_err(|error| failed(&error))?;
    Ok(text)
}

/// Refuses what the library would compile without a bound: constants that multiply, and chains of
/// operators or alternatives, which it descends into one by one.
pub(super) fn check_source(source: &str, syntax: &SyntaxConfig) -> Result<(), Error> {
    let mut constants = 0usize;
    let mut alternatives = 0;
    let mut tag = Tag::default();
    for token in tokenize(source, false, syntax.clone()) {
        let (token, span) = token?;
        match token {
            Token::VariableStart | Token::BlockStart => {
                tag = Tag {
                    start: span.start_offset as usize,
                    ..Tag::default()
                };
            }
            Token::VariableEnd | Token::BlockEnd => {
                let bytes = (span.end_offset as usize).saturating_sub(tag.start);
                constants = constants.saturating_add(tag.constant_bytes(bytes));
            }
            Token::Ident("elif") => alternatives += 1,
            token => tag.count(&token),
        }
        if tag.operators > MAX_OPERATORS || alternatives > MAX_OPERATORS {
            return Err(Error::new(
                ErrorKind::SyntaxError,
                "too many operators in a row",
            ));
        }
    }
    if constants > MAX_CONSTANT_BYTES {
        return Err(Error::new(
            ErrorKind::SyntaxError,
            "its constants are too large",
        ));
    }
    Ok(())
}

/// What one tag of a source holds.
struct Tag {
    start: usize,
    operators: usize,
    multiplies: bool,
    /// Of all its numbers.
    product: usize,
}

impl Default for Tag {
    fn default() -> Tag {
        Tag {
            start: 0,
            operators: 0,
            multiplies: false,
            product: 1,
        }
    }
}

impl Tag {
    fn count(&mut self, token: &Token) {
        match token {
            Token::Int(number) => {
                let factor = usize::try_from(*number).unwrap_or(usize::MAX).max(1);
                self.product = self.product.saturating_mul(factor);
            }
            Token::Int128(_) => self.product = usize::MAX,
            Token::Mul | Token::Pow => {
                self.multiplies = true;
                self.operators += 1;
            }
            Token::Plus
            | Token::Minus
            | Token::Div
            | Token::FloorDiv
            | Token::Mod
            | Token::Tilde
            | Token::Dot
            | Token::Pipe
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte
            | Token::BracketOpen
            | Token::ParenOpen
            | Token::BraceOpen
            | Token::Ident("not" | "and" | "or" | "is" | "in" | "if" | "else") => {
                self.operators += 1;
            }
            _ => {}
        }
    }

    /// The most bytes that constants in a tag of that length can come to.
    fn constant_bytes(&self, len: usize) -> usize {
        if self.multiplies {
            len.saturating_mul(self.product)
        } else {
            0
        }
    }
}

/// Puts the guards into an environment.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_formatter(write_value);
    environment.set_unknown_method_callback(method);
    for operator in OPERATORS {
        environment.add_function(
            operator.name,
            move |state: &mut State, operands: Rest<Value>| (operator.apply)(state, &operands),
        );
    }
    install_filters(environment);
    install_tests(environment);
}

/// Sets the limits that depend on the compiled template, and refuses what cannot be guarded.
///
/// Instructions are so few that all of them together write a bounded amount of the template's own
/// text. A chain of comparisons such as `a < b < c` leaves an operand behind, which no call can do.
pub(super) fn finish(environment: &mut Environment<'static>) -> Result<(), Error> {
    let template = environment.get_template(NAME)?;
    let compiled = get_compiled_template(&template);
    let all = || {
        compiled
            .blocks
            .values()
            .chain([&compiled.instructions])
            .flat_map(instructions)
    };
    if all().any(|instruction| matches!(instruction, Instruction::CompareAndPreserve(_))) {
        let message = "comparisons cannot be chained; write `a < b and b < c` for `a < b < c`";
        return Err(Error::new(ErrorKind::SyntaxError, message));
    }
    let longest = all().map(raw_bytes).max().unwrap_or(0);
    let fuel = (MAX_RAW_BYTES / longest.max(1)).min(MAX_INSTRUCTIONS);
    environment.set_fuel(Some(fuel as u64));
    Ok(())
}

fn instructions<'a, 'source>(
    all: &'a Instructions<'source>,
) -> impl Iterator<Item = &'a Instruction<'source>> {
    (0..).map_while(|index| all.get(index))
}

fn raw_bytes(instruction: &Instruction) -> usize {
    match instruction {
        Instruction::EmitRaw(text) => text.len(),
        _ => 0,
    }
}

/// The instructions with every operator replaced by a call, one for one.
fn guarded<'source>(original: &Instructions<'source>) -> Instructions<'source> {
    let mut copy = Instructions::new(original.name(), original.source());
    for (index, instruction) in (0..).zip(instructions(original)) {
        let call = operator(instruction)
            .map(|operator| Instruction::CallFunction(operator.name, Some(operator.operands)));
        let instruction = call.unwrap_or_else(|| instruction.clone());
        match (original.get_span(index), original.get_line(index)) {
            (Some(span), _) => copy.add_with_span(instruction, span),
            (None, Some(line)) => {
                copy.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX))
            }
            (None, None) => copy.add(instruction),
        };
    }
    copy
}

/// An operator, as a function of the environment.
struct Operator {
    name: &'static str,
    operands: u16,
    apply: fn(&mut State, &[Value]) -> Result<Value, Error>,
}

fn operator(instruction: &Instruction) -> Option<&'static Operator> {
    let name = match instruction {
        Instruction::Add => "__lacuna_add",
        Instruction::Mul => "__lacuna_multiply",
        Instruction::Rem => "__lacuna_remainder",
        Instruction::StringConcat => "__lacuna_concatenate",
        Instruction::Slice => "__lacuna_slice",
        Instruction::In => "__lacuna_in",
        Instruction::Eq => "__lacuna_equal",
        Instruction::Ne => "__lacuna_unequal",
        Instruction::Lt => "__lacuna_less",
        Instruction::Lte => "__lacuna_less_or_equal",
        Instruction::Gt => "__lacuna_greater",
        Instruction::Gte => "__lacuna_greater_or_equal",
        _ => return None,
    };
    OPERATORS.iter().find(|operator| operator.name == name)
}

static OPERATORS: &[Operator] = &[
    Operator {
        name: "__lacuna_add",
        operands: 2,
        apply: add,
    },
    Operator {
        name: "__lacuna_multiply",
        operands: 2,
        apply: multiply,
    },
    Operator {
        name: "__lacuna_remainder",
        operands: 2,
        apply: remainder,
    },
    Operator {
        name: "__lacuna_concatenate",
        operands: 2,
        apply: concatenate,
    },
    Operator {
        name: "__lacuna_slice",
        operands: 4,
        apply: slice,
    },
    Operator {
        name: "__lacuna_in",
        operands: 2,
        apply: contained,
    },
    Operator {
        name: "__lacuna_equal",
        operands: 2,
        apply: |s, o| compare(s, o, |a, b| a == b),
    },
    Operator {
        name: "__lacuna_unequal",
        operands: 2,
        apply: |s, o| compare(s, o, |a, b| a != b),
    },
    Operator {
        name: "__lacuna_less",
        operands: 2,
        apply: |s, o| compare(s, o, |a, b| a < b),
    },
    Operator {
        name: "__lacuna_less_or_equal",
        operands: 2,
        apply: |s, o| compare(s, o, |a, b| a <= b),
    },
    Operator {
        name: "__lacuna_greater",
        operands: 2,
        apply: |s, o| compare(s, o, |a, b| a > b),
    },
    Operator {
        name: "__lacuna_greater_or_equal",
        operands: 2,
        apply: |s, o| compare(s, o, |a, b| a >= b),
    },
];

/// The operators that the library offers to no one but its own expressions.
struct Expressions {
    add: Expression<'static, 'static>,
    multiply: Expression<'static, 'static>,
    remainder: Expression<'static, 'static>,
    contained: Expression<'static, 'static>,
    slice: Expression<'static, 'static>,
}

static EXPRESSIONS: LazyLock<Result<Expressions, Error>> = LazyLock::new(|| {
    static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);
    Ok(Expressions {
        add: ENVIRONMENT.compile_expression("a + b")?,
        multiply: ENVIRONMENT.compile_expression("a * b")?,
        remainder: ENVIRONMENT.compile_expression("a % b")?,
        contained: ENVIRONMENT.compile_expression("a in b")?,
        slice: ENVIRONMENT.compile_expression("a[b:c:d]")?,
    })
});

fn evaluate(
    choose: impl Fn(&Expressions) -> &Expression<'static, 'static>,
    operands: &[Value],
) -> Result<Value, Error> {
    let expressions = EXPRESSIONS.as_ref().map_err(|error| {
        Error::new(
            ErrorKind::InvalidOperation,
            error.detail().unwrap_or_default().to_owned(),
        )
    })?;
    let names = ["a", "b", "c", "d"].into_iter();
    let variables = Value::from_pairs(names.zip(operands.iter().cloned()));
    choose(expressions).eval(variables).map_err(|error| {
        // The position in the expression would be taken for one in the template.
        let detail = error.detail().map(str::to_owned).unwrap_or_default();
        Error::new(error.kind(), detail)
    })
}

fn pair(operands: &[Value]) -> Result<(&Value, &Value), Error> {
    match operands {
        [first, second] => Ok((first, second)),
        _ => Err(ErrorKind::MissingArgument.into()),
    }
}

fn add(state: &mut State, operands: &[Value]) -> Result<Value, Error> {
    let (first, second) = pair(operands)?;
    if let (Some(first), Some(second)) = (first.as_str(), second.as_str()) {
        charge(state, first.len() + second.len())?;
        return Ok(Value::from([first, second].concat()));
    }
    charge(state, breadth(first).saturating_add(breadth(second)))?;
    evaluate(|expressions| &expressions.add, operands)
}

fn multiply(state: &mut State, operands: &[Value]) -> Result<Value, Error> {
    let (first, second) = pair(operands)?;
    let times = |text: &Value, number: &Value| {
        let repeated = matches!(
            text.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Iterable
        );
        number
            .as_usize()
            .filter(|_| repeated)
            .map(|times| breadth(text).saturating_mul(times))
    };
    charge(
        state,
        times(first, second)
            .or(times(second, first))
            .unwrap_or(ITEM_BYTES),
    )?;
    // Less than none of a text or a list is none of it.
    let is_repeated = |value: &Value| matches!(value.kind(), ValueKind::String | ValueKind::Seq);
    let is_negative = |value: &Value| value.is_integer() && value.as_i64().is_some_and(|it| it < 0);
    if is_repeated(first) && is_negative(second) {
        return evaluate(
            |expressions| &expressions.multiply,
            &[first.clone(), Value::from(0)],
        );
    }
    if is_negative(first) && is_repeated(second) {
        return evaluate(
            |expressions| &expressions.multiply,
            &[Value::from(0), second.clone()],
        );
    }
    evaluate(|expressions| &expressions.multiply, operands)
}

/// Of numbers the remainder; a text is a format.
fn remainder(state: &mut State, operands: &[Value]) -> Result<Value, Error> {
    let (first, second) = pair(operands)?;
    let Some(pattern) = first.as_str() else {
        return evaluate(|expressions| &expressions.remainder, operands);
    };
    let mut all = vec![first.clone()];
    all.extend(python::operands(second));
    charge_text_operation(state, "format", &all)?;
    python::formatted(pattern, second)
}

fn concatenate(state: &mut State, operands: &[Value]) -> Result<Value, Error> {
    let (first, second) = pair(operands)?;
    charge_whole(state, first)?;
    charge_whole(state, second)?;
    Ok(Value::from(python::shown(first) + &python::shown(second)))
}

fn slice(state: &mut State, operands: &[Value]) -> Result<Value, Error> {
    charge(state, operands.first().map_or(0, breadth))?;
    evaluate(|expressions| &expressions.slice, operands)
}

fn contained(state: &mut State, operands: &[Value]) -> Result<Value, Error> {
    let (item, container) = pair(operands)?;
    match container.kind() {
        ValueKind::Map => charge_whole(state, item)?,
        _ => charge_whole(state, container)?,
    }
    let stand_ins = marks::stand_ins(state);
    if stand_ins.is_empty() || container.kind() == ValueKind::Map {
        return evaluate(|expressions| &expressions.contained, operands);
    }
    let item = match item.as_str() {
        Some(_) => marks::meant(item, &stand_ins),
        None => item.clone(),
    };
    let meant = [item, marks::meant(container, &stand_ins)];
    evaluate(|expressions| &expressions.contained, &meant)
}

fn compare(
    state: &mut State,
    operands: &[Value],
    comparison: fn(&Value, &Value) -> bool,
) -> Result<Value, Error> {
    let (first, second) = pair(operands)?;
    charge_smaller(state, first, second)?;
    compare_meant(state, first, second, comparison).map(Value::from)
}

/// Compares what two values mean.
fn compare_meant(
    state: &mut State,
    first: &Value,
    second: &Value,
    comparison: fn(&Value, &Value) -> bool,
) -> Result<bool, Error> {
    let stand_ins = marks::stand_ins(state);
    if stand_ins.is_empty() || first.kind() != second.kind() {
        return Ok(comparison(first, second));
    }
    if first.as_str().is_none() {
        // Both are gone through here, not only the smaller.
        charge_whole(state, first)?;
        charge_whole(state, second)?;
    }
    let meant = |value| marks::meant(value, &stand_ins);
    Ok(comparison(&meant(first), &meant(second)))
}

/// Takes bytes from the allowance.
fn charge(state: &mut State, bytes: usize) -> Result<(), Error> {
    let left = allowance(state);
    *left = left.checked_sub(bytes).ok_or_else(exhausted)?;
    Ok(())
}

/// Charges for everything that a value holds, as writing it out does.
fn charge_whole(state: &mut State, value: &Value) -> Result<(), Error> {
    let left = allowance(state);
    *left = left
        .checked_sub(depth_first(value, *left, 0)?)
        .ok_or_else(exhausted)?;
    Ok(())
}

/// Charges for the smaller of two values, as comparing them does.
fn charge_smaller(state: &mut State, first: &Value, second: &Value) -> Result<(), Error> {
    let left = *allowance(state);
    let weight = match (depth_first(first, left, 0), depth_first(second, left, 0)) {
        (Ok(first), Ok(second)) => first.min(second),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => one,
        (Err(error), Err(_)) => return Err(error),
    };
    charge(state, weight)
}

fn allowance<'state>(state: &'state mut State) -> &'state mut usize {
    if state.get_extension::<Allowance>().is_none() {
        let messages = state.lookup("messages").unwrap_or_default();
        let tools = state.lookup("tools").unwrap_or_default();
        let given = [messages, tools]
            .iter()
            .map(|value| depth_first(value, usize::MAX, 0).unwrap_or(0))
            .sum::<usize>();
        let total = given
            .saturating_mul(ALLOWANCE_PER_BYTE)
            .saturating_add(ALLOWANCE);
        return &mut state.get_or_insert_extension(Allowance(total)).0;
    }
    &mut state.get_or_insert_extension(Allowance(0)).0
}

fn exhausted() -> Error {
    Error::from(ErrorKind::OutOfFuel)
}

/// The bytes of a value's own level: a text, or the places of its items.
fn breadth(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(1).saturating_mul(ITEM_BYTES),
    }
}

/// The bytes of everything in a value, each as often as it occurs; an error beyond the limit.
fn depth_first(value: &Value, limit: usize, depth: usize) -> Result<usize, Error> {
    if depth > MAX_NESTING {
        return Err(exhausted());
    }
    let mut total = ITEM_BYTES;
    if let Some(text) = value.as_str() {
        total += text.len();
    } else if matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map
    ) {
        let is_map = value.kind() == ValueKind::Map;
        for item in value.try_iter()? {
            total += depth_first(&item, limit.saturating_sub(total), depth + 1)?;
            if is_map {
                let inner = value.get_item(&item)?;
                total += depth_first(&inner, limit.saturating_sub(total), depth + 1)?;
            }
            if total > limit {
                return Err(exhausted());
            }
        }
    }
    if total > limit {
        Err(exhausted())
    } else {
        Ok(total)
    }
}

/// Writes one value.
fn write_value(output: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    charge_whole(state, value)?;
    match value.as_str() {
        Some(text) => output.write_str(text)?,
        None => output.write_str(&python::shown(value))?,
    }
    Ok(())
}

/// Python's methods of texts and dictionaries.
fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let arguments = python::positional(name, arguments)?;
    let all: Vec<Value> = std::iter::once(value).chain(&arguments).cloned().collect();
    charge_text_operation(state, name, &all)?;
    marks::text_operation(state, name, &all, |state, all| match all {
        [value, arguments @ ..] => python_method(state, value, name, arguments),
        [] => Err(ErrorKind::MissingArgument.into()),
    })
}

fn python_method(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let own = match value.as_str() {
        Some(text) => python::text_method(text, name, arguments),
        None if value.kind() == ValueKind::Seq => python::list_method(value, name, arguments),
        None => None,
    };
    own.unwrap_or_else(|| {
        minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
    })
}

/// Charges for an operation on texts: what it is given, and what it can make of that.
fn charge_text_operation(state: &mut State, name: &str, all: &[Value]) -> Result<(), Error> {
    let text = |index: usize| all.get(index).and_then(Value::as_str);
    match name {
        // Looking something up costs nothing that grows.
        "get" | "items" | "keys" | "values" => {
            return charge(state, all.first().map_or(0, breadth));
        }
        _ => all
            .iter()
            .try_for_each(|value| charge_whole(state, value))?,
    }
    let made = match (name, text(0), text(1), text(2)) {
        ("replace", Some(whole), Some(old), Some(new)) => {
            whole.matches(old).count().saturating_mul(new.len())
        }
        // A list joined by a text, in either order.
        ("join", ..) => all.iter().map(breadth).fold(1, usize::saturating_mul) / ITEM_BYTES,
        ("format", Some(pattern), ..) => format_bytes(pattern, all),
        ("indent", Some(whole), ..) => {
            let width = all
                .iter()
                .skip(1)
                .filter_map(Value::as_usize)
                .max()
                .unwrap_or(4);
            let named = all
                .last()
                .and_then(|options| options.get_attr("width").ok()?.as_usize());
            let lines = whole.lines().count() + 1;
            lines.saturating_mul(width.max(named.unwrap_or(0)))
        }
        ("center" | "ljust" | "rjust" | "zfill", ..) => {
            let width = all.get(1).and_then(Value::as_usize).unwrap_or(0);
            width.saturating_mul(size_of::<char>())
        }
        ("pprint", ..) => ALLOWANCE / 64,
        _ => 0,
    };
    charge(state, made)
}

/// What a format can write: every number in it or given to it may be a width, and every directive
/// may write the largest argument.
fn format_bytes(pattern: &str, all: &[Value]) -> usize {
    let written = pattern.split(|character: char| !character.is_ascii_digit());
    let written = written
        .filter(|digits| !digits.is_empty())
        .map(|digits| digits.parse().unwrap_or(usize::MAX));
    let given = all.iter().filter_map(Value::as_usize);
    let width = written.chain(given).max().unwrap_or(0);
    let longest = all.iter().skip(1).map(breadth).max().unwrap_or(0);
    let directives = pattern.matches(['%', '{']).count();
    directives.saturating_mul(width.saturating_add(longest))
}

/// Charges for an operation on the items of a list, not on what is in them.
fn charge_list_operation(state: &mut State, all: &[Value]) -> Result<(), Error> {
    let items = all.first().map_or(0, breadth);
    let counts = all
        .iter()
        .skip(1)
        .filter_map(Value::as_usize)
        .max()
        .unwrap_or(0);
    charge(
        state,
        items.saturating_add(counts.saturating_mul(ITEM_BYTES)),
    )
}

fn text_filter<'state>(
    state: &mut State<'state, '_>,
    name: &str,
    original: &Value,
    all: &[Value],
) -> Result<Value, Error> {
    charge_text_operation(state, name, all)?;
    let mut all = all.to_vec();
    if let ("join", Some(list)) = (name, all.first_mut()) {
        *list = python::with_shown_items(list);
    }
    marks::text_operation(state, name, &all, |state, all| match (name, all) {
        ("string", [value]) if !value.is_undefined() => Ok(match value.as_str() {
            Some(_) => value.clone(),
            None => Value::from(python::shown(value)),
        }),
        // The library's own takes no count.
        ("replace", [value, arguments @ ..]) if arguments.len() > 2 => {
            python_method(state, value, name, arguments)
        }
        ("int" | "float", [value, arguments @ ..]) => {
            let made = original.call(state, all);
            python::or_default(name, value, arguments, made)
        }
        _ => original.call(state, all),
    })
}

fn list_filter(state: &mut State, original: &Value, all: &[Value]) -> Result<Value, Error> {
    charge_list_operation(state, all)?;
    original.call(state, all)
}

macro_rules! filters {
    ($environment:ident, text: $($text:ident)*; list: $($list:ident)*;) => {
        $(
            let original = Value::from_function(filters::$text);
            $environment.add_filter(stringify!($text), move |state: &mut State, all: Rest<ValueOrKwargs>| {
                text_filter(state, stringify!($text), &original, &all.into_values())
            });
        )*
        $(
            let original = Value::from_function(filters::$list);
            $environment.add_filter(stringify!($list), move |state: &mut State, all: Rest<ValueOrKwargs>| {
                list_filter(state, &original, &all.into_values())
            });
        )*
    };
}

fn install_filters(environment: &mut Environment<'static>) {
    filters! {
        environment,
        text: safe escape upper lower title capitalize replace trim join split lines int float
            string pprint format indent sort unique groupby min max sum;
        list: list dictsort reverse batch slice select selectattr reject rejectattr map chain zip;
    }
    let original = Value::from_function(filters::escape);
    environment.add_filter("e", move |state: &mut State, all: Rest<ValueOrKwargs>| {
        text_filter(state, "escape", &original, &all.into_values())
    });
    let original = Value::from_function(super::json::tojson);
    environment.add_filter(
        "tojson",
        move |state: &mut State, all: Rest<ValueOrKwargs>| {
            text_filter(state, "tojson", &original, &all.into_values())
        },
    );
    for name in ["default", "d"] {
        environment.add_filter(name, python::default);
    }
    install_undefined(environment);
}

/// Filters that find nothing in what is undefined, as in Jinja2; the library's own fail.
fn install_undefined(environment: &mut Environment<'static>) {
    let original = Value::from_function(filters::items);
    environment.add_filter(
        "items",
        move |state: &mut State, all: Rest<ValueOrKwargs>| match &all.into_values()[..] {
            [value, ..] if value.is_undefined() => Ok(Value::from(Vec::<Value>::new())),
            all => list_filter(state, &original, all),
        },
    );
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| {
            if value.is_undefined() {
                return Ok(0);
            }
            filters::length(value)
        });
    }
    environment.add_filter("first", |value: Value| {
        if value.is_undefined() {
            return Ok(value);
        }
        filters::first(&value)
    });
    environment.add_filter("last", |value: Value| {
        if value.is_undefined() {
            return Ok(value);
        }
        filters::last(value)
    });
}

fn install_tests(environment: &mut Environment<'static>) {
    type Comparison = fn(&Value, &Value) -> bool;
    let comparisons: [(&[&'static str], Comparison); 6] = [
        (&["eq", "equalto", "=="], tests::is_eq),
        (&["ne", "!="], tests::is_ne),
        (&["lt", "lessthan", "<"], tests::is_lt),
        (&["le", "<="], tests::is_le),
        (&["gt", "greaterthan", ">"], tests::is_gt),
        (&["ge", ">="], tests::is_ge),
    ];
    for (names, comparison) in comparisons {
        for name in names {
            environment.add_test(
                *name,
                move |state: &mut State, first: Value, second: Value| {
                    charge_smaller(state, &first, &second)?;
                    compare_meant(state, &first, &second, comparison)
                },
            );
        }
    }
    for (name, original) in [
        ("startingwith", Value::from_function(tests::is_startingwith)),
        ("endingwith", Value::from_function(tests::is_endingwith)),
    ] {
        environment.add_test(name, move |state: &mut State, text: Value, end: Value| {
            charge_whole(state, &text)?;
            charge_whole(state, &end)?;
            let stand_ins = marks::stand_ins(state);
            let both = [text, end].map(|value| marks::meant(&value, &stand_ins));
            original.call(state, &both).map(|found| found.is_true())
        });
    }
    environment.add_test("in", |state: &mut State, item: Value, container: Value| {
        contained(state, &[item, container]).map(|found| found.is_true())
    });
    // The library walks through `none` as through an empty list. Python does not, and templates that
    // are told of no tools ask `tools is iterable and tools | length > 0`.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && tests::is_iterable(value)
    });
    // In Python whatever has a length and places is a sequence, texts and mappings too.
    environment.add_test("sequence", |value: &Value| {
        value.as_str().is_some()
            || value.is_undefined()
            || tests::is_mapping(value)
            || tests::is_sequence(value)
    });
}
