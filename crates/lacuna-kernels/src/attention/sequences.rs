//! Attention of several sequences at once.
//!
//! Each has its own context, short or long. A short one is not worth sharing between threads, which
//! would meet once for each; a long one is, or the others would wait for the thread that has it. Short
//! ones are tasks of one operation: a task is a query with all heads, or, where sequences have several,
//! as many of them as lie in some rows, with some heads.

use std::ops::Range;

use super::{Attention, AttentionShape, Buffers, TASKS_PER_THREAD, Task, Whole};
use crate::grid::Grid;
use crate::simd::Simd;
use crate::threads::Pool;
use crate::view::View;

/// Queries of short sequences that are a task: those of a few texts, whose keys are packed anew where two
/// tasks share one.
const TASK_ROWS: usize = 64;

/// Rows of one sequence that its queries attend to.
#[derive(Clone, Copy)]
pub struct Cached<'a> {
    /// Keys.
    pub k: View<'a>,
    /// Values.
    pub v: View<'a>,
    /// The row that belongs to the first of the queries.
    pub first_position: usize,
}

impl Cached<'_> {
    /// Rows that the first query sees.
    fn seen(&self, shape: &AttentionShape) -> usize {
        let rows = shape.mask.rows(self.first_position, self.k.rows().end);
        rows.len()
    }
}

/// Some sequences whose queries lie one after the other.
pub trait Sequences: Sync {
    /// How many there are.
    fn count(&self) -> usize;
    /// How many tokens of a sequence are queries.
    fn tokens(&self, index: usize) -> usize;
    /// What they attend to.
    fn cached(&self, index: usize) -> Cached<'_>;
}

impl Sequences for (usize, Cached<'_>) {
    fn count(&self) -> usize {
        1
    }

    fn tokens(&self, _: usize) -> usize {
        self.0
    }

    fn cached(&self, _: usize) -> Cached<'_> {
        self.1
    }
}

/// One call of [`Cpu::attention_each`](crate::Cpu::attention_each).
pub(crate) struct Each<'a, Q> {
    pub(crate) q: &'a [f32],
    pub(crate) sequences: &'a Q,
    pub(crate) shape: &'a AttentionShape,
    pub(crate) sinks: Option<&'a [f32]>,
}

impl<Q: Sequences> Each<'_, Q> {
    /// A sequence that is a large part of the work is shared by all threads, one after the other. The
    /// others are tasks of one operation, or of two: one query alone is another kind of work.
    ///
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
        let (single, short) = (
            self.small(pool.threads(), true),
            self.small(pool.threads(), false),
        );
        let out_width = self.shape.out_width();
        for (index, tokens) in self.ranges() {
            if !single(index) && !short(index) {
                let cached = self.sequences.cached(index);
                let out = &mut out[tokens.start * out_width..tokens.end * out_width];
                let attention = self.attention(&cached, tokens);
                attention.run(pool, simd, out, scratch);
            }
        }
        if (0..self.sequences.count()).any(single) {
            let grid = Grid::new(&mut *out, out_width, 1, out_width);
            self.small_ones(grid, pool, simd, single);
        }
        if (0..self.sequences.count()).any(short) {
            let [rows, columns] = self.task(out.len() / out_width, pool.threads());
            let grid = Grid::new(out, out_width, rows, columns);
            self.small_ones(grid, pool, simd, short);
        }
    }

    /// Rows and columns of the output that are a task where sequences have several queries, of which a
    /// task can hold as many.
    fn task(&self, rows: usize, threads: usize) -> [usize; 2] {
        let (part, most) = (self.shape.part(), self.shape.most_queries());
        let parts = self.shape.query_heads / part;
        let tokens = TASK_ROWS.min(most / part);
        let wanted = (threads * TASKS_PER_THREAD).div_ceil(rows.div_ceil(tokens));
        let parts = parts.div_ceil(wanted).min(most / (part * tokens)).max(1);
        [tokens, parts * part * self.shape.value_dim]
    }

    /// Attention of the sequences that are `wanted`, by tasks of a block each.
    fn small_ones<W: AsMut<Buffers> + Send + 'static>(
        &self,
        grid: Grid<'_, f32>,
        pool: &Pool<W>,
        simd: impl Simd,
        wanted: impl Fn(usize) -> bool + Sync,
    ) {
        let per_part = self.shape.part() * self.shape.value_dim;
        grid.run(pool, |mut out, worker| {
            let (rows, columns) = (out.rows(), out.cols());
            let behind = |(_, tokens): &(usize, Range<usize>)| tokens.end <= rows.start;
            let within = |(_, tokens): &(usize, Range<usize>)| tokens.start < rows.end;
            for (index, tokens) in self.ranges().skip_while(behind).take_while(within) {
                if tokens.is_empty() || !wanted(index) {
                    continue;
                }
                let first = tokens.start.max(rows.start);
                let cached = self.sequences.cached(index);
                let attention = self.attention(&cached, tokens.clone());
                simd.vectorize(Whole {
                    attention: &attention,
                    task: Task {
                        first_token: first - tokens.start,
                        tokens: tokens.end.min(rows.end) - first,
                        first_part: columns.start / per_part,
                        parts: columns.len() / per_part,
                    },
                    buffers: worker.as_mut(),
                    row: first,
                    out: out.reborrow(),
                });
            }
        });
    }

    /// The sequences, and which of all queries are theirs.
    fn ranges(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let mut start = 0;
        (0..self.sequences.count()).map(move |index| {
            let tokens = start..start + self.sequences.tokens(index);
            start = tokens.end;
            (index, tokens)
        })
    }

    fn check(&self, out: &[f32]) {
        let shape = self.shape;
        shape.check();
        let tokens: usize = (0..self.sequences.count())
            .map(|index| self.sequences.tokens(index))
            .sum();
        assert!(
            self.q.len() == tokens * shape.query_width() && out.len() == tokens * shape.out_width(),
            "queries of {tokens} tokens are rows of {} elements, results rows of {}",
            shape.query_width(),
            shape.out_width()
        );
    }

    /// What some of the tokens of all sequences, which are those of one, attend to.
    fn attention<'b>(&'b self, cached: &'b Cached<'_>, tokens: Range<usize>) -> Attention<'b> {
        let width = self.shape.query_width();
        let attention = Attention {
            q: &self.q[tokens.start * width..tokens.end * width],
            k: &cached.k,
            v: &cached.v,
            first_position: cached.first_position,
            shape: self.shape,
            sinks: self.sinks,
            part: self.shape.part(),
        };
        attention.check();
        attention
    }

    /// Which sequences are one query each, which a task can hold, or several; and so little of the work of
    /// all those that threads finish together if they are not shared.
    fn small(&self, threads: usize, single: bool) -> impl Fn(usize) -> bool + Copy + Sync {
        let work = move |index: usize| match self.sequences.tokens(index) {
            0 => 0,
            1 if single => self.sequences.cached(index).seen(self.shape),
            1 => 0,
            _ if single => 0,
            tokens => tokens * self.sequences.cached(index).seen(self.shape),
        };
        let all: usize = (0..self.sequences.count()).map(work).sum();
        let most = match !single || self.shape.query_heads <= self.shape.most_queries() {
            true => all / (threads * TASKS_PER_THREAD),
            false => 0,
        };
        move |index| (1..=most).contains(&work(index))
    }
}
