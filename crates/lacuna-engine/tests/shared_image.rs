//! One picture in sixteen sessions against the kernel: encoded once, in memory that there is once and that is mapped
//! sixteen times. Alone in its process, because the files of all services in it count.
#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lacuna_engine::{Eyes, Handle, Limits, Phase, Request, Sampling, Service, ServiceConfig};
use lacuna_files::ModelFiles;
use lacuna_kernels::CpuConfig;
use lacuna_models::{Model, with_images};

const SESSIONS: usize = 16;

/// Bytes behind the memory files of this process, by their blocks.
fn heap_blocks() -> u64 {
    let descriptors = fs::read_dir("/proc/self/fd").expect("a process of Linux");
    let heaps = descriptors.flatten().map(|entry| entry.path());
    let heaps = heaps.filter(|path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("lacuna-heap"))
    });
    let files = heaps.filter_map(|path| fs::metadata(path).ok());
    files.map(|file| file.blocks() * 512).sum()
}

/// How often each page of a memory file is mapped, by the file and the page's offset.
fn mappings(page_bytes: u64) -> BTreeMap<(String, u64), usize> {
    let maps = fs::read_to_string("/proc/self/maps").expect("a process of Linux");
    let mut pages = BTreeMap::new();
    for line in maps.lines().filter(|line| line.contains("lacuna-heap")) {
        let mut fields = line.split_whitespace();
        let range = fields.next().expect("a range");
        let offset = fields.nth(1).expect("an offset");
        let file = fields.nth(1).expect("a file").to_owned();
        let number = |text: &str| u64::from_str_radix(text, 16).expect("a number");
        let (start, end) = range.split_once('-').expect("a range");
        let bytes = number(end) - number(start);
        for page in 0..bytes / page_bytes {
            let place = (file.clone(), number(offset) + page * page_bytes);
            *pages.entry(place).or_default() += 1;
        }
    }
    pages
}

/// The picture, and text that fills more than a group of pages. What is said fills more than what may be unread.
fn prompt(eyes: &Eyes) -> Request {
    let image =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../reference/vision/gemma3/image-0.png");
    let mut tokens = vec![2, 4, 5];
    tokens.extend((0..140).map(|index| 9 + index % 50));
    let file = fs::read(image).expect("committed");
    Request {
        images: eyes
            .show(&mut tokens, &[file])
            .expect("an image in its place"),
        sampling: Sampling::greedy(),
        limits: Limits {
            max_tokens: Some(350),
            ignore_eos: true,
            ..Limits::default()
        },
        ..Request::new(tokens)
    }
}

fn until(what: &str, handle: &Handle, holds: impl Fn(&Handle) -> bool) {
    let start = Instant::now();
    while !holds(handle) {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "it never came about that {what}"
        );
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_picture_in_sixteen_sessions_is_in_memory_once_and_mapped_sixteen_times() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../reference/vision/gemma3/hf");
    let model = ModelFiles::open(&folder)
        .map(Model::load)
        .expect("the fixture opens");
    let model = model
        .and_then(|model| with_images(model, None))
        .expect("it sees");
    let mut config = ServiceConfig::default();
    config.engine.threads = Some(NonZeroUsize::MIN);
    config.max_running = SESSIONS;
    let service = Service::start(Arc::new(model), config).expect("a service");
    let handle = service.handle();
    let eyes = Eyes::new(
        Arc::clone(handle.model()),
        CpuConfig {
            threads: NonZeroUsize::MIN,
            ..CpuConfig::default()
        },
        None,
    );
    // The first computes it, and nobody reads what it says, as of all others: so all of them stand still, with what
    // they hold.
    let stalled = |count: usize| {
        move |handle: &Handle| {
            let sessions = handle.status().sessions;
            sessions.len() == count && sessions.iter().all(|it| it.phase == Phase::Stalled)
        }
    };
    let mut streams = vec![handle.submit(prompt(&eyes)).expect("taken")];
    until("the first waits for its reader", &handle, stalled(1));
    let alone = handle.status();
    assert_eq!(heap_blocks(), alone.ledger.committed.get());
    for _ in 1..SESSIONS {
        streams.push(handle.submit(prompt(&eyes)).expect("taken"));
    }
    until("all wait for their readers", &handle, stalled(SESSIONS));
    assert_eq!(eyes.encoded(), 1);
    let status = handle.status();
    let (page, group) = (status.pages.page.get(), status.pages.group.get());
    // The ledger and the kernel agree on what there is.
    assert_eq!(heap_blocks(), status.ledger.committed.get());
    let often = mappings(page)
        .into_values()
        .filter(|&times| times >= SESSIONS);
    let often = often.count() as u64 * page;
    println!(
        "alone {} bytes, {SESSIONS} sessions {} bytes; mapped {SESSIONS} times or more: {often} bytes of groups of {group}",
        alone.ledger.committed, status.ledger.committed
    );
    // The picture is in the first group of pages of each session: the same pages in all of them.
    assert!(often >= group, "{often} bytes of a group of {group}");
    assert!(status.ledger.shared.get() >= group, "{:?}", status.ledger);
    let apart = SESSIONS as u64 * alone.ledger.committed.get();
    assert!(
        status.ledger.committed.get() < apart - (SESSIONS as u64 - 1) * group,
        "{:?}",
        status.ledger
    );
}
