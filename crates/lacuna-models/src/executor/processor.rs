//! The processor as an executor: each operation by the kernels, on slots of an arena.
//!
//! Weights stay in the mapped file or in memory, or are lent by a [`Stream`], and activations in a [`Scratch`] arena; the
//! KV cache is passed in with each [`Segment`], never kept here. Segments of different sequences, or texts, are laid end to end
//! without padding, and one token's result does not depend on what else is in the batch.

use std::ops::Range;
use std::sync::MutexGuard;

use bytemuck::{AnyBitPattern, NoUninit};
use lacuna_kernels::{
    Activation, Activations, AttentionShape, Cached, Columns, Convolution, Cpu, ElementType,
    ExpertInput, HeadRows, Mask, Routes, Routing, Scan, ScanShape, Sequences, SharedRows, State,
    View,
};
use lacuna_kv::{Layer, Side};

use super::image::{ImageBatch, join, merge, unfold};
use super::pooling::{normalize, pool};
use super::{Batch, BatchSize, Segment, Texts};
use crate::error::{ForwardError, Place};
use crate::program::{
    ExpertsId, Factor, Lookup, MatrixId, Merging, Op, Program, Rows, Slot, VectorId,
};
use crate::scratch::{FiniteCheck, Scratch};
use crate::spec::{Gating, Norm, NormKind, Patches, Pooling, QueryTemperature, TimeStepLimits};
use crate::weights::{Linear, Stream, Weights};

/// One forward pass under way.
pub(crate) struct Pass<'a, 'b> {
    pub(crate) weights: &'a Weights,
    pub(crate) cpu: &'a Cpu,
    pub(crate) size: BatchSize,
    pub(crate) batch: Batch<'a, 'b>,
    pub(crate) scratch: &'a mut Scratch,
    /// The matrices that files are read for.
    pub(crate) stream: Option<MutexGuard<'a, Stream>>,
    /// Which segments begin with rows in the same memory, and how many in the last layer that was looked at; found with
    /// the first layer whose tokens see all rows.
    pub(crate) shared: Option<Vec<SharedRows>>,
    /// Whether tokens of an image see all of it.
    pub(crate) images_whole: bool,
    /// What a head is given of the tokens before those of the batch, `[tokens, hidden]`; of other passes nothing.
    pub(crate) features: &'a [f32],
}

impl Pass<'_, '_> {
    /// Runs all of `program`.
    ///
    /// # Errors
    /// [`ForwardError::NotFinite`], if that is looked for, and [`ForwardError::Weights`] for weights that are read
    /// while they are needed and cannot be.
    pub(crate) fn run(&mut self, program: &Program) -> Result<(), ForwardError> {
        if let Some(trace) = self.scratch.trace() {
            trace.begin_pass();
        }
        for step in program.steps() {
            for op in program.ops(step) {
                self.op(op)?;
            }
        }
        Ok(())
    }

    /// Computes the states of layers once more, of tokens whose inputs sequences have kept, into the same slots.
    pub(crate) fn run_states(&mut self, program: &Program) -> Result<(), ForwardError> {
        for op in program.state_ops() {
            match op {
                Op::StateInputs { layer, values } => {
                    self.state_inputs(Layer(*layer), values, Inputs::Read);
                }
                op => self.op(op)?,
            }
        }
        Ok(())
    }

