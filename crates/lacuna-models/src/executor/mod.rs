//! Running a program: what a caller brings, what is checked first, and the processor that computes.

mod image;
mod pooling;
mod processor;
mod texts;

use std::ops::Range;
use std::sync::Arc;

use lacuna_kv::Sequence;

use crate::error::ForwardError;
use crate::scratch::{BatchLimits, Scratch};
use crate::spec::{Grid, ImageRows, ModelSpec, Patches};

pub(crate) use image::ImageBatch;
pub use pooling::normalize;
pub(crate) use processor::Pass;
pub use texts::Texts;

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
    /// Images that the sequence shows, in order and apart from one another; those elsewhere do not matter here.
    pub images: &'a [Shown],
}

/// Rows of an image in the places of a sequence's tokens. What the tokens are says nothing to the model.
#[derive(Debug, Clone, PartialEq)]
pub struct Shown {
    /// The places of its tokens in the sequence. Where these see all of the image, a segment ends with them or elsewhere,
    /// but not before the last.
    pub positions: Range<usize>,
    /// Rows and columns of them, row by row.
    pub grid: Grid,
    /// `[positions, row of the encoder]`; many sequences may show the same. Of an image all of whose tokens are computed
    /// there may be none.
    pub rows: Arc<[f32]>,
}

impl Shown {
    /// How many positions from `start` on a segment may have, of `count` that are wanted, so as to end where no image
    /// of `images` is cut: none before an image that it would cut.
    #[must_use]
    pub fn uncut(images: &[Self], start: usize, count: usize) -> usize {
        let end = start + count;
        let cut = |it: &&Self| it.positions.start < end && end < it.positions.end;
        let cut = images.iter().find(cut);
        cut.map_or(count, |it| it.positions.start.saturating_sub(start))
    }

    /// Positions from `start` on to the end of the image that has it, if one of `images` has.
    #[must_use]
    pub fn rest_of_image(images: &[Self], start: usize) -> Option<usize> {
        let image = images.iter().find(|it| it.positions.contains(&start))?;
        Some(image.positions.end - start)
    }
}

impl Segment<'_> {
    /// Which of its tokens are those of images, and their rows.
    pub fn shown(&self) -> impl Iterator<Item = (Range<usize>, &[f32])> {
        let start = self.sequence.len();
        let end = start + self.tokens.len();
        self.images.iter().filter_map(
            move |Shown {
                      positions, rows, ..
                  }| {
                let there = positions.start.max(start)..positions.end.min(end);
                let width = rows.len() / positions.len().max(1);
                let of_rows = |position: usize| (position - positions.start) * width;
                (!there.is_empty()).then(|| {
                    let part = of_rows(there.start)..of_rows(there.end);
                    (there.start - start..there.end - start, &rows[part])
                })
            },
        )
    }

    /// Writes the positions of its tokens to `out`, `[tokens, axes]`: one number, from `first` on, or time, row and column. A text's token has all of them alike, one
    /// more than the largest before; the tokens of an image have the time of the first, and begin with that as their row and
    /// column.
    pub(crate) fn positions(&self, axes: usize, first: usize, out: &mut [u32]) {
        let start = self.sequence.len();
        if axes == 1 {
            for (token, slot) in (start + first..).zip(out) {
                *slot = u32::try_from(token).expect(processor::LONGEST);
            }
            return;
        }
        // What images take less of positions than of tokens.
        let mut less = 0;
        let mut images = self.images.iter().peekable();
        for (token, position) in (0..).zip(out.chunks_exact_mut(axes)) {
            let place = start + token;
            while let Some(image) = images.next_if(|image| image.positions.end <= place) {
                less += image.positions.len() - image.grid.longer();
            }
            let image = images.peek().filter(|image| image.positions.start <= place);
            let numbers = match image {
                None => [place - less; 3],
                Some(image) => {
                    let (first, at) = (image.positions.start, place - image.positions.start);
                    let (row, column) = (at / image.grid.columns, at % image.grid.columns);
                    [0, row, column].map(|number| first - less + number)
                }
            };
            for (slot, number) in position.iter_mut().zip(numbers) {
                *slot = u32::try_from(number).expect(processor::LONGEST);
            }
        }
    }

    /// Rows of logits that it asks for.
    #[must_use]
    pub fn logit_rows(&self) -> usize {
        match self.logits {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => self.tokens.len(),
        }
    }
}

