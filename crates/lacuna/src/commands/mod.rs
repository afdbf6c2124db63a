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
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lacuna::{Accounting, DeviceStatus, Engine, EngineConfig};
use lacuna_cli::{ModelArgs, open_to_run, tell};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

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

/// Refuses to write a file that is there: it may be all there is of what it holds. Devices and pipes are written to, not
/// replaced.
fn refuse_existing(output: &Path, overwrite: bool) -> Result<()> {
    let is_file = std::fs::metadata(output).is_ok_and(|there| there.is_file());
    ensure!(
        overwrite || !is_file,
        "`{}` is there already; --overwrite replaces it",
        output.display()
    );
    Ok(())
}

/// Has a signal that ends the program remove the file that is being written, which may be as large as a model. A thread
/// looks for one and ends the process itself, so that whoever writes need not.
fn tidy_when_ended() -> Result<()> {
    /// How soon a signal is seen.
    const LOOK: Duration = Duration::from_millis(100);
    /// What shells add to the signal that ended a program.
    const ENDED_BY: i32 = 128;
    let signal = Arc::new(AtomicUsize::new(0));
    // Not SIGHUP, which whoever closes the terminal on a long run has had ignored.
    for number in [SIGINT, SIGTERM] {
        flag::register_usize(number, Arc::clone(&signal), number.unsigned_abs() as usize)
            .context("cannot listen to signals")?;
    }
    let look = move || {
        loop {
            match signal.load(Ordering::Relaxed) {
                0 => thread::sleep(LOOK),
                number => {
                    lacuna::files::remove_unfinished_files();
                    std::process::exit(ENDED_BY + number as i32);
                }
            }
        }
    };
    thread::Builder::new()
        .name("signals".into())
        .spawn(look)
        .context("cannot start a thread that looks for signals")?;
    Ok(())
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
