//! What encoders of images have and those of texts do not: patches in the beginning, and rows for a decoder in the
//! end.

use super::Stream;
use crate::error::Place;
use crate::program::{Bias, Builder, Lookup, Op, Rows, Slot, VectorForm};
use crate::spec::{ImageRows, ModelSpec, Norm, NormKind, Patches};

/// The part that makes rows of a decoder's width, whose matrix files have the other way round.
pub(crate) const PROJECTION: &str = "mm.input_projection";

/// The part that makes rows of patches.
pub(crate) const PATCHES: &str = "patch_embd";

/// `hidden = W patch + b + the row of its place`
pub(super) fn patches(spec: &ModelSpec, patches: Patches, program: &mut Builder) -> Slot {
    let hidden_size = spec.hidden;
    program.step("patches");
    let pixels = program.values("patches", Rows::Tokens, patches.elements());
    program.push(Op::Patches {
        patches,
        output: pixels,
    });
    let hidden = program.values("hidden", Rows::Tokens, hidden_size);
    let matrix = program.matrix(PATCHES, hidden_size, patches.elements(), Bias::Required);
    let outputs = vec![(matrix, hidden)];
    let columns = patches.elements();
    program.product(pixels, "patch-blocks", Rows::Tokens, columns, outputs);
    program.step("learned-input");
    let positions = program.positions();
    program.push(Op::Positions {
        output: positions,
        first: 0,
    });
    let rows = program.values("learned-rows", Rows::Tokens, hidden_size);
    let count = patches.most();
    let table = program.matrix("position_embd", count, hidden_size, Bias::IfPresent);
    program.push(Op::Embed {
        table,
        of: Lookup::Positions(positions),
        output: rows,
    });
    program.push(Op::Add {
        to: hidden,
        from: rows,
        factor: None,
        rows: Rows::Tokens,
        width: hidden_size,
    });
    program.push(Op::CheckFinite {
        values: hidden,
        rows: Rows::Tokens,
        width: hidden_size,
        place: Place::Embedding,
    });
    hidden
}

impl Stream<'_> {
    /// The rows of a decoder's width that stand for the image.
    pub(super) fn image_rows(&self, rows: ImageRows, program: &mut Builder) -> Slot {
        let hidden = self.spec.hidden;
        program.step("merge");
        let weight = program.vector("output_norm", hidden);
        self.norm(weight, self.hidden, self.hidden, Rows::Tokens, program);
        let merged = program.values("merged", Rows::Logits, hidden);
        program.push(Op::MergePatches {
            from: self.hidden,
            to: merged,
            merged: rows.merged,
            width: hidden,
        });
        let name = ("mm.soft_emb_norm", "weight");
        let weight = program.vector_in(name, hidden, VectorForm::LessOne);
        program.push(Op::Norm {
            norm: Norm {
                kind: NormKind::Rms,
                epsilon: rows.norm_epsilon,
            },
            weight: Some(weight),
            input: merged,
            output: merged,
            rows: Rows::Logits,
            groups: 1,
            width: hidden,
        });
        program.step("project-image");
        let output = program.values("image-rows", Rows::Logits, rows.width);
        let matrix = program.matrix(PROJECTION, rows.width, hidden, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        program.product(merged, "merged-blocks", Rows::Logits, hidden, outputs);
        program.push(Op::CheckFinite {
            values: output,
            rows: Rows::Logits,
            width: rows.width,
            place: Place::Pooled,
        });
        program.step("return");
        program.push(Op::Return { output });
        output
    }
}
