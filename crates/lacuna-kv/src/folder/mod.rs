//! The cache folder: what the prefix cache holds, in files, for the process that comes after this one.
//!
//! Groups and resume points are written by a thread of its own as they are computed, and taken back by others for a
//! prompt that begins the same way: rows as pages of the file itself, which processes share, and what cannot be mapped
//! by copying. Both go through files by a mebibyte: a disk that stalls holds no page of the pool, because those are
//! taken back ([`CacheFolder::give_up_writing`], [`Restoring`]) without waiting for it.
//!
//! A file that is mapped is never written to: segments are made whole and removed, and what is removed stays for as
//! long as it is mapped. One that somebody else cuts is noticed ([`lacuna_pages::Pool::has_lost_files`]).
//!
//! * **F1** A segment is read only under the fingerprint it was computed under, and found by what all of its tokens
//!   and those before them hash to; the tokens are compared before it is used.
//! * **F2** No byte of a file is in a page that anyone sees before its checksum was compared, mapped or copied: by
//!   this process, or since the machine was started, and the file has not been written to (see `verified.rs`).
//! * **F3** A file has its name only when it is whole (see `files.rs`). What says otherwise is damaged: it is set
//!   aside, counted, and computed again.
//! * **F4** Whatever becomes of the folder, only time is lost: an error of it is never one of a request.

mod blocks;
mod chain;
mod cipher;
pub mod faults;
pub(crate) mod files;
mod index;
mod listing;
pub mod remote;
mod restore;
mod segment;
mod sessions;
mod shape;
#[cfg(test)]
mod trial;
mod unnamed;
mod verified;
mod write;

use std::collections::{HashSet, VecDeque};
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use lacuna_pages::device::Aliasing;
use lacuna_pages::{ByteLength, Pool};

use blocks::StoredBlocks;
pub(crate) use chain::Chain;
pub use chain::Fingerprint;
pub use cipher::{CacheKey, KeyError};
use faults::{Call, DiskFaults};
use index::{Index, Named, Segment};
pub use listing::{Found, Listed, clear, list, verify};
use remote::{Remote, RemoteStatus, Tier};
pub use restore::{FolderMiss, Restored, Restoring, Stored};
pub use segment::Kind;
use segment::{Damage, Header, ReadError};
pub use sessions::{
    KeptSession, MOST_SESSIONS, NotASessionName, SessionId, SessionName, remove_session, sessions,
};
use shape::Shape;
use unnamed::UnnamedFiles;
use verified::Verified;
use write::{NewSegment, Source};

use crate::cache::KvCache;
use crate::prefix::{BlockChange, Grain, Namespace, Pins};
use crate::swap::SwapRoom;

/// Where a cache folder is, and how large it may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderConfig {
    /// The folder; made when it is not there, for its owner alone.
    pub path: PathBuf,
    /// Bytes of files that it may hold, of all models.
    pub limit: ByteLength,
    /// A store from which it gets what it lacks, and which gets what is written to it.
    pub remote: Option<Remote>,
    /// What its segments are encrypted with; `None` for not at all. Those of another key are another folder's, and what is
    /// encrypted is copied into pages instead of being mapped.
    pub key: Option<CacheKey>,
}

/// Why a cache folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// The system refuses.
    #[error("the KV cache folder `{}` cannot be used: {source}; name another, or leave it out", path.display())]
    Io {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Pages cannot be kept apart from their sequence.
    #[error("KV memory held as `{policy}` cannot be kept in a folder; use the policy `sparse`")]
    Policy {
        /// How memory is held.
        policy: String,
    },
    /// Rows are in memory of two kinds, of which no file has pages yet.
    #[error(
        "KV rows of the first {host_layers} layers are in the processor's memory and the others in a device's, which \
         cannot be kept in a folder yet; run all layers in one place, or leave the folder out"
    )]
    Split {
        /// Layers of the processor's.
        host_layers: usize,
    },
}

