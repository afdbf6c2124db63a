//! Whose cache is measured: a published model's shape, or that of a model file.

use std::num::NonZeroUsize;

use anyhow::{Result, ensure};
use lacuna_kernels::AttentionShape;
use lacuna_kernels::DType;
use lacuna_kv::Geometry;
use lacuna_kv::{KvElements, Layer};
use lacuna_models::spec::Attention;
use lacuna_models::synth::{self, Shape};
use lacuna_models::{Model, ModelSpec};

use crate::arguments::KvBenchArgs;
use lacuna_cli::output::Usage;
use lacuna_cli::{ModelArgs, open_files};

pub(super) struct Subject {
    pub(super) name: String,
    pub(super) geometry: Geometry,
    pub(super) attention: AttentionShape,
    /// Bytes of the model's weights; of a shape, in q8_0.
    pub(super) weight_bytes: u64,
}

impl Subject {
    pub(super) fn find(args: &KvBenchArgs, elements: KvElements) -> Result<Self> {
        let mut subject = match Shape::find(&args.model) {
            Ok(shape) => Self::of_shape(shape, elements)?,
            Err(_) => Self::of_file(args, elements)?,
        };
        if let Some(layers) = args.layers.map(NonZeroUsize::get) {
            let whole = subject.layers();
            ensure!(
                layers <= whole,
                Usage(format!("--layers {layers}: {} has {whole}", subject.name))
            );
            let first = subject.geometry.layers()[..layers].to_vec();
            let states = (0..layers).map(|layer| subject.geometry.state_elements(Layer(layer)));
            let states = states.collect();
            subject.geometry = Geometry::new(first, elements)?.with_states(states)?;
        }
        Ok(subject)
    }

    fn of_shape(shape: &'static Shape, elements: KvElements) -> Result<Self> {
        let model = synth::Model::new(shape, DType::Q8_0);
        let spec = model.description()?.spec;
        Ok(Self {
            name: shape.name.to_owned(),
            geometry: spec.kv_geometry(elements)?,
            attention: attention(&spec, shape.name)?,
            weight_bytes: model.file_len()?,
        })
    }

    fn of_file(args: &KvBenchArgs, elements: KvElements) -> Result<Self> {
        let model = Model::load(open_files(&ModelArgs {
            model: args.model.clone(),
            json: args.json,
            eyes: lacuna_cli::EyesArgs::default(),
        })?)?;
        let spec = model.spec();
        Ok(Self {
            name: args.model.clone(),
            geometry: spec.kv_geometry(elements)?,
            attention: attention(spec, &args.model)?,
            weight_bytes: model.weight_bytes(),
        })
    }

    pub(super) fn layers(&self) -> usize {
        self.geometry.layers().len()
    }

    pub(super) fn bytes_per_token(&self) -> usize {
        self.geometry.bytes_per_token()
    }
}

/// The attention of the first layer that has some.
fn attention(spec: &ModelSpec, name: &str) -> Result<AttentionShape> {
    let mut layers = spec.layers.iter();
    let first = layers.find_map(|layer| layer.attention.as_ref());
    first.map(Attention::shape).ok_or_else(|| {
        Usage(format!(
            "{name} keeps no rows of keys and values; use `bench speed`"
        ))
        .into()
    })
}
