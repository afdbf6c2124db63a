//! Attention as it is recorded: partitions of 64 rows, each by itself, then merged in their order.
//!
//! A token's partitions begin at multiples of 64 rows of its sequence. Tokens share the room that there is for partial
//! results: as many as fit are computed side by side, and then merged.

use std::ops::Range;

use lacuna_kernels::{AttentionShape, ElementType};
use lacuna_kv::{DeviceRows, Layer, Side};
use lacuna_models::program::{Op, Slot};
use lacuna_models::spec::Mask;
use lacuna_models::{BatchLimits, Segment};
use lacuna_pages::DeviceError;
use lacuna_pages::device::Access;
use lacuna_pages::vulkan::Bound;

use crate::arranged::BLOCK;
use crate::capability::{element_code, mask_code};
use crate::kernels::{
    ATTEND_ROWS, ATTEND_TILE, Attend, ENOUGH_GROUPS, FEW_QUERY_ROWS, MERGED_ELEMENTS, Merge, NONE,
    PARTITION, THREADS, VECTOR_BYTES,
};
use crate::part::Part;
use crate::pass::{Pass, number};
use crate::products::Quantized;
use crate::rows::device_rows;

/// Words of the partial results of one token, in so many partitions.
pub(crate) fn state_words(shape: &AttentionShape, partitions: usize) -> u64 {
    // The largest score, the sum of weights, and a weighed sum of values.
    (shape.query_heads * partitions * (shape.value_dim + 2)) as u64
}

/// Partitions that one token sees at most in a context of `rows` rows, where it sees up to `ahead` rows behind its own.
pub(crate) fn most_partitions(shape: &AttentionShape, rows: usize, ahead: usize) -> usize {
    let seen = match shape.mask {
        Mask::Window(most) | Mask::Chunk(most) => rows.min(most.get().saturating_add(ahead)),
        _ => rows,
    };
    // However the rows lie, they touch one partition more than they fill.
    (seen.div_ceil(PARTITION) + 1).min(rows.div_ceil(PARTITION).max(1))
}

/// Tokens whose partial results have room beside each other, where they are not too long.
const SIDE_BY_SIDE: usize = 64;
/// The most words for that, 32 MiB, unless one token takes more.
const MOST_STATE_WORDS: u64 = 8 << 20;

/// Words that partial results of attention in `program` get for batches up to `limits`;
/// tokens of an image may see all of it, which is no longer than a batch.
pub(crate) fn room(part: &Part, limits: BatchLimits) -> u64 {
    let images = part.model.spec().image_attention();
    let words = part.ops().map(|op| match op {
        Op::Attend { shape, .. } => {
            let whole = images.sees_whole(shape.mask);
            let ahead = if whole { limits.tokens } else { 0 };
            let one = state_words(shape, most_partitions(shape, limits.context_tokens, ahead));
            let some = one * limits.tokens.min(SIDE_BY_SIDE) as u64;
            some.min(MOST_STATE_WORDS).max(one)
        }
        _ => 0,
    });
    words.max().unwrap_or(0)
}

/// The most parts of a head whose scores are added up by themselves.
const MOST_SPLITS: usize = 8;

/// Elements of such a part: whole vectors of halves, or blocks.
fn split(head_dim: usize, element: ElementType) -> usize {
    let least = match element.block_len() {
        1 => VECTOR_BYTES / 2,
        block => block,
    };
    head_dim.div_ceil(least * MOST_SPLITS).max(1) * least
}

/// Tokens of a segment whose partial results lie side by side.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    /// In the segment.
    tokens: Range<usize>,
    /// That any of them sees.
    partitions: Range<usize>,
    /// Whether they are merged as they are computed: a token has one state then.
    merged: bool,
    /// Where its states begin, in words behind the first.
    states: u64,
}

impl Group {
    /// States that each token has room for.
    fn states_of_token(&self) -> usize {
        match self.merged {
            true => 1,
            false => self.partitions.len(),
        }
    }
}

