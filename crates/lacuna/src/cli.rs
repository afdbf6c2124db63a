//! The command line: what can be asked for. What is done about it is in [`crate::commands`].

use std::net::IpAddr;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand};
use lacuna::files::HubId;
use lacuna::plan::{Logits, WeightMode};
use lacuna::reply::Effort;
use lacuna::{KvElements, KvPolicy, Penalties, RecommendedSampling, Sampling};
use lacuna_bench::BenchArgs;
use lacuna_cli::{
    ByteCount, CpuArgs, DeviceArgs, EngineArgs, EyesArgs, ModelArgs, ServiceArgs, SpeculationArgs,
};
use lacuna_kv::folder::{CacheKey, SessionName};
use lacuna_server::{EventAddress, ImageHost, Origin};

/// Run large language models in as little memory as the conversation needs.
#[derive(Debug, Parser)]
#[command(name = "lacuna", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Generate text, or chat
    Run(RunArgs),
    /// Answer requests over HTTP, as OpenAI does, with a web page to chat on
    Serve(Box<ServeArgs>),
    /// Make embeddings of texts
    Embed(EmbedArgs),
    /// Sort texts by how well they answer a query
    Rerank(RerankArgs),
    /// Download a model, to have it when it is wanted
    Pull(PullArgs),
    /// List the models that are on this machine, and whether they fit
    List(ListArgs),
    /// Remove a downloaded model
    Rm(RmArgs),
    /// List, check or remove what servers have left in a KV cache folder
    Cache(CacheArgs),
    /// List, remove, export or import the conversations of `run --session`
    Sessions(SessionsArgs),
    /// Show what a model file holds
    Inspect(InspectArgs),
    /// Show where every byte will go, before any is used
    Plan(PlanArgs),
    /// Turn text into token ids and back
    Tokenize(TokenizeArgs),
    /// Print the logits that follow some tokens
    Logits(LogitsArgs),
    /// Measure how well a model predicts a text, in windows of --ctx tokens
    Perplexity(PerplexityArgs),
    /// Write a model as a GGUF file with weights of another type
    Quantize(QuantizeArgs),
    /// Learn from a text which neurons a model is about to need, to read them ahead of time
    FitPredictors(FitPredictorsArgs),
    /// Write a random-weight GGUF file with a real model's shapes
    Synth(SynthArgs),
    /// Measure what the machine makes of the work
    Bench(BenchArgs),
    /// Print what a shell completes commands by
    Completions(CompletionsArgs),
    /// Print the manual page, or write one for each command
    Man(ManArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna pull Qwen/Qwen3-0.6B
  lacuna pull owner/name:Q4_K_M

A download that was interrupted goes on where it was.")]
pub(crate) struct PullArgs {
    /// owner/name, owner/name@revision or owner/name:file.gguf
    #[arg(value_name = "MODEL")]
    pub(crate) id: HubId,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna list
  lacuna list --ctx 32768

What a model needs is what it commits with a full context of --ctx tokens, beside weights that are
mapped from its file. It fits if that is available now, and runs from memory if the weights have room
there too; otherwise they are read again and again.")]
pub(crate) struct ListArgs {
    /// Tokens of the context to judge by, or what the model was made for if that is less
    #[arg(long, value_name = "TOKENS", default_value = "4096")]
    pub(crate) ctx: NonZeroUsize,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna rm owner/name:model-Q4_K_M.gguf
  lacuna rm Qwen/Qwen3-0.6B --yes")]
pub(crate) struct RmArgs {
    /// owner/name for all that was downloaded of it, owner/name:file.gguf for one model
    #[arg(value_name = "MODEL")]
    pub(crate) id: HubId,
    /// Do not ask
    #[arg(long)]
    pub(crate) yes: bool,
    /// Print one JSON object on standard output; does not ask
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna cache list ~/.cache/lacuna/kv
  lacuna cache verify ~/.cache/lacuna/kv
  lacuna cache clear ~/.cache/lacuna/kv

The folder is that of `serve --kv-cache`; it holds what was said. A server that uses it need not end.")]
pub(crate) struct CacheArgs {
    #[command(subcommand)]
    pub(crate) action: CacheAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CacheAction {
    /// Show what there is, by what it was computed by
    List(CacheReadArgs),
    /// Read every segment and compare its checksums; the exit code is 1 if one is damaged
    Verify(CacheReadArgs),
    /// Remove all of it
    Clear(CacheFolderArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CacheFolderArgs {
    /// The folder
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CacheReadArgs {
    #[command(flatten)]
    pub(crate) folder: CacheFolderArgs,
    /// File with the key of what is encrypted; the rest is read without
    #[arg(long, value_name = "FILE", value_parser = lacuna_cli::cache_key)]
    pub(crate) kv_cache_key: Option<CacheKey>,
}

/// Conversations of requests, which are in a server's cache folder.
#[derive(Debug, Args)]
pub(crate) struct ServedSessions {
    /// The cache folder of a server: the sessions that its requests named, of all its clients
    #[arg(long, value_name = "DIR", conflicts_with = "sessions")]
    pub(crate) kv_cache: Option<PathBuf>,
}

/// Where conversations are.
#[derive(Debug, Args)]
pub(crate) struct SessionFolder {
    /// Folder of sessions, which hold what was said [default: lacuna/sessions in XDG_STATE_HOME or ~/.local/state]
    #[arg(
        long,
        value_name = "DIR",
        env = "LACUNA_SESSIONS",
        hide_env_values = true
    )]
    pub(crate) sessions: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna run model.gguf --session notes       begins a conversation, or goes on with it
  lacuna sessions list
  lacuna sessions export notes notes.session
  lacuna sessions import notes.session --name notes-again
  lacuna sessions remove notes
  lacuna sessions list --kv-cache DIR         those that a server keeps for the requests that name them

A session holds what was said, and its KV pages: whoever has the same model and settings goes on without computing it.")]
pub(crate) struct SessionsArgs {
    #[command(subcommand)]
    pub(crate) action: SessionsAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SessionsAction {
    /// Show what there is
    List {
        #[command(flatten)]
        folder: SessionFolder,
        #[command(flatten)]
        served: ServedSessions,
        /// Print one JSON array on standard output
        #[arg(long)]
        json: bool,
    },
    /// Remove one
    Remove {
        /// Its name
        name: SessionName,
        #[command(flatten)]
        folder: SessionFolder,
        #[command(flatten)]
        served: ServedSessions,
    },
    /// Copy one to a file, for another machine
    Export {
        /// Its name
        name: SessionName,
        /// The file
        file: PathBuf,
        /// Replace the file if it is there
        #[arg(long)]
        overwrite: bool,
        #[command(flatten)]
        folder: SessionFolder,
    },
    /// Take one from a file
    Import {
        /// The file
        file: PathBuf,
        /// What it is to be called [default: as the file]
        #[arg(long)]
        name: Option<SessionName>,
        #[command(flatten)]
        folder: SessionFolder,
    },
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna completions bash > ~/.local/share/bash-completion/completions/lacuna
  lacuna completions zsh > ~/.zfunc/_lacuna
  lacuna completions fish > ~/.config/fish/completions/lacuna.fish")]
pub(crate) struct CompletionsArgs {
    /// bash, elvish, fish, powershell or zsh
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna man | man -l -
  lacuna man --output ~/.local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Folder to write a page for each command into
    #[arg(short, long, value_name = "FOLDER")]
    pub(crate) output: Option<PathBuf>,
}

/// How tokens are chosen.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token; higher is more varied [default: what the model recommends, or 0]
    #[arg(long, alias = "temperature", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Draw from the K likeliest tokens only; 0 for all [default: what the model recommends, or 40]
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Draw from the likeliest tokens that together reach this probability [default: what the model
    /// recommends, or 0.95]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Draw from tokens at least this fraction as likely as the likeliest [default: what the model
    /// recommends, or 0.05]
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Divide the logits of recent tokens by this [default: what the model recommends, or 1]
    #[arg(long, value_name = "X")]
    repeat_penalty: Option<f32>,
    /// Subtract this from the logits of recent tokens
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    presence_penalty: f32,
    /// Subtract this from the logits of recent tokens for each time they occurred
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    frequency_penalty: f32,
    /// Tokens that count as recent
    #[arg(long, value_name = "N", default_value_t = 64)]
    repeat_last_n: usize,
    /// Seed of the random draws: the same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl SamplingArgs {
    /// What is asked for, else what the model's makers recommend, else the likeliest token every time.
    pub(crate) fn sampling(&self, recommended: &RecommendedSampling) -> Sampling {
        let default = Sampling::greedy().recommended_by(recommended);
        let repetition = default.penalties.repetition;
        Sampling {
            temperature: self.temp.unwrap_or(default.temperature),
            top_k: self.top_k.unwrap_or(default.top_k),
            top_p: self.top_p.unwrap_or(default.top_p),
            min_p: self.min_p.unwrap_or(default.min_p),
            penalties: Penalties {
                repetition: self.repeat_penalty.unwrap_or(repetition),
                presence: self.presence_penalty,
                frequency: self.frequency_penalty,
                window: self.repeat_last_n,
            },
            seed: self.seed,
            ..Sampling::default()
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna run demo -p \"What is ownership?\" -n 64
  lacuna run model.gguf                       chat in the terminal; /help there lists /fork, /rewind, /save, ...
  lacuna run gemma-3-4b.gguf --image cat.jpg -p \"What is this?\"
  lacuna run Qwen/Qwen3-0.6B -p Hi --temp 0.7 --json
  lacuna run model.gguf -p Hi --budget 512MiB
  lacuna run qwen3-4b.gguf --draft-model qwen3-0.6b.gguf
  lacuna run llama-3.1-8b.gguf --draft-model llama-3.1-8b-eagle3.gguf
  lacuna run model.gguf --session notes       goes on where `notes` ended, also days later
  echo \"Once upon\" | lacuna run model.gguf --raw -n 100")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Text to continue or answer [default: standard input, or a chat on a terminal]
    #[arg(short, long)]
    pub(crate) prompt: Option<String>,
    /// Image that comes before the text: PNG, JPEG, WebP or GIF (may be given several times)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "session"])]
    pub(crate) image: Vec<PathBuf>,
    /// Instructions that come before the conversation
    #[arg(long, conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Tokens to generate at most [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "TOKENS")]
    pub(crate) max_tokens: Option<usize>,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// How long a model that thinks is to do so: none, minimal, low, medium, high, xhigh or max
    /// [default: as its chat template has it]
    #[arg(long, value_name = "EFFORT", conflicts_with = "raw")]
    pub(crate) reasoning_effort: Option<Effort>,
    /// End at this text (may be given several times)
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Conversation to go on with, or to begin; it is kept when the command ends, with its KV pages
    #[arg(long, value_name = "NAME")]
    pub(crate) session: Option<SessionName>,
    #[command(flatten)]
    pub(crate) folder: SessionFolder,
    /// Neither read nor keep what is typed in a chat, which later chats have at the arrow keys
    #[arg(long)]
    pub(crate) no_history: bool,
    /// File to record in which experts tokens choose, for `bench experts`
    #[arg(long, value_name = "FILE")]
    pub(crate) record_experts: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna serve demo                           then open http://127.0.0.1:8080
  lacuna serve model.gguf --budget 2GiB --ctx 8192
  lacuna serve qwen3-4b.gguf --draft-model qwen3-0.6b.gguf
  lacuna serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
  lacuna serve gemma-3-4b.gguf --mmproj mmproj.gguf --allow-image-host images.example.com
  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}'

Several models share the budget, and each is loaded when a request names it:
  lacuna serve chat.gguf code=coder-7b-q4_k_m.gguf embed.gguf --budget 8GiB
  lacuna serve --models-dir ~/models --keep-alive 30m --alias gpt-4o=qwen3-8b-q4_k_m")]
pub(crate) struct ServeArgs {
    /// `demo`, GGUF files, Hugging Face folders, or hub ids such as Qwen/Qwen3-0.6B; NAME=MODEL serves one under
    /// another name
    #[arg(value_name = "MODEL", required_unless_present = "models_dir")]
    pub(crate) models: Vec<String>,
    /// The part of the one model that sees.
    #[command(flatten)]
    pub(crate) eyes: EyesArgs,
    /// Folder whose models are served as well: its GGUF files, and its folders as Hugging Face has them
    #[arg(long, value_name = "DIR")]
    pub(crate) models_dir: Option<PathBuf>,
    /// Further name of a model: ALIAS=NAME, where NAME is what it is served under
    #[arg(long, value_name = "ALIAS=NAME")]
    pub(crate) alias: Vec<String>,
    /// How long one of several models stays loaded that nobody uses: seconds, or 5m, 1h; -1 for ever
    #[arg(long, value_name = "TIME", default_value = "5m", allow_hyphen_values = true, value_parser = keep_alive)]
    pub(crate) keep_alive: KeepAlive,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
    /// Address to listen on; one that other machines reach needs an API key
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes any that is free
    #[arg(long, default_value_t = 8080)]
    pub(crate) port: u16,
    /// Name clients ask for the only model by [default: from the model's own]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) name: Option<String>,
    /// Key a client must present, of 8 characters or more; other users of this machine can see it,
    /// unlike one in a file
    #[arg(
        long,
        value_name = "KEY",
        env = "LACUNA_API_KEY",
        hide_env_values = true
    )]
    pub(crate) api_key: Option<String>,
    /// File with keys, one to a line; blank lines and lines that begin with # are none
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Serve whoever reaches the address, without a key and by any name: only where a network policy or a proxy decides
    /// who that is, as routers and metrics in a cluster have no key
    #[arg(long, conflicts_with_all = ["api_key", "api_key_file"])]
    pub(crate) open_to_all: bool,
    /// Let all API keys share computed prompts: less memory and time, but each key can find out,
    /// from `cached_tokens` and from how long a reply takes, how prompts of the others begin
    #[arg(long)]
    pub(crate) share_prefixes: bool,
    /// Refuse requests with fields that are not known instead of ignoring those
    #[arg(long)]
    pub(crate) strict_fields: bool,
    /// Leave out every line of a system text that this matches, such as '^Current date:', so that prompts which differ only
    /// there are computed once (may be given several times)
    #[arg(long, value_name = "REGEX")]
    pub(crate) omit_lines: Vec<String>,
    /// Write tools in the order of their names, for clients that send them in another order each time
    #[arg(long)]
    pub(crate) sort_tools: bool,
    /// Fetch images from this host where requests give their addresses, such as images.example.com or 192.0.2.7:8000
    /// (may be given several times)
    #[arg(long, value_name = "HOST")]
    pub(crate) allow_image_host: Vec<ImageHost>,
    /// Let pages of this site use the server, such as https://chat.example (may be given several times)
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors: Vec<Origin>,
    /// PEM file with the server's certificate and those that vouch for it: connections are over TLS then (https).
    /// Read again at SIGHUP
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_key",
        visible_alias = "ssl-certfile",
        alias = "ssl-cert-file"
    )]
    pub(crate) tls_certificate: Option<PathBuf>,
    /// PEM file with the certificate's key
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_certificate",
        visible_alias = "ssl-keyfile",
        alias = "ssl-key-file"
    )]
    pub(crate) tls_key: Option<PathBuf>,
    /// File to which a line of JSON is appended for every request, opened again at SIGHUP; - is standard error
    #[arg(long, value_name = "FILE")]
    pub(crate) access_log: Option<PathBuf>,
    /// Seconds a request may take in all
    #[arg(long, value_name = "SECONDS", default_value = "600")]
    pub(crate) request_timeout: NonZeroU64,
    /// Seconds that replies under way may still take when the server is asked to end
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) grace: u64,
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
    /// Where to tell routers which prompts are held, such as tcp://*:5557: ZeroMQ, as vLLM's KV events. Whoever connects
    /// gets tokens of prompts. Off without it
    #[arg(long, value_name = "ADDRESS", conflicts_with = "no_prefix_cache")]
    pub(crate) kv_events: Option<EventAddress>,
    /// What KV events are published under, such as kv@POD@MODEL
    #[arg(long, value_name = "TOPIC", default_value = "", requires = "kv_events")]
    pub(crate) kv_events_topic: String,
    /// Where KV events that were missed can be asked for, such as tcp://*:5558
    #[arg(long, value_name = "ADDRESS", requires = "kv_events")]
    pub(crate) kv_events_replay: Option<EventAddress>,
    /// Store of objects behind the folder of --kv-cache, such as s3://bucket/folder: other machines start from what
    /// this one computes, and this one from theirs. It holds what was said. Credentials from the environment
    #[cfg(feature = "remote")]
    #[arg(long, value_name = "URL", requires = "kv_cache")]
    pub(crate) kv_remote: Option<String>,
    /// How long a prompt waits for what the store has of it
    #[cfg(feature = "remote")]
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "30",
        requires = "kv_remote"
    )]
    pub(crate) kv_remote_timeout: std::num::NonZeroU64,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

// The demo model, which the argument offers elsewhere, does neither. An argument that is changed goes behind the others
// unless all have an index.
const EMBEDS: &str = "A model that embeds: a GGUF file, a Hugging Face folder, or a hub id such as Qwen/Qwen3-Embedding-0.6B";
const RANKS: &str = "A model that scores pairs: a GGUF file, a Hugging Face folder, or a hub id such as BAAI/bge-reranker-v2-m3";

#[derive(Debug, Args)]
#[command(
    mut_arg("model", |model| model.help(EMBEDS).long_help(EMBEDS).index(1)),
    after_help = "With --json each text is an object on a line of its own: text, tokens (how many), embedding.

Examples:
  lacuna embed sentence-transformers/all-MiniLM-L6-v2 \"How do I borrow a value?\"
  lacuna embed bge-small.gguf --json < sentences.txt > embeddings.jsonl
  lacuna embed model.gguf --dimensions 256 --truncate < paragraphs.txt
  lacuna embed Qwen/Qwen3-Embedding-0.6B --prompt-name query \"Who maps pages?\""
)]
pub(crate) struct EmbedArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// A text; - for standard input, where each line is one [default: -]
    #[arg(index = 2)]
    pub(crate) text: Option<String>,
    /// Cut embeddings to this many elements, and bring them to a length of 1 again [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) dimensions: Option<NonZeroUsize>,
    /// Put the prompt of this name in front of each text, which the model's folder has, such as query
    #[arg(long, value_name = "NAME")]
    pub(crate) prompt_name: Option<String>,
    /// Put this in front of each text
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_name")]
    pub(crate) prompt: Option<String>,
    #[command(flatten)]
    pub(crate) passes: PassArgs,
}

