//! Activation memory of a forward pass: the arena of an [`ArenaPlan`], handed out slot by slot.
//!
//! Decoding allocates nothing: every slot's place is fixed by the plan.

use std::ops::Range;

use memmap2::MmapMut;

use crate::plan::{ALIGNMENT, ArenaPlan};
use crate::predictors::NeuronRecorder;
use crate::program::{MatrixId, Program, Slot, VectorId};
use crate::smoothing::KeyRecorder;
use crate::trace::TraceWriter;

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

impl BatchLimits {
    /// The same for one text of `tokens` tokens.
    #[must_use]
    pub fn of_one_text(self, tokens: usize) -> Self {
        Self {
            tokens,
            logit_rows: 1,
            ..self
        }
    }
}

/// Activation memory that could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes of activation memory cannot be had; use a smaller context or batch")]
pub struct OutOfMemory {
    /// Bytes the arena takes.
    pub bytes: usize,
}

/// Whether a forward pass looks for values that are infinite or no numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FiniteCheck {
    /// It does not: such values go through to the logits.
    #[default]
    Off,
    /// After the embedding, each decoder block and the logits. Reads each of them once more.
    EachLayer,
}

/// An arena of zeros, of which no page is resident yet. A mapping of its own and not the allocator's: that may keep
/// what is freed.
fn allocate(bytes: usize) -> Result<MmapMut, OutOfMemory> {
    // Pages are aligned more than slots are.
    const { assert!(ALIGNMENT <= 4096) };
    MmapMut::map_anon(bytes).map_err(|_| OutOfMemory { bytes })
}

/// Arena of activation buffers for batches up to its [`BatchLimits`].
#[derive(Debug)]
pub struct Scratch {
    plan: ArenaPlan,
    check: FiniteCheck,
    trace: Option<TraceWriter>,
    neurons: Option<NeuronRecorder>,
    keys: Option<KeyRecorder>,
    arena: MmapMut,
    /// Whether a pass has used it since it was allocated.
    used: bool,
}

impl Scratch {
    /// Allocates the arena of `plan`, which is verified in debug builds. Pages become resident as
    /// they are used.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the system refuses the address space.
    ///
    /// # Panics
    /// In debug builds, when the plan is not one for `program`.
    pub fn new(program: &Program, plan: ArenaPlan) -> Result<Self, OutOfMemory> {
        debug_assert_eq!(plan.verify(program), Ok(()), "the plan holds");
        let arena = allocate(plan.bytes())?;
        Ok(Self {
            plan,
            check: FiniteCheck::Off,
            trace: None,
            neurons: None,
            keys: None,
            arena,
            used: false,
        })
    }

    /// Whether pages of the arena may be resident.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.used
    }

    /// Gives the arena's pages back to the system, as far as that has address space for another arena; the next
    /// passes take pages again as they use them. No pass needs what an earlier one left there.
    pub fn give_back(&mut self) {
        // The new one before the old one goes: there is always one, and nothing that can fail is left for later.
        if let Ok(arena) = allocate(self.plan.bytes()) {
            self.arena = arena;
            self.used = false;
        }
    }

    /// The same, with passes that look for values that are not finite, or do not.
    #[must_use]
    pub fn checking(self, check: FiniteCheck) -> Self {
        Self { check, ..self }
    }

    /// From now on passes write down which experts tokens chose, to `trace`, or to none. Returns what it was before.
    pub fn record(&mut self, trace: Option<TraceWriter>) -> Option<TraceWriter> {
        std::mem::replace(&mut self.trace, trace)
    }

    pub(crate) fn trace(&mut self) -> Option<&mut TraceWriter> {
        self.trace.as_mut()
    }

    /// From now on passes write down which neurons are active, to `recorder`, or to none. Returns what it was before.
    pub fn record_neurons(&mut self, recorder: Option<NeuronRecorder>) -> Option<NeuronRecorder> {
        std::mem::replace(&mut self.neurons, recorder)
    }

    /// From now on passes note what keys and queries are like, in `recorder`, or in none. Returns what it was before.
    pub(crate) fn record_keys(&mut self, recorder: Option<KeyRecorder>) -> Option<KeyRecorder> {
        std::mem::replace(&mut self.keys, recorder)
    }

    /// Writes down what a norm has left in a slot, if that is to be known.
    pub(crate) fn record_input(&mut self, norm: VectorId, slot: Slot, elements: usize) {
        if let Some(mut recorder) = self.neurons.take() {
            if recorder.wants_input(norm) {
                let [x] = self.slots([slot]);
                recorder.input(norm, &bytemuck::cast_slice(x)[..elements]);
            }
            self.neurons = Some(recorder);
        }
    }

    /// Writes down which elements of a slot are not zero that a matrix is multiplied with, if that is to be known.
    pub(crate) fn record_active(&mut self, matrix: MatrixId, slot: Slot, elements: usize) {
        if let Some(mut recorder) = self.neurons.take() {
            if recorder.wants_active(matrix) {
                let [x] = self.slots([slot]);
                recorder.active(matrix, &bytemuck::cast_slice(x)[..elements]);
            }
            self.neurons = Some(recorder);
        }
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

    /// The first `elements` of a slot of rows, as the last operation that wrote them left them.
    ///
    /// # Panics
    /// For more than it holds.
    pub fn rows(&mut self, slot: Slot, elements: usize) -> &[f32] {
        let [rows] = self.slots([slot]);
        &bytemuck::cast_slice(rows)[..elements]
    }

    /// `slots` whole. What they hold is what the last operation that wrote them left there.
    ///
    /// # Panics
    /// When two slots share bytes, which those that are used together do not in a verified plan.
    pub(crate) fn slots<const N: usize>(&mut self, slots: [Slot; N]) -> [&mut [u8]; N] {
        self.ranges(slots.map(|slot| self.plan.placement(slot).range()))
    }

    /// Two slots, and as many others as there are, at most `N`; the rest is empty.
    ///
    /// # Panics
    /// As [`Scratch::slots`].
    pub(crate) fn slots_and<const N: usize>(
        &mut self,
        [a, b]: [Slot; 2],
        others: impl Iterator<Item = Slot>,
    ) -> ([&mut [u8]; 2], [&mut [u8]; N]) {
        // One array for all; arrays cannot be longer by two than another yet.
        const MOST: usize = 8;
        const { assert!(N + 2 <= MOST) };
        let mut ranges: [Range<usize>; MOST] = std::array::from_fn(|_| 0..0);
        let all = [a, b].into_iter().chain(others.take(N));
        for (range, slot) in ranges.iter_mut().zip(all) {
            *range = self.plan.placement(slot).range();
        }
        let mut found = self.ranges(ranges).into_iter();
        let mut next = || found.next().expect("as many as were asked for");
        ([next(), next()], std::array::from_fn(|_| next()))
    }

    fn ranges<const N: usize>(&mut self, ranges: [Range<usize>; N]) -> [&mut [u8]; N] {
        self.used = true;
        self.arena
            .get_disjoint_mut(ranges)
            .expect("slots that are used together are disjoint in a verified plan")
    }
}
