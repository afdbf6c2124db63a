//! Predictors of neurons: small matrices that say, before a feed-forward block's activations are known, which of them are
//! likely not to be zero, so that their columns are read meanwhile. What they say costs or saves time and never a bit: a
//! column that is missing when activations are known is read then.
//!
//! A neuron is named if `wide (narrow x) + bias >= 0`, where `x` is what an earlier norm of the pass has left ([`inputs`]).
//! At a score of `margin` it is as likely as not to be needed.
//!
//! They are fitted once of a model's own activations, which passes record ([`NeuronRecorder`]), and lie in a file beside
//! that of its columns: GGUF, with four tensors for each block, named by the matrix that its activations are multiplied with.
//!
//! ```text
//! NAME.narrow  f16 [rank, width of the norm]
//! NAME.wide    f16 [neurons, rank]
//! NAME.bias    f32 [neurons]
//! NAME.margin  f32 [1]
//! ```

mod fit;
mod record;
mod train;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use lacuna_files::gguf::Writer;
use lacuna_files::{Metadata, ModelFiles, OutputFile, Tensors};
use lacuna_kernels::{Activations, Cpu, DType, Matrix};

use crate::error::LoadError;
use crate::program::{MatrixId, Op, Program, Rows, Slot, TensorSpec, VectorId, sparse_matrices};

pub use fit::{BlockFit, FitSettings, PredictorFit, PredictorFitter};
pub use record::NeuronRecorder;

/// Raised with every change of what such a file holds, and of which norm a block is foretold from.
const VERSION: u32 = 1;
const VERSION_KEY: &str = "lacuna.predictors.version";

/// What the weights are that it was fitted to.
const CONTENT_KEY: &str = "lacuna.predictors.weights";

pub(crate) fn narrow_name(tensor: &str) -> String {
    format!("{tensor}.narrow")
}

pub(crate) fn wide_name(tensor: &str) -> String {
    format!("{tensor}.wide")
}

pub(crate) fn bias_name(tensor: &str) -> String {
    format!("{tensor}.bias")
}

pub(crate) fn margin_name(tensor: &str) -> String {
    format!("{tensor}.margin")
}

/// Why there are no predictors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PredictorsError {
    /// The file of predictors is not that of the model, or not whole.
    #[error("{}: {why}; fit the predictors again, or remove the file", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// What the files hold is no model.
    #[error(transparent)]
    Model(#[from] Box<LoadError>),
    /// The model has no neurons that are read one by one, or its files cannot be read.
    #[error(transparent)]
    Columns(#[from] Box<crate::error::ColumnsError>),
    /// No block has a norm before it that it could be foretold from.
    #[error(
        "no feed-forward block of the model has a norm before it that its neurons could be foretold from; use it without predictors"
    )]
    NoInputs,
    /// There is too little to fit to.
    #[error(
        "the text has {tokens} tokens, and {needed} at least are needed to fit predictors and to say how good they are; name a longer text"
    )]
    TextTooShort {
        /// Tokens that there are.
        tokens: usize,
        /// Tokens that are needed.
        needed: usize,
    },
    /// There is more of it than is learned from at once.
    #[error(
        "{tokens} tokens are more than the {most} that one block's activations are recorded of; use fewer of the text"
    )]
    TextTooLong {
        /// Tokens that there are.
        tokens: usize,
        /// Tokens that are taken.
        most: usize,
    },
    /// Activations are no numbers.
    #[error(
        "the activations around `{name}` are not all finite; the model's weights are damaged, or the text is none for it"
    )]
    NotFinite {
        /// The matrix.
        name: String,
    },
    /// The file cannot be written.
    #[error("{}: {source}; name a folder with room for the predictors", path.display())]
    Write {
        /// The file or its folder.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A tensor cannot be written.
    #[error(transparent)]
    Gguf(#[from] lacuna_files::gguf::WriteError),
}

/// What the neurons of a block are foretold from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Input {
    /// What the norm multiplies with, which no other norm does: its output is given.
    pub(crate) norm: VectorId,
    /// Elements of its rows.
    pub(crate) width: usize,
}

