//! Texts are the same, token for token, whether tokens were guessed or not.

use std::num::NonZeroUsize;

use super::*;
use crate::error::EngineError;
use crate::sampler::Penalties;
use crate::speculation::{
    DraftCounts, DraftError, DraftModel, Drafter, Drafts, Speculation, Speculator,
};

/// A fixture of a family.
pub(super) fn family(name: &str) -> Arc<Model> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/families");
    let files = ModelFiles::open(&folder.join(name).join("model.gguf"));
    Arc::new(Model::load(files.expect("a committed fixture")).expect("a model"))
}

/// How a scheduler is set up.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    pub(super) policy: &'a str,
    pub(super) elements: &'a str,
    pub(super) speculation: Speculation,
    /// The family of a draft model.
    pub(super) draft: Option<&'a str>,
    pub(super) prefix_cache: bool,
    /// Rows of logits in a step.
    pub(super) sequences: usize,
}

pub(super) const USUAL: Setting<'static> = Setting {
    policy: "sparse",
    elements: "f16",
    speculation: Speculation::NGRAM,
    draft: None,
    prefix_cache: false,
    sequences: 16,
};

fn engine_config(setting: Setting<'_>, context: usize) -> EngineConfig {
    EngineConfig {
        kv_policy: setting.policy.parse().expect("a policy"),
        kv_elements: setting.elements.parse().expect("element types"),
        context_tokens: Some(context),
        batch_tokens: 64,
        sequences: setting.sequences,
        speculation: setting.speculation,
        draft: setting.draft.map(draft),
        ..EngineConfig::default()
    }
}

/// A family's fixture as a draft model.
fn draft(name: &str) -> DraftModel {
    DraftModel::new(family(name)).expect("one that can guess")
}

/// One that has all guesses computed.
pub(super) fn guessing(model: &Arc<Model>, setting: Setting<'_>) -> Scheduler {
    let mut config = ServiceConfig {
        engine: engine_config(setting, 256),
        ..ServiceConfig::default()
    };
    config.prefix_cache.enabled = setting.prefix_cache;
    let engine = Engine::new(Arc::clone(model), &config.engine).expect("this machine runs it");
    let mut scheduler = Scheduler::new(engine, config).expect("room for it");
    scheduler.system = Box::new(FakeSystem::new());
    scheduler.pace = Pace::eager();
    scheduler
}

/// Even and odd tokens by turns: what may come depends on how many there were.
struct Turns(usize);

impl Constraint for Turns {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self(self.0))
    }

    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        let barred = logits.iter_mut().skip(1 - self.0 % 2).step_by(2);
        barred.for_each(|logit| *logit = f32::NEG_INFINITY);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        assert_eq!(token as usize % 2, self.0 % 2, "what the mask has left");
        self.0 += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.0 == 50
    }
}

/// Requests of every kind, over a vocabulary that has letters from 4 on.
pub(super) fn requests() -> Vec<Request> {
    let prompt = |seed: u32, length: u32| -> Vec<u32> {
        let letter = |index: u32| 4 + (index * (seed + 3)) % (11 + seed);
        (0..length).map(letter).collect()
    };
    let limits = |tokens| Limits {
        max_tokens: Some(tokens),
        ignore_eos: true,
        ..Limits::default()
    };
    let drawn = |seed, temperature| Sampling {
        seed,
        temperature,
        top_k: 0,
        ..Sampling::default()
    };
    let greedy = |seed, length| Request {
        sampling: Sampling::greedy(),
        limits: limits(60),
        logprobs: Some(2),
        ..Request::new(prompt(seed, length))
    };
    let penalties = Penalties {
        repetition: 1.05,
        frequency: 0.02,
        ..Penalties::default()
    };
    vec![
        greedy(1, 80),
        greedy(2, 3),
        Request {
            sampling: drawn(5, 0.3),
            choices: NonZeroUsize::new(3).expect("some"),
            ..greedy(3, 40)
        },
        Request {
            sampling: Sampling {
                penalties,
                logit_bias: [(5, 2.0), (6, 2.0)].into(),
                ..drawn(6, 0.5)
            },
            limits: Limits {
                min_tokens: 20,
                ignore_eos: false,
                stop_tokens: vec![9],
                ..limits(90)
            },
            ..greedy(4, 33)
        },
        Request {
            constraint: Some(Box::new(Turns(0))),
            ..greedy(5, 50)
        },
        // To the end of the context.
        Request {
            limits: limits(1000),
            ..greedy(6, 200)
        },
        Request {
            prompt_logprobs: Some(1),
            ..greedy(7, 30)
        },
    ]
}

