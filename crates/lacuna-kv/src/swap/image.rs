//! One sequence on its way out, in the file, or on its way back.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::checksum::xxh3_128;
use lacuna_pages::PageRange;

use super::file::Aligned;
use super::{Moved, Shared, Swap, SwapStatus, locked};
use crate::error::KvError;
use crate::prefix::Pins;
use crate::sequence::{Block, PageRun, Sequence, cut};

/// A sequence that was taken out of use, whose pages are moved to the file and back. Dropping it lets go of its pages
/// and of its room in the file at once, whatever the disk does.
#[derive(Debug)]
pub struct Swapped {
    shared: Arc<Shared>,
    image: Arc<Mutex<Image>>,
    tokens: usize,
    shared_tokens: usize,
}

/// How far a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Pieces moved so far, either way.
    pub moved: u64,
    /// What is under way.
    pub phase: Phase,
}

/// What is under way with a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It is written, from its end on.
    Leaving {
        /// Tokens of which all pages are still in memory.
        kept_tokens: usize,
    },
    /// All of it is in the file.
    Out,
    /// It is read.
    Returning {
        /// Bytes of pages that it has yet to take.
        bytes_left: u64,
    },
    /// All of it is in memory again, to be taken with [`Swapped::take`].
    Back,
    /// It is lost, and has to be computed again.
    Failed,
}

/// What the thread and the owner share.
#[derive(Debug)]
pub(super) struct Image {
    /// None once it was taken, or is lost.
    sequence: Option<Sequence>,
    pieces: Vec<Piece>,
    page_bytes: usize,
    moved: u64,
    way: Way,
}

/// What is moved at once, from the last rows to the first.
#[derive(Debug)]
struct Piece {
    runs: Vec<PageRun>,
    place: u32,
    checksum: u128,
    /// That of its block.
    first_row: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    /// So many pieces are out.
    Leaving(usize),
    Out,
    Returning {
        /// Pieces, from the first on, that are not back yet.
        left: usize,
        /// Tokens, from the first on, whose pages come from groups,
        tokens: usize,
        /// and of each buffer, the place of the first page that does not.
        first: Vec<u64>,
    },
    Back,
    Failed,
}

impl Piece {
    fn pages(&self) -> u64 {
        self.runs.iter().map(|run| run.pages.count().get()).sum()
    }

    /// Its pages from the one in `first` on, with how many of its pages are before them.
    fn runs_from<'a>(&'a self, first: &'a [u64]) -> impl Iterator<Item = (u64, PageRun)> + 'a {
        let mut before = 0;
        self.runs.iter().filter_map(move |&run| {
            let (start, end) = (run.pages.start.index(), run.pages.end.index());
            let first = first.get(run.buffer).copied().unwrap_or_default();
            let from = start.max(first);
            let at = before + (from - start);
            before += end - start;
            let pages = PageRange::of(from..end);
            (from < end).then_some((at, PageRun { pages, ..run }))
        })
    }

    fn pages_from(&self, first: &[u64]) -> u64 {
        let runs = self.runs_from(first);
        runs.map(|(_, run)| run.pages.count().get()).sum()
    }
}

impl Swap {
    /// Bytes of the file that a sequence takes while it leaves.
    #[must_use]
    pub fn room_for(&self, sequence: &Sequence, group_tokens: usize) -> u64 {
        let (_, most) = self.blocks_and_places(sequence, group_tokens);
        (most * self.shared.piece_bytes) as u64
    }

    /// Tokens of a block of `sequence`, and the most places that its pieces take.
    fn blocks_and_places(&self, sequence: &Sequence, group_tokens: usize) -> (usize, usize) {
        let (shared, report) = (&self.shared, sequence.report());
        let block = shared.block_bytes.div_ceil(report.bytes_per_token.max(1));
        let block = block.next_multiple_of(group_tokens.max(1));
        // The last piece of each block may be a small one, for all but one of them more than those there are anyway.
        let others = sequence.len() / block;
        let most = report.committed_bytes.div_ceil(shared.piece_bytes) + others;
        (block, most)
    }

