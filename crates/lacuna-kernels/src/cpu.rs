//! The operations, on a chosen instruction-set level and a fixed number of threads.

mod columns;
mod elementwise;
mod experts;
mod recurrence;

use std::io;
use std::num::NonZeroUsize;

use crate::activations::{Activations, Input, Quantize, QuantizeSingle, Tiling};
use crate::attention::{self, AttentionShape, Cached, Each, Sequences};
use crate::element::ElementType;
use crate::elementwise::activation::{Activation, with_function};
use crate::elementwise::{AddToRows, ApplyToRows};
use crate::grid::{Block, Grid};
use crate::level::{Level, Proof, with_simd};
use crate::matrix::Matrix;
#[cfg(target_arch = "x86_64")]
use crate::rounded;
use crate::share::{Cut, Part, Share};
use crate::simd::{Bf16Products, Kernel, LANES};
use crate::store::Store;
use crate::threads::Pool;
use crate::view::{RowLayout, RunMut, View};
use crate::{float, quantized};

/// The environment variable that forces a [`Level`].
const LEVEL_VARIABLE: &str = "LACUNA_CPU";

/// Elements of an elementwise operation that are worth a task of their own.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Weight bytes of a matrix product that are worth a task of their own.
const TASK_BYTES: usize = 48 * 1024;

/// Tasks per thread that let threads finish together when one is slowed down.
const TASKS_PER_THREAD: usize = 8;

/// Why a [`Cpu`] cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The name is no level.
    #[error("unknown CPU level `{0}`; use {names}", names = available_names())]
    UnknownLevel(String),
    /// This CPU lacks instructions of the level.
    #[error("this CPU does not have the instructions of level {}; use {names}", .0.name(), names = available_names())]
    Unavailable(Level),
    /// This CPU lacks instructions for bf16, at the level in use.
    #[error("this CPU does not multiply bf16 at level {}; compute products in f32", .0.name())]
    NoBf16(Level),
    /// The system refused to start a thread.
    #[error("cannot start a worker thread; use fewer threads")]
    Threads(#[source] io::Error),
}

fn available_names() -> String {
    let names: Vec<_> = Level::available().map(Level::name).collect();
    names.join(" or ")
}

/// How products with float matrices (F32, F16, BF16) are computed, and those of attention; scores of keys in eight and
/// four bits are integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// In f32, from weights and cached rows as they are stored.
    #[default]
    F32,
    /// From numbers rounded to bf16, of which more are multiplied at once; sums are f32.
    Bf16,
}

impl MatmulPrecision {
    /// What commands call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

fn precision_of(rounded: Option<Bf16Products>) -> MatmulPrecision {
    match rounded {
        None => MatmulPrecision::F32,
        Some(_) => MatmulPrecision::Bf16,
    }
}

/// How a [`MatmulPrecision`] is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrecisionMode {
    /// In each operation the one that is faster for many tokens on this processor and no slower for one: bf16 with AVX-512 BF16
    /// of AMD's processors since Zen 5; with AMX bf16 where so many query heads share a head of K and V that they fill a
    /// tile ([`Cpu::attention_precision`]); else f32. So results depend on the processor.
    Auto,
    /// This one.
    Fixed(MatmulPrecision),
}

impl Default for PrecisionMode {
    fn default() -> Self {
        Self::Fixed(MatmulPrecision::F32)
    }
}

impl From<MatmulPrecision> for PrecisionMode {
    fn from(precision: MatmulPrecision) -> Self {
        Self::Fixed(precision)
    }
}

impl PrecisionMode {
    /// All of them.
    pub const ALL: [Self; 3] = [
        Self::Auto,
        Self::Fixed(MatmulPrecision::F32),
        Self::Fixed(MatmulPrecision::Bf16),
    ];

    /// What commands call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Fixed(precision) => precision.name(),
        }
    }

    /// In f32 where the processor would decide.
    #[must_use]
    pub fn or_f32(self) -> Self {
        match self {
            Self::Auto => Self::default(),
            Self::Fixed(_) => self,
        }
    }

    /// What it is at a level, for products with matrices.
    fn at(self, level: Level) -> MatmulPrecision {
        match self {
            Self::Fixed(precision) => precision,
            Self::Auto if Bf16Products::are_faster(level) => MatmulPrecision::Bf16,
            Self::Auto => MatmulPrecision::F32,
        }
    }

    /// What it is at a level for attention whose queries fill tiles.
    fn in_tiles(self, level: Level) -> MatmulPrecision {
        match self {
            // Where a hypervisor hides what numbers are rounded with, nothing is.
            Self::Auto if level == Level::Amx && Bf16Products::detect(level).is_some() => {
                MatmulPrecision::Bf16
            }
            _ => self.at(level),
        }
    }
}

