//! What can be asked of the benchmarks.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use lacuna_cli::{ByteCount, CpuArgs, DeviceArgs, DraftArgs, EngineArgs, ModelArgs, ServiceArgs};
use lacuna_engine::Speculation;
use lacuna_kv::{KvElements, KvPolicy};
use lacuna_models::plan::{WeightMode, WeightSource};

use crate::kernels::KernelKind;
use crate::pages::DeviceKind;

/// What to measure.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// What mapping, sharing and giving back pages costs, and what it saves
    Pages(BenchPagesArgs),
    /// How a server bears many sessions: waiting times, speed, memory, reuse
    Serve(BenchServeArgs),
    /// What each turn of an agent's session finds computed, and how soon its reply begins
    Agent(BenchAgentArgs),
    /// Whether a server keeps to its budget under more clients than it can hold
    Soak(BenchSoakArgs),
    /// Tokens per second of a model, and what part of the machine that is
    Speed(BenchSpeedArgs),
    /// What guessing tokens gains: an edit of code, a summary, a chat
    Speculate(BenchSpeculateArgs),
    /// Texts per second that become embeddings, and the memory that they leave behind
    Embed(BenchEmbedArgs),
    /// Images per second that become rows for a decoder, and what part of the machine that is
    Images(BenchImagesArgs),
    /// What slots find of a mixture's experts, replayed from a record of what tokens chose
    Experts(BenchExpertsArgs),
    /// What each kernel reaches, and what part of the machine that is
    Kernels(BenchKernelsArgs),
    /// What the ways to have weights cost and hold: loading, first token, speed
    Loading(BenchLoadingArgs),
    /// One measurement of `loading`, in the process that is measured
    #[command(hide = true)]
    LoadingCell(LoadingCellArgs),
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
    /// Sequences of that many tokens each
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) sequences: NonZeroUsize,
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

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna bench agent --model model.gguf
  lacuna bench agent --model smollm2.gguf --tokens 7000
  lacuna bench agent --url http://127.0.0.1:8080 --tools-as-text --json

The session has 10 turns and 20 tools, and is the same every time: each turn sends what the last one did, a recorded
reply, and what came back. What the server says itself is read and thrown away. A server at --url can be any that
speaks OpenAI's /v1/chat/completions; what it reused is reported if it says so.")]
pub(crate) struct BenchAgentArgs {
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
    /// Tokens of the last prompt, about; the first has a little less than half of them
    #[arg(long, value_name = "TOKENS", default_value = "25000")]
    pub(crate) tokens: NonZeroUsize,
    /// Tokens of a reply at most
    #[arg(long, value_name = "TOKENS", default_value = "16")]
    pub(crate) reply_tokens: NonZeroUsize,
    /// Write tools, calls and results into the messages, so that servers compute the same whatever their templates
    /// make of them
    #[arg(long)]
    pub(crate) tools_as_text: bool,
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
    #[arg(long = "temp", alias = "temperature", default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Go on past the end that a model writes, so that replies are as long as they may be
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Seed of lengths, words and times
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna bench soak --model demo --budget 32MiB
  lacuna bench soak --model demo --budget 32MiB --max-queue 8 --seconds 30 --json

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
#[command(after_help = "Example:
  lacuna bench embed target/models/all-minilm-l6-v2 --input texts.txt --threads 2 --json

From text on: tokens are counted in the time. bench/peers/embedding.py runs others beside it.")]
pub(crate) struct BenchEmbedArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// File of texts, a line each
    #[arg(long, value_name = "FILE")]
    pub(crate) input: PathBuf,
    /// How often all of them are embedded
    #[arg(long, value_name = "N", default_value = "5")]
    pub(crate) rounds: NonZeroUsize,
    /// Tokens computed in one pass at most
    #[arg(long, value_name = "TOKENS", default_value = "512")]
    pub(crate) batch: NonZeroUsize,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna synth gemma3-4b-mmproj --dtype q8_0 -o mmproj.gguf; lacuna bench images mmproj.gguf --threads 2
  lacuna bench images gemma-3-4b/ --size 1024x768 --matmul-precision bf16 --json

bench/peers/images.py runs llama.cpp beside it.")]
pub(crate) struct BenchImagesArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Pixels of width and height of the image
    #[arg(long, value_name = "WIDTHxHEIGHT", default_value = "1024x768", value_parser = image_size)]
    pub(crate) size: [usize; 2],
    /// How often it is encoded
    #[arg(long, value_name = "N", default_value = "5")]
    pub(crate) rounds: NonZeroUsize,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
}

