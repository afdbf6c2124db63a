//! One partition of rows for the queries of a task.

use std::ops::Range;

use super::integers::{Integers, KeyBlock, PackIntegers, QuantizeQueries, QueryBlock};
use super::rows::{Ahead, BlockRows, Convert};
use super::scores::{self, HALVES, PackKeys, TILE, Tiles, Waiting, pack_queries};
use super::softmax::{Chunk, Soften};
use super::values::Values;
use super::{Attention, AttentionShape, BLOCK_ROWS, PARTITION, QUERIES, QUERY_CHUNKS, Task};
use crate::element::ElementType;
use crate::simd::{Kernel, LANES, Simd, padded};

/// Queries of one KV head from which on a packed copy of the keys pays.
const MANY: usize = 8;

/// How scores are computed. Results differ only between integers and the others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    Rows,
    Tiles,
    Integers,
}

/// What one worker needs to go through a partition.
pub(super) struct Buffers {
    /// `[queries, chunks]`, in the order KV head, token, query head of the group.
    queries: Box<[Chunk]>,
    /// The same in tiles of each KV head.
    tiles: Box<[[f32; TILE]]>,
    /// The same in integers.
    integers: Box<[QueryBlock]>,
    /// One head of a block's rows.
    rows: Box<[Chunk]>,
    keys: Box<[Chunk]>,
    key_blocks: Box<[KeyBlock]>,
    copy: Box<[u8]>,
    /// `[blocks, queries, HALVES]`: scores, then weights.
    scores: Box<[Chunk]>,
    waiting: Box<Waiting>,
}

impl Buffers {
    pub(super) fn new() -> Self {
        const CHUNKS: usize = AttentionShape::MAX_HEAD_DIM / LANES;
        let chunks = |n: usize| vec![Chunk::ZERO; n].into_boxed_slice();
        // Filling the last tile of a KV head less than doubles the queries.
        let tiles = 2 * QUERY_CHUNKS * LANES / TILE;
        let copy = LANES * ElementType::Q8_0.bytes(AttentionShape::MAX_HEAD_DIM);
        Self {
            queries: chunks(QUERY_CHUNKS),
            tiles: vec![[0.0; TILE]; tiles].into_boxed_slice(),
            integers: vec![QueryBlock::ZERO; QUERY_CHUNKS / 2].into_boxed_slice(),
            rows: chunks(BLOCK_ROWS * CHUNKS),
            keys: chunks(BLOCK_ROWS * CHUNKS),
            key_blocks: vec![KeyBlock::ZERO; CHUNKS / 2 * HALVES].into_boxed_slice(),
            copy: vec![0; copy].into_boxed_slice(),
            scores: chunks(QUERIES * PARTITION / LANES),
            waiting: Box::new([[[Chunk::ZERO; HALVES]; TILE]; _]),
        }
    }
}

/// A task whose queries are in its worker's buffers.
pub(super) struct Loaded<'a> {
    attention: &'a Attention<'a>,
    task: Task,
    method: Method,
    buffers: &'a mut Buffers,
}

/// A block and its place in the partition.
#[derive(Clone)]
struct Place {
    index: usize,
    start: usize,
    rows: Range<usize>,
}

