//! How fast a service generates after many prompts that come at once, from the library alone: what
//! `bench/python/throughput.py` compares the Python package with.
//!
//! `cargo run --release -p lacuna --example throughput -- MODEL PROMPTS PROMPT_TOKENS REPLY_TOKENS ROUNDS` prints tokens
//! per second, one line for each round.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use lacuna::{Event, Limits, Model, ModelFiles, Request, Sampling, Service, ServiceConfig, Stream};

/// Tokens that look like text, different for each prompt: the same as in the script beside it.
fn prompt(number: usize, length: usize, vocabulary: usize) -> Vec<u32> {
    let token =
        |index: usize| ((number * 7919 + index * 104_729) % (vocabulary - 300) + 300) as u32;
    (0..length).map(token).collect()
}

/// Tokens that came.
fn read(mut stream: Stream) -> Result<usize, Box<dyn Error>> {
    let mut tokens = 0;
    while let Some(event) = stream.blocking_recv() {
        match event {
            Event::Token { .. } => tokens += 1,
            Event::Failed(failure) => return Err(failure.into()),
            _ => {}
        }
    }
    Ok(tokens)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, numbers @ ..] = arguments.as_slice() else {
        return Err("name a model".into());
    };
    let numbers: Vec<usize> = numbers
        .iter()
        .map(|it| it.parse())
        .collect::<Result<_, _>>()?;
    let &[prompts, prompt_tokens, reply_tokens, rounds] = numbers.as_slice() else {
        return Err("give PROMPTS PROMPT_TOKENS REPLY_TOKENS ROUNDS".into());
    };
    let files = match model.as_str() {
        "demo" => lacuna::demo(),
        path => ModelFiles::open(Path::new(path))?,
    };
    let model = Arc::new(Model::load(files)?);
    let vocabulary = model.spec().vocabulary;
    let config = ServiceConfig {
        prefix_cache: lacuna::PrefixCacheConfig {
            enabled: false,
            ..Default::default()
        },
        ..ServiceConfig::default()
    };
    let service = Service::start(model, config)?;
    for _ in 0..rounds {
        let begun = Instant::now();
        let submit = |number| {
            let limits = Limits {
                max_tokens: Some(reply_tokens),
                ignore_eos: true,
                ..Limits::default()
            };
            service.handle().submit(Request {
                sampling: Sampling::greedy(),
                limits,
                ..Request::new(prompt(number, prompt_tokens, vocabulary))
            })
        };
        let streams = (0..prompts).map(submit).collect::<Result<Vec<_>, _>>()?;
        let tokens = streams.into_iter().map(read).sum::<Result<usize, _>>()?;
        println!("{:.1}", tokens as f64 / begun.elapsed().as_secs_f64());
    }
    Ok(())
}
