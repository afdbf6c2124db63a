//! Heads that guess tokens: a layer or a few over what the model has made of a token and the token that comes next.
//!
//! ```text
//! multi-token prediction
//! x        = W_eh [norm(embedding of token j); norm(features of token j - 1)]
//! hidden   = layer(x)                        attention over rows of its own
//! logits   = W_output features               the token after j
//! features = norm(hidden)
//!
//! EAGLE-3
//! features = W_fc [inputs of three of the model's layers]
//! x        = [norm(embedding of token j); norm(features of token j - 1)]
//! hidden   = features + attention(x)         then as in any layer
//! logits   = W_output norm(hidden)           the token after j, among those that it can guess
//! features = hidden                          behind a guess
//!
//! assistant (Gemma 4)
//! hidden   = W_pre [embedding of token j; features of token j - 1]
//! hidden   = layers(hidden)                  attention over rows of the model, of the tokens before j
//! logits   = W_output norm(hidden)           the token after j
//! features = W_post norm(hidden)             behind a guess, for which j stays as it is
//! ```
//!
//! Features of tokens that are there are the model's; behind a guess they are the head's own. The embedding table is the model's, where
//! an EAGLE-3 head has none of its own, and so is the output matrix, which assistants have themselves.

use lacuna_kernels::HeadRows;

use super::{Stream, embedding, norm_rows, rotations, scale_embedded};
use crate::program::{Bias, Builder, Lookup, MatrixId, Op, Rows, Slot};
use crate::spec::{
    Assistant, Eagle3, HeadKind, HeadResidual, HeadSpec, LayerSpec, LogitsSpec, ModelSpec, TapNorm,
};

/// The matrix that files of a model with a head of its own have.
pub(crate) const HEAD_PROJECTION: &str = "nextn.eh_proj";

/// Names of the norms of taps, each by itself.
const TAP_NORMS: [&str; Eagle3::MOST_TAPS] = [
    "fc_norm.0",
    "fc_norm.1",
    "fc_norm.2",
    "fc_norm.3",
    "fc_norm.4",
    "fc_norm.5",
    "fc_norm.6",
    "fc_norm.7",
];

/// A pass of the head of `spec`; returns where it leaves logits and features.
pub(crate) fn emit_head(
    spec: &ModelSpec,
    head: &HeadSpec,
    output: LogitsSpec,
    program: &mut Builder,
) -> [Slot; 2] {
    match (&head.kind, head.layers.as_slice()) {
        (HeadKind::Mtp, [layer, ..]) => emit_mtp(spec, layer, output, program),
        (HeadKind::Eagle3(eagle), [layer, ..]) => {
            emit_eagle3(spec, (layer, eagle), output, program)
        }
        (HeadKind::Assistant(own), layers) => emit_assistant(spec, (layers, own), program),
        (_, []) => unreachable!("a head has layers"),
    }
}

