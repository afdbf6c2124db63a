//! Writing GGUF version 3: a header collected in memory, then tensors streamed in order.
//!
//! The header knows every tensor's size before the first byte is written, so a file of any size is
//! produced in one forward pass over any [`Write`].
//!
//! ```
//! use lacuna_files::{DType, Mapping, gguf};
//!
//! let mut header = gguf::Writer::new();
//! header.set("general.architecture", "demo");
//! header.tensor("ones", DType::F32, &[2, 3])?;
//! let mut body = header.begin(Vec::new())?;
//! body.tensor("ones", &[0u8; 24])?;
//! let file = gguf::File::parse(Mapping::from(body.finish()?)).unwrap();
//! assert_eq!(file.tensors().require("ones").unwrap().shape(), [2, 3]);
//! # Ok::<(), gguf::WriteError>(())
//! ```

use std::io::{self, Write};

use super::types::{Integers, ValueType, element_id};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, Metadata};
use lacuna_kernels::DType;

/// The version written.
const VERSION: u32 = 3;

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The shape cannot be stored in the element type.
    #[error("tensor `{name}` of shape {shape:?} cannot be stored as {dtype}, whose rows are multiples of {}", dtype.block_len())]
    Shape {
        /// The tensor.
        name: String,
        /// The shape, outermost first.
        shape: Vec<usize>,
        /// The element type.
        dtype: DType,
    },
    /// Tensors must be written in the order in which they were declared.
    #[error("tensor `{found}` was written where {} was declared", expected.as_deref().map_or("no more".to_owned(), |name| format!("`{name}`")))]
    Order {
        /// The next declared tensor, if there is one.
        expected: Option<String>,
        /// The tensor being written.
        found: String,
    },
    /// A tensor's data is not as long as its shape says.
    #[error("tensor `{name}` takes {expected} bytes and {found} were written")]
    Length {
        /// The tensor.
        name: String,
        /// What shape and element type call for.
        expected: u64,
        /// What was written.
        found: u64,
    },
    /// A declared tensor was never written.
    #[error("tensor `{name}` was declared and never written")]
    Unwritten {
        /// The tensor.
        name: String,
    },
    /// The output refused the bytes, for example because the disk is full.
    #[error("writing failed: {0}")]
    Io(#[from] io::Error),
}

/// Collects the header of a file to be written.
#[derive(Clone, Debug)]
pub struct Writer {
    entries: Vec<(String, Vec<u8>)>,
    tensors: Vec<Declared>,
    alignment: u32,
}

#[derive(Clone, Debug)]
struct Declared {
    name: String,
    /// GGUF's number for the element type.
    element: u32,
    shape: Vec<usize>,
    bytes: u64,
}

impl Default for Writer {
    fn default() -> Self {
        Self::new()
    }
}

impl Writer {
    /// A header without entries or tensors.
    pub fn new() -> Self {
        Self {
            entries: Vec::new(),
            tensors: Vec::new(),
            alignment: DEFAULT_ALIGNMENT,
        }
    }

    /// Sets a metadata entry, replacing one of the same key.
    pub fn set(&mut self, key: &str, value: impl IntoValue) -> &mut Self {
        let mut bytes = value.value_type().id().to_le_bytes().to_vec();
        value.encode(&mut bytes);
        match self
            .entries
            .iter_mut()
            .find(|(existing, _)| existing == key)
        {
            Some((_, existing)) => *existing = bytes,
            None => self.entries.push((key.to_owned(), bytes)),
        }
        self
    }

    /// Takes over the entries of `metadata` that say what a model is, as they are: all but those about a
    /// file, which are its alignment and its place among others.
    pub fn carry(&mut self, metadata: &Metadata) -> &mut Self {
        // Not one by one: a file may have as many as it has bytes for.
        self.entries.retain(|(key, _)| !metadata.contains(key));
        let about_model =
            |key: &str| key != ALIGNMENT_KEY && !key.starts_with(super::split::PREFIX);
        for (key, value_type, bytes) in metadata.encoded() {
            if about_model(key) {
                let value = [&value_type.id().to_le_bytes(), bytes].concat();
                self.entries.push((key.to_owned(), value));
            }
        }
        self
    }

    /// Sets the alignment of tensors in bytes, a power of two, and the entry that says so.
    ///
    /// # Panics
    /// When `alignment` is not a power of two.
    pub fn align(&mut self, alignment: u32) -> &mut Self {
        assert!(
            alignment.is_power_of_two(),
            "alignment {alignment} is not a power of two"
        );
        self.alignment = alignment;
        self.set(ALIGNMENT_KEY, alignment)
    }

    /// Declares the next tensor; `shape` has the outermost dimension first.
    ///
    /// # Errors
    /// [`WriteError::Shape`] when rows are not whole blocks or the size overflows.
    pub fn tensor(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
    ) -> Result<&mut Self, WriteError> {
        let columns = shape.last().copied().unwrap_or(1);
        let rows = shape
            .split_last()
            .map_or(&[] as &[usize], |(_, outer)| outer);
        let rows = rows
            .iter()
            .try_fold(1usize, |product, &dim| product.checked_mul(dim));
        let bytes = dtype
            .row_bytes(columns)
            .zip(rows)
            .and_then(|(row, rows)| row.checked_mul(rows));
        let Some(bytes) = bytes else {
            return Err(WriteError::Shape {
                name: name.to_owned(),
                shape: shape.to_vec(),
                dtype,
            });
        };
        let declared = Declared {
            name: name.to_owned(),
            element: element_id(dtype),
            shape: shape.to_vec(),
            bytes: bytes as u64,
        };
        self.tensors.push(declared);
        Ok(self)
    }

