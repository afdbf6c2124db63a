//! Texts for one pass, end to end.

/// Tokens of several texts, one text after another without padding.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts {
    tokens: Vec<u32>,
    /// Of each text, where it ends.
    ends: Vec<usize>,
    /// And where one begins that it is compared with, or else its end.
    seconds: Vec<usize>,
}

impl Texts {
    /// No texts.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a text.
    pub fn push(&mut self, tokens: &[u32]) {
        self.push_pair(tokens, tokens.len());
    }

    /// Adds two texts as one sequence, of which the second begins at the token of this number.
    pub fn push_pair(&mut self, tokens: &[u32], second: usize) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.ends.push(self.tokens.len());
        self.seconds.push(start + second);
    }

    /// Removes all texts; what they took stays for others.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.ends.clear();
        self.seconds.clear();
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Tokens of all of them.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens of all, one text after another.
    pub(crate) fn all(&self) -> &[u32] {
        &self.tokens
    }

    /// Where a text's tokens are among those of all.
    pub(crate) fn range(&self, index: usize) -> std::ops::Range<usize> {
        let start = match index.checked_sub(1) {
            None => 0,
            Some(before) => self.ends[before],
        };
        start..self.ends[index]
    }

    /// Of each token, whether it belongs to a text that another is compared with: 1, else 0.
    pub(crate) fn token_types(&self) -> impl Iterator<Item = u32> {
        (0..self.len()).flat_map(|index| {
            let second = self.seconds[index];
            self.range(index)
                .map(move |token| u32::from(token >= second))
        })
    }

    /// The tokens of each.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.len()).map(|index| &self.tokens[self.range(index)])
    }
}

impl<T: AsRef<[u32]>> FromIterator<T> for Texts {
    fn from_iter<I: IntoIterator<Item = T>>(texts: I) -> Self {
        let mut all = Self::new();
        for text in texts {
            all.push(text.as_ref());
        }
        all
    }
}
