//! Which token sequences are kept, group by group: the policy of the prefix cache, without pages.
//!
//! A group stands for `group_tokens` tokens that follow its parent's. It is found by a keyed hash
//! chained over its ancestors and then verified, by its parent and token by token, so that a
//! collision is a miss and never another conversation's rows. Each namespace has a root of its own,
//! from which the hashes start and the parents lead: what is below one root cannot be found from
//! another.
//!
//! ```text
//! root -- [t0..t31] -- [t32..t63] -- [t64..t95]     users 2, 2, 1
//!                  \-- [u32..u63]                   users 0: evictable
//! ```
//!
//! * **T1** Whoever uses a group uses all its ancestors, so what an unused group leads to is unused.
//! * **T2** Only a group without children leaves, so a group's ancestors are always there.
//! * **T3** The evictable groups are exactly the unused ones without children, ordered by when they
//!   were last used, deepest first.
//! * **T4** A group's ancestors lead to the root of the namespace it was inserted for, and a search
//!   begins at its own namespace's.
//!
//! Where layers have windows or keep states, a group may carry a resume point: what going on from its end
//! takes beside the rows of all groups up to there.
//!
//! * **R1** A resume point leaves before its group or with it, so what is found with one is whole (T2).
//! * **R2** Resume points are ordered by when they were last gone on from, the shallowest first of those
//!   that were at one time: one behind it serves whatever goes on later, at the cost of computing what is
//!   between. Any of them can leave, whoever uses its group: sequences have mapped what they took of it.
//! * **R3** In a tree of resume points alone ([`Tree::of_resume_points`]) every unused group has one, or leads to
//!   one: a group that does not leaves at once, since nothing can be done with its rows.
//!
//! Finding a prompt costs a hash per group; everything else is logarithmic in the groups there are.

use std::cmp::Reverse;
use std::collections::hash_map::{Entry, RandomState};
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use super::gone::Gone;
use super::namespace::Namespace;

/// A group of a tree, never taken for another one: ids are not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(u64);

/// What a group comes after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// Nothing: it is the first of a namespace's sequences.
    Root(Namespace),
    /// Another group.
    Group(GroupId),
}

/// Why a prompt was not found to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Miss {
    /// Nothing began like this.
    Unseen,
    /// What began like this ended earlier.
    Ended,
    /// What began like this went on differently.
    Diverged,
    /// It was there and was evicted for room.
    Evicted,
    /// It was there and nobody used it for the time to live.
    Expired,
    /// It is there, or was, but not what going on from its end takes: rows that windows have passed, or the
    /// states of layers, which were another token's by then.
    Passed,
}

/// What is kept of a token sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Whole groups from the first token on.
    pub groups: Vec<GroupId>,
    /// A group whose first tokens go on from there, and how many of them.
    pub tail: Option<(GroupId, NonZeroUsize)>,
    /// Why it is not more.
    pub miss: Option<Miss>,
    /// The first token, counted from zero, in whose place only others are kept. `None` where what is kept ends, was
    /// let go of, or never began like this.
    pub differs_at: Option<usize>,
}

/// What leaves next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// A group that nobody uses.
    Group(GroupId),
    /// The resume point of a group.
    ResumePoint(GroupId),
}

/// What became of a group that was offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inserted {
    /// It is kept.
    New(GroupId),
    /// The same tokens were there already; the payload was dropped.
    Known(GroupId),
    /// Another group has its hash; the payload was dropped.
    Collided,
}

/// What was done to a tree that takes note of it ([`Tree::noting_changes`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A group is kept from now on.
    Entered {
        /// Which one.
        id: GroupId,
        /// What it comes after.
        parent: Parent,
        /// What it stands for.
        tokens: Box<[u32]>,
    },
    /// A group is not kept any more. It had no resume point by then.
    Left(GroupId),
    /// A group has got a resume point.
    Resumable(GroupId),
    /// A group has lost its resume point.
    NotResumable(GroupId),
}

