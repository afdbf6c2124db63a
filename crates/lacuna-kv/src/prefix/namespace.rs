//! Who shares with whom.

/// Separates what is kept: sequences of one namespace find each other's groups, and no others.
///
/// The bits are whatever tells namespaces apart, such as a keyed hash of a client's name. They stand
/// for a namespace entirely, so they must not collide where the separation matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Namespace(u128);

impl Namespace {
    /// The one of everybody who is not separated.
    pub const COMMON: Self = Self(0);

    /// The namespace that `bits` stand for.
    #[must_use]
    pub const fn new(bits: u128) -> Self {
        Self(bits)
    }

    pub(crate) const fn bits(self) -> u128 {
        self.0
    }
}
