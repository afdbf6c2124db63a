//! One pass being recorded: each operation as kernels on slots of the arena.
//!
//! Operations take effect one after another, with a barrier between; what belongs to one operation runs side by side.

use std::ops::Range;

use lacuna_kernels::{HeadOrder, HeadRows, RopeStyle};
use lacuna_kv::{DeviceRows, Layer, Side};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::program::{Factor, MatrixId, Op, Rows, Slot, VectorId};
use lacuna_models::spec::{Activation, Gating, NormKind};
use lacuna_models::{PassSize, Segment};
use lacuna_pages::DeviceError;
use lacuna_pages::device::{Access, Address};
use lacuna_pages::vulkan::{Bound, ComputeKernel, DeviceMemory, Recording, WINDOWS};

use crate::arranged::{self, BLOCK};
use crate::capability::{activation_code, element_code};
use crate::experts::Sorted;
use crate::fused::{Action, Heads, Prepare};
use crate::kernels::{
    CLAMPED, Columns, Constants, Elementwise, FEW_TOKENS, HADAMARD_ELEMENTS, Hadamard,
    Heads as HeadsConstants, Kernels, Magnitude, NONE, Norm as NormConstants, PRODUCT_ROWS,
    PRODUCT_TOKENS, Prepare as PrepareConstants, Product, Quantize, Rotate, Store, StoreBlocks,
    THREADS, TILE,
};
use crate::weights::{DeviceWeights, Placed, Together};

/// The most workgroups one way that every device takes.
const MOST_GROUPS: u32 = 65_535;

/// What `elementwise` does.
#[derive(Debug, Clone, Copy)]
enum Elements {
    Add = 0,
    Scale = 1,
    SoftCap = 2,
    Gate = 3,
    Apply = 4,
    Multiply = 5,
    ScaleColumns = 6,
    ScalePart = 7,
    AddScaledRows = 8,
    ScaleRows = 9,
    TimeSteps = 10,
    Decay = 11,
}

/// What the host gives a pass: rows of a slot, and where they are in its input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Given {
    pub(crate) slot: Slot,
    /// Where in the slot it goes, in elements.
    pub(crate) at: usize,
    /// In elements of the input.
    pub(crate) start: usize,
    pub(crate) elements: usize,
    /// Whether what follows is for the same operation.
    pub(crate) more: bool,
}

impl Given {
    pub(crate) fn nothing(slot: Slot) -> Self {
        Self {
            slot,
            at: 0,
            start: 0,
            elements: 0,
            more: false,
        }
    }
}

/// What lies in the arena behind the slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// The first word of what actions quantize.
    pub(crate) blocks: u32,
    /// The first word of partial results of attention, and how many there are.
    pub(crate) states: u32,
    pub(crate) state_words: u64,
    /// The first word of what is found of rows of logits.
    pub(crate) of_logits: u32,
    /// The first of a word for each segment: the position of its first token.
    pub(crate) positions: u32,
}

/// What the host gets of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wanted {
    /// All of them.
    Logits,
    /// A word: the token of the largest, or, with [`NO_TOKEN`](crate::kernels::NO_TOKEN), the first that is not finite.
    Likeliest,
    /// So many pairs of a key and a token, those of the largest first.
    TopK(usize),
}

/// A pass under way.
pub(crate) struct Pass<'a> {
    pub(crate) recording: Recording<'a>,
    pub(crate) kernels: &'a Kernels,
    pub(crate) weights: &'a DeviceWeights,
    pub(crate) arena: &'a DeviceMemory,
    pub(crate) plan: &'a ArenaPlan,
    pub(crate) room: Room,
    /// In the order in which the program asks for them.
    pub(crate) given: &'a [Given],
    /// The most bytes of a buffer that a kernel is shown.
    pub(crate) window: u64,
    /// What windows begin at multiples of.
    pub(crate) alignment: u64,
    /// And what kernels are shown of a reservation.
    pub(crate) shown_alignment: u64,
    pub(crate) size: PassSize,
    /// What the host gets of each row of logits.
    pub(crate) wanted: Wanted,
    /// Whether the first of what the host gives is what the processor has computed before.
    pub(crate) is_begun: bool,
    /// Whether the tokens of an image see all of it.
    pub(crate) whole_images: bool,
    /// [`VulkanConfig::merge_partitions`](crate::VulkanConfig::merge_partitions).
    pub(crate) merge_partitions: Option<bool>,
}

impl<'a> Pass<'a> {
    /// Records all `actions`, leaves the logits where the host reads them, and submits it.
    ///
    /// # Errors
    /// What the device refuses.
    pub(crate) fn run(
        mut self,
        actions: &[Action],
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        // The first words of what the host gives.
        let positions = Bound::Memory {
            memory: self.arena,
            offset: 4 * u64::from(self.room.positions),
            length: 4 * segments.len() as u64,
        };
        self.recording.take_input(0, positions)?;
        self.recording.barrier()?;
        if self.is_begun {
            self.take_given()?;
        }
        // Recording takes a fraction of what the device does, which soon has enough to begin with.
        let ends = [actions.len().div_ceil(16), actions.len().div_ceil(4)];
        for (number, action) in actions.iter().enumerate() {
            if ends.contains(&number) {
                self.recording.submit_part()?;
            }
            self.action(action, segments)?;
        }
        self.recording.submit()?;
        Ok(())
    }

