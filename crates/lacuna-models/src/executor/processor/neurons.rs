//! Neurons of feed-forward blocks whose activations are mostly zero: products with the columns that are needed, what is
//! foretold of them, and what is written down to learn that.

use lacuna_kernels::{Activation, Columns};

use super::{Pass, first};
use crate::error::ForwardError;
use crate::predictors::WeightedNorm;
use crate::program::{MatrixId, Slot};

impl Pass<'_, '_> {
    /// Asks for neurons that are likely to be needed by what a norm has left; and writes that down, if it is to be known.
    pub(super) fn foretell(&mut self, norm: WeightedNorm) {
        let WeightedNorm {
            weight: norm,
            output,
            width,
            ..
        } = norm;
        let rows = self.size.tokens;
        let Self {
            stream,
            scratch,
            cpu,
            ..
        } = self;
        scratch.record_input(norm, output, rows * width);
        let neurons = stream.as_mut().and_then(|stream| stream.neurons());
        if let Some(neurons) = neurons.filter(|neurons| neurons.predicts(norm, rows)) {
            let [x] = scratch.slots([output]);
            neurons.expect(cpu, norm, first(x, rows * width));
        }
    }

    /// The product of one matrix with rows most of whose elements are zero, from the columns that are not.
    pub(super) fn sparse_product(
        &mut self,
        slots: [Slot; 2],
        matrix: MatrixId,
        (rows, columns): (usize, usize),
        function: Option<Activation>,
    ) -> Result<(), ForwardError> {
        let linear = self.weights.matrix(matrix);
        let [x, out] = self.scratch.slots(slots);
        let (x, out): (&mut [f32], &mut [f32]) =
            (first(x, rows * columns), first(out, rows * linear.rows()));
        let neurons = self.stream.as_mut().and_then(|stream| stream.neurons());
        let neurons = neurons.expect("whoever calls has seen them");
        neurons.begin(matrix, x);
        while let Some(lent) = neurons.next()? {
            let there = neurons.lent();
            let columns = Columns {
                layout: there.layout(),
                scales: there.scales(),
                range: lent.range,
                numbers: there.numbers(),
                bytes: |at: usize| there.bytes(at),
            };
            self.cpu.matmul_columns(out, x, &columns);
        }
        if let Some(bias) = linear.bias() {
            self.cpu.add_bias(out, bias);
        }
        if let Some(function) = function {
            self.cpu.activate(function, out);
        }
        Ok(())
    }
}
