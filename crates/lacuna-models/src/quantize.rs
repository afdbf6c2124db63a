//! Models in other element types: any model's files become one GGUF file, its matrices quantized.
//!
//! A [`Plan`] says what will be written before anything is: which type each tensor gets, and how long
//! the file will be. Tensors are then read, decoded, quantized and written in pieces of 65,536 weights, one
//! piece per thread at a time, so that memory does not grow with the model; the file appears when it is
//! whole. Of a folder whose weights are quantized already, one tensor at a time is converted and held, once when it
//! is planned, to see that it can be, and once when it is written.
//!
//! ```
//! use lacuna_models::quantize::{Plan, Recipe};
//!
//! let model = lacuna_models::demo();
//! let plan = Plan::new(&model, Recipe::Q4KM)?;
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("demo-q4_k_m.gguf");
//! plan.write_file(&path, std::num::NonZeroUsize::MIN, &mut ())?;
//! assert_eq!(std::fs::metadata(&path)?.len(), plan.file_len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocks;
mod folder;
mod input;
pub(crate) mod recipe;

#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::thread;

pub use recipe::{Recipe, UnknownRecipe};

use crate::error::{ConfigError, LoadError};
use crate::families::heads;
use blocks::Unfit;
use folder::Converted;
use input::{Input, Opened};
use lacuna_files::gguf::{self, Value};
use lacuna_files::{
    DType, LostFile, Mapping, Metadata, ModelFiles, OutputFile, Progress, Summary, TensorError,
    Tensors, TypeTotal,
};
use lacuna_text::tokenizer::TokenizerError;

/// Weights that a thread quantizes at a time: a whole number of blocks of every type, few enough that
/// what they are in every stage stays in a processor's cache.
const PIECE: usize = 1 << 16;
/// Pieces that a thread may be ahead of what is written.
const AHEAD: usize = 2;
/// More layers than any model has, so that what is computed from a made-up number does not overflow.
const LAYERS_READ: usize = 1 << 16;
/// The version of block layouts that `general.quantization_version` stands for.
const QUANTIZATION_VERSION: u32 = 2;

