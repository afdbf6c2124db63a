//! What goes to the cache folder, and what comes back from it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cache::{Path, PrefixCache};
use super::namespace::Namespace;
use super::tree::{Inserted, Parent};
use crate::folder::remote::Fetching;
use crate::folder::{CacheFolder, FolderStatus, Kind, Restored, Restoring, SessionId, Stored};

impl PrefixCache {
    /// The same, and what enters it is written to `folder`.
    #[must_use]
    pub fn with_folder(mut self, folder: CacheFolder) -> Self {
        self.folder = Some(folder);
        self.watch_folder();
        self
    }

    /// Has the folder take note of what becomes of blocks, if they are watched.
    pub(super) fn watch_folder(&self) {
        if let (Some(folder), Some(blocks)) = (&self.folder, &self.blocks) {
            folder.watch(blocks.namespace, Arc::clone(&self.grain));
        }
    }

    /// Whether what it holds goes to files, by threads of their own.
    #[must_use]
    pub fn has_folder(&self) -> bool {
        self.folder.is_some()
    }

    /// What the folder holds, if there is one.
    #[must_use]
    pub fn folder_status(&self) -> Option<FolderStatus> {
        let folder = self.folder.as_ref();
        folder
            .filter(|folder| !folder.is_unnamed())
            .map(CacheFolder::status)
    }

    /// Whether there is a folder which has nothing but what was computed by other settings.
    #[must_use]
    pub fn has_only_others(&self) -> bool {
        let status = self.folder_status();
        status.is_some_and(|folder| folder.segments == 0 && folder.other_segments > 0)
    }

    /// Gives the folder what has entered with `path` and is not written: segments that are full and resume points that
    /// stay, or `all` of it, because the sequence ends. `tokens` are the sequence's. Only takes note of pages; they
    /// are written later.
    pub fn write(&self, path: &mut Path, tokens: &[u32], all: bool) {
        let Some(folder) = self.folder.as_ref().filter(|folder| !folder.is_unnamed()) else {
            return;
        };
        let group = self.grain.group_tokens().get();
        let root = folder.root(path.namespace);
        for index in path.chains.len()..path.groups.len() {
            let before = path.chains.last().copied().unwrap_or(root);
            let tokens = &tokens[index * group..][..group];
            path.chains.push(before.after(tokens));
        }
        let known = |index: usize| folder.knows(Kind::Rows, path.chains[index]);
        let mut start = match all {
            // What was given up meanwhile is tried once more.
            true => 0,
            false => path.written,
        };
        while start < path.groups.len() && known(start) {
            start += 1;
        }
        let (longest, written) = (folder.segment_groups(), path.written);
        while start < path.groups.len() {
            let end = path.groups.len().min(start + longest);
            if end - start < longest && !all {
                break;
            }
            let payloads = path.groups[start..end].iter();
            let pins = payloads.filter_map(|&id| self.tree.get(id).map(|(pins, _)| pins.clone()));
            let before = start.checked_sub(1).map_or(root, |last| path.chains[last]);
            folder.write_rows(
                before,
                start,
                &path.chains[start..end],
                &tokens[start * group..end * group],
                pins.collect(),
            );
            start = end;
        }
        path.written = start;
        if self.grain.has_resume_points() {
            self.write_points(folder, path, written, all);
        }
        if let Some(&last) = path.chains.last().filter(|_| all) {
            folder.touch(last);
            self.pin_files(path);
        }
    }

    /// Has the folder keep what it was given of `path` for the session `id`, which is gone on with from there. Nothing
    /// without a folder that others find.
    pub fn keep_session(&self, path: &Path, id: &SessionId) {
        let Some(folder) = self.folder.as_ref().filter(|folder| !folder.is_unnamed()) else {
            return;
        };
        let root = folder.root(path.namespace);
        let chain = path.chains.last().copied().unwrap_or(root);
        let tokens = path.chains.len() * self.grain.group_tokens().get();
        folder.keep_session(id, path.namespace, chain, tokens);
    }

    /// Has the folder keep what it has of the groups of `path` that are to be kept.
    pub(super) fn pin_files(&self, path: &Path) {
        let pinned = path.pinned.and_then(|(groups, until)| {
            let chain = path.chains.get(groups.checked_sub(1)?)?;
            Some((*chain, until))
        });
        if let (Some(folder), Some((chain, until))) = (&self.folder, pinned) {
            folder.pin(chain, until);
        }
    }

