//! What the choices of a request share, and what each computes for itself.

use super::*;
use crate::sampler::Penalties;

fn of_three_choices(prompt: Vec<u32>, tokens: usize) -> Request {
    Request {
        choices: 3.try_into().expect("more than none"),
        ..endless(prompt, tokens)
    }
}

/// Tokens that each session of the only running request has computed.
fn computed(scheduler: &Scheduler) -> Vec<usize> {
    let sessions = scheduler.running[0].sessions.iter();
    sessions.map(|session| session.sequence.len()).collect()
}

#[test]
fn choices_fork_off_as_soon_as_the_prompt_is_computed_and_compute_its_last_token_again() {
    for enabled in [true, false] {
        let mut scheduler = with_context(512);
        scheduler.config.prefix_cache.enabled = enabled;
        let stream = enqueue(&mut scheduler, of_three_choices(prompt(0, 100), 4));
        scheduler.step();
        assert_eq!(computed(&scheduler), [64], "the prompt is not complete");
        scheduler.step();
        assert_eq!(computed(&scheduler), [100, 99, 99]);
        scheduler.step();
        assert_eq!(computed(&scheduler), [101, 100, 100]);
        finish(&mut scheduler, 5);
        assert_eq!(scheduler.counters.steps, 2 + 4, "side by side");
        drop(stream);
    }
}

#[test]
fn choices_fork_off_at_once_where_a_step_ends_before_the_last_token() {
    let mut scheduler = with_context(512);
    let _stream = enqueue(&mut scheduler, of_three_choices(prompt(0, 65), 4));
    scheduler.step();
    assert_eq!(computed(&scheduler), [64, 64, 64]);
}

#[test]
fn a_prompt_of_a_model_with_states_is_computed_to_where_its_choices_fork_off() {
    let mut scheduler = scheduler_of(super::speculation::family("qwen3.5"), 256);
    scheduler.config.prefix_cache.enabled = false;
    let prompt: Vec<u32> = (0..100).map(|token| 3 + token % 50).collect();
    let request = Request {
        choices: 3.try_into().expect("more than none"),
        ..after(prompt, 4)
    };
    let _stream = enqueue(&mut scheduler, request);
    scheduler.step();
    assert_eq!(computed(&scheduler), [64]);
    scheduler.step();
    assert_eq!(
        computed(&scheduler),
        [99, 99, 99],
        "the state of the last token but one is there once"
    );
    scheduler.step();
    assert_eq!(computed(&scheduler), [100, 100, 100]);
}

#[test]
fn a_prompt_that_has_been_scored_is_computed_again_without_scores() {
    // A step has rows of logits for four tokens, and of the other tokens it computes 64.
    let mut scheduler = with_context(512);
    scheduler.config.prefix_cache.enabled = false;
    let scored = Request {
        prompt_logprobs: Some(0),
        ..endless(prompt(0, 30), 20)
    };
    let _stream = enqueue(&mut scheduler, scored);
    scheduler.step();
    assert_eq!(computed(&scheduler), [4]);
    while scheduler.counters.generated_tokens < 5 {
        scheduler.step();
    }
    assert!(scheduler.preempt_last(swapping::Urgency::Now));
    scheduler.step();
    assert_eq!(computed(&scheduler), [35], "all at once");
}

#[test]
fn what_the_prompt_repeats_is_not_held_against_the_reply() {
    let mut scheduler = scheduler();
    let penalties = Penalties {
        frequency: 2.0,
        ..Penalties::default()
    };
    let request = Request {
        prompt: vec![5; 60],
        sampling: Sampling {
            penalties,
            logit_bias: [(5, 100.0), (6, 40.0)].into(),
            ..Sampling::greedy()
        },
        ..greedy(0..1, 40)
    };
    let stream = enqueue(&mut scheduler, request);
    finish(&mut scheduler, 100);
    let tokens = tokens(stream);
    assert!(tokens[..10].iter().all(|token| *token == 5), "{tokens:?}");
    assert!(tokens.contains(&6), "what it repeats itself is: {tokens:?}");
}
