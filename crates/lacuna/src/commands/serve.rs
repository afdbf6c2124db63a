//! `lacuna serve`: the engine over HTTP, until the process is asked to end.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use lacuna_engine::{PrefixCacheConfig, ServiceConfig};
use lacuna_pages::ByteLength;
use lacuna_server::{ApiKeys, RequestLimits, Server, ServerConfig};
use serde::Serialize;

use crate::cli::{EngineArgs, ServeArgs, ServiceArgs};
use crate::commands::{config, open};
use crate::output;

/// What a program that started the server needs to know.
#[derive(Serialize)]
struct Ready<'a> {
    url: String,
    model: &'a str,
    context_tokens: usize,
    budget_bytes: Option<u64>,
    kv_bytes: u64,
}

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    let model = open(&args.model)?;
    let name = match &args.name {
        Some(name) => name.clone(),
        None => served_name(&args.model.model),
    };
    let config = ServerConfig {
        address: SocketAddr::new(args.host, args.port),
        model_name: name.clone(),
        keys: keys(args)?,
        limits: RequestLimits {
            request: Duration::from_secs(args.request_timeout),
            ..RequestLimits::default()
        },
        strict_fields: false,
        service: service(&args.service, &args.engine),
        grace: Duration::from_secs(args.grace),
    };
    let server = Server::start(model, config)?;
    let signals = server.signals()?;
    announce(&server, &name, args.model.json)?;
    server.run_until(signals);
    Ok(())
}

/// The service that the arguments describe.
pub(super) fn service(args: &ServiceArgs, engine: &EngineArgs) -> ServiceConfig {
    ServiceConfig {
        engine: config(engine),
        budget: args.budget.map(|budget| ByteLength::new(budget.0)),
        max_running: args.max_running.get(),
        max_waiting: args.max_queue,
        step_tokens: args.step_tokens.get(),
        mixed_tokens: args.mixed_tokens.get(),
        prefix_cache: PrefixCacheConfig {
            enabled: !args.no_prefix_cache,
            ..PrefixCacheConfig::default()
        },
        ..ServiceConfig::default()
    }
}

/// A hub id as it is; of a path, the last part without `.gguf`.
pub(super) fn served_name(model: &str) -> String {
    let path = Path::new(model);
    if !path.exists() {
        return model.to_owned();
    }
    let part = match path.extension() {
        Some(extension) if extension == "gguf" => path.file_stem(),
        _ => path.file_name(),
    };
    part.map_or_else(
        || model.to_owned(),
        |part| part.to_string_lossy().into_owned(),
    )
}

fn keys(args: &ServeArgs) -> Result<ApiKeys> {
    let mut keys: Vec<String> = args.api_key.iter().cloned().collect();
    if let Some(path) = &args.api_key_file {
        let file = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the keys in `{}`", path.display()))?;
        keys.extend(file.lines().map(str::to_owned));
    }
    let asked = !keys.is_empty() || args.api_key_file.is_some();
    let keys = ApiKeys::new(keys);
    if asked && keys.is_empty() {
        return Err(output::Usage("the API key is empty".to_owned()).into());
    }
    Ok(keys)
}

fn announce(server: &Server, name: &str, json: bool) -> Result<()> {
    let status = server.engine().status();
    let ready = Ready {
        url: format!("http://{}", server.address()),
        model: name,
        context_tokens: server.engine().context_tokens(),
        budget_bytes: status.budget.budget.map(ByteLength::get),
        kv_bytes: status.budget.kv.get(),
    };
    if json {
        return output::json(&ready);
    }
    let budget = match ready.budget_bytes {
        Some(bytes) => format!("budget {}", output::bytes(bytes)),
        None => "no budget".to_owned(),
    };
    eprintln!(
        "{name} on {} | context {} tokens | {budget}, {} for KV pages | Ctrl-C ends it",
        ready.url,
        ready.context_tokens,
        output::bytes(ready.kv_bytes),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::served_name;

    #[test]
    fn a_file_is_served_under_its_name_and_a_hub_id_as_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("tiny-q8_0.gguf");
        std::fs::write(&file, "").expect("written");
        assert_eq!(served_name(&file.to_string_lossy()), "tiny-q8_0");
        assert_eq!(served_name("demo"), "demo");
        assert_eq!(served_name("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B");
    }
}
