//! The pages of one group.

use lacuna_pages::PagePin;

/// What keeps one group's pages: for each buffer of a sequence, the pins of consecutive pages.
#[derive(Debug)]
pub struct Pins {
    extents: Vec<Vec<PagePin>>,
}

impl Pins {
    pub(crate) fn new(extents: Vec<Vec<PagePin>>) -> Self {
        Self { extents }
    }

    /// The pins that all of `groups` have for one buffer, in order.
    pub(crate) fn of_extent(groups: &[&Self], extent: usize) -> Vec<PagePin> {
        groups
            .iter()
            .flat_map(|pins| pins.extents[extent].iter().cloned())
            .collect()
    }
}