/// What clients read, each choice's tokens with their log-probabilities, text and end.
pub(super) fn read(mut stream: Stream) -> Vec<Vec<String>> {
    let mut choices = vec![Vec::new(); 4];
    while let Some(event) = stream.try_recv() {
        match &event {
            Event::Token { choice, .. } | Event::Finished { choice, .. } => {
                choices[*choice].push(format!("{event:?}"));
            }
            // They come in pieces of different sizes.
            Event::PromptScored(scored) => {
                choices[3].extend(scored.iter().map(|score| format!("{score:?}")));
            }
            Event::Started { .. } => {}
            Event::Failed(failure) => panic!("{failure}"),
        }
    }
    choices
}

/// What all requests give together, what came of guesses, and the steps it took.
pub(super) fn together(
    model: &Arc<Model>,
    setting: Setting<'_>,
) -> (Vec<Vec<Vec<String>>>, Drafts, u64) {
    let mut scheduler = guessing(model, setting);
    let streams = requests()
        .into_iter()
        .map(|request| enqueue(&mut scheduler, request));
    let streams: Vec<Stream> = streams.collect();
    finish(&mut scheduler, 2000);
    let counters = scheduler.counters;
    (
        streams.into_iter().map(read).collect(),
        counters.drafts,
        counters.steps,
    )
}

#[test]
fn whatever_holds_rows_and_however_tokens_are_drawn_guesses_change_nothing() {
    for name in ["qwen3-yarn", "gemma3", "deepseek-v3", "gpt-oss"] {
        let model = family(name);
        let plain = Setting {
            speculation: Speculation::Off,
            ..USUAL
        };
        let (expected, none, steps) = together(&model, plain);
        assert_eq!(none, Drafts::default());
        for policy in [
            "sparse",
            "dense",
            "paged:16",
            "grow:mlx",
            "sparse:head-major",
        ] {
            let (found, drafts, fewer) = together(&model, Setting { policy, ..USUAL });
            let drafts = drafts.all();
            assert!(found == expected, "{name} {policy}");
            assert!(
                drafts.accepted_tokens > 0 && fewer <= steps,
                "{name}: {drafts:?}"
            );
            assert!(
                drafts.accepted_tokens < drafts.draft_tokens,
                "{name}: {drafts:?}"
            );
        }
        // Where only one sequence has a row, guesses still have theirs.
        for sequences in [1, 3] {
            assert!(
                together(&model, Setting { sequences, ..USUAL }).0 == expected,
                "{name}"
            );
        }
    }
}

#[test]
fn rows_of_fewer_bits_are_overwritten_as_exactly() {
    let model = family("qwen3-yarn");
    for elements in ["f32", "bf16"] {
        let plain = Setting {
            elements,
            speculation: Speculation::Off,
            ..USUAL
        };
        let most = NonZeroUsize::new(13).expect("some");
        let guessed = Setting {
            elements,
            speculation: Speculation::Ngram { most },
            ..USUAL
        };
        assert!(
            together(&model, guessed).0 == together(&model, plain).0,
            "{elements}"
        );
    }
    let quantized = Setting {
        elements: "q8_0",
        ..USUAL
    };
    let plain = Setting {
        speculation: Speculation::Off,
        ..quantized
    };
    let demo = demo_model();
    assert!(together(&demo, quantized).0 == together(&demo, plain).0);
}

