//! Models that make embeddings of texts, or score pairs of them.

use std::sync::{Arc, Mutex, PoisonError};

use lacuna_cli::open_files;
use lacuna_engine::{EmbedderConfig, EngineError, Excess, Pair, TextEncoder};
use lacuna_models::Model;
use lacuna_text::tokenizer::EncodeLimits;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::ending::detach;
use crate::interrupts::{Lookout, beside};
use crate::problem::Problem;
use crate::process::OfProcess;
use crate::settings::Settings;

/// Tokens that are computed before it is looked for signals, and before others have their turn: several passes of short
/// texts.
const TOKENS_AT_ONCE: usize = 4096;

/// Elements of all vectors together, reserved before any is computed.
fn room_for(vectors: usize, width: usize) -> Result<Vec<f32>, Problem> {
    let mut values = Vec::new();
    let reserved = values.try_reserve_exact(vectors.saturating_mul(width));
    reserved.map_err(|error| Problem::new("budget_exceeded", error))?;
    Ok(values)
}

fn open(
    model: &str,
    settings: Vec<(String, Option<String>)>,
) -> Result<(Arc<Model>, EmbedderConfig), Problem> {
    let settings = Settings::read(model, settings)?;
    let files = open_files(&settings.model).map_err(|error| Problem::model(&error))?;
    let config = EmbedderConfig {
        batch_tokens: EmbedderConfig::default().batch_tokens,
        // Requests here are calls, and hold nothing of their own.
        requests: lacuna::ByteLength::new(0),
        ..EmbedderConfig::of(&settings.engine.config())
    };
    Ok((Arc::new(Model::load(files)?), config))
}

/// A text that is too long is cut, or refused.
fn excess(truncate: bool) -> Excess {
    if truncate {
        Excess::Cut
    } else {
        Excess::Refuse
    }
}

/// What `make` makes of each text; an error names the text by its place in the argument `list`.
fn each<T>(
    texts: &[String],
    list: &str,
    make: impl Fn(&str) -> Result<T, EngineError>,
) -> Result<Vec<T>, Problem> {
    let mut lookout = Lookout::new();
    let mut made = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        made.push(make(text).map_err(|error| Problem::from(error).about_one(list, index))?);
        lookout.look()?;
    }
    Ok(made)
}

/// Has `compute` compute `texts`, of as many tokens as `length` says, some at once.
fn in_turns<M, T>(
    held: &Mutex<M>,
    texts: &[T],
    length: impl Fn(&T) -> usize,
    mut compute: impl FnMut(&mut M, &[T]) -> Result<(), EngineError>,
) -> Result<(), Problem> {
    let mut lookout = Lookout::new();
    let mut left = texts;
    while !left.is_empty() {
        let mut tokens = 0;
        let fits = left.iter().take_while(|text| {
            tokens += length(text);
            tokens <= TOKENS_AT_ONCE
        });
        let (some, after) = left.split_at(fits.count().max(1));
        let mut model = held.lock().unwrap_or_else(PoisonError::into_inner);
        let computed = compute(&mut model, some);
        drop(model);
        computed.map_err(|error| match error {
            EngineError::Forward(error) => error.after_texts(texts.len() - left.len()).into(),
            error => error,
        })?;
        lookout.look()?;
        left = after;
    }
    Ok(())
}

struct HeldEmbedder {
    encoder: TextEncoder,
    dimensions: usize,
    embedder: Mutex<lacuna_engine::Embedder>,
}

/// A model that makes embeddings.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Embedder(OfProcess<HeldEmbedder>);

#[pymethods]
impl Embedder {
    #[new]
    fn new(
        py: Python<'_>,
        model: String,
        settings: Vec<(String, Option<String>)>,
    ) -> PyResult<Self> {
        let made = beside(py, move || {
            let (model, config) = open(&model, settings)?;
            let embedder = lacuna_engine::Embedder::new(model, &config)?;
            Ok(HeldEmbedder {
                encoder: embedder.encoder().clone(),
                dimensions: embedder.dimensions(),
                embedder: Mutex::new(embedder),
            })
        });
        Ok(Self(OfProcess::new(made?)))
    }

    /// Elements of an embedding.
    #[getter]
    fn dimensions(&self) -> PyResult<usize> {
        Ok(self.0.get()?.dimensions)
    }

    /// Embeddings of `texts`, `(texts, dimensions)`.
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<String>,
        truncate: bool,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let held = self.0.get()?;
        let values = detach(py, || {
            let texts = each(&texts, "texts", |text| {
                (held.encoder).text(text, excess(truncate), &EncodeLimits::default())
            })?;
            let mut values = room_for(texts.len(), held.dimensions)?;
            in_turns(&held.embedder, &texts, Vec::len, |embedder, some| {
                embedder.embed(some, |vector| values.extend_from_slice(vector))
            })?;
            Ok::<_, Problem>(values)
        })?;
        let rows = values.len() / held.dimensions.max(1);
        PyArray1::from_vec(py, values).reshape([rows, held.dimensions])
    }
}

struct HeldReranker {
    encoder: TextEncoder,
    reranker: Mutex<lacuna_engine::Reranker>,
}

/// A model that scores how well one text answers another.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Reranker(OfProcess<HeldReranker>);

#[pymethods]
impl Reranker {
    #[new]
    fn new(
        py: Python<'_>,
        model: String,
        settings: Vec<(String, Option<String>)>,
    ) -> PyResult<Self> {
        let made = beside(py, move || {
            let (model, config) = open(&model, settings)?;
            let reranker = lacuna_engine::Reranker::new(model, &config)?;
            Ok(HeldReranker {
                encoder: reranker.encoder().clone(),
                reranker: Mutex::new(reranker),
            })
        });
        Ok(Self(OfProcess::new(made?)))
    }

    /// How likely each of `documents` answers `query`, from 0 to 1.
    fn score<'py>(
        &self,
        py: Python<'py>,
        query: &str,
        documents: Vec<String>,
        truncate: bool,
    ) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let held = self.0.get()?;
        let scores = detach(py, || {
            let pairs = each(&documents, "documents", |text| {
                (held.encoder).pair(query, text, excess(truncate), &EncodeLimits::default())
            })?;
            let mut scores = room_for(pairs.len(), 1)?;
            let length = |pair: &Pair| pair.tokens.len();
            in_turns(&held.reranker, &pairs, length, |reranker, some| {
                reranker.score(some, |score| scores.push(score))
            })?;
            Ok::<_, Problem>(scores)
        })?;
        Ok(PyArray1::from_vec(py, scores))
    }
}
