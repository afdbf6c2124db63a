//! Computed prompts kept by the page group, and sequences that start from them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use lacuna_pages::{PagePin, PhysicalPage};

use super::blocks::{BlockChange, BlocksInMemory};
use super::grain::Grain;
use super::namespace::Namespace;
use super::pins::Pins;
use super::tree::{Found, GroupId, Inserted, Miss, Parent, Tree};
use crate::cache::KvCache;
use crate::error::KvError;
use crate::folder::{CacheFolder, Chain};
use crate::sequence::Sequence;

/// Page groups of sequences, running and past, by the tokens they hold.
///
/// A sequence's groups enter as they fill, so another sequence can start from them while it still
/// runs. A group is kept while a sequence uses it, and after that until it is evicted or expires.
#[derive(Debug)]
pub struct PrefixCache {
    pub(super) tree: Tree<Pins>,
    cache: KvCache,
    pub(super) grain: Arc<Grain>,
    /// Where it is also written to.
    pub(super) folder: Option<CacheFolder>,
    /// Groups of which it is settled whether they are put aside before they leave, since they were last used.
    pub(super) aside: HashMap<GroupId, Chain>,
    /// Tokens that end a message.
    message_ends: Vec<u32>,
    /// What others are told of; the folder keeps account of what it has.
    pub(super) blocks: Option<BlocksInMemory>,
}

/// The groups a sequence uses, from its first token on. Goes back with [`PrefixCache::leave`].
#[derive(Debug, Default)]
#[must_use = "groups stay in use until they are given back"]
pub struct Path {
    pub(super) namespace: Namespace,
    pub(super) groups: Vec<GroupId>,
    /// What everything up to the end of each of the groups hashes to, as far as a folder had to know.
    pub(super) chains: Vec<Chain>,
    /// Groups, from the first on, that the folder has or was given.
    pub(super) written: usize,
    /// Later groups cannot be entered: memory cannot be kept, or hashes collide.
    closed: bool,
    /// After so many groups there is a resume point, beside where there is one anyway.
    resume_after: Vec<usize>,
    /// Tokens from which on the sequence generates.
    prompt: usize,
    /// The states after exactly so many groups, the last of which is not entered yet: two at most, where
    /// rows straddle pages.
    standing: Vec<(usize, Vec<PagePin>)>,
    /// The group whose resume point follows the sequence while it generates.
    trailing: Option<GroupId>,
    /// The group whose resume point the sequence went on from.
    resumed: Option<GroupId>,
    /// How many groups are to be kept, in files too, and until when.
    pub(super) pinned: Option<(usize, SystemTime)>,
}

/// A sequence that begins with what was kept.
#[derive(Debug)]
pub struct Start {
    /// The sequence; its length is the number of tokens found.
    pub sequence: Sequence,
    /// The groups it uses.
    pub path: Path,
    /// Why it does not hold more.
    pub miss: Option<Miss>,
    /// The first token of the prompt in whose place only others are kept ([`Found::differs_at`]). It can be far
    /// behind what the sequence holds, where that has to end at a resume point.
    pub differs_at: Option<usize>,
}

impl Path {
    /// The groups, from the first token on.
    #[must_use]
    pub fn groups(&self) -> &[GroupId] {
        &self.groups
    }

    /// Whose groups they are.
    #[must_use]
    pub fn namespace(&self) -> Namespace {
        self.namespace
    }

    /// Pages that are kept for a resume point which is not entered yet.
    pub fn pages(&self) -> impl Iterator<Item = PhysicalPage> {
        let standing = self.standing.iter().flat_map(|(_, states)| states);
        standing.map(PagePin::page)
    }

    /// Whatever resume points follow the sequence do so no longer.
    pub(super) fn let_go_of_points(&mut self) {
        self.standing.clear();
        (self.trailing, self.resumed) = (None, None);
    }

    /// Groups that are in use for nothing but to be kept.
    pub(super) fn holding(namespace: Namespace, groups: Vec<GroupId>) -> Self {
        Self {
            namespace,
            groups,
            closed: true,
            ..Self::default()
        }
    }

    fn end(&self) -> Parent {
        let last = self.groups.last().copied();
        last.map_or(Parent::Root(self.namespace), Parent::Group)
    }
}

impl PrefixCache {
    /// An empty prefix cache for sequences of `cache`.
    #[must_use]
    pub fn new(cache: KvCache) -> Self {
        let grain = Arc::new(cache.grain());
        let tree = Tree::new(grain.group_tokens());
        Self {
            tree: match grain.has_states() {
                true => tree.of_resume_points(),
                false => tree,
            },
            cache,
            grain,
            folder: None,
            aside: HashMap::new(),
            message_ends: Vec::new(),
            blocks: None,
        }
    }

