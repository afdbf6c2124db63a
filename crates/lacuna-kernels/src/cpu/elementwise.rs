//! Operations between products: norms, rotations, activations, sums.
//!
//! Each task takes whole rows, or any elements where they do not depend on one another.

use super::Cpu;
use crate::elementwise as kernels;
use crate::elementwise::activation::{Activation, Apply, ApplyMul, SoftCap, with_function};
use crate::elementwise::hadamard::{Hadamard, Smooth, Smoothing};
use crate::elementwise::heads::HeadRows;
use crate::elementwise::norm::{GaussianTopK, LayerNorm, MatchMagnitude, RmsNorm};
use crate::elementwise::rope::{self, Rope, RopeStyle};
use crate::simd::LANES;

impl Cpu {
    /// Adds `bias` to every row of `out`, `[tokens, bias.len()]`.
    ///
    /// # Panics
    /// When `out` is not whole rows.
    pub fn add_bias(&self, out: &mut [f32], bias: &[f32]) {
        assert!(
            out.len().is_multiple_of(bias.len().max(1)),
            "{} elements are not rows of {}",
            out.len(),
            bias.len()
        );
        self.rows(out, bias.len(), |_, x| {
            self.proof.run(kernels::Add { x, y: bias })
        });
    }

    /// Root mean square normalisation of rows of `width`:
    /// `out = x / sqrt(mean(x^2) + eps) * weight`.
    ///
    /// With `width = head_dim` it is the norm of each head.
    ///
    /// # Panics
    /// When `weight` is not `width` long, or `out` and `x` are not the same whole rows.
    pub fn rms_norm(&self, out: &mut [f32], x: &[f32], weight: &[f32], eps: f32, width: usize) {
        assert_eq!(out.len(), x.len(), "a norm keeps the shape");
        assert_eq!(weight.len(), width, "one weight per element of a row");
        self.rows(out, width, |first, out| {
            let x = Some(&x[first * width..][..out.len()]);
            self.proof.run(RmsNorm {
                x,
                out,
                weight: Some(weight),
                eps,
                width,
            });
        });
    }

    /// [`Cpu::rms_norm`] of `x` in place.
    ///
    /// # Panics
    /// When `weight` is not `width` long, or `x` is not whole rows.
    pub fn rms_norm_in_place(&self, x: &mut [f32], weight: &[f32], eps: f32, width: usize) {
        assert_eq!(weight.len(), width, "one weight per element of a row");
        self.rows(x, width, |_, out| {
            self.proof.run(RmsNorm {
                x: None,
                out,
                weight: Some(weight),
                eps,
                width,
            });
        });
    }

    /// [`Cpu::rms_norm`] without weights: `out = x / sqrt(mean(x^2) + eps)`.
    ///
    /// # Panics
    /// When `out` and `x` are not the same whole rows.
    pub fn rms_norm_unweighted(&self, out: &mut [f32], x: &[f32], eps: f32, width: usize) {
        assert_eq!(out.len(), x.len(), "a norm keeps the shape");
        self.rows(out, width, |first, out| {
            let x = Some(&x[first * width..][..out.len()]);
            self.proof.run(RmsNorm {
                x,
                out,
                weight: None,
                eps,
                width,
            });
        });
    }

    /// [`Cpu::rms_norm_unweighted`] of `x` in place.
    ///
    /// # Panics
    /// When `x` is not whole rows.
    pub fn rms_norm_unweighted_in_place(&self, x: &mut [f32], eps: f32, width: usize) {
        self.rows(x, width, |_, out| {
            self.proof.run(RmsNorm {
                x: None,
                out,
                weight: None,
                eps,
                width,
            });
        });
    }

    /// Layer normalisation of rows of `width`:
    /// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`, the variance that of the
    /// population.
    ///
    /// # Panics
    /// When `weight` or `bias` is not `width` long, or `out` and `x` are not the same whole rows.
    pub fn layer_norm(
        &self,
        out: &mut [f32],
        x: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        eps: f32,
        width: usize,
    ) {
        assert_eq!(out.len(), x.len(), "a norm keeps the shape");
        check_layer_norm(weight, bias, width);
        self.rows(out, width, |first, out| {
            let x = Some(&x[first * width..][..out.len()]);
            self.proof.run(LayerNorm {
                x,
                out,
                weight,
                bias,
                eps,
            });
        });
    }

