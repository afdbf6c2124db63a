//! Slots for the experts of a mixture: how many each layer has, and which expert is in which.
//!
//! A layer holds as many experts as it has slots, those that were used last. A token's experts are in part those of
//! tokens shortly before it, so a few slots go a long way; nothing is known of them before the router has
//! been computed, so nothing of them can be read ahead as matrices are that every pass uses.

use serde::Serialize;

/// The matrices of experts that one operation multiplies with: gate and up, or down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertUse {
    /// The tensors they are in.
    pub names: Vec<String>,
    /// Their numbers among the program's tensors.
    pub(crate) tensors: Vec<usize>,
    /// Which of the layers that have experts it is of.
    pub layer: usize,
    /// Experts there are.
    pub experts: usize,
    /// Of these, how many a token has.
    pub used: usize,
    /// Bytes of the largest expert.
    pub bytes: u64,
    /// Memory that it takes, wherever in the file it begins.
    pub slot_bytes: u64,
}

/// Memory for experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ExpertSlots {
    /// Experts that a layer holds at once.
    pub slots: usize,
    /// Experts that it has.
    pub experts: usize,
    /// Experts that a token has of it.
    pub used: usize,
    /// Layers that have experts.
    pub layers: usize,
    /// Memory of all slots.
    pub bytes: u64,
    /// Bytes that are read for an expert that is not in its slot: the mean over layers.
    pub expert_bytes: u64,
}

/// What slots hold of a text's experts, by the share of experts that have slots. Measured by others of
/// Qwen3-30B-A3B with the least recently used ones leaving, 256 tokens from empty slots on (issue 1359 of the engine
/// imp). Mixtures differ: of some hardly an expert comes again soon, and then it is the share itself.
const HITS: [(f64, f64); 6] = [
    (0.0, 0.0),
    (0.0625, 0.366),
    (0.19, 0.741),
    (0.38, 0.894),
    (0.635, 0.962),
    (1.0, 1.0),
];

/// A rate of hits that is less than so much above the share of experts in memory is what chance gives: those that were
/// used last are no likelier to be used than others.
const CHANCE: f64 = 0.03;

impl ExpertSlots {
    /// The fewest that work at all: while one expert is computed with, the next is read. A token that has more goes
    /// through them as through a ring.
    pub const LEAST: usize = 2;

    /// So many in each layer, of which none has more than it has experts. `None` without experts.
    #[must_use]
    pub fn of(uses: &[ExpertUse], slots: usize) -> Option<Self> {
        let experts = uses.iter().map(|it| it.experts).max()?;
        let layers = uses.iter().map(|it| it.layer + 1).max()?;
        let bytes = |of: &ExpertUse| slots.min(of.experts) as u64 * of.slot_bytes;
        let read: u64 = uses.iter().map(|it| it.bytes).sum();
        Some(Self {
            slots: slots.min(experts),
            experts,
            used: uses.iter().map(|it| it.used).max()?,
            layers,
            bytes: uses.iter().map(bytes).sum(),
            expert_bytes: read / layers as u64,
        })
    }

    /// As many as `room` bytes hold, but no fewer than the fewest.
    #[must_use]
    pub fn within(uses: &[ExpertUse], room: u64) -> Option<Self> {
        let all = Self::of(uses, usize::MAX)?;
        let mut fewer = (Self::LEAST..=all.experts).rev();
        let fits = fewer.find_map(|slots| Self::of(uses, slots).filter(|it| it.bytes <= room));
        fits.or_else(|| Self::of(uses, Self::LEAST))
    }

    /// The part of experts that can be in memory.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.slots as f64 / self.experts.max(1) as f64
    }

    /// The part of a token's experts that is found in memory, by what others have measured of one mixture.
    #[must_use]
    pub fn expected_hits(&self) -> f64 {
        let share = self.share();
        let between = HITS.windows(2).find(|two| share <= two[1].0);
        between.map_or(1.0, |two| {
            let [(from, low), (to, high)] = [two[0], two[1]];
            low + (high - low) * (share - from) / (to - from)
        })
    }

    /// Bytes that a token reads when this part of its experts is found in memory.
    #[must_use]
    pub fn bytes_per_token(&self, hits: f64) -> f64 {
        let chosen = (self.layers * self.used) as f64;
        chosen * (1.0 - hits).max(0.0) * self.expert_bytes as f64
    }

    /// Whether keeping the experts that were used last has found more of them than any others would have.
    #[must_use]
    pub fn pay(&self, hits: f64) -> bool {
        self.slots == self.experts || hits > self.share() + CHANCE
    }

    /// The same in words.
    #[must_use]
    pub fn finding(&self, hits: f64) -> &'static str {
        match (self.slots == self.experts, self.pay(hits)) {
            (true, _) => "every expert has a slot",
            (false, true) => {
                "tokens have experts of tokens shortly before them, and slots keep those"
            }
            (false, false) => {
                "tokens' experts do not come again soon: slots find what chance would, the part of experts that they hold"
            }
        }
    }
}