/// How texts are computed by models that make a vector or a score of each.
#[derive(Debug, Args)]
pub(crate) struct PassArgs {
    /// Cut texts that have more tokens than the model takes, instead of refusing them
    #[arg(long)]
    pub(crate) truncate: bool,
    /// Tokens that a text may have [default: what the model was made for]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) ctx: Option<NonZeroUsize>,
    /// Tokens computed in one pass at most; a text that has more is computed alone
    #[arg(long, value_name = "TOKENS", default_value = "512")]
    pub(crate) batch: NonZeroUsize,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
}

#[derive(Debug, Args)]
#[command(
    mut_arg("model", |model| model.help(RANKS).long_help(RANKS).index(1)),
    after_help = "Prints each text behind its score, from 0 to 1, best first.

Examples:
  lacuna rerank bge-reranker.gguf \"Who maps pages?\" \"The pool does.\" \"It rains.\"
  lacuna rerank BAAI/bge-reranker-v2-m3 \"Who maps pages?\" --top 3 --json < paragraphs.txt"
)]
pub(crate) struct RerankArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// What the texts are to answer
    #[arg(index = 2)]
    pub(crate) query: String,
    /// Texts [default: standard input, where each line is one]
    #[arg(index = 3)]
    pub(crate) texts: Vec<String>,
    /// Print so many of the best alone [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) top: Option<NonZeroUsize>,
    #[command(flatten)]
    pub(crate) passes: PassArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna inspect model.gguf --json")]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The model may also be the name of a shape `synth` knows; nothing is opened then.
