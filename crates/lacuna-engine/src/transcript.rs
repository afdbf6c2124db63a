//! Text of a continuation, token by token, up to its first stop string.

use lacuna_models::tokenizer::{Decode, TextStream, Tokenizer, TokenizerError};

use crate::stop::StopFilter;

/// Turns a continuation's tokens into the text that can be shown.
#[derive(Debug)]
pub(crate) struct Transcript {
    stream: TextStream,
    filter: StopFilter,
}

impl Transcript {
    pub(crate) fn new(stop: impl IntoIterator<Item = String>) -> Self {
        Self {
            stream: TextStream::new(Decode::CONTINUATION),
            filter: StopFilter::new(stop),
        }
    }

    /// Text that can be shown now that `token` has come.
    pub(crate) fn push(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
    ) -> Result<String, TokenizerError> {
        let text = self.stream.push(tokenizer, token)?;
        Ok(self.filter.push(text))
    }

    /// What was held back, now that no more comes.
    pub(crate) fn finish(&mut self) -> String {
        let shown = self.filter.push(self.stream.finish());
        shown + &self.filter.finish()
    }

    /// Whether a stop string has been met.
    pub(crate) fn stopped(&self) -> bool {
        self.filter.stopped()
    }
}
