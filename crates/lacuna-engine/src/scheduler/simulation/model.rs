//! A model without arithmetic: logits are a hash of the tokens that the KV cache holds.
//!
//! Every pass writes each token and its position into all rows and reads all of them back, so a page
//! that is lost, mixed up or handed out twice changes the text or is found at once. A state is the list of
//! all tokens there have been.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lacuna_kernels::{Cpu, CpuConfig, State};
use lacuna_kv::{Keep, KvCache, Layer, Side};
use lacuna_models::{
    BatchLimits, ForwardError, Likeliest, LogitRows, Model, Place, Segment, TokenLogit,
};
use lacuna_pages::ByteLength;
use lacuna_text::tokenizer::Tokenizer;

use super::CONTEXT;
use crate::error::EngineError;
use crate::row;
use crate::runner::{ModelRunner, Pass, Rows, Wanted};
use crate::status::WeightMemory;
use crate::system::FakeSystem;

pub(super) struct PseudoModel {
    /// For its vocabulary.
    model: Arc<Model>,
    cpu: Cpu,
    cache: KvCache,
    limits: BatchLimits,
    logits: Vec<f32>,
    likeliest: Vec<Likeliest>,
    top_k: Vec<TokenLogit>,
    breaks: Breaks,
    weights: Weights,
    /// The clock that passes move, and by how much for each token.
    clock: Option<(FakeSystem, Duration, Duration)>,
    context_tokens: usize,
    /// Whether the likeliest token is another one than that of the same model with this unset.
    errs: bool,
}

/// Bytes of weights, which are in memory as far as they are `held`.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Weights {
    pub(super) whole: u64,
    pub(super) held: u64,
    /// Matrices come and go whole.
    pub(super) matrix: u64,
}

impl Weights {
    /// All of some matrices, in memory.
    pub(super) fn whole(matrices: u64, matrix: u64) -> Self {
        let whole = matrices * matrix;
        Self {
            whole,
            held: whole,
            matrix,
        }
    }
}

/// How a pass fails: before anything is computed, or when all of it is and a value is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Break {
    AtTheStart,
    InLayer,
    InLogits,
}

/// How the next pass fails, if it does.
pub(super) type Breaks = Arc<Mutex<Option<Break>>>;

impl PseudoModel {
    pub(super) fn new(
        model: Arc<Model>,
        cache: KvCache,
        tokens: usize,
        logit_rows: usize,
        breaks: Breaks,
    ) -> Self {
        let cpu = Cpu::new(CpuConfig {
            threads: std::num::NonZeroUsize::MIN,
            ..CpuConfig::default()
        });
        Self {
            model,
            cpu: cpu.expect("a processor"),
            cache,
            limits: BatchLimits {
                tokens,
                logit_rows,
                context_tokens: CONTEXT,
            },
            logits: Vec::new(),
            likeliest: Vec::new(),
            top_k: Vec::new(),
            breaks,
            weights: Weights::default(),
            clock: None,
            context_tokens: CONTEXT,
            errs: false,
        }
    }

    /// The same that is always wrong about what comes.
    pub(super) fn erring(self) -> Self {
        Self { errs: true, ..self }
    }

    /// The same that holds fewer tokens.
    pub(super) fn with_context(self, context_tokens: usize) -> Self {
        Self {
            context_tokens,
            ..self
        }
    }

    pub(super) fn with_weights(self, weights: Weights) -> Self {
        Self { weights, ..self }
    }

    /// From now on a pass takes `pass`, and `each` more for each token.
    pub(super) fn takes_time(&mut self, system: &FakeSystem, pass: Duration, each: Duration) {
        self.clock = Some((system.clone(), pass, each));
    }

    fn write(&self, segment: &mut Segment<'_>) {
        let start = segment.sequence.len();
        for layer in 0..self.cache.geometry().layers().len() {
            let layer = Layer(layer);
            if self.cache.geometry().state_elements(layer) == 0 {
                continue;
            }
            if let Some(inputs) = segment.sequence.state_inputs(layer) {
                let places = inputs.chunks_exact_mut(2).zip(segment.tokens);
                for (offset, (input, &token)) in places.enumerate() {
                    input.copy_from_slice(&[token as f32, (start + offset) as f32]);
                }
            }
            let tokens = segment.tokens.iter().map(|&token| token as f32);
            append(segment.sequence.state(layer), start, tokens);
        }
        for (layer, spec) in self.cache.geometry().own_rows() {
            let rows = |side: Side, mark: f32| -> Vec<f32> {
                let width = spec.row_elements(side);
                let mut rows = vec![0.0; segment.tokens.len() * width];
                let places = rows.chunks_exact_mut(width).zip(segment.tokens);
                for (offset, (row, &token)) in places.enumerate() {
                    row[0] = token as f32;
                    row[1] = (start + offset) as f32;
                    row[2] = layer.0 as f32 + mark;
                }
                rows
            };
            let rows = [rows(Side::Key, 0.25), rows(Side::Value, 0.75)];
            segment.sequence.write(layer, |side, run| {
                self.cpu.store_run(run, &side.of(rows.each_ref())[..]);
            });
        }
    }
}

