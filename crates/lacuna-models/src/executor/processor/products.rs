//! Products of rows with matrices, which may be read while they are needed.

use lacuna_kernels::{Activation, Activations, Cpu};

use super::{Pass, first};
use crate::error::ForwardError;
use crate::program::{MatrixId, Rows, Slot};
use crate::weights::Linear;

impl Pass<'_, '_> {
    /// Products with `outputs`' matrices in one operation, so that threads meet once.
    pub(super) fn products(
        &mut self,
        input: [Slot; 2],
        size: (Rows, usize),
        outputs: &[(MatrixId, Slot)],
        function: Option<Activation>,
    ) -> Result<(), ForwardError> {
        // Parts of a longer list are computed one after another, each quantizing the input again; no
        // layer has one.
        for outputs in outputs.chunks(MOST_PRODUCTS) {
            match outputs {
                [a] => self.product(input, size, [*a], function)?,
                [a, b] => self.product(input, size, [*a, *b], function)?,
                [a, b, c] => self.product(input, size, [*a, *b, *c], function)?,
                [a, b, c, d] => self.product(input, size, [*a, *b, *c, *d], function)?,
                [a, b, c, d, e] => self.product(input, size, [*a, *b, *c, *d, *e], function)?,
                _ => unreachable!("at most {MOST_PRODUCTS}, and not empty"),
            }
        }
        Ok(())
    }

    fn product<const N: usize>(
        &mut self,
        input: [Slot; 2],
        (rows, columns): (Rows, usize),
        outputs: [(MatrixId, Slot); N],
        function: Option<Activation>,
    ) -> Result<(), ForwardError> {
        let rows = self.rows(rows);
        let weights = outputs.map(|(matrix, _)| matrix);
        if rows == 0 {
            if let Some(stream) = &mut self.stream {
                stream.release(&weights);
            }
            return Ok(());
        }
        if let [(matrix, _)] = &outputs[..] {
            let elements = rows * columns;
            self.scratch.record_active(*matrix, input[0], elements);
        }
        if let ([(matrix, output)], Some(stream)) = (&outputs[..], &mut self.stream)
            && stream.neurons().is_some_and(|neurons| neurons.has(*matrix))
        {
            return self.sparse_product([input[0], *output], *matrix, (rows, columns), function);
        }
        if let Some(stream) = &mut self.stream {
            if let Some(neurons) = stream.neurons() {
                neurons.advance();
            }
            stream.lend(&weights)?;
        }
        let slots = outputs.iter().map(|(_, slot)| *slot);
        let ([input, blocks], outs) = self.scratch.slots_and::<MOST_PRODUCTS>(input, slots);
        let linears = weights.map(|matrix| self.weights.matrix(matrix));
        let blocks = match linears.iter().any(|linear| linear.is_quantized()) {
            true => blocks,
            false => &mut [],
        };
        let input = activations(self.cpu, first(input, rows * columns), rows, blocks);
        let stream = self.stream.as_deref();
        let matrices = weights.map(|matrix| self.weights.matrix(matrix).matrix_of(matrix, stream));
        let mut outs = outs.into_iter();
        let outs = linears.map(|linear| {
            let out = outs.next().expect("a slot for each matrix");
            first(out, rows * linear.rows())
        });
        Linear::apply_each(linears, matrices, self.cpu, outs, &input, function);
        if let Some(stream) = &mut self.stream {
            stream.release(&weights);
        }
        Ok(())
    }
}

/// Matrices that are multiplied with the same rows at once: queries, keys and values, and both of a
/// feed-forward block that reads the same.
const MOST_PRODUCTS: usize = 5;

/// Prepares `rows` rows for products, quantized where their width allows a quantized matrix.
pub(super) fn activations<'a>(
    cpu: &Cpu,
    x: &'a [f32],
    rows: usize,
    storage: &'a mut [u8],
) -> Activations<'a> {
    let columns = x.len() / rows;
    let storage = match Activations::storage_bytes(rows, columns) {
        Some(_) => storage,
        None => &mut [],
    };
    cpu.activations(x, rows, columns, storage)
}
