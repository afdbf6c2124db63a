//! Weights that are part of the budget: requests start on memory that weights have, weights get it back, and another
//! budget is kept to at once. No answer changes.

use lacuna_models::Loading;
use lacuna_models::plan::{Residency, WeightPlan, WeightSource};

use super::swap_file::assume_slow_prompts;
use super::*;
use crate::arbiter::{RESTORED_AT_ONCE, SPARE_PATIENCE};
use crate::scheduler::simulation::swap::{Disk, over};
use crate::scheduler::swapping::Urgency;

/// How the schedulers of these tests are set up, but for weights.
fn config() -> ServiceConfig {
    ServiceConfig {
        engine: EngineConfig {
            context_tokens: Some(2048),
            batch_tokens: 64,
            sequences: 4,
            request_memory: Some(ByteLength::mebibytes(2)),
            ..EngineConfig::default()
        },
        ..ServiceConfig::default()
    }
}

/// A scheduler whose budget holds all weights and an eighth of that in KV pages, and the least it could have.
pub(super) fn reading() -> (Scheduler, FakeSystem, u64) {
    let mut config = config();
    let mapped = Engine::new(demo_model(), &config.engine).expect("this machine runs it");
    let files = demo_model().files().clone();
    let description = lacuna_models::describe(&files).expect("a model");
    let weights = WeightPlan::of(files.tensors(), &description);
    let all = Residency::plan(&weights, WeightSource::Direct, None).memory_bytes();
    let others = mapped.budget().parts.besides_kv();
    config.engine.budget = Some(ByteLength::new(others + all + all / 8));
    let loading = Loading {
        residency: (config.engine.check(&files, &description)).expect("it fits"),
        device: None,
        progress: &mut (),
    };
    let model = Arc::new(Model::load_as(files, loading).expect("it loads"));
    let engine = Engine::new(model, &config.engine).expect("this machine runs it");
    let least = engine.plan().least_while_running().bytes();
    let mut scheduler = Scheduler::new(engine, config).expect("room for it");
    let system = FakeSystem::new();
    scheduler.system = Box::new(system.clone());
    assert_eq!(streamed(&scheduler), 0, "all weights are in memory");
    (scheduler, system, least)
}

/// Bytes of weights that each pass reads.
fn streamed(scheduler: &Scheduler) -> u64 {
    scheduler.engine.weight_memory().streamed.get()
}

/// Bytes of all parts, which are the budget.
fn whole(scheduler: &Scheduler) -> u64 {
    let Budget {
        budget_bytes,
        parts,
        ..
    } = scheduler.budget;
    assert_eq!(budget_bytes, Some(parts.bytes()));
    let memory = scheduler.engine.weight_memory();
    let weights = [memory.pinned, memory.ring, memory.rows, memory.experts].map(ByteLength::get);
    assert_eq!(weights.iter().sum::<u64>(), parts.read_weight_bytes);
    parts.bytes()
}

/// What requests give alone where weights are mapped.
fn expected(requests: impl IntoIterator<Item = Request>) -> Vec<Vec<u32>> {
    let alone = |request| {
        let mut scheduler = with_context(2048);
        let stream = enqueue(&mut scheduler, request);
        finish(&mut scheduler, 500);
        tokens(stream)
    };
    requests.into_iter().map(alone).collect()
}

/// Lets so much time pass and the scheduler look around.
fn wait(scheduler: &mut Scheduler, system: &FakeSystem, time: Duration) {
    system.pass(time);
    scheduler.step();
}

/// A request that takes about `part` of what KV pages have to begin with.
fn taking(scheduler: &Scheduler, seed: u32, part: f64) -> Request {
    let grain = scheduler.prefix.grain();
    let group = grain.group_tokens().get();
    let groups = scheduler.kv_limit as f64 * part / grain.bytes(group) as f64;
    let length = (groups * group as f64) as u32;
    endless(prompt(seed, length.saturating_sub(30).max(2)), 30)
}

