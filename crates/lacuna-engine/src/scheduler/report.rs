//! The scheduler's figures.

use lacuna_kv::prefix::{Pins, Tree};
use lacuna_kv::swap::Swap;
use lacuna_pages::ByteLength;

use super::{Running, Scheduler, Session};
use crate::status::{
    BudgetStatus, CacheStatus, GroupRun, GroupState, PageSizes, Phase, SessionStatus, Status,
};

impl Scheduler {
    /// Figures as of now; the queue and what only the service counts are left out.
    pub(crate) fn status(&self) -> Status {
        let running = self.running.iter();
        let mut status = Status {
            ledger: self.engine.kv_cache().ledger(),
            budget: self.budget_status(),
            device: self.engine.device(),
            pages: self.page_sizes(),
            sessions: running
                .flat_map(|running| {
                    running
                        .sessions
                        .iter()
                        .map(|session| self.session(running, session))
                })
                .collect(),
            cache: CacheStatus {
                groups: self.prefix.tree().len(),
                unused_groups: self.prefix.tree().unused(),
                pinned_groups: self.prefix.tree().pinned(self.system.now()),
                resume_points: self.prefix.tree().resume_points(),
            },
            folder: self.prefix.folder_status(),
            swap: self.swap.as_ref().map(Swap::status),
            aside: self.prefix.aside_status(),
            swapped: self.away().count(),
            row_reads: self.engine.row_reads(),
            ..Status::default()
        };
        self.totals(&mut status);
        status
    }

    /// Copies the cheap counters.
    pub(crate) fn totals(&self, status: &mut Status) {
        status.running = self.running.len();
        status.counters = self.counters;
        status.experts = self.engine.experts();
        status.neurons = self.engine.neurons();
        status.latencies.clone_from(&self.latencies);
    }

    fn budget_status(&self) -> BudgetStatus {
        let context = self.prefix.grain().bytes(self.engine.context_tokens());
        let sessions: usize = self
            .running
            .iter()
            .map(|running| running.sessions.len())
            .sum();
        BudgetStatus {
            plan: self.budget,
            beyond_plan: ByteLength::new(self.memory.beyond_plan),
            kv_now: ByteLength::new(self.kv_limit),
            dense: ByteLength::new(context.saturating_mul(sessions as u64)),
            weights: self.engine.weight_memory(),
        }
    }

    fn page_sizes(&self) -> PageSizes {
        let (cache, grain) = (self.engine.kv_cache(), self.prefix.grain());
        let group_tokens = grain.group_tokens().get();
        PageSizes {
            page: ByteLength::new(cache.page_bytes() as u64),
            group: ByteLength::new(grain.group_bytes()),
            group_tokens,
            token: ByteLength::new(cache.geometry().bytes_per_token() as u64),
            kept_token: ByteLength::new(cache.geometry().kept_bytes_per_token() as u64),
            windows: ByteLength::new(cache.geometry().window_bytes() as u64),
            states: ByteLength::new(cache.geometry().state_bytes() as u64),
            resume_point: ByteLength::new(grain.resume_bytes()),
            buffers: grain.buffers() + usize::from(grain.has_states()),
        }
    }

    fn session(&self, running: &Running, session: &Session) -> SessionStatus {
        let (geometry, report) = (self.engine.kv_cache().geometry(), session.sequence.report());
        SessionStatus {
            request: running.job.id,
            choice: session.choice.number,
            phase: match session.pending() {
                _ if running.job.stalled.is_some() => Phase::Stalled,
                1 if session.choice.generated > 0 => Phase::Decode,
                _ => Phase::Prefill,
            },
            cached_tokens: session.sequence.len(),
            tokens: session.choice.tokens.len(),
            prompt_tokens: running.job.prompt_tokens,
            reused_tokens: running.job.reused_tokens.unwrap_or(0),
            differs_at: running.job.differs_at,
            rows: ByteLength::new(geometry.useful_bytes(session.sequence.len()) as u64),
            states: ByteLength::new(report.state_bytes as u64),
            slack: ByteLength::new(report.slack_bytes as u64),
            groups: group_runs(self.prefix.tree(), session),
        }
    }
}

/// A session's groups, runs of the same state together.
fn group_runs(tree: &Tree<Pins>, session: &Session) -> Vec<GroupRun> {
    let kept = session.path.groups();
    let states = kept.iter().map(|&id| match tree.get(id) {
        Some((_, users)) if users > 1 => GroupState::Shared,
        _ => GroupState::Cached,
    });
    let whole = session.sequence.len() / tree.group_tokens();
    let unique = std::iter::repeat_n(GroupState::Unique, whole.saturating_sub(kept.len()));
    let partial = (!session.sequence.len().is_multiple_of(tree.group_tokens()))
        .then_some(GroupState::Partial);
    let mut runs: Vec<GroupRun> = Vec::new();
    for state in states.chain(unique).chain(partial) {
        match runs.last_mut() {
            Some(run) if run.state == state => run.groups += 1,
            _ => runs.push(GroupRun { state, groups: 1 }),
        }
    }
    runs
}
