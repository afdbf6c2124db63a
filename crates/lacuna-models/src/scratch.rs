//! Activation memory of a forward pass: one arena, carved into named buffers.
//!
//! Sizes follow from the [`Config`] and the largest batch alone, so the bytes are known before any
//! weight is read and decoding allocates nothing.

use bytemuck::{Pod, Zeroable};
use lacuna_kernels::{Activations, AttentionShape, Cpu};

use crate::config::Config;

/// Largest batch one forward pass takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Tokens over all segments.
    pub tokens: usize,
    /// Rows of logits asked for at once.
    pub logit_rows: usize,
    /// Rows of the KV cache that attention may see.
    pub context_tokens: usize,
}

/// Activation memory that could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes of activation memory cannot be had; use a smaller context or batch")]
pub struct OutOfMemory {
    /// Bytes the arena takes.
    pub bytes: usize,
}

/// One cache line; gives the arena its alignment.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Arena of activation buffers for batches up to its [`BatchLimits`].
#[derive(Debug)]
pub struct Scratch {
    limits: BatchLimits,
    sizes: Sizes,
    arena: Vec<Line>,
}

/// Buffers of one forward pass, each 64-byte aligned and disjoint.
pub(crate) struct Buffers<'a> {
    /// Residual stream, `[tokens, hidden]`.
    pub(crate) hidden: &'a mut [f32],
    /// Normed input of a block, and later a block's output, `[tokens, hidden]`.
    pub(crate) normed: &'a mut [f32],
    /// `[tokens, query_heads, head_dim]`.
    pub(crate) query: &'a mut [f32],
    /// `[tokens, kv_heads, head_dim]`.
    pub(crate) key: &'a mut [f32],
    /// `[tokens, kv_heads, head_dim]`.
    pub(crate) value: &'a mut [f32],
    /// Attention output, `[tokens, query_heads, head_dim]`.
    pub(crate) attended: &'a mut [f32],
    /// `[tokens, feed_forward]`.
    pub(crate) gate: &'a mut [f32],
    /// `[tokens, feed_forward]`.
    pub(crate) up: &'a mut [f32],
    /// Position of each token in its sequence.
    pub(crate) positions: &'a mut [u32],
    /// Cosines and sines, `[tokens, head_dim]`.
    pub(crate) rotations: &'a mut [f32],
    /// Final hidden rows that become logits, `[logit_rows, hidden]`.
    pub(crate) chosen: &'a mut [f32],
    /// `[logit_rows, vocabulary]`.
    pub(crate) logits: &'a mut [f32],
    /// Partial results of split attention.
    pub(crate) attention: &'a mut [f32],
    /// Quantized activations.
    pub(crate) quantized: &'a mut [u8],
}

/// Bytes of each buffer in arena order.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    bytes: [usize; Sizes::COUNT],
}

impl Sizes {
    const COUNT: usize = 14;
    /// Queries up to which attention splits the context between threads; with more there is work
    /// for all threads without.
    const SPLIT_QUERIES: usize = 8;
    /// Most words kept for that, 32 MiB: contexts of hundreds of thousands of tokens. Attention over
    /// more goes by heads instead, with the same result.
    const SPLIT_WORDS: usize = 8 << 20;

    fn new(config: &Config, limits: BatchLimits) -> Self {
        let tokens = limits.tokens;
        let split = tokens.min(Self::SPLIT_QUERIES);
        let words = [
            tokens * config.hidden,
            tokens * config.hidden,
            tokens * config.query_width(),
            tokens * config.kv_width(),
            tokens * config.kv_width(),
            tokens * config.query_width(),
            tokens * config.feed_forward,
            tokens * config.feed_forward,
            tokens,
            tokens * config.head_dim,
            limits.logit_rows * config.hidden,
            limits.logit_rows * config.vocabulary,
            Cpu::attention_scratch_len(split, limits.context_tokens, &attention_shape(config))
                .min(Self::SPLIT_WORDS),
        ];
        let mut bytes = [0; Self::COUNT];
        for (slot, count) in bytes.iter_mut().zip(words) {
            *slot = count * size_of::<f32>();
        }
        let widths = [config.hidden, config.query_width(), config.feed_forward];
        let quantized = widths.map(|width| Activations::storage_bytes(tokens, width).unwrap_or(0));
        bytes[Self::COUNT - 1] = quantized.into_iter().max().unwrap_or(0);
        Self {
            bytes: bytes.map(|size| size.next_multiple_of(size_of::<Line>())),
        }
    }

    fn total(&self) -> usize {
        self.bytes.iter().sum()
    }
}

/// Attention geometry of `config` with the usual `1 / sqrt(head_dim)` scale.
pub(crate) fn attention_shape(config: &Config) -> AttentionShape {
    AttentionShape {
        query_heads: config.query_heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        scale: 1.0 / (config.head_dim as f32).sqrt(),
        window: None,
    }
}

impl Scratch {
    /// Allocates the arena for batches up to `limits`. Pages become resident as they are used.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the system refuses the address space.
    pub fn new(config: &Config, limits: BatchLimits) -> Result<Self, OutOfMemory> {
        let sizes = Sizes::new(config, limits);
        let bytes = sizes.total();
        let arena = bytemuck::allocation::try_zeroed_vec(bytes / size_of::<Line>());
        let arena = arena.map_err(|()| OutOfMemory { bytes })?;
        Ok(Self {
            limits,
            sizes,
            arena,
        })
    }

    /// Bytes of this arena.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.sizes.total()
    }

    /// Largest batch this arena holds.
    #[must_use]
    pub fn limits(&self) -> BatchLimits {
        self.limits
    }

    /// Logits of the last forward pass: the first `rows` rows of `vocabulary` values.
    pub(crate) fn logits(&mut self, rows: usize, vocabulary: usize) -> &[f32] {
        &self.carve().logits[..rows * vocabulary]
    }

    pub(crate) fn carve(&mut self) -> Buffers<'_> {
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut self.arena);
        let [
            hidden,
            normed,
            query,
            key,
            value,
            attended,
            gate,
            up,
            positions,
            rotations,
            chosen,
            logits,
            attention,
            quantized,
        ] = self.sizes.bytes.map(|size| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(size);
            rest = tail;
            head
        });
        Buffers {
            hidden: bytemuck::cast_slice_mut(hidden),
            normed: bytemuck::cast_slice_mut(normed),
            query: bytemuck::cast_slice_mut(query),
            key: bytemuck::cast_slice_mut(key),
            value: bytemuck::cast_slice_mut(value),
            attended: bytemuck::cast_slice_mut(attended),
            gate: bytemuck::cast_slice_mut(gate),
            up: bytemuck::cast_slice_mut(up),
            positions: bytemuck::cast_slice_mut(positions),
            rotations: bytemuck::cast_slice_mut(rotations),
            chosen: bytemuck::cast_slice_mut(chosen),
            logits: bytemuck::cast_slice_mut(logits),
            attention: bytemuck::cast_slice_mut(attention),
            quantized,
        }
    }
}
