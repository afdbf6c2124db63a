//! Resizing as Pillow does it: a filter as wide as some pixels of the smaller image, along rows and then along
//! columns, with weights of 22 bits and a rounding to bytes after each. From release 13 on Pillow
//! takes columns first where that is less work.
//!
//! Models were trained on what Pillow, or kernels that follow it, made of their images.

use std::f64::consts::PI;

use crate::decode::Image;

/// What pixels around a place count for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// A triangle, which Pillow calls bilinear.
    Triangle,
    /// Keys's cubic convolution with `a = -0.5`, which Pillow calls bicubic.
    Cubic,
    /// The sinc function, windowed by one three times as wide, which Pillow calls Lanczos.
    Lanczos,
}

impl Filter {
    /// How far it reaches, in pixels of the smaller image.
    const fn reach(self) -> f64 {
        match self {
            Self::Triangle => 1.0,
            Self::Cubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// What a pixel at this distance counts for, in pixels of the smaller image.
    fn weight(self, distance: f64) -> f64 {
        /// Pillow's; OpenCV and PyTorch without antialiasing have -0.75.
        const A: f64 = -0.5;
        let x = distance.abs();
        match self {
            Self::Triangle => (1.0 - x).max(0.0),
            Self::Cubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Self::Cubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            Self::Lanczos if x < 3.0 => sinc(x) * sinc(x / 3.0),
            Self::Cubic | Self::Lanczos => 0.0,
        }
    }
}

fn sinc(x: f64) -> f64 {
    match x {
        0.0 => 1.0,
        x => (x * PI).sin() / (x * PI),
    }
}

/// Bits behind the point of a weight: a byte's product with any has room in 32 bits, and so has a sum of them.
const PRECISION: u32 = 32 - 8 - 2;

/// What one pixel of the result is made of, along one side.
struct Taps {
    /// The first of them.
    start: usize,
    weights: Vec<i32>,
}

fn taps(filter: Filter, from: usize, to: usize) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let widened = scale.max(1.0);
    let reach = filter.reach() * widened;
    let tap = |index: usize| {
        let center = (index as f64 + 0.5) * scale;
        // Toward zero, as a cast in C: what is below zero is clamped anyway.
        let start = ((center - reach + 0.5) as usize).min(from - 1);
        let end = ((center + reach + 0.5) as usize).clamp(start + 1, from);
        let of = |place: usize| filter.weight((place as f64 - center + 0.5) / widened);
        let weights: Vec<f64> = (start..end).map(of).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: &f64| {
            let weight = if sum == 0.0 { *weight } else { weight / sum };
            (weight * f64::from(1 << PRECISION)).round() as i32
        };
        Taps {
            start,
            weights: weights.iter().map(fixed).collect(),
        }
    };
    (0..to).map(tap).collect()
}

/// A weighed sum of bytes, rounded.
fn sum(values: impl Iterator<Item = u8>, weights: &[i32]) -> u8 {
    let start = 1i32 << (PRECISION - 1);
    let weighed = values.zip(weights);
    let sum = weighed.fold(start, |sum, (value, weight)| {
        sum.wrapping_add(i32::from(value).wrapping_mul(*weight))
    });
    (sum >> PRECISION).clamp(0, 255) as u8
}

/// `image` with `width` pixels in each of `height` rows, whatever shape it had.
///
/// # Panics
/// When either is none.
#[must_use]
pub fn resize(image: &Image, [width, height]: [usize; 2], filter: Filter) -> Image {
    assert!(width > 0 && height > 0, "an image has pixels");
    let rows = match width == image.width() {
        true => image.pixels().to_vec(),
        false => along_rows(image, width, filter),
    };
    let pixels = match height == image.height() {
        true => rows,
        false => along_columns(&rows, (width, image.height()), height, filter),
    };
    Image::new(width, height, pixels)
}

fn along_rows(image: &Image, width: usize, filter: Filter) -> Vec<u8> {
    let taps = taps(filter, image.width(), width);
    let mut made = Vec::with_capacity(width * image.height() * 3);
    for row in image.pixels().chunks_exact(image.width() * 3) {
        for Taps { start, weights } in &taps {
            let pixels = &row[start * 3..(start + weights.len()) * 3];
            for channel in 0..3 {
                let values = pixels.iter().skip(channel).step_by(3);
                made.push(sum(values.copied(), weights));
            }
        }
    }
    made
}

fn along_columns(
    rows: &[u8],
    (width, from): (usize, usize),
    height: usize,
    filter: Filter,
) -> Vec<u8> {
    let row_bytes = width * 3;
    let mut made = Vec::with_capacity(row_bytes * height);
    for Taps { start, weights } in taps(filter, from, height) {
        let rows = &rows[start * row_bytes..(start + weights.len()) * row_bytes];
        for place in 0..row_bytes {
            let values = rows.iter().skip(place).step_by(row_bytes);
            made.push(sum(values.copied(), &weights));
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_image_of_its_own_size_stays_as_it_is() {
        let pixels: Vec<u8> = (0..36).map(|value| value * 7).collect();
        let image = Image::new(4, 3, pixels);
        for filter in [Filter::Triangle, Filter::Cubic, Filter::Lanczos] {
            assert_eq!(resize(&image, [4, 3], filter), image);
        }
    }

    #[test]
    fn half_the_size_of_two_shades_is_their_mean_where_they_meet() {
        let shades = [0, 0, 100, 100, 100, 200, 200, 200];
        let pixels = shades.iter().flat_map(|&shade| [shade; 3]).collect();
        let half = resize(&Image::new(8, 1, pixels), [4, 1], Filter::Triangle);
        let reds: Vec<u8> = half.pixels().iter().copied().step_by(3).collect();
        // Weights 1 3 3 1 over 8, and 3 3 1 over 7 at the ends.
        assert_eq!(reds, [14, 88, 150, 200]);
    }

    proptest! {
        #[test]
        fn one_color_stays_that_whatever_becomes_of_the_size(
            color in any::<[u8; 3]>(),
            (width, height) in (1usize..40, 1usize..40),
            (to_width, to_height) in (1usize..40, 1usize..40),
        ) {
            let image = Image::new(width, height, color.repeat(width * height));
            for filter in [Filter::Triangle, Filter::Cubic, Filter::Lanczos] {
                let resized = resize(&image, [to_width, to_height], filter);
                prop_assert_eq!(resized.pixels(), color.repeat(to_width * to_height));
            }
        }
    }
}
