//! `lacuna inspect`: what a model file holds, without computing anything.

use std::io::{self, Write};

use anyhow::{Context, Result};
use lacuna::files::TypeTotal;
use lacuna::plan::WeightPlan;
use lacuna::{ElementType, Model, ModelFiles, ModelSpec};
use lacuna_kv::{Geometry, KvElements};
use lacuna_models::LoadError;
use lacuna_models::program::Program;
use lacuna_models::spec::{
    Attention, Experts, FeedForward, Latent, LayerSpec, Mask, Pooled, PooledResult, Pooling,
    Recurrence,
};
use serde::Serialize;

use crate::cli::InspectArgs;
use lacuna_cli::open_files;
use lacuna_cli::output;

#[derive(Serialize)]
struct Report {
    architecture: &'static str,
    layers: usize,
    hidden: usize,
    vocabulary: usize,
    context: usize,
    norm_epsilon: f32,
    /// Layers that are alike, in the order of the first of each.
    kinds: Vec<Kind>,
    /// How the rows of a text become its embedding; none for models that write.
    pooling: Option<PoolingReport>,
    parameters: u64,
    /// Those that one token is multiplied with.
    active_parameters: u64,
    weight_bytes: u64,
    /// Those that computing one token reads.
    active_weight_bytes: u64,
    /// Those of the head that guesses tokens (multi-token prediction), if the files have one.
    head_weight_bytes: Option<u64>,
    /// Those that are converted when the model is loaded, and take memory then.
    converted_weight_bytes: u64,
    /// Memory for matrices that are made of others when the model is loaded.
    derived_weight_bytes: u64,
    tensors: Vec<Tensors>,
    tokenizer: lacuna::TokenizerDescription,
    kv_bytes_per_token: KvBytes,
    kv_window_bytes: KvBytes,
    /// Of the states that layers keep, whatever the length.
    state_bytes: usize,
}

/// Layers that are alike.
#[derive(Serialize, PartialEq)]
struct Kind {
    layers: usize,
    /// None, as the next two, where there is no attention.
    query_heads: Option<usize>,
    kv_heads: Option<usize>,
    head_dim: Option<usize>,
    /// What is kept instead of rows, or beside them.
    state: Option<StateReport>,
    /// Tokens that a token sees; all where there is none.
    window: Option<usize>,
    /// What keys and values are made of and is kept instead of them.
    latent: Option<LatentReport>,
    /// Inner width of the block that all tokens have; none where they have chosen experts only.
    feed_forward: Option<usize>,
    /// Blocks of which each token has a few.
    experts: Option<ExpertsReport>,
    /// Rotary embedding; none where positions are not encoded.
    rope: Option<String>,
}

/// How the rows of a text become its embedding, or its scores.
#[derive(Serialize)]
struct PoolingReport {
    /// `mean`, `first` or `last`.
    rows: &'static str,
    /// Elements of an embedding; none where there are scores.
    dimensions: Option<usize>,
    /// Whether embeddings have a length of 1.
    normalized: bool,
}

impl PoolingReport {
    fn of(pooled: Pooled, hidden: usize) -> Self {
        let (dimensions, normalized) = match pooled.result {
            PooledResult::Embedding { normalized } => (Some(pooled.width(hidden)), normalized),
            PooledResult::Score(_) => (None, false),
        };
        Self {
            dimensions,
            normalized,
            rows: match pooled.pooling {
                Pooling::Mean => "mean",
                Pooling::First => "first",
                Pooling::Last => "last",
            },
        }
    }
}

/// A state of fixed size.
#[derive(Serialize, PartialEq, Clone, Copy)]
struct StateReport {
    /// `delta-net`, `short-convolution` or `mamba-2`.
    kind: &'static str,
    bytes: usize,
}

impl StateReport {
    fn of(recurrence: Recurrence, hidden: usize) -> Self {
        Self {
            kind: match recurrence {
                Recurrence::DeltaNet(_) => "delta-net",
                Recurrence::ShortConvolution(_) => "short-convolution",
                Recurrence::Mamba2(_) => "mamba-2",
            },
            bytes: recurrence.state_len(hidden) * size_of::<f32>(),
        }
    }
}

/// Latent attention: one row of `rank` elements and those that positions turn.
#[derive(Serialize, PartialEq, Clone, Copy)]
struct LatentReport {
    rank: usize,
    /// Elements of a head's keys, without those that positions turn.
    key_dim: usize,
    value_dim: usize,
    query_rank: Option<usize>,
}

impl LatentReport {
    fn of(latent: Latent) -> Self {
        Self {
            rank: latent.rank,
            key_dim: latent.key_dim,
            value_dim: latent.value_dim,
            query_rank: latent.query_rank,
        }
    }
}

/// A mixture of experts.
#[derive(Serialize, PartialEq, Clone, Copy)]
struct ExpertsReport {
    experts: usize,
    experts_per_token: usize,
    /// Inner width of each.
    feed_forward: usize,
}

