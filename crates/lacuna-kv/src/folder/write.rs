//! Writing segments, off the step: a thread that takes one after the other.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use lacuna_pages::{Buffer, ByteLength, PagePin, Share, VirtualPage};

use super::chain::Chain;
use super::cipher::{CacheKey, FileCipher};
use super::faults::Call;
use super::index::Segment;
use super::segment::{Header, Kind, PIECE};
use super::unnamed::UnnamedFiles;
use super::verified::State;
use super::{Job, SessionId, Shared, files, locked, sessions};
use crate::cache::to_usize;
use crate::prefix::Pins;

/// What is to become a segment.
#[derive(Debug)]
pub(crate) struct NewSegment {
    pub(crate) kind: Kind,
    pub(crate) before: Chain,
    pub(crate) first_group: usize,
    pub(crate) tokens: Vec<u32>,
    /// Under which it will be found.
    pub(crate) chains: Vec<Chain>,
    pub(crate) pins: Vec<Pins>,
}

/// The pages of what is being written.
#[derive(Debug, Default)]
pub(crate) enum Source {
    /// There is nothing, or it was taken back.
    #[default]
    Nothing,
    /// Kept until they are mapped, in the order of the segment.
    Pins(Vec<PagePin>),
    /// Mapped one after the other.
    Mapped(Buffer),
}

/// Why a segment was not written.
#[derive(Debug)]
enum WriteError {
    /// Its memory was needed.
    GivenUp,
    /// It is larger than the folder may be.
    TooLarge,
    Io(io::Error),
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// How long nothing is written after a failure: a full disk does not get room sooner, and each try costs the disk.
const PAUSE: Duration = Duration::from_secs(60);

/// The writing thread.
pub(super) fn run(shared: &Shared) {
    // Whatever computes goes first; where that cannot be said, it does not. Files without names are waited for.
    #[cfg(target_os = "linux")]
    if shared.unnamed.is_none() {
        rustix::process::nice(10).ok();
    }
    while let Some(job) = shared.next_job() {
        match job {
            Job::Touch(chain, until) => shared.touch_lineage(chain, until),
            Job::Write(segment) => shared.write(&segment),
            Job::Keep(id, namespace, chain, tokens) => {
                let root = Chain::root(&shared.fingerprint, namespace);
                if let Err(error) = shared.keep_session(&id, root, chain, tokens) {
                    shared.note_failed_write(&error);
                }
            }
        }
        // What is not noted is compared again.
        shared.verified.save().ok();
        shared.end_job();
    }
}

impl Shared {
    /// Whether nothing is written because writing has failed of late.
    pub(super) fn is_paused(&self, now: Instant) -> bool {
        let until = self.queue().paused_until;
        until.is_some_and(|until| now < until)
    }

    /// Puts a segment into the queue, unless writing has failed of late.
    pub(super) fn offer(&self, segment: NewSegment) {
        let mut queue = self.queue();
        match queue.paused_until {
            Some(until) if Instant::now() < until => return,
            Some(_) => {
                queue.paused_until = None;
                self.status().paused = None;
            }
            None => {}
        }
        if queue.closing {
            return;
        }
        self.index().expect(segment.kind, &segment.chains);
        queue.jobs.push_back(Job::Write(segment));
        self.changed.notify_all();
    }

