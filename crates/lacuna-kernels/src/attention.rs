//! Attention over views.
//!
//! Rows are cut in partitions of 256 at fixed positions (row 0, 256, ..). Within a partition a query
//! takes three steps: scores for the rows it sees, weights relative to the largest score, and the sum
//! of values times weights, row by row. The partitions of a query are then merged in order. All is in
//! f32, but for the scores of keys that are integers (q8_0, q4_0, iq4_nl), which are sums of exact integers, and where
//! products are asked for that round what is multiplied to bf16. So the result of a query
//! depends on the query and the rows it sees: not on the tokens beside it, on how its rows lie in
//! memory, or on how the work is split over threads.
//!
//! A task goes through a partition in blocks of rows. Each row of K and of V is read and converted
//! once for all the query heads and tokens of the task.
//!
//! Masks are loop bounds: a row that a query does not see is never read into its result, and rows
//! that no query sees are not touched. What layers do to scores besides comes between these steps:
//! a soft cap before the weights, a sink after the last partition.

mod ahead;
mod arithmetic;
mod columns;
mod elements;
mod integers;
mod mask;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod partition;
mod rows;
mod scores;
mod sequences;
mod softmax;
mod stored;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod values;

use std::ops::Range;

use crate::grid::{Block, Grid};
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::Amx;
use crate::simd::{Bf16Products, Chunk, Kernel, LANES, Simd};
use crate::threads::Pool;
use crate::view::View;
pub use mask::Mask;
use mask::Sight;
use partition::{Loaded, Partition};
pub(crate) use sequences::Each;
pub use sequences::{Cached, Sequences, SharedRows};
use softmax::{add_sink, clear, finish, merge};

/// Rows per partition.
const PARTITION: usize = 256;

/// Chunks of the scores of a query for a partition.
const PARTITION_CHUNKS: usize = PARTITION / LANES;

/// How many tokens before its use the row of a token is fetched: rows of one head are too far apart to
/// be fetched by themselves.
const TOKENS_AHEAD: usize = 4;

/// Most queries (tokens times query heads) that one task holds ...
const QUERIES: usize = 256;

/// ... and most chunks that they have.
const QUERY_CHUNKS: usize = QUERIES * 8;

/// The same where they are many and columns: more, because less is kept of each, and each task copies its rows.
const COLUMNS: usize = 2 * QUERIES;
const COLUMN_CHUNKS: usize = 2 * QUERY_CHUNKS;

/// Tasks per thread that let threads finish together.
const TASKS_PER_THREAD: usize = 4;

/// Queries that a part of a KV head's has at least, where there are as many: each part goes through the rows for itself.
const LEAST_PART: usize = 8;

/// Tasks per thread that partitions are cut in by parts for, if they are fewer: whole rows are
/// better read by one thread.
const SPLITS_PER_THREAD: usize = 2;

