//! What a process leaves in a cache folder, the next starts from: the same rows, windows and states, or none at all.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use lacuna_kernels::ElementType;
use lacuna_kv::folder::faults::{DiskFaults, Trouble};
use lacuna_kv::folder::{
    self, CacheFolder, CacheKey, Fingerprint, FolderConfig, FolderError, FolderStatus, Restored,
    SessionId,
};
use lacuna_kv::prefix::{Namespace, PrefixCache};
use lacuna_kv::{Geometry, Keep, KvElements, LayerCache};
use lacuna_pages::{ByteLength, guard};
use tempfile::TempDir;

use crate::pages::{Bench, Held, tokens};
use crate::resume::{rows, window};

pub(crate) const MINUTE: Duration = Duration::from_secs(60);
/// Tokens whose rows are so many bytes that they are mapped from their file: more than a mebibyte.
pub(crate) const LONG: usize = 1050;

pub(crate) fn made_by(weights: &str) -> Fingerprint {
    Fingerprint::new([("weights", weights.to_owned())])
}

pub(crate) fn config(path: &Path, limit: u64) -> FolderConfig {
    FolderConfig {
        path: path.to_owned(),
        limit: ByteLength::new(limit),
        remote: None,
        key: None,
    }
}

impl Bench {
    /// As if another process had started: nothing in memory, and the folder.
    pub(crate) fn restarted(&self, path: &Path) -> Self {
        Self::with(self.geometry.clone(), &self.kv.policy().to_string())
            .with_folder(config(path, 1 << 30), made_by("a"))
    }

    pub(crate) fn with_folder(mut self, config: FolderConfig, fingerprint: Fingerprint) -> Self {
        let folder = CacheFolder::open(config, &self.kv, fingerprint).expect("a folder");
        self.cache = PrefixCache::new(self.kv.clone()).with_folder(folder);
        self
    }

    pub(crate) fn folder(&self) -> FolderStatus {
        self.cache.folder_status().expect("a folder")
    }

    /// Waits until all is written.
    pub(crate) fn settle(&self) {
        assert!(self.cache.settle(MINUTE), "written within a minute");
    }

    /// Reads what the folder has of `tokens` and enters it, as a scheduler does before it starts a prompt.
    pub(crate) fn restore(&mut self, tokens: &[u32]) -> usize {
        let Some(stored) = self.cache.stored(Namespace::COMMON, tokens) else {
            return 0;
        };
        let restoring = self.cache.restore(stored, tokens).expect("a folder");
        let restored = within_a_minute(|| restoring.poll());
        let now = Instant::now();
        self.cache.enter(Namespace::COMMON, tokens, restored, now)
    }

    /// A prompt that is computed, answered, and ended.
    pub(crate) fn turn(&mut self, prompt: &[u32]) -> Vec<u32> {
        let mut turn = self.start(prompt);
        self.compute(&mut turn, 64);
        turn.tokens.extend(tokens(1, 77));
        self.compute(&mut turn, 1);
        let all = turn.tokens.clone();
        self.leave(turn);
        all
    }

    /// A session's turn: what was held is gone on with, ended, and kept under its name.
    fn end_session(&mut self, mut held: Held, id: &SessionId) -> Vec<u32> {
        self.compute(&mut held, 64);
        let (path, sequence) = (&mut held.path, &mut held.sequence);
        let finished = self.cache.finish(path, sequence, Instant::now());
        finished.expect("pages can be sealed");
        self.cache.write(path, &held.tokens, true);
        self.cache.keep_session(path, id);
        drop(held.sequence);
        self.cache.leave(held.path, Instant::now());
        held.tokens
    }

    /// Computes what is missing of a prompt, and checks every row that is held.
    pub(crate) fn check(&mut self, mut held: Held) {
        self.compute(&mut held, 5);
        self.assert_rows(&held);
        self.leave(held);
    }
}

pub(crate) fn within_a_minute<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + MINUTE;
    loop {
        match ask() {
            Some(answer) => return answer,
            None => assert!(Instant::now() < until, "an answer within a minute"),
        }
        thread::sleep(Duration::from_micros(200));
    }
}

pub(crate) fn benches() -> impl Iterator<Item = Bench> {
    let rows = crate::pages::benches();
    rows.chain(crate::windows::benches())
        .chain(crate::states::benches())
}

/// The segments in `root`, whatever their fingerprint.
pub(crate) fn segments(root: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(root).expect("a folder").flatten();
    let folders = folders.filter(|entry| entry.path().is_dir());
    let files = folders.flat_map(|folder| fs::read_dir(folder.path()).expect("a folder").flatten());
    let files = files.map(|entry| entry.path());
    let suffix = |path: &PathBuf| {
        path.extension()
            .and_then(|suffix| suffix.to_str())
            .map(String::from)
    };
    let known = |path: &PathBuf| matches!(suffix(path).as_deref(), Some("rows" | "point"));
    let mut files: Vec<PathBuf> = files.filter(known).collect();
    files.sort();
    files
}

pub(crate) fn root() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