    /// The next job, whose pages are in `source` then; `None` when the folder is closed.
    fn next_job(&self) -> Option<Job> {
        let mut queue = self.queue();
        loop {
            if let Some(mut job) = queue.jobs.pop_front() {
                if let Job::Write(segment) = &mut job {
                    let pins = std::mem::take(&mut segment.pins);
                    *locked(&self.source) = Source::Pins(self.shape.flatten(&pins));
                }
                queue.busy = true;
                return Some(job);
            }
            if queue.closing {
                return None;
            }
            let waited = self.changed.wait(queue);
            queue = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    fn end_job(&self) {
        let mut queue = self.queue();
        *locked(&self.source) = Source::Nothing;
        queue.busy = false;
        self.changed.notify_all();
    }

    pub(super) fn give_up_writing(&self) -> bool {
        let mut queue = self.queue();
        let mut given_up = 0;
        for job in std::mem::take(&mut queue.jobs) {
            match job {
                Job::Write(segment) => {
                    self.index().expect_no_more(segment.kind, &segment.chains);
                    given_up += 1;
                }
                // It takes no page, and has what was written before.
                Job::Keep(..) => queue.jobs.push_back(job),
                Job::Touch(..) => {}
            }
        }
        let source = std::mem::take(&mut *locked(&self.source));
        let held = !matches!(source, Source::Nothing);
        // What is being written counts itself when it finds its pages gone.
        self.status().given_up += given_up;
        held || given_up > 0
    }

    fn write(&self, segment: &NewSegment) {
        let written = self.try_write(segment);
        // Whoever waits for it finds its pages free, written or not.
        *locked(&self.source) = Source::Nothing;
        self.index().expect_no_more(segment.kind, &segment.chains);
        let mut status = self.status();
        match written {
            Ok(()) => {}
            Err(WriteError::GivenUp | WriteError::TooLarge) => status.given_up += 1,
            Err(WriteError::Io(error)) => {
                drop(status);
                self.note_failed_write(&error);
            }
        }
    }

    /// Takes note that the folder cannot be written to: nothing is for a while, and what waits is let go of.
    pub(super) fn note_failed_write(&self, error: &io::Error) {
        let mut status = self.status();
        status.failed_writes += 1;
        status.paused = Some(error.to_string());
        drop(status);
        if self.disk.is_none() {
            self.queue().paused_until = Some(Instant::now() + PAUSE);
        }
        self.give_up_writing();
    }

    fn try_write(&self, new: &NewSegment) -> Result<(), WriteError> {
        let payload_bytes = match new.kind {
            Kind::Rows => {
                let end = new.first_group + new.chains.len();
                self.shape.rows_bytes(&(new.first_group..end))
            }
            Kind::ResumePoint => self.shape.point_bytes(new.first_group),
        };
        let mut header = Header {
            fingerprint: self.fingerprint.digest(),
            kind: new.kind,
            before: new.before,
            first_group: u32::try_from(new.first_group).map_err(|_| WriteError::TooLarge)?,
            group_tokens: self.shape.group_tokens() as u32,
            tokens: new.tokens.clone(),
            payload_bytes,
            checksums: Vec::new(),
            cipher: self.cipher()?,
        };
        let segment = Segment::of(&header);
        let bytes = files::room(header.payload_start() + payload_bytes);
        if bytes > self.config.limit.get() {
            return Err(WriteError::TooLarge);
        }
        self.ask(Call::Write)?;
        let written = match &self.unnamed {
            Some(files) => self.write_unnamed(files, &mut header, &segment, bytes),
            None => self.write_named(&mut header, &segment, bytes),
        };
        if let Some(held) = written? {
            let mut status = self.status();
            status.bytes = ByteLength::new(held);
            status.written_segments += 1;
            status.written_bytes += bytes;
        }
        if let Some(tier) = &self.tier {
            tier.offer(&segment.name);
        }
        self.index().insert(segment, &header.tokens);
        // Those that lead to it are of use for as long as it is.
        self.touch_lineage(new.before, None);
        // What made room for it is gone, and others may have written.
        Ok(self.look()?)
    }

    /// What the next file is encrypted with.
    fn cipher(&self) -> io::Result<Option<Arc<FileCipher>>> {
        let key = self.key().map(CacheKey::of_new_file);
        Ok(key.transpose()?.map(Arc::new))
    }

    /// Makes a file of `bytes` with a name. Returns what all have then, unless it was there.
    fn write_named(
        &self,
        header: &mut Header,
        segment: &Segment,
        bytes: u64,
    ) -> Result<Option<u64>, WriteError> {
        let root = &self.config.path;
        let _lock = files::lock(root)?;
        let path = self.folder.join(&segment.name);
        if path.exists() {
            return Ok(None);
        }
        let held = files::make_room(root, bytes, self.config.limit.get())?;
        let file = self.write_file(header, &path)?;
        if let Ok(state) = State::of(&file) {
            // Its checksums were made of what was written.
            self.verified.note(&segment.name, state);
        }
        Ok(Some(held + bytes))
    }

    /// The same without one. It needs not be on the disk: it ends with the process.
    fn write_unnamed(
        &self,
        files: &UnnamedFiles,
        header: &mut Header,
        segment: &Segment,
        bytes: u64,
    ) -> Result<Option<u64>, WriteError> {
        if files.has(&segment.name) {
            return Ok(None);
        }
        if !self.take_unnamed_room(files, bytes) {
            return Err(WriteError::TooLarge);
        }
        let written = tempfile::tempfile_in(&self.config.path).map_err(WriteError::Io);
        let written = written.and_then(|file| self.write_bytes(header, &file).map(|()| file));
        let file = written.inspect_err(|_| files.give_back(bytes))?;
        files.put(&segment.name, file, bytes, segment.first_group);
        Ok(Some(files.bytes()))
    }

    /// Takes room for a file without a name, whatever makes room for it. Returns whether there is as much.
    pub(super) fn take_unnamed_room(&self, files: &UnnamedFiles, bytes: u64) -> bool {
        let (taken, gone) = files.take_room(bytes);
        let mut index = self.index();
        gone.iter().for_each(|name| index.remove(name));
        drop(index);
        self.status().bytes = ByteLength::new(files.bytes());
        taken
    }

    /// Makes a segment of the folder of a file that has all of it, and was verified. Returns whether the folder has
    /// it then: not what is larger than the folder may be.
    pub(super) fn adopt(&self, header: &Header, mut whole: &File) -> io::Result<bool> {
        let segment = Segment::of(header);
        let bytes = files::room(header.payload_start() + header.payload_bytes);
        let (root, limit) = (&self.config.path, self.config.limit.get());
        if bytes > limit {
            return Ok(false);
        }
        self.ask(Call::Write)?;
        let _lock = files::lock(root)?;
        let path = self.folder.join(&segment.name);
        if !path.exists() {
            // What leads to it must not be what makes room for it.
            self.touch_lineage(header.before, None);
            let held = files::make_room(root, bytes, limit)?;
            let copied = self.write_part(&path, |mut file| {
                whole.seek(SeekFrom::Start(0))?;
                io::copy(&mut whole, &mut file)?;
                Ok::<(), io::Error>(())
            });
            copied?;
            self.status().bytes = ByteLength::new(held + bytes);
        }
        self.index().insert(segment, &header.tokens);
        Ok(true)
    }

    /// Writes a segment under another name, and gives it its own.
    fn write_file(&self, header: &mut Header, path: &Path) -> Result<File, WriteError> {
        self.write_part(path, |file| self.write_bytes(header, file))
    }

    /// Has `write` fill a file of another name, and gives it its own.
    fn write_part<E: From<io::Error>>(
        &self,
        path: &Path,
        write: impl FnOnce(&File) -> Result<(), E>,
    ) -> Result<File, E> {
        let part = files::part_of(path);
        // The folder may have been cleared.
        files::create_private_folder(&self.folder)?;
        let file = files::create_private(&part)?;
        let written = write(&file).and_then(|()| {
            self.ask(Call::Write)?;
            // No tick of the system's clock, so that whoever writes to it later is noticed.
            file.set_modified(SystemTime::now())?;
            Ok(files::commit(&file, &part, path)?)
        });
        if written.is_err() {
            fs::remove_file(&part).ok();
        }
        written.map(|()| file)
    }

    fn write_bytes(&self, header: &mut Header, mut file: &File) -> Result<(), WriteError> {
        let bytes = header.payload_bytes;
        let start = header.payload_start();
        self.map_source(bytes)?;
        file.seek(SeekFrom::Start(start))?;
        let mut piece = vec![0; bytes.min(PIECE as u64) as usize];
        for at in (0..bytes).step_by(PIECE) {
            let piece = &mut piece[..(bytes - at).min(PIECE as u64) as usize];
            match &*locked(&self.source) {
                Source::Mapped(buffer) => {
                    let read = buffer.read(at, piece);
                    read.map_err(|_| WriteError::GivenUp)?;
                }
                Source::Nothing | Source::Pins(_) => return Err(WriteError::GivenUp),
            }
            header.push_piece(piece);
            self.write_all(file, piece)?;
            self.moved.fetch_add(1, Ordering::Relaxed);
        }
        // The pages are free before the disk has the file.
        self.let_go(bytes)?;
        file.seek(SeekFrom::Start(0))?;
        self.write_all(file, &header.encode())?;
        Ok(())
    }

    /// Lets go of the pages whose `bytes` have been read, unless they may not have been what they were.
    fn let_go(&self, bytes: u64) -> Result<(), WriteError> {
        let mut source = locked(&self.source);
        let given_up = bytes > 0 && !matches!(*source, Source::Mapped(_));
        // Some may be another segment's that cannot be read any more: zeros then.
        if given_up || self.pool.has_lost_files() {
            return Err(WriteError::GivenUp);
        }
        *source = Source::Nothing;
        Ok(())
    }

    fn write_all(&self, mut file: &File, bytes: &[u8]) -> io::Result<()> {
        match &self.disk {
            None => file.write_all(bytes),
            Some(disk) => disk.write_all(file, bytes),
        }
    }

    /// Maps the pages that are to be written one after the other, which keeps them from now on.
    fn map_source(&self, bytes: u64) -> Result<(), WriteError> {
        let mut source = locked(&self.source);
        let Source::Pins(pins) = std::mem::take(&mut *source) else {
            return Err(WriteError::GivenUp);
        };
        debug_assert_eq!(pins.len() as u64 * self.shape.page_bytes(), bytes);
        if bytes == 0 {
            return Ok(());
        }
        let reserved = self.pool.reserve(ByteLength::new(bytes), "written");
        let mut buffer = reserved.map_err(|_| WriteError::GivenUp)?;
        let share = Share {
            source: lacuna_pages::Source::Pins(&pins),
            target: &mut buffer,
            at: VirtualPage::new(0),
        };
        let shared = self.pool.share(&mut [share]);
        shared.map_err(|_| WriteError::GivenUp)?;
        debug_assert_eq!(to_usize(buffer.reserved()) as u64, bytes);
        *source = Source::Mapped(buffer);
        Ok(())
    }

    /// Takes note that the segments which lead to `chain` are of use, or are to be kept, all at one time, so that they
    /// go leaves first.
    pub(super) fn touch_lineage(&self, chain: Chain, until: Option<SystemTime>) {
        let now = SystemTime::now();
        if self.ask(Call::Write).is_err() {
            return;
        }
        let lineage = self.index().lineage(chain);
        let point = self.index().find(Kind::ResumePoint, chain).cloned();
        for segment in lineage.iter().chain(&point) {
            // One that is gone will be missed when it is wanted.
            match &self.unnamed {
                Some(files) => files.touch(&segment.name, now, until),
                None => {
                    self.touch_file(&segment.name, now, until).ok();
                }
            }
        }
    }

    /// Keeps the segments up to `chain` for a session. Where not all from `root` on were written, what it had stays.
    fn keep_session(
        &self,
        id: &SessionId,
        root: Chain,
        chain: Chain,
        tokens: usize,
    ) -> io::Result<()> {
        self.ask(Call::Write)?;
        let (segments, whole) = self.index().needed(chain, root);
        let (names, tokens) = match whole {
            true => (segments.iter().map(|it| it.name.clone()).collect(), tokens),
            false if sessions::is_kept(&self.folder, id) => return Ok(()),
            false => (Vec::new(), 0),
        };
        let _lock = files::lock(&self.config.path)?;
        sessions::keep(&self.folder, id, tokens, &names)
    }

    fn touch_file(&self, name: &str, now: SystemTime, until: Option<SystemTime>) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let file = options.write(true).open(self.folder.join(name))?;
        let touch = |file: &File| files::touch(file, now, until);
        self.verified.across(name, &file, touch)
    }
}

#[cfg(test)]
mod tests {
    use super::super::faults::{DiskFaults, Trouble};
    use super::super::{CacheFolder, trial};
    use super::*;
    use crate::prefix::Namespace;
    use crate::swap::SwapRoom;

