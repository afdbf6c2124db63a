//! Opening the model an argument names, downloading it first where that is what the name says.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lacuna::ModelFiles;
use lacuna::files::hub::{Hub, Settings};
use lacuna::files::{ModelSource, Progress};

use crate::cli::ModelArgs;

/// The files of the model that was named.
pub(crate) fn open_files(args: &ModelArgs) -> Result<ModelFiles> {
    let path = match ModelSource::parse(&args.model)? {
        ModelSource::Demo => return Ok(lacuna::demo()),
        ModelSource::File(path) | ModelSource::Folder(path) => path,
        ModelSource::Hub(id) => {
            let hub = Hub::new(Settings::from_env()?);
            hub.fetch(&id, &mut Bars::new()).with_context(|| format!("cannot fetch `{}`", args.model))?
        }
    };
    Ok(ModelFiles::open(&path)?)
}

/// Progress bars on standard error, where that is a terminal.
pub(crate) struct Bars(ProgressBar);

impl Bars {
    pub(crate) fn new() -> Self {
        Self(ProgressBar::hidden())
    }
}

impl Progress for Bars {
    fn begin(&mut self, item: &str, total: Option<u64>) {
        let template = match total {
            Some(_) => "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        let style = ProgressStyle::with_template(template).expect("a valid template");
        let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
        if !std::io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        self.0 = bar.with_style(style).with_message(item.to_owned());
    }

    fn advance(&mut self, bytes: u64) {
        self.0.inc(bytes);
    }

    fn finish(&mut self) {
        self.0.finish();
    }
}
