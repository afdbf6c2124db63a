//! Mamba-2, whose states each token adds to ([`Mamba2`] says what is computed).

use lacuna_kernels::Convolution;

use super::Stream;
use crate::program::{Bias, Builder, Factor, Op, Rows, Slot, VectorForm};
use crate::spec::{Activation, Gating, Mamba2};

impl Stream<'_> {
    /// `[tokens, hidden]` of `input`, the same. Goes on with the step begun last.
    pub(super) fn mamba2(
        &self,
        index: usize,
        mamba: &Mamba2,
        input: Slot,
        program: &mut Builder,
    ) -> Slot {
        let (width, group, heads) = (mamba.width(), mamba.group_width(), mamba.heads);
        let channels = width + 2 * group;
        let [z, mixed, steps] = self.mamba2_inputs(mamba, input, program);

        program.step("convolve");
        let taps = VectorForm::Taps(mamba.taps);
        let weights = program.vector_in(("ssm_conv1d", "weight"), channels * mamba.taps, taps);
        let bias = program.vector_called("ssm_conv1d", "bias", channels);
        program.push(Op::Convolve {
            layer: index,
            at: 0,
            values: mixed,
            weights,
            bias: Some(bias),
            channels,
            taps: mamba.taps,
            activation: Some(Activation::Silu),
        });
        let value = program.values("state-value", Rows::Tokens, width);
        let key = program.values("state-key", Rows::Tokens, group);
        let query = program.values("state-query", Rows::Tokens, group);
        program.apart(
            mixed,
            channels,
            &[(value, width), (key, group), (query, group)],
        );

        program.step("gates");
        let decay = self.decay(heads, steps, program);
        program.step("scan");
        let skip = program.vector_in(("ssm_d", ""), heads, VectorForm::Finite);
        program.push(Op::Scan {
            layer: index,
            at: Convolution::state_len(channels, mamba.taps),
            shape: mamba.scan(),
            queries: query,
            keys: key,
            values: value,
            decay,
            strength: steps,
            skip: Some(skip),
        });

        program.step("gate");
        program.push(Op::Activate {
            gating: Gating::Product(Activation::Silu),
            gate: z,
            up: value,
            width,
        });
        self.group_norm(mamba, z, program);
        self.recurrence_output("ssm_out", z, width, program)
    }

    /// `z`; `u`, `B` and `C` one after another; what time steps are made of.
    fn mamba2_inputs(&self, mamba: &Mamba2, input: Slot, program: &mut Builder) -> [Slot; 3] {
        let hidden = self.spec.hidden;
        let (width, group, heads) = (mamba.width(), mamba.group_width(), mamba.heads);
        let channels = width + 2 * group;
        let rows = width + channels + heads;
        let all = program.values("state-inputs", Rows::Tokens, rows);
        let matrix = program.matrix("ssm_in", rows, hidden, Bias::IfPresent);
        let (blocks, outputs) = ("attention-input-blocks", vec![(matrix, all)]);
        program.product(input, blocks, Rows::Tokens, hidden, outputs);
        let z = program.values("state-gate", Rows::Tokens, width);
        let mixed = program.values("query-key-value", Rows::Tokens, channels);
        let steps = program.values("state-steps", Rows::Tokens, heads);
        program.apart(all, rows, &[(z, width), (mixed, channels), (steps, heads)]);
        [z, mixed, steps]
    }

    fn group_norm(&self, mamba: &Mamba2, values: Slot, program: &mut Builder) {
        let (width, groups) = (mamba.width(), mamba.groups);
        program.push(Op::Norm {
            norm: self.spec.norm,
            weight: None,
            input: values,
            output: values,
            rows: Rows::Tokens,
            groups,
            width: width / groups,
        });
        let form = VectorForm::Rows(width / groups);
        let weight = program.vector_in(("ssm_norm", "weight"), width, form);
        program.push(Op::Scale {
            values,
            rows: Rows::Tokens,
            width,
            factor: Factor::Columns(weight),
        });
    }
}