    /// Takes `sequence` out of use and begins to move it to the file, but for the pages of its first `shared_tokens`
    /// tokens: those of groups that others have too, which it lets go of and needs again to come back. Blocks are
    /// whole groups of `group_tokens`.
    ///
    /// # Errors
    /// The sequence as it was, when the file has no room for it or it is none that can be moved; none when the device
    /// has failed and it is lost.
    pub fn leave(
        &self,
        mut sequence: Sequence,
        shared_tokens: usize,
        group_tokens: usize,
    ) -> Result<Swapped, Option<Box<Sequence>>> {
        let shared = &self.shared;
        let (block, most) = self.blocks_and_places(&sequence, group_tokens);
        let Some(mut places) = shared.take(most) else {
            return Err(Some(Box::new(sequence)));
        };
        let blocks = match sequence.leave(shared_tokens, block) {
            Ok(Some(blocks)) => blocks,
            Ok(None) => {
                shared.give_back(places);
                return Err(Some(Box::new(sequence)));
            }
            Err(_) => {
                shared.give_back(places);
                return Err(None);
            }
        };
        let page_bytes = sequence.page_bytes();
        let mut pieces = pieces_of(&blocks, (shared.piece_bytes / page_bytes) as u64);
        shared.give_back(places.split_off(pieces.len()));
        for (piece, place) in pieces.iter_mut().zip(places) {
            piece.place = place;
        }
        let tokens = sequence.len();
        let image = Arc::new(Mutex::new(Image {
            sequence: Some(sequence),
            pieces,
            page_bytes,
            moved: 0,
            way: Way::Leaving(0),
        }));
        shared.enqueue(Arc::clone(&image));
        Ok(Swapped {
            shared: Arc::clone(shared),
            image,
            tokens,
            shared_tokens,
        })
    }
}

/// Pieces of `most` pages each, or less at the end of a block, of the last block first.
fn pieces_of(blocks: &[Block], most: u64) -> Vec<Piece> {
    let pieces = blocks.iter().rev().flat_map(|block| {
        let pieces = cut(&block.runs, most).into_iter();
        pieces.map(|runs| Piece {
            runs,
            place: 0,
            checksum: 0,
            first_row: block.first_row,
        })
    });
    pieces.collect()
}

impl Swapped {
    /// Tokens that it holds.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens, from the first on, whose pages it needs from groups to come back.
    #[must_use]
    pub fn shared_tokens(&self) -> usize {
        self.shared_tokens
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let image = self.image();
        let phase = match &image.way {
            &Way::Leaving(done) => Phase::Leaving {
                kept_tokens: image.kept_rows(done).unwrap_or(self.tokens),
            },
            Way::Out => Phase::Out,
            Way::Returning { left, first, .. } => Phase::Returning {
                bytes_left: image.bytes_from(*left, first),
            },
            Way::Back => Phase::Back,
            Way::Failed => Phase::Failed,
        };
        Progress {
            moved: image.moved,
            phase,
        }
    }

    /// Bytes of pages that it takes to come back when the groups of the first `tokens` tokens are in memory.
    #[must_use]
    pub fn bytes_to_return(&self, tokens: usize) -> u64 {
        let image = self.image();
        let first = image.sequence.as_ref();
        let first = first.map_or(Vec::new(), |sequence| sequence.first_pages(tokens));
        image.bytes_from(image.pieces.len(), &first)
    }

    /// Begins to bring a sequence back that is out. `groups` are those of its first `tokens` tokens, at least as many
    /// as it [shares](Swapped::shared_tokens). Without memory or mappings for them it is lost.
    ///
    /// # Panics
    /// When it is not out, or `groups` are too few.
    pub fn begin_return(&self, groups: &[&Pins], tokens: usize) {
        assert!(
            tokens >= self.shared_tokens,
            "what is not in the file is needed"
        );
        let mut image = self.image();
        assert!(image.way == Way::Out, "only what is out comes back");
        let Some(sequence) = &mut image.sequence else {
            return;
        };
        let first = sequence.first_pages(tokens);
        if sequence
            .come_back(groups, self.shared_tokens, tokens)
            .is_err()
        {
            return self.shared.lose_for_memory(&mut image);
        }
        image.way = Way::Returning {
            left: image.pieces.len(),
            tokens,
            first,
        };
        drop(image);
        self.shared.enqueue(Arc::clone(&self.image));
    }

    /// Gives the pages back of a sequence that is on its way in: it is out again. Returns whether it was on its way.
    pub fn retreat(&self) -> bool {
        let mut image = self.image();
        let returning = matches!(image.way, Way::Returning { .. });
        if returning && image.retreat(self.shared_tokens).is_err() {
            self.shared.lose_for_memory(&mut image);
        }
        returning
    }

