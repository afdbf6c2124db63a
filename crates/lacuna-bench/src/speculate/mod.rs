//! `lacuna bench speculate`: what guessing tokens gains, on an edit of code, a summary and a chat.
//!
//! Each text is written without guesses and with them, in turns, so that what else the machine does falls on both alike.
//! They must be the same, token for token; the figures are medians.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lacuna_cli::{open_to_run, output, with_draft};
use lacuna_engine::{
    Drafts, Engine, EngineConfig, Event, Generation, Limits, Request, Sampling, Service,
    ServiceConfig, Speculation, Stream,
};
use lacuna_models::Model;
use lacuna_text::template::Message;
use lacuna_text::tokenizer::EncodeLimits;
use serde::Serialize;

use crate::arguments::BenchSpeculateArgs;
use crate::machine::Machine;
use crate::samples::median;

/// What is asked: copying much, some and nothing of it is a good answer.
const FIXTURES: [(&str, &str); 3] = [
    ("edit", include_str!("fixtures/edit.txt")),
    ("summary", include_str!("fixtures/summary.txt")),
    ("chat", include_str!("fixtures/chat.txt")),
];

/// A prompt, and what replies to it may take.
struct Task {
    name: String,
    text: &'static str,
    /// The tokens that a reply is made of, far likelier than all others; empty for any.
    choices: Arc<[(u32, f32)]>,
}

impl Task {
    /// What is asked for: the texts, or replies of few tokens.
    fn all(args: &BenchSpeculateArgs, vocabulary: usize) -> Result<Vec<Self>> {
        if args.choices.is_empty() {
            let texts = FIXTURES.map(|(name, text)| Self {
                name: name.to_owned(),
                text,
                choices: Arc::default(),
            });
            return Ok(texts.into());
        }
        let tasks = args.choices.iter().map(|&count| {
            // From the middle, where no vocabulary has what ends a text.
            let first = vocabulary / 2;
            let last = first.saturating_add(count.get());
            ensure!(
                last <= vocabulary,
                output::Usage(format!(
                    "--choices {count} is more than half of the vocabulary"
                ))
            );
            let tokens = (first..last).map(|token| (token as u32, MOST_BIAS));
            Ok(Self {
                name: format!("1 of {count}"),
                text: FIXTURES[2].1,
                choices: tokens.collect(),
            })
        });
        tasks.collect()
    }
}

/// The most that a token can be made likelier by: e^100 times.
const MOST_BIAS: f32 = 100.0;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    threads: Option<usize>,
    speculation: String,
    draft_model: Option<String>,
    temperature: f32,
    rounds: usize,
    rows: Vec<Row>,
}

/// One kind of text, written by one sequence or by several at once.
#[derive(Serialize)]
struct Row {
    fixture: String,
    sequences: usize,
    prompt_tokens: usize,
    /// Of one sequence.
    tokens: usize,
    /// After the first token for one sequence, with prompts for several; medians.
    plain_tokens_per_second: f64,
    tokens_per_second: f64,
    /// The median of what rounds gained.
    speedup: f64,
    /// Over all rounds, whoever guessed.
    draft_tokens: u64,
    accepted_tokens: u64,
    /// Of these, those of a draft model.
    draft_model_tokens: u64,
    draft_model_accepted_tokens: u64,
}

impl Row {
    fn with(self, drafts: Drafts) -> Self {
        let all = drafts.all();
        Self {
            draft_tokens: self.draft_tokens + all.draft_tokens,
            accepted_tokens: self.accepted_tokens + all.accepted_tokens,
            draft_model_tokens: self.draft_model_tokens + drafts.model.draft_tokens,
            draft_model_accepted_tokens: self.draft_model_accepted_tokens
                + drafts.model.accepted_tokens,
            ..self
        }
    }
}

/// What one way to write a text took.
struct Written {
    tokens: Vec<Vec<u32>>,
    tokens_per_second: f64,
}

