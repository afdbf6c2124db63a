//! What a model has made of the last tokens of a sequence, as a head that guesses takes it.
//!
//! ```text
//! tokens     t0 t1 ... t40 t41 ... t59 | t60 pending
//! features                 f41 ... f59                of computed tokens, the last few of them
//! head                        t42 ... t59 t60         reads each with the features of the one before it
//! ```

use std::ops::Range;

/// Features of consecutive tokens.
#[derive(Debug)]
pub(crate) struct Features {
    /// Elements of a row.
    width: usize,
    /// The token that the first row is of.
    first: usize,
    rows: Vec<f32>,
}

impl Features {
    /// Tokens whose features are kept: of a prompt the head reads so much with the first guess, which is a pass of one
    /// layer, and later ones need those of one step, which are fewer.
    pub(crate) const MOST: usize = 64;

    /// None yet, of `width` elements each.
    pub(crate) const fn new(width: usize) -> Self {
        Self {
            width,
            first: 0,
            rows: Vec::new(),
        }
    }

    /// Bytes that features of `width` elements take at most.
    pub(crate) const fn bytes(width: usize) -> usize {
        Self::MOST * width * size_of::<f32>()
    }

    /// Elements of a row.
    pub(crate) const fn width(&self) -> usize {
        self.width
    }

    /// Takes up `rows` of tokens from `start` on; of later ones there were none, or others.
    pub(crate) fn hear(&mut self, start: usize, rows: &[f32]) {
        self.keep(start);
        let count = rows.len() / self.width;
        let skipped = count.saturating_sub(Self::MOST);
        if self.end() != start || skipped > 0 {
            self.rows.clear();
            self.first = start + skipped;
        }
        let rows = &rows[skipped * self.width..];
        let over = (self.rows.len() + rows.len()).saturating_sub(Self::MOST * self.width);
        self.rows.drain(..over);
        self.first += over / self.width;
        // What there is at most, so that no token makes it grow.
        self.rows
            .reserve_exact(Self::MOST * self.width - self.rows.len());
        self.rows.extend_from_slice(rows);
    }

    /// Keeps those of the first `tokens` tokens.
    pub(crate) fn keep(&mut self, tokens: usize) {
        let rows = tokens.saturating_sub(self.first) * self.width;
        self.rows.truncate(rows);
    }

    /// Behind the last token that it has.
    fn end(&self) -> usize {
        self.first + self.rows.len() / self.width
    }

    /// The tokens that can be read: those behind one whose features there are.
    pub(crate) fn readable(&self) -> Range<usize> {
        self.first + 1..self.end() + 1
    }

    /// What is read with each of `tokens`, which are readable.
    pub(crate) fn before(&self, tokens: Range<usize>) -> &[f32] {
        let rows = tokens.start - 1 - self.first..tokens.end - 1 - self.first;
        &self.rows[rows.start * self.width..rows.end * self.width]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of tokens, each of its number.
    fn of(tokens: Range<usize>) -> Vec<f32> {
        tokens.flat_map(|token| [token as f32; 2]).collect()
    }

    #[test]
    fn each_token_is_read_with_what_was_made_of_the_one_before_it() {
        let mut features = Features::new(2);
        assert!(features.readable().is_empty());
        features.hear(10, &of(10..15));
        assert_eq!(features.readable(), 11..16);
        assert_eq!(features.before(12..14), of(11..13));
        // Of guesses that were wrong others come.
        features.hear(12, &of(12..13));
        assert_eq!(features.readable(), 11..14);
        // Behind a gap nothing is known of what was before.
        features.hear(20, &of(20..22));
        assert_eq!(features.readable(), 21..23);
        features.keep(21);
        assert_eq!(features.readable(), 21..22);
        features.keep(3);
        assert!(features.readable().is_empty());
    }

    #[test]
    fn the_last_are_kept_however_they_came() {
        let mut whole = Features::new(2);
        whole.hear(0, &of(0..200));
        assert_eq!(whole.readable(), 200 - Features::MOST + 1..201);
        let mut pieces = Features::new(2);
        for start in (0..200).step_by(5) {
            pieces.hear(start, &of(start..start + 5));
        }
        assert_eq!(pieces.readable(), whole.readable());
        let all = whole.readable();
        assert_eq!(pieces.before(all.clone()), whole.before(all));
        assert_eq!(
            pieces.rows.capacity() * size_of::<f32>(),
            Features::bytes(2)
        );
    }
}
