//! What a model sees of an image, and what that is called.

use std::fmt;
use std::ops::Range;

use crate::decode::Image;
use crate::resize::{Filter, resize};

/// The least number that stands for a part of a picture where tokens stand: above those of any vocabulary.
pub const FIRST_TOKEN: u32 = 1 << 31;

/// The bit of such a number that says that a row of parts begins with it. So the tokens alone say how many rows and
/// columns a picture has, on which positions behind it may depend.
const BEGINS_ROW: u32 = 1 << 30;

/// A picture's name: a hash of its size and pixels.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name([u8; 32]);

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8]
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Name {
    /// Numbers that stand for so many rows and columns of parts of the picture where tokens stand, each made of the name
    /// and of its place: whatever compares tokens finds the same picture again, and no other. A group of 16 tells
    /// pictures apart by 480 bits.
    #[must_use]
    pub fn tokens(&self, [rows, columns]: [usize; 2]) -> Vec<u32> {
        let mut stream = blake3::Hasher::new_keyed(&self.0).finalize_xof();
        let mut bytes = vec![0; rows * columns * 4];
        stream.fill(&mut bytes);
        let words = bytes.as_chunks::<4>().0.iter().enumerate();
        words
            .map(|(index, word)| {
                let token = (FIRST_TOKEN | u32::from_le_bytes(*word)) & !BEGINS_ROW;
                match index.is_multiple_of(columns) {
                    true => token | BEGINS_ROW,
                    false => token,
                }
            })
            .collect()
    }
}

/// Where pictures are among `tokens`, none of them next to another, and how many rows and columns each has.
pub fn pictures_in(tokens: &[u32]) -> impl Iterator<Item = (Range<usize>, [usize; 2])> {
    let mut start = 0;
    let runs = tokens.chunk_by(|a, b| (*a < FIRST_TOKEN) == (*b < FIRST_TOKEN));
    runs.filter_map(move |run| {
        let range = start..start + run.len();
        start = range.end;
        let begins = |token: &&u32| **token & BEGINS_ROW != 0;
        let rows = run.iter().filter(begins).count();
        let columns = usize::checked_div(run.len(), rows)?;
        (run[0] >= FIRST_TOKEN).then_some((range, [rows, columns]))
    })
}

/// An image as an encoder takes it: of a size that is right for that encoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    image: Image,
    name: Name,
}

impl Picture {
    /// The whole of `image`, stretched to so many pixels of width and of height.
    ///
    /// # Panics
    /// When either is none.
    #[must_use]
    pub fn of(image: &Image, size: [usize; 2], filter: Filter) -> Self {
        Self::whole(resize(image, size, filter))
    }

    /// An image as it is.
    pub(crate) fn whole(image: Image) -> Self {
        let mut hasher = blake3::Hasher::new();
        for side in [image.width(), image.height()] {
            hasher.update(&(side as u64).to_le_bytes());
        }
        let name = Name(*hasher.update(image.pixels()).finalize().as_bytes());
        Self { image, name }
    }

    /// Pixels of its width and of its height.
    #[must_use]
    pub fn size(&self) -> [usize; 2] {
        [self.image.width(), self.image.height()]
    }

    /// Red, green and blue of each pixel, row by row.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        self.image.pixels()
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> Name {
        self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(image: &Image, side: usize) -> Picture {
        Picture::of(image, [side; 2], Filter::Triangle)
    }

    #[test]
    fn a_picture_is_named_by_what_is_seen_of_it() {
        let red = |width, height| Image::new(width, height, [255, 0, 0].repeat(width * height));
        let (small, large) = (picture(&red(3, 5), 8), picture(&red(90, 20), 8));
        assert_eq!(small, large);
        let mut other = red(8, 8).pixels().to_vec();
        other[100] ^= 1;
        let other = picture(&Image::new(8, 8, other), 8);
        assert_ne!(small.name(), other.name());
        assert_ne!(small.name().tokens([2, 2]), other.name().tokens([2, 2]));
        // The same bytes in other rows are another picture.
        let [wide, tall] =
            [[8, 2], [2, 8]].map(|size| Picture::of(&red(8, 8), size, Filter::Cubic));
        assert_eq!(wide.pixels(), tall.pixels());
        assert_ne!(wide.name(), tall.name());
    }

    #[test]
    fn its_tokens_are_no_vocabularys_and_differ_by_place() {
        let picture = picture(&Image::new(1, 1, vec![1, 2, 3]), 4);
        let tokens = picture.name().tokens([16, 16]);
        assert!(tokens.iter().all(|token| *token >= FIRST_TOKEN));
        let mut sorted = tokens.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 256);
        assert_eq!(
            picture.name().tokens([1, 16]),
            tokens[..16],
            "fewer are the first of more"
        );
    }

    #[test]
    fn its_tokens_alone_say_how_many_rows_and_columns_it_has() {
        let name = picture(&Image::new(1, 1, vec![1, 2, 3]), 4).name();
        let [wide, tall, one] = [[2, 5], [4, 1], [1, 1]].map(|grid| name.tokens(grid));
        let tokens = [&[7, 8][..], &wide, &[9], &tall, &[9, 9], &one].concat();
        let found: Vec<_> = pictures_in(&tokens).collect();
        assert_eq!(found, [(2..12, [2, 5]), (13..17, [4, 1]), (19..20, [1, 1])]);
        assert_eq!(pictures_in(&[1, 2]).count() + pictures_in(&[]).count(), 0);
        // What nobody has made is no picture.
        assert_eq!(pictures_in(&[FIRST_TOKEN; 3]).count(), 0);
    }
}
