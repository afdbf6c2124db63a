//! `lacuna inspect`: what a model file holds, without computing anything.

use std::io::{self, Write};

use anyhow::Result;
use lacuna::files::TypeTotal;
use lacuna::{ElementType, Model};
use serde::Serialize;

use crate::cli::InspectArgs;
use lacuna_cli::open;
use lacuna_cli::output;

#[derive(Serialize)]
struct Report {
    architecture: &'static str,
    layers: usize,
    hidden: usize,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    feed_forward: usize,
    vocabulary: usize,
    context: usize,
    rope: String,
    norm_epsilon: f32,
    parameters: u64,
    weight_bytes: u64,
    tensors: Vec<Tensors>,
    tokenizer: lacuna::TokenizerDescription,
    kv_bytes_per_token: KvBytes,
}

#[derive(Serialize)]
struct Tensors {
    r#type: String,
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
    let model = open(&args.model)?;
    let report = describe(&model);
    if args.model.json {
        output::json(&report)
    } else {
        print(&report)
    }
}

fn describe(model: &Model) -> Report {
    let config = model.config();
    let totals = model.files().tensors().by_type();
    let kv = |element: ElementType| 2 * config.layers * element.bytes(config.kv_width());
    Report {
        architecture: config.architecture,
        layers: config.layers,
        hidden: config.hidden,
        query_heads: config.query_heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        feed_forward: config.feed_forward,
        vocabulary: config.vocabulary,
        context: config.context_tokens,
        rope: config.rope.to_string(),
        norm_epsilon: config.norm_epsilon,
        parameters: totals.iter().map(|total| total.elements).sum(),
        weight_bytes: totals.iter().map(|total| total.bytes).sum(),
        tensors: totals.iter().map(row).collect(),
        tokenizer: model.tokenizer().describe(),
        kv_bytes_per_token: KvBytes {
            f16: kv(ElementType::F16),
            f32: kv(ElementType::F32),
        },
    }
}

fn row(total: &TypeTotal) -> Tensors {
    Tensors {
        r#type: total.type_name.to_string(),
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
    writeln!(
        out,
        "heads           {} query, {} key/value, {} elements each",
        report.query_heads, report.kv_heads, report.head_dim
    )?;
    writeln!(out, "feed-forward    {}", report.feed_forward)?;
    writeln!(out, "vocabulary      {}", report.vocabulary)?;
    writeln!(out, "context         {} tokens", report.context)?;
    writeln!(out, "rope            {}", output::name(&report.rope))
}

fn weights(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(
        out,
        "parameters      {:.1} M",
        report.parameters as f64 / 1e6
    )?;
    writeln!(
        out,
        "weights         {}",
        output::bytes(report.weight_bytes)
    )?;
    for row in &report.tensors {
        writeln!(
            out,
            "  {:<13} {:>5} tensors, {}",
            output::name(&row.r#type),
            row.count,
            output::bytes(row.bytes)
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
    let KvBytes { f16, f32 } = report.kv_bytes_per_token;
    writeln!(
        out,
        "KV per token    {} f16, {} f32",
        output::bytes(f16 as u64),
        output::bytes(f32 as u64)
    )
}