impl ExpertsReport {
    fn of(experts: &Experts) -> Self {
        Self {
            experts: experts.routing.experts,
            experts_per_token: experts.routing.used,
            feed_forward: experts.inner,
        }
    }
}

/// Inner width of what all tokens of a layer have.
fn dense_width(layer: &LayerSpec) -> Option<usize> {
    match &layer.feed_forward {
        FeedForward::Gated(block) => Some(block.inner),
        FeedForward::Plain(block) => Some(block.inner),
        FeedForward::Experts(experts) => {
            let dense = experts.dense.map(|block| block.inner);
            dense.or_else(|| experts.shared.map(|block| block.inner))
        }
        FeedForward::None => None,
    }
}

impl Kind {
    fn of(spec: &ModelSpec, layer: &LayerSpec) -> Self {
        let attention = layer.attention.as_ref();
        let of = |size: fn(&Attention) -> usize| attention.map(size);
        let recurrence = layer.recurrence;
        Self {
            layers: 1,
            query_heads: of(|attention| attention.query_heads),
            kv_heads: of(|attention| attention.kv_heads),
            head_dim: of(|attention| attention.head_dim),
            state: recurrence.map(|recurrence| StateReport::of(recurrence, spec.hidden)),
            window: match layer.mask() {
                Some(Mask::Window(tokens)) => Some(tokens.get()),
                _ => None,
            },
            latent: attention
                .and_then(|attention| attention.latent)
                .map(LatentReport::of),
            feed_forward: dense_width(layer),
            experts: layer.feed_forward.experts().map(ExpertsReport::of),
            rope: attention
                .and_then(|attention| attention.rope)
                .map(|rope| spec.ropes[rope].to_string()),
        }
    }
}

/// The kinds of layers, with how many there are of each.
fn kinds(spec: &ModelSpec) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = Vec::new();
    for layer in &spec.layers {
        let kind = Kind::of(spec, layer);
        let alike = |known: &&mut Kind| {
            let one = Kind {
                layers: 1,
                rope: known.rope.clone(),
                ..**known
            };
            one == kind
        };
        match kinds.iter_mut().find(alike) {
            Some(known) => known.layers += 1,
            None => kinds.push(kind),
        }
    }
    kinds
}

#[derive(Serialize)]
struct Tensors {
    r#type: String,
    /// What the file has in their place, if they are converted.
    converted_from: Option<&'static str>,
    count: usize,
    elements: u64,
    bytes: u64,
}

/// Bytes of KV one token takes, by element type.
#[derive(Serialize)]
struct KvBytes {
    f16: usize,
    f32: usize,
}

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    let files = open_files(&args.model)?;
    let report = describe(&files);
    let report = report.with_context(|| format!("cannot load `{}`", args.model.model))?;
    if args.model.json {
        output::json(&report)
    } else {
        print(&report)
    }
}

/// From the directory of tensors, so that nothing is converted. Where loading only maps, the model is
/// loaded too, which finds what is missing.
fn describe(files: &ModelFiles) -> Result<Report, LoadError> {
    let description = lacuna::describe(files)?;
    let spec = &description.spec;
    let weights = WeightPlan::of(files.tensors(), &description);
    if weights.converted_bytes() == 0 && weights.derived_bytes() == 0 {
        Model::load(files.clone())?;
    }
    let totals = weights.by_type();
    // Heads of any size are whole blocks of float elements.
    let kv = |bytes: fn(&Geometry) -> usize| {
        let of = |element| {
            let geometry = spec.kv_geometry(KvElements::both(element));
            geometry.map_or(0, |geometry| bytes(&geometry))
        };
        KvBytes {
            f16: of(ElementType::F16),
            f32: of(ElementType::F32),
        }
    };
    Ok(Report {
        architecture: spec.family,
        layers: spec.layers.len(),
        hidden: spec.hidden,
        vocabulary: spec.vocabulary,
        context: spec.context_tokens,
        norm_epsilon: spec.norm.epsilon,
        kinds: kinds(spec),
        pooling: spec
            .pooled()
            .map(|pooled| PoolingReport::of(pooled, spec.hidden)),
        parameters: totals.iter().map(|total| total.elements).sum(),
        active_parameters: {
            let (layers, logits) = Program::new(spec).products();
            layers + logits
        },
        weight_bytes: weights.bytes(),
        active_weight_bytes: description.active_bytes(&weights),
        head_weight_bytes: WeightPlan::head_bytes(files.tensors(), &description),
        converted_weight_bytes: weights.converted_bytes(),
        derived_weight_bytes: weights.derived_bytes(),
        tensors: totals.iter().map(row).collect(),
        tokenizer: lacuna_models::tokenizer(files, spec)?.describe(),
        kv_bytes_per_token: kv(Geometry::kept_bytes_per_token),
        kv_window_bytes: kv(Geometry::window_bytes),
        state_bytes: kv(Geometry::state_bytes).f32,
    })
}

fn row(total: &TypeTotal) -> Tensors {
    Tensors {
        r#type: total.type_name.to_string(),
        converted_from: total.converted_from,
        count: total.tensors,
        elements: total.elements,
        bytes: total.bytes,
    }
}

