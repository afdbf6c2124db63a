//! The engine: a model, a processor, an arena and a pool of KV pages, stepped one batch at a time.

mod config;
mod on_device;
mod placement;

use std::sync::Arc;
use std::time::Instant;

use lacuna_kernels::Cpu;
use lacuna_kv::{KvCache, KvError, KvReport, Sequence};
use lacuna_models::plan::{Budget, Parts, Plan, Residency};
use lacuna_models::trace::TraceWriter;
use lacuna_models::{
    BatchLimits, ForwardError, LogitRows, Model, NeuronRecorder, Scratch, Segment,
};
use lacuna_pages::{ByteLength, DeviceError};
use lacuna_text::tokenizer::TokenizerError;

use crate::arbiter::{Arbiter, TEND_INTERVAL, kv_share};
use crate::budget::{KvDemand, Process, Reading};
use crate::error::{EngineError, NotFinite};
use crate::images;
use crate::row;
use crate::runner::{Pass, Row, Wanted, token_of};
use crate::sampler::{Candidates, Sampler, Sampling};
use crate::session::Session;
use crate::speculation::{Drafter, Drafts, Pace, head};
use crate::status::{DeviceStatus, ExpertStatus, NeuronStatus};
use crate::system::{Host, System};
use crate::transcript::{Outcome, Transcript};
pub use config::{Accounting, EngineConfig};
use on_device::{OnDevice, pass};
pub use placement::PlannedDevice;

/// A token, and what it made of the text.
pub(crate) type Taken = (u32, Result<Outcome, TokenizerError>);

/// The token that `sampler` takes from a row, which is not one of `barred`.
///
/// # Errors
/// [`NotFinite`].
fn sample(
    row: Row<'_>,
    (sampler, barred): (&mut Sampler, &[u32]),
    history: &[u32],
    candidates: &mut Candidates,
) -> Result<u32, NotFinite> {
    match row {
        Row::Likeliest(likeliest) => token_of(likeliest),
        Row::TopK(tokens) => sampler.sample_few(tokens, candidates),
        Row::Logits(logits) => {
            row::check_finite(logits)?;
            Ok(sampler.sample_without(barred, logits, history, candidates))
        }
    }
}

/// A model ready to run, in the memory its plan says.
pub struct Engine {
    model: Arc<Model>,
    cpu: Arc<Cpu>,
    cache: KvCache,
    /// Where another device computes, nothing but the limits of a batch: its memory is not touched.
    scratch: Scratch,
    /// The device that computes in place of the processor.
    executor: Option<OnDevice>,
    candidates: Candidates,
    /// Tokens that may not come next.
    barred: Vec<u32>,
    plan: Plan,
    budget: Budget,
    /// What KV pages may take now.
    kv_limit: u64,
    process: Process,
    system: Box<dyn System>,
    /// What that said about memory when it was last asked, and when.
    memory: Reading,
    tended: Option<Instant>,
    /// Since when KV pages could do with so much less that weights are to have it.
    spare_since: Option<Instant>,
    weights_to_spare: u64,
    has_all_weights: bool,
    most_drafts: usize,
    most_from_history: usize,
    /// Elements of the features that a head takes, if one guesses.
    features_width: Option<usize>,
    /// What passes take, for guesses.
    pub(crate) pace: Pace,
    /// The draft model, unless a scheduler has it.
    drafter: Option<Drafter>,
    drafts: Drafts,
}

impl Engine {
    /// Weights that leave memory together, if so much can: each time what was read ahead is read again, which is a
    /// ring of some 80 MB.
    const SPARED_AT_ONCE: u64 = 16 << 20;

