//! Puts a program together, step by step.

use std::ops::Range;

use lacuna_kernels::{Activation, AttentionShape, ExpertInput, HeadRows, Routing};

use super::op::Op;
use super::slot::{Contents, Rows, Slot, SlotSpec};
use super::tensors::{
    Bias, ExpertsId, ExpertsSpec, MatrixId, MatrixSpec, TensorName, TensorSpec, VectorForm,
    VectorId, VectorSpec,
};
use super::{Program, Step};

/// A program under construction.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    ops: Vec<Op>,
    steps: Vec<Step>,
    slots: Vec<SlotSpec>,
    tensors: Vec<TensorSpec>,
    layer: Option<usize>,
    rewinds: Vec<Range<usize>>,
}

impl Builder {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// One whose tensors come after `tensors`, which it may use as well.
    pub(crate) fn over(tensors: Vec<TensorSpec>) -> Self {
        Self {
            tensors,
            ..Self::default()
        }
    }

    /// What follows belongs to this decoder layer, or to none.
    pub(crate) fn enter(&mut self, layer: Option<usize>) {
        self.layer = layer;
    }

    /// What follows is a new step.
    pub(crate) fn step(&mut self, name: &'static str) {
        let end = self.ops.len();
        self.steps.push(Step {
            name,
            layer: self.layer,
            ops: end..end,
        });
    }

    /// The next operation of the step begun last.
    pub(crate) fn push(&mut self, op: Op) {
        self.ops.push(op);
        let step = self.steps.last_mut().expect("a step was begun");
        step.ops.end = self.ops.len();
    }

    /// What comes next changes the state of `layer`, by the `values` of tokens and nothing else, up to
    /// [`Builder::end_state`].
    pub(crate) fn begin_state(&mut self, layer: usize, values: Vec<(Slot, usize)>) {
        let start = self.ops.len();
        self.rewinds.push(start..start);
        self.push(Op::StateInputs { layer, values });
    }

    /// The state is what it is after the tokens.
    pub(crate) fn end_state(&mut self) {
        let rewind = self.rewinds.last_mut().expect("a state was begun");
        rewind.end = self.ops.len();
    }

    /// The matrix `part` of the current layer, or of the model outside of layers.
    pub(crate) fn matrix(
        &mut self,
        part: &'static str,
        rows: usize,
        columns: usize,
        bias: Bias,
    ) -> MatrixId {
        MatrixId(self.tensor(TensorSpec::Matrix(MatrixSpec {
            name: self.name(part),
            rows,
            columns,
            bias,
        })))
    }

    /// The matrices `part` of the current layer's experts.
    pub(crate) fn expert_matrices(
        &mut self,
        part: &'static str,
        routing: &Routing,
        [rows, columns]: [usize; 2],
        bias: Bias,
    ) -> ExpertsId {
        ExpertsId(self.tensor(TensorSpec::Experts(ExpertsSpec {
            name: self.name(part),
            experts: routing.experts,
            used: routing.used,
            rows,
            columns,
            bias,
        })))
    }

    /// The vector `part` of the current layer, or of the model outside of layers.
    pub(crate) fn vector(&mut self, part: &'static str, width: usize) -> VectorId {
        self.vector_called(part, "weight", width)
    }

    /// The same of a name that ends otherwise than most.
    pub(crate) fn vector_called(
        &mut self,
        part: &'static str,
        suffix: &'static str,
        width: usize,
    ) -> VectorId {
        self.vector_in((part, suffix), width, VectorForm::Plain)
    }

    /// The same of one that files have in a form of its own.
    pub(crate) fn vector_in(
        &mut self,
        (part, suffix): (&'static str, &'static str),
        width: usize,
        form: VectorForm,
    ) -> VectorId {
        VectorId(self.tensor(TensorSpec::Vector(VectorSpec {
            name: self.name(part),
            suffix,
            width,
            form,
        })))
    }

