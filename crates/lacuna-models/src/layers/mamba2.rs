//! Mamba-2, whose states each token adds to ([`Mamba2`] says what is computed).

use super::Stream;
use crate::program::{Bias, Builder, Factor, Op, Rows, Slot, VectorForm};
use crate::spec::{Activation, Gating, Mamba2, StateNorm};

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
        let [z, mixed, steps] = self.mamba2_inputs(mamba, input, program);

        let parts = [
            ("state-value", width),
            ("state-key", group),
            ("state-query", group),
        ];
        let state = (index, mamba.taps);
        let gates = [(steps, heads)];
        let [value, key, query] = self.convolve(state, mixed, &gates, parts, true, program);

        program.step("gates");
        let decay = self.decay(heads, (steps, mamba.time_steps), program);
        let skip = program.vector_in(("ssm_d", ""), heads, VectorForm::Finite);
        let slots = [query, key, value, decay, steps];
        self.scan(state, mamba.scan(), slots, Some(skip), program);

        program.step("gate");
        if mamba.norm == StateNorm::BeforeGate {
            self.group_norm(mamba, value, program);
        }
        program.push(Op::Activate {
            gating: Gating::Product(Activation::Silu),
            gate: z,
            up: value,
            width,
        });
        if mamba.norm == StateNorm::AfterGate {
            self.group_norm(mamba, z, program);
        }
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
        if let Some(scales) = mamba.input_scales {
            let parts = [
                width,
                width,
                mamba.group_width(),
                mamba.group_width(),
                heads,
            ];
            let mut start = 0;
            for (columns, factor) in parts.into_iter().zip(scales) {
                program.push(Op::ScalePart {
                    values: all,
                    width: rows,
                    columns: start..start + columns,
                    factor,
                });
                start += columns;
            }
        }
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
