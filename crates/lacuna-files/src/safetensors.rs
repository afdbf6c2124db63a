//! The safetensors format: a length, a JSON table, and one contiguous data section.
//!
//! ```text
//! u64 header length | {"name": {"dtype", "shape", "data_offsets": [start, end]}, ...} | data
//! ```
//!
//! The header is parsed here rather than with the `safetensors` crate, whose check that the table
//! fills the file (`buffer_end + 8 + header`, version 0.8) overflows on crafted offsets: it panics
//! with overflow checks, and without them accepts tensors outside the file. Errors here also name
//! the tensor. As the format demands, tensors must fill the data section without gaps or overlap.

use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::mapping::Mapping;
use super::tensor::{Contents, Entry, Storage, TENSOR_LIMIT, Tensors};
use lacuna_kernels::DType;

/// The longest header accepted, which is the limit of the reference implementation.
const HEADER_LIMIT: u64 = 100_000_000;
/// The most dimensions that a tensor is read with. Those of published models have five at most.
const DIMENSION_LIMIT: usize = 8;
/// Bytes of the length in front of the header.
const LENGTH_BYTES: usize = 8;

/// Why a safetensors file cannot be used. Messages leave out the path; the caller knows it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refuses memory for the header's lists.
    #[error("there is not enough memory for the file's header: {0}")]
    OutOfMemory(#[from] std::collections::TryReserveError),
    /// The file ends before its header does.
    #[error(
        "the file is cut off: its header takes {needed} bytes and the file has {available}; download it again"
    )]
    Truncated {
        /// Bytes the header takes, its length included.
        needed: u64,
        /// Bytes of the file.
        available: usize,
    },
    /// The header claims to be longer than any header.
    #[error(
        "not a safetensors file, or a damaged one: it claims a header of {length} bytes, over {limit}"
    )]
    HeaderTooLong {
        /// The length in the file.
        length: u64,
        /// The longest accepted.
        limit: u64,
    },
    /// The header is not the JSON it should be.
    #[error(
        "not a safetensors file, or a damaged one: its header is no table of tensors ({source})"
    )]
    Header {
        /// What the JSON parser said.
        source: serde_json::Error,
    },
    /// More tensors than any model has.
    #[error(
        "the file lists {count} tensors, and at most {limit} are read; split the model into several files"
    )]
    TooManyTensors {
        /// How many it lists.
        count: usize,
        /// The most that are read.
        limit: usize,
    },
    /// A tensor with more dimensions than any has.
    #[error("the file is damaged: tensor `{name}` has {dimensions} dimensions, more than {limit}")]
    TooManyDimensions {
        /// The tensor.
        name: String,
        /// How many it has.
        dimensions: usize,
        /// The most that are read.
        limit: usize,
    },
    /// The same tensor name twice.
    #[error("the file is damaged: tensor `{name}` occurs twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// The product of a tensor's dimensions overflows.
    #[error("the file is damaged: tensor `{name}` of shape {shape:?} is larger than any memory")]
    TensorTooLarge {
        /// The tensor.
        name: String,
        /// Its dimensions, outermost first.
        shape: Vec<u64>,
    },
    /// A tensor's range is not as long as its shape and type call for.
    #[error(
        "the file is damaged: tensor `{name}` takes {expected} bytes and its offsets span {found}"
    )]
    Length {
        /// The tensor.
        name: String,
        /// What shape and type call for.
        expected: u64,
        /// What the offsets say.
        found: u64,
    },
    /// A tensor whose end is before its start.
    #[error("the file is damaged: tensor `{name}` ends at {end}, before its start at {start}")]
    Reversed {
        /// The tensor.
        name: String,
        /// Where it starts in the data section.
        start: u64,
        /// Where it ends.
        end: u64,
    },
    /// A tensor that does not start where the one before it ended.
    #[error(
        "the file is damaged: tensor `{name}` starts at {found}, and the one before it ends at {expected}"
    )]
    Misplaced {
        /// The tensor.
        name: String,
        /// Where the data so far ends.
        expected: u64,
        /// Where the tensor starts.
        found: u64,
    },
    /// The tensors end before or after the data section does.
    #[error(
        "the file is cut off or damaged: its tensors take {expected} bytes and its data section has \
         {found}; download it again"
    )]
    DataLength {
        /// Where the last tensor ends.
        expected: u64,
        /// Bytes of the data section.
        found: usize,
    },
}

