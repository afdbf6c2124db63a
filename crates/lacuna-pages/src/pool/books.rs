//! The books: who owns which page, and the byte accounts. Pure; nothing here can fail, and nothing
//! here is called before the device has done its part.

use super::allocator::{Allocator, BufferId, Claim};
use super::heap::{Owners, Purpose};
use crate::device::{Fence, Location};
use crate::ledger::{BufferLedger, Counts, Ledger};
use crate::table::Slot;
use crate::units::{ByteLength, PageCount, PageSize, PhysicalPage};

/// One buffer's accounts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Account {
    pages: u64,
    mapped: u64,
    shared: u64,
    regions: u64,
}

/// Pages that have lost their last owner, to be reused once `fence` is signalled.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Retiring {
    fence: Fence,
    page: PhysicalPage,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Books {
    pub(crate) allocator: Allocator,
    pub(crate) counts: Counts,
    page_size: PageSize,
    accounts: Vec<Option<Account>>,
    retiring: Vec<Retiring>,
    reserved: u64,
    mapped: u64,
    totals: Totals,
    regions: u64,
}

/// Physical pages by who owns them; every owned page is in exactly one of the first four.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Totals {
    unique: u64,
    shared: u64,
    pinned_only: u64,
    lost: u64,
    pinned: u64,
}

impl Totals {
    fn enter(&mut self, owners: &Owners) {
        if let Some(total) = self.of(owners) {
            *total += 1;
        }
        self.pinned += u64::from(owners.pins > 0);
    }

    fn leave(&mut self, owners: &Owners) {
        if let Some(total) = self.of(owners) {
            *total -= 1;
        }
        self.pinned -= u64::from(owners.pins > 0);
    }

    fn of(&mut self, owners: &Owners) -> Option<&mut u64> {
        match owners {
            Owners { mappings: 1, .. } => Some(&mut self.unique),
            Owners { mappings: 2.., .. } => Some(&mut self.shared),
            Owners { pins: 1.., .. } => Some(&mut self.pinned_only),
            Owners { lost: 1.., .. } => Some(&mut self.lost),
            _ => None,
        }
    }

    fn owned(&self) -> u64 {
        [self.unique, self.shared, self.pinned_only, self.lost]
            .iter()
            .sum()
    }
}

impl Books {
    pub(crate) fn new(allocator: Allocator, page_size: PageSize) -> Self {
        Self {
            allocator,
            counts: Counts::default(),
            page_size,
            accounts: Vec::new(),
            retiring: Vec::new(),
            reserved: 0,
            mapped: 0,
            totals: Totals::default(),
            regions: 0,
        }
    }

    pub(crate) fn regions(&self) -> u64 {
        self.regions
    }

    /// Whether no page is owned by anyone.
    pub(crate) fn nothing_owned(&self) -> bool {
        self.totals.owned() == 0 && self.retiring.is_empty()
    }

    pub(crate) fn open(&mut self, pages: PageCount, location: Location) -> BufferId {
        let free = self.accounts.iter().position(Option::is_none);
        let index = free.unwrap_or(self.accounts.len());
        if index == self.accounts.len() {
            self.accounts.push(None);
        }
        self.accounts[index] = Some(Account {
            pages: pages.get(),
            regions: 1,
            ..Account::default()
        });
        self.reserved += pages.get();
        self.regions += 1;
        let buffer = BufferId(index as u32);
        self.allocator.open_buffer(buffer, location);
        buffer
    }

    /// Closes the account of a buffer that maps nothing any more.
    pub(crate) fn close(&mut self, buffer: BufferId) {
        self.allocator.dissolve_tail(buffer);
        let account = self.accounts[buffer.0 as usize]
            .take()
            .expect("M2: a buffer closes once");
        debug_assert_eq!(account.mapped, 0, "M2: a closed buffer maps nothing");
        self.reserved -= account.pages;
        self.regions -= account.regions;
    }

    fn account(&self, buffer: BufferId) -> &Account {
        self.accounts[buffer.0 as usize]
            .as_ref()
            .expect("M2: a buffer has an account")
    }

    fn change(&mut self, buffer: BufferId, change: impl FnOnce(&mut Account)) {
        let account = self.accounts[buffer.0 as usize].as_mut();
        change(account.expect("M2: a buffer has an account"));
    }

    pub(crate) fn set_regions(&mut self, buffer: BufferId, regions: u64) {
        let before = self.account(buffer).regions;
        self.regions = self.regions - before + regions;
        self.change(buffer, |account| account.regions = regions);
    }

    /// Records what one slot of `buffer` held and holds now.
    pub(crate) fn record(&mut self, buffer: BufferId, from: Slot, to: Slot, fence: Fence) {
        if from.page() != to.page() {
            if let Some(page) = to.page() {
                self.map(buffer, page);
            }
            if let Some(page) = from.page() {
                self.unmap(buffer, page, fence);
            }
        }
        if let Slot::Writable(page) = to {
            debug_assert!(
                self.is_sole_owner(page),
                "M3: {page} is writable and has other owners"
            );
        }
    }

    fn map(&mut self, buffer: BufferId, page: PhysicalPage) {
        let (before, _) = self.change_owners(page, |owners| {
            owners.mappings += 1;
            owners.sum = owners.sum.wrapping_add(u64::from(buffer.0));
        });
        self.mapped += 1;
        if before.mappings == 1 {
            self.change(BufferId(before.sum as u32), |account| account.shared += 1);
        }
        self.change(buffer, |account| {
            account.mapped += 1;
            account.shared += u64::from(before.mappings > 0);
        });
        self.counts.pages_mapped += 1;
    }

