//! Steps made by hand.

mod admission;
mod choices;
mod device;
mod endings;
mod folder;
mod heads;
mod lending;
mod preemption;
mod report;
mod speculation;
mod swap_file;
mod weights;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use lacuna_files::ModelFiles;
use lacuna_kv::prefix::Namespace;
use lacuna_models::Model;

use proptest::prelude::*;

use super::*;
use crate::arbiter::TEND_INTERVAL;
use crate::engine::EngineConfig;
use crate::generation::Generation;
use crate::request::{Constraint, ConstraintError, Limits, Request};
use crate::sampler::Sampling;
use crate::stream::{FinishReason, Stream};
use crate::system::FakeSystem;

/// The demo model, loaded once.
pub(crate) fn demo_model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let files = ModelFiles::open(&folder.join("lacuna-demo-q8_0.gguf"));
        let files = files.expect("the demo model is part of the repository");
        Arc::new(Model::load(files).expect("a model"))
    };
    Arc::clone(MODEL.get_or_init(load))
}

/// A scheduler on a system of the test's.
fn on_a_fake_system() -> (Scheduler, FakeSystem) {
    let (mut scheduler, system) = (scheduler(), FakeSystem::new());
    scheduler.system = Box::new(system.clone());
    (scheduler, system)
}

fn scheduler() -> Scheduler {
    with_context(512)
}

fn with_context(tokens: usize) -> Scheduler {
    scheduler_of(demo_model(), tokens)
}

fn scheduler_of(model: Arc<Model>, tokens: usize) -> Scheduler {
    let config = ServiceConfig {
        engine: EngineConfig {
            budget: Some(ByteLength::mebibytes(64)),
            context_tokens: Some(tokens),
            batch_tokens: 64,
            sequences: 4,
            ..EngineConfig::default()
        },
        ..ServiceConfig::default()
    };
    let engine = Engine::new(model, &config.engine).expect("this machine runs it");
    let mut scheduler = Scheduler::new(engine, config).expect("room for it");
    scheduler.system = Box::new(FakeSystem::new());
    scheduler
}

fn greedy(prompt: std::ops::Range<u32>, tokens: usize) -> Request {
    Request {
        sampling: Sampling::greedy(),
        limits: Limits {
            max_tokens: Some(tokens),
            ..Limits::default()
        },
        ..Request::new(prompt.collect())
    }
}

fn submit(scheduler: &mut Scheduler, prompt: std::ops::Range<u32>, tokens: usize) -> Stream {
    enqueue(scheduler, greedy(prompt, tokens))
}

pub(crate) fn enqueue(scheduler: &mut Scheduler, request: Request) -> Stream {
    static NEXT_ID: AtomicU64 = AtomicU64::new(0);
    let limits = scheduler.request_limits();
    let capacity = limits.check(&request).expect("it could run");
    let now = scheduler.system.now();
    let (mut waiting, stream) = Waiting::new(request, capacity, now).expect("valid settings");
    waiting.job.id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    scheduler.enqueue(waiting);
    stream
}

/// The running requests, by the first token of their prompts.
fn running(scheduler: &Scheduler) -> Vec<u32> {
    let sessions = scheduler
        .running
        .iter()
        .flat_map(|running| &running.sessions);
    sessions.map(|session| session.choice.tokens[0]).collect()
}

fn failure(stream: &mut Stream) -> Option<Failure> {
    while let Some(event) = stream.try_recv() {
        if let Event::Failed(failure) = event {
            return Some(failure);
        }
    }
    None
}

fn tokens(mut stream: Stream) -> Vec<u32> {
    let mut tokens = Vec::new();
    while let Some(event) = stream.try_recv() {
        if let Event::Token { token, .. } = event {
            tokens.push(token);
        }
    }
    tokens
}

/// Steps until nothing is left; fails if that takes more than `most`.
fn finish(scheduler: &mut Scheduler, most: usize) {
    for _ in 0..most {
        if scheduler.is_idle() {
            return;
        }
        scheduler.step();
    }
    panic!("not done after {most} steps");
}

