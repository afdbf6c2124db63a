//! `lacuna run`: generate text from a prompt, or chat on a terminal.

mod chat;
mod conversation;
mod images;
mod typed;

use std::io::{self, IsTerminal};

use anyhow::{Context, Result, bail};
use lacuna::plan::{Budget, ExpertSlots, NeuronSlots, WeightSource};
use lacuna::reply::{Piece, Reader};
use lacuna::{
    AddSpecial, DraftCounts, Drafts, EncodeLimits, Engine, EngineConfig, FinishReason, Generation,
    KvReport, Limits, Message, ParseSpecial, Prompt, RecommendedSampling, RowReads, Sampling,
    Session, Special, SpecialText,
};
use serde::Serialize;

use self::conversation::Conversation;
use self::images::Sight;
use crate::cli::RunArgs;
use crate::commands::sessions::Opened;
use crate::commands::{engine, stdin_up_to};
use lacuna_cli::markdown::Markdown;
use lacuna_cli::resident::Resident;
use lacuna_cli::{output, record_experts, tell, with_draft};
use lacuna_kv::folder::SessionName;
use lacuna_models::{ExpertCounts, NeuronReads};

#[derive(Serialize)]
struct Report {
    text: String,
    /// What the model thought before it said that.
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning: String,
    prompt_tokens: usize,
    /// Those of the prompt that the session had computed.
    reused_tokens: usize,
    generated_tokens: usize,
    tokens: Vec<u32>,
    finish_reason: &'static str,
    #[serde(skip)]
    context_tokens: usize,
    ttft_ms: f64,
    prefill_tps: f64,
    decode_tps: f64,
    sampling: Chosen,
    speculation: Guessed,
    kv: Kv,
    memory: Memory,
}

/// What came of guessed tokens since the model was loaded.
#[derive(Serialize, Default)]
struct Guessed {
    #[serde(flatten)]
    all: Counts,
    /// Of these, what a draft model guessed.
    draft_model: Counts,
}

#[derive(Serialize, Default)]
struct Counts {
    /// Passes for which some were guessed.
    drafts: u64,
    draft_tokens: u64,
    /// Those that were right.
    accepted_tokens: u64,
}

impl From<Drafts> for Guessed {
    fn from(drafts: Drafts) -> Self {
        Self {
            all: drafts.all().into(),
            draft_model: drafts.model.into(),
        }
    }
}

impl From<DraftCounts> for Counts {
    fn from(counts: DraftCounts) -> Self {
        Self {
            drafts: counts.drafts,
            draft_tokens: counts.draft_tokens,
            accepted_tokens: counts.accepted_tokens,
        }
    }
}

/// How tokens were chosen, and how the model's makers recommend it.
#[derive(Serialize)]
struct Chosen {
    #[serde(flatten)]
    used: RecommendedSampling,
    recommended: RecommendedSampling,
}

/// Our accounts of what is not KV, and the kernel's of everything.
#[derive(Serialize)]
struct Memory {
    weight_bytes: u64,
    activation_bytes: usize,
    budget: Budget,
    weights: Weights,
    /// What another device than the processor has, where one computes.
    device: Option<Device>,
    /// What the process has beyond the plan, KV pages aside.
    beyond_plan_bytes: u64,
    resident: Option<Resident>,
}

/// A device and its memory.
#[derive(Serialize)]
struct Device {
    name: String,
    /// How many of the last layers it computes, and of the first the processor beside it.
    layers: usize,
    host_layers: usize,
    weight_bytes: u64,
    activation_bytes: u64,
    staging_bytes: u64,
    /// KV pages of its layers, at the end.
    kv_bytes: u64,
}

impl Device {
    fn of(engine: &Engine) -> Option<Self> {
        let device = engine.device()?;
        Some(Self {
            name: device.name,
            layers: device.layers,
            host_layers: device.host_layers,
            weight_bytes: device.memory.weight_bytes,
            activation_bytes: device.memory.activation_bytes,
            staging_bytes: device.memory.staging_bytes,
            kv_bytes: device.kv.get(),
        })
    }
}

