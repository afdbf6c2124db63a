//! The table that kernels look pages up in, on devices whose own page table cannot be used: a block table.
//!
//! A reservation is a range of entries and has no buffer: one entry for each 64 KiB of its addresses, which says in which
//! heap that page is, and where in it. Kernels are shown the entries of what they work on, and all heaps as an array of
//! buffers (`heap_set.rs`).
//!
//! ```text
//! bit     31          16 15           0
//! entry  |  the heap    |  its page    |
//! ```
//!
//! Entries are changed by commands on the queue: what was submitted before finds pages where they were, what is submitted
//! after where they are. The host never reads the table; it checks what kernels are shown against the reservation's
//! [`Bindings`](crate::gpu::bindings::Bindings). The table is one buffer and has four bytes for each 64 KiB of addresses, as far as
//! any were reserved at once; when it is full, one twice as long takes its place.

use std::collections::BTreeMap;

use super::compute::WINDOWS;
use super::driver::Driver;
use super::frames::{Recorder, Window};
use super::invalid;
use super::objects::{Buffer, Memory, Space, SpaceMemory};
use super::open::{Limits, PageTable};
use super::queue::take_frame;
use super::state::{Retired, State};
use crate::device::{DeviceError, Fence, HeapId};
use crate::gpu::phases::Bind;
use crate::gpu::words::limit;
use crate::units::{ByteLength, PageSize};

/// Bytes of addresses that an entry stands for; kernels know it too (`lookup/heaps.wgsl`). No KV cache has smaller pages, and
/// smaller ones would make the table longer.
pub(super) const LISTED_PAGE: u64 = PageSize::KIB_64.bytes();

/// Bytes of an entry.
const ENTRY: u64 = 4;

/// The entry of a hole: a page that no heap has, since the first heap is a page shorter at least. What a kernel would write
/// there is beyond the buffer, and robust buffer access loses it.
const HOLE: u32 = 0xffff;

/// The longest heap whose pages entries can name, and whose words kernels count in 30 bits.
pub(super) const MOST_HEAP_BYTES: u64 = 0xffff * LISTED_PAGE;

/// The most heaps that kernels are shown: 64 GiB in heaps of the usual 64 MiB.
const MOST_HEAP_SLOTS: u32 = 1024;

/// The fewest that make a table worth its while: half a gigabyte in heaps of the usual 64 MiB.
pub(super) const LEAST_HEAP_SLOTS: u32 = 8;

/// Entries of a new table, those of 64 MiB of addresses: what is reserved says soon enough how long it has to be.
const FIRST_ENTRIES: u64 = 1 << 10;

/// The most bytes that a command changes a buffer by without another buffer, as Vulkan has it; in entries.
pub(super) const MOST_UPDATED: usize = (1 << 16) / ENTRY as usize;

/// The heaps that a device can show to kernels beside their other buffers.
pub(super) fn heap_slots(limits: &Limits) -> u32 {
    let buffers = limits.storage_buffers.saturating_sub(WINDOWS as u32);
    buffers.min(MOST_HEAP_SLOTS)
}

fn entry_alignment(driver: &Driver) -> u64 {
    driver.limits.window_alignment.div_ceil(ENTRY)
}

/// Bytes of a reservation that what a kernel is shown of it begins at multiples of.
pub(super) fn shown_alignment(driver: &Driver) -> u64 {
    match driver.pages {
        PageTable::Lookup => entry_alignment(driver) * LISTED_PAGE,
        PageTable::Unused | PageTable::Device => driver.limits.window_alignment,
    }
}

/// A range of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entries {
    first: u64,
    count: u64,
}

/// The table.
#[derive(Debug)]
pub(super) struct Table {
    buffer: Buffer,
    memory: Memory,
    /// Bytes of the memory.
    taken: u64,
    /// Entries that it has, and the most that it may have.
    entries: u64,
    most: u64,
    free: Ranges,
}

impl Table {
    /// Where entries are, for commands and kernels.
    fn window(&self, first: u64, count: u64) -> Window {
        Window {
            buffer: self.buffer.name(),
            offset: first * ENTRY,
            length: count * ENTRY,
        }
    }

    /// How many entries a table has that has room for `count` more in one piece; `None` if that is too many.
    fn grown(&self, count: u64) -> Option<u64> {
        let least = self.entries.checked_add(count)?;
        let wanted = least.max(2 * self.entries).min(self.most);
        (wanted >= least).then_some(wanted)
    }
}