    fn unmap(&mut self, buffer: BufferId, page: PhysicalPage, fence: Fence) {
        let (_, after) = self.change_owners(page, |owners| {
            debug_assert!(
                owners.mappings > 0,
                "M2: {page} is unmapped more often than mapped"
            );
            owners.mappings -= 1;
            owners.sum = owners.sum.wrapping_sub(u64::from(buffer.0));
            owners.readers = owners.readers.max(fence);
        });
        self.mapped -= 1;
        self.change(buffer, |account| {
            account.mapped -= 1;
            account.shared -= u64::from(after.mappings > 0);
        });
        if after.mappings == 1 {
            self.change(BufferId(after.sum as u32), |account| account.shared -= 1);
        }
        self.counts.pages_unmapped += 1;
        if after.none() {
            self.retire(page, Some(buffer));
        }
    }

    /// Changes who owns a page and the totals with it; returns the owners before and after.
    fn change_owners(
        &mut self,
        page: PhysicalPage,
        change: impl FnOnce(&mut Owners),
    ) -> (Owners, Owners) {
        let owners = self.allocator.heap_mut(page.heap).owners_mut(page.index);
        let before = owners.clone();
        change(owners);
        let after = owners.clone();
        self.totals.leave(&before);
        self.totals.enter(&after);
        (before, after)
    }

    /// Frees a page that nobody owns any more, once the readers of all its mappings are done.
    fn retire(&mut self, page: PhysicalPage, buffer: Option<BufferId>) {
        let owners = self.allocator.heap_mut(page.heap).owners_mut(page.index);
        match std::mem::take(&mut owners.readers) {
            Fence::DONE => self.allocator.release(page, buffer),
            fence => self.retiring.push(Retiring { fence, page }),
        }
    }

    /// Frees what was waiting for fences that `signalled` says are reached.
    pub(crate) fn collect(&mut self, mut signalled: impl FnMut(Fence) -> bool) {
        let mut waiting = std::mem::take(&mut self.retiring);
        waiting.retain(|retiring| {
            let done = signalled(retiring.fence);
            if done {
                self.allocator.release(retiring.page, None);
            }
            !done
        });
        self.retiring = waiting;
    }

    pub(crate) fn has_retiring(&self) -> bool {
        !self.retiring.is_empty()
    }

    pub(crate) fn retiring_pages(&self) -> impl Iterator<Item = PhysicalPage> {
        self.retiring.iter().map(|retiring| retiring.page)
    }

    pub(crate) fn pin(&mut self, page: PhysicalPage) {
        self.change_owners(page, |owners| owners.pins += 1);
    }

    pub(crate) fn unpin(&mut self, page: PhysicalPage) {
        let (_, after) = self.change_owners(page, |owners| {
            debug_assert!(
                owners.pins > 0,
                "M2: {page} is unpinned more often than pinned"
            );
            owners.pins -= 1;
        });
        if after.none() {
            self.retire(page, None);
        }
    }

    /// Whether the page can be written to where it is: one mapping is all that owns it, and it is no file's.
    pub(crate) fn can_be_unsealed(&self, page: PhysicalPage) -> bool {
        let purpose = self.allocator.heap(page.heap).purpose();
        purpose != Purpose::File && self.is_sole_owner(page)
    }

    /// Whether one mapping is all that owns the page.
    pub(crate) fn is_sole_owner(&self, page: PhysicalPage) -> bool {
        let owners = self.allocator.heap(page.heap).owners(page.index);
        owners.mappings == 1 && owners.pins == 0 && owners.lost == 0
    }

    /// Sets a page aside for good: it may still be mapped where no table says so.
    pub(crate) fn lose(&mut self, page: PhysicalPage) {
        self.change_owners(page, |owners| owners.lost += 1);
    }

    /// As [`Books::lose`], for a page that was only claimed.
    pub(crate) fn lose_claim(&mut self, claim: Claim) {
        self.allocator.note_committed(claim);
        self.lose(claim.page);
    }

    pub(crate) fn buffer_ledger(&self, buffer: BufferId) -> BufferLedger {
        let account = self.account(buffer);
        let bytes = |pages| self.page_size.bytes_of(PageCount::new(pages));
        BufferLedger {
            reserved: bytes(account.pages),
            mapped: bytes(account.mapped),
            shared: bytes(account.shared),
            unique: bytes(account.mapped - account.shared),
            regions: account.regions,
        }
    }

    pub(crate) fn ledger(&self, limit: Option<ByteLength>, region_limit: Option<u64>) -> Ledger {
        let bytes = |pages| self.page_size.bytes_of(PageCount::new(pages));
        let committed = bytes(self.allocator.committed());
        Ledger {
            reserved: bytes(self.reserved),
            committed,
            host_beside: bytes(self.allocator.committed_at(Location::Host)),
            mapped: bytes(self.mapped),
            shared: bytes(self.totals.shared),
            unique: bytes(self.totals.unique),
            pinned: bytes(self.totals.pinned),
            pinned_only: bytes(self.totals.pinned_only),
            idle: bytes(self.allocator.idle()),
            file: bytes(self.allocator.file()),
            retiring: bytes(self.retiring.len() as u64),
            lost: bytes(self.totals.lost),
            limit,
            owed: limit.map_or(ByteLength::ZERO, |limit| committed.saturating_sub(limit)),
            buffers: self.accounts.iter().flatten().count() as u64,
            heaps: self.allocator.heaps().count() as u64,
            regions: self.regions,
            region_limit,
            counts: self.counts,
        }
    }
}
