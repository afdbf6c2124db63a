//! One pass being recorded: each operation as kernels on slots of the arena.
//!
//! Operations take effect one after another, with a barrier between; what belongs to one operation runs side by side.

use lacuna_kernels::RopeStyle;
use lacuna_kv::{Layer, Side};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::program::{Factor, MatrixId, Op, Rows, Slot, VectorId};
use lacuna_models::spec::{Activation, Gating, Norm};
use lacuna_models::{PassSize, Segment};
use lacuna_pages::DeviceError;
use lacuna_pages::device::{Access, Address};
use lacuna_pages::vulkan::{Bound, ComputeKernel, DeviceMemory, Recording, WINDOWS};

use crate::arranged::{self, BLOCK};
use crate::capability::{activation_code, element_code};
use crate::fused::{Action, Heads, Prepare};
use crate::kernels::{
    Constants, Elementwise, FEW_TOKENS, Heads as HeadsConstants, Kernels, NONE,
    Norm as NormConstants, PRODUCT_ROWS, PRODUCT_TOKENS, Prepare as PrepareConstants, Product,
    Quantize, Rotate, Store, THREADS, TILE,
};
use crate::weights::{DeviceWeights, Placed};

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
}

/// What the host gives a pass: rows of a slot, and where they are in its input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Given {
    pub(crate) slot: Slot,
    /// In elements.
    pub(crate) start: usize,
    pub(crate) elements: usize,
}