    /// The same, still empty, and what becomes of the blocks of `namespace`, in memory and in the folder, is noted until
    /// [`PrefixCache::take_block_changes`], which somebody has to call after every step: notes add up.
    #[must_use]
    pub fn watched(self, namespace: Namespace) -> Self {
        debug_assert!(self.tree.is_empty(), "from the first group on");
        let watched = Self {
            blocks: Some(BlocksInMemory::new(namespace, Arc::clone(&self.grain))),
            tree: self.tree.noting_changes(),
            ..self
        };
        watched.watch_folder();
        watched
    }

    /// What became of blocks since the last call, in order for each medium; nothing unless they are watched.
    pub fn take_block_changes(&mut self) -> Vec<BlockChange> {
        let Some(blocks) = &mut self.blocks else {
            return Vec::new();
        };
        for change in self.tree.take_changes() {
            blocks.follow(change);
        }
        let mut changes = blocks.take();
        if let Some(folder) = &self.folder {
            changes.extend(folder.take_block_changes());
        }
        changes
    }

    /// The same, knowing the tokens that end a message: where layers keep states, the ends of the first
    /// message and of the last in a prompt are resume points. The first is what conversations have in common,
    /// and what comes after the last may be written differently the next time.
    #[must_use]
    pub fn with_message_ends(self, message_ends: Vec<u32>) -> Self {
        Self {
            message_ends,
            ..self
        }
    }

    /// What a group is.
    #[must_use]
    pub fn grain(&self) -> &Grain {
        &self.grain
    }

    /// The groups and who uses them.
    #[must_use]
    pub fn tree(&self) -> &Tree<Pins> {
        &self.tree
    }

    /// How much of `tokens` a sequence of `namespace` could start with: whole groups, and tokens in
    /// all. At least the last token is left, so that computing it can give logits. Where layers have
    /// windows or keep states it ends at a resume point.
    #[must_use]
    pub fn find(&self, namespace: Namespace, tokens: &[u32]) -> (Found, usize) {
        let before_last = &tokens[..tokens.len().saturating_sub(1)];
        let mut found = self.tree.find(namespace, before_last);
        if self.grain.has_resume_points() {
            let resumable = self.tree.resumable(&found.groups);
            if resumable < found.groups.len() {
                found.groups.truncate(resumable);
                found.miss = Some(Miss::Passed);
            }
            found.tail = None;
        }
        let worth = self.grain.group_tokens().get() / Self::TAIL_FRACTION;
        found.tail = found
            .tail
            .filter(|(_, tokens)| tokens.get() >= worth.max(1));
        let groups = found.groups.len();
        let held = match found.tail {
            None => self.grain.whole_tokens(groups),
            Some((_, tail)) => {
                let tokens = groups * self.grain.group_tokens().get() + tail.get();
                tokens.min(self.grain.whole_tokens(groups + 1))
            }
        };
        (found, held)
    }

    /// After how many groups of a prompt there is a resume point, beside where there is one anyway:
    /// where it leaves what is kept already, and at its end. There twice: of what follows a prompt's last
    /// words in a template, some may be written differently the next time. That is a group before, or, where
    /// layers keep states and it is known where messages end, the end of the last; and then, the end of
    /// the first message too.
    fn resume_after(&self, namespace: Namespace, tokens: &[u32]) -> Vec<usize> {
        if !self.grain.has_resume_points() {
            return Vec::new();
        }
        let before_last = &tokens[..tokens.len().saturating_sub(1)];
        let known = self.tree.find(namespace, before_last).groups.len();
        let end = before_last.len() / self.grain.group_tokens();
        let ends = |token: &u32| self.grain.has_states() && self.message_ends.contains(token);
        let first = before_last.iter().position(ends);
        let last = before_last.iter().rposition(ends);
        match first.zip(last) {
            Some((first, last)) => {
                let [first, last] = [first, last].map(|at| (at + 1) / self.grain.group_tokens());
                vec![known, first, last, end]
            }
            None => vec![known, end.saturating_sub(1), end],
        }
    }

    /// A partly matching group is mapped, and copied when the sequence goes on to write into it, if
    /// at least one in this many of its tokens match. Copying one group costs about as much as
    /// computing one token, so an eighth is on the safe side.
    const TAIL_FRACTION: usize = 8;

