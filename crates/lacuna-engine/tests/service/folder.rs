//! What a service leaves in a cache folder: the next answers from it as if it had computed all of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lacuna_engine::{Event, Grace, Miss, Request, Service, ServiceConfig, TokenLogprobs};
use lacuna_files::{Mapping, ModelFiles};
use lacuna_kv::folder::remote::{MemoryStore, Remote, StoreTrouble};
use lacuna_kv::folder::{FolderConfig, FolderStatus};
use lacuna_models::Model;
use lacuna_pages::ByteLength;

use crate::support::{config, demo_bytes, greedy, idle, model};

/// Tokens, each with its log-probabilities, which are equal when logits are; and prompt tokens found.
type Reply = (Vec<(u32, Option<TokenLogprobs>)>, usize);

fn kept_in(folder: &Path) -> ServiceConfig {
    let mut config = config();
    config.engine.context_tokens = Some(512);
    config.prefix_cache.folder = Some(FolderConfig {
        path: folder.to_owned(),
        limit: ByteLength::mebibytes(256),
        remote: None,
        key: None,
    });
    config
}

fn start(model: &Arc<Model>, config: ServiceConfig) -> Service {
    Service::start(Arc::clone(model), config).expect("a service")
}

fn ask(service: &Service, prompt: &[u32], tokens: usize) -> Reply {
    let request = Request {
        logprobs: Some(3),
        ..greedy(prompt.to_vec(), tokens)
    };
    let mut stream = service.handle().submit(request).expect("taken");
    let (mut reply, mut reused) = (Vec::new(), 0);
    while let Some(event) = stream.blocking_recv() {
        match event {
            Event::Token {
                token, logprobs, ..
            } => reply.push((token, logprobs)),
            Event::Finished { usage, .. } => reused = usage.reused_tokens,
            Event::Failed(failure) => panic!("{failure}"),
            _ => {}
        }
    }
    (reply, reused)
}

/// How many tokens of a prompt were there, and why no more.
fn found(service: &Service, prompt: &[u32]) -> (usize, Option<Miss>) {
    let request = greedy(prompt.to_vec(), 2);
    let mut stream = service.handle().submit(request).expect("taken");
    let mut found = None;
    while let Some(event) = stream.blocking_recv() {
        if let Event::Started {
            reused_tokens,
            miss,
            ..
        } = event
        {
            found = Some((reused_tokens, miss));
        }
    }
    found.expect("it started")
}

/// As of when nothing is asked any more: figures are told after answers.
fn folder(service: &Service) -> FolderStatus {
    idle(service).folder.expect("a folder")
}

/// Letters that the vocabularies of all models here have.
fn prompt(seed: u32, length: u32) -> Vec<u32> {
    let letter = |index: u32| 4 + index.wrapping_mul(0x9e37_79b9).rotate_left(index % 31) % 56;
    (0..length)
        .map(|index| letter(1000 * seed + index))
        .collect()
}

/// Rows, windows, states alone and beside rows.
fn models() -> Vec<Arc<Model>> {
    let mut models = vec![model(), crate::windows::windowed()];
    models.extend(crate::states::models());
    models
}

#[test]
fn a_service_goes_on_where_the_last_one_ended() {
    for model in models() {
        let folder_of = tempfile::tempdir().expect("a folder");
        let mut without = kept_in(folder_of.path());
        without.prefix_cache.folder = None;
        without.prefix_cache.enabled = false;
        let without = start(&model, without);
        let first = prompt(1, 300);
        let config = || kept_in(folder_of.path());
        let service = start(&model, config());
        let answer = ask(&service, &first, 40);
        assert_eq!(answer.0, ask(&without, &first, 40).0);
        let in_memory = {
            let next = [&first[..], &prompt(2, 9)].concat();
            ask(&service, &next, 4).1
        };
        assert!(in_memory > 200, "{in_memory}");
        service.shutdown(Grace::Finish(Duration::from_secs(60)));
        let service = start(&model, config());
        let said = answer.0.iter().map(|(token, _)| *token);
        let next: Vec<u32> = first
            .iter()
            .copied()
            .chain(said)
            .chain(prompt(3, 9))
            .collect();
        for _ in 0..2 {
            let found = ask(&service, &next, 20);
            assert!(found.1 >= in_memory, "{} of {in_memory}", found.1);
            assert_eq!(found.0, ask(&without, &next, 20).0);
        }
        let status = folder(&service);
        assert!(status.restored_tokens as usize >= in_memory);
        assert_eq!((status.damaged, status.unreadable, status.gone), (0, 0, 0));
    }
}