/// Two numbers with an x between them, of pixels that an image may have.
fn image_size(given: &str) -> Result<[usize; 2], String> {
    let size = given.split_once('x').and_then(|(width, height)| {
        let size: [u16; 2] = [width.parse().ok()?, height.parse().ok()?];
        size.iter().all(|side| *side > 0).then_some(size)
    });
    let size = size.ok_or("use two numbers, such as 1024x768")?;
    Ok(size.map(usize::from))
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna bench speculate m.gguf
  lacuna bench speculate m.gguf --speculate ngram:7 --temp 0.7 --sequences 1 --json
  lacuna bench speculate qwen3-4b.gguf --draft-model qwen3-0.6b.gguf --speculate off
  lacuna synth qwen3.5-0.8b -o m.gguf; lacuna bench speculate m.gguf --choices 1,4 --sequences 1

Each text is written without guesses and with them, in turns; the command fails where they are not the same.")]
pub(crate) struct BenchSpeculateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Tokens of a reply at most
    #[arg(short = 'n', long, value_name = "TOKENS", default_value = "256")]
    pub(crate) tokens: NonZeroUsize,
    /// Sequences of the second half, which write at once; 1 leaves it out
    #[arg(long, value_name = "N", default_value = "16")]
    pub(crate) sequences: NonZeroUsize,
    /// 0 always takes the likeliest token; 1 draws as the model says
    #[arg(long = "temp", alias = "temperature", default_value_t = 0.0)]
    pub(crate) temperature: f32,
    /// Instead of the texts, replies that may take so many tokens alone: of 1 all guesses are right, and the more there are the
    /// fewer. For random weights, whose replies to texts say nothing
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) choices: Vec<NonZeroUsize>,
    /// How often each is measured
    #[arg(long, value_name = "N", default_value = "5")]
    pub(crate) rounds: NonZeroUsize,
    /// How tokens are guessed from the text: ngram, ngram:N for up to N at once, or off, where a draft model does it alone
    #[arg(long, value_name = "HOW", default_value = "ngram")]
    pub(crate) speculate: Speculation,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
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
    /// Measure batches once more with sequences that begin with the same rows in the same memory, as after a prompt that
    /// was computed once
    #[arg(long)]
    pub(crate) shared: bool,
    /// Storage of KV elements, as in `lacuna run`; several to compare them
    #[arg(long, value_name = "TYPE", num_args = 1.., default_value = "f16")]
    pub(crate) kv_type: Vec<KvElements>,
    /// How KV memory is held
    #[arg(long, value_name = "POLICY", default_value = "sparse")]
    pub(crate) kv: KvPolicy,
    /// Bytes that the process may commit, as in `lacuna run`; weights beyond them are read for each pass
    #[arg(long, value_name = "BYTES")]
    pub(crate) budget: Option<ByteCount>,
    /// How weights are had, as in `lacuna run`: auto, mmap, pread or direct
    #[arg(long, value_name = "WAY", default_value = "auto")]
    pub(crate) weights: WeightMode,
    /// Folder for a file in which neurons lie one by one, as in `lacuna run`
    #[arg(long, value_name = "DIR")]
    pub(crate) neurons: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Times each prompt is computed; the median counts
    #[arg(long, value_name = "N", default_value = "3")]
    pub(crate) repeats: NonZeroUsize,
    /// File to record in which experts tokens choose, for `bench experts`
    #[arg(long, value_name = "FILE")]
    pub(crate) record_experts: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  lacuna run m.gguf -p \"What is ownership?\" -n 256 --record-experts trace.jsonl
  lacuna bench experts --trace trace.jsonl --resident 20,40,60")]
