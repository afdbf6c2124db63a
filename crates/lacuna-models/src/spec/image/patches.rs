//! What patches of an image are, and in which order layers have them.

use super::{Grid, ImageSize, Resampling};

/// An image as rows that the first layer reads: squares of pixels, normed and multiplied with a matrix, and what is
/// learned of each place.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Patches {
    /// Pixels of a patch's side.
    pub pixels: usize,
    /// Which sizes images are brought to.
    pub size: ImageSize,
    /// How they are brought there.
    pub resampling: Resampling,
    /// Frames of a patch.
    pub frames: Frames,
    /// In which order a patch's elements are.
    pub channels: Channels,
    /// In which order layers have them.
    pub order: PatchOrder,
    /// What is learned of their places, and added to them.
    pub places: LearnedPlaces,
    /// Whether their rows are normed before the first layer.
    pub normed: bool,
    /// What is subtracted of each channel, whose values are from 0 to 1: red, green, blue.
    pub mean: [f32; 3],
    /// What they are divided by then.
    pub deviation: [f32; 3],
}

/// Frames of a patch: encoders of videos have two, which an image has alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frames {
    /// One.
    One,
    /// Two in one matrix: of each channel the one and then the other.
    TwoTogether,
    /// Two, each with a matrix of its own.
    TwoApart,
}

/// In which order the elements of a patch are, each row of pixels behind the one above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channels {
    /// All of the first channel, then those of the next.
    Apart,
    /// The three of a pixel, then those of the next.
    Together,
}

/// In which order layers have patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchOrder {
    /// Row by row, from the top left.
    Rows,
    /// Square by square, row by row, and of each square so.
    Squares {
        /// Patches of its side.
        side: usize,
        /// Where squares are taken window by window.
        windows: Option<Windows>,
    },
}

/// Squares of squares of patches that see one another alone in most layers. Those at the right and the bottom may be smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Squares of patches of a side.
    pub side: usize,
    /// Of so many layers the last sees all of the image.
    pub full_every: usize,
}

/// What is learned of patches' places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LearnedPlaces {
    /// Nothing.
    None,
    /// A row for each.
    Each,
    /// Rows for a square of places, between which those of an image are.
    Between {
        /// Places of its side.
        per_side: usize,
    },
    /// A row for the column of a patch, and one for its row, both of which are added to it.
    Axes {
        /// Rows for columns; as many for rows are behind them.
        each: usize,
    },
}

impl Patches {
    /// Most patches of a side, which keeps products of sizes small.
    pub const MOST_PER_SIDE: usize = 1024;
    /// Most pixels of a patch's side.
    pub const MOST_PIXELS: usize = 256;
    /// Most patches of an image.
    pub const MOST: usize = Self::MOST_PER_SIDE * Self::MOST_PER_SIDE;
    /// How many times as long as wide an image of a size of its own may be; its processors' bound.
    pub const MOST_ASPECT: usize = 200;

    /// Elements of one: all pixels of all channels, of each frame that is in the same matrix.
    #[must_use]
    pub const fn elements(&self) -> usize {
        3 * self.frames.together() * self.pixels * self.pixels
    }

    /// Bytes of one's pixels, three of each.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        3 * self.pixels * self.pixels
    }

    /// Whether patches see those of their window alone in a layer.
    #[must_use]
    pub const fn is_windowed(&self, layer: usize) -> bool {
        match self.order {
            PatchOrder::Squares {
                windows: Some(windows),
                ..
            } => !(layer + 1).is_multiple_of(windows.full_every),
            PatchOrder::Squares { windows: None, .. } | PatchOrder::Rows => false,
        }
    }

    /// The patches of an image of so many pixels of width and of height, which [`Patches::fit`] gave.
    #[must_use]
    pub const fn grid(&self, [width, height]: [usize; 2]) -> Grid {
        Grid {
            rows: height / self.pixels,
            columns: width / self.pixels,
        }
    }
}

impl Frames {
    /// How many a matrix has.
    #[must_use]
    pub const fn together(self) -> usize {
        match self {
            Self::One | Self::TwoApart => 1,
            Self::TwoTogether => 2,
        }
    }
}
