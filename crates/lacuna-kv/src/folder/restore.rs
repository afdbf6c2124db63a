//! Reading segments back into pages of the pool, on a thread of its own.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lacuna_pages::{Buffer, ByteLength, PagePin, PageRange};

use super::chain::Chain;
use super::index::Segment;
use super::segment::{Header, Kind, ReadError};
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

/// What was read back: pages of groups that follow each other, and of a resume point behind the last.
#[derive(Debug, Default)]
pub struct Restored {
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
    cancelled: bool,
    done: bool,
    /// When a piece was last read.
    at: Instant,
    /// The segment that is being read.
    buffer: Option<Buffer>,
    restored: Restored,
}

impl Progress {
    fn cancel(&mut self) {
        self.cancelled = true;
        (self.buffer, self.restored) = (None, Restored::default());
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
        let whole = tokens.len().saturating_sub(1) / group;
        let mut chain = self.root(namespace);
        let chains = tokens[..whole * group].chunks(group).map(|tokens| {
            chain = chain.after(tokens);
            chain
        });
        let chains: Vec<Chain> = chains.collect();
        let (mut steps, mut end) = (Vec::new(), known);
        while let Some(segment) = chains
            .get(end)
            .and_then(|&chain| index.find(Kind::Rows, chain))
        {
            let offset = end - segment.first_group.min(end);
            let there = segment.chains.get(offset..).unwrap_or_default().iter();
            let common = there.zip(&chains[end..]).take_while(|(a, b)| a == b);
            let common = common.count();
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

    /// Begins to read `stored`, which was found for `tokens`.
    pub(crate) fn restore(&self, stored: Stored, tokens: &[u32]) -> Restoring {
        let progress = Arc::new(Mutex::new(Progress {
            cancelled: false,
            done: false,
            at: Instant::now(),
            buffer: None,
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
        let thread = std::thread::Builder::new().name("lacuna-restore".to_owned());
        if thread.spawn(read).is_err() {
            locked(&restoring.progress).done = true;
        }
        restoring
    }
}

/// Says that a thread has ended, however it did.
struct Done<'a>(&'a Mutex<Progress>);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut progress = locked(self.0);
        (progress.done, progress.buffer) = (true, None);
    }
}

impl Restoring {
    /// How long a disk may take for a mebibyte before the prompt is computed instead.
    const PATIENCE: Duration = Duration::from_secs(10);

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
        Some(Restored::default())
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
}

impl Shared {
    fn read_all(&self, stored: &Stored, tokens: &[u32], progress: &Mutex<Progress>) {
        for step in &stored.steps {
            match self.read_rows(step, tokens, progress) {
                Ok(groups) => {
                    let mut progress = locked(progress);
                    if progress.cancelled {
                        return;
                    }
                    progress.restored.groups.extend(groups);
                }
                Err(missed) => return self.note_missed(&step.segment, missed),
            }
        }
        let Some(segment) = &stored.point else {
            return self.touch_lineage(stored.end);
        };
        match self.read_segment(segment, &[], progress) {
            Ok(pages) => {
                let mut progress = locked(progress);
                if !progress.cancelled {
                    let point = self.shape.point_of(stored.end_group, pages);
                    progress.restored.point = Some((stored.end_group, point));
                }
            }
            Err(missed) => return self.note_missed(segment, missed),
        }
        self.touch_lineage(stored.end);
    }

    fn note_missed(&self, segment: &Segment, missed: Missed) {
        match missed {
            Missed::Damaged => self.drop_damaged(&segment.name),
            Missed::Unreadable(error) if error.kind() == io::ErrorKind::NotFound => {
                self.index().remove(&segment.name);
                self.status().gone += 1;
            }
            Missed::Unreadable(_) => {
                self.index().remove(&segment.name);
                self.status().unreadable += 1;
            }
            Missed::NoMemory => self.status().short_of_memory += 1,
            Missed::Cancelled => {}
        }
    }

    /// The groups of `step`. The others of its segment go on differently, or are in memory.
    fn read_rows(
        &self,
        step: &Step,
        tokens: &[u32],
        progress: &Mutex<Progress>,
    ) -> Result<Vec<Pins>, Missed> {
        let (group, segment) = (self.shape.group_tokens(), &step.segment);
        let first = segment.first_group;
        let wanted = &tokens[first * group..step.groups.end * group];
        let pages = self.read_segment(segment, wanted, progress)?;
        let all = first..first + segment.chains.len();
        let groups = self.shape.groups_of(&all, pages).into_iter();
        Ok(groups
            .skip(step.groups.start - first)
            .take(step.groups.len())
            .collect())
    }

    /// The pages of a segment whose first tokens are `wanted`, each compared with its checksum before anybody sees it
    /// (F2).
    fn read_segment(
        &self,
        segment: &Segment,
        wanted: &[u32],
        progress: &Mutex<Progress>,
    ) -> Result<Vec<PagePin>, Missed> {
        let file = File::open(self.folder.join(&segment.name)).map_err(Missed::Unreadable)?;
        let header = Header::read(&file)?;
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
        if header.payload_bytes == 0 {
            return Ok(Vec::new());
        }
        let bytes = ByteLength::new(header.payload_bytes);
        let no_memory = |_| Missed::NoMemory;
        let mut buffer = self.pool.reserve(bytes, "restored").map_err(no_memory)?;
        let mapped = buffer.ensure_mapped(0..header.payload_bytes as usize);
        mapped.map_err(no_memory)?;
        let pages = PageRange::of(0..buffer.pages().get());
        {
            let mut progress = locked(progress);
            if progress.cancelled {
                return Err(Missed::Cancelled);
            }
            progress.buffer = Some(buffer);
        }
        header.read_payload(&file, |at, piece| {
            let mut progress = locked(progress);
            progress.at = Instant::now();
            let buffer = progress.buffer.as_mut().ok_or(Missed::Cancelled)?;
            buffer.write(at, piece).map_err(no_memory)
        })?;
        let mut progress = locked(progress);
        let mut buffer = progress.buffer.take().ok_or(Missed::Cancelled)?;
        buffer.seal(pages).map_err(no_memory)?;
        let pins = buffer.pin(pages).map_err(no_memory)?;
        let mut status = self.status();
        status.restored_bytes += header.payload_bytes;
        Ok(pins)
    }
}