/// What one pass computes.
#[derive(Debug)]
pub(crate) enum Batch<'a, 'b> {
    /// Tokens that follow what sequences hold.
    Segments(&'a mut [Segment<'b>]),
    /// Texts of which nothing is kept.
    Texts(&'a Texts),
    /// An image.
    Image(ImageBatch<'a>),
}

impl Batch<'_, '_> {
    /// The tokens of each segment or text, and the position of the first of them.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = (&[u32], usize)> {
        let (segments, texts) = match self {
            Self::Segments(segments) => (Some(segments), None),
            Self::Texts(texts) => (None, Some(texts.iter())),
            Self::Image(_) => (None, None),
        };
        let segments = segments.into_iter().flat_map(|segments| segments.iter());
        let segments = segments.map(|segment| (segment.tokens, segment.sequence.len()));
        segments.chain(texts.into_iter().flatten().map(|text| (text, 0)))
    }

    /// The tokens of each segment, or of all texts together.
    pub(crate) fn runs(&self) -> impl Iterator<Item = &[u32]> {
        let (segments, texts) = match self {
            Self::Segments(segments) => (Some(segments), None),
            Self::Texts(texts) => (None, Some(texts.all())),
            Self::Image(_) => (None, None),
        };
        let segments = segments.into_iter().flat_map(|segments| segments.iter());
        segments.map(|segment| segment.tokens).chain(texts)
    }

    /// Of each token of texts, whether it belongs to one that another is compared with: 1, else 0.
    pub(crate) fn token_types(&self) -> impl Iterator<Item = u32> {
        let texts = match self {
            Self::Segments(_) | Self::Image(_) => None,
            Self::Texts(texts) => Some(texts.token_types()),
        };
        texts.into_iter().flatten()
    }
}

/// How much there is in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchSize {
    pub(crate) tokens: usize,
    /// Rows of output: of logits, or one for each text.
    pub(crate) logit_rows: usize,
}

