//! `GET /memory`: the byte accounts and every session's pages, as JSON. `POST /memory`: another budget.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use lacuna_engine::{
    DeviceStatus, ExpertStatus, GroupState, Phase, SessionStatus, Status, WeightMemory,
};
use lacuna_kv::folder::FolderStatus;
use lacuna_kv::folder::remote::RemoteStatus;
use lacuna_kv::swap::SwapStatus;
use lacuna_pages::{ByteLength, Ledger};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::http::body::{Arriving, read};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::sharing::Client;

pub(crate) async fn map(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json(&app.model_name, &app.engine.status()))
}

/// What the process may commit from now on.
#[derive(Debug, Deserialize)]
struct Limit {
    budget_bytes: u64,
}

/// `POST /memory`: the budget from the engine's next step on. Of several keys it takes the first: what one client
/// does with it all others feel.
pub(crate) async fn set(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Json<Value>, ApiError> {
    first_key(client, "the budget is changed")?;
    let object = app.bodies().receive(body).await?.object()?;
    let budget_bytes = limit(object, &mut app.ignored())?;
    let set = app.engine.set_budget(ByteLength::new(budget_bytes));
    set.map_err(|error| ApiError::field("budget_bytes".to_owned(), error.to_string()))?;
    Ok(Json(json!({"budget_bytes": budget_bytes})))
}

/// Of several keys, what all clients feel is done with the first.
pub(crate) fn first_key(Client(key): Client, what: &str) -> Result<(), ApiError> {
    match key {
        Some(1..) => Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "not_the_first_key",
            format!("{what} with the first of the server's keys"),
        )),
        _ => Ok(()),
    }
}

/// The budget that a body asks for.
pub(crate) fn limit(object: Map<String, Value>, ignored: &mut Ignored) -> Result<u64, ApiError> {
    let Limit { budget_bytes } = read(object, ignored)?;
    Ok(budget_bytes)
}

pub(crate) fn json(model: &str, status: &Status) -> Value {
    let (budget, pages, cache) = (status.budget, status.pages, status.cache);
    json!({
        "model": model,
        "running": status.running,
        "waiting": status.waiting,
        "budget": with(json!(budget.plan), json!({
            "beyond_plan_bytes": budget.beyond_plan.get(),
            "kv_bytes_now": budget.kv_now.get(),
            "dense_bytes": budget.dense.get(),
        })),
        "device": status.device.as_ref().map(device),
        "weights": with(weights(&budget.weights), json!({"rows": status.row_reads})),
        "pages": {
            "page_bytes": pages.page.get(),
            "group_bytes": pages.group.get(),
            "group_tokens": pages.group_tokens,
            "token_bytes": pages.token.get(),
            "kept_token_bytes": pages.kept_token.get(),
            "window_bytes": pages.windows.get(),
            "state_bytes": pages.states.get(),
            "buffers": pages.buffers,
        },
        "experts": status.experts.as_ref().map(experts),
        "neurons": status.neurons.map(|it| with(json!(it.slots), json!(it.reads))),
        "request_memory": {
            "limit_bytes": status.request_memory.limit.get(),
            "held_bytes": status.request_memory.held.get(),
            "highest_bytes": status.request_memory.highest.get(),
        },
        "ledger": ledger(&status.ledger),
        "cache": {
            "groups": cache.groups,
            "unused_groups": cache.unused_groups,
            "pinned_groups": cache.pinned_groups,
            "resume_points": cache.resume_points,
        },
        "folder": status.folder.as_ref().map(folder),
        "aside": status.aside.as_ref().map(aside),
        "swap": status.swap.as_ref().map(|swap| with(self::swap(swap), json!({"requests": status.swapped}))),
        "sessions": status.sessions.iter().map(session).collect::<Vec<_>>(),
        "counters": counters(status),
    })
}

/// The fields of both objects.
fn with(mut object: Value, more: Value) -> Value {
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}

/// A device that computes, and its memory.
fn device(device: &DeviceStatus) -> Value {
    json!({
        "name": device.name,
        "layers": device.layers,
        "host_layers": device.host_layers,
        "weight_bytes": device.memory.weight_bytes,
        "activation_bytes": device.memory.activation_bytes,
        "staging_bytes": device.memory.staging_bytes,
        "kv_bytes": device.kv.get(),
    })
}

/// Those of a mixture, where weights are read into memory.
fn experts(status: &ExpertStatus) -> Value {
    let counts = status.counts;
    with(
        json!(status.slots),
        json!({
            "hits": counts.hits,
            "misses": counts.misses,
            "read_bytes": counts.read_bytes,
            "finding": status.finding(),
        }),
    )
}

/// Those that are read from their files.
fn weights(memory: &WeightMemory) -> Value {
    json!({
        "pinned_bytes": memory.pinned.get(),
        "ring_bytes": memory.ring.get(),
        "row_bytes": memory.rows.get(),
        "expert_bytes": memory.experts.get(),
        "neuron_bytes": memory.neurons.get(),
        "streamed_bytes_per_pass": memory.streamed.get(),
    })
}

