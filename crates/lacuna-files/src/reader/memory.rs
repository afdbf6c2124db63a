//! Memory that files are read into: anonymous, aligned, and lent in ranges of which each has one owner.
//!
//! # Safety
//!
//! * **B1** A region's memory is mapped, readable and writable, from before its first buffer until after its
//!   last: every buffer keeps the region.
//! * **B2** Ranges of live buffers of a region do not overlap: [`Books::take`] gives out only what no
//!   buffer has, [`Buffer::split_off`] divides one range in two, [`Buffer::join`] makes one of two, and a
//!   range is free again only when its buffer is dropped.
//! * **B3** So a `&mut Buffer` is the only way to its bytes. Every bit pattern is a byte, and fresh pages are
//!   zeros.

#![expect(
    unsafe_code,
    reason = "ranges of one mapping that have owners of their own are what the compiler cannot check here"
)]

use std::collections::VecDeque;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapMut, MmapRaw};

/// What buffers start and end at multiples of: reads that go past the page cache need it of memory, offset and
/// length. No disk in use asks for more than a page.
pub(crate) const ALIGNMENT: usize = 4096;

/// A huge page of x86-64, and of 64-bit ARM with pages of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

/// Memory that buffers are lent from in turn, the first that comes back first.
///
/// ```
/// use lacuna_files::reader::Ring;
///
/// let ring = Ring::new(8192)?;
/// let first = ring.take(4096).expect("there is room");
/// let second = ring.take(4096).expect("there still is");
/// assert!(ring.take(1).is_none());
/// drop(first);
/// assert_eq!(ring.take(100).expect("it came back").len(), 4096);
/// # drop(second);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Ring(Arc<Region>);

impl Ring {
    /// A ring of `bytes`, which the system gives as they are written.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(bytes: usize) -> io::Result<Self> {
        Region::new(bytes).map(Arc::new).map(Self)
    }

    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        self.0.length
    }

    /// A buffer of `bytes`, rounded up to whole pages, if there is room behind the last one that was lent.
    pub fn take(&self, bytes: usize) -> Option<Buffer> {
        let length = bytes.max(1).next_multiple_of(ALIGNMENT);
        let range = self.0.books().take(length)?;
        Some(Buffer {
            region: Arc::clone(&self.0),
            range,
        })
    }
}

/// Bytes with one owner, in whole pages.
#[derive(Debug)]
pub struct Buffer {
    region: Arc<Region>,
    range: Range<usize>,
}

