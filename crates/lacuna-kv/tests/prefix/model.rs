//! Random histories, every answer compared with a list that is searched from end to end.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use lacuna_kv::prefix::{GroupId, Inserted, Miss, Namespace, Parent, Tree};
use proptest::prelude::*;

use crate::hashing::Narrow;

const GROUP: usize = 2;
const TIME_TO_LIVE: Duration = Duration::from_millis(3);
/// Steps that fall into the same millisecond, so that groups are last used at the same time.
const STEPS_PER_TICK: u64 = 3;

#[derive(Debug, Clone)]
enum Step {
    /// Begin with what is kept of a prompt in a namespace.
    Start(Namespace, Vec<u32>),
    /// A sequence computes its next group.
    Grow(usize),
    /// A sequence ends.
    Leave(usize),
    Pin(usize, u64),
    /// The end of a group of a sequence becomes a resume point, is gone on from, or is one no more.
    Keep(usize, usize),
    Touch(usize, usize),
    Forget(usize, usize),
    Evict,
    Expire,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let prompt = prop::collection::vec(0u32..2, 0..9);
    // Two clients that mostly ask the same, and one that is rare, so that roots come and go.
    let namespace = prop_oneof![4 => Just(0u128), 3 => Just(1), 1 => Just(u128::MAX)];
    let step = prop_oneof![
        3 => (namespace.prop_map(Namespace::new), prompt)
            .prop_map(|(namespace, prompt)| Step::Start(namespace, prompt)),
        5 => (0usize..4).prop_map(Step::Grow),
        2 => (0usize..4).prop_map(Step::Leave),
        1 => (0usize..4, 0u64..7).prop_map(|(path, time)| Step::Pin(path, time)),
        2 => (0usize..4, 0usize..4).prop_map(|(path, depth)| Step::Keep(path, depth)),
        1 => (0usize..4, 0usize..4).prop_map(|(path, depth)| Step::Touch(path, depth)),
        1 => (0usize..4, 0usize..4).prop_map(|(path, depth)| Step::Forget(path, depth)),
        3 => Just(Step::Evict),
        1 => Just(Step::Expire),
    ];
    prop::collection::vec(step, 1..80)
}

/// A kept group: all tokens up to its end.
#[derive(Debug)]
struct Entry {
    namespace: Namespace,
    tokens: Vec<u32>,
    id: GroupId,
    users: usize,
    last_used: Instant,
    pinned_until: Option<Instant>,
    /// Since when its resume point, if it carries one, was last gone on from.
    point: Option<Instant>,
}

/// What stands for the resume point of a group that holds `tokens`.
fn point_of(tokens: &[u32]) -> Vec<u32> {
    [tokens, &[99]].concat()
}

/// A sequence: its prompt, and how many groups of it are in the tree.
#[derive(Debug)]
struct Running {
    namespace: Namespace,
    tokens: Vec<u32>,
    path: Vec<GroupId>,
    /// A group of it collided, so none after it can be found.
    closed: bool,
}

/// How far the hashes of a tree can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hashes {
    /// 64 bits, which do not collide in so few groups.
    Distinct,
    /// Some collide.
    Few,
    /// All are the same.
    One,
}

#[derive(Default)]
struct List {
    /// Whether rows are of use only before a resume point.
    from_points: bool,
    entries: Vec<Entry>,
    gone: Vec<(Namespace, Vec<u32>, Miss)>,
}

impl List {
    fn position(&self, namespace: Namespace, tokens: &[u32]) -> Option<usize> {
        let same = |entry: &Entry| entry.namespace == namespace && entry.tokens == tokens;
        self.entries.iter().position(same)
    }

    fn groups(&self, namespace: Namespace, tokens: &[u32]) -> Vec<GroupId> {
        let prefixes = (1..=tokens.len() / GROUP).map(|groups| &tokens[..groups * GROUP]);
        prefixes
            .map_while(|prefix| self.position(namespace, prefix))
            .map(|index| self.entries[index].id)
            .collect()
    }

    /// The group after `groups` that shares most tokens, the oldest of several, and how many.
    fn tail(
        &self,
        namespace: Namespace,
        tokens: &[u32],
        groups: usize,
    ) -> Option<(GroupId, NonZeroUsize)> {
        let start = groups * GROUP;
        let mut longest: Option<(GroupId, NonZeroUsize)> = None;
        for entry in self.children(namespace, &tokens[..start]) {
            let same = entry.tokens[start..].iter().zip(&tokens[start..]);
            let same = NonZeroUsize::new(same.take_while(|(a, b)| a == b).count());
            if same > longest.map(|(_, longest)| longest) {
                longest = same.map(|same| (entry.id, same));
            }
        }
        longest
    }

