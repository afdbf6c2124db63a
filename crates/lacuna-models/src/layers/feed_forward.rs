//! A gated feed-forward block: `hidden += W_down (f(W_gate x) * W_up x)` with `x = norm(hidden)`.

use super::Stream;
use crate::program::{Bias, Builder, Op, Rows, Slot};
use crate::spec::{LayerSpec, Norms};

impl Stream<'_> {
    /// `attention_input` is what attention read, for layers whose two parts read the same.
    pub(super) fn feed_forward(
        &self,
        layer: &LayerSpec,
        attention_input: Option<Slot>,
        program: &mut Builder,
    ) {
        let (hidden, inner) = (self.spec.hidden, layer.feed_forward.inner);
        program.step("gate-up");
        let input = match layer.norms {
            Norms::Parallel => attention_input.unwrap_or(self.hidden),
            Norms::After => self.hidden,
            Norms::Before | Norms::Both => {
                let input = program.values("feed-forward-input", Rows::Tokens, hidden);
                let weight = program.vector("ffn_norm", hidden);
                self.norm(weight, self.hidden, input, Rows::Tokens, program);
                input
            }
        };
        let gate_matrix = program.matrix("ffn_gate", inner, hidden, Bias::IfPresent);
        let up_matrix = program.matrix("ffn_up", inner, hidden, Bias::IfPresent);
        let gate = program.values("gate", Rows::Tokens, inner);
        let up = program.values("up", Rows::Tokens, inner);
        let outputs = vec![(gate_matrix, gate), (up_matrix, up)];
        let blocks = "feed-forward-input-blocks";
        program.product(input, blocks, Rows::Tokens, hidden, outputs);

        program.step("activate");
        if let Some(deviations) = layer.feed_forward.gate_cutoff {
            program.push(Op::KeepOutliers {
                values: gate,
                deviations,
                width: inner,
            });
        }
        program.push(Op::Activate {
            activation: layer.feed_forward.activation,
            gate,
            up,
            width: inner,
        });

        program.step("down");
        let output = program.values("feed-forward-output", Rows::Tokens, hidden);
        let matrix = program.matrix("ffn_down", hidden, inner, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        program.product(gate, "gate-blocks", Rows::Tokens, inner, outputs);
        if layer.norms.after() {
            let weight = program.vector("post_ffw_norm", hidden);
            self.norm(weight, output, output, Rows::Tokens, program);
        }
        self.add(layer, output, program);
    }
}
