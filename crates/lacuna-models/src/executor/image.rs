//! An image becomes patches, and squares of patches one row each.

use std::ops::Range;

use crate::spec::{Channels, Frames, Grid, PatchOrder, Patches, Windows};

/// An image of a pass, and where its patches are.
#[derive(Debug)]
pub(crate) struct ImageBatch<'a> {
    /// Red, green and blue of each pixel, row by row.
    pixels: &'a [u8],
    grid: Grid,
    /// Row and column of each patch, in the order of the pass.
    places: Vec<[u32; 2]>,
    /// Which patches see one another alone where there are windows.
    windows: Vec<Range<usize>>,
    /// The number of each square of the pass among those of the image, row by row.
    squares: Vec<usize>,
}

impl<'a> ImageBatch<'a> {
    /// The image of `pixels`, as many as `grid` has, in `patches`, which take such a grid.
    pub(crate) fn new(patches: &Patches, (pixels, grid): (&'a [u8], Grid)) -> Self {
        let (side, windows) = match patches.order {
            PatchOrder::Rows => (1, None),
            PatchOrder::Squares { side, windows } => (side, windows),
        };
        let squares = grid.merged(side);
        let (order, windows) = in_windows(squares, windows);
        let places = order.iter().flat_map(|square| {
            let first = [square / squares.columns, square % squares.columns].map(|at| at * side);
            (0..side * side).map(move |at| [first[0] + at / side, first[1] + at % side])
        });
        let patches_of = |range: &Range<usize>| range.start * side * side..range.end * side * side;
        Self {
            pixels,
            grid,
            places: places.map(|place| place.map(|at| at as u32)).collect(),
            windows: windows.iter().map(patches_of).collect(),
            squares: order,
        }
    }

    pub(super) fn grid(&self) -> Grid {
        self.grid
    }

    pub(super) fn places(&self) -> &[[u32; 2]] {
        &self.places
    }

    /// All of them are one where there are none.
    pub(crate) fn windows(&self) -> &[Range<usize>] {
        &self.windows
    }

    /// Cuts the pixels into `output`: patch by patch, channel by channel or pixel by pixel, with the mean subtracted and divided
    /// by the deviation.
    pub(super) fn cut(&self, patches: &Patches, output: &mut [f32]) {
        let (size, width) = (patches.pixels, self.grid.columns * patches.pixels);
        let tables: [[f32; 256]; 3] = std::array::from_fn(|channel| {
            let (mean, deviation) = (patches.mean[channel], patches.deviation[channel]);
            std::array::from_fn(|value| (value as f32 / 255.0 - mean) / deviation)
        });
        let frames = patches.frames.together();
        let all = output.chunks_exact_mut(patches.elements());
        for (patch, place) in all.zip(&self.places) {
            let [top, left] = place.map(|at| at as usize * size);
            if patches.channels == Channels::Together {
                for (at, values) in patch.chunks_exact_mut(3).enumerate() {
                    let pixel = (top + at / size) * width + left + at % size;
                    let pixel = &self.pixels[pixel * 3..][..3];
                    for ((value, byte), table) in values.iter_mut().zip(pixel).zip(&tables) {
                        *value = table[usize::from(*byte)];
                    }
                }
                continue;
            }
            for (channel, part) in patch.chunks_exact_mut(frames * size * size).enumerate() {
                let (frame, others) = part.split_at_mut(size * size);
                for (at, value) in frame.iter_mut().enumerate() {
                    let pixel = (top + at / size) * width + left + at % size;
                    *value = tables[channel][usize::from(self.pixels[pixel * 3 + channel])];
                }
                if patches.frames == Frames::TwoTogether {
                    others.copy_from_slice(frame);
                }
            }
        }
    }

    /// For each patch the number of one of the four places around it, of a square of `per_side` whose corners are the image's,
    /// and what it counts for. The last bits of `corner` say whether it is the place below, and that to the right.
    pub(super) fn near(
        &self,
        per_side: usize,
        corner: usize,
    ) -> impl Iterator<Item = (u32, f32)> + Clone {
        let sizes = [self.grid.rows, self.grid.columns];
        let next = [corner / 2, corner % 2];
        self.places.iter().map(move |place| {
            let [row, column] = [0, 1].map(|axis| {
                let most = (sizes[axis] - 1).max(1);
                let at = f64::from(place[axis]) * (per_side - 1) as f64 / most as f64;
                let nearer = at - at.floor();
                let weight = if next[axis] == 1 {
                    nearer
                } else {
                    1.0 - nearer
                };
                ((at as usize + next[axis]).min(per_side - 1), weight)
            });
            let number = row.0 * per_side + column.0;
            (number as u32, (row.1 * column.1) as f32)
        })
    }

    /// For each patch the number of the row of its column, and of that of its row, where `each` of the former come before the
    /// latter.
    pub(super) fn on_axes(&self, each: usize) -> [Vec<u32>; 2] {
        let rows = |first: usize, axis: usize| {
            let places = self.places.iter();
            places.map(|place| first as u32 + place[axis]).collect()
        };
        [rows(0, 1), rows(each, 0)]
    }

    /// Copies rows of squares in the order of the pass to a part of rows in that of the image.
    pub(super) fn order_squares(
        &self,
        from: &[f32],
        to: &mut [f32],
        (part, parts): (usize, usize),
        width: usize,
    ) {
        for (row, square) in from.chunks_exact(width).zip(&self.squares) {
            to[(square * parts + part) * width..][..width].copy_from_slice(row);
        }
    }
}

/// The numbers of squares of a grid, row by row or window by window, and where windows are among them.
fn in_windows(squares: Grid, windows: Option<Windows>) -> (Vec<usize>, Vec<Range<usize>>) {
    let Some(Windows { side, .. }) = windows else {
        let all = 0..squares.count();
        return (all.clone().collect(), vec![all]);
    };
    let (mut order, mut found) = (Vec::with_capacity(squares.count()), Vec::new());
    for top in (0..squares.rows).step_by(side) {
        for left in (0..squares.columns).step_by(side) {
            let start = order.len();
            let columns = left..(left + side).min(squares.columns);
            for row in top..(top + side).min(squares.rows) {
                order.extend(columns.clone().map(|column| row * squares.columns + column));
            }
            found.push(start..order.len());
        }
    }
    (order, found)
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

/// The rows of squares of `merged` by `merged` of `from`, which are of a grid of so many columns, one behind another.
pub(super) fn join(from: &[f32], to: &mut [f32], columns: usize, merged: usize, width: usize) {
    let squares = columns / merged;
    for (index, to) in to.chunks_exact_mut(merged * width).enumerate() {
        // A row of a square is one piece in either.
        let (square, row) = (index / merged, index % merged);
        let top = square / squares * merged + row;
        let first = (top * columns + square % squares * merged) * width;
        to.copy_from_slice(&from[first..first + merged * width]);
    }
}

/// The same with the places of an element next to one another, as `unfold` of PyTorch has them.
pub(super) fn unfold(from: &[f32], to: &mut [f32], columns: usize, merged: usize, width: usize) {
    let squares = columns / merged;
    let places = merged * merged;
    for (square, to) in to.chunks_exact_mut(places * width).enumerate() {
        for place in 0..places {
            let row = square / squares * merged + place / merged;
            let column = square % squares * merged + place % merged;
            let from = &from[(row * columns + column) * width..][..width];
            let to = to.iter_mut().skip(place).step_by(places);
            to.zip(from).for_each(|(to, value)| *to = *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ImageSize, LearnedPlaces, Resampling};

    #[test]
    fn patches_hold_their_pixels_channel_by_channel() {
        let of = |pixels, mean, deviation| Patches {
            pixels,
            size: ImageSize::Square { per_side: 2 },
            resampling: Resampling::Bilinear,
            frames: Frames::One,
            channels: Channels::Apart,
            order: PatchOrder::Rows,
            places: LearnedPlaces::None,
            normed: false,
            mean,
            deviation,
        };
        let cut = |patches: &Patches, pixels: &[u8], grid, output: &mut [f32]| {
            ImageBatch::new(patches, (pixels, grid)).cut(patches, output);
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
        let together = Patches {
            channels: Channels::Together,
            ..one
        };
        cut(&together, &values, Grid::square(1), &mut output);
        let wanted: [f32; 12] = std::array::from_fn(|index| index as f32);
        assert!(output.iter().zip(wanted).all(close), "{output:?}");
    }

    #[test]
    fn places_on_axes_are_those_of_columns_and_then_of_rows() {
        let image = ImageBatch::new(
            &Patches {
                order: PatchOrder::Rows,
                ..SQUARES
            },
            (
                &[],
                Grid {
                    rows: 2,
                    columns: 3,
                },
            ),
        );
        let [columns, rows] = image.on_axes(10);
        assert_eq!(columns, [0, 1, 2, 0, 1, 2]);
        assert_eq!(rows, [10, 10, 10, 11, 11, 11]);
    }

    #[test]
    fn squares_become_their_means_or_are_joined() {
        let from: Vec<f32> = (0..16).map(|value| value as f32).collect();
        let mut to = [f32::NAN; 4];
        merge(&from, &mut to, 4, 2, 1);
        assert_eq!(to, [2.5, 4.5, 10.5, 12.5]);
        let mut joined = [f32::NAN; 16];
        join(&from, &mut joined, 4, 2, 1);
        assert_eq!(joined[..8], [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]);
        assert_eq!(joined[8..12], [8.0, 9.0, 12.0, 13.0]);
        let mut unfolded = [f32::NAN; 8];
        unfold(&from[..8], &mut unfolded, 2, 2, 2);
        assert_eq!(unfolded, [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]);
        let mut whole = [f32::NAN; 2];
        merge(&from[..8], &mut whole, 2, 2, 2);
        assert_eq!(whole, [3.0, 4.0]);
    }

    const SQUARES: Patches = Patches {
        pixels: 1,
        size: ImageSize::Square { per_side: 4 },
        resampling: Resampling::Bilinear,
        frames: Frames::TwoTogether,
        channels: Channels::Apart,
        order: PatchOrder::Squares {
            side: 2,
            windows: Some(Windows {
                side: 2,
                full_every: 2,
            }),
        },
        places: LearnedPlaces::Between { per_side: 3 },
        normed: false,
        mean: [0.0; 3],
        deviation: [1.0 / 255.0; 3],
    };

    #[test]
    fn squares_come_window_by_window_and_go_back_to_their_rows() {
        let grid = Grid {
            rows: 2,
            columns: 6,
        };
        let pixels: Vec<u8> = (0..12u8).flat_map(|pixel| [pixel; 3]).collect();
        let image = ImageBatch::new(&SQUARES, (&pixels, grid));
        let numbers: Vec<u32> = image
            .places()
            .iter()
            .map(|[row, column]| row * 6 + column)
            .collect();
        assert_eq!(numbers, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
        assert_eq!(image.windows(), [0..8, 8..12]);
        let mut output = [f32::NAN; 72];
        image.cut(&SQUARES, &mut output);
        let seen: Vec<u32> = output
            .chunks(6)
            .map(|patch| patch[0].round() as u32)
            .collect();
        assert_eq!(seen, numbers);
        assert!(output.chunks(2).all(|frames| frames[0] == frames[1]));
        // Two rows of two by three squares.
        let grid = Grid {
            rows: 4,
            columns: 6,
        };
        let image = ImageBatch::new(&SQUARES, (&[], grid));
        assert_eq!(image.windows(), [0..16, 16..24]);
        let mut ordered = [f32::NAN; 12];
        let from = [0.0, 1.0, 3.0, 4.0, 2.0, 5.0];
        for part in [0, 1] {
            image.order_squares(&from, &mut ordered, (part, 2), 1);
        }
        assert_eq!(
            ordered,
            [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0]
        );
    }

    #[test]
    fn what_is_learned_of_places_is_weighed_by_how_near_they_are() {
        let grid = Grid {
            rows: 2,
            columns: 4,
        };
        let image = ImageBatch::new(&SQUARES, (&[], grid));
        // The table's number is its value: the mean is linear in it.
        let mut means = [0.0f32; 8];
        for corner in 0..4 {
            for (mean, (number, weight)) in means.iter_mut().zip(image.near(3, corner)) {
                *mean += number as f32 * weight;
            }
        }
        let at = |row: f32, column: f32| row * 6.0 + column * 2.0 / 3.0;
        let wanted = [
            at(0.0, 0.0),
            at(0.0, 1.0),
            at(1.0, 0.0),
            at(1.0, 1.0),
            at(0.0, 2.0),
            at(0.0, 3.0),
            at(1.0, 2.0),
            at(1.0, 3.0),
        ];
        assert!(
            means
                .iter()
                .zip(wanted)
                .all(|(mean, wanted)| (mean - wanted).abs() < 1e-5),
            "{means:?}"
        );
        let one = ImageBatch::new(
            &SQUARES,
            (
                &[],
                Grid {
                    rows: 2,
                    columns: 2,
                },
            ),
        );
        assert!(
            one.near(1, 3).all(|(number, _)| number == 0),
            "of one place"
        );
    }
}
