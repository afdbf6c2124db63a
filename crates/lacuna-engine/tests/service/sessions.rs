//! Sessions beside the requests of a service: what they say, what they hold, and what becomes of them.

use std::sync::Arc;
use std::time::Duration;

use lacuna_engine::{
    Engine, EngineConfig, EngineError, FinishReason, Generation, Grace, Handle, Limits, Request,
    Sampling, Service, ServiceConfig, ServiceSession,
};
use lacuna_models::Model;

use crate::support::{Endless, config, contents, finish, greedy, prompt, start, tight};

fn sampling() -> Sampling {
    Sampling {
        temperature: 0.9,
        seed: 5,
        ..Sampling::greedy()
    }
}

fn limits(tokens: usize) -> Limits {
    Limits {
        max_tokens: Some(tokens),
        ..Limits::default()
    }
}

/// Goes on to the end. Returns the tokens, the text and why it ended.
fn go_on(
    session: &mut ServiceSession,
    sampling: Sampling,
    tokens: usize,
) -> (Vec<u32>, String, Option<FinishReason>) {
    let mut how = session.begin(sampling, &limits(tokens)).expect("a prompt");
    let (mut said, mut text, mut finish) = (Vec::new(), String::new(), None);
    while let Some(piece) = session.advance(&mut how).expect("a step") {
        said.extend(piece.token);
        text += &piece.text;
        finish = piece.finish.or(finish);
    }
    (said, text, finish)
}