    /// A new sequence of up to `capacity` tokens that holds as much of `tokens` as is kept in
    /// `namespace`, which its own groups will enter.
    ///
    /// # Errors
    /// [`KvError`] when address space or mappings cannot be had. Nothing has changed then.
    pub fn start(
        &mut self,
        namespace: Namespace,
        tokens: &[u32],
        capacity: usize,
    ) -> Result<Start, KvError> {
        let (mut found, held) = self.find(namespace, tokens);
        let mut sequence = self.cache.sequence(capacity)?;
        sequence.keep_resumable(Arc::clone(&self.grain));
        let tail = found.tail.map(|(id, _)| id);
        let used = found.groups.iter().copied().chain(tail);
        let pins: Vec<&Pins> = used
            .filter_map(|id| self.tree.get(id).map(|(pins, _)| pins))
            .collect();
        let last = found.groups.last().copied();
        let point = last.and_then(|id| self.tree.resume_point(id));
        sequence.adopt(&pins, point, held)?;
        let resumed = point.and(last);
        found.groups.truncate(held / self.grain.group_tokens());
        self.tree.acquire(&found.groups);
        Ok(Start {
            sequence,
            path: Path {
                namespace,
                groups: found.groups,
                resume_after: self.resume_after(namespace, tokens),
                prompt: tokens.len(),
                resumed,
                ..Path::default()
            },
            miss: found.miss,
            differs_at: found.differs_at,
        })
    }

    /// A new, empty sequence of up to `capacity` tokens that shares nothing and is not kept.
    ///
    /// # Errors
    /// [`KvError`] when address space cannot be had.
    pub fn start_apart(&self, capacity: usize) -> Result<Start, KvError> {
        Ok(Start {
            sequence: self.cache.sequence(capacity)?,
            path: Path {
                closed: true,
                ..Path::default()
            },
            miss: None,
            differs_at: None,
        })
    }

    /// The next position at which the sequence of `path`, which has `len` tokens, has to stand after a step,
    /// so that there can be a resume point: states are only ever those after the last token. It follows
    /// from tokens and not from steps.
    #[must_use]
    pub fn next_stop(&self, path: &Path, len: usize) -> Option<usize> {
        if !self.grain.has_states() || path.closed {
            return None;
        }
        let every = self.grain.resume_every().get();
        let next = (len / self.grain.group_tokens() / every + 1) * every;
        // Where rows straddle pages, the states are those before the end of the group.
        let regular = [next, next + every];
        let groups = path.resume_after.iter().copied().chain(regular);
        let stops = groups.map(|groups| self.grain.whole_tokens(groups));
        stops.filter(|&stop| stop > len).min()
    }

    /// Enters the groups that `sequence` has filled since the last call. `tokens` are its tokens. To be
    /// called after every step that does not go beyond [`PrefixCache::next_stop`], and before
    /// [`Sequence::release_passed`], which gives back what resume points would keep.
    ///
    /// # Errors
    /// [`KvError::Pages`] when pages cannot be sealed; the groups up to there have been entered.
    pub fn grow(
        &mut self,
        path: &mut Path,
        sequence: &mut Sequence,
        tokens: &[u32],
        now: Instant,
    ) -> Result<(), KvError> {
        let group = self.grain.group_tokens().get();
        let full = sequence.len() / group;
        self.stand(path, sequence)?;
        while path.groups.len() < full && !path.closed {
            let start = path.groups.len() * group;
            let rows = start..start + group;
            let parent = path.end();
            let Some(pins) = sequence.pin_group(rows.clone())? else {
                path.closed = true;
                break;
            };
            let mut pins = Some(pins);
            let inserted = self
                .tree
                .insert(parent, &tokens[rows], now, || pins.take().expect("once"));
            match inserted {
                Inserted::New(id) | Inserted::Known(id) => path.groups.push(id),
                Inserted::Collided => path.closed = true,
            }
            if let (Inserted::Known(id), Some(pins)) = (inserted, pins)
                && self.tree.get(id).is_some_and(|(_, users)| users == 1)
            {
                // It came in another way while this sequence computed it, and nobody else has its pages.
                self.tree.replace(id, pins);
            }
            let groups = path.groups.len();
            if !path.closed && (self.is_due(path, groups) || self.is_trailing(path, groups)) {
                self.keep_point(path, sequence, now)?;
            }
        }
        let groups = path.groups.len();
        path.standing.retain(|(at, _)| *at > groups && !path.closed);
        Ok(())
    }

    /// Whether there is to be a resume point after so many groups.
    pub(super) fn is_due(&self, path: &Path, groups: usize) -> bool {
        let every = self.grain.resume_every().get();
        groups.is_multiple_of(every) || path.resume_after.contains(&groups)
    }

    /// Whether there is to be one until the next: states are there only while the sequence stands at the
    /// end of a group, and it may be the last.
    fn is_trailing(&self, path: &Path, groups: usize) -> bool {
        let generates = groups * self.grain.group_tokens().get() >= path.prompt;
        let every = self.grain.trailing_every().get();
        self.grain.has_states() && generates && groups.is_multiple_of(every)
    }

