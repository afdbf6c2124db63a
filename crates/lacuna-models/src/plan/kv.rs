//! The KV cache of one sequence: what is reserved, and what is committed as tokens arrive.

use lacuna_kernels::ElementType;
use lacuna_kv::{Geometry, KvCache, KvPolicy, Layer, Side};

use crate::plan::error::PlanError;

/// The KV cache of one sequence of up to `context_tokens` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPlan {
    /// How memory is held.
    pub policy: KvPolicy,
    /// Shape of the rows.
    pub geometry: Geometry,
    /// Bytes of one page.
    pub page_bytes: usize,
    /// Tokens reserved for.
    pub context_tokens: usize,
}

/// One buffer of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvBuffer {
    /// Decoder block.
    pub layer: Layer,
    /// Keys or values.
    pub side: Side,
    /// Storage of one element.
    pub element: ElementType,
    /// Address space it holds.
    pub reserved_bytes: usize,
}

impl KvPlan {
    /// What a sequence of `cache` with room for `context_tokens` tokens takes.
    ///
    /// # Errors
    /// [`PlanError::EmptyContext`], or [`PlanError::Kv`] for a context beyond the address space.
    pub fn new(
        cache: &KvCache,
        policy: KvPolicy,
        context_tokens: usize,
    ) -> Result<Self, PlanError> {
        if context_tokens == 0 {
            return Err(PlanError::EmptyContext);
        }
        let geometry = cache.geometry();
        geometry.buffer_bytes(context_tokens)?;
        Ok(Self {
            policy,
            geometry,
            page_bytes: cache.page_bytes(),
            context_tokens,
        })
    }

    /// Every buffer, in storage order.
    pub fn buffers(&self) -> impl Iterator<Item = KvBuffer> {
        let reserved_bytes = self.buffer_bytes(self.context_tokens);
        let element = self.geometry.element;
        (0..self.geometry.layers).flat_map(move |layer| {
            Side::BOTH.map(|side| KvBuffer {
                layer: Layer(layer),
                side,
                element,
                reserved_bytes,
            })
        })
    }

    /// Bytes of the rows themselves when `tokens` are held.
    #[must_use]
    pub fn row_bytes(&self, tokens: usize) -> u64 {
        (tokens * self.geometry.bytes_per_token()) as u64
    }

    /// Address space of the whole context, whole pages.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.buffers()
            .map(|buffer| buffer.reserved_bytes as u64)
            .sum()
    }

    /// Memory behind the first `tokens` tokens, whole pages.
    #[must_use]
    pub fn committed_bytes(&self, tokens: usize) -> u64 {
        let held = match self.policy {
            KvPolicy::Sparse => tokens.min(self.context_tokens),
            KvPolicy::Dense => self.context_tokens,
        };
        (self.geometry.buffers() * self.buffer_bytes(held)) as u64
    }

    fn buffer_bytes(&self, tokens: usize) -> usize {
        (tokens * self.geometry.row_bytes()).next_multiple_of(self.page_bytes)
    }
}
