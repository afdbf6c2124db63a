//! When the device that computes is gone: its requests fail, and it is opened again for the next.
//!
//! Rows of running requests were on the device, and so was every group of the prefix cache. Requests that wait begin anew, as
//! they do when they were preempted.

use std::collections::VecDeque;

use super::{End, Running, Scheduler, Stores, Waiting};
use crate::error::EngineError;
use crate::stream::Failure;

impl Scheduler {
    /// Ends what was computed on the device, and opens it again where requests wait. Where that cannot be, they fail. Returns
    /// whether there is anything to compute.
    pub(super) fn go_on_after_loss(&mut self) -> bool {
        self.give_up_device();
        if self.waiting.is_empty() {
            return false;
        }
        let Err(error) = self.revive() else {
            return true;
        };
        let told = error.to_string();
        for waiting in std::mem::take(&mut self.waiting) {
            let failure = Failure::NoDevice(told.clone());
            self.count_end(&waiting.job, End::Failed(failure));
        }
        false
    }

    /// Opens the device again, if it was lost: with empty caches, and what folders keep.
    ///
    /// # Errors
    /// [`EngineError`] where it cannot be; it is tried again the next time.
    pub(crate) fn revive(&mut self) -> Result<(), EngineError> {
        if !self.engine.has_lost_device() {
            return Ok(());
        }
        self.give_up_device();
        if let Some(engine) = self.engine.engine() {
            engine.reopen_device()?;
            self.system = Box::new(engine.host());
        }
        let limit = lacuna_pages::ByteLength::new(self.kv_limit);
        self.engine.kv_cache().set_limit(limit)?;
        // Before others are opened in their place: a file has one owner. And before weights come, whose memory they had.
        let none = Stores {
            swap: None,
            folder: None,
        };
        self.keep_in(none);
        self.cache.replace(self.engine.kv_cache().clone());
        let stores = match self.engine.engine() {
            Some(engine) => {
                engine.reload_on_device()?;
                Stores::open(engine, &self.config)?
            }
            None => return Ok(()),
        };
        self.keep_in(stores);
        Ok(())
    }

    /// Fails what runs, and lets go of all that was on the device.
    fn give_up_device(&mut self) {
        for running in std::mem::take(&mut self.running) {
            let Running { job, sessions, .. } = running;
            for session in sessions {
                // Nothing of it is of use to others.
                drop(session.sequence);
                self.prefix.leave(session.path, self.system.now());
            }
            self.count_end(&job, End::Failed(Failure::DeviceLost));
        }
        let waiting: VecDeque<Waiting> = std::mem::take(&mut self.waiting);
        self.waiting = waiting
            .into_iter()
            .map(|mut waiting| {
                self.discard(&mut waiting);
                Waiting::again(waiting.job, waiting.choices)
            })
            .collect();
        while self.prefix.evict(self.system.now()) {}
    }
}
