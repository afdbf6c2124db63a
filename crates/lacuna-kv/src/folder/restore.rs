//! Taking segments back: mapped as they are, or read into pages of the pool, on threads of their own.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use lacuna_pages::device::FilePart;
use lacuna_pages::{Buffer, ByteLength, Error as PagesError, PagePin, PageRange};

use super::chain::Chain;
use super::faults::Call;
use super::index::Segment;
use super::segment::{Header, Kind, ReadError};
use super::verified::{self, State};
use super::{CacheFolder, Shared, locked};
use crate::prefix::{Namespace, Pins};

/// What a folder has of a prompt beyond what is in memory.
#[derive(Debug)]
pub struct Stored {
    steps: Vec<Step>,
    /// The resume point at its end, where one is needed.
    point: Option<Arc<Segment>>,
    first_group: usize,
    end_group: usize,
    end: Chain,
    /// Bytes of pages that reading it takes.
    pub bytes: u64,
    /// Tokens of the prompt up to its end.
    pub tokens: usize,
}

/// Groups to be taken from one segment.
#[derive(Debug)]
struct Step {
    segment: Arc<Segment>,
    groups: Range<usize>,
}

/// Why less was taken from a folder than it had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FolderMiss {
    /// A file is damaged.
    Damaged,
    /// A file was removed meanwhile.
    Gone,
    /// A file could not be read, or not in time.
    Unreadable,
    /// There was no memory for it.
    NoMemory,
    /// The store behind the folder has something else in its place.
    RemoteDamaged,
    /// The store behind the folder failed, or took too long.
    RemoteUnreadable,
}

/// What was read back: pages of groups that follow each other, and of a resume point behind the last.
#[derive(Debug, Default)]
pub struct Restored {
    /// Of which segment, and why, if not all was.
    missed: Option<(usize, FolderMiss)>,
    /// Groups before the first.
    pub(crate) first_group: usize,
    pub(crate) groups: Vec<Pins>,
    /// After how many groups in all, and its pages.
    pub(crate) point: Option<(usize, Pins)>,
}

/// A prompt on its way back into memory. Dropping it gives its pages back at once, whatever the disk does.
#[derive(Debug)]
pub struct Restoring {
    shared: Arc<Shared>,
    progress: Arc<Mutex<Progress>>,
    /// Bytes of pages that it takes in all.
    pub bytes: u64,
}

#[derive(Debug)]
struct Progress {
    done: bool,
    /// When a piece was last read.
    at: Instant,
    /// Of each segment.
    parts: Vec<Part>,
    restored: Restored,
}

/// How far a segment is.
#[derive(Debug)]
enum Part {
    Unread,
    /// Its pages are the file's, and nobody has compared their checksums yet.
    Mapped(Vec<PagePin>),
    /// It is copied piece by piece, each compared before.
    Copied(Buffer),
    Whole(Vec<PagePin>),
}

impl Progress {
    fn cancel(&mut self) {
        self.parts.clear();
        self.restored = Restored::default();
    }

    /// Puts a part where it can be taken back.
    fn hold(&mut self, index: usize, part: Part) -> Result<(), Missed> {
        let place = self.parts.get_mut(index).ok_or(Missed::Cancelled)?;
        *place = part;
        Ok(())
    }

    /// A part of which a piece is at hand.
    fn part(&mut self, index: usize) -> Result<&mut Part, Missed> {
        self.at = Instant::now();
        self.parts.get_mut(index).ok_or(Missed::Cancelled)
    }

    /// Takes note that the segment at `index` was missed; the first of several counts.
    fn note_missed(&mut self, index: usize, why: Option<FolderMiss>) {
        let missed = why.map(|why| (index, why));
        let first = |&(at, _): &(usize, FolderMiss)| index < at;
        if self.restored.missed.as_ref().is_none_or(first) {
            self.restored.missed = missed;
        }
    }

    fn take(&mut self, index: usize) -> Result<Part, Missed> {
        let part = self.parts.get_mut(index).ok_or(Missed::Cancelled)?;
        Ok(std::mem::replace(part, Part::Unread))
    }
}

