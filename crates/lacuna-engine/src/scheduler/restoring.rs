//! Waiting requests whose prompts a cache folder has, or a store behind it: brought into the folder, and read back into
//! memory, one at a time, before they start.

use lacuna_kv::folder::{FolderMiss, Restored, Restoring, Stored};

use super::{Restore, Scheduler};

impl Scheduler {
    /// Whether the waiting request at `index` waits for what a cache folder has of its prompt. Reading begins when
    /// there is a place for the request and memory for all of its prompt, which is what computing it would take.
    pub(super) fn waits_for_folder(&mut self, index: usize) -> bool {
        match &self.waiting[index].restore {
            Restore::Done => false,
            Restore::Reading(reading) => match reading.poll() {
                None => true,
                Some(restored) => {
                    self.enter_restored(index, restored);
                    false
                }
            },
            Restore::Fetching(fetching) => match fetching.poll() {
                None => true,
                Some(missed) => {
                    let waiting = &mut self.waiting[index];
                    waiting.restore = Restore::Fetched;
                    waiting.folder_miss = missed;
                    self.begin_restoring(index)
                }
            },
            Restore::Unasked | Restore::Fetched => self.begin_restoring(index),
        }
    }

    fn enter_restored(&mut self, index: usize, restored: Restored) {
        let now = self.system.now();
        let waiting = &mut self.waiting[index];
        waiting.restore = Restore::Done;
        waiting.folder_miss = restored.missed().or(waiting.folder_miss);
        let namespace = waiting.job.namespace;
        if let Some(leader) = waiting.choices.front() {
            let tokens = leader.reusable_tokens();
            self.prefix.enter(namespace, tokens, restored, now);
        }
    }

    /// Returns whether the request at `index` waits from now on, or for its turn.
    fn begin_restoring(&mut self, index: usize) -> bool {
        let waiting = &self.waiting[index];
        if self.places_taken() + waiting.choices.len() > self.config.max_running {
            return false;
        }
        let namespace = waiting.job.namespace;
        let stored = waiting.choices.front().and_then(|leader| {
            let tokens = leader.reusable_tokens();
            self.prefix.stored(namespace, tokens)
        });
        if self.begin_fetching(index, stored.as_ref()) {
            return true;
        }
        let Some(stored) = stored else {
            self.waiting[index].restore = Restore::Done;
            return false;
        };
        if self.is_restoring() {
            return true;
        }
        let tokens = self.waiting[index]
            .choices
            .front()
            .map_or(&[][..], |leader| leader.reusable_tokens());
        let reusable = self.reusable(namespace, tokens);
        let needed = self.bytes_to_start(&self.waiting[index], reusable.tokens);
        let needed = needed.max(stored.bytes);
        if needed > self.free_for_admission(reusable.unused_groups) {
            // It is asked again when there is more. One that is alone starts with what there is.
            if self.running.is_empty() {
                let waiting = &mut self.waiting[index];
                waiting.restore = Restore::Done;
                waiting.folder_miss = Some(FolderMiss::NoMemory);
            }
            return false;
        }
        // What is in memory of the prompt must not be what makes room for the rest of it.
        let held = self.prefix.hold(namespace, tokens);
        let made = self.make_room(stored.bytes);
        self.prefix.leave(held, self.system.now());
        if !made {
            return true;
        }
        let restoring = self.waiting[index].choices.front().and_then(|leader| {
            let tokens = leader.reusable_tokens();
            self.prefix.restore(stored, tokens)
        });
        self.waiting[index].restore = match restoring {
            Some(restoring) => Restore::Reading(restoring),
            None => Restore::Done,
        };
        true
    }

    /// Returns whether the request at `index` waits from now on for what a store behind the folder has of its prompt
    /// beyond `stored`. One that has run is not asked for again: what it lacks, it has computed here.
    fn begin_fetching(&mut self, index: usize, stored: Option<&Stored>) -> bool {
        let waiting = &self.waiting[index];
        let has_run = waiting.job.reused_tokens.is_some();
        if has_run || !matches!(waiting.restore, Restore::Unasked) {
            return false;
        }
        let fetching = waiting.choices.front().and_then(|leader| {
            let tokens = leader.reusable_tokens();
            self.prefix.fetch(waiting.job.namespace, tokens, stored)
        });
        let begun = fetching.is_some();
        if let Some(fetching) = fetching {
            self.waiting[index].restore = Restore::Fetching(fetching);
        }
        begun
    }

    fn is_restoring(&self) -> bool {
        self.restoring().next().is_some()
    }

    /// Whether nothing is being read any more.
    #[cfg(test)]
    pub(super) fn has_restored(&self) -> bool {
        self.restoring().all(Restoring::is_over)
    }

    /// What is being read back: one prompt at most.
    fn restoring(&self) -> impl Iterator<Item = &Restoring> {
        self.waiting
            .iter()
            .filter_map(|waiting| match &waiting.restore {
                Restore::Reading(restoring) => Some(restoring),
                Restore::Unasked | Restore::Fetching(_) | Restore::Fetched | Restore::Done => None,
            })
    }

    /// Bytes of pages that are promised to what is being read back.
    pub(super) fn restoring_bytes(&self) -> u64 {
        self.restoring().map(|restoring| restoring.bytes).sum()
    }

    /// Takes the pages back of what is being read, because they are needed; it is computed then. Returns whether there
    /// was anything.
    pub(super) fn cancel_restoring(&mut self) -> bool {
        let mut waiting = self.waiting.iter_mut();
        let reading = waiting.find(|waiting| matches!(waiting.restore, Restore::Reading(_)));
        reading
            .map(|waiting| {
                waiting.restore = Restore::Done;
                waiting.folder_miss = Some(FolderMiss::NoMemory);
            })
            .is_some()
    }
}
