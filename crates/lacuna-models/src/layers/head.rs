//! The head that guesses tokens (multi-token prediction): one more layer over what the model has made of a token and the
//! token that comes next.
//!
//! ```text
//! x      = W_eh [norm(embedding of token j); norm(features of token j - 1)]
//! hidden = layer(x)                          attention over rows of its own
//! logits = W_output features,  features = norm(hidden)     the token after j
//! ```
//!
//! Features of tokens that are there are the model's, its last layer's normed; behind a guess they are the head's own. The
//! embedding table and the output matrix are the model's.

use lacuna_kernels::HeadRows;

use super::{Stream, embedding, rotations};
use crate::program::{Bias, Builder, Lookup, Op, Rows, Slot};
use crate::spec::{LayerSpec, LogitsSpec, ModelSpec};

/// The matrix that files of a model with a head have.
pub(crate) const HEAD_PROJECTION: &str = "nextn.eh_proj";

/// A pass of the head of `spec`, whose layer is `layer`; returns where it leaves logits and features.
pub(crate) fn emit_head(
    spec: &ModelSpec,
    layer: &LayerSpec,
    output: LogitsSpec,
    program: &mut Builder,
) -> [Slot; 2] {
    let width = spec.hidden;
    program.step("embed");
    let embedded = program.values("embedded", Rows::Tokens, width);
    let table = embedding(spec, program);
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
    let stream = Stream {
        spec,
        hidden: program.values("hidden", Rows::Tokens, width),
        rotations: rotations(spec, program),
    };
    // Tensors are numbered on behind the layers; the rows are those of a cache with this layer alone.
    program.enter(Some(spec.layers.len()));
    program.step("join");
    let joined = program.values("joined", Rows::Tokens, 2 * width);
    for (slot, part) in [(embedded, "nextn.enorm"), (features, "nextn.hnorm")] {
        let weight = program.vector(part, width);
        stream.norm(weight, slot, slot, Rows::Tokens, program);
    }
    let own = HeadRows::by_token(width, 0);
    let halves = [0, width].map(|start| HeadRows::by_token(2 * width, start));
    program.columns((embedded, own), (joined, halves[0]), 1, width);
    program.columns_beside((features, own), (joined, halves[1]), 1, width);
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