/// What lies in the arena behind the slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// The first word of what actions quantize.
    pub(crate) blocks: u32,
    /// The first word of partial results of attention, and how many there are.
    pub(crate) states: u32,
    pub(crate) state_words: u64,
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
    pub(crate) size: PassSize,
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
        for action in actions {
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
                function,
                gate,
                up,
                width,
            } => {
                let rows = (self.size.tokens, width);
                let quantized = self.quantized(rows);
                self.quantize((gate, Some((up, function))), &quantized)?;
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
        self.recording.barrier();
        Ok(())
    }

    fn op(&mut self, op: &Op, segments: &[Segment<'_>]) -> Result<(), DeviceError> {
        match *op {
            // The host has made them.
            Op::Embed { .. } | Op::Rotations { .. } => return self.take_given(),
            Op::Positions { .. }
            | Op::CheckFinite { .. }
            | Op::PlaceImages { .. }
            | Op::AddImages { .. } => return Ok(()),
            Op::Norm {
                norm,
                weight,
                input,
                output,
                rows,
                groups,
                width,
            } => self.norm(norm, weight, [input, output], rows, [groups, width])?,
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
                self.store((Layer(layer), Side::Key), keys, width, segments)?;
                if let Some(values) = values {
                    self.store((Layer(layer), Side::Value), values, width, segments)?;
                }
            }
            Op::Attend { .. } => return self.attend(op, None, segments),
            Op::Activate {
                gating: Gating::Product(activation),
                gate,
                up,
                width,
            } => {
                let count = self.size.tokens * width;
                let function = activation_code(activation).unwrap_or(NONE);
                self.elements(Elements::Gate, [gate, up], count, (function, 0.0))?;
            }
            Op::Apply {
                function,
                values,
                rows,
                width,
            } => self.apply(function, values, self.rows(rows) * width)?,
            Op::Add {
                to,
                from,
                factor,
                rows,
                width,
            } => {
                let count = self.rows(rows) * width;
                let factor = factor.unwrap_or(1.0);
                self.elements(Elements::Add, [to, from], count, (NONE, factor))?;
            }
            Op::Scale {
                values,
                rows,
                width,
                factor: Factor::Fixed(factor),
            } => {
                let count = self.rows(rows) * width;
                self.elements(Elements::Scale, [values; 2], count, (NONE, factor))?;
            }
            Op::SoftCap {
                values,
                rows,
                width,
                cap,
            } => {
                let count = self.rows(rows) * width;
                self.elements(Elements::SoftCap, [values; 2], count, (NONE, cap))?;
            }
            Op::Choose { from, to, width } => self.choose([from, to], width, segments)?,
            Op::Return { output } => return self.leave(output),
            _ => {
                unreachable!("a model is refused that has an operation which the device cannot do")
            }
        }
        self.recording.barrier();
        Ok(())
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
        let Some((next, rest)) = self.given.split_first() else {
            unreachable!("the host gives what the program asks for")
        };
        self.given = rest;
        if next.elements > 0 {
            let to = self.part(next.slot, 0, 4 * next.elements);
            self.recording.take_input(4 * next.start as u64, to)?;
            self.recording.barrier();
        }
        Ok(())
    }

    /// Logits go to where the host reads them.
    fn leave(&mut self, output: Slot) -> Result<(), DeviceError> {
        let width = self.plan.placement(output).shape.width;
        let bytes = 4 * self.size.logit_rows * width;
        match bytes {
            0 => Ok(()),
            _ => {
                let logits = self.part(output, 0, bytes);
                self.recording.leave_output(logits, 0)
            }
        }
    }

    fn norm(
        &mut self,
        norm: Norm,
        weight: Option<VectorId>,
        [input, output]: [Slot; 2],
        rows: Rows,
        [groups, width]: [usize; 2],
    ) -> Result<(), DeviceError> {
        let constants = NormConstants {
            source: self.word(input),
            to: self.word(output),
            width: number(width),
            groups: number(groups),
            weight: weight.map_or(NONE, |weight| self.weights.vector(weight)),
            epsilon: norm.epsilon,
        };
        let grid = [number(groups), number(self.rows(rows)), 1];
        let windows = [
            self.activations(),
            whole(self.weights.vectors()),
            Bound::Unused,
            Bound::Unused,
        ];
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
            weight: weight.map_or(NONE, |weight| self.weights.vector(weight)),
            epsilon: norm.epsilon,
            bytes: if prepare.quantized {
                quantized.bytes
            } else {
                NONE
            },
            scales: quantized.scales,
            sums: quantized.sums,
        };
        let windows = [
            self.activations(),
            whole(self.weights.vectors()),
            Bound::Unused,
            Bound::Unused,
        ];
        let kernels = self.kernels;
        self.dispatch(&kernels.prepare, windows, &constants, [number(rows), 1, 1])
    }

    /// So many rows of so many elements as actions quantize them.
    fn quantized(&self, (rows, columns): (usize, usize)) -> Quantized {
        Quantized::new(self.room.blocks, rows, columns)
    }

    /// Quantizes the rows of a slot, or the products of those with a gate's function and another slot's.
    pub(crate) fn quantize(
        &mut self,
        (source, gate): (Slot, Option<(Slot, Activation)>),
        quantized: &Quantized,
    ) -> Result<(), DeviceError> {
        let fours = 8 * quantized.blocks;
        let function = gate.and_then(|(_, function)| activation_code(function));
        let constants = Quantize {
            source: self.word(source),
            up: gate.map_or(NONE, |(up, _)| self.word(up)),
            function: function.unwrap_or(NONE),
            bytes: quantized.bytes,
            scales: quantized.scales,
            sums: quantized.sums,
            fours,
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
        let quantized = Quantized::new(self.word(blocks), rows, columns);
        let is_quantized =
            |(id, _): &(MatrixId, Slot)| self.weights.matrix(*id).0.dtype.is_quantized();
        if outputs.0.iter().any(is_quantized) {
            self.quantize((input, None), &quantized)?;
            self.recording.barrier();
        }
        self.products_with((input, &quantized), rows, outputs)
    }

    /// Products of rows that the action before has quantized.
    fn products_of_quantized(&mut self, op: &Op) -> Result<(), DeviceError> {
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
            let input = self.word(input);
            self.product(id, (input, quantized), rows, output)?;
        }
        if let Some(function) = function {
            self.recording.barrier();
            for &(id, output) in outputs {
                let count = rows * self.weights.matrix(id).0.rows;
                self.apply(function, output, count)?;
            }
        }
        Ok(())
    }

    /// One product, in windows of rows where the matrix is longer than what a kernel is shown.
    fn product(
        &mut self,
        id: MatrixId,
        (input, quantized): (u32, &Quantized),
        tokens: usize,
        output: Slot,
    ) -> Result<(), DeviceError> {
        let weights = self.weights;
        let (placed, piece) = weights.matrix(id);
        let kernels = self.kernels.products(placed.dtype);
        let is_many = tokens > FEW_TOKENS;
        let (kernel, side) = match is_many {
            true => (&kernels.many, [TILE, TILE]),
            false => (&kernels.few, [PRODUCT_ROWS, PRODUCT_TOKENS]),
        };
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
                tokens: number(tokens),
                has_bias: placed.has_bias.into(),
            };
            let matrix = Bound::Memory {
                memory: piece,
                offset: part.offset,
                length: part.length,
            };
            let windows = [self.activations(), matrix, matrix, self.activations()];
            let grid = [
                number(part.rows).div_ceil(side[0]),
                number(tokens).div_ceil(side[1]),
                1,
            ];
            self.dispatch(kernel, windows, &constants, grid)?;
        }
        Ok(())
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
        for segment in segments {
            let [keys, values] =
                Side::BOTH.map(|side| self.new_rows((Layer(heads.layer), side), segment));
            let windows = [
                self.activations(),
                whole(self.weights.vectors()),
                keys.shown.bound,
                values.shown.bound,
            ];
            let constants = self.heads_constants(heads, start, [&keys, &values]);
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

    /// Of a segment that begins with the token `start`.
    fn heads_constants(
        &self,
        heads: &Heads,
        start: usize,
        [keys, values]: [&NewRows<'_>; 2],
    ) -> HeadsConstants {
        let shape = &heads.shape;
        let row = |slot, heads: usize| self.word(slot) + number(start * heads * shape.head_dim);
        let turn = heads.turn;
        let (pairs, apart, step) =
            turn.map_or((0, 0, 0), |turn| pairs_of(turn.dimensions, turn.style));
        let weights = heads.norms.map(|norms| {
            norms.map(|(_, weight)| weight.map_or(NONE, |weight| self.weights.vector(weight)))
        });
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
            key_to: keys.shown.skip / 4,
            key_stride: keys.stride,
            value_to: values.shown.skip / 4,
            value_stride: values.stride,
            elements: keys.element + 4 * values.element,
        }
    }

    /// Where a segment's new rows of one side of a layer go.
    fn new_rows(&self, (layer, side): (Layer, Side), segment: &Segment<'_>) -> NewRows<'a> {
        let rows = device_rows(segment, layer, side);
        let layout = rows.layout;
        let stride = layout.row_stride as u64;
        let row_bytes = (layout.heads * layout.head_stride) as u64;
        let first = segment.sequence.len() as u64;
        let bytes = (segment.tokens.len() as u64 - 1) * stride + row_bytes;
        NewRows {
            shown: self.mapped(rows.address, first * stride, bytes, Access::ReadWrite),
            stride: number(layout.row_stride / 4),
            element: element_code(layout.element).unwrap_or(NONE),
        }
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
        for segment in segments {
            let tokens = segment.tokens.len();
            let rows = self.new_rows((layer, side), segment);
            let element = device_rows(segment, layer, side).layout.element;
            let words = element.bytes(width) / 4;
            let count = number(words * tokens);
            let constants = Store {
                source: self.word(slot) + number(start * width),
                to: rows.shown.skip / 4,
                stride: rows.stride,
                width: number(width),
                words: number(words),
                element: rows.element,
                count,
            };
            let windows = [
                self.activations(),
                rows.shown.bound,
                Bound::Unused,
                Bound::Unused,
            ];
            let kernels = self.kernels;
            self.dispatch(&kernels.store, windows, &constants, grid(count))?;
            start += tokens;
        }
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
        // What is shown beside them is of the same page: pages begin at multiples of every alignment.
        let skip = offset % self.alignment;
        let address = Address {
            offset: offset - skip,
            ..address
        };
        Shown {
            bound: Bound::Mapped {
                address,
                length: skip + bytes,
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
        let function = activation_code(function).unwrap_or(NONE);
        self.elements(Elements::Apply, [values; 2], count, (function, 0.0))
    }

    fn elements(
        &mut self,
        operation: Elements,
        [to, from]: [Slot; 2],
        count: usize,
        (function, factor): (u32, f32),
    ) -> Result<(), DeviceError> {
        let count = number(count);
        let constants = Elementwise {
            to: self.word(to),
            source: self.word(from),
            count,
            operation: operation as u32,
            function,
            factor,
        };
        let (kernels, windows) = (self.kernels, self.only_activations());
        self.dispatch(&kernels.elementwise, windows, &constants, grid(count))
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

/// What a kernel is shown of a reservation, and the bytes in it before those that are meant.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown<'a> {
    pub(crate) bound: Bound<'a>,
    pub(crate) skip: u32,
}

/// Where new rows of a side go, as a kernel is shown it.
struct NewRows<'a> {
    shown: Shown<'a>,
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

/// Rows of a matrix that a kernel is shown at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    first_row: usize,
    rows: usize,
    /// Of the piece that the matrix is in.
    offset: u64,
    length: u64,
    /// Bytes of that before the first row.
    skip: u32,
}

/// A matrix in parts of no more than `window` bytes.
fn parts(placed: &Placed, window: u64, alignment: u64) -> impl Iterator<Item = Part> {
    let row_bytes = placed.row_bytes as u64;
    let whole = placed.bytes().next_multiple_of(4) <= window;
    let most = match whole {
        true => placed.rows,
        // In whole workgroups; up to an alignment before them is shown too, and the rest of a word behind.
        false => {
            let rows = window.saturating_sub(alignment + 4) / row_bytes;
            (rows as usize / PRODUCT_ROWS as usize).max(1) * PRODUCT_ROWS as usize
        }
    };
    let (rows, start) = (placed.rows, placed.offset);
    (0..rows).step_by(most.max(1)).map(move |first_row| {
        let count = most.min(rows - first_row);
        let from = start + first_row as u64 * row_bytes;
        let skip = from % alignment;
        let length = (skip + count as u64 * row_bytes).next_multiple_of(4);
        Part {
            first_row,
            rows: count,
            offset: from - skip,
            length,
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
pub(crate) fn device_rows(
    segment: &Segment<'_>,
    layer: Layer,
    side: Side,
) -> lacuna_kv::DeviceRows {
    let rows = segment.sequence.device_rows(layer, side);
    rows.expect("sequences of the device's own cache lie at equal distances")
}

/// Workgroups for so many threads.
fn grid(threads: u32) -> [u32; 3] {
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
    fn threads_beyond_what_a_device_takes_one_way_go_the_other_too() {
        assert_eq!(grid(0), [0, 0, 1]);
        assert_eq!(grid(129), [2, 1, 1]);
        let [across, down, _] = grid(128 * 100_000);
        assert!(across <= MOST_GROUPS && across * down >= 100_000);
    }
}