/// A cache folder at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FolderStatus {
    /// Segments that can be read back.
    pub segments: usize,
    /// Bytes of all files in the folder, of other models too, as of the last write.
    pub bytes: ByteLength,
    /// Bytes that they may come to.
    pub limit: ByteLength,
    /// Segments written since the start.
    pub written_segments: u64,
    /// Bytes of them.
    pub written_bytes: u64,
    /// Tokens of prompts whose rows were read back.
    pub restored_tokens: u64,
    /// Bytes of the pages that they took.
    pub restored_bytes: u64,
    /// The part of them that are the files' own pages, mapped and not copied.
    pub mapped_bytes: u64,
    /// The part of these that was not compared with checksums, because it was since the machine was started and its
    /// file has not been written to.
    pub known_bytes: u64,
    /// Segments that were not taken because they are damaged; they are set aside.
    pub damaged: u64,
    /// Segments that were gone when they were wanted.
    pub gone: u64,
    /// Segments that could not be read, or not in time.
    pub unreadable: u64,
    /// Times that memory for what was to be read back was short.
    pub short_of_memory: u64,
    /// Segments that were not written because their memory was needed.
    pub given_up: u64,
    /// Times that writing failed; none is tried for a minute then.
    pub failed_writes: u64,
    /// What the system said to the last of them, while none is tried.
    pub paused: Option<String>,
    /// Segments in the folder that were computed by other settings, and so are never read.
    pub other_segments: usize,
    /// What differs between these settings and the most similar of those.
    pub differing: Vec<String>,
    /// The store behind it, if there is one.
    pub remote: Option<RemoteStatus>,
}

/// A cache folder in use. Dropping it waits for what is being written, for a while.
#[derive(Debug)]
pub struct CacheFolder {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
    /// Where there is a store that can be written to.
    uploader: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    config: FolderConfig,
    /// Of this fingerprint's segments.
    folder: PathBuf,
    fingerprint: Fingerprint,
    shape: Shape,
    pool: Pool,
    index: Mutex<Index>,
    queue: Mutex<Queue>,
    /// The pages of what is being written. Taken after `queue`.
    source: Mutex<Source>,
    changed: Condvar,
    status: Mutex<FolderStatus>,
    tier: Option<Tier>,
    /// The files of segments, where they have no names: those that the process puts aside for itself.
    unnamed: Option<UnnamedFiles>,
    /// Which files need not be compared again.
    verified: Verified,
    /// Pieces written since the start.
    moved: AtomicU64,
    /// Of a disk that is told what to do.
    disk: Option<DiskFaults>,
}

/// What a folder is of.
#[derive(Debug)]
struct Opening {
    config: FolderConfig,
    fingerprint: Fingerprint,
    unnamed: Option<UnnamedFiles>,
    disk: Option<DiskFaults>,
}

/// What is to be written.
#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Whether a job is under way.
    busy: bool,
    closing: bool,
    /// After a failure, when writing is tried again.
    paused_until: Option<Instant>,
}

#[derive(Debug)]
enum Job {
    Write(NewSegment),
    /// What is after these tokens was of use, or is to be kept for a while.
    Touch(Chain, Option<SystemTime>),
    /// What is after so many tokens of a namespace is what a session goes on from.
    Keep(SessionId, Namespace, Chain, usize),
}

impl CacheFolder {
    /// How long a folder that is no longer used is waited for.
    const CLOSING: Duration = Duration::from_secs(5);

    /// Opens the folder for KV of `cache` that is computed under `fingerprint`, and finds what it has: the header of
    /// each segment is read.
    ///
    /// # Errors
    /// [`FolderError`].
    pub fn open(
        config: FolderConfig,
        cache: &KvCache,
        fingerprint: Fingerprint,
    ) -> Result<Self, FolderError> {
        let opening = Opening {
            config,
            fingerprint,
            unnamed: None,
            disk: None,
        };
        Self::of(opening, cache)
    }

    /// The same on a disk that does what it is told, and that is written to again at once when it has failed.
    ///
    /// # Errors
    /// [`FolderError`].
    pub fn open_faulty(
        disk: DiskFaults,
        config: FolderConfig,
        cache: &KvCache,
        fingerprint: Fingerprint,
    ) -> Result<Self, FolderError> {
        let opening = Opening {
            config,
            fingerprint,
            unnamed: None,
            disk: Some(disk),
        };
        Self::of(opening, cache)
    }