#[test]
fn the_next_process_goes_on_where_this_one_ended() {
    for bench in benches() {
        let root = root();
        let mut first = bench.restarted(root.path());
        let mut next = first.turn(&tokens(0, 500));
        next.extend(tokens(2, 60));
        let (found, _) = first.cache.find(Namespace::COMMON, &next);
        let groups = found.groups.len();
        first.settle();
        assert_eq!(first.folder().given_up + first.folder().failed_writes, 0);
        drop(first);
        let mut second = bench.restarted(root.path());
        assert!(second.folder().segments > 0);
        assert_eq!(second.restore(&next), groups, "all that was in memory");
        assert_eq!(second.restore(&next), 0, "all is in memory");
        let held = second.start(&next);
        assert_eq!(
            held.sequence.len(),
            second.cache.grain().whole_tokens(groups)
        );
        second.check(held);
        assert_eq!(second.folder().damaged, 0);
        assert!(second.folder().restored_tokens > 0);
    }
}

#[test]
fn a_prompt_takes_of_a_segment_what_it_has_in_common_and_adds_what_it_has_of_its_own() {
    for bench in crate::pages::benches() {
        let root = root();
        let mut first = bench.restarted(root.path());
        first.turn(&tokens(0, 500));
        let other = [tokens(0, 300), tokens(3, 200)].concat();
        first.turn(&other);
        first.settle();
        let (written, others) = (first.folder().written_segments, segments(root.path()).len());
        assert_eq!(written, others as u64);
        drop(first);
        let mut second = bench.restarted(root.path());
        let third = [tokens(0, 150), tokens(4, 100)].concat();
        let group = second.cache.grain().group_tokens().get();
        assert_eq!(second.restore(&third), 150 / group);
        let held = second.start(&third);
        second.check(held);
        let (group, before) = (second.cache.grain().group_tokens().get(), 300);
        assert_eq!(
            second.restore(&other),
            other.len() / group - 150 / group,
            "{before}"
        );
        let held = second.start(&other);
        second.check(held);
    }
}

#[test]
fn long_prompts_are_mapped_from_their_files_and_copied_where_they_are_written() {
    guard::install().expect("a handler");
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, LONG));
    first.settle();
    drop(first);
    let read = |path: &PathBuf| fs::read(path).expect("a segment");
    let paths = segments(root.path());
    let before: Vec<Vec<u8>> = paths.iter().map(read).collect();
    let mut others = [bench.restarted(root.path()), bench.restarted(root.path())];
    for second in &mut others {
        let idle = second.owned();
        assert!(second.restore(&prompt) > 0);
        let (status, ledger) = (second.folder(), second.kv.ledger());
        assert!(status.mapped_bytes > 1 << 20 && status.mapped_bytes < status.restored_bytes);
        assert_eq!(ledger.file.get(), status.mapped_bytes);
        // They count like pages that were copied.
        assert_eq!(second.owned(), idle + status.restored_bytes);
        // One goes on behind it, one from the middle of a group.
        let group = second.cache.grain().group_tokens().get();
        let held = second.start(&prompt);
        second.check(held);
        let middle = [tokens(0, 20 * group + group / 2), tokens(7, 40)].concat();
        let held = second.start(&middle);
        assert!(held.sequence.len() > 20 * group);
        second.check(held);
        let held = second.start(&prompt);
        second.check(held);
    }
    let after: Vec<Vec<u8>> = paths.iter().map(read).collect();
    assert!(after == before, "nobody writes to them");
    folder::clear(root.path()).expect("cleared");
    for second in &mut others {
        let held = second.start(&prompt);
        second.check(held);
        assert!(!second.kv.pool().has_lost_files());
        while second.cache.evict(Instant::now()) {}
        assert_eq!(second.kv.ledger().file, ByteLength::ZERO);
    }
}

/// Only where the system says when it was started.
#[cfg(target_os = "linux")]
#[test]
fn what_was_compared_since_the_machine_was_started_is_not_read_again_unless_somebody_writes_to_it()
{
    use std::os::unix::fs::FileExt;
    guard::install().expect("a handler");
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, LONG));
    first.settle();
    drop(first);
    let mut restored = 0;
    for _ in 0..3 {
        let mut next = bench.restarted(root.path());
        restored = next.restore(&prompt);
        assert!(restored > 0);
        // Its use gives the files other times.
        next.settle();
        let status = next.folder();
        assert!(status.mapped_bytes > 1 << 20);
        assert_eq!(status.known_bytes, status.mapped_bytes);
    }
    let path = &segments(root.path())[0];
    let file = fs::OpenOptions::new().read(true).write(true).open(path);
    let file = file.expect("a segment");
    let at = fs::metadata(path).expect("a segment").len() - 1;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[byte[0] ^ 1], at).expect("room");
    let mut next = bench.restarted(root.path());
    assert!(next.restore(&prompt) < restored);
    assert_eq!(next.folder().damaged, 1);
    let held = next.start(&prompt);
    next.check(held);
}

#[test]
fn a_file_that_somebody_cuts_while_it_is_mapped_is_known_to_be_lost() {
    guard::install().expect("a handler");
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, LONG));
    first.settle();
    drop(first);
    let mut second = bench.restarted(root.path());
    assert!(second.restore(&prompt) > 0);
    assert!(!second.kv.pool().has_lost_files());
    let path = &segments(root.path())[0];
    let file = fs::OpenOptions::new().write(true).open(path);
    file.and_then(|file| file.set_len(5000)).expect("cut");
    assert!(second.kv.pool().has_lost_files());
    assert!(
        second
            .cache
            .start(Namespace::COMMON, &prompt, LONG + 64)
            .is_err()
    );
    while second.cache.evict(Instant::now()) {}
    assert!(!second.kv.pool().has_lost_files());
    assert_eq!(second.restore(&prompt), 0);
    assert_eq!(second.folder().damaged, 1);
    let held = second.start(&prompt);
    second.check(held);
}