    fn action(&mut self, action: &Action, segments: &[Segment<'_>]) -> Result<(), DeviceError> {
        match *action {
            Action::Op(ref op) => return self.op(op, segments),
            Action::Products(ref op) => self.products_of_quantized(op)?,
            Action::Prepare(ref prepare) => self.prepare(prepare)?,
            Action::Gate {
                gating,
                gate,
                up,
                width,
            } => {
                let rows = (self.size.tokens, width);
                let quantized = self.quantized(rows);
                self.quantize((gate, Some((up, gating))), &quantized)?;
            }
            Action::Heads(ref heads) => self.heads(heads, segments)?,
            Action::Attend(ref op) => {
                if let Op::Attend { ref shape, .. } = *op {
                    let width = shape.query_heads * shape.value_dim;
                    let quantized = self.quantized((self.size.tokens, width));
                    return self.attend(op, Some(&quantized), segments);
                }
            }
        }
        self.recording.barrier()?;
        Ok(())
    }

    fn op(&mut self, op: &Op, segments: &[Segment<'_>]) -> Result<(), DeviceError> {
        match *op {
            // The host has made them.
            Op::Embed { .. } | Op::Rotations { .. } | Op::PlaceImages { .. } => {
                return self.take_given();
            }
            Op::Positions { .. } | Op::CheckFinite { .. } => return Ok(()),
            Op::Norm {
                norm,
                weight,
                input,
                output,
                rows,
                groups,
                width,
            } => {
                let centered = norm.kind != NormKind::Rms;
                let how = (norm.epsilon, centered, [weight, None]);
                self.norm(how, [input, output], rows, [groups, width])?;
            }
            Op::BiasedNorm {
                epsilon,
                weight,
                bias,
                input,
                output,
                rows,
                width,
            } => {
                let how = (epsilon, true, [Some(weight), Some(bias)]);
                self.norm(how, [input, output], rows, [1, width])?;
            }
            Op::Product {
                input,
                blocks,
                rows,
                columns,
                ref outputs,
                function,
            } => self.products([input, blocks], (rows, columns), (outputs, function))?,
            Op::Rotate {
                heads_of,
                table,
                heads,
                head_dim,
                dimensions,
                style,
            } => self.rotate([heads_of, table], [heads, head_dim, dimensions], style)?,
            Op::Store {
                layer,
                keys,
                values,
                width,
            } => {
                self.transform((Layer(layer), Side::Key), (keys, width), segments)?;
                if let Some(values) = values {
                    self.transform((Layer(layer), Side::Value), (values, width), segments)?;
                }
                self.store((Layer(layer), Side::Key), keys, width, segments)?;
                if let Some(values) = values {
                    self.store((Layer(layer), Side::Value), values, width, segments)?;
                }
            }
            Op::Attend { .. } => return self.attend(op, None, segments),
            Op::Route { .. } => self.route(op)?,
            Op::RouteToAll {
                ref routing,
                routes,
            } => self.route_to_all(routing, routes)?,
            Op::ExpertProduct { .. } => self.expert_products(op)?,
            Op::CombineExperts { .. } => self.combine_experts(op)?,
            Op::Convolve { .. } => self.convolve(op, segments)?,
            Op::Scan { .. } => self.scan(op, segments)?,
            Op::Columns {
                from,
                to,
                heads,
                columns,
                beside: _,
            } => self.columns([from, to], heads, columns)?,
            Op::MatchMagnitude {
                values,
                like,
                least,
                rows,
                width,
            } => self.magnitude((values, Some(like)), [least, 0.0], rows, width)?,
            Op::KeepOutliers {
                values,
                deviations,
                width,
            } => self.magnitude((values, None), [0.0, deviations], Rows::Tokens, width)?,
            Op::Choose { from, to, width } => self.choose([from, to], width, segments)?,
            Op::Return { output } => return self.leave(output),
            Op::Temperature {
                queries,
                factors,
                width,
                ..
            } => {
                self.take_given()?;
                let count = self.size.tokens * width;
                let constants = Elementwise {
                    width: number(width),
                    factors: self.word(factors),
                    stride: 1,
                    ..Elementwise::default()
                };
                self.elements(Elements::ScaleRows, [queries; 2], count, constants)?;
            }
            _ => self.elements_of(op)?,
        }
        self.recording.barrier()?;
        Ok(())
    }

    /// An operation on each element by itself.
    fn elements_of(&mut self, op: &Op) -> Result<(), DeviceError> {
        let none = Elementwise::default();
        match *op {
            Op::Activate {
                gating,
                gate,
                up,
                width,
            } => {
                let count = self.size.tokens * width;
                let (function, [alpha, limit]) = gating_code(gating);
                let constants = Elementwise {
                    function,
                    alpha,
                    limit,
                    ..none
                };
                self.elements(Elements::Gate, [gate, up], count, constants)
            }
            Op::Apply {
                function,
                values,
                rows,
                width,
            } => self.apply(function, values, self.rows(rows) * width),
            Op::Add {
                to,
                from,
                factor,
                rows,
                width,
            } => {
                let factor = factor.unwrap_or(1.0);
                let count = self.rows(rows) * width;
                self.elements(
                    Elements::Add,
                    [to, from],
                    count,
                    Elementwise { factor, ..none },
                )
            }
            Op::AddScaledRows {
                to,
                from,
                factors,
                columns,
                column,
                width,
            } => {
                let constants = Elementwise {
                    width: number(width),
                    factors: self.word(factors) + number(column),
                    stride: number(columns),
                    ..none
                };
                let count = self.size.tokens * width;
                self.elements(Elements::AddScaledRows, [to, from], count, constants)
            }
            Op::Multiply { to, by, width } => {
                let count = self.size.tokens * width;
                self.elements(Elements::Multiply, [to, by], count, none)
            }
            Op::Scale {
                values,
                rows,
                width,
                factor,
            } => {
                let (operation, constants) = self.scaling(factor, width);
                let count = self.rows(rows) * width;
                self.elements(operation, [values; 2], count, constants)
            }
            Op::ScalePart {
                values,
                width,
                ref columns,
                factor,
            } => {
                let constants = Elementwise {
                    factor,
                    width: number(width),
                    first: number(columns.start),
                    end: number(columns.end),
                    ..none
                };
                let count = self.size.tokens * width;
                self.elements(Elements::ScalePart, [values; 2], count, constants)
            }
            Op::TimeSteps {
                values,
                bias,
                limits,
                heads,
            } => {
                let constants = Elementwise {
                    width: number(heads),
                    vector: self.weights.vector(bias),
                    least: limits.map_or(0.0, |limits| limits.least),
                    most: limits.map_or(f32::MAX, |limits| limits.most),
                    ..none
                };
                let count = self.size.tokens * heads;
                self.elements(Elements::TimeSteps, [values; 2], count, constants)
            }
            Op::Decay {
                steps,
                rates,
                output,
                heads,
            } => {
                let constants = Elementwise {
                    width: number(heads),
                    vector: self.weights.vector(rates),
                    ..none
                };
                let count = self.size.tokens * heads;
                self.elements(Elements::Decay, [output, steps], count, constants)
            }
            Op::SoftCap {
                values,
                rows,
                width,
                cap: factor,
            } => {
                let count = self.rows(rows) * width;
                let constants = Elementwise { factor, ..none };
                self.elements(Elements::SoftCap, [values; 2], count, constants)
            }
            _ => {
                unreachable!("a model is refused that has an operation which the device cannot do")
            }
        }
    }

    fn scaling(&self, factor: Factor, width: usize) -> (Elements, Elementwise) {
        let none = Elementwise::default();
        let columns = |vector, width| {
            let constants = Elementwise {
                vector: self.weights.vector(vector),
                width: number(width),
                ..none
            };
            (Elements::ScaleColumns, constants)
        };
        match factor {
            Factor::Fixed(factor) => (Elements::Scale, Elementwise { factor, ..none }),
            // The only element is that of every column.
            Factor::Learned(vector) => columns(vector, 1),
            Factor::Columns(vector) => columns(vector, width),
        }
    }

    fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.size.tokens,
            Rows::Logits => self.size.logit_rows,
        }
    }