/// Families whose layers keep states: beside rows in other layers, beside rows of their own, and alone.
const WITH_STATES: [&str; 7] = [
    "qwen3.5",
    "qwen3-next",
    "lfm2",
    "falcon-h1",
    "nemotron-h",
    "granite-hybrid",
    "mamba2",
];

#[test]
fn states_go_back_from_wrong_guesses_whatever_holds_rows_and_however_tokens_are_drawn() {
    let mut right = 0;
    for name in WITH_STATES {
        let model = family(name);
        let plain = Setting {
            speculation: Speculation::Off,
            ..USUAL
        };
        let (expected, none, steps) = together(&model, plain);
        assert_eq!(none, Drafts::default());
        for (policy, prefix_cache, sequences) in [
            ("sparse", false, 16),
            ("sparse", true, 16),
            ("sparse", false, 3),
            ("sparse", true, 1),
            ("dense", false, 16),
            ("paged:16", true, 16),
        ] {
            let setting = Setting {
                policy,
                prefix_cache,
                sequences,
                ..USUAL
            };
            let (found, drafts, fewer) = together(&model, setting);
            let drafts = drafts.all();
            let what = format!("{name} {policy} {prefix_cache} {sequences}: {drafts:?}");
            assert!(found == expected, "{what}");
            let all = sequences == 16;
            let wrong = drafts.draft_tokens - drafts.accepted_tokens;
            assert!(!all || wrong > 0, "{what}");
            assert!(!all || prefix_cache || fewer <= steps, "{what}");
            // Not every tiny model repeats itself.
            right += usize::from(all && drafts.accepted_tokens > 0);
        }
    }
    assert!(right >= 4 * 4, "{right} times some were right");
}

/// What states go back with goes first when pages are short, and is not taken where there is not twice as much.
#[test]
fn states_go_back_only_where_there_is_memory_for_it() {
    let model = family("qwen3.5");
    let greedy = || requests().swap_remove(0);
    let run = |spare: Option<u64>| {
        let mut scheduler = guessing(&model, USUAL);
        let stream = enqueue(&mut scheduler, greedy());
        while scheduler
            .running
            .iter()
            .all(|it| it.sessions[0].choice.generated == 0)
        {
            assert!(scheduler.step());
        }
        if let Some(spare) = spare {
            let limit = scheduler.owned_bytes() + spare;
            let cache = scheduler.engine.kv_cache();
            cache
                .set_limit(lacuna_pages::ByteLength::new(limit))
                .expect("a limit");
        }
        finish(&mut scheduler, 200);
        (read(stream), scheduler.counters.drafts.all())
    };
    let (expected, drafts) = run(None);
    assert!(drafts.draft_tokens > 0);
    let cache = Engine::new(Arc::clone(&model), &engine_config(USUAL, 256)).expect("an engine");
    let bytes = cache.kv_cache().geometry().rewind_bytes(8) as u64;
    let (found, drafts) = run(Some(bytes));
    assert!(found == expected);
    assert_eq!(drafts, DraftCounts::default(), "not twice as much is there");

    let mut scheduler = guessing(&model, USUAL);
    let stream = enqueue(&mut scheduler, greedy());
    while scheduler.rewind_bytes() == 0 {
        assert!(scheduler.step());
    }
    let (owned, there) = (scheduler.owned_bytes(), scheduler.rewind_bytes());
    assert!(scheduler.evict());
    assert_eq!(scheduler.owned_bytes(), owned - there);
    finish(&mut scheduler, 200);
    assert!(read(stream) == expected);
}

