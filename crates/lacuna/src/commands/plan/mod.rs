//! `lacuna plan`: where every byte goes, before any of them is used.

mod encoder;
mod images;
mod report;
mod table;

use std::fs::File;
use std::io::BufReader;

use anyhow::{Context, Result, bail, ensure};
use lacuna::files::{ModelFiles, ModelSource, OutputFile};
use lacuna::plan::{
    Change, Demand, DraftMemory, Plan, PlanError, Verdict, VocabularySize, WeightMode, WeightPlan,
    WeightSource,
};
use lacuna::trace::Trace;
use lacuna::{
    ByteLength, DType, DraftModel, EngineConfig, EngineError, ModelSpec, PlannedDevice,
    Speculation, synth,
};
use lacuna_kv::KvCache;
use lacuna_models::program::Program;
use lacuna_models::{ColumnsError, Description, describe_images_for};

use crate::cli::PlanArgs;
use images::Images;
use lacuna_cli::output::{self, Usage};
use lacuna_cli::{SpeculationArgs, open_draft, open_files, warn_of_context};
use report::Report;

/// What is planned for.
struct Subject {
    spec: ModelSpec,
    weights: WeightPlan,
    vocabulary: VocabularySize,
    active: Active,
    /// The encoder of images, if some are planned for.
    eyes: Option<ModelSpec>,
    /// Bytes of weights that the head which guesses tokens adds, if it does.
    head: Option<u64>,
}

/// What one token takes of the weights.
#[derive(Clone, Copy)]
struct Active {
    /// Parameters that it is multiplied with.
    parameters: u64,
    /// Bytes read.
    bytes: u64,
}

impl Active {
    fn of(description: &Description, weights: &WeightPlan) -> Self {
        let (layers, logits) = Program::new(&description.spec).products();
        Self {
            parameters: layers + logits,
            bytes: description.active_bytes(weights),
        }
    }
}

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let named = open_draft(&args.speculation.draft)?;
    let (named_head, named_draft) = match named {
        Some((_, files)) if lacuna::is_head(&files) => (Some(files), None),
        draft => (None, draft),
    };
    let Subject {
        spec,
        weights,
        vocabulary,
        active,
        eyes,
        head,
    } = subject(args, named_head.as_ref(), named_draft.as_ref())?;
    if spec.pooled().is_some() {
        ensure!(
            args.speculation.draft.draft_model.is_none() && args.speculation.speculate.is_none(),
            Usage("--draft-model and --speculate are for models that write; leave them out".into())
        );
        return encoder::run(args, &spec, &weights, vocabulary);
    }
    let draft = named_draft.map(|named| draft(args, named)).transpose()?;
    let config = args.device.set(engine(args))?;
    let demand = demand(args, &config, &spec, draft.as_ref())?;
    warn_of_context(("--ctx", demand.context_tokens), spec.context_tokens);
    let device = on_device(args, &config)?;
    let geometry = spec.kv_geometry(args.kv_type).map_err(PlanError::from)?;
    let cache = match &device {
        Some(device) => device.cache.clone(),
        None => KvCache::new(geometry, args.kv).map_err(PlanError::from)?,
    };
    let mut plan = Plan::new(&spec, weights, vocabulary, &cache, &demand)?;
    if let Some(device) = &device {
        plan.device = device.plan;
    }
    debug_assert_eq!(
        plan.arena.verify(&Program::new(&spec)),
        Ok(()),
        "the plan holds"
    );
    let verdict = plan.verdict(&spec, &demand)?;
    if let Some(path) = &args.map {
        OutputFile::write_whole(path, plan.map().to_string().as_bytes())
            .with_context(|| format!("cannot write `{}`", path.display()))?;
    }
    let trace = trace(args, &plan)?;
    let of = (&plan, active, trace.as_ref());
    let eyes = eyes.map(|eyes| Images::new(&args.image, &eyes, &plan.kv.geometry));
    let report = Report {
        images: eyes.transpose()?,
        draft: draft.as_ref().map(|plan| report::Draft::of(args, plan)),
        head: match head {
            Some(weight_bytes) => Some(report::Head {
                weight_bytes,
                activation_bytes: demand.draft.activation_bytes,
                kv_bytes_per_token: spec
                    .head_kv_geometry(args.kv_type)
                    .map_err(PlanError::from)?
                    .map_or(0, |geometry| geometry.bytes_per_token()),
            }),
            None => None,
        },
        device: device.map(|device| report::Device::new(device.status, device.plan)),
        ..Report::new(args, &spec, &demand, of, verdict.as_ref())
    };
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