/// Why a model cannot be quantized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file's metadata is not what it should be.
    #[error(transparent)]
    Metadata(#[from] gguf::Error),
    /// A tensor cannot be read.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// What a folder says of its model is not what can be run.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A folder lacks a tensor, or has one that its model has no use for.
    #[error(transparent)]
    Weights(#[from] LoadError),
    /// A folder's vocabulary cannot be read, or GGUF has no form for it.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// GGUF files do not describe such a model, or not as it is known here.
    #[error(
        "folders of the family `{family}` are not converted to GGUF here; quantize a GGUF file that another program has made of it"
    )]
    Family {
        /// The family.
        family: &'static str,
    },
    /// A folder has a head that guesses tokens for a model.
    #[error(
        "folders of heads are not converted to GGUF here; use the folder as it is, or quantize a GGUF file that another program has made of it"
    )]
    Head,
    /// The file has no tensors, or none of them is a matrix.
    #[error("the file has no weights to quantize; it may be a vocabulary only")]
    NoWeights,
    /// A tensor holds infinities or what is no number.
    #[error(
        "tensor `{tensor}` has a weight that is no finite number, so the model is damaged; download it again"
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
    },
    /// A tensor's weights are beyond what the type can hold.
    #[error("tensor `{tensor}` has weights too large for {dtype}; use bf16 or f32")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// The type.
        dtype: DType,
    },
    /// The system refuses a thread.
    #[error("cannot start a thread ({0}); use fewer threads")]
    Thread(io::Error),
    /// A file became shorter or unreadable while it was read.
    #[error(transparent)]
    Lost(#[from] LostFile),
    /// A tensor's bytes cannot be read.
    #[error("tensor `{tensor}` cannot be read ({source}); see whether the file is still whole")]
    Read {
        /// The tensor.
        tensor: String,
        /// What the system said.
        source: io::Error,
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

/// What a file will hold.
#[derive(Debug)]
pub struct Plan {
    header: gguf::Writer,
    tensors: Vec<Item>,
    /// Lists of whole numbers, which are written as they are: of tokens that a head guesses, or the order of its tables.
    lists: Vec<List>,
    recipe: Recipe,
    /// What is read.
    files: Tensors,
}

/// A list to be written.
#[derive(Debug)]
struct List {
    name: String,
    kind: gguf::Integers,
    numbers: Vec<i64>,
}

/// A tensor to be written.
#[derive(Debug)]
struct Item {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    input: Input,
}

impl Plan {
    /// Looks at all that `files` say of the model, and at no weights, but those of a folder that have to be converted.
    ///
    /// # Errors
    /// [`Error`], for files that are damaged, of types that are not read, or without weights.
    pub fn new(files: &ModelFiles, recipe: Recipe) -> Result<Self, Error> {
        let tensors = files.tensors();
        let metadata = match files.metadata() {
            Metadata::Gguf(metadata) => metadata,
            metadata @ Metadata::HuggingFace(_) if heads::is_head(metadata) => {
                return Err(Error::Head);
            }
            Metadata::HuggingFace(folder) => {
                let Converted {
                    header,
                    metadata,
                    items,
                } = folder::convert(folder, tensors)?;
                let model = model(&metadata, &items)?;
                return Self::of(header, (items, Vec::new()), &model, recipe, tensors);
            }
        };
        let mut header = gguf::Writer::new();
        header.carry(metadata);
        let (items, lists) = items(tensors)?;
        let model = model(metadata, &items)?;
        Self::of(header, (items, lists), &model, recipe, tensors)
    }

    fn of(
        mut header: gguf::Writer,
        (mut tensors, lists): (Vec<Item>, Vec<List>),
        model: &recipe::Model,
        recipe: Recipe,
        files: &Tensors,
    ) -> Result<Self, Error> {
        if !tensors
            .iter()
            .any(|item| is_quantized(&item.name, &item.shape))
        {
            return Err(Error::NoWeights);
        }
        header
            .set("general.file_type", recipe.file_type())
            .set("general.quantization_version", QUANTIZATION_VERSION);
        choose(&mut tensors, model, recipe);
        for Item {
            name, shape, dtype, ..
        } in &tensors
        {
            let declared = header.tensor(name, *dtype, shape);
            declared.map_err(|source| Error::Write {
                path: "output".into(),
                source,
            })?;
        }
        for List {
            name,
            kind,
            numbers,
        } in &lists
        {
            header.integers(name, *kind, numbers.len());
        }
        Ok(Self {
            header,
            tensors,
            lists,
            recipe,
            files: files.clone(),
        })
    }

    /// What was asked for.
    #[must_use]
    pub fn recipe(&self) -> Recipe {
        self.recipe
    }

    /// Bytes of the file.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.header.file_len()
    }

    /// Counts and bytes of the file's tensors by type, largest first.
    #[must_use]
    pub fn by_type(&self) -> Vec<TypeTotal> {
        TypeTotal::of(self.tensors.iter().map(Item::summary))
    }

    /// How many tensors are decoded from a type that lost something already, and lose more.
    #[must_use]
    pub fn requantized(&self) -> usize {
        let again = |item: &&Item| item.input.is_quantized() && !item.is_copied();
        self.tensors.iter().filter(again).count()
    }

    /// Writes the file with so many threads, replacing one that is there; until it is complete it is
    /// called `<path>.part`. A device or a pipe gets it as it is made.
    ///
    /// # Errors
    /// [`Error`], naming the tensor or the file; no file is left then, and one that was there stays.
    pub fn write_file(
        &self,
        path: &Path,
        threads: NonZeroUsize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let needed = self.file_len();
        let refused = |source| failed(path, needed, source);
        progress.begin(&path.display().to_string(), Some(needed));
        let output = OutputFile::create(path).map_err(|source| refused(source.into()))?;
        let mut body = self.header.clone().begin(output).map_err(refused)?;
        for item in &self.tensors {
            let mut unread = None;
            let written = body.stream(&item.name, |out| {
                item.write(&self.files, threads, out, progress)
                    .map_err(|stop| match stop {
                        Stop::Output(source) => source,
                        Stop::Input(error) => {
                            unread = Some(error);
                            io::ErrorKind::Interrupted.into()
                        }
                    })
            });
            match (unread, written) {
                (Some(error), _) => return Err(error),
                (None, written) => written.map_err(refused)?,
            }
            self.files.release_sources();
        }
        for List {
            name,
            kind,
            numbers,
        } in &self.lists
        {
            let bytes = kind.encode(numbers);
            body.tensor(name, &bytes).map_err(refused)?;
            progress.advance(bytes.len() as u64);
        }
        let output = body.finish().map_err(refused)?;
        // What was cut off while it was read is zeros, which must not replace a file that is good.
        self.files.mappings().iter().try_for_each(Mapping::check)?;
        output.finish().map_err(|source| refused(source.into()))?;
        progress.finish();
        Ok(())
    }
}

/// Why writing a tensor ended early.
enum Stop {
    Input(Error),
    Output(io::Error),
}

impl Item {
    fn summary(&self) -> Summary<'_> {
        Summary {
            name: &self.name,
            type_name: self.dtype.name(),
            converted_from: None,
            shape: &self.shape,
            bytes: self.elements() / self.dtype.block_len() * self.dtype.block_bytes(),
        }
    }

    /// A product that files' own headers were checked for.
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether its bytes are written as they are.
    fn is_copied(&self) -> bool {
        self.input.dtype() == Some(self.dtype)
    }

    /// Writes its pieces in order. Each thread makes every so many-th of them. What is converted for it is let go of
    /// at the end.
    fn write(
        &self,
        files: &Tensors,
        threads: NonZeroUsize,
        out: &mut dyn Write,
        progress: &mut dyn Progress,
    ) -> Result<(), Stop> {
        let input = self.input.open(files);
        let input = input.map_err(|error| Stop::Input(error.into()))?;
        let elements = self.elements();
        let pieces = elements.div_ceil(PIECE);
        let threads = threads.get().min(pieces);
        let piece = |number: usize| {
            let start = number * PIECE;
            self.piece(&input, start..elements.min(start + PIECE))
        };
        thread::scope(|scope| {
            let queues = (0..threads).map(|thread| {
                let (sender, receiver) = sync_channel(AHEAD);
                let make = move || {
                    // Ends early when nobody waits for pieces any more.
                    (thread..pieces)
                        .step_by(threads)
                        .all(|number| sender.send(piece(number)).is_ok())
                };
                let started = thread::Builder::new().spawn_scoped(scope, make);
                started.map_err(|source| Stop::Input(Error::Thread(source)))?;
                Ok(receiver)
            });
            let queues = queues.collect::<Result<Vec<_>, Stop>>()?;
            for number in 0..pieces {
                let made = queues[number % threads].recv();
                let bytes = made
                    .expect("a thread sends all of its pieces")
                    .map_err(Stop::Input)?;
                out.write_all(&bytes).map_err(Stop::Output)?;
                progress.advance(bytes.len() as u64);
            }
            Ok(())
        })
    }

    /// The bytes of a range of weights, which is whole blocks.
    fn piece(&self, input: &Opened, range: Range<usize>) -> Result<Vec<u8>, Error> {
        let unread = |source| Error::Read {
            tensor: self.name.clone(),
            source,
        };
        let mut bytes = vec![0; range.len() / self.dtype.block_len() * self.dtype.block_bytes()];
        if self.is_copied() {
            input.copy(range.start, &mut bytes).map_err(unread)?;
            return Ok(bytes);
        }
        let mut values = vec![0.0; range.len()];
        input.decode(range.start, &mut values).map_err(unread)?;
        let stored = blocks::quantize(self.dtype, &values, &mut bytes);
        stored.map(|()| bytes).map_err(|unfit| match unfit {
            Unfit::NotFinite => Error::NotFinite {
                tensor: self.name.clone(),
            },
            Unfit::TooLarge => Error::TooLarge {
                tensor: self.name.clone(),
                dtype: self.dtype,
            },
        })
    }
}