    /// Sets up threads, activation memory and a KV pool for `model`.
    ///
    /// # Errors
    /// [`EngineError`] when a setting is out of range, the budget does not hold what the first token
    /// needs, or the system refuses memory or threads.
    pub fn new(model: Arc<Model>, config: &EngineConfig) -> Result<Self, EngineError> {
        let spec = model.spec();
        let config = &config.for_model(spec);
        if let Some(draft) = &config.draft {
            draft.check_for(&model)?;
        }
        let weights = model.weight_plan().clone();
        let image_bytes = model.images().map_or(0, images::memory_for);
        let placed = config.place(&model, image_bytes)?;
        let (cache, plan, budget) =
            config.prepare(model.files(), spec, weights, image_bytes, placed)?;
        // What is on a device is nothing that the process has beside it.
        let here = Parts {
            device_bytes: 0,
            ..budget.parts
        };
        let process = Process::after_loading(config.accounting, &here);
        let beyond = process.beyond_plan(None);
        let executor = match &config.device {
            None => None,
            Some(device) => {
                let model = Arc::clone(&model);
                let executor = device.executor(model, cache.geometry(), &plan.arena)?;
                Some(OnDevice {
                    device: Arc::clone(device),
                    executor: Some(executor),
                    cache: cache.clone(),
                    policy: config.kv_policy,
                    is_lost: false,
                })
            }
        };
        let kv_bytes = budget.parts.kv_bytes.saturating_sub(beyond);
        if kv_bytes < plan.least().kv_bytes {
            return Err(EngineError::ProcessTooLarge {
                needed: ByteLength::new(plan.least().bytes() + beyond),
            });
        }
        cache.set_limit(ByteLength::new(kv_bytes))?;
        let cpu = Arc::new(Cpu::new(config.cpu()?)?);
        let drafter = match config.draft_model() {
            Some(draft) => Some(draft.drafter(config, &cache, &cpu, &model)?),
            None if config.asks_head() => {
                let most = config.speculation.most();
                head::drafter(&model, most, config, &cache, &cpu)?
            }
            None => None,
        };
        let features_width = drafter.as_ref().and_then(Drafter::features_width);
        let mut scratch =
            Scratch::new(model.program(), plan.arena.clone())?.checking(config.finite_check);
        let host = Host {
            process,
            cache: cache.clone(),
            model: Arc::clone(&model),
        };
        let cache = match executor {
            // A device stores nothing in so few bits.
            None => model.smooth_keys(&cpu, cache, plan.kv.context_tokens, &mut scratch)?,
            Some(_) => cache,
        };
        Ok(Self {
            candidates: Candidates::new(spec.vocabulary)?,
            barred: Vec::new(),
            cpu,
            cache,
            scratch,
            executor,
            kv_limit: kv_bytes,
            system: Box::new(host),
            memory: Reading::default(),
            tended: None,
            spare_since: None,
            weights_to_spare: plan.residency.to_spare(&plan.weights),
            has_all_weights: plan.residency.is_whole(&plan.weights),
            model,
            plan,
            budget,
            process,
            most_drafts: config.most_drafts(),
            most_from_history: config.most_from_history(),
            features_width,
            pace: match &drafter {
                Some(_) => Pace::default().with_draft_model(),
                None => Pace::default(),
            },
            drafter,
            drafts: Drafts::default(),
        })
    }

    /// A new, empty session.
    ///
    /// # Errors
    /// [`EngineError`] for sampling settings out of range or a KV range that cannot be reserved.
    pub fn session(&self, sampling: Sampling) -> Result<Session, EngineError> {
        let sequence = self.cache.sequence(self.context_tokens())?;
        let message_ends = self.model.tokenizer().end_of_generation().collect();
        let session = Session::new(sequence, Sampler::new(sampling)?, message_ends)
            .keeping_images_whole(self.model.spec().keeps_images_whole());
        Ok(match self.most_drafts {
            0 => session,
            _ => session.speculating(self.most_from_history > 0, self.features_width),
        })
    }

    /// Refuses a session that another engine made: its rows may be of another model, and of another shape.
    ///
    /// # Errors
    /// [`EngineError::OtherEngine`]; with a device [`DeviceError::Lost`], since a session from before it was opened again
    /// is another's in the same way.
    pub(crate) fn check_owns(&self, session: &Session) -> Result<(), EngineError> {
        match (self.cache.owns(&session.sequence), &self.executor) {
            (true, _) => Ok(()),
            (false, Some(_)) => Err(ForwardError::from(DeviceError::Lost).into()),
            (false, None) => Err(EngineError::OtherEngine),
        }
    }

    /// Computes the session's next chunk of pending tokens. When none is left pending, samples one
    /// token, appends it (pending) and returns it.
    ///
    /// # Errors
    /// [`EngineError::EmptyPrompt`] without pending tokens, [`EngineError::OtherEngine`] for a session that another
    /// engine made, and others; the session is as it was before the step, but that the next one computes more again
    /// where layers keep states.
    pub fn step(&mut self, session: &mut Session) -> Result<Option<u32>, EngineError> {
        self.check_owns(session)?;
        if session.pending() == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        self.barred.clear();
        self.step_without_barred(session)
    }

