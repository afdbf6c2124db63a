//! A software block table: rows in blocks of a fixed number of tokens, anywhere in memory, that
//! kernels find block by block.
//!
//! ```text
//! block  [ layer 0 K: 16 rows | layer 0 V: 16 rows | layer 1 K: 16 rows | ... ]
//! table  token / 16 -> block,   slot = block x 16 + token % 16
//! ```
//!
//! Blocks come from one pool for all sequences. A block's memory is obtained when it is first used
//! and stays with the pool when the block is free. Full blocks are shared between sequences by
//! counting their owners; a partly filled one is copied.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lacuna_kernels::{RowLayout, Run, RunMut, Runs, View};
use lacuna_pages::device::Location;
use lacuna_pages::{Buffer, ByteLength, Pool};

use super::rows::{layer_and_side, stream, zeroed_buffer};
use super::{Store, Usage, Useful, WriteRun};
use crate::blocks::{Admission, Allocation, BlockId, BlockPool, Demand, Reuse};
use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Geometry, Layer, Side};
use crate::layout::{Arrangement, Layout};

/// The blocks of all sequences of a cache, and their memory.
#[derive(Debug)]
pub(crate) struct Blocks {
    pool: Pool,
    arrangement: Arrangement,
    /// Where the rows of each buffer of the arrangement, one side of one layer, begin in a block.
    offsets: Vec<usize>,
    block_tokens: usize,
    /// Whole pages.
    block_bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    blocks: BlockPool,
    /// Memory of free blocks, by block; a block in use is with its owners.
    memory: Vec<Option<Arc<Buffer>>>,
}

impl Blocks {
    /// As many blocks of `block_tokens` tokens as fit the byte limit of `pool`.
    ///
    /// # Errors
    /// [`KvError::ContextTooLarge`] for a block larger than the address space.
    pub(crate) fn new(
        pool: Pool,
        geometry: &Geometry,
        block_tokens: NonZeroUsize,
    ) -> Result<Self, KvError> {
        let page = to_usize(pool.page_size().length());
        let block_bytes = geometry.bytes(block_tokens.get())?.next_multiple_of(page);
        let limit = pool.ledger().limit.map_or(usize::MAX, to_usize);
        let arrangement = Arrangement::new(geometry, Layout::TokenMajor);
        let begins = |end: &mut usize, bytes| Some(std::mem::replace(end, *end + bytes));
        let sizes = arrangement.buffers().iter();
        let sizes = sizes.map(|held| held.bytes(block_tokens.get()));
        Ok(Self {
            pool,
            offsets: sizes.scan(0, begins).collect(),
            arrangement,
            block_tokens: block_tokens.get(),
            block_bytes,
            state: Mutex::new(State {
                blocks: BlockPool::new(block_tokens, limit / block_bytes),
                memory: Vec::new(),
            }),
        })
    }