    /// Files without names in `folder`, within `room`, for what the prefix cache would evict: they end with the
    /// process. On `disk`, if one is to do what it is told.
    ///
    /// # Errors
    /// [`FolderError`].
    pub fn open_unnamed(
        folder: PathBuf,
        room: Arc<SwapRoom>,
        cache: &KvCache,
        disk: Option<DiskFaults>,
    ) -> Result<Self, FolderError> {
        let opening = Opening {
            config: FolderConfig {
                path: folder,
                limit: ByteLength::new(room.limit()),
                remote: None,
                key: None,
            },
            // Nobody else finds them.
            fingerprint: Fingerprint::new([("process", std::process::id().to_string())]),
            unnamed: Some(UnnamedFiles::new(room)),
            disk,
        };
        Self::of(opening, cache)
    }

    fn of(opening: Opening, cache: &KvCache) -> Result<Self, FolderError> {
        let path = opening.config.path.clone();
        let shared = Arc::new(Shared::open(opening, cache)?);
        let refused = |source| FolderError::Io { path, source };
        let run = |name: &str, run: fn(&Shared)| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn(move || run(&shared))
        };
        let uploads = shared.tier.as_ref().is_some_and(Tier::can_write);
        let writer = run("lacuna-folder", write::run).map_err(refused)?;
        // Without it the folder is as good as ever.
        let uploader = uploads.then(|| run("lacuna-upload", remote::run_uploads));
        Ok(Self {
            writer: Some(writer),
            uploader: uploader.and_then(Result::ok),
            shared,
        })
    }

    /// What it holds, and what became of it.
    #[must_use]
    pub fn status(&self) -> FolderStatus {
        let segments = self.shared.index().len();
        FolderStatus {
            segments,
            remote: self.shared.tier.as_ref().map(Tier::current),
            ..self.shared.status().clone()
        }
    }

    /// Takes note of what becomes of the blocks of `namespace`, of those that are there first of all.
    pub(crate) fn watch(&self, namespace: Namespace, grain: Arc<Grain>) {
        let blocks = StoredBlocks::new(self.root(namespace), grain);
        self.shared.index().watch(blocks);
        // A folder that cannot be listed now is looked at again after the next write.
        self.shared.look().ok();
    }

    /// What became of blocks since the last call, in order; nothing unless they are watched.
    pub(crate) fn take_block_changes(&self) -> Vec<BlockChange> {
        self.shared.index().take_block_changes()
    }

    /// Counts tokens whose rows were read back and taken.
    pub(crate) fn note_restored(&self, tokens: usize) {
        self.shared.status().restored_tokens += tokens as u64;
    }

    /// Before the first token of a namespace.
    pub(crate) fn root(&self, namespace: Namespace) -> Chain {
        Chain::root(&self.shared.fingerprint, namespace)
    }

    /// Groups of a segment, but for the last of a sequence.
    pub(crate) fn segment_groups(&self) -> usize {
        self.shared.shape.segment_groups()
    }

    /// Whether it is in the folder or on its way there.
    pub(crate) fn knows(&self, kind: Kind, chain: Chain) -> bool {
        self.shared.index().knows(kind, chain)
    }

    /// Writes groups, `chains` being what everything up to the end of each hashes to, after `first_group` others.
    pub(crate) fn write_rows(
        &self,
        before: Chain,
        first_group: usize,
        chains: &[Chain],
        tokens: &[u32],
        pins: Vec<Pins>,
    ) {
        self.shared.offer(NewSegment {
            kind: Kind::Rows,
            before,
            first_group,
            tokens: tokens.to_vec(),
            chains: chains.to_vec(),
            pins,
        });
    }

    /// Writes the resume point after `groups` groups.
    pub(crate) fn write_point(&self, chain: Chain, groups: usize, pins: Pins) {
        self.shared.offer(NewSegment {
            kind: Kind::ResumePoint,
            before: chain,
            first_group: groups,
            tokens: Vec::new(),
            chains: vec![chain],
            pins: vec![pins],
        });
    }

    /// Takes note that what is after the tokens of `chain` was of use.
    pub(crate) fn touch(&self, chain: Chain) {
        self.shared.touch_later(chain, None);
    }

    /// Makes what is after the tokens of `chain` the last to leave until `until`.
    pub(crate) fn pin(&self, chain: Chain, until: SystemTime) {
        self.shared.touch_later(chain, Some(until));
    }

    /// Keeps what is after the `tokens` tokens of `namespace` that hash to `chain` for the session `id`, in the place of
    /// what it had, once all that was given before is written.
    pub(crate) fn keep_session(
        &self,
        id: &SessionId,
        namespace: Namespace,
        chain: Chain,
        tokens: usize,
    ) {
        let keep = Job::Keep(id.clone(), namespace, chain, tokens);
        self.shared.note_later(keep);
    }

    /// Whether it is of this process alone, and gets what would be evicted.
    pub(crate) fn is_unnamed(&self) -> bool {
        self.shared.unnamed.is_some()
    }

    /// Whether what is at the end of `chain` is on its way to the folder.
    pub(crate) fn is_pending(&self, chain: Chain) -> bool {
        self.shared.index().is_pending(chain)
    }

    /// While something is on its way to the folder, how many pieces have been written since the start.
    pub(crate) fn progress(&self) -> Option<u64> {
        let pending = self.shared.index().has_pending();
        pending.then(|| self.shared.moved.load(Ordering::Relaxed))
    }

    /// Bytes of the pages of `groups`.
    pub(crate) fn bytes_of(&self, groups: std::ops::Range<usize>) -> u64 {
        self.shared.shape.rows_bytes(&groups)
    }

    /// Bytes of the pages of the resume point after so many groups.
    pub(crate) fn point_bytes(&self, groups: usize) -> u64 {
        self.shared.shape.point_bytes(groups)
    }

    /// Removes files without names that are needed least, until there are `bytes` of room.
    pub(crate) fn give_room(&self, bytes: u64) {
        if let Some(files) = &self.shared.unnamed
            && self.shared.take_unnamed_room(files, bytes)
        {
            files.give_back(bytes);
        }
    }

    /// Lets go of all pages that wait to be written, at once. Returns whether there were any.
    pub fn give_up_writing(&self) -> bool {
        self.shared.give_up_writing()
    }

    /// Waits until nothing is left to be written; `false` when there is after `patience`.
    #[must_use]
    pub fn settle(&self, patience: Duration) -> bool {
        let busy = |queue: &mut Queue| queue.busy || !queue.jobs.is_empty();
        let queue = self.shared.queue();
        let waited = self
            .shared
            .changed
            .wait_timeout_while(queue, patience, busy);
        let (queue, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(queue);
        !timeout.timed_out()
    }
}

