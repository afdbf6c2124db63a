//! What is returned: the rows that are asked for, one for each text, and whether they are finite.

use super::{KEEPS, OF_ANOTHER_KIND, Pass, first};
use crate::error::{ForwardError, Place};
use crate::executor::Batch;
use crate::executor::pooling::{normalize, pool};
use crate::program::{Op, Rows, Slot};
use crate::scratch::FiniteCheck;
use crate::spec::Pooling;

impl Pass<'_, '_> {
    /// Runs an operation on what is returned.
    pub(super) fn output_op(&mut self, op: &Op) -> Result<(), ForwardError> {
        match *op {
            Op::Choose { from, to, width } => self.choose([from, to], width),
            Op::Pool {
                pooling,
                from,
                to,
                width,
            } => self.pool(pooling, [from, to], width),
            Op::Normalize { values, width } => {
                let rows = self.values(values, Rows::Logits, width);
                rows.chunks_exact_mut(width).for_each(normalize);
            }
            Op::CheckFinite {
                values,
                rows,
                width,
                place,
            } => return self.check(values, rows, width, place),
            _ => unreachable!("{OF_ANOTHER_KIND}"),
        }
        Ok(())
    }

    /// Picks the rows the segments ask for.
    fn choose(&mut self, slots: [Slot; 2], width: usize) {
        let [hidden, chosen] = self.scratch.slots(slots);
        let hidden: &mut [f32] = bytemuck::cast_slice_mut(hidden);
        let chosen: &mut [f32] = bytemuck::cast_slice_mut(chosen);
        let Batch::Segments(segments) = &self.batch else {
            unreachable!("{KEEPS}")
        };
        let (mut rows, mut end) = (0, 0);
        for segment in &**segments {
            end += segment.tokens.len();
            let wanted = segment.logit_rows();
            chosen[rows * width..(rows + wanted) * width]
                .copy_from_slice(&hidden[(end - wanted) * width..end * width]);
            rows += wanted;
        }
    }

    fn pool(&mut self, pooling: Pooling, slots: [Slot; 2], width: usize) {
        let Batch::Texts(texts) = self.batch else {
            unreachable!("a pass that keeps nothing is one over texts")
        };
        let [hidden, output] = self.scratch.slots(slots);
        let hidden: &mut [f32] = first(hidden, self.size.tokens * width);
        let output: &mut [f32] = first(output, texts.len() * width);
        for (index, output) in output.chunks_exact_mut(width).enumerate() {
            let rows = texts.range(index);
            pool(
                pooling,
                &hidden[rows.start * width..rows.end * width],
                output,
            );
        }
    }

    /// Whether rows are finite, if that is to be known.
    fn check(
        &mut self,
        values: Slot,
        rows: Rows,
        width: usize,
        place: Place,
    ) -> Result<(), ForwardError> {
        if self.scratch.check() == FiniteCheck::Off {
            return Ok(());
        }
        let cpu = self.cpu;
        match cpu.first_not_finite(self.values(values, rows, width)) {
            None => Ok(()),
            Some(index) => Err(ForwardError::NotFinite {
                place,
                row: index / width,
            }),
        }
    }
}
