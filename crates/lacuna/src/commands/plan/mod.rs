//! `lacuna plan`: where every byte goes, before any of them is used.

mod report;
mod table;

use anyhow::{Context, Result, bail};
use lacuna::files::{ModelSource, OutputFile};
use lacuna::plan::{Budget, Change, Demand, Plan, PlanError, Verdict, WeightPlan};
use lacuna::{Config, DType, synth};
use lacuna_kv::KvCache;

use crate::cli::PlanArgs;
use lacuna_cli::open_files;
use lacuna_cli::output::{self, Usage};
use report::Report;

/// What is planned for.
struct Subject {
    config: Config,
    weights: WeightPlan,
}

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let Subject { config, weights } = subject(args)?;
    let demand = Demand {
        context_tokens: args.ctx.map_or(config.context_tokens, usize::from),
        batch_tokens: args.batch.get(),
        logits: args.logits,
        sequences: args.sequences.get(),
    };
    let cache = KvCache::new(config.kv_geometry(args.kv_type), args.kv).map_err(PlanError::from)?;
    let plan = Plan::new(&config, weights, &cache, &demand)?;
    debug_assert_eq!(plan.arena.verify(&config), Ok(()), "the plan holds");
    let verdict = args
        .budget
        .map(|budget| plan.within(Budget(budget.0), &config, &demand))
        .transpose()?;
    if let Some(path) = &args.map {
        OutputFile::write_whole(path, plan.map().to_string().as_bytes())
            .with_context(|| format!("cannot write `{}`", path.display()))?;
    }
    let report = Report::new(args, &config, &demand, &plan, verdict.as_ref());
    if args.model.json {
        output::json(&report)?;
    } else {
        table::print(&report)?;
    }
    match verdict {
        Some(Verdict::Exceeds { changes, .. }) => bail!(refusal(&changes)),
        _ => Ok(()),
    }
}

/// The model that was named: its files, or else the shape of that name.
fn subject(args: &PlanArgs) -> Result<Subject> {
    let name = &args.model.model;
    let is_file = matches!(
        ModelSource::parse(name),
        Ok(ModelSource::Demo | ModelSource::File(_) | ModelSource::Folder(_))
    );
    match synth::Shape::find(name) {
        Ok(shape) if !is_file => from_shape(shape, args.dtype.unwrap_or(DType::Q8_0)),
        Err(error) if !is_file && !name.contains(['/', '.']) => bail!(Usage(format!(
            "`{name}` is no file, folder or hub id, and {error}"
        ))),
        _ if args.dtype.is_some() => bail!(Usage(
            "--dtype is for shapes; the weights of a file have the types they have".into()
        )),
        _ => from_files(args),
    }
}

fn from_shape(shape: &'static synth::Shape, dtype: DType) -> Result<Subject> {
    let model = synth::Model::new(shape, dtype);
    Ok(Subject {
        config: model.description()?.config,
        weights: model.weights()?,
    })
}

fn from_files(args: &PlanArgs) -> Result<Subject> {
    let files = open_files(&args.model)?;
    let described = lacuna::describe(&files);
    let description = described.with_context(|| format!("cannot load `{}`", args.model.model))?;
    Ok(Subject {
        config: description.config,
        weights: WeightPlan::of(files.tensors()),
    })
}

/// What a plan that is too large ends with.
fn refusal(changes: &[Change]) -> String {
    let Some((last, others)) = changes.split_last() else {
        return "the plan does not fit the budget: the weights alone are too large; use a smaller model \
                or a smaller weight type"
            .to_owned();
    };
    let mut text = "the plan does not fit the budget; it would with ".to_owned();
    for change in others {
        text += &format!("{}, or with ", argument(change));
    }
    text + &argument(last)
}

/// A change as it is typed.
fn argument(change: &Change) -> String {
    match change {
        Change::Context(tokens) => format!("--ctx {tokens}"),
        Change::KvElements(element) => format!("--kv-type {}", element.name()),
        Change::Batch(tokens) => format!("--batch {tokens}"),
    }
}