    /// What a file of so many groups takes.
    fn file_bytes(folder: &CacheFolder, groups: usize) -> u64 {
        let tokens = groups * folder.shared.shape.group_tokens();
        let payload = folder.bytes_of(0..groups);
        files::room(Header::length(tokens, payload, false) + payload)
    }

    #[test]
    fn after_a_failure_nothing_is_written_for_a_minute_and_then_it_is_tried_again() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = trial::open(root.path(), 1 << 30);
        let (shared, prompt) = (&folder.shared, trial::tokens(&folder, 1, 1));
        let now = Instant::now();
        assert!(!shared.is_paused(now));
        shared.note_failed_write(&io::Error::other("no"));
        let until = shared.queue().paused_until.expect("a time");
        assert!(until >= now + PAUSE);
        assert!(shared.is_paused(now) && shared.is_paused(until - Duration::from_secs(1)));
        assert!(!shared.is_paused(until) && !shared.is_paused(until + PAUSE));
        trial::write(&folder, &prompt, 0);
        let status = folder.status();
        assert_eq!((status.written_segments, status.failed_writes), (0, 1));
        assert_eq!(status.paused.as_deref(), Some("no"));
        // As if the minute were over.
        shared.queue().paused_until = Some(now);
        trial::write(&folder, &prompt, 0);
        let status = folder.status();
        assert_eq!((status.written_segments, status.failed_writes), (1, 1));
        assert_eq!(status.paused, None);
        assert_eq!(shared.queue().paused_until, None);
    }

