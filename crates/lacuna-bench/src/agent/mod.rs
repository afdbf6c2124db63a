//! `lacuna bench agent`: the turns of an agent's session, one after the other, and what each finds computed.

mod trace;

use std::io::{self, Write};

use anyhow::{Result, bail, ensure};
use lacuna_cli::output;
use serde::Serialize;

use self::trace::{Form, Trace};
use crate::arguments::BenchAgentArgs;
use crate::machine::Machine;
use crate::serve::client::{Client, Outcome, Reply};
use crate::serve::start;

/// Connections that the server is to take: one at a time asks, and some probe.
const CONNECTIONS: usize = 8;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    /// Tokens of each reply at most.
    reply_tokens: usize,
    turns: Vec<Turn>,
}

#[derive(Serialize)]
struct Turn {
    /// Counted from one.
    turn: usize,
    /// `None` if the server does not count them.
    prompt_tokens: Option<u64>,
    /// Those that it found computed; `None` if it does not say.
    reused_tokens: Option<u64>,
    /// Those as a part of the turn's before prompt, which this one begins with.
    reused_of_last_prompt: Option<f64>,
    /// From asking to the first of the reply; `None` if it said nothing that is shown.
    first_token_seconds: Option<f64>,
    /// From asking to the reply's end.
    seconds: f64,
}

pub(crate) fn run(args: &BenchAgentArgs) -> Result<()> {
    let form = match args.tools_as_text {
        true => Form::Text,
        false => Form::Native,
    };
    let trace = Trace::new(args.tokens.get(), form)?;
    let own = args.model.as_deref().map(|model| {
        let (service, engine) = (&args.service, &args.engine);
        start(model, service, engine, CONNECTIONS)
    });
    let own = own.transpose()?;
    let url = match (&own, &args.url) {
        (Some(server), _) => format!("http://{}", server.address()),
        (None, Some(url)) => url.clone(),
        (None, None) => return Err(output::Usage("give --model or --url".to_owned()).into()),
    };
    let client = Client::connect(&url, args.api_key.as_deref())?;
    let report = measure(&client, &trace, args.reply_tokens.get())?;
    if let Some(server) = own {
        server.shutdown();
    }
    if args.json {
        return output::json(&report);
    }
    output::print(|out| print(out, &report))?;
    Ok(())
}

fn measure(client: &Client, trace: &Trace, reply_tokens: usize) -> Result<Report> {
    let mut turns: Vec<Turn> = Vec::with_capacity(trace.turns());
    for number in 0..trace.turns() {
        let mut request = trace.request(number);
        request["max_tokens"] = reply_tokens.into();
        let reply = match client.chat(request)? {
            Outcome::Replied(reply) => reply,
            Outcome::Refused { .. } | Outcome::HungUp => bail!("the server is full"),
        };
        turns.push(Turn::of(number + 1, &reply, turns.last()));
    }
    let said = turns.iter().any(|turn| turn.first_token_seconds.is_some());
    ensure!(said, "the server said nothing in any turn");
    Ok(Report {
        machine: Machine::this(),
        model: client.model().to_owned(),
        reply_tokens,
        turns,
    })
}

impl Turn {
    fn of(turn: usize, reply: &Reply, last: Option<&Self>) -> Self {
        let counted = (reply.prompt_tokens > 0).then_some(reply.prompt_tokens);
        let last = last.and_then(|last| last.prompt_tokens);
        let part = |reused: u64| last.map(|last| reused as f64 / last as f64);
        Self {
            turn,
            prompt_tokens: counted,
            reused_tokens: reply.reused_tokens,
            reused_of_last_prompt: reply.reused_tokens.and_then(part),
            first_token_seconds: reply.first_token().map(|time| time.as_secs_f64()),
            seconds: reply.seconds(),
        }
    }
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "{}: an agent's session, replies of up to {} tokens",
        report.model, report.reply_tokens
    )?;
    writeln!(
        out,
        "{:>4} {:>8} {:>8} {:>13} {:>13}",
        "turn", "prompt", "reused", "of the last's", "first token"
    )?;
    for turn in &report.turns {
        let tokens = |count: Option<u64>| count.map_or("-".to_owned(), |count| count.to_string());
        let part = turn.reused_of_last_prompt;
        let first = turn.first_token_seconds;
        writeln!(
            out,
            "{:>4} {:>8} {:>8} {:>13} {:>13}",
            turn.turn,
            tokens(turn.prompt_tokens),
            tokens(turn.reused_tokens),
            part.map_or("-".to_owned(), |part| format!("{:.1} %", 100.0 * part)),
            first.map_or("-".to_owned(), |seconds| format!("{seconds:.3} s")),
        )?;
    }
    Ok(())
}
