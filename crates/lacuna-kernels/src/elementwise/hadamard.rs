//! Orthonormal Hadamard transforms: what a block has in few elements is spread over all of it.

use crate::simd::{Kernel, LANES, Registers, Simd, each};

/// Elements of the blocks in which heads are transformed, of all `sizes` alike: the largest power of two that divides
/// every one of them.
pub(crate) fn block_len(sizes: &[usize]) -> usize {
    let all = sizes.iter().fold(0, |all, size| all | size);
    match all {
        0 => 1,
        all => 1 << all.trailing_zeros(),
    }
}

/// Transforms blocks of `block` elements in place, a power of two and at least [`LANES`]: multiplies each with the
/// matrix whose element at row `i` and column `j` is `(-1)^popcount(i & j) / sqrt(block)`, which is its own inverse.
///
/// Sums are added in pairs of elements 1 apart, then 2, 4 and so on, so every level has the same bits.
pub(crate) struct Hadamard<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) block: usize,
}

/// What heads are changed by before they are transformed: `(x - centre) * factor`, element by element.
#[derive(Debug, Clone, Copy)]
pub struct Smoothing<'a> {
    /// `[heads, head_dim]`, or nothing where nothing is subtracted.
    pub centre: Option<&'a [f32]>,
    /// `[heads, head_dim]`.
    pub factors: &'a [f32],
    /// Elements of a head.
    pub head_dim: usize,
    /// How many heads one after the other share the same of these: query heads that read one head.
    pub sharing: usize,
}

/// Changes rows of heads so, in place.
pub(crate) struct Smooth<'a, 'b> {
    pub(crate) x: &'a mut [f32],
    pub(crate) by: Smoothing<'b>,
}

impl Kernel for Smooth<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Smoothing {
            centre,
            factors,
            head_dim,
            sharing,
        } = self.by;
        for row in self.x.chunks_exact_mut(factors.len() * sharing) {
            for (head, heads) in row.chunks_exact_mut(head_dim * sharing).enumerate() {
                let of_head = head * head_dim..(head + 1) * head_dim;
                let factors = &factors[of_head.clone()];
                for x in heads.chunks_exact_mut(head_dim) {
                    if let Some(centre) = centre {
                        for (x, centre) in x.iter_mut().zip(&centre[of_head.clone()]) {
                            *x -= centre;
                        }
                    }
                    for (x, factor) in x.iter_mut().zip(factors) {
                        *x *= factor;
                    }
                }
            }
        }
    }
}

impl Kernel for Hadamard<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let unit = s.splat(1.0 / (self.block as f32).sqrt());
        // What fits in registers stays there from the first step to the last.
        match (self.block / LANES, S::REGISTERS) {
            (4, _) => self.in_registers::<S, 4>(s, unit),
            (8, Registers::Many) => self.in_registers::<S, 8>(s, unit),
            (16, Registers::Many) => self.in_registers::<S, 16>(s, unit),
            _ => self.in_memory(s, unit),
        }
    }
}

impl Hadamard<'_> {
    /// Blocks of `N` chunks.
    #[inline(always)]
    fn in_registers<S: Simd, const N: usize>(self, s: S, unit: S::F) {
        for block in self.x.as_chunks_mut::<LANES>().0.as_chunks_mut::<N>().0 {
            let mut x: [_; N] = each!(unit, |c| within(s, s.load(&block[c])));
            let mut apart = 1;
            while apart < N {
                let from = x;
                for c in 0..N {
                    let other = from[c ^ apart];
                    x[c] = match c & apart {
                        0 => s.add(from[c], other),
                        _ => s.sub(other, from[c]),
                    };
                }
                apart *= 2;
            }
            for c in 0..N {
                s.store(s.mul(x[c], unit), &mut block[c]);
            }
        }
    }

    #[inline(always)]
    fn in_memory<S: Simd>(self, s: S, unit: S::F) {
        for block in self.x.chunks_exact_mut(self.block) {
            let chunks = block.as_chunks_mut::<LANES>().0;
            for chunk in &mut *chunks {
                s.store(within(s, s.load(chunk)), chunk);
            }
            let mut apart = 1;
            while apart < chunks.len() {
                for group in chunks.chunks_exact_mut(2 * apart) {
                    let (first, second) = group.split_at_mut(apart);
                    for (a, b) in first.iter_mut().zip(second) {
                        let (x, y) = (s.load(a), s.load(b));
                        s.store(s.add(x, y), a);
                        s.store(s.sub(x, y), b);
                    }
                }
                apart *= 2;
            }
            for chunk in chunks {
                s.store(s.mul(s.load(chunk), unit), chunk);
            }
        }
    }
}

/// The steps between elements of one chunk.
#[inline(always)]
fn within<S: Simd>(s: S, x: S::F) -> S::F {
    let x = step::<S, 1>(s, x);
    let x = step::<S, 2>(s, x);
    let x = step::<S, 4>(s, x);
    step::<S, 8>(s, x)
}

/// Of each pair of lanes that are `APART` apart the sum, and the first less the second.
#[inline(always)]
fn step<S: Simd, const APART: usize>(s: S, x: S::F) -> S::F {
    let sign = const {
        let mut sign = [1.0; LANES];
        let mut lane = 0;
        while lane < LANES {
            if lane & APART != 0 {
                sign[lane] = -1.0;
            }
            lane += 1;
        }
        sign
    };
    // A factor of one is exact, so this is a sum or a difference, rounded once.
    s.fma(x, s.load(&sign), s.exchange::<APART>(x))
}

#[cfg(test)]
mod tests {
    use super::block_len;

    #[test]
    fn blocks_are_the_largest_powers_of_two_that_divide_all_sizes() {
        for (sizes, expected) in [
            (&[64][..], 64),
            (&[256], 256),
            (&[96], 32),
            (&[80], 16),
            (&[576, 512], 64),
            (&[], 1),
        ] {
            assert_eq!(block_len(sizes), expected, "{sizes:?}");
        }
    }
}