/// How weights are had.
#[derive(Serialize)]
struct Weights {
    source: WeightSource,
    /// What reads them, where they are not mapped.
    reading: Option<String>,
    /// Memory of those that stay.
    pinned_bytes: u64,
    ring_bytes: u64,
    /// What each pass reads.
    streamed_bytes: u64,
    /// How rows of tables in files were had.
    rows: RowReads,
    /// Experts of a mixture, where weights are read into memory.
    experts: Option<Experts>,
    /// Neurons that are read one by one.
    neurons: Option<Neurons>,
}

/// Slots for neurons, and what has been asked of them since the model was loaded.
#[derive(Serialize)]
struct Neurons {
    #[serde(flatten)]
    slots: NeuronSlots,
    #[serde(flatten)]
    reads: NeuronReads,
    active_share: Option<f64>,
    hit_rate: Option<f64>,
    /// How much of what was needed was foretold, and how much of what was read ahead was needed.
    recall: Option<f64>,
    ahead_share: Option<f64>,
}

/// Slots for experts, and what has been asked of them since the model was loaded.
#[derive(Serialize)]
struct Experts {
    #[serde(flatten)]
    slots: ExpertSlots,
    #[serde(flatten)]
    counts: ExpertCounts,
    hit_rate: Option<f64>,
    /// Whether it helps to keep what was used last, in words.
    finding: Option<&'static str>,
}

#[derive(Serialize)]
struct Kv {
    bytes_per_token: usize,
    page_bytes: usize,
    reserved_bytes: usize,
    committed_bytes: usize,
    state_bytes: usize,
    slack_bytes: usize,
    map_calls: u64,
    dense_bytes: usize,
}

/// What takes less memory.
const ADVICE: &str = "use --kv sparse, a smaller --kv-type, a shorter --ctx, fewer --threads, or a smaller \
                      model (`lacuna plan` says what takes how much)";

pub(crate) fn run(args: &RunArgs) -> Result<()> {
    answer(args).map_err(|error| output::advise(error, ADVICE))
}

fn answer(args: &RunArgs) -> Result<()> {
    let opened = args.session.as_ref();
    let opened = opened.map(|name| open_session(args, name)).transpose()?;
    let config = args.device.set(EngineConfig {
        speculation: args.speculation.from_history(),
        ..args.engine.config()
    })?;
    let config = with_draft(&args.speculation.draft, config)?;
    let mut engine = engine(&args.model, config)?;
    let recommended = engine.model().recommended_sampling();
    let sampling = args.sampling.sampling(recommended);
    tell_sampling(&sampling, recommended);
    if let Some(path) = &args.record_experts {
        if let Some(device) = engine.device() {
            bail!(
                "`{}` does not tell which experts tokens choose; leave out --record-experts, or --device",
                device.name
            );
        }
        let trace = record_experts(path, engine.model())?;
        engine.record_experts(Some(trace));
    }
    let answered = converse(&mut engine, sampling, opened, args);
    if let Some(trace) = engine.record_experts(None) {
        trace
            .finish()
            .context("cannot write the record of experts")?;
    }
    answered
}

/// A session for conversations as these arguments say, or why it is none for them.
fn open_session(args: &RunArgs, name: &SessionName) -> Result<Opened> {
    Opened::new(&args.folder, name, args.raw, args.engine.kv)
}

fn converse(
    engine: &mut Engine,
    sampling: Sampling,
    opened: Option<Opened>,
    args: &RunArgs,
) -> Result<()> {
    let mut conversation = match opened {
        Some(opened) => Conversation::named(engine, &sampling, args, opened)?,
        None => Conversation::new(engine, &sampling, args)?,
    };
    if args.prompt.is_none() && io::stdin().is_terminal() {
        if args.model.json {
            bail!(output::Usage(
                "--json needs a prompt: give -p PROMPT or standard input".into()
            ));
        }
        return chat::chat(engine, sampling, conversation, args);
    }
    answer_once(engine, &mut conversation, args)?;
    conversation.save(engine)
}

