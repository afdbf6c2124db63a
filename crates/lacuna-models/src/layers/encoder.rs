//! What encoders have and decoders do not: learned positions, a norm of the sum, and one row for a text.

use super::Stream;
use crate::error::Place;
use crate::program::{Bias, Builder, Lookup, Op, Rows, Slot};
use crate::spec::{Dense, LayerSpec, LearnedInput, Pooled, PooledResult};

/// What the parts of a product of pooled rows are called, in files and among slots.
struct DenseNames {
    matrix: &'static str,
    norm: &'static str,
    blocks: &'static str,
}

/// The first and second dense module, which sentence-transformers numbers after model and pooling.
const DENSE_2: DenseNames = DenseNames {
    matrix: "dense_2",
    norm: "dense_2_norm",
    blocks: "dense_2-blocks",
};
const DENSE_3: DenseNames = DenseNames {
    matrix: "dense_3",
    norm: "dense_3_norm",
    blocks: "dense_3-blocks",
};
/// The classifier's own layer, and its scores.
const CLASSIFIER: DenseNames = DenseNames {
    matrix: "cls",
    norm: "cls.norm",
    blocks: "cls-blocks",
};
const SCORES: DenseNames = DenseNames {
    matrix: "cls.output",
    norm: "cls.output_norm",
    blocks: "cls.output-blocks",
};

impl Stream<'_> {
    /// `hidden = norm(hidden + positions + token types)`
    pub(super) fn add_learned(&self, learned: LearnedInput, program: &mut Builder) {
        let hidden = self.spec.hidden;
        program.step("learned-input");
        let token_types =
            (learned.token_types).map(|count| ("token_types", count, Lookup::TokenType));
        let positions = learned.positions.map(|positions| {
            // Rotations, which count from 0, were computed before.
            let output = program.positions(1);
            let first = positions.first;
            let axes = 1;
            program.push(Op::Positions {
                output,
                axes,
                first,
            });
            ("position_embd", positions.rows, Lookup::Positions(output))
        });
        for (part, count, of) in [token_types, positions].into_iter().flatten() {
            let rows = program.values("learned-rows", Rows::Tokens, hidden);
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

    /// One row for each text.
    pub(super) fn pooled(&self, pooled: Pooled, program: &mut Builder) -> Slot {
        let hidden = self.spec.hidden;
        program.step("pool");
        if pooled.final_norm {
            let weight = program.vector("output_norm", hidden);
            self.norm(weight, self.hidden, self.hidden, Rows::Tokens, program);
        }
        let output = program.values("pooled", Rows::Logits, hidden);
        program.push(Op::Pool {
            pooling: pooled.pooling,
            from: self.hidden,
            to: output,
            width: hidden,
        });
        let [first, second] = match (pooled.result, pooled.dense) {
            (PooledResult::Embedding { .. }, _) => [DENSE_2, DENSE_3],
            // The last of them is what has the scores.
            (PooledResult::Score(_), [_, None]) => [SCORES, SCORES],
            (PooledResult::Score(_), _) => [CLASSIFIER, SCORES],
        };
        let (mut output, mut width) = (output, hidden);
        for (dense, names) in pooled.dense.into_iter().flatten().zip([first, second]) {
            output = self.dense(dense, &names, (output, width), program);
            width = dense.width;
        }
        if let PooledResult::Embedding { normalized: true } = pooled.result {
            program.push(Op::Normalize {
                values: output,
                width,
            });
        }
        program.push(Op::CheckFinite {
            values: output,
            rows: Rows::Logits,
            width,
            place: Place::Pooled,
        });
        program.step("return");
        program.push(Op::Return { output });
        output
    }

    /// `norm(f(W x + b))` of each text's `x`, which is in `input` and as wide as `columns`.
    fn dense(
        &self,
        dense: Dense,
        names: &DenseNames,
        (input, columns): (Slot, usize),
        program: &mut Builder,
    ) -> Slot {
        let Dense {
            width,
            activation,
            norm,
        } = dense;
        program.step(names.matrix);
        let output = program.values(names.matrix, Rows::Logits, width);
        let matrix = program.matrix(names.matrix, width, columns, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        let size = (Rows::Logits, columns);
        program.product_then(activation, input, names.blocks, size, outputs);
        if norm {
            let weight = program.vector(names.norm, width);
            self.norm_rows(weight, [output; 2], (Rows::Logits, width), program);
        }
        output
    }
}
