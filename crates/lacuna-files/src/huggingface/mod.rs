//! Hugging Face folders: `config.json`, one or several safetensors files, and what lies beside
//! them.
//!
//! Weights come from `model.safetensors`, or else from the files that
//! `model.safetensors.index.json` names. Everything else in the folder is opened by whoever needs
//! it, through [`Folder::file`].

mod config;
mod forms;
mod modules;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

pub use config::{Config, python_json};
pub use forms::FormError;
pub use modules::{MODULES_FILE, Module};

use super::mapping::{self, Mapping};
use super::safetensors;
use super::tensor::Tensors;

/// The model's description.
pub const CONFIG_FILE: &str = "config.json";
/// All weights in one file.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// Which weights are in which of several files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Bytes of the index and of what lies beside it at most. The index of the largest published models, with
/// hundreds of thousands of tensors, has some 15 MB.
const MAX_JSON_BYTES: usize = 64 << 20;
/// Bytes of `config.json` at most, of which a tree is made that takes dozens of times as many. Published ones
/// that list every quantized layer have some hundred thousand.
const MAX_CONFIG_BYTES: usize = 4 << 20;

/// Why a Hugging Face folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The folder does not describe a model.
    #[error("{}: has no config.json, so it is not a Hugging Face model folder{}", path.display(), hint(gguf))]
    NoConfig {
        /// The folder.
        path: PathBuf,
        /// GGUF files that are there instead.
        gguf: Vec<String>,
    },
    /// The folder has no weights in safetensors.
    #[error(
        "{}: has neither model.safetensors nor model.safetensors.index.json; download the weights, or \
         convert them to safetensors", path.display()
    )]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// A file of the folder cannot be opened.
    #[error(transparent)]
    File(#[from] mapping::Error),
    /// A JSON file is not what it should be.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the JSON parser said.
        source: serde_json::Error,
    },
    /// A JSON file is larger than any that is published.
    #[error("{}: has {bytes} bytes, more than the {limit} that are read; download it again", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
        /// What is read at most.
        limit: usize,
    },
    /// Weights in a quantized form that cannot be read.
    #[error("{}: {source}", path.display())]
    Form {
        /// The folder.
        path: PathBuf,
        /// What is wrong with them.
        source: FormError,
    },
    /// A value in `config.json` that no model can have, or that is not supported.
    #[error("{}: `{field}` is {found}, and {expected} is needed", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// What it says.
        found: String,
        /// What is needed.
        expected: &'static str,
    },
    /// The index names a file outside the folder.
    #[error("{}: names the file `{name}`, which is not a plain file name", path.display())]
    IndexName {
        /// The index.
        path: PathBuf,
        /// The name in it.
        name: String,
    },
    /// The index names a tensor that is not in the file it names.
    #[error("{}: tensor `{name}` should be in {file} and is not; download the model again", path.display())]
    IndexTensor {
        /// The index.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The file it should be in.
        file: String,
    },
    /// A weights file is damaged.
    #[error("{}: {source}", path.display())]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: safetensors::Error,
    },
    /// Two weights files have a tensor of the same name.
    #[error("{}: tensor `{name}` is in more than one file", path.display())]
    DuplicateTensor {
        /// The folder.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
}

fn hint(gguf: &[String]) -> String {
    match gguf.first() {
        Some(name) => format!("; name the GGUF file in it instead, such as {name}"),
        None => String::new(),
    }
}

/// A model folder whose `config.json` has been read.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    config: Config,
}

