//! The forward pass as data: its steps in order, and which buffers each of them touches.
//!
//! The decoder asks for buffers by step, so this table is what it executes; lifetimes are read off
//! it and never written down a second time.

use lacuna_kernels::{Activations, AttentionShape, Cpu};

use crate::config::Config;
use crate::scratch::BatchLimits;

/// One step of a forward pass. [`Step::BLOCK`] is repeated for every decoder block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Rows of the embedding table become the residual stream.
    Embed,
    /// Positions become tables of cosines and sines.
    Rotations,
    /// Norm, and the products that make queries, keys and values.
    Project,
    /// Head norms and rotary embedding.
    Rotate,
    /// Keys and values are stored; attention over all rows.
    Attend,
    /// The product that brings attention back into the residual stream.
    AttentionOutput,
    /// Norm, and the two products into the feed-forward width.
    GateUp,
    /// `silu(gate) * up`.
    Activate,
    /// The product that brings the feed-forward block back into the residual stream.
    Down,
    /// The rows that become logits are picked.
    Choose,
    /// Final norm and output product.
    Logits,
    /// The caller reads the logits.
    Return,
}

impl Step {
    /// First and last step of a decoder block.
    pub const BLOCK: Lifetime = Lifetime {
        first: Self::Project,
        last: Self::Down,
    };

    /// Every step in order, with the buffers it reads or writes.
    pub const ALL: [(Self, &'static [Buffer]); 12] = {
        use Buffer as B;
        [
            (Self::Embed, &[B::Hidden]),
            (Self::Rotations, &[B::Positions, B::Rotations]),
            (
                Self::Project,
                &[
                    B::Hidden,
                    B::AttentionInput,
                    B::AttentionInputBlocks,
                    B::Query,
                    B::Key,
                    B::Value,
                ],
            ),
            (Self::Rotate, &[B::Query, B::Key, B::Rotations]),
            (
                Self::Attend,
                &[B::Query, B::Key, B::Value, B::Attended, B::AttentionStates],
            ),
            (
                Self::AttentionOutput,
                &[
                    B::Attended,
                    B::AttendedBlocks,
                    B::AttentionOutput,
                    B::Hidden,
                ],
            ),
            (
                Self::GateUp,
                &[
                    B::Hidden,
                    B::FeedForwardInput,
                    B::FeedForwardInputBlocks,
                    B::Gate,
                    B::Up,
                ],
            ),
            (Self::Activate, &[B::Gate, B::Up]),
            (
                Self::Down,
                &[B::Gate, B::GateBlocks, B::FeedForwardOutput, B::Hidden],
            ),
            (Self::Choose, &[B::Hidden, B::Chosen]),
            (Self::Logits, &[B::Chosen, B::ChosenBlocks, B::Logits]),
            (Self::Return, &[B::Logits]),
        ]
    };

    /// The name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Rotations => "rotations",
            Self::Project => "project",
            Self::Rotate => "rotate",
            Self::Attend => "attend",
            Self::AttentionOutput => "attention-output",
            Self::GateUp => "gate-up",
            Self::Activate => "activate",
            Self::Down => "down",
            Self::Choose => "choose",
            Self::Logits => "logits",
            Self::Return => "return",
        }
    }
}

/// The steps from which to which a buffer holds something, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetime {
    /// The step that fills it.
    pub first: Step,
    /// The last step that needs it.
    pub last: Step,
}

impl Lifetime {
    /// Whether the buffer holds something during `step`.
    #[must_use]
    pub fn contains(self, step: Step) -> bool {
        self.first <= step && step <= self.last
    }

    /// Whether there is a step both contain.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// Steps from the first to the last.
    pub(crate) fn steps(self) -> usize {
        1 + self.last as usize - self.first as usize
    }

    /// The shortest lifetime that contains both.
    fn hull(self, other: Self) -> Self {
        Self {
            first: self.first.min(other.first),
            last: self.last.max(other.last),
        }
    }
}

