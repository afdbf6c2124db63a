//! Arguments that several commands take, and the settings they stand for.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use lacuna_engine::{DraftModel, EngineConfig, PrefixCacheConfig, ServiceConfig, Speculation};
use lacuna_kernels::PrecisionMode;
use lacuna_kv::folder::{CacheKey, FolderConfig, KeyError};
use lacuna_kv::swap::SwapConfig;
use lacuna_kv::{KvElements, KvPolicy};
use lacuna_models::plan::WeightMode;
use lacuna_models::spec::ImageTokenBounds;
use lacuna_models::{DeviceLayers, FiniteCheck};
use lacuna_pages::ByteLength;

use crate::bytes::ByteCount;
use crate::output::Usage;

const MODEL_HELP: &str =
    "`demo`, a GGUF file, a Hugging Face folder, or a hub id such as Qwen/Qwen3-0.6B";

/// Where the model is and how the result is printed.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// The model, by any of the names that [`crate::open_files`] takes.
    #[arg(help = MODEL_HELP, long_help = MODEL_HELP)]
    pub model: String,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub json: bool,
    /// The part that sees.
    #[command(flatten)]
    pub eyes: EyesArgs,
}

/// The part of a model that sees.
#[derive(Debug, Clone, Default, Args)]
pub struct EyesArgs {
    /// GGUF file of the part of the model that sees [default: of a GGUF model, the file beside it whose name has
    /// `mmproj` in it; Hugging Face folders have it with the rest]
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<PathBuf>,
    /// Tokens of an image at most, of models whose images have sizes of their own (Qwen, Pixtral, Gemma 4): larger ones are
    /// made smaller, which takes less memory and time [default: what the model's files say, of Qwen's no more than 1280]
    #[arg(long, value_name = "TOKENS")]
    pub image_max_tokens: Option<NonZeroUsize>,
    /// Tokens of an image at least, of the same models: smaller ones are made larger [default: what the model's files say,
    /// of Gemma 4 as many as it has at most]
    #[arg(long, value_name = "TOKENS")]
    pub image_min_tokens: Option<NonZeroUsize>,
}

impl EyesArgs {
    /// How many tokens images are held to.
    #[must_use]
    pub const fn tokens(&self) -> ImageTokenBounds {
        ImageTokenBounds {
            least: self.image_min_tokens,
            most: self.image_max_tokens,
        }
    }

    /// The first option that is given.
    #[must_use]
    pub fn given(&self) -> Option<&'static str> {
        let options = [
            ("--mmproj", self.mmproj.is_some()),
            ("--image-max-tokens", self.image_max_tokens.is_some()),
            ("--image-min-tokens", self.image_min_tokens.is_some()),
        ];
        let mut given = options.into_iter().filter(|(_, given)| *given);
        given.next().map(|(option, _)| option)
    }
}

/// How the engine is set up.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Tokens the context holds [default: what the model was made for]
    #[arg(long, value_name = "TOKENS")]
    pub ctx: Option<NonZeroUsize>,
    /// How KV memory is held: sparse (pages as tokens arrive), dense (all at start), paged or
    /// paged:TOKENS (blocks that a table finds), grow:mlx or grow:double-linear[:CELLS] (copies to
    /// grow); sparse and dense also as :head-major or :interleaved=LAYERS, which sparse without a layout is with
    /// --device, with as many layers as there are
    #[expect(
        rustdoc::broken_intra_doc_links,
        reason = "brackets are what may be left out"
    )]
    #[arg(long, value_name = "POLICY", default_value = "sparse")]
    pub kv: KvPolicy,
    /// Storage of KV elements: f32, f16, bf16, q8_0, iq4_nl or q4_0, or each side its own: k=q8_0,v=iq4_nl. With
    /// keys in four bits a text of 256 tokens is computed at start, by which they are rounded better
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv_type: KvElements,
    /// Bytes that the process may commit, such as 2GiB or 512MiB: everything, weights included unless they are
    /// mapped (--weights), but the pages of files [default: what the system can spare]
    #[arg(long, value_name = "BYTES")]
    pub budget: Option<ByteCount>,
    /// How weights are had: mmap (where the file is mapped, beside a budget), pread or direct (read into memory,
    /// through the page cache or past it; as much of them as a budget holds, the rest for each pass), or auto:
    /// direct with a budget, unless it is too small for that, and mmap without
    #[arg(long, value_name = "WAY", default_value = "auto")]
    pub weights: WeightMode,
    /// Folder for a file in which neurons lie one by one, made at first use: of feed-forward blocks whose activations are
    /// exactly zero for most (ReLU, squared ReLU, gates as in Gemma 3n), only those are read that a token needs, past what a budget holds;
    /// ahead of time as far as predictors say (fit-predictors)
    #[arg(long, value_name = "DIR")]
    pub neurons: Option<PathBuf>,
    /// How the processor computes.
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// Look for values that are not finite after each layer, and stop with its name
    #[arg(long)]
    pub check_finite: bool,
}

