//! Opening the model an argument names, downloading it first where that is what the name says.

use std::fs::File;
use std::io::{BufWriter, IsTerminal};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lacuna_engine::{DraftModel, EngineConfig, ServiceConfig};
use lacuna_files::hub::{Hub, Settings};
use lacuna_files::{ModelFiles, ModelSource, Progress};
#[cfg(feature = "vulkan")]
use lacuna_gpu::PageTable;
use lacuna_models::plan::Residency;
use lacuna_models::trace::TraceWriter;
use lacuna_models::{ComputeDevice, Description, Loading, Model};

use crate::arguments::{
    DeviceArgs, DeviceName, DraftArgs, EngineArgs, EyesArgs, ModelArgs, ServiceArgs,
};
use crate::output;

/// The files of the model that was named.
///
/// # Errors
/// What the files, or the hub, are refused for.
pub fn open_files(args: &ModelArgs) -> Result<ModelFiles> {
    let path = match ModelSource::parse(&args.model)? {
        ModelSource::Demo => return Ok(lacuna_models::demo()),
        ModelSource::File(path) | ModelSource::Folder(path) => path,
        ModelSource::Hub(id) => {
            let hub = Hub::new(Settings::from_env()?);
            hub.fetch(&id, &mut Bars::default())
                .with_context(|| format!("cannot fetch `{}`", args.model))?
        }
    };
    Ok(ModelFiles::open(&path)?)
}

/// The model that was named, ready to run.
///
/// # Errors
/// What the files, or the hub, are refused for.
pub fn open(args: &ModelArgs) -> Result<Arc<Model>> {
    let files = open_files(args)?;
    let model = Model::load(files).with_context(|| format!("cannot load `{}`", args.model))?;
    Ok(Arc::new(model))
}

/// The same for a model that is to run as `config` says: what could not is refused before it is loaded.
///
/// # Errors
/// As [`open`], and [`lacuna_engine::EngineError`] for what does not fit the budget or the system.
pub fn open_to_run(args: &ModelArgs, config: &EngineConfig) -> Result<Arc<Model>> {
    open_to_run_files(args, open_files(args)?, config)
}

/// The same where the context follows from something else than `--ctx`: `asked_by` says what.
///
/// # Errors
/// As [`open_to_run`].
pub fn open_to_run_for(
    args: &ModelArgs,
    config: &EngineConfig,
    asked_by: &str,
) -> Result<Arc<Model>> {
    open_asked(args, open_files(args)?, config, asked_by)
}

/// The same for files that are open already.
///
/// # Errors
/// As [`open_to_run`].
pub fn open_to_run_files(
    args: &ModelArgs,
    files: ModelFiles,
    config: &EngineConfig,
) -> Result<Arc<Model>> {
    open_asked(args, files, config, "--ctx")
}

fn open_asked(
    args: &ModelArgs,
    files: ModelFiles,
    config: &EngineConfig,
    asked_by: &str,
) -> Result<Arc<Model>> {
    let cannot_load = || format!("cannot load `{}`", args.model);
    let files = config.with_head(files).with_context(cannot_load)?;
    let files = config.with_neurons(files, &mut Bars::default())?;
    let made = lacuna_models::describe(&files).with_context(cannot_load)?;
    if let Some(asked) = config.context_tokens {
        warn_of_context((asked_by, asked), made.spec.context_tokens);
    }
    let made = config.guessing(&files, made)?;
    let residency = config.check(&files, &made)?;
    tell_of_conversion(&files);
    load_as(args, (files, made), residency, config.device.is_some())
}

impl DeviceArgs {
    /// `config` on the device that was named, with as many of its layers as were asked for.
    ///
    /// # Errors
    /// As [`DeviceArgs::layers`]; where there is no such device, or it computes wrong numbers.
    pub fn set(&self, config: EngineConfig) -> Result<EngineConfig> {
        let layers = self.layers();
        Ok(EngineConfig {
            device_layers: layers.map_err(|error| output::Usage(error.to_string()))?,
            device: self.open()?,
            ..config
        })
    }