A plan that does not fit the budget is printed all the same, and the exit code is 1. What is planned
for is `run`; `serve` is --sequences 32 --batch 256, its --max-running and --max-batched-tokens.

Examples:
  lacuna plan model.gguf --ctx 32768
  lacuna plan qwen3-4b --ctx 32768 --kv-type k=q8_0,v=iq4_nl --json
  lacuna plan llama-3-8b --dtype q4_k --ctx 8192 --budget 8GiB
  lacuna plan model.gguf --ctx 4096 --budget 1200MB --disk-rate 2GB --memory-rate 25GB
  lacuna plan qwen3-4b.gguf --draft-model qwen3-0.6b.gguf --budget 6GiB
  lacuna plan qwen3.5-9b.gguf --speculate mtp
  lacuna plan demo --batch 64 --map demo.map
  lacuna plan gemma-3-4b.gguf --image cat.jpg --image 4032x3024"
)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Tokens the context holds [default: what the model was made for]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) ctx: Option<NonZeroUsize>,
    /// Tokens computed in one pass at most
    #[arg(long, value_name = "TOKENS", default_value = "512")]
    pub(crate) batch: NonZeroUsize,
    /// Sequences there are at once, each with a context of its own
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) sequences: NonZeroUsize,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// What computes, as for `run`: what it has of a model's file is said apart
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// How KV memory is held, as for `run`
    #[arg(long, value_name = "POLICY", default_value = "sparse")]
    pub(crate) kv: KvPolicy,
    /// Storage of KV elements, as for `run`
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub(crate) kv_type: KvElements,
    /// Rows of logits a pass has room for: last (of each sequence) or all (of every token)
    #[arg(long, value_name = "ROWS", default_value = "last")]
    pub(crate) logits: Logits,
    /// Type of a shape's matrices [default: q8_0]
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<lacuna::DType>,
    /// Bytes that the process may commit, as for `run` and `serve`: pages of files are beside them
    #[arg(long, value_name = "BYTES")]
    pub(crate) budget: Option<ByteCount>,
    /// How weights are had, as for `run`: auto, mmap, pread or direct
    #[arg(long, value_name = "WAY", default_value = "auto")]
    pub(crate) weights: WeightMode,
    /// What tokens are guessed from, as for `run`: planned with the rest
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    /// Have neurons read one by one, as with `--neurons` of `run`; no file is made
    #[arg(long)]
    pub(crate) neurons: bool,
    /// Bytes that are read from the disk in a second, to say how long a token takes
    #[arg(long, value_name = "BYTES", requires = "memory_rate")]
    pub(crate) disk_rate: Option<ByteCount>,
    /// Bytes of weights that are computed with in a second when they are in memory (`bench speed` has them)
    #[arg(long, value_name = "BYTES", requires = "disk_rate")]
    pub(crate) memory_rate: Option<ByteCount>,
    /// What `--record-experts` has written, to say how many experts are found in memory
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Image to say of what it takes: a file, or a size such as 4032x3024 (may be given several times)
    #[arg(long, value_name = "FILE|WxH")]
    pub(crate) image: Vec<String>,
    /// File to write the map to: a line for each buffer
    #[arg(long, value_name = "FILE")]
    pub(crate) map: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna tokenize demo -p \"Hello, world\"
  echo \"12 5 99\" | lacuna tokenize demo --decode")]
