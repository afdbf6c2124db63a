//! Reads by threads, each of which waits for one.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::device::{Done, Read, ReadDevice};

/// Reads that wait for the disk at once. Measured: from four of 1 MiB on a disk gives no more.
const DEPTH: usize = 4;

/// Threads that read.
#[derive(Debug)]
pub struct ReadThreads {
    /// Dropped before the threads are waited for, which end when there is nothing to come.
    reads: Option<Sender<Read>>,
    done: Receiver<Done>,
    under_way: usize,
    threads: Vec<JoinHandle<()>>,
}

impl ReadThreads {
    /// Starts them.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn new() -> io::Result<Self> {
        let (reads, queue) = channel();
        let (results, done) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let start = |number| {
            let (queue, results) = (Arc::clone(&queue), results.clone());
            let name = format!("reader {number}");
            thread::Builder::new()
                .name(name)
                .spawn(move || work(&queue, &results))
        };
        let threads = (0..DEPTH).map(start).collect::<io::Result<_>>()?;
        Ok(Self {
            reads: Some(reads),
            done,
            under_way: 0,
            threads,
        })
    }
}

/// Reads until there is nothing to come.
fn work(queue: &Mutex<Receiver<Read>>, results: &Sender<Done>) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(mut read) = next else {
            return;
        };
        let result = read.file.read_at(&mut read.buffer, read.offset);
        if results.send(Done { read, result }).is_err() {
            return;
        }
    }
}

impl ReadDevice for ReadThreads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn takes(&self, calls: usize, _bytes: usize) -> bool {
        calls < DEPTH
    }

    fn begin(&mut self, read: Read) {
        // The threads are there until this is dropped.
        if self.reads.as_ref().is_some_and(|it| it.send(read).is_ok()) {
            self.under_way += 1;
        }
    }

    fn finish(&mut self, wait: bool) -> io::Result<Option<Done>> {
        if self.under_way == 0 {
            return Ok(None);
        }
        let done = match wait {
            true => self.done.recv().ok(),
            false => self.done.try_recv().ok(),
        };
        self.under_way -= usize::from(done.is_some());
        Ok(done)
    }
}

impl Drop for ReadThreads {
    fn drop(&mut self) {
        self.reads = None;
        for thread in self.threads.drain(..) {
            // One that panicked has nothing to say.
            thread.join().ok();
        }
    }
}