/// All tensors, as they are in the files, and lists of whole numbers.
fn items(tensors: &Tensors) -> Result<(Vec<Item>, Vec<List>), Error> {
    let (mut items, mut lists) = (Vec::new(), Vec::new());
    for summary in tensors.iter() {
        let name = summary.name.to_owned();
        let kind = gguf::Integers::of_name(summary.type_name).filter(|_| summary.shape.len() == 1);
        if let Some(kind) = kind {
            let numbers = tensors.integers(&name)?.unwrap_or_default();
            lists.push(List {
                name,
                kind,
                numbers,
            });
            continue;
        }
        let input = Input::of_files(tensors, &name)?;
        let dtype = input.dtype().expect("nothing is in another order yet");
        items.push(Item {
            name,
            shape: summary.shape.to_vec(),
            dtype,
            input,
        });
    }
    Ok((items, lists))
}

/// Layer, part and suffix of a tensor's name: `blk.3.attn_v.weight` is `attn_v` of layer 3.
fn parts(name: &str) -> (Option<usize>, &str, &str) {
    let in_block = name.strip_prefix("blk.").and_then(|rest| {
        let (layer, rest) = rest.split_once('.')?;
        Some((layer.parse().ok()?, rest))
    });
    let (layer, rest) = match in_block {
        Some((layer, rest)) => (Some(layer), rest),
        None => (None, name),
    };
    let (part, suffix) = rest.rsplit_once('.').unwrap_or((rest, ""));
    (layer, part, suffix)
}

