//! Random models with real models' shapes, so that every benchmark can be rerun without a download.
//!
//! A synthetic model is a GGUF file that this and other engines load: the tensors, metadata and
//! vocabulary size of the model it is named after, weights drawn at random at a scale that keeps
//! activations near unit variance, and a byte-level vocabulary that encodes any text. Its text is
//! noise; its cost is the real one. Routers of models with experts choose some experts more often than
//! others, and of one token about 45 % of those of the token before, as real ones do.
//!
//! The file is a function of shape, element types, layer count and seed, byte for byte. It is
//! written in one pass with a megabyte of memory besides the header.
//!
//! ```
//! use lacuna_files::{DType, Mapping, ModelFiles};
//! use lacuna_models::synth::{Model, Shape};
//!
//! let shape = Shape::find("qwen3-0.6b")?;
//! let model = Model::new(shape, DType::Q8_0).layers(28)?;
//! assert_eq!(model.file_len()? / 1_000_000, 636);
//! # Ok::<(), lacuna_models::synth::Error>(())
//! ```

mod blocks;
mod metadata;
mod shapes;
mod types;
mod vocabulary;

#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub use crate::families::{Given, Shape, SpecialTokens, encoder_shapes, shapes};
pub use types::{Types, UnknownTypes};

use crate::error::ConfigError;
use crate::families::{self, Description};
use crate::plan::{Weight, WeightPlan};
pub(crate) use blocks::Generator;
use lacuna_files::{DType, Mapping, OutputFile, Progress, gguf};
use shapes::{Contents, TensorPlan};

/// The most layers a model can be asked to have; the largest published models have a quarter of it.
const LAYER_LIMIT: usize = 512;
/// Bytes generated at a time, about.
const PIECE: usize = 1 << 20;

/// Why a synthetic model cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No shape of this name is known.
    #[error("there is no shape `{name}`; use one of {known}")]
    UnknownShape {
        /// What was asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A number of layers that makes no model.
    #[error("a model of {layers} layers cannot be made; use 1 to {limit}")]
    Layers {
        /// What was asked for.
        layers: usize,
        /// The most there can be.
        limit: usize,
    },
    /// The shape is none of its family.
    #[error("{shape} is no model: {source}")]
    Shape {
        /// The shape's name.
        shape: &'static str,
        /// What is wrong with it.
        source: Box<ConfigError>,
    },
    /// The shape has rows that the element type cannot store.
    #[error(
        "{shape} cannot be made in {dtype}: rows of `{tensor}` have {columns} elements, and {dtype} needs \
         multiples of {}; use a type with smaller blocks, such as q8_0", dtype.block_len()
    )]
    Blocks {
        /// The shape's name.
        shape: &'static str,
        /// The element type.
        dtype: DType,
        /// The first such tensor.
        tensor: String,
        /// Its elements per row.
        columns: usize,
    },
    /// The disk is full.
    #[error("{}: the disk is full; the model takes {needed} bytes", path.display())]
    DiskFull {
        /// The file.
        path: PathBuf,
        /// Bytes of the whole model.
        needed: u64,
    },
    /// The file cannot be written.
    #[error("{}: cannot be written ({source})", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the writer said.
        source: gguf::WriteError,
    },
}

/// A model to be written.
#[derive(Clone, Debug)]
pub struct Model {
    shape: &'static Shape,
    types: Types,
    layers: usize,
    seed: u64,
}

impl Model {
    /// A model of this shape, its matrices in `types` (a [`DType`] is one for all), with its real
    /// number of layers and seed 0.
    pub fn new(shape: &'static Shape, types: impl Into<Types>) -> Self {
        Self {
            shape,
            types: types.into(),
            layers: shape.layers,
            seed: 0,
        }
    }

