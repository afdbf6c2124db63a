//! Cutting text into words, one after another.
//!
//! This follows the `tokenizers` crate's splitting by patterns, which makes a list of every word with
//! its text and offsets first.

use fancy_regex::Regex;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::tokenizer::normalizer::SplitDelimiterBehavior;
use tokenizers::tokenizer::pattern::Invert;
use tokenizers::{PreTokenizedString, PreTokenizer, PreTokenizerWrapper};

use super::error::TokenizerError;
use super::pieces::character_of;

/// One step of cutting text into words.
#[derive(Debug)]
pub(super) enum Step {
    /// By what is found in it.
    Split {
        pattern: Pattern,
        behavior: SplitDelimiterBehavior,
        inverted: bool,
    },
    /// Every byte becomes its character in GPT-2's alphabet.
    Alphabet,
    /// By a rule of the `tokenizers` crate that has no pattern to give up on.
    Rule(Box<PreTokenizerWrapper>),
}

/// What a text is split by.
#[derive(Debug)]
pub(super) enum Pattern {
    Regex(Box<Regex>),
    /// A digit, or another sign for a number.
    Numeric,
}

type Range = std::ops::Range<usize>;

/// Bytes that a text may have once it is spelled in an alphabet: twice as many each time, and no
/// tokenizer does it twice. A rule may put a character in front of every word of a short one.
pub(super) const fn most_bytes(bytes: usize) -> usize {
    bytes.saturating_mul(4).saturating_add(256)
}

impl Step {
    /// The step that isolates each match of `pattern`.
    pub(super) fn isolate(pattern: &str) -> Result<Step, fancy_regex::Error> {
        Ok(Step::Split {
            pattern: Pattern::Regex(Box::new(Regex::new(pattern)?)),
            behavior: SplitDelimiterBehavior::Isolated,
            inverted: false,
        })
    }

    /// Its name in messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Step::Split { .. } => "a split of the pre-tokenizer",
            Step::Alphabet => "the pre-tokenizer ByteLevel",
            Step::Rule(_) => "a rule of the pre-tokenizer",
        }
    }

    /// Cuts a text that the `tokenizers` crate holds with its offsets.
    pub(super) fn apply(&self, text: &mut PreTokenizedString) -> Result<(), TokenizerError> {
        let result = match self {
            Step::Rule(rule) => rule.pre_tokenize(text),
            Step::Alphabet => ByteLevel::new(false, false, false).pre_tokenize(text),
            Step::Split {
                pattern,
                behavior,
                inverted,
            } => text.split(|_, part| match (pattern, inverted) {
                (Pattern::Regex(pattern), false) => part.split(pattern.as_ref(), *behavior),
                (Pattern::Regex(pattern), true) => part.split(Invert(pattern.as_ref()), *behavior),
                (Pattern::Numeric, false) => part.split(char::is_numeric, *behavior),
                (Pattern::Numeric, true) => part.split(Invert(char::is_numeric), *behavior),
            }),
        };
        result.map_err(|error| TokenizerError::PreTokenizer {
            detail: error.to_string(),
        })
    }

    /// Whether it cuts at white space, which it leaves out, wherever in a text that is.
    pub(super) fn cuts_at_spaces(&self) -> bool {
        let Step::Rule(rule) = self else {
            return false;
        };
        matches!(
            **rule,
            PreTokenizerWrapper::BertPreTokenizer(_)
                | PreTokenizerWrapper::Whitespace(_)
                | PreTokenizerWrapper::WhitespaceSplit(_)
        )
    }

    /// Whether it may leave text out.
    pub(super) fn removes(&self) -> bool {
        match self {
            Step::Split { behavior, .. } => *behavior == SplitDelimiterBehavior::Removed,
            Step::Alphabet => false,
            Step::Rule(rule) => !matches!(
                **rule,
                PreTokenizerWrapper::ByteLevel(_) | PreTokenizerWrapper::Metaspace(_)
            ),
        }
    }
}

