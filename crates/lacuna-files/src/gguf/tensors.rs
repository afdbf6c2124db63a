//! The tensor table of a GGUF file, checked against the bytes that are there.

use std::ops::Range;
use std::sync::Arc;

use super::cursor::Cursor;
use super::error::Error;
use super::types::ElementType;
use crate::mapping::Mapping;
use crate::tensor::{Contents, Entry, Storage, TENSOR_LIMIT, Tensors};

/// The most dimensions a ggml tensor has.
const DIMENSION_LIMIT: usize = 4;
/// Fewest bytes of a table entry: name length, one byte of name, dimension count, type, offset.
const LEAST_ENTRY_BYTES: usize = 8 + 1 + 4 + 4 + 8;

/// One line of the table as the file has it.
struct Line<'a> {
    name: &'a str,
    /// Outermost first; the file has it the other way round.
    shape: Vec<u64>,
    element: ElementType,
    offset: u64,
}

/// Where tensors may lie.
struct DataSection {
    start: usize,
    len: usize,
    alignment: u32,
}

pub(super) fn parse(
    data: &Mapping,
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: u32,
) -> Result<Tensors, Error> {
    let count = cursor.check_count(count, LEAST_ENTRY_BYTES, "tensors")?;
    if count > TENSOR_LIMIT {
        return Err(Error::TooManyTensors {
            count,
            limit: TENSOR_LIMIT,
        });
    }
    let mut lines = Vec::new();
    lines.try_reserve_exact(count)?;
    for _ in 0..count {
        lines.push(parse_line(cursor)?);
    }
    let section = data_section(data.len(), cursor.position(), alignment);
    let entries = lines
        .iter()
        .map(|line| entry(data, line, &section))
        .collect::<Result<Vec<_>, _>>()?;
    check_overlap(&entries)?;
    Tensors::new(entries).map_err(|name| Error::DuplicateTensor { name })
}

fn parse_line<'a>(cursor: &mut Cursor<'a>) -> Result<Line<'a>, Error> {
    let name = cursor.name("tensor name")?;
    let dimensions = cursor.u32("tensor dimension count")?;
    if dimensions as usize > DIMENSION_LIMIT {
        return Err(Error::TooManyDimensions {
            name: name.to_owned(),
            dimensions,
            limit: DIMENSION_LIMIT,
        });
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        shape.push(cursor.u64("tensor dimension")?);
    }
    shape.reverse();
    let element = ElementType::from_id(cursor.u32("tensor type")?);
    let offset = cursor.u64("tensor offset")?;
    Ok(Line {
        name,
        shape,
        element,
        offset,
    })
}

/// The data section starts at the next multiple of the alignment. A file without tensors may end
/// before that, and then the section is empty.
fn data_section(file_len: usize, header_len: usize, alignment: u32) -> DataSection {
    let start = header_len
        .checked_next_multiple_of(alignment as usize)
        .unwrap_or(usize::MAX);
    let start = start.min(file_len);
    DataSection {
        start,
        len: file_len - start,
        alignment,
    }
}

fn entry(data: &Mapping, line: &Line<'_>, section: &DataSection) -> Result<Entry, Error> {
    let shape = dimensions(line)?;
    if !line.offset.is_multiple_of(u64::from(section.alignment)) {
        return Err(Error::MisalignedTensor {
            name: line.name.to_owned(),
            offset: line.offset,
            alignment: section.alignment,
        });
    }
    let storage = match line.element {
        ElementType::Known(dtype) => Storage::Known(dtype),
        other => Storage::Other(other.name().into()),
    };
    let range = byte_range(line, byte_len(line, &shape)?, section)?;
    Ok(Entry {
        name: line.name.into(),
        storage,
        shape: shape.into(),
        contents: Contents::Mapped {
            data: data.clone(),
            range,
        },
    })
}

/// The dimensions as memory sizes, such that no product of any of them overflows.
fn dimensions(line: &Line<'_>) -> Result<Vec<usize>, Error> {
    let too_large = || Error::TensorTooLarge {
        name: line.name.to_owned(),
        shape: line.shape.clone(),
    };
    let shape: Option<Vec<usize>> = line
        .shape
        .iter()
        .map(|&dim| usize::try_from(dim).ok())
        .collect();
    let shape = shape.ok_or_else(too_large)?;
    let product = shape
        .iter()
        .try_fold(1usize, |product, &dim| product.checked_mul(dim.max(1)));
    product.map(|_| shape).ok_or_else(too_large)
}

/// Bytes of a tensor; 0 when its type is unknown, so that only its start is checked.
fn byte_len(line: &Line<'_>, shape: &[usize]) -> Result<u64, Error> {
    let Some((block_len, block_bytes)) = line.element.block() else {
        return Ok(0);
    };
    let columns = shape.last().copied().unwrap_or(1);
    if !columns.is_multiple_of(block_len) {
        return Err(Error::PartialBlock {
            name: line.name.to_owned(),
            columns,
            type_name: line.element.name(),
            block_len,
        });
    }
    // A row must have a length even where there are no rows.
    let row = (columns / block_len).checked_mul(block_bytes);
    let rows = shape.iter().rev().skip(1).product::<usize>();
    row.and_then(|row| row.checked_mul(rows))
        .map(|bytes| bytes as u64)
        .ok_or_else(|| Error::TensorTooLarge {
            name: line.name.to_owned(),
            shape: line.shape.clone(),
        })
}

fn byte_range(line: &Line<'_>, needed: u64, section: &DataSection) -> Result<Range<usize>, Error> {
    let end = line
        .offset
        .checked_add(needed)
        .and_then(|end| usize::try_from(end).ok());
    match (usize::try_from(line.offset), end) {
        (Ok(offset), Some(end)) if end <= section.len => {
            Ok(section.start + offset..section.start + end)
        }
        _ => Err(Error::TensorPastEnd {
            name: line.name.to_owned(),
            offset: line.offset,
            needed,
            available: section.len,
        }),
    }
}

fn check_overlap(entries: &[Entry]) -> Result<(), Error> {
    let mut order: Vec<(Range<usize>, &Arc<str>)> = entries
        .iter()
        .filter_map(|entry| match &entry.contents {
            Contents::Mapped { range, .. } if !range.is_empty() => {
                Some((range.clone(), &entry.name))
            }
            _ => None,
        })
        .collect();
    order.sort_unstable_by_key(|(range, _)| range.start);
    match order
        .windows(2)
        .find(|pair| pair[1].0.start < pair[0].0.end)
    {
        Some(pair) => Err(Error::OverlappingTensors {
            first: pair[0].1.to_string(),
            second: pair[1].1.to_string(),
        }),
        None => Ok(()),
    }
}
