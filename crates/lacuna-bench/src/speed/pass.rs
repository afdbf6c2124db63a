//! Timed forward passes over sequences that are filled with random rows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lacuna_cli::{output, record_experts};
use lacuna_engine::EngineConfig;
use lacuna_kernels::Cpu;
use lacuna_kv::{KvCache, KvElements, KvPolicy, Sequence};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::{
    BatchLimits, ComputeDevice, Executor, ExpertCounts, LogitRows, Model, NeuronReads, Scratch,
    Segment,
};
use lacuna_pages::ByteLength;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::Batch;
use crate::arguments::BenchSpeedArgs;
use crate::limits::{Limiter, Limits};
use crate::processor;
use crate::samples::{Samples, Timing, median};

/// Rows written at once into a context that is filled.
const FILLED_ROWS: usize = 256;

/// Steps between two looks at what memory delivers.
const STEPS_PER_LIMIT: usize = 4;

/// How long calls took, and the middle of what part of a limit that was.
pub(super) struct Timed {
    pub(super) timing: Timing,
    /// If there was one to measure.
    pub(super) of_limit: Option<f64>,
    pub(super) slots: SlotCounts,
}

/// What has been asked of slots for experts, and of those for neurons.
#[derive(Clone, Copy, Default)]
pub(super) struct SlotCounts {
    pub(super) experts: Option<ExpertCounts>,
    pub(super) neurons: Option<NeuronReads>,
}

impl Timed {
    fn new(times: Samples, parts: Vec<f64>, slots: SlotCounts) -> Result<Self> {
        Ok(Self {
            timing: times.timing().context("nothing was timed")?,
            of_limit: median(parts),
            slots,
        })
    }

    /// Of the middle call.
    pub(super) fn seconds(&self) -> f64 {
        self.timing.median_us / 1e6
    }
}

/// What computes.
enum Place {
    Processor(Box<Scratch>),
    Device {
        device: Arc<dyn ComputeDevice>,
        plan: ArenaPlan,
        /// With the KV elements that are measured.
        executor: Option<Box<dyn Executor>>,
    },
}

pub(super) struct Bench<'a> {
    model: &'a Arc<Model>,
    cpu: Cpu,
    place: Place,
    batch_tokens: usize,
    policy: KvPolicy,
    context_tokens: usize,
    random: ChaCha8Rng,
    limiter: Limiter,
}

/// The engine whose passes are measured. Of several types of KV elements, the budget is for the first.
pub(super) fn config(args: &BenchSpeedArgs) -> EngineConfig {
    let config = EngineConfig::default();
    let (context_tokens, sequences) = (context_tokens(args), most(&args.batch).max(1));
    EngineConfig {
        threads: args.cpu.threads,
        matmul_precision: args.cpu.matmul_precision,
        kv_policy: args.kv,
        kv_elements: args.kv_type.first().copied().unwrap_or_default(),
        context_tokens: Some(context_tokens),
        batch_tokens: config.batch_tokens.min(context_tokens).max(sequences),
        sequences,
        budget: args.budget.map(|budget| ByteLength::new(budget.0)),
        weights: args.weights,
        neurons: args.neurons.clone(),
        ..config
    }
}

fn context_tokens(args: &BenchSpeedArgs) -> usize {
    let deepest = most(&args.depth) + args.generate + 1;
    deepest.max(most(&args.prompt))
}

fn most(values: &[usize]) -> usize {
    values.iter().copied().max().unwrap_or(0)
}

impl<'a> Bench<'a> {
    pub(super) fn new(
        args: &BenchSpeedArgs,
        config: &EngineConfig,
        model: &'a Arc<Model>,
    ) -> Result<Self> {
        let cpu = processor(config)?;
        let context_tokens = context_tokens(args);
        let limits = BatchLimits {
            tokens: config.batch_tokens,
            logit_rows: config.sequences,
            context_tokens,
        };
        let plan = ArenaPlan::new(model.program(), limits)?;
        let place = match &config.device {
            None => {
                let mut scratch = Scratch::new(model.program(), plan)?;
                if let Some(path) = &args.record_experts {
                    scratch.record(Some(record_experts(path, model)?));
                }
                Place::Processor(Box::new(scratch))
            }
            Some(_) if args.record_experts.is_some() => {
                let told =
                    "experts that a device chooses are not recorded: leave --record-experts out";
                return Err(output::Usage(told.into()).into());
            }
            Some(device) => Place::Device {
                device: Arc::clone(device),
                plan,
                executor: None,
            },
        };
        Ok(Self {
            model,
            cpu,
            place,
            batch_tokens: config.batch_tokens,
            policy: args.kv,
            context_tokens,
            random: ChaCha8Rng::seed_from_u64(0),
            limiter: Limiter::new(),
        })
    }

