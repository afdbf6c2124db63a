//! The forward pass shared by every dense decoder: norm, attention, norm, gated feed-forward.
//!
//! Weights stay in the mapped file and activations in a [`Scratch`] arena; the KV cache is passed in
//! with each [`Segment`], never kept here. Segments of different sequences are laid end to end
//! without padding, and one token's result does not depend on what else is in the batch.

use lacuna_kernels::{Activations, AttentionShape, Cpu};
use lacuna_kv::{Layer, Sequence, Side};

use crate::config::Config;
use crate::error::{ForwardError, LoadError};
use crate::scratch::{Buffers, Scratch, attention_shape};
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
            buffers: scratch.carve(),
        };
        pass.embed(&self.embedding, segments);
        pass.rotations(&self.inverse_frequencies, segments);
        for (index, block) in self.blocks.iter().enumerate() {
            pass.attention(block, Layer(index), segments);
            pass.feed_forward(block);
        }
        Ok(pass.logits(
            &self.output_norm,
            self.output.as_ref().unwrap_or(&self.embedding),
            segments,
        ))
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

/// One forward pass under way.
struct Pass<'a> {
    config: &'a Config,
    cpu: &'a Cpu,
    shape: AttentionShape,
    tokens: usize,
    buffers: Buffers<'a>,
}

impl Pass<'_> {
    fn embed(&mut self, table: &Linear, segments: &[Segment<'_>]) {
        let width = self.config.hidden;
        let mut rest = &mut self.buffers.hidden[..self.tokens * width];
        for segment in segments {
            let (rows, tail) = rest.split_at_mut(segment.tokens.len() * width);
            self.cpu.embed(rows, &table.matrix(), segment.tokens);
            rest = tail;
        }
    }

    fn rotations(&mut self, inverse_frequencies: &[f32], segments: &[Segment<'_>]) {
        let b = &mut self.buffers;
        let positions = &mut b.positions[..self.tokens];
        let wanted = segments
            .iter()
            .flat_map(|segment| (segment.sequence.len()..).take(segment.tokens.len()));
        for (slot, position) in positions.iter_mut().zip(wanted) {
            *slot = u32::try_from(position).expect("a context is shorter than 2^32 tokens");
        }
        let table = &mut b.rotations[..self.tokens * self.config.head_dim];
        self.cpu
            .rope_table(table, positions, inverse_frequencies, 1.0);
    }

    /// `hidden += W_o attention(rope(norm(W_q x)), rope(norm(W_k x)), W_v x)` with `x = norm(hidden)`.
    fn attention(&mut self, block: &Block, layer: Layer, segments: &mut [Segment<'_>]) {
        let Pass {
            config,
            cpu,
            tokens,
            ..
        } = *self;
        let (hidden, queries, keys) = (
            tokens * config.hidden,
            tokens * config.query_width(),
            tokens * config.kv_width(),
        );
        let b = &mut self.buffers;
        let normed = &mut b.normed[..hidden];
        let (query, key, value) = (
            &mut b.query[..queries],
            &mut b.key[..keys],
            &mut b.value[..keys],
        );
        cpu.rms_norm(
            normed,
            &b.hidden[..hidden],
            &block.attention_norm,
            config.norm_epsilon,
            config.hidden,
        );
        let input = activations(cpu, normed, tokens, b.quantized);
        block.query.apply(cpu, query, &input);
        block.key.apply(cpu, key, &input);
        block.value.apply(cpu, value, &input);
        for (rows, norm, heads) in [
            (&mut *query, &block.query_norm, config.query_heads),
            (&mut *key, &block.key_norm, config.kv_heads),
        ] {
            if let Some(weight) = norm {
                cpu.rms_norm_in_place(rows, weight, config.norm_epsilon, config.head_dim);
            }
            let table = &b.rotations[..tokens * config.head_dim];
            cpu.rope(rows, heads, config.head_dim, config.rope.style, table);
        }
        self.attend(layer, segments);
        let b = &mut self.buffers;
        let attended = activations(cpu, &b.attended[..queries], tokens, b.quantized);
        block
            .attention_output
            .apply(cpu, &mut b.normed[..hidden], &attended);
        cpu.add(&mut b.hidden[..hidden], &b.normed[..hidden]);
    }

    /// Stores each segment's new rows and attends over all rows of its sequence.
    fn attend(&mut self, layer: Layer, segments: &mut [Segment<'_>]) {
        let (queries, keys) = (self.config.query_width(), self.config.kv_width());
        let b = &mut self.buffers;
        let mut start = 0;
        for segment in segments {
            let end = start + segment.tokens.len();
            let sequence = &mut *segment.sequence;
            sequence.store(
                self.cpu,
                layer,
                &b.key[start * keys..end * keys],
                &b.value[start * keys..end * keys],
            );
            self.cpu.attention(
                &mut b.attended[start * queries..end * queries],
                &b.query[start * queries..end * queries],
                &sequence.view(layer, Side::Key),
                &sequence.view(layer, Side::Value),
                sequence.len(),
                &self.shape,
                b.attention,
            );
            start = end;
        }
    }

    /// `hidden += W_down (silu(W_gate x) * W_up x)` with `x = norm(hidden)`.
    fn feed_forward(&mut self, block: &Block) {
        let Pass {
            config,
            cpu,
            tokens,
            ..
        } = *self;
        let (hidden, inner) = (tokens * config.hidden, tokens * config.feed_forward);
        let b = &mut self.buffers;
        let (gate, up) = (&mut b.gate[..inner], &mut b.up[..inner]);
        let normed = &mut b.normed[..hidden];
        cpu.rms_norm(
            normed,
            &b.hidden[..hidden],
            &block.feed_forward_norm,
            config.norm_epsilon,
            config.hidden,
        );
        let input = activations(cpu, normed, tokens, b.quantized);
        block.gate.apply(cpu, gate, &input);
        block.up.apply(cpu, up, &input);
        cpu.silu_mul(gate, up);
        let inner = activations(cpu, gate, tokens, b.quantized);
        block.down.apply(cpu, normed, &inner);
        cpu.add(&mut b.hidden[..hidden], normed);
    }

    /// Final norm and output matrix for the rows the segments ask for; returns their number.
    fn logits(&mut self, norm: &[f32], output: &Linear, segments: &[Segment<'_>]) -> usize {
        let (width, vocabulary) = (self.config.hidden, self.config.vocabulary);
        let b = &mut self.buffers;
        let (mut rows, mut end) = (0, 0);
        for segment in segments {
            end += segment.tokens.len();
            let wanted = segment.logit_rows();
            b.chosen[rows * width..(rows + wanted) * width]
                .copy_from_slice(&b.hidden[(end - wanted) * width..end * width]);
            rows += wanted;
        }
        if rows > 0 {
            let chosen = &mut b.chosen[..rows * width];
            self.cpu
                .rms_norm_in_place(chosen, norm, self.config.norm_epsilon, width);
            let input = activations(self.cpu, chosen, rows, b.quantized);
            output.apply(self.cpu, &mut b.logits[..rows * vocabulary], &input);
        }
        rows
    }
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