/// How a [`Cpu`] is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that share each operation, the calling one included. Default: one per core.
    pub threads: NonZeroUsize,
    /// The level to use. Default: what `LACUNA_CPU` names, else the best this CPU has.
    pub level: Option<Level>,
    /// How products with float matrices are computed. Default: in f32.
    pub precision: PrecisionMode,
}

impl Default for CpuConfig {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Self {
            threads,
            level: None,
            precision: PrecisionMode::default(),
        }
    }
}

impl CpuConfig {
    /// Bytes of the buffers that each thread has for itself.
    pub fn bytes_per_thread(&self) -> usize {
        // A level that does not exist has no threads.
        let level = self.chosen_level().unwrap_or(Level::Portable);
        Scratch::new(self.precision.at(level), level).bytes()
    }

    /// The level that it or the environment names, else the best.
    fn chosen_level(&self) -> Result<Level, CpuError> {
        let forced = std::env::var(LEVEL_VARIABLE)
            .ok()
            .filter(|name| !name.is_empty());
        match (self.level, forced) {
            (Some(level), _) => Ok(level),
            (None, Some(name)) => name.parse(),
            (None, None) => Ok(Level::best()),
        }
    }
}

/// What each thread owns, so that no operation allocates.
struct Scratch {
    panel: quantized::PanelBuffer,
    float: float::Buffers,
    #[cfg(target_arch = "x86_64")]
    rounded: Option<rounded::Buffer>,
    attention: attention::Buffers,
}

impl Scratch {
    fn new(precision: MatmulPrecision, level: Level) -> Self {
        let rounded = precision == MatmulPrecision::Bf16;
        #[cfg(target_arch = "x86_64")]
        let tiles = rounded && level == Level::Amx;
        #[cfg(not(target_arch = "x86_64"))]
        let _ = level;
        Self {
            panel: quantized::PanelBuffer::new(),
            float: float::Buffers::new(rounded),
            #[cfg(target_arch = "x86_64")]
            rounded: tiles.then(crate::rounded::Buffer::new),
            attention: attention::Buffers::new(),
        }
    }

    fn bytes(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        let rounded = self.rounded.as_ref().map_or(0, |buffer| buffer.bytes());
        #[cfg(not(target_arch = "x86_64"))]
        let rounded = 0;
        self.panel.bytes() + self.float.bytes() + rounded + self.attention.bytes()
    }
}

impl AsMut<attention::Buffers> for Scratch {
    fn as_mut(&mut self) -> &mut attention::Buffers {
        &mut self.attention
    }
}

/// Threads and a level; every operation of the crate is a method of it.
///
/// Matrices of activations are row-major, one row per token. No operation allocates. Slices of the
/// wrong length are bugs of the caller and panic.
///
/// Guarantees, on a given level:
/// 1. The result for a token does not depend on the other tokens of the call, on the number of
///    threads, or on how cached rows are split in runs, bit for bit.
/// 2. Sums are accumulated in f32 (products of quantized values first in exact integers), whatever the
///    [`MatmulPrecision`].
/// 3. Infinities and NaN in the input make results that are not finite; nothing hangs or panics. Only
///    functions with bounds (soft caps, sigmoid, tanh) map infinities to them.
pub struct Cpu {
    level: Level,
    proof: Proof,
    mode: PrecisionMode,
    /// Whether products with float matrices are those of rounded values ...
    rounded: Option<Bf16Products>,
    /// ... and those of attention whose queries fill tiles.
    rounded_in_tiles: Option<Bf16Products>,
    pool: Pool<Scratch>,
}

impl Cpu {
    /// Chooses the level and starts the worker threads.
    ///
    /// # Errors
    /// [`CpuError`] when the level is unknown or not available, has no instructions for the precision, or a thread
    /// cannot be started.
    pub fn new(config: CpuConfig) -> Result<Self, CpuError> {
        let level = config.chosen_level()?;
        let proof = Proof::detect(level).ok_or(CpuError::Unavailable(level))?;
        let mode = config.precision;
        let (precision, in_tiles) = (mode.at(level), mode.in_tiles(level));
        let rounded = |precision| match precision {
            MatmulPrecision::F32 => Ok(None),
            MatmulPrecision::Bf16 => Bf16Products::detect(level)
                .map(Some)
                .ok_or(CpuError::NoBf16(level)),
        };
        let (rounded, rounded_in_tiles) = (rounded(precision)?, rounded(in_tiles)?);
        let scratch = || Scratch::new(precision, level);
        let pool = Pool::new(config.threads, scratch).map_err(CpuError::Threads)?;
        Ok(Self {
            level,
            proof,
            mode,
            rounded,
            rounded_in_tiles,
            pool,
        })
    }

