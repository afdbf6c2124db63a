//! Random operations on a pool against a naive oracle that knows nothing of heaps, extents or
//! mappings: what every page holds, what every call answers, and every account of the ledger.

use std::collections::BTreeMap;
use std::rc::Rc;

use lacuna_pages::device::{Aliasing, Commitment, Location};
use lacuna_pages::{
    Buffer, ByteLength, DenseDevice, Error, HostDevice, PageCount, PagePin, Pages, Pool,
    PoolConfig, Request, Share, Source, SplitDevice, VirtualPage,
};
use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::support::{
    Guise, PAGE, PAGE_SIZE, assert_page, host, is_graphics, pages, probed, range, small, write_page,
};

const BUFFERS: usize = 6;
const PAGES: u64 = 12;
const LIMIT: u64 = 40;
/// Pages in a heap, as `small` has it.
const HEAP: u64 = 16;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Reserve(usize),
    Drop(usize),
    Ensure([(usize, u64, u64); 2]),
    Write(usize, u64),
    Seal(usize, u64, u64),
    Share {
        from: usize,
        to: usize,
        start: u64,
        count: u64,
        at: u64,
    },
    Pin(usize, u64),
    SharePin(usize, u64),
    Unpin,
    MakeUnique(usize, u64, u64),
    Unmap(usize, u64, u64),
    Truncate(usize, u64),
    SwapOut(usize, u64, u64),
    SwapIn(usize, u64, u64),
    Limit(u64),
    Trim,
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let buffer = 0..BUFFERS;
    let page = 0..PAGES + 2;
    let length = 0..6u64;
    let part = (buffer.clone(), page.clone(), length.clone());
    prop_oneof![
        3 => buffer.clone().prop_map(Step::Reserve),
        1 => buffer.clone().prop_map(Step::Drop),
        6 => (part.clone(), part.clone()).prop_map(|(a, b)| Step::Ensure([a, b])),
        6 => (buffer.clone(), page.clone()).prop_map(|(a, b)| Step::Write(a, b)),
        4 => part.clone().prop_map(|(a, b, c)| Step::Seal(a, b, c)),
        4 => (buffer.clone(), buffer.clone(), page.clone(), length.clone(), page.clone())
            .prop_map(|(from, to, start, count, at)| Step::Share { from, to, start, count, at }),
        1 => (buffer.clone(), page.clone()).prop_map(|(a, b)| Step::Pin(a, b)),
        2 => (buffer.clone(), page.clone()).prop_map(|(a, b)| Step::SharePin(a, b)),
        1 => Just(Step::Unpin),
        3 => part.clone().prop_map(|(a, b, c)| Step::MakeUnique(a, b, c)),
        2 => part.clone().prop_map(|(a, b, c)| Step::Unmap(a, b, c)),
        1 => (buffer.clone(), 0..=PAGES).prop_map(|(a, b)| Step::Truncate(a, b)),
        1 => part.clone().prop_map(|(a, b, c)| Step::SwapOut(a, b, c)),
        1 => part.prop_map(|(a, b, c)| Step::SwapIn(a, b, c)),
        1 => (1..LIMIT + 10).prop_map(Step::Limit),
        1 => Just(Step::Trim),
    ]
}

/// A physical page as the oracle sees it: its identity is its `Rc`, its contents a tag.
type Page = Rc<()>;

#[derive(Clone, Debug, Default)]
enum Cell {
    #[default]
    Hole,
    Swapped(Option<u64>),
    Writable(Page, Option<u64>),
    Sealed(Page, Option<u64>),
}

impl Cell {
    fn page(&self) -> Option<(&Page, Option<u64>)> {
        match self {
            Self::Writable(page, tag) | Self::Sealed(page, tag) => Some((page, *tag)),
            Self::Hole | Self::Swapped(_) => None,
        }
    }
}

#[derive(Debug)]
struct Twin {
    real: Buffer,
    cells: Vec<Cell>,
}

/// The pool and what it ought to be.
struct Model {
    pool: Pool,
    commitment: Commitment,
    dense: bool,
    /// Whether the host sees the memory or copies it.
    visible: bool,
    /// Pages committed after the step before.
    committed: u64,
    twins: Vec<Option<Twin>>,
    pins: Vec<(PagePin, Page, Option<u64>)>,
    /// Of which kind the pages of each buffer are, and those of each pin.
    kinds: [Location; BUFFERS],
    pinned: Vec<Location>,
    limit: u64,
    tag: u64,
}

