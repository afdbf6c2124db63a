//! What keys are like, found out before the first is stored.

use lacuna_models::{KeyRecorder, LogitRows, Segment, smoothing_tokens};

use super::Engine;
use crate::error::EngineError;

impl Engine {
    /// Has keys stored smoothed, where their type gains from it: computes a short text first, which takes as long as a prompt
    /// of as many tokens. Without a word where there is no room for it, or another device keeps rows.
    ///
    /// # Errors
    /// [`EngineError::Forward`] for weights that cannot be read.
    pub(super) fn smooth_keys(&mut self) -> Result<(), EngineError> {
        let recorder = match self.executor {
            None => KeyRecorder::for_keys_of(self.cache.geometry()),
            Some(_) => None,
        };
        let Some(recorder) = recorder else {
            return Ok(());
        };
        let tokens = smoothing_tokens(self.model.tokenizer(), self.context_tokens());
        if tokens.is_empty() {
            return Ok(());
        }
        let mut sequence = self.cache.sequence(self.context_tokens())?;
        self.scratch.record_keys(Some(recorder));
        for chunk in tokens.chunks(self.scratch.limits().tokens) {
            if sequence.prepare(chunk.len()).is_err() {
                self.scratch.record_keys(None);
                break;
            }
            let segment = Segment {
                tokens: chunk,
                sequence: &mut sequence,
                logits: LogitRows::None,
                images: &[],
            };
            let segments = &mut [segment];
            self.model.forward(&self.cpu, segments, &mut self.scratch)?;
            sequence.accept(chunk.len());
        }
        drop(sequence);
        if let Some(recorder) = self.scratch.record_keys(None) {
            let smoothing = recorder.smoothing();
            self.cache = self.cache.clone().with_key_smoothing(smoothing);
        }
        // Nobody has asked for anything yet: memory is as it was.
        self.scratch.give_back();
        Ok(())
    }
}
