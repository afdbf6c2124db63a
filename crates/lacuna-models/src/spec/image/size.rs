//! To which sizes images are brought, and how.

use std::num::NonZeroUsize;

use super::{Grid, Patches};
use crate::error::ConfigError;
use crate::spec::{TiledSizes, Tiling};

/// Which sizes an encoder takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageSize {
    /// One, whatever shape images have.
    Square {
        /// Patches of a side.
        per_side: usize,
    },
    /// The image's own, to whole squares of patches and within bounds, by a smaller or larger scale.
    Own {
        /// Patches of the side of a square.
        square: usize,
        /// Pixels at least.
        least_pixels: usize,
        /// Pixels at most.
        most_pixels: usize,
        /// Pixels of the longer side at most, where that is what bounds an image: then sides become whole squares by being
        /// made larger (Pixtral). Without it they become the nearest (Qwen).
        longest_edge: Option<usize>,
    },
    /// The image's own shape in whole squares of patches, as many of them as may be (Gemma 4).
    Filled {
        /// Patches of the side of a square.
        square: usize,
        /// Pixels at most.
        most_pixels: usize,
    },
    /// That of tiles, each of which is a picture of its own.
    Tiles(Tiling),
}

/// How pixels of another size are made of those of an image, as Pillow does it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resampling {
    /// Its `BILINEAR`.
    Bilinear,
    /// Its `BICUBIC`.
    Bicubic,
    /// Its `LANCZOS`.
    Lanczos,
}

impl Resampling {
    /// The one that Pillow has this number for, if it is one of these.
    #[must_use]
    pub const fn of_pillow(number: usize) -> Option<Self> {
        match number {
            1 => Some(Self::Lanczos),
            2 => Some(Self::Bilinear),
            3 => Some(Self::Bicubic),
            _ => None,
        }
    }
}

/// How many tokens an image of a size of its own is held to, whatever its model's files say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImageTokenBounds {
    /// A smaller one is made larger.
    pub least: Option<NonZeroUsize>,
    /// A larger one is made smaller.
    pub most: Option<NonZeroUsize>,
}

impl ImageTokenBounds {
    /// Whether nothing is said.
    #[must_use]
    pub const fn are_none(&self) -> bool {
        self.least.is_none() && self.most.is_none()
    }

    /// Why they are refused for a model that takes no images.
    pub(crate) fn useless() -> ConfigError {
        ConfigError::Unsupported {
            feature: "a number of tokens of images for a model that takes none".to_owned(),
            supported: "for models that see it is",
        }
    }
}

/// An image that is too long for its width, or too high.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "an image of {width} x {height} pixels is more than {} times as long as wide: crop it",
    Patches::MOST_ASPECT
)]
pub struct ImageTooLong {
    /// Pixels of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

impl Patches {
    /// The same for images of so many tokens, each of which is `merged` patches of a side.
    ///
    /// # Errors
    /// [`ConfigError::Unsupported`] for images of one size and in tiles, and for more tokens at least than at most.
    pub(crate) fn within(
        self,
        bounds: ImageTokenBounds,
        merged: usize,
    ) -> Result<Self, ConfigError> {
        let (square, least_pixels, most_pixels, longest_edge) = match self.size {
            ImageSize::Own {
                square,
                least_pixels,
                most_pixels,
                longest_edge,
            } => (square, least_pixels, most_pixels, longest_edge),
            ImageSize::Filled {
                square,
                most_pixels,
            } => (square, 1, most_pixels, None),
            ImageSize::Square { .. } | ImageSize::Tiles(_) => {
                return Err(ConfigError::Unsupported {
                    feature: "a number of tokens of images for a model that sees them in one size"
                        .to_owned(),
                    supported: "for models whose images have sizes of their own it is",
                });
            }
        };
        let token = merged * self.pixels;
        let pixels = |tokens: NonZeroUsize| tokens.get().saturating_mul(token * token);
        let [least, most] = [bounds.least, bounds.most].map(|tokens| tokens.map(pixels));
        if let (Some(least), Some(most)) = (bounds.least, bounds.most)
            && least > most
        {
            return Err(ConfigError::Unsupported {
                feature: format!("images of {least} tokens at least and {most} at most"),
                supported: "no more at least than at most are",
            });
        }
        // Whatever is said goes before what is not.
        let own = most_pixels.max(least.unwrap_or(0));
        let most_pixels = match (most, longest_edge) {
            (None, _) => own,
            // None is larger than one with both sides as long as may be, and nothing is planned for that.
            (Some(most), Some(_)) if own == most_pixels => most.min(own),
            (Some(most), _) => most,
        };
        let size = match self.size {
            // All images have as many as may be, whatever they have at least.
            ImageSize::Filled { .. } => ImageSize::Filled {
                square,
                most_pixels,
            },
            _ => ImageSize::Own {
                square,
                least_pixels: least.unwrap_or(least_pixels).min(most_pixels),
                most_pixels,
                longest_edge,
            },
        };
        Ok(Self { size, ..self })
    }

    /// Patches of the largest image.
    #[must_use]
    pub const fn most(&self) -> usize {
        match self.size {
            ImageSize::Square { per_side } => per_side * per_side,
            ImageSize::Tiles(tiling) => tiling.grid(self.pixels).count(),
            ImageSize::Own { most_pixels, .. } | ImageSize::Filled { most_pixels, .. } => {
                most_pixels / (self.pixels * self.pixels)
            }
        }
    }

    /// Patches of the longer side of any image.
    #[must_use]
    pub(crate) const fn longest(&self) -> usize {
        match self.size {
            ImageSize::Square { per_side } => per_side,
            ImageSize::Tiles(tiling) => tiling.grid(self.pixels).longer(),
            // The other is one square.
            ImageSize::Own { square, .. } | ImageSize::Filled { square, .. } => {
                self.most() / square
            }
        }
    }

