//! A fork-join pool for operations of a few microseconds.
//!
//! [`Pool::run`] splits an operation into tasks; the calling thread and the workers claim them one
//! by one, so a core that is busy with something else just claims fewer. A worker that finds no
//! work spins for a moment, because the next operation usually follows at once, and then sleeps.
//! A panic in a task is passed on to the caller once the other tasks are done.
//!
//! Publishing an operation costs one store and claiming a task one compare-and-swap. Nothing is
//! allocated after [`Pool::new`].
//!
//! # Safety
//! Workers reach the caller's closure through a pointer to a [`Job`] on the caller's stack.
//! 1. A worker dereferences the job only between claiming a task and counting it done.
//! 2. A claim succeeds only while its epoch still has unclaimed tasks, and the caller waits until
//!    all tasks of its epoch are counted done before it leaves `run`. So while a claimed task is
//!    not yet counted, the job is alive and is the one that was stored last.
//! 3. `data` points to the closure that `call` was instantiated for, and the closure is `Sync`.
//! 4. Only one `run` is active at a time: it holds the lock on the caller's scratch.
#![expect(
    unsafe_code,
    reason = "the job lives on the caller's stack; see # Safety"
)]

use std::any::Any;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Turns of a waiting loop before a worker sleeps or the caller yields: about 100 microseconds.
const SPINS: u32 = 2_000;

/// Threads that share operations; each owns a scratch of type `S`.
pub(crate) struct Pool<S> {
    shared: Arc<Shared<S>>,
    scratch: Mutex<S>,
    workers: Vec<JoinHandle<()>>,
}

