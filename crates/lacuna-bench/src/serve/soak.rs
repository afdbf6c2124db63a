//! `lacuna bench soak`: more clients than the budget holds, for a while, and what is left after.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lacuna_engine::{Handle, Status};
use serde::Serialize;

use super::client::{Client, Outcome};
use super::load::Shape;
use super::{check, load, shape, start};
use crate::arguments::BenchSoakArgs;
use crate::machine::Machine;
use lacuna_cli::{output, resident, tell};

/// How often the kernel's account is read.
const PERIOD: Duration = Duration::from_millis(20);
/// How soon a client that was refused without being told when to come back does so.
const UNTOLD_PAUSE: Duration = Duration::from_secs(1);
/// How long the service may take to let go of what nobody waits for any more.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    clients: usize,
    /// Of their longest requests, as many as the budget holds at once.
    budget_holds: usize,
    seconds: f64,
    budget_bytes: Option<u64>,
    /// What the budget leaves for KV pages.
    kv_bytes: u64,
    requests: Requests,
    generated_tokens: u64,
    preemptions: u64,
    evicted_groups: u64,
    evicted_resume_points: u64,
    peaks: Peaks,
    /// Half of the clients gone at once.
    leaving: Leaving,
    /// Mapped by sessions after the last client had gone.
    left_bytes: u64,
    /// In the prefix cache then, and what its groups and, at most, its resume points come to.
    cached_bytes: u64,
    group_bytes: u64,
    resume_point_bytes: u64,
    /// Whether every request ended as it should, the budget held, and nothing was left.
    passed: bool,
}

/// How requests ended.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
struct Requests {
    finished: u64,
    /// With 429 or 503 and the time to come back.
    refused: u64,
    /// Without that time.
    refused_bare: u64,
    hung_up: u64,
    failed: u64,
}

/// The largest figures seen.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
struct Peaks {
    samples: u64,
    /// KV pages by the kernel's account.
    kernel_bytes: Option<u64>,
    /// KV pages by the ledger.
    committed_bytes: u64,
    running: usize,
    waiting: usize,
}

/// How long the engine went on for clients that had hung up.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
struct Leaving {
    clients: usize,
    /// From hanging up until the engine had let go, at most.
    milliseconds: f64,
    /// Steps that ended meanwhile, at most.
    steps: u64,
}

pub(crate) fn run(args: &BenchSoakArgs) -> Result<()> {
    check(&args.lengths)?;
    ensure!(
        (0.0..=1.0).contains(&args.hang_up),
        output::Usage("--hang-up must be 0 to 1".to_owned())
    );
    ensure!(
        args.engine.budget.is_some() || args.clients.is_some(),
        output::Usage("give --budget, or --clients where only the system limits".to_owned())
    );
    let most_clients = args.clients.map_or(4096, usize::from);
    let server = start(&args.model, &args.service, &args.engine, most_clients + 8)?;
    let report = soak(args, server.address(), &server.engine())?;
    server.shutdown();
    if args.json {
        output::json(&report)?;
    } else {
        output::print(|out| print(out, &report))?;
    }
    ensure!(report.passed, "the server did not keep to its budget");
    Ok(())
}

fn soak(args: &BenchSoakArgs, address: SocketAddr, engine: &Handle) -> Result<Report> {
    let client = Client::new(&format!("http://{address}"), None, &args.lengths)?;
    let shape = shape(&client, &args.lengths, args.shared_prefix)?;
    let holds = budget_holds(args, &client, shape, &engine.status());
    let clients = args.clients.map_or(2 * holds, usize::from);
    let load = Load {
        client,
        shape,
        hang_up: args.hang_up,
        until: Instant::now() + Duration::from_secs(args.seconds.get()),
    };
    let (running, start) = (AtomicBool::new(true), Instant::now());
    let (requests, leaving, peaks) = thread::scope(|scope| {
        let watch = scope.spawn(|| watch(engine, &running));
        let requests = load.ask_again_and_again(clients);
        let leaving = settled(engine).map(|_| load.leave(clients, engine));
        running.store(false, Relaxed);
        (requests, leaving, watch.join().unwrap_or_default())
    });
    let (requests, leaving) = (requests, leaving?);
    let after = settled(engine)?;
    let mut report = Report {
        machine: Machine::this(),
        model: load.client.model().to_owned(),
        clients,
        budget_holds: holds,
        seconds: start.elapsed().as_secs_f64(),
        budget_bytes: after.budget.plan.budget_bytes,
        kv_bytes: after.budget.plan.parts.kv_bytes,
        requests,
        generated_tokens: after.counters.generated_tokens,
        preemptions: after.counters.preemptions,
        evicted_groups: after.counters.evicted_groups,
        evicted_resume_points: after.counters.evicted_resume_points,
        peaks,
        leaving,
        left_bytes: mapped(&after),
        cached_bytes: after.ledger.pinned_only.get(),
        group_bytes: after.cache.groups as u64 * after.pages.group.get(),
        resume_point_bytes: after.cache.resume_points as u64 * after.pages.resume_point.get(),
        passed: false,
    };
    report.passed = report.holds();
    Ok(report)
}

