//! Proves a plan before it is executed, without trusting how it was made.
//!
//! What is checked: every slot of the program is there once, has the shape that its spec and the batch
//! call for and the bytes of that shape, starts at a cache line, ends inside the arena; no step reads
//! what nothing has written; and slots that hold something at the same step share no byte. What holds
//! something when is found here backwards, from the last step to the first, while the plan was made
//! forwards.

use std::collections::BTreeSet;

use crate::plan::arena::{ALIGNMENT, ArenaPlan, Placement};
use crate::plan::error::PlanFault;
use crate::program::{Access, Program, Slot};

impl ArenaPlan {
    /// Checks that `program` can be executed in this arena.
    ///
    /// # Errors
    /// The first [`PlanFault`] found.
    pub fn verify(&self, program: &Program) -> Result<(), PlanFault> {
        if !self.bytes.is_multiple_of(ALIGNMENT) {
            return Err(PlanFault::ArenaSize { bytes: self.bytes });
        }
        let slots = self.placements.iter().map(|place| place.slot);
        if !slots.eq((0..program.slots().len()).map(Slot)) {
            return Err(PlanFault::Slots {
                found: self.placements.len(),
                expected: program.slots().len(),
            });
        }
        for place in &self.placements {
            self.verify_size(program, place)?;
            self.verify_range(place)?;
        }
        self.verify_disjoint(program)
    }

    fn verify_size(&self, program: &Program, place: &Placement) -> Result<(), PlanFault> {
        let slot = place.name;
        if program.slots()[place.slot.0].shape(self.limits) != Some(place.shape) {
            return Err(PlanFault::Shape { slot });
        }
        if place.shape.bytes() != Some(place.bytes) {
            let bytes = place.bytes;
            return Err(PlanFault::Size { slot, bytes });
        }
        Ok(())
    }

    fn verify_range(&self, place: &Placement) -> Result<(), PlanFault> {
        let Placement {
            name: slot,
            offset,
            bytes,
            ..
        } = *place;
        if !offset.is_multiple_of(ALIGNMENT) {
            return Err(PlanFault::Alignment { slot, offset });
        }
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > self.bytes) {
            let arena = self.bytes;
            return Err(PlanFault::Bounds { slot, arena });
        }
        Ok(())
    }

    fn verify_disjoint(&self, program: &Program) -> Result<(), PlanFault> {
        let mut needed_later: BTreeSet<Slot> = BTreeSet::new();
        // Layers that are alike hold the same slots; each such set needs to be looked at once.
        let mut seen: BTreeSet<Vec<Slot>> = BTreeSet::new();
        for step in program.steps().iter().rev() {
            let uses = program.uses(step);
            let mut held = needed_later.clone();
            held.extend(uses.iter().map(|(slot, _)| *slot));
            let held: Vec<Slot> = held.into_iter().collect();
            if !seen.contains(&held) {
                self.verify_apart(&held)?;
                seen.insert(held);
            }
            for (slot, access) in uses {
                match access {
                    Access::Write => needed_later.remove(&slot),
                    Access::Read => needed_later.insert(slot),
                };
            }
        }
        match needed_later.first() {
            None => Ok(()),
            Some(&slot) => Err(PlanFault::NeverWritten {
                slot: self.placement(slot).name,
            }),
        }
    }

    /// Whether no two of `slots` share bytes.
    fn verify_apart(&self, slots: &[Slot]) -> Result<(), PlanFault> {
        for (index, &a) in slots.iter().enumerate() {
            for &b in &slots[index + 1..] {
                let (a, b) = (self.placement(a), self.placement(b));
                let apart = a.range().end <= b.offset || b.range().end <= a.offset;
                let empty = a.bytes == 0 || b.bytes == 0;
                if !apart && !empty {
                    let slots = (a.name, b.name);
                    return Err(PlanFault::Overlap { slots });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
