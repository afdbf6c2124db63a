//! The scheduler, the prefix cache and the pool, driven through everything that can happen to them.
//!
//! A seed decides what requests come, what their clients do, how time passes, how much memory the
//! system has and which calls of the device fail or are late. The clock, the system's memory and the
//! arithmetic are replaced; the scheduler, the prefix cache, the sequences, the pool and the pages
//! are the real ones. After every step all invariants are checked, and whatever a client has read is
//! compared with what its request gives alone.
//!
//! `cargo test` runs a few fixed seeds. `LACUNA_SIMULATION_SECONDS` runs seeds for that long, new ones or
//! those from `LACUNA_SIMULATION_SEED` on, which alone runs that one again; a failure names its seed.

mod blocks;
mod client;
mod drafting;
mod invariants;
mod model;
pub(super) mod swap;

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use lacuna_kernels::ElementType;
use lacuna_kv::folder::faults::{DiskFaults, Trouble};
use lacuna_kv::folder::{Fingerprint, FolderConfig};
use lacuna_kv::prefix::Namespace;
use lacuna_kv::swap::{Phase, SwapSizes};
use lacuna_kv::{
    Geometry, Keep, KvCache, KvElements, KvPolicy, Layer, LayerCache, RowSpec, ValueRows,
};
use lacuna_models::Model;
use lacuna_pages::faults::{Completion, Failing, Faults, FaultyDevice};
use lacuna_pages::{HostDevice, PageSize, Pool, PoolConfig};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::tests::demo_model;
use super::*;
use crate::block_feed::BlockWatch;
use crate::engine::EngineConfig;
use crate::request_limits::RequestLimits;
use crate::speculation::{Drafter, Speculation};
use crate::system::FakeSystem;
use blocks::Listeners;
use client::{Client, Habit, Spec};
use model::{Break, Breaks, PseudoModel, Weights};

/// What a run is made of: rarer events for some seeds than for others, so that calm and storm differ.
struct Weather {
    /// One request in so many ticks.
    arrivals: u32,
    /// One fault of the device in so many ticks; none for zero.
    faults: u32,
    /// One change of the system's memory in so many ticks; none for zero.
    shortages: u32,
    /// One other budget in so many ticks; none for zero.
    budgets: u32,
    /// One change of what others hold of it in so many ticks; none for zero.
    loans: u32,
}

/// One run.
struct Simulation {
    seed: u64,
    random: ChaCha8Rng,
    weather: Weather,
    scheduler: Scheduler,
    limits: RequestLimits,
    pool: Pool,
    device: Faults,
    /// Of the cache folder, if there is one.
    disk: Option<(DiskFaults, Trouble)>,
    system: FakeSystem,
    model: Arc<Model>,
    /// Makes the next forward pass fail.
    breaks: Breaks,
    swap_disk: swap::Disk,
    /// Bytes of weights that were in memory after the last step.
    weights: u64,
    listeners: Listeners,
    borrowers: Vec<Borrowing>,
    clients: Vec<Client>,
    arrived: u64,
    /// The most the pool may have committed: its limit, or what it held when that was lowered.
    committed: u64,
    trace: DefaultHasher,
    tally: Tally,
}

/// What came up in some runs.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash)]
struct Tally {
    steps: u64,
    finished: u64,
    cancelled: u64,
    out_of_memory: u64,
    overdue: u64,
    unread: u64,
    broken: u64,
    preempted: u64,
    evicted: u64,
    expired: u64,
    reused: u64,
    /// Tokens that were reused where layers have windows.
    resumed: u64,
    /// Tokens that were reused where layers keep states, and resume points that were evicted there.
    restored: u64,
    lost_states: u64,
    /// Sequences that were moved to the swap file, and that came back.
    swapped_out: u64,
    swapped_in: u64,
    /// Those that were lost to a failure of it.
    swap_failures: u64,
    /// Other budgets.
    budgets: u64,
    /// Memory that was lent, and that was taken back.
    lent: u64,
    taken_back: u64,
    /// Steps in which weights left memory, and in which they came back.
    weights_left: u64,
    weights_back: u64,
    /// Blocks of which listeners were told, each time that they could be reused.
    blocks: u64,
    /// Guessed tokens, and those of them that were right.
    guessed: u64,
    guessed_right: u64,
    /// Those of a draft model.
    drafted: u64,
    drafted_right: u64,
    /// Guessed tokens where layers keep states, and those of them that were right.
    beside_states: u64,
    beside_states_right: u64,
}

const CONTEXT: usize = 200;

/// What the layers of a run's model keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Rows,
    Windows,
    /// States beside rows.
    States,
    /// States beside rows and windows.
    Everything,
    StatesAlone,
}

/// Rows of 256 bytes, 16 tokens a page: in two layers alike, or in one that keeps all rows, two with
/// windows, wide and narrow, and one that reads another's. States that hold a context, of a page and of two.
fn geometry(kind: Kind) -> Geometry {
    let elements = KvElements::both(ElementType::F32);
    let states = |geometry: Geometry, states: Vec<usize>| {
        let inputs = states.iter().map(|&state| if state > 0 { 2 } else { 0 });
        let inputs = inputs.collect();
        let geometry = geometry.with_states(states).expect("a model");
        geometry.with_state_inputs(inputs).expect("a model")
    };
    match kind {
        Kind::Rows => return Geometry::uniform(2, 1, 64, elements),
        Kind::States => {
            let rows = Geometry::uniform(2, 1, 64, elements);
            return states(rows, vec![0, CONTEXT + 1]);
        }
        Kind::StatesAlone => {
            let none = Geometry::new(vec![LayerCache::None; 2], elements);
            return states(none.expect("layers"), vec![1400, CONTEXT + 1]);
        }
        Kind::Windows | Kind::Everything => {}
    }
    let rows = |keep| {
        LayerCache::Rows(RowSpec {
            kv_heads: 1,
            key_dim: 64,
            value_dim: 64,
            values: ValueRows::Apart,
            keep,
        })
    };
    let window = |rows| Keep::Window(std::num::NonZeroUsize::new(rows).expect("not zero"));
    let layers = vec![
        rows(window(32)),
        rows(Keep::All),
        LayerCache::Of(Layer(0)),
        rows(window(7)),
    ];
    let windows = Geometry::new(layers, elements).expect("a model");
    match kind {
        Kind::Everything => states(windows, vec![CONTEXT + 1, 0, 1400, 0]),
        _ => windows,
    }
}

impl Simulation {
    fn new(seed: u64) -> Self {
        Self::of(seed, None)
    }