/// An activation buffer of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Buffer {
    /// Residual stream, `[tokens, hidden]`.
    Hidden,
    /// Position of each token in its sequence.
    Positions,
    /// Cosines and sines, `[tokens, head_dim]`.
    Rotations,
    /// Normed input of attention, `[tokens, hidden]`.
    AttentionInput,
    /// The same, quantized.
    AttentionInputBlocks,
    /// `[tokens, query_heads x head_dim]`.
    Query,
    /// `[tokens, kv_heads x head_dim]`.
    Key,
    /// `[tokens, kv_heads x head_dim]`.
    Value,
    /// Result of attention, `[tokens, query_heads x head_dim]`.
    Attended,
    /// Partial results where attention is split over the context.
    AttentionStates,
    /// The result of attention, quantized.
    AttendedBlocks,
    /// What attention adds to the residual stream, `[tokens, hidden]`.
    AttentionOutput,
    /// Normed input of the feed-forward block, `[tokens, hidden]`.
    FeedForwardInput,
    /// The same, quantized.
    FeedForwardInputBlocks,
    /// `[tokens, feed_forward]`.
    Gate,
    /// `[tokens, feed_forward]`.
    Up,
    /// `silu(gate) * up`, quantized.
    GateBlocks,
    /// What the feed-forward block adds to the residual stream, `[tokens, hidden]`.
    FeedForwardOutput,
    /// Final hidden rows that become logits, `[logit_rows, hidden]`.
    Chosen,
    /// The same, quantized.
    ChosenBlocks,
    /// `[logit_rows, vocabulary]`.
    Logits,
}

impl Buffer {
    /// Every buffer; the position of each is its discriminant.
    pub const ALL: [Self; 21] = [
        Self::Hidden,
        Self::Positions,
        Self::Rotations,
        Self::AttentionInput,
        Self::AttentionInputBlocks,
        Self::Query,
        Self::Key,
        Self::Value,
        Self::Attended,
        Self::AttentionStates,
        Self::AttendedBlocks,
        Self::AttentionOutput,
        Self::FeedForwardInput,
        Self::FeedForwardInputBlocks,
        Self::Gate,
        Self::Up,
        Self::GateBlocks,
        Self::FeedForwardOutput,
        Self::Chosen,
        Self::ChosenBlocks,
        Self::Logits,
    ];

