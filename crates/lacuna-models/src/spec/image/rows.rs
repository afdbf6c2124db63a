//! What becomes of patches: rows for a decoder.

use super::{Grid, ImageSize, Patches};

/// What becomes of the rows of all patches: each square of them becomes one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImageRows {
    /// Patches of a side of a square.
    pub merged: usize,
    /// How.
    pub merge: Merge,
    /// Elements of a part of a row, which is as wide as the residual stream of the decoder.
    pub width: usize,
    /// What further parts of a row are made of, in order: what layers have made of the patches.
    pub deepstack: [Option<Tap>; ImageRows::MOST_DEEPSTACK],
}

/// How a square becomes a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Merge {
    /// Its patches are normed and become their mean, which is normed by its root mean square and multiplied with a matrix
    /// (Gemma 3).
    Mean {
        /// Added to the mean square.
        norm_epsilon: f32,
    },
    /// Its patches are normed and go side by side through two products with GELU between. Those of further parts are normed
    /// side by side (Qwen).
    SideBySide,
    /// Its patches are normed and multiplied with a matrix side by side (Idefics 3, which calls it pixel shuffle).
    Joined,
    /// Its one patch goes through two products with GELU between (LLaVA). Where squares have several, all patches are normed
    /// by their root mean square before, and those of a square become one by a matrix, whose columns have the places of
    /// an element next to one another (Mistral 3).
    Apart {
        /// Added to the mean square, where they become one.
        reduced: Option<f32>,
    },
    /// Its patches become their mean, which is made longer by the root of its width, normed by its root mean square without
    /// weights, and multiplied with a matrix (Gemma 4).
    Pooled {
        /// Whether what is longer is standardized: less a learned shift, times a learned factor, both of each element.
        standardized: bool,
        /// Added to the mean square.
        norm_epsilon: f32,
    },
}

/// A layer whose rows become a part of an image's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tap {
    /// The layer's number.
    pub layer: usize,
    /// The number that files give its tensors.
    pub number: usize,
}

impl ImageRows {
    /// Most further parts of a row; published models have three.
    pub const MOST_DEEPSTACK: usize = 8;

    /// Parts of a row.
    #[must_use]
    pub fn parts(&self) -> usize {
        1 + self.deepstack.iter().flatten().count()
    }

    /// Elements of a row.
    #[must_use]
    pub fn row_width(&self) -> usize {
        self.width * self.parts()
    }

    /// Tokens of the largest picture, in as many rows as any has, where its longer side is bounded, or its shape is given;
    /// else in one, as its shape leaves open how many there are.
    #[must_use]
    pub const fn most_grid(&self, patches: &Patches) -> Grid {
        let most = self.most(patches);
        let rows = match patches.size {
            ImageSize::Own {
                longest_edge: Some(longest),
                least_pixels,
                ..
            } => {
                let side = patches.pixels * self.merged;
                let (longest, least) = (longest.div_ceil(side), least_pixels.div_ceil(side * side));
                // One that is made larger keeps its shape: at most as long as `longest` for a width of one.
                let enlarged = (least * longest - 1).isqrt() + 1;
                if longest > enlarged {
                    longest
                } else {
                    enlarged
                }
            }
            ImageSize::Square { .. } | ImageSize::Tiles(_) => most.isqrt(),
            ImageSize::Own { .. } | ImageSize::Filled { .. } => 1,
        };
        let rows = if rows < most { rows } else { most };
        Grid {
            rows,
            // Those of another shape with fewer rows may fill them all.
            columns: most.div_ceil(rows),
        }
    }

    /// Most of any image.
    #[must_use]
    pub const fn most(&self, patches: &Patches) -> usize {
        match patches.size {
            ImageSize::Square { per_side } => Grid::square(per_side).merged(self.merged).count(),
            ImageSize::Tiles(tiling) => tiling.grid(patches.pixels).merged(self.merged).count(),
            ImageSize::Own { .. } | ImageSize::Filled { .. } => {
                patches.most() / (self.merged * self.merged)
            }
        }
    }
}
