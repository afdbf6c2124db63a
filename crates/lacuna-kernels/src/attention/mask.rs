//! Which rows queries see.

use std::num::NonZeroUsize;
use std::ops::Range;

/// Which rows a query sees. The first and the last of them move forward with the query, or stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// All rows up to its own.
    Causal,
    /// Sliding window: this many rows, its own the last of them. Earlier ones are never touched.
    Window(NonZeroUsize),
    /// Rows from the last multiple of this up to its own (Llama 4). Earlier ones are never touched.
    Chunk(NonZeroUsize),
    /// Every row that K and V hold, those behind its own too: encoders. K and V hold all rows from 0 on.
    Full,
    /// Of those, the rows at most this far from its own, on either side: encoders with a symmetric
    /// window.
    Around(usize),
}

impl Mask {
    /// The first row that a query at `row` sees. Later queries do not see rows before it, and those of
    /// the same row do not see another: a cache may drop what is before.
    pub const fn first_row(self, row: usize) -> usize {
        match self {
            Mask::Causal | Mask::Full => 0,
            Mask::Window(rows) => (row + 1).saturating_sub(rows.get()),
            Mask::Chunk(rows) => row / rows.get() * rows.get(),
            Mask::Around(rows) => row.saturating_sub(rows),
        }
    }

    /// Most rows that a query sees, if that does not grow with what there is.
    pub(super) fn most_rows(self) -> Option<usize> {
        match self {
            Mask::Causal | Mask::Full => None,
            Mask::Window(rows) | Mask::Chunk(rows) => Some(rows.get()),
            Mask::Around(rows) => Some(rows.saturating_mul(2).saturating_add(1)),
        }
    }

    /// What a query at `row` sees where rows up to `end` are held.
    pub(super) fn rows(self, row: usize, end: usize) -> Range<usize> {
        let seen = match self {
            Mask::Causal | Mask::Window(_) | Mask::Chunk(_) => row + 1,
            Mask::Full => end,
            Mask::Around(rows) => end.min(row.saturating_add(rows).saturating_add(1)),
        };
        self.first_row(row)..seen
    }
}

/// What a token and those after it see.
#[derive(Clone, Copy)]
pub(super) struct Sight {
    pub(super) mask: Mask,
    /// The row of the first token.
    pub(super) first: usize,
    /// Behind the last row that is held.
    pub(super) end: usize,
    /// Whether tokens see the rows behind their own too, whatever the mask says of those.
    pub(super) ahead: bool,
}

impl Sight {
    /// Rows that a token sees.
    pub(super) fn of(&self, token: usize) -> Range<usize> {
        let row = self.first + token;
        match self.ahead {
            true => self.mask.first_row(row)..self.end,
            false => self.mask.rows(row, self.end),
        }
    }

    /// From the first to the last row that the first `count` tokens see.
    pub(super) fn of_tokens(&self, count: usize) -> Range<usize> {
        self.of(0).start..self.of(count - 1).end
    }

    /// What a token sees of `len` rows from `start` on, relative to `start`.
    pub(super) fn within(&self, token: usize, start: usize, len: usize) -> Range<usize> {
        let place = |row: usize| row.saturating_sub(start).min(len);
        let rows = self.of(token);
        place(rows.start)..place(rows.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of all sorts, from the smallest on.
    fn masks() -> impl Iterator<Item = Mask> {
        let sizes = [1, 2, 5, 16, 40, usize::MAX];
        let sized = sizes.into_iter().flat_map(|rows| {
            let rows = NonZeroUsize::new(rows).expect("not zero");
            [Mask::Window(rows), Mask::Chunk(rows)]
        });
        let around = [0, 1, 7, 40, usize::MAX].map(Mask::Around);
        [Mask::Causal, Mask::Full]
            .into_iter()
            .chain(sized)
            .chain(around)
    }

    /// Whether a query sees a row, straight from the definitions.
    fn sees(mask: Mask, query: usize, row: usize) -> bool {
        match mask {
            Mask::Causal => row <= query,
            Mask::Window(rows) => row <= query && query - row < rows.get(),
            Mask::Chunk(rows) => row <= query && row / rows == query / rows,
            Mask::Full => true,
            Mask::Around(rows) => query.abs_diff(row) <= rows,
        }
    }

    #[test]
    fn a_query_sees_the_rows_that_its_mask_says() {
        const END: usize = 60;
        for mask in masks() {
            for query in 0..END {
                let seen: Vec<_> = (0..END).filter(|row| sees(mask, query, *row)).collect();
                assert_eq!(mask.rows(query, END).collect::<Vec<_>>(), seen, "{mask:?}");
                let most = mask.most_rows().unwrap_or(END);
                assert!(seen.len() <= most, "{mask:?}: {seen:?}");
            }
        }
    }

    #[test]
    fn tokens_that_see_ahead_see_all_that_is_held_behind_what_their_mask_begins_with() {
        for mask in masks() {
            let (first, count, end) = (13, 9, 22);
            let sight = Sight {
                mask,
                first,
                end,
                ahead: true,
            };
            let sees = |token: usize, row: usize| {
                sees(mask, first + token, row) || (first + token..end).contains(&row)
            };
            for token in 0..count {
                let seen: Vec<_> = (0..end).filter(|row| sees(token, *row)).collect();
                assert_eq!(sight.of(token).collect::<Vec<_>>(), seen, "{mask:?}");
            }
        }
    }
}
