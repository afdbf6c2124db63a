//! What followed a sequence's last tokens when they came up before: chains of places with the same hash, as compressors keep them.
//!
//! A place `p` is the one after the first `p` tokens. Its hash is that of the tokens before it, as many as a match has at
//! least; `latest` has the last place of each hash, `earlier` for each place the one before it. Both are rings over the last
//! tokens, so memory is bounded whatever the length, and taking up a token and finding matches each take a time that is
//! bounded, too.
//!
//! What followed the longest match is guessed to follow. Other places that match say how sure that is: what came after
//! all of them is hardly ever wrong, even behind a single token. Where an edit exchanges a token for another, what comes
//! after it may be what came after the old one, so that is a lead as well, until there is a match of three tokens. What
//! stands for a part of a picture is never guessed: no model writes it.

use std::num::NonZeroU32;

use lacuna_images::FIRST_TOKEN;

use super::acceptance::{Evidence, Witnesses};

/// Tokens that are compared: a longer match is not believed any more than this.
const LONGEST: usize = 64;

/// Tokens of one sequence, by what came before them.
#[derive(Debug)]
pub(crate) struct History {
    /// Matches of three tokens or more, far back.
    long: Chains,
    /// Of one or two, which come up everywhere: where they did so last. Asked where there is no longer match.
    short: Chains,
    /// Those there are for the end of the tokens.
    matches: Vec<Match>,
    /// Those that agree with what is guessed, as far as that has come.
    witnesses: Vec<Match>,
    /// What was followed last, and how many tokens there were then.
    followed: Option<(usize, usize)>,
}

/// An earlier place whose last tokens are those at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Match {
    place: usize,
    /// Tokens that are the same, as far as that was compared.
    length: usize,
}

/// A place that may be followed: what comes after it is guessed to come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lead {
    place: usize,
    /// What matched before it. `None` where that would be an exchanged token: the place after those that were followed until
    /// one of them was wrong.
    length: Option<usize>,
}

impl Lead {
    /// What followed then, in `tokens`, and from the end on what follows if it goes on the same way, as far as that can be
    /// written: not up to a picture, and not behind it.
    fn following(self, tokens: &[u32]) -> impl Iterator<Item = u32> {
        let following = tokens[self.place..].iter().copied().cycle();
        following.take_while(|&token| token < FIRST_TOKEN)
    }

    /// What speaks for the guess after so many others.
    fn evidence(self, after: usize, witnesses: Witnesses) -> Evidence {
        match self.length {
            Some(length) => Evidence::Match {
                length: length + after,
                witnesses,
            },
            // From then on as after any match of as many.
            None if after >= Chains::LONG.key => Evidence::Match {
                length: after,
                witnesses,
            },
            None => Evidence::Exchange(witnesses),
        }
    }
}

impl History {
    /// For a sequence that will have `tokens` tokens.
    pub(crate) fn new(tokens: usize) -> Self {
        Self {
            long: Chains::new(Chains::LONG, tokens),
            short: Chains::new(Chains::SHORT, tokens),
            matches: Vec::with_capacity(Self::MOST_MATCHES),
            witnesses: Vec::with_capacity(Self::MOST_MATCHES),
            followed: None,
        }
    }

    const MOST_MATCHES: usize = match Chains::LONG.tries > Chains::SHORT.tries {
        true => Chains::LONG.tries,
        false => Chains::SHORT.tries,
    };

    /// Bytes of the places of `tokens` tokens.
    pub(crate) fn bytes(tokens: usize) -> usize {
        let chains = [Chains::LONG, Chains::SHORT].map(|reach| reach.bytes(tokens));
        chains.iter().sum::<usize>() + 2 * Self::MOST_MATCHES * size_of::<Match>()
    }

    /// Forgets all places.
    pub(crate) fn forget(&mut self) {
        self.long.forget();
        self.short.forget();
        self.followed = None;
    }

    /// What may be followed after `tokens`, the likelier last if nothing is known: where matches are short, the place behind
    /// an exchanged token, and the longest match, of those the latest. `tokens` begin as they did the last time.
    pub(crate) fn leads(&mut self, tokens: &[u32]) -> impl Iterator<Item = Lead> + use<> {
        let best = self.find(tokens);
        let is_short = best.is_none_or(|it| it.length < Chains::LONG.key);
        let exchange = self.followed.filter(|_| is_short);
        let exchange = exchange.map(|(place, end)| place + (tokens.len() - end));
        let exchange = exchange
            .filter(|&place| place < tokens.len() && best.is_none_or(|it| it.place != place));
        let exchange = exchange.map(|place| Lead {
            place,
            length: None,
        });
        let best = best.map(|it| Lead {
            place: it.place,
            length: Some(it.length),
        });
        exchange.into_iter().chain(best)
    }

