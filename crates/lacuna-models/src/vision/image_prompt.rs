//! How images stand in a prompt: templates write something for each, and the image's tokens are put where the family says.

use std::fmt::Write;
use std::ops::Range;

use lacuna_text::tokenizer::{Special, Tokenizer};

use crate::error::PromptError;
use crate::spec::{Grid, ImagePlace, ImagePrompt, TileMarks};

/// The tokens that stand for an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageTokens {
    /// Its tiles; none where it is one picture.
    pub tiles: Grid,
    /// Those of each of its pictures: of tiles row by row, and then of the whole. Where tokens of the prompt stand between
    /// rows, those of each row.
    pub pictures: Vec<Vec<u32>>,
}

impl ImageTokens {
    /// Those of an image that is one picture.
    #[must_use]
    pub fn one(picture: Vec<u32>) -> Self {
        Self {
            tiles: Grid::NONE,
            pictures: vec![picture],
        }
    }
}

/// What is looked for among tokens, and how many of its own stay before the image and behind it.
struct Marks {
    tokens: Vec<u32>,
    kept: [usize; 2],
}

impl Marks {
    /// Those of a vocabulary, if it has them.
    fn of(prompt: &ImagePrompt, tokenizer: &Tokenizer) -> Option<Self> {
        let (marks, kept) = match &prompt.place {
            ImagePlace::Between(marks) => (&marks[..], [1, 1]),
            ImagePlace::Instead(mark)
            | ImagePlace::Tiles { mark, .. }
            | ImagePlace::Rows { mark, .. } => (std::slice::from_ref(mark), [0, 0]),
        };
        let tokens = marks.iter().map(|mark| tokenizer.id(mark));
        Some(Self {
            tokens: tokens.collect::<Option<_>>()?,
            kept,
        })
    }

    /// Where they are in `tokens`.
    fn found<'a>(&'a self, tokens: &'a [u32]) -> impl Iterator<Item = usize> + 'a {
        let windows = tokens.windows(self.tokens.len()).enumerate();
        windows.filter_map(|(start, window)| (window == self.tokens).then_some(start))
    }
}

/// Puts the tokens of each of `images` in their places in `tokens`. Returns where each picture is, image by image.
///
/// # Errors
/// [`PromptError::ImageCount`], and [`PromptError::NoImages`] for a vocabulary without the marks.
pub(crate) fn place(
    prompt: &ImagePrompt,
    tokenizer: &Tokenizer,
    tokens: &mut Vec<u32>,
    images: &[ImageTokens],
) -> Result<Vec<Range<usize>>, PromptError> {
    let given = images.len();
    let Some(marks) = Marks::of(prompt, tokenizer) else {
        return match given {
            0 => Ok(Vec::new()),
            _ => Err(PromptError::NoImages),
        };
    };
    let written = marks.found(tokens).count();
    if written != given {
        return Err(PromptError::ImageCount { written, given });
    }
    let pictures = images.iter().flat_map(|image| &image.pictures);
    let more: usize = pictures.map(Vec::len).sum();
    let mut made = Placed {
        tokens: Vec::with_capacity(tokens.len() + more),
        pictures: Vec::new(),
    };
    let mut copied = 0;
    let [before, behind] = marks.kept;
    for (start, image) in marks.found(tokens).zip(images) {
        made.tokens
            .extend_from_slice(&tokens[copied..start + before]);
        match &prompt.place {
            ImagePlace::Tiles { mark, marks } => {
                let text = written_for(image, mark, marks);
                let beside = tokenizer.encode(&text, Special::RENDERED)?;
                let mark = tokenizer.id(mark).ok_or(PromptError::NoImages)?;
                made.interleave(&beside, mark, &image.pictures);
            }
            ImagePlace::Rows { row_end, end, .. } => {
                let [row_end, end] = [row_end, end].map(|mark| tokenizer.id(mark));
                let (Some(row_end), Some(end)) = (row_end, end) else {
                    return Err(PromptError::NoImages);
                };
                let last = image.pictures.len().saturating_sub(1);
                for (index, row) in image.pictures.iter().enumerate() {
                    made.put(row);
                    made.tokens.push(if index == last { end } else { row_end });
                }
            }
            ImagePlace::Between(_) | ImagePlace::Instead(_) => {
                image.pictures.iter().for_each(|it| made.put(it));
            }
        }
        copied = start + marks.tokens.len() - behind;
    }
    made.tokens.extend_from_slice(&tokens[copied..]);
    *tokens = made.tokens;
    Ok(made.pictures)
}

/// A prompt under way.
struct Placed {
    tokens: Vec<u32>,
    /// Where pictures are.
    pictures: Vec<Range<usize>>,
}

impl Placed {
    fn put(&mut self, picture: &[u32]) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(picture);
        self.pictures.push(start..self.tokens.len());
    }

    /// Puts `pictures` in the places of `mark` in `beside`.
    fn interleave(&mut self, beside: &[u32], mark: u32, pictures: &[Vec<u32>]) {
        let mut pictures = pictures.iter();
        for token in beside {
            let picture = (*token == mark).then(|| pictures.next()).flatten();
            match picture {
                Some(picture) => self.put(picture),
                None => self.tokens.push(*token),
            }
        }
    }
}

/// What is written for an image in a prompt, with `mark` for each of its pictures.
fn written_for(image: &ImageTokens, mark: &str, marks: &TileMarks) -> String {
    let mut text = String::new();
    let [before, between, behind] = marks.tile;
    for row in 1..=image.tiles.rows {
        for column in 1..=image.tiles.columns {
            // Writing to a string does not fail.
            let _ = write!(text, "{before}{row}{between}{column}{behind}{mark}");
        }
        text.push_str(marks.row_end);
    }
    text.push_str(match image.tiles {
        Grid::NONE => marks.before_alone,
        _ => marks.before_whole,
    });
    text.push_str(mark);
    text.push_str(marks.end);
    text
}
