//! Norms, in place or from one slot to another.

use super::{OF_ANOTHER_KIND, Pass, first};
use crate::predictors::WeightedNorm;
use crate::program::{Op, Rows, Slot, VectorId};
use crate::spec::{Norm, NormKind};

impl Pass<'_, '_> {
    /// Runs a norm. What it leaves may say which neurons of a block are likely to be needed.
    pub(super) fn norm_op(&mut self, op: &Op) {
        self.run_norm(op);
        if let Some(norm) = WeightedNorm::of(op) {
            self.foretell(norm);
        }
    }

    fn run_norm(&mut self, op: &Op) {
        match *op {
            Op::Norm {
                norm,
                weight,
                input,
                output,
                rows,
                groups,
                width,
            } => self.norm(norm, weight, [input, output], rows, [groups, width]),
            Op::BiasedNorm {
                epsilon,
                weight,
                bias,
                input,
                output,
                rows,
                width,
            } => self.biased_norm(epsilon, [weight, bias], [input, output], rows, width),
            _ => unreachable!("{OF_ANOTHER_KIND}"),
        }
    }

    fn norm(
        &mut self,
        norm: Norm,
        weight: Option<VectorId>,
        [input, output]: [Slot; 2],
        rows: Rows,
        [groups, width]: [usize; 2],
    ) {
        let elements = self.rows(rows) * groups * width;
        let weight = weight.map(|weight| self.weights.vector(weight));
        let Norm { kind, epsilon } = norm;
        let cpu = self.cpu;
        if elements == 0 {
            return;
        }
        if input == output {
            let [rows] = self.scratch.slots([input]);
            let rows = first(rows, elements);
            match (kind, weight) {
                (NormKind::Rms, Some(weight)) => {
                    cpu.rms_norm_in_place(rows, weight, epsilon, width);
                }
                (NormKind::Rms, None) => cpu.rms_norm_unweighted_in_place(rows, epsilon, width),
                (NormKind::Layer, Some(weight)) => {
                    cpu.layer_norm_in_place(rows, weight, None, epsilon, width);
                }
                (NormKind::Layer, None) | (NormKind::BiasedLayer, _) => {
                    unreachable!("no program norms so")
                }
            }
        } else {
            let [input, output] = self.scratch.slots([input, output]);
            let (input, output): (&mut [f32], _) =
                (first(input, elements), first(output, elements));
            match (kind, weight) {
                (NormKind::Rms, Some(weight)) => {
                    cpu.rms_norm(output, input, weight, epsilon, width);
                }
                (NormKind::Rms, None) => cpu.rms_norm_unweighted(output, input, epsilon, width),
                (NormKind::Layer, Some(weight)) => {
                    cpu.layer_norm(output, input, weight, None, epsilon, width);
                }
                (NormKind::Layer, None) | (NormKind::BiasedLayer, _) => {
                    unreachable!("no program norms so")
                }
            }
        }
    }

    fn biased_norm(
        &mut self,
        epsilon: f32,
        vectors: [VectorId; 2],
        [input, output]: [Slot; 2],
        rows: Rows,
        width: usize,
    ) {
        let elements = self.rows(rows) * width;
        let [weight, bias] = vectors.map(|vector| self.weights.vector(vector));
        let (cpu, bias) = (self.cpu, Some(bias));
        if input == output {
            let [rows] = self.scratch.slots([input]);
            cpu.layer_norm_in_place(first(rows, elements), weight, bias, epsilon, width);
        } else {
            let [input, output] = self.scratch.slots([input, output]);
            let input: &mut [f32] = first(input, elements);
            cpu.layer_norm(first(output, elements), input, weight, bias, epsilon, width);
        }
    }
}
