//! What may be held, and what a request comes to: pure arithmetic over bytes.

use lacuna_kv::prefix::Grain;
use lacuna_pages::ByteLength;

use crate::error::EngineError;

/// The byte budget and its fixed part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    /// What was asked for; `None` when only the system limits.
    pub(crate) total: Option<u64>,
    /// Activation memory.
    pub(crate) activations: u64,
    /// Weights copied out of the file.
    pub(crate) weights: u64,
    /// What is left for KV pages.
    pub(crate) kv: u64,
}

impl Budget {
    /// Divides the budget up. `available` is what the system would still give; it holds where no
    /// budget was asked for.
    ///
    /// # Errors
    /// [`EngineError::BudgetTooSmall`] when not even one page per buffer is left for KV.
    pub(crate) fn new(
        total: Option<ByteLength>,
        activations: u64,
        weights: u64,
        available: Option<ByteLength>,
        grain: &Grain,
    ) -> Result<Self, EngineError> {
        let fixed = activations + weights;
        let whole = total.or(available).map_or(u64::MAX, ByteLength::get);
        let least = grain.bytes(1);
        let kv = whole.saturating_sub(fixed);
        if kv < least {
            return Err(EngineError::BudgetTooSmall {
                budget: ByteLength::new(whole),
                least: ByteLength::new(fixed + least),
            });
        }
        Ok(Self {
            total: total.map(ByteLength::get),
            activations,
            weights,
            kv,
        })
    }
}

#[cfg(test)]
impl Budget {
    /// A budget for KV pages and nothing else.
    pub(crate) fn for_kv_alone(kv: u64) -> Self {
        Self {
            total: Some(kv),
            activations: 0,
            weights: 0,
            kv,
        }
    }
}

/// KV bytes of `choices` choices of one prompt when each has `tokens` tokens: the whole
/// groups of the prompt once, everything else for each.
pub(crate) fn projected_bytes(grain: &Grain, prompt: usize, tokens: usize, choices: usize) -> u64 {
    let group = grain.group_tokens().get();
    let shared = grain.whole_tokens(prompt.saturating_sub(1) / group);
    let own = grain.bytes(tokens) - grain.bytes(shared).min(grain.bytes(tokens));
    grain
        .bytes(shared)
        .saturating_add(own.saturating_mul(choices as u64))
}

/// The most tokens that each of `choices` choices of a prompt can reach, alone, within
/// `limit` bytes, up to `context`.
pub(crate) fn capacity(
    grain: &Grain,
    prompt: usize,
    choices: usize,
    context: usize,
    limit: u64,
) -> usize {
    let fits = |tokens: usize| projected_bytes(grain, prompt, tokens, choices) <= limit;
    let (mut low, mut high) = (0, context);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match fits(middle) {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    low
}

/// What the system says about memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Reading {
    /// Bytes that could still be committed.
    pub(crate) available: Option<u64>,
    /// Share of the last ten seconds in which something waited for memory, in percent.
    pub(crate) stalled_percent: f32,
}

/// Bytes left to the rest of the system.
pub(crate) const RESERVE: u64 = 64 << 20;
/// The share of time waiting for memory from which on nothing more is taken.
const STALLED_PERCENT: f32 = 10.0;

/// What KV pages may take now, of `kv` bytes: what they hold, and of what the system has beyond a
/// reserve as much as they like; while others wait for memory, no more than is in use.
pub(crate) fn working_limit(kv: u64, committed: u64, in_use: u64, reading: Reading) -> u64 {
    let Some(available) = reading.available else {
        return kv;
    };
    let room = (committed + available).saturating_sub(RESERVE);
    match reading.stalled_percent >= STALLED_PERCENT {
        true => kv.min(room).min(in_use),
        false => kv.min(room),
    }
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;
    use lacuna_kv::{Geometry, KvCache, KvPolicy};
    use proptest::prelude::*;

    use super::*;

    /// Groups of 32 tokens and 8 KiB.
    fn grain() -> Grain {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 1,
            head_dim: 64,
            key_element: ElementType::F16,
            value_element: ElementType::F16,
        };
        let cache = KvCache::new(geometry, KvPolicy::default());
        cache.expect("the system has pages").grain()
    }

    #[test]
    fn choices_share_the_whole_groups_of_their_prompt() {
        let grain = grain();
        let group = grain.bytes(32);
        assert_eq!(projected_bytes(&grain, 64, 70, 1), 3 * group);
        assert_eq!(projected_bytes(&grain, 65, 70, 4), (2 + 4) * group);
        assert_eq!(
            projected_bytes(&grain, 64, 70, 4),
            (1 + 4 * 2) * group,
            "the last token is computed by each"
        );
    }

    proptest! {
        #[test]
        fn the_capacity_is_the_most_that_fits(
            prompt in 1usize..200,
            choices in 1usize..5,
            context in 1usize..400,
            groups in 0u64..30,
        ) {
            let grain = grain();
            let limit = groups * grain.bytes(32);
            let found = capacity(&grain, prompt, choices, context, limit);
            let fits = |tokens| projected_bytes(&grain, prompt, tokens, choices) <= limit;
            let expected = (1..=context).rev().find(|&tokens| tokens >= prompt && fits(tokens));
            match expected {
                Some(expected) => prop_assert_eq!(found, expected),
                None => prop_assert!(found < prompt.min(context + 1), "{} for a prompt of {}", found, prompt),
            }
        }
    }

    const MIB: u64 = 1 << 20;

    fn reading(available: u64) -> Reading {
        Reading {
            available: Some(available),
            stalled_percent: 0.0,
        }
    }

    #[test]
    fn the_whole_share_may_be_used_while_the_system_has_plenty() {
        assert_eq!(
            working_limit(512 * MIB, 100 * MIB, 90 * MIB, reading(4096 * MIB)),
            512 * MIB
        );
        let silent = Reading {
            available: None,
            stalled_percent: 99.0,
        };
        assert_eq!(
            working_limit(512 * MIB, 100 * MIB, 90 * MIB, silent),
            512 * MIB
        );
    }

    #[test]
    fn a_short_system_lowers_the_limit_below_what_is_held() {
        assert_eq!(
            working_limit(512 * MIB, 100 * MIB, 90 * MIB, reading(164 * MIB)),
            200 * MIB
        );
        assert_eq!(
            working_limit(512 * MIB, 100 * MIB, 90 * MIB, reading(4 * MIB)),
            40 * MIB
        );
        assert_eq!(working_limit(512 * MIB, 10 * MIB, 10 * MIB, reading(0)), 0);
    }

    #[test]
    fn while_others_wait_for_memory_nothing_more_is_taken() {
        let stalled = Reading {
            stalled_percent: 25.0,
            ..reading(4096 * MIB)
        };
        assert_eq!(
            working_limit(512 * MIB, 100 * MIB, 90 * MIB, stalled),
            90 * MIB
        );
    }
}
