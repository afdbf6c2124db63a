//! Streams that Python reads: a request's events, and the parts of a reply.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use lacuna_engine::Event;
use lacuna_server::{LocalReply, ReplyPart};
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::bell::{Bell, Callbacks};
use crate::ending::detach;
use crate::output;
use crate::problem::Problem;
use crate::process::OfProcess;

/// Items taken at once, so that a reader that lags catches up with few calls.
const MOST_AT_ONCE: usize = 64;

/// Something that ends, and that is cancelled when it is dropped.
trait Source {
    type Item;

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Self::Item>>;
}

impl Source for lacuna_engine::Stream {
    type Item = Event;

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.poll_recv(context)
    }
}

impl Source for LocalReply {
    type Item = ReplyPart;

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<ReplyPart>> {
        self.poll_recv(context)
    }
}

/// What was there, and whether nothing more comes.
struct Batch<T> {
    items: Vec<T>,
    ended: bool,
}

/// A source that one thread at a time reads.
struct Reader<S> {
    /// None once it has ended or was closed, and while somebody reads.
    source: Mutex<Option<S>>,
    bell: Arc<Bell>,
    /// Whether somebody reads.
    read: AtomicBool,
    closed: AtomicBool,
}

/// Gives the place of who reads back.
struct Reading<'a>(&'a AtomicBool);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<S: Source> Reader<S> {
    fn new(source: S, callbacks: &Callbacks) -> Self {
        Self {
            source: Mutex::new(Some(source)),
            bell: Bell::new(callbacks),
            read: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    fn begin(&self) -> Result<Reading<'_>, Problem> {
        match self.read.swap(true, Ordering::Acquire) {
            true => Err(Problem::new(
                "in_use",
                "another thread or task is reading this stream; each needs its own",
            )),
            false => Ok(Reading(&self.read)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<S>> {
        self.source.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is there now; None if that is nothing, but something may come.
    fn ready(&self) -> Option<Batch<S::Item>> {
        let waker = self.bell.waker();
        let mut context = Context::from_waker(&waker);
        let mut items = Vec::new();
        let mut held = self.lock();
        if self.closed.load(Ordering::Acquire) {
            *held = None;
        }
        let Some(source) = held.as_mut() else {
            return Some(Batch { items, ended: true });
        };
        while items.len() < MOST_AT_ONCE {
            match source.poll(&mut context) {
                Poll::Ready(Some(item)) => items.push(item),
                Poll::Ready(None) => {
                    *held = None;
                    return Some(Batch { items, ended: true });
                }
                Poll::Pending => break,
            }
        }
        (!items.is_empty()).then_some(Batch {
            items,
            ended: false,
        })
    }

    /// Waits until something is there, or the end, or so many seconds.
    fn wait(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<Batch<S::Item>>
    where
        S: Send,
    {
        let _reading = self.begin()?;
        let most = seconds.map(Duration::try_from_secs_f64).transpose();
        let most = most.map_err(|error| Problem::argument("timeout", error))?;
        // What clocks do not count to never comes.
        let until = most.and_then(|most| Instant::now().checked_add(most));
        loop {
            if let Some(batch) = self.ready() {
                return Ok(batch);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(PyTimeoutError::new_err("nothing came in time"));
            }
            detach(py, || self.bell.wait(left));
            py.check_signals()?;
        }
    }

    /// What is there now. If that is nothing, `callback` is called when something may be.
    fn poll(&self, callback: Py<PyAny>) -> PyResult<Option<Batch<S::Item>>> {
        let _reading = self.begin()?;
        // Before it is looked: what comes in between rings.
        self.bell.call_back(Some(callback));
        let batch = self.ready();
        if batch.is_some() {
            self.bell.call_back(None);
        }
        Ok(batch)
    }

    /// Cancels what is read. Who waits for it finds it ended.
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        *self.lock() = None;
        self.bell.waker().wake();
    }
}

/// The events of a request.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Stream {
    reader: OfProcess<Reader<lacuna_engine::Stream>>,
    stops: Vec<String>,
}

/// `(events, whether nothing more comes)`.
type Events<'py> = (Bound<'py, PyList>, bool);

impl Stream {
    pub(crate) fn new(
        stream: lacuna_engine::Stream,
        stops: Vec<String>,
        callbacks: &Callbacks,
    ) -> Self {
        Self {
            reader: OfProcess::new(Reader::new(stream, callbacks)),
            stops,
        }
    }

    fn events<'py>(&self, py: Python<'py>, batch: Batch<Event>) -> PyResult<Events<'py>> {
        let events = batch.items.into_iter();
        let events = events
            .map(|event| output::event(py, event, &self.stops))
            .collect::<PyResult<Vec<_>>>()?;
        Ok((PyList::new(py, events)?, batch.ended))
    }
}

#[pymethods]
impl Stream {
    /// Waits for events.
    fn wait<'py>(&self, py: Python<'py>) -> PyResult<Events<'py>> {
        let batch = self.reader.get()?.wait(py, None)?;
        self.events(py, batch)
    }

    /// Events that are there now; `callback` is called once there may be some, if there are none.
    fn poll<'py>(&self, py: Python<'py>, callback: Py<PyAny>) -> PyResult<Option<Events<'py>>> {
        let batch = self.reader.get()?.poll(callback)?;
        batch.map(|batch| self.events(py, batch)).transpose()
    }

    /// Cancels the request: its pages are free within a step.
    fn close(&self) -> PyResult<()> {
        self.reader.get()?.close();
        Ok(())
    }
}

/// A reply on its way.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Reply {
    reader: OfProcess<Reader<LocalReply>>,
}

impl Reply {
    pub(crate) fn new(reply: LocalReply, callbacks: &Callbacks) -> Self {
        Self {
            reader: OfProcess::new(Reader::new(reply, callbacks)),
        }
    }

    fn parts<'py>(py: Python<'py>, batch: Batch<ReplyPart>) -> PyResult<Events<'py>> {
        let parts = batch.items.into_iter().map(|part| match part {
            ReplyPart::Head { status, headers } => {
                (status, headers).into_pyobject(py).map(Bound::into_any)
            }
            ReplyPart::Body(bytes) => Ok(PyBytes::new(py, &bytes).into_any()),
        });
        let parts = parts.collect::<PyResult<Vec<_>>>()?;
        Ok((PyList::new(py, parts)?, batch.ended))
    }
}

#[pymethods]
impl Reply {
    /// Waits for parts: a pair of status and headers first, and then bytes. After `timeout` seconds without any it is a
    /// `TimeoutError`.
    #[pyo3(signature = (timeout = None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Events<'py>> {
        let batch = self.reader.get()?.wait(py, timeout)?;
        Self::parts(py, batch)
    }

    /// Parts that are there now; `callback` is called once there may be some, if there are none.
    fn poll<'py>(&self, py: Python<'py>, callback: Py<PyAny>) -> PyResult<Option<Events<'py>>> {
        let batch = self.reader.get()?.poll(callback)?;
        batch.map(|batch| Self::parts(py, batch)).transpose()
    }

    /// Cancels the request.
    fn close(&self) -> PyResult<()> {
        self.reader.get()?.close();
        Ok(())
    }
}
