//! One partition of rows for the queries of a task.

mod columns;

use std::marker::PhantomData;
use std::ops::Range;

use super::ahead::Ahead;
use super::arithmetic::{Arithmetic, InBf16, InF32};
use super::elements::{Pair, with_element};
use super::integers::{
    HALVES, IntegerRows, Integers, KeyBlock, PackIntegers, QuantizeQueries, QueryBlock,
};
use super::rows::{BlockRows, Convert};
use super::scores;
use super::softmax::{Cap, Chunk, Soften};
use super::stored::{Next, StoredRows};
use super::values::{Panels, Stored, Sums};
use super::{
    Attention, AttentionShape, BLOCK_ROWS, PANEL_ROWS, PARTITION, PARTITION_CHUNKS, QUERIES,
    QUERY_CHUNKS, TOKENS_AHEAD, Task,
};
use crate::element::ElementType;
use crate::elementwise::activation::SoftCap;
use crate::simd::{Kernel, LANES, Simd, each};
use crate::view::View;

/// Queries of one part from which on a copy of the keys and values pays, measured with AVX-512 and AVX2 on rows of 128 elements.
fn many(keys: ElementType, queries: usize, rounded: bool) -> usize {
    let floats = match keys {
        // Their copy is packed for products of bytes.
        ElementType::Q8_0 => return 9,
        // Rows are converted once for four queries, or for what is left of them.
        _ if queries.is_multiple_of(4) => 64,
        _ => 32,
    };
    // Rounding takes as long as before, and multiplying half.
    if rounded { floats / 2 } else { floats }
}

/// How scores are computed. Results differ only between integers and the others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    Rows,
    Columns,
    IntegerRows,
    Integers,
}

/// Whether K and V are better copied than read as they are stored, or have to be.
fn is_many(attention: &Attention<'_>, task: &Task) -> bool {
    let (shape, queries) = (attention.shape, task.tokens * attention.part);
    let rounded = attention.rounded.is_some();
    queries >= many(attention.k.layout().element, queries, rounded)
        // There is room for more of those that are copied for.
        || queries > shape.most_queries()
        // What is read as stored is whole pairs of chunks; of a copy the last chunk may be alone.
        || !shape.head_dim.is_multiple_of(2 * LANES)
        || !shape.value_dim.is_multiple_of(2 * LANES)
}

/// What one worker needs to go through a partition.
pub(super) struct Buffers {
    /// `[queries, chunks]`, in the order part, token, query head of the part; not of those in columns.
    queries: Box<[Chunk]>,
    /// The same in integers.
    integers: Box<[QueryBlock]>,
    /// One pair of chunks of a head's values.
    values: Box<[[Chunk; 2]; PANEL_ROWS]>,
    /// ... and their units.
    units: Box<[u16; PANEL_ROWS]>,
    key_blocks: Box<[KeyBlock]>,
    copy: Box<[u8]>,
    /// `[queries, PARTITION_CHUNKS]`, or `[PARTITION, queries]` of a tile of columns: scores, then weights.
    scores: Box<[Chunk]>,
    columns: columns::Buffers,
}