    #[test]
    fn a_segment_may_be_as_large_as_its_folder_and_bytes_are_those_of_files() {
        let root = tempfile::tempdir().expect("a folder");
        let mut folder = trial::open(root.path(), 1 << 30);
        let (one, two) = (file_bytes(&folder, 1), file_bytes(&folder, 2));
        assert!(one < two);
        drop(folder);
        folder = trial::open(root.path(), two);
        trial::write(&folder, &trial::tokens(&folder, 1, 3), 0);
        assert_eq!(
            (folder.status().given_up, folder.status().written_bytes),
            (1, 0)
        );
        trial::write(&folder, &trial::tokens(&folder, 1, 2), 0);
        assert_eq!(
            (folder.status().given_up, folder.status().written_bytes),
            (1, two)
        );
        // It takes the place of the other.
        trial::write(&folder, &trial::tokens(&folder, 2, 1), 0);
        let status = folder.status();
        assert_eq!(
            (status.written_segments, status.written_bytes),
            (2, one + two)
        );
        assert_eq!((status.segments, status.bytes.get()), (1, one));
    }

    #[test]
    fn what_comes_from_elsewhere_may_be_as_large_as_the_folder() {
        let (here, there) = (tempfile::tempdir(), tempfile::tempdir());
        let (here, there) = (here.expect("a folder"), there.expect("a folder"));
        let first = trial::open(here.path(), 1 << 30);
        let (prompt, bytes) = (trial::tokens(&first, 1, 2), file_bytes(&first, 2));
        trial::write(&first, &prompt, 0);
        let chain = *trial::segment(&first, &prompt, 0)
            .chains
            .last()
            .expect("two");
        let segment = first.shared.index().find(Kind::Rows, chain).cloned();
        let file = first.shared.open_file(&segment.expect("written").name);
        let file = file.expect("written");
        let header = Header::read(&file, None).expect("whole");
        for (limit, fits) in [(bytes - 1, false), (bytes, true), (bytes + 1, true)] {
            let second = trial::open(there.path(), limit);
            let adopted = second.shared.adopt(&header, &file).expect("room");
            assert_eq!(adopted, fits, "{limit}");
            assert_eq!(second.knows(Kind::Rows, chain), fits);
        }
    }