/// Why a segment was not read back.
#[derive(Debug)]
enum Missed {
    /// Its file is of no use, or does not say what it was found for.
    Damaged,
    Unreadable(io::Error),
    /// No memory could be had for its pages.
    NoMemory,
    /// Nobody waits for it any more.
    Cancelled,
}

impl From<ReadError> for Missed {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Damaged(_) => Self::Damaged,
            ReadError::Io(error) => Self::Unreadable(error),
        }
    }
}

impl CacheFolder {
    /// What the folder has of `tokens` beyond the `known` groups that are in memory, of which a sequence could start
    /// after `resumable`. At least the last token is left.
    pub(crate) fn find(
        &self,
        namespace: Namespace,
        tokens: &[u32],
        known: usize,
        resumable: usize,
    ) -> Option<Stored> {
        let (index, shape) = (self.shared.index(), &self.shared.shape);
        if index.len() == 0 {
            return None;
        }
        let group = shape.group_tokens();
        let chains = self.chains(namespace, tokens);
        let (mut steps, mut end) = (Vec::new(), known);
        while let Some(segment) = chains
            .get(end)
            .and_then(|&chain| index.find(Kind::Rows, chain))
        {
            let common = segment.common(&chains[end..], end);
            if common == 0 {
                break;
            }
            steps.push(Step {
                segment: Arc::clone(segment),
                groups: end..end + common,
            });
            end += common;
        }
        let point = match shape.has_resume_points() {
            false => None,
            true => {
                let mut ends = (resumable + 1..=end).rev();
                let (at, point) = ends.find_map(|at| {
                    let point = index.find(Kind::ResumePoint, chains[at - 1])?;
                    Some((at, Arc::clone(point)))
                })?;
                end = at;
                Some(point)
            }
        };
        steps.retain_mut(|step| {
            step.groups.end = step.groups.end.min(end);
            !step.groups.is_empty()
        });
        if steps.is_empty() && point.is_none() {
            return None;
        }
        let segments = steps.iter().map(|step| &step.segment).chain(&point);
        Some(Stored {
            bytes: segments.map(|segment| segment.payload_bytes).sum(),
            first_group: known.min(end),
            end_group: end,
            end: chains[end - 1],
            tokens: end * group,
            steps,
            point,
        })
    }

    /// What everything up to the end of each group of `tokens` hashes to. At least the last token is left.
    pub(super) fn chains(&self, namespace: Namespace, tokens: &[u32]) -> Vec<Chain> {
        let group = self.shared.shape.group_tokens();
        let whole = tokens.len().saturating_sub(1) / group;
        let mut chain = self.root(namespace);
        let chains = tokens[..whole * group].chunks(group).map(|tokens| {
            chain = chain.after(tokens);
            chain
        });
        chains.collect()
    }

    /// Begins to read `stored`, which was found for `tokens`.
    pub(crate) fn restore(&self, stored: Stored, tokens: &[u32]) -> Restoring {
        let progress = Arc::new(Mutex::new(Progress {
            done: false,
            at: Instant::now(),
            parts: stored.segments().map(|_| Part::Unread).collect(),
            restored: Restored {
                first_group: stored.first_group,
                ..Restored::default()
            },
        }));
        let restoring = Restoring {
            shared: Arc::clone(&self.shared),
            progress: Arc::clone(&progress),
            bytes: stored.bytes,
        };
        let (shared, tokens) = (Arc::clone(&self.shared), tokens[..stored.tokens].to_vec());
        let read = move || {
            let done = Done(&progress);
            shared.read_all(&stored, &tokens, done.0);
        };
        let thread = thread::Builder::new().name(READER.to_owned());
        if thread.spawn(read).is_err() {
            locked(&restoring.progress).done = true;
        }
        restoring
    }
}

const READER: &str = "lacuna-restore";
/// Threads that read one prompt: so that a disk is read while others compare what it gave, whatever processors there
/// are, and has enough to do.
const READERS: usize = 4;
/// Segments of less are copied: a file takes a descriptor for as long as it is mapped, and this much takes a tenth of a
/// millisecond to copy.
const LEAST_MAPPED: u64 = 1 << 20;

