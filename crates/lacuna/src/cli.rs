//! The command line: what can be asked for. What is done about it is in [`crate::commands`].

use std::net::IpAddr;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use lacuna::plan::Logits;
use lacuna::{KvElements, KvPolicy, Penalties, Sampling};

use crate::bytes::ByteCount;
use crate::commands::bench::kernels::KernelKind;
use crate::commands::bench::pages::DeviceKind;

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
    Serve(ServeArgs),
    /// Show what a model file holds
    Inspect(InspectArgs),
    /// Show where every byte will go, before any is used
    Plan(PlanArgs),
    /// Turn text into token ids and back
    Tokenize(TokenizeArgs),
    /// Print the logits that follow some tokens
    Logits(LogitsArgs),
    /// Measure how well a model predicts a text
    Perplexity(PerplexityArgs),
    /// Write a random-weight GGUF file with a real model's shapes
    Synth(SynthArgs),
    /// Measure what the machine makes of the work
    #[command(subcommand)]
    Bench(BenchCommand),
}

const MODEL_HELP: &str =
    "`demo`, a GGUF file, a Hugging Face folder, or a hub id such as Qwen/Qwen3-0.6B";

/// Where the model is and how the result is printed.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    #[arg(help = MODEL_HELP)]
    pub(crate) model: String,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// How the engine is set up.
#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// Tokens the context holds [default: what the model was made for]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) ctx: Option<NonZeroUsize>,
    /// How KV memory is held: sparse (pages as tokens arrive), dense (all at start), paged or
    /// paged:TOKENS (blocks that a table finds), grow:mlx or grow:double-linear[:CELLS] (copies to
    /// grow); sparse and dense also as :head-major or :interleaved=LAYERS
    #[arg(long, value_name = "POLICY", default_value = "sparse")]
    pub(crate) kv: KvPolicy,
    /// Storage of KV elements: f32, f16, bf16, q8_0 or q4_0, or each side its own: k=q8_0,v=q4_0
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub(crate) kv_type: KvElements,
    /// Threads that compute [default: one per core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Look for values that are not finite after each layer, and stop with its name
    #[arg(long)]
    pub(crate) check_finite: bool,
}

/// How tokens are chosen.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token; higher is more varied
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    temp: f32,
    /// Draw from the K likeliest tokens only; 0 for all
    #[arg(long, value_name = "K", default_value_t = 40)]
    top_k: usize,
    /// Draw from the likeliest tokens that together reach this probability
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    top_p: f32,
    /// Draw from tokens at least this fraction as likely as the likeliest
    #[arg(long, value_name = "P", default_value_t = 0.05)]
    min_p: f32,
    /// Divide the logits of recent tokens by this
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    repeat_penalty: f32,
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
    pub(crate) fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            penalties: Penalties {
                repetition: self.repeat_penalty,
                presence: self.presence_penalty,
                frequency: self.frequency_penalty,
                window: self.repeat_last_n,
            },
            seed: self.seed,
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna run demo -p \"What is ownership?\" -n 64
  lacuna run model.gguf                       chat in the terminal
  lacuna run Qwen/Qwen3-0.6B -p Hi --temp 0.7 --json
  echo \"Once upon\" | lacuna run model.gguf --raw -n 100")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Text to continue or answer [default: standard input, or a chat on a terminal]
    #[arg(short, long)]
    pub(crate) prompt: Option<String>,
    /// Instructions that come before the conversation
    #[arg(long, conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Tokens to generate at most [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "TOKENS")]
    pub(crate) max_tokens: Option<usize>,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// End at this text (may be given several times)
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