    #[test]
    fn what_waits_is_given_up_though_nothing_is_being_written() {
        let root = tempfile::tempdir().expect("a folder");
        let disk = DiskFaults::default();
        let folder = trial::open_on(&disk, root.path());
        let (shared, prompt) = (&folder.shared, trial::tokens(&folder, 1, 1));
        assert!(!folder.give_up_writing());
        disk.set(Trouble::Stalls);
        // The writer is held by this, which has no pages.
        folder.touch(folder.root(Namespace::COMMON));
        trial::within_a_minute(|| shared.queue().busy.then_some(()));
        let segment = trial::segment(&folder, &prompt, 0);
        let chain = segment.chains[0];
        shared.offer(segment);
        assert!(folder.is_pending(chain));
        assert!(folder.give_up_writing());
        assert!(!folder.is_pending(chain) && !folder.give_up_writing());
        disk.set(Trouble::Nothing);
        trial::settle(&folder);
        let status = folder.status();
        assert_eq!((status.given_up, status.written_segments), (1, 0));
    }

    /// Some may have been zeros by then, and nobody could tell any more.
    #[test]
    fn pages_that_were_given_back_before_they_were_written_make_no_segment() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = trial::open(root.path(), 1 << 30);
        let (shared, bytes) = (&folder.shared, folder.bytes_of(0..1));
        assert!(matches!(shared.let_go(bytes), Err(WriteError::GivenUp)));
        assert!(shared.let_go(0).is_ok(), "there were none");
        let segment = trial::segment(&folder, &trial::tokens(&folder, 1, 1), 0);
        *locked(&shared.source) = Source::Pins(shared.shape.flatten(&segment.pins));
        shared.map_source(bytes).expect("memory");
        assert!(shared.let_go(bytes).is_ok());
        assert!(!folder.give_up_writing(), "they are free");
    }