    /// Writes resume points behind groups that are written: those that are no sequence's trailing one, from the group
    /// `from` on, or `all`.
    fn write_points(&self, folder: &CacheFolder, path: &Path, from: usize, all: bool) {
        let from = if all { 0 } else { from };
        for groups in from + 1..=path.written {
            let chain = path.chains[groups - 1];
            if !(all || self.is_due(path, groups)) || folder.knows(Kind::ResumePoint, chain) {
                continue;
            }
            if let Some(point) = self.tree.resume_point(path.groups[groups - 1]) {
                folder.write_point(chain, groups, point.clone());
            }
        }
    }

    /// Lets go of pages that wait to be written, because they are needed. Returns whether there were any.
    pub fn give_up_writing(&self) -> bool {
        let folder = self.folder.as_ref();
        folder.is_some_and(CacheFolder::give_up_writing)
    }

    /// What the folder has of a prompt of `namespace` beyond what is in memory.
    #[must_use]
    pub fn stored(&self, namespace: Namespace, tokens: &[u32]) -> Option<Stored> {
        let folder = self.folder.as_ref()?;
        let before_last = &tokens[..tokens.len().saturating_sub(1)];
        let known = self.tree.find(namespace, before_last).groups;
        folder.find(namespace, tokens, known.len(), self.tree.resumable(&known))
    }

    /// Begins to bring into the folder what a store behind it has of a prompt of `namespace`, beyond what is in memory
    /// and `stored`. `None` when there is nothing to wait for.
    #[must_use]
    pub fn fetch(
        &self,
        namespace: Namespace,
        tokens: &[u32],
        stored: Option<&Stored>,
    ) -> Option<Fetching> {
        let folder = self.folder.as_ref()?;
        let before_last = &tokens[..tokens.len().saturating_sub(1)];
        let known = self.tree.find(namespace, before_last).groups;
        let known = (known.len(), self.tree.resumable(&known));
        let stored = stored.map_or(0, |stored| stored.tokens);
        folder.fetch(namespace, tokens, known, stored)
    }

    /// Waits until the folder has all that it was given; `false` when that takes longer than `patience`.
    #[must_use]
    pub fn settle(&self, patience: Duration) -> bool {
        let folder = self.folder.as_ref();
        folder.is_none_or(|folder| folder.settle(patience))
    }

    /// Keeps what is in memory of a prompt of `namespace` from being evicted, until [`PrefixCache::leave`].
    pub fn hold(&mut self, namespace: Namespace, tokens: &[u32]) -> Path {
        let groups = self.tree.find(namespace, tokens).groups;
        self.tree.acquire(&groups);
        Path::holding(namespace, groups)
    }

    /// Begins to read what [`PrefixCache::stored`] found for `tokens`; `None` without a folder.
    #[must_use]
    pub fn restore(&self, stored: Stored, tokens: &[u32]) -> Option<Restoring> {
        let folder = self.folder.as_ref()?;
        Some(folder.restore(stored, tokens))
    }

    /// Enters what was read back for `tokens` of `namespace`. Returns how many groups that was: none when those before
    /// them have left meanwhile.
    pub fn enter(
        &mut self,
        namespace: Namespace,
        tokens: &[u32],
        restored: Restored,
        now: Instant,
    ) -> usize {
        let group = self.grain.group_tokens().get();
        let before = &tokens[..restored.first_group * group];
        let mut path = self.tree.find(namespace, before).groups;
        if path.len() < restored.first_group {
            return 0;
        }
        self.tree.acquire(&path);
        for pins in restored.groups {
            let last = path.last().copied();
            let parent = last.map_or(Parent::Root(namespace), Parent::Group);
            let tokens = &tokens[path.len() * group..][..group];
            match self.tree.insert(parent, tokens, now, || pins) {
                Inserted::New(id) | Inserted::Known(id) => path.push(id),
                Inserted::Collided => break,
            }
        }
        let last = path.last().copied();
        if let (Some((groups, point)), Some(last)) = (restored.point, last)
            && groups == path.len()
        {
            self.tree.keep_resume_point(last, now, point);
        }
        self.tree.release(&path, now);
        let entered = path.len() - restored.first_group;
        if let Some(folder) = &self.folder {
            folder.note_restored(entered * group);
        }
        entered
    }
}
