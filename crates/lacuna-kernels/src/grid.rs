//! Output matrices cut into blocks that tasks write at the same time.
//!
//! # Safety
//! 1. The blocks of a [`Grid`] partition its elements: block `(i, j)` holds rows
//!    `[i * block_rows, ..)` and columns `[j * block_cols, ..)`, clamped to the matrix.
//!    [`Grid::run_each`] makes blocks of the pieces of a [`Share`] instead, which partition the
//!    columns of each matrix, and cuts them into bands of equally many rows.
//!    [`Grid::run_bands`] makes bands of rows, whose starts it checks to ascend from the first row to
//!    the last, and cuts each into pieces of columns; of bands that are asked for by number it checks that
//!    the numbers ascend, so that none comes twice. [`Grid::run_with_states`] makes them of the rows
//!    of [`Band`]s, which it checks to ascend and to be rows of the matrix; the pieces of a band's
//!    state are consecutive, and it checks that all lie within it.
//! 2. [`Grid::run`], [`Grid::run_each`], [`Grid::run_bands`] and [`Grid::run_with_states`] make each
//!    block, and each piece of a state, exactly once per exclusive borrow of the
//!    elements, because the pool calls a task once per index. So no element is reachable from two
//!    blocks.
//! 3. A block hands out slices of its own elements only, bound to a borrow of the block.
#![expect(
    unsafe_code,
    reason = "tasks write disjoint blocks of one slice; see # Safety"
)]

use std::marker::PhantomData;
use std::ops::Range;

use crate::share::Share;
use crate::threads::Pool;

/// A row-major matrix and the size of its blocks.
pub(crate) struct Grid<'a, T> {
    elements: &'a mut [T],
    width: usize,
    block_rows: usize,
    block_cols: usize,
}

/// The elements of one block; see [`Grid::run`].
pub(crate) struct Block<'a, T> {
    base: *mut T,
    width: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    borrow: PhantomData<&'a mut [T]>,
}

/// Some rows of a matrix, and elements elsewhere that change along with them: those of a sequence, and
/// its state; see [`Grid::run_with_states`].
pub(crate) struct Band<'a, T> {
    rows: Range<usize>,
    /// What the state begins as, where that is kept.
    before: Option<&'a [T]>,
    state: Shared<T>,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

impl<'a, T> Band<'a, T> {
    /// # Panics
    /// When `before` is there and not as long as `state`.
    pub(crate) fn new(rows: Range<usize>, before: Option<&'a [T]>, state: &'a mut [T]) -> Self {
        assert!(
            before.is_none_or(|before| before.len() == state.len()),
            "a state is as long as it was before"
        );
        Self {
            rows,
            before,
            len: state.len(),
            state: Shared(state.as_mut_ptr()),
            borrow: PhantomData,
        }
    }

    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }
}

/// A pointer that tasks on other threads may make blocks from.
struct Shared<T>(*mut T);

