//! Sessions, one caller at a time each.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use lacuna_engine::{Limits, Sampling, ServiceSession};
use lacuna_server::Local;
use pyo3::prelude::*;
use serde_json::{Map, Value};

use crate::ending::detach;
use crate::output::reason;
use crate::problem::Problem;
use crate::process::OfProcess;

/// A session beside an engine's requests.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Session(OfProcess<Held>);

struct Held {
    /// None once it is closed.
    session: Mutex<Option<ServiceSession>>,
    /// Whether it is closed, or about to be by a thread that waits for a step or drops it.
    closed: AtomicBool,
    /// Changes of the session's tokens by other than who goes on with it.
    version: AtomicU64,
    /// Not kept by it: an engine ends when it is closed, and its sessions with it.
    local: Weak<Local>,
}

/// How a session goes on.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Continuation {
    how: Mutex<lacuna_engine::Continuation>,
    stops: Vec<String>,
    version: u64,
}

/// `(token, text, reason, stop)`.
type Piece = (Option<u32>, String, Option<&'static str>, Option<Py<PyAny>>);

/// What a session cannot do that a request can.
const ONLY_REQUESTS: [&str; 9] = [
    "n",
    "logprobs",
    "prompt_logprobs",
    "echo",
    "priority",
    "response_format",
    "structured_outputs",
    "guided_json",
    "cache_salt",
];

impl Held {
    /// The session, for whoever comes first.
    fn lock(&self) -> Result<MutexGuard<'_, Option<ServiceSession>>, Problem> {
        let held = self.session.try_lock();
        // After that: who closes it says so first, and may be what is in the way.
        if self.closed.load(Ordering::SeqCst) {
            return Err(Problem::closed());
        }
        match held {
            Ok(held) => Ok(held),
            Err(TryLockError::Poisoned(held)) => Ok(held.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Problem::new(
                "in_use",
                "another thread is using this session; fork it, so that each has its own",
            )),
        }
    }

    fn local(&self) -> Result<Arc<Local>, Problem> {
        self.local.upgrade().ok_or_else(Problem::closed)
    }

    fn with<T>(
        &self,
        use_it: impl FnOnce(&mut ServiceSession) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        use_it(self.lock()?.as_mut().ok_or_else(Problem::closed)?)
    }

    /// The same for what changes tokens: whoever goes on with the session would be wrong about them.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut ServiceSession) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        self.with(|session| {
            self.version.fetch_add(1, Ordering::Relaxed);
            change(session)
        })
    }

    /// How the fields of a request say that a session goes on.
    fn settings(&self, mut fields: Map<String, Value>) -> Result<(Sampling, Limits), Problem> {
        if let Some(name) = ONLY_REQUESTS
            .iter()
            .find(|&&name| fields.contains_key(name))
        {
            let message =
                format!("`{name}` is for `generate` and `stream` of an engine; leave it out");
            return Err(Problem::argument(name, message));
        }
        // Only its settings are used.
        fields.insert("prompt".to_owned(), vec![vec![0]].into());
        let request = self.local()?.requests(fields)?.pop();
        let request = request.ok_or_else(|| Problem::argument("prompt", "the prompt is empty"))?;
        Ok((request.sampling, request.limits))
    }
}

impl Session {
    pub(crate) fn new(session: ServiceSession, local: Weak<Local>) -> Self {
        Self(OfProcess::new(Held {
            session: Mutex::new(Some(session)),
            closed: AtomicBool::new(false),
            version: AtomicU64::new(0),
            local,
        }))
    }
}

