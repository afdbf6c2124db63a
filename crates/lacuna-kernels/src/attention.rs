//! Causal attention over views.
//!
//! Rows are processed in blocks of 16 at fixed positions (row 0, 16, 32, ..), with an online softmax
//! in f32. Blocks are grouped in partitions of 256 rows at fixed positions; each partition starts
//! from nothing, and the partitions of a query are merged in order. A block's K and V are converted
//! to f32 once for all the query heads and tokens that read it. So the result of a query depends on
//! the query and the rows it sees: not on the tokens beside it, on how its rows are split in runs,
//! or on how the work is split over threads.
//!
//! Causality is a loop bound: what lies behind a query's last row is never read into its result.

mod block;
mod softmax;

use crate::grid::{Block, Grid};
use crate::simd::{Kernel, LANES, Simd, padded};
use crate::threads::Pool;
use crate::view::View;
use block::BlockRows;
use softmax::{Chunk, clear, finish, merge, narrow, update};

/// Rows per block of the online softmax.
const ROWS: usize = LANES;

/// Rows per partition.
const PARTITION: usize = 256;

/// Query rows (tokens times heads) that one task holds.
const QUERIES: usize = 64;

/// Query heads per KV head up to which a single token reads K and V without a converted copy.
const NARROW: usize = 4;

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
    /// `[chunk][row]`, so that a chunk of the query meets all rows at once.
    k: Box<[[Chunk; ROWS]]>,
    v: Box<[[Chunk; ROWS]]>,
    queries: Box<[Chunk]>,
    partial: Box<[Chunk]>,
    total: Box<[Chunk]>,
}

impl Buffers {
    pub(crate) fn new() -> Self {
        const CHUNKS: usize = AttentionShape::MAX_HEAD_DIM / LANES;
        let chunks = |n: usize| vec![Chunk::ZERO; n].into_boxed_slice();
        let block = || vec![[Chunk::ZERO; ROWS]; CHUNKS].into_boxed_slice();
        Self {
            k: block(),
            v: block(),
            queries: chunks(QUERIES * CHUNKS),
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

/// The queries of one task: some tokens and the query heads of some KV heads.
#[derive(Clone, Copy)]
struct Task {
    first_token: usize,
    tokens: usize,
    first_head: usize,
    heads: usize,
}

/// f32 elements that splitting `tokens` queries over `rows` rows takes.
pub(crate) fn scratch_len(tokens: usize, rows: usize, shape: &AttentionShape) -> usize {
    let states = tokens * rows.div_ceil(PARTITION) * shape.query_heads;
    states * shape.state_chunks() * LANES
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
        let needed = scratch_len(tokens, self.rows_seen(tokens - 1), self.shape);
        let whole_tasks = tokens.div_ceil(self.tokens_together()) * self.shape.kv_heads;
        let few = tokens == 1 || whole_tasks < 2 * pool.threads();
        if few && pool.threads() > 1 && scratch.len() >= needed {
            self.split(pool, simd, out, &mut scratch[..needed]);
        } else {
            self.whole(pool, simd, out);
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
            assert_eq!(
                view.width(),
                shape.kv_heads * shape.head_dim,
                "the width of a cached row"
            );
            let rows = self.first_position + self.tokens();
            assert!(
                view.len() >= rows,
                "{rows} rows are attended to; the view has {}",
                view.len()
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
    fn rows_seen(&self, token: usize) -> usize {
        self.first_position + token + 1
    }

    /// Tokens whose query heads of one KV head a task holds.
    fn tokens_together(&self) -> usize {
        QUERIES / self.shape.group()
    }

    /// One task per tile of tokens and KV head goes through all rows.
    fn whole<W: AsMut<Buffers> + Send + 'static>(
        &self,
        pool: &Pool<W>,
        simd: impl Simd,
        out: &mut [f32],
    ) {
        let per_head = self.shape.group() * self.shape.head_dim;
        let grid = Grid::new(out, self.width(), self.tokens_together(), per_head);
        grid.run(pool, |out, worker| {
            let tokens = out.rows();
            let task = Task {
                first_token: tokens.start,
                tokens: tokens.len(),
                first_head: out.cols().start / per_head,
                heads: 1,
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
        let partitions = self.rows_seen(self.tokens() - 1).div_ceil(PARTITION);
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
            let count = self.rows_seen(token).div_ceil(PARTITION);
            let rows = &scratch[token * partitions * width..];
            let states = rows.chunks_exact(width).take(count);
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
        let queries = task.tokens * attention.shape.group();
        load_queries(s, attention, &task, self.buffers);
        clear(&mut self.buffers.total[..queries * per_query], per_query);
        let last = attention.rows_seen(task.first_token + task.tokens - 1);
        for partition in 0..last.div_ceil(PARTITION) {
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
        for query in 0..task.tokens * shape.group() {
            let token = task.first_token + query / shape.group();
            if self.attention.rows_seen(token) > partition * PARTITION {
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
        for (query, total) in totals.enumerate().take(task.tokens * shape.group()) {
            let out = self.out.row(task.first_token + query / shape.group());
            let head = query % shape.group() * shape.head_dim;
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
        if attention.rows_seen(task.first_token) <= partition * PARTITION {
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
        let end = attention
            .rows_seen(task.first_token + task.tokens - 1)
            .min(start + PARTITION);
        for first in (start..end).step_by(ROWS) {
            let rows = first..end.min(first + ROWS);
            let k = BlockRows::find(attention.k, &rows);
            let v = BlockRows::find(attention.v, &rows);
            for head in 0..task.heads {
                let column = (task.first_head + head) * shape.head_dim;
                let part = column..column + shape.head_dim;
                self.block(s, &k.columns(&part), &v.columns(&part), head, first);
            }
        }
    }
}

impl Rows<'_> {
    /// One KV head of one block.
    #[inline(always)]
    fn block<S: Simd>(
        &mut self,
        s: S,
        k: &BlockRows<'_>,
        v: &BlockRows<'_>,
        head: usize,
        first: usize,
    ) {
        let (task, shape) = (self.task, self.attention.shape);
        let (chunks, per_query, group) = (shape.chunks(), shape.state_chunks(), shape.group());
        let buffers = &mut *self.buffers;
        k.prefetch_next(s);
        v.prefetch_next(s);
        if task.tokens == 1 && group <= NARROW {
            let q = &buffers.queries[head * group * chunks..][..group * chunks];
            let states = &mut buffers.partial[head * group * per_query..][..group * per_query];
            narrow(s, q, k, v, states);
            return;
        }
        k.convert(s, &mut buffers.k);
        v.convert(s, &mut buffers.v);
        let (k, v) = (&buffers.k[..chunks], &buffers.v[..chunks]);
        for token in 0..task.tokens {
            let seen = self.attention.rows_seen(task.first_token + token);
            let visible = seen.saturating_sub(first).min(ROWS);
            if visible == 0 {
                continue;
            }
            let query = (token * task.heads + head) * group;
            for query in query..query + group {
                let q = &buffers.queries[query * chunks..][..chunks];
                let state = &mut buffers.partial[query * per_query..][..per_query];
                update(s, q, k, v, visible, state);
            }
        }
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
