//! Prompts that a cache folder has, and cached groups that are put aside, a step at a time.

use lacuna_kv::folder::faults::{DiskFaults, Trouble};
use lacuna_kv::folder::{Fingerprint, FolderConfig, FolderMiss};
use lacuna_kv::prefix::Eviction;
use lacuna_kv::swap::{Swap, SwapSizes};

use super::swap_file::swapping;
use super::*;
use crate::scheduler::Restore;
use crate::scheduler::simulation::swap::{Disk, of};

/// Tokens of an answer.
const TOKENS: usize = 4;
/// Longer than any disk takes.
const AGES: Duration = Duration::from_secs(60);

/// A scheduler with memory for `groups` groups that keeps what it computes in `folder`.
fn keeping(folder: &Path, groups: u64) -> (Scheduler, DiskFaults) {
    let (mut scheduler, disk) = (with_groups(groups), DiskFaults::default());
    let config = FolderConfig {
        path: folder.to_owned(),
        limit: ByteLength::mebibytes(64),
        remote: None,
        key: None,
    };
    let cache = scheduler.engine.kv_cache().clone();
    let computed_by = Fingerprint::new([("weights", "demo".to_owned())]);
    let opened = CacheFolder::open_faulty(disk.clone(), config, &cache, computed_by);
    scheduler.prefix = PrefixCache::new(cache).with_folder(opened.expect("a folder"));
    scheduler.config.prefix_cache.enabled = true;
    (scheduler, disk)
}

fn of_groups(scheduler: &Scheduler, seed: u32, groups: u32) -> Request {
    let group = scheduler.prefix.grain().group_tokens().get() as u32;
    endless(prompt(seed, groups * group + 1), TOKENS)
}

/// The prompts of these seeds, of ten groups each, computed and written.
fn written(folder: &Path, seeds: &[u32]) {
    let (mut scheduler, _) = keeping(folder, 100);
    for &seed in seeds {
        let request = of_groups(&scheduler, seed, 10);
        let stream = enqueue(&mut scheduler, request);
        finish(&mut scheduler, 100);
        drop(stream);
    }
    assert!(scheduler.prefix.settle(AGES));
}

fn is_reading(scheduler: &Scheduler, index: usize) -> bool {
    matches!(scheduler.waiting[index].restore, Restore::Reading(_))
}

