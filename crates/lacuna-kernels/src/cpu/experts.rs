//! Mixtures of experts: routing, products with the experts' matrices, and their sum.

use super::{Cpu, TASK_BYTES, TASKS_PER_THREAD};
use crate::activations::{Activations, Quantize, QuantizeSingle};
use crate::elementwise::AddToRows;
use crate::elementwise::activation::ClampedSwiGlu;
use crate::experts::{
    Combine, Expert, ExpertActivations, ExpertInput, Groups, Route, Routes, Routing,
};
use crate::grid::Grid;
use crate::simd::LANES;

impl Cpu {
    /// Chooses the experts of each token from a router's `logits`, `[tokens, experts]`, which are used
    /// up, and weighs them: `weights` is `[tokens, used]`, the best expert first. `words` then hold the
    /// [`Routes`].
    ///
    /// `bias` is added to scores where experts and groups are compared, not to weights; `scales` are what
    /// the weights of each expert are multiplied by at the end.
    ///
    /// One thread does it: a score is a few operations, and the products that come after are thousands.
    ///
    /// # Panics
    /// When sizes do not fit together, `words` are fewer than [`Routes::words`], or the routing uses more
    /// experts or groups than there are.
    pub fn route(
        &self,
        words: &mut [u32],
        weights: &mut [f32],
        logits: &mut [f32],
        routing: &Routing,
        [bias, scales]: [Option<&[f32]>; 2],
    ) {
        let Routing { experts, used, .. } = *routing;
        check(routing);
        assert!(
            logits.len().is_multiple_of(experts),
            "{} logits are not rows of {experts}",
            logits.len()
        );
        let tokens = logits.len() / experts;
        assert_eq!(
            Some(weights.len()),
            tokens.checked_mul(used),
            "weights are [tokens, used]"
        );
        for vector in [bias, scales].into_iter().flatten() {
            assert_eq!(vector.len(), experts, "one for each expert");
        }
        let route = Route {
            routing,
            logits,
            bias,
            scales,
            weights,
            words,
        };
        route.run(self.proof, self.tiling());
    }

    /// Gives each of `tokens` tokens all experts, in ascending order: `words` then hold the [`Routes`], in
    /// which the places of an expert are the tokens in order. Heads with matrices of their own are
    /// experts that every token has.
    ///
    /// # Panics
    /// When the routing does not use all experts, or `words` are fewer than [`Routes::words`].
    pub fn route_to_all(&self, words: &mut [u32], tokens: usize, routing: &Routing) {
        check(routing);
        let Routing { experts, used, .. } = *routing;
        assert_eq!(used, experts, "every token has all experts");
        Routes::write_all(words, tokens, routing, self.tiling());
    }

