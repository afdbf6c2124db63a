//! What a model sees of an image, and what that is called.

use std::fmt;

use crate::decode::Image;
use crate::resize::resize;

/// The least number that stands for a part of a picture where tokens stand: above those of any vocabulary.
pub const FIRST_TOKEN: u32 = 1 << 31;

/// A picture's name: a hash of its pixels.
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
    /// `count` numbers that stand for the picture where tokens stand, each made of the name and of its place: whatever
    /// compares tokens finds the same picture again, and no other. A group of 16 tells pictures apart by 496 bits.
    #[must_use]
    pub fn tokens(&self, count: usize) -> Vec<u32> {
        let mut stream = blake3::Hasher::new_keyed(&self.0).finalize_xof();
        let mut bytes = vec![0; count * 4];
        stream.fill(&mut bytes);
        let words = bytes.as_chunks::<4>().0.iter();
        words
            .map(|word| FIRST_TOKEN | u32::from_le_bytes(*word))
            .collect()
    }
}

/// An image as an encoder takes it: square, of that encoder's size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    pixels: Vec<u8>,
    name: Name,
}

impl Picture {
    /// The whole of `image`, stretched to `side` pixels of a side, as SigLIP's preprocessing does.
    ///
    /// # Panics
    /// When `side` is none.
    #[must_use]
    pub fn of(image: &Image, side: usize) -> Self {
        let pixels = resize(image, side, side).pixels().to_vec();
        let name = Name(*blake3::hash(&pixels).as_bytes());
        Self { pixels, name }
    }

    /// Red, green and blue of each pixel, row by row.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
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

    #[test]
    fn a_picture_is_named_by_what_is_seen_of_it() {
        let red = |width, height| Image::new(width, height, [255, 0, 0].repeat(width * height));
        let (small, large) = (Picture::of(&red(3, 5), 8), Picture::of(&red(90, 20), 8));
        assert_eq!(small, large);
        let mut other = red(8, 8).pixels().to_vec();
        other[100] ^= 1;
        let other = Picture::of(&Image::new(8, 8, other), 8);
        assert_ne!(small.name(), other.name());
        assert_ne!(small.name().tokens(4), other.name().tokens(4));
    }

    #[test]
    fn its_tokens_are_no_vocabularys_and_differ_by_place() {
        let picture = Picture::of(&Image::new(1, 1, vec![1, 2, 3]), 4);
        let tokens = picture.name().tokens(256);
        assert!(tokens.iter().all(|token| *token >= FIRST_TOKEN));
        let mut sorted = tokens.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 256);
        assert_eq!(
            picture.name().tokens(16),
            tokens[..16],
            "fewer are the first of more"
        );
    }
}