impl Drop for CacheFolder {
    fn drop(&mut self) {
        let until = Instant::now() + Self::CLOSING;
        let settled = self.settle(Self::CLOSING);
        self.shared.queue().closing = true;
        self.give_up_writing();
        self.shared.changed.notify_all();
        // A thread that a disk or a store holds ends with the process.
        if let Some(writer) = self.writer.take().filter(|_| settled) {
            writer.join().ok();
        }
        let Some(tier) = &self.shared.tier else {
            return;
        };
        // What is left is put there by the next that opens the folder.
        let settled = tier.settle(until);
        tier.close();
        if let Some(uploader) = self.uploader.take().filter(|_| settled) {
            uploader.join().ok();
        }
    }
}

impl Shared {
    fn open(opening: Opening, cache: &KvCache) -> Result<Self, FolderError> {
        let Opening {
            config,
            fingerprint,
            unnamed,
            disk,
        } = opening;
        let (pool, policy) = (cache.pool().clone(), cache.policy());
        let sparse = matches!(policy, crate::policy::KvPolicy::Sparse(_));
        if !sparse || pool.capabilities().aliasing != Aliasing::Shared {
            let policy = policy.to_string();
            return Err(FolderError::Policy { policy });
        }
        if let host_layers @ 1.. = cache.geometry().host_layers() {
            return Err(FolderError::Split { host_layers });
        }
        let grain = Arc::new(cache.grain());
        let shape = Shape::new(cache.arrangement(), cache.page_bytes(), grain);
        let fingerprint = fingerprint.and([
            ("format", segment::VERSION.to_string()),
            ("KV rows", format!("{:?}", cache.geometry())),
            ("KV layout", policy.to_string()),
            ("page bytes", shape.page_bytes().to_string()),
        ]);
        let fingerprint = match &config.key {
            Some(key) => fingerprint.with_key(key),
            None => fingerprint,
        };
        let remote = config.remote.as_ref();
        let folder = config.path.join(fingerprint.folder_name());
        let verified = match unnamed {
            Some(_) => Verified::nothing(),
            None => Verified::open(&folder),
        };
        let shared = Self {
            tier: remote.map(|remote| Tier::new(remote, fingerprint.folder_name())),
            verified,
            folder,
            config,
            fingerprint,
            shape,
            pool,
            index: Mutex::default(),
            queue: Mutex::default(),
            source: Mutex::default(),
            changed: Condvar::new(),
            status: Mutex::default(),
            unnamed,
            moved: AtomicU64::new(0),
            disk,
        };
        let prepared = shared.prepare();
        prepared.map_err(|source| FolderError::Io {
            path: shared.config.path.clone(),
            source,
        })?;
        Ok(shared)
    }

