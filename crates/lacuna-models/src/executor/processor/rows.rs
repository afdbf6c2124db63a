//! Rows by themselves or with others: functions, sums, factors and copies, element by element.

use lacuna_kernels::HeadRows;

use super::{OF_ANOTHER_KIND, Pass, first};
use crate::program::{Factor, Op, Rows, Slot};
use crate::spec::Gating;

impl Pass<'_, '_> {
    /// Runs an operation on rows alone.
    pub(super) fn row_op(&mut self, op: &Op) {
        let cpu = self.cpu;
        match *op {
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
            Op::Clamp {
                from,
                to,
                bounds,
                width,
            } => {
                let bounds = bounds.map(|bound| self.weights.vector(bound)[0]);
                if from != to {
                    let (to, from) = self.pair(to, from, Rows::Tokens, width);
                    to.copy_from_slice(from);
                }
                cpu.clamp(self.values(to, Rows::Tokens, width), bounds);
            }
            Op::Standardize {
                values,
                shifts,
                factors,
                rows,
                width,
            } => {
                let [shifts, factors] = [shifts, factors].map(|it| self.weights.vector(it));
                cpu.standardize(self.values(values, rows, width), shifts, factors);
            }
            Op::Multiply { to, by, width } => {
                let (to, by) = self.pair(to, by, Rows::Tokens, width);
                cpu.multiply(to, by);
            }
            Op::ScaleHeads {
                values,
                factors,
                heads,
                head_dim,
            } => {
                let tokens = self.rows(Rows::Tokens);
                let [values, factors] = self.scratch.slots([values, factors]);
                let values = first(values, tokens * heads * head_dim);
                cpu.scale_rows(values, first(factors, tokens * heads), head_dim);
            }
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
            Op::Columns {
                from,
                to,
                heads,
                columns,
                beside: _,
            } => self.columns(from, to, heads, columns),
            _ => unreachable!("{OF_ANOTHER_KIND}"),
        }
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
}
