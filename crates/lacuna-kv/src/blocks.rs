//! Who owns which block of a software block table, and which blocks are free in what order. Pure: a
//! block is a number here, and memory is someone else's business.
//!
//! Blocks lie in one array; the free ones are linked through it in eviction order, the first to be
//! used again at the head. Taking the head, adding at either end and taking a block out of the middle
//! are all constant work.

use std::num::NonZeroUsize;

/// One block of a [`BlockPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// Its place in the pool's array.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// How soon a freed block is to be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// Before any other: what it holds is of no use to anyone.
    First,
    /// After every other: what it holds may be asked for again ([`BlockPool::revive`]).
    Last,
}

/// Whether a sequence already runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It is new: the watermark is left free for those that run.
    New,
    /// It runs: it may have the last block.
    Running,
}

/// What a sequence asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Tokens it is to have slots for, those it has included.
    pub tokens: usize,
    /// Slots beyond those, for tokens that are only guessed yet.
    pub lookahead_tokens: usize,
    /// Blocks it has.
    pub held_blocks: usize,
    /// Blocks it has that others have too and that it is about to write: one more for each.
    pub copied_blocks: usize,
    /// Blocks that must stay free for others.
    pub reserved_blocks: usize,
    /// Whether it already runs.
    pub admission: Admission,
}

/// The answer to a [`Demand`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allocation {
    /// The blocks, each with one owner.
    Granted(Vec<BlockId>),
    /// Too few are free; nothing has changed.
    NotNow {
        /// Blocks that would have been needed.
        needed: usize,
        /// Blocks that it could have had.
        available: usize,
    },
}

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    owners: u32,
    /// Neighbours in the free list, while there are no owners.
    previous: Option<BlockId>,
    next: Option<BlockId>,
}

/// Blocks of a fixed number of tokens.
#[derive(Debug)]
pub struct BlockPool {
    block_tokens: NonZeroUsize,
    /// Blocks used at least once; the array grows to `limit`.
    blocks: Vec<Block>,
    limit: usize,
    watermark: usize,
    head: Option<BlockId>,
    tail: Option<BlockId>,
    listed: usize,
}

impl BlockPool {
    /// New sequences leave one block in this many free.
    const WATERMARK_PART: usize = 100;

    /// A pool of `limit` blocks of `block_tokens` tokens, none of them in use.
    #[must_use]
    pub fn new(block_tokens: NonZeroUsize, limit: usize) -> Self {
        let limit = limit.min(u32::MAX as usize);
        Self {
            block_tokens,
            blocks: Vec::new(),
            limit,
            watermark: limit / Self::WATERMARK_PART,
            head: None,
            tail: None,
            listed: 0,
        }
    }

    /// Tokens of a block.
    #[must_use]
    pub fn block_tokens(&self) -> NonZeroUsize {
        self.block_tokens
    }

    /// Blocks nobody owns.
    #[must_use]
    pub fn free(&self) -> usize {
        self.limit - self.blocks.len() + self.listed
    }

    /// How many own `block`.
    #[must_use]
    pub fn owners(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].owners
    }

    /// Takes the blocks that `demand` is short of, or none.
    pub fn allocate(&mut self, demand: &Demand) -> Allocation {
        let tokens = demand.tokens.saturating_add(demand.lookahead_tokens);
        let blocks = tokens.div_ceil(self.block_tokens.get());
        let needed = blocks.saturating_sub(demand.held_blocks) + demand.copied_blocks;
        let kept = match demand.admission {
            Admission::New => self.watermark.saturating_add(demand.reserved_blocks),
            Admission::Running => demand.reserved_blocks,
        };
        let available = self.free().saturating_sub(kept);
        if needed > available {
            return Allocation::NotNow { needed, available };
        }
        Allocation::Granted((0..needed).map(|_| self.take()).collect())
    }

    /// The next block in eviction order, or one never used when the list is empty: memory that was
    /// obtained is used before more is.
    fn take(&mut self) -> BlockId {
        let block = match self.head {
            Some(head) => {
                self.unlink(head);
                head
            }
            None => {
                self.blocks.push(Block::default());
                BlockId((self.blocks.len() - 1) as u32)
            }
        };
        self.blocks[block.index()].owners = 1;
        block
    }

    /// Adds an owner to a block that has one.
    pub fn share(&mut self, block: BlockId) {
        let owners = &mut self.blocks[block.index()].owners;
        assert!(*owners > 0, "a block that is shared has an owner");
        *owners += 1;
    }

    /// Makes a free block one's own again, with what it holds, wherever it is in the list. Whether it
    /// still was free.
    pub fn revive(&mut self, block: BlockId) -> bool {
        let free = self
            .blocks
            .get(block.index())
            .is_some_and(|block| block.owners == 0);
        if free {
            self.unlink(block);
            self.blocks[block.index()].owners = 1;
        }
        free
    }

    /// Takes an owner away; a block without one is free. Whether it is.
    pub fn release(&mut self, block: BlockId, reuse: Reuse) -> bool {
        let owners = &mut self.blocks[block.index()].owners;
        assert!(*owners > 0, "a block that is released has an owner");
        *owners -= 1;
        let free = *owners == 0;
        if free {
            match reuse {
                Reuse::First => self.link(None, block, self.head),
                Reuse::Last => self.link(self.tail, block, None),
            }
        }
        free
    }

    fn link(&mut self, previous: Option<BlockId>, block: BlockId, next: Option<BlockId>) {
        let entry = &mut self.blocks[block.index()];
        (entry.previous, entry.next) = (previous, next);
        *self.next_of(previous) = Some(block);
        *self.previous_of(next) = Some(block);
        self.listed += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        let (previous, next) = (entry.previous.take(), entry.next.take());
        *self.next_of(previous) = next;
        *self.previous_of(next) = previous;
        self.listed -= 1;
    }

    /// The link that leads on from `block`, or from the head.
    fn next_of(&mut self, block: Option<BlockId>) -> &mut Option<BlockId> {
        match block {
            Some(block) => &mut self.blocks[block.index()].next,
            None => &mut self.head,
        }
    }

    /// The link that leads back from `block`, or from the tail.
    fn previous_of(&mut self, block: Option<BlockId>) -> &mut Option<BlockId> {
        match block {
            Some(block) => &mut self.blocks[block.index()].previous,
            None => &mut self.tail,
        }
    }
}

#[cfg(test)]
mod tests;