    /// Makes the folders and finds what they have.
    fn prepare(&self) -> io::Result<()> {
        let root = &self.config.path;
        self.status().limit = self.config.limit;
        if self.unnamed.is_some() {
            return tempfile::tempfile_in(root).map(drop);
        }
        files::create_private_folder(&self.folder)?;
        let settings = self.folder.join(files::SETTINGS);
        if !settings.exists() {
            let _lock = files::lock(root)?;
            let part = files::part_of(&settings);
            let mut file = files::create_private(&part)?;
            io::Write::write_all(&mut file, self.fingerprint.to_text().as_bytes())?;
            files::commit(&file, &part, &settings)?;
        }
        self.look()?;
        let held = files::all_stored(root)?.iter().map(|file| file.bytes).sum();
        let (other_segments, differing) = self.others()?;
        let mut status = self.status();
        status.bytes = ByteLength::new(held);
        (status.other_segments, status.differing) = (other_segments, differing);
        Ok(())
    }

    /// Brings the index to what the folder has: another process may write to it, or remove something.
    fn look(&self) -> io::Result<()> {
        if self.unnamed.is_some() {
            return Ok(());
        }
        let stored = files::stored(&self.folder)?.into_iter();
        let segments = stored.filter(|file| matches!(file.named, Named::Segment(_)));
        let name = |file: files::Stored| {
            let name = file.path.file_name()?.to_str()?;
            Some(name.to_owned())
        };
        let names: HashSet<String> = segments.filter_map(name).collect();
        let new: Vec<&String> = {
            let mut index = self.index();
            index.keep_only(&names);
            names.iter().filter(|name| !index.contains(name)).collect()
        };
        for name in new {
            self.take_up(name);
        }
        Ok(())
    }

    /// Takes up a segment that the folder was found to have.
    fn take_up(&self, name: &str) {
        match self.header_of(name) {
            Ok(header) => {
                let segment = Segment::of(&header);
                match segment.name == *name {
                    true => self.index().insert(segment, &header.tokens),
                    false => self.drop_damaged(name),
                }
            }
            Err(ReadError::Damaged(Damage::Version(_) | Damage::Locked)) => {}
            Err(ReadError::Damaged(_)) => self.drop_damaged(name),
            // Another process has removed it meanwhile.
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Err(ReadError::Io(_)) => self.status().unreadable += 1,
        }
    }

    /// The header of a segment of this fingerprint (F1).
    fn header_of(&self, name: &str) -> Result<Header, ReadError> {
        self.ask(Call::Read)?;
        let header = Header::read(&self.open_file(name)?, self.key())?;
        self.check(&header)?;
        Ok(header)
    }

    /// What segments are encrypted with.
    fn key(&self) -> Option<&CacheKey> {
        self.config.key.as_ref()
    }

    /// The file of a segment.
    fn open_file(&self, name: &str) -> io::Result<File> {
        match &self.unnamed {
            Some(files) => files.open(name),
            None => File::open(self.folder.join(name)),
        }
    }

    /// Whether a header is one that this process would write (F1).
    fn check(&self, header: &Header) -> Result<(), Damage> {
        let first = header.first_group as usize;
        // Positions have 32 bits at most; no page is counted beyond them.
        let positions = (first + header.groups()).checked_mul(self.shape.group_tokens());
        let possible = positions.is_some_and(|positions| positions < 1 << 32);
        let expected = || match header.kind {
            Kind::Rows => self.shape.rows_bytes(&(first..first + header.groups())),
            Kind::ResumePoint => self.shape.point_bytes(first),
        };
        let groups = match header.kind {
            Kind::Rows => header.groups() > 0,
            Kind::ResumePoint => header.groups() == 0 && first > 0,
        };
        let same = header.fingerprint == self.fingerprint.digest()
            && header.group_tokens as usize == self.shape.group_tokens()
            && possible
            && groups
            && header.payload_bytes == expected();
        match same {
            true => Ok(()),
            false => Err(Damage::Header),
        }
    }