pub(crate) fn run(args: &BenchSpeculateArgs) -> Result<()> {
    ensure!(
        args.speculate != Speculation::Off || args.draft.draft_model.is_some(),
        output::Usage("--speculate off without --draft-model leaves nothing to compare".to_owned())
    );
    let plain = EngineConfig {
        speculation: Speculation::Off,
        ..args.engine.config()
    };
    let guessing = EngineConfig {
        speculation: args.speculate,
        ..plain.clone()
    };
    let guessing = with_draft(&args.draft, guessing)?;
    let model = open_to_run(&args.model, &guessing)?;
    let mut rows = Vec::new();
    let tasks = Task::all(args, model.spec().vocabulary)?;
    for task in &tasks {
        rows.push(alone(&model, [&plain, &guessing], task, args)?);
    }
    if args.sequences.get() > 1 {
        for task in &tasks {
            rows.push(together(&model, [&plain, &guessing], task, args)?);
        }
    }
    let report = Report {
        machine: Machine::this(),
        model: args.model.model.clone(),
        threads: args.engine.cpu.threads.map(usize::from),
        speculation: guessing.speculation.to_string(),
        draft_model: args.draft.draft_model.clone(),
        temperature: args.temperature,
        rounds: args.rounds.get(),
        rows,
    };
    match args.model.json {
        true => output::json(&report),
        false => print(&report),
    }
}

/// The prompt's tokens, by the model's template if it has one.
fn prompt(model: &Model, text: &str) -> Result<Vec<u32>> {
    let messages = [Message::new("user", text.trim_end())];
    let prompt = model.conversation(&messages, None, &EncodeLimits::default())?;
    Ok(prompt.tokens)
}

fn sampling(args: &BenchSpeculateArgs, task: &Task, seed: u64) -> Sampling {
    Sampling {
        temperature: args.temperature,
        seed,
        logit_bias: Arc::clone(&task.choices),
        ..Sampling::default()
    }
}

fn limits(args: &BenchSpeculateArgs) -> Limits {
    Limits {
        max_tokens: Some(args.tokens.get()),
        ..Limits::default()
    }
}

/// Times of both ways in turns, and what one of them gains.
#[derive(Default)]
struct Rounds {
    plain: Vec<f64>,
    guessing: Vec<f64>,
    gains: Vec<f64>,
}

impl Rounds {
    /// # Errors
    /// When the texts are not the same.
    fn push(&mut self, fixture: &str, [plain, guessing]: [Written; 2]) -> Result<()> {
        ensure!(
            plain.tokens == guessing.tokens,
            "{fixture}: the text is another one with guesses; this is a fault, please report it"
        );
        self.gains
            .push(guessing.tokens_per_second / plain.tokens_per_second);
        self.plain.push(plain.tokens_per_second);
        self.guessing.push(guessing.tokens_per_second);
        Ok(())
    }

    fn row(self, task: &Task, sequences: usize) -> Result<Row> {
        let median = |values: Vec<f64>| median(values).context("one round at least");
        Ok(Row {
            fixture: task.name.clone(),
            sequences,
            prompt_tokens: 0,
            tokens: 0,
            plain_tokens_per_second: median(self.plain)?,
            tokens_per_second: median(self.guessing)?,
            speedup: median(self.gains)?,
            draft_tokens: 0,
            accepted_tokens: 0,
            draft_model_tokens: 0,
            draft_model_accepted_tokens: 0,
        })
    }
}

/// One sequence at a time, as `lacuna run` does it.
fn alone(
    model: &Arc<Model>,
    configs: [&EngineConfig; 2],
    task: &Task,
    args: &BenchSpeculateArgs,
) -> Result<Row> {
    let prompt = prompt(model, task.text)?;
    let (mut rounds, mut tokens) = (Rounds::default(), 0);
    let mut drafts = Vec::new();
    for round in 0..args.rounds.get() {
        let write = |config: &EngineConfig| -> Result<_> {
            // What it has learned is of no use to the next round.
            let mut engine = Engine::new(Arc::clone(model), config)?;
            let mut session = engine.session(sampling(args, task, round as u64))?;
            session.extend(&prompt);
            let mut generation = Generation::new(&mut engine, &mut session, limits(args))?;
            while generation.next_piece()?.is_some() {}
            let written = Written {
                tokens: vec![generation.tokens().to_vec()],
                tokens_per_second: generation.timing().decode_tokens_per_second(),
            };
            Ok((written, engine.drafts()))
        };
        let [(plain, _), (guessing, counts)] = in_turn(round, configs, write)?;
        tokens = plain.tokens[0].len();
        drafts.push(counts);
        rounds.push(&task.name, [plain, guessing])?;
    }
    let row = Row {
        prompt_tokens: prompt.len(),
        tokens,
        ..rounds.row(task, 1)?
    };
    Ok(drafts.into_iter().fold(row, Row::with))
}

