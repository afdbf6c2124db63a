//! Work that takes long, done by threads so that nobody's event loop waits for it.

use std::sync::mpsc;
use std::thread;

use tokio::sync::oneshot;

use crate::error::LacunaError;

/// What `work` makes, done by a thread of its own.
pub(crate) async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LacunaError> + Send + 'static,
) -> Result<T, LacunaError> {
    let (done, result) = oneshot::channel();
    let run = move || {
        // Who no longer waits does not want it.
        done.send(work()).ok();
    };
    let started = thread::Builder::new()
        .name("lacuna-call".to_owned())
        .spawn(run);
    started.map_err(LacunaError::failed)?;
    result.await.map_err(|_| LacunaError::Closed)?
}

type Job<T> = Box<dyn FnOnce(&mut T) + Send>;

/// Something that one thread has, and that others ask it to use, one after another.
pub(crate) struct Owned<T> {
    jobs: mpsc::Sender<Job<T>>,
}

impl<T: Send + 'static> Owned<T> {
    /// # Errors
    /// [`LacunaError::Failed`] when the system has no thread for it.
    pub(crate) fn new(name: &str, mut owned: T) -> Result<Self, LacunaError> {
        let (jobs, work) = mpsc::channel::<Job<T>>();
        let run = move || {
            for job in work {
                job(&mut owned);
            }
        };
        let started = thread::Builder::new().name(name.to_owned()).spawn(run);
        started.map_err(LacunaError::failed)?;
        Ok(Self { jobs })
    }

    /// What `work` makes of it. It is done even if nobody waits for that any more.
    pub(crate) async fn with<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut T) -> Result<R, LacunaError> + Send + 'static,
    ) -> Result<R, LacunaError> {
        let (done, result) = oneshot::channel();
        let job: Job<T> = Box::new(move |owned| {
            done.send(work(owned)).ok();
        });
        self.jobs.send(job).map_err(|_| LacunaError::Closed)?;
        result.await.map_err(|_| LacunaError::Closed)?
    }
}
