//! How often guesses were right, by how much spoke for them: how much of what came before them had matched, or how sure a
//! draft model was.

/// What speaks for a guess.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Evidence {
    /// So many tokens before it had matched.
    Match(usize),
    /// The draft model gives it this probability.
    Confidence(f64),
}

impl Evidence {
    fn class(self) -> usize {
        match self {
            Self::Match(length) => {
                let doublings = length.max(2).ilog2() as usize;
                (doublings - 1).min(CLASSES - 1)
            }
            Self::Confidence(probability) => {
                let below = BOUNDS.iter().take_while(|&&bound| probability >= bound);
                below.count()
            }
        }
    }
}

const CLASSES: usize = 5;

/// Where classes of a draft model's confidence end. The last is what it has no doubt of: names, numbers, the rest of a word.
const BOUNDS: [f64; CLASSES - 1] = [0.3, 0.5, 0.7, 0.9];

/// Counts in which older ones fade: of guesses from one sequence's history, or of those of a draft model.
#[derive(Debug, Clone)]
pub(crate) struct Acceptance {
    prior: [f64; CLASSES],
    memory: f64,
    /// For each class: guesses that were right, and all.
    classes: [(f64, f64); CLASSES],
}

impl Acceptance {
    /// Part of guesses believed to be right after matches of 3, and of 4, 8, 16, 32 tokens or more, until more is known: a
    /// short match is as often chance as not, a long one is a copy. They count as [`Self::PRIOR_WEIGHT`] guesses, so a few
    /// of a sequence's own are heard over them.
    const OF_MATCHES: [f64; CLASSES] = [0.5, 0.65, 0.8, 0.9, 0.95];
    /// Part of a draft model's guesses believed to be right, by how sure it is: about what it says itself, less what it
    /// knows less than the model that it guesses for.
    const OF_CONFIDENCE: [f64; CLASSES] = [0.2, 0.35, 0.5, 0.7, 0.9];
    const PRIOR_WEIGHT: f64 = 3.0;

    /// Of matches in one sequence. Some sixteen guesses of a class are remembered, a few lines of text, so that a reply
    /// which turns from quoting to inventing is noticed soon.
    pub(crate) fn of_matches() -> Self {
        Self::new(Self::OF_MATCHES, 15.0 / 16.0)
    }

    /// Of a draft model in all sequences, of whose guesses some sixty are remembered: it agrees with the other model, or not.
    pub(crate) fn of_confidence() -> Self {
        Self::new(Self::OF_CONFIDENCE, 63.0 / 64.0)
    }

    fn new(prior: [f64; CLASSES], memory: f64) -> Self {
        Self {
            prior,
            memory,
            classes: [(0.0, 0.0); CLASSES],
        }
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

    #[test]
    fn longer_matches_are_believed_more_until_more_is_known() {
        let acceptance = Acceptance::of_matches();
        let believed: Vec<f64> = (3..80)
            .map(|length| acceptance.probability(Evidence::Match(length)))
            .collect();
        assert!(believed.is_sorted());
        for (length, expected) in [(3, 0.5), (4, 0.65), (7, 0.65), (79, 0.95)] {
            assert!((acceptance.probability(Evidence::Match(length)) - expected).abs() < 1e-9);
        }
    }

    #[test]
    fn what_comes_up_is_soon_believed_over_what_was_expected_and_stays_a_probability() {
        let mut acceptance = Acceptance::of_matches();
        (0..1000).for_each(|_| acceptance.note(Evidence::Match(3), true));
        assert!((0.9..1.0).contains(&acceptance.probability(Evidence::Match(3))));
        (0..16).for_each(|_| acceptance.note(Evidence::Match(3), false));
        assert!(acceptance.probability(Evidence::Match(3)) < 0.5);
        (0..1000).for_each(|_| acceptance.note(Evidence::Match(3), false));
        assert!((f64::MIN_POSITIVE..0.1).contains(&acceptance.probability(Evidence::Match(3))));
        let others = Acceptance::of_matches().probability(Evidence::Match(40));
        assert_eq!(
            acceptance.probability(Evidence::Match(40)),
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