    /// Keeps the states if the sequence stands where there is to be a resume point.
    fn stand(&self, path: &mut Path, sequence: &mut Sequence) -> Result<(), KvError> {
        if !self.grain.has_states() || path.closed {
            return Ok(());
        }
        let groups = self.grain.groups_whole_at(sequence.len());
        let groups = groups.filter(|&groups| groups > path.groups.len());
        let due = |groups: &usize| self.is_due(path, *groups) || self.is_trailing(path, *groups);
        if let Some(groups) = groups.filter(due) {
            let states = sequence.pin_states()?;
            path.standing.extend(states.map(|states| (groups, states)));
        }
        Ok(())
    }

    /// Makes the end of the last group of `path` a resume point, if it is none and what that takes is
    /// there: the windows' pages, and the states from when the sequence stood there.
    fn keep_point(
        &mut self,
        path: &mut Path,
        sequence: &mut Sequence,
        now: Instant,
    ) -> Result<(), KvError> {
        let Some(&last) = path.groups.last() else {
            return Ok(());
        };
        if !self.grain.has_resume_points() || self.tree.resume_point(last).is_some() {
            return Ok(());
        }
        let groups = path.groups.len();
        let stood = path.standing.iter().position(|(at, _)| *at == groups);
        let stood = stood.map(|index| path.standing.swap_remove(index));
        if self.grain.has_states() && stood.is_none() {
            return Ok(());
        }
        let states = stood.map_or(Vec::new(), |(_, states)| states);
        let (next, end) = (
            self.grain.whole_tokens(groups),
            groups * self.grain.group_tokens().get(),
        );
        if let Some(pins) = sequence.pin_windows(next, end)? {
            self.tree
                .keep_resume_point(last, now, pins.with_states(states));
            if let Some(before) = path.trailing.take() {
                self.forget(before);
            }
            path.trailing = (!self.is_due(path, groups)).then_some(last);
        }
        Ok(())
    }

    /// Lets go of a resume point that has moved on with its sequence, unless others are there too.
    fn forget(&mut self, id: GroupId) {
        if self.tree.get(id).is_some_and(|(_, users)| users == 1) {
            self.tree.forget_resume_point(id);
        }
    }

    /// Makes the end of the last group before `tokens` a resume point when the sequence of `path` comes
    /// to it: somebody waits to go on from there.
    pub fn keep_resumable(&mut self, path: &mut Path, tokens: usize) {
        let groups = tokens / self.grain.group_tokens();
        if !path.resume_after.contains(&groups) {
            path.resume_after.push(groups);
        }
    }

    /// The path of a sequence that was forked off at its first `tokens` tokens.
    pub fn fork(&mut self, path: &Path, tokens: usize) -> Path {
        let whole = path.groups.len().min(tokens / self.grain.group_tokens());
        let groups = path.groups[..whole].to_vec();
        self.tree.acquire(&groups);
        Path {
            namespace: path.namespace,
            closed: path.closed,
            groups,
            chains: path.chains.iter().copied().take(whole).collect(),
            written: path.written.min(whole),
            prompt: path.prompt,
            resumed: path.resumed,
            ..Path::default()
        }
    }

    /// The sequence of `path` is about to end. Whatever goes on with its tokens later starts at the
    /// end of its last group.
    ///
    /// # Errors
    /// [`KvError::Pages`] when pages cannot be sealed; what is kept already stays.
    pub fn finish(
        &mut self,
        path: &mut Path,
        sequence: &mut Sequence,
        now: Instant,
    ) -> Result<(), KvError> {
        match sequence.has_lost_rows() {
            true => Ok(()),
            false => self.keep_point(path, sequence, now),
        }
    }

    /// The sequence of `path` is gone, or about to be.
    pub fn leave(&mut self, path: Path, now: Instant) {
        let last = path.groups.last().copied();
        for id in path.resumed.into_iter().chain(last) {
            self.tree.touch_resume_point(id, now);
        }
        self.release(&path.groups, now);
    }

    /// Nobody may use `groups` any more; whether they are put aside is to be settled again.
    pub(super) fn release(&mut self, groups: &[GroupId], now: Instant) {
        for id in groups {
            self.aside.remove(id);
        }
        self.tree.release(groups, now);
    }

    /// Makes the groups that `path` has for its first `tokens` tokens the last to be evicted, and to
    /// leave a folder, for `time` from `now` on.
    pub fn pin(&mut self, path: &mut Path, tokens: usize, now: Instant, time: Duration) {
        let whole = path.groups.len().min(tokens / self.grain.group_tokens());
        if let Some(until) = now.checked_add(time) {
            self.tree.pin(&path.groups[..whole], until);
        }
        path.pinned = SystemTime::now()
            .checked_add(time)
            .map(|until| (whole, until));
        self.pin_files(path);
    }

    /// Evicts the group that is needed least; `false` when all are in use.
    pub fn evict(&mut self, now: Instant) -> bool {
        self.tree.evict(now).is_some()
    }
}
