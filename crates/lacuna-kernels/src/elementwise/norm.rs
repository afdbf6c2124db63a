//! Rows that are brought to a common magnitude.

use crate::simd::{Kernel, LANES, Simd, padded};

/// Root mean square normalisation of rows, each times `weight` if there is one.
pub(crate) struct RmsNorm<'a> {
    /// Rows to read, or nothing to work in place.
    pub(crate) x: Option<&'a [f32]>,
    pub(crate) out: &'a mut [f32],
    pub(crate) weight: Option<&'a [f32]>,
    pub(crate) eps: f32,
    pub(crate) width: usize,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.width;
        for (index, out) in self.out.chunks_exact_mut(width).enumerate() {
            if let Some(x) = self.x {
                out.copy_from_slice(&x[index * width..][..width]);
            }
            let mean = sum_of_squares(s, out) / width as f32;
            let scale = 1.0 / (mean + self.eps).sqrt();
            match self.weight {
                Some(weight) => {
                    for (out, weight) in out.iter_mut().zip(weight) {
                        *out = *out * scale * weight;
                    }
                }
                None => out.iter_mut().for_each(|out| *out *= scale),
            }
        }
    }
}

/// Normalisation of rows to mean 0 and variance 1, each times `weight`, plus `bias` if there is one.
pub(crate) struct LayerNorm<'a> {
    /// Rows to read, or nothing to work in place.
    pub(crate) x: Option<&'a [f32]>,
    pub(crate) out: &'a mut [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) eps: f32,
}

impl Kernel for LayerNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        for (index, out) in self.out.chunks_exact_mut(width).enumerate() {
            if let Some(x) = self.x {
                out.copy_from_slice(&x[index * width..][..width]);
            }
            let (mean, variance) = moments(s, out);
            let scale = 1.0 / (variance + self.eps).sqrt();
            for (out, weight) in out.iter_mut().zip(self.weight) {
                *out = (*out - mean) * scale * weight;
            }
            if let Some(bias) = self.bias {
                for (out, bias) in out.iter_mut().zip(bias) {
                    *out += bias;
                }
            }
        }
    }
}

/// Multiplies each row by what brings its root mean square to that of the row of `like`.
pub(crate) struct MatchMagnitude<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) like: &'a [f32],
    /// Below which the mean square of a row of `x` counts as this.
    pub(crate) least: f32,
    pub(crate) width: usize,
}

impl Kernel for MatchMagnitude<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.x.chunks_exact_mut(self.width);
        for (x, like) in rows.zip(self.like.chunks_exact(self.width)) {
            let wanted = (sum_of_squares(s, like) / self.width as f32).sqrt();
            let found = sum_of_squares(s, x) / self.width as f32;
            // In this order NaN passes.
            let found = if self.least > found {
                self.least
            } else {
                found
            };
            let factor = wanted / found.sqrt();
            x.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// Keeps of each row what exceeds its mean by more than some standard deviations, less that much;
/// everything else becomes 0.
pub(crate) struct GaussianTopK<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) deviations: f32,
    pub(crate) width: usize,
}

impl Kernel for GaussianTopK<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.x.chunks_exact_mut(self.width) {
            let (mean, variance) = moments(s, row);
            let cutoff = mean + self.deviations * variance.sqrt();
            for x in row {
                let above = *x - cutoff;
                // In this order NaN passes.
                *x = if 0.0 > above { 0.0 } else { above };
            }
        }
    }
}

#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let last = s.load(&padded(tail));
    let mut sum = s.mul(last, last);
    for chunk in chunks {
        let x = s.load(chunk);
        sum = s.fma(x, x, sum);
    }
    s.sum(sum)
}

/// The mean and the variance (of the population: divided by the length) of a row.
#[inline(always)]
fn moments<S: Simd>(s: S, x: &[f32]) -> (f32, f32) {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut sum = s.load(&padded(tail));
    for chunk in chunks {
        sum = s.add(sum, s.load(chunk));
    }
    let mean = s.sum(sum) / x.len() as f32;
    // Differences before squares: the difference of mean squares would cancel.
    let middle = s.splat(mean);
    let mut last = [mean; LANES];
    last[..tail.len()].copy_from_slice(tail);
    let last = s.sub(s.load(&last), middle);
    let mut sum = s.mul(last, last);
    for chunk in chunks {
        let x = s.sub(s.load(chunk), middle);
        sum = s.fma(x, x, sum);
    }
    (mean, s.sum(sum) / x.len() as f32)
}