impl Stored {
    fn segments(&self) -> impl Iterator<Item = &Arc<Segment>> {
        let rows = self.steps.iter().map(|step| &step.segment);
        rows.chain(&self.point)
    }
}

/// Says that a thread has ended, however it did.
struct Done<'a>(&'a Mutex<Progress>);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut progress = locked(self.0);
        progress.done = true;
        progress.parts.clear();
    }
}

impl Restoring {
    /// How long a disk may take for a mebibyte before the prompt is computed instead.
    const PATIENCE: Duration = Duration::from_secs(10);

    /// Whether there is nothing to wait for.
    #[must_use]
    pub fn is_over(&self) -> bool {
        locked(&self.progress).done
    }

    /// What was read, once that is over. It is less than there was where a segment was of no use, and nothing when
    /// the disk stalls.
    #[must_use]
    pub fn poll(&self) -> Option<Restored> {
        let mut progress = locked(&self.progress);
        if progress.done {
            return Some(std::mem::take(&mut progress.restored));
        }
        if progress.at.elapsed() < Self::PATIENCE {
            return None;
        }
        progress.cancel();
        self.shared.status().unreadable += 1;
        Some(Restored {
            missed: Some((0, FolderMiss::Unreadable)),
            ..Restored::default()
        })
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        locked(&self.progress).cancel();
    }
}

impl Restored {
    /// Whether it is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.point.is_none()
    }

    /// Why it is less than the folder had, if it is.
    #[must_use]
    pub fn missed(&self) -> Option<FolderMiss> {
        self.missed.map(|(_, why)| why)
    }
}

