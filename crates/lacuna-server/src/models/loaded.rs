//! A model that is loaded, with what answers its requests.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use axum::Router;
use lacuna_engine::{Accounting, EmbedderConfig, Grace, Handle, RequestMemory, Service};
use lacuna_models::{Loading, Model, describe, with_images};
use lacuna_pages::{ByteLength, return_freed_memory};

use crate::app::App;
use crate::config::ServerConfig;
use crate::embeddings::{Embeddings, Work};
use crate::http::routes;
use crate::intake::Intake;
use crate::models::ModelEntry;
use crate::models::card::{self, Card, Purpose};
use crate::models::registry::More;
use crate::sharing::Sharing;

/// A model that is loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) router: Router,
    kind: Kind,
    /// Of what its service takes for a budget, the part that is the program's own, and so not of its share.
    program: u64,
}

#[derive(Debug)]
enum Kind {
    Writes {
        handle: Handle,
        /// None when it has ended.
        service: Mutex<Option<Service>>,
    },
    Pools(Arc<Embeddings>),
}

/// What models are loaded with.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Of every model, apart from its name and its share.
    pub(crate) config: ServerConfig,
    pub(crate) intake: Intake,
    /// What requests for all models hold.
    pub(crate) requests: RequestMemory,
}

/// How long to wait for a service to give up what another has been promised: a step that is under way, of a model that
/// nobody uses, is soon over.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long what has ended may take to let go of its memory, before others are seen to meanwhile.
const LETTING_GO: Duration = Duration::from_secs(1);
/// How often to look in that time.
const LOOK: Duration = Duration::from_millis(1);

impl Settings {
    /// How a model is set up that has `share` bytes.
    fn of(&self, entry: &ModelEntry, card: &Card, share: u64) -> ServerConfig {
        let mut config = self.config.clone();
        config.model_name.clone_from(&entry.name);
        config.model_aliases.clone_from(&entry.aliases);
        config.service.shared_requests = Some(self.requests.clone());
        let engine = &mut config.service.engine;
        engine.budget = Some(ByteLength::new(share + card.needs.program));
        engine.weights = card.weights;
        // What the process holds is not one model's affair.
        engine.accounting = Accounting::Planned;
        engine.context_tokens = Some(card.context_tokens);
        config
    }
}

impl Loaded {
    /// Loads a model into `share` bytes, which may ask for `more`.
    ///
    /// # Errors
    /// Why not, in words.
    pub(crate) fn load(
        settings: &Settings,
        entry: &ModelEntry,
        card: &Card,
        (share, more): (u64, More),
    ) -> Result<Self, String> {
        let config = settings.of(entry, card, share);
        let (router, kind) = match card.purpose {
            Purpose::Writes => Self::writes(settings, entry, config, more)?,
            Purpose::Embeds | Purpose::Scores => Self::pools(settings, entry, &config, more)?,
        };
        Ok(Self {
            router,
            kind,
            program: card.needs.program,
        })
    }

    fn writes(
        settings: &Settings,
        entry: &ModelEntry,
        config: ServerConfig,
        more: More,
    ) -> Result<(Router, Kind), String> {
        let files = card::open(&entry.source)?;
        let description = describe(&files).map_err(said)?;
        let engine = config.service.engine_config();
        let description = engine.guessing(&files, description).map_err(said)?;
        let residency = engine.check(&files, &description);
        let loading = Loading {
            residency: residency.map_err(said)?,
            device: None,
            progress: &mut (),
        };
        let model = Model::load_described(files, description, loading);
        let model = model.and_then(|model| with_images(model, None));
        let model = Arc::new(model.map_err(said)?);
        let service = Service::start(model, config.service.clone()).map_err(said)?;
        let folder = config.service.prefix_cache.folder.as_ref();
        let folder = folder.map(|folder| folder.path.as_path());
        let sharing = Sharing::new(config.share_prefixes, &config.keys, folder).map_err(said)?;
        let handle = service.handle();
        let app = App::new(handle.clone(), config, sharing, settings.intake.clone());
        let app = app.map_err(said)?.with_more(more);
        let router = routes::of_writer(&Arc::new(app));
        let service = Mutex::new(Some(service));
        Ok((router, Kind::Writes { handle, service }))
    }

