//! States that sequences keep, and what they are made of.

use std::ops::Range;

use lacuna_kernels::{Activation, Convolution, Scan, ScanShape, State};
use lacuna_kv::Layer;

use super::{KEEPS, OF_ANOTHER_KIND, Pass, first};
use crate::executor::Batch;
use crate::program::{Op, Rows, Slot, VectorId};
use crate::spec::TimeStepLimits;

impl Pass<'_, '_> {
    /// Runs an operation of states.
    pub(super) fn state_op(&mut self, op: &Op) {
        let cpu = self.cpu;
        match *op {
            Op::StateInputs { layer, ref values } => {
                self.state_inputs(Layer(layer), values, Inputs::Keep);
            }
            Op::Convolve {
                layer,
                at,
                values,
                weights,
                bias,
                channels,
                taps,
                activation,
            } => {
                let convolution = Convolution {
                    weights: self.weights.vector(weights),
                    bias: bias.map(|bias| self.weights.vector(bias)),
                    taps,
                    activation,
                };
                let state = at..at + Convolution::state_len(channels, taps);
                let [values] = self.scratch.slots([values]);
                let values = first(values, self.size.tokens * channels);
                let states = states(&mut self.batch, Layer(layer), state);
                cpu.convolve(values, &convolution, states);
            }
            Op::TimeSteps {
                values,
                bias,
                limits,
                heads,
            } => {
                let bias = self.weights.vector(bias);
                let values = self.values(values, Rows::Tokens, heads);
                cpu.add_bias(values, bias);
                cpu.activate(Activation::Softplus, values);
                if let Some(TimeStepLimits { least, most }) = limits {
                    // A number for each head of a token: too few to share out.
                    let values = values.iter_mut();
                    values.for_each(|value| *value = value.clamp(least, most));
                }
            }
            Op::Decay {
                steps,
                rates,
                output,
                heads,
            } => {
                let rates = self.weights.vector(rates);
                let (output, steps) = self.pair(output, steps, Rows::Tokens, heads);
                cpu.decay(output, steps, rates);
            }
            Op::Scan {
                layer,
                at,
                shape,
                queries,
                keys,
                values,
                decay,
                strength,
                skip,
            } => {
                let slots = [queries, keys, values, decay, strength];
                self.scan((Layer(layer), at), shape, slots, skip);
            }
            _ => unreachable!("{OF_ANOTHER_KIND}"),
        }
    }

    /// Copies the rows of slots to what sequences keep of them, where they do, or from there.
    pub(super) fn state_inputs(&mut self, layer: Layer, values: &[(Slot, usize)], way: Inputs) {
        let Batch::Segments(segments) = &mut self.batch else {
            unreachable!("{KEEPS}")
        };
        let width = values.iter().map(|(_, width)| width).sum();
        let tokens = self.size.tokens;
        let mut column = 0;
        for &(slot, columns) in values {
            let [rows] = self.scratch.slots([slot]);
            let rows: &mut [f32] = first(rows, tokens * columns);
            let mut rows = rows.chunks_exact_mut(columns);
            for segment in segments.iter_mut() {
                let rows = rows.by_ref().take(segment.tokens.len());
                let Some(kept) = segment.sequence.state_inputs(layer) else {
                    rows.for_each(drop);
                    continue;
                };
                for (row, kept) in rows.zip(kept.chunks_exact_mut(width)) {
                    let kept = &mut kept[column..column + columns];
                    match way {
                        Inputs::Keep => kept.copy_from_slice(row),
                        Inputs::Read => row.copy_from_slice(kept),
                    }
                }
            }
            column += columns;
        }
    }

    /// `slots` are queries, keys, values, decay and strength; the state begins at an element of its layer's.
    fn scan(
        &mut self,
        (layer, at): (Layer, usize),
        shape: ScanShape,
        slots: [Slot; 5],
        skip: Option<VectorId>,
    ) {
        let tokens = self.size.tokens;
        let keys = tokens * shape.key_heads * shape.key_dim;
        let gates = tokens * shape.value_heads;
        let widths = [keys, keys, gates * shape.value_dim, gates, gates];
        let mut slots = self.scratch.slots(slots).into_iter().zip(widths);
        let mut next = || -> &mut [f32] {
            let (slot, elements) = slots.next().expect("five slots");
            first(slot, elements)
        };
        let (queries, keys, values) = (next(), next(), next());
        let scan = Scan {
            shape,
            queries,
            keys,
            decay: next(),
            strength: next(),
            skip: skip.map(|skip| self.weights.vector(skip)),
        };
        let states = states(&mut self.batch, layer, at..at + shape.state_len());
        self.cpu.scan(values, &scan, states);
    }
}

/// What is done with the inputs of states.
#[derive(Clone, Copy)]
pub(super) enum Inputs {
    Keep,
    Read,
}

/// A part of a layer's state of each sequence, and how many tokens go through it.
fn states<'a>(
    batch: &'a mut Batch<'_, '_>,
    layer: Layer,
    part: Range<usize>,
) -> impl ExactSizeIterator<Item = (usize, State<'a>)> {
    let Batch::Segments(segments) = batch else {
        unreachable!("{KEEPS}")
    };
    segments.iter_mut().map(move |segment| {
        let state = segment.sequence.state(layer);
        (segment.tokens.len(), state.part(part.clone()))
    })
}