/// How the processor computes.
#[derive(Debug, Args)]
pub struct CpuArgs {
    /// Threads that compute [default: one per core]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// How products with F32, F16 and BF16 weights are computed, and attention (scores of keys in eight and four
    /// bits are integers): f32, alike on all processors; bf16, from numbers rounded to it, of which processors with
    /// AVX-512 BF16 or AMX multiply more at once; or auto, the faster one, which is bf16 on AMD's processors since
    /// Zen 5, and with AMX in attention where many query heads share a head of K and V
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = precisions())]
    pub matmul_precision: PrecisionMode,
}

/// The names of precisions, and what they stand for.
fn precisions() -> impl TypedValueParser<Value = PrecisionMode> {
    PossibleValuesParser::new(PrecisionMode::ALL.map(PrecisionMode::name)).map(|name| {
        let named = PrecisionMode::ALL
            .into_iter()
            .find(|precision| precision.name() == name);
        named.unwrap_or_default()
    })
}

/// What computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// The processor.
    #[default]
    Cpu,
    /// A Vulkan device: the one at a place in the driver's list, or the best, a GPU before a software driver.
    #[cfg(feature = "vulkan")]
    Vulkan(Option<usize>),
}

/// A name of no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no device `{name}`; use {known}")]
pub struct UnknownDevice {
    name: String,
    known: &'static str,
}

impl FromStr for DeviceName {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, UnknownDevice> {
        #[cfg(feature = "vulkan")]
        if let Some(Ok(place)) = name.strip_prefix("vulkan:").map(str::parse) {
            return Ok(Self::Vulkan(Some(place)));
        }
        match name {
            "cpu" => Ok(Self::Cpu),
            #[cfg(feature = "vulkan")]
            "vulkan" => Ok(Self::Vulkan(None)),
            _ => Err(UnknownDevice {
                name: name.to_owned(),
                known: match cfg!(feature = "vulkan") {
                    true => {
                        "cpu, vulkan, or vulkan:N with the number of one of the driver's devices, from 0"
                    }
                    false => "cpu, or a program that was built with the feature `vulkan`",
                },
            }),
        }
    }
}

/// What computes, for commands that leave the choice.
#[derive(Debug, Args)]
pub struct DeviceArgs {
    /// What computes the model: cpu, or vulkan, the best Vulkan device, a GPU before a software driver, or vulkan:N, the
    /// N-th that the driver lists, from 0: decoders with weights of four bits and more
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceName,
    /// How many of the last layers --device computes, and the output with them, with the KV rows of each layer beside it;
    /// the processor computes those before. auto: as many as there is memory for; all, or a number: so many
    #[arg(
        long,
        alias = "n-gpu-layers",
        value_name = "N",
        allow_negative_numbers = true
    )]
    pub gpu_layers: Option<DeviceLayers>,
}

