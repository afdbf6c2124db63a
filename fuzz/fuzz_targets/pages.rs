//! Any bytes are a sequence of operations on a pool of the host device. The same sequence runs on a
//! shadow page table that knows nothing of heaps, extents or kernel mappings: after each operation
//! both agree on whether it succeeded, on every byte of every page, and every invariant holds.
#![no_main]

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

use lacuna_pages::{
    Buffer, ByteLength, Device, HostDevice, PageCount, PagePin, PageRange, PageSize, Pool,
    PoolConfig, Recycle, Request, Share, Source, VirtualPage,
};
use libfuzzer_sys::fuzz_target;

const BUFFERS: usize = 4;
const PAGES: usize = 9;
const PINS: usize = 4;
/// Physical pages the pool may hold at first: fewer than all buffers together could map.
const LIMIT: usize = 24;
const HEAP_PAGES: u64 = 8;

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let Some(mut pair) = Pair::new(&mut input) else {
        return;
    };
    while pair.step(&mut input).is_some() {
        pair.compare();
    }
    pair.finish();
});

/// The bytes not yet decoded; nothing more is decoded once they run out.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn below(&mut self, bound: usize) -> Option<usize> {
        Some(usize::from(self.byte()?) % bound)
    }

    /// Bytes of a buffer, at times past its end.
    fn bytes(&mut self, page: usize) -> Option<Range<usize>> {
        let mut offset = || {
            Some(usize::from(u16::from_le_bytes([
                self.byte()?,
                self.byte()?,
            ])))
        };
        let start = offset()? % ((PAGES + 1) * page);
        Some(start..start + offset()? % (3 * page))
    }

    /// Pages of a buffer, at times past its end.
    fn pages(&mut self) -> Option<Range<usize>> {
        let start = self.below(PAGES + 2)?;
        Some(start..start + self.below(6)?)
    }
}

/// A physical page: its identity and its owners are the `Rc`'s, so that a page that may be written
/// has a count of one, or `Rc::get_mut` says that it does not.
type Page = Rc<Vec<u8>>;

#[derive(Clone)]
enum Slot {
    Hole,
    Swapped(Vec<u8>),
    Writable(Page),
    Sealed(Page),
}

impl Slot {
    fn page(&self) -> Option<&Page> {
        match self {
            Self::Writable(page) | Self::Sealed(page) => Some(page),
            Self::Hole | Self::Swapped(_) => None,
        }
    }

    fn is_hole(&self) -> bool {
        matches!(self, Self::Hole)
    }
}

/// A buffer and its shadow.
struct Twin {
    real: Buffer,
    slots: Vec<Slot>,
}

impl Twin {
    /// Whether `range` lies within the buffer and each of its slots is as `wanted` says.
    fn all(&self, range: Range<usize>, wanted: impl Fn(&Slot) -> bool) -> bool {
        self.slots
            .get(range)
            .is_some_and(|slots| slots.iter().all(wanted))
    }
}

/// A pool and its shadow.
struct Pair {
    pool: Pool,
    page_size: PageSize,
    page: usize,
    recycle: Recycle,
    limit: usize,
    twins: Vec<Option<Twin>>,
    pins: Vec<(PagePin, Page)>,
}

fn range(pages: &Range<usize>) -> PageRange {
    PageRange::of(pages.start as u64..pages.end as u64)
}

fn at(page: usize) -> VirtualPage {
    VirtualPage::new(page as u64)
}

impl Pair {
    fn new(input: &mut Input<'_>) -> Option<Self> {
        let device = HostDevice::new().expect("fuzzing needs the host device");
        let page_size = device.capabilities().page_sizes[0];
        let bytes = |pages| page_size.bytes_of(PageCount::new(pages));
        let recycle = if input.byte()? & 1 == 0 {
            Recycle::AsIs
        } else {
            Recycle::Zeroed
        };
        let config = PoolConfig {
            page_size,
            heap_bytes: bytes(HEAP_PAGES),
            limit: Some(bytes(LIMIT as u64)),
            high_watermark: bytes(12),
            low_watermark: bytes(4),
            recycle,
        };
        Some(Self {
            pool: Pool::new(device, config).expect("a valid configuration"),
            page_size,
            page: page_size.bytes() as usize,
            recycle,
            limit: LIMIT,
            twins: (0..BUFFERS).map(|_| None).collect(),
            pins: Vec::new(),
        })
    }

    fn bytes_of(&self, pages: usize) -> ByteLength {
        self.page_size.bytes_of(PageCount::new(pages as u64))
    }

    /// Pages the limit leaves.
    fn free(&self) -> usize {
        let slots = self.twins.iter().flatten().flat_map(|twin| &twin.slots);
        let mapped = slots.filter_map(Slot::page);
        let pinned = self.pins.iter().map(|(_, page)| page);
        let owned: BTreeSet<_> = mapped.chain(pinned).map(Rc::as_ptr).collect();
        self.limit.saturating_sub(owned.len())
    }