/// How many of the longest requests fit the budget at once, what they share held once.
fn budget_holds(args: &BenchSoakArgs, client: &Client, shape: Shape, status: &Status) -> usize {
    let most = |mean: usize| (mean as f64 * (1.0 + args.lengths.spread)).ceil() as usize;
    let own = most(args.lengths.prompt_tokens.get()) + most(args.lengths.reply_tokens.get());
    let group_tokens = status.pages.group_tokens.max(1);
    let shared = client.tokens(&load::shared(shape)).unwrap_or(0) / group_tokens;
    let group = status.pages.group.get();
    let left = status.budget.plan.parts.kv_bytes;
    let left = left.saturating_sub(shared as u64 * group);
    // With what it keeps beside groups.
    let beside = status.pages.windows.get() + status.pages.states.get();
    let each = own.div_ceil(group_tokens) as u64 * group + beside;
    ((left / each.max(1)) as usize).max(1)
}

/// What clients ask, and how long.
struct Load {
    client: Client,
    shape: Shape,
    hang_up: f64,
    until: Instant,
}

impl Load {
    /// Lets every client ask, one request after the other, until the time is up.
    fn ask_again_and_again(&self, clients: usize) -> Requests {
        let total = Mutex::new(Requests::default());
        thread::scope(|scope| {
            for number in 0..clients {
                let total = &total;
                scope.spawn(move || {
                    let requests = self.ask(number);
                    total.lock().expect("no thread panics").add(requests);
                });
            }
        });
        total.into_inner().expect("no thread panics")
    }

    fn ask(&self, number: usize) -> Requests {
        let mut requests = Requests::default();
        for round in 0.. {
            if Instant::now() >= self.until {
                break;
            }
            let question = load::question(self.shape, (number as u64) << 32 | round);
            let hangs_up = load::chance(self.hang_up, &question);
            let mut pieces = 0;
            let outcome = self.client.complete(&question, || {
                pieces += 1;
                match hangs_up && 2 * pieces > question.max_tokens {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            });
            self.pause(requests.note(outcome));
        }
        requests
    }

    /// Waits as a server that is full asks for, but not beyond the end.
    fn pause(&self, time: Duration) {
        let left = self.until.saturating_duration_since(Instant::now());
        thread::sleep(time.min(left));
    }

    /// Lets every client ask once more. When the replies that run have begun, every second of them
    /// is hung up.
    fn leave(&self, clients: usize, engine: &Handle) -> Leaving {
        let half = Half {
            flowing: AtomicUsize::new(0),
            go: AtomicBool::new(false),
            attached: AtomicU64::new(clients as u64),
            engine,
        };
        let ask = |number: usize| {
            // Requests the first part did not come to.
            let question = load::question(self.shape, u64::MAX - number as u64);
            let mut place = None;
            let outcome = self.client.complete(&question, || {
                half.leaves(*place.get_or_insert_with(|| half.flowing.fetch_add(1, Relaxed)))
            });
            half.attached.fetch_sub(1, Relaxed);
            matches!(outcome, Ok(Outcome::HungUp)).then(|| half.let_go())
        };
        thread::scope(|scope| {
            let ask = &ask;
            let threads: Vec<_> = (0..clients)
                .map(|number| scope.spawn(move || ask(number)))
                .collect();
            half.wait_for_all();
            half.go.store(true, Relaxed);
            let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
            joined
                .filter_map(|waited| waited.expect("no thread panics"))
                .fold(Leaving::default(), Leaving::and)
        })
    }
}

/// Clients of which every second one leaves on a sign.
struct Half<'a> {
    /// Replies that have begun.
    flowing: AtomicUsize,
    go: AtomicBool,
    /// Clients that neither have hung up nor have their reply.
    attached: AtomicU64,
    engine: &'a Handle,
}

