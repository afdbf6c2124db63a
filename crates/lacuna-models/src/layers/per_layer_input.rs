//! What each layer is told of a token besides the residual stream (Gemma 3n and 4): a part of a second
//! embedding, mixed with a product of the first.
//!
//! ```text
//! once   inputs = (embedding2 * sqrt(width) + norm(W embedding / sqrt(hidden))) / sqrt(2)
//! layer  hidden += norm(W_proj (f(W_gate hidden) * inputs of the layer))
//! ```

use lacuna_kernels::HeadRows;

use super::Stream;
use crate::program::{Bias, Builder, Factor, Lookup, Op, Rows, Slot};
use crate::spec::{Gating, PerLayerInputs};

impl Stream<'_> {
    /// The inputs of all layers, side by side.
    pub(super) fn per_layer_inputs(&self, inputs: PerLayerInputs, program: &mut Builder) -> Slot {
        let (hidden, layers) = (self.spec.hidden, self.spec.layers.len());
        let all = layers * inputs.width;
        let scale = |values, factor: f32| Op::Scale {
            values,
            rows: Rows::Tokens,
            width: all,
            factor: Factor::Fixed(factor),
        };
        program.step("per-layer-inputs");
        let slot = program.values("per-layer-inputs", Rows::Tokens, all);
        let table = program.matrix("per_layer_token_embd", inputs.rows, all, Bias::IfPresent);
        program.push(Op::Embed {
            table,
            of: Lookup::Tokens,
            output: slot,
        });
        program.push(scale(slot, (inputs.width as f32).sqrt()));
        let projected = program.values("per-layer-projected", Rows::Tokens, all);
        let matrix = program.matrix("per_layer_model_proj", all, hidden, Bias::IfPresent);
        let outputs = vec![(matrix, projected)];
        let blocks = "attention-input-blocks";
        program.product(self.hidden, blocks, Rows::Tokens, hidden, outputs);
        program.push(scale(projected, 1.0 / (hidden as f32).sqrt()));
        let weight = program.vector("per_layer_proj_norm", inputs.width);
        program.push(Op::Norm {
            norm: self.spec.norm,
            weight: Some(weight),
            input: projected,
            output: projected,
            rows: Rows::Tokens,
            groups: layers,
            width: inputs.width,
        });
        program.push(Op::Add {
            to: slot,
            from: projected,
            factor: None,
            rows: Rows::Tokens,
            width: all,
        });
        program.push(scale(slot, std::f32::consts::FRAC_1_SQRT_2));
        slot
    }

    /// A layer takes its part of `inputs` up: what it makes of it and of `read` is added to each of
    /// `into`. Goes on with the step begun last.
    pub(super) fn take_per_layer_input(
        &self,
        index: usize,
        (inputs, shape): (Slot, PerLayerInputs),
        (read, into): (Slot, &[Slot]),
        program: &mut Builder,
    ) {
        let (hidden, width) = (self.spec.hidden, shape.width);
        let gate = program.values("per-layer-gate", Rows::Tokens, width);
        let matrix = program.matrix("inp_gate", width, hidden, Bias::IfPresent);
        let outputs = vec![(matrix, gate)];
        let blocks = "feed-forward-input-blocks";
        program.product(read, blocks, Rows::Tokens, hidden, outputs);
        let own = program.values("per-layer-input", Rows::Tokens, width);
        let all = self.spec.layers.len() * width;
        let from = (inputs, HeadRows::by_token(all, index * width));
        program.columns(from, (own, HeadRows::by_token(width, 0)), 1, width);
        program.push(Op::Activate {
            gating: Gating::Product(shape.activation),
            gate,
            up: own,
            width,
        });
        let output = program.values("feed-forward-output", Rows::Tokens, hidden);
        let matrix = program.matrix("proj", hidden, width, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        program.product(gate, "per-layer-gate-blocks", Rows::Tokens, width, outputs);
        let weight = program.vector("post_norm", hidden);
        self.norm(weight, output, output, Rows::Tokens, program);
        for to in into {
            self.sum(*to, output, Rows::Tokens, program);
        }
    }
}
