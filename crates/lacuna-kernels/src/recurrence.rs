//! Layers that keep a state instead of rows: causal convolutions, and matrices that each token changes.
//!
//! Both go token by token, however long a prompt is. Published implementations compute prompts in chunks
//! of 64 or 256 tokens, which trades the recurrence for products of matrices; on a processor it would gain
//! little, and results would depend on where chunks begin. Columns of a state do not depend on one another,
//! so a prompt's tokens run over a panel of 16 columns, 8 KiB with keys of 128 elements, that stays in the
//! first cache: for each token one pass over it that reads, and one that changes it. At 0.8 billion weights
//! (Qwen3.5: 18 such layers of 16 heads, 128 x 128) that is 0.4 G multiplications a token in vectors of
//! floats, against 0.75 G in vectors of bytes for products, several of which a processor does at once: a
//! few percent of the time of a prompt; and bits do not depend on how the prompt is cut, batched or resumed.
//!
//! States are panels, one after another: of a convolution, for each 16 channels the inputs of the last
//! `taps - 1` tokens, `[taps - 1, 16]`, the oldest first; of a scan, for each head and 16 columns,
//! `[key_dim, 16]`. What is missing to 16 is 0. Where no token has been, all is 0.

use std::ops::Range;

use crate::elementwise::activation::Function;
use crate::grid::Block;
use crate::simd::{Kernel, LANES, Simd, padded};

/// A causal convolution of each channel by itself: `y[t] = f(bias + sum over i of weight[i] * x[t - taps +
/// 1 + i])`, with what came before the first token 0.
#[derive(Clone, Copy, Debug)]
pub struct Convolution<'a> {
    /// `[taps, channels]`
    pub weights: &'a [f32],
    /// One for each channel.
    pub bias: Option<&'a [f32]>,
    /// Tokens that one token's result depends on: 2 to [`Convolution::MAX_TAPS`].
    pub taps: usize,
    /// `f`; none: the sum itself.
    pub activation: Option<crate::Activation>,
}

impl Convolution<'_> {
    /// The most taps there may be; published models have 3 or 4.
    pub const MAX_TAPS: usize = 4;

    /// f32 elements of the state of so many channels.
    pub const fn state_len(channels: usize, taps: usize) -> usize {
        channels.next_multiple_of(LANES) * (taps - 1)
    }
}

/// The state of one sequence that some tokens change.
#[derive(Debug)]
pub struct State<'a> {
    /// What it is before them, where that is to stay as it is. Else `after` holds it.
    pub before: Option<&'a [f32]>,
    /// What it is after them, once they are computed.
    pub after: &'a mut [f32],
}

impl<'a> State<'a> {
    /// The elements of `range`.
    ///
    /// # Panics
    /// When there are fewer.
    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        Self {
            before: self.before.map(|before| &before[range.clone()]),
            after: &mut self.after[range],
        }
    }
}

impl<'a> From<&'a mut [f32]> for State<'a> {
    /// Changed in its place.
    fn from(state: &'a mut [f32]) -> Self {
        Self {
            before: None,
            after: state,
        }
    }
}

/// A matrix for each head that tokens change and read, `[key_dim, value_dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScanShape {
    /// Heads of keys and queries; divides `value_heads`.
    pub key_heads: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Elements of a head of keys and of queries.
    pub key_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// Which head of keys a head of values has.
    pub order: KeyHeads,
    /// What a token adds.
    pub rule: Rule,
    /// What results are multiplied by.
    pub scale: f32,
}

/// Which head of keys a head of values has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyHeads {
    /// The first ones have the first.
    Grouped,
    /// They take turns.
    Tiled,
}

/// What a token adds to a head's matrix `S`, of which `decay` is left, as the product of its key with:
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// `strength * (value - S^T key)`, which replaces what the key led to (gated delta rule).
    Delta,
    /// `strength * value` (Mamba-2).
    Additive,
}

impl ScanShape {
    /// f32 elements of the state.
    pub const fn state_len(&self) -> usize {
        self.value_heads * self.head_len()
    }

    /// Those of a head.
    const fn head_len(&self) -> usize {
        self.key_dim * self.value_dim.next_multiple_of(LANES)
    }