impl Buffer {
    /// A buffer of its own, of `bytes` rounded up to whole pages. The memory goes back to the system with it.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let ring = Ring::new(bytes)?;
        let buffer = ring.take(bytes);
        buffer.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// What lies from `at` on, as a buffer of its own.
    ///
    /// # Panics
    /// When `at` is beyond the end.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.range.len(), "a part of the buffer");
        let middle = self.range.start + at;
        let end = std::mem::replace(&mut self.range.end, middle);
        Self {
            region: Arc::clone(&self.region),
            range: middle..end,
        }
    }

    /// Takes back what was split off.
    ///
    /// # Panics
    /// When `next` does not lie behind this.
    pub(crate) fn join(&mut self, mut next: Self) {
        let follows = Arc::ptr_eq(&self.region, &next.region) && self.range.end == next.range.start;
        assert!(follows, "parts are joined in order");
        self.range.end = next.range.end;
        // Nothing of it is free again.
        next.range.start = next.range.end;
    }

    /// Where it begins.
    pub(crate) fn address(&self) -> *mut u8 {
        // SAFETY: (B1), and the range lies inside the region by (B2).
        unsafe { self.region.base().add(self.range.start) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: (B1) and (B3): the bytes are there, and nobody writes them while they are borrowed.
        unsafe { std::slice::from_raw_parts(self.address(), self.range.len()) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else reads them by (B3).
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.range.len()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.region.books().give_back(&self.range);
    }
}

/// One anonymous mapping.
#[derive(Debug)]
struct Region {
    map: MmapRaw,
    /// Of the mapping, what lies before the first byte in use.
    start: usize,
    length: usize,
    books: Mutex<Books>,
}

impl Region {
    fn new(bytes: usize) -> io::Result<Self> {
        let length = bytes.max(1).next_multiple_of(ALIGNMENT);
        // Room to begin at a huge page, where there is one in it. What is never written takes no memory.
        let spare = if length >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        let mapped = length.checked_add(spare);
        let map = MmapMut::map_anon(mapped.ok_or(io::ErrorKind::OutOfMemory)?)?;
        let start = map.as_ptr().align_offset(HUGE_PAGE).min(spare);
        huge_pages(&map, start..start + length);
        Ok(Self {
            map: MmapRaw::from(map),
            start,
            length,
            books: Mutex::new(Books::new(length)),
        })
    }

    fn base(&self) -> *mut u8 {
        // SAFETY: (B1): `start` lies inside the mapping.
        unsafe { self.map.as_mut_ptr().add(self.start) }
    }

    fn books(&self) -> std::sync::MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks for huge pages for as much of `range` as whole ones hold, and for none around it: where the system
/// gives them unasked, what is beyond the range would be memory too.
fn huge_pages(map: &MmapMut, range: Range<usize>) {
    #[cfg(target_os = "linux")]
    {
        let whole = range.len() / HUGE_PAGE * HUGE_PAGE;
        let end = range.start + whole;
        // A kernel without them needs no advice.
        if whole > 0 {
            map.advise_range(memmap2::Advice::HugePage, range.start, whole)
                .ok();
        }
        if end < map.len() {
            let rest = map.len() - end;
            map.advise_range(memmap2::Advice::NoHugePage, end, rest)
                .ok();
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (map, range);
}

/// Which ranges are lent, in the order in which they were taken.
#[derive(Debug)]
struct Books {
    length: usize,
    lent: VecDeque<Lent>,
}

#[derive(Debug)]
struct Lent {
    range: Range<usize>,
    /// Bytes of it that have come back.
    returned: usize,
}

impl Books {
    fn new(length: usize) -> Self {
        Self {
            length,
            lent: VecDeque::new(),
        }
    }

    /// Free bytes behind the last range that was lent, or from the beginning on.
    fn take(&mut self, length: usize) -> Option<Range<usize>> {
        let start = match (self.lent.front(), self.lent.back()) {
            (Some(first), Some(last)) => {
                let (free, next) = (first.range.start, last.range.end);
                if next > free {
                    match () {
                        () if length <= self.length - next => next,
                        () if length <= free => 0,
                        () => return None,
                    }
                } else if length <= free - next {
                    next
                } else {
                    return None;
                }
            }
            _ if length <= self.length => 0,
            _ => return None,
        };
        let range = start..start + length;
        self.lent.push_back(Lent {
            range: range.clone(),
            returned: 0,
        });
        Some(range)
    }

    fn give_back(&mut self, range: &Range<usize>) {
        if range.is_empty() {
            return;
        }
        let mut lent = self.lent.iter_mut();
        let of = lent.find(|lent| lent.range.start <= range.start && range.end <= lent.range.end);
        if let Some(of) = of {
            of.returned += range.len();
        }
        while let Some(first) = self.lent.front() {
            if first.returned < first.range.len() {
                break;
            }
            self.lent.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_of_a_buffer_are_written_apart_and_joined() {
        let mut whole = Buffer::new(3 * ALIGNMENT).unwrap();
        let mut rest = whole.split_off(ALIGNMENT);
        let last = rest.split_off(ALIGNMENT);
        whole.fill(1);
        rest.fill(2);
        assert!(last.iter().all(|&byte| byte == 0), "fresh pages are zeros");
        rest.join(last);
        whole.join(rest);
        assert_eq!(whole.len(), 3 * ALIGNMENT);
        assert_eq!([0, ALIGNMENT, 2 * ALIGNMENT].map(|at| whole[at]), [1, 2, 0]);
    }

    #[test]
    fn a_range_is_free_again_when_all_parts_of_it_have_come_back() {
        let ring = Ring::new(2 * ALIGNMENT).unwrap();
        let mut whole = ring.take(2 * ALIGNMENT).unwrap();
        let rest = whole.split_off(ALIGNMENT);
        drop(whole);
        assert!(ring.take(1).is_none(), "a part is still lent");
        drop(rest);
        assert!(ring.take(2 * ALIGNMENT).is_some());
    }

    proptest! {
        /// Buffers that are taken and dropped in any order never share a byte, and in the end all is free.
        #[test]
        fn no_two_buffers_share_a_byte(steps in proptest::collection::vec((1usize..4, any::<u8>()), 1..60)) {
            let ring = Ring::new(6 * ALIGNMENT).unwrap();
            let mut live: Vec<(u8, Buffer)> = Vec::new();
            for (mark, (pages, drop_at)) in (1u8..).zip(steps) {
                match ring.take(pages * ALIGNMENT) {
                    Some(mut buffer) => {
                        buffer.fill(mark);
                        live.push((mark, buffer));
                    }
                    None if live.is_empty() => prop_assert!(false, "an empty ring has room"),
                    None => drop(live.remove(usize::from(drop_at) % live.len())),
                }
                for (mark, buffer) in &live {
                    prop_assert!(buffer.iter().all(|byte| byte == mark));
                }
            }
            drop(live);
            prop_assert!(ring.take(6 * ALIGNMENT).is_some());
        }
    }
}
