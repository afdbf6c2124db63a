//! Bringing segments into the folder, on threads of their own.

use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::super::restore::FolderMiss;
use super::super::segment::{Header, ReadError};
use super::super::{CacheFolder, Shared, locked};
use super::Tier;
use super::find::{Prompt, Wanted};
use crate::prefix::Namespace;

/// A prompt whose segments are on their way into the folder. Dropping it leaves what is not there yet.
#[derive(Debug)]
pub struct Fetching {
    shared: Arc<Shared>,
    prompt: Arc<Prompt>,
    progress: Arc<Mutex<Progress>>,
    began: Instant,
}

#[derive(Debug)]
struct Progress {
    done: bool,
    /// When bytes last came, or an answer.
    at: Instant,
    missed: Option<FolderMiss>,
}

/// Why a segment was not brought.
#[derive(Debug)]
enum Missed {
    /// The store has something else under its name.
    Damaged,
    /// It has gone since it was asked for.
    Gone,
    /// The store fails.
    Store(io::Error),
    /// The folder cannot take it.
    Folder(io::Error),
    /// Nobody waits for it any more.
    Cancelled,
}

/// Tokens that have to be missing before a store is asked: its answer takes as long as computing some dozens.
const LEAST_TOKENS: usize = 128;
/// Prompts that are looked for at once. Others are computed.
const MOST_FETCHES: usize = 8;
/// Segments of one prompt that come at once: one connection to most stores is slower than most networks.
const MOST_CONNECTIONS: usize = 4;
/// How long a store may be silent.
const STALL: Duration = Duration::from_secs(5);
const FETCHER: &str = "lacuna-fetch";

impl CacheFolder {
    /// Begins to bring what the remote tier has of `tokens` beyond the `known` groups that are in memory, of which a
    /// sequence could start after `resumable`, and beyond the `stored` tokens that are in the folder. `None` without
    /// a tier, and when it is not worth or not possible to ask.
    pub(crate) fn fetch(
        &self,
        namespace: Namespace,
        tokens: &[u32],
        (known, resumable): (usize, usize),
        stored: usize,
    ) -> Option<Fetching> {
        let tier = self.shared.tier.as_ref()?;
        let now = Instant::now();
        let there = stored.max(known * self.shared.shape.group_tokens());
        let paused = locked(&tier.reading).left(now).is_some() || self.shared.is_paused(now);
        if there + LEAST_TOKENS > tokens.len() || paused {
            return None;
        }
        let place = FetchPlace::take(&self.shared)?;
        tier.status().lookups += 1;
        let fetching = Fetching {
            shared: Arc::clone(&self.shared),
            prompt: Arc::new(Prompt {
                chains: self.chains(namespace, tokens),
                tokens: tokens.to_vec(),
                root: self.root(namespace),
                known,
                resumable,
                cancelled: AtomicBool::new(false),
            }),
            progress: Arc::new(Mutex::new(Progress {
                done: false,
                at: now,
                missed: None,
            })),
            began: now,
        };
        let (prompt, progress) = (Arc::clone(&fetching.prompt), Arc::clone(&fetching.progress));
        let fetch = move || {
            let done = Done(&progress);
            place.0.fetch_all(&prompt, done.0);
        };
        let thread = thread::Builder::new().name(FETCHER.to_owned());
        thread.spawn(fetch).ok().map(|_| fetching)
    }
}

/// One of the prompts that are looked for at once.
struct FetchPlace(Arc<Shared>);

impl FetchPlace {
    fn take(shared: &Arc<Shared>) -> Option<Self> {
        let taken = &shared.tier.as_ref()?.fetching;
        let place = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
            (taken < MOST_FETCHES).then_some(taken + 1)
        });
        place.is_ok().then(|| Self(Arc::clone(shared)))
    }
}

impl Drop for FetchPlace {
    fn drop(&mut self) {
        if let Some(tier) = &self.0.tier {
            tier.fetching.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Says that a thread has ended, however it did.
struct Done<'a>(&'a Mutex<Progress>);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        locked(self.0).done = true;
    }
}

