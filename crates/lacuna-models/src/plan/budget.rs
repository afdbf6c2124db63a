//! Whether a plan fits a number of bytes, and what would make it fit.

use lacuna_kernels::ElementType;
use lacuna_kv::{Geometry, KvCache, KvPolicy};

use crate::config::Config;
use crate::plan::arena::ArenaPlan;
use crate::plan::error::PlanError;
use crate::plan::kv::KvPlan;
use crate::plan::{Demand, Plan};

/// A number of bytes for weights, activations and KV cache together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget(pub u64);

/// Whether a plan stays within a budget until its contexts are full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It does.
    Fits {
        /// Bytes left over.
        spare: u64,
    },
    /// It does not.
    Exceeds {
        /// Bytes too many.
        excess: u64,
        /// Changes each of which makes it fit. None when the weights alone are too much.
        changes: Vec<Change>,
    },
}

/// A change of what is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A context of at most so many tokens.
    Context(usize),
    /// K and V of this element type.
    KvElements(ElementType),
    /// At most so many tokens in one pass.
    Batch(usize),
}

/// Tokens in one pass below which prompts become slow; not proposed below it.
const SMALLEST_BATCH: usize = 16;

impl Plan {
    /// Whether this plan of `config` stays within `budget` until its contexts are full, and if not
    /// what to change in `demand`.
    ///
    /// # Errors
    /// [`PlanError`] as [`Plan::new`].
    pub fn within(
        &self,
        budget: Budget,
        config: &Config,
        demand: &Demand,
    ) -> Result<Verdict, PlanError> {
        let full = self.full();
        let needed = full.peak_bytes();
        if let Some(spare) = budget.0.checked_sub(needed) {
            return Ok(Verdict::Fits { spare });
        }
        let search = Search {
            config,
            demand,
            policy: self.kv.policy,
            geometry: self.kv.geometry,
            room: budget.0.saturating_sub(full.weights + full.copied),
        };
        Ok(Verdict::Exceeds {
            excess: needed - budget.0,
            changes: search.changes()?,
        })
    }
}

/// Looks for demands whose activations and KV cache fit in `room` bytes.
struct Search<'a> {
    config: &'a Config,
    demand: &'a Demand,
    policy: KvPolicy,
    geometry: Geometry,
    room: u64,
}

impl Search<'_> {
    fn changes(&self) -> Result<Vec<Change>, PlanError> {
        let changes = [self.context()?, self.element()?, self.batch()?];
        Ok(changes.into_iter().flatten().collect())
    }

    /// Whether `demand` fits until its contexts are full.
    fn fits(&self, cache: &KvCache, demand: &Demand) -> Result<bool, PlanError> {
        let arena = ArenaPlan::new(self.config, demand.limits()?)?;
        let kv = KvPlan::new(cache, demand)?;
        let peak = kv.peak_bytes(demand.context_tokens);
        Ok(arena.bytes() as u64 + peak <= self.room)
    }

    fn cache(&self, geometry: Geometry) -> Result<KvCache, PlanError> {
        Ok(KvCache::new(geometry, self.policy)?)
    }

    /// The longest context that fits, all else being equal.
    fn context(&self) -> Result<Option<Change>, PlanError> {
        let cache = self.cache(self.geometry)?;
        let (mut fits, mut too_long) = (0, self.demand.context_tokens);
        while too_long - fits > 1 {
            let context_tokens = fits + (too_long - fits) / 2;
            let shorter = Demand {
                context_tokens,
                ..*self.demand
            };
            if self.fits(&cache, &shorter)? {
                fits = context_tokens;
            } else {
                too_long = context_tokens;
            }
        }
        Ok((fits > 0).then_some(Change::Context(fits)))
    }

    /// The cache with both sides of `element`, if it can be stored so and that makes it smaller.
    fn smaller(&self, element: ElementType) -> Option<Geometry> {
        element.check_head_dim(self.geometry.head_dim).ok()?;
        let geometry = Geometry {
            key_element: element,
            value_element: element,
            ..self.geometry
        };
        (geometry.bytes_per_token() < self.geometry.bytes_per_token()).then_some(geometry)
    }

    fn element(&self) -> Result<Option<Change>, PlanError> {
        for element in ElementType::ALL {
            let Some(geometry) = self.smaller(element) else {
                continue;
            };
            if self.fits(&self.cache(geometry)?, self.demand)? {
                return Ok(Some(Change::KvElements(element)));
            }
        }
        Ok(None)
    }

    fn batch(&self) -> Result<Option<Change>, PlanError> {
        let cache = self.cache(self.geometry)?;
        let mut batch_tokens = self.demand.limits()?.tokens;
        while batch_tokens > SMALLEST_BATCH {
            batch_tokens = (batch_tokens / 2).max(SMALLEST_BATCH);
            let smaller = Demand {
                batch_tokens,
                ..*self.demand
            };
            if self.fits(&cache, &smaller)? {
                return Ok(Some(Change::Batch(batch_tokens)));
            }
        }
        Ok(None)
    }
}