#[test]
fn namespaces_are_as_apart_in_files_as_in_memory() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    let other = Namespace::new(7);
    assert!(first.cache.stored(other, &prompt).is_none());
    drop(first);
    let second = bench.restarted(root.path());
    assert!(second.cache.stored(other, &prompt).is_none());
    assert!(second.cache.stored(Namespace::COMMON, &prompt).is_some());
}

pub(crate) fn first_bench() -> Bench {
    crate::pages::benches().next().expect("a bench")
}

#[test]
fn nothing_is_taken_that_other_settings_computed_and_it_is_said_which_differ() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    let there = first.folder().segments;
    drop(first);
    let open = |bench: Bench, weights: &str| {
        bench.with_folder(config(root.path(), 1 << 30), made_by(weights))
    };
    let with = |policy| Bench::with(bench.geometry.clone(), policy);
    let wider = KvElements::both(ElementType::F32);
    let wider = Bench::with(bench.geometry.with_elements(wider), "sparse");
    for (mut other, differs) in [
        (open(with("sparse"), "b"), "weights"),
        (open(with("sparse:head-major"), "a"), "KV layout"),
        (open(wider, "a"), "KV rows"),
    ] {
        let status = other.folder();
        assert_eq!((status.segments, status.other_segments), (0, there));
        assert_eq!(status.differing, [differs]);
        assert_eq!(other.restore(&prompt), 0);
        let held = other.start(&prompt);
        assert_eq!(held.sequence.len(), 0);
        other.check(held);
    }
}

/// What a process leaves of a turn, and the next turn's tokens.
struct Left {
    root: TempDir,
    next: Vec<u32>,
    /// Each file as it was written.
    segments: Vec<(PathBuf, Vec<u8>)>,
}

impl Left {
    /// By what computes `next`'s beginning.
    fn by(bench: &Bench, compute: impl FnOnce(&mut Bench) -> Vec<u32>) -> Self {
        let root = root();
        let mut first = bench.restarted(root.path());
        let next = compute(&mut first);
        first.settle();
        drop(first);
        let read = |path: PathBuf| {
            let bytes = fs::read(&path).expect("a segment");
            (path, bytes)
        };
        let segments = segments(root.path()).into_iter().map(read).collect();
        Self {
            root,
            next,
            segments,
        }
    }

    /// Flips a bit of every `step`th byte of a segment in turn. Whatever it is, the next turn is computed as if there
    /// were no folder, or from the segments before.
    fn flip(&self, bench: &Bench, segment: usize, step: impl Fn(usize) -> usize) {
        let (path, whole) = &self.segments[segment];
        let mut at = 0;
        while at < whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(path, &damaged).expect("a file");
            let mut second = bench.restarted(self.root.path());
            second.restore(&self.next);
            let found = second.folder().damaged;
            // Of a segment that is not read, such as an earlier resume point, the header is.
            let is_read = at < 4096 || !second.cache.grain().has_resume_points();
            match (8..12).contains(&at) {
                true => assert_eq!(found, 0, "another version's at {at}"),
                false if is_read => assert_eq!(found, 1, "at {at} of {path:?}"),
                false => assert!(found <= 1, "at {at}"),
            }
            let mut held = second.start(&self.next);
            // States that were taken are asserted as the rest is computed.
            second.compute(&mut held, 64);
            second.assert_rows(&held);
            drop(second);
            self.tidy();
            at += step(at);
        }
    }

    /// Makes the folder what it was: without what was written or put aside since, and each file whole.
    fn tidy(&self) {
        let folder = segments_folder(self.root.path());
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            fs::remove_file(entry.path()).expect("a file");
        }
        for (path, whole) in &self.segments {
            fs::write(path, whole).expect("a file");
        }
    }
}

/// Flips a bit of every `step`th byte of every segment that a turn of so many tokens leaves.
fn flips(bench: &Bench, prompt: usize, step: impl Fn(usize) -> usize) {
    let left = Left::by(bench, |bench| {
        let mut next = bench.turn(&tokens(0, prompt));
        next.extend(tokens(2, 60));
        next
    });
    for segment in 0..left.segments.len() {
        left.flip(bench, segment, &step);
    }
}

#[test]
fn whatever_byte_of_a_segment_differs_it_is_missed() {
    // All that the header says, and places throughout the rest.
    let step = |at: usize| if at < 160 { 3 } else { 1501 };
    flips(&first_bench(), 200, step);
    let states = crate::states::benches().nth(1).expect("a bench");
    flips(&states, 200, step);
    guard::install().expect("a handler");
    flips(&first_bench(), LONG, |at| if at < 20 { 7 } else { 130_003 });
}

#[test]
#[ignore = "needs hours: every byte of every segment of all geometries, and what is computed then"]
fn every_byte_of_every_segment_counts() {
    for bench in benches() {
        flips(&bench, 200, |_| 1);
    }
}

/// The smallest segments there are: of rows that fill pages and that straddle them, of windows, of states.
fn small(seed: u32) -> (Bench, Left) {
    let floats = KvElements::both(ElementType::F32);
    let geometry = match seed % 4 {
        0 => Geometry::new(vec![rows(1, 64, Keep::All)], floats),
        1 => Geometry::new(vec![rows(2, 12, Keep::All)], floats),
        2 => Geometry::new(vec![rows(1, 64, window(5))], floats),
        _ => Geometry::new(vec![LayerCache::None], floats)
            .and_then(|geometry| geometry.with_states(vec![40])),
    };
    let geometry = geometry.expect("a model");
    let bench = Bench::with(geometry, "sparse");
    let left = Left::by(&bench, |bench| {
        let group = bench.cache.grain().group_tokens().get();
        let mut next = tokens(seed, group + 1);
        let mut held = bench.start(&next);
        bench.compute(&mut held, 64);
        bench.leave(held);
        next.extend(tokens(seed + 2, 9));
        next
    });
    (bench, left)
}