    /// Segments of other fingerprints, and what differs of the most similar.
    fn others(&self) -> io::Result<(usize, Vec<String>)> {
        let mut segments = 0;
        let mut all_differing = Vec::new();
        for folder in files::subfolders(&self.config.path)? {
            if folder == self.folder {
                continue;
            }
            let there = files::stored(&folder)?.into_iter();
            let count = there.filter(|file| matches!(file.named, Named::Segment(_)));
            let count = count.count();
            segments += count;
            let settings = fs::read_to_string(folder.join(files::SETTINGS));
            if let (Ok(settings), true) = (settings, count > 0) {
                all_differing.push(self.fingerprint.differing(&settings));
            }
        }
        let least = all_differing.into_iter().min_by_key(Vec::len);
        Ok((segments, least.unwrap_or_default()))
    }

    /// Has the writing thread take note that what is after the tokens of `chain` was of use, or is to be kept.
    fn touch_later(&self, chain: Chain, until: Option<SystemTime>) {
        self.note_later(Job::Touch(chain, until));
    }

    fn note_later(&self, job: Job) {
        let mut queue = self.queue();
        let now = Instant::now();
        let is_paused = queue.paused_until.is_some_and(|until| now < until);
        if !is_paused && !queue.closing {
            queue.jobs.push_back(job);
            self.changed.notify_all();
        }
    }

    /// Takes a damaged segment out (F3).
    fn drop_damaged(&self, name: &str) {
        self.index().remove(name);
        match &self.unnamed {
            Some(files) => files.remove(name),
            None => files::set_aside(&self.folder.join(name)),
        }
        self.status().damaged += 1;
    }

    /// Asks a disk that is told what to do, if it is one.
    fn ask(&self, call: Call) -> io::Result<()> {
        self.disk.as_ref().map_or(Ok(()), |disk| disk.check(call))
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        locked(&self.index)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        locked(&self.queue)
    }

    fn status(&self) -> MutexGuard<'_, FolderStatus> {
        locked(&self.status)
    }
}