    /// With a model of `kind`, or of one that the seed decides.
    fn of(seed: u64, kind: Option<Kind>) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut one_of = |choices: &[u32]| choices[below(&mut random, choices.len())];
        let mut weather = Weather {
            arrivals: one_of(&[3, 6, 15]),
            faults: one_of(&[0, 0, 3, 20]),
            shortages: one_of(&[0, 10, 60]),
            budgets: 0,
            loans: 0,
        };
        let completion = match one_of(&[0, 0, 1]) {
            0 => Completion::Immediate,
            _ => Completion::Late,
        };
        let groups = u64::from(one_of(&[6, 12, 40]));
        let config = ServiceConfig {
            max_running: one_of(&[1, 3, 6]) as usize,
            mixed_tokens: one_of(&[4, 12]) as usize,
            unread_patience: Duration::from_secs(3),
            engine: EngineConfig {
                speculation: [Speculation::Off, Speculation::NGRAM][one_of(&[0, 1, 1]) as usize],
                ..EngineConfig::default()
            },
            prefix_cache: crate::service::PrefixCacheConfig {
                enabled: one_of(&[0, 1, 1, 1]) == 1,
                time_to_live: Some(Duration::from_secs(8)),
                folder: None,
            },
            blocks: Some(BlockWatch {
                namespace: Namespace::COMMON,
                feed: Arc::default(),
            }),
            ..ServiceConfig::default()
        };
        let host = HostDevice::new().expect("a host with pages");
        let (device, faults) = FaultyDevice::new(host, completion);
        let pool = Pool::new(device, small_pages()).expect("valid settings");
        let kinds = [
            Kind::Rows,
            Kind::Windows,
            Kind::States,
            Kind::Everything,
            Kind::StatesAlone,
        ];
        let random_kind = kinds[one_of(&[0, 0, 1, 1, 2, 2, 3, 4]) as usize];
        let kind = kind.unwrap_or(random_kind);
        let cache =
            KvCache::over(pool.clone(), geometry(kind), KvPolicy::default()).expect("a cache");
        let kv = groups * cache.grain().bytes(cache.grain().group_tokens().get());
        let (model, breaks) = (demo_model(), Breaks::default());
        let tokens = (one_of(&[6, 24]) as usize).max(config.max_running);
        // Some to spare for guesses.
        let rows = (config.max_running + one_of(&[0, 4, 9]) as usize).min(tokens);
        // Of two groups each.
        let weights = Weights::whole(u64::from(one_of(&[0, 0, 3, 12])), 2 * kv / groups);
        let system = FakeSystem::new();
        let mut runner =
            PseudoModel::new(Arc::clone(&model), cache, tokens, rows, Arc::clone(&breaks))
                .with_weights(weights);
        let each = Duration::from_micros(10) * one_of(&[1, 10, 100]);
        runner.takes_time(&system, Duration::from_millis(1), each);
        let budget = with_weights(kv, weights.whole);
        let (swap_disk, swap_pages) = (swap::Disk::default(), one_of(&[0, 60, 1000, 1000]));
        let swap = swap::over(swap_disk.clone(), swap_pages, runner.kv_cache());
        weather.budgets = one_of(&[0, 0, 15, 60]);
        weather.loans = one_of(&[0, 0, 5, 20]);
        let mut scheduler =
            Scheduler::over(Box::new(runner), budget, config, Box::new(system.clone()))
                .expect("a limit of more than a page");
        scheduler.swap = Some(swap);
        scheduler.prompt_rate.observe(1.0, Duration::from_secs(1));
        Self {
            seed,
            limits: scheduler.request_limits(),
            random,
            weather,
            scheduler,
            pool,
            device: faults,
            disk: None,
            system,
            model,
            breaks,
            swap_disk,
            weights: weights.whole,
            listeners: Listeners::default(),
            borrowers: Vec::new(),
            clients: Vec::new(),
            arrived: 0,
            committed: 0,
            trace: DefaultHasher::new(),
            tally: Tally::default(),
        }
    }

    /// With a draft model, for most seeds: of the same layers or others, which sees as much of a text as the model or less, and
    /// is asked wherever it may be or where that pays. What else the seed decides does not depend on it.
    fn drafted(mut self) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ u64::MAX);
        let mut one_of = |choices: &[usize]| choices[below(&mut random, choices.len())];
        let context = one_of(&[0, 40, CONTEXT, CONTEXT]);
        // Of the layers of the draft: its states would have to go back over several passes.
        let kind = [Kind::Rows, Kind::Windows][one_of(&[0, 1])];
        let most = one_of(&[1, 3, 7]);
        let eager = one_of(&[0, 1]) == 1;
        if context == 0 {
            return self;
        }
        let geometry = geometry(kind).keeping_all();
        let cache = KvCache::over(self.pool.clone(), geometry, KvPolicy::default());
        let runner = PseudoModel::new(
            Arc::clone(&self.model),
            cache.expect("a cache"),
            24,
            4,
            Breaks::default(),
        );
        let mut runner = runner.with_context(context);
        runner.takes_time(
            &self.system,
            Duration::from_micros(100),
            Duration::from_micros(5),
        );
        let vocabulary = self.model.spec().vocabulary;
        let drafter = Drafter::new(Box::new(runner), most, vocabulary, 0.1);
        self.scheduler.draft_with(drafter);
        if eager {
            self.scheduler.pace = Pace::eager();
        }
        self
    }

    fn one_in(&mut self, count: u32) -> bool {
        count > 0 && below(&mut self.random, count as usize) == 0
    }

    fn within(&mut self, range: Range<usize>) -> usize {
        range.start + below(&mut self.random, range.len())
    }

    /// Lets time pass, things happen, and the scheduler make a step.
    fn tick(&mut self) {
        let milliseconds = match self.one_in(50) {
            true => 5000,
            false => self.within(1..300) as u64,
        };
        self.system.pass(Duration::from_millis(milliseconds));
        self.change_the_system();
        self.trouble_the_device();
        self.trouble_the_disk();
        self.trouble_the_swap_file();
        // Nobody has seen yet what the file has come to.
        self.change_the_budget();
        self.change_the_loans();
        if self.one_in(self.weather.arrivals) {
            self.submit();
        }
        if self.one_in(300) {
            let how = [Break::AtTheStart, Break::InLayer, Break::InLogits];
            let how = how[self.within(0..3)];
            self.break_next_pass(how);
        }
        self.step();
    }

    fn step(&mut self) {
        self.scheduler.sweep();
        self.scheduler.step();
        self.listeners.listen(&mut self.scheduler.prefix);
        self.tally.steps += 1;
        let ledger = self.scheduler.engine.kv_cache().ledger();
        self.check();
        self.check_weights();
        self.committed = ledger
            .committed
            .get()
            .min(self.committed.max(self.scheduler.kv_limit));
        assert_eq!(
            self.committed,
            ledger.committed.get(),
            "memory was taken beyond the limit"
        );
        for index in 0..self.clients.len() {
            if self.clients[index].acts(&mut self.random) {
                self.clients[index].read(&mut self.trace, &mut self.tally);
            }
        }
        let running = self.scheduler.running.iter();
        let order: Vec<u64> = running.map(|running| running.job.id).collect();
        let waiting = self.scheduler.waiting.len();
        (order, waiting, ledger.committed, ledger.pinned).hash(&mut self.trace);
        self.clients.retain(|client| !client.is_over());
    }

    /// What it computes is kept in `folder`, on a disk that does what it is told.
    fn keep_in(&mut self, folder: &Path) {
        let disk = DiskFaults::default();
        let config = FolderConfig {
            path: folder.to_owned(),
            limit: ByteLength::mebibytes(1),
            remote: None,
            key: None,
        };
        let cache = self.scheduler.engine.kv_cache().clone();
        let computed_by = Fingerprint::new([("weights", "none".to_owned())]);
        let opened = CacheFolder::open_faulty(disk.clone(), config, &cache, computed_by);
        let prefix = PrefixCache::new(cache).with_folder(opened.expect("a folder"));
        let prefix = prefix.watched(Namespace::COMMON);
        self.scheduler.prefix = prefix;
        self.scheduler.config.prefix_cache.enabled = true;
        self.disk = Some((disk, Trouble::Nothing));
    }

    /// What its cache would evict is put aside within `bytes`, on a disk that does what it is told.
    fn put_aside_within(&mut self, bytes: u64) {
        let disk = DiskFaults::default();
        let cache = self.scheduler.engine.kv_cache().clone();
        let sizes = SwapSizes {
            limit: ByteLength::new(bytes),
            piece: ByteLength::new(2 * cache.page_bytes() as u64),
            block: ByteLength::new(8 * cache.page_bytes() as u64),
        };
        let swap = swap::of(self.swap_disk.clone(), sizes, &cache);
        let aside = CacheFolder::open_unnamed(
            std::env::temp_dir(),
            swap.room(),
            &cache,
            Some(disk.clone()),
        );
        let prefix = PrefixCache::new(cache).with_folder(aside.expect("files"));
        self.scheduler.prefix = prefix.watched(Namespace::COMMON);
        self.scheduler.swap = Some(swap);
        self.scheduler.config.prefix_cache.enabled = true;
        self.disk = Some((disk, Trouble::Nothing));
    }

    /// Counts weights that have left memory and come back, and checks that the books are right about them.
    fn check_weights(&mut self) {
        let Budget {
            budget_bytes,
            parts,
            ..
        } = self.scheduler.budget;
        let held = self.scheduler.engine.weight_memory().pinned.get();
        assert_eq!(held, parts.read_weight_bytes);
        assert_eq!(parts.constraint_bytes, self.scheduler.lent_bytes());
        // What is in use stays when the budget becomes less than that.
        assert_eq!(
            budget_bytes.map(|it| it.max(parts.besides_kv())),
            Some(parts.bytes())
        );
        self.tally.weights_left += u64::from(held < self.weights);
        self.tally.weights_back += u64::from(held > self.weights);
        self.weights = held;
    }

    /// Waits for the folder's threads, unless their disk stalls, and checks what holds then.
    fn check(&self) {
        if self.tally.budgets + self.tally.lent == 0 {
            // After another budget the device may still have to take pages back.
            let (committed, most) = (
                self.pool.ledger().committed.get(),
                self.scheduler.budget.parts.kv_bytes,
            );
            assert!(committed <= most, "the budget holds: {committed} of {most}");
        }
        let Some((_, trouble)) = &self.disk else {
            return invariants::check(&self.scheduler, &self.pool);
        };
        if *trouble == Trouble::Stalls {
            return;
        }
        assert!(self.scheduler.prefix.settle(Duration::from_secs(60)));
        while !self.scheduler.has_restored() {
            std::thread::sleep(Duration::from_micros(100));
        }
        invariants::check_but_pins(&self.scheduler, &self.pool);
    }

    fn trouble_the_disk(&mut self) {
        if self.disk.is_none() || !self.one_in(4) {
            return;
        }
        let troubles = [
            Trouble::Nothing,
            Trouble::Nothing,
            Trouble::Refuses,
            Trouble::Full,
            Trouble::HalfWrites,
            Trouble::Stalls,
        ];
        let trouble = troubles[self.within(0..troubles.len())];
        self.set_trouble(trouble);
    }

    fn set_trouble(&mut self, trouble: Trouble) {
        if let Some((disk, current)) = &mut self.disk {
            *current = trouble;
            disk.set(trouble);
        }
    }

    fn break_next_pass(&mut self, how: Break) {
        *self.breaks.lock().expect("no panic") = Some(how);
    }

    fn change_the_system(&mut self) {
        if !self.one_in(self.weather.shortages) {
            return;
        }
        let committed = self.pool.ledger().committed.get();
        let reserve = FakeSystem::RESERVE;
        let available = match self.within(0..4) {
            0 => 0,
            1 => reserve.saturating_sub(committed / 2),
            _ => 1 << 40,
        };
        let stalled_percent = [0.0, 0.0, 50.0][self.within(0..3)];
        self.system.set_memory(available, stalled_percent);
    }

    /// Room for another number of tokens, from what hardly holds one request on.
    fn change_the_budget(&mut self) {
        if !self.one_in(self.weather.budgets) {
            return;
        }
        let grain = self.scheduler.prefix.grain();
        let group = grain.bytes(grain.group_tokens().get());
        let matrices = self.within(0..13) as u64;
        let budget = with_weights(self.within(1..41) as u64 * group, matrices * 2 * group);
        let order = |scheduler: &Scheduler| -> Vec<u64> {
            let running = scheduler.running.iter();
            running.map(|running| running.job.id).collect()
        };
        let (held, before) = (self.scheduler.owned_bytes(), order(&self.scheduler));
        self.scheduler.set_budget(budget.parts.bytes());
        assert_eq!(self.scheduler.budget.budget_bytes, budget.budget_bytes);
        let scheduler = &self.scheduler;
        let (owned, limit) = (scheduler.owned_bytes(), scheduler.kv_limit);
        let (tree, running) = (scheduler.prefix.tree(), order(scheduler));
        let mut away = scheduler.away();
        // A device that refuses takes pages back later.
        let nobody_has_any = tree.is_empty()
            && tree.resume_points() == 0
            && running.is_empty()
            && away.all(|away| away.image.progress().phase == Phase::Out);
        assert!(
            owned <= limit || nobody_has_any,
            "{owned} bytes are held, {limit} allowed"
        );
        // Others may have come back from the swap file meanwhile, to their places among them.
        let mut stayed = running;
        stayed.retain(|id| before.contains(id));
        assert!(before.starts_with(&stayed), "the last go first");
        assert!(
            held > limit || stayed == before,
            "{held} bytes would have fit in {limit}"
        );
        self.tally.budgets += 1;
    }

    /// Others take memory of some groups, use what is in it, or stop to.
    fn change_the_loans(&mut self) {
        let held = |one: &Borrowing| one.0.lock().expect("no panic").is_held;
        let before = self.borrowers.len();
        self.borrowers.retain(held);
        self.tally.taken_back += (before - self.borrowers.len()) as u64;
        if !self.one_in(self.weather.loans) {
            return;
        }
        let used = self.within(0..2) == 0;
        if !self.borrowers.is_empty() && self.within(0..2) == 0 {
            let one = self.within(0..self.borrowers.len());
            self.borrowers[one].set_used(used, &self.system);
            return;
        }
        let grain = self.scheduler.prefix.grain();
        let group = grain.bytes(grain.group_tokens().get());
        let bytes = self.within(1..8) as u64 * group;
        let borrower = Borrowing::new(used, &self.system);
        let first = |scheduler: &Scheduler| scheduler.running.first().map(|first| first.job.id);
        let (before, budget) = (first(&self.scheduler), self.scheduler.budget);
        let lent = self.scheduler.lend(Loan {
            bytes,
            borrower: Box::new(borrower.clone()),
        });
        match lent {
            Ok(()) => {
                assert_eq!(first(&self.scheduler), before, "the first goes on");
                self.borrowers.push(borrower);
                self.tally.lent += 1;
            }
            Err(_) => assert_eq!(self.scheduler.budget, budget, "nothing has changed"),
        }
    }

    fn trouble_the_device(&mut self) {
        if self.one_in(3) {
            self.device.complete();
        }
        if self.one_in(self.weather.faults) {
            let call = self.within(0..12) as u64;
            let failing = match self.within(0..8) {
                0 => Failing::From(call),
                _ => Failing::Once(call),
            };
            self.device.fail(failing);
        } else if self.one_in(4) {
            self.device.fail(Failing::Nothing);
        }
    }

    /// The swap file takes or gives back one piece, and pages with it. Returns whether there was one.
    fn move_a_piece(&mut self) -> bool {
        let moved = (self.scheduler.swap.as_ref()).is_some_and(Swap::advance);
        let committed = self.pool.ledger().committed.get();
        assert!(committed <= self.committed.max(self.scheduler.kv_limit));
        self.committed = committed;
        moved
    }

    /// The swap file moves on some pieces, or none, refuses, writes in part, or gives other bytes back.
    fn trouble_the_swap_file(&mut self) {
        let troubles = [
            swap::Trouble::Refuses,
            swap::Trouble::Halves,
            swap::Trouble::Flips,
        ];
        let trouble = troubles[self.within(0..3)];
        let troubled = self.one_in(self.weather.faults);
        self.swap_disk.trouble(troubled.then_some(trouble));
        let pieces = [0, 0, 1, 4, 40][self.within(0..5)];
        for _ in 0..pieces {
            self.move_a_piece();
        }
    }

    fn submit(&mut self) {
        let habit = Habit::random(&mut self.random);
        let spec = Spec::random(&mut self.random, &habit);
        let Ok(capacity) = self.limits.check(&spec.request()) else {
            return;
        };
        let spec = spec.with_stop_string(&mut self.random, capacity, &self.model);
        let client = self.enqueue(spec, habit, capacity);
        self.clients.push(client);
    }

    fn submit_spec(&mut self, spec: Spec) -> Client {
        let capacity = self.limits.check(&spec.request());
        self.enqueue(spec, Habit::Always, capacity.expect("it could run"))
    }

    fn enqueue(&mut self, spec: Spec, habit: Habit, capacity: usize) -> Client {
        let now = self.system.now();
        let made = Waiting::new(spec.request(), capacity, now);
        let (mut waiting, stream) = made.expect("valid settings");
        waiting.job.id = self.arrived;
        self.arrived += 1;
        self.scheduler.enqueue(waiting);
        let expected = spec.alone(capacity, &self.model);
        let scores = spec.scores(&self.model);
        Client::new(spec, stream, habit, expected, scores)
    }

    /// Ends the run: nothing new comes, nothing fails any more, and everything must come to an end
    /// and leave nothing behind.
    fn finish(mut self) -> (u64, Tally) {
        self.device.fail(Failing::Nothing);
        self.set_trouble(Trouble::Nothing);
        self.system.set_memory(1 << 40, 0.0);
        self.borrowers
            .iter()
            .for_each(|it| it.set_used(false, &self.system));
        // A token a step for each request in turn, and the time that unread ones wait.
        let work: usize = self.clients.iter().map(Client::work).sum();
        let most = work + 40 * self.clients.len() + 500;
        let calm = (0..most).find(|_| {
            self.system.pass(Duration::from_millis(100));
            self.device.complete();
            while self.move_a_piece() {}
            self.step();
            self.scheduler.is_idle()
        });
        let status = self.scheduler.status();
        assert!(
            calm.is_some(),
            "{} requests wait after {most} steps: {status:#?}",
            self.scheduler.waiting.len()
        );
        for client in &mut self.clients {
            client.read(&mut self.trace, &mut self.tally);
            assert!(client.is_over(), "a request without an end");
        }
        let status = self.scheduler.status();
        let counters = status.counters;
        let ended = counters.finished + counters.cancelled + counters.failed;
        assert_eq!(ended, self.arrived, "every request is counted once");
        let swap = status.swap.expect("there is one");
        assert_eq!(swap.held.get(), 0, "the file is empty: {swap:?}");
        self.tally.swapped_out = swap.left;
        self.tally.swapped_in = swap.returned;
        self.tally.swap_failures = swap.failed_writes + swap.failed_reads;
        while self.scheduler.prefix.evict(self.system.now()) {}
        self.listeners.listen(&mut self.scheduler.prefix);
        let told = (self.listeners.stored, self.listeners.removed);
        assert_eq!(told.0, told.1, "nothing can be reused any more");
        self.tally.blocks = told.0;
        self.device.complete();
        self.pool.trim();
        let ledger = self.pool.ledger();
        assert_eq!((ledger.buffers, ledger.mapped.get()), (0, 0));
        assert_eq!(ledger.committed, ledger.lost, "{ledger:?}");
        self.tally.cancelled = counters.cancelled;
        self.tally.preempted = counters.preemptions;
        self.tally.evicted = counters.evicted_groups;
        self.tally.expired = counters.expired_groups;
        self.tally.guessed = counters.drafts.all().draft_tokens;
        self.tally.guessed_right = counters.drafts.all().accepted_tokens;
        self.tally.drafted = counters.drafts.model.draft_tokens;
        self.tally.drafted_right = counters.drafts.model.accepted_tokens;
        self.tally.reused = counters.reused_tokens;
        if self.scheduler.prefix.grain().has_windows() {
            self.tally.resumed = counters.reused_tokens;
        }
        if self.scheduler.prefix.grain().has_states() {
            self.tally.restored = counters.reused_tokens;
            self.tally.beside_states = counters.drafts.all().draft_tokens;
            self.tally.beside_states_right = counters.drafts.all().accepted_tokens;
            self.tally.lost_states = counters.evicted_resume_points;
        }
        self.tally.hash(&mut self.trace);
        (self.trace.finish(), self.tally.clone())
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let seed = self.seed;
            eprintln!("run it again with LACUNA_SIMULATION_SEED={seed}");
        }
    }
}

