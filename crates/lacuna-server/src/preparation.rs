//! The threads on which requests are turned into tokens, away from the one that serves connections.
//!
//! The first is there from the start, so that what waits is done at last, however few threads the
//! system gives later. Others come when they are needed, up to the number of cores.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Work, and threads for it. Dropping it lets them finish what they have and end.
#[derive(Debug)]
pub(crate) struct Preparation {
    queue: Arc<Queue>,
    /// One for each thread there may be. More requests than that at once would only take memory.
    places: Arc<Semaphore>,
    most_threads: usize,
}

/// Room to prepare one request.
#[derive(Debug)]
pub(crate) struct Place(#[expect(dead_code, reason = "held")] Option<OwnedSemaphorePermit>);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    /// Threads that wait for a job, those that are being woken included.
    idle: usize,
    closed: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Queue")
    }
}

impl Preparation {
    /// # Errors
    /// When the system gives no thread at all.
    pub(crate) fn start() -> io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self::with_threads(cores)
    }

    fn with_threads(most_threads: usize) -> io::Result<Self> {
        let preparation = Self {
            queue: Arc::default(),
            places: Arc::new(Semaphore::new(most_threads)),
            most_threads,
        };
        preparation.spawn()?;
        preparation.queue.lock().threads += 1;
        Ok(preparation)
    }

    /// Waits until as few requests are being prepared as may.
    pub(crate) async fn place(&self) -> Place {
        // The semaphore is never closed.
        Place(Arc::clone(&self.places).acquire_owned().await.ok())
    }

    /// What `work` returns, or `None` if it panics. It runs to its end even if nobody waits any more.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        place: Place,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (done, result) = oneshot::channel();
        self.push(Box::new(move || {
            let _place = place;
            // Nothing that a panic leaves half changed is seen again: the work is gone with it.
            if let Ok(value) = catch_unwind(AssertUnwindSafe(work)) {
                done.send(value).ok();
            }
        }));
        result.await.ok()
    }

    fn push(&self, job: Job) {
        let mut state = self.queue.lock();
        state.jobs.push_back(job);
        let wanted = state.jobs.len() > state.idle && state.threads < self.most_threads;
        // Refused, it is done by a thread that is busy now.
        if wanted && self.spawn().is_ok() {
            state.threads += 1;
        }
        drop(state);
        self.queue.wake.notify_one();
    }

    fn spawn(&self) -> io::Result<()> {
        let queue = Arc::clone(&self.queue);
        let thread = thread::Builder::new().name("lacuna-prepare".to_owned());
        thread.spawn(move || queue.work()).map(drop)
    }
}

impl Drop for Preparation {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.wake.notify_all();
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's life.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.lock();
            } else if state.closed {
                return;
            } else {
                state.idle += 1;
                let woken = self.wake.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime").block_on(future)
    }

    #[test]
    fn a_request_whose_preparation_panics_leaves_its_thread_and_its_place_to_the_next() {
        let preparation = Preparation::with_threads(1).expect("a thread");
        let panicked: Option<()> = block_on(async {
            let place = preparation.place().await;
            preparation.run(place, || panic!("as a test does")).await
        });
        assert_eq!(panicked, None);
        let next = block_on(async {
            let place = preparation.place().await;
            preparation.run(place, || 7).await
        });
        assert_eq!(next, Some(7));
    }

    #[test]
    fn requests_are_prepared_side_by_side() {
        let preparation = Preparation::with_threads(3).expect("a thread");
        let together = Arc::new(Barrier::new(3));
        let one = async |_: usize| {
            let together = Arc::clone(&together);
            let place = preparation.place().await;
            // Ends only if the three are at work at once.
            preparation.run(place, move || together.wait()).await
        };
        let all = block_on(async { tokio::join!(one(0), one(1), one(2)) });
        assert!(all.0.is_some() && all.1.is_some() && all.2.is_some());
    }

    #[test]
    fn its_threads_end_with_it() {
        let preparation = Preparation::with_threads(2).expect("a thread");
        let queue = Arc::downgrade(&preparation.queue);
        drop(preparation);
        while queue.strong_count() > 0 {
            thread::yield_now();
        }
    }
}
