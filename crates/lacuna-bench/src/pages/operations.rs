//! What each operation costs, one page a call.
//!
//! A round takes a fresh pool and walks pages through their whole life: committed and mapped,
//! unmapped, mapped again, sealed, shared, copied because someone writes to them, given back.

use std::time::Instant;

use lacuna_pages::device::{Commitment, Patience};
use lacuna_pages::{
    Buffer, ByteLength, Error, MapReport, PageCount, PageRange, PageSize, Pool, PoolConfig,
    VirtualPage,
};
use serde::Serialize;

use super::{DeviceKind, Extent, supported};
use crate::samples::{Samples, Timing};

/// Pages of a round at most.
const PAGES: u64 = 256;
/// Pages shared by one call, when they are shared in runs.
const RUN: u32 = 16;
/// How often a round shares all its pages in runs.
const RUN_REPEATS: usize = 8;

/// Costs per page; nothing where the device has no such operation.
#[derive(Debug, Serialize)]
pub(super) struct Costs {
    pub(super) page_bytes: u64,
    /// Memory from the system, mapped. On a dense device: a reservation of one page.
    pub(super) commit_and_map: Option<Timing>,
    /// Memory the pool kept, mapped again.
    pub(super) map_recycled: Option<Timing>,
    pub(super) share: Option<Timing>,
    /// The same, 16 neighbouring pages a call; still per page.
    pub(super) share_run_of_16: Option<Timing>,
    pub(super) unmap: Option<Timing>,
    /// A shared page copied into memory the pool kept, and mapped.
    pub(super) copy_on_write: Option<Timing>,
    pub(super) seal: Option<Timing>,
    /// Idle memory returned to the system, a page at a time as a limit is lowered. On a dense
    /// device: a reservation of one page dropped.
    pub(super) give_back: Option<Timing>,
}

#[derive(Default)]
struct Collected {
    commit_and_map: Samples,
    map_recycled: Samples,
    share: Samples,
    share_run: Samples,
    unmap: Samples,
    copy_on_write: Samples,
    seal: Samples,
    give_back: Samples,
}

pub(super) fn measure(device: DeviceKind, size: PageSize, extent: &Extent) -> Result<Costs, Error> {
    let pages = (extent.round_bytes / size.bytes()).clamp(u64::from(RUN), PAGES);
    let mut collected = Collected::default();
    for _ in 0..extent.rounds {
        Round::new(device, size, pages, &mut collected)?.run()?;
    }
    Ok(Costs {
        page_bytes: size.bytes(),
        commit_and_map: collected.commit_and_map.timing(),
        map_recycled: collected.map_recycled.timing(),
        share: collected.share.timing(),
        share_run_of_16: collected.share_run.timing(),
        unmap: collected.unmap.timing(),
        copy_on_write: collected.copy_on_write.timing(),
        seal: collected.seal.timing(),
        give_back: collected.give_back.timing(),
    })
}

struct Round<'a> {
    pool: Pool,
    pages: u64,
    collected: &'a mut Collected,
}

fn one(page: u64) -> PageRange {
    PageRange::one(VirtualPage::new(page))
}

/// Waits until a device that works asynchronously has mapped what a call asked for.
fn done(pool: &Pool, report: Result<MapReport, Error>) -> Result<(), Error> {
    pool.wait(report?.fence, Patience::Block).map(drop)
}

impl<'a> Round<'a> {
    fn new(
        device: DeviceKind,
        page_size: PageSize,
        pages: u64,
        collected: &'a mut Collected,
    ) -> Result<Self, Error> {
        // Nothing goes back to the system before it is asked for.
        let keep = page_size.bytes_of(PageCount::new(4 * pages));
        let pool = device.pool(PoolConfig {
            page_size,
            high_watermark: keep,
            low_watermark: keep,
            ..PoolConfig::default()
        })?;
        Ok(Self {
            pool,
            pages,
            collected,
        })
    }