/// Small pages and heaps, so that a run crosses their boundaries often.
fn small_pages() -> PoolConfig {
    let kibibytes = lacuna_pages::ByteLength::kibibytes;
    PoolConfig {
        page_size: PageSize::KIB_4,
        heap_bytes: kibibytes(64),
        high_watermark: kibibytes(128),
        low_watermark: kibibytes(32),
        ..PoolConfig::default()
    }
}

/// Somebody who holds memory of the budget.
#[derive(Clone)]
struct Borrowing(Arc<Mutex<Borrowed>>);

struct Borrowed {
    is_held: bool,
    is_used: bool,
    used: Instant,
}

impl Borrowing {
    fn new(is_used: bool, system: &FakeSystem) -> Self {
        Self(Arc::new(Mutex::new(Borrowed {
            is_held: true,
            is_used,
            used: system.now(),
        })))
    }

    fn set_used(&self, is_used: bool, system: &FakeSystem) {
        let mut state = self.0.lock().expect("no panic");
        (state.is_used, state.used) = (is_used, system.now());
    }
}

impl Borrower for Borrowing {
    fn unused_since(&self) -> Option<Instant> {
        let state = self.0.lock().expect("no panic");
        (!state.is_used).then_some(state.used)
    }

    fn give_back(&self) -> bool {
        let mut state = self.0.lock().expect("no panic");
        assert!(state.is_held, "given back once");
        state.is_held = state.is_used;
        !state.is_used
    }
}

