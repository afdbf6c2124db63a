//! The likeliest tokens of each row of logits, as many as a sampler draws from: sorted where the logits are, so that a few
//! hundred bytes of a row are read back.

use lacuna_models::program::Slot;
use lacuna_pages::DeviceError;
use lacuna_pages::vulkan::Bound;

use crate::kernels::{MOST_TOP_K, TOP_K_RUN, TopK};
use crate::pass::{Pass, number};

/// The most tokens that are kept of a row of so many logits: their keys and they are no longer than it.
pub(crate) fn most(width: usize) -> usize {
    MOST_TOP_K.min(width / 2)
}

/// Words that it takes beside the logits of `rows` rows of `width`: the lists that are left.
pub(crate) fn room([rows, width]: [usize; 2]) -> u64 {
    2 * rows as u64 * most(width) as u64
}

/// The dispatches that find `count` of each of `rows` rows of `width` logits from the word `logits` on, which are lost, and
/// leave them from the word `to` on.
fn stages(
    [logits, to]: [u32; 2],
    [rows, width]: [usize; 2],
    count: usize,
) -> impl Iterator<Item = (TopK, [u32; 3])> {
    let runs = width.div_ceil(TOP_K_RUN);
    let lists = TOP_K_RUN / count;
    let mut next = Some((0, runs));
    std::iter::from_fn(move || {
        // Runs of a list that is read, and workgroups.
        let (step, groups) = next?;
        next = (groups > 1).then(|| ((step * lists).max(1), groups.div_ceil(lists)));
        let constants = TopK {
            source: logits,
            to,
            width: number(width),
            runs: number(runs),
            step: number(step),
            lists: number(lists),
            count: number(count),
            last: (groups == 1).into(),
        };
        Some((constants, [number(groups), number(rows), 1]))
    })
}

impl<'a> Pass<'a> {
    /// Finds the `count` likeliest. Returns where their keys and they are.
    pub(crate) fn top_k(
        &mut self,
        logits: Slot,
        shape: [usize; 2],
        count: usize,
    ) -> Result<Bound<'a>, DeviceError> {
        let (kernels, windows) = (self.kernels, self.only_activations());
        let to = self.room.of_logits;
        for (constants, groups) in stages([self.word(logits), to], shape, count) {
            self.dispatch(&kernels.top_k, windows, &constants, groups)?;
            self.recording.barrier()?;
        }
        Ok(Bound::Memory {
            memory: self.arena,
            offset: 4 * u64::from(to),
            length: 8 * (shape[0] * count) as u64,
        })
    }
}

/// The logit that has a key of [`key_of`](../kernels/keys.wgsl), or infinity for one that is no finite number.
pub(crate) fn logit(key: u32) -> f32 {
    f32::from_bits(match key {
        u32::MAX => f32::INFINITY.to_bits(),
        key if key >= 1 << 31 => key & !(1 << 31),
        key => !key,
    })
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use super::*;
    use crate::kernels::left_of;

    #[test]
    fn every_stage_reads_what_the_one_before_has_left_and_the_last_leaves_one_list() {
        for width in [2, 1000, 1024, 1025, 32_000, 151_936, 262_144, 2_000_000] {
            for count in [1, 2, 40, 64, most(width)] {
                if count == 0 || count > most(width) {
                    continue;
                }
                let runs = width.div_ceil(TOP_K_RUN);
                let shortest = if runs > 1 { width / runs } else { width };
                assert!(2 * count <= shortest, "{width} {count}");
                assert!(runs.checked_mul(width).is_some_and(|most| most < 1 << 32));
                let mut left = None;
                for (constants, [groups, rows, _]) in stages([0, 0], [3, width], count) {
                    assert_eq!(rows, 3);
                    let step = constants.step as usize;
                    match left {
                        None => assert_eq!((step, groups as usize), (0, runs)),
                        Some((each, lists)) => {
                            assert_eq!(step, each);
                            let read = groups as usize * constants.lists as usize;
                            assert!(read >= lists && step * (lists - 1) < runs);
                            assert!(constants.lists as usize * count <= TOP_K_RUN);
                        }
                    }
                    let each = (step * constants.lists as usize).max(1);
                    left = Some((each, groups as usize));
                    assert_eq!(constants.last == 1, groups == 1);
                }
                assert_eq!(left.map(|(_, groups)| groups), Some(1));
            }
        }
    }

    /// The keys and tokens that the device leaves of `rows` rows.
    fn found(logits: &[f32], rows: usize, count: usize) -> Vec<u32> {
        let shape = [rows, logits.len() / rows];
        let left = (0, 2 * rows * count);
        left_of(logits, (room(shape), left), |kernels| {
            let to = number(logits.len());
            (&kernels.top_k, stages([0, to], shape, count))
        })
    }

    /// What is left of a row that is sorted.
    fn wanted(row: &[f32], count: usize) -> Vec<(u32, f32)> {
        let mut all: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
        let rank = |logit: f32| {
            if logit.is_finite() {
                logit
            } else {
                f32::INFINITY
            }
        };
        all.sort_by(|&(a, x), &(b, y)| {
            let order = rank(y).partial_cmp(&rank(x)).unwrap_or(Ordering::Equal);
            order.then(a.cmp(&b))
        });
        all.truncate(count);
        all
    }

    #[test]
    #[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
    fn it_is_what_sorting_all_would_leave() {
        let mut state = 1u64;
        let mut random = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 40) as u32
        };
        // One run, two of odd lengths, and so many that lists are merged more than once.
        for width in [2, 100, 1024, 1025, 3_001, 40_000] {
            let rows: Vec<Vec<f32>> = (0..6)
                .map(|kind| {
                    let mut row: Vec<f32> = (0..width)
                        .map(|at| match kind {
                            // All kinds of numbers, and few of them.
                            0 => random() as f32 / 65_536.0 - 128.0,
                            1 => (random() % 7) as f32 - 3.0,
                            // In order, and the other way.
                            2 => at as f32,
                            3 => -(at as f32),
                            // As large: zeros of both signs, and the smallest numbers there are.
                            4 => [0.0, -0.0][random() as usize % 2],
                            _ => f32::from_bits(random() % 3) * [1.0, -1.0][random() as usize % 2],
                        })
                        .collect();
                    if kind == 1 {
                        row[width / 2] = [f32::NAN, f32::NEG_INFINITY][width % 2];
                    }
                    row
                })
                .collect();
            for count in [1, 3, 40, 64, MOST_TOP_K] {
                let count = count.min(most(width));
                let pairs = found(&rows.concat(), rows.len(), count);
                let pairs = pairs.as_chunks::<2>().0;
                for (row, pairs) in rows.iter().zip(pairs.chunks_exact(count)) {
                    let wanted = wanted(row, count);
                    for (&[key, token], (wanted, value)) in pairs.iter().zip(wanted) {
                        assert_eq!(token, wanted, "{count} of {width}");
                        let value = if value.is_finite() {
                            value
                        } else {
                            f32::INFINITY
                        };
                        assert_eq!(logit(key), value, "{count} of {width}");
                    }
                }
            }
        }
    }
}
