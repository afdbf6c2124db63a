//! What ends a reply, what cannot end it yet, and what of it is shown.

use lacuna_engine::{FinishReason, Limits, Refusal, Request, Sampling, ServiceConfig, StopText};
use lacuna_text::tokenizer::SpecialText;

use crate::support::{Answer, alone, config, finish, greedy, model, prompt, start};

fn with_limits(limits: Limits) -> Request {
    Request {
        limits,
        ..greedy(prompt(1, 12), 24)
    }
}

fn limited(tokens: usize, change: impl FnOnce(&mut Limits)) -> Request {
    let mut limits = Limits {
        max_tokens: Some(tokens),
        ..Limits::default()
    };
    change(&mut limits);
    with_limits(limits)
}

fn one(request: Request) -> Answer {
    alone(request).pop().expect("an answer")
}

/// Makes the end of the text the likeliest token at every place.
fn ending(request: Request) -> Request {
    let end = model().tokenizer().end_of_generation().next();
    Request {
        sampling: Sampling {
            logit_bias: [(end.expect("an end"), 100.0)].into(),
            ..Sampling::greedy()
        },
        ..request
    }
}

#[test]
fn a_stop_token_ends_the_text_before_it_or_with_it() {
    let whole = one(limited(24, |_| {}));
    let stop = whole.tokens[9];
    let first = whole.tokens.iter().position(|&token| token == stop);
    let first = first.expect("it is there");
    for (text, end) in [(StopText::Hide, first), (StopText::Show, first + 1)] {
        let found = one(limited(24, |limits| {
            limits.stop_tokens = vec![stop];
            limits.stop_text = text;
        }));
        assert_eq!(found.tokens, whole.tokens[..end]);
        assert_eq!(found.reason, Some(FinishReason::StopToken(stop)));
        assert!(whole.text.starts_with(&found.text));
    }
}

#[test]
fn before_the_least_number_of_tokens_nothing_ends_the_text() {
    assert_eq!(one(ending(limited(20, |_| {}))).tokens.len(), 0);
    let end = one(ending(limited(20, |limits| limits.min_tokens = 7)));
    assert_eq!(end.tokens.len(), 7);
    assert_eq!(end.reason, Some(FinishReason::EndOfText));
    let whole = one(limited(24, |_| {}));
    let stop = whole.tokens[3];
    let found = one(limited(24, |limits| {
        limits.stop_tokens = vec![stop];
        limits.min_tokens = 6;
    }));
    assert!(!found.tokens[..6].contains(&stop), "it is impossible there");
    assert_ne!(found.tokens, whole.tokens[..found.tokens.len()]);
}

#[test]
fn a_stop_string_counts_from_the_least_number_of_tokens_on() {
    let whole = one(limited(24, |_| {}));
    let stop: String = whole.text.chars().take(2).collect();
    let at_once = one(limited(24, |limits| limits.stop = vec![stop.clone()]));
    assert_eq!(at_once.text, "");
    let later = one(limited(24, |limits| {
        limits.stop = vec![stop.clone()];
        limits.min_tokens = 8;
    }));
    assert!(later.tokens.len() >= 8, "{later:?}");
    assert!(later.text.starts_with(&stop) && whole.text.starts_with(&later.text));
    let last = whole.text.rfind(&stop).expect("it is there");
    let expected = later.reason == Some(FinishReason::StopString(0));
    assert!(
        expected || last < later.text.len(),
        "it is found if it comes again"
    );
}

#[test]
fn an_end_that_is_ignored_is_a_token_like_any_other() {
    let request = |special| {
        ending(limited(5, |limits| {
            limits.ignore_eos = true;
            limits.special = special;
        }))
    };
    let hidden = one(request(SpecialText::Skip));
    assert_eq!((hidden.tokens.len(), hidden.text.as_str()), (5, ""));
    assert_eq!(hidden.reason, Some(FinishReason::MaxTokens));
    let shown = one(request(SpecialText::Show));
    let end = model()
        .tokenizer()
        .token_text(shown.tokens[0])
        .expect("a name");
    assert_eq!(shown.text, end.repeat(5));
}

#[test]
fn limits_that_contradict_each_other_or_the_vocabulary_are_refused() {
    let service = start(config());
    let vocabulary = model().spec().vocabulary;
    let refusal = |request| service.handle().submit(request).expect_err("refused");
    let least = refusal(limited(3, |limits| limits.min_tokens = 4));
    assert_eq!(least, Refusal::MinTokens { least: 4, most: 3 });
    let stop = refusal(limited(3, |limits| {
        limits.stop_tokens = vec![vocabulary as u32]
    }));
    assert!(matches!(
        stop,
        Refusal::SettingOutOfRange {
            setting: "stop_token_ids",
            ..
        }
    ));
    let bias = |bias: f32, token| Request {
        sampling: Sampling {
            logit_bias: [(token, bias)].into(),
            ..Sampling::greedy()
        },
        ..limited(3, |_| {})
    };
    let unknown = refusal(bias(1.0, vocabulary as u32));
    assert!(matches!(
        unknown,
        Refusal::SettingOutOfRange {
            setting: "logit_bias",
            ..
        }
    ));
    assert!(matches!(refusal(bias(101.0, 0)), Refusal::Sampling(_)));
    finish(service.handle().submit(bias(100.0, 0)).expect("taken")).expect("an answer");
}

/// The largest number there is says that there is no limit.
#[test]
fn limits_may_be_as_large_as_numbers_are() {
    let request = || greedy(prompt(1, 12), 4);
    let expected = alone(request());
    let changes: [fn(&mut ServiceConfig); 3] = [
        |config| config.max_waiting = usize::MAX,
        |config| config.max_running = usize::MAX,
        |config| (config.max_waiting, config.mixed_tokens) = (usize::MAX, usize::MAX),
    ];
    for change in changes {
        let mut config = config();
        change(&mut config);
        let service = start(config);
        let streams: Vec<_> = (0..3)
            .map(|_| service.handle().submit(request()).expect("taken"))
            .collect();
        for stream in streams {
            let found = finish(stream).expect("an answer").pop().expect("a choice");
            assert_eq!(found.tokens, expected[0].tokens);
        }
    }
}
