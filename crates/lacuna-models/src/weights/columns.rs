//! Files of columns: matrices that are multiplied with activations most of which are exactly zero, column by column, so
//! that the columns a token needs can be read by themselves.
//!
//! Such a file is made once of a model's own, in a folder, and named by what is in them. It is a GGUF file with two tensors
//! for each matrix, `NAME.columns` and for quantized ones `NAME.scales`, whose bytes are laid out as [`ColumnLayout`]
//! says; GGUF has no type for that, so they are declared as words of 4 bytes.

use std::collections::HashSet;
use std::path::Path;

use lacuna_files::gguf::Writer;
use lacuna_files::{Metadata, ModelFiles, OutputFile, Progress, Tensors};
use lacuna_kernels::{Activation, ColumnLayout, DType, Matrix};

use crate::error::ColumnsError;
use crate::families::Description;
use crate::plan::{NeuronUse, PredictorUse, WeightPlan};
use crate::predictors::{self, BlockShape};
use crate::program::{MatrixId, Op, Program, Slot};
use crate::spec::Gating;

/// Raised with every change of what such a file holds.
const VERSION: u32 = 1;
const VERSION_KEY: &str = "lacuna.columns.version";

/// What the weights are that it was made of.
const CONTENT_KEY: &str = "lacuna.columns.weights";

/// Tensors begin at pages, so that columns of a page are read as one.
const PAGE: u32 = 4096;

pub(super) fn columns_name(tensor: &str) -> String {
    format!("{tensor}.columns")
}

pub(super) fn scales_name(tensor: &str) -> String {
    format!("{tensor}.scales")
}

/// The matrices of `program` that are multiplied with what a function has left that is exactly zero for much of what it
/// is given.
pub(crate) fn sparse_matrices(program: &Program) -> HashSet<usize> {
    let ops = program.steps().iter().flat_map(|step| program.ops(step));
    // Slots that hold such, from the operation that left it there to the next that fills them.
    let mut sparse: HashSet<Slot> = HashSet::new();
    let mut found = HashSet::new();
    for op in ops {
        match op {
            Op::Product {
                input,
                outputs,
                function,
                ..
            } => {
                if let ([(MatrixId(matrix), _)], true) = (&outputs[..], sparse.contains(input)) {
                    found.insert(*matrix);
                }
                for (_, slot) in outputs {
                    match function.is_some_and(leaves_zeros) {
                        true => sparse.insert(*slot),
                        false => sparse.remove(slot),
                    };
                }
            }
            Op::KeepOutliers { values, .. } => {
                sparse.insert(*values);
            }
            Op::Activate { gating, gate, .. } => {
                let Gating::Product(function) = gating else {
                    sparse.remove(gate);
                    continue;
                };
                if leaves_zeros(*function) {
                    sparse.insert(*gate);
                } else if !keeps_zeros(*function) {
                    sparse.remove(gate);
                }
            }
            // What is nothing stays so.
            Op::Scale { .. } | Op::CheckFinite { .. } => {}
            other => {
                for (slot, _) in other.uses() {
                    sparse.remove(&slot);
                }
            }
        }
    }
    found
}

/// Functions of which all that is not positive becomes zero.
fn leaves_zeros(function: Activation) -> bool {
    matches!(function, Activation::Relu | Activation::ReluSquared)
}

/// Functions of which zero is zero.
fn keeps_zeros(function: Activation) -> bool {
    leaves_zeros(function)
        || matches!(
            function,
            Activation::Silu | Activation::GeluTanh | Activation::GeluErf | Activation::QuickGelu
        )
}

impl WeightPlan {
    /// The tensors of a model's files, with those matrices left to their columns that are in a file of them.
    #[must_use]
    pub fn of_files(files: &ModelFiles, description: &Description) -> Self {
        let plan = Self::of(files.tensors(), description);
        let Some(columns) = files.columns() else {
            return plan;
        };
        let plan = plan.with_columns(&|name| columns.contains(&columns_name(name)), description);
        match files.predictors() {
            Some(predictors) => plan.with_predictors(predictors, description),
            None => plan,
        }
    }

