//! Stop strings: text is let through as soon as it can no longer be the start of one.

use std::ops::Range;

/// Lets text through up to the first stop string.
#[derive(Debug, Clone)]
pub struct StopFilter {
    /// With the place each has among those that were given.
    stops: Vec<(usize, String)>,
    shown: StopText,
    /// Text that may yet turn out to begin a stop string.
    held: String,
    found: Option<usize>,
}

/// Whether the stop string that ends a text belongs to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StopText {
    /// The text ends before it.
    #[default]
    Hide,
    /// The text ends with it.
    Show,
}

impl StopFilter {
    /// A filter for `stops`; empty strings are ignored.
    #[must_use]
    pub fn new(stops: impl IntoIterator<Item = String>, shown: StopText) -> Self {
        let stops = stops.into_iter().enumerate();
        Self {
            stops: stops.filter(|(_, stop)| !stop.is_empty()).collect(),
            shown,
            held: String::new(),
            found: None,
        }
    }

    /// Takes more text and returns what may be shown now. After a stop string, nothing more comes.
    pub fn push(&mut self, text: &str) -> String {
        let before = self.held.len();
        self.hold(text);
        match self.first_after(before) {
            Some((stop, range)) if self.found.is_none() => {
                self.found = Some(stop);
                self.held.truncate(match self.shown {
                    StopText::Hide => range.start,
                    StopText::Show => range.end,
                });
                std::mem::take(&mut self.held)
            }
            _ => self.release(),
        }
    }

    /// Takes text that no stop string ends, although one that begins in it may end in what follows.
    pub fn pass(&mut self, text: &str) -> String {
        self.hold(text);
        self.release()
    }

    /// The place of the stop string that has been met among those that were given.
    #[must_use]
    pub fn found(&self) -> Option<usize> {
        self.found
    }

    /// What was held back, once no more text will come.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn hold(&mut self, text: &str) {
        if self.found.is_none() {
            self.held.push_str(text);
        }
    }

    /// The stop string that ends first, and later than byte `before`, up to which there was none or
    /// none that counts. That it ends first does not depend on the pieces in which text comes.
    fn first_after(&self, before: usize) -> Option<(usize, Range<usize>)> {
        let ranges = self.stops.iter().filter_map(|(place, stop)| {
            let from = (before + 1).saturating_sub(stop.len());
            let from = (from..=self.held.len()).find(|&at| self.held.is_char_boundary(at))?;
            let start = from + self.held[from..].find(stop.as_str())?;
            Some((*place, start..start + stop.len()))
        });
        ranges.min_by_key(|(_, range)| (range.end, range.start))
    }

    /// What of the held text can no longer begin a stop string.
    fn release(&mut self) -> String {
        let rest = self.held.split_off(self.held.len() - self.possible_start());
        std::mem::replace(&mut self.held, rest)
    }

    /// Length of the longest end of `held` that begins a stop string.
    fn possible_start(&self) -> usize {
        let stops = self.stops.iter().map(|(_, stop)| stop);
        let longest = stops.clone().map(|stop| stop.len() - 1).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        (from..self.held.len())
            .filter(|&at| self.held.is_char_boundary(at))
            .find(|&at| {
                let end = &self.held[at..];
                stops.clone().any(|stop| stop.starts_with(end))
            })
            .map_or(0, |at| self.held.len() - at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let (shown, found) = run_with(stops, StopText::Hide, pieces);
        (shown, found.is_some())
    }

    fn run_with(stops: &[&str], text: StopText, pieces: &[&str]) -> (String, Option<usize>) {
        let mut filter = StopFilter::new(stops.iter().map(ToString::to_string), text);
        let mut shown: String = pieces.iter().map(|piece| filter.push(piece)).collect();
        shown.push_str(&filter.finish());
        (shown, filter.found())
    }

    #[test]
    fn a_stop_string_may_span_pieces_and_is_not_shown() {
        assert_eq!(
            run(&["END"], &["one E", "N", "D two"]),
            ("one ".into(), true)
        );
        assert_eq!(
            run(&["END"], &["one E", "N", "E two"]),
            ("one ENE two".into(), false)
        );
    }

    #[test]
    fn the_earliest_of_several_wins() {
        assert_eq!(run(&["c", "b"], &["abc"]), ("a".into(), true));
    }

    #[test]
    fn the_one_that_was_met_is_named_and_belongs_to_the_text_if_that_is_asked_for() {
        let show = |stops: &[&str], pieces: &[&str]| run_with(stops, StopText::Show, pieces);
        assert_eq!(
            show(&["x", "END"], &["one E", "ND two"]),
            ("one END".into(), Some(1))
        );
        assert_eq!(show(&["", "b"], &["ab", "b"]), ("ab".into(), Some(1)));
        assert_eq!(show(&["END"], &["one E"]), ("one E".into(), None));
    }

    #[test]
    fn text_that_is_passed_ends_nothing_but_may_begin_what_ends_it() {
        let mut filter = StopFilter::new(["ab".to_owned()], StopText::Hide);
        assert_eq!(filter.pass("ab ab a"), "ab ab ");
        assert_eq!(filter.found(), None);
        assert_eq!(filter.push("bc"), "");
        assert_eq!(filter.found(), Some(0));
        let mut filter = StopFilter::new(["b".to_owned(), "bcd".to_owned()], StopText::Hide);
        assert_eq!(
            filter.pass("abc"),
            "a",
            "what may begin the longer one is held"
        );
        assert_eq!(filter.push("x"), "bcx", "and the shorter one has passed");
        assert_eq!(filter.found(), None);
    }

    #[test]
    fn empty_stop_strings_do_not_stop_anything() {
        assert_eq!(run(&[""], &["abc"]), ("abc".into(), false));
    }

    #[test]
    fn characters_stay_whole() {
        assert_eq!(run(&["é!"], &["caf", "é", " ü"]), ("café ü".into(), false));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter_with_several_stop_strings(
            text in "[ab]{0,24}",
            stops in prop::collection::vec("[ab]{1,4}", 1..4),
            show: bool,
        ) {
            let shown = if show { StopText::Show } else { StopText::Hide };
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let single: Vec<&str> = (0..text.len()).map(|at| &text[at..=at]).collect();
            prop_assert_eq!(run_with(&stops, shown, &[&text]), run_with(&stops, shown, &single));
        }

        #[test]
        fn pieces_do_not_matter(text in "[abé]{0,24}", stop in "[abé]{1,4}", cuts in prop::collection::vec(0usize..24, 0..6)) {
            let mut at: Vec<usize> = cuts.into_iter().map(|cut| text.char_indices().nth(cut).map_or(text.len(), |(at, _)| at)).collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let expected = text.find(&stop).map_or(text.as_str(), |found| &text[..found]);
            let (shown, stopped) = run(&[&stop], &pieces);
            prop_assert_eq!(shown, expected);
            prop_assert_eq!(stopped, text.contains(&stop));
        }
    }
}
