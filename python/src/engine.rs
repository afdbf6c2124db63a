//! The engine: a model, the service that runs it, and the interfaces over it.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::time::Duration;

use lacuna_cli::served_name;
use lacuna_engine::{Grace, Request};
use lacuna_models::Model;
use lacuna_server::{ApiKeys, Local, RequestLimits, ServerConfig};
use lacuna_text::tokenizer::{AddSpecial, Decode, ParseSpecial, Special};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::Borrowed;
use pyo3::prelude::*;
use pyo3::types::PyString;
use serde_json::{Map, Value};

use crate::bell::{Bell, Callbacks};
use crate::ending::detach;
use crate::interrupts::{Lookout, beside};
use crate::output::Gathered;
use crate::problem::Problem;
use crate::process::OfProcess;
use crate::reader::{Reply, Stream};
use crate::session::Session;
use crate::settings::Settings;

/// A prompt, as text or as tokens.
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl<'py> FromPyObject<'_, 'py> for Prompt {
    type Error = PyErr;

    /// What is wrong with a text is said of a text, and not of all that a prompt could be.
    fn extract(prompt: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match prompt.is_instance_of::<PyString>() {
            true => prompt.extract().map(Self::Text),
            false => prompt.extract().map(Self::Tokens),
        }
    }
}

impl Prompt {
    /// As the field of a completion.
    fn into_field(self) -> Value {
        match self {
            Self::Text(text) => text.into(),
            Self::Tokens(tokens) => vec![tokens].into(),
        }
    }
}

struct Running {
    /// None once it is closed.
    local: RwLock<Option<Arc<Local>>>,
    model: Arc<Model>,
    name: String,
    callbacks: Callbacks,
    /// Requests of one list that are under way together: twice as many as run, so that one is always ready.
    at_once: usize,
}

/// A model that writes, ready to run.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Engine(OfProcess<Running>);

impl Drop for Engine {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Running {
    fn local(&self) -> Result<Arc<Local>, Problem> {
        let local = self.local.read().unwrap_or_else(PoisonError::into_inner);
        local.clone().ok_or_else(Problem::closed)
    }

    fn start(
        model: &str,
        settings: Vec<(String, Option<String>)>,
        request_timeout: Option<f64>,
    ) -> Result<Self, Problem> {
        let settings = Settings::read(model, settings)?;
        let request = match request_timeout {
            None => RequestLimits::default().request,
            Some(seconds) => Duration::try_from_secs_f64(seconds)
                .map_err(|error| Problem::argument("request_timeout", error))?,
        };
        let name = served_name(model);
        let (model, service) = settings.open()?;
        let at_once = service.max_running.saturating_mul(2);
        let config = ServerConfig {
            model_name: name.clone(),
            limits: RequestLimits {
                request,
                ..RequestLimits::default()
            },
            service,
            ..ServerConfig::default()
        };
        let local = Local::start(Arc::clone(&model), config)?;
        let callbacks = Callbacks::start();
        Ok(Self {
            local: RwLock::new(Some(Arc::new(local))),
            model,
            name,
            callbacks: callbacks.map_err(|error| Problem::new("cannot_start", error))?,
            at_once,
        })
    }
}

/// The fields of a request as JSON.
pub(crate) fn fields(text: &str) -> Result<Map<String, Value>, Problem> {
    serde_json::from_str(text).map_err(|error| Problem::new("invalid_value", error))
}

/// The requests of `prompts`, each with `fields`.
fn request(local: &Local, prompt: Prompt, fields: &Map<String, Value>) -> Result<Request, Problem> {
    let mut fields = fields.clone();
    fields.insert("prompt".to_owned(), prompt.into_field());
    let request = local.requests(fields)?.pop();
    request.ok_or_else(|| Problem::argument("prompt", "the prompt is empty"))
}

/// Requests of one list while they run.
struct Together<'a> {
    local: &'a Local,
    fields: &'a Map<String, Value>,
    /// Tokens of the prompts that have not been submitted, by their place, the last one first.
    left: Vec<(usize, Vec<u32>)>,
    running: Vec<(usize, lacuna_engine::Stream)>,
    gathered: Vec<Gathered>,
    at_once: usize,
    bell: Arc<Bell>,
}

impl<'a> Together<'a> {
    /// Checks all prompts before the first is computed.
    fn new(
        local: &'a Local,
        prompts: Vec<Prompt>,
        fields: &'a Map<String, Value>,
        running: &Running,
    ) -> Result<Self, Problem> {
        let (mut left, mut gathered) = (Vec::new(), Vec::new());
        let mut lookout = Lookout::new();
        let several = prompts.len() > 1;
        for (index, prompt) in prompts.into_iter().enumerate() {
            let checked = request(local, prompt, fields)
                .and_then(|request| Ok(local.check(&request).map(|()| request)?));
            let request = checked.map_err(|problem| match several {
                true if problem.is_about("prompt") => problem.about_one("prompts", index),
                _ => problem,
            })?;
            gathered.push(Gathered::new(request.choices.get(), request.limits.stop));
            left.push((index, request.prompt));
            lookout.look()?;
        }
        left.reverse();
        Ok(Self {
            local,
            fields,
            left,
            running: Vec::new(),
            gathered,
            at_once: running.at_once,
            bell: Bell::new(&running.callbacks),
        })
    }