// SAFETY: the pointer is only used to make disjoint blocks (2), and the elements may be sent.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<'a, T: Send> Grid<'a, T> {
    /// Cuts `elements`, rows of `width`, into blocks of `block_rows x block_cols`.
    ///
    /// # Panics
    /// When a size is zero or the elements are no whole number of rows.
    pub(crate) fn new(
        elements: &'a mut [T],
        width: usize,
        block_rows: usize,
        block_cols: usize,
    ) -> Self {
        assert!(block_rows > 0 && block_cols > 0, "blocks are not empty");
        assert!(
            width > 0 && elements.len().is_multiple_of(width),
            "an output of {} elements is not whole rows of {width}",
            elements.len()
        );
        Self {
            elements,
            width,
            block_rows,
            block_cols,
        }
    }

    /// Cuts `elements` into consecutive pieces of `len`; the last may be shorter.
    pub(crate) fn pieces(elements: &'a mut [T], len: usize) -> Self {
        let width = elements.len().max(1);
        Self {
            elements,
            width,
            block_rows: 1,
            block_cols: len.max(1),
        }
    }

    /// Cuts the columns of several matrices of `height` rows as `share` says, and their rows into bands of
    /// `band_rows`; calls `task(which, block, scratch)` once for every band of every piece, on all threads
    /// of `pool`.
    ///
    /// # Panics
    /// When a matrix is not `height` rows of the width that `share` cuts, or bands have no rows.
    pub(crate) fn run_each<S: Send + 'static, const N: usize>(
        matrices: [&'a mut [T]; N],
        [height, band_rows]: [usize; 2],
        share: &Share<N>,
        pool: &Pool<S>,
        task: impl Fn(usize, Block<'_, T>, &mut S) + Sync,
    ) {
        let widths = share.widths();
        for (elements, width) in matrices.iter().zip(widths) {
            assert_eq!(
                elements.len(),
                height * width,
                "[{height}, {width}] elements"
            );
        }
        assert!(band_rows > 0, "blocks are not empty");
        let bands = height.div_ceil(band_rows);
        let bases = matrices.map(|elements| Shared(elements.as_mut_ptr()));
        let shared = &bases;
        pool.run(share.pieces() * bands, |index, scratch| {
            // Bands of one piece after another, for which what the piece reads stays in caches.
            let (which, cols) = share.piece(index / bands);
            let row = index % bands * band_rows;
            let block = Block {
                base: shared[which].0,
                width: widths[which],
                rows: row..height.min(row + band_rows),
                cols,
                borrow: PhantomData,
            };
            task(which, block, scratch);
        });
    }

    /// Cuts matrices of `width` columns into bands of rows, which start at `starts` and end where the
    /// next one does, and bands into pieces of `columns`; and calls `task([which, band], block, scratch)`
    /// once for every piece of the bands that are `chosen`, or of all without, on all threads of `pool`. Rows of a
    /// block are counted from its band's first.
    ///
    /// # Panics
    /// When starts do not ascend from 0 to the number of rows of every matrix, columns are 0, or numbers of chosen
    /// bands do not ascend or are none.
    pub(crate) fn run_bands<S: Send + 'static, const N: usize>(
        matrices: [&'a mut [T]; N],
        (starts, chosen): (&[u32], Option<&[u32]>),
        width: usize,
        columns: usize,
        pool: &Pool<S>,
        task: impl Fn([usize; 2], Block<'_, T>, &mut S) + Sync,
    ) {
        assert!(columns > 0, "blocks are not empty");
        let height = starts.last().map_or(0, |end| *end as usize);
        assert!(
            starts.first().is_none_or(|first| *first == 0) && starts.is_sorted(),
            "bands partition the rows"
        );
        for elements in &matrices {
            assert_eq!(
                Some(elements.len()),
                height.checked_mul(width),
                "[{height}, {width}] elements"
            );
        }
        let bases = matrices.map(|elements| Shared(elements.as_mut_ptr()));
        let shared = &bases;
        let across = width.div_ceil(columns);
        let all = starts.len().saturating_sub(1);
        if let Some(chosen) = chosen {
            let ascend = chosen.windows(2).all(|two| two[0] < two[1]);
            let last = chosen.last().is_none_or(|last| (*last as usize) < all);
            assert!(ascend && last, "chosen bands ascend, up to the last");
        }
        let bands = chosen.map_or(all, <[u32]>::len);
        pool.run(bands * N * across, |index, scratch| {
            let (column, rest) = (index % across * columns, index / across);
            let (which, band) = (rest % N, rest / N);
            let band = chosen.map_or(band, |chosen| chosen[band] as usize);
            let rows = starts[band] as usize..starts[band + 1] as usize;
            let block = Block {
                base: shared[which].0.wrapping_add(rows.start * width),
                width,
                rows: 0..rows.len(),
                cols: column..width.min(column + columns),
                borrow: PhantomData,
            };
            task([which, band], block, scratch);
        });
    }

    /// Cuts the rows of each band into pieces of columns, as wide as blocks are, and its state into as many
    /// pieces of `each` elements, the last of which may be shorter; calls `task(block, piece)` once for
    /// every pair, on all threads of `pool`. A piece has then what it was before, where that is kept elsewhere: it is
    /// copied by the task, so that it is in its caches. Other rows are left alone.
    ///
    /// # Panics
    /// When bands do not ascend, are no rows of the matrix, or a state is not so many pieces.
    pub(crate) fn run_with_states<S: Send + 'static>(
        self,
        bands: &mut [Band<'_, T>],
        each: usize,
        pool: &Pool<S>,
        task: impl Fn(Block<'_, T>, &mut [T]) + Sync,
    ) where
        T: Copy + Sync,
    {
        let across = self.width.div_ceil(self.block_cols);
        let mut end = 0;
        for band in &*bands {
            assert!(
                end <= band.rows.start && band.rows.start <= band.rows.end,
                "bands ascend"
            );
            end = band.rows.end;
            assert!(
                band.len > (across - 1) * each && band.len <= across * each,
                "a state of {} elements is not {across} pieces of {each}",
                band.len
            );
        }
        assert!(
            end <= self.elements.len() / self.width,
            "bands are rows of the matrix"
        );
        let base = Shared(self.elements.as_mut_ptr());
        let (shared, bands) = (&base, &*bands);
        pool.run(bands.len() * across, |index, _| {
            let (band, piece) = (&bands[index / across], index % across);
            let col = piece * self.block_cols;
            let block = Block {
                base: shared.0,
                width: self.width,
                rows: band.rows(),
                cols: col..self.width.min(col + self.block_cols),
                borrow: PhantomData,
            };
            let start = piece * each;
            // SAFETY: the piece lies in the state, which `bands` borrows exclusively, and is made once (1, 2).
            let state = unsafe {
                let len = each.min(band.len - start);
                std::slice::from_raw_parts_mut(band.state.0.add(start), len)
            };
            if let Some(before) = band.before {
                state.copy_from_slice(&before[start..start + state.len()]);
            }
            task(block, state);
        });
    }

    /// Calls `task(block, scratch)` once for every block, on all threads of `pool`.
    pub(crate) fn run<S: Send + 'static>(
        self,
        pool: &Pool<S>,
        task: impl Fn(Block<'_, T>, &mut S) + Sync,
    ) {
        let height = self.elements.len() / self.width;
        let (down, across) = (
            height.div_ceil(self.block_rows),
            self.width.div_ceil(self.block_cols),
        );
        let base = Shared(self.elements.as_mut_ptr());
        let shared = &base;
        pool.run(down * across, |index, scratch| {
            let (row, col) = (
                index / across * self.block_rows,
                index % across * self.block_cols,
            );
            let block = Block {
                base: shared.0,
                width: self.width,
                rows: row..height.min(row + self.block_rows),
                cols: col..self.width.min(col + self.block_cols),
                borrow: PhantomData,
            };
            task(block, scratch);
        });
    }
}

impl<T> Block<'_, T> {
    /// The rows of the matrix this block covers.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The columns of the matrix this block covers.
    pub(crate) fn cols(&self) -> Range<usize> {
        self.cols.clone()
    }

    /// The block's part of one row of the matrix.
    ///
    /// # Panics
    /// When the row is not in the block.
    #[inline]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(
            self.rows.contains(&row),
            "row {row} is outside of the block {:?}",
            self.rows
        );
        let start = row * self.width + self.cols.start;
        // SAFETY: the row and the columns lie in this block (3), whose elements nobody else
        // reaches (2); the result borrows the block exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), self.cols.len()) }
    }

    /// Where an element of the block lies, `col` counted from its first column, if it exists.
    pub(crate) fn address(&self, row: usize, col: usize) -> *const u8 {
        let element = row * self.width + self.cols.start + col;
        self.base.wrapping_add(element).cast_const().cast()
    }

    /// The same block, to be handed on.
    pub(crate) fn reborrow(&mut self) -> Block<'_, T> {
        // 3: the copy is bound to a borrow of this one, which can do nothing meanwhile.
        Block {
            base: self.base,
            width: self.width,
            rows: self.rows.clone(),
            cols: self.cols.clone(),
            borrow: PhantomData,
        }
    }

    /// All elements of a block that has all columns.
    ///
    /// # Panics
    /// When it has not.
    pub(crate) fn whole_rows(&mut self) -> &mut [T] {
        assert_eq!(self.cols, 0..self.width, "rows that are not cut");
        let start = self.rows.start * self.width;
        // SAFETY: rows of all columns lie one after another; they are this block's (3), whose elements
        // nobody else reaches (2); the result borrows the block exclusively.
        unsafe {
            std::slice::from_raw_parts_mut(self.base.add(start), self.rows.len() * self.width)
        }
    }

    /// The elements of a block made by [`Grid::pieces`].
    pub(crate) fn piece(&mut self) -> &mut [T] {
        self.row(self.rows.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;

    #[test]
    fn blocks_partition_the_matrix() {
        let pool = Pool::new(NonZeroUsize::new(3).expect("not zero"), || ()).expect("threads");
        for (height, width, block_rows, block_cols) in [(1, 1, 1, 1), (5, 7, 2, 3), (4, 6, 4, 2)] {
            let mut out = vec![0; height * width];
            Grid::new(&mut out, width, block_rows, block_cols).run(&pool, |mut block, ()| {
                for row in block.rows() {
                    block.row(row).iter_mut().for_each(|x| *x += row + 1);
                }
            });
            for (index, value) in out.iter().enumerate() {
                assert_eq!(*value, index / width + 1);
            }
        }
    }

    #[test]
    fn bands_partition_every_matrix() {
        let pool = Pool::new(NonZeroUsize::new(3).expect("not zero"), || ()).expect("threads");
        for (starts, width, columns) in [
            (&[0, 1][..], 1, 4),
            (&[0, 2, 2, 5], 7, 3),
            (&[0, 0, 4, 6], 5, 5),
            (&[0], 3, 1),
            (&[], 3, 1),
        ] {
            let height = starts.last().map_or(0, |end| *end as usize);
            let mut outs = [vec![0; height * width], vec![0; height * width]];
            let matrices = outs.each_mut().map(|out| out.as_mut_slice());
            Grid::run_bands(
                matrices,
                (starts, None),
                width,
                columns,
                &pool,
                |at, mut block, ()| {
                    let [which, band] = at;
                    for row in block.rows() {
                        let value = 100 * which + 10 * band + row + 1;
                        block.row(row).iter_mut().for_each(|x| *x += value);
                    }
                },
            );
            for (which, out) in outs.iter().enumerate() {
                for (index, value) in out.iter().enumerate() {
                    let row = (index / width) as u32;
                    let band = starts.partition_point(|start| *start <= row) - 1;
                    let row = (row - starts[band]) as usize;
                    assert_eq!(*value, 100 * which + 10 * band + row + 1);
                }
            }
        }
    }

    #[test]
    fn bands_that_are_not_chosen_are_left_alone() {
        let pool = Pool::new(NonZeroUsize::new(3).expect("not zero"), || ()).expect("threads");
        let (starts, width) = ([0, 2, 2, 5, 6], 5);
        let mut out = [0; 6 * 5];
        for chosen in [&[0, 3][..], &[1], &[], &[2]] {
            let matrices = [&mut out[..]];
            let bands = (&starts[..], Some(chosen));
            Grid::run_bands(
                matrices,
                bands,
                width,
                2,
                &pool,
                |[_, band], mut block, ()| {
                    for row in block.rows() {
                        block.row(row).iter_mut().for_each(|x| *x += 1 + band);
                    }
                },
            );
        }
        let rows = [1, 1, 3, 3, 3, 4];
        let expected = rows.iter().flat_map(|x| std::iter::repeat_n(*x, width));
        assert!(out.into_iter().eq(expected));
    }

    #[test]
    #[should_panic(expected = "chosen bands ascend")]
    fn a_band_that_is_chosen_twice_is_refused() {
        let pool = Pool::new(NonZeroUsize::MIN, || ()).expect("no threads");
        let bands = (&[0, 4, 6][..], Some(&[1, 1][..]));
        Grid::run_bands([&mut [0; 6]], bands, 1, 1, &pool, |_, _, ()| ());
    }

    #[test]
    #[should_panic(expected = "chosen bands ascend")]
    fn a_chosen_band_that_there_is_not_is_refused() {
        let pool = Pool::new(NonZeroUsize::MIN, || ()).expect("no threads");
        let bands = (&[0, 4, 6][..], Some(&[0, 2][..]));
        Grid::run_bands([&mut [0; 6]], bands, 1, 1, &pool, |_, _, ()| ());
    }

    #[test]
    fn bands_change_with_their_states_and_other_rows_are_left_alone() {
        let pool = Pool::new(NonZeroUsize::new(3).expect("not zero"), || ()).expect("threads");
        let (width, columns, each) = (7, 3, 5);
        let mut out = vec![0; 6 * width];
        let (mut states, before) = ([[1; 12], [7; 12]], [2; 12]);
        let [a, b] = &mut states;
        let mut bands = [Band::new(1..2, None, a), Band::new(2..5, Some(&before), b)];
        let grid = Grid::new(&mut out, width, 1, columns);
        grid.run_with_states(&mut bands, each, &pool, |mut block, state| {
            for row in block.rows() {
                block.row(row).fill(state[0]);
            }
            state.iter_mut().for_each(|x| *x += 10);
        });
        assert_eq!((states, before), ([[11; 12], [12; 12]], [2; 12]));
        let rows = [0, 1, 2, 2, 2, 0];
        let expected = rows.iter().flat_map(|x| std::iter::repeat_n(*x, width));
        assert!(out.into_iter().eq(expected));
    }

    #[test]
    #[should_panic(expected = "bands ascend")]
    fn bands_with_states_that_overlap_are_refused() {
        let pool = Pool::new(NonZeroUsize::MIN, || ()).expect("no threads");
        let mut states = [[0; 4], [0; 4]];
        let [a, b] = &mut states;
        let mut bands = [Band::new(0..2, None, a), Band::new(1..3, None, b)];
        Grid::new(&mut [0; 6], 2, 1, 2).run_with_states(&mut bands, 4, &pool, |_, _| ());
    }

    #[test]
    #[should_panic(expected = "bands partition the rows")]
    fn bands_that_overlap_are_refused() {
        let pool = Pool::new(NonZeroUsize::MIN, || ()).expect("no threads");
        let bands = (&[0, 4, 2, 6][..], None);
        Grid::run_bands([&mut [0; 6]], bands, 1, 1, &pool, |_, _, ()| ());
    }
}
