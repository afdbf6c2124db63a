//! How often guesses were right, by how much spoke for them: how much of what came before them had matched, or how sure a
//! draft model was.

/// What speaks for a guess.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Evidence {
    /// So many tokens before it had matched, and other places that match say so much of it.
    Match { length: usize, witnesses: Witnesses },
    /// A token before it was exchanged for another, and few or none have matched since.
    Exchange(Witnesses),
    /// The draft model gives it this probability.
    Confidence(f64),
}

/// What followed the other places whose last tokens are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Witnesses {
    /// There is no other.
    None,
    /// More than half of them were followed by what is guessed.
    For,
    /// Some were, but no more than half.
    Divided,
    /// None was.
    Against,
}

impl Witnesses {
    const COUNT: usize = 4;

    /// Of those `asked`, so many are `for_it`.
    pub(crate) fn new(for_it: usize, asked: usize) -> Self {
        match (for_it, asked) {
            (_, 0) => Self::None,
            (0, _) => Self::Against,
            (for_it, asked) if 2 * for_it > asked => Self::For,
            _ => Self::Divided,
        }
    }
}

impl Evidence {
    fn class(self) -> usize {
        match self {
            Self::Match { length, witnesses } => {
                let length = match length {
                    0..=3 => length.saturating_sub(1),
                    _ => (length.ilog2() as usize + 1).min(LENGTHS - 1),
                };
                length * Witnesses::COUNT + witnesses as usize
            }
            Self::Exchange(witnesses) => LENGTHS * Witnesses::COUNT + witnesses as usize,
            Self::Confidence(probability) => {
                let below = BOUNDS.iter().take_while(|&&bound| probability >= bound);
                below.count()
            }
        }
    }
}

/// Classes of lengths of matches: 1, 2, 3, and from 4, 8, 16 and 32 tokens on.
const LENGTHS: usize = 7;

/// Where classes of a draft model's confidence end. The last is what it has no doubt of: names, numbers, the rest of a word.
const BOUNDS: [f64; 4] = [0.3, 0.5, 0.7, 0.9];

/// Part of guesses believed to be right after matches of each length, and at last behind an exchanged token, by what witnesses say
/// (none, for, divided, against), until more is known: about what came of them in edits, summaries, tables and talk of small models,
/// and less of what is likely in edits alone. A short match is as often chance as not, a long one is a copy, and what all
/// places agree on is nearly as sure behind two tokens as behind twenty.
const OF_MATCHES: [[f64; Witnesses::COUNT]; LENGTHS + 1] = [
    [0.25, 0.50, 0.20, 0.10],
    [0.40, 0.80, 0.45, 0.20],
    [0.60, 0.90, 0.55, 0.35],
    [0.75, 0.92, 0.65, 0.35],
    [0.85, 0.95, 0.80, 0.60],
    [0.92, 0.97, 0.90, 0.70],
    [0.95, 0.98, 0.95, 0.85],
    [0.20, 0.35, 0.15, 0.10],
];

/// Part of a draft model's guesses believed to be right, by how sure it is: about what it says itself, less what it knows less
/// than the model that it guesses for.
const OF_CONFIDENCE: [f64; BOUNDS.len() + 1] = [0.2, 0.35, 0.5, 0.7, 0.9];

/// Counts in which older ones fade: of guesses from one sequence's history, or of those of a draft model.
#[derive(Debug, Clone)]
pub(crate) struct Acceptance {
    prior: &'static [f64],
    memory: f64,
    /// For each class: guesses that were right, and all.
    classes: Vec<(f64, f64)>,
}

impl Acceptance {
    /// What is believed before counts as so many guesses, so a few of a sequence's own are heard over it.
    const PRIOR_WEIGHT: f64 = 3.0;

    /// Of matches in one sequence. Some sixteen guesses of a class are remembered, a few lines of text, so that a reply
    /// which turns from quoting to inventing is noticed soon.
    pub(crate) fn of_matches() -> Self {
        Self::new(OF_MATCHES.as_flattened(), 15.0 / 16.0)
    }

    /// Of a draft model in all sequences, of whose guesses some sixty are remembered: it agrees with the other model, or not.
    pub(crate) fn of_confidence() -> Self {
        Self::new(&OF_CONFIDENCE, 63.0 / 64.0)
    }

