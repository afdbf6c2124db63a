//! The engine's constraint over `llguidance`.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Instant;

use lacuna_engine::{
    Borrower, Constraint, ConstraintError, Handle, HeldMemory, LoanRefusal, MemoryRefusal,
    RequestMemory,
};
use lacuna_models::Model;
use lacuna_pages::return_freed_memory;
use lacuna_text::reply::{Piece, Reader};
use llguidance::api::StopReason;
use llguidance::earley::Parser;
use llguidance::{Matcher, ParserFactory};
use toktrie::{InferenceCapabilities, SimpleVob, TokEnv, TokTrie};

use crate::http::error::ApiError;
use crate::structured::grammar::{RECIPIENT, Rule};
use crate::structured::thoughts::Thoughts;
use crate::structured::vocabulary;

/// Lexer states of one request at most; each takes some 2 kB.
const MOST_LEXER_STATES: usize = 10_000;
/// Symbols of one grammar at most.
const MOST_SYMBOLS: usize = 100_000;

/// What most tokens are, whose masks are kept ready: text within a string of JSON that may be long, or has a bound. Each
/// expression takes copies of the vocabulary, so there are as few as will do. With the four that `llguidance` has by
/// default the tables of Gemma's 262,144 tokens take 103 MiB; with these two 72 MiB, and no mask takes longer. With
/// the second alone they would take 59 MiB, and masks of strings of up to 20 characters 4 ms instead of 1.2.
const KEPT_READY: [&str; 2] = [
    r#"[^"\\\x00-\x1F\x7F]{1,10}"#,
    r#"[^"\\\x00-\x1F\x7F]{1,30}"#,
];

/// Stands before a call in Llama 3.
const PYTHON_TAG: &str = "<|python_tag|>";

/// What a grammar takes at least, and for each byte of its schema: symbols, lexer and parser states.
/// Schemas of fields, words and numbers take some 50 for each byte.
const GRAMMAR_BYTES: usize = 1 << 20;
const SCHEMA_BYTES: usize = 64;
/// How much more is taken at a time while states are added: more than one token adds.
const GROWTH_BYTES: usize = 1 << 20;

/// Makes constraints. The vocabulary's tables are built when one is asked for and there are none, and stay until pages run
/// short of the memory or nobody has used them for a while.
#[derive(Default)]
pub(crate) struct Grammars(Arc<Mutex<Tables>>);

/// The vocabulary's tables.
#[derive(Default)]
enum Tables {
    #[default]
    None,
    Built(Arc<Compiler>),
    /// Nothing ends a text of this vocabulary.
    Impossible,
}

struct Compiler {
    vocabulary: TokEnv,
    factory: ParserFactory,
    /// When a constraint was last made with it, or ended.
    used: Mutex<Instant>,
}

/// Keeps tables while a constraint needs them.
#[derive(Clone)]
pub(super) struct Use(Arc<Compiler>);

impl Use {
    pub(super) fn vocabulary(&self) -> &TokEnv {
        &self.0.vocabulary
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.note_use();
    }
}

/// Whose memory tables are in: of the service whose replies they hold to grammars.
pub(crate) trait Lender {
    /// Gives memory for tables that `borrower` lets go of.
    fn lend(&self, borrower: TableMemory) -> Result<(), LoanRefusal>;
}

impl Lender for Handle {
    fn lend(&self, borrower: TableMemory) -> Result<(), LoanRefusal> {
        self.lend_for_constraints(borrower)
    }
}

/// Lets go of tables that nobody uses.
pub(crate) struct TableMemory(Weak<Mutex<Tables>>);

impl Borrower for TableMemory {
    fn unused_since(&self) -> Option<Instant> {
        let tables = self.0.upgrade()?;
        match &*unless_built_now(&tables)? {
            Tables::Built(compiler) if Arc::strong_count(compiler) > 1 => None,
            Tables::Built(compiler) => Some(compiler.used()),
            _ => None,
        }
    }

