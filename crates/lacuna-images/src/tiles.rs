//! An image as several pictures: tiles of the size that an encoder takes, and the whole in the size of one (Idefics 3).

use crate::decode::{Header, Image};
use crate::picture::Picture;
use crate::resize::{Filter, resize};

/// How an image is cut into tiles, in sizes of width and height.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// What it is brought to first.
    pub resized: [usize; 2],
    /// What it is brought to then, in whole tiles, where it is cut at all; else there is the whole alone.
    pub stretched: Option<[usize; 2]>,
    /// Pixels of a tile's side.
    pub side: usize,
    /// Of these, pixels that are seen: from the top left, as many as are whole patches.
    pub seen: usize,
    /// What sizes are changed with.
    pub filter: Filter,
}

impl Tiling {
    /// Bytes of memory that making pictures of a file takes at most.
    #[must_use]
    pub fn preprocessing_bytes(&self, header: &Header) -> u64 {
        // It may lie on its side.
        let longer = header.width.max(header.height) as usize;
        // Resizing has rows of the old height and the new width.
        let resizing = |from: usize, [width, height]: [usize; 2]| width * (from + height);
        let cut = self.stretched.unwrap_or(self.resized);
        let pixels = resizing(longer, self.resized)
            + resizing(self.resized[1], cut)
            + cut[0] * cut[1]
            + resizing(cut[1], [self.side; 2]);
        header.decoding_bytes() + pixels as u64 * 3
    }

    /// The pictures of `image`: tiles from the top left, row by row, where there is more than one, and the whole as the
    /// last.
    ///
    /// # Panics
    /// When a size is none, or a tile has less pixels than are seen of it.
    #[must_use]
    pub fn pictures(&self, image: &Image) -> Vec<Picture> {
        let mut image = resize(image, self.resized, self.filter);
        let mut pictures = Vec::new();
        if let Some(stretched) = self.stretched {
            image = resize(&image, stretched, self.filter);
            let [columns, rows] = stretched.map(|pixels| pixels / self.side);
            let tiles = (0..rows * columns).filter(|_| rows * columns > 1);
            pictures.extend(tiles.map(|tile| {
                let place = [tile % columns, tile / columns];
                self.cut(&image, place.map(|index| index * self.side))
            }));
        }
        let whole = resize(&image, [self.side; 2], self.filter);
        pictures.push(self.cut(&whole, [0, 0]));
        pictures
    }

    /// What is seen of the tile whose first pixel is at `left` and `top`.
    fn cut(&self, image: &Image, [left, top]: [usize; 2]) -> Picture {
        let mut seen = Vec::with_capacity(self.seen * self.seen * 3);
        for row in top..top + self.seen {
            let first = (row * image.width() + left) * 3;
            seen.extend_from_slice(&image.pixels()[first..first + self.seen * 3]);
        }
        Picture::whole(Image::new(self.seen, self.seen, seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_parts_of_the_image_from_the_top_left() {
        let tiling = Tiling {
            resized: [4, 4],
            stretched: Some([4, 4]),
            side: 2,
            seen: 2,
            filter: Filter::Lanczos,
        };
        let pixels: Vec<u8> = (0..16 * 3).collect();
        let image = Image::new(4, 4, pixels.clone());
        let pictures = tiling.pictures(&image);
        assert_eq!(pictures.len(), 5);
        let of = |pixel: usize| &pixels[pixel * 3..][..3];
        assert_eq!(
            pictures[1].pixels(),
            [of(2), of(3), of(6), of(7)].concat(),
            "the second of the first row"
        );
        assert_eq!(pictures[2].pixels()[..3], *of(8));
        let less = Tiling { seen: 1, ..tiling };
        assert_eq!(less.pictures(&image)[1].pixels(), of(2));
        // Tiles that look alike are one picture.
        let plain = tiling.pictures(&Image::new(2, 2, [7; 12].to_vec()));
        assert_eq!(plain[0].name(), plain[4].name());
        for stretched in [None, Some([2, 2])] {
            let one = Tiling {
                resized: [2, 2],
                stretched,
                ..tiling
            };
            assert_eq!(one.pictures(&image).len(), 1);
        }
    }
}