/// Whichever byte of a hundred segments differs: what is computed then is what is computed without a folder.
#[test]
#[ignore = "needs minutes, with temporary files in memory: every byte of a hundred segments"]
fn every_byte_of_a_hundred_segments_counts() {
    const SEGMENTS: usize = 100;
    let all: Vec<(u32, usize)> = (0..)
        .flat_map(|seed| {
            let segments = small(seed).1.segments.len();
            (0..segments).map(move |segment| (seed, segment))
        })
        .take(SEGMENTS)
        .collect();
    let (next, seen) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // Most of the time each waits for the folder's own threads.
    let threads = 4 * thread::available_parallelism().map_or(1, NonZeroUsize::get);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&(seed, segment)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (bench, left) = small(seed);
                    left.flip(&bench, segment, |_| 1);
                    let bytes = left.segments[segment].1.len();
                    let seen = seen.fetch_add(bytes, Ordering::Relaxed) + bytes;
                    println!("{seen} bytes of segments so far, {bytes} of one");
                }
            });
        }
    });
}

#[test]
fn files_that_were_cut_or_swapped_are_missed() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.turn(&[tokens(5, 300), prompt.clone()].concat());
    first.settle();
    drop(first);
    let paths = segments(root.path());
    let bytes = fs::read(&paths[0]).expect("a segment");
    let lengths = [0, 1, 11, 16, 100, 4095, 4096, bytes.len() - 1];
    for length in lengths {
        fs::write(&paths[0], &bytes[..length]).expect("a file");
        let second = bench.restarted(root.path());
        assert_eq!(second.folder().damaged, 1, "{length} bytes");
        assert!(!paths[0].exists() && paths[0].with_extension("bad").exists());
    }
    // Another's bytes under its name, put there while the folder is in use.
    fs::write(&paths[0], &bytes).expect("a file");
    let mut second = bench.restarted(root.path());
    let mine = second
        .cache
        .stored(Namespace::COMMON, &prompt)
        .expect("there");
    for path in &paths {
        let other = paths.iter().find(|other| *other != path).expect("two");
        fs::copy(other, path).expect("a copy");
    }
    let restoring = second.cache.restore(mine, &prompt).expect("a folder");
    let restored: Restored = within_a_minute(|| restoring.poll());
    assert!(restored.is_empty());
    assert_eq!(second.folder().damaged, 1);
    let held = second.start(&prompt);
    second.check(held);
}

/// Bytes of all files in `root`, as `du` counts them.
fn disk_usage(root: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(root) else {
        return 0;
    };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => disk_usage(&entry.path()),
        Ok(found) => found.len(),
        // It has gone meanwhile.
        Err(_) => 0,
    });
    sizes.sum()
}

#[test]
fn what_a_request_pins_outlives_in_files_what_was_used_later() {
    for pins in [true, false] {
        let (bench, root) = (first_bench(), root());
        let mut first = bench.restarted(root.path());
        let mut turn = first.start(&tokens(0, 500));
        first.compute(&mut turn, 64);
        let prompt = turn.tokens.clone();
        if pins {
            let hour = Duration::from_secs(3600);
            first.cache.pin(&mut turn.path, 500, Instant::now(), hour);
        }
        first.leave(turn);
        first.settle();
        let one = first.folder().bytes.get();
        drop(first);
        let limited = config(root.path(), 3 * one + one / 2);
        let mut second = bench
            .restarted(root.path())
            .with_folder(limited, made_by("a"));
        for seed in 10..16 {
            second.turn(&tokens(seed, 500));
            second.settle();
        }
        drop(second);
        let third = bench.restarted(root.path());
        let stored = third.cache.stored(Namespace::COMMON, &prompt);
        assert_eq!(stored.is_some(), pins);
    }
}

#[test]
fn a_disk_that_is_full_or_stalls_stops_the_writing_and_nothing_else_until_there_is_room() {
    let (bench, root) = (first_bench(), root());
    let disk = DiskFaults::default();
    let mut first = bench.restarted(root.path());
    let config = config(root.path(), 1 << 30);
    let folder = CacheFolder::open_faulty(disk.clone(), config, &first.kv, made_by("a"));
    first.cache = PrefixCache::new(first.kv.clone()).with_folder(folder.expect("a folder"));
    for (seed, trouble) in [(0, Trouble::Full), (1, Trouble::HalfWrites)] {
        disk.set(trouble);
        let prompt = first.turn(&tokens(seed, 500));
        first.settle();
        let status = first.folder();
        assert!(status.failed_writes > u64::from(seed));
        assert_eq!(status.written_segments, 0);
        assert!(status.paused.is_some(), "it is said");
        assert_eq!(segments(root.path()), [] as [PathBuf; 0]);
        let held = first.start(&prompt);
        assert!(!held.sequence.is_empty(), "from memory");
        first.check(held);
    }
    disk.set(Trouble::Stalls);
    let idle = first.owned();
    let prompt = first.turn(&tokens(2, 500));
    while first.cache.evict(Instant::now()) {}
    first.cache.give_up_writing();
    assert!(first.owned() <= idle, "a disk that stalls holds no page");
    disk.set(Trouble::Nothing);
    first.turn(&prompt[..500]);
    first.settle();
    assert!(first.folder().written_segments > 0, "there is room again");
    drop(first);
    assert!(bench.restarted(root.path()).restore(&prompt) > 0);
}