    /// Pixels of the width and of the height to which an image of so many is brought.
    ///
    /// # Errors
    /// [`ImageTooLong`].
    pub fn fit(&self, [width, height]: [usize; 2]) -> Result<[usize; 2], ImageTooLong> {
        match self.size {
            ImageSize::Square { per_side } => Ok([per_side * self.pixels; 2]),
            ImageSize::Tiles(tiling) => Ok([tiling.grid(self.pixels).rows * self.pixels; 2]),
            ImageSize::Own {
                square,
                least_pixels,
                most_pixels,
                longest_edge,
            } => {
                let (unit, bounds) = (square * self.pixels, [least_pixels, most_pixels]);
                if let Some(longest) = longest_edge {
                    let fitted = within([width, height], longest, unit);
                    return Ok(
                        match (bounds[0]..=bounds[1]).contains(&(fitted[0] * fitted[1])) {
                            true => fitted,
                            false => fit(fitted, unit, bounds),
                        },
                    );
                }
                let (longer, shorter) = (width.max(height), width.min(height));
                if longer > shorter.saturating_mul(Self::MOST_ASPECT) {
                    return Err(ImageTooLong { width, height });
                }
                Ok(fit([width, height], unit, bounds))
            }
            ImageSize::Filled {
                square,
                most_pixels,
            } => Ok(fill([width, height], square * self.pixels, most_pixels)),
        }
    }

    /// How an image of so many pixels of width and of height is cut into several pictures, where images are.
    #[must_use]
    pub fn tiled(&self, size: [usize; 2]) -> Option<TiledSizes> {
        match self.size {
            ImageSize::Tiles(tiling) => Some(tiling.sizes(size)),
            ImageSize::Square { .. } | ImageSize::Own { .. } | ImageSize::Filled { .. } => None,
        }
    }

    /// The most tiles that an image has, or none where images are not cut.
    #[must_use]
    pub const fn most_tiles(&self) -> Grid {
        match self.size {
            ImageSize::Tiles(tiling) => tiling.most(),
            ImageSize::Square { .. } | ImageSize::Own { .. } | ImageSize::Filled { .. } => {
                Grid::NONE
            }
        }
    }

    /// Whether an image of this grid is one that the encoder takes.
    #[must_use]
    pub const fn takes(&self, grid: Grid) -> bool {
        match self.size {
            ImageSize::Square { per_side } => grid.rows == per_side && grid.columns == per_side,
            ImageSize::Tiles(tiling) => {
                let whole = tiling.grid(self.pixels);
                grid.rows == whole.rows && grid.columns == whole.columns
            }
            ImageSize::Own { square, .. } | ImageSize::Filled { square, .. } => {
                let Some(count) = grid.rows.checked_mul(grid.columns) else {
                    return false;
                };
                count > 0
                    && count <= self.most()
                    && grid.rows.is_multiple_of(square)
                    && grid.columns.is_multiple_of(square)
            }
        }
    }
}

/// Whole multiples of `unit` pixels, none of which is more than `longest` made such, as Pixtral's processor has it.
fn within(size: [usize; 2], longest: usize, unit: usize) -> [usize; 2] {
    let ratio = size.map(|side| side as f64 / longest as f64);
    let ratio = ratio[0].max(ratio[1]);
    size.map(|side| {
        let smaller = match ratio > 1.0 {
            true => (side as f64 / ratio) as usize,
            false => side,
        };
        // Of a side that is gone the reference makes an error.
        smaller.max(1).next_multiple_of(unit)
    })
}

/// The nearest whole multiples of `unit` pixels, by a scale that keeps to `[least, most]` pixels in all, as the
/// processors of Qwen's models have it. Their halves are rounded to the even.
fn fit([width, height]: [usize; 2], unit: usize, [least, most]: [usize; 2]) -> [usize; 2] {
    let unit_pixels = unit as f64;
    let [width, height] = [width, height].map(|side| side as f64);
    let rounded = [width, height].map(|side| (side / unit_pixels).round_ties_even() * unit_pixels);
    let pixels = rounded[0] * rounded[1];
    let sides = if pixels > most as f64 {
        let smaller = (width * height / most as f64).sqrt();
        [width, height]
            .map(|side| ((side / smaller / unit_pixels).floor() * unit_pixels).max(unit_pixels))
    } else if pixels < least as f64 {
        let larger = (least as f64 / (width * height)).sqrt();
        [width, height].map(|side| (side * larger / unit_pixels).ceil() * unit_pixels)
    } else {
        rounded
    };
    let mut sides = sides.map(|side| side as usize);
    // A long image has one unit of height at least, with which it may have more pixels than it may.
    let longer = usize::from(sides[1] > sides[0]);
    sides[longer] = sides[longer]
        .min((most / sides[1 - longer]) / unit * unit)
        .max(unit);
    sides
}

/// Whole multiples of `unit` pixels, as many as `most` pixels have room for in the image's shape, as Gemma 4's processor has
/// it. A side that would be gone is one.
fn fill(size: [usize; 2], unit: usize, most: usize) -> [usize; 2] {
    let [width, height] = size.map(|side| side.max(1));
    let larger = (most as f64 / (width as f64 * height as f64)).sqrt();
    let units = [width, height].map(|side| (larger * side as f64 / unit as f64).floor() as usize);
    let longest = most / (unit * unit);
    let units = match units {
        // Of a square of one the reference makes an error, if rounding lets it.
        [0, 0] => [1, 1],
        [across, 0] if across > 0 => [(width / height).min(longest), 1],
        [0, _] => [1, (height / width).min(longest)],
        both => both,
    };
    units.map(|units| units.max(1) * unit)
}
