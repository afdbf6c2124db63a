//! One request: how it ends, and what comes with it.

use std::time::Duration;

use lacuna_engine::{
    Constraint, ConstraintError, Difference, Event, Failure, FinishReason, Grace, Limits, Miss,
    Refusal, Request, Sampling,
};

use lacuna_text::tokenizer::Decode;

use crate::support::{
    alone, config, endless, eventually, finish, greedy, idle, model, prompt, start,
};

#[test]
fn what_can_never_run_is_told_without_submitting_it() {
    let service = start(config());
    let handle = service.handle();
    handle.check(&greedy(prompt(1, 12), 4)).expect("it can run");
    let empty = handle.check(&greedy(Vec::new(), 4));
    assert!(matches!(empty, Err(Refusal::EmptyPrompt)), "{empty:?}");
    let unknown = handle.check(&greedy(vec![u32::MAX], 4));
    assert!(
        matches!(unknown, Err(Refusal::TokenOutOfRange { .. })),
        "{unknown:?}"
    );
    let counters = handle.status().counters;
    assert_eq!((counters.requests, counters.refused), (0, 0));
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let whole = alone(greedy(prompt(1, 12), 24));
    let text = &whole[0].text;
    let middle = text
        .char_indices()
        .nth(text.chars().count() / 2)
        .expect("some text")
        .0;
    let stop: String = text[middle..].chars().take(4).collect();
    let request = Request {
        limits: Limits {
            max_tokens: Some(24),
            stop: vec![stop.clone()],
            ..Limits::default()
        },
        ..greedy(prompt(1, 12), 24)
    };
    let found = alone(request);
    assert_eq!(found[0].reason, Some(FinishReason::StopString(0)));
    assert_eq!(
        found[0].text,
        text[..text.find(&stop).expect("it is in there")]
    );
}

#[test]
fn the_context_ends_what_nothing_else_does() {
    let mut config = config();
    config.engine.context_tokens = Some(40);
    let request = Request {
        limits: Limits::default(),
        ..greedy(prompt(2, 30), 0)
    };
    let found = finish(start(config).handle().submit(request).expect("taken")).expect("an answer");
    if found[0].reason == Some(FinishReason::ContextFull) {
        assert_eq!(found[0].tokens.len(), 11, "the last token needs no row");
    } else {
        assert_eq!(found[0].reason, Some(FinishReason::EndOfText));
    }
}

#[test]
fn logprobs_belong_to_the_tokens_they_come_with() {
    let request = Request {
        logprobs: Some(3),
        ..greedy(prompt(3, 20), 5)
    };
    let service = start(config());
    let mut stream = service.handle().submit(request).expect("taken");
    let mut tokens = 0;
    while let Some(event) = stream.blocking_recv() {
        let Event::Token {
            token, logprobs, ..
        } = event
        else {
            continue;
        };
        let logprobs = logprobs.expect("asked for");
        assert_eq!(logprobs.top.len(), 3);
        assert_eq!(
            logprobs.top[0],
            (token, logprobs.chosen),
            "greedy takes the likeliest"
        );
        assert!(logprobs.top.iter().all(|&(_, logprob)| logprob <= 0.0));
        tokens += 1;
    }
    assert_eq!(tokens, 5);
}

#[test]
fn the_first_event_says_what_was_reused_and_why_not_more() {
    let service = start(config());
    let first = |prompt: Vec<u32>| {
        let mut stream = service.handle().submit(greedy(prompt, 1)).expect("taken");
        let first = stream.blocking_recv();
        while stream.blocking_recv().is_some() {}
        match first {
            Some(Event::Started {
                reused_tokens,
                miss,
                difference,
                ..
            }) => (reused_tokens, miss, difference),
            other => panic!("{other:?} before the start"),
        }
    };
    // Where a prompt differs is told with its own tokens.
    let differs = |prompt: &[u32], at: usize| {
        let tokens = &prompt[at..(at + 8).min(prompt.len())];
        let text = model().tokenizer().decode(tokens, Decode::MARKUP);
        let text = text.expect("tokens of the vocabulary");
        Some(Difference { at, text })
    };
    let long = prompt(4, 100);
    assert_eq!(first(long.clone()), (0, Some(Miss::Unseen), None));
    assert_eq!(first(long[..40].to_vec()), (39, None, None));
    let other = [&long[..64], &prompt(5, 40)].concat();
    let difference = differs(&other, 64);
    assert_eq!(first(other), (64, Some(Miss::Diverged), difference));
    let longer = [&long[..96], &prompt(6, 40)].concat();
    assert_eq!(first(longer), (96, Some(Miss::Ended), None));
    // One token further in a group is too little to copy its pages for, and a difference all the same.
    let short = [&long[..65], &prompt(7, 4)].concat();
    let difference = differs(&short, 65);
    assert_eq!(first(short), (64, None, difference));
}

