//! Latent attention as data (DeepSeek V2 and later).

use lacuna_kernels::AttentionShape;

use super::validate::{in_range, limit};
use super::{Attention, Gate, Norm, NormKind, Rope, Values};
use crate::error::ConfigError;

/// Keys and values of all heads are products with one row of a token, its latent row, and only that row
/// is kept for later tokens: `rank` elements, and behind them those that positions turn, which all heads
/// have in common.
///
/// Attention runs over latent rows themselves. What would make keys of them is multiplied with queries
/// instead, and what would make values with the sums (the absorbed form):
///
/// ```text
/// query . (K_h c)             =  (K_h^T query) . c
/// sum over rows of p (V_h c)  =  V_h (sum over rows of p c)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Elements of a latent row, without those that positions turn.
    pub rank: usize,
    /// Elements of a head's keys, without those that positions turn.
    pub key_dim: usize,
    /// Elements of a head's values.
    pub value_dim: usize,
    /// Elements between the two matrices that make queries; `None`: one matrix makes them.
    pub query_rank: Option<usize>,
}

impl Latent {
    /// How latent rows and what queries are made of are normed: whatever the file says of other norms, as
    /// `modeling_deepseek_v3.py` of Hugging Face transformers does it.
    pub const NORM: Norm = Norm {
        kind: NormKind::Rms,
        epsilon: 1e-6,
    };

    /// Checks the numbers that only latent attention has against those of `attention` around it.
    pub(super) fn validate(
        &self,
        attention: &Attention,
        ropes: &[Rope],
    ) -> Result<(), ConfigError> {
        let most = AttentionShape::MAX_HEAD_DIM;
        in_range("rank of latent rows", self.rank, most)?;
        in_range("elements of a head's keys", self.key_dim, most)?;
        in_range("elements of a head's values", self.value_dim, most)?;
        if let Some(rank) = self.query_rank {
            in_range("rank of queries", rank, limit::HIDDEN)?;
        }
        let turned = attention.rope.and_then(|rope| ropes.get(rope));
        let turned = turned.map_or(0, |rope| rope.dimensions);
        if turned == 0 || attention.head_dim != self.rank + turned || attention.kv_heads != 1 {
            return Err(ConfigError::LatentRows {
                kv_heads: attention.kv_heads,
                head_dim: attention.head_dim,
                rank: self.rank,
                turned,
            });
        }
        let Attention {
            qk_norm: None,
            value_norm: false,
            values: Values::Projected,
            temperature: None,
            shares: None,
            sinks: false,
            gate: Gate::None,
            ..
        } = attention
        else {
            return Err(ConfigError::Unsupported {
                feature: "latent attention with norms of heads, shared rows, sinks or gates"
                    .to_owned(),
                supported: "without those it is",
            });
        };
        Ok(())
    }
}

impl Attention {
    /// Elements of one head of V, as attention reads it.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        match self.latent {
            Some(latent) => latent.rank,
            None => self.head_dim,
        }
    }
}
