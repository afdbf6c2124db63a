//! One pass being recorded: each operation as kernels on slots of the arena.
//!
//! Operations take effect one after another, with a barrier between; what belongs to one operation runs side by side.

use lacuna_kv::{Layer, Side};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::program::{Op, Rows, Slot, VectorId};
use lacuna_models::spec::{ImageAttention, NormKind};
use lacuna_models::{PassSize, Segment};
use lacuna_pages::DeviceError;
use lacuna_pages::vulkan::{Bound, ComputeKernel, DeviceMemory, Recording, WINDOWS};

use crate::elementwise::Elements;
use crate::fused::Action;
use crate::kernels::{Constants, Elementwise, Kernels, NONE, THREADS};
use crate::weights::DeviceWeights;

/// The most workgroups one way that every device takes.
const MOST_GROUPS: u32 = 65_535;

/// What the host gives a pass: rows of a slot, and where they are in its input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Given {
    pub(crate) slot: Slot,
    /// Where in the slot it goes, in elements.
    pub(crate) at: usize,
    /// In elements of the input.
    pub(crate) start: usize,
    pub(crate) elements: usize,
    /// Whether what follows is for the same operation.
    pub(crate) more: bool,
}

impl Given {
    pub(crate) fn nothing(slot: Slot) -> Self {
        Self {
            slot,
            at: 0,
            start: 0,
            elements: 0,
            more: false,
        }
    }
}

/// What lies in the arena behind the slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// The first word of what actions quantize.
    pub(crate) blocks: u32,
    /// The first word of partial results of attention, and how many there are.
    pub(crate) states: u32,
    pub(crate) state_words: u64,
    /// The first word of what is found of rows of logits.
    pub(crate) of_logits: u32,
    /// The first of a word for each segment: the position of its first token.
    pub(crate) positions: u32,
}

/// What the host gets of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wanted {
    /// All of them.
    Logits,
    /// A word: the token of the largest, or, with [`NO_TOKEN`](crate::kernels::NO_TOKEN), the first that is not finite.
    Likeliest,
    /// So many pairs of a key and a token, those of the largest first.
    TopK(usize),
}

/// A pass under way.
pub(crate) struct Pass<'a> {
    pub(crate) recording: Recording<'a>,
    pub(crate) kernels: &'a Kernels,
    pub(crate) weights: &'a DeviceWeights,
    pub(crate) arena: &'a DeviceMemory,
    pub(crate) plan: &'a ArenaPlan,
    pub(crate) room: Room,
    /// In the order in which the program asks for them.
    pub(crate) given: &'a [Given],
    /// The most bytes of a buffer that a kernel is shown.
    pub(crate) window: u64,
    /// What windows begin at multiples of.
    pub(crate) alignment: u64,
    /// And what kernels are shown of a reservation.
    pub(crate) shown_alignment: u64,
    pub(crate) size: PassSize,
    /// What the host gets of each row of logits.
    pub(crate) wanted: Wanted,
    /// Whether the first of what the host gives is what the processor has computed before.
    pub(crate) is_begun: bool,
    /// How the tokens of an image see one another.
    pub(crate) image_attention: ImageAttention,
    /// [`VulkanConfig::merge_partitions`](crate::VulkanConfig::merge_partitions).
    pub(crate) merge_partitions: Option<bool>,
}

impl<'a> Pass<'a> {
    /// Records all `actions`, leaves the logits where the host reads them, and submits it.
    ///
    /// # Errors
    /// What the device refuses.
    pub(crate) fn run(
        mut self,
        actions: &[Action],
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        // The first words of what the host gives.
        let positions = Bound::Memory {
            memory: self.arena,
            offset: 4 * u64::from(self.room.positions),
            length: 4 * segments.len() as u64,
        };
        self.recording.take_input(0, positions)?;
        self.recording.barrier()?;
        if self.is_begun {
            self.take_given()?;
        }
        // Recording takes a fraction of what the device does, which soon has enough to begin with.
        let ends = [actions.len().div_ceil(16), actions.len().div_ceil(4)];
        for (number, action) in actions.iter().enumerate() {
            if ends.contains(&number) {
                self.recording.submit_part()?;
            }
            self.action(action, segments)?;
        }
        self.recording.submit()?;
        Ok(())
    }

