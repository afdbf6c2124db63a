//! Neurons of feed-forward blocks whose activations are mostly zero: products with the columns that are needed, and with the
//! rows beside them; what is foretold of them, and what is written down to learn that.

use lacuna_kernels::{Activation, Cpu};

use super::products::activations;
use super::{Pass, first};
use crate::error::ForwardError;
use crate::predictors::WeightedNorm;
use crate::program::{GatedNeurons, MatrixId, Op, Slot};
use crate::weights::Linear;

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
            let columns = neurons.lent().columns(lent.range);
            self.cpu.matmul_columns(out, x, &columns);
        }
        finish(self.cpu, linear, function, out);
        Ok(())
    }

    /// What `ops` begin with, if that is a block whose gates are known and whose rows and columns are read by neuron:
    /// `output = down (gate * up input)` from the neurons whose gates are not zero. Returns how many operations that were.
    pub(super) fn gated_neurons(&mut self, ops: &[Op]) -> Result<usize, ForwardError> {
        let neurons = self.stream.as_mut().and_then(|stream| stream.neurons());
        let (Some(neurons), Some(block)) = (neurons, GatedNeurons::first_of(ops)) else {
            return Ok(0);
        };
        if !neurons.has_rows(block.down.0) {
            return Ok(0);
        }
        let (cpu, tokens, inner) = (self.cpu, self.size.tokens, block.inner);
        let [up, down] = [block.up, block.down].map(|(matrix, _)| self.weights.matrix(matrix));
        self.scratch
            .record_active(block.down.0, block.gate, tokens * inner);
        let [input, blocks] = block.input;
        let slots = [input, blocks, block.gate, block.up.1, block.down.1];
        let [input, blocks, gate, products, out] = self.scratch.slots(slots);
        let gate: &mut [f32] = first(gate, tokens * inner);
        let out: &mut [f32] = first(out, tokens * down.rows());
        neurons.begin(block.down.0, gate);
        let blocks = if up.is_quantized() { blocks } else { &mut [] };
        let input = activations(cpu, first(input, tokens * block.columns), tokens, blocks);
        let all_biases = up.bias();
        let mut biases = Vec::new();
        while let Some(lent) = neurons.next()? {
            neurons.each_rows(|numbers, rows| {
                let bias = all_biases.map(|all| {
                    biases.clear();
                    biases.extend(numbers.iter().map(|number| all[*number as usize]));
                    &biases[..]
                });
                let products = first(products, tokens * numbers.len());
                cpu.linear_each([&mut *products], &input, [(rows, bias)], None);
                cpu.fill_rows(gate, inner, |token, gate| {
                    let products = &products[token * numbers.len()..][..numbers.len()];
                    for (number, product) in numbers.iter().zip(products) {
                        gate[*number as usize] *= product;
                    }
                });
            });
            let columns = neurons.lent().columns(lent.range);
            cpu.matmul_columns(out, gate, &columns);
        }
        finish(cpu, down, None, out);
        Ok(GatedNeurons::OPS)
    }
}

/// What comes after a product.
fn finish(cpu: &Cpu, linear: &Linear, function: Option<Activation>, out: &mut [f32]) {
    if let Some(bias) = linear.bias() {
        cpu.add_bias(out, bias);
    }
    if let Some(function) = function {
        cpu.activate(function, out);
    }
}