/// A step that others take the memory from is one without guesses.
#[test]
fn a_step_whose_memory_goes_to_others_is_computed_without_guesses() {
    let model = family("qwen3.5");
    let mut scheduler = guessing(&model, USUAL);
    let stream = enqueue(&mut scheduler, requests().swap_remove(0));
    loop {
        scheduler.admit();
        scheduler.schedule();
        let now = scheduler.system.now();
        scheduler.prepare(now);
        if scheduler.running[0].sessions[0].sequence.is_to_be_rewound() {
            assert!(scheduler.give_up_guessing());
            let session = &scheduler.running[0].sessions[0];
            assert_eq!((session.scheduled, session.guesses().len()), (1, 0));
            assert_eq!(scheduler.rewind_bytes(), 0);
            break;
        }
        scheduler.forward_and_sample().expect("a pass");
        scheduler.accept();
    }
    finish(&mut scheduler, 200);
    let mut plain = guessing(
        &model,
        Setting {
            speculation: Speculation::Off,
            ..USUAL
        },
    );
    let expected = enqueue(&mut plain, requests().swap_remove(0));
    finish(&mut plain, 200);
    assert!(read(stream) == read(expected));
}

#[test]
fn without_memory_for_it_a_request_has_nothing_guessed_and_runs() {
    let model = family("qwen3-yarn");
    let mut scheduler = guessing(&model, USUAL);
    let taken = scheduler.request_memory.status();
    let all = (taken.limit.get() - taken.held.get()) as usize;
    let held = scheduler
        .request_memory
        .try_take(all)
        .expect("all that is left");
    let request = requests().remove(0);
    let stream = enqueue(&mut scheduler, request);
    finish(&mut scheduler, 100);
    assert_eq!(scheduler.counters.drafts.all().drafts, 0);
    drop(held);
    let again = enqueue(&mut scheduler, requests().remove(0));
    finish(&mut scheduler, 100);
    assert!(scheduler.counters.drafts.all().drafts > 0);
    assert_eq!(read(stream), read(again));
    assert_eq!(
        scheduler.request_memory.status().held,
        taken.held,
        "given back"
    );
}

/// A generation, with guesses or without: tokens, text, how it ended, and what came of guesses.
pub(super) fn generation(
    model: &Arc<Model>,
    request: Request,
    setting: Setting<'_>,
) -> (Text, DraftCounts) {
    let config = engine_config(setting, 128);
    let mut engine = Engine::new(Arc::clone(model), &config).expect("this machine runs it");
    engine.pace = Pace::eager();
    let mut session = engine.session(request.sampling).expect("valid settings");
    session.extend(&request.prompt);
    let generation = Generation::new(&mut engine, &mut session, request.limits);
    let mut generation = generation.expect("a prompt that fits");
    let mut text = String::new();
    while let Some(piece) = generation.next_piece().expect("a step") {
        text += &piece;
    }
    let text = Text {
        tokens: generation.tokens().to_vec(),
        text,
        reason: generation.finish_reason().expect("it has ended"),
    };
    assert_eq!(
        generation.timing().decoded_tokens + 1,
        session.tokens().len() - request.prompt.len()
    );
    (text, engine.drafts().all())
}

#[test]
fn a_generation_is_the_same_with_guesses_to_its_end_and_its_next_turn() {
    let mut all = DraftCounts::default();
    for name in ["qwen3-yarn", "gemma3", "deepseek-v3", "qwen3.5", "mamba2"] {
        let model = family(name);
        for (place, _) in requests().iter().enumerate() {
            let request = || {
                let mut request = requests().swap_remove(place);
                request.prompt.truncate(100);
                request
            };
            let plain = Setting {
                speculation: Speculation::Off,
                sequences: 1,
                ..USUAL
            };
            let (expected, _) = generation(&model, request(), plain);
            let guessed = Setting {
                sequences: 1,
                ..USUAL
            };
            let (found, drafts) = generation(&model, request(), guessed);
            assert_eq!(found, expected, "{name} {place}");
            all.note(
                drafts.draft_tokens as usize,
                drafts.accepted_tokens as usize,
            );
        }
    }
    assert!(
        all.accepted_tokens > 0 && all.accepted_tokens < all.draft_tokens,
        "{all:?}"
    );
}