/// One turn.
fn answer_once(engine: &mut Engine, conversation: &mut Conversation, args: &RunArgs) -> Result<()> {
    let text = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => stdin_for(engine)?,
    };
    let sight = Sight::new(engine);
    let Conversation {
        session,
        messages,
        images,
        ..
    } = conversation;
    let prompt = if args.raw {
        raw_turn(engine, session, &text)?
    } else {
        for path in &args.image {
            images.add(sight.read(path)?);
        }
        messages.push(images.message(&text));
        sight.prompt(engine, session, (messages, images), args)?
    };
    let report = generate(engine, session, prompt, args, &|| false)?;
    if !args.raw {
        messages.push(Message::new("assistant", report.text.as_str()));
    }
    if args.model.json {
        output::json(&report)
    } else {
        summarise(&report, "a larger --ctx holds more")
    }
}

/// Says how tokens are chosen where the model has a say in it, and what it is.
fn tell_sampling(sampling: &Sampling, recommended: &RecommendedSampling) {
    if !recommended.is_empty() {
        tell!(
            "sampling: {}; the model recommends {recommended}",
            chosen(sampling)
        );
    }
}

/// Every setting that a model may recommend something for.
fn chosen(sampling: &Sampling) -> RecommendedSampling {
    RecommendedSampling {
        temperature: Some(sampling.temperature),
        top_k: Some(sampling.top_k),
        top_p: Some(sampling.top_p),
        min_p: Some(sampling.min_p),
        repetition_penalty: Some(sampling.penalties.repetition),
    }
}

/// Without a template, a turn simply continues the text so far. Special tokens that are written in
/// it count as such: whoever types at a terminal may.
fn raw_turn(engine: &Engine, session: &Session, line: &str) -> Result<Prompt> {
    let add = if session.tokens().is_empty() {
        AddSpecial::Yes
    } else {
        AddSpecial::No
    };
    let special = Special {
        add,
        parse: ParseSpecial::Yes,
    };
    let mut tokens = session.tokens().to_vec();
    let tokenizer = engine.model().tokenizer();
    tokens.extend(tokenizer.encode_within(line, special, &limits(engine))?);
    Ok(Prompt {
        tokens,
        reader: None,
    })
}

fn conversation_prompt(engine: &Engine, messages: &[Message], args: &RunArgs) -> Result<Prompt> {
    let limits = limits(engine);
    let model = engine.model();
    Ok(model.conversation(messages, args.reasoning_effort, &limits)?)
}

/// What a prompt may come to.
fn limits(engine: &Engine) -> EncodeLimits {
    EncodeLimits {
        tokens: engine.context_tokens(),
        // Enough for a mebibyte without a space.
        workspace_bytes: 256 << 20,
    }
}

/// Standard input, of which no more is read than the context can hold.
fn stdin_for(engine: &Engine) -> Result<String> {
    /// Where white space may count for nothing and no length is too long.
    const MOST_BYTES: usize = 64 << 20;
    let tokens = engine.context_tokens();
    let most = engine.model().tokenizer().most_text_bytes(tokens);
    let most = most.unwrap_or(MOST_BYTES);
    stdin_up_to(most)?.with_context(|| {
        format!(
            "standard input has more than the {most} bytes that a context of {tokens} tokens can hold; \
             shorten it"
        )
    })
}