    fn children<'a>(
        &'a self,
        namespace: Namespace,
        tokens: &'a [u32],
    ) -> impl Iterator<Item = &'a Entry> {
        let child = move |entry: &&Entry| {
            entry.namespace == namespace
                && entry.tokens.len() == tokens.len() + GROUP
                && entry.tokens.starts_with(tokens)
        };
        self.entries.iter().filter(child)
    }

    fn miss(&self, namespace: Namespace, tokens: &[u32], groups: usize) -> Option<Miss> {
        let (start, end) = (groups * GROUP, (groups + 1) * GROUP);
        let wanted = tokens.get(..end)?;
        let mut gone = self.gone.iter().rev();
        let gone = gone.find(|(whose, tokens, _)| *whose == namespace && tokens == wanted);
        let mut children = self.children(namespace, &tokens[..start]);
        Some(match gone {
            Some(&(_, _, why)) => why,
            None if groups == 0 && self.tail(namespace, tokens, 0).is_none() => Miss::Unseen,
            None if children.next().is_none() => Miss::Ended,
            None => Miss::Diverged,
        })
    }

    /// The first token that nothing kept has in its place, where something begins like `tokens` and goes on.
    fn differs_at(&self, namespace: Namespace, tokens: &[u32], groups: usize) -> Option<usize> {
        let common = |entry: &Entry| {
            let same = entry.tokens.iter().zip(tokens);
            same.take_while(|(a, b)| a == b).count()
        };
        let kept = self.entries.iter();
        let kept = kept.filter(|entry| entry.namespace == namespace);
        let goes_on = kept.filter(|entry| common(entry) < entry.tokens.len());
        let at = goes_on.map(common).max()?;
        let left = at >= groups * GROUP && at > 0 && at < tokens.len();
        let miss = self.miss(namespace, tokens, groups);
        let differs = left && matches!(miss, None | Some(Miss::Diverged));
        differs.then_some(at)
    }

    fn evictable(&self) -> Vec<usize> {
        let free = |index: &usize| {
            let entry = &self.entries[*index];
            let mut children = self.children(entry.namespace, &entry.tokens);
            entry.users == 0 && children.next().is_none()
        };
        let mut free: Vec<usize> = (0..self.entries.len()).filter(free).collect();
        free.sort_by_key(|&index| {
            let entry = &self.entries[index];
            (entry.last_used, usize::MAX - entry.tokens.len(), entry.id)
        });
        free
    }

    fn is_pinned(&self, index: usize, now: Instant) -> bool {
        self.entries[index]
            .pinned_until
            .is_some_and(|until| now < until)
    }

    fn remove(&mut self, index: usize, why: Miss) -> Vec<u32> {
        let entry = self.entries.remove(index);
        self.gone.push((entry.namespace, entry.tokens.clone(), why));
        entry.tokens
    }

    /// Resume points, those first that were gone on from longest ago, of those the shallowest.
    fn points(&self) -> Vec<usize> {
        let carries = |index: &usize| self.entries[*index].point.is_some();
        let mut windows: Vec<usize> = (0..self.entries.len()).filter(carries).collect();
        windows.sort_by_key(|&index| {
            let entry = &self.entries[index];
            (entry.point, entry.tokens.len(), entry.id)
        });
        windows
    }

    /// Takes out what nothing can be done with: unused groups that lead to no resume point.
    fn prune(&mut self, why: Miss) {
        let useless = |list: &Self| {
            let mut free = list.evictable().into_iter();
            free.find(|&index| list.entries[index].point.is_none())
        };
        while let Some(index) = useless(self).filter(|_| self.from_points) {
            self.remove(index, why);
        }
    }

    fn evict(&mut self, now: Instant) -> Option<Vec<u32>> {
        let evicted = self.evict_one(now);
        self.prune(Miss::Evicted);
        evicted
    }

    fn evict_one(&mut self, now: Instant) -> Option<Vec<u32>> {
        let (mut free, windows) = (self.evictable(), self.points());
        if self.from_points {
            free.clear();
        }
        let unpinned = |order: &[usize]| {
            let mut order = order.iter().copied();
            order.find(|&index| !self.is_pinned(index, now))
        };
        let (group, window) = match (unpinned(&free), unpinned(&windows)) {
            (None, None) => (free.first().copied(), windows.first().copied()),
            some => some,
        };
        let entries = &mut self.entries;
        match (group, window) {
            (Some(group), Some(window))
                if entries[window].point <= Some(entries[group].last_used) =>
            {
                entries[window].point = None;
                Some(point_of(&entries[window].tokens))
            }
            (None, Some(window)) => {
                entries[window].point = None;
                Some(point_of(&entries[window].tokens))
            }
            (group, _) => Some(self.remove(group?, Miss::Evicted)),
        }
    }

    fn resumable(&self, path: &[GroupId]) -> usize {
        let carries = |id: &GroupId| {
            let mut entries = self.entries.iter();
            entries.any(|entry| entry.id == *id && entry.point.is_some())
        };
        (0..=path.len())
            .rev()
            .find(|&groups| groups == 0 || carries(&path[groups - 1]))
            .unwrap_or(0)
    }

    fn expire(&mut self, now: Instant) -> Option<Vec<u32>> {
        let old = |index: &usize| now - self.entries[*index].last_used >= TIME_TO_LIVE;
        let mut free = self.evictable().into_iter().filter(old);
        let chosen = free.find(|&index| !self.is_pinned(index, now))?;
        let expired = self.remove(chosen, Miss::Expired);
        self.prune(Miss::Expired);
        Some(expired)
    }

    fn each(&mut self, ids: &[GroupId], mut change: impl FnMut(&mut Entry)) {
        for entry in self
            .entries
            .iter_mut()
            .filter(|entry| ids.contains(&entry.id))
        {
            change(entry);
        }
    }
}

