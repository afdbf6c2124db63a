//! Which part of a file's tensors computing one token reads.

use std::collections::HashMap;

use super::source::is_outside;
use crate::families::{Description, heads};
use crate::plan::WeightPlan;
use crate::program::{ExpertsSpec, MatrixId, Op, Program, TensorName, TensorSpec};

/// A part of a tensor: so many of so many.
type Share = (usize, usize);

/// Of the bytes of `weights`, those that computing one token reads: of experts as many as a token has,
/// of tables that are only looked up in a row, of everything else all.
pub(crate) fn active_bytes(description: &Description, weights: &WeightPlan) -> u64 {
    let shares = shares(description);
    let bytes = weights.tensors.iter().map(|tensor| {
        let is_read = match description.is_ahead(&tensor.name) {
            Some(is_used) => is_used && heads::is_read_always(&tensor.name),
            None => !is_outside(&tensor.name),
        };
        if !is_read {
            return 0;
        }
        // Files that hold more than a model of language say so within the names of its tensors.
        let name = tensor.name.replacen("language_model.", "", 1);
        let (part, whole) = shares.get(&name).copied().unwrap_or((1, 1));
        tensor.bytes as u64 / whole.max(1) as u64 * part as u64
    });
    bytes.sum()
}

/// The tensors that are not read whole, by every name they may have.
fn shares(description: &Description) -> HashMap<String, Share> {
    let program = Program::new(&description.spec);
    let (naming, spelling) = (&description.family.naming, description.spelling);
    let mut shares = HashMap::new();
    for tensor in program.tensors() {
        let TensorSpec::Experts(ExpertsSpec {
            name,
            experts,
            used,
            ..
        }) = *tensor
        else {
            continue;
        };
        let share = (used, experts);
        let part = "ffn_gate_up_exps";
        for name in [name, TensorName { part, ..name }] {
            for suffix in ["weight", "bias"] {
                let names = naming.of_stack(spelling, name, suffix);
                shares.extend(names.into_iter().map(|name| (name, share)));
            }
        }
        let each = (0..experts).map(|expert| naming.of_expert(spelling, name, expert));
        shares.extend(each.map(|name| (name, share)));
    }
    for MatrixId(table) in looked_up(&program) {
        if let TensorSpec::Matrix(matrix) = program.tensors()[table] {
            let name = naming.full(spelling, matrix.name, "weight");
            shares.insert(name, (1, matrix.rows));
        }
    }
    shares
}

/// The tables that nothing is multiplied with.
pub(super) fn looked_up(program: &Program) -> Vec<MatrixId> {
    let ops = || program.steps().iter().flat_map(|step| program.ops(step));
    let mut tables: Vec<MatrixId> = ops()
        .filter_map(|op| match op {
            Op::Embed { table, .. } => Some(*table),
            _ => None,
        })
        .collect();
    let multiplied = |table: &MatrixId| {
        ops().any(|op| match op {
            Op::Product { outputs, .. } => outputs.iter().any(|(matrix, _)| matrix == table),
            _ => false,
        })
    };
    tables.retain(|table| !multiplied(table));
    tables
}
