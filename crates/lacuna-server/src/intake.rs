//! What requests for all models of a server have in common before they reach one: the account that their bodies are
//! received in, the threads that prepare them, and the names of replies.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lacuna_engine::RequestMemory;

use crate::app::seconds_now;
use crate::config::RequestLimits;
use crate::http::body::Bodies;
use crate::preparation::Preparation;

/// The way in. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Intake {
    pub(crate) bodies: Bodies,
    pub(crate) preparation: Arc<Preparation>,
    /// When the server started, in seconds since 1970.
    pub(crate) started: u64,
    /// Whether models are loaded and unloaded while the server runs, so that `keep_alive` has a meaning.
    pub(crate) several: bool,
    replies: Arc<AtomicU64>,
}

impl Intake {
    /// # Errors
    /// When the system gives no thread at all.
    pub(crate) fn start(limits: &RequestLimits, memory: RequestMemory) -> io::Result<Self> {
        Ok(Self {
            bodies: Bodies::new(limits.clone(), memory),
            preparation: Arc::new(Preparation::start()?),
            started: seconds_now(),
            several: false,
            replies: Arc::default(),
        })
    }

    /// The same for models that are loaded and unloaded.
    pub(crate) fn of_several(self) -> Self {
        Self {
            several: true,
            ..self
        }
    }

    /// A name for a reply, different from those before it.
    pub(crate) fn reply_id(&self, prefix: &str) -> String {
        let number = self.replies.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:x}-{number}", self.started)
    }
}
