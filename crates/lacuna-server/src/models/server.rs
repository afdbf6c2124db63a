//! The life of a server of several models.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lacuna_engine::{Grace, RequestMemory};
use lacuna_models::plan::{request_bytes, request_bytes_beside};
use lacuna_pages::{ByteLength, ProcessMemory, SystemMemory};
use tokio::sync::watch;

use crate::config::ServerConfig;
use crate::http::connections;
use crate::http::doors::Doors;
use crate::http::probes::Probes;
use crate::http::routes::Routers;
use crate::intake::Intake;
use crate::models::card::Card;
use crate::models::front::Front;
use crate::models::loaded::Settings;
use crate::models::registry::{Known, Registry};
use crate::models::{ModelEntry, ModelsConfig};
use crate::server::{Connections, FLUSH, HTTP_THREAD, StartError, listen};

/// A running server of several models, each loaded when it is asked for. Dropping it ends everything under way at once.
#[derive(Debug)]
pub struct ModelServer {
    address: SocketAddr,
    grace: Duration,
    budget: ByteLength,
    stop: watch::Sender<bool>,
    registry: Registry,
    connections: Connections,
}

/// What a process has of its own, where no model says it: as its plan has it (measured: 4.5 MiB, and a reserve).
const PROGRAM_BYTES: u64 = 6 << 20;

impl ModelServer {
    /// Looks at the files of all models, and listens. No model is loaded yet. Of `config`, the name and the aliases do
    /// not count, and the budget is one for all of them.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running then.
    pub fn start(models: ModelsConfig, config: ServerConfig) -> Result<Self, StartError> {
        let (runtime, entrance, address) = listen(&config)?;
        let mut config = config;
        let budget = budget(config.service.engine.budget);
        let engine = &mut config.service.engine;
        if engine.budget.is_none() {
            engine.weights = engine.weights.without_budget();
        }
        let asked = engine.request_memory.map(ByteLength::get);
        let held = asked.unwrap_or_else(|| request_bytes(Some(budget)));
        let requests = RequestMemory::new(ByteLength::new(held));
        let known = known(models.models, &config, budget.saturating_sub(held))?;
        let base = PROGRAM_BYTES + held;
        for one in &known {
            one.check(budget, asked)?;
        }
        let memory = connections::account(&requests, &entrance, config.limits.connections);
        let intake = Intake::start(&config.limits, requests.clone());
        let intake = intake.map_err(StartError::Runtime)?.of_several();
        let settings = Settings {
            config: config.clone(),
            intake: intake.clone(),
            requests,
        };
        let registry = Registry::start(known, settings, (budget, base), models.keep_alive);
        let registry = registry.map_err(StartError::Runtime)?;
        let (grace, limits, doors) = (config.grace, config.limits.clone(), Doors::of(&config));
        let front = Arc::new(Front::new(registry.models(), intake, config));
        let (stop, stopped) = watch::channel(false);
        let probes = Probes {
            model: None,
            engine: None,
            stopping: stopped.clone(),
        };
        let routers = Routers::of_models(&front, &doors, &probes);
        let serving = connections::serve(entrance, routers, limits, memory, stopped);
        Ok(Self {
            address,
            grace,
            budget: ByteLength::new(budget),
            stop,
            registry,
            connections: Connections::start(HTTP_THREAD, runtime, serving)
                .map_err(StartError::Runtime)?,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What the process may commit.
    #[must_use]
    pub fn budget(&self) -> ByteLength {
        self.budget
    }

    /// The names of the models whose files are none, and why.
    pub fn unusable(&self) -> Vec<(String, String)> {
        let models = self.registry.models();
        let unusable = models.known().filter_map(|(_, known)| {
            let reason = known.card.as_ref().err()?;
            Some((known.entry.name.clone(), reason.clone()))
        });
        unusable.collect()
    }

    /// Takes no more requests, lets those under way finish within the grace time, and ends.
    pub fn shutdown(self) {
        self.stop.send_replace(true);
        self.registry.shutdown(Grace::Finish(self.grace));
        self.connections.wait(FLUSH);
    }
}

/// What the process may commit: what was asked for, or as much of it as there is.
fn budget(asked: Option<ByteLength>) -> u64 {
    let held = ProcessMemory::read().map_or(0, |process| process.anonymous.get());
    let there = SystemMemory::read().spare().map(|spare| spare.get() + held);
    let asked = asked.map(ByteLength::get);
    // Where the system does not tell, nothing limits it.
    asked.into_iter().chain(there).min().unwrap_or(u64::MAX / 2)
}

/// What the files of all models say.
fn known(
    entries: Vec<ModelEntry>,
    config: &ServerConfig,
    room: u64,
) -> Result<Vec<Known>, StartError> {
    let engine = config.service.engine_config();
    let read = |entry: ModelEntry| {
        let card = Card::read(&entry, &engine, room);
        if let (true, Err(reason)) = (entry.required, &card) {
            return Err(StartError::Model {
                name: entry.name,
                reason: reason.clone(),
            });
        }
        Ok(Known { entry, card })
    };
    entries.into_iter().map(read).collect()
}

impl Known {
    /// Refuses a model that is required and could never be loaded, where requests hold `asked` or their share.
    fn check(&self, budget: u64, asked: Option<u64>) -> Result<(), StartError> {
        let least = match &self.card {
            Ok(card) if self.entry.required => card.needs.least,
            _ => return Ok(()),
        };
        let others = least.saturating_add(PROGRAM_BYTES);
        let held = asked.unwrap_or_else(|| request_bytes(Some(budget)));
        if others.saturating_add(held) <= budget {
            return Ok(());
        }
        // Of a budget that is enough requests get more.
        let held = asked.unwrap_or_else(|| request_bytes_beside(others));
        Err(StartError::BudgetTooSmall {
            name: self.entry.name.clone(),
            budget: ByteLength::new(budget),
            needed: ByteLength::new(others.saturating_add(held)),
        })
    }
}
