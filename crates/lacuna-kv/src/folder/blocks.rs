//! Which blocks of prompts can be reused from the folder, for those who choose between machines.
//!
//! Segments come in any order, and one may leave that others come after. A group is *reached* while all groups before it
//! are there, from a prompt's first on: only what is reached can be given to a prompt, and only that is told of.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::chain::Chain;
use crate::prefix::{BlockChange, Blocks, Grain, Medium};

/// The groups and resume points of a folder, and what became of the blocks of one namespace lately. Pure.
#[derive(Debug)]
pub(super) struct StoredBlocks {
    /// Before the first token of the namespace.
    root: Chain,
    blocks: Blocks<Chain>,
    groups: HashMap<Chain, Group>,
    /// Groups by what comes before them.
    after: HashMap<Chain, Vec<Chain>>,
    points: HashSet<Chain>,
}

#[derive(Debug)]
struct Group {
    before: Chain,
    tokens: Box<[u32]>,
    reached: bool,
}

impl StoredBlocks {
    /// Those of the namespace before whose first token is `root`, of which nothing is there yet.
    pub(super) fn new(root: Chain, grain: Arc<Grain>) -> Self {
        Self {
            root,
            blocks: Blocks::new(Medium::Disk, grain),
            groups: HashMap::new(),
            after: HashMap::new(),
            points: HashSet::new(),
        }
    }

    /// What became of blocks since the last call, in order.
    pub(super) fn take(&mut self) -> Vec<BlockChange> {
        self.blocks.take()
    }

    /// A group is there that was not, of `tokens` after `before`.
    pub(super) fn insert_group(&mut self, before: Chain, chain: Chain, tokens: &[u32]) {
        let group = Group {
            before,
            tokens: tokens.into(),
            reached: false,
        };
        self.groups.insert(chain, group);
        self.after.entry(before).or_default().push(chain);
        if before == self.root || self.is_reached(before) {
            self.reach(chain);
        }
    }

    /// A group that was there is not any more.
    pub(super) fn remove_group(&mut self, chain: Chain) {
        if self.is_reached(chain) {
            self.lose(chain);
        }
        let Some(Group { before, .. }) = self.groups.remove(&chain) else {
            return;
        };
        if let Some(after) = self.after.get_mut(&before) {
            after.retain(|&other| other != chain);
            if after.is_empty() {
                self.after.remove(&before);
            }
        }
    }

    /// A resume point is there that was not.
    pub(super) fn insert_point(&mut self, chain: Chain) {
        if self.points.insert(chain) {
            // A group that is not reached has no blocks yet.
            self.blocks.add_use(chain);
        }
    }

    /// A resume point that was there is not any more.
    pub(super) fn remove_point(&mut self, chain: Chain) {
        if self.points.remove(&chain) {
            self.blocks.remove_use(chain);
        }
    }

    fn is_reached(&self, chain: Chain) -> bool {
        self.groups.get(&chain).is_some_and(|group| group.reached)
    }

    /// A group is reached from now on, and with it all that come after it.
    fn reach(&mut self, chain: Chain) {
        for chain in self.with_those_after(chain) {
            let Some(group) = self.groups.get_mut(&chain) else {
                continue;
            };
            group.reached = true;
            let parent = (group.before != self.root).then_some(group.before);
            self.blocks.enter(chain, parent, &group.tokens);
            if self.points.contains(&chain) {
                self.blocks.add_use(chain);
            }
        }
    }

    /// A group is reached no longer, nor is what comes after it: that leaves first.
    fn lose(&mut self, chain: Chain) {
        for chain in self.with_those_after(chain).into_iter().rev() {
            let Some(group) = self.groups.get_mut(&chain) else {
                continue;
            };
            group.reached = false;
            if self.points.contains(&chain) {
                self.blocks.remove_use(chain);
            }
            self.blocks.leave(chain);
        }
    }

