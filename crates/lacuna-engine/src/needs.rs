//! What a model takes in a process that has others beside it: from the least with which it runs to the most that is of
//! use to it. Worked out from the directory of its tensors, before anything is loaded.

use lacuna_files::ModelFiles;
use lacuna_models::Description;
use lacuna_models::plan::{
    ArenaPlan, Parts, Plan, VocabularySize, WeightMode, WeightPlan, WeightSource,
};
use lacuna_models::program::Program;
use lacuna_pages::ByteLength;

use crate::embedder::EmbedderConfig;
use crate::engine::EngineConfig;
use crate::error::EngineError;

/// Bytes that a model takes, without those that a process takes once however many models it has: the program's own, and
/// what requests hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Without these it cannot be talked to: the rows of a conversation, with weights that are read for each pass as
    /// far as they can be.
    pub least: u64,
    /// What it runs well with: the same with weights in memory.
    pub working: u64,
    /// The most that is of use: every sequence with a full context.
    pub most: u64,
    /// Of a process that has this model alone, the part that is the program's own.
    pub program: u64,
}

/// Tokens of a conversation, as far as it decides what a model runs well with. What is longer gets memory as it comes
/// to need it, like everything else.
const CONVERSATION_TOKENS: usize = 4096;

impl Needs {
    fn new(least: &Parts, working: &Parts, most_kv: u64) -> Self {
        let program = least.program_bytes;
        let of = |parts: &Parts| parts.bytes() - program - parts.request_bytes;
        let (least, working) = (of(least), of(working).max(of(least)));
        Self {
            least,
            working,
            most: working.saturating_add(most_kv),
            program,
        }
    }
}

impl EngineConfig {
    /// What a model that writes takes, and where its weights are to be, if it may have `room` bytes at most.
    ///
    /// # Errors
    /// [`EngineError`] when a setting is out of range, or the model writes nothing.
    pub fn needs(
        &self,
        files: &ModelFiles,
        description: &Description,
        room: ByteLength,
    ) -> Result<(Needs, WeightMode), EngineError> {
        let plan = |weights, budget: Option<u64>| {
            let config = Self {
                weights,
                budget: budget.map(ByteLength::new),
                request_memory: Some(ByteLength::new(0)),
                ..self.clone()
            };
            config.plan(files, description)
        };
        // Auto is decided once: what a share that changes would make of it changes nothing any more.
        let mapped = plan(self.weights, Some(room.get()))?.residency.is_mapped();
        let weights = match (self.weights, mapped) {
            (_, true) => WeightMode::Fixed(WeightSource::Mmap),
            (WeightMode::Auto, false) => WeightMode::Fixed(WeightSource::Direct),
            (fixed, false) => fixed,
        };
        let (tight, whole) = (plan(weights, Some(0))?, plan(weights, None)?);
        let conversation = whole.kv.sequence_peak_bytes(CONVERSATION_TOKENS);
        let with_rows = |plan: &Plan| Parts {
            kv_bytes: conversation,
            ..plan.least()
        };
        let full = whole.kv.peak_bytes(whole.kv.context_tokens);
        let more = full.saturating_sub(conversation);
        // With room for the tables by which replies are held to grammars, which clients ask for at any time.
        let working = Parts {
            constraint_bytes: whole.program.constraint_bytes,
            ..with_rows(&whole)
        };
        let least = with_rows(&tight);
        Ok((Needs::new(&least, &working, more), weights))
    }

    /// The plan of a model that is not loaded.
    fn plan(&self, files: &ModelFiles, description: &Description) -> Result<Plan, EngineError> {
        let weights = WeightPlan::of_files(files, description);
        self.plan_of(files, &description.spec, weights)
    }
}

impl EmbedderConfig {
    /// What a model that pools takes. At its least, texts that are longer than a pass are refused.
    ///
    /// # Errors
    /// [`EngineError`] when a setting is out of range.
    pub fn needs(
        &self,
        files: &ModelFiles,
        description: &Description,
    ) -> Result<Needs, EngineError> {
        let spec = &description.spec;
        let engine = EngineConfig {
            threads: self.threads,
            matmul_precision: self.matmul_precision,
            ..EngineConfig::default()
        };
        let cpu = engine.cpu()?;
        let (program, limits) = (Program::new(spec), self.limits(spec));
        let arena = ArenaPlan::new(&program, limits)?;
        let least = Parts::of_encoder(
            spec,
            &WeightPlan::of_files(files, description),
            VocabularySize::of(files, spec),
            (&arena, &cpu),
            0,
        );
        let mut working = least;
        if limits.context_tokens > limits.tokens {
            let longest = limits.of_one_text(limits.context_tokens);
            working.activation_bytes += ArenaPlan::new(&program, longest)?.bytes() as u64;
        }
        Ok(Needs::new(&least, &working, 0))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use lacuna_models::{Loading, Model, describe};

    use super::*;
    use crate::scheduler::Borrower;
    use crate::service::{Service, ServiceConfig};

    struct GivesBack;

    impl Borrower for GivesBack {
        fn unused_since(&self) -> Option<Instant> {
            None
        }

        fn give_back(&self) -> bool {
            true
        }
    }

    /// A model that was loaded with a share runs, whatever the share is from the least to the most; and takes the least
    /// again while it runs.
    #[test]
    fn a_service_starts_with_every_share_that_its_model_needs() {
        let files = lacuna_models::demo();
        let description = describe(&files).expect("the demo model");
        let config = ServiceConfig {
            max_batched_tokens: 32,
            max_running: 4,
            shared_requests: Some(crate::RequestMemory::new(ByteLength::mebibytes(2))),
            engine: EngineConfig {
                threads: Some(std::num::NonZeroUsize::MIN),
                context_tokens: Some(512),
                weights: WeightMode::Fixed(WeightSource::Direct),
                ..EngineConfig::default()
            },
            ..ServiceConfig::default()
        };
        let room = ByteLength::mebibytes(1024);
        let needs = config.engine_config().needs(&files, &description, room);
        let (needs, weights) = needs.expect("needs");
        // The demo model is smaller than what reading ahead would take, so it is in memory either way.
        assert!(needs.least <= needs.working, "{needs:?}");
        assert!(needs.working < needs.most, "{needs:?}");
        for share in [
            needs.least,
            (needs.least + needs.working) / 2,
            needs.working,
            needs.most,
        ] {
            let budget = ByteLength::new(share + needs.program);
            let mut config = config.clone();
            (config.engine.weights, config.engine.budget) = (weights, Some(budget));
            let residency = config.engine_config().check(&files, &description);
            let model = Model::load_as(
                lacuna_models::demo(),
                Loading {
                    residency: residency.expect("it fits"),
                    device: None,
                    progress: &mut (),
                },
            );
            let service = Service::start(Arc::new(model.expect("a model")), config);
            let service = service.expect("it has what it needs");
            let handle = service.handle();
            if share == needs.working {
                let tables = handle.lend_for_constraints(GivesBack);
                tables.expect("what it runs well with has room for them");
            }
            let least = ByteLength::new(needs.least + needs.program).max(handle.least_budget());
            assert!(least <= budget, "{least} of {budget}: {needs:?}");
            handle.set_budget(least).expect("it runs with that");
            while !handle.keeps_to(least) {
                std::thread::yield_now();
            }
        }
    }
}
