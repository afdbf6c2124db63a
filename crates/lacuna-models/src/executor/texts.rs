//! Texts for one pass, end to end.

/// Tokens of several texts, one text after another without padding.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts {
    tokens: Vec<u32>,
    /// Of each text, where it ends.
    ends: Vec<usize>,
}

impl Texts {
    /// No texts.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a text.
    pub fn push(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.ends.push(self.tokens.len());
    }

    /// Removes all texts; what they took stays for others.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.ends.clear();
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

    /// Where a text's tokens are among those of all.
    pub(crate) fn range(&self, index: usize) -> std::ops::Range<usize> {
        let start = match index.checked_sub(1) {
            None => 0,
            Some(before) => self.ends[before],
        };
        start..self.ends[index]
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