impl Stream<'_> {
    /// Keeps what layer `layer` begins with, where a head reads it.
    pub(super) fn tap_for_head(&self, layer: usize, program: &mut Builder) {
        let eagle = self.spec.head.as_ref().and_then(HeadSpec::eagle3);
        let Some(Eagle3 { taps, .. }) = eagle else {
            return;
        };
        let width = self.spec.hidden;
        let all = taps.len() * width;
        for (place, tap) in taps.iter().enumerate() {
            if *tap != layer {
                continue;
            }
            program.step("tap");
            let slot = program.values("taps", Rows::Tokens, all);
            let from = (self.hidden, HeadRows::by_token(width, 0));
            let to = (slot, HeadRows::by_token(all, place * width));
            // Taps come in whatever order; the first to be written is that of the first layer.
            let is_first = taps
                .iter()
                .enumerate()
                .all(|(other, at)| (at, other) >= (tap, place));
            match is_first {
                true => program.columns(from, to, 1, width),
                false => program.columns_beside(from, to, 1, width),
            }
        }
    }

    /// What an EAGLE-3 head reads of each token: taps, brought to the model's width.
    pub(super) fn features_of_taps(&self, eagle: &Eagle3, program: &mut Builder) -> Slot {
        let width = self.spec.hidden;
        let all = eagle.taps.len() * width;
        program.step("features");
        let taps = program.values("taps", Rows::Tokens, all);
        let features = program.values("features", Rows::Tokens, width);
        // Tensors are numbered on behind the layers; the step is of none.
        program.enter(Some(self.spec.layers.len()));
        match eagle.tap_norm {
            TapNorm::None => {}
            TapNorm::Whole => {
                let weight = program.vector("input_norm", all);
                let rows = (Rows::Tokens, all);
                norm_rows(eagle.norm, weight, [taps, taps], rows, program);
            }
            TapNorm::Each => {
                let own = HeadRows::by_token(width, 0);
                let one = program.values("tap", Rows::Tokens, width);
                for (place, name) in TAP_NORMS.iter().take(eagle.taps.len()).enumerate() {
                    let weight = program.vector(name, width);
                    let of_tap = (taps, HeadRows::by_token(all, place * width));
                    program.columns(of_tap, (one, own), 1, width);
                    let rows = (Rows::Tokens, width);
                    norm_rows(eagle.norm, weight, [one, one], rows, program);
                    program.columns_beside((one, own), of_tap, 1, width);
                }
            }
        }
        let matrix = program.matrix("fc", width, all, Bias::IfPresent);
        program.enter(None);
        let outputs = vec![(matrix, features)];
        program.product(taps, "tap-blocks", Rows::Tokens, all, outputs);
        features
    }
}

/// What a head reads of each token: its row of `table`, and the features of the token before it, of `width` elements each.
fn read(table: MatrixId, width: usize, program: &mut Builder) -> [Slot; 2] {
    let embedded = program.values("embedded", Rows::Tokens, width);
    program.push(Op::Embed {
        table,
        of: Lookup::Tokens,
        output: embedded,
    });
    let features = program.values("given-features", Rows::Tokens, width);
    program.push(Op::TakeFeatures {
        output: features,
        width,
    });
    [embedded, features]
}

/// Both side by side.
fn join([embedded, features]: [Slot; 2], width: usize, program: &mut Builder) -> Slot {
    let joined = program.values("joined", Rows::Tokens, 2 * width);
    let own = HeadRows::by_token(width, 0);
    let halves = [0, width].map(|start| HeadRows::by_token(2 * width, start));
    program.columns((embedded, own), (joined, halves[0]), 1, width);
    program.columns_beside((features, own), (joined, halves[1]), 1, width);
    joined
}

fn emit_eagle3(
    model: &ModelSpec,
    (layer, eagle): (&LayerSpec, &Eagle3),
    output: LogitsSpec,
    program: &mut Builder,
) -> [Slot; 2] {
    let (Some(spec), Some(attention)) = (model.of_head(), &layer.attention) else {
        unreachable!("it has the head that is emitted, which attends")
    };
    let (spec, width, number) = (&spec, model.hidden, Some(model.layers.len()));
    program.step("embed");
    program.enter(number.filter(|_| eagle.own_embedding));
    let table = embedding(spec, program);
    program.enter(None);
    let [embedded, given] = read(table, width, program);
    let rotations = rotations(spec, model.head_rope(), program);
    program.enter(number);
    program.step("join");
    let normed = program.values("normed-features", Rows::Tokens, width);
    let stream = Stream {
        spec,
        hidden: match eagle.residual {
            HeadResidual::Features => given,
            HeadResidual::Normed => normed,
        },
        rotations,
    };
    let weights = ["attn_norm", "attn_norm_2"].map(|part| program.vector(part, width));
    stream.norm(weights[0], embedded, embedded, Rows::Tokens, program);
    stream.norm(weights[1], given, normed, Rows::Tokens, program);
    let joined = join([embedded, normed], width, program);
    stream.attention_of((0, layer), attention, (joined, 2 * width), program);
    stream.feed_forward(layer, None, program);
    program.step("choose");
    let chosen = stream.choose(stream.hidden, program);
    program.step("features");
    let rows = program.values("normed-chosen", Rows::Logits, width);
    let weight = program.vector("output_norm", width);
    stream.norm(weight, chosen, rows, Rows::Logits, program);
    let features = match eagle.normed_features {
        true => rows,
        false => chosen,
    };
    program.step("logits");
    let logits = match eagle.own_outputs {
        Some(count) => {
            let count = count.get();
            let matrix = program.matrix("output", count, width, Bias::IfPresent);
            stream.own_output((matrix, count), rows, program)
        }
        None => {
            program.enter(None);
            stream.output(rows, output, program)
        }
    };
    program.enter(None);
    stream.leave(&[logits, features], program);
    [logits, features]
}