/// What a segment of a pass, or a part of one, is to attention.
struct Sight<'a> {
    shape: &'a AttentionShape,
    /// The segment's number, and how many of its tokens come before.
    segment: usize,
    offset: usize,
    /// The position of its first token.
    position: usize,
    tokens: usize,
    /// Whether each token sees the rows of all of them.
    whole: bool,
}

impl Sight<'_> {
    /// Behind the last row that any of `tokens` sees.
    fn end(&self, tokens: &Range<usize>) -> usize {
        self.position + if self.whole { self.tokens } else { tokens.end }
    }

    /// What kernels are told of that.
    fn ahead(&self) -> u32 {
        match self.whole {
            true => number(self.position + self.tokens),
            false => 0,
        }
    }

    /// The partitions that `tokens` see.
    fn partitions(&self, tokens: &Range<usize>) -> Range<usize> {
        let first = self.shape.mask.first_row(self.position + tokens.start);
        let last = self.end(tokens) - 1;
        first / PARTITION..last / PARTITION + 1
    }

    /// Query rows of `tokens` tokens that read the same heads.
    fn query_rows(&self, tokens: usize) -> usize {
        tokens * (self.shape.query_heads / self.shape.kv_heads)
    }

    /// Whether all partitions of a token can be merged as they are computed.
    fn can_be_merged(&self) -> bool {
        self.shape.value_dim <= MERGED_ELEMENTS
    }

    /// Whether there are enough workgroups where each has all partitions of its query rows.
    fn is_wide(&self) -> bool {
        let tiles = self.query_rows(self.tokens).div_ceil(ATTEND_TILE as usize);
        tiles * self.shape.kv_heads >= ENOUGH_GROUPS
    }

    /// As many tokens from `start` on as `words` of states have room for, if any; all partitions of a token have one state
    /// where they are merged.
    fn group(&self, start: usize, used: u64, words: u64, merged: bool) -> Option<Group> {
        if merged {
            let count = (words - used) / state_words(self.shape, 1);
            let end = self.tokens.min(start + count as usize);
            let tokens = start..end;
            return (!tokens.is_empty()).then(|| Group {
                partitions: self.partitions(&tokens),
                merged,
                tokens,
                states: used,
            });
        }
        let most = self.partitions(&(start..self.tokens)).len();
        let mut count = (words - used) / state_words(self.shape, most);
        if count == 0 {
            // One token sees fewer partitions than all that follow together.
            let alone = self.partitions(&(start..start + 1)).len();
            count = u64::from(used + state_words(self.shape, alone) <= words);
        }
        let end = self.tokens.min(start + count as usize);
        let tokens = start..end;
        (!tokens.is_empty()).then(|| Group {
            partitions: self.partitions(&tokens),
            merged,
            tokens,
            states: used,
        })
    }
}

/// The tokens of a segment in runs: those of images that see all of theirs, and those between.
fn runs(segment: &Segment<'_>, whole_images: bool) -> impl Iterator<Item = (Range<usize>, bool)> {
    let end = segment.tokens.len();
    let shown = segment.shown().filter(move |_| whole_images);
    let images = shown.map(|(tokens, _)| (tokens, true));
    let mut start = 0;
    let last = (end..end, false);
    let runs = images.chain([last]).flat_map(move |(tokens, whole)| {
        let between = (start..tokens.start, false);
        start = tokens.end;
        [between, (tokens, whole)]
    });
    runs.filter(|(tokens, _)| !tokens.is_empty())
}