    fn pools(
        settings: &Settings,
        entry: &ModelEntry,
        config: &ServerConfig,
        more: More,
    ) -> Result<(Router, Kind), String> {
        let files = card::open(&entry.source)?;
        let model = Arc::new(Model::load(files).map_err(said)?);
        let embedder = EmbedderConfig::of(&config.service.engine_config());
        let work = Work::new(&model, &embedder).map_err(said)?;
        let app = Embeddings::new(model, work, config, settings.intake.clone());
        let app = Arc::new(app.with_more(more));
        Ok((routes::of_pooler(&app), Kind::Pools(app)))
    }

    /// The share that is a budget of `bytes`.
    pub(crate) fn share_of(&self, bytes: u64) -> u64 {
        bytes.saturating_sub(self.program)
    }

    /// The engine of a model that writes.
    pub(crate) fn engine(&self) -> Option<&Handle> {
        match &self.kind {
            Kind::Writes { handle, .. } => Some(handle),
            Kind::Pools(_) => None,
        }
    }

    fn model(&self) -> &Arc<Model> {
        match &self.kind {
            Kind::Writes { handle, .. } => handle.model(),
            Kind::Pools(app) => app.model(),
        }
    }

    /// The least share that it runs with.
    pub(crate) fn least(&self) -> u64 {
        let least = self.engine().map(Handle::least_budget);
        least.map_or(0, |least| least.get().saturating_sub(self.program))
    }

    /// Whether it can go on: its thread runs, and its files are whole.
    pub(crate) fn is_well(&self) -> bool {
        self.engine().is_none_or(Handle::is_alive) && self.model().files().check().is_ok()
    }

    /// Whether more memory would be of use to what it does now.
    pub(crate) fn is_short(&self, share: u64, working: u64) -> bool {
        /// Of the limit of KV pages: from here on cached prompts are soon given up.
        const FULL: (u64, u64) = (7, 8);
        let Some(engine) = self.engine() else {
            return share < working;
        };
        let status = engine.status();
        let (ledger, budget) = (&status.ledger, &status.budget);
        let held = ledger.committed.saturating_sub(ledger.idle).get();
        let limit = budget.kv_now.get();
        budget.weights.streamed.get() > 0 || held >= limit / FULL.1 * FULL.0
    }

    /// What it has of the process's anonymous memory by now, and what it is to have, both without the parts that
    /// change places: KV pages and weights that are read.
    pub(crate) fn anonymous(&self, share: u64) -> (u64, u64) {
        match self.engine() {
            Some(engine) => {
                let parts = engine.status().budget.plan.parts;
                let planned = parts.besides_kv() - parts.read_weight_bytes;
                (
                    engine.anonymous_bytes(),
                    planned.saturating_sub(self.program),
                )
            }
            // Room for long texts is taken and given back.
            None => (0, share),
        }
    }

    /// Gives it another share. Returns what it has then: more than asked for, if it does not give that up in time.
    pub(crate) fn set_share(&self, from: u64, to: u64) -> u64 {
        let budget = ByteLength::new(to + self.program);
        let handle = match &self.kind {
            Kind::Pools(app) => {
                app.set_budget(budget);
                return to;
            }
            Kind::Writes { handle, .. } => handle,
        };
        if handle.set_budget(budget).is_err() {
            return from;
        }
        let until = Instant::now() + PATIENCE;
        while handle.is_alive() && !handle.keeps_to(budget) {
            if Instant::now() >= until {
                return from.max(to);
            }
            thread::sleep(LOOK);
        }
        to
    }

    /// Ends it, and what is under way with it.
    pub(crate) fn end(&self) {
        match &self.kind {
            Kind::Writes { service, .. } => {
                let service = service
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                if let Some(service) = service {
                    service.shutdown(Grace::Immediate);
                }
            }
            Kind::Pools(app) => app.end(),
        }
    }

    /// Ends it at once and lets go of it. What is returned says when all its memory is free: requests that were broken
    /// off may have some for a moment.
    pub(crate) fn unload(self: Arc<Self>) -> Leaving {
        let leaving = Leaving(Arc::downgrade(self.model()));
        self.end();
        drop(self);
        let until = Instant::now() + LETTING_GO;
        while !leaving.is_gone() && Instant::now() < until {
            thread::sleep(LOOK);
        }
        return_freed_memory();
        leaving
    }
}

/// A model that was unloaded.
#[derive(Debug)]
pub(crate) struct Leaving(Weak<Model>);

impl Leaving {
    pub(crate) fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

fn said(error: impl ToString) -> String {
    error.to_string()
}