/// Makes of the state after `start` tokens that after `tokens` as well.
fn append(state: State<'_>, start: usize, tokens: impl ExactSizeIterator<Item = f32>) {
    let State { before, after } = state;
    if let Some(before) = before {
        after.copy_from_slice(before);
    }
    let (count, places) = after.split_first_mut().expect("a state");
    assert_eq!(*count, start as f32, "the state of another token");
    *count += tokens.len() as f32;
    for (place, token) in places[start..].iter_mut().zip(tokens) {
        *place = token;
    }
}

impl PseudoModel {
    /// Fails `how`, at the end for the sake of the last sequence alone, or of the last that is to have logits.
    fn broken(&self, how: Break, segments: &mut [Segment<'_>]) -> ForwardError {
        if let Break::AtTheStart = how {
            return ForwardError::NotPrepared {
                prepared: 0,
                tokens: 0,
            };
        }
        segments.iter_mut().for_each(|segment| self.write(segment));
        let tokens: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
        let logits = |segment: &Segment<'_>| match segment.logits {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => segment.tokens.len(),
        };
        let logits: usize = segments.iter().map(logits).sum();
        let (place, rows) = match how {
            Break::InLogits if logits > 0 => (Place::Logits, logits),
            _ => (Place::Layer(0), tokens),
        };
        ForwardError::NotFinite {
            place,
            row: rows - 1,
        }
    }
}

/// The tokens that a sequence's states and rows hold, which must be the same in all layers: in those with
/// windows, the last of them.
fn read(segment: &mut Segment<'_>) -> Vec<u32> {
    let mut all = Vec::new();
    for layer in 0..segment.sequence.geometry().layers().len() {
        let state = segment.sequence.state(Layer(layer)).after;
        if let Some((count, tokens)) = state.split_first() {
            let tokens = tokens[..*count as usize].iter();
            let tokens: Vec<u32> = tokens.map(|&token| token as u32).collect();
            assert!(all.is_empty() || all == tokens, "states of other tokens");
            all = tokens;
        }
    }
    let sequence = &*segment.sequence;
    let geometry = sequence.geometry();
    let layers = (0..geometry.layers().len()).map(Layer);
    let mut layers: Vec<_> = layers
        .filter_map(|layer| Some((layer, geometry.rows(layer)?)))
        .collect();
    // Those that keep all rows come first.
    layers.sort_by_key(|(_, (_, rows))| rows.keep != Keep::All);
    for (layer, (source, rows)) in layers {
        for (side, mark) in Side::BOTH.into_iter().zip([0.25, 0.75]) {
            let view = sequence.view(layer, side);
            assert_eq!(view.rows().start, rows.keep.first_seen(sequence.len()));
            let token = |position: usize| {
                let row = view.head(position, 0);
                let [token, place, of] = [0, 1, 2].map(|index| {
                    let bytes = &row[4 * index..4 * index + 4];
                    f32::from_ne_bytes(bytes.try_into().expect("four bytes"))
                });
                assert_eq!(place, position as f32, "a row in another's place");
                assert_eq!(of, source.0 as f32 + mark, "a row of another buffer");
                token as u32
            };
            let tokens: Vec<u32> = view.rows().map(token).collect();
            if all.is_empty() {
                all.clone_from(&tokens);
            }
            assert_eq!(all[view.rows()], tokens);
        }
    }
    all
}

