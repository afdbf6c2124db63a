//! One partition of rows for the queries of a task.

use std::marker::PhantomData;
use std::ops::Range;

use super::ahead::Ahead;
use super::columns::{self, MOST_QUERIES, PackColumns, Seen, Tile, packed_len, tile_queries};
use super::elements::{Pair, has_units, with_element};
use super::integers::{
    HALVES, IntegerRows, Integers, KeyBlock, PackIntegers, QuantizeQueries, QueryBlock,
};
use super::rows::{BlockRows, Convert, Copy};
use super::scores;
use super::softmax::{Cap, Chunk, Soften};
use super::stored::{Next, StoredRows};
use super::values::{Panels, Stored, Sums};
use super::{
    Attention, AttentionShape, BLOCK_ROWS, COLUMN_CHUNKS, PANEL_ROWS, PARTITION, PARTITION_CHUNKS,
    QUERIES, QUERY_CHUNKS, TOKENS_AHEAD, Task,
};
use crate::element::ElementType;
use crate::elementwise::activation::SoftCap;
use crate::simd::{Kernel, LANES, Simd, padded};
use crate::view::View;

/// Queries of one part from which on a packed copy of the keys pays.
pub(super) const MANY: usize = 8;

/// How scores are computed. Results differ only between integers and the others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    Rows,
    Columns,
    IntegerRows,
    Integers,
}

/// Whether K and V are better copied than read as they are stored.
fn is_many(attention: &Attention<'_>, task: &Task) -> bool {
    let (shape, queries) = (attention.shape, task.tokens * attention.part);
    // What is read as stored is whole pairs of chunks, for one query or an even number; of a copy the last chunk may
    // be alone.
    queries >= MANY
        || (queries > 1 && queries % 2 == 1)
        || !shape.head_dim.is_multiple_of(2 * LANES)
        || !shape.value_dim.is_multiple_of(2 * LANES)
}

/// What one worker needs to go through a partition.
pub(super) struct Buffers {
    /// `[queries, chunks]`, in the order part, token, query head of the part; not of those in columns.
    queries: Box<[Chunk]>,
    /// Those of one part, packed in tiles ...
    columns: Box<[Chunk]>,
    /// ... and which part that is.
    packed: Option<usize>,
    /// All in integers.
    integers: Box<[QueryBlock]>,
    /// One pair of chunks of a head's values.
    values: Box<[[Chunk; 2]; PANEL_ROWS]>,
    /// ... and their units.
    units: Box<[u16; PANEL_ROWS]>,
    /// One head of a partition's keys and values, in f32.
    copies: [Copied; 2],
    /// What the units of those values are worth.
    copied_units: Box<[[f32; PARTITION]]>,
    /// Sums of one tile, `[elements, vectors]`.
    sums: Box<[Chunk]>,
    key_blocks: Box<[KeyBlock]>,
    copy: Box<[u8]>,
    /// `[queries, PARTITION_CHUNKS]`: scores, then weights.
    scores: Box<[Chunk]>,
}

impl Buffers {
    pub(super) fn new() -> Self {
        const CHUNKS: usize = AttentionShape::MAX_HEAD_DIM / LANES;
        let chunks = |n: usize| vec![Chunk::ZERO; n].into_boxed_slice();
        // The last vector may not be full.
        let columns = COLUMN_CHUNKS + (LANES - 1) * CHUNKS;
        let copy = LANES * ElementType::F32.bytes(AttentionShape::MAX_HEAD_DIM);
        Self {
            queries: chunks(QUERY_CHUNKS),
            columns: chunks(columns),
            packed: None,
            integers: vec![QueryBlock::ZERO; QUERY_CHUNKS / 2].into_boxed_slice(),
            values: Box::new([[Chunk::ZERO; 2]; _]),
            units: Box::new([0; _]),
            copies: [Copied::new(), Copied::new()],
            copied_units: vec![[0.0; PARTITION]; CHUNKS / 2].into_boxed_slice(),
            sums: chunks(AttentionShape::MAX_HEAD_DIM * MOST_QUERIES / LANES),
            key_blocks: vec![KeyBlock::ZERO; CHUNKS / 2 * HALVES].into_boxed_slice(),
            copy: vec![0; copy].into_boxed_slice(),
            scores: chunks(QUERIES * PARTITION_CHUNKS),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let Self {
            queries,
            columns,
            packed: _,
            integers,
            values,
            units,
            copies,
            copied_units,
            sums,
            key_blocks,
            copy,
            scores,
        } = self;
        size_of_val(&**queries)
            + size_of_val(&**columns)
            + size_of_val(&**integers)
            + size_of_val(&**values)
            + size_of_val(&**units)
            + copies.iter().map(Copied::bytes).sum::<usize>()
            + size_of_val(&**copied_units)
            + size_of_val(&**sums)
            + size_of_val(&**key_blocks)
            + size_of_val(&**copy)
            + size_of_val(&**scores)
    }
}

/// Room for the longest rows of a partition. Memory that shorter ones do not reach is never touched, so the system
/// does not give it.
struct Copied {
    elements: Vec<f32>,
    /// Where they are aligned as chunks.
    start: usize,
}

impl Copied {
    const LEN: usize = PARTITION * AttentionShape::MAX_HEAD_DIM;

