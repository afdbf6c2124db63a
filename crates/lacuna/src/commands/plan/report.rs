//! The plan as `--json` prints it.

use lacuna::plan::{
    Budget, Demand, DevicePlan, DraftMemory, ExpertSlots, KvPlan, Parts, Placement, Plan, Rates,
    Residency, Total, Verdict, WeightPlan,
};
use lacuna::trace::Trace;
use lacuna::{DeviceStatus, DraftModel, ModelSpec};
use lacuna_kv::Side;
use serde::Serialize;

use super::images::Images;
use super::{Active, argument};
use crate::cli::PlanArgs;

#[derive(Serialize)]
pub(super) struct Report<'a> {
    pub(super) model: &'a str,
    pub(super) architecture: &'static str,
    pub(super) layers: usize,
    pub(super) context_tokens: usize,
    pub(super) sequences: usize,
    pub(super) batch_tokens: usize,
    pub(super) logits: &'static str,
    pub(super) logit_rows: usize,
    pub(super) activations: Activations,
    pub(super) kv: Kv,
    /// Those that were asked about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) images: Option<Images>,
    pub(super) weights: Weights,
    /// A draft model beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) draft: Option<Draft>,
    /// The head that guesses tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) head: Option<Head>,
    /// A device that computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) device: Option<Device>,
    /// Where weights are while the model runs.
    pub(super) residency: Placed,
    /// Before the first token.
    pub(super) empty: Sum,
    /// With every context full.
    pub(super) full: Sum,
    /// What is had from KV pages and weights while replies of a server are held to grammars.
    pub(super) constraint_bytes: u64,
    pub(super) budget: Option<Fit>,
}

/// What a device has that computes: of the model, and KV pages with every context full.
#[derive(Serialize)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) layers: usize,
    pub(super) host_layers: usize,
    pub(super) weight_bytes: u64,
    pub(super) activation_bytes: u64,
    pub(super) staging_bytes: u64,
    pub(super) kv_bytes: u64,
    /// The most that KV pages can have in all before its memory is full.
    pub(super) most_kv_bytes: Option<u64>,
}

impl Device {
    pub(super) fn new(status: DeviceStatus, plan: DevicePlan) -> Self {
        Self {
            name: status.name,
            layers: status.layers,
            host_layers: status.host_layers,
            weight_bytes: status.memory.weight_bytes,
            activation_bytes: status.memory.activation_bytes,
            staging_bytes: status.memory.staging_bytes,
            kv_bytes: status.kv.get(),
            most_kv_bytes: plan.most_kv_bytes,
        }
    }
}

/// What a draft model takes. It guesses as far as KV pages are left for it, so its own are in no total.
#[derive(Serialize)]
pub(super) struct Draft {
    pub(super) model: String,
    #[serde(flatten)]
    pub(super) memory: DraftMemory,
    pub(super) kv_bytes_per_token: usize,
    /// With every context full.
    pub(super) kv_bytes: u64,
}

impl Draft {
    pub(super) fn of(args: &PlanArgs, plan: &Plan) -> Self {
        Self {
            model: args
                .speculation
                .draft
                .draft_model
                .clone()
                .unwrap_or_default(),
            memory: DraftMemory::of(plan),
            kv_bytes_per_token: plan.kv.geometry.bytes_per_token(),
            kv_bytes: plan.kv.committed_bytes(plan.kv.context_tokens),
        }
    }
}

/// What the head that guesses tokens takes. It guesses as far as KV pages are left for it, so its own are in no total.
#[derive(Serialize)]
pub(super) struct Head {
    /// Among the model's.
    pub(super) weight_bytes: u64,
    pub(super) activation_bytes: u64,
    pub(super) kv_bytes_per_token: usize,
}

#[derive(Serialize)]
pub(super) struct Activations {
    pub(super) bytes: usize,
    /// What the buffers would take side by side.
    pub(super) unshared_bytes: usize,
    /// What the fullest step holds: no arena can be smaller.
    pub(super) live_bytes: usize,
    pub(super) buffers: Vec<Buffer>,
}