    /// The head of keys that a head of values has.
    const fn key_head(&self, value_head: usize) -> usize {
        match self.order {
            KeyHeads::Grouped => value_head / (self.value_heads / self.key_heads),
            KeyHeads::Tiled => value_head % self.key_heads,
        }
    }

    /// Pieces that a head's columns may be cut in, whole panels each.
    pub(crate) fn cuts(&self) -> impl DoubleEndedIterator<Item = usize> {
        let panels = match self.value_dim.is_multiple_of(LANES) {
            true => self.value_dim / LANES,
            // Panels of another size would not begin where lanes do.
            false => 1,
        };
        (1..=panels).filter(move |pieces| panels.is_multiple_of(*pieces))
    }

    /// f32 elements of the state of one of as many pieces of a head.
    pub(crate) const fn piece_len(&self, pieces: usize) -> usize {
        self.head_len() / pieces
    }
}

/// What tokens change states with, and read of them.
#[derive(Clone, Copy, Debug)]
pub struct Scan<'a> {
    /// Sizes, and what is computed.
    pub shape: ScanShape,
    /// `[tokens, key_heads, key_dim]`
    pub queries: &'a [f32],
    /// The same.
    pub keys: &'a [f32],
    /// `[tokens, value_heads]`: what is left of a state at each token.
    pub decay: &'a [f32],
    /// `[tokens, value_heads]`: how much of what a token adds counts.
    pub strength: &'a [f32],
    /// For each head of values, how much of the value itself joins the result.
    pub skip: Option<&'a [f32]>,
}

/// A convolution of some tokens of one sequence, and of some channels.
pub(crate) struct Convolve<'a, F> {
    pub(crate) convolution: &'a Convolution<'a>,
    /// How many there are.
    pub(crate) channels: usize,
    pub(crate) function: F,
    /// Inputs, which become results; columns are channels.
    pub(crate) block: Block<'a, f32>,
    pub(crate) state: &'a mut [f32],
}

impl<F: Function> Kernel for Convolve<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // So that what came before stays in registers.
        match self.convolution.taps {
            2 => self.taps::<S, 2>(s),
            3 => self.taps::<S, 3>(s),
            _ => self.taps::<S, 4>(s),
        }
    }
}

impl<F: Function> Convolve<'_, F> {
    #[inline(always)]
    fn taps<S: Simd, const TAPS: usize>(mut self, s: S) {
        let (rows, cols) = (self.block.rows(), self.block.cols());
        let panels = self.state.chunks_exact_mut((TAPS - 1) * LANES);
        for (panel, state) in panels.enumerate() {
            let start = panel * LANES;
            let width = (cols.len() - start).min(LANES);
            let channel = cols.start + start;
            let mut weights = [s.splat(0.0); TAPS];
            for tap in 0..TAPS {
                let row = &self.convolution.weights[tap * self.channels + channel..][..width];
                weights[tap] = s.load(&padded(row));
            }
            let bias = match self.convolution.bias {
                Some(bias) => s.load(&padded(&bias[channel..][..width])),
                None => s.splat(0.0),
            };
            let (state, _) = state.as_chunks_mut::<LANES>();
            let mut past = [s.splat(0.0); TAPS];
            for tap in 0..TAPS - 1 {
                past[tap] = s.load(&state[tap]);
            }
            for row in rows.clone() {
                let x = &mut self.block.row(row)[start..][..width];
                past[TAPS - 1] = s.load(&padded(x));
                let mut sum = bias;
                for tap in 0..TAPS {
                    sum = s.fma(weights[tap], past[tap], sum);
                }
                let mut lanes = [0.0; LANES];
                s.store(self.function.of(s, sum), &mut lanes);
                x.copy_from_slice(&lanes[..width]);
                for tap in 1..TAPS {
                    past[tap - 1] = past[tap];
                }
            }
            for tap in 0..TAPS - 1 {
                s.store(past[tap], &mut state[tap]);
            }
        }
    }
}

/// A scan of some tokens of one sequence, and of some columns of a head.
pub(crate) struct ScanPanels<'a> {
    pub(crate) scan: &'a Scan<'a>,
    /// Values, which become results.
    pub(crate) block: Block<'a, f32>,
    pub(crate) state: &'a mut [f32],
}