/// Waits until what is being read is there.
fn read_all(scheduler: &Scheduler) {
    while !scheduler.has_restored() {
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn one_prompt_after_another_is_read_back_with_pages_that_are_promised_to_it() {
    let folder = tempfile::tempdir().expect("a folder");
    written(folder.path(), &[0, 1]);
    let (mut scheduler, _) = keeping(folder.path(), 100);
    assert_eq!(scheduler.restoring_bytes(), 0);
    // They wait for the disk, and take no place of a queue that has none.
    scheduler.config.max_waiting = 0;
    let streams = [0, 1].map(|seed| {
        let request = of_groups(&scheduler, seed, 10);
        enqueue(&mut scheduler, request)
    });
    scheduler.admit();
    assert!(is_reading(&scheduler, 0), "the first is read");
    assert!(!is_reading(&scheduler, 1) && scheduler.running.is_empty());
    let grain = scheduler.prefix.grain();
    let ten = 10 * grain.bytes(grain.group_tokens().get());
    assert_eq!(scheduler.restoring_bytes(), ten);
    read_all(&scheduler);
    scheduler.admit();
    assert_eq!(scheduler.running.len(), 1);
    assert!(is_reading(&scheduler, 0), "then the second");
    read_all(&scheduler);
    finish(&mut scheduler, 100);
    assert_eq!(scheduler.restoring_bytes(), 0);
    assert!(!scheduler.cancel_restoring(), "nothing is being read");
    drop(streams);
}

#[test]
fn what_is_being_read_is_given_up_when_its_pages_are_needed() {
    let folder = tempfile::tempdir().expect("a folder");
    written(folder.path(), &[0]);
    let (mut scheduler, _) = keeping(folder.path(), 100);
    let request = of_groups(&scheduler, 0, 10);
    let stream = enqueue(&mut scheduler, request);
    scheduler.admit();
    assert!(is_reading(&scheduler, 0));
    assert!(scheduler.evict(), "there is nothing else to take");
    assert!(!is_reading(&scheduler, 0) && scheduler.restoring_bytes() == 0);
    let missed = scheduler.waiting[0].folder_miss;
    assert_eq!(missed, Some(FolderMiss::NoMemory));
    assert!(!scheduler.evict());
    finish(&mut scheduler, 100);
    // It says the same as one that is read back.
    let (mut again, _) = keeping(folder.path(), 100);
    let request = of_groups(&again, 0, 10);
    let read = enqueue(&mut again, request);
    again.admit();
    read_all(&again);
    finish(&mut again, 100);
    assert_eq!(tokens(read), tokens(stream));
}

#[test]
fn a_prompt_is_read_back_as_soon_as_there_is_just_enough_memory_and_a_place() {
    let folder = tempfile::tempdir().expect("a folder");
    written(folder.path(), &[0]);
    // The prompt, its last token, and a group to go on.
    for (groups, reads) in [(11, false), (12, true), (13, true)] {
        let (mut scheduler, _) = keeping(folder.path(), groups);
        let request = of_groups(&scheduler, 0, 10);
        let needed = {
            let (waiting, stream) =
                Waiting::new(of_groups(&scheduler, 0, 10), 200, scheduler.system.now())
                    .expect("valid settings");
            drop(stream);
            scheduler.bytes_to_start(&waiting, 0)
        };
        let grain = scheduler.prefix.grain();
        assert_eq!(needed, 12 * grain.bytes(grain.group_tokens().get()));
        let stream = enqueue(&mut scheduler, request);
        scheduler.admit();
        let is_read = scheduler
            .waiting
            .front()
            .is_some_and(|_| is_reading(&scheduler, 0));
        assert_eq!(is_read, reads, "{groups} groups");
        drop(stream);
    }
    let (mut scheduler, _) = keeping(folder.path(), 100);
    let other = of_groups(&scheduler, 5, 2);
    let streams = [other, of_groups(&scheduler, 0, 10)];
    let streams = streams.map(|request| enqueue(&mut scheduler, request));
    scheduler.config.max_running = 1;
    scheduler.admit();
    assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (1, 1));
    assert!(!is_reading(&scheduler, 0), "there is no place for it yet");
    scheduler.config.max_running = 2;
    scheduler.admit();
    assert!(is_reading(&scheduler, 0));
    drop(streams);
}

/// A scheduler with memory for `groups` groups whose cache is put aside, if `pays` says so.
fn putting_aside(groups: u64, pays: bool) -> (Scheduler, FakeSystem, DiskFaults) {
    let (mut scheduler, system, _) = swapping(groups);
    let disk = DiskFaults::default();
    let cache = scheduler.engine.kv_cache().clone();
    let sizes = SwapSizes {
        limit: ByteLength::mebibytes(64),
        piece: ByteLength::new(2 * cache.page_bytes() as u64),
        block: ByteLength::new(8 * cache.page_bytes() as u64),
    };
    let swap: Swap = of(Disk::default(), sizes, &cache);
    let folder = std::env::temp_dir();
    let aside = CacheFolder::open_unnamed(folder, swap.room(), &cache, Some(disk.clone()));
    scheduler.prefix = PrefixCache::new(cache).with_folder(aside.expect("files"));
    scheduler.swap = Some(swap);
    scheduler.config.prefix_cache.enabled = true;
    if !pays {
        scheduler.prompt_rate = Rate::over(1.0);
    }
    (scheduler, system, disk)
}

/// Computes a prompt of some groups, which the cache has then.
fn cached(scheduler: &mut Scheduler, seed: u32, groups: u32) {
    let request = of_groups(scheduler, seed, groups);
    let stream = enqueue(scheduler, request);
    finish(scheduler, 100);
    drop(stream);
}

/// What prompts take, as it was assumed before any was computed.
fn assume_slow_prompts(scheduler: &mut Scheduler) {
    scheduler.prompt_rate = Rate::over(1.0);
    scheduler.prompt_rate.observe(1.0, Duration::from_secs(1));
}

#[test]
fn what_the_cache_lets_go_of_is_written_where_that_pays() {
    let (mut scheduler, _, _) = putting_aside(100, true);
    cached(&mut scheduler, 0, 4);
    assume_slow_prompts(&mut scheduler);
    let groups = scheduler.prefix.tree().len();
    assert_eq!(groups, 4);
    let made = scheduler.put_aside();
    assert!(
        matches!(made, Eviction::Writing | Eviction::Evicted),
        "{made:?}"
    );
    assert!(scheduler.prefix.settle(AGES));
    let status = scheduler.prefix.aside_status().expect("files");
    assert!(status.bytes.get() > 0, "it is written first");
    while scheduler.put_aside() != Eviction::Nothing {
        assert!(scheduler.prefix.settle(AGES));
    }
    assert_eq!(scheduler.prefix.tree().len(), 0);
    assert_eq!(scheduler.counters.evicted_groups, 4);

    // What does not pay is let go of at once.
    let (mut scheduler, _, _) = putting_aside(100, true);
    cached(&mut scheduler, 0, 4);
    scheduler.prompt_rate = Rate::over(1.0);
    for left in (0..4).rev() {
        assert_eq!(scheduler.put_aside(), Eviction::Evicted);
        assert_eq!(scheduler.prefix.tree().len(), left);
    }
    assert_eq!(scheduler.put_aside(), Eviction::Nothing);
    assert_eq!(
        scheduler.prefix.aside_status().expect("files").bytes.get(),
        0
    );
}

#[test]
fn what_nobody_has_used_for_its_time_leaves_and_what_is_younger_stays() {
    let (mut scheduler, system, disk) = putting_aside(100, true);
    cached(&mut scheduler, 0, 2);
    assume_slow_prompts(&mut scheduler);
    system.pass(Duration::from_secs(10));
    let now = scheduler.system.now();
    assert!(
        !scheduler.expire(now, Duration::from_secs(11)),
        "it is younger"
    );
    let time = Duration::from_secs(10);
    disk.set(Trouble::Stalls);
    assert!(!scheduler.expire(now, time), "it is being written");
    disk.set(Trouble::Nothing);
    assert!(scheduler.prefix.settle(AGES));
    assert!(scheduler.expire(now, time), "and is there");
    assert!(scheduler.prefix.aside_status().expect("files").bytes.get() > 0);

    // While nothing may be written, because a disk failed, it leaves as it is.
    let (mut scheduler, system, _) = putting_aside(100, true);
    cached(&mut scheduler, 0, 2);
    assume_slow_prompts(&mut scheduler);
    system.pass(Duration::from_secs(10));
    let now = scheduler.system.now();
    scheduler.swap_paused_until = Some(now + time);
    assert!(scheduler.expire(now, time));
    assert!(scheduler.expire(now, time));
    assert!(!scheduler.expire(now, time), "nothing is left");
    assert_eq!(
        scheduler.prefix.aside_status().expect("files").bytes.get(),
        0
    );
}

#[test]
fn a_disk_that_stalls_is_waited_for_two_seconds_and_left_alone_for_a_minute() {
    let (mut scheduler, system, disk) = putting_aside(100, true);
    cached(&mut scheduler, 0, 4);
    assume_slow_prompts(&mut scheduler);
    assert!(!scheduler.is_freeing());
    disk.set(Trouble::Stalls);
    assert_eq!(scheduler.put_aside(), Eviction::Writing);
    assert!(scheduler.is_freeing(), "its pages will be free");
    scheduler.follow_swaps();
    let millisecond = Duration::from_millis(1);
    system.pass(Duration::from_secs(2) - millisecond);
    scheduler.follow_swaps();
    assert_eq!(scheduler.swap_paused_until, None, "it may yet move");
    system.pass(millisecond);
    scheduler.follow_swaps();
    let minute = scheduler.system.now() + Duration::from_secs(60);
    assert_eq!(scheduler.swap_paused_until, Some(minute));
    assert!(!scheduler.is_freeing(), "nobody waits for it any more");
    // Meanwhile groups leave without being written.
    let before = scheduler.prefix.tree().len();
    assert_eq!(scheduler.put_aside(), Eviction::Evicted);
    assert_eq!(scheduler.prefix.tree().len(), before - 1);
    disk.set(Trouble::Nothing);
    assert!(scheduler.prefix.settle(AGES));
    scheduler.follow_swaps();
    assert_eq!(scheduler.swap_paused_until, Some(minute), "once");
}

#[test]
fn a_group_that_waits_to_be_written_gives_its_pages_at_once_when_it_is_evicted() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut scheduler, disk) = keeping(folder.path(), 100);
    disk.set(Trouble::Stalls);
    for seed in [0, 1] {
        let request = of_groups(&scheduler, seed, 4);
        let _stream = enqueue(&mut scheduler, request);
        finish(&mut scheduler, 100);
    }
    let mut groups = scheduler.prefix.tree().len();
    while groups > 0 {
        let before = scheduler.owned_bytes();
        assert!(scheduler.evict());
        groups = scheduler.prefix.tree().len();
        assert!(scheduler.owned_bytes() < before, "{groups} groups are left");
    }
    disk.set(Trouble::Nothing);
}

#[test]
fn what_waits_to_be_written_is_written_although_a_group_that_has_been_is_evicted() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut scheduler, disk) = keeping(folder.path(), 100);
    let compute = |scheduler: &mut Scheduler, seed| {
        let request = of_groups(scheduler, seed, 4);
        let _stream = enqueue(scheduler, request);
        finish(scheduler, 100);
    };
    compute(&mut scheduler, 0);
    assert!(scheduler.prefix.settle(AGES));
    disk.set(Trouble::Stalls);
    (1..4).for_each(|seed| compute(&mut scheduler, seed));
    // The oldest goes first.
    assert!(scheduler.evict());
    disk.set(Trouble::Nothing);
    assert!(scheduler.prefix.settle(AGES));
    while scheduler.evict() {}
    for seed in 1..4 {
        let request = of_groups(&scheduler, seed, 4);
        let stored = scheduler.prefix.stored(Namespace::COMMON, &request.prompt);
        let tokens = stored.map(|stored| stored.tokens);
        assert_eq!(tokens, Some(request.prompt.len() - 1), "prompt {seed}");
    }
}
