//! Requests and those who send them: what is asked, how it is read, and what must come back.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use lacuna_models::Model;
use rand_chacha::ChaCha8Rng;

use super::model::logits_after;
use super::{CONTEXT, Tally, below};
use crate::logprobs;
use crate::request::{Limits, Request};
use crate::runner::Row;
use crate::sampler::Sampling;
use crate::scheduler::{Waiting, Workspace};
use crate::stream::{Event, Failure, FinishReason, PromptToken, Stream};
use crate::transcript::Outcome;

/// What a request asks.
pub(super) struct Spec {
    prompt: Vec<u32>,
    choices: usize,
    limits: Limits,
    sampling: Sampling,
    priority: i32,
    deadline: Option<Duration>,
    pin_prefix: Option<Duration>,
    prompt_logprobs: Option<usize>,
}

/// One choice, as far as it has come or as it must become.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Text {
    tokens: Vec<u32>,
    text: String,
    reason: Option<FinishReason>,
}

impl Spec {
    pub(super) fn random(random: &mut ChaCha8Rng, habit: &Habit) -> Self {
        let mut within = |low: usize, high: usize| low + below(random, high - low);
        // Prompts of few families, so that many begin alike.
        let family = within(0, 4) as u32;
        let shared = [0, 16, 40, 90][within(0, 4)];
        let own = [within(1, 6), within(1, 70)][within(0, 2)];
        let tokens = |seed: u32, count: usize| {
            (0..count as u32).map(move |index| 300 + (seed * 131 + index * 17) % 1000)
        };
        let prompt = tokens(family, shared).chain(tokens(10 + within(0, 50) as u32, own));
        let sampling = match within(0, 2) {
            0 => Sampling::greedy(),
            _ => Sampling {
                seed: within(0, 1000) as u64,
                ..Sampling::default()
            },
        };
        // What nobody reads has to be more than the channel takes.
        let unread = matches!(habit, Habit::Never);
        let most = Some(within(2, 60));
        let max_tokens = [most, most, most, Some(0), Some(1), None][within(0, 6)];
        let choices = [1, 1, 1, 2, 3][within(0, 5)];
        Self {
            prompt: prompt.collect(),
            choices: if unread { 3 } else { choices },
            limits: Limits {
                max_tokens: if unread { None } else { max_tokens },
                ..Limits::default()
            },
            sampling,
            priority: [0, 0, 0, -1, 2][within(0, 5)],
            deadline: (within(0, 8) == 0).then(|| Duration::from_millis(within(1, 9000) as u64)),
            pin_prefix: (within(0, 6) == 0).then(|| Duration::from_secs(within(1, 60) as u64)),
            prompt_logprobs: (within(0, 6) == 0).then(|| within(0, 3)),
        }
    }

    /// One greedy choice.
    pub(super) fn plain(prompt: u32, tokens: usize) -> Self {
        Self::greedy((300..300 + prompt).collect(), tokens)
    }

    /// One greedy choice after `prompt`.
    pub(super) fn greedy(prompt: Vec<u32>, tokens: usize) -> Self {
        Self {
            prompt,
            choices: 1,
            limits: Limits {
                max_tokens: Some(tokens),
                ..Limits::default()
            },
            sampling: Sampling::greedy(),
            priority: 0,
            deadline: None,
            pin_prefix: None,
            prompt_logprobs: None,
        }
    }

    /// The same, which has all of its tokens, whatever they are.
    pub(super) fn endless(mut self) -> Self {
        self.limits.ignore_eos = true;
        self
    }

    /// The same, some with a stop string that comes up.
    pub(super) fn with_stop_string(
        mut self,
        random: &mut ChaCha8Rng,
        capacity: usize,
        model: &Model,
    ) -> Self {
        if below(random, 4) == 0 {
            let text = self.alone(capacity, model).swap_remove(0).text;
            let from = below(random, text.chars().count() + 1);
            let stop = text.chars().skip(from).take(1 + below(random, 5));
            self.limits.stop = vec![stop.collect()];
        }
        self
    }

