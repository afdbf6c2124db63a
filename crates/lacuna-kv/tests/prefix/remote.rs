//! What one machine leaves in a store, another starts from: the same rows, windows and states, or none at all.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lacuna_kv::folder::FolderMiss;
use lacuna_kv::folder::remote::{MemoryStore, Remote, RemoteStatus, StoreTrouble};
use lacuna_kv::prefix::Namespace;

use crate::folder::{
    LONG, MINUTE, benches, config, first_bench, made_by, root, segments, within_a_minute,
};
use crate::pages::{Bench, tokens};

impl Bench {
    /// As if a process had started on a machine with the folder `path`.
    fn beside(&self, path: &Path, store: &MemoryStore) -> Self {
        self.beside_for(path, store, MINUTE, 1 << 30)
    }

    fn beside_for(&self, path: &Path, store: &MemoryStore, patience: Duration, limit: u64) -> Self {
        let mut config = config(path, limit);
        config.remote = Some(Remote {
            store: Arc::new(store.clone()),
            patience,
        });
        Self::with(self.geometry.clone(), &self.kv.policy().to_string())
            .with_folder(config, made_by("a"))
    }

    fn remote(&self) -> RemoteStatus {
        self.folder().remote.expect("a store")
    }

    /// Waits until all is in the folder and in the store.
    fn settle_all(&self) {
        self.settle();
        within_a_minute(|| (self.remote().uploads_waiting == 0).then_some(()));
    }

    /// Brings what the store has, as a scheduler does before it asks the folder; `None` when it was not asked.
    fn fetch(&self, tokens: &[u32]) -> Option<Option<FolderMiss>> {
        let stored = self.cache.stored(Namespace::COMMON, tokens);
        let cache = &self.cache;
        let fetching = cache.fetch(Namespace::COMMON, tokens, stored.as_ref())?;
        Some(within_a_minute(|| fetching.poll()))
    }

    /// The groups that come from the store and the folder.
    fn bring(&mut self, tokens: &[u32]) -> usize {
        self.fetch(tokens);
        self.restore(tokens)
    }

    /// Computes what is missing of a prompt, and checks all of its rows.
    fn go_on(&mut self, tokens: &[u32]) {
        let held = self.start(tokens);
        self.check(held);
    }
}

#[test]
fn another_machine_goes_on_where_this_one_ended() {
    for bench in benches() {
        let (here, there, store) = (root(), root(), MemoryStore::default());
        let mut first = bench.beside(here.path(), &store);
        let mut next = first.turn(&tokens(0, 500));
        next.extend(tokens(2, 60));
        let groups = first.cache.find(Namespace::COMMON, &next).0.groups.len();
        first.settle_all();
        let files = segments(here.path()).len();
        assert_eq!(first.remote().uploaded_segments, files as u64);
        drop(first);
        let mut second = bench.beside(there.path(), &store);
        assert_eq!(second.folder().segments, 0);
        assert_eq!(second.bring(&next), groups, "all that was in memory");
        let status = second.remote();
        assert_eq!((status.lookups, status.hits, status.damaged), (1, 1, 0));
        assert_eq!(status.uploaded_segments, 0, "they are there");
        assert!(status.fetched_segments > 0 && status.fetched_bytes > 0);
        second.go_on(&next);
        drop(second);
        // What came is this machine's own.
        store.set(StoreTrouble::Refuses);
        let mut third = bench.beside(there.path(), &store);
        assert!(third.restore(&next) >= groups);
        third.go_on(&next);
    }
}

#[test]
fn files_and_objects_are_the_same_bytes_under_the_same_names() {
    let (bench, here, store) = (first_bench(), root(), MemoryStore::default());
    let mut first = bench.beside(here.path(), &store);
    first.turn(&tokens(0, LONG));
    first.settle_all();
    let mut links = store.names();
    for path in segments(here.path()) {
        let name = path.strip_prefix(here.path()).expect("in it");
        let name = name.to_str().expect("a name");
        let object = store.object(name).expect("an object");
        assert!(object == fs::read(&path).expect("a file"));
        links.retain(|other| other != name);
    }
    assert!(!links.is_empty() && links.iter().all(|name| name.ends_with(".link")));
}

