//! Mixtures of experts: which ones tokens have, products with their matrices, and the sum of what they make.

use lacuna_kernels::{Activations, ExpertInput, Routes, Routing};

use super::{OF_ANOTHER_KIND, Pass, first};
use crate::error::ForwardError;
use crate::program::{ExpertsId, Op, Slot, VectorId};
use crate::weights::Linear;

impl Pass<'_, '_> {
    /// Runs an operation of experts.
    pub(super) fn expert_op(&mut self, op: &Op) -> Result<(), ForwardError> {
        let cpu = self.cpu;
        match *op {
            Op::Route {
                ref routing,
                logits,
                bias,
                scales,
                weights,
                routes,
            } => self.route(routing, [bias, scales], [logits, weights, routes]),
            Op::RouteToAll {
                ref routing,
                routes,
            } => {
                let [routes] = self.scratch.slots([routes]);
                let words = bytemuck::cast_slice_mut(routes);
                cpu.route_to_all(words, self.size.tokens, routing);
            }
            Op::ExpertProduct {
                ref routing,
                routes,
                input,
                from,
                blocks,
                columns,
                ref outputs,
            } => {
                let slots = [routes, input, blocks];
                return self.expert_products(routing, slots, (from, columns), outputs);
            }
            Op::CombineExperts {
                ref routing,
                routes,
                weights,
                from,
                to,
                width,
            } => self.combine_experts(routing, [routes, weights, from, to], width),
            _ => unreachable!("{OF_ANOTHER_KIND}"),
        }
        Ok(())
    }

    fn route(&mut self, routing: &Routing, vectors: [Option<VectorId>; 2], slots: [Slot; 3]) {
        let tokens = self.size.tokens;
        let vectors = vectors.map(|vector| vector.map(|vector| self.weights.vector(vector)));
        let [logits, weights, routes] = self.scratch.slots(slots);
        let logits = first(logits, tokens * routing.experts);
        let weights = first(weights, tokens * routing.used);
        let words = bytemuck::cast_slice_mut(routes);
        self.cpu.route(words, weights, logits, routing, vectors);
        self.record(routing, slots[2]);
    }

    /// Writes down which experts tokens have, if that is to be known.
    fn record(&mut self, routing: &Routing, routes: Slot) {
        let tokens = self.size.tokens;
        let Some(mut trace) = self.scratch.record(None) else {
            return;
        };
        let [routes] = self.scratch.slots([routes]);
        let routes = Routes::new(bytemuck::cast_slice(routes), tokens, routing);
        trace.write(&routes, tokens);
        self.scratch.record(Some(trace));
    }

    fn expert_products(
        &mut self,
        routing: &Routing,
        slots: [Slot; 3],
        input: (ExpertInput, usize),
        outputs: &[(ExpertsId, Slot)],
    ) -> Result<(), ForwardError> {
        match outputs {
            [a] => self.expert_product(routing, slots, input, [*a]),
            [a, b] => self.expert_product(routing, slots, input, [*a, *b]),
            _ => unreachable!("gate and up, or down"),
        }
    }

    fn expert_product<const N: usize>(
        &mut self,
        routing: &Routing,
        [routes, input, blocks]: [Slot; 3],
        (from, columns): (ExpertInput, usize),
        outputs: [(ExpertsId, Slot); N],
    ) -> Result<(), ForwardError> {
        let tokens = self.size.tokens;
        let choices = tokens * routing.used;
        // What is there besides for one output; no program names a slot twice.
        let others = [blocks].into_iter().chain(outputs.map(|(_, slot)| slot));
        let ([routes, x], others) = self.scratch.slots_and::<3>([routes, input], others);
        let mut others = others.into_iter();
        let blocks = others.next().unwrap_or_default();
        let experts = outputs.map(|(experts, _)| self.weights.experts(experts));
        let rows = experts[0].first().map_or(0, Linear::rows);
        let mut outs = experts.map(|_| first(others.next().unwrap_or_default(), choices * rows));
        let routes = Routes::new(bytemuck::cast_slice(routes), tokens, routing);
        let mut caches = self.stream.as_mut().and_then(|stream| stream.experts());
        let cache = caches.as_ref().and_then(|it| it.cache_of(outputs[0].0));
        if let (Some(caches), Some(cache)) = (&mut caches, cache) {
            // Before activations are prepared: the disk has that time already.
            caches.begin(cache, self.weights, routes.chosen());
        }
        let x = first(
            x,
            columns
                * if from == ExpertInput::Tokens {
                    tokens
                } else {
                    choices
                },
        );
        let storage = match Activations::storage_bytes(1, columns) {
            Some(_) => blocks,
            None => &mut [],
        };
        let x = self
            .cpu
            .expert_activations(x, columns, from, routes, storage);
        let (Some(caches), Some(cache)) = (caches, cache) else {
            let expert = |which: usize, expert: usize| experts[which][expert].expert();
            self.cpu.expert_matmul_each(outs, rows, &x, None, expert);
            return Ok(());
        };
        while let Some(bands) = caches.next(cache, self.weights)? {
            let there = caches.cache(cache);
            let expert = |which: usize, expert: usize| {
                experts[which][expert].expert_in(there.bytes(which, expert as u32))
            };
            let outs = outs.each_mut().map(|out| &mut **out);
            let bands = Some(&bands[..]);
            self.cpu.expert_matmul_each(outs, rows, &x, bands, expert);
        }
        Ok(())
    }

    fn combine_experts(&mut self, routing: &Routing, slots: [Slot; 4], width: usize) {
        let tokens = self.size.tokens;
        let choices = tokens * routing.used;
        let [routes, weights, from, to] = self.scratch.slots(slots);
        let routes = Routes::new(bytemuck::cast_slice(routes), tokens, routing);
        let weights: &mut [f32] = first(weights, choices);
        let (from, to): (&mut [f32], &mut [f32]) =
            (first(from, choices * width), first(to, tokens * width));
        self.cpu.combine_experts(to, from, weights, &routes, width);
    }
}