/// Whether `segments` can be computed in a pass of at most `limits`.
///
/// # Errors
/// [`ForwardError`], saying what is wrong with them.
pub(crate) fn check(
    segments: &[Segment<'_>],
    limits: BatchLimits,
    spec: &ModelSpec,
) -> Result<BatchSize, ForwardError> {
    let size = BatchSize {
        tokens: segments.iter().map(|segment| segment.tokens.len()).sum(),
        logit_rows: segments.iter().map(Segment::logit_rows).sum(),
    };
    size.check(limits)?;
    for segment in segments {
        check_images(segment, spec)?;
        let prepared = segment.sequence.prepared();
        if prepared != segment.tokens.len() {
            return Err(ForwardError::NotPrepared {
                prepared,
                tokens: segment.tokens.len(),
            });
        }
    }
    Ok(size)
}

/// The same of a head that keeps no rows: of each sequence one token is read, behind rows that are there, and nothing is
/// prepared.
///
/// # Errors
/// As [`check`], and [`ForwardError::BorrowedRows`].
pub(crate) fn check_borrowed(
    segments: &[Segment<'_>],
    limits: BatchLimits,
    vocabulary: usize,
) -> Result<BatchSize, ForwardError> {
    let size = BatchSize {
        tokens: segments.iter().map(|segment| segment.tokens.len()).sum(),
        logit_rows: segments.iter().map(Segment::logit_rows).sum(),
    };
    size.check(limits)?;
    for Segment {
        tokens, sequence, ..
    } in segments
    {
        let (rows, prepared) = (sequence.len(), sequence.prepared());
        if tokens.len() != 1 || rows == 0 || prepared != 0 {
            return Err(ForwardError::BorrowedRows {
                tokens: tokens.len(),
                rows,
                prepared,
            });
        }
        check_tokens(tokens, vocabulary)?;
    }
    Ok(size)
}

/// Whether what stands for images in a segment does, and the rest are tokens.
fn check_images(segment: &Segment<'_>, spec: &ModelSpec) -> Result<(), ForwardError> {
    if spec.images.is_none() && !segment.images.is_empty() {
        return Err(ForwardError::NoImages);
    }
    let end = segment.sequence.len() + segment.tokens.len();
    let whole = spec.keeps_images_whole();
    let width = spec.image_row_width().unwrap_or(spec.hidden);
    let mut behind = 0;
    for image in segment.images {
        let Shown {
            positions,
            grid,
            rows,
        } = image;
        let is_cut = whole && positions.start < end && end < positions.end;
        let fits = positions.start >= behind
            && positions.start < positions.end
            && grid.rows.checked_mul(grid.columns) == Some(positions.len())
            // Of an image that is computed rows are of no use.
            && (Some(rows.len()) == positions.len().checked_mul(width)
                || (rows.is_empty() && positions.end <= segment.sequence.len()));
        if !fits || is_cut {
            return Err(ForwardError::MisplacedImage {
                positions: positions.clone(),
                elements: rows.len(),
                end,
            });
        }
        behind = positions.end;
    }
    let mut start = 0;
    for (tokens, _) in segment.shown() {
        check_tokens(&segment.tokens[start..tokens.start], spec.vocabulary)?;
        start = tokens.end;
    }
    check_tokens(&segment.tokens[start..], spec.vocabulary)
}

/// Whether an image for a model of `spec` can be computed in `scratch`.
///
/// # Errors
/// [`ForwardError`], saying what is wrong.
pub(crate) fn check_image(
    (pixels, grid): (&[u8], Grid),
    scratch: &Scratch,
    (patches, rows): (&Patches, &ImageRows),
) -> Result<BatchSize, ForwardError> {
    // In this order: of a grid that is taken products of sizes are small.
    if !patches.takes(grid) || pixels.len() != grid.count() * patches.bytes() {
        return Err(ForwardError::ImageSize {
            bytes: pixels.len(),
            grid,
        });
    }
    let size = BatchSize {
        tokens: grid.count(),
        logit_rows: grid.merged(rows.merged).count(),
    };
    size.check(scratch.limits())?;
    Ok(size)
}

/// Whether `texts` of a model of `spec` can be computed in `scratch`.
///
/// # Errors
/// [`ForwardError`], saying what is wrong with them.
pub(crate) fn check_texts(
    texts: &Texts,
    scratch: &Scratch,
    spec: &ModelSpec,
) -> Result<BatchSize, ForwardError> {
    let size = BatchSize {
        tokens: texts.tokens(),
        logit_rows: texts.len(),
    };
    let limit = spec.context_tokens.min(scratch.limits().context_tokens);
    for (index, text) in texts.iter().enumerate() {
        match text.len() {
            0 => return Err(ForwardError::EmptyText { index }),
            tokens if tokens > limit => {
                return Err(ForwardError::TextTooLong {
                    index,
                    tokens,
                    limit,
                });
            }
            _ => check_tokens(text, spec.vocabulary)?,
        }
    }
    // After them, because a text that is too long or empty says more than its batch.
    size.check(scratch.limits())?;
    Ok(size)
}

impl BatchSize {
    fn check(self, limits: BatchLimits) -> Result<(), ForwardError> {
        let Self { tokens, logit_rows } = self;
        if tokens == 0 || tokens > limits.tokens || logit_rows > limits.logit_rows {
            return Err(ForwardError::BatchTooLarge {
                tokens,
                logit_rows,
                limits,
            });
        }
        Ok(())
    }
}

fn check_tokens(tokens: &[u32], vocabulary: usize) -> Result<(), ForwardError> {
    let mut tokens = tokens.iter().copied();
    match tokens.find(|&token| token as usize >= vocabulary) {
        None => Ok(()),
        Some(token) => Err(ForwardError::TokenOutOfRange { token, vocabulary }),
    }
}
