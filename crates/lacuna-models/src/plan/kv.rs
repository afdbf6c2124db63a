//! KV caches: what is reserved, and what is committed as tokens arrive.

use lacuna_kv::{BufferRows, Footprint, Geometry, KvCache, KvPolicy, PageSize};

use crate::plan::Demand;
use crate::plan::error::PlanError;

/// The KV caches of sequences of up to `context_tokens` tokens each.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// Tokens that may come at once.
    pub chunk_tokens: usize,
    /// The resume points of the prefix cache, where layers have windows or keep states.
    pub resume_points: Option<ResumePoints>,
}

/// Places at which a sequence goes on with what another has computed, where that can be in places only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumePoints {
    /// Bytes of the pages of windows and states that one keeps.
    pub bytes: u64,
    /// Tokens from one to the next: so many whose rows take as much, or more. From there on one costs no more
    /// memory than the tokens that need not be computed again.
    pub every_tokens: usize,
}

/// One buffer of a sequence when its context is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvBuffer {
    /// What it holds.
    pub rows: KvRows,
    /// Tokens it has room for.
    pub tokens: usize,
    /// Whole pages.
    pub bytes: u64,
}

/// Which rows a buffer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvRows {
    /// All tokens, one side of a layer or of a group of layers side by side.
    Side(BufferRows),
    /// Some tokens, both sides of all layers: the block at this place of a block table.
    Block(usize),
    /// No rows but the states of all layers.
    States,
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
            batch_tokens,
            ..
        } = *demand;
        geometry.bytes(context_tokens.saturating_mul(sequences))?;
        let policy = cache.policy();
        policy.footprint(geometry, cache.page_size(), context_tokens, context_tokens)?;
        let grain = cache.grain();
        let resume_points = grain.has_resume_points().then(|| ResumePoints {
            bytes: grain.resume_bytes(),
            every_tokens: grain.resume_every().get() * grain.group_tokens().get(),
        });
        Ok(Self {
            policy,
            geometry: geometry.clone(),
            page_size: cache.page_size(),
            context_tokens,
            sequences,
            chunk_tokens: batch_tokens.clamp(1, context_tokens.max(1)),
            resume_points,
        })
    }

    /// Every buffer of one sequence whose context is full, in storage order.
    #[must_use]
    pub fn buffers(&self) -> Vec<KvBuffer> {
        let mut buffers = match self.policy {
            _ if !self.geometry.has_rows() => Vec::new(),
            KvPolicy::Paged { block_tokens } => self.blocks(block_tokens.get()),
            _ => self.sides(),
        };
        if self.geometry.has_states() {
            buffers.push(KvBuffer {
                rows: KvRows::States,
                tokens: 1,
                bytes: (self.geometry).state_bytes_in_pages(self.page_size.bytes() as usize) as u64,
            });
        }
        buffers
    }

    fn blocks(&self, tokens: usize) -> Vec<KvBuffer> {
        let bytes = self.whole_pages(tokens * self.geometry.bytes_per_token());
        let block = |index| KvBuffer {
            rows: KvRows::Block(index),
            tokens,
            bytes,
        };
        (0..self.context_tokens.div_ceil(tokens))
            .map(block)
            .collect()
    }

    fn sides(&self) -> Vec<KvBuffer> {
        let tokens = match self.policy {
            KvPolicy::Grow(schedule) => {
                let context = self.context_tokens;
                schedule
                    .after(context, context, self.geometry.bytes_per_token())
                    .cells
            }
            _ => self.context_tokens,
        };
        let buffers = self.policy.layout().buffers(&self.geometry).into_iter();
        let buffers = buffers.map(|rows| KvBuffer {
            rows: KvRows::Side(rows),
            tokens,
            bytes: self.whole_pages(rows.bytes(tokens)),
        });
        buffers.collect()
    }

    fn whole_pages(&self, bytes: usize) -> u64 {
        (bytes as u64).next_multiple_of(self.page_size.bytes())
    }

    /// Bytes of the rows that are of use when every sequence holds `tokens` tokens: those that windows
    /// have passed are not.
    #[must_use]
    pub fn row_bytes(&self, tokens: usize) -> u64 {
        (self.sequences * self.geometry.useful_bytes(tokens)) as u64
    }

    /// Address space of all sequences when each has come to its context's end. What does not reserve
    /// ahead has no more than is committed then.
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
    /// copies, old and new rows of the sequence that grows exist side by side, and windows keep what a
    /// chunk of a prompt is still to see.
    #[must_use]
    pub fn peak_bytes(&self, tokens: usize) -> u64 {
        let committed_bytes = self.footprint(tokens).committed_bytes;
        let more = self.sequence_peak_bytes(tokens) - committed_bytes as u64;
        self.of_all(committed_bytes) + more
    }

    /// The most memory behind one sequence on its way to `tokens` tokens.
    #[must_use]
    pub fn sequence_peak_bytes(&self, tokens: usize) -> u64 {
        let tokens = tokens.min(self.context_tokens);
        let (context, chunk) = (self.context_tokens, self.chunk_tokens);
        let peak = (self.policy).peak_bytes(&self.geometry, self.page_size, context, tokens, chunk);
        peak.expect("a plan is made for contexts that fit") as u64
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let tokens = tokens.min(self.context_tokens);
        self.policy
            .footprint(&self.geometry, self.page_size, self.context_tokens, tokens)
            .expect("a plan is made for contexts that fit")
    }

    fn of_all(&self, bytes: usize) -> u64 {
        self.sequences as u64 * bytes as u64
    }
}