/// Ranges of entries that no reservation has.
#[derive(Debug, Default)]
struct Ranges {
    /// By where they begin; none touches another.
    lengths: BTreeMap<u64, u64>,
}

impl Ranges {
    /// The first range of `count` entries.
    fn take(&mut self, count: u64) -> Option<u64> {
        let mut ranges = self.lengths.iter();
        let (&first, &length) = ranges.find(|&(_, &length)| length >= count)?;
        self.lengths.remove(&first);
        if length > count {
            self.lengths.insert(first + count, length - count);
        }
        Some(first)
    }

    fn give(&mut self, mut first: u64, mut count: u64) {
        if let Some((&before, &length)) = self.lengths.range(..first).next_back()
            && before + length == first
        {
            self.lengths.remove(&before);
            (first, count) = (before, count + length);
        }
        if let Some(length) = self.lengths.remove(&(first + count)) {
            count += length;
        }
        self.lengths.insert(first, count);
    }
}

impl State {
    /// Entries that windows of the table begin at multiples of.
    fn entry_alignment(&self) -> u64 {
        entry_alignment(&self.driver)
    }

    /// The most entries that a table has: as many as a kernel can be shown.
    pub(super) fn most_entries(&self) -> u64 {
        let limits = &self.driver.limits;
        let bytes = limits.window.min(limits.buffer).min(limits.allocation);
        bytes / ENTRY / self.entry_alignment() * self.entry_alignment()
    }

    /// A table without a reservation.
    pub(super) fn make_table(&mut self) -> Result<(), DeviceError> {
        let most = self.most_entries();
        let entries = FIRST_ENTRIES.min(most);
        let (buffer, memory, taken) = self.piece(entries * ENTRY)?;
        let mut free = Ranges::default();
        free.give(0, entries);
        self.table = Some(Table {
            buffer,
            memory,
            taken,
            entries,
            most,
            free,
        });
        Ok(())
    }

    fn table(&mut self) -> Result<&mut Table, DeviceError> {
        self.table.as_mut().ok_or(invalid("a table it has not"))
    }

    /// A reservation of `size` bytes of holes.
    pub(super) fn reserve_entries(&mut self, size: u64) -> Result<Space, DeviceError> {
        let count = size.div_ceil(LISTED_PAGE);
        let count = count.next_multiple_of(self.entry_alignment());
        let found = self.table()?.free.take(count);
        let first = match found {
            Some(first) => first,
            None => {
                self.grow_table(count)?;
                let found = self.table()?.free.take(count);
                found.ok_or(invalid("a table that is too short"))?
            }
        };
        let entries = Entries { first, count };
        let window = self.table()?.window(first, count);
        let filled = self.record(|recorder| recorder.fill(window, HOLE));
        if let Err(error) = filled {
            self.give_entries(entries);
            return Err(error);
        }
        Ok(Space {
            length: size,
            memory: SpaceMemory::Listed(entries, Default::default()),
        })
    }

    /// Entries of a reservation that is given back. Whoever gets them next changes them after what was submitted so far.
    pub(super) fn give_entries(&mut self, entries: Entries) {
        if let Some(table) = &mut self.table {
            table.free.give(entries.first, entries.count);
        }
    }

    /// A longer table takes the place of this one, which goes when the queue has done with it.
    fn grow_table(&mut self, count: u64) -> Result<(), DeviceError> {
        let table = self.table()?;
        let (old, most) = (table.entries, table.most);
        let from = table.window(0, old);
        let entries = table.grown(count);
        let address = |entries: u64| entries * LISTED_PAGE;
        let requested = ByteLength::new(address(count));
        let entries = entries
            .ok_or_else(|| limit("address space", requested, address(most), address(old)))?;
        let (buffer, memory, taken) = self.piece(entries * ENTRY)?;
        let to = Window {
            buffer: buffer.name(),
            ..from
        };
        if let Err(error) = self.record(|recorder| recorder.copy(from, to)) {
            self.give_memory(taken);
            return Err(error);
        }
        let table = self.table()?;
        table.free.give(old, entries - old);
        table.entries = entries;
        let buffer = std::mem::replace(&mut table.buffer, buffer);
        let memory = std::mem::replace(&mut table.memory, memory);
        let taken = std::mem::replace(&mut table.taken, taken);
        self.retire(Retired::Table(buffer, memory, taken));
        // It stands where there is no heap.
        self.heap_changes += 1;
        Ok(())
    }

