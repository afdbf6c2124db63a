//! Activation memory of a forward pass: the arena of an [`ArenaPlan`], handed out step by step.
//!
//! Decoding allocates nothing: every buffer's place is fixed by the plan.

use bytemuck::{Pod, Zeroable};

use crate::config::Config;
use crate::plan::{ALIGNMENT, ArenaPlan, Buffer, Step};

/// Largest batch one forward pass takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Tokens over all segments.
    pub tokens: usize,
    /// Rows of logits asked for at once.
    pub logit_rows: usize,
    /// Rows of the KV cache that attention may see.
    pub context_tokens: usize,
}

/// Activation memory that could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes of activation memory cannot be had; use a smaller context or batch")]
pub struct OutOfMemory {
    /// Bytes the arena takes.
    pub bytes: usize,
}

/// One cache line; gives the arena its alignment.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; ALIGNMENT]);

/// Whether a forward pass looks for values that are infinite or no numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FiniteCheck {
    /// It does not: such values go through to the logits.
    #[default]
    Off,
    /// After the embedding, each decoder block and the logits. Reads each of them once more.
    EachLayer,
}

/// Arena of activation buffers for batches up to its [`BatchLimits`].
#[derive(Debug)]
pub struct Scratch {
    plan: ArenaPlan,
    check: FiniteCheck,
    arena: Vec<Line>,
}

impl Scratch {
    /// Allocates the arena of `plan`, which is verified in debug builds. Pages become resident as
    /// they are used.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the system refuses the address space.
    ///
    /// # Panics
    /// In debug builds, when the plan is not one for `config`.
    pub fn new(config: &Config, plan: ArenaPlan) -> Result<Self, OutOfMemory> {
        debug_assert_eq!(plan.verify(config), Ok(()), "the plan holds");
        let bytes = plan.bytes();
        let arena = bytemuck::allocation::try_zeroed_vec(bytes / ALIGNMENT);
        let arena = arena.map_err(|()| OutOfMemory { bytes })?;
        Ok(Self {
            plan,
            check: FiniteCheck::Off,
            arena,
        })
    }

    /// The same, with passes that look for values that are not finite, or do not.
    #[must_use]
    pub fn checking(self, check: FiniteCheck) -> Self {
        Self { check, ..self }
    }

    pub(crate) fn check(&self) -> FiniteCheck {
        self.check
    }

    /// Where each buffer lies.
    #[must_use]
    pub fn plan(&self) -> &ArenaPlan {
        &self.plan
    }

    /// Largest batch this arena holds.
    #[must_use]
    pub fn limits(&self) -> BatchLimits {
        self.plan.limits()
    }

    /// `buffers` whole, for as long as `step` takes. What they hold is what the last step of their
    /// lifetime before this one left there.
    ///
    /// # Panics
    /// When a buffer's lifetime does not contain `step`, or one is asked for twice.
    pub(crate) fn at<const N: usize>(
        &mut self,
        step: Step,
        buffers: [Buffer; N],
    ) -> [&mut [u8]; N] {
        let ranges = buffers.map(|buffer| {
            let place = self.plan.placement(buffer);
            assert!(
                place.lifetime.contains(step),
                "{} holds nothing during `{}`",
                buffer.name(),
                step.name()
            );
            place.range()
        });
        let arena: &mut [u8] = bytemuck::cast_slice_mut(&mut self.arena);
        arena
            .get_disjoint_mut(ranges)
            .expect("buffers that live at the same time are disjoint in a verified plan")
    }
}