    /// Runs one operation; those before it have been run.
    ///
    /// # Errors
    /// As [`Pass::run`].
    pub(crate) fn op(&mut self, op: &Op) -> Result<(), ForwardError> {
        let cpu = self.cpu;
        match *op {
            Op::Embed { table, of, output } => return self.embed(table, of, output),
            Op::Patches { patches, output } => self.patches(&patches, output),
            Op::TakeFeatures { output, width } => {
                let given = self.features;
                self.values(output, Rows::Tokens, width)
                    .copy_from_slice(given);
            }
            Op::PlaceImages { hidden, width } => self.place_images(hidden, width),
            Op::AddImages {
                hidden,
                width,
                part,
            } => self.add_images(hidden, width, part),
            Op::AddPlaces {
                table,
                per_side,
                rows,
                hidden,
                width,
            } => self.add_places(table, per_side, [rows, hidden], width),
            Op::MergePatches {
                from,
                to,
                merged,
                merging,
                width,
            } => {
                let columns = self.image().grid().columns;
                let (squares, patches) = (self.size.logit_rows, self.size.tokens);
                let [from, to] = self.scratch.slots([from, to]);
                let from = first(from, patches * width);
                let all = squares * merged * merged * width;
                match merging {
                    Merging::Mean => {
                        merge(from, first(to, squares * width), columns, merged, width);
                    }
                    Merging::Joined => join(from, first(to, all), columns, merged, width),
                    Merging::Unfolded => unfold(from, first(to, all), columns, merged, width),
                }
            }
            Op::OrderSquares {
                from,
                to,
                part,
                parts,
                beside: _,
                width,
            } => {
                let squares = self.size.logit_rows;
                let [from, to] = self.scratch.slots([from, to]);
                let from = first(from, squares * width);
                let to = first(to, squares * parts * width);
                let Batch::Image(image) = &self.batch else {
                    unreachable!("{OF_PATCHES}")
                };
                image.order_squares(from, to, (part, parts), width);
            }
            Op::Positions {
                output,
                axes,
                first,
            } => self.positions(output, axes, first),
            Op::Rotations {
                rope,
                positions,
                axes,
                output,
                width,
            } => self.rotations(rope, (positions, axes), output, width),
            Op::Norm {
                norm,
                weight,
                input,
                output,
                rows,
                groups,
                width,
            } => self.norm(norm, weight, [input, output], rows, [groups, width]),
            Op::BiasedNorm {
                epsilon,
                weight,
                bias,
                input,
                output,
                rows,
                width,
            } => self.biased_norm(epsilon, [weight, bias], [input, output], rows, width),
            Op::Product {
                input,
                blocks,
                rows,
                columns,
                ref outputs,
                function,
            } => return self.products([input, blocks], (rows, columns), outputs, function),
            Op::Rotate {
                heads_of,
                table,
                heads,
                head_dim,
                dimensions,
                style,
            } => {
                let [rows, table] = self.scratch.slots([heads_of, table]);
                let rows = first(rows, self.size.tokens * heads * head_dim);
                let table: &mut [f32] = first(table, self.size.tokens * dimensions);
                cpu.rope(rows, heads, head_dim, style, table);
            }
            Op::Store {
                layer,
                keys,
                values,
                width,
            } => self.store(Layer(layer), keys, values, width),
            Op::Attend {
                layer,
                ref shape,
                queries,
                output,
                states,
                sinks,
            } => self.attend(Layer(layer), shape, sinks, [queries, output, states]),
            Op::AttendWithin {
                ref shape,
                queries,
                keys,
                values,
                output,
                states,
                sinks,
                windowed,
            } => {
                let slots = [queries, keys, values, output, states];
                self.attend_within(shape, sinks, slots, windowed);
            }
            Op::Activate {
                gating,
                gate,
                up,
                width,
            } => {
                let (gate, up) = self.pair(gate, up, Rows::Tokens, width);
                match gating {
                    Gating::Product(activation) => cpu.activate_mul(activation, gate, up),
                    Gating::Clamped { alpha, limit } => {
                        cpu.clamped_swiglu(gate, up, alpha, limit);
                    }
                }
            }
            Op::StateInputs { layer, ref values } => {
                self.state_inputs(Layer(layer), values, Inputs::Keep);
            }
            Op::Convolve {
                layer,
                at,
                values,
                weights,
                bias,
                channels,
                taps,
                activation,
            } => {
                let convolution = Convolution {
                    weights: self.weights.vector(weights),
                    bias: bias.map(|bias| self.weights.vector(bias)),
                    taps,
                    activation,
                };
                let state = at..at + Convolution::state_len(channels, taps);
                let [values] = self.scratch.slots([values]);
                let values = first(values, self.size.tokens * channels);
                let states = states(&mut self.batch, Layer(layer), state);
                cpu.convolve(values, &convolution, states);
            }
            Op::TimeSteps {
                values,
                bias,
                limits,
                heads,
            } => {
                let bias = self.weights.vector(bias);
                let values = self.values(values, Rows::Tokens, heads);
                cpu.add_bias(values, bias);
                cpu.activate(Activation::Softplus, values);
                if let Some(TimeStepLimits { least, most }) = limits {
                    // A number for each head of a token: too few to share out.
                    let values = values.iter_mut();
                    values.for_each(|value| *value = value.clamp(least, most));
                }
            }
            Op::ScalePart {
                values,
                width,
                ref columns,
                factor,
            } => {
                let values = self.values(values, Rows::Tokens, width);
                for row in values.chunks_exact_mut(width) {
                    cpu.scale(&mut row[columns.clone()], factor);
                }
            }
            Op::Decay {
                steps,
                rates,
                output,
                heads,
            } => {
                let rates = self.weights.vector(rates);
                let (output, steps) = self.pair(output, steps, Rows::Tokens, heads);
                cpu.decay(output, steps, rates);
            }
            Op::Scan {
                layer,
                at,
                shape,
                queries,
                keys,
                values,
                decay,
                strength,
                skip,
            } => {
                let slots = [queries, keys, values, decay, strength];
                self.scan((Layer(layer), at), shape, slots, skip);
            }
            Op::Multiply { to, by, width } => {
                let (to, by) = self.pair(to, by, Rows::Tokens, width);
                cpu.multiply(to, by);
            }
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
            Op::Apply {
                function,
                values,
                rows,
                width,
            } => cpu.activate(function, self.values(values, rows, width)),
            Op::KeepOutliers {
                values,
                deviations,
                width,
            } => cpu.gaussian_top_k(self.values(values, Rows::Tokens, width), deviations, width),
            Op::Add {
                to,
                from,
                factor,
                rows,
                width,
            } => {
                let (to, from) = self.pair(to, from, rows, width);
                match factor {
                    None => cpu.add(to, from),
                    Some(factor) => cpu.add_scaled(to, from, factor),
                }
            }
            Op::AddScaledRows {
                to,
                from,
                factors,
                columns,
                column,
                width,
            } => self.add_scaled_rows([to, from, factors], columns, column, width),
            Op::MatchMagnitude {
                values,
                like,
                least,
                rows,
                width,
            } => {
                let (values, like) = self.pair(values, like, rows, width);
                cpu.match_magnitude(values, like, least, width);
            }
            Op::Scale {
                values,
                rows,
                width,
                factor,
            } => {
                let weights = self.weights;
                let values = self.values(values, rows, width);
                match factor {
                    Factor::Fixed(factor) => cpu.scale(values, factor),
                    Factor::Learned(vector) => cpu.scale(values, weights.vector(vector)[0]),
                    Factor::Columns(vector) => cpu.scale_columns(values, weights.vector(vector)),
                }
            }
            Op::SoftCap {
                values,
                rows,
                width,
                cap,
            } => cpu.soft_cap(self.values(values, rows, width), cap),
            Op::Temperature {
                queries,
                positions,
                axes,
                factors,
                temperature,
                width,
            } => self.temperature([queries, positions, factors], axes, temperature, width),
            Op::Columns {
                from,
                to,
                heads,
                columns,
                beside: _,
            } => self.columns(from, to, heads, columns),
            Op::Choose { from, to, width } => self.choose([from, to], width),
            Op::Pool {
                pooling,
                from,
                to,
                width,
            } => self.pool(pooling, [from, to], width),
            Op::Normalize { values, width } => {
                let rows = self.values(values, Rows::Logits, width);
                rows.chunks_exact_mut(width).for_each(normalize);
            }
            Op::CheckFinite {
                values,
                rows,
                width,
                place,
            } => return self.check(values, rows, width, place),
            Op::Return { .. } => {}
        }
        Ok(())
    }

    fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.size.tokens,
            Rows::Logits => self.size.logit_rows,
        }
    }

    /// A slot's rows.
    fn values(&mut self, slot: Slot, rows: Rows, width: usize) -> &mut [f32] {
        let elements = self.rows(rows) * width;
        let [values] = self.scratch.slots([slot]);
        first(values, elements)
    }

    /// Two slots of rows of the same width.
    fn pair(&mut self, a: Slot, b: Slot, rows: Rows, width: usize) -> (&mut [f32], &mut [f32]) {
        let elements = self.rows(rows) * width;
        let [a, b] = self.scratch.slots([a, b]);
        (first(a, elements), first(b, elements))
    }

    /// Rows of a table, from where it is.
    fn embed(&mut self, table: MatrixId, of: Lookup, output: Slot) -> Result<(), ForwardError> {
        match &self.stream {
            Some(stream) if stream.reads(table) => self.embed_read(table, of, output),
            _ => {
                self.embed_in_memory(table, of, output);
                Ok(())
            }
        }
    }

    /// Rows of a table that is not in memory.
    fn embed_read(
        &mut self,
        table: MatrixId,
        of: Lookup,
        output: Slot,
    ) -> Result<(), ForwardError> {
        let linear = self.weights.matrix(table);
        let (width, cpu) = (linear.columns(), self.cpu);
        let last = linear.rows() as u32 - 1;
        let known = |token: u32| if token > last { 0 } else { token };
        let rows: Vec<u32> = match of {
            Lookup::Tokens => {
                let tokens = self.batch.tokens().flat_map(|(tokens, _)| tokens);
                tokens.map(|&token| known(token)).collect()
            }
            Lookup::Positions(positions) => {
                let [positions] = self.scratch.slots([positions]);
                first::<u32>(positions, self.size.tokens).to_vec()
            }
            Lookup::TokenType => {
                let types = self.batch.token_types();
                types.map(|token_type| token_type.min(last)).collect()
            }
        };
        let Some(stream) = &mut self.stream else {
            unreachable!("the table is read")
        };
        let [output] = self.scratch.slots([output]);
        let output: &mut [f32] = first(output, self.size.tokens * width);
        stream.rows(table, &rows, |index, bytes| {
            let out = &mut output[index * width..][..width];
            cpu.embed(out, &linear.row_in(bytes), &[0]);
        })?;
        if matches!(of, Lookup::Tokens) {
            stream.rows_ahead(table, known);
        }
        Ok(())
    }

    fn embed_in_memory(&mut self, table: MatrixId, of: Lookup, output: Slot) {
        let linear = self.weights.matrix(table);
        let table = linear.matrix_of(table, self.stream.as_deref());
        let width = table.cols();
        let elements = self.size.tokens * width;
        match of {
            Lookup::Tokens => {}
            Lookup::Positions(positions) => {
                let [positions, output] = self.scratch.slots([positions, output]);
                let rows: &mut [u32] = first(positions, self.size.tokens);
                return linear.look_up(&table, self.cpu, first(output, elements), rows);
            }
            Lookup::TokenType => {
                let [output] = self.scratch.slots([output]);
                let rows = first(output, elements).chunks_exact_mut(width);
                let last = table.rows() as u32 - 1;
                for (row, token_type) in rows.zip(self.batch.token_types()) {
                    self.cpu.embed(row, &table, &[token_type.min(last)]);
                }
                return;
            }
        }
        let [hidden] = self.scratch.slots([output]);
        let mut rest: &mut [f32] = first(hidden, elements);
        for tokens in self.batch.runs() {
            let (rows, tail) = rest.split_at_mut(tokens.len() * width);
            linear.look_up_known(&table, self.cpu, rows, tokens);
            rest = tail;
        }
    }

    fn temperature(&mut self, slots: [Slot; 3], axes: usize, by: QueryTemperature, width: usize) {
        let [queries, positions, factors] = self.scratch.slots(slots);
        let tokens = self.size.tokens;
        let positions: &mut [u32] = first(positions, tokens * axes);
        let factors: &mut [f32] = first(factors, tokens);
        for (factor, position) in factors.iter_mut().zip(positions.iter().step_by(axes)) {
            *factor = by.factor(*position as usize);
        }
        let queries = first(queries, tokens * width);
        self.cpu.scale_rows(queries, factors, width);
    }

    fn columns(
        &mut self,
        (from, from_rows): (Slot, HeadRows),
        (to, to_rows): (Slot, HeadRows),
        heads: usize,
        columns: usize,
    ) {
        let [from, to] = self.scratch.slots([from, to]);
        let rows = self.size.tokens * heads;
        let from: &mut [f32] = first(from, rows * from_rows.width);
        let to = first(to, rows * to_rows.width);
        self.cpu
            .copy_columns((to, to_rows), (from, from_rows), heads, columns);
    }

    fn add_scaled_rows(&mut self, slots: [Slot; 3], columns: usize, column: usize, width: usize) {
        let [to, from, factors] = self.scratch.slots(slots);
        let tokens = self.size.tokens;
        let (to, from): (&mut [f32], &mut [f32]) =
            (first(to, tokens * width), first(from, tokens * width));
        let factors: &mut [f32] = first(factors, tokens * columns);
        let factors = &factors[column..];
        self.cpu.add_scaled_rows(to, from, factors, columns, width);
    }

    /// The image's patches, each channel of them by itself, with the pixels' mean and deviation.
    fn patches(&mut self, patches: &Patches, output: Slot) {
        let Batch::Image(image) = &self.batch else {
            unreachable!("{OF_PATCHES}")
        };
        let [output] = self.scratch.slots([output]);
        let output: &mut [f32] = first(output, image.grid().count() * patches.elements());
        image.cut(patches, output);
    }

    /// The image of the pass.
    fn image(&self) -> &ImageBatch<'_> {
        match &self.batch {
            Batch::Image(image) => image,
            Batch::Segments(_) | Batch::Texts(_) => unreachable!("{OF_PATCHES}"),
        }
    }

    /// Adds to each patch's row what is learned of its place, which is between those of a square table: of the four around
    /// it the mean, weighed by how near they are.
    fn add_places(
        &mut self,
        table: MatrixId,
        per_side: usize,
        [rows, hidden]: [Slot; 2],
        width: usize,
    ) {
        let tokens = self.size.tokens;
        let linear = self.weights.matrix(table);
        let table = linear.matrix_of(table, self.stream.as_deref());
        for corner in 0..4 {
            let [rows, hidden] = self.scratch.slots([rows, hidden]);
            let (rows, hidden) = (
                first::<f32>(rows, tokens * width),
                first::<f32>(hidden, tokens * width),
            );
            let Batch::Image(image) = &self.batch else {
                unreachable!("{OF_PATCHES}")
            };
            let near = image.near(per_side, corner);
            let numbers: Vec<u32> = near.clone().map(|(number, _)| number).collect();
            linear.look_up(&table, self.cpu, rows, &numbers);
            let weights: Vec<f32> = near.map(|(_, weight)| weight).collect();
            self.cpu.add_scaled_rows(hidden, rows, &weights, 1, width);
        }
    }

    /// Copies rows of images over those of the tokens that stand for them.
    fn place_images(&mut self, hidden: Slot, width: usize) {
        let Batch::Segments(segments) = &self.batch else {
            return;
        };
        let [hidden] = self.scratch.slots([hidden]);
        let hidden: &mut [f32] = first(hidden, self.size.tokens * width);
        for (place, row) in shown_rows(segments, (width, 0)) {
            hidden[place * width..][..width].copy_from_slice(row);
        }
    }

    /// Adds a further part of rows of images to the residual stream of the tokens that stand for them.
    fn add_images(&mut self, hidden: Slot, width: usize, part: usize) {
        let Batch::Segments(segments) = &self.batch else {
            return;
        };
        let [hidden] = self.scratch.slots([hidden]);
        let hidden: &mut [f32] = first(hidden, self.size.tokens * width);
        for (place, row) in shown_rows(segments, (width, part)) {
            let hidden = &mut hidden[place * width..][..width];
            hidden
                .iter_mut()
                .zip(row)
                .for_each(|(sum, value)| *sum += value);
        }
    }

    fn positions(&mut self, output: Slot, axes: usize, first_of_text: usize) {
        let [positions] = self.scratch.slots([output]);
        let positions: &mut [u32] = first(positions, self.size.tokens * axes);
        match &self.batch {
            // By their numbers, row by row, or by their rows and columns.
            Batch::Image(image) => {
                let columns = image.grid().columns as u32;
                for (position, place) in positions.chunks_exact_mut(axes).zip(image.places()) {
                    match position {
                        [number] => *number = place[0] * columns + place[1],
                        position => position.copy_from_slice(place),
                    }
                }
            }
            Batch::Segments(segments) => {
                let mut rest = positions;
                for segment in &**segments {
                    let (positions, tail) = rest.split_at_mut(segment.tokens.len() * axes);
                    segment.positions(axes, first_of_text, positions);
                    rest = tail;
                }
            }
            Batch::Texts(texts) => {
                let wanted = texts.iter();
                let wanted = wanted.flat_map(|text| (first_of_text..).take(text.len()));
                for (slot, position) in positions.iter_mut().zip(wanted) {
                    *slot = u32::try_from(position).expect(LONGEST);
                }
            }
        }
    }

    fn rotations(
        &mut self,
        rope: usize,
        (positions, axes): (Slot, usize),
        output: Slot,
        width: usize,
    ) {
        let rotation = self.weights.rotation(rope);
        let context = self.scratch.limits().context_tokens;
        let [positions, table] = self.scratch.slots([positions, output]);
        let positions: &mut [u32] = first(positions, self.size.tokens * axes);
        let table = first(table, self.size.tokens * width);
        rotation.table(self.cpu, context, (positions, axes), table);
    }

    fn norm(
        &mut self,
        norm: Norm,
        weight: Option<VectorId>,
        [input, output]: [Slot; 2],
        rows: Rows,
        [groups, width]: [usize; 2],
    ) {
        let elements = self.rows(rows) * groups * width;
        let weight = weight.map(|weight| self.weights.vector(weight));
        let Norm { kind, epsilon } = norm;
        let cpu = self.cpu;
        if elements == 0 {
            return;
        }
        if input == output {
            let [rows] = self.scratch.slots([input]);
            let rows = first(rows, elements);
            match (kind, weight) {
                (NormKind::Rms, Some(weight)) => {
                    cpu.rms_norm_in_place(rows, weight, epsilon, width);
                }
                (NormKind::Rms, None) => cpu.rms_norm_unweighted_in_place(rows, epsilon, width),
                (NormKind::Layer, Some(weight)) => {
                    cpu.layer_norm_in_place(rows, weight, None, epsilon, width);
                }
                (NormKind::Layer, None) | (NormKind::BiasedLayer, _) => {
                    unreachable!("no program norms so")
                }
            }
        } else {
            let [input, output] = self.scratch.slots([input, output]);
            let (input, output): (&mut [f32], _) =
                (first(input, elements), first(output, elements));
            match (kind, weight) {
                (NormKind::Rms, Some(weight)) => {
                    cpu.rms_norm(output, input, weight, epsilon, width);
                }
                (NormKind::Rms, None) => cpu.rms_norm_unweighted(output, input, epsilon, width),
                (NormKind::Layer, Some(weight)) => {
                    cpu.layer_norm(output, input, weight, None, epsilon, width);
                }
                (NormKind::Layer, None) | (NormKind::BiasedLayer, _) => {
                    unreachable!("no program norms so")
                }
            }
        }
    }

    fn biased_norm(
        &mut self,
        epsilon: f32,
        vectors: [VectorId; 2],
        [input, output]: [Slot; 2],
        rows: Rows,
        width: usize,
    ) {
        let elements = self.rows(rows) * width;
        let [weight, bias] = vectors.map(|vector| self.weights.vector(vector));
        let (cpu, bias) = (self.cpu, Some(bias));
        if input == output {
            let [rows] = self.scratch.slots([input]);
            cpu.layer_norm_in_place(first(rows, elements), weight, bias, epsilon, width);
        } else {
            let [input, output] = self.scratch.slots([input, output]);
            let input: &mut [f32] = first(input, elements);
            cpu.layer_norm(first(output, elements), input, weight, bias, epsilon, width);
        }
    }

    /// Products with `outputs`' matrices in one operation, so that threads meet once.
    fn products(
        &mut self,
        input: [Slot; 2],
        size: (Rows, usize),
        outputs: &[(MatrixId, Slot)],
        function: Option<Activation>,
    ) -> Result<(), ForwardError> {
        // Parts of a longer list are computed one after another, each quantizing the input again; no
        // layer has one.
        for outputs in outputs.chunks(MOST_PRODUCTS) {
            match outputs {
                [a] => self.product(input, size, [*a], function)?,
                [a, b] => self.product(input, size, [*a, *b], function)?,
                [a, b, c] => self.product(input, size, [*a, *b, *c], function)?,
                [a, b, c, d] => self.product(input, size, [*a, *b, *c, *d], function)?,
                [a, b, c, d, e] => self.product(input, size, [*a, *b, *c, *d, *e], function)?,
                _ => unreachable!("at most {MOST_PRODUCTS}, and not empty"),
            }
        }
        Ok(())
    }

    fn product<const N: usize>(
        &mut self,
        input: [Slot; 2],
        (rows, columns): (Rows, usize),
        outputs: [(MatrixId, Slot); N],
        function: Option<Activation>,
    ) -> Result<(), ForwardError> {
        let rows = self.rows(rows);
        let weights = outputs.map(|(matrix, _)| matrix);
        if rows == 0 {
            if let Some(stream) = &mut self.stream {
                stream.release(&weights);
            }
            return Ok(());
        }
        if let ([(matrix, output)], Some(stream)) = (&outputs[..], &mut self.stream)
            && stream.neurons().is_some_and(|neurons| neurons.has(*matrix))
        {
            return self.sparse_product([input[0], *output], *matrix, (rows, columns), function);
        }
        if let Some(stream) = &mut self.stream {
            stream.lend(&weights)?;
        }
        let slots = outputs.iter().map(|(_, slot)| *slot);
        let ([input, blocks], outs) = self.scratch.slots_and::<MOST_PRODUCTS>(input, slots);
        let linears = weights.map(|matrix| self.weights.matrix(matrix));
        let blocks = match linears.iter().any(|linear| linear.is_quantized()) {
            true => blocks,
            false => &mut [],
        };
        let input = activations(self.cpu, first(input, rows * columns), rows, blocks);
        let stream = self.stream.as_deref();
        let matrices = weights.map(|matrix| self.weights.matrix(matrix).matrix_of(matrix, stream));
        let mut outs = outs.into_iter();
        let outs = linears.map(|linear| {
            let out = outs.next().expect("a slot for each matrix");
            first(out, rows * linear.rows())
        });
        Linear::apply_each(linears, matrices, self.cpu, outs, &input, function);
        if let Some(stream) = &mut self.stream {
            stream.release(&weights);
        }
        Ok(())
    }

    /// The product of one matrix with rows most of whose elements are zero, from the columns that are not.
    fn sparse_product(
        &mut self,
        slots: [Slot; 2],
        matrix: MatrixId,
        (rows, columns): (usize, usize),
        function: Option<Activation>,
    ) -> Result<(), ForwardError> {
        let linear = self.weights.matrix(matrix);
        let [x, out] = self.scratch.slots(slots);
        let (x, out): (&mut [f32], &mut [f32]) =
            (first(x, rows * columns), first(out, rows * linear.rows()));
        let neurons = self.stream.as_mut().and_then(|stream| stream.neurons());
        let neurons = neurons.expect("whoever calls has seen them");
        neurons.begin(matrix, x);
        while let Some(lent) = neurons.next()? {
            let there = neurons.lent();
            let columns = Columns {
                layout: there.layout(),
                scales: there.scales(),
                range: lent.range,
                numbers: there.numbers(),
                bytes: |at: usize| there.bytes(at),
            };
            self.cpu.matmul_columns(out, x, &columns);
        }
        if let Some(bias) = linear.bias() {
            self.cpu.add_bias(out, bias);
        }
        if let Some(function) = function {
            self.cpu.activate(function, out);
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

    /// Stores the rows of one layer; where values are part of keys, only keys are asked for.
    fn store(&mut self, layer: Layer, keys: Slot, values: Option<Slot>, width: usize) {
        let elements = self.size.tokens * width;
        let [keys, values]: [&mut [f32]; 2] = match values {
            Some(values) => self
                .scratch
                .slots([keys, values])
                .map(|slot| first(slot, elements)),
            None => {
                let [keys] = self.scratch.slots([keys]);
                [first(keys, elements), &mut []]
            }
        };
        let Batch::Segments(segments) = &mut self.batch else {
            unreachable!("{KEEPS}")
        };
        transform(self.cpu, segments, (layer, Side::Key), keys);
        transform(self.cpu, segments, (layer, Side::Value), values);
        let mut start = 0;
        for segment in segments.iter_mut() {
            let end = start + segment.tokens.len();
            let new = start * width..end * width;
            segment.sequence.write(layer, |side, run| {
                let rows: &[f32] = side.of([&*keys, &*values]);
                self.cpu.store_run(run, &rows[new.clone()]);
            });
            start = end;
        }
    }

    fn attend(
        &mut self,
        layer: Layer,
        shape: &AttentionShape,
        sinks: Option<VectorId>,
        slots: [Slot; 3],
    ) {
        let Batch::Segments(segments) = &self.batch else {
            unreachable!("{KEEPS}")
        };
        let sinks = sinks.map(|sinks| self.weights.vector(sinks));
        let [queries, output, states] = self.scratch.slots(slots);
        let heads = self.size.tokens * shape.query_heads;
        let queries: &mut [f32] = first(queries, heads * shape.head_dim);
        let output = first(output, heads * shape.value_dim);
        let states = bytemuck::cast_slice_mut(states);
        let runs = runs(segments, self.images_whole);
        let shared = match shape.mask {
            Mask::Causal if runs.is_empty() => {
                let shared = self.shared.get_or_insert_with(|| groups(segments, layer));
                for group in &mut *shared {
                    group.rows = rows_in_common(segments, &group.sequences, layer);
                }
                &**shared
            }
            _ => &[],
        };
        transform(self.cpu, segments, (layer, Side::Key), queries);
        let sequences = InLayer {
            segments,
            layer,
            shared,
            runs: &runs,
        };
        self.cpu
            .attention_each(output, queries, &sequences, shape, sinks, states);
        transform(self.cpu, segments, (layer, Side::Value), output);
    }

    fn attend_within(
        &mut self,
        shape: &AttentionShape,
        sinks: Option<VectorId>,
        slots: [Slot; 5],
        windowed: bool,
    ) {
        let parts = match &self.batch {
            Batch::Texts(texts) => Parts::Texts(texts),
            Batch::Image(image) if windowed => Parts::Windows(image.windows()),
            Batch::Image(_) => Parts::Whole,
            Batch::Segments(_) => {
                unreachable!("a pass that keeps nothing is one over texts or an image")
            }
        };
        let sinks = sinks.map(|sinks| self.weights.vector(sinks));
        let [queries, keys, values, output, states] = self.scratch.slots(slots);
        let tokens = self.size.tokens;
        let heads = tokens * shape.query_heads;
        let queries: &mut [f32] = first(queries, heads * shape.head_dim);
        let output = first(output, heads * shape.value_dim);
        let states = bytemuck::cast_slice_mut(states);
        let within = Within {
            parts,
            tokens,
            shape,
            keys,
            values,
        };
        self.cpu
            .attention_each(output, queries, &within, shape, sinks, states);
    }

    /// Copies the rows of slots to what sequences keep of them, where they do, or from there.
    fn state_inputs(&mut self, layer: Layer, values: &[(Slot, usize)], way: Inputs) {
        let Batch::Segments(segments) = &mut self.batch else {
            unreachable!("{KEEPS}")
        };
        let width = values.iter().map(|(_, width)| width).sum();
        let tokens = self.size.tokens;
        let mut column = 0;
        for &(slot, columns) in values {
            let [rows] = self.scratch.slots([slot]);
            let rows: &mut [f32] = first(rows, tokens * columns);
            let mut rows = rows.chunks_exact_mut(columns);
            for segment in segments.iter_mut() {
                let rows = rows.by_ref().take(segment.tokens.len());
                let Some(kept) = segment.sequence.state_inputs(layer) else {
                    rows.for_each(drop);
                    continue;
                };
                for (row, kept) in rows.zip(kept.chunks_exact_mut(width)) {
                    let kept = &mut kept[column..column + columns];
                    match way {
                        Inputs::Keep => kept.copy_from_slice(row),
                        Inputs::Read => row.copy_from_slice(kept),
                    }
                }
            }
            column += columns;
        }
    }

    /// `slots` are queries, keys, values, decay and strength; the state begins at an element of its layer's.
    fn scan(
        &mut self,
        (layer, at): (Layer, usize),
        shape: ScanShape,
        slots: [Slot; 5],
        skip: Option<VectorId>,
    ) {
        let tokens = self.size.tokens;
        let keys = tokens * shape.key_heads * shape.key_dim;
        let gates = tokens * shape.value_heads;
        let widths = [keys, keys, gates * shape.value_dim, gates, gates];
        let mut slots = self.scratch.slots(slots).into_iter().zip(widths);
        let mut next = || -> &mut [f32] {
            let (slot, elements) = slots.next().expect("five slots");
            first(slot, elements)
        };
        let (queries, keys, values) = (next(), next(), next());
        let scan = Scan {
            shape,
            queries,
            keys,
            decay: next(),
            strength: next(),
            skip: skip.map(|skip| self.weights.vector(skip)),
        };
        let states = states(&mut self.batch, layer, at..at + shape.state_len());
        self.cpu.scan(values, &scan, states);
    }

    /// Picks the rows the segments ask for.
    fn choose(&mut self, slots: [Slot; 2], width: usize) {
        let [hidden, chosen] = self.scratch.slots(slots);
        let hidden: &mut [f32] = bytemuck::cast_slice_mut(hidden);
        let chosen: &mut [f32] = bytemuck::cast_slice_mut(chosen);
        let Batch::Segments(segments) = &self.batch else {
            unreachable!("{KEEPS}")
        };
        let (mut rows, mut end) = (0, 0);
        for segment in &**segments {
            end += segment.tokens.len();
            let wanted = segment.logit_rows();
            chosen[rows * width..(rows + wanted) * width]
                .copy_from_slice(&hidden[(end - wanted) * width..end * width]);
            rows += wanted;
        }
    }

    fn pool(&mut self, pooling: Pooling, slots: [Slot; 2], width: usize) {
        let Batch::Texts(texts) = self.batch else {
            unreachable!("a pass that keeps nothing is one over texts")
        };
        let [hidden, output] = self.scratch.slots(slots);
        let hidden: &mut [f32] = first(hidden, self.size.tokens * width);
        let output: &mut [f32] = first(output, texts.len() * width);
        for (index, output) in output.chunks_exact_mut(width).enumerate() {
            let rows = texts.range(index);
            pool(
                pooling,
                &hidden[rows.start * width..rows.end * width],
                output,
            );
        }
    }

    /// Whether rows are finite, if that is to be known.
    fn check(
        &mut self,
        values: Slot,
        rows: Rows,
        width: usize,
        place: Place,
    ) -> Result<(), ForwardError> {
        if self.scratch.check() == FiniteCheck::Off {
            return Ok(());
        }
        let cpu = self.cpu;
        match cpu.first_not_finite(self.values(values, rows, width)) {
            None => Ok(()),
            Some(index) => Err(ForwardError::NotFinite {
                place,
                row: index / width,
            }),
        }
    }
}

/// Matrices that are multiplied with the same rows at once: queries, keys and values, and both of a
/// feed-forward block that reads the same.
const MOST_PRODUCTS: usize = 5;

/// What `Model` sees to: a program that keeps rows is run with sequences to keep them.
const KEEPS: &str = "a pass that keeps rows is one over sequences";

/// What `ImageEncoder` sees to: a program that reads patches is run with an image.
const OF_PATCHES: &str = "a pass over patches is one over an image";

/// Of positions, which are 32 bits wide.
pub(super) const LONGEST: &str = "a context is shorter than 2^32 tokens";

/// A part of `width` elements of the rows of images that `segments` show, each with the number of its token in the batch.
fn shown_rows<'a>(
    segments: &'a [Segment<'_>],
    (width, part): (usize, usize),
) -> impl Iterator<Item = (usize, &'a [f32])> {
    let starts = segments.iter().scan(0, |start, segment| {
        let first = *start;
        *start += segment.tokens.len();
        Some((first, segment))
    });
    starts.flat_map(move |(start, segment)| {
        segment.shown().flat_map(move |(tokens, rows)| {
            let row_width = rows.len() / tokens.len();
            let rows = rows.chunks_exact(row_width);
            tokens.zip(rows).map(move |(token, row)| {
                let row = &row[part * width..][..width];
                (start + token, row)
            })
        })
    })
}