/// What the blocks of `program` can be foretold from, by the matrices that their activations are multiplied with.
///
/// It is the norm of the part before the block, which reads the same stream: what that part adds is little beside what is
/// there, and its weights and those that make the block's activations are read and multiplied with meanwhile. Where the
/// columns of another block are still to be read then, it is the block's own norm.
pub(crate) fn inputs(program: &Program) -> HashMap<usize, Input> {
    let sparse = sparse_matrices(program);
    let ops = program.steps().iter().flat_map(|step| program.ops(step));
    // Since the last block whose columns are read.
    let mut norms: Vec<WeightedNorm> = Vec::new();
    let mut found = HashMap::new();
    for op in ops {
        match op {
            Op::Product { outputs, .. } => {
                let &[(MatrixId(matrix), _)] = &outputs[..] else {
                    continue;
                };
                let TensorSpec::Matrix(of) = program.tensors()[matrix] else {
                    continue;
                };
                if !sparse.contains_key(&MatrixId(matrix)) {
                    continue;
                }
                let mut near = norms.drain(..).rev().filter(|norm| norm.width == of.rows);
                if let Some(own) = near.next() {
                    let before = near.find(|norm| norm.input == own.input);
                    let norm = before.unwrap_or(own).weight;
                    let width = own.width;
                    found.insert(matrix, Input { norm, width });
                }
            }
            other => norms.extend(WeightedNorm::of(other)),
        }
    }
    found
}

/// A norm of whole rows of tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WeightedNorm {
    /// What it multiplies with.
    pub(crate) weight: VectorId,
    pub(crate) input: Slot,
    pub(crate) output: Slot,
    /// Elements of a row.
    pub(crate) width: usize,
}

impl WeightedNorm {
    /// `None` for other operations.
    pub(crate) fn of(op: &Op) -> Option<Self> {
        match *op {
            Op::Norm {
                weight: Some(weight),
                input,
                output,
                rows: Rows::Tokens,
                groups: 1,
                width,
                ..
            }
            | Op::BiasedNorm {
                weight,
                input,
                output,
                rows: Rows::Tokens,
                width,
                ..
            } => Some(Self {
                weight,
                input,
                output,
                width,
            }),
            _ => None,
        }
    }
}

/// A block, as files of predictors have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockShape {
    /// The matrix that its activations are multiplied with.
    pub(crate) name: String,
    /// Elements of what it is foretold from.
    pub(crate) width: usize,
    pub(crate) neurons: usize,
}

/// Where the predictors are of a model with these weights.
pub(crate) fn path_in(folder: &Path, content: &str) -> PathBuf {
    folder.join(format!("{}.predictors", &content[..32]))
}

/// The tensors of a whole file of predictors that were fitted to these weights; `None` where there is no file.
///
/// # Errors
/// [`PredictorsError::Damaged`].
pub(crate) fn open(
    path: &Path,
    content: &str,
    blocks: &[BlockShape],
) -> Result<Option<Tensors>, PredictorsError> {
    if !path.exists() {
        return Ok(None);
    }
    let damaged = |why: String| PredictorsError::Damaged {
        path: path.to_owned(),
        why,
    };
    let files = ModelFiles::open(path).map_err(|error| damaged(error.to_string()))?;
    let Metadata::Gguf(metadata) = files.metadata() else {
        return Err(damaged("it is no GGUF file".to_owned()));
    };
    let version: Option<u32> = metadata.require(VERSION_KEY).ok();
    let fitted_to: Option<&str> = metadata.require(CONTENT_KEY).ok();
    if version != Some(VERSION) {
        return Err(damaged(
            "it is of another version of this program".to_owned(),
        ));
    }
    if fitted_to != Some(content) {
        return Err(damaged("it is of other weights".to_owned()));
    }
    let tensors = files.tensors();
    for block in blocks {
        check(tensors, block).map_err(damaged)?;
    }
    files.check().map_err(|error| damaged(error.to_string()))?;
    Ok(Some(tensors.clone()))
}

