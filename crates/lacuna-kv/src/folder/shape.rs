//! Which pages segments hold, worked out from the geometry. Pure.

use std::ops::Range;
use std::sync::Arc;

use lacuna_pages::PagePin;

use crate::geometry::Keep;
use crate::layout::{Arrangement, Tiles};
use crate::prefix::{Grain, PinnedPages, Pins};

/// Where the pages of groups and of resume points are in a sequence's buffers. They follow from how many groups are
/// before them, so a segment does not say them.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    page_bytes: u64,
    buffers: Vec<(Keep, Tiles)>,
    grain: Arc<Grain>,
}

impl Shape {
    /// Bytes of one buffer that a segment should have: whoever maps them needs a mapping for each, and reading them
    /// is as fast as reading more.
    const EXTENT: usize = 1 << 20;
    /// Where rows are so small that an extent of tokens would be too long to wait for.
    const LONGEST: usize = 1024;

    pub(crate) fn new(arrangement: &Arrangement, page_bytes: usize, grain: Arc<Grain>) -> Self {
        let buffers = arrangement.buffers().iter();
        Self {
            page_bytes: page_bytes as u64,
            buffers: buffers.map(|held| (held.rows.keep, held.tiles)).collect(),
            grain,
        }
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    pub(crate) fn group_tokens(&self) -> usize {
        self.grain.group_tokens().get()
    }

    pub(crate) fn has_resume_points(&self) -> bool {
        self.grain.has_resume_points()
    }

    /// Groups of a segment, but for the last of a sequence.
    pub(crate) fn segment_groups(&self) -> usize {
        let kept = self.buffers.iter().filter(|(keep, _)| *keep == Keep::All);
        let tokens = kept.map(|(_, tiles)| Self::EXTENT.div_ceil(tiles.bytes) * tiles.tokens);
        let tokens = tokens.max().unwrap_or(Self::LONGEST).min(Self::LONGEST);
        tokens.div_ceil(self.group_tokens())
    }

    fn page(&self, tiles: Tiles, row: usize) -> u64 {
        tiles.bytes_before(row) as u64 / self.page_bytes
    }

    /// Of every buffer, the pages of `groups`.
    fn rows(&self, groups: &Range<usize>) -> impl Iterator<Item = Range<u64>> {
        let tokens = self.group_tokens();
        let (start, end) = (groups.start * tokens, groups.end * tokens);
        self.buffers.iter().map(move |&(keep, tiles)| match keep {
            Keep::All => self.page(tiles, start)..self.page(tiles, end),
            Keep::Window(_) => 0..0,
        })
    }

    /// Of every buffer, the pages that going on after so many groups takes.
    fn windows(&self, groups: usize) -> impl Iterator<Item = Range<u64>> {
        let end = groups * self.group_tokens();
        let next = self.grain.whole_tokens(groups);
        self.buffers.iter().map(move |&(keep, tiles)| match keep {
            Keep::All => 0..0,
            Keep::Window(_) => self.page(tiles, keep.first_seen(next))..self.page(tiles, end),
        })
    }

    fn state_pages(&self) -> u64 {
        self.grain.state_bytes() / self.page_bytes
    }

    /// Bytes of the pages of `groups`.
    pub(crate) fn rows_bytes(&self, groups: &Range<usize>) -> u64 {
        let pages = self.rows(groups).map(|pages| pages.end - pages.start);
        pages.sum::<u64>() * self.page_bytes
    }

    /// Bytes of the resume point after so many groups.
    pub(crate) fn point_bytes(&self, groups: usize) -> u64 {
        let pages = self.windows(groups).map(|pages| pages.end - pages.start);
        (pages.sum::<u64>() + self.state_pages()) * self.page_bytes
    }

    /// The pages of `pins`, which are of consecutive groups, in the order of a segment.
    pub(crate) fn flatten(&self, pins: &[Pins]) -> Vec<PagePin> {
        let buffers = 0..self.buffers.len();
        let rows = buffers.flat_map(|buffer| {
            let groups = pins.iter().map(move |pins| pins.extent(buffer));
            groups.flat_map(|pages| pages.pins.iter().cloned())
        });
        let states = pins.iter().flat_map(|pins| pins.states().iter().cloned());
        rows.chain(states).collect()
    }

    /// Each of `groups` again, from the pages of a segment of them.
    pub(crate) fn groups_of(&self, groups: &Range<usize>, pages: Vec<PagePin>) -> Vec<Pins> {
        let mut extents: Vec<Vec<PinnedPages>> = groups.clone().map(|_| Vec::new()).collect();
        let each: Vec<Vec<Range<u64>>> = groups
            .clone()
            .map(|group| self.rows(&(group..group + 1)).collect())
            .collect();
        let mut pages = pages.into_iter();
        for buffer in 0..self.buffers.len() {
            for (extents, ranges) in extents.iter_mut().zip(&each) {
                extents.push(take(&mut pages, &ranges[buffer]));
            }
        }
        extents.into_iter().map(Pins::new).collect()
    }

    /// The resume point after `groups` again, from the pages of its segment.
    pub(crate) fn point_of(&self, groups: usize, pages: Vec<PagePin>) -> Pins {
        let mut pages = pages.into_iter();
        let windows = self.windows(groups).map(|range| take(&mut pages, &range));
        let windows = windows.collect();
        Pins::new(windows).with_states(pages.collect())
    }
}

fn take(pages: &mut impl Iterator<Item = PagePin>, range: &Range<u64>) -> PinnedPages {
    PinnedPages {
        first: range.start,
        pins: pages.take((range.end - range.start) as usize).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use lacuna_kernels::ElementType;

    use super::*;
    use crate::geometry::{Geometry, LayerCache, RowSpec, ValueRows};
    use crate::{KvCache, KvElements};

    fn rows(dim: usize, keep: Keep) -> LayerCache {
        LayerCache::Rows(RowSpec {
            kv_heads: 4,
            key_dim: dim,
            value_dim: dim,
            values: ValueRows::Apart,
            keep,
        })
    }

    fn segment_tokens(layers: Vec<LayerCache>, policy: &str) -> usize {
        let geometry = Geometry::new(layers, KvElements::both(ElementType::F32));
        let policy = policy.parse().expect("a policy");
        let cache = KvCache::new(geometry.expect("a model"), policy).expect("pages");
        let grain = Arc::new(cache.grain());
        let shape = Shape::new(cache.arrangement(), cache.page_bytes(), grain);
        shape.segment_groups() * shape.group_tokens()
    }

    #[test]
    fn segments_have_a_mebibyte_of_each_buffer_but_for_windows_and_rows_that_are_small() {
        let window = Keep::Window(NonZeroUsize::new(40).expect("not zero"));
        let large = || rows(256, Keep::All);
        // 4 heads of 256 numbers each.
        let mebibyte = (1 << 20) / (4 * 256 * 4);
        for (policy, of_buffer) in [
            ("sparse", mebibyte),
            // A buffer for each side, in which the tokens of a tile are together.
            ("sparse:head-major", mebibyte),
            // Keys and values are in one buffer.
            ("sparse:interleaved=2", mebibyte / 2),
        ] {
            let tokens = segment_tokens(vec![large(); 2], policy);
            assert_eq!(tokens, of_buffer, "{policy}");
        }
        // Its rows are smaller, and it does not count.
        assert_eq!(
            segment_tokens(vec![large(), rows(16, window)], "sparse"),
            mebibyte
        );
        // A mebibyte of these would be 4,096 tokens.
        assert_eq!(segment_tokens(vec![rows(16, Keep::All)], "sparse"), 1024);
        assert_eq!(
            segment_tokens(vec![large(), rows(128, Keep::All)], "sparse"),
            512
        );
    }
}