impl Shared {
    /// Reads the segments of `stored`, several at a time, and puts together what is before the first that is missed.
    fn read_all(&self, stored: &Stored, tokens: &[u32], progress: &Mutex<Progress>) {
        let segments: Vec<&Arc<Segment>> = stored.segments().collect();
        let next = AtomicUsize::new(0);
        let read = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(segment) = segments.get(index) else {
                    break;
                };
                let wanted = self.wanted(stored, index, tokens);
                if let Err(missed) = self.read_segment(segment, wanted, index, progress) {
                    // What is behind it is of no use.
                    next.store(segments.len(), Ordering::Relaxed);
                    let why = self.note_missed(segment, missed);
                    locked(progress).note_missed(index, why);
                }
            }
        };
        let readers = READERS.min(segments.len());
        thread::scope(|scope| {
            for _ in 1..readers {
                let thread = thread::Builder::new().name(READER.to_owned());
                // Those that there are do it all.
                thread.spawn_scoped(scope, read).ok();
            }
            read();
        });
        if self.put_together(stored, progress) {
            self.touch_later(stored.end, None);
        }
    }

    /// Of the prompt's `tokens`, those that the segment at `index` begins with.
    fn wanted<'a>(&self, stored: &Stored, index: usize, tokens: &'a [u32]) -> &'a [u32] {
        let group = self.shape.group_tokens();
        let step = stored.steps.get(index);
        step.map_or(&[], |step| {
            &tokens[step.segment.first_group * group..step.groups.end * group]
        })
    }

    /// Makes groups of what has been read. Returns whether that is all of `stored`.
    fn put_together(&self, stored: &Stored, progress: &Mutex<Progress>) -> bool {
        let mut progress = locked(progress);
        let mut parts = std::mem::take(&mut progress.parts).into_iter();
        let restored = &mut progress.restored;
        for step in &stored.steps {
            let Some(Part::Whole(pages)) = parts.next() else {
                return false;
            };
            // The others of its segment go on differently, or are in memory.
            let first = step.segment.first_group;
            let all = first..first + step.segment.chains.len();
            let groups = self.shape.groups_of(&all, pages).into_iter();
            let groups = groups.skip(step.groups.start - first);
            restored.groups.extend(groups.take(step.groups.len()));
        }
        match (&stored.point, parts.next()) {
            (None, _) => true,
            (Some(_), Some(Part::Whole(pages))) => {
                let point = self.shape.point_of(stored.end_group, pages);
                restored.point = Some((stored.end_group, point));
                true
            }
            (Some(_), _) => false,
        }
    }

    /// Counts a segment that was not read, and takes one out that will not be.
    fn note_missed(&self, segment: &Segment, missed: Missed) -> Option<FolderMiss> {
        match missed {
            Missed::Damaged => {
                self.drop_damaged(&segment.name);
                Some(FolderMiss::Damaged)
            }
            Missed::Unreadable(error) if error.kind() == io::ErrorKind::NotFound => {
                self.index().remove(&segment.name);
                self.status().gone += 1;
                Some(FolderMiss::Gone)
            }
            Missed::Unreadable(_) => {
                self.index().remove(&segment.name);
                self.status().unreadable += 1;
                Some(FolderMiss::Unreadable)
            }
            Missed::NoMemory => {
                self.status().short_of_memory += 1;
                Some(FolderMiss::NoMemory)
            }
            Missed::Cancelled => None,
        }
    }

    /// Takes the pages of a segment whose first tokens are `wanted`, each compared with its checksum before anybody
    /// sees it (F2).
    fn read_segment(
        &self,
        segment: &Segment,
        wanted: &[u32],
        index: usize,
        progress: &Mutex<Progress>,
    ) -> Result<(), Missed> {
        self.ask(Call::Read).map_err(Missed::Unreadable)?;
        let file = self.open_file(&segment.name).map_err(Missed::Unreadable)?;
        // Before anything is read: whatever is written to it from now on makes another of it, and what is read is in
        // memory.
        let state = State::of(&file).ok();
        let known = state.is_some_and(|state| {
            self.verified.has(&segment.name, state) && verified::is_in_memory(&file, 0, u64::MAX)
        });
        let header = Header::read(&file, self.key())?;
        // The file may be another one by now.
        let same = self.check(&header).is_ok()
            && header.kind == segment.kind
            && header.first_group as usize == segment.first_group
            && header.before == segment.before
            && header.chains() == segment.chains
            && header.tokens.starts_with(wanted);
        if !same {
            return Err(Missed::Damaged);
        }
        let pages = match header.payload_bytes {
            0 => Some(Vec::new()),
            _ => self.map(&file, &header)?,
        };
        let ask = || self.ask(Call::Read).map_err(Missed::Unreadable);
        let mut known_bytes = 0;
        match pages {
            Some(pages) => {
                locked(progress).hold(index, Part::Mapped(pages))?;
                let each = || {
                    ask()?;
                    locked(progress).part(index).map(|_| ())
                };
                match (known, state) {
                    (true, _) => known_bytes = header.payload_bytes,
                    (false, state) => {
                        header.verify_payload(&file, each)?;
                        let note = |state| self.verified.note_compared(&segment.name, state);
                        state.map(note);
                    }
                }
            }
            None => {
                let buffer = self.buffer(header.payload_bytes)?;
                locked(progress).hold(index, Part::Copied(buffer))?;
                header.read_payload(&file, |at, piece| {
                    ask()?;
                    match locked(progress).part(index)? {
                        Part::Copied(buffer) => buffer.write(at, piece).map_err(no_memory),
                        _ => Err(Missed::Cancelled),
                    }
                })?;
            }
        }
        let mut progress = locked(progress);
        let (pages, mapped_bytes) = match progress.take(index)? {
            Part::Mapped(pages) | Part::Whole(pages) => (pages, header.payload_bytes),
            Part::Copied(mut buffer) => {
                let pages = PageRange::of(0..buffer.pages().get());
                buffer.seal(pages).map_err(no_memory)?;
                (buffer.pin(pages).map_err(no_memory)?, 0)
            }
            Part::Unread => return Err(Missed::Cancelled),
        };
        progress.hold(index, Part::Whole(pages))?;
        drop(progress);
        let mut status = self.status();
        status.restored_bytes += header.payload_bytes;
        status.mapped_bytes += mapped_bytes;
        status.known_bytes += known_bytes;
        Ok(())
    }

    /// The pages of a segment as they are in its file; `None` where they have to be copied, as what is encrypted. What a resume point has is
    /// copied: states change with the next token, and of windows little stays.
    fn map(&self, file: &File, header: &Header) -> Result<Option<Vec<PagePin>>, Missed> {
        if header.cipher.is_some()
            || header.kind != Kind::Rows
            || header.payload_bytes < LEAST_MAPPED
        {
            return Ok(None);
        }
        let Ok(file) = file.try_clone() else {
            return Ok(None);
        };
        let part = FilePart {
            file,
            offset: header.payload_start(),
            length: ByteLength::new(header.payload_bytes),
        };
        match self.pool.open_file(part) {
            Ok(pages) => Ok(Some(pages)),
            Err(PagesError::OutOfPages { .. }) => Err(Missed::NoMemory),
            Err(_) => Ok(None),
        }
    }

    /// Memory for `bytes` of pages.
    fn buffer(&self, bytes: u64) -> Result<Buffer, Missed> {
        let length = ByteLength::new(bytes);
        let mut buffer = self.pool.reserve(length, "restored").map_err(no_memory)?;
        let mapped = buffer.ensure_mapped(0..bytes as usize);
        mapped.map_err(no_memory)?;
        Ok(buffer)
    }
}

