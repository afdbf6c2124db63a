//! What passes take by their rows, and how many guesses are worth it.
//!
//! * **P1** Guesses are computed only while what they have gained, and a hundredth of all time, pays for all of them
//!   being wrong: whatever the text, a reply takes no more than that longer than without, and a few passes.
//! * **P2** They are as many as make most tokens a second, as far as is known; none where that is hardly more.

use std::time::Duration;

/// What passes of one model take by their rows.
#[derive(Debug, Default)]
pub(crate) struct PassTimes {
    /// Seconds of passes of `index + 1` rows, where there have been any.
    seconds: Vec<Option<f64>>,
}

impl PassTimes {
    /// Weight of a new time that is longer than usual, and of one that is shorter: what holds a pass up comes and goes, and the
    /// first pass reads weights from the disk.
    const LONGER: f64 = 0.125;
    const SHORTER: f64 = 0.5;
    /// A pass that took longer than this many times what passes of its rows take was held up by something else, and counts as
    /// that many.
    const LONGEST: f64 = 2.0;
    /// What another row is believed to cost, in passes of one row, before any was seen.
    pub(crate) const ROW_COST: f64 = 0.1;

    /// Takes note of a pass of `rows` rows, and returns what it counts as, in seconds.
    pub(crate) fn observe(&mut self, rows: usize, time: Duration) -> f64 {
        if self.seconds.len() < rows {
            self.seconds.resize(rows, None);
        }
        let time = match self.seconds[rows - 1] {
            Some(usual) => time.as_secs_f64().min(Self::LONGEST * usual),
            None => time.as_secs_f64(),
        };
        let usual = self.seconds[rows - 1].get_or_insert(time);
        let weight = match time < *usual {
            true => Self::SHORTER,
            false => Self::LONGER,
        };
        *usual += (time - *usual) * weight;
        time
    }

    /// Whether a pass was ever seen.
    pub(crate) fn is_empty(&self) -> bool {
        self.seconds.is_empty()
    }

    /// Seconds that a pass of `rows` rows takes: as seen, between what was seen of fewer and of more rows, or a guess
    /// from what was seen of fewer.
    pub(crate) fn expected(&self, rows: usize) -> f64 {
        // No longer than one of more rows: the first pass of so many may have been a slow one.
        let known = |index: usize| {
            let seconds = self.seconds[index]?;
            let of_more = self.seconds[index..].iter().flatten().copied();
            Some((index + 1, of_more.fold(seconds, f64::min)))
        };
        let seen = self.seconds.len();
        let below = (0..rows.min(seen)).rev().find_map(known);
        let above = (rows - 1..seen).find_map(known);
        match (below, above) {
            (Some((_, seconds)), None) if below == above => seconds,
            (Some((fewer, less)), Some((more, most))) if more > fewer => {
                let part = (rows - fewer) as f64 / (more - fewer) as f64;
                less + (most - less).max(0.0) * part
            }
            (Some((_, seconds)), Some(_)) => seconds,
            (Some((fewer, seconds)), None) => {
                // What the last row cost is what the next ones do, if more than one row was seen.
                let fewest = (0..fewer - 1).find_map(known);
                let row = match fewest {
                    Some((first, time)) => (seconds - time) / (fewer - first) as f64,
                    None => Self::ROW_COST * seconds / fewer as f64,
                };
                seconds + row.max(0.0) * (rows - fewer) as f64
            }
            (None, Some((_, seconds))) => seconds,
            (None, None) => 0.0,
        }
    }
}

/// A step before a draft model has guessed for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StepRows {
    pub(crate) sequences: usize,
    /// Sequences that have guesses already.
    pub(crate) guessing: usize,
    /// Rows of all sequences, those of guesses included.
    pub(crate) rows: usize,
    /// Tokens that these are believed to give.
    pub(crate) tokens: f64,
    /// Tokens a second that there are believed to be if no draft model guesses.
    pub(crate) rate: f64,
    /// Rows that it has room for beside them.
    pub(crate) spare: usize,
}