/// Logits after `tokens`, for a vocabulary of the length of `row`.
pub(super) fn logits_after(tokens: &[u32], tokenizer: &Tokenizer, row: &mut [f32]) {
    let mix = |state: u64, next: u64| {
        let mixed = (state ^ next).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    let state = tokens
        .iter()
        .fold(1, |state, &token| mix(state, u64::from(token)));
    for (token, logit) in (0u64..).zip(row.iter_mut()) {
        *logit = (mix(state, token) >> 40) as f32 / (1 << 21) as f32;
    }
    // Most of the time tokens go round in a circle, so that much of what comes can be guessed, and not all.
    if !(state >> 20).is_multiple_of(6) {
        let next = tokens.last().map_or(0, |&last| 300 + (last * 7 + 1) % 12);
        row[next as usize] += 12.0;
    }
    // A text ends now and then.
    if (state >> 33).is_multiple_of(300) {
        for token in tokenizer.end_of_generation() {
            row[token as usize] = 100.0;
        }
    }
}

impl ModelRunner for PseudoModel {
    fn forward(&mut self, segments: &mut [Segment<'_>]) -> Result<Pass<'_>, EngineError> {
        let tokens: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
        if let Some(how) = self.breaks.lock().expect("no panic").take() {
            return Err(self.broken(how, segments).into());
        }
        assert!(tokens <= self.limits.tokens, "{tokens} tokens in a step");
        if let Some((system, pass, each)) = &self.clock {
            system.pass(*pass + *each * tokens as u32);
        }
        let vocabulary = self.vocabulary();
        self.logits.clear();
        for segment in segments {
            assert!(!segment.tokens.is_empty(), "a segment of nothing");
            assert_eq!(segment.sequence.prepared(), segment.tokens.len());
            self.write(segment);
            let held = read(segment);
            assert!(held.ends_with(segment.tokens));
            let rows = match segment.logits {
                LogitRows::None => 0,
                LogitRows::Last => 1,
                LogitRows::All => segment.tokens.len(),
            };
            for end in held.len() - rows..held.len() {
                let start = self.logits.len();
                self.logits.resize(start + vocabulary, 0.0);
                let row = &mut self.logits[start..];
                logits_after(&held[..=end], self.model.tokenizer(), row);
                if self.errs {
                    row.rotate_right(1);
                }
            }
        }
        let rows = self.logits.len() / vocabulary;
        assert!(rows <= self.limits.logit_rows, "{rows} rows in a step");
        Ok(Pass {
            features: &[],
            rows: Rows::Logits(&self.logits, vocabulary),
            tokenizer: self.model.tokenizer(),
        })
    }

    fn forward_for(
        &mut self,
        segments: &mut [Segment<'_>],
        wanted: Wanted,
    ) -> Result<Pass<'_>, EngineError> {
        self.forward(segments)?;
        let width = self.vocabulary();
        let rows = self.logits.chunks_exact(width);
        let rows = match wanted {
            Wanted::Likeliest => {
                let tokens = rows.map(|row| Likeliest::Token(row::likeliest(row)));
                self.likeliest = tokens.collect();
                Rows::Likeliest(&self.likeliest)
            }
            Wanted::TopK(count) if count <= width / 2 => {
                self.top_k = rows.flat_map(|logits| row::top_k(logits, count)).collect();
                Rows::TopK(&self.top_k, count)
            }
            Wanted::TopK(_) | Wanted::Logits => Rows::Logits(&self.logits, width),
        };
        Ok(Pass {
            features: &[],
            rows,
            tokenizer: self.model.tokenizer(),
        })
    }

    fn rewind(&mut self, segments: &mut [Segment<'_>]) -> Result<(), EngineError> {
        for segment in segments {
            assert!(segment.sequence.rewind(segment.tokens.len()), "states");
            let start = segment.sequence.len();
            for layer in (0..self.cache.geometry().layers().len()).map(Layer) {
                if self.cache.geometry().state_elements(layer) == 0 {
                    continue;
                }
                let inputs = segment.sequence.state_inputs(layer).expect("kept");
                let inputs = inputs.chunks_exact(2).zip(segment.tokens);
                for (offset, (input, &token)) in inputs.clone().enumerate() {
                    assert_eq!(*input, [token as f32, (start + offset) as f32]);
                }
                let tokens: Vec<f32> = inputs.map(|(input, _)| input[0]).collect();
                let state = segment.sequence.state(layer);
                append(state, start, tokens.into_iter());
            }
        }
        Ok(())
    }

    fn batch_limits(&self) -> BatchLimits {
        self.limits
    }

    fn kv_cache(&self) -> &KvCache {
        &self.cache
    }

    fn context_tokens(&self) -> usize {
        self.context_tokens
    }

    fn vocabulary(&self) -> usize {
        self.model.spec().vocabulary
    }

    fn tokenizer(&self) -> &Tokenizer {
        self.model.tokenizer()
    }

    fn weights_to_spare(&self) -> u64 {
        self.weights.held
    }

    fn spare_weights(&mut self, bytes: u64) -> u64 {
        let Weights { held, matrix, .. } = &mut self.weights;
        if *held == 0 || bytes > *held {
            return 0;
        }
        // One at least, as an engine lets go of many at a time.
        let freed = bytes.max(1).next_multiple_of(*matrix);
        *held -= freed;
        freed
    }

    fn has_all_weights(&self) -> bool {
        self.weights.held == self.weights.whole
    }

    fn restore_weights(&mut self, bytes: u64) -> u64 {
        let Weights {
            whole,
            held,
            matrix,
        } = &mut self.weights;
        let matrices = bytes.checked_div(*matrix).unwrap_or(0);
        *held += (matrices * *matrix).min(*whole - *held);
        *held
    }

    fn weight_memory(&self) -> WeightMemory {
        WeightMemory {
            pinned: ByteLength::new(self.weights.held),
            ..WeightMemory::default()
        }
    }

    fn kv_to_begin_with(&self, _budget: u64) -> u64 {
        self.weights.matrix
    }
}