    /// Prepares `x` to be multiplied with experts' matrices: `[tokens, cols]` or `[choices, cols]`, as
    /// `from` says.
    ///
    /// With `storage` of at least [`Routes::storage_bytes`] bytes, aligned to 4, rows are quantized into
    /// it, once for each choice; with an empty one only float matrices can be used.
    ///
    /// # Panics
    /// When `x` has too few rows, or `storage` is neither empty nor large enough and aligned.
    pub fn expert_activations<'a>(
        &self,
        x: &'a [f32],
        cols: usize,
        from: ExpertInput,
        routes: Routes<'a>,
        storage: &'a mut [u8],
    ) -> ExpertActivations<'a> {
        let mut made = ExpertActivations {
            x,
            cols,
            from,
            routes,
            level: self.level,
            tiling: self.tiling(),
            quantized: &[],
        };
        if storage.is_empty() || routes.bands() == 0 || cols == 0 {
            return made;
        }
        let row = Activations::storage_bytes(1, cols)
            .expect("quantized activations have a multiple of 32 columns");
        let stored = routes.stored();
        let storage = &mut storage[..stored[stored.len() - 1] as usize * row];
        let input = &made;
        Grid::run_bands(
            [&mut *storage],
            (stored, None),
            row,
            row,
            &self.pool,
            |[_, band], mut block, _| {
                let (tokens, tile) = input.tile(band);
                let input = input.input(band);
                let tiles = block.whole_rows().chunks_mut(tile * row);
                for (out, first) in tiles.zip((0..).step_by(tile)) {
                    if tile == 1 {
                        let x = input.row(first);
                        self.proof.run(QuantizeSingle { x, out });
                    } else {
                        self.proof.run(Quantize {
                            input,
                            tokens: first..tokens.min(first + tile),
                            tile: out.len() / row,
                            out,
                        });
                    }
                }
            },
        );
        made.quantized = storage;
        made
    }

    /// Products of each expert's matrix with the rows of the tokens that chose it, and its bias:
    /// `out[place][r] = sum over c of w[r][c] * x[c] + bias[r]`, for `N` matrices of each expert, as one
    /// operation.
    ///
    /// Each of `outs` is `[choices, rows]` by place. `expert(which, number)` is an expert's matrix of
    /// those: all have `rows` rows and the columns of `x`. Each is read once, whatever the number of
    /// tokens that chose it; those that none chose are not asked for. Values are those of
    /// [`Cpu::matmul`] of the same rows, bit for bit.
    ///
    /// With `bands`, places in [`Routes::chosen`], only those experts are computed, and rows of others are left
    /// alone: for experts of which some are in memory before the others.
    ///
    /// # Panics
    /// When shapes do not fit, `x` was prepared by a `Cpu` of another level, a matrix is quantized
    /// and `x` is not, or `bands` do not ascend.
    pub fn expert_matmul_each<'w, const N: usize>(
        &self,
        outs: [&mut [f32]; N],
        rows: usize,
        x: &ExpertActivations<'_>,
        bands: Option<&[u32]>,
        expert: impl Fn(usize, usize) -> Expert<'w> + Sync,
    ) {
        assert_eq!(
            x.level, self.level,
            "activations belong to the level they are made on"
        );
        let routes = &x.routes;
        let first = bands.map_or(Some(0), |bands| bands.first().map(|band| *band as usize));
        let Some(first) = first.filter(|first| *first < routes.bands() && rows > 0) else {
            return;
        };
        let first = expert(0, routes.expert(first)).matrix;
        let piece = self.expert_piece(routes.sizes(bands), rows, first.row_bytes(), N);
        Grid::run_bands(
            outs,
            (routes.starts(), bands),
            rows,
            piece,
            &self.pool,
            |[which, band], mut out, scratch| {
                let Expert { matrix, bias } = expert(which, routes.expert(band));
                assert_eq!(matrix.rows(), rows, "rows of an expert's matrix");
                assert_eq!(matrix.cols(), x.cols, "columns of an expert's matrix");
                let x = &x.band(band);
                self.product(&matrix, x, out.reborrow(), 1, scratch);
                if let Some(bias) = bias {
                    let bias = &bias[out.cols()];
                    self.proof.run(AddToRows { out, bias });
                }
            },
        );
    }

    /// Rows of a matrix that are a task: few enough that the expert with most tokens does not keep one
    /// thread busy while others wait, and not so few that starting a task is felt.
    fn expert_piece(
        &self,
        (choices, longest): (usize, usize),
        rows: usize,
        row_bytes: usize,
        matrices: usize,
    ) -> usize {
        let tasks = self.threads() * TASKS_PER_THREAD;
        let pieces = (tasks * longest).div_ceil((choices * matrices).max(1));
        let least = TASK_BYTES.div_ceil(row_bytes.max(1));
        let piece = rows.div_ceil(pieces.max(1)).max(least);
        piece.next_multiple_of(2 * LANES)
    }

    /// Sums what the experts of each token have made of it: `out[t] = sum over its choices of
    /// weights[t][choice] * y[place]`, the best expert first, whatever else is in the batch.
    ///
    /// `out` is `[tokens, width]`, `y` `[choices, width]`.
    ///
    /// # Panics
    /// When sizes do not fit together.
    pub fn combine_experts(
        &self,
        out: &mut [f32],
        y: &[f32],
        weights: &[f32],
        routes: &Routes<'_>,
        width: usize,
    ) {
        assert_eq!(weights.len(), routes.choices(), "a weight for each choice");
        assert_eq!(
            Some(y.len()),
            routes.choices().checked_mul(width),
            "a row for each choice"
        );
        self.rows(out, width, |first, out| {
            self.proof.run(Combine {
                out,
                first,
                y,
                weights,
                routes,
                width,
            });
        });
    }

    /// `gate = g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u = up` clamped to
    /// plus and minus `limit`: the gates of gpt-oss.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn clamped_swiglu(&self, gate: &mut [f32], up: &[f32], alpha: f32, limit: f32) {
        assert_eq!(gate.len(), up.len(), "gate and up have the same shape");
        self.rows(gate, LANES, |first, gate| {
            let up = &up[first * LANES..][..gate.len()];
            self.proof.run(ClampedSwiGlu {
                gate,
                up,
                alpha,
                limit,
            });
        });
    }
}

fn check(routing: &Routing) {
    let Routing {
        experts,
        used,
        groups,
        ..
    } = *routing;
    assert!((1..=experts).contains(&used), "{used} of {experts} experts");
    if let Some(groups) = groups {
        let fits = (1..=Groups::MOST).contains(&groups.count)
            && (1..=groups.count).contains(&groups.used)
            && experts.is_multiple_of(groups.count)
            && used <= groups.used * (experts / groups.count);
        assert!(fits, "{used} of {experts} experts in {groups:?}");
    }
}