    pub(super) fn request(&self) -> Request {
        Request {
            choices: NonZeroUsize::new(self.choices).expect("at least one"),
            sampling: self.sampling.clone(),
            limits: self.limits.clone(),
            priority: self.priority,
            deadline: self.deadline,
            pin_prefix: self.pin_prefix,
            prompt_logprobs: self.prompt_logprobs,
            ..Request::new(self.prompt.clone())
        }
    }

    /// The scores of its prompt, if it asks for them.
    pub(super) fn scores(&self, model: &Model) -> Vec<PromptToken> {
        let Some(top) = self.prompt_logprobs else {
            return Vec::new();
        };
        let mut logits = vec![0.0; model.spec().vocabulary];
        let scores = (1..self.prompt.len()).map(|place| {
            logits_after(&self.prompt[..place], model.tokenizer(), &mut logits);
            let token = self.prompt[place];
            let logprobs = logprobs::of(&logits, token, top);
            PromptToken { token, logprobs }
        });
        scores.collect()
    }

    /// What the request gives when there is nothing else: no batch, no cache, no pages.
    pub(super) fn alone(&self, capacity: usize, model: &Model) -> Vec<Text> {
        let made = Waiting::new(self.request(), capacity, Instant::now());
        let (waiting, _stream) = made.expect("valid settings");
        let vocabulary = model.spec().vocabulary;
        let mut workspace = Workspace::new(vocabulary, model.tokenizer()).expect("memory");
        let mut logits = vec![0.0; vocabulary];
        let texts = waiting.choices.into_iter().map(|mut choice| {
            choice.begin(&self.prompt);
            let mut shown = String::new();
            loop {
                assert!(choice.tokens.len() <= CONTEXT, "beyond the context");
                logits_after(&choice.tokens, model.tokenizer(), &mut logits);
                let sampled = choice.sample(Row::Logits(&logits), None, &mut workspace);
                let token = sampled.expect("no constraint").token;
                let (text, reason) = match choice.advance(token, model.tokenizer()) {
                    Ok(Outcome::Continues(text)) => (text, None),
                    Ok(Outcome::EndsWith(text, reason) | Outcome::EndsBefore(text, reason)) => {
                        (text, Some(reason))
                    }
                    Err(failure) => panic!("{failure}"),
                };
                shown += &text;
                if reason.is_some() {
                    return Text {
                        tokens: choice.tokens[self.prompt.len()..].to_vec(),
                        text: shown,
                        reason,
                    };
                }
            }
        });
        texts.collect()
    }
}

/// How a client reads.
pub(super) enum Habit {
    /// Whatever comes, at once.
    Always,
    /// Now and then.
    Sometimes,
    /// Not at all.
    Never,
    /// At once, and goes after so many steps.
    Leaves(usize),
}

impl Habit {
    pub(super) fn random(random: &mut ChaCha8Rng) -> Self {
        match below(random, 12) {
            0 => Self::Never,
            1 | 2 => Self::Sometimes,
            3 | 4 => Self::Leaves(below(random, 30)),
            _ => Self::Always,
        }
    }
}

/// Someone who waits for a request's events.
pub(super) struct Client {
    spec: Spec,
    /// `None` once the client has gone.
    stream: Option<Stream>,
    habit: Habit,
    started: bool,
    failed: Option<Failure>,
    seen: Vec<Text>,
    expected: Vec<Text>,
    /// Of the prompt's tokens, those that have yet to come.
    scores: VecDeque<PromptToken>,
}

impl Client {
    pub(super) fn new(
        spec: Spec,
        stream: Stream,
        habit: Habit,
        expected: Vec<Text>,
        scores: Vec<PromptToken>,
    ) -> Self {
        Self {
            scores: scores.into(),
            seen: vec![Text::default(); spec.choices],
            spec,
            stream: Some(stream),
            habit,
            started: false,
            failed: None,
            expected,
        }
    }

