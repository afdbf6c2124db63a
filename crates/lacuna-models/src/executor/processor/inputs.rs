//! What the first layer reads, and what is known of tokens before it: rows of tables, positions, rotations.

use super::{LONGEST, OF_ANOTHER_KIND, Pass, first};
use crate::error::ForwardError;
use crate::executor::Batch;
use crate::program::{Lookup, MatrixId, Op, Rows, Slot};

impl Pass<'_, '_> {
    /// Runs an operation that makes inputs.
    pub(super) fn input_op(&mut self, op: &Op) -> Result<(), ForwardError> {
        match *op {
            Op::Embed { table, of, output } => return self.embed(table, of, output),
            Op::TakeFeatures { output, width } => {
                let given = self.features;
                self.values(output, Rows::Tokens, width)
                    .copy_from_slice(given);
            }
            Op::Positions {
                output,
                axes,
                first,
            } => self.positions(output, axes, first),
            Op::Rotations {
                rope,
                positions,
                axes,
                output,
                width,
            } => self.rotations(rope, (positions, axes), output, width),
            _ => unreachable!("{OF_ANOTHER_KIND}"),
        }
        Ok(())
    }

    /// Rows of a table, from where it is.
    fn embed(&mut self, table: MatrixId, of: Lookup, output: Slot) -> Result<(), ForwardError> {
        match &self.stream {
            Some(stream) if stream.reads(table) => self.embed_read(table, of, output),
            _ => {
                self.embed_in_memory(table, of, output);
                Ok(())
            }
        }
    }

    /// Rows of a table that is not in memory.
    fn embed_read(
        &mut self,
        table: MatrixId,
        of: Lookup,
        output: Slot,
    ) -> Result<(), ForwardError> {
        let linear = self.weights.matrix(table);
        let (width, cpu) = (linear.columns(), self.cpu);
        let last = linear.rows() as u32 - 1;
        let known = |token: u32| if token > last { 0 } else { token };
        let rows: Vec<u32> = match of {
            Lookup::Tokens => {
                let tokens = self.batch.tokens().flat_map(|(tokens, _)| tokens);
                tokens.map(|&token| known(token)).collect()
            }
            Lookup::Positions(positions) => {
                let [positions] = self.scratch.slots([positions]);
                first::<u32>(positions, self.size.tokens).to_vec()
            }
            Lookup::TokenType => {
                let types = self.batch.token_types();
                types.map(|token_type| token_type.min(last)).collect()
            }
        };
        let Some(stream) = &mut self.stream else {
            unreachable!("the table is read")
        };
        let [output] = self.scratch.slots([output]);
        let output: &mut [f32] = first(output, self.size.tokens * width);
        stream.rows(table, &rows, |index, bytes| {
            let out = &mut output[index * width..][..width];
            cpu.embed(out, &linear.row_in(bytes), &[0]);
        })?;
        if matches!(of, Lookup::Tokens) {
            stream.rows_ahead(table, known);
        }
        Ok(())
    }

    fn embed_in_memory(&mut self, table: MatrixId, of: Lookup, output: Slot) {
        let linear = self.weights.matrix(table);
        let table = linear.matrix_of(table, self.stream.as_deref());
        let width = table.cols();
        let elements = self.size.tokens * width;
        match of {
            Lookup::Tokens => {}
            Lookup::Positions(positions) => {
                let [positions, output] = self.scratch.slots([positions, output]);
                let rows: &mut [u32] = first(positions, self.size.tokens);
                return linear.look_up(&table, self.cpu, first(output, elements), rows);
            }
            Lookup::TokenType => {
                let [output] = self.scratch.slots([output]);
                let rows = first(output, elements).chunks_exact_mut(width);
                let last = table.rows() as u32 - 1;
                for (row, token_type) in rows.zip(self.batch.token_types()) {
                    self.cpu.embed(row, &table, &[token_type.min(last)]);
                }
                return;
            }
        }
        let [hidden] = self.scratch.slots([output]);
        let mut rest: &mut [f32] = first(hidden, elements);
        for tokens in self.batch.runs() {
            let (rows, tail) = rest.split_at_mut(tokens.len() * width);
            linear.look_up_known(&table, self.cpu, rows, tokens);
            rest = tail;
        }
    }

    fn positions(&mut self, output: Slot, axes: usize, first_of_text: usize) {
        let [positions] = self.scratch.slots([output]);
        let positions: &mut [u32] = first(positions, self.size.tokens * axes);
        match &self.batch {
            // By their numbers, row by row, or by their rows and columns.
            Batch::Image(image) => {
                let columns = image.grid().columns as u32;
                for (position, place) in positions.chunks_exact_mut(axes).zip(image.places()) {
                    match position {
                        [number] => *number = place[0] * columns + place[1],
                        position => position.copy_from_slice(place),
                    }
                }
            }
            Batch::Segments(segments) => {
                let mut rest = positions;
                for segment in &**segments {
                    let (positions, tail) = rest.split_at_mut(segment.tokens.len() * axes);
                    segment.positions(axes, first_of_text, positions);
                    rest = tail;
                }
            }
            Batch::Texts(texts) => {
                let wanted = texts.iter();
                let wanted = wanted.flat_map(|text| (first_of_text..).take(text.len()));
                for (slot, position) in positions.iter_mut().zip(wanted) {
                    *slot = u32::try_from(position).expect(LONGEST);
                }
            }
        }
    }

    fn rotations(
        &mut self,
        rope: usize,
        (positions, axes): (Slot, usize),
        output: Slot,
        width: usize,
    ) {
        let rotation = self.weights.rotation(rope);
        let context = self.scratch.limits().context_tokens;
        let [positions, table] = self.scratch.slots([positions, output]);
        let positions: &mut [u32] = first(positions, self.size.tokens * axes);
        let table = first(table, self.size.tokens * width);
        rotation.table(self.cpu, context, (positions, axes), table);
    }
}