#[test]
fn a_folder_keeps_within_its_limit_and_what_was_used_stays() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    let one: u64 = first.folder().bytes.get();
    drop(first);
    // Room for three and a bit.
    let limit = 3 * one + one / 2;
    let held = |root: &Path| -> u64 {
        let files = segments(root).into_iter();
        files
            .map(|path| fs::metadata(path).expect("there").len())
            .sum()
    };
    let limited = config(root.path(), limit);
    let mut second = bench
        .restarted(root.path())
        .with_folder(limited, made_by("a"));
    let (done, ended) = channel::<()>();
    let most = thread::scope(|scope| {
        // Whatever is being written counts.
        let watched = root.path();
        let watch = scope.spawn(move || {
            let mut most = 0;
            while ended.try_recv() == Err(TryRecvError::Empty) {
                most = most.max(disk_usage(watched));
                thread::sleep(Duration::from_micros(200));
            }
            most
        });
        for seed in 10..20 {
            second.turn(&tokens(seed, 500));
            // Asked for every time, so that it is of use.
            second.turn(&prompt);
            second.settle();
            assert!(
                held(root.path()) <= limit,
                "{} of {limit}",
                held(root.path())
            );
            assert_eq!(second.folder().bytes.get(), held(root.path()));
        }
        drop(done);
        watch.join().expect("it has not panicked")
    });
    assert!(
        most > limit - one && most <= limit + one,
        "{most} of {limit}"
    );
    drop(second);
    let mut third = bench.restarted(root.path());
    let group = third.cache.grain().group_tokens().get();
    assert_eq!(third.restore(&prompt), (prompt.len() - 1) / group);
    assert!(
        third
            .cache
            .stored(Namespace::COMMON, &tokens(10, 500))
            .is_none()
    );
    // A limit that no segment fits in.
    let nothing = config(root.path(), 4096);
    let mut fourth = bench
        .restarted(root.path())
        .with_folder(nothing, made_by("a"));
    let turn = fourth.turn(&tokens(40, 500));
    fourth.settle();
    assert!(fourth.folder().given_up > 0 && fourth.folder().failed_writes == 0);
    assert!(
        fourth.cache.find(Namespace::COMMON, &turn).1 > 0,
        "in memory all the same"
    );
}

/// A disk that takes no more, as far as that can be had everywhere: what is to be a folder is a file.
#[test]
fn a_disk_that_fails_stops_the_writing_and_nothing_else() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let folder = segments_folder(root.path());
    fs::remove_dir_all(&folder).expect("a folder");
    fs::write(&folder, "in the way").expect("a file");
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    let status = first.folder();
    assert_eq!((status.failed_writes, status.written_segments), (1, 0));
    assert!(status.paused.is_some());
    let held = first.start(&prompt);
    assert!(!held.sequence.is_empty(), "from memory");
    first.check(held);
    first.turn(&tokens(6, 500));
    first.settle();
    assert_eq!(first.folder().failed_writes, 1, "not tried again at once");
}

fn segments_folder(root: &Path) -> PathBuf {
    let folders = fs::read_dir(root).expect("a folder").flatten();
    let mut folders = folders
        .map(|entry| entry.path())
        .filter(|path| path.is_dir());
    folders.next().expect("one fingerprint")
}

#[test]
fn pages_that_wait_to_be_written_are_given_back_when_they_are_needed() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let idle = first.owned();
    // Nobody writes while another has the folder.
    let lock = fs::File::open(root.path().join("lock")).expect("a lock");
    lock.lock().expect("nobody writes");
    let prompt = first.turn(&tokens(0, 500));
    while first.cache.evict(Instant::now()) {}
    assert!(first.owned() > idle, "they wait");
    assert!(first.cache.give_up_writing());
    assert_eq!(first.owned(), idle);
    assert!(!first.cache.give_up_writing());
    lock.unlock().expect("a lock");
    first.settle();
    assert!(first.folder().given_up > 0);
    assert!(first.cache.stored(Namespace::COMMON, &prompt).is_none());
    // What was given up is written when it comes again.
    first.turn(&tokens(0, 500));
    first.settle();
    assert!(first.cache.find(Namespace::COMMON, &prompt).1 > 0);
    drop(first);
    assert!(bench.restarted(root.path()).restore(&prompt) > 0);
}

#[test]
fn pages_that_are_read_back_are_given_back_with_whoever_waits_for_them() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    drop(first);
    let second = bench.restarted(root.path());
    let idle = second.owned();
    for _ in 0..20 {
        let stored = second
            .cache
            .stored(Namespace::COMMON, &prompt)
            .expect("there");
        let restoring = second.cache.restore(stored, &prompt).expect("a folder");
        drop(restoring);
    }
    within_a_minute(|| (second.owned() == idle).then_some(()));
}

#[test]
fn memory_that_is_short_is_a_miss() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    drop(first);
    let mut second = bench.restarted(root.path());
    let page = second.kv.page_bytes() as u64;
    second.kv.set_limit(ByteLength::new(page)).expect("a limit");
    assert_eq!(second.restore(&prompt), 0);
    assert_eq!(second.folder().short_of_memory, 1);
    second
        .kv
        .set_limit(ByteLength::new(1 << 30))
        .expect("a limit");
    assert!(
        second.restore(&prompt) > 0,
        "nothing is wrong with the folder"
    );
}

