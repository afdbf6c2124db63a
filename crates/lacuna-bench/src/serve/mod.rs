//! `lacuna bench serve`: many sessions against a server, this program's or another's.

pub(crate) mod client;
mod load;
mod memory;
pub(crate) mod soak;
mod timing;

use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lacuna_cli::{EngineArgs, ModelArgs, ServiceArgs, open_to_run, output, served_name, tell};
use lacuna_engine::Handle;
use lacuna_server::{Server, ServerConfig};
use serde::Serialize;

use self::client::{Client, Outcome, Reply};
use self::load::{Arrival, Shape};
use self::memory::{Kv, Seen};
use self::timing::{Donor, Steady};
use crate::arguments::{BenchServeArgs, LengthArgs};
use crate::machine::Machine;
use crate::samples::Timing;

/// Words of the prompt that tells how many tokens a word is.
const SAMPLE_WORDS: usize = 64;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    sessions: usize,
    rate_per_second: f64,
    finished: usize,
    refused: usize,
    failed: usize,
    /// From the first request to the last reply.
    seconds: f64,
    prompt_tokens: u64,
    generated_tokens: u64,
    generated_tokens_per_second: f64,
    first_token: Option<Timing>,
    inter_token: Option<Timing>,
    /// The time in which all replies flowed; `None` if there was none.
    steady: Option<Steady>,
    /// The second request on the first one's pages; with `--in-turn`.
    donor: Option<Donor>,
    /// Prompt tokens the server found in its cache, of all; `None` if it does not say.
    hit_rate: Option<f64>,
    /// The most KV memory committed at once; `None` if the server does not say.
    peak_committed_bytes: Option<u64>,
    /// Pages copied because a shared one was written; `None` if the server does not say.
    copied_pages: Option<u64>,
    /// KV memory when most of it was mapped; `None` if the server does not say.
    kv: Option<Kv>,
}

pub(crate) fn run(args: &BenchServeArgs) -> Result<()> {
    ensure!(
        args.rate >= 0.0 && args.rate.is_finite(),
        output::Usage("--rate must be 0 or more".to_owned())
    );
    check(&args.lengths)?;
    let own = args.model.as_deref().map(|model| {
        let connections = args.sessions.get() + 8;
        start(model, &args.service, &args.engine, connections)
    });
    let own = own.transpose()?;
    let url = match (&own, &args.url) {
        (Some(server), _) => format!("http://{}", server.address()),
        (None, Some(url)) => url.clone(),
        (None, None) => return Err(output::Usage("give --model or --url".to_owned()).into()),
    };
    let client = Client::new(&url, args.api_key.as_deref(), &args.lengths)?;
    let report = measure(&client, args, own.as_ref().map(Server::engine).as_ref())?;
    if let Some(server) = own {
        server.shutdown();
    }
    if args.json {
        return output::json(&report);
    }
    output::print(|out| print(out, &report))?;
    Ok(())
}

fn check(lengths: &LengthArgs) -> Result<()> {
    ensure!(
        (0.0..=1.0).contains(&lengths.spread),
        output::Usage("--spread must be 0 to 1".to_owned())
    );
    ensure!(
        (0.0..=2.0).contains(&lengths.temperature),
        output::Usage("--temp must be 0 to 2".to_owned())
    );
    Ok(())
}

/// A server in this process, on a port of its own.
pub(crate) fn start(
    model: &str,
    settings: &ServiceArgs,
    engine: &EngineArgs,
    connections: usize,
) -> Result<Server> {
    let files = ModelArgs {
        model: model.to_owned(),
        json: true,
        eyes: lacuna_cli::EyesArgs::default(),
    };
    let mut config = ServerConfig {
        address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        model_name: served_name(model),
        service: settings.open(engine)?,
        ..ServerConfig::default()
    };
    config.limits.connections = config.limits.connections.max(connections);
    // What is measured is how long it takes, however slow the machine is.
    config.limits.request = Duration::from_secs(24 * 60 * 60);
    let engine = config.service.engine_config();
    Ok(Server::start(open_to_run(&files, &engine)?, config)?)
}

fn measure(client: &Client, args: &BenchServeArgs, own: Option<&Handle>) -> Result<Report> {
    let shape = shape(client, &args.lengths, args.shared_prefix)?;
    let shape = Shape {
        sessions: args.sessions.get(),
        rate: args.rate,
        ..shape
    };
    let arrivals = load::arrivals(shape);
    let shared_tokens = client.tokens(&load::shared(shape)).unwrap_or(0);
    let running = AtomicBool::new(true);
    let (outcomes, seconds, seen) = thread::scope(|scope| {
        let watch = scope.spawn(|| memory::watch(client, shared_tokens, own, &running));
        let (outcomes, seconds) = send(client, &arrivals, args.in_turn);
        running.store(false, Ordering::Relaxed);
        (outcomes, seconds, watch.join().unwrap_or_default())
    });
    Ok(summarise(client, args, outcomes, seconds, &seen))
}

