//! A model in device memory, and a pass over it: what the host makes, one submission, and what comes back.
//!
//! Nothing is allocated for a pass once a longer one has been: what the host gives lies in a vector that stays, commands
//! and descriptor sets in those of the passes before.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use lacuna_kernels::Cpu;
use lacuna_kv::Geometry;
use lacuna_models::plan::ArenaPlan;
use lacuna_models::program::{Op, Slot};
use lacuna_models::{
    BatchLimits, Executor, ExecutorCounters, ExecutorError, ExecutorMemory, ForwardError,
    KernelTime, Likeliest, PassSize, Scratch, Segment, TokenLogit,
};
use lacuna_pages::vulkan::{Compute, ComputeCounters, DeviceMemory, DriverIdentity, VulkanQueue};
use lacuna_pages::{ByteLength, DeviceError};

use crate::capability::has_parts_of_images;
use crate::device::VulkanConfig;
use crate::fused::{Action, quantized_bytes};
use crate::kernels::{KeptKernels, Kernels, NO_TOKEN, PARTITION, PRODUCT_ROWS};
use crate::part::Part;
use crate::pass::{Given, Pass, Room, Wanted};
use crate::weights::{DeviceWeights, in_blocks};
use crate::{attention, fused, likeliest, top_k};

/// What begins behind the slots does at multiples of so many bytes.
const ALIGNMENT: usize = 64;

/// A model in the memory of a Vulkan device.
#[derive(Debug)]
pub(crate) struct VulkanExecutor {
    part: Part,
    /// Activations of what the processor computes before, where that is something.
    before: Option<Scratch>,
    plan: ArenaPlan,
    actions: Vec<Action>,
    room: Room,
    weights: DeviceWeights,
    kernels: Kernels,
    arena: DeviceMemory,
    compute: Compute,
    window: u64,
    merge_partitions: Option<bool>,
    staging_bytes: u64,
    /// What the host gives, and where it goes.
    input: Vec<f32>,
    given: Vec<Given>,
    positions: Vec<u32>,
    tokens: Vec<u32>,
    logits: Vec<f32>,
    /// What a pass leaves in place of rows of logits, and what that says.
    words: Vec<u32>,
    likeliest: Vec<Likeliest>,
    top_k: Vec<TokenLogit>,
    read_back_bytes: u64,
}

impl VulkanExecutor {
    /// Brings `part`, all of which the device can run, to the device.
    ///
    /// # Errors
    /// [`ExecutorError::Window`] for what kernels cannot be shown, and what the device refuses.
    pub(crate) fn new(
        device: String,
        queue: &VulkanQueue,
        (config, kept): (VulkanConfig, Option<(&Path, DriverIdentity)>),
        part: Part,
        geometry: &Geometry,
        plan: &ArenaPlan,
    ) -> Result<Self, ExecutorError> {
        let (limits, model) = (plan.limits(), &part.model);
        let input = input_elements(&part, limits);
        let logits = limits.logit_rows * model.spec().vocabulary;
        let mut compute = queue.compute(4 * input, 4 * logits)?;
        let window = config.window.map_or(u64::MAX, ByteLength::get);
        let window = window.min(compute.largest_window()) / 4 * 4;
        let actions = fused::actions(&part, plan, in_blocks(geometry));
        let (room, arena_bytes) = room(&part, plan, &actions);
        let too_long = |what, needed| {
            Err(ExecutorError::Window {
                device: device.clone(),
                what,
                needed,
                most: window,
            })
        };
        if arena_bytes > compute.largest_window() {
            return too_long("the activations of a batch", arena_bytes);
        }
        let reach = compute.alignment();
        // Kernels are shown nothing of the processor's layers.
        let geometry = &geometry.without_host_layers();
        let rows = geometry.own_rows().flat_map(|(_, rows)| {
            let sides = lacuna_kv::Side::BOTH.map(|side| geometry.row_bytes(&rows, side) as u64);
            sides.into_iter()
        });
        let partition = rows.max().unwrap_or(0) * PARTITION as u64 + reach;
        if partition > window {
            return too_long("a partition of KV rows", partition);
        }
        let states = (0..geometry.layers().len())
            .map(|layer| 4 * geometry.state_elements(lacuna_kv::Layer(layer)) as u64);
        let state = states.max().unwrap_or(0) + reach;
        if state > window {
            return too_long("the state of a layer", state);
        }
        let integer_dot = config.uses_integer_dot(&compute);
        let kept = kept
            .map(|(folder, identity)| KeptKernels::open(folder, identity, &mut compute))
            .transpose()?;
        let kernels = Kernels::new(
            &compute,
            &DeviceWeights::wanted(&part, geometry),
            integer_dot,
        )?;
        if let Some(kept) = kept {
            kept.keep(&compute);
        }
        let weights = DeviceWeights::upload(queue, &part)?;
        let rows = weights.longest_row() * u64::from(PRODUCT_ROWS) + reach;
        if rows > window {
            return too_long("eight rows of a matrix", rows);
        }
        let axes = model.spec().position_axes();
        let before = part.split.as_ref();
        let before = before.map(|_| Scratch::new(model.program(), plan.clone()));
        Ok(Self {
            arena: queue.memory(ByteLength::new(arena_bytes))?,
            before: before.transpose()?,
            part,
            actions,
            room,
            plan: plan.clone(),
            weights,
            kernels,
            compute,
            window,
            merge_partitions: config.merge_partitions,
            staging_bytes: 4 * (input + logits) as u64,
            input: Vec::with_capacity(input),
            given: Vec::new(),
            positions: Vec::with_capacity(limits.tokens * axes),
            tokens: Vec::with_capacity(limits.tokens),
            logits: vec![0.0; logits],
            words: Vec::new(),
            likeliest: Vec::with_capacity(limits.logit_rows),
            top_k: Vec::new(),
            read_back_bytes: 0,
        })
    }

