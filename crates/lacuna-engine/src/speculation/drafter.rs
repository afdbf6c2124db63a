//! Guesses of a draft model, or of a model's own head: of all sequences together, a pass for each token further, and none where that does not pay.
//!
//! ```text
//! tokens     [ ... ............. | pending ]
//! draft rows       [ from ... | fed ]                 as of the last step
//! settled          [ from .. ]                        guesses that were wrong are truncated
//! read             [ from .......... ] pending        what came in the meantime, once there is time for it
//! guessed          [ from .......... pending d1 d2 ]  d3 is guessed and not fed
//! ```
//!
//! A draft has rows of the end of a sequence, numbered from 0: as far back as its context and what has been put by for
//! reading reach, and further as guesses gain more. Its rows are in the pool of the model that it guesses for, and under its
//! limit. They are the first that are given up when memory is short; the sequence goes on without guesses of the model then.
//!
//! A head reads each token with what the model has made of the one before it, so it can read those alone that the model has
//! just computed: of a prompt the last ones, and nothing of what came from a shared prefix, a file or the swap file. Rows of
//! guesses that were right are made anew, from the model's features instead of the head's own.
//!
//! An assistant reads nothing and keeps no rows: it guesses over the rows that the sequence itself has, which are there whatever they
//! came from, from the features of the last token.
//!
//! What is guessed is the draft's likeliest token, however the model draws its own: of all that could be guessed that one is
//! right most often.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use lacuna_kv::{KvError, Sequence};
use lacuna_models::{LogitRows, Segment};

use super::acceptance::{Acceptance, Evidence};
use super::pace::{Depth, DraftCosts, Pace, PassTimes, StepRows};
use super::{Speculator, likely_together};
use crate::row;
use crate::runner::ModelRunner;

/// What a draft model has of one sequence. The drafter knows of it as long as it is there.
#[derive(Debug, Clone, Default)]
pub(crate) struct Draft(Arc<Mutex<State>>);

#[derive(Debug, Default)]
enum State {
    /// Nothing yet.
    #[default]
    Unread,
    Reading(Box<Rows>),
    /// Nothing any more: others needed the memory.
    GivenUp,
}

#[derive(Debug)]
struct Rows {
    sequence: Sequence,
    /// The token that the first row is of.
    from: usize,
    /// The guesses that the last rows are of.
    fed: Vec<u32>,
}

impl Draft {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes on with other tokens, of which the first `common` are those there were.
    pub(crate) fn rewrite(&self, common: usize) {
        let mut state = self.lock();
        if let State::Reading(rows) = &mut *state {
            let known = rows.known().min(common.saturating_sub(rows.from));
            let kept = known > 0 && rows.truncate(known).is_ok();
            if !kept {
                *state = State::Unread;
            }
        }
    }

    /// A look at its rows, for those who check where pages are.
    #[cfg(test)]
    pub(crate) fn look(&self) -> Look<'_> {
        Look(self.lock())
    }
}

/// A draft while it is looked at.
#[cfg(test)]
pub(crate) struct Look<'a>(MutexGuard<'a, State>);

#[cfg(test)]
impl Look<'_> {
    /// Its rows, if it has some.
    pub(crate) fn sequence(&self) -> Option<&Sequence> {
        match &*self.0 {
            State::Reading(rows) => Some(&rows.sequence),
            State::Unread | State::GivenUp => None,
        }
    }
}

impl Rows {
    /// Rows of tokens that were not guessed.
    fn known(&self) -> usize {
        self.sequence.len() - self.fed.len()
    }

    fn truncate(&mut self, rows: usize) -> Result<(), KvError> {
        self.fed.clear();
        self.sequence.truncate(rows)
    }