/// One session of `lengths`, in words of the server's vocabulary.
fn shape(client: &Client, lengths: &LengthArgs, shared_tokens: usize) -> Result<Shape> {
    let tokens_per_word = tokens_per_word(client)?;
    let words = |tokens: usize| (tokens as f64 / tokens_per_word).round() as usize;
    let mut shape = Shape {
        sessions: 1,
        shared_words: words(shared_tokens),
        own_words: words(lengths.prompt_tokens.get()).max(1),
        reply_tokens: lengths.reply_tokens.get(),
        spread: lengths.spread,
        rate: 0.0,
        seed: lengths.seed,
    };
    // Words of these prompts may have more or fewer tokens than those of the sample.
    if let Some(counted @ 1..) = client.tokens(&load::shared(shape)) {
        let factor = shared_tokens as f64 / counted as f64;
        shape.shared_words = (shape.shared_words as f64 * factor).ceil() as usize;
    }
    Ok(shape)
}

/// Tokens of a word, by the server's own count; also the server's first, untimed request.
fn tokens_per_word(client: &Client) -> Result<f64> {
    let sample = Arrival {
        at: Duration::ZERO,
        prompt: load::sample(SAMPLE_WORDS),
        max_tokens: 1,
    };
    match client.complete(&sample, || ControlFlow::Continue(()))? {
        Outcome::Replied(Reply { prompt_tokens, .. }) if prompt_tokens > 0 => {
            Ok(prompt_tokens as f64 / SAMPLE_WORDS as f64)
        }
        _ => anyhow::bail!("the server does not count tokens (`stream_options.include_usage`)"),
    }
}

/// Lets requests go one after the other, as far as they are to go in turn.
struct Turns {
    begun: Mutex<usize>,
    changed: Condvar,
}

impl Turns {
    /// Requests that go before all others.
    const LEADERS: usize = 2;

    /// Waits until it is the turn of request `number`. Returns when that was.
    fn wait(&self, number: usize) -> Instant {
        let before = number.min(Self::LEADERS);
        let begun = self.begun.lock().expect("no thread panics");
        let waited = self.changed.wait_while(begun, |begun| *begun < before);
        drop(waited.expect("no thread panics"));
        Instant::now()
    }

    /// Request `number` has its first text, or has ended without any.
    fn begin(&self, number: usize) {
        let mut begun = self.begun.lock().expect("no thread panics");
        *begun = (*begun).max(number + 1);
        self.changed.notify_all();
    }
}

/// Sends every request at its time, each from a thread of its own. Outcomes are in order.
fn send(client: &Client, arrivals: &[Arrival], in_turn: bool) -> (Vec<Result<Outcome>>, f64) {
    let turns = Turns {
        begun: Mutex::new(if in_turn { 0 } else { Turns::LEADERS }),
        changed: Condvar::new(),
    };
    let start = Instant::now();
    let ask = |number: usize, arrival: &Arrival| {
        let from = turns.wait(number);
        let start = if in_turn { from } else { start };
        thread::sleep(arrival.at.saturating_sub(start.elapsed()));
        let outcome = client.complete(arrival, || {
            turns.begin(number);
            ControlFlow::Continue(())
        });
        turns.begin(number);
        outcome
    };
    let outcomes = thread::scope(|scope| {
        let ask = &ask;
        let asked = arrivals.iter().enumerate();
        let threads: Vec<_> = asked
            .map(|(number, arrival)| scope.spawn(move || ask(number, arrival)))
            .collect();
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        joined
            .map(|outcome| outcome.expect("no thread panics"))
            .collect()
    });
    (outcomes, start.elapsed().as_secs_f64())
}