    fn action(&mut self, action: &Action, segments: &[Segment<'_>]) -> Result<(), DeviceError> {
        match *action {
            Action::Op(ref op) => return self.op(op, segments),
            Action::Products(ref op) => self.products_of_quantized(op)?,
            Action::Prepare(ref prepare) => self.prepare(prepare)?,
            Action::Gate {
                gating,
                gate,
                up,
                width,
            } => {
                let rows = (self.size.tokens, width);
                let quantized = self.quantized(rows);
                self.quantize((gate, Some((up, gating))), &quantized)?;
            }
            Action::Heads(ref heads) => self.heads(heads, segments)?,
            Action::Attend(ref op) => {
                if let Op::Attend { ref shape, .. } = *op {
                    let width = shape.query_heads * shape.value_dim;
                    let quantized = self.quantized((self.size.tokens, width));
                    return self.attend(op, Some(&quantized), segments);
                }
            }
        }
        self.recording.barrier()?;
        Ok(())
    }

    fn op(&mut self, op: &Op, segments: &[Segment<'_>]) -> Result<(), DeviceError> {
        match *op {
            // The host has made them.
            Op::Embed { .. } | Op::Rotations { .. } | Op::PlaceImages { .. } => {
                return self.take_given();
            }
            Op::Positions { .. } | Op::CheckFinite { .. } => return Ok(()),
            Op::Norm {
                norm,
                weight,
                input,
                output,
                rows,
                groups,
                width,
            } => {
                let centered = norm.kind != NormKind::Rms;
                let how = (norm.epsilon, centered, [weight, None]);
                self.norm(how, [input, output], rows, [groups, width])?;
            }
            Op::BiasedNorm {
                epsilon,
                weight,
                bias,
                input,
                output,
                rows,
                width,
            } => {
                let how = (epsilon, true, [Some(weight), Some(bias)]);
                self.norm(how, [input, output], rows, [1, width])?;
            }
            Op::Product {
                input,
                blocks,
                rows,
                columns,
                ref outputs,
                function,
            } => self.products([input, blocks], (rows, columns), (outputs, function))?,
            Op::Rotate {
                heads_of,
                table,
                heads,
                head_dim,
                dimensions,
                style,
            } => self.rotate([heads_of, table], [heads, head_dim, dimensions], style)?,
            Op::Store {
                layer,
                keys,
                values,
                width,
            } => {
                self.transform((Layer(layer), Side::Key), (keys, width), segments)?;
                if let Some(values) = values {
                    self.transform((Layer(layer), Side::Value), (values, width), segments)?;
                }
                self.store((Layer(layer), Side::Key), keys, width, segments)?;
                if let Some(values) = values {
                    self.store((Layer(layer), Side::Value), values, width, segments)?;
                }
            }
            Op::Attend { .. } => return self.attend(op, None, segments),
            Op::Route { .. } => self.route(op)?,
            Op::RouteToAll {
                ref routing,
                routes,
            } => self.route_to_all(routing, routes)?,
            Op::ExpertProduct { .. } => self.expert_products(op)?,
            Op::CombineExperts { .. } => self.combine_experts(op)?,
            Op::Convolve { .. } => self.convolve(op, segments)?,
            Op::Scan { .. } => self.scan(op, segments)?,
            Op::Columns {
                from,
                to,
                heads,
                columns,
                beside: _,
            } => self.columns([from, to], heads, columns)?,
            Op::MatchMagnitude {
                values,
                like,
                least,
                rows,
                width,
            } => self.magnitude((values, Some(like)), [least, 0.0], rows, width)?,
            Op::KeepOutliers {
                values,
                deviations,
                width,
            } => self.magnitude((values, None), [0.0, deviations], Rows::Tokens, width)?,
            Op::Choose { from, to, width } => self.choose([from, to], width, segments)?,
            Op::Return { output } => return self.leave(output),
            Op::Temperature {
                queries,
                factors,
                width,
                ..
            } => {
                self.take_given()?;
                let count = self.size.tokens * width;
                let constants = Elementwise {
                    width: number(width),
                    factors: self.word(factors),
                    stride: 1,
                    ..Elementwise::default()
                };
                self.elements(Elements::ScaleRows, [queries; 2], count, constants)?;
            }
            _ => self.elements_of(op)?,
        }
        self.recording.barrier()?;
        Ok(())
    }

    pub(crate) fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.size.tokens,
            Rows::Logits => self.size.logit_rows,
        }
    }