#[test]
fn two_processes_share_a_folder() {
    let (bench, root) = (first_bench(), root());
    let mut one = bench.restarted(root.path());
    let mut two = bench.restarted(root.path());
    let first = one.turn(&tokens(0, 500));
    one.settle();
    let second = two.turn(&tokens(5, 500));
    // Two processes compute the same.
    two.turn(&tokens(0, 500));
    two.settle();
    assert_eq!(one.folder().failed_writes + two.folder().failed_writes, 0);
    assert!(two.folder().segments > one.folder().segments);
    // It looks when it writes.
    one.turn(&tokens(6, 500));
    one.settle();
    assert!(one.restore(&second) > 0);
    folder::clear(root.path()).expect("cleared");
    assert_eq!(segments(root.path()), [] as [PathBuf; 0]);
    while one.cache.evict(Instant::now()) {}
    assert_eq!(one.restore(&first), 0);
    assert_eq!(one.folder().gone, 1);
    let held = one.start(&first);
    one.check(held);
}

#[test]
fn memory_that_cannot_be_kept_has_no_folder() {
    let root = root();
    for policy in ["dense", "paged", "grow:mlx"] {
        let bench = Bench::with(first_bench().geometry, policy);
        let opened = CacheFolder::open(config(root.path(), 1 << 20), &bench.kv, made_by("a"));
        assert!(
            matches!(opened, Err(FolderError::Policy { .. })),
            "{policy}"
        );
    }
    // Nor has a device on which a page goes with its sequence, whatever the policy.
    let device = lacuna_pages::DenseDevice::new();
    let pool = lacuna_pages::Pool::new(device, lacuna_pages::PoolConfig::default());
    let geometry = first_bench().geometry;
    let policy = "sparse".parse().expect("a policy");
    let kv = lacuna_kv::KvCache::over(pool.expect("a pool"), geometry, policy);
    let kv = kv.expect("a cache");
    let opened = CacheFolder::open(config(root.path(), 1 << 20), &kv, made_by("a"));
    assert!(matches!(opened, Err(FolderError::Policy { .. })));
    let file = root.path().join("file");
    fs::write(&file, "").expect("a file");
    let opened = CacheFolder::open(config(&file, 1 << 20), &first_bench().kv, made_by("a"));
    assert!(matches!(opened, Err(FolderError::Io { .. })));
}

#[test]
fn folders_are_listed_and_verified_without_a_model() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    let group = first.cache.grain().group_tokens().get();
    drop(first);
    let listed = folder::list(root.path(), None).expect("a folder");
    let [listed] = &listed[..] else {
        panic!("{listed:?}");
    };
    assert_eq!(listed.tokens, (prompt.len() / group * group) as u64);
    assert!(
        listed
            .settings
            .contains(&("weights".to_owned(), "a".to_owned()))
    );
    assert_eq!((listed.unusable, listed.resume_points), (0, 0));
    let problems = || {
        let (mut whole, mut damaged) = (0, 0);
        let each = |found: folder::Found| match found.problem {
            None => whole += 1,
            Some(_) => damaged += 1,
        };
        folder::verify(root.path(), None, each).expect("a folder");
        (whole, damaged)
    };
    assert_eq!(problems(), (listed.rows, 0));
    let path = &segments(root.path())[0];
    let mut bytes = fs::read(path).expect("a segment");
    *bytes.last_mut().expect("bytes") ^= 1;
    fs::write(path, bytes).expect("a file");
    assert_eq!(problems(), (listed.rows - 1, 1));
    // As a process sets aside what is damaged.
    fs::rename(path, path.with_extension("bad")).expect("a file");
    assert_eq!(problems(), (listed.rows - 1, 0));
    let after = folder::list(root.path(), None).expect("a folder");
    assert_eq!((after[0].rows, after[0].unusable), (listed.rows - 1, 1));
    assert_eq!(after[0].bytes, listed.bytes, "it takes room");
    // What is somebody else's stays.
    let film = segments_folder(root.path()).join("film.part");
    fs::write(&film, "").expect("a file");
    let before = folder::clear(root.path()).expect("cleared");
    assert_eq!(before, listed.bytes);
    assert!(film.exists());
}

/// The environment of a child that computes and writes until it is killed.
const CHILD: &str = "LACUNA_KV_TEST_FOLDER";

#[test]
fn whenever_a_process_is_killed_what_it_left_is_whole() {
    if let Some(path) = std::env::var_os(CHILD) {
        return write_until_killed(Path::new(&path));
    }
    killed(12);
}

#[test]
#[ignore = "needs minutes: two thousand processes are killed"]
fn two_thousand_times_a_killed_process_leaves_what_is_whole() {
    killed(2000);
}

fn write_until_killed(path: &Path) {
    let benches = [
        first_bench(),
        crate::states::benches().next().expect("a bench"),
    ];
    let mut benches = benches.map(|bench| bench.restarted(path));
    println!("ready");
    for seed in 0.. {
        for bench in &mut benches {
            let prompt = tokens(seed % 40, 300 + seed as usize % 200);
            bench.restore(&prompt);
            bench.turn(&prompt);
            while bench.cache.evict(Instant::now()) {}
        }
    }
}

