//! Units: byte lengths, byte ranges, page sizes, page counts and page names.
//!
//! Bytes and pages never mix without a [`PageSize`]; a virtual page is a place in one buffer, a
//! physical page is memory in one heap. Arithmetic that could overflow is checked where it
//! happens, so a length read from a file cannot wrap.

use std::fmt;
use std::ops::Range;

use crate::Error;
use crate::device::HeapId;

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteLength(u64);

impl ByteLength {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// `bytes` bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// `count` times 1,024 bytes, saturating.
    pub const fn kibibytes(count: u64) -> Self {
        Self(count.saturating_mul(1 << 10))
    }

    /// `count` times 1,048,576 bytes, saturating.
    pub const fn mebibytes(count: u64) -> Self {
        Self(count.saturating_mul(1 << 20))
    }

    /// `count` times 1,073,741,824 bytes, saturating.
    pub const fn gibibytes(count: u64) -> Self {
        Self(count.saturating_mul(1 << 30))
    }

    /// The number of bytes as an integer.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// `self + other`, or `None` past 2^64 - 1.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// `self - other`, or zero.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for ByteLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, bytes) in [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
            if self.0 >= bytes && self.0.is_multiple_of(bytes) {
                return write!(f, "{} {unit}", self.0 / bytes);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

/// A half-open range of byte offsets in a buffer; empty when `start >= end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// First byte of the range.
    pub start: u64,
    /// One past its last byte.
    pub end: u64,
}

impl ByteRange {
    /// The bytes from `start` to before `end`.
    pub const fn new(start: u64, end: u64) -> Self {
        Self { start, end }
    }

    /// The number of bytes in the range.
    pub const fn length(self) -> ByteLength {
        ByteLength(self.end.saturating_sub(self.start))
    }

    /// Whether the range holds no byte.
    pub const fn is_empty(self) -> bool {
        self.start >= self.end
    }
}

impl From<Range<usize>> for ByteRange {
    fn from(range: Range<usize>) -> Self {
        Self {
            start: range.start as u64,
            end: range.end as u64,
        }
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// The size of a page: the unit of commit, sharing and giving back. A power of two of at least
/// 4 KiB and at most 1 GiB; a device says which of them it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSize {
    shift: u8,
}

impl PageSize {
    const SMALLEST_SHIFT: u8 = 12;
    const LARGEST_SHIFT: u8 = 30;

    /// 4 KiB.
    pub const KIB_4: Self = Self { shift: 12 };
    /// 16 KiB.
    pub const KIB_16: Self = Self { shift: 14 };
    /// 64 KiB, the default.
    pub const KIB_64: Self = Self { shift: 16 };
    /// 256 KiB.
    pub const KIB_256: Self = Self { shift: 18 };
    /// 2 MiB.
    pub const MIB_2: Self = Self { shift: 21 };

    /// A page of `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::PageSize`] when `bytes` is not a power of two from 4 KiB to 1 GiB.
    pub const fn new(bytes: u64) -> Result<Self, Error> {
        let shift = bytes.trailing_zeros() as u8;
        if !bytes.is_power_of_two() || shift < Self::SMALLEST_SHIFT || shift > Self::LARGEST_SHIFT {
            return Err(Error::PageSize { bytes });
        }
        Ok(Self { shift })
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.shift
    }

    /// The size as a length.
    pub const fn length(self) -> ByteLength {
        ByteLength(self.bytes())
    }

    /// Every page size from `smallest` to `largest`, both included.
    pub fn all_between(smallest: Self, largest: Self) -> Vec<Self> {
        (smallest.shift..=largest.shift)
            .map(|shift| Self { shift })
            .collect()
    }

    /// The pages that `length` bytes need, the last one perhaps only partly filled.
    pub const fn pages_for(self, length: ByteLength) -> PageCount {
        PageCount(length.0.div_ceil(self.bytes()))
    }

    /// The bytes of `count` pages, saturating.
    pub const fn bytes_of(self, count: PageCount) -> ByteLength {
        ByteLength(count.0.saturating_mul(self.bytes()))
    }

    /// Every page that `range` touches, partly or wholly.
    pub const fn pages_touching(self, range: ByteRange) -> PageRange {
        if range.is_empty() {
            return PageRange {
                start: VirtualPage(0),
                end: VirtualPage(0),
            };
        }
        let end = range.end.div_ceil(self.bytes());
        PageRange {
            start: VirtualPage(range.start >> self.shift),
            end: VirtualPage(end),
        }
    }