/// Makes `prompt` the conversation and generates, streaming to the terminal unless JSON is wanted. Ends early once
/// `is_enough`, between two steps.
fn generate(
    engine: &mut Engine,
    session: &mut Session,
    prompt: Prompt,
    args: &RunArgs,
    is_enough: &dyn Fn() -> bool,
) -> Result<Report> {
    let reused_tokens = session.rewrite(&prompt.tokens)?;
    let recommended = engine.model().recommended_sampling();
    let sampling = Chosen {
        used: chosen(&args.sampling.sampling(recommended)),
        recommended: recommended.clone(),
    };
    let page_bytes = engine.kv_cache().page_bytes();
    let context_tokens = engine.context_tokens();
    let mut memory = Memory {
        weight_bytes: engine.model().weight_bytes(),
        activation_bytes: engine.plan().arena.bytes(),
        budget: *engine.budget(),
        weights: weights(engine),
        device: None,
        beyond_plan_bytes: engine.beyond_plan(),
        resident: None,
    };
    let limits = Limits {
        max_tokens: args.max_tokens,
        stop: args.stop.clone(),
        special: match prompt.reader {
            Some(_) => SpecialText::Mark,
            None => SpecialText::Skip,
        },
        ..Limits::default()
    };
    let mut generation = Generation::new(engine, session, limits)?;
    let mut reply = Reply {
        reader: prompt.reader,
        shown: !args.model.json,
        markdown: (!args.raw && output::shows_styles()).then(Markdown::default),
        ..Reply::default()
    };
    while !is_enough()
        && let Some(piece) = generation.next_piece()?
    {
        reply.add(&piece)?;
    }
    reply.finish()?;
    let timing = generation.timing();
    memory.resident = Resident::now();
    let mut report = Report {
        text: reply.text,
        reasoning: reply.reasoning,
        prompt_tokens: prompt.tokens.len(),
        reused_tokens,
        generated_tokens: generation.tokens().len(),
        tokens: generation.tokens().to_vec(),
        finish_reason: generation
            .finish_reason()
            .map_or("interrupted", FinishReason::name),
        context_tokens,
        ttft_ms: timing.first_token.as_secs_f64() * 1e3,
        prefill_tps: timing.prefill_tokens_per_second(),
        decode_tps: timing.decode_tokens_per_second(),
        sampling,
        speculation: Guessed::default(),
        kv: kv(generation.session().kv(), page_bytes),
        memory,
    };
    // KV pages may have taken some of the memory of weights.
    (report.memory.weights, report.memory.budget) = (weights(engine), *engine.budget());
    report.memory.device = Device::of(engine);
    report.speculation = engine.drafts().into();
    Ok(report)
}

/// A reply as far as it has come. What is said goes to standard output, what is thought beside it.
#[derive(Default)]
struct Reply {
    reader: Option<Reader>,
    shown: bool,
    /// What marks in the text become, where they are shown as looks.
    markdown: Option<Markdown>,
    text: String,
    reasoning: String,
}

impl Reply {
    fn add(&mut self, text: &str) -> Result<()> {
        match &mut self.reader {
            Some(reader) => {
                let pieces = reader.push(text);
                pieces.into_iter().try_for_each(|piece| self.take(piece))
            }
            None => self.take(Piece::Content(text.to_owned())),
        }
    }

    fn finish(&mut self) -> Result<()> {
        let pieces = self.reader.as_mut().map(|reader| reader.finish(""));
        let mut pieces = pieces.into_iter().flatten();
        pieces.try_for_each(|piece| self.take(piece))?;
        if let (true, Some(markdown)) = (self.shown, &mut self.markdown) {
            output::styled(&markdown.finish())?;
        }
        if self.shown && self.text.is_empty() && !self.reasoning.is_empty() {
            output::aside("\n");
        }
        Ok(())
    }

    fn take(&mut self, piece: Piece) -> Result<()> {
        match piece {
            Piece::Reasoning(thought) => {
                self.reasoning.push_str(&thought);
                if self.shown {
                    output::aside(&thought);
                }
            }
            // Nobody has offered a function, so a call is text like any other.
            Piece::Content(text)
            | Piece::Call {
                arguments: text, ..
            } => {
                let begins = self.text.is_empty() && !text.is_empty();
                self.text.push_str(&text);
                if self.shown {
                    if begins && !self.reasoning.is_empty() {
                        output::aside("\n\n");
                    }
                    match &mut self.markdown {
                        Some(markdown) => output::styled(&markdown.push(&text))?,
                        None => output::text(&text)?,
                    }
                }
            }
        }
        Ok(())
    }
}