/// Seconds that a draft model takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftCosts {
    /// For a token of every sequence.
    pub(crate) guessing: f64,
    /// Before it can guess: once, and of use to all that it guesses later.
    pub(crate) reading: f64,
}

/// How far a draft model guesses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Depth {
    /// Tokens for each sequence.
    pub(crate) guesses: usize,
    /// Tokens a second that are expected of that: a guess that gives fewer for what it takes is not worth it.
    pub(crate) rate: f64,
}

/// How long passes of a token for each of some sequences take.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    times: PassTimes,
    /// What guesses have gained over what they cost, in seconds.
    balance: f64,
    /// What those of a draft model have gained beyond the most of that: it may read with it. What is put by for guesses does
    /// not come here, so a draft model that is of no use costs no more than other guesses.
    savings: f64,
    /// Whether a draft model has guessed for the pass under way.
    drafted: bool,
    /// Passes that are put by at the beginning for a draft model to be tried with.
    to_try: f64,
    /// Whether there has been a pass without guesses, from which on there is a balance.
    begun: bool,
    /// Passes since the last one without guesses, and tokens that they gave for each sequence.
    since_plain: (usize, f64),
    /// Whether everything is computed that can be guessed, whatever it takes.
    #[cfg(test)]
    eager: bool,
}

impl Pace {
    /// One that has all guesses computed: what becomes of them does not depend on time then.
    #[cfg(test)]
    pub(crate) fn eager() -> Self {
        Self {
            eager: true,
            ..Self::default()
        }
    }

    /// Rows of a pass beyond which nothing is guessed: their weights are read for so many that one more costs as much as
    /// any other.
    const MOST_ROWS: usize = 64;
    /// What is put by for guesses with each pass without any.
    const GRANT: f64 = 0.01;
    /// The most that is put by, in passes, and what there is at the beginning. The first is what a reply can lose of what
    /// guesses gained it; the second, what a short one can lose at all: half a pass in fifty tokens is a hundredth.
    const MOST_BALANCE: f64 = 4.0;
    const FIRST_BALANCE: f64 = 0.5;
    /// What a draft model is tried with beside that: it has to read something before it can guess.
    const TO_TRY: f64 = 1.0;
    /// The most that is saved beyond that, in passes: what a draft model takes to read a prompt of a few thousand tokens.
    const MOST_SAVINGS: f64 = 32.0;
    /// Passes with guesses after which there is one without, and where they give so many tokens each that it costs more.
    const UNSEEN: usize = 8;
    const UNSEEN_IF_GOOD: usize = 64;
    const GOOD: f64 = 1.4;
    /// By how much guesses must promise to be better: less is within what is not known.
    const LEAST_GAIN: f64 = 1.05;
    /// How much longer a pass may take for guesses of some while others in it have none: they only wait.
    const BYSTANDERS: f64 = 1.25;

    /// Takes note of a pass of `rows` rows for `sequences` sequences that gave `tokens` tokens in `time`.
    pub(crate) fn observe(&mut self, sequences: usize, rows: usize, tokens: usize, time: Duration) {
        if sequences == 0 || rows > Self::MOST_ROWS {
            return;
        }
        let time = self.times.observe(rows, time);
        let plain = self.times.expected(sequences);
        self.since_plain = match (rows == sequences, self.since_plain) {
            (true, _) => (0, 0.0),
            (false, (passes, given)) => (passes + 1, given + tokens as f64 / sequences as f64),
        };
        if rows == sequences {
            let first = match std::mem::replace(&mut self.begun, true) {
                true => Self::GRANT * time,
                false => (Self::FIRST_BALANCE + self.to_try) * plain,
            };
            self.balance += first;
        } else {
            self.balance += plain * tokens as f64 / sequences as f64 - time;
        }
        let most = Self::MOST_BALANCE * plain;
        if std::mem::take(&mut self.drafted) {
            self.savings += (self.balance - most).max(0.0);
            self.savings = self.savings.min(Self::MOST_SAVINGS * plain);
        }
        self.balance = self.balance.min(most);
    }