    /// The device that was named, open and tested; none for the processor.
    fn open(&self) -> Result<Option<Arc<dyn ComputeDevice>>> {
        match self.device {
            DeviceName::Cpu => Ok(None),
            #[cfg(feature = "vulkan")]
            DeviceName::Vulkan(place) => {
                let config = lacuna_gpu::VulkanConfig {
                    place,
                    page_table: page_table()?,
                    ..lacuna_gpu::VulkanConfig::default()
                };
                let device = lacuna_gpu::Vulkan::open_with(config);
                let device = device.context("cannot use --device vulkan")?;
                // Where programs keep what they can make again.
                let folder = crate::user_folder("XDG_CACHE_HOME", ".cache", "lacuna/kernels");
                let device = match folder {
                    Some(folder) => device.keeping_kernels_in(folder),
                    None => device,
                };
                let pages = match device.device().page_table() {
                    PageTable::Device => "",
                    PageTable::Lookup => ", whose kernels look pages of KV rows up",
                    PageTable::Unused => {
                        ", which has no pages: KV rows have all memory from the start"
                    }
                };
                crate::tell!("computing on {}{pages}", output::name(device.name()));
                Ok(Some(Arc::new(device)))
            }
        }
    }
}

/// How pages of a Vulkan device are found at most: what the variable names, else by its own page table.
#[cfg(feature = "vulkan")]
fn page_table() -> Result<PageTable> {
    const VARIABLE: &str = "LACUNA_VULKAN_PAGES";
    let name = std::env::var(VARIABLE).unwrap_or_default();
    if name.is_empty() {
        return Ok(PageTable::default());
    }
    let found = PageTable::ALL.into_iter().find(|it| it.name() == name);
    let known = PageTable::ALL.map(PageTable::name).join(", ");
    let unknown = || output::Usage(format!("{VARIABLE} is `{name}`; use one of {known}"));
    Ok(found.ok_or_else(unknown)?)
}

/// `config` with the draft model that was named, ready to guess for a model that runs with it, or with the head that was. Before
/// that model is opened, so that the budget is checked with both.
///
/// # Errors
/// As [`open`], and [`lacuna_engine::EngineError`] for a model that cannot guess.
pub fn with_draft(args: &DraftArgs, config: EngineConfig) -> Result<EngineConfig> {
    let Some((name, files)) = open_draft(args)? else {
        return Ok(config);
    };
    if lacuna_models::is_head(&files) {
        return Ok(EngineConfig {
            speculation: args.of_head(config.speculation)?,
            head: Some(Arc::new(files)),
            ..config
        });
    }
    let cannot_load = || format!("cannot load the draft model `{name}`");
    let made = lacuna_models::describe(&files).with_context(cannot_load)?;
    let plan = config.plan_of_draft(&files, &made)?;
    let model = Model::load_as(
        files,
        Loading {
            residency: plan.residency,
            device: None,
            progress: &mut Bars::default(),
        },
    );
    let draft = DraftModel::new(Arc::new(model.with_context(cannot_load)?))?;
    Ok(EngineConfig {
        draft: Some(match args.draft_tokens {
            Some(most) => draft.with_most(most),
            None => draft,
        }),
        ..config
    })
}

/// The name and the files of the draft model, or of the head, that was named.
///
/// # Errors
/// As [`open_files`].
pub fn open_draft(args: &DraftArgs) -> Result<Option<(&str, ModelFiles)>> {
    let Some(name) = &args.draft_model else {
        return Ok(None);
    };
    let files = open_files(&ModelArgs {
        model: name.clone(),
        json: true,
        eyes: EyesArgs::default(),
    });
    Ok(Some((name, files?)))
}

impl ServiceArgs {
    /// The service that the arguments describe, with the draft model that they name, which is loaded.
    ///
    /// # Errors
    /// As [`with_draft`].
    pub fn open(&self, engine: &EngineArgs) -> Result<ServiceConfig> {
        let config = self.config(engine);
        let EngineConfig {
            speculation,
            draft,
            head,
            ..
        } = with_draft(&self.speculation.draft, config.engine_config())?;
        Ok(ServiceConfig {
            engine: EngineConfig {
                speculation,
                draft,
                head,
                ..config.engine
            },
            ..config
        })
    }
}

