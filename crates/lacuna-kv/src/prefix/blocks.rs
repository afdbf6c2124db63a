//! Which blocks of prompts can be reused, for those who choose between machines.
//!
//! Routers count in blocks of [`Block::TOKENS`] tokens, whatever a group has. A block is *stored* while a prompt that
//! begins with everything up to its end is given its rows, if it goes on as something does that is kept: while a group
//! that it ends in is kept, or, where layers have windows or keep states, a resume point at its end or behind it. What is
//! in memory and what is in a cache folder is told of by itself ([`Medium`]), by the same rules.
//!
//! ```text
//! groups of 24   |        0        |        1        |
//! blocks of 16   |     0     |     1     |     2     |     0 ends in group 0; 1 and 2 end in group 1
//! ```
//!
//! * **B1** A group is *of use* while it has a use of its own (that it is kept, or a resume point) or leads to a group
//!   that is of use. A block is stored exactly while a group of use is there that it ends in. Groups that part in
//!   the middle share the blocks before that.
//! * **B2** A block is stored after the one before it, and removed before that one.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use super::grain::Grain;
use super::namespace::Namespace;
use super::tree::{Change, GroupId, Parent};

/// What the tokens of a block and of all blocks before it hash to: the same on every machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub u64);

/// Tokens of a prompt, as routers count them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// What it is known by.
    pub hash: BlockHash,
    /// The block before it; none before a prompt's first.
    pub parent: Option<BlockHash>,
    /// Its tokens.
    pub tokens: [u32; Self::TOKENS],
}

/// Where the rows of a block are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Medium {
    /// In pages that sequences map.
    Memory,
    /// In files, from which they are brought into memory for a prompt that needs them.
    Disk,
}

/// What became of a block. Each medium is told of by itself: a block can be in several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockChange {
    /// It can be reused from there from now on.
    Stored(Medium, Arc<Block>),
    /// It cannot any more.
    Removed(Medium, BlockHash),
}

/// What somebody knows of the blocks of one medium who has followed every change.
#[derive(Debug, Default)]
pub struct KnownBlocks(HashMap<BlockHash, Arc<Block>>);

impl KnownBlocks {
    /// Takes note of a block that is stored. Returns whether that was news, and makes sense: it was not known, and
    /// the one before it is.
    pub fn store(&mut self, block: &Arc<Block>) -> bool {
        let follows = block
            .parent
            .is_none_or(|parent| self.0.contains_key(&parent));
        let known = self.0.insert(block.hash, Arc::clone(block));
        known.is_none() && follows
    }

    /// Takes note that a block is removed. Returns whether it was known.
    pub fn remove(&mut self, hash: BlockHash) -> bool {
        self.0.remove(&hash).is_some()
    }

    /// The block of that name, if it is there.
    #[must_use]
    pub fn get(&self, hash: BlockHash) -> Option<&Arc<Block>> {
        self.0.get(&hash)
    }

    /// All of them, each after the one before it.
    #[must_use]
    pub fn in_order(&self) -> Vec<Arc<Block>> {
        let (mut listed, mut order) = (HashSet::new(), Vec::with_capacity(self.0.len()));
        for mut block in self.0.values() {
            let mut behind = Vec::new();
            while listed.insert(block.hash) {
                behind.push(Arc::clone(block));
                match block.parent.and_then(|parent| self.0.get(&parent)) {
                    Some(parent) => block = parent,
                    None => break,
                }
            }
            order.extend(behind.into_iter().rev());
        }
        order
    }

    /// Of each block, all tokens up to its end.
    #[must_use]
    pub fn prefixes(&self) -> BTreeSet<Vec<u32>> {
        let blocks = self.0.values();
        blocks.map(|block| self.prefix(block)).collect()
    }

    fn prefix<'a>(&'a self, mut block: &'a Block) -> Vec<u32> {
        let mut blocks = vec![block];
        while let Some(parent) = block.parent.and_then(|parent| self.0.get(&parent)) {
            block = parent;
            blocks.push(block);
        }
        let blocks = blocks.into_iter().rev();
        blocks.flat_map(|block| block.tokens).collect()
    }
}

impl Block {
    /// Tokens of a block: what routers take for granted, and the least that they tell apart.
    pub const TOKENS: usize = 16;

    fn after(parent: Option<BlockHash>, tokens: [u32; Self::TOKENS]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("lacuna KV block");
        hasher.update(&parent.map_or([0; 8], |parent| parent.0.to_le_bytes()));
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
        Self {
            hash: BlockHash(u64::from_le_bytes([a, b, c, d, e, f, g, h])),
            parent,
            tokens,
        }
    }
}

/// The blocks of groups in one medium, and what became of them lately. Groups are told apart by `I`.
#[derive(Debug)]
pub(crate) struct Blocks<I> {
    medium: Medium,
    grain: Arc<Grain>,
    groups: HashMap<I, Group<I>>,
    /// How many groups of use each stored block ends in.
    holders: HashMap<BlockHash, usize>,
    changes: Vec<BlockChange>,
}