    pub(super) fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// Ends the record of experts, if there is one.
    pub(super) fn end_record(&mut self) -> Result<()> {
        let Place::Processor(scratch) = &mut self.place else {
            return Ok(());
        };
        match scratch.record(None) {
            Some(trace) => trace.finish().context("cannot write the record of experts"),
            None => Ok(()),
        }
    }

    /// What slots have been asked for since `before`.
    fn asked(&self, before: SlotCounts) -> SlotCounts {
        let experts = self.model.expert_counts();
        let neurons = self.model.neuron_reads();
        SlotCounts {
            experts: experts.map(|now| now.since(before.experts.unwrap_or_default())),
            neurons: neurons.map(|now| now.since(before.neurons.unwrap_or_default())),
        }
    }

    /// What the machine reached at best in all the time that was measured.
    pub(super) fn limits(self) -> Limits {
        self.limiter.limits()
    }

    /// Computes a prompt of `tokens`, `macs` multiplications: how long that takes, and what part of
    /// the 8-bit products that the processor reaches it is.
    pub(super) fn prompt(
        &mut self,
        elements: KvElements,
        tokens: usize,
        macs: u64,
        repeats: usize,
    ) -> Result<Timed> {
        let cache = self.cache(elements)?;
        let (mut times, mut parts) = (Samples::default(), Vec::new());
        let mut asked = SlotCounts::default();
        // One pass more, which finds memory and caches cold and is not counted.
        for repeat in 0..=repeats {
            if repeat == 1 {
                asked = self.asked(SlotCounts::default());
            }
            let ids = self.ids(tokens);
            let mut sequence = cache.sequence(self.context_tokens)?;
            let before = self.products();
            let time = self.compute(&mut sequence, &ids)?;
            let rate = before.zip(self.products());
            if repeat > 0 {
                times.push(time);
                let reached = macs as f64 / time.as_secs_f64() / 1e9;
                parts.extend(rate.map(|(before, after)| 2.0 * reached / (before + after)));
            }
        }
        Timed::new(times, parts, self.asked(asked))
    }

    fn compute(&mut self, sequence: &mut Sequence, ids: &[u32]) -> Result<Duration> {
        let start = Instant::now();
        let chunk = self.batch_tokens;
        for (index, tokens) in ids.chunks(chunk).enumerate() {
            let last = (index + 1) * chunk >= ids.len();
            sequence.prepare(tokens.len())?;
            let segment = Segment {
                tokens,
                sequence,
                logits: if last {
                    LogitRows::Last
                } else {
                    LogitRows::None
                },
                images: &[],
            };
            self.forward(&mut [segment])?;
            sequence.accept(tokens.len());
        }
        Ok(start.elapsed())
    }

    /// Computes a token more for each sequence of `batch`, again and again: how long
    /// a step takes, and what part of what memory delivers its `bytes` are.
    pub(super) fn steps(
        &mut self,
        elements: KvElements,
        batch: Batch,
        bytes: u64,
        steps: usize,
    ) -> Result<Timed> {
        let sequences = batch.sequences;
        let cache = self.cache(elements)?;
        let mut filled: Vec<Sequence> = Vec::new();
        for _ in 0..sequences {
            let sequence = match filled.first_mut() {
                Some(first) if batch.shared => first.fork()?,
                _ => self.filled(&cache, batch.depth)?,
            };
            filled.push(sequence);
        }
        let ids = self.ids(sequences);
        self.step(&mut filled, &ids)?;
        let (mut times, mut parts) = (Samples::default(), Vec::new());
        let asked = self.asked(SlotCounts::default());
        let mut before = self.bandwidth()?;
        for start in (0..steps).step_by(STEPS_PER_LIMIT) {
            let mut group = Vec::new();
            for _ in start..steps.min(start + STEPS_PER_LIMIT) {
                let ids = self.ids(sequences);
                let start = Instant::now();
                self.step(&mut filled, &ids)?;
                group.push(start.elapsed());
            }
            let after = self.bandwidth()?;
            let rate = (before + after) / 2.0;
            before = after;
            for time in group {
                times.push(time);
                parts.push(bytes as f64 / time.as_secs_f64() / 1e9 / rate);
            }
        }
        Timed::new(times, parts, self.asked(asked))
    }