fn at(page: u64) -> VirtualPage {
    VirtualPage::new(page)
}

impl Model {
    fn new(pool: Pool) -> Self {
        let commitment = pool.capabilities().commitment;
        let visible = !is_graphics(&pool);
        let twins = (0..BUFFERS).map(|_| None).collect();
        Self {
            pool,
            commitment,
            dense: commitment == Commitment::WithReservation,
            visible,
            committed: 0,
            twins,
            pins: Vec::new(),
            kinds: [Location::Own; BUFFERS],
            pinned: Vec::new(),
            limit: LIMIT,
            tag: 0,
        }
    }

    /// The same where every second buffer has memory of the host beside a device's own.
    fn split(pool: Pool) -> Self {
        let kind = |index| Location::ALL[index % 2];
        Self {
            kinds: std::array::from_fn(kind),
            ..Self::new(pool)
        }
    }

    fn owners(&self) -> BTreeMap<*const (), (u64, u64)> {
        let mut owners: BTreeMap<*const (), (u64, u64)> = BTreeMap::new();
        let cells = self.twins.iter().flatten().flat_map(|twin| &twin.cells);
        for (page, _) in cells.filter_map(Cell::page) {
            owners.entry(Rc::as_ptr(page)).or_default().0 += 1;
        }
        for (_, page, _) in &self.pins {
            owners.entry(Rc::as_ptr(page)).or_default().1 += 1;
        }
        owners
    }

    /// What the limit leaves. Where memory comes by the heap, that is what nobody owns of the heaps
    /// there are, and as many whole heaps as fit: which heaps there are is the pool's to choose.
    fn free(&self) -> u64 {
        let owned = self.owners().len() as u64;
        match self.commitment {
            Commitment::PerPage => self.limit.saturating_sub(owned),
            Commitment::PerHeap => {
                let committed = self.committed();
                committed - owned + self.limit.saturating_sub(committed) / HEAP * HEAP
            }
            Commitment::WithReservation => self
                .limit
                .saturating_sub(PAGES * self.twins.iter().flatten().count() as u64),
        }
    }

    fn committed(&self) -> u64 {
        self.pool.ledger().committed.get() / PAGE as u64
    }

    fn out_of_pages(&self, requested: u64) -> Option<Error> {
        let free = self.free();
        (requested > free).then(|| Error::OutOfPages {
            requested: PageCount::new(requested),
            free: PageCount::new(free),
            limit: Some(pages(self.limit)),
        })
    }

    fn check_range(&self, start: u64, end: u64) -> Option<Error> {
        let reserved = PageCount::new(PAGES);
        (end > PAGES).then(|| Error::PageRange {
            range: range(start, end),
            reserved,
        })
    }

    /// The first complaint about cells of a range.
    fn first(
        &self,
        buffer: usize,
        start: u64,
        end: u64,
        complain: impl Fn(&Cell, VirtualPage) -> Option<Error>,
    ) -> Option<Error> {
        let cells = &self.twins[buffer].as_ref().unwrap().cells;
        (start..end).find_map(|page| complain(&cells[page as usize], at(page)))
    }

    fn unmapped(&self, buffer: usize, start: u64, end: u64) -> Option<Error> {
        self.first(buffer, start, end, |cell, page| match cell {
            Cell::Hole => Some(Error::Hole { page }),
            Cell::Swapped(_) => Some(Error::Swapped { page }),
            _ => None,
        })
    }

    fn cell(&mut self, buffer: usize, page: u64) -> &mut Cell {
        &mut self.twins[buffer].as_mut().unwrap().cells[page as usize]
    }

