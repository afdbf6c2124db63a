//! How the rows of some matrices are shared between threads.
//!
//! Pieces are numbered through all matrices; each lies in one. Nothing is stored: a piece is found by
//! walking to it, a few nanoseconds for each before it.

use std::ops::Range;

/// Matrices whose rows are cut into pieces.
pub(crate) struct Share<const N: usize> {
    pub(crate) parts: [Part; N],
    pub(crate) cut: Cut,
    pub(crate) threads: usize,
}

/// The rows of one matrix.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// How many there are.
    pub(crate) len: usize,
    /// What one of them costs, relative to those of the other matrices.
    pub(crate) weight: usize,
    /// Pieces are multiples of so many, but for the last.
    pub(crate) together: usize,
    /// Fewer are not worth a piece of their own.
    pub(crate) least: usize,
}

/// How large pieces are.
#[derive(Clone, Copy)]
pub(crate) enum Cut {
    /// Every matrix is cut into so many pieces of one size.
    Even {
        /// How many.
        pieces: usize,
    },
    /// Each piece is a part of what is left of all matrices: long ones first, which run without an
    /// interruption, and short ones last, so that threads finish together.
    Shrinking,
}

impl<const N: usize> Share<N> {
    /// Rows of each matrix.
    pub(crate) fn widths(&self) -> [usize; N] {
        self.parts.map(|part| part.len)
    }

    /// How many pieces there are.
    pub(crate) fn pieces(&self) -> usize {
        self.walk().count()
    }

    /// Which matrix a piece is of, and its rows.
    ///
    /// # Panics
    /// When there is no such piece.
    pub(crate) fn piece(&self, index: usize) -> (usize, Range<usize>) {
        self.walk().nth(index).expect("a piece that exists")
    }

    fn walk(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let cost = |part: &Part| part.len * part.weight;
        let (mut left, mut which, mut start) = (self.parts.iter().map(cost).sum(), 0, 0);
        std::iter::from_fn(move || {
            while which < N && start == self.parts[which].len {
                (which, start) = (which + 1, 0);
            }
            let part = self.parts.get(which)?;
            let end = part.len.min(start + self.len(part, left));
            let rows = start..end;
            left -= rows.len() * part.weight;
            start = end;
            Some((which, rows))
        })
    }

    /// Rows of the next piece of `part`, which may be more than it has, when work of `left` is left.
    fn len(&self, part: &Part, left: usize) -> usize {
        let wanted = match self.cut {
            Cut::Even { pieces } => part.len.div_ceil(pieces),
            Cut::Shrinking => left / (2 * self.threads * part.weight),
        };
        wanted.max(part.least).next_multiple_of(part.together)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(cut: Cut, lens: [usize; 3]) -> Share<3> {
        let part = |len| Part {
            len,
            weight: 10,
            together: 8,
            least: 11,
        };
        Share {
            parts: lens.map(part),
            cut,
            threads: 2,
        }
    }

    #[test]
    fn pieces_partition_every_matrix_in_order() {
        for cut in [Cut::Shrinking, Cut::Even { pieces: 5 }] {
            for lens in [[0, 0, 0], [1, 0, 7], [100, 3, 1000], [0, 16, 0]] {
                let share = share(cut, lens);
                let mut ends = [0; 3];
                for index in 0..share.pieces() {
                    let (which, rows) = share.piece(index);
                    assert_eq!(rows.start, ends[which]);
                    assert!(!rows.is_empty());
                    assert!(rows.end == lens[which] || rows.len().is_multiple_of(8));
                    assert!(rows.end == lens[which] || rows.len() >= 11);
                    assert!(ends[which + 1..].iter().all(|end| *end == 0));
                    ends[which] = rows.end;
                }
                assert_eq!(ends, lens);
            }
        }
    }

    #[test]
    fn pieces_shrink_from_an_equal_share_to_the_least() {
        let share = share(Cut::Shrinking, [1000, 1000, 2000]);
        let lens: Vec<usize> = (0..share.pieces())
            .map(|i| share.piece(i).1.len())
            .collect();
        assert_eq!(lens[0], 1000);
        assert_eq!(lens.last(), Some(&16));
    }
}
