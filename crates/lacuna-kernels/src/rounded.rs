//! Products of float matrices in bf16, with AMX: weights are rounded and multiplied with rounded activations, 32 rows and
//! 32 tokens at a time, of one token as of many.
//!
//! What is added to a sum, and in which order, depends on its row and its token alone, however many there are.
//!
//! Quantized weights are not multiplied so: to unpack and round them takes longer than to read them, so a token would
//! wait, and what integers take for many tokens is not much more.

use std::ops::Range;

use crate::activations::{Activations, BLOCK};
use crate::dtype::DType;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::quantized::PanelBuffer;
use crate::simd::amx::{Amx, ROWS, Side, Sums, Tiles, Words};
use crate::simd::{Bf16Products, Kernel, LANES, Line, Simd, each};
use crate::tile::{Rows, Tile};

/// Tiles of rows, and of tokens, that are multiplied together.
const TOGETHER: usize = 2;

/// Tiles of rows that are rounded before tokens are multiplied with them: each time, tokens are read again.
const MOST_TILES: usize = 8;

/// Blocks of columns that are rounded at once: with those of the tokens they fit the second-level cache.
const PANEL_BLOCKS: usize = 32;

/// Blocks of columns that are multiplied with all tokens before the next: those of the rows stay in the first-level
/// cache.
const BLOCKS_TOGETHER: usize = 8;

/// Most tokens whose sums lie beside the panel.
const MOST_TOKENS: usize = 256;

/// Most tokens of a tile of which pairs are written one by one, instead of transposing those of sixteen.
const FEW_TOKENS: usize = 4;

/// Most blocks of columns of tokens that are rounded at once: 1.5 MiB of as many tokens.
const TOKEN_BLOCKS: usize = 96;

/// Lines of the worker's buffer that panels take; sums have the others.
const PANEL_LINES: usize = MOST_TILES * PANEL_BLOCKS * ROWS;
const _: () = assert!(PANEL_LINES + MOST_TILES * MOST_TOKENS <= PanelBuffer::LINES);

/// Rows that are read side by side: one alone does not reach what memory delivers, and of sixteen loads wait for stores
/// that a few bits of their addresses are taken for.
const STREAMS: usize = 4;

/// How far ahead of their use rows are prefetched, in bytes.
const PREFETCH_BYTES: usize = 1024;

/// Whether a matrix is multiplied here: one of floats, of whole blocks of columns.
pub(crate) fn takes(weights: &Matrix<'_>) -> bool {
    !weights.dtype().is_quantized() && weights.cols() > 0 && weights.cols().is_multiple_of(BLOCK)
}

/// Tokens of a task of many: about as many in each.
pub(crate) fn band_tokens(tokens: usize) -> usize {
    let bands = tokens.div_ceil(MOST_TOKENS).max(1);
    tokens.div_ceil(bands).next_multiple_of(TOGETHER * ROWS)
}

/// Rounded tokens: of sixteen block after block; of a block a line with the first two columns of each, then one with the
/// next two.
pub(crate) struct Buffer(Box<[Line]>);

impl Buffer {
    pub(crate) fn new() -> Self {
        Self(vec![Line::ZERO; MOST_TOKENS * TOKEN_BLOCKS].into_boxed_slice())
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

/// One block of columns of the output `[tokens, rows]`.
pub(crate) struct Product<'a, 'b> {
    pub(crate) weights: &'a Matrix<'a>,
    pub(crate) x: &'a Activations<'a>,
    pub(crate) out: Block<'b, f32>,
    pub(crate) proof: Bf16Products,
    pub(crate) panel: &'a mut PanelBuffer,
    pub(crate) buffer: &'a mut Buffer,
}

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // A constant, so that levels which never have AMX do not compile it.
        if const { S::MAY_HAVE_AMX } {
            let amx = s.amx().expect("tiles are multiplied where there is AMX");
            self.multiply(s, amx);
        }
    }
}

impl Product<'_, '_> {
    fn multiply<S: Simd>(mut self, s: S, amx: Amx) {
        let mut registers = Tiles::new(amx, ROWS);
        let blocks = self.x.cols() / BLOCK;
        let tokens = self.out.rows();
        for token in tokens.clone().step_by(MOST_TOKENS) {
            let tokens = token..tokens.end.min(token + MOST_TOKENS);
            for column in (0..blocks).step_by(TOKEN_BLOCKS) {
                let columns = column..blocks.min(column + TOKEN_BLOCKS);
                s.vectorize(RoundTokens {
                    x: self.x,
                    tokens: &tokens,
                    columns: &columns,
                    proof: self.proof,
                    out: &mut self.buffer.0,
                });
                self.rows(s, &tokens, &columns, &mut registers);
            }
        }
    }