/// Sums that are accumulated side by side, because each addition waits for the one before.
const SUMS: usize = 4;

impl Kernel for ScanPanels<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.scan.shape.rule {
            Rule::Delta => self.panels::<S, true>(s),
            Rule::Additive => self.panels::<S, false>(s),
        }
    }
}

impl ScanPanels<'_> {
    #[inline(always)]
    fn panels<S: Simd, const DELTA: bool>(mut self, s: S) {
        let Scan { shape, .. } = *self.scan;
        let (rows, cols) = (self.block.rows(), self.block.cols());
        let head = cols.start / shape.value_dim;
        let scale = s.splat(shape.scale);
        let skip = s.splat(self.scan.skip.map_or(0.0, |skip| skip[head]));
        let key_width = shape.key_heads * shape.key_dim;
        let key_start = shape.key_head(head) * shape.key_dim;
        let panels = self.state.chunks_exact_mut(shape.key_dim * LANES);
        for (panel, state) in panels.enumerate() {
            let (state, _) = state.as_chunks_mut::<LANES>();
            let start = panel * LANES;
            let width = (cols.len() - start).min(LANES);
            for row in rows.clone() {
                let key = &self.scan.keys[row * key_width + key_start..][..shape.key_dim];
                let query = &self.scan.queries[row * key_width + key_start..][..shape.key_dim];
                let at = row * shape.value_heads + head;
                let decay = s.splat(self.scan.decay[at]);
                let strength = s.splat(self.scan.strength[at]);
                let x = &mut self.block.row(row)[start..][..width];
                let value = s.load(&padded(x));
                let mut added = value;
                if DELTA {
                    let led_to = s.mul(decay, read(s, state, key));
                    added = s.sub(value, led_to);
                }
                let added = s.mul(strength, added);
                let result = change(s, state, [key, query], decay, added);
                let result = s.fma(skip, value, s.mul(result, scale));
                let mut lanes = [0.0; LANES];
                s.store(result, &mut lanes);
                x.copy_from_slice(&lanes[..width]);
            }
        }
    }
}

/// `S^T key`
#[inline(always)]
fn read<S: Simd>(s: S, state: &[[f32; LANES]], key: &[f32]) -> S::F {
    let mut sums = [s.splat(0.0); SUMS];
    let (states, state_rest) = state.as_chunks::<SUMS>();
    let (keys, key_rest) = key.as_chunks::<SUMS>();
    for (state, key) in states.iter().zip(keys) {
        for i in 0..SUMS {
            sums[i] = s.fma(s.splat(key[i]), s.load(&state[i]), sums[i]);
        }
    }
    for (i, (state, key)) in state_rest.iter().zip(key_rest).enumerate() {
        sums[i] = s.fma(s.splat(*key), s.load(state), sums[i]);
    }
    s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3]))
}

/// `S = decay * S + key added^T`; returns `S^T query`.
#[inline(always)]
fn change<S: Simd>(
    s: S,
    state: &mut [[f32; LANES]],
    [key, query]: [&[f32]; 2],
    decay: S::F,
    added: S::F,
) -> S::F {
    let mut sums = [s.splat(0.0); SUMS];
    let (states, state_rest) = state.as_chunks_mut::<SUMS>();
    let (keys, key_rest) = key.as_chunks::<SUMS>();
    let (queries, query_rest) = query.as_chunks::<SUMS>();
    for ((state, key), query) in states.iter_mut().zip(keys).zip(queries) {
        for i in 0..SUMS {
            let left = s.mul(decay, s.load(&state[i]));
            let new = s.fma(s.splat(key[i]), added, left);
            s.store(new, &mut state[i]);
            sums[i] = s.fma(s.splat(query[i]), new, sums[i]);
        }
    }
    let rest = state_rest.iter_mut().zip(key_rest).zip(query_rest);
    for (i, ((state, key), query)) in rest.enumerate() {
        let left = s.mul(decay, s.load(state));
        let new = s.fma(s.splat(*key), added, left);
        s.store(new, state);
        sums[i] = s.fma(s.splat(*query), new, sums[i]);
    }
    s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3]))
}
