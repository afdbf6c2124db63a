//! Putting segments into the store, one after the other, behind everything else.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::super::index::{Named, Segment};
use super::super::segment::{Header, ReadError};
use super::super::{Shared, files, locked};
use super::Tier;
use super::link::Link;

/// Segments that are to be put into a store.
#[derive(Debug, Default)]
pub(super) struct Uploads {
    names: VecDeque<String>,
    /// How often the first has failed.
    attempts: u32,
    busy: bool,
    closing: bool,
}

impl Uploads {
    /// Of a store that can be written to: its thread looks first what the folder has.
    pub(super) fn new(can_write: bool) -> Self {
        Self {
            busy: can_write,
            ..Self::default()
        }
    }
}

/// Names that wait at most: those of a terabyte of usual segments.
const MOST_WAITING: usize = 8192;
/// How often one segment is tried while the store takes others or says no: four minutes, with the pauses between.
const MOST_ATTEMPTS: u32 = 8;

/// The uploading thread.
pub(crate) fn run(shared: &Shared) {
    let Some(tier) = &shared.tier else {
        return;
    };
    // Whatever computes goes first; where that cannot be said, it does not.
    #[cfg(target_os = "linux")]
    rustix::process::nice(10).ok();
    shared.offer_all(tier);
    locked(&tier.uploads).busy = false;
    tier.changed.notify_all();
    while let Some(name) = tier.next_upload() {
        let uploaded = shared.upload(tier, &name);
        tier.end_upload(name, uploaded);
    }
}

impl Tier {
    /// Has a segment of the folder put into the store, if it is not there.
    pub(in super::super) fn offer(&self, name: &str) {
        if !self.store.can_write() {
            return;
        }
        let mut uploads = locked(&self.uploads);
        if uploads.closing {
            return;
        }
        if uploads.names.len() == MOST_WAITING {
            // What waits leads to it, or is of others.
            self.status().given_up += 1;
            return;
        }
        uploads.names.push_back(name.to_owned());
        self.changed.notify_all();
    }

    pub(super) fn uploads_waiting(&self) -> usize {
        let uploads = locked(&self.uploads);
        uploads.names.len() + usize::from(uploads.busy)
    }