#[test]
fn the_pages_of_a_client_that_has_gone_are_back_before_the_next_step() {
    let mut scheduler = scheduler();
    scheduler.config.prefix_cache.enabled = false;
    let stays = submit(&mut scheduler, 400..430, 200);
    scheduler.step();
    let alone = scheduler.owned_bytes();
    let goes = submit(&mut scheduler, 500..550, 200);
    scheduler.step();
    assert!(scheduler.owned_bytes() > alone);
    assert!(!scheduler.sweep(), "both are waited for");
    drop(goes);
    assert!(scheduler.sweep());
    let grown = scheduler.prefix.grain().bytes(16);
    assert!(scheduler.owned_bytes() <= alone + grown);
    assert_eq!(
        (scheduler.running.len(), scheduler.counters.cancelled),
        (1, 1)
    );
    drop(stays);
    assert!(scheduler.sweep());
    assert_eq!(scheduler.owned_bytes(), 0);
}

#[test]
fn a_step_mixes_prompts_and_generation() {
    let mut scheduler = scheduler();
    let first = submit(&mut scheduler, 400..410, 100);
    scheduler.step();
    let _second = submit(&mut scheduler, 500..700, 100);
    scheduler.step();
    let progress: Vec<usize> = (scheduler.running.iter())
        .map(|running| running.sessions[0].sequence.len())
        .collect();
    assert_eq!(
        progress,
        [11, 63],
        "one token for the first, the rest for the second's prompt"
    );
    drop(first);
}

#[test]
fn a_prompt_that_another_namespace_is_computing_is_not_waited_for() {
    for (namespace, running) in [(Namespace::COMMON, 1), (Namespace::new(1), 2)] {
        let mut scheduler = scheduler();
        let first = submit(&mut scheduler, 400..600, 4);
        scheduler.step();
        let second = submit(&mut scheduler, 400..600, 4);
        scheduler.waiting[0].job.namespace = namespace;
        scheduler.step();
        assert_eq!(scheduler.running.len(), running, "{namespace:?}");
        finish(&mut scheduler, 100);
        assert_eq!(tokens(first), tokens(second));
    }
}

#[test]
fn a_system_short_of_memory_gets_the_newest_pages_back_and_answers_stay_the_same() {
    let expected: Vec<Vec<u32>> = [400..440, 500..540]
        .into_iter()
        .map(|prompt| {
            let mut scheduler = scheduler();
            let stream = submit(&mut scheduler, prompt, 30);
            finish(&mut scheduler, 100);
            tokens(stream)
        })
        .collect();
    let (mut scheduler, system) = on_a_fake_system();
    let streams = [400..440, 500..540].map(|prompt| submit(&mut scheduler, prompt, 30));
    for _ in 0..10 {
        scheduler.step();
    }
    let before = scheduler.owned_bytes();
    system.set_memory(0, 0.0);
    system.pass(TEND_INTERVAL);
    scheduler.step();
    assert_eq!(scheduler.counters.preemptions, 1);
    assert_eq!(scheduler.running.len(), 1, "the oldest stays");
    assert!(scheduler.owned_bytes() < before);
    assert!(scheduler.kv_limit < scheduler.budget.parts.kv_bytes);
    system.set_memory(1 << 40, 0.0);
    system.pass(TEND_INTERVAL);
    finish(&mut scheduler, 200);
    assert_eq!(streams.map(tokens).to_vec(), expected);
}

#[test]
fn a_system_without_any_memory_to_spare_does_not_stop_the_first_request() {
    // In a group that held little but the model's own file, one page was left to all requests.
    let (mut scheduler, system) = on_a_fake_system();
    system.set_memory(0, 0.0);
    let streams = [400..440, 500..540].map(|prompt| submit(&mut scheduler, prompt, 30));
    for _ in 0..500 {
        system.pass(TEND_INTERVAL);
        scheduler.step();
    }
    assert!(scheduler.is_idle());
    assert!(streams.map(tokens).iter().all(|tokens| tokens.len() == 30));
}