    /// From now on there is a draft model.
    pub(crate) fn with_draft_model(self) -> Self {
        Self {
            to_try: Self::TO_TRY,
            ..self
        }
    }

    /// Pays `seconds` that a draft model has taken for guesses, before any of them is computed.
    pub(crate) fn spend(&mut self, seconds: f64) {
        self.balance -= seconds;
        self.drafted = true;
    }

    /// Pays `seconds` that a draft model has read for: from savings as far as there are some.
    pub(crate) fn invest(&mut self, seconds: f64) {
        let saved = self.savings.min(seconds);
        self.savings -= saved;
        self.balance -= seconds - saved;
    }

    /// Seconds that a draft model may read for: half of what there is, so that what it guesses then can be computed.
    pub(crate) fn funds(&self) -> f64 {
        match self.is_eager() {
            true => f64::INFINITY,
            false => (self.savings + self.balance / 2.0).max(0.0),
        }
    }

    /// Seconds that a pass of `rows` rows takes, as far as is known.
    pub(crate) fn expected(&self, rows: usize) -> f64 {
        self.times.expected(rows)
    }

    /// Whether everything is computed that can be guessed.
    pub(crate) fn is_eager(&self) -> bool {
        #[cfg(test)]
        return self.eager;
        #[cfg(not(test))]
        false
    }

    /// A step of a token for each of `sequences` and, of their own guesses, right as often as `likely`, so many of each as are
    /// `kept`, where a draft model may guess for the others; without it, as many as `counts` says. It may have `most` rows.
    pub(crate) fn step(
        &self,
        (sequences, most): (usize, usize),
        likely: &[Vec<f64>],
        (kept, counts): (&[usize], &[usize]),
    ) -> StepRows {
        let rows_and_tokens = |counts: &[usize]| {
            let right = likely.iter().zip(counts);
            let right = right.map(|(likely, &count)| likely[..count].iter().sum::<f64>());
            let rows = sequences + counts.iter().sum::<usize>();
            (rows, sequences as f64 + right.sum::<f64>())
        };
        let (rows_otherwise, tokens_otherwise) = rows_and_tokens(counts);
        let (rows, tokens) = rows_and_tokens(kept);
        StepRows {
            sequences,
            guessing: kept.iter().filter(|count| **count > 0).count(),
            rows,
            tokens,
            rate: tokens_otherwise / self.expected(rows_otherwise.max(1)),
            spare: most.saturating_sub(rows),
        }
    }

    /// How many tokens a draft model guesses for each of `drafting` sequences, of `most`, where it takes `costs` and a guess is
    /// right as often as `likely`; and what a guess after the first must be worth.
    pub(crate) fn depth(
        &self,
        step: StepRows,
        (drafting, likely): (usize, f64),
        costs: DraftCosts,
        most: usize,
    ) -> Depth {
        if self.is_eager() {
            return Depth {
                guesses: most.min(step.spare / drafting.max(1)),
                rate: 0.0,
            };
        }
        let none = Depth {
            guesses: 0,
            rate: 0.0,
        };
        if !self.begun || step.sequences == 0 || drafting == 0 || self.forgets_plain() {
            return none;
        }
        let plain = self.expected(step.sequences);
        let others = step.sequences > drafting + step.guessing;
        let longest = self.longest(plain, others) - (costs.reading - self.savings).max(0.0);
        let rows = self.most_rows().saturating_sub(step.rows).min(step.spare);
        let mut depth = Depth {
            rate: Self::LEAST_GAIN * step.rate,
            ..none
        };
        let (mut tokens, mut together) = (step.tokens, 1.0);
        for guesses in 1..=most.min(rows / drafting) {
            together *= likely;
            tokens += together * drafting as f64;
            let time =
                self.expected(step.rows + guesses * drafting) + guesses as f64 * costs.guessing;
            if time <= longest && tokens / time > depth.rate {
                depth = Depth {
                    guesses,
                    rate: tokens / time,
                };
            }
        }
        depth
    }

