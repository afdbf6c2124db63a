//! Proves a plan before it is executed, without trusting how it was made.
//!
//! What is checked: every buffer of a forward pass is there once, has the shape that config and
//! batch call for and the bytes of that shape, starts at a cache line, ends inside the arena,
//! lives during every step that uses it, and shares no byte with a buffer that lives with it.

use crate::config::Config;
use crate::plan::arena::{ALIGNMENT, ArenaPlan, Placement};
use crate::plan::error::PlanFault;
use crate::plan::pass::{Buffer, Step};

impl ArenaPlan {
    /// Checks that a forward pass of `config` can be computed in this arena.
    ///
    /// # Errors
    /// The first [`PlanFault`] found.
    pub fn verify(&self, config: &Config) -> Result<(), PlanFault> {
        if !self.bytes.is_multiple_of(ALIGNMENT) {
            return Err(PlanFault::ArenaSize { bytes: self.bytes });
        }
        let buffers = self.placements.iter().map(|place| place.buffer);
        if !buffers.eq(Buffer::ALL) {
            return Err(PlanFault::Buffers {
                found: self.placements.len(),
                expected: Buffer::ALL.len(),
            });
        }
        for place in &self.placements {
            self.verify_size(config, place)?;
            self.verify_range(place)?;
            verify_lifetime(place)?;
        }
        self.verify_disjoint()
    }

    fn verify_size(&self, config: &Config, place: &Placement) -> Result<(), PlanFault> {
        let buffer = place.buffer;
        if buffer.shape(config, self.limits) != Some(place.shape) {
            return Err(PlanFault::Shape { buffer });
        }
        if place.shape.bytes() != Some(place.bytes) {
            let bytes = place.bytes;
            return Err(PlanFault::Size { buffer, bytes });
        }
        Ok(())
    }

    fn verify_range(&self, place: &Placement) -> Result<(), PlanFault> {
        let Placement { buffer, offset, .. } = *place;
        if !offset.is_multiple_of(ALIGNMENT) {
            return Err(PlanFault::Alignment { buffer, offset });
        }
        let end = offset.checked_add(place.bytes);
        if end.is_none_or(|end| end > self.bytes) {
            let arena = self.bytes;
            return Err(PlanFault::Bounds { buffer, arena });
        }
        Ok(())
    }

    fn verify_disjoint(&self) -> Result<(), PlanFault> {
        for (index, a) in self.placements.iter().enumerate() {
            for b in &self.placements[index + 1..] {
                let apart = a.range().end <= b.offset || b.range().end <= a.offset;
                let empty = a.bytes == 0 || b.bytes == 0;
                if a.lifetime.overlaps(b.lifetime) && !apart && !empty {
                    let buffers = (a.buffer, b.buffer);
                    return Err(PlanFault::Overlap { buffers });
                }
            }
        }
        Ok(())
    }
}

/// A buffer lives during every step that uses it; and one that carries something from outside of
/// blocks into them, or out of them, through every step of a block, since another block may follow.
fn verify_lifetime(place: &Placement) -> Result<(), PlanFault> {
    let buffer = place.buffer;
    let used = |inside: bool| {
        let mut steps = Step::ALL.iter();
        steps.any(|(step, used)| used.contains(&buffer) && Step::BLOCK.contains(*step) == inside)
    };
    let carries = used(true) && used(false);
    for (step, used) in Step::ALL {
        let needed = used.contains(&buffer) || (carries && Step::BLOCK.contains(step));
        if needed && !place.lifetime.contains(step) {
            return Err(PlanFault::Lifetime { buffer, step });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
