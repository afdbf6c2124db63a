//! A partition for many queries: one to each lane.

use std::ops::Range;

use super::super::ahead::Ahead;
use super::super::arithmetic::{Arithmetic, InBf16, InF32};
use super::super::columns::{
    IntegerKeys, Keys, MOST_QUERIES, PackColumns, PackIntegerColumns, QueryBlocks, Scored, Scores,
    Seen, Tile, Values, packed_len, tile_queries,
};
use super::super::rows::{CopyIntegerKeys, CopyKeys, CopyValues, Head};
use super::super::{Attention, AttentionShape, COLUMN_CHUNKS, PARTITION};
use super::{Loaded, Partition, Side};
use crate::activations::BLOCK;
use crate::elementwise::activation::SoftCap;
use crate::simd::{Chunk, LANES, Simd};

/// What one worker needs for that.
pub(super) struct Buffers {
    pub(super) scoring: Scoring,
    /// The part whose queries are packed.
    packed: Option<usize>,
    /// One head of the rows of a partition ...
    pub(super) values: Copied,
    /// ... and what their units are worth, if they have some.
    units: Box<[[f32; PARTITION]]>,
    /// Weights of one tile, `[PARTITION, vectors]`.
    pub(super) weights: Box<[Chunk]>,
    /// Sums of one tile, `[elements, vectors]`, or its states.
    pub(super) sums: Box<[Chunk]>,
}

impl Buffers {
    pub(super) fn new() -> Self {
        const CHUNKS: usize = AttentionShape::MAX_HEAD_DIM / LANES;
        let chunks = |n: usize| vec![Chunk::ZERO; n].into_boxed_slice();
        let units = || vec![[0.0; PARTITION]; CHUNKS / 2].into_boxed_slice();
        // The last vector may not be full.
        let queries = COLUMN_CHUNKS + (LANES - 1) * CHUNKS;
        Self {
            scoring: Scoring {
                queries: chunks(queries),
                integers: vec![QueryBlocks::ZERO; queries.div_ceil(2 * LANES)].into_boxed_slice(),
                keys: Copied::new(),
                units: units(),
            },
            packed: None,
            values: Copied::new(),
            units: units(),
            weights: chunks(PARTITION * MOST_QUERIES / LANES),
            sums: chunks((1 + CHUNKS) * MOST_QUERIES),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let Self {
            scoring,
            packed: _,
            values,
            units,
            weights,
            sums,
        } = self;
        scoring.bytes()
            + values.bytes()
            + size_of_val(&**units)
            + size_of_val(&**weights)
            + size_of_val(&**sums)
    }

    /// What is packed is of another task.
    pub(super) fn forget_queries(&mut self) {
        self.packed = None;
    }
}

/// What scores are computed from.
pub(super) struct Scoring {
    /// Queries of one part, packed in tiles ...
    pub(super) queries: Box<[Chunk]>,
    /// ... which for keys that are integers are these.
    integers: Box<[QueryBlocks]>,
    /// One head of the rows of a partition ...
    pub(super) keys: Copied,
    /// ... and what their units are worth, if they are integers.
    units: Box<[[f32; PARTITION]]>,
}

impl Scoring {
    fn bytes(&self) -> usize {
        let Self {
            queries,
            integers,
            keys,
            units,
        } = self;
        size_of_val(&**queries) + size_of_val(&**integers) + keys.bytes() + size_of_val(&**units)
    }

    /// The queries of one tile, as they were packed, and the keys they are multiplied with.
    pub(super) fn of<A: Arithmetic>(
        &self,
        attention: &Attention<'_>,
        tile: Range<usize>,
    ) -> Scored<'_> {
        let head_dim = attention.shape.head_dim;
        let vectors = tile.start / LANES..tile.end.div_ceil(LANES);
        let rows = self.keys.rows();
        if attention.integer_keys() {
            let blocks = head_dim / BLOCK;
            return Scored::Integers {
                queries: &self.integers[vectors.start * blocks..vectors.end * blocks],
                keys: IntegerKeys {
                    rows,
                    steps: head_dim.div_ceil(2 * BLOCK),
                    units: &self.units[..blocks],
                },
            };
        }
        let steps = steps::<A>(head_dim);
        let per_vector = LANES * steps;
        Scored::Elements {
            queries: &self.queries[vectors.start * per_vector..vectors.end * per_vector],
            keys: Keys {
                rows,
                steps,
                tail: (head_dim - (steps - 1) * LANES * A::AT_ONCE).div_ceil(A::AT_ONCE),
            },
        }
    }
}

