//! The budget: divided up, and what does not fit into it refused.

use std::sync::Arc;

use lacuna_engine::{EngineError, Refusal, Request, Service};
use lacuna_pages::ByteLength;

use crate::support::{config, finish, greedy, leaving, model, prompt, start};

#[test]
fn a_budget_that_holds_nothing_is_refused_with_what_it_takes() {
    let mut config = config();
    config.engine.budget = Some(ByteLength::kibibytes(100));
    let error = Service::start(Arc::clone(&model()), config.clone()).expect_err("too small");
    let EngineError::BudgetTooSmall(error) = error else {
        panic!("{error}");
    };
    // What requests get is an eighth of the budget, which was almost nothing.
    let needed = error.needed.bytes();
    config.engine.budget = Some(ByteLength::new(needed + needed / 7));
    let service = start(config);
    finish(
        service
            .handle()
            .submit(greedy(prompt(1, 8), 3))
            .expect("taken"),
    )
    .expect("an answer");
}

#[test]
fn a_request_that_could_never_fit_is_refused_and_one_that_fits_exactly_runs() {
    let mut config = config();
    let status = start(config.clone()).handle().status();
    config.engine.budget = Some(leaving(&status, 4 * status.pages.group.get()));
    let service = start(config);
    let most = 4 * status.pages.group_tokens;
    let submit = |request| service.handle().submit(request);
    let refused = submit(greedy(prompt(1, 30), most - 30 + 1)).expect_err("too large");
    assert!(matches!(refused, Refusal::TooLarge { .. }), "{refused:?}");
    let two = Request {
        choices: 2.try_into().expect("two"),
        ..greedy(prompt(1, 30), most - 30)
    };
    assert!(matches!(submit(two), Err(Refusal::TooLarge { .. })));
    let found =
        finish(submit(greedy(prompt(1, 30), most - 30)).expect("taken")).expect("an answer");
    assert!(found[0].reason.is_some());
}