/// What draft models are tried with: a target and its draft. A model that guesses for itself is always right as long as it has
/// read everything; another one seldom.
const PAIRS: [(&str, &str); 8] = [
    ("qwen3-yarn", "qwen3-yarn"),
    ("gemma3", "gemma3"),
    ("deepseek-v3", "qwen3-yarn"),
    ("gpt-oss", "gpt-oss"),
    ("qwen3-yarn", "gemma3"),
    ("gemma3", "deepseek-v3"),
    ("qwen3.5", "qwen3-yarn"),
    ("granite-hybrid", "gemma3"),
];

#[test]
fn a_draft_model_changes_nothing_whatever_holds_rows_and_however_tokens_are_drawn() {
    for (name, draft) in PAIRS {
        let model = family(name);
        let plain = Setting {
            speculation: Speculation::Off,
            ..USUAL
        };
        let (expected, _, steps) = together(&model, plain);
        for policy in ["sparse", "dense", "paged:16", "grow:mlx"] {
            for (speculation, prefix_cache) in
                [(Speculation::Off, false), (Speculation::NGRAM, true)]
            {
                let guessed = Setting {
                    policy,
                    speculation,
                    prefix_cache,
                    draft: Some(draft),
                    ..USUAL
                };
                let (found, drafts, fewer) = together(&model, guessed);
                let what = format!("{name} by {draft}, {policy}: {drafts:?}, {fewer} of {steps}");
                assert!(found == expected, "{what}");
                let by_model = drafts.model;
                // Where layers keep states, steps end for resume points.
                let stops = prefix_cache && model.spec().states().any(|elements| elements > 0);
                assert!(by_model.draft_tokens > 0, "{what}");
                assert!(stops || fewer <= steps, "{what}");
                assert!(by_model.accepted_tokens < by_model.draft_tokens, "{what}");
                let history = drafts.history.draft_tokens > 0;
                assert_eq!(history, speculation != Speculation::Off, "{what}");
            }
        }
    }
}

#[test]
fn a_generation_is_the_same_with_a_draft_model() {
    let mut all = DraftCounts::default();
    for (name, draft) in PAIRS {
        let model = family(name);
        for (place, _) in requests().iter().enumerate() {
            let request = || {
                let mut request = requests().swap_remove(place);
                request.prompt.truncate(100);
                request
            };
            let plain = Setting {
                speculation: Speculation::Off,
                sequences: 1,
                ..USUAL
            };
            let (expected, _) = generation(&model, request(), plain);
            let guessed = Setting {
                draft: Some(draft),
                ..plain
            };
            let (found, drafts) = generation(&model, request(), guessed);
            assert_eq!(found, expected, "{name} by {draft} {place}");
            all.note(
                drafts.draft_tokens as usize,
                drafts.accepted_tokens as usize,
            );
        }
    }
    assert!(
        all.accepted_tokens > 0 && all.accepted_tokens < all.draft_tokens,
        "{all:?}"
    );
}