    fn new() -> Self {
        let elements = vec![0.0; Self::LEN + LANES - 1];
        // If that cannot be told, rows lie across cache lines, which is slower and no more.
        let start = elements.as_ptr().align_offset(align_of::<Chunk>());
        Self {
            elements,
            start: start.min(LANES - 1),
        }
    }

    fn rows(&self) -> &[[f32; LANES]] {
        self.elements[self.start..].as_chunks().0
    }

    fn rows_mut(&mut self) -> &mut [[f32; LANES]] {
        self.elements[self.start..].as_chunks_mut().0
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.elements)
    }
}

/// A task whose queries are in its worker's buffers.
pub(super) struct Loaded<'a> {
    attention: &'a Attention<'a>,
    task: Task,
    method: Method,
    buffers: &'a mut Buffers,
}

/// The blocks of `len` rows that some rows are in: where each starts and its rows.
fn blocks(rows: &Range<usize>, len: usize) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
    let rows = rows.clone();
    let starts = (rows.start / len * len..rows.end).step_by(len);
    starts.map(move |start| (start, rows.start.max(start)..rows.end.min(start + len)))
}

impl<'a> Loaded<'a> {
    /// Loads the queries, scaled, the way the keys need them.
    #[inline(always)]
    pub(super) fn new<S: Simd>(
        s: S,
        attention: &'a Attention<'a>,
        task: Task,
        buffers: &'a mut Buffers,
    ) -> Self {
        let integers = attention.k.layout().element == ElementType::Q8_0;
        let method = match is_many(attention, &task) {
            false if !integers => Method::Rows,
            true if !integers => Method::Columns,
            false => Method::IntegerRows,
            true => Method::Integers,
        };
        let mut loaded = Self {
            attention,
            task,
            method,
            buffers,
        };
        match method {
            Method::Rows => loaded.load(s),
            // One part after the other, in each partition.
            Method::Columns => loaded.buffers.packed = None,
            Method::IntegerRows | Method::Integers => {
                loaded.load(s);
                loaded.quantize(s);
            }
        }
        loaded
    }

    #[inline(always)]
    fn load<S: Simd>(&mut self, s: S) {
        let (shape, task) = (self.attention.shape, self.task);
        let (scale, width) = (s.splat(shape.scale), shape.query_width());
        let mut out = self.buffers.queries.chunks_exact_mut(shape.key_chunks());
        for part in task.first_part..task.first_part + task.parts {
            for token in task.all_tokens() {
                let row = token * shape.query_heads + part * self.attention.part;
                let queries = &self.attention.q[row * shape.head_dim..];
                let queries = queries.chunks(shape.head_dim).take(self.attention.part);
                for (query, out) in queries.zip(&mut out) {
                    out.fill(Chunk::ZERO);
                    for (chunk, out) in query.chunks(LANES).zip(out) {
                        let later = chunk.as_ptr().wrapping_add(TOKENS_AHEAD * width);
                        s.prefetch_line(later.cast());
                        // Whole chunks without a copy of unknown length.
                        let query = match chunk.as_array() {
                            Some(whole) => s.load(whole),
                            None => s.load(&padded(chunk)),
                        };
                        s.store(s.mul(query, scale), &mut out.0);
                    }
                }
            }
        }
    }

