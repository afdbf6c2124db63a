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

use crate::grid::{Block, Grid};
use crate::simd::{Kernel, LANES, Simd, exp, padded};
use crate::threads::Pool;
use crate::view::{ElementType, View};

/// Rows per block of the online softmax.
const ROWS: usize = LANES;

/// Rows per partition.
const PARTITION: usize = 256;

/// Query rows (tokens times heads) that one task holds.
const QUERIES: usize = 64;

/// Sixteen elements.
type Chunk = [f32; LANES];

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
        let chunks = |n: usize| vec![[0.0; LANES]; n].into_boxed_slice();
        let block = || vec![[[0.0; LANES]; ROWS]; CHUNKS].into_boxed_slice();
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
        let shape = attention.shape;
        let (per_query, group) = (shape.state_chunks(), shape.group());
        load_queries(s, attention, &task, self.buffers);
        clear(
            &mut self.buffers.total[..task.tokens * group * per_query],
            per_query,
        );
        let last = attention.rows_seen(task.first_token + task.tokens - 1);
        for partition in 0..last.div_ceil(PARTITION) {
            s.vectorize(Rows {
                attention,
                task,
                partition,
                buffers: self.buffers,
            });
            let totals = self.buffers.total.chunks_exact_mut(per_query);
            let partials = self.buffers.partial.chunks_exact(per_query);
            for (query, (total, partial)) in
                totals.zip(partials).enumerate().take(task.tokens * group)
            {
                if attention.rows_seen(task.first_token + query / group) > partition * PARTITION {
                    merge(s, total, partial);
                }
            }
        }
        for (query, total) in self
            .buffers
            .total
            .chunks_exact(per_query)
            .enumerate()
            .take(task.tokens * group)
        {
            let out = self.out.row(task.first_token + query / group);
            finish(
                s,
                total,
                &mut out[query % group * shape.head_dim..][..shape.head_dim],
            );
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
        s.vectorize(Rows {
            attention,
            task,
            partition,
            buffers: self.buffers,
        });
        let out = self.out.piece().as_chunks_mut::<LANES>().0;
        out.copy_from_slice(&self.buffers.partial[..out.len()]);
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
    fn run<S: Simd>(self, s: S) {
        let Self {
            attention,
            task,
            partition,
            buffers,
        } = self;
        let shape = attention.shape;
        let (chunks, per_query, group) = (shape.chunks(), shape.state_chunks(), shape.group());
        let queries = task.tokens * task.heads * group;
        clear(&mut buffers.partial[..queries * per_query], per_query);
        let start = partition * PARTITION;
        let end = attention
            .rows_seen(task.first_token + task.tokens - 1)
            .min(start + PARTITION);
        for first in (start..end).step_by(ROWS) {
            let rows = first..end.min(first + ROWS);
            for head in 0..task.heads {
                let column = (task.first_head + head) * shape.head_dim;
                load_block(s, attention.k, rows.clone(), column, shape, &mut buffers.k);
                load_block(s, attention.v, rows.clone(), column, shape, &mut buffers.v);
                let (k, v) = (&buffers.k[..chunks], &buffers.v[..chunks]);
                for token in 0..task.tokens {
                    let seen = attention.rows_seen(task.first_token + token);
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
    }
}

/// An empty state: maximum at minus infinity, everything else zero.
#[inline(always)]
fn clear(states: &mut [Chunk], per_query: usize) {
    states.fill([0.0; LANES]);
    for state in states.chunks_exact_mut(per_query) {
        state[0][0] = f32::NEG_INFINITY;
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
                    s.store(chunk, out);
                }
            }
        }
    }
}

/// Converts one head of some rows to f32; what is behind them keeps its old values.
#[inline(always)]
fn load_block<S: Simd>(
    s: S,
    view: &View<'_>,
    rows: std::ops::Range<usize>,
    column: usize,
    shape: &AttentionShape,
    out: &mut [[Chunk; ROWS]],
) {
    let element = view.element();
    for (j, row) in rows.enumerate() {
        let bytes = &view.row(row)[element.bytes(column)..][..element.bytes(shape.head_dim)];
        match element {
            ElementType::F32 => {
                load_row(bytes, out, j, |chunk: &[u8; 64], out| {
                    s.store(s.load_f32_bytes(chunk), out)
                });
            }
            ElementType::F16 => {
                load_row(bytes, out, j, |chunk: &[u8; 32], out| {
                    s.store(s.load_f16(chunk), out)
                });
            }
        }
    }
}