    fn give_back(&self) -> bool {
        let Some(tables) = self.0.upgrade() else {
            return true;
        };
        let Some(mut tables) = unless_built_now(&tables) else {
            return false;
        };
        match &*tables {
            Tables::Built(compiler) if Arc::strong_count(compiler) > 1 => return false,
            Tables::Built(_) => *tables = Tables::None,
            _ => return true,
        }
        return_freed_memory();
        true
    }
}

/// The tables, unless somebody is building them, who is not waited for.
fn unless_built_now(tables: &Mutex<Tables>) -> Option<MutexGuard<'_, Tables>> {
    match tables.try_lock() {
        Ok(tables) => Some(tables),
        Err(TryLockError::Poisoned(tables)) => Some(tables.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammars")
    }
}

impl Grammars {
    /// The tables, which are built in memory of `lender` if there are none. `None` where the vocabulary has nothing that ends
    /// a text.
    fn compiler(&self, model: &Model, lender: &dyn Lender) -> Result<Option<Use>, LoanRefusal> {
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Tables::None = &*tables {
            lender.lend(TableMemory(Arc::downgrade(&self.0)))?;
            *tables = match Compiler::new(model) {
                Some(compiler) => Tables::Built(Arc::new(compiler)),
                None => Tables::Impossible,
            };
        }
        Ok(match &*tables {
            Tables::Built(compiler) => {
                compiler.note_use();
                Some(Use(Arc::clone(compiler)))
            }
            Tables::None | Tables::Impossible => None,
        })
    }

    /// What holds replies to `rule`, in memory of `account`, with tables in memory of `lender`: of replies that `reader` takes
    /// apart, what is said in them.
    pub(crate) fn constraint(
        &self,
        model: &Model,
        rule: &Rule,
        reader: Option<&Reader>,
        (account, lender): (&RequestMemory, &dyn Lender),
    ) -> Result<Box<dyn Constraint>, ApiError> {
        let compiler = self
            .compiler(model, lender)?
            .ok_or_else(|| ApiError::internal("this model's vocabulary allows no constraints"))?;
        let least = GRAMMAR_BYTES + SCHEMA_BYTES * rule.schema_bytes();
        let memory = account.try_take(least)?;
        let vocabulary = Arc::clone(compiler.vocabulary());
        let (matcher, parser) = compiler.0.compile(rule)?;
        let tables = GrammarTables {
            parser,
            memory: Mutex::new(memory),
            least,
            _compiler: compiler,
        };
        tables.hold()?;
        let grammar = Grammar {
            matcher,
            tables: Arc::new(tables),
        };
        Ok(match Place::of(rule, reader) {
            None => Box::new(grammar),
            Some(place) => Box::new(Deferred {
                vocabulary,
                place,
                begun: false,
                grammar,
            }),
        })
    }
}

impl Grammars {
    /// Ends the thoughts of a reply after `most` tokens, of which `reader` tells them, and holds it to
    /// `other` besides; that alone where this model's vocabulary has nothing that ends one.
    pub(crate) fn end_thoughts(
        &self,
        model: &Model,
        reader: &Reader,
        (most, other): (usize, Option<Box<dyn Constraint>>),
        lender: &dyn Lender,
    ) -> Result<Option<Box<dyn Constraint>>, LoanRefusal> {
        let Some(compiler) = self.compiler(model, lender)? else {
            return Ok(other);
        };
        Ok(match Thoughts::new(compiler, reader, most, other) {
            Ok(thoughts) => Some(Box::new(thoughts)),
            Err(other) => other,
        })
    }
}