fn run(
    steps: Vec<Step>,
    hasher: impl BuildHasher,
    hashes: Hashes,
    from_points: bool,
) -> Result<(), TestCaseError> {
    let group_tokens = NonZeroUsize::new(GROUP).expect("two");
    let mut tree: Tree<Vec<u32>, _> = Tree::with_hasher(group_tokens, hasher);
    if from_points {
        tree = tree.of_resume_points();
    }
    let mut list = List {
        from_points,
        ..List::default()
    };
    let mut running: Vec<Running> = Vec::new();
    let begin = Instant::now();
    for (tick, step) in (0..).zip(steps) {
        let now = begin + Duration::from_millis(tick / STEPS_PER_TICK);
        match step {
            Step::Start(namespace, tokens) => {
                let found = tree.find(namespace, &tokens);
                let groups = found.groups.len();
                prop_assert_eq!(&found.groups, &list.groups(namespace, &tokens));
                prop_assert_eq!(found.tail, list.tail(namespace, &tokens, groups));
                let miss = list.miss(namespace, &tokens, groups);
                if hashes == Hashes::Distinct {
                    prop_assert_eq!(found.miss, miss);
                    let differs_at = list.differs_at(namespace, &tokens, groups);
                    prop_assert_eq!(found.differs_at, differs_at);
                } else {
                    prop_assert_eq!(found.miss.is_some(), miss.is_some(), "a reason is a guess");
                }
                tree.acquire(&found.groups);
                list.each(&found.groups, |entry| entry.users += 1);
                running.push(Running {
                    namespace,
                    tokens,
                    path: found.groups,
                    closed: false,
                });
            }
            Step::Grow(index) => {
                let Some(one) = running.get_mut(index).filter(|one| !one.closed) else {
                    continue;
                };
                let start = one.path.len() * GROUP;
                let Some(tokens) = one.tokens.get(start..start + GROUP) else {
                    continue;
                };
                let all = one.tokens[..start + GROUP].to_vec();
                let root = Parent::Root(one.namespace);
                let parent = one.path.last().copied().map_or(root, Parent::Group);
                match tree.insert(parent, tokens, now, || all.clone()) {
                    Inserted::New(id) => {
                        prop_assert_eq!(list.position(one.namespace, &all), None);
                        list.entries.push(Entry {
                            namespace: one.namespace,
                            tokens: all,
                            id,
                            users: 1,
                            last_used: now,
                            pinned_until: None,
                            point: None,
                        });
                        one.path.push(id);
                    }
                    Inserted::Known(id) => {
                        let index = list.position(one.namespace, &all);
                        prop_assert_eq!(index.map(|index| list.entries[index].id), Some(id));
                        list.each(&[id], |entry| entry.users += 1);
                        one.path.push(id);
                    }
                    Inserted::Collided => {
                        prop_assert_ne!(hashes, Hashes::Distinct);
                        prop_assert_eq!(list.position(one.namespace, &all), None);
                        prop_assert!(!list.entries.is_empty());
                        one.closed = true;
                    }
                }
            }
            Step::Leave(index) => {
                if index < running.len() {
                    let one = running.remove(index);
                    tree.release(&one.path, now);
                    list.each(&one.path, |entry| {
                        entry.users -= 1;
                        entry.last_used = now;
                    });
                    list.prune(Miss::Passed);
                }
            }
            Step::Pin(index, time) => {
                let Some(one) = running.get(index) else {
                    continue;
                };
                let until = now + Duration::from_millis(time);
                tree.pin(&one.path, until);
                list.each(&one.path, |entry| {
                    entry.pinned_until = entry.pinned_until.max(Some(until))
                });
            }
            Step::Keep(index, depth) => {
                let path = running.get(index).map_or(&[][..], |one| &one.path);
                let Some(&id) = path.get(depth) else {
                    continue;
                };
                list.each(&[id], |entry| {
                    tree.keep_resume_point(id, now, point_of(&entry.tokens));
                    entry.point.get_or_insert(now);
                });
            }
            Step::Touch(index, depth) => {
                let path = running.get(index).map_or(&[][..], |one| &one.path);
                let Some(&id) = path.get(depth) else {
                    continue;
                };
                tree.touch_resume_point(id, now);
                list.each(&[id], |entry| entry.point = entry.point.map(|_| now));
            }
            Step::Forget(index, depth) => {
                let path = running.get(index).map_or(&[][..], |one| &one.path);
                let Some(&id) = path.get(depth) else {
                    continue;
                };
                list.each(&[id], |entry| {
                    let point = entry.point.take().map(|_| point_of(&entry.tokens));
                    assert_eq!(tree.forget_resume_point(id), point);
                });
            }
            Step::Evict => prop_assert_eq!(tree.evict(now), list.evict(now)),
            Step::Expire => prop_assert_eq!(tree.expire(now, TIME_TO_LIVE), list.expire(now)),
        }
        prop_assert_eq!(tree.len(), list.entries.len());
        prop_assert!(hashes != Hashes::One || tree.len() <= 1);
        let pinned = (0..tree.len()).filter(|&index| list.is_pinned(index, now));
        prop_assert_eq!(tree.pinned(now), pinned.count());
        let mut namespaces: Vec<Namespace> = Vec::new();
        for entry in &list.entries {
            if !namespaces.contains(&entry.namespace) {
                namespaces.push(entry.namespace);
            }
        }
        prop_assert_eq!(
            tree.namespaces(),
            namespaces.len(),
            "none that holds nothing"
        );
        prop_assert_eq!(
            tree.unused(),
            list.entries.iter().filter(|entry| entry.users == 0).count()
        );
        for entry in &list.entries {
            prop_assert_eq!(tree.get(entry.id), Some((&entry.tokens, entry.users)));
            let window = entry.point.map(|_| point_of(&entry.tokens));
            prop_assert_eq!(tree.resume_point(entry.id), window.as_ref());
        }
        prop_assert_eq!(tree.resume_points(), list.points().len());
        let leads = |entry: &Entry| {
            let mut points = list.entries.iter().filter(|other| other.point.is_some());
            entry.users > 0
                || points.any(|other| {
                    other.namespace == entry.namespace && other.tokens.starts_with(&entry.tokens)
                })
        };
        prop_assert!(!from_points || list.entries.iter().all(leads), "R3");
        let unused = list.entries.iter().filter(|entry| entry.users == 0);
        prop_assert_eq!(
            tree.unused_resume_points(),
            unused.filter(|entry| entry.point.is_some()).count()
        );
        prop_assert_eq!(tree.payloads().count(), tree.len() + tree.resume_points());
        for one in &running {
            prop_assert_eq!(tree.resumable(&one.path), list.resumable(&one.path));
        }
    }
    let end = begin + Duration::from_secs(1);
    for one in running {
        tree.release(&one.path, end);
    }
    while tree.evict(end).is_some() {}
    prop_assert!(tree.is_empty(), "everything unused can be evicted");
    prop_assert_eq!(
        tree.resume_points(),
        0,
        "R1: resume points leave with their groups"
    );
    Ok(())
}

proptest! {
    // Twice as many as usual: each costs little.
    #![proptest_config(ProptestConfig::with_cases(2 * ProptestConfig::default().cases))]

    #[test]
    fn every_answer_is_that_of_a_naive_list(steps in steps()) {
        run(steps.clone(), RandomState::new(), Hashes::Distinct, false)?;
        run(steps, RandomState::new(), Hashes::Distinct, true)?;
    }

    #[test]
    fn hashes_that_collide_change_what_is_kept_and_not_what_is_found(steps in steps()) {
        for from_points in [false, true] {
            run(steps.clone(), Narrow { bits: 3 }, Hashes::Few, from_points)?;
            run(steps.clone(), Narrow { bits: 0 }, Hashes::One, from_points)?;
        }
    }
}