#[test]
fn a_prompt_takes_what_it_shares_with_segments_that_go_on_differently() {
    for bench in crate::pages::benches() {
        let (here, there, store) = (root(), root(), MemoryStore::default());
        let mut first = bench.beside(here.path(), &store);
        first.turn(&tokens(0, 500));
        // It leaves the other in the middle of a segment.
        let other = [tokens(0, 300), tokens(3, 200)].concat();
        let other = first.turn(&other);
        // And this one where that is its end.
        let more = [other.clone(), tokens(5, 400)].concat();
        let more = first.turn(&more);
        first.settle_all();
        drop(first);
        let group = bench.cache.grain().group_tokens().get();
        let shared = [tokens(0, 200), tokens(7, 400)].concat();
        for (prompt, expected) in [
            (&shared, 200 / group),
            (&other, (other.len() - 1) / group),
            (&more, (more.len() - 1) / group),
        ] {
            let there = root();
            let mut second = bench.beside(there.path(), &store);
            assert_eq!(second.bring(prompt), expected, "of {}", prompt.len());
            second.go_on(prompt);
        }
        // One that has a part of it asks for the rest alone.
        let mut second = bench.beside(there.path(), &store);
        assert!(second.bring(&shared) > 0);
        let before = second.remote().fetched_segments;
        second.bring(&more);
        assert_eq!(
            second.cache.find(Namespace::COMMON, &more).0.groups.len(),
            (more.len() - 1) / group
        );
        assert!(second.remote().fetched_segments > before);
        second.go_on(&more);
        assert_eq!(second.fetch(&more), None, "all is in memory");
        drop(second);
        let second = bench.beside(there.path(), &store);
        assert_eq!(second.fetch(&more), None, "all is in the folder");
    }
}

#[test]
fn prompts_of_which_there_is_nothing_cost_a_question_or_two() {
    let (bench, here, there) = (first_bench(), root(), root());
    let store = MemoryStore::default();
    let mut first = bench.beside(here.path(), &store);
    let prompt = first.turn(&tokens(0, LONG));
    first.settle_all();
    let mut second = bench.beside(there.path(), &store);
    let asked = store.asked();
    assert_eq!(second.fetch(&tokens(1, LONG)), Some(None));
    assert_eq!(store.asked() - asked, 1, "one segment has the usual length");
    assert_eq!(second.fetch(&tokens(1, 500)), Some(None));
    assert_eq!(store.asked() - asked, 1, "and here none has");
    assert_eq!(second.fetch(&tokens(0, 100)), None, "not worth a question");
    assert_eq!(second.remote().hits, 0);
    assert_eq!(segments(there.path()).len(), 0);
    // What others may not find is not found.
    let other = Namespace::new(7);
    let fetching = second.cache.fetch(other, &prompt, None).expect("asked");
    assert_eq!(within_a_minute(|| fetching.poll()), None);
    assert_eq!(second.remote().hits, 0);
    assert!(second.bring(&prompt) > 0);
}

#[test]
fn nothing_is_taken_that_other_settings_computed() {
    let (bench, here, there) = (first_bench(), root(), root());
    let store = MemoryStore::default();
    let mut first = bench.beside(here.path(), &store);
    let prompt = first.turn(&tokens(0, 500));
    first.settle_all();
    let mut config = config(there.path(), 1 << 30);
    config.remote = Some(Remote {
        store: Arc::new(store.clone()),
        patience: MINUTE,
    });
    let mut other = Bench::with(bench.geometry.clone(), "sparse").with_folder(config, made_by("b"));
    assert_eq!(other.bring(&prompt), 0);
    assert_eq!(other.remote().hits, 0);
    // Put under its name, it is not taken either.
    let of = |root: &Path| {
        let folder = fs::read_dir(root).expect("a folder").flatten();
        let mut folders = folder.filter(|entry| entry.path().is_dir());
        let name = folders.next().expect("one fingerprint").file_name();
        name.into_string().expect("a name")
    };
    let (mine, its) = (of(here.path()), of(there.path()));
    for name in store.names() {
        let bytes = store.object(&name);
        store.set_object(&name.replace(&mine, &its), bytes);
    }
    assert_eq!(other.bring(&prompt), 0);
    other.go_on(&prompt);
}