#[test]
fn a_request_starts_on_memory_that_weights_can_do_without() {
    let (mut scheduler, ..) = reading();
    scheduler.config.prefix_cache.enabled = false;
    let both = |scheduler: &Scheduler| [0, 1].map(|seed| taking(scheduler, seed, 0.8));
    let expected = expected(both(&scheduler));
    let before = whole(&scheduler);
    let streams = both(&scheduler).map(|request| enqueue(&mut scheduler, request));
    scheduler.step();
    assert_eq!(scheduler.running.len(), 2, "neither waits for the other");
    finish(&mut scheduler, 500);
    assert!(streamed(&scheduler) > 0, "weights gave way");
    assert_eq!(scheduler.counters.preemptions, 0);
    assert_eq!(whole(&scheduler), before);
    assert_eq!(streams.map(tokens).to_vec(), expected);
}

#[test]
fn weights_get_back_what_pages_have_not_needed_for_a_while() {
    let (mut scheduler, system, _) = reading();
    scheduler.config.prefix_cache.enabled = false;
    let before = whole(&scheduler);
    let request = || taking(&reading().0, 3, 2.0);
    let expected = expected([request()]).remove(0);
    for _ in 0..2 {
        let stream = enqueue(&mut scheduler, request());
        let mut most = 0;
        while !scheduler.is_idle() {
            wait(&mut scheduler, &system, SPARE_PATIENCE / 2);
            assert!(
                streamed(&scheduler) >= most,
                "what is needed is not given back"
            );
            most = streamed(&scheduler);
        }
        assert!(most > 0, "weights gave way");
        assert_eq!(tokens(stream), expected);
        assert!(scheduler.needs_tending());
        wait(&mut scheduler, &system, TEND_INTERVAL);
        wait(&mut scheduler, &system, TEND_INTERVAL);
        assert_eq!(streamed(&scheduler), most, "not at once");
        wait(&mut scheduler, &system, SPARE_PATIENCE);
        assert_eq!(streamed(&scheduler), 0);
        assert!(scheduler.needs_tending(), "the system may want some");
        assert_eq!(whole(&scheduler), before);
        assert_eq!(scheduler.kv_limit, scheduler.budget.parts.kv_bytes);
    }
}

#[test]
fn a_lower_budget_takes_cached_groups_first_then_weights_then_requests_and_a_higher_one_gives_back()
{
    let (mut scheduler, system, least) = reading();
    let before = whole(&scheduler);
    let requests = |scheduler: &Scheduler| [4, 5].map(|seed| taking(scheduler, seed, 0.35));
    let again = requests(&scheduler);
    let expected = expected(requests(&scheduler));
    let streams = requests(&scheduler).map(|request| enqueue(&mut scheduler, request));
    finish(&mut scheduler, 500);
    assert_eq!(streams.map(tokens).to_vec(), expected);
    let cached = scheduler.owned_bytes();
    assert!(cached > 0 && scheduler.prefix.tree().unused() > 1);

    let unused = scheduler.budget.parts.kv_bytes - cached;
    scheduler.set_budget(before - unused);
    assert_eq!(scheduler.owned_bytes(), cached, "all of them fit");
    assert_eq!(streamed(&scheduler), 0, "and all weights");
    scheduler.set_budget(before - unused - cached / 2);
    assert!(scheduler.owned_bytes() <= cached / 2, "groups are evicted");
    assert_eq!(whole(&scheduler), before - unused - cached / 2);

    let streams = again.map(|request| enqueue(&mut scheduler, request));
    scheduler.step();
    scheduler.set_budget(least);
    assert_eq!(whole(&scheduler), least);
    assert!(streamed(&scheduler) > 0, "weights gave way");
    let committed = scheduler.engine.kv_cache().ledger().committed.get();
    assert!(committed <= scheduler.budget.parts.kv_bytes, "at once");
    scheduler.set_budget(before);
    assert_eq!(whole(&scheduler), before);
    finish(&mut scheduler, 500);
    assert_eq!(streams.map(tokens).to_vec(), expected);

    while scheduler.prefix.evict(system.now()) {}
    for _ in 0..2 {
        wait(&mut scheduler, &system, SPARE_PATIENCE);
    }
    assert_eq!(streamed(&scheduler), 0);
    assert_eq!(whole(&scheduler), before);
}