    /// The sequence, once it is back.
    #[must_use]
    pub fn take(&self) -> Option<Sequence> {
        let mut image = self.image();
        match image.way {
            Way::Back => image.sequence.take(),
            _ => None,
        }
    }

    /// Lends the sequence for a look at its buffers.
    #[must_use]
    pub fn look(&self) -> Look<'_> {
        Look(self.image())
    }

    /// Waits for the piece that is being copied, if one is.
    fn image(&self) -> MutexGuard<'_, Image> {
        locked(&self.image)
    }
}

impl Drop for Swapped {
    fn drop(&mut self) {
        self.shared.lose(&mut locked(&self.image));
    }
}

/// A sequence that is not in use, for as long as it is looked at.
#[derive(Debug)]
pub struct Look<'a>(MutexGuard<'a, Image>);

impl Look<'_> {
    /// It, unless it is lost or was taken.
    #[must_use]
    pub fn sequence(&self) -> Option<&Sequence> {
        self.0.sequence.as_ref()
    }
}

impl Image {
    /// The rows whose pages are all in memory when so many pieces are out; `None` when all are. Of a block that is
    /// out in part, what is in memory is still the sequence's.
    fn kept_rows(&self, done: usize) -> Option<usize> {
        let next = self.pieces.get(done).map(|piece| piece.first_row);
        let out = self.pieces[..done]
            .iter()
            .rev()
            .map(|piece| piece.first_row);
        out.into_iter().find(|&row| Some(row) != next)
    }

    fn bytes_from(&self, left: usize, first: &[u64]) -> u64 {
        let pages = self.pieces[..left].iter();
        let pages: u64 = pages.map(|piece| piece.pages_from(first)).sum();
        pages * self.page_bytes as u64
    }

    /// Gives back what has come back, which is still in the file.
    fn retreat(&mut self, shared_tokens: usize) -> Result<(), KvError> {
        let Way::Returning {
            left,
            tokens,
            first,
        } = std::mem::replace(&mut self.way, Way::Out)
        else {
            return Ok(());
        };
        let Some(sequence) = &mut self.sequence else {
            return Ok(());
        };
        for piece in &self.pieces[left..] {
            for (_, run) in piece.runs_from(&first) {
                sequence.move_out(run)?;
            }
        }
        sequence.leave_again(shared_tokens, tokens)
    }

    /// Copies the pages of a piece that is to be written. Returns how many bytes that is and where they go; `None`
    /// when the sequence is gone.
    fn copy_piece(&self, index: usize, bytes: &mut [u8]) -> Option<Result<(u32, usize), KvError>> {
        let (sequence, piece) = (self.sequence.as_ref()?, self.pieces.get(index)?);
        let mut at = 0;
        for &run in &piece.runs {
            let end = at + run.pages.count().get() as usize * self.page_bytes;
            if let Err(error) = sequence.copy_pages(run, &mut bytes[at..end]) {
                return Some(Err(error));
            }
            at = end;
        }
        // Pages of a file of the cache folder that somebody has cut would have been zeros.
        match sequence.has_lost_files() {
            true => Some(Err(KvError::RowsLost)),
            false => Some(Ok((piece.place, at))),
        }
    }

    /// The piece at `index` is in the file (W1).
    fn note_written(&mut self, index: usize, checksum: u128) -> Result<(), KvError> {
        let Some(sequence) = &mut self.sequence else {
            return Ok(());
        };
        let piece = &mut self.pieces[index];
        piece.checksum = checksum;
        for &run in &piece.runs {
            sequence.move_out(run)?;
        }
        self.moved += 1;
        self.way = match index + 1 == self.pieces.len() {
            true => Way::Out,
            false => Way::Leaving(index + 1),
        };
        Ok(())
    }

    /// Puts the bytes of the piece at `index` where they were, which are those that were written (W2).
    fn place_read(&mut self, index: usize, bytes: &[u8]) -> Result<(), KvError> {
        let (Some(sequence), Way::Returning { left, first, .. }) =
            (&mut self.sequence, &mut self.way)
        else {
            return Ok(());
        };
        for (at, run) in self.pieces[index].runs_from(first) {
            sequence.move_in(run, &bytes[at as usize * self.page_bytes..])?;
        }
        *left = index;
        self.moved += 1;
        if index == 0 {
            self.way = Way::Back;
        }
        Ok(())
    }
}

/// What to do next with an image.
enum Next {
    Write(usize),
    Read(usize),
}

