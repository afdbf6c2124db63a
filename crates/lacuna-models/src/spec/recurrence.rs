//! Layers that keep a state as data: what tokens leave behind is of one size, however many there are.

use lacuna_kernels::{Convolution, Rule, ScanShape};

pub use lacuna_kernels::KeyHeads;

use super::validate::{in_range, limit, positive};
use crate::error::ConfigError;

/// What a layer with a state computes of its normed input.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Recurrence {
    /// A matrix for each head, corrected by each token (Qwen3-Next, Qwen3.5).
    DeltaNet(DeltaNet),
    /// A short convolution between two gates (LFM2).
    ShortConvolution(ShortConvolution),
    /// A matrix for each head, which each token adds to (Mamba-2).
    Mamba2(Mamba2),
}

/// A gated delta net: `W_out (norm(S^T q) * silu(W_z x))`, where `q`, `k` and `v` are `silu` of causal
/// convolutions of products with `x`, `q` and `k` brought to a length of 1, and each token makes of a
/// head's state `S` first `e^g S` and then `S + k (b (v - S^T k))^T`, with `b = sigmoid(W_b x)` and
/// `g = -e^A softplus(W_a x + t)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNet {
    /// Heads of keys and queries; divides `value_heads`.
    pub key_heads: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Elements of a head of keys.
    pub key_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// Tokens that the convolutions see.
    pub taps: usize,
    /// Which head of keys a head of values has.
    pub order: KeyHeads,
    /// How the file has the matrices of queries, keys, values and `W_z`.
    pub inputs: InputsIn,
    /// How it has `W_b` and `W_a`.
    pub gates: GatesIn,
}

/// How files have the matrices that a delta net's heads are made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputsIn {
    /// Queries of all heads, then keys, then values; `W_z` apart.
    Apart,
    /// Of each head of keys, its queries, keys, values and `z`.
    ByKeyHead,
}

/// How files have the matrices that a delta net's gates are made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatesIn {
    /// Each a matrix.
    Apart,
    /// Of each head of keys, first `W_b` of its heads of values, then `W_a`.
    ByKeyHead,
}

/// A gated short convolution: `W_out (c * convolution(b * u))` with `b`, `c` and `u` products with the
/// input, as wide as the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConvolution {
    /// Tokens that the convolution sees.
    pub taps: usize,
}

/// Mamba-2: `W_out norm(y * silu(W_z x))`, normed group by group, where `u`, `B` and `C` are `silu` of causal convolutions of
/// products with `x`, each token makes of a head's state `S` first `e^(-e^A d) S` and then `S + B (d u)^T`
/// with `d = softplus(W_d x + t)`, and `y = S^T C + D u`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mamba2 {
    /// Heads of `u`.
    pub heads: usize,
    /// Elements of each.
    pub head_dim: usize,
    /// Heads of `B` and `C`; divides `heads`.
    pub groups: usize,
    /// Elements of each.
    pub state_dim: usize,
    /// Tokens that the convolutions see.
    pub taps: usize,
    /// Where the norm is.
    pub norm: StateNorm,
    /// What `d` is held between.
    pub time_steps: Option<TimeStepLimits>,
    /// What products with the input are multiplied by, those for `z`, `u`, `B`, `C` and `d`.
    pub input_scales: Option<[f32; 5]>,
}

/// Where what a state makes of a token is normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateNorm {
    /// After `silu(z)` has gated it.
    AfterGate,
    /// Before that.
    BeforeGate,
    /// It is not.
    None,
}

/// The least and the largest that a time step may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeStepLimits {
    /// Not below 0.
    pub least: f32,
    /// Above 0, and not below `least`.
    pub most: f32,
}

impl TimeStepLimits {
    /// These, or `None` where they hold nothing back: no time step is below 0.
    #[must_use]
    pub fn new(least: f32, most: f32) -> Option<Self> {
        let holds = least != 0.0 || most != f32::INFINITY;
        holds.then_some(Self { least, most })
    }

    fn validate(self) -> Result<(), ConfigError> {
        let Self { least, most } = self;
        // Written so that what is no number is refused.
        match least >= 0.0 && least.is_finite() && most > 0.0 && most >= least {
            true => Ok(()),
            false => Err(ConfigError::TimeSteps { least, most }),
        }
    }
}

/// The most elements of a head of keys or values: their sums fit a state that a processor's caches hold.
const MOST_HEAD_DIM: usize = 1024;