fn weights(engine: &Engine) -> Weights {
    let held = &engine.plan().residency;
    Weights {
        source: held.source,
        reading: engine.model().reading().map(str::to_owned),
        pinned_bytes: held.pinned_bytes,
        ring_bytes: held.ring_bytes,
        streamed_bytes: held.streamed_bytes,
        rows: engine.model().row_reads(),
        experts: engine.experts().map(|status| Experts {
            slots: status.slots,
            counts: status.counts,
            hit_rate: status.counts.hit_rate(),
            finding: status.finding(),
        }),
        neurons: engine.neurons().map(|status| Neurons {
            slots: status.slots,
            reads: status.reads,
            active_share: status.reads.active_share(),
            hit_rate: status.reads.hit_rate(),
            recall: status.reads.recall(),
            ahead_share: status.reads.ahead_share(),
        }),
    }
}

fn kv(report: KvReport, page_bytes: usize) -> Kv {
    Kv {
        bytes_per_token: report.bytes_per_token,
        page_bytes,
        reserved_bytes: report.reserved_bytes,
        committed_bytes: report.committed_bytes,
        state_bytes: report.state_bytes,
        slack_bytes: report.slack_bytes,
        map_calls: report.map_calls,
        dense_bytes: report.dense_bytes,
    }
}

/// What came of guesses, if there were any.
fn guesses(guessed: &Guessed) -> String {
    let (all, by_model) = (&guessed.all, &guessed.draft_model);
    let of_all = format!(
        ", {} of {} guesses right",
        all.accepted_tokens, all.draft_tokens
    );
    match (all.drafts, by_model.drafts) {
        (0, _) => String::new(),
        (_, 0) => of_all,
        _ => format!(
            "{of_all} ({} of {} by the draft model)",
            by_model.accepted_tokens, by_model.draft_tokens
        ),
    }
}

/// A line of figures on standard error, after the text; before it, that the text ends because the context is full, and
/// what `helps` then.
fn summarise(report: &Report, helps: &str) -> Result<()> {
    output::text("\n")?;
    if report.finish_reason == FinishReason::ContextFull.name() {
        tell!(
            "the reply was cut off: it has filled the context of {} tokens; {helps}",
            report.context_tokens
        );
    }
    let percent = 100.0 * report.kv.committed_bytes as f64 / report.kv.dense_bytes as f64;
    tell!(
        "{} prompt + {} generated tokens | first token {:.0} ms | prefill {:.1} t/s, decode {:.1} t/s{} | KV {} of {} dense ({percent:.1} %)",
        report.prompt_tokens,
        report.generated_tokens,
        report.ttft_ms,
        report.prefill_tps,
        report.decode_tps,
        guesses(&report.speculation),
        output::bytes(report.kv.committed_bytes as u64),
        output::bytes(report.kv.dense_bytes as u64),
    );
    if let Some(experts) = &report.memory.weights.experts {
        tell!(
            "experts: {:.1} % of {} found in memory, which holds {:.1} %; {} read{}{}",
            100.0 * experts.hit_rate.unwrap_or(0.0),
            experts.counts.hits + experts.counts.misses,
            100.0 * experts.slots.share(),
            output::bytes(experts.counts.read_bytes),
            if experts.finding.is_some() { "; " } else { "" },
            experts.finding.unwrap_or_default(),
        );
    }
    if let Some(neurons) = &report.memory.weights.neurons {
        tell!(
            "neurons: {:.1} % needed, {:.1} % of them found in memory, which holds {:.1} % of all; {} read",
            100.0 * neurons.active_share.unwrap_or(0.0),
            100.0 * neurons.hit_rate.unwrap_or(0.0),
            100.0 * neurons.slots.share(),
            output::bytes(neurons.reads.read_bytes),
        );
        if let Some(recall) = neurons.recall {
            tell!(
                "predictors: {:.1} % of needed neurons foretold; {} read ahead of time, {:.1} % of them needed, {} in vain",
                100.0 * recall,
                neurons.reads.ahead,
                100.0 * neurons.ahead_share.unwrap_or(0.0),
                output::bytes(neurons.reads.wasted_bytes),
            );
        }
    }
    Ok(())
}