    /// The pages that `range` covers from their first byte to their last: what may be sealed and
    /// shared when `range` holds the finished rows.
    pub const fn pages_within(self, range: ByteRange) -> PageRange {
        let start = range.start.div_ceil(self.bytes());
        let end = range.end >> self.shift;
        PageRange {
            start: VirtualPage(start),
            end: VirtualPage(start + end.saturating_sub(start)),
        }
    }

    pub(crate) const fn offset_of(self, page: VirtualPage) -> u64 {
        page.0 << self.shift
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.length().fmt(f)
    }
}

/// A number of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageCount(u64);

impl PageCount {
    /// No page.
    pub const ZERO: Self = Self(0);

    /// `count` pages.
    pub const fn new(count: u64) -> Self {
        Self(count)
    }

    /// The number as an integer.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for PageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}",
            self.0,
            if self.0 == 1 { "page" } else { "pages" }
        )
    }
}

/// A page of a buffer's address space, counted from the buffer's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtualPage(u64);

impl VirtualPage {
    /// The page number `index` of a buffer.
    pub const fn new(index: u64) -> Self {
        Self(index)
    }

    /// Its number, from zero.
    pub const fn index(self) -> u64 {
        self.0
    }
}

impl fmt::Display for VirtualPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "virtual page {}", self.0)
    }
}

/// A half-open range of a buffer's virtual pages; empty when `start >= end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageRange {
    /// First page of the range.
    pub start: VirtualPage,
    /// One past its last page.
    pub end: VirtualPage,
}

impl PageRange {
    /// The pages numbered `indices`.
    pub const fn of(indices: Range<u64>) -> Self {
        Self {
            start: VirtualPage(indices.start),
            end: VirtualPage(indices.end),
        }
    }

    /// Just `page`.
    pub const fn one(page: VirtualPage) -> Self {
        Self {
            start: page,
            end: VirtualPage(page.0.saturating_add(1)),
        }
    }

    /// How many pages it names.
    pub const fn count(self) -> PageCount {
        PageCount(self.end.0.saturating_sub(self.start.0))
    }

    /// Whether it names no page.
    pub const fn is_empty(self) -> bool {
        self.start.0 >= self.end.0
    }

    /// Its pages in order.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = VirtualPage> {
        (self.start.0..self.end.0).map(VirtualPage)
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "virtual pages {}..{}", self.start.0, self.end.0)
    }
}

/// One page of physical memory: its heap and its place there, counted in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PhysicalPage {
    pub(crate) heap: HeapId,
    pub(crate) index: u32,
}

impl PhysicalPage {
    /// The page right after this one in the same heap, whether or not the heap reaches that far.
    pub(crate) fn next(self) -> Option<Self> {
        Some(Self {
            heap: self.heap,
            index: self.index.checked_add(1)?,
        })
    }
}