    /// The name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hidden => "hidden",
            Self::Positions => "positions",
            Self::Rotations => "rotations",
            Self::AttentionInput => "attention-input",
            Self::AttentionInputBlocks => "attention-input-blocks",
            Self::Query => "query",
            Self::Key => "key",
            Self::Value => "value",
            Self::Attended => "attended",
            Self::AttentionStates => "attention-states",
            Self::AttendedBlocks => "attended-blocks",
            Self::AttentionOutput => "attention-output",
            Self::FeedForwardInput => "feed-forward-input",
            Self::FeedForwardInputBlocks => "feed-forward-input-blocks",
            Self::Gate => "gate",
            Self::Up => "up",
            Self::GateBlocks => "gate-blocks",
            Self::FeedForwardOutput => "feed-forward-output",
            Self::Chosen => "chosen",
            Self::ChosenBlocks => "chosen-blocks",
            Self::Logits => "logits",
        }
    }

    /// From its first use to its last. What lives on from outside a block into it is needed again
    /// by the next block, so it lives through the whole of it.
    #[must_use]
    pub fn lifetime(self) -> Lifetime {
        let uses = || {
            let steps = Step::ALL.iter();
            steps.filter(|(_, used)| used.contains(&self))
        };
        let at = |step| Lifetime {
            first: step,
            last: step,
        };
        let all = uses().map(|&(step, _)| at(step)).reduce(Lifetime::hull);
        let all = all.expect("every buffer is used by a step");
        let inside = uses().any(|&(step, _)| Step::BLOCK.contains(step));
        let outside = uses().any(|&(step, _)| !Step::BLOCK.contains(step));
        if inside && outside {
            all.hull(Step::BLOCK)
        } else {
            all
        }
    }

    /// What it holds for batches up to `limits`, or `None` if no memory has so many bytes.
    #[must_use]
    pub fn shape(self, config: &Config, limits: BatchLimits) -> Option<Shape> {
        let BatchLimits {
            tokens, logit_rows, ..
        } = limits;
        let floats = |rows, width| Some(Shape::new(Element::F32, rows, width));
        let (hidden, inner) = (config.hidden, config.feed_forward);
        match self {
            Self::Positions => Some(Shape::new(Element::U32, tokens, 1)),
            Self::Rotations => floats(tokens, config.head_dim),
            Self::Hidden
            | Self::AttentionInput
            | Self::AttentionOutput
            | Self::FeedForwardInput
            | Self::FeedForwardOutput => floats(tokens, hidden),
            Self::Query | Self::Attended => floats(tokens, config.query_width()),
            Self::Key | Self::Value => floats(tokens, config.kv_width()),
            Self::Gate | Self::Up => floats(tokens, inner),
            Self::Chosen => floats(logit_rows, hidden),
            Self::Logits => floats(logit_rows, config.vocabulary),
            Self::AttentionStates => Some(attention_states(config, limits)),
            Self::AttentionInputBlocks | Self::FeedForwardInputBlocks => quantized(tokens, hidden),
            Self::AttendedBlocks => quantized(tokens, config.query_width()),
            Self::GateBlocks => quantized(tokens, inner),
            Self::ChosenBlocks => quantized(logit_rows, hidden),
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

/// Storage for `rows` quantized rows of `width`; nothing where no quantized matrix has such rows.
fn quantized(rows: usize, width: usize) -> Option<Shape> {
    if Activations::storage_bytes(1, width).is_none() {
        return Some(Shape::new(Element::U8, 1, 0));
    }
    let bytes = Activations::storage_bytes(rows, width)?;
    Some(Shape::new(Element::U8, 1, bytes))
}

/// Queries up to which attention splits the context between threads; with more there is work for
/// all threads without.
const SPLIT_QUERIES: usize = 8;
/// Most words kept for that, 32 MiB: contexts of hundreds of thousands of tokens. Attention over
/// more goes by heads instead, with the same result.
const SPLIT_WORDS: usize = 8 << 20;

fn attention_states(config: &Config, limits: BatchLimits) -> Shape {
    let queries = limits.tokens.min(SPLIT_QUERIES);
    // Positions are 32 bits wide, so there are no more rows to see.
    let rows = limits.context_tokens.min(u32::MAX as usize);
    let words = Cpu::attention_scratch_len(queries, rows, &attention_shape(config));
    Shape::new(Element::F32, 1, words.min(SPLIT_WORDS))
}

/// Attention geometry of `config` with the usual `1 / sqrt(head_dim)` scale.
pub(crate) fn attention_shape(config: &Config) -> AttentionShape {
    let scale = 1.0 / (config.head_dim as f32).sqrt();
    AttentionShape::causal(config.query_heads, config.kv_heads, config.head_dim, scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_in_order_and_complete() {
        assert!(Step::ALL.windows(2).all(|pair| pair[0].0 < pair[1].0));
        for (index, buffer) in Buffer::ALL.into_iter().enumerate() {
            assert_eq!(buffer as usize, index);
        }
    }

    #[test]
    fn what_outlives_a_block_lives_through_all_of_it() {
        let lifetime = |first, last| Lifetime { first, last };
        assert_eq!(
            Buffer::Rotations.lifetime(),
            lifetime(Step::Rotations, Step::Down),
            "the next block rotates by the same table"
        );
        assert_eq!(
            Buffer::Hidden.lifetime(),
            lifetime(Step::Embed, Step::Choose)
        );
        assert_eq!(
            Buffer::Query.lifetime(),
            lifetime(Step::Project, Step::Attend)
        );
    }
}