#[test]
fn what_the_process_has_beyond_its_plan_comes_out_of_kv_pages() {
    let (mut scheduler, system) = on_a_fake_system();
    let streams = [400..440, 500..540].map(|prompt| submit(&mut scheduler, prompt, 30));
    for _ in 0..5 {
        scheduler.step();
    }
    let (planned, held) = (scheduler.budget.parts.kv_bytes, scheduler.owned_bytes());
    assert_eq!(scheduler.kv_limit, planned);
    system.set_beyond_plan(planned - held / 2);
    system.pass(TEND_INTERVAL);
    scheduler.step();
    assert_eq!(scheduler.kv_limit, held / 2);
    assert!(
        scheduler.owned_bytes() <= held / 2,
        "the budget is kept at once"
    );
    let committed = scheduler.engine.kv_cache().ledger().committed.get();
    assert!(committed <= held / 2, "and nothing lies idle beyond it");
    assert_eq!(
        scheduler.status().budget.beyond_plan.get(),
        planned - held / 2
    );
    system.set_beyond_plan(0);
    system.pass(TEND_INTERVAL);
    finish(&mut scheduler, 200);
    assert!(streams.map(tokens).iter().all(|tokens| tokens.len() == 30));
}

#[test]
fn no_more_requests_wait_than_the_queue_is_long_whatever_made_them_wait() {
    // A queue of eight let nineteen wait: places were free, but memory was not.
    let mut scheduler = with_groups(20);
    let group = scheduler.prefix.grain().group_tokens().get() as u32;
    scheduler.config.max_waiting = 2;
    let mut streams: Vec<Stream> = (0..9)
        .map(|seed| enqueue(&mut scheduler, after(prompt(seed, 9 * group), 1)))
        .collect();
    scheduler.step();
    let (running, waiting) = (scheduler.running.len(), scheduler.waiting.len());
    assert_eq!(waiting, 2);
    let full = |stream: &mut Stream| matches!(failure(stream), Some(Failure::QueueFull { .. }));
    let refused: Vec<bool> = streams.iter_mut().map(full).collect();
    let expected: Vec<bool> = (0..9).map(|index| index >= running + waiting).collect();
    assert_eq!(refused, expected, "the last ones");
}

#[test]
fn each_starved_request_waits_its_own_time_before_it_fails() {
    // A first request found no memory for twenty seconds and failed, as it should. The second one
    // was held to the same twenty seconds, and so failed in its first step.
    let (mut scheduler, system) = on_a_fake_system();
    system.set_beyond_plan(1 << 40);
    let just_before = Scheduler::STARVATION.checked_sub(Duration::from_millis(1));
    for _ in 0..2 {
        // It is taken by the limits of the start, when there was nothing beyond the plan.
        scheduler.memory.beyond_plan = 0;
        let mut stream = submit(&mut scheduler, 400..440, 5);
        scheduler.step();
        assert_eq!(failure(&mut stream), None, "it has only just come");
        system.pass(just_before.expect("longer than that"));
        scheduler.step();
        assert_eq!(failure(&mut stream), None, "the system may still give");
        system.pass(Duration::from_millis(1));
        scheduler.step();
        assert!(matches!(
            failure(&mut stream),
            Some(Failure::OutOfMemory(_))
        ));
        assert!(scheduler.is_idle());
    }
    system.set_beyond_plan(0);
    system.pass(TEND_INTERVAL);
    scheduler.step();
    let stream = submit(&mut scheduler, 400..440, 5);
    finish(&mut scheduler, 20);
    assert_eq!(tokens(stream).len(), 5, "memory is back");
}

#[test]
fn a_request_of_a_lower_priority_value_starts_before_those_that_came_first() {
    let (mut scheduler, _) = on_a_fake_system();
    scheduler.config.max_running = 1;
    let ranked = |first: u32, priority| Request {
        priority,
        ..greedy(first..first + 20, 3)
    };
    let requests = [(400, 0), (430, 2), (460, -1), (490, 2), (520, 1)];
    let streams =
        requests.map(|(first, priority)| enqueue(&mut scheduler, ranked(first, priority)));
    let mut order = Vec::new();
    while !scheduler.is_idle() {
        scheduler.step();
        order.extend(running(&scheduler));
        order.dedup();
    }
    assert_eq!(order, [460, 400, 520, 430, 490]);
    assert!(streams.map(tokens).iter().all(|tokens| tokens.len() == 3));
}

