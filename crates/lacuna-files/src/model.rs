//! The one front door: a path becomes metadata and tensors, whatever the format.

use std::path::{Path, PathBuf};

use super::mapping::{self, LostFile, Mapping};
use super::tensor::Tensors;
use super::{gguf, huggingface};

/// Why a model's files cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be mapped.
    #[error(transparent)]
    File(#[from] mapping::Error),
    /// The file is not a usable GGUF file.
    #[error("{}: {source}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: gguf::Error,
    },
    /// The folder is not a usable Hugging Face folder.
    #[error(transparent)]
    HuggingFace(#[from] huggingface::Error),
    /// A safetensors file has weights and nothing else.
    #[error(
        "{}: a safetensors file does not describe its model; name the folder that has it and its \
         config.json", path.display()
    )]
    LoneWeights {
        /// The file.
        path: PathBuf,
    },
}

/// What a model's files say about it, besides its tensors.
#[derive(Clone, Debug)]
pub enum Metadata {
    /// GGUF key-value pairs.
    Gguf(gguf::Metadata),
    /// `config.json` and the files beside it.
    HuggingFace(Box<huggingface::Folder>),
}

/// A model's files, opened: metadata read, tensors found, nothing copied.
///
/// ```no_run
/// use std::path::Path;
/// use lacuna_files::ModelFiles;
///
/// let files = ModelFiles::open(Path::new("model.gguf"))?;
/// for total in files.tensors().by_type() {
///     println!("{} {} tensors, {} bytes", total.type_name, total.tensors, total.bytes);
/// }
/// # Ok::<(), lacuna_files::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModelFiles {
    metadata: Metadata,
    tensors: Tensors,
    columns: Option<Tensors>,
    predictors: Option<Tensors>,
    head: Option<Head>,
}

/// What the files of a head say that stands beside a model's.
#[derive(Clone, Debug)]
struct Head {
    metadata: Metadata,
    /// Mappings before those of its own tensors.
    before: usize,
}