    /// Multiplies rounded tokens with all rows.
    fn rows<S: Simd>(
        &mut self,
        s: S,
        tokens: &Range<usize>,
        columns: &Range<usize>,
        registers: &mut Tiles,
    ) {
        let words = &mut self.panel.words;
        let (panel, sums) = words.split_at_mut(PANEL_LINES);
        let (rows, mut start) = (self.out.cols(), 0);
        while start < rows.len() {
            let mut tiles = [const { Rows::NONE }; MOST_TILES];
            let tiles = Rows::cut(self.weights, &rows, &mut start, &mut tiles);
            s.vectorize(Group {
                weights: self.weights,
                proof: self.proof,
                x: &self.buffer.0,
                tokens,
                columns,
                tiles,
                panel: panel.as_chunks_mut().0,
                sums: sums.as_chunks_mut().0,
                registers,
                out: &mut self.out,
            });
        }
    }
}

/// Rounds some columns of some tokens.
struct RoundTokens<'a> {
    x: &'a Activations<'a>,
    tokens: &'a Range<usize>,
    columns: &'a Range<usize>,
    proof: Bf16Products,
    out: &'a mut [Line],
}

impl Kernel for RoundTokens<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let blocks = self.columns.len();
        let tiles = std::mem::take(&mut self.out).chunks_mut(ROWS * blocks);
        for (first, out) in self.tokens.clone().step_by(ROWS).zip(tiles) {
            let count = (self.tokens.end - first).min(ROWS);
            if count <= FEW_TOKENS {
                self.few(s, first..first + count, out);
                continue;
            }
            let rows: [&[[f32; BLOCK]]; ROWS] = each!(&[][..], |t| {
                // Those that do not exist are the last one again.
                let row = self.x.row(first + t.min(count - 1)).as_chunks().0;
                &row[self.columns.clone()]
            });
            for (block, out) in out.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
                let rounded = each!(s.splat(0.0), |t| {
                    let halves = rows[t][block].as_chunks().0;
                    s.round_pairs(self.proof, each!(s.splat(0.0), |i| s.load(&halves[i])))
                });
                let pairs = s.transpose(rounded);
                for pair in 0..ROWS {
                    s.u_store(s.to_bits(pairs[pair]), &mut out[pair].0);
                }
            }
        }
    }
}

impl RoundTokens<'_> {
    /// Rounds a few tokens of a tile, and leaves what there is of others, whose sums nobody reads.
    #[inline(always)]
    fn few<S: Simd>(&self, s: S, tokens: Range<usize>, out: &mut [Line]) {
        for (lane, token) in tokens.enumerate() {
            let blocks: &[[f32; BLOCK]] = self.x.row(token).as_chunks().0;
            let blocks = &blocks[self.columns.clone()];
            for (block, out) in blocks.iter().zip(out.as_chunks_mut::<ROWS>().0) {
                let halves = block.as_chunks().0;
                let halves = each!(s.splat(0.0), |i| s.load(&halves[i]));
                let mut pairs = [0; ROWS];
                s.u_store(s.to_bits(s.round_pairs(self.proof, halves)), &mut pairs);
                for (pair, out) in pairs.into_iter().zip(out) {
                    out.0[lane] = pair;
                }
            }
        }
    }
}

/// Sixteen rows of a block of 32 columns, rounded: a line for each.
type Rounded = [Line; ROWS];

/// Rounds the blocks of columns from `start` on, as many as there is room for.
struct Round<'a, 'b> {
    tile: &'a Tile<'b>,
    start: usize,
    out: &'a mut [Rounded],
}

impl Round<'_, '_> {
    /// `load` makes 32 columns of their bytes.
    #[inline(always)]
    fn rows<S: Simd, const BYTES: usize>(self, s: S, load: impl Fn(S, &[u8; BYTES]) -> S::U) {
        let Self { tile, start, out } = self;
        for first in (0..ROWS).step_by(STREAMS) {
            let rows: [&[[u8; BYTES]]; STREAMS] = each!(&[][..], |r| {
                &tile.row(first + r).as_chunks().0[start..][..out.len()]
            });
            for (index, out) in out.iter_mut().enumerate() {
                for r in 0..STREAMS {
                    let block = &rows[r][index];
                    for line in (0..BYTES).step_by(64) {
                        s.prefetch_far(block.as_ptr().wrapping_add(PREFETCH_BYTES + line));
                    }
                    s.u_store(load(s, block), &mut out[first + r].0);
                }
            }
        }
    }
}

