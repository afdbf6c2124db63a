//! A request on its way: what its choices share, and what each of them has of its own.

use std::collections::{TryReserveError, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lacuna_kv::Sequence;
use lacuna_kv::folder::remote::Fetching;
use lacuna_kv::folder::{FolderMiss, Restoring, SessionId};
use lacuna_kv::prefix::{Namespace, Path, PrefixCache};
use lacuna_models::{LogitRows, Segment, Shown};
use lacuna_text::tokenizer::Tokenizer;
use tokio::sync::mpsc;

use crate::logprobs;
use crate::request::{Constraint, ConstraintError, Refusal, Request};
use crate::request_memory::HeldMemory;
use crate::row;
use crate::runner::{Row, Rows, Wanted, token_of};
use crate::sampler::{Candidates, Sampler, Sampling};
use crate::speculation::{Draft, Drafts, Speculator, rewound};
use crate::stream::{Event, Failure, PromptToken, Stream, TokenLogprobs};
use crate::transcript::{Outcome, Transcript};

use super::schedule::Demand;
use super::swapping::Away;

/// What all choices of a request share.
pub(crate) struct Job {
    /// Its place in the order of arrival, once it has been taken.
    pub(crate) id: u64,
    pub(crate) prompt_tokens: usize,
    /// Images that the prompt shows.
    pub(crate) images: Vec<Shown>,
    /// Prompt tokens found in the cache when the request started; `None` before.
    pub(crate) reused_tokens: Option<usize>,
    /// Where the prompt left what was kept then.
    pub(crate) differs_at: Option<usize>,
    pub(crate) priority: i32,
    pub(crate) logprobs: Option<usize>,
    pub(crate) arrived: Instant,
    /// When it was announced as running; `None` before.
    pub(crate) started: Option<Instant>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) namespace: Namespace,
    pub(crate) pin_prefix: Option<Duration>,
    /// Since when the client has not read enough for another step.
    pub(crate) stalled: Option<Instant>,
    /// Tokens it had when it last started again to have pages in common with the cache.
    pub(crate) shared_at: usize,
    outbox: mpsc::Sender<Event>,
    /// Given back when the request has ended and its stream is dropped.
    _memory: Option<Arc<HeldMemory>>,
}

/// One choice: its tokens and everything that decides the next one.
pub(crate) struct Choice {
    pub(crate) number: usize,
    /// The prompt, then what was generated. Empty until the choice forks off, unless it is the
    /// first, so that a request that waits holds its prompt once.
    pub(crate) tokens: Vec<u32>,
    pub(crate) generated: usize,
    pub(crate) first_token: Option<Instant>,
    pub(crate) last_token: Option<Instant>,
    sampler: Sampler,
    transcript: Transcript,
    constraint: Option<Box<dyn Constraint>>,
    /// Only for the first choice, whose prompt the others share.
    scoring: Option<Scoring>,
    /// The conversation that it goes on with: of the first choice, too.
    pub(crate) session: Option<SessionId>,
}

/// The log-probabilities of a prompt's tokens, on their way.
struct Scoring {
    /// The likeliest tokens that are listed in the place of each.
    top: usize,
    /// Rows of the prompt whose logits have been read: each scores the token after it.
    rows: usize,
    /// Rows there are to read: all but the last token's.
    last: usize,
    /// What has been read and not handed out.
    scored: Result<Vec<PromptToken>, Failure>,
}

impl Choice {
    /// Whether it is held to a constraint.
    pub(super) fn is_constrained(&self) -> bool {
        self.constraint.is_some()
    }
}

/// A choice that runs, and so has a KV cache.
pub(crate) struct Session {
    pub(crate) choice: Choice,
    pub(crate) sequence: Sequence,
    /// The groups of the prefix cache it uses.
    pub(crate) path: Path,
    /// After how many tokens a request that waits for this session's pages can start, if one does.
    pub(crate) awaited: Option<usize>,
    /// Tokens to compute in this step.
    pub(crate) scheduled: usize,
    /// What the step chose for it, until it is handed out: one token, or more of which all but the last were guessed.
    pub(crate) sampled: Vec<Result<Taken, Failure>>,
    /// What guesses its tokens, once something has been.
    pub(crate) speculator: Option<Speculator>,
    /// What a draft model has of them.
    pub(crate) draft: Draft,
    pub(crate) ended: bool,
}