impl DeviceArgs {
    /// How many layers the device computes that was named.
    ///
    /// # Errors
    /// When none was, and a number of layers is asked of it.
    pub fn layers(&self) -> Result<DeviceLayers, LayersWithoutDevice> {
        match (self.device, self.gpu_layers) {
            (DeviceName::Cpu, Some(_)) => Err(LayersWithoutDevice),
            (_, layers) => Ok(layers.unwrap_or_default()),
        }
    }
}

/// Layers that no device was named for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--gpu-layers is for a GPU; name one with --device, or leave it out")]
pub struct LayersWithoutDevice;

/// How a server is set up, besides its engine.
#[derive(Debug, Args)]
pub struct ServiceArgs {
    /// Replies that are generated at once at most
    #[arg(long, value_name = "N", default_value = "32")]
    pub max_running: NonZeroUsize,
    /// Requests that may wait; those beyond are told to try again
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_queue: usize,
    /// Tokens computed in one step at most
    #[arg(
        long,
        alias = "step-tokens",
        value_name = "TOKENS",
        default_value = "256"
    )]
    pub max_batched_tokens: NonZeroUsize,
    /// Tokens of prompts computed in one step at most while replies flow: fewer keep them smoother
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub mixed_tokens: NonZeroUsize,
    /// Compute every prompt from its first token, instead of sharing what begins the same
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Folder in which computed prompts outlive the server: it holds what was said. Off without it
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix_cache")]
    pub kv_cache: Option<PathBuf>,
    /// Bytes that the folder of --kv-cache may hold
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "10GiB",
        requires = "kv_cache"
    )]
    pub kv_cache_bytes: ByteCount,
    /// File with the key that the folder of --kv-cache is encrypted with: 32 random bytes or 64 hexadecimal digits, which
    /// only its owner may read. What is encrypted is copied into memory when it is read back. Not encrypted without it
    #[arg(long, value_name = "FILE", requires = "kv_cache", value_parser = cache_key)]
    pub kv_cache_key: Option<CacheKey>,
    /// Bytes of files without names, in TMPDIR or /var/tmp, to which KV pages go that make room for others, of requests
    /// and of conversations in the prefix cache, where that takes less time than computing them again. Off without it
    #[arg(long, value_name = "BYTES")]
    pub kv_swap: Option<ByteCount>,
    /// How tokens of replies are guessed.
    #[command(flatten)]
    pub speculation: SpeculationArgs,
}

/// What tokens are guessed from.
#[derive(Debug, Args)]
pub struct SpeculationArgs {
    // What is computed does not depend on it, so it is no part of the engine's fingerprint.
    /// Compute several tokens of a reply in one pass where that pays, guessed from the prompt and what has been written (ngram: up
    /// to 15 at once, fewer where that would take more memory; ngram:N for up to N), or by the head too that the model's files
    /// carry for it (mtp, mtp:N; auto: where they carry one and memory holds it), or one after the other (off). The text is the
    /// same [default: ngram]
    #[arg(long, value_name = "HOW")]
    pub speculate: Option<Speculation>,
    /// The model that guesses where the text itself has no guess.
    #[command(flatten)]
    pub draft: DraftArgs,
}

/// Which model guesses tokens.
#[derive(Debug, Args)]
pub struct DraftArgs {
    /// Smaller model of the same vocabulary, or head that was made for the model (EAGLE-3, Gemma 4 assistant), that guesses
    /// tokens where the text so far has no guess, as far as that pays: a name as for the model itself. It is under the same
    /// budget, and the text is the same
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<String>,
    /// Tokens guessed for one pass at most [default: 7]
    #[arg(long, value_name = "N", requires = "draft_model", value_parser = draft_tokens)]
    pub draft_tokens: Option<NonZeroUsize>,
}

impl DraftArgs {
    /// Tokens that a draft model guesses for one pass at most.
    #[must_use]
    pub fn most(&self) -> usize {
        self.draft_tokens.unwrap_or(DraftModel::MOST_TOKENS).get()
    }

