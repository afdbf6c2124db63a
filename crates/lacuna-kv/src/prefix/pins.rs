//! The pages of one group, or those of windows and states that a resume point keeps.

use lacuna_pages::{PagePin, PhysicalPage};

/// What keeps pages: for each buffer of a sequence, the pins of consecutive pages.
#[derive(Debug, Clone)]
pub struct Pins {
    extents: Vec<PinnedPages>,
    /// Of a resume point, those of all layers' states.
    states: Vec<PagePin>,
}

/// Consecutive pages of one buffer.
#[derive(Debug, Clone, Default)]
pub(crate) struct PinnedPages {
    /// The place of the first in the buffer.
    pub(crate) first: u64,
    pub(crate) pins: Vec<PagePin>,
}

impl PinnedPages {
    /// Those before the place `end`.
    pub(crate) fn cut_at(mut self, end: u64) -> Self {
        self.pins.truncate(end.saturating_sub(self.first) as usize);
        self
    }

    /// The place behind the last.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.pins.len() as u64
    }
}

impl Pins {
    pub(crate) fn new(extents: Vec<PinnedPages>) -> Self {
        Self {
            extents,
            states: Vec::new(),
        }
    }

    /// The same, and the pages of states.
    pub(crate) fn with_states(self, states: Vec<PagePin>) -> Self {
        Self { states, ..self }
    }

    /// The pages of one buffer.
    pub(crate) fn extent(&self, buffer: usize) -> &PinnedPages {
        &self.extents[buffer]
    }

    /// The pages of states.
    pub(crate) fn states(&self) -> &[PagePin] {
        &self.states
    }

    /// The pages that all of `groups`, which follow each other, and then `window` have of one buffer.
    pub(crate) fn of_extent(groups: &[&Self], window: Option<&Self>, extent: usize) -> PinnedPages {
        let mut all = PinnedPages {
            first: 0,
            pins: Vec::new(),
        };
        for pins in groups.iter().copied().chain(window) {
            let pages = &pins.extents[extent];
            // A group has no page of a buffer that belongs to a window.
            if all.pins.is_empty() {
                all.first = pages.first;
            }
            all.pins.extend(pages.pins.iter().cloned());
        }
        all
    }

    /// Every page that is kept.
    pub fn pages(&self) -> impl Iterator<Item = PhysicalPage> {
        let extents = self.extents.iter();
        let rows = extents.flat_map(|pages| &pages.pins);
        rows.chain(&self.states).map(PagePin::page)
    }
}