    /// The level in use.
    pub fn level(&self) -> Level {
        self.level
    }

    /// What sets up another one like this.
    pub fn config(&self) -> CpuConfig {
        CpuConfig {
            threads: self.pool.threads().try_into().unwrap_or(NonZeroUsize::MIN),
            level: Some(self.level),
            precision: self.mode,
        }
    }

    /// How products with float matrices are computed.
    pub fn precision(&self) -> MatmulPrecision {
        precision_of(self.rounded)
    }

    /// How those of attention are: as those with matrices, unless so many query heads share a head of K and V that the processor
    /// has something faster for them.
    pub fn attention_precision(&self, shape: &AttentionShape) -> MatmulPrecision {
        precision_of(self.rounded_attention(shape))
    }

    /// The same for those whose queries fill tiles.
    pub fn precision_in_tiles(&self) -> MatmulPrecision {
        precision_of(self.rounded_in_tiles)
    }

    fn rounded_attention(&self, shape: &AttentionShape) -> Option<Bf16Products> {
        match shape.fills_tiles() {
            true => self.rounded_in_tiles,
            false => self.rounded,
        }
    }

    /// The proof that some products are those of rounded values, if they are.
    pub(crate) fn rounded(&self) -> Option<Bf16Products> {
        self.rounded.or(self.rounded_in_tiles)
    }

