//! Several models of one server: which there are, under which names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use lacuna::Accounting;
use lacuna::files::ModelSource;
use lacuna::files::hub::{Hub, Settings};
use lacuna_cli::{Bars, output, served_name, tell};
use lacuna_server::{ModelEntry, ModelPath, ModelServer, ModelsConfig};
use serde::Serialize;

use crate::cli::ServeArgs;
use crate::commands::serve::reload::Reload;
use crate::commands::serve::{config, end_in_time, url};

/// A model of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) model: String,
}

/// What a program that started the server needs to know.
#[derive(Serialize)]
struct Ready<'a> {
    url: String,
    models: Vec<&'a str>,
    budget_bytes: u64,
}

fn usage(problem: impl Into<String>) -> anyhow::Error {
    output::Usage(problem.into()).into()
}

/// The models of the command line. What exists under the whole text is that, even if there is a `=` in its path.
pub(super) fn named(args: &ServeArgs) -> Result<Vec<Named>> {
    let name = |text: &String| match text.split_once('=') {
        Some((name, model)) if !Path::new(text).exists() => {
            if name.is_empty() || model.is_empty() {
                return Err(usage(format!("`{text}` must be NAME=MODEL")));
            }
            Ok(Named {
                name: name.to_owned(),
                model: model.to_owned(),
            })
        }
        _ => Ok(Named {
            name: served_name(text),
            model: text.clone(),
        }),
    };
    args.models.iter().map(name).collect()
}

/// The aliases of the command line, by the names that they stand for.
pub(super) fn aliases(args: &ServeArgs, names: &[&str]) -> Result<BTreeMap<String, Vec<String>>> {
    let mut taken: BTreeSet<&str> = BTreeSet::new();
    for name in names {
        if !taken.insert(name) {
            return Err(usage(format!(
                "there are two models of the name `{name}`; give one another: NAME=MODEL"
            )));
        }
    }
    let mut aliases: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for text in &args.alias {
        let parts = text.split_once('=').filter(|(alias, _)| !alias.is_empty());
        let (alias, name) = parts.ok_or_else(|| usage(format!("`{text}` must be ALIAS=NAME")))?;
        if !names.contains(&name) {
            let there = names.join("`, `");
            return Err(usage(format!(
                "--alias {text}: there is no model `{name}`; there are `{there}`"
            )));
        }
        if !taken.insert(alias) {
            return Err(usage(format!("--alias {text}: the name is taken")));
        }
        aliases
            .entry(name.to_owned())
            .or_default()
            .push(alias.to_owned());
    }
    Ok(aliases)
}