#[test]
fn a_service_on_another_machine_goes_on_where_one_ended_that_shares_a_store() {
    for model in models() {
        let [here, there] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        let store = MemoryStore::default();
        let with_store = |folder: &Path| {
            let mut config = kept_in(folder);
            let folder = config.prefix_cache.folder.as_mut();
            folder.expect("a folder").remote = Some(Remote {
                store: Arc::new(store.clone()),
                patience: Duration::from_secs(60),
            });
            config
        };
        let first = prompt(1, 300);
        let service = start(&model, with_store(here.path()));
        let answer = ask(&service, &first, 40);
        service.shutdown(Grace::Finish(Duration::from_secs(60)));
        assert!(!store.names().is_empty());
        let service = start(&model, with_store(there.path()));
        let found = ask(&service, &first, 40);
        assert_eq!(found.0, answer.0);
        assert!(found.1 > 200, "{}", found.1);
        let status = folder(&service).remote.expect("a store");
        assert_eq!((status.lookups, status.hits), (1, 1));
        // One that does not move is not waited for.
        store.set(StoreTrouble::Refuses);
        let other = prompt(2, 300);
        let refused = Some(Miss::RemoteUnreadable);
        assert_eq!(self::found(&service, &other), (0, refused));
        assert!(ask(&service, &other, 4).1 > 200, "from memory");
        store.set(StoreTrouble::Nothing);
    }
}

#[test]
fn a_service_with_other_weights_or_elements_finds_nothing_and_says_why() {
    let folder_of = tempfile::tempdir().expect("a folder");
    let config = || kept_in(folder_of.path());
    let asked = prompt(1, 300);
    let service = start(&model(), config());
    ask(&service, &asked, 4);
    service.shutdown(Grace::Finish(Duration::from_secs(60)));
    let mut elements = config();
    elements.engine.kv_elements = "f32".parse().expect("a type");
    let mut bytes = demo_bytes();
    // Of the last tensor: the shapes and the vocabulary are the same.
    *bytes.last_mut().expect("weights") ^= 1;
    let files = ModelFiles::from_gguf(Mapping::from(bytes)).expect("a whole file");
    let weights = Arc::new(Model::load(files).expect("a model"));
    for (model, config, differs) in [
        (model(), elements, "KV type"),
        (weights, config(), "weights"),
        (crate::windows::windowed(), config(), "architecture"),
    ] {
        let service = start(&model, config);
        let why = Some(Miss::FolderSettings);
        assert_eq!(found(&service, &asked), (0, why), "{differs}");
        let status = folder(&service);
        assert!(status.other_segments > 0);
        assert!(
            status.differing.iter().any(|part| part == differs),
            "{:?}",
            status.differing
        );
    }
    let service = start(&model(), config());
    assert!(ask(&service, &asked, 4).1 > 0, "its own");
}

#[test]
fn requests_that_are_short_of_memory_answer_as_ever_with_a_folder() {
    let folder_of = tempfile::tempdir().expect("a folder");
    let mut config = crate::support::tight(14, true);
    config.prefix_cache.folder = kept_in(folder_of.path()).prefix_cache.folder;
    for _ in 0..3 {
        let service = start(&model(), config.clone());
        let requests = (0..6u32).map(|seed| greedy(crate::support::prompt(seed % 4, 120), 60));
        let expected: Vec<_> = requests.clone().map(crate::support::alone).collect();
        let found = crate::support::together(&service, requests.collect());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(
                crate::support::contents(found),
                crate::support::contents(expected)
            );
        }
        service.shutdown(Grace::Finish(Duration::from_secs(60)));
    }
}

