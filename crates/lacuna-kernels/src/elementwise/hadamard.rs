//! Orthonormal Hadamard transforms: what a block has in few elements is spread over all of it.

use crate::simd::{Kernel, LANES, Simd};

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

impl Kernel for Hadamard<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let unit = s.splat(1.0 / (self.block as f32).sqrt());
        for block in self.x.chunks_exact_mut(self.block) {
            let chunks = block.as_chunks_mut::<LANES>().0;
            for chunk in &mut *chunks {
                *chunk = within(*chunk);
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

/// The steps between elements of one chunk, written so that compilers see shuffles.
#[inline(always)]
fn within(mut x: [f32; LANES]) -> [f32; LANES] {
    for apart in [1, 2, 4, 8] {
        let from = x;
        for i in 0..LANES {
            let other = from[i ^ apart];
            x[i] = if i & apart == 0 {
                from[i] + other
            } else {
                other - from[i]
            };
        }
    }
    x
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
