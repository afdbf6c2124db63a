//! What the process takes besides weights, activations and the KV cache, by rules.
//!
//! None of it can be worked out to the byte, so each rule is measured and then has a reserve on it;
//! what the process really takes is read from the kernel where that is asked for, and a budget is
//! kept by giving the KV cache less.

use lacuna_kernels::CpuConfig;

use crate::spec::ModelSpec;
use lacuna_files::{Metadata, ModelFiles};

/// Memory for the program, its vocabulary and its threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessPlan {
    /// The program's own data, the threads that only wait, what the allocator keeps for itself, and
    /// the tables of the KV cache and of the prefix cache.
    pub program_bytes: u64,
    /// The tokenizer and the file's metadata.
    pub vocabulary_bytes: u64,
    /// The buffers and stacks of the threads that compute.
    pub thread_bytes: u64,
    /// Rows of candidates that a token is chosen from.
    pub sampling_bytes: u64,
    /// Beside them: the tables by which replies are held to grammars, while there are any.
    pub constraint_bytes: u64,
}

/// How much there is in a vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VocabularySize {
    /// Tokens.
    pub tokens: usize,
    /// Pairs that merge.
    pub merges: usize,
    /// Bytes of the texts of both.
    pub text_bytes: usize,
}

/// Measured: 4.5 MiB with the demo model, its vocabulary taken off, when 32 clients have been served.
/// Most of it is relocated constants, the asynchronous runtime, and memory that the allocator keeps
/// per thread.
const PROGRAM_BYTES: u64 = 6 << 20;

/// Measured by the kernel's account of the process, texts and what loading takes included: 128 bytes a token of Gemma's
/// 262,144 and 176 of 151,936 synthetic ones, none of which has a merge, which are hash tables; 215 for a token and its
/// merge together (SmolLM2).
const TOKEN_BYTES: u64 = 150;
const MERGE_BYTES: u64 = 70;
/// A token in the tables of structured output. Measured in the same way, with what the allocator keeps of building them:
/// 206 (synthetic), 258 (Gemma), 273 (SmolLM2).
const CONSTRAINED_TOKEN_BYTES: u64 = 300;
/// The file's metadata and the tokenizer each have texts of their own, twice while they are built.
const TEXT_COPIES: u64 = 4;

/// Of the stack and the allocator's arena of a thread, what is touched.
const THREAD_BYTES: u64 = 256 << 10;

/// Logits with penalties, a list of candidates (index and score), and maxima.
const CANDIDATE_BYTES: u64 = 16;

impl VocabularySize {
    /// The vocabulary of `files`. Where it is in `tokenizer.json`, what that file's size allows.
    #[must_use]
    pub fn of(files: &ModelFiles, spec: &ModelSpec) -> Self {
        match files.metadata() {
            Metadata::Gguf(metadata) => {
                let texts = |key: &str| {
                    let texts = metadata.get::<Vec<&str>>(key).ok().flatten();
                    texts.unwrap_or_default()
                };
                let tokens = texts("tokenizer.ggml.tokens");
                let merges = texts("tokenizer.ggml.merges");
                Self {
                    tokens: tokens.len(),
                    merges: merges.len(),
                    text_bytes: tokens.iter().chain(&merges).map(|text| text.len()).sum(),
                }
            }
            Metadata::HuggingFace(folder) => {
                let file = std::fs::metadata(folder.path().join("tokenizer.json"));
                Self {
                    text_bytes: file.map_or(0, |file| usize::try_from(file.len()).unwrap_or(0)),
                    ..Self::usual(spec)
                }
            }
        }
    }

    /// The vocabulary that a model of `spec` would usually have: a merge for each token, and twelve
    /// bytes of text for both.
    #[must_use]
    pub fn usual(spec: &ModelSpec) -> Self {
        Self {
            tokens: spec.vocabulary,
            merges: spec.vocabulary,
            text_bytes: 12 * spec.vocabulary,
        }
    }

    /// What it takes.
    fn bytes(self) -> u64 {
        let (tokens, merges, text) = (self.tokens, self.merges, self.text_bytes);
        TOKEN_BYTES * tokens as u64 + MERGE_BYTES * merges as u64 + TEXT_COPIES * text as u64
    }
}

impl ProcessPlan {
    pub(super) fn new(spec: &ModelSpec, vocabulary: VocabularySize, cpu: &CpuConfig) -> Self {
        let threads = cpu.threads.get() as u64;
        Self {
            program_bytes: PROGRAM_BYTES,
            vocabulary_bytes: vocabulary.bytes(),
            thread_bytes: threads * (cpu.bytes_per_thread() as u64 + THREAD_BYTES),
            sampling_bytes: CANDIDATE_BYTES * spec.vocabulary as u64,
            constraint_bytes: CONSTRAINED_TOKEN_BYTES * vocabulary.tokens as u64,
        }
    }
}
