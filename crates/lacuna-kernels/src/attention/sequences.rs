//! Attention of several sequences at once.
//!
//! Each has its own context, short or long. A short one is not worth sharing between threads, which
//! would meet once for each; a long one is, or the others would wait for the thread that has it.

use std::ops::Range;

use super::{Attention, AttentionShape, Buffers, TASKS_PER_THREAD, Task, Whole};
use crate::grid::Grid;
use crate::simd::Simd;
use crate::threads::Pool;
use crate::view::View;

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
    /// A sequence that is a large part of the work is shared by all threads, one after the other. Of
    /// the others each is a task of one operation.
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
        let small = self.small(pool.threads());
        let out_width = self.shape.out_width();
        let mut start = 0;
        for index in 0..self.sequences.count() {
            let end = start + self.sequences.tokens(index);
            if !small(index) {
                let cached = self.sequences.cached(index);
                let attention = self.attention(&cached, start..end);
                let out = &mut out[start * out_width..end * out_width];
                attention.run(pool, simd, out, scratch);
            }
            start = end;
        }
        if !(0..self.sequences.count()).any(small) {
            return;
        }
        Grid::new(out, out_width, 1, out_width).run(pool, |out, worker| {
            let row = out.rows().start;
            let Some(index) = self.single(row).filter(|index| small(*index)) else {
                return;
            };
            let cached = self.sequences.cached(index);
            let attention = self.attention(&cached, row..row + 1);
            simd.vectorize(Whole {
                attention: &attention,
                task: Task {
                    first_token: 0,
                    tokens: 1,
                    first_part: 0,
                    parts: attention.parts(),
                },
                buffers: worker.as_mut(),
                out,
            });
        });
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

    /// Which sequences are one query each, which a task can hold, and so little of what all those see
    /// that threads finish together if they are not shared.
    fn small(&self, threads: usize) -> impl Fn(usize) -> bool + Copy + Sync {
        let seen = |index: usize| match self.sequences.tokens(index) {
            1 => self.sequences.cached(index).seen(self.shape),
            _ => 0,
        };
        let all: usize = (0..self.sequences.count()).map(seen).sum();
        let most = match self.shape.query_heads <= self.shape.most_queries() {
            true => all / (threads * TASKS_PER_THREAD),
            false => 0,
        };
        move |index| (1..=most).contains(&seen(index))
    }

    /// The sequence whose only query is `row`.
    fn single(&self, row: usize) -> Option<usize> {
        let mut start = 0;
        let first = |index: &usize| {
            start += self.sequences.tokens(*index);
            start > row
        };
        let index = (0..self.sequences.count()).find(first)?;
        (self.sequences.tokens(index) == 1).then_some(index)
    }
}
