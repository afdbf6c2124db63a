//! Tables of points byte by byte, as the permutations of AVX-512 look them up.

use super::{IQ3_S_POINTS, IQ3_XXS_POINTS, tables};

/// A byte of each point of a table, in the lines that permutations of bytes take.
#[repr(align(64))]
pub(crate) struct Plane<const N: usize>(pub(crate) [u8; N]);

/// Codes of two bits of the first four elements, and of the last four.
pub(crate) static IQ2_XXS_PLANES: [Plane<256>; 2] = code_planes(&tables::IQ2_XXS);
pub(crate) static IQ2_XS_PLANES: [Plane<512>; 2] = code_planes(&tables::IQ2_XS);
pub(crate) static IQ2_S_PLANES: [Plane<1024>; 2] = code_planes(&tables::IQ2_S);
/// Magnitudes of each element.
pub(crate) static IQ3_XXS_PLANES: [Plane<256>; 4] = magnitude_planes(&IQ3_XXS_POINTS);
/// Magnitudes, which are less than 16, of the first two elements, and of the last two.
pub(crate) static IQ3_S_PLANES: [Plane<512>; 2] = nibble_planes(&IQ3_S_POINTS);

const fn code_planes<const N: usize>(codes: &[u16; N]) -> [Plane<N>; 2] {
    let mut planes = [Plane([0; N]), Plane([0; N])];
    let mut i = 0;
    while i < N {
        planes[0].0[i] = codes[i] as u8;
        planes[1].0[i] = (codes[i] >> 8) as u8;
        i += 1;
    }
    planes
}

const fn magnitude_planes<const N: usize>(points: &[u32; N]) -> [Plane<N>; 4] {
    let mut planes = [const { Plane([0; N]) }; 4];
    let mut i = 0;
    while i < 4 * N {
        planes[i % 4].0[i / 4] = (points[i / 4] >> (8 * (i % 4))) as u8;
        i += 1;
    }
    planes
}

const fn nibble_planes<const N: usize>(points: &[u32; N]) -> [Plane<N>; 2] {
    let mut planes = [Plane([0; N]), Plane([0; N])];
    let mut i = 0;
    while i < 2 * N {
        let two = points[i / 2] >> (16 * (i % 2));
        planes[i % 2].0[i / 2] = (two | two >> 4) as u8;
        i += 1;
    }
    planes
}
