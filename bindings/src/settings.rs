//! How an engine runs and how texts are written, as apps say it.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use lacuna::{
    ByteLength, EngineConfig, FolderConfig, KvElements, Limits, Model, Penalties,
    PrefixCacheConfig, Sampling, ServiceConfig, SpecialText, SwapConfig,
};

use crate::error::LacunaError;

/// How an engine runs. What is left out is what suits most apps.
#[derive(Debug, Clone, uniffi::Record)]
pub struct EngineSettings {
    /// Bytes that may be committed for all of it: weights that are in memory, KV pages, activations. What the system can
    /// spare if it is left out. `Engine.setBudget` changes it later.
    #[uniffi(default = None)]
    pub budget_bytes: Option<u64>,
    /// Tokens that the context holds. What the model was made for if it is left out; memory follows what is used of it.
    #[uniffi(default = None)]
    pub context_tokens: Option<u64>,
    /// Threads that compute. One for each core if it is left out.
    #[uniffi(default = None)]
    pub threads: Option<u32>,
    /// Storage of KV elements: `f16`, `q8_0`, or `k=q8_0,v=iq4_nl`.
    #[uniffi(default = None)]
    pub kv_type: Option<String>,
    /// Texts that are written at once at most; others wait.
    #[uniffi(default = 4)]
    pub max_running: u32,
    /// Folder in which computed prompts outlive the process. It holds what was said. Of the app's own, private folders,
    /// the one for caches.
    #[uniffi(default = None)]
    pub cache_folder: Option<String>,
    /// Bytes that the files in that folder may come to.
    #[uniffi(default = 1073741824)]
    pub cache_folder_bytes: u64,
    /// Folder for an unnamed file, to which conversations go that wait while memory is short.
    #[uniffi(default = None)]
    pub swap_folder: Option<String>,
    /// Bytes that this file may come to.
    #[uniffi(default = 1073741824)]
    pub swap_bytes: u64,
}

impl EngineSettings {
    /// With everything left out; the same as the defaults of its fields above.
    pub(crate) fn usual() -> Self {
        Self {
            budget_bytes: None,
            context_tokens: None,
            threads: None,
            kv_type: None,
            max_running: 4,
            cache_folder: None,
            cache_folder_bytes: 1 << 30,
            swap_folder: None,
            swap_bytes: 1 << 30,
        }
    }

    pub(crate) fn config(self) -> Result<ServiceConfig, LacunaError> {
        let threads = match self.threads {
            Some(0) => return Err(LacunaError::value("threads is 0, expected 1 or more")),
            threads => threads.and_then(|threads| NonZeroUsize::new(threads as usize)),
        };
        if self.max_running == 0 {
            return Err(LacunaError::value("max_running is 0, expected 1 or more"));
        }
        let kv_elements = match self.kv_type {
            Some(name) => name.parse().map_err(LacunaError::value)?,
            None => KvElements::default(),
        };
        let engine = EngineConfig {
            threads,
            kv_elements,
            context_tokens: self.context_tokens.map(|tokens| tokens as usize),
            budget: self.budget_bytes.map(ByteLength::new),
            ..EngineConfig::default()
        };
        let folder = self.cache_folder.map(|path| FolderConfig {
            path: PathBuf::from(path),
            limit: ByteLength::new(self.cache_folder_bytes),
            remote: None,
            key: None,
        });
        let swap = self.swap_folder.map(|folder| SwapConfig {
            folder: PathBuf::from(folder),
            limit: ByteLength::new(self.swap_bytes),
        });
        Ok(ServiceConfig {
            engine,
            max_running: self.max_running as usize,
            prefix_cache: PrefixCacheConfig {
                folder,
                ..PrefixCacheConfig::default()
            },
            swap,
            ..ServiceConfig::default()
        })
    }
}

/// How a text is written. What is left out is what the model's makers recommend.
#[derive(Debug, Clone, Default, uniffi::Record)]
pub struct TextSettings {
    /// Tokens at most. Until the model ends, or the context is full, if it is left out.
    #[uniffi(default = None)]
    pub max_tokens: Option<u64>,
    /// Divides the logits; 0 takes the most likely token every time.
    #[uniffi(default = None)]
    pub temperature: Option<f32>,
    /// Only so many of the most likely tokens are drawn from; 0 for all.
    #[uniffi(default = None)]
    pub top_k: Option<u32>,
    /// Only the most likely tokens that together reach this probability.
    #[uniffi(default = None)]
    pub top_p: Option<f32>,
    /// Only tokens at least this fraction as likely as the likeliest.
    #[uniffi(default = None)]
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that came before; 1 for none.
    #[uniffi(default = None)]
    pub repetition_penalty: Option<f32>,
    /// Seed of the generator: the same seed gives the same text.
    #[uniffi(default = 0)]
    pub seed: u64,
    /// Texts that end the text, and are no part of it.
    #[uniffi(default = [])]
    pub stop: Vec<String>,
}

impl TextSettings {
    pub(crate) fn sampling(&self, model: &Model) -> Sampling {
        let with = Sampling::default().recommended_by(model.recommended_sampling());
        let repetition = self.repetition_penalty;
        Sampling {
            temperature: self.temperature.unwrap_or(with.temperature),
            top_k: self.top_k.map_or(with.top_k, |count| count as usize),
            top_p: self.top_p.unwrap_or(with.top_p),
            min_p: self.min_p.unwrap_or(with.min_p),
            penalties: Penalties {
                repetition: repetition.unwrap_or(with.penalties.repetition),
                ..with.penalties
            },
            seed: self.seed,
            ..with
        }
    }

    /// When the text ends; `special` says whether control tokens are seen, by which thoughts are told apart.
    pub(crate) fn limits(self, special: SpecialText) -> Limits {
        Limits {
            max_tokens: self.max_tokens.map(|tokens| tokens as usize),
            stop: self.stop,
            special,
            ..Limits::default()
        }
    }
}
