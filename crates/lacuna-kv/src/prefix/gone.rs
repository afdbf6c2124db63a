//! What a tree has let go of lately, so that a miss can be explained.

use std::collections::{HashMap, VecDeque};

use super::tree::Miss;

/// Hashes of groups that left, and why: the last few thousand.
#[derive(Debug, Default)]
pub(super) struct Gone {
    why: HashMap<u64, Miss>,
    order: VecDeque<u64>,
}

impl Gone {
    /// Enough for a context of 100,000 tokens in groups of 16; 100 KiB of memory.
    const REMEMBERED: usize = 8192;

    pub(super) fn get(&self, chain: u64) -> Option<Miss> {
        self.why.get(&chain).copied()
    }

    pub(super) fn note(&mut self, chain: u64, why: Miss) {
        if self.why.insert(chain, why).is_none() {
            self.order.push_back(chain);
        }
        while self.order.len() > Self::REMEMBERED {
            let oldest = self.order.pop_front();
            oldest.and_then(|chain| self.why.remove(&chain));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_few_thousand_are_remembered_and_those_before_forgotten() {
        let mut gone = Gone::default();
        let remembered = Gone::REMEMBERED as u64;
        (0..remembered).for_each(|chain| gone.note(chain, Miss::Evicted));
        gone.note(3, Miss::Expired);
        assert_eq!(gone.get(3), Some(Miss::Expired), "why it left last");
        assert_eq!(
            gone.get(0),
            Some(Miss::Evicted),
            "as many as are remembered"
        );
        gone.note(remembered, Miss::Expired);
        assert_eq!(gone.get(0), None, "one more, so the first is forgotten");
        assert_eq!(gone.get(1), Some(Miss::Evicted));
        assert_eq!(gone.get(remembered), Some(Miss::Expired));
        assert_eq!(
            (gone.why.len(), gone.order.len()),
            (Gone::REMEMBERED, Gone::REMEMBERED)
        );
    }
}
