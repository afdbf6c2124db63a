//! Which groups and resume points are in the folder, and in which segment. Pure; made from headers when a folder is
//! opened, so there is nothing on disk that could contradict them.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::blocks::StoredBlocks;
use super::chain::Chain;
use super::segment::{Header, Kind};
use crate::prefix::BlockChange;

/// A segment, as far as finding it takes.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Its file in the folder.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) first_group: usize,
    pub(crate) before: Chain,
    /// What everything up to the end of each of its groups hashes to; of a resume point, before it.
    pub(crate) chains: Vec<Chain>,
    pub(crate) payload_bytes: u64,
}

impl Segment {
    pub(crate) fn of(header: &Header) -> Self {
        let chains = header.chains();
        let last = chains.last().copied().unwrap_or(header.before);
        Self {
            name: file_name(
                header.kind,
                header.first_group as usize,
                header.groups(),
                &last.short(),
            ),
            kind: header.kind,
            first_group: header.first_group as usize,
            before: header.before,
            chains,
            payload_bytes: header.payload_bytes,
        }
    }

    /// How many of its groups from group `from` on are those of `chains`.
    pub(crate) fn common(&self, chains: &[Chain], from: usize) -> usize {
        let offset = from.saturating_sub(self.first_group);
        let there = self.chains.get(offset..).unwrap_or_default().iter();
        there.zip(chains).take_while(|(a, b)| a == b).count()
    }
}

/// The name says what is needed to tell which segments go first without reading them.
/// `last` is the start of what everything up to its end hashes to ([`Chain::short`]).
pub(crate) fn file_name(kind: Kind, first_group: usize, groups: usize, last: &str) -> String {
    let suffix = match kind {
        Kind::Rows => "rows",
        Kind::ResumePoint => "point",
    };
    format!("{first_group:08x}-{groups:04x}-{last}.{suffix}")
}

/// What a file of a cache folder is, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Named {
    /// A segment, so many groups before it.
    Segment(u32),
    /// One that is being written.
    Part,
    /// One that was set aside.
    Bad,
}

impl Named {
    /// `None` for files that are none of a cache's: they are left alone.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let (stem, suffix) = name.rsplit_once('.')?;
        let fields: Vec<&str> = stem.split('-').collect();
        let [first, groups, chain] = fields[..] else {
            return None;
        };
        let hex = |text: &str, digits| {
            text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        if !(hex(first, 8) && hex(groups, 4) && hex(chain, 32)) {
            return None;
        }
        match suffix {
            "rows" | "point" => u32::from_str_radix(first, 16).ok().map(Self::Segment),
            "part" => Some(Self::Part),
            "bad" => Some(Self::Bad),
            _ => None,
        }
    }
}

/// The segments of one fingerprint.
#[derive(Debug, Default)]
pub(crate) struct Index {
    segments: HashMap<String, Arc<Segment>>,
    groups: HashMap<Chain, Arc<Segment>>,
    points: HashMap<Chain, Arc<Segment>>,
    /// Groups and resume points on their way to the folder.
    pending: HashSet<(Kind, Chain)>,
    /// What others are told of.
    blocks: Option<StoredBlocks>,
}

impl Index {
    /// Segments there are.
    pub(crate) fn len(&self) -> usize {
        self.segments.len()
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.segments.contains_key(name)
    }

    /// Forgets the segments there are, which are to be found again, and has `blocks` follow all that come and go from
    /// then on.
    pub(crate) fn watch(&mut self, blocks: StoredBlocks) {
        *self = Self {
            pending: std::mem::take(&mut self.pending),
            blocks: Some(blocks),
            ..Self::default()
        };
    }

    /// What became of blocks since the last call, in order.
    pub(crate) fn take_block_changes(&mut self) -> Vec<BlockChange> {
        let blocks = self.blocks.as_mut();
        blocks.map(StoredBlocks::take).unwrap_or_default()
    }