/// How a server is set up, besides its engine.
#[derive(Debug, Args)]
pub(crate) struct ServiceArgs {
    /// Memory for KV pages, prefix cache, activations and copied weights together, such as 2GiB or
    /// 512MiB [default: what the system has available]
    #[arg(long, value_name = "BYTES")]
    pub(crate) budget: Option<ByteCount>,
    /// Replies that are generated at once at most
    #[arg(long, value_name = "N", default_value = "32")]
    pub(crate) max_running: NonZeroUsize,
    /// Requests that may wait; those beyond are told to try again
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) max_queue: usize,
    /// Tokens computed in one step at most
    #[arg(long, value_name = "TOKENS", default_value = "256")]
    pub(crate) step_tokens: NonZeroUsize,
    /// Tokens of prompts computed in one step at most while replies flow: fewer keep them smoother
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub(crate) mixed_tokens: NonZeroUsize,
    /// Compute every prompt from its first token, instead of sharing what begins the same
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna serve demo                           then open http://127.0.0.1:8080
  lacuna serve model.gguf --budget 2GiB --ctx 8192
  lacuna serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}'")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Address to listen on; one that other machines reach needs an API key
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes any that is free
    #[arg(long, default_value_t = 8080)]
    pub(crate) port: u16,
    /// Name clients ask for the model by [default: from the model's own]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Key a client must present; other users of this machine can see it, unlike one in a file
    #[arg(
        long,
        value_name = "KEY",
        env = "LACUNA_API_KEY",
        hide_env_values = true
    )]
    pub(crate) api_key: Option<String>,
    /// File with keys, one to a line
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Seconds a request may take in all
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) request_timeout: u64,
    /// Seconds that replies under way may still take when the server is asked to end
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) grace: u64,
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
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
A plan that does not fit the budget is printed all the same, and the exit code is 1.

Examples:
  lacuna plan model.gguf --ctx 32768
  lacuna plan qwen3-4b --ctx 32768 --kv-type k=q8_0,v=q4_0 --json
  lacuna plan llama-3-8b --dtype q4_k --ctx 8192 --budget 8GiB
  lacuna plan demo --batch 64 --map demo.map"
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
    /// Bytes that everything together may take, such as 2GiB
    #[arg(long, value_name = "BYTES")]
    pub(crate) budget: Option<ByteCount>,
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
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna synth qwen3-0.6b --dtype q8_0 -o model.gguf")]
pub(crate) struct SynthArgs {
    /// Whose shapes: qwen3-0.6b, qwen3-1.7b, qwen3-4b, llama-3.2-1b, llama-3-8b, ...
    pub(crate) shape: String,
    /// Type of the matrices: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k or q6_k, or
    /// the mixture q4_k_m
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
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// What mapping, sharing and giving back pages costs, and what it saves
    Pages(BenchPagesArgs),
    /// How a server bears many sessions: waiting times, speed, memory, reuse
    Serve(BenchServeArgs),
    /// Whether a server keeps to its budget under more clients than it can hold
    Soak(BenchSoakArgs),
    /// Tokens per second of a model, and what part of the machine that is
    Speed(BenchSpeedArgs),
    /// What each kernel reaches, and what part of the machine that is
    Kernels(BenchKernelsArgs),
    /// KV memory against tokens, for each way of holding it
    Memory(BenchMemoryArgs),
    /// What a KV cache that grows costs each step
    Growth(BenchGrowthArgs),
    /// How many sequences fit a KV budget
    Batch(BenchBatchArgs),
    /// What sessions that share a prefix take
    Prefix(BenchPrefixArgs),
}