#[inline(always)]
fn load_row<const N: usize>(
    bytes: &[u8],
    out: &mut [[Chunk; ROWS]],
    j: usize,
    convert: impl Fn(&[u8; N], &mut Chunk),
) {
    let (chunks, tail) = bytes.as_chunks::<N>();
    for (chunk, out) in chunks.iter().zip(out.iter_mut()) {
        convert(chunk, &mut out[j]);
    }
    if !tail.is_empty() {
        convert(&padded(tail), &mut out[chunks.len()][j]);
    }
}

/// Adds `visible` rows of a block to a query's state.
#[inline(always)]
fn update<S: Simd>(
    s: S,
    q: &[Chunk],
    k: &[[Chunk; ROWS]],
    v: &[[Chunk; ROWS]],
    visible: usize,
    state: &mut [Chunk],
) {
    let scores = scores(s, q, k);
    let (header, values) = state.split_at_mut(1);
    let old = header[0][0];
    let seen = s.keep_first(scores, visible, s.splat(f32::NEG_INFINITY));
    let block = s.max_lane(seen);
    let new = if block > old { block } else { old };
    let decay = exp(s, s.splat(old - new));
    let p = exp(s, s.sub(scores, s.splat(new)));
    let p = s.keep_first(p, visible, s.splat(0.0));
    let sum = s.fma(s.splat(header[0][1]), decay, s.splat(s.sum(p)));
    let mut lanes = [0.0; LANES];
    s.store(sum, &mut lanes);
    header[0][0] = new;
    header[0][1] = lanes[0];
    s.store(p, &mut lanes);
    if visible == ROWS {
        add_values::<S, ROWS>(s, &lanes, v, decay, values);
    } else {
        add_first_values(s, &lanes[..visible], v, decay, values);
    }
}

/// Dot products of a query with the rows of a block.
#[inline(always)]
fn scores<S: Simd>(s: S, q: &[Chunk], k: &[[Chunk; ROWS]]) -> S::F {
    let mut sums = [s.splat(0.0); ROWS];
    for (q, k) in q.iter().zip(k) {
        let q = s.load(q);
        for j in 0..ROWS {
            sums[j] = s.fma(q, s.load(&k[j]), sums[j]);
        }
    }
    s.sum_each(sums)
}

/// `values = values * decay + sum over all rows of p * v`.
#[inline(always)]
fn add_values<S: Simd, const N: usize>(
    s: S,
    p: &Chunk,
    v: &[[Chunk; ROWS]],
    decay: S::F,
    values: &mut [Chunk],
) {
    for (v, values) in v.iter().zip(values) {
        let mut sum = s.mul(s.load(values), decay);
        for j in 0..N {
            sum = s.fma(s.splat(p[j]), s.load(&v[j]), sum);
        }
        s.store(sum, values);
    }
}

/// The same for the first rows only.
#[inline(always)]
fn add_first_values<S: Simd>(
    s: S,
    p: &[f32],
    v: &[[Chunk; ROWS]],
    decay: S::F,
    values: &mut [Chunk],
) {
    for (v, values) in v.iter().zip(values) {
        let mut sum = s.mul(s.load(values), decay);
        for (p, v) in p.iter().zip(v) {
            sum = s.fma(s.splat(*p), s.load(v), sum);
        }
        s.store(sum, values);
    }
}

/// Merges the state of later rows into that of earlier ones.
#[inline(always)]
fn merge<S: Simd>(s: S, total: &mut [Chunk], part: &[Chunk]) {
    let (old, added) = (total[0], part[0]);
    let new = if added[0] > old[0] { added[0] } else { old[0] };
    let (keep, take) = (
        exp(s, s.splat(old[0] - new)),
        exp(s, s.splat(added[0] - new)),
    );
    // Lane 1, the sum of weights, merges like the values.
    for (total, part) in total.iter_mut().zip(part) {
        let sum = s.fma(s.load(part), take, s.mul(s.load(total), keep));
        s.store(sum, total);
    }
    total[0][0] = new;
}

/// Divides by the sum of weights.
#[inline(always)]
fn finish<S: Simd>(s: S, total: &[Chunk], out: &mut [f32]) {
    let sum = s.splat(total[0][1]);
    for (total, out) in total[1..].iter().zip(out.chunks_mut(LANES)) {
        let mut lanes = [0.0; LANES];
        s.store(s.div(s.load(total), sum), &mut lanes);
        out.copy_from_slice(&lanes[..out.len()]);
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
        let mut total = [[0.0; LANES]; 1 + AttentionShape::MAX_HEAD_DIM / LANES];
        total[0][0] = f32::NEG_INFINITY;
        for state in self.states {
            let state = state.as_chunks::<LANES>().0;
            merge(s, &mut total[..state.len()], state);
        }
        finish(s, &total, self.out);
    }
}
