//! Causal attention over views.
//!
//! Rows are processed in blocks of 16 at fixed positions (row 0, 16, 32, ..), with an online softmax
//! in f32. Blocks are grouped in partitions of 256 rows at fixed positions; each partition starts
//! from nothing, and the partitions of a query are merged in order. A block's K and V are converted
//! to f32 once for all the query heads and tokens that read it; a single token reads them as they
//! are stored, whole rows for all KV heads, and gets the same bits. So the result of a query depends on
//! the query and the rows it sees: not on the tokens beside it, on how its rows are split in runs,
//! or on how the work is split over threads.
//!
//! Causality is a loop bound: what lies behind a query's last row is never read into its result.

mod block;
mod convert;
mod softmax;

use std::num::NonZeroUsize;
use std::ops::Range;

use crate::element::ElementType;
use crate::float::{Element, F16, F32};
use crate::grid::{Block, Grid};
use crate::simd::{Kernel, LANES, Simd, padded};
use crate::threads::Pool;
use crate::view::View;
use block::{Ahead, BlockRows, converted};
use softmax::{Chunk, Converted, Scores, Stored, Values, Weights, clear, finish, merge, soften};

/// Rows per block of the online softmax.
const ROWS: usize = LANES;

/// Rows per partition.
const PARTITION: usize = 256;

/// Query rows (tokens times heads) that one task holds.
const QUERIES: usize = 64;

/// Query heads per KV head up to which a single token reads K and V without a converted copy.
const NARROW: usize = 8;

/// The sizes of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Heads of the query, a multiple of `kv_heads` and at most 64 times as many.
    pub query_heads: usize,
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Elements per head, at most 512.
    pub head_dim: usize,
    /// What a dot product of query and key is multiplied by, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Sliding window: a query sees this many rows at most, its own the last of them; earlier ones
    /// are never touched. `None`: all rows up to its own.
    pub window: Option<NonZeroUsize>,
}

impl AttentionShape {
    /// Largest supported `head_dim`.
    pub const MAX_HEAD_DIM: usize = 512;

    fn check(&self) {
        assert!(
            self.kv_heads > 0 && self.query_heads.is_multiple_of(self.kv_heads),
            "{} query heads are no multiple of {} KV heads",
            self.query_heads,
            self.kv_heads
        );
        assert!(
            (1..=QUERIES).contains(&self.group()),
            "{} query heads per KV head; 1 to {QUERIES} are supported",
            self.group()
        );
        assert!(
            (1..=Self::MAX_HEAD_DIM).contains(&self.head_dim),
            "a head dimension of {}; 1 to {} are supported",
            self.head_dim,
            Self::MAX_HEAD_DIM
        );
    }

    /// Query heads per KV head.
    fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Chunks per head.
    fn chunks(&self) -> usize {
        self.head_dim.div_ceil(LANES)
    }

    /// Chunks of the state of one query head: maximum and sum, then the weighted values.
    fn state_chunks(&self) -> usize {
        1 + self.chunks()
    }

    /// KV heads whose query heads one task holds, for one token.
    fn heads_together(&self) -> usize {
        (QUERIES / self.group()).min(self.kv_heads)
    }
}

/// What one worker needs: a block of K and V in f32, queries, and softmax states.
pub(crate) struct Buffers {
    k: Box<[Chunk]>,
    v: Box<[Chunk]>,
    queries: Box<[Chunk]>,
    weights: Box<[Weights]>,
    partial: Box<[Chunk]>,
    total: Box<[Chunk]>,
}

impl Buffers {
    pub(crate) fn new() -> Self {
        const CHUNKS: usize = AttentionShape::MAX_HEAD_DIM / LANES;
        let chunks = |n: usize| vec![Chunk::ZERO; n].into_boxed_slice();
        Self {
            k: chunks(ROWS * CHUNKS),
            v: chunks(ROWS * CHUNKS),
            queries: chunks(QUERIES * CHUNKS),
            weights: vec![Weights::ZERO; QUERIES].into_boxed_slice(),
            partial: chunks(QUERIES * (CHUNKS + 1)),
            total: chunks(QUERIES * (CHUNKS + 1)),
        }
    }
}

/// One call of [`Cpu::attention`](crate::Cpu::attention).
pub(crate) struct Attention<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a View<'a>,
    pub(crate) v: &'a View<'a>,
    pub(crate) first_position: usize,
    pub(crate) shape: &'a AttentionShape,
}

