//! What is particular to models that see: how an image becomes rows, and how a decoder takes them.

use std::num::NonZeroUsize;

use super::tiles::{TiledSizes, Tiling};
use crate::error::ConfigError;

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
}

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
    /// Most patches of a side, which keeps products of sizes small.
    pub const MOST_PER_SIDE: usize = 1024;
    /// Most pixels of a patch's side.
    pub const MOST_PIXELS: usize = 256;
    /// Most patches of an image.
    pub const MOST: usize = Self::MOST_PER_SIDE * Self::MOST_PER_SIDE;
    /// How many times as long as wide an image of a size of its own may be; its processors' bound.
    pub const MOST_ASPECT: usize = 200;

    /// The same for images of so many tokens, each of which is `merged` patches of a side.
    ///
    /// # Errors
    /// [`ConfigError::Unsupported`] for images of one size and in tiles, and for more tokens at least than at most.
    pub(crate) fn within(
        self,
        bounds: ImageTokenBounds,
        merged: usize,
    ) -> Result<Self, ConfigError> {
        let ImageSize::Own {
            square,
            least_pixels,
            most_pixels,
            longest_edge,
        } = self.size
        else {
            return Err(ConfigError::Unsupported {
                feature: "a number of tokens of images for a model that sees them in one size"
                    .to_owned(),
                supported: "for models whose images have sizes of their own it is",
            });
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
        Ok(Self {
            size: ImageSize::Own {
                square,
                least_pixels: least.unwrap_or(least_pixels).min(most_pixels),
                most_pixels,
                longest_edge,
            },
            ..self
        })
    }

    /// Elements of one: all pixels of a channel, of each frame that is in the same matrix, then those of the next.
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

    /// Patches of the largest image.
    #[must_use]
    pub const fn most(&self) -> usize {
        match self.size {
            ImageSize::Square { per_side } => per_side * per_side,
            ImageSize::Tiles(tiling) => tiling.grid(self.pixels).count(),
            ImageSize::Own { most_pixels, .. } => most_pixels / (self.pixels * self.pixels),
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
        }
    }

    /// How an image of so many pixels of width and of height is cut into several pictures, where images are.
    #[must_use]
    pub fn tiled(&self, size: [usize; 2]) -> Option<TiledSizes> {
        match self.size {
            ImageSize::Tiles(tiling) => Some(tiling.sizes(size)),
            ImageSize::Square { .. } | ImageSize::Own { .. } => None,
        }
    }

    /// The most tiles that an image has, or none where images are not cut.
    #[must_use]
    pub const fn most_tiles(&self) -> Grid {
        match self.size {
            ImageSize::Tiles(tiling) => tiling.most(),
            ImageSize::Square { .. } | ImageSize::Own { .. } => Grid::NONE,
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

    /// Whether an image of this grid is one that the encoder takes.
    #[must_use]
    pub const fn takes(&self, grid: Grid) -> bool {
        match self.size {
            ImageSize::Square { per_side } => grid.rows == per_side && grid.columns == per_side,
            ImageSize::Tiles(tiling) => {
                let whole = tiling.grid(self.pixels);
                grid.rows == whole.rows && grid.columns == whole.columns
            }
            ImageSize::Own { square, .. } => {
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
            ImageSize::Own { .. } => 1,
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
            ImageSize::Own { .. } => patches.most() / (self.merged * self.merged),
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN: Patches = Patches {
        pixels: 14,
        size: ImageSize::Own {
            square: 2,
            least_pixels: 56 * 56,
            most_pixels: 28 * 28 * 1280,
            longest_edge: None,
        },
        resampling: Resampling::Bicubic,
        frames: Frames::One,
        order: PatchOrder::Squares {
            side: 2,
            windows: None,
        },
        places: LearnedPlaces::None,
        normed: false,
        mean: [0.5; 3],
        deviation: [0.5; 3],
    };

    #[test]
    fn an_image_is_brought_to_whole_squares_within_bounds() {
        // As `smart_resize` of transformers says.
        for (size, wanted) in [
            ([640, 480], [644, 476]),
            ([28, 28], [56, 56]),
            ([42, 70], [56, 56]),
            ([4032, 3024], [1148, 840]),
            ([3000, 100], [2996, 112]),
            ([20, 4000], [28, 4004]),
            ([1, 200], [28, 812]),
            ([14, 42], [56, 112]),
        ] {
            assert_eq!(QWEN.fit(size), Ok(wanted), "{size:?}");
            assert!(QWEN.takes(QWEN.grid(wanted)), "{size:?}");
        }
        let long = QWEN.fit([1, 20_000]).expect_err("longer than any");
        assert!(long.to_string().contains("1 x 20000"), "{long}");
        assert!(QWEN.fit([1, 201]).is_err() && QWEN.fit([0, 1]).is_err());
    }

    #[test]
    fn an_image_is_brought_to_whole_squares_that_a_side_of_bounds_it() {
        let size = |longest: usize, square: usize, most_pixels| Patches {
            pixels: 14,
            size: ImageSize::Own {
                square,
                least_pixels: 1,
                most_pixels,
                longest_edge: Some(longest),
            },
            order: PatchOrder::Rows,
            ..QWEN
        };
        // As `get_resize_output_image_size` of transformers says.
        let mistral = size(1540, 2, 1540 * 1540);
        for (given, wanted) in [
            ([640, 480], [644, 504]),
            ([4032, 3024], [1540, 1176]),
            ([3024, 4032], [1176, 1540]),
            ([1541, 1541], [1540, 1540]),
            ([1, 1], [28, 28]),
            ([28, 29], [28, 56]),
        ] {
            assert_eq!(mistral.fit(given), Ok(wanted), "{given:?}");
            assert!(mistral.takes(mistral.grid(wanted)), "{given:?}");
        }
        // However long they are.
        assert_eq!(mistral.fit([1, 20_000]), Ok([28, 1540]));
        // And fewer pixels where there are to be fewer.
        let fewer = size(1540, 2, 28 * 28 * 100);
        assert_eq!(fewer.fit([4032, 3024]), Ok([308, 224]));
        assert_eq!(fewer.fit([280, 280]), Ok([280, 280]));
    }

    #[test]
    fn images_are_held_to_as_many_tokens_as_are_said() {
        let within = |least, most| {
            let [least, most] = [least, most].map(NonZeroUsize::new);
            QWEN.within(ImageTokenBounds { least, most }, 2)
        };
        let tokens = |patches: Patches, size| {
            let fitted = patches.fit(size).expect("of a shape that is taken");
            assert!(patches.takes(patches.grid(fitted)), "{size:?}");
            patches.grid(fitted).merged(2).count()
        };
        let photograph = [4032, 3024];
        for most in [1, 2, 7, 100, 1280, 5000] {
            let held = within(0, most).expect("a size of its own");
            assert!(tokens(held, photograph) <= most, "{most}");
            assert!(tokens(held, [8, 8]) <= most, "{most}");
            assert_eq!(held.most(), most * 4);
        }
        assert_eq!(tokens(within(0, 5000).expect("more"), photograph), 4941);
        let least = within(300, 0).expect("a size of its own");
        assert!(tokens(least, [8, 8]) >= 300);
        assert_eq!(tokens(least, photograph), tokens(QWEN, photograph));
        // More at least than files have at most.
        assert!(tokens(within(2000, 0).expect("more"), [8, 8]) <= 2000);
        assert!(within(5, 4).is_err());
        let one = Patches {
            size: ImageSize::Square { per_side: 4 },
            ..QWEN
        };
        let said = ImageTokenBounds {
            most: NonZeroUsize::new(4),
            least: None,
        };
        assert!(one.within(said, 2).is_err());
    }

    #[test]
    fn no_image_has_more_tokens_and_rows_than_the_largest() {
        let sides = [1usize, 28, 29, 100, 280, 999, 1540, 5000];
        for bounds in [
            [0, 0],
            [0, 1],
            [0, 60],
            [0, 100],
            [0, 9000],
            [500, 0],
            [5000, 6000],
        ] {
            let [least, most] = bounds.map(NonZeroUsize::new);
            let bounds = ImageTokenBounds { least, most };
            let patches = Patches {
                size: ImageSize::Own {
                    square: 2,
                    least_pixels: 1,
                    most_pixels: 1540 * 1540,
                    longest_edge: Some(1540),
                },
                ..QWEN
            };
            let patches = patches.within(bounds, 2).expect("a size of its own");
            let rows = ImageRows {
                merged: 2,
                merge: Merge::Apart {
                    reduced: Some(1e-5),
                },
                width: 8,
                deepstack: [None; ImageRows::MOST_DEEPSTACK],
            };
            let largest = rows.most_grid(&patches);
            for size in sides.iter().flat_map(|&width| sides.map(|it| [width, it])) {
                let fitted = patches.fit(size).expect("of any shape");
                let tokens = patches.grid(fitted).merged(2);
                assert!(patches.takes(patches.grid(fitted)), "{size:?}");
                assert!(tokens.rows <= largest.rows, "{bounds:?} {size:?}");
                assert!(tokens.count() <= largest.count(), "{bounds:?} {size:?}");
            }
            // No more is planned for than any image has.
            let held = most.map_or(3025, |most| most.get().min(3025));
            if least.is_none() {
                assert_eq!(patches.most(), held * 4, "{bounds:?}");
            }
        }
    }

    #[test]
    fn no_image_has_more_patches_than_there_may_be() {
        let sides = [1usize, 13, 14, 27, 29, 100, 999, 5000, 60_000, 1_000_000];
        for width in sides {
            for height in sides {
                let Ok(size) = QWEN.fit([width, height]) else {
                    continue;
                };
                let grid = QWEN.grid(size);
                assert!(QWEN.takes(grid), "{width} x {height}: {grid:?}");
                assert_eq!(size, [grid.columns * 14, grid.rows * 14]);
            }
        }
    }
}
