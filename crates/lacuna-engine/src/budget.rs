//! What may be held and what a request comes to: arithmetic over bytes, and the readings it starts
//! from. How a budget is divided is the plan's affair ([`lacuna_models::plan::Budget`]).

use lacuna_kv::prefix::Grain;
use lacuna_models::plan::{BudgetTooSmall, Parts};
use lacuna_pages::{ByteLength, ProcessMemory, SystemMemory};

use crate::engine::Accounting;
use crate::error::EngineError;

/// What this process may have of the system's memory, as of one reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Had {
    /// What the system can spare beyond its reserve.
    spare: Option<u64>,
    reserve: u64,
    /// What the process has taken already of what its plan calls for.
    taken: u64,
}

impl Had {
    /// As of now, for a process that is to commit `needed` and whose model may be loaded by now.
    pub(crate) fn now(accounting: Accounting, needed: &Parts) -> Self {
        let (system, process) = (SystemMemory::read(), ProcessMemory::read());
        let held = process.map_or(0, |process| process.anonymous.get());
        Self {
            spare: system.spare().map(ByteLength::get),
            reserve: system.reserve().get(),
            taken: match accounting {
                Accounting::Planned => held.min(needed.loaded()),
                Accounting::Measured => held,
            },
        }
    }

    /// What the process may commit in all: what was asked for, or as much of it as there is.
    pub(crate) fn budget(self, asked: Option<ByteLength>) -> Option<u64> {
        let there = self.spare.map(|spare| spare + self.taken);
        asked.map(ByteLength::get).into_iter().chain(there).min()
    }

    /// Whether it is the budget that is too small, or the system.
    pub(crate) fn refusal(self, error: BudgetTooSmall, asked: Option<ByteLength>) -> EngineError {
        match asked {
            Some(asked) if asked.get() <= error.budget => EngineError::BudgetTooSmall(error),
            _ => EngineError::MemoryShort {
                spare: ByteLength::new(error.budget),
                reserve: ByteLength::new(self.reserve),
                needed: Box::new(error.needed),
            },
        }
    }
}

/// The process beside its plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    accounting: Accounting,
    /// All planned parts but KV pages and weights that are read, which change places.
    planned: u64,
    /// What it had beyond the plan when the model was loaded. What was set up later takes the rest of
    /// its parts as it is used, so this much stays.
    loaded_beyond: u64,
}

impl Process {
    pub(crate) fn after_loading(accounting: Accounting, planned: &Parts) -> Self {
        let weights = planned.read_weight_bytes;
        let mut process = Self {
            accounting,
            planned: planned.loaded() - weights,
            loaded_beyond: 0,
        };
        process.loaded_beyond = process.beyond_plan(process.held(weights));
        process.planned = planned.besides_kv() - weights;
        process
    }

    /// Anonymous memory besides `kv_bytes` of it that are KV pages or weights that are read, where that is to be
    /// known.
    pub(crate) fn held(&self, kv_bytes: u64) -> Option<u64> {
        let read = match self.accounting {
            Accounting::Planned => None,
            Accounting::Measured => ProcessMemory::read(),
        };
        read.map(|process| process.anonymous.get().saturating_sub(kv_bytes))
    }

    /// What is beyond the plan when so much is held.
    pub(crate) fn beyond_plan(&self, held: Option<u64>) -> u64 {
        let beyond = held.map_or(0, |held| held.saturating_sub(self.planned));
        beyond.max(self.loaded_beyond)
    }

    /// What the plan has promised to other parts and they have not taken yet.
    fn promised(&self, held: Option<u64>) -> u64 {
        held.map_or(0, |held| self.planned.saturating_sub(held))
    }
}

/// How the pages of a request are counted.
#[derive(Debug, Clone)]
pub(crate) struct Pages {
    pub(crate) grain: Grain,
    /// Tokens of the largest step: windows pass its rows after it.
    pub(crate) step_tokens: usize,
}

/// The most KV bytes of `choices` choices of one prompt when each has `tokens` tokens: the whole
/// groups of the prompt once, everything else for each.
pub(crate) fn projected_bytes(pages: &Pages, prompt: usize, tokens: usize, choices: usize) -> u64 {
    let (grain, step) = (&pages.grain, pages.step_tokens);
    if choices == 1 {
        return grain.peak_bytes(tokens, step);
    }
    let group = grain.group_tokens().get();
    let shared = grain.whole_tokens(prompt.saturating_sub(1) / group);
    let own = grain.new_bytes(shared, tokens, step);
    grain
        .bytes(shared)
        .saturating_add(own.saturating_mul(choices as u64))
}

