//! The part of a model that the device computes: all of its program, or what the processor leaves of it.

use std::sync::Arc;

use lacuna_models::program::{Op, Split, Step};
use lacuna_models::{ExecutorError, Model};

/// A model, and where its program is cut, if it is.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) model: Arc<Model>,
    pub(crate) split: Option<Arc<Split>>,
}

impl Part {
    /// The part behind the first `host_layers` layers.
    ///
    /// # Errors
    /// [`ExecutorError::Split`] where the program cannot be cut there.
    pub(crate) fn behind(model: Arc<Model>, host_layers: usize) -> Result<Self, ExecutorError> {
        let split = match host_layers {
            0 => None,
            layer => {
                let split = model.program().split_before(layer);
                Some(Arc::new(split.ok_or(ExecutorError::Split { layer })?))
            }
        };
        Ok(Self { model, split })
    }

    /// Its steps, in order.
    pub(crate) fn steps(&self) -> &[Step] {
        let program = self.model.program();
        match &self.split {
            None => program.steps(),
            Some(split) => program.steps_behind(split),
        }
    }

    /// Their operations, in order.
    pub(crate) fn ops(&self) -> impl Iterator<Item = &Op> {
        let program = self.model.program();
        self.steps().iter().flat_map(|step| program.ops(step))
    }
}
