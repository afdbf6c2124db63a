//! How a decoder takes images, and how they stand in its prompts.

use crate::spec::Mask;

/// How rows of images come into a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageInput {
    /// Families of decoders whose own files may say nothing of images: what an encoder is made for says it then.
    pub silent: &'static [&'static str],
    /// How tokens of images see one another.
    pub attention: ImageAttention,
    /// Parts of a row that are added to what the first layers have made of it, one after each of them, behind the part that
    /// takes the token's place (DeepStack).
    pub deepstack: usize,
    /// How images stand in a prompt.
    pub prompt: ImagePrompt,
}

/// How the tokens of an image see one another. All tokens see what is before theirs, as far as their layer's mask
/// reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageAttention {
    /// As those of a text.
    Causal,
    /// Those of the same image behind their own too: all of them have to be computed in one pass.
    WholeImage,
    /// The same in layers whose tokens see a window; in others as those of a text (Gemma 4).
    WholeImageInWindows,
}

impl ImageAttention {
    /// Whether the tokens of an image see those of it behind their own in layers of a mask.
    #[must_use]
    pub const fn sees_whole(self, mask: Mask) -> bool {
        match self {
            Self::Causal => false,
            Self::WholeImage => true,
            Self::WholeImageInWindows => matches!(mask, Mask::Window(_)),
        }
    }
}

/// How images stand in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImagePrompt {
    /// What templates write for an image.
    pub mark: &'static str,
    /// What is encoded for it, which is more than one token where line breaks may be one with those of the text around.
    pub written: &'static str,
    /// The tokens of that between which, or in the place of which, those of the image are put.
    pub place: ImagePlace,
}

impl ImagePrompt {
    /// Whether tokens of the prompt stand between the rows of an image.
    #[must_use]
    pub const fn is_by_row(&self) -> bool {
        matches!(self.place, ImagePlace::Rows { .. })
    }
}

/// Where the tokens of an image are put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImagePlace {
    /// Between these two, one after the other.
    Between([&'static str; 2]),
    /// In the place of this one.
    Instead(&'static str),
    /// In the place of this one too, each of its pictures with marks of its own.
    Tiles {
        /// What stands for a picture among these marks, and for an image in a template.
        mark: &'static str,
        /// What is written beside.
        marks: TileMarks,
    },
    /// In the place of this one too, row by row.
    Rows {
        /// What stands for an image in a template.
        mark: &'static str,
        /// The token behind each row but the last.
        row_end: &'static str,
        /// The one behind the last.
        end: &'static str,
    },
}

/// What is written beside the pictures of an image that is cut into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileMarks {
    /// Before a tile: around and between the numbers of its row and of its column, which count from 1.
    pub tile: [&'static str; 3],
    /// Behind a row of tiles.
    pub row_end: &'static str,
    /// Before the whole where there are tiles.
    pub before_whole: &'static str,
    /// Before the whole where it is all there is.
    pub before_alone: &'static str,
    /// Behind the whole.
    pub end: &'static str,
}