/// Groups by what they hold, `P` being where their rows are and `S` making the keyed hash.
#[derive(Debug)]
pub struct Tree<P, S = RandomState> {
    group_tokens: usize,
    hasher: S,
    groups: HashMap<GroupId, Group<P>>,
    by_chain: HashMap<u64, GroupId>,
    /// The first groups of each namespace that has any.
    roots: HashMap<Namespace, Vec<GroupId>>,
    evictable: BTreeSet<(Instant, Reverse<usize>, GroupId)>,
    resume_points: BTreeSet<(Instant, usize, GroupId)>,
    /// Whether rows are of use only before a resume point.
    from_resume_points: bool,
    gone: Gone,
    /// What was done lately, if somebody takes it.
    changes: Option<Vec<Change>>,
    unused: usize,
    next_id: u64,
}

#[derive(Debug)]
struct Group<P> {
    parent: Parent,
    chain: u64,
    tokens: Box<[u32]>,
    depth: usize,
    children: Vec<GroupId>,
    users: usize,
    last_used: Instant,
    pinned_until: Option<Instant>,
    payload: P,
    resume_point: Option<ResumePoint<P>>,
}

/// What going on from a group's end takes of layers with windows or states.
#[derive(Debug)]
struct ResumePoint<P> {
    last_used: Instant,
    payload: P,
}

impl<P> Group<P> {
    fn order(&self, id: GroupId) -> (Instant, Reverse<usize>, GroupId) {
        (self.last_used, Reverse(self.depth), id)
    }

    fn is_evictable(&self) -> bool {
        self.users == 0 && self.children.is_empty()
    }

    fn is_pinned(&self, now: Instant) -> bool {
        self.pinned_until.is_some_and(|until| now < until)
    }
}

impl<P> Tree<P> {
    /// An empty tree of groups of `group_tokens` tokens, with a hash key of its own.
    #[must_use]
    pub fn new(group_tokens: NonZeroUsize) -> Self {
        Self::with_hasher(group_tokens, RandomState::new())
    }
}

impl<P, S: BuildHasher> Tree<P, S> {
    /// An empty tree of groups of `group_tokens` tokens that are hashed by `hasher`. However often
    /// its hashes collide, what is found is what was asked for; only less is kept.
    #[must_use]
    pub fn with_hasher(group_tokens: NonZeroUsize, hasher: S) -> Self {
        Self {
            group_tokens: group_tokens.get(),
            hasher,
            groups: HashMap::new(),
            by_chain: HashMap::new(),
            roots: HashMap::new(),
            evictable: BTreeSet::new(),
            resume_points: BTreeSet::new(),
            from_resume_points: false,
            gone: Gone::default(),
            changes: None,
            unused: 0,
            next_id: 0,
        }
    }

    /// The same, but for sequences that go on from resume points only and to whom rows behind the last one are
    /// of no use: see R3.
    #[must_use]
    pub fn of_resume_points(self) -> Self {
        Self {
            from_resume_points: true,
            ..self
        }
    }

    /// The same, and what is done to it is noted until [`Tree::take_changes`], which somebody has to call: notes
    /// add up.
    #[must_use]
    pub fn noting_changes(self) -> Self {
        Self {
            changes: Some(Vec::new()),
            ..self
        }
    }