impl Buffers {
    pub(super) fn new() -> Self {
        const CHUNKS: usize = AttentionShape::MAX_HEAD_DIM / LANES;
        let chunks = |n: usize| vec![Chunk::ZERO; n].into_boxed_slice();
        let copy = LANES * ElementType::F32.bytes(AttentionShape::MAX_HEAD_DIM);
        Self {
            queries: chunks(QUERY_CHUNKS),
            integers: vec![QueryBlock::ZERO; QUERY_CHUNKS / 2].into_boxed_slice(),
            values: Box::new([[Chunk::ZERO; 2]; _]),
            units: Box::new([0; _]),
            key_blocks: vec![KeyBlock::ZERO; CHUNKS / 2 * HALVES].into_boxed_slice(),
            copy: vec![0; copy].into_boxed_slice(),
            scores: chunks(QUERIES * PARTITION_CHUNKS),
            columns: columns::Buffers::new(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let Self {
            queries,
            integers,
            values,
            units,
            key_blocks,
            copy,
            scores,
            columns,
        } = self;
        size_of_val(&**queries)
            + size_of_val(&**integers)
            + size_of_val(&**values)
            + size_of_val(&**units)
            + size_of_val(&**key_blocks)
            + size_of_val(&**copy)
            + size_of_val(&**scores)
            + columns.bytes()
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
            Method::Rows => match loaded.rounded() {
                Some(rounded) => loaded.load(s, rounded),
                None => loaded.load(s, InF32),
            },
            // One part after the other, in each partition.
            Method::Columns => loaded.buffers.columns.forget_queries(),
            Method::IntegerRows | Method::Integers => {
                loaded.load(s, InF32);
                loaded.quantize(s);
            }
        }
        loaded
    }

    /// Whether numbers are rounded to bf16; those of keys in integers are not.
    fn rounded(&self) -> Option<InBf16> {
        let integers = self.attention.k.layout().element == ElementType::Q8_0;
        self.attention.rounded.filter(|_| !integers).map(InBf16)
    }

    /// Of heads that are whole pairs of chunks.
    #[inline(always)]
    fn load<S: Simd, A: Arithmetic>(&mut self, s: S, arithmetic: A) {
        let (shape, task) = (self.attention.shape, self.task);
        let (scale, width) = (s.splat(shape.scale), shape.query_width());
        let mut out = self.buffers.queries.chunks_exact_mut(A::VECTORS);
        for part in task.first_part..task.first_part + task.parts {
            for token in task.all_tokens() {
                let row = token * shape.query_heads + part * self.attention.part;
                let queries = &self.attention.q[row * shape.head_dim..];
                let queries = &queries[..self.attention.part * shape.head_dim];
                for (pair, out) in queries.as_chunks::<{ 2 * LANES }>().0.iter().zip(&mut out) {
                    let chunks = pair.as_chunks::<LANES>().0;
                    let chunks = each!(scale, |c| {
                        let later = chunks[c].as_ptr().wrapping_add(TOKENS_AHEAD * width);
                        s.prefetch_line(later.cast());
                        s.mul(s.load(&chunks[c]), scale)
                    });
                    let vectors = arithmetic.neighbours(s, chunks);
                    for (vector, out) in vectors.into_iter().zip(out) {
                        s.store(vector, &mut out.0);
                    }
                }
            }
        }
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
        match self.loaded.rounded() {
            Some(rounded) => self.stored_scores_in(s, rounded, rows),
            None => self.stored_scores_in(s, InF32, rows),
        }
    }

    #[inline(always)]
    fn stored_scores_in<S: Simd, A: Arithmetic>(
        &mut self,
        s: S,
        arithmetic: A,
        rows: &Range<usize>,
    ) {
        let pairs = self.loaded.attention.shape.key_chunks() / 2;
        let count = self.loaded.queries() * pairs * A::VECTORS;
        let rows = self.stored_rows(Side::Keys, rows);
        let buffers = &mut *self.loaded.buffers;
        with_element!(
            self.loaded.attention.k.layout().element,
            |E| s.vectorize(scores::Rows::<E, A> {
                arithmetic,
                rows,
                copy: &mut buffers.copy,
                queries: &buffers.queries[..count],
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
        match self.loaded.rounded() {
            Some(rounded) => self.stored_values_in(s, rounded, rows),
            None => self.stored_values_in(s, InF32, rows),
        }
    }

    #[inline(always)]
    fn stored_values_in<S: Simd, A: Arithmetic>(
        &mut self,
        s: S,
        arithmetic: A,
        rows: &Range<usize>,
    ) {
        let rows = self.stored_rows(Side::Values, rows);
        let states = std::mem::take(&mut self.states);
        let queries = 0..self.loaded.queries();
        let mut copy = std::mem::take(&mut self.loaded.buffers.copy);
        let weights = &self.loaded.buffers.scores;
        let sums = self.sums(states, weights, &queries, self.index * PARTITION, PARTITION);
        with_element!(self.loaded.attention.v.layout().element, |E| s.vectorize(
            Stored::<E, A> {
                arithmetic,
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