/// The models of a folder: its GGUF files, of several parts the first, and its folders as Hugging Face has them, by
/// their names.
fn in_folder(folder: &Path) -> Result<Vec<Named>> {
    let cannot_read = || format!("cannot read the folder `{}`", folder.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(cannot_read)? {
        let path = entry.with_context(cannot_read)?.path();
        let Some(file) = path.file_name().and_then(|file| file.to_str()) else {
            // A name that no request could have.
            continue;
        };
        let is_model = match path.is_dir() {
            true => path.join("config.json").is_file(),
            false => is_model_file(file),
        };
        if is_model && let Some(model) = path.to_str() {
            found.push(Named {
                name: whole_name(served_name(model)),
                model: model.to_owned(),
            });
        }
    }
    found.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

/// Whether a file is a model, and not a later part of one or the eyes of another.
fn is_model_file(file: &str) -> bool {
    let Some(stem) = file.strip_suffix(".gguf") else {
        return false;
    };
    let later_part = part(stem).is_some_and(|(_, number)| number > 1);
    !file.starts_with('.') && !later_part && !stem.starts_with("mmproj")
}

/// Of a part of a model, such as `name-00001-of-00003`: the model's name, and which part it is.
fn part(stem: &str) -> Option<(&str, u32)> {
    let (before, of) = stem.rsplit_once("-of-")?;
    let (name, number) = before.rsplit_once('-')?;
    of.parse::<u32>().ok()?;
    Some((name, number.parse().ok()?))
}

/// The name of a model of several parts, without which part its first file is.
fn whole_name(stem: String) -> String {
    part(&stem).map_or_else(|| stem.clone(), |(name, _)| name.to_owned())
}

/// Where a model is; one of the hub is downloaded if it is not there.
fn find(model: &str) -> Result<ModelPath> {
    Ok(match ModelSource::parse(model)? {
        ModelSource::Demo => ModelPath::Demo,
        ModelSource::File(path) | ModelSource::Folder(path) => ModelPath::Path(path),
        ModelSource::Hub(id) => {
            let hub = Hub::new(Settings::from_env()?);
            let path = hub.fetch(&id, &mut Bars::default());
            ModelPath::Path(path.with_context(|| format!("cannot fetch `{model}`"))?)
        }
    })
}

/// All models, with their names.
fn entries(args: &ServeArgs, named: Vec<Named>) -> Result<Vec<ModelEntry>> {
    let folder = args.models_dir.as_deref().map(in_folder).transpose()?;
    let all: Vec<(Named, bool)> = named
        .into_iter()
        .map(|named| (named, true))
        .chain(folder.into_iter().flatten().map(|named| (named, false)))
        .collect();
    let names: Vec<&str> = all.iter().map(|(named, _)| named.name.as_str()).collect();
    let mut aliases = aliases(args, &names)?;
    let entry = |(named, required): (Named, bool)| {
        Ok(ModelEntry {
            aliases: aliases.remove(&named.name).unwrap_or_default(),
            source: find(&named.model)?,
            name: named.name,
            required,
        })
    };
    all.into_iter().map(entry).collect()
}

/// Serves several models until the process is asked to end.
pub(super) fn serve(args: &ServeArgs, named: Vec<Named>) -> Result<()> {
    refuse_what_is_for_one(args)?;
    let models = ModelsConfig {
        models: entries(args, named)?,
        keep_alive: args.keep_alive.0,
    };
    if models.models.is_empty() {
        return Err(usage("there is no model in the folder of --models-dir"));
    }
    let names: Vec<String> = models
        .models
        .iter()
        .map(|model| model.name.clone())
        .collect();
    let mut config = config(args)?;
    config.service.engine.accounting = Accounting::Measured;
    let reload = Reload::of(&config);
    let server = ModelServer::start(models, config)?;
    let signals = reload.listen()?;
    let ending = end_in_time(args.grace).context("cannot set up the server's end")?;
    for (name, reason) in server.unusable() {
        tell!("warning: `{name}` cannot be served: {reason}");
    }
    announce(&server, &names, args)?;
    reload.wait(&signals);
    // Dropped when all is done.
    ending.send(()).ok();
    server.shutdown();
    Ok(())
}

/// Options that say something about one model.
fn refuse_what_is_for_one(args: &ServeArgs) -> Result<()> {
    let one = [
        ("--name", args.name.is_some(), "say NAME=MODEL"),
        ("--neurons", args.engine.neurons.is_some(), "leave it out"),
        ("--kv-swap", args.service.kv_swap.is_some(), "leave it out"),
        ("--kv-events", args.kv_events.is_some(), "leave it out"),
    ];
    let given = one.into_iter().find(|(_, given, _)| *given);
    given.map_or(Ok(()), |(option, _, instead)| {
        Err(usage(format!(
            "{option} is for a server of one model; {instead}"
        )))
    })
}

fn announce(server: &ModelServer, names: &[String], args: &ServeArgs) -> Result<()> {
    let ready = Ready {
        url: url(args, server.address()),
        models: names.iter().map(String::as_str).collect(),
        budget_bytes: server.budget().get(),
    };
    if args.json {
        return output::json(&ready);
    }
    let plural = if names.len() == 1 { "" } else { "s" };
    tell!(
        "{} model{plural} on {}, loaded when asked for | budget {} | Ctrl-C ends it",
        names.len(),
        ready.url,
        output::bytes(ready.budget_bytes),
    );
    tell!("{}", names.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folders_models_are_its_whole_ones() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        for file in [
            "b.gguf",
            "a-00001-of-00002.gguf",
            "a-00002-of-00002.gguf",
            "mmproj-b.gguf",
            ".hidden.gguf",
            "notes.txt",
        ] {
            std::fs::write(path(file), "").expect("written");
        }
        for inner in ["hugging", "empty"] {
            std::fs::create_dir(path(inner)).expect("a folder");
        }
        std::fs::write(path("hugging/config.json"), "{}").expect("written");
        let found = in_folder(folder.path()).expect("a folder that can be read");
        let names: Vec<&str> = found.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "hugging"]);
    }
}