/// Parses one file. Tensors of types other than F32, F16 and BF16 are listed, and are an error when
/// asked for.
///
/// # Errors
/// [`Error`], for anything wrong with the header or any tensor out of place.
pub fn parse(data: &Mapping) -> Result<Tensors, Error> {
    let start = header_end(data)?;
    let header: Header = serde_json::from_slice(&data[LENGTH_BYTES..start])
        .map_err(|source| Error::Header { source })?;
    let mut lines = header.lines()?;
    lines.sort_by_key(|line| line.info.data_offsets);
    let mut end = 0;
    let mut entries = Vec::new();
    entries.try_reserve_exact(lines.len())?;
    for line in lines {
        let shape = dimensions(&line)?;
        check_length(&line, &shape)?;
        let range = place(&line, end)?;
        end = range.end;
        entries.push((line, shape, range));
    }
    let available = data.len() - start;
    if end != available as u64 {
        return Err(Error::DataLength {
            expected: end,
            found: available,
        });
    }
    let entries = entries
        .into_iter()
        .map(|(line, shape, range)| entry(data, start, line, shape, range));
    Tensors::new(entries.collect()).map_err(|name| Error::DuplicateTensor { name })
}

fn header_end(data: &Mapping) -> Result<usize, Error> {
    let Some(length) = data.first_chunk::<LENGTH_BYTES>() else {
        return Err(Error::Truncated {
            needed: LENGTH_BYTES as u64,
            available: data.len(),
        });
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_LIMIT {
        return Err(Error::HeaderTooLong {
            length,
            limit: HEADER_LIMIT,
        });
    }
    let needed = length + LENGTH_BYTES as u64;
    let end = usize::try_from(needed)
        .ok()
        .filter(|&end| end <= data.len());
    end.ok_or(Error::Truncated {
        needed,
        available: data.len(),
    })
}

/// The tensors of the JSON table in the order of the file, `__metadata__` left out.
struct Header {
    lines: Vec<Line>,
    /// Tensors that are not in `lines`, beyond [`TENSOR_LIMIT`].
    more: usize,
}

impl Header {
    /// Those of a file that has no more than are read.
    fn lines(self) -> Result<Vec<Line>, Error> {
        match self.more {
            0 => Ok(self.lines),
            more => Err(Error::TooManyTensors {
                count: self.lines.len() + more,
                limit: TENSOR_LIMIT,
            }),
        }
    }
}

struct Line {
    name: String,
    info: Info,
}

#[derive(Deserialize)]
struct Info {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// Dimensions as the file has them. Of those beyond [`DIMENSION_LIMIT`] only the number is kept: a header may
/// have millions.
struct Shape {
    dimensions: Vec<u64>,
    more: usize,
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Shape, A::Error> {
        let (mut dimensions, mut more) = (Vec::new(), 0);
        while dimensions.len() < DIMENSION_LIMIT {
            match sequence.next_element()? {
                Some(dimension) => dimensions.push(dimension),
                None => return Ok(Shape { dimensions, more }),
            }
        }
        while sequence.next_element::<IgnoredAny>()?.is_some() {
            more += 1;
        }
        Ok(Shape { dimensions, more })
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let (mut lines, mut more) = (Vec::new(), 0);
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else if lines.len() == TENSOR_LIMIT {
                map.next_value::<IgnoredAny>()?;
                more += 1;
            } else {
                lines.push(Line {
                    name,
                    info: map.next_value()?,
                });
            }
        }
        Ok(Header { lines, more })
    }
}

/// The dimensions as memory sizes, such that no product of any of them overflows.
fn dimensions(line: &Line) -> Result<Vec<usize>, Error> {
    let Shape { dimensions, more } = &line.info.shape;
    if *more > 0 {
        return Err(Error::TooManyDimensions {
            name: line.name.clone(),
            dimensions: dimensions.len() + more,
            limit: DIMENSION_LIMIT,
        });
    }
    let shape: Option<Vec<usize>> = dimensions
        .iter()
        .map(|&dim| usize::try_from(dim).ok())
        .collect();
    let fits = |shape: &Vec<usize>| {
        shape
            .iter()
            .try_fold(1usize, |product, &dim| product.checked_mul(dim.max(1)))
            .is_some()
    };
    shape.filter(fits).ok_or_else(|| too_large(line))
}

fn too_large(line: &Line) -> Error {
    Error::TensorTooLarge {
        name: line.name.clone(),
        shape: line.info.shape.dimensions.clone(),
    }
}

fn check_length(line: &Line, shape: &[usize]) -> Result<(), Error> {
    let (start, end) = line.info.data_offsets;
    let name = || line.name.clone();
    let found = end.checked_sub(start).ok_or_else(|| Error::Reversed {
        name: name(),
        start,
        end,
    })?;
    let Some(bytes) = element_bytes(&line.info.dtype) else {
        return Ok(());
    };
    // Rows must have a length even where there are no rows.
    let rows_fit = shape
        .iter()
        .try_fold(bytes, |product, &dim| product.checked_mul(dim.max(1)));
    rows_fit.ok_or_else(|| too_large(line))?;
    let expected = (shape.iter().product::<usize>() * bytes) as u64;
    if found == expected {
        Ok(())
    } else {
        Err(Error::Length {
            name: name(),
            expected,
            found,
        })
    }
}

fn place(line: &Line, expected: u64) -> Result<Range<u64>, Error> {
    let (start, end) = line.info.data_offsets;
    if start == expected {
        return Ok(start..end);
    }
    Err(Error::Misplaced {
        name: line.name.clone(),
        expected,
        found: start,
    })
}

/// Bytes per element of the format's whole-byte types; others are not checked, since nothing reads
/// them.
fn element_bytes(dtype: &str) -> Option<usize> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => Some(1),
        "U16" | "I16" | "F16" | "BF16" => Some(2),
        "U32" | "I32" | "F32" => Some(4),
        "U64" | "I64" | "F64" | "C64" => Some(8),
        _ => None,
    }
}

