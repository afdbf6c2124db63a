//! The forward pass shared by every dense decoder: norm, attention, norm, gated feed-forward.
//!
//! Weights stay in the mapped file and activations in a [`Scratch`] arena; the KV cache is passed in
//! with each [`Segment`], never kept here. Segments of different sequences are laid end to end
//! without padding, and one token's result does not depend on what else is in the batch.

use bytemuck::{AnyBitPattern, NoUninit};
use lacuna_kernels::{Activations, AttentionShape, Cached, Cpu, Sequences};
use lacuna_kv::{Layer, Sequence, Side};

use crate::config::Config;
use crate::error::{ForwardError, LoadError, Place};
use crate::plan::{Buffer, Step, attention_shape};
use crate::scratch::{FiniteCheck, Scratch};
use crate::weights::{Linear, Source};

/// Which rows of logits a segment asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: an inner chunk of a prompt.
    None,
    /// The row after the segment's last token.
    Last,
    /// One row after every token.
    All,
}

/// Tokens of one sequence in a forward pass.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Tokens that follow what the sequence holds; not empty.
    pub tokens: &'a [u32],
    /// The sequence's KV cache, with rows for `tokens` prepared.
    pub sequence: &'a mut Sequence,
    /// Rows of logits wanted.
    pub logits: LogitRows,
}

impl Segment<'_> {
    fn logit_rows(&self) -> usize {
        match self.logits {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => self.tokens.len(),
        }
    }
}

/// Embedding, blocks and output of one model.
#[derive(Debug)]
pub(crate) struct Decoder {
    embedding: Linear,
    blocks: Vec<Block>,
    output_norm: Vec<f32>,
    /// `None` where the embedding table doubles as the output matrix.
    output: Option<Linear>,
    inverse_frequencies: Vec<f32>,
}

/// One decoder block.
#[derive(Debug)]
struct Block {
    attention_norm: Vec<f32>,
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    query_norm: Option<Vec<f32>>,
    key_norm: Option<Vec<f32>>,
    feed_forward_norm: Vec<f32>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn load(config: &Config, source: &Source<'_>) -> Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden, config.feed_forward);
        let (queries, keys) = (config.query_width(), config.kv_width());
        Ok(Self {
            attention_norm: source.vector("attn_norm", hidden)?,
            query: source.linear("attn_q", queries, hidden)?,
            key: source.linear("attn_k", keys, hidden)?,
            value: source.linear("attn_v", keys, hidden)?,
            attention_output: source.linear("attn_output", hidden, queries)?,
            query_norm: source.head_norm("attn_q_norm", config.head_dim)?,
            key_norm: source.head_norm("attn_k_norm", config.head_dim)?,
            feed_forward_norm: source.vector("ffn_norm", hidden)?,
            gate: source.linear("ffn_gate", inner, hidden)?,
            up: source.linear("ffn_up", inner, hidden)?,
            down: source.linear("ffn_down", hidden, inner)?,
        })
    }
}

impl Decoder {
    pub(crate) fn load(config: &Config, source: &Source<'_>) -> Result<Self, LoadError> {
        let blocks = (0..config.layers)
            .map(|layer| Block::load(config, &source.block(layer)))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            embedding: source.linear("token_embd", config.vocabulary, config.hidden)?,
            blocks,
            output_norm: source.vector("output_norm", config.hidden)?,
            output: source.optional_linear("output", config.vocabulary, config.hidden)?,
            inverse_frequencies: source.inverse_frequencies(config)?,
        })
    }

    /// Runs all tokens of `segments` through the model; logits are left in `scratch`, and the
    /// number of their rows is returned.
    pub(crate) fn forward(
        &self,
        config: &Config,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        scratch: &mut Scratch,
    ) -> Result<usize, ForwardError> {
        check(config, segments, scratch)?;
        let tokens = segments.iter().map(|segment| segment.tokens.len()).sum();
        let mut pass = Pass {
            config,
            cpu,
            shape: attention_shape(config),
            tokens,
            scratch,
        };
        pass.embed(&self.embedding, segments);
        pass.check_hidden(Step::Embed, Place::Embedding)?;
        pass.rotations(&self.inverse_frequencies, segments);
        for (index, block) in self.blocks.iter().enumerate() {
            pass.attention(block, Layer(index), segments);
            pass.feed_forward(block);
            pass.check_hidden(Step::Down, Place::Layer(index))?;
        }
        let rows = pass.choose(segments);
        if rows > 0 {
            let output = self.output.as_ref().unwrap_or(&self.embedding);
            pass.logits(rows, &self.output_norm, output);
            pass.check_logits(rows)?;
        }
        Ok(rows)
    }
}