/// A request that waits for its turn, for the first time or again. The first of `choices` has its
/// tokens.
pub(crate) struct Waiting {
    pub(crate) job: Job,
    pub(crate) choices: VecDeque<Choice>,
    /// How often others have started before it because they took less memory.
    pub(crate) overtaken: u32,
    pub(crate) restore: Restore,
    /// Why the cache folder gave less of it than it has.
    pub(crate) folder_miss: Option<FolderMiss>,
    /// Its pages, where they are in the swap file, on their way there or back.
    pub(crate) away: Option<Away>,
}

/// Whether what the cache folder has of a prompt is in memory.
pub(crate) enum Restore {
    /// It was not asked.
    Unasked,
    /// What a store has is on its way to the folder.
    Fetching(Fetching),
    /// It has what a store had.
    Fetched,
    /// It is on its way.
    Reading(Restoring),
    /// It is, as far as it can be.
    Done,
}

/// A request that has been admitted.
pub(crate) struct Running {
    pub(crate) job: Job,
    pub(crate) sessions: Vec<Session>,
    /// Choices that fork off the first session once the prompt is computed.
    pub(crate) followers: VecDeque<Choice>,
}

/// Working memory for choosing tokens, for one choice after the other.
pub(crate) struct Workspace {
    /// Tokens by which the model says that it is done.
    ends: Vec<u32>,
    masked: Vec<f32>,
    barred: Vec<u32>,
    candidates: Candidates,
}

impl Workspace {
    pub(crate) fn new(vocabulary: usize, tokenizer: &Tokenizer) -> Result<Self, TryReserveError> {
        Ok(Self {
            ends: tokenizer.end_of_generation().collect(),
            masked: Vec::new(),
            barred: Vec::new(),
            candidates: Candidates::new(vocabulary)?,
        })
    }
}

/// A token and how likely it was.
pub(crate) struct Sampled {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

impl Sampled {
    /// A token alone.
    fn alone(token: u32) -> Self {
        Self {
            token,
            logprobs: None,
        }
    }
}

/// A token that a choice has taken up, and what it made of the text.
pub(crate) struct Taken {
    pub(crate) sampled: Sampled,
    pub(crate) outcome: Outcome,
}

impl Waiting {
    /// Most events a client may leave unread before its request pauses.
    const UNREAD_EVENTS: usize = 256;
    /// How often a request that waits for memory may be overtaken. Short requests hardly notice it
    /// then, and it waits for what runs and for these few, not for all that come.
    pub(crate) const MOST_OVERTAKEN: u32 = 16;

    /// The same for a request of `choices` choices, whose steps give more.
    pub(crate) fn unread_events(choices: usize) -> usize {
        let two_steps = 2 * Job::events_per_step(choices);
        two_steps.max(Self::UNREAD_EVENTS)
    }

    /// A job for `request`, which arrives now, and where its events come out. `capacity` is the
    /// number of tokens that each choice may have, its prompt included.
    pub(crate) fn new(
        mut request: Request,
        capacity: usize,
        arrived: Instant,
    ) -> Result<(Self, Stream), Refusal> {
        let choices = request.choices.get();
        let room = Self::unread_events(choices);
        let memory = request.memory.take().map(Arc::new);
        let (outbox, receiver) = mpsc::channel(room);
        let job = Job {
            id: 0,
            prompt_tokens: request.prompt.len(),
            images: std::mem::take(&mut request.images),
            started: None,
            reused_tokens: None,
            differs_at: None,
            priority: request.priority,
            logprobs: request.logprobs,
            arrived,
            deadline: request
                .deadline
                .and_then(|after| arrived.checked_add(after)),
            namespace: request.prefix_namespace,
            pin_prefix: request.pin_prefix,
            stalled: None,
            shared_at: 0,
            outbox,
            _memory: memory.clone(),
        };
        let mut choices = (0..choices)
            .map(|number| Choice::new(number, &request, capacity))
            .collect::<Result<VecDeque<_>, _>>()?;
        if let Some(leader) = choices.front_mut() {
            leader.scoring = request.prompt_logprobs.map(|top| Scoring {
                top,
                rows: 0,
                last: request.prompt.len() - 1,
                scored: Ok(Vec::new()),
            });
            leader.session = request.session;
            leader.tokens = request.prompt;
        }
        let waiting = Self {
            job,
            choices,
            overtaken: 0,
            restore: Restore::Unasked,
            folder_miss: None,
            away: None,
        };
        let stream = Stream::new(receiver, waiting.choices.len(), memory);
        Ok((waiting, stream))
    }
}

impl Waiting {
    /// A request that has run and has to wait again. It keeps its place: nobody overtakes it.
    pub(crate) fn again(job: Job, choices: VecDeque<Choice>) -> Self {
        Self {
            job,
            choices,
            overtaken: Self::MOST_OVERTAKEN,
            restore: Restore::Unasked,
            folder_miss: None,
            away: None,
        }
    }