    fn new(prior: &'static [f64], memory: f64) -> Self {
        Self {
            prior,
            memory,
            classes: vec![(0.0, 0.0); prior.len()],
        }
    }

    /// Bytes of what is known of matches.
    pub(crate) fn bytes_of_matches() -> usize {
        OF_MATCHES.as_flattened().len() * size_of::<(f64, f64)>()
    }

    /// How likely a guess is right for which `evidence` speaks: more than 0 and less than 1.
    pub(crate) fn probability(&self, evidence: Evidence) -> f64 {
        let class = evidence.class();
        let (right, all) = self.classes[class];
        (right + self.prior[class] * Self::PRIOR_WEIGHT) / (all + Self::PRIOR_WEIGHT)
    }

    /// A guess for which `evidence` spoke was `right` or not.
    pub(crate) fn note(&mut self, evidence: Evidence, right: bool) {
        let (rights, all) = &mut self.classes[evidence.class()];
        *rights = *rights * self.memory + f64::from(u8::from(right));
        *all = *all * self.memory + 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One match of so many tokens, without others.
    fn matched(length: usize) -> Evidence {
        Evidence::Match {
            length,
            witnesses: Witnesses::None,
        }
    }

    #[test]
    fn longer_matches_are_believed_more_until_more_is_known() {
        let acceptance = Acceptance::of_matches();
        let believed: Vec<f64> = (1..80)
            .map(|length| acceptance.probability(matched(length)))
            .collect();
        assert!(believed.is_sorted());
        for (length, expected) in [
            (1, 0.25),
            (3, 0.6),
            (4, 0.75),
            (7, 0.75),
            (8, 0.85),
            (79, 0.95),
        ] {
            assert!((acceptance.probability(matched(length)) - expected).abs() < 1e-9);
        }
    }

    #[test]
    fn what_witnesses_agree_on_is_believed_more_and_what_none_says_less() {
        let acceptance = Acceptance::of_matches();
        for length in [1, 2, 3, 5, 9, 20, 64] {
            let [for_it, divided, against] = [(2, 3), (1, 2), (0, 1)].map(|(for_it, asked)| {
                let witnesses = Witnesses::new(for_it, asked);
                acceptance.probability(Evidence::Match { length, witnesses })
            });
            let alone = acceptance.probability(matched(length));
            assert!(for_it > alone && for_it > divided && divided > against && alone > against);
        }
        assert_eq!(Witnesses::new(0, 0), Witnesses::None);
    }

    #[test]
    fn what_comes_up_is_soon_believed_over_what_was_expected_and_stays_a_probability() {
        let mut acceptance = Acceptance::of_matches();
        (0..1000).for_each(|_| acceptance.note(matched(3), true));
        assert!((0.9..1.0).contains(&acceptance.probability(matched(3))));
        (0..16).for_each(|_| acceptance.note(matched(3), false));
        assert!(acceptance.probability(matched(3)) < 0.5);
        (0..1000).for_each(|_| acceptance.note(matched(3), false));
        assert!((f64::MIN_POSITIVE..0.1).contains(&acceptance.probability(matched(3))));
        let others = Acceptance::of_matches().probability(matched(40));
        assert_eq!(
            acceptance.probability(matched(40)),
            others,
            "another matter"
        );
    }

    #[test]
    fn a_draft_model_is_believed_by_how_sure_it_is_until_it_is_known() {
        let mut acceptance = Acceptance::of_confidence();
        let believed = |acceptance: &Acceptance| -> Vec<f64> {
            let sure = [0.0, 0.29, 0.3, 0.5, 0.8, 0.9, 1.0].map(Evidence::Confidence);
            sure.map(|sure| acceptance.probability(sure)).to_vec()
        };
        for (found, expected) in believed(&acceptance)
            .into_iter()
            .zip([0.2, 0.2, 0.35, 0.5, 0.7, 0.9, 0.9])
        {
            assert!((found - expected).abs() < 1e-9);
        }
        (0..100).for_each(|_| acceptance.note(Evidence::Confidence(0.95), false));
        assert!(acceptance.probability(Evidence::Confidence(1.0)) < 0.06);
        assert_eq!(
            believed(&acceptance)[..5],
            believed(&Acceptance::of_confidence())[..5]
        );
        let nobody = acceptance.probability(Evidence::Confidence(f64::NAN));
        assert!((nobody - 0.2).abs() < 1e-9, "no number is no confidence");
    }
}
