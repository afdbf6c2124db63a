//! A session that was written to a file goes on as one does that never stopped.

use std::path::Path;
use std::sync::Arc;

use lacuna_engine::{Engine, EngineConfig, EngineError, Generation, Limits, Sampling, Session};
use lacuna_kv::saved::{Saved, SavedError};
use lacuna_models::Model;

fn engine(model: &Arc<Model>) -> Engine {
    let config = EngineConfig {
        context_tokens: Some(1024),
        ..EngineConfig::default()
    };
    Engine::new(Arc::clone(model), &config).expect("an engine")
}

fn sampling() -> Sampling {
    Sampling {
        temperature: 0.9,
        seed: 5,
        ..Sampling::greedy()
    }
}

/// Letters that the vocabularies of all models here have.
fn words(seed: u32, length: u32) -> Vec<u32> {
    (0..length)
        .map(|index| 4 + (seed * 31 + index * index * 7) % 56)
        .collect()
}

/// Says `words` and takes the answer. Returns its tokens, and how many before it were there.
fn turn(engine: &mut Engine, session: &mut Session, words: &[u32]) -> (Vec<u32>, usize) {
    let tokens = [session.tokens(), words].concat();
    let reused = session.rewrite(&tokens).expect("pages");
    let limits = Limits {
        max_tokens: Some(30),
        ..Limits::default()
    };
    let mut generation = Generation::new(engine, session, limits).expect("a prompt");
    while generation.next_piece().expect("a step").is_some() {}
    (generation.tokens().to_vec(), reused)
}

fn models() -> Vec<Arc<Model>> {
    let mut models = vec![crate::support::model(), crate::windows::windowed()];
    models.extend(crate::states::models());
    models
}

fn restored(engine: &Engine, path: &Path) -> (Session, Saved) {
    let mut saved = Saved::open(path).expect("it was written");
    let session = engine.restore_session(&mut saved, sampling(), path);
    let mut session = session.expect("it is as it was written");
    session
        .sampler_mut()
        .set_position(saved.note.parse().expect("a number"));
    (session, saved)
}

#[test]
fn a_session_in_a_file_goes_on_as_one_that_never_stopped() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("one.session");
    for model in models() {
        let (mut engine_of_one, mut one) = {
            let engine = engine(&model);
            let session = engine.session(sampling()).expect("a session");
            (engine, session)
        };
        let mut stops = engine(&model);
        let mut other = stops.session(sampling()).expect("a session");
        for round in 0..4 {
            let words = words(round, 90);
            let expected = turn(&mut engine_of_one, &mut one, &words);
            let found = turn(&mut stops, &mut other, &words);
            assert_eq!(found, expected, "round {round}");
            assert_eq!(other.tokens(), one.tokens());
            let position = other.sampler().position().to_string();
            let saved = stops.save_session(&mut other, &position, &path);
            saved.expect("a file is written");
            // A new process, as far as pages are concerned.
            stops = engine(&model);
            let (session, saved) = restored(&stops, &path);
            assert_eq!(saved.cached, session.tokens().len() - session.pending());
            other = session;
        }
    }
}

#[test]
fn what_another_model_or_a_fault_has_made_of_a_file_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("one.session");
    let mut writes = engine(&crate::support::model());
    let mut session = writes.session(sampling()).expect("a session");
    turn(&mut writes, &mut session, &words(1, 60));
    writes
        .save_session(&mut session, "a note", &path)
        .expect("a file is written");
    let other = engine(&crate::windows::windowed());
    let mut saved = Saved::open(&path).expect("it is whole");
    let refused = other.restore_session(&mut saved, sampling(), &path);
    let Err(EngineError::Saved {
        path: named,
        source,
    }) = refused
    else {
        panic!("{refused:?}");
    };
    let SavedError::Settings(differing) = *source else {
        panic!("{source:?}");
    };
    assert_eq!(named, path, "of several files it is this one");
    assert!(
        differing.contains(&"architecture".to_owned()),
        "{differing:?}"
    );
    let whole = std::fs::read(&path).expect("a file");
    let pages = whole.len() - saved.page_bytes as usize;
    let damaged = folder.path().join("damaged.session");
    // Every byte of the fixed part, some of the rest, of the pages and beyond.
    let places = (0..88)
        .chain((88..whole.len()).step_by(1009))
        .chain([whole.len() - 1]);
    for place in places {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x10;
        std::fs::write(&damaged, bytes).expect("room");
        match Saved::open(&damaged) {
            Err(_) => assert!(place < pages, "byte {place}"),
            Ok(mut saved) => {
                assert!(place >= pages, "byte {place}");
                assert!(saved.verify().is_err());
                let refused = writes.restore_session(&mut saved, sampling(), &damaged);
                let error = refused.expect_err("its pages are damaged");
                let damaged = match &error {
                    EngineError::Saved { source, .. } => {
                        matches!(**source, SavedError::Damaged(_))
                    }
                    _ => false,
                };
                let message = error.to_string();
                assert!(damaged, "{message}");
                assert!(message.contains("damaged.session: it is"), "{message}");
            }
        }
    }
    for length in (0..whole.len()).step_by(4093).chain([whole.len() - 1]) {
        std::fs::write(&damaged, &whole[..length]).expect("room");
        assert!(Saved::open(&damaged).is_err(), "{length} bytes");
    }
    assert!(Saved::open(&path).expect("it is whole").verify().is_ok());
}
