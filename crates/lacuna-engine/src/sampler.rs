//! Choosing the next token from a row of logits.
//!
//! The order is: biases, penalties, then greedy choice if `temperature` is 0; otherwise temperature, top-k,
//! top-p, min-p, and one draw. The generator is seeded, so the same seed gives the same text.

use std::collections::TryReserveError;
use std::sync::Arc;

use lacuna_models::{RecommendedSampling, TokenLogit};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::error::NotFinite;
use crate::row::{self, Candidate, sort_head};
use crate::runner::Wanted;

/// How tokens are chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token every time.
    pub temperature: f32,
    /// Only the `top_k` most likely tokens are drawn from; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1 for all.
    pub top_p: f32,
    /// Only tokens at least this fraction as likely as the likeliest; 0 for all.
    pub min_p: f32,
    /// What tokens seen before are penalised by, and how far back.
    pub penalties: Penalties,
    /// Added to the logits of these tokens, -100 to 100 each, before anything else is done.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Seed of the generator.
    pub seed: u64,
}

/// Penalties on tokens that occur in the last `window` tokens. Of a service's requests presence and
/// frequency count those of the reply alone.
#[derive(Debug, Clone, PartialEq)]
pub struct Penalties {
    /// Divides positive logits and multiplies negative ones; 1 for none.
    pub repetition: f32,
    /// Subtracted once from a token that occurred; 0 for none.
    pub presence: f32,
    /// Subtracted for each time a token occurred; 0 for none.
    pub frequency: f32,
    /// Tokens looked back on.
    pub window: usize,
}

impl Default for Penalties {
    fn default() -> Self {
        Self {
            repetition: 1.0,
            presence: 0.0,
            frequency: 0.0,
            window: 64,
        }
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            penalties: Penalties::default(),
            logit_bias: Arc::default(),
            seed: 0,
        }
    }
}

/// A sampling setting outside its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{setting} is {value}, expected {expected}")]
pub struct SamplingError {
    /// Name of the setting.
    pub setting: &'static str,
    /// What was asked for.
    pub value: f32,
    /// What is accepted.
    pub expected: &'static str,
}

impl Sampling {
    /// Greedy choice: the most likely token every time.
    #[must_use]
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// These settings, but for those that a model's makers recommend something else for.
    #[must_use]
    pub fn recommended_by(self, recommended: &RecommendedSampling) -> Self {
        let repetition = recommended.repetition_penalty;
        Self {
            temperature: recommended.temperature.unwrap_or(self.temperature),
            top_k: recommended.top_k.unwrap_or(self.top_k),
            top_p: recommended.top_p.unwrap_or(self.top_p),
            min_p: recommended.min_p.unwrap_or(self.min_p),
            penalties: Penalties {
                repetition: repetition.unwrap_or(self.penalties.repetition),
                ..self.penalties
            },
            ..self
        }
    }

    /// Checks every setting against its range.
    ///
    /// # Errors
    /// The first [`SamplingError`] found.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let penalties = &self.penalties;
        let checks = [
            (
                "temperature",
                self.temperature,
                self.temperature >= 0.0,
                "0 or more",
            ),
            (
                "top_p",
                self.top_p,
                self.top_p > 0.0 && self.top_p <= 1.0,
                "more than 0 and at most 1",
            ),
            (
                "min_p",
                self.min_p,
                (0.0..=1.0).contains(&self.min_p),
                "0 to 1",
            ),
            (
                "repetition_penalty",
                penalties.repetition,
                penalties.repetition > 0.0,
                "more than 0",
            ),
            (
                "presence_penalty",
                penalties.presence,
                true,
                "a finite number",
            ),
            (
                "frequency_penalty",
                penalties.frequency,
                true,
                "a finite number",
            ),
        ];
        let biases = self.logit_bias.iter().map(|&(_, bias)| {
            let holds = (-100.0..=100.0).contains(&bias);
            ("logit_bias", bias, holds, "-100 to 100")
        });
        match checks
            .into_iter()
            .chain(biases)
            .find(|(_, value, holds, _)| !(*holds && value.is_finite()))
        {
            None => Ok(()),
            Some((setting, value, _, expected)) => Err(SamplingError {
                setting,
                value,
                expected,
            }),
        }
    }
}

/// A sampler's state: settings and generator. Working memory is separate, so that a request that
/// waits holds none.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    generator: ChaCha8Rng,
    /// Presence and frequency do not count what comes before it in the history.
    reply_start: usize,
}