/// What the device that was named would have of the model, which is loaded for that.
fn on_device(args: &PlanArgs, config: &EngineConfig) -> Result<Option<PlannedDevice>> {
    if config.device.is_none() {
        return Ok(None);
    }
    ensure!(
        synth::Shape::find(&args.model.model).is_err() && !args.neurons,
        Usage(
            "--device is for a model's own file, all of whose weights are mapped; leave it out"
                .into()
        )
    );
    let model = lacuna_cli::open(&args.model)?;
    Ok(config.planned_device(&model)?)
}

/// The record of experts that was named.
fn trace(args: &PlanArgs, plan: &Plan) -> Result<Option<Trace>> {
    let Some(path) = &args.trace else {
        return Ok(None);
    };
    let file = File::open(path).with_context(|| format!("cannot open `{}`", path.display()))?;
    let trace = Trace::read(BufReader::new(file))
        .with_context(|| format!("`{}` is no record of experts", path.display()))?;
    let slots = plan.residency.experts.as_ref();
    let fits =
        slots.is_none_or(|slots| (slots.experts, slots.layers) == (trace.experts, trace.layers));
    if !fits {
        bail!(Usage(format!(
            "`{}` is of a model with {} experts in each of {} layers, and not of this one",
            path.display(),
            trace.experts,
            trace.layers
        )));
    }
    Ok(Some(trace))
}

/// The plan of the draft model that was named, which is opened and not loaded.
fn draft(args: &PlanArgs, (name, files): (&str, ModelFiles)) -> Result<Plan> {
    let cannot_load = || format!("cannot load the draft model `{name}`");
    let description = lacuna::describe(&files).with_context(cannot_load)?;
    Ok(engine(args).plan_of_draft(&files, &description)?)
}

/// The engine that the arguments describe.
fn engine(args: &PlanArgs) -> EngineConfig {
    EngineConfig {
        threads: args.cpu.threads,
        matmul_precision: args.cpu.matmul_precision,
        kv_policy: args.kv,
        kv_elements: args.kv_type,
        context_tokens: args.ctx.map(usize::from),
        batch_tokens: args.batch.get(),
        logits: args.logits,
        sequences: args.sequences.get(),
        budget: args.budget.map(|budget| ByteLength::new(budget.0)),
        weights: args.weights,
        speculation: args.speculation.from_history(),
        ..EngineConfig::default()
    }
}

/// What is asked for, of a model of `spec`, with `draft` beside it.
fn demand(
    args: &PlanArgs,
    config: &EngineConfig,
    spec: &ModelSpec,
    draft: Option<&Plan>,
) -> Result<Demand> {
    let demand = config.demand_of(spec)?;
    Ok(Demand {
        draft_tokens: match draft {
            Some(_) => demand.draft_tokens.max(args.speculation.draft.most()),
            None => demand.draft_tokens,
        },
        draft: draft.map_or(demand.draft, DraftMemory::of),
        weights: match args.weights {
            _ if config.device.is_some() => demand.weights,
            WeightMode::Auto if args.neurons => WeightMode::Fixed(WeightSource::Direct),
            weights => weights,
        },
        ..demand
    })
}

/// The model that was named, with the head that was: its files, or else the shape of that name.
fn subject(
    args: &PlanArgs,
    named_head: Option<&ModelFiles>,
    named_draft: Option<&(&str, ModelFiles)>,
) -> Result<Subject> {
    let name = &args.model.model;
    let is_file = matches!(
        ModelSource::parse(name),
        Ok(ModelSource::Demo | ModelSource::File(_) | ModelSource::Folder(_))
    );
    match synth::Shape::find(name) {
        Ok(_) if !is_file && named_head.is_some() => bail!(Usage(
            "a head is for files of the model that it was made for; a shape has none".into()
        )),
        Ok(shape) if !is_file => from_shape(args, shape),
        Err(error) if !is_file && !name.contains(['/', '.']) => bail!(Usage(format!(
            "`{name}` is no file, folder or hub id, and {error}"
        ))),
        _ if args.dtype.is_some() => bail!(Usage(
            "--dtype is for shapes; the weights of a file have the types they have".into()
        )),
        _ => from_files(args, named_head, named_draft),
    }
}

