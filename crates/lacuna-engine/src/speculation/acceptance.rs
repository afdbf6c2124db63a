//! How often guesses were right, by how much of what came before them had matched.

/// Counts of one sequence, in which older ones fade.
#[derive(Debug, Clone)]
pub(crate) struct Acceptance {
    /// For each class of lengths: guesses that were right, and all.
    classes: [(f64, f64); Self::PRIOR.len()],
}

impl Acceptance {
    /// Part of guesses believed to be right after matches of 3, and of 4, 8, 16, 32 tokens or more, until more is known: a
    /// short match is as often chance as not, a long one is a copy. They count as [`Self::PRIOR_WEIGHT`] guesses, so a few
    /// of a sequence's own are heard over them.
    const PRIOR: [f64; 5] = [0.5, 0.65, 0.8, 0.9, 0.95];
    const PRIOR_WEIGHT: f64 = 3.0;
    /// What a count keeps of itself with each new guess of its class: some sixteen are remembered, a few lines of text, so
    /// that a reply which turns from quoting to inventing is noticed soon.
    const MEMORY: f64 = 15.0 / 16.0;

    fn class(length: usize) -> usize {
        let doublings = length.max(2).ilog2() as usize;
        (doublings - 1).min(Self::PRIOR.len() - 1)
    }

    /// How likely a guess is right that follows a match of `length` tokens: more than 0 and less than 1.
    pub(crate) fn probability(&self, length: usize) -> f64 {
        let class = Self::class(length);
        let (right, all) = self.classes[class];
        let prior = Self::PRIOR[class];
        (right + prior * Self::PRIOR_WEIGHT) / (all + Self::PRIOR_WEIGHT)
    }

    /// A guess after a match of `length` tokens was `right` or not.
    pub(crate) fn note(&mut self, length: usize, right: bool) {
        let (rights, all) = &mut self.classes[Self::class(length)];
        *rights = *rights * Self::MEMORY + f64::from(u8::from(right));
        *all = *all * Self::MEMORY + 1.0;
    }
}

impl Default for Acceptance {
    fn default() -> Self {
        Self {
            classes: [(0.0, 0.0); Self::PRIOR.len()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_matches_are_believed_more_until_more_is_known() {
        let acceptance = Acceptance::default();
        let believed: Vec<f64> = (3..80)
            .map(|length| acceptance.probability(length))
            .collect();
        assert!(believed.is_sorted());
        for (length, expected) in [(3, 0.5), (4, 0.65), (7, 0.65), (79, 0.95)] {
            assert!((acceptance.probability(length) - expected).abs() < 1e-9);
        }
    }

    #[test]
    fn what_comes_up_is_soon_believed_over_what_was_expected_and_stays_a_probability() {
        let mut acceptance = Acceptance::default();
        (0..1000).for_each(|_| acceptance.note(3, true));
        assert!((0.9..1.0).contains(&acceptance.probability(3)));
        (0..16).for_each(|_| acceptance.note(3, false));
        assert!(acceptance.probability(3) < 0.5);
        (0..1000).for_each(|_| acceptance.note(3, false));
        assert!((f64::MIN_POSITIVE..0.1).contains(&acceptance.probability(3)));
        let others = Acceptance::default().probability(40);
        assert_eq!(acceptance.probability(40), others, "another matter");
    }
}
