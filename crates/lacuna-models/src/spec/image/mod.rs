//! What is particular to models that see: how an image becomes rows, and how a decoder takes them.

mod input;
mod patches;
mod rows;
mod size;
#[cfg(test)]
mod tests;

pub use input::{ImageAttention, ImageInput, ImagePlace, ImagePrompt, TileMarks};
pub use patches::{Channels, Frames, LearnedPlaces, PatchOrder, Patches, Windows};
pub use rows::{ImageRows, Merge, Tap};
pub use size::{ImageSize, ImageTokenBounds, ImageTooLong, Resampling};

/// Rows and columns: of an image's patches, or of the tokens that stand for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grid {
    /// How many rows.
    pub rows: usize,
    /// How many columns.
    pub columns: usize,
}

impl Grid {
    /// No cells.
    pub const NONE: Self = Self {
        rows: 0,
        columns: 0,
    };

    /// As many rows as columns.
    #[must_use]
    pub const fn square(side: usize) -> Self {
        Self {
            rows: side,
            columns: side,
        }
    }

    /// One row.
    #[must_use]
    pub const fn row(columns: usize) -> Self {
        Self { rows: 1, columns }
    }

    /// Cells.
    #[must_use]
    pub const fn count(self) -> usize {
        self.rows * self.columns
    }

    /// The longer side.
    #[must_use]
    pub const fn longer(self) -> usize {
        if self.rows > self.columns {
            self.rows
        } else {
            self.columns
        }
    }

    /// That of whole squares of `side` cells of a side.
    #[must_use]
    pub const fn merged(self, side: usize) -> Self {
        Self {
            rows: self.rows / side,
            columns: self.columns / side,
        }
    }
}
