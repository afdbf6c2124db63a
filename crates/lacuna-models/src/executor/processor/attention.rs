//! Attention: queries and keys by their positions, rows stored for later tokens, and what is made of them.

use lacuna_kernels::{AttentionShape, Cpu, Mask, Smoothing};
use lacuna_kv::{Layer, Side, SmoothedKeys};

use super::sequences::{InLayer, Parts, Within, groups, rows_in_common, runs};
use super::{KEEPS, OF_ANOTHER_KIND, Pass, first};
use crate::executor::{Batch, Segment};
use crate::program::{Op, Slot, VectorId};
use crate::spec::QueryTemperature;

impl Pass<'_, '_> {
    /// Runs an operation of attention.
    pub(super) fn attention_op(&mut self, op: &Op) {
        let cpu = self.cpu;
        match *op {
            Op::Rotate {
                heads_of,
                table,
                heads,
                head_dim,
                dimensions,
                style,
            } => {
                let [rows, table] = self.scratch.slots([heads_of, table]);
                let rows = first(rows, self.size.tokens * heads * head_dim);
                let table: &mut [f32] = first(table, self.size.tokens * dimensions);
                cpu.rope(rows, heads, head_dim, style, table);
            }
            Op::Temperature {
                queries,
                positions,
                axes,
                factors,
                temperature,
                width,
            } => self.temperature([queries, positions, factors], axes, temperature, width),
            Op::Store {
                layer,
                keys,
                values,
                width,
            } => self.store(Layer(layer), keys, values, width),
            Op::Attend {
                layer,
                ref shape,
                queries,
                output,
                states,
                sinks,
            } => self.attend(Layer(layer), shape, sinks, [queries, output, states]),
            Op::AttendWithin {
                ref shape,
                queries,
                keys,
                values,
                output,
                states,
                sinks,
                windowed,
            } => {
                let slots = [queries, keys, values, output, states];
                self.attend_within(shape, sinks, slots, windowed);
            }
            _ => unreachable!("{OF_ANOTHER_KIND}"),
        }
    }

    fn temperature(&mut self, slots: [Slot; 3], axes: usize, by: QueryTemperature, width: usize) {
        let [queries, positions, factors] = self.scratch.slots(slots);
        let tokens = self.size.tokens;
        let positions: &mut [u32] = first(positions, tokens * axes);
        let factors: &mut [f32] = first(factors, tokens);
        for (factor, position) in factors.iter_mut().zip(positions.iter().step_by(axes)) {
            *factor = by.factor(*position as usize);
        }
        let queries = first(queries, tokens * width);
        self.cpu.scale_rows(queries, factors, width);
    }

    /// Stores the rows of one layer; where values are part of keys, only keys are asked for.
    fn store(&mut self, layer: Layer, keys: Slot, values: Option<Slot>, width: usize) {
        let elements = self.size.tokens * width;
        let mut recorder = self.scratch.record_keys(None);
        let [keys, values]: [&mut [f32]; 2] = match values {
            Some(values) => self
                .scratch
                .slots([keys, values])
                .map(|slot| first(slot, elements)),
            None => {
                let [keys] = self.scratch.slots([keys]);
                [first(keys, elements), &mut []]
            }
        };
        let Batch::Segments(segments) = &mut self.batch else {
            unreachable!("{KEEPS}")
        };
        if let (Some(recorder), [segment]) = (&mut recorder, &**segments) {
            recorder.keys(layer, keys, segment.sequence.len());
        }
        transform(self.cpu, segments, layer, Heads::Keys, keys);
        transform(self.cpu, segments, layer, Heads::Values, values);
        let mut start = 0;
        for segment in segments.iter_mut() {
            let end = start + segment.tokens.len();
            let new = start * width..end * width;
            segment.sequence.write(layer, |side, run| {
                let rows: &[f32] = side.of([&*keys, &*values]);
                self.cpu.store_run(run, &rows[new.clone()]);
            });
            start = end;
        }
        self.scratch.record_keys(recorder);
    }