#[test]
fn what_could_never_run_under_another_budget_is_refused_from_then_on() {
    let (mut scheduler, _, least) = reading();
    let limits = scheduler.request_limits();
    let request = taking(&scheduler, 6, 0.8);
    assert!(limits.check(&request).is_ok());
    scheduler.set_budget(least);
    let refused = limits.check(&request);
    assert!(
        matches!(refused, Err(crate::request::Refusal::TooLarge { .. })),
        "{refused:?}"
    );
    let small = after(prompt(1, 2), 1);
    assert!(
        limits.check(&small).is_ok(),
        "the least is enough for a token"
    );
    let stream = enqueue(&mut scheduler, small);
    finish(&mut scheduler, 20);
    assert_eq!(tokens(stream).len(), 1);
}

/// Weights get nothing while a request waits, and no more than the system has.
#[test]
fn weights_get_nothing_back_while_somebody_waits_and_what_the_system_has_at_other_times() {
    let (mut scheduler, ..) = reading();
    scheduler.config.prefix_cache.enabled = false;
    assert_eq!(scheduler.restorable(), 0, "all weights are in memory");
    let request = taking(&scheduler, 3, 2.0);
    let stream = enqueue(&mut scheduler, request);
    while streamed(&scheduler) == 0 {
        scheduler.step();
    }
    let share = kv_share(&scheduler.budget, scheduler.memory);
    let (owned, promised) = (scheduler.owned_bytes(), scheduler.promised_bytes());
    assert!(promised > 0);
    assert!(owned + promised + (owned + promised) / 4 > share - share / 8);
    assert_eq!(scheduler.restorable(), 0, "what was promised is kept, too");
    finish(&mut scheduler, 500);
    drop(stream);

    let budget = scheduler.budget.budget_bytes.expect("a budget");
    let begin = scheduler.engine.kv_to_begin_with(budget);
    let share = kv_share(&scheduler.budget, scheduler.memory);
    assert_eq!(scheduler.kv_limit, share);
    let spare = (share - begin).min(RESTORED_AT_ONCE);
    assert!(spare >= share / 8);
    assert_eq!(scheduler.restorable(), spare);
    scheduler.kv_limit = begin + begin / 2;
    assert_eq!(scheduler.restorable(), begin / 2);
    scheduler.kv_limit = begin;
    assert_eq!(scheduler.restorable(), 0);
    scheduler.kv_limit = share;
    let stream = enqueue(&mut scheduler, endless(prompt(1, 2), 5));
    assert_eq!(scheduler.restorable(), 0);
    scheduler.step();
    assert!(scheduler.owned_bytes() > 0 && scheduler.promised_bytes() > 0);
    assert!(
        scheduler.restorable() > spare / 2,
        "what runs takes no more than it has and was promised"
    );
    finish(&mut scheduler, 20);
    drop(stream);
    assert_eq!(scheduler.restorable(), spare);
}

/// What is read ahead of the next step are the tokens after those of this one, of sessions that are in it.
#[test]
fn tokens_of_prompts_are_expected_behind_those_of_the_step() {
    let mut scheduler = scheduler();
    let streams = [
        submit(&mut scheduler, 100..300, 4),
        submit(&mut scheduler, 400..420, 4),
    ];
    scheduler.step();
    let sessions = |scheduler: &Scheduler| -> Vec<(usize, usize)> {
        let sessions = scheduler
            .running
            .iter()
            .flat_map(|running| &running.sessions);
        sessions
            .map(|session| (session.sequence.len(), session.choice.tokens.len()))
            .collect()
    };
    scheduler.schedule();
    let (long, short) = (sessions(&scheduler)[0], sessions(&scheduler)[1]);
    assert!(long.0 > 0 && long.0 + 64 < long.1 && short.0 <= short.1);
    let scheduled = scheduler.running[0].sessions[0].scheduled;
    assert!(scheduled > 0);
    let first = 100 + (long.0 + scheduled) as u32;
    let expected = scheduler.expected();
    let behind: Vec<u32> = (first..300).take(MOST_EXPECTED).collect();
    assert_eq!(expected[..behind.len().min(expected.len())], behind[..]);
    // A session that is not in the step is not in the next one either, as far as anybody knows.
    scheduler.running[0].sessions[0].scheduled = 0;
    assert!(scheduler.expected().iter().all(|token| *token >= 400));
    finish(&mut scheduler, 100);
    drop(streams);
}