impl ModelFiles {
    /// Opens a GGUF file, the first of several, or a Hugging Face folder.
    ///
    /// # Errors
    /// [`Error`], naming the file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if path.is_dir() {
            return Self::open_folder(path);
        }
        Mapping::open(path)?.read(|data| Self::open_file(path, data))
    }

    fn open_file(path: &Path, data: &Mapping) -> Result<Self, Error> {
        let is_gguf = data.starts_with(&gguf::MAGIC);
        if !is_gguf
            && path
                .extension()
                .is_some_and(|extension| extension == "safetensors")
        {
            return Err(Error::LoneWeights {
                path: path.to_owned(),
            });
        }
        Self::from_gguf(data.clone()).map_err(|source| Error::Gguf {
            path: path.to_owned(),
            source,
        })
    }

    /// Opens a GGUF file that is already mapped, or in memory.
    ///
    /// # Errors
    /// [`gguf::Error`].
    pub fn from_gguf(data: Mapping) -> Result<Self, gguf::Error> {
        let file = gguf::File::open(data)?;
        Ok(Self {
            metadata: Metadata::Gguf(file.metadata().clone()),
            tensors: file.tensors().clone(),
            columns: None,
            predictors: None,
            head: None,
        })
    }

    fn open_folder(path: &Path) -> Result<Self, Error> {
        let folder = huggingface::Folder::open(path)?;
        let tensors = folder.tensors()?;
        Ok(Self {
            metadata: Metadata::HuggingFace(Box::new(folder)),
            tensors,
            columns: None,
            predictors: None,
            head: None,
        })
    }

    /// The same with a file of columns, made of some of their matrices, beside them.
    #[must_use]
    pub fn with_columns(self, columns: Tensors) -> Self {
        Self {
            columns: Some(columns),
            ..self
        }
    }

    /// The same with a file of predictors, which say beforehand what of these columns is needed.
    #[must_use]
    pub fn with_predictors(self, predictors: Tensors) -> Self {
        Self {
            predictors: Some(predictors),
            ..self
        }
    }

    /// The same with the files of a head that guesses tokens for it: their tensors beside its own, under the names that
    /// `rename` gives them.
    ///
    /// # Errors
    /// The name that is taken already.
    pub fn with_head(
        self,
        head: &Self,
        rename: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        Ok(Self {
            head: Some(Head {
                metadata: head.metadata.clone(),
                before: self.tensors.mappings().len(),
            }),
            tensors: self.tensors.beside(&head.tensors, rename)?,
            ..self
        })
    }

    /// What the files of its head say besides tensors, if it has been given one.
    #[must_use]
    pub fn head_metadata(&self) -> Option<&Metadata> {
        self.head.as_ref().map(|head| &head.metadata)
    }

    /// What the model's own tensors lie in, each once.
    pub(crate) fn own_mappings(&self) -> &[Mapping] {
        let all = self.tensors.mappings();
        let own = self.head.as_ref().map_or(all.len(), |head| head.before);
        &all[..own]
    }

    /// The GGUF files beside theirs that have the part of a model that sees, by their names, which have `mmproj` in them:
    /// none for Hugging Face folders.
    #[must_use]
    pub fn projectors_beside(&self) -> Vec<PathBuf> {
        self.list_projectors().unwrap_or_default()
    }

    fn list_projectors(&self) -> Option<Vec<PathBuf>> {
        let Metadata::Gguf(_) = self.metadata else {
            return None;
        };
        let own = self.tensors.mappings().first()?.path()?;
        let entries = own.parent()?.read_dir().ok()?;
        let found = entries.filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?.to_lowercase();
            let is_projector = name.contains("mmproj") && name.ends_with(".gguf");
            (is_projector && path != own).then_some(path)
        });
        Some(found.collect())
    }

    /// What the files say besides tensors.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Columns of some of their matrices, if there is a file of them.
    pub fn columns(&self) -> Option<&Tensors> {
        self.columns.as_ref()
    }

    /// What says beforehand which of those columns are needed, if there is a file of it.
    pub fn predictors(&self) -> Option<&Tensors> {
        self.predictors.as_ref()
    }

    /// Lets go of the memory behind what is mapped: reading it again reads the files, or what the system still has of them.
    /// Worth a call when most of it has been copied elsewhere.
    pub fn release(&self) {
        for mapping in self.tensors.mappings() {
            mapping.release(0..mapping.len());
        }
    }

    /// Whether the files are still there whole, as far as anyone has looked: see
    /// [`guard_mappings`](super::guard_mappings). Costs a system call for each file.
    ///
    /// # Errors
    /// [`LostFile`], for the first that is not. What was read or computed since the last check is of
    /// no use then.
    pub fn check(&self) -> Result<(), LostFile> {
        self.tensors.mappings().iter().try_for_each(Mapping::check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gguf_file_opens_whatever_it_is_called() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.bin");
        let mut header = gguf::Writer::new();
        header.set("general.architecture", "llama");
        std::fs::write(&path, header.to_bytes()).unwrap();
        let files = ModelFiles::open(&path).unwrap();
        let Metadata::Gguf(metadata) = files.metadata() else {
            panic!("not GGUF")
        };
        assert_eq!(
            metadata.require::<&str>("general.architecture").unwrap(),
            "llama"
        );
        assert!(files.tensors().is_empty());
    }

    #[test]
    fn what_is_no_model_is_a_typed_error_that_names_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        std::fs::write(path.join("model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
        std::fs::write(path.join("text.gguf"), b"# not a model").unwrap();
        let error = |name: &str| ModelFiles::open(&path.join(name)).unwrap_err();
        assert!(matches!(
            error("model.safetensors"),
            Error::LoneWeights { .. }
        ));
        assert!(matches!(error("text.gguf"), Error::Gguf { .. }));
        assert!(matches!(
            error("none.gguf"),
            Error::File(mapping::Error::NotFound { .. })
        ));
        assert!(matches!(
            error("."),
            Error::HuggingFace(huggingface::Error::NoConfig { .. })
        ));
        assert!(
            error("text.gguf")
                .to_string()
                .contains("text.gguf: not a GGUF file")
        );
    }
}