/// Whether a block's predictor is whole.
///
/// # Errors
/// What is wrong with it.
fn check(tensors: &Tensors, block: &BlockShape) -> Result<(), String> {
    let BlockShape {
        name,
        width,
        neurons,
    } = block;
    let rank = rank_in(tensors, name).filter(|rank| (1..=*width).contains(rank));
    let rank = rank.ok_or_else(|| format!("`{}` is missing or of no use", narrow_name(name)))?;
    let parts = [
        (narrow_name(name), DType::F16, vec![rank, *width]),
        (wide_name(name), DType::F16, vec![*neurons, rank]),
        (bias_name(name), DType::F32, vec![*neurons]),
        (margin_name(name), DType::F32, vec![1]),
    ];
    for (name, dtype, shape) in parts {
        let tensor = tensors.require_shape(&name, &shape);
        let tensor = tensor.map_err(|error| error.to_string())?;
        if tensor.dtype() != dtype {
            return Err(format!("`{name}` is {}, not {dtype}", tensor.dtype()));
        }
        let bytes = tensor.bytes();
        let finite = match dtype {
            // An exponent of all ones.
            DType::F16 => bytes
                .as_chunks()
                .0
                .iter()
                .all(|it| u16::from_le_bytes(*it) & 0x7C00 != 0x7C00),
            _ => bytes
                .as_chunks()
                .0
                .iter()
                .all(|it| f32::from_le_bytes(*it).is_finite()),
        };
        if !finite {
            return Err(format!("`{name}` has a value that is not finite"));
        }
    }
    Ok(())
}

/// Rows of the first matrix of a block's predictor.
pub(crate) fn rank_in(tensors: &Tensors, name: &str) -> Option<usize> {
    tensors.rows(&narrow_name(name))
}

/// Writes a file of predictors, whole or not at all.
pub(crate) fn write(
    path: &Path,
    content: &str,
    predictors: &[(String, Predictor)],
) -> Result<(), PredictorsError> {
    let failed = |source| PredictorsError::Write {
        path: path.to_owned(),
        source,
    };
    let mut header = Writer::new();
    header.set(VERSION_KEY, VERSION);
    header.set(CONTENT_KEY, content);
    for (name, of) in predictors {
        header.tensor(&narrow_name(name), DType::F16, &[of.rank, of.width])?;
        header.tensor(&wide_name(name), DType::F16, &[of.neurons(), of.rank])?;
        header.tensor(&bias_name(name), DType::F32, &[of.neurons()])?;
        header.tensor(&margin_name(name), DType::F32, &[1])?;
    }
    let output = OutputFile::create(path).map_err(failed)?;
    let mut body = header.begin(std::io::BufWriter::new(output))?;
    for (name, of) in predictors {
        body.tensor(&narrow_name(name), &of.narrow)?;
        body.tensor(&wide_name(name), &of.wide)?;
        let bias: Vec<u8> = of.bias.iter().flat_map(|it| it.to_le_bytes()).collect();
        body.tensor(&bias_name(name), &bias)?;
        body.tensor(&margin_name(name), &of.margin.to_le_bytes())?;
    }
    let output = body.finish()?.into_inner();
    let output = output.map_err(|error| failed(error.into_error()))?;
    output.finish().map_err(failed)
}

/// The predictor of a block.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Predictor {
    /// Elements of what it is given.
    width: usize,
    /// Elements between its two matrices.
    rank: usize,
    /// `[rank, width]` in f16.
    narrow: Vec<u8>,
    /// `[neurons, rank]` in f16.
    wide: Vec<u8>,
    bias: Vec<f32>,
    /// The score of a neuron that is as likely as not to be needed.
    pub(crate) margin: f32,
}

/// What predictors compute in.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    inner: Vec<f32>,
    scores: Vec<f32>,
}

