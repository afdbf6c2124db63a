//! A mixture of experts: for each token the best few of many feed-forward blocks.
//!
//! ```text
//! route     the router's logits; which experts each token has, and what they weigh
//! latent    what experts read, where that is narrower than the residual stream
//! gate-up   gates and what they gate: a row for each choice, sorted by expert
//! activate  f(gate) * up, or f(up) where there are no gates
//! down      what each expert makes of its tokens
//! combine   the weighed sum of those, made as wide as the stream again; a block that all tokens have is
//!           added, if there is one
//! ```

use lacuna_kernels::ExpertInput;

use super::Stream;
use super::attention::required_if;
use super::feed_forward::SHARED;
use crate::program::{Bias, Builder, Factor, Op, Rows, Slot};
use crate::spec::{Activation, ExpertBlock, Experts, Gated, Gating, Plain, SharedExpert};

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
        let bias = required_if(router.bias);
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

    /// The weighed sum of what the chosen experts make of `input`, both as wide as the residual stream.
    fn chosen(
        &self,
        experts: &Experts,
        routed: &Routed,
        [input, output]: [Slot; 2],
        program: &mut Builder,
    ) {
        let hidden = self.spec.hidden;
        let Some(width) = experts.latent else {
            self.weighed(experts, routed, ([input, output], hidden), program);
            return;
        };
        program.step("expert-latent");
        let read = program.values("expert-latent-input", Rows::Tokens, width);
        let matrix = program.matrix("ffn_latent_down", width, hidden, Bias::IfPresent);
        let blocks = "feed-forward-input-blocks";
        program.product(input, blocks, Rows::Tokens, hidden, vec![(matrix, read)]);
        let made = program.values("expert-latent-output", Rows::Tokens, width);
        self.weighed(experts, routed, ([read, made], width), program);
        let matrix = program.matrix("ffn_latent_up", hidden, width, Bias::IfPresent);
        let blocks = "expert-latent-blocks";
        program.product(made, blocks, Rows::Tokens, width, vec![(matrix, output)]);
    }

    /// The same of rows of `width` elements.
    fn weighed(
        &self,
        experts: &Experts,
        routed: &Routed,
        ([input, output], width): ([Slot; 2], usize),
        program: &mut Builder,
    ) {
        let (inner, routing) = (experts.inner, experts.routing);
        let Routed { routes, weights } = *routed;
        let bias = required_if(experts.biases);
        program.step("expert-gate-up");
        let wide = routing.used * inner;
        let gate = match experts.block {
            ExpertBlock::Gated(_) => Some(program.values("expert-gate", Rows::Tokens, wide)),
            ExpertBlock::Plain(_) => None,
        };
        let up = program.values("expert-up", Rows::Tokens, wide);
        let gates = gate.map(|gate| ("ffn_gate_exps", gate));
        let parts = gates.into_iter().chain([("ffn_up_exps", up)]);
        let outputs = parts.map(|(part, slot)| {
            let matrices = program.expert_matrices(part, &routing, [inner, width], bias);
            (matrices, slot)
        });
        let outputs = outputs.collect();
        // Gates become what they let through.
        let activated = gate.unwrap_or(up);
        let from = (input, ExpertInput::Tokens, width);
        program.expert_product(&routing, routes, from, BLOCKS, outputs);

        program.step("expert-activate");
        program.push(match experts.block {
            ExpertBlock::Gated(gating) => Op::Activate {
                gating,
                gate: activated,
                up,
                width: wide,
            },
            ExpertBlock::Plain(function) => Op::Apply {
                function,
                values: activated,
                rows: Rows::Tokens,
                width: wide,
            },
        });

        program.step("expert-down");
        let made = program.values("expert-output", Rows::Tokens, routing.used * width);
        let matrices = program.expert_matrices("ffn_down_exps", &routing, [width, inner], bias);
        let from = (activated, ExpertInput::Choices, inner);
        program.expert_product(&routing, routes, from, BLOCKS, vec![(matrices, made)]);

        program.step("combine");
        program.push(Op::CombineExperts {
            routing,
            routes,
            weights,
            from: made,
            to: output,
            width,
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
        let inner = shared.inner;
        program.step("shared-gate-up");
        let made = match experts.block {
            ExpertBlock::Gated(gating) => {
                let activation = match gating {
                    Gating::Product(activation) => activation,
                    Gating::Clamped { .. } => Activation::Silu,
                };
                self.gated(&Gated::usual(inner, activation), input, &SHARED, program)
            }
            ExpertBlock::Plain(activation) => {
                let plain = Plain {
                    inner,
                    activation,
                    biases: false,
                };
                self.plain(plain, input, &SHARED, program)
            }
        };
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
