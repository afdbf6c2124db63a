//! A program in two: the processor begins it, and a device goes on.

use super::{Contents, Op, Program, Rows, Slot, Step};

/// Where a program is cut, and what goes from the first part to the second.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// The first step of the second part.
    step: usize,
    handed: Vec<(Slot, usize)>,
}

impl Split {
    /// What the second part takes of the first: slots of rows of tokens, and elements for each token that hold a row.
    #[must_use]
    pub fn handed(&self) -> &[(Slot, usize)] {
        &self.handed
    }
}

impl Program {
    /// The program cut in front of a decoder layer: rows of slots that steps from there on need of those before are handed
    /// over, the residual stream as a rule and tables of rotations. `None` where there is no such layer behind the first,
    /// and where steps need something else than rows of tokens.
    #[must_use]
    pub fn split_before(&self, layer: usize) -> Option<Split> {
        let of_layer = |step: &Step| step.layer == Some(layer);
        let step = self.steps().iter().position(of_layer)?;
        if layer == 0 {
            return None;
        }
        let mut handed = Vec::new();
        for (slot, lifetime) in self.lifetimes().iter().enumerate() {
            let mut spans = lifetime.spans().iter();
            if !spans.any(|span| span.first < step && step <= span.last) {
                continue;
            }
            match self.slots()[slot].contents {
                Contents::Values {
                    rows: Rows::Tokens,
                    width,
                } => handed.push((Slot(slot), width)),
                // Whoever computes a part makes positions for itself.
                Contents::Positions { .. } => {}
                _ => return None,
            }
        }
        Some(Split { step, handed })
    }

    /// The steps before a cut.
    #[must_use]
    pub fn steps_before(&self, split: &Split) -> &[Step] {
        &self.steps()[..split.step]
    }

    /// Those behind it.
    #[must_use]
    pub fn steps_behind(&self, split: &Split) -> &[Step] {
        &self.steps()[split.step..]
    }

    /// What says which positions the tokens of a pass have, wherever it stands.
    pub fn position_ops(&self) -> impl Iterator<Item = &Op> {
        let ops = self.steps().iter().flat_map(|step| self.ops(step));
        ops.filter(|op| matches!(op, Op::Positions { .. }))
    }
}

#[cfg(test)]
mod tests {
    use crate::spec::examples;

    use super::*;

    #[test]
    fn a_cut_hands_over_the_stream_and_tables_and_every_step_is_in_one_part() {
        let spec = examples::small();
        let program = Program::new(&spec);
        for layer in 1..spec.layers.len() {
            let split = program.split_before(layer).expect("a layer");
            let names = split.handed().iter();
            let names = names.map(|(slot, width)| (program.slots()[slot.0].name, *width));
            let turned = spec.ropes[0].dimensions;
            let wanted = [("hidden", spec.hidden), ("rotations", turned)];
            assert_eq!(names.collect::<Vec<_>>(), wanted, "layer {layer}");
            let [before, behind] = [program.steps_before(&split), program.steps_behind(&split)];
            assert_eq!([before, behind].concat(), program.steps());
            assert!(before.iter().all(|step| step.layer < Some(layer)));
            assert!(
                behind
                    .iter()
                    .all(|step| step.layer.is_none_or(|it| it >= layer))
            );
        }
        for layer in [0, spec.layers.len()] {
            assert_eq!(program.split_before(layer), None, "layer {layer}");
        }
    }
}