pub(crate) struct BenchExpertsArgs {
    /// What `--record-experts` of `run` or `bench speed` has written
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: PathBuf,
    /// Parts of a layer's experts that have slots, in percent
    #[arg(
        long,
        value_name = "PERCENT",
        value_delimiter = ',',
        default_value = "5,10,20,30,40,50,60,80",
        value_parser = clap::value_parser!(u32).range(1..=100)
    )]
    pub(crate) resident: Vec<u32>,
    /// Slots in each layer, in the place of parts
    #[arg(
        long,
        value_name = "SLOTS",
        value_delimiter = ',',
        conflicts_with = "resident"
    )]
    pub(crate) slots: Vec<std::num::NonZeroUsize>,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  lacuna bench loading 0.6b-q8_0.gguf 4b-q4_0.gguf --repeats 3 --plot loading.svg

Each measurement is a process of its own. Before a cold one the system is asked to drop the files from its
page cache, before a warm one they are read; the column of bytes from the disk says whether it did. Memory
is the kernel's account of the process in the end, each page by its part: anonymous memory, pages of files,
and shared memory, which are KV pages.")]
pub(crate) struct BenchLoadingArgs {
    /// Models, as in `lacuna run`, in files
    #[arg(required = true)]
    pub(crate) models: Vec<String>,
    /// Ways to have weights: mmap, pread, direct
    #[arg(
        long,
        value_name = "WAY",
        value_delimiter = ',',
        default_value = "mmap,pread,direct",
        value_parser = weight_source
    )]
    pub(crate) weights: Vec<WeightSource>,
    /// Tokens that KV memory is taken for from the start, with the first of the ways; 0 takes pages as tokens come
    #[arg(
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "0,2048,4096"
    )]
    pub(crate) kv_tokens: Vec<usize>,
    /// Tokens of the prompt
    #[arg(short, long, value_name = "TOKENS", default_value = "128")]
    pub(crate) prompt: NonZeroUsize,
    /// Tokens to generate
    #[arg(short = 'n', long, value_name = "TOKENS", default_value = "32")]
    pub(crate) generate: NonZeroUsize,
    /// Processes for each row; medians count
    #[arg(long, value_name = "N", default_value = "3")]
    pub(crate) repeats: NonZeroUsize,
    /// Threads that compute [default: one per core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Draw the time to the first token as an SVG picture
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LoadingCellArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[arg(long, value_parser = weight_source)]
    pub(crate) weights: WeightSource,
    #[arg(long)]
    pub(crate) kv_tokens: usize,
    #[arg(long)]
    pub(crate) prompt: NonZeroUsize,
    #[arg(long)]
    pub(crate) generate: NonZeroUsize,
    #[arg(long)]
    pub(crate) threads: Option<NonZeroUsize>,
}

fn weight_source(name: &str) -> Result<WeightSource, String> {
    let mut sources = WeightSource::ALL.into_iter();
    let found = sources.find(|source| source.name() == name);
    found.ok_or_else(|| format!("`{name}` is no way to have weights; use mmap, pread or direct"))
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lacuna bench pages --json")]
pub(crate) struct BenchPagesArgs {
    /// Whose pages: host (the processor's page table), host-huge (the same, with long mappings moved
    /// into huge pages), dense (all memory at once), or vulkan (a GPU's page table, where there is a
    /// driver)
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
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// One round over little memory, to see that all works; the figures mean nothing
    #[arg(long)]
    pub(crate) quick: bool,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}