    /// Takes up a segment, whose groups have these `tokens`, unless it is there: others write the same.
    pub(crate) fn insert(&mut self, segment: Segment, tokens: &[u32]) {
        if self.contains(&segment.name) {
            return;
        }
        let segment = Arc::new(segment);
        let places = match segment.kind {
            Kind::Rows => &mut self.groups,
            Kind::ResumePoint => &mut self.points,
        };
        let group_tokens = tokens.len() / segment.chains.len().max(1);
        let mut before = segment.before;
        for (at, &chain) in segment.chains.iter().enumerate() {
            if let Entry::Vacant(place) = places.entry(chain) {
                place.insert(Arc::clone(&segment));
                match (&mut self.blocks, segment.kind) {
                    (None, _) => {}
                    (Some(blocks), Kind::ResumePoint) => blocks.insert_point(chain),
                    (Some(blocks), Kind::Rows) => {
                        let tokens = &tokens[at * group_tokens..][..group_tokens];
                        blocks.insert_group(before, chain, tokens);
                    }
                }
            }
            before = chain;
        }
        self.segments.insert(segment.name.clone(), segment);
    }

    /// Takes a segment out whose file is gone or of no use.
    pub(crate) fn remove(&mut self, name: &str) {
        let Some(segment) = self.segments.remove(name) else {
            return;
        };
        let places = match segment.kind {
            Kind::Rows => &mut self.groups,
            Kind::ResumePoint => &mut self.points,
        };
        for chain in &segment.chains {
            if places
                .get(chain)
                .is_some_and(|held| Arc::ptr_eq(held, &segment))
            {
                places.remove(chain);
                match (&mut self.blocks, segment.kind) {
                    (None, _) => {}
                    (Some(blocks), Kind::ResumePoint) => blocks.remove_point(*chain),
                    (Some(blocks), Kind::Rows) => blocks.remove_group(*chain),
                }
            }
        }
    }

    /// Takes out what is not among `names`.
    pub(crate) fn keep_only(&mut self, names: &HashSet<String>) {
        let gone = self.segments.keys().filter(|name| !names.contains(*name));
        for name in gone.cloned().collect::<Vec<_>>() {
            self.remove(&name);
        }
    }

    /// The segment with the group or resume point at whose end the tokens hash to `chain`.
    pub(crate) fn find(&self, kind: Kind, chain: Chain) -> Option<&Arc<Segment>> {
        match kind {
            Kind::Rows => self.groups.get(&chain),
            Kind::ResumePoint => self.points.get(&chain),
        }
    }

    /// After how many groups segments end that follow each other from group `start` on, as far as they have what
    /// `chains` say of each group.
    pub(crate) fn reach(&self, chains: &[Chain], start: usize) -> usize {
        let mut end = start;
        while let Some(segment) = chains
            .get(end)
            .and_then(|&chain| self.find(Kind::Rows, chain))
        {
            match segment.common(&chains[end..], end) {
                // It says that it is elsewhere.
                0 => break,
                common => end += common,
            }
        }
        end
    }

    /// Whether it is in the folder or on its way there.
    pub(crate) fn knows(&self, kind: Kind, chain: Chain) -> bool {
        self.pending.contains(&(kind, chain)) || self.find(kind, chain).is_some()
    }

    /// Whether anything at the end of `chain` is on its way to the folder.
    pub(crate) fn is_pending(&self, chain: Chain) -> bool {
        let kinds = [Kind::Rows, Kind::ResumePoint];
        kinds
            .into_iter()
            .any(|kind| self.pending.contains(&(kind, chain)))
    }

