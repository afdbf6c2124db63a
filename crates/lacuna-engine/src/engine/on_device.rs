//! A model on a device that computes in place of the processor, and what becomes of it when the device is lost.

use std::sync::Arc;

use lacuna_kernels::Cpu;
use lacuna_kv::{KvCache, KvPolicy};
use lacuna_models::{
    ComputeDevice, Executor, ExecutorMemory, ForwardError, Model, Outputs, Scratch, Segment,
};
use lacuna_pages::{ByteLength, DeviceError};

use super::Engine;
use crate::error::EngineError;
use crate::runner::{Rows, Wanted};

/// A model on a device.
pub(super) struct OnDevice {
    pub(super) device: Arc<dyn ComputeDevice>,
    /// None while the device is opened again.
    pub(super) executor: Option<Box<dyn Executor>>,
    /// Whose sequences it computes, and how these are held.
    pub(super) cache: KvCache,
    pub(super) policy: KvPolicy,
    /// Whether a pass has found that it is gone.
    pub(super) is_lost: bool,
}

impl OnDevice {
    /// A pass of `segments`, whose rows have to be on this device and not on one that was lost before.
    fn pass(
        &mut self,
        (cpu, width): (&Cpu, usize),
        segments: &mut [Segment<'_>],
        wanted: Wanted,
    ) -> Result<Rows<'_>, ForwardError> {
        let mut sequences = segments.iter().map(|segment| &*segment.sequence);
        let here = sequences.all(|sequence| self.cache.owns(sequence));
        let Some(executor) = self.executor.as_mut().filter(|_| here) else {
            return Err(DeviceError::Lost.into());
        };
        let most = executor.most_top_k();
        let rows = match wanted.or_logits(wanted > Wanted::TopK(most)) {
            Wanted::Logits => executor
                .forward(cpu, segments)
                .map(|logits| Rows::Logits(logits, width)),
            Wanted::Likeliest => executor.likeliest(cpu, segments).map(Rows::Likeliest),
            Wanted::TopK(count) => executor
                .top_k(cpu, segments, count)
                .map(|tokens| Rows::TopK(tokens, count)),
        };
        self.is_lost |= matches!(rows, Err(ForwardError::Device(DeviceError::Lost)));
        rows
    }

    /// Where its bytes are, KV rows aside.
    pub(super) fn memory(&self) -> ExecutorMemory {
        let executor = self.executor.as_ref();
        executor.map_or(ExecutorMemory::default(), |executor| executor.memory())
    }

    /// Whether it is gone, as a pass or a change of pages has found.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost || self.executor.is_none() || self.cache.pool().is_lost()
    }
}

/// A pass of `segments`, on the device if there is one, which leaves nothing for a head and finds tokens itself
/// where these are all that is wanted.
/// Returns rows, and features.
pub(super) fn pass<'a>(
    model: &Model,
    cpu: &Cpu,
    (executor, scratch): (&'a mut Option<OnDevice>, &'a mut Scratch),
    segments: &mut [Segment<'_>],
    wanted: Wanted,
) -> Result<(Rows<'a>, &'a [f32]), ForwardError> {
    let width = model.spec().vocabulary;
    match executor {
        None => {
            let Outputs { logits, features } =
                model.forward_with_features(cpu, segments, scratch)?;
            Ok((Rows::Logits(logits, width), features))
        }
        Some(on) => Ok((on.pass((cpu, width), segments, wanted)?, &[])),
    }
}

impl Engine {
    /// Whether the device that computes is gone. Sessions with rows on it fail from then on.
    #[must_use]
    pub fn has_lost_device(&self) -> bool {
        self.executor.as_ref().is_some_and(OnDevice::is_lost)
    }

    /// Opens the device again that computes and was lost, with an empty KV cache. What its memory held goes with the last
    /// session that has rows there. Nothing is computed before [`Engine::reload_on_device`].
    ///
    /// # Errors
    /// [`EngineError::Executor`] where it cannot be opened.
    pub(crate) fn reopen_device(&mut self) -> Result<(), EngineError> {
        let Some(on) = &mut self.executor else {
            return Ok(());
        };
        // Before the device is opened again, which may have no room for two.
        on.executor = None;
        let device = on.device.reopened()?;
        let cache = device.kv_cache(self.cache.geometry().clone(), on.policy)?;
        cache.set_limit(ByteLength::new(self.kv_limit))?;
        (on.device, on.cache) = (device, cache.clone());
        self.cache = cache;
        self.system = Box::new(self.host());
        Ok(())
    }

    /// Brings the model to the device that was opened again.
    ///
    /// # Errors
    /// [`EngineError::Executor`] where it does not take it.
    pub(crate) fn reload_on_device(&mut self) -> Result<(), EngineError> {
        if let Some(on) = &mut self.executor {
            let model = Arc::clone(&self.model);
            let made = on
                .device
                .executor(model, on.cache.geometry(), &self.plan.arena)?;
            (on.executor, on.is_lost) = (Some(made), false);
        }
        Ok(())
    }
}