/// Parts whose matrices are small and decide what else is computed, or are of no product.
const KEPT: [&str; 5] = [
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv",
];

/// Whether a tensor is one that recipes are about. The others stay as they are.
fn is_quantized(name: &str, shape: &[usize]) -> bool {
    let (_, part, suffix) = parts(name);
    // Dimensions of 1 at the outside do not count.
    let dimensions = shape.iter().skip_while(|&&dim| dim == 1).count();
    dimensions >= 2
        && suffix == "weight"
        && !part.ends_with("_norm")
        && !part.starts_with("ffn_gate_inp")
        && !matches!(part, "position_embd" | "token_types")
        && !KEPT.iter().any(|kept| part.contains(kept))
}

/// Gives each tensor the type that `recipe` has for it.
fn choose(items: &mut [Item], model: &recipe::Model, recipe: Recipe) {
    let with_values = value_layers(items);
    for item in items {
        if !is_quantized(&item.name, &item.shape) {
            continue;
        }
        let (layer, part, _) = parts(&item.name);
        let layer = layer.unwrap_or(0);
        let matrix = recipe::Matrix {
            part,
            layer,
            value_layer: with_values.partition_point(|other| *other < layer),
            stacked: part.ends_with("_exps"),
            columns: item.shape.last().copied().unwrap_or(1),
        };
        item.dtype = recipe.dtype(model, &matrix);
    }
}

/// The layers that have values of their own, in order.
fn value_layers(items: &[Item]) -> Vec<usize> {
    let layers = items.iter().filter_map(|item| match parts(&item.name) {
        (Some(layer), "attn_v" | "attn_qkv" | "attn_kv_b", "weight") => Some(layer),
        _ => None,
    });
    let mut layers: Vec<usize> = layers.collect();
    layers.sort_unstable();
    layers.dedup();
    layers
}

/// What recipes ask about a model, from its metadata and its tensors.
fn model(metadata: &gguf::Metadata, items: &[Item]) -> Result<recipe::Model, Error> {
    let family: &str = metadata.require("general.architecture")?;
    // Where each layer has a number of its own, the largest stands for all.
    let number = |key: &str| {
        let value = metadata.get::<Value<'_>>(&format!("{family}.{key}"));
        value.map(|value| value.and_then(largest).unwrap_or(0))
    };
    let last = items.iter().filter_map(|item| parts(&item.name).0).max();
    let layers = match number("block_count")? {
        0 => last.map_or(0, |last| last.saturating_add(1)),
        layers => layers,
    };
    let layers = layers.min(LAYERS_READ);
    let kv_heads = number("attention.head_count_kv")?;
    let group = number("attention.head_count")?.checked_div(kv_heads);
    Ok(recipe::Model {
        layers,
        value_layers: value_layers(items).len(),
        group: group.unwrap_or(1),
        experts: number("expert_count")?,
        tied: !items.iter().any(|item| item.name == "output.weight"),
    })
}

/// A whole number, or the largest of several.
fn largest(value: Value<'_>) -> Option<usize> {
    match value {
        Value::Array(array) => array.scalars()?.filter_map(largest).max(),
        Value::Unsigned(number) => usize::try_from(number).ok(),
        Value::Signed(number) => usize::try_from(number).ok(),
        _ => None,
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
