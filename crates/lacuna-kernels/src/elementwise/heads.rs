//! Where rows of heads lie.

/// Columns of rows, one row for each head of each token; see [`Cpu::copy_columns`](crate::Cpu::copy_columns).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRows {
    /// Which rows follow one another.
    pub order: HeadOrder,
    /// Elements of a row.
    pub width: usize,
    /// The first of the columns.
    pub start: usize,
}

/// Which rows of heads follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// Those of a token: `[tokens, heads, width]`.
    ByToken,
    /// Those of a head: `[heads, tokens, width]`, as products with a matrix for each head have them.
    ByHead,
}

impl HeadRows {
    /// `[tokens, heads, width]`, the columns from `start` on.
    pub const fn by_token(width: usize, start: usize) -> Self {
        Self {
            order: HeadOrder::ByToken,
            width,
            start,
        }
    }

    /// `[heads, tokens, width]`, the columns from `start` on.
    pub const fn by_head(width: usize, start: usize) -> Self {
        Self {
            order: HeadOrder::ByHead,
            width,
            start,
        }
    }

    /// The number of a row.
    pub(crate) fn row(&self, token: usize, head: usize, [tokens, heads]: [usize; 2]) -> usize {
        match self.order {
            HeadOrder::ByToken => token * heads + head,
            HeadOrder::ByHead => head * tokens + token,
        }
    }

    /// Whose row it is that has a number.
    pub(crate) fn token_and_head(&self, row: usize, [tokens, heads]: [usize; 2]) -> [usize; 2] {
        match self.order {
            HeadOrder::ByToken => [row / heads, row % heads],
            HeadOrder::ByHead => [row % tokens, row / tokens],
        }
    }
}