    /// Threads that share each operation, the calling one included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Prepares `x`, `[tokens, cols]`, to be multiplied with one or more matrices.
    ///
    /// With `storage` of at least [`Activations::storage_bytes`] bytes, aligned to 4 (64 is
    /// faster), the values are quantized into it, which products with quantized matrices need.
    /// With an empty `storage` only float matrices can be used.
    ///
    /// # Panics
    /// When `x` is not `tokens * cols` long, or `storage` is neither empty nor large enough and
    /// aligned.
    pub fn activations<'a>(
        &self,
        x: &'a [f32],
        tokens: usize,
        cols: usize,
        storage: &'a mut [u8],
    ) -> Activations<'a> {
        assert_eq!(
            Some(x.len()),
            tokens.checked_mul(cols),
            "activations are [{tokens}, {cols}]"
        );
        let tiling = self.tiling();
        let tile = tiling.tile(tokens);
        let input = Input {
            x,
            cols,
            rows: None,
        };
        if storage.is_empty() || x.is_empty() {
            return Activations {
                input,
                tokens,
                tile,
                level: self.level,
                quantized: &[],
            };
        }
        let needed = Activations::storage_bytes(tokens, cols)
            .expect("quantized activations have a multiple of 32 columns");
        assert!(
            storage.len() >= needed,
            "{needed} bytes of storage, not {}",
            storage.len()
        );
        let per_token = Activations::storage_bytes(1, cols).expect("fewer than the bytes of all");
        let storage = &mut storage[..tiling.stored(tokens) * per_token];
        // A few tiles per task, because short rows are quantized in less than a microsecond.
        let tiles = (TASK_ELEMENTS / (tile * cols)).max(1);
        Grid::pieces(storage, tiles * tile * per_token).run(&self.pool, |mut block, _| {
            let first = block.cols().start / per_token;
            let firsts = (first..tokens).step_by(tile);
            for (out, first) in block.piece().chunks_mut(tile * per_token).zip(firsts) {
                if tile == 1 {
                    let x = input.row(first);
                    self.proof.run(QuantizeSingle { x, out });
                } else {
                    self.proof.run(Quantize {
                        input,
                        tokens: first..tokens.min(first + tile),
                        tile: out.len() / per_token,
                        out,
                    });
                }
            }
        });
        Activations {
            input,
            tokens,
            tile,
            level: self.level,
            quantized: storage,
        }
    }

    /// Products of a matrix with all tokens: `out[t][r] = sum over c of w[r][c] * x[t][c]`.
    ///
    /// `out` is `[tokens, rows]`. Quantized matrices multiply the quantized activations: the error
    /// that adds is at most `sum over c of |w[r][c]| * max |x| / 254`, the maximum taken over the 32
    /// columns around `c`.
    ///
    /// # Panics
    /// When shapes do not fit, `x` was prepared by a `Cpu` of another level, or the matrix is
    /// quantized and `x` is not.
    pub fn matmul(&self, out: &mut [f32], x: &Activations<'_>, w: &Matrix<'_>) {
        self.matmul_each([out], x, [w]);
    }

    /// [`Cpu::matmul`] of the same activations with several matrices, as one operation: threads meet
    /// once, at its end.
    ///
    /// # Panics
    /// As [`Cpu::matmul`].
    pub fn matmul_each<const N: usize>(
        &self,
        outs: [&mut [f32]; N],
        x: &Activations<'_>,
        weights: [&Matrix<'_>; N],
    ) {
        self.linear_each(outs, x, weights.map(|w| (w, None)), None);
    }

    /// [`Cpu::matmul_each`] with what follows it: a matrix's bias, if it has one, is added to each of its
    /// rows, as [`Cpu::add_bias`] does, and `function` of that is taken, as [`Cpu::activate`] does, while
    /// the results are in a cache.
    ///
    /// # Panics
    /// As [`Cpu::matmul`], and when a bias is not one element for each row of its matrix.
    pub fn linear_each<const N: usize>(
        &self,
        outs: [&mut [f32]; N],
        x: &Activations<'_>,
        linears: [(&Matrix<'_>, Option<&[f32]>); N],
        function: Option<Activation>,
    ) {
        assert_eq!(
            x.level, self.level,
            "activations belong to the level they are made on"
        );
        for (out, (w, bias)) in outs.iter().zip(linears) {
            check_product(out, x, w);
            assert!(
                bias.is_none_or(|bias| bias.len() == w.rows()),
                "one element of a bias for each row"
            );
        }
        if x.tokens() == 0 {
            return;
        }
        let weights = linears.map(|(w, _)| w);
        let band = self.band_tokens(x.tokens(), weights);
        let share = self.share(x.tokens(), band, weights);
        Grid::run_each(
            outs,
            [x.tokens(), band],
            &share,
            &self.pool,
            |which, mut out, scratch| {
                let (weights, bias) = linears[which];
                let threads = self.pool.threads();
                self.product(weights, x, out.reborrow(), threads, scratch);
                let bias = bias.map(|bias| &bias[out.cols()]);
                match (function, bias) {
                    (Some(function), bias) => {
                        with_function!(function, |function| self.proof.run(ApplyToRows {
                            function,
                            out,
                            bias
                        }))
                    }
                    (None, Some(bias)) => self.proof.run(AddToRows { out, bias }),
                    (None, None) => {}
                }
            },
        );
    }

    /// Writes the rows `tokens` of `table` to `out`, `[tokens, table.cols()]`.
    ///
    /// # Panics
    /// When a token is not a row of the table or `out` has another size.
    pub fn embed(&self, out: &mut [f32], table: &Matrix<'_>, tokens: &[u32]) {
        let width = table.cols();
        assert_eq!(
            Some(out.len()),
            tokens.len().checked_mul(width),
            "the output is [tokens, cols]"
        );
        self.fill_rows(out, width, |row, out| {
            table.dequantize_row(tokens[row] as usize, out);
        });
    }

    /// Calls `fill(row, elements)` for every row of `out`, of `width` elements each, on all threads.
    ///
    /// # Panics
    /// When `out` is not whole rows.
    pub fn fill_rows(
        &self,
        out: &mut [f32],
        width: usize,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        self.rows(out, width, |first, out| {
            for (index, out) in out.chunks_exact_mut(width).enumerate() {
                fill(first + index, out);
            }
        });
    }

    /// Converts `src`, whole rows, to cache elements, rounding to nearest even.
    ///
    /// A block of a quantized type that holds a value which is not finite, or values beyond 65,504
    /// units, is not finite when it is read.
    ///
    /// # Panics
    /// When `src` is no whole number of blocks, or `dst` is not `element.bytes(src.len())` long.
    pub fn store_rows(&self, element: ElementType, dst: &mut [u8], src: &[f32]) {
        assert!(
            src.len().is_multiple_of(element.block_len()),
            "{} elements are no whole number of {element} blocks",
            src.len()
        );
        assert_eq!(
            dst.len(),
            element.bytes(src.len()),
            "bytes of the elements stored"
        );
        let elements = |bytes: usize| bytes / element.block_bytes() * element.block_len();
        Grid::pieces(dst, element.bytes(TASK_ELEMENTS)).run(&self.pool, |mut block, _| {
            let first = elements(block.cols().start);
            let out = block.piece();
            let x = &src[first..][..elements(out.len())];
            self.proof.run(Store { element, out, x });
        });
    }

    /// Converts rows to cache elements, as [`Cpu::store_rows`] does, where they are to lie: those of
    /// `src`, `[_, heads, head_dim]`, that `run` names.
    ///
    /// # Panics
    /// When `src` has no such rows, or they do not fit in the bytes of `run`.
    pub fn store_run(&self, run: RunMut<'_>, src: &[f32]) {
        let RunMut {
            layout,
            rows,
            bytes,
        } = run;
        let RowLayout { heads, element, .. } = layout;
        let width = heads * layout.head_dim;
        let src = &src[rows.start * width..rows.end * width];
        let row_bytes = heads * layout.head_bytes();
        let whole_rows = heads == 1 || layout.head_stride == layout.head_bytes();
        if whole_rows && layout.row_stride == row_bytes {
            return self.store_rows(element, &mut bytes[..rows.len() * row_bytes], src);
        }
        let pieces_per_row = if whole_rows { 1 } else { heads };
        let piece_bytes = row_bytes / pieces_per_row;
        for (index, x) in src.chunks_exact(width / pieces_per_row).enumerate() {
            let (row, head) = (index / pieces_per_row, index % pieces_per_row);
            let at = row * layout.row_stride + head * layout.head_stride;
            self.store_rows(element, &mut bytes[at..][..piece_bytes], x);
        }
    }

    /// f32 elements of scratch with which [`Cpu::attention`] splits the context of `tokens` queries
    /// over threads, when they see `rows` rows.
    pub fn attention_scratch_len(tokens: usize, rows: usize, shape: &AttentionShape) -> usize {
        attention::scratch_len(tokens, rows, shape)
    }

    /// Attention: query `i` is that of row `first_position + i`, and attends to those rows of `k` and
    /// `v` that [`AttentionShape::mask`] shows it; they alone need be held. What is behind the last row
    /// held is behind the end for masks that look ahead.
    ///
    /// `q` is `[n, query_heads, head_dim]` and `out` `[n, query_heads, value_dim]`; rows of the views
    /// are `[kv_heads, head_dim]` and `[kv_heads, value_dim]`, and query head `h` reads KV head
    /// `h * kv_heads / query_heads`. With at least [`Cpu::attention_scratch_len`] elements of
    /// `scratch`, few queries are split over threads by ranges of rows, which reads memory faster than
    /// by heads; the result is the same with less.
    ///
    /// # Panics
    /// When sizes do not fit together or the views have too few rows.
    #[expect(
        clippy::too_many_arguments,
        reason = "each is a different thing and all are needed"
    )]
    pub fn attention(
        &self,
        out: &mut [f32],
        q: &[f32],
        k: &View<'_>,
        v: &View<'_>,
        first_position: usize,
        shape: &AttentionShape,
        scratch: &mut [f32],
    ) {
        let width = shape.query_heads * shape.head_dim;
        let tokens = q.len().checked_div(width).unwrap_or(0);
        let cached = Cached {
            k: *k,
            v: *v,
            first_position,
            ahead: false,
        };
        self.attention_each(out, q, &(tokens, cached), shape, None, scratch);
    }

    /// [`Cpu::attention`] of several sequences, in fewer operations than one each.
    ///
    /// `sinks`, if the layer has them, are a logit for each query head: beside the scores of the rows,
    /// neither scaled nor capped, it takes its share of the softmax, and it has no value (gpt-oss).
    ///
    /// # Panics
    /// As [`Cpu::attention`], and when there is not one sink for each query head.
    pub fn attention_each(
        &self,
        out: &mut [f32],
        q: &[f32],
        sequences: &impl Sequences,
        shape: &AttentionShape,
        sinks: Option<&[f32]>,
        scratch: &mut [f32],
    ) {
        let call = Each {
            q,
            sequences,
            shape,
            sinks,
            rounded: self.rounded_attention(shape),
            threads: self.pool.threads(),
        };
        with_simd!(self.proof, |simd| call.run(&self.pool, simd, out, scratch));
    }

    /// Calls `task(first_row, rows)` for pieces of whole rows of `width`, which may be cut anywhere.
    fn rows(&self, x: &mut [f32], width: usize, task: impl Fn(usize, &mut [f32]) + Sync) {
        if x.is_empty() {
            return;
        }
        assert!(width > 0, "rows are not empty");
        let piece = (TASK_ELEMENTS / width).max(1) * width;
        assert!(
            width == LANES || x.len().is_multiple_of(width),
            "{} elements are not rows of {width}",
            x.len()
        );
        Grid::pieces(x, piece).run(&self.pool, |mut block, _| {
            task(block.cols().start / width, block.piece());
        });
    }

    /// Runs a kernel on this thread.
    pub(crate) fn execute<K: Kernel>(&self, kernel: K) -> K::Output {
        self.proof.run(kernel)
    }

    /// Calls `task` for every index below `tasks`, on all threads.
    pub(crate) fn for_each(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        self.pool.run(tasks, |index, _| task(index));
    }

    /// How tokens are cut into tiles.
    fn tiling(&self) -> Tiling {
        with_simd!(self.proof, |simd| Tiling::of(simd))
    }

    /// Whether a matrix is multiplied by tiles of bf16.
    #[cfg(target_arch = "x86_64")]
    fn multiplies_tiles(&self, weights: &Matrix<'_>) -> bool {
        let rounds = self.rounded.is_some() && self.level == Level::Amx;
        rounds && rounded::takes(weights)
    }

    /// Writes the products of a matrix with all tokens of `x` in a block of columns of the output, on this thread,
    /// which shares the rows with `threads - 1` others.
    fn product(
        &self,
        weights: &Matrix<'_>,
        x: &Activations<'_>,
        out: Block<'_, f32>,
        threads: usize,
        scratch: &mut Scratch,
    ) {
        let panel = &mut scratch.panel;
        if weights.dtype().is_quantized() {
            return self.proof.run(quantized::Product {
                weights,
                x,
                out,
                threads,
                panel,
            });
        }
        #[cfg(target_arch = "x86_64")]
        if let (Some(proof), Some(buffer)) = (self.rounded, &mut scratch.rounded)
            && rounded::takes(weights)
        {
            return self.proof.run(rounded::Product {
                weights,
                x,
                out,
                proof,
                panel,
                buffer,
            });
        }
        self.proof.run(float::Product {
            weights,
            x,
            out,
            rounded: self.rounded,
            buffers: &mut scratch.float,
        });
    }

    /// Tokens of a task of products with some matrices. Those of float matrices read their tokens again for
    /// every few rows: so they have as many as a cache holds.
    fn band_tokens<const N: usize>(&self, tokens: usize, weights: [&Matrix<'_>; N]) -> usize {
        #[cfg(target_arch = "x86_64")]
        if weights.into_iter().all(|w| self.multiplies_tiles(w)) {
            return rounded::band_tokens(tokens);
        }
        let float = weights.iter().all(|w| !w.dtype().is_quantized());
        match float && tokens > float::FEW_TOKENS {
            true => float::band_tokens(tokens),
            false => tokens,
        }
    }

    /// How products with some matrices are cut into tasks of `band` tokens: at multiples of what kernels
    /// handle together, so that threads finish together and claiming tasks costs nothing.
    fn share<const N: usize>(
        &self,
        tokens: usize,
        band: usize,
        weights: [&Matrix<'_>; N],
    ) -> Share<N> {
        let quantized = weights.iter().all(|w| w.dtype().is_quantized());
        let streams = quantized && self.tiling().streams(tokens);
        let (together, bytes) = match streams {
            true => (LANES, TASK_BYTES / 2),
            false => (2 * LANES, TASK_BYTES),
        };
        let parts = weights.map(|w| Part {
            len: w.rows(),
            weight: w.row_bytes().max(1),
            together,
            least: bytes.div_ceil(w.row_bytes().max(1)),
        });
        let cut = match streams {
            // Rows are read as streams, and faster the longer these are.
            true => Cut::Shrinking,
            false => Cut::Even {
                pieces: (self.threads() * TASKS_PER_THREAD).div_ceil(tokens.div_ceil(band)),
            },
        };
        Share {
            parts,
            cut,
            threads: self.threads(),
        }
    }
}

fn check_product(out: &[f32], x: &Activations<'_>, w: &Matrix<'_>) {
    assert_eq!(x.cols(), w.cols(), "columns of activations and matrix");
    assert_eq!(
        Some(out.len()),
        x.tokens().checked_mul(w.rows()),
        "the output is [tokens, rows]"
    );
    assert!(
        !w.dtype().is_quantized() || !x.quantized.is_empty() || out.is_empty(),
        "activations for a quantized matrix need storage"
    );
}