/// Every segment in `root`.
fn segments(root: &Path) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(root).expect("a folder").flatten();
    let files = folders.filter_map(|folder| std::fs::read_dir(folder.path()).ok());
    let segments = files
        .flat_map(Iterator::flatten)
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "rows"));
    segments.collect()
}

#[test]
fn a_request_is_told_what_was_wrong_with_what_the_folder_has_of_it() {
    let folder_of = tempfile::tempdir().expect("a folder");
    let (config, asked) = (|| kept_in(folder_of.path()), prompt(1, 300));
    let service = start(&model(), config());
    ask(&service, &asked, 4);
    service.shutdown(Grace::Finish(Duration::from_secs(60)));
    let service = start(&model(), config());
    for path in segments(folder_of.path()) {
        let mut bytes = std::fs::read(&path).expect("a segment");
        *bytes.last_mut().expect("bytes") ^= 1;
        std::fs::write(&path, bytes).expect("a file");
    }
    assert_eq!(found(&service, &asked), (0, Some(Miss::FolderDamaged)));
    assert_eq!(found(&service, &prompt(2, 300)), (0, Some(Miss::Unseen)));
    service.shutdown(Grace::Finish(Duration::from_secs(60)));
    let service = start(&model(), config());
    for path in segments(folder_of.path()) {
        std::fs::remove_file(path).expect("there");
    }
    assert_eq!(found(&service, &asked), (0, Some(Miss::FolderGone)));
    for name in [Miss::FolderDamaged, Miss::FolderGone].map(Miss::name) {
        assert!(name.starts_with("folder_"));
    }
}

/// Cuts every segment in `root`.
fn cut_segments(root: &Path) {
    for path in segments(root) {
        let file = std::fs::OpenOptions::new().write(true).open(path);
        file.and_then(|file| file.set_len(4096 + 100)).expect("cut");
    }
}

#[test]
fn requests_whose_mapped_files_somebody_cuts_answer_as_ever() {
    lacuna_files::guard_mappings().expect("a handler");
    let folder_of = tempfile::tempdir().expect("a folder");
    let config = || {
        let mut config = kept_in(folder_of.path());
        config.engine.context_tokens = Some(1024);
        config
    };
    let asked = prompt(1, 900);
    let service = start(&model(), config());
    let expected = ask(&service, &asked, 60).0;
    service.shutdown(Grace::Finish(Duration::from_secs(60)));
    // Between two requests, and in the middle of one.
    for after in [None, Some(5)] {
        let service = start(&model(), config());
        let request = Request {
            logprobs: Some(3),
            ..greedy(asked.clone(), 60)
        };
        let mut stream = service.handle().submit(request).expect("taken");
        let mut reply = Vec::new();
        while let Some(event) = stream.blocking_recv() {
            match event {
                Event::Token {
                    token, logprobs, ..
                } => {
                    reply.push((token, logprobs));
                    if Some(reply.len()) == after {
                        cut_segments(folder_of.path());
                    }
                }
                Event::Failed(failure) => panic!("{failure}"),
                _ => {}
            }
        }
        assert_eq!(reply, expected, "{after:?}");
        cut_segments(folder_of.path());
        assert_eq!(ask(&service, &asked, 60).0, expected, "{after:?}");
        assert_eq!(ask(&service, &asked, 60).0, expected, "{after:?}");
        assert!(folder(&service).mapped_bytes > 1 << 20);
        service.shutdown(Grace::Finish(Duration::from_secs(60)));
        // It is written again, whole.
        let service = start(&model(), config());
        assert!(ask(&service, &asked, 1).1 > 800);
        service.shutdown(Grace::Finish(Duration::from_secs(60)));
    }
}
