//! Images: their patches as rows, squares of patches as one row, and rows of images in the places of tokens.

use super::{OF_ANOTHER_KIND, OF_PATCHES, Pass, first};
use crate::executor::image::{ImageBatch, join, merge, unfold};
use crate::executor::{Batch, Segment};
use crate::program::{MatrixId, Merging, Op, Places, Slot};
use crate::spec::Patches;

impl Pass<'_, '_> {
    /// Runs an operation of images.
    pub(super) fn image_op(&mut self, op: &Op) {
        match *op {
            Op::Patches { patches, output } => self.patches(&patches, output),
            Op::PlaceImages { hidden, width } => self.place_images(hidden, width),
            Op::AddImages {
                hidden,
                width,
                part,
            } => self.add_images(hidden, width, part),
            Op::AddPlaces {
                table,
                places,
                rows,
                hidden,
                width,
            } => match places {
                Places::Near { per_side } => {
                    self.add_near_places(table, per_side, [rows, hidden], width);
                }
                Places::Axes { each } => {
                    self.add_places_on_axes(table, each, [rows, hidden], width);
                }
            },
            Op::MergePatches {
                from,
                to,
                merged,
                merging,
                width,
            } => {
                let columns = self.image().grid().columns;
                let (squares, patches) = (self.size.logit_rows, self.size.tokens);
                let [from, to] = self.scratch.slots([from, to]);
                let from = first(from, patches * width);
                let all = squares * merged * merged * width;
                match merging {
                    Merging::Mean => {
                        merge(from, first(to, squares * width), columns, merged, width);
                    }
                    Merging::Joined => join(from, first(to, all), columns, merged, width),
                    Merging::Unfolded => unfold(from, first(to, all), columns, merged, width),
                }
            }
            Op::OrderSquares {
                from,
                to,
                part,
                parts,
                beside: _,
                width,
            } => {
                let squares = self.size.logit_rows;
                let [from, to] = self.scratch.slots([from, to]);
                let from = first(from, squares * width);
                let to = first(to, squares * parts * width);
                let Batch::Image(image) = &self.batch else {
                    unreachable!("{OF_PATCHES}")
                };
                image.order_squares(from, to, (part, parts), width);
            }
            _ => unreachable!("{OF_ANOTHER_KIND}"),
        }
    }

    /// The image's patches, each channel of them by itself, with the pixels' mean and deviation.
    fn patches(&mut self, patches: &Patches, output: Slot) {
        let Batch::Image(image) = &self.batch else {
            unreachable!("{OF_PATCHES}")
        };
        let [output] = self.scratch.slots([output]);
        let output: &mut [f32] = first(output, image.grid().count() * patches.elements());
        image.cut(patches, output);
    }

    /// The image of the pass.
    fn image(&self) -> &ImageBatch<'_> {
        match &self.batch {
            Batch::Image(image) => image,
            Batch::Segments(_) | Batch::Texts(_) => unreachable!("{OF_PATCHES}"),
        }
    }

    /// Adds to each patch's row what is learned of its place, which is between those of a square table: of the four around
    /// it the mean, weighed by how near they are.
    fn add_near_places(
        &mut self,
        table: MatrixId,
        per_side: usize,
        [rows, hidden]: [Slot; 2],
        width: usize,
    ) {
        let tokens = self.size.tokens;
        let linear = self.weights.matrix(table);
        let table = linear.matrix_of(table, self.stream.as_deref());
        for corner in 0..4 {
            let [rows, hidden] = self.scratch.slots([rows, hidden]);
            let (rows, hidden) = (
                first::<f32>(rows, tokens * width),
                first::<f32>(hidden, tokens * width),
            );
            let Batch::Image(image) = &self.batch else {
                unreachable!("{OF_PATCHES}")
            };
            let near = image.near(per_side, corner);
            let numbers: Vec<u32> = near.clone().map(|(number, _)| number).collect();
            linear.look_up(&table, self.cpu, rows, &numbers);
            let weights: Vec<f32> = near.map(|(_, weight)| weight).collect();
            self.cpu.add_scaled_rows(hidden, rows, &weights, 1, width);
        }
    }

    /// Adds to each patch's row what is learned of its column, and of its row.
    fn add_places_on_axes(
        &mut self,
        table: MatrixId,
        each: usize,
        [rows, hidden]: [Slot; 2],
        width: usize,
    ) {
        let elements = self.size.tokens * width;
        let linear = self.weights.matrix(table);
        let table = linear.matrix_of(table, self.stream.as_deref());
        for numbers in self.image().on_axes(each) {
            let [rows, hidden] = self.scratch.slots([rows, hidden]);
            let (rows, hidden) = (first::<f32>(rows, elements), first::<f32>(hidden, elements));
            linear.look_up(&table, self.cpu, rows, &numbers);
            self.cpu.add(hidden, rows);
        }
    }

    /// Copies rows of images over those of the tokens that stand for them.
    fn place_images(&mut self, hidden: Slot, width: usize) {
        let Batch::Segments(segments) = &self.batch else {
            return;
        };
        let [hidden] = self.scratch.slots([hidden]);
        let hidden: &mut [f32] = first(hidden, self.size.tokens * width);
        for (place, row) in shown_rows(segments, (width, 0)) {
            hidden[place * width..][..width].copy_from_slice(row);
        }
    }

    /// Adds a further part of rows of images to the residual stream of the tokens that stand for them.
    fn add_images(&mut self, hidden: Slot, width: usize, part: usize) {
        let Batch::Segments(segments) = &self.batch else {
            return;
        };
        let [hidden] = self.scratch.slots([hidden]);
        let hidden: &mut [f32] = first(hidden, self.size.tokens * width);
        for (place, row) in shown_rows(segments, (width, part)) {
            let hidden = &mut hidden[place * width..][..width];
            hidden
                .iter_mut()
                .zip(row)
                .for_each(|(sum, value)| *sum += value);
        }
    }
}

/// A part of `width` elements of the rows of images that `segments` show, each with the number of its token in the batch.
fn shown_rows<'a>(
    segments: &'a [Segment<'_>],
    (width, part): (usize, usize),
) -> impl Iterator<Item = (usize, &'a [f32])> {
    let starts = segments.iter().scan(0, |start, segment| {
        let first = *start;
        *start += segment.tokens.len();
        Some((first, segment))
    });
    starts.flat_map(move |(start, segment)| {
        segment.shown().flat_map(move |(tokens, rows)| {
            let row_width = rows.len() / tokens.len();
            let rows = rows.chunks_exact(row_width);
            tokens.zip(rows).map(move |(token, row)| {
                let row = &row[part * width..][..width];
                (start + token, row)
            })
        })
    })
}
