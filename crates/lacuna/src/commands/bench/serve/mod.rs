//! `lacuna bench serve`: many sessions against a server, this program's or another's.

mod client;
mod load;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use lacuna_server::{Server, ServerConfig};
use serde::Serialize;
use serde_json::Value;

use self::client::{Client, Outcome, Reply};
use self::load::{Arrival, Shape};
use super::machine::Machine;
use super::samples::{Samples, Timing};
use crate::cli::{BenchServeArgs, ModelArgs};
use crate::commands::serve::{served_name, service};
use crate::output;

/// Words of the prompt that tells how many tokens a word is.
const SAMPLE_WORDS: usize = 64;
/// How often the server's memory is read.
const MEMORY_PERIOD: Duration = Duration::from_millis(50);

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
    /// Prompt tokens the server found in its cache, of all; `None` if it does not say.
    hit_rate: Option<f64>,
    /// The most KV memory committed at once; `None` if the server does not say.
    peak_committed_bytes: Option<u64>,
}

pub(crate) fn run(args: &BenchServeArgs) -> Result<()> {
    anyhow::ensure!(
        args.rate >= 0.0 && args.rate.is_finite(),
        output::Usage("--rate must be 0 or more".to_owned())
    );
    let own = args
        .model
        .as_deref()
        .map(|model| start(model, args))
        .transpose()?;
    let url = match (&own, &args.url) {
        (Some(server), _) => format!("http://{}", server.address()),
        (None, Some(url)) => url.clone(),
        (None, None) => return Err(output::Usage("give --model or --url".to_owned()).into()),
    };
    let report = measure(&Client::new(&url, args.api_key.as_deref())?, args)?;
    if let Some(server) = own {
        server.shutdown();
    }
    if args.json {
        return output::json(&report);
    }
    print(&report);
    Ok(())
}

/// A server in this process, on a port of its own.
fn start(model: &str, args: &BenchServeArgs) -> Result<Server> {
    let files = ModelArgs {
        model: model.to_owned(),
        json: args.json,
    };
    let mut config = ServerConfig {
        address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        model_name: served_name(model),
        service: service(&args.service, &args.engine),
        ..ServerConfig::default()
    };
    config.limits.connections = config.limits.connections.max(args.sessions.get() + 8);
    Ok(Server::start(crate::commands::open(&files)?, config)?)
}

fn measure(client: &Client, args: &BenchServeArgs) -> Result<Report> {
    let tokens_per_word = tokens_per_word(client)?;
    let words = |tokens: usize| (tokens as f64 / tokens_per_word).round() as usize;
    let arrivals = load::arrivals(Shape {
        sessions: args.sessions.get(),
        shared_words: words(args.shared_prefix),
        own_words: words(args.prompt_tokens.get()).max(1),
        reply_tokens: args.reply_tokens.get(),
        rate: args.rate,
        seed: args.seed,
    });
    let running = AtomicBool::new(true);
    let (outcomes, seconds, peak) = thread::scope(|scope| {
        let watch = scope.spawn(|| peak_committed(client, &running));
        let (outcomes, seconds) = send(client, &arrivals);
        running.store(false, Ordering::Relaxed);
        (outcomes, seconds, watch.join().unwrap_or(None))
    });
    Ok(summarise(client, args, outcomes, seconds, peak))
}

/// Tokens of a word, by the server's own count; also the server's first, untimed request.
fn tokens_per_word(client: &Client) -> Result<f64> {
    match client.complete(&load::sample(SAMPLE_WORDS), 1)? {
        Outcome::Replied(Reply { prompt_tokens, .. }) if prompt_tokens > 0 => {
            Ok(prompt_tokens as f64 / SAMPLE_WORDS as f64)
        }
        _ => anyhow::bail!("the server does not count tokens (`stream_options.include_usage`)"),
    }
}

/// Sends every request at its time, each from a thread of its own.
fn send(client: &Client, arrivals: &[Arrival]) -> (Vec<Result<Outcome>>, f64) {
    let outcomes = Mutex::new(Vec::with_capacity(arrivals.len()));
    let start = Instant::now();
    thread::scope(|scope| {
        for arrival in arrivals {
            let outcomes = &outcomes;
            scope.spawn(move || {
                thread::sleep(arrival.at.saturating_sub(start.elapsed()));
                let outcome = client.complete(&arrival.prompt, arrival.max_tokens);
                outcomes.lock().expect("no thread panics").push(outcome);
            });
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    (outcomes.into_inner().expect("no thread panics"), seconds)
}

/// Reads the server's accounts until told to end; nothing where there are none.
fn peak_committed(client: &Client, running: &AtomicBool) -> Option<u64> {
    let mut peak = None;
    while running.load(Ordering::Relaxed) {
        let map = client.get("/memory").ok()?;
        let committed = map
            .pointer("/ledger/committed_bytes")
            .and_then(Value::as_u64);
        peak = peak.max(Some(committed?));
        thread::sleep(MEMORY_PERIOD);
    }
    peak
}

fn summarise(
    client: &Client,
    args: &BenchServeArgs,
    outcomes: Vec<Result<Outcome>>,
    seconds: f64,
    peak_committed_bytes: Option<u64>,
) -> Report {
    let (mut first, mut gaps) = (Samples::default(), Samples::default());
    let (mut replies, mut refused, mut failed) = (Vec::new(), 0, 0);
    for outcome in outcomes {
        match outcome {
            Ok(Outcome::Replied(reply)) => replies.push(reply),
            Ok(Outcome::Refused) => refused += 1,
            Err(error) => {
                eprintln!("a request failed: {error:#}");
                failed += 1;
            }
        }
    }
    for reply in &replies {
        reply.first_token.iter().for_each(|&time| first.push(time));
        reply.gaps.iter().for_each(|&gap| gaps.push(gap));
    }
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
        first_token: first.timing(),
        inter_token: gaps.timing(),
        hit_rate: reused.map(|reused| reused as f64 / prompt_tokens.max(1) as f64),
        peak_committed_bytes,
    }
}

fn print(report: &Report) {
    println!("{}", report.machine.line());
    println!(
        "{}: {} sessions at {} per second: {} finished, {} refused, {} failed in {:.1} s",
        report.model,
        report.sessions,
        report.rate_per_second,
        report.finished,
        report.refused,
        report.failed,
        report.seconds,
    );
    println!(
        "generated {} tokens, {:.1} t/s; prompts {} tokens, {} from the cache",
        report.generated_tokens,
        report.generated_tokens_per_second,
        report.prompt_tokens,
        report.hit_rate.map_or("unknown".to_owned(), |rate| format!(
            "{:.1} %",
            100.0 * rate
        )),
    );
    for (name, timing) in [
        ("first token", report.first_token),
        ("inter-token", report.inter_token),
    ] {
        if let Some(timing) = timing {
            println!(
                "{name}: median {:.1} ms, p99 {:.1} ms",
                timing.median_us / 1e3,
                timing.p99_us / 1e3
            );
        }
    }
    if let Some(bytes) = report.peak_committed_bytes {
        println!("KV committed at most: {}", output::bytes(bytes));
    }
}
