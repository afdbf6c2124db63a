//! What is particular to models that see: how an image becomes rows, and how a decoder takes them.

/// A square image as rows that the first layer reads: squares of pixels, normed and multiplied with a matrix,
/// and a learned row for each place. They are numbered row by row, from the top left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Patches {
    /// Patches of a side.
    pub per_side: usize,
    /// Pixels of a patch's side.
    pub pixels: usize,
    /// What is subtracted of each channel, whose values are from 0 to 1: red, green, blue.
    pub mean: [f32; 3],
    /// What they are divided by then.
    pub deviation: [f32; 3],
}

impl Patches {
    /// Most patches of a side, which keeps products of sizes small.
    pub const MOST_PER_SIDE: usize = 1024;
    /// Most pixels of a patch's side.
    pub const MOST_PIXELS: usize = 256;

    /// How many there are.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.per_side * self.per_side
    }

    /// Elements of one: all pixels of a channel, then those of the next.
    #[must_use]
    pub const fn elements(&self) -> usize {
        3 * self.pixels * self.pixels
    }

    /// Pixels of the image's side.
    #[must_use]
    pub const fn image_side(&self) -> usize {
        self.per_side * self.pixels
    }
}

/// What becomes of the rows of all patches: squares of them become their mean, which is normed by its root mean
/// square and multiplied with a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImageRows {
    /// Patches of a side of a square that becomes one row.
    pub merged: usize,
    /// Added to the mean square.
    pub norm_epsilon: f32,
    /// Elements of a row, which is as wide as the residual stream of the decoder.
    pub width: usize,
}

impl ImageRows {
    /// How many there are of `patches`.
    #[must_use]
    pub const fn count(&self, patches: &Patches) -> usize {
        let side = patches.per_side / self.merged;
        side * side
    }
}

/// How the tokens of an image see one another. All tokens see what is before theirs, as far as their layer's mask
/// reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageAttention {
    /// As those of a text.
    Causal,
    /// Those of the same image behind their own too: all of them have to be computed in one pass.
    WholeImage,
}