    /// They may be what is written.
    #[test]
    fn nothing_is_written_while_pages_are_of_a_file_that_somebody_cut() {
        lacuna_pages::guard::install().expect("a handler");
        let root = tempfile::tempdir().expect("a folder");
        let folder = trial::open(root.path(), 1 << 30);
        let groups = ((1 << 20) / folder.bytes_of(0..1)) as usize;
        let (long, short) = (
            trial::tokens(&folder, 1, groups),
            trial::tokens(&folder, 2, 1),
        );
        trial::write(&folder, &long, 0);
        let more = [&long[..], &[7]].concat();
        let stored = folder.find(Namespace::COMMON, &more, 0, 0);
        let restoring = folder.restore(stored.expect("there"), &more);
        let mapped = trial::within_a_minute(|| restoring.poll());
        assert_eq!(folder.status().mapped_bytes, 1 << 20);
        trial::settle(&folder);
        let end = *trial::segment(&folder, &long, 0)
            .chains
            .last()
            .expect("some");
        let name = folder.shared.index().lineage(end)[0].name.clone();
        let file = OpenOptions::new()
            .write(true)
            .open(folder.shared.folder.join(name));
        file.and_then(|file| file.set_len(4096)).expect("cut");
        trial::write(&folder, &short, 0);
        let status = folder.status();
        assert_eq!((status.written_segments, status.given_up), (1, 1));
        drop(mapped);
        trial::write(&folder, &short, 0);
        let status = folder.status();
        assert_eq!((status.written_segments, status.given_up), (2, 1));
    }