    /// The first word of a slot in the arena.
    pub(crate) fn word(&self, slot: Slot) -> u32 {
        number(self.plan.placement(slot).offset / 4)
    }

    /// All activations.
    pub(crate) fn activations(&self) -> Bound<'a> {
        whole(self.arena)
    }

    /// Part of a slot, from the byte `start` of it on.
    fn part(&self, slot: Slot, start: usize, bytes: usize) -> Bound<'a> {
        Bound::Memory {
            memory: self.arena,
            offset: (self.plan.placement(slot).offset + start) as u64,
            length: bytes as u64,
        }
    }

    /// Rows that the host gives come to their slot.
    fn take_given(&mut self) -> Result<(), DeviceError> {
        let mut taken = 0;
        loop {
            let Some((next, rest)) = self.given.split_first() else {
                unreachable!("the host gives what the program asks for")
            };
            self.given = rest;
            if next.elements > 0 {
                let to = self.part(next.slot, 4 * next.at, 4 * next.elements);
                self.recording.take_input(4 * next.start as u64, to)?;
            }
            taken += next.elements;
            if !next.more {
                break;
            }
        }
        if taken > 0 {
            self.recording.barrier()?;
        }
        Ok(())
    }

    /// Logits, or what is wanted of them, go to where the host reads them.
    fn leave(&mut self, output: Slot) -> Result<(), DeviceError> {
        let (rows, width) = (
            self.size.logit_rows,
            self.plan.placement(output).shape.width,
        );
        let left = match self.wanted {
            _ if rows == 0 => return Ok(()),
            Wanted::Logits => self.part(output, 0, 4 * rows * width),
            Wanted::Likeliest => self.likeliest(output, [rows, width])?,
            Wanted::TopK(count) => self.top_k(output, [rows, width], count)?,
        };
        self.recording.leave_output(left, 0)
    }

    /// Norms by an epsilon, with or without the mean taken off, times a weight and plus a bias.
    fn norm(
        &mut self,
        (epsilon, centered, vectors): (f32, bool, [Option<VectorId>; 2]),
        [input, output]: [Slot; 2],
        rows: Rows,
        [groups, width]: [usize; 2],
    ) -> Result<(), DeviceError> {
        let [weight, bias] = vectors.map(|vector| self.vector(vector));
        let constants = NormConstants {
            source: self.word(input),
            to: self.word(output),
            width: number(width),
            groups: number(groups),
            weight,
            epsilon,
            centered: centered.into(),
            bias,
        };
        let grid = [number(groups), number(self.rows(rows)), 1];
        let windows = self.activations_and_vectors();
        let kernels = self.kernels;
        self.dispatch(&kernels.norm, windows, &constants, grid)
    }

    /// Rows are added to others, which are normed and quantized, as far as that is asked for.
    fn prepare(&mut self, prepare: &Prepare) -> Result<(), DeviceError> {
        let rows = self.rows(prepare.rows);
        let quantized = self.quantized((rows, prepare.width));
        let added = prepare.added;
        let inner = added.and_then(|added| added.norm);
        let (norm, weight) = prepare.norm;
        let constants = PrepareConstants {
            source: self.word(prepare.source),
            add: added.map_or(NONE, |added| self.word(added.from)),
            factor: added.and_then(|added| added.factor).unwrap_or(1.0),
            inner: inner.map_or(NONE, |(_, weight)| self.weights.vector(weight)),
            inner_epsilon: inner.map_or(0.0, |(norm, _)| norm.epsilon),
            to: prepare.to.map_or(NONE, |to| self.word(to)),
            width: number(prepare.width),
            weight: self.vector(weight),
            epsilon: norm.epsilon,
            bytes: if prepare.quantized {
                quantized.bytes
            } else {
                NONE
            },
            scales: quantized.scales,
            sums: quantized.sums,
            centered: u32::from(norm.kind != NormKind::Rms)
                + 2 * u32::from(inner.is_some_and(|(norm, _)| norm.kind != NormKind::Rms)),
        };
        let windows = self.activations_and_vectors();
        let kernels = self.kernels;
        self.dispatch(&kernels.prepare, windows, &constants, [number(rows), 1, 1])
    }

    /// So many rows of so many elements as actions quantize them.
    pub(crate) fn quantized(&self, (rows, columns): (usize, usize)) -> Quantized {
        Quantized::new(self.room.blocks, rows, columns)
    }

    /// The same in a slot of the program's own.
    pub(crate) fn quantized_at(&self, blocks: Slot, (rows, columns): (usize, usize)) -> Quantized {
        Quantized::new(self.word(blocks), rows, columns)
    }

    /// Quantizes the rows of a slot, or what a gate of those lets through of another slot's.
    pub(crate) fn quantize(
        &mut self,
        (source, gate): (Slot, Option<(Slot, Gating)>),
        quantized: &Quantized,
    ) -> Result<(), DeviceError> {
        let fours = 8 * quantized.blocks;
        let (function, [alpha, limit]) = gate.map_or((NONE, [0.0; 2]), |gate| gating_code(gate.1));
        let constants = Quantize {
            source: self.word(source),
            up: gate.map_or(NONE, |(up, _)| self.word(up)),
            function,
            bytes: quantized.bytes,
            scales: quantized.scales,
            sums: quantized.sums,
            fours,
            alpha,
            limit,
        };
        let (kernels, windows) = (self.kernels, self.only_activations());
        self.dispatch(&kernels.quantize, windows, &constants, grid(fours))
    }

    /// Products of several matrices with the same rows, which are quantized once if any of them is.
    fn products(
        &mut self,
        [input, blocks]: [Slot; 2],
        (rows, columns): (Rows, usize),
        outputs: (&[(MatrixId, Slot)], Option<Activation>),
    ) -> Result<(), DeviceError> {
        let rows = self.rows(rows);
        let quantized = self.quantized_at(blocks, (rows, columns));
        let is_quantized =
            |(id, _): &(MatrixId, Slot)| self.placed(Together::One(*id)).dtype.is_quantized();
        if outputs.0.iter().any(is_quantized) {
            self.quantize((input, None), &quantized)?;
            self.recording.barrier()?;
        }
        self.products_with((input, &quantized), rows, outputs)
    }

    /// Products of rows that the action before has quantized.
    fn products_of_quantized(&mut self, op: &Op) -> Result<(), DeviceError> {
        if let Op::ExpertProduct { .. } = op {
            return self.expert_products_of_quantized(op);
        }
        let Op::Product {
            input,
            rows,
            columns,
            ref outputs,
            function,
            ..
        } = *op
        else {
            unreachable!("rows are quantized for products")
        };
        let rows = self.rows(rows);
        let quantized = self.quantized((rows, columns));
        self.products_with((input, &quantized), rows, (outputs, function))
    }

    /// Products of several matrices with the same rows.
    fn products_with(
        &mut self,
        (input, quantized): (Slot, &Quantized),
        rows: usize,
        (outputs, function): (&[(MatrixId, Slot)], Option<Activation>),
    ) -> Result<(), DeviceError> {
        if rows == 0 {
            return Ok(());
        }
        for &(id, output) in outputs {
            let input = (self.word(input), quantized);
            self.product(Together::One(id), input, Shares::All(rows), output)?;
        }
        if let Some(function) = function {
            self.recording.barrier()?;
            for &(id, output) in outputs {
                let count = rows * self.placed(Together::One(id)).rows;
                self.apply(function, output, count)?;
            }
        }
        Ok(())
    }

    /// One product, in windows of rows where the matrix is longer than what a kernel is shown, or of experts where all of
    /// theirs are.
    pub(crate) fn product(
        &mut self,
        id: Together,
        (input, quantized): (u32, &Quantized),
        shares: Shares<'_>,
        output: Slot,
    ) -> Result<(), DeviceError> {
        let weights = self.weights;
        let (placed, piece) = weights.matrices(id);
        let kernels = match shares {
            Shares::All(_) => self.kernels.products(placed.dtype),
            Shares::Sorted(_) => self.kernels.experts().products(placed.dtype),
        };
        let (kernel, side) = match shares.are_many() {
            true => (&kernels.many, [TILE, TILE]),
            false => (&kernels.few, [PRODUCT_ROWS, PRODUCT_TOKENS]),
        };
        let sorted = shares.sorted();
        for part in parts(placed, self.window, self.alignment) {
            let constants = Product {
                input: match placed.dtype.is_quantized() {
                    true => quantized.bytes,
                    false => input,
                },
                scales: quantized.scales,
                sums: quantized.sums,
                output: self.word(output),
                stride: number(placed.rows),
                first_row: number(part.first_row),
                count: number(part.rows),
                row_size: number(placed.row_bytes / 16),
                skip: part.skip / 16,
                columns: number(placed.columns),
                units: number(placed.columns.div_ceil(arranged::unit(placed.dtype))),
                tokens: number(shares.rows()),
                has_bias: placed.has_bias.into(),
                tiles: sorted.map_or(NONE, |sorted| sorted.tiles),
                order: sorted.map_or(NONE, |sorted| sorted.order),
                used: sorted.map_or(1, |sorted| number(sorted.used)),
                first_expert: number(part.first_expert),
                experts: number(part.experts),
                expert_size: number(placed.rows * (placed.row_bytes / 16)),
            };
            let matrix = Bound::Memory {
                memory: piece,
                offset: part.offset,
                length: part.length,
            };
            let windows = [self.activations(), matrix, matrix, self.activations()];
            let down = match sorted {
                Some(sorted) => number(sorted.most),
                None => number(shares.rows()).div_ceil(side[1]),
            };
            let grid = [number(part.rows).div_ceil(side[0]), down, 1];
            self.dispatch(kernel, windows, &constants, grid)?;
        }
        Ok(())
    }

    /// Where a matrix lies, or those of experts.
    pub(crate) fn placed(&self, id: Together) -> &'a Placed {
        self.weights.matrices(id).0
    }

    /// Some columns of each head of each token are copied.
    fn columns(
        &mut self,
        rows: [(Slot, HeadRows); 2],
        heads: usize,
        columns: usize,
    ) -> Result<(), DeviceError> {
        let tokens = self.size.tokens;
        let [(source, from), (to, there)] = rows.map(|(slot, rows)| {
            let (token, head) = match rows.order {
                HeadOrder::ByToken => (heads * rows.width, rows.width),
                HeadOrder::ByHead => (rows.width, tokens * rows.width),
            };
            let first = self.word(slot) + number(rows.start);
            (first, [number(token), number(head)])
        });
        let count = number(tokens * heads * columns);
        let constants = Columns {
            source,
            to,
            source_token: from[0],
            source_head: from[1],
            to_token: there[0],
            to_head: there[1],
            heads: number(heads),
            columns: number(columns),
            count,
        };
        let (kernels, windows) = (self.kernels, self.only_activations());
        self.dispatch(&kernels.columns, windows, &constants, grid(count))
    }

    /// Rows that become as large as others, or lose what is no outlier.
    fn magnitude(
        &mut self,
        (values, like): (Slot, Option<Slot>),
        [least, deviations]: [f32; 2],
        rows: Rows,
        width: usize,
    ) -> Result<(), DeviceError> {
        let constants = Magnitude {
            to: self.word(values),
            like: like.map_or(NONE, |like| self.word(like)),
            width: number(width),
            least,
            deviations,
        };
        let grid = [number(self.rows(rows)), 1, 1];
        let (kernels, windows) = (self.kernels, self.only_activations());
        self.dispatch(&kernels.magnitude, windows, &constants, grid)
    }

    fn rotate(
        &mut self,
        [rows, table]: [Slot; 2],
        [heads, head_dim, dimensions]: [usize; 3],
        style: RopeStyle,
    ) -> Result<(), DeviceError> {
        let (pairs, apart, step) = pairs_of(dimensions, style);
        let count = number(self.size.tokens * heads * pairs);
        let constants = Rotate {
            rows: self.word(rows),
            table: self.word(table),
            heads: number(heads),
            head_dim: number(head_dim),
            pairs: number(pairs),
            apart: number(apart),
            step: number(step),
            count,
        };
        let (kernels, windows) = (self.kernels, self.only_activations());
        self.dispatch(&kernels.rotate, windows, &constants, grid(count))
    }

    /// New queries, keys and values are made ready, and the latter go to the buffers of their sequences.
    fn heads(&mut self, heads: &Heads, segments: &[Segment<'_>]) -> Result<(), DeviceError> {
        let mut start = 0;
        for (index, segment) in segments.iter().enumerate() {
            let layer = Layer(heads.layer);
            let [keys, values] = self.new_rows(layer, Side::BOTH, segment);
            let windows = [
                self.activations(),
                whole(self.weights.vectors()),
                keys.shown.bound,
                values.shown.bound,
            ];
            let constants = self.heads_constants(heads, [index, start], [&keys, &values]);
            let shape = &heads.shape;
            let tokens = segment.tokens.len();
            let grid = [
                number(shape.query_heads + 2 * shape.kv_heads),
                number(tokens),
                1,
            ];
            let kernels = self.kernels;
            self.dispatch(&kernels.heads, windows, &constants, grid)?;
            start += tokens;
        }
        Ok(())
    }

    /// Of the `segment`-th segment, which begins with the token `start`.
    fn heads_constants(
        &self,
        heads: &Heads,
        [segment, start]: [usize; 2],
        [keys, values]: [&NewRows<'_>; 2],
    ) -> HeadsConstants {
        let shape = &heads.shape;
        let row = |slot, heads: usize| self.word(slot) + number(start * heads * shape.head_dim);
        let turn = heads.turn;
        let (pairs, apart, step) =
            turn.map_or((0, 0, 0), |turn| pairs_of(turn.dimensions, turn.style));
        let weights = heads
            .norms
            .map(|norms| norms.map(|(_, weight)| self.vector(weight)));
        let [query_weight, key_weight] = weights.unwrap_or([NONE; 2]);
        HeadsConstants {
            queries: row(heads.queries, shape.query_heads),
            keys: row(heads.keys, shape.kv_heads),
            values: row(heads.values, shape.kv_heads),
            table: turn.map_or(0, |turn| self.word(turn.table) + number(start * 2 * pairs)),
            query_heads: number(shape.query_heads),
            kv_heads: number(shape.kv_heads),
            head_dim: number(shape.head_dim),
            norms: u32::from(heads.norms.is_some()),
            query_weight,
            key_weight,
            epsilon: heads.norms.map_or(0.0, |[(norm, _), _]| norm.epsilon),
            pairs: number(pairs),
            apart: number(apart),
            step: number(step),
            position: self.position(segment),
            first_row: keys.first_row,
            key_to: keys.shown.skip / 4,
            key_stride: keys.stride,
            value_to: values.shown.skip / 4,
            value_stride: values.stride,
            elements: keys.element + 4 * values.element,
        }
    }

    /// The word that has the position of the first token of a segment.
    pub(crate) fn position(&self, segment: usize) -> u32 {
        self.room.positions + number(segment)
    }

    /// Where a segment's new rows of some sides of a layer go.
    fn new_rows<const N: usize>(
        &self,
        layer: Layer,
        sides: [Side; N],
        segment: &Segment<'_>,
    ) -> [NewRows<'a>; N] {
        let sides = sides.map(|side| device_rows(segment, layer, side));
        let first = segment.sequence.len();
        let rows = first..first + segment.tokens.len();
        let (shown, first_row) = self.rows_of(segment, sides, &rows, Access::ReadWrite);
        std::array::from_fn(|side| {
            let layout = sides[side].layout;
            NewRows {
                shown: shown[side],
                first_row: number(first_row),
                stride: number(layout.row_stride / 4),
                element: element_code(layout.element).unwrap_or(NONE),
            }
        })
    }

    /// Rows of some sides of a layer as a kernel is shown them, and the first row that it is shown: all that the sequence may
    /// have, unless these are too long, so that the next step is shown the same.
    pub(crate) fn rows_of<const N: usize>(
        &self,
        segment: &Segment<'_>,
        sides: [DeviceRows; N],
        rows: &Range<usize>,
        access: Access,
    ) -> ([Shown<'a>; N], usize) {
        let bytes = |side: &DeviceRows, rows: usize| {
            let layout = side.layout;
            let row_bytes = (layout.heads * layout.head_stride) as u64;
            (rows as u64 - 1) * layout.row_stride as u64 + row_bytes
        };
        let capacity = segment.sequence.capacity();
        let skip = |side: &DeviceRows| side.address.offset % self.shown_alignment;
        let fits = |side: &DeviceRows| bytes(side, capacity) + skip(side) <= self.window;
        let whole = sides.iter().all(fits);
        let shown = sides.map(|side| {
            let start = (rows.start * side.layout.row_stride) as u64;
            let touched = bytes(&side, rows.len());
            if !whole {
                return self.mapped(side.address, start, touched, access);
            }
            let bound = Bound::Reserved {
                address: side.address,
                length: bytes(&side, capacity),
                untouched: start,
                touched,
                access,
            };
            let skip = skip(&side) as u32;
            Shown { bound, skip }
        });
        (shown, if whole { 0 } else { rows.start })
    }

    /// New rows of one side of a layer go to the buffers of their sequences.
    fn store(
        &mut self,
        (layer, side): (Layer, Side),
        slot: Slot,
        width: usize,
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        let mut start = 0;
        for (index, segment) in segments.iter().enumerate() {
            let tokens = segment.tokens.len();
            let [rows] = self.new_rows(layer, [side], segment);
            let element = device_rows(segment, layer, side).layout.element;
            let windows = [
                self.activations(),
                rows.shown.bound,
                Bound::Unused,
                Bound::Unused,
            ];
            let kernels = self.kernels;
            if element.block_len() > 1 {
                let count = number(tokens * width / (2 * BLOCK));
                let constants = StoreBlocks {
                    source: self.word(slot) + number(start * width),
                    position: self.position(index),
                    first_row: rows.first_row,
                    to: rows.shown.skip / 4,
                    stride: rows.stride,
                    width: number(width),
                    count,
                };
                self.dispatch(&kernels.blocks().store, windows, &constants, grid(count))?;
                start += tokens;
                continue;
            }
            let words = element.bytes(width) / 4;
            let count = number(words * tokens);
            let constants = Store {
                source: self.word(slot) + number(start * width),
                position: self.position(index),
                first_row: rows.first_row,
                to: rows.shown.skip / 4,
                stride: rows.stride,
                width: number(width),
                words: number(words),
                element: rows.element,
                count,
            };
            self.dispatch(&kernels.store, windows, &constants, grid(count))?;
            start += tokens;
        }
        Ok(())
    }

    /// Transforms what goes with the rows of one side of a layer as these are, rows to be stored or queries of them, or
    /// back again what has been made of them: so many elements of each token. Ends with a barrier, if it does anything.
    pub(crate) fn transform(
        &mut self,
        (layer, side): (Layer, Side),
        (values, width): (Slot, usize),
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        // Sequences of one cache have one geometry.
        let rotation = segments
            .first()
            .and_then(|segment| segment.sequence.geometry().rotation(layer, side));
        let Some(block) = rotation else {
            return Ok(());
        };
        let count = number(self.size.tokens * width);
        let constants = Hadamard {
            values: self.word(values),
            block: number(block.get()),
            count,
        };
        // A workgroup has four elements for each thread.
        let grid = grid(count.div_ceil(HADAMARD_ELEMENTS / THREADS));
        let (kernels, windows) = (self.kernels, self.only_activations());
        self.dispatch(&kernels.blocks().hadamard, windows, &constants, grid)?;
        self.recording.barrier()?;
        Ok(())
    }

    /// Bytes of a reservation from `start` bytes behind `address` on, as a kernel is shown them.
    pub(crate) fn mapped(
        &self,
        address: Address,
        start: u64,
        bytes: u64,
        access: Access,
    ) -> Shown<'a> {
        let offset = address.offset + start;
        let skip = offset % self.shown_alignment;
        Shown {
            bound: Bound::Mapped {
                address: Address { offset, ..address },
                length: bytes,
                access,
            },
            skip: skip as u32,
        }
    }

    /// Picks the rows that segments ask for.
    fn choose(
        &mut self,
        [from, to]: [Slot; 2],
        width: usize,
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        let (mut rows, mut end) = (0, 0);
        for segment in segments {
            end += segment.tokens.len();
            let wanted = segment.logit_rows();
            if wanted > 0 {
                let bytes = 4 * wanted * width;
                let source = self.part(from, 4 * (end - wanted) * width, bytes);
                let target = self.part(to, 4 * rows * width, bytes);
                self.recording.copy(source, target)?;
            }
            rows += wanted;
        }
        Ok(())
    }

    fn apply(
        &mut self,
        function: Activation,
        values: Slot,
        count: usize,
    ) -> Result<(), DeviceError> {
        let constants = Elementwise {
            function: activation_code(function).unwrap_or(NONE),
            ..Elementwise::default()
        };
        self.elements(Elements::Apply, [values; 2], count, constants)
    }

    /// `constants` say what the operation takes beside its operands.
    fn elements(
        &mut self,
        operation: Elements,
        [to, from]: [Slot; 2],
        count: usize,
        constants: Elementwise,
    ) -> Result<(), DeviceError> {
        let count = number(count);
        let constants = Elementwise {
            to: self.word(to),
            source: self.word(from),
            count,
            operation: operation as u32,
            ..constants
        };
        let (kernels, windows) = (self.kernels, self.activations_and_vectors());
        self.dispatch(&kernels.elementwise, windows, &constants, grid(count))
    }

    /// Where a vector begins among all, if there is one.
    pub(crate) fn vector(&self, vector: Option<VectorId>) -> u32 {
        vector.map_or(NONE, |vector| self.weights.vector(vector))
    }

    pub(crate) fn activations_and_vectors(&self) -> [Bound<'a>; WINDOWS] {
        let mut windows = self.only_activations();
        windows[1] = whole(self.weights.vectors());
        windows
    }

    pub(crate) fn only_activations(&self) -> [Bound<'a>; WINDOWS] {
        let mut windows = [Bound::Unused; WINDOWS];
        windows[0] = self.activations();
        windows
    }

    pub(crate) fn dispatch(
        &mut self,
        kernel: &'a ComputeKernel,
        windows: [Bound<'a>; WINDOWS],
        constants: &impl Constants,
        groups: [u32; 3],
    ) -> Result<(), DeviceError> {
        self.recording
            .dispatch(kernel, windows, constants.words(), groups)
    }
}

/// A part of a reservation, and the bytes before it that kernels are shown too.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown<'a> {
    pub(crate) bound: Bound<'a>,
    pub(crate) skip: u32,
}

/// Where new rows of a side go, as a kernel is shown it.
struct NewRows<'a> {
    shown: Shown<'a>,
    /// The first row that is shown.
    first_row: u32,
    /// Words from one row to the next.
    stride: u32,
    element: u32,
}