fn emit_assistant(
    model: &ModelSpec,
    (layers, own): (&[LayerSpec], &Assistant),
    program: &mut Builder,
) -> [Slot; 2] {
    let Some(spec) = model.of_head() else {
        unreachable!("it has the head that is emitted")
    };
    let (spec, width, first) = (&spec, model.hidden, model.layers.len());
    program.step("embed");
    let table = embedding(model, program);
    let [embedded, given] = read(table, width, program);
    scale_embedded(model, embedded, program);
    let stream = Stream {
        spec,
        hidden: program.values("hidden", Rows::Tokens, own.hidden),
        rotations: rotations(spec, model.head_rope(), program),
    };
    program.enter(Some(first));
    program.step("join");
    let joined = join([embedded, given], width, program);
    let matrix = program.matrix("pre_projection", own.hidden, 2 * width, Bias::IfPresent);
    let outputs = vec![(matrix, stream.hidden)];
    program.product(joined, "joined-blocks", Rows::Tokens, 2 * width, outputs);
    for (index, layer) in layers.iter().enumerate() {
        program.enter(Some(first + index));
        let Some(source) = layer.attention.as_ref().and_then(|it| it.shares) else {
            unreachable!("an assistant reads rows of the model")
        };
        stream.layer(source, layer, None, program);
    }
    program.enter(Some(first));
    program.step("choose");
    let chosen = stream.choose(stream.hidden, program);
    program.step("features");
    let weight = program.vector("output_norm", own.hidden);
    stream.norm(weight, chosen, chosen, Rows::Logits, program);
    let features = program.values("features", Rows::Logits, width);
    let matrix = program.matrix("post_projection", width, own.hidden, Bias::IfPresent);
    let outputs = vec![(matrix, features)];
    program.product(chosen, "chosen-blocks", Rows::Logits, own.hidden, outputs);
    program.step("logits");
    let count = spec.vocabulary;
    let matrix = program.matrix("token_embd", count, own.hidden, Bias::IfPresent);
    let logits = stream.own_output((matrix, count), chosen, program);
    program.enter(None);
    stream.leave(&[logits, features], program);
    [logits, features]
}

fn emit_mtp(
    spec: &ModelSpec,
    layer: &LayerSpec,
    output: LogitsSpec,
    program: &mut Builder,
) -> [Slot; 2] {
    let width = spec.hidden;
    program.step("embed");
    let table = embedding(spec, program);
    let [embedded, features] = read(table, width, program);
    let stream = Stream {
        spec,
        hidden: program.values("hidden", Rows::Tokens, width),
        rotations: rotations(spec, 0, program),
    };
    // Tensors are numbered on behind the layers; the rows are those of a cache with this layer alone.
    program.enter(Some(spec.layers.len()));
    program.step("join");
    for (slot, part) in [(embedded, "nextn.enorm"), (features, "nextn.hnorm")] {
        let weight = program.vector(part, width);
        stream.norm(weight, slot, slot, Rows::Tokens, program);
    }
    let joined = join([embedded, features], width, program);
    let matrix = program.matrix(HEAD_PROJECTION, width, 2 * width, Bias::IfPresent);
    let outputs = vec![(matrix, stream.hidden)];
    program.product(joined, "joined-blocks", Rows::Tokens, 2 * width, outputs);
    stream.layer(0, layer, None, program);
    program.step("choose");
    let chosen = stream.choose(stream.hidden, program);
    program.step("features");
    let weight = program.vector("nextn.shared_head_norm", width);
    stream.norm(weight, chosen, chosen, Rows::Logits, program);
    program.enter(None);
    program.step("logits");
    let logits = stream.output(chosen, output, program);
    stream.leave(&[logits, chosen], program);
    [logits, chosen]
}
