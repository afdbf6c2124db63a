//! `lacuna serve`: the engine over HTTP, until the process is asked to end.

mod models;
mod reload;

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use lacuna::plan::Budget;
use lacuna::{Accounting, ByteLength, Model};
use lacuna_cli::{ModelArgs, open_files, open_to_run_files, output, tell};
use lacuna_engine::ServiceConfig;
#[cfg(feature = "remote")]
use lacuna_kv::folder::remote::Remote;
use lacuna_server::{
    AccessLog, ApiKeys, EmbeddingServer, KvEventsConfig, Normalization, RequestLimits, Server,
    ServerConfig, Tls,
};
use serde::Serialize;

use crate::cli::ServeArgs;
use crate::commands::serve::reload::Reload;
use crate::commands::tell_of_split;

/// What a program that started the server needs to know.
#[derive(Serialize)]
struct Ready<'a> {
    url: String,
    model: &'a str,
    context_tokens: usize,
    /// Where KV events are told, and replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_events: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_events_replay: Option<String>,
    #[serde(flatten)]
    budget: Budget,
}

/// The same for a server of embeddings.
#[derive(Serialize)]
struct ReadyToEmbed<'a> {
    url: String,
    model: &'a str,
    /// Tokens of a text at most.
    max_tokens: usize,
    /// Elements of an embedding; none of a model that scores pairs of texts.
    dimensions: Option<usize>,
    budget_bytes: Option<u64>,
    mapped_weight_bytes: u64,
}

/// What takes less memory.
const ADVICE: &str = "use fewer --max-batched-tokens or --max-running, --kv sparse, a smaller --kv-type, a shorter \
                      --ctx, fewer --threads, or a smaller model (`lacuna plan` says what takes how much)";

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    serve(args).map_err(|error| output::advise(error, ADVICE))
}

fn serve(args: &ServeArgs) -> Result<()> {
    let named = models::named(args)?;
    let several = named.len() != 1 || args.models_dir.is_some();
    if let Some(option) = args.eyes.given().filter(|_| several) {
        let advice = match args.eyes.mmproj.is_some() {
            true => "put the files of several beside their models",
            false => "leave it out, or serve that model alone",
        };
        return Err(output::Usage(format!("{option} is for one model; {advice}")).into());
    }
    let drafts = args.service.speculation.draft.draft_model.is_some();
    if drafts && (named.len() != 1 || args.models_dir.is_some()) {
        let problem = "--draft-model is for one model; leave it out, or serve that model alone";
        return Err(output::Usage(problem.into()).into());
    }
    let [only] = named.as_slice() else {
        return models::serve(args, named);
    };
    if args.models_dir.is_some() {
        return models::serve(args, named);
    }
    let model = ModelArgs {
        model: only.model.clone(),
        json: args.json,
        eyes: args.eyes.clone(),
    };
    let files = open_files(&model)?;
    let cannot_load = || format!("cannot load `{}`", model.model);
    let described = lacuna::describe(&files).with_context(cannot_load)?;
    let name = match &args.name {
        Some(name) => name.clone(),
        None => only.name.clone(),
    };
    let mut config = ServerConfig {
        model_name: name.clone(),
        model_aliases: models::aliases(args, &[&name])?
            .remove(&name)
            .unwrap_or_default(),
        ..config(args)?
    };
    config.service.engine.accounting = Accounting::Measured;
    if described.spec.pooled().is_some() {
        let given = [
            ("--kv-cache", args.service.kv_cache.is_some()),
            ("--kv-events", args.kv_events.is_some()),
            ("--allow-image-host", !args.allow_image_host.is_empty()),
            ("--draft-model", drafts),
            ("--device", config.service.engine.device.is_some()),
        ];
        if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
            let problem = format!("`{name}` writes nothing that would need it; leave out {option}");
            return Err(output::Usage(problem).into());
        }
        let model = lacuna::Model::load(files).with_context(cannot_load)?;
        return serve_embeddings(args, Arc::new(model), config);
    }
    let model = open_to_run_files(&model, files, &config.service.engine_config())?;
    let reload = Reload::of(&config);
    if model.images().is_none() && !args.allow_image_host.is_empty() {
        let problem = format!("`{name}` takes no images; leave out --allow-image-host");
        return Err(output::Usage(problem).into());
    }
    let server = Server::start(model, config)?;
    let signals = reload.listen()?;
    let ending = end_in_time(args.grace).context("cannot set up the server's end")?;
    announce(&server, &name, args)?;
    tell_of_lost_files(Arc::clone(server.engine().model()));
    reload.wait(&signals);
    // Dropped when all is done.
    ending.send(()).ok();
    server.shutdown();
    Ok(())
}