/// One operation.
struct Job<S> {
    call: unsafe fn(*const (), usize, &mut S),
    data: *const (),
    tasks: u32,
    failed: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

struct Shared<S> {
    /// Epoch in the upper half, unclaimed tasks in the lower.
    state: AtomicU64,
    /// Tasks of the current epoch that are not done yet.
    pending: AtomicU32,
    job: AtomicPtr<Job<S>>,
    stop: AtomicBool,
    /// Workers that have begun.
    started: AtomicU32,
    sleepers: AtomicU32,
    sleep: Mutex<()>,
    wake: Condvar,
}

impl<S: Send + 'static> Pool<S> {
    /// Starts `threads - 1` workers; the caller of [`Pool::run`] is the remaining thread. Returns
    /// when they run, so that what starting a thread allocates is behind them.
    ///
    /// # Errors
    /// When the system refuses a thread; workers started before it are stopped.
    pub(crate) fn new(threads: NonZeroUsize, scratch: impl Fn() -> S) -> Result<Self, io::Error> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            pending: AtomicU32::new(0),
            job: AtomicPtr::new(ptr::null_mut()),
            stop: AtomicBool::new(false),
            started: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            scratch: Mutex::new(scratch()),
            workers: Vec::new(),
        };
        for index in 1..threads.get() {
            let (shared, mut scratch) = (Arc::clone(&pool.shared), scratch());
            let worker = std::thread::Builder::new()
                .name(format!("kernels-{index}"))
                .spawn(move || shared.work(&mut scratch))?;
            pool.workers.push(worker);
        }
        let workers = pool.workers.len() as u32;
        while pool.shared.started.load(Ordering::Acquire) < workers {
            std::thread::yield_now();
        }
        Ok(pool)
    }

    /// Number of threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(index, scratch)` once for every index below `tasks`, on all threads.
    ///
    /// Concurrent callers take turns.
    ///
    /// # Panics
    /// With the panic of a task, after all claimed tasks have ended.
    pub(crate) fn run<F>(&self, tasks: usize, task: F)
    where
        F: Fn(usize, &mut S) + Sync,
    {
        let mut scratch = lock(&self.scratch);
        if self.workers.is_empty() || tasks < 2 {
            (0..tasks).for_each(|index| task(index, &mut scratch));
            return;
        }
        let tasks = u32::try_from(tasks).expect("an operation has fewer than 2^32 tasks");
        let job = Job {
            call: trampoline::<F, S>,
            data: (&raw const task).cast(),
            tasks,
            failed: AtomicBool::new(false),
            panic: Mutex::new(None),
        };
        self.shared.publish(&job);
        self.shared.claim_all(&mut scratch);
        self.shared.wait_for_workers();
        drop(scratch);
        let panic = lock(&job.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// # Safety
/// `data` points to a live `F`.
unsafe fn trampoline<F: Fn(usize, &mut S), S>(data: *const (), index: usize, scratch: &mut S) {
    // SAFETY: the caller passes a pointer to a live `F`.
    let task = unsafe { &*data.cast::<F>() };
    task(index, scratch);
}

impl<S> Shared<S> {
    /// Makes `job` the current operation and wakes sleeping workers.
    fn publish(&self, job: &Job<S>) {
        self.job
            .store(ptr::from_ref(job).cast_mut(), Ordering::Relaxed);
        self.pending.store(job.tasks, Ordering::Relaxed);
        let epoch = (self.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        self.state
            .store((epoch << 32) | u64::from(job.tasks), Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&self.sleep);
            self.wake.notify_all();
        }
    }

    /// Claims and runs tasks until none is left.
    fn claim_all(&self, scratch: &mut S) {
        while let Some(unclaimed) = self.claim() {
            // SAFETY: a task was claimed and is not counted yet, so the job is alive (1, 2).
            let job = unsafe { &*self.job.load(Ordering::Relaxed) };
            job.run((job.tasks - unclaimed) as usize, scratch);
            self.pending.fetch_sub(1, Ordering::Release);
        }
    }

    /// The number of unclaimed tasks before this claim, or `None` when there was none.
    fn claim(&self) -> Option<u32> {
        self.state
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |state| {
                (state as u32 > 0).then(|| state - 1)
            })
            .ok()
            .map(|state| state as u32)
    }

    fn wait_for_workers(&self) {
        let mut turns = 0;
        while self.pending.load(Ordering::Acquire) > 0 {
            if turns < SPINS {
                turns += 1;
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// The life of a worker.
    fn work(&self, scratch: &mut S) {
        self.started.fetch_add(1, Ordering::Release);
        while !self.stop.load(Ordering::Acquire) {
            self.claim_all(scratch);
            self.wait_for_work();
        }
    }

    fn wait_for_work(&self) {
        for _ in 0..SPINS {
            if self.has_work() {
                return;
            }
            std::hint::spin_loop();
        }
        // Announced before the last look, while `publish` looks for sleepers after its store: one
        // of the two sees the other.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = lock(&self.sleep);
        while !self.has_work() {
            guard = self
                .wake
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn has_work(&self) -> bool {
        self.state.load(Ordering::SeqCst) as u32 > 0 || self.stop.load(Ordering::SeqCst)
    }
}

impl<S> Job<S> {
    /// Runs one task, keeping the first panic and skipping what follows it.
    fn run(&self, index: usize, scratch: &mut S) {
        if self.failed.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: `data` is the closure `call` was made for, alive by 2 and `Sync` (3).
        let call = || unsafe { (self.call)(self.data, index, scratch) };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
            self.failed.store(true, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(panic);
        }
    }
}

impl<S> Drop for Pool<S> {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _guard = lock(&self.shared.sleep);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so there is nothing to report.
            let _ = worker.join();
        }
    }
}

/// No panic can leave the guarded values half changed, so poisoning means nothing here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    fn pool(threads: usize) -> Pool<u64> {
        Pool::new(NonZeroUsize::new(threads).expect("not zero"), || 0).expect("threads start")
    }

    #[test]
    fn every_task_runs_once_whatever_the_number_of_threads() {
        for threads in 1..=4 {
            let pool = pool(threads);
            for tasks in [0, 1, 2, 3, 7, 100] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |index, _| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    #[test]
    fn many_short_operations_and_sleeps_between_them_do_not_hang() {
        let pool = pool(3);
        let sum = AtomicUsize::new(0);
        for round in 0..20_000 {
            pool.run(4, |index, scratch| {
                *scratch += 1;
                sum.fetch_add(index, Ordering::Relaxed);
            });
            if round % 4_000 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(sum.load(Ordering::Relaxed), 20_000 * 6);
    }

    #[test]
    fn concurrent_callers_take_turns() {
        let pool = pool(2);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(3, |_, _| {
                            sum.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 3 * 500 * 3);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        for threads in [1, 2, 3] {
            let pool = pool(threads);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(50, |index, _| assert_ne!(index, 20, "task failed"));
            }));
            assert!(result.is_err());
            let count = AtomicUsize::new(0);
            pool.run(10, |_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.load(Ordering::Relaxed), 10);
        }
    }
}