    /// The same with neurons foretold of the blocks that there are predictors of.
    fn with_predictors(mut self, predictors: &Tensors, description: &Description) -> Self {
        let inputs = predictors::inputs(&Program::new(&description.spec));
        for of in &mut self.neurons {
            let rank = predictors::rank_in(predictors, &of.name);
            of.predictor = inputs
                .get(&of.matrix)
                .zip(rank)
                .map(|(input, rank)| PredictorUse {
                    norm: input.norm,
                    width: input.width,
                    rank,
                });
        }
        self
    }

    /// The same with as many matrices as possible left to their columns, as if there were a file of them.
    ///
    /// # Errors
    /// [`ColumnsError::NoZeros`] and [`ColumnsError::Type`].
    pub fn by_neuron(self, description: &Description) -> Result<Self, ColumnsError> {
        self.column_layouts(description)?;
        Ok(self.with_columns(&|_| true, description))
    }

    /// The same with matrices whose columns `has` says there are left to these.
    pub(crate) fn with_columns(
        mut self,
        has: &dyn Fn(&str) -> bool,
        description: &Description,
    ) -> Self {
        let candidates = self.column_candidates(description);
        self.neurons = candidates
            .into_iter()
            .filter_map(|(of, layout)| match layout {
                Some(layout) if has(&of.0) => Some(NeuronUse {
                    name: of.0,
                    matrix: of.1,
                    layout,
                    predictor: None,
                }),
                _ => None,
            })
            .collect();
        let neurons = &self.neurons;
        self.uses
            .retain(|of| neurons.iter().all(|it| it.matrix != of.matrix));
        self
    }

    /// The blocks of a model that can be foretold, as files of predictors have them, with the numbers of their matrices.
    ///
    /// # Errors
    /// [`ColumnsError::NoZeros`] and [`ColumnsError::Type`].
    pub(crate) fn predicted_blocks(
        &self,
        description: &Description,
    ) -> Result<Vec<(usize, BlockShape)>, ColumnsError> {
        let layouts = self.column_layouts(description)?;
        let inputs = predictors::inputs(&Program::new(&description.spec));
        let blocks = self.uses.iter().filter_map(|of| {
            let (_, layout) = layouts.iter().find(|(name, _)| *name == of.name)?;
            let shape = BlockShape {
                name: of.name.clone(),
                width: inputs.get(&of.matrix)?.width,
                neurons: layout.cols(),
            };
            Some((of.matrix, shape))
        });
        Ok(blocks.collect())
    }

    /// The matrices whose columns can lie by themselves, and how; one at least.
    fn column_layouts(
        &self,
        description: &Description,
    ) -> Result<Vec<(String, ColumnLayout)>, ColumnsError> {
        let candidates = self.column_candidates(description);
        let Some(((first, _), _)) = candidates.first().cloned() else {
            return Err(ColumnsError::NoZeros);
        };
        let layouts = candidates.into_iter();
        let layouts = layouts.filter_map(|((name, _), layout)| Some((name, layout?)));
        let layouts: Vec<(String, ColumnLayout)> = layouts.collect();
        if layouts.is_empty() {
            let tensor = self.tensors.iter().find(|tensor| tensor.name == first);
            return Err(ColumnsError::Type {
                name: first,
                type_name: tensor.map_or_else(String::new, |tensor| tensor.type_name.clone()),
            });
        }
        Ok(layouts)
    }

    /// Matrices whose columns may lie by themselves, by tensor and by number, and how; `None` for types that they are not taken
    /// from.
    fn column_candidates(
        &self,
        description: &Description,
    ) -> Vec<((String, usize), Option<ColumnLayout>)> {
        let program = Program::new(&description.spec);
        let sparse = sparse_matrices(&program);
        let candidates = self.uses.iter().filter(|of| sparse.contains(&of.matrix));
        let candidates = candidates.filter_map(|of| {
            let mut tensors = self.tensors.iter();
            let tensor = tensors.find(|tensor| tensor.name == of.name)?;
            let [rows, cols] = tensor.shape[..] else {
                return None;
            };
            let layout = tensor.type_name.parse::<DType>().ok();
            let layout = layout.and_then(|dtype| ColumnLayout::new(dtype, rows, cols));
            Some(((of.name.clone(), of.matrix), layout))
        });
        candidates.collect()
    }
}

