//! A session: the tokens of one conversation, how far they are in the KV cache, and its sampler.

use lacuna_kv::{KvError, KvReport, Sequence};
use lacuna_models::LogitRows;

use crate::sampler::Sampler;

/// Tokens a session makes room for at once, 4 MiB of address space; longer ones grow as they fill.
const TOKENS_AT_ONCE: usize = 1 << 20;

/// One conversation's tokens and KV cache.
///
/// ```text
/// tokens    [ t0 t1 t2 ... | p0 p1 ... ]
///             in the cache   pending
/// ```
#[derive(Debug)]
pub struct Session {
    pub(crate) sequence: Sequence,
    pub(crate) tokens: Vec<u32>,
    pub(crate) sampler: Sampler,
}

impl Session {
    pub(crate) fn new(sequence: Sequence, sampler: Sampler) -> Self {
        // One more than the cache holds: the last sampled token stays pending.
        let tokens = Vec::with_capacity(sequence.capacity().min(TOKENS_AT_ONCE - 1) + 1);
        Self {
            sequence,
            tokens,
            sampler,
        }
    }

    /// Every token so far, in the cache or pending.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens the session was made for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.sequence.capacity()
    }

    /// Tokens not in the cache yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.sequence.len()
    }

    /// Appends tokens to be computed by the next steps.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// Makes `tokens` the whole conversation, keeping what the cache already holds of it. At least
    /// the last token stays pending, so that a step can give logits. Returns how many tokens were
    /// kept.
    ///
    /// # Errors
    /// [`KvError`] when pages cannot be given back; the session is unchanged then.
    pub fn rewrite(&mut self, tokens: &[u32]) -> Result<usize, KvError> {
        let cached = &self.tokens[..self.sequence.len()];
        let common = cached
            .iter()
            .zip(tokens)
            .take_while(|(a, b)| a == b)
            .count();
        let kept = common.min(tokens.len().saturating_sub(1));
        self.sequence.truncate(kept)?;
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        Ok(kept)
    }

    /// Where the session's KV bytes are.
    #[must_use]
    pub fn kv(&self) -> KvReport {
        self.sequence.report()
    }

    /// The next chunk of pending tokens, of at most `limit`, and which logits it should give.
    pub(crate) fn schedule(&self, limit: usize) -> (std::ops::Range<usize>, LogitRows) {
        let start = self.sequence.len();
        let end = self.tokens.len().min(start + limit);
        let rows = if end == self.tokens.len() {
            LogitRows::Last
        } else {
            LogitRows::None
        };
        (start..end, rows)
    }
}