    /// What a page holds that was mapped just now: zeros where the pool promises them.
    fn fresh(&self, real: &Buffer, page: usize) -> Page {
        let bytes = real
            .bytes(page * self.page..(page + 1) * self.page)
            .expect("mapped just now");
        if self.recycle == Recycle::Zeroed {
            assert!(
                bytes.iter().all(|&byte| byte == 0),
                "{}: {page} is used again unwiped",
                real.label()
            );
        }
        Rc::new(bytes.to_vec())
    }

    /// Takes a buffer out, for operations that need the rest of the pair as well.
    fn with(&mut self, index: usize, operation: impl FnOnce(&mut Self, &mut Twin)) {
        if let Some(mut twin) = self.twins[index].take() {
            // While it is out, its pages do not count as owned: `free` is asked before.
            operation(self, &mut twin);
            self.twins[index] = Some(twin);
        }
    }

    /// Decodes and performs one operation.
    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let operation = input.byte()? % 18;
        let index = input.below(BUFFERS)?;
        match operation {
            0 => self.reserve(index),
            1 => self.twins[index] = None,
            2 | 3 => self.ensure(&[(index, input.bytes(self.page)?)]),
            4 => {
                let other = input.below(BUFFERS)?;
                let (first, second) = (input.bytes(self.page)?, input.bytes(self.page)?);
                if other != index {
                    self.ensure(&[(index, first), (other, second)]);
                }
            }
            5 | 6 => self.write(index, input.bytes(self.page)?, input.byte()?),
            7 => self.seal(index, input.pages()?),
            8 => self.share(
                index,
                input.below(BUFFERS)?,
                input.pages()?,
                input.below(PAGES)?,
            ),
            9 => self.pin(index, input.below(PAGES + 1)?),
            10 => self.share_pins(index, input.below(PAGES + 1)?),
            11 => self.change_pins(input.byte()?),
            12 => self.make_unique(index, input.pages()?),
            13 => self.unmap(index, input.pages()?),
            14 => self.truncate(index, input.bytes(self.page)?.start),
            15 => self.swap_out(index, input.pages()?, input.below(8)?),
            16 => self.swap_in(index, input.pages()?, input.below(8)?),
            _ => self.limit(input.below(LIMIT + 8)?),
        }
        Some(())
    }

    fn reserve(&mut self, index: usize) {
        if self.twins[index].is_none() {
            let real = self.pool.reserve(self.bytes_of(PAGES), index.to_string());
            let slots = vec![Slot::Hole; PAGES];
            self.twins[index] = Some(Twin {
                real: real.expect("address space is plenty"),
                slots,
            });
        }
    }

    fn ensure(&mut self, parts: &[(usize, Range<usize>)]) {
        if parts.iter().any(|(index, _)| self.twins[*index].is_none()) {
            return;
        }
        let touched = |bytes: &Range<usize>| match bytes.is_empty() {
            true => 0..0,
            false => bytes.start / self.page..bytes.end.div_ceil(self.page),
        };
        let (mut possible, mut holes) = (true, Vec::new());
        for (index, bytes) in parts {
            let twin = self.twins[*index].as_ref().expect("checked above");
            let pages = touched(bytes);
            possible &= bytes.end <= PAGES * self.page
                && twin.all(pages.clone(), |slot| !matches!(slot, Slot::Swapped(_)));
            let hole = |&page: &usize| twin.slots.get(page).is_some_and(Slot::is_hole);
            holes.extend(pages.filter(hole).map(|page| (*index, page)));
        }
        possible &= holes.len() <= self.free();
        let mut requests = Vec::new();
        for (index, twin) in self.twins.iter_mut().enumerate() {
            if let Some((_, bytes)) = parts.iter().find(|part| part.0 == index) {
                let real = &mut twin.as_mut().expect("checked above").real;
                requests.push(Request::new(real, bytes.clone()));
            }
        }
        let result = self.pool.ensure_mapped(&mut requests);
        assert_eq!(result.is_ok(), possible, "{result:?}");
        for (index, page) in holes.into_iter().filter(|_| possible) {
            self.with(index, |pair, twin| {
                twin.slots[page] = Slot::Writable(pair.fresh(&twin.real, page));
            });
        }
    }

    fn write(&mut self, index: usize, bytes: Range<usize>, value: u8) {
        let Some(twin) = &mut self.twins[index] else {
            return;
        };
        let pages = match bytes.is_empty() {
            true => 0..0,
            false => bytes.start / self.page..bytes.end.div_ceil(self.page),
        };
        let writable = |slot: &Slot| matches!(slot, Slot::Writable(_));
        let possible = bytes.end <= PAGES * self.page && twin.all(pages, writable);
        let result = twin.real.bytes_mut(bytes.clone());
        assert_eq!(result.is_ok(), possible, "{:?}", result.err());
        let Ok(real) = result else { return };
        for (offset, byte) in real.iter_mut().enumerate() {
            *byte = value.wrapping_add(offset as u8);
        }
        for (offset, place) in bytes.enumerate() {
            let Slot::Writable(page) = &mut twin.slots[place / self.page] else {
                unreachable!()
            };
            let contents = Rc::get_mut(page).expect("a writable page has one owner");
            contents[place % self.page] = value.wrapping_add(offset as u8);
        }
    }

    fn seal(&mut self, index: usize, pages: Range<usize>) {
        let Some(twin) = &mut self.twins[index] else {
            return;
        };
        let possible = twin.all(pages.clone(), |slot| slot.page().is_some());
        let result = twin.real.seal(range(&pages));
        assert_eq!(result.is_ok(), possible, "{result:?}");
        for page in pages.filter(|_| possible) {
            if let Slot::Writable(contents) = &twin.slots[page] {
                twin.slots[page] = Slot::Sealed(contents.clone());
            }
        }
    }

    fn share(&mut self, from: usize, to: usize, pages: Range<usize>, target: usize) {
        let Ok([Some(from), Some(to)]) = self.twins.get_disjoint_mut([from, to]) else {
            return;
        };
        let into = target..target + pages.len();
        let possible = from.all(pages.clone(), |slot| matches!(slot, Slot::Sealed(_)))
            && to.all(into.clone(), Slot::is_hole);
        let result = to.real.share_from(&from.real, range(&pages), at(target));
        assert_eq!(result.is_ok(), possible, "{result:?}");
        if possible {
            to.slots[into].clone_from_slice(&from.slots[pages]);
        }
    }

    fn pin(&mut self, index: usize, page: usize) {
        let Some(twin) = &self.twins[index] else {
            return;
        };
        let result = twin.real.pin(range(&(page..page + 1)));
        match (result, twin.slots.get(page)) {
            (Ok(pins), Some(Slot::Sealed(contents))) => {
                self.pins
                    .extend(pins.into_iter().map(|pin| (pin, contents.clone())));
                self.pins.truncate(PINS);
            }
            (result, slot) => {
                let sealed = matches!(slot, Some(Slot::Sealed(_)));
                assert!(result.is_err() && !sealed, "{result:?}");
            }
        }
    }

    fn share_pins(&mut self, index: usize, target: usize) {
        let Some(twin) = &mut self.twins[index] else {
            return;
        };
        let pins: Vec<PagePin> = self.pins.iter().map(|(pin, _)| pin.clone()).collect();
        let into = target..target + pins.len();
        let possible = twin.all(into.clone(), Slot::is_hole);
        let source = Source::Pins(&pins);
        let share = Share {
            source,
            target: &mut twin.real,
            at: at(target),
        };
        let result = self.pool.share(&mut [share]);
        assert_eq!(result.is_ok(), possible, "{result:?}");
        for (page, (_, contents)) in into.zip(&self.pins).filter(|_| possible) {
            twin.slots[page] = Slot::Sealed(contents.clone());
        }
    }

    /// Clones a pin or lets one go.
    fn change_pins(&mut self, choice: u8) {
        if self.pins.is_empty() {
            return;
        }
        let index = usize::from(choice / 2) % self.pins.len();
        match choice & 1 == 0 && self.pins.len() < PINS {
            true => self.pins.push(self.pins[index].clone()),
            false => drop(self.pins.swap_remove(index)),
        }
    }

    fn make_unique(&mut self, index: usize, pages: Range<usize>) {
        let free = self.free();
        let Some(twin) = &mut self.twins[index] else {
            return;
        };
        let mapped = twin.all(pages.clone(), |slot| slot.page().is_some());
        let shared = |page: &usize| match twin.slots.get(*page) {
            Some(Slot::Sealed(contents)) => Rc::strong_count(contents) > 1,
            _ => false,
        };
        let copies: Vec<usize> = pages.clone().filter(shared).collect();
        let possible = mapped && copies.len() <= free;
        let result = twin.real.make_unique(range(&pages));
        assert_eq!(result.is_ok(), possible, "{result:?}");
        for page in pages.filter(|_| possible) {
            if let Slot::Sealed(contents) = &twin.slots[page] {
                twin.slots[page] = Slot::Writable(match copies.contains(&page) {
                    true => Rc::new(contents.to_vec()),
                    false => contents.clone(),
                });
            }
        }
    }

    fn unmap(&mut self, index: usize, pages: Range<usize>) {
        let Some(twin) = &mut self.twins[index] else {
            return;
        };
        let possible = twin.all(pages.clone(), |slot| !slot.is_hole());
        let result = twin.real.unmap(range(&pages));
        assert_eq!(result.is_ok(), possible, "{result:?}");
        if possible {
            twin.slots[pages].fill(Slot::Hole);
        }
    }

    fn truncate(&mut self, index: usize, length: usize) {
        let Some(twin) = &mut self.twins[index] else {
            return;
        };
        let result = twin.real.truncate(ByteLength::new(length as u64));
        assert!(result.is_ok(), "{result:?}");
        let kept = length.div_ceil(self.page).min(PAGES);
        twin.slots[kept..].fill(Slot::Hole);
    }

    /// Swaps out to a store that fails at its `failing`-th page.
    fn swap_out(&mut self, index: usize, pages: Range<usize>, failing: usize) {
        let Some(twin) = &mut self.twins[index] else {
            return;
        };
        let mapped = twin.all(pages.clone(), |slot| slot.page().is_some());
        let possible = mapped && failing >= pages.len();
        let slots = &twin.slots;
        let result = twin.real.swap_out(range(&pages), |page, bytes| {
            let page = page.index() as usize;
            assert!(
                slots[page]
                    .page()
                    .is_some_and(|contents| **contents == bytes)
            );
            if page == pages.start + failing {
                Err("full")
            } else {
                Ok(())
            }
        });
        assert_eq!(result.is_ok(), possible, "{result:?}");
        for slot in twin
            .slots
            .get_mut(pages)
            .into_iter()
            .flatten()
            .filter(|_| possible)
        {
            *slot = Slot::Swapped(slot.page().expect("mapped before").to_vec());
        }
    }

    /// Swaps in from a store that fails at its `failing`-th page.
    fn swap_in(&mut self, index: usize, pages: Range<usize>, failing: usize) {
        let free = self.free();
        let Some(twin) = &mut self.twins[index] else {
            return;
        };
        let swapped = twin.all(pages.clone(), |slot| matches!(slot, Slot::Swapped(_)));
        let possible = swapped && pages.len() <= free && failing >= pages.len();
        let slots = &twin.slots;
        let result = twin.real.swap_in(range(&pages), |page, bytes| {
            let page = page.index() as usize;
            let Slot::Swapped(contents) = &slots[page] else {
                panic!("{page} was not swapped out")
            };
            bytes.copy_from_slice(contents);
            if page == pages.start + failing {
                Err("unreadable")
            } else {
                Ok(())
            }
        });
        assert_eq!(result.is_ok(), possible, "{result:?}");
        for slot in twin
            .slots
            .get_mut(pages)
            .into_iter()
            .flatten()
            .filter(|_| possible)
        {
            let Slot::Swapped(contents) = slot else {
                unreachable!()
            };
            *slot = Slot::Writable(Rc::new(std::mem::take(contents)));
        }
    }

    /// Sets the limit, or trims when there would be none.
    fn limit(&mut self, pages: usize) {
        if pages == 0 {
            self.pool.trim();
            assert_eq!(self.pool.ledger().idle, ByteLength::ZERO);
            return;
        }
        let limit = Some(self.bytes_of(pages));
        self.pool
            .set_limit(limit)
            .expect("a limit of at least one page");
        self.limit = pages;
    }

    fn compare(&mut self) {
        for twin in self.twins.iter_mut().flatten() {
            for (page, slot) in twin.slots.iter().enumerate() {
                let bytes = page * self.page..(page + 1) * self.page;
                match (slot.page(), twin.real.bytes(bytes.clone())) {
                    (Some(page), Ok(bytes)) => assert!(**page == bytes, "contents differ"),
                    (None, Err(_)) => {}
                    (_, result) => panic!("page {page}: {:?}", result.map(<[u8]>::len)),
                }
                let writable = twin.real.bytes_mut(bytes).is_ok();
                assert_eq!(writable, matches!(slot, Slot::Writable(_)), "page {page}");
            }
        }
        let buffers = self.twins.iter().flatten().map(|twin| &twin.real);
        self.pool.verify(buffers).expect("every invariant holds");
        let ledger = self.pool.ledger();
        let over = ledger.owed > ByteLength::ZERO && ledger.idle > ByteLength::ZERO;
        assert!(!over, "idle memory above the limit: {ledger:?}");
    }

    /// Without buffers and pins, everything goes back.
    fn finish(mut self) {
        self.compare();
        self.twins.clear();
        self.pins.clear();
        self.pool.trim();
        let ledger = self.pool.ledger();
        assert_eq!(
            (ledger.committed, ledger.reserved),
            (ByteLength::ZERO, ByteLength::ZERO)
        );
        assert_eq!(ledger.heaps, 0);
    }
}
