//! What each kind of layer computes: one file per kind, each a function that emits operations.

mod altup;
mod attention;
mod delta_net;
mod encoder;
mod experts;
mod feed_forward;
mod head;
mod image;
mod latent;
mod laurel;
mod mamba2;
mod per_layer_input;
mod recurrence;
mod short_convolution;

pub(crate) use head::{HEAD_PROJECTION, emit_head};
pub(crate) use image::{PATCHES, PLACES, PROJECTION, SECOND_FRAME};

use crate::error::Place;
use crate::program::{Bias, Builder, Factor, Lookup, MatrixId, Op, Rows, Slot, VectorId};
use crate::spec::{
    Attention, HeadKind, LayerSpec, LogitsSpec, ModelSpec, Norm, NormKind, OutputMatrix,
    OutputSpec, PerLayerInputs,
};

/// The slots that layers have in common.
pub(crate) struct Stream<'a> {
    pub(crate) spec: &'a ModelSpec,
    /// The residual stream, `[tokens, hidden]`.
    pub(crate) hidden: Slot,
    /// The table of each rotary embedding.
    pub(crate) rotations: Vec<Slot>,
}

/// Names of the slots of rotation tables; no model has more.
const ROTATIONS: [&str; 8] = [
    "rotations",
    "rotations-1",
    "rotations-2",
    "rotations-3",
    "rotations-4",
    "rotations-5",
    "rotations-6",
    "rotations-7",
];

/// How the names of bounds end that files have beside a matrix.
pub(crate) const INPUT_BOUNDS: [&str; 2] = ["input_min", "input_max"];
pub(crate) const OUTPUT_BOUNDS: [&str; 2] = ["output_min", "output_max"];

/// The whole forward pass; returns where it leaves its output, and what a head takes of every token, if there is one.
pub(crate) fn emit(spec: &ModelSpec, program: &mut Builder) -> (Slot, Option<Slot>) {
    let stream = Stream {
        spec,
        hidden: match spec.patches {
            None => embed(spec, program),
            Some(patches) => image::patches(spec, &patches, program),
        },
        rotations: rotations(spec, 0, program),
    };
    if let Some(learned) = spec.learned_input {
        stream.add_learned(learned, program);
    }
    let inputs = spec
        .per_layer_inputs
        .map(|inputs| (stream.per_layer_inputs(inputs, program), inputs));
    if let Some(altup) = spec.altup {
        stream.begin_streams(altup, program);
    }
    let mut tapped = false;
    for (index, layer) in spec.layers.iter().enumerate() {
        program.enter(Some(index));
        stream.tap_for_head(index, program);
        stream.layer(index, layer, inputs, program);
        stream.add_images(index, program);
        if let OutputSpec::Image(rows) = &spec.output {
            tapped |= stream.tap(index, rows, tapped, program);
        }
    }
    program.enter(None);
    stream.tap_for_head(spec.layers.len(), program);
    match spec.output {
        OutputSpec::Logits(logits) => stream.logits(logits, program),
        OutputSpec::Pooled(pooled) => (stream.pooled(pooled, program), None),
        OutputSpec::Image(rows) => (stream.image_rows(&rows, tapped, program), None),
    }
}

/// `output = norm(input)`, rows of so many elements.
fn norm_rows(
    norm: Norm,
    weight: VectorId,
    [input, output]: [Slot; 2],
    (rows, width): (Rows, usize),
    program: &mut Builder,
) {
    let op = match norm.kind {
        NormKind::Rms | NormKind::Layer => Op::Norm {
            norm,
            weight: Some(weight),
            input,
            output,
            rows,
            groups: 1,
            width,
        },
        NormKind::BiasedLayer => Op::BiasedNorm {
            epsilon: norm.epsilon,
            weight,
            bias: program.bias_of(weight),
            input,
            output,
            rows,
            width,
        },
    };
    program.push(op);
}

fn embed(spec: &ModelSpec, program: &mut Builder) -> Slot {
    program.step("embed");
    let hidden = program.values("hidden", Rows::Tokens, spec.hidden);
    let table = embedding(spec, program);
    program.push(Op::Embed {
        table,
        of: Lookup::Tokens,
        output: hidden,
    });
    scale_embedded(spec, hidden, program);
    if spec.images.is_some() {
        // They are not scaled as tokens' own rows are.
        program.push(Op::PlaceImages {
            hidden,
            width: spec.hidden,
        });
    }
    program.push(Op::CheckFinite {
        values: hidden,
        rows: Rows::Tokens,
        width: spec.hidden,
        place: Place::Embedding,
    });
    hidden
}

/// Rows of the embedding table as the first layer reads them.
fn scale_embedded(spec: &ModelSpec, embedded: Slot, program: &mut Builder) {
    if let Some(factor) = spec.embedding_scale {
        program.push(Op::Scale {
            values: embedded,
            rows: Rows::Tokens,
            width: spec.hidden,
            factor: Factor::Fixed(factor),
        });
    }
}

