//! The remote tier: whole segments in an object store, for machines that have not computed them.
//!
//! It is behind the folder and not beside it. What comes from it becomes a file of the folder first, and pages are made
//! of that; what goes to it is a file of the folder. Objects are named as files are:
//!
//! ```text
//! <fingerprint>/<segment>                         the file, byte by byte
//! <fingerprint>/<groups before>-<chain>.link      which segment begins there, and with which groups (see [`link`])
//! ```
//!
//! * **N1** Nothing of a store is in the folder before its length, name, tokens and checksums were compared.
//! * **N2** Whatever becomes of a store, only time is lost: of a prompt no more than the patience it is given, and
//!   after a failure nothing is asked for a while, which doubles.
//! * **N3** No step waits for a store, nor does what is written to the folder.

mod fetch;
mod find;
mod link;
mod memory;
mod upload;

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub use fetch::Fetching;
pub use memory::{MemoryStore, StoreTrouble};
use upload::Uploads;
pub(super) use upload::run as run_uploads;

use super::locked;

/// Objects by name, on another machine. Several threads use it at once.
///
/// A call may take as long as bytes move, and fails when none have for some seconds.
pub trait RemoteStore: fmt::Debug + Send + Sync {
    /// Where it is, for people. Without secrets.
    fn place(&self) -> String;

    /// Whether objects can be put there.
    fn can_write(&self) -> bool;

    /// The length in bytes of each object; `None` of those that are not there.
    ///
    /// # Errors
    /// When that cannot be found out for all of them.
    fn lengths(&self, names: &[String]) -> io::Result<Vec<Option<u64>>>;

    /// Hands the bytes of an object to `sink`, in order.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when it is not there; whatever `sink` says, at once; or what the store says.
    fn get(&self, name: &str, sink: &mut dyn Write) -> io::Result<()>;

    /// Makes an object of the `length` bytes of `source`, in place of what has the name. Nobody finds a part of it,
    /// where the store can do that.
    ///
    /// # Errors
    /// Whatever `source` says, [`io::ErrorKind::UnexpectedEof`] when it ends early, [`io::ErrorKind::FileTooLarge`]
    /// when the store cannot take as much, or what the store says. No object is made then.
    fn put(&self, name: &str, length: u64, source: &mut dyn Read) -> io::Result<()>;
}

/// A store behind a cache folder.
#[derive(Debug, Clone)]
pub struct Remote {
    /// The store.
    pub store: Arc<dyn RemoteStore>,
    /// How long a prompt waits for what the store has of it; what has come by then is used.
    pub patience: Duration,
}

impl PartialEq for Remote {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.store, &other.store) && self.patience == other.patience
    }
}

impl Eq for Remote {}

/// A remote tier at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemoteStatus {
    /// Where it is.
    pub place: String,
    /// Whether segments are put there.
    pub can_write: bool,
    /// Prompts that it was asked for.
    pub lookups: u64,
    /// Prompts of which it had something.
    pub hits: u64,
    /// Segments that came and are in the folder.
    pub fetched_segments: u64,
    /// Bytes that came, of no use or not.
    pub fetched_bytes: u64,
    /// Objects that were not what their names say. They are replaced when they are computed again.
    pub damaged: u64,
    /// Times that reading failed.
    pub failed_reads: u64,
    /// Prompts that were not waited for any longer.
    pub late: u64,
    /// What the store said to the last read, while none is tried.
    pub reading_paused: Option<String>,
    /// Segments that were put there.
    pub uploaded_segments: u64,
    /// Bytes of them.
    pub uploaded_bytes: u64,
    /// Segments that are still to be put there, or found there.
    pub uploads_waiting: usize,
    /// Segments that were not put there: too many waited, or they failed too often.
    pub given_up: u64,
    /// Times that writing failed.
    pub failed_writes: u64,
    /// What the store said to the last write, while none is tried.
    pub writing_paused: Option<String>,
}

/// A store as a folder uses it.
#[derive(Debug)]
pub(super) struct Tier {
    store: Arc<dyn RemoteStore>,
    patience: Duration,
    /// Of this fingerprint's objects.
    prefix: String,
    status: Mutex<RemoteStatus>,
    reading: Mutex<Health>,
    writing: Mutex<Health>,
    /// Prompts that are being looked for.
    fetching: AtomicUsize,
    uploads: Mutex<Uploads>,
    changed: Condvar,
    /// Objects that are there and of no use.
    damaged: Mutex<HashSet<String>>,
}

impl Tier {
    /// Damaged objects that are remembered: a store that lies about everything must not fill memory.
    const MOST_DAMAGED: usize = 4096;

    pub(super) fn new(remote: &Remote, prefix: String) -> Self {
        Self {
            store: Arc::clone(&remote.store),
            patience: remote.patience,
            prefix,
            status: Mutex::new(RemoteStatus {
                place: remote.store.place(),
                can_write: remote.store.can_write(),
                ..RemoteStatus::default()
            }),
            reading: Mutex::default(),
            writing: Mutex::default(),
            fetching: AtomicUsize::new(0),
            uploads: Mutex::new(Uploads::new(remote.store.can_write())),
            changed: Condvar::new(),
            damaged: Mutex::default(),
        }
    }

