//! The budget against the kernel: what the process's memory files hold while twice as many clients
//! ask as fit. Alone in its process, because the files of all services in it count.

#[path = "service/support.rs"]
#[expect(dead_code, reason = "the other tests use the rest")]
mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lacuna_engine::Service;
use support::{endless, finish, idle, owned, prompt, start, tight};

/// Bytes behind the memory files of this process, by their blocks.
fn heap_blocks() -> u64 {
    let descriptors = fs::read_dir("/proc/self/fd")
        .expect("a process of Linux")
        .flatten();
    let heaps = descriptors.map(|entry| entry.path()).filter(|path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("lacuna-heap"))
    });
    let blocks = heaps.filter_map(|path| fs::metadata(path).ok());
    blocks.map(|file| file.blocks() * 512).sum()
}

/// The most memory there was, by the ledger and by the kernel, until `done`.
fn watch(service: &Service, done: &AtomicBool) -> (u64, u64) {
    let mut most = (0, 0);
    while !done.load(Ordering::Acquire) {
        let committed = service.handle().status().ledger.committed.get();
        most = (most.0.max(committed), most.1.max(heap_blocks()));
        thread::sleep(Duration::from_micros(200));
    }
    most
}

#[test]
#[cfg(target_os = "linux")]
fn twice_as_many_clients_as_fit_stay_within_the_budget_and_all_finish() {
    let service = start(tight(20, true));
    let kv = service.handle().status().budget.plan.parts.kv_bytes;
    // Six groups each at the end: three fit, and sixteen ask.
    let request = |client: u32| endless(prompt(client, 40), 50);
    let done = AtomicBool::new(false);
    let (ledger, kernel) = thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&service, &done));
        let clients: Vec<_> = (0..16)
            .map(|client| {
                let handle = service.handle();
                scope.spawn(move || {
                    for round in 0..2 {
                        let mut stream =
                            handle.submit(request(client + 16 * round)).expect("taken");
                        if client % 4 == 3 {
                            stream.blocking_recv();
                        } else {
                            finish(stream).expect("an answer");
                        }
                    }
                })
            })
            .collect();
        for client in clients {
            client.join().expect("a client that ends");
        }
        done.store(true, Ordering::Release);
        watcher.join().expect("figures")
    });
    assert!(
        ledger > 0 && ledger <= kv,
        "{ledger} bytes committed of {kv}"
    );
    assert!(
        kernel > 0 && kernel <= kv,
        "{kernel} bytes in the kernel of {kv}"
    );
    let status = idle(&service);
    let counters = status.counters;
    assert_eq!((counters.finished, counters.cancelled), (24, 8));
    assert!(counters.evicted_groups > 0, "{counters:?}");
    assert_eq!(
        owned(&status),
        status.cache.groups as u64 * status.pages.group.get()
    );
}
