//! How images stand in a prompt: Gemma's templates write a mark for each, which becomes two with the image between
//! them, on lines of its own.

use std::ops::Range;

use lacuna_text::tokenizer::Tokenizer;

use crate::error::PromptError;

/// What templates write for an image.
pub(crate) const BEGIN: &str = "<start_of_image>";
const END: &str = "<end_of_image>";
/// What is encoded for it: the line breaks may be one token with those of the text around.
pub(crate) const WRITTEN: &str = "\n\n<start_of_image><end_of_image>\n\n";

/// Puts `images` between the marks in `tokens`. Returns where each is.
///
/// # Errors
/// [`PromptError::ImageCount`], and [`PromptError::NoImages`] for a vocabulary without the marks.
pub(crate) fn place(
    tokenizer: &Tokenizer,
    tokens: &mut Vec<u32>,
    images: &[Vec<u32>],
) -> Result<Vec<Range<usize>>, PromptError> {
    let given = images.len();
    let (Some(begin), Some(end)) = (tokenizer.id(BEGIN), tokenizer.id(END)) else {
        return match given {
            0 => Ok(Vec::new()),
            _ => Err(PromptError::NoImages),
        };
    };
    let marks = |pair: &[u32]| pair == [begin, end];
    let written = tokens.windows(2).filter(|pair| marks(pair)).count();
    if written != given {
        return Err(PromptError::ImageCount { written, given });
    }
    let (mut made, mut places) = (Vec::with_capacity(tokens.len()), Vec::with_capacity(given));
    let mut images = images.iter();
    for (index, token) in tokens.iter().enumerate() {
        made.push(*token);
        if tokens.get(index..index + 2).is_some_and(marks)
            && let Some(image) = images.next()
        {
            places.push(made.len()..made.len() + image.len());
            made.extend_from_slice(image);
        }
    }
    *tokens = made;
    Ok(places)
}