impl Half<'_> {
    /// Waits until every reply that runs has begun, or some have ended already.
    fn wait_for_all(&self) {
        let (until, finished) = (
            Instant::now() + PATIENCE,
            self.engine.status().counters.finished,
        );
        let begun = |status: &Status| {
            let flowing = self.flowing.load(Relaxed);
            flowing >= 2 && flowing >= status.running || status.counters.finished > finished
        };
        while !begun(&self.engine.status()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn leaves(&self, place: usize) -> ControlFlow<()> {
        match self.go.load(Relaxed) && place.is_multiple_of(2) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// Waits until the engine holds no more requests than there are clients. (One that a client gave up
    /// may have come to its end by itself, so it is not those cancelled that count.)
    fn let_go(&self) -> Leaving {
        let (at, steps) = (Instant::now(), self.engine.status().counters.steps);
        loop {
            let counters = self.engine.status().counters;
            let over = counters.finished + counters.cancelled + counters.failed;
            let held = counters.requests.saturating_sub(over);
            let waited = at.elapsed();
            if held <= self.attached.load(Relaxed) || waited > PATIENCE {
                return Leaving {
                    clients: 1,
                    milliseconds: waited.as_secs_f64() * 1e3,
                    steps: counters.steps - steps,
                };
            }
            thread::sleep(Duration::from_micros(200));
        }
    }
}

impl Leaving {
    /// Both, and the longer wait.
    fn and(self, other: Self) -> Self {
        Self {
            clients: self.clients + other.clients,
            milliseconds: self.milliseconds.max(other.milliseconds),
            steps: self.steps.max(other.steps),
        }
    }
}

impl Requests {
    fn add(&mut self, other: Self) {
        self.finished += other.finished;
        self.refused += other.refused;
        self.refused_bare += other.refused_bare;
        self.hung_up += other.hung_up;
        self.failed += other.failed;
    }

    /// Counts an outcome. Returns how long to wait before the next request.
    fn note(&mut self, outcome: Result<Outcome>) -> Duration {
        match outcome {
            Ok(Outcome::Replied(_)) => self.finished += 1,
            Ok(Outcome::HungUp) => self.hung_up += 1,
            Ok(Outcome::Refused {
                retry_after: Some(time),
            }) => {
                self.refused += 1;
                return time;
            }
            Ok(Outcome::Refused { retry_after: None }) => {
                self.refused_bare += 1;
                return UNTOLD_PAUSE;
            }
            Err(error) => {
                tell!("a request failed: {}", output::with_causes(&error));
                self.failed += 1;
            }
        }
        Duration::ZERO
    }
}

impl Report {
    /// Whether every request ended as it should, the budget held, and nothing was left.
    fn holds(&self) -> bool {
        let kernel = self.peaks.kernel_bytes.unwrap_or(0);
        self.requests.failed == 0
            && self.requests.refused_bare == 0
            && kernel.max(self.peaks.committed_bytes) <= self.kv_bytes
            && self.leaving.milliseconds < PATIENCE.as_secs_f64() * 1e3
            && self.left_bytes == 0
            && (self.group_bytes..=self.group_bytes + self.resume_point_bytes)
                .contains(&self.cached_bytes)
    }
}

/// Follows the kernel's and the engine's accounts until told to end.
fn watch(engine: &Handle, running: &AtomicBool) -> Peaks {
    let mut peaks = Peaks::default();
    while running.load(Relaxed) {
        let status = engine.status();
        peaks.samples += 1;
        peaks.kernel_bytes = peaks.kernel_bytes.max(resident::kv_blocks());
        peaks.committed_bytes = peaks.committed_bytes.max(engine.ledger().committed.get());
        peaks.running = peaks.running.max(status.running);
        peaks.waiting = peaks.waiting.max(status.waiting);
        thread::sleep(PERIOD);
    }
    peaks
}

/// Waits until no request is left.
fn settled(engine: &Handle) -> Result<Status> {
    let until = Instant::now() + PATIENCE;
    loop {
        let status = engine.status();
        let counters = status.counters;
        let over = counters.finished + counters.cancelled + counters.failed;
        if over == counters.requests && status.running == 0 && status.waiting == 0 {
            return Ok(status);
        }
        ensure!(Instant::now() < until, "the service does not come to rest");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Bytes of pages that sessions map.
fn mapped(status: &Status) -> u64 {
    status.ledger.unique.get() + status.ledger.shared.get()
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let (requests, peaks) = (&report.requests, &report.peaks);
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "{}: {} clients for {:.0} s; the budget holds {} of their longest requests at once",
        report.model, report.clients, report.seconds, report.budget_holds
    )?;
    writeln!(
        out,
        "requests: {} finished, {} told to come back, {} hung up, {} failed, {} refused without a time",
        requests.finished,
        requests.refused,
        requests.hung_up,
        requests.failed,
        requests.refused_bare
    )?;
    writeln!(
        out,
        "generated {} tokens; {} running and {} waiting at most; {} preemptions, {} groups and {} resume points evicted",
        report.generated_tokens,
        peaks.running,
        peaks.waiting,
        report.preemptions,
        report.evicted_groups,
        report.evicted_resume_points
    )?;
    writeln!(
        out,
        "KV pages at most {} by the kernel, {} by the ledger, of {} ({} readings)",
        peaks
            .kernel_bytes
            .map_or("unknown".to_owned(), output::bytes),
        output::bytes(peaks.committed_bytes),
        output::bytes(report.kv_bytes),
        peaks.samples
    )?;
    writeln!(
        out,
        "{} clients hung up at once: let go after {:.1} ms and {} steps at most",
        report.leaving.clients, report.leaving.milliseconds, report.leaving.steps
    )?;
    writeln!(
        out,
        "left: {} mapped, {} in the prefix cache, whose groups are {} and resume points {} at most",
        output::bytes(report.left_bytes),
        output::bytes(report.cached_bytes),
        output::bytes(report.group_bytes),
        output::bytes(report.resume_point_bytes)
    )?;
    Ok(())
}
