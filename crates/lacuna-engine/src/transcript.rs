//! From tokens to text and its end: the one place where it is decided what a token adds to the text
//! of a choice, and whether the choice goes on after it.

use lacuna_text::tokenizer::{
    Decode, SpecialText, TextStart, TextStream, Tokenizer, TokenizerError,
};

use crate::request::Limits;
use crate::stop::{StopFilter, StopText};
use crate::stream::FinishReason;

/// The text of one choice, token by token.
#[derive(Debug)]
pub(crate) struct Transcript {
    stream: TextStream,
    filter: StopFilter,
    ends: Ends,
    /// Tokens it has yet to take before it may end by itself.
    required: usize,
    /// Tokens it may still take by its limits.
    tokens_left: usize,
    /// Tokens it may still take before the context is full.
    context_left: usize,
}

/// Which tokens end the text.
#[derive(Debug)]
struct Ends {
    by_model: ModelEnd,
    stop_tokens: Vec<u32>,
    special: SpecialText,
    shown: StopText,
}

/// What becomes of a token by which the model says that it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModelEnd {
    /// It ends the text.
    Ends,
    /// It is one like any other.
    Continues,
    /// It cannot come as long as another one can, and then it ends the text: what
    /// [`ModelEnd::Continues`] is for a text that has to conform to something.
    Barred,
}

/// What a token made of a choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It goes on, and this can be shown.
    Continues(String),
    /// It ended with this token, which is part of it.
    EndsWith(String, FinishReason),
    /// It ended before this token.
    EndsBefore(String, FinishReason),
}

impl Transcript {
    /// The text after `prompt_tokens` tokens, where `capacity` tokens fit into the context.
    pub(crate) fn new(limits: &Limits, prompt_tokens: usize, capacity: usize) -> Self {
        let decode = Decode {
            special: limits.special,
            start: TextStart::Continuation,
        };
        Self {
            stream: TextStream::new(decode),
            filter: StopFilter::new(limits.stop.iter().cloned(), limits.stop_text),
            ends: Ends {
                by_model: match limits.ignore_eos {
                    true => ModelEnd::Continues,
                    false => ModelEnd::Ends,
                },
                stop_tokens: limits.stop_tokens.clone(),
                special: limits.special,
                shown: limits.stop_text,
            },
            required: limits.min_tokens,
            tokens_left: limits.max_tokens.unwrap_or(usize::MAX),
            // One more than there are rows: nothing is computed from the last token.
            context_left: (capacity + 1).saturating_sub(prompt_tokens),
        }
    }

    /// The same for a text that must conform to something, and so may have to end.
    pub(crate) fn constrained(mut self) -> Self {
        if self.ends.by_model == ModelEnd::Continues {
            self.ends.by_model = ModelEnd::Barred;
        }
        self
    }

    /// Replaces `barred` with the tokens that may not come next if others can. By `ends` the model
    /// says that it is done.
    pub(crate) fn barred(&self, ends: impl Iterator<Item = u32>, barred: &mut Vec<u32>) {
        barred.clear();
        if self.required > 0 || self.ends.by_model == ModelEnd::Barred {
            barred.extend(ends);
        }
        if self.required > 0 {
            barred.extend_from_slice(&self.ends.stop_tokens);
        }
    }

    /// Whether any token may come next, and after it.
    pub(crate) fn bars_nothing(&self) -> bool {
        self.required == 0 && self.ends.by_model != ModelEnd::Barred
    }

    /// Whether the limits allow one more token. False at the start for a limit of no tokens: such a
    /// choice ends without one.
    pub(crate) fn wants_tokens(&self) -> bool {
        self.tokens_left > 0
    }

    /// Tokens that it may still take.
    pub(crate) fn most_tokens(&self) -> usize {
        self.tokens_left.min(self.context_left)
    }

    /// Whether `token` would become part of the text instead of ending it.
    pub(crate) fn takes(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        self.wants_tokens() && !self.ends.hides(tokenizer, token)
    }

    /// Whether `token` ends the text, be it a part of it or not.
    pub(crate) fn ends_at(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        self.ends.reason(tokenizer, token).is_some()
    }

    /// Takes `token` up, unless it is one that ends the text. `complete` says that nothing may follow
    /// it by the choice's constraint.
    ///
    /// # Errors
    /// [`TokenizerError`] for a token that has no text.
    pub(crate) fn advance(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
        complete: bool,
    ) -> Result<Outcome, TokenizerError> {
        let end = self.ends.reason(tokenizer, token);
        if !self.takes(tokenizer, token) {
            let wanted = end.filter(|_| self.wants_tokens());
            let (text, reason) = self.end(wanted.unwrap_or(FinishReason::MaxTokens));
            return Ok(Outcome::EndsBefore(text, reason));
        }
        self.tokens_left -= 1;
        self.context_left = self.context_left.saturating_sub(1);
        let text = self.stream.push(tokenizer, token)?;
        let shown = match self.required {
            // No stop string reaches into a mark, nor over it.
            0 if !self.ends.marks(tokenizer, token) => self.filter.push(text),
            _ => self.filter.pass(text),
        };
        self.required = self.required.saturating_sub(1);
        let reason = if let Some(stop) = self.filter.found() {
            FinishReason::StopString(stop)
        } else if let Some(end) = end {
            end
        } else if complete {
            FinishReason::ConstraintComplete
        } else if self.tokens_left == 0 {
            FinishReason::MaxTokens
        } else if self.context_left == 0 {
            FinishReason::ContextFull
        } else {
            return Ok(Outcome::Continues(shown));
        };
        let (rest, reason) = self.end(reason);
        Ok(Outcome::EndsWith(shown + &rest, reason))
    }

    /// What was held back, and the reason to give: a stop string that only comes up with the last
    /// text takes precedence.
    pub(crate) fn end(&mut self, reason: FinishReason) -> (String, FinishReason) {
        let shown = match self.required {
            0 => self.filter.push(self.stream.finish()),
            _ => self.filter.pass(self.stream.finish()),
        };
        let shown = shown + &self.filter.finish();
        match self.filter.found() {
            Some(stop) => (shown, FinishReason::StopString(stop)),
            None => (shown, reason),
        }
    }
}

impl Ends {
    /// Why the text is over with `token`, if it is.
    fn reason(&self, tokenizer: &Tokenizer, token: u32) -> Option<FinishReason> {
        if self.by_model != ModelEnd::Continues && tokenizer.is_end_of_generation(token) {
            Some(FinishReason::EndOfText)
        } else if self.stop_tokens.contains(&token) {
            Some(FinishReason::StopToken(token))
        } else {
            None
        }
    }

    /// Whether `token` is markup in the text.
    fn marks(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        self.special == SpecialText::Mark
            && tokenizer.kind(token).is_some_and(|kind| kind.is_special())
    }

    /// Whether `token` ends the text without becoming a part of it.
    fn hides(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        let control = tokenizer.kind(token).is_some_and(|kind| kind.is_special());
        let shown = self.shown == StopText::Show && (self.special == SpecialText::Show || !control);
        !shown && self.reason(tokenizer, token).is_some()
    }
}