#[test]
fn memory_is_taken_from_the_request_that_matters_least() {
    let (mut scheduler, system) = on_a_fake_system();
    let ranked = |first: u32, priority| Request {
        priority,
        ..greedy(first..first + 20, 40)
    };
    let requests = [(400, 3), (430, 0), (460, 1)];
    let streams =
        requests.map(|(first, priority)| enqueue(&mut scheduler, ranked(first, priority)));
    scheduler.step();
    assert_eq!(running(&scheduler), [430, 460, 400]);
    assert!(scheduler.preempt_last(swapping::Urgency::Now));
    assert_eq!(running(&scheduler), [430, 460], "the oldest matters least");
    system.set_memory(0, 0.0);
    system.pass(TEND_INTERVAL);
    scheduler.step();
    assert_eq!(running(&scheduler), [430]);
    system.set_memory(1 << 40, 0.0);
    system.pass(TEND_INTERVAL);
    finish(&mut scheduler, 200);
    assert!(streams.map(tokens).iter().all(|tokens| tokens.len() == 40));
}

/// What a client sees of a text in the end.
#[derive(Debug, PartialEq, Eq)]
struct Text {
    tokens: Vec<u32>,
    text: String,
    reason: FinishReason,
}

fn served(request: Request, context: usize) -> Text {
    let mut scheduler = with_context(context);
    let mut stream = enqueue(&mut scheduler, request);
    finish(&mut scheduler, 2 * context);
    let (mut tokens, mut shown) = (Vec::new(), String::new());
    while let Some(event) = stream.try_recv() {
        match event {
            Event::Started { .. } | Event::PromptScored(_) => {}
            Event::Token { token, text, .. } => {
                tokens.push(token);
                shown += &text;
            }
            Event::Finished {
                reason,
                text,
                usage,
                ..
            } => {
                assert_eq!(usage.generated_tokens, tokens.len());
                return Text {
                    tokens,
                    text: shown + &text,
                    reason,
                };
            }
            Event::Failed(failure) => panic!("{failure}"),
        }
    }
    panic!("no end after {shown:?}")
}

fn generated(request: Request, context: usize) -> Text {
    let config = EngineConfig {
        context_tokens: Some(context),
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(demo_model(), &config).expect("this machine runs it");
    let mut session = engine.session(request.sampling).expect("valid settings");
    session.extend(&request.prompt);
    let generation = Generation::new(&mut engine, &mut session, request.limits);
    let mut generation = generation.expect("a prompt that fits");
    let mut text = String::new();
    while let Some(piece) = generation.next_piece().expect("a step") {
        text += &piece;
    }
    Text {
        tokens: generation.tokens().to_vec(),
        text,
        reason: generation.finish_reason().expect("it has ended"),
    }
}

#[test]
fn a_limit_of_no_tokens_ends_at_once_with_nothing() {
    // The service gave one token, and a generation none.
    let nothing = Text {
        tokens: Vec::new(),
        text: String::new(),
        reason: FinishReason::MaxTokens,
    };
    assert_eq!(served(greedy(400..420, 0), 64), nothing);
    assert_eq!(generated(greedy(400..420, 0), 64), nothing);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_generation_and_the_service_give_the_same_text_and_end(
        first in 300u32..900,
        length in 1usize..30,
        room in 0usize..30,
        max_tokens in prop::option::of(0usize..30),
        seed in any::<u64>(),
        stop in prop::option::of((0usize..60, 1usize..6)),
        min_tokens in 0usize..8,
        ignore_eos: bool,
        stop_token in prop::option::of(300u32..900),
    ) {
        let request = |stop: Vec<String>, max_tokens: Option<usize>| Request {
            sampling: Sampling { seed, ..Sampling::default() },
            limits: Limits {
                max_tokens,
                min_tokens: min_tokens.min(max_tokens.unwrap_or(usize::MAX)),
                stop,
                stop_tokens: stop_token.into_iter().collect(),
                ignore_eos,
                ..Limits::default()
            },
            ..Request::new((first..first + length as u32).collect())
        };
        let context = length + room;
        // A stop string that does come up, unless it begins past the end.
        let whole = generated(request(Vec::new(), Some(30)), context).text;
        let stop = stop.map(|(from, characters)| whole.chars().skip(from).take(characters).collect());
        let request = || request(stop.iter().cloned().collect(), max_tokens);
        prop_assert_eq!(served(request(), context), generated(request(), context));
    }
}

/// A prompt of its own for each `seed`.
fn prompt(seed: u32, length: u32) -> Vec<u32> {
    let token = |index: u32| 300 + (seed * 389 + index * 31) % 2000;
    (0..length).map(token).collect()
}

fn after(prompt: Vec<u32>, tokens: usize) -> Request {
    Request {
        prompt,
        ..greedy(0..1, tokens)
    }
}

/// Forbids the end of the text.
struct Endless;

impl Constraint for Endless {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self)
    }

    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        for end in demo_model().tokenizer().end_of_generation() {
            logits[end as usize] = f32::NEG_INFINITY;
        }
        Ok(())
    }

    fn accept(&mut self, _token: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }
}