    #[test]
    fn a_session_keeps_what_it_had_when_not_all_of_what_it_has_was_written() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = trial::open(root.path(), 1 << 30);
        let (shared, start) = (&folder.shared, folder.root(Namespace::COMMON));
        let id = |name: &str| SessionId {
            name: name.parse().expect("a name"),
            owner: Namespace::COMMON,
        };
        let kept = |name: &str| {
            let all = sessions::sessions(root.path())
                .expect("a folder")
                .into_iter();
            let mut of_name = all.filter(|it| it.id == id(name));
            of_name.next().map(|it| (it.tokens, it.bytes > 0))
        };
        let (prompt, other) = (trial::tokens(&folder, 1, 3), trial::tokens(&folder, 2, 3));
        trial::write(&folder, &prompt, 0);
        let end = |tokens: &[u32]| *trial::segment(&folder, tokens, 0).chains.last().expect("3");
        let keep = |name: &str, chain| {
            let kept = shared.keep_session(&id(name), start, chain, prompt.len());
            kept.expect("room");
        };
        keep("notes", end(&prompt));
        assert_eq!(kept("notes"), Some((prompt.len(), true)));
        // The beginning of this one was given up.
        trial::write(&folder, &other, 1);
        keep("notes", end(&other));
        assert_eq!(kept("notes"), Some((prompt.len(), true)));
        keep("new", end(&other));
        assert_eq!(kept("new"), Some((0, false)), "it is there by its name");
    }

    /// Room for two segments of one group, and a bit.
    fn unnamed(disk: &DiskFaults, root: &Path) -> (CacheFolder, Arc<SwapRoom>, u64) {
        let one = file_bytes(&trial::open(&root.join("named"), 1 << 20), 1);
        let room = Arc::new(SwapRoom::new(2 * one + one / 2));
        (trial::open_unnamed(disk, root, &room), room, one)
    }

    #[test]
    fn files_without_names_are_written_once_and_leave_when_their_room_is_needed() {
        let root = tempfile::tempdir().expect("a folder");
        let (folder, room, one) = unnamed(&DiskFaults::default(), root.path());
        assert!(folder.is_unnamed());
        let of = |seed| trial::tokens(&folder, seed, 1);
        let has = |seed| {
            let more = [of(seed), vec![7]].concat();
            folder.find(Namespace::COMMON, &more, 0, 0).is_some()
        };
        let status = || {
            let status = folder.status();
            (status.written_segments, status.segments, status.bytes.get())
        };
        trial::write(&folder, &of(1), 0);
        assert_eq!(status(), (1, 1, one));
        trial::write(&folder, &of(1), 0);
        assert_eq!(status(), (1, 1, one), "it is there");
        trial::write(&folder, &of(2), 0);
        assert_eq!(status(), (2, 2, 2 * one));
        trial::write(&folder, &of(3), 0);
        assert_eq!(status(), (3, 2, 2 * one));
        assert!(!has(1) && has(2) && has(3), "the oldest made room");
        // What else has the room needs it.
        assert!(!room.try_take(one));
        folder.give_room(one);
        assert!(!has(2) && has(3));
        assert!(room.try_take(one) && !room.try_take(one));
        folder.give_room(2 * one);
        assert_eq!((status(), folder.status().given_up), ((3, 0, 0), 0));
        assert!(room.try_take(one), "all of it");
        trial::write(&folder, &of(4), 0);
        assert_eq!((status(), folder.status().given_up), ((3, 0, 0), 1));
        room.give_back(2 * one);
        trial::write(&folder, &of(4), 0);
        assert_eq!(status(), (4, 1, one));
        let more = [of(4), vec![7]].concat();
        let stored = folder.find(Namespace::COMMON, &more, 0, 0).expect("there");
        let restoring = folder.restore(stored, &more);
        let all = trial::within_a_minute(|| restoring.poll());
        assert_eq!((all.groups.len(), all.missed()), (1, None));
    }
}