/// Where rows prepared for quantized products lie: bytes, then scales, then sums.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantized {
    pub(crate) bytes: u32,
    pub(crate) scales: u32,
    pub(crate) sums: u32,
    pub(crate) blocks: u32,
}

impl Quantized {
    /// Of `rows` rows from `word` on: 40 bytes for each block, of which a slot has 52.
    fn new(word: u32, rows: usize, columns: usize) -> Self {
        let blocks = number(rows * (columns / BLOCK));
        let scales = word + 8 * blocks;
        Self {
            bytes: word,
            scales,
            sums: scales + blocks,
            blocks,
        }
    }
}

/// Which rows products are made of.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Shares<'a> {
    /// So many, each with the only matrix.
    All(usize),
    /// Choices, each with its expert's.
    Sorted(&'a Sorted),
}

impl<'a> Shares<'a> {
    fn sorted(self) -> Option<&'a Sorted> {
        match self {
            Self::All(_) => None,
            Self::Sorted(sorted) => Some(sorted),
        }
    }

    fn rows(self) -> usize {
        match self {
            Self::All(rows) => rows,
            Self::Sorted(sorted) => sorted.choices,
        }
    }

    fn are_many(self) -> bool {
        match self {
            Self::All(rows) => rows > FEW_TOKENS,
            Self::Sorted(sorted) => sorted.are_many,
        }
    }
}

