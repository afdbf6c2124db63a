//! Mixtures of experts as they are recorded: chosen on the device, so the host never learns which they are.
//!
//! Rows of choices lie in the order of tokens and, of one token, of their ranks; where every token has all experts, expert
//! by expert. Products go through them by expert:
//! what workgroups have is found on the device too, and as many are started as there are at most, of which those that
//! are left over end at once.

use lacuna_kernels::{ExpertInput, GroupScore, Routing, Scores};
use lacuna_models::program::{Op, Slot};
use lacuna_pages::DeviceError;

use crate::fused::rows_of_token;
use crate::kernels::{Bands, Combine, Every, FEW_TOKENS, NONE, PRODUCT_TOKENS, Route, TILE};
use crate::pass::{Pass, grid, number};
use crate::products::{Quantized, Shares};
use crate::weights::Together;

/// Choices of a pass by expert, in a slot of routes:
///
/// ```text
/// 4 x most  of each workgroup of a product: expert, first place, choices, nothing
/// choices   the expert of each choice
/// choices   the choice of each place
/// ```
///
/// That is never more than the processor has there (`Routes::words`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sorted {
    /// The first word of each of the three.
    pub(crate) tiles: u32,
    experts: u32,
    pub(crate) order: u32,
    pub(crate) choices: usize,
    /// Choices that have a row of the input together.
    pub(crate) used: usize,
    /// Workgroups of a product, one below the other, at most.
    pub(crate) most: usize,
    /// Whether they are those for many tokens.
    pub(crate) are_many: bool,
}

impl Sorted {
    fn new(word: u32, tokens: usize, routing: &Routing) -> Self {
        let choices = tokens * routing.used;
        let are_many = choices > FEW_TOKENS * routing.experts;
        // Of each expert the last workgroup may have fewer.
        let most = choices / size(are_many) + routing.experts.min(choices);
        let most = most.min(choices);
        let experts = word + number(4 * most);
        Self {
            tiles: word,
            experts,
            order: experts + number(choices),
            choices,
            used: routing.used,
            most,
            are_many,
        }
    }
}

/// Choices of one expert that a workgroup of a product has at most.
fn size(are_many: bool) -> usize {
    match are_many {
        true => TILE as usize,
        false => PRODUCT_TOKENS as usize,
    }
}

