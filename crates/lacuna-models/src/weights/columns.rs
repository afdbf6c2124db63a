//! Files of columns: matrices that are multiplied with activations most of which are exactly zero, column by column, so
//! that the columns a token needs can be read by themselves. Where gates decide which activations are zero, a column has
//! the row beside it that makes its activation: both are needed or neither.
//!
//! Such a file is made once of a model's own, in a folder, and named by what is in them. It is a GGUF file with two tensors
//! for each matrix, `NAME.columns` (or with rows `NAME.neurons`) and for quantized ones `NAME.scales`, whose bytes are laid
//! out as [`NeuronLayout`] says; GGUF has no type for that, so they are declared as words of 4 bytes.

use std::ops::Range;
use std::path::Path;

use lacuna_files::gguf::Writer;
use lacuna_files::{Metadata, ModelFiles, OutputFile, Progress, Tensor, Tensors};
use lacuna_kernels::{ColumnLayout, DType, Matrix, NotFinite};

use crate::error::ColumnsError;
use crate::families::Description;
use crate::plan::{NeuronLayout, NeuronUse, PredictorUse, UpUse, WeightPlan};
use crate::predictors::{self, BlockShape};
use crate::program::{MatrixId, Program, sparse_matrices};

/// Raised with every change of what such a file holds.
const VERSION: u32 = 1;
const VERSION_KEY: &str = "lacuna.columns.version";

/// What the weights are that it was made of.
const CONTENT_KEY: &str = "lacuna.columns.weights";

/// Tensors begin at pages, so that columns of a page are read as one.
const PAGE: u32 = 4096;

/// The tensor that has a matrix's neurons.
pub(super) fn neurons_name(of: &NeuronUse) -> String {
    let part = if of.up.is_some() {
        "neurons"
    } else {
        "columns"
    };
    format!("{}.{part}", of.name)
}

pub(super) fn scales_name(tensor: &str) -> String {
    format!("{tensor}.scales")
}

impl WeightPlan {
    /// The tensors of a model's files, with those matrices left to their columns that are in a file of them.
    #[must_use]
    pub fn of_files(files: &ModelFiles, description: &Description) -> Self {
        let plan = Self::of(files.tensors(), description);
        let Some(columns) = files.columns() else {
            return plan;
        };
        let plan = plan.with_columns(&|of| columns.contains(&neurons_name(of)), description);
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
        self.neuron_uses(description)?;
        Ok(self.with_columns(&|_| true, description))
    }

    /// The same with matrices left to their neurons where `has` says that these are there.
    pub(crate) fn with_columns(
        mut self,
        has: &dyn Fn(&NeuronUse) -> bool,
        description: &Description,
    ) -> Self {
        let candidates = self.neuron_candidates(description).into_iter();
        let neurons = candidates.filter_map(|(_, of)| of.filter(has));
        self.neurons = neurons.collect();
        let neurons = &self.neurons;
        self.uses
            .retain(|of| neurons.iter().all(|it| !it.has(of.matrix)));
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
        let inputs = predictors::inputs(&Program::new(&description.spec));
        let uses = self.neuron_uses(description)?.into_iter();
        let blocks = uses.filter_map(|of| {
            let shape = BlockShape {
                width: inputs.get(&of.matrix)?.width,
                neurons: of.neurons(),
                name: of.name,
            };
            Some((of.matrix, shape))
        });
        Ok(blocks.collect())
    }

    /// The matrices whose columns can lie by themselves, in the order of the program; one at least.
    fn neuron_uses(&self, description: &Description) -> Result<Vec<NeuronUse>, ColumnsError> {
        let candidates = self.neuron_candidates(description);
        let Some((first, _)) = candidates.first().cloned() else {
            return Err(ColumnsError::NoZeros);
        };
        let uses: Vec<_> = candidates.into_iter().filter_map(|(_, of)| of).collect();
        if uses.is_empty() {
            let tensor = self.tensors.iter().find(|tensor| tensor.name == first);
            return Err(ColumnsError::Type {
                name: first,
                type_name: tensor.map_or_else(String::new, |tensor| tensor.type_name.clone()),
            });
        }
        Ok(uses)
    }