/// Some tiles of rows, times rounded tokens.
struct Group<'a, 'b> {
    weights: &'a Matrix<'a>,
    proof: Bf16Products,
    /// See [`Buffer`].
    x: &'a [Line],
    tokens: &'a Range<usize>,
    columns: &'a Range<usize>,
    tiles: &'a [Rows],
    /// What is rounded of each tile, [`PANEL_BLOCKS`] apart.
    panel: &'a mut [Rounded],
    /// A line for each row, where [`place`] says.
    sums: &'a mut [[Line; ROWS]],
    registers: &'a mut Tiles,
    out: &'a mut Block<'b, f32>,
}

impl Kernel for Group<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let continues = self.columns.start > 0;
        if continues {
            self.each_sum(s, Way::In);
        }
        match self.weights.dtype() {
            DType::Bf16 if self.tokens.len() <= TOGETHER * ROWS => self.as_stored(),
            _ => self.in_panels(s),
        }
        self.each_sum(s, Way::Out);
    }
}

/// Where the sums of a tile of rows and a tile of tokens are: those that are multiplied together are neighbours.
#[inline(always)]
fn place([rows, tokens]: [usize; 2]) -> usize {
    let pairs = tokens / TOGETHER * (MOST_TILES / TOGETHER) + rows / TOGETHER;
    (pairs * TOGETHER + rows % TOGETHER) * TOGETHER + tokens % TOGETHER
}

/// Products that go to neighbouring sums.
#[inline(always)]
fn multiply<W: Words, const R: usize, const T: usize>(
    registers: &Tiles,
    blocks: usize,
    weights: Side<'_, W, R>,
    x: [&[Line]; T],
    sums: &mut [[Line; ROWS]],
    fresh: bool,
) {
    let sums = Sums {
        lines: sums.as_flattened_mut(),
        line: 1,
        first: std::array::from_fn(|r| std::array::from_fn(|t| (TOGETHER * r + t) * ROWS)),
    };
    registers.multiply(blocks, weights, Side::packed(x), sums, fresh);
}

/// Where sums are brought.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

impl Group<'_, '_> {
    /// Adds the products of rows that are read from where they lie, because a few tokens read them once: they are bf16. They are
    /// not prefetched, since the processor does that by itself, and asking for it as well was slower.
    #[inline(always)]
    fn as_stored(&mut self) {
        let first = self.out.cols().start;
        let (blocks, fresh) = (self.columns.len(), self.columns.start == 0);
        let x = |tile: usize| &self.x[tile * blocks * ROWS..][..blocks * ROWS];
        for (index, rows) in self.tiles.iter().enumerate() {
            let tile = Tile::new(self.weights, first + rows.start);
            let (lines, line) = tile.lines().expect("rows of whole blocks of columns");
            let weights = Side {
                tiles: [&lines[self.columns.start..]],
                line,
                block: 1,
            };
            let sums = &mut self.sums[place([index, 0])..];
            let registers = &*self.registers;
            match self.tokens.len() <= ROWS {
                true => multiply(registers, blocks, weights, [x(0)], sums, fresh),
                false => multiply(registers, blocks, weights, [x(0), x(1)], sums, fresh),
            }
        }
    }

    /// Adds the products of rows that are rounded into panels.
    #[inline(always)]
    fn in_panels<S: Simd>(&mut self, s: S) {
        let all = self.columns.clone();
        for column in all.clone().step_by(PANEL_BLOCKS) {
            let columns = column..all.end.min(column + PANEL_BLOCKS);
            self.round(s, &columns);
            for tile in (0..self.tiles.len()).step_by(TOGETHER) {
                match self.tiles.len() - tile {
                    1 => self.part::<S, 1>(s, tile, &columns),
                    _ => self.part::<S, TOGETHER>(s, tile, &columns),
                }
            }
        }
    }

