//! Which matrices a pass uses, in which order, and where files have them.

use super::source::Names;
use super::source::Stack;
use crate::plan::{ExpertUse, MatrixAccess, Weight, WeightUse, held};
use crate::program::{
    ExpertsId, ExpertsSpec, MatrixId, MatrixSpec, Op, Program, TensorName, TensorSpec,
};

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

/// Every use of experts by a pass of `program`, in order, of which a token has a few. Left out are layers some of whose
/// experts no file has as they are used.
pub(crate) fn expert_uses<'a>(
    program: &Program,
    names: &Names<'_>,
    find: &dyn Fn(&str) -> Option<&'a Weight>,
) -> Vec<ExpertUse> {
    let mut layers: Vec<Option<Vec<ExpertUse>>> = Vec::new();
    for op in program.steps().iter().flat_map(|step| program.ops(step)) {
        match op {
            Op::Route { .. } => layers.push(Some(Vec::new())),
            Op::ExpertProduct {
                routing, outputs, ..
            } if routing.used < routing.experts => {
                let Some(layer) = layers.last_mut() else {
                    continue;
                };
                let parts = outputs.iter().map(|(ExpertsId(number), _)| {
                    let TensorSpec::Experts(spec) = &program.tensors()[*number] else {
                        return None;
                    };
                    expert_part(spec, names, find)
                });
                let parts = parts.collect::<Option<Vec<_>>>();
                *layer = layer.take().zip(parts).map(|(mut uses, parts)| {
                    uses.push(ExpertUse {
                        tensors: outputs.iter().map(|(id, _)| id.0).collect(),
                        layer: 0,
                        experts: routing.experts,
                        used: routing.used,
                        bytes: parts.iter().map(|part| part.bytes).sum(),
                        slot_bytes: parts.iter().map(|part| held(part.bytes)).sum(),
                        names: parts.into_iter().flat_map(|part| part.names).collect(),
                    });
                    uses
                });
            }
            _ => {}
        }
    }
    let layers = layers.into_iter().flatten();
    let layers = layers.filter(|uses| !uses.is_empty()).enumerate();
    let numbered = layers.flat_map(|(layer, uses)| {
        let of = move |it| ExpertUse { layer, ..it };
        uses.into_iter().map(of)
    });
    numbered.collect()
}

/// Matrices of experts, one for each: the tensors they are in, and the bytes of the largest.
struct ExpertPart {
    names: Vec<String>,
    bytes: u64,
}

fn expert_part<'a>(
    spec: &ExpertsSpec,
    names: &Names<'_>,
    find: &dyn Fn(&str) -> Option<&'a Weight>,
) -> Option<ExpertPart> {
    let in_file = |name: &str| find(name).filter(|it| it.converted_from.is_none());
    if let Some(Stack { name, each, .. }) = names.stack(spec.name, "weight", spec.rows) {
        let all = in_file(&name)?.bytes;
        let bytes = all / (spec.experts * each).max(1) * spec.rows;
        return Some(ExpertPart {
            names: vec![name],
            bytes: bytes as u64,
        });
    }
    let own = (0..spec.experts).map(|expert| names.of_expert(spec.name, expert));
    let names: Vec<String> = own.collect();
    let bytes = names.iter().map(|name| Some(in_file(name)?.bytes as u64));
    let bytes = bytes.collect::<Option<Vec<_>>>()?.into_iter().max()?;
    Some(ExpertPart { names, bytes })
}
