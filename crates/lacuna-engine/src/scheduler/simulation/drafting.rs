//! What a draft model gains and costs, by a clock that passes move and nothing else.

use lacuna_kernels::ElementType;
use lacuna_kv::{Geometry, KvElements};

use super::*;
use crate::request::{Limits, Request};
use crate::sampler::Sampling;
use crate::stream::{Event, Stream};

/// A draft model: parts in a thousand of a pass that one of its own takes, what a token takes more, and whether it errs.
#[derive(Clone, Copy)]
struct Draft {
    pass: u32,
    each: u32,
    errs: bool,
}

const PASS: Duration = Duration::from_millis(10);

/// Tokens of a reply.
const REPLY: usize = 128;

/// A pass of the model takes 10 ms, and a fiftieth more for each row.
fn scheduler(
    sequences: usize,
    draft: Option<Draft>,
    speculation: Speculation,
) -> (Scheduler, FakeSystem) {
    let model = demo_model();
    let elements = KvElements::both(ElementType::F32);
    let cache = KvCache::new(Geometry::uniform(2, 1, 64, elements), KvPolicy::default());
    let cache = cache.expect("a cache");
    let (pool, system) = (cache.pool().clone(), FakeSystem::new());
    let (tokens, rows) = (128, 64);
    let mut runner = PseudoModel::new(Arc::clone(&model), cache, tokens, rows, Breaks::default());
    runner.takes_time(&system, PASS, PASS / 50);
    let config = ServiceConfig {
        max_running: sequences,
        prefix_cache: crate::service::PrefixCacheConfig {
            enabled: false,
            ..Default::default()
        },
        engine: EngineConfig {
            speculation,
            ..EngineConfig::default()
        },
        ..ServiceConfig::default()
    };
    let budget = with_weights(1 << 30, 0);
    let made = Scheduler::over(Box::new(runner), budget, config, Box::new(system.clone()));
    let mut scheduler = made.expect("a limit of more than a page");
    if let Some(draft) = draft {
        let geometry = Geometry::uniform(1, 1, 64, elements);
        let cache = KvCache::over(pool, geometry, KvPolicy::default()).expect("a cache");
        let runner = PseudoModel::new(Arc::clone(&model), cache, 128, 16, Breaks::default());
        let mut runner = match draft.errs {
            true => runner.erring(),
            false => runner,
        };
        runner.takes_time(&system, PASS * draft.pass / 1000, PASS * draft.each / 1000);
        let ratio = f64::from(draft.pass) / 1000.0;
        let vocabulary = model.spec().vocabulary;
        scheduler.draft_with(Drafter::new(Box::new(runner), 7, vocabulary, ratio));
    }
    (scheduler, system)
}

/// Replies to `sequences` requests at once, and the time they take after the first token of each.
fn replies(sequences: usize, draft: Option<Draft>) -> (Vec<Vec<u32>>, Duration, Scheduler) {
    replies_with(sequences, draft, Speculation::Off)
}

/// The same where tokens are guessed from the sequences' own as well.
fn replies_with(
    sequences: usize,
    draft: Option<Draft>,
    speculation: Speculation,
) -> (Vec<Vec<u32>>, Duration, Scheduler) {
    let (mut scheduler, system) = scheduler(sequences, draft, speculation);
    let streams: Vec<Stream> = (0..sequences)
        .map(|number| {
            let word = |at: usize| 300 + ((at * 5 + number) % 60) as u32;
            let request = Request {
                sampling: Sampling::greedy(),
                limits: Limits {
                    max_tokens: Some(REPLY),
                    ignore_eos: true,
                    ..Limits::default()
                },
                ..Request::new((0..60).map(word).collect())
            };
            crate::scheduler::tests::enqueue(&mut scheduler, request)
        })
        .collect();
    let decoding = |scheduler: &Scheduler| {
        let sessions = scheduler.running.iter().flat_map(|it| &it.sessions);
        let begun = sessions.filter(|session| session.choice.generated > 0);
        begun.count() == sequences
    };
    while !decoding(&scheduler) {
        scheduler.step();
    }
    let begun = system.now();
    while !scheduler.is_idle() {
        scheduler.step();
    }
    let time = system.now() - begun;
    let read = |mut stream: Stream| {
        let mut tokens = Vec::new();
        while let Some(event) = stream.try_recv() {
            if let Event::Token { token, .. } = event {
                tokens.push(token);
            }
        }
        tokens
    };
    (streams.into_iter().map(read).collect(), time, scheduler)
}

#[test]
fn a_draft_that_is_no_good_costs_less_than_three_hundredths_of_a_short_reply() {
    for sequences in [1, 4, 16] {
        let (expected, plain, _) = replies(sequences, None);
        for pass in [20, 100, 300, 1000] {
            for each in [1, pass / 10] {
                let draft = Draft {
                    pass,
                    each,
                    errs: true,
                };
                let (found, time, scheduler) = replies(sequences, Some(draft));
                assert_eq!(found, expected);
                let ratio = plain.as_secs_f64() / time.as_secs_f64();
                let drafts = scheduler.counters.drafts.model;
                let what = format!("{sequences} sequences, {pass}, {each}: {ratio}, {drafts:?}");
                assert!(ratio > 0.97, "{what}");
                assert_eq!(drafts.accepted_tokens, 0, "{what}");
            }
        }
    }
}

#[test]
fn a_draft_that_is_right_gains_what_it_promises() {
    for (sequences, pass, gain) in [
        (1, 50, 2.0),
        (1, 100, 1.6),
        (1, 300, 1.2),
        (4, 50, 1.5),
        (16, 20, 1.2),
    ] {
        let (expected, plain, _) = replies(sequences, None);
        let draft = Draft {
            pass,
            each: pass / 20,
            errs: false,
        };
        let (found, time, scheduler) = replies(sequences, Some(draft));
        assert_eq!(found, expected);
        let ratio = plain.as_secs_f64() / time.as_secs_f64();
        let drafts = scheduler.counters.drafts;
        assert!(
            ratio > gain,
            "{sequences} sequences, {pass}: {ratio}, {drafts:?}"
        );
        assert_eq!(drafts.history.drafts, 0);
    }
}

/// A token comes up again and again in these texts, and what followed it is no more than a guess.
#[test]
fn a_draft_that_is_right_is_asked_although_the_text_has_guesses_of_its_own() {
    for sequences in [1, 4] {
        let draft = Draft {
            pass: 50,
            each: 2,
            errs: false,
        };
        let (expected, plain, _) = replies(sequences, None);
        let gain = |speculation| {
            let (found, time, scheduler) = replies_with(sequences, Some(draft), speculation);
            assert_eq!(found, expected);
            let ratio = plain.as_secs_f64() / time.as_secs_f64();
            (ratio, scheduler.counters.drafts)
        };
        let (alone, _) = gain(Speculation::Off);
        let (both, drafts) = gain(Speculation::NGRAM);
        let what = format!("{sequences} sequences: {both}, {alone} by the draft alone, {drafts:?}");
        assert!(drafts.history.draft_tokens > 0, "{what}");
        // What the text guesses behind longer matches is believed until it has been wrong a few times.
        assert!(both > 0.8 * alone, "{what}");
    }
}
