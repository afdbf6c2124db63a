//! How long a model is asked to think.

use std::str::FromStr;

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use super::Format;

/// How long a model is to think before it answers, in the words that other servers take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// Not at all, if that can be.
    None,
    /// Hardly.
    Minimal,
    /// Less than usual.
    Low,
    /// As usual.
    Medium,
    /// More than usual.
    High,
    /// Much more.
    Xhigh,
    /// As long as it likes.
    Max,
}

/// A word that is none for an effort.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected none, minimal, low, medium, high, xhigh or max")]
pub struct UnknownEffort;

impl Effort {
    const ALL: [Self; 7] = [
        Self::None,
        Self::Minimal,
        Self::Low,
        Self::Medium,
        Self::High,
        Self::Xhigh,
        Self::Max,
    ];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Xhigh => "xhigh",
            Self::Max => "max",
        }
    }

    /// The variables of a chat template that ask for it.
    ///
    /// gpt-oss knows three levels, gets the nearest, and cannot be kept from thinking. `none` also says
    /// what turns thoughts off in the templates that have a switch.
    pub fn variables(self, format: Option<Format>) -> impl Iterator<Item = (String, Value)> {
        let level = match format {
            Some(Format::Harmony) => self.clamp(Self::Low, Self::High),
            _ => self,
        };
        let switches: &[&str] = match self {
            Self::None => &["enable_thinking", "thinking"],
            _ => &[],
        };
        let level = ("reasoning_effort".to_owned(), level.name().into());
        let off = |name: &&str| ((*name).to_owned(), false.into());
        std::iter::once(level).chain(switches.iter().map(off))
    }
}

impl FromStr for Effort {
    type Err = UnknownEffort;

    fn from_str(word: &str) -> Result<Self, UnknownEffort> {
        let mut all = Self::ALL.into_iter();
        all.find(|effort| effort.name() == word)
            .ok_or(UnknownEffort)
    }
}