    /// Whether anything is.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    pub(crate) fn expect(&mut self, kind: Kind, chains: &[Chain]) {
        self.pending
            .extend(chains.iter().map(|&chain| (kind, chain)));
    }

    pub(crate) fn expect_no_more(&mut self, kind: Kind, chains: &[Chain]) {
        for &chain in chains {
            self.pending.remove(&(kind, chain));
        }
    }

    /// The segments that what is after `chain` needs, that of its own group first.
    pub(crate) fn lineage(&self, mut chain: Chain) -> Vec<Arc<Segment>> {
        let mut lineage: Vec<Arc<Segment>> = Vec::new();
        while let Some(segment) = self.groups.get(&chain) {
            chain = segment.before;
            lineage.push(Arc::clone(segment));
        }
        lineage
    }

    /// What going on after the tokens of `end` takes: the segments that lead there, and the last resume point among
    /// their tokens. And whether they lead there from `root`.
    pub(crate) fn needed(&self, end: Chain, root: Chain) -> (Vec<Arc<Segment>>, bool) {
        let mut needed = self.lineage(end);
        let first = needed.last().map_or(end, |segment| segment.before);
        let later = |chain: &&Chain| **chain != end;
        let chains = needed
            .iter()
            .flat_map(|segment| segment.chains.iter().rev());
        let points = chains
            .skip_while(later)
            .find_map(|chain| self.points.get(chain));
        needed.extend(points.cloned());
        (needed, first == root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chains(tokens: &[u32]) -> Vec<Chain> {
        let mut chain = Chain([0; 32]);
        let next = tokens.iter().map(|&token| {
            chain = chain.after(&[token]);
            chain
        });
        next.collect()
    }

    fn rows(first_group: usize, all: &[Chain]) -> Segment {
        let before = match first_group {
            0 => Chain([0; 32]),
            first => all[first - 1],
        };
        let chains = all[first_group..].to_vec();
        let last = *chains.last().expect("a group");
        Segment {
            name: file_name(Kind::Rows, first_group, chains.len(), &last.short()),
            kind: Kind::Rows,
            first_group,
            before,
            chains,
            payload_bytes: 0,
        }
    }

    #[test]
    fn groups_are_found_by_all_tokens_before_them_until_their_segment_leaves() {
        let (one, two) = (chains(&[1, 2, 3, 4]), chains(&[1, 2, 3, 5, 6]));
        let mut index = Index::default();
        index.insert(rows(0, &one[..2]), &[1, 2]);
        index.insert(rows(2, &one), &[3, 4]);
        index.insert(rows(3, &two), &[5, 6]);
        let first = |chain| index.find(Kind::Rows, chain).map(|found| found.first_group);
        assert_eq!(
            one.iter().map(|&chain| first(chain)).collect::<Vec<_>>(),
            [Some(0), Some(0), Some(2), Some(2)]
        );
        assert_eq!(first(two[4]), Some(3));
        let lineage = index.lineage(two[4]);
        let firsts = lineage.iter().map(|segment| segment.first_group);
        assert_eq!(firsts.collect::<Vec<_>>(), [3, 2, 0]);
        let middle = lineage[1].name.clone();
        index.remove(&middle);
        assert!(index.find(Kind::Rows, one[3]).is_none());
        assert!(index.find(Kind::Rows, one[1]).is_some());
        assert_eq!(index.lineage(two[4]).len(), 1);
        index.keep_only(&HashSet::new());
        assert_eq!((index.len(), index.groups.len()), (0, 0));
    }

    /// Its groups used to stay when it was removed: they were found for ever after, in a file that was not there, and
    /// never written again.
    #[test]
    fn a_segment_that_is_taken_up_twice_leaves_once() {
        let all = chains(&[1, 2]);
        let mut index = Index::default();
        index.insert(rows(0, &all), &[1, 2]);
        index.insert(rows(0, &all), &[1, 2]);
        assert_eq!(index.len(), 1);
        index.remove(&rows(0, &all).name);
        assert_eq!((index.len(), index.groups.len()), (0, 0));
        assert!(!index.knows(Kind::Rows, all[1]));
    }

    #[test]
    fn what_is_on_its_way_is_known_and_not_found() {
        let all = chains(&[1, 2]);
        let mut index = Index::default();
        index.expect(Kind::Rows, &all);
        assert!(index.knows(Kind::Rows, all[1]) && !index.knows(Kind::ResumePoint, all[1]));
        assert!(index.find(Kind::Rows, all[1]).is_none());
        index.expect_no_more(Kind::Rows, &all);
        assert!(!index.knows(Kind::Rows, all[0]));
    }

    #[test]
    fn what_is_on_its_way_stays_so_while_a_folder_is_looked_through_again() {
        use lacuna_kernels::ElementType;
        let geometry =
            crate::Geometry::uniform(1, 1, 64, crate::KvElements::both(ElementType::F32));
        let cache = crate::KvCache::new(geometry, "sparse".parse().expect("a policy"));
        let grain = Arc::new(cache.expect("the system has pages").grain());
        let all = chains(&[1, 2, 3]);
        let mut index = Index::default();
        assert!(!index.has_pending());
        index.insert(rows(0, &all[..1]), &[1]);
        index.expect(Kind::Rows, &all[1..2]);
        index.expect(Kind::ResumePoint, &all[2..]);
        index.watch(StoredBlocks::new(Chain([0; 32]), grain));
        assert_eq!(index.len(), 0, "it is found again");
        assert!(index.has_pending());
        let pending = |index: &Index| [0, 1, 2].map(|group| index.is_pending(all[group]));
        assert_eq!(pending(&index), [false, true, true]);
        assert!(index.knows(Kind::Rows, all[1]) && !index.knows(Kind::Rows, all[2]));
        index.expect_no_more(Kind::Rows, &all[1..2]);
        assert_eq!(pending(&index), [false, false, true]);
        assert!(index.has_pending());
        index.expect_no_more(Kind::ResumePoint, &all[2..]);
        assert!(!index.has_pending());
    }

    #[test]
    fn segments_reach_as_far_as_they_have_what_a_prompt_has() {
        let (one, two) = (chains(&[1, 2, 3, 4]), chains(&[1, 2, 3, 5]));
        let mut index = Index::default();
        index.insert(rows(0, &one[..2]), &[1, 2]);
        index.insert(rows(2, &one), &[3, 4]);
        assert_eq!(index.reach(&one, 0), 4);
        assert_eq!(index.reach(&two, 0), 3, "the last group is another");
        assert_eq!(index.reach(&one, 3), 4, "from the middle of a segment");
        assert_eq!(index.reach(&one, 4), 4, "nothing comes after it");
        assert_eq!(index.reach(&chains(&[9]), 0), 0);
    }

    #[test]
    fn a_session_needs_the_last_resume_point_before_where_it_ends_and_none_behind() {
        let all = chains(&[1, 2, 3, 4]);
        let mut index = Index::default();
        index.insert(rows(0, &all), &[1, 2, 3, 4]);
        for group in [1, 2, 4] {
            let chain = all[group - 1];
            let point = Segment {
                name: file_name(Kind::ResumePoint, group, 0, &chain.short()),
                kind: Kind::ResumePoint,
                first_group: group,
                before: chain,
                chains: vec![chain],
                payload_bytes: 0,
            };
            index.insert(point, &[]);
        }
        let needed = |end: usize| {
            let (needed, whole) = index.needed(all[end - 1], Chain([0; 32]));
            assert!(whole);
            let firsts = needed
                .iter()
                .map(|segment| (segment.kind, segment.first_group));
            firsts.collect::<Vec<_>>()
        };
        for (end, point) in [(1, 1), (2, 2), (3, 2), (4, 4)] {
            let expected = [(Kind::Rows, 0), (Kind::ResumePoint, point)];
            assert_eq!(needed(end), expected, "up to group {end}");
        }
        assert!(!index.needed(all[0], all[1]).1, "from elsewhere");
    }

    #[test]
    fn names_say_how_many_groups_are_before_and_other_files_have_others() {
        let name = file_name(Kind::ResumePoint, 300, 0, &Chain([7; 32]).short());
        assert_eq!(Named::of(&name), Some(Named::Segment(300)));
        let named = |suffix: &str| Named::of(&name.replace("point", suffix));
        assert_eq!(named("part"), Some(Named::Part));
        assert_eq!(named("bad"), Some(Named::Bad));
        assert_eq!(named("txt"), None);
        for other in [
            "",
            "lock",
            "film.part",
            "12-1-2.rows",
            "settings",
            "a-b-c.bad",
        ] {
            assert_eq!(Named::of(other), None, "{other}");
        }
        // As long as a number, and none; a number, and too short.
        for (field, other) in [
            (0..8, "filmfilm"),
            (0..8, "12c"),
            (9..13, "film"),
            (9..13, "0"),
        ] {
            let mut name = name.clone();
            name.replace_range(field, other);
            assert_eq!(Named::of(&name), None, "{name}");
        }
    }
}
