//! The prefix cache: pages of computed prompts, kept and mapped into every sequence that begins the
//! same way.
//!
//! What one [`Namespace`] keeps, another never finds.
//!
//! [`Tree`] decides what is kept, found and let go, without pages; [`PrefixCache`] does it to
//! sequences; [`Grain`] says how many tokens and pages a group is.
//!
//! Who chooses between machines can be told which [`Block`]s of prompts it holds ([`PrefixCache::watched`]).
//!
//! With a [`CacheFolder`](crate::folder::CacheFolder) beside it, what it holds is also in files, from which it is
//! read back when it is not in memory. One without names gets what would be evicted, and no more ([`PrefixCache::put_aside`]).
//!
//! Layers that keep all rows are kept group by group. Layers with a window pass theirs, so a sequence
//! starts at a *resume point*: the end of a group with which the windows' pages are kept that the next
//! token sees. Where they are follows from the tokens and never from how they came in: every so many
//! groups ([`Grain::resume_every`]), at the end of a prompt, at the end of what followed it, and where
//! a later prompt left what was kept.

mod aside;
mod blocks;
mod cache;
mod gone;
mod grain;
mod namespace;
mod persistence;
mod pins;
mod swapping;
mod tree;

pub use aside::{Eviction, Moving};
pub(crate) use blocks::Blocks;
pub use blocks::{Block, BlockChange, BlockHash, KnownBlocks, Medium};
pub use cache::{Path, PrefixCache, Start};
pub use grain::Grain;
pub use namespace::Namespace;
pub(crate) use pins::PinnedPages;
pub use pins::Pins;
pub use tree::{Change, Found, GroupId, Inserted, Leaving, Miss, Parent, Tree};