    fn run(mut self) -> Result<(), Error> {
        if self.pool.capabilities().commitment == Commitment::WithReservation {
            self.reserve_pages()?;
        }
        let mut donor = self.reserve("donor")?;
        self.map_and_seal(&mut donor)?;
        let mut other = self.reserve("other")?;
        if supported(self.share(&donor, &mut other))?.is_some() {
            self.copy(&donor, &mut other)?;
        }
        drop((donor, other));
        if self.pool.capabilities().commitment != Commitment::WithReservation {
            self.give_back()?;
        }
        Ok(())
    }

    fn reserve(&self, label: &str) -> Result<Buffer, Error> {
        let length = self.pool.page_size().bytes_of(PageCount::new(self.pages));
        self.pool.reserve(length, label)
    }

    fn bytes(&self, pages: std::ops::Range<u64>) -> std::ops::Range<usize> {
        let size = self.pool.page_size().bytes() as usize;
        pages.start as usize * size..pages.end as usize * size
    }

    /// Where memory comes with the reservation and goes with it.
    fn reserve_pages(&mut self) -> Result<(), Error> {
        let mut buffers = Vec::new();
        for _ in 0..self.pages {
            let reserve = || self.pool.reserve(self.pool.page_size().length(), "page");
            buffers.push(self.collected.commit_and_map.time(1, reserve)?);
        }
        for buffer in buffers {
            let start = Instant::now();
            drop(buffer);
            self.collected.give_back.push(start.elapsed());
        }
        Ok(())
    }

    fn map_and_seal(&mut self, donor: &mut Buffer) -> Result<(), Error> {
        for page in 0..self.pages {
            let bytes = self.bytes(page..page + 1);
            if self.pool.capabilities().commitment == Commitment::WithReservation {
                break;
            }
            let map = || done(&self.pool, donor.ensure_mapped(bytes));
            self.collected.commit_and_map.time(1, map)?;
        }
        for page in 0..self.pages {
            self.collected.unmap.time(1, || donor.unmap(one(page)))?;
        }
        for page in 0..self.pages {
            let bytes = self.bytes(page..page + 1);
            let map = || done(&self.pool, donor.ensure_mapped(bytes));
            self.collected.map_recycled.time(1, map)?;
        }
        for page in 0..self.pages {
            self.collected.seal.time(1, || donor.seal(one(page)))?;
        }
        Ok(())
    }

    fn share(&mut self, donor: &Buffer, other: &mut Buffer) -> Result<(), Error> {
        let all = PageRange::of(0..self.pages);
        for page in 0..self.pages {
            let at = VirtualPage::new(page);
            let share = || done(&self.pool, other.share_from(donor, one(page), at));
            self.collected.share.time(1, share)?;
        }
        other.unmap(all)?;
        for _ in 0..RUN_REPEATS {
            for start in (0..self.pages / u64::from(RUN)).map(|run| run * u64::from(RUN)) {
                let (run, at) = (start..start + u64::from(RUN), VirtualPage::new(start));
                let share = || done(&self.pool, other.share_from(donor, PageRange::of(run), at));
                self.collected.share_run.time(RUN, share)?;
            }
            other.truncate(ByteLength::ZERO)?;
        }
        Ok(())
    }

    fn copy(&mut self, donor: &Buffer, other: &mut Buffer) -> Result<(), Error> {
        let all = PageRange::of(0..self.pages);
        other.ensure_mapped(self.bytes(0..self.pages))?;
        other.unmap(all)?;
        other.share_from(donor, all, VirtualPage::new(0))?;
        for page in 0..self.pages {
            let copy = || done(&self.pool, other.make_unique(one(page)));
            self.collected.copy_on_write.time(1, copy)?;
        }
        Ok(())
    }

    fn give_back(&mut self) -> Result<(), Error> {
        let page = self.pool.page_size().length();
        let mut limit = self.pool.ledger().committed;
        while limit > page {
            limit = limit.saturating_sub(page);
            let lower = || self.pool.set_limit(Some(limit));
            self.collected.give_back.time(1, lower)?;
        }
        Ok(())
    }
}
