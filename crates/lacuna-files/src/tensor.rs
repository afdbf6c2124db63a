//! Tensors of a model file: a name, a shape, an element type, and bytes inside a mapping.
//!
//! [`Tensors`] is the table that every file format fills and every architecture reads. Nothing is
//! copied: a [`Tensor`] holds a reference to the mapping and a range within it. Only what is stored in
//! a form that nothing computes from is converted, once, when it is asked for.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::conversion::{Conversion, ConversionError};
use super::mapping::Mapping;
use lacuna_kernels::DType;

/// Tensors of a file at most, each of which takes some hundred bytes of memory beside the file's. The largest
/// published models have some hundred thousand, in many files.
pub(super) const TENSOR_LIMIT: usize = 1 << 20;

/// Why a model cannot have the tensor it asks for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model has no tensor of this name.
    #[error("tensor `{name}` is missing; the file is incomplete or of another architecture")]
    Missing {
        /// The name asked for.
        name: String,
    },
    /// The tensor exists in an element type that cannot be computed with.
    #[error(
        "tensor `{name}` has type {found}, which is not supported; convert the model to one of {all}",
        all = DType::names().join(", ")
    )]
    UnsupportedType {
        /// The tensor's name.
        name: String,
        /// Its type as the file calls it.
        found: String,
    },
    /// The tensor's shape contradicts the model's metadata.
    #[error(
        "tensor `{name}` has shape {found:?} where {expected:?} is needed; the file is damaged or mislabelled"
    )]
    Shape {
        /// The tensor's name.
        name: String,
        /// What the architecture needs, outermost dimension first.
        expected: Vec<usize>,
        /// What the file has, outermost dimension first.
        found: Vec<usize>,
    },
    /// The tensor is stored in a form that must be converted, and that fails.
    #[error("tensor `{name}`: {source}")]
    Conversion {
        /// The tensor's name.
        name: String,
        /// Why.
        source: ConversionError,
    },
}

/// One tensor: shape, element type, and its bytes in a mapped file. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tensor {
    name: Arc<str>,
    dtype: DType,
    shape: Arc<[usize]>,
    data: Mapping,
    range: Range<usize>,
}

impl Tensor {
    /// A tensor in memory, made of what files have.
    ///
    /// # Panics
    /// When `bytes` are not what shape and element type call for.
    pub fn in_memory(name: &str, dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Self {
        let (columns, rows) = shape.split_last().map_or((1, &[][..]), |(c, r)| (*c, r));
        let row_bytes = dtype.row_bytes(columns).expect("rows of whole blocks");
        let needed = rows.iter().product::<usize>() * row_bytes;
        assert_eq!(bytes.len(), needed, "bytes of {shape:?} in {dtype}");
        Self {
            name: name.into(),
            dtype,
            shape: shape.into(),
            range: 0..bytes.len(),
            data: Mapping::from(bytes),
        }
    }

    /// The name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How elements are stored.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Dimensions, outermost first: a matrix is `[rows, cols]`, and a row is contiguous.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The bytes, in file order; exactly what shape and element type call for.
    pub fn bytes(&self) -> &[u8] {
        &self.data[self.range.clone()]
    }

    /// Copies the bytes from `start` on, counted from the tensor's first, into `out`: see
    /// [`Mapping::read_at`].
    ///
    /// # Errors
    /// As there, and [`io::ErrorKind::UnexpectedEof`] beyond the tensor's end.
    pub fn read_at(&self, start: usize, out: &mut [u8]) -> io::Result<()> {
        let end = start.checked_add(out.len());
        match end.is_some_and(|end| end <= self.range.len()) {
            true => self.data.read_at(self.range.start + start, out),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// These elements, or some of their rows, as `bytes` hold them that were read from the file.
    ///
    /// # Panics
    /// When `bytes` are not what the shape and the element type call for.
    #[must_use]
    pub fn read_as(&self, shape: &[usize], bytes: Mapping) -> Self {
        let (columns, rows) = shape.split_last().map_or((1, &[][..]), |(c, r)| (*c, r));
        let row_bytes = self.dtype.row_bytes(columns).expect("rows of whole blocks");
        let needed = rows.iter().product::<usize>() * row_bytes;
        assert_eq!(bytes.len(), needed, "bytes of {shape:?} in {}", self.dtype);
        Self {
            name: Arc::clone(&self.name),
            dtype: self.dtype,
            shape: shape.into(),
            range: 0..bytes.len(),
            data: bytes,
        }
    }

    /// Where in its mapping the bytes lie.
    pub fn file_range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The file (or memory) the bytes lie in.
    pub fn mapping(&self) -> &Mapping {
        &self.data
    }

    /// Asks for the bytes to be read and mapped by huge pages: see [`Mapping::prefer_huge_pages`].
    pub fn prefer_huge_pages(&self) {
        self.data.prefer_huge_pages(self.range.clone());
    }

    /// Whether the bytes start at a multiple of `alignment`, so that they can be viewed in place.
    pub fn is_aligned(&self, alignment: usize) -> bool {
        self.bytes().as_ptr().addr().is_multiple_of(alignment)
    }
}

/// How a tensor is stored, as far as the file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// A type that can be computed with.
    Known(DType),
    /// Another type, by its name in the file.
    Other(Box<str>),
}

impl Storage {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Known(dtype) => dtype.name(),
            Self::Other(name) => name,
        }
    }
}

