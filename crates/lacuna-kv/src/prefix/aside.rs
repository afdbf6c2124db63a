//! What would be evicted goes to files without names before, and comes back from them as from a folder.
//!
//! A conversation is written as a whole, what others use of it excepted, the last tokens first: its groups leave as
//! their segments are there, the last first too. What is there already, because it came from there, is not written.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::cache::PrefixCache;
use super::tree::{GroupId, Leaving};
use crate::folder::{CacheFolder, Chain, FolderStatus, Kind};

/// What became of making room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// Something has left.
    Evicted,
    /// What is to leave next is being written.
    Writing,
    /// All that there is is in use.
    Nothing,
}

/// What putting a conversation aside takes, and spares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moving {
    /// Bytes to be written now.
    pub written_bytes: u64,
    /// Bytes to be read when it is gone on with.
    pub read_bytes: u64,
    /// Tokens that need not be computed then.
    pub tokens: usize,
}

impl PrefixCache {
    /// Evicts what is needed least, once it is in a file if there are files for that and it `pays`.
    pub fn put_aside(&mut self, now: Instant, pays: impl FnOnce(Moving) -> bool) -> Eviction {
        let Some(next) = self.tree.next_to_leave(now) else {
            return Eviction::Nothing;
        };
        let (Leaving::Group(id) | Leaving::ResumePoint(id)) = next;
        if self.is_written_first(id, pays) {
            return Eviction::Writing;
        }
        self.tree.evict(now);
        Eviction::Evicted
    }

    /// Gives up a group that has been unused for `time_to_live`, once it is in a file as above; `false` when there is
    /// none.
    pub fn expire(
        &mut self,
        now: Instant,
        time_to_live: Duration,
        pays: impl FnOnce(Moving) -> bool,
    ) -> bool {
        let Some(id) = self.tree.next_to_expire(now, time_to_live) else {
            return false;
        };
        !self.is_written_first(id, pays) && self.tree.expire(now, time_to_live).is_some()
    }

    /// What has been put aside, if there are files for that.
    #[must_use]
    pub fn aside_status(&self) -> Option<FolderStatus> {
        self.unnamed().map(CacheFolder::status)
    }

    /// While something is being put aside, how many pieces have been written since the start.
    #[must_use]
    pub fn aside_progress(&self) -> Option<u64> {
        self.unnamed().and_then(CacheFolder::progress)
    }

    /// Lets go of files of what was put aside, until others find `bytes` of room.
    pub fn give_aside_room(&self, bytes: u64) {
        if let Some(folder) = self.unnamed() {
            folder.give_room(bytes);
        }
    }

    fn unnamed(&self) -> Option<&CacheFolder> {
        self.folder.as_ref().filter(|folder| folder.is_unnamed())
    }

    /// Whether the group `id`, which is to leave, is being written.
    fn is_written_first(&mut self, id: GroupId, pays: impl FnOnce(Moving) -> bool) -> bool {
        let Some(folder) = self.unnamed() else {
            return false;
        };
        if let Some(&chain) = self.aside.get(&id) {
            return folder.is_pending(chain);
        }
        // Of a group that somebody uses it is a resume point, which sequences make anew.
        if self.tree.get(id).is_none_or(|(_, users)| users > 0) {
            return false;
        }
        let settled = self.settle_lineage(folder, id, pays);
        let pending = settled
            .last()
            .is_some_and(|&(_, chain)| folder.is_pending(chain));
        self.aside.extend(settled);
        self.forget_settled();
        pending
    }

    /// Writes what the files lack of the group `id` and of those before it that nobody uses, if that pays. Returns of
    /// which groups that is settled.
    fn settle_lineage(
        &self,
        folder: &CacheFolder,
        id: GroupId,
        pays: impl FnOnce(Moving) -> bool,
    ) -> Vec<(GroupId, Chain)> {
        let (namespace, lineage) = self.tree.lineage(id);
        let root = folder.root(namespace);
        let mut chain = root;
        let chains = lineage.iter().map(|&id| {
            chain = chain.after(self.tree.tokens(id));
            chain
        });
        let chains: Vec<Chain> = chains.collect();
        let used = |&id: &GroupId| self.tree.get(id).is_some_and(|(_, users)| users > 0);
        // Whoever uses a group uses those before it (T1).
        let unused = lineage.partition_point(used)..lineage.len();
        let lacks = |kind, index: usize| !folder.knows(kind, chains[index]);
        let rows = runs(unused.clone(), folder.segment_groups(), |index| {
            lacks(Kind::Rows, index)
        });
        let points = unused.clone().filter(|&index| {
            self.tree.resume_point(lineage[index]).is_some() && lacks(Kind::ResumePoint, index)
        });
        let points: Vec<usize> = points.collect();
        let written = rows.iter().map(|rows| folder.bytes_of(rows.clone()));
        let states = points.iter().map(|&index| folder.point_bytes(index + 1));
        let moving = Moving {
            written_bytes: written.chain(states).sum(),
            read_bytes: folder.bytes_of(unused.clone()) + folder.point_bytes(unused.end),
            tokens: unused.len() * self.grain.group_tokens().get(),
        };
        if pays(moving) {
            for &index in points.iter().rev() {
                if let Some(point) = self.tree.resume_point(lineage[index]) {
                    folder.write_point(chains[index], index + 1, point.clone());
                }
            }
            for rows in rows.into_iter().rev() {
                let before = rows.start.checked_sub(1).map_or(root, |last| chains[last]);
                self.write_groups(
                    folder,
                    before,
                    rows.start,
                    &lineage[rows.clone()],
                    &chains[rows],
                );
            }
        }
        let settled = lineage[unused.clone()].iter().copied();
        settled.zip(chains[unused].iter().copied()).collect()
    }