impl Folder {
    /// Reads and checks the folder's `config.json`.
    ///
    /// # Errors
    /// [`Error::NoConfig`], [`Error::TooLarge`], [`Error::Json`] or [`Error::Config`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let Some(bytes) = json_file_in(path, CONFIG_FILE, MAX_CONFIG_BYTES)? else {
            return Err(Error::NoConfig {
                path: path.to_owned(),
                gguf: gguf_files(path),
            });
        };
        Ok(Self {
            path: path.to_owned(),
            config: Config::read(&path.join(CONFIG_FILE), &bytes)?,
        })
    }

    /// Where the folder is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's description.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The bytes of a file in the folder, or `None` when there is no such file.
    ///
    /// # Errors
    /// [`Error::File`] when it exists and cannot be read.
    pub fn file(&self, name: &str) -> Result<Option<Mapping>, Error> {
        file_in(&self.path, name)
    }

    /// A JSON file in the folder, or `None` when there is no such file.
    ///
    /// # Errors
    /// [`Error::File`] or [`Error::Json`] when it exists and cannot be read as a `T`.
    pub fn json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Error> {
        json_in(&self.path, name)
    }

    /// Maps the weights. Matrices that several tensors make together are one tensor here.
    ///
    /// # Errors
    /// [`Error`], for missing, damaged or contradictory files, and for quantized weights of a kind that
    /// cannot be read.
    pub fn tensors(&self) -> Result<Tensors, Error> {
        let tensors = self.stored_tensors()?;
        forms::read(self.config.map(), &tensors).map_err(|source| Error::Form {
            path: self.path.clone(),
            source,
        })
    }

    /// The tensors as the files have them.
    fn stored_tensors(&self) -> Result<Tensors, Error> {
        let own = self.own_tensors()?;
        let mut parts = self.dense_tensors()?;
        if parts.is_empty() {
            return Ok(own);
        }
        parts.push(own);
        Tensors::merge(parts).map_err(|name| Error::DuplicateTensor {
            path: self.path.clone(),
            name,
        })
    }

    fn own_tensors(&self) -> Result<Tensors, Error> {
        if self.path.join(WEIGHTS_FILE).exists() {
            return weights(&self.path.join(WEIGHTS_FILE));
        }
        match index_in(&self.path)? {
            Some(index) => self.indexed(&index),
            None => Err(Error::NoWeights {
                path: self.path.clone(),
            }),
        }
    }

    fn indexed(&self, index: &Index) -> Result<Tensors, Error> {
        let mut parts = BTreeMap::new();
        for name in index.files() {
            parts.insert(name, weights(&self.path.join(name))?);
        }
        let absent = index
            .weight_map
            .iter()
            .find(|(name, file)| !parts[file.as_str()].contains(name));
        if let Some((name, file)) = absent {
            let (name, file) = (name.clone(), file.clone());
            return Err(Error::IndexTensor {
                path: self.path.join(INDEX_FILE),
                name,
                file,
            });
        }
        Tensors::merge(parts.into_values()).map_err(|name| Error::DuplicateTensor {
            path: self.path.clone(),
            name,
        })
    }
}

/// The index of a model whose weights are in several files.
#[derive(Debug, Deserialize)]
pub(super) struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// The weights files, each once.
    pub(super) fn files(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }
}

/// The folder's index, when it has one, naming only plain files.
pub(super) fn index_in(folder: &Path) -> Result<Option<Index>, Error> {
    let Some(index) = json_in::<Index>(folder, INDEX_FILE)? else {
        return Ok(None);
    };
    match index.weight_map.values().find(|name| !is_plain(name)) {
        Some(name) => Err(Error::IndexName {
            path: folder.join(INDEX_FILE),
            name: name.clone(),
        }),
        None => Ok(Some(index)),
    }
}

/// Whether a name is one component: no folders, no `..`.
fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!(
        (components.next(), components.next()),
        (Some(Component::Normal(_)), None)
    )
}

fn weights(path: &Path) -> Result<Tensors, Error> {
    Mapping::open(path)?.read(|data| {
        safetensors::parse(data).map_err(|source| Error::Weights {
            path: path.to_owned(),
            source,
        })
    })
}

fn file_in(folder: &Path, name: &str) -> Result<Option<Mapping>, Error> {
    match Mapping::open(&folder.join(name)) {
        Ok(mapping) => Ok(Some(mapping)),
        Err(mapping::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn json_in<T: DeserializeOwned>(folder: &Path, name: &str) -> Result<Option<T>, Error> {
    let Some(bytes) = json_file_in(folder, name, MAX_JSON_BYTES)? else {
        return Ok(None);
    };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|source| Error::Json {
        path: folder.join(name),
        source,
    })
}

/// The bytes of a JSON file, if there is one and it is not too large to be read.
fn json_file_in(folder: &Path, name: &str, limit: usize) -> Result<Option<Mapping>, Error> {
    let bytes = file_in(folder, name)?;
    match bytes.as_ref().map(|bytes| bytes.len()) {
        Some(bytes) if bytes > limit => Err(Error::TooLarge {
            path: folder.join(name),
            bytes,
            limit,
        }),
        _ => Ok(bytes),
    }
}

fn gguf_files(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = names
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.ends_with(".gguf"))
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests;