impl DeltaNet {
    /// Elements of all heads of queries, or of keys.
    #[must_use]
    pub const fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements of all heads of values.
    #[must_use]
    pub const fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// What the kernels need to know of it.
    #[must_use]
    pub fn scan(&self) -> ScanShape {
        ScanShape {
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            order: self.order,
            rule: Rule::Delta,
            scale: 1.0 / (self.key_dim as f32).sqrt(),
        }
    }
}

impl Mamba2 {
    /// Elements of `u` and of `z`.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of `B`, or of `C`.
    #[must_use]
    pub const fn group_width(&self) -> usize {
        self.groups * self.state_dim
    }

    /// What the kernels need to know of it.
    #[must_use]
    pub fn scan(&self) -> ScanShape {
        ScanShape {
            key_heads: self.groups,
            value_heads: self.heads,
            key_dim: self.state_dim,
            value_dim: self.head_dim,
            order: KeyHeads::Grouped,
            rule: Rule::Additive,
            scale: 1.0,
        }
    }
}

impl Recurrence {
    /// What convolutions compute one after another, in channels, and how many tokens they see.
    fn convolutions(&self, hidden: usize) -> ([usize; 3], usize) {
        match self {
            Self::DeltaNet(net) => {
                let keys = net.key_width();
                ([keys, keys, net.value_width()], net.taps)
            }
            Self::ShortConvolution(short) => ([hidden, 0, 0], short.taps),
            Self::Mamba2(mamba) => {
                let group = mamba.group_width();
                ([mamba.width(), group, group], mamba.taps)
            }
        }
    }

    /// The f32 elements of what a layer keeps in a model of width `hidden`: the states of its convolutions,
    /// one after another, then that of its scan.
    #[must_use]
    pub fn state_len(&self, hidden: usize) -> usize {
        let (channels, taps) = self.convolutions(hidden);
        let convolutions = channels.map(|channels| Convolution::state_len(channels, taps));
        let scan = match self {
            Self::DeltaNet(net) => net.scan().state_len(),
            Self::ShortConvolution(_) => 0,
            Self::Mamba2(mamba) => mamba.scan().state_len(),
        };
        convolutions.iter().sum::<usize>() + scan
    }

    /// The f32 elements of a token that these states change by, as a program keeps them ([`Op::StateInputs`](crate::program::Op)): what
    /// goes through convolutions, and what gates of states are made of.
    #[must_use]
    pub fn state_inputs(&self, hidden: usize) -> usize {
        let (channels, _) = self.convolutions(hidden);
        let gates = match self {
            Self::DeltaNet(net) => 2 * net.value_heads,
            Self::ShortConvolution(_) => 0,
            Self::Mamba2(mamba) => mamba.heads,
        };
        channels.iter().sum::<usize>() + gates
    }

    /// Multiplications that its states take of a token.
    #[must_use]
    pub fn state_macs(&self, hidden: usize) -> usize {
        let (channels, taps) = self.convolutions(hidden);
        let scan = match self {
            // What the key led to, what is added, what the query reads.
            Self::DeltaNet(net) => 3 * net.value_width() * net.key_dim,
            Self::ShortConvolution(_) => 0,
            Self::Mamba2(mamba) => 2 * mamba.width() * mamba.state_dim,
        };
        channels.iter().sum::<usize>() * taps + scan
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let (key_heads, value_heads, dims, taps) = match *self {
            Self::DeltaNet(net) => (
                net.key_heads,
                net.value_heads,
                [net.key_dim, net.value_dim],
                net.taps,
            ),
            Self::ShortConvolution(short) => (1, 1, [1, 1], short.taps),
            Self::Mamba2(mamba) => (
                mamba.groups,
                mamba.heads,
                [mamba.state_dim, mamba.head_dim],
                mamba.taps,
            ),
        };
        in_range("key heads of a state", key_heads, limit::HEADS)?;
        in_range("value heads of a state", value_heads, limit::HEADS)?;
        for dim in dims {
            in_range("elements of a head of a state", dim, MOST_HEAD_DIM)?;
        }
        if !(2..=Convolution::MAX_TAPS).contains(&taps) {
            return Err(ConfigError::OutOfRange {
                field: "tokens that a convolution sees, at least 2",
                value: taps,
                limit: Convolution::MAX_TAPS,
            });
        }
        if let Self::Mamba2(mamba) = self {
            mamba.time_steps.map_or(Ok(()), TimeStepLimits::validate)?;
            for scale in mamba.input_scales.into_iter().flatten() {
                positive("scale of a state's inputs", f64::from(scale))?;
            }
        }
        if !value_heads.is_multiple_of(key_heads) {
            return Err(ConfigError::StateHeads {
                key_heads,
                value_heads,
            });
        }
        Ok(())
    }
}
