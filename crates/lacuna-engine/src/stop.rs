//! Stop strings: text is let through as soon as it can no longer be the start of one.

/// Lets text through up to the first stop string.
#[derive(Debug, Clone)]
pub struct StopFilter {
    stops: Vec<String>,
    /// Text that may yet turn out to begin a stop string.
    held: String,
    found: bool,
}

impl StopFilter {
    /// A filter for `stops`; empty strings are ignored.
    #[must_use]
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, held: String::new(), found: false }
    }

    /// Takes more text and returns what may be shown now. After a stop string, nothing more comes.
    pub fn push(&mut self, text: &str) -> String {
        if self.found {
            return String::new();
        }
        self.held.push_str(text);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = first {
            self.found = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = self.possible_start();
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// Whether a stop string has been met.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.found
    }

    /// What was held back, once no more text will come.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length of the longest end of `held` that begins a stop string.
    fn possible_start(&self) -> usize {
        let longest = self.stops.iter().map(|stop| stop.len() - 1).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        (from..self.held.len())
            .filter(|&at| self.held.is_char_boundary(at))
            .find(|&at| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..])))
            .map_or(0, |at| self.held.len() - at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut filter = StopFilter::new(stops.iter().map(ToString::to_string));
        let mut shown: String = pieces.iter().map(|piece| filter.push(piece)).collect();
        shown.push_str(&filter.finish());
        (shown, filter.stopped())
    }

    #[test]
    fn a_stop_string_may_span_pieces_and_is_not_shown() {
        assert_eq!(run(&["END"], &["one E", "N", "D two"]), ("one ".into(), true));
        assert_eq!(run(&["END"], &["one E", "N", "E two"]), ("one ENE two".into(), false));
    }

    #[test]
    fn the_earliest_of_several_wins() {
        assert_eq!(run(&["c", "b"], &["abc"]), ("a".into(), true));
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
