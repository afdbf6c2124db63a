//! Log-probabilities of prompts: computed in pieces, beside others, again after a preemption, and
//! always what scoring the whole text gives.

use std::num::NonZeroUsize;

use lacuna_engine::{Engine, EngineConfig, Event, PromptToken, Request, Service};

use crate::support::{
    alone, config, contents, endless, finish, greedy, idle, model, prompt, start, tight,
};

const TOP: usize = 3;

fn scored(prompt: Vec<u32>, tokens: usize) -> Request {
    Request {
        prompt_logprobs: Some(TOP),
        ..greedy(prompt, tokens)
    }
}

/// The scores of a request's prompt, the tokens that were reused, and those that were generated.
fn scores(service: &Service, request: Request) -> (Vec<PromptToken>, usize, Vec<u32>) {
    let mut stream = service.handle().submit(request).expect("taken");
    let (mut scores, mut reused, mut tokens) = (Vec::new(), 0, Vec::new());
    while let Some(event) = stream.blocking_recv() {
        match event {
            Event::PromptScored(more) => {
                assert!(tokens.is_empty(), "the prompt comes before what follows it");
                scores.extend(more);
            }
            Event::Token {
                token, choice: 0, ..
            } => tokens.push(token),
            Event::Finished { usage, .. } => reused = usage.reused_tokens,
            Event::Failed(failure) => panic!("{failure}"),
            _ => {}
        }
    }
    (scores, reused, tokens)
}

/// For each token of `prompt` from the second on, its log-probability and rank by a scoring engine,
/// which computes one row after the other.
fn expected(prompt: &[u32]) -> Vec<(u32, f32, usize)> {
    let config = EngineConfig {
        context_tokens: Some(1024),
        batch_tokens: 1,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model(), &config).expect("an engine");
    let mut expected = Vec::new();
    let each = |position: usize, logits: &[f32]| {
        let Some(&next) = prompt.get(position + 1) else {
            return;
        };
        let score = logits[next as usize];
        let highest = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits
            .iter()
            .map(|&logit| f64::from(logit - highest).exp())
            .sum();
        let logprob = f64::from(score - highest) - sum.ln();
        let rank = logits.iter().filter(|&&logit| logit >= score).count();
        expected.push((next, logprob as f32, rank));
    };
    engine.score(prompt, each).expect("scores");
    expected
}

fn assert_scores(found: &[PromptToken], prompt: &[u32]) {
    let expected = expected(prompt);
    assert_eq!(found.len(), prompt.len() - 1);
    for (found, (token, logprob, rank)) in found.iter().zip(expected) {
        assert_eq!(found.token, token);
        assert!(
            (found.logprobs.chosen - logprob).abs() < 1e-4,
            "{found:?}: {logprob}"
        );
        assert_eq!(found.logprobs.rank, rank);
        assert_eq!(found.logprobs.top.len(), TOP);
        assert!(found.logprobs.top.is_sorted_by(|a, b| a.1 >= b.1));
        if rank <= TOP {
            assert_eq!(found.logprobs.top[rank - 1], (token, found.logprobs.chosen));
        }
    }
}

#[test]
fn a_prompt_scored_in_pieces_is_what_the_whole_text_gives() {
    let text = prompt(1, 90);
    let mut first = None;
    for (running, step) in [(1, 64), (4, 64), (32, 256), (8, 8)] {
        let mut config = config();
        (config.max_running, config.max_batched_tokens) = (running, step);
        let service = start(config);
        let (found, reused, tokens) = scores(&service, scored(text.clone(), 4));
        assert_scores(&found, &text);
        let first = first.get_or_insert_with(|| found.clone());
        assert_eq!(*first, found, "to the last bit");
        assert_eq!(
            (reused, tokens),
            (0, alone(greedy(text.clone(), 4))[0].tokens.clone())
        );
    }
}

#[test]
fn scoring_computes_what_the_cache_has_and_leaves_it_to_others() {
    let text = prompt(2, 100);
    let service = start(config());
    let (first, reused, _) = scores(&service, scored(text.clone(), 1));
    assert_eq!(reused, 0);
    let plain = finish(
        service
            .handle()
            .submit(greedy(text.clone(), 1))
            .expect("taken"),
    );
    assert_eq!(
        plain.expect("an answer")[0].reused,
        96,
        "whole groups of it are shared"
    );
    let (again, reused, _) = scores(&service, scored(text.clone(), 1));
    assert_eq!((reused, again), (0, first));
}

#[test]
fn others_go_on_beside_a_prompt_that_is_scored() {
    let text = prompt(3, 120);
    let mut config = config();
    config.max_running = 4;
    let service = start(config);
    let others: Vec<_> = (10..13).map(|seed| greedy(prompt(seed, 30), 20)).collect();
    let submit = |request| service.handle().submit(request).expect("taken");
    let streams: Vec<_> = others.into_iter().map(submit).collect();
    let (found, ..) = scores(&service, scored(text.clone(), 3));
    assert_scores(&found, &text);
    for (seed, stream) in (10..13).zip(streams) {
        let answers = finish(stream).expect("an answer");
        assert_eq!(
            contents(&answers),
            contents(&alone(greedy(prompt(seed, 30), 20)))
        );
    }
}

#[test]
fn each_choice_follows_the_same_scored_prompt_and_none_is_needed() {
    let text = prompt(4, 40);
    let service = start(config());
    let several = Request {
        choices: NonZeroUsize::new(3).expect("three"),
        ..scored(text.clone(), 5)
    };
    let (found, ..) = scores(&service, several);
    assert_scores(&found, &text);
    let (found, _, tokens) = scores(&service, scored(text.clone(), 0));
    assert_scores(&found, &text);
    assert!(tokens.is_empty());
    let (found, _, tokens) = scores(&service, scored(text[..1].to_vec(), 1));
    assert_eq!(
        (found.len(), tokens.len()),
        (0, 1),
        "the first token has no probability"
    );
}

#[test]
fn a_preempted_request_scores_each_token_once() {
    let text = prompt(5, 140);
    let service = start(tight(24, true));
    let long = service
        .handle()
        .submit(endless(prompt(6, 60), 250))
        .expect("taken");
    let (found, ..) = scores(&service, scored(text.clone(), 200));
    assert_scores(&found, &text);
    finish(long).expect("an answer");
    assert!(
        idle(&service).counters.preemptions > 0,
        "there was not room for both"
    );
}