    /// The same with another number of layers.
    ///
    /// # Errors
    /// [`Error::Layers`] outside of 1 to 512.
    pub fn layers(self, layers: usize) -> Result<Self, Error> {
        if !(1..=LAYER_LIMIT).contains(&layers) {
            return Err(Error::Layers {
                layers,
                limit: LAYER_LIMIT,
            });
        }
        Ok(Self { layers, ..self })
    }

    /// The same drawn from another seed.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// What a program that opens the file would read of it, without making the file.
    ///
    /// # Errors
    /// [`ConfigError`] for a shape that is no model.
    pub fn description(&self) -> Result<Description, ConfigError> {
        let mut header = gguf::Writer::new();
        metadata::describe_config(&mut header, self);
        let file = gguf::File::parse(Mapping::from(header.to_bytes()))?;
        if let Some(encoder) = families::images_of_gguf(file.metadata(), &|_| None)? {
            return Ok(encoder);
        }
        let vocabulary = self.shape.vocabulary;
        let rows_of = |name: &str| {
            let is_output = name == "output.weight" && !self.shape.tied;
            is_output.then_some(vocabulary)
        };
        Description::from_gguf(file.metadata(), vocabulary, &rows_of)
    }

    /// The tensors the file would have.
    ///
    /// # Errors
    /// [`Error::Blocks`] when the shape does not fit the element type.
    pub fn weights(&self) -> Result<WeightPlan, Error> {
        let weight = |tensor: TensorPlan| {
            let columns = tensor.shape.last().copied().unwrap_or_default();
            let row_bytes = tensor.dtype.row_bytes(columns);
            let row_bytes = row_bytes.ok_or_else(|| self.bad_blocks(&tensor))?;
            let rows: usize = tensor.shape.iter().rev().skip(1).product();
            Ok(Weight {
                is_left_out: false,
                name: tensor.name,
                type_name: tensor.dtype.name().to_owned(),
                shape: tensor.shape,
                bytes: rows * row_bytes,
                converted_from: None,
            })
        };
        let tensors = self.tensors()?.into_iter().map(weight);
        let tensors = tensors.collect::<Result<_, _>>()?;
        Ok(WeightPlan::new(tensors, &self.described()?))
    }

    /// Bytes of the file.
    ///
    /// # Errors
    /// [`Error::Blocks`] when the shape does not fit the element type.
    pub fn file_len(&self) -> Result<u64, Error> {
        self.header(&self.tensors()?)
            .map(|header| header.file_len())
    }

    /// Writes the file, replacing one that is there; until it is complete it is called
    /// `<path>.part`. A device or a pipe gets it as it is made.
    ///
    /// # Errors
    /// [`Error::Blocks`], [`Error::DiskFull`] or [`Error::Write`]; no file is left then.
    pub fn write_file(&self, path: &Path, progress: &mut dyn Progress) -> Result<(), Error> {
        let tensors = self.tensors()?;
        let header = self.header(&tensors)?;
        let needed = header.file_len();
        progress.begin(&path.display().to_string(), Some(needed));
        let written = OutputFile::create(path)
            .map_err(gguf::WriteError::from)
            .and_then(|file| self.write(header, &tensors, file, progress))
            .and_then(|file| Ok(file.finish()?));
        if written.is_ok() {
            progress.finish();
        }
        written.map_err(|source| failed(path, needed, source))
    }

    /// Writes the file to any output.
    ///
    /// # Errors
    /// [`Error::Blocks`], or [`Error::DiskFull`] and [`Error::Write`] as the output fails; they
    /// call it `output`.
    pub fn write_to<W: Write>(&self, out: W) -> Result<W, Error> {
        let tensors = self.tensors()?;
        let header = self.header(&tensors)?;
        let needed = header.file_len();
        self.write(header, &tensors, out, &mut ())
            .map_err(|source| failed(Path::new("output"), needed, source))
    }

    fn tensors(&self) -> Result<Vec<TensorPlan>, Error> {
        Ok(self.shape.tensors(&self.described()?, self.types))
    }