/// The limit of the server's control group falls while it has nothing to do, and while it answers; and rises again.
#[test]
fn a_system_that_runs_short_gets_pinned_weights_after_idle_pages_and_before_any_request() {
    let (mut scheduler, system, _) = reading();
    scheduler.config.prefix_cache.enabled = false;
    let before = whole(&scheduler);
    let spare = scheduler.engine.weights_to_spare();
    assert!(spare > 0);
    let requests = || [4, 5].map(|seed| taking(&reading().0, seed, 0.3));
    let expected = expected(requests());
    // Nothing runs, so no page has to stay: half of what weights can do without.
    let lacks = |bytes: u64| system.set_memory(FakeSystem::RESERVE - bytes, 0.0);
    lacks(spare / 2);
    assert!(scheduler.needs_tending(), "somebody looks");
    wait(&mut scheduler, &system, TEND_INTERVAL);
    let half = streamed(&scheduler);
    assert!(half > 0, "weights gave way");
    assert_eq!(whole(&scheduler), before, "the budget is the same");

    // The system has that now, and no more.
    lacks(0);
    let streams = requests().map(|request| enqueue(&mut scheduler, request));
    let held = |scheduler: &Scheduler| {
        let pages = scheduler.engine.kv_cache().ledger().committed.get();
        pages + scheduler.budget.parts.read_weight_bytes
    };
    let most = held(&scheduler);
    while !scheduler.is_idle() {
        wait(&mut scheduler, &system, TEND_INTERVAL);
        assert!(held(&scheduler) <= most, "pages come out of weights");
        assert_eq!(whole(&scheduler), before);
    }
    assert!(streamed(&scheduler) > half);
    assert_eq!(scheduler.counters.preemptions, 0, "requests do not");
    assert_eq!(streams.map(tokens).to_vec(), expected);

    system.set_memory(1 << 40, 0.0);
    for _ in 0..3 {
        wait(&mut scheduler, &system, SPARE_PATIENCE);
    }
    assert_eq!(streamed(&scheduler), 0, "all are back");
    assert_eq!(whole(&scheduler), before);
}

#[test]
fn what_comes_back_from_the_swap_file_has_the_memory_of_weights_that_it_lacks() {
    let (mut scheduler, ..) = reading();
    scheduler.config.prefix_cache.enabled = false;
    scheduler.swap = Some(over(Disk::default(), 1000, scheduler.engine.kv_cache()));
    let requests = [0, 1].map(|seed| taking(&scheduler, seed, 0.4));
    let expected = expected([0, 1].map(|seed| taking(&scheduler, seed, 0.4)));
    let streams = requests.map(|request| enqueue(&mut scheduler, request));
    let decode = |scheduler: &Scheduler| {
        let running = scheduler.running.iter();
        let decodes = running.filter(|it| it.sessions[0].choice.generated > 0);
        decodes.count() == 2
    };
    while !decode(&scheduler) {
        scheduler.step();
    }
    assume_slow_prompts(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    let move_all = |scheduler: &mut Scheduler| {
        while scheduler.swap.as_ref().is_some_and(Swap::advance) {}
        scheduler.follow_swaps();
    };
    move_all(&mut scheduler);
    // Pages have no more than what runs, and weights the rest.
    let owned = scheduler.owned_bytes();
    scheduler.budget.parts.kv_bytes = owned;
    scheduler.arbiter().set_limit(owned);
    assert_eq!((scheduler.kv_limit, streamed(&scheduler)), (owned, 0));
    scheduler.admit();
    assert!(scheduler.is_returning());
    let lack = scheduler.returning_bytes();
    assert!(lack > 0 && scheduler.kv_limit >= owned + lack);
    assert!(streamed(&scheduler) > 0, "weights gave way");
    assert!(scheduler.engine.weights_to_spare() > 0, "but not all");
    move_all(&mut scheduler);
    assert_eq!(scheduler.running.len(), 2);
    finish(&mut scheduler, 500);
    assert_eq!(streams.map(tokens).to_vec(), expected);
}