/// Which experts a layer's slots hold; the one that was used least recently leaves first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLru {
    /// By slot.
    holds: Vec<Option<u32>>,
    /// By expert.
    slots: Vec<Option<usize>>,
    /// All slots, that which was used last at the end.
    order: Vec<usize>,
}

/// One pass's use of a layer's experts: those that are in slots, then the others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExpertTurn {
    /// Uses, in the order in which slots are given away.
    pub uses: Vec<SlotUse>,
    /// How many of them find their expert.
    pub hits: usize,
}

/// The use of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotUse {
    /// Its place in the list that was asked for.
    pub band: u32,
    /// The expert.
    pub expert: u32,
    /// Where it is, or comes to.
    pub slot: usize,
    /// The use that must be over before the slot is given away, where a pass has more experts than there are slots.
    pub after: Option<usize>,
}

impl ExpertLru {
    /// Empty slots for some of `experts` experts.
    ///
    /// # Panics
    /// Without slots.
    #[must_use]
    pub fn new(slots: usize, experts: usize) -> Self {
        assert!(slots > 0, "an expert is computed with in a slot");
        Self {
            holds: vec![None; slots],
            slots: vec![None; experts],
            order: (0..slots).collect(),
        }
    }

    /// Slots there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.holds.len()
    }

    /// Whether there are none, which cannot be.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.holds.is_empty()
    }

    /// Experts that may be in them.
    pub(crate) fn experts(&self) -> usize {
        self.slots.len()
    }

    /// The slot of an expert.
    #[must_use]
    pub fn slot(&self, expert: u32) -> Option<usize> {
        self.slots[expert as usize]
    }

    /// How a pass that uses `experts`, each once and in ascending order, goes about it. Slots are given away in an order
    /// that does not depend on which read ends first: those that the pass does not use, the least recently used
    /// first, then those of uses that are over, the first first.
    #[must_use]
    pub fn plan(&self, experts: &[u32]) -> ExpertTurn {
        let numbered = || (0u32..).zip(experts.iter().copied());
        let found = numbered().filter_map(|(band, expert)| {
            let slot = self.slot(expert)?;
            Some(SlotUse {
                band,
                expert,
                slot,
                after: None,
            })
        });
        let mut uses: Vec<SlotUse> = found.collect();
        let hits = uses.len();
        let is_idle = |slot: &usize| {
            let held = self.holds[*slot];
            held.is_none_or(|held| experts.binary_search(&held).is_err())
        };
        let mut idle = self.order.iter().copied().filter(is_idle);
        let missing = numbered().filter(|(_, expert)| self.slot(*expert).is_none());
        let mut given = 0;
        for (band, expert) in missing {
            let (slot, after) = match idle.next() {
                Some(slot) => (slot, None),
                None => {
                    given += 1;
                    (uses[given - 1].slot, Some(given - 1))
                }
            };
            uses.push(SlotUse {
                band,
                expert,
                slot,
                after,
            });
        }
        ExpertTurn { uses, hits }
    }

    /// Enters that a turn is over, all of which worked.
    pub fn record(&mut self, turn: &ExpertTurn) {
        for of in &turn.uses {
            self.hold(of.slot, of.expert);
        }
        self.touch(turn);
    }

    /// Enters that what a slot held is gone.
    pub(crate) fn empty(&mut self, slot: usize) {
        if let Some(held) = self.holds[slot].take() {
            self.slots[held as usize] = None;
        }
    }

    /// Enters what a slot holds.
    pub(crate) fn hold(&mut self, slot: usize, expert: u32) {
        self.empty(slot);
        self.holds[slot] = Some(expert);
        self.slots[expert as usize] = Some(slot);
    }

    /// Enters that slots have been used.
    pub(crate) fn touch(&mut self, turn: &ExpertTurn) {
        let mut last = vec![None; self.holds.len()];
        for (index, of) in turn.uses.iter().enumerate() {
            last[of.slot] = Some(index);
        }
        // Those that were not used stay as they were, before all that were.
        self.order.sort_by_key(|slot| last[*slot]);
    }

    /// Changes how many slots there are: those that were used least recently go. Returns which of the slots before are
    /// the first ones now, in their new order.
    pub(crate) fn resize(&mut self, slots: usize) -> Vec<usize> {
        let gone = self.order.len().saturating_sub(slots);
        let left: Vec<usize> = self.order[gone..].to_vec();
        let mut kept = left.clone();
        kept.sort_unstable();
        let mut changed = Self::new(slots, self.slots.len());
        for (slot, before) in kept.iter().enumerate() {
            if let Some(expert) = self.holds[*before] {
                changed.hold(slot, expert);
            }
        }
        let place = |before: &usize| kept.binary_search(before).ok();
        changed.order = (kept.len()..slots)
            .chain(left.iter().filter_map(place))
            .collect();
        *self = changed;
        kept
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slots_are_as_many_as_there_is_room_for_and_two_at_least() {
        let of = |layer, experts| ExpertUse {
            names: Vec::new(),
            tensors: Vec::new(),
            layer,
            experts,
            used: 2,
            bytes: 90,
            slot_bytes: 100,
        };
        let uses = [of(0, 8), of(0, 8), of(1, 4)];
        let slots = |room| ExpertSlots::within(&uses, room).expect("there are experts");
        assert_eq!((slots(0).slots, slots(0).bytes), (2, 600));
        assert_eq!((slots(899).slots, slots(900).slots), (2, 3));
        assert_eq!((slots(1_400).slots, slots(1_400).bytes), (5, 1_400));
        assert_eq!((slots(9_999).slots, slots(9_999).bytes), (8, 2_000));
        assert_eq!((slots(0).layers, slots(0).expert_bytes), (2, 135));
        assert_eq!(ExpertSlots::within(&[], 1 << 30), None);
    }

    #[test]
    fn more_slots_are_expected_to_find_more_and_never_less_than_chance() {
        let slots = |slots| ExpertSlots {
            slots,
            experts: 128,
            used: 8,
            layers: 48,
            bytes: 0,
            expert_bytes: 1_000,
        };
        let mut before = 0.0;
        for count in 2..=128 {
            let hits = slots(count).expected_hits();
            assert!(hits > before && hits >= slots(count).share(), "{count}");
            before = hits;
        }
        assert_eq!(before, 1.0);
        assert_eq!(slots(64).bytes_per_token(1.0), 0.0);
        assert_eq!(slots(64).bytes_per_token(0.75), 96_000.0);
        assert!(slots(64).pay(0.9) && !slots(64).pay(0.51) && slots(128).pay(1.0));
    }

    #[test]
    fn a_pass_of_more_experts_than_slots_uses_what_is_there_first() {
        let mut lru = ExpertLru::new(2, 8);
        lru.record(&lru.plan(&[5, 6]));
        let turn = lru.plan(&[1, 5, 6, 7]);
        let uses: Vec<_> = turn.uses.iter().map(|it| (it.expert, it.after)).collect();
        assert_eq!(turn.hits, 2);
        assert_eq!(uses, [(5, None), (6, None), (1, Some(0)), (7, Some(1))]);
        lru.record(&turn);
        assert_eq!(lru.plan(&[1, 7]).hits, 2);
    }

    /// The same said plainly: experts in slots, that which was used last at the end.
    fn plainly(held: &mut Vec<u32>, slots: usize, experts: &[u32]) -> usize {
        let (hits, missing): (Vec<u32>, Vec<u32>) =
            experts.iter().partition(|expert| held.contains(expert));
        held.retain(|expert| !hits.contains(expert));
        held.extend(&hits);
        for expert in missing {
            if held.len() == slots {
                held.remove(0);
            }
            held.push(expert);
        }
        hits.len()
    }

    proptest! {
        #[test]
        fn the_least_recently_used_leaves(
            slots in 1usize..10,
            passes in prop::collection::vec(prop::collection::btree_set(0u32..12, 1..12), 1..40),
            other in 1usize..10,
        ) {
            let (mut lru, mut held) = (ExpertLru::new(slots, 12), Vec::new());
            let mut count = slots;
            for (index, experts) in passes.iter().enumerate() {
                let experts: Vec<u32> = experts.iter().copied().collect();
                if index == passes.len() / 2 {
                    count = other;
                    lru.resize(other);
                    held.drain(..held.len().saturating_sub(other));
                }
                let turn = lru.plan(&experts);
                for (at, of) in turn.uses.iter().enumerate() {
                    prop_assert!(of.after.is_none_or(|after| after < at));
                    prop_assert!(of.slot < count);
                    prop_assert_eq!(experts[of.band as usize], of.expert);
                }
                prop_assert_eq!(turn.hits, plainly(&mut held, count, &experts));
                lru.record(&turn);
                for expert in 0..12 {
                    prop_assert_eq!(lru.slot(expert).is_some(), held.contains(&expert));
                }
            }
        }
    }
}