pub(crate) struct TokenizeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Text, or token ids with --decode [default: standard input]
    #[arg(short, long)]
    pub(crate) prompt: Option<String>,
    /// Turn token ids (separated by commas or spaces) into text
    #[arg(long, conflicts_with_all = ["add_special", "parse_special"])]
    pub(crate) decode: bool,
    /// Add the tokens the model expects around a text, such as a beginning-of-text token
    #[arg(long)]
    pub(crate) add_special: bool,
    /// Read special tokens written in the text as such
    #[arg(long)]
    pub(crate) parse_special: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna logits demo --tokens 1,2,3 --all --json")]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Token ids, separated by commas
    #[arg(long, value_delimiter = ',', required = true)]
    pub(crate) tokens: Vec<u32>,
    /// A row after every token, not only after the last
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna perplexity demo models/demo/heldout.txt --ctx 1024")]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Text file
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Types, the finest first: f32, f16, bf16, q8_0, q6_k, q5_k_m, q5_k_s, q4_k_m, q4_k_s, q3_k_l, q3_k_m,
q3_k_s, q2_k, q5_1, q5_0, q4_1, q4_0, iq4_nl, iq4_xs, mxfp4, tq1_0, tq2_0. Those that end with a letter are
mixtures, finer where errors cost most. Vectors stay as they are, and rows that are no whole number
of a type's blocks get a type with smaller blocks.