    /// Whether `other`, which comes after it, may start before it while it waits for memory.
    pub(crate) fn lets_by(&self, other: &Self) -> bool {
        self.overtaken < Self::MOST_OVERTAKEN && self.job.priority == other.job.priority
    }
}

impl Running {
    /// Choices there are, or will be.
    pub(crate) fn width(&self) -> usize {
        self.sessions.len() + self.followers.len()
    }

    /// What each session would like to compute; nothing while the client does not read.
    pub(crate) fn demands<'a>(&'a self, prefix: &'a PrefixCache) -> impl Iterator<Item = Demand> {
        let stalled = self.job.stalled.is_some();
        let fork = self.fork_position();
        self.sessions.iter().map(move |session| Demand {
            pending: if stalled { 0 } else { session.pending() },
            scored: session.choice.is_scored(),
            awaited: session.awaited,
            stop: {
                let len = session.sequence.len();
                let kept = prefix.next_stop(&session.path, len);
                let stops = kept.into_iter().chain(fork.filter(|&at| at > len));
                stops.map(|at| at - len).min()
            },
            priority: self.job.priority,
        })
    }

    /// Where the first session has to stand for the next choice to fork off, if layers keep a state.
    fn fork_position(&self) -> Option<usize> {
        let states = |session: &Session| session.sequence.geometry().has_states();
        let next = self.followers.front()?;
        let leader = self.sessions.first()?;
        states(leader).then(|| next.fork_position(self.job.prompt_tokens))
    }
}

impl Job {
    /// What it runs by, earlier first: its priority, then its arrival.
    pub(crate) fn rank(&self) -> (i32, u64) {
        (self.priority, self.id)
    }

    /// Events that a step may give a request of `choices` choices.
    pub(super) const fn events_per_step(choices: usize) -> usize {
        2 * choices + 3
    }

    /// Whether the client reads, so that another step's events find room.
    pub(crate) fn has_room(&self, choices: usize) -> bool {
        self.outbox.capacity() >= Self::events_per_step(choices)
    }

    /// Events that fit beside those of a step without guesses, for each of `choices` choices.
    pub(crate) fn spare_events(&self, choices: usize) -> usize {
        let spare = self
            .outbox
            .capacity()
            .saturating_sub(Self::events_per_step(choices));
        spare / choices.max(1)
    }

    /// Whether the client has gone.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.outbox.is_closed()
    }

    /// Passes an event on. One that finds the channel closed has no reader any more, and the
    /// request is swept out before the next step.
    pub(crate) fn send(&self, event: Event) {
        debug_assert!(
            self.outbox.capacity() > 0 || self.outbox.is_closed(),
            "room was checked before the step"
        );
        self.outbox.try_send(event).ok();
    }
}

impl Choice {
    fn new(number: usize, request: &Request, capacity: usize) -> Result<Self, Refusal> {
        let sampling = Sampling {
            seed: request.sampling.seed.wrapping_add(number as u64),
            ..request.sampling.clone()
        };
        let transcript = Transcript::new(&request.limits, request.prompt.len(), capacity);
        let mut sampler = Sampler::new(sampling)?;
        // A prompt has the marks of its template, and no reply would end if the end of a turn were
        // penalised for ending others.
        sampler.spare_prompt(request.prompt.len());
        Ok(Self {
            number,
            tokens: Vec::new(),
            generated: 0,
            first_token: None,
            last_token: None,
            sampler,
            transcript: match request.constraint {
                Some(_) => transcript.constrained(),
                None => transcript,
            },
            scoring: None,
            session: None,
            constraint: request
                .constraint
                .as_ref()
                .map(|constraint| constraint.fork()),
        })
    }

    /// How many tokens of a prompt of `prompt` tokens it shares with other choices: all, or all but the last
    /// while it has no token of its own and needs logits for the first.
    pub(crate) fn fork_position(&self, prompt: usize) -> usize {
        match self.tokens.len() {
            0 => prompt - 1,
            tokens => prompt.min(tokens - 1),
        }
    }

    /// Gives a choice its prompt, unless it has been under way before.
    pub(crate) fn begin(&mut self, prompt: &[u32]) {
        if self.tokens.is_empty() {
            self.tokens = prompt.to_vec();
        }
    }

    /// What it needs of each row.
    pub(crate) fn wanted(&self) -> Wanted {
        let is_free = self.constraint.is_none() && self.transcript.bars_nothing();
        let wanted = self.sampler.wanted();
        wanted.or_logits(!is_free || self.is_scored())
    }

