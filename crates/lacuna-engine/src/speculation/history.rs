//! Where a sequence's last tokens came up before: chains of places with the same hash, as compressors keep them.
//!
//! A place `p` is the one after the first `p` tokens. Its hash is that of the [`KEY`] tokens before it; `latest` has the
//! last place of each hash, `earlier` for each place the one before it. Both are rings over the last [`MOST_TOKENS`]
//! tokens, so memory is bounded whatever the length, and taking up a token and finding a match each take a time that is
//! bounded, too.

use std::num::NonZeroU32;

/// Tokens that a match has at least: two come up together by chance too often to be worth a look.
const KEY: usize = 3;

/// Tokens that are looked back on: 256 KiB of places.
const MOST_TOKENS: usize = 1 << 15;

/// Places with the same hash that are compared, the latest first.
const TRIES: usize = 32;

/// Tokens that are compared: a longer match is not believed any more than this.
const LONGEST: usize = 64;

/// Tokens of one sequence, by what came before them.
#[derive(Debug)]
pub(crate) struct History {
    latest: Vec<Option<NonZeroU32>>,
    earlier: Vec<Option<NonZeroU32>>,
    /// Places below this have been taken up.
    next: usize,
}

/// An earlier place whose last tokens are those at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Match {
    pub(crate) place: usize,
    /// Tokens that are the same, as far as that was compared.
    pub(crate) length: usize,
}

impl Match {
    /// What followed then, in `tokens`, and from the end on what follows if it goes on the same way.
    pub(crate) fn following(self, tokens: &[u32]) -> impl Iterator<Item = u32> {
        tokens[self.place..].iter().copied().cycle()
    }
}

impl History {
    /// For a sequence that will have `tokens` tokens.
    pub(crate) fn new(tokens: usize) -> Self {
        let places = Self::places(tokens);
        Self {
            latest: vec![None; places],
            earlier: vec![None; places],
            next: KEY,
        }
    }

    /// Bytes of the places of `tokens` tokens.
    pub(crate) fn bytes(tokens: usize) -> usize {
        2 * Self::places(tokens) * size_of::<Option<NonZeroU32>>()
    }

    fn places(tokens: usize) -> usize {
        tokens.clamp(64, MOST_TOKENS).next_power_of_two()
    }

    /// Forgets all places.
    pub(crate) fn forget(&mut self) {
        self.latest.fill(None);
        self.earlier.fill(None);
        self.next = KEY;
    }

    fn hash(&self, key: &[u32]) -> usize {
        // The golden ratio's bits spread neighbours; the highest bits depend on all of a product's.
        const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
        let mix = |hash: u64, &token: &u32| (hash ^ u64::from(token)).wrapping_mul(SPREAD);
        let hash = key
            .iter()
            .fold(0, |hash, token| mix(hash, token).rotate_left(29));
        (hash.wrapping_mul(SPREAD) >> 32) as usize & (self.latest.len() - 1)
    }

    /// Takes up the places before the end of `tokens`, which begin as they did the last time.
    fn follow(&mut self, tokens: &[u32]) {
        let ring = self.earlier.len();
        // What would be overwritten at once is left out.
        self.next = self.next.max((tokens.len()).saturating_sub(ring)).max(KEY);
        for place in self.next..tokens.len() {
            let hash = self.hash(&tokens[place - KEY..place]);
            let current = u32::try_from(place).ok().and_then(NonZeroU32::new);
            self.earlier[place % ring] = std::mem::replace(&mut self.latest[hash], current);
        }
        self.next = self.next.max(tokens.len());
    }

    /// The longest match of the end of `tokens`, of those the latest. `tokens` begin as they did the last time.
    pub(crate) fn find(&mut self, tokens: &[u32]) -> Option<Match> {
        let end = tokens.len();
        if end <= KEY || u32::try_from(end).is_err() {
            return None;
        }
        self.follow(tokens);
        let ring = self.earlier.len();
        let mut best: Option<Match> = None;
        let mut candidate = self.latest[self.hash(&tokens[end - KEY..])];
        let mut bound = end;
        for _ in 0..TRIES {
            let Some(place) = candidate.map(|place| place.get() as usize) else {
                break;
            };
            // Older ones have given their place in the ring to others.
            if place >= bound || place + ring <= end {
                break;
            }
            let length = common(&tokens[..place], tokens);
            if length >= KEY && best.is_none_or(|best| length > best.length) {
                best = Some(Match { place, length });
            }
            (bound, candidate) = (place, self.earlier[place % ring]);
        }
        best
    }
}

/// Tokens that both end with, as far as that counts.
fn common(earlier: &[u32], tokens: &[u32]) -> usize {
    let pairs = earlier.iter().rev().zip(tokens.iter().rev());
    pairs.take(LONGEST).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same by comparing everything.
    fn expected(tokens: &[u32]) -> Option<Match> {
        let places = (KEY..tokens.len()).rev();
        let matches = places.map(|place| Match {
            place,
            length: common(&tokens[..place], tokens),
        });
        let matches = matches.filter(|found| found.length >= KEY);
        // The first of the longest is the latest.
        matches.reduce(|best, found| match found.length > best.length {
            true => found,
            false => best,
        })
    }

    proptest! {
        /// Few different tokens, so that much comes up again, but not so few that more places have one key than are tried.
        #[test]
        fn the_longest_latest_match_is_found_however_tokens_come(
            tokens in prop::collection::vec(0u32..6, 1..200), step in 1usize..9,
        ) {
            let mut history = History::new(10);
            for end in (1..=tokens.len()).step_by(step) {
                let all = expected(&tokens[..end]);
                let found = history.find(&tokens[..end]);
                // A ring of 64 places sees that far back.
                match all.filter(|all| all.place + 64 > end) {
                    Some(all) => prop_assert_eq!(found, Some(all)),
                    None => {
                        let true_match = |found: Match| {
                            found.place + 64 > end && found.length >= KEY
                                && found.length == common(&tokens[..found.place], &tokens[..end])
                        };
                        prop_assert!(found.is_none_or(true_match));
                    }
                }
            }
        }
    }

    #[test]
    fn what_follows_goes_on_past_the_end_as_it_came() {
        let tokens = [9, 9, 1, 2, 3, 1, 2, 3];
        let found = History::new(100).find(&tokens).expect("a match");
        assert_eq!(
            found,
            Match {
                place: 5,
                length: 3
            }
        );
        let following: Vec<u32> = found.following(&tokens).take(7).collect();
        assert_eq!(following, [1, 2, 3, 1, 2, 3, 1]);
    }

    #[test]
    fn nothing_is_found_where_nothing_came_up_before() {
        let mut history = History::new(100);
        let tokens: Vec<u32> = (0..500).collect();
        for end in 0..tokens.len() {
            assert_eq!(history.find(&tokens[..end]), None);
        }
    }

    #[test]
    fn memory_is_bounded_and_what_is_far_back_is_forgotten() {
        assert_eq!(History::bytes(usize::MAX), 256 << 10);
        assert_eq!(History::bytes(0), 512);
        let mut history = History::new(64);
        let mut tokens: Vec<u32> = (0..10).chain(1000..1054).chain(0..10).collect();
        assert_eq!(
            history.find(&tokens[..73]),
            None,
            "64 places before the end"
        );
        tokens.drain(10..20);
        let found = History::new(64).find(&tokens);
        assert_eq!(
            found,
            Some(Match {
                place: 10,
                length: 10
            })
        );
    }
}