#[test]
fn a_store_that_fails_or_lies_costs_time_and_nothing_else() {
    for bench in benches() {
        let (here, store) = (root(), MemoryStore::default());
        let mut first = bench.beside(here.path(), &store);
        let mut next = first.turn(&tokens(0, 500));
        next.extend(tokens(2, 60));
        first.settle_all();
        drop(first);
        use FolderMiss::{RemoteDamaged, RemoteUnreadable};
        for (trouble, expected) in [
            (StoreTrouble::Refuses, RemoteUnreadable),
            (StoreTrouble::Breaks, RemoteUnreadable),
            (StoreTrouble::Cuts, RemoteDamaged),
            (StoreTrouble::Lies, RemoteDamaged),
            (StoreTrouble::Pads, RemoteDamaged),
            (StoreTrouble::Invents, RemoteDamaged),
        ] {
            let there = root();
            let mut second = bench.beside(there.path(), &store);
            store.set(trouble);
            let missed = second.fetch(&next).expect("it was asked");
            let status = second.remote();
            match (expected, trouble) {
                // Lengths say that nothing is what it should be.
                (RemoteDamaged, StoreTrouble::Invents) => assert!(status.damaged > 0),
                // A link that differs leads nowhere.
                (RemoteDamaged, _) => assert!(status.damaged > 0, "{trouble:?}"),
                _ => {
                    assert_eq!(missed, Some(expected), "{trouble:?}");
                    assert!(status.failed_reads > 0, "{trouble:?}");
                    assert!(status.reading_paused.is_some());
                    assert_eq!(second.fetch(&next), None, "not asked again at once");
                }
            }
            assert_eq!(second.restore(&next), 0, "{trouble:?}");
            assert_eq!(second.folder().damaged, 0, "nothing of it is in the folder");
            assert_eq!(segments(there.path()).len(), 0);
            let held = second.start(&next);
            assert_eq!(held.sequence.len(), 0);
            second.check(held);
            store.set(StoreTrouble::Nothing);
        }
    }
}

/// The first object whose name ends in `kind`, and its bytes.
fn object(store: &MemoryStore, kind: &str) -> (String, Vec<u8>) {
    let mut names = store.names().into_iter();
    let name = names
        .find(|name| name.ends_with(kind))
        .expect("of that kind");
    let bytes = store.object(&name).expect("an object");
    (name, bytes)
}

#[test]
fn whatever_byte_of_an_object_differs_it_is_missed() {
    let (bench, here, store) = (first_bench(), root(), MemoryStore::default());
    let mut first = bench.beside(here.path(), &store);
    let next = first.turn(&tokens(0, 300));
    first.settle_all();
    drop(first);
    for name in store.names() {
        let whole = store.object(&name).expect("an object");
        let mut at = 0;
        while at < whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            store.set_object(&name, Some(damaged));
            let there = root();
            let mut second = bench.beside(there.path(), &store);
            let found = second.bring(&next);
            // A link that says less of a group than the segment has leads to what comes before that group.
            let link = name.ends_with(".link");
            assert!(link || found == 0, "byte {at} of {name}");
            assert!(
                found > 0 || second.remote().damaged == 1,
                "byte {at} of {name}"
            );
            assert_eq!(second.folder().damaged, 0);
            second.go_on(&next);
            at += if at < 200 { 13 } else { 9001 };
        }
        store.set_object(&name, Some(whole));
    }
}

#[test]
fn what_is_damaged_in_a_store_is_replaced_by_whoever_computes_it_again() {
    let bench = first_bench();
    // The link is damaged where its segment is whole, too.
    for kind in [".rows", ".link"] {
        let (here, there, elsewhere) = (root(), root(), root());
        let store = MemoryStore::default();
        let mut first = bench.beside(here.path(), &store);
        // The next prompt leaves the segment before its end, which only the link leads to.
        first.turn(&tokens(0, 500));
        first.settle_all();
        drop(first);
        let prompt = [tokens(0, 400), tokens(2, 100)].concat();
        let (name, whole) = object(&store, kind);
        let mut damaged = whole.clone();
        // The last line's end is all that a link can do without.
        let at = damaged.len() - 2;
        damaged[at] ^= 1;
        store.set_object(&name, Some(damaged));
        let mut second = bench.beside(there.path(), &store);
        second.fetch(&prompt);
        assert_eq!(second.remote().damaged, 1, "{kind}");
        second.turn(&tokens(0, 500));
        second.settle_all();
        assert!(store.object(&name) == Some(whole), "{kind}");
        let mut third = bench.beside(elsewhere.path(), &store);
        assert!(third.bring(&prompt) > 0, "{kind}");
    }
}