    /// Gives the memory of free blocks back and has as many blocks as fit `limit`.
    pub(crate) fn set_limit(&self, limit: ByteLength) {
        let mut state = self.lock();
        state.memory.clear();
        state.blocks.set_limit(to_usize(limit) / self.block_bytes);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The blocks that `demand` is short of, with memory, or none.
    fn allocate(&self, demand: &Demand, usage: &mut Usage) -> Result<Vec<Held>, KvError> {
        let mut state = self.lock();
        let ids = match state.blocks.allocate(demand) {
            Allocation::Granted(ids) => ids,
            Allocation::NotNow { needed, available } => {
                return Err(KvError::NotNow {
                    needed,
                    available,
                    block_tokens: self.block_tokens,
                });
            }
        };
        let mut held = Vec::with_capacity(ids.len());
        for (index, &id) in ids.iter().enumerate() {
            match self.memory(&mut state, id, usage) {
                Ok(memory) => held.push(Held { id, memory }),
                Err(error) => {
                    held.drain(..).rev().for_each(|block| state.release(block));
                    for &id in ids[index..].iter().rev() {
                        state.blocks.release(id, Reuse::First);
                    }
                    return Err(error);
                }
            }
        }
        Ok(held)
    }

    /// The memory of `block`, obtained now if the pool has none for it.
    fn memory(
        &self,
        state: &mut State,
        block: BlockId,
        usage: &mut Usage,
    ) -> Result<Arc<Buffer>, KvError> {
        if let Some(memory) = state.memory.get_mut(block.index()).and_then(Option::take) {
            return Ok(memory);
        }
        let label = format!("block {}", block.index());
        let buffer = zeroed_buffer(&self.pool, (Location::Own, self.block_bytes), label)?;
        usage.zeroed_bytes += self.block_bytes;
        Ok(Arc::new(buffer))
    }

    fn geometry(&self) -> &Geometry {
        self.arrangement.geometry()
    }

    /// Where the rows that one side of a layer reads begin in a block, and where they lie from there.
    fn rows(&self, layer: Layer, side: Side) -> (usize, RowLayout) {
        let place = self.arrangement.place(layer, side);
        (self.offsets[place.buffer], place.layout)
    }
}

impl State {
    fn release(&mut self, block: Held) {
        if self.blocks.release(block.id, Reuse::First) {
            let index = block.id.index();
            self.memory
                .resize_with(self.memory.len().max(index + 1), || None);
            self.memory[index] = Some(block.memory);
        }
    }
}

/// A block and its memory, which is one's own while no other owner has it too.
#[derive(Debug, Clone)]
struct Held {
    id: BlockId,
    memory: Arc<Buffer>,
}

impl Held {
    fn is_shared(&self) -> bool {
        Arc::strong_count(&self.memory) > 1
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.memory
            .bytes(range)
            .expect("a block has memory throughout")
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        Arc::get_mut(&mut self.memory)
            .expect("a block that is written has one owner")
            .bytes_mut(range)
            .expect("a block has memory throughout")
    }
}

/// The store of `paged`.
#[derive(Debug)]
pub(crate) struct PagedStore {
    blocks: Arc<Blocks>,
    /// Blocks before the first of the table, given back as a window passed them.
    released: usize,
    table: VecDeque<Held>,
    usage: Usage,
}

impl PagedStore {
    pub(crate) fn new(blocks: Arc<Blocks>, capacity: usize) -> Result<Self, KvError> {
        blocks.geometry().bytes(capacity)?;
        Ok(Self {
            blocks,
            released: 0,
            table: VecDeque::new(),
            usage: Usage::default(),
        })
    }

    fn block_tokens(&self) -> usize {
        self.blocks.block_tokens
    }

    /// The block of `row` and the row's place in it.
    fn slot(&self, row: usize) -> (usize, usize) {
        let block = row / self.block_tokens() - self.released;
        (block, row % self.block_tokens())
    }

    /// Adds `blocks` to the end of the table.
    fn append(&mut self, blocks: Vec<Held>) {
        self.table.extend(blocks);
        let committed = self.committed_bytes();
        self.usage.peak_committed_bytes = self.usage.peak_committed_bytes.max(committed);
    }

    fn committed_bytes(&self) -> usize {
        self.table.len() * self.blocks.block_bytes
    }

    /// Releases the blocks of the table from `keep` on, the last one first.
    fn drop_blocks_from(&mut self, keep: usize) {
        let mut state = self.blocks.lock();
        for block in self.table.drain(keep.min(self.table.len())..).rev() {
            state.release(block);
        }
    }

    /// Copies the first `rows` rows of a block, all layers.
    fn copy_rows(&mut self, from: &Held, to: &mut Held, rows: usize) {
        let blocks = Arc::clone(&self.blocks);
        for (held, &start) in blocks.arrangement.buffers().iter().zip(&blocks.offsets) {
            let range = start..start + held.bytes(rows);
            to.bytes_mut(range.clone())
                .copy_from_slice(from.bytes(range));
        }
        self.usage.copied_bytes += rows * blocks.geometry().bytes_per_token();
    }
}

impl Drop for PagedStore {
    fn drop(&mut self) {
        self.drop_blocks_from(0);
    }
}

impl Runs for PagedStore {
    fn run(&self, stream: usize, row: usize) -> Run<'_> {
        let (layer, side) = layer_and_side(stream);
        let (block, place) = self.slot(row);
        let (start, layout) = self.blocks.rows(layer, side);
        let bytes = self.block_tokens() * layout.row_stride;
        Run {
            start_row: row - place,
            rows: self.block_tokens(),
            bytes: self.table[block].bytes(start..start + bytes),
        }
    }
}