/// What a parser knows of a tensor; its range has been checked against the mapping.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) name: Arc<str>,
    pub(super) storage: Storage,
    pub(super) shape: Arc<[usize]>,
    pub(super) contents: Contents,
}

/// Where the bytes of a tensor come from.
#[derive(Clone, Debug)]
pub(super) enum Contents {
    /// A file.
    Mapped { data: Mapping, range: Range<usize> },
    /// Other tensors.
    Converted(Arc<Conversion>),
}

impl Contents {
    fn len(&self) -> usize {
        match self {
            Self::Mapped { range, .. } => range.len(),
            Self::Converted(conversion) => conversion.bytes(),
        }
    }

    fn form(&self) -> Option<&'static str> {
        match self {
            Self::Mapped { .. } => None,
            Self::Converted(conversion) => Some(conversion.form()),
        }
    }
}

/// All tensors of a model, over all its files, in file order.
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    entries: Vec<Entry>,
    /// Positions in `entries`, sorted by name.
    by_name: Vec<usize>,
    /// What the tensors lie in, each once.
    mappings: Vec<Mapping>,
    /// Where the bytes are that tensors are converted from.
    sources: Vec<(Mapping, Range<usize>)>,
}

/// What [`Tensors::iter`] says of a tensor, whether or not its type is supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary<'a> {
    /// The name in the file.
    pub name: &'a str,
    /// The element type's name in lower case.
    pub type_name: &'a str,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Bytes: in the file, or of memory where it is converted.
    pub bytes: usize,
    /// What it is stored as in the file, where it is converted when it is loaded.
    pub converted_from: Option<&'static str>,
}

/// Tensors of one element type that come from files in one way, for `inspect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypeTotal {
    /// The element type's name in lower case.
    pub type_name: String,
    /// What they are stored as in the file, where they are converted when they are loaded.
    pub converted_from: Option<&'static str>,
    /// How many tensors.
    pub tensors: usize,
    /// How many elements in all.
    pub elements: u64,
    /// How many bytes in all.
    pub bytes: u64,
}

impl TypeTotal {
    /// Counts and bytes of `tensors` by element type, largest first.
    pub fn of<'a>(tensors: impl IntoIterator<Item = Summary<'a>>) -> Vec<Self> {
        let mut totals: Vec<Self> = Vec::new();
        for tensor in tensors {
            let known = totals.iter().position(|total| {
                total.type_name == tensor.type_name && total.converted_from == tensor.converted_from
            });
            let index = known.unwrap_or_else(|| {
                totals.push(Self::none(&tensor));
                totals.len() - 1
            });
            let total = &mut totals[index];
            total.tensors += 1;
            // One tensor's fit, since parsers check that; those of many without bytes need not.
            let elements = tensor.shape.iter().map(|&dim| dim as u64).product();
            total.elements = total.elements.saturating_add(elements);
            total.bytes += tensor.bytes as u64;
        }
        totals.sort_by(|a, b| {
            b.bytes
                .cmp(&a.bytes)
                .then_with(|| a.type_name.cmp(&b.type_name))
                .then_with(|| a.converted_from.cmp(&b.converted_from))
        });
        totals
    }

    fn none(like: &Summary<'_>) -> Self {
        Self {
            type_name: like.type_name.to_owned(),
            converted_from: like.converted_from,
            tensors: 0,
            elements: 0,
            bytes: 0,
        }
    }
}

