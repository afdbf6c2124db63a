//! Computed prompts kept by the page group, and sequences that start from them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::grain::Grain;
use super::namespace::Namespace;
use super::pins::Pins;
use super::tree::{Found, GroupId, Inserted, Miss, Parent, Tree};
use crate::cache::KvCache;
use crate::error::KvError;
use crate::sequence::Sequence;

/// Page groups of sequences, running and past, by the tokens they hold.
///
/// A sequence's groups enter as they fill, so another sequence can start from them while it still
/// runs. A group is kept while a sequence uses it, and after that until it is evicted or expires.
#[derive(Debug)]
pub struct PrefixCache {
    tree: Tree<Pins>,
    cache: KvCache,
    grain: Arc<Grain>,
}

/// The groups a sequence uses, from its first token on. Goes back with [`PrefixCache::leave`].
#[derive(Debug, Default)]
#[must_use = "groups stay in use until they are given back"]
pub struct Path {
    namespace: Namespace,
    groups: Vec<GroupId>,
    /// Later groups cannot be entered: memory cannot be kept, or hashes collide.
    closed: bool,
    /// After so many groups the windows' pages are kept too, beside where they are anyway.
    resume_after: Vec<usize>,
    /// The group whose window the sequence went on from.
    resumed: Option<GroupId>,
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
        Self {
            tree: Tree::new(grain.group_tokens()),
            cache,
            grain,
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
    /// windows it ends at a resume point.
    #[must_use]
    pub fn find(&self, namespace: Namespace, tokens: &[u32]) -> (Found, usize) {
        let before_last = &tokens[..tokens.len().saturating_sub(1)];
        let mut found = self.tree.find(namespace, before_last);
        if self.grain.has_windows() {
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

    /// After how many groups of a prompt the windows' pages are kept, beside where they are anyway:
    /// where it leaves what is kept already, and at its end. There twice, a group apart: of what
    /// follows a prompt's last words in a template, some may be written differently the next time.
    fn resume_after(&self, namespace: Namespace, tokens: &[u32]) -> Vec<usize> {
        if !self.grain.has_windows() {
            return Vec::new();
        }
        let before_last = &tokens[..tokens.len().saturating_sub(1)];
        let known = self.tree.find(namespace, before_last).groups.len();
        let end = before_last.len() / self.grain.group_tokens();
        vec![known, end.saturating_sub(1), end]
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
        let window = last.and_then(|id| self.tree.window(id));
        sequence.adopt(&pins, window, held)?;
        let resumed = window.and(last);
        found.groups.truncate(held / self.grain.group_tokens());
        self.tree.acquire(&found.groups);
        Ok(Start {
            sequence,
            path: Path {
                namespace,
                groups: found.groups,
                // Rows alone cannot be gone on from.
                closed: self.cache.geometry().has_states(),
                resume_after: self.resume_after(namespace, tokens),
                resumed,
            },
            miss: found.miss,
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
        })
    }

    /// Enters the groups that `sequence` has filled since the last call. `tokens` are its tokens. To be
    /// called before [`Sequence::release_passed`], which gives back what resume points would keep.
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
        while path.groups.len() < full && !path.closed {
            let start = path.groups.len() * group;
            let rows = start..start + group;
            let parent = path.end();
            let Some(pins) = sequence.pin_group(rows.clone())? else {
                path.closed = true;
                break;
            };
            match self.tree.insert(parent, &tokens[rows], now, || pins) {
                Inserted::New(id) | Inserted::Known(id) => path.groups.push(id),
                Inserted::Collided => path.closed = true,
            }
            let groups = path.groups.len();
            let due = groups.is_multiple_of(self.grain.resume_every().get());
            if !path.closed && (due || path.resume_after.contains(&groups)) {
                self.keep_windows(path, sequence, now)?;
            }
        }
        Ok(())
    }

    /// Makes the end of the last group of `path` a resume point, if it is none and the windows' pages
    /// are there.
    fn keep_windows(
        &mut self,
        path: &Path,
        sequence: &mut Sequence,
        now: Instant,
    ) -> Result<(), KvError> {
        let Some(&last) = path.groups.last() else {
            return Ok(());
        };
        if !self.grain.has_windows() || self.tree.window(last).is_some() {
            return Ok(());
        }
        let groups = path.groups.len();
        let (next, end) = (
            self.grain.whole_tokens(groups),
            groups * self.grain.group_tokens().get(),
        );
        if let Some(pins) = sequence.pin_windows(next, end)? {
            self.tree.keep_window(last, now, pins);
        }
        Ok(())
    }

    /// Makes the end of the last group before `tokens` a resume point when the sequence of `path` comes
    /// to it: somebody waits to go on from there.
    pub fn keep_resumable(&mut self, path: &mut Path, tokens: usize) {
        let groups = tokens / self.grain.group_tokens();
        if self.grain.has_windows() && !path.resume_after.contains(&groups) {
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
            resume_after: Vec::new(),
            resumed: path.resumed,
        }
    }

    /// The sequence of `path` is about to end. Whatever goes on with its tokens later starts at the
    /// end of its last group.
    ///
    /// # Errors
    /// [`KvError::Pages`] when pages cannot be sealed; what is kept already stays.
    pub fn finish(
        &mut self,
        path: &Path,
        sequence: &mut Sequence,
        now: Instant,
    ) -> Result<(), KvError> {
        match sequence.has_lost_rows() {
            true => Ok(()),
            false => self.keep_windows(path, sequence, now),
        }
    }

    /// The sequence of `path` is gone, or about to be.
    pub fn leave(&mut self, path: Path, now: Instant) {
        let last = path.groups.last().copied();
        for id in path.resumed.into_iter().chain(last) {
            self.tree.touch_window(id, now);
        }
        self.tree.release(&path.groups, now);
    }

    /// Makes the groups that `path` has for its first `tokens` tokens the last to be evicted until
    /// `until`.
    pub fn pin(&mut self, path: &Path, tokens: usize, until: Instant) {
        let whole = path.groups.len().min(tokens / self.grain.group_tokens());
        self.tree.pin(&path.groups[..whole], until);
    }

    /// Evicts the group that is needed least; `false` when all are in use.
    pub fn evict(&mut self, now: Instant) -> bool {
        self.tree.evict(now).is_some()
    }

    /// Gives up a group that has been unused for `time_to_live`; `false` when there is none.
    pub fn expire(&mut self, now: Instant, time_to_live: Duration) -> bool {
        self.tree.expire(now, time_to_live).is_some()
    }
}