#[test]
fn what_cannot_be_put_there_is_put_later_by_this_process_or_the_next() {
    let (bench, here) = (first_bench(), root());
    let store = MemoryStore::default();
    for trouble in [StoreTrouble::Refuses, StoreTrouble::Breaks] {
        store.set(trouble);
        let mut first = bench.beside(here.path(), &store);
        let turn = first.turn(&tokens(trouble as u32, 500));
        first.settle();
        within_a_minute(|| (first.remote().failed_writes > 0).then_some(()));
        let status = first.remote();
        assert!(status.writing_paused.is_some() && status.uploads_waiting > 0);
        assert_eq!(status.uploaded_segments, 0);
        first.go_on(&turn);
        store.set(StoreTrouble::Nothing);
        first.settle_all();
        assert_eq!(first.remote().writing_paused, None);
        assert!(first.remote().uploaded_segments > 0);
    }
    // As if it had been killed before.
    let there = store.names();
    there.iter().for_each(|name| store.set_object(name, None));
    drop(bench.beside(here.path(), &store));
    assert_eq!(store.names(), there);
}

#[test]
fn a_file_that_is_damaged_is_put_nowhere() {
    let (bench, here, store) = (first_bench(), root(), MemoryStore::default());
    store.set(StoreTrouble::Refuses);
    let mut first = bench.beside(here.path(), &store);
    first.turn(&tokens(0, 500));
    first.settle();
    drop(first);
    store.set(StoreTrouble::Nothing);
    for path in segments(here.path()) {
        let mut bytes = fs::read(&path).expect("a file");
        *bytes.last_mut().expect("bytes") ^= 1;
        fs::write(&path, bytes).expect("a file");
    }
    let second = bench.beside(here.path(), &store);
    second.settle_all();
    assert_eq!(store.names(), [] as [String; 0]);
    assert!(second.folder().damaged > 0);
}

#[test]
fn a_store_that_stalls_is_not_waited_for() {
    let (bench, here, there) = (first_bench(), root(), root());
    let store = MemoryStore::default();
    let mut first = bench.beside(here.path(), &store);
    let prompt = first.turn(&tokens(0, 500));
    first.settle_all();
    let patience = Duration::from_millis(50);
    let mut second = bench.beside_for(there.path(), &store, patience, 1 << 30);
    store.set(StoreTrouble::Stalls);
    // So many at once, and no more threads than that.
    let fetch = |seed| {
        let prompt = tokens(seed, 500);
        second.cache.fetch(Namespace::COMMON, &prompt, None)
    };
    let fetching: Vec<_> = (0..20).filter_map(fetch).collect();
    assert_eq!(fetching.len(), 8);
    for fetching in &fetching {
        let missed = within_a_minute(|| fetching.poll());
        assert_eq!(missed, Some(FolderMiss::RemoteUnreadable));
    }
    assert_eq!(second.remote().late, 8);
    let idle = second.owned();
    second.go_on(&prompt);
    while second.cache.evict(Instant::now()) {}
    second.settle();
    assert_eq!(second.owned(), idle, "it holds no page");
    store.set(StoreTrouble::Nothing);
    drop(fetching);
    drop(second);
    let elsewhere = root();
    let mut third = bench.beside(elsewhere.path(), &store);
    assert!(third.bring(&prompt) > 0);
}

#[test]
fn what_comes_keeps_within_the_folders_limit() {
    let (bench, here, there) = (first_bench(), root(), root());
    let store = MemoryStore::default();
    let mut first = bench.beside(here.path(), &store);
    let prompts: Vec<Vec<u32>> = (0..6).map(|seed| first.turn(&tokens(seed, 500))).collect();
    first.settle_all();
    let all: u64 = first.folder().bytes.get();
    drop(first);
    let limit = all / 2;
    let mut second = bench.beside_for(there.path(), &store, MINUTE, limit);
    for prompt in &prompts {
        assert!(second.bring(prompt) > 0);
        let files = segments(there.path()).into_iter();
        let held: u64 = files
            .map(|path| fs::metadata(path).expect("there").len())
            .sum();
        assert!(held <= limit && second.folder().bytes.get() <= limit);
        assert_eq!(second.folder().bytes.get(), held);
        second.go_on(prompt);
    }
    assert_eq!(second.folder().gone, 0);
    // A limit that no segment fits in.
    let elsewhere = root();
    let mut third = bench.beside_for(elsewhere.path(), &store, MINUTE, 4096);
    assert_eq!(third.bring(&prompts[0]), 0);
    assert_eq!(third.remote().fetched_bytes, 0);
}