/// One attention layer: its sizes, and what it does to scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Heads of the query, a multiple of `kv_heads` and at most 128 times as many.
    pub query_heads: usize,
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Elements per head of the query and of K, at most [`AttentionShape::MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Elements per head of V and of the result, at most as many.
    pub value_dim: usize,
    /// What a dot product of query and key is multiplied by, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Which rows a query sees.
    pub mask: Mask,
    /// Scores become `cap * tanh(score / cap)`, after the scale and before the mask: Gemma 2.
    pub soft_cap: Option<f32>,
}

impl AttentionShape {
    /// Largest supported `head_dim` and `value_dim`: a row of latent attention, 512 elements and 64 that
    /// are turned by position.
    pub const MAX_HEAD_DIM: usize = 576;

    /// Most query heads per KV head: those of DeepSeek V3, which all read the same row.
    pub const MAX_GROUP: usize = 128;

    /// Attention to all rows up to the query's own, with heads of one size.
    pub const fn causal(query_heads: usize, kv_heads: usize, head_dim: usize, scale: f32) -> Self {
        Self {
            query_heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            scale,
            mask: Mask::Causal,
            soft_cap: None,
        }
    }

    fn check(&self) {
        assert!(
            self.kv_heads > 0 && self.query_heads.is_multiple_of(self.kv_heads),
            "{} query heads are no multiple of {} KV heads",
            self.query_heads,
            self.kv_heads
        );
        let group = self.group();
        assert!(
            (1..=Self::MAX_GROUP).contains(&group),
            "{group} query heads per KV head; 1 to {} are supported",
            Self::MAX_GROUP
        );
        for dim in [self.head_dim, self.value_dim] {
            assert!(
                (1..=Self::MAX_HEAD_DIM).contains(&dim),
                "a head dimension of {dim}; 1 to {} are supported",
                Self::MAX_HEAD_DIM
            );
        }
        assert!(
            self.soft_cap.is_none_or(|cap| cap > 0.0),
            "a soft cap of {:?}",
            self.soft_cap
        );
    }

    /// Whether so many query heads read the same KV head that AMX takes no longer for one token than vectors in f32:
    /// a tile has room for sixteen. Measured on an Emerald Rapids, with f16 and q8_0.
    pub(crate) fn fills_tiles(&self) -> bool {
        let least = if self.head_dim < 256 { 12 } else { 8 };
        self.query_heads >= least * self.kv_heads
    }

    /// Query heads that read the same KV head.
    fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Query heads of a part: those of a KV head, or, where a task cannot hold the queries of so many,
    /// an even share of them.
    fn part(&self) -> usize {
        let (all, most) = (self.group(), self.most_queries());
        let mut shares = (all.div_ceil(most)..=all).filter(|shares| all.is_multiple_of(*shares));
        all / shares.next().unwrap_or(1)
    }

    /// Elements of a token's queries.
    fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Elements of a token's result.
    fn out_width(&self) -> usize {
        self.query_heads * self.value_dim
    }

    /// Chunks per head of the query and of K.
    fn key_chunks(&self) -> usize {
        self.head_dim.div_ceil(LANES)
    }

    /// The same of V and of the result.
    fn value_chunks(&self) -> usize {
        self.value_dim.div_ceil(LANES)
    }

    /// Chunks of the state of one query head: maximum and sum, then the weighted values.
    fn state_chunks(&self) -> usize {
        1 + self.value_chunks()
    }

    /// Queries, of one or more tokens and heads, that a task can hold.
    fn most_queries(&self) -> usize {
        QUERIES.min(QUERY_CHUNKS / self.key_chunks().max(self.value_chunks()))
    }

    /// The same of columns, which are queries of one part.
    fn most_columns(&self) -> usize {
        COLUMNS.min(COLUMN_CHUNKS / self.key_chunks().max(self.value_chunks()))
    }

    /// Tokens up to which rows may be split between tasks: those whose queries a task holds, but always
    /// one.
    fn most_split_tokens(&self) -> usize {
        (self.most_queries() / self.query_heads).max(1)
    }
}

/// What one worker needs.
pub(crate) struct Buffers {
    pass: partition::Buffers,
    partial: Box<[Chunk]>,
    total: Box<[Chunk]>,
}

impl Buffers {
    pub(crate) fn new() -> Self {
        let states = || vec![Chunk::ZERO; COLUMN_CHUNKS + COLUMNS].into_boxed_slice();
        Self {
            pass: partition::Buffers::new(),
            partial: states(),
            total: states(),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pass.bytes() + size_of_val(&*self.partial) + size_of_val(&*self.total)
    }
}

/// The queries of one sequence. Tasks take them in parts, which are query heads that read the same KV
/// head.
#[derive(Clone, Copy)]
struct Attention<'a> {
    q: &'a [f32],
    k: &'a View<'a>,
    v: &'a View<'a>,
    first_position: usize,
    /// Whether queries see all rows behind their own that are held.
    ahead: bool,
    shape: &'a AttentionShape,
    /// A logit for each query head, which takes its share of the weights and has no value.
    sinks: Option<&'a [f32]>,
    /// Query heads of a part, of which a KV head has a whole number.
    part: usize,
    /// Whether numbers are multiplied as bf16.
    rounded: Option<Bf16Products>,
    /// What has been computed for its one query already.
    begun: Option<Begun<'a>>,
}

/// Proof that numbers can be rounded and multiplied by AMX.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct InTiles {
    amx: Amx,
    proof: Bf16Products,
}

/// The first partitions of a query, which others see too: their states, merged.
#[derive(Clone, Copy)]
struct Begun<'a> {
    partitions: usize,
    /// `[query_heads, 1 + chunks]`.
    states: &'a [f32],
}

impl Begun<'_> {
    /// The state of a query head.
    fn state(&self, head: usize, len: usize) -> &[f32] {
        &self.states[head * len..][..len]
    }
}

/// The queries of one task: some tokens of some parts of the query heads.
#[derive(Clone, Copy)]
struct Task {
    first_token: usize,
    tokens: usize,
    first_part: usize,
    parts: usize,
}

impl Task {
    fn all_tokens(&self) -> Range<usize> {
        self.first_token..self.first_token + self.tokens
    }
}

/// The partitions that some rows are in.
fn partitions_of(rows: &Range<usize>) -> Range<usize> {
    rows.start / PARTITION..rows.end.div_ceil(PARTITION)
}

/// f32 elements that splitting `tokens` queries over `rows` rows takes.
pub(crate) fn scratch_len(tokens: usize, rows: usize, shape: &AttentionShape) -> usize {
    let seen = match shape.mask.most_rows() {
        // However the rows lie, they touch one partition more than they fill.
        Some(most) => rows.min(most.saturating_add(tokens + PARTITION)),
        None => rows,
    };
    let tokens = tokens.min(shape.most_split_tokens());
    let states = tokens * seen.div_ceil(PARTITION) * shape.query_heads;
    states * shape.state_chunks() * LANES
}

impl Attention<'_> {
    /// How many parts there are, those of a KV head one after the other.
    fn parts(&self) -> usize {
        self.shape.query_heads / self.part
    }

    fn parts_per_head(&self) -> usize {
        self.shape.group() / self.part
    }

    /// Whether values of some rows are copied with their keys, whose first elements they are: in latent attention.
    #[cfg(target_arch = "x86_64")]
    fn is_copied_once(&self, rows: &Range<usize>) -> bool {
        let pairs = [self.shape.head_dim, self.shape.value_dim];
        pairs.iter().all(|dim| dim.is_multiple_of(2 * LANES))
            && !self.integer_keys()
            && self.v.begins(self.k, rows)
    }

    /// Whether scores are sums of integers.
    fn integer_keys(&self) -> bool {
        self.k.layout().element.is_in_units()
    }

    /// How numbers are multiplied by AMX, if they are: rounded, at a level that has it.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn in_tiles<S: Simd>(&self, s: S) -> Option<InTiles> {
        // A constant, so that levels which never have AMX do not compile what follows.
        if const { !S::MAY_HAVE_AMX } {
            return None;
        }
        let (amx, proof) = s.amx().zip(self.rounded)?;
        Some(InTiles { amx, proof })
    }

    /// Whether they are.
    #[inline(always)]
    fn is_in_tiles<S: Simd>(&self, s: S) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.in_tiles(s).is_some();
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = s;
            false
        }
    }

    /// The KV head that a part reads.
    fn kv_head(&self, part: usize) -> usize {
        part / self.parts_per_head()
    }

    /// The same in more parts, if that makes `wanted` of them. Each part converts the rows it reads, so
    /// none is so small that this would be what the time goes to.
    fn in_parts(&self, wanted: usize) -> Self {
        let (all, heads) = (self.shape.group(), self.shape.kv_heads);
        let most = wanted.div_ceil(heads).min(all / LEAST_PART);
        let mut shares = (self.parts_per_head()..=most).rev();
        let shares = shares.find(|shares| all.is_multiple_of(*shares));
        Self {
            part: shares.map_or(self.part, |shares| all / shares),
            ..*self
        }
    }

    fn run<W: AsMut<Buffers> + Send + 'static>(
        &self,
        pool: &Pool<W>,
        simd: impl Simd,
        out: &mut [f32],
        scratch: &mut [f32],
    ) {
        let tokens = self.tokens();
        if tokens == 0 {
            return;
        }
        let together = tokens * self.shape.query_heads <= self.shape.most_queries();
        let few = tokens <= self.shape.most_split_tokens();
        let partitions = self.left(&self.sight(0).of_tokens(tokens));
        let needed = tokens * partitions.len() * self.shape.query_heads * self.state_len();
        if few && pool.threads() > 1 && scratch.len() >= needed {
            self.split(pool, simd, out, &mut scratch[..needed], partitions);
        } else if together && pool.threads() == 1 {
            self.whole(pool, simd, out, tokens, self.parts());
        } else {
            self.whole(pool, simd, out, self.tokens_per_task(pool.threads()), 1);
        }
    }

    /// # Panics
    /// When sizes do not fit together.
    fn check(&self) {
        let shape = self.shape;
        if self.q.is_empty() {
            return;
        }
        assert!(
            self.sinks
                .is_none_or(|sinks| sinks.len() == shape.query_heads),
            "one sink for each of {} query heads",
            shape.query_heads
        );
        for (view, head_dim) in [(self.k, shape.head_dim), (self.v, shape.value_dim)] {
            let layout = view.layout();
            assert_eq!(
                (layout.heads, layout.head_dim),
                (shape.kv_heads, head_dim),
                "heads and head dimension of a cached row"
            );
            let even = layout.element.check_head_dim(head_dim);
            assert!(even.is_ok(), "a head is whole blocks: {even:?}");
            let (needed, held) = (self.sight(0).of_tokens(self.tokens()), view.rows());
            assert!(
                held.start <= needed.start && needed.end <= held.end,
                "rows {needed:?} are attended to; the view has {held:?}"
            );
        }
    }

    fn tokens(&self) -> usize {
        self.q.len() / self.shape.query_width()
    }

    /// The partitions that some rows are in, without those that have been computed.
    fn left(&self, rows: &Range<usize>) -> Range<usize> {
        let partitions = partitions_of(rows);
        match self.begun {
            Some(begun) => partitions.start.max(begun.partitions)..partitions.end,
            None => partitions,
        }
    }

    /// Elements of a state.
    fn state_len(&self) -> usize {
        self.shape.state_chunks() * LANES
    }

    /// What the tokens from `token` on see.
    fn sight(&self, token: usize) -> Sight {
        Sight {
            mask: self.shape.mask,
            first: self.first_position + token,
            end: self.k.rows().end,
            ahead: self.ahead,
        }
    }

    /// Tokens whose queries of one part a task holds: many, because each task converts K and V,
    /// but few enough that there is work for all threads.
    fn tokens_per_task(&self, threads: usize) -> usize {
        let most = self.shape.most_columns() / self.part;
        let wanted = (threads * TASKS_PER_THREAD).div_ceil(self.parts());
        let pieces = self.tokens().div_ceil(most).max(wanted.min(self.tokens()));
        self.tokens().div_ceil(pieces)
    }

    /// One task per some tokens and parts, which goes through all rows.
    fn whole<W: AsMut<Buffers> + Send + 'static>(
        &self,
        pool: &Pool<W>,
        simd: impl Simd,
        out: &mut [f32],
        tokens: usize,
        parts: usize,
    ) {
        let per_part = self.part * self.shape.value_dim;
        let grid = Grid::new(out, self.shape.out_width(), tokens, parts * per_part);
        grid.run(pool, |out, worker| {
            let tokens = out.rows();
            let task = Task {
                first_token: tokens.start,
                tokens: tokens.len(),
                first_part: out.cols().start / per_part,
                parts: out.cols().len() / per_part,
            };
            simd.vectorize(Whole {
                attention: self,
                task,
                buffers: worker.as_mut(),
                row: tokens.start,
                out,
            });
        });
    }

    /// One task per partition, with all tokens and, if partitions are many, all query heads; then the
    /// partitions are merged.
    fn split<W: AsMut<Buffers> + Send + 'static>(
        &self,
        pool: &Pool<W>,
        simd: impl Simd,
        out: &mut [f32],
        scratch: &mut [f32],
        partitions: Range<usize>,
    ) {
        let pieces = (pool.threads() * SPLITS_PER_THREAD).div_ceil(partitions.len());
        let attention = self.in_parts(pieces);
        let (shape, tokens, len) = (self.shape, self.tokens(), self.state_len());
        // Rows of the scratch are partitions, columns the states of queries in a task's order.
        let width = tokens * shape.query_heads * len;
        let per_part = width / attention.parts();
        let most = shape.most_queries() / (tokens * attention.part);
        let parts = attention.parts().div_ceil(pieces).min(most);
        Grid::new(scratch, width, 1, parts * per_part).run(pool, |out, worker| {
            let parts = out.cols();
            simd.vectorize(Partial {
                attention: &attention,
                task: Task {
                    first_token: 0,
                    tokens,
                    first_part: parts.start / per_part,
                    parts: parts.len() / per_part,
                },
                partition: partitions.start + out.rows().start,
                next: pool.threads(),
                buffers: worker.as_mut(),
                out,
            });
        });
        let scratch = &*scratch;
        Grid::new(out, shape.out_width(), 1, shape.value_dim).run(pool, |mut out, _| {
            let (token, head) = (out.rows().start, out.cols().start / shape.value_dim);
            let (part, member) = (head / attention.part, head % attention.part);
            let query = (part * tokens + token) * attention.part + member;
            let seen = self.left(&self.sight(token).of(0));
            let rows = scratch
                .chunks_exact(width)
                .skip(seen.start - partitions.start);
            let states = rows.take(seen.len()).map(|row| &row[query * len..][..len]);
            let begun = self.begun.iter().map(|begun| begun.state(head, len));
            simd.vectorize(Merge {
                states: begun.chain(states),
                sink: self.sinks.map(|sinks| sinks[head]),
                out: out.row(token),
            });
        });
    }
}

/// The states of a task's queries: of what was begun, and from there through the partitions that are left.
#[inline(always)]
fn accumulate<'a, S: Simd>(
    s: S,
    attention: &Attention<'_>,
    task: Task,
    buffers: &'a mut Buffers,
) -> &'a mut [Chunk] {
    let Buffers {
        pass,
        partial,
        total,
    } = buffers;
    let mut loaded = Loaded::new(s, attention, task, pass);
    let per_query = attention.shape.state_chunks();
    let states = loaded.queries() * per_query;
    let (partial, total) = (&mut partial[..states], &mut total[..states]);
    if let Some(begun) = attention.begun {
        let first = task.first_part * attention.part;
        let states = begun.states.as_chunks::<LANES>().0;
        for (total, state) in total.iter_mut().zip(&states[first * per_query..]) {
            total.0 = *state;
        }
    }
    let sight = attention.sight(task.first_token);
    let partitions = attention.left(&sight.of_tokens(task.tokens));
    for index in partitions.clone() {
        // The first partition is what others are merged into.
        let first = index == partitions.start && attention.begun.is_none();
        s.vectorize(Partition {
            loaded: &mut loaded,
            index,
            next: index + 1,
            states: if first { &mut *total } else { &mut *partial },
        });
        let states = total
            .chunks_exact_mut(per_query)
            .zip(partial.chunks_exact(per_query));
        for (query, (total, partial)) in states.enumerate() {
            let token = query / attention.part % task.tokens;
            match partitions_of(&sight.of(token)).contains(&index) {
                true if first => {}
                true => merge(s, total, partial),
                false if first => clear(total, per_query),
                false => {}
            }
        }
    }
    total
}

/// The rows that several sequences see, for a query of each: states to go on from.
struct Common<'a, 'b> {
    attention: &'a Attention<'a>,
    /// Of one part.
    task: Task,
    buffers: &'a mut Buffers,
    out: Block<'b, f32>,
}

impl Kernel for Common<'_, '_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Self {
            attention, task, ..
        } = self;
        let per_query = attention.shape.state_chunks();
        let total = accumulate(s, attention, task, self.buffers);
        for (token, states) in total.chunks_exact(attention.part * per_query).enumerate() {
            let out = self.out.row(task.first_token + token);
            for (out, chunk) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(states) {
                *out = chunk.0;
            }
        }
    }
}

/// All rows for the queries of a task.
struct Whole<'a, 'b> {
    attention: &'a Attention<'a>,
    task: Task,
    buffers: &'a mut Buffers,
    /// The row of the output that the first of its tokens has.
    row: usize,
    out: Block<'b, f32>,
}

impl Kernel for Whole<'_, '_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Self {
            attention, task, ..
        } = self;
        let per_query = attention.shape.state_chunks();
        let total = accumulate(s, attention, task, self.buffers);
        for (query, total) in total.chunks_exact_mut(per_query).enumerate() {
            let shape = attention.shape;
            let (row, member) = (query / attention.part, query % attention.part);
            let (part, token) = (row / task.tokens, row % task.tokens);
            let head = part * attention.part + member;
            if let Some(sinks) = attention.sinks {
                add_sink(s, total, sinks[task.first_part * attention.part + head]);
            }
            let start = head * shape.value_dim;
            let row = self.row + token;
            for line in (start..start + shape.value_dim).step_by(LANES) {
                s.prefetch_line(self.out.address(row + TOKENS_AHEAD, line));
            }
            let out = &mut self.out.row(row)[start..][..shape.value_dim];
            finish(s, total, out);
        }
    }
}

/// The rows of one partition for the queries of a task, as softmax states.
struct Partial<'a, 'b> {
    attention: &'a Attention<'a>,
    task: Task,
    partition: usize,
    /// How many partitions further on this worker probably goes on.
    next: usize,
    buffers: &'a mut Buffers,
    out: Block<'b, f32>,
}

impl Kernel for Partial<'_, '_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Buffers { pass, partial, .. } = self.buffers;
        let mut loaded = Loaded::new(s, self.attention, self.task, pass);
        let states = loaded.queries() * self.attention.shape.state_chunks();
        s.vectorize(Partition {
            loaded: &mut loaded,
            index: self.partition,
            next: self.partition + self.next,
            states: &mut partial[..states],
        });
        let row = self.out.rows().start;
        let out = self.out.row(row).as_chunks_mut::<LANES>().0;
        for (out, chunk) in out.iter_mut().zip(partial.iter()) {
            *out = chunk.0;
        }
    }
}

/// Merges the states of one query head over its partitions.
struct Merge<'a, I> {
    states: I,
    sink: Option<f32>,
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
        if let Some(sink) = self.sink {
            add_sink(s, &mut total, sink);
        }
        finish(s, &total, self.out);
    }
}
