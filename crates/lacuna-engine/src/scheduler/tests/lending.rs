//! Memory of the budget that others hold for a while.

use std::sync::atomic::AtomicBool;

use super::*;
use crate::scheduler::LoanRefusal;

/// Tables, which are used as long as somebody has them.
struct Tables {
    held: Arc<AtomicBool>,
    users: Arc<()>,
    used: Instant,
}

impl Tables {
    fn new(scheduler: &Scheduler) -> Self {
        Self {
            held: Arc::new(AtomicBool::new(true)),
            users: Arc::new(()),
            used: scheduler.system.now(),
        }
    }

    fn are_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    fn in_use(&self) -> Arc<()> {
        Arc::clone(&self.users)
    }
}

/// What lets go of them, which counts as no user.
struct LetsGo {
    held: Arc<AtomicBool>,
    users: std::sync::Weak<()>,
    used: Instant,
}

impl Borrower for LetsGo {
    fn unused_since(&self) -> Option<Instant> {
        (self.users.strong_count() == 1).then_some(self.used)
    }

    fn give_back(&self) -> bool {
        let unused = self.users.strong_count() == 1;
        self.held.fetch_and(!unused, Ordering::Relaxed);
        unused
    }
}

/// Lends `groups` groups for tables that nobody uses yet.
fn lend(scheduler: &mut Scheduler, groups: u64) -> Result<Tables, LoanRefusal> {
    let tables = Tables::new(scheduler);
    let borrower = LetsGo {
        held: Arc::clone(&tables.held),
        users: Arc::downgrade(&tables.users),
        used: tables.used,
    };
    let loan = Loan {
        bytes: groups * group_bytes(scheduler),
        borrower: Box::new(borrower),
    };
    scheduler.lend(loan).map(|()| tables)
}

fn group_bytes(scheduler: &Scheduler) -> u64 {
    let grain = scheduler.prefix.grain();
    grain.bytes(grain.group_tokens().get())
}

fn group_tokens(scheduler: &Scheduler) -> u32 {
    scheduler.prefix.grain().group_tokens().get() as u32
}

/// A scheduler with a budget in which pages have `groups` groups.
fn budget_of_groups(groups: u64) -> Scheduler {
    let mut scheduler = with_groups(groups);
    scheduler.budget.budget_bytes = Some(scheduler.budget.parts.bytes());
    scheduler
        .kv_most
        .store(groups * group_bytes(&scheduler), Ordering::Relaxed);
    scheduler
}

/// What a request alone gives.
fn alone(request: Request) -> Vec<u32> {
    let mut scheduler = with_context(2048);
    let stream = enqueue(&mut scheduler, request);
    finish(&mut scheduler, 500);
    tokens(stream)
}

#[test]
fn what_is_lent_is_had_from_pages_and_comes_back_when_they_run_short() {
    let mut scheduler = budget_of_groups(20);
    let (group, before) = (group_tokens(&scheduler), scheduler.budget);
    let tables = lend(&mut scheduler, 5).expect("there is room");
    assert_eq!(scheduler.kv_limit, 15 * group_bytes(&scheduler));
    assert_eq!(
        scheduler.budget.parts.bytes(),
        before.parts.bytes(),
        "no byte more"
    );
    // A request that does not fit beside them is taken all the same: they make room.
    let request = || after(prompt(1, 17 * group), 20);
    let stream = enqueue(&mut scheduler, request());
    finish(&mut scheduler, 500);
    assert!(!tables.are_held());
    assert_eq!(scheduler.budget, before);
    assert_eq!(tokens(stream), alone(request()));
}

#[test]
fn what_is_used_stays_lent_and_a_request_that_does_not_fit_beside_it_says_so() {
    let mut scheduler = budget_of_groups(20);
    let group = group_tokens(&scheduler);
    let tables = lend(&mut scheduler, 5).expect("there is room");
    let _used = tables.in_use();
    let fits = enqueue(&mut scheduler, after(prompt(1, 10 * group), 20));
    finish(&mut scheduler, 500);
    assert_eq!(tokens(fits).len(), 20);
    let mut does_not = enqueue(&mut scheduler, after(prompt(2, 17 * group), 20));
    finish(&mut scheduler, 500);
    assert!(matches!(
        failure(&mut does_not),
        Some(Failure::OutOfMemory(_))
    ));
    assert!(tables.are_held());
}

