//! Slots: the activation buffers that operations read and write.

use lacuna_kernels::{Activations, AttentionShape, Cpu, Routes, Routing};

use crate::scratch::BatchLimits;

/// An activation buffer of a program, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub(crate) usize);

/// What is known of a slot before there is a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct SlotSpec {
    /// The name in reports.
    pub name: &'static str,
    /// What it holds.
    pub contents: Contents,
}

/// What a slot holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Contents {
    /// Rows of `f32`, at most so many in each.
    Values {
        /// How many rows.
        rows: Rows,
        /// Elements of the widest row.
        width: usize,
    },
    /// Rows prepared for products with quantized matrices.
    Quantized {
        /// How many rows.
        rows: Rows,
        /// Every width that rows have.
        widths: Vec<usize>,
    },
    /// The position of each token in its sequence, or that of each patch in its image.
    Positions {
        /// Numbers of each.
        axes: usize,
    },
    /// Which experts tokens have, for each way to choose them.
    Routes(Vec<Routing>),
    /// Rows prepared for products with quantized matrices of experts: so many experts of each token, and
    /// the width of rows.
    ExpertBlocks(Vec<(usize, usize)>),
    /// Partial results of attention that is split over the context, for each of these.
    AttentionStates(Vec<AttentionShape>),
}

/// How many rows a slot or an operation has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rows {
    /// One for each token of the batch.
    Tokens,
    /// One for each row of logits that is asked for, or for each text.
    Logits,
}

impl Rows {
    /// The most there are in batches up to `limits`.
    #[must_use]
    pub fn at_most(self, limits: BatchLimits) -> usize {
        match self {
            Self::Tokens => limits.tokens,
            Self::Logits => limits.logit_rows,
        }
    }
}

/// Element of an activation buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE 754 binary32.
    F32,
    /// An unsigned integer of 32 bits.
    U32,
    /// A byte of quantized activations.
    U8,
}

impl Element {
    /// Bytes of one.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::U8 => 1,
        }
    }

    /// The name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::U32 => "u32",
            Self::U8 => "u8",
        }
    }
}

/// What a buffer holds: `rows x width` elements, row after row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Storage of one element.
    pub element: Element,
    /// Rows; one per token or per row of logits where the buffer has such rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

impl Shape {
    const fn new(element: Element, rows: usize, width: usize) -> Self {
        Self {
            element,
            rows,
            width,
        }
    }

    /// Bytes of all rows, or `None` if that is more than a `usize` holds.
    #[must_use]
    pub fn bytes(self) -> Option<usize> {
        let elements = self.rows.checked_mul(self.width)?;
        elements.checked_mul(self.element.bytes())
    }
}

impl SlotSpec {
    /// What it holds for batches up to `limits`, or `None` if no memory has so many bytes.
    #[must_use]
    pub fn shape(&self, limits: BatchLimits) -> Option<Shape> {
        match &self.contents {
            Contents::Values { rows, width } => {
                Some(Shape::new(Element::F32, rows.at_most(limits), *width))
            }
            Contents::Positions { axes } => Some(Shape::new(Element::U32, limits.tokens, *axes)),
            Contents::Quantized { rows, widths } => quantized(rows.at_most(limits), widths),
            Contents::AttentionStates(shapes) => Some(attention_states(shapes, limits)),
            Contents::Routes(ways) => routes(ways, limits),
            Contents::ExpertBlocks(shapes) => expert_blocks(shapes, limits),
        }
    }
}

/// Storage for `rows` quantized rows of the widest of `widths`; nothing where no quantized matrix has
/// such rows.
fn quantized(rows: usize, widths: &[usize]) -> Option<Shape> {
    let mut most = 0;
    for &width in widths {
        if Activations::storage_bytes(1, width).is_some() {
            most = most.max(Activations::storage_bytes(rows, width)?);
        }
    }
    Some(Shape::new(Element::U8, 1, most))
}

fn routes(ways: &[Routing], limits: BatchLimits) -> Option<Shape> {
    let words = ways
        .iter()
        .map(|routing| Routes::words(limits.tokens, routing));
    let most = words.collect::<Option<Vec<_>>>()?.into_iter().max();
    Some(Shape::new(Element::U32, 1, most.unwrap_or(0)))
}

/// Storage for the widest quantized rows of all choices; nothing where no quantized matrix has such rows.
fn expert_blocks(shapes: &[(usize, usize)], limits: BatchLimits) -> Option<Shape> {
    let mut most = 0;
    for &(used, width) in shapes {
        if Activations::storage_bytes(1, width).is_some() {
            most = most.max(Routes::storage_bytes(limits.tokens, used, width)?);
        }
    }
    Some(Shape::new(Element::U8, 1, most))
}

/// Queries up to which attention splits the context between threads; with more there is work for
/// all threads without.
const SPLIT_QUERIES: usize = 8;
/// Most words kept for that, 32 MiB: contexts of hundreds of thousands of tokens. Attention over
/// more goes by heads instead, with the same result.
const SPLIT_WORDS: usize = 8 << 20;

fn attention_states(shapes: &[AttentionShape], limits: BatchLimits) -> Shape {
    let queries = limits.tokens.min(SPLIT_QUERIES);
    // Positions are 32 bits wide, so there are no more rows to see.
    let rows = limits.context_tokens.min(u32::MAX as usize);
    let words = shapes
        .iter()
        .map(|shape| Cpu::attention_scratch_len(queries, rows, shape));
    let words = words.max().unwrap_or(0);
    Shape::new(Element::F32, 1, words.min(SPLIT_WORDS))
}
