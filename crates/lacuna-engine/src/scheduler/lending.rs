//! Memory of the budget that others hold for a while: the tables by which replies are held to grammars. It is had from KV
//! pages and weights, as if the budget were smaller, and taken back when nobody uses the tables and pages run short.

use std::time::Instant;

use lacuna_models::plan::{mebibytes_that_hold, request_bytes, request_bytes_beside};
use lacuna_pages::ByteLength;

use super::{End, Scheduler};
use crate::arbiter::kv_share;
use crate::stream::Failure;

/// Who holds memory of a service's budget. Asked by the service's thread, between two steps.
pub trait Borrower: Send {
    /// Since when nobody has used what is in the memory; `None` while somebody does.
    fn unused_since(&self) -> Option<Instant>;

    /// Lets go of the memory, unless somebody uses what is in it. Returns whether it is free. Does not wait.
    fn give_back(&self) -> bool;
}

/// Why memory was not lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoanRefusal {
    /// It does not fit the budget beside what the first token needs.
    #[error(
        "replies can be held to a schema or a grammar with a memory budget of {} or more: that takes tables of {needed}",
        mebibytes_that_hold(budget.get())
    )]
    BudgetTooSmall {
        /// Bytes asked for.
        needed: ByteLength,
        /// The least budget that has room for them.
        budget: ByteLength,
    },
    /// Requests need it at the moment.
    #[error(
        "the tables by which replies are held to a schema or a grammar take {needed}, which the requests under way need; try again in a moment"
    )]
    InUse {
        /// Bytes asked for.
        needed: ByteLength,
    },
    /// There is nobody left who lends.
    #[error("the service has ended; start another")]
    ServiceEnded,
}

/// Memory that somebody holds.
pub(crate) struct Loan {
    pub(crate) bytes: u64,
    pub(crate) borrower: Box<dyn Borrower>,
}

impl Scheduler {
    /// Makes the memory of `loan` the borrower's. KV pages and weights have as much less, and requests that run are computed
    /// again later where that is not enough, but for the first.
    pub(crate) fn lend(&mut self, loan: Loan) -> Result<(), LoanRefusal> {
        if let Some(budget) = self.budget.budget_bytes {
            let kept = self.budget.parts.besides_kv() - self.engine.weights_to_spare();
            let room = budget.saturating_sub(kept);
            let room = room.saturating_sub(self.memory.beyond_plan);
            let cache = self.engine.kv_cache();
            let first_token = cache.sequence_peak_bytes(self.engine.context_tokens(), 1);
            let needed = ByteLength::new(loan.bytes);
            if loan.bytes + first_token > room {
                let lacking = loan.bytes + first_token - room;
                return Err(LoanRefusal::BudgetTooSmall {
                    needed,
                    budget: ByteLength::new(self.budget_with(lacking)),
                });
            }
            if loan.bytes + self.first_needs() > room {
                return Err(LoanRefusal::InUse { needed });
            }
        }
        self.budget.parts.constraint_bytes += loan.bytes;
        if let Some(budget) = self.budget.budget_bytes {
            self.divide(budget);
        }
        // Not before: what makes room must not take it back.
        self.loans.push(loan);
        self.tell_most();
        Ok(())
    }

    /// The least budget that has `more` bytes more beside what there is, when a service is set up with it: requests have their
    /// share of a larger one.
    fn budget_with(&self, more: u64) -> u64 {
        let budget = self.budget.budget_bytes.unwrap_or(u64::MAX);
        let requests = match (
            &self.config.shared_requests,
            self.config.engine.request_memory,
        ) {
            (None, None) => request_bytes(Some(budget)),
            _ => 0,
        };
        let requests = requests.min(self.budget.parts.request_bytes);
        let others = budget.saturating_sub(requests).saturating_add(more);
        match requests {
            0 => others,
            _ => others.saturating_add(request_bytes_beside(others)),
        }
    }

    /// Bytes that are lent.
    pub(crate) fn lent_bytes(&self) -> u64 {
        self.loans.iter().map(|loan| loan.bytes).sum()
    }

    /// Takes back what nobody uses. Returns whether there was any.
    pub(super) fn take_back(&mut self) -> bool {
        self.take_back_if(|borrower| borrower.give_back())
    }

    /// Takes back what nobody has used since `then`.
    pub(super) fn take_back_unused_since(&mut self, then: Instant) {
        self.take_back_if(|borrower| {
            let since = borrower.unused_since();
            since.is_some_and(|since| since <= then) && borrower.give_back()
        });
    }

    fn take_back_if(&mut self, gives_back: impl Fn(&dyn Borrower) -> bool) -> bool {
        let before = self.lent_bytes();
        self.loans.retain(|loan| !gives_back(&*loan.borrower));
        let freed = before - self.lent_bytes();
        if freed == 0 {
            return false;
        }
        self.budget.parts.constraint_bytes -= freed;
        if let Some(budget) = self.budget.budget_bytes {
            let room = self.room(budget);
            let kv_bytes = room.saturating_sub(self.budget.parts.read_weight_bytes);
            self.budget = self.budget.with_kv(kv_bytes);
        }
        // In the middle of a step nothing but the limit may change.
        let share = kv_share(&self.budget, self.memory);
        let limit = self.kv_limit.saturating_add(freed).min(share);
        let limit = limit.max(self.kv_limit);
        self.arbiter().set_limit(limit);
        true
    }

    /// Fails the requests that wait and are to use what is lent, so that the first of those that run goes on: it was there
    /// before them. Returns whether anything was had.
    pub(super) fn take_back_from_waiting(&mut self) -> bool {
        if self.loans.is_empty() {
            return false;
        }
        for index in (0..self.waiting.len()).rev() {
            let constrained = self.waiting[index]
                .choices
                .iter()
                .any(|choice| choice.is_constrained());
            if constrained && let Some(mut waiting) = self.waiting.remove(index) {
                self.discard(&mut waiting);
                let why = "the tables by which the reply was to be held to a schema or a grammar took memory that the \
                           requests before it needed"
                    .to_owned();
                self.count_end(&waiting.job, End::Failed(Failure::OutOfMemory(why)));
            }
        }
        self.take_back()
    }
}