/// Loads a model with weights where `residency` says, and what makes rows of images for it, and tells how they are read.
fn load_as(
    args: &ModelArgs,
    (files, made): (ModelFiles, Description),
    residency: Residency,
    on_device: bool,
) -> Result<Arc<Model>> {
    let mut bars = Bars::default();
    let loading = Loading {
        residency,
        device: None,
        progress: &mut bars,
    };
    let model = Model::load_described(files, made, loading);
    let model = model.with_context(|| format!("cannot load `{}`", args.model))?;
    if let (Some(reading), Some(held)) = (model.reading(), &model.weight_plan().loaded) {
        let kept = output::bytes(held.pinned_bytes);
        if let Some(experts) = &held.experts {
            crate::tell!(
                "experts: {} of {} in each layer at once, {}",
                experts.slots,
                experts.experts,
                output::bytes(experts.bytes)
            );
        }
        if let Some(neurons) = &held.neurons {
            crate::tell!(
                "neurons: {} of {} in each of {} blocks at once, {}",
                neurons.slots,
                neurons.neurons,
                neurons.layers,
                output::bytes(neurons.bytes)
            );
        }
        match held.streamed_bytes {
            0 => crate::tell!("weights in memory: {kept}, read {reading}"),
            streamed => crate::tell!(
                "weights in memory: {kept}; {} more are read for each pass, {reading}",
                output::bytes(streamed)
            ),
        }
    }
    // No device gives parts of images to further layers, and one would refuse a folder that has an encoder of its own.
    let has_parts = (model.spec().images).is_some_and(|images| images.deepstack > 0);
    if on_device && args.eyes.mmproj.is_none() && has_parts {
        if lacuna_models::describe_images_for(model.files(), model.spec(), None)?.is_some() {
            crate::tell!(
                "warning: with --device the model takes no images: several layers are given parts of them"
            );
        }
        return Ok(Arc::new(model));
    }
    let model = lacuna_models::with_images(model, args.eyes.mmproj.as_deref());
    let model = model.and_then(|model| model.with_image_tokens(args.eyes.tokens()));
    let model = model.with_context(|| format!("cannot load the eyes of `{}`", args.model))?;
    if let Some(blindness) = lacuna_models::blindness(&model)? {
        crate::tell!("warning: {blindness}");
    }
    Ok(Arc::new(model))
}

/// A record of the experts that a model's tokens choose, in a new file.
///
/// # Errors
/// When it cannot be written, or the model has no experts.
pub fn record_experts(path: &Path, model: &Model) -> Result<TraceWriter> {
    let mut routings = model.program().routings();
    ensure!(
        routings.next().is_some(),
        "the model has no experts that could be recorded"
    );
    let file = File::create(path);
    let out = file.map(|file| Box::new(BufWriter::new(file)));
    let writer = out.and_then(|out| TraceWriter::new(model.program(), out));
    writer.with_context(|| format!("cannot write `{}`", path.display()))
}

/// Says which weights are converted, and to what: it takes time and memory.
fn tell_of_conversion(files: &ModelFiles) {
    for total in files.tensors().by_type() {
        if let Some(from) = total.converted_from {
            let (bytes, to) = (output::bytes(total.bytes), &total.type_name);
            crate::tell!("converting weights from {from} to {to}, {bytes}");
        }
    }
}

/// Says so when a context is longer than what the model was made for, with what asks for it, such as `--ctx`, and its
/// tokens. It is allowed, since some models bear it.
pub fn warn_of_context((asked_by, asked): (&str, usize), made_for: usize) {
    if asked > made_for {
        crate::tell!(
            "warning: {asked_by} {asked} is more than the {made_for} tokens that the model was made for; \
             what it writes beyond them is likely to make no sense"
        );
    }
}

/// The name to serve a model under: a hub id as it is; of a path, the last part without `.gguf`.
#[must_use]
pub fn served_name(model: &str) -> String {
    let path = Path::new(model);
    if !path.exists() {
        return model.to_owned();
    }
    let part = match path.extension() {
        Some(extension) if extension == "gguf" => path.file_stem(),
        _ => path.file_name(),
    };
    part.map_or_else(
        || model.to_owned(),
        |part| part.to_string_lossy().into_owned(),
    )
}

/// Progress bars on standard error, where that is a terminal.
pub struct Bars(ProgressBar);

impl Default for Bars {
    /// No bar until something begins.
    fn default() -> Self {
        Self(ProgressBar::hidden())
    }
}

impl Progress for Bars {
    fn begin(&mut self, item: &str, total: Option<u64>) {
        let template = match total {
            Some(_) => "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        let style = ProgressStyle::with_template(template).expect("a valid template");
        let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
        if !std::io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        self.0 = bar
            .with_style(style)
            .with_message(crate::output::name(item));
    }

    fn advance(&mut self, bytes: u64) {
        self.0.inc(bytes);
    }

    fn finish(&mut self) {
        self.0.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::served_name;

    #[test]
    fn a_file_is_served_under_its_name_and_a_hub_id_as_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("tiny-q8_0.gguf");
        std::fs::write(&file, "").expect("written");
        assert_eq!(served_name(&file.to_string_lossy()), "tiny-q8_0");
        assert_eq!(served_name("demo"), "demo");
        assert_eq!(served_name("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B");
    }
}
