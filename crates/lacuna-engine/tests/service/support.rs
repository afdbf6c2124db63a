//! The demo model, and requests run to their end.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use lacuna_engine::{
    Event, FinishReason, Limits, Request, Sampling, Service, ServiceConfig, Stream,
};
use lacuna_models::Model;
use lacuna_models::files::{Mapping, ModelFiles};

/// The demo model, loaded once.
pub(crate) fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/lacuna-demo-q8_0.gguf");
        let mapping = Mapping::open(&path).expect("the demo model is part of the repository");
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

/// Tokens that look like text: a stretch of the demo's vocabulary, different for each `seed`.
pub(crate) fn prompt(seed: u32, len: usize) -> Vec<u32> {
    let vocabulary = model().config().vocabulary as u32;
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
            stop: Vec::new(),
        },
        ..Request::new(prompt)
    }
}

/// One continuation, whole.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    pub(crate) reason: Option<FinishReason>,
    pub(crate) reused: usize,
}

/// All continuations of a request, or the failure's message.
pub(crate) fn finish(mut stream: Stream) -> Result<Vec<Answer>, String> {
    let mut answers: Vec<Answer> = Vec::new();
    while let Some(event) = stream.blocking_recv() {
        match event {
            Event::Started { .. } => {}
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

/// What `request` gives when nothing else runs.
pub(crate) fn alone(request: Request) -> Vec<Answer> {
    let service = start(config());
    finish(service.handle().submit(request).expect("taken")).expect("an answer")
}
