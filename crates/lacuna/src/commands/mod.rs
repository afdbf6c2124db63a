//! What each command does.

pub(crate) mod cache;
pub(crate) mod embed;
pub(crate) mod fit_predictors;
pub(crate) mod inspect;
pub(crate) mod logits;
pub(crate) mod models;
pub(crate) mod perplexity;
pub(crate) mod plan;
pub(crate) mod quantize;
pub(crate) mod rerank;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod sessions;
pub(crate) mod shell;
pub(crate) mod synth;
pub(crate) mod tokenize;

use std::io::Read;

use anyhow::{Context, Result};
use lacuna::{Accounting, DeviceStatus, Engine, EngineConfig};
use lacuna_cli::{ModelArgs, open_to_run, tell};

/// The model that was named, ready to run in a process that does nothing else.
fn engine(args: &ModelArgs, config: EngineConfig) -> Result<Engine> {
    let config = EngineConfig {
        accounting: Accounting::Measured,
        ..config
    };
    let engine = Engine::new(open_to_run(args, &config)?, &config)?;
    tell_of_split(engine.device().as_ref());
    Ok(engine)
}

/// Says so when not all layers are on the device that computes.
fn tell_of_split(device: Option<&DeviceStatus>) {
    if let Some(device) = device.filter(|device| device.host_layers > 0) {
        let (layers, first) = (device.layers, device.host_layers);
        tell!(
            "{layers} of {} layers are on the device; the processor computes the first {first}",
            layers + first
        );
    }
}

/// `text`, or all of standard input.
fn text_or_stdin(text: Option<&str>) -> Result<String> {
    if let Some(text) = text {
        return Ok(text.to_owned());
    }
    let text = stdin_up_to(usize::MAX)?;
    Ok(text.unwrap_or_default())
}

/// All of standard input, or `None` as soon as it has more than so many bytes.
fn stdin_up_to(most: usize) -> Result<Option<String>> {
    let mut input = Vec::new();
    std::io::stdin()
        .take((most as u64).saturating_add(1))
        .read_to_end(&mut input)
        .context("cannot read standard input")?;
    if input.len() > most {
        return Ok(None);
    }
    let text = String::from_utf8(input).context("standard input is not UTF-8 text")?;
    Ok(Some(text))
}