fn entry(data: &Mapping, start: usize, line: Line, shape: Vec<usize>, range: Range<u64>) -> Entry {
    let storage = match line.info.dtype.as_str() {
        "F32" => Storage::Known(DType::F32),
        "F16" => Storage::Known(DType::F16),
        "BF16" => Storage::Known(DType::Bf16),
        other => Storage::Other(other.to_lowercase().into()),
    };
    // The ranges are contiguous and end where the file does, so they fit `usize`.
    let range = start + range.start as usize..start + range.end as usize;
    Entry {
        name: line.name.into(),
        storage,
        shape: shape.into(),
        contents: Contents::Mapped {
            data: data.clone(),
            range,
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensor;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(std::iter::repeat_n(5, data));
        bytes
    }

    fn parse_header(header: &str, data: usize) -> Result<Tensors, Error> {
        parse(&Mapping::from(file(header, data)))
    }

    const SAMPLE: &str = r#"{"__metadata__":{"format":"pt"},
        "b":{"dtype":"BF16","shape":[2,3],"data_offsets":[16,28]},
        "a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},
        "i":{"dtype":"I64","shape":[1],"data_offsets":[28,36]}}"#;

    #[test]
    fn tensors_are_found_where_the_table_says() {
        let tensors = parse_header(SAMPLE, 36).unwrap();
        let b = tensors.require_shape("b", &[2, 3]).unwrap();
        assert_eq!((b.dtype(), b.bytes().len()), (DType::Bf16, 12));
        assert_eq!(b.file_range().start, 8 + SAMPLE.len() + 16);
        let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name).collect();
        assert_eq!(names, ["a", "b", "i"]);
    }

    #[test]
    fn an_unsupported_type_matters_only_when_asked_for() {
        let tensors = parse_header(SAMPLE, 36).unwrap();
        let error = tensors.get("i").unwrap_err();
        assert!(
            matches!(&error, tensor::Error::UnsupportedType { name, found } if name == "i" && found == "i64")
        );
    }

    #[test]
    fn every_truncation_is_a_typed_error() {
        let bytes = file(SAMPLE, 36);
        for length in 0..bytes.len() {
            assert!(
                parse(&Mapping::from(bytes[..length].to_vec())).is_err(),
                "{length} bytes parsed"
            );
        }
    }

    #[test]
    fn every_flipped_bit_is_an_error_or_a_readable_file() {
        let bytes = file(SAMPLE, 36);
        for position in 0..bytes.len() {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[position] ^= 1 << bit;
                read_all(&damaged);
            }
        }
    }

    fn read_all(bytes: &[u8]) {
        let Ok(tensors) = parse(&Mapping::from(bytes.to_vec())) else {
            return;
        };
        for summary in tensors.iter() {
            if let Ok(Some(tensor)) = tensors.get(summary.name) {
                assert_eq!(tensor.bytes().len(), summary.bytes);
            }
        }
        tensors.by_type();
    }

    #[test]
    fn header_lengths_in_the_billions_allocate_nothing() {
        for length in [HEADER_LIMIT + 1, 1 << 40, u64::MAX] {
            let bytes = [length.to_le_bytes().as_slice(), b"{}"].concat();
            assert!(matches!(
                parse(&Mapping::from(bytes)),
                Err(Error::HeaderTooLong { .. })
            ));
        }
        let bytes = [99_999_999u64.to_le_bytes().as_slice(), b"{}"].concat();
        assert!(matches!(
            parse(&Mapping::from(bytes)),
            Err(Error::Truncated { .. })
        ));
    }

    #[test]
    fn more_tensors_or_dimensions_than_any_model_has_are_refused() {
        let of_dimensions = |count: usize| {
            let shape = vec!["1"; count].join(",");
            let info = format!(r#"{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}"#);
            parse_header(&format!(r#"{{"t":{info}}}"#), 1)
        };
        assert!(of_dimensions(8).is_ok());
        for count in [9, 100_000] {
            assert!(matches!(
                of_dimensions(count),
                Err(Error::TooManyDimensions { name, dimensions, limit: 8 })
                    if name == "t" && dimensions == count
            ));
        }
        // Of one name, which costs less to write and is not looked at before.
        let line = r#""t":{"dtype":"U8","shape":[],"data_offsets":[0,0]}"#;
        let header = format!("{{{}}}", vec![line; TENSOR_LIMIT + 2].join(","));
        assert!(matches!(
            parse_header(&header, 0),
            Err(Error::TooManyTensors { count, limit }) if count == limit + 2
        ));
    }

    #[test]
    fn elements_of_tensors_without_bytes_are_as_many_as_can_be_counted() {
        let info = r#"{"dtype":"F4","shape":[9223372036854775808],"data_offsets":[0,0]}"#;
        let tensors = parse_header(&format!(r#"{{"a":{info},"b":{info}}}"#), 0).unwrap();
        assert_eq!(tensors.by_type()[0].elements, u64::MAX);
    }

    #[test]
    fn damage_is_named() {
        let one = |info: &str, data| parse_header(&format!(r#"{{"t":{info}}}"#), data);
        let at = |start: u64, end: u64| {
            one(
                &format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":[{start},{end}]}}"#),
                8,
            )
        };
        assert!(at(0, 8).is_ok());
        assert!(matches!(at(8, 0), Err(Error::Reversed { .. })));
        assert!(matches!(
            at(0, 4),
            Err(Error::Length {
                expected: 8,
                found: 4,
                ..
            })
        ));
        assert!(matches!(
            at(8, 16),
            Err(Error::Misplaced {
                expected: 0,
                found: 8,
                ..
            })
        ));
        assert!(matches!(
            at(u64::MAX - 8, u64::MAX),
            Err(Error::Misplaced { .. })
        ));
        let short = one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#, 7);
        assert!(matches!(
            short,
            Err(Error::DataLength {
                expected: 8,
                found: 7
            })
        ));
        let huge = one(
            r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}"#,
            8,
        );
        assert!(matches!(huge, Err(Error::TensorTooLarge { .. })));
        let negative = one(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}"#, 8);
        assert!(matches!(negative, Err(Error::Header { .. })));
        assert!(matches!(parse_header("[]", 0), Err(Error::Header { .. })));
        assert!(matches!(
            parse_header(&"[".repeat(100_000), 0),
            Err(Error::Header { .. })
        ));
    }

    #[test]
    fn an_empty_tensor_with_endless_rows_is_too_large() {
        let shape = r#"{"t":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}"#;
        assert!(matches!(
            parse_header(shape, 0),
            Err(Error::TensorTooLarge { .. })
        ));
        let empty = r#"{"t":{"dtype":"F32","shape":[0,8],"data_offsets":[0,0]}}"#;
        assert!(parse_header(empty, 0).is_ok());
    }

    #[test]
    fn overlapping_and_repeated_tensors_are_refused() {
        let overlap = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
            "b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
        assert!(matches!(
            parse_header(overlap, 12),
            Err(Error::Misplaced { .. })
        ));
        let twice = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
            "a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
        assert!(
            matches!(parse_header(twice, 8), Err(Error::DuplicateTensor { name }) if name == "a")
        );
    }

    #[test]
    fn offsets_that_wrap_around_do_not_pass_for_the_end_of_the_file() {
        // Types of unknown size, so that nothing but the offsets is checked.
        let header = format!(
            r#"{{"a":{{"dtype":"F4","shape":[1],"data_offsets":[0,{}]}}}}"#,
            u64::MAX - 7
        );
        assert!(matches!(
            parse_header(&header, 0),
            Err(Error::DataLength { .. })
        ));
    }

    proptest! {
        #[test]
        fn random_damage_never_panics(
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = file(SAMPLE, 36);
            for (position, value) in edits {
                let at = position.index(bytes.len());
                bytes[at] = value;
            }
            read_all(&bytes);
        }
    }
}
