//! Alternating updates (AltUp): several residual streams, of which layers compute only the first.
//!
//! ```text
//! once    stream k = P_k embedding, as large as the embedding
//! layer   predicted i = stream i + sum over j of c[i, j] * stream j,  c = W_predict route(stream 0)
//!         hidden = predicted 0; attention and the feed-forward block change it
//!         stream i = predicted i + (1 + c[i]) * (hidden - predicted 0),  c = W_correct route(hidden)
//!         the layer's own input is gated by stream 0, scaled, and added to all others
//! end     hidden = mean of stream 0 and of all U_k stream k, each as large as stream 0
//! with    route(x) = tanh(W_router (norm(x) / width))
//! ```
//!
//! Stream 0 is the slot `hidden`. While a layer changes that, what was predicted of it is kept in
//! `predicted`; the others are changed where they are.

use lacuna_kernels::HeadRows;

use super::Stream;
use crate::program::{Bias, Builder, Factor, Op, Rows, Slot};
use crate::spec::{Activation, AltUp};

/// What there is one of for each stream but the first: its slot, the matrices that make it of the
/// embedding and bring it back, and the slots used on the way.
struct Names {
    stream: &'static str,
    made_by: &'static str,
    merged_by: &'static str,
    before: &'static str,
    chosen: &'static str,
    merged: &'static str,
}

const OTHERS: [Names; AltUp::MOST_STREAMS - 1] = [
    Names {
        stream: "stream-1",
        made_by: "altup_proj.0",
        merged_by: "altup_unembd_proj.0",
        before: "stream-1-before",
        chosen: "stream-1-chosen",
        merged: "stream-1-merged",
    },
    Names {
        stream: "stream-2",
        made_by: "altup_proj.1",
        merged_by: "altup_unembd_proj.1",
        before: "stream-2-before",
        chosen: "stream-2-chosen",
        merged: "stream-2-merged",
    },
    Names {
        stream: "stream-3",
        made_by: "altup_proj.2",
        merged_by: "altup_unembd_proj.2",
        before: "stream-3-before",
        chosen: "stream-3-chosen",
        merged: "stream-3-merged",
    },
];

/// The least mean square that a stream counts as having when it is brought to another's size, as
/// models are trained with.
const LEAST_MEAN_SQUARE: f32 = 1e-5;

/// Names of the streams beside the first.
fn others(altup: AltUp) -> &'static [Names] {
    &OTHERS[..altup.streams - 1]
}

