//! How many tokens and pages a group is, and where sequences with windows or states can be resumed. Pure.

use std::num::NonZeroUsize;

use lacuna_pages::PageSize;

use crate::geometry::Keep;
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
///
/// Of layers with a window no page belongs to a group, and none of states. A sequence can start after `n`
/// groups where those pages are kept of which the next token sees a row, and those of the states after
/// exactly the rows that are whole: a *resume point*.
#[derive(Debug, Clone)]
pub struct Grain {
    page_bytes: usize,
    group_tokens: NonZeroUsize,
    /// Of the buffers that keep all rows.
    kept: Vec<Tiles>,
    windows: Vec<(NonZeroUsize, Tiles)>,
    /// Of a sequence's states, in whole pages.
    state_bytes: usize,
}

impl Grain {
    /// Tokens of a group where no layer keeps rows, and so nothing but hashing speaks for long ones or
    /// against short ones: about those of a page of rows.
    const TOKENS_WITHOUT_ROWS: NonZeroUsize = NonZeroUsize::new(32).expect("not zero");
    /// Tokens from one resume point to the next where states are all there is, and so there are no rows
    /// whose bytes to compare theirs with. Copying a state costs about what computing a token does, and
    /// what is between two of them is what leaving a kept prompt may cost.
    const RESUME_TOKENS_WITHOUT_ROWS: usize = 2048;
    /// A sequence that generates keeps a resume point behind it no further back than this: what the next
    /// turn recomputes of the answer. Moving it costs a state's copy, about a token's time.
    const TRAILING_TOKENS: usize = 64;

    pub(crate) fn new(arrangement: &Arrangement, page_size: PageSize) -> Self {
        let page_bytes = page_size.bytes() as usize;
        let (mut kept, mut windows) = (Vec::new(), Vec::new());
        for held in arrangement.buffers() {
            match held.rows.keep {
                Keep::All => kept.push(held.tiles),
                Keep::Window(window) => windows.push((window, held.tiles)),
            }
        }
        let fills = |tiles: &Tiles| page_bytes.div_ceil(tiles.bytes) * tiles.tokens;
        let buffers = arrangement.buffers().iter();
        let group_tokens = buffers.map(|held| fills(&held.tiles)).max();
        Self {
            page_bytes,
            group_tokens: group_tokens
                .and_then(NonZeroUsize::new)
                .unwrap_or(Self::TOKENS_WITHOUT_ROWS),
            kept,
            windows,
            state_bytes: arrangement.geometry().state_bytes_in_pages(page_bytes),
        }
    }

