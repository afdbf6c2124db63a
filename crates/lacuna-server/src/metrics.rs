//! `GET /metrics`, in the OpenMetrics text format.
//!
//! What routers and dashboards already read has the names that vLLM gave it; bytes, which only this
//! server accounts for, are under `lacuna_`. Nothing is counted here: every figure is the engine's.

use std::fmt;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use lacuna_engine::{Histogram, Latencies, Status};
use lacuna_kv::folder::FolderStatus;
use lacuna_kv::folder::remote::RemoteStatus;
use lacuna_kv::prefix::Block;
use lacuna_kv::swap::SwapStatus;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::app::{App, seconds_now};
use crate::http::error::ApiError;

/// As OpenMetrics registers it.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(crate) async fn text(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let engines = Engines(vec![(None, app.engine.status())]);
    written(vec![Box::new(engines)])
}

/// The text of all that `collectors` have.
pub(crate) fn written(collectors: Vec<Box<dyn Collector>>) -> Result<Response, ApiError> {
    let mut registry = Registry::default();
    for collector in collectors {
        registry.register_collector(collector);
    }
    let mut text = String::new();
    encode(&mut text, &registry).map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}

/// What engines are doing, each with the name of its model where there are several.
#[derive(Debug)]
pub(crate) struct Engines(pub(crate) Vec<(Option<String>, Status)>);

/// The label that tells models apart, as vLLM has it.
pub(crate) const MODEL: &str = "model_name";

impl Collector for Engines {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        self.cache_config(&mut encoder)?;
        self.adapters(&mut encoder)?;
        for &(name, help, value) in GAUGES {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            self.each(metric, |status, metric| {
                ConstGauge::new(value(status)).encode(metric)
            })?;
        }
        for &(name, help, value) in COUNTERS {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            self.each(metric, |status, metric| {
                ConstCounter::new(value(status)).encode(metric)
            })?;
        }
        for &(name, help, times) in HISTOGRAMS {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
            self.each(metric, |status, metric| {
                histogram(times(&status.latencies), metric)
            })?;
        }
        Ok(())
    }
}