/// The queries of one task: some tokens of one KV head, or one token of some.
#[derive(Clone, Copy)]
struct Task {
    first_token: usize,
    tokens: usize,
    first_head: usize,
    heads: usize,
}

impl Task {
    /// Query heads per token.
    fn query_heads(&self, shape: &AttentionShape) -> usize {
        self.heads * shape.group()
    }

    fn all_tokens(&self) -> Range<usize> {
        self.first_token..self.first_token + self.tokens
    }

    /// Query heads of all tokens.
    fn queries(&self, shape: &AttentionShape) -> usize {
        self.tokens * self.query_heads(shape)
    }
}

/// f32 elements that splitting `tokens` queries over `rows` rows takes.
pub(crate) fn scratch_len(tokens: usize, rows: usize, shape: &AttentionShape) -> usize {
    let states = tokens * rows.div_ceil(PARTITION) * shape.query_heads;
    states * shape.state_chunks() * LANES
}

/// The partitions that some rows are in.
fn partitions_of(rows: &Range<usize>) -> Range<usize> {
    rows.start / PARTITION..rows.end.div_ceil(PARTITION)
}

impl Attention<'_> {
    /// # Panics
    /// When sizes do not fit together.
    pub(crate) fn run<W: AsMut<Buffers> + Send + 'static>(
        &self,
        pool: &Pool<W>,
        simd: impl Simd,
        out: &mut [f32],
        scratch: &mut [f32],
    ) {
        self.check(out);
        let tokens = self.tokens();
        if tokens == 0 {
            return;
        }
        let needed = scratch_len(tokens, self.rows_seen(tokens - 1).end, self.shape);
        let whole_tasks = tokens.div_ceil(self.tokens_together()) * self.shape.kv_heads;
        let few = tokens == 1 || whole_tasks < 2 * pool.threads();
        if few && pool.threads() > 1 && scratch.len() >= needed {
            self.split(pool, simd, out, &mut scratch[..needed]);
        } else {
            // Alone, a thread reads whole rows.
            let heads = match (tokens, pool.threads()) {
                (1, 1) => self.shape.heads_together(),
                _ => 1,
            };
            self.whole(pool, simd, out, heads);
        }
    }

    fn check(&self, out: &[f32]) {
        self.shape.check();
        let shape = self.shape;
        assert!(
            self.q.len().is_multiple_of(self.width()) && out.len() == self.q.len(),
            "queries and output are rows of {} elements",
            self.width()
        );
        for view in [self.k, self.v] {
            let layout = view.layout();
            assert_eq!(
                (layout.heads, layout.head_dim),
                (shape.kv_heads, shape.head_dim),
                "heads and head dimension of a cached row"
            );
            let even = layout.element.check_head_dim(shape.head_dim);
            assert!(even.is_ok(), "a head is whole blocks: {even:?}");
            let rows = self.rows_of(0..self.tokens());
            assert!(
                rows.is_empty() || (view.rows().start <= rows.start && rows.end <= view.rows().end),
                "rows {rows:?} are attended to; the view has {:?}",
                view.rows()
            );
        }
    }

    fn width(&self) -> usize {
        self.shape.query_heads * self.shape.head_dim
    }

    fn tokens(&self) -> usize {
        self.q.len() / self.width()
    }

    /// Rows that a token's queries see.
    fn rows_seen(&self, token: usize) -> Range<usize> {
        let end = self.first_position + token + 1;
        let window = self.shape.window.map_or(end, NonZeroUsize::get);
        end.saturating_sub(window)..end
    }

    /// From the first to the last row that some tokens' queries see.
    fn rows_of(&self, tokens: Range<usize>) -> Range<usize> {
        match tokens.is_empty() {
            true => 0..0,
            false => self.rows_seen(tokens.start).start..self.rows_seen(tokens.end - 1).end,
        }
    }

    /// Tokens whose query heads of one KV head a task holds.
    fn tokens_together(&self) -> usize {
        QUERIES / self.shape.group()
    }

    /// One task per tile of tokens and KV head, or one token and some heads, goes through all rows.
    fn whole<W: AsMut<Buffers> + Send + 'static>(
        &self,
        pool: &Pool<W>,
        simd: impl Simd,
        out: &mut [f32],
        heads: usize,
    ) {
        let per_head = self.shape.group() * self.shape.head_dim;
        let tokens = self.tokens_together();
        let grid = Grid::new(out, self.width(), tokens, heads * per_head);
        grid.run(pool, |out, worker| {
            let tokens = out.rows();
            let task = Task {
                first_token: tokens.start,
                tokens: tokens.len(),
                first_head: out.cols().start / per_head,
                heads: out.cols().len() / per_head,
            };
            simd.vectorize(Whole {
                attention: self,
                task,
                buffers: worker.as_mut(),
                out,
            });
        });
    }

    /// One task per token, partition and some heads; then the partitions are merged.
    fn split<W: AsMut<Buffers> + Send + 'static>(
        &self,
        pool: &Pool<W>,
        simd: impl Simd,
        out: &mut [f32],
        scratch: &mut [f32],
    ) {
        let shape = self.shape;
        let partitions = self.rows_of(0..self.tokens()).end.div_ceil(PARTITION);
        let per_query = shape.state_chunks() * LANES;
        let per_kv_head = shape.group() * per_query;
        let together = shape.heads_together();
        // Rows of the scratch are (token, partition), its columns query heads.
        let width = shape.query_heads * per_query;
        let grid = Grid::new(scratch, width, 1, together * per_kv_head);
        grid.run(pool, |out, worker| {
            let (token, partition) = (out.rows().start / partitions, out.rows().start % partitions);
            let first_head = out.cols().start / per_kv_head;
            let heads = out.cols().len() / per_kv_head;
            let task = Task {
                first_token: token,
                tokens: 1,
                first_head,
                heads,
            };
            let buffers = worker.as_mut();
            simd.vectorize(Partial {
                attention: self,
                task,
                partition,
                buffers,
                out,
            });
        });
        let scratch = &*scratch;
        let grid = Grid::new(out, self.width(), 1, shape.head_dim);
        grid.run(pool, |mut out, _| {
            let (token, head) = (out.rows().start, out.cols().start / shape.head_dim);
            let seen = partitions_of(&self.rows_seen(token));
            let rows = &scratch[token * partitions * width..][seen.start * width..];
            let states = rows.chunks_exact(width).take(seen.len());
            let states = states.map(|row| &row[head * per_query..][..per_query]);
            simd.vectorize(Merge {
                states,
                out: out.row(token),
            });
        });
    }
}