/// A number below `end`, which is not zero.
fn below(random: &mut ChaCha8Rng, end: usize) -> usize {
    (random.next_u64() % end as u64) as usize
}

/// The whole run of a seed: the hash of everything that happened, and what came up.
fn run(seed: u64, ticks: usize) -> (u64, Tally) {
    let mut simulation = Simulation::new(seed).drafted();
    for _ in 0..ticks {
        simulation.tick();
    }
    simulation.finish()
}

const TICKS: usize = 400;
/// Runs of `cargo test`: enough for all that is counted to come up, and few enough to be quick.
const SEEDS: u64 = 16;

fn environment(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {value}")),
    )
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.finished += other.finished;
        self.cancelled += other.cancelled;
        self.out_of_memory += other.out_of_memory;
        self.overdue += other.overdue;
        self.unread += other.unread;
        self.broken += other.broken;
        self.preempted += other.preempted;
        self.evicted += other.evicted;
        self.expired += other.expired;
        self.reused += other.reused;
        self.resumed += other.resumed;
        self.restored += other.restored;
        self.lost_states += other.lost_states;
        self.swapped_out += other.swapped_out;
        self.swapped_in += other.swapped_in;
        self.swap_failures += other.swap_failures;
        self.budgets += other.budgets;
        self.lent += other.lent;
        self.taken_back += other.taken_back;
        self.weights_left += other.weights_left;
        self.weights_back += other.weights_back;
        self.blocks += other.blocks;
        self.guessed += other.guessed;
        self.guessed_right += other.guessed_right;
        self.drafted += other.drafted;
        self.drafted_right += other.drafted_right;
        self.beside_states += other.beside_states;
        self.beside_states_right += other.beside_states_right;
    }

    /// Everything that a simulation is for has come up.
    fn is_complete(&self) -> bool {
        let Self {
            steps,
            finished,
            cancelled,
            out_of_memory,
            overdue,
            unread,
            broken,
            preempted,
            evicted,
            expired,
            reused,
            resumed,
            restored,
            lost_states,
            swapped_out,
            budgets,
            lent,
            taken_back,
            weights_left,
            weights_back,
            blocks,
            guessed,
            guessed_right,
            drafted,
            drafted_right,
            beside_states,
            beside_states_right,
            ..
        } = self.clone();
        let all = [
            steps,
            finished,
            cancelled,
            out_of_memory,
            overdue,
            unread,
            broken,
            preempted,
            evicted,
            expired,
            reused,
            resumed,
            restored,
            lost_states,
            swapped_out,
            budgets,
            lent,
            taken_back,
            weights_left,
            weights_back,
            blocks,
            guessed_right,
            guessed - guessed_right,
            drafted_right,
            drafted - drafted_right,
            beside_states_right,
            beside_states - beside_states_right,
        ];
        all.into_iter().all(|count| count > 0)
    }
}