    /// Packs the queries of a part, if they are not packed already.
    #[inline(always)]
    fn pack<S: Simd>(&mut self, s: S, part: usize) {
        if self.buffers.packed == Some(part) {
            return;
        }
        let (attention, task) = (self.attention, self.task);
        let (shape, group) = (attention.shape, attention.part);
        let (chunks, count) = (shape.key_chunks(), self.part_queries());
        s.vectorize(PackColumns {
            query: |query| {
                let token = task.first_token + query / group;
                let head = token * shape.query_heads + part * group + query % group;
                &attention.q[head * shape.head_dim..][..shape.head_dim]
            },
            count,
            scale: shape.scale,
            chunks,
            out: &mut self.buffers.columns[..packed_len(count, chunks)],
        });
        self.buffers.packed = Some(part);
    }

    #[inline(always)]
    fn quantize<S: Simd>(&mut self, s: S) {
        let count = self.queries() * self.attention.shape.key_chunks();
        s.vectorize(QuantizeQueries {
            queries: &self.buffers.queries[..count],
            out: &mut self.buffers.integers,
        });
    }

    /// Queries of one part.
    fn part_queries(&self) -> usize {
        self.task.tokens * self.attention.part
    }

    pub(super) fn queries(&self) -> usize {
        self.task.parts * self.part_queries()
    }

    fn parts(&self) -> Range<usize> {
        self.task.first_part..self.task.first_part + self.task.parts
    }

    /// The KV heads that its parts read.
    fn heads(&self) -> Range<usize> {
        let (attention, parts) = (self.attention, self.parts());
        attention.kv_head(parts.start)..attention.kv_head(parts.end - 1) + 1
    }
}

/// Fills states, `[queries, 1 + chunks]`, from the rows of one partition. The header of a query that
/// sees none of them is not a state.
pub(super) struct Partition<'a, 'b> {
    pub(super) loaded: &'a mut Loaded<'b>,
    pub(super) index: usize,
    /// The partition that this worker probably goes on with.
    pub(super) next: usize,
    pub(super) states: &'a mut [Chunk],
}

impl Kernel for Partition<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let start = self.index * PARTITION;
        let seen = attention.sight(task.first_token).of_tokens(task.tokens);
        let rows = seen.start.max(start)..seen.end.min(start + PARTITION);
        self.states.fill(Chunk::ZERO);
        if self.loaded.method == Method::Columns {
            return self.columns(s, &rows);
        }
        self.scores(s, &rows);
        self.soften(s);
        match self.loaded.method {
            Method::Integers => self.copied_values(s, &rows),
            _ => self.stored_values(s, &rows),
        }
    }
}

#[derive(Clone, Copy)]
enum Side {
    Keys,
    Values,
}

