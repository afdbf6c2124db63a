//! Rows of tables that are in files: those that a pass asks for are read at once, and stay until others need the room.
//!
//! ```text
//! the ring:  ... | read, the oldest leave first | asked for by this pass | read ahead, for the next one | free ...
//! ```
//!
//! Rows lie in the order in which reading them began, so that their memory is a ring: a row that is asked for again
//! and again leaves too, once in as many reads as there is room for rows, which is the price of lists without gaps.

use std::collections::{HashMap, VecDeque};

use serde::Serialize;

use lacuna_files::reader::{Extent, FileReader, Finished, Loaded, ReadError, Ring};

/// Rows that are read ahead of a table, at most: of two tables and for two passes they are less than there is room for.
pub(crate) const ROWS_AHEAD: usize = 128;

/// How rows of tables that are in files have been had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct RowReads {
    /// Rows that passes have asked for.
    pub asked: u64,
    /// Those of them that were there, or were being read for somebody else.
    pub found: u64,
    /// Rows that were read, ahead of use or when they were asked for.
    pub read: u64,
    /// Bytes of files that this took.
    pub read_bytes: u64,
}

/// A table in a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table<'a> {
    /// Its number among the program's tensors.
    pub(super) number: usize,
    /// All its bytes.
    pub(super) extent: &'a Extent,
    /// Bytes of a row.
    pub(super) row_bytes: usize,
}

impl Table<'_> {
    fn row(&self, row: u32) -> Extent {
        let start = self.extent.range.start + u64::from(row) * self.row_bytes as u64;
        Extent {
            file: self.extent.file.clone(),
            range: start..start + self.row_bytes as u64,
        }
    }
}

/// Rows in memory, and those on their way there.
#[derive(Debug)]
pub(super) struct Rows {
    reader: FileReader,
    ring: Ring,
    /// In the order of the ring.
    kept: VecDeque<Kept>,
    /// The number of the first, counted over all that have ever been read.
    first: u64,
    /// The numbers of rows, by table and row.
    numbers: HashMap<(usize, u32), u64>,
    reads: RowReads,
}

#[derive(Debug)]
struct Kept {
    /// Table and row.
    key: (usize, u32),
    slot: Slot,
}

/// What there is of something that is read.
#[derive(Debug)]
pub(super) enum Slot {
    Reading,
    Read(Loaded),
    Failed(ReadError),
}

impl From<Result<Loaded, ReadError>> for Slot {
    fn from(result: Result<Loaded, ReadError>) -> Self {
        match result {
            Ok(loaded) => Self::Read(loaded),
            Err(error) => Self::Failed(error),
        }
    }
}

impl Rows {
    /// None yet, and room for those that `ring` holds.
    pub(super) fn new(reader: FileReader, ring: Ring) -> Self {
        Self {
            reader,
            ring,
            kept: VecDeque::new(),
            first: 0,
            numbers: HashMap::new(),
            reads: RowReads::default(),
        }
    }

    /// Forgets all, and has room for those that `ring` holds from now on.
    pub(super) fn replace(&mut self, ring: Ring) {
        self.reader.abandon();
        self.first += self.kept.len() as u64;
        self.kept.clear();
        self.numbers.clear();
        self.ring = ring;
    }

    pub(super) fn reads(&self) -> RowReads {
        self.reads
    }

    /// Gives each of `rows` to `each`, in order, with its place among them: all that are missing, or as many as there
    /// is room for, are asked for before any is waited for.
    ///
    /// # Errors
    /// When a row cannot be read; the next time it is asked for again.
    pub(super) fn each(
        &mut self,
        table: Table<'_>,
        rows: &[u32],
        mut each: impl FnMut(usize, &[u8]),
    ) -> Result<(), ReadError> {
        let mut done = 0;
        while done < rows.len() {
            let end = done + self.ask(table, &rows[done..]);
            for (index, &row) in (done..end).zip(&rows[done..end]) {
                each(index, self.wait((table.number, row))?);
            }
            done = end;
        }
        Ok(())
    }

    /// Asks for rows that a pass will need after this one, as far as nothing is in the way.
    pub(super) fn ahead(&mut self, table: Table<'_>, rows: &[u32]) {
        let mut needed = u64::MAX;
        for &row in rows.iter().take(ROWS_AHEAD) {
            match self.number(table, row, needed) {
                Some((number, _)) => needed = needed.min(number),
                None => return,
            }
        }
    }

    /// Asks for the first of `rows`: as many as there is room for at once, which is one at least.
    fn ask(&mut self, table: Table<'_>, rows: &[u32]) -> usize {
        let mut needed = u64::MAX;
        for (count, &row) in rows.iter().enumerate() {
            let Some((number, found)) = self.number(table, row, needed) else {
                return count;
            };
            needed = needed.min(number);
            self.reads.asked += 1;
            self.reads.found += u64::from(found);
        }
        rows.len()
    }

    /// The number of a row, and whether it had one. It is asked for if it had none, in the room of the oldest rows;
    /// `None` if that takes one from `needed` on.
    fn number(&mut self, table: Table<'_>, row: u32, needed: u64) -> Option<(u64, bool)> {
        let key = (table.number, row);
        if let Some(&number) = self.numbers.get(&key) {
            return Some((number, true));
        }
        let extent = table.row(row);
        let bytes = extent.buffer_bytes();
        let buffer = loop {
            if let Some(buffer) = self.ring.take(bytes) {
                break buffer;
            }
            assert!(!self.kept.is_empty(), "the ring holds a row");
            if self.first >= needed {
                return None;
            }
            self.drop_oldest();
        };
        let number = self.first + self.kept.len() as u64;
        self.reader.begin(number, extent, buffer);
        self.kept.push_back(Kept {
            key,
            slot: Slot::Reading,
        });
        self.numbers.insert(key, number);
        self.reads.read += 1;
        self.reads.read_bytes += bytes as u64;
        Some((number, false))
    }