fn no_memory(_: PagesError) -> Missed {
    Missed::NoMemory
}

#[cfg(test)]
mod tests {
    use super::super::faults::{DiskFaults, Trouble};
    use super::super::trial;
    use super::*;

    /// Begins to read what the folder has of `prompt`, one token of which is always left.
    fn restoring(folder: &CacheFolder, prompt: &[u32]) -> Restoring {
        let more = [prompt, &[7]].concat();
        let stored = folder.find(Namespace::COMMON, &more, 0, 0);
        folder.restore(stored.expect("it has something"), &more)
    }

    fn restored(restoring: &Restoring) -> Restored {
        trial::within_a_minute(|| restoring.poll())
    }

    fn progress() -> Progress {
        Progress {
            done: false,
            at: Instant::now(),
            parts: vec![Part::Unread, Part::Whole(Vec::new())],
            restored: Restored::default(),
        }
    }

    #[test]
    fn of_several_segments_that_were_missed_the_first_says_why() {
        let mut progress = progress();
        assert_eq!(progress.restored.missed(), None);
        for (index, why, expected) in [
            (5, FolderMiss::Gone, FolderMiss::Gone),
            (7, FolderMiss::NoMemory, FolderMiss::Gone),
            (5, FolderMiss::NoMemory, FolderMiss::Gone),
            (2, FolderMiss::Damaged, FolderMiss::Damaged),
        ] {
            progress.note_missed(index, Some(why));
            assert_eq!(progress.restored.missed(), Some(expected));
        }
        assert!(progress.hold(1, Part::Unread).is_ok());
        progress.cancel();
        assert_eq!(progress.restored.missed(), None, "nobody asks any more");
        let late = progress.hold(1, Part::Unread);
        assert!(matches!(late, Err(Missed::Cancelled)));
    }

    #[test]
    fn groups_or_a_resume_point_are_something() {
        let pins = || Pins::new(Vec::new());
        let of = |groups, point| Restored {
            groups,
            point,
            ..Restored::default()
        };
        assert!(of(Vec::new(), None).is_empty());
        assert!(!of(vec![pins()], None).is_empty());
        assert!(!of(Vec::new(), Some((1, pins()))).is_empty());
        assert!(!of(vec![pins()], Some((1, pins()))).is_empty());
    }

    #[test]
    fn a_prompt_is_read_until_it_is_over_and_given_up_when_the_disk_says_nothing_for_long() {
        let root = tempfile::tempdir().expect("a folder");
        let disk = DiskFaults::default();
        let folder = trial::open_on(&disk, root.path());
        let prompt = trial::tokens(&folder, 1, 3);
        trial::write(&folder, &prompt, 0);
        disk.set(Trouble::Stalls);
        let [first, late, dropped] = [(); 3].map(|()| restoring(&folder, &prompt));
        assert!(!first.is_over() && first.poll().is_none());
        locked(&late.progress).at -= Restoring::PATIENCE;
        let nothing = late.poll().expect("it has waited for long enough");
        assert!(nothing.is_empty());
        assert_eq!(nothing.missed(), Some(FolderMiss::Unreadable));
        assert_eq!(folder.status().unreadable, 1);
        let progress = Arc::clone(&dropped.progress);
        drop(dropped);
        assert!(
            locked(&progress).parts.is_empty(),
            "its pages are free at once"
        );
        disk.set(Trouble::Nothing);
        let all = restored(&first);
        assert_eq!((all.groups.len(), all.missed()), (3, None));
        assert!(first.is_over());
        assert_eq!(
            folder.status().unreadable,
            1,
            "the others found nobody waiting"
        );
    }

