//! What layers with states have in common: products, convolutions, time steps, scans.

use lacuna_kernels::{Convolution, ScanShape};

use super::Stream;
use crate::program::{Bias, Builder, Op, Rows, Slot, VectorForm, VectorId};
use crate::spec::{Activation, LayerSpec, Recurrence, TimeStepLimits};

impl Stream<'_> {
    /// A layer's state and what it makes of the input, which may be normed already.
    pub(super) fn recurrence(
        &self,
        index: usize,
        layer: &LayerSpec,
        recurrence: Recurrence,
        input: Option<Slot>,
        program: &mut Builder,
    ) {
        program.step("project");
        let input = match input {
            Some(input) => input,
            None => self.normed("attn_norm", "attention-input", program),
        };
        let output = match recurrence {
            Recurrence::DeltaNet(net) => self.delta_net(index, &net, input, program),
            Recurrence::ShortConvolution(short) => {
                self.short_convolution(index, short, input, program)
            }
            Recurrence::Mamba2(mamba) => self.mamba2(index, &mamba, input, program),
        };
        self.add(layer.residual_scale.recurrence, output, program);
    }

    /// `W from` in the slot of what attention makes, `[tokens, width]` of `from` and rows of the residual
    /// stream's width.
    pub(super) fn recurrence_output(
        &self,
        part: &'static str,
        from: Slot,
        width: usize,
        program: &mut Builder,
    ) -> Slot {
        let hidden = self.spec.hidden;
        program.step("attention-output");
        let output = program.values("attention-output", Rows::Tokens, hidden);
        let matrix = program.matrix(part, hidden, width, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        program.product(from, "attended-blocks", Rows::Tokens, width, outputs);
        output
    }

    /// Convolves what `mixed` has, which becomes `parts`, one after another. The state of so many taps is the
    /// first of the layer's. Beside `mixed` the layer's state depends on `gates` alone, rows of so many elements.
    pub(super) fn convolve<const N: usize>(
        &self,
        (layer, taps): (usize, usize),
        mixed: Slot,
        gates: &[(Slot, usize)],
        parts: [(&'static str, usize); N],
        bias: bool,
        program: &mut Builder,
    ) -> [Slot; N] {
        let channels = parts.iter().map(|(_, width)| width).sum();
        program.step("convolve");
        let inputs = [(mixed, channels)].into_iter();
        program.begin_state(layer, inputs.chain(gates.iter().copied()).collect());
        let form = VectorForm::Taps(taps);
        let weights = program.vector_in(("ssm_conv1d", "weight"), channels * taps, form);
        let bias = bias.then(|| program.vector_called("ssm_conv1d", "bias", channels));
        program.push(Op::Convolve {
            layer,
            at: 0,
            values: mixed,
            weights,
            bias,
            channels,
            taps,
            activation: Some(Activation::Silu),
        });
        let parts = parts.map(|(name, width)| (program.values(name, Rows::Tokens, width), width));
        program.apart(mixed, channels, &parts);
        parts.map(|(slot, _)| slot)
    }

    /// Makes time steps of what they are made of, and of them what is left of states.
    pub(super) fn decay(
        &self,
        heads: usize,
        (steps, limits): (Slot, Option<TimeStepLimits>),
        program: &mut Builder,
    ) -> Slot {
        let bias = program.vector_in(("ssm_dt", "bias"), heads, VectorForm::Finite);
        program.push(Op::TimeSteps {
            values: steps,
            bias,
            limits,
            heads,
        });
        let rates = program.vector_in(("ssm_a", ""), heads, VectorForm::Rates);
        let decay = program.values("state-decay", Rows::Tokens, heads);
        program.push(Op::Decay {
            steps,
            rates,
            output: decay,
            heads,
        });
        decay
    }

    /// Runs values through states, which lie behind those of a convolution of so many taps.
    pub(super) fn scan(
        &self,
        (layer, taps): (usize, usize),
        shape: ScanShape,
        [queries, keys, values, decay, strength]: [Slot; 5],
        skip: Option<VectorId>,
        program: &mut Builder,
    ) {
        program.step("scan");
        let group = shape.key_heads * shape.key_dim;
        let channels = 2 * group + shape.value_heads * shape.value_dim;
        program.push(Op::Scan {
            layer,
            at: Convolution::state_len(channels, taps),
            shape,
            queries,
            keys,
            values,
            decay,
            strength,
            skip,
        });
        program.end_state();
    }
}