impl Compiler {
    fn new(model: &Model) -> Option<Self> {
        let vocabulary = vocabulary::of(model)?;
        let slices = KEPT_READY.map(str::to_owned);
        let capabilities = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&vocabulary, capabilities, &slices).ok()?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = MOST_LEXER_STATES;
        limits.max_grammar_size = MOST_SYMBOLS;
        limits.verbose_errors = false;
        Some(Self {
            vocabulary,
            factory,
            used: Mutex::new(Instant::now()),
        })
    }

    fn used(&self) -> Instant {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_use(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// What follows `rule`, and a view of the tables that it and its clones share.
    fn compile(&self, rule: &Rule) -> Result<(Matcher, Parser), ApiError> {
        let refused = |error: &str| {
            let (path, reason) = match rule {
                Rule::Body(body) | Rule::HarmonyBody(body) => {
                    let path = body.field();
                    let own = body.is_grammar().then(|| of_a_grammar(error));
                    (path, own.unwrap_or_else(|| reason(error).to_owned()))
                }
                _ => ("tools", reason(error).to_owned()),
            };
            ApiError::field(path, format!("`{path}` cannot be followed: {reason}"))
        };
        let parser = self
            .factory
            .create_parser(rule.grammar(self.vocabulary.tok_trie()));
        let parser = parser.map_err(|error| refused(&error.to_string()))?;
        let tables = parser.parser.clone();
        let mut matcher = Matcher::new(Ok(parser));
        // A grammar no text conforms to shows when its first token is asked for.
        let mask = matcher.compute_mask_or_eos();
        match mask {
            Ok(mask) if !mask.is_zero() => Ok((matcher, tables)),
            Ok(_) => Err(refused(UNSATISFIABLE)),
            Err(error) => Err(refused(&error.to_string())),
        }
    }
}

/// What all choices of a request share: the tables of a grammar, which gain states as it is followed,
/// and the memory for them.
struct GrammarTables {
    parser: Parser,
    memory: Mutex<HeldMemory>,
    /// Bytes held from the start, half of which are for what is not counted below.
    least: usize,
    _compiler: Use,
}

impl GrammarTables {
    /// Takes what has been added since the last token.
    fn hold(&self) -> Result<(), MemoryRefusal> {
        // Hash tables and lists that have just doubled.
        let counted = 2 * self.parser.lexer_stats().num_bytes;
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if self.least / 2 + counted <= memory.bytes() {
            return Ok(());
        }
        memory.resize(self.least / 2 + counted + GROWTH_BYTES)
    }
}

/// Every token must follow a grammar.
#[derive(Clone)]
struct Grammar {
    matcher: Matcher,
    tables: Arc<GrammarTables>,
}

impl Constraint for Grammar {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }

    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|_| dead_end())?;
        self.tables.hold()?;
        if forbid(&mask, logits) == 0 {
            return Err(dead_end());
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.matcher.consume_token(token).map_err(|_| dead_end())
    }

    fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
            && self.matcher.stop_reason().is_ok()
            && self.matcher.stop_reason() != StopReason::NotStopped
    }
}

/// Anything may come until a certain place; what follows it must follow a grammar.
#[derive(Clone)]
struct Deferred {
    vocabulary: TokEnv,
    place: Place,
    begun: bool,
    grammar: Grammar,
}

/// Where a grammar begins to hold, as far as the reply has come.
#[derive(Clone)]
enum Place {
    /// After the mark of a call in what is said.
    Marker {
        marker: &'static str,
        /// The last bytes, as many as the marker has at least.
        seen: Vec<u8>,
        reader: Option<Reader>,
    },
    /// From the beginning of what is said, once that is how a call begins; never, once it is not.
    Opening {
        /// What is said, until it is neither.
        seen: Option<String>,
        openings: Arc<[String]>,
        reader: Option<Reader>,
    },
    /// After a thought that the prompt began.
    Thought(Reader),
    /// After [`RECIPIENT`] in a header.
    Recipient {
        /// The text of the header, or of what of it could begin the marker.
        seen: Vec<u8>,
        in_header: bool,
    },
}

/// The rest of a token that reaches a place, which is the first that a grammar has to take.
struct Reached {
    rest: Vec<u8>,
    /// Whether the reply is left alone if the rest does not follow the grammar.
    optional: bool,
}

impl Place {
    /// Where `rule` begins to hold, unless it does from the start.
    fn of(rule: &Rule, reader: Option<&Reader>) -> Option<Self> {
        if let Some(marker) = rule.mark() {
            return Some(Self::Marker {
                marker,
                seen: Vec::new(),
                reader: reader.cloned(),
            });
        }
        match rule {
            Rule::CallAtOnce { openings, .. } => Some(Self::Opening {
                seen: Some(String::new()),
                openings: openings.as_slice().into(),
                reader: reader.cloned(),
            }),
            Rule::HarmonyCall {
                required: false, ..
            } => Some(Self::Recipient {
                seen: Vec::new(),
                in_header: true,
            }),
            Rule::HarmonyCall { .. } | Rule::HarmonyBody(_) => None,
            Rule::Body(_)
            | Rule::Calls { .. }
            | Rule::CallsAfterMarker { .. }
            | Rule::Native { .. } => reader
                .filter(|reader| reader.is_reasoning())
                .map(|reader| Self::Thought(reader.clone())),
        }
    }