impl Engines {
    /// Writes the figure of every engine.
    fn each(
        &self,
        mut metric: MetricEncoder<'_>,
        write: impl Fn(&Status, MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        if let [(None, status)] = self.0.as_slice() {
            return write(status, metric);
        }
        for (name, status) in &self.0 {
            let name = name.as_deref().unwrap_or_default();
            write(status, metric.encode_family(&[(MODEL, name)])?)?;
        }
        Ok(())
    }

    /// The gateway's inference extension asks for this and reports an error where it is missing: there are no adapters.
    fn adapters(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (name, help) = (
            "vllm:lora_requests_info",
            "Adapters of requests; the value is the time",
        );
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (model, _) in &self.0 {
            let mut labels = vec![
                ("max_lora", "0"),
                ("running_lora_adapters", ""),
                ("waiting_lora_adapters", ""),
            ];
            labels.extend(model.iter().map(|model| (MODEL, model.as_str())));
            ConstGauge::new(seconds_now()).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// Routers that follow what is in a prefix cache count it in blocks: those that KV events tell of.
    fn cache_config(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (name, help) = (
            "vllm:cache_config_info",
            "Tokens of a KV block, and blocks there can be",
        );
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (model, status) in &self.0 {
            let groups = status.budget.plan.parts.kv_bytes / status.pages.group.get().max(1);
            let tokens = groups.saturating_mul(status.pages.group_tokens as u64);
            let blocks = tokens / Block::TOKENS as u64;
            let mut labels = vec![
                ("block_size", Block::TOKENS.to_string()),
                ("num_gpu_blocks", blocks.to_string()),
            ];
            labels.extend(model.iter().map(|model| (MODEL, model.clone())));
            ConstGauge::new(1u64).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// Name, description, and where the figure is.
type Row<T> = (&'static str, &'static str, fn(&Status) -> T);

const GAUGES: &[Row<f64>] = &[
    (
        "vllm:num_requests_running",
        "Requests that are running",
        |status| status.running as f64,
    ),
    (
        "vllm:num_requests_waiting",
        "Requests that wait to run",
        |status| status.waiting as f64,
    ),
    (
        "vllm:num_requests_swapped",
        "Those of them whose KV pages are in the swap file, on their way there or back",
        |status| status.swapped as f64,
    ),
    (
        "lacuna_kv_swap_held_bytes",
        "Bytes of the swap file that belong to requests",
        |status| swap(status, |swap| swap.held.get()) as f64,
    ),
    (
        "lacuna_kv_aside_held_bytes",
        "Bytes of files of what the prefix cache put aside",
        |status| aside(status, |files| files.bytes.get()) as f64,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache's bytes in use, 1 is all",
        kv_usage,
    ),
    (
        "lacuna_kv_reserved_bytes",
        "Address space held by KV buffers",
        |status| status.ledger.reserved.get() as f64,
    ),
    (
        "lacuna_kv_committed_bytes",
        "Physical memory obtained for KV pages",
        |status| status.ledger.committed.get() as f64,
    ),
    (
        "lacuna_kv_shared_bytes",
        "KV memory mapped more than once, each page counted once",
        |status| status.ledger.shared.get() as f64,
    ),
    (
        "lacuna_kv_unique_bytes",
        "KV memory mapped once",
        |status| status.ledger.unique.get() as f64,
    ),
    (
        "lacuna_kv_cached_bytes",
        "KV memory that only the prefix cache holds",
        |status| status.ledger.pinned_only.get() as f64,
    ),
    (
        "lacuna_kv_idle_bytes",
        "KV memory kept for reuse",
        |status| status.ledger.idle.get() as f64,
    ),
    (
        "lacuna_kv_slack_bytes",
        "Mapped KV memory that holds no row yet",
        |status| slack(status) as f64,
    ),
    (
        "lacuna_kv_limit_bytes",
        "What KV pages may take now",
        |status| status.budget.kv_now.get() as f64,
    ),
    (
        "lacuna_kv_dense_bytes",
        "What whole contexts of the running sessions would take",
        |status| status.budget.dense.get() as f64,
    ),
    ("lacuna_activation_bytes", "Activation memory", |status| {
        status.budget.plan.parts.activation_bytes as f64
    }),
    (
        "lacuna_copied_weight_bytes",
        "Weights copied out of the file",
        |status| status.budget.plan.parts.copied_weight_bytes as f64,
    ),
    (
        "lacuna_converted_weight_bytes",
        "Weights converted from a form that cannot be computed from",
        |status| status.budget.plan.parts.converted_weight_bytes as f64,
    ),
    (
        "lacuna_read_weight_bytes",
        "Memory of weights that are read from their files",
        |status| status.budget.plan.parts.read_weight_bytes as f64,
    ),
    (
        "lacuna_draft_bytes",
        "Memory of a draft model beside its activations and KV rows",
        |status| status.budget.plan.parts.draft_bytes as f64,
    ),
    (
        "lacuna_expert_slot_bytes",
        "Memory of slots for experts",
        |status| status.experts.map_or(0.0, |it| it.slots.bytes as f64),
    ),
    (
        "lacuna_expert_share_resident",
        "Part of experts that have a slot; where lacuna_expert_hits are no larger a part, tokens' experts do not come \
         again soon",
        |status| status.experts.map_or(1.0, |it| it.slots.share()),
    ),
    (
        "lacuna_neuron_slot_bytes",
        "Memory of slots for neurons that are read one by one",
        |status| status.neurons.map_or(0.0, |it| it.slots.bytes as f64),
    ),
    (
        "lacuna_pinned_weight_bytes",
        "Of it, weights that stay",
        |status| status.budget.weights.pinned.get() as f64,
    ),
    (
        "lacuna_weight_ring_bytes",
        "Of it, the ring that other weights go through in each pass",
        |status| status.budget.weights.ring.get() as f64,
    ),
    (
        "lacuna_weight_row_bytes",
        "Of it, rows of tables",
        |status| status.budget.weights.rows.get() as f64,
    ),
    (
        "lacuna_streamed_weight_bytes",
        "Bytes of weights that each pass reads from their files",
        |status| status.budget.weights.streamed.get() as f64,
    ),
    (
        "lacuna_budget_bytes",
        "What the process may commit; 0 when nothing is known that would limit it",
        |status| status.budget.plan.budget_bytes.unwrap_or(0) as f64,
    ),
    (
        "lacuna_request_memory_bytes",
        "Memory that requests hold outside the KV cache",
        |status| status.request_memory.held.get() as f64,
    ),
    (
        "lacuna_request_memory_limit_bytes",
        "Memory that requests may hold outside the KV cache",
        |status| status.request_memory.limit.get() as f64,
    ),
    (
        "lacuna_kernel_mappings",
        "Separate mappings of KV buffers",
        |status| status.ledger.regions as f64,
    ),
    (
        "lacuna_prefix_cache_groups",
        "Page groups in the prefix cache",
        |status| status.cache.groups as f64,
    ),
    (
        "lacuna_kv_folder_bytes",
        "Bytes of files in the KV cache folder",
        |status| folder(status, |folder| folder.bytes.get()) as f64,
    ),
    (
        "lacuna_kv_folder_limit_bytes",
        "Bytes that files in the KV cache folder may come to",
        |status| folder(status, |folder| folder.limit.get()) as f64,
    ),
    (
        "lacuna_kv_folder_segments",
        "Segments in the KV cache folder that can be read back",
        |status| folder(status, |folder| folder.segments as u64) as f64,
    ),
    (
        "lacuna_kv_remote_uploads_waiting",
        "Segments of the KV cache folder that are still to be put into the remote store",
        |status| remote(status, |remote| remote.uploads_waiting as u64) as f64,
    ),
];

const COUNTERS: &[Row<u64>] = &[
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        |status| status.counters.prompt_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        |status| status.counters.reused_tokens,
    ),
    ("vllm:prompt_tokens", "Prompt tokens taken up", |status| {
        status.counters.prompt_tokens
    }),
    ("vllm:generation_tokens", "Tokens generated", |status| {
        status.counters.generated_tokens
    }),
    (
        "vllm:num_preemptions",
        "Requests that gave their pages up for an older one",
        |status| status.counters.preemptions,
    ),
    (
        "vllm:spec_decode_num_drafts",
        "Times that tokens of a reply were guessed for a pass",
        |status| status.counters.drafts.all().drafts,
    ),
    (
        "vllm:spec_decode_num_draft_tokens",
        "Tokens guessed",
        |status| status.counters.drafts.all().draft_tokens,
    ),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Guessed tokens that were right",
        |status| status.counters.drafts.all().accepted_tokens,
    ),
    (
        "lacuna_draft_model_tokens",
        "Tokens guessed by the draft model",
        |status| status.counters.drafts.model.draft_tokens,
    ),
    (
        "lacuna_draft_model_accepted_tokens",
        "Tokens guessed by the draft model that were right",
        |status| status.counters.drafts.model.accepted_tokens,
    ),
    (
        "vllm:request_success",
        "Requests whose choices all ended",
        |status| status.counters.finished,
    ),
    ("lacuna_requests", "Requests taken", |status| {
        status.counters.requests
    }),
    (
        "lacuna_requests_cancelled",
        "Requests cancelled by their client",
        |status| status.counters.cancelled,
    ),
    ("lacuna_requests_failed", "Requests that failed", |status| {
        status.counters.failed
    }),
    ("lacuna_requests_refused", "Requests not taken", |status| {
        status.counters.refused
    }),
    ("lacuna_steps", "Steps of the engine", |status| {
        status.counters.steps
    }),
    (
        "lacuna_evicted_groups",
        "Page groups evicted for room",
        |status| status.counters.evicted_groups,
    ),
    (
        "lacuna_evicted_resume_points",
        "Resume points evicted for room: pages of windows, and states",
        |status| status.counters.evicted_resume_points,
    ),
    (
        "lacuna_expired_groups",
        "Page groups given up after their time to live",
        |status| status.counters.expired_groups,
    ),
    (
        "lacuna_table_rows",
        "Rows of tables in files that were asked for",
        |status| status.row_reads.asked,
    ),
    (
        "lacuna_table_row_hits",
        "Those of them that were in memory, or on their way there",
        |status| status.row_reads.found,
    ),
    (
        "lacuna_table_row_bytes",
        "Bytes of files that rows of tables took",
        |status| status.row_reads.read_bytes,
    ),
    (
        "lacuna_map_calls",
        "Map operations on KV buffers",
        |status| status.ledger.counts.map_calls,
    ),
    (
        "lacuna_copies_on_write",
        "KV pages copied because a shared one was written",
        |status| status.ledger.counts.copies_on_write,
    ),
    (
        "lacuna_expert_hits",
        "Experts that were in memory when tokens of a pass needed them",
        |status| status.experts.map_or(0, |it| it.counts.hits),
    ),
    (
        "lacuna_expert_misses",
        "Experts that were read when tokens of a pass needed them",
        |status| status.experts.map_or(0, |it| it.counts.misses),
    ),
    (
        "lacuna_expert_read_bytes",
        "Bytes that were read for experts",
        |status| status.experts.map_or(0, |it| it.counts.read_bytes),
    ),
    (
        "lacuna_neurons_needed",
        "Neurons that passes needed of those that are read one by one: their activations were not zero",
        |status| status.neurons.map_or(0, |it| it.reads.needed),
    ),
    (
        "lacuna_neurons_found",
        "Those of them that were in memory",
        |status| status.neurons.map_or(0, |it| it.reads.found),
    ),
    (
        "lacuna_neuron_read_bytes",
        "Bytes that were read for the others, and for what was foretold",
        |status| status.neurons.map_or(0, |it| it.reads.read_bytes),
    ),
    (
        "lacuna_neurons_predicted",
        "Neurons that predictors named",
        |status| status.neurons.map_or(0, |it| it.reads.predicted),
    ),
    (
        "lacuna_neurons_predicted_right",
        "Those of them that passes needed",
        |status| status.neurons.map_or(0, |it| it.reads.predicted_right),
    ),
    (
        "lacuna_neurons_predicted_needed",
        "Neurons that were needed of blocks of which some were foretold",
        |status| status.neurons.map_or(0, |it| it.reads.predicted_needed),
    ),
    (
        "lacuna_neurons_ahead",
        "Neurons without a slot that were read ahead of time",
        |status| status.neurons.map_or(0, |it| it.reads.ahead),
    ),
    (
        "lacuna_neurons_ahead_needed",
        "Those of them that passes needed",
        |status| status.neurons.map_or(0, |it| it.reads.ahead_needed),
    ),
    (
        "lacuna_neuron_wasted_bytes",
        "Bytes that were read for what was foretold and not needed",
        |status| status.neurons.map_or(0, |it| it.reads.wasted_bytes),
    ),
    (
        "lacuna_kv_folder_written_bytes",
        "Bytes written to the KV cache folder",
        |status| folder(status, |folder| folder.written_bytes),
    ),
    (
        "lacuna_kv_folder_restored_tokens",
        "Tokens of prompts whose KV was read back from the folder",
        |status| folder(status, |folder| folder.restored_tokens),
    ),
    (
        "lacuna_kv_folder_damaged",
        "Segments set aside because a checksum was wrong",
        |status| folder(status, |folder| folder.damaged),
    ),
    (
        "lacuna_kv_folder_unreadable",
        "Segments that were gone, or could not be read in time",
        |status| folder(status, |folder| folder.gone + folder.unreadable),
    ),
    (
        "lacuna_kv_folder_given_up",
        "Segments not written, or not read back, because their memory was needed",
        |status| folder(status, |folder| folder.given_up + folder.short_of_memory),
    ),
    (
        "lacuna_kv_folder_failed_writes",
        "Times that writing to the KV cache folder failed",
        |status| folder(status, |folder| folder.failed_writes),
    ),
    (
        "lacuna_kv_remote_lookups",
        "Prompts that the remote store was asked for",
        |status| remote(status, |remote| remote.lookups),
    ),
    (
        "lacuna_kv_remote_hits",
        "Prompts of which the remote store had something",
        |status| remote(status, |remote| remote.hits),
    ),
    (
        "lacuna_kv_remote_fetched_segments",
        "Segments that came from the remote store",
        |status| remote(status, |remote| remote.fetched_segments),
    ),
    (
        "lacuna_kv_remote_fetched_bytes",
        "Bytes that came from the remote store",
        |status| remote(status, |remote| remote.fetched_bytes),
    ),
    (
        "lacuna_kv_remote_uploaded_segments",
        "Segments put into the remote store",
        |status| remote(status, |remote| remote.uploaded_segments),
    ),
    (
        "lacuna_kv_remote_uploaded_bytes",
        "Bytes put into the remote store",
        |status| remote(status, |remote| remote.uploaded_bytes),
    ),
    (
        "lacuna_kv_remote_damaged",
        "Objects of the remote store that were not what their names say",
        |status| remote(status, |remote| remote.damaged),
    ),
    (
        "lacuna_kv_remote_failed_reads",
        "Times that the remote store could not be read, or not in time",
        |status| remote(status, |remote| remote.failed_reads + remote.late),
    ),
    (
        "lacuna_kv_remote_failed_writes",
        "Times that the remote store could not be written to",
        |status| remote(status, |remote| remote.failed_writes),
    ),
    (
        "lacuna_kv_remote_given_up",
        "Segments not put into the remote store",
        |status| remote(status, |remote| remote.given_up),
    ),
    (
        "lacuna_kv_swap_left",
        "Preempted requests whose KV pages were moved to the swap file",
        |status| swap(status, |swap| swap.left),
    ),
    (
        "lacuna_kv_swap_returned",
        "Requests whose KV pages came back from the swap file",
        |status| swap(status, |swap| swap.returned),
    ),
    (
        "lacuna_kv_swap_written_bytes",
        "Bytes written to the swap file",
        |status| swap(status, |swap| swap.written_bytes),
    ),
    (
        "lacuna_kv_swap_read_bytes",
        "Bytes read from the swap file",
        |status| swap(status, |swap| swap.read_bytes),
    ),
    (
        "lacuna_kv_swap_failures",
        "Requests computed again because the swap file failed, or memory for coming back was short",
        |status| {
            swap(status, |swap| {
                swap.failed_writes + swap.failed_reads + swap.short_of_memory
            })
        },
    ),
    (
        "lacuna_kv_aside_written_bytes",
        "Bytes of the prefix cache that were put aside",
        |status| aside(status, |files| files.written_bytes),
    ),
    (
        "lacuna_kv_aside_restored_tokens",
        "Prompt tokens whose KV pages came back after they had been put aside",
        |status| aside(status, |files| files.restored_tokens),
    ),
    (
        "lacuna_kv_aside_failures",
        "Times that putting aside or taking back failed, or memory for it was needed otherwise",
        |status| {
            aside(status, |files| {
                let failed = files.failed_writes + files.unreadable + files.damaged;
                failed + files.short_of_memory + files.given_up
            })
        },
    ),
];

/// A figure of what was put aside beside the swap file.
fn aside(status: &Status, figure: fn(&FolderStatus) -> u64) -> u64 {
    status.aside.as_ref().map_or(0, figure)
}

/// A figure of the swap file, if there is one.
fn swap(status: &Status, figure: fn(&SwapStatus) -> u64) -> u64 {
    status.swap.as_ref().map_or(0, figure)
}

/// A figure of the KV cache folder, if there is one.
fn folder(status: &Status, figure: fn(&FolderStatus) -> u64) -> u64 {
    status.folder.as_ref().map_or(0, figure)
}

/// A figure of the store behind the KV cache folder, if there is one.
fn remote(status: &Status, figure: fn(&RemoteStatus) -> u64) -> u64 {
    let folder = status.folder.as_ref();
    let remote = folder.and_then(|folder| folder.remote.as_ref());
    remote.map_or(0, figure)
}

/// The share of what KV pages may take that holds something, if only for later.
fn kv_usage(status: &Status) -> f64 {
    let ledger = &status.ledger;
    let held = ledger.unique.get() + ledger.shared.get() + ledger.pinned_only.get();
    held as f64 / (status.budget.plan.parts.kv_bytes as f64).max(1.0)
}

/// Of all sessions: the ledger knows pages, not rows.
fn slack(status: &Status) -> u64 {
    let sessions = status.sessions.iter();
    sessions.map(|session| session.slack.get()).sum()
}

/// Name, description, and which times.
type Times = (&'static str, &'static str, fn(&Latencies) -> &Histogram);

const HISTOGRAMS: &[Times] = &[
    (
        "vllm:time_to_first_token_seconds",
        "From arrival to the first token",
        |times| &times.first_token,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Between tokens of one reply",
        |times| &times.inter_token,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "From arrival to the end",
        |times| &times.end_to_end,
    ),
    (
        "vllm:request_queue_time_seconds",
        "From arrival to running",
        |times| &times.queue,
    ),
];

fn histogram(times: &Histogram, mut metric: MetricEncoder<'_>) -> fmt::Result {
    let bounds = Histogram::BOUNDS.into_iter().chain([f64::INFINITY]);
    let buckets: Vec<(f64, u64)> = bounds.zip(times.counts().iter().copied()).collect();
    let sum = times.sum().as_secs_f64();
    metric.encode_histogram::<NoLabelSet>(sum, times.count(), &buckets, None)
}
