//! Groups of sequences whose pages are moved to a swap file, and brought back.

use std::time::Instant;

use super::cache::{Path, PrefixCache};
use super::namespace::Namespace;
use super::pins::Pins;

impl PrefixCache {
    /// How many groups of `path`, from the first on, others use too: they stay in memory without its sequence.
    #[must_use]
    pub fn shared_groups(&self, path: &Path) -> usize {
        // Whoever uses a group uses those before it (T1).
        path.groups
            .partition_point(|&id| self.tree.get(id).is_some_and(|(_, users)| users > 1))
    }

    /// The sequence of `path` has no pages any more of groups after the first `groups`; others may have those.
    pub fn leave_after(&mut self, path: &mut Path, groups: usize, now: Instant) {
        path.let_go_of_points();
        if groups < path.groups.len() {
            let gone = path.groups.split_off(groups);
            self.release(&gone, now);
            path.chains.truncate(groups);
            path.written = path.written.min(groups);
        }
    }

    /// How many groups of `tokens` are in memory, and how many of them nobody uses.
    #[must_use]
    pub fn in_memory(&self, namespace: Namespace, tokens: &[u32]) -> (usize, usize) {
        let groups = self.tree.find(namespace, tokens).groups;
        let unused = |id: &&_| self.tree.get(**id).is_some_and(|(_, users)| users == 0);
        (groups.len(), groups.iter().filter(unused).count())
    }

    /// Has the sequence of `path`, which has left all of its groups, use those of `tokens` that are in memory. Returns
    /// how many they are.
    pub fn rejoin(&mut self, path: &mut Path, tokens: &[u32]) -> usize {
        debug_assert!(path.groups.is_empty(), "a path that has left its groups");
        path.groups = self.tree.find(path.namespace, tokens).groups;
        self.tree.acquire(&path.groups);
        path.groups.len()
    }

    /// The pages of the groups of `path`.
    #[must_use]
    pub fn pins_of(&self, path: &Path) -> Vec<&Pins> {
        let pins = |&id| self.tree.get(id).map(|(pins, _)| pins);
        path.groups.iter().filter_map(pins).collect()
    }
}