impl Pass<'_> {
    fn sorted(&self, routes: Slot, routing: &Routing) -> Sorted {
        Sorted::new(self.word(routes), self.size.tokens, routing)
    }

    /// Experts are chosen, and choices sorted by them.
    pub(crate) fn route(&mut self, op: &Op) -> Result<(), DeviceError> {
        let Op::Route {
            ref routing,
            logits,
            bias,
            scales,
            weights,
            routes,
        } = *op
        else {
            unreachable!("it chooses experts")
        };
        let tokens = self.size.tokens;
        let sorted = self.sorted(routes, routing);
        let groups = routing.groups;
        let constants = Route {
            logits: self.word(logits),
            weights: self.word(weights),
            choices: sorted.experts,
            // A token's experts are all different, so a single one's are sorted as they are.
            tiles: if tokens == 1 { sorted.tiles } else { NONE },
            order: sorted.order,
            experts: number(routing.experts),
            used: number(routing.used),
            scores: match routing.scores {
                Scores::Softmax => 0,
                Scores::Sigmoid => 1,
                Scores::SoftmaxOfChosen => 2,
            },
            groups: groups.map_or(1, |groups| number(groups.count)),
            groups_used: groups.map_or(1, |groups| number(groups.used)),
            sum_of_two: groups
                .is_some_and(|it| it.score == GroupScore::SumOfTwo)
                .into(),
            normalized: routing.normalized.into(),
            scale: routing.scale,
            bias: self.vector(bias),
            expert_scales: self.vector(scales),
        };
        let experts = self.kernels.experts();
        let windows = self.activations_and_vectors();
        self.dispatch(&experts.route, windows, &constants, [number(tokens), 1, 1])?;
        if tokens == 1 {
            return Ok(());
        }
        self.recording.barrier()?;
        let constants = Bands {
            choices: sorted.experts,
            count: number(sorted.choices),
            experts: number(routing.experts),
            tiles: sorted.tiles,
            most: number(sorted.most),
            size: number(size(sorted.are_many)),
            order: sorted.order,
        };
        let windows = self.only_activations();
        self.dispatch(&experts.bands, windows, &constants, [1, 1, 1])
    }

    /// Every token has all experts, in order, and rows lie expert by expert.
    pub(crate) fn route_to_all(
        &mut self,
        routing: &Routing,
        routes: Slot,
    ) -> Result<(), DeviceError> {
        let sorted = self.sorted(routes, routing);
        let constants = Every {
            tokens: number(self.size.tokens),
            experts: number(routing.experts),
            tiles: sorted.tiles,
            most: number(sorted.most),
            size: number(size(sorted.are_many)),
            order: sorted.order,
        };
        let threads = number(sorted.most.max(sorted.choices));
        let (experts, windows) = (self.kernels.experts(), self.only_activations());
        self.dispatch(&experts.every, windows, &constants, grid(threads))
    }

    /// Products of experts' matrices with rows that are quantized here, if any of them is.
    pub(crate) fn expert_products(&mut self, op: &Op) -> Result<(), DeviceError> {
        let Op::ExpertProduct {
            ref routing,
            input,
            from,
            blocks,
            columns,
            ref outputs,
            ..
        } = *op
        else {
            unreachable!("it is of experts")
        };
        let rows = self.size.tokens * rows_of_token(routing, from);
        let quantized = self.quantized_at(blocks, (rows, columns));
        let mut placed = outputs.iter();
        if placed.any(|(id, _)| self.placed(Together::Experts(*id)).dtype.is_quantized()) {
            self.quantize((input, None), &quantized)?;
            self.recording.barrier()?;
        }
        self.expert_products_with(op, &quantized)
    }

    /// The same with rows that the action before has quantized.
    pub(crate) fn expert_products_of_quantized(&mut self, op: &Op) -> Result<(), DeviceError> {
        let Op::ExpertProduct {
            ref routing,
            from,
            columns,
            ..
        } = *op
        else {
            unreachable!("rows are quantized for products")
        };
        let rows = self.size.tokens * rows_of_token(routing, from);
        let quantized = self.quantized((rows, columns));
        self.expert_products_with(op, &quantized)
    }

    fn expert_products_with(&mut self, op: &Op, quantized: &Quantized) -> Result<(), DeviceError> {
        let Op::ExpertProduct {
            ref routing,
            routes,
            input,
            from,
            ref outputs,
            ..
        } = *op
        else {
            unreachable!("it is of experts")
        };
        let sorted = Sorted {
            used: match from {
                ExpertInput::Tokens => routing.used,
                ExpertInput::Choices => 1,
            },
            ..self.sorted(routes, routing)
        };
        for &(id, output) in outputs {
            let input = (self.word(input), quantized);
            self.product(
                Together::Experts(id),
                input,
                Shares::Sorted(&sorted),
                output,
            )?;
        }
        Ok(())
    }

    /// The weighed sum of what each token's experts have made of it.
    pub(crate) fn combine_experts(&mut self, op: &Op) -> Result<(), DeviceError> {
        let Op::CombineExperts {
            ref routing,
            weights,
            from,
            to,
            width,
            ..
        } = *op
        else {
            unreachable!("it is of experts")
        };
        let count = number(self.size.tokens * width);
        let constants = Combine {
            source: self.word(from),
            to: self.word(to),
            weights: self.word(weights),
            used: number(routing.used),
            width: number(width),
            count,
        };
        let (experts, windows) = (self.kernels.experts(), self.only_activations());
        self.dispatch(&experts.combine, windows, &constants, grid(count))
    }
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::Routes;

    use super::*;

    #[test]
    fn what_is_sorted_has_room_where_the_processor_has_routes() {
        for experts in [1, 2, 3, 8, 60, 128, 512, 1024] {
            for used in [1, 2, 8, experts] {
                let routing = Routing {
                    used: used.min(experts),
                    ..Routing::all(experts)
                };
                for tokens in [1, 2, 3, 7, 16, 17, 100, 1000] {
                    let sorted = Sorted::new(0, tokens, &routing);
                    let words = sorted.order as usize + sorted.choices;
                    let room = Routes::words(tokens, &routing).expect("few");
                    assert!(words <= room, "{words} of {room}: {tokens} of {routing:?}");
                    // Choices that lie as badly as they can: of all experts but one a single one.
                    let alone = (experts - 1).min(sorted.choices);
                    let others = sorted.choices - alone;
                    let needed = alone + others.div_ceil(size(sorted.are_many));
                    assert!(needed <= sorted.most, "{needed}: {sorted:?}");
                }
            }
        }
    }
}
