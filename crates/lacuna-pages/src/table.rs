//! A buffer's page table as the books see it: virtual page -> slot.
//!
//! The table is as long as the highest page ever mapped, so a reservation of terabytes costs
//! nothing until it is used. It also counts *regions*: runs that the kernel holds as one mapping.

use crate::device::Access;
use crate::units::{PageCount, PageRange, PhysicalPage, VirtualPage};

/// What is behind one virtual page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Nothing.
    #[default]
    Hole,
    /// Nothing, and the contents are in the caller's store.
    Swapped,
    /// A page only this slot maps.
    Writable(PhysicalPage),
    /// An immutable page that others may map too.
    Sealed(PhysicalPage),
}

impl Slot {
    pub(crate) fn page(self) -> Option<PhysicalPage> {
        match self {
            Self::Writable(page) | Self::Sealed(page) => Some(page),
            Self::Hole | Self::Swapped => None,
        }
    }

    pub(crate) fn mapping(self) -> Option<(PhysicalPage, Access)> {
        match self {
            Self::Writable(page) => Some((page, Access::ReadWrite)),
            Self::Sealed(page) => Some((page, Access::Read)),
            Self::Hole | Self::Swapped => None,
        }
    }

    /// Whether `next`, one virtual page on, lies in the same kernel mapping.
    pub(crate) fn continues_into(self, next: Self) -> bool {
        match (self.mapping(), next.mapping()) {
            (None, None) => true,
            (Some((page, access)), Some(after)) => {
                page.next().is_some_and(|page| (page, access) == after)
            }
            _ => false,
        }
    }
}

/// The slots of one buffer.
#[derive(Debug)]
pub(crate) struct Table {
    slots: Vec<Slot>,
    pages: PageCount,
    regions: u64,
}

impl Table {
    /// All holes, for a buffer of `pages`.
    pub(crate) fn new(pages: PageCount) -> Self {
        Self {
            slots: Vec::new(),
            pages,
            regions: 1,
        }
    }

    pub(crate) fn pages(&self) -> PageCount {
        self.pages
    }

    /// Runs of equal backing, holes included: one kernel mapping each.
    pub(crate) fn regions(&self) -> u64 {
        self.regions
    }

    pub(crate) fn get(&self, page: VirtualPage) -> Slot {
        let index = usize::try_from(page.index()).ok();
        index
            .and_then(|index| self.slots.get(index))
            .copied()
            .unwrap_or_default()
    }

    /// The slots of `range`, as far as the table reaches; the rest are holes.
    pub(crate) fn known(&self, range: PageRange) -> &[Slot] {
        let length = self.slots.len() as u64;
        let start = range.start.index().min(length) as usize;
        let end = range.end.index().clamp(start as u64, length) as usize;
        &self.slots[start..end]
    }

    /// The pages up to the last one that is not a hole.
    pub(crate) fn extent(&self) -> PageRange {
        PageRange::of(0..self.slots.len() as u64)
    }

    /// Makes sure that [`Table::set`] up to `page` allocates nothing.
    pub(crate) fn make_room(&mut self, page: VirtualPage) -> Result<(), PageCount> {
        let needed = PageCount::new(page.index().saturating_add(1));
        let wanted = usize::try_from(needed.get()).map_err(|_| needed)?;
        let missing = wanted.saturating_sub(self.slots.len());
        self.slots.try_reserve(missing).map_err(|_| needed)
    }

    /// Puts `slot` at `page`, which [`Table::make_room`] has made room for.
    pub(crate) fn set(&mut self, page: VirtualPage, slot: Slot) {
        debug_assert!(
            page.index() < self.pages.get(),
            "M0: {page} is outside its buffer"
        );
        let index = page.index() as usize;
        if index >= self.slots.len() {
            if slot == Slot::Hole {
                return;
            }
            self.slots.resize(index + 1, Slot::Hole);
        }
        let before = self.boundaries_around(page);
        self.slots[index] = slot;
        self.regions = self.regions + self.boundaries_around(page) - before;
    }

    fn boundaries_around(&self, page: VirtualPage) -> u64 {
        let index = page.index();
        let boundary = |left: u64| {
            let (left, right) = (VirtualPage::new(left), VirtualPage::new(left + 1));
            u64::from(!self.get(left).continues_into(self.get(right)))
        };
        let left = if index > 0 { boundary(index - 1) } else { 0 };
        let right = if index + 1 < self.pages.get() {
            boundary(index)
        } else {
            0
        };
        left + right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::HeapId;

    fn page(index: u32) -> PhysicalPage {
        PhysicalPage {
            heap: HeapId(0),
            index,
        }
    }

    #[test]
    fn room_that_was_made_is_there() {
        let mut table = Table::new(PageCount::new(100));
        table.make_room(VirtualPage::new(60)).unwrap();
        assert!(table.slots.capacity() > 60);
        let too_far = VirtualPage::new(u64::MAX >> 1);
        let needed = PageCount::new(too_far.index() + 1);
        assert_eq!(table.make_room(too_far), Err(needed));
    }

    #[test]
    fn neighbours_in_both_spaces_are_one_region() {
        let mut table = Table::new(PageCount::new(8));
        for index in 0..4 {
            table.make_room(VirtualPage::new(index)).unwrap();
            table.set(
                VirtualPage::new(index),
                Slot::Writable(page(10 + index as u32)),
            );
        }
        assert_eq!(table.regions(), 2);
        table.set(VirtualPage::new(1), Slot::Sealed(page(11)));
        assert_eq!(table.regions(), 4);
        table.set(VirtualPage::new(0), Slot::Sealed(page(10)));
        assert_eq!(table.regions(), 3);
        table.set(VirtualPage::new(2), Slot::Writable(page(40)));
        assert_eq!(table.regions(), 4);
    }

    #[test]
    fn a_whole_buffer_of_one_run_is_one_region() {
        let mut table = Table::new(PageCount::new(3));
        table.make_room(VirtualPage::new(2)).unwrap();
        for index in [2, 0, 1] {
            table.set(VirtualPage::new(index), Slot::Writable(page(index as u32)));
        }
        assert_eq!(table.regions(), 1);
        assert_eq!(table.known(PageRange::of(1..9)).len(), 2);
    }
}