    /// [`Engine::step`], whose tokens become part of `transcript`: none, one, or several where some were guessed. `taken`
    /// gets what each of them makes of the text, up to its end; the session has all of them then.
    ///
    /// # Errors
    /// As for [`Engine::step`].
    pub(crate) fn step_with(
        &mut self,
        session: &mut Session,
        transcript: &mut Transcript,
        taken: &mut Vec<Taken>,
    ) -> Result<(), EngineError> {
        session.recover()?;
        let guessed = self.guess(session, transcript);
        if guessed == 0 {
            let (decodes, begun) = (session.pending() == 1, Instant::now());
            if let Some(token) = self.step_once(session, transcript)? {
                if decodes && self.most_drafts > 0 {
                    self.pace.observe(1, 1, 1, begun.elapsed());
                }
                let outcome = transcript.advance(self.model.tokenizer(), token, false);
                taken.push((token, outcome));
            }
            return Ok(());
        }
        self.step_drafted(session, transcript, taken)
    }

    /// [`Engine::step`] without guesses, where the next token is one that `transcript` does not bar and becomes part of
    /// it later.
    ///
    /// # Errors
    /// As for [`Engine::step`].
    pub(crate) fn step_once(
        &mut self,
        session: &mut Session,
        transcript: &Transcript,
    ) -> Result<Option<u32>, EngineError> {
        let ends = self.model.tokenizer().end_of_generation();
        transcript.barred(ends, &mut self.barred);
        self.step_without_barred(session)
    }

    /// Guesses what comes after the session's pending token, as far as that pays and there is memory for it. Returns how
    /// many tokens are guessed.
    fn guess(&mut self, session: &mut Session, transcript: &Transcript) -> usize {
        let spare = self.scratch.limits();
        let spare = spare.tokens.min(spare.logit_rows) - 1;
        let room = spare.min(transcript.most_tokens().saturating_sub(1));
        let likely = session.guess(self.most_from_history.min(room));
        let likely = [likely];
        let mut counts = self.pace.allot(&likely, 1, spare);
        if let Some(drafter) = &mut self.drafter
            && drafter.kept(&likely[0], counts[0]) == 0
            && let Some(wish) = session.wish(room)
        {
            let step = self.pace.step((1, spare + 1), &likely, (&[0], &counts));
            let likely = drafter.guess(&mut [wish], step, &mut self.pace, &Instant::now);
            if !likely[0].is_empty() {
                counts = self.pace.allot(&likely, 1, spare);
            }
        }
        let count = counts[0];
        let prepared = count > 0 && session.prepare_guesses(count, &self.cache);
        session.keep_guesses(if prepared { count } else { 0 })
    }

    /// A step of the session's pending token and those guessed to follow it, prepared.
    fn step_drafted(
        &mut self,
        session: &mut Session,
        transcript: &mut Transcript,
        taken: &mut Vec<Taken>,
    ) -> Result<(), EngineError> {
        let begun = Instant::now();
        let wanted = session.sampler.wanted();
        let wanted = wanted.or_logits(!transcript.bars_nothing());
        let segment = session.drafted();
        let rows = segment.tokens.len();
        let memory = (&mut self.executor, &mut self.scratch);
        let (all, features) = pass(&self.model, &self.cpu, memory, &mut [segment], wanted)?;
        session.hear(features);
        let tokenizer = self.model.tokenizer();
        let mut sampled = 0;
        for row in all.iter() {
            transcript.barred(tokenizer.end_of_generation(), &mut self.barred);
            let (sampler, history) = (&mut session.sampler, &session.tokens);
            let candidates = &mut self.candidates;
            let token = match sample(row, (sampler, &self.barred), history, candidates) {
                Ok(token) => token,
                Err(error) if sampled == 0 => return Err(error.into()),
                // The next step finds it, when the tokens before it have been handed out.
                Err(_) => break,
            };
            let right = session.guessed(sampled) == Some(token);
            session.tokens.push(token);
            sampled += 1;
            let outcome = transcript.advance(tokenizer, token, false);
            let goes_on = matches!(outcome, Ok(Outcome::Continues(_)));
            taken.push((token, outcome));
            if !right || !goes_on {
                break;
            }
        }
        if let Some(segment) = session.rewound(sampled) {
            // Without it the sequence is spent, and the next step computes it again.
            self.model
                .rewind(&self.cpu, &mut [segment], &mut self.scratch)
                .ok();
        }
        session.judge(sampled, &mut self.drafts);
        self.pace.observe(1, rows, sampled, begun.elapsed());
        Ok(())
    }

