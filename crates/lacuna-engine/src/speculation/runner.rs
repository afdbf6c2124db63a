//! What guesses at work: passes over sequences of its own in the pool of the model that it guesses for.

use std::sync::Arc;

use lacuna_kernels::Cpu;
use lacuna_kv::KvCache;
use lacuna_models::{BatchLimits, Model, Scratch, Segment};
use lacuna_text::tokenizer::Tokenizer;

use crate::error::EngineError;
use crate::runner::{ModelRunner, Pass, Rows};

/// A draft model, or the head of the model itself.
pub(super) struct Runner {
    pub(super) model: Arc<Model>,
    /// Whether it is the model's head that runs, which is given features and keeps rows alone.
    pub(super) is_head: bool,
    pub(super) cpu: Arc<Cpu>,
    pub(super) scratch: Scratch,
    pub(super) cache: KvCache,
    pub(super) context_tokens: usize,
}

impl ModelRunner for Runner {
    fn forward(&mut self, segments: &mut [Segment<'_>]) -> Result<Pass<'_>, EngineError> {
        self.forward_with(segments, &[])
    }

    fn forward_with(
        &mut self,
        segments: &mut [Segment<'_>],
        features: &[f32],
    ) -> Result<Pass<'_>, EngineError> {
        let Self { model, cpu, .. } = self;
        let (logits, width, features) = match self.is_head {
            true => {
                let outputs = model.guess(cpu, segments, features, &mut self.scratch)?;
                let width = model.spec().head_outputs();
                (outputs.logits, width, outputs.features)
            }
            false => (
                model.forward(cpu, segments, &mut self.scratch)?,
                model.spec().vocabulary,
                [].as_slice(),
            ),
        };
        Ok(Pass {
            rows: Rows::Logits(logits, width),
            features,
            tokenizer: model.tokenizer(),
        })
    }

    fn features_width(&self) -> Option<usize> {
        self.is_head.then(|| self.model.spec().hidden)
    }

    fn borrows_rows(&self) -> bool {
        self.is_head && self.model.borrows_rows()
    }

    fn token_at(&self, place: u32) -> u32 {
        match self.is_head {
            true => self.model.head_token(place),
            false => place,
        }
    }

    fn rewind(&mut self, segments: &mut [Segment<'_>]) -> Result<(), EngineError> {
        match self.is_head {
            true => Ok(()),
            false => Ok(self.model.rewind(&self.cpu, segments, &mut self.scratch)?),
        }
    }

    fn holds_activations(&self) -> bool {
        self.scratch.is_used()
    }

    fn give_back_activations(&mut self) {
        self.scratch.give_back();
    }

    fn batch_limits(&self) -> BatchLimits {
        self.scratch.limits()
    }

    fn kv_cache(&self) -> &KvCache {
        &self.cache
    }

    fn context_tokens(&self) -> usize {
        self.context_tokens
    }

    fn vocabulary(&self) -> usize {
        self.model.spec().vocabulary
    }

    fn tokenizer(&self) -> &Tokenizer {
        self.model.tokenizer()
    }
}