#[test]
fn what_could_never_run_is_refused() {
    let mut config = config();
    config.engine.context_tokens = Some(64);
    config.max_running = 4;
    let service = start(config);
    let refusal = |request| service.handle().submit(request).expect_err("refused");
    assert_eq!(refusal(greedy(Vec::new(), 1)), Refusal::EmptyPrompt);
    let too_long = Refusal::PromptTooLong {
        prompt: 65,
        context: 64,
    };
    assert_eq!(refusal(greedy(prompt(1, 65), 1)), too_long);
    let vocabulary = service.handle().model().spec().vocabulary;
    let beyond = vocabulary as u32;
    let unknown = Refusal::TokenOutOfRange {
        token: beyond,
        vocabulary,
    };
    assert_eq!(refusal(greedy(vec![5, beyond], 1)), unknown);
    let many = Request {
        choices: 5.try_into().expect("five"),
        ..greedy(prompt(1, 4), 1)
    };
    assert_eq!(refusal(many), Refusal::TooManyChoices { asked: 5, most: 4 });
    let many = Request {
        logprobs: Some(1000),
        ..greedy(prompt(1, 4), 1)
    };
    assert_eq!(
        refusal(many),
        Refusal::TooManyLogprobs {
            asked: 1000,
            most: 128
        }
    );
    let sampling = Sampling {
        temperature: f32::NAN,
        ..Sampling::greedy()
    };
    let odd = Request {
        sampling,
        ..greedy(prompt(1, 4), 1)
    };
    assert!(matches!(refusal(odd), Refusal::Sampling(_)));
    let status = service.handle().status();
    assert_eq!((status.counters.refused, status.counters.requests), (6, 0));
}

#[test]
fn a_full_queue_refuses_and_says_when_to_come_back() {
    let mut config = config();
    (config.max_running, config.max_waiting) = (1, 2);
    let service = start(config);
    let submit = || service.handle().submit(endless(prompt(1, 200), 800));
    let taken: Vec<_> = (0..3).map(|_| submit().expect("room")).collect();
    let refused = submit().expect_err("a full queue");
    assert!(
        matches!(refused, Refusal::QueueFull { retry_after, .. } if retry_after >= Duration::from_secs(1)),
        "{refused:?}"
    );
    drop(taken);
    eventually(&service, |status| {
        status.running == 0 && status.waiting == 0
    });
    finish(
        service
            .handle()
            .submit(greedy(prompt(1, 5), 2))
            .expect("room again"),
    )
    .expect("an answer");
}

#[test]
fn a_deadline_ends_running_and_waiting_requests() {
    let mut config = config();
    config.max_running = 1;
    let service = start(config);
    let request = || Request {
        deadline: Some(Duration::from_millis(50)),
        ..endless(prompt(1, 300), 700)
    };
    let streams =
        [request(), request()].map(|request| service.handle().submit(request).expect("taken"));
    for stream in streams {
        assert!(finish(stream).expect_err("too slow").contains("deadline"));
    }
    assert_eq!(idle(&service).counters.failed, 2);
}

#[test]
fn a_client_that_does_not_read_pauses_itself_only_and_is_let_go() {
    let mut config = config();
    config.engine.context_tokens = Some(4096);
    config.unread_patience = Duration::from_millis(100);
    let service = start(config);
    let endless = Request {
        constraint: Some(Box::new(Only {
            allowed: vec![400, 401],
            left: usize::MAX,
        })),
        ..greedy(prompt(1, 4), 4000)
    };
    let unread = service.handle().submit(endless).expect("taken");
    let read = service
        .handle()
        .submit(greedy(prompt(2, 4), 20))
        .expect("taken");
    finish(read).expect("an answer");
    eventually(&service, |status| {
        status.counters.failed == 1 && status.running == 0
    });
    let error = finish(unread).expect_err("not read for too long");
    assert!(error.contains("not read"), "{error}");
}

/// Allows a few tokens, a number of times, then nothing but the end.
struct Only {
    allowed: Vec<u32>,
    left: usize,
}