impl Fetching {
    /// `None` while there is something to wait for, and then why less came than there was, if so.
    #[must_use]
    pub fn poll(&self) -> Option<Option<FolderMiss>> {
        let progress = locked(&self.progress);
        let Some(tier) = self.shared.tier.as_ref().filter(|_| !progress.done) else {
            return Some(progress.missed);
        };
        if progress.at.elapsed() >= STALL {
            self.prompt.cancelled.store(true, Ordering::Relaxed);
            tier.note_failed_read(&io::ErrorKind::TimedOut.into());
        } else if self.began.elapsed() >= tier.patience {
            self.prompt.cancelled.store(true, Ordering::Relaxed);
            tier.status().late += 1;
        } else {
            return None;
        }
        Some(Some(FolderMiss::RemoteUnreadable))
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        self.prompt.cancelled.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn fetch_all(&self, prompt: &Prompt, progress: &Mutex<Progress>) {
        let Some(tier) = &self.tier else {
            return;
        };
        let found = match self.look_up(tier, prompt) {
            Ok(found) => found,
            Err(error) => {
                tier.note_failed_read(&error);
                locked(progress).missed = Some(FolderMiss::RemoteUnreadable);
                return;
            }
        };
        locked(&tier.reading).succeed();
        tier.status().hits += u64::from(!found.is_empty());
        let next = AtomicUsize::new(0);
        let bring = || {
            while let Some(wanted) = found.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(missed) = self.bring(tier, wanted, prompt, progress) {
                    // What is behind it is of no use.
                    next.store(found.len(), Ordering::Relaxed);
                    let why = self.note_not_brought(tier, wanted, missed);
                    let mut progress = locked(progress);
                    progress.missed = progress.missed.or(why);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..MOST_CONNECTIONS.min(found.len()) {
                let thread = thread::Builder::new().name(FETCHER.to_owned());
                // Those that there are bring all of it.
                thread.spawn_scoped(scope, bring).ok();
            }
            bring();
        });
        // What made room is gone; if that cannot be seen, it is missed when it is wanted.
        self.look().ok();
    }

    fn note_not_brought(&self, tier: &Tier, wanted: &Wanted, missed: Missed) -> Option<FolderMiss> {
        match missed {
            Missed::Damaged => {
                tier.note_damaged(&wanted.name);
                Some(FolderMiss::RemoteDamaged)
            }
            Missed::Gone => Some(FolderMiss::RemoteUnreadable),
            Missed::Store(error) => {
                tier.note_failed_read(&error);
                Some(FolderMiss::RemoteUnreadable)
            }
            Missed::Folder(error) => {
                self.note_failed_write(&error);
                Some(FolderMiss::Unreadable)
            }
            Missed::Cancelled => None,
        }
    }

    /// Brings one segment into the folder, compared with what it has to be before (N1).
    fn bring(
        &self,
        tier: &Tier,
        wanted: &Wanted,
        prompt: &Prompt,
        progress: &Mutex<Progress>,
    ) -> Result<(), Missed> {
        if self.index().contains(&wanted.name) {
            return Ok(());
        }
        let mut sink = Sink {
            file: tempfile::tempfile_in(&self.folder).map_err(Missed::Folder)?,
            left: wanted.bytes,
            stopped: None,
            prompt,
            progress,
        };
        let got = tier.store.get(&tier.object(&wanted.name), &mut sink);
        tier.status().fetched_bytes += wanted.bytes - sink.left;
        match (sink.stopped, got) {
            (Some(stopped), _) => return Err(stopped),
            // Of less, its header says that there is more.
            (None, Ok(())) => {}
            (None, Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Missed::Gone);
            }
            (None, Err(error)) => return Err(Missed::Store(error)),
        }
        let header = Header::read(&sink.file, self.key())?;
        if !self.is_wanted(wanted, &header, prompt) {
            return Err(Missed::Damaged);
        }
        header.verify_payload(&sink.file, || match prompt.is_cancelled() {
            true => Err(Missed::Cancelled),
            false => Ok(()),
        })?;
        let adopted = self.adopt(&header, &sink.file);
        if adopted.map_err(Missed::Folder)? {
            tier.status().fetched_segments += 1;
        }
        locked(progress).at = Instant::now();
        Ok(())
    }
}

