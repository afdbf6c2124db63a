//! Settings, by the names that they have on the command line, and the model that is opened as they say.

use std::sync::Arc;

use clap::Parser;
use clap::error::ContextKind;
use lacuna_cli::{Bars, EngineArgs, ModelArgs, ServiceArgs, open_files};
use lacuna_engine::{EngineError, ServiceConfig};
use lacuna_models::{Loading, Model};

use crate::problem::Problem;

/// Settings, by the names that they have on the command line: what is said of them there, and refused, holds here.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
pub(crate) struct Settings {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    service: ServiceArgs,
}

impl Settings {
    /// Reads `settings`: names without dashes, and values; those without a value are flags.
    pub(crate) fn read(
        model: &str,
        settings: Vec<(String, Option<String>)>,
    ) -> Result<Self, Problem> {
        let is_name = |name: &str| {
            let letters = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            // How a command prints its result says nothing here.
            !name.is_empty() && name.bytes().all(letters) && name != "json"
        };
        if let Some((name, _)) = settings.iter().find(|(name, _)| !is_name(name)) {
            return Err(Problem::argument(
                name,
                format_args!("there is no setting `{name}`"),
            ));
        }
        let settings = settings.into_iter().map(|(name, value)| {
            let name = name.replace('_', "-");
            value.map_or_else(|| format!("--{name}"), |value| format!("--{name}={value}"))
        });
        let after = ["--".to_owned(), model.to_owned()];
        Self::try_parse_from(settings.chain(after)).map_err(|error| refusal(&error))
    }

    /// The service that they describe, with the draft model that they name, which is loaded.
    fn service(&self) -> Result<ServiceConfig, Problem> {
        let opened = self.service.open(&self.engine);
        opened.map_err(|error| match error.downcast::<EngineError>() {
            Ok(error) => error.into(),
            Err(error) => match error.downcast::<lacuna_cli::output::Usage>() {
                Ok(usage) => Problem::new("invalid_value", as_settings(&usage.to_string())),
                Err(error) => Problem::model(&error),
            },
        })
    }

    /// The model with all that it runs with: what could not run is refused before it is loaded.
    pub(crate) fn open(&self) -> Result<(Arc<Model>, ServiceConfig), Problem> {
        let service = self.service()?;
        let engine = service.engine_config();
        let files = open_files(&self.model).map_err(|error| Problem::model(&error))?;
        let mut progress = Bars::default();
        let files = engine.with_neurons(engine.with_head(files)?, &mut progress);
        let files = files.map_err(|error| Problem::model(&error))?;
        let described = engine.guessing(&files, lacuna_models::describe(&files)?)?;
        let loading = Loading {
            residency: engine.check(&files, &described)?,
            device: None,
            progress: &mut progress,
        };
        let model = Model::load_described(files, described, loading)?;
        let eyes = &self.model.eyes;
        let model = lacuna_models::with_images(model, eyes.mmproj.as_deref())?;
        Ok((Arc::new(model.with_image_tokens(eyes.tokens())?), service))
    }
}

/// What is wrong with a setting, in the words of the command line but for its dashes.
fn refusal(error: &clap::Error) -> Problem {
    let text = error.to_string();
    let lines = text.lines().map(str::trim);
    // What follows is about commands, as is how a value could look like an option.
    let lines =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("tip: to pass"));
    let message = as_settings(&lines.collect::<Vec<_>>().join(" "));
    let mut problem = Problem::new("invalid_value", message.trim_start_matches("error: "));
    if let Some(option) = error.get(ContextKind::InvalidArg) {
        let option = as_settings(&option.to_string());
        let name = option.split([' ', '=']).next().unwrap_or_default();
        problem = problem.about(name);
    }
    problem
}

/// A text with the names of settings in place of options: `kv_cache` for `--kv-cache`.
fn as_settings(text: &str) -> String {
    let mut parts = text.split("--");
    let mut made = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-');
        let (option, rest) = part.split_at(end.unwrap_or(part.len()));
        made += &option.replace('-', "_");
        made += rest;
    }
    made
}
