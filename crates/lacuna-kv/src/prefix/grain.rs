//! How many tokens and pages a group is. Pure.

use std::num::NonZeroUsize;

use lacuna_pages::PageSize;

use crate::layout::{Arrangement, Tiles};

/// The grain at which the rows of a sequence are shared and kept.
///
/// A group is the fewest tokens that fill a page of every buffer. Where rows straddle pages a group's
/// last rows end in the next group's first pages:
///
/// ```text
/// rows    | 0 | 1 | 2 | 3 | 4 | 5 | 6 |        group_tokens = 3
/// pages   |     0     |     1     |            groups 0 and 1 have pages 0 and 1:
///                                              with group 0 alone, rows 0 and 1 are whole
/// ```
#[derive(Debug, Clone)]
pub struct Grain {
    page_bytes: usize,
    group_tokens: NonZeroUsize,
    tiles: Vec<Tiles>,
}

impl Grain {
    pub(crate) fn new(arrangement: &Arrangement, page_size: PageSize) -> Self {
        let page_bytes = page_size.bytes() as usize;
        let buffers = arrangement.buffers().iter();
        let tiles: Vec<Tiles> = buffers.map(|held| held.tiles).collect();
        let fills = |tiles: &Tiles| page_bytes.div_ceil(tiles.bytes) * tiles.tokens;
        let group_tokens = tiles.iter().map(fills).max().and_then(NonZeroUsize::new);
        Self {
            page_bytes,
            group_tokens: group_tokens.unwrap_or(NonZeroUsize::MIN),
            tiles,
        }
    }

    /// Tokens of one group.
    #[must_use]
    pub fn group_tokens(&self) -> NonZeroUsize {
        self.group_tokens
    }

    /// Bytes of the pages that `tokens` rows touch, over all buffers.
    #[must_use]
    pub fn bytes(&self, tokens: usize) -> u64 {
        let touched = |tiles: &Tiles| {
            tiles
                .bytes_through(tokens)
                .next_multiple_of(self.page_bytes)
        };
        self.tiles.iter().map(touched).sum::<usize>() as u64
    }

    /// Rows that are whole in the pages of the first `groups` groups.
    #[must_use]
    pub fn whole_tokens(&self, groups: usize) -> usize {
        let tokens = groups * self.group_tokens.get();
        let whole = |tiles: &Tiles| {
            let bytes = tiles.bytes_before(tokens) / self.page_bytes * self.page_bytes;
            tiles.tokens_within(bytes)
        };
        self.tiles.iter().map(whole).min().unwrap_or(0).min(tokens)
    }
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;

    use super::*;
    use crate::elements::KvElements;
    use crate::geometry::Geometry;
    use crate::layout::Layout;

    fn grain(head_dim: usize, key: ElementType, value: ElementType) -> Grain {
        let geometry = Geometry::uniform(2, 1, head_dim, KvElements { key, value });
        let arrangement = Arrangement::new(&geometry, Layout::TokenMajor);
        Grain::new(&arrangement, PageSize::KIB_4)
    }

    #[test]
    fn rows_that_divide_a_page_leave_nothing_over() {
        let grain = grain(64, ElementType::F16, ElementType::F16);
        assert_eq!(grain.group_tokens().get(), 32);
        assert_eq!(grain.whole_tokens(3), 96);
        assert_eq!(grain.bytes(32), 4 * 4096);
        assert_eq!(grain.bytes(33), 8 * 4096);
    }

    #[test]
    fn the_wider_pages_decide_when_sides_differ() {
        let grain = grain(64, ElementType::F32, ElementType::F16);
        assert_eq!(
            grain.group_tokens().get(),
            32,
            "one page of values, two of keys"
        );
        assert_eq!(grain.bytes(32), 2 * (2 + 1) * 4096);
    }

    #[test]
    fn rows_across_pages_count_when_they_are_whole() {
        let grain = grain(96, ElementType::F32, ElementType::F32);
        assert_eq!(
            grain.group_tokens().get(),
            11,
            "384 bytes a row, 10.7 rows a page"
        );
        assert_eq!(grain.whole_tokens(1), 10);
        assert_eq!(grain.whole_tokens(2), 21, "two pages hold 21.3 rows");
    }
}
