//! Fitting predictors of neurons: the text is computed as any prompt is, and what passes record is learned from.

use lacuna_models::{LogitRows, PredictorFit, PredictorFitter, Segment};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::runner::Wanted;

impl Engine {
    /// Fits what `fitter` is for to the activations of a text, in windows that each begin with an empty context. `progress`
    /// is told what is done, how far it is and of how much: of the text in tokens, then of each matrix in steps; again and
    /// again, where not all blocks' activations are recorded at once.
    ///
    /// # Errors
    /// [`EngineError`] when the text cannot be computed, and [`EngineError::Predictors`].
    pub fn fit_predictors(
        &mut self,
        windows: &[Vec<u32>],
        mut fitter: PredictorFitter,
        progress: &mut dyn FnMut(&str, usize, usize),
    ) -> Result<PredictorFit, EngineError> {
        let all = windows.iter().map(Vec::len).sum();
        while let Some(recorder) = fitter.recorder() {
            let before = self.record_neurons(Some(recorder));
            let mut done = 0;
            let read = windows.iter().try_for_each(|window| {
                self.read(window)?;
                done += window.len();
                progress("activations", done, all);
                Ok::<_, EngineError>(())
            });
            let recorder = self.record_neurons(before);
            read?;
            let recorder = recorder.expect("nobody else took it");
            fitter.fit(self.cpu(), recorder, progress)?;
        }
        Ok(fitter.finish()?)
    }

    /// Computes a text, of which nothing is kept.
    fn read(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        let mut sequence = self.kv_cache().sequence(self.context_tokens())?;
        let most = self.batch_limits().tokens;
        for chunk in tokens.chunks(most) {
            self.prepare_rows(&mut sequence, chunk.len())?;
            let segment = Segment {
                tokens: chunk,
                sequence: &mut sequence,
                logits: LogitRows::None,
                images: &[],
            };
            self.forward(&mut [segment], Wanted::Logits)?;
            sequence.accept(chunk.len());
        }
        Ok(())
    }
}
