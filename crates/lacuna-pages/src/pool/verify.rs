//! The invariants, checked: everything the books say, recounted from tables, pins and bitmaps.

use std::collections::{BTreeMap, BTreeSet};

use super::Pool;
use super::books::Books;
use super::state::State;
use crate::buffer::Buffer;
use crate::table::Slot;
use crate::units::{PhysicalPage, VirtualPage};

/// An invariant that does not hold: a bug in this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{invariant}: {what}")]
pub struct BrokenInvariant {
    /// Its name in the crate's documentation.
    pub invariant: &'static str,
    /// What was found.
    pub what: String,
}

fn check(
    holds: bool,
    invariant: &'static str,
    what: impl Fn() -> String,
) -> Result<(), BrokenInvariant> {
    if holds {
        Ok(())
    } else {
        Err(BrokenInvariant {
            invariant,
            what: what(),
        })
    }
}

/// What the tables say of one page.
#[derive(Default)]
struct Seen {
    mappings: u32,
    writable: u32,
}

impl Pool {
    /// Recounts the books from `buffers`, which are all there are, and checks every invariant.
    /// Costs time in proportion to all pages of all heaps; for tests and for finding faults.
    ///
    /// # Errors
    /// The first [`BrokenInvariant`].
    pub fn verify<'a>(
        &self,
        buffers: impl IntoIterator<Item = &'a Buffer>,
    ) -> Result<(), BrokenInvariant> {
        let state = self.lock();
        let mut seen: BTreeMap<PhysicalPage, Seen> = BTreeMap::new();
        let (mut mapped, mut regions) = (0, 0);
        for buffer in buffers {
            regions += verify_buffer(&state.books, buffer, &mut seen)?;
            mapped += buffer
                .table
                .known(buffer.table.extent())
                .iter()
                .filter_map(|slot| slot.page())
                .count();
        }
        for (buffer, pages) in state.orphans() {
            regions += state.books.buffer_ledger(buffer).regions;
            mapped += pages.len();
            for &page in pages {
                seen.entry(page).or_default().mappings += 1;
            }
        }
        let ledger = state.ledger();
        let page_size = state.config.page_size.bytes();
        check(
            ledger.mapped.get() == mapped as u64 * page_size,
            "M2",
            || {
                format!(
                    "{mapped} pages are mapped, the ledger says {}",
                    ledger.mapped
                )
            },
        )?;
        check(ledger.regions == regions, "M2", || {
            format!("{regions} regions, the ledger says {}", ledger.regions)
        })?;
        verify_pages(&state, &seen)?;
        verify_totals(&state)
    }
}

fn verify_buffer(
    books: &Books,
    buffer: &Buffer,
    seen: &mut BTreeMap<PhysicalPage, Seen>,
) -> Result<u64, BrokenInvariant> {
    for slot in buffer.table.known(buffer.table.extent()) {
        if let Some(page) = slot.page() {
            let heaps = &mut books.allocator.heaps();
            let other = |location| location != buffer.location;
            let strange = heaps.any(|(id, heap)| id == page.heap && other(heap.location()));
            check(!strange, "M8", || {
                format!("{page} is mapped in {} and of another kind", buffer.label())
            })?;
            let entry = seen.entry(page).or_default();
            entry.mappings += 1;
            entry.writable += u32::from(matches!(slot, Slot::Writable(_)));
        }
    }
    let ledger = books.buffer_ledger(buffer.id);
    let regions = recount_regions(buffer);
    check(
        regions == buffer.table.regions() && regions == ledger.regions,
        "M2",
        || {
            format!(
                "{}: {regions} regions, the ledger says {}",
                buffer.label(),
                ledger.regions
            )
        },
    )?;
    Ok(regions)
}

fn recount_regions(buffer: &Buffer) -> u64 {
    let last = buffer
        .table
        .pages()
        .get()
        .min(buffer.table.extent().end.index() + 1);
    let slot = |page| buffer.table.get(VirtualPage::new(page));
    1 + (1..last)
        .filter(|&page| !slot(page - 1).continues_into(slot(page)))
        .count() as u64
}

fn verify_pages(state: &State, seen: &BTreeMap<PhysicalPage, Seen>) -> Result<(), BrokenInvariant> {
    let tails: BTreeSet<PhysicalPage> = state.books.allocator.tail_pages().collect();
    let retiring: BTreeSet<PhysicalPage> = state.books.retiring_pages().collect();
    for (id, heap) in state.books.allocator.heaps() {
        check(heap.counts_agree(), "M1", || {
            format!("heap {}: counts disagree", id.0)
        })?;
        for index in 0..heap.page_count() {
            let page = PhysicalPage { heap: id, index };
            let owners = heap.owners(index);
            let none = Seen::default();
            let tables = seen.get(&page).unwrap_or(&none);
            check(owners.mappings == tables.mappings, "M2", || {
                format!(
                    "{page}: {} mappings, the books say {}",
                    tables.mappings, owners.mappings
                )
            })?;
            let sole = owners.mappings == 1 && owners.pins == 0 && owners.lost == 0;
            check(tables.writable == 0 || sole, "M3", || {
                format!("{page} is writable and shared")
            })?;
            check(owners.none() || heap.is_committed(index), "M4", || {
                format!("{page} is owned without memory")
            })?;
            let places = u32::from(heap.is_available(index))
                + u32::from(!owners.none())
                + u32::from(tails.contains(&page))
                + u32::from(retiring.contains(&page));
            check(places == 1, "M1", || {
                format!("{page} is in {places} places at once")
            })?;
        }
    }
    let known = |page: &PhysicalPage| {
        let mut heaps = state.books.allocator.heaps();
        heaps.any(|(id, heap)| id == page.heap && page.index < heap.page_count())
    };
    match seen.keys().find(|page| !known(page)) {
        Some(page) => check(false, "M4", || {
            format!("{page} is mapped and its heap is gone")
        }),
        None => Ok(()),
    }
}