/// Calls `each` with every word that `steps` cut `text` into. Rules are no part of the steps.
pub(super) fn cut(
    text: &str,
    steps: &[Step],
    each: &mut dyn FnMut(&str) -> Result<(), TokenizerError>,
) -> Result<(), TokenizerError> {
    cut_within(text, steps, most_bytes(text.len()), each)
}

fn cut_within(
    text: &str,
    steps: &[Step],
    most: usize,
    each: &mut dyn FnMut(&str) -> Result<(), TokenizerError>,
) -> Result<(), TokenizerError> {
    let Some((step, rest)) = steps.split_first() else {
        return each(text);
    };
    match step {
        Step::Split {
            pattern,
            behavior,
            inverted,
        } => {
            let mut words = Words::new(*behavior, |range: Range| match range.is_empty() {
                true => Ok(()),
                false => cut_within(&text[range], rest, most, each),
            });
            pattern.find(text, |range, found| words.push(range, found != *inverted))?;
            words.finish()
        }
        Step::Alphabet => {
            let spelled: String = text.bytes().map(character_of).collect();
            if spelled.len() > most {
                return Err(TokenizerError::Growth {
                    step: step.name().to_owned(),
                    bytes: spelled.len(),
                    limit: most,
                });
            }
            cut_within(&spelled, rest, most, each)
        }
        Step::Rule(_) => unreachable!("a text that rules cut is held as a whole"),
    }
}

impl Pattern {
    /// Calls `each` with every stretch of `text`, in order, and whether it is a match.
    fn find(
        &self,
        text: &str,
        mut each: impl FnMut(Range, bool) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let mut rest = 0;
        let mut found = |range: Range| {
            if rest != range.start {
                each(rest..range.start, false)?;
            }
            rest = range.end;
            each(range, true)
        };
        match self {
            Pattern::Regex(regex) => {
                for one in regex.find_iter(text) {
                    let one = one.map_err(|error| TokenizerError::PreTokenizer {
                        detail: error.to_string(),
                    })?;
                    found(one.range())?;
                }
            }
            Pattern::Numeric => {
                for (at, one) in text.match_indices(char::is_numeric) {
                    found(at..at + one.len())?;
                }
            }
        }
        match rest == text.len() {
            true => Ok(()),
            false => each(rest..text.len(), false),
        }
    }
}

/// Puts matches and what is between them together as a behaviour has it.
struct Words<F> {
    behavior: SplitDelimiterBehavior,
    /// What is not known to be over, and whether its last stretch was a match.
    open: Option<(Range, bool)>,
    each: F,
}

impl<F: FnMut(Range) -> Result<(), TokenizerError>> Words<F> {
    fn new(behavior: SplitDelimiterBehavior, each: F) -> Self {
        Words {
            behavior,
            open: None,
            each,
        }
    }

    fn push(&mut self, range: Range, is_match: bool) -> Result<(), TokenizerError> {
        use SplitDelimiterBehavior::{
            Contiguous, Isolated, MergedWithNext, MergedWithPrevious, Removed,
        };
        let Some((open, was_match)) = self.open.take() else {
            return self.begin(range, is_match);
        };
        let joins = match self.behavior {
            Isolated | Removed => false,
            Contiguous => is_match == was_match,
            MergedWithPrevious => is_match && !was_match,
            MergedWithNext => !is_match && was_match,
        };
        if joins {
            self.open = Some((open.start..range.end, is_match));
            return Ok(());
        }
        (self.each)(open)?;
        self.begin(range, is_match)
    }

    fn begin(&mut self, range: Range, is_match: bool) -> Result<(), TokenizerError> {
        if self.behavior == SplitDelimiterBehavior::Removed && is_match {
            return Ok(());
        }
        self.open = Some((range, is_match));
        Ok(())
    }

    fn finish(mut self) -> Result<(), TokenizerError> {
        self.open
            .take()
            .map_or(Ok(()), |(open, _)| (self.each)(open))
    }
}