fn killed(times: u64) {
    let root = root();
    let program = std::env::current_exe().expect("this test");
    let test = "folder::whenever_a_process_is_killed_what_it_left_is_whole";
    let mut found = 0;
    for time in 0..times {
        let mut child = Command::new(&program)
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, root.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("a child");
        // Anywhere from its start to some hundred segments.
        thread::sleep(Duration::from_millis(20 + time * 37 % 400));
        child.kill().expect("it runs");
        child.wait().expect("it ended");
        let each = |verified: folder::Found| {
            assert!(verified.problem.is_none(), "{verified:?}");
            found += 1;
        };
        folder::verify(root.path(), None, each).expect("a folder");
    }
    assert!(found > 0, "something was written");
    for bench in [
        first_bench(),
        crate::states::benches().next().expect("a bench"),
    ] {
        let mut after = bench.restarted(root.path());
        assert_eq!(after.folder().damaged, 0);
        let mut restored = 0;
        for seed in 0..40 {
            let prompt = tokens(seed, 300 + seed as usize);
            restored += after.restore(&prompt);
            let held = after.start(&prompt);
            after.check(held);
        }
        assert!(restored > 0, "something was read back");
        // The next that writes removes what was half written.
        after.turn(&tokens(77, 300));
        after.settle();
        let parts = fs::read_dir(segments_folder(root.path())).expect("a folder");
        let part = |path: PathBuf| path.extension().is_some_and(|suffix| suffix == "part");
        assert!(!parts.flatten().any(|entry| part(entry.path())));
    }
}

#[test]
fn times_that_jump_cost_no_more_than_the_order_of_leaving() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    for (index, path) in segments(root.path()).iter().enumerate() {
        let far = match index % 2 {
            0 => SystemTime::UNIX_EPOCH,
            _ => SystemTime::now() + Duration::from_secs(1 << 30),
        };
        let file = fs::OpenOptions::new().write(true).open(path);
        file.and_then(|file| file.set_modified(far))
            .expect("a time");
    }
    drop(first);
    let mut second = bench.restarted(root.path());
    assert!(second.restore(&prompt) > 0);
    let held = second.start(&prompt);
    second.check(held);
}

/// What is in memory is asked of no file, and its files must not be the first to go for that.
#[test]
fn a_prompt_that_is_answered_from_memory_stays_in_the_folder_as_well() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    let (one, written) = (first.folder().bytes.get(), first.folder().written_segments);
    drop(first);
    let limited = config(root.path(), 3 * one + one / 2);
    let mut second = bench
        .restarted(root.path())
        .with_folder(limited, made_by("a"));
    second.turn(&tokens(0, 500));
    second.settle();
    assert_eq!(second.folder().written_segments, 0, "all of it is there");
    for seed in 10..16 {
        second.turn(&tokens(seed, 500));
        second.settle();
        let held = second.start(&prompt[..500]);
        assert!(!held.sequence.is_empty(), "from memory");
        second.check(held);
        second.settle();
    }
    // Or it would be there because it had left and was written anew.
    assert_eq!(second.folder().written_segments, 6 * written);
    let found = |tokens: &[u32]| {
        let third = bench.restarted(root.path());
        third.cache.stored(Namespace::COMMON, tokens).is_some()
    };
    assert!(found(&prompt) && !found(&tokens(10, 500)));
}

fn encrypted(path: &Path, key: Option<u8>) -> FolderConfig {
    FolderConfig {
        key: key.map(|byte| CacheKey::new([byte; 32])),
        ..config(path, 1 << 30)
    }
}

#[test]
fn with_a_key_the_next_process_goes_on_and_without_it_nothing_is_found_and_nothing_is_damaged() {
    guard::install().expect("a handler");
    for bench in benches() {
        let root = root();
        let open = |key| {
            let bench = bench.restarted(root.path());
            bench.with_folder(encrypted(root.path(), key), made_by("a"))
        };
        let mut first = open(Some(1));
        let mut prompt = first.turn(&tokens(0, LONG));
        prompt.extend(tokens(2, 60));
        let (found, _) = first.cache.find(Namespace::COMMON, &prompt);
        let groups = found.groups.len();
        first.settle();
        let there = first.folder().segments;
        assert!(there > 0 && first.folder().failed_writes == 0);
        drop(first);
        for key in [None, Some(2)] {
            let mut other = open(key);
            let status = other.folder();
            assert_eq!((status.segments, status.other_segments), (0, there));
            assert_eq!(status.differing, ["encryption key"]);
            assert_eq!(other.restore(&prompt), 0);
            assert_eq!((other.folder().damaged, other.folder().unreadable), (0, 0));
        }
        let mut second = open(Some(1));
        assert_eq!(second.restore(&prompt), groups, "all that was in memory");
        let status = second.folder();
        assert_eq!(
            (status.mapped_bytes, status.damaged),
            (0, 0),
            "it is copied"
        );
        let idle = second.owned();
        assert!(idle >= status.restored_bytes, "and charged");
        let held = second.start(&prompt);
        second.check(held);
        second.settle();
        // For people, too.
        let key = CacheKey::new([1; 32]);
        let listed = |key| {
            let listed = folder::list(root.path(), key).expect("a folder");
            let of = |it: &folder::Listed| (it.rows + it.resume_points, it.locked, it.unusable);
            listed.iter().map(of).find(|of| of.0 + of.1 > 0)
        };
        let all = segments(root.path()).len();
        assert_eq!(listed(Some(&key)), Some((all, 0, 0)));
        let other = CacheKey::new([2; 32]);
        for key in [None, Some(&other)] {
            assert_eq!(
                listed(key),
                Some((0, all, 0)),
                "it is not said to be damaged"
            );
        }
        let verified = |key| {
            let mut whole = 0;
            let each = |found: folder::Found| {
                assert!(found.problem.is_none(), "{found:?}");
                whole += 1;
            };
            let locked = folder::verify(root.path(), key, each).expect("a folder");
            (whole, locked)
        };
        assert_eq!(verified(Some(&key)), (all, 0));
        assert_eq!(
            (verified(None), verified(Some(&other))),
            ((0, all), (0, all))
        );
    }
}

