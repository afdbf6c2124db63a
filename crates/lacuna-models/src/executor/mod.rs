//! Running a program: what a caller brings, what is checked first, and the processor that computes.

mod processor;

use lacuna_kv::Sequence;

use crate::error::ForwardError;
use crate::scratch::Scratch;

pub(crate) use processor::Pass;

/// Which rows of logits a segment asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: an inner chunk of a prompt.
    None,
    /// The row after the segment's last token.
    Last,
    /// One row after every token.
    All,
}

/// Tokens of one sequence in a forward pass.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Tokens that follow what the sequence holds; not empty.
    pub tokens: &'a [u32],
    /// The sequence's KV cache, with rows for `tokens` prepared.
    pub sequence: &'a mut Sequence,
    /// Rows of logits wanted.
    pub logits: LogitRows,
}

impl Segment<'_> {
    fn logit_rows(&self) -> usize {
        match self.logits {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => self.tokens.len(),
        }
    }
}

/// How much there is in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchSize {
    pub(crate) tokens: usize,
    pub(crate) logit_rows: usize,
}

/// Whether `segments` can be computed in `scratch`.
///
/// # Errors
/// [`ForwardError`], saying what is wrong with them.
pub(crate) fn check(
    segments: &[Segment<'_>],
    scratch: &Scratch,
    vocabulary: usize,
) -> Result<BatchSize, ForwardError> {
    let tokens: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
    let logit_rows: usize = segments.iter().map(Segment::logit_rows).sum();
    let limits = scratch.limits();
    if tokens == 0 || tokens > limits.tokens || logit_rows > limits.logit_rows {
        return Err(ForwardError::BatchTooLarge {
            tokens,
            logit_rows,
            limits,
        });
    }
    for segment in segments {
        let mut outside = segment.tokens.iter().copied();
        if let Some(token) = outside.find(|&token| token as usize >= vocabulary) {
            return Err(ForwardError::TokenOutOfRange { token, vocabulary });
        }
        let prepared = segment.sequence.prepared();
        if prepared != segment.tokens.len() {
            return Err(ForwardError::NotPrepared {
                prepared,
                tokens: segment.tokens.len(),
            });
        }
    }
    Ok(BatchSize { tokens, logit_rows })
}
