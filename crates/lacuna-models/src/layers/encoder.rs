//! What encoders have and decoders do not: learned positions, a norm of the sum, and one row for a text.

use super::Stream;
use crate::error::Place;
use crate::program::{Bias, Builder, Lookup, Op, Rows, Slot};
use crate::spec::{LayerSpec, LearnedInput, Plain, Pooled};

impl Stream<'_> {
    /// `hidden = norm(hidden + positions + token types)`
    pub(super) fn add_learned(&self, learned: LearnedInput, program: &mut Builder) {
        let hidden = self.spec.hidden;
        program.step("learned-input");
        let positions = program.positions();
        program.push(Op::Positions { output: positions });
        let rows = program.values("learned-rows", Rows::Tokens, hidden);
        let tables = [
            ("token_types", learned.token_types, Lookup::First),
            (
                "position_embd",
                learned.positions,
                Lookup::Positions(positions),
            ),
        ];
        for (part, count, of) in tables {
            let table = program.matrix(part, count, hidden, Bias::IfPresent);
            program.push(Op::Embed {
                table,
                of,
                output: rows,
            });
            self.sum(self.hidden, rows, Rows::Tokens, program);
        }
        let weight = program.vector("token_embd_norm", hidden);
        self.norm(weight, self.hidden, self.hidden, Rows::Tokens, program);
        program.push(Op::CheckFinite {
            values: self.hidden,
            rows: Rows::Tokens,
            width: hidden,
            place: Place::Embedding,
        });
    }

    /// Norms the residual stream where the layer's norms come after it has taken something up.
    pub(super) fn norm_sum(&self, layer: &LayerSpec, part: &'static str, program: &mut Builder) {
        if layer.norms.after_sum() {
            let weight = program.vector(part, self.spec.hidden);
            self.norm(weight, self.hidden, self.hidden, Rows::Tokens, program);
        }
    }

    /// `W_down f(W_up x)` with `x` in `input`. Goes on with the step begun last.
    pub(super) fn plain(&self, plain: Plain, input: Slot, program: &mut Builder) -> Slot {
        let (hidden, inner) = (self.spec.hidden, plain.inner);
        let up = program.values("up", Rows::Tokens, inner);
        let matrix = program.matrix("ffn_up", inner, hidden, Bias::Required);
        let blocks = "feed-forward-input-blocks";
        program.product(input, blocks, Rows::Tokens, hidden, vec![(matrix, up)]);

        program.step("activate");
        program.push(Op::Apply {
            function: plain.activation,
            values: up,
            width: inner,
        });

        program.step("down");
        let output = program.values("feed-forward-output", Rows::Tokens, hidden);
        let matrix = program.matrix("ffn_down", hidden, inner, Bias::Required);
        let outputs = vec![(matrix, output)];
        program.product(up, "gate-blocks", Rows::Tokens, inner, outputs);
        output
    }

    /// One row for each text.
    pub(super) fn pooled(&self, pooled: Pooled, program: &mut Builder) -> Slot {
        let hidden = self.spec.hidden;
        program.step("pool");
        let output = program.values("pooled", Rows::Logits, hidden);
        program.push(Op::Pool {
            pooled,
            from: self.hidden,
            to: output,
            width: hidden,
        });
        program.push(Op::CheckFinite {
            values: output,
            rows: Rows::Logits,
            width: hidden,
            place: Place::Pooled,
        });
        program.step("return");
        program.push(Op::Return { output });
        output
    }
}
