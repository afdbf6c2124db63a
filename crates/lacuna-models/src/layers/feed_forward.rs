//! What each token makes of what attention told it: `hidden += block(norm(hidden))`.

use super::Stream;
use super::attention::required_if;
use crate::program::{Bias, Builder, Factor, Op, Rows, Slot};
use crate::spec::{FeedForward, Gated, Gating, LayerSpec, Norms, Plain};

/// How the parts of a block are called, and the slot of its result.
pub(super) struct BlockNames {
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    output: &'static str,
}

/// Those of a layer's only block.
const DENSE: BlockNames = BlockNames {
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    output: "feed-forward-output",
};

/// Those of the block that all tokens have beside chosen experts.
pub(super) const SHARED: BlockNames = BlockNames {
    gate: "ffn_gate_shexp",
    up: "ffn_up_shexp",
    down: "ffn_down_shexp",
    output: "shared-output",
};

impl Stream<'_> {
    /// `attention_input` is what attention read, for layers whose two parts read the same.
    pub(super) fn feed_forward(
        &self,
        layer: &LayerSpec,
        attention_input: Option<Slot>,
        program: &mut Builder,
    ) {
        if layer.feed_forward == FeedForward::None {
            return;
        }
        let hidden = self.spec.hidden;
        let experts = layer.feed_forward.experts();
        program.step(match experts {
            Some(experts) if experts.dense.is_none() => "route",
            _ => "gate-up",
        });
        let input = match layer.norms {
            Norms::Parallel => attention_input.unwrap_or(self.hidden),
            Norms::After | Norms::AfterSum => self.hidden,
            Norms::Before | Norms::BeforeFeedForward | Norms::Both => {
                self.normed("ffn_norm", "feed-forward-input", program)
            }
        };
        let output = match &layer.feed_forward {
            FeedForward::Gated(gated) => self.gated(gated, input, &DENSE, program),
            FeedForward::Plain(plain) => self.plain(*plain, input, &DENSE, program),
            FeedForward::None => unreachable!("a layer without is done"),
            FeedForward::Experts(experts) => match &experts.dense {
                None => self.experts(experts, input, program),
                Some(dense) => {
                    let output = self.gated(dense, input, &DENSE, program);
                    self.experts_beside(experts, output, program);
                    output
                }
            },
        };
        if layer.norms.after() {
            let weight = program.vector("post_ffw_norm", hidden);
            self.norm(weight, output, output, Rows::Tokens, program);
        }
        self.add(layer.residual_scale.feed_forward, output, program);
        self.norm_sum(layer, "layer_output_norm", program);
    }

    /// The residual stream, normed into a slot.
    pub(super) fn normed(
        &self,
        part: &'static str,
        slot: &'static str,
        program: &mut Builder,
    ) -> Slot {
        let hidden = self.spec.hidden;
        let input = program.values(slot, Rows::Tokens, hidden);
        let weight = program.vector(part, hidden);
        self.norm(weight, self.hidden, input, Rows::Tokens, program);
        input
    }

    /// `W_down (f(s W_gate x) * W_up x)` with `x` in `input`. Goes on with the step begun last.
    ///
    /// Where most gates are exactly zero they come first: what is multiplied with the others is known then, before a row
    /// of `W_up` or a column of `W_down` is touched.
    pub(super) fn gated(
        &self,
        gated: &Gated,
        input: Slot,
        names: &BlockNames,
        program: &mut Builder,
    ) -> Slot {
        let (hidden, inner) = (self.spec.hidden, gated.inner);
        let gate_matrix = program.matrix(names.gate, inner, hidden, Bias::IfPresent);
        let up_matrix = program.matrix(names.up, inner, hidden, Bias::IfPresent);
        let gate = program.values("gate", Rows::Tokens, inner);
        let up = program.values("up", Rows::Tokens, inner);
        let blocks = "feed-forward-input-blocks";
        let sparse = gated.has_sparse_gates();
        let (with_gate, later) = match sparse {
            true => (vec![(gate_matrix, gate)], Some(vec![(up_matrix, up)])),
            false => (vec![(gate_matrix, gate), (up_matrix, up)], None),
        };
        self.layer_product(input, blocks, hidden, with_gate, program);

        program.step("activate");
        if let Some(factor) = gated.gate_scale {
            program.push(Op::Scale {
                values: gate,
                rows: Rows::Tokens,
                width: inner,
                factor: Factor::Fixed(factor),
            });
        }
        if let Some(deviations) = gated.gate_cutoff {
            program.push(Op::KeepOutliers {
                values: gate,
                deviations,
                width: inner,
            });
        }
        match &later {
            None => program.push(Op::Activate {
                gating: Gating::Product(gated.activation),
                gate,
                up,
                width: inner,
            }),
            Some(_) => program.push(Op::Apply {
                function: gated.activation,
                values: gate,
                rows: Rows::Tokens,
                width: inner,
            }),
        }

        program.step("down");
        if let Some(up_outputs) = later {
            self.layer_product(input, blocks, hidden, up_outputs, program);
            program.push(Op::Multiply {
                to: gate,
                by: up,
                width: inner,
            });
        }
        let output = program.values(names.output, Rows::Tokens, hidden);
        let matrix = program.matrix(names.down, hidden, inner, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        self.layer_product(gate, "gate-blocks", inner, outputs, program);
        output
    }

    /// `W_down f(W_up x)` with `x` in `input`. Goes on with the step begun last.
    pub(super) fn plain(
        &self,
        plain: Plain,
        input: Slot,
        names: &BlockNames,
        program: &mut Builder,
    ) -> Slot {
        let (hidden, inner) = (self.spec.hidden, plain.inner);
        let bias = required_if(plain.biases);
        let up = program.values("up", Rows::Tokens, inner);
        let matrix = program.matrix(names.up, inner, hidden, bias);
        let blocks = "feed-forward-input-blocks";
        let (function, outputs) = (Some(plain.activation), vec![(matrix, up)]);
        program.product_then(function, input, blocks, (Rows::Tokens, hidden), outputs);

        program.step("down");
        let output = program.values(names.output, Rows::Tokens, hidden);
        let matrix = program.matrix(names.down, hidden, inner, bias);
        let outputs = vec![(matrix, output)];
        program.product(up, "gate-blocks", Rows::Tokens, inner, outputs);
        output
    }
}