fn summarise(
    client: &Client,
    args: &BenchServeArgs,
    outcomes: Vec<Result<Outcome>>,
    seconds: f64,
    seen: &Seen,
) -> Report {
    let (mut replies, mut refused, mut failed) = (Vec::new(), 0, 0);
    for outcome in outcomes {
        match outcome {
            Ok(Outcome::Replied(reply)) => replies.push(reply),
            Ok(Outcome::Refused { .. }) => refused += 1,
            Ok(Outcome::HungUp) => {}
            Err(error) => {
                tell!("a request failed: {}", output::with_causes(&error));
                failed += 1;
            }
        }
    }
    let (first_token, inter_token) = timing::samples(&replies);
    let donor = match &replies[..] {
        // With a gap the first two would not be the first two requests.
        [first, second, ..] if args.in_turn && refused + failed == 0 => Donor::of(first, second),
        _ => None,
    };
    let prompt_tokens: u64 = replies.iter().map(|reply| reply.prompt_tokens).sum();
    let generated_tokens: u64 = replies.iter().map(|reply| reply.generated_tokens).sum();
    let reused: Option<u64> = replies.iter().map(|reply| reply.reused_tokens).sum();
    Report {
        machine: Machine::this(),
        model: client.model().to_owned(),
        sessions: args.sessions.get(),
        rate_per_second: args.rate,
        finished: replies.len(),
        refused,
        failed,
        seconds,
        prompt_tokens,
        generated_tokens,
        generated_tokens_per_second: generated_tokens as f64 / seconds,
        first_token,
        inter_token,
        steady: Steady::of(&replies),
        donor,
        hit_rate: reused.map(|reused| reused as f64 / prompt_tokens.max(1) as f64),
        peak_committed_bytes: seen.peak_committed,
        copied_pages: seen.copied_pages(),
        kv: seen.kv,
    }
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "{}: {} sessions at {} per second: {} finished, {} refused, {} failed in {:.1} s",
        report.model,
        report.sessions,
        report.rate_per_second,
        report.finished,
        report.refused,
        report.failed,
        report.seconds,
    )?;
    writeln!(
        out,
        "generated {} tokens, {:.1} t/s; prompts {} tokens, {} from the cache",
        report.generated_tokens,
        report.generated_tokens_per_second,
        report.prompt_tokens,
        report.hit_rate.map_or("unknown".to_owned(), |rate| format!(
            "{:.1} %",
            100.0 * rate
        )),
    )?;
    print_times(out, report)?;
    if let Some(bytes) = report.peak_committed_bytes {
        writeln!(out, "KV committed at most: {}", output::bytes(bytes))?;
    }
    if let Some(kv) = &report.kv {
        print_kv(out, kv, report.copied_pages)?;
    }
    Ok(())
}

fn print_times(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let steady = report.steady.map(|steady| steady.inter_token);
    for (name, timing) in [
        ("first token", report.first_token),
        ("inter-token", report.inter_token),
        ("in the steady batch", steady),
    ] {
        if let Some(timing) = timing {
            writeln!(
                out,
                "{name}: median {:.1} ms, p99 {:.1} ms, {:.2}x",
                timing.median_us / 1e3,
                timing.p99_us / 1e3,
                timing.p99_us / timing.median_us,
            )?;
        }
    }
    if let Some(steady) = report.steady {
        writeln!(
            out,
            "steady batch: {} replies for {:.1} s, {:.1} t/s",
            steady.replies, steady.seconds, steady.tokens_per_second
        )?;
    }
    if let Some(donor) = report.donor {
        writeln!(
            out,
            "first token of the first request: {:.1} ms; of the second, {}: {:.1} ms, {:.1} %",
            donor.first_ms,
            match donor.first_was_running {
                true => "while the first ran",
                false => "after the first had ended",
            },
            donor.second_ms,
            100.0 * donor.second_over_first,
        )?;
    }
    Ok(())
}

fn print_kv(out: &mut dyn Write, kv: &Kv, copied_pages: Option<u64>) -> io::Result<()> {
    writeln!(
        out,
        "KV of {} sessions with {} tokens, {} of them shared: rows {}, mapped {}",
        kv.sessions,
        kv.tokens,
        kv.shared_tokens,
        output::bytes(kv.rows_bytes),
        output::bytes(kv.mapped_bytes),
    )?;
    writeln!(
        out,
        "  beyond rows: {:.2} pages per buffer and session, {:.2} at most; {} pages copied",
        kv.excess_pages,
        kv.most_excess_pages,
        copied_pages.unwrap_or(0),
    )?;
    writeln!(
        out,
        "  committed {}: {} cached for nobody, {} idle",
        output::bytes(kv.committed_bytes),
        output::bytes(kv.cached_bytes),
        output::bytes(kv.idle_bytes),
    )?;
    if let Some(kernel) = kv.kernel {
        writeln!(
            out,
            "  by the kernel {} where the ledger says {}",
            output::bytes(kernel.kernel_bytes),
            output::bytes(kernel.ledger_bytes),
        )?;
    }
    Ok(())
}