    /// Bytes of the pages of a sequence's states, once it has a token.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        self.state_bytes as u64
    }

    /// Tokens of one group.
    #[must_use]
    pub fn group_tokens(&self) -> NonZeroUsize {
        self.group_tokens
    }

    fn pages(&self, bytes: usize) -> usize {
        bytes.next_multiple_of(self.page_bytes)
    }

    /// Bytes of the pages that `tokens` rows touch, over all buffers that keep all rows.
    fn kept_bytes(&self, tokens: usize) -> usize {
        let touched = |tiles: &Tiles| self.pages(tiles.bytes_through(tokens));
        self.kept.iter().map(touched).sum()
    }

    /// Buffers of one sequence.
    #[must_use]
    pub fn buffers(&self) -> usize {
        self.kept.len() + self.windows.len()
    }

    /// Bytes of the pages of one group: what keeping it costs.
    #[must_use]
    pub fn group_bytes(&self) -> u64 {
        self.kept_bytes(self.group_tokens.get()) as u64
    }

    /// The most bytes of pages that `rows` rows take in a window, so many more of which are there
    /// during a step: the window passes them after it.
    fn window_bytes(&self, window: NonZeroUsize, tiles: Tiles, rows: usize, step: usize) -> usize {
        // Rows since the last resume point, which a group behind ends in some buffers, are kept beside
        // the window; a page that is not passed yet may come before them.
        let most = window.get() + 2 * self.group_tokens.get() + step;
        let most = self.pages(tiles.bytes_through(most)) + self.page_bytes;
        self.pages(tiles.bytes_through(rows)).min(most)
    }

    fn windows_bytes(&self, rows: usize, step: usize) -> usize {
        let windows = self.windows.iter();
        windows
            .map(|&(window, tiles)| self.window_bytes(window, tiles, rows, step))
            .sum()
    }

    /// The most bytes of the pages that a sequence of `tokens` tokens has between steps; exactly
    /// those of its states and those that its rows touch where no layer has a window. Never less for more tokens.
    #[must_use]
    pub fn bytes(&self, tokens: usize) -> u64 {
        self.peak_bytes(tokens, 0)
    }

    /// As [`Grain::bytes`], during steps of up to `step` tokens.
    #[must_use]
    pub fn peak_bytes(&self, tokens: usize, step: usize) -> u64 {
        let states = if tokens > 0 { self.state_bytes } else { 0 };
        (self.kept_bytes(tokens) + self.windows_bytes(tokens, step) + states) as u64
    }

    /// The most bytes of pages that a sequence has beyond the rows of its first `from` tokens, which it
    /// shares, on its way to `tokens` in steps of up to `step`.
    #[must_use]
    pub fn new_bytes(&self, from: usize, tokens: usize, step: usize) -> u64 {
        let kept = self
            .kept_bytes(tokens)
            .saturating_sub(self.kept_bytes(from));
        let rows = tokens.saturating_sub(from);
        let states = if rows > 0 { self.state_bytes } else { 0 };
        (kept + self.windows_bytes(rows, step) + states) as u64
    }

    /// Whether some layer has a window.
    #[must_use]
    pub fn has_windows(&self) -> bool {
        !self.windows.is_empty()
    }

    /// Whether some layer keeps a state.
    #[must_use]
    pub fn has_states(&self) -> bool {
        self.state_bytes > 0
    }

    /// Whether a sequence can start at resume points only, for windows or states.
    #[must_use]
    pub fn has_resume_points(&self) -> bool {
        self.has_windows() || self.has_states()
    }

    /// The most bytes of the pages that a resume point keeps.
    #[must_use]
    pub fn resume_bytes(&self) -> u64 {
        let windows = self.windows.iter();
        let kept = windows.map(|&(window, tiles)| {
            self.pages(tiles.bytes_through(window.get() - 1)) + self.page_bytes
        });
        (kept.sum::<usize>() + self.state_bytes) as u64
    }

    /// Every so many groups of a sequence end in a resume point.
    ///
    /// Where a prompt leaves what is kept, everything since the last resume point is computed again,
    /// so they should be close; and each keeps its windows' pages and its states'. At this distance those cost
    /// as much as the rows that are kept of all tokens, so resume points at most double what a sequence leaves
    /// behind. Where windows are all there is, a resume point's length of them; where states are, 2,048
    /// tokens.
    #[must_use]
    pub fn resume_every(&self) -> NonZeroUsize {
        let window = self.windows.iter().map(|(window, _)| window.get()).max();
        let groups = match self.group_bytes() {
            0 => window
                .unwrap_or(Self::RESUME_TOKENS_WITHOUT_ROWS)
                .div_ceil(self.group_tokens.get()),
            group_bytes => self.resume_bytes().div_ceil(group_bytes) as usize,
        };
        NonZeroUsize::new(groups).unwrap_or(NonZeroUsize::MIN)
    }

    /// Every so many groups a sequence that generates moves the resume point behind it.
    pub(crate) fn trailing_every(&self) -> NonZeroUsize {
        let groups = Self::TRAILING_TOKENS.div_ceil(self.group_tokens.get());
        NonZeroUsize::new(groups).unwrap_or(NonZeroUsize::MIN)
    }

    /// After how many groups a sequence of `tokens` tokens would go on, were they there; `None` between
    /// such positions.
    pub(crate) fn groups_whole_at(&self, tokens: usize) -> Option<usize> {
        // Less than a page of rows is not whole, which is a group at most.
        let first = tokens.div_ceil(self.group_tokens.get()).max(1);
        (first..=first + 1).find(|&groups| self.whole_tokens(groups) == tokens)
    }

    /// The position at which a sequence that has the first `groups` groups goes on: rows that are
    /// whole in their pages.
    #[must_use]
    pub fn whole_tokens(&self, groups: usize) -> usize {
        let tokens = groups * self.group_tokens.get();
        let whole = |tiles: &Tiles| {
            let bytes = tiles.bytes_before(tokens) / self.page_bytes * self.page_bytes;
            tiles.tokens_within(bytes)
        };
        let windows = self.windows.iter().map(|(_, tiles)| tiles);
        let buffers = self.kept.iter().chain(windows);
        buffers.map(whole).min().unwrap_or(tokens).min(tokens)
    }

    /// The last position at or before `tokens` at which another sequence could go on.
    pub(crate) fn resume_position(&self, tokens: usize) -> usize {
        self.whole_tokens(tokens / self.group_tokens)
    }
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;

    use super::*;
    use crate::elements::KvElements;
    use crate::geometry::{Geometry, LayerCache, RowSpec, ValueRows};
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

    /// Rows of 512 bytes on each side, eight a page, and states of ten pages and a bit.
    #[test]
    fn states_are_counted_once_for_each_sequence_and_for_each_resume_point() {
        let geometry = Geometry::uniform(1, 1, 256, KvElements::both(ElementType::F16));
        let grain = |geometry: Geometry| {
            let arrangement = Arrangement::new(&geometry, Layout::TokenMajor);
            Grain::new(&arrangement, PageSize::KIB_4)
        };
        let page = 4096;
        let states = grain(geometry.with_states(vec![10 * 1024 + 5]).expect("states"));
        assert_eq!(states.state_bytes(), 11 * page);
        assert_eq!((states.bytes(0), states.new_bytes(8, 8, 4)), (0, 0));
        assert_eq!(states.bytes(1), (2 + 11) * page);
        assert_eq!(states.peak_bytes(9, 4), (4 + 11) * page);
        assert_eq!(states.new_bytes(8, 9, 4), (2 + 11) * page);
        assert_eq!(states.resume_bytes(), 11 * page);
        assert_eq!(states.resume_every().get(), 6, "of two pages each");
        assert_eq!(states.trailing_every().get(), 8, "of eight tokens each");
        assert!(states.has_resume_points() && !states.has_windows());
        let layers = Geometry::new(vec![LayerCache::None], KvElements::both(ElementType::F16));
        let alone = layers.expect("layers").with_states(vec![5]);
        let alone = grain(alone.expect("states"));
        assert_eq!(alone.group_tokens().get(), 32);
        assert_eq!(alone.resume_every().get() * 32, 2048);
        assert_eq!((alone.bytes(1), alone.bytes(5000)), (page, page));
        assert_eq!(alone.whole_tokens(7), 7 * 32);
    }

    /// Rows of every width, and tiles of 16 of them, some of which end just behind a page.
    #[test]
    fn the_groups_that_are_whole_at_a_position_are_the_fewest_that_end_there() {
        for layout in [Layout::TokenMajor, Layout::HeadMajor] {
            for head_dim in (4..200).step_by(4) {
                let elements = KvElements::both(ElementType::F32);
                let geometry = Geometry::uniform(1, 1, head_dim, elements);
                let grain = Grain::new(&Arrangement::new(&geometry, layout), PageSize::KIB_4);
                let group = grain.group_tokens().get();
                for tokens in 1..4 * group {
                    let fewest = (1..8).find(|&groups| grain.whole_tokens(groups) == tokens);
                    let found = grain.groups_whole_at(tokens);
                    assert_eq!(found, fewest, "{tokens} of {group}, {head_dim} elements");
                }
            }
        }
    }

    /// One full layer in four, windows of 512 rows, all of 512 bytes: eight rows a page.
    #[test]
    fn resume_points_cost_no_more_than_the_rows_that_are_kept_for_good() {
        let rows = |keep| {
            LayerCache::Rows(RowSpec {
                kv_heads: 1,
                key_dim: 256,
                value_dim: 256,
                values: ValueRows::Apart,
                keep,
            })
        };
        let window = |rows| Keep::Window(NonZeroUsize::new(rows).expect("not zero"));
        let grain = |layers: Vec<LayerCache>| {
            let geometry = Geometry::new(layers, KvElements::both(ElementType::F16));
            let geometry = geometry.expect("a model");
            Grain::new(
                &Arrangement::new(&geometry, Layout::TokenMajor),
                PageSize::KIB_4,
            )
        };
        let mixed = grain([[rows(window(512)); 3].to_vec(), vec![rows(Keep::All)]].concat());
        assert_eq!(mixed.group_tokens().get(), 8);
        assert_eq!(mixed.group_bytes(), 2 * 4096, "of the full layer alone");
        assert_eq!(mixed.buffers(), 8);
        assert_eq!(mixed.resume_bytes(), 3 * 2 * (64 + 1) * 4096);
        assert_eq!(mixed.resume_every().get(), 3 * 65);
        assert_eq!(mixed.bytes(100), 4 * 2 * 13 * 4096, "no window is full");
        // 512 rows and those of two groups, and a page that they begin in.
        let windows = mixed.bytes(50_000) - 2 * 50_000 * 512;
        assert_eq!(windows, 3 * 2 * (64 + 2 + 1) * 4096);
        let full = mixed.bytes(100_000) - mixed.bytes(50_000);
        assert_eq!(full, 2 * 50_000 * 512, "windows are flat");
        let step = mixed.peak_bytes(50_000, 16) - mixed.bytes(50_000);
        assert_eq!(step, 3 * 2 * 2 * 4096, "two pages of each window");
        assert_eq!(
            mixed.peak_bytes(100, 64),
            mixed.bytes(100),
            "all rows are there"
        );
        let new = mixed.new_bytes(1600, 1608, 16);
        assert_eq!(new, 2 * 4096 + 3 * 2 * 4096, "what is shared is none's own");
        // 504 rows before the next, and 505 and 16 more: each page counts that has one of them.
        let uneven = grain(vec![rows(window(505))]);
        assert_eq!(uneven.resume_bytes(), 2 * (63 + 1) * 4096);
        assert_eq!(uneven.bytes(50_000), 2 * (66 + 1) * 4096);
        let windows = grain(vec![rows(window(512)); 2]);
        assert_eq!(
            (windows.group_bytes(), windows.resume_every().get()),
            (0, 64)
        );
        let full = grain(vec![rows(Keep::All)]);
        assert!(!full.has_windows());
        assert_eq!(full.group_bytes(), full.bytes(8));
        assert_eq!(full.peak_bytes(100, 16), full.bytes(100));
        assert_eq!(
            full.new_bytes(64, 100, 16),
            full.bytes(100) - full.bytes(64)
        );
    }
}