impl Tensors {
    /// Builds the table; the error is the name that occurs twice.
    pub(super) fn new(entries: Vec<Entry>) -> Result<Self, String> {
        let mut by_name: Vec<usize> = (0..entries.len()).collect();
        by_name.sort_unstable_by(|&a, &b| entries[a].name.cmp(&entries[b].name));
        let twice = by_name
            .windows(2)
            .find(|pair| entries[pair[0]].name == entries[pair[1]].name);
        match twice {
            Some(pair) => Err(entries[pair[0]].name.to_string()),
            None => Ok(Self {
                mappings: distinct(&entries),
                sources: Vec::new(),
                entries,
                by_name,
            }),
        }
    }

    /// The table of several files' tensors together; the error is the name that occurs twice.
    pub(super) fn merge(parts: impl IntoIterator<Item = Self>) -> Result<Self, String> {
        Self::new(parts.into_iter().flat_map(|part| part.entries).collect())
    }

    /// The tensors of this table, some of which others take the place of.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The table with `entries`, some of which are made of `sources`; the error is the name that occurs
    /// twice.
    pub(super) fn with_entries<'a>(
        &self,
        entries: Vec<Entry>,
        sources: impl Iterator<Item = &'a Entry>,
    ) -> Result<Self, String> {
        let sources = sources.filter_map(|source| match &source.contents {
            Contents::Mapped { data, range } => Some((data.clone(), range.clone())),
            Contents::Converted(_) => None,
        });
        Ok(Self {
            mappings: self.mappings.clone(),
            sources: sources.collect(),
            ..Self::new(entries)?
        })
    }

    /// The table with tensors of `other` behind its own, under the names that `rename` gives them; those that it gives none are
    /// left out.
    ///
    /// # Errors
    /// The name that occurs twice.
    pub(super) fn beside(
        &self,
        other: &Self,
        rename: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let renamed = other.entries.iter().filter_map(|entry| {
            let name = rename(&entry.name)?.into();
            Some(Entry {
                name,
                ..entry.clone()
            })
        });
        let entries = self.entries.iter().cloned().chain(renamed).collect();
        Ok(Self {
            mappings: [&*self.mappings, &other.mappings].concat(),
            sources: [&*self.sources, &other.sources].concat(),
            ..Self::new(entries)?
        })
    }

    /// Lets go of the memory behind what tensors are converted from, which stays mapped. Worth a call when
    /// all that is needed has been converted.
    pub fn release_sources(&self) {
        for (data, range) in &self.sources {
            data.release(range.clone());
        }
    }

    /// The files (or memory) the tensors lie in, each once.
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none, as in a vocabulary-only file.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a tensor of this name exists, in whatever type.
    pub fn contains(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The outermost dimension of the tensor of this name, in whatever type; `None` when the model has
    /// none.
    pub fn rows(&self, name: &str) -> Option<usize> {
        self.find(name)?.shape.first().copied()
    }

    /// The type in which the tensor of this name is had, which nothing is converted for; `None` when the model has
    /// none.
    ///
    /// # Errors
    /// [`Error::UnsupportedType`] when it is stored in a type that cannot be computed with.
    pub fn dtype(&self, name: &str) -> Result<Option<DType>, Error> {
        self.find(name).map(dtype).transpose()
    }

    /// Bytes of memory of the tensors that were converted and that somebody has now.
    #[must_use]
    pub fn converted_bytes(&self) -> usize {
        let held = self.entries.iter().map(|entry| match &entry.contents {
            Contents::Mapped { .. } => 0,
            Contents::Converted(conversion) => conversion.held_bytes(),
        });
        held.sum()
    }

    /// The tensor of this name, or `None` when the model has none. Converts it where it is stored in a
    /// form that must be, unless somebody has it already.
    ///
    /// # Errors
    /// [`Error::UnsupportedType`] when it is stored in a type that cannot be computed with, and
    /// [`Error::Conversion`].
    pub fn get(&self, name: &str) -> Result<Option<Tensor>, Error> {
        self.find(name).map(tensor).transpose()
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`Error::Missing`], or as [`get`](Self::get).
    pub fn require(&self, name: &str) -> Result<Tensor, Error> {
        self.get(name)?.ok_or_else(|| Error::Missing {
            name: name.to_owned(),
        })
    }

    /// The tensor of this name, which must have this shape (outermost dimension first).
    ///
    /// # Errors
    /// [`Error::Shape`], or as [`require`](Self::require).
    pub fn require_shape(&self, name: &str, expected: &[usize]) -> Result<Tensor, Error> {
        let tensor = self.require(name)?;
        if tensor.shape() == expected {
            return Ok(tensor);
        }
        Err(Error::Shape {
            name: name.to_owned(),
            expected: expected.to_vec(),
            found: tensor.shape().to_vec(),
        })
    }

    /// The elements of a tensor of whole numbers of 64 or 32 bits, or `None` when the model has no tensor of this name.
    ///
    /// # Errors
    /// [`Error::UnsupportedType`] for a tensor of anything else.
    pub fn integers(&self, name: &str) -> Result<Option<Vec<i64>>, Error> {
        let Some(entry) = self.find(name) else {
            return Ok(None);
        };
        match (entry.storage.name(), &entry.contents) {
            ("i64", Contents::Mapped { data, range }) => {
                let words = data[range.clone()].as_chunks().0.iter();
                Ok(Some(words.copied().map(i64::from_le_bytes).collect()))
            }
            ("i32", Contents::Mapped { data, range }) => {
                let words = data[range.clone()].as_chunks().0.iter();
                let numbers = words.copied().map(i32::from_le_bytes);
                Ok(Some(numbers.map(i64::from).collect()))
            }
            (found, _) => Err(Error::UnsupportedType {
                name: name.to_owned(),
                found: found.to_owned(),
            }),
        }
    }

    /// Every tensor in file order, supported or not.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Summary<'_>> {
        self.entries.iter().map(|entry| Summary {
            name: &entry.name,
            type_name: entry.storage.name(),
            shape: &entry.shape,
            bytes: entry.contents.len(),
            converted_from: entry.contents.form(),
        })
    }

    /// Counts and bytes by element type, largest first.
    pub fn by_type(&self) -> Vec<TypeTotal> {
        TypeTotal::of(self.iter())
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.entries
            .iter()
            .map(|entry| entry.contents.len() as u64)
            .sum()
    }

    pub(super) fn find(&self, name: &str) -> Option<&Entry> {
        let at = self
            .by_name
            .binary_search_by(|&i| (*self.entries[i].name).cmp(name))
            .ok()?;
        Some(&self.entries[self.by_name[at]])
    }
}

/// The mappings of `entries`, each once. Tensors of a file come one after another.
fn distinct(entries: &[Entry]) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for entry in entries {
        if let Contents::Mapped { data, .. } = &entry.contents
            && !mappings.iter().rev().any(|known| known.is(data))
        {
            mappings.push(data.clone());
        }
    }
    mappings
}

fn dtype(entry: &Entry) -> Result<DType, Error> {
    match &entry.storage {
        Storage::Known(dtype) => Ok(*dtype),
        Storage::Other(found) => Err(Error::UnsupportedType {
            name: entry.name.to_string(),
            found: found.to_string(),
        }),
    }
}

fn tensor(entry: &Entry) -> Result<Tensor, Error> {
    let dtype = dtype(entry)?;
    let (data, range) = match &entry.contents {
        Contents::Mapped { data, range } => (data.clone(), range.clone()),
        Contents::Converted(conversion) => {
            let made = conversion.convert();
            let data = made.map_err(|source| Error::Conversion {
                name: entry.name.to_string(),
                source,
            })?;
            let range = 0..data.len();
            (data, range)
        }
    };
    Ok(Tensor {
        name: Arc::clone(&entry.name),
        dtype,
        shape: Arc::clone(&entry.shape),
        data,
        range,
    })
}
