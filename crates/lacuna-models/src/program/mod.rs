//! The forward pass as data: operations over named slots, generated from a [`ModelSpec`].
//!
//! A [`Program`] is what the memory plan is made from, what an executor runs, and what says which
//! tensors a file must have. Nothing of it is written down twice: what lives when is read off the
//! operations, and each layer's part is emitted by one function in `layers/`.
//!
//! ```text
//! step      layer  operations
//! embed     -      hidden = rows of token_embd
//! rotations -      table of cosines and sines
//! project   0      norm; products that make queries, keys and values
//! rotate    0      norms of heads; rotation
//! attend    0      rows are stored; attention
//! ...
//! logits    -      norm; output product
//! ```

mod builder;
mod lifetime;
mod neurons;
mod op;
mod slot;
mod split;
mod tensors;

use std::ops::Range;

use lacuna_kernels::Routing;

use crate::layers;
use crate::spec::{HeadSpec, LogitsSpec, ModelSpec, OutputSpec};

pub(crate) use builder::Builder;
pub use lifetime::{Lifetime, Span};
pub(crate) use neurons::{GatedNeurons, sparse_matrices};
pub use op::{Access, Factor, Lookup, Merging, Op, Places};
pub use slot::{Contents, Element, Rows, Shape, Slot, SlotSpec};
pub use split::Split;
pub use tensors::{
    Bias, ExpertsId, ExpertsSpec, MatrixId, MatrixSpec, TensorName, TensorSpec, VectorForm,
    VectorId, VectorSpec,
};

/// The operations of one forward pass, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    ops: Vec<Op>,
    steps: Vec<Step>,
    slots: Vec<SlotSpec>,
    tensors: Vec<TensorSpec>,
    /// The operations of each layer with a state that change it, with [`Op::StateInputs`] first.
    rewinds: Vec<Range<usize>>,
    output: Slot,
    features: Option<Slot>,
    head: Option<Box<Program>>,
}

/// Operations that belong together: what one of them uses is held for all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The name in reports.
    pub name: &'static str,
    /// The decoder layer it is part of.
    pub layer: Option<usize>,
    ops: Range<usize>,
}

impl Program {
    /// The forward pass of a model.
    ///
    /// # Panics
    /// For a spec that was not validated.
    #[must_use]
    pub fn new(spec: &ModelSpec) -> Self {
        let mut program = Builder::new();
        let (output, features) = layers::emit(spec, &mut program);
        let program = program.finish(output, features);
        match (&spec.head, spec.output) {
            (Some(head), OutputSpec::Logits(output)) => program.with_head(spec, head, output),
            _ => program,
        }
    }

    /// The same with the pass of the head, whose tensors come after all others.
    fn with_head(self, spec: &ModelSpec, head: &HeadSpec, output: LogitsSpec) -> Self {
        let mut program = Builder::over(self.tensors);
        let [logits, features] = layers::emit_head(spec, head, output, &mut program);
        let head = program.finish(logits, Some(features));
        Self {
            tensors: head.tensors.clone(),
            head: Some(Box::new(head)),
            ..self
        }
    }

    /// The pass of the head that guesses tokens, if there is one: over the same tensors, with slots of its own.
    #[must_use]
    pub fn head(&self) -> Option<&Self> {
        self.head.as_deref()
    }

    /// Where what a head takes is left, where there is one: of a model, rows of all tokens, and of the head itself, of those
    /// that it has logits of. Elements as the residual stream has them.
    #[must_use]
    pub fn features(&self) -> Option<Slot> {
        self.features
    }

    /// Its steps, in order.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The operations of a step, in order.
    #[must_use]
    pub fn ops(&self, step: &Step) -> &[Op] {
        &self.ops[step.ops.clone()]
    }

    /// The operations that change states, by [`Op::StateInputs`] alone: what computes them once more for fewer tokens. Slots
    /// hold what they hold in the whole program, so its plan is theirs, too.
    pub fn state_ops(&self) -> impl Iterator<Item = &Op> {
        self.rewinds.iter().flat_map(|ops| &self.ops[ops.clone()])
    }

    /// Every slot; a [`Slot`] is its number here.
    #[must_use]
    pub fn slots(&self) -> &[SlotSpec] {
        &self.slots
    }

    /// The tensors it computes with, in the order in which they are first used.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Where its output is left: logits, `[logit rows, vocabulary]`, or a row for each text.
    #[must_use]
    pub fn output(&self) -> Slot {
        self.output
    }

    /// The slots a step uses, and whether it needs what they held before it.
    pub(crate) fn uses(&self, step: &Step) -> Vec<(Slot, Access)> {
        let mut found: Vec<(Slot, Access)> = Vec::new();
        for op in self.ops(step) {
            for (slot, access) in op.uses() {
                // What comes first decides: later reads are of what this step wrote.
                if found.iter().all(|(known, _)| *known != slot) {
                    found.push((slot, access));
                }
            }
        }
        found
    }

    /// Multiplications with weights that one token takes in all layers, and those of one row of logits.
    #[must_use]
    pub fn products(&self) -> (u64, u64) {
        let of = |wanted: Rows| {
            let tensors = self.multiplied().filter(|(rows, _)| *rows == wanted);
            let sizes = tensors.map(|(_, tensor)| match self.tensors[tensor] {
                TensorSpec::Experts(experts) => experts.active_elements() as u64,
                other => other.elements() as u64,
            });
            sizes.sum()
        };
        (of(Rows::Tokens), of(Rows::Logits))
    }

    /// How layers that have experts choose them, in order.
    pub fn routings(&self) -> impl Iterator<Item = &Routing> {
        self.ops.iter().filter_map(|op| match op {
            Op::Route { routing, .. } => Some(routing),
            _ => None,
        })
    }

    /// The matrices that it multiplies with or looks up in, one after another; those of experts are others.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = MatrixId> {
        self.ops.iter().flat_map(|op| match op {
            Op::Embed { table, .. } => vec![*table],
            Op::Product { outputs, .. } => outputs.iter().map(|(matrix, _)| *matrix).collect(),
            _ => Vec::new(),
        })
    }

    /// The tensors that rows are multiplied with, by their numbers, and what those are rows of. Others
    /// are looked up in, row by row.
    pub(crate) fn multiplied(&self) -> impl Iterator<Item = (Rows, usize)> {
        self.ops.iter().flat_map(|op| match op {
            Op::Product { rows, outputs, .. } => {
                let matrices = outputs.iter().map(|(matrix, _)| (*rows, matrix.0));
                matrices.collect()
            }
            Op::ExpertProduct { outputs, .. } => {
                let experts = outputs.iter().map(|(experts, _)| (Rows::Tokens, experts.0));
                experts.collect()
            }
            _ => Vec::new(),
        })
    }
}