#[test]
fn what_is_encrypted_and_was_changed_or_cut_is_not_taken() {
    let (bench, root) = (first_bench(), root());
    let open = || {
        let bench = bench.restarted(root.path());
        bench.with_folder(encrypted(root.path(), Some(1)), made_by("a"))
    };
    let mut first = open();
    let prompt = first.turn(&tokens(0, 200));
    first.settle();
    drop(first);
    let path = segments(root.path()).remove(0);
    let whole = fs::read(&path).expect("a segment");
    let changed = (0..whole.len()).step_by(1 + whole.len() / 60).map(|at| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        bytes
    });
    let cut = (0..whole.len()).step_by(1 + whole.len() / 20);
    let cut = cut.map(|length| whole[..length].to_vec());
    for (number, bytes) in changed.chain(cut).enumerate() {
        fs::remove_file(path.with_extension("bad")).ok();
        fs::write(&path, bytes).expect("room");
        let mut second = open();
        assert_eq!(second.restore(&prompt), 0, "{number}");
        // Of another version it would be left alone.
        assert!(second.folder().damaged == 1 || path.exists(), "{number}");
        let held = second.start(&prompt);
        second.check(held);
        second.settle();
        fs::write(&path, &whole).expect("room");
    }
    let mut second = open();
    assert!(second.restore(&prompt) > 0, "as it was");
}

#[test]
fn what_a_session_needs_stays_in_a_folder_until_the_session_is_removed() {
    for bench in benches() {
        let root = root();
        let mut first = bench.restarted(root.path());
        let prompt = first.turn(&tokens(0, 500));
        first.settle();
        let one = first.folder().bytes.get();
        drop(first);
        let limited = config(root.path(), 5 * one / 2);
        let mut second = bench
            .restarted(root.path())
            .with_folder(limited, made_by("a"));
        second.restore(&prompt);
        let held = second.start(&prompt);
        let id = SessionId {
            name: "notes".parse().expect("a name"),
            owner: Namespace::COMMON,
        };
        let next = second.end_session(held, &id);
        second.settle();
        let kept = folder::sessions(root.path()).expect("a folder");
        let group = second.cache.grain().group_tokens().get();
        assert_eq!((kept.len(), &kept[0].id), (1, &id));
        assert_eq!(kept[0].tokens, next.len() / group * group);
        for seed in 10..16 {
            second.turn(&tokens(seed, 500));
            second.settle();
        }
        let found = |tokens: &[u32]| {
            let third = bench.restarted(root.path());
            let stored = third.cache.stored(Namespace::COMMON, tokens);
            stored.map_or(0, |stored| stored.tokens)
        };
        let more = [next.as_slice(), &tokens(2, 60)].concat();
        let whole = next.len() / group * group;
        // Of layers with states a sequence goes on from a point, which is not at the end of each group.
        let points = second.cache.grain().has_resume_points();
        assert!(
            found(&more) == whole || points && found(&more) > 400,
            "{}",
            found(&more)
        );
        assert_eq!(found(&tokens(10, 500)), 0, "nobody named it");
        let removed = folder::remove_session(root.path(), &id.name, None);
        assert_eq!(removed.expect("removed"), 1);
        assert_eq!(found(&more), 0);
        // The process that has it mapped goes on, and others find that it is gone.
        let held = second.start(&more);
        second.check(held);
    }
}

#[test]
fn segments_that_cannot_be_read_when_a_folder_is_opened_are_counted_and_left() {
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, 500));
    first.settle();
    let there = first.folder().segments;
    drop(first);
    let disk = DiskFaults::default();
    disk.set(Trouble::Refuses);
    let limit = config(root.path(), 1 << 30);
    let folder = CacheFolder::open_faulty(disk, limit, &bench.kv, made_by("a"));
    let status = folder.expect("a folder").status();
    assert_eq!((status.segments, status.unreadable), (0, there as u64));
    assert_eq!(status.damaged, 0);
    assert!(bench.restarted(root.path()).restore(&prompt) > 0);
}

#[test]
fn of_other_settings_those_are_named_that_differ_least_and_have_segments() {
    let (bench, root) = (first_bench(), root());
    let made = |weights: &str, adapter: &str| {
        Fingerprint::new([
            ("weights", weights.to_owned()),
            ("adapter", adapter.to_owned()),
        ])
    };
    let open = |fingerprint| {
        Bench::with(bench.geometry.clone(), "sparse")
            .with_folder(config(root.path(), 1 << 30), fingerprint)
    };
    for (weights, adapter) in [("a", "x"), ("b", "y")] {
        let mut first = open(made(weights, adapter));
        first.turn(&tokens(0, 500));
        first.settle();
    }
    // Whichever of the two is looked at first.
    for weights in ["a", "b"] {
        let status = open(made(weights, "z")).folder();
        assert_eq!(status.differing, ["adapter"]);
        assert!(status.other_segments > 0);
    }
    // Nothing was computed by what has just been opened.
    assert_eq!(
        open(made("c", "z")).folder().differing,
        ["weights", "adapter"]
    );
}