impl Stream<'_> {
    /// The streams that layers do not compute.
    pub(super) fn other_streams(&self, altup: AltUp, program: &mut Builder) -> Vec<Slot> {
        let width = self.spec.hidden;
        let slots = others(altup).iter();
        let slots = slots.map(|names| program.values(names.stream, Rows::Tokens, width));
        slots.collect()
    }

    /// Makes the other streams of the embedding.
    pub(super) fn begin_streams(&self, altup: AltUp, program: &mut Builder) {
        let width = self.spec.hidden;
        program.step("begin-streams");
        let streams = self.other_streams(altup, program);
        let matrices = others(altup).iter();
        let matrices =
            matrices.map(|names| program.matrix(names.made_by, width, width, Bias::IfPresent));
        let outputs = matrices.zip(streams.iter().copied()).collect();
        let blocks = "attention-input-blocks";
        program.product(self.hidden, blocks, Rows::Tokens, width, outputs);
        for stream in streams {
            self.make_as_large(stream, self.hidden, Rows::Tokens, program);
        }
    }

    /// Each stream takes up what all of them foretell of it.
    pub(super) fn predict_streams(&self, altup: AltUp, program: &mut Builder) {
        let (width, count) = (self.spec.hidden, altup.streams);
        program.step("predict-streams");
        let coefficients = self.route("altup_predict_coef", count, count * count, program);
        let predicted = self.predicted(program);
        self.copy(self.hidden, predicted, program);
        let (mut before, mut after) = (vec![self.hidden], vec![predicted]);
        let streams = self.other_streams(altup, program);
        for (names, stream) in others(altup).iter().zip(streams) {
            let copy = program.values(names.before, Rows::Tokens, width);
            self.copy(stream, copy, program);
            before.push(copy);
            after.push(stream);
        }
        for (i, to) in after.into_iter().enumerate() {
            for (j, from) in before.iter().enumerate() {
                program.push(Op::AddScaledRows {
                    to,
                    from: *from,
                    factors: coefficients,
                    columns: count * count,
                    column: i * count + j,
                    width,
                });
            }
        }
        self.copy(predicted, self.hidden, program);
    }

    /// Each stream takes up a share of what the layer made of the first otherwise than predicted.
    pub(super) fn correct_streams(&self, altup: AltUp, program: &mut Builder) {
        let (width, count) = (self.spec.hidden, altup.streams);
        program.step("correct-streams");
        let coefficients = self.route("altup_correct_coef", count, count, program);
        let predicted = self.predicted(program);
        program.push(Op::Add {
            to: self.hidden,
            from: predicted,
            factor: Some(-1.0),
            rows: Rows::Tokens,
            width,
        });
        let mut streams = vec![predicted];
        streams.extend(self.other_streams(altup, program));
        for (column, to) in streams.into_iter().enumerate() {
            self.sum(to, self.hidden, Rows::Tokens, program);
            program.push(Op::AddScaledRows {
                to,
                from: self.hidden,
                factors: coefficients,
                columns: count,
                column,
                width,
            });
        }
        self.copy(predicted, self.hidden, program);
    }

    /// The first stream as the gate of a layer's own input reads it.
    pub(super) fn scaled_for_inputs(&self, program: &mut Builder) -> Slot {
        let width = self.spec.hidden;
        let scaled = program.values("feed-forward-input", Rows::Tokens, width);
        self.copy(self.hidden, scaled, program);
        let factors = program.vector("altup_correct_scale", width);
        program.push(Op::Scale {
            values: scaled,
            rows: Rows::Tokens,
            width,
            factor: Factor::Columns(factors),
        });
        scaled
    }

    /// The mean of all streams, of the rows that become logits; `chosen` are those of the first.
    pub(super) fn merge_streams(&self, altup: AltUp, chosen: Slot, program: &mut Builder) {
        let width = self.spec.hidden;
        let mut merged = Vec::new();
        for (names, stream) in others(altup).iter().zip(self.other_streams(altup, program)) {
            let rows = program.values(names.chosen, Rows::Logits, width);
            program.push(Op::Choose {
                from: stream,
                to: rows,
                width,
            });
            merged.push((names, rows));
        }
        program.step("merge-streams");
        let merged: Vec<Slot> = merged
            .into_iter()
            .map(|(names, rows)| {
                let output = program.values(names.merged, Rows::Logits, width);
                let matrix = program.matrix(names.merged_by, width, width, Bias::IfPresent);
                let outputs = vec![(matrix, output)];
                program.product(rows, "chosen-blocks", Rows::Logits, width, outputs);
                self.make_as_large(output, chosen, Rows::Logits, program);
                output
            })
            .collect();
        for output in merged {
            self.sum(chosen, output, Rows::Logits, program);
        }
        program.push(Op::Scale {
            values: chosen,
            rows: Rows::Logits,
            width,
            factor: Factor::Fixed(1.0 / altup.streams as f32),
        });
    }

    /// What `matrix` makes of the first stream's route: the coefficients of streams, `[tokens, columns]`.
    fn route(
        &self,
        matrix: &'static str,
        count: usize,
        columns: usize,
        program: &mut Builder,
    ) -> Slot {
        let width = self.spec.hidden;
        let input = program.values("router-input", Rows::Tokens, width);
        let weight = program.vector("altup_router_norm", width);
        self.norm(weight, self.hidden, input, Rows::Tokens, program);
        program.push(Op::Scale {
            values: input,
            rows: Rows::Tokens,
            width,
            factor: Factor::Fixed(1.0 / width as f32),
        });
        let route = program.values("route", Rows::Tokens, count);
        let router = program.matrix("altup_router", count, width, Bias::IfPresent);
        let outputs = vec![(router, route)];
        program.product(input, "router-blocks", Rows::Tokens, width, outputs);
        program.push(Op::Apply {
            function: Activation::Tanh,
            values: route,
            rows: Rows::Tokens,
            width: count,
        });
        let coefficients = program.values("coefficients", Rows::Tokens, columns);
        let matrix = program.matrix(matrix, columns, count, Bias::IfPresent);
        let outputs = vec![(matrix, coefficients)];
        program.product(route, "router-blocks", Rows::Tokens, count, outputs);
        coefficients
    }

    fn make_as_large(&self, values: Slot, like: Slot, rows: Rows, program: &mut Builder) {
        program.push(Op::MatchMagnitude {
            values,
            like,
            least: LEAST_MEAN_SQUARE,
            rows,
            width: self.spec.hidden,
        });
    }

    fn copy(&self, from: Slot, to: Slot, program: &mut Builder) {
        let width = self.spec.hidden;
        let rows = HeadRows::by_token(width, 0);
        program.columns((from, rows), (to, rows), 1, width);
    }

    fn predicted(&self, program: &mut Builder) -> Slot {
        program.values("predicted", Rows::Tokens, self.spec.hidden)
    }
}