/// All rows for the queries of a task.
struct Whole<'a, 'b> {
    attention: &'a Attention<'a>,
    task: Task,
    buffers: &'a mut Buffers,
    out: Block<'b, f32>,
}

impl Kernel for Whole<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (attention, task) = (self.attention, self.task);
        let per_query = attention.shape.state_chunks();
        let queries = task.queries(attention.shape);
        load_queries(s, attention, &task, self.buffers);
        clear(&mut self.buffers.total[..queries * per_query], per_query);
        for partition in partitions_of(&attention.rows_of(task.all_tokens())) {
            let buffers = &mut *self.buffers;
            s.vectorize(Rows {
                attention,
                task,
                partition,
                buffers,
            });
            self.merge_partition(s, partition);
        }
        self.finish(s);
    }
}

impl Whole<'_, '_> {
    /// Merges the states of a partition for the queries that see its rows.
    #[inline(always)]
    fn merge_partition<S: Simd>(&mut self, s: S, partition: usize) {
        let (task, shape) = (self.task, self.attention.shape);
        for query in 0..task.queries(shape) {
            let token = task.first_token + query / task.query_heads(shape);
            if partitions_of(&self.attention.rows_seen(token)).contains(&partition) {
                let states = query * shape.state_chunks()..(query + 1) * shape.state_chunks();
                let partial = &self.buffers.partial[states.clone()];
                merge(s, &mut self.buffers.total[states], partial);
            }
        }
    }

    #[inline(always)]
    fn finish<S: Simd>(&mut self, s: S) {
        let (task, shape) = (self.task, self.attention.shape);
        let totals = self.buffers.total.chunks_exact(shape.state_chunks());
        for (query, total) in totals.enumerate().take(task.queries(shape)) {
            let heads = task.query_heads(shape);
            let out = self.out.row(task.first_token + query / heads);
            let head = query % heads * shape.head_dim;
            finish(s, total, &mut out[head..head + shape.head_dim]);
        }
    }
}

/// The rows of one partition for the queries of a task, as softmax states.
struct Partial<'a, 'b> {
    attention: &'a Attention<'a>,
    task: Task,
    partition: usize,
    buffers: &'a mut Buffers,
    out: Block<'b, f32>,
}