/// The most tokens that each of `choices` choices of a prompt can reach, alone, within
/// `limit` bytes, up to `context`.
pub(crate) fn capacity(
    pages: &Pages,
    prompt: usize,
    choices: usize,
    context: usize,
    limit: u64,
) -> usize {
    let fits = |tokens: usize| projected_bytes(pages, prompt, tokens, choices) <= limit;
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

/// What the system says about memory, as far as the limit of KV pages follows it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Reading {
    /// Bytes that could still be committed.
    pub(crate) available: Option<u64>,
    /// Those of them that are better left.
    pub(crate) reserve: u64,
    /// Share of the last ten seconds in which everything waited for memory, in percent.
    pub(crate) stalled_percent: f32,
    /// What the process has beyond the plan, KV pages aside.
    pub(crate) beyond_plan: u64,
    /// What its other parts are still to take; zero where that is not known.
    pub(crate) promised: u64,
}

impl Reading {
    /// As of now, when `kv_bytes` of the process's anonymous memory are KV pages or weights that are read.
    pub(crate) fn now(process: &Process, kv_bytes: u64) -> Self {
        let (system, held) = (SystemMemory::read(), process.held(kv_bytes));
        Self {
            available: system.available.map(ByteLength::get),
            reserve: system.reserve().get(),
            stalled_percent: system.stalled_percent,
            beyond_plan: process.beyond_plan(held),
            promised: process.promised(held),
        }
    }
}

/// The share of time waiting for memory from which on nothing more is taken.
const STALLED_PERCENT: f32 = 10.0;

/// What KV pages hold and may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvDemand {
    /// The most there may ever be.
    pub(crate) share: u64,
    /// What is committed now.
    pub(crate) committed: u64,
    /// The part of it that is in use.
    pub(crate) in_use: u64,
    /// What the first request needs to go on.
    pub(crate) first: u64,
    /// Bytes of files that are read again with each token. The system would give them up for pages,
    /// and then every token waits for the disk.
    pub(crate) mapped: u64,
}

/// What KV pages may take now: what they hold, and of what the system can spare beside the weights and
/// the process's other parts as much as they like; while everything waits for memory, no more than is
/// in use. Never less than the first request needs, so that something always ends.
pub(crate) fn working_limit(kv: KvDemand, reading: Reading) -> u64 {
    let Some(available) = reading.available else {
        return kv.share;
    };
    let others = reading.reserve + kv.mapped + reading.promised;
    let room = (kv.committed + available).saturating_sub(others);
    let wanted = match reading.stalled_percent >= STALLED_PERCENT {
        true => room.min(kv.in_use),
        false => room,
    };
    wanted.max(kv.first).min(kv.share)
}

/// Bytes of weights that the system would have to have back, if KV pages are to keep what is in use and what the first
/// request needs. Weights are read for each pass without them, and a request would be computed again.
pub(crate) fn weights_beyond(kv: KvDemand, reading: Reading) -> u64 {
    let Some(available) = reading.available else {
        return 0;
    };
    let others = reading.reserve + kv.mapped + reading.promised;
    (others + kv.first.max(kv.in_use)).saturating_sub(kv.committed + available)
}

