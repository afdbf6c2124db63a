//! `GET /memory` and `GET /metrics` of a server of several models.

use std::fmt;

use axum::response::Response;
use lacuna_engine::{Handle, Status};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use serde_json::{Value, json};

use crate::http::error::ApiError;
use crate::memory;
use crate::metrics::{Engines, MODEL, written};
use crate::models::arbiter::ModelStatus;
use crate::models::registry::{Models, Room};

/// The whole budget, and every model's part of it.
pub(crate) fn memory(models: &Models) -> Value {
    let (room, requests) = (models.room(), models.requests().status());
    let all = models.known().map(|(id, known)| {
        let (status, loaded) = models.status(id);
        let name = known.entry.name.as_str();
        let engine = loaded.as_ref().and_then(|loaded| loaded.engine());
        json!({
            "name": name,
            "state": status.state,
            "share_bytes": status.share,
            "least_bytes": status.needs.map(|needs| needs.least),
            "working_bytes": status.needs.map(|needs| needs.working),
            "requests": status.users,
            "loads": status.loads,
            "unloads": status.unloads,
            "error": status.failure,
            "memory": engine.map(|engine| memory::json(name, &engine.status())),
        })
    });
    let all: Vec<Value> = all.collect();
    json!({
        "budget_bytes": room.budget,
        "base_bytes": room.base,
        "beyond_plan_bytes": room.beyond_plan,
        "room_bytes": room.room,
        "free_bytes": room.room.saturating_sub(room.taken),
        "request_memory": {
            "limit_bytes": requests.limit.get(),
            "held_bytes": requests.held.get(),
            "highest_bytes": requests.highest.get(),
        },
        "models": all,
    })
}

/// What all models do, each under its name, and what they have together.
pub(crate) fn metrics(models: &Models) -> Result<Response, ApiError> {
    let (mut engines, mut all) = (Vec::new(), Vec::new());
    for (id, known) in models.known() {
        let (status, loaded) = models.status(id);
        let engine = loaded.as_ref().and_then(|loaded| loaded.engine());
        let name = known.entry.name.clone();
        engines.extend(
            engine
                .map(Handle::status)
                .map(|it| (Some(name.clone()), own(it))),
        );
        all.push((name, status));
    }
    let shares = Shares {
        room: models.room(),
        held: models.requests().status().held.get(),
        models: all,
    };
    written(vec![Box::new(Engines(engines)), Box::new(shares)])
}

/// An engine's figures without those that are not its own: of the account that it shares with others.
fn own(status: Status) -> Status {
    Status {
        request_memory: lacuna_engine::RequestMemoryStatus::default(),
        ..status
    }
}

#[derive(Debug)]
struct Shares {
    room: Room,
    /// Bytes that requests hold.
    held: u64,
    models: Vec<(String, ModelStatus)>,
}

/// Name, description, and where the figure is.
type Row<T> = (&'static str, &'static str, fn(&T) -> u64);

const OF_ALL: [Row<Shares>; 5] = [
    (
        "lacuna_models_budget_bytes",
        "What the process may commit",
        |it| it.room.budget,
    ),
    (
        "lacuna_models_room_bytes",
        "What of it is for models",
        |it| it.room.room,
    ),
    (
        "lacuna_models_share_bytes",
        "What models have of that together",
        |it| it.room.taken,
    ),
    (
        "lacuna_models_beyond_plan_bytes",
        "What the process has beyond what was planned, which models do not get",
        |it| it.room.beyond_plan,
    ),
    (
        "lacuna_models_request_memory_bytes",
        "Memory that requests hold outside the KV caches of all models",
        |it| it.held,
    ),
];

const GAUGES: &[Row<ModelStatus>] = &[
    ("lacuna_model_loaded", "Whether a model is loaded", |it| {
        u64::from(it.state == "loaded")
    }),
    (
        "lacuna_model_share_bytes",
        "Bytes of memory that a model may have",
        |it| it.share,
    ),
    ("lacuna_model_requests", "Requests that use a model", |it| {
        it.users as u64
    }),
];

const COUNTERS: &[Row<ModelStatus>] = &[
    ("lacuna_model_loads", "Times a model was loaded", |it| {
        it.loads
    }),
    ("lacuna_model_unloads", "Times a model was unloaded", |it| {
        it.unloads
    }),
];

impl Collector for Shares {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        for (name, help, value) in OF_ALL {
            let gauge = ConstGauge::new(value(self) as f64);
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        for &(name, help, value) in GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (model, status) in &self.models {
                let gauge = ConstGauge::new(value(status) as f64);
                gauge.encode(metric.encode_family(&[(MODEL, model.as_str())])?)?;
            }
        }
        for &(name, help, value) in COUNTERS {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (model, status) in &self.models {
                let counter = ConstCounter::new(value(status));
                counter.encode(metric.encode_family(&[(MODEL, model.as_str())])?)?;
            }
        }
        Ok(())
    }
}