fn verify_totals(state: &State) -> Result<(), BrokenInvariant> {
    let ledger = state.ledger();
    let parts = [
        ledger.unique,
        ledger.shared,
        ledger.pinned_only,
        ledger.idle,
        ledger.retiring,
        ledger.lost,
    ];
    let sum: u64 = parts.iter().map(|part| part.get()).sum();
    check(sum == ledger.committed.get(), "M2", || {
        format!("the parts do not add up: {ledger:?}")
    })?;
    let heaps = state.books.allocator.heaps();
    let committed: u64 = heaps
        .map(|(_, heap)| u64::from(heap.committed_count()))
        .sum();
    check(committed == state.books.allocator.committed(), "M1", || {
        format!("{committed} pages are committed, the allocator says otherwise")
    })
}

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::heap::Which;
    use crate::{HostDevice, PageRange, PageSize, PoolConfig};

    /// A pool, and a buffer whose first two pages of four are mapped, the second sealed.
    fn sound() -> (Pool, Buffer) {
        let config = PoolConfig {
            page_size: PageSize::KIB_64,
            ..PoolConfig::default()
        };
        let pool = Pool::new(HostDevice::new().unwrap(), config).unwrap();
        let mut buffer = pool.reserve(crate::ByteLength::kibibytes(256), "").unwrap();
        buffer.ensure_mapped(0..2 << 16).unwrap();
        buffer.seal(PageRange::of(1..2)).unwrap();
        pool.verify([&buffer]).unwrap();
        (pool, buffer)
    }

    /// Damages the books, and has the invariant named that no longer holds. What is dropped then is
    /// not to be trusted, so it is not dropped.
    #[track_caller]
    fn broken(damage: impl FnOnce(&mut State, PhysicalPage)) -> &'static str {
        let (pool, buffer) = sound();
        let first = buffer.table.get(VirtualPage::new(0)).page().unwrap();
        damage(&mut pool.lock(), first);
        let error = pool.verify([&buffer]).unwrap_err();
        std::mem::forget((buffer, pool));
        assert!(error.to_string().starts_with(error.invariant));
        error.invariant
    }

    fn owners(state: &mut State, page: PhysicalPage) -> &mut crate::pool::heap::Owners {
        let heap = state.books.allocator.heap_mut(page.heap);
        heap.owners_mut(page.index)
    }

    fn available(state: &State, page: PhysicalPage) -> u32 {
        let heap = state.books.allocator.heap(page.heap);
        heap.run_from(Which::Available, 0).unwrap().start
    }

    #[test]
    fn a_page_in_no_place_is_noticed() {
        let taken = broken(|state, page| {
            let index = available(state, page);
            state.books.allocator.heap_mut(page.heap).take(index);
        });
        assert_eq!(taken, "M1");
    }

    #[test]
    fn memory_that_only_its_heap_knows_of_is_noticed() {
        let committed = broken(|state, page| {
            let index = available(state, page);
            let heap = state.books.allocator.heap_mut(page.heap);
            heap.take(index);
            heap.note_committed(index);
            heap.put(index);
        });
        assert_eq!(committed, "M1");
    }

    #[test]
    fn a_mapping_that_no_table_has_is_noticed() {
        assert_eq!(
            broken(|state, page| owners(state, page).mappings += 1),
            "M2"
        );
        let (pool, buffer) = sound();
        assert_eq!(pool.verify([]).unwrap_err().invariant, "M2");
        pool.verify([&buffer]).unwrap();
    }

    #[test]
    fn regions_that_are_miscounted_are_noticed() {
        let (pool, buffer) = sound();
        let (id, regions) = (buffer.id, buffer.table.regions());
        pool.lock().books.set_regions(id, regions + 1);
        assert_eq!(pool.verify([&buffer]).unwrap_err().invariant, "M2");
        pool.lock().books.set_regions(id, regions);
        pool.verify([&buffer]).unwrap();
    }

    #[test]
    fn a_writable_page_with_another_owner_is_noticed() {
        assert_eq!(broken(|state, page| owners(state, page).pins += 1), "M3");
        assert_eq!(broken(|state, page| owners(state, page).lost += 1), "M3");
    }

    #[test]
    fn a_page_owned_without_memory_is_noticed() {
        let owned = broken(|state, page| {
            let index = available(state, page);
            owners(state, PhysicalPage { index, ..page }).pins = 1;
        });
        assert_eq!(owned, "M4");
    }

    #[test]
    fn parts_that_do_not_add_up_are_noticed() {
        let sum = broken(|state, page| {
            let index = available(state, page);
            let free = PhysicalPage { index, ..page };
            state.books.pin(free);
            owners(state, free).pins = 0;
        });
        assert_eq!(sum, "M2");
    }
}