impl<'a> Pass<'a> {
    /// Attention of each segment's queries over the rows of its sequence, quantized if that is asked for. Ends with a
    /// barrier.
    pub(crate) fn attend(
        &mut self,
        op: &Op,
        quantized: Option<&Quantized>,
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        let Op::Attend {
            layer,
            ref shape,
            queries,
            output,
            sinks,
            ..
        } = *op
        else {
            unreachable!("it is of attention")
        };
        let (layer, to) = (Layer(layer), (output, quantized));
        let sinks = sinks.map_or(NONE, |sinks| self.weights.vector(sinks));
        let (heads, key_width) = (shape.query_heads, shape.query_heads * shape.head_dim);
        self.transform((layer, Side::Key), (queries, key_width), segments)?;
        let words = self.room.state_words;
        let mut waiting: Vec<(Merge, usize)> = Vec::new();
        let (mut used, mut before) = (0, 0);
        for (index, segment) in segments.iter().enumerate() {
            let whole_images = self.image_attention.sees_whole(shape.mask);
            for (tokens, whole) in runs(segment, whole_images) {
                let sight = Sight {
                    shape,
                    segment: index,
                    offset: tokens.start,
                    position: segment.sequence.len() + tokens.start,
                    tokens: tokens.len(),
                    whole,
                };
                let merged = self.merges(layer, &sight, segment);
                let mut start = 0;
                while start < sight.tokens {
                    let Some(group) = sight.group(start, used, words, merged) else {
                        assert!(
                            used > 0,
                            "states have room for a token: the model was refused else"
                        );
                        self.merge(shape, &mut waiting)?;
                        used = 0;
                        continue;
                    };
                    self.attend_group(layer, &sight, &group, (queries, before), segment)?;
                    let count = group.tokens.len();
                    used += state_words(shape, group.states_of_token()) * count as u64;
                    let merge = self.merging(&sight, &group, to, before);
                    waiting.push((Merge { sinks, ..merge }, count));
                    start = group.tokens.end;
                }
                before += sight.tokens;
            }
        }
        self.merge(shape, &mut waiting)?;
        self.transform(
            (layer, Side::Value),
            (output, heads * shape.value_dim),
            segments,
        )
    }

    /// Whether all partitions of what a segment's tokens see are merged as they are computed: where kernels can be shown them at
    /// once, and those of many tokens do that.
    fn merges(&self, layer: Layer, sight: &Sight<'_>, segment: &Segment<'_>) -> bool {
        let sides = Side::BOTH.map(|side| device_rows(segment, layer, side));
        let partitions = sight.partitions(&(0..sight.tokens));
        let at_once = self.shown_at_once(&sides, &partitions).count() == 1;
        let can = at_once && self.kernels.attend_tile.is_some() && sight.can_be_merged();
        can && self.merge_partitions.unwrap_or_else(|| sight.is_wide())
    }