    /// The next segment, once the store may be asked; `None` when the folder is closed.
    fn next_upload(&self) -> Option<String> {
        let mut uploads = locked(&self.uploads);
        loop {
            if uploads.closing {
                return None;
            }
            let pause = locked(&self.writing).left(Instant::now());
            let pause = match (pause, uploads.names.is_empty()) {
                (None, false) => {
                    uploads.busy = true;
                    return uploads.names.pop_front();
                }
                (Some(pause), false) => pause,
                (_, true) => Duration::MAX,
            };
            let waited = self.changed.wait_timeout(uploads, pause);
            uploads = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn end_upload(&self, name: String, uploaded: io::Result<()>) {
        let mut uploads = locked(&self.uploads);
        uploads.busy = false;
        match uploaded {
            Ok(()) => {
                uploads.attempts = 0;
                locked(&self.writing).succeed();
            }
            // This one does not fit there; others may.
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                uploads.attempts = 0;
                self.status().given_up += 1;
            }
            Err(error) => {
                uploads.attempts += 1;
                let mut status = self.status();
                status.failed_writes += 1;
                locked(&self.writing).fail(&error, Instant::now());
                if uploads.attempts < MOST_ATTEMPTS {
                    uploads.names.push_front(name);
                } else {
                    uploads.attempts = 0;
                    status.given_up += 1;
                }
            }
        }
        self.changed.notify_all();
    }

    /// Waits until everything is put there that is to be. `false` when the store fails, or when that takes until
    /// `until`.
    pub(in super::super) fn settle(&self, until: Instant) -> bool {
        let mut uploads = locked(&self.uploads);
        loop {
            if !uploads.busy && uploads.names.is_empty() {
                return true;
            }
            if locked(&self.writing).paused.is_some() {
                return false;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(uploads, left);
            uploads = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Has the thread end once it is done with what it does.
    pub(in super::super) fn close(&self) {
        locked(&self.uploads).closing = true;
        self.changed.notify_all();
    }
}

impl Shared {
    /// Offers what an earlier process has left in the folder: it may have been killed before it was put.
    fn offer_all(&self, tier: &Tier) {
        let stored = files::stored(&self.folder).unwrap_or_default();
        let segments = stored.into_iter().filter_map(|file| match file.named {
            Named::Segment(first_group) => {
                let name = file.path.file_name()?.to_str()?;
                Some((first_group, name.to_owned()))
            }
            Named::Part | Named::Bad => None,
        });
        // What others lead to goes first, so that what is there can be used.
        let mut segments: Vec<(u32, String)> = segments.collect();
        segments.sort();
        segments.iter().for_each(|(_, name)| tier.offer(name));
    }

    /// Puts a segment into the store unless it is there, and the link to it before.
    fn upload(&self, tier: &Tier, name: &str) -> io::Result<()> {
        let mut file = match File::open(self.folder.join(name)) {
            Ok(file) => file,
            // It has made room for others, or is this machine's trouble alone.
            Err(_) => return Ok(()),
        };
        let bytes = match self.checked(&file) {
            Ok((header, bytes)) => {
                let is_damaged = |name: &str| locked(&tier.damaged).contains(name);
                let there = tier.lengths(&[name.to_owned()])?;
                let is_there = !is_damaged(name) && there == [Some(bytes)];
                if let Some(link) = Link::to(&Segment::of(&header)) {
                    let first = header.chains()[0];
                    let name = Link::name(header.first_group as usize, first);
                    // Of a segment that is there the link is too, unless it was found to be of no use.
                    if !is_there || is_damaged(&name) {
                        let link = link.encode();
                        let object = tier.object(&name);
                        let mut source = link.as_bytes();
                        tier.store.put(&object, link.len() as u64, &mut source)?;
                        locked(&tier.damaged).remove(&name);
                    }
                }
                if is_there {
                    return Ok(());
                }
                bytes
            }
            Err(ReadError::Damaged(_)) => {
                self.drop_damaged(name);
                return Ok(());
            }
            Err(ReadError::Io(_)) => return Ok(()),
        };
        file.seek(SeekFrom::Start(0))?;
        tier.store.put(&tier.object(name), bytes, &mut file)?;
        locked(&tier.damaged).remove(name);
        let mut status = tier.status();
        status.uploaded_segments += 1;
        status.uploaded_bytes += bytes;
        Ok(())
    }

    /// A file's header and length, once all of it was compared with its checksums: what is damaged here must not be
    /// others' trouble.
    fn checked(&self, file: &File) -> Result<(Header, u64), ReadError> {
        let header = Header::read(file, self.key())?;
        self.check(&header)?;
        header.verify_payload(file, || Ok::<(), ReadError>(()))?;
        let bytes = header.payload_start() + header.payload_bytes;
        Ok((header, bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{MemoryStore, Remote};
    use super::*;

    /// A tier whose thread has begun.
    fn tier() -> Tier {
        let remote = Remote {
            store: Arc::new(MemoryStore::default()),
            patience: Duration::from_secs(1),
        };
        let tier = Tier::new(&remote, "made-by".to_owned());
        assert_eq!(tier.uploads_waiting(), 1, "it looks first what there is");
        locked(&tier.uploads).busy = false;
        tier
    }

    fn failed(kind: io::ErrorKind) -> io::Result<()> {
        Err(kind.into())
    }

    #[test]
    fn no_more_names_wait_than_a_terabyte_has() {
        let tier = tier();
        (0..MOST_WAITING).for_each(|number| tier.offer(&number.to_string()));
        assert_eq!((tier.uploads_waiting(), tier.current().given_up), (8192, 0));
        tier.offer("one more");
        assert_eq!((tier.uploads_waiting(), tier.current().given_up), (8192, 1));
        tier.close();
        tier.offer("one more");
        assert_eq!(tier.current().given_up, 1, "it is closed");
        assert_eq!(tier.next_upload(), None);
    }

    #[test]
    fn what_fails_is_tried_eight_times_and_then_the_next_is() {
        let tier = tier();
        for name in ["a", "b"] {
            tier.offer(name);
        }
        for attempt in 1..=MOST_ATTEMPTS {
            assert_eq!(tier.next_upload().as_deref(), Some("a"), "{attempt}");
            assert_eq!(tier.uploads_waiting(), 2, "it is on its way");
            tier.end_upload("a".to_owned(), failed(io::ErrorKind::TimedOut));
            let status = tier.current();
            assert_eq!(status.failed_writes, u64::from(attempt));
            assert_eq!(status.given_up, u64::from(attempt == MOST_ATTEMPTS));
            assert!(status.writing_paused.is_some());
            // As if the pause were over.
            locked(&tier.writing).succeed();
        }
        assert_eq!(tier.next_upload().as_deref(), Some("b"));
        tier.end_upload("b".to_owned(), failed(io::ErrorKind::TimedOut));
        assert_eq!(tier.uploads_waiting(), 1, "it begins anew");
        locked(&tier.writing).succeed();
        assert_eq!(tier.next_upload().as_deref(), Some("b"));
        tier.end_upload("b".to_owned(), Ok(()));
        assert_eq!(tier.uploads_waiting(), 0);
        assert_eq!(locked(&tier.uploads).attempts, 0);
    }

    #[test]
    fn what_does_not_fit_there_is_given_up_at_once_and_others_go_on() {
        let tier = tier();
        for name in ["a", "b"] {
            tier.offer(name);
        }
        let name = tier.next_upload().expect("a");
        tier.end_upload(name, failed(io::ErrorKind::FileTooLarge));
        let status = tier.current();
        assert_eq!((status.given_up, status.failed_writes), (1, 0));
        assert_eq!(status.writing_paused, None);
        // A failure before that one was its own, and not the next one's.
        for name in ["b", "c"] {
            assert_eq!(tier.next_upload().as_deref(), Some("b"), "before {name}");
            tier.end_upload("b".to_owned(), failed(io::ErrorKind::TimedOut));
            locked(&tier.writing).succeed();
        }
        assert_eq!(tier.next_upload().as_deref(), Some("b"));
        tier.end_upload("b".to_owned(), failed(io::ErrorKind::FileTooLarge));
        assert_eq!(locked(&tier.uploads).attempts, 0);
    }

    #[test]
    fn what_is_left_is_waited_for_unless_the_store_fails_or_it_takes_too_long() {
        let tier = tier();
        let soon = || Instant::now() + Duration::from_millis(20);
        assert!(tier.settle(Instant::now()), "nothing is left");
        tier.offer("a");
        assert!(!tier.settle(soon()));
        let name = tier.next_upload().expect("a");
        assert!(!tier.settle(soon()), "it is on its way");
        let minute = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                tier.end_upload(name, Ok(()));
            });
            assert!(tier.settle(minute));
        });
        tier.offer("b");
        locked(&tier.writing).fail(&io::Error::other("no"), Instant::now());
        assert!(
            !tier.settle(minute),
            "it would take as long as the store likes"
        );
        assert!(Instant::now() < minute);
    }
}