#[test]
fn whatever_happens_every_request_ends_once_and_reads_as_it_does_alone() {
    let first = environment("LACUNA_SIMULATION_SEED");
    let mut all = Tally::default();
    let Some(seconds) = environment("LACUNA_SIMULATION_SECONDS") else {
        match first {
            Some(seed) => all.add(&run(seed, TICKS).1),
            None => {
                (0..SEEDS).for_each(|seed| all.add(&run(seed, TICKS).1));
                assert!(all.is_complete(), "something never came up: {all:?}");
            }
        }
        return;
    };
    let (start, mut runs) = (Instant::now(), 0);
    let mut seed = first.unwrap_or_else(fresh_seed);
    while start.elapsed() < Duration::from_secs(seconds) {
        all.add(&run(seed, TICKS).1);
        (seed, runs) = (seed.wrapping_add(1), runs + 1);
    }
    eprintln!("{runs} runs: {all:?}");
}

/// A seed that is most likely new.
fn fresh_seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64) >> 8
}

/// Eight processes after one another, each of which finds what those before it could write.
#[test]
fn a_folder_whose_disk_refuses_fills_and_stalls_changes_no_answer() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut written, mut restored, mut failed) = (0, 0, 0);
    for seed in 0..8 {
        let kind = [Kind::Rows, Kind::Windows, Kind::States, Kind::Everything][seed as usize / 2];
        let mut simulation = Simulation::of(seed, Some(kind));
        simulation.keep_in(folder.path());
        (0..150).for_each(|_| simulation.tick());
        let status = simulation.scheduler.prefix.folder_status();
        let status = status.expect("a folder");
        written += status.written_segments;
        restored += status.restored_tokens;
        failed += status.failed_writes + status.unreadable;
        assert_eq!(status.damaged, 0, "what is half written has no name");
        simulation.finish();
    }
    assert!(
        written > 0 && restored > 0 && failed > 0,
        "{written} written, {restored} restored, {failed} failed"
    );
}

/// What is evicted in those runs is put aside and taken back.
#[test]
fn files_beside_the_swap_file_whose_disk_refuses_fills_and_stalls_change_no_answer() {
    let (mut written, mut restored, mut failed) = (0, 0, 0);
    for seed in 0..16 {
        let kind = [Kind::Rows, Kind::Windows, Kind::States, Kind::Everything][seed as usize / 4];
        let mut simulation = Simulation::of(seed, Some(kind));
        let bytes = [64 << 10, 1 << 20][seed as usize % 2];
        simulation.put_aside_within(bytes);
        (0..TICKS).for_each(|_| simulation.tick());
        let status = simulation.scheduler.prefix.aside_status();
        let status = status.expect("files");
        let swap = simulation.scheduler.swap.as_ref().expect("a swap file");
        let held = swap.status().held.get() + status.bytes.get();
        assert!(held <= bytes, "{held} of {bytes} bytes");
        written += status.written_segments;
        restored += status.restored_tokens;
        failed += status.failed_writes + status.unreadable;
        assert_eq!(status.damaged, 0);
        simulation.finish();
    }
    assert!(
        written > 0 && restored > 0 && failed > 0,
        "{written} written, {restored} restored, {failed} failed"
    );
}

