//! KV caches: what is reserved, and what is committed as tokens arrive.

use lacuna_kv::{Geometry, KvCache, KvPolicy, Layer, Side};

use crate::plan::Demand;
use crate::plan::error::PlanError;

/// The KV caches of sequences of up to `context_tokens` tokens each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPlan {
    /// How memory is held.
    pub policy: KvPolicy,
    /// Shape of the rows.
    pub geometry: Geometry,
    /// Bytes of one page.
    pub page_bytes: usize,
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
            page_bytes: cache.page_bytes(),
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

    /// Bytes of one buffer with room for `tokens` tokens: whole pages.
    #[must_use]
    pub fn buffer_bytes(&self, buffer: &KvBuffer, tokens: usize) -> u64 {
        let bytes = tokens * buffer.bytes_per_token;
        bytes.next_multiple_of(self.page_bytes) as u64
    }

    /// Bytes of the rows themselves when every sequence holds `tokens` tokens.
    #[must_use]
    pub fn row_bytes(&self, tokens: usize) -> u64 {
        (self.sequences * tokens * self.geometry.bytes_per_token()) as u64
    }

    /// Address space of all contexts, whole pages.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.whole_pages(self.context_tokens)
    }

    /// Memory behind every sequence when each holds `tokens` tokens, whole pages.
    #[must_use]
    pub fn committed_bytes(&self, tokens: usize) -> u64 {
        match self.policy {
            KvPolicy::Sparse(_) => self.whole_pages(tokens.min(self.context_tokens)),
            KvPolicy::Dense(_) => self.reserved_bytes(),
            KvPolicy::Grow(schedule) => {
                let cell_bytes = self.geometry.bytes_per_token();
                let growth = schedule.after(tokens, self.context_tokens, cell_bytes);
                self.whole_pages(growth.cells)
            }
        }
    }

    fn whole_pages(&self, tokens: usize) -> u64 {
        let bytes = |buffer| self.buffer_bytes(&buffer, tokens);
        self.sequences as u64 * self.buffers().map(bytes).sum::<u64>()
    }
}