    /// [`Cpu::layer_norm`] of `x` in place.
    ///
    /// # Panics
    /// When `weight` or `bias` is not `width` long, or `x` is not whole rows.
    pub fn layer_norm_in_place(
        &self,
        x: &mut [f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        eps: f32,
        width: usize,
    ) {
        check_layer_norm(weight, bias, width);
        self.rows(x, width, |_, out| {
            self.proof.run(LayerNorm {
                x: None,
                out,
                weight,
                bias,
                eps,
            });
        });
    }

    /// Multiplies each row of `x` by what brings its root mean square to that of the row of `like`:
    /// `x *= sqrt(mean(like^2)) / sqrt(max(mean(x^2), least))`, as Gemma 3n does with the streams of its
    /// residual.
    ///
    /// # Panics
    /// When `x` and `like` are not the same whole rows.
    pub fn match_magnitude(&self, x: &mut [f32], like: &[f32], least: f32, width: usize) {
        assert_eq!(x.len(), like.len(), "magnitudes are those of equal shapes");
        self.rows(x, width, |first, x| {
            let like = &like[first * width..][..x.len()];
            self.proof.run(MatchMagnitude {
                x,
                like,
                least,
                width,
            });
        });
    }

    /// Keeps the outliers of each row of `width`:
    /// `x = max(x - (mean(x) + deviations * sqrt(variance(x))), 0)`, the variance that of the
    /// population. Were the row normally distributed, a fixed share of it would stay (Gemma 3n's
    /// activation sparsity; Hugging Face `_gaussian_topk`).
    ///
    /// # Panics
    /// When `x` is not whole rows.
    pub fn gaussian_top_k(&self, x: &mut [f32], deviations: f32, width: usize) {
        self.rows(x, width, |_, x| {
            self.proof.run(GaussianTopK {
                x,
                deviations,
                width,
            });
        });
    }

    /// Fills the table that [`Cpu::rope`] takes: `[positions, 2 * inverse_frequencies.len()]`, for
    /// each position the cosines and then the sines of `position * inverse_frequency`, times
    /// `attention_scale` (1 unless the model scales attention with its context: YaRN's and longrope's
    /// attention factor). A frequency of 0 with a scale of 1 leaves its pair as it is, exactly.
    ///
    /// # Panics
    /// When `out` has another size.
    pub fn rope_table(
        &self,
        out: &mut [f32],
        positions: &[u32],
        inverse_frequencies: &[f32],
        attention_scale: f32,
    ) {
        let width = 2 * inverse_frequencies.len();
        assert_eq!(
            out.len(),
            positions.len() * width,
            "a rope table is [positions, rotated]"
        );
        self.rows(out, width, |first, out| {
            let positions = &positions[first..];
            rope::rope_table(out, positions, inverse_frequencies, attention_scale);
        });
    }

    /// The same of positions of `axes` numbers each: pair `i` turns by the number `of_pair[i]` of them.
    ///
    /// # Panics
    /// When sizes do not fit together, or there is no such number.
    pub fn rope_table_of_axes(
        &self,
        out: &mut [f32],
        (positions, axes): (&[u32], usize),
        of_pair: &[u8],
        inverse_frequencies: &[f32],
        attention_scale: f32,
    ) {
        let width = 2 * inverse_frequencies.len();
        assert!(
            positions.len().is_multiple_of(axes) && out.len() == positions.len() / axes * width,
            "a rope table is [positions, rotated]"
        );
        assert_eq!(
            of_pair.len(),
            inverse_frequencies.len(),
            "a number for each pair"
        );
        self.rows(out, width, |first, out| {
            let positions = (&positions[first * axes..], axes);
            let frequencies = inverse_frequencies;
            rope::rope_table_of_axes(out, positions, of_pair, frequencies, attention_scale);
        });
    }

    /// Spreads what heads have in few elements over many: multiplies `x` in place, block by block of `block` elements,
    /// with the symmetric orthonormal Hadamard matrix in the order of Sylvester. Twice gives `x` again, but for
    /// rounding, and dot products of what is transformed alike are those of before. What rows are to be stored in, and
    /// blocks of how many elements, says [`crate::ElementType::rotation`].
    ///
    /// # Panics
    /// When `block` is not a power of two of at least 16, or `x` is not whole blocks.
    pub fn hadamard(&self, x: &mut [f32], block: usize) {
        assert!(
            block.is_power_of_two() && block >= LANES && x.len().is_multiple_of(block),
            "{} elements in blocks of {block}",
            x.len()
        );
        self.rows(x, block, |_, x| self.proof.run(Hadamard { x, block }));
    }

    /// [`Cpu::hadamard`] of rows of heads that are smoothed before, `[tokens, heads * sharing, head_dim]`.
    ///
    /// # Panics
    /// As [`Cpu::hadamard`], and when `x` is not whole rows, or heads are not whole blocks.
    pub fn hadamard_of_smoothed(&self, x: &mut [f32], block: usize, by: Smoothing<'_>) {
        let width = by.factors.len() * by.sharing;
        assert!(
            block.is_power_of_two()
                && block >= LANES
                && by.head_dim.is_multiple_of(block)
                && by.factors.len().is_multiple_of(by.head_dim)
                && by
                    .centre
                    .is_none_or(|centre| centre.len() == by.factors.len())
                && x.len().is_multiple_of(width.max(1)),
            "{} elements in blocks of {block} of {by:?}",
            x.len()
        );
        self.rows(x, width, |_, x| {
            self.proof.run(Smooth { x, by });
            self.proof.run(Hadamard { x, block });
        });
    }

    /// Rotates pairs of elements of each head of `x`, `[tokens, heads, head_dim]`, in place.
    ///
    /// `table` is from [`Cpu::rope_table`] for the positions of the tokens. If it rotates fewer
    /// elements than `head_dim` (partial rotation), these are the first ones of each head, paired among
    /// themselves, and the others stay.
    ///
    /// # Panics
    /// When sizes do not fit together.
    pub fn rope(
        &self,
        x: &mut [f32],
        heads: usize,
        head_dim: usize,
        style: RopeStyle,
        table: &[f32],
    ) {
        let width = heads * head_dim;
        assert!(
            width > 0 && x.len().is_multiple_of(width),
            "rows of {heads} x {head_dim}"
        );
        let tokens = x.len() / width;
        if tokens == 0 {
            return;
        }
        let rotated = table.len() / tokens;
        assert!(
            table.len() == tokens * rotated && rotated <= head_dim && rotated.is_multiple_of(2),
            "a rope table of {} elements does not fit {tokens} tokens of head dimension {head_dim}",
            table.len()
        );
        if rotated == 0 {
            return;
        }
        self.rows(x, width, |first, x| {
            let table = &table[first * rotated..];
            self.proof.run(Rope {
                x,
                heads,
                head_dim,
                style,
                table,
                rotated,
            });
        });
    }

    /// Holds every element between two bounds, the second of which counts where they are crossed. What is no number stays so.
    pub fn clamp(&self, x: &mut [f32], bounds: [f32; 2]) {
        self.rows(x, LANES, |_, x| {
            self.proof.run(kernels::Clamp { x, bounds });
        });
    }

    /// `x = (x - shift) * factor`, with a shift and a factor for each column.
    ///
    /// # Panics
    /// When there is not one of each for a column, and `x` is not whole rows of these.
    pub fn standardize(&self, x: &mut [f32], shifts: &[f32], factors: &[f32]) {
        assert_eq!(shifts.len(), factors.len(), "one of each for a column");
        self.rows(x, shifts.len(), |_, x| {
            self.proof.run(kernels::Standardize { x, shifts, factors });
        });
    }

    /// `gate = activation(gate) * up`, element by element.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn activate_mul(&self, activation: Activation, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "gate and up have the same shape");
        self.rows(gate, LANES, |first, gate| {
            let up = &up[first * LANES..][..gate.len()];
            with_function!(activation, |function| self.proof.run(ApplyMul {
                function,
                gate,
                up
            }));
        });
    }