    /// Takes note that `lead`, one of the last, is what guesses come from.
    pub(crate) fn follow(&mut self, lead: Lead, tokens: &[u32]) {
        self.followed = Some((lead.place, tokens.len()));
    }

    /// Up to `most` tokens that are guessed to follow `tokens` by `lead`, one of the last, and what speaks for each.
    pub(crate) fn guesses(
        &mut self,
        lead: Lead,
        tokens: &[u32],
        most: usize,
    ) -> impl Iterator<Item = (u32, Evidence)> {
        let Self {
            matches, witnesses, ..
        } = self;
        witnesses.clear();
        witnesses.extend(matches.iter().filter(|it| it.place != lead.place));
        let guesses = lead.following(tokens).take(most).enumerate();
        guesses.map(move |(after, guess)| {
            let said = |it: &Match| tokens.get(it.place + after).copied();
            // So near the end nothing is known of what followed.
            witnesses.retain(|it| said(it).is_some());
            let asked = witnesses.len();
            // Those that went on otherwise have nothing to say of the guesses after this one.
            witnesses.retain(|it| said(it) == Some(guess));
            let agree = Witnesses::new(witnesses.len(), asked);
            (guess, lead.evidence(after, agree))
        })
    }

    /// The longest match of the end of `tokens`, of those the latest; `matches` are all of its kind then.
    fn find(&mut self, tokens: &[u32]) -> Option<Match> {
        self.matches.clear();
        for chains in [&mut self.long, &mut self.short] {
            self.matches.extend(chains.matches(tokens));
            // The latest comes first, and of several that are as long the last is the greatest.
            let longest = self.matches.iter().rev().max_by_key(|it| it.length);
            if let Some(longest) = longest {
                return Some(*longest);
            }
        }
        None
    }
}

/// How far places are looked back on, and for what.
#[derive(Debug, Clone, Copy)]
struct Reach {
    /// Tokens that a match has at least.
    key: usize,
    /// Tokens that are looked back on at most.
    tokens: usize,
    /// Places with the same hash that are compared, the latest first.
    tries: usize,
}

impl Reach {
    fn places(self, tokens: usize) -> usize {
        tokens.clamp(64, self.tokens).next_power_of_two()
    }

    fn bytes(self, tokens: usize) -> usize {
        2 * self.places(tokens) * size_of::<Option<NonZeroU32>>()
    }
}

/// Places by what comes before them.
#[derive(Debug)]
struct Chains {
    reach: Reach,
    latest: Vec<Option<NonZeroU32>>,
    earlier: Vec<Option<NonZeroU32>>,
    /// Places below this have been taken up.
    next: usize,
}

impl Chains {
    /// 256 KiB of places. Three tokens come up together by chance seldom enough that all places can be told apart in a long text.
    const LONG: Reach = Reach {
        key: 3,
        tokens: 1 << 15,
        tries: 32,
    };
    /// 32 KiB. What followed a token the last few times says more than what did so long ago.
    const SHORT: Reach = Reach {
        key: 1,
        tokens: 1 << 12,
        tries: 8,
    };

    fn new(reach: Reach, tokens: usize) -> Self {
        let places = reach.places(tokens);
        Self {
            reach,
            latest: vec![None; places],
            earlier: vec![None; places],
            next: reach.key,
        }
    }

    fn forget(&mut self) {
        self.latest.fill(None);
        self.earlier.fill(None);
        self.next = self.reach.key;
    }

    /// Of the tokens before a place, as many as a match has at least.
    fn hash(&self, before: &[u32]) -> usize {
        // The golden ratio's bits spread neighbours; the highest bits depend on all of a product's.
        const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
        let mix = |hash: u64, &token: &u32| (hash ^ u64::from(token)).wrapping_mul(SPREAD);
        let key = &before[before.len() - self.reach.key..];
        let hash = key
            .iter()
            .fold(0, |hash, token| mix(hash, token).rotate_left(29));
        (hash.wrapping_mul(SPREAD) >> 32) as usize & (self.latest.len() - 1)
    }