    /// Computes the processor's part of a pass, if it has one, and gives what the device takes of that.
    fn begin(
        &mut self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        tokens: usize,
    ) -> Result<(), ForwardError> {
        self.input.clear();
        self.given.clear();
        let positions = segments.iter().map(|segment| segment.sequence.len() as u32);
        self.input.extend(positions.map(f32::from_bits));
        let (Some(split), Some(scratch)) = (&self.part.split, &mut self.before) else {
            return Ok(());
        };
        let model = &self.part.model;
        model.begin(cpu, segments, scratch, split)?;
        for &(slot, width) in split.handed() {
            let rows = scratch.rows(slot, tokens * width);
            self.given.push(Given {
                start: self.input.len(),
                elements: rows.len(),
                more: true,
                ..Given::nothing(slot)
            });
            self.input.extend_from_slice(rows);
        }
        if let Some(last) = self.given.last_mut() {
            last.more = false;
        }
        // Those of the part before say where the tokens are.
        for op in model.program().position_ops() {
            if let Op::Positions { first, .. } = *op {
                self.positions.clear();
                for segment in &*segments {
                    model.positions(segment, first, &mut self.positions);
                }
            }
        }
        Ok(())
    }

    /// Makes what the host gives beside that: rows of the embedding table, and tables of rotations.
    fn give(&mut self, cpu: &Cpu, segments: &[Segment<'_>]) {
        self.tokens.clear();
        for segment in segments {
            self.tokens.extend_from_slice(segment.tokens);
        }
        let part = self.part.clone();
        let model = &part.model;
        for op in part.ops() {
            match *op {
                Op::Embed { table, output, .. } => {
                    let width = model.columns(table);
                    let tokens = &self.tokens;
                    let rows = add(&mut self.input, tokens.len() * width);
                    model.look_up(cpu, table, tokens, rows);
                    let elements = rows.len();
                    self.note(output, elements);
                }
                Op::Positions { first, .. } => {
                    self.positions.clear();
                    for segment in segments {
                        model.positions(segment, first, &mut self.positions);
                    }
                }
                Op::Rotations {
                    rope,
                    output,
                    width,
                    ..
                } => {
                    let context = self.plan.limits().context_tokens;
                    let rows = add(&mut self.input, self.tokens.len() * width);
                    model.rotations(cpu, (rope, context), &self.positions, rows);
                    let elements = rows.len();
                    self.note(output, elements);
                }
                Op::PlaceImages { hidden, width } => {
                    self.given.push(Given::nothing(hidden));
                    let mut start = 0;
                    for segment in segments {
                        for (tokens, rows) in segment.shown() {
                            self.input.extend_from_slice(rows);
                            self.note(hidden, rows.len());
                            if let [.., before, last] = &mut self.given[..] {
                                (before.more, last.at) = (true, (start + tokens.start) * width);
                            }
                        }
                        start += segment.tokens.len();
                    }
                }
                Op::Temperature {
                    factors,
                    temperature,
                    axes,
                    ..
                } => {
                    // Of positions of several numbers the first counts.
                    let positions = self.positions.iter().step_by(axes);
                    self.input
                        .extend(positions.map(|&position| temperature.factor(position as usize)));
                    self.note(factors, self.tokens.len());
                }
                _ => {}
            }
        }
    }

    /// The last `elements` of the input are rows of `slot`.
    fn note(&mut self, slot: Slot, elements: usize) {
        self.given.push(Given {
            start: self.input.len() - elements,
            elements,
            ..Given::nothing(slot)
        });
    }

    /// Computes a pass, and gets what is wanted of its rows of logits. Returns how many these are.
    fn pass(
        &mut self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        wanted: Wanted,
    ) -> Result<usize, ForwardError> {
        let size = self
            .part
            .model
            .check_segments(segments, self.plan.limits())?;
        let shows = segments.iter().any(|segment| !segment.images.is_empty());
        if shows && has_parts_of_images(&self.part.model) {
            return Err(ForwardError::NoImages);
        }
        self.begin(cpu, segments, size.tokens)?;
        self.give(cpu, segments);
        for segment in &mut *segments {
            segment.sequence.lend_device_states();
        }
        let computed = self.run(size, segments, wanted);
        // First, because whatever a lost file's zeros led to is no news.
        self.part.model.files().check()?;
        computed?;
        Ok(size.logit_rows)
    }

    /// Records and submits a pass, and reads what it leaves.
    fn run(
        &mut self,
        size: PassSize,
        segments: &[Segment<'_>],
        wanted: Wanted,
    ) -> Result<(), DeviceError> {
        let alignment = self.compute.alignment();
        let shown_alignment = self.compute.shown_alignment();
        // Batches of one size that leave the same are likely to be recorded alike.
        let mut hasher = DefaultHasher::new();
        (size.tokens, size.logit_rows, segments.len(), wanted).hash(&mut hasher);
        let class = hasher.finish();
        let pass = Pass {
            recording: self
                .compute
                .begin(bytemuck::cast_slice(&self.input), class)?,
            kernels: &self.kernels,
            weights: &self.weights,
            arena: &self.arena,
            plan: &self.plan,
            room: self.room,
            given: &self.given,
            window: self.window,
            alignment,
            shown_alignment,
            size,
            wanted,
            is_begun: self.part.split.is_some(),
            image_attention: self.part.model.spec().image_attention(),
            merge_partitions: self.merge_partitions,
        };
        pass.run(&self.actions, segments)?;
        let rows = size.logit_rows;
        let left: &mut [u8] = match wanted {
            Wanted::Logits => {
                let elements = rows * self.part.model.spec().vocabulary;
                bytemuck::cast_slice_mut(&mut self.logits[..elements])
            }
            Wanted::Likeliest => {
                self.words.resize(rows, 0);
                bytemuck::cast_slice_mut(&mut self.words)
            }
            Wanted::TopK(count) => {
                self.words.resize(2 * rows * count, 0);
                bytemuck::cast_slice_mut(&mut self.words)
            }
        };
        if !left.is_empty() {
            self.compute.output(left)?;
            self.read_back_bytes += left.len() as u64;
        }
        Ok(())
    }
}

impl Executor for VulkanExecutor {
    fn forward(&mut self, cpu: &Cpu, segments: &mut [Segment<'_>]) -> Result<&[f32], ForwardError> {
        let rows = self.pass(cpu, segments, Wanted::Logits)?;
        Ok(&self.logits[..rows * self.part.model.spec().vocabulary])
    }

    fn likeliest(
        &mut self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
    ) -> Result<&[Likeliest], ForwardError> {
        let rows = self.pass(cpu, segments, Wanted::Likeliest)?;
        let words = self.words[..rows].iter();
        self.likeliest.clear();
        self.likeliest
            .extend(words.map(|&word| match word & NO_TOKEN {
                0 => Likeliest::Token(word),
                _ => Likeliest::NotFinite(word - NO_TOKEN),
            }));
        Ok(&self.likeliest)
    }

    fn most_top_k(&self) -> usize {
        top_k::most(self.part.model.spec().vocabulary)
    }

    fn top_k(
        &mut self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        count: usize,
    ) -> Result<&[TokenLogit], ForwardError> {
        assert!(
            (1..=self.most_top_k()).contains(&count),
            "{count} tokens of a row"
        );
        let rows = self.pass(cpu, segments, Wanted::TopK(count))?;
        let pairs = self.words[..2 * rows * count].as_chunks().0;
        self.top_k.clear();
        self.top_k
            .extend(pairs.iter().map(|&[key, token]| TokenLogit {
                token,
                logit: top_k::logit(key),
            }));
        Ok(&self.top_k)
    }

    fn counters(&self) -> ExecutorCounters {
        let ComputeCounters {
            passes,
            submissions,
            recorded_dispatches,
        } = self.compute.counters();
        ExecutorCounters {
            passes,
            submissions,
            recorded_dispatches,
            read_back_bytes: self.read_back_bytes,
        }
    }

    fn memory(&self) -> ExecutorMemory {
        ExecutorMemory {
            weight_bytes: self.weights.bytes(),
            activation_bytes: self.arena.length().get(),
            staging_bytes: self.staging_bytes,
        }
    }

    fn time_kernels(&mut self, timed: bool) -> Result<(), ExecutorError> {
        Ok(self.compute.time_kernels(timed)?)
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>, ExecutorError> {
        Ok(self.compute.kernel_times()?)
    }
}

/// Room for `elements` more.
fn add(input: &mut Vec<f32>, elements: usize) -> &mut [f32] {
    let start = input.len();
    input.resize(start + elements, 0.0);
    &mut input[start..]
}

/// Bytes of memory that a part takes.
pub(crate) fn memory_for(part: &Part, geometry: &Geometry, plan: &ArenaPlan) -> ExecutorMemory {
    let actions = fused::actions(part, plan, in_blocks(geometry));
    let (_, activation_bytes) = room(part, plan, &actions);
    let limits = plan.limits();
    let logits = limits.logit_rows * part.model.spec().vocabulary;
    ExecutorMemory {
        weight_bytes: DeviceWeights::bytes_for(part),
        activation_bytes,
        staging_bytes: 4 * (input_elements(part, limits) + logits) as u64,
    }
}

/// Elements that the host gives the largest pass.
fn input_elements(part: &Part, limits: BatchLimits) -> usize {
    let handed = part.split.iter().flat_map(|split| split.handed());
    let handed: usize = handed.map(|(_, width)| width).sum();
    let widths = part.ops().map(|op| match op {
        Op::Embed { table, .. } => part.model.columns(*table),
        Op::PlaceImages { width, .. } => *width,
        Op::Temperature { .. } => 1,
        Op::Rotations { width, .. } => *width,
        _ => 0,
    });
    // And the position of each segment, which has a token or more.
    limits.tokens * (1 + handed + widths.sum::<usize>())
}

/// What lies behind the slots, and the bytes of all that.
fn room(part: &Part, plan: &ArenaPlan, actions: &[Action]) -> (Room, u64) {
    let limits = plan.limits();
    let word = |byte: usize| u32::try_from(byte / 4).unwrap_or(u32::MAX);
    let blocks = plan.bytes().next_multiple_of(ALIGNMENT);
    let states = (blocks + quantized_bytes(actions, limits)).next_multiple_of(ALIGNMENT);
    let state_words = attention::room(part, limits);
    let first = (states / 4) as u64 + state_words;
    let shape = [limits.logit_rows, part.model.spec().vocabulary];
    let of_logits = likeliest::room(shape).max(top_k::room(shape));
    let room = Room {
        blocks: word(blocks),
        states: word(states),
        state_words,
        of_logits: u32::try_from(first).unwrap_or(u32::MAX),
        positions: u32::try_from(first + of_logits).unwrap_or(u32::MAX),
    };
    let bytes = 4 * (first + of_logits + limits.tokens as u64);
    (room, bytes.next_multiple_of(ALIGNMENT as u64))
}
