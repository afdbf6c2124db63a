//! Cutting text into words, one after another.
//!
//! This follows the `tokenizers` crate's splitting by patterns, which makes a list of every word with
//! its text and offsets first.

use std::sync::LazyLock;

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
    /// Threes of digits, counted from the right.
    Threes(Threes),
}

/// Rules of threes that are known by their patterns, which look to the end of a number from each of its digits: of a
/// hundred thousand digits they would take minutes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Threes {
    /// The places in front of threes.
    Places,
    /// The threes and what is left over in front of them, of numbers that no letter follows.
    Numbers,
}

static DIGITS: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\d+").expect("a pattern"));
static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\A\w").expect("a pattern"));

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
            pattern: Pattern::of(pattern)?,
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
                (Pattern::Threes(threes), false) => part.split(*threes, *behavior),
                (Pattern::Threes(threes), true) => part.split(Invert(*threes), *behavior),
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
    /// What is found by a regular expression.
    pub(super) fn of(pattern: &str) -> Result<Pattern, fancy_regex::Error> {
        match pattern {
            r"(?=(\d{3})+(?!\d))" | r"(?=(?:\d{3})+(?!\d))" => Ok(Pattern::Threes(Threes::Places)),
            r"\d{1,3}(?=(?:\d{3})*\b)" => Ok(Pattern::Threes(Threes::Numbers)),
            _ => Ok(Pattern::Regex(Box::new(Regex::new(pattern)?))),
        }
    }

    /// Calls `each` with every stretch of `text`, in order, and whether it is a match.
    fn find(
        &self,
        text: &str,
        mut each: impl FnMut(Range, bool) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let mut rest = 0;
        let mut found = |range: Range| -> Result<(), TokenizerError> {
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
            Pattern::Threes(threes) => threes.find(text, found)?,
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

impl Threes {
    /// Calls `found` with every match, in order.
    fn find(
        self,
        text: &str,
        mut found: impl FnMut(Range) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let failed = |error: fancy_regex::Error| TokenizerError::PreTokenizer {
            detail: error.to_string(),
        };
        for number in DIGITS.find_iter(text) {
            let number = number.map_err(failed)?;
            let follows = WORD.is_match(&text[number.end()..]).map_err(failed)?;
            if matches!(self, Threes::Numbers) && follows {
                continue;
            }
            let count = number.as_str().chars().count();
            let places = number.as_str().char_indices().enumerate();
            let starts = places.filter(|(digit, _)| (count - digit).is_multiple_of(3));
            let starts = starts.map(|(_, (at, _))| number.start() + at);
            match self {
                Threes::Places => starts.map(|at| at..at).try_for_each(&mut found)?,
                Threes::Numbers => {
                    let mut from = number.start();
                    for start in starts
                        .chain([number.end()])
                        .filter(|at| *at > number.start())
                    {
                        found(from..start)?;
                        from = start;
                    }
                }
            }
        }
        Ok(())
    }
}

impl tokenizers::tokenizer::pattern::Pattern for Threes {
    fn find_matches(&self, text: &str) -> tokenizers::Result<Vec<((usize, usize), bool)>> {
        let mut all = Vec::new();
        Pattern::Threes(*self).find(text, |range, is_match| {
            all.push(((range.start, range.end), is_match));
            Ok(())
        })?;
        Ok(all)
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stretches(pattern: &Pattern, text: &str) -> Vec<(Range, bool)> {
        let mut all = Vec::new();
        let mut each = |range, found| {
            all.push((range, found));
            Ok(())
        };
        pattern.find(text, &mut each).unwrap();
        all
    }

    proptest! {
        #[test]
        fn threes_are_what_their_patterns_find(text in "[0-9٣½a_ é-]{0,14}") {
            for regex in [r"(?=(\d{3})+(?!\d))", r"(?=(?:\d{3})+(?!\d))", r"\d{1,3}(?=(?:\d{3})*\b)"] {
                let known = Pattern::of(regex).unwrap();
                prop_assert!(matches!(known, Pattern::Threes(_)));
                let plain = Pattern::Regex(Box::new(Regex::new(regex).unwrap()));
                prop_assert_eq!(stretches(&known, &text), stretches(&plain, &text));
            }
        }
    }
}
