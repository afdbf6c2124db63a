//! What encoders of images have and those of texts do not: patches in the beginning, and rows for a decoder in the
//! end; and what decoders have of those rows.

use super::{Stream, norm_rows};
use crate::error::Place;
use crate::program::{Bias, Builder, Factor, Lookup, Merging, Op, Places, Rows, Slot, VectorForm};
use crate::spec::{
    Activation, Frames, ImageRows, LearnedPlaces, Merge, ModelSpec, Norm, NormKind, Patches,
};

/// The part that makes rows of a decoder's width, whose matrix files have the other way round.
pub(crate) const PROJECTION: &str = "mm.input_projection";

/// The part that makes rows of a decoder's width of joined rows of patches.
const JOINED_PROJECTION: &str = "mm.model.fc";

/// The same where files have it as they have other matrices.
const POOLED_PROJECTION: &str = "mm.pooled_projection";

/// What is learned of places.
pub(crate) const PLACES: &str = "position_embd";

/// The part that makes rows of patches.
pub(crate) const PATCHES: &str = "patch_embd";
/// The same of a second frame, as GGUF has it.
pub(crate) const SECOND_FRAME: &str = "patch_embd.weight.1";

/// `hidden = W patch + b + what is learned of its place`
pub(super) fn patches(spec: &ModelSpec, patches: &Patches, program: &mut Builder) -> Slot {
    let hidden_size = spec.hidden;
    program.step("patches");
    let pixels = program.values("patches", Rows::Tokens, patches.elements());
    program.push(Op::Patches {
        patches: *patches,
        output: pixels,
    });
    let hidden = program.values("hidden", Rows::Tokens, hidden_size);
    let columns = patches.elements();
    let matrix = program.matrix(PATCHES, hidden_size, columns, Bias::IfPresent);
    let mut outputs = vec![(matrix, hidden)];
    let second = (patches.frames == Frames::TwoApart).then(|| {
        let second = program.values("second-frame", Rows::Tokens, hidden_size);
        let matrix = program.matrix(SECOND_FRAME, hidden_size, columns, Bias::IfPresent);
        outputs.push((matrix, second));
        second
    });
    program.product(pixels, "patch-blocks", Rows::Tokens, columns, outputs);
    if let Some(second) = second {
        add(second, hidden, hidden_size, program);
    }
    match patches.places {
        LearnedPlaces::None => {}
        LearnedPlaces::Each => {
            program.step("learned-input");
            let positions = program.positions(1);
            program.push(Op::Positions {
                output: positions,
                axes: 1,
                first: 0,
            });
            let rows = program.values("learned-rows", Rows::Tokens, hidden_size);
            let count = patches.most();
            let table = program.matrix(PLACES, count, hidden_size, Bias::IfPresent);
            program.push(Op::Embed {
                table,
                of: Lookup::Positions(positions),
                output: rows,
            });
            add(rows, hidden, hidden_size, program);
        }
        LearnedPlaces::Between { per_side } => {
            let of = (Places::Near { per_side }, per_side * per_side);
            add_places(of, hidden, hidden_size, program);
        }
        LearnedPlaces::Axes { each } => {
            add_places(
                (Places::Axes { each }, 2 * each),
                hidden,
                hidden_size,
                program,
            );
        }
    }
    if patches.normed {
        let weight = program.vector("pre_ln", hidden_size);
        let size = (Rows::Tokens, hidden_size);
        norm_rows(spec.norm, weight, [hidden; 2], size, program);
    }
    program.push(Op::CheckFinite {
        values: hidden,
        rows: Rows::Tokens,
        width: hidden_size,
        place: Place::Embedding,
    });
    hidden
}

/// Adds to `hidden` what rows of a table of so many say of `places`.
fn add_places((places, count): (Places, usize), hidden: Slot, width: usize, program: &mut Builder) {
    program.step("learned-input");
    let rows = program.values("learned-rows", Rows::Tokens, width);
    let table = program.matrix(PLACES, count, width, Bias::IfPresent);
    program.push(Op::AddPlaces {
        table,
        places,
        rows,
        hidden,
        width,
    });
}

/// `hidden += from`
fn add(from: Slot, hidden: Slot, width: usize, program: &mut Builder) {
    program.push(Op::Add {
        to: hidden,
        from,
        factor: None,
        rows: Rows::Tokens,
        width,
    });
}

/// How the parts of a merger are called.
struct MergerNames {
    norm: &'static str,
    first: &'static str,
    second: &'static str,
}

/// Those of what takes tokens' places.
const MERGER: MergerNames = MergerNames {
    norm: "output_norm",
    first: "mm.0",
    second: "mm.2",
};