impl fmt::Display for PhysicalPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {} of heap {}", self.index, self.heap.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_size_is_a_power_of_two_in_bounds() {
        for bytes in [0, 1, 4095, 4097, 65_535, 1 << 31, u64::MAX] {
            assert!(
                matches!(PageSize::new(bytes), Err(Error::PageSize { .. })),
                "{bytes}"
            );
        }
        assert_eq!(PageSize::new(65_536).unwrap(), PageSize::KIB_64);
        assert_eq!(
            PageSize::all_between(PageSize::KIB_4, PageSize::KIB_64).len(),
            5
        );
    }

    #[test]
    fn a_page_size_has_a_smallest_and_a_largest() {
        assert_eq!(PageSize::new(4096), Ok(PageSize::KIB_4));
        assert_eq!(PageSize::new(1 << 30).map(PageSize::bytes), Ok(1 << 30));
        assert!(PageSize::new(2048).is_err());
        let names = [
            PageSize::KIB_4,
            PageSize::KIB_16,
            PageSize::KIB_256,
            PageSize::MIB_2,
        ];
        assert_eq!(
            names.map(PageSize::bytes),
            [4 << 10, 16 << 10, 256 << 10, 2 << 20]
        );
    }

    #[test]
    fn lengths_add_up_without_wrapping() {
        let (most, one) = (ByteLength::new(u64::MAX), ByteLength::new(1));
        assert_eq!(most.checked_add(one), None);
        assert_eq!(one.checked_add(one), Some(ByteLength::new(2)));
        assert_eq!(one.saturating_sub(most), ByteLength::ZERO);
        assert_eq!(most.saturating_sub(one).get(), u64::MAX - 1);
        for units in [
            ByteLength::kibibytes,
            ByteLength::mebibytes,
            ByteLength::gibibytes,
        ] {
            assert_eq!(units(u64::MAX), most);
        }
        let lengths = [
            ByteLength::kibibytes(3),
            ByteLength::mebibytes(3),
            ByteLength::gibibytes(3),
        ];
        assert_eq!(lengths.map(ByteLength::get), [3 << 10, 3 << 20, 3 << 30]);
        let size = PageSize::KIB_4;
        assert_eq!(size.pages_for(ByteLength::new(4097)), PageCount::new(2));
        assert_eq!(size.bytes_of(PageCount::new(3)).get(), 3 * 4096);
        assert_eq!(size.bytes_of(PageCount::new(u64::MAX)), most);
    }

    #[test]
    fn ranges_count_what_they_name() {
        let bytes = ByteRange::from(3..10);
        assert_eq!((bytes.length().get(), bytes.is_empty()), (7, false));
        assert!(ByteRange::new(3, 3).is_empty() && ByteRange::new(4, 3).is_empty());
        assert_eq!(ByteRange::new(4, 3).length(), ByteLength::ZERO);
        let pages = PageRange::of(2..5);
        assert_eq!(
            (pages.count(), pages.is_empty()),
            (PageCount::new(3), false)
        );
        let (start, end) = (VirtualPage::new(6), VirtualPage::new(5));
        assert!(PageRange::of(5..5).is_empty() && PageRange { start, end }.is_empty());
        let indices: Vec<u64> = pages.iter().map(VirtualPage::index).collect();
        assert_eq!(indices, [2, 3, 4]);
        assert_eq!(PageRange::one(VirtualPage::new(7)), PageRange::of(7..8));
        assert!(PageRange::one(VirtualPage::new(u64::MAX)).is_empty());
        assert_eq!(PageSize::KIB_16.offset_of(VirtualPage::new(3)), 3 << 14);
        let page = |index| PhysicalPage {
            heap: HeapId(2),
            index,
        };
        assert_eq!(page(4).next(), Some(page(5)));
        assert_eq!(page(u32::MAX).next(), None);
    }

    #[test]
    fn everything_is_called_what_it_is() {
        assert_eq!(ByteRange::new(3, 10).to_string(), "3..10");
        let counts = [0, 1, 2].map(|count| PageCount::new(count).to_string());
        assert_eq!(counts, ["0 pages", "1 page", "2 pages"]);
        assert_eq!(VirtualPage::new(7).to_string(), "virtual page 7");
        assert_eq!(PageRange::of(2..5).to_string(), "virtual pages 2..5");
        let page = PhysicalPage {
            heap: HeapId(2),
            index: 4,
        };
        assert_eq!(page.to_string(), "page 4 of heap 2");
        assert_eq!(ByteLength::kibibytes(3).to_string(), "3 KiB");
        assert_eq!(ByteLength::gibibytes(2).to_string(), "2 GiB");
        assert_eq!(ByteLength::ZERO.to_string(), "0 bytes");
    }

    #[test]
    fn touching_rounds_outwards_and_within_rounds_inwards() {
        let size = PageSize::KIB_4;
        let range = ByteRange::new(4_000, 12_300);
        assert_eq!(size.pages_touching(range), PageRange::of(0..4));
        assert_eq!(size.pages_within(range), PageRange::of(1..3));
        assert!(size.pages_within(ByteRange::new(1, 4_095)).is_empty());
        assert!(size.pages_touching(ByteRange::new(5, 5)).is_empty());
    }

    #[test]
    fn lengths_print_in_the_largest_whole_unit() {
        assert_eq!(ByteLength::mebibytes(64).to_string(), "64 MiB");
        assert_eq!(ByteLength::new(1_025).to_string(), "1025 bytes");
        assert_eq!(PageSize::KIB_64.to_string(), "64 KiB");
    }
}