/// Two conversations by turns in room for one: each turn finds its conversation again, as long as the disk does.
#[test]
fn conversations_that_take_turns_in_room_for_one_are_put_aside_and_come_back() {
    for kind in [
        Kind::Rows,
        Kind::Windows,
        Kind::States,
        Kind::Everything,
        Kind::StatesAlone,
    ] {
        for trouble in [Trouble::Nothing, Trouble::Refuses, Trouble::HalfWrites] {
            let mut simulation = Simulation::of(0, Some(kind));
            simulation.put_aside_within(1 << 20);
            let scheduler = &mut simulation.scheduler;
            scheduler.config.max_running = 2;
            scheduler.config.prefix_cache.time_to_live = None;
            let grain = scheduler.prefix.grain().clone();
            let step = scheduler.engine.batch_limits().tokens;
            scheduler.budget = with_weights(
                grain.peak_bytes(195, step) + grain.resume_bytes(),
                simulation.weights,
            );
            simulation.limits = scheduler.request_limits();
            let mut talks = [vec![300; 30], vec![900; 30]];
            for turn in 0..6u32 {
                let talk = &mut talks[turn as usize % 2];
                let before = talk.len();
                talk.extend((0..25).map(|word| 400 + turn * 30 + word));
                simulation.set_trouble(match turn {
                    3 => trouble,
                    _ => Trouble::Nothing,
                });
                let reused = simulation.scheduler.counters.reused_tokens;
                let mut client = simulation.submit_spec(Spec::greedy(talk.clone(), 28));
                for _ in 0..2000 {
                    if simulation.scheduler.is_idle() {
                        break;
                    }
                    simulation.system.pass(Duration::from_millis(20));
                    simulation.step();
                    client.read(&mut simulation.trace, &mut simulation.tally);
                }
                assert_eq!(client.failure(), None);
                *talk = client.conversation();
                let reused = simulation.scheduler.counters.reused_tokens - reused;
                let group = grain.group_tokens().get() as u64;
                let what = format!("{kind:?} {trouble:?} turn {turn}: {reused} of {before} reused");
                // Where layers keep states it goes on from a resume point a little before the end.
                let back = if grain.has_states() {
                    64 + group
                } else {
                    group
                };
                if turn >= 2 && trouble == Trouble::Nothing {
                    assert!(reused + back + group >= before as u64, "{what}");
                }
            }
            let status = simulation.scheduler.prefix.aside_status().expect("files");
            match trouble {
                Trouble::Nothing => assert_eq!(status.failed_writes + status.unreadable, 0),
                _ => assert!(
                    status.failed_writes + status.unreadable > 0,
                    "{kind:?}: {status:?}"
                ),
            }
            assert!(status.restored_tokens > 0, "{kind:?}: {status:?}");
            assert_eq!(status.damaged, 0);
            simulation.finish();
        }
    }
}

#[test]
fn a_device_that_refuses_is_waited_for_before_a_request_fails() {
    let mut simulation = Simulation::new(0);
    let mut client = simulation.submit_spec(Spec::plain(20, 150));
    simulation.step();
    simulation.device.fail(Failing::From(0));
    let mut waited = Duration::ZERO;
    while client.failure().is_none() {
        simulation.system.pass(Duration::from_secs(1));
        waited += Duration::from_secs(1);
        simulation.step();
        client.read(&mut simulation.trace, &mut simulation.tally);
        assert!(waited < Duration::from_secs(200), "it never failed");
    }
    assert!(waited >= Scheduler::STARVATION, "{waited:?}");
    let why = client.failure().expect("it failed").to_string();
    assert!(why.contains("injected"), "the device's own words: {why}");
}

#[test]
fn a_pass_that_fails_ends_those_it_was_for_and_no_others() {
    let mut simulation = Simulation::new(0);
    simulation.scheduler.config.max_running = 2;
    let mut unread = simulation.submit_spec(Spec::plain(20, 50));
    simulation.step();
    simulation.scheduler.running[0].job.stalled = Some(simulation.system.now());
    let mut broken = simulation.submit_spec(Spec::plain(30, 50));
    simulation.break_next_pass(Break::AtTheStart);
    assert!(simulation.scheduler.step());
    for client in [&mut unread, &mut broken] {
        client.read(&mut simulation.trace, &mut simulation.tally);
    }
    assert_eq!(unread.failure(), None, "none of its tokens were in it");
    assert!(matches!(broken.failure(), Some(Failure::Engine(_))));
}

/// The others are computed again where the pass has changed their states, and read as they do alone.
#[test]
fn a_value_that_is_not_finite_ends_the_request_it_is_in_and_no_other() {
    for kind in [
        Kind::Rows,
        Kind::States,
        Kind::Everything,
        Kind::StatesAlone,
    ] {
        for how in [Break::InLayer, Break::InLogits] {
            // One whose steps have room for all three.
            let mut seeds = (0..).map(|seed| Simulation::of(seed, Some(kind)));
            let room = |one: &Simulation| one.scheduler.engine.batch_limits().logit_rows >= 3;
            let mut simulation = seeds.find(room).expect("some seed");
            simulation.scheduler.config.max_running = 3;
            simulation.scheduler.budget = with_weights(1 << 30, simulation.weights);
            let specs = [Spec::plain(20, 30), Spec::plain(2, 30), Spec::plain(3, 30)];
            let mut clients = specs.map(|spec| simulation.submit_spec(spec));
            while (simulation.scheduler.running.iter())
                .map(|running| running.sessions[0].choice.generated)
                .filter(|&generated| generated > 0)
                .count()
                < 3
            {
                simulation.step();
            }
            simulation.break_next_pass(how);
            while !simulation.scheduler.is_idle() {
                simulation.system.pass(Duration::from_millis(100));
                simulation.step();
                for client in &mut clients {
                    client.read(&mut simulation.trace, &mut simulation.tally);
                }
            }
            let failed = clients.each_ref().map(|client| client.failure().is_some());
            assert_eq!(failed, [false, false, true], "{kind:?} {how:?}");
            let again = simulation.scheduler.counters.preemptions;
            let states = simulation.scheduler.prefix.grain().has_states();
            assert_eq!(again, if states { 2 } else { 0 }, "{kind:?} {how:?}");
            simulation.finish();
        }
    }
}

/// Of a prompt that is still read there are no logits, though its tokens are in the pass and come first.
#[test]
fn logits_that_are_not_finite_end_the_request_that_has_them() {
    let mut simulation = Simulation::of(0, Some(Kind::Rows));
    simulation.scheduler.config.max_running = 2;
    simulation.scheduler.budget = with_weights(1 << 30, simulation.weights);
    let mut clients =
        [Spec::plain(200, 3), Spec::plain(2, 30)].map(|spec| simulation.submit_spec(spec));
    let session = |simulation: &Simulation, running: usize| {
        let running = simulation.scheduler.running.get(running);
        running.map(|running| {
            (
                running.sessions[0].pending(),
                running.sessions[0].choice.generated,
            )
        })
    };
    while session(&simulation, 1).is_none_or(|(_, generated)| generated == 0) {
        simulation.step();
    }
    assert!(session(&simulation, 0).is_some_and(|(pending, _)| pending > 100));
    simulation.break_next_pass(Break::InLogits);
    while !simulation.scheduler.is_idle() {
        simulation.system.pass(Duration::from_millis(100));
        simulation.step();
        for client in &mut clients {
            client.read(&mut simulation.trace, &mut simulation.tally);
        }
    }
    let failed = clients.each_ref().map(|client| client.failure().is_some());
    assert_eq!(failed, [false, true]);
    simulation.finish();
}

