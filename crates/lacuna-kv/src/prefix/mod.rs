//! The prefix cache: pages of computed prompts, kept and mapped into every sequence that begins the
//! same way.
//!
//! What one [`Namespace`] keeps, another never finds.
//!
//! [`Tree`] decides what is kept, found and let go, without pages; [`PrefixCache`] does it to
//! sequences; [`Grain`] says how many tokens and pages a group is.

mod cache;
mod gone;
mod grain;
mod namespace;
mod pins;
mod tree;

pub use cache::{Path, PrefixCache, Start};
pub use grain::Grain;
pub use namespace::Namespace;
pub use pins::Pins;
pub use tree::{Found, GroupId, Inserted, Miss, Parent, Tree};