/// What KV pages do not need of their `share` while `used` bytes of it are in use or promised: they keep a quarter
/// more than that, and what they have to begin with. Less than an eighth of all is not worth a read.
pub(crate) fn restorable_bytes(share: u64, used: u64, to_begin_with: u64) -> u64 {
    let kept = to_begin_with.max(used + used / 4);
    let spare = share.saturating_sub(kept);
    if spare < share / 8 { 0 } else { spare }
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;
    use lacuna_kv::{Geometry, KvCache, KvElements, KvPolicy};
    use proptest::prelude::*;

    use super::*;

    /// Groups of 32 tokens and 8 KiB.
    fn pages() -> Pages {
        let geometry = Geometry::uniform(1, 1, 64, KvElements::both(ElementType::F16));
        let cache = KvCache::new(geometry, KvPolicy::default());
        Pages {
            grain: cache.expect("the system has pages").grain(),
            step_tokens: 16,
        }
    }

    #[test]
    fn choices_share_the_whole_groups_of_their_prompt() {
        let pages = pages();
        let group = pages.grain.bytes(32);
        assert_eq!(projected_bytes(&pages, 64, 70, 1), 3 * group);
        assert_eq!(projected_bytes(&pages, 65, 70, 4), (2 + 4) * group);
        assert_eq!(
            projected_bytes(&pages, 64, 70, 4),
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
            let pages = pages();
            let limit = groups * pages.grain.bytes(32);
            let found = capacity(&pages, prompt, choices, context, limit);
            let fits = |tokens| projected_bytes(&pages, prompt, tokens, choices) <= limit;
            let expected = (1..=context).rev().find(|&tokens| tokens >= prompt && fits(tokens));
            match expected {
                Some(expected) => prop_assert_eq!(found, expected),
                None => prop_assert!(found < prompt.min(context + 1), "{} for a prompt of {}", found, prompt),
            }
        }
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_budget_is_what_was_asked_for_or_as_much_of_it_as_there_is() {
        let had = |spare| Had {
            spare,
            reserve: 8 * MIB,
            taken: 20 * MIB,
        };
        let asked = |mebibytes| Some(ByteLength::mebibytes(mebibytes));
        assert_eq!(had(Some(100 * MIB)).budget(asked(64)), Some(64 * MIB));
        assert_eq!(had(Some(30 * MIB)).budget(asked(64)), Some(50 * MIB));
        assert_eq!(had(Some(30 * MIB)).budget(None), Some(50 * MIB));
        assert_eq!(had(None).budget(None), None);
        let error = |budget| BudgetTooSmall {
            budget,
            needed: Parts::default(),
        };
        let refusal = |budget, wanted| had(None).refusal(error(budget), wanted);
        assert!(matches!(
            refusal(64 * MIB, asked(64)),
            EngineError::BudgetTooSmall(_)
        ));
        assert!(matches!(
            refusal(50 * MIB, asked(64)),
            EngineError::MemoryShort { .. }
        ));
        assert!(matches!(
            refusal(50 * MIB, None),
            EngineError::MemoryShort { .. }
        ));
    }

    #[test]
    fn only_what_is_measured_can_be_beyond_the_plan() {
        let nothing_planned = Parts::default();
        let process = |accounting| Process::after_loading(accounting, &nothing_planned);
        let planned = process(Accounting::Planned);
        assert_eq!(planned.held(0), None);
        assert_eq!((planned.beyond_plan(None), planned.promised(None)), (0, 0));
        if cfg!(target_os = "linux") {
            let measured = process(Accounting::Measured);
            assert!(measured.loaded_beyond > 0, "this test's own heap");
            assert_eq!(measured.beyond_plan(Some(0)), measured.loaded_beyond);
            let roomy = Process {
                planned: 100 * MIB,
                loaded_beyond: 3 * MIB,
                ..measured
            };
            let (less, more) = (Some(40 * MIB), Some(120 * MIB));
            assert_eq!(
                (roomy.beyond_plan(less), roomy.promised(less)),
                (3 * MIB, 60 * MIB)
            );
            assert_eq!(
                (roomy.beyond_plan(more), roomy.promised(more)),
                (20 * MIB, 0)
            );
        }
    }

    fn reading(available: u64) -> Reading {
        Reading {
            available: Some(available),
            ..Reading::default()
        }
    }

    /// 100 MiB are committed, of which 90 are in use, and 512 are the most.
    const HELD: KvDemand = KvDemand {
        share: 512 * MIB,
        committed: 100 * MIB,
        in_use: 90 * MIB,
        first: 10 * MIB,
        mapped: 0,
    };

    #[test]
    fn the_whole_share_may_be_used_while_the_system_has_plenty() {
        assert_eq!(working_limit(HELD, reading(4096 * MIB)), 512 * MIB);
        let silent = Reading {
            available: None,
            stalled_percent: 99.0,
            ..Reading::default()
        };
        assert_eq!(working_limit(HELD, silent), 512 * MIB);
    }

    #[test]
    fn a_short_system_lowers_the_limit() {
        assert_eq!(working_limit(HELD, reading(100 * MIB)), 200 * MIB);
    }

    #[test]
    fn a_system_that_is_into_its_reserve_gets_pages_back() {
        let short = Reading {
            reserve: 64 * MIB,
            ..reading(4 * MIB)
        };
        assert_eq!(working_limit(HELD, short), 40 * MIB);
    }

    #[test]
    fn mapped_weights_keep_their_place() {
        let mapped = KvDemand {
            mapped: 94 * MIB,
            ..HELD
        };
        assert_eq!(working_limit(mapped, reading(100 * MIB)), 106 * MIB);
        assert_eq!(working_limit(mapped, reading(4 * MIB)), 10 * MIB);
    }

    #[test]
    fn what_the_first_request_needs_is_never_taken_from_it() {
        // The story of a server that refused every request: one page was left to all of them.
        let nothing = KvDemand {
            committed: 0,
            in_use: 0,
            ..HELD
        };
        assert_eq!(working_limit(nothing, reading(0)), 10 * MIB);
    }

    #[test]
    fn while_others_wait_for_memory_nothing_more_is_taken() {
        let stalled = Reading {
            stalled_percent: 25.0,
            ..reading(4096 * MIB)
        };
        assert_eq!(working_limit(HELD, stalled), 90 * MIB);
        let fresh = KvDemand { in_use: 0, ..HELD };
        assert_eq!(working_limit(fresh, stalled), 10 * MIB);
    }

    #[test]
    fn weights_give_the_system_what_it_lacks_beside_pages_in_use() {
        let short = |available, reserve| Reading {
            reserve,
            ..reading(available)
        };
        assert_eq!(weights_beyond(HELD, reading(0)), 0, "ten are idle");
        assert_eq!(weights_beyond(HELD, short(0, 64 * MIB)), 54 * MIB);
        assert_eq!(weights_beyond(HELD, short(60 * MIB, 64 * MIB)), 0);
        let first = KvDemand {
            first: 130 * MIB,
            ..HELD
        };
        assert_eq!(weights_beyond(first, short(4 * MIB, 64 * MIB)), 90 * MIB);
        let silent = Reading::default();
        assert_eq!(weights_beyond(HELD, silent), 0, "nobody says");
    }

    #[test]
    fn pages_keep_a_quarter_more_than_they_use_and_what_they_begin_with() {
        for (used, to_begin_with, spare) in [
            (0, 0, 800),
            (0, 100, 700),
            (80, 100, 700),
            (400, 100, 300),
            (401, 100, 299),
            // An eighth of all, and less.
            (560, 0, 100),
            (564, 0, 0),
            (0, 700, 100),
            (0, 701, 0),
            (800, 0, 0),
            (u64::MAX / 4, 0, 0),
        ] {
            assert_eq!(
                restorable_bytes(800, used, to_begin_with),
                spare,
                "{used}, {to_begin_with}"
            );
        }
    }

    proptest! {
        /// When weights have given what is asked of them, pages keep what is in use and the system its reserve.
        #[test]
        fn what_weights_give_is_enough(
            committed in 0u64..1000, in_use in 0u64..1000, first in 0u64..1000,
            reserve in 0u64..1000, promised in 0u64..1000, available in 0u64..1000,
        ) {
            let kv = KvDemand { share: 10_000, committed: committed.max(in_use), in_use, first, mapped: 0 };
            let reading = |available| Reading { available: Some(available), reserve, promised, ..Reading::default() };
            let freed = weights_beyond(kv, reading(available));
            let after = reading(available + freed);
            prop_assert_eq!(weights_beyond(kv, after), 0);
            prop_assert!(working_limit(kv, after) >= in_use.max(first));
            if freed > 0 {
                prop_assert_eq!(working_limit(kv, after), in_use.max(first), "and no more than that");
            }
        }

        #[test]
        fn the_limit_lies_between_what_runs_and_the_share(
            share in 0u64..1000, committed in 0u64..1000, in_use in 0u64..1000,
            first in 0u64..1000, promised in 0u64..1000, mapped in 0u64..1000,
            available in proptest::option::of(0u64..1000), stalled_percent in 0.0f32..20.0,
        ) {
            let kv = KvDemand { share, committed, in_use, first, mapped };
            let limit = working_limit(kv, Reading { available, reserve: 0, stalled_percent, promised, beyond_plan: 0 });
            prop_assert!(limit <= share && limit >= first.min(share));
            if let Some(available) = available {
                prop_assert!(limit <= first.max(committed + available), "more than there is");
                let more = Reading { available: Some(available + 1), reserve: 0, stalled_percent, promised, beyond_plan: 0 };
                prop_assert!(working_limit(kv, more) >= limit, "more memory never lowers it");
            }
        }
    }
}
