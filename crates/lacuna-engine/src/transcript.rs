//! From tokens to text and its end: the one place where it is decided what a token adds to the text
//! of a choice, and whether the choice goes on after it.

use lacuna_models::tokenizer::{Decode, TextStream, Tokenizer, TokenizerError};

use crate::request::Limits;
use crate::stop::StopFilter;
use crate::stream::FinishReason;

/// The text of one choice, token by token.
#[derive(Debug)]
pub(crate) struct Transcript {
    stream: TextStream,
    filter: StopFilter,
    /// Tokens it may still take by its limits.
    tokens_left: usize,
    /// Tokens it may still take before the context is full.
    context_left: usize,
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
        Self {
            stream: TextStream::new(Decode::CONTINUATION),
            filter: StopFilter::new(limits.stop.iter().cloned()),
            tokens_left: limits.max_tokens.unwrap_or(usize::MAX),
            // One more than there are rows: nothing is computed from the last token.
            context_left: (capacity + 1).saturating_sub(prompt_tokens),
        }
    }

    /// Whether the limits allow one more token. False at the start for a limit of no tokens: such a
    /// choice ends without one.
    pub(crate) fn wants_tokens(&self) -> bool {
        self.tokens_left > 0
    }

    /// Whether `token` would become part of the text instead of ending it.
    pub(crate) fn takes(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        self.wants_tokens() && !tokenizer.is_end_of_generation(token)
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
        if !self.takes(tokenizer, token) {
            let (text, reason) = match self.wants_tokens() {
                true => self.end(FinishReason::EndOfText),
                false => self.end(FinishReason::MaxTokens),
            };
            return Ok(Outcome::EndsBefore(text, reason));
        }
        self.tokens_left -= 1;
        self.context_left = self.context_left.saturating_sub(1);
        let text = self.stream.push(tokenizer, token)?;
        let shown = self.filter.push(text);
        let reason = if self.filter.stopped() {
            FinishReason::StopString
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
        let shown = self.filter.push(self.stream.finish());
        let shown = shown + &self.filter.finish();
        match self.filter.stopped() {
            true => (shown, FinishReason::StopString),
            false => (shown, reason),
        }
    }
}
