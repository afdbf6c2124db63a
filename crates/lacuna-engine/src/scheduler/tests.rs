//! Steps made by hand.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use lacuna_models::Model;
use lacuna_models::files::ModelFiles;

use super::*;
use crate::engine::EngineConfig;
use crate::request::{Limits, Request};
use crate::sampler::Sampling;
use crate::stream::Stream;

fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let files = ModelFiles::open(&folder.join("lacuna-demo-q8_0.gguf"));
        let files = files.expect("the demo model is part of the repository");
        Arc::new(Model::load(files).expect("a model"))
    };
    Arc::clone(MODEL.get_or_init(load))
}

fn plenty() -> Reading {
    Reading {
        available: Some(1 << 40),
        stalled_percent: 0.0,
    }
}

fn nothing_left() -> Reading {
    Reading {
        available: Some(0),
        stalled_percent: 0.0,
    }
}

fn scheduler() -> Scheduler {
    let config = ServiceConfig {
        budget: Some(ByteLength::mebibytes(64)),
        engine: EngineConfig {
            context_tokens: Some(512),
            batch_tokens: 64,
            sequences: 4,
            ..EngineConfig::default()
        },
        ..ServiceConfig::default()
    };
    let engine = Engine::new(model(), &config.engine).expect("this machine runs it");
    let mut scheduler = Scheduler::new(engine, config).expect("room for it");
    scheduler.system = plenty;
    scheduler
}

fn submit(scheduler: &mut Scheduler, prompt: std::ops::Range<u32>, tokens: usize) -> Stream {
    let request = Request {
        sampling: Sampling::greedy(),
        limits: Limits {
            max_tokens: Some(tokens),
            stop: Vec::new(),
        },
        ..Request::new(prompt.collect())
    };
    let capacity = scheduler.rules().check(&request).expect("it could run");
    let (mut waiting, stream) = Waiting::new(request, capacity).expect("valid settings");
    waiting.job.id = (scheduler.waiting.len() + scheduler.running.len()) as u64;
    scheduler.enqueue(waiting);
    stream
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
    let mut scheduler = scheduler();
    let streams = [400..440, 500..540].map(|prompt| submit(&mut scheduler, prompt, 30));
    for _ in 0..10 {
        scheduler.step();
    }
    let before = scheduler.owned_bytes();
    scheduler.system = nothing_left;
    scheduler.tended = None;
    scheduler.step();
    assert_eq!(scheduler.counters.preemptions, 1);
    assert_eq!(scheduler.running.len(), 1, "the oldest stays");
    assert!(scheduler.owned_bytes() < before);
    assert!(scheduler.kv_limit < scheduler.budget.kv);
    scheduler.system = plenty;
    scheduler.tended = None;
    finish(&mut scheduler, 200);
    assert_eq!(streams.map(tokens).to_vec(), expected);
}