    /// What has come of guesses.
    #[must_use]
    pub fn drafts(&self) -> Drafts {
        self.drafts
    }

    /// The draft model, for a scheduler that has guesses made for all its sequences together. This engine guesses from
    /// history alone then.
    pub(crate) fn take_drafter(&mut self) -> Option<Drafter> {
        self.drafter.take()
    }

    fn step_without_barred(&mut self, session: &mut Session) -> Result<Option<u32>, EngineError> {
        session.recover()?;
        let (chunk, rows) = session.schedule(self.scratch.limits().tokens);
        self.prepare_rows(&mut session.sequence, chunk.len())?;
        self.model.expect(&session.tokens[chunk.end..]);
        let wanted = session.sampler.wanted();
        let wanted = wanted.or_logits(!self.barred.is_empty());
        let tokens = &session.tokens[chunk.clone()];
        let segment = Segment {
            tokens,
            sequence: &mut session.sequence,
            logits: rows,
            images: &session.images,
        };
        let memory = (&mut self.executor, &mut self.scratch);
        let (rows, features) = pass(&self.model, &self.cpu, memory, &mut [segment], wanted)?;
        session.hear(features);
        let (sampler, history) = (&mut session.sampler, &session.tokens);
        let candidates = &mut self.candidates;
        // None where this is not the prompt's last chunk.
        let row = rows.iter().next();
        let token = row.map(|row| sample(row, (sampler, &self.barred), history, candidates));
        let token = token.transpose()?;
        session.accept(chunk.len());
        session.tokens.extend(token);
        Ok(token)
    }

    /// Computes the session's next chunk of pending tokens and calls `each` with rows of logits, in order: those after
    /// each token, or with [`LogitRows::Last`] after the last of all alone.
    ///
    /// # Errors
    /// As for [`Engine::step`].
    pub(crate) fn score_step(
        &mut self,
        session: &mut Session,
        asked: LogitRows,
        mut each: impl FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        session.recover()?;
        let (chunk, rows) = session.schedule(self.score_limit(asked));
        let rows = match asked {
            LogitRows::All => LogitRows::All,
            LogitRows::Last | LogitRows::None => rows,
        };
        self.prepare_rows(&mut session.sequence, chunk.len())?;
        let segment = Segment {
            tokens: &session.tokens[chunk.clone()],
            sequence: &mut session.sequence,
            logits: rows,
            images: &session.images,
        };
        let model = &self.model;
        let memory = (&mut self.executor, &mut self.scratch);
        let segments = &mut [segment];
        let (rows, features) = pass(model, &self.cpu, memory, segments, Wanted::Logits)?;
        session.hear(features);
        for row in rows.logits() {
            row::check_finite(row)?;
            each(row);
        }
        session.accept(chunk.len());
        Ok(())
    }

    /// Tokens that a pass computes which is to give `rows`.
    pub(crate) fn score_limit(&self, rows: LogitRows) -> usize {
        let limits = self.scratch.limits();
        match rows {
            LogitRows::All => limits.logit_rows.min(limits.tokens),
            LogitRows::Last | LogitRows::None => limits.tokens,
        }
    }

    /// Finds memory for `tokens` rows, of weights too: what they give up is read for each pass from then on.
    pub(crate) fn prepare_rows(
        &mut self,
        sequence: &mut Sequence,
        tokens: usize,
    ) -> Result<(), EngineError> {
        self.tend();
        loop {
            let prepared = sequence.prepare(tokens);
            if let Err(KvError::Pages(_) | KvError::NotNow { .. }) = prepared
                && self.drafter.as_mut().is_some_and(Drafter::give_up_one)
            {
                continue;
            }
            if prepared.is_err() && sequence.release_rewind_memory() > 0 {
                continue;
            }
            let requested = match prepared {
                Err(KvError::Pages(lacuna_pages::Error::OutOfPages {
                    requested,
                    limit: Some(_),
                    ..
                })) => requested,
                prepared => return Ok(prepared?),
            };
            let bytes = requested.get() * self.cache.page_bytes() as u64;
            // Nobody else could be preempted for them: in the end the system has to find what the budget allows.
            let found = self.arbitrate(|arbiter| arbiter.take(bytes) || arbiter.take_share());
            if !found {
                return Ok(sequence.prepare(tokens)?);
            }
        }
    }