/// Room for the longest rows of a partition. Memory that shorter ones do not reach is never touched, so the system
/// does not give it.
pub(super) struct Copied {
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

    pub(super) fn rows(&self) -> &[[f32; LANES]] {
        self.elements[self.start..].as_chunks().0
    }

    pub(super) fn rows_mut(&mut self) -> &mut [[f32; LANES]] {
        self.elements[self.start..].as_chunks_mut().0
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.elements)
    }
}

impl<'a> Loaded<'a> {
    /// The elements of each query of a part.
    pub(super) fn query(&self, part: usize) -> impl Fn(usize) -> &'a [f32] + use<'a> {
        let (attention, task) = (self.attention, self.task);
        let (shape, group) = (attention.shape, attention.part);
        move |query| {
            let token = task.first_token + query / group;
            let head = token * shape.query_heads + part * group + query % group;
            &attention.q[head * shape.head_dim..][..shape.head_dim]
        }
    }

    /// Packs the queries of a part, if they are not packed already, for keys that are integers or `elements`.
    #[inline(always)]
    pub(super) fn pack<S: Simd>(&mut self, s: S, part: usize, elements: impl FnOnce(&mut Self)) {
        if self.buffers.columns.packed == Some(part) {
            return;
        }
        let shape = self.attention.shape;
        if self.attention.integer_keys() {
            let (query, count) = (self.query(part), self.part_queries());
            let blocks = shape.head_dim / BLOCK;
            let integers = &mut self.buffers.columns.scoring.integers;
            s.vectorize(PackIntegerColumns {
                query,
                count,
                scale: shape.scale,
                blocks,
                out: &mut integers[..count.div_ceil(LANES) * blocks],
            });
        } else {
            elements(self);
        }
        self.buffers.columns.packed = Some(part);
    }

    #[inline(always)]
    fn pack_elements<S: Simd, A: Arithmetic>(&mut self, s: S, arithmetic: A, part: usize) {
        let (query, count) = (self.query(part), self.part_queries());
        let shape = self.attention.shape;
        let steps = steps::<A>(shape.head_dim);
        s.vectorize(PackColumns {
            arithmetic,
            query,
            count,
            scale: shape.scale,
            steps,
            out: &mut self.buffers.columns.scoring.queries[..packed_len(count, steps)],
        });
    }
}

/// Vectors that a head takes.
pub(super) fn steps<A: Arithmetic>(head_dim: usize) -> usize {
    head_dim.div_ceil(LANES * A::AT_ONCE)
}