#[derive(Debug)]
struct Group<I> {
    parent: Option<I>,
    /// Groups up to its end.
    depth: usize,
    /// The blocks that end in it.
    blocks: Vec<Arc<Block>>,
    /// The last block up to its end.
    last: Option<BlockHash>,
    /// Tokens behind that one.
    rest: Vec<u32>,
    /// Uses of its own, and groups it leads to that are of use.
    uses: usize,
}

/// The blocks of one namespace that are in memory, by what its tree does.
#[derive(Debug)]
pub(super) struct BlocksInMemory {
    pub(super) namespace: Namespace,
    blocks: Blocks<GroupId>,
}

impl BlocksInMemory {
    /// Those of `namespace`, of which nothing is kept yet.
    pub(super) fn new(namespace: Namespace, grain: Arc<Grain>) -> Self {
        Self {
            namespace,
            blocks: Blocks::new(Medium::Memory, grain),
        }
    }

    /// What became of blocks since the last call, in order.
    pub(super) fn take(&mut self) -> Vec<BlockChange> {
        self.blocks.take()
    }

    /// Follows what a tree has done.
    pub(super) fn follow(&mut self, change: Change) {
        match change {
            Change::Entered { id, parent, tokens } => match parent {
                Parent::Root(namespace) if namespace == self.namespace => {
                    self.blocks.enter(id, None, &tokens);
                }
                Parent::Root(_) => {}
                Parent::Group(parent) => self.blocks.enter(id, Some(parent), &tokens),
            },
            Change::Left(id) => self.blocks.leave(id),
            Change::Resumable(id) => self.blocks.add_use(id),
            Change::NotResumable(id) => self.blocks.remove_use(id),
        }
    }
}

impl<I: Copy + Eq + Hash> Blocks<I> {
    /// Those of a medium in which there is nothing yet.
    pub(crate) fn new(medium: Medium, grain: Arc<Grain>) -> Self {
        Self {
            medium,
            grain,
            groups: HashMap::new(),
            holders: HashMap::new(),
            changes: Vec::new(),
        }
    }

    /// What became of blocks since the last call, in order.
    pub(crate) fn take(&mut self) -> Vec<BlockChange> {
        std::mem::take(&mut self.changes)
    }

    /// Takes up a group after the group `parent`, or as a prompt's first; not one that comes after a group which was not
    /// taken up.
    pub(crate) fn enter(&mut self, id: I, parent: Option<I>, tokens: &[u32]) {
        let before = match parent {
            None => None,
            Some(parent) => match self.groups.get(&parent) {
                Some(group) => Some((parent, group)),
                None => return,
            },
        };
        let depth = before.map_or(0, |(_, group)| group.depth) + 1;
        let mut last = before.and_then(|(_, group)| group.last);
        let mut rest = before.map_or(Vec::new(), |(_, group)| group.rest.clone());
        rest.extend(tokens);
        let behind = depth * self.grain.group_tokens().get() - self.grain.whole_tokens(depth);
        let whole = rest.len().saturating_sub(behind) / Block::TOKENS * Block::TOKENS;
        let (whole, rest) = rest.split_at(whole);
        let (whole, _) = whole.as_chunks::<{ Block::TOKENS }>();
        let blocks = whole.iter().map(|&tokens| {
            let block = Block::after(last, tokens);
            last = Some(block.hash);
            Arc::new(block)
        });
        let group = Group {
            parent,
            depth,
            blocks: blocks.collect(),
            last,
            rest: rest.to_vec(),
            uses: 0,
        };
        self.groups.insert(id, group);
        if self.being_kept_is_use() {
            self.add_use(id);
        }
    }

    /// Lets go of a group that leads to no other and has no resume point.
    pub(crate) fn leave(&mut self, id: I) {
        if self.being_kept_is_use() {
            self.remove_use(id);
        }
        self.groups.remove(&id);
    }

    /// Without windows and states, being kept is use enough.
    fn being_kept_is_use(&self) -> bool {
        !self.grain.has_resume_points()
    }

    /// A group is of use, as one that is kept is or one with a resume point (B1).
    pub(crate) fn add_use(&mut self, id: I) {
        let (mut next, mut risen) = (Some(id), Vec::new());
        while let Some(group) = next.and_then(|id| self.groups.get_mut(&id)) {
            group.uses += 1;
            if group.uses > 1 {
                break;
            }
            risen.push(group.blocks.clone());
            next = group.parent;
        }
        for block in risen.into_iter().rev().flatten() {
            let holders = self.holders.entry(block.hash).or_insert(0);
            *holders += 1;
            if *holders == 1 {
                self.changes.push(BlockChange::Stored(self.medium, block));
            }
        }
    }

    /// It is so once less.
    pub(crate) fn remove_use(&mut self, id: I) {
        let mut next = Some(id);
        while let Some(group) = next.and_then(|id| self.groups.get_mut(&id)) {
            group.uses -= 1;
            if group.uses > 0 {
                break;
            }
            for block in group.blocks.iter().rev() {
                let holders = self.holders.get_mut(&block.hash);
                let holders = holders.expect("B1: groups of use hold their blocks");
                *holders -= 1;
                if *holders == 0 {
                    self.holders.remove(&block.hash);
                    let removed = BlockChange::Removed(self.medium, block.hash);
                    self.changes.push(removed);
                }
            }
            next = group.parent;
        }
    }
}