/// A request that gives exactly `tokens` tokens.
fn endless(prompt: Vec<u32>, tokens: usize) -> Request {
    Request {
        constraint: Some(Box::new(Endless)),
        ..after(prompt, tokens)
    }
}

/// Whether a request has its first token; `seen` gets all that are there.
fn has_token(stream: &mut Stream, seen: &mut Vec<u32>) -> bool {
    while let Some(event) = stream.try_recv() {
        if let Event::Token { token, .. } = event {
            seen.push(token);
        }
    }
    !seen.is_empty()
}

/// What `requests` give one after the other.
fn one_by_one(requests: impl IntoIterator<Item = Request>) -> Vec<Vec<u32>> {
    let alone = |request| {
        let mut scheduler = with_context(2048);
        let stream = enqueue(&mut scheduler, request);
        finish(&mut scheduler, 1000);
        tokens(stream)
    };
    requests.into_iter().map(alone).collect()
}

#[test]
fn short_prompts_behind_a_long_one_have_their_first_token_within_a_tenth_of_its_time() {
    // Eight short prompts waited until a prompt of 6,000 tokens had been read: 10 s instead of 0.01.
    // Here it is 24 full steps, so that a tenth of them is two.
    let long = || after(prompt(0, 24 * 64), 4);
    let short = |seed| after(prompt(seed, 5), 12);
    let expected = one_by_one(std::iter::once(long()).chain((1..9).map(short)));
    let mut scheduler = with_context(2048);
    let mut streams = vec![enqueue(&mut scheduler, long())];
    let mut seen = vec![Vec::new(); 9];
    (0..4).for_each(|_| assert!(scheduler.step()));
    streams.extend((1..9).map(|seed| enqueue(&mut scheduler, short(seed))));
    (0..2).for_each(|_| assert!(scheduler.step()));
    for (stream, seen) in streams.iter_mut().zip(&mut seen).skip(1) {
        assert!(has_token(stream, seen), "two steps are enough for all");
    }
    // Twelve more steps for the short ones, in which the long one has what they leave.
    finish(&mut scheduler, 20 + 12);
    for (stream, seen) in streams.iter_mut().zip(&mut seen) {
        has_token(stream, seen);
    }
    assert_eq!(seen, expected, "and nobody's answer is another one");
}