/// Those of further parts.
const DEEPSTACK: MergerNames = MergerNames {
    norm: "deepstack.norm",
    first: "deepstack.fc1",
    second: "deepstack.fc2",
};

impl Stream<'_> {
    /// Adds a part of rows of images to what the decoder's layer has made of the tokens that stand for them, if it is for
    /// that.
    pub(super) fn add_images(&self, layer: usize, program: &mut Builder) {
        let parts = self.spec.images.map_or(0, |images| images.deepstack);
        if layer < parts {
            program.push(Op::AddImages {
                hidden: self.hidden,
                width: self.spec.hidden,
                part: layer + 1,
            });
        }
    }

    /// Makes what the encoder's layer has made of patches a part of the rows of the image, if it is for that. Returns
    /// whether it is.
    pub(super) fn tap(
        &self,
        layer: usize,
        rows: &ImageRows,
        beside: bool,
        program: &mut Builder,
    ) -> bool {
        let taps = rows.deepstack.iter().flatten().enumerate();
        let mut found = taps.filter(|(_, tap)| tap.layer == layer);
        let Some((index, tap)) = found.next() else {
            return false;
        };
        program.enter(Some(tap.number));
        program.step("deepstack");
        let width = self.spec.hidden * rows.merged * rows.merged;
        let normed = program.values("deepstack-input", Rows::Logits, width);
        let weight = program.vector(DEEPSTACK.norm, width);
        self.norm_rows(
            weight,
            [self.hidden, normed],
            (Rows::Logits, width),
            program,
        );
        let part = self.merged(normed, rows, &DEEPSTACK, program);
        self.order(part, rows, (index + 1, beside), program);
        true
    }

    /// The rows of a decoder's width that stand for the image. `beside` says whether some parts of them are there.
    pub(super) fn image_rows(&self, rows: &ImageRows, beside: bool, program: &mut Builder) -> Slot {
        let hidden = self.spec.hidden;
        program.step("merge");
        if !matches!(rows.merge, Merge::Apart { .. } | Merge::Pooled { .. }) {
            let weight = program.vector(MERGER.norm, hidden);
            self.norm(weight, self.hidden, self.hidden, Rows::Tokens, program);
        }
        let output = match rows.merge {
            Merge::Mean { norm_epsilon } => self.mean_rows(rows, norm_epsilon, program),
            Merge::Pooled {
                standardized,
                norm_epsilon,
            } => self.pooled_rows(rows, standardized, norm_epsilon, program),
            Merge::Joined => self.joined_rows(rows, program),
            Merge::Apart { reduced } => self.apart_rows(rows, reduced, program),
            Merge::SideBySide => {
                let part = self.merged(self.hidden, rows, &MERGER, program);
                self.order(part, rows, (0, beside), program)
            }
        };
        program.push(Op::CheckFinite {
            values: output,
            rows: Rows::Logits,
            width: rows.row_width(),
            place: Place::Pooled,
        });
        program.step("return");
        program.push(Op::Return { output });
        output
    }

    /// `W_2 gelu(W_1 x)` of the rows of each square side by side, which is how `input` has them.
    fn merged(
        &self,
        input: Slot,
        rows: &ImageRows,
        names: &MergerNames,
        program: &mut Builder,
    ) -> Slot {
        let columns = self.spec.hidden * rows.merged * rows.merged;
        let inner = program.values("merged", Rows::Logits, columns);
        let matrix = program.matrix(names.first, columns, columns, Bias::IfPresent);
        let (gelu, outputs) = (Some(Activation::GeluErf), vec![(matrix, inner)]);
        let size = (Rows::Logits, columns);
        program.product_then(gelu, input, "merger-blocks", size, outputs);
        program.step("project-image");
        let part = program.values("image-part", Rows::Logits, rows.width);
        let matrix = program.matrix(names.second, rows.width, columns, Bias::IfPresent);
        let outputs = vec![(matrix, part)];
        program.product(inner, "merged-blocks", Rows::Logits, columns, outputs);
        part
    }

    /// Puts a part of the image's rows where it belongs.
    fn order(
        &self,
        from: Slot,
        rows: &ImageRows,
        (part, beside): (usize, bool),
        program: &mut Builder,
    ) -> Slot {
        let output = program.values("image-rows", Rows::Logits, rows.row_width());
        program.push(Op::OrderSquares {
            from,
            to: output,
            part,
            parts: rows.parts(),
            beside,
            width: rows.width,
        });
        output
    }

    /// Products of the rows of squares side by side.
    fn joined_rows(&self, rows: &ImageRows, program: &mut Builder) -> Slot {
        let columns = self.spec.hidden * rows.merged * rows.merged;
        let merged = program.values("merged", Rows::Logits, columns);
        program.push(Op::MergePatches {
            from: self.hidden,
            to: merged,
            merged: rows.merged,
            merging: Merging::Joined,
            width: self.spec.hidden,
        });
        program.step("project-image");
        let output = program.values("image-rows", Rows::Logits, rows.width);
        let matrix = program.matrix(JOINED_PROJECTION, rows.width, columns, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        program.product(merged, "merged-blocks", Rows::Logits, columns, outputs);
        output
    }

    /// Products of patches, or of what becomes of their squares.
    fn apart_rows(&self, rows: &ImageRows, reduced: Option<f32>, program: &mut Builder) -> Slot {
        let hidden = self.spec.hidden;
        let input = match reduced {
            Some(epsilon) => self.reduced_rows(rows, epsilon, program),
            None => self.hidden,
        };
        program.step("project-image");
        let inner = program.values("projected", Rows::Logits, rows.width);
        let matrix = program.matrix("mm.1", rows.width, hidden, Bias::IfPresent);
        let (gelu, outputs) = (Some(Activation::GeluErf), vec![(matrix, inner)]);
        let size = (Rows::Logits, hidden);
        program.product_then(gelu, input, "merger-blocks", size, outputs);
        let output = program.values("image-rows", Rows::Logits, rows.width);
        let matrix = program.matrix("mm.2", rows.width, rows.width, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        program.product(inner, "projected-blocks", Rows::Logits, rows.width, outputs);
        output
    }

    /// Squares of normed patches, each as one as wide as they are.
    fn reduced_rows(&self, rows: &ImageRows, epsilon: f32, program: &mut Builder) -> Slot {
        let hidden = self.spec.hidden;
        let norm = Norm {
            kind: NormKind::Rms,
            epsilon,
        };
        let weight = program.vector("mm.input_norm", hidden);
        let size = (Rows::Tokens, hidden);
        norm_rows(norm, weight, [self.hidden; 2], size, program);
        let columns = hidden * rows.merged * rows.merged;
        let merged = program.values("merged", Rows::Logits, columns);
        program.push(Op::MergePatches {
            from: self.hidden,
            to: merged,
            merged: rows.merged,
            merging: Merging::Unfolded,
            width: hidden,
        });
        let reduced = program.values("reduced", Rows::Logits, hidden);
        let matrix = program.matrix("mm.patch_merger", hidden, columns, Bias::IfPresent);
        let outputs = vec![(matrix, reduced)];
        program.product(merged, "merged-blocks", Rows::Logits, columns, outputs);
        reduced
    }

    /// Products of means of squares, which are made longer, perhaps standardized, and normed without weights.
    fn pooled_rows(
        &self,
        rows: &ImageRows,
        standardized: bool,
        norm_epsilon: f32,
        program: &mut Builder,
    ) -> Slot {
        let hidden = self.spec.hidden;
        let merged = program.values("merged", Rows::Logits, hidden);
        program.push(Op::MergePatches {
            from: self.hidden,
            to: merged,
            merged: rows.merged,
            merging: Merging::Mean,
            width: hidden,
        });
        program.push(Op::Scale {
            values: merged,
            rows: Rows::Logits,
            width: hidden,
            factor: Factor::Fixed((hidden as f32).sqrt()),
        });
        if standardized {
            let shifts = program.vector("std_bias", hidden);
            let factors = program.vector("std_scale", hidden);
            program.push(Op::Standardize {
                values: merged,
                shifts,
                factors,
                rows: Rows::Logits,
                width: hidden,
            });
        }
        program.push(Op::Norm {
            norm: Norm {
                kind: NormKind::Rms,
                epsilon: norm_epsilon,
            },
            weight: None,
            input: merged,
            output: merged,
            rows: Rows::Logits,
            groups: 1,
            width: hidden,
        });
        program.step("project-image");
        let output = program.values("image-rows", Rows::Logits, rows.width);
        let matrix = program.matrix(POOLED_PROJECTION, rows.width, hidden, Bias::IfPresent);
        let outputs = vec![(matrix, output)];
        program.product(merged, "merged-blocks", Rows::Logits, hidden, outputs);
        output
    }

    /// Products of means of squares.
    fn mean_rows(&self, rows: &ImageRows, norm_epsilon: f32, program: &mut Builder) -> Slot {
        let hidden = self.spec.hidden;
        let merged = program.values("merged", Rows::Logits, hidden);
        program.push(Op::MergePatches {
            from: self.hidden,
            to: merged,
            merged: rows.merged,
            merging: Merging::Mean,
            width: hidden,
        });
        let name = ("mm.soft_emb_norm", "weight");
        let weight = program.vector_in(name, hidden, VectorForm::LessOne);
        program.push(Op::Norm {
            norm: Norm {
                kind: NormKind::Rms,
                epsilon: norm_epsilon,
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
        output
    }
}
