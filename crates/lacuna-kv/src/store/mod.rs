//! What a policy does for one sequence: put memory behind rows, write them, lend them out.
//!
//! [`crate::Sequence`] counts tokens and checks what may be asked; a store knows rows and bytes.

mod flat;
mod grow;
mod paged;
mod rows;

use std::fmt;
use std::ops::Range;

use lacuna_kernels::{RowLayout, RunMut, View};
use lacuna_pages::device::Address;
use lacuna_pages::{Buffer, PageRange};

pub(crate) use flat::{Commit, FlatStore};
pub(crate) use grow::GrowStore;
pub(crate) use paged::{Blocks, PagedStore};
pub(crate) use rows::zeroed_buffer;

use crate::error::KvError;
use crate::geometry::{Keep, Layer, Side};
use crate::layout::{BufferRows, Tiles};
use crate::prefix::Pins;

/// The rows of one sequence. Rows are named by token position; every call concerns all layers and
/// both sides unless it names one.
pub(crate) trait Store: fmt::Debug + Send + Sync {
    /// Puts memory that may be written behind `rows`, which follow what is held. On an error every row
    /// is as it was; when the memory is there already, nothing is allocated either.
    fn prepare(&mut self, rows: Range<usize>) -> Result<(), KvError>;

    /// Lends `rows` of one layer to `write`, run by run; all of them are prepared. What a run calls row
    /// 0 is the first of them.
    fn write(&mut self, layer: Layer, side: Side, rows: Range<usize>, write: &mut WriteRun<'_>);

    /// Rows of one layer, all of them held or prepared.
    fn view(&self, layer: Layer, side: Side, rows: Range<usize>) -> View<'_>;

    /// The buffer that has the rows of one side of a layer at equal distances, and how many of its first rows are in
    /// so many bytes; `None` where rows do not lie so.
    fn flat_rows(&self, _layer: Layer, _side: Side) -> Option<(&Buffer, Tiles)> {
        None
    }

    /// Where a device has the rows of one side of a layer; `None` where they do not lie at equal distances.
    fn device_rows(&self, _layer: Layer, _side: Side) -> Option<DeviceRows> {
        None
    }

    /// Gives back memory that holds nothing of the rows before `end`.
    fn truncate(&mut self, end: usize) -> Result<(), KvError>;

    /// Gives back memory of which no row is `useful` any more. When there is none, nothing is
    /// allocated.
    fn release(&mut self, useful: Useful) -> Result<(), KvError>;

    /// The fewest tokens, beyond none, that a sequence can be cut to and go on from: rows from `first` on
    /// that those after them see may be gone.
    fn fewest_tokens(&self, _first: usize) -> usize {
        0
    }

    /// Gives back everything.
    fn clear(&mut self) -> Result<(), KvError>;

    /// A second store with the same `rows`, which are held: shared where memory can be, else copied.
    fn duplicate(&mut self, rows: Range<usize>) -> Result<Box<dyn Store>, KvError>;

    /// Keeps pages beyond the life of this store: of every buffer, by how long its rows are of use,
    /// those from the page in which the named rows begin to the last that they fill. `None` where
    /// memory cannot be kept, or a page is gone.
    fn pin(&mut self, _rows: &dyn Fn(Keep) -> Range<usize>) -> Result<Option<Pins>, KvError> {
        Ok(None)
    }

    /// Takes pages that stores of the same shape have pinned as the memory of the first `rows` rows of
    /// this empty store: those of groups from the first row on without gaps, and those of a window.
    fn adopt(
        &mut self,
        groups: &[&Pins],
        window: Option<&Pins>,
        _rows: usize,
    ) -> Result<(), KvError> {
        let nothing = groups.is_empty() && window.is_none();
        debug_assert!(nothing, "a store that pins nothing adopts nothing");
        Ok(())
    }

    /// The pages of each buffer that there is memory behind; `None` where pages do not come and go one by one.
    fn mapped_pages(&self) -> Option<Vec<PageRange>> {
        None
    }

    /// The pages of each buffer that going on after `rows` rows takes; `None` as for
    /// [`Store::mapped_pages`].
    fn needed_pages(&self, _rows: usize) -> Option<Vec<PageRange>> {
        None
    }

    /// What rows lie in each buffer whose pages are needed.
    fn buffer_rows(&self) -> &[BufferRows] {
        &[]
    }

    /// Puts memory behind those of this empty store, to be filled with what `rows` rows of another had.
    fn make_needed(&mut self, _rows: usize) -> Result<(), KvError> {
        Ok(())
    }

    /// Of each buffer, the place of the first page that holds more than the rows before `row` which all later
    /// tokens see: what is before it is pages of groups.
    fn first_pages(&self, _row: usize) -> Vec<u64> {
        Vec::new()
    }

    /// A buffer, for moving its pages out and in.
    fn buffer_mut(&mut self, _index: usize) -> Option<&mut Buffer> {
        None
    }

    /// Pages that were moved out are all there again, writable, but for those of the rows before `row`: where those
    /// from `moved` on were moved out too, their contents are forgotten, and `groups` are in their place, from the
    /// first row on.
    fn come_back(&mut self, groups: &[&Pins], _moved: usize, _row: usize) -> Result<(), KvError> {
        debug_assert!(
            groups.is_empty(),
            "a store whose pages do not move has none back"
        );
        Ok(())
    }

    /// Whether memory that held rows is gone although nobody gave it back.
    fn has_lost_rows(&self) -> bool {
        false
    }

    /// The buffers that are this store's alone.
    fn buffers(&self) -> Vec<&Buffer> {
        Vec::new()
    }

    /// Where the bytes are.
    fn usage(&self) -> Usage;
}

/// Rows of one side of a layer in the memory of a device: the row of a position lies that many strides behind the
/// first. Which of them there is memory behind is said by the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRows {
    /// Where the row of position 0 lies, or would.
    pub address: Address,
    /// Where the elements of a row lie, and how far rows are apart.
    pub layout: RowLayout,
}