    fn real(&mut self, buffer: usize) -> &mut Buffer {
        &mut self.twins[buffer].as_mut().unwrap().real
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Reserve(buffer) if self.twins[buffer].is_none() => self.reserve(buffer),
            Step::Drop(buffer) => self.twins[buffer] = None,
            Step::Ensure(parts) => self.ensure(parts),
            Step::Unpin if !self.pins.is_empty() => {
                drop(self.pins.remove(0));
                self.pinned.remove(0);
            }
            Step::Limit(limit) => {
                self.pool.set_limit(Some(pages(limit))).unwrap();
                self.limit = limit;
            }
            Step::Trim => self.pool.trim(),
            Step::Share {
                from,
                to,
                start,
                count,
                at,
            } if from != to => {
                self.share(from, to, start, count, at);
            }
            Step::Write(buffer, page) if self.twins[buffer].is_some() => self.write(buffer, page),
            Step::Seal(buffer, start, count) if self.twins[buffer].is_some() => {
                self.seal(buffer, start, start + count);
            }
            Step::Pin(buffer, page) if self.twins[buffer].is_some() => self.pin(buffer, page),
            Step::SharePin(buffer, page) if self.twins[buffer].is_some() => {
                self.share_pin(buffer, page);
            }
            Step::MakeUnique(buffer, start, count) if self.twins[buffer].is_some() => {
                self.make_unique(buffer, start, start + count);
            }
            Step::Unmap(buffer, start, count) if self.twins[buffer].is_some() => {
                self.unmap(buffer, start, start + count);
            }
            Step::Truncate(buffer, page) if self.twins[buffer].is_some() => {
                self.real(buffer).truncate(pages(page)).unwrap();
                for page in page..PAGES {
                    *self.cell(buffer, page) = Cell::Hole;
                }
            }
            Step::SwapOut(buffer, start, count) if self.twins[buffer].is_some() => {
                self.swap_out(buffer, start, start + count);
            }
            Step::SwapIn(buffer, start, count) if self.twins[buffer].is_some() => {
                self.swap_in(buffer, start, start + count);
            }
            _ => {}
        }
    }

    fn reserve(&mut self, buffer: usize) {
        let expected = if self.dense {
            self.out_of_pages(PAGES)
        } else {
            None
        };
        let fresh = |_| match self.dense {
            true => Cell::Writable(Rc::new(()), None),
            false => Cell::Hole,
        };
        let cells = (0..PAGES).map(fresh).collect();
        let (kind, label) = (self.kinds[buffer], format!("{buffer}"));
        match self.pool.reserve_at(kind, pages(PAGES), label) {
            Ok(real) => {
                assert_eq!(expected, None);
                self.twins[buffer] = Some(Twin { real, cells });
            }
            Err(error) => assert_eq!(Some(error), expected),
        }
    }

    fn ensure(&mut self, parts: [(usize, u64, u64); 2]) {
        let [first, second] = parts;
        let parts = if first.0 == second.0 {
            vec![first]
        } else {
            vec![first, second]
        };
        if parts.iter().any(|part| self.twins[part.0].is_none()) {
            return;
        }
        let mut expected = None;
        let mut holes = Vec::new();
        for &(buffer, start, count) in &parts {
            let bytes = start * PAGE as u64..(start + count) * PAGE as u64;
            let range = lacuna_pages::ByteRange::new(bytes.start, bytes.end);
            let reserved = pages(PAGES);
            let outside = start + count > PAGES;
            let error = match outside {
                true => Some(Error::ByteRange { range, reserved }),
                false => self.first(buffer, start, start + count, |cell, page| match cell {
                    Cell::Swapped(_) => Some(Error::Swapped { page }),
                    _ => None,
                }),
            };
            expected = expected.or(error);
            if !outside {
                let cells = &self.twins[buffer].as_ref().unwrap().cells;
                let hole = |&page: &u64| matches!(cells[page as usize], Cell::Hole);
                holes.extend(
                    (start..start + count)
                        .filter(hole)
                        .map(|page| (buffer, page)),
                );
            }
        }
        if !self.dense {
            expected = expected.or_else(|| self.out_of_pages(holes.len() as u64));
        }
        let pool = self.pool.clone();
        let mut requests = Vec::new();
        for (index, twin) in self.twins.iter_mut().enumerate() {
            if let Some(&(_, start, count)) = parts.iter().find(|part| part.0 == index) {
                let bytes = start as usize * PAGE..(start + count) as usize * PAGE;
                requests.push(Request::new(&mut twin.as_mut().unwrap().real, bytes));
            }
        }
        if parts.len() == 2 && parts[0].0 > parts[1].0 {
            requests.reverse();
        }
        match pool.ensure_mapped(&mut requests) {
            Ok(report) => {
                assert_eq!(expected, None);
                assert_eq!(report.pages_mapped.get(), holes.len() as u64);
                for (buffer, page) in holes {
                    *self.cell(buffer, page) = Cell::Writable(Rc::new(()), None);
                }
            }
            Err(error) => assert_eq!(Some(error), expected),
        }
    }

    fn write(&mut self, buffer: usize, page: u64) {
        if page >= PAGES {
            return;
        }
        self.tag += 1;
        let tag = self.tag;
        let start = page as usize * PAGE;
        let result = match self.visible {
            true => self.real(buffer).bytes_mut(start..start + PAGE).map(drop),
            false => self.real(buffer).write(start as u64, &[0; PAGE]),
        };
        let expected = match self.cell(buffer, page) {
            Cell::Hole => Err(Error::Hole { page: at(page) }),
            Cell::Swapped(_) => Err(Error::Swapped { page: at(page) }),
            Cell::Sealed(..) => Err(Error::Sealed { page: at(page) }),
            Cell::Writable(_, contents) => {
                *contents = Some(tag);
                Ok(())
            }
        };
        assert_eq!(result, expected);
        if expected.is_ok() {
            write_page(self.real(buffer), page, tag);
        }
    }

    fn seal(&mut self, buffer: usize, start: u64, end: u64) {
        let expected = self
            .check_range(start, end)
            .or_else(|| self.unmapped(buffer, start, end));
        let result = self.real(buffer).seal(range(start, end));
        assert_eq!(result.err(), expected);
        if expected.is_none() {
            for page in start..end {
                let cell = self.cell(buffer, page);
                if let Cell::Writable(page, tag) = cell.clone() {
                    *cell = Cell::Sealed(page, tag);
                }
            }
        }
    }

    fn unshareable(&self, buffer: usize, page: u64) -> Option<Error> {
        self.unmapped(buffer, page, page + 1).or_else(|| {
            self.first(buffer, page, page + 1, |cell, page| match cell {
                Cell::Writable(..) => Some(Error::NotSealed { page }),
                _ => None,
            })
        })
    }

    fn occupied(&self, buffer: usize, page: u64) -> Option<Error> {
        self.first(buffer, page, page + 1, |cell, page| match cell {
            Cell::Hole => None,
            Cell::Swapped(_) => Some(Error::Swapped { page }),
            _ => Some(Error::Occupied { page }),
        })
    }

    fn share(&mut self, from: usize, to: usize, start: u64, count: u64, target: u64) {
        if self.twins[from].is_none() || self.twins[to].is_none() {
            return;
        }
        let other = self.kinds[from] != self.kinds[to];
        let mut expected = self
            .check_range(start, start + count)
            .or_else(|| other.then_some(Error::OtherLocation))
            .or_else(|| self.check_range(target, target + count));
        for index in 0..count {
            expected = expected
                .or_else(|| self.occupied(to, target + index))
                .or_else(|| self.unshareable(from, start + index));
        }
        let mut receiver = self.twins[to].take().unwrap();
        let source = &self.twins[from].as_ref().unwrap().real;
        let result = receiver
            .real
            .share_from(source, range(start, start + count), at(target));
        self.twins[to] = Some(receiver);
        if self.pool.capabilities().aliasing == Aliasing::Unsupported {
            assert!(matches!(result, Err(Error::Unsupported { .. })));
            return;
        }
        assert_eq!(result.err(), expected);
        if expected.is_none() {
            for index in 0..count {
                *self.cell(to, target + index) = self.cell(from, start + index).clone();
            }
        }
    }

    fn pin(&mut self, buffer: usize, page: u64) {
        if page >= PAGES || self.pins.len() > 4 {
            return;
        }
        let expected = self.unshareable(buffer, page);
        match self.real(buffer).pin(range(page, page + 1)) {
            Ok(mut pins) => {
                assert_eq!(expected, None);
                let (page, tag) = self.cell(buffer, page).page().unwrap();
                let (page, tag) = (page.clone(), tag);
                self.pins.push((pins.remove(0), page, tag));
                self.pinned.push(self.kinds[buffer]);
            }
            Err(Error::Unsupported { .. }) => {
                assert_eq!(self.pool.capabilities().aliasing, Aliasing::Unsupported);
            }
            Err(error) => assert_eq!(Some(error), expected),
        }
    }

    fn share_pin(&mut self, buffer: usize, page: u64) {
        let Some((pin, physical, tag)) = self.pins.last() else {
            return;
        };
        let (pin, physical, tag) = (pin.clone(), physical.clone(), *tag);
        let other = self.pinned.last() != Some(&self.kinds[buffer]);
        let expected = other.then_some(Error::OtherLocation);
        let expected = expected
            .or_else(|| self.check_range(page, page + 1))
            .or_else(|| self.occupied(buffer, page));
        let pool = self.pool.clone();
        let source = Source::Pins(std::slice::from_ref(&pin));
        let target = self.real(buffer);
        let result = pool.share(&mut [Share {
            source,
            target,
            at: at(page),
        }]);
        assert_eq!(result.err(), expected);
        if expected.is_none() {
            *self.cell(buffer, page) = Cell::Sealed(physical, tag);
        }
    }

    fn make_unique(&mut self, buffer: usize, start: u64, end: u64) {
        let mut expected = self
            .check_range(start, end)
            .or_else(|| self.unmapped(buffer, start, end));
        let owners = self.owners();
        let mut copies = Vec::new();
        if expected.is_none() {
            for page in start..end {
                if let Cell::Sealed(physical, _) = self.cell(buffer, page).clone()
                    && owners[&Rc::as_ptr(&physical)] != (1, 0)
                {
                    copies.push(page);
                }
            }
            expected = self
                .out_of_pages(copies.len() as u64)
                .filter(|_| !copies.is_empty());
        }
        let result = self.real(buffer).make_unique(range(start, end));
        match result {
            Ok(report) => {
                assert_eq!(expected, None);
                assert_eq!(report.pages_mapped.get(), copies.len() as u64);
                for page in start..end {
                    let copied = copies.contains(&page);
                    let cell = self.cell(buffer, page);
                    if let Cell::Sealed(physical, tag) = cell.clone() {
                        let physical = if copied { Rc::new(()) } else { physical };
                        *cell = Cell::Writable(physical, tag);
                    }
                }
            }
            Err(error) => assert_eq!(Some(error), expected),
        }
    }

    fn unmap(&mut self, buffer: usize, start: u64, end: u64) {
        let expected = self.check_range(start, end).or_else(|| {
            self.first(buffer, start, end, |cell, page| match cell {
                Cell::Hole => Some(Error::Hole { page }),
                _ => None,
            })
        });
        let pool = self.pool.clone();
        let result = pool.unmap(&mut [Pages::new(self.real(buffer), range(start, end))]);
        assert_eq!(result.err(), expected);
        if expected.is_none() {
            for page in start..end {
                *self.cell(buffer, page) = Cell::Hole;
            }
        }
    }

    fn swap_out(&mut self, buffer: usize, start: u64, end: u64) {
        if self
            .check_range(start, end)
            .or_else(|| self.unmapped(buffer, start, end))
            .is_some()
        {
            let result = self
                .real(buffer)
                .swap_out(range(start, end), |_, _| Ok::<(), ()>(()));
            assert!(result.is_err());
            return;
        }
        self.real(buffer)
            .swap_out(range(start, end), |_, _| Ok::<(), ()>(()))
            .unwrap();
        for page in start..end {
            let tag = self.cell(buffer, page).page().and_then(|(_, tag)| tag);
            *self.cell(buffer, page) = Cell::Swapped(tag);
        }
    }

    fn swap_in(&mut self, buffer: usize, start: u64, end: u64) {
        let inside = self.check_range(start, end).is_none();
        let complaint = |cell: &Cell, page| match cell {
            Cell::Swapped(_) => None,
            _ => Some(Error::NotSwapped { page }),
        };
        let all = inside && self.first(buffer, start, end, complaint).is_none();
        let room = self.dense || self.out_of_pages(end - start).is_none() || start == end;
        let mut filled = Vec::new();
        let result = self.real(buffer).swap_in(range(start, end), |page, _| {
            filled.push(page.index());
            Ok::<(), ()>(())
        });
        assert_eq!(result.is_ok(), all && room, "{result:?}");
        for page in filled {
            let Cell::Swapped(tag) = *self.cell(buffer, page) else {
                panic!("filled {page}")
            };
            *self.cell(buffer, page) = Cell::Writable(Rc::new(()), tag);
            if let Some(tag) = tag {
                write_page(self.real(buffer), page, tag);
            }
        }
    }

    fn check_contents(&self) {
        for twin in self.twins.iter().flatten() {
            for (page, cell) in twin.cells.iter().enumerate() {
                match cell.page() {
                    Some((_, Some(tag))) => assert_page(&twin.real, page as u64, tag),
                    Some((_, None)) => self.touch(&twin.real, page).unwrap(),
                    None => assert!(self.touch(&twin.real, page).is_err()),
                }
            }
        }
    }

    /// Reads the first byte of a page.
    fn touch(&self, buffer: &Buffer, page: usize) -> Result<(), Error> {
        let start = page * PAGE;
        match self.visible {
            true => buffer.bytes(start..start + 1).map(drop),
            false => buffer.read(start as u64, &mut [0]),
        }
    }

    /// What is committed: within the limit unless it was lowered, whole heaps where it comes by the
    /// heap, and given back as soon as it can be when the limit asks for it.
    fn check_commitment(&mut self) {
        let (ledger, owned) = (self.pool.ledger(), self.owners().len() as u64);
        let committed = self.committed();
        assert!(committed <= self.committed.max(self.limit));
        assert_eq!(ledger.owed, pages(committed.saturating_sub(self.limit)));
        let owes = ledger.owed > ByteLength::ZERO;
        match self.commitment {
            Commitment::PerPage => {
                assert_eq!(ledger.idle, pages(committed - owned));
                assert!(!owes || committed == owned);
            }
            Commitment::PerHeap => {
                assert_eq!(ledger.idle, pages(committed - owned));
                assert_eq!(committed, ledger.heaps * HEAP);
                assert!(!owes || ledger.heaps <= owned, "an empty heap is owed");
            }
            Commitment::WithReservation => {
                assert_eq!(committed, ledger.buffers * PAGES);
            }
        }
        self.committed = committed;
    }

    fn check_accounts(&self) {
        self.pool
            .verify(self.twins.iter().flatten().map(|twin| &twin.real))
            .unwrap();
        let owners = self.owners();
        let count = |which: fn(&(u64, u64)) -> bool| {
            pages(owners.values().filter(|owners| which(owners)).count() as u64)
        };
        let ledger = self.pool.ledger();
        assert_eq!(ledger.unique, count(|owners| owners.0 == 1));
        assert_eq!(ledger.shared, count(|owners| owners.0 > 1));
        assert_eq!(ledger.pinned, count(|owners| owners.1 > 0));
        assert_eq!(ledger.pinned_only, count(|owners| owners.0 == 0));
        if self.kinds.iter().all(|kind| *kind == Location::Own) {
            assert_eq!(ledger.host_beside, ByteLength::ZERO);
        }
        for twin in self.twins.iter().flatten() {
            let own = twin.real.ledger();
            let mapped: Vec<u64> = (twin.cells.iter())
                .filter_map(|cell| Some(owners[&Rc::as_ptr(cell.page()?.0)].0))
                .collect();
            let shared = mapped.iter().filter(|&&mappings| mappings > 1).count() as u64;
            assert_eq!(own.mapped, pages(mapped.len() as u64));
            assert_eq!(own.shared, pages(shared));
        }
    }
}