/// One that follows the likeliest tokens has every guess of itself right, alone and beside others, and takes an eighth of the
/// steps; a draft of a shorter context, and one that nothing is known of, change nothing.
#[test]
fn a_model_that_guesses_for_itself_is_right_as_far_as_it_has_read() {
    for name in ["qwen3-yarn", "gemma3", "deepseek-v3"] {
        let model = family(name);
        let setting = Setting {
            speculation: Speculation::Off,
            draft: Some(name),
            ..USUAL
        };
        let greedy = |seed: u32| Request {
            sampling: Sampling::greedy(),
            limits: Limits {
                max_tokens: Some(64),
                ignore_eos: true,
                ..Limits::default()
            },
            ..Request::new((0..50).map(|at| 4 + at * (seed + 3) % 17).collect())
        };
        for sequences in [1, 4] {
            let mut scheduler = guessing(&model, setting);
            let streams: Vec<Stream> = (0..sequences)
                .map(|seed| enqueue(&mut scheduler, greedy(seed)))
                .collect();
            finish(&mut scheduler, 100);
            let drafts = scheduler.counters.drafts;
            assert_eq!(
                drafts.model.accepted_tokens, drafts.model.draft_tokens,
                "{name}"
            );
            assert_eq!(drafts.history, DraftCounts::default());
            // Sixteen rows, of which four sequences have three to spare each.
            let most = if sequences == 1 { 11 } else { 20 };
            assert!(
                scheduler.counters.steps <= most,
                "{name}: {}",
                scheduler.counters.steps
            );
            for stream in streams {
                assert_eq!(tokens(stream).len(), 64);
            }
            let ledger = scheduler.engine.kv_cache().ledger();
            assert_eq!(ledger.buffers, 0, "drafts end with their sequences");
        }
    }
}

/// A pass that one request is to blame for comes once more for the others. By then the draft has read their last tokens, for
/// guesses that are of no use any more: once it went on from there with nothing to read, and had no guesses.
#[test]
fn when_a_pass_fails_for_one_request_the_others_are_guessed_for_once_more() {
    let model = family("qwen3-yarn");
    let setting = Setting {
        speculation: Speculation::Off,
        draft: Some("qwen3-yarn"),
        ..USUAL
    };
    let request = |place| Request {
        sampling: Sampling::greedy(),
        ..requests().swap_remove(place)
    };
    let alone = {
        let mut scheduler = guessing(&model, setting);
        let stream = enqueue(&mut scheduler, request(0));
        finish(&mut scheduler, 100);
        read(stream)
    };
    let mut scheduler = guessing(&model, setting);
    let _culprit = enqueue(&mut scheduler, request(5));
    let stream = enqueue(&mut scheduler, request(0));
    while scheduler.counters.drafts.model.draft_tokens == 0 {
        scheduler.step();
    }
    assert_eq!(scheduler.running.len(), 2, "both are under way");
    scheduler.schedule();
    scheduler.prepare(scheduler.system.now());
    assert!(!scheduler.running[1].sessions[0].guesses().is_empty());
    let not_finite = ForwardError::NotFinite {
        place: Place::Logits,
        row: 0,
    };
    scheduler.fail_scheduled(&not_finite.into());
    let [other] = &scheduler.running[..] else {
        panic!("one of them goes on");
    };
    assert_eq!(other.sessions[0].scheduled, 0);
    assert!(other.sessions[0].guesses().is_empty());
    scheduler.schedule();
    assert!(!scheduler.running[0].sessions[0].guesses().is_empty());
    finish(&mut scheduler, 100);
    assert_eq!(read(stream), alone);
}

#[test]
fn what_a_draft_has_goes_before_anything_else_and_is_not_begun_again() {
    let model = family("qwen3-yarn");
    let setting = Setting {
        speculation: Speculation::Off,
        draft: Some("qwen3-yarn"),
        prefix_cache: true,
        ..USUAL
    };
    let request = || requests().swap_remove(0);
    let expected = {
        let mut scheduler = guessing(
            &model,
            Setting {
                draft: None,
                ..setting
            },
        );
        let stream = enqueue(&mut scheduler, request());
        finish(&mut scheduler, 100);
        read(stream)
    };
    let mut scheduler = guessing(&model, setting);
    let other = enqueue(&mut scheduler, requests().swap_remove(5));
    let stream = enqueue(&mut scheduler, request());
    while scheduler.draft_bytes() == 0 {
        scheduler.step();
    }
    let (owned, drafted) = (scheduler.owned_bytes(), scheduler.draft_bytes());
    let cached = scheduler.kept();
    let mut given = 0;
    while scheduler.draft_bytes() > 0 {
        assert!(scheduler.evict());
        given += 1;
    }
    assert_eq!(given, 2, "one of each sequence");
    assert_eq!(scheduler.owned_bytes(), owned - drafted);
    assert_eq!(
        scheduler.kept(),
        cached,
        "groups stay as long as there are drafts"
    );
    let guessed = scheduler.counters.drafts.model.draft_tokens;
    finish(&mut scheduler, 200);
    assert_eq!(scheduler.counters.drafts.model.draft_tokens, guessed);
    assert_eq!(scheduler.counters.preemptions, 0);
    assert_eq!(read(stream), expected);
    drop(other);
}