#[test]
fn requests_but_the_first_are_computed_again_to_make_room_and_answers_stay_the_same() {
    let mut scheduler = budget_of_groups(20);
    let group = group_tokens(&scheduler);
    let request = |seed| endless(prompt(seed, 8 * group), 40);
    let streams = [1, 2].map(|seed| enqueue(&mut scheduler, request(seed)));
    while scheduler.owned_bytes() <= 16 * group_bytes(&scheduler) {
        scheduler.step();
    }
    assert_eq!(scheduler.running.len(), 2);
    let tables = lend(&mut scheduler, 6).expect("for the first there is enough");
    let _used = tables.in_use();
    assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (1, 1));
    assert!(scheduler.owned_bytes() <= 14 * group_bytes(&scheduler));
    finish(&mut scheduler, 1000);
    assert_eq!(streams.map(tokens), [1, 2].map(|seed| alone(request(seed))));
}

#[test]
fn memory_that_the_first_request_needs_is_not_lent_and_what_no_budget_has_is_told() {
    let mut scheduler = budget_of_groups(20);
    let group = group_tokens(&scheduler);
    let _stream = enqueue(&mut scheduler, endless(prompt(1, 12 * group), 40));
    scheduler.step();
    let (before, running) = (scheduler.budget, running(&scheduler));
    let refused = lend(&mut scheduler, 10).err().expect("too much");
    assert!(matches!(refused, LoanRefusal::InUse { .. }), "{refused}");
    let refused = lend(&mut scheduler, 25).err().expect("too much");
    let LoanRefusal::BudgetTooSmall { budget, .. } = refused else {
        panic!("{refused}");
    };
    assert_eq!(scheduler.budget, before, "nothing has changed");
    assert_eq!(super::running(&scheduler), running);
    scheduler.fail_all();
    let with_more_for_requests = budget;
    scheduler.config.engine.request_memory = Some(ByteLength::mebibytes(8));
    let Err(LoanRefusal::BudgetTooSmall { budget, .. }) = lend(&mut scheduler, 25) else {
        panic!("it is no larger");
    };
    assert!(budget < with_more_for_requests);
    scheduler.set_budget(budget.get() - 1);
    assert!(lend(&mut scheduler, 25).is_err());
    scheduler.set_budget(budget.get());
    lend(&mut scheduler, 25).expect("what the refusal asks for");
}

#[test]
fn the_first_request_goes_on_and_those_that_came_later_for_the_tables_fail() {
    let mut scheduler = budget_of_groups(20);
    let group = group_tokens(&scheduler);
    // To grow by more than there is beside the tables.
    let request = || endless(prompt(1, 12 * group), 7 * group as usize);
    let first = enqueue(&mut scheduler, request());
    for _ in 0..8 {
        scheduler.step();
    }
    let tables = lend(&mut scheduler, 5).expect("for now there is enough");
    let constrained = Request {
        constraint: Some(Box::new(Uses(tables.in_use()))),
        ..after(prompt(2, 4 * group), 10)
    };
    let mut later = enqueue(&mut scheduler, constrained);
    finish(&mut scheduler, 2000);
    assert_eq!(tokens(first), alone(request()));
    assert!(matches!(failure(&mut later), Some(Failure::OutOfMemory(_))));
    assert!(!tables.are_held());
}

/// Allows everything, and uses tables.
struct Uses(Arc<()>);

impl Constraint for Uses {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self(Arc::clone(&self.0)))
    }

    fn mask(&mut self, _logits: &mut [f32]) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn accept(&mut self, _token: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }
}

#[test]
fn what_nobody_has_used_for_as_long_as_prompts_are_kept_is_given_back() {
    let (mut scheduler, system) = on_a_fake_system();
    let time_to_live = Duration::from_secs(60);
    scheduler.config.prefix_cache.time_to_live = Some(time_to_live);
    let before = scheduler.budget;
    let tables = lend(&mut scheduler, 5).expect("there is room");
    assert!(scheduler.needs_tending());
    let used = tables.in_use();
    system.pass(time_to_live);
    scheduler.step();
    assert!(tables.are_held(), "it is used");
    drop(used);
    scheduler.step();
    assert!(tables.are_held(), "the system is not asked in every step");
    system.pass(TEND_INTERVAL);
    scheduler.step();
    assert!(!tables.are_held());
    assert_eq!(scheduler.budget, before);
}

#[test]
fn without_a_budget_nothing_is_taken_from_anybody() {
    let mut scheduler = scheduler();
    scheduler.budget.budget_bytes = None;
    let kv_bytes = scheduler.budget.parts.kv_bytes;
    let tables = lend(&mut scheduler, 5).expect("there is no limit");
    assert_eq!(scheduler.budget.parts.kv_bytes, kv_bytes);
    assert_eq!(
        scheduler.budget.parts.constraint_bytes,
        5 * group_bytes(&scheduler)
    );
    assert!(tables.are_held());
}
