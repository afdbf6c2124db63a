//! A partition by AMX.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::ahead::Ahead;
use super::super::arithmetic::InBf16;
use super::super::columns::{CopyTiles, PackTiles, QueryTile, Scores, packed_len};
use super::super::elements::with_element;
use super::super::pairs::{AddOutliers, CopyBoth};
use super::super::rows::Head;
use super::super::stored::StoredRows;
use super::super::tiles::{TileScores, TileValues, WEIGHT_LINES};
use super::super::values::Sums;
use super::super::{COLUMN_CHUNKS, InTiles, PARTITION, PARTITION_CHUNKS};
use super::columns::steps;
use super::{Loaded, Method, Partition, Side};
use crate::elementwise::activation::SoftCap;
use crate::simd::amx::{ROWS, Tiles};
use crate::simd::{LANES, Simd};

impl Loaded<'_> {
    /// Packs the queries of a part behind those that have so many chunks.
    #[inline(always)]
    fn pack_tiles<S: Simd>(&mut self, s: S, tiles: InTiles, part: usize, before: usize) {
        let (query, count) = (self.query(part), self.part_queries());
        let shape = self.attention.shape;
        let steps = steps::<InBf16>(shape.head_dim);
        let out = &mut self.buffers.columns.scoring.queries[before..];
        s.vectorize(PackTiles {
            proof: tiles.proof,
            query,
            count,
            scale: shape.scale,
            steps,
            out: &mut out[..packed_len(count, steps)],
        });
    }
}

impl Partition<'_, '_> {
    /// All of a partition.
    #[inline(always)]
    pub(super) fn in_tiles<S: Simd>(&mut self, s: S, tiles: InTiles, rows: &Range<usize>) {
        match self.loaded.method {
            Method::Columns => return self.tile_columns(s, tiles, rows),
            Method::IntegerRows => self.stored_integer_scores(s, rows),
            Method::Rows => self.tile_scores(s, tiles, rows),
        }
        self.soften(s);
        self.tile_values(s, tiles, rows);
    }

    /// For many queries: from copies, one tile of queries after the other.
    #[inline(always)]
    fn tile_columns<S: Simd>(&mut self, s: S, tiles: InTiles, rows: &Range<usize>) {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let shape = attention.shape;
        let start = self.index * PARTITION;
        let sight = attention.sight(task.first_token);
        let count = self.loaded.part_queries();
        let per_query = shape.state_chunks();
        let registers = Tiles::new(tiles.amx, ROWS);
        for part in self.loaded.parts() {
            let loaded = &mut *self.loaded;
            loaded.pack(s, part, |loaded| loaded.pack_tiles(s, tiles, part, 0));
            let is_copied_once = attention.is_copied_once(rows);
            let keys_ahead = &mut self.behind(Side::Keys, part);
            let values_ahead = &mut match is_copied_once {
                true => Ahead::nothing(attention.v),
                false => self.behind(Side::Values, part),
            };
            let steps = steps::<InBf16>(shape.head_dim);
            let chunks = shape.value_chunks();
            let tiles_of_queries = self.tiles::<S>();
            let head = |view| Head {
                view,
                head: attention.kv_head(part),
                start,
                rows: rows.clone(),
            };
            let values = head(attention.v);
            if !is_copied_once {
                self.copy_keys(s, InBf16(tiles.proof), part, rows);
            }
            let buffers = &mut *self.loaded.buffers;
            let columns = &mut buffers.columns;
            let may_have_outliers = !is_copied_once
                || s.vectorize(CopyBoth {
                    proof: tiles.proof,
                    keys: &head(attention.k),
                    steps,
                    chunks,
                    key_rows: columns.scoring.keys.rows_mut(),
                    value_pairs: columns.values.rows_mut(),
                    ahead: keys_ahead,
                });
            let have_outliers = may_have_outliers
                && s.vectorize(CopyTiles {
                    proof: tiles.proof,
                    values: &values,
                    chunks,
                    out: columns.values.rows_mut(),
                });
            let states = &mut self.states[(part - task.first_part) * count * per_query..];
            for (tile, seen) in tiles_of_queries {
                let (first, vectors) = (tile.start, tile.len().div_ceil(LANES));
                let states = &mut states[tile.start * per_query..tile.end * per_query];
                s.vectorize(QueryTile {
                    registers: &registers,
                    proof: tiles.proof,
                    scores: Scores {
                        scored: columns.scoring.of::<InBf16>(attention, tile),
                        seen: &seen,
                        cap: shape.soft_cap.map(SoftCap),
                        scores: &mut buffers.scores,
                        states,
                        per_query,
                        ahead: keys_ahead,
                    },
                    values: columns.values.rows(),
                    chunks,
                    weights: &mut columns.weights,
                    sums: &mut columns.sums,
                    ahead: values_ahead,
                });
                if have_outliers {
                    let weights = &buffers.scores;
                    s.vectorize(AddOutliers {
                        head: &values,
                        visible: |query| {
                            let token = (first + query) / attention.part;
                            sight.within(token, start, PARTITION)
                        },
                        weight: |query: usize, row: usize| {
                            weights[row * vectors + query / LANES].0[query % LANES]
                        },
                        states,
                        per_query,
                    });
                }
            }
        }
    }

