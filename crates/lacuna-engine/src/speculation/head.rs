//! The head that a model's files carry for guessing: what it takes, and how it is set up.

use std::sync::Arc;

use lacuna_kernels::Cpu;
use lacuna_kv::KvCache;
use lacuna_models::plan::{ArenaPlan, DraftMemory, PlanError};
use lacuna_models::{BatchLimits, Model, ModelSpec, Scratch};

use super::draft_model::{MOST_SEQUENCES, geometry, policy};
use super::runner::Runner;
use super::{Drafter, Features};
use crate::engine::EngineConfig;
use crate::error::EngineError;

/// The arena of the head of a model of `spec`, for an engine as `config` says.
fn arena(spec: &ModelSpec, config: &EngineConfig) -> Result<ArenaPlan, PlanError> {
    let program = lacuna_models::program::Program::new(spec);
    let head = program.head().unwrap_or(&program);
    let context_tokens = config.context_tokens.unwrap_or(spec.context_tokens);
    ArenaPlan::new(
        head,
        BatchLimits {
            // What one sequence has features of.
            tokens: Features::MOST.min(context_tokens.max(1)),
            logit_rows: config.sequences.clamp(1, MOST_SEQUENCES),
            context_tokens,
        },
    )
}

/// What the head of a model of `spec` takes beside its weights, which are the model's, and KV pages.
///
/// # Errors
/// [`EngineError`] for settings that it cannot be planned with.
pub(crate) fn memory(spec: &ModelSpec, config: &EngineConfig) -> Result<DraftMemory, EngineError> {
    Ok(DraftMemory {
        activation_bytes: arena(spec, config)?.bytes() as u64,
        ..DraftMemory::default()
    })
}

/// The head of `model` at work beside the engine whose pages `cache` has; `None` for a model without one.
///
/// # Errors
/// [`EngineError`] when the system refuses memory.
pub(crate) fn drafter(
    model: &Arc<Model>,
    most: usize,
    config: &EngineConfig,
    cache: &KvCache,
    cpu: &Arc<Cpu>,
) -> Result<Option<Drafter>, EngineError> {
    let Some(program) = model.program().head() else {
        return Ok(None);
    };
    // One that keeps no rows has no sequences of its own either.
    let of_rows = model.spec().of_head().filter(|_| !model.borrows_rows());
    let of_rows = of_rows.as_ref().unwrap_or(model.spec());
    let plan = arena(model.spec(), config)?;
    let runner = Runner {
        is_head: true,
        context_tokens: plan.limits().context_tokens,
        scratch: Scratch::new(program, plan)?,
        cache: KvCache::over(
            cache.pool().clone(),
            geometry(config, of_rows)?,
            policy(cache.policy()),
        )?,
        model: Arc::clone(model),
        cpu: Arc::clone(cpu),
    };
    let products = |program: &lacuna_models::program::Program| {
        let (each, logits) = program.products();
        (each + logits) as f64
    };
    let ratio = products(program) / products(model.program()).max(1.0);
    let vocabulary = model.spec().vocabulary;
    Ok(Some(Drafter::new(
        Box::new(runner),
        most,
        vocabulary,
        ratio,
    )))
}