/// A model's files with a file of columns, which is made in `folder` unless it is there, and with that of predictors, if
/// there is one.
///
/// # Errors
/// [`ColumnsError`]: the model has no such matrices, the file cannot be made, or that of predictors is damaged.
pub fn with_columns(
    files: ModelFiles,
    folder: &Path,
    progress: &mut dyn Progress,
) -> Result<ModelFiles, ColumnsError> {
    let description =
        crate::describe(&files).map_err(|error| ColumnsError::Model(Box::new(error)))?;
    let plan = WeightPlan::of(files.tensors(), &description);
    let layouts = plan.column_layouts(&description)?;
    let failed = |source| ColumnsError::Write {
        path: folder.to_owned(),
        source,
    };
    std::fs::create_dir_all(folder).map_err(failed)?;
    let content = content_name(&files, folder)?;
    let blocks = plan.predicted_blocks(&description)?;
    let blocks: Vec<BlockShape> = blocks.into_iter().map(|(_, shape)| shape).collect();
    let path = predictors::path_in(folder, &content);
    let predictors = predictors::open(&path, &content, &blocks)?;
    let files = match predictors {
        Some(predictors) => files.with_predictors(predictors),
        None => files,
    };
    let path = folder.join(format!("{}.columns", &content[..32]));
    if let Some(columns) = open(&path, &content, &layouts) {
        return Ok(files.with_columns(columns));
    }
    let made = make(&files, &path, &content, &layouts, progress);
    // Another process may have made it meanwhile.
    match (open(&path, &content, &layouts), made) {
        (Some(columns), _) => Ok(files.with_columns(columns)),
        (None, Err(error)) => Err(error),
        (None, Ok(())) => Err(failed(std::io::ErrorKind::InvalidData.into())),
    }
}

