//! Which matrices a pass uses, in which order, and where files have them.

use super::source::Names;
use crate::plan::{MatrixAccess, Weight, WeightUse};
use crate::program::{MatrixId, MatrixSpec, Op, Program, TensorName, TensorSpec};

/// A part of a tensor: the tensor's name, the part's bytes, and those of a row.
struct Part {
    name: String,
    bytes: u64,
    row_bytes: u64,
}

/// Every use of a matrix by a pass of `program`, in order, for a file of whose tensors `find` knows. Left out
/// are matrices that no file has as they are used: those that are converted or made when a model is loaded.
pub(crate) fn uses<'a>(
    program: &Program,
    names: &Names<'_>,
    find: &dyn Fn(&str) -> Option<&'a Weight>,
) -> Vec<WeightUse> {
    let ops = program.steps().iter().flat_map(|step| program.ops(step));
    let mut uses = Vec::new();
    for (operation, op) in ops.enumerate() {
        let mut add = |MatrixId(matrix), access| {
            let TensorSpec::Matrix(spec) = &program.tensors()[matrix] else {
                return;
            };
            let place = uses.len();
            uses.extend(part(spec, names, find).map(|part| WeightUse {
                name: part.name,
                matrix,
                operation,
                place,
                access,
                bytes: part.bytes,
                row_bytes: part.row_bytes,
            }));
        };
        match op {
            Op::Embed { table, .. } => add(*table, MatrixAccess::Rows),
            Op::Product { outputs, .. } => {
                let matrices = outputs.iter();
                matrices.for_each(|(matrix, _)| add(*matrix, MatrixAccess::Whole));
            }
            _ => {}
        }
    }
    uses
}

fn part<'a>(
    spec: &MatrixSpec,
    names: &Names<'_>,
    find: &dyn Fn(&str) -> Option<&'a Weight>,
) -> Option<Part> {
    let MatrixSpec { name, rows, .. } = *spec;
    let alone = |name: TensorName| (names.full(name, "weight"), 0, rows);
    let (name, _, all_rows) = names.fused(name, "weight").unwrap_or_else(|| alone(name));
    let tensor = find(&name)?;
    if tensor.converted_from.is_some() || all_rows == 0 {
        return None;
    }
    let row_bytes = (tensor.bytes / all_rows) as u64;
    Some(Part {
        name,
        bytes: row_bytes * rows as u64,
        row_bytes,
    })
}