    /// Whether what a pass without guesses takes has to be seen again: else one that was slow, or other times, would have
    /// guesses computed for ever that gain nothing.
    fn forgets_plain(&self) -> bool {
        let (passes, given) = self.since_plain;
        let least = match given < Self::GOOD * passes as f64 {
            true => Self::UNSEEN,
            false => Self::UNSEEN_IF_GOOD,
        };
        passes >= least
    }

    /// The longest that a pass may take that is all wrong.
    fn longest(&self, plain: f64, bystanders: bool) -> f64 {
        let covered = plain + self.balance;
        match bystanders {
            true => covered.min(plain * Self::BYSTANDERS),
            false => covered,
        }
    }

    /// Rows that a pass may have: what more take than were ever seen is hardly known, so they are tried step by step.
    fn most_rows(&self) -> usize {
        Self::MOST_ROWS.min(2 * self.times.seconds.len())
    }

    /// How many guesses each of some sequences has computed, of `likely`: how likely each guess is right together with
    /// those before it. The pass has `sequences` rows without any, and room for `spare` more.
    pub(crate) fn allot(&self, likely: &[Vec<f64>], sequences: usize, spare: usize) -> Vec<usize> {
        let mut counts = vec![0; likely.len()];
        #[cfg(test)]
        if self.eager {
            let mut left = spare;
            for (count, likely) in counts.iter_mut().zip(likely) {
                *count = likely.len().min(left);
                left -= *count;
            }
            return counts;
        }
        if !self.begun || sequences == 0 || self.forgets_plain() {
            return counts;
        }
        let guesses = likely.iter().enumerate();
        let mut guesses: Vec<(usize, f64)> = guesses
            .flat_map(|(index, likely)| likely.iter().map(move |&likely| (index, likely)))
            .collect();
        // Those of one sequence stay in their order: none is likelier than the one before it.
        guesses.sort_by(|a, b| b.1.total_cmp(&a.1));
        guesses.truncate(spare.min(self.most_rows().saturating_sub(sequences)));
        for &(index, _) in &guesses[..self.worth(&guesses, sequences, likely)] {
            counts[index] += 1;
        }
        counts
    }