    /// `x = activation(x)`, element by element.
    pub fn activate(&self, activation: Activation, x: &mut [f32]) {
        self.rows(x, LANES, |_, x| {
            with_function!(activation, |function| self.proof.run(Apply { function, x }));
        });
    }

    /// `x = cap * tanh(x / cap)`, element by element: logits that never exceed `cap`.
    ///
    /// # Panics
    /// When `cap` is not positive.
    pub fn soft_cap(&self, x: &mut [f32], cap: f32) {
        assert!(cap > 0.0, "a soft cap of {cap}");
        self.rows(x, LANES, |_, x| {
            self.proof.run(Apply {
                function: SoftCap(cap),
                x,
            });
        });
    }

    /// `x += y`, element by element.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add(&self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len(), "sums have the same shape");
        self.rows(x, LANES, |first, x| {
            let y = &y[first * LANES..][..x.len()];
            self.proof.run(kernels::Add { x, y });
        });
    }

    /// `x += y * factor`, element by element.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_scaled(&self, x: &mut [f32], y: &[f32], factor: f32) {
        assert_eq!(x.len(), y.len(), "sums have the same shape");
        self.rows(x, LANES, |first, x| {
            let width = x.len();
            self.proof.run(kernels::AddScaled {
                y: &y[first * LANES..][..width],
                x,
                factors: &[factor],
                stride: 1,
                width,
            });
        });
    }

    /// `x[row] += y[row] * factors[row * stride]` for rows of `width`.
    ///
    /// # Panics
    /// When `x` and `y` are not the same whole rows, `stride` is 0 or there are too few factors.
    pub fn add_scaled_rows(
        &self,
        x: &mut [f32],
        y: &[f32],
        factors: &[f32],
        stride: usize,
        width: usize,
    ) {
        assert_eq!(x.len(), y.len(), "sums have the same shape");
        let rows = x.len().checked_div(width).unwrap_or(0);
        assert!(
            rows == 0 || factors.len() > (rows - 1) * stride,
            "{rows} rows, and {} factors that are {stride} apart",
            factors.len()
        );
        self.rows(x, width, |first, x| {
            self.proof.run(kernels::AddScaled {
                y: &y[first * width..][..x.len()],
                x,
                factors: &factors[first * stride..],
                stride,
                width,
            });
        });
    }

    /// Copies `columns` columns of every head of every token from `x` to `out`, whose rows lie as `from`
    /// and `to` say. The other columns of `out` stay as they are.
    ///
    /// # Panics
    /// When the columns are not within a row, or `x` and `out` do not have the same number of rows.
    pub fn copy_columns(
        &self,
        (out, to): (&mut [f32], HeadRows),
        (x, from): (&[f32], HeadRows),
        heads: usize,
        columns: usize,
    ) {
        for rows in [from, to] {
            assert!(
                rows.start + columns <= rows.width,
                "{columns} columns of {rows:?}"
            );
        }
        let rows = out.len().checked_div(to.width).unwrap_or(0);
        assert!(
            out.len() == rows * to.width
                && Some(x.len()) == rows.checked_mul(from.width)
                && rows.is_multiple_of(heads),
            "{} and {} elements are not rows of {heads} heads, {from:?} and {to:?}",
            x.len(),
            out.len(),
        );
        let shape = [rows / heads, heads];
        self.rows(out, to.width, |first, out| {
            for (index, out) in out.chunks_exact_mut(to.width).enumerate() {
                let [token, head] = to.token_and_head(first + index, shape);
                let row = from.row(token, head, shape);
                let x = &x[row * from.width + from.start..][..columns];
                out[to.start..][..columns].copy_from_slice(x);
            }
        });
    }

    /// Multiplies every row of `x`, `[tokens, factors.len()]`, by `factors`, element by element.
    ///
    /// # Panics
    /// When `x` is not whole rows.
    pub fn scale_columns(&self, x: &mut [f32], factors: &[f32]) {
        self.rows(x, factors.len(), |_, x| {
            self.proof.run(kernels::Mul { x, y: factors });
        });
    }

    /// `x *= y`, element by element.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn multiply(&self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len(), "products have the same shape");
        self.rows(x, LANES, |first, x| {
            let y = &y[first * LANES..][..x.len()];
            self.proof.run(kernels::Mul { x, y });
        });
    }

    /// What is left of a state after each time step: `out = e^(step * rate)`, element by element, with a
    /// rate for each column, none of which is above 0.
    ///
    /// # Panics
    /// When `out` and `steps` are not the same whole rows.
    pub fn decay(&self, out: &mut [f32], steps: &[f32], rates: &[f32]) {
        assert_eq!(out.len(), steps.len(), "a factor for each step");
        let width = rates.len();
        self.rows(out, width, |first, out| {
            let x = &steps[first * width..][..out.len()];
            self.proof.run(kernels::Decay { x, rates, out });
        });
    }

    /// Multiplies each row of `x`, `[factors.len(), width]`, by its factor: a temperature of each
    /// query, or a gate of each head.
    ///
    /// # Panics
    /// When `x` has another size.
    pub fn scale_rows(&self, x: &mut [f32], factors: &[f32], width: usize) {
        assert_eq!(
            Some(x.len()),
            factors.len().checked_mul(width),
            "one factor for each row of {width}"
        );
        self.rows(x, width, |first, x| {
            self.proof.run(kernels::ScaleRows {
                x,
                factors: &factors[first..],
                width,
            });
        });
    }

    /// `x *= factor`.
    pub fn scale(&self, x: &mut [f32], factor: f32) {
        self.rows(x, LANES, |_, x| {
            self.proof.run(kernels::Scale { x, factor });
        });
    }

    /// The index of the first element that is infinite or no number.
    ///
    /// One thread reads all of `x` once: a check for diagnosis, not for every step.
    pub fn first_not_finite(&self, x: &[f32]) -> Option<usize> {
        self.proof.run(kernels::FirstNotFinite { x })
    }
}

fn check_layer_norm(weight: &[f32], bias: Option<&[f32]>, width: usize) {
    assert_eq!(weight.len(), width, "one weight per element of a row");
    assert!(
        bias.is_none_or(|bias| bias.len() == width),
        "one bias per element of a row"
    );
}
