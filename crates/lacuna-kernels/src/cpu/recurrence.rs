//! Recurrences of several sequences at once, each with a state of its own.

use super::Cpu;
use crate::elementwise::activation::{Identity, with_function};
use crate::grid::{Band, Block, Grid};
use crate::recurrence::{Convolution, Convolve, Scan, ScanPanels, State};
use crate::simd::LANES;

/// Sequences whose states are changed in one operation, for which threads meet once. More take turns.
const TOGETHER: usize = 16;

/// Channels that a task convolves: a token's are a quarter of a page.
const TASK_CHANNELS: usize = 256;

/// Tasks per thread that let threads finish together.
const TASKS_PER_THREAD: usize = 4;

impl Cpu {
    /// Convolves `values`, `[tokens, channels]`, in place. `states` are those of the sequences that the
    /// tokens belong to, one after another: how many of the tokens, and a state of [`Convolution::state_len`]
    /// elements.
    ///
    /// # Panics
    /// When sizes do not fit together.
    pub fn convolve<'a>(
        &self,
        values: &mut [f32],
        convolution: &Convolution<'_>,
        states: impl Iterator<Item = (usize, impl Into<State<'a>>)>,
    ) {
        let taps = convolution.taps;
        assert!(
            (2..=Convolution::MAX_TAPS).contains(&taps),
            "a convolution of {taps} taps"
        );
        let channels = convolution.weights.len() / taps;
        assert!(
            channels > 0
                && convolution.weights.len() == channels * taps
                && convolution.bias.is_none_or(|bias| bias.len() == channels),
            "weights and biases are those of {channels} channels"
        );
        let columns = TASK_CHANNELS.min(channels.next_multiple_of(LANES));
        let each = Convolution::state_len(columns, taps);
        self.bands(
            values,
            [channels, columns],
            each,
            states,
            |block, state| match convolution.activation {
                None => self.proof.run(Convolve {
                    convolution,
                    channels,
                    function: Identity,
                    block,
                    state,
                }),
                Some(activation) => with_function!(activation, |function| {
                    self.proof.run(Convolve {
                        convolution,
                        channels,
                        function,
                        block,
                        state,
                    });
                }),
            },
        );
    }

    /// Runs `values`, `[tokens, value_heads, value_dim]`, through states, in place: each token changes its
    /// sequence's and then reads it. `states` are as [`Cpu::convolve`] takes them, of
    /// [`ScanShape::state_len`](crate::ScanShape::state_len) elements.
    ///
    /// # Panics
    /// When sizes do not fit together.
    pub fn scan<'a>(
        &self,
        values: &mut [f32],
        scan: &Scan<'_>,
        states: impl ExactSizeIterator<Item = (usize, impl Into<State<'a>>)>,
    ) {
        let shape = &scan.shape;
        let heads = shape.value_heads;
        assert!(
            shape.key_heads > 0
                && heads.is_multiple_of(shape.key_heads)
                && heads.min(shape.key_dim).min(shape.value_dim) > 0,
            "{shape:?} is no scan"
        );
        let width = heads * shape.value_dim;
        let tokens = values.len() / width;
        let keys = tokens * shape.key_heads * shape.key_dim;
        assert!(
            [scan.keys.len(), scan.queries.len()] == [keys; 2]
                && [scan.decay.len(), scan.strength.len()] == [tokens * heads; 2]
                && scan.skip.is_none_or(|skip| skip.len() == heads),
            "keys, queries and gates are those of {tokens} tokens of {shape:?}"
        );
        let wanted = self.threads() * TASKS_PER_THREAD;
        let enough = |pieces: &usize| states.len() * heads * pieces >= wanted;
        let pieces = shape.cuts().find(enough).or(shape.cuts().next_back());
        let pieces = pieces.unwrap_or(1);
        let columns = shape.value_dim / pieces;
        let each = shape.piece_len(pieces);
        self.bands(values, [width, columns], each, states, |block, state| {
            self.proof.run(ScanPanels { scan, block, state });
        });
    }

    /// Calls `task` for pieces of `columns` columns of each sequence's rows of `values`, and of its state.
    fn bands<'a>(
        &self,
        values: &mut [f32],
        [width, columns]: [usize; 2],
        each: usize,
        states: impl Iterator<Item = (usize, impl Into<State<'a>>)>,
        task: impl Fn(Block<'_, f32>, &mut [f32]) + Sync,
    ) {
        let mut start = 0;
        let mut bands = states.map(|(tokens, state)| {
            let rows = start..start + tokens;
            start = rows.end;
            let State { before, after } = state.into();
            Band::new(rows, before, after)
        });
        loop {
            let mut group: [Band<'_, f32>; TOGETHER] =
                std::array::from_fn(|_| Band::new(0..0, None, &mut []));
            let mut count = 0;
            for (place, band) in group.iter_mut().zip(bands.by_ref()) {
                *place = band;
                count += 1;
            }
            if count == 0 {
                break;
            }
            Grid::new(values, width, 1, columns).run_with_states(
                &mut group[..count],
                each,
                &self.pool,
                &task,
            );
        }
        drop(bands);
        assert_eq!(start * width, values.len(), "every row is a sequence's");
    }
}