/// Both ways, the one first in one round and the other in the next.
fn in_turn<T>(
    round: usize,
    [plain, guessing]: [&EngineConfig; 2],
    mut write: impl FnMut(&EngineConfig) -> Result<T>,
) -> Result<[T; 2]> {
    if round.is_multiple_of(2) {
        let first = write(plain)?;
        Ok([first, write(guessing)?])
    } else {
        let first = write(guessing)?;
        Ok([write(plain)?, first])
    }
}

/// Several sequences at once, as a server does it, each with words of its own before what is asked.
fn together(
    model: &Arc<Model>,
    configs: [&EngineConfig; 2],
    task: &Task,
    args: &BenchSpeculateArgs,
) -> Result<Row> {
    let sequences = args.sequences.get();
    let prompts =
        (1..=sequences).map(|number| prompt(model, &format!("Task {number}. {}", task.text)));
    let prompts = prompts.collect::<Result<Vec<_>>>()?;
    let (mut rounds, mut tokens) = (Rounds::default(), 0);
    let mut drafts = Vec::new();
    for round in 0..args.rounds.get() {
        let write = |config: &EngineConfig| -> Result<_> {
            let config = ServiceConfig {
                engine: config.clone(),
                max_running: sequences,
                ..ServiceConfig::default()
            };
            let service = Service::start(Arc::clone(model), config)?;
            let written = serve(&service, &prompts, (task, args))?;
            Ok((written, service.handle().status().counters.drafts))
        };
        let [(plain, _), (guessing, counts)] = in_turn(round, configs, write)?;
        tokens = plain.tokens.iter().map(Vec::len).sum::<usize>() / sequences;
        drafts.push(counts);
        rounds.push(&task.name, [plain, guessing])?;
    }
    let prompt_tokens: usize = prompts.iter().map(Vec::len).sum();
    let row = Row {
        prompt_tokens: prompt_tokens / sequences,
        tokens,
        ..rounds.row(task, sequences)?
    };
    Ok(drafts.into_iter().fold(row, Row::with))
}

/// Replies to all prompts at once, and how many tokens of them there are per second, prompts included in the time.
fn serve(
    service: &Service,
    prompts: &[Vec<u32>],
    (task, args): (&Task, &BenchSpeculateArgs),
) -> Result<Written> {
    let submit = |(number, prompt): (usize, &Vec<u32>)| {
        let request = Request {
            sampling: sampling(args, task, number as u64),
            limits: limits(args),
            ..Request::new(prompt.clone())
        };
        service.handle().submit(request)
    };
    let streams = prompts.iter().enumerate().map(submit);
    let streams: Vec<Stream> = streams.collect::<Result<_, _>>()?;
    let begun = Instant::now();
    let mut tokens = Vec::new();
    for mut stream in streams {
        let mut reply = Vec::new();
        while let Some(event) = stream.blocking_recv() {
            match event {
                Event::Token { token, .. } => reply.push(token),
                Event::Failed(failure) => return Err(failure.into()),
                _ => {}
            }
        }
        tokens.push(reply);
    }
    let count: usize = tokens.iter().map(Vec::len).sum();
    Ok(Written {
        tokens,
        tokens_per_second: count as f64 / begun.elapsed().as_secs_f64(),
    })
}

fn print(report: &Report) -> Result<()> {
    output::print(|out| {
        writeln!(out, "{}", report.machine.line())?;
        writeln!(
            out,
            "{}, {}{}, temperature {}, medians of {} rounds; the texts are the same",
            output::name(&report.model),
            report.speculation,
            match &report.draft_model {
                Some(name) => format!(", draft model {}", output::name(name)),
                None => String::new(),
            },
            report.temperature,
            report.rounds,
        )?;
        writeln!(
            out,
            "{:<10} {:>9} {:>7} {:>7} {:>10} {:>10} {:>8} {:>8} {:>8} {:>9} {:>8}",
            "text",
            "sequences",
            "prompt",
            "tokens",
            "plain t/s",
            "t/s",
            "speedup",
            "guessed",
            "right",
            "by draft",
            "right"
        )?;
        for row in &report.rows {
            writeln!(
                out,
                "{:<10} {:>9} {:>7} {:>7} {:>10.1} {:>10.1} {:>8.2} {:>8} {:>8} {:>9} {:>8}",
                row.fixture,
                row.sequences,
                row.prompt_tokens,
                row.tokens,
                row.plain_tokens_per_second,
                row.tokens_per_second,
                row.speedup,
                row.draft_tokens,
                row.accepted_tokens,
                row.draft_model_tokens,
                row.draft_model_accepted_tokens,
            )?;
        }
        Ok(())
    })
}
