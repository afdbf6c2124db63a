//! What would be evicted goes to files without names first, where that pays, and comes back from them with the rows,
//! windows and states that it had.

use std::time::{Duration, Instant};

use lacuna_kv::folder::CacheFolder;
use lacuna_kv::folder::faults::{DiskFaults, Trouble};
use lacuna_kv::prefix::{Eviction, Moving, Namespace, PrefixCache};
use lacuna_kv::swap::Swap;
use tempfile::TempDir;

use crate::folder::{benches, first_bench, root};
use crate::pages::{Bench, prompt, tokens};
use crate::swap::swap;

/// A prefix cache that puts aside what it would evict.
struct Aside {
    bench: Bench,
    disk: DiskFaults,
    swap: Swap,
    _folder: TempDir,
}

impl Aside {
    fn new(mut bench: Bench) -> Self {
        let (folder, disk, swap) = (root(), DiskFaults::default(), swap(&bench));
        let path = folder.path().to_owned();
        let files = CacheFolder::open_unnamed(path, swap.room(), &bench.kv, Some(disk.clone()));
        bench.cache = PrefixCache::new(bench.kv.clone()).with_folder(files.expect("a folder"));
        Self {
            bench,
            disk,
            swap,
            _folder: folder,
        }
    }

    /// Lets go of one thing more, or begins to write it if that pays.
    fn next(&mut self, pays: impl FnOnce(Moving) -> bool) -> Eviction {
        self.bench.cache.put_aside(Instant::now(), pays)
    }

    /// Lets go of all that nobody uses, and returns what was asked about it on the way.
    fn all(&mut self, pays: bool) -> Vec<Moving> {
        let mut asked = Vec::new();
        loop {
            let pays = |moving| {
                asked.push(moving);
                pays
            };
            match self.next(pays) {
                Eviction::Evicted => {}
                Eviction::Writing => self.bench.settle(),
                Eviction::Nothing => return asked,
            }
        }
    }

    /// Bytes of the pages of all groups and resume points, each by itself.
    fn kept_bytes(&self) -> u64 {
        let payloads = self.bench.cache.tree().payloads();
        let pages = payloads.map(|pins| pins.pages().count() as u64);
        pages.sum::<u64>() * self.bench.kv.page_bytes() as u64
    }
}

fn never(_: Moving) -> bool {
    panic!("what is settled is not asked again")
}

#[test]
fn what_leaves_is_written_first_and_comes_back_as_it_was() {
    for bench in benches().step_by(2) {
        let mut aside = Aside::new(bench);
        let tokens = aside.bench.turn(&tokens(0, 500));
        let (groups, kept) = (aside.bench.cache.tree().len(), aside.kept_bytes());
        let group = aside.bench.cache.grain().group_tokens().get();
        assert!(aside.bench.cache.folder_status().is_none(), "no named one");
        let asked = aside.all(true);
        assert_eq!(aside.bench.owned(), 0);
        let written: u64 = asked.iter().map(|moving| moving.written_bytes).sum();
        assert_eq!(written, kept, "everything, and nothing twice");
        let whole = asked.iter().max_by_key(|moving| moving.tokens);
        let whole = *whole.expect("it was asked");
        assert_eq!(whole.tokens, groups * group);
        let status = aside.bench.cache.aside_status().expect("files");
        assert!(status.segments > 0 && status.written_bytes >= written);
        assert_eq!(aside.bench.restore(&tokens), groups);
        let status = aside.bench.cache.aside_status().expect("files");
        assert_eq!(status.restored_bytes, whole.read_bytes);
        assert_eq!(status.damaged, 0);
        let held = aside.bench.start(&tokens);
        assert!(!held.sequence.is_empty());
        aside.bench.check(held);
    }
}

#[test]
fn while_it_is_written_it_stays_and_nobody_is_asked_again() {
    let mut aside = Aside::new(first_bench());
    let tokens = aside.bench.turn(&tokens(0, 200));
    let groups = aside.bench.cache.tree().len();
    assert_eq!(aside.bench.cache.aside_progress(), None);
    aside.disk.set(Trouble::Stalls);
    assert_eq!(aside.next(|_| true), Eviction::Writing);
    let before = aside.bench.cache.aside_progress();
    let before = before.expect("something is being written");
    assert_eq!(aside.next(never), Eviction::Writing);
    assert_eq!(aside.bench.cache.tree().len(), groups);
    aside.disk.set(Trouble::Nothing);
    aside.bench.settle();
    assert_eq!(aside.bench.cache.aside_progress(), None, "all is there");
    for left in (0..groups).rev() {
        assert_eq!(aside.next(never), Eviction::Evicted);
        assert_eq!(aside.bench.cache.tree().len(), left);
    }
    assert_eq!(aside.next(never), Eviction::Nothing);
    // What came from the files is not written to them again.
    assert_eq!(aside.bench.restore(&tokens), groups);
    let mut asked = None;
    let pays = |moving: Moving| asked.replace(moving).is_none();
    assert_eq!(aside.next(pays), Eviction::Evicted);
    let moving = asked.expect("it was used since");
    assert_eq!((moving.written_bytes, moving.read_bytes > 0), (0, true));
    // Another one waits for the disk, which counts what it wrote before.
    aside.bench.turn(&crate::pages::tokens(3, 100));
    let held = aside.bench.start(&tokens);
    aside.disk.set(Trouble::Stalls);
    assert_eq!(aside.next(|_| true), Eviction::Writing);
    let after = aside.bench.cache.aside_progress();
    assert!(after.expect("it is being written") > before);
    aside.disk.set(Trouble::Nothing);
    aside.bench.leave(held);
}