    /// The bias of a vector of weights, which has its name and its size.
    ///
    /// # Panics
    /// For something other than a vector.
    pub(crate) fn bias_of(&mut self, weight: VectorId) -> VectorId {
        let TensorSpec::Vector(weight) = self.tensors[weight.0] else {
            unreachable!("a vector's number")
        };
        let suffix = "bias";
        VectorId(self.tensor(TensorSpec::Vector(VectorSpec { suffix, ..weight })))
    }

    /// Elements of a product with a matrix.
    ///
    /// # Panics
    /// For something other than a matrix.
    pub(crate) fn rows_of(&self, MatrixId(matrix): MatrixId) -> usize {
        let TensorSpec::Matrix(MatrixSpec { rows, .. }) = self.tensors[matrix] else {
            unreachable!("a matrix's number")
        };
        rows
    }

    /// Two of the bounds that files have beside a matrix, the least and the most: `suffixes` are how their names end.
    ///
    /// # Panics
    /// For something other than a matrix.
    pub(crate) fn bounds_of(
        &mut self,
        MatrixId(matrix): MatrixId,
        suffixes: [&'static str; 2],
    ) -> [VectorId; 2] {
        let TensorSpec::Matrix(MatrixSpec { name, .. }) = self.tensors[matrix] else {
            unreachable!("a matrix's number")
        };
        suffixes.map(|suffix| {
            VectorId(self.tensor(TensorSpec::Vector(VectorSpec {
                name,
                suffix,
                width: 1,
                form: VectorForm::Plain,
            })))
        })
    }

    fn name(&self, part: &'static str) -> TensorName {
        TensorName {
            layer: self.layer,
            part,
        }
    }

    fn tensor(&mut self, tensor: TensorSpec) -> usize {
        // What is used more than once is outside of layers, as an embedding table that is the output
        // matrix too, or in one layer, whose tensors lie together at the end.
        let others = |known: &TensorSpec| known.name().layer != tensor.name().layer;
        let start = match tensor.name().layer {
            None => 0,
            Some(_) => self
                .tensors
                .iter()
                .rposition(others)
                .map_or(0, |last| last + 1),
        };
        let mut known = self.tensors[start..].iter();
        match known.position(|known| *known == tensor) {
            Some(known) => start + known,
            None => {
                self.tensors.push(tensor);
                self.tensors.len() - 1
            }
        }
    }

    /// The slot of this name, made wide enough for rows of `width`.
    pub(crate) fn values(&mut self, name: &'static str, rows: Rows, width: usize) -> Slot {
        let slot = self.slot(name, Contents::Values { rows, width });
        let Contents::Values {
            rows: known,
            width: widest,
        } = &mut self.slots[slot.0].contents
        else {
            unreachable!("{name} holds something else")
        };
        assert_eq!(*known, rows, "{name} has other rows");
        *widest = width.max(*widest);
        slot
    }

    /// The slot of this name for rows of `width` prepared for products.
    pub(crate) fn quantized(&mut self, name: &'static str, rows: Rows, width: usize) -> Slot {
        let widths = Vec::new();
        let slot = self.slot(name, Contents::Quantized { rows, widths });
        let Contents::Quantized {
            rows: known,
            widths,
        } = &mut self.slots[slot.0].contents
        else {
            unreachable!("{name} holds something else")
        };
        assert_eq!(*known, rows, "{name} has other rows");
        if !widths.contains(&width) {
            widths.push(width);
        }
        slot
    }

    /// The slot of which experts tokens have.
    pub(crate) fn routes(&mut self, routing: Routing) -> Slot {
        let slot = self.slot("routes", Contents::Routes(Vec::new()));
        let Contents::Routes(known) = &mut self.slots[slot.0].contents else {
            unreachable!("it is always that")
        };
        if !known.contains(&routing) {
            known.push(routing);
        }
        slot
    }

    /// The slot of this name for rows of `width` prepared for products with `used` experts of each token.
    fn expert_blocks(&mut self, name: &'static str, used: usize, width: usize) -> Slot {
        let slot = self.slot(name, Contents::ExpertBlocks(Vec::new()));
        let Contents::ExpertBlocks(known) = &mut self.slots[slot.0].contents else {
            unreachable!("it is always that")
        };
        if !known.contains(&(used, width)) {
            known.push((used, width));
        }
        slot
    }

    /// The slot of the tokens' positions, of so many numbers each.
    pub(crate) fn positions(&mut self, axes: usize) -> Slot {
        let slot = self.slot("positions", Contents::Positions { axes });
        let contents = &self.slots[slot.0].contents;
        assert_eq!(*contents, Contents::Positions { axes }, "of one kind");
        slot
    }

    /// The slot for partial results of attention of `shape`.
    pub(crate) fn attention_states(&mut self, shape: AttentionShape) -> Slot {
        let slot = self.slot("attention-states", Contents::AttentionStates(Vec::new()));
        let Contents::AttentionStates(shapes) = &mut self.slots[slot.0].contents else {
            unreachable!("it is always that")
        };
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
        slot
    }

    fn slot(&mut self, name: &'static str, contents: Contents) -> Slot {
        let known = self.slots.iter().position(|slot| slot.name == name);
        Slot(known.unwrap_or_else(|| {
            self.slots.push(SlotSpec { name, contents });
            self.slots.len() - 1
        }))
    }

    /// `output = W input` for each of `outputs`.
    pub(crate) fn product(
        &mut self,
        input: Slot,
        blocks: &'static str,
        rows: Rows,
        columns: usize,
        outputs: Vec<(MatrixId, Slot)>,
    ) {
        self.product_then(None, input, blocks, (rows, columns), outputs);
    }

    /// `output = f(W input)` for each of `outputs`.
    pub(crate) fn product_then(
        &mut self,
        function: Option<Activation>,
        input: Slot,
        blocks: &'static str,
        (rows, columns): (Rows, usize),
        outputs: Vec<(MatrixId, Slot)>,
    ) {
        let blocks = self.quantized(blocks, rows, columns);
        self.push(Op::Product {
            input,
            blocks,
            rows,
            columns,
            outputs,
            function,
        });
    }

    /// `output = W input` for each of `outputs`, by the experts that `routes` says.
    pub(crate) fn expert_product(
        &mut self,
        routing: &Routing,
        routes: Slot,
        (input, from, columns): (Slot, ExpertInput, usize),
        blocks: &'static str,
        outputs: Vec<(ExpertsId, Slot)>,
    ) {
        let blocks = self.expert_blocks(blocks, routing.used, columns);
        self.push(Op::ExpertProduct {
            routing: *routing,
            routes,
            input,
            from,
            blocks,
            columns,
            outputs,
        });
    }

    /// Takes rows apart: copies the first columns of `from` to the first of `parts`, and so on.
    pub(crate) fn apart(&mut self, from: Slot, width: usize, parts: &[(Slot, usize)]) {
        let mut start = 0;
        for &(part, columns) in parts {
            let from = (from, HeadRows::by_token(width, start));
            self.columns(from, (part, HeadRows::by_token(columns, 0)), 1, columns);
            start += columns;
        }
    }

    /// Copies columns of heads; the other columns of `to` are of no use before or after.
    pub(crate) fn columns(
        &mut self,
        from: (Slot, HeadRows),
        to: (Slot, HeadRows),
        heads: usize,
        columns: usize,
    ) {
        self.push(Op::Columns {
            from,
            to,
            beside: false,
            heads,
            columns,
        });
    }

    /// The same to rows whose other columns are there already.
    pub(crate) fn columns_beside(
        &mut self,
        from: (Slot, HeadRows),
        to: (Slot, HeadRows),
        heads: usize,
        columns: usize,
    ) {
        self.push(Op::Columns {
            from,
            to,
            beside: true,
            heads,
            columns,
        });
    }

    pub(crate) fn finish(self, output: Slot, features: Option<Slot>) -> Program {
        Program {
            ops: self.ops,
            steps: self.steps,
            slots: self.slots,
            tensors: self.tensors,
            rewinds: self.rewinds,
            output,
            features,
            head: None,
        }
    }
}
