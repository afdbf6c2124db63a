//! An image becomes patches, and squares of patches one row each.

use crate::spec::{Grid, Patches};

/// Cuts `pixels`, three bytes each, into `output`: patch by patch, channel by channel, with the mean subtracted and
/// divided by the deviation.
pub(super) fn cut(patches: &Patches, pixels: &[u8], grid: Grid, output: &mut [f32]) {
    let (size, width) = (patches.pixels, grid.columns * patches.pixels);
    let tables: [[f32; 256]; 3] = std::array::from_fn(|channel| {
        let (mean, deviation) = (patches.mean[channel], patches.deviation[channel]);
        std::array::from_fn(|value| (value as f32 / 255.0 - mean) / deviation)
    });
    for (index, patch) in output.chunks_exact_mut(patches.elements()).enumerate() {
        let (top, left) = (index / grid.columns * size, index % grid.columns * size);
        for (place, value) in patch.iter_mut().enumerate() {
            let (channel, row, column) = (place / (size * size), place / size % size, place % size);
            let pixel = (top + row) * width + left + column;
            *value = tables[channel][usize::from(pixels[pixel * 3 + channel])];
        }
    }
}

/// The means of squares of `merged` by `merged` rows of `from`, which are of a grid of so many columns.
pub(super) fn merge(from: &[f32], to: &mut [f32], columns: usize, merged: usize, width: usize) {
    let squares = columns / merged;
    let count = (merged * merged) as f32;
    for (index, to) in to.chunks_exact_mut(width).enumerate() {
        let (top, left) = (index / squares * merged, index % squares * merged);
        to.fill(0.0);
        for row in top..top + merged {
            for column in left..left + merged {
                let from = &from[(row * columns + column) * width..][..width];
                to.iter_mut()
                    .zip(from)
                    .for_each(|(sum, value)| *sum += value);
            }
        }
        to.iter_mut().for_each(|sum| *sum /= count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ImageSize, Resampling};

    #[test]
    fn patches_hold_their_pixels_channel_by_channel() {
        let of = |pixels, mean, deviation| Patches {
            pixels,
            size: ImageSize::Square { per_side: 2 },
            resampling: Resampling::Bilinear,
            mean,
            deviation,
        };
        let patches = of(1, [0.0, 0.5, 0.0], [1.0, 0.5, 2.0]);
        let pixels = [0, 255, 255, 255, 0, 0, 51, 255, 0, 0, 0, 102];
        let mut output = [f32::NAN; 12];
        cut(&patches, &pixels, Grid::square(2), &mut output);
        assert_eq!(
            output,
            [0.0, 1.0, 0.5, 1.0, -1.0, 0.0, 0.2, 1.0, 0.0, 0.0, -1.0, 0.2]
        );
        let one = of(2, [0.0; 3], [1.0 / 255.0; 3]);
        let values: [u8; 12] = std::array::from_fn(|index| index as u8);
        cut(&one, &values, Grid::square(1), &mut output);
        let close = |(found, wanted): (&f32, f32)| (found - wanted).abs() < 1e-5;
        let wanted = [0.0, 3.0, 6.0, 9.0, 1.0, 4.0, 7.0, 10.0, 2.0, 5.0, 8.0, 11.0];
        assert!(output.iter().zip(wanted).all(close), "{output:?}");
    }

    #[test]
    fn squares_become_their_means() {
        let from: Vec<f32> = (0..16).map(|value| value as f32).collect();
        let mut to = [f32::NAN; 4];
        merge(&from, &mut to, 4, 2, 1);
        assert_eq!(to, [2.5, 4.5, 10.5, 12.5]);
        let mut whole = [f32::NAN; 2];
        merge(&from[..8], &mut whole, 2, 2, 2);
        assert_eq!(whole, [3.0, 4.0]);
    }
}