#[test]
fn what_does_not_pay_leaves_at_once_and_is_asked_about_again_when_it_was_used() {
    let mut aside = Aside::new(first_bench());
    let tokens = aside.bench.turn(&tokens(0, 200));
    let groups = aside.bench.cache.tree().len();
    assert_eq!(aside.next(|_| false), Eviction::Evicted);
    assert_eq!(aside.next(never), Eviction::Evicted);
    let held = aside.bench.run(&tokens);
    assert_eq!(aside.bench.cache.tree().len(), groups);
    aside.bench.leave(held);
    assert_eq!(aside.all(false).len(), 1, "it was used again");
    assert_eq!(aside.bench.owned(), 0);
    let status = aside.bench.cache.aside_status().expect("files");
    assert_eq!((status.written_segments, status.bytes.get()), (0, 0));
    assert_eq!(aside.bench.restore(&tokens), 0);
}

#[test]
fn what_others_use_of_a_conversation_is_not_written_with_it() {
    for bench in crate::pages::benches().step_by(2) {
        let mut aside = Aside::new(bench);
        let grain = aside.bench.cache.grain().clone();
        let group = grain.group_tokens().get();
        let donor = aside.bench.run(&prompt(3 * group, 2 * group, 0));
        let other = prompt(3 * group, 4 * group + 5, 1);
        let held = aside.bench.run(&other);
        assert_eq!(held.path.groups().len(), 7);
        aside.bench.leave(held);
        let asked = aside.all(true);
        let [moving] = asked[..] else {
            panic!("one conversation has left: {asked:?}");
        };
        assert_eq!(moving.tokens, 4 * group);
        assert_eq!(moving.written_bytes, moving.read_bytes);
        assert_eq!(aside.bench.cache.tree().len(), 5, "what is in use stays");
        assert_eq!(aside.bench.restore(&other), 4);
        let held = aside.bench.start(&other);
        aside.bench.check(held);
        aside.bench.assert_rows(&donor);
    }
}

/// Sequences make resume points anew, so those of groups in use are not worth a file.
#[test]
fn the_resume_point_of_a_group_in_use_leaves_without_being_written() {
    for bench in crate::windows::benches().chain(crate::states::benches()) {
        let mut aside = Aside::new(bench);
        let held = aside.bench.run(&tokens(0, 500));
        let before = aside.bench.cache.tree().resume_points();
        assert!(before > 0);
        assert_eq!(aside.next(never), Eviction::Evicted);
        assert_eq!(aside.bench.cache.tree().resume_points(), before - 1);
        let status = aside.bench.cache.aside_status().expect("files");
        assert_eq!(status.written_segments, 0);
        aside.bench.check(held);
    }
}

#[test]
fn what_nobody_uses_for_its_time_leaves_when_it_is_written() {
    let mut aside = Aside::new(first_bench());
    aside.bench.turn(&tokens(0, 200));
    let groups = aside.bench.cache.tree().len();
    let minute = Duration::from_secs(60);
    let now = Instant::now() + minute;
    let mut expire = |pays| aside.bench.cache.expire(now, minute, |_| pays);
    aside.disk.set(Trouble::Stalls);
    assert!(!expire(true), "it is being written");
    aside.disk.set(Trouble::Nothing);
    aside.bench.settle();
    for left in (0..groups).rev() {
        assert!(aside.bench.cache.expire(now, minute, never));
        assert_eq!(aside.bench.cache.tree().len(), left);
    }
    assert!(!aside.bench.cache.expire(now, minute, never));
}

/// Requests that have to leave come before conversations that nobody goes on with for the moment.
#[test]
fn files_that_were_put_aside_make_room_for_others() {
    let mut aside = Aside::new(first_bench());
    let first = aside.bench.turn(&tokens(0, 200));
    let second = aside.bench.turn(&tokens(1, 200));
    aside.all(true);
    let held = |aside: &Aside| aside.bench.cache.aside_status().expect("files");
    let (bytes, segments) = (held(&aside).bytes.get(), held(&aside).segments);
    assert!(segments >= 2);
    // All but what is put aside is free.
    let limit = aside.swap.status().limit.get();
    aside.bench.cache.give_aside_room(limit - bytes);
    assert_eq!(held(&aside).segments, segments, "there is as much room");
    aside.bench.cache.give_aside_room(limit - bytes + 1);
    assert!(held(&aside).segments < segments && held(&aside).bytes.get() < bytes);
    let stored =
        |aside: &Aside, tokens: &[u32]| aside.bench.cache.stored(Namespace::COMMON, tokens);
    assert!(stored(&aside, &first).is_none(), "it was used before");
    assert!(stored(&aside, &second).is_some());
    aside.bench.cache.give_aside_room(limit);
    assert_eq!((held(&aside).segments, held(&aside).bytes.get()), (0, 0));
    // The room was not taken for good.
    aside.bench.cache.give_aside_room(limit);
    let sequence = aside.bench.run(&first).sequence;
    let group = aside.bench.cache.grain().group_tokens().get();
    assert!(aside.swap.leave(sequence, 0, group).is_ok());
}