fn check(config: &Config, segments: &[Segment<'_>], scratch: &Scratch) -> Result<(), ForwardError> {
    let tokens: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
    let logit_rows: usize = segments.iter().map(Segment::logit_rows).sum();
    let limits = scratch.limits();
    if tokens == 0 || tokens > limits.tokens || logit_rows > limits.logit_rows {
        return Err(ForwardError::BatchTooLarge {
            tokens,
            logit_rows,
            limits,
        });
    }
    for segment in segments {
        if let Some(&token) = segment
            .tokens
            .iter()
            .find(|&&token| token as usize >= config.vocabulary)
        {
            return Err(ForwardError::TokenOutOfRange {
                token,
                vocabulary: config.vocabulary,
            });
        }
        let prepared = segment.sequence.prepared();
        if prepared != segment.tokens.len() {
            return Err(ForwardError::NotPrepared {
                prepared,
                tokens: segment.tokens.len(),
            });
        }
    }
    Ok(())
}

/// One forward pass under way: a method for each step, on the buffers the plan gives that step.
struct Pass<'a> {
    config: &'a Config,
    cpu: &'a Cpu,
    shape: AttentionShape,
    tokens: usize,
    scratch: &'a mut Scratch,
}

impl Pass<'_> {
    fn check_hidden(&mut self, step: Step, place: Place) -> Result<(), ForwardError> {
        self.check(step, Buffer::Hidden, self.tokens, self.config.hidden, place)
    }

    fn check_logits(&mut self, rows: usize) -> Result<(), ForwardError> {
        let width = self.config.vocabulary;
        self.check(Step::Logits, Buffer::Logits, rows, width, Place::Logits)
    }

    /// Whether a buffer's `rows` of `width` are finite, if that is to be known.
    fn check(
        &mut self,
        step: Step,
        buffer: Buffer,
        rows: usize,
        width: usize,
        place: Place,
    ) -> Result<(), ForwardError> {
        if self.scratch.check() == FiniteCheck::Off {
            return Ok(());
        }
        let [values] = self.scratch.at(step, [buffer]);
        let values: &mut [f32] = first(values, rows * width);
        match self.cpu.first_not_finite(values) {
            None => Ok(()),
            Some(index) => Err(ForwardError::NotFinite {
                place,
                row: index / width,
            }),
        }
    }

    fn embed(&mut self, table: &Linear, segments: &[Segment<'_>]) {
        let width = self.config.hidden;
        let [hidden] = self.scratch.at(Step::Embed, [Buffer::Hidden]);
        let mut rest: &mut [f32] = first(hidden, self.tokens * width);
        for segment in segments {
            let (rows, tail) = rest.split_at_mut(segment.tokens.len() * width);
            self.cpu.embed(rows, &table.matrix(), segment.tokens);
            rest = tail;
        }
    }

    fn rotations(&mut self, inverse_frequencies: &[f32], segments: &[Segment<'_>]) {
        let buffers = [Buffer::Positions, Buffer::Rotations];
        let [positions, table] = self.scratch.at(Step::Rotations, buffers);
        let positions: &mut [u32] = first(positions, self.tokens);
        let wanted = segments
            .iter()
            .flat_map(|segment| (segment.sequence.len()..).take(segment.tokens.len()));
        for (slot, position) in positions.iter_mut().zip(wanted) {
            *slot = u32::try_from(position).expect("a context is shorter than 2^32 tokens");
        }
        let table = first(table, self.tokens * self.config.head_dim);
        self.cpu
            .rope_table(table, positions, inverse_frequencies, 1.0);
    }

    /// `hidden += W_o attention(rope(norm(W_q x)), rope(norm(W_k x)), W_v x)` with `x = norm(hidden)`.
    fn attention(&mut self, block: &Block, layer: Layer, segments: &mut [Segment<'_>]) {
        self.project(block);
        self.rotate(block);
        self.attend(layer, segments);
        self.attention_output(block);
    }

    fn project(&mut self, block: &Block) {
        let (config, cpu, tokens) = (self.config, self.cpu, self.tokens);
        let buffers = [
            Buffer::Hidden,
            Buffer::AttentionInput,
            Buffer::AttentionInputBlocks,
            Buffer::Query,
            Buffer::Key,
            Buffer::Value,
        ];
        let [hidden, input, blocks, query, key, value] = self.scratch.at(Step::Project, buffers);
        let input = first(input, tokens * config.hidden);
        let hidden: &mut [f32] = first(hidden, tokens * config.hidden);
        let (weight, epsilon) = (&block.attention_norm, config.norm_epsilon);
        cpu.rms_norm(input, hidden, weight, epsilon, config.hidden);
        let input = activations(cpu, input, tokens, blocks);
        let (queries, keys) = (tokens * config.query_width(), tokens * config.kv_width());
        let outs = [first(query, queries), first(key, keys), first(value, keys)];
        Linear::apply_each([&block.query, &block.key, &block.value], cpu, outs, &input);
    }

    fn rotate(&mut self, block: &Block) {
        let (config, cpu, tokens) = (self.config, self.cpu, self.tokens);
        let buffers = [Buffer::Query, Buffer::Key, Buffer::Rotations];
        let [query, key, table] = self.scratch.at(Step::Rotate, buffers);
        let table: &mut [f32] = first(table, tokens * config.head_dim);
        for (rows, norm, heads) in [
            (query, &block.query_norm, config.query_heads),
            (key, &block.key_norm, config.kv_heads),
        ] {
            let rows = first(rows, tokens * heads * config.head_dim);
            if let Some(weight) = norm {
                cpu.rms_norm_in_place(rows, weight, config.norm_epsilon, config.head_dim);
            }
            cpu.rope(rows, heads, config.head_dim, config.rope.style, table);
        }
    }

    /// Stores each segment's new rows and attends over all rows of its sequence.
    fn attend(&mut self, layer: Layer, segments: &mut [Segment<'_>]) {
        let (queries, keys) = (self.config.query_width(), self.config.kv_width());
        let buffers = [
            Buffer::Query,
            Buffer::Key,
            Buffer::Value,
            Buffer::Attended,
            Buffer::AttentionStates,
        ];
        let [query, key, value, attended, states] = self.scratch.at(Step::Attend, buffers);
        let query: &mut [f32] = first(query, self.tokens * queries);
        let key: &mut [f32] = first(key, self.tokens * keys);
        let value: &mut [f32] = first(value, self.tokens * keys);
        let attended = first(attended, self.tokens * queries);
        let states = bytemuck::cast_slice_mut(states);
        let mut start = 0;
        for segment in &mut *segments {
            let end = start + segment.tokens.len();
            let new = start * keys..end * keys;
            let (key, value) = (&key[new.clone()], &value[new]);
            segment.sequence.store(self.cpu, layer, key, value);
            start = end;
        }
        let sequences = InLayer(segments, layer);
        self.cpu
            .attention_each(attended, query, &sequences, &self.shape, None, states);
    }

    fn attention_output(&mut self, block: &Block) {
        let (config, cpu, tokens) = (self.config, self.cpu, self.tokens);
        let buffers = [
            Buffer::Attended,
            Buffer::AttendedBlocks,
            Buffer::AttentionOutput,
            Buffer::Hidden,
        ];
        let [attended, blocks, output, hidden] = self.scratch.at(Step::AttentionOutput, buffers);
        let attended = first(attended, tokens * config.query_width());
        let attended = activations(cpu, attended, tokens, blocks);
        let output = first(output, tokens * config.hidden);
        block.attention_output.apply(cpu, output, &attended);
        cpu.add(first(hidden, tokens * config.hidden), output);
    }

    /// `hidden += W_down (silu(W_gate x) * W_up x)` with `x = norm(hidden)`.
    fn feed_forward(&mut self, block: &Block) {
        self.gate_up(block);
        self.activate();
        self.down(block);
    }

    fn gate_up(&mut self, block: &Block) {
        let (config, cpu, tokens) = (self.config, self.cpu, self.tokens);
        let buffers = [
            Buffer::Hidden,
            Buffer::FeedForwardInput,
            Buffer::FeedForwardInputBlocks,
            Buffer::Gate,
            Buffer::Up,
        ];
        let [hidden, input, blocks, gate, up] = self.scratch.at(Step::GateUp, buffers);
        let hidden: &mut [f32] = first(hidden, tokens * config.hidden);
        let input = first(input, tokens * config.hidden);
        let (weight, epsilon) = (&block.feed_forward_norm, config.norm_epsilon);
        cpu.rms_norm(input, hidden, weight, epsilon, config.hidden);
        let input = activations(cpu, input, tokens, blocks);
        let inner = tokens * config.feed_forward;
        let outs = [first(gate, inner), first(up, inner)];
        Linear::apply_each([&block.gate, &block.up], cpu, outs, &input);
    }

    fn activate(&mut self) {
        let inner = self.tokens * self.config.feed_forward;
        let buffers = [Buffer::Gate, Buffer::Up];
        let [gate, up] = self.scratch.at(Step::Activate, buffers);
        self.cpu.silu_mul(first(gate, inner), first(up, inner));
    }

    fn down(&mut self, block: &Block) {
        let (config, cpu, tokens) = (self.config, self.cpu, self.tokens);
        let buffers = [
            Buffer::Gate,
            Buffer::GateBlocks,
            Buffer::FeedForwardOutput,
            Buffer::Hidden,
        ];
        let [gate, blocks, output, hidden] = self.scratch.at(Step::Down, buffers);
        let gate = first(gate, tokens * config.feed_forward);
        let gate = activations(cpu, gate, tokens, blocks);
        let output = first(output, tokens * config.hidden);
        block.down.apply(cpu, output, &gate);
        cpu.add(first(hidden, tokens * config.hidden), output);
    }

    /// Picks the rows the segments ask for; returns their number.
    fn choose(&mut self, segments: &[Segment<'_>]) -> usize {
        let width = self.config.hidden;
        let buffers = [Buffer::Hidden, Buffer::Chosen];
        let [hidden, chosen] = self.scratch.at(Step::Choose, buffers);
        let hidden: &mut [f32] = bytemuck::cast_slice_mut(hidden);
        let chosen: &mut [f32] = bytemuck::cast_slice_mut(chosen);
        let (mut rows, mut end) = (0, 0);
        for segment in segments {
            end += segment.tokens.len();
            let wanted = segment.logit_rows();
            chosen[rows * width..(rows + wanted) * width]
                .copy_from_slice(&hidden[(end - wanted) * width..end * width]);
            rows += wanted;
        }
        rows
    }

    /// Final norm and output matrix for the `rows` chosen rows.
    fn logits(&mut self, rows: usize, norm: &[f32], output: &Linear) {
        let (width, vocabulary) = (self.config.hidden, self.config.vocabulary);
        let buffers = [Buffer::Chosen, Buffer::ChosenBlocks, Buffer::Logits];
        let [chosen, blocks, logits] = self.scratch.at(Step::Logits, buffers);
        let chosen = first(chosen, rows * width);
        let epsilon = self.config.norm_epsilon;
        self.cpu.rms_norm_in_place(chosen, norm, epsilon, width);
        let input = activations(self.cpu, chosen, rows, blocks);
        output.apply(self.cpu, first(logits, rows * vocabulary), &input);
    }
}

/// What the tokens of each segment attend to in a layer.
struct InLayer<'a, 'b>(&'a [Segment<'b>], Layer);

impl Sequences for InLayer<'_, '_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn tokens(&self, index: usize) -> usize {
        self.0[index].tokens.len()
    }

    fn cached(&self, index: usize) -> Cached<'_> {
        let sequence = &self.0[index].sequence;
        Cached {
            k: sequence.view(self.1, Side::Key),
            v: sequence.view(self.1, Side::Value),
            first_position: sequence.len(),
        }
    }
}

/// The first `count` elements of a buffer, which may be made for a larger batch.
fn first<T: AnyBitPattern + NoUninit>(buffer: &mut [u8], count: usize) -> &mut [T] {
    &mut bytemuck::cast_slice_mut(buffer)[..count]
}

/// Prepares `rows` rows for products, quantized where their width allows a quantized matrix.
fn activations<'a>(cpu: &Cpu, x: &'a [f32], rows: usize, storage: &'a mut [u8]) -> Activations<'a> {
    let columns = x.len() / rows;
    let storage = match Activations::storage_bytes(rows, columns) {
        Some(_) => storage,
        None => &mut [],
    };
    cpu.activations(x, rows, columns, storage)
}
