//! Why weights in a quantized form cannot be read.

/// What is wrong with a folder's quantized weights, or with what its description says of them.
/// Messages leave out the folder; the caller knows it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormError {
    /// A method of quantization whose weights cannot be read.
    #[error(
        "weights quantized by `{method}` are not supported; {} are, or use the model in another form",
        supported.join(", ")
    )]
    Method {
        /// What the description calls it.
        method: String,
        /// Those that can be.
        supported: &'static [&'static str],
    },
    /// A variant of a supported method that cannot be read.
    #[error(
        "`{field}` of the quantization is {found}, and {expected} is needed; use the model in another form"
    )]
    Setting {
        /// The field of the description.
        field: String,
        /// What it says.
        found: String,
        /// What would do.
        expected: &'static str,
    },
    /// One of the tensors that make a matrix together.
    #[error(
        "tensor `{part}` is missing, without which `{of}` cannot be read; download the model again"
    )]
    Missing {
        /// The tensor.
        part: String,
        /// One that is there.
        of: String,
    },
    /// A tensor of the wrong element type.
    #[error("tensor `{name}` has type {found}, and {expected} is needed; download the model again")]
    Type {
        /// The tensor.
        name: String,
        /// What it has.
        found: String,
        /// What would do.
        expected: &'static str,
    },
    /// A tensor whose shape does not go with that of the others.
    #[error(
        "tensor `{name}` has shape {found:?}, and {expected} is needed; download the model again"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// What it has, outermost dimension first.
        found: Vec<usize>,
        /// What would do.
        expected: String,
    },
    /// Columns that are not whole groups.
    #[error(
        "`{name}` has rows of {columns} weights in {groups} groups, which do not divide them; download the \
         model again"
    )]
    Groups {
        /// The tensor that holds the scales.
        name: String,
        /// Weights of a row.
        columns: usize,
        /// Groups of a row.
        groups: usize,
    },
    /// Sizes whose product overflows.
    #[error("`{name}` would be larger than any memory; the file is damaged, download it again")]
    TooLarge {
        /// The tensor.
        name: String,
    },
    /// Two tensors would have one name.
    #[error("tensor `{name}` is there twice, plain and quantized; download the model again")]
    Twice {
        /// The name.
        name: String,
    },
}