fn embedding(spec: &ModelSpec, program: &mut Builder) -> MatrixId {
    program.matrix("token_embd", spec.vocabulary, spec.hidden, Bias::IfPresent)
}

/// Tables of the rotations of `spec`, the first of which is number `first` of the model's.
fn rotations(spec: &ModelSpec, first: usize, program: &mut Builder) -> Vec<Slot> {
    let heated = |attention: &Attention| attention.temperature.is_some();
    let temperature = |layer: &LayerSpec| layer.attention.as_ref().is_some_and(heated);
    if spec.ropes.is_empty() && !spec.layers.iter().any(temperature) {
        return Vec::new();
    }
    program.step("rotations");
    let axes = spec.position_axes();
    let positions = program.positions(axes);
    program.push(Op::Positions {
        output: positions,
        axes,
        first: 0,
    });
    let tables = spec.ropes.iter().zip(ROTATIONS).enumerate();
    let emit = tables.map(|(rope, (spec, name))| {
        let output = program.values(name, Rows::Tokens, spec.dimensions);
        program.push(Op::Rotations {
            rope: first + rope,
            positions,
            axes,
            output,
            width: spec.dimensions,
        });
        output
    });
    emit.collect()
}

impl Stream<'_> {
    /// One decoder layer.
    fn layer(
        &self,
        index: usize,
        layer: &LayerSpec,
        inputs: Option<(Slot, PerLayerInputs)>,
        program: &mut Builder,
    ) {
        if let Some(altup) = self.spec.altup {
            self.predict_streams(altup, program);
        }
        let attention = layer.attention.as_ref();
        let attention_input = attention.and_then(|it| self.attention(index, layer, it, program));
        if let (Some(laurel), Some(input)) = (layer.laurel, attention_input) {
            self.laurel(laurel, input, program);
        }
        if let Some(recurrence) = layer.recurrence {
            self.recurrence(index, layer, recurrence, attention_input, program);
        }
        self.feed_forward(layer, attention_input, program);
        if let Some(altup) = self.spec.altup {
            self.correct_streams(altup, program);
        }
        if let Some(inputs) = inputs {
            program.step("per-layer-input");
            let (read, into) = match self.spec.altup {
                None => (self.hidden, vec![self.hidden]),
                Some(altup) => {
                    let read = self.scaled_for_inputs(program);
                    (read, self.other_streams(altup, program))
                }
            };
            self.take_per_layer_input(index, inputs, (read, &into), program);
        }
        if layer.output_scale {
            let factor = program.vector("layer_output_scale", 1);
            program.push(Op::Scale {
                values: self.hidden,
                rows: Rows::Tokens,
                width: self.spec.hidden,
                factor: Factor::Learned(factor),
            });
        }
        program.push(Op::CheckFinite {
            values: self.hidden,
            rows: Rows::Tokens,
            width: self.spec.hidden,
            place: Place::Layer(index),
        });
    }

    /// `output = W input` for each of `outputs`, all of it held between bounds where the model has them.
    pub(crate) fn layer_product(
        &self,
        input: Slot,
        blocks: &'static str,
        columns: usize,
        outputs: Vec<(MatrixId, Slot)>,
        program: &mut Builder,
    ) {
        if !self.spec.bounded {
            return program.product(input, blocks, Rows::Tokens, columns, outputs);
        }
        for (matrix, output) in outputs {
            // Others may read the same input, between bounds of their own.
            let held = program.values("bounded-input", Rows::Tokens, columns);
            let bounds = program.bounds_of(matrix, INPUT_BOUNDS);
            program.push(Op::Clamp {
                from: input,
                to: held,
                bounds,
                width: columns,
            });
            program.product(held, blocks, Rows::Tokens, columns, vec![(matrix, output)]);
            let bounds = program.bounds_of(matrix, OUTPUT_BOUNDS);
            program.push(Op::Clamp {
                from: output,
                to: output,
                bounds,
                width: program.rows_of(matrix),
            });
        }
    }

    /// The residual stream takes up what a part of a layer has computed, so many times.
    pub(crate) fn add(&self, factor: Option<f32>, from: Slot, program: &mut Builder) {
        program.push(Op::Add {
            to: self.hidden,
            from,
            factor,
            rows: Rows::Tokens,
            width: self.spec.hidden,
        });
    }

    /// `to += from`, rows of the residual stream's width.
    pub(crate) fn sum(&self, to: Slot, from: Slot, rows: Rows, program: &mut Builder) {
        program.push(Op::Add {
            to,
            from,
            factor: None,
            rows,
            width: self.spec.hidden,
        });
    }

    /// `output = norm(input)`, rows of the residual stream's width.
    pub(crate) fn norm(
        &self,
        weight: VectorId,
        input: Slot,
        output: Slot,
        rows: Rows,
        program: &mut Builder,
    ) {
        let rows = (rows, self.spec.hidden);
        self.norm_rows(weight, [input, output], rows, program);
    }

    /// The same of rows of any width.
    fn norm_rows(
        &self,
        weight: VectorId,
        [input, output]: [Slot; 2],
        rows: (Rows, usize),
        program: &mut Builder,
    ) {
        norm_rows(self.spec.norm, weight, [input, output], rows, program);
    }

    /// Rows that are asked for, normed and multiplied with the output matrix, and what a head reads of all rows, where there is
    /// one.
    fn logits(&self, output: LogitsSpec, program: &mut Builder) -> (Slot, Option<Slot>) {
        let spec = self.spec;
        match spec.head.as_ref().map(|head| &head.kind) {
            Some(HeadKind::Mtp | HeadKind::Assistant(_)) => {
                return self.logits_of_features(output, program);
            }
            Some(HeadKind::Eagle3(eagle)) => {
                let features = self.features_of_taps(eagle, program);
                return (
                    self.plain_logits(output, &[features], program),
                    Some(features),
                );
            }
            None => {}
        }
        (self.plain_logits(output, &[], program), None)
    }

    /// All rows are normed, since a head reads them.
    fn logits_of_features(
        &self,
        output: LogitsSpec,
        program: &mut Builder,
    ) -> (Slot, Option<Slot>) {
        let spec = self.spec;
        program.step("features");
        let features = program.values("features", Rows::Tokens, spec.hidden);
        let weight = program.vector("output_norm", spec.hidden);
        self.norm(weight, self.hidden, features, Rows::Tokens, program);
        program.step("choose");
        let chosen = self.choose(features, program);
        program.step("logits");
        let logits = self.output(chosen, output, program);
        self.leave(&[logits, features], program);
        (logits, Some(features))
    }

    /// The rows that are asked for are normed alone. Leaves `beside` as well.
    fn plain_logits(&self, output: LogitsSpec, beside: &[Slot], program: &mut Builder) -> Slot {
        let spec = self.spec;
        program.step("choose");
        let chosen = self.choose(self.hidden, program);
        if let Some(altup) = spec.altup {
            self.merge_streams(altup, chosen, program);
        }
        program.step("logits");
        let weight = program.vector("output_norm", spec.hidden);
        self.norm(weight, chosen, chosen, Rows::Logits, program);
        let logits = self.output(chosen, output, program);
        self.leave(&[&[logits], beside].concat(), program);
        logits
    }

    /// The rows that are asked for, of those of every token.
    fn choose(&self, from: Slot, program: &mut Builder) -> Slot {
        let width = self.spec.hidden;
        let chosen = program.values("chosen", Rows::Logits, width);
        program.push(Op::Choose {
            from,
            to: chosen,
            width,
        });
        chosen
    }

    /// What the caller reads when the pass has ended.
    fn leave(&self, outputs: &[Slot], program: &mut Builder) {
        program.step("return");
        for &output in outputs {
            program.push(Op::Return { output });
        }
    }

    /// Products of normed rows with the output matrix. Goes on with the step begun last.
    fn output(&self, chosen: Slot, output: LogitsSpec, program: &mut Builder) -> Slot {
        let spec = self.spec;
        let matrix = match output.matrix {
            OutputMatrix::Tied => embedding(spec, program),
            OutputMatrix::Untied => {
                program.matrix("output", spec.vocabulary, spec.hidden, Bias::IfPresent)
            }
        };
        let count = spec.vocabulary;
        let logits = self.product_logits((matrix, count), chosen, program);
        if let Some(factor) = output.scale {
            program.push(Op::Scale {
                values: logits,
                rows: Rows::Logits,
                width: count,
                factor: Factor::Fixed(factor),
            });
        }
        if let Some(cap) = output.soft_cap {
            program.push(Op::SoftCap {
                values: logits,
                rows: Rows::Logits,
                width: count,
                cap,
            });
        }
        check_logits(logits, count, program);
        logits
    }

    /// The same with a matrix of so many rows, whose products are logits as they are.
    fn own_output(
        &self,
        (matrix, count): (MatrixId, usize),
        chosen: Slot,
        program: &mut Builder,
    ) -> Slot {
        let logits = self.product_logits((matrix, count), chosen, program);
        check_logits(logits, count, program);
        logits
    }

    fn product_logits(
        &self,
        (matrix, count): (MatrixId, usize),
        chosen: Slot,
        program: &mut Builder,
    ) -> Slot {
        let logits = program.values("logits", Rows::Logits, count);
        let (outputs, width) = (vec![(matrix, logits)], self.spec.hidden);
        program.product(chosen, "chosen-blocks", Rows::Logits, width, outputs);
        logits
    }
}

fn check_logits(logits: Slot, count: usize, program: &mut Builder) {
    program.push(Op::CheckFinite {
        values: logits,
        rows: Rows::Logits,
        width: count,
        place: Place::Logits,
    });
}
