//! What each policy takes, and states beside it, worked out without taking it. Pure.

use lacuna_pages::PageSize;

use crate::error::KvError;
use crate::geometry::{Geometry, Keep};
use crate::growth::{GrowthSchedule, Run, saturated};
use crate::layout::{BufferRows, Tiles};
use crate::policy::KvPolicy;

/// Bytes of one sequence whose tokens arrived one at a time: to the byte what its
/// [`crate::KvReport`] says when it shares nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Footprint {
    /// Address space.
    pub reserved_bytes: usize,
    /// Memory.
    pub committed_bytes: usize,
    /// The most memory so far, while growing included.
    pub peak_committed_bytes: usize,
    /// Bytes copied to grow.
    pub copied_bytes: usize,
    /// Bytes filled with zeros before they held a row.
    pub zeroed_bytes: usize,
    /// Times all rows were moved to larger buffers.
    pub resizes: usize,
}

impl KvPolicy {
    /// What a sequence of `tokens` tokens takes on pages of `page_size` when it was made for
    /// `capacity` tokens, at least as many.
    ///
    /// # Errors
    /// As [`Geometry::validate`], [`KvError::ContextTooLarge`] when `capacity` tokens or a block do not
    /// fit the address space, and [`KvError::ContextFull`] for more tokens than `capacity`.
    pub fn footprint(
        &self,
        geometry: &Geometry,
        page_size: PageSize,
        capacity: usize,
        tokens: usize,
    ) -> Result<Footprint, KvError> {
        self.footprint_in_chunks(geometry, page_size, capacity, tokens, 1)
    }

    /// The most memory behind a sequence on its way to `tokens` tokens, of which up to `chunk_tokens`
    /// come at once: a window gives nothing back before all of a chunk has seen it.
    ///
    /// # Errors
    /// As [`KvPolicy::footprint`].
    pub fn peak_bytes(
        &self,
        geometry: &Geometry,
        page_size: PageSize,
        capacity: usize,
        tokens: usize,
        chunk_tokens: usize,
    ) -> Result<usize, KvError> {
        let footprint =
            self.footprint_in_chunks(geometry, page_size, capacity, tokens, chunk_tokens)?;
        Ok(footprint.peak_committed_bytes)
    }

    fn footprint_in_chunks(
        &self,
        geometry: &Geometry,
        page_size: PageSize,
        capacity: usize,
        tokens: usize,
        chunk_tokens: usize,
    ) -> Result<Footprint, KvError> {
        geometry.validate()?;
        geometry.bytes(capacity)?;
        if tokens > capacity {
            return Err(KvError::ContextFull {
                capacity,
                held: 0,
                requested: tokens,
            });
        }
        let pages = Pages {
            buffers: self.layout().buffers(geometry),
            page_bytes: page_size.bytes() as usize,
        };
        let states = match tokens {
            0 => Footprint::default(),
            _ => committed_and_zeroed(geometry.state_bytes_in_pages(pages.page_bytes)),
        };
        if !geometry.has_rows() {
            return Ok(states);
        }
        let rows = match *self {
            Self::Sparse(_) => Footprint {
                reserved_bytes: pages.buffers(capacity.max(1)).sum(),
                committed_bytes: pages.mapped(capacity, tokens, tokens),
                peak_committed_bytes: pages.most_mapped(capacity, tokens, chunk_tokens),
                ..Footprint::default()
            },
            Self::Dense(_) => committed_and_zeroed(pages.buffers(capacity.max(1)).sum()),
            Self::Paged { block_tokens } => {
                let block = pages.round(geometry.bytes(block_tokens.get())?);
                committed_and_zeroed(tokens.div_ceil(block_tokens.get()) * block)
            }
            Self::Grow(schedule) => {
                pages.grown(schedule, capacity, tokens, geometry.bytes_per_token())
            }
        };
        Ok(rows.plus(states))
    }
}

impl Footprint {
    /// Those of both.
    fn plus(self, other: Self) -> Self {
        Self {
            reserved_bytes: self.reserved_bytes + other.reserved_bytes,
            committed_bytes: self.committed_bytes + other.committed_bytes,
            peak_committed_bytes: self.peak_committed_bytes + other.peak_committed_bytes,
            copied_bytes: self.copied_bytes + other.copied_bytes,
            zeroed_bytes: self.zeroed_bytes.saturating_add(other.zeroed_bytes),
            resizes: self.resizes + other.resizes,
        }
    }
}