    /// Rounds some blocks of columns of each row.
    #[inline(always)]
    fn round<S: Simd>(&mut self, s: S, columns: &Range<usize>) {
        let (proof, first) = (self.proof, self.out.cols().start);
        for (rows, panel) in self.tiles.iter().zip(self.panel.chunks_mut(PANEL_BLOCKS)) {
            let round = Round {
                tile: &Tile::new(self.weights, first + rows.start),
                start: columns.start,
                out: &mut panel[..columns.len()],
            };
            let rounded = |s: S, halves: [S::F; 2]| s.to_bits(s.round_pairs(proof, halves));
            match self.weights.dtype() {
                DType::F32 => round.rows::<S, 128>(s, |s, bytes| {
                    let halves = bytes.as_chunks().0;
                    rounded(s, each!(s.splat(0.0), |i| s.load_f32_bytes(&halves[i])))
                }),
                DType::F16 => round.rows::<S, 64>(s, |s, bytes| {
                    let halves = bytes.as_chunks().0;
                    rounded(s, each!(s.splat(0.0), |i| s.load_f16(&halves[i])))
                }),
                DType::Bf16 => round.rows::<S, 64>(s, |s, bytes| {
                    let halves = bytes.as_chunks().0;
                    s.u_halves([&halves[0], &halves[1]])
                }),
                dtype => unreachable!("{dtype} is not a float type"),
            }
        }
    }

    /// Adds the products of `R` tiles of rows, or begins with them where columns are the first.
    #[inline(always)]
    fn part<S: Simd, const R: usize>(&mut self, s: S, tile: usize, columns: &Range<usize>) {
        let tokens = self.tokens.clone();
        for block in columns.clone().step_by(BLOCKS_TOGETHER) {
            let blocks = block..columns.end.min(block + BLOCKS_TOGETHER);
            let weights: [&[Line]; R] = std::array::from_fn(|r| {
                let panel = &self.panel[(tile + r) * PANEL_BLOCKS..];
                panel[blocks.start - columns.start..blocks.end - columns.start].as_flattened()
            });
            for (index, token) in tokens.clone().step_by(TOGETHER * ROWS).enumerate() {
                let sums = &mut self.sums[place([tile, TOGETHER * index])..];
                let left = (tokens.end - token).min(TOGETHER * ROWS);
                // Where sums are written in the end: a part with each block of columns, because in the end writes
                // would wait for all of it.
                let share = |block: usize| (block - self.columns.start) * left / self.columns.len();
                for token in token + share(blocks.start)..token + share(blocks.end) {
                    for rows in &self.tiles[tile..tile + R] {
                        s.prefetch_far(self.out.address(token, rows.start));
                    }
                }
                let (x, fresh) = (self.x, block == 0);
                let x = |tile: usize| {
                    let first = (TOGETHER * index + tile) * self.columns.len();
                    let columns = self.columns.start;
                    &x[(first + blocks.start - columns) * ROWS..][..blocks.len() * ROWS]
                };
                let weights = Side::packed(weights);
                match left <= ROWS {
                    true => multiply(self.registers, blocks.len(), weights, [x(0)], sums, fresh),
                    false => {
                        multiply(
                            self.registers,
                            blocks.len(),
                            weights,
                            [x(0), x(1)],
                            sums,
                            fresh,
                        );
                    }
                }
            }
        }
    }

    /// Brings all sums from the output, or to it.
    #[inline(always)]
    fn each_sum<S: Simd>(&mut self, s: S, way: Way) {
        let tokens = self.tokens.clone();
        for (tile, first) in tokens.clone().step_by(ROWS).enumerate() {
            let count = (tokens.end - first).min(ROWS);
            for (index, rows) in self.tiles.iter().enumerate() {
                let sums = &mut self.sums[place([index, tile])];
                // By token, as the output has them.
                let mut lines = [[0.0; LANES]; ROWS];
                if way == Way::Out {
                    let rows = each!(s.splat(0.0), |r| s.bits_to_f32(s.u_load(&sums[r].0)));
                    let tokens = s.transpose(rows);
                    for t in 0..ROWS {
                        s.store(tokens[t], &mut lines[t]);
                    }
                }
                for (t, line) in lines[..count].iter_mut().enumerate() {
                    let out = &mut self.out.row(first + t)[rows.start..][..rows.lanes.len()];
                    let line = &mut line[rows.lanes.clone()];
                    match (way, out.first_chunk_mut(), line.first_chunk_mut()) {
                        (Way::Out, Some(out), Some(line)) => s.store(s.load(line), out),
                        (Way::In, Some(out), Some(line)) => s.store(s.load(out), line),
                        (Way::Out, ..) => out.copy_from_slice(line),
                        (Way::In, ..) => line.copy_from_slice(out),
                    }
                }
                if way == Way::In {
                    let tokens = each!(s.splat(0.0), |t| s.load(&lines[t]));
                    let rows = s.transpose(tokens);
                    for r in 0..ROWS {
                        s.u_store(s.to_bits(rows[r]), &mut sums[r].0);
                    }
                }
            }
        }
    }
}