/// Whose KV cache is measured, and which ways of holding it.
#[derive(Debug, Args)]
pub(crate) struct KvBenchArgs {
    /// A shape that `lacuna synth` knows, or a model as in `lacuna run`; weights are not read
    #[arg(default_value = "qwen3-4b")]
    pub(crate) model: String,
    /// Layers, instead of the model's own number, where its cache does not fit the machine
    #[arg(long, value_name = "N")]
    pub(crate) layers: Option<NonZeroUsize>,
    /// The policies to compare
    #[arg(
        long = "kv",
        value_name = "POLICY",
        num_args = 1..,
        default_values = ["sparse", "dense", "grow:mlx", "grow:double-linear", "grow:double-linear:4096", "paged"]
    )]
    pub(crate) policies: Vec<KvPolicy>,
    /// Storage of KV elements
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub(crate) kv_type: KvElements,
    /// Draw the result as an SVG picture
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna bench memory qwen3-4b --ctx 32768 --plot memory.svg")]
pub(crate) struct BenchMemoryArgs {
    #[command(flatten)]
    pub(crate) kv: KvBenchArgs,
    /// Tokens the context holds
    #[arg(long, value_name = "TOKENS", default_value = "32768")]
    pub(crate) ctx: NonZeroUsize,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna bench serve --model demo --sessions 32 --shared-prefix 256 --rate 8
  lacuna bench serve --model m.gguf --sessions 64 --max-running 64 --shared-prefix 2048 --in-turn
  lacuna bench serve --url http://127.0.0.1:8080 --sessions 64 --rate 4 --json

A server at --url can be any that speaks OpenAI's /v1/completions; its memory is reported if it is
Lacuna's. Prompts are random words, and their lengths in tokens are the server's count. A steady
batch is the time in which every request has its first token and none has ended.")]
pub(crate) struct BenchServeArgs {
    /// Server to measure
    #[arg(long, required_unless_present = "model", conflicts_with = "model")]
    pub(crate) url: Option<String>,
    /// Key to present to it
    #[arg(
        long,
        value_name = "KEY",
        env = "LACUNA_API_KEY",
        hide_env_values = true
    )]
    pub(crate) api_key: Option<String>,
    /// Model to serve and measure in this process, instead of a server
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// Requests to send
    #[arg(long, value_name = "N", default_value = "32")]
    pub(crate) sessions: NonZeroUsize,
    /// Tokens that all prompts begin with
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub(crate) shared_prefix: usize,
    /// Requests per second, on average; they arrive at random times. 0 sends all at once
    #[arg(long, value_name = "PER_SECOND", default_value_t = 4.0)]
    pub(crate) rate: f64,
    /// Send the second request when the first one's reply has begun, and the others when the
    /// second one's has: what the first computed, the second finds while the first still runs
    #[arg(long)]
    pub(crate) in_turn: bool,
    #[command(flatten)]
    pub(crate) lengths: LengthArgs,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// What requests look like.
#[derive(Debug, Args)]
pub(crate) struct LengthArgs {
    /// Tokens of a prompt of its own, on average
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub(crate) prompt_tokens: NonZeroUsize,
    /// Tokens of a reply at most, on average
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub(crate) reply_tokens: NonZeroUsize,
    /// How far lengths are from their average: 0.5 is from half of it to half as much again
    #[arg(long, value_name = "PART", default_value_t = 0.5)]
    pub(crate) spread: f64,
    /// 0 always takes the likeliest token; 1 draws as the model says
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Seed of lengths, words and times
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna bench soak --model demo --budget 16MiB
  lacuna bench soak --model demo --budget 16MiB --max-queue 8 --seconds 30 --json

Clients ask again and again until the time is up; some hang up in the middle of a reply. In the end
all of them get a reply at once and half of them hang up. The kernel's account of KV pages is read
throughout. The exit code is 1 when a request failed, the budget was exceeded, or anything was still
held after the last client had gone.")]
pub(crate) struct BenchSoakArgs {
    /// Model to serve in this process
    #[arg(long)]
    pub(crate) model: String,
    /// How long
    #[arg(long, value_name = "SECONDS", default_value = "300")]
    pub(crate) seconds: NonZeroU64,
    /// Clients, each with one request at a time [default: twice as many as the budget holds]
    #[arg(long, value_name = "N")]
    pub(crate) clients: Option<NonZeroUsize>,
    /// Tokens that all prompts begin with
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub(crate) shared_prefix: usize,
    /// The part of requests whose client hangs up in the middle of the reply
    #[arg(long, value_name = "PART", default_value_t = 0.1)]
    pub(crate) hang_up: f64,
    #[command(flatten)]
    pub(crate) lengths: LengthArgs,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  lacuna bench growth qwen3-4b --layers 18 --tokens 65536 --plot growth.svg"
)]
pub(crate) struct BenchGrowthArgs {
    #[command(flatten)]
    pub(crate) kv: KvBenchArgs,
    /// Tokens to grow to, one at a time
    #[arg(long, value_name = "TOKENS", default_value = "65536")]
    pub(crate) tokens: NonZeroUsize,
    /// Stop a policy that has not got there by then
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    pub(crate) seconds: NonZeroU64,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna bench batch qwen3-4b --budget 8GiB --ctx 16384")]
pub(crate) struct BenchBatchArgs {
    #[command(flatten)]
    pub(crate) kv: KvBenchArgs,
    /// KV memory of all sequences together
    #[arg(long, value_name = "BYTES", default_value = "8GiB")]
    pub(crate) budget: ByteCount,
    /// Tokens of the longest sequence; the shortest has 512
    #[arg(long, value_name = "TOKENS", default_value = "16384")]
    pub(crate) ctx: NonZeroUsize,
    /// Seed of the lengths
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna bench prefix qwen3-4b --prefix 8192 --sessions 8")]
pub(crate) struct BenchPrefixArgs {
    #[command(flatten)]
    pub(crate) kv: KvBenchArgs,
    /// Tokens that all sessions begin with
    #[arg(long, value_name = "TOKENS", default_value = "8192")]
    pub(crate) prefix: NonZeroUsize,
    /// Sessions beside the first
    #[arg(long, value_name = "N", default_value = "8")]
    pub(crate) sessions: NonZeroUsize,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  lacuna bench speed m.gguf\n  lacuna bench speed m.gguf -p 512,4096 --depth 0,4096 --kv-type f16 q8_0 --json"
)]
pub(crate) struct BenchSpeedArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Lengths of prompts to compute, in tokens; 0 for none
    #[arg(
        short,
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "512"
    )]
    pub(crate) prompt: Vec<usize>,
    /// Tokens to generate at each depth; 0 for none
    #[arg(short = 'n', long, value_name = "TOKENS", default_value = "64")]
    pub(crate) generate: usize,
    /// Tokens in the context before the first one generated
    #[arg(
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "0,4096"
    )]
    pub(crate) depth: Vec<usize>,
    /// Sequences that generate at once
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    pub(crate) batch: Vec<usize>,
    /// Storage of KV elements, as in `lacuna run`; several to compare them
    #[arg(long, value_name = "TYPE", num_args = 1.., default_value = "f16")]
    pub(crate) kv_type: Vec<KvElements>,
    /// How KV memory is held
    #[arg(long, value_name = "POLICY", default_value = "sparse")]
    pub(crate) kv: KvPolicy,
    /// Threads that compute [default: one per core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Times each prompt is computed; the median counts
    #[arg(long, value_name = "N", default_value = "3")]
    pub(crate) repeats: NonZeroUsize,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna bench pages --json")]
