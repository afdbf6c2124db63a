//! The tensors that a program computes with, by the names they have in GGUF files.

use std::fmt;

/// A matrix of a program: its number among the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixId(pub(crate) usize);

/// A vector of a program: its number among the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VectorId(pub(crate) usize);

/// The matrices of a layer's experts, of one kind: their number among the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertsId(pub(crate) usize);

/// What a tensor is called, whatever a file's own spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorName {
    /// The decoder layer it belongs to.
    pub layer: Option<usize>,
    /// Its part in GGUF's spelling, such as `attn_q`.
    pub part: &'static str,
}

/// A tensor that a file must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorSpec {
    /// A matrix, used where the file is mapped.
    Matrix(MatrixSpec),
    /// A matrix for each expert, used where the file is mapped.
    Experts(ExpertsSpec),
    /// A vector, copied out as `f32`.
    Vector(VectorSpec),
}

/// A matrix, and the bias that is added to its products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixSpec {
    /// What it is called.
    pub name: TensorName,
    /// Elements of a product.
    pub rows: usize,
    /// Elements of what it is multiplied with.
    pub columns: usize,
    /// Whether there is a bias of `rows` elements.
    pub bias: Bias,
}

/// A matrix for each expert, all of one shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsSpec {
    /// What they are called together.
    pub name: TensorName,
    /// How many there are.
    pub experts: usize,
    /// Of these, how many compute a token.
    pub used: usize,
    /// Elements of a product.
    pub rows: usize,
    /// Elements of what it is multiplied with.
    pub columns: usize,
    /// Whether each has a bias of `rows` elements.
    pub bias: Bias,
}

/// Whether a matrix has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// It must.
    Required,
    /// If the file has one.
    IfPresent,
}

/// A vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VectorSpec {
    /// What it is called.
    pub name: TensorName,
    /// What its name ends with in GGUF files; `weight` for most.
    pub suffix: &'static str,
    /// Elements.
    pub width: usize,
    /// How files have it.
    pub form: VectorForm,
}

/// How files have a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VectorForm {
    /// As it is.
    Plain,
    /// As a matrix of rows of a channel, `[channels, taps]`, which is turned round.
    Taps(usize),
    /// Hugging Face files have every element less one.
    LessOne,
    /// As rows of so many elements, or in one.
    Rows(usize),
    /// Of time steps: it must be finite.
    Finite,
    /// The rates at which states decay, `-e^x`: Hugging Face files have `x`. They must be finite.
    Rates,
}

impl TensorSpec {
    /// What it is called.
    #[must_use]
    pub const fn name(&self) -> TensorName {
        match self {
            Self::Matrix(matrix) => matrix.name,
            Self::Experts(experts) => experts.name,
            Self::Vector(vector) => vector.name,
        }
    }

    /// Elements, without a bias.
    #[must_use]
    pub const fn elements(&self) -> usize {
        match self {
            Self::Matrix(matrix) => matrix.rows * matrix.columns,
            Self::Experts(experts) => experts.experts * experts.rows * experts.columns,
            Self::Vector(vector) => vector.width,
        }
    }
}

impl ExpertsSpec {
    /// Elements that a token is multiplied with.
    #[must_use]
    pub const fn active_elements(&self) -> usize {
        self.used * self.rows * self.columns
    }
}

impl fmt::Display for TensorName {
    /// As GGUF spells it, without a suffix: `blk.3.attn_q`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            None => f.write_str(self.part),
            Some(layer) => write!(f, "blk.{layer}.{}", self.part),
        }
    }
}