/// Room for the request alone: it is never preempted or refused for a draft's pages, which come and go with what is left.
#[test]
fn a_budget_is_kept_with_a_draft_whatever_is_left_for_it() {
    let model = family("qwen3-yarn");
    let setting = Setting {
        speculation: Speculation::Off,
        draft: Some("qwen3-yarn"),
        ..USUAL
    };
    let plain = Setting {
        draft: None,
        ..setting
    };
    let run = |setting: Setting<'_>, quarters: u64| {
        let mut scheduler = guessing(&model, setting);
        let cache = scheduler.engine.kv_cache();
        let page = cache.page_bytes() as u64;
        // Of what the longer one comes to.
        let pages = (quarters * cache.sequence_peak_bytes(256, 256) / 4).div_ceil(page);
        scheduler.budget.parts.kv_bytes = pages * page;
        let streams = [0, 5].map(|place| enqueue(&mut scheduler, requests().swap_remove(place)));
        let mut most = 0;
        for _ in 0..1000 {
            if scheduler.is_idle() {
                break;
            }
            scheduler.tended = None;
            scheduler.step();
            most = most.max(scheduler.engine.kv_cache().ledger().committed.get());
        }
        assert!(most <= pages * page, "{most} of {pages} pages");
        let counters = scheduler.counters;
        (
            streams.map(read),
            counters.drafts.model,
            counters.preemptions,
        )
    };
    let mut drafted = Vec::new();
    for quarters in [5, 6, 7, 8, 12, 40] {
        let (expected, _, before) = run(plain, quarters);
        let (found, drafts, preemptions) = run(setting, quarters);
        assert_eq!(found, expected, "{quarters} quarters");
        assert_eq!(preemptions, before, "{quarters} quarters");
        drafted.push(drafts.draft_tokens);
    }
    assert!(
        drafted[0] < drafted[5] / 2,
        "with little and with much: {drafted:?}"
    );
}

#[test]
fn a_draft_of_a_shorter_context_reads_the_end_of_a_text() {
    let model = family("qwen3-yarn");
    let plain = Setting {
        speculation: Speculation::Off,
        ..USUAL
    };
    let (expected, _, _) = together(&model, plain);
    let mut scheduler = guessing(
        &model,
        Setting {
            draft: Some("qwen3-yarn"),
            ..plain
        },
    );
    let config = engine_config(plain, 24);
    let engine = Engine::new(Arc::clone(&model), &config).expect("this machine runs it");
    scheduler.drafter = Some(Drafter::new(Box::new(engine), 5, 1000, 0.1));
    let streams: Vec<Stream> = requests()
        .into_iter()
        .map(|request| enqueue(&mut scheduler, request))
        .collect();
    finish(&mut scheduler, 2000);
    let found: Vec<_> = streams.into_iter().map(read).collect();
    assert!(found == expected);
    assert!(scheduler.counters.drafts.model.accepted_tokens > 0);
}

