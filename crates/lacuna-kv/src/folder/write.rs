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
        let mut source = locked(&self.source);
        // Some may be another segment's that cannot be read any more: zeros then.
        let given_up = bytes > 0 && !matches!(*source, Source::Mapped(_));
        if given_up || self.pool.has_lost_files() {
            return Err(WriteError::GivenUp);
        }
        *source = Source::Nothing;
        drop(source);
        file.seek(SeekFrom::Start(0))?;
        self.write_all(file, &header.encode())?;
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
