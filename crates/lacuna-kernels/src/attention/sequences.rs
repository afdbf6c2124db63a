//! Attention of several sequences at once.
//!
//! Each has its own context, short or long. A short one is not worth sharing between threads, which
//! would meet once for each; a long one is, or the others would wait for the thread that has it. Short
//! ones are tasks of one operation: a task is a query with all heads, or, where sequences have several,
//! as many of them as lie in some rows, with some heads.
//!
//! Where sequences of one query each have their first rows in the same memory, those are gone through once for all of them,
//! as for several queries of one sequence; each goes on from there with the rows of its own. Partitions are merged in their
//! order either way, so the results are the same.

use std::ops::Range;

use super::mask::{Mask, Sight};
use super::{
    Attention, AttentionShape, Begun, Buffers, Common, PARTITION, TASKS_PER_THREAD, Task, Whole,
};
use crate::grid::Grid;
use crate::simd::{Bf16Products, LANES, Simd};
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
    /// Whether the queries see all rows that are held behind their own too: those of an image see one another.
    pub ahead: bool,
}

impl Cached<'_> {
    /// Rows that the first query sees.
    fn seen(&self, shape: &AttentionShape) -> usize {
        let sight = Sight {
            mask: shape.mask,
            first: self.first_position,
            end: self.k.rows().end,
            ahead: self.ahead,
        };
        sight.of(0).len()
    }
}

/// Sequences of one query each whose first rows are the same, in the same memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedRows {
    /// Which they are, in order.
    pub sequences: Vec<usize>,
    /// How many rows, from row 0 on: no more than come before any of the queries.
    pub rows: usize,
}

impl SharedRows {
    /// Fewer rows than these are gone through by each sequence for itself.
    pub const FEWEST: usize = PARTITION;
}

/// Some sequences whose queries lie one after the other.
pub trait Sequences: Sync {
    /// Those that have first rows in common, each at most once. Default none.
    fn shared(&self) -> &[SharedRows] {
        &[]
    }

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

/// Sequences that go through their first partitions together.
struct Group<'a> {
    sequences: &'a [usize],
    partitions: usize,
    /// Of all that do so in groups, which the first of these is.
    first: usize,
}