/// The others wait for the one that computes their beginning, be it under way already.
#[test]
fn conversations_that_begin_alike_compute_their_beginning_once() {
    const OWN: u32 = 40;
    for kind in [Kind::Rows, Kind::Windows, Kind::States, Kind::StatesAlone] {
        for under_way in [false, true] {
            let mut simulation = Simulation::of(0, Some(kind));
            simulation.scheduler.config.max_running = 16;
            simulation.scheduler.config.prefix_cache.enabled = true;
            simulation.scheduler.budget = with_weights(1 << 30, simulation.weights);
            let system: Vec<u32> = (300..400).collect();
            let spec = |talk: u32| {
                // So many that the beginning ends where nothing else would be kept.
                let own = (0..OWN).map(|word| 500 + talk * 50 + word);
                Spec::greedy(system.iter().copied().chain(own).collect(), 3)
            };
            let mut clients = vec![simulation.submit_spec(spec(0))];
            if under_way {
                simulation.step();
                let first = &simulation.scheduler.running[0].sessions[0];
                assert!((1..100).contains(&first.sequence.len()));
            }
            clients.extend((1..16).map(|talk| simulation.submit_spec(spec(talk))));
            while !simulation.scheduler.is_idle() {
                simulation.system.pass(Duration::from_millis(100));
                simulation.step();
                for client in &mut clients {
                    client.read(&mut simulation.trace, &mut simulation.tally);
                }
            }
            let counters = simulation.scheduler.counters;
            let computed = counters.prompt_tokens - counters.reused_tokens;
            // A beginning, and of each what comes after the last whole group of it.
            let group = simulation.scheduler.prefix.grain().group_tokens().get() as u64;
            let most = 100 + 16 * (u64::from(OWN) + group);
            assert!(computed <= most, "{kind:?}: {computed} tokens of {most}");
            simulation.finish();
        }
    }
}

/// What resume points are counted for when requests are taken is what evicting them gives back.
#[test]
fn resume_points_that_nobody_uses_are_worth_their_pages() {
    for kind in [Kind::Windows, Kind::States, Kind::Everything] {
        let mut simulation = Simulation::of(0, Some(kind));
        simulation.scheduler.config.prefix_cache.enabled = true;
        simulation.scheduler.budget = with_weights(1 << 30, simulation.weights);
        let mut client = simulation.submit_spec(Spec::greedy((300..400).collect(), 30));
        while !simulation.scheduler.is_idle() {
            simulation.system.pass(Duration::from_millis(100));
            simulation.step();
            client.read(&mut simulation.trace, &mut simulation.tally);
        }
        let scheduler = &simulation.scheduler;
        let (tree, grain) = (scheduler.prefix.tree(), scheduler.prefix.grain());
        let groups = tree.len() as u64 * grain.group_bytes();
        let pages = simulation.pool.ledger().pinned.get() - groups;
        let apart = tree.resume_points() as u64 * grain.resume_bytes();
        assert!(pages > 0 && tree.resume_points() > 1);
        assert_eq!(scheduler.resume_points_bytes(), pages.min(apart));
        // Windows of several have pages in common.
        assert_eq!(pages < apart, kind != Kind::States, "{pages} of {apart}");
        simulation.finish();
    }
}

#[test]
fn a_request_without_address_space_waits_for_those_that_run_and_fails_alone() {
    let mut simulation = Simulation::new(0);
    simulation.scheduler.config.max_running = 2;
    let runs = simulation.submit_spec(Spec::plain(20, 50));
    while simulation.scheduler.running.is_empty()
        || simulation.scheduler.running[0].sessions[0].pending() > 1
    {
        simulation.step();
    }
    let mut comes = simulation.submit_spec(Spec::plain(20, 50));
    simulation.device.fail(Failing::From(0));
    simulation.scheduler.admit();
    assert_eq!(simulation.scheduler.waiting_len(), 1);
    comes.read(&mut simulation.trace, &mut simulation.tally);
    assert_eq!(comes.failure(), None, "the other may leave it some");
    drop(runs);
    simulation.scheduler.sweep();
    simulation.scheduler.admit();
    comes.read(&mut simulation.trace, &mut simulation.tally);
    assert!(matches!(comes.failure(), Some(Failure::OutOfMemory(_))));
    assert!(simulation.scheduler.is_idle());
}

/// 64 conversations take turns under a budget that holds what 20 of them leave.
#[test]
fn of_conversations_that_do_not_all_fit_resume_points_go_first_and_every_turn_ends_well() {
    for kind in [Kind::States, Kind::Everything, Kind::StatesAlone] {
        let mut simulation = Simulation::of(0, Some(kind));
        let scheduler = &mut simulation.scheduler;
        let grain = scheduler.prefix.grain().clone();
        let conversation = grain.bytes(160) + grain.resume_bytes();
        scheduler.budget = with_weights(20 * conversation, simulation.weights);
        scheduler.config = ServiceConfig {
            max_running: 3,
            max_waiting: 64,
            ..ServiceConfig::default()
        };
        simulation.limits = scheduler.request_limits();
        let spec = |talk: u32, before: Vec<u32>| {
            let words = (0..40).map(|word| 300 + (talk * 131 + word * 17) % 1000);
            Spec::greedy(before.into_iter().chain(words).collect(), 20)
        };
        let mut talks = vec![Vec::new(); 64];
        let (mut most, mut evicted) = (0, (0, 0));
        for turn in 0..2 {
            let before = simulation.scheduler.counters.reused_tokens;
            let mut clients: Vec<Client> = Vec::new();
            // The last to speak are the first to speak again.
            for talk in (0..64).rev() {
                let at = if turn == 0 { 63 - talk } else { talk };
                let history = std::mem::take(&mut talks[at]);
                clients.push(simulation.submit_spec(spec(at as u32, history)));
            }
            while !simulation.scheduler.is_idle() {
                simulation.system.pass(Duration::from_millis(100));
                simulation.step();
                let ledger = simulation.pool.ledger();
                most = most.max(ledger.committed.get());
                let counters = simulation.scheduler.counters;
                let now = (counters.evicted_groups, counters.evicted_resume_points);
                assert!(now.0 == evicted.0 || now.1 > evicted.1, "rows alone went");
                evicted = now;
                for client in &mut clients {
                    client.read(&mut simulation.trace, &mut simulation.tally);
                }
            }
            for (place, client) in clients.iter().enumerate() {
                assert_eq!(client.failure(), None);
                let talk = if turn == 0 { place } else { 63 - place };
                talks[talk] = client.conversation();
            }
            let reused = simulation.scheduler.counters.reused_tokens - before;
            assert_eq!(
                reused > 0,
                turn > 0,
                "{kind:?}: {reused} tokens in turn {turn}"
            );
        }
        assert!(
            most <= 20 * conversation,
            "{kind:?}: never above the budget"
        );
        assert!(most > 19 * conversation, "{kind:?}: all of it is used");
        let counters = simulation.scheduler.counters;
        assert_eq!(
            (counters.finished, counters.preemptions),
            (128, 0),
            "{kind:?}"
        );
        assert!(evicted.1 > 64, "{kind:?}: {evicted:?}");
        simulation.finish();
    }
}

