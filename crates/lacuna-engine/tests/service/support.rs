//! The demo model, and requests run to their end.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use lacuna_engine::{
    Constraint, ConstraintError, Event, FinishReason, Limits, Request, Sampling, Service,
    ServiceConfig, Status, Stream,
};
use lacuna_files::{Mapping, ModelFiles};
use lacuna_models::Model;
use lacuna_models::plan::request_bytes;
use lacuna_pages::ByteLength;

pub(crate) fn demo_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/lacuna-demo-q8_0.gguf")
}

/// The demo model's file.
pub(crate) fn demo_bytes() -> Vec<u8> {
    std::fs::read(demo_path()).expect("the demo model is part of the repository")
}

/// The demo model, loaded once.
pub(crate) fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        let mapping =
            Mapping::open(&demo_path()).expect("the demo model is part of the repository");
        let files = ModelFiles::from_gguf(mapping).expect("a whole file");
        Arc::new(Model::load(files).expect("a model"))
    };
    Arc::clone(MODEL.get_or_init(load))
}

/// A service on one thread with a context of 1,024 tokens.
pub(crate) fn config() -> ServiceConfig {
    let mut config = ServiceConfig::default();
    config.engine.context_tokens = Some(1024);
    config
}

pub(crate) fn start(config: ServiceConfig) -> Service {
    Service::start(model(), config).expect("a service")
}

/// A budget that leaves `groups` page groups for KV.
pub(crate) fn tight(groups: u64, prefix_cache: bool) -> ServiceConfig {
    let mut config = config();
    config.max_running = 8;
    config.max_batched_tokens = 32;
    config.prefix_cache.enabled = prefix_cache;
    let status = start(config.clone()).handle().status();
    config.engine.budget = Some(leaving(&status, groups * status.pages.group.get()));
    config
}

/// The budget that leaves a service with the settings of `status` so many bytes for KV.
pub(crate) fn leaving(status: &Status, kv_bytes: u64) -> ByteLength {
    let parts = status.budget.plan.parts;
    let others = parts.besides_kv() - parts.request_bytes + kv_bytes;
    // What requests get depends on the budget: an eighth of it within bounds.
    let mut budget = others;
    for _ in 0..64 {
        budget = others + request_bytes(Some(budget));
    }
    ByteLength::new(budget)
}

/// Tokens that look like text: a stretch of the demo's vocabulary, different for each `seed`.
pub(crate) fn prompt(seed: u32, len: usize) -> Vec<u32> {
    let vocabulary = model().spec().vocabulary as u32;
    let mix = |index: u32| {
        (seed + 1).wrapping_mul(0x9e37_79b9).rotate_left(index % 31)
            ^ index.wrapping_mul(0x85eb_ca6b)
    };
    (0..len as u32)
        .map(|index| 300 + mix(index) % (vocabulary - 300))
        .collect()
}

/// A greedy request for `tokens` tokens after `prompt`.
pub(crate) fn greedy(prompt: Vec<u32>, tokens: usize) -> Request {
    Request {
        sampling: Sampling::greedy(),
        limits: Limits {
            max_tokens: Some(tokens),
            ..Limits::default()
        },
        ..Request::new(prompt)
    }
}

/// One choice, whole.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    pub(crate) reason: Option<FinishReason>,
    pub(crate) reused: usize,
}

/// All choices of a request, or the failure's message.
pub(crate) fn finish(mut stream: Stream) -> Result<Vec<Answer>, String> {
    let mut answers: Vec<Answer> = Vec::new();
    while let Some(event) = stream.blocking_recv() {
        match event {
            Event::Started { .. } | Event::PromptScored(_) => {}
            Event::Token {
                choice,
                token,
                text,
                ..
            } => {
                let answer = at(&mut answers, choice);
                answer.tokens.push(token);
                answer.text += &text;
            }
            Event::Finished {
                choice,
                reason,
                text,
                usage,
            } => {
                let answer = at(&mut answers, choice);
                answer.text += &text;
                answer.reason = Some(reason);
                answer.reused = usage.reused_tokens;
                assert_eq!(usage.generated_tokens, answer.tokens.len());
            }
            Event::Failed(failure) => return Err(failure.to_string()),
        }
    }
    assert!(
        answers.iter().all(|answer| answer.reason.is_some()),
        "every choice ends"
    );
    Ok(answers)
}

fn at(answers: &mut Vec<Answer>, choice: usize) -> &mut Answer {
    if answers.len() <= choice {
        answers.resize_with(choice + 1, Answer::default);
    }
    &mut answers[choice]
}

/// What `request` gives when nothing else runs, nothing is shared and memory is plenty.
pub(crate) fn alone(request: Request) -> Vec<Answer> {
    static SERVICE: OnceLock<Mutex<Service>> = OnceLock::new();
    let service = SERVICE.get_or_init(|| {
        let mut config = config();
        config.prefix_cache.enabled = false;
        Mutex::new(start(config))
    });
    let service = service.lock().unwrap_or_else(PoisonError::into_inner);
    finish(service.handle().submit(request).expect("taken")).expect("an answer")
}

/// Submits all of `requests` at once and returns their answers in order.
pub(crate) fn together(service: &Service, requests: Vec<Request>) -> Vec<Vec<Answer>> {
    let submit = |request| service.handle().submit(request).expect("taken");
    let streams: Vec<Stream> = requests.into_iter().map(submit).collect();
    let answers = streams
        .into_iter()
        .map(|stream| finish(stream).expect("an answer"));
    answers.collect()
}

/// Tokens and text, without how they were come by.
pub(crate) fn contents(answers: &[Answer]) -> Vec<(Vec<u32>, String, Option<FinishReason>)> {
    let content = |answer: &Answer| (answer.tokens.clone(), answer.text.clone(), answer.reason);
    answers.iter().map(content).collect()
}

/// Forbids the end of the text, so that a request runs until its last token.
pub(crate) struct Endless;

impl Constraint for Endless {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self)
    }

    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        for end in model().tokenizer().end_of_generation() {
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

/// A greedy request that gives exactly `tokens` tokens.
pub(crate) fn endless(prompt: Vec<u32>, tokens: usize) -> Request {
    Request {
        constraint: Some(Box::new(Endless)),
        ..greedy(prompt, tokens)
    }
}

/// Waits until every request that was taken is over.
#[track_caller]
pub(crate) fn idle(service: &Service) -> Status {
    eventually(service, |status| {
        let counters = status.counters;
        let over = counters.finished + counters.cancelled + counters.failed;
        over == counters.requests && status.running == 0 && status.waiting == 0
    })
}

/// Waits until the service holds `condition`; fails after a minute.
#[track_caller]
pub(crate) fn eventually(service: &Service, condition: impl Fn(&Status) -> bool) -> Status {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let status = service.handle().status();
        if condition(&status) {
            return status;
        }
        assert!(Instant::now() < until, "not reached: {status:#?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes of pages that a session or the cache holds.
pub(crate) fn owned(status: &Status) -> u64 {
    status.ledger.committed.get() - status.ledger.idle.get()
}