fn from_shape(args: &PlanArgs, shape: &'static synth::Shape) -> Result<Subject> {
    if !args.image.is_empty() {
        bail!(Usage(
            "--image is for files of models that see; a shape has no encoder of images".into()
        ));
    }
    let model = synth::Model::new(shape, args.dtype.unwrap_or(DType::Q8_0));
    let description = model.description()?;
    let weights = placed_by_neuron(args, model.weights()?, &description)?;
    Ok(Subject {
        vocabulary: VocabularySize::usual(&description.spec),
        active: Active::of(&description, &weights),
        spec: description.spec,
        weights,
        eyes: None,
        head: None,
    })
}

/// Weights of which neurons are read one by one, if they are to be.
fn placed_by_neuron(
    args: &PlanArgs,
    weights: WeightPlan,
    description: &Description,
) -> Result<WeightPlan> {
    if !args.neurons {
        return Ok(weights);
    }
    ensure!(
        args.weights != WeightMode::Fixed(WeightSource::Mmap),
        ColumnsError::Mapped
    );
    Ok(weights.by_neuron(description)?)
}

fn from_files(
    args: &PlanArgs,
    named_head: Option<&ModelFiles>,
    named_draft: Option<&(&str, ModelFiles)>,
) -> Result<Subject> {
    let files = open_files(&args.model)?;
    let files = match named_head {
        Some(head) => lacuna::with_head(files, head)?,
        None => files,
    };
    let described = lacuna::describe(&files);
    let description = described.with_context(|| format!("cannot load `{}`", args.model.model))?;
    if let Some((name, draft)) = named_draft {
        let of_draft = lacuna::describe(draft);
        let of_draft = of_draft.with_context(|| format!("cannot load the draft model `{name}`"))?;
        DraftModel::check_described((draft, &of_draft.spec), (&files, &description.spec))?;
    }
    let eyes = match args.image.is_empty() {
        true => None,
        false => Some(eyes(args, &files, &description.spec)?),
    };
    let description = with_head(args, &files, description, named_head.is_some())?;
    let weights = WeightPlan::of(files.tensors(), &description);
    let head = match description.spec.head {
        Some(_) => WeightPlan::head_bytes(files.tensors(), &description),
        None => None,
    };
    let weights = placed_by_neuron(args, weights, &description)?;
    Ok(Subject {
        vocabulary: VocabularySize::of(&files, &description.spec),
        active: Active::of(&description, &weights),
        spec: description.spec,
        weights,
        eyes,
        head,
    })
}

/// The model with the head that guesses tokens, if that is asked for, or the head `is_named`. One that does not fit is planned
/// all the same where it is asked for by name.
fn with_head(
    args: &PlanArgs,
    files: &ModelFiles,
    description: Description,
    is_named: bool,
) -> Result<Description> {
    let SpeculationArgs { draft, .. } = &args.speculation;
    let asked = args.speculation.from_history();
    let asked = match is_named {
        true => draft.of_head(asked)?,
        false => asked,
    };
    let has_draft = draft.draft_model.is_some() && !is_named;
    match asked {
        Speculation::Mtp { .. } if has_draft => Err(EngineError::HeadAndDraft.into()),
        Speculation::Mtp { .. } if description.has_head() => Ok(description.with_head()),
        Speculation::Mtp { .. } => Err(EngineError::NoHead.into()),
        Speculation::Auto if !has_draft => Ok(engine(args).guessing(files, description)?),
        _ => Ok(description),
    }
}

/// The encoder of images of a model that sees.
fn eyes(args: &PlanArgs, files: &ModelFiles, spec: &ModelSpec) -> Result<ModelSpec> {
    let eyes = &args.model.eyes;
    let found = describe_images_for(files, spec, eyes.mmproj.as_deref());
    let found = found.with_context(|| format!("cannot load the eyes of `{}`", args.model.model))?;
    let found = found.ok_or(lacuna_engine::ImageError::NoEyes)?;
    match eyes.tokens() {
        bounds if bounds.are_none() => Ok(found),
        bounds => Ok(found.with_image_tokens(bounds)?),
    }
}

/// What a plan that is too large ends with.
fn refusal(changes: &[Change]) -> String {
    let Some((last, others)) = changes.split_last() else {
        return "the plan does not fit the budget, whatever its context and batch; raise --budget, or \
                use a smaller model"
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
        Change::KvElements(elements) => format!("--kv-type {elements}"),
        Change::Batch(tokens) => format!("--batch {tokens}"),
    }
}