fn print(report: &Report) -> Result<()> {
    output::print(|out| {
        shapes(out, report)?;
        weights(out, report)?;
        vocabulary(out, report)
    })
}

fn shapes(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "architecture    {}", report.architecture)?;
    writeln!(out, "layers          {}", report.layers)?;
    writeln!(out, "hidden          {}", report.hidden)?;
    writeln!(out, "vocabulary      {}", report.vocabulary)?;
    writeln!(out, "context         {} tokens", report.context)?;
    for kind in &report.kinds {
        if report.kinds.len() > 1 {
            writeln!(out, "{} layers of", kind.layers)?;
        }
        if let (Some(query), Some(rows), Some(dim)) =
            (kind.query_heads, kind.kv_heads, kind.head_dim)
        {
            writeln!(
                out,
                "heads           {query} query, {rows} key/value, {dim} elements each"
            )?;
        }
        if let Some(StateReport { kind, bytes }) = kind.state {
            writeln!(
                out,
                "state           {} each, {kind}",
                output::bytes(bytes as u64)
            )?;
        }
        if let Some(window) = kind.window {
            writeln!(out, "window          {window} tokens")?;
        }
        if let Some(latent) = kind.latent {
            let LatentReport {
                rank,
                key_dim,
                value_dim,
                ..
            } = latent;
            writeln!(
                out,
                "latent rows     {rank} elements and {} turned by position, of which heads make keys of \
                 {key_dim} and values of {value_dim}",
                kind.head_dim.unwrap_or(rank) - rank
            )?;
        }
        if let Some(width) = kind.feed_forward {
            writeln!(out, "feed-forward    {width}")?;
        }
        if let Some(experts) = &kind.experts {
            writeln!(
                out,
                "experts         {} of {} for each token, feed-forward {}",
                experts.experts_per_token, experts.experts, experts.feed_forward
            )?;
        }
        if kind.query_heads.is_some() {
            let rope = kind.rope.as_deref().unwrap_or("none");
            writeln!(out, "rope            {}", output::name(rope))?;
        }
    }
    if let Some(pooling) = &report.pooling {
        let normalized = if pooling.normalized {
            ", normalized"
        } else {
            ""
        };
        let result = match pooling.dimensions {
            Some(dimensions) => format!("{dimensions} elements"),
            None => "scores of pairs of texts".to_owned(),
        };
        writeln!(
            out,
            "pooling         {}, {result}{normalized}",
            pooling.rows
        )?;
    }
    Ok(())
}

fn weights(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(
        out,
        "parameters      {:.1} M, of which a token is multiplied with {:.1} M",
        report.parameters as f64 / 1e6,
        report.active_parameters as f64 / 1e6
    )?;
    writeln!(
        out,
        "weights         {}, of which a token reads {}",
        output::bytes(report.weight_bytes),
        output::bytes(report.active_weight_bytes)
    )?;
    if let Some(bytes) = report.head_weight_bytes {
        writeln!(
            out,
            "guessing head   {} of them, used with --speculate mtp",
            output::bytes(bytes)
        )?;
    }
    if report.converted_weight_bytes > 0 {
        writeln!(
            out,
            "converted       {} of them, in memory when loaded",
            output::bytes(report.converted_weight_bytes)
        )?;
    }
    if report.derived_weight_bytes > 0 {
        writeln!(
            out,
            "turned round    {} of them, in memory when loaded",
            output::bytes(report.derived_weight_bytes)
        )?;
    }
    for row in &report.tensors {
        writeln!(
            out,
            "  {:<13} {:>5} tensors, {}{}",
            output::name(&row.r#type),
            row.count,
            output::bytes(row.bytes),
            output::converted(row.converted_from)
        )?;
    }
    Ok(())
}

fn vocabulary(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let tokenizer = &report.tokenizer;
    let pre = tokenizer.pre_tokenizer.as_deref();
    writeln!(
        out,
        "tokenizer       {}, {} tokens, pre-tokenizer {}",
        tokenizer.algorithm,
        tokenizer.vocabulary,
        output::name(pre.unwrap_or("as its file says"))
    )?;
    let template = match tokenizer.chat_template {
        true => "yes",
        false => "none",
    };
    writeln!(out, "chat template   {template}")?;
    if report.pooling.is_some() {
        return Ok(());
    }
    let KvBytes { f16, f32 } = report.kv_bytes_per_token;
    writeln!(
        out,
        "KV per token    {} f16, {} f32",
        output::bytes(f16 as u64),
        output::bytes(f32 as u64)
    )?;
    let KvBytes { f16, f32 } = report.kv_window_bytes;
    if f16 > 0 {
        writeln!(
            out,
            "KV of windows   {} f16, {} f32, whatever the length",
            output::bytes(f16 as u64),
            output::bytes(f32 as u64)
        )?;
    }
    if report.state_bytes > 0 {
        writeln!(
            out,
            "states          {} f32, whatever the length",
            output::bytes(report.state_bytes as u64)
        )?;
    }
    Ok(())
}