/// What the weights of `files` are, as the names and entries of files say that are made of them. What was found is
/// remembered in `folder`.
///
/// # Errors
/// [`ColumnsError::Read`].
pub(crate) fn content_name(files: &ModelFiles, folder: &Path) -> Result<String, ColumnsError> {
    let content = files.content(Some(folder)).map_err(ColumnsError::Read)?;
    Ok(content.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The tensors of a whole file of columns that was made of these weights; `None` for any other.
pub(super) fn open(
    path: &Path,
    content: &str,
    layouts: &[(String, ColumnLayout)],
) -> Option<Tensors> {
    let files = ModelFiles::open(path).ok()?;
    let Metadata::Gguf(metadata) = files.metadata() else {
        return None;
    };
    let version: u32 = metadata.require(VERSION_KEY).ok()?;
    let made_of: &str = metadata.require(CONTENT_KEY).ok()?;
    if version != VERSION || made_of != content {
        return None;
    }
    let has = |name: &str, shape: &[usize]| {
        let tensor = files.tensors().require_shape(name, shape);
        tensor.is_ok_and(|tensor| tensor.dtype() == DType::F32)
    };
    let whole = layouts.iter().all(|(name, layout)| {
        let columns = [layout.cols(), layout.column_bytes() / 4];
        let scales = [layout.scale_bytes() / 4];
        has(&columns_name(name), &columns) && (scales == [0] || has(&scales_name(name), &scales))
    });
    whole.then(|| files.tensors().clone())
}

pub(super) fn make(
    files: &ModelFiles,
    path: &Path,
    content: &str,
    layouts: &[(String, ColumnLayout)],
    progress: &mut dyn Progress,
) -> Result<(), ColumnsError> {
    let written = |source| ColumnsError::Write {
        path: path.to_owned(),
        source,
    };
    let mut header = Writer::new();
    header.align(PAGE);
    header.set(VERSION_KEY, VERSION);
    header.set(CONTENT_KEY, content);
    let mut all = 0;
    for (name, layout) in layouts {
        let shape = [layout.cols(), layout.column_bytes() / 4];
        header.tensor(&columns_name(name), DType::F32, &shape)?;
        if layout.scale_bytes() > 0 {
            let shape = [layout.scale_bytes() / 4];
            header.tensor(&scales_name(name), DType::F32, &shape)?;
        }
        all += (layout.cols() * layout.column_bytes()) as u64;
    }
    progress.begin("columns of feed-forward blocks", Some(all));
    let output = OutputFile::create(path).map_err(written)?;
    let mut body = header.begin(std::io::BufWriter::new(output))?;
    for (name, layout) in layouts {
        let tensor = files.tensors().require(name)?;
        let matrix = Matrix::new(layout.dtype(), layout.rows(), layout.cols(), tensor.bytes());
        let matrix = matrix.map_err(|source| ColumnsError::Shape {
            name: name.clone(),
            source,
        })?;
        let not_finite = |source| ColumnsError::NotFinite {
            name: name.clone(),
            source,
        };
        let mut scales = vec![0; layout.scale_bytes()];
        layout
            .pack_scales(&matrix, &mut scales)
            .map_err(not_finite)?;
        let mut packed = vec![0; ColumnLayout::SECTION * layout.column_bytes()];
        let mut refused = None;
        body.stream(&columns_name(name), |out| {
            for start in (0..layout.cols()).step_by(ColumnLayout::SECTION) {
                let columns = start..layout.cols().min(start + ColumnLayout::SECTION);
                let packed = &mut packed[..columns.len() * layout.column_bytes()];
                if let Err(error) = layout.pack(&matrix, columns, packed) {
                    refused = Some(error);
                    return Err(std::io::ErrorKind::InvalidData.into());
                }
                out.write_all(packed)?;
                progress.advance(packed.len() as u64);
            }
            Ok(())
        })
        .map_err(|error| match refused {
            Some(source) => not_finite(source),
            None => error.into(),
        })?;
        if !scales.is_empty() {
            body.tensor(&scales_name(name), &scales)?;
        }
    }
    files.check()?;
    let output = body.finish()?.into_inner();
    let output = output.map_err(|error| written(error.into_error()))?;
    output.finish().map_err(written)?;
    progress.finish();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::FeedForward;

    fn described(family: &str) -> Description {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
        let files = ModelFiles::open(&folder.join(family).join("model.gguf"));
        crate::describe(&files.expect("the fixture opens")).expect("a model")
    }

    #[test]
    fn matrices_are_those_behind_functions_that_leave_zeros() {
        let found = |family| {
            let made = described(family);
            let program = Program::new(&made.spec);
            let names = sparse_matrices(&program).into_iter().map(|matrix| {
                let name = program.tensors()[matrix].name();
                (name.layer.expect("of a layer"), name.part)
            });
            let mut names: Vec<_> = names.collect();
            names.sort_unstable();
            (made.spec, names)
        };
        let (spec, names) = found("families/nemotron-h");
        let plain = spec.layers.iter().enumerate();
        let plain = plain.filter(|(_, it)| matches!(it.feed_forward, FeedForward::Plain(_)));
        let plain: Vec<_> = plain.map(|(layer, _)| (layer, "ffn_down")).collect();
        assert_eq!(names, plain);
        assert!(!names.is_empty());
        let (spec, names) = found("families/gemma3n");
        let mut layers = spec.layers.clone();
        let cut = layers.iter_mut().enumerate().filter_map(|(layer, it)| {
            let block = it.feed_forward.gated_mut()?;
            block.gate_cutoff.map(|_| (layer, "ffn_down"))
        });
        assert_eq!(names, cut.collect::<Vec<_>>());
        assert_eq!(names.len(), 2);
        assert_eq!(found("qwen3").1, []);
    }
}