fn ledger(ledger: &Ledger) -> Value {
    json!({
        "reserved_bytes": ledger.reserved.get(),
        "committed_bytes": ledger.committed.get(),
        "host_beside_bytes": ledger.host_beside.get(),
        "mapped_bytes": ledger.mapped.get(),
        "shared_bytes": ledger.shared.get(),
        "unique_bytes": ledger.unique.get(),
        "pinned_bytes": ledger.pinned.get(),
        "pinned_only_bytes": ledger.pinned_only.get(),
        "file_bytes": ledger.file.get(),
        "idle_bytes": ledger.idle.get(),
        "retiring_bytes": ledger.retiring.get(),
        "lost_bytes": ledger.lost.get(),
        "limit_bytes": ledger.limit.map(ByteLength::get),
        "buffers": ledger.buffers,
        "regions": ledger.regions,
        "region_limit": ledger.region_limit,
        "map_calls": ledger.counts.map_calls,
        "copies_on_write": ledger.counts.copies_on_write,
    })
}

/// What of the cache was put aside beside the swap file.
fn aside(files: &FolderStatus) -> Value {
    json!({
        "segments": files.segments,
        "bytes": files.bytes.get(),
        "written_bytes": files.written_bytes,
        "restored_tokens": files.restored_tokens,
        "restored_bytes": files.restored_bytes,
        "mapped_bytes": files.mapped_bytes,
        "damaged": files.damaged,
        "unreadable": files.unreadable,
        "short_of_memory": files.short_of_memory,
        "given_up": files.given_up,
        "failed_writes": files.failed_writes,
        "paused": files.paused,
    })
}

fn folder(folder: &FolderStatus) -> Value {
    json!({
        "segments": folder.segments,
        "bytes": folder.bytes.get(),
        "limit_bytes": folder.limit.get(),
        "written_segments": folder.written_segments,
        "written_bytes": folder.written_bytes,
        "restored_tokens": folder.restored_tokens,
        "restored_bytes": folder.restored_bytes,
        "mapped_bytes": folder.mapped_bytes,
        "known_bytes": folder.known_bytes,
        "damaged": folder.damaged,
        "gone": folder.gone,
        "unreadable": folder.unreadable,
        "short_of_memory": folder.short_of_memory,
        "given_up": folder.given_up,
        "failed_writes": folder.failed_writes,
        "paused": folder.paused,
        "other_segments": folder.other_segments,
        "differing": folder.differing,
        "remote": folder.remote.as_ref().map(remote),
    })
}

fn remote(remote: &RemoteStatus) -> Value {
    json!({
        "place": remote.place,
        "can_write": remote.can_write,
        "lookups": remote.lookups,
        "hits": remote.hits,
        "fetched_segments": remote.fetched_segments,
        "fetched_bytes": remote.fetched_bytes,
        "damaged": remote.damaged,
        "failed_reads": remote.failed_reads,
        "late": remote.late,
        "reading_paused": remote.reading_paused,
        "uploaded_segments": remote.uploaded_segments,
        "uploaded_bytes": remote.uploaded_bytes,
        "uploads_waiting": remote.uploads_waiting,
        "given_up": remote.given_up,
        "failed_writes": remote.failed_writes,
        "writing_paused": remote.writing_paused,
    })
}

fn swap(swap: &SwapStatus) -> Value {
    json!({
        "limit_bytes": swap.limit.get(),
        "held_bytes": swap.held.get(),
        "left": swap.left,
        "returned": swap.returned,
        "written_bytes": swap.written_bytes,
        "read_bytes": swap.read_bytes,
        "failed_writes": swap.failed_writes,
        "failed_reads": swap.failed_reads,
        "short_of_memory": swap.short_of_memory,
        "failure": swap.failure,
        "written_bytes_per_second": swap.write_rate.per_second(),
        "read_bytes_per_second": swap.read_rate.per_second(),
    })
}

fn session(session: &SessionStatus) -> Value {
    let groups = session.groups.iter();
    json!({
        "request": session.request,
        "choice": session.choice,
        "phase": match session.phase {
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
            Phase::Stalled => "stalled",
        },
        "tokens": session.tokens,
        "cached_tokens": session.cached_tokens,
        "prompt_tokens": session.prompt_tokens,
        "reused_tokens": session.reused_tokens,
        "differs_at": session.differs_at,
        "rows_bytes": session.rows.get(),
        "state_bytes": session.states.get(),
        "slack_bytes": session.slack.get(),
        "groups": groups
            .map(|run| json!({"state": state(run.state), "count": run.groups}))
            .collect::<Vec<_>>(),
    })
}

fn state(state: GroupState) -> &'static str {
    match state {
        GroupState::Shared => "shared",
        GroupState::Cached => "cached",
        GroupState::Unique => "unique",
        GroupState::Partial => "partial",
    }
}

fn counters(status: &Status) -> Value {
    let counters = status.counters;
    let drafts = counters.drafts.all();
    json!({
        "requests": counters.requests,
        "finished": counters.finished,
        "cancelled": counters.cancelled,
        "failed": counters.failed,
        "refused": counters.refused,
        "preemptions": counters.preemptions,
        "steps": counters.steps,
        "prompt_tokens": counters.prompt_tokens,
        "reused_tokens": counters.reused_tokens,
        "generated_tokens": counters.generated_tokens,
        "evicted_groups": counters.evicted_groups,
        "evicted_resume_points": counters.evicted_resume_points,
        "expired_groups": counters.expired_groups,
        "drafts": drafts.drafts,
        "draft_tokens": drafts.draft_tokens,
        "accepted_tokens": drafts.accepted_tokens,
        "draft_model": {
            "drafts": counters.drafts.model.drafts,
            "draft_tokens": counters.drafts.model.draft_tokens,
            "accepted_tokens": counters.drafts.model.accepted_tokens,
        },
    })
}
