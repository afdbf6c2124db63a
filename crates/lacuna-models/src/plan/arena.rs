//! Where each activation buffer lies: one arena, fixed offsets, bytes reused as lifetimes end.

use std::cmp::Reverse;
use std::ops::Range;

use crate::plan::error::PlanError;
use crate::program::{Lifetime, Program, Shape, Slot};
use crate::scratch::BatchLimits;

/// Alignment of every buffer, in bytes: a cache line, and the widest vector.
pub const ALIGNMENT: usize = 64;

/// One slot's place in the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Which slot of the program.
    pub slot: Slot,
    /// Its name in reports.
    pub name: &'static str,
    /// What it holds.
    pub shape: Shape,
    /// When it holds something.
    pub lifetime: Lifetime,
    /// The names of the steps that its first span begins and ends with.
    pub steps: (&'static str, &'static str),
    /// Its first byte in the arena.
    pub offset: usize,
    /// Its bytes.
    pub bytes: usize,
}

impl Placement {
    /// Its bytes in the arena.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.bytes
    }
}

/// The activation arena of batches up to a limit. The same program and limits give the same plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaPlan {
    pub(crate) limits: BatchLimits,
    /// In the order of [`Program::slots`].
    pub(crate) placements: Vec<Placement>,
    pub(crate) bytes: usize,
}

impl ArenaPlan {
    /// Packs the slots of `program` for batches up to `limits`.
    ///
    /// # Errors
    /// [`PlanError::BatchTooLarge`] when no address space holds them.
    pub fn new(program: &Program, limits: BatchLimits) -> Result<Self, PlanError> {
        let too_large = || PlanError::BatchTooLarge { limits };
        let placements: Option<Vec<_>> = unplaced(program, limits).collect();
        let mut placements = placements.ok_or_else(too_large)?;
        let bytes = pack(&mut placements).ok_or_else(too_large)?;
        Ok(Self {
            limits,
            placements,
            bytes,
        })
    }

    /// Largest batch it is for.
    #[must_use]
    pub fn limits(&self) -> BatchLimits {
        self.limits
    }

    /// Every slot's place.
    #[must_use]
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// One slot's place.
    ///
    /// # Panics
    /// For a slot of another program.
    #[must_use]
    pub fn placement(&self, slot: Slot) -> &Placement {
        &self.placements[slot.0]
    }

    /// The place of the slot of this name, if the program has one.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Placement> {
        self.placements.iter().find(|place| place.name == name)
    }

    /// Bytes of the arena.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes the buffers would take side by side.
    #[must_use]
    pub fn unshared_bytes(&self) -> usize {
        self.placements.iter().map(aligned_bytes).sum()
    }

    /// The most bytes held at any one step: no arena can be smaller.
    #[must_use]
    pub fn live_bytes(&self) -> usize {
        let spans = self.placements.iter().flat_map(|place| {
            let spans = place.lifetime.spans().iter();
            spans.map(move |span| (span, aligned_bytes(place)))
        });
        // What is held changes where spans begin and end.
        let mut changes: Vec<(usize, bool, usize)> = spans
            .flat_map(|(span, bytes)| [(span.first, true, bytes), (span.last + 1, false, bytes)])
            .collect();
        changes.sort_unstable();
        let (mut held, mut most) = (0, 0);
        for (_, begins, bytes) in changes {
            held = if begins { held + bytes } else { held - bytes };
            most = most.max(held);
        }
        most
    }
}

fn aligned_bytes(place: &Placement) -> usize {
    place.bytes.next_multiple_of(ALIGNMENT)
}

fn unplaced(program: &Program, limits: BatchLimits) -> impl Iterator<Item = Option<Placement>> {
    let slots = program.slots().iter().zip(program.lifetimes()).enumerate();
    slots.map(move |(number, (slot, lifetime))| {
        let shape = slot.shape(limits)?;
        let name = |step: usize| program.steps()[step].name;
        let span = lifetime.spans().first()?;
        Some(Placement {
            slot: Slot(number),
            name: slot.name,
            shape,
            steps: (name(span.first), name(span.last)),
            lifetime,
            offset: 0,
            bytes: shape.bytes()?,
        })
    })
}

/// Gives every buffer an offset, each as low as those placed before it allow; the order in which they
/// are placed is that of two which takes less: the longest-lived first, which suits layers that are all
/// alike, or the largest first, which suits a few that are larger than all others, as those of experts.
/// Returns the bytes of the arena, or `None` when they are too many to allocate.
fn pack(placements: &mut [Placement]) -> Option<usize> {
    let largest = isize::MAX as usize - ALIGNMENT;
    let sum = placements
        .iter()
        .try_fold(0usize, |sum, place| sum.checked_add(place.bytes));
    sum.filter(|&sum| sum <= largest - placements.len() * ALIGNMENT)?;
    let longest_first = pack_by(placements, |place| (place.lifetime.longest(), place.bytes));
    let offsets: Vec<usize> = placements.iter().map(|place| place.offset).collect();
    let largest_first = pack_by(placements, |place| (place.bytes, place.lifetime.longest()));
    if longest_first <= largest_first {
        for (place, offset) in placements.iter_mut().zip(offsets) {
            place.offset = offset;
        }
    }
    Some(longest_first.min(largest_first))
}

/// Places buffers by descending `size`; returns where the last of them ends.
fn pack_by(placements: &mut [Placement], size: impl Fn(&Placement) -> (usize, usize)) -> usize {
    let mut order: Vec<usize> = (0..placements.len()).collect();
    order.sort_by_key(|&index| (Reverse(size(&placements[index])), index));
    for (placed, &index) in order.iter().enumerate() {
        let before = order[..placed].iter().map(|&index| &placements[index]);
        placements[index].offset = lowest(before, &placements[index]);
    }
    let end = placements
        .iter()
        .map(|place| place.offset + aligned_bytes(place));
    end.max().unwrap_or(0)
}

/// The lowest offset at which `wanted` overlaps nothing of `placed` that is alive with it.
fn lowest<'a>(placed: impl Iterator<Item = &'a Placement>, wanted: &Placement) -> usize {
    let mut taken: Vec<(usize, usize)> = placed
        .filter(|place| place.lifetime.overlaps(&wanted.lifetime))
        .map(|place| (place.offset, place.offset + aligned_bytes(place)))
        .collect();
    taken.sort_unstable();
    let mut offset = 0;
    for (start, end) in taken {
        if offset + aligned_bytes(wanted) <= start {
            break;
        }
        offset = offset.max(end);
    }
    offset
}