pub(crate) struct BenchPagesArgs {
    /// Whose pages: host (the processor's page table), host-huge (the same, with long mappings moved
    /// into huge pages), dense (all memory at once), or vulkan (a GPU's page table; in programs
    /// built with the feature of that name)
    #[arg(long, default_value = "host")]
    pub(crate) device: DeviceKind,
    /// Fewer and smaller measurements, in a fraction of the time and the memory
    #[arg(long)]
    pub(crate) quick: bool,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna bench kernels --type q8_0
  lacuna bench kernels --kernel matmul --type f16,q4_k --tokens 1,8 --threads 2
  lacuna bench kernels --kernel attention,rope --json

Weights and cached rows are gone through in turn, so that they come from memory and not from a cache.
A kernel is compared with the limit that it would meet first, measured in turn with it. The limit of
8-bit products sums them in 32 bits; kernels that sum smaller products in 16 bits can exceed it.")]
pub(crate) struct BenchKernelsArgs {
    /// Kernels to measure [default: all]
    #[arg(long = "kernel", value_name = "KERNEL", value_delimiter = ',')]
    pub(crate) kernels: Vec<KernelKind>,
    /// Storage types of weights and of cached rows [default: all, and kernels that have none]
    #[arg(long = "type", value_name = "TYPE", value_delimiter = ',')]
    pub(crate) types: Vec<String>,
    /// Tokens of a call
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,512"
    )]
    pub(crate) tokens: Vec<NonZeroUsize>,
    /// Cached rows that attention reads; more than 16 tokens at once only to 4096
    #[arg(
        long = "depth",
        value_name = "ROWS",
        value_delimiter = ',',
        default_value = "512,4096,16384"
    )]
    pub(crate) depths: Vec<NonZeroUsize>,
    /// Threads that compute [default: one per core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,
    /// One round over little memory, to see that all works; the figures mean nothing
    #[arg(long)]
    pub(crate) quick: bool,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}