/// One call of [`Cpu::attention_each`](crate::Cpu::attention_each).
pub(crate) struct Each<'a, Q> {
    pub(crate) q: &'a [f32],
    pub(crate) sequences: &'a Q,
    pub(crate) shape: &'a AttentionShape,
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) rounded: Option<Bf16Products>,
    pub(crate) threads: usize,
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
        let (room, scratch) = scratch.split_at_mut(self.common_len(scratch.len()));
        let common = self.begin(pool, simd, room);
        let (single, short) = (
            self.small(pool.threads(), true, common),
            self.small(pool.threads(), false, common),
        );
        let out_width = self.shape.out_width();
        for (index, tokens) in self.ranges() {
            if !single(index) && !short(index) {
                let cached = self.sequences.cached(index);
                let out = &mut out[tokens.start * out_width..tokens.end * out_width];
                let attention = self.attention(&cached, tokens, self.begun(index, common));
                attention.run(pool, simd, out, scratch);
            }
        }
        if (0..self.sequences.count()).any(single) {
            let grid = Grid::new(&mut *out, out_width, 1, out_width);
            self.small_ones(grid, pool, simd, single, common);
        }
        if (0..self.sequences.count()).any(short) {
            let [rows, columns] = self.task(out.len() / out_width, pool.threads());
            let grid = Grid::new(out, out_width, rows, columns);
            self.small_ones(grid, pool, simd, short, common);
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
        common: &[f32],
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
                let attention = self.attention(&cached, tokens.clone(), self.begun(index, common));
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

    /// Elements of `room` that are used for what sequences have in common: at most half.
    fn common_len(&self, room: usize) -> usize {
        let wanted = self.groups(usize::MAX).map(|group| group.sequences.len());
        let wanted: usize = wanted.sum();
        wanted.min(room / 2 / self.common_width()) * self.common_width()
    }

    /// Elements for the queries and the states of a token.
    fn common_width(&self) -> usize {
        self.shape.query_width() + self.states_width()
    }

    /// Sequences whose first partitions are gone through together, `most` at most.
    fn groups(&self, most: usize) -> impl Iterator<Item = Group<'_>> {
        let shared = match self.shape.mask {
            // Of what windows see, little is the same.
            Mask::Causal => self.sequences.shared(),
            _ => &[],
        };
        let mut left = most;
        // Tasks are queries of a part of the heads. If they are fewer than threads, the rows of each sequence are better
        // split between all of them.
        let parts = self.shape.query_heads / self.shape.part();
        shared.iter().filter_map(move |shared| {
            let (partitions, count) = (shared.rows / PARTITION, shared.sequences.len().min(left));
            let pays = partitions > 0 && count > 1 && parts * count >= self.threads;
            pays.then(|| {
                let first = most - left;
                left -= count;
                Group {
                    sequences: &shared.sequences[..count],
                    partitions,
                    first,
                }
            })
        })
    }

    /// Goes through the rows that sequences have in common, in `room`, which is as long as [`Each::common_len`] says.
    /// Returns the states of their queries.
    fn begin<'b, W: AsMut<Buffers> + Send + 'static>(
        &self,
        pool: &Pool<W>,
        simd: impl Simd,
        room: &'b mut [f32],
    ) -> &'b [f32] {
        let most = room.len() / self.common_width();
        let (width, states_width) = (self.shape.query_width(), self.states_width());
        let (states, queries) = room.split_at_mut(most * states_width);
        // All queries see all of these rows.
        let shape = AttentionShape {
            mask: Mask::Full,
            ..*self.shape
        };
        for group in self.groups(most) {
            let members = group.first..group.first + group.sequences.len();
            let queries = &mut queries[members.start * width..members.end * width];
            self.gather(&group, queries);
            let cached = self.sequences.cached(group.sequences[0]);
            let rows = group.partitions * PARTITION;
            let attention = Attention {
                q: queries,
                k: &cached.k.up_to(rows),
                v: &cached.v.up_to(rows),
                first_position: 0,
                ahead: false,
                shape: &shape,
                sinks: None,
                part: shape.part(),
                rounded: self.rounded,
                begun: None,
            };
            attention.check();
            let per_part = attention.part * self.shape.state_chunks() * LANES;
            let tokens = attention.tokens_per_task(pool.threads());
            let states = &mut states[members.start * states_width..members.end * states_width];
            let grid = Grid::new(states, states_width, tokens, per_part);
            grid.run(pool, |out, worker| {
                let tokens = out.rows();
                simd.vectorize(Common {
                    attention: &attention,
                    task: Task {
                        first_token: tokens.start,
                        tokens: tokens.len(),
                        first_part: out.cols().start / per_part,
                        parts: 1,
                    },
                    buffers: worker.as_mut(),
                    out,
                });
            });
        }
        states
    }

    /// Copies the queries of a group, which may lie apart.
    fn gather(&self, group: &Group<'_>, queries: &mut [f32]) {
        let width = self.shape.query_width();
        let mut ranges = self.ranges();
        for (member, query) in group.sequences.iter().zip(queries.chunks_exact_mut(width)) {
            let found = ranges.find(|(index, _)| index == member);
            let (_, tokens) =
                found.expect("sequences that share rows are named in order, once each");
            let position = self.sequences.cached(*member).first_position;
            assert!(
                tokens.len() == 1 && position >= group.partitions * PARTITION,
                "one query behind {} rows: {} of row {position}",
                group.partitions * PARTITION,
                tokens.len(),
            );
            query.copy_from_slice(&self.q[tokens.start * width..tokens.end * width]);
        }
    }

    /// What `common` has of a sequence's query.
    fn begun<'b>(&self, index: usize, common: &'b [f32]) -> Option<Begun<'b>> {
        let width = self.states_width();
        self.groups(common.len() / width).find_map(|group| {
            let place = group.first + group.sequences.binary_search(&index).ok()?;
            Some(Begun {
                partitions: group.partitions,
                states: &common[place * width..][..width],
            })
        })
    }

    /// Elements of the states of a token.
    fn states_width(&self) -> usize {
        self.shape.query_heads * self.shape.state_chunks() * LANES
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
    fn attention<'b>(
        &'b self,
        cached: &'b Cached<'_>,
        tokens: Range<usize>,
        begun: Option<Begun<'b>>,
    ) -> Attention<'b> {
        let width = self.shape.query_width();
        let attention = Attention {
            q: &self.q[tokens.start * width..tokens.end * width],
            k: &cached.k,
            v: &cached.v,
            first_position: cached.first_position,
            ahead: cached.ahead,
            shape: self.shape,
            sinks: self.sinks,
            part: self.shape.part(),
            rounded: self.rounded,
            begun,
        };
        attention.check();
        attention
    }

    /// Which sequences are one query each, which a task can hold, or several; and so little of the work of
    /// all those that threads finish together if they are not shared.
    fn small(
        &self,
        threads: usize,
        single: bool,
        common: &[f32],
    ) -> impl Fn(usize) -> bool + Copy + Sync {
        let work = move |index: usize| match self.sequences.tokens(index) {
            0 => 0,
            1 if single => {
                let begun = self.begun(index, common);
                let begun = begun.map_or(0, |begun| begun.partitions * PARTITION);
                self.sequences.cached(index).seen(self.shape) - begun
            }
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