    /// Takes `token` into account, and says whether it reaches the place.
    fn reached(&mut self, trie: &TokTrie, token: u32) -> Option<Reached> {
        let bytes = trie.decode_ext(&[token], true);
        match self {
            Self::Marker {
                marker,
                seen,
                reader,
            } => {
                let said = match reader {
                    Some(reader) => said(reader, &bytes).into_bytes(),
                    None => bytes,
                };
                after(marker, seen, &said).map(|rest| Reached {
                    rest,
                    optional: true,
                })
            }
            Self::Opening {
                seen,
                openings,
                reader,
            } => {
                // Llama 3 puts it before calls, and no text has it.
                let is_mark = trie.is_special_token(token) && bytes == PYTHON_TAG.as_bytes();
                let said = match reader {
                    _ if is_mark => String::new(),
                    Some(reader) => said(reader, &bytes),
                    None => String::from_utf8_lossy(&bytes).into_owned(),
                };
                let held = seen.as_mut()?;
                held.push_str(&said);
                let begun = held.trim_start();
                if openings
                    .iter()
                    .any(|opening| begun.starts_with(opening.as_str()))
                {
                    let rest = begun.as_bytes().to_vec();
                    *seen = None;
                    return Some(Reached {
                        rest,
                        optional: true,
                    });
                }
                if !openings.iter().any(|opening| opening.starts_with(begun)) {
                    *seen = None;
                }
                None
            }
            Self::Thought(reader) => {
                let said = said(reader, &bytes);
                let over = !reader.is_reasoning();
                over.then(|| Reached {
                    rest: said.trim_start().as_bytes().to_vec(),
                    optional: false,
                })
            }
            Self::Recipient { seen, in_header } => {
                if trie.is_special_token(token) {
                    seen.clear();
                    *in_header = match bytes.as_slice() {
                        b"<|message|>" => false,
                        b"<|start|>" | b"<|channel|>" => true,
                        _ => *in_header,
                    };
                    return None;
                }
                let rest = after(RECIPIENT, seen, &bytes).filter(|_| *in_header);
                rest.map(|rest| Reached {
                    rest,
                    optional: true,
                })
            }
        }
    }
}

/// What is said in the next bytes of a reply.
fn said(reader: &mut Reader, bytes: &[u8]) -> String {
    let pieces = reader.push(&String::from_utf8_lossy(bytes));
    let text = |piece| match piece {
        Piece::Content(text) => Some(text),
        _ => None,
    };
    pieces.into_iter().filter_map(text).collect()
}

/// What follows `marker` in `seen` and `bytes`. Without it, what may begin it is kept in `seen`.
fn after(marker: &str, seen: &mut Vec<u8>, bytes: &[u8]) -> Option<Vec<u8>> {
    let marker = marker.as_bytes();
    seen.extend_from_slice(bytes);
    let found = seen
        .windows(marker.len())
        .position(|window| window == marker);
    if let Some(at) = found {
        let rest = seen.split_off(at + marker.len());
        seen.clear();
        return Some(rest);
    }
    let surplus = seen.len().saturating_sub(marker.len());
    seen.drain(..surplus);
    None
}

impl Constraint for Deferred {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }

    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        if self.begun {
            return self.grammar.mask(logits);
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if self.begun {
            return self.grammar.accept(token);
        }
        let Some(reached) = self.place.reached(self.vocabulary.tok_trie(), token) else {
            return Ok(());
        };
        // A token may hold the marker and more. Where the more is no call, the text is left alone.
        let rest = self.vocabulary.tokenize_bytes(&reached.rest);
        let taken = self.grammar.matcher.clone().try_consume_tokens(&rest);
        if taken.is_ok_and(|taken| taken == rest.len()) {
            let taken = self.grammar.matcher.consume_tokens(&rest);
            taken.map_err(|_| dead_end())?;
            self.begun = true;
        } else if !reached.optional {
            return Err(dead_end());
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.begun && self.grammar.is_complete()
    }
}