    /// Picks the next token from its row.
    pub(crate) fn sample(
        &mut self,
        row: Row<'_>,
        logprobs: Option<usize>,
        workspace: &mut Workspace,
    ) -> Result<Sampled, Failure> {
        let logits = match row {
            Row::Logits(logits) => logits,
            Row::Likeliest(likeliest) => return Ok(Sampled::alone(token_of(likeliest)?)),
            Row::TopK(tokens) => {
                let candidates = &mut workspace.candidates;
                let token = self.sampler.sample_few(tokens, candidates)?;
                return Ok(Sampled::alone(token));
            }
        };
        row::check_finite(logits)?;
        let Workspace {
            ends,
            masked,
            barred,
            candidates,
        } = workspace;
        self.transcript.barred(ends.iter().copied(), barred);
        let possible = match &mut self.constraint {
            None => logits,
            Some(constraint) => {
                masked.clear();
                masked.extend_from_slice(logits);
                constraint.mask(masked)?;
                masked
            }
        };
        let token = self
            .sampler
            .sample_without(barred, possible, &self.tokens, candidates);
        // A constraint that leaves nothing has to say so. From a row of nothing else even the impossible is taken.
        let chosen = possible[token as usize];
        if self.constraint.is_some() && (chosen.is_nan() || chosen == f32::NEG_INFINITY) {
            let reason = "it leaves no token that may come next".to_owned();
            return Err(ConstraintError::NotFollowed(reason).into());
        }
        let logprobs = logprobs.map(|top| logprobs::of(logits, token, top));
        Ok(Sampled { token, logprobs })
    }

    /// Picks the next token from its row and takes it up.
    fn take(
        &mut self,
        row: Row<'_>,
        logprobs: Option<usize>,
        tokenizer: &Tokenizer,
        workspace: &mut Workspace,
    ) -> Result<Taken, Failure> {
        let sampled = self.sample(row, logprobs, workspace)?;
        let outcome = self.advance(sampled.token, tokenizer)?;
        Ok(Taken { sampled, outcome })
    }

    /// The tokens whose rows may come from elsewhere. What has yet to be scored must be computed.
    pub(crate) fn reusable_tokens(&self) -> &[u32] {
        match &self.scoring {
            // The last of these stays pending in any case.
            Some(scoring) => &self.tokens[..=scoring.rows],
            None => &self.tokens,
        }
    }

    /// Whether each row of the prompt is needed, and not only the last.
    pub(crate) fn is_scored(&self) -> bool {
        (self.scoring.as_ref()).is_some_and(|scoring| scoring.rows < scoring.last)
    }

    /// Reads the prompt's rows of logits from row `start` on.
    pub(crate) fn score<'a>(&mut self, start: usize, rows: impl Iterator<Item = &'a [f32]>) {
        let Some(scoring) = &mut self.scoring else {
            return;
        };
        for (row, logits) in (start..scoring.last).zip(rows) {
            if row != scoring.rows {
                continue;
            }
            scoring.rows += 1;
            if let Err(error) = row::check_finite(logits) {
                scoring.scored = Err(error.into());
            } else if let Ok(scored) = &mut scoring.scored {
                let token = self.tokens[row + 1];
                let logprobs = logprobs::of(logits, token, scoring.top);
                scored.push(PromptToken { token, logprobs });
            }
        }
    }

    /// What has been scored since the last time.
    pub(crate) fn take_scored(&mut self) -> Result<Vec<PromptToken>, Failure> {
        match &mut self.scoring {
            Some(scoring) => std::mem::replace(&mut scoring.scored, Ok(Vec::new())),
            None => Ok(Vec::new()),
        }
    }

    /// Tokens it may still take.
    pub(crate) fn most_tokens(&self) -> usize {
        self.transcript.most_tokens()
    }

    /// Takes the token up.
    pub(crate) fn advance(
        &mut self,
        token: u32,
        tokenizer: &Tokenizer,
    ) -> Result<Outcome, Failure> {
        let mut complete = false;
        let takes = self.transcript.takes(tokenizer, token);
        if let Some(constraint) = &mut self.constraint
            && takes
            && !self.transcript.ends_at(tokenizer, token)
        {
            constraint.accept(token)?;
            complete = constraint.is_complete();
        }
        let outcome = self.transcript.advance(tokenizer, token, complete);
        let outcome = outcome.map_err(|error| Failure::Engine(error.to_string()))?;
        // Only now: a guess that fails is met again, as the token that comes next.
        if takes {
            self.tokens.push(token);
            self.generated += 1;
        }
        Ok(outcome)
    }
}