#[derive(Serialize)]
pub(super) struct Buffer {
    pub(super) buffer: &'static str,
    pub(super) shape: [usize; 2],
    pub(super) r#type: &'static str,
    pub(super) offset: usize,
    pub(super) end: usize,
    pub(super) bytes: usize,
    pub(super) first_step: &'static str,
    pub(super) last_step: &'static str,
}

#[derive(Serialize)]
pub(super) struct Kv {
    pub(super) policy: String,
    pub(super) key_type: &'static str,
    pub(super) value_type: &'static str,
    pub(super) page_bytes: u64,
    pub(super) buffers: usize,
    pub(super) bytes_per_token: usize,
    /// Of one sequence, whatever its length.
    pub(super) state_bytes: usize,
    /// What a sequence with states takes beside them while tokens of it are guessed, of the guesses that are usual.
    pub(super) guessing_state_bytes: usize,
    /// Where the prefix cache can go on in places only: what one takes, and from how many tokens on it pays.
    pub(super) resume_points: Option<Resume>,
    /// All rows of all contexts.
    pub(super) row_bytes: u64,
    pub(super) reserved_bytes: u64,
    pub(super) committed: Vec<Committed>,
}

#[derive(Serialize)]
pub(super) struct Resume {
    pub(super) bytes: u64,
    pub(super) every_tokens: usize,
}

#[derive(Serialize)]
pub(super) struct Committed {
    /// Tokens every sequence holds.
    pub(super) tokens: usize,
    pub(super) row_bytes: u64,
    pub(super) committed_bytes: u64,
    /// The most that was committed on the way.
    pub(super) peak_bytes: u64,
}

#[derive(Serialize)]
pub(super) struct Weights {
    pub(super) bytes: u64,
    /// Those that computing one token reads.
    pub(super) active_bytes: u64,
    pub(super) parameters: u64,
    /// Those that one token is multiplied with.
    pub(super) active_parameters: u64,
    pub(super) copied_bytes: u64,
    /// Of memory; `bytes` are those in the file.
    pub(super) converted_bytes: u64,
    /// Memory for matrices that are made of others when the model is loaded.
    pub(super) derived_bytes: u64,
    pub(super) types: Vec<WeightType>,
}

/// Which weights are in memory, and what reading the others takes.
#[derive(Serialize)]
pub(super) struct Placed {
    #[serde(flatten)]
    pub(super) residency: Residency,
    /// What a token is expected to find of its experts.
    pub(super) expert_forecast: Option<ExpertForecast>,
    /// What a token takes at least, by the rates that were given.
    pub(super) seconds_per_token: Option<f64>,
    pub(super) tokens_per_second: Option<f64>,
    /// As KV pages take what contexts need, from empty ones to full ones.
    pub(super) by_tokens: Vec<PlacedAt>,
}

/// Which weights contexts of so many tokens leave in memory, and what a token takes then, whose attention reads all rows of
/// one.
#[derive(Serialize)]
pub(super) struct PlacedAt {
    pub(super) tokens: usize,
    pub(super) pinned_bytes: u64,
    pub(super) ring_bytes: u64,
    pub(super) streamed_bytes: u64,
    pub(super) seconds_per_token: Option<f64>,
    pub(super) tokens_per_second: Option<f64>,
}

/// What slots find of a token's experts.
#[derive(Serialize)]
pub(super) struct ExpertForecast {
    pub(super) hit_rate: f64,
    /// Where that is from: a record, or what others have measured.
    pub(super) from: &'static str,
    pub(super) read_bytes_per_token: u64,
    /// Whether it helps to keep what was used last, in words, where a record says it.
    pub(super) finding: Option<&'static str>,
}

#[derive(Serialize)]
pub(super) struct WeightType {
    pub(super) r#type: String,
    /// What the file has in their place, if they are converted.
    pub(super) converted_from: Option<&'static str>,
    pub(super) tensors: usize,
    pub(super) elements: u64,
    pub(super) bytes: u64,
}