/// The state of a layer in the memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceState {
    /// Its first byte, a multiple of 64 within its pages.
    pub address: Address,
    /// How long it is.
    pub bytes: usize,
    /// Whether no token has been yet, so that it is all zeros whatever is there.
    pub is_fresh: bool,
}

/// Writes the rows of a run.
pub(crate) type WriteRun<'a> = dyn FnMut(RunMut<'_>) + 'a;

/// Which rows a sequence may still read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Useful {
    /// No row before this one, in any layer.
    pub(crate) first: usize,
    /// Those that queries from this position on see.
    pub(crate) next: usize,
}

impl Useful {
    /// The first useful row of a layer.
    pub(crate) fn first_row(self, keep: Keep) -> usize {
        self.first.max(keep.first_seen(self.next))
    }
}

/// Bytes of one store, or of a state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) reserved_bytes: usize,
    pub(crate) committed_bytes: usize,
    pub(crate) shared_bytes: usize,
    pub(crate) peak_committed_bytes: usize,
    pub(crate) copied_bytes: usize,
    pub(crate) zeroed_bytes: usize,
    pub(crate) resizes: usize,
}

impl Usage {
    /// Those of both.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            reserved_bytes: self.reserved_bytes + other.reserved_bytes,
            committed_bytes: self.committed_bytes + other.committed_bytes,
            shared_bytes: self.shared_bytes + other.shared_bytes,
            peak_committed_bytes: self.peak_committed_bytes + other.peak_committed_bytes,
            copied_bytes: self.copied_bytes + other.copied_bytes,
            zeroed_bytes: self.zeroed_bytes + other.zeroed_bytes,
            resizes: self.resizes + other.resizes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Geometry;
    use crate::{KvCache, KvElements};

    #[test]
    fn what_two_take_is_the_sum_of_each_figure() {
        let one = Usage {
            reserved_bytes: 64,
            committed_bytes: 32,
            shared_bytes: 16,
            peak_committed_bytes: 8,
            copied_bytes: 4,
            zeroed_bytes: 2,
            resizes: 1,
        };
        assert_eq!(one.plus(Usage::default()), one);
        assert_eq!(Usage::default().plus(one), one);
        assert_eq!(one.plus(one).plus(one).resizes, 3);
    }

    #[test]
    fn memory_that_does_not_come_page_by_page_has_no_pages_to_move() {
        let elements = KvElements::both(lacuna_kernels::ElementType::F16);
        let geometry = Geometry::uniform(1, 1, 64, elements);
        for policy in ["paged", "grow:mlx"] {
            let policy = policy.parse().expect("a policy");
            let cache = KvCache::new(geometry.clone(), policy).expect("the system has pages");
            let mut sequence = cache.sequence(100).expect("address space");
            assert!(sequence.begin_image(5).expect("nothing is taken").is_none());
            sequence.prepare(5).expect("room");
            sequence.accept(5);
            assert!(sequence.leave(0, 16).expect("nothing is done").is_none());
            assert!(sequence.image().expect("nothing is done").is_none());
            assert_eq!(sequence.len(), 5);
        }
    }
}
