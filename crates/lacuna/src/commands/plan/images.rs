//! What images of a prompt take, before they are sent.

use std::path::Path;

use anyhow::{Context, Result};
use lacuna::ModelSpec;
use lacuna::plan::ArenaPlan;
use lacuna_engine::{ImageFormat, ImageHeader, ImageLimits, ImagePlan};
use lacuna_kv::Geometry;
use lacuna_models::ImageShape;
use lacuna_models::program::Program;
use serde::Serialize;

#[derive(Serialize)]
pub(super) struct Images {
    /// The family of the encoder.
    pub(super) encoder: &'static str,
    /// Memory for the pass over the largest image, of which there is one at a time.
    pub(super) arena_bytes: usize,
    /// In the places of tokens, of all images together; marks around them are beside these.
    pub(super) tokens: usize,
    pub(super) kv_bytes: usize,
    pub(super) images: Vec<Image>,
}

#[derive(Serialize)]
pub(super) struct Image {
    /// As it was given.
    pub(super) image: String,
    pub(super) width: u32,
    pub(super) height: u32,
    /// Memory at most until it is a picture as the encoder takes it.
    pub(super) preprocessing_bytes: u64,
    /// Memory for the pass over one of its pictures.
    pub(super) arena_bytes: usize,
    /// That it becomes: several where it is cut into tiles, each a pass of the encoder.
    pub(super) pictures: usize,
    /// Of all pictures.
    pub(super) patches: usize,
    pub(super) tokens: usize,
    pub(super) kv_bytes: usize,
}

impl Images {
    /// Of files or sizes, for the encoder `eyes` and a decoder with KV of this geometry.
    pub(super) fn new(given: &[String], eyes: &ModelSpec, kv: &Geometry) -> Result<Self> {
        let shape = ImageShape::of(eyes).context("the encoder makes no rows of images")?;
        let program = Program::new(eyes);
        let image = |given: &String| -> Result<Image> {
            let header = header(given)?;
            let size = [header.width, header.height].map(|side| side as usize);
            let plan = ImagePlan::new(&shape, size)?;
            let tokens = plan.pictures() * plan.tokens.count();
            let arena = ArenaPlan::new(&program, shape.limits(plan.patches))?;
            Ok(Image {
                image: given.clone(),
                width: header.width,
                height: header.height,
                preprocessing_bytes: plan.preprocessing_bytes(&header),
                arena_bytes: arena.bytes(),
                pictures: plan.pictures(),
                patches: plan.pictures() * plan.patches.count(),
                tokens,
                kv_bytes: tokens * kv.bytes_per_token(),
            })
        };
        let images: Vec<Image> = given.iter().map(image).collect::<Result<_>>()?;
        let arenas = images.iter().map(|image| image.arena_bytes);
        Ok(Self {
            encoder: eyes.family,
            arena_bytes: arenas.max().unwrap_or(0),
            tokens: images.iter().map(|image| image.tokens).sum(),
            kv_bytes: images.iter().map(|image| image.kv_bytes).sum(),
            images,
        })
    }
}

/// That of a file, or of no file but a size, such as 4032x3024.
fn header(given: &str) -> Result<ImageHeader> {
    let limits = ImageLimits::default();
    let size = given.split_once('x').and_then(|(width, height)| {
        let size = [width.parse().ok()?, height.parse().ok()?];
        (!Path::new(given).exists()).then_some(size)
    });
    let header = match size {
        Some(size) => ImageHeader::of(ImageFormat::Png, size, &limits),
        None => {
            let file = std::fs::read(given);
            let file = file.with_context(|| format!("cannot read the image `{given}`"))?;
            ImageHeader::read(&file, &limits)
        }
    };
    header.with_context(|| format!("`{given}` is no image that is taken"))
}