    fn attend(
        &mut self,
        layer: Layer,
        shape: &AttentionShape,
        sinks: Option<VectorId>,
        slots: [Slot; 3],
    ) {
        let Batch::Segments(segments) = &self.batch else {
            unreachable!("{KEEPS}")
        };
        let sinks = sinks.map(|sinks| self.weights.vector(sinks));
        let mut recorder = self.scratch.record_keys(None);
        let [queries, output, states] = self.scratch.slots(slots);
        let heads = self.size.tokens * shape.query_heads;
        let queries: &mut [f32] = first(queries, heads * shape.head_dim);
        let output = first(output, heads * shape.value_dim);
        let states = bytemuck::cast_slice_mut(states);
        let runs = runs(segments, self.image_attention.sees_whole(shape.mask));
        let shared = match shape.mask {
            Mask::Causal if runs.is_empty() => {
                let shared = self.shared.get_or_insert_with(|| groups(segments, layer));
                for group in &mut *shared {
                    group.rows = rows_in_common(segments, &group.sequences, layer);
                }
                &**shared
            }
            _ => &[],
        };
        if let (Some(recorder), [segment]) = (&mut recorder, &**segments)
            && let Some((source, _)) = segment.sequence.geometry().rows(layer)
        {
            recorder.queries(source, queries, shape, sinks.is_some());
        }
        let sharing = shape.query_heads / shape.kv_heads;
        transform(
            self.cpu,
            segments,
            layer,
            Heads::Queries { sharing },
            queries,
        );
        let sequences = InLayer {
            segments,
            layer,
            shared,
            runs: &runs,
        };
        self.cpu
            .attention_each(output, queries, &sequences, shape, sinks, states);
        transform(self.cpu, segments, layer, Heads::Values, output);
        self.scratch.record_keys(recorder);
    }

    fn attend_within(
        &mut self,
        shape: &AttentionShape,
        sinks: Option<VectorId>,
        slots: [Slot; 5],
        windowed: bool,
    ) {
        let parts = match &self.batch {
            Batch::Texts(texts) => Parts::Texts(texts),
            Batch::Image(image) if windowed => Parts::Windows(image.windows()),
            Batch::Image(_) => Parts::Whole,
            Batch::Segments(_) => {
                unreachable!("a pass that keeps nothing is one over texts or an image")
            }
        };
        let sinks = sinks.map(|sinks| self.weights.vector(sinks));
        let [queries, keys, values, output, states] = self.scratch.slots(slots);
        let tokens = self.size.tokens;
        let heads = tokens * shape.query_heads;
        let queries: &mut [f32] = first(queries, heads * shape.head_dim);
        let output = first(output, heads * shape.value_dim);
        let states = bytemuck::cast_slice_mut(states);
        let within = Within {
            parts,
            tokens,
            shape,
            keys,
            values,
        };
        self.cpu
            .attention_each(output, queries, &within, shape, sinks, states);
    }
}

/// What is transformed as the rows of a layer are.
#[derive(Debug, Clone, Copy)]
enum Heads {
    /// Keys to be stored.
    Keys,
    /// Queries of them, so many of which read one head.
    Queries { sharing: usize },
    /// Values to be stored, or, back again, what has been made of them.
    Values,
}

/// Transforms what goes with the rows of a layer as these are. `x` has as many elements for each token, or none.
fn transform(cpu: &Cpu, segments: &[Segment<'_>], layer: Layer, heads: Heads, x: &mut [f32]) {
    let tokens: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
    let width = x.len() / tokens.max(1);
    let side = match heads {
        Heads::Keys | Heads::Queries { .. } => Side::Key,
        Heads::Values => Side::Value,
    };
    let rotation = |segment: &Segment<'_>| segment.sequence.geometry().rotation(layer, side);
    let is_alike = |a: &Segment<'_>, b: &Segment<'_>| {
        let [a_keys, b_keys] = [a, b].map(|it| it.sequence.geometry().key_smoothing(layer));
        let address = |keys: Option<&SmoothedKeys>| keys.map(std::ptr::from_ref);
        rotation(a) == rotation(b) && address(a_keys) == address(b_keys)
    };
    let mut rest = x;
    // Nearly always all of them, at once.
    for alike in segments.chunk_by(is_alike) {
        let tokens: usize = alike.iter().map(|segment| segment.tokens.len()).sum();
        let (x, later) = rest.split_at_mut(tokens * width);
        rest = later;
        let Some(block) = rotation(&alike[0]) else {
            continue;
        };
        match smoothing(&alike[0], layer, heads) {
            Some(by) => cpu.hadamard_of_smoothed(x, block.get(), by),
            None => cpu.hadamard(x, block.get()),
        }
    }
}

/// What is done to keys of a segment, or their queries, before they are transformed.
fn smoothing<'a>(segment: &'a Segment<'_>, layer: Layer, heads: Heads) -> Option<Smoothing<'a>> {
    let geometry = segment.sequence.geometry();
    let keys = geometry.key_smoothing(layer)?;
    let (_, rows) = geometry.rows(layer)?;
    let (centre, factors, sharing) = match heads {
        Heads::Keys => (Some(keys.centre()), keys.factors(), 1),
        Heads::Queries { sharing } => (None, keys.inverse(), sharing),
        Heads::Values => return None,
    };
    Some(Smoothing {
        centre,
        factors,
        head_dim: rows.key_dim,
        sharing,
    })
}