    /// Queues changes of the table, which were checked and do not overlap.
    pub(super) fn change_entries(&mut self, binds: &[Bind]) -> Result<Fence, DeviceError> {
        let mut changes = Vec::with_capacity(binds.len());
        for bind in binds {
            let space = self.space(bind.space)?;
            let SpaceMemory::Listed(entries, _) = space.memory else {
                return Err(invalid("change entries that a reservation has not"));
            };
            let table = self.table.as_ref().ok_or(invalid("a table it has not"))?;
            let (page, count) = (bind.start / LISTED_PAGE, bind.length / LISTED_PAGE);
            changes.push((table.window(entries.first + page, count), bind.place));
        }
        let mut words = Vec::new();
        self.record(|recorder| {
            for (window, place) in changes {
                let Some(place) = place else {
                    recorder.fill(window, HOLE);
                    continue;
                };
                let first = entry(place.heap, place.offset);
                let count = (window.length / ENTRY) as u32;
                words.clear();
                words.extend((0..count).map(|page| first + page));
                recorder.update(window, &words);
            }
        })
    }

    /// What a kernel is shown of the table for a range that is mapped throughout: its entries, from the last before it that a
    /// window may begin with.
    pub(super) fn shown_entries(
        &self,
        entries: Entries,
        (start, length): (u64, u64),
    ) -> Result<Window, DeviceError> {
        let table = self.table.as_ref().ok_or(invalid("a table it has not"))?;
        let step = shown_alignment(&self.driver);
        let first = start / step * step / LISTED_PAGE;
        let end = (start + length).div_ceil(LISTED_PAGE);
        Ok(table.window(entries.first + first, end - first))
    }

    /// What kernels are shown as the heap of each number; of a number without one, the first heap, or the table where there is
    /// none. `None` where they look no pages up.
    pub(super) fn heap_windows(&self) -> Option<impl Iterator<Item = Window>> {
        let table = self.table.as_ref()?;
        let heap = |number: u32| {
            let heap = self.heap(HeapId(number)).ok()?;
            Some(Window {
                buffer: heap.whole(),
                offset: 0,
                length: heap.length,
            })
        };
        let slots = 0..heap_slots(&self.driver.limits);
        let nothing = slots.clone().find_map(heap);
        let nothing = nothing.unwrap_or_else(|| table.window(0, table.entries));
        Some(slots.map(move |number| heap(number).unwrap_or(nothing)))
    }

    /// Records commands and submits them.
    pub(super) fn record(
        &mut self,
        commands: impl FnOnce(&mut Recorder<'_>),
    ) -> Result<Fence, DeviceError> {
        let mut frame = take_frame(self)?;
        let mut recorder = frame.begin()?;
        commands(&mut recorder);
        let fence = recorder.submit(&mut self.queue)?;
        self.frames.put(frame);
        Ok(fence)
    }
}

/// The entry of a page of a heap, whose length was checked when it was made.
fn entry(heap: HeapId, offset: u64) -> u32 {
    heap.0 << 16 | (offset / LISTED_PAGE) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn no_heap_has_the_page_of_a_hole() {
        let last = entry(HeapId(0), MOST_HEAP_BYTES - LISTED_PAGE);
        assert!(last < HOLE);
        // And of another heap an entry begins with its number.
        assert_eq!(entry(HeapId(3), 5 * LISTED_PAGE), 0x0003_0005);
    }

    proptest! {
        #[test]
        fn ranges_are_given_out_once_and_become_one_again(
            steps in proptest::collection::vec((1u64..9, any::<prop::sample::Index>(), any::<bool>()), 1..80),
        ) {
            const ALL: u64 = 64;
            let mut ranges = Ranges::default();
            ranges.give(0, ALL);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (count, which, gives) in steps {
                if gives && !taken.is_empty() {
                    let (first, count) = taken.swap_remove(which.index(taken.len()));
                    ranges.give(first, count);
                    continue;
                }
                match ranges.take(count) {
                    Some(first) => {
                        let apart = |&(other, length): &(u64, u64)| first + count <= other || other + length <= first;
                        prop_assert!(first + count <= ALL && taken.iter().all(apart));
                        taken.push((first, count));
                    }
                    None => prop_assert!(ranges.lengths.values().all(|&length| length < count)),
                }
            }
            for (first, count) in taken {
                ranges.give(first, count);
            }
            prop_assert_eq!(ranges.lengths, BTreeMap::from([(0, ALL)]));
        }
    }
}
