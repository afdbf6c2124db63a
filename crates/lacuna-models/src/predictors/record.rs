//! What predictors are fitted to: of each token of a text, what a block is foretold from, and which of its neurons are
//! active.

use std::collections::HashMap;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{BlockShape, Input};
use crate::program::{MatrixId, VectorId};

/// Writes down activations while passes are computed ([`Scratch::record_neurons`](crate::Scratch::record_neurons)).
#[derive(Debug)]
pub struct NeuronRecorder {
    blocks: Vec<Recorded>,
    by_norm: HashMap<usize, usize>,
    by_matrix: HashMap<usize, usize>,
}

/// What is known of a block: a row of each for every token.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) shape: BlockShape,
    /// `[rows, width]`
    x: Vec<f16>,
    /// `[rows, words of neurons]`, a bit each.
    active: Vec<u64>,
    /// Whether a value was not finite.
    pub(super) is_damaged: bool,
}

/// Bytes that a token takes of a block.
pub(super) fn row_bytes(shape: &BlockShape) -> u64 {
    (2 * shape.width + 8 * words(shape.neurons)) as u64
}

fn words(neurons: usize) -> usize {
    neurons.div_ceil(64)
}

impl NeuronRecorder {
    /// One of so many rows of some blocks of a program, with the numbers of their matrices.
    pub(super) fn new<'a>(
        blocks: impl Iterator<Item = (usize, &'a BlockShape)>,
        inputs: &HashMap<usize, Input>,
        rows: usize,
    ) -> Self {
        let mut recorder = Self {
            blocks: Vec::new(),
            by_norm: HashMap::new(),
            by_matrix: HashMap::new(),
        };
        for (matrix, shape) in blocks {
            let number = recorder.blocks.len();
            let VectorId(norm) = inputs[&matrix].norm;
            recorder.by_norm.insert(norm, number);
            recorder.by_matrix.insert(matrix, number);
            recorder.blocks.push(Recorded {
                shape: shape.clone(),
                x: Vec::with_capacity(rows * shape.width),
                active: Vec::with_capacity(rows * words(shape.neurons)),
                is_damaged: false,
            });
        }
        recorder
    }

    pub(super) fn into_blocks(self) -> Vec<Recorded> {
        self.blocks
    }

    pub(crate) fn wants_input(&self, VectorId(norm): VectorId) -> bool {
        self.by_norm.contains_key(&norm)
    }

    pub(crate) fn wants_active(&self, MatrixId(matrix): MatrixId) -> bool {
        self.by_matrix.contains_key(&matrix)
    }

    /// Writes down what a norm has left of a pass's tokens.
    pub(crate) fn input(&mut self, VectorId(norm): VectorId, x: &[f32]) {
        let block = &mut self.blocks[self.by_norm[&norm]];
        block.is_damaged |= x.iter().any(|x| !x.is_finite());
        // Larger than any that a norm of a model leaves.
        const MOST: f32 = 65_504.0;
        block
            .x
            .extend(x.iter().map(|x| f16::from_f32(x.clamp(-MOST, MOST))));
    }

    /// Writes down which of the activations of a pass's tokens are not zero.
    pub(crate) fn active(&mut self, MatrixId(matrix): MatrixId, activations: &[f32]) {
        let block = &mut self.blocks[self.by_matrix[&matrix]];
        for row in activations.chunks_exact(block.shape.neurons) {
            for some in row.chunks(64) {
                let bits = some.iter().enumerate();
                let word = bits.fold(0, |word, (at, x)| word | u64::from(*x != 0.0) << at);
                block.active.push(word);
                block.is_damaged |= some.iter().any(|x| !x.is_finite());
            }
        }
    }
}

impl Recorded {
    /// How many there are of which both is known.
    pub(super) fn rows(&self) -> usize {
        let of_active = self.active.len() / words(self.shape.neurons);
        of_active.min(self.x.len() / self.shape.width)
    }

    /// What a row is foretold from.
    pub(super) fn x(&self, row: usize, out: &mut [f32]) {
        let width = self.shape.width;
        self.x[row * width..][..width].convert_to_f32_slice(out);
    }

    /// Whether a neuron of a row is active, in ascending order.
    pub(super) fn active(&self, row: usize) -> impl Iterator<Item = bool> {
        let words = words(self.shape.neurons);
        let bits = self.active[row * words..][..words].iter();
        let bits = bits.flat_map(|word| (0..64).map(move |at| word >> at & 1 == 1));
        bits.take(self.shape.neurons)
    }
}