#[test]
fn a_long_prompt_is_read_to_its_end_however_many_short_ones_come() {
    let mut scheduler = with_context(2048);
    scheduler.config.max_running = 4;
    let (mut long, mut seen) = (
        enqueue(&mut scheduler, after(prompt(0, 12 * 64), 1)),
        Vec::new(),
    );
    let mut streams = Vec::new();
    let mut steps = 0;
    while !has_token(&mut long, &mut seen) {
        while scheduler.waiting.len() < 4 {
            let short = after(prompt(steps + 1, 60), 1);
            streams.push(enqueue(&mut scheduler, short));
        }
        scheduler.step();
        steps += 1;
        assert!(steps <= 4 * 12, "a quarter of every step is its own");
    }
    assert!(steps > 2 * 12, "the short ones did get the larger part");
}

#[test]
fn a_short_prompt_that_begins_like_a_long_one_does_not_wait_for_its_end() {
    // It waits for the pages that the long one is about to have, and these come first.
    let mut scheduler = with_context(2048);
    let streams =
        [prompt(0, 1000), prompt(1, 1000)].map(|prompt| enqueue(&mut scheduler, after(prompt, 1)));
    scheduler.step();
    let before = scheduler.running[1].sessions[0].sequence.len();
    let begins_alike = [&prompt(1, before as u32 + 64)[..], &prompt(2, 5)].concat();
    let (mut short, mut seen) = (enqueue(&mut scheduler, after(begins_alike, 1)), Vec::new());
    let first = (1..10).find(|_| {
        scheduler.step();
        has_token(&mut short, &mut seen)
    });
    assert!(first.is_some_and(|steps| steps <= 4), "{first:?} steps");
    drop(streams);
}

/// A scheduler whose pages hold `groups` groups.
fn with_groups(groups: u64) -> Scheduler {
    let mut scheduler = with_context(2048);
    let grain = scheduler.prefix.grain();
    let limit = groups * grain.bytes(grain.group_tokens().get());
    (scheduler.budget.parts.kv_bytes, scheduler.kv_limit) = (limit, limit);
    let cache = scheduler.engine.kv_cache();
    cache
        .set_limit(ByteLength::new(limit))
        .expect("a page or more");
    scheduler.config.prefix_cache.enabled = false;
    scheduler
}

#[test]
fn a_short_request_passes_a_long_one_that_waits_for_memory_but_not_for_ever() {
    let mut scheduler = with_groups(20);
    let group = scheduler.prefix.grain().group_tokens().get() as u32;
    let holder = enqueue(&mut scheduler, endless(prompt(0, 10 * group), 100));
    scheduler.step();
    let long = enqueue(&mut scheduler, after(prompt(1, 15 * group), 1));
    let mut shorts = 0;
    let mut streams = Vec::new();
    for _ in 0..60 {
        if scheduler.waiting.len() < 3 {
            streams.push(enqueue(&mut scheduler, after(prompt(2 + shorts, 4), 1)));
            shorts += 1;
        }
        scheduler.step();
    }
    let finished = scheduler.counters.finished;
    assert_eq!(
        finished,
        u64::from(Waiting::MOST_OVERTAKEN),
        "so many went before the long one, and then none"
    );
    drop(holder);
    scheduler.sweep();
    scheduler.step();
    assert_eq!(
        scheduler.running[0].job.prompt_tokens,
        15 * group as usize,
        "it is the next to start"
    );
    drop(long);
}

#[test]
fn a_request_that_was_preempted_is_not_overtaken() {
    let mut scheduler = with_groups(20);
    let group = scheduler.prefix.grain().group_tokens().get() as u32;
    let streams = [10, 8].map(|groups| {
        enqueue(
            &mut scheduler,
            endless(prompt(groups, groups * group - 8), 60),
        )
    });
    (0..20).for_each(|_| assert!(scheduler.step()));
    assert!(scheduler.preempt_last(swapping::Urgency::Now));
    let first = scheduler.running[0].job.id;
    // The rest of the memory is taken, so that the preempted one does not come back at once.
    scheduler.kv_limit =
        scheduler.owned_bytes() + 2 * scheduler.prefix.grain().bytes(group as usize);
    let short = enqueue(&mut scheduler, after(prompt(99, 4), 1));
    scheduler.admit();
    let running: Vec<u64> = scheduler
        .running
        .iter()
        .map(|running| running.job.id)
        .collect();
    assert_eq!(running, [first]);
    drop((streams, short));
}

