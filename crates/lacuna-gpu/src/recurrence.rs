//! States of layers as passes change them: in each sequence's own memory, token after token.

use lacuna_kernels::{Convolution, KeyHeads, Rule};
use lacuna_kv::{DeviceState, Layer};
use lacuna_models::Segment;
use lacuna_models::program::Op;
use lacuna_pages::DeviceError;
use lacuna_pages::device::Access;

use crate::capability::activation_code;
use crate::kernels::{Convolve, NONE, Scan, THREADS};
use crate::pass::{Pass, number};
use crate::rows::Shown;

/// Columns of a state that a workgroup has.
const PANEL: usize = 16;

/// Part of a sequence's state, as a kernel is shown it.
struct Part<'a> {
    shown: Shown<'a>,
    is_fresh: bool,
}

impl<'a> Pass<'a> {
    /// So many elements of a layer's state of a segment's sequence.
    fn state(&self, segment: &Segment<'_>, layer: usize, at: usize, elements: usize) -> Part<'a> {
        let state = segment.sequence.device_state(Layer(layer));
        let DeviceState {
            address, is_fresh, ..
        } = state.expect("states are prepared before a pass");
        let [start, bytes] = [at, elements].map(|elements| 4 * elements as u64);
        Part {
            shown: self.mapped(address, start, bytes, Access::ReadWrite),
            is_fresh,
        }
    }

    /// A causal convolution of each segment's tokens.
    pub(crate) fn convolve(
        &mut self,
        op: &Op,
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        let Op::Convolve {
            layer,
            at,
            values,
            weights,
            bias,
            channels,
            taps,
            activation,
        } = *op
        else {
            unreachable!("it is a convolution")
        };
        let mut start = 0;
        for segment in segments {
            let tokens = segment.tokens.len();
            let elements = Convolution::state_len(channels, taps);
            let state = self.state(segment, layer, at, elements);
            let constants = Convolve {
                values: self.word(values) + number(start * channels),
                tokens: number(tokens),
                channels: number(channels),
                taps: number(taps),
                weights: self.vector(Some(weights)),
                bias: self.vector(bias),
                function: activation.and_then(activation_code).unwrap_or(NONE),
                state: state.shown.skip / 4,
                fresh: state.is_fresh.into(),
            };
            let mut windows = self.activations_and_vectors();
            windows[2] = state.shown.bound;
            let grid = [number(channels).div_ceil(THREADS), 1, 1];
            let kernels = self.kernels.states();
            self.dispatch(&kernels.convolve, windows, &constants, grid)?;
            start += tokens;
        }
        Ok(())
    }

    /// Each segment's tokens change their sequence's state and read it.
    pub(crate) fn scan(&mut self, op: &Op, segments: &[Segment<'_>]) -> Result<(), DeviceError> {
        let Op::Scan {
            layer,
            at,
            shape,
            queries,
            keys,
            values,
            decay,
            strength,
            skip,
        } = *op
        else {
            unreachable!("it is of states")
        };
        let key_width = shape.key_heads * shape.key_dim;
        let mut start = 0;
        for segment in segments {
            let tokens = segment.tokens.len();
            let state = self.state(segment, layer, at, shape.state_len());
            let row = |slot, width: usize| self.word(slot) + number(start * width);
            let constants = Scan {
                queries: row(queries, key_width),
                keys: row(keys, key_width),
                values: row(values, shape.value_heads * shape.value_dim),
                decay: row(decay, shape.value_heads),
                strength: row(strength, shape.value_heads),
                tokens: number(tokens),
                key_heads: number(shape.key_heads),
                value_heads: number(shape.value_heads),
                key_dim: number(shape.key_dim),
                value_dim: number(shape.value_dim),
                tiled: (shape.order == KeyHeads::Tiled).into(),
                delta: (shape.rule == Rule::Delta).into(),
                scale: shape.scale,
                skip: self.vector(skip),
                state: state.shown.skip / 4,
                fresh: state.is_fresh.into(),
            };
            let mut windows = self.activations_and_vectors();
            windows[2] = state.shown.bound;
            let panels = shape.value_dim.div_ceil(PANEL);
            let grid = [number(panels), number(shape.value_heads), 1];
            let kernels = self.kernels.states();
            self.dispatch(&kernels.scan, windows, &constants, grid)?;
            start += tokens;
        }
        Ok(())
    }
}