/// What is done with the inputs of states.
#[derive(Clone, Copy)]
enum Inputs {
    Keep,
    Read,
}

/// A part of a layer's state of each sequence, and how many tokens go through it.
fn states<'a>(
    batch: &'a mut Batch<'_, '_>,
    layer: Layer,
    part: Range<usize>,
) -> impl ExactSizeIterator<Item = (usize, State<'a>)> {
    let Batch::Segments(segments) = batch else {
        unreachable!("{KEEPS}")
    };
    segments.iter_mut().map(move |segment| {
        let state = segment.sequence.state(layer);
        (segment.tokens.len(), state.part(part.clone()))
    })
}

/// Transforms what goes with the rows of one side of a layer as these are: rows to be stored and their queries, or, back
/// again, what has been made of them. `x` has as many elements for each token, or none.
fn transform(cpu: &Cpu, segments: &[Segment<'_>], (layer, side): (Layer, Side), x: &mut [f32]) {
    let tokens: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
    let width = x.len() / tokens.max(1);
    let rotation = |segment: &Segment<'_>| segment.sequence.geometry().rotation(layer, side);
    let mut rest = x;
    // Nearly always all of them, at once.
    for alike in segments.chunk_by(|a, b| rotation(a) == rotation(b)) {
        let tokens: usize = alike.iter().map(|segment| segment.tokens.len()).sum();
        let (x, later) = rest.split_at_mut(tokens * width);
        if let Some(block) = rotation(&alike[0]) {
            cpu.hadamard(x, block.get());
        }
        rest = later;
    }
}

/// Segments of one token each that begin with rows in the same memory of a layer.
///
/// A segment joins the first group that saves more with it than without: what is saved is the rows that all have in
/// common, once for each but the first.
fn groups(segments: &[Segment<'_>], layer: Layer) -> Vec<SharedRows> {
    let mut groups: Vec<SharedRows> = Vec::new();
    for (index, segment) in segments.iter().enumerate() {
        if segment.tokens.len() != 1 || segment.sequence.len() < SharedRows::FEWEST {
            continue;
        }
        let rows = |group: &SharedRows| {
            let first = &segments[group.sequences[0]].sequence;
            let rows = segment.sequence.rows_in_common(first, layer);
            rows.min(group.rows)
        };
        let joins = |group: &SharedRows| {
            let (rows, members) = (rows(group), group.sequences.len());
            rows >= SharedRows::FEWEST && rows * members > group.rows * (members - 1)
        };
        match groups.iter().position(joins) {
            Some(found) => {
                groups[found].rows = rows(&groups[found]);
                groups[found].sequences.push(index);
            }
            None => groups.push(SharedRows {
                sequences: vec![index],
                rows: segment.sequence.len(),
            }),
        }
    }
    groups.retain(|group| group.sequences.len() > 1);
    groups
}

/// Rows of a layer that all of `group` have in the memory of its first.
fn rows_in_common(segments: &[Segment<'_>], group: &[usize], layer: Layer) -> usize {
    let [first, others @ ..] = group else {
        return 0;
    };
    let first = &segments[*first].sequence;
    let rows = others
        .iter()
        .map(|index| segments[*index].sequence.rows_in_common(first, layer));
    rows.min().unwrap_or(0)
}

/// What the tokens of each segment attend to in a layer.
struct InLayer<'a, 'b> {
    segments: &'a [Segment<'b>],
    layer: Layer,
    shared: &'a [SharedRows],
    /// Parts of them, where some have images whose tokens see all of theirs; else empty.
    runs: &'a [Run],
}

/// Tokens of a segment that are of one image, or between two.
struct Run {
    segment: usize,
    tokens: Range<usize>,
    is_image: bool,
}

/// The tokens of `segments` in runs, if images among them are seen as a whole.
fn runs(segments: &[Segment<'_>], images_whole: bool) -> Vec<Run> {
    let has_images = segments
        .iter()
        .any(|segment| segment.shown().next().is_some());
    if !has_images || !images_whole {
        return Vec::new();
    }
    let mut runs = Vec::new();
    for (segment, it) in segments.iter().enumerate() {
        let mut start = 0;
        let mut add = |tokens: Range<usize>, is_image| {
            if !tokens.is_empty() {
                runs.push(Run {
                    segment,
                    tokens,
                    is_image,
                });
            }
        };
        for (tokens, _) in it.shown() {
            add(start..tokens.start, false);
            add(tokens.clone(), true);
            start = tokens.end;
        }
        add(start..it.tokens.len(), false);
    }
    runs
}

impl Sequences for InLayer<'_, '_> {
    fn shared(&self) -> &[SharedRows] {
        self.shared
    }

    fn count(&self) -> usize {
        match self.runs {
            [] => self.segments.len(),
            runs => runs.len(),
        }
    }

    fn tokens(&self, index: usize) -> usize {
        match self.runs {
            [] => self.segments[index].tokens.len(),
            runs => runs[index].tokens.len(),
        }
    }

    fn cached(&self, index: usize) -> Cached<'_> {
        let run = self.runs.get(index);
        let sequence = &self.segments[run.map_or(index, |run| run.segment)].sequence;
        let (k, v) = (
            sequence.view(self.layer, Side::Key),
            sequence.view(self.layer, Side::Value),
        );
        match run {
            None => Cached {
                k,
                v,
                first_position: sequence.len(),
                ahead: false,
            },
            Some(run) => {
                let end = sequence.len() + run.tokens.end;
                Cached {
                    k: k.up_to(end),
                    v: v.up_to(end),
                    first_position: sequence.len() + run.tokens.start,
                    ahead: run.is_image,
                }
            }
        }
    }
}

/// Which tokens of a pass that keeps nothing see one another.
#[derive(Clone, Copy)]
enum Parts<'a> {
    /// Those of a text.
    Texts(&'a Texts),
    /// Those of a window of an image.
    Windows(&'a [Range<usize>]),
    /// All.
    Whole,
}

/// What the tokens of each part attend to: rows of the pass, as bytes of `f32`.
struct Within<'a> {
    parts: Parts<'a>,
    tokens: usize,
    shape: &'a AttentionShape,
    keys: &'a [u8],
    values: &'a [u8],
}

impl Within<'_> {
    fn range(&self, index: usize) -> Range<usize> {
        match self.parts {
            Parts::Texts(texts) => texts.range(index),
            Parts::Windows(windows) => windows[index].clone(),
            Parts::Whole => 0..self.tokens,
        }
    }
}

impl Sequences for Within<'_> {
    fn count(&self) -> usize {
        match self.parts {
            Parts::Texts(texts) => texts.len(),
            Parts::Windows(windows) => windows.len(),
            Parts::Whole => 1,
        }
    }

    fn tokens(&self, index: usize) -> usize {
        self.range(index).len()
    }

    fn cached(&self, index: usize) -> Cached<'_> {
        let rows = self.range(index);
        let heads = self.shape.kv_heads;
        let view = |bytes, head_dim| {
            let row_bytes = heads * ElementType::F32.bytes(head_dim);
            let bytes: &[u8] = bytes;
            let bytes = &bytes[rows.start * row_bytes..rows.end * row_bytes];
            View::flat(ElementType::F32, heads, head_dim, bytes)
        };
        Cached {
            k: view(self.keys, self.shape.head_dim),
            v: view(self.values, self.shape.value_dim),
            first_position: 0,
            ahead: false,
        }
    }
}

/// The first `count` elements of a slot, which may be made for a larger batch.
fn first<T: AnyBitPattern + NoUninit>(slot: &mut [u8], count: usize) -> &mut [T] {
    &mut bytemuck::cast_slice_mut(slot)[..count]
}

/// Prepares `rows` rows for products, quantized where their width allows a quantized matrix.
fn activations<'a>(cpu: &Cpu, x: &'a [f32], rows: usize, storage: &'a mut [u8]) -> Activations<'a> {
    let columns = x.len() / rows;
    let storage = match Activations::storage_bytes(rows, columns) {
        Some(_) => storage,
        None => &mut [],
    };
    cpu.activations(x, rows, columns, storage)
}