/// Makes every token that `mask` lacks impossible; returns how many are left.
fn forbid(mask: &SimpleVob, logits: &mut [f32]) -> usize {
    let mut left = 0;
    for (words, logits) in mask.as_slice().iter().zip(logits.chunks_mut(32)) {
        for (bit, logit) in logits.iter_mut().enumerate() {
            if words >> bit & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            } else {
                left += 1;
            }
        }
    }
    let known = mask.as_slice().len() * 32;
    if let Some(unknown) = logits.get_mut(known..) {
        unknown.fill(f32::NEG_INFINITY);
    }
    left
}

/// No token may come next, or following the schema has become too much work.
fn dead_end() -> ConstraintError {
    ConstraintError::NotFollowed(
        "no further token can be told to conform to the schema; make its patterns and bounds simpler"
            .to_owned(),
    )
}

/// How the library's errors begin where nothing conforms.
const UNSATISFIABLE: &str = "Unsatisfiable schema";

/// Why the library refuses a grammar, for who wrote the schema. What its errors say beyond this is
/// about the library itself.
fn reason(error: &str) -> &'static str {
    const REASONS: [(&str, &str); 7] = [
        (UNSATISFIABLE, "nothing conforms to it"),
        (
            "min/maxProperties only supported",
            "`minProperties` and `maxProperties` can only be followed where every property under \
             `properties` is required",
        ),
        (
            "patternProperty",
            "no name may match two patterns of `patternProperties`",
        ),
        (
            "circular references",
            "a schema that refers to itself must have nothing beside its `$ref`",
        ),
        ("too large", "it is too large"),
        ("limit", "it is too large"),
        (
            "regex",
            "a regular expression in it cannot be followed: it is not closed, or it has what is not known, such as \
             look-around, references to groups and marks of the beginning of a line",
        ),
    ];
    let found = REASONS.iter().find(|(part, _)| error.contains(part));
    found.map_or(
        "its patterns or bounds are beyond what can be decided token by token; make them simpler",
        |(_, reason)| reason,
    )
}