    /// How many of `guesses`, the likeliest first, make most tokens a second within what is put by.
    fn worth(&self, guesses: &[(usize, f64)], sequences: usize, likely: &[Vec<f64>]) -> usize {
        let plain = self.expected(sequences);
        let bystanders = sequences > likely.iter().filter(|likely| !likely.is_empty()).count();
        let longest = self.longest(plain, bystanders);
        let (mut worth, mut tokens) = (0, sequences as f64);
        let mut best = Self::LEAST_GAIN * tokens / plain;
        for (index, &(_, likely)) in guesses.iter().enumerate() {
            let time = self.expected(sequences + index + 1);
            tokens += likely;
            if time <= longest && tokens / time > best {
                (worth, best) = (index + 1, tokens / time);
            }
        }
        worth
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A pass of `rows` rows where another row costs `row` of the first.
    fn time(rows: usize, row: f64) -> Duration {
        Duration::from_secs_f64(0.01 * (1.0 + row * (rows - 1) as f64))
    }

    /// A reply whose guesses are right for the first `right` of every eight, and believed to be right at `likely`. Returns
    /// the time it takes, in passes without guesses, and the time without.
    fn reply(pace: &mut Pace, row: f64, likely: f64, right: impl Fn(usize) -> usize) -> (f64, f64) {
        let (mut taken, mut tokens, mut passes) = (0.0, 0, 0);
        while tokens < 2000 {
            let chances = (1..=7).map(|place| likely.powi(place)).collect();
            let guessed = pace.allot(&[chances], 1, 63)[0];
            let given = 1 + guessed.min(right(passes));
            let time = time(1 + guessed, row);
            pace.observe(1, 1 + guessed, given, time);
            (taken, tokens, passes) = (taken + time.as_secs_f64(), tokens + given, passes + 1);
        }
        (taken / 0.01, tokens as f64)
    }

    #[test]
    fn right_guesses_are_made_as_many_as_make_most_of_a_pass() {
        let (taken, tokens) = reply(&mut Pace::default(), 0.1, 0.9, |_| 7);
        assert!(taken < 0.25 * tokens, "{taken} for {tokens}");
    }

    #[test]
    fn wrong_guesses_cost_what_is_put_by_and_no_more() {
        for row in [0.01, 0.1, 0.3, 1.0] {
            let (taken, tokens) = reply(&mut Pace::default(), row, 0.9, |_| 0);
            assert!(taken < 1.012 * tokens, "{row}: {taken} for {tokens}");
        }
    }

    #[test]
    fn rows_that_cost_what_tokens_do_are_not_guessed() {
        let mut pace = Pace::default();
        pace.observe(1, 1, 1, time(1, 1.0));
        pace.observe(1, 2, 1, time(2, 1.0));
        (0..1000).for_each(|_| pace.observe(1, 1, 1, time(1, 1.0)));
        assert_eq!(pace.allot(&[vec![0.99; 7]], 1, 63), [0]);
    }

    #[test]
    fn a_step_gives_a_token_for_each_sequence_and_for_each_computed_guess_as_often_as_it_is_right()
    {
        let mut pace = Pace::default();
        pace.observe(4, 4, 4, time(4, 0.1));
        pace.observe(4, 7, 4, time(7, 0.1));
        let seconds = |rows| time(rows, 0.1).as_secs_f64();
        let likely = [vec![0.5, 0.25, 0.125], vec![0.75], vec![], vec![0.5]];
        let counts = [2, 0, 0, 1];
        let guessing = StepRows {
            sequences: 4,
            guessing: 2,
            rows: 7,
            tokens: 5.25,
            rate: 5.25 / seconds(7),
            spare: 3,
        };
        assert_eq!(pace.step((4, 10), &likely, (&counts, &counts)), guessing);
        assert_eq!(pace.step((4, 6), &likely, (&counts, &counts)).spare, 0);
        let plain = StepRows {
            sequences: 4,
            guessing: 0,
            rows: 4,
            tokens: 4.0,
            rate: 4.0 / seconds(4),
            spare: 6,
        };
        assert_eq!(pace.step((4, 10), &likely, (&[0; 4], &[0; 4])), plain);
        let asked = StepRows {
            rate: guessing.rate,
            ..plain
        };
        assert_eq!(pace.step((4, 10), &likely, (&[0; 4], &counts)), asked);
    }

    #[test]
    fn a_draft_model_guesses_only_where_that_gives_more_than_what_there_is_without_it() {
        let mut pace = Pace::default();
        (0..1000).for_each(|_| pace.observe(1, 1, 1, time(1, 0.1)));
        pace.observe(1, 8, 8, time(8, 0.1));
        let costs = DraftCosts {
            guessing: 0.001,
            reading: 0.0,
        };
        let own = [vec![0.5]];
        let nothing_else = pace.step((1, 9), &own, (&[0], &[0]));
        let own_instead = pace.step((1, 9), &own, (&[0], &[1]));
        let guesses = |step, likely| pace.depth(step, (1, likely), costs, 7).guesses;
        assert!(guesses(nothing_else, 0.5) > 0);
        assert_eq!(
            guesses(own_instead, 0.5),
            0,
            "they take time and are no likelier"
        );
        assert!(guesses(own_instead, 0.9) > 0);
    }

    #[test]
    fn a_first_pass_that_was_slow_does_not_have_guesses_computed_for_ever() {
        let mut pace = Pace::default();
        pace.observe(1, 1, 1, time(3, 0.3));
        let (mut passes, mut rows) = (0, 0);
        for _ in 0..1000 {
            let guessed = pace.allot(&[vec![0.3]], 1, 63)[0];
            (passes, rows) = (passes + 1, rows + guessed);
            pace.observe(1, 1 + guessed, 1, time(1 + guessed, 0.3));
        }
        assert!(rows < passes / 10, "{rows} guesses of {passes} passes");
    }

    #[test]
    fn wrong_guesses_gain_nothing_over_a_pass_that_was_slow() {
        let mut pace = Pace::default();
        pace.observe(1, 1, 1, time(3, 0.3));
        let balance = pace.balance;
        (0..Pace::UNSEEN).for_each(|_| pace.observe(1, 2, 1, time(2, 0.3)));
        assert!(pace.balance <= balance && pace.forgets_plain());
        assert_eq!(pace.allot(&[vec![0.9]], 1, 63), [0]);
        pace.observe(1, 1, 1, time(1, 0.3));
        assert!(!pace.forgets_plain());
    }

    #[test]
    fn a_pass_takes_no_longer_than_one_of_more_rows() {
        let mut times = PassTimes::default();
        times.observe(1, time(9, 0.1));
        times.observe(4, time(4, 0.1));
        assert_eq!(times.expected(1), times.expected(4));
        assert_eq!(times.expected(2), times.expected(4));
    }

    #[test]
    fn a_full_batch_guesses_nothing_and_what_there_is_goes_to_the_likeliest() {
        let mut pace = Pace::default();
        let (long, short) = (vec![0.9, 0.8, 0.7, 0.6], vec![0.5, 0.1]);
        assert_eq!(
            pace.allot(std::slice::from_ref(&long), 1, 9),
            [0],
            "nothing is known"
        );
        pace.observe(2, 2, 2, time(2, 0.01));
        pace.observe(2, 8, 8, time(8, 0.01));
        assert_eq!(pace.allot(&[long.clone(), short.clone()], 2, 0), [0, 0]);
        assert_eq!(pace.allot(&[short.clone(), long.clone()], 2, 3), [0, 3]);
        assert_eq!(pace.allot(&[short, long], 2, 5), [1, 4]);
    }

    #[test]
    fn sequences_that_have_no_guesses_wait_a_quarter_longer_at_most() {
        let mut pace = Pace::default();
        (0..1000).for_each(|_| pace.observe(2, 2, 2, time(2, 0.1)));
        pace.observe(2, 8, 8, time(8, 0.1));
        let guesses = vec![0.99; 6];
        assert_eq!(
            pace.allot(&[guesses.clone(), guesses.clone()], 2, 6),
            [6, 0]
        );
        let beside = pace.allot(&[guesses, Vec::new()], 2, 6)[0];
        assert!((1..=2).contains(&beside), "{beside}");
    }

    #[test]
    fn one_pass_that_was_held_up_is_no_measure() {
        let mut pace = Pace::default();
        pace.observe(1, 1, 1, time(1, 0.1));
        pace.observe(1, 1, 1, Duration::from_secs(60));
        assert!(pace.expected(1) < 0.012);
    }

    proptest! {
        /// P1, whatever is right and whatever is believed.
        #[test]
        fn a_reply_never_takes_more_than_a_hundredth_and_a_few_passes_longer(
            row in 0.0f64..1.5, likely in 0.0f64..1.0, pattern in prop::collection::vec(0usize..8, 1..40),
        ) {
            let mut pace = Pace::default();
            let right = |pass: usize| pattern[pass / 16 % pattern.len()];
            let (taken, tokens) = reply(&mut pace, row, likely, right);
            prop_assert!(taken <= 1.01 * tokens + 6.0, "{} for {}", taken, tokens);
        }

        #[test]
        fn every_number_of_rows_is_expected_to_take_some_time(
            seen in prop::collection::vec((1usize..20, 1u64..1000), 1..10),
        ) {
            let mut pace = Pace::default();
            for (rows, milliseconds) in seen {
                pace.observe(1, rows, 1, Duration::from_millis(milliseconds));
                let expected: Vec<f64> = (1..30).map(|rows| pace.expected(rows)).collect();
                prop_assert!(expected.iter().all(|time| *time > 0.0 && time.is_finite()));
            }
        }
    }
}