impl Shared {
    /// Moves one piece of `image`, copied through `memory`.
    pub(super) fn advance(&self, image: &Mutex<Image>, memory: &mut Aligned) -> Moved {
        // Not in the `match`, which would hold the lock.
        let next = locked(image).next();
        match next {
            None => Moved::Nothing,
            Some(Next::Write(index)) => self.write(image, index, memory),
            Some(Next::Read(index)) => self.read(image, index, memory),
        }
    }

    fn write(&self, image: &Mutex<Image>, index: usize, memory: &mut Aligned) -> Moved {
        let copied = locked(image).copy_piece(index, memory.bytes_mut());
        let (place, bytes) = match copied {
            None => return Moved::Nothing,
            Some(Ok(copied)) => copied,
            Some(Err(_)) => {
                self.lose_for_memory(&mut locked(image));
                return Moved::Nothing;
            }
        };
        let piece = &memory.bytes()[..bytes];
        let checksum = xxh3_128(piece);
        let written = self.device.write(self.offset(place), piece);
        let mut image = locked(image);
        if let Err(error) = written {
            return self.note_failure(&mut image, |status| &mut status.failed_writes, &error);
        }
        self.note_used(place);
        // It may have been given up meanwhile.
        if !matches!(image.next(), Some(Next::Write(next)) if next == index) {
            return Moved::Nothing;
        }
        if image.note_written(index, checksum).is_err() {
            self.lose_for_memory(&mut image);
            return Moved::Nothing;
        }
        let mut status = self.status();
        status.written_bytes += bytes as u64;
        status.left += u64::from(image.way == Way::Out);
        Moved::Out(bytes)
    }

    fn read(&self, image: &Mutex<Image>, index: usize, memory: &mut Aligned) -> Moved {
        let (place, pages, checksum) = {
            let image = locked(image);
            let (Some(piece), Way::Returning { first, .. }) = (image.pieces.get(index), &image.way)
            else {
                return Moved::Nothing;
            };
            let pages = match piece.pages_from(first) {
                0 => 0,
                _ => piece.pages() as usize,
            };
            (piece.place, pages * image.page_bytes, piece.checksum)
        };
        // What groups have need not be read.
        let read = match pages {
            0 => Ok(()),
            bytes => {
                let piece = &mut memory.bytes_mut()[..bytes];
                let read = self.device.read(self.offset(place), piece);
                read.and_then(|()| match xxh3_128(piece) == checksum {
                    true => Ok(()),
                    false => Err(io::Error::other("what was read is not what was written")),
                })
            }
        };
        let mut image = locked(image);
        if let Err(error) = read {
            return self.note_failure(&mut image, |status| &mut status.failed_reads, &error);
        }
        if !matches!(image.next(), Some(Next::Read(next)) if next == index) {
            return Moved::Nothing;
        }
        if image.place_read(index, memory.bytes()).is_err() {
            self.lose_for_memory(&mut image);
            return Moved::Nothing;
        }
        let mut status = self.status();
        status.read_bytes += pages as u64;
        status.returned += u64::from(image.way == Way::Back);
        Moved::In(pages)
    }

    /// A write or a read has failed: nothing of the sequence is of use.
    fn note_failure(
        &self,
        image: &mut Image,
        count: fn(&mut SwapStatus) -> &mut u64,
        error: &io::Error,
    ) -> Moved {
        // What was given up meanwhile is nobody's loss.
        if image.sequence.is_some() {
            self.lose(image);
            let mut status = self.status();
            *count(&mut status) += 1;
            status.failure = Some(error.to_string());
        }
        Moved::Nothing
    }

    fn lose_for_memory(&self, image: &mut Image) {
        self.lose(image);
        self.status().short_of_memory += 1;
    }

    /// Lets go of the pages of `image` and of its room in the file (W3).
    fn lose(&self, image: &mut Image) {
        image.way = Way::Failed;
        image.sequence = None;
        let pieces = std::mem::take(&mut image.pieces);
        self.give_back(pieces.into_iter().map(|piece| piece.place));
    }
}

impl Image {
    fn next(&self) -> Option<Next> {
        self.sequence.as_ref()?;
        match &self.way {
            Way::Leaving(done) => Some(Next::Write(*done)),
            Way::Returning { left, .. } => Some(Next::Read(left.checked_sub(1)?)),
            Way::Out | Way::Back | Way::Failed => None,
        }
    }
}