impl Kernel for Partial<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (attention, task, partition) = (self.attention, self.task, self.partition);
        if !partitions_of(&attention.rows_seen(task.first_token)).contains(&partition) {
            return;
        }
        load_queries(s, attention, &task, self.buffers);
        let buffers = &mut *self.buffers;
        s.vectorize(Rows {
            attention,
            task,
            partition,
            buffers,
        });
        let out = self.out.piece().as_chunks_mut::<LANES>().0;
        for (out, chunk) in out.iter_mut().zip(&self.buffers.partial) {
            *out = chunk.0;
        }
    }
}

/// Fills `buffers.partial` from one partition.
struct Rows<'a> {
    attention: &'a Attention<'a>,
    task: Task,
    partition: usize,
    buffers: &'a mut Buffers,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (attention, task, shape) = (self.attention, self.task, self.attention.shape);
        let per_query = shape.state_chunks();
        let queries = task.tokens * task.heads * shape.group();
        clear(&mut self.buffers.partial[..queries * per_query], per_query);
        let start = self.partition * PARTITION;
        let seen = attention.rows_of(task.all_tokens());
        let rows = seen.start.max(start)..seen.end.min(start + PARTITION);
        let stored =
            |view: &View<'_>| matches!(view.layout().element, ElementType::F32 | ElementType::F16);
        let direct = task.tokens == 1
            && shape.group() <= NARROW
            && shape.head_dim.is_multiple_of(LANES)
            && stored(attention.k)
            && stored(attention.v);
        for first in (rows.start / ROWS * ROWS..rows.end).step_by(ROWS) {
            let rows = rows.start.max(first)..rows.end.min(first + ROWS);
            if direct {
                self.one_token(s, first, &rows);
            } else {
                self.block(s, first, &rows);
            }
        }
    }
}

impl Rows<'_> {
    /// A block for the query heads of one token, read as it is stored.
    ///
    /// All heads take each step together: the steps of one head wait for each other.
    #[inline(always)]
    fn one_token<S: Simd>(&mut self, s: S, first: usize, rows: &Range<usize>) {
        let (heads, shape, attention) = (self.task.heads, self.attention.shape, self.attention);
        let visible = rows.start - first..rows.end - first;
        for head in 0..heads {
            let k = BlockRows::find(attention.k, first, rows, self.task.first_head + head);
            match k.element() {
                ElementType::F32 => self.stored_scores::<S, F32>(s, &k, head),
                _ => self.stored_scores::<S, F16>(s, &k, head),
            }
        }
        self.soften(s, 0..heads * shape.group(), &visible);
        for head in 0..heads {
            let v = BlockRows::find(attention.v, first, rows, self.task.first_head + head);
            match v.element() {
                ElementType::F32 => self.stored_values::<S, F32>(s, &v, head, &visible),
                _ => self.stored_values::<S, F16>(s, &v, head, &visible),
            }
        }
    }

    #[inline(always)]
    fn stored_scores<S: Simd, E: Element>(&mut self, s: S, k: &BlockRows<'_>, head: usize) {
        let (shape, buffers) = (self.attention.shape, &mut *self.buffers);
        let (group, chunks) = (shape.group(), shape.chunks());
        let queries = head * group..(head + 1) * group;
        s.vectorize(Scores::<Stored<E>> {
            rows: k.chunks::<E>(),
            q: &buffers.queries[queries.start * chunks..queries.end * chunks],
            weights: &mut buffers.weights[queries],
            ahead: k.ahead(),
        });
    }

    #[inline(always)]
    fn stored_values<S: Simd, E: Element>(
        &mut self,
        s: S,
        v: &BlockRows<'_>,
        head: usize,
        visible: &Range<usize>,
    ) {
        let (shape, buffers) = (self.attention.shape, &mut *self.buffers);
        let (group, per_query) = (shape.group(), shape.state_chunks());
        let queries = head * group..(head + 1) * group;
        s.vectorize(Values::<Stored<E>> {
            rows: v.chunks::<E>(),
            visible: visible.clone(),
            weights: &buffers.weights[queries.clone()],
            states: &mut buffers.partial[queries.start * per_query..queries.end * per_query],
            ahead: v.ahead(),
        });
    }

    /// Scores of some queries to weights, the first rows visible.
    #[inline(always)]
    fn soften<S: Simd>(&mut self, s: S, queries: Range<usize>, visible: &Range<usize>) {
        let per_query = self.attention.shape.state_chunks();
        for query in queries {
            let header = &mut self.buffers.partial[query * per_query];
            soften(s, visible, &mut self.buffers.weights[query], header);
        }
    }

    /// A block for all queries of the task, from a copy in f32.
    #[inline(always)]
    fn block<S: Simd>(&mut self, s: S, first: usize, rows: &Range<usize>) {
        let (task, chunks, attention) = (self.task, self.attention.shape.chunks(), self.attention);
        // Rows of this block that a token sees.
        let visible = |token: usize| {
            let seen = attention.rows_seen(task.first_token + token);
            let lane = |row: usize| row.saturating_sub(first).min(ROWS);
            lane(seen.start)..lane(seen.end)
        };
        for head in 0..task.heads {
            let k = BlockRows::find(attention.k, first, rows, task.first_head + head);
            let v = BlockRows::find(attention.v, first, rows, task.first_head + head);
            k.ahead().fetch_all(s);
            v.ahead().fetch_all(s);
            k.convert(s, chunks, &mut self.buffers.k);
            v.convert(s, chunks, &mut self.buffers.v);
            self.scores(s, self.queries(head, 0..task.tokens));
            let mut token = 0;
            while token < task.tokens {
                let range = visible(token);
                let mut end = token + 1;
                // Of several heads a task holds a single token.
                while end < task.tokens && visible(end) == range {
                    end += 1;
                }
                if !range.is_empty() {
                    let queries = self.queries(head, token..end);
                    self.soften(s, queries.clone(), &range);
                    self.values(s, queries, &range);
                }
                token = end;
            }
        }
    }

    /// The queries of some tokens and one KV head; one of them is a single one.
    fn queries(&self, head: usize, tokens: Range<usize>) -> Range<usize> {
        let (heads, group) = (self.task.heads, self.attention.shape.group());
        (tokens.start * heads + head) * group..((tokens.end - 1) * heads + head + 1) * group
    }

    #[inline(always)]
    fn scores<S: Simd>(&mut self, s: S, queries: Range<usize>) {
        let chunks = self.attention.shape.chunks();
        let buffers = &mut *self.buffers;
        s.vectorize(Scores::<Converted> {
            rows: converted(&buffers.k, chunks),
            q: &buffers.queries[queries.start * chunks..queries.end * chunks],
            weights: &mut buffers.weights[queries],
            ahead: Ahead::default(),
        });
    }

    #[inline(always)]
    fn values<S: Simd>(&mut self, s: S, queries: Range<usize>, visible: &Range<usize>) {
        let (chunks, per_query) = (
            self.attention.shape.chunks(),
            self.attention.shape.state_chunks(),
        );
        let buffers = &mut *self.buffers;
        s.vectorize(Values::<Converted> {
            rows: converted(&buffers.v, chunks),
            visible: visible.clone(),
            weights: &buffers.weights[queries.clone()],
            states: &mut buffers.partial[queries.start * per_query..queries.end * per_query],
            ahead: Ahead::default(),
        });
    }
}