    /// Follows the memory that the system has with weights, where these are in memory of the process.
    fn tend(&mut self) {
        let now = self.system.now();
        let due = |last: Instant| now.duration_since(last) >= TEND_INTERVAL;
        if self.plan.residency.is_mapped() || !self.tended.is_none_or(due) {
            return;
        }
        self.tended = Some(now);
        self.memory = self.system.memory(0);
        let ledger = self.cache.ledger();
        let in_use = ledger.committed.saturating_sub(ledger.idle).get();
        let demand = KvDemand {
            share: kv_share(&self.budget, self.memory) + self.weights_to_spare,
            committed: ledger.committed.get(),
            in_use,
            first: in_use,
            mapped: self.budget.mapped_weight_bytes,
        };
        self.arbitrate(|arbiter| {
            arbiter.follow(demand);
            arbiter.give_to_system(demand);
            let bytes = arbiter.restorable(in_use);
            arbiter.restore(bytes, now);
        });
    }

    /// Decides who has what of the budget.
    fn arbitrate<T>(&mut self, decide: impl FnOnce(&mut Arbiter<'_>) -> T) -> T {
        let (mut budget, mut memory) = (self.budget, self.memory);
        let (mut kv_limit, mut spare_since) = (self.kv_limit, self.spare_since);
        let decided = decide(&mut Arbiter {
            engine: self,
            budget: &mut budget,
            memory: &mut memory,
            kv_limit: &mut kv_limit,
            spare_since: &mut spare_since,
        });
        (self.budget, self.memory) = (budget, memory);
        (self.kv_limit, self.spare_since) = (kv_limit, spare_since);
        decided
    }

    /// Lets go of weights that take `bytes` or more, for KV pages to have. Returns how much that is: nothing where
    /// weights are mapped, or no more of them can be read for each pass.
    pub(crate) fn spare_weights(&mut self, bytes: u64) -> u64 {
        let (held, weights) = (&self.plan.residency, &self.plan.weights);
        let several = held.less(weights, bytes.max(Self::SPARED_AT_ONCE));
        let less = several.or_else(|| held.less(weights, bytes));
        less.map_or(0, |less| {
            let before = self.plan.residency.memory_bytes();
            before - self.place_weights(less)
        })
    }

    /// Brings weights back to memory that take up to `bytes`, unless none is missing, so little brings none back, or they
    /// cannot be read now. Returns the memory that weights take then.
    pub(crate) fn restore_weights(&mut self, bytes: u64) -> u64 {
        let more = self.plan.residency.more(&self.plan.weights, bytes);
        match more {
            Some(more) => self.place_weights(more),
            None => self.plan.residency.memory_bytes(),
        }
    }

    /// Brings weights where `residency` has them, if that can be done. Returns the memory they take then.
    fn place_weights(&mut self, residency: Residency) -> u64 {
        if self.model.place_weights(&residency).is_ok() {
            self.weights_to_spare = residency.to_spare(&self.plan.weights);
            self.has_all_weights = residency.is_whole(&self.plan.weights);
            self.plan.residency = residency;
        }
        self.plan.residency.memory_bytes()
    }

    /// Whether all weights are in memory that can be.
    pub(crate) fn has_all_weights(&self) -> bool {
        self.has_all_weights
    }

    /// Bytes of weights in memory that could be read for each pass instead.
    pub(crate) fn weights_to_spare(&self) -> u64 {
        self.weights_to_spare
    }

    /// Experts of a mixture, where weights are read into memory.
    #[must_use]
    pub fn experts(&self) -> Option<ExpertStatus> {
        Some(ExpertStatus {
            slots: self.plan.residency.experts?,
            counts: self.model.expert_counts()?,
        })
    }

    /// Neurons that are read one by one.
    #[must_use]
    pub fn neurons(&self) -> Option<NeuronStatus> {
        Some(NeuronStatus {
            slots: self.plan.residency.neurons?,
            reads: self.model.neuron_reads()?,
        })
    }

    /// From now on writes down which experts tokens choose, to `trace`, or to none. Returns what it was before. Where
    /// another device than the processor computes, which does not tell, nothing is written.
    pub fn record_experts(&mut self, trace: Option<TraceWriter>) -> Option<TraceWriter> {
        self.scratch.record(trace)
    }

    /// From now on writes down which neurons are active, to `recorder`, or to none. Returns what it was before.
    pub(crate) fn record_neurons(
        &mut self,
        recorder: Option<NeuronRecorder>,
    ) -> Option<NeuronRecorder> {
        self.scratch.record_neurons(recorder)
    }

    /// Logits after every one of `tokens`, a row of vocabulary size at a time and in order, each
    /// with the position of the token it follows. Each pass computes as many tokens as there is room
    /// for rows: one, unless the engine is set up for [`EngineConfig::scoring`].
    ///
    /// # Errors
    /// [`EngineError`] when a token is out of range, the context is too short, or a row is not
    /// finite.
    pub fn score(
        &mut self,
        tokens: &[u32],
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<KvReport, EngineError> {
        let mut sequence = self.cache.sequence(self.context_tokens())?;
        for chunk in tokens.chunks(self.scratch.limits().logit_rows) {
            self.prepare_rows(&mut sequence, chunk.len())?;
            let segment = Segment {
                tokens: chunk,
                sequence: &mut sequence,
                logits: LogitRows::All,
                images: &[],
            };
            let memory = (&mut self.executor, &mut self.scratch);
            let segments = &mut [segment];
            let (rows, _) = pass(&self.model, &self.cpu, memory, segments, Wanted::Logits)?;
            for (offset, row) in rows.logits().enumerate() {
                row::check_finite(row)?;
                each(sequence.len() + offset, row);
            }
            sequence.accept(chunk.len());
        }
        Ok(sequence.report())
    }

    /// Runs `segments`, all prepared, and returns what is wanted of the rows that they ask for.
    ///
    /// # Errors
    /// [`EngineError::Forward`] before anything is computed.
    pub(crate) fn forward(
        &mut self,
        segments: &mut [Segment<'_>],
        wanted: Wanted,
    ) -> Result<Pass<'_>, EngineError> {
        let memory = (&mut self.executor, &mut self.scratch);
        let (rows, features) = pass(&self.model, &self.cpu, memory, segments, wanted)?;
        let tokenizer = self.model.tokenizer();
        Ok(Pass {
            rows,
            features,
            tokenizer,
        })
    }

    /// Takes states back to the first tokens of the last pass, those of each of `segments`.
    ///
    /// # Errors
    /// [`EngineError::Forward`] before anything is computed.
    pub(crate) fn rewind(&mut self, segments: &mut [Segment<'_>]) -> Result<(), EngineError> {
        Ok(self.model.rewind(&self.cpu, segments, &mut self.scratch)?)
    }

    /// Whether activations of earlier passes are still in memory.
    pub(crate) fn holds_activations(&self) -> bool {
        self.scratch.is_used()
    }

    /// Gives the memory of activations back to the system, until the next pass.
    pub(crate) fn give_back_activations(&mut self) {
        self.scratch.give_back();
    }

    /// The largest batch one pass takes.
    pub(crate) fn batch_limits(&self) -> BatchLimits {
        self.scratch.limits()
    }

    /// The model being run.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The processor it runs on.
    #[must_use]
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// The device that computes in place of the processor, and what it has, if there is one.
    #[must_use]
    pub fn device(&self) -> Option<DeviceStatus> {
        let on = self.executor.as_ref()?;
        let (ledger, geometry) = (self.cache.ledger(), self.cache.geometry());
        Some(DeviceStatus {
            name: on.device.name().to_owned(),
            layers: geometry.layers().len() - geometry.host_layers(),
            host_layers: geometry.host_layers(),
            memory: on.memory(),
            kv: ledger.committed.saturating_sub(ledger.host_beside),
        })
    }

    /// The pool its sessions' rows come from.
    #[must_use]
    pub fn kv_cache(&self) -> &KvCache {
        &self.cache
    }

    /// Tokens a session may hold.
    #[must_use]
    pub fn context_tokens(&self) -> usize {
        self.plan.kv.context_tokens
    }

    /// What the process may commit, and for what.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Bytes that the process has beyond the plan, KV pages aside, and so that KV pages do not get.
    /// Costs a small file to read; zero where the plan alone counts.
    #[must_use]
    pub fn beyond_plan(&self) -> u64 {
        let apart = self.cache.anonymous_bytes() + self.model.placed_bytes();
        self.process.beyond_plan(self.process.held(apart))
    }

    /// The system this process runs on.
    pub(crate) fn host(&self) -> Host {
        Host {
            process: self.process,
            cache: self.cache.clone(),
            model: Arc::clone(&self.model),
        }
    }

    /// Where its bytes go.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

#[cfg(test)]
mod tests;