    fn is_done(&self) -> bool {
        self.left.is_empty() && self.running.is_empty()
    }

    /// Submits what there is room for, and reads until it is time to look for signals.
    fn go_on(&mut self) -> Result<(), Problem> {
        self.submit()?;
        self.bell.wait(None);
        self.read()
    }

    fn submit(&mut self) -> Result<(), Problem> {
        while self.running.len() < self.at_once
            && let Some((index, tokens)) = self.left.pop()
        {
            let request = request(self.local, Prompt::Tokens(tokens.clone()), self.fields)?;
            match self.local.submit(request) {
                Ok(stream) => self.running.push((index, stream)),
                // Others have the places. Whoever ends makes room.
                Err(problem) if problem.retry_after.is_some() => {
                    self.left.push((index, tokens));
                    break;
                }
                Err(problem) => return Err(problem.into()),
            }
        }
        // What came before anybody listened is read at once.
        self.read()
    }

    fn read(&mut self) -> Result<(), Problem> {
        let waker = self.bell.waker();
        let mut context = Context::from_waker(&waker);
        for place in (0..self.running.len()).rev() {
            let (index, stream) = &mut self.running[place];
            let gathered = &mut self.gathered[*index];
            loop {
                match stream.poll_recv(&mut context) {
                    Poll::Pending => break,
                    Poll::Ready(Some(event)) => gathered.add(event)?,
                    Poll::Ready(None) if gathered.is_whole() => {
                        self.running.swap_remove(place);
                        break;
                    }
                    Poll::Ready(None) => return Err(Problem::closed()),
                }
            }
        }
        Ok(())
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (model, settings, request_timeout = None))]
    fn new(
        py: Python<'_>,
        model: String,
        settings: Vec<(String, Option<String>)>,
        request_timeout: Option<f64>,
    ) -> PyResult<Self> {
        // A download may take an hour.
        let running = beside(py, move || {
            Running::start(&model, settings, request_timeout)
        })?;
        Ok(Self(OfProcess::new(running)))
    }

    /// Generates after each of `prompts`, in their order.
    fn generate(
        &self,
        py: Python<'_>,
        prompts: Vec<Prompt>,
        fields: &str,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let running = self.0.get()?;
        let (local, fields) = (running.local()?, self::fields(fields)?);
        let mut together = detach(py, || Together::new(&local, prompts, &fields, running))?;
        while !together.is_done() {
            detach(py, || together.go_on())?;
            py.check_signals()?;
        }
        let gathered = std::mem::take(&mut together.gathered).into_iter();
        gathered.map(|it| it.into_python(py)).collect()
    }

    /// Submits one prompt.
    fn stream(&self, py: Python<'_>, prompt: Prompt, fields: &str) -> PyResult<Stream> {
        let running = self.0.get()?;
        let (local, fields) = (running.local()?, self::fields(fields)?);
        let submit = || {
            let request = request(&local, prompt, &fields)?;
            let stops = request.limits.stop.clone();
            Ok((local.submit(request)?, stops))
        };
        let (stream, stops) = detach(py, submit).map_err(|error: Problem| PyErr::from(error))?;
        Ok(Stream::new(stream, stops, &running.callbacks))
    }

    /// Answers a request as the server does.
    fn call(&self, method: &str, path: &str, body: Vec<u8>) -> PyResult<Reply> {
        let running = self.0.get()?;
        let reply = running.local()?.call(method, path, body);
        Ok(Reply::new(
            reply.map_err(Problem::from)?,
            &running.callbacks,
        ))
    }

    /// Logits after each of `tokens`, `(tokens, vocabulary)`, or after the last alone, `(vocabulary,)`.
    fn logits<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        all: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let running = self.0.get()?;
        let handle = running.local()?.engine();
        let logits = detach(py, || {
            let mut lookout = Lookout::new();
            let mut looked = Ok(());
            let goes_on = || {
                looked = lookout.look();
                looked.is_ok()
            };
            let made = handle.logits_while(&tokens, all, goes_on)?;
            looked
                .map(|()| made.unwrap_or_default())
                .map_err(Problem::from)
        })?;
        let flat = PyArray1::from_vec(py, logits);
        match all {
            true => {
                let shape = [tokens.len(), running.model.spec().vocabulary];
                Ok(flat.reshape(shape)?.into_any())
            }
            false => Ok(flat.into_any()),
        }
    }

    /// Tokens of a text.
    fn tokenize(
        &self,
        py: Python<'_>,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> PyResult<Vec<u32>> {
        let special = Special {
            add: if add_special {
                AddSpecial::Yes
            } else {
                AddSpecial::No
            },
            parse: if parse_special {
                ParseSpecial::Yes
            } else {
                ParseSpecial::No
            },
        };
        let model = &self.0.get()?.model;
        let tokens = detach(py, || model.tokenizer().encode(text, special));
        Ok(tokens.map_err(|error| Problem::argument("text", error))?)
    }

    /// The text of tokens, special ones spelled out or left out.
    fn detokenize(&self, py: Python<'_>, tokens: Vec<u32>, skip_special: bool) -> PyResult<String> {
        let model = &self.0.get()?.model;
        let decode = if skip_special {
            Decode::default()
        } else {
            Decode::MARKUP
        };
        let text = detach(py, || model.tokenizer().decode(&tokens, decode));
        Ok(text.map_err(|error| Problem::argument("tokens", error))?)
    }

    /// What clients call it.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.0.get()?.name.clone())
    }

    /// Tokens by which the model says that it is done.
    #[getter]
    fn eos_ids(&self) -> PyResult<Vec<u32>> {
        Ok(self
            .0
            .get()?
            .model
            .tokenizer()
            .end_of_generation()
            .collect())
    }

    #[getter]
    fn vocab_size(&self) -> PyResult<usize> {
        Ok(self.0.get()?.model.spec().vocabulary)
    }

    #[getter]
    fn context_tokens(&self) -> PyResult<usize> {
        Ok(self.0.get()?.local()?.engine().context_tokens())
    }

    /// The source of the model's chat template, if it brings one.
    #[getter]
    fn chat_template(&self) -> PyResult<Option<String>> {
        Ok(self
            .0
            .get()?
            .model
            .tokenizer()
            .chat_template()
            .map(str::to_owned))
    }

    /// Bytes of KV pages that somebody has, now and not as of a step: `(in use, committed)`.
    #[getter]
    fn kv_bytes(&self) -> PyResult<(u64, u64)> {
        let ledger = self.0.get()?.local()?.engine().ledger();
        let in_use = ledger.committed.saturating_sub(ledger.idle);
        Ok((in_use.get(), ledger.committed.get()))
    }

    /// Makes so many bytes what the engine may commit.
    fn set_budget(&self, bytes: u64) -> PyResult<()> {
        let engine = self.0.get()?.local()?.engine();
        let set = engine.set_budget(lacuna::ByteLength::new(bytes));
        Ok(set.map_err(|error| Problem::new("budget_exceeded", error))?)
    }

    /// A session, or the one in the file at `path`, with what was noted with it.
    #[pyo3(signature = (path = None))]
    fn session(
        &self,
        py: Python<'_>,
        path: Option<std::path::PathBuf>,
    ) -> PyResult<(Session, String)> {
        let local = self.0.get()?.local()?;
        let handle = local.engine();
        let made = detach(py, || match &path {
            None => Ok((handle.session()?, String::new())),
            Some(path) => (handle.restore_session(path)).map_err(Problem::file),
        });
        let (session, note) = made?;
        Ok((Session::new(session, Arc::downgrade(&local)), note))
    }

    /// Serves the same engine over HTTP.
    fn listen(
        &self,
        py: Python<'_>,
        host: &str,
        port: u16,
        keys: Vec<String>,
    ) -> PyResult<Listener> {
        let local = self.0.get()?.local()?;
        let host: IpAddr = host
            .parse()
            .map_err(|error| Problem::argument("host", format_args!("`{host}`: {error}")))?;
        let keys = ApiKeys::new(keys.iter().map(String::as_str));
        let keys = keys.map_err(|problem| Problem::argument("api_keys", problem))?;
        let listener = detach(py, || local.listen(SocketAddr::new(host, port), keys));
        let listener = listener.map_err(Problem::from)?;
        Ok(Listener {
            address: listener.address(),
            listener: OfProcess::new(Mutex::new(Some(listener))),
        })
    }

    /// Ends everything under way and gives all memory back. Again it does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.0.get()?;
        let taken = running
            .local
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        detach(py, || {
            // Who is in the middle of a call has it too: that fails now, and the last waits for the end.
            if let Some(local) = taken {
                local.end(Grace::Immediate);
            }
        });
        Ok(())
    }
}

/// A server over an engine.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Listener {
    address: SocketAddr,
    listener: OfProcess<Mutex<Option<lacuna_server::Listener>>>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.listener.end();
    }
}

#[pymethods]
impl Listener {
    /// Host and port.
    #[getter]
    fn address(&self) -> (String, u16) {
        (self.address.ip().to_string(), self.address.port())
    }

    /// Takes no more connections, and lets requests under way finish for so many seconds.
    fn close(&self, py: Python<'_>, grace: f64) -> PyResult<()> {
        let grace = Duration::try_from_secs_f64(grace);
        let grace = grace.map_err(|error| Problem::argument("grace", error))?;
        let listener = self.listener.get()?;
        let taken = listener
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(listener) = taken else {
            return Ok(());
        };
        beside(py, move || {
            listener.shutdown(grace);
            Ok(())
        })
    }
}
