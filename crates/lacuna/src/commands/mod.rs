//! What each command does.

pub(crate) mod bench;
pub(crate) mod inspect;
pub(crate) mod logits;
pub(crate) mod perplexity;
pub(crate) mod plan;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod synth;
pub(crate) mod tokenize;

use std::io::Read;
use std::sync::Arc;

use anyhow::{Context, Result};
use lacuna::{Engine, EngineConfig, FiniteCheck, Model};

use crate::cli::{EngineArgs, ModelArgs};

/// Opens the model that was named, downloading it first where that is what the name says.
fn open(args: &ModelArgs) -> Result<Arc<Model>> {
    let files = crate::models::open_files(args)?;
    let model = Model::load(files).with_context(|| format!("cannot load `{}`", args.model))?;
    Ok(Arc::new(model))
}

/// Sets up an engine as the arguments say.
fn engine(model: Arc<Model>, args: &EngineArgs) -> Result<Engine> {
    Ok(Engine::new(model, &config(args))?)
}

/// The same, set up to score texts.
fn scoring_engine(model: Arc<Model>, args: &EngineArgs) -> Result<Engine> {
    Ok(Engine::new(model, &config(args).scoring())?)
}

fn config(args: &EngineArgs) -> EngineConfig {
    EngineConfig {
        threads: args.threads,
        kv_policy: args.kv,
        kv_elements: args.kv_type,
        context_tokens: args.ctx.map(usize::from),
        finite_check: match args.check_finite {
            true => FiniteCheck::EachLayer,
            false => FiniteCheck::Off,
        },
        ..EngineConfig::default()
    }
}

/// `text`, or all of standard input.
fn text_or_stdin(text: Option<&str>) -> Result<String> {
    if let Some(text) = text {
        return Ok(text.to_owned());
    }
    let mut input = Vec::new();
    std::io::stdin()
        .read_to_end(&mut input)
        .context("cannot read standard input")?;
    String::from_utf8(input).context("standard input is not UTF-8 text")
}