    /// The partitions of one group, in windows of rows where a sequence is longer than what a kernel is shown.
    fn attend_group(
        &mut self,
        layer: Layer,
        sight: &Sight<'_>,
        group: &Group,
        (queries, before): (Slot, usize),
        segment: &Segment<'_>,
    ) -> Result<(), DeviceError> {
        let shape = sight.shape;
        let sides = Side::BOTH.map(|side| device_rows(segment, layer, side));
        let (mask, reach) = mask_code(shape.mask).unwrap_or((NONE, 0));
        let held = segment.sequence.first_held(layer);
        let end = sight.end(&group.tokens);
        let query_rows = sight.query_rows(group.tokens.len());
        let (kernel, at_once) = match &self.kernels.attend_tile {
            Some(tile) if group.merged || query_rows > FEW_QUERY_ROWS => (tile, ATTEND_TILE),
            _ => (&self.kernels.attend, ATTEND_ROWS),
        };
        let unit = match self.kernels.attend_tile {
            Some(_) => VECTOR_BYTES as u32,
            None => 4,
        };
        for partitions in self.shown_at_once(&sides, &group.partitions) {
            let first_row = held.max(partitions.start * PARTITION);
            let rows = first_row..end.min(partitions.end * PARTITION);
            let ([keys, values], first_row) = self.rows_of(segment, sides, &rows, Access::Read);
            let [key, value] = sides.map(|side| side.layout);
            let [key_code, value_code] =
                [key, value].map(|layout| element_code(layout.element).unwrap_or(0));
            let constants = Attend {
                queries: self.word(queries) + number(before * shape.query_heads * shape.head_dim),
                states: self.room.states + number(group.states as usize),
                query_heads: number(shape.query_heads),
                group: number(shape.query_heads / shape.kv_heads),
                key_dim: number(shape.head_dim),
                value_dim: number(shape.value_dim),
                scale: shape.scale,
                soft_cap: shape.soft_cap.unwrap_or(0.0),
                mask,
                reach,
                position: self.position(sight.segment),
                offset: number(sight.offset),
                first_token: number(group.tokens.start),
                tokens: number(group.tokens.len()),
                first_partition: number(partitions.start),
                base_partition: number(group.partitions.start),
                partitions: number(group.states_of_token()),
                first_row: number(first_row),
                key_skip: keys.skip / unit,
                key_stride: number(key.row_stride) / unit,
                value_skip: values.skip / unit,
                value_stride: number(value.row_stride) / unit,
                elements: key_code + 4 * value_code,
                ahead: sight.ahead(),
                split: number(split(shape.head_dim, key.element)),
                merged: group.merged.into(),
            };
            let windows = [self.activations(), keys.bound, values.bound, Bound::Unused];
            let grid = [
                number(shape.kv_heads),
                number(if group.merged { 1 } else { partitions.len() }),
                number(query_rows).div_ceil(at_once),
            ];
            self.dispatch(kernel, windows, &constants, grid)?;
        }
        Ok(())
    }

    /// `partitions` in parts whose rows a kernel can be shown at once.
    fn shown_at_once(
        &self,
        sides: &[DeviceRows; 2],
        partitions: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let stride = sides.iter().map(|side| side.layout.row_stride as u64).max();
        let rows = self.window.saturating_sub(self.alignment) / stride.unwrap_or(1).max(1);
        let most = (rows as usize / PARTITION).max(1);
        let end = partitions.end;
        let starts = partitions.clone().step_by(most);
        starts.map(move |start| start..end.min(start + most))
    }

    fn merging(
        &self,
        sight: &Sight<'_>,
        group: &Group,
        (output, quantized): (Slot, Option<&Quantized>),
        before: usize,
    ) -> Merge {
        let shape = sight.shape;
        let elements = before * shape.query_heads * shape.value_dim;
        let (mask, reach) = mask_code(shape.mask).unwrap_or((NONE, 0));
        Merge {
            states: self.room.states + number(group.states as usize),
            output: match quantized {
                None => self.word(output) + number(elements),
                Some(_) => NONE,
            },
            query_heads: number(shape.query_heads),
            value_dim: number(shape.value_dim),
            mask,
            reach,
            position: self.position(sight.segment),
            offset: number(sight.offset),
            first_token: number(group.tokens.start),
            base_partition: number(group.partitions.start),
            partitions: number(group.states_of_token()),
            first_block: number(elements / BLOCK),
            bytes: quantized.map_or(NONE, |to| to.bytes),
            scales: quantized.map_or(NONE, |to| to.scales),
            sums: quantized.map_or(NONE, |to| to.sums),
            ahead: sight.ahead(),
            merged: group.merged.into(),
            sinks: NONE,
        }
    }

    /// Merges what has been computed; states have room again then.
    fn merge(
        &mut self,
        shape: &AttentionShape,
        waiting: &mut Vec<(Merge, usize)>,
    ) -> Result<(), DeviceError> {
        self.recording.barrier()?;
        for (constants, tokens) in waiting.drain(..) {
            let threads = shape.query_heads * shape.value_dim.div_ceil(4);
            let grid = [number(threads).div_ceil(THREADS), number(tokens), 1];
            let (kernels, windows) = (self.kernels, self.activations_and_vectors());
            self.dispatch(&kernels.merge, windows, &constants, grid)?;
        }
        self.recording.barrier()?;
        Ok(())
    }
}