/// What a mutex guards here is changed in steps that do not panic.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use lacuna_pages::{DenseDevice, HostDevice, SplitDevice};

    use super::faults::Trouble;
    use super::*;
    use crate::geometry::Geometry;
    use crate::{KvCache, KvElements};

    const MINUTE: Duration = Duration::from_secs(60);

    /// Rows of 128 bytes, of K and of V in two layers, and a state in one of them.
    fn cache() -> KvCache {
        let elements = KvElements::both(lacuna_kernels::ElementType::F32);
        let geometry = Geometry::uniform(2, 2, 16, elements).with_states(vec![3000, 0]);
        let policy = "sparse".parse().expect("a policy");
        KvCache::new(geometry.expect("states"), policy).expect("the system has pages")
    }

    /// A folder on a disk that is told what to do, and whose files have names.
    fn named(cache: &KvCache, disk: &DiskFaults, path: &std::path::Path) -> CacheFolder {
        let config = trial::config(path, 64 << 20);
        let told = disk.clone();
        let folder = CacheFolder::open_faulty(told, config, cache, trial::fingerprint());
        folder.expect("a folder")
    }

    /// Writes a segment of two groups, all of whose tokens are `token`. Returns what they hash to.
    fn write(folder: &CacheFolder, cache: &KvCache, token: u32) -> Vec<Chain> {
        let group = folder.shared.shape.group_tokens();
        let mut sequence = cache.sequence(2 * group).expect("address space");
        sequence.prepare(2 * group).expect("memory");
        sequence.accept(2 * group);
        let pins = [0, 1].map(|at| {
            let pinned = sequence.pin_group(at * group..(at + 1) * group);
            pinned.expect("memory").expect("the policy can")
        });
        let root = folder.root(Namespace::COMMON);
        let tokens = vec![token; 2 * group];
        let first = root.after(&tokens[group..]);
        let chains = vec![first, first.after(&tokens[group..])];
        folder.write_rows(root, 0, &chains, &tokens, pins.into());
        chains
    }

    #[test]
    fn what_is_put_aside_is_on_its_way_until_it_is_written_and_makes_room_for_others() {
        let (cache, disk) = (cache(), DiskFaults::default());
        let root = tempfile::tempdir().expect("a folder");
        let room = Arc::new(SwapRoom::new(1 << 20));
        let (path, told) = (root.path().to_owned(), Some(disk.clone()));
        let folder = CacheFolder::open_unnamed(path, Arc::clone(&room), &cache, told);
        let folder = folder.expect("files");
        assert!(folder.is_unnamed());
        assert_eq!(folder.progress(), None, "nothing is on its way");
        disk.set(Trouble::Stalls);
        let chains = write(&folder, &cache, 1);
        assert!(folder.is_pending(chains[0]) && folder.is_pending(chains[1]));
        assert!(!folder.is_pending(folder.root(Namespace::COMMON)));
        assert_eq!(folder.progress(), Some(0));
        disk.set(Trouble::Nothing);
        assert!(folder.settle(MINUTE));
        assert!(!folder.is_pending(chains[1]) && folder.progress().is_none());
        let one = folder.status().bytes.get();
        write(&folder, &cache, 2);
        assert!(folder.settle(MINUTE));
        disk.set(Trouble::Stalls);
        write(&folder, &cache, 3);
        assert_eq!(folder.progress(), Some(2), "a piece of each of two");
        disk.set(Trouble::Nothing);
        assert!(folder.settle(MINUTE));
        let status = folder.status();
        assert_eq!((status.segments, status.bytes.get()), (3, 3 * one));
        assert_eq!(status.failed_writes + status.given_up, 0);
        // Whoever else takes of the room finds it once what was put aside first has gone.
        assert!(!room.try_take((1 << 20) - 2 * one));
        folder.give_room((1 << 20) - 2 * one);
        assert!(room.try_take((1 << 20) - 2 * one));
        let status = folder.status();
        assert_eq!((status.segments, status.bytes.get()), (2, 2 * one));
        assert!(!folder.knows(Kind::Rows, chains[1]));
        assert_eq!(root.path().read_dir().expect("a folder").count(), 0);
    }

    #[test]
    fn what_putting_aside_takes_is_told_before() {
        let (cache, disk) = (cache(), DiskFaults::default());
        let root = tempfile::tempdir().expect("a folder");
        let folder = named(&cache, &disk, root.path());
        assert!(!folder.is_unnamed());
        let grain = cache.grain();
        let group = grain.group_tokens().get() as u64;
        assert_eq!(folder.bytes_of(3..5), 2 * group * 4 * 128);
        assert_eq!(folder.bytes_of(3..3), 0);
        // Of nothing but the state, wherever that is.
        assert!(grain.state_bytes() >= 3000 * 4);
        for groups in [1, 7] {
            assert_eq!(folder.point_bytes(groups), grain.state_bytes());
        }
    }

    #[test]
    fn what_is_of_use_has_the_time_of_that_unless_nothing_may_be_written() {
        let (cache, disk) = (cache(), DiskFaults::default());
        let root = tempfile::tempdir().expect("a folder");
        let folder = named(&cache, &disk, root.path());
        let chains = write(&folder, &cache, 1);
        assert!(folder.settle(MINUTE));
        let segment = folder.shared.index().find(Kind::Rows, chains[1]).cloned();
        let path = folder.shared.folder.join(&segment.expect("there").name);
        let long_ago = SystemTime::UNIX_EPOCH + MINUTE;
        let file = fs::OpenOptions::new().write(true).open(&path);
        let set = file.and_then(|file| file.set_modified(long_ago));
        set.expect("a time");
        let used = || {
            assert!(folder.settle(MINUTE));
            let file = fs::metadata(&path).and_then(|file| file.modified());
            file.expect("a time")
        };
        folder.shared.queue().paused_until = Some(Instant::now() + MINUTE);
        folder.touch(chains[1]);
        assert_eq!(used(), long_ago, "a disk that failed is left alone");
        // A pause that is over is none, though only the next segment takes it away.
        folder.shared.queue().paused_until = Some(Instant::now());
        folder.touch(chains[1]);
        assert!(used() > long_ago);
        // Nobody is left to do it.
        disk.set(Trouble::Stalls);
        folder.shared.queue().closing = true;
        folder.touch(chains[1]);
        let queue = folder.shared.queue();
        assert!(queue.jobs.is_empty() && !queue.busy);
        drop(queue);
        disk.set(Trouble::Nothing);
    }

    #[test]
    fn a_segment_that_is_listed_and_gone_is_nobodys_trouble() {
        let (cache, disk) = (cache(), DiskFaults::default());
        let root = tempfile::tempdir().expect("a folder");
        let folder = named(&cache, &disk, root.path());
        folder.shared.take_up("gone");
        let status = folder.status();
        assert_eq!((status.unreadable, status.damaged), (0, 0));
        disk.set(Trouble::Refuses);
        folder.shared.take_up("gone");
        let status = folder.status();
        assert_eq!((status.unreadable, status.damaged), (1, 0));
    }

    /// A header that says of itself what no header of this process would, under a checksum that is right.
    #[test]
    fn headers_are_those_that_this_process_would_write() {
        let cache = cache();
        let root = tempfile::tempdir().expect("a folder");
        let folder = named(&cache, &DiskFaults::default(), root.path());
        let (shared, shape) = (&folder.shared, &folder.shared.shape);
        let group = shape.group_tokens();
        let header = |kind, first: usize, groups: usize| Header {
            fingerprint: shared.fingerprint.digest(),
            kind,
            before: folder.root(Namespace::COMMON),
            first_group: first as u32,
            group_tokens: group as u32,
            tokens: vec![0; groups * group],
            payload_bytes: match kind {
                Kind::Rows => shape.rows_bytes(&(first..first + groups)),
                Kind::ResumePoint => shape.point_bytes(first),
            },
            checksums: Vec::new(),
            cipher: None,
        };
        let rows = header(Kind::Rows, 3, 2);
        let point = header(Kind::ResumePoint, 3, 0);
        // No position has more than 32 bits.
        let end = (1 << 32) / group;
        for good in [&rows, &point, &header(Kind::Rows, end - 3, 2)] {
            assert_eq!(shared.check(good), Ok(()), "{good:?}");
        }
        for bad in [
            header(Kind::Rows, 3, 0),
            header(Kind::ResumePoint, 0, 0),
            header(Kind::ResumePoint, 3, 1),
            header(Kind::Rows, end - 2, 2),
            Header {
                fingerprint: [7; 32],
                ..rows.clone()
            },
            Header {
                group_tokens: group as u32 + 1,
                ..point.clone()
            },
            Header {
                payload_bytes: rows.payload_bytes + 1,
                ..rows.clone()
            },
            Header {
                payload_bytes: point.payload_bytes + 1,
                ..point.clone()
            },
        ] {
            assert_eq!(shared.check(&bad), Err(Damage::Header), "{bad:?}");
        }
    }

    #[test]
    fn a_folder_takes_pages_that_can_be_shared_and_a_policy_that_seals_them() {
        let root = tempfile::tempdir().expect("a folder");
        let geometry = trial::cache().geometry().clone();
        let opens = |cache: Result<KvCache, crate::KvError>| {
            let config = trial::config(root.path(), 1 << 20);
            let cache = cache.expect("the system has pages");
            match CacheFolder::open(config, &cache, trial::fingerprint()) {
                Ok(_) => true,
                Err(FolderError::Policy { .. }) => false,
                Err(error) => panic!("{error}"),
            }
        };
        let host = || HostDevice::new().expect("the system has pages");
        let policy = |name: &str| name.parse().expect("a policy");
        let (sparse, dense) = (policy("sparse"), policy("dense"));
        assert!(opens(KvCache::on_device(host(), geometry.clone(), sparse)));
        assert!(!opens(KvCache::on_device(host(), geometry.clone(), dense)));
        let alone = DenseDevice::new();
        assert!(!opens(KvCache::on_device(alone, geometry.clone(), sparse)));
        let geometry = geometry.with_host_layers(1).expect("rows of its own");
        let split = SplitDevice::new(host()).expect("pages of one size");
        let split = KvCache::on_device(split, geometry, sparse).expect("two kinds of memory");
        let refused = CacheFolder::open(
            trial::config(root.path(), 1 << 20),
            &split,
            trial::fingerprint(),
        );
        assert!(matches!(
            refused,
            Err(FolderError::Split { host_layers: 1 })
        ));
    }
}