/// The same of a grammar, for who wrote it: what the library says of it, which names its places.
fn of_a_grammar(error: &str) -> String {
    /// Enough for a place and what is wrong there.
    const MOST_CHARACTERS: usize = 300;
    // What the library calls it when no token may come and the text is not at its end.
    if error.contains("NoExtensionBias") {
        return "nothing conforms to it; see that every definition comes to an end".to_owned();
    }
    let line = error.lines().find(|line| !line.trim().is_empty());
    let line = line.unwrap_or("it is no grammar").trim();
    line.chars().take(MOST_CHARACTERS).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use lacuna_files::ModelFiles;
    use lacuna_pages::ByteLength;
    use lacuna_text::reply::Format;
    use serde_json::json;

    use super::*;
    use crate::http::ignored::Ignored;
    use crate::structured::tools::{ToolSyntax, Tools};

    fn model() -> Model {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let files = ModelFiles::open(&root.join("lacuna-demo-q8_0.gguf")).expect("committed");
        Model::load(files).expect("the demo model")
    }

    /// Lends to everybody.
    struct Plenty;

    impl Lender for Plenty {
        fn lend(&self, _: TableMemory) -> Result<(), LoanRefusal> {
            Ok(())
        }
    }

    /// What holds a reply to calls of the only tool, or one call, between tags.
    fn of_tagged_calls(
        model: &Model,
        choice: &str,
        once: bool,
        reader: Option<&Reader>,
    ) -> Box<dyn Constraint> {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let choice = serde_json::from_value(json!(choice)).expect("a choice");
        let tools = Tools::new(vec![tool], Some(choice)).expect("valid");
        let tools = tools.called_once(once);
        let mut ignored = Ignored::new(true);
        let rule = Rule::new(None, &tools, ToolSyntax::Tagged, &mut ignored);
        let rule = rule.expect("valid").expect("tools are offered");
        let account = RequestMemory::new(ByteLength::new(16 << 20));
        let constraint = Grammars::default().constraint(model, &rule, reader, (&account, &Plenty));
        constraint.expect("it can be followed")
    }

    #[test]
    fn after_the_only_call_that_may_be_made_the_reply_is_over() {
        let model = model();
        let vocabulary = vocabulary::of(&model).expect("it ends texts");
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
        for (choice, before) in [("required", ""), ("auto", "Let me see.")] {
            for once in [true, false] {
                let mut constraint = of_tagged_calls(&model, choice, once, None);
                for token in vocabulary.tokenize_bytes(format!("{before}{call}").as_bytes()) {
                    constraint.accept(token).expect("it conforms");
                }
                assert_eq!(constraint.is_complete(), once, "{choice}");
            }
        }
    }

    #[test]
    fn without_marks_what_begins_like_a_call_is_held_to_be_one() {
        let model = model();
        let vocabulary = vocabulary::of(&model).expect("it ends texts");
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
        }}});
        let tools = Tools::new(vec![tool], None).expect("valid");
        let mut ignored = Ignored::new(true);
        for (syntax, arguments) in [
            (ToolSyntax::BareParameters, "parameters"),
            (ToolSyntax::Bare, "arguments"),
        ] {
            let rule = Rule::new(None, &tools, syntax, &mut ignored);
            let rule = rule.expect("valid").expect("tools are offered");
            let account = RequestMemory::new(ByteLength::new(16 << 20));
            let held = Grammars::default().constraint(&model, &rule, None, (&account, &Plenty));
            let held = held.expect("it can be followed");
            let takes = |text: String| {
                let mut held = held.fork();
                let mut tokens = vocabulary.tokenize_bytes(text.as_bytes()).into_iter();
                let taken = tokens.all(|token| held.accept(token).is_ok());
                (taken, held.is_complete())
            };
            let begun = format!("{{\"name\": \"f\", \"{arguments}\": ");
            assert_eq!(takes(format!("{begun}{{\"x\": 1}}}}")), (true, true));
            assert_eq!(takes(format!("\n{begun}{{\"x\": 1}}}}")), (true, true));
            assert_eq!(takes(format!("{begun}{{\"x\": \"")), (false, false));
            assert_eq!(takes(format!("{begun}{{\"y\"")), (false, false));
            // Text, or JSON that somebody asked for.
            for free in [
                format!("See: {begun}{{\"y\": 1}}"),
                "{\"name\": \"g\", \"parameters\": {\"y\": []}} and more".to_owned(),
                "{\"names\": [\"f\"]}".to_owned(),
            ] {
                assert_eq!(takes(free.clone()), (true, false), "{free}");
            }
        }
    }

    #[test]
    fn what_is_thought_is_held_to_no_grammar() {
        let model = model();
        let vocabulary = vocabulary::of(&model).expect("it ends texts");
        let format = Format::of("<think></think>").expect("it has both tags");
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
        let accept = |constraint: &mut Box<dyn Constraint>, text: &str| -> bool {
            let tokens = vocabulary.tokenize_bytes(text.as_bytes());
            tokens
                .into_iter()
                .all(|token| constraint.accept(token).is_ok())
        };
        for (choice, prompt, thought) in [
            ("auto", "", "<think>Not <tool_call> yet.</think>\n\nNow: "),
            ("auto", "<think>\n", "Not <tool_call> yet.</think>"),
            ("required", "<think>\n", "Not <tool_call> yet.</think>"),
        ] {
            let reader = format.reader(prompt);
            let mut held = of_tagged_calls(&model, choice, false, Some(&reader));
            assert!(accept(&mut held, thought), "{choice} {thought}");
            let mut other = held.fork();
            assert!(accept(&mut held, call), "{choice} {thought}");
            let wrong = "<tool_call>\n{\"name\": \"g\"";
            assert!(!accept(&mut other, wrong), "{choice} {thought}");
        }
        // Without a format the mark counts wherever it stands.
        let mut held = of_tagged_calls(&model, "auto", false, None);
        assert!(!accept(&mut held, "<think>Not <tool_call>\nyet"));
    }
}