    /// Keeps the rows of guesses that have become tokens, unless they are of a head that `hears` better of these now. At least the last of `tokens` stays to be read: it has a row
    /// already where the pass that was guessed for has failed and comes once more.
    fn settle(&mut self, tokens: &[u32], hears: bool) -> Result<(), KvError> {
        let known = self.known();
        let after = tokens.get(self.from + known..).filter(|_| !hears);
        let after = after.unwrap_or_default();
        let right = self.fed.iter().zip(after).take_while(|(a, b)| a == b);
        let before_last = tokens.len().saturating_sub(self.from + 1);
        self.truncate((known + right.count()).min(before_last))
    }

    /// Tokens that have no rows; the last of `tokens` is one of them.
    fn unread<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        &tokens[self.from + self.sequence.len()..]
    }
}

/// A sequence that can do with guesses.
pub(crate) struct Wish<'a> {
    /// All its tokens. The last one is pending.
    pub(crate) tokens: &'a [u32],
    pub(crate) draft: &'a Draft,
    pub(crate) speculator: &'a mut Speculator,
    /// Its rows, which a head may read that keeps none. Nothing of them is prepared.
    pub(crate) sequence: &'a mut Sequence,
    /// Guesses that it has room for: one at least.
    pub(crate) most: usize,
}

/// A draft model, and what is known of it.
pub(crate) struct Drafter {
    runner: Box<dyn ModelRunner>,
    most: usize,
    /// Ids that both vocabularies have.
    vocabulary: u32,
    /// Tokens of each sequence that are read with its first guess at most.
    with_guess: usize,
    acceptance: Acceptance,
    /// How likely its guesses were said to be right, on average of late.
    likely: f64,
    /// What a token of each of some sequences takes.
    times: PassTimes,
    /// Seconds for a token that is read among others.
    reading: Option<f64>,
    /// What a pass takes of one of the model that it guesses for, by their weights.
    ratio: f64,
    /// All drafts that may have rows, the latest last.
    drafts: Vec<Weak<Mutex<State>>>,
    /// What the head is given with the tokens of a pass, if it is one.
    given: Vec<f32>,
}

/// A wish while it is guessed for.
struct Run<'a, 'b> {
    wish: &'a mut Wish<'b>,
    state: MutexGuard<'b, State>,
    /// Whether it is guessed for over its own rows.
    borrows: bool,
    /// Tokens, and how sure the draft model is of each.
    guesses: Vec<(u32, f64)>,
    /// The last of them, and what a head has made of the token before it.
    last: [u32; 1],
    features: Vec<f32>,
    /// How likely all of them are right together.
    together: f64,
    /// Tokens that are read in the pass under way.
    reads: usize,
    goes_on: bool,
}

impl Drafter {
    /// Of all guesses so many are believed to be right before there were any, and again some time after there were none.
    const LIKELY: f64 = 0.6;
    /// Weight of a new guess in how likely they are; and of the prior in each step without any, so that a draft that was no
    /// good is tried again after a few hundred tokens.
    const NEW: f64 = 1.0 / 32.0;
    const FADING: f64 = 1.0 / 256.0;
    /// Tokens that are read with the first guess at most: a pass of so few takes hardly longer than one of one.
    const READ_WITH_GUESSES: usize = 8;
    /// Fewer than this are not read apart from that, unless they are all: weights are read for each pass.
    const LEAST_PIECE: usize = 32;
    /// Less than this is not begun with: it would know nothing of the text.
    const LEAST_READ: usize = 16;

    /// One of `most` guesses in a row, for a model with `vocabulary` tokens, of which a pass takes `ratio` of what one of the
    /// model's does.
    pub(crate) fn new(
        runner: Box<dyn ModelRunner>,
        most: usize,
        vocabulary: usize,
        ratio: f64,
    ) -> Self {
        let vocabulary = vocabulary.min(runner.vocabulary());
        let limits = runner.batch_limits();
        let with_guess = limits.tokens / limits.logit_rows.max(1);
        Self {
            with_guess: with_guess.clamp(1, Self::READ_WITH_GUESSES),
            vocabulary: u32::try_from(vocabulary).unwrap_or(u32::MAX),
            runner,
            most,
            acceptance: Acceptance::of_confidence(),
            likely: Self::LIKELY,
            times: PassTimes::default(),
            reading: None,
            ratio,
            drafts: Vec::new(),
            given: Vec::new(),
        }
    }