Examples:
  lacuna quantize model-f16.gguf model-q4_k_m.gguf --type q4_k_m
  lacuna quantize demo demo-q8_0.gguf --type q8_0 --overwrite --json"
)]
pub(crate) struct QuantizeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// GGUF file to write
    pub(crate) output: PathBuf,
    /// Type of the matrices, such as q4_k_m, q8_0 or iq4_nl
    #[arg(long, value_name = "TYPE")]
    pub(crate) r#type: lacuna::quantize::Recipe,
    /// Replace the file to write if it is there
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Threads that quantize [default: one per core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna fit-predictors model.gguf --neurons DIR --text book.txt
  lacuna run model.gguf --neurons DIR --budget 2GiB -p Hi

For models with --neurons: of feed-forward blocks whose activations are exactly zero for most. The predictors lie in DIR
beside the file of neurons, and commands with the same --neurons use them. They say which neurons are likely to be
needed while these are still computed; what they miss is read then, so replies do not depend on them. Their memory is
taken from neurons that would stay: `lacuna bench speed` says whether that pays, with the file and without it. A tenth
of the text is kept apart to meet --recall, and another to say how good they are.")]
pub(crate) struct FitPredictorsArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Folder of the file of neurons, as for `run`
    #[arg(long, value_name = "DIR")]
    pub(crate) neurons: PathBuf,
    /// Text file, of the kind that the model is to write
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
    /// Directions that a block's neurons are foretold from: more are better, and take more memory and time
    #[arg(long, value_name = "N", default_value = "64")]
    pub(crate) rank: NonZeroUsize,
    /// Part of needed neurons that is to be foretold: more of it reads more that is not needed
    #[arg(long, value_name = "PART", default_value = "0.95", value_parser = part)]
    pub(crate) recall: f64,
    /// Tokens of the text that are used at most
    #[arg(long, value_name = "N", default_value = "16384")]
    pub(crate) tokens: NonZeroUsize,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
}

/// A number between 0 and 1.
fn part(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(part) if part > 0.0 && part <= 1.0 => Ok(part),
        _ => Err("use a number above 0, 1 at most".to_owned()),
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna synth qwen3-0.6b --dtype q8_0 -o model.gguf")]
pub(crate) struct SynthArgs {
    /// Whose shapes: qwen3-0.6b, qwen3-1.7b, qwen3-4b, llama-3.2-1b, llama-3-8b, ...
    pub(crate) shape: String,
    /// Type of the matrices, such as f16, q8_0, q4_k, iq4_xs or mxfp4, or the mixture q4_k_m
    #[arg(long, default_value = "q8_0")]
    pub(crate) dtype: lacuna::synth::Types,
    /// Decoder blocks, instead of the model's own number
    #[arg(long)]
    pub(crate) layers: Option<NonZeroUsize>,
    /// Seed of the weights: the same seed gives the same file
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// File to write
    #[arg(short, long)]
    pub(crate) output: PathBuf,
    /// Replace the file to write if it is there
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// How long a model stays that nobody uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeepAlive(pub(crate) Option<Duration>);

fn keep_alive(text: &str) -> Result<KeepAlive, String> {
    lacuna_server::keep_alive(text).map(KeepAlive)
}
