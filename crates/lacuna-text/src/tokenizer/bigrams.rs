//! Where a text can be cut without changing how it merges.
//!
//! A merge joins two neighbours into a token of the vocabulary. So where no token has the two
//! characters of a place next to each other, no merge reaches across it, and the parts on either side
//! merge alone as they do together. Nearly every beginning of a word is such a place.

/// Pairs of neighbouring characters that some token has. Others may seem to be among them; none that
/// are seem not to be.
#[derive(Debug)]
pub(super) struct Bigrams(Box<[u64]>);

/// Few enough bits to stay in a cache, and enough for a tenth of them to be set by the hundred thousand
/// pairs of a large vocabulary.
const BITS: usize = 1 << 20;

impl Bigrams {
    pub(super) fn none() -> Bigrams {
        Bigrams(vec![0u64; BITS / 64].into_boxed_slice())
    }

    pub(super) fn of<'a>(tokens: impl Iterator<Item = &'a str>) -> Bigrams {
        let mut bigrams = Self::none();
        tokens.for_each(|token| bigrams.add(token));
        bigrams
    }

    pub(super) fn add(&mut self, token: &str) {
        let mut characters = token.chars();
        let Some(mut first) = characters.next() else {
            return;
        };
        for second in characters {
            let bit = bit(first, second);
            self.0[bit / 64] |= 1 << (bit % 64);
            first = second;
        }
    }

    /// Whether a token may have the two characters next to each other.
    pub(super) fn may_join(&self, first: char, second: char) -> bool {
        let bit = bit(first, second);
        self.0[bit / 64] >> (bit % 64) & 1 == 1
    }
}

/// Multiplicative hashing: the high bits of a product depend on all bits of its factor.
fn bit(first: char, second: char) -> usize {
    let pair = u64::from(first) << 32 | u64::from(second);
    (pair.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - BITS.ilog2())) as usize
}