/// Copies the queries of a task, scaled, in the order token, KV head, query head.
#[inline(always)]
fn load_queries<S: Simd>(s: S, attention: &Attention<'_>, task: &Task, buffers: &mut Buffers) {
    let shape = attention.shape;
    let per_head = shape.group() * shape.head_dim;
    let scale = s.splat(shape.scale);
    let mut out = buffers.queries.iter_mut();
    for token in task.first_token..task.first_token + task.tokens {
        let row = &attention.q[token * attention.width()..][..attention.width()];
        let heads = &row[task.first_head * per_head..][..task.heads * per_head];
        for query in heads.chunks_exact(shape.head_dim) {
            for chunk in query.chunks(LANES) {
                let chunk = s.mul(s.load(&padded(chunk)), scale);
                if let Some(out) = out.next() {
                    s.store(chunk, &mut out.0);
                }
            }
        }
    }
}

/// Merges the states of one query head over its partitions.
struct Merge<'a, I> {
    states: I,
    out: &'a mut [f32],
}

impl<'a, I: Iterator<Item = &'a [f32]>> Kernel for Merge<'_, I> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        const CHUNKS: usize = 1 + AttentionShape::MAX_HEAD_DIM / LANES;
        let mut total = [Chunk::ZERO; CHUNKS];
        let mut partial = [Chunk::ZERO; CHUNKS];
        clear(&mut total, CHUNKS);
        for state in self.states {
            let state = state.as_chunks::<LANES>().0;
            for (partial, state) in partial.iter_mut().zip(state) {
                partial.0 = *state;
            }
            merge(s, &mut total[..state.len()], &partial[..state.len()]);
        }
        finish(s, &total, self.out);
    }
}