    /// Scores of the queries of all parts.
    #[inline(always)]
    fn tile_scores<S: Simd>(&mut self, s: S, tiles: InTiles, rows: &Range<usize>) {
        let attention = self.loaded.attention;
        let per_part = self.loaded.part_queries();
        let steps = steps::<InBf16>(attention.shape.head_dim);
        // Queries of a part take a whole tile, and there may be more parts than room for them.
        let (all, chunks) = (self.loaded.parts(), packed_len(per_part, steps));
        let together = COLUMN_CHUNKS / chunks;
        let registers = Tiles::new(tiles.amx, ROWS);
        for first in all.clone().step_by(together) {
            let parts = first..all.end.min(first + together);
            for part in parts.clone() {
                self.loaded
                    .pack_tiles(s, tiles, part, (part - first) * chunks);
            }
            let stored = StoredRows {
                parts,
                ..self.stored_rows(Side::Keys, rows)
            };
            let buffers = &mut *self.loaded.buffers;
            let scoring = &mut buffers.columns.scoring;
            let before = (first - all.start) * per_part * PARTITION_CHUNKS;
            with_element!(
                attention.k.layout().element,
                |E| s.vectorize(TileScores::<E> {
                    registers: &registers,
                    proof: tiles.proof,
                    rows: stored,
                    copy: &mut buffers.copy,
                    queries: &scoring.queries,
                    steps,
                    keys: scoring.keys.rows_mut(),
                    scores: &mut buffers.scores[before..],
                    element: PhantomData,
                }),
                integers: unreachable!("their scores are sums of integers")
            );
        }
    }

    /// Values times weights, for the queries of all parts.
    #[inline(always)]
    fn tile_values<S: Simd>(&mut self, s: S, tiles: InTiles, rows: &Range<usize>) {
        let Loaded {
            attention, task, ..
        } = *self.loaded;
        let (per_part, per_query) = (self.loaded.part_queries(), attention.shape.state_chunks());
        let (start, sight) = (self.index * PARTITION, attention.sight(task.first_token));
        let stored = self.stored_rows(Side::Values, rows);
        let parts = self.loaded.parts();
        let buffers = &mut *self.loaded.buffers;
        let columns = &mut buffers.columns;
        let sums = Sums {
            weights: &buffers.scores,
            states: self.states,
            chunks: attention.shape.value_chunks(),
            sight,
            group: attention.part,
            queries_per_part: per_part,
            start,
            rows: PARTITION,
        };
        let have_outliers =
            with_element!(attention.v.layout().element, |E| s.vectorize(TileValues::<
                E,
            > {
                registers: &Tiles::new(tiles.amx, per_part),
                proof: tiles.proof,
                rows: stored,
                copy: &mut buffers.copy,
                weights: &mut columns.weights[..WEIGHT_LINES],
                values: columns.values.rows_mut(),
                sums,
                element: PhantomData,
            }));
        if !have_outliers {
            return;
        }
        let states = self.states.chunks_exact_mut(per_part * per_query);
        for ((part, states), first) in parts.zip(states).zip((0..).step_by(per_part)) {
            let scores = &buffers.scores[first * PARTITION_CHUNKS..];
            s.vectorize(AddOutliers {
                head: &Head {
                    view: attention.v,
                    head: attention.kv_head(part),
                    start,
                    rows: rows.clone(),
                },
                visible: |query| sight.within(query / attention.part, start, PARTITION),
                weight: |query: usize, row: usize| {
                    scores[query * PARTITION_CHUNKS + row / LANES].0[row % LANES]
                },
                states,
                per_query,
            });
        }
    }
}
