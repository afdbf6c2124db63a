//! KV caches: what is reserved, and what is committed as tokens arrive.

use lacuna_kv::{Geometry, Growth, GrowthSchedule, KvCache, KvPolicy, Layer, Side};

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
    pub fn buffers(&self) -> impl DoubleEndedIterator<Item = KvBuffer> {
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
        bytes.next_multiple_of(self.page_bytes) as u64
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
        match self.policy {
            KvPolicy::Sparse(_) | KvPolicy::Dense(_) => self.whole_pages(self.context_tokens),
            KvPolicy::Grow(_) => self.committed_bytes(self.context_tokens),
        }
    }

    /// Memory behind all sequences when each holds `tokens` tokens that came one by one.
    #[must_use]
    pub fn committed_bytes(&self, tokens: usize) -> u64 {
        let tokens = tokens.min(self.context_tokens);
        match self.policy {
            KvPolicy::Sparse(_) => self.whole_pages(tokens),
            KvPolicy::Dense(_) => self.whole_pages(self.context_tokens),
            KvPolicy::Grow(schedule) => self.whole_pages(self.growth(schedule, tokens).cells),
        }
    }

    /// The most memory behind all sequences on their way to `tokens` tokens each: where growing
    /// copies, old and new rows of the sequence that grows exist side by side.
    #[must_use]
    pub fn peak_bytes(&self, tokens: usize) -> u64 {
        let tokens = tokens.min(self.context_tokens);
        let beside = match self.policy {
            KvPolicy::Sparse(_) | KvPolicy::Dense(_) => 0,
            KvPolicy::Grow(schedule) => self.beside_growth(schedule, tokens),
        };
        self.committed_bytes(tokens) + beside
    }

    /// What exists beyond the new buffers of one sequence while the last move is under way.
    fn beside_growth(&self, schedule: GrowthSchedule, tokens: usize) -> u64 {
        let Growth {
            cells,
            previous_cells,
            ..
        } = self.growth(schedule, tokens);
        let sizes = self.buffers().map(|buffer| {
            let bytes = |cells| self.buffer_bytes(&buffer, cells);
            (bytes(previous_cells), bytes(cells))
        });
        match schedule {
            GrowthSchedule::Mlx => in_turn(sizes),
            // A whole second cache is filled through a staging buffer as large as the largest.
            GrowthSchedule::DoubleLinear { .. } => {
                let (sum, largest) = sizes.fold((0, 0), |(sum, largest), (old, _)| {
                    (sum + old, old.max(largest))
                });
                sum + largest
            }
        }
    }

    fn growth(&self, schedule: GrowthSchedule, tokens: usize) -> Growth {
        let cell_bytes = self.geometry.bytes_per_token();
        schedule.after(tokens, self.context_tokens, cell_bytes)
    }

    fn whole_pages(&self, tokens: usize) -> u64 {
        let bytes = |buffer| self.buffer_bytes(&buffer, tokens);
        self.sequences as u64 * self.buffers().map(bytes).sum::<u64>()
    }
}

/// The most that exists beyond all new buffers when each `(old, new)` is replaced in turn: the old one
/// in question, less what those after it have yet to grow.
fn in_turn(sizes: impl DoubleEndedIterator<Item = (u64, u64)>) -> u64 {
    let (mut most, mut to_grow) = (0, 0);
    for (old, new) in sizes.rev() {
        most = old.saturating_sub(to_grow).max(most);
        to_grow += new - old;
    }
    most
}
