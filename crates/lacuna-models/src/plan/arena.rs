//! Where each activation buffer lies: one arena, fixed offsets, bytes reused as lifetimes end.

use std::cmp::Reverse;
use std::ops::Range;

use crate::config::Config;
use crate::plan::error::PlanError;
use crate::plan::pass::{Buffer, Lifetime, Shape, Step};
use crate::scratch::BatchLimits;

/// Alignment of every buffer, in bytes: a cache line, and the widest vector.
pub const ALIGNMENT: usize = 64;

/// One buffer's place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Which buffer.
    pub buffer: Buffer,
    /// What it holds.
    pub shape: Shape,
    /// When it holds that.
    pub lifetime: Lifetime,
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

/// The activation arena of batches up to a limit. The same config and limits give the same plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaPlan {
    pub(crate) limits: BatchLimits,
    /// In the order of [`Buffer::ALL`].
    pub(crate) placements: Vec<Placement>,
    pub(crate) bytes: usize,
}

impl ArenaPlan {
    /// Packs the buffers of `config` for batches up to `limits`.
    ///
    /// # Errors
    /// [`PlanError::BatchTooLarge`] when no address space holds them.
    pub fn new(config: &Config, limits: BatchLimits) -> Result<Self, PlanError> {
        let too_large = || PlanError::BatchTooLarge { limits };
        let mut placements = Buffer::ALL
            .into_iter()
            .map(|buffer| unplaced(config, limits, buffer))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(too_large)?;
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

    /// Every buffer's place.
    #[must_use]
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// One buffer's place.
    #[must_use]
    pub fn placement(&self, buffer: Buffer) -> &Placement {
        &self.placements[buffer as usize]
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
        let live = |step: Step| {
            let held = self
                .placements
                .iter()
                .filter(move |place| place.lifetime.contains(step));
            held.map(aligned_bytes).sum()
        };
        Step::ALL
            .iter()
            .map(|&(step, _)| live(step))
            .max()
            .unwrap_or(0)
    }
}

fn aligned_bytes(place: &Placement) -> usize {
    place.bytes.next_multiple_of(ALIGNMENT)
}

fn unplaced(config: &Config, limits: BatchLimits, buffer: Buffer) -> Option<Placement> {
    let shape = buffer.shape(config, limits)?;
    Some(Placement {
        buffer,
        shape,
        lifetime: buffer.lifetime(),
        offset: 0,
        bytes: shape.bytes()?,
    })
}

/// Gives every buffer an offset, longest-lived and then largest first, each as low as those placed
/// before it allow.
/// Returns the bytes of the arena, or `None` when they are too many to allocate.
fn pack(placements: &mut [Placement]) -> Option<usize> {
    let largest = isize::MAX as usize - ALIGNMENT;
    let sum = placements
        .iter()
        .try_fold(0usize, |sum, place| sum.checked_add(place.bytes));
    sum.filter(|&sum| sum <= largest - placements.len() * ALIGNMENT)?;
    let mut order: Vec<usize> = (0..placements.len()).collect();
    order.sort_by_key(|&index| {
        let Placement {
            lifetime, bytes, ..
        } = placements[index];
        (Reverse((lifetime.steps(), bytes)), index)
    });
    let mut placed: Vec<Placement> = Vec::with_capacity(placements.len());
    for index in order {
        placements[index].offset = lowest(&placed, &placements[index]);
        placed.push(placements[index]);
    }
    let end = placements
        .iter()
        .map(|place| place.offset + aligned_bytes(place));
    end.max()
}

/// The lowest offset at which `wanted` overlaps nothing of `placed` that is alive with it.
fn lowest(placed: &[Placement], wanted: &Placement) -> usize {
    let mut taken: Vec<(usize, usize)> = placed
        .iter()
        .filter(|place| place.lifetime.overlaps(wanted.lifetime))
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