impl<'b> Partition<'_, 'b> {
    fn view(&self, side: Side) -> &'b View<'b> {
        match side {
            Side::Keys => self.loaded.attention.k,
            Side::Values => self.loaded.attention.v,
        }
    }

    /// What is to be fetched while `part` of the block of `len` rows at `start` is worked on: the next
    /// block of this side, or behind the last of `rows` the first one of what comes next.
    fn ahead(
        &self,
        side: Side,
        start: usize,
        len: usize,
        rows: &Range<usize>,
        part: usize,
    ) -> Ahead<'b> {
        let next = start + len;
        let (side, next) = match side {
            side if next < rows.end => (side, next),
            Side::Keys => (Side::Values, rows.start),
            Side::Values => (Side::Keys, self.next * PARTITION),
        };
        let fetched = next..next + len;
        let head = self.loaded.attention.kv_head(part);
        Ahead::share(self.view(side), fetched, &self.loaded.heads(), head)
    }

    /// Queries of `part`, by their place in the task, that see any of some rows.
    fn seeing(&self, part: usize, rows: Range<usize>) -> Range<usize> {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let sight = attention.sight(task.first_token);
        let tokens = sight.tokens_of(&rows, task.tokens);
        let first = (part - task.first_part) * self.loaded.part_queries();
        let group = attention.part;
        first + tokens.start * group..first + tokens.end * group
    }

    #[inline(always)]
    fn scores<S: Simd>(&mut self, s: S, rows: &Range<usize>) {
        match self.loaded.method {
            Method::Rows => return self.stored_scores(s, rows),
            Method::IntegerRows => return self.stored_integer_scores(s, rows),
            Method::Integers => {}
            Method::Columns => unreachable!("scores, weights and values are one step there"),
        }
        for (start, needed) in blocks(rows, BLOCK_ROWS) {
            for part in self.loaded.parts() {
                let mut ahead = self.ahead(Side::Keys, start, BLOCK_ROWS, rows, part);
                let block = BlockRows {
                    view: self.view(Side::Keys),
                    head: self.loaded.attention.kv_head(part),
                    start,
                    rows: needed.clone(),
                };
                self.integer_scores(s, part, &block, &mut ahead);
            }
        }
    }

    /// All of a partition, one tile of queries after the other.
    #[inline(always)]
    fn columns<S: Simd>(&mut self, s: S, rows: &Range<usize>) {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let shape = attention.shape;
        let start = self.index * PARTITION;
        let sight = attention.sight(task.first_token);
        let (count, chunks) = (self.loaded.part_queries(), shape.key_chunks());
        for part in self.loaded.parts() {
            self.loaded.pack(s, part);
            self.copy(s, part, rows);
            let seeing = self.seeing(part, start..start + PARTITION);
            let first = (part - task.first_part) * count;
            let seeing = seeing.start - first..seeing.end - first;
            let mut ahead = [Side::Keys, Side::Values].map(|side| self.behind(side, part));
            let len = tile_queries(S::REGISTERS);
            let buffers = &mut *self.loaded.buffers;
            let per_query = shape.state_chunks();
            let states = self.states[first * per_query..].chunks_mut(len * per_query);
            let tiles = buffers.columns[..packed_len(count, chunks)].chunks(len * chunks);
            for (tile, (queries, states)) in tiles.zip(states).enumerate() {
                let queries_of_tile = tile * len..count.min((tile + 1) * len);
                if queries_of_tile.end <= seeing.start || seeing.end <= queries_of_tile.start {
                    continue;
                }
                let visible = |query: usize| {
                    let token = (queries_of_tile.start + query) / attention.part;
                    sight.within(token, start, PARTITION)
                };
                let Some(seen) = Seen::new(queries_of_tile.len(), visible) else {
                    continue;
                };
                s.vectorize(Tile {
                    queries,
                    keys: columns::Rows {
                        elements: buffers.copies[0].rows(),
                        chunks,
                    },
                    tail: shape.key_tail(),
                    values: columns::Values {
                        rows: columns::Rows {
                            elements: buffers.copies[1].rows(),
                            chunks: shape.value_chunks(),
                        },
                        dim: shape.value_dim,
                        units: match has_units(attention.v.layout().element) {
                            true => &buffers.copied_units,
                            false => &[],
                        },
                    },
                    seen: &seen,
                    cap: shape.soft_cap.map(SoftCap),
                    scores: &mut buffers.scores,
                    sums: &mut buffers.sums,
                    states: &mut states[..queries_of_tile.len() * per_query],
                    ahead: &mut ahead,
                });
            }
        }
    }

    /// Copies the keys and values that a part needs.
    #[inline(always)]
    fn copy<S: Simd>(&mut self, s: S, part: usize, rows: &Range<usize>) {
        let shape = self.loaded.attention.shape;
        let start = self.index * PARTITION;
        let heads = self.loaded.heads();
        for (side, chunks) in [
            (Side::Keys, shape.key_chunks()),
            (Side::Values, shape.value_chunks()),
        ] {
            let (view, head) = (self.view(side), self.loaded.attention.kv_head(part));
            // Values are fetched while keys are copied.
            let mut ahead = match side {
                Side::Keys => Ahead::share(self.view(Side::Values), rows.clone(), &heads, head),
                Side::Values => Ahead::share(view, rows.end..rows.end, &heads, head),
            };
            let buffers = &mut *self.loaded.buffers;
            let units = matches!(side, Side::Values) && has_units(view.layout().element);
            s.vectorize(Copy {
                block: &BlockRows {
                    view,
                    head,
                    start,
                    rows: rows.clone(),
                },
                chunks,
                out: buffers.copies[side as usize].rows_mut(),
                units: units.then_some(&mut *buffers.copied_units),
                ahead: &mut ahead,
            });
        }
    }

    /// The rows of the partition that this worker probably goes on with.
    fn behind(&self, side: Side, part: usize) -> Ahead<'b> {
        let rows = self.next * PARTITION..(self.next + 1) * PARTITION;
        let head = self.loaded.attention.kv_head(part);
        Ahead::share(self.view(side), rows, &self.loaded.heads(), head)
    }

    /// Where this worker goes on behind `rows`.
    fn next(&self, side: Side, rows: &Range<usize>) -> Next<'b> {
        let (side, first_row) = match side {
            Side::Keys => (Side::Values, rows.start),
            Side::Values => (Side::Keys, self.next * PARTITION),
        };
        Next {
            view: self.view(side),
            first_row,
        }
    }

    /// Rows as they are stored.
    fn stored_rows(&self, side: Side, rows: &Range<usize>) -> StoredRows<'b> {
        StoredRows {
            view: self.view(side),
            rows: rows.clone(),
            parts: self.loaded.parts(),
            parts_per_head: self.loaded.attention.parts_per_head(),
            queries_per_part: self.loaded.part_queries(),
            next: self.next(side, rows),
        }
    }

    #[inline(always)]
    fn stored_scores<S: Simd>(&mut self, s: S, rows: &Range<usize>) {
        let count = self.loaded.queries() * self.loaded.attention.shape.key_chunks();
        let rows = self.stored_rows(Side::Keys, rows);
        let buffers = &mut *self.loaded.buffers;
        with_element!(
            self.loaded.attention.k.layout().element,
            |E| s.vectorize(scores::Rows::<E> {
                rows,
                copy: &mut buffers.copy,
                queries: buffers.queries[..count].as_chunks().0,
                scores: &mut buffers.scores,
                element: PhantomData,
            }),
            q8_0: unreachable!("scores of q8_0 keys are computed in integers")
        );
    }

    #[inline(always)]
    fn stored_integer_scores<S: Simd>(&mut self, s: S, rows: &Range<usize>) {
        let count = self.loaded.queries() * self.loaded.attention.shape.key_chunks() / 2;
        let rows = self.stored_rows(Side::Keys, rows);
        let buffers = &mut *self.loaded.buffers;
        s.vectorize(IntegerRows {
            rows,
            copy: &mut buffers.copy,
            queries: &buffers.integers[..count],
            scores: &mut buffers.scores,
        });
    }

    /// The first chunk of the scores of queries for a block.
    fn scores_at(queries: &Range<usize>, start: usize) -> Range<usize> {
        let chunk = start % PARTITION / LANES;
        let place = |query: usize| query * PARTITION_CHUNKS + chunk;
        place(queries.start)..place(queries.end).saturating_sub(PARTITION_CHUNKS - HALVES)
    }

    #[inline(always)]
    fn integer_scores<S: Simd>(
        &mut self,
        s: S,
        part: usize,
        block: &BlockRows<'_>,
        ahead: &mut Ahead<'_>,
    ) {
        let blocks = self.loaded.attention.shape.key_chunks() / 2;
        let queries = self.seeing(part, block.start..block.start + BLOCK_ROWS);
        let buffers = &mut *self.loaded.buffers;
        let keys = &mut buffers.key_blocks[..blocks * HALVES];
        s.vectorize(PackIntegers {
            block,
            copy: &mut buffers.copy,
            out: keys,
            ahead,
        });
        s.vectorize(Integers {
            keys,
            queries: &buffers.integers[queries.start * blocks..queries.end * blocks],
            scores: &mut buffers.scores[Self::scores_at(&queries, block.start)],
        });
    }

    #[inline(always)]
    fn soften<S: Simd>(&mut self, s: S) {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let sight = attention.sight(task.first_token);
        let states = self.states.chunks_exact_mut(attention.shape.state_chunks());
        let scores = self.loaded.buffers.scores.as_chunks_mut().0;
        for (query, (state, scores)) in states.zip(scores).enumerate() {
            let token = query / attention.part % task.tokens;
            let visible = sight.within(token, self.index * PARTITION, PARTITION);
            if visible.is_empty() {
                continue;
            }
            if let Some(cap) = attention.shape.soft_cap {
                s.vectorize(Cap {
                    scores,
                    visible: visible.clone(),
                    cap: SoftCap(cap),
                });
            }
            state[0] = s.vectorize(Soften { scores, visible });
        }
    }

    /// What the values of `len` rows from `start` on are added up for.
    fn sums<'c>(
        &self,
        states: &'c mut [Chunk],
        weights: &'c [Chunk],
        queries: &Range<usize>,
        start: usize,
        len: usize,
    ) -> Sums<'c> {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let (shape, per_part) = (attention.shape, self.loaded.part_queries());
        let token = queries.start % per_part / attention.part;
        let per_query = shape.state_chunks();
        Sums {
            weights: &weights[queries.start * PARTITION_CHUNKS..],
            states: &mut states[queries.start * per_query..queries.end * per_query],
            chunks: shape.value_chunks(),
            sight: attention.sight(task.first_token + token),
            group: attention.part,
            queries_per_part: per_part,
            start,
            rows: len,
        }
    }

    #[inline(always)]
    fn stored_values<S: Simd>(&mut self, s: S, rows: &Range<usize>) {
        let rows = self.stored_rows(Side::Values, rows);
        let states = std::mem::take(&mut self.states);
        let queries = 0..self.loaded.queries();
        let mut copy = std::mem::take(&mut self.loaded.buffers.copy);
        let weights = &self.loaded.buffers.scores;
        let sums = self.sums(states, weights, &queries, self.index * PARTITION, PARTITION);
        with_element!(self.loaded.attention.v.layout().element, |E| s.vectorize(
            Stored::<E> {
                rows,
                copy: &mut copy,
                sums,
                element: PhantomData,
            }
        ));
        self.loaded.buffers.copy = copy;
    }

    #[inline(always)]
    fn copied_values<S: Simd>(&mut self, s: S, rows: &Range<usize>) {
        let view = self.view(Side::Values);
        let states = std::mem::take(&mut self.states);
        for (start, needed) in blocks(rows, PANEL_ROWS) {
            for part in self.loaded.parts() {
                let mut ahead = self.ahead(Side::Values, start, PANEL_ROWS, rows, part);
                let queries = self.seeing(part, start..start + PANEL_ROWS);
                let block = BlockRows {
                    view,
                    head: self.loaded.attention.kv_head(part),
                    start,
                    rows: needed.clone(),
                };
                for pair in 0..self.loaded.attention.shape.value_chunks().div_ceil(2) {
                    s.vectorize(Convert {
                        block: &block,
                        pair,
                        out: &mut self.loaded.buffers.values[..],
                        units: &mut self.loaded.buffers.units[..],
                        ahead: &mut ahead,
                    });
                    let element = view.layout().element;
                    with_element!(element, |E| match E::UNIT {
                        Some(_) =>
                            self.panel::<S, true>(s, states, &queries, start, pair, &mut ahead),
                        None =>
                            self.panel::<S, false>(s, states, &queries, start, pair, &mut ahead),
                    });
                }
            }
        }
    }

    /// Adds a copy of one pair of chunks of the panel at `start`.
    #[inline(always)]
    fn panel<S: Simd, const HAVE_UNITS: bool>(
        &mut self,
        s: S,
        states: &mut [Chunk],
        queries: &Range<usize>,
        start: usize,
        pair: usize,
        ahead: &mut Ahead<'_>,
    ) {
        let buffers = &self.loaded.buffers;
        s.vectorize(Panels::<HAVE_UNITS> {
            values: &buffers.values,
            units: &buffers.units,
            sums: self.sums(states, &buffers.scores, queries, start, PANEL_ROWS),
            pair,
            ahead,
        });
    }
}