/// Requests that outgrow their memory together go to the swap file and come back, whatever it does to some of them.
#[test]
fn requests_that_outgrow_their_memory_take_turns_through_the_swap_file() {
    // States alone do not grow.
    let kinds = [Kind::Rows, Kind::Windows, Kind::States, Kind::Everything];
    let troubles = [
        swap::Trouble::Refuses,
        swap::Trouble::Halves,
        swap::Trouble::Flips,
    ];
    for kind in kinds {
        for (prefix_cache, trouble) in [(true, None), (false, None)]
            .into_iter()
            .chain(troubles.map(|trouble| (true, Some(trouble))))
        {
            // A seed whose device is done at once, and whose weights are none.
            let mut simulation = Simulation::of(34, Some(kind));
            assert_eq!(simulation.weights, 0, "they would make room first");
            let scheduler = &mut simulation.scheduler;
            scheduler.config.prefix_cache.enabled = prefix_cache;
            scheduler.config.max_running = 3;
            let grain = scheduler.prefix.grain().clone();
            // A whole one and half of another.
            scheduler.budget = with_weights(grain.bytes(180) + grain.bytes(90), simulation.weights);
            scheduler.swap = Some(swap::over(
                simulation.swap_disk.clone(),
                1000,
                scheduler.engine.kv_cache(),
            ));
            simulation.limits = scheduler.request_limits();
            let mut clients = [3, 5, 7].map(|talk| {
                let words = (0..20).map(|word| 300 + talk * 50 + word);
                simulation.submit_spec(Spec::greedy(words.collect(), 150).endless())
            });
            let mut troubled = trouble;
            for step in 0..4000 {
                if simulation.scheduler.is_idle() {
                    break;
                }
                simulation.system.pass(Duration::from_millis(50));
                let swap = simulation.scheduler.swap.as_ref().expect("there is one");
                // Some come back before one is troubled.
                if swap.status().left > 0 && step % 7 == 0 {
                    simulation.swap_disk.trouble(troubled.take());
                }
                simulation.move_a_piece();
                simulation.step();
                for client in &mut clients {
                    client.read(&mut simulation.trace, &mut simulation.tally);
                }
            }
            let failed = clients.iter().find_map(Client::failure);
            assert!(
                failed.is_none(),
                "{kind:?} {prefix_cache} {trouble:?}: {failed:?}"
            );
            let counters = simulation.scheduler.counters;
            let (_, tally) = simulation.finish();
            let what = format!("{kind:?} {prefix_cache} {trouble:?}: {tally:?}");
            assert_eq!(counters.finished, 3, "{what}");
            assert!(counters.preemptions > 0, "{what}");
            assert!(tally.swapped_out > 0, "{what}");
            match trouble {
                // What runs may have taken the memory that others were to come back to: these are computed again.
                None => assert!(
                    (1..=tally.swapped_out).contains(&tally.swapped_in),
                    "{what}"
                ),
                Some(_) => assert!(tally.swap_failures <= 1, "{what}"),
            }
        }
    }
}

/// Whoever had them has gone, and the device is not done with them yet.
#[test]
fn a_request_alone_waits_for_pages_that_the_device_is_still_at_work_on() {
    let mut late = false;
    for seed in 0..20 {
        let mut simulation = Simulation::of(seed, Some(Kind::Rows));
        if simulation.weights > 0 {
            continue;
        }
        let scheduler = &mut simulation.scheduler;
        scheduler.config.prefix_cache.enabled = false;
        // Nothing else is waited for.
        scheduler.swap = None;
        let room = scheduler.prefix.grain().bytes(100);
        scheduler.set_budget(with_weights(room, 0).parts.bytes());
        let gone = simulation.submit_spec(Spec::plain(60, 30));
        while (simulation.scheduler.running.iter()).all(|it| it.sessions[0].sequence.len() < 60) {
            simulation.scheduler.step();
        }
        drop(gone);
        assert!(simulation.scheduler.sweep());
        if simulation.pool.ledger().retiring.get() == 0 {
            continue;
        }
        late = true;
        let mut client = simulation.submit_spec(Spec::plain(60, 3));
        let mut steps = 0;
        while simulation.scheduler.starved.is_none() {
            simulation.scheduler.step();
            steps += 1;
            assert!(steps < 60, "seed {seed}: it found pages elsewhere");
        }
        simulation.system.pass(Scheduler::PAGES_ON_THEIR_WAY / 2);
        for _ in 0..3 {
            simulation.scheduler.step();
        }
        client.read(&mut simulation.trace, &mut simulation.tally);
        assert_eq!(client.failure(), None, "seed {seed}");
        simulation.device.complete();
        while !simulation.scheduler.is_idle() {
            simulation.device.complete();
            simulation.scheduler.step();
            client.read(&mut simulation.trace, &mut simulation.tally);
        }
        assert_eq!(client.failure(), None, "seed {seed}");
    }
    assert!(late, "some device is");
}

/// Somebody changes the budget while requests go to the swap file and come back.
#[test]
fn a_budget_that_changes_is_kept_at_once_wherever_pages_of_swapped_requests_are() {
    let mut all = Tally::default();
    for seed in 0..16 {
        let kind = [Kind::Rows, Kind::Windows, Kind::States, Kind::Everything][seed as usize % 4];
        let mut simulation = Simulation::of(seed, Some(kind));
        simulation.weather.budgets = 9;
        let scheduler = &mut simulation.scheduler;
        scheduler.config.max_running = 3;
        scheduler.swap = Some(swap::over(
            simulation.swap_disk.clone(),
            1000,
            scheduler.engine.kv_cache(),
        ));
        for talk in 0..400 {
            simulation.system.pass(Duration::from_millis(50));
            if simulation.clients.len() < 3 {
                let words = (0..20).map(|word| 300 + talk * 5 + word);
                let spec = Spec::greedy(words.collect(), 150).endless();
                if let Ok(capacity) = simulation.limits.check(&spec.request()) {
                    let client = simulation.enqueue(spec, Habit::Always, capacity);
                    simulation.clients.push(client);
                }
            }
            for _ in 0..[0, 1, 1, 4][simulation.within(0..4)] {
                simulation.move_a_piece();
            }
            simulation.change_the_budget();
            simulation.step();
        }
        all.add(&simulation.finish().1);
    }
    assert!(all.budgets > 0 && all.finished > 0, "{all:?}");
    assert!(all.swapped_out > 0 && all.swapped_in > 0, "{all:?}");
}

/// A budget that was raised took weights out of memory, because weights leave many at a time, and so did for nothing.
#[test]
fn a_budget_in_which_everything_fits_takes_no_weights() {
    let mut seeds = (0..).map(|seed| Simulation::of(seed, Some(Kind::Rows)));
    let mut simulation = seeds.find(|one| one.weights > 0).expect("some seed");
    let scheduler = &mut simulation.scheduler;
    let before = scheduler.budget.budget_bytes.expect("a budget");
    for bytes in [before, before + 4096, 2 * before, before] {
        scheduler.set_budget(bytes);
        assert!(scheduler.engine.has_all_weights(), "{bytes} of {before}");
        assert_eq!(scheduler.budget.budget_bytes, Some(bytes));
    }
    simulation.finish();
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in [3, 7, 11] {
        assert_eq!(run(seed, TICKS), run(seed, TICKS), "seed {seed}");
    }
    assert_ne!(run(3, 50).0, run(7, 50).0, "seeds make a difference");
}

/// A budget for `kv_bytes` of KV pages and weights, with as much for requests as they like.
fn with_weights(kv_bytes: u64, read_weight_bytes: u64) -> Budget {
    let parts = lacuna_models::plan::Parts {
        request_bytes: 64 << 20,
        kv_bytes,
        read_weight_bytes,
        ..Default::default()
    };
    Budget {
        budget_bytes: Some(parts.bytes()),
        parts,
        ..Budget::default()
    }
}
