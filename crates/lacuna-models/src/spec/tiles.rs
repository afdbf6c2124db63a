//! Images as several pictures: tiles of the size that an encoder takes, and the whole in the size of one.

use super::Grid;

/// How images are cut into tiles (Idefics 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Pixels of a tile's side; those beyond the last whole patch are not seen.
    pub side: usize,
    /// Pixels of the longer side of an image before it is cut, whatever it had; then both are stretched to whole tiles.
    pub longest_edge: usize,
    /// Whether there are tiles at all; else there is the whole alone.
    pub split: bool,
}

/// Sizes of an image on its way to pictures, each of width and height in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiledSizes {
    /// With its longer side as long as that is to be.
    pub resized: [usize; 2],
    /// In whole tiles, where it is cut.
    pub stretched: Option<[usize; 2]>,
    /// Pixels of a tile's side, and of the whole's as the last of the pictures.
    pub side: usize,
    /// The tiles; none where the whole is all there is.
    pub tiles: Grid,
}

/// Pixels of a side at most, whatever a model's files say: what the reference implementation allows.
const MOST_SIDE: usize = 4096;

impl Tiling {
    /// The most tiles of a side: vocabularies have marks of so many.
    pub const MOST_PER_SIDE: usize = 6;

    /// The patches of a tile, of so many pixels of a side each.
    #[must_use]
    pub const fn grid(&self, patch_pixels: usize) -> Grid {
        Grid::square(self.side / patch_pixels)
    }

    /// The most tiles that any image has.
    #[must_use]
    pub const fn most(&self) -> Grid {
        let longest = match self.longest_edge < MOST_SIDE {
            // The shorter side of a nearly square one is made even.
            true => self.longest_edge.next_multiple_of(2),
            false => MOST_SIDE,
        };
        let most = longest.div_ceil(self.side);
        match self.split && most > 1 {
            true => Grid::square(most),
            false => Grid::NONE,
        }
    }

    /// Those of an image of this width and height.
    ///
    /// The reference's arithmetic, in numbers of the same kind: a pixel decides on a row of tiles.
    #[must_use]
    pub fn sizes(&self, [width, height]: [usize; 2]) -> TiledSizes {
        let even = |pixels: usize| pixels.next_multiple_of(2).max(1);
        let longest = self.longest_edge;
        let aspect = width as f64 / height as f64;
        let resized = bounded(match width >= height {
            true => [longest, even((longest as f64 / aspect) as usize)],
            false => [even((longest as f64 * aspect) as usize), longest],
        });
        let [width, height] = resized;
        let aspect = width as f64 / height as f64;
        let whole = |pixels: usize| pixels.max(1).next_multiple_of(self.side);
        let stretched = match width >= height {
            true => {
                let width = whole(width);
                [width, whole((width as f64 / aspect) as usize)]
            }
            false => {
                let height = whole(height);
                [whole((height as f64 * aspect) as usize), height]
            }
        };
        let [columns, rows] = stretched.map(|pixels| pixels / self.side);
        let tiles = match self.split && rows * columns > 1 {
            true => Grid { rows, columns },
            false => Grid::NONE,
        };
        TiledSizes {
            resized,
            stretched: self.split.then_some(stretched),
            side: self.side,
            tiles,
        }
    }
}

/// Sides of the same proportions that are no longer than any may be.
fn bounded([width, height]: [usize; 2]) -> [usize; 2] {
    let aspect = width as f64 / height as f64;
    let most = MOST_SIDE as f64;
    match width >= height {
        true if width > MOST_SIDE => [MOST_SIDE, ((most / aspect) as usize).max(1)],
        false if height > MOST_SIDE => [((most * aspect) as usize).max(1), MOST_SIDE],
        _ => [width, height],
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As SmolVLM has it.
    const SMOL: Tiling = Tiling {
        side: 512,
        longest_edge: 2048,
        split: true,
    };

    #[test]
    fn photographs_become_tiles_of_their_proportions() {
        let tiles = |width, height| {
            let Grid { rows, columns } = SMOL.sizes([width, height]).tiles;
            (rows, columns)
        };
        assert_eq!(tiles(4032, 3024), (3, 4));
        assert_eq!(tiles(3024, 4032), (4, 3));
        // Small ones are made larger.
        assert_eq!((tiles(8, 8), tiles(100, 20)), ((4, 4), (1, 4)));
        assert_eq!((tiles(1, 20_000), tiles(20_000, 1)), ((4, 1), (1, 4)));
        let whole = Tiling {
            longest_edge: 512,
            ..SMOL
        };
        assert_eq!(whole.sizes([4032, 3024]).tiles, Grid::NONE);
        let unsplit = Tiling {
            split: false,
            ..SMOL
        };
        assert_eq!(unsplit.sizes([4032, 3024]).tiles, Grid::NONE);
    }

    proptest! {
        #[test]
        fn no_image_has_more_tiles_than_the_most_of_its_tiling(
            size in [1usize..100_000, 1usize..100_000],
            (side, longest_edge) in (1usize..600, 1usize..9000),
        ) {
            let tiling = Tiling { side, longest_edge, ..SMOL };
            let TiledSizes { resized, stretched, tiles, .. } = tiling.sizes(size);
            let stretched = stretched.expect("it is cut");
            prop_assert!(resized.iter().all(|side| (1..=MOST_SIDE).contains(side)));
            prop_assert!(stretched.iter().all(|pixels| pixels % side == 0 && *pixels > 0));
            let most = tiling.most();
            prop_assert!(tiles.rows <= most.rows && tiles.columns <= most.columns);
        }
    }
}
