//! A learned augmented residual (LAuReL), which joins the residual stream along with attention:
//! `hidden = (hidden + x + norm(R (L x))) / sqrt(2)` with `x` what attention read.

use super::Stream;
use crate::program::{Bias, Builder, Factor, Op, Rows, Slot};
use crate::spec::Laurel;

impl Stream<'_> {
    /// `input` is what attention read.
    pub(super) fn laurel(&self, laurel: Laurel, input: Slot, program: &mut Builder) {
        let (hidden, rank) = (self.spec.hidden, laurel.rank);
        program.step("laurel");
        let narrow = program.values("laurel", Rows::Tokens, rank);
        let matrix = program.matrix("laurel_l", rank, hidden, Bias::IfPresent);
        let outputs = vec![(matrix, narrow)];
        let blocks = "attention-input-blocks";
        program.product(input, blocks, Rows::Tokens, hidden, outputs);
        let output = program.values("attention-output", Rows::Tokens, hidden);
        let matrix = program.matrix("laurel_r", hidden, rank, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        program.product(narrow, "laurel-blocks", Rows::Tokens, rank, outputs);
        let weight = program.vector("laurel_post_norm", hidden);
        self.norm(weight, output, output, Rows::Tokens, program);
        for from in [input, output] {
            self.sum(self.hidden, from, Rows::Tokens, program);
        }
        // The stream and what is added are taken to be as large as one another.
        program.push(Op::Scale {
            values: self.hidden,
            rows: Rows::Tokens,
            width: hidden,
            factor: Factor::Fixed(std::f32::consts::FRAC_1_SQRT_2),
        });
    }
}
