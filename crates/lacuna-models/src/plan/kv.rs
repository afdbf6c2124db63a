//! KV caches: what is reserved, and what is committed as tokens arrive.

use lacuna_kv::{Footprint, Geometry, KvCache, KvPolicy, Layer, PageSize, Side};

use crate::plan::Demand;
use crate::plan::error::PlanError;

/// The KV caches of sequences of up to `context_tokens` tokens each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPlan {
    /// How memory is held.
    pub policy: KvPolicy,
    /// Shape of the rows.
    pub geometry: Geometry,
    /// The unit memory comes in.
    pub page_size: PageSize,
    /// Tokens a sequence is made for.
    pub context_tokens: usize,
    /// Sequences there are.
    pub sequences: usize,
}

/// One buffer of a sequence: rows of one side of a layer, or of a group of layers side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvBuffer {
    /// The first decoder block.
    pub layer: Layer,
    /// Decoder blocks whose rows it holds.
    pub layers: usize,
    /// Keys or values.
    pub side: Side,
    /// Bytes of one token's rows.
    pub bytes_per_token: usize,
}

impl KvPlan {
    /// What sequences of `cache` take.
    ///
    /// # Errors
    /// [`PlanError::Kv`] for contexts beyond the address space.
    pub fn new(cache: &KvCache, demand: &Demand) -> Result<Self, PlanError> {
        let geometry = cache.geometry();
        let Demand {
            context_tokens,
            sequences,
            ..
        } = *demand;
        geometry.bytes(context_tokens.saturating_mul(sequences))?;
        Ok(Self {
            policy: cache.policy(),
            geometry,
            page_size: cache.page_size(),
            context_tokens,
            sequences,
        })
    }

    /// Every buffer of one sequence, in storage order.
    pub fn buffers(&self) -> impl Iterator<Item = KvBuffer> {
        let geometry = self.geometry;
        let together = self.policy.layout().layers_together();
        let groups = (0..geometry.layers).step_by(together);
        groups.flat_map(move |first| {
            let layers = together.min(geometry.layers - first);
            Side::BOTH.map(|side| KvBuffer {
                layer: Layer(first),
                layers,
                side,
                bytes_per_token: layers * geometry.row_bytes(side),
            })
        })
    }

    /// Bytes of one buffer with room for `tokens` tokens: whole tiles, whole pages.
    #[must_use]
    pub fn buffer_bytes(&self, buffer: &KvBuffer, tokens: usize) -> u64 {
        let tokens = tokens.next_multiple_of(self.policy.layout().tile_tokens());
        let bytes = tokens * buffer.bytes_per_token;
        (bytes as u64).next_multiple_of(self.page_size.bytes())
    }

    /// Bytes of the rows themselves when every sequence holds `tokens` tokens.
    #[must_use]
    pub fn row_bytes(&self, tokens: usize) -> u64 {
        (self.sequences * tokens * self.geometry.bytes_per_token()) as u64
    }

    /// Address space of all contexts, whole pages. A policy that grows by copying takes so much in
    /// the end.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.of_all(self.footprint(self.context_tokens).reserved_bytes)
    }

    /// Memory behind all sequences when each holds `tokens` tokens that came one by one.
    #[must_use]
    pub fn committed_bytes(&self, tokens: usize) -> u64 {
        self.of_all(self.footprint(tokens).committed_bytes)
    }

    /// The most memory behind all sequences on their way to `tokens` tokens each: where growing
    /// copies, old and new rows of the sequence that grows exist side by side.
    #[must_use]
    pub fn peak_bytes(&self, tokens: usize) -> u64 {
        let Footprint {
            committed_bytes,
            peak_committed_bytes,
            ..
        } = self.footprint(tokens);
        self.of_all(committed_bytes) + (peak_committed_bytes - committed_bytes) as u64
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let (context, tokens) = (self.context_tokens, tokens.min(self.context_tokens));
        self.policy
            .footprint(&self.geometry, self.page_size, context, tokens)
            .expect("the context was checked when the plan was made")
    }

    fn of_all(&self, bytes: usize) -> u64 {
        self.sequences as u64 * bytes as u64
    }
}
