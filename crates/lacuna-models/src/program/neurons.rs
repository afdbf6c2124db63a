//! Feed-forward blocks most of whose activations are exactly zero, as programs have them: what of their matrices belongs to
//! a neuron is a column of `down`, and where there are gates a row of `up`.

use std::collections::{HashMap, HashSet};

use super::Program;
use super::op::Op;
use super::slot::{Rows, Slot};
use super::tensors::MatrixId;
use crate::spec::Gating;

/// Operations side by side that multiply with the neurons of a block whose gates are known:
/// `output = down (gate * up input)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GatedNeurons {
    /// Rows that `up` is multiplied with, and where they are quantized to.
    pub(crate) input: [Slot; 2],
    /// Elements of such a row.
    pub(crate) columns: usize,
    /// What is multiplied with the gates, and where its products go.
    pub(crate) up: (MatrixId, Slot),
    /// The gates, which become activations.
    pub(crate) gate: Slot,
    /// How many a token has.
    pub(crate) inner: usize,
    /// What is multiplied with these, and where its products go.
    pub(crate) down: (MatrixId, Slot),
}

impl GatedNeurons {
    /// How many operations they are.
    pub(crate) const OPS: usize = 3;

    /// Those that `ops` begin with; `None` for others.
    pub(crate) fn first_of(ops: &[Op]) -> Option<Self> {
        let [
            Op::Product {
                input,
                blocks,
                rows: Rows::Tokens,
                columns,
                outputs: ups,
                function: None,
            },
            Op::Multiply { to, by, width },
            Op::Product {
                input: activations,
                rows: Rows::Tokens,
                columns: inner,
                outputs: downs,
                function: None,
                ..
            },
            ..,
        ] = ops
        else {
            return None;
        };
        let (&[up], &[down]) = (&ups[..], &downs[..]) else {
            return None;
        };
        let gates = (up.1, *to, *width) == (*by, *activations, *inner);
        gates.then_some(Self {
            input: [*input, *blocks],
            columns: *columns,
            up,
            gate: *to,
            inner: *inner,
            down,
        })
    }
}

/// The matrices of `program` that are multiplied with what a function has left that is exactly zero for much of what it
/// is given; with each, where gates are all that decides, what is multiplied with these.
pub(crate) fn sparse_matrices(program: &Program) -> HashMap<MatrixId, Option<MatrixId>> {
    // Slots that hold such, from the operation that left it there to the next that fills them.
    let mut sparse: HashSet<Slot> = HashSet::new();
    let mut found = HashMap::new();
    for step in program.steps() {
        let ops = program.ops(step);
        for (at, op) in ops.iter().enumerate() {
            if let Some(block) = GatedNeurons::first_of(&ops[at..])
                && sparse.contains(&block.gate)
            {
                found.insert(block.down.0, Some(block.up.0));
            }
            follow(op, &mut sparse, &mut found);
        }
    }
    found
}

/// What an operation makes of slots and finds.
fn follow(op: &Op, sparse: &mut HashSet<Slot>, found: &mut HashMap<MatrixId, Option<MatrixId>>) {
    match op {
        Op::Product {
            input,
            outputs,
            function,
            ..
        } => {
            if let ([(matrix, _)], true) = (&outputs[..], sparse.contains(input)) {
                found.entry(*matrix).or_insert(None);
            }
            for (_, slot) in outputs {
                match function.is_some_and(|function| function.leaves_zeros()) {
                    true => sparse.insert(*slot),
                    false => sparse.remove(slot),
                };
            }
        }
        Op::KeepOutliers { values, .. } => {
            sparse.insert(*values);
        }
        Op::Activate {
            gating: Gating::Product(function),
            gate: values,
            ..
        }
        | Op::Apply {
            function, values, ..
        } => {
            if function.leaves_zeros() {
                sparse.insert(*values);
            } else if !function.keeps_zeros() {
                sparse.remove(values);
            }
        }
        // What is nothing stays so.
        Op::Multiply { .. } | Op::Scale { .. } | Op::CheckFinite { .. } => {}
        other => {
            for (slot, _) in other.uses() {
                sparse.remove(&slot);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use lacuna_files::ModelFiles;

    use super::*;
    use crate::spec::{FeedForward, ModelSpec};

    /// The layer and the part of a matrix, and the part that is multiplied with gates before it.
    type Found = (usize, &'static str, Option<&'static str>);

    fn found(folder: &str) -> (ModelSpec, Vec<Found>) {
        let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
        let files = ModelFiles::open(&reference.join(folder)).expect("the fixture opens");
        let made = crate::describe(&files).expect("a model");
        let program = Program::new(&made.spec);
        let name = |MatrixId(matrix)| program.tensors()[matrix].name();
        let names = sparse_matrices(&program).into_iter().map(|(down, up)| {
            let up = up.map(|up| name(up).part);
            (name(down).layer.expect("of a layer"), name(down).part, up)
        });
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        (made.spec, names)
    }

    #[test]
    fn matrices_are_those_behind_functions_that_leave_zeros() {
        let (spec, names) = found("families/nemotron-h/model.gguf");
        let plain = spec.layers.iter().enumerate();
        let plain = plain.filter(|(_, it)| matches!(it.feed_forward, FeedForward::Plain(_)));
        let plain: Vec<_> = plain.map(|(layer, _)| (layer, "ffn_down", None)).collect();
        assert_eq!(names, plain);
        assert!(!names.is_empty());
        assert_eq!(found("qwen3/model.gguf").1, []);
    }

    #[test]
    fn blocks_with_gates_have_rows_beside_columns() {
        let gated = |layer| (layer, "ffn_down", Some("ffn_up"));
        let (spec, names) = found("families/gemma3n/model.gguf");
        let mut layers = spec.layers.clone();
        let cut = layers.iter_mut().enumerate().filter_map(|(layer, it)| {
            let block = it.feed_forward.gated_mut()?;
            block.gate_cutoff.map(|_| gated(layer))
        });
        assert_eq!(names, cut.collect::<Vec<_>>());
        assert_eq!(names.len(), 2);
        let (_, names) = found("families/llama-relu/hf");
        assert_eq!(names, [gated(0), gated(1)]);
    }
}