/// The same by an engine that does nothing else.
fn alone(model: &Arc<Model>, prompt: &[u32], tokens: usize) -> (Vec<u32>, String) {
    let config = EngineConfig {
        context_tokens: Some(1024),
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(Arc::clone(model), &config).expect("an engine");
    let mut session = engine.session(sampling()).expect("a session");
    session.extend(prompt);
    let generation = Generation::new(&mut engine, &mut session, limits(tokens));
    let mut generation = generation.expect("a prompt");
    let mut text = String::new();
    while let Some(piece) = generation.next_piece().expect("a step") {
        text += &piece;
    }
    (generation.tokens().to_vec(), text)
}

fn models() -> Vec<Arc<Model>> {
    let mut models = vec![crate::support::model(), crate::windows::windowed()];
    models.extend(crate::states::models());
    models
}

/// Letters that the vocabularies of all models here have.
fn letters(seed: u32, length: u32) -> Vec<u32> {
    (0..length)
        .map(|index| 4 + (seed * 31 + index * index * 7) % 56)
        .collect()
}

fn service(model: &Arc<Model>) -> Service {
    Service::start(Arc::clone(model), config()).expect("a service")
}

fn session_of(handle: &Handle, tokens: &[u32]) -> ServiceSession {
    let mut session = handle.session().expect("a session");
    session.extend(tokens);
    session
}

#[test]
fn a_session_says_beside_requests_what_it_says_alone() {
    for model in models() {
        let service = service(&model);
        let handle = service.handle();
        let request = handle.submit(greedy(letters(1, 40), 60)).expect("taken");
        let mut session = session_of(&handle, &letters(2, 70));
        let (tokens, text, reason) = go_on(&mut session, sampling(), 30);
        assert_eq!((tokens, text), alone(&model, &letters(2, 70), 30));
        assert!(reason.is_some());
        let beside = finish(request).expect("an answer");
        let again = handle.submit(greedy(letters(1, 40), 60)).expect("taken");
        assert_eq!(
            beside[0].tokens,
            finish(again).expect("an answer")[0].tokens
        );
    }
}

/// It took its limits and its text to the other session.
#[test]
fn a_continuation_is_of_the_session_that_it_was_begun_for() {
    let service = service(&crate::support::model());
    let handle = service.handle();
    let mut session = session_of(&handle, &letters(3, 20));
    let mut other = session_of(&handle, &letters(4, 20));
    let mut how = session.begin(sampling(), &limits(4)).expect("a prompt");
    let refused = other.advance(&mut how);
    assert!(
        matches!(refused, Err(EngineError::OtherSession)),
        "{refused:?}"
    );
    let mut fork = session.fork().expect("pages");
    let refused = fork.advance(&mut how);
    assert!(
        matches!(refused, Err(EngineError::OtherSession)),
        "{refused:?}"
    );
    assert_eq!(
        other.pending().expect("a session"),
        20,
        "nothing was computed"
    );
    assert!(session.advance(&mut how).expect("a step").is_some());
}

#[test]
fn a_fork_goes_its_own_way_and_what_is_cut_off_is_forgotten() {
    for model in models() {
        let service = service(&model);
        let handle = service.handle();
        let mut session = session_of(&handle, &letters(3, 50));
        let (first, ..) = go_on(&mut session, sampling(), 20);
        let mut fork = session.fork().expect("pages");
        assert_eq!(fork.tokens(), session.tokens());
        fork.extend(&letters(4, 9));
        let whole = fork.tokens().to_vec();
        let (forked, ..) = go_on(&mut fork, sampling(), 20);
        assert_eq!(forked, alone(&model, &whole, 20).0, "as from the beginning");

        session.truncate(50).expect("pages");
        assert_eq!(session.tokens(), letters(3, 50));
        assert!(
            session.pending().expect("a session") > 0,
            "so that it can go on"
        );
        let (again, ..) = go_on(&mut session, sampling(), 20);
        assert_eq!(again, first, "the same seed after the same tokens");
    }
}

#[test]
fn forks_share_their_pages_and_give_them_back() {
    let service = start(config());
    let handle = service.handle();
    let mut session = session_of(&handle, &prompt(1, 600));
    go_on(&mut session, sampling(), 4);
    let one = handle.ledger();
    let forks: Vec<_> = (0..4).map(|_| session.fork().expect("pages")).collect();
    let all = handle.ledger();
    let (one_in_use, all_in_use) = (
        one.committed.get() - one.idle.get(),
        all.committed.get() - all.idle.get(),
    );
    assert!(all_in_use < 2 * one_in_use, "{one_in_use} and {all_in_use}");
    drop((forks, session));
    let none = handle.ledger();
    assert_eq!(none.committed, none.idle, "nothing is in use");
}

#[test]
fn logits_are_those_of_an_engine_alone() {
    for model in models() {
        let config = EngineConfig {
            context_tokens: Some(1024),
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(Arc::clone(&model), &config).expect("an engine");
        let tokens = letters(6, 90);
        let mut expected = Vec::new();
        let scored = engine.score(&tokens, |_, row| expected.extend_from_slice(row));
        scored.expect("logits");
        let service = service(&model);
        let handle = service.handle();
        assert!(handle.logits(&tokens, true).expect("logits") == expected);
        let last = &expected[expected.len() - model.spec().vocabulary..];
        assert!(handle.logits(&tokens, false).expect("logits") == last);
        let empty = handle.logits(&[], true);
        assert!(matches!(empty, Err(EngineError::EmptyPrompt)));
        let unknown = handle.logits(&[u32::MAX], false);
        assert!(
            matches!(unknown, Err(EngineError::Forward(_))),
            "{unknown:?}"
        );
        let too_long = handle.logits(&letters(6, 1025), false);
        assert!(matches!(too_long, Err(EngineError::PromptTooLong { .. })));
    }
}

#[test]
fn logits_end_when_they_are_told_to() {
    let service = start(config());
    let handle = service.handle();
    let mut asked = 0;
    let told = handle.logits_while(&prompt(1, 600), true, || {
        asked += 1;
        asked <= 1
    });
    assert!(told.expect("a step").is_none(), "they were not finished");
    assert_eq!(asked, 2, "before each step, and not again");
    let ledger = handle.ledger();
    assert_eq!(ledger.committed, ledger.idle, "nothing is in use");
}

/// Requests whose answers nobody reads have nearly all pages and keep them; a session gets its own all the same, and
/// nobody's answer is another for it.
#[test]
fn requests_make_room_for_a_session() {
    let request = |seed| Request {
        constraint: Some(Box::new(Endless)),
        ..greedy(prompt(seed, 80), 400)
    };
    let service = start(ServiceConfig {
        max_running: 4,
        ..tight(88, true)
    });
    let handle = service.handle();
    let submit = |seed| handle.submit(request(seed)).expect("taken");
    let streams: Vec<_> = (0..4).map(submit).collect();
    let group = handle.status().pages.group.get();
    let in_use = || {
        let ledger = handle.ledger();
        (ledger.committed.get() - ledger.idle.get()) / group
    };
    while in_use() < 82 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut session = session_of(&handle, &prompt(9, 150));
    let (said, ..) = go_on(&mut session, sampling(), 20);
    drop(session);
    assert_eq!(said, alone(&crate::support::model(), &prompt(9, 150), 20).0);
    assert!(
        handle.status().counters.preemptions > 0,
        "somebody gave way"
    );
    for (seed, stream) in (0..4).zip(streams) {
        let found = finish(stream).expect("an answer");
        let expected = crate::support::alone(request(seed));
        assert_eq!(contents(&found), contents(&expected), "request {seed}");
    }
}

#[test]
fn a_session_that_finds_no_memory_says_so_and_goes_on_with_less() {
    let service = start(tight(6, true));
    let handle = service.handle();
    let mut session = session_of(&handle, &prompt(1, 400));
    let mut how = session.begin(sampling(), &limits(4)).expect("a prompt");
    let refused = loop {
        match session.advance(&mut how) {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it does not fit"),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, EngineError::Kv(_)), "{refused}");
    session.truncate(60).expect("pages are given back");
    assert_eq!(go_on(&mut session, sampling(), 4).0.len(), 4);
}

#[test]
fn a_session_outlives_the_process_in_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.session");
    let model = crate::support::model();
    let (first, second) = (service(&model), service(&model));
    let mut session = session_of(&first.handle(), &prompt(2, 80));
    go_on(&mut session, sampling(), 10);
    session.save("a note", &path).expect("written");
    let (mut restored, note) = second.handle().restore_session(&path).expect("read");
    assert_eq!(
        (restored.tokens(), note.as_str()),
        (session.tokens(), "a note")
    );
    assert_eq!(
        restored.pending().expect("a session"),
        1,
        "none is computed again"
    );
    let [here, there] = [&mut session, &mut restored].map(|it| go_on(it, sampling(), 10));
    assert_eq!(here, there);
    let damaged = folder.path().join("b.session");
    std::fs::write(&damaged, b"nothing").expect("written");
    let refused = second.handle().restore_session(&damaged);
    assert!(matches!(refused, Err(EngineError::Saved { .. })));
}

#[test]
fn a_session_ends_with_its_service() {
    let service = start(config());
    let handle = service.handle();
    let mut session = session_of(&handle, &prompt(1, 20));
    let mut how = session.begin(sampling(), &limits(4)).expect("a prompt");
    service.shutdown(Grace::Immediate);
    let stepped = session.advance(&mut how);
    assert!(
        matches!(stepped, Err(EngineError::ServiceEnded)),
        "{stepped:?}"
    );
    assert!(matches!(session.fork(), Err(EngineError::ServiceEnded)));
    assert!(matches!(handle.session(), Err(EngineError::ServiceEnded)));
    assert!(matches!(
        handle.logits(&[1], false),
        Err(EngineError::ServiceEnded)
    ));
}