#[test]
fn one_of_another_priority_does_not_pass_a_request_that_waits_for_memory() {
    for (priority, passes) in [(0, true), (1, false)] {
        let mut scheduler = with_groups(20);
        let group = scheduler.prefix.grain().group_tokens().get() as u32;
        let holder = enqueue(&mut scheduler, endless(prompt(0, 10 * group), 100));
        scheduler.step();
        let long = enqueue(&mut scheduler, after(prompt(1, 15 * group), 1));
        let short = Request {
            priority,
            ..after(prompt(2, 4), 1)
        };
        let short = enqueue(&mut scheduler, short);
        scheduler.admit();
        assert_eq!(scheduler.running.len() == 2, passes, "priority {priority}");
        drop((holder, long, short));
    }
}

/// Puts values that are no numbers where the last computed row of `session` is.
fn poison(scheduler: &mut Scheduler, running: usize) {
    let sequence = &mut scheduler.running[running].sessions[0].sequence;
    sequence.truncate(sequence.len() - 1).expect("held");
    sequence.prepare(1).expect("room");
    let config = lacuna_kernels::CpuConfig {
        threads: std::num::NonZeroUsize::MIN,
        ..lacuna_kernels::CpuConfig::default()
    };
    let cpu = lacuna_kernels::Cpu::new(config).expect("a processor");
    let model = demo_model();
    let row = vec![
        f32::NAN;
        model.spec().layers[0]
            .attention
            .as_ref()
            .map_or(0, |it| it.kv_width())
    ];
    for layer in 0..model.spec().layers.len() {
        sequence.write(lacuna_kv::Layer(layer), |_, run| cpu.store_run(run, &row));
    }
    sequence.accept(1);
}

/// Such logits used to end the reply as if the model had said it was done.
#[test]
fn a_reply_whose_logits_are_not_finite_fails_and_fails_alone() {
    let mut scheduler = scheduler();
    let alone = submit(&mut scheduler, 500..510, 8);
    finish(&mut scheduler, 20);
    let expected = tokens(alone);
    let mut damaged = submit(&mut scheduler, 400..410, 8);
    let sound = submit(&mut scheduler, 500..510, 8);
    scheduler.step();
    scheduler.step();
    assert_eq!(scheduler.running.len(), 2);
    poison(&mut scheduler, 0);
    finish(&mut scheduler, 20);
    assert_eq!(tokens(sound), expected);
    let mut last = None;
    while let Some(event) = damaged.try_recv() {
        last = Some(event);
    }
    assert!(
        matches!(last, Some(Event::Failed(Failure::NotFinite(_)))),
        "{last:?}"
    );
    assert_eq!(scheduler.counters.failed, 1);
}

/// The file used to take the process with it.
#[cfg(target_os = "linux")]
#[test]
fn a_model_file_that_shrinks_ends_the_replies_under_way_and_is_named() {
    lacuna_files::guard_mappings().expect("a handler");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("copy.gguf");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    std::fs::copy(demo.join("lacuna-demo-q8_0.gguf"), &path).expect("copied");
    let files = ModelFiles::open(&path).expect("a model");
    let mut scheduler = scheduler_of(Arc::new(Model::load(files).expect("a model")), 512);
    let mut streams = [400..410, 500..510].map(|prompt| submit(&mut scheduler, prompt, 50));
    for _ in 0..4 {
        scheduler.step();
    }
    let file = std::fs::File::options().write(true).open(&path);
    file.expect("there").set_len(100).expect("shortened");
    let before = scheduler.counters.generated_tokens;
    scheduler.step();
    assert_eq!(scheduler.counters.failed, 2);
    assert_eq!(
        scheduler.counters.generated_tokens, before,
        "no token of what zeros led to"
    );
    for stream in &mut streams {
        let mut last = None;
        while let Some(event) = stream.try_recv() {
            last = Some(event);
        }
        let Some(Event::Failed(Failure::LostFile(lost))) = last else {
            panic!("{last:?}");
        };
        assert_eq!(lost.path, path);
    }
}