    /// Takes up the places before the end of `tokens`, which begin as they did the last time.
    fn follow(&mut self, tokens: &[u32]) {
        let ring = self.earlier.len();
        // What would be overwritten at once is left out.
        self.next = self.next.max(tokens.len().saturating_sub(ring));
        for place in self.next..tokens.len() {
            let hash = self.hash(&tokens[..place]);
            let current = u32::try_from(place).ok().and_then(NonZeroU32::new);
            self.earlier[place % ring] = std::mem::replace(&mut self.latest[hash], current);
        }
        self.next = self.next.max(tokens.len());
    }

    /// Matches of the end of `tokens`, the latest first. `tokens` begin as they did the last time.
    fn matches(&mut self, tokens: &[u32]) -> impl Iterator<Item = Match> {
        let end = tokens.len();
        let possible = end > self.reach.key && u32::try_from(end).is_ok();
        if possible {
            self.follow(tokens);
        }
        let ring = self.earlier.len();
        let earlier = &self.earlier;
        let latest = possible.then(|| self.latest[self.hash(tokens)]);
        let latest = latest.flatten().map(|place| place.get() as usize);
        // Older ones have given their place in the ring to others.
        let there = move |place: usize, bound: usize| place < bound && place + ring > end;
        let first = latest.filter(|&place| there(place, end));
        let places = std::iter::successors(first, move |&place| {
            let before = earlier[place % ring]?.get() as usize;
            there(before, place).then_some(before)
        });
        let matches = places.take(self.reach.tries).map(|place| Match {
            place,
            length: common(&tokens[..place], tokens),
        });
        let key = self.reach.key;
        matches.filter(move |it| it.length >= key)
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

    /// Matches of `key` tokens or more by comparing everything, the latest first.
    fn all_matches(tokens: &[u32], key: usize) -> Vec<Match> {
        let places = (key..tokens.len()).rev();
        let matches = places.map(|place| Match {
            place,
            length: common(&tokens[..place], tokens),
        });
        matches.filter(|found| found.length >= key).collect()
    }

    /// The longest, of those the latest.
    fn best(matches: &[Match]) -> Option<Match> {
        let longest = matches.iter().map(|it| it.length).max()?;
        matches.iter().find(|it| it.length == longest).copied()
    }

    /// Guesses after the longest match, and what speaks for them.
    fn by_match(history: &mut History, tokens: &[u32], most: usize) -> Vec<(u32, Evidence)> {
        let lead = history.leads(tokens).find(|lead| lead.length.is_some());
        let guesses = lead.map(|lead| history.guesses(lead, tokens, most).collect());
        guesses.unwrap_or_default()
    }

    fn guessed(history: &mut History, tokens: &[u32], most: usize) -> Vec<u32> {
        let guesses = by_match(history, tokens, most).into_iter();
        guesses.map(|(token, _)| token).collect()
    }

    proptest! {
        /// Few different tokens, so that much comes up again, but not so few that more places have one key than are tried.
        #[test]
        fn the_longest_latest_match_is_found_however_tokens_come(
            tokens in prop::collection::vec(0u32..6, 1..200), step in 1usize..9,
        ) {
            let mut history = History::new(10);
            for end in (1..=tokens.len()).step_by(step) {
                let tokens = &tokens[..end];
                let all = all_matches(tokens, 3);
                let found = history.find(tokens);
                // A ring of 64 places sees that far back.
                match best(&all).filter(|best| best.place + 64 > end) {
                    Some(best) => prop_assert_eq!(found, Some(best)),
                    None => {
                        let true_match = |found: Match| {
                            found.place + 64 > end && found.length >= 1
                                && found.length == common(&tokens[..found.place], tokens)
                        };
                        prop_assert!(found.is_none_or(true_match));
                    }
                }
            }
        }

        /// Each guess is asked of those alone that have said the guesses before it.
        #[test]
        fn the_other_matches_are_witnesses_as_long_as_they_agree(
            tokens in prop::collection::vec(0u32..5, 4..60), most in 1usize..9,
        ) {
            let long = all_matches(&tokens, 3);
            let mut matches = match long.is_empty() {
                true => all_matches(&tokens, 1),
                false => long,
            };
            matches.truncate(if matches.first().is_some_and(|it| it.length < 3) { 8 } else { 32 });
            let found = best(&matches);
            matches.retain(|it| Some(*it) != found);
            let guesses = by_match(&mut History::new(100), &tokens, most);
            prop_assert_eq!(guesses.len(), if found.is_some() { most } else { 0 });
            for (after, (guess, evidence)) in guesses.into_iter().enumerate() {
                let said = |it: &Match| tokens.get(it.place + after).copied();
                let asked = matches.iter().filter(|it| said(it).is_some()).count();
                matches.retain(|it| said(it) == Some(guess));
                let expected = Evidence::Match {
                    length: found.map_or(0, |it| it.length) + after,
                    witnesses: Witnesses::new(matches.len(), asked),
                };
                prop_assert_eq!(evidence, expected);
            }
        }
    }

    #[test]
    fn what_follows_goes_on_past_the_end_as_it_came() {
        let tokens = [9, 9, 1, 2, 3, 1, 2, 3];
        let guesses = guessed(&mut History::new(100), &tokens, 7);
        assert_eq!(guesses, [1, 2, 3, 1, 2, 3, 1]);
    }

    /// Parts of pictures lie among tokens by numbers that no vocabulary has, and a pass over such a guess failed.
    #[test]
    fn what_follows_ends_before_a_picture() {
        let picture = FIRST_TOKEN | 7;
        let tokens = [1, 2, 3, picture, picture, 4, 1, 2];
        let mut history = History::new(100);
        assert_eq!(guessed(&mut history, &tokens[..7], 4), [2, 3]);
        assert_eq!(guessed(&mut history, &tokens, 4), [3]);
        let tokens = [1, picture, 2, 1];
        assert_eq!(guessed(&mut History::new(100), &tokens, 4), [0; 0]);
        let tokens = [picture, 1, 2, 3, 1, 2];
        assert_eq!(guessed(&mut History::new(100), &tokens, 4), [3, 1, 2, 3]);
    }

    #[test]
    fn a_single_token_is_followed_by_what_followed_it_last() {
        let tokens = [1, 2, 3, 4, 1, 5, 6, 7, 1];
        let mut history = History::new(100);
        assert_eq!(guessed(&mut history, &tokens, 3), [5, 6, 7]);
        let said = by_match(&mut history, &tokens, 2);
        let evidence = [(1, Witnesses::Against), (2, Witnesses::None)];
        let evidence = evidence.map(|(length, witnesses)| Evidence::Match { length, witnesses });
        assert_eq!(said, [(5, evidence[0]), (6, evidence[1])]);
        // The longer match is believed, however long ago it was.
        let tokens = [1, 2, 3, 4, 9, 3, 8, 8, 1, 2, 3];
        assert_eq!(guessed(&mut history, &tokens, 2), [4, 9]);
    }

    #[test]
    fn an_edit_that_exchanges_a_token_is_followed_behind_it() {
        let mut history = History::new(100);
        let mut tokens: Vec<u32> = (100..120).chain(100..105).collect();
        let copy = history.leads(&tokens).last().expect("a match");
        history.follow(copy, &tokens);
        // 105 and 106 are guessed; 105 is what comes, and 7 in the place of 106.
        tokens.extend([105, 7]);
        let leads: Vec<Lead> = history.leads(&tokens).collect();
        assert_eq!(leads.len(), 1, "7 came up nowhere");
        let guesses: Vec<_> = history.guesses(leads[0], &tokens, 5).collect();
        let exchange = |token| (token, Evidence::Exchange(Witnesses::None));
        let matched = |token, length| {
            let witnesses = Witnesses::None;
            (token, Evidence::Match { length, witnesses })
        };
        let expected = [
            exchange(107),
            exchange(108),
            exchange(109),
            matched(110, 3),
            matched(111, 4),
        ];
        assert_eq!(guesses, expected);
        history.follow(leads[0], &tokens);
        tokens.push(107);
        let leads: Vec<Lead> = history.leads(&tokens).collect();
        assert_eq!(
            leads.len(),
            1,
            "a match of one token leads to the same place"
        );
        assert_eq!(leads[0].length, Some(1));
        // Nothing is left behind the end, nor of other tokens.
        history.followed = Some((tokens.len() - 1, tokens.len() - 1));
        assert_eq!(history.leads(&tokens).count(), 1);
        history.forget();
        assert_eq!(history.followed, None);
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
        let matches = 2 * 32 * size_of::<Match>();
        assert_eq!(
            History::bytes(usize::MAX),
            (256 << 10) + (32 << 10) + matches
        );
        assert_eq!(History::bytes(0), 2 * 512 + matches);
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

    #[test]
    fn long_texts_are_followed_without_growing() {
        let mut history = History::new(usize::MAX);
        let capacity = history.matches.capacity();
        let tokens: Vec<u32> = (0..100_000u32).map(|token| token % 977).collect();
        for end in (1..tokens.len()).step_by(997) {
            let guesses = guessed(&mut history, &tokens[..end], 3);
            let known = end > 977 + 2;
            assert!(!known || guesses == tokens[end..end + 3]);
        }
        assert_eq!(history.matches.capacity(), capacity);
    }
}