/// Working memory of samplers, used by one at a time.
#[derive(Debug)]
pub struct Candidates {
    list: Vec<Candidate>,
    recent: Vec<u32>,
    /// Logits after penalties, then weights.
    scores: Vec<f32>,
    maxima: Vec<f32>,
}

impl Candidates {
    /// Room for rows of `vocabulary` logits and penalty windows of the usual length: sampling from
    /// those allocates nothing.
    ///
    /// # Errors
    /// When the system refuses the memory.
    pub fn new(vocabulary: usize) -> Result<Self, TryReserveError> {
        let mut new = Self {
            list: Vec::new(),
            recent: Vec::with_capacity(Penalties::default().window),
            scores: Vec::new(),
            maxima: Vec::new(),
        };
        new.list.try_reserve_exact(vocabulary)?;
        new.scores.try_reserve_exact(vocabulary)?;
        new.maxima
            .try_reserve_exact(vocabulary.div_ceil(row::BLOCK))?;
        Ok(new)
    }
}

impl Sampler {
    /// A sampler at the start of its generator's sequence.
    ///
    /// # Errors
    /// [`SamplingError`] for a setting outside its range.
    pub fn new(sampling: Sampling) -> Result<Self, SamplingError> {
        sampling.validate()?;
        let generator = ChaCha8Rng::seed_from_u64(sampling.seed);
        Ok(Self {
            sampling,
            generator,
            reply_start: 0,
        })
    }

    /// Lets presence and frequency count only what comes after the first `tokens` of the history.
    pub(crate) fn spare_prompt(&mut self, tokens: usize) {
        self.reply_start = tokens;
    }

    /// How far it is in its generator's sequence.
    #[must_use]
    pub fn position(&self) -> u128 {
        self.generator.get_word_pos()
    }

    /// Goes on from a [position](Sampler::position) of a sampler with the same seed.
    pub fn set_position(&mut self, position: u128) {
        self.generator.set_word_pos(position);
    }

    /// The next token after `history`, from its row of logits. Logits that are not numbers are never
    /// chosen, unless there are no others: then it is the first token.
    ///
    /// # Panics
    /// When `logits` is empty.
    pub fn sample(&mut self, logits: &[f32], history: &[u32], candidates: &mut Candidates) -> u32 {
        self.sample_without(&[], logits, history, candidates)
    }

    /// [`Sampler::sample`] of the tokens that are not `barred`, as far as there are any.
    pub(crate) fn sample_without(
        &mut self,
        barred: &[u32],
        logits: &[f32],
        history: &[u32],
        candidates: &mut Candidates,
    ) -> u32 {
        assert!(!logits.is_empty(), "a model has at least one token");
        let penalised = self.sampling.penalties.apply_at_all();
        if !penalised && self.sampling.logit_bias.is_empty() && barred.is_empty() {
            return self.choose(logits, candidates);
        }
        let mut scores = std::mem::take(&mut candidates.scores);
        scores.clear();
        scores.extend_from_slice(logits);
        for &(token, bias) in &*self.sampling.logit_bias {
            if let Some(score) = scores.get_mut(token as usize) {
                *score += bias;
            }
        }
        if penalised {
            self.penalise(history, &mut scores, &mut candidates.recent);
        }
        bar(&mut scores, barred);
        let token = match self.narrows() || self.is_greedy() {
            true => self.choose(&scores, candidates),
            false => self.choose_of_all(&mut scores, &mut candidates.list),
        };
        candidates.scores = scores;
        token
    }

    /// What it needs of every row as the model gives it: of several tokens that are as likely, the first.
    pub(crate) fn wanted(&self) -> Wanted {
        let Sampling {
            penalties,
            logit_bias,
            top_k,
            ..
        } = &self.sampling;
        let wanted = match self.is_greedy() {
            true => Wanted::Likeliest,
            false if self.narrows() => Wanted::TopK(*top_k),
            false => Wanted::Logits,
        };
        wanted.or_logits(penalties.apply_at_all() || !logit_bias.is_empty())
    }

    /// The next token, from what it [needs](Sampler::wanted) of a row, or more of the likeliest tokens, the likeliest
    /// first.
    ///
    /// # Errors
    /// [`NotFinite`] for a row that none is to be chosen from.
    pub(crate) fn sample_few(
        &mut self,
        likeliest: &[TokenLogit],
        candidates: &mut Candidates,
    ) -> Result<u32, NotFinite> {
        let (Some(first), list) = (likeliest.first(), &mut candidates.list) else {
            return Ok(0);
        };
        if !first.logit.is_finite() {
            let token = first.token as usize;
            return Err(NotFinite { token });
        }
        if self.is_greedy() {
            return Ok(first.token);
        }
        let drawn_from = likeliest.iter().take(self.sampling.top_k);
        list.clear();
        list.extend(drawn_from.map(|&TokenLogit { token, logit }| Candidate {
            token,
            score: logit,
        }));
        Ok(self.choose_of_few(list))
    }

    fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0
    }

    /// Whether only a few of the highest are drawn from.
    fn narrows(&self) -> bool {
        self.sampling.top_k > 0
    }

    /// Chooses by logits, penalties applied.
    fn choose(&mut self, logits: &[f32], candidates: &mut Candidates) -> u32 {
        if self.is_greedy() {
            return row::likeliest(logits);
        }
        let Candidates {
            list,
            scores,
            maxima,
            ..
        } = candidates;
        if self.narrows() {
            row::top(logits, self.sampling.top_k, maxima, list);
            return self.choose_of_few(list);
        }
        scores.clear();
        scores.extend_from_slice(logits);
        self.choose_of_all(scores, list)
    }

    /// Draws from a list sorted from the highest logit down.
    fn choose_of_few(&mut self, list: &mut Vec<Candidate>) -> u32 {
        let Some(&Candidate { score: highest, .. }) = list.first() else {
            return 0;
        };
        for candidate in &mut *list {
            let weight = ((candidate.score - highest) / self.sampling.temperature).exp();
            // Infinities apart are no number.
            candidate.score = if weight.is_nan() {
                f32::from(candidate.score == highest)
            } else {
                weight
            };
        }
        let target = total(list) * f64::from(self.sampling.top_p);
        if self.sampling.top_p < 1.0
            && let Some(keep) = reaching(list, target)
        {
            list.truncate(keep);
        }
        self.keep_min_p(list);
        self.draw(list)
    }

    /// Draws from all tokens, whose `scores` become weights.
    fn choose_of_all(&mut self, scores: &mut [f32], list: &mut Vec<Candidate>) -> u32 {
        let highest = row::highest(scores);
        if highest == f32::NEG_INFINITY {
            return 0;
        }
        let total = if highest.is_finite() {
            row::weigh(scores, highest, self.sampling.temperature)
        } else {
            scores
                .iter_mut()
                .for_each(|score| *score = f32::from(*score == highest));
            row::total(scores)
        };
        let Sampling { top_p, min_p, .. } = self.sampling;
        if top_p >= 1.0 && min_p == 0.0 {
            let unit = self.unit();
            return row::pick(scores, unit).unwrap_or_else(|| row::likeliest(scores));
        }
        // What is lighter than this comes to less than what `top_p` leaves out. The highest weight
        // is 1, and stays however rounding falls.
        let spared = (1.0 - f64::from(top_p)).max(0.0) * total / scores.len() as f64;
        let bar = min_p
            .max(spared as f32 * 0.99)
            .clamp(f32::MIN_POSITIVE, 1.0);
        list.clear();
        row::at_least(scores, bar, list);
        if top_p < 1.0 {
            keep_top_p(list, total * f64::from(top_p));
        }
        self.keep_min_p(list);
        self.draw(list)
    }

    fn penalise(&self, history: &[u32], scores: &mut [f32], recent: &mut Vec<u32>) {
        let penalties = &self.sampling.penalties;
        let window = history.len().saturating_sub(penalties.window);
        if penalties.repetition != 1.0 {
            adjust(scores, &history[window..], recent, |score, _| {
                match score > 0.0 {
                    true => score / penalties.repetition,
                    false => score * penalties.repetition,
                }
            });
        }
        if penalties.presence != 0.0 || penalties.frequency != 0.0 {
            let reply = window.max(self.reply_start).min(history.len());
            adjust(scores, &history[reply..], recent, |score, times| {
                score - penalties.presence - penalties.frequency * times as f32
            });
        }
    }

    fn keep_min_p(&self, list: &mut Vec<Candidate>) {
        if self.sampling.min_p > 0.0 {
            let bar = most_likely(list).score * self.sampling.min_p;
            list.retain(|candidate| candidate.score >= bar);
        }
    }

    fn draw(&mut self, list: &[Candidate]) -> u32 {
        let mut left = self.unit() * total(list);
        for candidate in list {
            left -= f64::from(candidate.score);
            if left < 0.0 {
                return candidate.token;
            }
        }
        most_likely(list).token
    }

    /// From 0 up to, and without, 1.
    fn unit(&mut self) -> f64 {
        (self.generator.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Makes the `barred` tokens impossible, unless no others are possible.
fn bar(scores: &mut [f32], barred: &[u32]) {
    let open = |(token, score): (u32, &f32)| *score > f32::NEG_INFINITY && !barred.contains(&token);
    if barred.is_empty() || !(0..).zip(&*scores).any(open) {
        return;
    }
    for &token in barred {
        if let Some(score) = scores.get_mut(token as usize) {
            *score = f32::NEG_INFINITY;
        }
    }
}

/// Keeps the fewest candidates that reach `target`, sorted from the highest down, or all. Sorts no
/// more than it has to: they are usually few of many.
fn keep_top_p(list: &mut Vec<Candidate>, target: f64) {
    let mut head = 64.min(list.len());
    loop {
        sort_head(list, head);
        if let Some(keep) = reaching(&list[..head], target) {
            return list.truncate(keep);
        }
        if head == list.len() {
            return;
        }
        head = list.len().min(head * 8);
    }
}

impl Penalties {
    /// Whether they change anything.
    fn apply_at_all(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }
}

/// Changes the score of each of `tokens`, by how many times it is among them.
fn adjust(
    scores: &mut [f32],
    tokens: &[u32],
    sorted: &mut Vec<u32>,
    change: impl Fn(f32, usize) -> f32,
) {
    sorted.clear();
    sorted.extend_from_slice(tokens);
    sorted.sort_unstable();
    for same in sorted.chunk_by(|a, b| a == b) {
        if let Some(score) = scores.get_mut(same[0] as usize) {
            *score = change(*score, same.len());
        }
    }
}

/// How many of a sorted list are needed to reach `target`, if all of them do.
fn reaching(sorted: &[Candidate], target: f64) -> Option<usize> {
    let mut reached = 0.0;
    let enough = sorted.iter().position(|candidate| {
        reached += f64::from(candidate.score);
        reached >= target
    });
    enough.map(|last| last + 1)
}

fn total(list: &[Candidate]) -> f64 {
    list.iter()
        .map(|candidate| f64::from(candidate.score))
        .sum()
}

fn most_likely(list: &[Candidate]) -> Candidate {
    let best = list
        .iter()
        .copied()
        .reduce(|best, next| if next.score > best.score { next } else { best });
    best.expect("a model has at least one token")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A sampler with working memory of its own.
    struct Sole(Sampler, Candidates);

    impl Sole {
        fn sample(&mut self, logits: &[f32], history: &[u32]) -> u32 {
            self.0.sample(logits, history, &mut self.1)
        }
    }

    fn sampler(sampling: Sampling) -> Sole {
        let sampler = Sampler::new(sampling).expect("valid settings");
        Sole(sampler, Candidates::new(8).expect("memory"))
    }

    /// Settings that filter nothing.
    fn open() -> Sampling {
        Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..Sampling::default()
        }
    }

    fn drawn(sampling: Sampling, logits: &[f32]) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        let mut sampler = sampler(sampling);
        for _ in 0..20_000 {
            counts[sampler.sample(logits, &[]) as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_first_of_the_highest() {
        assert_eq!(
            sampler(Sampling::greedy()).sample(&[1.0, 3.0, 3.0, f32::NAN], &[]),
            1
        );
    }

    #[test]
    fn greedy_takes_the_first_of_the_highest_wherever_it_is() {
        for len in [1, 15, 16, 17, 100] {
            for at in 0..len {
                let mut logits = vec![f32::NAN; len];
                for filler in [-1.0, f32::NEG_INFINITY] {
                    logits
                        .iter_mut()
                        .skip(1)
                        .step_by(3)
                        .for_each(|x| *x = filler);
                    logits[at] = 2.0;
                    logits[len - 1] = 2.0;
                    let token = sampler(Sampling::greedy()).sample(&logits, &[]);
                    assert_eq!(token as usize, at, "{len}");
                }
            }
            let token = sampler(Sampling::greedy()).sample(&vec![f32::NAN; len], &[]);
            assert_eq!(token, 0, "nothing is higher than the first");
        }
    }

    /// A device that sorts rows gives what the processor would have: the same draws, token for token.
    #[test]
    fn the_likeliest_tokens_alone_are_drawn_from_as_the_row_is() {
        let mut state = 1u32;
        let mut random = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        // Numbers of all sizes, a few that are often the same, and zeros of both signs.
        let kinds: [fn(u32) -> f32; 3] = [
            |bits| bits as f32 / 1_048_576.0 - 8.0,
            |bits| (bits % 3) as f32,
            |bits| [0.0, -0.0][bits as usize % 2],
        ];
        for (top_k, given) in [(1, 1), (5, 5), (40, 40), (5, 40), (400, 400)] {
            for temperature in [0.0, 0.8, 2.0] {
                let sampling = Sampling {
                    temperature,
                    top_k,
                    ..Sampling::default()
                };
                let [mut of_rows, mut of_few] = [(); 2].map(|()| sampler(sampling.clone()));
                for round in 0..200 {
                    let row: Vec<f32> = (0..300).map(|_| kinds[round % 3](random())).collect();
                    let few = row::top_k(&row, given);
                    let token = of_few.0.sample_few(&few, &mut of_few.1);
                    assert_eq!(token, Ok(of_rows.sample(&row, &[])), "{sampling:?}");
                }
                assert_eq!(of_few.0.position(), of_rows.0.position());
            }
        }
    }

    #[test]
    fn a_row_that_is_not_finite_is_not_drawn_from() {
        let bad = TokenLogit {
            token: 7,
            logit: f32::INFINITY,
        };
        let good = TokenLogit {
            token: 3,
            logit: 1.0,
        };
        for sampling in [Sampling::default(), Sampling::greedy()] {
            let Sole(mut sampler, mut candidates) = sampler(sampling);
            let drawn = sampler.sample_few(&[bad, good], &mut candidates);
            assert_eq!(drawn, Err(NotFinite { token: 7 }));
        }
    }

    #[test]
    fn draws_follow_the_softmax() {
        let counts = drawn(open(), &[0.0, 2f32.ln(), 5f32.ln()]);
        for (count, share) in counts.iter().zip([1.0 / 8.0, 2.0 / 8.0, 5.0 / 8.0]) {
            assert!(
                (*count as f64 / 20_000.0 - share).abs() < 0.015,
                "{counts:?}"
            );
        }
    }

    #[test]
    fn a_bias_moves_its_token_only_and_comes_before_penalties() {
        let biased = |bias: Vec<(u32, f32)>, penalties| Sampling {
            logit_bias: bias.into(),
            penalties,
            ..Sampling::greedy()
        };
        let none = Penalties::default();
        let logits = [1.0, 3.0, 2.0];
        let chosen = |sampling| sampler(sampling).sample(&logits, &[1]);
        assert_eq!(chosen(biased(vec![(1, -100.0)], none.clone())), 2);
        assert_eq!(chosen(biased(vec![(0, 2.5)], none.clone())), 0);
        assert_eq!(
            chosen(biased(vec![(9, 100.0)], none.clone())),
            1,
            "there is no token 9"
        );
        let halved = Penalties {
            repetition: 2.0,
            ..none.clone()
        };
        assert_eq!(
            chosen(biased(vec![(1, 0.9)], halved)),
            2,
            "3.9 / 2 < 2, but 3 / 2 + 0.9 is not"
        );
        for bias in [100.5, -101.0, f32::NAN, f32::INFINITY] {
            Sampler::new(biased(vec![(0, bias)], none.clone())).expect_err("out of range");
        }
        let drawn = drawn(
            Sampling {
                logit_bias: vec![(1, 2f32.ln())].into(),
                ..open()
            },
            &[0.0, 0.0],
        );
        assert!(
            (drawn[1] as f64 / 20_000.0 - 2.0 / 3.0).abs() < 0.015,
            "{drawn:?}"
        );
    }

    #[test]
    fn barred_tokens_come_only_where_nothing_else_can() {
        for sampling in [Sampling::greedy(), open(), Sampling::default()] {
            let Sole(mut sampler, mut candidates) = sampler(sampling);
            let mut sample =
                |logits: &[f32]| sampler.sample_without(&[1, 7], logits, &[], &mut candidates);
            assert_ne!(sample(&[0.0, 90.0, 0.0]), 1);
            let only = [f32::NEG_INFINITY, 2.0, f32::NEG_INFINITY];
            assert_eq!(sample(&only), 1);
        }
    }

    #[test]
    fn filters_remove_exactly_the_unlikely() {
        let logits = [8f32.ln(), 4f32.ln(), 2f32.ln(), 1f32.ln()];
        let survivors = |sampling| {
            drawn(sampling, &logits)
                .iter()
                .filter(|&&count| count > 0)
                .count()
        };
        assert_eq!(survivors(open()), 4);
        assert_eq!(survivors(Sampling { top_k: 2, ..open() }), 2);
        assert_eq!(
            survivors(Sampling {
                top_p: 0.79,
                ..open()
            }),
            2,
            "8 + 4 of 15 reach 0.79"
        );
        assert_eq!(
            survivors(Sampling {
                top_p: 0.81,
                ..open()
            }),
            3
        );
        assert_eq!(
            survivors(Sampling {
                min_p: 0.25,
                ..open()
            }),
            3
        );
        assert_eq!(
            survivors(Sampling {
                top_p: 1e-6,
                ..open()
            }),
            1
        );
    }

    #[test]
    fn low_temperature_sharpens() {
        let counts = drawn(
            Sampling {
                temperature: 0.1,
                ..open()
            },
            &[1.0, 0.0],
        );
        assert!(counts[0] > 19_950);
    }

    #[test]
    fn penalties_act_on_recent_tokens_only() {
        let greedy = |penalties| {
            sampler(Sampling {
                penalties,
                ..Sampling::greedy()
            })
        };
        let logits = [2.0, 1.5, -1.0];
        let repetition = Penalties {
            repetition: 2.0,
            ..Penalties::default()
        };
        assert_eq!(greedy(repetition.clone()).sample(&logits, &[0]), 1);
        let presence = Penalties {
            presence: 0.6,
            ..Penalties::default()
        };
        assert_eq!(greedy(presence).sample(&logits, &[0, 0, 0]), 1);
        let frequency = Penalties {
            frequency: 0.3,
            ..Penalties::default()
        };
        assert_eq!(greedy(frequency.clone()).sample(&logits, &[0]), 0);
        assert_eq!(greedy(frequency).sample(&logits, &[0, 0]), 1);
        let short = Penalties {
            window: 1,
            ..repetition
        };
        assert_eq!(
            greedy(short).sample(&logits, &[0, 2]),
            0,
            "token 0 is out of the window"
        );
    }

    #[test]
    fn presence_and_frequency_spare_the_prompt() {
        let logits = [2.0, 1.5, -1.0];
        let sampled = |penalties, history: &[u32]| {
            let mut sampler = sampler(Sampling {
                penalties,
                ..Sampling::greedy()
            });
            sampler.0.spare_prompt(2);
            sampler.sample(&logits, history)
        };
        let frequency = Penalties {
            presence: 0.4,
            frequency: 0.4,
            ..Penalties::default()
        };
        assert_eq!(sampled(frequency.clone(), &[0, 0]), 0);
        assert_eq!(sampled(frequency.clone(), &[0]), 0);
        assert_eq!(sampled(frequency, &[0, 0, 0]), 1);
        let repetition = Penalties {
            repetition: 2.0,
            ..Penalties::default()
        };
        assert_eq!(sampled(repetition, &[0, 0]), 1, "repetition counts it");
    }

    #[test]
    fn same_seed_same_draws() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32).sin()).collect();
        let draws = |seed| {
            let mut sampler = sampler(Sampling { seed, ..open() });
            (0..40)
                .map(|_| sampler.sample(&logits, &[]))
                .collect::<Vec<_>>()
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let bad = [
            Sampling {
                temperature: -1.0,
                ..open()
            },
            Sampling {
                temperature: f32::NAN,
                ..open()
            },
            Sampling {
                top_p: 0.0,
                ..open()
            },
            Sampling {
                min_p: 1.5,
                ..open()
            },
            Sampling {
                penalties: Penalties {
                    repetition: 0.0,
                    ..Penalties::default()
                },
                ..open()
            },
            Sampling {
                penalties: Penalties {
                    presence: f32::INFINITY,
                    ..Penalties::default()
                },
                ..open()
            },
        ];
        for sampling in bad {
            assert!(Sampler::new(sampling).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_logits_give_a_token_of_the_vocabulary(
            logits in prop::collection::vec(prop_oneof![any::<f32>(), -5f32..5.0], 1..40),
            history in prop::collection::vec(0u32..60, 0..80),
            temperature in 0f32..3.0, top_k in 0usize..50, top_p in 0.01f32..=1.0, min_p in 0f32..=1.0,
            repetition in 0.1f32..3.0,
        ) {
            let penalties = Penalties { repetition, ..Penalties::default() };
            let mut sampler = sampler(Sampling { temperature, top_k, top_p, min_p, penalties, seed: 1, ..Sampling::default() });
            let token = sampler.sample(&logits, &history);
            prop_assert!((token as usize) < logits.len());
        }
    }
}