    /// A group and all that come after it, each after the one before it.
    fn with_those_after(&self, chain: Chain) -> Vec<Chain> {
        let mut found = vec![chain];
        let mut next = 0;
        while let Some(chain) = found.get(next) {
            found.extend(self.after.get(chain).into_iter().flatten());
            next += 1;
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::num::NonZeroUsize;

    use lacuna_kernels::ElementType;
    use proptest::prelude::*;

    use super::*;
    use crate::geometry::{Geometry, Keep, LayerCache, RowSpec, ValueRows};
    use crate::prefix::{Block, KnownBlocks};
    use crate::{KvCache, KvElements};

    /// Rows in layers that keep all, or with a window beside them.
    fn grain(windows: bool) -> Arc<Grain> {
        let rows = |keep| {
            LayerCache::Rows(RowSpec {
                kv_heads: 1,
                key_dim: 64,
                value_dim: 64,
                values: ValueRows::Apart,
                keep,
            })
        };
        let window = Keep::Window(NonZeroUsize::new(40).expect("not zero"));
        let layers = match windows {
            true => vec![rows(Keep::All), rows(window)],
            false => vec![rows(Keep::All)],
        };
        let geometry = Geometry::new(layers, KvElements::both(ElementType::F32));
        let cache = KvCache::new(
            geometry.expect("a model"),
            "sparse".parse().expect("a policy"),
        );
        Arc::new(cache.expect("the system has pages").grain())
    }

    /// Groups of three texts that begin alike, two and two: which comes after which, and its tokens.
    fn texts(root: Chain, group: usize) -> Vec<(Chain, Chain, Vec<u32>)> {
        let mut groups: Vec<(Chain, Chain, Vec<u32>)> = Vec::new();
        for text in [[1, 2, 3, 4], [1, 2, 5, 6], [1, 7, 8, 9]] {
            let mut before = root;
            for number in text {
                let tokens = vec![number; group];
                let chain = before.after(&tokens);
                if !groups.iter().any(|(_, other, _)| *other == chain) {
                    groups.push((before, chain, tokens));
                }
                before = chain;
            }
        }
        groups
    }

    /// All tokens up to the ends of blocks that a prompt could be given, worked out anew.
    fn reusable(
        groups: &[(Chain, Chain, Vec<u32>)],
        (there, points): &(HashSet<Chain>, HashSet<Chain>),
        (root, grain): (Chain, &Grain),
    ) -> BTreeSet<Vec<u32>> {
        let mut reusable = BTreeSet::new();
        for (_, end, _) in groups {
            let mut lineage = Vec::new();
            let mut chain = *end;
            while let Some(group) = groups.iter().find(|(_, other, _)| *other == chain) {
                lineage.insert(0, group);
                chain = group.0;
            }
            let whole = chain == root && lineage.iter().all(|(_, chain, _)| there.contains(chain));
            if whole && (!grain.has_resume_points() || points.contains(end)) {
                let tokens = lineage.iter().flat_map(|(_, _, tokens)| tokens);
                let tokens: Vec<u32> = tokens.copied().collect();
                let ends = Block::TOKENS..=grain.whole_tokens(lineage.len());
                reusable.extend(
                    ends.step_by(Block::TOKENS)
                        .map(|end| tokens[..end].to_vec()),
                );
            }
        }
        reusable
    }

    proptest! {
        #[test]
        fn whatever_comes_and_leaves_what_is_told_is_what_a_prompt_could_be_given(
            windows in any::<bool>(),
            acts in prop::collection::vec((0..9usize, any::<bool>()), 1..80),
        ) {
            let (root, grain) = (Chain([0; 32]), grain(windows));
            let groups = texts(root, grain.group_tokens().get());
            prop_assert_eq!(groups.len(), 9);
            let mut blocks = StoredBlocks::new(root, Arc::clone(&grain));
            let mut there = (HashSet::new(), HashSet::new());
            let mut known = KnownBlocks::default();
            for (at, is_point) in acts {
                let (before, chain, tokens) = &groups[at];
                match (is_point, there.0.remove(chain), there.1.remove(chain)) {
                    (false, true, point) => {
                        blocks.remove_group(*chain);
                        there.1.extend(point.then_some(*chain));
                    }
                    (false, false, point) => {
                        blocks.insert_group(*before, *chain, tokens);
                        there.0.insert(*chain);
                        there.1.extend(point.then_some(*chain));
                    }
                    (true, group, true) => {
                        blocks.remove_point(*chain);
                        there.0.extend(group.then_some(*chain));
                    }
                    (true, group, false) => {
                        blocks.insert_point(*chain);
                        there.1.insert(*chain);
                        there.0.extend(group.then_some(*chain));
                    }
                }
                for change in blocks.take() {
                    match change {
                        BlockChange::Stored(Medium::Disk, block) => prop_assert!(known.store(&block)),
                        BlockChange::Removed(Medium::Disk, hash) => prop_assert!(known.remove(hash)),
                        other => prop_assert!(false, "of another medium: {other:?}"),
                    }
                }
                prop_assert_eq!(known.prefixes(), reusable(&groups, &there, (root, &grain)));
            }
        }
    }
}