    /// Elements of the features that it takes with each token, if it is a head.
    pub(crate) fn features_width(&self) -> Option<usize> {
        self.runner.features_width()
    }

    /// Tokens guessed for one pass at most.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// How many of the `count` guesses that a sequence would have computed of its own, right as often as `likely`, it keeps
    /// without asking for others: all, or none where those of the draft have been likelier of late.
    pub(crate) fn kept(&self, likely: &[f64], count: usize) -> usize {
        match likely.first() {
            Some(&first) if first >= self.likely => count,
            _ => 0,
        }
    }

    /// Whether activations of earlier passes are still in memory.
    pub(crate) fn holds_activations(&self) -> bool {
        self.runner.holds_activations()
    }

    /// Gives the memory of activations back to the system, until the next pass.
    pub(crate) fn give_back_activations(&mut self) {
        self.runner.give_back_activations();
    }

    /// All drafts that there are.
    pub(crate) fn drafts(&self) -> impl Iterator<Item = Draft> {
        self.drafts.iter().filter_map(Weak::upgrade).map(Draft)
    }

    /// Bytes of KV pages behind its rows.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = self.drafts().map(|draft| match &*draft.lock() {
            State::Reading(rows) => rows.sequence.report().committed_bytes as u64,
            State::Unread | State::GivenUp => 0,
        });
        bytes.sum()
    }

    /// Gives the rows of one sequence back, of that which began last. Returns whether there was one with rows.
    pub(crate) fn give_up_one(&mut self) -> bool {
        while let Some(draft) = self.drafts.pop() {
            let Some(draft) = draft.upgrade().map(Draft) else {
                continue;
            };
            let given = std::mem::replace(&mut *draft.lock(), State::GivenUp);
            if matches!(given, State::Reading(_)) {
                return true;
            }
        }
        false
    }

    /// Guesses for `wishes`, those that pay, and has their speculators hold the guesses. Returns how likely each of a
    /// wish's is right together with those before it: nothing where nothing is guessed.
    pub(crate) fn guess(
        &mut self,
        wishes: &mut [Wish<'_>],
        step: StepRows,
        pace: &mut Pace,
        now: &dyn Fn() -> Instant,
    ) -> Vec<Vec<f64>> {
        self.learn(wishes);
        let mut likely = vec![Vec::new(); wishes.len()];
        // Whether it would pay is asked before anything is read for it.
        let most = wishes.iter().map(|wish| wish.most).max();
        let most = most.unwrap_or(0).min(self.most);
        let asked = (
            wishes.len().min(self.runner.batch_limits().logit_rows),
            self.likely,
        );
        let costs = DraftCosts {
            guessing: self.pass_seconds(asked.0, pace),
            reading: 0.0,
        };
        if pace.depth(step, asked, costs, most).guesses == 0 {
            self.likely += (Self::LIKELY - self.likely).max(0.0) * Self::FADING;
            return likely;
        }
        let mut places = Vec::new();
        let mut runs = Vec::new();
        for (place, wish) in wishes.iter_mut().enumerate() {
            if runs.len() < asked.0
                && let Some(run) = self.begin(wish, pace.funds() / asked.0 as f64, pace)
            {
                places.push(place);
                runs.push(run);
            }
        }
        let begun = now();
        let mut depth = self.depth(&runs, step, pace, most);
        if depth.guesses > 0 {
            self.read(&mut runs, f64::INFINITY, now, pace);
        } else {
            // What there is goes to reading, so that some of them can be guessed for, and in the end all.
            self.read(&mut runs, pace.funds(), now, pace);
        }
        pace.invest((now() - begun).as_secs_f64());
        let with_guess = self.with_guess;
        for run in &mut runs {
            run.goes_on &= run.tokens_to_read(with_guess) == 0;
        }
        if depth.guesses == 0 {
            depth = self.depth(&runs, step, pace, most);
        }
        let begun = now();
        self.extend(&mut runs, depth, now, pace);
        pace.spend((now() - begun).as_secs_f64());
        for (run, place) in runs.into_iter().zip(places) {
            likely[place] = self.hand_over(run);
        }
        likely
    }

    /// How far it pays to guess for those of `runs` that go on, with what has to be read before.
    fn depth(&self, runs: &[Run<'_, '_>], step: StepRows, pace: &Pace, most: usize) -> Depth {
        let drafting = runs.iter().filter(|run| run.goes_on).count();
        let costs = DraftCosts {
            guessing: self.pass_seconds(drafting, pace),
            reading: self.reading_seconds(runs, pace),
        };
        pace.depth(step, (drafting, self.likely), costs, most)
    }

    /// Takes note of what became of earlier guesses.
    fn learn(&mut self, wishes: &mut [Wish<'_>]) {
        for wish in wishes {
            for (evidence, right) in wish.speculator.judged.drain(..) {
                self.acceptance.note(evidence, right);
            }
        }
    }

    /// Seconds that a token for each of `sequences` takes, as far as is known.
    fn pass_seconds(&self, sequences: usize, pace: &Pace) -> f64 {
        match self.times.is_empty() {
            true => self.ratio * pace.expected(sequences.max(1)),
            false => self.times.expected(sequences.max(1)),
        }
    }

    /// Seconds that a token takes which is read among others; before any was, half of what a row costs where there are few.
    fn token_seconds(&self, pace: &Pace) -> f64 {
        let guess = || PassTimes::ROW_COST / 2.0 * self.pass_seconds(1, pace);
        self.reading.unwrap_or_else(guess)
    }

    /// Seconds that it takes until all `runs` can be guessed for.
    fn reading_seconds(&self, runs: &[Run<'_, '_>], pace: &Pace) -> f64 {
        let tokens = runs.iter().map(|run| run.tokens_to_read(self.with_guess));
        match tokens.sum::<usize>() {
            0 => 0.0,
            tokens => tokens as f64 * self.token_seconds(pace) + self.pass_seconds(1, pace),
        }
    }

    /// Makes a wish ready to be read for: its wrong guesses are gone, and where it begins is chosen, by what can be read for
    /// `funds` seconds. None of what cannot be guessed for.
    fn begin<'a, 'b>(
        &mut self,
        wish: &'a mut Wish<'b>,
        funds: f64,
        pace: &Pace,
    ) -> Option<Run<'a, 'b>> {
        const LONG: usize = 2 * Drafter::LEAST_PIECE;
        let tokens = wish.tokens;
        // What the draft has no token for is not read, nor what comes before it.
        let unknown = tokens.iter().rposition(|&token| token >= self.vocabulary);
        let mut first = unknown.map_or(0, |last| last + 1);
        let hears = self.features_width().is_some();
        if hears {
            let readable = wish.speculator.readable();
            if !readable.contains(&tokens.len().saturating_sub(1)) {
                return None;
            }
            first = first.max(readable.start);
        }
        let draft = wish.draft;
        if self.runner.borrows_rows() {
            // What was read before is no matter: rows are those of all tokens before the pending one.
            let (&pending, before) = tokens.split_last()?;
            let (rows, prepared) = (wish.sequence.len(), wish.sequence.prepared());
            return (rows == before.len() && prepared == 0).then(|| Run {
                state: draft.lock(),
                borrows: true,
                guesses: Vec::new(),
                last: [pending],
                features: wish.speculator.features_before(rows..rows + 1).to_vec(),
                together: 1.0,
                reads: 0,
                goes_on: true,
                wish,
            });
        }
        let mut state = draft.lock();
        let settled = match &mut *state {
            State::GivenUp => return None,
            State::Unread => false,
            State::Reading(rows) => {
                let fits = tokens.len() - rows.from + self.most <= rows.sequence.capacity();
                // What has fallen behind is sooner begun again near the end.
                let behind = |rows: &Rows| rows.unread(tokens).len() > rows.known().max(LONG);
                let settled = fits && rows.settle(tokens, hears).is_ok();
                let next = rows.from + rows.sequence.len();
                let knows = match hears {
                    // What it has read need not be there any more.
                    true => next >= first,
                    false => rows.from >= first,
                };
                settled && knows && !behind(rows)
            }
        };
        let from = match &*state {
            State::Reading(rows) if settled => Some(rows.from),
            _ => None,
        };
        let paid = (funds / self.token_seconds(pace)) as usize;
        let start = match hears {
            true => from.unwrap_or(first),
            false => {
                let held = from.map(|from| tokens.len() - from);
                tokens.len() - self.length(tokens.len() - first, held, paid)
            }
        };
        if from != Some(start) {
            let sequence = self.sequence(tokens.len() - start)?;
            if !matches!(*state, State::Reading(_)) {
                let this = Arc::downgrade(&draft.0);
                let other = |it: &Weak<_>| it.strong_count() > 0 && !it.ptr_eq(&this);
                self.drafts.retain(other);
                self.drafts.push(this);
            }
            *state = State::Reading(Box::new(Rows {
                sequence,
                from: start,
                fed: Vec::new(),
            }));
        }
        if tokens.len() <= start {
            return None;
        }
        Some(Run {
            wish,
            state,
            borrows: false,
            guesses: Vec::new(),
            last: [0],
            features: Vec::new(),
            together: 1.0,
            reads: 0,
            goes_on: true,
        })
    }

    /// How many of the last tokens of a text a draft has, of `tokens`, where it has `held` or none: as many, or more where
    /// twice as many are `paid` for.
    fn length(&self, tokens: usize, held: Option<usize>, paid: usize) -> usize {
        let context = self.runner.context_tokens();
        // Half of a context, where the whole is too much, so that it is not begun again with each token.
        let most = match tokens + self.most <= context {
            true => tokens,
            false => context / 2,
        };
        let length = paid.max(Self::LEAST_READ).min(most);
        match held {
            Some(held) if length < 2 * held => held,
            _ => length,
        }
    }

    /// An empty sequence to read `tokens` tokens with, if there is twice the memory for it: what others need soon is not
    /// taken to be given up again.
    fn sequence(&self, tokens: usize) -> Option<Sequence> {
        let cache = self.runner.kv_cache();
        let ledger = cache.ledger();
        let held = ledger.committed.saturating_sub(ledger.idle).get();
        let capacity = self.runner.context_tokens();
        let needed = cache.sequence_peak_bytes(capacity, (tokens + self.most).min(capacity));
        let fits = |limit: u64| held.saturating_add(2 * needed) <= limit;
        let there = ledger.limit.is_none_or(|limit| fits(limit.get()));
        there.then(|| cache.sequence(capacity).ok())?
    }

    /// Reads what `runs` have to read before they can be guessed for, in their order and for `funds` seconds at most. Those
    /// that have no memory do not go on.
    fn read(
        &mut self,
        runs: &mut [Run<'_, '_>],
        mut funds: f64,
        now: &dyn Fn() -> Instant,
        pace: &Pace,
    ) {
        let most = self.runner.batch_limits().tokens;
        loop {
            let affordable = (funds / self.token_seconds(pace)) as usize;
            let (mut room, mut unread) = (most.min(affordable), 0);
            for run in runs.iter_mut() {
                let wanted = run.tokens_to_read(self.with_guess);
                run.reads = wanted.min(room);
                (room, unread) = (room - run.reads, unread + wanted);
            }
            if unread == 0 || most.min(affordable) < unread.min(Self::LEAST_PIECE) {
                return;
            }
            let begun = now();
            let count = self.read_piece(runs);
            let seconds = (now() - begun).as_secs_f64();
            funds -= seconds;
            if count >= Self::LEAST_READ {
                let usual = self.reading.get_or_insert(seconds / count as f64);
                *usual += (seconds / count as f64 - *usual) / 2.0;
            }
        }
    }

    /// Reads as many tokens of each of `runs` as it has been given. Returns how many these were.
    fn read_piece(&mut self, runs: &mut [Run<'_, '_>]) -> usize {
        for run in runs.iter_mut() {
            run.prepare(run.reads);
        }
        let Self { runner, given, .. } = self;
        if runner.features_width().is_some() {
            given.clear();
            let reading = runs.iter().filter(|run| run.goes_on && run.reads > 0);
            reading.for_each(|run| run.give(run.reads, given));
        }
        let mut segments: Vec<Segment<'_>> = runs.iter_mut().filter_map(Run::piece).collect();
        if segments.is_empty() {
            return 0;
        }
        let passed = runner.forward_with(&mut segments, given).is_ok();
        let mut read = 0;
        for run in runs.iter_mut().filter(|run| run.reads > 0) {
            match passed {
                true => read += run.accept(),
                false => run.give_up(),
            }
        }
        read
    }

    /// Guesses as many tokens for each of `runs` that goes on as `depth` says, as long as another is worth it.
    fn extend(
        &mut self,
        runs: &mut [Run<'_, '_>],
        depth: Depth,
        now: &dyn Fn() -> Instant,
        pace: &Pace,
    ) {
        for round in 0..depth.guesses {
            let active = runs.iter().filter(|run| run.goes_on).count();
            if active == 0 {
                return;
            }
            let row = (pace.expected(active + 1) - pace.expected(active)).max(0.0);
            let price = depth.rate * (self.pass_seconds(active, pace) / active as f64 + row);
            for run in runs.iter_mut() {
                let worth = round == 0 || run.together * self.likely >= price;
                run.goes_on &= worth && run.guesses.len() < run.wish.most;
            }
            let begun = now();
            let guessed = self.extend_by_one(runs);
            if guessed > 0 {
                self.times.observe(guessed, now() - begun);
            }
        }
    }

    /// Guesses a token for each of `runs` that goes on. Returns how many there were.
    fn extend_by_one(&mut self, runs: &mut [Run<'_, '_>]) -> usize {
        for run in runs.iter_mut() {
            run.prepare(run.tokens_to_feed());
        }
        let Self { runner, given, .. } = self;
        let features_width = runner.features_width();
        if features_width.is_some() {
            given.clear();
            let guessing = runs.iter().filter(|run| run.goes_on);
            guessing.for_each(|run| run.give(run.tokens_to_feed(), given));
        }
        let mut segments: Vec<Segment<'_>> = runs.iter_mut().filter_map(Run::segment).collect();
        if segments.is_empty() {
            return 0;
        }
        let passed = runner.forward_with(&mut segments, given);
        let Ok(pass) = passed else {
            runs.iter_mut().for_each(|run| run.goes_on = false);
            return 0;
        };
        let rows = pass.rows.logits();
        let mut features = features_width.map(|width| pass.features.chunks_exact(width));
        let mut chosen = Vec::with_capacity(runs.len());
        for (run, row) in runs.iter_mut().filter(|run| run.goes_on).zip(rows) {
            // A draft model may have more tokens than the model, and a head may guess fewer.
            let known = row.len().min(self.vocabulary as usize);
            let place = row::likeliest(&row[..known]);
            let sure = f64::from(row[place as usize]) - row::log_sum_exp(row);
            chosen.push((place, sure.exp()));
            if let Some(own) = features.as_mut().and_then(Iterator::next) {
                run.features.clear();
                run.features.extend_from_slice(own);
            }
        }
        let active = runs.iter_mut().filter(|run| run.goes_on);
        for (run, &(place, sure)) in active.zip(&chosen) {
            let probability = self.acceptance.probability(Evidence::Confidence(sure));
            self.likely += (probability - self.likely) * Self::NEW;
            run.together *= probability;
            run.take(runner.token_at(place), sure);
        }
        chosen.len()
    }

    /// Gives the guesses to who asked for them, and says how likely they are.
    fn hand_over(&self, run: Run<'_, '_>) -> Vec<f64> {
        let Run { wish, guesses, .. } = run;
        let Some(&pending) = wish.tokens.last().filter(|_| !guesses.is_empty()) else {
            return Vec::new();
        };
        wish.speculator.take(pending, guesses.into_iter());
        likely_together(&self.acceptance, &wish.speculator.evidence)
    }
}

impl Run<'_, '_> {
    fn rows(&self) -> Option<&Rows> {
        match &*self.state {
            State::Reading(rows) => Some(rows),
            State::Unread | State::GivenUp => None,
        }
    }

    /// Tokens to be read apart from a guess, with which up to `with_guess` are read.
    fn tokens_to_read(&self, with_guess: usize) -> usize {
        if !self.goes_on {
            return 0;
        }
        let unread = self
            .rows()
            .map_or(0, |it| it.unread(self.wish.tokens).len());
        match unread <= with_guess {
            true => 0,
            false => unread - 1,
        }
    }

    /// What the next guess follows and has no rows: the last tokens, or the last guess.
    fn tokens_to_feed(&self) -> usize {
        match self.guesses.is_empty() {
            true => self
                .rows()
                .map_or(0, |it| it.unread(self.wish.tokens).len()),
            false => 1,
        }
    }

    /// Puts what a head is given with the next `count` tokens behind `given`.
    fn give(&self, count: usize, given: &mut Vec<f32>) {
        let Some(rows) = self.rows().filter(|_| self.guesses.is_empty()) else {
            return given.extend_from_slice(&self.features);
        };
        let start = rows.from + rows.sequence.len();
        given.extend_from_slice(self.wish.speculator.features_before(start..start + count));
    }

    /// Makes room for the rows of `count` tokens, if there are any and it goes on.
    fn prepare(&mut self, count: usize) {
        let prepared = match &mut *self.state {
            State::Reading(rows) if self.goes_on && count > 0 => {
                rows.sequence.prepare(count).is_ok()
            }
            _ => return,
        };
        if !prepared {
            self.give_up();
        }
    }

    /// The tokens that are read.
    fn piece(&mut self) -> Option<Segment<'_>> {
        let State::Reading(rows) = &mut *self.state else {
            return None;
        };
        let start = rows.from + rows.sequence.len();
        (self.goes_on && self.reads > 0).then_some(Segment {
            tokens: &self.wish.tokens[start..start + self.reads],
            sequence: &mut rows.sequence,
            logits: LogitRows::None,
            images: &[],
        })
    }

    /// The rows that were prepared are there. Returns how many.
    fn accept(&mut self) -> usize {
        match &mut *self.state {
            State::Reading(rows) => {
                let count = rows.sequence.prepared();
                rows.sequence.accept(count);
                count
            }
            State::Unread | State::GivenUp => 0,
        }
    }

    /// Without memory there are no guesses, and no memory is kept.
    fn give_up(&mut self) {
        (self.goes_on, self.reads) = (false, 0);
        *self.state = State::GivenUp;
    }

    fn segment(&mut self) -> Option<Segment<'_>> {
        if self.borrows {
            return self.goes_on.then_some(Segment {
                tokens: &self.last,
                sequence: self.wish.sequence,
                logits: LogitRows::Last,
                images: &[],
            });
        }
        let State::Reading(rows) = &mut *self.state else {
            return None;
        };
        if !self.goes_on {
            return None;
        }
        let tokens = match self.guesses.is_empty() {
            true => &self.wish.tokens[rows.from + rows.sequence.len()..],
            false => &self.last,
        };
        Some(Segment {
            tokens,
            sequence: &mut rows.sequence,
            logits: LogitRows::Last,
            images: &[],
        })
    }

    /// The rows that were prepared are there, and `token` is guessed to follow them.
    fn take(&mut self, token: u32, confidence: f64) {
        self.accept();
        if let State::Reading(rows) = &mut *self.state {
            rows.fed.extend(self.guesses.last().map(|&(last, _)| last));
        }
        self.guesses.push((token, confidence));
        self.last = [token];
    }
}
