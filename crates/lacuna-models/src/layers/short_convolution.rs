//! A convolution between two gates (LFM2): `W_out (c * convolution(b * u))`.

use super::Stream;
use crate::program::{Bias, Builder, Op, Rows, Slot, VectorForm};
use crate::spec::ShortConvolution;

impl Stream<'_> {
    /// `[tokens, hidden]` of `input`, the same. Goes on with the step begun last.
    pub(super) fn short_convolution(
        &self,
        index: usize,
        ShortConvolution { taps }: ShortConvolution,
        input: Slot,
        program: &mut Builder,
    ) -> Slot {
        let hidden = self.spec.hidden;
        let all = program.values("convolution-inputs", Rows::Tokens, 3 * hidden);
        let matrix = program.matrix("shortconv.in_proj", 3 * hidden, hidden, Bias::IfPresent);
        let (blocks, outputs) = ("attention-input-blocks", vec![(matrix, all)]);
        program.product(input, blocks, Rows::Tokens, hidden, outputs);
        program.step("convolve");
        let names = ["state-strength", "state-gate", "state-value"];
        let [before, after, values] = names.map(|name| program.values(name, Rows::Tokens, hidden));
        let parts = [(before, hidden), (after, hidden), (values, hidden)];
        program.apart(all, 3 * hidden, &parts);
        let gate = |by| Op::Multiply {
            to: values,
            by,
            width: hidden,
        };
        program.push(gate(before));
        let form = VectorForm::Taps(taps);
        let weights = program.vector_in(("shortconv.conv", "weight"), hidden * taps, form);
        program.begin_state(index, vec![(values, hidden)]);
        program.push(Op::Convolve {
            layer: index,
            at: 0,
            values,
            weights,
            bias: None,
            channels: hidden,
            taps,
            activation: None,
        });
        program.end_state();
        program.push(gate(after));
        self.recurrence_output("shortconv.out_proj", values, hidden, program)
    }
}
