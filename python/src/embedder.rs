//! Models that make embeddings of texts, or score pairs of them.

use std::sync::{Arc, Mutex, PoisonError};

use lacuna_cli::open_files;
use lacuna_engine::{EmbedderConfig, Excess};
use lacuna_models::Model;
use lacuna_text::tokenizer::EncodeLimits;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::ending::detach;
use crate::engine::Settings;
use crate::problem::Problem;
use crate::process::OfProcess;

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

/// A model that makes embeddings.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Embedder(OfProcess<Mutex<lacuna_engine::Embedder>>);

#[pymethods]
impl Embedder {
    #[new]
    fn new(py: Python<'_>, model: &str, settings: Vec<(String, Option<String>)>) -> PyResult<Self> {
        let made = detach(py, || {
            let (model, config) = open(model, settings)?;
            lacuna_engine::Embedder::new(model, &config).map_err(Problem::from)
        });
        Ok(Self(OfProcess::new(Mutex::new(made?))))
    }

    /// Elements of an embedding.
    #[getter]
    fn dimensions(&self) -> PyResult<usize> {
        let embedder = self.0.get()?.lock();
        Ok(embedder
            .unwrap_or_else(PoisonError::into_inner)
            .dimensions())
    }

    /// Embeddings of `texts`, `(texts, dimensions)`.
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<String>,
        truncate: bool,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let embedder = self.0.get()?;
        let (values, width) = detach(py, || {
            let mut embedder = embedder.lock().unwrap_or_else(PoisonError::into_inner);
            let encoder = embedder.encoder();
            let texts = texts
                .iter()
                .map(|text| encoder.text(text, excess(truncate), &EncodeLimits::default()));
            let texts = texts.collect::<Result<Vec<_>, _>>()?;
            let width = embedder.dimensions();
            let mut values = room_for(texts.len(), width)?;
            embedder.embed(&texts, |vector| values.extend_from_slice(vector))?;
            Ok::<_, Problem>((values, width))
        })?;
        let rows = values.len() / width.max(1);
        PyArray1::from_vec(py, values).reshape([rows, width])
    }
}

/// A model that scores how well one text answers another.
#[pyclass(frozen, module = "lacuna._native")]
pub(crate) struct Reranker(OfProcess<Mutex<lacuna_engine::Reranker>>);

#[pymethods]
impl Reranker {
    #[new]
    fn new(py: Python<'_>, model: &str, settings: Vec<(String, Option<String>)>) -> PyResult<Self> {
        let made = detach(py, || {
            let (model, config) = open(model, settings)?;
            lacuna_engine::Reranker::new(model, &config).map_err(Problem::from)
        });
        Ok(Self(OfProcess::new(Mutex::new(made?))))
    }

    /// How likely each of `documents` answers `query`, from 0 to 1.
    fn score<'py>(
        &self,
        py: Python<'py>,
        query: &str,
        documents: Vec<String>,
        truncate: bool,
    ) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let reranker = self.0.get()?;
        let scores = detach(py, || {
            let mut reranker = reranker.lock().unwrap_or_else(PoisonError::into_inner);
            let encoder = reranker.encoder();
            let pairs = documents
                .iter()
                .map(|text| encoder.pair(query, text, excess(truncate), &EncodeLimits::default()));
            let pairs = pairs.collect::<Result<Vec<_>, _>>()?;
            let mut scores = room_for(pairs.len(), 1)?;
            reranker.score(&pairs, |score| scores.push(score))?;
            Ok::<_, Problem>(scores)
        })?;
        Ok(PyArray1::from_vec(py, scores))
    }
}