    /// The first word of a slot in the arena.
    pub(crate) fn word(&self, slot: Slot) -> u32 {
        number(self.plan.placement(slot).offset / 4)
    }

    /// All activations.
    pub(crate) fn activations(&self) -> Bound<'a> {
        whole(self.arena)
    }

    /// Part of a slot, from the byte `start` of it on.
    fn part(&self, slot: Slot, start: usize, bytes: usize) -> Bound<'a> {
        Bound::Memory {
            memory: self.arena,
            offset: (self.plan.placement(slot).offset + start) as u64,
            length: bytes as u64,
        }
    }

    /// Rows that the host gives come to their slot.
    fn take_given(&mut self) -> Result<(), DeviceError> {
        let mut taken = 0;
        loop {
            let Some((next, rest)) = self.given.split_first() else {
                unreachable!("the host gives what the program asks for")
            };
            self.given = rest;
            if next.elements > 0 {
                let to = self.part(next.slot, 4 * next.at, 4 * next.elements);
                self.recording.take_input(4 * next.start as u64, to)?;
            }
            taken += next.elements;
            if !next.more {
                break;
            }
        }
        if taken > 0 {
            self.recording.barrier()?;
        }
        Ok(())
    }

    /// Logits, or what is wanted of them, go to where the host reads them.
    fn leave(&mut self, output: Slot) -> Result<(), DeviceError> {
        let (rows, width) = (
            self.size.logit_rows,
            self.plan.placement(output).shape.width,
        );
        let left = match self.wanted {
            _ if rows == 0 => return Ok(()),
            Wanted::Logits => self.part(output, 0, 4 * rows * width),
            Wanted::Likeliest => self.likeliest(output, [rows, width])?,
            Wanted::TopK(count) => self.top_k(output, [rows, width], count)?,
        };
        self.recording.leave_output(left, 0)
    }

    /// Picks the rows that segments ask for.
    fn choose(
        &mut self,
        [from, to]: [Slot; 2],
        width: usize,
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        let (mut rows, mut end) = (0, 0);
        for segment in segments {
            end += segment.tokens.len();
            let wanted = segment.logit_rows();
            if wanted > 0 {
                let bytes = 4 * wanted * width;
                let source = self.part(from, 4 * (end - wanted) * width, bytes);
                let target = self.part(to, 4 * rows * width, bytes);
                self.recording.copy(source, target)?;
            }
            rows += wanted;
        }
        Ok(())
    }

    /// Where a vector begins among all, if there is one.
    pub(crate) fn vector(&self, vector: Option<VectorId>) -> u32 {
        vector.map_or(NONE, |vector| self.weights.vector(vector))
    }

    pub(crate) fn activations_and_vectors(&self) -> [Bound<'a>; WINDOWS] {
        let mut windows = self.only_activations();
        windows[1] = whole(self.weights.vectors());
        windows
    }

    pub(crate) fn only_activations(&self) -> [Bound<'a>; WINDOWS] {
        let mut windows = [Bound::Unused; WINDOWS];
        windows[0] = self.activations();
        windows
    }

    pub(crate) fn dispatch(
        &mut self,
        kernel: &'a ComputeKernel,
        windows: [Bound<'a>; WINDOWS],
        constants: &impl Constants,
        groups: [u32; 3],
    ) -> Result<(), DeviceError> {
        self.recording
            .dispatch(kernel, windows, constants.words(), groups)
    }
}

/// All of a piece of memory.
pub(crate) fn whole(memory: &DeviceMemory) -> Bound<'_> {
    Bound::Memory {
        memory,
        offset: 0,
        length: memory.length().get(),
    }
}

/// Workgroups for so many threads.
pub(crate) fn grid(threads: u32) -> [u32; 3] {
    let groups = threads.div_ceil(THREADS);
    let across = groups.min(MOST_GROUPS);
    [across, groups.div_ceil(across.max(1)), 1]
}

/// A number as kernels take it.
///
/// # Panics
/// For one beyond 32 bits: what kernels are shown is shorter.
pub(crate) fn number(value: usize) -> u32 {
    u32::try_from(value).expect("what kernels are shown has fewer than 2^32 words")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_beyond_what_a_device_takes_one_way_go_the_other_too() {
        assert_eq!(grid(0), [0, 0, 1]);
        assert_eq!(grid(129), [2, 1, 1]);
        let [across, down, _] = grid(128 * 100_000);
        assert!(across <= MOST_GROUPS && across * down >= 100_000);
    }
}
