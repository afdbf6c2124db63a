//! Mixtures of experts as data: how a layer's router chooses, and what experts compute.

use lacuna_kernels::{Groups, Routing};

use super::Gated;
use crate::error::ConfigError;
use crate::spec::Activation;
use crate::spec::validate::{in_range, limit, positive};

/// A feed-forward block of many, of which a router chooses a few for each token: the sum of what the chosen
/// ones make of it, each times its weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// How experts are chosen and weighed.
    pub routing: Routing,
    /// What the router's numbers are.
    pub router: Router,
    /// Inner width of an expert, in elements.
    pub inner: usize,
    /// What each computes.
    pub block: ExpertBlock,
    /// Elements of what the chosen ones read and make, where that is not as wide as the residual stream: a
    /// matrix for all of them makes it of a token, and another the result of their sum.
    pub latent: Option<usize>,
    /// Whether products with experts' matrices must come with biases. They may anyway.
    pub biases: bool,
    /// A block that computes every token, beside the chosen ones.
    pub shared: Option<SharedExpert>,
    /// A dense block beside all of that, with norms of its own.
    pub dense: Option<Gated>,
}

/// What a router has besides its matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Router {
    /// Whether logits must come with a bias. They may anyway.
    pub bias: bool,
    /// Whether there is a number for each expert that its score is compared with, and not weighed by.
    pub selection_bias: bool,
    /// Whether there is a number for each expert that its weights are multiplied by.
    pub expert_scales: bool,
    /// Whether it reads the residual stream, normed without weights, multiplied by a vector of its own
    /// and divided by the root of the width, instead of what experts read.
    pub own_input: bool,
}

/// What an expert, and the block that all tokens have, computes of a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertBlock {
    /// `W_down g(W_gate x, W_up x)`
    Gated(Gating),
    /// `W_down f(W_up x)`
    Plain(Activation),
}

/// What is made of gates and of what they gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gating {
    /// `f(gate) * up`
    Product(Activation),
    /// `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u` between plus and minus
    /// `limit` (gpt-oss).
    Clamped {
        /// How steep the sigmoid is.
        alpha: f32,
        /// The bound.
        limit: f32,
    },
}

/// A block that computes every token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// Inner width, in elements.
    pub inner: usize,
    /// Whether its result is multiplied by a sigmoid of a product with the token.
    pub gated: bool,
}

impl Experts {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let Routing {
            experts,
            used,
            groups,
            scale,
            ..
        } = self.routing;
        in_range("experts", experts, limit::EXPERTS)?;
        in_range("experts of a token", used, experts)?;
        in_range("feed_forward of experts", self.inner, limit::FEED_FORWARD)?;
        positive("scale of experts' weights", f64::from(scale))?;
        if let Some(groups) = groups {
            validate_groups(groups, experts, used)?;
        }
        if let Some(shared) = self.shared {
            in_range(
                "feed_forward of shared experts",
                shared.inner,
                limit::FEED_FORWARD,
            )?;
        }
        if let Some(dense) = &self.dense {
            dense.validate()?;
        }
        if let Some(latent) = self.latent {
            in_range("width of what experts read", latent, limit::HIDDEN)?;
        }
        if let ExpertBlock::Gated(Gating::Clamped { alpha, limit }) = self.block {
            positive("steepness of gates", f64::from(alpha))?;
            positive("limit of gates", f64::from(limit))?;
        }
        Ok(())
    }
}

fn validate_groups(groups: Groups, experts: usize, used: usize) -> Result<(), ConfigError> {
    in_range("groups of experts", groups.count, Groups::MOST)?;
    in_range("groups of a token", groups.used, groups.count)?;
    if !experts.is_multiple_of(groups.count) {
        return Err(ConfigError::ExpertGroups {
            experts,
            groups: groups.count,
        });
    }
    in_range(
        "experts of a token",
        used,
        groups.used * (experts / groups.count),
    )
}
