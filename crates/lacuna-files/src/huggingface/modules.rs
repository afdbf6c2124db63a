//! What sentence-transformers has put beside a model: `modules.json`, which lists what a text goes through.

use serde::Deserialize;

use super::{Error, Folder, WEIGHTS_FILE, is_plain, weights};
use crate::tensor::{Entry, Tensors};

/// What a text goes through, first to last.
pub const MODULES_FILE: &str = "modules.json";

/// An entry of `modules.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Module {
    /// The folder of its settings; empty for that of the model.
    #[serde(default)]
    pub path: String,
    /// Its class in Python.
    #[serde(rename = "type")]
    pub class: String,
}

impl Module {
    /// The last part of its class's name, whatever version wrote it.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or(&self.class)
    }

    /// Whether it is a product, with weights in a folder of its own.
    fn is_dense(&self) -> bool {
        self.kind() == "Dense" && is_plain(&self.path)
    }
}

/// The names that GGUF files give the weights of the first products, and so do tables of tensors here.
const DENSE: [&str; 2] = ["dense_2", "dense_3"];

impl Folder {
    /// What a text goes through, if sentence-transformers has said it.
    ///
    /// # Errors
    /// As [`Folder::json`].
    pub fn modules(&self) -> Result<Option<Vec<Module>>, Error> {
        self.json(MODULES_FILE)
    }

    /// The weights of products that come after the model.
    pub(super) fn dense_tensors(&self) -> Result<Vec<Tensors>, Error> {
        let modules = self.modules()?.unwrap_or_default();
        let dense = modules.iter().filter(|module| module.is_dense());
        let tables = dense.zip(DENSE).map(|(module, name)| {
            let path = self.path.join(&module.path).join(WEIGHTS_FILE);
            let tensors = weights(&path)?;
            let called = |entry: &Entry| Entry {
                name: entry.name.replacen("linear", name, 1).into(),
                ..entry.clone()
            };
            let entries = tensors.entries().iter().map(called).collect();
            Tensors::new(entries).map_err(|name| Error::DuplicateTensor { path, name })
        });
        tables.collect()
    }
}