impl Constraint for Only {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self {
            allowed: self.allowed.clone(),
            left: self.left,
        })
    }

    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        if self.allowed.is_empty() {
            return Err(ConstraintError::NotFollowed(
                "nothing is allowed".to_owned(),
            ));
        }
        for (token, logit) in (0..).zip(logits) {
            if !self.allowed.contains(&token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        assert!(self.allowed.contains(&token));
        self.left -= 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.left == 0
    }
}

#[test]
fn a_constraint_decides_what_may_come_and_when_it_is_enough() {
    let request = Request {
        choices: 2.try_into().expect("two"),
        constraint: Some(Box::new(Only {
            allowed: vec![333, 444],
            left: 6,
        })),
        ..greedy(prompt(1, 20), 100)
    };
    let found = alone(request);
    for answer in &found {
        assert_eq!(answer.tokens.len(), 6);
        assert!(answer.tokens.iter().all(|token| [333, 444].contains(token)));
        assert_eq!(answer.reason, Some(FinishReason::ConstraintComplete));
    }
    assert_eq!(
        found[0].tokens, found[1].tokens,
        "each choice has its own state"
    );
}

#[test]
fn a_constraint_that_cannot_be_met_fails_its_request_only() {
    let service = start(config());
    let hopeless = Request {
        constraint: Some(Box::new(Only {
            allowed: Vec::new(),
            left: 1,
        })),
        ..greedy(prompt(1, 20), 10)
    };
    let hopeless = service.handle().submit(hopeless).expect("taken");
    let other = service
        .handle()
        .submit(greedy(prompt(2, 20), 10))
        .expect("taken");
    assert!(
        finish(hopeless)
            .expect_err("hopeless")
            .contains("nothing is allowed")
    );
    assert_eq!(
        finish(other).expect("an answer"),
        alone(greedy(prompt(2, 20), 10))
    );
}

/// What it masks is impossible, whatever it returns.
#[test]
fn a_constraint_that_leaves_no_token_fails_its_request() {
    let beyond = model().spec().vocabulary as u32;
    let hopeless = Request {
        constraint: Some(Box::new(Only {
            allowed: vec![beyond],
            left: 1,
        })),
        ..greedy(prompt(1, 20), 10)
    };
    let service = start(config());
    let hopeless = service.handle().submit(hopeless).expect("taken");
    let said = finish(hopeless).expect_err("nothing may come");
    assert!(said.contains("no token"), "{said}");
    assert!(service.handle().is_alive());
}

#[test]
fn a_graceful_end_finishes_what_was_taken_and_takes_no_more() {
    let service = start(config());
    let handle = service.handle();
    let streams: Vec<_> = (0..3)
        .map(|seed| handle.submit(greedy(prompt(seed, 30), 10)).expect("taken"))
        .collect();
    // As long as it takes: more than clocks count to, which once ended the engine's thread.
    service.shutdown(Grace::Finish(Duration::MAX));
    for stream in streams {
        assert_eq!(finish(stream).expect("an answer")[0].tokens.len(), 10);
    }
    let refused = handle
        .submit(greedy(prompt(1, 3), 1))
        .expect_err("too late");
    assert_eq!(refused, Refusal::ShuttingDown);
}

#[test]
fn an_immediate_end_fails_what_is_under_way() {
    let service = start(config());
    let stream = service
        .handle()
        .submit(endless(prompt(1, 300), 700))
        .expect("taken");
    drop(service);
    assert!(
        finish(stream)
            .expect_err("cut off")
            .contains("shutting down")
    );
}

/// A constraint with a bug.
struct Panics;

impl Constraint for Panics {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self)
    }

    fn mask(&mut self, _logits: &mut [f32]) -> Result<(), ConstraintError> {
        panic!("a bug in a constraint");
    }

    fn accept(&mut self, _token: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }
}

#[test]
fn a_service_whose_thread_has_panicked_is_not_alive_and_takes_nothing() {
    let service = start(config());
    let handle = service.handle();
    assert!(handle.is_alive());
    let request = Request {
        constraint: Some(Box::new(Panics)),
        ..greedy(prompt(1, 12), 4)
    };
    let mut stream = handle.submit(request).expect("taken");
    let mut last = None;
    while let Some(event) = stream.blocking_recv() {
        last = Some(event);
    }
    // It ended as if all had been said.
    let ended = matches!(last, Some(Event::Failed(Failure::ServiceEnded)));
    assert!(ended, "{last:?}");
    assert!(stream.try_recv().is_none(), "once");
    eventually(&service, |_| !handle.is_alive());
    let refused = handle.submit(greedy(prompt(1, 12), 4)).err();
    assert_eq!(refused, Some(Refusal::ShuttingDown));
}