    /// What tokens are guessed from where a head is named, and `asked` says what they would be without it: from the text and
    /// by the head.
    ///
    /// # Errors
    /// Where nothing is to be guessed from the text: a head guesses beside that.
    pub fn of_head(&self, asked: Speculation) -> Result<Speculation, Usage> {
        match (asked, self.draft_tokens) {
            (Speculation::Off, _) => Err(Usage(
                "--speculate off leaves nothing to the head of --draft-model; use mtp or auto, or leave it out"
                    .to_owned(),
            )),
            (Speculation::Ngram { .. } | Speculation::Mtp { .. }, Some(most)) => {
                Ok(Speculation::Mtp { most })
            }
            (Speculation::NGRAM, None) => Ok(Speculation::MTP),
            (Speculation::Ngram { most }, None) => Ok(Speculation::Mtp { most }),
            (asked, _) => Ok(asked),
        }
    }
}

/// A number of guesses, as `--speculate ngram:N` takes it.
fn draft_tokens(text: &str) -> Result<NonZeroUsize, String> {
    match format!("ngram:{text}").parse() {
        Ok(Speculation::Ngram { most }) => Ok(most),
        _ => Err("use 1 to 63".to_owned()),
    }
}

impl SpeculationArgs {
    /// What is guessed from texts themselves.
    #[must_use]
    pub fn from_history(&self) -> Speculation {
        match (self.speculate, self.draft.draft_tokens) {
            (Some(speculation), _) => speculation,
            (None, Some(most)) => Speculation::Ngram { most },
            (None, None) => Speculation::NGRAM,
        }
    }
}

impl EngineArgs {
    /// The engine that the arguments describe.
    #[must_use]
    pub fn config(&self) -> EngineConfig {
        EngineConfig {
            threads: self.cpu.threads,
            matmul_precision: self.cpu.matmul_precision,
            kv_policy: self.kv,
            kv_elements: self.kv_type,
            context_tokens: self.ctx.map(usize::from),
            budget: self.budget.map(|budget| ByteLength::new(budget.0)),
            weights: self.weights,
            neurons: self.neurons.clone(),
            finite_check: match self.check_finite {
                true => FiniteCheck::EachLayer,
                false => FiniteCheck::Off,
            },
            ..EngineConfig::default()
        }
    }
}

impl ServiceArgs {
    /// The service that the arguments describe, over an engine as `engine` says.
    #[must_use]
    pub fn config(&self, engine: &EngineArgs) -> ServiceConfig {
        ServiceConfig {
            engine: EngineConfig {
                speculation: self.speculation.from_history(),
                ..engine.config()
            },
            max_running: self.max_running.get(),
            max_waiting: self.max_queue,
            max_batched_tokens: self.max_batched_tokens.get(),
            mixed_tokens: self.mixed_tokens.get(),
            prefix_cache: PrefixCacheConfig {
                enabled: !self.no_prefix_cache,
                folder: self.kv_cache.as_ref().map(|path| FolderConfig {
                    path: path.clone(),
                    limit: ByteLength::new(self.kv_cache_bytes.0),
                    remote: None,
                    key: self.kv_cache_key.clone(),
                }),
                ..PrefixCacheConfig::default()
            },
            swap: self.kv_swap.map(|limit| SwapConfig {
                folder: swap_folder(),
                limit: ByteLength::new(limit.0),
            }),
            ..ServiceConfig::default()
        }
    }
}

/// The key in the file that an argument names.
///
/// # Errors
/// [`KeyError`].
pub fn cache_key(path: &str) -> Result<CacheKey, KeyError> {
    CacheKey::read(Path::new(path))
}

/// Where large files go for a while: not to /tmp, which is memory on many systems.
fn swap_folder() -> PathBuf {
    let named = std::env::var_os("TMPDIR").map(PathBuf::from);
    let named = named.filter(|folder| !folder.as_os_str().is_empty());
    let usual = Path::new("/var/tmp");
    named.unwrap_or_else(|| match usual.is_dir() {
        true => usual.to_path_buf(),
        false => std::env::temp_dir(),
    })
}