    /// What was done since the last call, in order; nothing unless it is noted.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.changes.as_mut().map_or(Vec::new(), std::mem::take)
    }

    fn note(&mut self, change: impl FnOnce() -> Change) {
        if let Some(changes) = &mut self.changes {
            changes.push(change());
        }
    }

    /// Every sequence of tokens that is kept and leads no further, each from its first token on.
    pub fn sequences(&self) -> impl Iterator<Item = (Namespace, Vec<u32>)> {
        let leaves = self.groups.values();
        let leaves = leaves.filter(|group| group.children.is_empty());
        leaves.map(|leaf| {
            let (mut group, mut groups) = (leaf, vec![&leaf.tokens]);
            let namespace = loop {
                match group.parent {
                    Parent::Root(namespace) => break namespace,
                    Parent::Group(parent) => group = &self.groups[&parent],
                }
                groups.push(&group.tokens);
            };
            let tokens = groups.into_iter().rev();
            (namespace, tokens.flatten().copied().collect())
        })
    }

    /// Tokens of one group.
    #[must_use]
    pub fn group_tokens(&self) -> usize {
        self.group_tokens
    }

    /// Groups kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether nothing is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Namespaces of which anything is kept.
    #[must_use]
    pub fn namespaces(&self) -> usize {
        self.roots.len()
    }

    /// Groups that nobody uses; all of them can be evicted.
    #[must_use]
    pub fn unused(&self) -> usize {
        self.unused
    }

    /// Groups that are pinned as of `now`.
    #[must_use]
    pub fn pinned(&self, now: Instant) -> usize {
        self.groups
            .values()
            .filter(|group| group.is_pinned(now))
            .count()
    }

    /// Where a group's rows are, and how many use it.
    #[must_use]
    pub fn get(&self, id: GroupId) -> Option<(&P, usize)> {
        self.groups
            .get(&id)
            .map(|group| (&group.payload, group.users))
    }

    /// The longest part of `tokens` that is kept in `namespace`.
    #[must_use]
    pub fn find(&self, namespace: Namespace, tokens: &[u32]) -> Found {
        let mut groups: Vec<GroupId> = Vec::new();
        let mut last = Parent::Root(namespace);
        let mut rest = tokens;
        let mut chain = self.chain_of(last);
        let mut miss = None;
        while let Some((wanted, after)) = rest.split_at_checked(self.group_tokens) {
            chain = self.chain(chain, wanted);
            let Some(id) = self.verified(chain, last, wanted) else {
                miss = Some(chain);
                break;
            };
            groups.push(id);
            last = Parent::Group(id);
            rest = after;
        }
        let tail = self.longest_start(last, rest);
        let miss = miss.map(|chain| self.why(chain, last, tail.is_some()));
        let same = tail.map_or(0, |(_, tokens)| tokens.get());
        let differs_at = groups.len() * self.group_tokens + same;
        // A prompt that ends within a group misses none, but can leave what is kept all the same.
        let differs = matches!(miss, None | Some(Miss::Diverged))
            && differs_at > 0
            && same < rest.len()
            && !self.children(last).is_empty();
        Found {
            groups,
            tail,
            miss,
            differs_at: differs.then_some(differs_at),
        }
    }

    fn why(&self, chain: u64, last: Parent, tail: bool) -> Miss {
        match self.gone.get(chain) {
            Some(miss) => miss,
            None if matches!(last, Parent::Root(_)) && !tail => Miss::Unseen,
            None if self.children(last).is_empty() => Miss::Ended,
            None => Miss::Diverged,
        }
    }

    /// What everything up to `parent` hashes to.
    fn chain_of(&self, parent: Parent) -> u64 {
        match parent {
            Parent::Root(namespace) => self.hasher.hash_one(namespace),
            Parent::Group(id) => self.groups[&id].chain,
        }
    }

    /// The hash of `tokens` after what hashed to `chain`.
    fn chain(&self, chain: u64, tokens: &[u32]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        chain.hash(&mut hasher);
        tokens.hash(&mut hasher);
        hasher.finish()
    }

    fn verified(&self, chain: u64, parent: Parent, tokens: &[u32]) -> Option<GroupId> {
        let id = *self.by_chain.get(&chain)?;
        let group = &self.groups[&id];
        (group.parent == parent && *group.tokens == *tokens).then_some(id)
    }

    fn children(&self, parent: Parent) -> &[GroupId] {
        match parent {
            Parent::Root(namespace) => self.roots.get(&namespace).map_or(&[], Vec::as_slice),
            Parent::Group(id) => &self.groups[&id].children,
        }
    }

    /// The child of `parent` that shares most first tokens with `tokens`.
    fn longest_start(&self, parent: Parent, tokens: &[u32]) -> Option<(GroupId, NonZeroUsize)> {
        let common = |id: &GroupId| {
            let kept = self.groups[id].tokens.iter();
            let same = kept.zip(tokens).take_while(|(a, b)| a == b).count();
            NonZeroUsize::new(same).map(|same| (*id, same))
        };
        let starts = self.children(parent).iter().filter_map(common);
        starts.max_by_key(|&(id, same)| (same, Reverse(id)))
    }

    /// Keeps `tokens`, one group of them, after `parent`. The caller uses `parent` and, unless the
    /// hash collides, from now on the group too.
    ///
    /// # Panics
    /// When `tokens` is not one group long or `parent` is not in the tree.
    pub fn insert(
        &mut self,
        parent: Parent,
        tokens: &[u32],
        now: Instant,
        payload: impl FnOnce() -> P,
    ) -> Inserted {
        assert_eq!(tokens.len(), self.group_tokens, "one group at a time");
        let depth = match parent {
            Parent::Root(_) => 0,
            Parent::Group(id) => self.groups[&id].depth + 1,
        };
        let chain = self.chain(self.chain_of(parent), tokens);
        if let Some(id) = self.verified(chain, parent, tokens) {
            self.acquire(&[id]);
            return Inserted::Known(id);
        }
        let Entry::Vacant(place) = self.by_chain.entry(chain) else {
            return Inserted::Collided;
        };
        let id = GroupId(self.next_id);
        place.insert(id);
        self.next_id += 1;
        let group = Group {
            parent,
            chain,
            tokens: tokens.into(),
            depth,
            children: Vec::new(),
            users: 1,
            last_used: now,
            pinned_until: None,
            payload: payload(),
            resume_point: None,
        };
        self.groups.insert(id, group);
        self.siblings(parent).push(id);
        self.note(|| Change::Entered {
            id,
            parent,
            tokens: tokens.into(),
        });
        Inserted::New(id)
    }

    fn siblings(&mut self, parent: Parent) -> &mut Vec<GroupId> {
        match parent {
            Parent::Root(namespace) => self.roots.entry(namespace).or_default(),
            Parent::Group(parent) => {
                let parent = self.groups.get_mut(&parent);
                &mut parent.expect("T2: ancestors are there").children
            }
        }
    }

    /// Puts the rows of a group elsewhere, if it is kept.
    pub fn replace(&mut self, id: GroupId, payload: P) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.payload = payload;
        }
    }

    /// Counts one more user of each of `ids`.
    ///
    /// # Panics
    /// When one of them is not in the tree.
    pub fn acquire(&mut self, ids: &[GroupId]) {
        for &id in ids {
            let group = self
                .groups
                .get_mut(&id)
                .expect("only groups that are kept are used");
            if group.users == 0 {
                self.evictable.remove(&group.order(id));
                self.unused -= 1;
            }
            group.users += 1;
        }
    }

    /// Counts one user less of each of `ids`, which are all in use: a path from the root on. What nobody
    /// can do anything with any more leaves (R3).
    ///
    /// # Panics
    /// When one of them is not in use.
    pub fn release(&mut self, ids: &[GroupId], now: Instant) {
        for &id in ids.iter().rev() {
            let group = self.groups.get_mut(&id).expect("groups in use are kept");
            group.users = group.users.checked_sub(1).expect("released once per use");
            group.last_used = group.last_used.max(now);
            if group.users == 0 {
                self.unused += 1;
            }
            if group.is_evictable() {
                self.evictable.insert(group.order(id));
                self.prune(id, Miss::Passed);
            }
        }
    }

    /// Lets go of the evictable group `id` and then of those before it, as far as they lead to no resume
    /// point and there must be one.
    fn prune(&mut self, mut id: GroupId, why: Miss) {
        while self.from_resume_points {
            let group = &self.groups[&id];
            if !group.is_evictable() || group.resume_point.is_some() {
                break;
            }
            let parent = group.parent;
            self.remove_one(id, why);
            match parent {
                Parent::Group(parent) => id = parent,
                Parent::Root(_) => break,
            }
        }
    }

    /// Makes each of `ids` one of the last to be evicted until `until`.
    pub fn pin(&mut self, ids: &[GroupId], until: Instant) {
        for id in ids {
            if let Some(group) = self.groups.get_mut(id) {
                group.pinned_until = group.pinned_until.max(Some(until));
            }
        }
    }

    /// How many of `ids`, a path from the root on, can be gone on from: those up to the last with a
    /// resume point.
    #[must_use]
    pub fn resumable(&self, ids: &[GroupId]) -> usize {
        let has_one = |id: &GroupId| self.resume_point(*id).is_some();
        ids.iter().rposition(has_one).map_or(0, |last| last + 1)
    }

    /// The resume point that a group carries.
    #[must_use]
    pub fn resume_point(&self, id: GroupId) -> Option<&P> {
        let point = self.groups.get(&id)?.resume_point.as_ref()?;
        Some(&point.payload)
    }

    /// Resume points there are.
    #[must_use]
    pub fn resume_points(&self) -> usize {
        self.resume_points.len()
    }

    /// Those of them whose groups nobody uses.
    #[must_use]
    pub fn unused_resume_points(&self) -> usize {
        let unused = |entry: &&(Instant, usize, GroupId)| self.groups[&entry.2].users == 0;
        self.resume_points.iter().filter(unused).count()
    }

    /// Everything that is kept: of groups, and of resume points.
    pub fn payloads(&self) -> impl Iterator<Item = &P> {
        self.groups.values().flat_map(|group| {
            let point = group.resume_point.as_ref().map(|point| &point.payload);
            std::iter::once(&group.payload).chain(point)
        })
    }

    /// Gives a group a resume point, unless it has one or is not kept.
    pub fn keep_resume_point(&mut self, id: GroupId, now: Instant, payload: P) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        if group.resume_point.is_none() {
            self.resume_points.insert((now, group.depth, id));
            group.resume_point = Some(ResumePoint {
                last_used: now,
                payload,
            });
            self.note(|| Change::Resumable(id));
        }
    }

    /// Takes note that the resume point of a group, if it has one, was gone on from.
    pub fn touch_resume_point(&mut self, id: GroupId, now: Instant) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        if let Some(point) = &mut group.resume_point {
            self.resume_points
                .remove(&(point.last_used, group.depth, id));
            point.last_used = point.last_used.max(now);
            self.resume_points
                .insert((point.last_used, group.depth, id));
        }
    }

    /// Lets go of the resume point of a group that is in use: another one behind it serves as well.
    pub fn forget_resume_point(&mut self, id: GroupId) -> Option<P> {
        let used = self.groups.get(&id).is_some_and(|group| group.users > 0);
        used.then(|| self.take_resume_point(id)).flatten()
    }

    /// Takes a group's resume point.
    fn take_resume_point(&mut self, id: GroupId) -> Option<P> {
        let group = self.groups.get_mut(&id)?;
        let point = group.resume_point.take()?;
        self.resume_points
            .remove(&(point.last_used, group.depth, id));
        self.note(|| Change::NotResumable(id));
        Some(point.payload)
    }

    /// Lets go of the group that has been unused for longest, of those that lead nowhere, or of the
    /// resume point that was last gone on from no later, and returns where the rows are. Pinned groups and
    /// their resume points go when no other is left. In a tree of resume points alone it is one of those that
    /// goes, and with it the rows that only it led to.
    pub fn evict(&mut self, now: Instant) -> Option<P> {
        match self.next_to_leave(now)? {
            Leaving::Group(id) => Some(self.remove(id, Miss::Evicted)),
            Leaving::ResumePoint(id) => {
                let payload = self.take_resume_point(id);
                self.prune(id, Miss::Evicted);
                payload
            }
        }
    }

    /// What [`Tree::evict`] would let go of.
    #[must_use]
    pub fn next_to_leave(&self, now: Instant) -> Option<Leaving> {
        let unpinned = |id: &GroupId| !self.groups[id].is_pinned(now);
        let alone = (!self.from_resume_points).then_some(&self.evictable);
        let groups = || alone.into_iter().flatten().map(|&(used, _, id)| (used, id));
        let points = || self.resume_points.iter().map(|&(used, _, id)| (used, id));
        let group = groups().find(|(_, id)| unpinned(id));
        let point = points().find(|(_, id)| unpinned(id));
        let (group, point) = match (group, point) {
            (None, None) => (groups().next(), points().next()),
            some => some,
        };
        match (group, point) {
            (Some((used, id)), point) if point.is_none_or(|(before, _)| used < before) => {
                Some(Leaving::Group(id))
            }
            (_, point) => point.map(|(_, id)| Leaving::ResumePoint(id)),
        }
    }

    /// Lets go of one group that has been unused for `time_to_live`, if there is one and it is not
    /// pinned.
    pub fn expire(&mut self, now: Instant, time_to_live: Duration) -> Option<P> {
        let id = self.next_to_expire(now, time_to_live)?;
        Some(self.remove(id, Miss::Expired))
    }

    /// The group that [`Tree::expire`] would let go of.
    #[must_use]
    pub fn next_to_expire(&self, now: Instant, time_to_live: Duration) -> Option<GroupId> {
        let old = |last_used: Instant| now.saturating_duration_since(last_used) >= time_to_live;
        let mut overdue = self.evictable.iter().take_while(|entry| old(entry.0));
        let entry = overdue.find(|entry| !self.groups[&entry.2].is_pinned(now))?;
        Some(entry.2)
    }

    /// A group's namespace, and its ancestors from the first on, itself the last.
    ///
    /// # Panics
    /// When it is not in the tree.
    #[must_use]
    pub fn lineage(&self, id: GroupId) -> (Namespace, Vec<GroupId>) {
        let (mut lineage, mut at) = (vec![id], self.groups[&id].parent);
        loop {
            match at {
                Parent::Group(id) => {
                    lineage.push(id);
                    at = self.groups[&id].parent;
                }
                Parent::Root(namespace) => {
                    lineage.reverse();
                    return (namespace, lineage);
                }
            }
        }
    }

    /// The tokens of a group.
    ///
    /// # Panics
    /// When it is not in the tree.
    #[must_use]
    pub fn tokens(&self, id: GroupId) -> &[u32] {
        &self.groups[&id].tokens
    }

    /// Takes an evictable group out, and what has become of no use without it.
    fn remove(&mut self, id: GroupId, why: Miss) -> P {
        let parent = self.groups[&id].parent;
        let payload = self.remove_one(id, why);
        if let Parent::Group(parent) = parent {
            self.prune(parent, why);
        }
        payload
    }

    fn remove_one(&mut self, id: GroupId, why: Miss) -> P {
        self.take_resume_point(id);
        let group = self
            .groups
            .remove(&id)
            .expect("T3: evictable groups are kept");
        self.evictable.remove(&group.order(id));
        self.by_chain.remove(&group.chain);
        self.unused -= 1;
        self.gone.note(group.chain, why);
        self.note(|| Change::Left(id));
        let siblings = self.siblings(group.parent);
        siblings.retain(|&child| child != id);
        let last = siblings.is_empty();
        match group.parent {
            Parent::Group(parent) => {
                let above = &self.groups[&parent];
                if above.is_evictable() {
                    self.evictable.insert(above.order(parent));
                }
            }
            // Clients make up namespaces; those that hold nothing must not add up.
            Parent::Root(namespace) if last => drop(self.roots.remove(&namespace)),
            Parent::Root(_) => {}
        }
        group.payload
    }
}
