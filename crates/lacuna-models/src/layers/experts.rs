//! A mixture of experts: for each token the best few of many feed-forward blocks.
//!
//! ```text
//! route     the router's logits; which experts each token has, and what they weigh
//! gate-up   gates and what they gate: a row for each choice, sorted by expert
//! activate  f(gate) * up
//! down      what each expert makes of its tokens
//! combine   the weighed sum of those; a block that all tokens have is added, if there is one
//! ```

use lacuna_kernels::ExpertInput;

use super::Stream;
use super::feed_forward::SHARED;
use crate::program::{Bias, Builder, Factor, Op, Rows, Slot};
use crate::spec::{Activation, Experts, Gated, Gating, SharedExpert};

/// Which experts tokens have, and what those weigh.
struct Routed {
    routes: Slot,
    weights: Slot,
}

/// The slot of what experts are multiplied with, quantized.
const BLOCKS: &str = "expert-blocks";

impl Stream<'_> {
    /// What the experts make of `input`, `[tokens, hidden]`.
    pub(super) fn experts(&self, experts: &Experts, input: Slot, program: &mut Builder) -> Slot {
        let routed = self.choose_experts(experts, input, program);
        let output = program.values("feed-forward-output", Rows::Tokens, self.spec.hidden);
        self.chosen(experts, &routed, [input, output], program);
        if let Some(shared) = experts.shared {
            self.shared(experts, shared, [input, output], program);
        }
        output
    }

    /// Norms `output`, what a dense block has made of the residual stream, and adds what experts make of
    /// it, each with norms of its own.
    pub(super) fn experts_beside(&self, experts: &Experts, output: Slot, program: &mut Builder) {
        let hidden = self.spec.hidden;
        let weight = program.vector("post_ffw_norm_1", hidden);
        self.norm(weight, output, output, Rows::Tokens, program);
        program.step("route");
        let input = self.normed("pre_ffw_norm_2", "feed-forward-input", program);
        let routed = self.choose_experts(experts, input, program);
        let other = program.values("shared-output", Rows::Tokens, hidden);
        self.chosen(experts, &routed, [input, other], program);
        let weight = program.vector("post_ffw_norm_2", hidden);
        self.norm(weight, other, other, Rows::Tokens, program);
        self.sum(output, other, Rows::Tokens, program);
    }

    /// Goes on with the step begun last.
    fn choose_experts(&self, experts: &Experts, input: Slot, program: &mut Builder) -> Routed {
        let (hidden, routing, router) = (self.spec.hidden, experts.routing, experts.router);
        let read = match router.own_input {
            true => self.router_input(program),
            false => input,
        };
        let logits = program.values("router-logits", Rows::Tokens, routing.experts);
        let bias = match router.bias {
            true => Bias::Required,
            false => Bias::IfPresent,
        };
        let matrix = program.matrix("ffn_gate_inp", routing.experts, hidden, bias);
        let outputs = vec![(matrix, logits)];
        let blocks = "feed-forward-input-blocks";
        program.product(read, blocks, Rows::Tokens, hidden, outputs);
        let bias = router.selection_bias;
        let bias = bias.then(|| program.vector_called("exp_probs_b", "bias", routing.experts));
        let scales = router.expert_scales;
        let scales =
            scales.then(|| program.vector_called("ffn_down_exps", "scale", routing.experts));
        let weights = program.values("expert-weights", Rows::Tokens, routing.used);
        let routes = program.routes(routing);
        program.push(Op::Route {
            routing,
            logits,
            bias,
            scales,
            weights,
            routes,
        });
        Routed { routes, weights }
    }

    /// What a router reads that has an input of its own.
    fn router_input(&self, program: &mut Builder) -> Slot {
        let hidden = self.spec.hidden;
        let input = program.values("router-input", Rows::Tokens, hidden);
        program.push(Op::Norm {
            norm: self.spec.norm,
            weight: None,
            input: self.hidden,
            output: input,
            rows: Rows::Tokens,
            groups: 1,
            width: hidden,
        });
        let scale = program.vector_called("ffn_gate_inp", "scale", hidden);
        for factor in [
            Factor::Columns(scale),
            Factor::Fixed(1.0 / (hidden as f32).sqrt()),
        ] {
            program.push(Op::Scale {
                values: input,
                rows: Rows::Tokens,
                width: hidden,
                factor,
            });
        }
        input
    }

    /// The weighed sum of what the chosen experts make of `input`.
    fn chosen(
        &self,
        experts: &Experts,
        routed: &Routed,
        [input, output]: [Slot; 2],
        program: &mut Builder,
    ) {
        let (hidden, inner, routing) = (self.spec.hidden, experts.inner, experts.routing);
        let Routed { routes, weights } = *routed;
        let bias = match experts.biases {
            true => Bias::Required,
            false => Bias::IfPresent,
        };
        program.step("expert-gate-up");
        let wide = routing.used * inner;
        let gate = program.values("expert-gate", Rows::Tokens, wide);
        let up = program.values("expert-up", Rows::Tokens, wide);
        let outputs = [("ffn_gate_exps", gate), ("ffn_up_exps", up)].map(|(part, slot)| {
            let matrices = program.expert_matrices(part, &routing, [inner, hidden], bias);
            (matrices, slot)
        });
        let from = (input, ExpertInput::Tokens, hidden);
        program.expert_product(&routing, routes, from, BLOCKS, outputs.into());

        program.step("expert-activate");
        program.push(Op::Activate {
            gating: experts.gating,
            gate,
            up,
            width: wide,
        });

        program.step("expert-down");
        let made = program.values("expert-output", Rows::Tokens, routing.used * hidden);
        let matrices = program.expert_matrices("ffn_down_exps", &routing, [hidden, inner], bias);
        let from = (gate, ExpertInput::Choices, inner);
        program.expert_product(&routing, routes, from, BLOCKS, vec![(matrices, made)]);

        program.step("combine");
        program.push(Op::CombineExperts {
            routing,
            routes,
            weights,
            from: made,
            to: output,
            width: hidden,
        });
    }

    /// Adds what the block makes of `input` that all tokens have.
    fn shared(
        &self,
        experts: &Experts,
        shared: SharedExpert,
        [input, output]: [Slot; 2],
        program: &mut Builder,
    ) {
        let hidden = self.spec.hidden;
        let block = Gated {
            inner: shared.inner,
            activation: match experts.gating {
                Gating::Product(activation) => activation,
                Gating::Clamped { .. } => Activation::Silu,
            },
            gate_cutoff: None,
        };
        program.step("shared-gate-up");
        let made = self.gated(&block, input, &SHARED, program);
        if !shared.gated {
            self.sum(output, made, Rows::Tokens, program);
            return;
        }
        program.step("shared-gate");
        let gate = program.values("shared-gate", Rows::Tokens, 1);
        let matrix = program.matrix("ffn_gate_inp_shexp", 1, hidden, Bias::IfPresent);
        let blocks = "feed-forward-input-blocks";
        program.product(input, blocks, Rows::Tokens, hidden, vec![(matrix, gate)]);
        program.push(Op::Apply {
            function: Activation::Sigmoid,
            values: gate,
            rows: Rows::Tokens,
            width: 1,
        });
        program.push(Op::AddScaledRows {
            to: output,
            from: made,
            factors: gate,
            columns: 1,
            column: 0,
            width: hidden,
        });
    }
}
