//! Norms, rotations, and operations on each element by itself, as they are recorded.

use lacuna_kernels::{HeadOrder, HeadRows, RopeStyle};
use lacuna_models::program::{Factor, Op, Rows, Slot, VectorId};
use lacuna_models::spec::{Activation, Gating, NormKind};
use lacuna_pages::DeviceError;

use crate::capability::activation_code;
use crate::fused::Prepare;
use crate::kernels::{
    CLAMPED, Columns, Elementwise, Magnitude, NONE, Norm as NormConstants,
    Prepare as PrepareConstants, Rotate,
};
use crate::pass::{Pass, grid, number};

/// What `elementwise` does.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Elements {
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

impl<'a> Pass<'a> {
    /// An operation on each element by itself.
    pub(crate) fn elements_of(&mut self, op: &Op) -> Result<(), DeviceError> {
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
            Op::ScaleHeads {
                values,
                factors,
                heads,
                head_dim,
            } => {
                let constants = Elementwise {
                    width: number(head_dim),
                    factors: self.word(factors),
                    stride: 1,
                    ..none
                };
                let count = self.size.tokens * heads * head_dim;
                self.elements(Elements::ScaleRows, [values; 2], count, constants)
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

    /// Norms by an epsilon, with or without the mean taken off, times a weight and plus a bias.
    pub(crate) fn norm(
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
    pub(crate) fn prepare(&mut self, prepare: &Prepare) -> Result<(), DeviceError> {
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

    /// Some columns of each head of each token are copied.
    pub(crate) fn columns(
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
    pub(crate) fn magnitude(
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

    pub(crate) fn rotate(
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

    pub(crate) fn apply(
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
    pub(crate) fn elements(
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
}

/// What a gate is called, and its numbers.
pub(crate) fn gating_code(gating: Gating) -> (u32, [f32; 2]) {
    match gating {
        Gating::Product(activation) => (activation_code(activation).unwrap_or(NONE), [0.0; 2]),
        Gating::Clamped { alpha, limit } => (CLAMPED, [alpha, limit]),
    }
}

/// Pairs of a head that turn, and how far it is from the first of a pair to the second and to that of the next.
pub(crate) fn pairs_of(dimensions: usize, style: RopeStyle) -> (usize, usize, usize) {
    let pairs = dimensions / 2;
    match style {
        RopeStyle::HalfSplit => (pairs, pairs, 1),
        RopeStyle::Interleaved => (pairs, 1, 2),
        // Models with it were refused.
        RopeStyle::HalvesSplit => (0, 0, 0),
    }
}