fn committed_and_zeroed(bytes: usize) -> Footprint {
    Footprint {
        reserved_bytes: bytes,
        committed_bytes: bytes,
        peak_committed_bytes: bytes,
        zeroed_bytes: bytes,
        ..Footprint::default()
    }
}

/// Sizes in whole pages.
struct Pages {
    buffers: Vec<BufferRows>,
    page_bytes: usize,
}

impl Pages {
    fn round(&self, bytes: usize) -> usize {
        bytes.next_multiple_of(self.page_bytes)
    }

    /// Bytes of each buffer that holds `tokens` tokens.
    fn buffers(&self, tokens: usize) -> impl Iterator<Item = usize> {
        let buffers = self.buffers.iter();
        buffers.map(move |held| self.round(held.bytes(tokens)))
    }

    /// Bytes of the pages mapped for `tokens` tokens, those mapped ahead included, when what windows
    /// have passed was given back after `accepted` of them.
    fn mapped(&self, capacity: usize, tokens: usize, accepted: usize) -> usize {
        let count = self.buffers.len();
        let reserved = self.buffers(capacity.max(1));
        let buffers = self.buffers.iter().zip(reserved).enumerate();
        let mapped = buffers.map(|(index, (held, reserved))| {
            let tiles = held.tiles;
            let bytes = tiles.mapped_bytes(held.rows.keep, tokens, self.page_bytes, index, count);
            let passed = tiles.bytes_before(held.rows.keep.first_seen(accepted));
            bytes.min(reserved) - passed / self.page_bytes * self.page_bytes
        });
        mapped.sum()
    }

    /// The most bytes mapped on the way to `tokens` tokens, up to `chunk` at once: each chunk takes its
    /// pages before what it lets windows pass is given back.
    ///
    /// Without windows the last token has the most. With them what there is goes up and down, but
    /// never down from one token to that a turn later, so only the last turn of whole chunks is looked
    /// at, and what comes after it.
    fn most_mapped(&self, capacity: usize, tokens: usize, chunk: usize) -> usize {
        let Some(turn) = self.windows_turn() else {
            return self.mapped(capacity, tokens, tokens);
        };
        let chunk = chunk.max(1);
        let last = tokens.saturating_sub(turn.saturating_add(chunk))..tokens;
        let held = last.map(|before| {
            let held = before.saturating_add(chunk).min(tokens);
            self.mapped(capacity, held, before)
        });
        held.max().unwrap_or(0)
    }

    /// Tokens that fill whole pages of every buffer that a window passes; `None` without windows.
    fn windows_turn(&self) -> Option<usize> {
        let windows = self
            .buffers
            .iter()
            .filter(|held| held.rows.keep != Keep::All);
        let turns = windows.map(|held| {
            let Tiles { tokens, bytes } = held.tiles;
            tokens * (self.page_bytes / gcd(self.page_bytes, bytes))
        });
        turns.reduce(|a, b| a / gcd(a, b) * b)
    }

    fn grown(
        &self,
        schedule: GrowthSchedule,
        capacity: usize,
        tokens: usize,
        cell_bytes: usize,
    ) -> Footprint {
        let growth = schedule.after(tokens, capacity, cell_bytes);
        let runs = schedule.runs(tokens, capacity, cell_bytes);
        let (mut zeroed, mut before, mut held) = (0, 0, 0);
        for run in runs {
            zeroed += self.zeroed(run);
            (before, held) = (run.last_but_one(), run.last());
        }
        let bytes: usize = self.buffers(held).sum();
        Footprint {
            reserved_bytes: bytes,
            committed_bytes: bytes,
            peak_committed_bytes: self.peak(schedule, before, held),
            copied_bytes: growth.copied_cells.saturating_mul(cell_bytes),
            zeroed_bytes: saturated(zeroed),
            resizes: growth.resizes,
        }
    }

