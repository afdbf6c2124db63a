//! Requests whose pages may go to a swap file answer as they do alone.

use std::sync::Arc;

use lacuna_engine::{Service, ServiceConfig};
use lacuna_kv::swap::SwapConfig;
use lacuna_pages::ByteLength;

use crate::support::{
    alone, contents, finish, greedy, idle, model, owned, prompt, tight, together,
};

fn swapping(groups: u64, prefix_cache: bool, limit: ByteLength) -> ServiceConfig {
    let mut config = tight(groups, prefix_cache);
    config.swap = Some(SwapConfig {
        folder: env!("CARGO_TARGET_TMPDIR").into(),
        limit,
    });
    config
}

/// Whether pages move depends on how fast this machine's disk and processor are; answers do not.
#[test]
fn requests_that_are_short_of_memory_answer_as_ever_with_a_swap_file() {
    for (prefix_cache, limit) in [(true, 64), (false, 64), (true, 1)] {
        let config = swapping(14, prefix_cache, ByteLength::mebibytes(limit));
        let service = Service::start(Arc::clone(&model()), config).expect("a service");
        let requests = (0..6u32).map(|seed| greedy(prompt(seed % 4, 20), 130));
        let expected: Vec<_> = requests.clone().map(alone).collect();
        let found = together(&service, requests.collect());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(contents(found), contents(expected));
        }
        let status = idle(&service);
        assert!(status.counters.preemptions > 0, "memory was short");
        let swap = status.swap.clone().expect("there is one");
        assert_eq!((swap.held.get(), status.swapped), (0, 0));
        assert_eq!((swap.failed_writes, swap.failed_reads), (0, 0), "{swap:?}");
        let cached = status.cache.groups as u64 * status.pages.group.get();
        assert_eq!(owned(&status), cached);
    }
}

/// Two conversations by turns in room for one. Whether one is put aside depends on this machine's speed; answers do not,
/// nor does anything stay where others find it.
#[test]
fn conversations_that_take_turns_answer_as_ever_in_room_for_one() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let mut config = tight(46, true);
    config.swap = Some(SwapConfig {
        folder: folder.path().to_owned(),
        limit: ByteLength::mebibytes(64),
    });
    let service = Service::start(model(), config).expect("a service");
    let mut talks = [prompt(1, 500), prompt(2, 500)];
    for turn in 0..6 {
        let talk = &mut talks[turn % 2];
        let request = || greedy(talk.clone(), 40);
        let expected = alone(request());
        let found = finish(service.handle().submit(request()).expect("it is taken"));
        let found = found.expect("an answer");
        assert_eq!(contents(&found), contents(&expected), "turn {turn}");
        talk.extend(&found[0].tokens);
        talk.extend(prompt(10 + turn as u32, 9));
    }
    let status = idle(&service);
    assert!(status.counters.evicted_groups > 0, "memory was short");
    let aside = status.aside.clone().expect("there are files");
    assert_eq!((aside.failed_writes, aside.damaged), (0, 0), "{aside:?}");
    let files = std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(files, 0, "they have no names");
}
