//! What tests of encoders have in common: a model with what its passes need, and folders as
//! sentence-transformers leaves them.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use lacuna_files::ModelFiles;
use lacuna_kernels::{Cpu, CpuConfig};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::{BatchLimits, ForwardError, LoadError, Model, Scratch, Texts};
use serde_json::{Value, json};

const LIMITS: BatchLimits = BatchLimits {
    tokens: 256,
    logit_rows: 8,
    context_tokens: 256,
};

/// A model that makes vectors of texts, with everything a pass needs.
pub(crate) struct Encoder {
    pub(crate) model: Model,
    pub(crate) cpu: Cpu,
    pub(crate) scratch: Scratch,
}

impl Encoder {
    pub(crate) fn open(path: &Path, threads: usize) -> Result<Self, LoadError> {
        let threads = NonZeroUsize::new(threads).expect("at least one");
        let config = CpuConfig {
            threads,
            ..CpuConfig::default()
        };
        Self::open_with(path, Cpu::new(config).expect("this machine's own level"))
    }

    pub(crate) fn open_with(path: &Path, cpu: Cpu) -> Result<Self, LoadError> {
        let model = Model::load(ModelFiles::open(path)?)?;
        let plan = ArenaPlan::new(model.program(), LIMITS).expect("small");
        Ok(Self {
            cpu,
            scratch: Scratch::new(model.program(), plan).expect("a few kilobytes"),
            model,
        })
    }

    pub(crate) fn embed(&mut self, texts: &[Vec<u32>]) -> Result<Vec<f32>, ForwardError> {
        self.vectors(&texts.iter().collect())
    }

    pub(crate) fn vectors(&mut self, texts: &Texts) -> Result<Vec<f32>, ForwardError> {
        let found = self.model.embed(&self.cpu, texts, &mut self.scratch)?;
        Ok(found.to_vec())
    }
}

/// A copy of a model's folder with other files beside the model's own.
pub(crate) fn folder_with(folder: &Path, files: &[(&str, Value)]) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a scratch folder");
    copy_into(folder, copy.path());
    for (name, value) in files {
        let path = copy.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("room for it");
        fs::write(path, value.to_string()).expect("room for it");
    }
    copy
}

fn copy_into(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("room for it");
    for entry in fs::read_dir(from).expect("a committed folder") {
        let path = entry.expect("readable").path();
        let to = to.join(path.file_name().expect("a name"));
        match path.is_dir() {
            true => copy_into(&path, &to),
            false => drop(fs::copy(&path, to).expect("room to copy")),
        }
    }
}

/// `modules.json` of a pipeline of these kinds.
pub(crate) fn modules(kinds: &[&str]) -> Value {
    let module = |(index, kind): (usize, &&str)| {
        let path = match *kind {
            "Transformer" => String::new(),
            kind => format!("{index}_{kind}"),
        };
        json!({"idx": index, "name": index.to_string(), "path": path,
               "type": format!("sentence_transformers.models.{kind}")})
    };
    kinds.iter().enumerate().map(module).collect()
}

/// The configuration of a pooling module.
pub(crate) fn mode(pooling: &str) -> Value {
    json!({match pooling {
        "mean" => "pooling_mode_mean_tokens",
        "first" => "pooling_mode_cls_token",
        _ => "pooling_mode_lasttoken",
    }: true})
}