    fn write_groups(
        &self,
        folder: &CacheFolder,
        before: Chain,
        first: usize,
        groups: &[GroupId],
        chains: &[Chain],
    ) {
        let tokens = groups.iter().flat_map(|&id| self.tree.tokens(id));
        let tokens: Vec<u32> = tokens.copied().collect();
        let pins = groups.iter().filter_map(|&id| self.tree.get(id));
        let pins = pins.map(|(pins, _)| pins.clone()).collect();
        folder.write_rows(before, first, chains, &tokens, pins);
    }

    /// Groups that have left are not asked for again. Now and then is enough.
    fn forget_settled(&mut self) {
        if self.aside.len() > 2 * self.tree.len() {
            let tree = &self.tree;
            self.aside.retain(|&id, _| tree.get(id).is_some());
        }
    }
}

/// The runs of `range` that are `wanted`, none longer than `longest`.
fn runs(range: Range<usize>, longest: usize, wanted: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for index in range.filter(|&index| wanted(index)) {
        match runs.last_mut() {
            Some(run) if run.end == index && run.len() < longest => run.end += 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;
    use lacuna_pages::ByteLength;

    use super::*;
    use crate::prefix::Namespace;
    use crate::swap::{Swap, SwapDevice, SwapSizes};
    use crate::{Geometry, KvCache, KvElements, KvPolicy};

    /// A disk that is asked for nothing here.
    #[derive(Debug)]
    struct Unused;

    impl SwapDevice for Unused {
        fn write(&self, _offset: u64, _bytes: &[u8]) -> std::io::Result<()> {
            Ok(())
        }

        fn read(&self, _offset: u64, _bytes: &mut [u8]) -> std::io::Result<()> {
            Ok(())
        }

        fn discard_from(&self, _offset: u64) {}
    }

    #[test]
    fn what_is_known_of_groups_that_have_left_does_not_add_up() {
        let geometry = Geometry::uniform(1, 1, 64, KvElements::both(ElementType::F16));
        let kv = KvCache::new(geometry, KvPolicy::default()).expect("the system has pages");
        let room = ByteLength::mebibytes(1);
        let sizes = SwapSizes {
            limit: room,
            piece: room,
            block: room,
        };
        let swap = Swap::over(Box::new(Unused), sizes, &kv).expect("it can be swapped");
        let folder = tempfile::tempdir().expect("a folder");
        let files = CacheFolder::open_unnamed(folder.path().into(), swap.room(), &kv, None);
        let mut cache = PrefixCache::new(kv).with_folder(files.expect("a folder"));
        let (groups, now) = (5, Instant::now());
        let count = groups * cache.grain().group_tokens().get();
        let (mut most, mut asked) = (0, 0);
        for conversation in 0..20 {
            let tokens: Vec<u32> = (0..count as u32).map(|at| at * 20 + conversation).collect();
            let start = cache.start(Namespace::COMMON, &tokens, 2 * count);
            let (mut sequence, mut path) = start
                .map(|start| (start.sequence, start.path))
                .expect("memory");
            sequence.prepare(count).expect("memory");
            sequence.accept(count);
            let grown = cache.grow(&mut path, &mut sequence, &tokens, now);
            grown.expect("pages can be sealed");
            cache.leave(path, now);
            let pays = |_| {
                asked += 1;
                false
            };
            assert_eq!(cache.put_aside(now, pays), Eviction::Evicted);
            most = most.max(cache.aside.len());
            assert!(cache.aside.len() >= groups - 1, "of those that are there");
            while cache.put_aside(now, |_| false) == Eviction::Evicted {}
            assert!(cache.tree().is_empty());
        }
        assert_eq!(asked, 20);
        assert!(most <= 3 * groups, "{most}");
    }

    #[test]
    fn runs_are_what_is_wanted_and_no_longer_than_they_may_be() {
        let wanted = |index: usize| ![2, 3, 9].contains(&index);
        assert_eq!(runs(0..12, 3, wanted), [0..2, 4..7, 7..9, 10..12]);
        assert_eq!(runs(0..12, 1, |index| index > 9), [10..11, 11..12]);
        assert!(runs(3..3, 5, |_| true).is_empty());
    }
}