/// What the arguments say of a server, whatever it serves.
fn config(args: &ServeArgs) -> Result<ServerConfig> {
    Ok(ServerConfig {
        address: SocketAddr::new(args.host, args.port),
        keys: keys(args)?,
        share_prefixes: args.share_prefixes,
        limits: RequestLimits {
            request: Duration::from_secs(args.request_timeout.get()),
            ..RequestLimits::default()
        },
        strict_fields: args.strict_fields,
        cors_origins: args.cors.clone(),
        image_hosts: args.allow_image_host.clone(),
        tls: tls(args)?,
        access_log: access_log(args)?,
        normalization: normalization(args)?,
        service: service(args)?,
        kv_events: args.kv_events.map(|address| KvEventsConfig {
            address: address.0,
            topic: args.kv_events_topic.clone(),
            replay: args.kv_events_replay.map(|address| address.0),
        }),
        grace: Duration::from_secs(args.grace),
        ..ServerConfig::default()
    })
}

fn tls(args: &ServeArgs) -> Result<Option<Tls>> {
    let files = args.tls_certificate.as_deref().zip(args.tls_key.as_deref());
    let tls = files.map(|(certificate, key)| Tls::from_files(certificate, key));
    Ok(tls.transpose()?)
}

/// Where a client finds the server.
fn url(args: &ServeArgs, address: SocketAddr) -> String {
    let scheme = args.tls_certificate.as_ref().map_or("http", |_| "https");
    format!("{scheme}://{address}")
}

fn access_log(args: &ServeArgs) -> Result<Option<AccessLog>> {
    let Some(path) = &args.access_log else {
        return Ok(None);
    };
    let log = match path.as_os_str() == "-" {
        true => AccessLog::to_standard_error(),
        false => AccessLog::to_file(path),
    };
    let log = log.with_context(|| format!("cannot write the access log `{}`", path.display()))?;
    Ok(Some(log))
}

fn normalization(args: &ServeArgs) -> Result<Normalization> {
    let normalization = Normalization::new(&args.omit_lines, args.sort_tools);
    normalization.map_err(|error| output::Usage(format!("--omit-lines: {error}")).into())
}

#[cfg(not(feature = "remote"))]
fn service(args: &ServeArgs) -> Result<ServiceConfig> {
    on_device(args)
}

/// The service, with the store that the arguments name behind its cache folder.
#[cfg(feature = "remote")]
fn service(args: &ServeArgs) -> Result<ServiceConfig> {
    let mut service = on_device(args)?;
    let folder = service.prefix_cache.folder.as_mut();
    if let (Some(folder), Some(address)) = (folder, &args.kv_remote) {
        let store = lacuna_remote::open(address);
        folder.remote = Some(Remote {
            store: store.map_err(|error| output::Usage(error.to_string()))?,
            patience: Duration::from_secs(args.kv_remote_timeout.get()),
        });
    }
    Ok(service)
}

/// The service on the device that the arguments name.
fn on_device(args: &ServeArgs) -> Result<ServiceConfig> {
    let service = args.service.open(&args.engine)?;
    Ok(ServiceConfig {
        engine: args.device.set(service.engine)?,
        ..service
    })
}