/// What a gate is called, and its numbers.
fn gating_code(gating: Gating) -> (u32, [f32; 2]) {
    match gating {
        Gating::Product(activation) => (activation_code(activation).unwrap_or(NONE), [0.0; 2]),
        Gating::Clamped { alpha, limit } => (CLAMPED, [alpha, limit]),
    }
}

/// Rows of a matrix, or of some experts' matrices, that a kernel is shown at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// Whose matrix it begins with, and how many there are.
    first_expert: usize,
    experts: usize,
    /// In each of them.
    first_row: usize,
    rows: usize,
    /// Of the piece that the matrix is in.
    offset: u64,
    length: u64,
    /// Bytes of that before the first row.
    skip: u32,
}

/// Matrices in parts of no more than `window` bytes: all of them, or some whole ones, or some rows of one.
fn parts(placed: &Placed, window: u64, alignment: u64) -> impl Iterator<Item = Part> {
    let row_bytes = placed.row_bytes as u64;
    let whole = placed.bytes().next_multiple_of(4) <= window;
    // Up to an alignment before them is shown too, and the rest of a word behind.
    let room = window.saturating_sub(alignment + 4);
    let experts = match whole {
        true => placed.experts,
        false => ((room / placed.matrix_bytes().max(1)) as usize).clamp(1, placed.experts.max(1)),
    };
    let rows = match whole || experts as u64 * placed.matrix_bytes() <= room {
        true => placed.rows,
        // In whole workgroups.
        false => {
            let rows = (room / row_bytes.max(1)) as usize;
            (rows / PRODUCT_ROWS as usize).max(1) * PRODUCT_ROWS as usize
        }
    };
    let placed = *placed;
    let starts = (0..placed.experts).step_by(experts.max(1));
    let starts = starts.flat_map(move |first_expert| {
        let starts = (0..placed.rows).step_by(rows.max(1));
        starts.map(move |first_row| (first_expert, first_row))
    });
    starts.map(move |(first_expert, first_row)| {
        let experts = experts.min(placed.experts - first_expert);
        let count = rows.min(placed.rows - first_row);
        let from = placed.offset
            + first_expert as u64 * placed.matrix_bytes()
            + first_row as u64 * row_bytes;
        let skip = from % alignment;
        let shown = (experts as u64 - 1) * placed.matrix_bytes() + count as u64 * row_bytes;
        Part {
            first_expert,
            experts,
            first_row,
            rows: count,
            offset: from - skip,
            length: (skip + shown).next_multiple_of(4),
            skip: skip as u32,
        }
    })
}