    /// Whether it reads in this step. One that leaves drops its stream.
    pub(super) fn acts(&mut self, random: &mut ChaCha8Rng) -> bool {
        match &mut self.habit {
            Habit::Always => true,
            Habit::Sometimes => below(random, 20) == 0,
            Habit::Never => false,
            Habit::Leaves(0) => {
                self.stream = None;
                false
            }
            Habit::Leaves(steps) => {
                *steps -= 1;
                true
            }
        }
    }

    /// The prompt and what came after it.
    pub(super) fn conversation(&self) -> Vec<u32> {
        [&self.spec.prompt[..], &self.seen[0].tokens].concat()
    }

    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failed.as_ref()
    }

    /// Whether nothing more is expected: it has all, or has gone.
    pub(super) fn is_over(&self) -> bool {
        self.stream.is_none() || self.has_ended()
    }

    fn has_ended(&self) -> bool {
        self.failed.is_some() || self.seen.iter().all(|text| text.reason.is_some())
    }

    /// Tokens that must be computed for it, if none are found.
    pub(super) fn work(&self) -> usize {
        let texts = self.expected.iter().map(|text| text.tokens.len());
        self.spec.prompt.len() + texts.sum::<usize>()
    }

    /// Reads what there is and compares it with what must come.
    pub(super) fn read(&mut self, trace: &mut impl Hasher, tally: &mut Tally) {
        while let Some(event) = self.stream.as_mut().and_then(Stream::try_recv) {
            assert!(!self.has_ended(), "{event:?} after the end");
            format!("{event:?}").hash(trace);
            self.take(event, tally);
        }
    }

    fn take(&mut self, event: Event, tally: &mut Tally) {
        match event {
            Event::Started { prompt_tokens, .. } => {
                assert!(!self.started, "started twice");
                assert_eq!(prompt_tokens, self.spec.prompt.len());
                self.started = true;
            }
            Event::PromptScored(scored) => {
                for score in scored {
                    assert_eq!(Some(score), self.scores.pop_front());
                }
            }
            Event::Token {
                choice,
                token,
                text,
                ..
            } => {
                let seen = self.ongoing(choice);
                seen.tokens.push(token);
                seen.text += &text;
                self.compare(choice);
            }
            Event::Finished {
                choice,
                reason,
                text,
                usage,
            } => {
                let seen = self.ongoing(choice);
                seen.text += &text;
                seen.reason = Some(reason);
                assert_eq!(usage.generated_tokens, seen.tokens.len());
                assert_eq!(self.seen[choice], self.expected[choice]);
                tally.finished += u64::from(self.has_ended());
            }
            Event::Failed(failure) => {
                self.note_failure(&failure, tally);
                self.failed = Some(failure);
            }
        }
    }

    fn ongoing(&mut self, choice: usize) -> &mut Text {
        assert!(self.started, "nothing comes before the start");
        assert!(self.scores.is_empty(), "nor before the prompt's scores");
        assert_eq!(self.seen[choice].reason, None, "a choice ends once");
        &mut self.seen[choice]
    }

    /// What has come so far is the beginning of what must come.
    fn compare(&self, choice: usize) {
        let (seen, expected) = (&self.seen[choice], &self.expected[choice]);
        assert!(
            expected.tokens.starts_with(&seen.tokens) && expected.text.starts_with(&seen.text),
            "{seen:?} instead of {expected:?}"
        );
    }

    fn note_failure(&self, failure: &Failure, tally: &mut Tally) {
        match failure {
            Failure::Deadline => {
                assert!(self.spec.deadline.is_some());
                tally.overdue += 1;
            }
            Failure::Unread => {
                assert!(!matches!(self.habit, Habit::Always), "it was read");
                tally.unread += 1;
            }
            Failure::OutOfMemory(_) => tally.out_of_memory += 1,
            Failure::Engine(_) => tally.broken += 1,
            other => panic!("{other}"),
        }
    }
}
