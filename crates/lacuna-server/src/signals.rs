//! What asks the process to end, or to read its files again.
//!
//! A signal sets a flag, and the thread that waits looks at it: nothing has to be woken, so nothing
//! that the system refuses can make a signal get lost.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// How soon the flag is seen where the signal reaches another thread than the one that waits.
const LOOK: Duration = Duration::from_millis(250);
/// What a shell makes of a program that was interrupted.
const INTERRUPTED: i32 = 130;

/// What asks the process to end: SIGINT and SIGTERM. The first is waited for, and a second one ends
/// the process at once with exit code 130, whatever it is doing.
#[derive(Debug)]
pub struct Signals {
    asked: Arc<AtomicBool>,
    /// Files are to be read again.
    reload: Arc<AtomicBool>,
}

impl Signals {
    /// Listens from here on: the first signal no longer kills.
    ///
    /// # Errors
    /// What the system says when it does not let it.
    pub fn listen() -> io::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // Run in this order: at the first signal the flag is not set yet.
            flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(&asked))?;
            flag::register(signal, Arc::clone(&asked))?;
        }
        Ok(Self {
            asked,
            reload: Arc::default(),
        })
    }

    /// Listens to SIGHUP, too, which kills no longer: [`wait_and_reload`](Self::wait_and_reload) does what it asks for.
    /// Where there is no such signal, nothing comes of it.
    ///
    /// # Errors
    /// What the system says when it does not let it.
    pub fn with_reload(self) -> io::Result<Self> {
        #[cfg(unix)]
        flag::register(signal_hook::consts::SIGHUP, Arc::clone(&self.reload))?;
        Ok(self)
    }

    /// Waits for the first.
    pub fn wait(&self) {
        self.wait_and_reload(|| {});
    }

    /// Waits for the first, and calls `reload` whenever SIGHUP has come meanwhile.
    pub fn wait_and_reload(&self, mut reload: impl FnMut()) {
        while !self.asked.load(Ordering::Relaxed) {
            if self.reload.swap(false, Ordering::Relaxed) {
                reload();
            }
            nap();
        }
    }
}

/// Until a signal is handled by this thread, as it mostly is by a process's first one.
#[cfg(unix)]
fn nap() {
    use rustix::thread::{Timespec, nanosleep};

    let _slept = nanosleep(&Timespec {
        tv_sec: 0,
        tv_nsec: LOOK.subsec_nanos().into(),
    });
}

#[cfg(not(unix))]
fn nap() {
    std::thread::sleep(LOOK);
}