    /// Declares the next tensor to be a list of so many whole numbers, as [`Integers::encode`] writes them.
    pub fn integers(&mut self, name: &str, kind: Integers, count: usize) -> &mut Self {
        let (element, each) = kind.element();
        self.tensors.push(Declared {
            name: name.to_owned(),
            element,
            shape: vec![count],
            bytes: (count * each) as u64,
        });
        self
    }

    /// Bytes of the whole file once written.
    pub fn file_len(&self) -> u64 {
        let data: u64 = self
            .tensors
            .iter()
            .map(|tensor| self.padded(tensor.bytes))
            .sum();
        self.to_bytes().len() as u64 + data
    }

    /// The header alone, padded to where the data section starts: a complete file when there are no
    /// tensors.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            key.as_str().encode(&mut out);
            out.extend(value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            encode_tensor(tensor, offset, &mut out);
            offset += self.padded(tensor.bytes);
        }
        out.resize(self.padded(out.len() as u64) as usize, 0);
        out
    }

    /// Writes the header and returns the writer of tensor data.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn begin<W: Write>(self, mut out: W) -> Result<Body<W>, WriteError> {
        out.write_all(&self.to_bytes())?;
        Ok(Body {
            out,
            tensors: self.tensors.into_iter(),
            alignment: self.alignment,
        })
    }

    fn padded(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(u64::from(self.alignment))
    }
}

fn encode_tensor(tensor: &Declared, offset: u64, out: &mut Vec<u8>) {
    tensor.name.as_str().encode(out);
    out.extend((tensor.shape.len() as u32).to_le_bytes());
    for &dim in tensor.shape.iter().rev() {
        out.extend((dim as u64).to_le_bytes());
    }
    out.extend(tensor.element.to_le_bytes());
    out.extend(offset.to_le_bytes());
}

/// Writes tensor data in the order of declaration.
#[derive(Debug)]
pub struct Body<W> {
    out: W,
    tensors: std::vec::IntoIter<Declared>,
    alignment: u32,
}

impl<W: Write> Body<W> {
    /// Writes a whole tensor.
    ///
    /// # Errors
    /// [`WriteError::Order`], [`WriteError::Length`] or [`WriteError::Io`].
    pub fn tensor(&mut self, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
        self.stream(name, |out| out.write_all(bytes))
    }

    /// Writes a tensor piece by piece: `fill` writes all of its bytes to the sink it is given.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor), and what `fill` returns.
    pub fn stream(
        &mut self,
        name: &str,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), WriteError> {
        let declared = self.tensors.next();
        let Some(declared) = declared.as_ref().filter(|declared| declared.name == name) else {
            let expected = declared.map(|declared| declared.name);
            return Err(WriteError::Order {
                expected,
                found: name.to_owned(),
            });
        };
        let mut counting = Counting {
            out: &mut self.out,
            written: 0,
        };
        fill(&mut counting)?;
        let (found, expected) = (counting.written, declared.bytes);
        if found != expected {
            return Err(WriteError::Length {
                name: name.to_owned(),
                expected,
                found,
            });
        }
        let padding = expected.next_multiple_of(u64::from(self.alignment)) - expected;
        io::copy(&mut io::Read::take(io::repeat(0), padding), &mut self.out)?;
        Ok(())
    }

    /// Flushes and returns the output.
    ///
    /// # Errors
    /// [`WriteError::Unwritten`] when a declared tensor is missing, or [`WriteError::Io`].
    pub fn finish(mut self) -> Result<W, WriteError> {
        if let Some(declared) = self.tensors.next() {
            return Err(WriteError::Unwritten {
                name: declared.name,
            });
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

struct Counting<'a, W> {
    out: &'a mut W,
    written: u64,
}

impl<W: Write> Write for Counting<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A type that can be written as a metadata value: integers, `f32`, `bool`, `&str`, and slices of
/// them.
pub trait IntoValue {
    /// GGUF's type for it.
    fn value_type(&self) -> ValueType;

    /// Appends the value without its type.
    fn encode(&self, out: &mut Vec<u8>);
}

macro_rules! into_scalar {
    ($($source:ty => $value_type:ident;)*) => {$(
        impl IntoValue for $source {
            fn value_type(&self) -> ValueType {
                ValueType::$value_type
            }

            fn encode(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        }

        impl IntoValue for &[$source] {
            fn value_type(&self) -> ValueType {
                ValueType::Array
            }

            fn encode(&self, out: &mut Vec<u8>) {
                encode_array(ValueType::$value_type, self, out);
            }
        }
    )*};
}

into_scalar! {
    u8 => U8;
    i8 => I8;
    u16 => U16;
    i16 => I16;
    u32 => U32;
    i32 => I32;
    u64 => U64;
    i64 => I64;
    f32 => F32;
    f64 => F64;
}

impl IntoValue for bool {
    fn value_type(&self) -> ValueType {
        ValueType::Bool
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl IntoValue for &str {
    fn value_type(&self) -> ValueType {
        ValueType::String
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend((self.len() as u64).to_le_bytes());
        out.extend(self.as_bytes());
    }
}

impl IntoValue for &[&str] {
    fn value_type(&self) -> ValueType {
        ValueType::Array
    }

    fn encode(&self, out: &mut Vec<u8>) {
        encode_array(ValueType::String, self, out);
    }
}

impl IntoValue for &[String] {
    fn value_type(&self) -> ValueType {
        ValueType::Array
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let texts: Vec<&str> = self.iter().map(String::as_str).collect();
        encode_array(ValueType::String, &texts, out);
    }
}

fn encode_array<T: IntoValue>(element: ValueType, values: &[T], out: &mut Vec<u8>) {
    out.extend(element.id().to_le_bytes());
    out.extend((values.len() as u64).to_le_bytes());
    for value in values {
        value.encode(out);
    }
}
