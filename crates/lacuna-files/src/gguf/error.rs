//! What can be wrong with a GGUF file.

use std::path::PathBuf;

use crate::mapping;

/// Why a GGUF file cannot be used. Messages leave out the path; the caller knows it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refuses memory for the header's lists.
    #[error("there is not enough memory for the file's header: {0}")]
    OutOfMemory(#[from] std::collections::TryReserveError),
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file: it starts with {magic:02x?} instead of the letters GGUF")]
    NotGguf {
        /// The first bytes, at most four.
        magic: Vec<u8>,
    },
    /// Written for a big-endian machine.
    #[error("this GGUF file is big-endian; convert it with gguf-py's gguf_convert_endian.py")]
    BigEndian,
    /// A format version other than 2 or 3.
    #[error("GGUF version {version} is not supported (2 and 3 are); convert the model again")]
    UnsupportedVersion {
        /// The version the file claims.
        version: u32,
    },
    /// The file ends inside its header.
    #[error(
        "the file is cut off: {what} at byte {offset} needs {needed} bytes and {remaining} remain; \
         download it again"
    )]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Where it starts.
        offset: usize,
        /// How many bytes it claims or needs.
        needed: u64,
        /// How many bytes the file still has there.
        remaining: usize,
    },
    /// A count that the rest of the file could not hold.
    #[error(
        "the file is damaged: it claims {count} {what}, and has room for {limit}; download it again"
    )]
    ImpossibleCount {
        /// What is counted.
        what: &'static str,
        /// The number in the file.
        count: u64,
        /// The most that could fit in the remaining bytes.
        limit: u64,
    },
    /// More tensors than any model has.
    #[error(
        "the file lists {count} tensors, and at most {limit} are read; split the model into several files"
    )]
    TooManyTensors {
        /// The number in the file.
        count: usize,
        /// The most that are read.
        limit: usize,
    },
    /// A key or tensor name that is empty, too long, or not UTF-8.
    #[error(
        "the file is damaged: the {what} at byte {offset} is empty, over {limit} bytes, or not UTF-8"
    )]
    BadName {
        /// Which name.
        what: &'static str,
        /// Where it starts.
        offset: usize,
        /// The longest name accepted.
        limit: usize,
    },
    /// The same metadata key twice.
    #[error("the file is damaged: metadata key `{key}` occurs twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// The same tensor name twice.
    #[error("the file is damaged: tensor `{name}` occurs twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// A metadata value of a type this format does not have.
    #[error("the file is damaged or newer than this program: key `{key}` has value type {id}")]
    UnknownValueType {
        /// The key.
        key: String,
        /// The type number in the file.
        id: u32,
    },
    /// Arrays of arrays of arrays.
    #[error("key `{key}` nests arrays deeper than {limit} levels, which no model needs")]
    NestedTooDeep {
        /// The key.
        key: String,
        /// The deepest nesting accepted.
        limit: usize,
    },
    /// `general.alignment` is not a power of two.
    #[error("the file is damaged: general.alignment is {alignment}, which is not a power of two")]
    BadAlignment {
        /// The value in the file.
        alignment: u32,
    },
    /// A tensor with more dimensions than the format allows.
    #[error("the file is damaged: tensor `{name}` has {dimensions} dimensions, more than {limit}")]
    TooManyDimensions {
        /// The tensor.
        name: String,
        /// The number in the file.
        dimensions: u32,
        /// The most the format allows.
        limit: usize,
    },
    /// The product of a tensor's dimensions overflows.
    #[error("the file is damaged: tensor `{name}` of shape {shape:?} is larger than any memory")]
    TensorTooLarge {
        /// The tensor.
        name: String,
        /// Its dimensions, outermost first.
        shape: Vec<u64>,
    },
    /// A row that is not a whole number of quantization blocks.
    #[error(
        "the file is damaged: rows of tensor `{name}` have {columns} elements, which type {type_name} \
         cannot store (it needs multiples of {block_len})"
    )]
    PartialBlock {
        /// The tensor.
        name: String,
        /// Elements per row.
        columns: usize,
        /// The element type.
        type_name: String,
        /// Elements per block.
        block_len: usize,
    },
    /// A tensor offset that is not a multiple of the file's alignment.
    #[error(
        "the file is damaged: tensor `{name}` is at offset {offset}, not a multiple of {alignment}"
    )]
    MisalignedTensor {
        /// The tensor.
        name: String,
        /// Its offset in the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u32,
    },
    /// A tensor that reaches beyond the end of the file.
    #[error(
        "the file is cut off or damaged: tensor `{name}` needs {needed} bytes at data offset {offset}, \
         and the data section has {available}; download it again"
    )]
    TensorPastEnd {
        /// The tensor.
        name: String,
        /// Its offset in the data section.
        offset: u64,
        /// Its size.
        needed: u64,
        /// The size of the data section.
        available: usize,
    },
    /// Two tensors that claim the same bytes.
    #[error("the file is damaged: tensors `{first}` and `{second}` claim the same bytes")]
    OverlappingTensors {
        /// The tensor that starts first.
        first: String,
        /// The tensor that starts inside it.
        second: String,
    },
    /// A metadata key the model needs.
    #[error("metadata key `{key}` is missing; the file is incomplete or of another kind")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value of the wrong type or out of range.
    #[error("metadata key `{key}` should be {expected}, and is {found}")]
    WrongValue {
        /// The key.
        key: String,
        /// What is needed.
        expected: &'static str,
        /// What the file has.
        found: String,
    },
    /// One of the later files of a split model was opened.
    #[error("this is file {number} of {count} of a split model; open the first one")]
    NotFirstShard {
        /// Its position, counted from 1.
        number: u64,
        /// How many files there are.
        count: u64,
    },
    /// A split model whose file is not named as the others can be found by.
    #[error(
        "this is a model split over {count} files, and its name does not end in \
         -00001-of-{count:05}.gguf; give the files their original names"
    )]
    ShardName {
        /// How many files there are.
        count: u64,
    },
    /// A sibling of a split model cannot be opened.
    #[error("file {number} of {count} of this split model is missing or unreadable: {source}")]
    MissingShard {
        /// Its position, counted from 1.
        number: u64,
        /// How many files there are.
        count: u64,
        /// Why.
        source: mapping::Error,
    },
    /// A sibling of a split model was lost while it was read.
    #[error(transparent)]
    Lost(#[from] mapping::LostFile),
    /// A sibling of a split model is damaged.
    #[error("{}: {source}", path.display())]
    Shard {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<Error>,
    },
    /// The files of a split model do not belong together.
    #[error(
        "the files of this split model do not belong together: {what} is {found}, expected {expected}"
    )]
    ShardMismatch {
        /// Which number disagrees.
        what: &'static str,
        /// What the first file says.
        expected: u64,
        /// What was found.
        found: u64,
    },
}