impl Session {
    pub(crate) fn new(choice: Choice, sequence: Sequence, path: Path) -> Self {
        Self {
            choice,
            sequence,
            path,
            awaited: None,
            scheduled: 0,
            sampled: Vec::new(),
            speculator: None,
            draft: Draft::default(),
            ended: false,
        }
    }

    /// Tokens that are not in the KV cache yet; at least one.
    pub(crate) fn pending(&self) -> usize {
        self.choice.tokens.len() - self.sequence.len()
    }

    /// The tokens of this step.
    pub(crate) fn segment<'a>(&'a mut self, images: &'a [Shown]) -> Segment<'a> {
        let logits = match self.gets_token() {
            _ if self.choice.is_scored() => LogitRows::All,
            true => LogitRows::Last,
            false => LogitRows::None,
        };
        let logits = match self.guesses() {
            [] => logits,
            _ => LogitRows::All,
        };
        let start = self.sequence.len();
        let tokens = match self.speculator.as_ref().map(Speculator::run) {
            Some(run) if run.len() > 1 => run,
            _ => &self.choice.tokens[start..start + self.scheduled],
        };
        Segment {
            tokens,
            sequence: &mut self.sequence,
            logits,
            images,
        }
    }

    /// Rows of logits that this step computes for it.
    pub(crate) fn logit_rows(&self) -> usize {
        match self.choice.is_scored() {
            true => self.scheduled,
            false if self.gets_token() => 1 + self.guesses().len(),
            false => 0,
        }
    }

    /// What is needed of each row, if there are any.
    pub(crate) fn wanted(&self, logprobs: Option<usize>) -> Option<Wanted> {
        let wanted = self.choice.wanted().or_logits(logprobs.is_some());
        (self.scheduled > 0 && self.logit_rows() > 0).then_some(wanted)
    }

    /// Whether this step computes everything up to the last token, so that the next can be chosen.
    pub(crate) fn gets_token(&self) -> bool {
        self.scheduled == self.pending() + self.guesses().len()
    }

    /// Whether this step computes its last token alone, and guesses.
    pub(crate) fn is_decoding(&self) -> bool {
        self.pending() == 1 && self.gets_token()
    }

    /// Picks a token from the last of `rows`, or, where tokens were guessed, from each after the last token as long as it is
    /// the one that was guessed. They are taken up: a row is sampled as if the tokens before it had come one by one.
    pub(crate) fn sample(
        &mut self,
        rows: Rows<'_>,
        logprobs: Option<usize>,
        tokenizer: &Tokenizer,
        workspace: &mut Workspace,
    ) {
        let guesses = self
            .speculator
            .as_ref()
            .map_or(&[][..], Speculator::guesses);
        let before = rows.len().saturating_sub(1 + guesses.len());
        let guesses = guesses.iter().map(Some).chain([None]);
        for (row, guess) in rows.iter().skip(before).zip(guesses) {
            let taken = self.choice.take(row, logprobs, tokenizer, workspace);
            let right = match &taken {
                Ok(taken) => {
                    let continues = matches!(taken.outcome, Outcome::Continues(_));
                    continues && guess == Some(&taken.sampled.token)
                }
                // The next step finds it, when the tokens before it have been handed out.
                Err(_) if !self.sampled.is_empty() => break,
                Err(_) => false,
            };
            self.sampled.push(taken);
            if !right {
                break;
            }
        }
    }

    /// Ends the step. Returns how many rows are those of its tokens: all but those of guesses that were wrong.
    pub(crate) fn settle(&mut self, drafts: &mut Drafts) -> usize {
        let rows = self.right_rows();
        self.scheduled = 0;
        let (sampled, guessed) = (self.sampled.len(), self.guesses().len());
        let Some(speculator) = self.speculator.as_mut().filter(|_| guessed > 0) else {
            return rows;
        };
        let last = match self.sampled.last() {
            Some(Ok(taken)) => Some(taken.sampled.token),
            _ => None,
        };
        speculator.judge(sampled, last, drafts);
        rows
    }

    /// Rows of the step that are those of its tokens: all but those of guesses that were wrong.
    fn right_rows(&self) -> usize {
        match self.guesses().len() {
            0 => self.scheduled,
            guessed => self.scheduled - guessed + self.sampled.len().saturating_sub(1),
        }
    }

    /// The first tokens of the step, if guesses were wrong and states have to go back to them.
    pub(crate) fn rewound(&mut self) -> Option<Segment<'_>> {
        let rows = self.right_rows();
        let speculator = self.speculator.as_ref()?;
        rewound(&mut self.sequence, speculator, rows)
    }
}