impl From<ReadError> for Missed {
    /// What came is in a file of this machine.
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Damaged(_) => Self::Damaged,
            ReadError::Io(error) => Self::Folder(error),
        }
    }
}

/// Where a segment's bytes go: a file without a name, and no more of them than the segment has.
struct Sink<'a> {
    file: File,
    left: u64,
    stopped: Option<Missed>,
    prompt: &'a Prompt,
    progress: &'a Mutex<Progress>,
}

impl Sink<'_> {
    fn stop(&mut self, why: Missed) -> io::Error {
        self.stopped = Some(why);
        io::Error::other("no more is taken")
    }
}

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.prompt.is_cancelled() {
            return Err(self.stop(Missed::Cancelled));
        }
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            return Err(self.stop(Missed::Damaged));
        };
        if let Err(error) = self.file.write_all(bytes) {
            return Err(self.stop(Missed::Folder(error)));
        }
        self.left = left;
        locked(self.progress).at = Instant::now();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::path::Path;

    use super::super::super::{FolderConfig, trial};
    use super::super::{MemoryStore, Remote, RemoteStatus, RemoteStore, StoreTrouble};
    use super::*;
    use crate::folder::chain::{Chain, Fingerprint};

    #[test]
    fn no_more_bytes_are_taken_than_a_segment_has_and_none_that_nobody_waits_for() {
        let fingerprint = Fingerprint::new([("weights", "a".to_owned())]);
        let prompt = Prompt {
            tokens: Vec::new(),
            chains: Vec::new(),
            root: Chain::root(&fingerprint, Namespace::COMMON),
            known: 0,
            resumable: 0,
            cancelled: AtomicBool::new(false),
        };
        let began = Instant::now();
        let progress = Mutex::new(Progress {
            done: false,
            at: began,
            missed: None,
        });
        let mut sink = Sink {
            file: tempfile::tempfile().expect("a file"),
            left: 10,
            stopped: None,
            prompt: &prompt,
            progress: &progress,
        };
        assert_eq!(sink.write(&[1; 7]).expect("room"), 7);
        assert_eq!(sink.left, 3);
        assert!(locked(&progress).at > began, "bytes came");
        assert!(sink.write(&[1; 4]).is_err());
        assert!(matches!(sink.stopped, Some(Missed::Damaged)));
        sink.stopped = None;
        assert_eq!(sink.write(&[1; 3]).expect("room"), 3);
        assert_eq!(sink.left, 0);
        assert_eq!(sink.file.metadata().expect("a file").len(), 10);
        prompt.cancelled.store(true, Ordering::Relaxed);
        assert!(sink.write(&[]).is_err());
        assert!(matches!(sink.stopped, Some(Missed::Cancelled)));
    }

    /// A store that has rows, and gives of them what it is told.
    #[derive(Debug)]
    struct Odd(MemoryStore, Option<io::ErrorKind>);

    impl RemoteStore for Odd {
        fn place(&self) -> String {
            self.0.place()
        }

        fn can_write(&self) -> bool {
            false
        }

        fn lengths(&self, names: &[String]) -> io::Result<Vec<Option<u64>>> {
            self.0.lengths(names)
        }

        /// Half of them, and then it fails, if it does.
        fn get(&self, name: &str, sink: &mut dyn Write) -> io::Result<()> {
            if !name.ends_with(".rows") {
                return self.0.get(name, sink);
            }
            let bytes = self.0.object(name).ok_or(io::ErrorKind::NotFound)?;
            sink.write_all(&bytes[..bytes.len() / 2])?;
            self.1.map_or(Ok(()), |kind| Err(kind.into()))
        }

        fn put(&self, _: &str, _: u64, _: &mut dyn Read) -> io::Result<()> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }

    fn open(root: &Path, store: impl RemoteStore + 'static) -> CacheFolder {
        let config = FolderConfig {
            remote: Some(Remote {
                store: Arc::new(store),
                patience: Duration::from_secs(60),
            }),
            ..trial::config(root, 1 << 30)
        };
        CacheFolder::open(config, &trial::cache(), trial::fingerprint()).expect("a folder")
    }

    fn remote(folder: &CacheFolder) -> RemoteStatus {
        folder.status().remote.expect("a store")
    }

    /// A store with one segment, the tokens of a prompt that has it, and the bytes that it has.
    fn filled(root: &Path) -> (MemoryStore, Vec<u32>, u64) {
        let store = MemoryStore::default();
        let folder = open(root, store.clone());
        let mut prompt = trial::tokens(&folder, 1, 8);
        trial::write(&folder, &prompt, 0);
        trial::within_a_minute(|| (remote(&folder).uploads_waiting == 0).then_some(()));
        prompt.push(7);
        (store, prompt, remote(&folder).uploaded_bytes)
    }

    #[test]
    fn what_is_gone_from_a_store_is_no_failure_of_it_and_what_came_until_then_is_counted() {
        let here = tempfile::tempdir().expect("a folder");
        let (store, prompt, bytes) = filled(here.path());
        for (kind, why, failed, damaged) in [
            (
                Some(io::ErrorKind::NotFound),
                FolderMiss::RemoteUnreadable,
                0,
                0,
            ),
            (
                Some(io::ErrorKind::TimedOut),
                FolderMiss::RemoteUnreadable,
                1,
                0,
            ),
            (None, FolderMiss::RemoteDamaged, 0, 1),
        ] {
            let there = tempfile::tempdir().expect("a folder");
            let folder = open(there.path(), Odd(store.clone(), kind));
            let fetching = folder.fetch(Namespace::COMMON, &prompt, (0, 0), 0);
            let fetching = fetching.expect("it is asked");
            let missed = trial::within_a_minute(|| fetching.poll());
            assert_eq!(missed, Some(why), "{kind:?}");
            let status = remote(&folder);
            assert_eq!((status.failed_reads, status.damaged), (failed, damaged));
            assert_eq!(status.reading_paused.is_some(), failed > 0);
            assert_eq!(status.fetched_bytes, bytes / 2);
            assert_eq!((status.hits, status.fetched_segments), (1, 0));
            assert_eq!(folder.status().segments, 0);
        }
        let there = tempfile::tempdir().expect("a folder");
        let folder = open(there.path(), store);
        let fetching = folder.fetch(Namespace::COMMON, &prompt, (0, 0), 0);
        let fetching = fetching.expect("it is asked");
        assert_eq!(trial::within_a_minute(|| fetching.poll()), None);
        let status = remote(&folder);
        assert_eq!((status.fetched_bytes, status.fetched_segments), (bytes, 1));
        assert_eq!(folder.status().segments, 1);
    }

    #[test]
    fn nothing_more_is_brought_for_whom_nobody_waits() {
        let here = tempfile::tempdir().expect("a folder");
        let (store, prompt, _) = filled(here.path());
        let there = tempfile::tempdir().expect("a folder");
        let folder = open(there.path(), store.clone());
        store.set(StoreTrouble::Stalls);
        let fetching = folder.fetch(Namespace::COMMON, &prompt, (0, 0), 0);
        let fetching = fetching.expect("it is asked");
        let (prompt, progress) = (Arc::clone(&fetching.prompt), Arc::clone(&fetching.progress));
        assert!(!prompt.is_cancelled() && fetching.poll().is_none());
        drop(fetching);
        assert!(prompt.is_cancelled());
        store.set(StoreTrouble::Nothing);
        trial::within_a_minute(|| locked(&progress).done.then_some(()));
        assert_eq!(remote(&folder).fetched_segments, 0);
        assert_eq!(folder.status().segments, 0);
    }
}