impl<'b> Partition<'_, 'b> {
    /// All of a partition, one tile of queries after the other.
    #[inline(always)]
    pub(super) fn columns<S: Simd>(&mut self, s: S, rows: &Range<usize>) {
        match self.loaded.attention.rounded {
            Some(rounded) => self.columns_in(s, InBf16(rounded), rows),
            None => self.columns_in(s, InF32, rows),
        }
    }

    #[inline(always)]
    fn columns_in<S: Simd, A: Arithmetic>(&mut self, s: S, arithmetic: A, rows: &Range<usize>) {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let shape = attention.shape;
        let (count, per_query) = (self.loaded.part_queries(), shape.state_chunks());
        for part in self.loaded.parts() {
            let loaded = &mut *self.loaded;
            loaded.pack(s, part, |loaded| loaded.pack_elements(s, arithmetic, part));
            self.copy(s, arithmetic, part, rows);
            let [keys, values] =
                &mut [Side::Keys, Side::Values].map(|side| self.behind(side, part));
            let tiles = self.tiles::<S>();
            let states = &mut self.states[(part - task.first_part) * count * per_query..];
            let buffers = &mut *self.loaded.buffers;
            let columns = &mut buffers.columns;
            for (tile, seen) in tiles {
                s.vectorize(Tile {
                    arithmetic,
                    scores: Scores {
                        scored: columns.scoring.of::<A>(attention, tile.clone()),
                        seen: &seen,
                        cap: shape.soft_cap.map(SoftCap),
                        scores: &mut buffers.scores,
                        states: &mut states[tile.start * per_query..tile.end * per_query],
                        per_query,
                        ahead: keys,
                    },
                    values: Values {
                        rows: columns.values.rows(),
                        chunks: shape.value_chunks(),
                        dim: shape.value_dim,
                        units: match attention.v.layout().element.is_in_units() {
                            true => &columns.units,
                            false => &[],
                        },
                    },
                    weights: &mut columns.weights,
                    sums: &mut columns.sums,
                    ahead: values,
                });
            }
        }
    }

    /// The tiles of the queries of a part of which some see rows of the partition, and which these are.
    pub(super) fn tiles<S: Simd>(&self) -> impl Iterator<Item = (Range<usize>, Seen)> + use<S> {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let (sight, group) = (attention.sight(task.first_token), attention.part);
        let (count, len) = (self.loaded.part_queries(), tile_queries(S::REGISTERS));
        let start = self.index * PARTITION;
        (0..count).step_by(len).filter_map(move |first| {
            let tile = first..count.min(first + len);
            let visible = |query: usize| sight.within((first + query) / group, start, PARTITION);
            let seen = Seen::new(tile.len(), visible)?;
            Some((tile, seen))
        })
    }

    /// Copies the keys and values that a part needs.
    #[inline(always)]
    fn copy<S: Simd, A: Arithmetic>(
        &mut self,
        s: S,
        arithmetic: A,
        part: usize,
        rows: &Range<usize>,
    ) {
        self.copy_keys(s, arithmetic, part, rows);
        let attention = self.loaded.attention;
        let columns = &mut self.loaded.buffers.columns;
        s.vectorize(CopyValues {
            arithmetic,
            values: Head {
                view: attention.v,
                head: attention.kv_head(part),
                start: self.index * PARTITION,
                rows: rows.clone(),
            },
            chunks: attention.shape.value_chunks(),
            out: columns.values.rows_mut(),
            units: &mut columns.units,
        });
    }

    /// Copies the keys that a part needs.
    #[inline(always)]
    pub(super) fn copy_keys<S: Simd, A: Arithmetic>(
        &mut self,
        s: S,
        arithmetic: A,
        part: usize,
        rows: &Range<usize>,
    ) {
        let attention = self.loaded.attention;
        let (shape, head) = (attention.shape, attention.kv_head(part));
        let start = self.index * PARTITION;
        // Values are fetched while keys are copied.
        let heads = self.loaded.heads();
        let mut ahead = Ahead::share(attention.v, rows.clone(), &heads, head);
        let columns = &mut self.loaded.buffers.columns;
        let keys = Head {
            view: attention.k,
            head,
            start,
            rows: rows.clone(),
        };
        if attention.integer_keys() {
            s.vectorize(CopyIntegerKeys {
                keys,
                steps: shape.head_dim.div_ceil(2 * BLOCK),
                out: columns.scoring.keys.rows_mut(),
                units: &mut columns.scoring.units,
                ahead: &mut ahead,
            });
        } else {
            s.vectorize(CopyKeys {
                arithmetic,
                keys,
                steps: steps::<A>(shape.head_dim),
                out: columns.scoring.keys.rows_mut(),
                ahead: &mut ahead,
            });
        }
    }

    /// The rows of the partition that this worker probably goes on with.
    pub(super) fn behind(&self, side: Side, part: usize) -> Ahead<'b> {
        let rows = self.next * PARTITION..(self.next + 1) * PARTITION;
        let head = self.loaded.attention.kv_head(part);
        Ahead::share(self.view(side), rows, &self.loaded.heads(), head)
    }
}
