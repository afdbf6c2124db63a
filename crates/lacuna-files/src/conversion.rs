//! Tensors that are made of others: weights in a form that cannot be computed from where it is mapped.
//!
//! A conversion costs nothing until its tensor is asked for. What it makes is kept as long as anybody
//! has the tensor, so whoever goes through a file tensor by tensor never holds more than one.

use std::collections::TryReserveError;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::mapping::{Mapping, WeakMapping};

/// Why a tensor cannot be made of those it is stored as.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConversionError {
    /// The system refuses memory for it.
    #[error("there is not enough memory to convert it: {0}; use a smaller model")]
    OutOfMemory(#[from] TryReserveError),
    /// The system refuses a thread.
    #[error("the system refuses a thread to convert it ({0}); end other programs")]
    NoThread(std::io::ErrorKind),
    /// Tensors that are not what their shapes were checked to be, as when a file is written while it is read.
    #[error(
        "what it is stored as is not as it was when the file was opened; leave the file as it is and load it \
         again, and report this if it comes back"
    )]
    Broken,
    /// A number that is none, or is infinite.
    #[error(
        "row {row} of `{part}` holds a value that is not finite; the file is damaged, download it again"
    )]
    NotFinite {
        /// The tensor it is in.
        part: String,
        /// The row of weights it is for.
        row: usize,
    },
    /// A scale beyond what blocks of weights can have.
    #[error(
        "row {row} of `{part}` holds a scale beyond 65504; the file is damaged, download it again"
    )]
    ScaleTooLarge {
        /// The tensor it is in.
        part: String,
        /// The row of weights it is for.
        row: usize,
    },
    /// A zero point other than the one that the description calls for.
    #[error(
        "row {row} of `{part}` holds the zero point {found}, and config.json says that all are {expected}; \
         correct `sym` in config.json"
    )]
    ZeroPoint {
        /// The tensor it is in.
        part: String,
        /// The row of weights it is for.
        row: usize,
        /// What it holds.
        found: i32,
        /// What it should hold.
        expected: i32,
    },
    /// A column is said to be of a group that there is not, or not of the one where it lies.
    #[error("`{part}` says that column {column} is of group {found}, and {expected} is needed")]
    Group {
        /// The tensor that says it.
        part: String,
        /// The column of weights.
        column: usize,
        /// The group.
        found: i32,
        /// Which would do.
        expected: String,
    },
}

/// Makes the rows of a matrix, or of several one after another.
pub(crate) trait Rows: fmt::Debug + Send + Sync {
    /// What is the same for all rows, checked before the first is made.
    fn check(&self) -> Result<(), ConversionError> {
        Ok(())
    }

    /// Writes row `row` in the blocks of the tensor's type.
    fn write(&self, row: usize, out: &mut [u8]) -> Result<(), ConversionError>;
}

/// How the bytes of a tensor are made.
#[derive(Debug)]
pub(crate) struct Conversion {
    form: &'static str,
    rows: usize,
    row_bytes: usize,
    source: Box<dyn Rows>,
    made: Mutex<WeakMapping>,
}

/// Bytes below which starting a thread takes longer than what it would do.
const WORTH_A_THREAD: usize = 1 << 20;

impl Conversion {
    /// `None` when the whole is larger than any memory.
    pub(crate) fn new(
        form: &'static str,
        rows: usize,
        row_bytes: usize,
        source: Box<dyn Rows>,
    ) -> Option<Self> {
        rows.checked_mul(row_bytes)?;
        Some(Self {
            form,
            rows,
            row_bytes,
            source,
            made: Mutex::default(),
        })
    }

    /// What the weights are stored as, for people.
    pub(crate) fn form(&self) -> &'static str {
        self.form
    }

    /// Bytes of the result.
    pub(crate) fn bytes(&self) -> usize {
        self.rows * self.row_bytes
    }

    /// The result: made now, unless somebody still has it.
    pub(crate) fn convert(&self) -> Result<Mapping, ConversionError> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapping) = made.upgrade() {
            return Ok(mapping);
        }
        let mapping = Mapping::from(self.make()?);
        *made = mapping.downgrade();
        Ok(mapping)
    }

    /// Bytes of the result, if somebody has it.
    pub(crate) fn held_bytes(&self) -> usize {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.upgrade().map_or(0, |_| self.bytes())
    }

    fn make(&self) -> Result<Vec<u8>, ConversionError> {
        self.source.check()?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(self.bytes())?;
        bytes.resize(self.bytes(), 0);
        if bytes.is_empty() {
            return Ok(bytes);
        }
        let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let parts = processors.min(self.bytes().div_ceil(WORTH_A_THREAD));
        let rows = self.rows.div_ceil(parts);
        thread::scope(|scope| {
            let parts = bytes.chunks_mut(rows * self.row_bytes).enumerate();
            let start = |(part, out)| {
                let make = move || self.part(part * rows, out);
                thread::Builder::new().spawn_scoped(scope, make)
            };
            let started: Vec<_> = parts.map(start).collect();
            let results = started.into_iter().map(|thread| match thread {
                // Whoever serves other models goes on without this one.
                Ok(thread) => thread.join().unwrap_or(Err(ConversionError::Broken)),
                Err(error) => Err(ConversionError::NoThread(error.kind())),
            });
            // All are waited for: a scope panics for a thread that did and that nobody waited for.
            results.fold(Ok(()), Result::and)
        })?;
        Ok(bytes)
    }

    /// Rows from `first` on, as many as `out` holds.
    fn part(&self, first: usize, out: &mut [u8]) -> Result<(), ConversionError> {
        let mut rows = out.chunks_mut(self.row_bytes).zip(first..);
        rows.try_for_each(|(out, row)| self.source.write(row, out))
    }
}