/// Pairs of a head that turn, and how far it is from the first of a pair to the second and to that of the next.
fn pairs_of(dimensions: usize, style: RopeStyle) -> (usize, usize, usize) {
    let pairs = dimensions / 2;
    match style {
        RopeStyle::HalfSplit => (pairs, pairs, 1),
        RopeStyle::Interleaved => (pairs, 1, 2),
    }
}

/// All of a piece of memory.
pub(crate) fn whole(memory: &DeviceMemory) -> Bound<'_> {
    Bound::Memory {
        memory,
        offset: 0,
        length: memory.length().get(),
    }
}

/// Where a sequence's rows of one side of a layer are.
pub(crate) fn device_rows(segment: &Segment<'_>, layer: Layer, side: Side) -> DeviceRows {
    let rows = segment.sequence.device_rows(layer, side);
    rows.expect("sequences of the device's own cache lie at equal distances")
}

/// Workgroups for so many threads.
pub(crate) fn grid(threads: u32) -> [u32; 3] {
    let groups = threads.div_ceil(THREADS);
    let across = groups.min(MOST_GROUPS);
    [across, groups.div_ceil(across.max(1)), 1]
}

/// A number as kernels take it.
///
/// # Panics
/// For one beyond 32 bits: what kernels are shown is shorter.
pub(crate) fn number(value: usize) -> u32 {
    u32::try_from(value).expect("what kernels are shown has fewer than 2^32 words")
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::DType;

    use super::*;

    fn placed(rows: usize, row_bytes: usize, offset: u64) -> Placed {
        Placed {
            dtype: DType::Q8_0,
            experts: 1,
            rows,
            columns: 32,
            row_bytes,
            piece: 0,
            offset,
            has_bias: false,
        }
    }

    #[test]
    fn a_matrix_that_fits_is_one_part() {
        let parts: Vec<Part> = parts(&placed(7, 34, 256), 1000, 16).collect();
        let one = Part {
            first_expert: 0,
            experts: 1,
            first_row: 0,
            rows: 7,
            offset: 256,
            length: 240,
            skip: 0,
        };
        assert_eq!(parts, [one]);
    }

    #[test]
    fn parts_are_whole_workgroups_that_fit_and_have_every_row_once() {
        for (rows, row_bytes, window, alignment) in
            [(100, 34, 600, 16), (64, 210, 2000, 64), (33, 18, 180, 16)]
        {
            let placed = placed(rows, row_bytes, 512);
            let mut next = 0;
            for part in parts(&placed, window, alignment) {
                assert_eq!(part.first_row, next);
                assert!(part.first_row.is_multiple_of(8), "whole workgroups");
                assert!(part.length <= window, "{} of {window}", part.length);
                assert!(part.offset.is_multiple_of(alignment));
                let first = part.offset + u64::from(part.skip);
                assert_eq!(first, 512 + (next * row_bytes) as u64);
                let bytes = (part.rows * row_bytes) as u64;
                assert!(u64::from(part.skip) + bytes <= part.length);
                next += part.rows;
            }
            assert_eq!(next, rows);
        }
    }

    #[test]
    fn experts_are_in_one_part_or_in_whole_ones_or_in_rows_of_one() {
        let experts = Placed {
            experts: 5,
            ..placed(16, 48, 256)
        };
        let in_windows = |window| {
            let parts = parts(&experts, window, 16);
            let parts = parts.map(|part| {
                assert!(part.length <= window, "{} of {window}", part.length);
                assert_eq!(part.skip, 0, "rows are multiples of the alignment");
                let first = part.first_expert * 16 + part.first_row;
                assert_eq!(part.offset, 256 + 48 * first as u64);
                [part.first_expert, part.experts, part.first_row, part.rows]
            });
            parts.collect::<Vec<_>>()
        };
        assert_eq!(in_windows(5 * 768), [[0, 5, 0, 16]]);
        assert_eq!(
            in_windows(2 * 768 + 20),
            [[0, 2, 0, 16], [2, 2, 0, 16], [4, 1, 0, 16]]
        );
        let rows = in_windows(8 * 48 + 20);
        assert_eq!(rows.len(), 10);
        assert_eq!(rows[..3], [[0, 1, 0, 8], [0, 1, 8, 8], [1, 1, 0, 8]]);
    }

    #[test]
    fn threads_beyond_what_a_device_takes_one_way_go_the_other_too() {
        assert_eq!(grid(0), [0, 0, 1]);
        assert_eq!(grid(129), [2, 1, 1]);
        let [across, down, _] = grid(128 * 100_000);
        assert!(across <= MOST_GROUPS && across * down >= 100_000);
    }
}