    /// Waits for a row that has been asked for.
    fn wait(&mut self, key: (usize, u32)) -> Result<&[u8], ReadError> {
        let number = self.numbers[&key];
        let index = (number - self.first) as usize;
        while matches!(self.kept[index].slot, Slot::Reading) {
            self.take_one();
        }
        match &self.kept[index].slot {
            Slot::Read(bytes) => Ok(bytes),
            Slot::Failed(error) => {
                self.numbers.remove(&key);
                Err(error.clone())
            }
            Slot::Reading => unreachable!("it was waited for"),
        }
    }

    fn drop_oldest(&mut self) {
        // Memory that is being read to is not to be had yet.
        while matches!(self.kept.front().map(|it| &it.slot), Some(Slot::Reading)) {
            self.take_one();
        }
        if let Some(Kept { key, .. }) = self.kept.pop_front() {
            if self.numbers.get(&key) == Some(&self.first) {
                self.numbers.remove(&key);
            }
            self.first += 1;
        }
    }

    /// Waits for any row, and enters it.
    fn take_one(&mut self) {
        let finished = self.reader.wait();
        let Finished { number, result } = finished.expect("a row that was asked for is finished");
        let kept = self.kept.get_mut((number - self.first) as usize);
        kept.expect("a row stays until it is read").slot = result.into();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use lacuna_files::Mapping;
    use lacuna_files::reader::faults::{Fault, FaultyDevice};
    use lacuna_files::reader::{Caching, ReadFile, ReadThreads};
    use proptest::prelude::*;

    use super::*;

    const ROW: usize = 700;
    const ROWS: usize = 60;
    const START: u64 = 1234;

    /// A file with a table of rows that differ.
    struct Subject {
        bytes: Vec<u8>,
        extent: Extent,
        _file: tempfile::NamedTempFile,
    }

    impl Subject {
        fn new() -> Self {
            let bytes = (0..START as usize + ROW * ROWS).map(|at| (at * 31 + at / 255) as u8);
            let bytes: Vec<u8> = bytes.collect();
            let mut file = tempfile::NamedTempFile::new().expect("a scratch file");
            file.write_all(&bytes).expect("room for it");
            let mapping = Mapping::open(file.path()).expect("a file");
            let opened = ReadFile::open(&mapping, Caching::Avoided).expect("it opens");
            Self {
                extent: Extent {
                    file: opened.expect("it is a file"),
                    range: START..bytes.len() as u64,
                },
                bytes,
                _file: file,
            }
        }

        fn table(&self) -> Table<'_> {
            Table {
                number: 3,
                extent: &self.extent,
                row_bytes: ROW,
            }
        }

        fn row(&self, row: u32) -> &[u8] {
            &self.bytes[START as usize + row as usize * ROW..][..ROW]
        }
    }

    fn rows(pages: usize, every: u64, fault: Fault) -> Rows {
        let threads = ReadThreads::new().expect("threads");
        let device = FaultyDevice::new(Box::new(threads), every, fault);
        let ring = Ring::new(pages * 4096).expect("memory");
        Rows::new(FileReader::with(Box::new(device)), ring)
    }

    #[test]
    fn rows_that_were_read_ahead_or_before_are_not_read_again() {
        let subject = Subject::new();
        let mut rows = rows(64, 2, Fault::Delay);
        let nothing = |_: usize, _: &[u8]| {};
        rows.each(subject.table(), &[1, 2, 1, 3], nothing)
            .expect("a whole file");
        rows.ahead(subject.table(), &[3, 9, 10]);
        let reads = rows.reads();
        assert_eq!((reads.asked, reads.found, reads.read), (4, 1, 5));
        rows.each(subject.table(), &[9, 10, 2], nothing)
            .expect("a whole file");
        let reads = rows.reads();
        assert_eq!((reads.asked, reads.found, reads.read), (7, 4, 5));
        assert!(reads.read_bytes <= reads.read * 8192);
    }

    #[test]
    fn a_row_that_cannot_be_read_is_asked_for_again() {
        let subject = Subject::new();
        let mut rows = rows(64, 3, Fault::Fail);
        let mut found = Vec::new();
        let all = [5, 6, 7, 8];
        let failed = rows.each(subject.table(), &all, |index, _| found.push(index));
        assert!(failed.is_err_and(|error| error.to_string().contains("the disk is broken")));
        assert_eq!(found, [0, 1]);
        rows.each(subject.table(), &all, |index, bytes| {
            assert_eq!(bytes, subject.row(all[index]));
        })
        .expect("only each third read fails");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Whatever is asked for in a ring of whatever size, it is what the file has.
        #[test]
        fn rows_are_those_of_the_file(
            pages in 2usize..20,
            passes in prop::collection::vec(
                (prop::collection::vec(0..ROWS as u32, 0..30), prop::collection::vec(0..ROWS as u32, 0..30)),
                1..8,
            ),
            which in 0usize..3,
        ) {
            let subject = Subject::new();
            let fault = [Fault::Shorten, Fault::Delay, Fault::Reorder][which];
            let mut rows = rows(pages, 2, fault);
            for (wanted, next) in passes {
                let mut given = 0;
                let read = rows.each(subject.table(), &wanted, |index, bytes| {
                    assert_eq!(index, given, "in order");
                    assert_eq!(bytes, subject.row(wanted[index]));
                    given += 1;
                });
                prop_assert!(read.is_ok());
                prop_assert_eq!(given, wanted.len());
                rows.ahead(subject.table(), &next);
            }
        }
    }
}