    /// Tensors whose columns may lie by themselves; `None` for types that they are not taken from.
    fn neuron_candidates(&self, description: &Description) -> Vec<(String, Option<NeuronUse>)> {
        let program = Program::new(&description.spec);
        let sparse = sparse_matrices(&program);
        let candidates = self.uses.iter().filter_map(|of| {
            let up = sparse.get(&MatrixId(of.matrix))?;
            let columns = self.whole(of.matrix).and_then(|whole| {
                let (dtype, [rows, cols]) = whole;
                ColumnLayout::new(dtype, rows, cols)
            });
            let with_columns = |columns: ColumnLayout| {
                let up = up.and_then(|MatrixId(matrix)| {
                    let name = self
                        .uses
                        .iter()
                        .find(|it| it.matrix == matrix)?
                        .name
                        .clone();
                    let (dtype, [neurons, elements]) = self.whole(matrix)?;
                    let fits = neurons == columns.cols() && dtype.row_bytes(elements).is_some();
                    fits.then_some((UpUse { name, matrix }, (dtype, elements)))
                });
                let (up, rows) = up.unzip();
                NeuronUse {
                    name: of.name.clone(),
                    matrix: of.matrix,
                    layout: NeuronLayout { columns, rows },
                    up,
                    predictor: None,
                }
            };
            Some((of.name.clone(), columns.map(with_columns)))
        });
        candidates.collect()
    }

