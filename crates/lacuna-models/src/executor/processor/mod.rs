//! The processor as an executor: each operation by the kernels, on slots of an arena.
//!
//! Weights stay in the mapped file or in memory, or are lent by a [`Stream`], and activations in a [`Scratch`] arena; the
//! KV cache is passed in with each [`super::Segment`], never kept here. Segments of different sequences, or texts, are laid end to end
//! without padding, and one token's result does not depend on what else is in the batch.

mod attention;
mod experts;
mod images;
mod inputs;
mod neurons;
mod norms;
mod outputs;
mod products;
mod rows;
mod sequences;
mod states;

use std::sync::MutexGuard;

use bytemuck::{AnyBitPattern, NoUninit};
use lacuna_kernels::{Cpu, SharedRows};
use lacuna_kv::Layer;

use self::states::Inputs;
use super::{Batch, BatchSize};
use crate::error::ForwardError;
use crate::program::{Op, Program, Rows, Slot, Step};
use crate::scratch::Scratch;
use crate::spec::ImageAttention;
use crate::weights::{Stream, Weights};

/// One forward pass under way.
pub(crate) struct Pass<'a, 'b> {
    pub(crate) weights: &'a Weights,
    pub(crate) cpu: &'a Cpu,
    pub(crate) size: BatchSize,
    pub(crate) batch: Batch<'a, 'b>,
    pub(crate) scratch: &'a mut Scratch,
    /// The matrices that files are read for.
    pub(crate) stream: Option<MutexGuard<'a, Stream>>,
    /// Which segments begin with rows in the same memory, and how many in the last layer that was looked at; found with
    /// the first layer whose tokens see all rows.
    pub(crate) shared: Option<Vec<SharedRows>>,
    /// How tokens of an image see one another.
    pub(crate) image_attention: ImageAttention,
    /// What a head is given of the tokens before those of the batch, `[tokens, hidden]`; of other passes nothing.
    pub(crate) features: &'a [f32],
}

impl Pass<'_, '_> {
    /// Runs all of `program`.
    ///
    /// # Errors
    /// [`ForwardError::NotFinite`], if that is looked for, and [`ForwardError::Weights`] for weights that are read
    /// while they are needed and cannot be.
    pub(crate) fn run(&mut self, program: &Program) -> Result<(), ForwardError> {
        self.run_steps(program, program.steps())
    }

    /// Runs some steps of `program`; those before them have been run.
    ///
    /// # Errors
    /// As [`Pass::run`].
    pub(crate) fn run_steps(
        &mut self,
        program: &Program,
        steps: &[Step],
    ) -> Result<(), ForwardError> {
        if let Some(trace) = self.scratch.trace() {
            trace.begin_pass();
        }
        for step in steps {
            let mut ops = program.ops(step);
            while let [op, rest @ ..] = ops {
                ops = match self.gated_neurons(ops)? {
                    0 => {
                        self.op(op)?;
                        rest
                    }
                    done => &ops[done..],
                };
            }
        }
        Ok(())
    }

    /// Computes the states of layers once more, of tokens whose inputs sequences have kept, into the same slots.
    pub(crate) fn run_states(&mut self, program: &Program) -> Result<(), ForwardError> {
        for op in program.state_ops() {
            match op {
                Op::StateInputs { layer, values } => {
                    self.state_inputs(Layer(*layer), values, Inputs::Read);
                }
                op => self.op(op)?,
            }
        }
        Ok(())
    }

    /// Runs one operation; those before it have been run.
    ///
    /// # Errors
    /// As [`Pass::run`].
    pub(crate) fn op(&mut self, op: &Op) -> Result<(), ForwardError> {
        match op {
            Op::Embed { .. }
            | Op::TakeFeatures { .. }
            | Op::Positions { .. }
            | Op::Rotations { .. } => return self.input_op(op),
            Op::Route { .. }
            | Op::RouteToAll { .. }
            | Op::ExpertProduct { .. }
            | Op::CombineExperts { .. } => return self.expert_op(op),
            Op::Choose { .. } | Op::Pool { .. } | Op::Normalize { .. } | Op::CheckFinite { .. } => {
                return self.output_op(op);
            }
            Op::Product {
                input,
                blocks,
                rows,
                columns,
                outputs,
                function,
            } => return self.products([*input, *blocks], (*rows, *columns), outputs, *function),
            Op::Patches { .. }
            | Op::PlaceImages { .. }
            | Op::AddImages { .. }
            | Op::AddPlaces { .. }
            | Op::MergePatches { .. }
            | Op::OrderSquares { .. } => self.image_op(op),
            Op::Norm { .. } | Op::BiasedNorm { .. } => self.norm_op(op),
            Op::Rotate { .. }
            | Op::Temperature { .. }
            | Op::Store { .. }
            | Op::Attend { .. }
            | Op::AttendWithin { .. } => self.attention_op(op),
            Op::StateInputs { .. }
            | Op::Convolve { .. }
            | Op::TimeSteps { .. }
            | Op::Decay { .. }
            | Op::Scan { .. } => self.state_op(op),
            Op::Activate { .. }
            | Op::ScalePart { .. }
            | Op::Clamp { .. }
            | Op::Standardize { .. }
            | Op::Multiply { .. }
            | Op::Apply { .. }
            | Op::KeepOutliers { .. }
            | Op::Add { .. }
            | Op::AddScaledRows { .. }
            | Op::MatchMagnitude { .. }
            | Op::Scale { .. }
            | Op::ScaleHeads { .. }
            | Op::SoftCap { .. }
            | Op::Columns { .. } => self.row_op(op),
            Op::Return { .. } => {}
        }
        Ok(())
    }

    fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.size.tokens,
            Rows::Logits => self.size.logit_rows,
        }
    }

    /// A slot's rows.
    fn values(&mut self, slot: Slot, rows: Rows, width: usize) -> &mut [f32] {
        let elements = self.rows(rows) * width;
        let [values] = self.scratch.slots([slot]);
        first(values, elements)
    }

    /// Two slots of rows of the same width.
    fn pair(&mut self, a: Slot, b: Slot, rows: Rows, width: usize) -> (&mut [f32], &mut [f32]) {
        let elements = self.rows(rows) * width;
        let [a, b] = self.scratch.slots([a, b]);
        (first(a, elements), first(b, elements))
    }
}

/// What `Model` sees to: a program that keeps rows is run with sequences to keep them.
const KEEPS: &str = "a pass that keeps rows is one over sequences";

/// What `ImageEncoder` sees to: a program that reads patches is run with an image.
const OF_PATCHES: &str = "a pass over patches is one over an image";

/// What [`Pass::op`] sees to: it gives each module its own operations.
const OF_ANOTHER_KIND: &str = "an operation that another module does";

/// Of positions, which are 32 bits wide.
pub(super) const LONGEST: &str = "a context is shorter than 2^32 tokens";

/// The first `count` elements of a slot, which may be made for a larger batch.
fn first<T: AnyBitPattern + NoUninit>(slot: &mut [u8], count: usize) -> &mut [T] {
    &mut bytemuck::cast_slice_mut(slot)[..count]
}