    fn described(&self) -> Result<Description, Error> {
        self.description().map_err(|source| Error::Shape {
            shape: self.shape.name,
            source: Box::new(source),
        })
    }

    fn header(&self, tensors: &[TensorPlan]) -> Result<gguf::Writer, Error> {
        let mut header = gguf::Writer::new();
        metadata::describe(&mut header, self);
        for tensor in tensors {
            let declared = header.tensor(&tensor.name, tensor.dtype, &tensor.shape);
            declared.map_err(|_| self.bad_blocks(tensor))?;
        }
        Ok(header)
    }

    fn bad_blocks(&self, tensor: &TensorPlan) -> Error {
        Error::Blocks {
            shape: self.shape.name,
            dtype: tensor.dtype,
            tensor: tensor.name.clone(),
            columns: tensor.shape.last().copied().unwrap_or_default(),
        }
    }

    fn write<W: Write>(
        &self,
        header: gguf::Writer,
        tensors: &[TensorPlan],
        out: W,
        progress: &mut dyn Progress,
    ) -> Result<W, gguf::WriteError> {
        let mut body = header.begin(out)?;
        for (index, tensor) in tensors.iter().enumerate() {
            let generator = Generator::new(self.seed, index as u64);
            body.stream(&tensor.name, |out| stream(tensor, generator, out, progress))?;
        }
        body.finish()
    }
}

/// Writes a tensor's contents piece by piece.
fn stream(
    tensor: &TensorPlan,
    mut generator: Generator,
    out: &mut dyn Write,
    progress: &mut dyn Progress,
) -> io::Result<()> {
    let blocks = tensor.shape.iter().product::<usize>() / tensor.dtype.block_len();
    let block_bytes = tensor.dtype.block_bytes();
    let alike = match tensor.contents {
        Contents::Alike { deviation, columns } => {
            let mut alike = vec![0; columns / tensor.dtype.block_len() * block_bytes];
            generator.fill(tensor.dtype, deviation, &mut alike);
            alike
        }
        _ => Vec::new(),
    };
    let total = blocks * block_bytes;
    let columns = tensor.shape.last().map_or(0, |columns| *columns);
    let row_bytes = columns / tensor.dtype.block_len() * block_bytes;
    let mut written = 0;
    let mut piece = vec![0; total.min(PIECE / block_bytes * block_bytes)];
    while written < total {
        let length = (total - written).min(piece.len());
        let piece = &mut piece[..length];
        match &tensor.contents {
            Contents::Random { deviation } => generator.fill(tensor.dtype, *deviation, piece),
            Contents::Alike { deviation, .. } => {
                generator.fill(tensor.dtype, *deviation, piece);
                begin_rows(piece, written, row_bytes, &alike);
            }
            Contents::Given(values) => given(values, piece),
        }
        out.write_all(piece)?;
        progress.advance(length as u64);
        written += length;
    }
    Ok(())
}

/// Begins rows of `row_bytes` with the same bytes, where they are in a piece that is `at` bytes behind the
/// first row's start.
fn begin_rows(piece: &mut [u8], at: usize, row_bytes: usize, same: &[u8]) {
    let mut done = 0;
    while done < piece.len() {
        let column = (at + done) % row_bytes;
        let length = (row_bytes - column).min(piece.len() - done);
        let same = same.get(column..).unwrap_or_default();
        let same = &same[..same.len().min(length)];
        piece[done..done + same.len()].copy_from_slice(same);
        done += length;
    }
}

/// Stores values that fit one piece, as F32.
fn given(values: &[f32], out: &mut [u8]) {
    for (bytes, value) in out.chunks_exact_mut(4).zip(values) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

fn failed(path: &Path, needed: u64, source: gguf::WriteError) -> Error {
    let path = path.to_owned();
    match &source {
        gguf::WriteError::Io(error)
            if matches!(
                error.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            ) =>
        {
            Error::DiskFull { path, needed }
        }
        _ => Error::Write { path, source },
    }
}