#[derive(Serialize)]
pub(super) struct Sum {
    /// What is committed, by what it is for.
    #[serde(flatten)]
    pub(super) parts: Parts,
    /// All of that.
    pub(super) bytes: u64,
    /// The most it came to on the way.
    pub(super) peak_bytes: u64,
    /// Beside it: weights in the mapped file, which the system can evict.
    pub(super) mapped_weight_bytes: u64,
}

#[derive(Serialize)]
pub(super) struct Fit {
    pub(super) bytes: u64,
    /// How it is divided, as `run` and `serve` do; none when even one token is too much.
    pub(super) parts: Option<Budget>,
    /// Whether all contexts can be full.
    pub(super) fits: bool,
    pub(super) spare_bytes: u64,
    pub(super) excess_bytes: u64,
    /// Arguments each of which makes it fit.
    pub(super) changes: Vec<String>,
}

impl<'a> Report<'a> {
    pub(super) fn new(
        args: &'a PlanArgs,
        spec: &ModelSpec,
        demand: &Demand,
        (plan, active, trace): (&Plan, Active, Option<&Trace>),
        verdict: Option<&Verdict>,
    ) -> Self {
        let limits = plan.arena.limits();
        let budget = args.budget.zip(verdict);
        Self {
            model: &args.model.model,
            architecture: spec.family,
            layers: spec.layers.len(),
            context_tokens: demand.context_tokens,
            sequences: demand.sequences,
            batch_tokens: limits.tokens,
            logits: demand.logits.name(),
            logit_rows: limits.logit_rows,
            activations: activations(plan),
            kv: kv(&plan.kv),
            images: None,
            draft: None,
            head: None,
            device: None,
            weights: weights(&plan.weights, active),
            residency: placed(args, plan, active, trace),
            empty: sum(plan.empty()),
            full: sum(plan.full()),
            constraint_bytes: plan.program.constraint_bytes,
            budget: budget.map(|(budget, verdict)| fit(budget.0, plan, verdict)),
        }
    }
}

fn activations(plan: &Plan) -> Activations {
    let arena = &plan.arena;
    let mut places: Vec<&Placement> = arena.placements().iter().collect();
    places.sort_by_key(|place| (place.lifetime.spans()[0].first, place.slot));
    let buffer = |place: &Placement| Buffer {
        buffer: place.name,
        shape: [place.shape.rows, place.shape.width],
        r#type: place.shape.element.name(),
        offset: place.offset,
        end: place.offset + place.bytes,
        bytes: place.bytes,
        first_step: place.steps.0,
        last_step: place.steps.1,
    };
    Activations {
        bytes: arena.bytes(),
        unshared_bytes: arena.unshared_bytes(),
        live_bytes: arena.live_bytes(),
        buffers: places.into_iter().map(buffer).collect(),
    }
}

fn kv(plan: &KvPlan) -> Kv {
    let geometry = &plan.geometry;
    let committed = |tokens| Committed {
        tokens,
        row_bytes: plan.row_bytes(tokens),
        committed_bytes: plan.committed_bytes(tokens),
        peak_bytes: plan.peak_bytes(tokens),
    };
    Kv {
        policy: plan.policy.to_string(),
        key_type: geometry.element(Side::Key).name(),
        value_type: geometry.element(Side::Value).name(),
        page_bytes: plan.page_size.bytes(),
        buffers: plan.sequences * plan.buffers().len(),
        bytes_per_token: geometry.bytes_per_token(),
        state_bytes: geometry.state_bytes(),
        guessing_state_bytes: geometry.rewind_bytes(1 + DraftModel::MOST_TOKENS.get()),
        resume_points: plan.resume_points.map(|points| Resume {
            bytes: points.bytes,
            every_tokens: points.every_tokens,
        }),
        row_bytes: plan.row_bytes(plan.context_tokens),
        reserved_bytes: plan.reserved_bytes(),
        committed: samples(plan.context_tokens).map(committed).collect(),
    }
}