    pub(super) fn can_write(&self) -> bool {
        self.store.can_write()
    }

    pub(super) fn current(&self) -> RemoteStatus {
        let said = |health: &Mutex<Health>| locked(health).said();
        RemoteStatus {
            reading_paused: said(&self.reading),
            writing_paused: said(&self.writing),
            uploads_waiting: self.uploads_waiting(),
            ..self.status().clone()
        }
    }

    fn status(&self) -> MutexGuard<'_, RemoteStatus> {
        locked(&self.status)
    }

    /// What the object of a file is called.
    fn object(&self, file: &str) -> String {
        format!("{}/{file}", self.prefix)
    }

    /// Lengths of objects by the names of their files.
    fn lengths(&self, files: &[String]) -> io::Result<Vec<Option<u64>>> {
        if files.is_empty() {
            return Ok(Vec::new());
        }
        let objects: Vec<String> = files.iter().map(|file| self.object(file)).collect();
        let lengths = self.store.lengths(&objects)?;
        match lengths.len() == files.len() {
            true => Ok(lengths),
            false => Err(io::Error::other(
                "the store did not answer for every object",
            )),
        }
    }

    /// Takes note that the object of `file` is of no use.
    fn note_damaged(&self, file: &str) {
        self.status().damaged += 1;
        let mut damaged = locked(&self.damaged);
        if damaged.len() < Self::MOST_DAMAGED {
            damaged.insert(file.to_owned());
        }
    }

    fn note_failed_read(&self, error: &io::Error) {
        self.status().failed_reads += 1;
        locked(&self.reading).fail(error, Instant::now());
    }
}

/// Whether a store may be asked: after a failure not for a while, which doubles with each further one.
#[derive(Debug, Default)]
struct Health {
    failures: u32,
    paused: Option<(Instant, String)>,
}

impl Health {
    /// The first pause. A store that was restarted is back in seconds.
    const FIRST: Duration = Duration::from_secs(1);
    /// No pause is longer, so that one that is back after an hour is noticed.
    const LONGEST: Duration = Duration::from_secs(60);

    fn fail(&mut self, error: &io::Error, now: Instant) {
        let pause = Self::FIRST.saturating_mul(1 << self.failures.min(16));
        self.failures += 1;
        self.paused = Some((now + pause.min(Self::LONGEST), error.to_string()));
    }

    fn succeed(&mut self) {
        *self = Self::default();
    }

    /// How long nothing is to be asked.
    fn left(&self, now: Instant) -> Option<Duration> {
        let (until, _) = self.paused.as_ref()?;
        let left = until.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// What the store said, until it has answered again.
    fn said(&self) -> Option<String> {
        self.paused.as_ref().map(|(_, said)| said.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_minute_and_end_with_an_answer() {
        let (mut health, now) = (Health::default(), Instant::now());
        let error = io::Error::other("no");
        let mut pauses = Vec::new();
        for _ in 0..8 {
            health.fail(&error, now);
            pauses.push(health.left(now).map_or(0, |left| left.as_secs()));
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(health.said().as_deref(), Some("no"));
        assert_eq!(health.left(now + Duration::from_secs(60)), None);
        assert!(health.said().is_some(), "it has not answered");
        health.succeed();
        assert_eq!((health.left(now), health.said()), (None, None));
        health.fail(&error, now);
        assert_eq!(health.left(now), Some(Health::FIRST));
    }

    fn tier(store: impl RemoteStore + 'static) -> Tier {
        let remote = Remote {
            store: Arc::new(store),
            patience: Duration::from_secs(1),
        };
        Tier::new(&remote, "made-by".to_owned())
    }

    #[test]
    fn a_store_that_lies_about_everything_does_not_fill_memory() {
        let tier = tier(MemoryStore::default());
        let more = Tier::MOST_DAMAGED + 2;
        (0..more).for_each(|number| tier.note_damaged(&number.to_string()));
        assert_eq!(tier.current().damaged, more as u64);
        assert_eq!(locked(&tier.damaged).len(), Tier::MOST_DAMAGED);
    }

    /// A store that answers for one object, whatever it was asked.
    #[derive(Debug)]
    struct Short;

    impl RemoteStore for Short {
        fn place(&self) -> String {
            "short".to_owned()
        }

        fn can_write(&self) -> bool {
            false
        }

        fn lengths(&self, _: &[String]) -> io::Result<Vec<Option<u64>>> {
            Ok(vec![Some(5)])
        }

        fn get(&self, _: &str, _: &mut dyn Write) -> io::Result<()> {
            Ok(())
        }

        fn put(&self, _: &str, _: u64, _: &mut dyn Read) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lengths_are_those_of_the_objects_that_were_asked_for() {
        let tier = tier(Short);
        let names = ["a".to_owned(), "b".to_owned()];
        assert_eq!(tier.lengths(&[]).expect("nothing was asked"), []);
        assert_eq!(tier.lengths(&names[..1]).expect("one"), [Some(5)]);
        assert!(tier.lengths(&names).is_err(), "one answer to two questions");
        assert_eq!(tier.object("a"), "made-by/a");
        assert!(!tier.can_write() && tier.current().uploads_waiting == 0);
    }
}