/// Whoever closes a folder waits for what is on its way into the store.
#[test]
fn what_is_being_put_there_when_a_folder_is_closed_is_there_then() {
    let (bench, here, store) = (first_bench(), root(), MemoryStore::default());
    let mut first = bench.beside(here.path(), &store);
    store.set(StoreTrouble::Stalls);
    first.turn(&tokens(0, 500));
    first.settle();
    assert!(first.remote().uploads_waiting > 0);
    assert_eq!(store.names(), [] as [String; 0]);
    let files = segments(here.path()).len();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            store.set(StoreTrouble::Nothing);
        });
        drop(first);
    });
    let names = store.names();
    assert_eq!(
        names.iter().filter(|name| name.ends_with(".rows")).count(),
        files
    );
}

#[test]
fn bytes_that_came_and_went_are_counted_as_they_are() {
    let (bench, here, there) = (first_bench(), root(), root());
    let store = MemoryStore::default();
    let mut first = bench.beside(here.path(), &store);
    let prompt = first.turn(&tokens(0, LONG));
    first.settle_all();
    let lengths = |root: &Path| -> Vec<u64> {
        let files = segments(root).into_iter();
        files
            .map(|path| fs::metadata(path).expect("there").len())
            .collect()
    };
    let files = lengths(here.path());
    let status = first.remote();
    assert_eq!(status.uploaded_segments, files.len() as u64);
    assert_eq!(status.uploaded_bytes, files.iter().sum::<u64>());
    assert_eq!((status.given_up, status.failed_writes), (0, 0));
    assert_eq!((status.lookups, status.place.as_str()), (0, "memory"));
    assert!(status.can_write);
    let mut second = bench.beside(there.path(), &store);
    assert!(second.bring(&prompt) > 0);
    let (status, came) = (second.remote(), lengths(there.path()));
    assert!(came.len() > 1);
    assert_eq!(status.fetched_segments, came.len() as u64);
    assert_eq!(status.fetched_bytes, came.iter().sum::<u64>());
    assert_eq!((status.late, status.failed_reads), (0, 0));
}

/// A question takes as long as computing some dozens of tokens.
#[test]
fn a_store_is_asked_for_128_tokens_or_more_beyond_what_is_there() {
    let (bench, there, store) = (first_bench(), root(), MemoryStore::default());
    let mut second = bench.beside(there.path(), &store);
    assert_eq!(second.fetch(&tokens(0, 127)), None);
    assert_eq!(second.fetch(&tokens(0, 128)), Some(None));
    // More prompts than can be looked for at once, one after the other.
    for seed in 1..12 {
        assert_eq!(
            second.fetch(&tokens(seed, 200)),
            Some(None),
            "prompt {seed}"
        );
    }
    assert_eq!(second.remote().lookups, 12);
    second.turn(&tokens(0, 200));
    let group = bench.cache.grain().group_tokens().get();
    let held = 200 / group * group;
    let more = |count| [tokens(0, held), tokens(9, count)].concat();
    assert_eq!(second.fetch(&more(127)), None);
    assert_eq!(second.fetch(&more(128)), Some(None));
}

#[test]
fn tiers_are_the_same_with_the_same_store_and_patience() {
    let store: Arc<MemoryStore> = Arc::default();
    let one = Remote {
        store: store.clone(),
        patience: MINUTE,
    };
    assert_eq!(one, one.clone());
    let hasty = Remote {
        patience: MINUTE / 2,
        ..one.clone()
    };
    let elsewhere = Remote {
        store: Arc::new(MemoryStore::default()),
        patience: MINUTE,
    };
    assert_ne!(one, hasty);
    assert_ne!(one, elsewhere);
}