/// No token, one, doubling from there, and all.
fn samples(context: usize) -> impl Iterator<Item = usize> {
    let doubling = std::iter::successors(Some(1usize), |tokens| tokens.checked_mul(2));
    let below = doubling.take_while(move |&tokens| tokens < context);
    std::iter::once(0).chain(below).chain([context])
}

fn weights(plan: &WeightPlan, active: Active) -> Weights {
    let totals = plan.by_type();
    let types = totals.iter().map(|total| WeightType {
        r#type: total.type_name.clone(),
        converted_from: total.converted_from,
        tensors: total.tensors,
        elements: total.elements,
        bytes: total.bytes,
    });
    Weights {
        bytes: plan.mapped_bytes(),
        active_bytes: active.bytes,
        parameters: totals.iter().map(|total| total.elements).sum(),
        active_parameters: active.parameters,
        copied_bytes: plan.copied_bytes(),
        derived_bytes: plan.derived_bytes(),
        converted_bytes: plan.converted_bytes(),
        types: types.collect(),
    }
}

fn placed(args: &PlanArgs, plan: &Plan, active: Active, trace: Option<&Trace>) -> Placed {
    let forecast_of = |residency: &Residency| {
        let slots = residency.experts.as_ref();
        slots.map(|slots| expert_forecast(slots, trace))
    };
    let rates = args.memory_rate.zip(args.disk_rate);
    let seconds = |residency: &Residency, bytes: u64| {
        let hits = forecast_of(residency).map(|forecast| forecast.hit_rate);
        rates.map(|(memory, disk)| {
            let (memory, disk) = (memory.0, disk.0);
            residency.seconds_per_token(bytes, Rates { memory, disk }, hits)
        })
    };
    let context = plan.kv.context_tokens;
    let at = |tokens: usize| {
        let rows = plan.kv.row_bytes(tokens) / plan.kv.sequences as u64;
        let residency = plan.residency_at(tokens);
        let seconds = seconds(&residency, active.bytes + rows);
        PlacedAt {
            tokens,
            pinned_bytes: residency.pinned_bytes,
            ring_bytes: residency.ring_bytes,
            streamed_bytes: residency.streamed_bytes,
            seconds_per_token: seconds,
            tokens_per_second: seconds.map(f64::recip),
        }
    };
    let now = seconds(&plan.residency, active.bytes);
    Placed {
        residency: plan.residency.clone(),
        expert_forecast: forecast_of(&plan.residency),
        seconds_per_token: now,
        tokens_per_second: now.map(f64::recip),
        by_tokens: samples(context).map(at).collect(),
    }
}

fn expert_forecast(slots: &ExpertSlots, trace: Option<&Trace>) -> ExpertForecast {
    let (hit_rate, from) = match trace {
        Some(trace) => (trace.replay(slots.slots).hit_rate(), "the record"),
        None => (slots.expected_hits(), "measurements of Qwen3-30B-A3B"),
    };
    ExpertForecast {
        hit_rate,
        from,
        read_bytes_per_token: slots.bytes_per_token(hit_rate) as u64,
        finding: trace.map(|_| slots.finding(hit_rate)),
    }
}

fn sum(total: Total) -> Sum {
    Sum {
        parts: total.parts,
        bytes: total.bytes(),
        peak_bytes: total.peak_bytes(),
        mapped_weight_bytes: total.mapped_weight_bytes,
    }
}

fn fit(bytes: u64, plan: &Plan, verdict: &Verdict) -> Fit {
    let (spare_bytes, excess_bytes, changes) = match verdict {
        Verdict::Fits { spare } => (*spare, 0, &[][..]),
        Verdict::Exceeds { excess, changes } => (0, *excess, &changes[..]),
    };
    Fit {
        bytes,
        parts: plan.budget().ok(),
        fits: excess_bytes == 0,
        spare_bytes,
        excess_bytes,
        changes: changes.iter().map(argument).collect(),
    }
}
