//! The likeliest token of each row of logits, found where these are, so that a word of a row is read back.

use lacuna_models::program::Slot;
use lacuna_pages::DeviceError;
use lacuna_pages::vulkan::Bound;

use crate::kernels::{LIKELIEST_RUN, Likeliest};
use crate::pass::{Pass, number};

/// Words that it takes beside the logits of `rows` rows of `width`: a key and a token of each run of a row, and a word of
/// the row.
pub(crate) fn room([rows, width]: [usize; 2]) -> u64 {
    let runs = width.div_ceil(LIKELIEST_RUN);
    rows as u64 * (2 * runs as u64 + 1)
}

/// The two dispatches that find it in `rows` rows of `width` logits from the word `logits` on, with [`room`] from the word
/// `from` on; and the word from which on they leave one of each row.
fn stages(logits: u32, from: u32, [rows, width]: [usize; 2]) -> ([(Likeliest, [u32; 3]); 2], u32) {
    let runs = width.div_ceil(LIKELIEST_RUN);
    let words = from + number(2 * rows * runs);
    let of_runs = Likeliest {
        source: logits,
        to: from,
        width: number(width),
        run: number(LIKELIEST_RUN),
        last: 0,
    };
    let of_rows = Likeliest {
        source: from,
        to: words,
        width: number(runs),
        run: number(runs),
        last: 1,
    };
    let groups = [runs, 1].map(|groups| [number(groups), number(rows), 1]);
    ([(of_runs, groups[0]), (of_rows, groups[1])], words)
}

impl<'a> Pass<'a> {
    /// Finds it. Returns where its words are.
    pub(crate) fn likeliest(
        &mut self,
        logits: Slot,
        shape: [usize; 2],
    ) -> Result<Bound<'a>, DeviceError> {
        let (stages, words) = stages(self.word(logits), self.room.of_logits, shape);
        let (kernels, windows) = (self.kernels, self.only_activations());
        for (constants, groups) in stages {
            self.dispatch(&kernels.likeliest, windows, &constants, groups)?;
            self.recording.barrier()?;
        }
        Ok(Bound::Memory {
            memory: self.arena,
            offset: 4 * u64::from(words),
            length: 4 * shape[0] as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{NO_TOKEN, left_of};

    /// The words that the device leaves of `rows` rows.
    fn found(logits: &[f32], rows: usize) -> Vec<u32> {
        let shape = [rows, logits.len() / rows];
        let (stages, words) = stages(0, number(logits.len()), shape);
        let left = (words as usize - logits.len(), rows);
        left_of(logits, (room(shape), left), |kernels| {
            (&kernels.likeliest, stages.into_iter())
        })
    }

    /// What the processor's sampler takes.
    fn wanted(row: &[f32]) -> u32 {
        if let Some(bad) = row.iter().position(|logit| !logit.is_finite()) {
            return number(bad) | NO_TOKEN;
        }
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        number(row.iter().position(|&logit| logit == most).expect("one"))
    }

    #[test]
    #[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
    fn it_is_the_first_of_the_largest_wherever_they_are() {
        // Runs that are whole and not, and one that a few threads have.
        for width in [1, 100, LIKELIEST_RUN, 3 * LIKELIEST_RUN + 7] {
            let places = [0, 99, 127, 128, LIKELIEST_RUN, width / 2, width - 1];
            let places: Vec<usize> = places.into_iter().filter(|&at| at < width).collect();
            let mut rows: Vec<Vec<f32>> = Vec::new();
            for &first in &places {
                let mut row: Vec<f32> = (0..width).map(|at| -1.0 - (at % 97) as f32).collect();
                // Several as large, the smallest numbers there are, and zeros of both signs.
                for (large, small) in [(7.5, 7.5), (1e-45, 1e-45), (0.0, -0.0), (-0.0, 0.0)] {
                    row[first] = large;
                    let later = places.iter().filter(|&&at| at > first);
                    later.for_each(|&at| row[at] = small);
                    rows.push(row.clone());
                }
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    row[first] = bad;
                    rows.push(row.clone());
                }
            }
            let words = found(&rows.concat(), rows.len());
            for (row, word) in rows.iter().zip(words) {
                assert_eq!(word, wanted(row), "{width} logits");
            }
        }
    }
}