    /// Bytes of all sizes of a run, each filled with zeros before it holds a row.
    fn zeroed(&self, run: Run) -> u128 {
        let buffers = self.buffers.iter();
        let pages = buffers.map(|held| run.pages(held.tiles.bytes, self.page_bytes));
        pages.sum::<u128>() * self.page_bytes as u128
    }

    /// The most memory there is while `held` cells become `cells`.
    fn peak(&self, schedule: GrowthSchedule, held: usize, cells: usize) -> usize {
        let old = || self.buffers(held);
        let new = || self.buffers(cells);
        match schedule {
            GrowthSchedule::Mlx => {
                let mut committed: usize = old().sum();
                let mut peak = 0;
                for (old, new) in old().zip(new()) {
                    peak = peak.max(committed + new);
                    committed = committed + new - old;
                }
                peak
            }
            GrowthSchedule::DoubleLinear { .. } => {
                let staging = old().max().unwrap_or(0);
                old().sum::<usize>() + staging + new().sum::<usize>()
            }
        }
    }
}

/// The greatest common divisor.
fn gcd(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;

    use super::*;
    use crate::elements::KvElements;
    use crate::geometry::{Layer, LayerCache, RowSpec, Side, ValueRows};

    fn qwen3_4b() -> Geometry {
        Geometry::uniform(36, 8, 128, KvElements::both(ElementType::F16))
    }

    fn footprint(policy: &str, capacity: usize, tokens: usize) -> Footprint {
        let policy: KvPolicy = policy.parse().unwrap();
        policy
            .footprint(&qwen3_4b(), PageSize::KIB_64, capacity, tokens)
            .unwrap()
    }

    #[test]
    fn dense_takes_everything_at_once_and_sparse_a_page_a_buffer_more_than_its_rows() {
        assert_eq!(footprint("dense", 32_768, 1).committed_bytes, 9 << 29);
        for tokens in [0, 1, 31, 32, 33, 1_000, 32_768] {
            let sparse = footprint("sparse", 32_768, tokens);
            let rows = tokens * 147_456;
            assert!((rows..rows + 72 * (64 << 10)).contains(&sparse.committed_bytes));
            assert_eq!(sparse.reserved_bytes, 9 << 29);
            assert_eq!((sparse.copied_bytes, sparse.zeroed_bytes), (0, 0));
        }
    }

    #[test]
    fn interleaving_layers_makes_the_smallest_step_smaller_by_their_number() {
        let large = |policy: &str| {
            let policy: KvPolicy = policy.parse().unwrap();
            policy
                .footprint(&qwen3_4b(), PageSize::MIB_2, 32_768, 1)
                .unwrap()
                .committed_bytes
        };
        assert_eq!(large("sparse"), 144 << 20);
        assert_eq!(large("sparse:interleaved=4"), 36 << 20);
        assert_eq!(large("sparse:interleaved=36"), 4 << 20);
    }

    #[test]
    fn growing_by_copy_holds_both_sizes_at_once() {
        let grown = footprint("grow:double-linear", 32_768, 257);
        let cells = |cells: usize| cells * 147_456;
        assert_eq!(grown.committed_bytes, cells(512));
        assert_eq!(grown.peak_committed_bytes, cells(256 + 512) + 256 * 2048);
        assert_eq!((grown.copied_bytes, grown.resizes), (cells(256), 1));
        let mlx = footprint("grow:mlx", 32_768, 257);
        assert_eq!(mlx.committed_bytes, cells(512));
        assert_eq!(mlx.peak_committed_bytes, cells(512) + 256 * 2048);
    }

    #[test]
    fn blocks_are_whole() {
        let block = 16 * 147_456;
        for (tokens, blocks) in [(0, 0), (1, 1), (16, 1), (17, 2)] {
            assert_eq!(
                footprint("paged", 32_768, tokens).committed_bytes,
                blocks * block
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let policy = KvPolicy::default();
        let refused = |capacity, tokens| {
            policy
                .footprint(&qwen3_4b(), PageSize::KIB_64, capacity, tokens)
                .unwrap_err()
        };
        assert!(matches!(
            refused(1 << 40, 1),
            KvError::ContextTooLarge { .. }
        ));
        assert!(matches!(refused(10, 11), KvError::ContextFull { .. }));
        let block: KvPolicy = format!("paged:{}", usize::MAX).parse().unwrap();
        let absurd = block.footprint(&qwen3_4b(), PageSize::KIB_64, 10, 1);
        assert!(matches!(absurd, Err(KvError::ContextTooLarge { .. })));
    }

    #[test]
    fn rows_and_states_take_what_both_take() {
        let rows = footprint("grow:mlx", 32_768, 600);
        assert!(rows.copied_bytes > 0 && rows.resizes > 0 && rows.zeroed_bytes > 0);
        let states = committed_and_zeroed(4096);
        let both = rows.plus(states);
        assert_eq!(both, states.plus(rows));
        let two = rows.plus(rows);
        assert_eq!(two.copied_bytes, 2 * rows.copied_bytes);
        assert_eq!(two.resizes, 2 * rows.resizes);
        for (both, rows) in [
            (both.reserved_bytes, rows.reserved_bytes),
            (both.committed_bytes, rows.committed_bytes),
            (both.peak_committed_bytes, rows.peak_committed_bytes),
            (both.zeroed_bytes, rows.zeroed_bytes),
        ] {
            assert_eq!(both, rows + 4096);
        }
    }

    /// Only the last tokens are looked at for the most that there ever is.
    #[test]
    fn the_most_that_windows_take_is_what_looking_at_every_token_finds() {
        let rows = |head_dim, keep| {
            LayerCache::Rows(RowSpec {
                kv_heads: 1,
                key_dim: head_dim,
                value_dim: head_dim,
                values: ValueRows::Apart,
                keep,
            })
        };
        let window = |rows| Keep::Window(std::num::NonZeroUsize::new(rows).unwrap());
        let models = [
            vec![rows(64, window(5)); 8],
            vec![rows(64, window(40)), rows(32, Keep::All)],
            vec![
                rows(96, window(17)),
                rows(64, window(100)),
                rows(64, Keep::All),
            ],
        ];
        for (model, layers) in models.into_iter().enumerate() {
            let elements = KvElements::both(ElementType::F32);
            let geometry = Geometry::new(layers, elements).unwrap();
            for layout in ["sparse", "sparse:head-major", "sparse:interleaved=2"] {
                let policy: KvPolicy = layout.parse().unwrap();
                let pages = Pages {
                    buffers: policy.layout().buffers(&geometry),
                    page_bytes: 4096,
                };
                for (capacity, chunk) in [(128, 1), (128, 9), (131, 50), (384, 1), (384, 130)] {
                    for tokens in (1..=capacity).rev().step_by(3) {
                        let held = (0..tokens).map(|before| {
                            let held = (before + chunk).min(tokens);
                            pages.mapped(capacity, held, before)
                        });
                        let most = pages.most_mapped(capacity, tokens, chunk);
                        assert_eq!(
                            Some(most),
                            held.max(),
                            "model {model}, {layout}, {tokens} of {capacity} by {chunk}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn windows_turn_as_often_as_whole_pages_of_all_their_buffers_are_full() {
        let window = Keep::Window(std::num::NonZeroUsize::MIN);
        let buffer = |(keep, tokens, bytes)| BufferRows {
            layer: Layer(0),
            layers: 1,
            side: Side::Key,
            rows: RowSpec {
                kv_heads: 1,
                key_dim: 1,
                value_dim: 1,
                values: ValueRows::Apart,
                keep,
            },
            tiles: Tiles { tokens, bytes },
        };
        let turn = |buffers: &[(Keep, usize, usize)]| {
            let pages = Pages {
                buffers: buffers.iter().copied().map(buffer).collect(),
                page_bytes: 4096,
            };
            pages.windows_turn()
        };
        assert_eq!(turn(&[(Keep::All, 7, 4096)]), None);
        // Three pages are eight tiles of four tokens.
        assert_eq!(turn(&[(window, 4, 1536), (Keep::All, 7, 4096)]), Some(32));
        // One page is four tiles of three tokens.
        assert_eq!(turn(&[(window, 3, 1024)]), Some(12));
        assert_eq!(turn(&[(window, 4, 1536), (window, 3, 1024)]), Some(96));
    }
}
