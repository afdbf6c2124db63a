//! What is sent, and when: the same for the same seed.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Common words, so that most vocabularies have a token for each.
const WORDS: [&str; 32] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night", "point",
    "home",
];

/// What to send.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) sessions: usize,
    /// Words all prompts begin with.
    pub(super) shared_words: usize,
    /// Words of a prompt's own, on average.
    pub(super) own_words: usize,
    /// Tokens of a reply at most, on average.
    pub(super) reply_tokens: usize,
    /// How far lengths are from their average, as a part of it.
    pub(super) spread: f64,
    /// Requests per second; zero for all at once.
    pub(super) rate: f64,
    pub(super) seed: u64,
}

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arrival {
    /// When, counted from the start.
    pub(super) at: Duration,
    pub(super) prompt: String,
    pub(super) max_tokens: usize,
}

/// Random words, lengths and times.
struct Dice(ChaCha8Rng);

impl Dice {
    /// From 0 up to, and without, 1.
    fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Up to the part `spread` of `mean` away from it, and at least 1.
    fn around(&mut self, mean: usize, spread: f64) -> usize {
        let factor = 1.0 + spread * (2.0 * self.unit() - 1.0);
        ((mean as f64 * factor).round() as usize).max(1)
    }

    fn words(&mut self, count: usize) -> String {
        let words = (0..count).map(|_| WORDS[(self.unit() * WORDS.len() as f64) as usize]);
        words.collect::<Vec<_>>().join(" ")
    }
}

/// What all prompts of `shape` begin with.
pub(super) fn shared(shape: Shape) -> String {
    Dice(ChaCha8Rng::seed_from_u64(shape.seed)).words(shape.shared_words)
}

/// The requests, in the order they arrive.
pub(super) fn arrivals(shape: Shape) -> Vec<Arrival> {
    let mut dice = Dice(ChaCha8Rng::seed_from_u64(shape.seed));
    let shared = dice.words(shape.shared_words);
    let mut at = 0.0;
    (0..shape.sessions)
        .map(|_| {
            let words = dice.around(shape.own_words, shape.spread);
            let own = dice.words(words);
            let arrival = Arrival {
                at: Duration::from_secs_f64(at),
                prompt: [shared.as_str(), &own].join(" ").trim().to_owned(),
                max_tokens: dice.around(shape.reply_tokens, shape.spread),
            };
            if shape.rate > 0.0 {
                // Poisson arrivals: the time between two of them is exponentially distributed.
                at -= (1.0 - dice.unit()).ln() / shape.rate;
            }
            arrival
        })
        .collect()
}

/// One more request of `shape`, different for each `number`.
pub(super) fn question(shape: Shape, number: u64) -> Arrival {
    let mut dice = Dice(ChaCha8Rng::seed_from_u64(!shape.seed ^ number));
    let words = dice.around(shape.own_words, shape.spread);
    let own = dice.words(words);
    Arrival {
        at: Duration::ZERO,
        prompt: [shared(shape).as_str(), &own].join(" ").trim().to_owned(),
        max_tokens: dice.around(shape.reply_tokens, shape.spread),
    }
}

/// Whether something that happens to the `part` of all requests happens to this one.
pub(super) fn chance(part: f64, question: &Arrival) -> bool {
    let mut hasher = DefaultHasher::new();
    question.prompt.hash(&mut hasher);
    Dice(ChaCha8Rng::seed_from_u64(hasher.finish())).unit() < part
}

/// A prompt of `words` words that no other begins with.
pub(super) fn sample(words: usize) -> String {
    Dice(ChaCha8Rng::seed_from_u64(u64::MAX)).words(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        sessions: 2000,
        shared_words: 10,
        own_words: 20,
        reply_tokens: 8,
        spread: 0.5,
        rate: 50.0,
        seed: 1,
    };

    #[test]
    fn requests_arrive_at_the_rate_asked_for_and_share_their_beginning() {
        let arrivals = arrivals(SHAPE);
        let seconds = arrivals.last().expect("some").at.as_secs_f64();
        assert!((36.0..44.0).contains(&seconds), "{seconds}");
        let words = |arrival: &Arrival| {
            arrival
                .prompt
                .split(' ')
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let first = words(&arrivals[0]);
        for arrival in &arrivals {
            let words = words(arrival);
            assert_eq!(words[..10], first[..10]);
            assert!((20..=40).contains(&words.len()), "{}", words.len());
            assert!((4..=12).contains(&arrival.max_tokens));
        }
        assert!(arrivals.is_sorted_by_key(|arrival| arrival.at));
    }

    #[test]
    fn questions_differ_by_number_and_share_their_beginning() {
        let questions: Vec<Arrival> = (0..500).map(|number| question(SHAPE, number)).collect();
        assert_eq!(questions[7], question(SHAPE, 7));
        assert_ne!(questions[7].prompt, questions[8].prompt);
        let shared = shared(SHAPE);
        assert!(questions.iter().all(|one| one.prompt.starts_with(&shared)));
        let chosen = questions.iter().filter(|one| chance(0.3, one)).count();
        assert!((100..200).contains(&chosen), "{chosen} of 500");
        assert!(!questions.iter().any(|one| chance(0.0, one)));
    }

    #[test]
    fn the_same_seed_gives_the_same_requests() {
        assert_eq!(arrivals(SHAPE), arrivals(SHAPE));
        assert_ne!(arrivals(SHAPE), arrivals(Shape { seed: 2, ..SHAPE }));
    }
}