#[test]
fn models_that_cannot_guess_for_another_are_refused_and_say_why() {
    let refused = |model: &Arc<Model>, draft: DraftModel| {
        let config = EngineConfig {
            draft: Some(draft),
            ..EngineConfig::default()
        };
        match Engine::new(Arc::clone(model), &config) {
            Err(EngineError::Draft(why)) => why,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("it is taken"),
        }
    };
    let demo = demo_model();
    let other = refused(&demo, draft("qwen3-yarn"));
    assert!(matches!(other, DraftError::Vocabulary { .. }), "{other}");
    assert!(
        other.to_string().contains("another vocabulary: its token"),
        "{other}"
    );
    let states = DraftModel::new(family("mamba2")).expect_err("states");
    assert_eq!(states, DraftError::States);
}

/// What the last guess was is known only from what the text ends with.
#[test]
fn a_right_guess_that_ends_a_reply_is_counted_as_right() {
    let model = family("qwen3-yarn");
    let setting = Setting {
        speculation: Speculation::Off,
        draft: Some("qwen3-yarn"),
        ..USUAL
    };
    let reply = |seed: u32, stop_tokens: Vec<u32>| {
        let mut scheduler = guessing(&model, setting);
        let request = Request {
            sampling: Sampling::greedy(),
            limits: Limits {
                max_tokens: Some(20),
                ignore_eos: true,
                stop_tokens,
                ..Limits::default()
            },
            ..Request::new((0..50).map(|at| 4 + at * (seed + 3) % 17).collect())
        };
        let stream = enqueue(&mut scheduler, request);
        finish(&mut scheduler, 50);
        (tokens(stream), scheduler.counters.drafts.model)
    };
    // One of those that are guessed behind the first, and none that came before.
    let (seed, end, token) = (0..10)
        .find_map(|seed| {
            let (tokens, _) = reply(seed, Vec::new());
            let mut ends = 2..7;
            let end = ends.find(|&end| !tokens[..end].contains(&tokens[end]))?;
            Some((seed, end, tokens[end]))
        })
        .expect("some text");
    let (tokens, drafts) = reply(seed, vec![token]);
    assert!(tokens.len() <= end + 1, "{tokens:?}");
    assert_eq!((drafts.drafts, drafts.accepted_tokens), (1, end as u64));
}

#[test]
fn what_guesses_takes_memory_for_a_replys_own_tokens_only_where_it_guesses_from_these() {
    let model = family("qwen3-yarn");
    for speculation in [Speculation::Off, Speculation::NGRAM] {
        let setting = Setting {
            speculation,
            draft: Some("qwen3-yarn"),
            ..USUAL
        };
        let mut scheduler = guessing(&model, setting);
        let before = scheduler.request_memory.status().held.get();
        let _stream = enqueue(&mut scheduler, requests().remove(0));
        let guesses = |scheduler: &Scheduler| {
            let running = scheduler.running.first();
            running.is_some_and(|running| running.sessions[0].speculator.is_some())
        };
        while !guesses(&scheduler) {
            assert!(scheduler.step());
        }
        let held = scheduler.request_memory.status().held.get() - before;
        // A prompt of 80 and a reply of 60.
        let tokens = (speculation != Speculation::Off).then_some(140);
        assert_eq!(
            held,
            Speculator::bytes(tokens, None) as u64,
            "{speculation}"
        );
    }
}

#[test]
fn where_nothing_can_be_guessed_no_memory_is_taken_for_it() {
    let model = family("qwen3-yarn");
    // The last token of a reply is never guessed: nothing would be computed from it.
    for (most, guesses) in [(1, false), (2, true)] {
        let mut scheduler = guessing(&model, USUAL);
        let request = Request {
            limits: Limits {
                max_tokens: Some(most),
                ..Limits::default()
            },
            ..Request::new(vec![5])
        };
        let _stream = enqueue(&mut scheduler, request);
        scheduler.admit();
        scheduler.schedule();
        let session = &scheduler.running[0].sessions[0];
        assert_eq!(session.scheduled, 1);
        assert_eq!(session.speculator.is_some(), guesses, "{most} tokens");
    }
}
