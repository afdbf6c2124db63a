//! One partition of rows for the queries of a task.

mod columns;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::marker::PhantomData;
use std::ops::Range;

use super::arithmetic::{Arithmetic, InBf16, InF32};
use super::elements::with_element;
use super::integers::{IntegerRows, Integers, QuantizeQueries, QueryBlock};
use super::scores;
use super::softmax::{Cap, Soften};
use super::stored::{Next, StoredRows};
use super::values::{Stored, Sums};
use super::{
    Attention, AttentionShape, PARTITION, PARTITION_CHUNKS, QUERIES, QUERY_CHUNKS, TOKENS_AHEAD,
    Task,
};
use crate::activations::BLOCK;
use crate::element::ElementType;
use crate::elementwise::activation::SoftCap;
use crate::simd::{Chunk, Kernel, LANES, Simd, each};
use crate::view::View;

/// Queries of one part from which on a copy of the keys and values pays, measured with AVX-512 and AVX2 on rows of 128 elements.
fn many(queries: usize, rounded: bool) -> usize {
    // Rows as they are stored are read once for four queries, or for what is left of them.
    let many = if queries.is_multiple_of(4) { 64 } else { 32 };
    // Rounding takes as long as before, and multiplying half.
    if rounded { many / 2 } else { many }
}

/// How scores are computed. Results differ only between integers and the others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    Rows,
    IntegerRows,
    Columns,
}

/// Whether K and V are better copied than read as they are stored, or have to be.
fn is_many(simd: impl Simd, attention: &Attention<'_>, task: &Task) -> bool {
    let (shape, queries) = (attention.shape, task.tokens * attention.part);
    let rounded = attention.rounded.is_some();
    let least = match attention.is_in_tiles(simd) {
        #[cfg(target_arch = "x86_64")]
        true if attention.is_copied_once(&rows_at(attention.k)) => 1,
        // More than a tile has.
        true => LANES + 1,
        false => many(queries, rounded),
    };
    queries >= least
        // There is room for more of those that are copied for.
        || queries > shape.most_queries()
        // What is read as stored is whole pairs of chunks; of a copy the last chunk may be alone.
        || !shape.head_dim.is_multiple_of(2 * LANES)
        || !shape.value_dim.is_multiple_of(2 * LANES)
}

/// A row, if there is one: what is so of it is so of others as a rule.
#[cfg(target_arch = "x86_64")]
fn rows_at(view: &View<'_>) -> Range<usize> {
    let rows = view.rows();
    rows.start..rows.end.min(rows.start + 1)
}

/// What one worker needs to go through a partition.
pub(super) struct Buffers {
    /// `[queries, chunks]`, in the order part, token, query head of the part; not of those in columns.
    queries: Box<[Chunk]>,
    /// The same in integers.
    integers: Box<[QueryBlock]>,
    copy: Box<[u8]>,
    /// What the nibbles of one head of sixteen rows stand for.
    named: Box<[Integers]>,
    /// `[queries, PARTITION_CHUNKS]`, or `[PARTITION, queries]` of a tile of columns: scores, then weights.
    scores: Box<[Chunk]>,
    columns: columns::Buffers,
}

impl Buffers {
    pub(super) fn new() -> Self {
        let chunks = |n: usize| vec![Chunk::ZERO; n].into_boxed_slice();
        let copy = LANES * ElementType::F32.bytes(AttentionShape::MAX_HEAD_DIM);
        Self {
            queries: chunks(QUERY_CHUNKS),
            integers: vec![QueryBlock::ZERO; QUERY_CHUNKS / 2].into_boxed_slice(),
            copy: vec![0; copy].into_boxed_slice(),
            named: vec![Integers::ZERO; AttentionShape::MAX_HEAD_DIM / BLOCK].into_boxed_slice(),
            scores: chunks(QUERIES * PARTITION_CHUNKS),
            columns: columns::Buffers::new(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let Self {
            queries,
            integers,
            copy,
            named,
            scores,
            columns,
        } = self;
        size_of_val(&**queries)
            + size_of_val(&**integers)
            + size_of_val(&**copy)
            + size_of_val(&**named)
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

impl<'a> Loaded<'a> {
    /// Loads the queries, scaled, the way the keys need them.
    #[inline(always)]
    pub(super) fn new<S: Simd>(
        s: S,
        attention: &'a Attention<'a>,
        task: Task,
        buffers: &'a mut Buffers,
    ) -> Self {
        let method = match is_many(s, attention, &task) {
            true => Method::Columns,
            false if attention.integer_keys() => Method::IntegerRows,
            false => Method::Rows,
        };
        let mut loaded = Self {
            attention,
            task,
            method,
            buffers,
        };
        match method {
            // Packed for each partition.
            Method::Rows if attention.is_in_tiles(s) => {}
            Method::Rows => match attention.rounded {
                Some(rounded) => loaded.load(s, InBf16(rounded)),
                None => loaded.load(s, InF32),
            },
            // One part after the other, in each partition.
            Method::Columns => loaded.buffers.columns.forget_queries(),
            Method::IntegerRows => {
                loaded.load(s, InF32);
                loaded.quantize(s);
            }
        }
        loaded
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

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let start = self.index * PARTITION;
        let seen = attention.sight(task.first_token).of_tokens(task.tokens);
        let rows = seen.start.max(start)..seen.end.min(start + PARTITION);
        self.states.fill(Chunk::ZERO);
        #[cfg(target_arch = "x86_64")]
        if let Some(tiles) = self.loaded.attention.in_tiles(s) {
            return self.in_tiles(s, tiles, &rows);
        }
        match self.loaded.method {
            Method::Columns => return self.columns(s, &rows),
            Method::IntegerRows => self.stored_integer_scores(s, &rows),
            Method::Rows => self.stored_scores(s, &rows),
        }
        self.soften(s);
        self.stored_values(s, &rows);
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
        match self.loaded.attention.rounded {
            Some(rounded) => self.stored_scores_in(s, InBf16(rounded), rows),
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
            integers: unreachable!("their scores are sums of integers")
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
            named: &mut buffers.named,
            queries: &buffers.integers[..count],
            scores: &mut buffers.scores,
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
        match self.loaded.attention.rounded {
            Some(rounded) => self.stored_values_in(s, InBf16(rounded), rows),
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
}
