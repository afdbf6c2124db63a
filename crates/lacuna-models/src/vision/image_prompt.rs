//! How images stand in a prompt: templates write something for each, and the image's tokens are put where the family says.

use std::ops::Range;

use lacuna_text::tokenizer::Tokenizer;

use crate::error::PromptError;
use crate::spec::{ImagePlace, ImagePrompt};

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
            ImagePlace::Instead(mark) => (std::slice::from_ref(mark), [0, 0]),
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

/// Puts the tokens of each of `images` in their places in `tokens`. Returns where each is.
///
/// # Errors
/// [`PromptError::ImageCount`], and [`PromptError::NoImages`] for a vocabulary without the marks.
pub(crate) fn place(
    prompt: &ImagePrompt,
    tokenizer: &Tokenizer,
    tokens: &mut Vec<u32>,
    images: &[Vec<u32>],
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
    let more: usize = images.iter().map(Vec::len).sum();
    let mut made = Vec::with_capacity(tokens.len() + more);
    let mut places = Vec::with_capacity(given);
    let mut copied = 0;
    let [before, behind] = marks.kept;
    for (start, image) in marks.found(tokens).zip(images) {
        made.extend_from_slice(&tokens[copied..start + before]);
        places.push(made.len()..made.len() + image.len());
        made.extend_from_slice(image);
        copied = start + marks.tokens.len() - behind;
    }
    made.extend_from_slice(&tokens[copied..]);
    *tokens = made;
    Ok(places)
}