    fn forward(&mut self, segments: &mut [Segment<'_>]) -> Result<()> {
        match &mut self.place {
            Place::Processor(scratch) => {
                self.model.forward(&self.cpu, segments, scratch)?;
            }
            Place::Device { executor, .. } => {
                let executor = executor.as_mut().context("a cache comes before passes")?;
                executor.forward(&self.cpu, segments)?;
            }
        }
        Ok(())
    }

    /// 8-bit products that the processor reaches now, in 1e9, if it computes.
    fn products(&mut self) -> Option<f64> {
        match self.place {
            Place::Processor(_) => Some(self.limiter.int8(&self.cpu)),
            Place::Device { .. } => None,
        }
    }

    /// Bytes that memory delivers now, in 1e9.
    fn bandwidth(&mut self) -> Result<f64> {
        Ok(match &self.place {
            Place::Processor(_) => self.limiter.read(&self.cpu),
            Place::Device { device, .. } => self.limiter.copies(&**device)?,
        })
    }

    fn step(&mut self, sequences: &mut [Sequence], ids: &[u32]) -> Result<()> {
        for sequence in &mut *sequences {
            sequence.prepare(1)?;
        }
        let segment = |(sequence, tokens)| Segment {
            tokens,
            sequence,
            logits: LogitRows::Last,
            images: &[],
        };
        let mut segments: Vec<Segment<'_>> = sequences
            .iter_mut()
            .zip(ids.chunks(1))
            .map(segment)
            .collect();
        self.forward(&mut segments)?;
        for sequence in sequences {
            sequence.accept(1);
        }
        Ok(())
    }

    /// A sequence that holds `depth` random rows, or those of so many tokens where these are on a device.
    fn filled(&mut self, cache: &KvCache, depth: usize) -> Result<Sequence> {
        let geometry = cache.geometry();
        let mut sequence = cache.sequence(self.context_tokens)?;
        if let Place::Device { .. } = self.place {
            let ids = self.ids(depth);
            self.compute(&mut sequence, &ids)?;
            return Ok(sequence);
        }
        let mut rows = vec![0.0; FILLED_ROWS * geometry.widest_row()];
        for value in &mut rows {
            *value = self.random.next_u32() as f32 / u32::MAX as f32 - 0.5;
        }
        for start in (0..depth).step_by(FILLED_ROWS) {
            let count = FILLED_ROWS.min(depth - start);
            sequence.prepare(count)?;
            for (layer, spec) in geometry.own_rows() {
                sequence.write(layer, |side, run| {
                    let rows = &rows[..count * spec.row_elements(side)];
                    self.cpu.store_run(run, rows);
                });
            }
            sequence.accept(count);
        }
        Ok(sequence)
    }

    fn cache(&mut self, elements: KvElements) -> Result<KvCache> {
        let geometry = self.model.spec().kv_geometry(elements)?;
        let (device, plan, executor) = match &mut self.place {
            Place::Processor(scratch) => {
                let cache = KvCache::new(geometry, self.policy)?;
                let context = self.context_tokens;
                return Ok(self.model.smooth_keys(&self.cpu, cache, context, scratch)?);
            }
            Place::Device {
                device,
                plan,
                executor,
            } => (device, plan, executor),
        };
        let cache = device.kv_cache(geometry, self.policy)?;
        // Before another has its memory.
        *executor = None;
        let model = Arc::clone(self.model);
        *executor = Some(device.executor(model, cache.geometry(), plan)?);
        Ok(cache)
    }

    fn ids(&mut self, tokens: usize) -> Vec<u32> {
        let vocabulary = self.model.spec().vocabulary as u32;
        (0..tokens)
            .map(|_| self.random.next_u32() % vocabulary)
            .collect()
    }
}
