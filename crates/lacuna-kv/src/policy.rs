//! The ways a KV cache can hold memory, by name.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use crate::growth::GrowthSchedule;
use crate::layout::Layout;

/// How a KV cache holds memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvPolicy {
    /// Pages are attached to reserved address space as tokens arrive. Growing costs a few
    /// microseconds per page and copies nothing; sequences share pages.
    Sparse(Layout),
    /// The whole context is committed and zeroed when a sequence is made. Growing costs nothing;
    /// nothing is shared.
    Dense(Layout),
    /// Rows in one piece that is replaced by a longer one when it is full: every row is copied.
    /// Nothing is shared or given back.
    Grow(GrowthSchedule),
    /// Rows in blocks that a software table finds. Growing takes a block from a pool that keeps its
    /// memory; full blocks are shared.
    Paged {
        /// Tokens of a block.
        block_tokens: NonZeroUsize,
    },
}

impl Default for KvPolicy {
    /// [`KvPolicy::Sparse`] with [`Layout::TokenMajor`].
    fn default() -> Self {
        Self::Sparse(Layout::TokenMajor)
    }
}

impl KvPolicy {
    /// Tokens of a block of [`KvPolicy::Paged`], unless its name says otherwise.
    pub const BLOCK_TOKENS: NonZeroUsize = NonZeroUsize::new(16).expect("not zero");

    /// How rows lie in a buffer.
    #[must_use]
    pub fn layout(&self) -> Layout {
        match *self {
            Self::Sparse(layout) | Self::Dense(layout) => layout,
            Self::Grow(_) | Self::Paged { .. } => Layout::TokenMajor,
        }
    }

    /// Whether sequences whose memory is held so can be kept in files ([`crate::saved`]).
    #[must_use]
    pub fn can_be_saved(&self) -> bool {
        matches!(self, Self::Sparse(_))
    }
}

/// A policy name that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown KV policy `{0}`; use sparse or dense, either also with `:head-major` or `:interleaved=LAYERS`, \
     paged or paged:TOKENS, grow:mlx, or grow:double-linear or grow:double-linear:CELLS"
)]
pub struct UnknownPolicy(pub String);

impl FromStr for KvPolicy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let (kind, detail) = match name.split_once(':') {
            Some((kind, detail)) => (kind, Some(detail)),
            None => (name, None),
        };
        let policy = match kind {
            "sparse" => layout(detail).map(Self::Sparse),
            "dense" => layout(detail).map(Self::Dense),
            "grow" => detail.and_then(schedule).map(Self::Grow),
            "paged" => block_tokens(detail).map(|block_tokens| Self::Paged { block_tokens }),
            _ => None,
        };
        policy.ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

fn layout(detail: Option<&str>) -> Option<Layout> {
    match detail {
        None => Some(Layout::TokenMajor),
        Some("head-major") => Some(Layout::HeadMajor),
        Some(detail) => {
            let layers = detail.strip_prefix("interleaved=")?;
            layers.parse::<NonZeroUsize>().ok().map(Layout::Interleaved)
        }
    }
}

fn block_tokens(detail: Option<&str>) -> Option<NonZeroUsize> {
    match detail {
        None => Some(KvPolicy::BLOCK_TOKENS),
        Some(tokens) => tokens.parse().ok(),
    }
}

fn schedule(detail: &str) -> Option<GrowthSchedule> {
    let switch_cells = match detail.split_once(':') {
        None if detail == "mlx" => return Some(GrowthSchedule::Mlx),
        None if detail == "double-linear" => GrowthSchedule::TABLE_SWITCH_CELLS,
        Some(("double-linear", cells)) => cells.parse().ok()?,
        _ => return None,
    };
    Some(GrowthSchedule::DoubleLinear { switch_cells })
}

impl fmt::Display for KvPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sparse(layout) => write!(f, "sparse{layout}"),
            Self::Dense(layout) => write!(f, "dense{layout}"),
            Self::Grow(schedule) => write!(f, "grow:{schedule}"),
            Self::Paged { block_tokens } if *block_tokens == Self::BLOCK_TOKENS => {
                f.write_str("paged")
            }
            Self::Paged { block_tokens } => write!(f, "paged:{block_tokens}"),
        }
    }
}

impl fmt::Display for Layout {
    /// As it follows a policy's name: nothing for token-major.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TokenMajor => Ok(()),
            Self::HeadMajor => f.write_str(":head-major"),
            Self::Interleaved(layers) => write!(f, ":interleaved={layers}"),
        }
    }
}

impl fmt::Display for GrowthSchedule {
    /// As it follows `grow:`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Mlx => f.write_str("mlx"),
            Self::DoubleLinear { switch_cells } if switch_cells == Self::TABLE_SWITCH_CELLS => {
                f.write_str("double-linear")
            }
            Self::DoubleLinear { switch_cells } => write!(f, "double-linear:{switch_cells}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in [
            "sparse",
            "dense",
            "sparse:head-major",
            "sparse:interleaved=4",
            "dense:interleaved=36",
            "grow:mlx",
            "grow:double-linear",
            "grow:double-linear:4096",
            "paged",
            "paged:32",
        ] {
            let policy: KvPolicy = name.parse().unwrap();
            assert_eq!(policy.to_string(), name);
        }
        assert_eq!("sparse".parse(), Ok(KvPolicy::default()));
    }

    #[test]
    fn names_that_are_none_are_refused_with_those_that_are() {
        for name in [
            "",
            "Sparse",
            "sparse:",
            "sparse:interleaved=0",
            "sparse:interleaved",
            "dense:4",
            "grow",
            "grow:doubling",
            "grow:double-linear:",
            "paged:0",
            "paged:many",
        ] {
            let error = name.parse::<KvPolicy>().unwrap_err();
            assert_eq!(error, UnknownPolicy(name.to_owned()));
            // All of them: most used to be left out.
            for policy in [
                "sparse",
                "dense",
                ":head-major",
                ":interleaved=LAYERS",
                "paged:TOKENS",
                "grow:mlx",
                "grow:double-linear:CELLS",
            ] {
                assert!(error.to_string().contains(policy), "{error}");
            }
        }
    }
}