/// The blocks that some rows of a partition are in.
fn blocks(partition: usize, rows: &Range<usize>) -> impl Iterator<Item = Place> + use<> {
    let rows = rows.clone();
    let starts = (rows.start / BLOCK_ROWS * BLOCK_ROWS..rows.end).step_by(BLOCK_ROWS);
    starts.map(move |start| Place {
        index: (start - partition * PARTITION) / BLOCK_ROWS,
        start,
        rows: rows.start.max(start)..rows.end.min(start + BLOCK_ROWS),
    })
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
        let element = attention.k.layout().element;
        let method = match task.tokens * attention.shape.group() {
            _ if element == ElementType::Q8_0 => Method::Integers,
            MANY.. => Method::Tiles,
            _ => Method::Rows,
        };
        let mut loaded = Self {
            attention,
            task,
            method,
            buffers,
        };
        loaded.load(s);
        match method {
            Method::Rows => {}
            Method::Tiles => loaded.pack(),
            Method::Integers => loaded.quantize(s),
        }
        loaded
    }

    #[inline(always)]
    fn load<S: Simd>(&mut self, s: S) {
        let (shape, task) = (self.attention.shape, self.task);
        let scale = s.splat(shape.scale);
        let mut out = self.buffers.queries.iter_mut();
        for head in task.first_head..task.first_head + task.heads {
            for token in task.all_tokens() {
                let row = token * shape.query_heads + head * shape.group();
                let queries = &self.attention.q[row * shape.head_dim..];
                for query in queries.chunks(shape.head_dim).take(shape.group()) {
                    for (chunk, out) in query.chunks(LANES).zip(&mut out) {
                        s.store(s.mul(s.load(&padded(chunk)), scale), &mut out.0);
                    }
                }
            }
        }
    }

    fn pack(&mut self) {
        let (chunks, queries) = (self.attention.shape.chunks(), self.head_queries());
        let heads = self.buffers.queries.chunks_exact(queries * chunks);
        let tiles = self.buffers.tiles.chunks_exact_mut(self.head_tiles());
        for (queries, tiles) in heads.zip(tiles).take(self.task.heads) {
            pack_queries(queries, chunks, tiles);
        }
    }

    #[inline(always)]
    fn quantize<S: Simd>(&mut self, s: S) {
        let count = self.queries() * self.attention.shape.chunks();
        s.vectorize(QuantizeQueries {
            queries: &self.buffers.queries[..count],
            out: &mut self.buffers.integers,
        });
    }

    /// Queries of one KV head.
    fn head_queries(&self) -> usize {
        self.task.tokens * self.attention.shape.group()
    }

    /// Elements of the tiles of one KV head.
    fn head_tiles(&self) -> usize {
        self.head_queries().div_ceil(TILE) * LANES * self.attention.shape.chunks()
    }

    pub(super) fn queries(&self) -> usize {
        self.task.heads * self.head_queries()
    }

    fn heads(&self) -> Range<usize> {
        self.task.first_head..self.task.first_head + self.task.heads
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
        let (attention, task) = (self.loaded.attention, self.loaded.task);
        let start = self.index * PARTITION;
        let seen = attention.sight(task.first_token).of_tokens(task.tokens);
        let rows = seen.start.max(start)..seen.end.min(start + PARTITION);
        self.states.fill(Chunk::ZERO);
        for place in blocks(self.index, &rows) {
            for head in self.loaded.heads() {
                let ahead = if place.rows.end < rows.end {
                    self.ahead(Side::Keys, place.start + BLOCK_ROWS, head)
                } else {
                    self.ahead(Side::Values, start, head)
                };
                self.scores(s, &place, head, ahead);
            }
        }
        self.soften(s);
        for place in blocks(self.index, &rows) {
            for head in self.loaded.heads() {
                let ahead = if place.rows.end < rows.end {
                    self.ahead(Side::Values, place.start + BLOCK_ROWS, head)
                } else {
                    self.ahead(Side::Keys, self.next * PARTITION, head)
                };
                self.values(s, &place, head, ahead);
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Side {
    Keys,
    Values,
}

impl<'b> Partition<'_, 'b> {
    /// The block from row `start` on, to be fetched.
    fn ahead(&self, side: Side, start: usize, head: usize) -> Ahead<'b> {
        let attention = self.loaded.attention;
        let view = match side {
            Side::Keys => attention.k,
            Side::Values => attention.v,
        };
        let rows = start..start + BLOCK_ROWS;
        Ahead::share(view, rows, &self.loaded.heads(), head)
    }

    /// Queries of one KV head, of those of the task, that see rows of a block.
    fn seeing(&self, place: &Place) -> Range<usize> {
        let (task, attention) = (self.loaded.task, self.loaded.attention);
        let tokens = attention
            .sight(task.first_token)
            .tokens_of(place.start..place.start + BLOCK_ROWS, task.tokens);
        let group = attention.shape.group();
        tokens.start * group..tokens.end * group
    }

    #[inline(always)]
    fn scores<S: Simd>(&mut self, s: S, place: &Place, head: usize, mut ahead: Ahead<'_>) {
        let shape = self.loaded.attention.shape;
        let chunks = shape.chunks();
        let queries = self.loaded.head_queries();
        let (tiles, all) = (self.loaded.head_tiles(), self.loaded.queries());
        let seeing = self.seeing(place);
        let head_index = head - self.loaded.task.first_head;
        let first = head_index * queries;
        let block = BlockRows {
            view: self.loaded.attention.k,
            head,
            start: place.start,
            rows: place.rows.clone(),
        };
        let method = self.loaded.method;
        let buffers = &mut *self.loaded.buffers;
        let scores = &mut buffers.scores[place.index * all * HALVES..][..all * HALVES];
        let scores = &mut scores[first * HALVES..][..queries * HALVES];
        if method != Method::Integers {
            s.vectorize(Convert {
                block: &block,
                out: &mut buffers.rows,
                ahead: &mut ahead,
            });
        }
        match method {
            Method::Rows => s.vectorize(scores::Rows {
                keys: &buffers.rows,
                queries: &buffers.queries[(first + seeing.start) * chunks..]
                    [..seeing.len() * chunks],
                chunks,
                scores: &mut scores[seeing.start * HALVES..seeing.end * HALVES],
                ahead: &mut ahead,
            }),
            Method::Tiles => {
                s.vectorize(PackKeys {
                    keys: &buffers.rows,
                    chunks,
                    out: &mut buffers.keys,
                });
                let tiles = &buffers.tiles[head_index * tiles..][..tiles];
                let tiles = tiles.chunks_exact(LANES * chunks).enumerate();
                for (tile, queries) in tiles
                    .take(seeing.end.div_ceil(TILE))
                    .skip(seeing.start / TILE)
                {
                    ahead.fetch::<S, 16>(s);
                    let end = scores.len().min((tile + 1) * TILE * HALVES);
                    s.vectorize(Tiles {
                        keys: &buffers.keys,
                        queries,
                        scores: &mut scores[tile * TILE * HALVES..end],
                        waiting: &mut buffers.waiting,
                    });
                }
            }
            Method::Integers => {
                let blocks = chunks / 2;
                let keys = &mut buffers.key_blocks[..blocks * HALVES];
                s.vectorize(PackIntegers {
                    block: &block,
                    copy: &mut buffers.copy,
                    out: keys,
                    ahead: &mut ahead,
                });
                s.vectorize(Integers {
                    keys,
                    queries: &buffers.integers[(first + seeing.start) * blocks..]
                        [..seeing.len() * blocks],
                    scores: &mut scores[seeing.start * HALVES..seeing.end * HALVES],
                });
            }
        }
        ahead.fetch_all(s);
    }

    #[inline(always)]
    fn soften<S: Simd>(&mut self, s: S) {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let (queries, group) = (self.loaded.queries(), attention.shape.group());
        let sight = attention.sight(task.first_token);
        for (query, state) in
            (0..queries).zip(self.states.chunks_exact_mut(attention.shape.state_chunks()))
        {
            let token = query / group % task.tokens;
            let visible = sight.within(token, self.index * PARTITION, PARTITION);
            if !visible.is_empty() {
                state[0] = s.vectorize(Soften {
                    scores: &mut self.loaded.buffers.scores[query * HALVES..],
                    stride: queries * HALVES,
                    visible,
                });
            }
        }
    }

    #[inline(always)]
    fn values<S: Simd>(&mut self, s: S, place: &Place, head: usize, mut ahead: Ahead<'_>) {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let (shape, all) = (attention.shape, self.loaded.queries());
        let seeing = self.seeing(place);
        let first = (head - task.first_head) * self.loaded.head_queries() + seeing.start;
        let block = BlockRows {
            view: attention.v,
            head,
            start: place.start,
            rows: place.rows.clone(),
        };
        let buffers = &mut *self.loaded.buffers;
        s.vectorize(Convert {
            block: &block,
            out: &mut buffers.rows,
            ahead: &mut ahead,
        });
        let weights = &buffers.scores[(place.index * all + first) * HALVES..];
        let per_query = shape.state_chunks();
        s.vectorize(Values {
            values: &buffers.rows,
            chunks: shape.chunks(),
            weights: &weights[..seeing.len() * HALVES],
            states: &mut self.states[first * per_query..][..seeing.len() * per_query],
            sight: attention.sight(task.first_token + seeing.start / shape.group()),
            group: shape.group(),
            start: place.start,
            ahead: &mut ahead,
        });
        ahead.fetch_all(s);
    }
}