pub(crate) fn run(pool: Pool, steps: &[Step]) {
    play(Model::new(pool), steps);
}

fn play(mut model: Model, steps: &[Step]) {
    for (index, step) in steps.iter().enumerate() {
        model.step(step);
        model.check_accounts();
        model.check_commitment();
        if index % 16 == 0 {
            model.check_contents();
        }
    }
    model.check_contents();
    let Model {
        pool, twins, pins, ..
    } = model;
    drop((twins, pins));
    pool.trim();
    assert_eq!(pool.ledger().committed, ByteLength::ZERO);
}

pub(crate) fn config() -> PoolConfig {
    PoolConfig {
        limit: Some(PAGE_SIZE.bytes_of(PageCount::new(LIMIT))),
        ..small()
    }
}

proptest! {
    // A hundredth of the usual: each is thousands of steps.
    #![proptest_config(Config {
        cases: Config::default().cases.div_ceil(100),
        max_shrink_time: 15_000,
        ..Config::default()
    })]

    #[test]
    fn the_host_pool_agrees_with_the_oracle(
        steps in proptest::collection::vec(step(), 10_000),
    ) {
        run(host(config()), &steps);
    }

    #[test]
    fn a_pool_on_a_probe_agrees_with_the_oracle(
        steps in proptest::collection::vec(step(), 2_000),
    ) {
        run(probed(config(), Guise::NoAliasing).0, &steps);
    }

    #[test]
    fn a_pool_that_commits_by_the_heap_agrees_with_the_oracle(
        steps in proptest::collection::vec(step(), 10_000),
    ) {
        run(probed(config(), Guise::PerHeap).0, &steps);
    }

    #[test]
    fn a_pool_of_two_kinds_of_memory_agrees_with_the_oracle(
        steps in proptest::collection::vec(step(), 10_000),
    ) {
        let device = SplitDevice::new(HostDevice::new().unwrap()).unwrap();
        play(Model::split(Pool::new(device, config()).unwrap()), &steps);
    }

    #[test]
    fn the_dense_pool_agrees_with_the_oracle(
        steps in proptest::collection::vec(step(), 2_000),
    ) {
        let limit = Some(pages(LIMIT));
        run(Pool::new(DenseDevice::new(), PoolConfig { limit, ..config() }).unwrap(), &steps);
    }
}