impl Predictor {
    /// One of bytes as files have them.
    ///
    /// # Panics
    /// When they are not of these sizes.
    pub(crate) fn new(
        (width, rank): (usize, usize),
        narrow: Vec<u8>,
        wide: Vec<u8>,
        [bias, margin]: [&[u8]; 2],
    ) -> Self {
        let floats = |bytes: &[u8]| -> Vec<f32> {
            let words = bytes.as_chunks().0.iter();
            words.map(|word| f32::from_le_bytes(*word)).collect()
        };
        let of = Self {
            width,
            rank,
            narrow,
            wide,
            bias: floats(bias),
            margin: floats(margin)[0],
        };
        let half = |bytes: &[u8], rows: usize, columns: usize| bytes.len() == 2 * rows * columns;
        assert!(half(&of.narrow, rank, width) && half(&of.wide, of.neurons(), rank));
        of
    }

    pub(crate) fn neurons(&self) -> usize {
        self.bias.len()
    }

    /// Bytes of it in a file.
    fn bytes(&self) -> u64 {
        (self.narrow.len() + self.wide.len() + 4 * (self.bias.len() + 1)) as u64
    }

    /// A score of each neuron for each row of `x`, `[rows, neurons]`: that of one which it names is 0 or more.
    pub(crate) fn scores<'a>(
        &self,
        cpu: &Cpu,
        x: &[f32],
        work: &'a mut Workspace,
    ) -> &'a mut [f32] {
        let rows = x.len() / self.width;
        let of = |rows, columns, bytes| {
            let matrix = Matrix::new(DType::F16, rows, columns, bytes);
            matrix.expect("its size was looked at")
        };
        let narrow = of(self.rank, self.width, &self.narrow);
        let wide = of(self.neurons(), self.rank, &self.wide);
        let inner = first(&mut work.inner, rows * self.rank);
        cpu.matmul(inner, &plain(cpu, x, rows), &narrow);
        let scores = first(&mut work.scores, rows * self.neurons());
        let bias = Some(&self.bias[..]);
        cpu.linear_each(
            [&mut *scores],
            &plain(cpu, inner, rows),
            [(&wide, bias)],
            None,
        );
        scores
    }
}

/// The first elements of a vector that grows as it must.
fn first(values: &mut Vec<f32>, count: usize) -> &mut [f32] {
    if values.len() < count {
        values.resize(count, 0.0);
    }
    &mut values[..count]
}

/// Rows for products with matrices that are not quantized.
fn plain<'a>(cpu: &Cpu, x: &'a [f32], rows: usize) -> Activations<'a> {
    cpu.activations(x, rows, x.len() / rows, &mut [])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of each block that is foretold, its layer and the norm that it is foretold from.
    fn found(family: &str) -> Vec<(usize, (usize, &'static str))> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/families");
        let files = ModelFiles::open(&folder.join(family).join("model.gguf"));
        let made = crate::describe(&files.expect("the fixture opens")).expect("a model");
        let program = Program::new(&made.spec);
        let name = |tensor: usize| match program.tensors()[tensor] {
            TensorSpec::Vector(of) => of.name,
            TensorSpec::Matrix(of) => of.name,
            TensorSpec::Experts(of) => of.name,
        };
        let found = inputs(&program).into_iter().map(|(matrix, input)| {
            let VectorId(norm) = input.norm;
            assert_eq!(input.width, made.spec.hidden);
            let of_layer = |tensor| name(tensor).layer.expect("of a layer");
            (of_layer(matrix), (of_layer(norm), name(norm).part))
        });
        let mut found: Vec<_> = found.collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn blocks_are_foretold_from_the_norm_of_the_part_before_them() {
        // Layers that are one thing each: from that before, where it is not such a block itself.
        let of_layers = found("nemotron-h");
        assert!(of_layers.len() > 1);
        for (layer, (norm, part)) in &of_layers {
            let before = of_layers.iter().any(|(other, _)| other + 1 == *layer);
            match before {
                true => assert_eq!((*norm, *part), (*layer, "ffn_norm")),
                false => assert_eq!((*norm, *part), (layer - 1, "attn_norm")),
            }
        }
        // Norms of what attention made and of its heads read other rows.
        let within = found("gemma3n");
        assert_eq!(within.len(), 2);
        for (layer, norm) in within {
            assert_eq!(norm, (layer, "attn_norm"));
        }
        assert_eq!(found("olmo2"), []);
    }
}