    #[test]
    fn what_cannot_be_read_is_not_called_gone_and_what_is_gone_is_not_called_unreadable() {
        let root = tempfile::tempdir().expect("a folder");
        let disk = DiskFaults::default();
        let folder = trial::open_on(&disk, root.path());
        let counted = || {
            let status = folder.status();
            (status.gone, status.unreadable, status.segments)
        };
        let prompts = [1, 2, 3].map(|seed| trial::tokens(&folder, seed, 1));
        for prompt in &prompts {
            trial::write(&folder, prompt, 0);
        }
        for (number, prompt) in prompts[..2].iter().enumerate() {
            disk.set(Trouble::Refuses);
            let nothing = restored(&restoring(&folder, prompt));
            assert_eq!(nothing.missed(), Some(FolderMiss::Unreadable));
            assert_eq!(counted(), (0, number as u64 + 1, 2 - number));
        }
        disk.set(Trouble::Nothing);
        super::super::clear(root.path()).expect("cleared");
        let nothing = restored(&restoring(&folder, &prompts[2]));
        assert_eq!(nothing.missed(), Some(FolderMiss::Gone));
        assert_eq!(counted(), (1, 2, 0));
    }

    /// Nobody knows two texts that hash alike; it is as if somebody did.
    #[test]
    fn a_segment_of_other_tokens_is_not_taken_though_it_was_found() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = trial::open(root.path(), 1 << 30);
        let (prompt, other) = (trial::tokens(&folder, 1, 2), trial::tokens(&folder, 2, 3));
        trial::write(&folder, &prompt, 0);
        let more = [&prompt[..], &[7]].concat();
        let stored = folder.find(Namespace::COMMON, &more, 0, 0);
        let restoring = folder.restore(stored.expect("there"), &other);
        let nothing = restored(&restoring);
        assert!(nothing.is_empty());
        assert_eq!(nothing.missed(), Some(FolderMiss::Damaged));
        assert_eq!(folder.status().damaged, 1);
    }

    #[test]
    fn a_file_that_has_more_groups_than_its_segment_is_another_ones() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = trial::open(root.path(), 1 << 30);
        let long = trial::tokens(&folder, 1, 3);
        let short = &long[..long.len() / 3];
        trial::write(&folder, short, 0);
        trial::write(&folder, &long, 0);
        let name = |prompt: &[u32]| {
            let end = trial::segment(&folder, prompt, 0).chains;
            let last = end.last().expect("a group").short();
            let name = super::super::index::file_name(Kind::Rows, 0, end.len(), &last);
            folder.shared.folder.join(name)
        };
        std::fs::copy(name(&long), name(short)).expect("both are there");
        let nothing = restored(&restoring(&folder, short));
        assert!(nothing.is_empty());
        assert_eq!(nothing.missed(), Some(FolderMiss::Damaged));
    }

    #[test]
    fn segments_of_a_mebibyte_are_mapped_and_smaller_ones_copied() {
        lacuna_pages::guard::install().expect("a handler");
        let root = tempfile::tempdir().expect("a folder");
        let folder = trial::open(root.path(), 1 << 30);
        let groups = (LEAST_MAPPED / folder.bytes_of(0..1)) as usize;
        assert_eq!(folder.bytes_of(0..groups), LEAST_MAPPED);
        let mapped = |groups| {
            let prompt = trial::tokens(&folder, groups as u32, groups);
            trial::write(&folder, &prompt, 0);
            let all = restored(&restoring(&folder, &prompt));
            assert_eq!(all.groups.len(), groups);
            folder.status().mapped_bytes
        };
        assert_eq!((mapped(groups - 1), mapped(groups)), (0, LEAST_MAPPED));
    }
}