impl Store for PagedStore {
    fn prepare(&mut self, rows: Range<usize>) -> Result<(), KvError> {
        let held_blocks = self.released + self.table.len();
        let (first, place) = self.slot(rows.start);
        let copied = self
            .table
            .get(first)
            .filter(|block| block.is_shared())
            .cloned();
        if copied.is_none() && rows.end <= held_blocks * self.block_tokens() {
            return Ok(());
        }
        let demand = Demand {
            tokens: rows.end,
            lookahead_tokens: 0,
            held_blocks,
            copied_blocks: usize::from(copied.is_some()),
            reserved_blocks: 0,
            admission: match held_blocks {
                0 => Admission::New,
                _ => Admission::Running,
            },
        };
        let mut fresh = self.blocks.allocate(&demand, &mut self.usage)?;
        if let Some(shared) = copied
            && let Some(mut own) = fresh.pop()
        {
            self.copy_rows(&shared, &mut own, place);
            self.table[first] = own;
            self.blocks.lock().release(shared);
        }
        self.append(fresh);
        Ok(())
    }

    fn write(&mut self, layer: Layer, side: Side, rows: Range<usize>, write: &mut WriteRun<'_>) {
        let (offset, layout) = self.blocks.rows(layer, side);
        let mut row = rows.start;
        while row < rows.end {
            let (block, place) = self.slot(row);
            let count = (self.block_tokens() - place).min(rows.end - row);
            let at = offset + place * layout.row_stride;
            let bytes = self.table[block].bytes_mut(at..at + count * layout.row_stride);
            let first = row - rows.start;
            let rows = first..first + count;
            write(RunMut {
                layout,
                rows,
                bytes,
            });
            row += count;
        }
    }

    fn view(&self, layer: Layer, side: Side, rows: Range<usize>) -> View<'_> {
        let (_, layout) = self.blocks.rows(layer, side);
        View::gather(layout, rows, self, stream(layer, side))
    }

    fn truncate(&mut self, end: usize) -> Result<(), KvError> {
        let blocks = end.div_ceil(self.block_tokens());
        self.drop_blocks_from(blocks.saturating_sub(self.released));
        Ok(())
    }

    /// A block holds rows of all layers, so windows alone give none back.
    fn release(&mut self, useful: Useful) -> Result<(), KvError> {
        let passed = useful.first / self.block_tokens() - self.released;
        let mut state = self.blocks.lock();
        for block in self.table.drain(..passed) {
            state.release(block);
        }
        self.released += passed;
        Ok(())
    }

    fn clear(&mut self) -> Result<(), KvError> {
        self.drop_blocks_from(0);
        self.released = 0;
        Ok(())
    }

    fn duplicate(&mut self, rows: Range<usize>) -> Result<Box<dyn Store>, KvError> {
        let mut copy = Self::new(Arc::clone(&self.blocks), 0)?;
        copy.released = self.released;
        let (full, rest) = (
            rows.end / self.block_tokens(),
            rows.end % self.block_tokens(),
        );
        let demand = Demand {
            tokens: rows.end,
            lookahead_tokens: 0,
            held_blocks: full,
            copied_blocks: 0,
            reserved_blocks: 0,
            admission: Admission::New,
        };
        let mut tail = self.blocks.allocate(&demand, &mut copy.usage)?;
        let full = full - self.released;
        if let (Some(from), Some(to)) = (self.table.get(full), tail.first_mut()) {
            copy.copy_rows(from, to, rest);
        }
        let mut state = self.blocks.lock();
        for block in self.table.range(..full) {
            state.blocks.share(block.id);
            copy.table.push_back(block.clone());
        }
        drop(state);
        copy.append(tail);
        Ok(Box::new(copy))
    }

    fn usage(&self) -> Usage {
        let shared = self.table.iter().filter(|block| block.is_shared());
        let committed_bytes = self.committed_bytes();
        Usage {
            reserved_bytes: committed_bytes,
            committed_bytes,
            shared_bytes: shared.count() * self.blocks.block_bytes,
            ..self.usage
        }
    }
}