    /// The type and the shape of a matrix that is used once, and is a whole tensor.
    fn whole(&self, matrix: usize) -> Option<(DType, [usize; 2])> {
        let mut uses = self.uses.iter().filter(|of| of.matrix == matrix);
        let (Some(of), None) = (uses.next(), uses.next()) else {
            return None;
        };
        let mut tensors = self.tensors.iter();
        let tensor = tensors.find(|tensor| tensor.name == of.name)?;
        let [rows, columns] = tensor.shape[..] else {
            return None;
        };
        let dtype = tensor.type_name.parse().ok()?;
        (tensor.bytes as u64 == of.bytes).then_some((dtype, [rows, columns]))
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
    let uses = plan.neuron_uses(&description)?;
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
    if let Some(columns) = open(&path, &content, &uses) {
        return Ok(files.with_columns(columns));
    }
    let made = make(&files, &path, &content, &uses, progress);
    // Another process may have made it meanwhile.
    match (open(&path, &content, &uses), made) {
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
pub(super) fn open(path: &Path, content: &str, uses: &[NeuronUse]) -> Option<Tensors> {
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
    let whole = uses.iter().all(|of| {
        let scales = scales_shape(of);
        has(&neurons_name(of), &neurons_shape(of))
            && (scales == [0] || has(&scales_name(&of.name), &scales))
    });
    whole.then(|| files.tensors().clone())
}

/// Words of the tensor of neurons.
fn neurons_shape(of: &NeuronUse) -> [usize; 2] {
    [of.neurons(), of.layout.bytes() / NeuronLayout::WORD_BYTES]
}

/// Words of the tensor of scales, of which there is none where there are no words.
fn scales_shape(of: &NeuronUse) -> [usize; 1] {
    [of.layout.columns.scale_bytes() / NeuronLayout::WORD_BYTES]
}

pub(super) fn make(
    files: &ModelFiles,
    path: &Path,
    content: &str,
    uses: &[NeuronUse],
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
    for of in uses {
        header.tensor(&neurons_name(of), DType::F32, &neurons_shape(of))?;
        let scales = scales_shape(of);
        if scales != [0] {
            header.tensor(&scales_name(&of.name), DType::F32, &scales)?;
        }
        all += of.neurons() as u64 * of.bytes();
    }
    progress.begin("columns of feed-forward blocks", Some(all));
    let output = OutputFile::create(path).map_err(written)?;
    let mut body = header.begin(std::io::BufWriter::new(output))?;
    for of in uses {
        let packing = Packing::new(files, of)?;
        let scales = packing.scales()?;
        let mut refused = None;
        body.stream(&neurons_name(of), |out| {
            for start in (0..of.neurons()).step_by(ColumnLayout::SECTION) {
                let neurons = start..of.neurons().min(start + ColumnLayout::SECTION);
                match packing.pack(neurons) {
                    Ok(packed) => {
                        out.write_all(&packed)?;
                        progress.advance(packed.len() as u64);
                    }
                    Err(error) => {
                        refused = Some(error);
                        return Err(std::io::ErrorKind::InvalidData.into());
                    }
                }
            }
            Ok(())
        })
        .map_err(|error| refused.unwrap_or_else(|| error.into()))?;
        if !scales.is_empty() {
            body.tensor(&scales_name(&of.name), &scales)?;
        }
    }
    files.check()?;
    let output = body.finish()?.into_inner();
    let output = output.map_err(|error| written(error.into_error()))?;
    output.finish().map_err(written)?;
    progress.finish();
    Ok(())
}

/// The matrices that neurons are taken from.
struct Packing<'a> {
    of: &'a NeuronUse,
    down: Tensor,
    up: Option<Tensor>,
}

impl<'a> Packing<'a> {
    fn new(files: &ModelFiles, of: &'a NeuronUse) -> Result<Self, ColumnsError> {
        let up = of.up.as_ref();
        let up = up.map(|up| files.tensors().require(&up.name));
        Ok(Self {
            of,
            down: files.tensors().require(&of.name)?,
            up: up.transpose()?,
        })
    }

    fn down(&self) -> Result<Matrix<'_>, ColumnsError> {
        let columns = self.of.layout.columns;
        matrix(
            &self.down,
            columns.dtype(),
            [columns.rows(), columns.cols()],
        )
    }

    fn scales(&self) -> Result<Vec<u8>, ColumnsError> {
        let columns = self.of.layout.columns;
        let mut scales = vec![0; columns.scale_bytes()];
        let packed = columns.pack_scales(&self.down()?, &mut scales);
        packed.map_err(|source| not_finite(&self.of.name, source))?;
        Ok(scales)
    }

    /// Some neurons one after another.
    fn pack(&self, neurons: Range<usize>) -> Result<Vec<u8>, ColumnsError> {
        let layout = &self.of.layout;
        let column_bytes = layout.columns.column_bytes();
        let mut columns = vec![0; neurons.len() * column_bytes];
        let packed = layout
            .columns
            .pack(&self.down()?, neurons.clone(), &mut columns);
        packed.map_err(|source| not_finite(&self.of.name, source))?;
        let (Some(up), Some((dtype, elements))) = (&self.up, layout.rows) else {
            return Ok(columns);
        };
        let rows = matrix(up, dtype, [layout.neurons(), elements])?;
        let mut packed = vec![0; neurons.len() * layout.bytes()];
        let mut values = vec![0.0; elements];
        let each = neurons.zip(columns.chunks_exact(column_bytes));
        for ((row, column), out) in each.zip(packed.chunks_exact_mut(layout.bytes())) {
            // What is not finite adds something where a gate is zero.
            rows.dequantize_row(row, &mut values);
            if values.iter().any(|value| !value.is_finite()) {
                return Err(not_finite(up.name(), NotFinite { row }));
            }
            out[..column_bytes].copy_from_slice(column);
            out[column_bytes..][..layout.row_bytes()].copy_from_slice(rows.row(row));
        }
        Ok(packed)
    }
}

fn matrix(
    tensor: &Tensor,
    dtype: DType,
    [rows, columns]: [usize; 2],
) -> Result<Matrix<'_>, ColumnsError> {
    let matrix = Matrix::new(dtype, rows, columns, tensor.bytes());
    matrix.map_err(|source| ColumnsError::Shape {
        name: tensor.name().to_owned(),
        source,
    })
}

fn not_finite(name: &str, source: NotFinite) -> ColumnsError {
    ColumnsError::NotFinite {
        name: name.to_owned(),
        source,
    }
}