#[pymethods]
impl Session {
    /// Every token so far.
    #[getter]
    fn tokens(&self) -> PyResult<Vec<u32>> {
        Ok(self
            .0
            .get()?
            .with(|session| Ok(session.tokens().to_vec()))?)
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.0.get()?.with(|session| Ok(session.tokens().len()))?)
    }

    /// Tokens that are not computed yet.
    #[getter]
    fn pending(&self) -> PyResult<usize> {
        Ok(self.0.get()?.with(|session| Ok(session.pending()?))?)
    }

    /// Bytes of KV pages: `(committed, of which shared with others)`.
    #[getter]
    fn kv_bytes(&self) -> PyResult<(usize, usize)> {
        let report = self.0.get()?.with(|session| Ok(session.kv()?))?;
        Ok((report.committed_bytes, report.shared_bytes))
    }

    /// Appends tokens.
    fn extend(&self, tokens: Vec<u32>) -> PyResult<()> {
        let held = self.0.get()?;
        let engine = held.local()?.engine();
        let (vocabulary, context) = (engine.model().spec().vocabulary, engine.context_tokens());
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            let message =
                format!("token {token} is out of range: the vocabulary has {vocabulary} tokens");
            return Err(Problem::argument("tokens", message).into());
        }
        Ok(held.change(|session| {
            let length = session.tokens().len() + tokens.len();
            if length > context {
                let message = format!(
                    "the session would have {length} tokens, but the context holds {context}"
                );
                return Err(Problem::new("context_length_exceeded", message));
            }
            session.extend(&tokens);
            Ok(())
        })?)
    }

    /// Keeps the first tokens. Returns how many of them need not be computed again.
    fn truncate(&self, py: Python<'_>, length: usize) -> PyResult<usize> {
        let held = self.0.get()?;
        Ok(detach(py, || {
            held.change(|session| Ok(session.truncate(length)?))
        })?)
    }

    /// Another session of the same tokens, over the same pages.
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        let held = self.0.get()?;
        let fork = detach(py, || held.with(|session| Ok(session.fork()?)))?;
        Ok(Self::new(fork, Weak::clone(&held.local)))
    }

    /// Writes it to a file.
    fn save(&self, py: Python<'_>, path: PathBuf, note: &str) -> PyResult<()> {
        let held = self.0.get()?;
        Ok(detach(py, || {
            held.with(|session| {
                let saved = session.save(note, &path);
                saved.map_err(Problem::file)
            })
        })?)
    }

    /// Begins to go on.
    fn begin(&self, fields: &str) -> PyResult<Continuation> {
        let held = self.0.get()?;
        let (sampling, limits) = held.settings(crate::engine::fields(fields)?)?;
        let how = held.change(|session| Ok(session.begin(sampling, &limits)?))?;
        Ok(Continuation {
            how: Mutex::new(how),
            stops: limits.stop,
            version: held.version.load(Ordering::Relaxed),
        })
    }

    /// Goes on by a token, or a part of a prompt.
    fn advance(&self, py: Python<'_>, how: &Continuation) -> PyResult<Option<Piece>> {
        let held = self.0.get()?;
        if held.version.load(Ordering::Relaxed) != how.version {
            let message = "the session was changed since it began to go on; begin again";
            return Err(Problem::new("in_use", message).into());
        }
        let piece = detach(py, || {
            held.with(|session| {
                let mut how = match how.how.try_lock() {
                    Ok(how) => how,
                    Err(TryLockError::Poisoned(how)) => how.into_inner(),
                    Err(TryLockError::WouldBlock) => return Err(Problem::closed()),
                };
                Ok(session.advance(&mut how)?)
            })
        })?;
        let Some(piece) = piece else {
            return Ok(None);
        };
        let (name, stop) = match piece.finish {
            Some(finish) => {
                let (name, stop) = reason(py, finish, &how.stops)?;
                (Some(name), Some(stop))
            }
            None => (None, None),
        };
        Ok(Some((piece.token, piece.text, name, stop)))
    }

    /// Gives its pages back, at the end of a step that another thread is in. Again it does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.0.get()?;
        held.closed.store(true, Ordering::SeqCst);
        detach(py, || {
            let session = held.session.lock();
            drop(session.unwrap_or_else(PoisonError::into_inner).take());
        });
        Ok(())
    }
}