/// The same of a model that makes embeddings.
fn serve_embeddings(args: &ServeArgs, model: Arc<Model>, config: ServerConfig) -> Result<()> {
    let name = config.model_name.clone();
    let budget_bytes = config.service.engine.budget.map(ByteLength::get);
    let reload = Reload::of(&config);
    let server = EmbeddingServer::start(model, config)?;
    let signals = reload.listen()?;
    let ending = end_in_time(args.grace).context("cannot set up the server's end")?;
    let ready = ReadyToEmbed {
        url: url(args, server.address()),
        model: &name,
        max_tokens: server.max_tokens(),
        dimensions: server.model().spec().embedding_width(),
        budget_bytes,
        mapped_weight_bytes: server.model().weight_bytes(),
    };
    match args.json {
        true => output::json(&ready)?,
        false => {
            let makes = match ready.dimensions {
                Some(dimensions) => format!("embeddings of {dimensions} elements, of texts"),
                None => "scores of pairs of texts".to_owned(),
            };
            tell!(
                "{name} on {} | {makes} of up to {} tokens | mapped weights {} | Ctrl-C ends it",
                ready.url,
                ready.max_tokens,
                output::bytes(ready.mapped_weight_bytes),
            );
        }
    }
    tell_of_lost_files(Arc::clone(server.model()));
    reload.wait(&signals);
    // Dropped when all is done.
    ending.send(()).ok();
    server.shutdown();
    Ok(())
}

/// Ends the process, with a message, when it has not ended by itself some time after the grace. The
/// time begins with what is sent, and is over when the sender is dropped.
fn end_in_time(grace_seconds: u64) -> io::Result<Sender<()>> {
    /// For the step under way, which is not broken off, and for the last bytes to leave.
    const MORE: Duration = Duration::from_secs(30);
    let (ending, begun) = channel();
    let within = Duration::from_secs(grace_seconds).saturating_add(MORE);
    let watch = move || {
        if begun.recv().is_ok() && begun.recv_timeout(within) == Err(RecvTimeoutError::Timeout) {
            tell!(
                "error: the server has not ended {} s after it was asked to",
                within.as_secs()
            );
            std::process::exit(1);
        }
    };
    let thread = std::thread::Builder::new().name("lacuna-end".to_owned());
    thread.spawn(watch).map(|_| ending)
}

fn keys(args: &ServeArgs) -> Result<ApiKeys> {
    if args.open_to_all {
        return Ok(ApiKeys::open_to_all());
    }
    let usage = |problem: String| anyhow::Error::from(output::Usage(problem));
    let mut keys =
        ApiKeys::new(args.api_key.as_deref()).map_err(|error| usage(error.to_string()))?;
    if let Some(path) = &args.api_key_file {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the keys in `{}`", path.display()))?;
        let wrong = |problem: &dyn Display| usage(format!("`{}`: {problem}", path.display()));
        let of_file = ApiKeys::from_lines(&text).map_err(|error| wrong(&error))?;
        if of_file.is_empty() {
            return Err(wrong(&"there is no key in it"));
        }
        keys.extend(of_file);
    }
    Ok(keys)
}

fn announce(server: &Server, name: &str, args: &ServeArgs) -> Result<()> {
    let status = server.engine().status();
    let (events, replay) = server.kv_events();
    let zeromq = |address: SocketAddr| format!("tcp://{address}");
    let ready = Ready {
        url: url(args, server.address()),
        model: name,
        context_tokens: server.engine().context_tokens(),
        kv_events: events.map(zeromq),
        kv_events_replay: replay.map(zeromq),
        budget: status.budget.plan,
    };
    if args.json {
        return output::json(&ready);
    }
    tell_of_split(status.device.as_ref());
    let budget = match ready.budget.budget_bytes {
        Some(bytes) => format!("budget {}: {}", output::bytes(bytes), ready.budget.parts),
        None => "no budget".to_owned(),
    };
    tell!(
        "{name} on {} | context {} tokens | {budget} | mapped weights {} | Ctrl-C ends it",
        ready.url,
        ready.context_tokens,
        output::bytes(ready.budget.mapped_weight_bytes),
    );
    if let Some(events) = ready.kv_events {
        let replay = ready
            .kv_events_replay
            .map(|at| format!(", replayed on {at}"));
        tell!("KV events on {events}{}", replay.unwrap_or_default());
    }
    Ok(())
}

/// Says on standard error when a file of the model is lost. Clients are told with every request;
/// whoever runs the server may not be one.
fn tell_of_lost_files(model: Arc<Model>) {
    /// How soon it is said. Looking costs a load for each file.
    const INTERVAL: Duration = Duration::from_secs(1);
    let watch = move || {
        loop {
            if let Err(lost) = model.files().check() {
                return tell!("error: {lost}; until then every request is refused");
            }
            std::thread::sleep(INTERVAL);
        }
    };
    // Without the thread only this line is missing.
    std::thread::Builder::new().spawn(watch).ok();
}
